"""Methods × attacks × defences: what lies cost, and what it costs to bear them.

    python benchmarks/attacks.py [CONFIG] [section.key=value ...] [--methods fedavg,fedharmony]
        [--attacks sign_flip,...] [--shares 0.1,0.3] [--defences none,same_direction,...]
        [--seeds 0] [--jobs 1] [--name NAME]

A defence is a rule of ``federation.robust``; behind a colon its ``robust_bad`` (of "norm_bound" and
"same_direction" its ``robust_bound``). "head_sums" and what it is compared with start from a
closed-form head.

Prints a table per defence: mAP (difference to the same method and defence without lies) and, for
FedHarmony, [the area under the ROC curve of the misfit s_k as a detector of liars: how often a
liar's is larger than an honest client's]. Writes results/attacks.json under the given name.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
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
from fedharmony.experiments.settings import load_settings
from fedharmony.methods.fedharmony import FedHarmony

MODEL = "not_a_number,sign_flip,scale,noise,free_rider,label_flip,label_off,size"
ATTACKS = f"{MODEL},correlation_ones,correlation_random,correlation_negated,head_sums"


@dataclass(frozen=True)
class Cell:
    """One cell of a table; ``share`` is 0 without an attack."""

    method: str
    defence: str
    attack: str
    share: float
    solved_head: bool

    def changes(self) -> list[str]:
        """The settings of this cell."""
        rule, _, number = self.defence.partition(":")
        found = [f"run.method={self.method}", f"federation.robust={rule}"]
        if number:
            name = "bound" if rule in ("norm_bound", "same_direction") else "bad"
            found.append(f"federation.robust_{name}={number}")
        if self.share:
            found += [f"attack.kind={self.attack}", f"attack.share={self.share:g}"]
        if self.solved_head:
            found.append("federation.head_start=closed_form")
        return found

    @property
    def hopeless(self) -> bool:
        """Whether the attack has nothing to lie about."""
        return self.attack.startswith("correlation") and not self.method.startswith("fedharmony")

    def without_lies(self) -> Cell:
        """What this cell is compared with."""
        return replace(self, attack="none", share=0.0)


class Misfits:
    """Notes the misfits s_k that FedHarmony finds, by client."""

    def __init__(self) -> None:
        self.found: list[tuple[int, float]] = []

    def __enter__(self) -> Misfits:
        self._before = before = FedHarmony.misfits

        def noted(method: FedHarmony, replies: Any, sent: Any) -> Any:
            misfits = before(method, replies, sent)
            values, compared = misfits.values.tolist(), misfits.compared.tolist()
            every = zip(replies, values, compared, strict=True)
            self.found += [(reply.client, s) for reply, s, told in every if told]
            return misfits

        FedHarmony.misfits = noted  # type: ignore[method-assign]
        return self

    def __exit__(self, *error: object) -> None:
        FedHarmony.misfits = self._before  # type: ignore[method-assign]

    def area(self, liars: Iterable[int]) -> float | None:
        """How often a liar's s_k is larger than that of an honest client."""
        bad = torch.tensor([s for client, s in self.found if client in liars])
        good = torch.tensor([s for client, s in self.found if client not in liars])
        return ranked(bad, good) if len(bad) and len(good) else None


def ranked(bad: Tensor, good: Tensor) -> float:
    """Area under the ROC curve: P(bad > good) + ½ P(bad = good)."""
    above = (bad[:, None] > good).double() + (bad[:, None] == good).double() / 2
    return float(above.mean())


