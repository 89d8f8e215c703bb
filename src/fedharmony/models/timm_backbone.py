"""Any backbone of timm, by name: convolutional networks, other transformers.

timm's modules have no client axis. Clients of a stack run one after the other, so the engine takes
them one at a time; our own :mod:`~fedharmony.models.vit` is many times faster where it fits.

Batch normalisation trains as usual: a client's batches are normalised with their own statistics,
which renew the running ones; these travel with the model, are averaged by the server like
parameters, and serve evaluation and passes without training. A batch of one image has no
statistics: it is normalised with the running ones, and leaves them. Dropout and stochastic depth
are off.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any

import torch
from annotated_types import MinLen
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from fedharmony.config import FilePath
from fedharmony.errors import ConfigError, nearest
from fedharmony.models.base import Backbone, InputSpec, Shapes, models
from fedharmony.models.hub import locate
from fedharmony.models.weights import compare_shapes, read_weights
from fedharmony.types import Group, Tensors

PREFIX = "backbone."


@models.register("timm")
class TimmBackbone(Backbone):
    """Any backbone of the timm package, one client at a time (``architecture = "resnet18"``)."""

    stackable = False

    @dataclass(frozen=True)
    class Config(Backbone.Config):
        """Settings of a timm backbone.

        Attributes:
            architecture: timm's name of the model.
            weights: file (.safetensors, .pth) or name of a model of the Hugging Face hub to start
                from; none means random weights.
            mean: per-channel mean of the input normalisation; none follows weights or model.
            std: per-channel standard deviation, likewise.
        """

        architecture: Annotated[str, MinLen(1)] = "resnet18"
        weights: FilePath | None = None
        mean: tuple[float, float, float] | None = None
        std: tuple[float, float, float] | None = None

    config: Config

    def __init__(self, config: Config, input: InputSpec) -> None:
        self.config, self.input = config, input
        self.module, self._sized = _create(config.architecture, input)
        for parameter in self.module.parameters():
            parameter.requires_grad_(False)
        self.weights = None if config.weights is None else locate(config.weights)
        own = self.module.pretrained_cfg
        self.mean = config.mean or (self.weights and self.weights.mean) or own.get("mean")
        self.std = config.std or (self.weights and self.weights.std) or own.get("std")
        with torch.no_grad():
            tokens = self._tokens(torch.zeros(1, input.channels, input.height, input.width))
        self.width = int(self.module.num_features)
        if tokens.shape[-1] != self.width:
            raise ConfigError(
                f"timm's {config.architecture!r} has features of width {self.width} but tokens of "
                f"width {tokens.shape[-1]}; heads cannot read them. Choose another architecture."
            )
        self.patches = tokens.shape[1] - self.class_tokens
        self._statistics = {
            f"{PREFIX}{name}.{part}"
            for name, _ in _batch_norms(self.module)
            for part in ("running_mean", "running_var")
        }
        self.mixes_images = bool(self._statistics)
        self._still = self  # what is not in training

    @property
    def class_tokens(self) -> int:  # type: ignore[override]
        """Tokens before the patches: class and register tokens, none for a feature map."""
        return int(getattr(self.module, "num_prefix_tokens", 0))

    def shapes(self) -> Shapes:
        """Timm's names behind ``backbone.``."""
        return {PREFIX + n: tuple(p.shape) for n, p in self.module.named_parameters()}

    def init(self, generator: torch.Generator) -> Tensors:
        """Parameters from ``config.weights``, or timm's own random start.

        timm draws from the global generator; it is seeded from ``generator`` and put back.
        """
        if self.weights is None:
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(int(torch.randint(2**31, (), generator=generator)))
                fresh, _ = _create(self.config.architecture, self.input)
            return {PREFIX + n: p.detach().clone() for n, p in fresh.named_parameters()}
        return {n: t for n, t in self._file().items() if n in self.shapes()}

    def init_buffers(self) -> Tensors:
        """Running statistics of batch normalisation."""
        return {n: t for n, t in self._buffers().items() if n in self._statistics}

    def constants(self) -> Tensors:
        """Whatever else the module keeps beside its parameters, for instance index tables."""
        return {n: t for n, t in self._buffers().items() if n not in self._statistics}

    def as_timm(self) -> tuple[str, dict[str, Any]]:
        """The architecture; those that are built for one size of images are told it."""
        size = [self.input.height, self.input.width]
        return self.config.architecture, {"img_size": size} if self._sized else {}

    def training(self) -> TimmBackbone:
        """The same backbone with its batch normalisation in training mode."""
        if not self.mixes_images:
            return self
        twin = copy.copy(self)
        twin.module = copy.deepcopy(self.module)
        for _, layer in _batch_norms(twin.module):
            layer.training = True  # of this layer alone: dropout inside of it stays off
        return twin

    def _buffers(self) -> Tensors:
        own = {PREFIX + n: b.detach().clone() for n, b in self.module.named_buffers()}
        if self.weights is not None:
            own |= {n: t.to(own[n].dtype) for n, t in self._file().items() if n in own}
        return own

    def _file(self) -> Tensors:
        """The tensors of the weights file, checked against the module's."""
        assert self.weights is not None
        state = self.module.state_dict()
        found = {n: t for n, t in read_weights(self.weights.path).items() if n in state}
        wanted = {n: tuple(t.shape) for n, t in state.items()}
        compare_shapes(self.weights.path, {n: tuple(t.shape) for n, t in found.items()}, wanted)
        return {PREFIX + n: t.float() if t.is_floating_point() else t for n, t in found.items()}

    def tokens(self, params: Group, images: Tensor) -> Tensor:
        """All tokens (M, B, N, D): a feature map's positions, or a transformer's tokens."""
        return self._each(params, images, "_tokens")

    def features(self, params: Group, images: Tensor) -> Tensor:
        """The pooled features (M, B, D), as timm pools them."""
        return self._each(params, images, "_pooled")

    def _tokens(self, images: Tensor) -> Tensor:
        found: Tensor = self.module.forward_features(images)
        if found.dim() == 4:  # channels first, or last as in Swin
            last = getattr(self.module, "output_fmt", "NCHW") == "NHWC"
            return found.flatten(1, 2) if last else found.flatten(2).mT
        return found

    def _pooled(self, images: Tensor) -> Tensor:
        features = self.module.forward_features(images)
        pooled: Tensor = self.module.forward_head(features, pre_logits=True)
        return pooled

    def _each(self, params: Group, images: Tensor, part: str) -> Tensor:
        names = [n for n in params if n.startswith(PREFIX)]
        wrapped = _Part(self if images.shape[1] > 1 else self._still, part)
        outputs = []
        for m in range(len(images)):
            own = {f"net.{n.removeprefix(PREFIX)}": params[n][m] for n in names}
            outputs.append(torch.func.functional_call(wrapped, own, (images[m],)))
        return torch.stack(outputs)


