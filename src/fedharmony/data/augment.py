"""Random changes of training images: on the device, for all clients of a stack at once.

Every number is drawn beforehand, per image, from a generator of the client and round, so that an
image is changed in the same way whatever the stack, the chunking or the device. Sweeps and
evaluation see images as they are.

The order is crop, flip, colour. Pixels stay in 0 … 255; where only flips are asked for they stay
uint8.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt, Le
from torch import Tensor

from fedharmony.config import Checked
from fedharmony.data.colour import grey_level, turn_hue
from fedharmony.types import Tensors


@dataclass(frozen=True)
class AugmentSettings(Checked):
    """Random changes of training images; all are off by default.

    Attributes:
        flip: mirror left and right with chance ½.
        crop: random resized crop: smallest share of the area, for instance 0.25; none is off.
        crop_ratio: aspect ratios of the crop lie in [1/ratio, ratio].
        brightness: factor drawn from [1 − b, 1 + b].
        contrast: factor on the difference to the image's mean brightness.
        saturation: factor on the difference to the pixel's own brightness.
        hue: turn of the hue drawn from [−h, h], in full turns.
    """

    flip: bool = False
    crop: Annotated[float, Gt(0), Le(1)] | None = None
    crop_ratio: Annotated[float, Ge(1)] = 4 / 3
    brightness: Annotated[float, Ge(0), Le(1)] = 0.0
    contrast: Annotated[float, Ge(0), Le(1)] = 0.0
    saturation: Annotated[float, Ge(0), Le(1)] = 0.0
    hue: Annotated[float, Ge(0), Le(0.5)] = 0.0

    @property
    def active(self) -> bool:
        """Whether anything is changed at all."""
        colour = self.brightness or self.contrast or self.saturation or self.hue
        return bool(self.flip or self.crop is not None or colour)


def draw_changes(settings: AugmentSettings, generator: torch.Generator, images: int) -> Tensors:
    """What happens to each of a number of images: (images,) each, on the CPU.

    All numbers are drawn whatever the settings, so that switching one change on or off leaves the
    others as they were.

    >>> changes = draw_changes(AugmentSettings(crop=0.25), torch.Generator().manual_seed(0), 5)
    >>> bool(((changes["height"] * changes["width"]) <= 1.0001).all())
    True
    """
    u = torch.rand(9, images, generator=generator)
    area = (settings.crop or 1.0) + u[0] * (1 - (settings.crop or 1.0))
    ratio = torch.exp((2 * u[1] - 1) * math.log(settings.crop_ratio))  # width / height
    ratio = ratio if settings.crop is not None else torch.ones_like(ratio)
    # A crop wider or higher than the image is cut to it: it keeps its ratio where there is room.
    height = (area / ratio).sqrt().clamp(max=1.0)
    width = (area * ratio).sqrt().clamp(max=1.0)
    return {
        "flip": (u[2] < 0.5) if settings.flip else torch.zeros(images, dtype=torch.bool),
        "height": height,
        "width": width,
        "top": u[3] * (1 - height),
        "left": u[4] * (1 - width),
        "brightness": 1 + (2 * u[5] - 1) * settings.brightness,
        "contrast": 1 + (2 * u[6] - 1) * settings.contrast,
        "saturation": 1 + (2 * u[7] - 1) * settings.saturation,
        "hue": (2 * u[8] - 1) * settings.hue,
    }


def augment(settings: AugmentSettings, images: Tensor, changes: Mapping[str, Tensor]) -> Tensor:
    """Images (..., 3, H, W) with pixels 0 … 255, changed as drawn; ``changes`` are (...,) each."""
    if settings.crop is not None:
        images = crop(images, changes)
    if settings.flip:
        images = torch.where(_per_image(changes["flip"]), images.flip(-1), images)
    if settings.brightness or settings.contrast or settings.saturation:
        images = _contrasts(images.float(), changes)
    if settings.hue:
        images = turn_hue(images.float(), changes["hue"])
    return images


def crop(images: Tensor, changes: Mapping[str, Tensor]) -> Tensor:
    """The box (top, left, height, width), as shares of the image, stretched to the whole; float.

    Bilinear, at the centres of the new pixels.
    """
    *leading, channels, rows, columns = images.shape

    def centres(size: int, first: Tensor, share: Tensor) -> Tensor:
        """Positions of the new pixels in [−1, 1] of the old image, (images, size)."""
        steps = (torch.arange(size, device=images.device) + 0.5) / size
        return 2 * (first.reshape(-1, 1) + share.reshape(-1, 1) * steps) - 1

    y = centres(rows, changes["top"], changes["height"])
    x = centres(columns, changes["left"], changes["width"])
    grid = torch.stack(
        [x.unsqueeze(1).expand(-1, rows, -1), y.unsqueeze(2).expand(-1, -1, columns)], dim=-1
    )
    flat = images.reshape(-1, channels, rows, columns).float()
    cut = F.grid_sample(flat, grid, padding_mode="border", align_corners=False)
    return cut.view(*leading, channels, rows, columns)


def _contrasts(images: Tensor, changes: Mapping[str, Tensor]) -> Tensor:
    """Brightness, contrast and saturation, in this order."""
    images = (images * _per_image(changes["brightness"])).clamp(0, 255)
    mean = grey_level(images).mean((-2, -1), keepdim=True)
    images = (mean + _per_image(changes["contrast"]) * (images - mean)).clamp(0, 255)
    grey = grey_level(images)
    return (grey + _per_image(changes["saturation"]) * (images - grey)).clamp(0, 255)


def _per_image(values: Tensor) -> Tensor:
    return values[..., None, None, None]
