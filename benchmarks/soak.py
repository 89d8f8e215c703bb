"""Many fresh processes at once; every client's update beside that of the plain path.

Each process trains the same clients from the same models in three ways: the fast path as the
engine takes it by default (on a GPU compiled, recorded, bfloat16), the plain path (float32, neither
compiled nor recorded), and bfloat16 alone. The relative difference ‖Δ − Δ_plain‖ / ‖Δ_plain‖ of a
client's update Δ may be three times the largest one that bfloat16 alone makes in that round, and
never not finite. Plain SGD, because Adam turns the last bits of a small gradient into whole steps.
Fresh memory is filled with NaN before every round, so that a read of what was never written shows.
Processes plan with equal parts of the GPU's memory.

    python benchmarks/soak.py [--methods all] [--models Ti,S] [--sizes equal,flair] [--seeds 0]
                              [--rounds 2] [--at-once 8] [--repeat 1] [--device cuda]
                              [--gigabytes 0]

With ``--gigabytes`` each process gets no more of the GPU's memory, but plans as without it: stacks
meet a full device, and are halved. Prints a table, writes results/soak.json, and fails on a single
excess.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine import EVER, NAMES, flair_sizes, make_data
from fedharmony import fallbacks
from fedharmony.engine.cohort import Cohort
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.optimise import TrainSettings
from fedharmony.engine.room import RoomTest
from fedharmony.experiments.machine import choose_mode
from fedharmony.experiments.settings import EngineSettings
from fedharmony.methods.base import Task, methods
from fedharmony.models.base import InputSpec, Model, models
from fedharmony.transport.inprocess import InProcess
from fedharmony.types import FROZEN, PARAMS, Failure, Record, Reply

BATCH, CLASSES, LR = 16, 20, 0.01
#: How much more than bfloat16 alone the fast path may differ, and from where on it counts at all.
ALLOWED, FLOOR = 3.0, 1e-4
SIZES = {"equal": [40] * 12, "flair": flair_sizes(24), "few": [9, 5, 5, 2, 1]}


def fast_path(device: torch.device) -> ComputeMode:
    """As the engine computes by default in a long run; on a CPU fixed places and few shapes."""
    if device.type == "cpu":
        return ComputeMode(fixed=True)
    return choose_mode(EngineSettings(device=str(device)), device, 10**6, EVER)


def poison(device: torch.device) -> None:
    """Fill the memory that is allocated next with NaN."""
    if device.type != "cuda":
        return
    torch.cuda.empty_cache()
    sizes = [64 << 20] * 24 + [512 << 10] * 64
    held = [torch.full((size,), 255, dtype=torch.uint8, device=device) for size in sizes]
    del held


def on_default_stream(device: torch.device) -> bool:
    """Whether work is given out where it is expected."""
    if device.type != "cuda":
        return True
    return torch.cuda.current_stream() == torch.cuda.default_stream()


class Soaked:
    """One method on one model and one set of client sizes, in three ways."""

    def __init__(
        self,
        method: str,
        model: str,
        sizes: list[int],
        seed: int,
        side: int,
        device: torch.device,
        share: float = 1.0,
    ) -> None:
        backbone = models[NAMES[model]](models[NAMES[model]].Config(), InputSpec(3, side, side))
        task = Task(
            classes=CLASSES,
            clients=len(sizes),
            rounds=100,
            batch_size=BATCH,
            epochs=1,
            seed=seed,
            width=backbone.width,
            lr=LR,
            optimiser="sgd",
        )
        cls = methods[method]
        self.method, self.sizes, self.device = cls(cls.Config(), task), sizes, device
        net = Model(backbone, self.method.head(backbone.width))
        trained, frozen = net.divide(net.init(torch.Generator().manual_seed(seed)))
        data, ends = make_data(sum(sizes), CLASSES, side, device), list(itertools.accumulate(sizes))
        parts = (torch.arange(end - n, end).numpy() for n, end in zip(sizes, ends, strict=True))
        clients = dict(enumerate(parts))
        settings = TrainSettings(epochs=1, batch_size=BATCH, optimiser="sgd", lr=LR)
        fast = fast_path(device)
        ways = {"fast": fast, "plain": ComputeMode(), "half": ComputeMode(half=True)}
        ways = {name: replace(mode, share=share) for name, mode in ways.items()}
        self.ways: dict[str, InProcess] = {}
        for name, mode in ways.items():
            cohort = Cohort(
                net, self.method, data, clients, settings, seed, device, frozen=frozen, mode=mode
            )
            params = {**trained, **frozen}
            rule = RoomTest(net, params, mode, device, BATCH, (3, side, side)).rule()
            self.ways[name] = InProcess(cohort, rule)
        state = self.method.init_state(trained, backbone.init_buffers())
        self.state: Record = (state.replace({FROZEN: frozen}) if frozen else state).to(device)

    def rounds(self, count: int) -> Iterator[dict[str, float]]:
        """Of each training stage: the largest differences of the fast path and of bfloat16."""
        everyone = [k for k, n in enumerate(self.sizes) if n]
        everyone.sort(key=lambda k: -self.sizes[k])
        for round in range(count):
            for stage in self.method.stages(round):
                sent = stage.broadcast(self.state, round, everyone)
                found: dict[str, dict[int, Reply]] = {}
                saved: dict[str, float] = {}
                for name, transport in self.ways.items():
                    poison(self.device)
                    answers = list(transport.exchange(stage, round, {k: sent[k] for k in everyone}))
                    assert on_default_stream(self.device), f"{name} left another stream behind"
                    failed = [a for a in answers if isinstance(a, Failure)]
                    assert not failed, failed[0]
                    found[name] = {a.client: a for a in answers if isinstance(a, Reply)}
                    saved[f"{name} saved"] = float(fallbacks.drain().get("plain", 0))
                if stage.train:
                    apart = {name: self.apart(found, sent, name) for name in ("fast", "half")}
                    yield apart | {name: saved[name] for name in ("fast saved", "half saved")}
                replies = iter(found["plain"].values())
                self.state = stage.aggregate(self.state, round, sent, replies).state

    def apart(self, found: Any, sent: Any, name: str) -> float:
        """The largest relative difference of a client's update from that of the plain path."""
        names, worst = list(self.state.get(PARAMS)), 0.0

        def flat(record: Record) -> Tensor:
            return torch.cat([record.get(PARAMS)[n].double().flatten() for n in names])

        for client, plain in found["plain"].items():
            theirs, ours = flat(plain.record), flat(found[name][client].record)
            apart = float((ours - theirs).norm() / (theirs - flat(sent[client])).norm())
            worst = max(worst, apart if math.isfinite(apart) else math.inf)
        return worst


