"""Models of feature vectors: logistic regression and a multi-layer perceptron, stacked.

All clients of a stack run in one batched product per layer. Features are standardised first,
``z = (x − mean) / std``, with the training data's statistics unless others are given. The last
layer is the method's own head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le, MaxLen, MinLen
from torch import Tensor

from fedharmony.errors import ConfigError
from fedharmony.models.base import Backbone, FeatureSpec, Shapes, linear, models
from fedharmony.types import Group, Tensors

Width = Annotated[int, Ge(1), Le(65_536)]

ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {"relu": F.relu, "gelu": F.gelu}


@models.register("linear")
class Linear(Backbone):
    """Logistic regression of feature vectors: the head alone, on standardised features.

    >>> backbone = Linear(Linear.Config(), FeatureSpec(mean=(0.0, 5.0), std=(1.0, 2.0)))
    >>> backbone.width, backbone.shapes(), backbone.std
    (2, {}, (1.0, 2.0))
    """

    takes = FeatureSpec
    patches = 0

    @dataclass(frozen=True)
    class Config(Backbone.Config):
        """Settings of a linear model.

        Attributes:
            mean: per feature, what is subtracted; one number stands for all features, and none
                means the mean in the training data.
            std: per feature, what the difference is divided by, likewise.
        """

        mean: Annotated[tuple[float, ...], MinLen(1)] | None = None
        std: Annotated[tuple[Annotated[float, Gt(0)], ...], MinLen(1)] | None = None

    config: Config

    def __init__(self, config: Config, input: FeatureSpec) -> None:
        self.config, self.input, self.width = config, input, input.width
        self.mean = _per_feature("mean", config.mean or input.mean, input)
        self.std = _per_feature("std", config.std or input.std, input)

    def shapes(self) -> Shapes:
        """None: only the head has parameters."""
        return {}

    def init(self, generator: torch.Generator) -> Tensors:
        """None: only the head has parameters."""
        return {}

    def tokens(self, params: Group, images: Tensor) -> Tensor:
        """One token (M, B, 1, D): the feature vector."""
        return self.features(params, images).unsqueeze(2)

    def features(self, params: Group, images: Tensor) -> Tensor:
        """The standardised features (M, B, D) themselves."""
        return images


@models.register("mlp")
class Mlp(Linear):
    """Multi-layer perceptron of feature vectors: ``h ← a(W h + b)`` per hidden layer.

    >>> backbone = Mlp(Mlp.Config(hidden=(8, 4)), FeatureSpec(mean=(0.0, 5.0), std=(1.0, 2.0)))
    >>> backbone.width, backbone.shapes()["layers.1.weight"]
    (4, (4, 8))
    """

    @dataclass(frozen=True)
    class Config(Linear.Config):
        """Settings of a multi-layer perceptron.

        Attributes:
            hidden: widths of the hidden layers.
            activation: a, "relu" or "gelu".
        """

        hidden: Annotated[tuple[Width, ...], MinLen(1), MaxLen(100)] = (256,)
        activation: Literal["relu", "gelu"] = "relu"

    config: Config

    def __init__(self, config: Config, input: FeatureSpec) -> None:
        super().__init__(config, input)
        self.width = config.hidden[-1]

    def shapes(self) -> Shapes:
        """``layers.i.weight`` (out, in) and ``layers.i.bias`` (out,)."""
        widths = (self.input.width, *self.config.hidden)
        shapes: Shapes = {}
        for i in range(len(self.config.hidden)):
            shapes[f"layers.{i}.weight"] = (widths[i + 1], widths[i])
            shapes[f"layers.{i}.bias"] = (widths[i + 1],)
        return shapes

    def init(self, generator: torch.Generator) -> Tensors:
        """Normal weights with σ = √(2 / in) (He et al., ICCV 2015), zero biases."""
        params: Tensors = {}
        for name, shape in self.shapes().items():
            params[name] = torch.zeros(shape)
            if name.endswith("weight"):
                params[name].normal_(std=(2 / shape[1]) ** 0.5, generator=generator)
        return params

    def features(self, params: Group, images: Tensor) -> Tensor:
        """The last hidden layer (M, B, D)."""
        activate, h = ACTIVATIONS[self.config.activation], images
        for i in range(len(self.config.hidden)):
            h = activate(linear(h, params[f"layers.{i}.weight"], params[f"layers.{i}.bias"]))
        return h


def _per_feature(setting: str, values: tuple[float, ...], input: FeatureSpec) -> tuple[float, ...]:
    """One number per feature."""
    if len(values) not in (1, input.width):
        raise ConfigError(
            f"model.{setting} has {len(values)} numbers, but the data have {input.width} features. "
            "Give one number per feature, one for all of them, or none for the training data's."
        )
    return values * (input.width // len(values))