class Runs:
    """Carries out the runs of cells; one for each process that takes part.

    >>> runs = Runs("demo", [], [0, 1])
    >>> cell = Cell("fedavg", "none", "none", 0.0, False)
    >>> runs.found |= {(cell, 0): (40.0, None), (cell, 1): (44.0, None)}
    >>> runs.text(cell)
    '42.0'
    """

    def __init__(self, config: str, changes: Sequence[str], seeds: Sequence[int]) -> None:
        self.config, self.fixed, self.seeds = config, changes, seeds
        self.found: dict[tuple[Cell, int], tuple[float, float | None]] = {}
        self._data: DataSet | None = None

    def run(self, cell: Cell, seed: int) -> tuple[float, float | None]:
        """mAP, and the ROC area of misfits."""
        settings = load_settings(self.config, [*self.fixed, *cell.changes()]).with_run(seed=seed)
        switch_torch(settings.engine)
        assembly = assemble(settings, data=self._data)
        self._data = assembly.loaded
        loop, state = assembly.federation(ClientMemory()), assembly.initial_state()
        try:
            with Misfits() as misfits:
                state = loop.run(state, 0, lambda event: None, lambda round, state: None)
        except ClientLimitError:  # more clients sent nonsense than the run allows
            return float("nan"), None
        found = evaluate(assembly, state).metrics.as_dict()["mAP"]
        return 100 * float(found or 0), misfits.area(assembly.attack.liars)

    def carry_out(self, cells: Sequence[Cell], jobs: int, keep: Callable[[], None]) -> None:
        """Run every cell with every seed, several at once; ``keep`` what is found after each."""
        work = [(cell, seed) for cell in dict.fromkeys(cells) for seed in self.seeds]
        start = (self.config, self.fixed, self.seeds)
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, spawn, _begin, start) as pool:
            waiting = {pool.submit(_run, *job): job for job in work}
            for i, done in enumerate(as_completed(waiting), 1):
                cell, seed = waiting[done]
                self.found[cell, seed] = value, _ = done.result()
                print(f"{i}/{len(work)} {cell} seed {seed}: {value:.1f}", file=sys.stderr)
                keep()

    def mean(self, cell: Cell) -> tuple[float, float | None]:
        """Means over seeds of mAP and of the ROC areas."""
        values, areas = zip(*(self.found[cell, seed] for seed in self.seeds), strict=True)
        known = [area for area in areas if area is not None]
        return statistics.mean(values), statistics.mean(known) if known else None

    def text(self, cell: Cell) -> str:
        """A cell of the table."""
        if cell.hopeless:
            return "–"
        value, area = self.mean(cell)
        text = f"{value:.1f}"
        if cell.share:
            text += f" ({value - self.mean(cell.without_lies())[0]:+.1f})"
        return text if area is None else f"{text} [{area:.2f}]"


_here: Runs


def _begin(config: str, changes: Sequence[str], seeds: Sequence[int]) -> None:
    global _here
    _here = Runs(config, changes, seeds)


def _run(cell: Cell, seed: int) -> tuple[float, float | None]:
    return _here.run(cell, seed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", default="demo")
    parser.add_argument("changes", nargs="*")
    parser.add_argument("--methods", default="fedavg,fedharmony")
    parser.add_argument("--attacks", default=ATTACKS)
    parser.add_argument("--shares", default="0.1,0.3")
    parser.add_argument("--defences", default="none,same_direction")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--name")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    began, seeds = time.perf_counter(), [int(seed) for seed in options.seeds.split(",")]
    runs = Runs(options.config, options.changes, seeds)
    columns = [(m, float(s)) for m in options.methods.split(",") for s in options.shares.split(",")]

    def row(defence: str, attack: str) -> list[Cell]:
        solved, lies = attack == "head_sums", attack != "none"
        return [Cell(m, defence, attack, s if lies else 0.0, solved) for m, s in columns]

    attacks, defences = ["none", *options.attacks.split(",")], options.defences.split(",")
    every = [c for d in defences for a in attacks for c in row(d, a) if not c.hopeless]
    options.out.mkdir(exist_ok=True)
    file = options.out / "attacks.json"
    kept = json.loads(file.read_text()) if file.exists() else {}

    def keep() -> None:
        kept[options.name or options.config] = {
            "changes": [c for c in options.changes if "/" not in c],
            "seeds": seeds,
            "cells": [
                {**asdict(cell), "seed": seed, "mAP": value, "area": area}
                for (cell, seed), (value, area) in runs.found.items()
            ],
        }
        file.write_text(json.dumps(kept, indent=1) + "\n")

    runs.carry_out([*every, *(cell.without_lies() for cell in every)], options.jobs, keep)
    for defence in defences:
        head = " | ".join(f"{method} {100 * share:g} %" for method, share in columns)
        print(f"\n| {defence} | {head} |\n| --- |{' --: |' * len(columns)}")
        for attack in attacks:
            print(f"| {attack} | {' | '.join(map(runs.text, row(defence, attack)))} |")
    print(f"\n{time.perf_counter() - began:.0f} s")


if __name__ == "__main__":
    main()
