"""What a model is: a backbone and a head, described without tensors.

A model is a set of pure functions of flat, named parameters. In :meth:`Model.apply` every
parameter and every image carries a leading client axis: M clients of batch B run as one
computation, a weight being ``(M, out, in)``, and a single model is the case M = 1. What all clients
share is not copied: such a parameter is expanded along the client axis (``tensor.expand(M, ...)``,
stride 0) or has a client axis of length 1.

Backbones use timm's parameter names; the names of a head begin with ``head.``.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor

from fedharmony.config import Checked
from fedharmony.registry import Registry
from fedharmony.types import Group, Tensors

models: Registry[type[Backbone]] = Registry("model", "fedharmony.models")

#: Shapes by name, without the client axis.
Shapes: TypeAlias = dict[str, tuple[int, ...]]

#: A part of a backbone that can be compiled: a function of its own parameters, inputs and options.
Piece: TypeAlias = Callable[..., Any]

#: Up to this many keys, attention on a CPU is faster as the plain formula than as a fused kernel.
SHORT_SEQUENCE = 128


@dataclass(frozen=True)
class InputSpec:
    """The images a backbone is built for.

    >>> str(InputSpec(3, 32, 24))
    'images of 32 × 24 pixels'
    """

    kind: ClassVar[str] = "images"

    channels: int
    height: int
    width: int

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one image."""
        return self.channels, self.height, self.width

    def __str__(self) -> str:
        return f"images of {self.height} × {self.width} pixels"


