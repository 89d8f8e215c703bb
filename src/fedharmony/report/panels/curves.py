"""Metrics, structure and training loss over the rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from fedharmony.report.charts import Picture, Series, curve, zoom_start
from fedharmony.report.load import Runs
from fedharmony.report.panel import Panel, Section, legend, panels, series

#: Metrics drawn, and the trivial predictor to compare with; the other four are in the table.
_METRICS = {
    "mAP": "prevalence",
    "CF1": "all positive",
    "OF1": "all positive",
    "O-mAP": "prevalence",
}


@panels.register("curves")
class Curves(Panel):
    """How the methods got where they ended."""

    place = 10

    def draw(self, runs: Runs) -> Section | None:
        """Two methods are drawn whole; of more, the scales fit what they end at."""
        zoom, rounds = len(runs.groups) > 2, runs.rounds
        pictures: list[Picture] = []
        for metric, baseline in _METRICS.items():
            if found := series(runs, "metrics", metric):
                value = runs.baselines.get(baseline, {}).get(metric, math.nan)
                pictures.append(
                    curve(
                        f"{metric}, %",
                        found,
                        rounds=rounds,
                        percent=True,
                        reference=(baseline, value),
                        zoom=zoom,
                    )
                )
        if found := series(runs, "structure", "soft_pearson"):
            title = "Structure r (learned against true)"
            pictures.append(curve(title, found, rounds=rounds, zoom=zoom))
        if found := series(runs, "round", "train_loss"):
            title = "Training loss"
            if not _comparable(found):
                found = [_relative(s) for s in found]
                title += ", relative to the first round"
            pictures.append(curve(title, found, rounds=rounds, zoom=zoom))
        if not pictures:
            return None
        lead = "Measured on the whole test set after each evaluated round."
        if runs.seeds > 1:
            lead += " Lines are means over seeds, bands ± one standard deviation"
            partial = any(run.status != "completed" for run in runs.runs)
            lead += ", over the seeds that got that far." if partial else "."
        if zoom and zoom_start(rounds) > 1:
            lead += (
                f" The scales fit rounds {zoom_start(rounds)} to {rounds}; the start is cut off."
            )
        return Section("Training", lead, tuple(pictures), legend(runs))


def _comparable(found: Sequence[Series]) -> bool:
    """Whether losses are of one kind: a method that sums where others average is far off."""
    first = [c[min(c)] for s in found for c in s.curves if c and c[min(c)] > 0]
    return not first or max(first) < 10 * min(first)


def _relative(given: Series) -> Series:
    """Curves in units of their own first value."""
    curves = tuple({t: v / c[min(c)] for t, v in c.items()} if c else c for c in given.curves)
    return Series(given.name, given.style, curves)
