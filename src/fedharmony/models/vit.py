"""Vision transformer (Dosovitskiy et al., "An Image is Worth 16x16 Words", ICLR 2021), stacked.

All clients of a stack run in one batched computation: linear layers are batched products, layer
norms have one affine map per client, the patch embedding is a linear layer on unfolded patches, and
attention, having no weights, merges clients and images into one axis.

Parameter names, shapes and initial distributions are timm's, so timm's checkpoints load as they
are; images of another size than a checkpoint's get interpolated position embeddings.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor

from fedharmony.config import FilePath
from fedharmony.errors import ConfigError
from fedharmony.models.base import (
    Backbone,
    InputSpec,
    Piece,
    Shapes,
    adds_bias_apart,
    attention,
    layer_norm,
    linear,
    models,
)
from fedharmony.models.hub import locate
from fedharmony.models.weights import load_weights
from fedharmony.types import Group, Tensors

Count = Annotated[int, Ge(1), Le(65_536)]
Depth = Annotated[int, Ge(1), Le(1000)]
Positive = Annotated[float, Gt(0), Le(1000)]
Stream: TypeAlias = tuple[Tensor, Tensor]


@models.register("vit")
class ViT(Backbone):
    """Vision transformer of any size: pre-norm blocks, class token, learned positions.

    >>> vit = ViT(ViT.Config(width=8, depth=1, heads=2, patch=8), InputSpec(3, 16, 24))
    >>> params = vit.init(torch.Generator().manual_seed(0))
    >>> stacked = {name: tensor.expand(5, *tensor.shape) for name, tensor in params.items()}
    >>> vit.tokens(stacked, torch.zeros(5, 2, 3, 16, 24)).shape  # 1 + 2 · 3 tokens
    torch.Size([5, 2, 7, 8])
    >>> vit.features(stacked, torch.zeros(5, 2, 3, 16, 24)).shape
    torch.Size([5, 2, 8])
    """

    @dataclass(frozen=True)
    class Config(Backbone.Config):
        """Settings of a vision transformer.

        Attributes:
            width: token width D.
            depth: number of blocks.
            heads: attention heads; they divide ``width``.
            patch: side of a patch in pixels; it divides height and width of the images.
            mlp_ratio: hidden width of a block's MLP over ``width``.
            weights: file (.safetensors, .pth) or name of a model of the Hugging Face hub to
                start from; none means random weights.
            mean: per-channel mean of the input normalisation, for images in [0, 1]; none follows
                the weights, and is 0.5 where they do not say.
            std: per-channel standard deviation of the input normalisation, likewise.
        """

        width: Count = 64
        depth: Depth = 2
        heads: Count = 4
        patch: Count = 8
        mlp_ratio: Positive = 4.0
        weights: FilePath | None = None
        mean: tuple[float, float, float] | None = None
        std: tuple[Positive, Positive, Positive] | None = None

    config: Config

    def __init__(self, config: Config, input: InputSpec) -> None:
        if config.width % config.heads:
            raise ConfigError(
                f"A vision transformer of width {config.width} cannot have {config.heads} heads, "
                "which must divide the width. Change width or heads."
            )
        if input.channels != 3:
            raise ConfigError(
                f"The vision transformer takes images of 3 channels, the data have "
                f"{input.channels}. Convert the images to RGB."
            )
        if input.height % config.patch or input.width % config.patch:
            raise ConfigError(
                f"Images of {input.height} × {input.width} pixels cannot be cut into patches of "
                f"{config.patch} × {config.patch}. Change the patch, or resize the images to "
                f"multiples of {config.patch}."
            )
        self.config, self.input = config, input
        self.weights = None if config.weights is None else locate(config.weights)
        self.width = config.width
        self.mean = config.mean or (self.weights and self.weights.mean) or (0.5, 0.5, 0.5)
        self.std = config.std or (self.weights and self.weights.std) or (0.5, 0.5, 0.5)
        self.grid = (input.height // config.patch, input.width // config.patch)
        self.patches = self.grid[0] * self.grid[1]
        self.hidden = int(config.width * config.mlp_ratio)
        self._embed: Piece = embed
        self._block: Piece = block
        self._last_block: Piece = last_block

    def shapes(self) -> Shapes:
        """Names and shapes as timm has them."""
        D, channels, patch = self.width, self.input.channels, self.config.patch
        shapes: Shapes = {
            "cls_token": (1, 1, D),
            "pos_embed": (1, 1 + self.patches, D),
            "patch_embed.proj.weight": (D, channels, patch, patch),
            "patch_embed.proj.bias": (D,),
        }
        for i in range(self.config.depth):
            for layer, shape in {
                "norm1": (D,),
                "attn.qkv": (3 * D, D),
                "attn.proj": (D, D),
                "norm2": (D,),
                "mlp.fc1": (self.hidden, D),
                "mlp.fc2": (D, self.hidden),
            }.items():
                shapes[f"blocks.{i}.{layer}.weight"] = shape
                shapes[f"blocks.{i}.{layer}.bias"] = shape[:1]
        return {**shapes, "norm.weight": (D,), "norm.bias": (D,)}

    def init(self, generator: torch.Generator) -> Tensors:
        """Parameters from ``config.weights``, or drawn as timm draws them."""
        if self.weights is not None:
            return load_weights(self.weights.path, self.shapes(), self.grid)
        return {name: self._draw(name, shape, generator) for name, shape in self.shapes().items()}

    def _draw(self, name: str, shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        tensor = torch.zeros(shape)
        if name.startswith("patch_embed."):  # a convolution's default
            bound = (self.input.channels * self.config.patch**2) ** -0.5
            return tensor.uniform_(-bound, bound, generator=generator)
        if name == "cls_token":
            return tensor.normal_(std=1e-6, generator=generator)
        if name.endswith("bias"):
            return tensor
        if "norm" in name:
            return tensor.fill_(1.0)
        return torch.nn.init.trunc_normal_(tensor, std=0.02, generator=generator)

    def tokens(self, params: Group, images: Tensor) -> Tensor:
        """Tokens after the final norm, (M, B, N, D), the class token first."""
        x, normed = self._before(self.config.depth, params, images)
        return normed.to(x.dtype)

    def features(self, params: Group, images: Tensor) -> Tensor:
        """The class token after the final norm, (M, B, D).

        It equals ``tokens(...)[:, :, 0]`` and costs less: in the last block only the class token
        asks for attention, and only the class token goes on through the MLP.
        """
        last = self.config.depth - 1
        stream = self._before(last, params, images)
        x = self._last_block(_own(params, f"blocks.{last}."), stream, self.config.heads)
        return _norm(params, "norm", x[:, :, 0])

    def _before(self, last: int, params: Group, images: Tensor) -> Stream:
        """The tokens as block ``last`` takes them in, or as they leave the transformer."""
        norms = [f"blocks.{i}.norm1" for i in range(self.config.depth)] + ["norm"]
        names = ("cls_token", "pos_embed", "patch_embed.proj.weight", "patch_embed.proj.bias")
        own = {name: params[name] for name in names} | _next(params, norms[0])
        stream: Stream = self._embed(own, images, self.config.patch)
        for i in range(last):
            own = _own(params, f"blocks.{i}.") | _next(params, norms[i + 1])
            stream = self._block(own, stream, self.config.heads)
        return stream

    def compiled(self, compile: Callable[[Piece], Piece]) -> ViT:
        """The same transformer; embedding, block and last block are compiled once each."""
        made = copy(self)
        made._embed, made._block = compile(embed), compile(block)
        made._last_block = compile(last_block)
        return made

    def as_timm(self) -> tuple[str, dict[str, Any]]:
        """Any vision transformer of timm, with these sizes."""
        config = self.config
        return "vit_base_patch16_224", {
            "img_size": [self.input.height, self.input.width],
            "patch_size": config.patch,
            "embed_dim": config.width,
            "depth": config.depth,
            "num_heads": config.heads,
            "mlp_ratio": config.mlp_ratio,
        }

    def elements(self) -> int:
        """Tokens × width × blocks."""
        return (1 + self.patches) * self.width * self.config.depth


# -- The pieces of a transformer -------------------------------------------------------------------


# A piece hands the tokens on together with their norm, which the next piece reads. Computed by the
# next piece, the norm would be one more pass over all tokens.


def embed(own: Group, images: Tensor, patch: int) -> Stream:
    """Images (M, B, channels, H, W) to class and patch tokens with positions (M, B, N, D)."""
    M, B, channels, height, wide = images.shape
    rows, columns = height // patch, wide // patch
    patches = images.reshape(M, B, channels, rows, patch, columns, patch)
    patches = patches.permute(0, 1, 3, 5, 2, 4, 6).reshape(M, B, rows * columns, -1)
    weight, bias = own["patch_embed.proj.weight"], own["patch_embed.proj.bias"]
    embedded = linear(patches, weight.flatten(2), bias)
    at_class, at_patches = own["pos_embed"].split_with_sizes([1, rows * columns], dim=2)
    class_token = (own["cls_token"] + at_class).expand(M, B, 1, embedded.shape[-1])
    return _normed(own, torch.cat([class_token, embedded + at_patches], dim=2))


def block(own: Group, stream: Stream, heads: int) -> Stream:
    """Tokens (M, B, N, D) through one block."""
    x, y = stream
    query, key, value, shift = _asked(own, y, heads)
    return _normed(own, _mlp(own, x + _merged(own, attention(query, key, value), shift, x)))


def last_block(own: Group, stream: Stream, heads: int) -> Tensor:
    """The class token (M, B, 1, D) after a block that takes all tokens (M, B, N, D) in."""
    x, y = stream
    query, key, value, shift = _asked(own, y, heads, class_only=True)
    first = x[:, :, :1]
    return _mlp(own, first + _merged(own, attention(query, key, value), shift, first))


def _normed(own: Group, x: Tensor) -> Stream:
    """The tokens, and their norm in the precision in which the next piece takes products."""
    y, kind = _norm(own, "next", x), x.device.type
    return x, y.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else y


def _mlp(own: Group, x: Tensor) -> Tensor:
    y = F.gelu(_linear(own, "mlp.fc1", _norm(own, "norm2", x)))
    return x + _linear(own, "mlp.fc2", y)


def _asked(
    own: Group, y: Tensor, heads: int, class_only: bool = False
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Queries, keys and values (M · B, heads, N, D / heads), and the bias (M, D) behind attention.

    Where a bias costs a pass of its own, two of three are spared. A bias of keys adds the same to
    all scores of a query, which softmax does not see. A bias b of values comes out of attention as
    it went in, because weights sum to 1: ``W (a + b) + c = W a + (W b + c)``.
    """
    width = y.shape[-1]
    weight, bias = own["attn.qkv.weight"], own["attn.qkv.bias"]
    shift, late = own["attn.proj.bias"], adds_bias_apart(weight)
    now = None if late else bias
    if class_only:
        parts = [width, 2 * width]
        weights = weight.split_with_sizes(parts, dim=1)
        biases = (None, None) if now is None else now.split_with_sizes(parts, dim=1)
        query = linear(y[:, :, :1], weights[0], biases[0])
        key, value = linear(y, weights[1], biases[1]).split_with_sizes([width] * 2, dim=-1)
    else:
        query, key, value = linear(y, weight, now).split_with_sizes([width] * 3, dim=-1)
    if late:
        at_query, _, at_value = bias.split_with_sizes([width] * 3, dim=1)
        query = query + at_query.to(query.dtype)[:, None, None]
        shift = shift + linear(at_value.unsqueeze(1), own["attn.proj.weight"], None).squeeze(1)
    return _heads(query, heads), _heads(key, heads), _heads(value, heads), shift


