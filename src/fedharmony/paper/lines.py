"""Curves over the points of an item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedharmony.paper.item import Found
from fedharmony.paper.published import NAMES
from fedharmony.paper.scale import Part
from fedharmony.report.charts import Picture, Series, curve
from fedharmony.report.svg import Style

#: What the first colours of the palette are called, for figures that stand alone.
COLOURS = ("blue", "orange", "green")


def lines_over(
    found: Found,
    axis: str,
    parts: Mapping[str, Part],
    methods: Sequence[str],
    metric: str,
    looks: Mapping[str, Style],
) -> Picture:
    """A metric over points at equal distances: a line per method, a band over seeds.

    Args:
        found: the runs.
        axis: what the points are values of.
        parts: by the value.
        methods: one line each.
        metric: in per cent.
        looks: of the methods.
    """
    series = []
    for method in methods:
        curves: dict[int, dict[int, float]] = {}
        for place, part in enumerate(parts.values(), start=1):
            for run in found.group(part, method):
                curves.setdefault(run.seed, {})[place] = run.metrics[metric]
        series.append(Series(method, looks[method], tuple(curves.values())))
    names = zip(COLOURS, (NAMES[method] for method in methods), strict=False)
    return curve(
        f"{metric}, %",
        series,
        rounds=len(parts),
        percent=True,
        values=(axis, list(parts)),
        note=f"Lines: {', '.join(f'{colour} {name}' for colour, name in names)}.",
    )
