"""Charts that several panels draw: curves over rounds, rows of dots, heat maps."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedharmony.report import svg
from fedharmony.report.svg import Drawing, Scale, Style

#: Labels shown by name along a heat map; beyond this the names would not be legible.
MOST_NAMED = 32
#: With more methods than this a chart of curves is taller and its lines are thinner.
_CROWD = 4
#: Ends of a dotted axis: values further out than this many quartile distances are clipped.
_FAR = 3.0


@dataclass(frozen=True)
class Picture:
    """A figure: title and note as plain text, the drawing as SVG text.

    ``keys`` explain its marks and lines where the section's legend does not, or where it stands
    alone, as a file; ``colours`` are the words at the ends of a map's colour scale in a file.
    """

    title: str
    svg: str
    note: str = ""
    keys: tuple[tuple[str, Style], ...] = ()
    colours: tuple[str, str] | None = None


@dataclass(frozen=True)
class Series:
    """One method in a chart: name, look, and one curve (round → value) per seed."""

    name: str
    style: Style
    curves: tuple[Mapping[int, float], ...]

    def points(self, scale: float = 1.0) -> list[tuple[int, float, float]]:
        """Round, and over the seeds that have a value there, mean and sample deviation.

        >>> Series("a", Style(""), ({1: 2.0, 2: 3.0}, {1: 4.0})).points()
        [(1, 3.0, 1.4142135623730951), (2, 3.0, 0.0)]
        """
        found = []
        for round in sorted({r for curve in self.curves for r in curve}):
            values = [scale * c[round] for c in self.curves if round in c]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            found.append((round, statistics.fmean(values), spread))
        return found


def curve(
    title: str,
    series: Sequence[Series],
    *,
    rounds: int,
    percent: bool = False,
    reference: tuple[str, float] | None = None,
    zoom: bool = False,
    note: str = "",
    values: tuple[str, Sequence[str]] | None = None,
    belt: tuple[float, float] | None = None,
) -> Picture:
    """A quantity over the rounds: a line per method, a band of ± one deviation over seeds.

    Args:
        title: What is drawn.
        series: The methods; those whose style has no mark are lines to compare with.
        rounds: Length of the horizontal axis: rounds the runs were to have.
        percent: Draw fractions in per cent.
        reference: Name and value of a trivial baseline. One that lies so far away that it would
            squeeze the curves into less than half of the height is named at the edge instead.
        zoom: Fit the vertical axis to the last three quarters of the rounds, so that methods that
            end close together can be told apart; what lies outside is cut off.
        note: Text beneath the figure.
        values: Instead of rounds: what the horizontal axis shows, and the names of 1, 2, ….
        belt: Values between which it is grey, to compare with.
    """
    scale = 100.0 if percent else 1.0
    drawn = [(s.style, s.points(scale)) for s in series if any(s.curves)]
    crowded = sum(bool(style.outline) for style, _ in drawn) > _CROWD
    top, height = 6.0, 270.0 if crowded else 200.0
    bottom = height - 36
    fitted = [points for style, points in drawn if style != svg.CENTRAL] or [p for _, p in drawn]
    low, high = _extent(fitted, zoom_start(rounds) if zoom else 1)
    if belt is not None:
        low, high = min(low, scale * belt[0]), max(high, scale * belt[1])
    flat = percent and high - low < 1
    if flat:  # a span of noise should not look like a difference
        low, high = low - 0.5, high + 0.5
    low = max(low, 0.0) if percent else low
    line, outside = None, []  # a trivial baseline's line; names and values of what is out of sight
    if reference is not None and math.isfinite(reference[1]):
        value = scale * reference[1]
        stretch = math.inf if flat else 1.0 if zoom else 2.0
        reach = max(high, value) - min(low, value)
        if reach <= stretch * (high - low):
            line = value
            low, high = min(low, value - 0.06 * reach), max(high, value + 0.06 * reach)
        else:
            outside.append((reference[0], value))
    outside += [("central", p[-1][1]) for s, p in drawn if s == svg.CENTRAL]
    if percent and low <= 0:  # so that a line at zero is not hidden by the axis
        low = -0.03 * high
    up = Scale(low, high, bottom, top)
    ticks = [t for t in up.ticks(6 if crowded else 4) if t >= 0 or not percent]
    last = _figure(drawn[0][1][-1][1], percent) if len(drawn) == 1 else ""
    left = max(40.0, 10 + svg.LETTER * max(len(svg.plain(t)) for t in ticks)) if ticks else 40.0
    right = svg.WIDTH - 12 - svg.LETTER * len(last)
    room = max(0.5, 0.02 * rounds)  # so that the last mark is whole
    across = Scale(1 - room, rounds + room, left, right)

    drawing = Drawing(height)
    edge: dict[str, Any] = {"size": svg.FONT - 1, "colour": svg.MUTED, "anchor": "end"}
    y_axis(drawing, up, left, right, ticks)
    if values is None:
        round_axis(drawing, across, bottom)
    else:
        x_axis(drawing, across, bottom, range(1, rounds + 1), values[0], values[1])
    if reference is not None and line is not None:
        drawing.line([(left, up(line)), (right, up(line))], svg.MUTED, 1, "1.5,2")
        text = f"{reference[0]} {line:.1f}"
        drawing.text(right, up(line) - 7, text, **edge)
    outside = [(name, value) for name, value in outside if not low <= value <= high]
    for i, (name, value) in enumerate(sorted(outside, key=lambda item: item[1])):
        text = f"{'↓' if value < low else '↑'} {name} {_figure(value, percent)}"
        y = bottom - 8 - 12 * i if value < low else top + 2 + 12 * (len(outside) - 1 - i)
        drawing.text(right - 2, y, text, **edge)
    window = drawing.inside(left, top - 6, right - left, bottom - top + 6)
    if belt is not None:
        below, above = (up(scale * value) for value in belt)
        corners = [(left, below), (right, below), (right, above), (left, above)]
        window.area(corners, svg.MUTED, 0.1)
        for y in (below, above):
            window.line([(left, y), (right, y)], svg.MUTED, 0.8, "4,2")
    for style, points in sorted(drawn, key=lambda d: bool(d[0].outline)):
        places = [(across(r), up(mean)) for r, mean, _ in points]
        if style.outline and any(deviation for *_, deviation in points):
            upper = [(across(r), up(mean + deviation)) for r, mean, deviation in points]
            lower = [(across(r), up(mean - deviation)) for r, mean, deviation in points]
            window.area([*upper, *reversed(lower)], style.colour, 0.1 if crowded else 0.16)
        width = 1.0 if not style.outline else 1.4 if crowded else 1.8
        window.line(places, style.colour, width, style.dashes)
        if style.outline and low <= points[-1][1] <= high:
            drawing.mark(*places[-1], style)
    if last:
        final, mean, _ = drawn[0][1][-1]
        drawing.text(across(final) + 7, up(mean), last)
    over = "rounds" if values is None else values[0]
    keys = tuple((s.name, s.style) for s in series) if len(series) > 1 else ()
    return Picture(title, drawing.svg(f"{title} over {over}"), note, keys)


def zoom_start(rounds: int) -> int:
    """The first of the last three quarters of the rounds (1-based).

    >>> zoom_start(30), zoom_start(1)
    (8, 1)
    """
    return rounds // 4 + 1


def _extent(
    curves: Sequence[Sequence[tuple[int, float, float]]], first: int
) -> tuple[float, float]:
    """Ends of the vertical axis: all bands from the round ``first`` on, with a margin."""
    late = [p for points in curves for p in points if p[0] >= first]
    late = late or [p for points in curves for p in points]
    low, high = min(m - d for _, m, d in late), max(m + d for _, m, d in late)
    pad = 0.05 * (high - low) or 0.05 * abs(high) or 0.05
    return low - pad, high + pad


def _figure(value: float, percent: bool) -> str:
    return f"{value:.1f}" if percent else svg.plain(value, 3)


def y_axis(drawing: Drawing, up: Scale, left: float, right: float, ticks: Sequence[float]) -> None:
    """Lines across a figure, with their values at the left."""
    for tick in ticks:
        drawing.line([(left, up(tick)), (right, up(tick))], svg.GRID, 0.8)
        drawing.text(left - 4, up(tick), svg.plain(tick), colour=svg.MUTED, anchor="end")


def x_axis(
    drawing: Drawing,
    across: Scale,
    y: float,
    ticks: Sequence[float],
    title: str = "",
    names: Sequence[str] | None = None,
    grid_from: float | None = None,
) -> None:
    """The ground of a figure with ticks, or with lines that begin at the height ``grid_from``.

    Ticks are numbers, or have ``names``.
    """
    for tick, name in zip(ticks, names or map(svg.plain, ticks), strict=True):
        x = across(tick)
        ends, colour = ((y, y + 3), svg.MUTED) if grid_from is None else ((grid_from, y), svg.GRID)
        drawing.line([(x, end) for end in ends], colour, 0.8)
        drawing.text(x, y + 12, name, colour=svg.MUTED, anchor="middle")
    drawing.line([(across.start, y), (across.end, y)], svg.MUTED, 0.8)
    if title:
        middle = (across.start + across.end) / 2
        drawing.text(middle, y + 27, title, colour=svg.MUTED, anchor="middle")


def percent_axes(title: str) -> tuple[Drawing, Scale, Scale]:
    """A drawing with per cent along both axes, and its scales: up and across.

    >>> _, up, across = percent_axes("score, %")
    >>> up(50), across(50)  # in the middle of 6 … 214, and of 38 … 338
    (110.0, 188.0)
    """
    drawing, ticks = Drawing(250), range(0, 101, 20)
    up, across = Scale(-2, 102, 214, 6), Scale(-2, 102, 38, svg.WIDTH - 14)
    y_axis(drawing, up, across.start, across.end, ticks)
    x_axis(drawing, across, up.start, ticks, title)
    return drawing, up, across


def round_axis(drawing: Drawing, across: Scale, y: float) -> None:
    """Rounds along the bottom of a figure."""
    x_axis(drawing, across, y, [t for t in across.ticks(6, whole=True) if t >= 1], "round")


# ----------------------------------------------------------------------------- rows of dots


@dataclass(frozen=True)
class Row:
    """A line of a dot chart: looks and values of its dots, and of upright strokes behind them.

    The bar behind the dots begins at ``start``, or at the lowest dot. ``interval`` are the ends of
    a line through the first dot, in its colour. The axis reaches to its dots wherever they are, if
    it ``fits``.
    """

    name: str
    dots: tuple[tuple[Style, float], ...]
    strokes: tuple[tuple[Style, float], ...] = ()
    start: float | None = None
    interval: tuple[float, float] | None = None
    fits: bool = True


def dots(
    title: str,
    rows: Sequence[Row],
    *,
    ends: tuple[float, float] | None = None,
    least: float = 1.0,
    line_at: float | None = None,
    spacing: float = 15,
    whole: bool = False,
    note: str = "",
    keys: tuple[tuple[str, Style], ...] = (),
) -> Picture:
    """Named rows with dots on one axis; what lies far outside is shown at the edge, in figures.

    The axis reaches from end to end of ``ends``, or is fitted to the values (:func:`span`) and no
    shorter than ``least``. ``line_at`` is the place of an upright line, ``spacing`` the pixels from
    row to row; with ``whole`` only whole numbers are written along the axis.
    """
    fitted = [row for row in rows if row.fits] or rows
    values = [v for row in fitted for _, v in (*row.dots, *row.strokes) if math.isfinite(v)]
    values += [v for row in fitted for v in row.interval or ()]
    values += [] if line_at is None else [line_at]
    low, high = ends or span(values, least)
    names = [svg.printable(row.name, 24) for row in rows]
    left, bottom = svg.margin(names, 14), 6 + spacing * len(rows)
    pad = 0.015 if ends else 0.06
    room = pad * (high - low)
    across = Scale(low - room, high + room, left, svg.WIDTH - 14)
    drawing = Drawing(bottom + 22)
    x_axis(drawing, across, bottom, across.ticks(5, whole), grid_from=6)
    if line_at is not None:
        drawing.line([(across(line_at), 6), (across(line_at), bottom)], svg.MUTED)
    for i, (row, name) in enumerate(zip(rows, names, strict=True)):
        y = 6 + spacing * (i + 0.5)
        drawing.text(left - 5, y, name, anchor="end")
        found = [v for _, v in (*row.dots, *row.strokes) if math.isfinite(v)]
        known = [
            min(max(v, low), high) for v in [*found, *([] if row.start is None else [row.start])]
        ]
        if found and len(known) > 1:
            drawing.line([(across(min(known)), y), (across(max(known)), y)], svg.GRID, 2)
        if row.interval is not None:
            ends_at = [(across(min(max(v, low), high)), y) for v in row.interval]
            drawing.line(ends_at, row.dots[0][0].colour, 2)
            for (x, _), value, arrow in zip(ends_at, row.interval, "◂▸", strict=True):
                if not low <= value <= high:  # it goes on outside
                    look: dict[str, Any] = {"size": 9, "colour": row.dots[0][0].colour}
                    drawing.text(x, y, arrow, anchor="middle", **look)
        for style, value in row.strokes:
            if low <= value <= high:
                x = across(value)
                drawing.line([(x, y - 4.2), (x, y + 4.2)], style.colour, 1.3)
        for style, value in row.dots:
            if low <= value <= high:
                drawing.mark(across(value), y, style)
            elif math.isfinite(value):
                below = value < low
                text = f"◂ {svg.plain(value, 3)}" if below else f"{svg.plain(value, 3)} ▸"
                place = (left + 2, "start") if below else (svg.WIDTH - 14, "end")
                drawing.text(place[0], y, text, size=9, colour=style.colour, anchor=place[1])
    return Picture(title, drawing.svg(title), note, keys)


def span(values: Sequence[float], least: float) -> tuple[float, float]:
    """Ends of an axis: around all values but those far from most, and no shorter than ``least``.

    Below, the quartiles 70 and 72 are 2 apart, and 20 lies more than three times that below 70.

    >>> span([70.0, 71.0, 72.0, 73.0, 20.0], 1.0), span([50.0, 50.5], 1.0)
    ((64.0, 73.0), (49.75, 50.75))
    """
    if not values:
        return 0.0, least
    first, third = np.quantile(values, [0.25, 0.75])
    reach = _FAR * max(float(third - first), least / 2)
    low, high = max(min(values), float(first) - reach), min(max(values), float(third) + reach)
    missing = max(0.0, least - (high - low)) / 2
    return low - missing, high + missing


# -------------------------------------------------------------------------------- heat maps


def column_names(
    drawing: Drawing, names: Sequence[str], left: float, y: float, step: float
) -> None:
    """Names below a heat map, turned."""
    for i, name in enumerate(names):
        at, size = (left + step * (i + 0.5), y), min(svg.FONT, 0.92 * step)
        drawing.text(*at, name, size=size, anchor="end", colour=svg.INK, turn=-90)


def row_names(drawing: Drawing, names: Sequence[str], x: float, top: float, step: float) -> None:
    """Names at the left of a heat map."""
    for i, name in enumerate(names):
        size = min(svg.FONT, 0.92 * step)
        drawing.text(x, top + step * (i + 0.5), name, size=size, anchor="end", colour=svg.INK)
