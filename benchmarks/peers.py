"""The same federated task under fedharmony, Flower, pfl-research and a naive PyTorch loop.

Same data, split, number of clients per round, local steps, batch, optimiser and size of model (the
demo's ViT). Each contender runs as a process of its own, one after the other, on the same cores.
``round`` is the median of the rounds after the first two; ``whole run`` the wall time of the
process from start to result; memory the largest sum of proportional set sizes of all its processes.

    python benchmarks/peers.py --flower FLOWER/bin/python --pfl PFL/bin/python

where FLOWER is an environment with ``flwr[simulation]`` and torch, PFL one with ``pfl[pytorch]``.
Prints a table and writes benchmarks/results/peers.json.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedharmony.experiments.build import assemble
from fedharmony.experiments.settings import load_settings

HERE = Path(__file__).parent
TASKS = {
    "100 clients, 20 per round, 10 steps each": {
        "changes": ["data.train=3000", "split.clients=100", "federation.cohort=20"],
        "epochs": 5,
        "rounds": 10,
    },
    "1,000 clients, all of them, one step each": {
        "changes": ["data.train=1000", "split.clients=1000", "federation.participation=1.0"],
        "epochs": 1,
        "rounds": 5,
    },
}
BATCH, LR = 16, 1e-3


def write_task(folder: Path, changes: list[str], epochs: int, rounds: int) -> int:
    """Data, split and sizes for all contenders; returns the number of our model's parameters."""
    own = [
        *(*changes, "split.name=iid", "split.gamma=", "run.method=fedavg", "data.test=200"),
        *(f"train.epochs={epochs}", f"run.rounds={rounds}", "engine.device=cpu"),
    ]
    assembly = assemble(load_settings("demo", own))
    parts = [np.asarray(part) for part in assembly.clients.values()]
    images = assembly.data.train.images.gather(torch.arange(len(assembly.data.train)), "cpu")
    np.savez(
        folder / "data.npz",
        images=images.numpy(),
        labels=assembly.data.train.labels.astype(np.float32),
        order=np.concatenate(parts),
        ends=np.cumsum([len(part) for part in parts]),
    )
    sizes = {"rounds": rounds, "cohort": len(assembly.blueprint.schedule[0]), "epochs": epochs}
    (folder / "task.json").write_text(json.dumps({**sizes, "batch": BATCH, "lr": LR}))
    (folder / "settings.json").write_text(json.dumps(own))
    return assembly.blueprint.model.num_parameters


def memory(tag: str) -> int:
    """Proportional set size, in bytes, of all processes that carry the tag."""
    total = 0
    for process in Path("/proc").iterdir():
        try:
            if process.name.isdigit() and tag.encode() in (process / "environ").read_bytes():
                rollup = (process / "smaps_rollup").read_text()
                total += 1024 * int(rollup.split("\nPss:")[1].split()[0])
        except (OSError, IndexError):
            continue
    return total


def contend(python: str, script: str, folder: Path, tag: str) -> dict[str, Any]:
    """Run one contender; its rounds, wall time and memory."""
    environment = {
        **os.environ,
        "PEERS_TAG": tag,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    peak, running = [0], threading.Event()
    running.set()

    def watch() -> None:
        while running.is_set():
            peak[0] = max(peak[0], memory(tag))
            time.sleep(0.5)

    watcher = threading.Thread(target=watch)
    watcher.start()
    began = time.perf_counter()
    done = subprocess.run(
        [python, str(HERE / "peers" / script), str(folder)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=HERE / "peers",
        check=False,
    )
    wall = time.perf_counter() - began
    running.clear()
    watcher.join()
    lines = [line for line in done.stdout.splitlines() if line.startswith('{"rounds"')]
    if not lines:
        print(done.stdout[-2000:], done.stderr[-3000:], file=sys.stderr)
        raise SystemExit(f"{script} gave no result")
    result = json.loads(lines[-1])
    return {
        "round": statistics.median(result["rounds"][2:]),
        "rounds": result["rounds"],
        "whole_run": wall,
        "memory_megabytes": peak[0] / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ours", default=sys.executable)
    parser.add_argument("--naive", default=sys.executable)
    parser.add_argument("--flower")
    parser.add_argument("--pfl")
    parser.add_argument("--task", type=int, help="only the first (1) or the second (2)")
    options = parser.parse_args()
    chosen = {
        "fedharmony": (options.ours, "ours.py"),
        "naive loop": (options.naive, "naive.py"),
        "pfl-research": (options.pfl, "pfl_research.py"),
        "Flower": (options.flower, "flower.py"),
    }
    tables: dict[str, dict[str, Any]] = {}
    chosen_tasks = list(TASKS.items())
    for title, task in chosen_tasks if options.task is None else [chosen_tasks[options.task - 1]]:
        with tempfile.TemporaryDirectory() as folder:
            parameters = write_task(Path(folder), **task)  # type: ignore[arg-type]
            rows = {
                name: contend(python, script, Path(folder), f"peers-{name}-{os.getpid()}")
                for name, (python, script) in chosen.items()
                if python is not None
            }
        tables[title] = rows
        ours = rows["fedharmony"]
        print(f"\n{title} ({parameters:,} parameters)\n")
        print("| | s per round | of ours | whole run, s | of ours | memory, MB |")
        print("| --- | --: | --: | --: | --: | --: |")
        for name, row in rows.items():
            print(
                f"| {name} | {row['round']:.3f} | {row['round'] / ours['round']:.1f} | "
                f"{row['whole_run']:.1f} | {row['whole_run'] / ours['whole_run']:.1f} | "
                f"{row['memory_megabytes']:.0f} |",
                flush=True,
            )
    file = HERE / "results" / "peers.json"
    before = json.loads(file.read_text())["tasks"] if options.task and file.exists() else {}
    content = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "tasks": {**before, **tables},
    }
    file.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
