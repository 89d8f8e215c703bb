"""Precision against recall, with the threshold that decides."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from fedharmony.report import svg
from fedharmony.report.charts import Picture, percent_axes
from fedharmony.report.load import Runs, RunView
from fedharmony.report.measures import Bools, Trade, decide, trade
from fedharmony.report.panel import Panel, Section, legend, panels, styles
from fedharmony.report.svg import Style

#: Positives that a label needs for a curve of its own.
LEAST = 5
#: Points of a curve.
MOST_POINTS = 200


@panels.register("precision-recall")
class Trades(Panel):
    """Precision against recall of all labels together, and of a good, a middling and a bad one."""

    place = 42

    def draw(self, runs: Runs) -> Section | None:
        """One curve per method; its mark stands at the threshold."""
        if not runs.scored:
            return None
        looks = styles(runs)
        own = any(r.results.get("thresholds") for r in runs.scored.values())
        note = "A mark of many thresholds need not lie on the curve of one." if own else ""
        pictures = [_picture("All labels", None, runs.scored, looks, note)]
        for words, label in _chosen(next(iter(runs.scored.values()))):
            name = next(iter(runs.scored.values())).classes[label]
            pictures.append(_picture(f"{name}: {words}", label, runs.scored, looks))
        lead = (
            "Every threshold gives another precision and recall: few labels that are right, or "
            "many with mistakes. Marks stand at the threshold in use"
            + (", which was chosen for each label on held-out training images." if own else ".")
        )
        return Section("Precision and recall", lead, tuple(pictures), legend(runs, runs.scored))


def _chosen(run: RunView) -> list[tuple[str, int]]:
    """The labels with the highest, the middle and the lowest average precision."""
    scores = run.per_label
    order = [i for i, s in enumerate(scores) if s.positives >= LEAST and np.isfinite(s.ap)]
    order.sort(key=lambda i: -scores[i].ap)
    if len(order) < 3:
        return []
    places = (order[0], order[len(order) // 2], order[-1])
    return list(zip(("highest AP", "middle AP", "lowest AP"), places, strict=True))


def _picture(
    title: str,
    label: int | None,
    runs: Mapping[str, RunView],
    looks: Mapping[str, Style],
    note: str = "",
) -> Picture:
    drawing, up, across = percent_axes("recall, %")
    for name, run in runs.items():
        curve = _trade(run, label)
        points = [
            (across(100 * r), up(100 * p)) for r, p in _thinned(curve.recall, curve.precision)
        ]
        drawing.line(points, looks[name].colour, 1.6, looks[name].dashes)
        if curve.at is not None:
            drawing.mark(across(100 * curve.at[0]), up(100 * curve.at[1]), looks[name])
    described = drawing.svg(f"Precision against recall: {title}")
    return Picture(f"{title}, precision in %", described, note)


def _trade(run: RunView, label: int | None) -> Trade:
    """The curve of one label, or of all pairs of image and label together."""
    scores = run.scores
    assert scores is not None
    column = slice(None) if label is None else slice(label, label + 1)
    known: Bools = np.ones(scores.labels.shape, np.bool_) if scores.known is None else scores.known
    kept = known[:, column]
    decisions = decide(scores, run.thresholds)
    given = (decisions.found | decisions.wrong)[:, column][kept]
    return trade(scores.scores[:, column][kept], scores.labels[:, column][kept] == 1, given)


def _thinned(recall: svg.Array, precision: svg.Array) -> Sequence[tuple[float, float]]:
    """At most :data:`MOST_POINTS` points, at equal distances of recall."""
    if len(recall) > MOST_POINTS:
        wanted = np.linspace(0, recall[-1], MOST_POINTS)
        index = np.unique(np.minimum(np.searchsorted(recall, wanted), len(recall) - 1))
        recall, precision = recall[index], precision[index]
    return list(zip(recall.tolist(), precision.tolist(), strict=True))
