"""What a round of each method costs beside a FedAvg round.

All methods run in one process, on the same data, split, cohorts and batches, their rounds taking
turns, so that a busy machine slows all alike. Ratios are taken round by round. Round 0 (no teacher
yet, first-time allocations, statistics) and the last one (calibration) are left out.

    python benchmarks/methods.py [--config demo] [--rounds 12] [--methods fedavg,fedharmony,...]
                                 [--name methods] [section.key=value ...]

``fedavg@agreement`` is FedAvg with this rule of ``federation.robust``. Prints a table and
writes benchmarks/results/NAME.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from fedharmony.data.base import DataSet
from fedharmony.engine.memory import ClientMemory
from fedharmony.experiments.build import assemble
from fedharmony.experiments.settings import load_settings
from fedharmony.methods.base import methods
from fedharmony.types import Record

REFERENCE = "fedavg"


class Stepper:
    """One method, advanced a round at a time."""

    def __init__(
        self, config: str, name: str, changes: Sequence[str], data: DataSet | None
    ) -> None:
        method, _, rule = name.partition("@")
        more = [f"run.method={method}", f"federation.robust={rule or 'none'}"]
        settings = load_settings(config, [*changes, *more])
        self.label = f"{settings.label}, {rule}" if rule else settings.label
        self.assembly = assemble(settings, data=data)
        self.federation = self.assembly.federation(ClientMemory())
        self.state = self.assembly.initial_state()
        self.events: list[dict[str, float]] = []

    def round(self, t: int) -> float:
        one = replace(self.federation, schedule=self.federation.schedule[: t + 1])
        began = time.perf_counter()
        self.state: Record = one.run(self.state, t, self.events.append, lambda r, s: None)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - began


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("changes", nargs="*")
    parser.add_argument("--config", default="demo")
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--methods", default=",".join(methods.names()))
    parser.add_argument("--name", default="methods")
    options = parser.parse_args()
    rounds = options.rounds
    names = list(dict.fromkeys([REFERENCE, *options.methods.split(",")]))
    changes = [*options.changes, f"run.rounds={rounds}"]
    steppers: dict[str, Stepper] = {}
    for name in names:
        held = next(iter(steppers.values())).assembly.loaded if steppers else None
        steppers[name] = Stepper(options.config, name, changes, held)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for t in range(rounds):
        for name in names if t % 2 else names[::-1]:
            seconds[name].append(steppers[name].round(t))
    rows = {}
    for name in names:
        own, reference = seconds[name][1:-1], seconds[REFERENCE][1:-1]
        ratios = [a / b for a, b in zip(own, reference, strict=True)]
        traffic = steppers[name].events[1:-1]
        rows[steppers[name].label] = {
            "seconds": statistics.median(own),
            "ratio": statistics.median(ratios),
            "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
            "megabytes_up": statistics.mean(e["bytes_up"] for e in traffic) / 1e6,
            "megabytes_down": statistics.mean(e["bytes_down"] for e in traffic) / 1e6,
        }
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "config": options.config,
        "torch": torch.__version__,
        "rounds": rounds - 2,
        "methods": rows,
    }
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / f"{options.name}.json").write_text(json.dumps(result, indent=1) + "\n")
    print("| method | s per round | of FedAvg | quartiles | MB up | MB down |")
    print("| --- | --: | --: | --: | --: | --: |")
    for label, row in rows.items():
        low, high = row["ratio_quartiles"]
        print(
            f"| {label} | {row['seconds']:.2f} | {row['ratio']:.2f} | {low:.2f}–{high:.2f} | "
            f"{row['megabytes_up']:.2f} | {row['megabytes_down']:.2f} |"
        )


if __name__ == "__main__":
    main()
