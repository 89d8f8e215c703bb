"""Images per second of whole federated rounds, beside the same model trained in one place.

Everything in one process on one device, taking turns: random images and labels, since content does
not matter for speed. A round is what a run does in it, evaluation and checkpoint aside: messages,
5 local epochs with batch 16 and a fresh Adam, FedHarmony's pass over the local data, checks, the
average. Measured after the first two rounds, which compile and record. The limit is the same model
with batch 256, compiled as a whole, fused Adam, bfloat16 autocast, with and without a CUDA graph
(the faster counts). The naive loop is one client after the other, uncompiled, batch 16.

    python benchmarks/engine.py [--models Ti,S,B] [--parts equal,flair,harmony,naive] [--rounds 3]
                                [--profile]

Prints a table and puts its rows into benchmarks/results/engine.json; with --profile also where the
time of each kind of round goes, as profile.py does for one kind.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from fedharmony.data.base import LabelledImages, TensorImages
from fedharmony.engine.cohort import Cohort
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.optimise import TrainSettings
from fedharmony.engine.room import RoomTest
from fedharmony.experiments.machine import choose_mode
from fedharmony.experiments.settings import EngineSettings
from fedharmony.methods.base import Task, methods
from fedharmony.models.base import InputSpec, Model, models
from fedharmony.models.heads import LinearHead
from fedharmony.server.federation import Federation, FederationSettings
from fedharmony.transport.inprocess import InProcess
from fedharmony.types import Record

NAMES = {
    "Ti": "vit_tiny_patch16",
    "S": "vit_small_patch16",
    "B": "vit_base_patch16",
    "demo": "vit",  # small enough for a CPU
}
BATCH, EPOCHS, CENTRAL_BATCH, CLIENTS = 16, 5, 256, 32
#: Images of a run that goes on for ever: compiling pays.
EVER = 10**12
#: Rounds that a profile takes.
PROFILED = 3
#: FLAIR: 51,414 users, 429,078 images, median 2: a log-normal with mean 8.3; 200 users per round.
FLAIR_CLIENTS, FLAIR_MEDIAN, FLAIR_MEAN = 200, 2.0, 8.35


def flair_sizes(clients: int = FLAIR_CLIENTS) -> list[int]:
    """Sizes at evenly spaced quantiles of the log-normal: no luck of a draw."""
    sigma = (2 * np.log(FLAIR_MEAN / FLAIR_MEDIAN)) ** 0.5
    normal = statistics.NormalDist()
    quantiles = [normal.inv_cdf((i + 0.5) / clients) for i in range(clients)]
    return [max(1, round(FLAIR_MEDIAN * float(np.exp(sigma * z)))) for z in quantiles]


def make_data(images: int, classes: int, side: int, device: torch.device) -> LabelledImages:
    """Random images on the device and sparse random labels, the same each time."""
    generator, shape = torch.Generator(device).manual_seed(0), (images, 3, side, side)
    pixels = torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)
    rng = np.random.default_rng(0)
    labels = (rng.random((images, classes)) < min(0.1, 4 / classes)).astype(np.uint8)
    return LabelledImages(TensorImages(pixels), labels)


class Run:
    """Rounds of one method with all clients taking part."""

    def __init__(
        self,
        model: str,
        method: str,
        sizes: Sequence[int],
        classes: int,
        side: int,
        device: torch.device,
        engine: EngineSettings,
        rounds: int,
    ) -> None:
        backbone = models[NAMES[model]](models[NAMES[model]].Config(), InputSpec(3, side, side))
        task = Task(
            classes=classes,
            clients=len(sizes),
            rounds=1000,
            batch_size=BATCH,
            epochs=EPOCHS,
            seed=0,
            width=backbone.width,
            lr=1e-4,
        )
        cls = methods[method]
        self.method = cls(cls.Config(), task)
        net = Model(backbone, self.method.head(backbone.width))
        params = net.init(torch.Generator().manual_seed(0))
        mode = choose_mode(engine, device, net.backbone.elements(), EVER)
        data = make_data(sum(sizes), classes, side, device)
        ends = np.cumsum(sizes)
        parts = (np.arange(end - n, end) for n, end in zip(sizes, ends, strict=True))
        clients = dict(enumerate(parts))
        self.rule = RoomTest(net, params, mode, device, BATCH, (3, side, side)).rule()
        settings = TrainSettings(epochs=EPOCHS, batch_size=BATCH)
        cohort = Cohort(net, self.method, data, clients, settings, 0, device, mode=mode)
        self.images, self.device = sum(sizes) * EPOCHS, device
        self.loop = Federation(
            self.method,
            InProcess(cohort, self.rule),
            [list(range(len(sizes)))] * rounds,
            FederationSettings(participation=1.0),
            0,
            EPOCHS,
        )
        self.state: Record = self.method.init_state(params, {}).to(device)
        self.done = 0

    def round(self) -> float:
        """Images per second of the next round."""
        synchronise(self.device)
        began = time.perf_counter()
        one = replace(self.loop, schedule=self.loop.schedule[: self.done + 1])
        events: list[dict[str, Any]] = []
        self.state = one.run(self.state, self.done, events.append, lambda t, s: None)
        synchronise(self.device)
        assert not events[0]["left_out"], events[0]["left_out"][:1]
        self.done += 1
        self.loss = events[0]["train_loss"]
        return self.images / (time.perf_counter() - began)


def synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def central_step(
    model: str, side: int, batch: int, device: torch.device, mode: ComputeMode, classes: int = 20
) -> tuple[Callable[[], None], Callable[[], None] | None]:
    """A step of plain training of one model: called, and replayed from a graph if there is one."""
    backbone = models[NAMES[model]](models[NAMES[model]].Config(), InputSpec(3, side, side))
    net = Model(backbone, LinearHead(backbone.width, classes))
    params = net.init(torch.Generator().manual_seed(0))
    leaves = {n: t.to(device).unsqueeze(0).requires_grad_() for n, t in params.items()}
    cuda = device.type == "cuda"
    optimiser = torch.optim.Adam(leaves.values(), lr=1e-4, fused=True, capturable=cuda)
    data = make_data(2048, classes, side, device)
    labels = torch.from_numpy(data.labels).to(device)

    def loss(index: Tensor) -> Tensor:
        images = (data.images.gather(index, device).float() - 127.5) / 127.5
        outputs = net.apply(leaves, images.unsqueeze(0))[0].float()
        return F.binary_cross_entropy_with_logits(outputs, labels[index].float())

    objective = torch.compile(loss, dynamic=False) if mode.compile else loss
    index = torch.randint(0, 2048, (batch,), device=device)

    def step() -> None:
        with mode.autocast(device):
            value = objective(index)
        optimiser.zero_grad()
        value.backward()  # type: ignore[no-untyped-call]
        optimiser.step()

    for _ in range(3):
        step()
    if not mode.graphs:
        return step, None
    optimiser.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return step, graph.replay


def images_per_second(step: Callable[[], None], images: int, device: torch.device) -> float:
    """Over at least a second, after two steps."""
    step()
    step()
    synchronise(device)
    began, count = time.perf_counter(), 0
    while count < 5 or time.perf_counter() - began < 1:
        for _ in range(5):
            step()
        synchronise(device)
        count += 5
    return images * count / (time.perf_counter() - began)


def measure(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """One row per model and part."""
    engine = EngineSettings(device=str(device))
    mode = choose_mode(engine, device, 10**6, EVER)
    names, limits = options.models.split(","), {}
    equal = [options.images] * CLIENTS
    parts: list[tuple[str, str, str, list[int], int]] = []
    for model in names:
        if "equal" in options.parts:
            parts.append((model, f"FedAvg, {CLIENTS} equal clients", "fedavg", equal, 20))
        if "harmony" in options.parts and model == names[0]:
            parts.append((model, "FedHarmony, 20 labels", "fedharmony", equal, 20))
    if "harmony" in options.parts:
        parts.append((names[0], "FedAvg, 1,628 labels", "fedavg", equal, 1628))
        parts.append((names[0], "FedHarmony, 1,628 labels", "fedharmony", equal, 1628))
    if "flair" in options.parts:
        sizes = flair_sizes()
        parts.append((names[0], f"FedAvg, {len(sizes)} clients like FLAIR's", "fedavg", sizes, 20))
    for model, title, method, sizes, classes in parts:
        if model not in limits:
            limits[model] = yield from central(model, options.side, device, mode)
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        rounds = options.rounds + 2 + (PROFILED if options.profile else 0)
        run = Run(model, method, sizes, classes, options.side, device, engine, rounds)
        first = run.images / run.round()
        run.round()  # with a teacher for the first time, where there is one
        speed = statistics.median(run.round() for _ in range(options.rounds))
        yield {
            "model": model,
            "part": title,
            "speed": speed,
            "of_limit": speed / limits[model],
            "first_round_seconds": first,
            "clients_at_once": run.rule.full,
            "train_loss": run.loss,
            "peak_gigabytes": torch.cuda.max_memory_allocated() / 1e9
            if device.type == "cuda"
            else None,
        }
        if options.profile:
            from round_profile import profile_round

            profile_round(run, f"{model}, {title}", options.out)
        run.loop.transport.cohort.release()  # type: ignore[attr-defined]
        del run
    for model in names if "naive" in options.parts else ():
        step, _ = central_step(model, options.side, BATCH, device, ComputeMode(half=mode.half))
        speed = images_per_second(step, BATCH, device)
        yield {
            "model": model,
            "part": "naive loop",
            "speed": speed,
            "of_limit": speed / limits[model],
        }


def central(
    model: str, side: int, device: torch.device, mode: ComputeMode
) -> Generator[dict[str, Any], None, float]:
    """The limit: the faster of steps that are called and steps that are replayed."""
    called, replayed = central_step(model, side, CENTRAL_BATCH, device, mode)
    speeds = [images_per_second(f, CENTRAL_BATCH, device) for f in (called, replayed) if f]
    yield {
        "model": model,
        "part": f"central, batch {CENTRAL_BATCH}",
        "speed": max(speeds),
        "of_limit": 1.0,
        "speeds": speeds,
    }
    return max(speeds)


def show(row: dict[str, Any]) -> None:
    first = row.get("first_round_seconds")
    print(
        f"| {row['model']} | {row['part']} | {row['speed']:,.0f} | {row['of_limit']:.2f} | "
        f"{'' if first is None else f'{first:.0f}'} |",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--models", default="Ti,S,B")
    parser.add_argument("--parts", default="equal,flair,harmony,naive")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--images", type=int, default=160, help="per client, where they are equal")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    device = torch.device(options.device)
    print("| ViT | | images/s | of the limit | first round, s |")
    print("| --- | --- | --: | --: | --: |", flush=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.machine()
    options.out.mkdir(exist_ok=True)
    for row in measure(options, device):
        show(row)
        today = datetime.now(UTC).date().isoformat()
        keep(
            options.out / "engine.json", {**row, "machine": name, "torch": torch.__version__}, today
        )


def keep(file: Path, row: dict[str, Any], date: str) -> None:
    """Put a row into the file, over an older one of the same kind."""
    rows = json.loads(file.read_text()) if file.exists() else []
    kind = ("model", "part", "machine")
    rows = [other for other in rows if any(other[name] != row[name] for name in kind)]
    file.write_text(json.dumps([*rows, {**row, "date": date}], indent=1) + "\n")


if __name__ == "__main__":
    main()
