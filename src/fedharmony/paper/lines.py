"""Curves over the points of an item."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedharmony.paper.item import Found
from fedharmony.paper.published import LOOKS, NAMES
from fedharmony.paper.scale import Part
from fedharmony.report.charts import Picture, Series, curve
from fedharmony.report.panel import count


def lines_over(
    found: Found,
    axis: str,
    parts: Mapping[str, Part],
    methods: Sequence[str],
    metric: str,
    belt: tuple[float, float, str],
) -> Picture:
    """A metric over points at equal distances: a line per method, a band over seeds.

    Args:
        found: the runs.
        axis: what the points are values of.
        parts: by the value.
        methods: one line each.
        metric: in per cent.
        belt: what the paper says of it: from, to, per cent, and in words.
    """
    series, seeds = [], 0
    for method in methods:
        curves: dict[int, dict[int, float]] = {}
        for place, part in enumerate(parts.values(), start=1):
            for run in found.group(part, method):
                curves.setdefault(run.seed, {})[place] = run.metrics[metric]
        series.append(Series(NAMES[method], LOOKS[method], tuple(curves.values())))
        seeds = len(curves)
    low, high, words = belt
    return curve(
        f"{metric}, %",
        series,
        rounds=len(parts),
        percent=True,
        values=(axis, list(parts)),
        belt=(low / 100, high / 100),
        note=f"Bands: ± one standard deviation over {count(seeds, 'seed')}. Grey: {words}.",
    )
