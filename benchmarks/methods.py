"""What a round of each method costs beside a FedAvg round, on the demo.

All methods run in one process, on the same data, split, cohorts and batches, their rounds taking
turns, so that a busy machine slows all alike. Ratios are taken round by round. Round 0 (no teacher
yet, first-time allocations, statistics) and the last one (calibration) are left out.

    python benchmarks/methods.py [rounds] [method ...]

Prints a table and writes benchmarks/results/methods.json.
"""

from __future__ import annotations

import json
import platform
import statistics
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import torch

from fedharmony.engine.memory import ClientMemory
from fedharmony.experiments.build import assemble
from fedharmony.experiments.settings import load_settings
from fedharmony.methods.base import methods
from fedharmony.types import Record

REFERENCE = "fedavg"


class Stepper:
    """One method, advanced a round at a time."""

    def __init__(self, method: str, rounds: int) -> None:
        settings = load_settings("demo", [f"run.method={method}", f"run.rounds={rounds}"])
        self.label = settings.label
        self.assembly = assemble(settings)
        self.federation = self.assembly.federation(ClientMemory())
        self.state = self.assembly.initial_state()
        self.events: list[dict[str, float]] = []

    def round(self, t: int) -> float:
        one = replace(self.federation, schedule=self.federation.schedule[: t + 1])
        began = time.perf_counter()
        self.state: Record = one.run(self.state, t, self.events.append, lambda r, s: None)
        return time.perf_counter() - began


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    names = list(dict.fromkeys([REFERENCE, *(sys.argv[2:] or methods.names())]))
    steppers = {name: Stepper(name, rounds) for name in names}
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
        "torch": torch.__version__,
        "rounds": rounds - 2,
        "methods": rows,
    }
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / "methods.json").write_text(json.dumps(result, indent=1) + "\n")
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