@dataclass(frozen=True)
class FeatureSpec:
    """The feature vectors a backbone is built for.

    >>> str(FeatureSpec((0.0, 0.0), (1.0, 1.0)))
    'vectors of 2 features'

    Mean and standard deviation are those in the training data; 1 for a feature that never changes.
    """

    kind: ClassVar[str] = "feature vectors"

    mean: tuple[float, ...]
    std: tuple[float, ...]
    names: tuple[str, ...] = ()

    @property
    def width(self) -> int:
        """The number of features."""
        return len(self.mean)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one vector."""
        return (self.width,)

    def __str__(self) -> str:
        return f"vectors of {self.width} features"


class Backbone(ABC):
    """Images (or feature vectors) to features; holds settings, never tensors.

    Attributes:
        config: the settings; a subclass has its own ``Config``, which inherits from this one.
        stackable: whether more than one client may be applied at a time.
        mixes_images: whether images of a batch influence each other in training, as batch
            normalisation does it. Then batches hold no padding, so that steps have any size: they
            are neither compiled nor recorded. Only such a backbone may have buffers, and it is not
            stackable.
        width: feature width D.
        patches: patches of an image that :meth:`tokens` tells apart; 0 where there are none.
        mean: of the expected input normalisation: per channel, for images in [0, 1], or per
            feature; so is ``std``.
    """

    @dataclass(frozen=True)
    class Config(Checked):
        """Settings of the backbone."""

    config: Config
    name: ClassVar[str]
    stackable: ClassVar[bool] = True
    takes: ClassVar[type[InputSpec | FeatureSpec]] = InputSpec
    mixes_images: bool = False
    #: How many of the first tokens stand for the whole image, not for a patch.
    class_tokens: ClassVar[int] = 1

    width: int
    patches: int = 1
    mean: tuple[float, ...]
    std: tuple[float, ...]

    @abstractmethod
    def __init__(self, config: Config, input: Any) -> None:
        """Check that ``config`` fits the input; raise ConfigError with advice if it does not.

        ``input`` is of the kind that the class :attr:`takes`.
        """

    @abstractmethod
    def shapes(self) -> Shapes:
        """Shape of each parameter of one client."""

    @abstractmethod
    def init(self, generator: torch.Generator) -> Tensors:
        """Float32 parameters of one client on the CPU: drawn, or read from a weights file."""

    def init_buffers(self) -> Tensors:
        """What training changes beside parameters (running statistics), if there is any.

        Buffers travel with the parameters and are averaged with the same weights. In
        :meth:`tokens` they stand among the parameters.
        """
        return {}

    def constants(self) -> Tensors:
        """Tensors that never change, if there are any; in :meth:`tokens`, among the parameters."""
        return {}

    def training(self) -> Backbone:
        """The same backbone as it is applied in training: itself, unless that differs.

        What this gives renews its buffers in place, (M, ...) each among the parameters.
        """
        return self

    @abstractmethod
    def tokens(self, params: Group, images: Tensor) -> Tensor:
        """All tokens of normalised inputs: (M, B, channels, H, W) or (M, B, F) to (M, B, N, D)."""

    def features(self, params: Group, images: Tensor) -> Tensor:
        """One vector per image, (M, B, D): the first (class) token unless overridden.

        Override it where another vector is meant, or where it costs less than all tokens do.
        """
        return self.tokens(params, images)[:, :, 0]

    def compiled(self, compile: Callable[[Piece], Piece]) -> Backbone:
        """The same backbone with its parts compiled; itself where it has none to compile."""
        return self

    def as_timm(self) -> tuple[str, dict[str, Any]] | None:
        """Architecture and arguments with which timm makes the same network, if it can.

        Names of parameters are then timm's, but for ``backbone.`` before them.
        """
        return None

    def elements(self) -> int:
        """Numbers per image that the layers hand on, which is what compiling saves time on.

        0 where there is nothing to compile.
        """
        return 0


class Head(ABC):
    """Features to outputs; holds sizes, never tensors.

    Attributes:
        reads: what :meth:`apply` is given: one vector per image, or one per patch.
        frozen: names of parameters that are neither trained, averaged nor sent.
        no_closed_form: why the head cannot be solved in closed form before training
            (``federation.head_start``); empty where it can: ``W f + b`` of the features f.
    """

    no_closed_form: ClassVar[str] = "it is not linear in the features"
    reads: ClassVar[Literal["features", "patches"]] = "features"
    frozen: frozenset[str] = frozenset()

    @abstractmethod
    def shapes(self) -> Shapes:
        """Shape of each parameter of one client, frozen ones included."""

    @abstractmethod
    def init(self, generator: torch.Generator) -> Tensors:
        """Float32 parameters of one client on the CPU."""

    def embed(self, params: Group, features: Tensor) -> Tensor:
        """What the classifier itself sees of the features (M, B, D): the same unless overridden."""
        return features

    @abstractmethod
    def apply(self, params: Group, features: Tensor, inputs: Group | None = None) -> Tensor:
        """Outputs (M, B, C) of features (M, B, D), or (M, B, N, D) if the head reads patches.

        ``inputs`` are whatever else the head reads, (M, B, ...) each, for instance known labels.
        """


@dataclass(frozen=True)
class Model:
    """A backbone and a head.

    >>> from fedharmony.models.heads import LinearHead
    >>> from fedharmony.models.vit import ViT
    >>> backbone = ViT(ViT.Config(width=8, depth=1, heads=2), InputSpec(3, 16, 16))
    >>> model = Model(backbone, LinearHead(backbone.width, classes=5))
    >>> clients = [model.init(torch.Generator().manual_seed(seed)) for seed in range(4)]
    >>> model.apply(stack(clients), torch.zeros(4, 2, 3, 16, 16)).shape
    torch.Size([4, 2, 5])
    >>> trained, frozen = model.divide(clients[0])
    >>> list(trained)[-2:], frozen, model.num_parameters
    (['head.weight', 'head.bias'], {}, 2525)
    """

    backbone: Backbone
    head: Head

    def shapes(self) -> Shapes:
        """Shape of each parameter of one client."""
        return {**self.backbone.shapes(), **self.head.shapes()}

    @property
    def num_parameters(self) -> int:
        """The number of scalars in the parameters of one client, frozen ones included."""
        return sum(math.prod(shape) for shape in self.shapes().values())

    def init(self, generator: torch.Generator) -> Tensors:
        """Parameters of one client on the CPU: the backbone's, then the head's."""
        return {**self.backbone.init(generator), **self.head.init(generator)}

    def divide(self, params: Group) -> tuple[Tensors, Tensors]:
        """What is trained, averaged and sent; and what is frozen, the backbone's constants too."""
        names = self.head.frozen
        frozen = {name: tensor for name, tensor in params.items() if name in names}
        trained = {name: tensor for name, tensor in params.items() if name not in names}
        return trained, {**frozen, **self.backbone.constants()}

    def training(self) -> Model:
        """The same model as it is applied in training."""
        return replace(self, backbone=self.backbone.training())

    def compiled(self, compile: Callable[[Piece], Piece]) -> Model:
        """The same model with the parts of its backbone compiled."""
        return replace(self, backbone=self.backbone.compiled(compile))

    def features(self, params: Group, images: Tensor) -> Tensor:
        """What the classifier sees of each image, one vector (M, B, ·) per image."""
        return self.head.embed(params, self.backbone.features(params, images))

    def apply(self, params: Group, images: Tensor, inputs: Group | None = None) -> Tensor:
        """Outputs (M, B, C) of M clients for normalised images (M, B, channels, H, W).

        Clients do not influence each other. Nor do rows (unless the backbone ``mixes_images`` in
        training), so padding rows cannot change a result. ``params`` holds buffers and constants,
        too; ``inputs`` are what else the head reads, (M, B, ...) each.
        """
        backbone, head = self.backbone, self.head
        if head.reads == "features":
            return head.apply(params, backbone.features(params, images), inputs)
        patches = backbone.tokens(params, images)[:, :, backbone.class_tokens :]
        return head.apply(params, patches, inputs)


