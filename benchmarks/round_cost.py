"""What a FedHarmony round costs beside a FedAvg round, on the demo.

Both methods run in one process, on the same data, split, cohorts and batches, their rounds taking
turns, so that a busy machine slows both alike. The ratio is taken round by round. Round 0 (no
teacher yet, first-time allocations) is left out.

    python benchmarks/round_cost.py [rounds]

Prints a table and writes benchmarks/results/round_cost.json.
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

from fedharmony.experiments.run import assemble
from fedharmony.experiments.settings import load_settings
from fedharmony.types import Record

METHODS = ("fedavg", "fedharmony")
LIMIT = 1.15


class Stepper:
    """One method, advanced a round at a time."""

    def __init__(self, method: str, rounds: int) -> None:
        settings = load_settings("demo", [f"run.method={method}", f"run.rounds={rounds}"])
        self.assembly = assemble(settings)
        self.federation = self.assembly.federation()
        self.state = self.assembly.initial_state()

    def round(self, t: int) -> float:
        one = replace(self.federation, schedule=self.federation.schedule[: t + 1])
        began = time.perf_counter()
        self.state: Record = one.run(self.state, t, lambda e: None, lambda r, s: None)
        return time.perf_counter() - began


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 12
    steppers = {method: Stepper(method, rounds) for method in METHODS}
    seconds: dict[str, list[float]] = {method: [] for method in METHODS}
    for t in range(rounds):
        for method in METHODS if t % 2 else METHODS[::-1]:
            seconds[method].append(steppers[method].round(t))
    ratios = [h / a for a, h in zip(*(seconds[m][1:] for m in METHODS), strict=True)]
    result = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "rounds": rounds - 1,
        "median_seconds": {m: statistics.median(seconds[m][1:]) for m in METHODS},
        "ratio_median": statistics.median(ratios),
        "ratio_quartiles": statistics.quantiles(ratios, n=4)[::2],
        "limit": LIMIT,
    }
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / "round_cost.json").write_text(json.dumps(result, indent=1) + "\n")
    for method in METHODS:
        print(f"{method:12s} {result['median_seconds'][method]:7.3f} s per round (median)")
    low, high = result["ratio_quartiles"]
    print(
        f"ratio        {result['ratio_median']:7.3f}   (quartiles {low:.3f} to {high:.3f}, "
        f"limit {LIMIT})"
    )


if __name__ == "__main__":
    main()
