"""Which labels are taken for others, and which are overlooked."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fedharmony.report import svg
from fedharmony.report.charts import Picture, Row, dots
from fedharmony.report.load import Runs
from fedharmony.report.measures import Array, decide, overlooked_beside, taken_for
from fedharmony.report.panel import Panel, Section, legend, panels, styles
from fedharmony.report.svg import Style

#: Letters of a label's name, so that both names of a pair can be read.
LETTERS = 10
#: Pairs that a chart shows.
MOST_PAIRS = 12
#: Labels of which all pairs are looked at.
MOST_LABELS = 2000


@panels.register("mistakes")
class Mistakes(Panel):
    """Pairs of labels: one missed and another given in its place; one missed beside another."""

    place = 43

    def draw(self, runs: Runs) -> Section | None:
        """The pairs that are most frequent, in images of the test set."""
        if not runs.scored:
            return None
        classes = next(iter(runs.scored.values())).classes
        if len(classes) > MOST_LABELS:
            return None
        made = {
            name: decide(run.scores, run.thresholds)
            for name, run in runs.scored.items()
            if run.scores is not None
        }
        looks = styles(runs)
        swaps = {name: taken_for(decisions) for name, decisions in made.items()}
        misses = {name: overlooked_beside(decisions) for name, decisions in made.items()}
        titles = "Missed → given instead, images", "Missed | beside a found one, images"
        pictures = [
            *_pairs(titles[0], "{} → {}", swaps, classes, looks),
            *_pairs(titles[1], "{} | {}", misses, classes, looks),
        ]
        if not pictures:
            return None
        lead = (
            "Pairs of labels in one test image. Missed → given: the first label is there and is "
            "missed, the second is not there and is given. Missed | beside: both are there, and "
            "the first is missed."
        )
        return Section("Mistakes", lead, tuple(pictures), legend(runs, runs.scored))


def _pairs(
    title: str,
    words: str,
    counts: Mapping[str, Array],
    classes: tuple[str, ...],
    looks: Mapping[str, Style],
) -> list[Picture]:
    """The most frequent pairs, by the mean over methods."""
    mean = np.mean(list(counts.values()), axis=0)
    best = np.argsort(-mean, axis=None, kind="stable")[:MOST_PAIRS]
    places = [divmod(int(i), len(classes)) for i in best if mean.flat[i] > 0]
    rows = [
        Row(
            words.format(*(svg.printable(classes[i], LETTERS) for i in (a, b))),
            tuple((looks[name], float(count[a, b])) for name, count in counts.items()),
            start=0.0,
        )
        for a, b in places
    ]
    if not rows:
        return []
    highest = max(value for row in rows for _, value in row.dots)
    return [dots(title, rows, ends=(0.0, max(highest, 5.0)), whole=True)]