def stack(clients: Sequence[Group]) -> Tensors:
    """Stack the tensors of M clients along a new first axis.

    >>> stack([{"w": torch.zeros(2)}, {"w": torch.ones(2)}])["w"].tolist()
    [[0.0, 0.0], [1.0, 1.0]]
    """
    return {name: torch.stack([client[name] for client in clients]) for name in clients[0]}


def unstack(tensors: Group, client: int) -> Tensors:
    """The tensors of one client of a stack, as views.

    >>> unstack({"w": torch.tensor([[1.0], [2.0]])}, 1)["w"].tolist()
    [2.0]
    """
    return {name: tensor[client] for name, tensor in tensors.items()}


# -- Layers with a client axis --------------------------------------------------------------------


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``y_m = x_m W_mᵀ + b_m`` for each client m; (M, ..., in) gives (M, ..., out).

    >>> x = torch.ones(2, 3, 4)
    >>> weight, bias = torch.stack([torch.ones(5, 4), torch.zeros(5, 4)]), torch.ones(2, 5)
    >>> linear(x, weight, bias)[:, 0, 0].tolist()
    [5.0, 1.0]
    """
    if _is_shared(weight) and (bias is None or _is_shared(bias)):
        return F.linear(x, _shared(weight), None if bias is None else _shared(bias))
    rows = x.flatten(1, -2)
    if bias is not None and not adds_bias_apart(weight):
        y = torch.baddbmm(bias.unsqueeze(1), rows, weight.mT)
    else:
        y = torch.bmm(rows, weight.mT)
        y = y if bias is None else y + bias.to(y.dtype).unsqueeze(1)
    return y.view(*x.shape[:-1], -1)


def adds_bias_apart(weight: Tensor) -> bool:
    """Whether :func:`linear` adds the bias in a pass of its own, which what follows may absorb.

    A product of one client adds it for nothing, and so does a CPU. On a GPU a batched product would
    first have the bias written out for every row.
    """
    return weight.device.type != "cpu" and not _is_shared(weight)


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """``γ_m (x_m − mean) / √(var + ε) + β_m`` over the last axis of (M, ..., D), with γ, β (M, D).

    >>> x = torch.tensor([[[1.0, 3.0]], [[1.0, 3.0]]])
    >>> weight, bias = torch.tensor([[1.0], [2.0]]).expand(2, 2), torch.tensor([[0.0, 0], [1, 1]])
    >>> layer_norm(x, weight, bias, eps=0.0).tolist()
    [[[-1.0, 1.0]], [[-1.0, 3.0]]]
    """
    width = x.shape[-1:]
    if _is_shared(weight) and _is_shared(bias):
        return F.layer_norm(x, width, _shared(weight), _shared(bias), eps)
    lead = [1] * (x.dim() - 2)
    weight, bias = (t.view(len(t), *lead, -1) for t in (weight, bias))
    if sums_by_image(x):
        weight, bias = (t.expand(-1, x.shape[1], *[-1] * len(lead)) for t in (weight, bias))
    return torch.addcmul(bias, F.layer_norm(x, width, eps=eps), weight)


def sums_by_image(x: Tensor) -> bool:
    """Whether a norm's gradient is summed in two steps: within each image, then over images.

    Summed in one step, compiled code for any number of images divides by it at every read.
    """
    return x.device.type != "cpu"


def dropout(x: Tensor, rate: float, seeds: Tensor, place: int) -> Tensor:
    """Dropout whose mask depends on (seed of the row, place, position in the row) alone.

    A mask drawn from a generator would change with the number of clients in the stack, and between
    devices. Here a hash of seed, place and position decides, the same in every stack and on every
    device; each hash has 32 bits and decides for two neighbouring positions.

    >>> x, seeds = torch.ones(1, 2, 4000), torch.tensor([[7, 8]])
    >>> kept = dropout(x, 0.25, seeds, place=0)
    >>> kept.unique().tolist(), bool((kept[0, 0] == kept[0, 1]).all())
    ([0.0, 1.3333333730697632], False)
    >>> bool((kept > 0).float().mean().sub(0.75).abs() < 0.02)
    True

    Args:
        x: (M, B, ...).
        rate: chance below 1 that an entry becomes 0, taken to the nearest multiple of 2⁻¹⁶; what
            stays is divided by the chance to stay.
        seeds: (M, B) whole numbers in [0, 2³¹).
        place: tells uses of the same seeds apart.
    """
    below = min(round(rate * 2**16), 2**16 - 1)
    if below == 0:
        return x
    size = math.prod(x.shape[2:])
    far = (place * 0x9E3779B1 + 2**31) % 2**32 - 2**31  # apart, and an int32
    rows = _mixed(seeds.to(torch.int32) + far).unsqueeze(-1)
    bits = _mixed(rows ^ _mixed_numbers((size + 1) // 2, x.device)).view(torch.int16)[..., :size]
    # Written as numbers at once: the detour by a tensor of bool is slow on a CPU.
    kept = torch.ge(bits, below - 2**15, out=x.new_empty(bits.shape))
    return x * kept.mul_(2**16 / (2**16 - below)).view(x.shape)


def _mixed(word: Tensor) -> Tensor:
    """A 32-bit hash of int32 numbers, in place: Wellons' ``lowbias32``, a permutation of them.

    Products wrap around modulo 2³²; the masks make int32's arithmetic shifts logical ones.
    """
    for shift, multiplier in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
        word.bitwise_xor_((word >> shift).bitwise_and_(2 ** (32 - shift) - 1)).mul_(multiplier)
    return word.bitwise_xor_((word >> 16).bitwise_and_(2**16 - 1))


@functools.cache
def _mixed_numbers(count: int, device: torch.device) -> Tensor:
    """Hashes of 0, 1, …, count − 1, only to be read; a model has few sizes, so they are kept."""
    return _mixed(torch.arange(count, dtype=torch.int32, device=device))


def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """``softmax(Q Kᵀ / √d) V``; it has no weights, so clients and images are one axis.

    >>> query, key = torch.zeros(1, 1, 2, 4), torch.randn(1, 1, 3, 4)
    >>> value = torch.tensor([0.0, 1.0, 5.0]).view(1, 1, 3, 1)
    >>> attention(query, key, value).flatten().tolist()
    [2.0, 2.0]

    Shapes: (images, heads, queries or keys, width of a head).
    """
    if query.device.type != "cpu" or key.shape[-2] > SHORT_SEQUENCE:
        return F.scaled_dot_product_attention(query, key, value)
    query = query * query.shape[-1] ** -0.5
    if query.shape[-2] == 1:  # broadcasting spares the copies that a batched product makes
        weights = (query * key).sum(dim=-1, keepdim=True).softmax(dim=-2)
        return (weights * value).sum(dim=-2, keepdim=True)
    return (query @ key.mT).softmax(dim=-1) @ value


def _is_shared(tensor: Tensor) -> bool:
    """Whether all clients hold the same tensor and none of them needs a gradient of its own."""
    if tensor.shape[0] == 1:
        return True
    return tensor.stride(0) == 0 and not (tensor.requires_grad and torch.is_grad_enabled())


def _shared(tensor: Tensor) -> Tensor:
    """The one tensor behind a shared stack (``squeeze`` has a cheaper gradient than indexing)."""
    return tensor.squeeze(0) if tensor.shape[0] == 1 else tensor[0]