def work(options: argparse.Namespace) -> None:
    """One process: prints a JSON line per round."""
    device = torch.device(options.device)
    if options.gigabytes:
        share = options.gigabytes * 1e9 / torch.cuda.mem_get_info(device)[1]
        torch.cuda.set_per_process_memory_fraction(share, device)
    soaked = Soaked(
        options.methods, options.models, SIZES[options.sizes], int(options.seeds), options.side,
        device, 1 / options.at_once,
    )  # fmt: skip
    for row in soaked.rounds(options.rounds):
        print(json.dumps(row), flush=True)


def judge(rows: list[dict[str, float]]) -> tuple[float, float, bool]:
    """The largest difference of the fast path, what is allowed beside it, and whether it holds.

    A client that the plain path had to save, in bfloat16 alone too, is an excess.
    """
    worst = max(rows, key=lambda r: r["fast"] / max(ALLOWED * r["half"], FLOOR))
    limit = max(ALLOWED * worst["half"], FLOOR)
    saved = any(r["fast saved"] or r["half saved"] for r in rows)
    return worst["fast"], limit, worst["fast"] <= limit and not saved


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--methods", default="all")
    parser.add_argument("--models", default="Ti,S")
    parser.add_argument("--sizes", default="equal,flair")
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--side", type=int, default=144)
    parser.add_argument("--at-once", type=int, default=8)
    parser.add_argument("--repeat", type=int, default=1)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--gigabytes", type=float, default=0.0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    names = methods.names() if options.methods == "all" else options.methods.split(",")
    parts = [names, options.models.split(","), options.sizes.split(","), options.seeds.split(",")]
    waiting = list(itertools.product(*parts)) * options.repeat
    running: list[tuple[Any, subprocess.Popen[str], Path]] = []
    results, total = [], len(waiting)
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else options.device
    about = {"torch": torch.__version__, "device": name, "at_once": options.at_once}
    about |= {"gigabytes": options.gigabytes} if options.gigabytes else {}
    options.out.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        # Every process writes and chooses its kernels itself; the same kernel is built only once.
        shared = {
            "TRITON_CACHE_DIR": str(Path(scratch) / "triton"),
            "TORCHINDUCTOR_COMPILE_THREADS": str(max(1, (os.cpu_count() or 1) // options.at_once)),
        }
        while waiting or running:
            while waiting and len(running) < options.at_once:
                job, place = waiting.pop(0), Path(scratch) / str(len(waiting))
                place.mkdir()
                command = [sys.executable, __file__, "--worker"]
                for flag, value in zip(("methods", "models", "sizes", "seeds"), job, strict=True):
                    command += [f"--{flag}", value]
                for flag in ("rounds", "side", "device", "at-once", "gigabytes"):
                    command += [f"--{flag}", str(getattr(options, flag.replace("-", "_")))]
                env = {**shared, **os.environ, "TORCHINDUCTOR_CACHE_DIR": str(place)}
                with (place / "out").open("w") as out, (place / "err").open("w") as err:
                    process = subprocess.Popen(command, stdout=out, stderr=err, text=True, env=env)
                running.append((job, process, place))
            time.sleep(0.05)
            for entry in [e for e in running if e[1].poll() is not None]:
                running.remove(entry)
                job, process, place = entry
                rows = [json.loads(line) for line in (place / "out").read_text().splitlines()]
                if process.returncode or len(rows) != options.rounds:
                    reason = (place / "err").read_text().strip().splitlines()[-1:] or ["no output"]
                    results.append({"job": job, "ok": False, "reason": reason[0][:200]})
                else:
                    fast, limit, ok = judge(rows)
                    results.append({"job": job, "ok": ok, "fast": fast, "limit": limit})
                    if not ok:
                        results[-1] |= {"rows": rows, "said": (place / "err").read_text()[-4000:]}
                row = results[-1]
                text = row.get("reason") or f"{row['fast']:.4f} | {row['limit']:.4f}"
                print(
                    f"| {' | '.join(job)} | {text} | {'ok' if row['ok'] else 'EXCESS'} |",
                    flush=True,
                )
                (options.out / "soak.json").write_text(
                    json.dumps({**about, "results": results}, indent=1) + "\n"
                )
    bad = sum(not row["ok"] for row in results)
    print(f"{total} processes, {options.at_once} at once: {bad} with an excess")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
