"""Points in a plane."""

from __future__ import annotations

import math

import numpy as np

from fedharmony.report import svg
from fedharmony.report.charts import Picture, x_axis, y_axis
from fedharmony.report.svg import Array, Drawing, Scale

HEIGHT = 230.0


def scatter(title: str, across: Array, up: Array, axis: str, note: str = "") -> Picture:
    """A mark for each pair of known numbers.

    Args:
        title: what the vertical axis shows.
        across: horizontal values.
        up: vertical values.
        axis: what the horizontal axis shows.
        note: text beneath.
    """
    known = np.isfinite(across) & np.isfinite(up)
    x, y = across[known], up[known]
    drawing, bottom, left = Drawing(HEIGHT), HEIGHT - 36, 46.0
    if not len(x):
        return Picture(title, drawing.svg(title), "Nothing is known.")
    sideways = _scale(x, left, svg.WIDTH - 12)
    upwards = _scale(y, bottom, 8.0)
    y_axis(drawing, upwards, left, svg.WIDTH - 12, upwards.ticks(4))
    x_axis(drawing, sideways, bottom, sideways.ticks(5), axis)
    for place in zip(x, y, strict=True):
        drawing.mark(sideways(place[0]), upwards(place[1]), svg.style(0), 0.75)
    return Picture(title, drawing.svg(f"{title} over {axis}"), note)


def _scale(values: Array, start: float, end: float) -> Scale:
    low, high = float(values.min()), float(values.max())
    room = 0.06 * (high - low) or 0.05 * math.fabs(high) or 0.5
    return Scale(low - room, high + room, start, end)
