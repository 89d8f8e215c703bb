"""Brightness and hue of colour images, as float functions: for transforms and for augmentation."""

from __future__ import annotations

import torch
from torch import Tensor


def grey_level(images: Tensor) -> Tensor:
    """0.299 R + 0.587 G + 0.114 B (BT.601): ``(..., 3, H, W)`` to float ``(..., 1, H, W)``."""
    red, green, blue = images.float().unsqueeze(-3).unbind(-4)
    level: Tensor = 0.299 * red + 0.587 * green + 0.114 * blue
    return level


def turn_hue(images: Tensor, turns: Tensor | float) -> Tensor:
    """Add ``turns`` (1 is a full circle) to the hue of ``(..., 3, H, W)``; S and V of HSV stay.

    With V the largest channel, Δ = V − smallest, and the hue h in sixths of the circle from red,
    channel R, G, B is V − Δ · clip(min(k, 4 − k), 0, 1) with k = (n + h) mod 6 and n = 5, 3, 1.

    >>> red = torch.tensor([255.0, 0.0, 0.0]).view(3, 1, 1)
    >>> turn_hue(red, 1 / 3).flatten().round().tolist()  # to green
    [0.0, 255.0, 0.0]

    ``turns`` is one number for all images, or one per image ``(...)``.
    """
    if isinstance(turns, Tensor):
        turns = turns[..., None, None]
    red, green, blue = images.float().unbind(-3)
    value = torch.maximum(torch.maximum(red, green), blue)
    spread = value - torch.minimum(torch.minimum(red, green), blue)
    unit = spread.clamp_min(1e-6)  # without spread there is no hue, and any will do
    sixths = torch.where(
        value == red,
        (green - blue) / unit,
        torch.where(value == green, 2 + (blue - red) / unit, 4 + (red - green) / unit),
    )
    turned = []
    for n in (5, 3, 1):
        k = (n + sixths + 6 * turns).remainder(6)
        turned.append(value - spread * torch.minimum(k, 4 - k).clamp(0, 1))
    return torch.stack(turned, dim=-3)
