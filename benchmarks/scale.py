"""How cost grows with the number of clients and of labels.

Three tables. (i) Registered clients: whole runs through the command line, each in a process of its
own, with the same images and the same work per round; seconds per round and the largest memory of
the process. (ii) Labels: the same with FedHarmony beside FedAvg, and what FedHarmony's server adds
per round, part by part. (iii) A table of 41,131 clients and 17 labels, as many as FLAIR has.

    python benchmarks/scale.py [--device cuda] [--rounds 5] [--threads 1] [clients] [labels] [table]

Prints the tables and writes benchmarks/results/scale.json. The file is also a plugin: it registers
the synthetic data of these runs.
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
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from fedharmony.consensus import CORRELATION, TABLE, CorrelationTable
from fedharmony.data.base import DataSet, LabelledImages, Source, TensorImages, datasets
from fedharmony.methods.base import Task
from fedharmony.methods.fedharmony import FedHarmony
from fedharmony.types import BUFFERS, PARAMS, Record, Reply

METHODS = ("fedavg", "fedharmony")
CLIENTS = (10, 100, 500, 5_000, 51_414)
LABELS = (20, 80, 400, 1_628)
#: Clients of a round, and images of one of them.
COHORT, IMAGES = 50, 8
FLAIR = (41_131, 17)


@datasets.register("synthetic")
class Synthetic(Source):
    """Noise of 8 × 8 pixels with about five correlated labels; image i belongs to i mod clients."""

    @dataclass(frozen=True)
    class Config(Source.Config):
        """Numbers of images, labels and owners."""

        images: int = 8 * 51_414
        classes: int = 20
        clients: int = 500

    config: Config
    side: ClassVar[int] = 8

    def load(self) -> DataSet:
        """Draw them."""
        names = tuple(f"label {c}" for c in range(self.config.classes))
        owners = np.arange(self.config.images) % self.config.clients
        train, test = self._part(self.config.images, 0, owners), self._part(500, 1)
        return DataSet("synthetic", names, train, test)

    def _part(self, count: int, seed: int, users: Any = None) -> LabelledImages:
        rng, classes = np.random.default_rng(seed), self.config.classes
        pixels = rng.integers(0, 256, (count, 3, self.side, self.side), np.uint8)
        labels = np.zeros((count, classes), np.uint8)
        width = max(2, round(classes**0.5))  # labels that go together
        theme = rng.integers(0, classes, count)
        for _ in range(5):
            drawn = (theme // width * width + rng.integers(0, width, count)) % classes
            labels[np.arange(count), drawn] = 1
        return LabelledImages(TensorImages(torch.from_numpy(pixels)), labels, users=users)


def whole_run(method: str, rounds: int, changes: Sequence[str]) -> dict[str, float]:
    """A run as a user does it, in a process of its own: its rounds, and its largest memory."""
    settings = [
        f"run.method={method}",
        f"run.rounds={rounds}",
        f"run.eval_every={rounds}",
        "data.name=synthetic",
        "split.name=natural",
        "model.width=32",
        "model.depth=1",
        "model.heads=2",
        "model.patch=4",
        "train.epochs=1",
        "train.batch_size=8",
        f"engine.threads={torch.get_num_threads()}",
        *changes,
    ]
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "scale.toml"
        config.write_text("")
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "fedharmony", "run", str(config), *settings]
        command += ["--plugin", str(Path(__file__).resolve()), "--out", str(out), "--quiet"]
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        _, status, usage = os.wait4(child.pid, 0)
        whole = time.perf_counter() - began
        if status:
            raise SystemExit(f"{' '.join(command)} failed.")
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    seconds = [event["seconds"] for event in events if event["event"] == "round"]
    return {
        "seconds_per_round": statistics.median(seconds[1:]),
        "seconds_in_all": whole,
        "peak_mb": usage.ru_maxrss * 1024 / 1e6,
    }


def by_clients(device: str, rounds: int) -> list[dict[str, Any]]:
    """Runs with more and more registered clients, of which 50 take part in a round."""
    rows = []
    for clients in CLIENTS:
        cohort = min(clients, COHORT)
        changes = [
            f"data.clients={clients}",
            f"split.max_images={IMAGES * COHORT // cohort}",
            f"federation.cohort={cohort}",
            f"engine.device={device}",
        ]
        for method in METHODS:
            rows.append({"clients": clients, "method": method} | whole_run(method, rounds, changes))
    return rows


def by_labels(device: str, rounds: int) -> list[dict[str, Any]]:
    """Runs with more and more labels, 16 of 100 clients per round, and the server's part alone."""
    rows = []
    for labels in LABELS:
        changes = [
            "data.clients=100",
            "data.images=800",
            f"data.classes={labels}",
            "federation.cohort=16",
            f"engine.device={device}",
        ]
        row: dict[str, Any] = {"labels": labels}
        for method in METHODS:
            row[method] = whole_run(method, rounds, changes)
        rows.append(row | {"server": server_parts(labels, device)})
    return rows


