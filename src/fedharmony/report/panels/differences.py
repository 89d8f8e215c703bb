"""Differences of all methods to one of them, with their intervals."""

from __future__ import annotations

import math

from fedharmony.metrics import METRIC_NAMES
from fedharmony.report.charts import Picture, Row, dots
from fedharmony.report.differences import INTERVAL, Difference, differences
from fedharmony.report.load import Runs
from fedharmony.report.panel import Panel, Section, panels, styles
from fedharmony.report.svg import Style


@panels.register("differences")
class DifferencesPanel(Panel):
    """A forest plot per metric: what chance may have done to the differences."""

    place = 5

    def draw(self, runs: Runs) -> Section | None:
        """One figure per metric, one row per method."""
        found = differences(runs)
        if found is None:
            return None
        looks = {group[0].label: styles(runs)[name] for name, group in runs.groups.items()}
        pictures = tuple(
            _forest(metric, [row[i] for row in found.found.values()], looks)
            for i, metric in enumerate(METRIC_NAMES)
        )
        several = any(len(row[0].pairs) > 1 for row in found.found.values())
        lead = (
            f"Mark: difference to {found.against} in points. Line: {INTERVAL}; where it crosses "
            "the upright line, chance may explain the difference. "
            + ("Strokes: single pairs of runs. " if several else "")
            + " ".join(f"{note[0].upper()}{note[1:]}." for note in found.notes)
        )
        return Section(f"Differences to {found.against}", lead, pictures)


def _forest(metric: str, row: list[Difference], looks: dict[str, Style]) -> Picture:
    lines = []
    for d in row:
        look, known = looks[d.method], math.isfinite(d.low)
        lines.append(
            Row(
                d.method,
                ((look, 100 * d.mean),),
                tuple((look, 100 * pair) for pair in d.pairs) if len(d.pairs) > 1 else (),
                interval=(100 * d.low, 100 * d.high) if known else None,
            )
        )
    p = "; ".join(f"{d.method} {' / '.join(d.cells()[-2:])}" for d in row)
    return dots(metric, lines, line_at=0.0, spacing=20, note=f"p images / p pairs: {p}.")
