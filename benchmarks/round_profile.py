"""Where the time of a federated round goes: by phase, and on a GPU by kernel and shape of step.

The setting is that of engine.py. Phases are timed with the device brought to a stop around each of
them, which itself costs a little; kernels are counted in a round of their own.

    python benchmarks/profile.py [--model Ti] [--method fedharmony] [--labels 20] [--sizes equal]

Prints two tables and writes benchmarks/results/profile.json (one entry per setting).
"""

from __future__ import annotations

import argparse
import json
import time
from collections import defaultdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from engine import CLIENTS, NAMES, PROFILED, Run, flair_sizes, synchronise
from fedharmony.experiments.settings import EngineSettings

#: Kinds of kernels by parts of their names; the first that fits.
KINDS = {
    "attention": ("sdpa", "flash", "fmha", "attention", "dot_do_o", "convert_dq"),
    "products": ("gemm", "nvjet", "cutlass", "cublas", "xmma"),
    "optimiser": ("lerp", "addcmul__", "copy__lerp", "sqrt_sub"),
    "fused elementwise and norms": ("triton",),
}
#: Kernels that are listed one by one, in the file only.
LARGEST = 25
#: Repetitions of a step that is timed by itself.
REPEATED = 5


class Phases:
    """Exclusive seconds by phase: an inner phase's time is taken off the outer one's."""

    def __init__(self, device: torch.device) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._device, self._inner = device, [0.0]

    def wrap(self, thing: Any, name: str, phase: str) -> None:
        """Time a method of an object as a phase."""
        inner = getattr(thing, name)

        def timed(*args: Any, **kwargs: Any) -> Any:
            synchronise(self._device)
            began = time.perf_counter()
            self._inner.append(0.0)
            found = inner(*args, **kwargs)
            synchronise(self._device)
            spent = time.perf_counter() - began
            self.seconds[phase] += spent - self._inner.pop()
            self._inner[-1] += spent
            return found

        object.__setattr__(thing, name, timed)


def kernels_of_round(run: Run) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Seconds on the GPU by kind of kernel, in one round; and the kernels that take most of it."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as found:
        run.round()
    seconds: dict[str, float] = defaultdict(float)
    each = []
    for event in found.key_averages():
        name, spent = event.key.lower(), event.self_device_time_total / 1e6
        kind = next((k for k, parts in KINDS.items() if any(p in name for p in parts)), "other")
        seconds[kind] += spent
        each.append({"kernel": event.key[:120], "seconds": spent, "calls": event.count})
    each.sort(key=lambda kernel: -kernel["seconds"])
    return dict(seconds), each[:LARGEST]


def times_of_steps(run: Run) -> dict[str, float]:
    """Seconds of a step by its shape, where steps are programs of fixed shape."""
    found = {}
    trainer = run.loop.transport.cohort.trainer  # type: ignore[attr-defined]
    for (_, width, rows, folds), program in trainer._programs.items():
        program(program._placed)
        synchronise(run.device)
        began = time.perf_counter()
        for _ in range(REPEATED):
            program(program._placed)
        synchronise(run.device)
        name = f"{width} x {rows}{', last epoch' if folds else ''}"
        found[name] = (time.perf_counter() - began) / REPEATED
    return found


def profile_round(run: Run, title: str, out: Path) -> None:
    """Print and keep where the time of a round goes; takes three rounds."""
    device = run.device
    plain = run.images / run.round()
    kernels, largest = kernels_of_round(run) if device.type == "cuda" else ({}, [])
    phases = Phases(device)
    cohort = run.loop.transport.cohort  # type: ignore[attr-defined]
    parts = [
        (run.method, "broadcast", "messages: consensus, teachers"),
        (cohort, "run", "replies"),
        (cohort.trainer, "train", "training steps"),
        (cohort.trainer, "_prepared", "received model to all clients, carries"),
        (cohort.data, "epochs", "batches"),
        (cohort.data, "upload", "batches"),
        (cohort.sweeper, "sweep", "pass over local data"),
    ]
    if hasattr(run.method, "clusters"):
        parts.append((run.method, "clusters", "label clusters"))
    for thing, name, phase in parts:
        phases.wrap(thing, name, phase)
    total = run.images / run.round()
    phases.seconds["checks, sums, weights"] = total - sum(phases.seconds.values())
    print(f"\n{title}")
    print(f"a round: {plain:.3f} s; stopped at each phase: {total:.3f} s\n")
    tables = {"phase": dict(phases.seconds), "kernels": kernels}
    steps = times_of_steps(run)
    for heading, table in tables.items():
        if not table:
            continue
        print(f"| {heading} | ms | share |")
        print("| --- | --: | --: |")
        whole = sum(table.values())
        for name, seconds in sorted(table.items(), key=lambda item: -item[1]):
            print(f"| {name} | {1000 * seconds:.1f} | {seconds / whole:.1%} |")
        print(flush=True)
    if steps:
        print("| a step of clients x rows | ms | µs per row |")
        print("| --- | --: | --: |")
        for name, seconds in sorted(steps.items(), key=lambda item: -item[1]):
            width, rows = map(int, name.split(" x "))
            print(f"| {name} | {1e3 * seconds:.2f} | {1e6 * seconds / width / rows:.1f} |")
        print(flush=True)
    file = out / "profile.json"
    content = json.loads(file.read_text()) if file.exists() else {}
    content[title] = {
        "date": datetime.now(UTC).date().isoformat(),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu",
        "round_seconds": plain,
        **tables,
        "steps": steps,
        "largest_kernels": largest,
    }
    out.mkdir(exist_ok=True)
    file.write_text(json.dumps(content, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="Ti", choices=NAMES)
    parser.add_argument("--method", default="fedharmony")
    parser.add_argument("--labels", type=int, default=20)
    parser.add_argument("--sizes", default="equal", choices=("equal", "flair"))
    parser.add_argument("--images", type=int, default=160)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    device = torch.device(options.device)
    sizes = [options.images] * CLIENTS if options.sizes == "equal" else flair_sizes()
    engine = EngineSettings(device=options.device)
    run = Run(
        options.model,
        options.method,
        sizes,
        options.labels,
        options.side,
        device,
        engine,
        rounds=3 + PROFILED,
    )
    for _ in range(3):
        run.round()
    title = f"{options.model}, {options.method}, {options.labels} labels, {options.sizes} sizes"
    profile_round(run, title, options.out)


if __name__ == "__main__":
    main()
