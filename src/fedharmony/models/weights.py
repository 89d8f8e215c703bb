"""Weights files in timm's format, checked name by name and fitted to the images."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from fedharmony.errors import ConfigError, some
from fedharmony.reading import is_file, user_path
from fedharmony.types import Group, Tensors


def load_weights(
    path: str | Path, shapes: Mapping[str, tuple[int, ...]], grid: tuple[int, int]
) -> Tensors:
    """Read the parameters of a vision transformer from a timm checkpoint.

    A classifier in the file (``head.*``) is left out: its classes are not those of the task.
    Position embeddings of another grid are interpolated (:func:`resize_positions`).

    Args:
        path: ``.safetensors``; or a ``.pth``, ``.pt`` or ``.bin`` file that ``torch.load`` reads
            without unpickling objects. Tensors may be of half precision.
        shapes: name and shape of every parameter that is wanted, in the order of the result.
        grid: rows and columns of patches of the images to come.
    """
    path = user_path(path)
    tensors = {
        name: tensor.float()
        for name, tensor in read_weights(path).items()
        if not name.startswith("head.")
    }
    positions = tensors.get("pos_embed")
    if positions is not None and positions.dim() == 3 and positions.shape[1] > 1:
        tensors["pos_embed"] = resize_positions(positions, grid)
    compare_shapes(path, {name: tuple(tensor.shape) for name, tensor in tensors.items()}, shapes)
    return {name: tensors[name] for name in shapes}


def resize_positions(positions: Tensor, grid: tuple[int, int]) -> Tensor:
    """Interpolate position embeddings to another grid of patches (bicubic, antialiased).

    The embedding of the class token, which comes first, is kept. The given grid is taken to be
    square where the number of patches is a square, and to be ``grid`` itself where it is not.

    >>> resize_positions(torch.zeros(1, 1 + 14 * 14, 8), (9, 12)).shape
    torch.Size([1, 109, 8])

    (1, 1 + patches, D) gives (1, 1 + rows · columns, D); where the grid of ``positions`` cannot be
    told, they stay as they are.
    """
    patches = positions.shape[1] - 1
    side = math.isqrt(patches)
    if side**2 != patches or (side, side) == grid:
        return positions
    class_token, at_patches = positions.split_with_sizes([1, patches], dim=1)
    image = at_patches.reshape(1, side, side, -1).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=grid, mode="bicubic", antialias=True)
    return torch.cat([class_token, image.flatten(2).mT], dim=1)


def read_weights(path: Path) -> Group:
    """All tensors of a weights file by name, whatever its format."""
    if not is_file(path):
        raise ConfigError(
            f"Weights file {path} does not exist. Check the path, or leave `weights` out to start "
            "from random weights."
        )
    try:
        if path.suffix == ".safetensors":
            return load_file(path)
        return _state_dict(torch.load(path, map_location="cpu", weights_only=True))
    except Exception as error:  # a damaged file can fail in any way
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ConfigError(
            f"Weights file {path} cannot be read ({reason}). It may be damaged or incomplete, or "
            "no .safetensors or PyTorch file; fetch it again, preferably as .safetensors."
        ) from error


def _state_dict(content: Any) -> Group:
    """The named tensors of a PyTorch file, which may lie one level down."""
    for key in ("state_dict", "model"):
        if isinstance(content, Mapping) and isinstance(content.get(key), Mapping):
            content = content[key]
    if not isinstance(content, Mapping) or not all(isinstance(t, Tensor) for t in content.values()):
        raise ValueError("it does not hold named tensors")
    return content


def compare_shapes(
    path: Path, found: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Refuse a file that does not hold exactly the wanted tensors."""
    differences = {
        "missing": [name for name in wanted if name not in found],
        "unexpected": [name for name in found if name not in wanted],
        "of another shape": [
            f"{name} {found[name]} instead of {shape}"
            for name, shape in wanted.items()
            if found.get(name, shape) != shape
        ],
    }
    if any(differences.values()):
        listed = "; ".join(f"{kind}: {some(names)}" for kind, names in differences.items() if names)
        raise ConfigError(
            f"Weights file {path} holds the weights of another architecture. {listed}. Choose the "
            "model that the file was made for (width, depth, patch), or another file."
        )