def _heads(x: Tensor, heads: int) -> Tensor:
    """(M, B, N, D) to (M · B, heads, N, D / heads)."""
    M, B, N, D = x.shape
    return x.reshape(M * B, N, heads, D // heads).transpose(1, 2)


def _merged(own: Group, attended: Tensor, shift: Tensor, like: Tensor) -> Tensor:
    """What the heads found, (M · B, heads, N, D / heads), in the shape of the tokens."""
    return linear(attended.transpose(1, 2).reshape(like.shape), own["attn.proj.weight"], shift)


def _own(params: Group, prefix: str) -> Tensors:
    """The parameters of one block, by their names inside it: the same for every block."""
    return {n.removeprefix(prefix): t for n, t in params.items() if n.startswith(prefix)}


def _next(params: Group, name: str) -> Tensors:
    """The norm behind a piece, by the same name for every piece."""
    return {f"next.{part}": params[f"{name}.{part}"] for part in ("weight", "bias")}


def _linear(params: Group, name: str, x: Tensor) -> Tensor:
    return linear(x, params[f"{name}.weight"], params[f"{name}.bias"])


def _norm(params: Group, name: str, x: Tensor) -> Tensor:
    return layer_norm(x, params[f"{name}.weight"], params[f"{name}.bias"], eps=1e-6)


@models.register("vit_tiny_patch16")
class ViTTiny(ViT):
    """ViT-Ti/16: width 192, depth 12, 3 heads."""

    @dataclass(frozen=True)
    class Config(ViT.Config):
        """Settings of :class:`ViT.Config` with the sizes of ViT-Ti/16."""

        width: Count = 192
        depth: Depth = 12
        heads: Count = 3
        patch: Count = 16


@models.register("vit_small_patch16")
class ViTSmall(ViT):
    """ViT-S/16: width 384, depth 12, 6 heads."""

    @dataclass(frozen=True)
    class Config(ViT.Config):
        """Settings of :class:`ViT.Config` with the sizes of ViT-S/16."""

        width: Count = 384
        depth: Depth = 12
        heads: Count = 6
        patch: Count = 16


@models.register("vit_base_patch16")
class ViTBase(ViT):
    """ViT-B/16: width 768, depth 12, 12 heads."""

    @dataclass(frozen=True)
    class Config(ViT.Config):
        """Settings of :class:`ViT.Config` with the sizes of ViT-B/16."""

        width: Count = 768
        depth: Depth = 12
        heads: Count = 12
        patch: Count = 16