def server_parts(labels: int, device: str, known: int = 48, cohort: int = 32) -> dict[str, float]:
    """Seconds of what FedHarmony's server does in a round, for a table of 48 and a cohort of 32."""
    task = Task(labels, known, rounds=9, batch_size=8, epochs=1, seed=0, width=8, lr=0.01)
    method = FedHarmony(FedHarmony.Config(), task)
    state = method.init_state({"w": torch.zeros(1, device=device)}, {})
    everyone = range(known)
    sent = method.broadcast(state, 0, everyone)
    state = method.aggregate(state, 0, sent, iter(replies(labels, everyone, device))).state
    answers = replies(labels, range(cohort), device)
    table = method.table(state)
    common = table.consensus(3).matrix
    sent = method.broadcast(state, 3, range(cohort))
    parts: dict[str, Callable[[], Any]] = {
        "consensus": lambda: table.consensus(3),
        "clusters": lambda: method.clusters(common, 3),
        "teachers": lambda: table.teachers(range(cohort), 3, torch.float32),
        "misfits_weights_table": lambda: method.aggregate(state, 3, sent, iter(answers)),
    }
    found = {name: seconds(part, device) for name, part in parts.items()}
    return {**found, "teachers": found["teachers"] - found["consensus"]}


def replies(labels: int, clients: Sequence[int], device: str) -> list[Reply]:
    """Uploads of clients whose correlations share blocks of labels."""
    generator = torch.Generator().manual_seed(0)
    block = torch.arange(labels) // max(2, round(labels**0.5))
    rows, columns = torch.triu_indices(labels, labels)
    shared = 0.4 * (block[rows] == block[columns])

    def upload(client: int) -> Reply:
        noise = 0.2 * torch.rand(len(shared), generator=generator)
        marginal = torch.rand(labels, generator=generator) ** 4
        found = {"upper": (shared + noise).to(device), "marginal": marginal.to(device)}
        model: dict[str, Tensor] = {"w": torch.ones(1, device=device)}
        return Reply(client, 30, Record({PARAMS: model, BUFFERS: {}, CORRELATION: found}))

    return [upload(client) for client in clients]


def one_table(device: str, teachers: int = 50) -> dict[str, float]:
    """Consensus of all FLAIR clients, 17 labels, and the teachers of a cohort."""
    clients, labels = FLAIR
    generator = torch.Generator().manual_seed(0)
    pairs = labels * (labels + 1) // 2
    upper = (torch.rand(clients, pairs, generator=generator) - 0.5).to(device)
    supports = (torch.rand(clients, labels, generator=generator) < 0.5).to(device)
    rows = {
        "client": torch.arange(clients, device=device),
        "examples": torch.randint(1, 100, (clients,), generator=generator).to(device),
        "round": torch.zeros(clients, dtype=torch.int64, device=device),
        "upper": upper,
        "marginal": supports.float(),
    }
    table = CorrelationTable(labels).load({TABLE: rows})
    consensus = seconds(lambda: table.consensus(1), device)
    both = seconds(lambda: table.teachers(range(teachers), 1), device)
    return {
        "clients": clients,
        "labels": labels,
        "table_mb": upper.nbytes / 1e6,
        "consensus": consensus,
        "teachers": both - consensus,
    }


def seconds(work: Callable[[], Any], device: str, times: int = 3) -> float:
    """Median time of some work after a first go; waits for the device."""
    found = []
    for _ in range(times + 1):
        began = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found[1:])


def print_tables(result: dict[str, Any]) -> None:
    if rows := result.get("clients"):
        print("| registered clients | method | s per round | peak memory, MB |")
        print("| --: | --- | --: | --: |")
        for row in rows:
            print(
                f"| {row['clients']:,} | {row['method']} | {row['seconds_per_round']:.3f} | "
                f"{row['peak_mb']:,.0f} |"
            )
    if rows := result.get("labels"):
        print(
            "\n| labels | FedAvg, s per round | FedHarmony | consensus | clusters | teachers | "
            "misfits, weights, table | FedAvg, MB | FedHarmony |"
        )
        print("| --: | --: | --: | --: | --: | --: | --: | --: | --: |")
        for row in rows:
            times = [row[name]["seconds_per_round"] for name in METHODS] + [*row["server"].values()]
            memory = " | ".join(f"{row[name]['peak_mb']:,.0f}" for name in METHODS)
            numbers = " | ".join(f"{value:.3f}" for value in times)
            print(f"| {row['labels']:,} | {numbers} | {memory} |")
    if row := result.get("table"):
        print(
            f"\n{row['clients']:,} clients, {row['labels']} labels: {row['table_mb']:.1f} MB, "
            f"consensus {row['consensus']:.3f} s, 50 teachers {row['teachers']:.4f} s"
        )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("tables", nargs="*", default=[], help="clients, labels, table; all if none")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    wanted = options.tables or ["clients", "labels", "table"]
    cuda = options.device.startswith("cuda")
    result: dict[str, Any] = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "threads": options.threads,
        "device": torch.cuda.get_device_name() if cuda else "cpu",
        "torch": torch.__version__,
    }
    file = options.out / "scale.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    if "clients" in wanted:
        result["clients"] = by_clients(options.device, options.rounds)
    if "labels" in wanted:
        result["labels"] = by_labels(options.device, options.rounds)
    if "table" in wanted:
        result["table"] = one_table(options.device)
    print_tables(result)
    # Tables that were not asked for stay, if they were made in the same way.
    same = all(kept.get(name) == result[name] for name in ("machine", "threads", "device", "torch"))
    result["date"] = datetime.now(UTC).date().isoformat()
    options.out.mkdir(exist_ok=True)
    file.write_text(json.dumps({**(kept if same else {}), **result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