class _Part(torch.nn.Module):
    """One function of a backbone as a module, so that its parameters can be replaced."""

    def __init__(self, backbone: TimmBackbone, part: str) -> None:
        super().__init__()
        self.net = backbone.module
        self._part = getattr(backbone, part)

    def forward(self, images: Tensor) -> Tensor:
        found: Tensor = self._part(images)
        return found


def _create(architecture: str, input: InputSpec) -> tuple[Any, bool]:
    """The module, and whether it is built for one size of images."""
    try:
        import timm
    except ImportError:
        raise ConfigError(
            'Backbones of timm need the package: pip install "fedharmony[vision]".'
        ) from None
    if not timm.is_model(architecture.partition(".")[0]):
        raise ConfigError(
            f"timm has no architecture {architecture!r}. "
            + nearest(architecture, timm.list_models()).partition(" Valid:")[0]
            + " 'timm.list_models()' lists them."
        )
    options: dict[str, Any] = {"num_classes": 0, "pretrained": False, "in_chans": input.channels}
    size = (input.height, input.width)
    sized = True
    try:
        module = timm.create_model(architecture, img_size=size, **options)
    except TypeError:  # takes images of any size
        module, sized = timm.create_model(architecture, **options), False
    for _, layer in _batch_norms(module):
        layer.num_batches_tracked = None  # a counter that nothing reads
    return module.eval(), sized


def _batch_norms(module: torch.nn.Module) -> Iterator[tuple[str, _BatchNorm]]:
    """The layers with running statistics, by name."""
    for name, layer in module.named_modules():
        if isinstance(layer, _BatchNorm) and layer.running_mean is not None:
            yield name, layer
