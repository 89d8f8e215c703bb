"""Methods × attacks × defences: what lies cost, and what it costs to bear them.

    python benchmarks/attacks.py [CONFIG] [section.key=value ...] [--methods fedavg,fedharmony]
        [--attacks sign_flip,...] [--shares 0.1,0.3] [--defences none,trimmed_mean:0.3,...]
        [--seeds 0] [--name NAME]

A defence is a rule of ``federation.robust``, with its ``robust_bad`` (for "norm_bound" its
``robust_bound``) behind a colon. Attacks "none" and "correlation_*" show the misfit's ROC area for
telling liars from others, too: how often a liar's s_k is larger than an honest client's.

Prints one table per defence, mAP with the difference to the same method and defence without lies,
and writes results/attacks.json under the given name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedharmony.data.base import DataSet
from fedharmony.engine.memory import ClientMemory
from fedharmony.errors import ClientLimitError
from fedharmony.experiments.build import assemble
from fedharmony.experiments.evaluate import evaluate
from fedharmony.experiments.machine import switch_torch
from fedharmony.experiments.settings import Settings, load_settings
from fedharmony.methods.fedharmony import FedHarmony

ATTACKS = (
    "not_a_number,sign_flip,scale,noise,free_rider,label_flip,label_off,size,"
    "correlation_ones,correlation_random,correlation_negated,head_sums"
)


def changes_of(attack: str, share: float, defence: str) -> list[str]:
    """Settings of one cell of the table."""
    rule, _, number = defence.partition(":")
    changes = [f"federation.robust={rule}"]
    if number:
        changes.append(f"federation.robust_{'bound' if rule == 'norm_bound' else 'bad'}={number}")
    if attack != "none":
        changes += [f"attack.kind={attack}", f"attack.share={share:g}"]
    if attack == "head_sums":
        changes.append("federation.head_start=closed_form")
    return changes


class Watch:
    """Notes the misfits s_k that FedHarmony finds, by round and client."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []

    def __enter__(self) -> Watch:
        self._before = before = FedHarmony.misfits

        def noted(method: FedHarmony, replies: Any, sent: Any) -> Any:
            misfits = before(method, replies, sent)
            clients = [reply.client for reply in replies]
            every = zip(clients, misfits.values.tolist(), misfits.compared.tolist(), strict=True)
            self.found += [(client, s) for client, s, compared in every if compared]
            return misfits

        FedHarmony.misfits = noted  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        FedHarmony.misfits = self._before  # type: ignore[method-assign]

    def area(self, liars: Iterable[int]) -> float | None:
        """How often a liar's s_k is larger than that of an honest client."""
        bad = torch.tensor([s for client, s in self.found if client in set(liars)])
        good = torch.tensor([s for client, s in self.found if client not in set(liars)])
        return ranked(bad, good) if len(bad) and len(good) else None


def ranked(bad: Tensor, good: Tensor) -> float:
    """Area under the ROC curve: P(bad > good) + ½ P(bad = good)."""
    above = (bad[:, None] > good).double() + (bad[:, None] == good).double() / 2
    return float(above.mean())


def measure(settings: Settings, data: DataSet | None) -> tuple[float, float | None, DataSet]:
    """MAP after the last round, the ROC area of misfits, and the data for the next run."""
    assembly = assemble(settings, data=data)
    with Watch() as watch:
        loop = assembly.federation(ClientMemory())
        try:
            state = loop.run(
                assembly.initial_state(), 0, lambda event: None, lambda round, state: None
            )
        except ClientLimitError:  # too many clients sent nonsense: the run stops, and says so
            return float("nan"), None, assembly.loaded
    found = evaluate(assembly, state).metrics.as_dict()["mAP"]
    return 100 * float(found or 0), watch.area(assembly.attack.liars), assembly.loaded


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", default="demo")
    parser.add_argument("changes", nargs="*")
    parser.add_argument("--methods", default="fedavg,fedharmony")
    parser.add_argument("--attacks", default=ATTACKS)
    parser.add_argument("--shares", default="0.1,0.3")
    parser.add_argument("--defences", default="none,trimmed_mean")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--name")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    attacks = [a for a in options.attacks.split(",") if a != "none"]
    shares = [float(s) for s in options.shares.split(",") if s]
    seeds = [int(s) for s in options.seeds.split(",")]
    methods, defences = options.methods.split(","), options.defences.split(",")
    data, began, cells = None, time.perf_counter(), list[dict[str, Any]]()
    rows = ["none", *(["none, head_start"] if "head_sums" in attacks else []), *attacks]
    for defence in defences:
        head = [f"{m} {100 * s:g} %" for m in methods for s in shares] or methods
        print(f"\n| {defence} | " + " | ".join(head) + " |")
        print("| --- |" + " --: |" * len(head), flush=True)
        for row in rows:
            shown: list[str] = []
            for method in methods:
                for share in shares or [0.0]:
                    found = _cell(cells, row, method, defence, share)
                    if found is None:
                        if row.startswith("correlation") and method.partition(":")[0] == "fedavg":
                            shown.append("–")
                            continue
                        changes = [*options.changes, f"run.method={method}"]
                        if row == "none, head_start":
                            changes += ["federation.head_start=closed_form"]
                        attack = row.partition(",")[0]
                        changes += changes_of(attack, share, defence)
                        base = load_settings(options.config, changes)
                        switch_torch(base.engine)
                        results = []
                        for seed in seeds:
                            value, area, data = measure(base.with_run(seed=seed), data)
                            results.append((value, area))
                        areas = [area for _, area in results if area is not None]
                        found = {
                            "attack": row,
                            "method": method,
                            "defence": defence,
                            "share": share,
                            "mAP": statistics.mean(value for value, _ in results),
                            "area": statistics.mean(areas) if areas else None,
                        }
                        cells.append(found)
                    plain = "none, head_start" if row == "head_sums" else "none"
                    base_cell = _cell(cells, plain, method, defence, share)
                    text = f"{found['mAP']:.1f}"
                    if not row.startswith("none") and base_cell is not None:
                        text += f" ({found['mAP'] - base_cell['mAP']:+.1f})"
                    if found["area"] is not None:
                        text += f" [{found['area']:.2f}]"
                    shown.append(text)
            print(f"| {row} | " + " | ".join(shown) + " |", flush=True)
    print(f"\n{time.perf_counter() - began:.0f} s")
    options.out.mkdir(exist_ok=True)
    file = options.out / "attacks.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    kept[options.name or options.config] = {
        "changes": [c for c in options.changes if "/" not in c],
        "seeds": seeds,
        "cells": cells,
    }
    file.write_text(json.dumps(kept, indent=1) + "\n")


def _cell(
    cells: list[dict[str, Any]], attack: str, method: str, defence: str, share: float
) -> dict[str, Any] | None:
    """A result that is there already; without an attack the share does not matter."""
    wanted = {"attack": attack, "method": method, "defence": defence}
    for cell in cells:
        if wanted.items() <= cell.items() and (attack.startswith("none") or cell["share"] == share):
            return cell
    return None


if __name__ == "__main__":
    main()
