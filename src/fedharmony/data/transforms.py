"""Named image transforms that make the images of one client look unlike those of another.

Each is a fixed function of uint8 pixels: an image looks the same whenever and in whichever batch it
is read. Noise is a function of the image's index, in integer arithmetic.

================  =============================================================================
``none``          the image itself
``dark``          brightness × 0.6
``bright``        brightness × 1.4
``low_contrast``  contrast × 0.5: half the distance to the image's mean grey level
``grey``          saturation × 0: every channel the grey level
``hue``           hue + 0.1 of a turn (36°), saturation and value kept
``blur``          Gaussian blur, σ = 1.5 pixels
``noise``         Gaussian noise, σ = 0.1 of the full range
================  =============================================================================

Grey level is 0.299 R + 0.587 G + 0.114 B. Results are rounded and clipped to 0 … 255.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedharmony.data.base import Images, TensorImages
from fedharmony.data.colour import grey_level, turn_hue
from fedharmony.errors import ConfigError, DataError, nearest
from fedharmony.types import Index

#: Images uint8 (..., 3, H, W) and their indices int64 (...) to images of the same shape.
Transform: TypeAlias = Callable[[Tensor, Tensor], Tensor]

BLUR_SIGMA = 1.5
#: Pixels on either side of the blur's centre: beyond 3 σ a Gaussian is below one grey level.
BLUR_RADIUS = 5
NOISE_SIGMA = 0.1
#: Images transformed at a time when all of them are.
CHUNK = 512


def brightness(images: Tensor, factor: float) -> Tensor:
    """Brightness: x ↦ factor · x.

    >>> brightness(torch.tensor([0, 100, 200], dtype=torch.uint8), 1.4)
    tensor([  0, 140, 255], dtype=torch.uint8)
    """
    return _levels(factor * images.float())


def contrast(images: Tensor, factor: float) -> Tensor:
    """Contrast: x ↦ m + factor · (x − m), m the mean grey level of an image ``(..., 3, H, W)``.

    >>> halves = torch.tensor([0, 200], dtype=torch.uint8).expand(3, 1, 2)   # m = 100
    >>> contrast(halves, 0.5)[0]
    tensor([[ 50, 150]], dtype=torch.uint8)
    """
    mean = grey_level(images).double().mean((-3, -2, -1), keepdim=True).float()
    return _levels(mean + factor * (images.float() - mean))


def grey(images: Tensor) -> Tensor:
    """Every channel of ``(..., 3, H, W)`` becomes the grey level.

    >>> grey(torch.tensor([200, 100, 0], dtype=torch.uint8).view(3, 1, 1)).flatten()
    tensor([118, 118, 118], dtype=torch.uint8)
    """
    return _levels(grey_level(images)).expand_as(images).contiguous()


def hue(images: Tensor, turn: float) -> Tensor:
    """Add ``turn`` (1 is a full circle) to the hue of ``(..., 3, H, W)``; S and V of HSV stay.

    >>> red = torch.tensor([255, 0, 0], dtype=torch.uint8).view(3, 1, 1)
    >>> hue(red, 1 / 3).flatten(), hue(red, 0.1).flatten()   # green; 36° of the 60° to yellow
    (tensor([  0, 255,   0], dtype=torch.uint8), tensor([255, 153,   0], dtype=torch.uint8))
    """
    return _levels(turn_hue(images, turn))


def blur(images: Tensor, sigma: float, radius: int) -> Tensor:
    """Gaussian blur of ``(..., H, W)`` along both axes; edge pixels repeat beyond the edge.

    Weights are exp(−d² / 2σ²) for |d| <= ``radius``, scaled to sum 1.
    """
    height, width = images.shape[-2:]
    gauss = [math.exp(-0.5 * (d / sigma) ** 2) for d in range(-radius, radius + 1)]
    weights = [g / sum(gauss) for g in gauss]
    planes = images.reshape(-1, 1, height, width).float()
    planes = F.pad(planes, (radius,) * 4, mode="replicate")
    # Sums of shifted planes rather than a convolution, which a GPU may do in reduced precision.
    planes = _weighted([planes[..., d : d + height, :] for d in range(len(weights))], weights)
    planes = _weighted([planes[..., d : d + width] for d in range(len(weights))], weights)
    return _levels(planes).reshape(images.shape)


def noise(images: Tensor, index: Tensor) -> Tensor:
    """Add round(25.5 z) to every value, with z standard normal and fixed by index and position.

    z = Φ⁻¹((u + ½) / 2¹⁶), where u is the upper 16 bits of SplitMix64 (Steele et al., OOPSLA 2014)
    at counter index · 3HW + position, in the order of memory.
    """
    values = math.prod(images.shape[-3:])
    position = torch.arange(values, device=images.device).view(images.shape[-3:])
    counter = index.to(images.device)[..., None, None, None] * values + position
    sixteen = (split_mix(counter) >> 48) & 0xFFFF
    added = _noise_levels(images.device)[sixteen]
    return (images.to(torch.int16) + added).clamp(0, 255).to(torch.uint8)


def split_mix(counter: Tensor) -> Tensor:
    """The output of SplitMix64 at ``counter`` (int64, from 0), seed 0, as signed 64-bit numbers.

    >>> [f"{x & (2**64 - 1):016x}" for x in split_mix(torch.arange(2)).tolist()]
    ['e220a8397b1dcdaf', '6e789e6aa1b965f4']
    """

    def shifted_in(x: Tensor, bits: int) -> Tensor:
        """``x ^ (x >> bits)``, with zeros moving in (torch moves in the sign)."""
        return x ^ ((x >> bits) & ((1 << (64 - bits)) - 1))

    x = (counter + 1) * _signed(0x9E3779B97F4A7C15)
    x = shifted_in(x, 30) * _signed(0xBF58476D1CE4E5B9)
    x = shifted_in(x, 27) * _signed(0x94D049BB133111EB)
    return shifted_in(x, 31)


def _signed(word: int) -> int:
    """A 64-bit word as the signed number of the same bits."""
    return word - (1 << 64) if word >= 1 << 63 else word


@functools.cache
def _noise_levels(device: torch.device) -> Tensor:
    """round(255 σ Φ⁻¹((u + ½) / 2¹⁶)) for every 16-bit u, int16; made on the CPU."""
    middle = (torch.arange(1 << 16, dtype=torch.float64) + 0.5) / (1 << 16)
    levels: Tensor = (255 * NOISE_SIGMA * torch.special.ndtri(middle)).round()
    return levels.to(torch.int16).to(device)


def _weighted(planes: list[Tensor], weights: list[float]) -> Tensor:
    total: Tensor = torch.zeros_like(planes[0])
    for plane, weight in zip(planes, weights, strict=True):
        total += weight * plane
    return total


def _levels(values: Tensor) -> Tensor:
    return values.round().clamp(0, 255).to(torch.uint8)


TRANSFORMS: dict[str, Transform] = {
    "none": lambda images, index: images,
    "dark": lambda images, index: brightness(images, 0.6),
    "bright": lambda images, index: brightness(images, 1.4),
    "low_contrast": lambda images, index: contrast(images, 0.5),
    "grey": lambda images, index: grey(images),
    "hue": lambda images, index: hue(images, 0.1),
    "blur": lambda images, index: blur(images, BLUR_SIGMA, BLUR_RADIUS),
    "noise": noise,
}


def check_transforms(names: Sequence[str]) -> None:
    """Refuse names that no transform has, and an empty list."""
    if not names:
        raise ConfigError(f"No transform is named. {nearest('', TRANSFORMS)}")
    for name in names:
        if name not in TRANSFORMS:
            raise ConfigError(f"There is no transform {name!r}. {nearest(name, TRANSFORMS)}")


class TransformedImages:
    """Images of which image i is transformed by ``names[of_image[i]]`` when it is read.

    >>> white = TensorImages(torch.full((2, 3, 1, 1), 255, dtype=torch.uint8))
    >>> images = TransformedImages(white, ["dark", "none"], np.array([1, 0]))
    >>> images.gather(torch.tensor([0, 1]), "cpu").flatten().tolist()
    [255, 255, 255, 153, 153, 153]
    """

    def __init__(self, images: Images, names: Sequence[str], of_image: Index) -> None:
        check_transforms(names)
        if len(images.shape) != 3 or images.shape[0] != 3:
            raise DataError(
                "Image transforms need red, green and blue, but the inputs of this data set have "
                f"the shape {images.shape}. Leave out the transforms."
            )
        if len(of_image) != len(images):
            raise DataError(
                f"There are transforms for {len(of_image)} images, but {len(images)} images. Use "
                "the data that the transforms were given out for."
            )
        self.images, self.names = images, tuple(names)
        self.of_image = torch.from_numpy(np.asarray(of_image, np.int64))

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, ...]:
        """See :attr:`~fedharmony.data.base.Images.shape`."""
        return self.images.shape

    def gather(self, index: Tensor, device: torch.device | str) -> Tensor:
        """See :meth:`~fedharmony.data.base.Images.gather`."""
        pixels = self.images.gather(index, device)
        rows, flat = pixels.view(-1, *self.shape), index.cpu().reshape(-1).clamp(min=0)
        which = self.of_image[flat]
        for code, name in enumerate(self.names):
            at = (which == code).nonzero().squeeze(1)
            if name != "none" and len(at):
                here = at.to(rows.device)
                rows[here] = TRANSFORMS[name](rows[here], flat[at])
        return pixels


def transform_images(images: Images, names: Sequence[str], of_image: Index) -> Images:
    """Images of which image i is transformed by ``names[of_image[i]]``.

    Images in memory are transformed once, now, where they are; others whenever they are read.
    """
    lazy = TransformedImages(images, names, of_image)
    if not isinstance(images, TensorImages):
        return lazy
    device = images.pixels.device
    chunks = torch.split(torch.arange(len(images)), CHUNK)
    return TensorImages(torch.cat([lazy.gather(chunk, device) for chunk in chunks]))
