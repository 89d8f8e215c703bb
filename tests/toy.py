"""A tiny federated task for engine and method tests: seconds matter, pictures do not."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from fedharmony.data.augment import AugmentSettings
from fedharmony.data.base import LabelledImages, TensorImages
from fedharmony.engine.cohort import Cohort
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.memory import ClientMemory
from fedharmony.engine.optimise import TrainSettings
from fedharmony.losses import LossSettings
from fedharmony.methods.base import Method, Task, methods
from fedharmony.models.base import Backbone, InputSpec, Model, Shapes, linear
from fedharmony.privacy import Noise
from fedharmony.server.federation import Federation, FederationSettings
from fedharmony.server.head_start import opening
from fedharmony.server.sampling import Schedule
from fedharmony.transport.inprocess import InProcess
from fedharmony.types import FROZEN, Index, Record, Tensors

CLASSES = 6
#: Settings for methods whose own ones are meant for real images.
SMALL: Mapping[str, Mapping[str, Any]] = {
    "fedlgt": {"embedding": 16, "heads": 2, "layers": 2, "feedforward": 16}
}


class Pixels(Backbone):
    """One hidden layer on raw pixels, stacked like the ViT; the image is its own single patch."""

    class_tokens = 0

    def __init__(self, input: InputSpec, width: int = 8) -> None:
        self.input, self.width = input, width
        self.mean = self.std = (0.5, 0.5, 0.5)
        self.inputs = input.channels * input.height * input.width

    def shapes(self) -> Shapes:
        return {"hidden.weight": (self.width, self.inputs), "hidden.bias": (self.width,)}

    def init(self, generator: torch.Generator) -> Tensors:
        return {
            name: torch.randn(shape, generator=generator) * 0.1
            for name, shape in self.shapes().items()
        }

    def tokens(self, params: Mapping[str, Tensor], images: Tensor) -> Tensor:
        hidden = linear(images.flatten(2), params["hidden.weight"], params["hidden.bias"])
        return hidden.tanh().unsqueeze(2)


def toy_data(images: int = 60, classes: int = CLASSES, seed: int = 0) -> LabelledImages:
    """4 × 4 colour images whose brightness pattern carries correlated labels."""
    rng = np.random.default_rng(seed)
    theme = rng.integers(0, 2, (images, 1))
    labels = rng.random((images, classes)) < np.where(theme == np.arange(classes) % 2, 0.6, 0.1)
    pattern = rng.normal(size=(classes, 48))
    pixels = 128 + 30 * (labels @ pattern) + rng.normal(0, 20, (images, 48))
    pixels = np.clip(pixels, 0, 255).astype(np.uint8).reshape(images, 3, 4, 4)
    return LabelledImages(TensorImages(torch.from_numpy(pixels)), labels.astype(np.uint8))


def split(sizes: Sequence[int]) -> dict[int, Index]:
    """Consecutive images, ``sizes[k]`` for client k."""
    ends = np.cumsum([0, *sizes])
    parts = (np.arange(a, b, dtype=np.int64) for a, b in pairwise(ends))
    return dict(enumerate(parts))


@dataclass
class Toy:
    """Everything a test needs to train a method on the toy task."""

    name: str = "fedavg"
    config: Mapping[str, Any] | None = None
    sizes: Sequence[int] = (20, 7, 1, 13, 19)
    rounds: int = 3
    cohort: int | None = None
    stack: int = 8
    dtype: torch.dtype = torch.float32
    seed: int = 0
    epochs: int = 2
    batch_size: int = 4
    optimiser: Literal["adam", "sgd", "momentum"] = "adam"
    lr: float = 0.01
    loss: LossSettings = field(default_factory=LossSettings)
    memory: Path | None = None
    changes: AugmentSettings = field(default_factory=AugmentSettings)
    mode: ComputeMode = field(default_factory=ComputeMode)
    federation: FederationSettings = field(default_factory=FederationSettings)
    method_class: type[Method] | None = None
    data: LabelledImages | None = None
    device: str = "cpu"
    backbone: Backbone | None = None
    names: Sequence[str] = ()
    noise: Noise | None = None

    def __post_init__(self) -> None:
        self.data = self.data or toy_data(sum(self.sizes))
        if self.device != "cpu" and isinstance(self.data.images, TensorImages):
            self.data = replace(self.data, images=self.data.images.to(self.device))
        classes = self.data.labels.shape[1]
        self.task = Task(
            classes=classes,
            clients=len(self.sizes),
            rounds=self.rounds,
            batch_size=self.batch_size,
            epochs=self.epochs,
            seed=self.seed,
            width=8 if self.backbone is None else self.backbone.width,
            lr=self.lr,
            optimiser=self.optimiser,
            loss=self.loss,
            average=self.federation.average,
            robust=self.federation.averaging,
            server_sees=self.federation.server_sees,
            private=self.noise is not None,
            unknown_labels=self.data.known is not None,
        )
        cls = self.method_class or methods[self.name]
        config = {**SMALL.get(self.name, {}), **(self.config or {})}
        self.method = cls(cls.Config(**config), self.task)
        backbone = self.backbone or Pixels(InputSpec(*self.data.images.shape))
        self.model = Model(backbone, self.method.head(backbone.width))
        settings = TrainSettings(
            epochs=self.epochs, batch_size=self.batch_size, lr=self.lr, optimiser=self.optimiser
        )
        self.trainer = Cohort(
            self.model,
            self.method,
            self.data,
            split(self.sizes),
            settings,
            self.seed,
            torch.device(self.device),
            sweep_batch=5,
            frozen=self.parameters()[1],
            memory=ClientMemory(self.memory),
            changes=self.changes,
            mode=self.mode,
            clipping=None if self.noise is None else self.noise.clipping,
        )
        self.transport: Any = InProcess(self.trainer, self.stack)

    def parameters(self) -> tuple[Tensors, Tensors]:
        """The initial model: what is trained, and what is frozen."""
        params = self.model.init(torch.Generator().manual_seed(1))
        return self.model.divide({n: t.to(self.dtype) for n, t in params.items()})

    def initial(self) -> Record:
        trained, frozen = self.parameters()
        buffers = self.model.backbone.init_buffers()
        return self.method.init_state(trained, buffers).replace({FROZEN: frozen}).to(self.device)

    def loop(self) -> Federation:
        cohort = self.cohort or len(self.sizes)
        return Federation(
            self.method,
            self.transport,
            Schedule(dict(enumerate(self.sizes)), self.rounds, cohort, "uniform", self.seed),
            self.federation,
            self.seed,
            self.epochs,
            opening(self.method, self.model.head, self.federation),
            self.names,
            self.noise,
        )

    def run(self) -> tuple[Record, list[dict[str, Any]]]:
        """The state after all rounds, and all events."""
        events: list[dict[str, Any]] = []
        state = self.loop().run(self.initial(), 0, events.append, lambda round, state: None)
        return state, events


def same_bits(a: Record, b: Record) -> bool:
    first, second = dict(a.tensors()), dict(b.tensors())
    return first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def largest_difference(a: Record, b: Record) -> float:
    first, second = dict(a.tensors()), dict(b.tensors())
    assert first.keys() == second.keys()
    pairs = [(first[n].double().cpu(), second[n].double().cpu()) for n in first]
    return max(float((a - b).abs().max()) for a, b in pairs)
