"""How well each label is recognised."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from fedharmony.report import svg
from fedharmony.report.charts import Picture, Row, dots, x_axis, y_axis
from fedharmony.report.load import LabelScore, Runs
from fedharmony.report.panel import Panel, Section, count, legend, panels, styles
from fedharmony.report.svg import Drawing, Scale, Style

#: Labels shown in a chart with one row per label.
MOST_ROWS = 40


@panels.register("labels")
class Labels(Panel):
    """Average precision by label; of one run precision, recall and frequency as well."""

    place = 40

    def draw(self, runs: Runs) -> Section | None:
        """Labels by average precision, best on top."""
        scored = {n: [r for r in group if r.per_label] for n, group in runs.groups.items()}
        scored = {name: group for name, group in scored.items() if group}
        if not scored:
            return None
        first = next(iter(scored.values()))[0]
        scores = first.per_label
        aps = {
            name: [_mean([r.per_label[i].ap for r in group]) for i in range(len(scores))]
            for name, group in scored.items()
            if all(r.classes == first.classes for r in group)
        }
        rows = most_frequent(scores)
        if not rows or not aps:
            return None
        rows.sort(key=lambda i: -_mean([values[i] for values in aps.values()]))
        names = [scores[i].label for i in rows]
        chosen = {name: [values[i] for i in rows] for name, values in aps.items()}
        images = first.start.get("test_images")
        rates = [scores[i].positives / images for i in rows] if images else [None] * len(rows)
        looks = styles(runs)
        by_label = [
            Row(
                name,
                tuple((looks[method], 100 * values[i]) for method, values in chosen.items()),
                strokes=() if rate is None else ((Style(svg.MUTED), 100 * rate),),
            )
            for i, (name, rate) in enumerate(zip(names, rates, strict=True))
        ]
        pictures = [dots("Average precision, %", by_label, ends=(0, 100))]
        lead = _lead(scores, len(rows), bool(images))
        if not runs.alone:
            competing = {n: v for n, v in chosen.items() if n in runs.ranked}
            pictures += _gains(names, competing or chosen, looks)
            return Section("Labels", lead, tuple(pictures), legend(runs, chosen))
        precision, recall = svg.style(1), svg.style(2)
        both = [
            Row(s.label, ((precision, 100 * s.precision), (recall, 100 * s.recall)))
            for s in (scores[i] for i in rows)
        ]
        pictures.append(dots("Precision and recall, %", both, ends=(0, 100)))
        pictures.append(frequency_scatter(scores))
        keys = (("AP", svg.style(0)), ("precision", precision), ("recall", recall))
        return Section("Labels", lead, tuple(pictures), keys)


def _lead(scores: Sequence[LabelScore], shown: int, rates: bool) -> str:
    defined = sum(math.isfinite(s.ap) for s in scores)
    lead = "Average precision (AP) on the test set, best label on top."
    if rates:
        lead += " The tick is the label's prevalence: the AP of a random ranking."
    if defined > shown:
        lead += f" The {shown} most frequent of {defined:,} labels are shown."
    if defined < len(scores):
        lead += f" {count(len(scores) - defined, 'label')} without test positives left out."
    return lead


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if math.isfinite(v)]
    return statistics.fmean(known) if known else math.nan


def _gains(
    names: Sequence[str], chosen: Mapping[str, Sequence[float]], looks: Mapping[str, Style]
) -> list[Picture]:
    """How far each method is ahead of the first one, label by label."""
    base, *others = chosen
    if not others:
        return []
    rows = [
        Row(
            name,
            tuple((looks[n], 100 * (chosen[n][i] - chosen[base][i])) for n in others),
            start=0.0,
        )
        for i, name in enumerate(names)
    ]
    return [dots(f"AP compared with {base}, points", rows, least=10, line_at=0.0)]


def most_frequent(scores: Sequence[LabelScore], most: int = MOST_ROWS) -> list[int]:
    """Indices of labels with a defined AP: at most ``most``, the most frequent ones."""
    defined = [i for i, s in enumerate(scores) if math.isfinite(s.ap)]
    return sorted(defined, key=lambda i: (-scores[i].positives, i))[:most]


def log_ticks(values: Sequence[int]) -> list[int]:
    """Numbers 1, 2, 5 times a power of ten that enclose the values; every third if too many.

    >>> log_ticks([60, 170]), log_ticks([3, 20_000])
    ([50, 100, 200], [1, 10, 100, 1000, 10000, 100000])
    """
    steps = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]
    first = max(i for i, step in enumerate(steps) if step <= min(values))
    last = min(i for i, step in enumerate(steps) if step >= max(values))
    if last - first <= 6:
        return steps[first : max(last, first + 1) + 1]
    return steps[first // 3 * 3 : last + 3 : 3]


def frequency_scatter(scores: Sequence[LabelScore]) -> Picture:
    """Average precision of every label against its number of test positives (log scale)."""
    defined = [s for s in scores if math.isfinite(s.ap) and s.positives > 0]
    ticks = log_ticks([s.positives for s in defined])
    drawing, bottom = Drawing(250), 214.0
    up = Scale(-2, 102, bottom, 6)
    across = Scale(0.9 * ticks[0], 1.1 * ticks[-1], 38, svg.WIDTH - 14, log=True)
    y_axis(drawing, up, across.start, across.end, (0, 20, 40, 60, 80, 100))
    x_axis(drawing, across, bottom, ticks, "test images with the label (log scale)")
    for score in defined:
        drawing.mark(across(score.positives), up(100 * score.ap), svg.style(0), opacity=0.75)
    described = drawing.svg("Average precision against label frequency")
    return Picture("AP against label frequency, %", described)
