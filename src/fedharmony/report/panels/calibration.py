"""How far scores can be read as probabilities."""

from __future__ import annotations

from collections.abc import Mapping

from fedharmony.report import svg
from fedharmony.report.charts import Picture, percent_axes
from fedharmony.report.load import Runs
from fedharmony.report.measures import Reliability, reliability
from fedharmony.report.panel import Panel, Section, legend, panels, styles
from fedharmony.report.svg import Style

#: Bins with fewer pairs of image and label say little: they are drawn faintly.
FEW = 20


@panels.register("calibration")
class Calibration(Panel):
    """Scores against the share of labels that are there, and the expected calibration error."""

    place = 45

    def draw(self, runs: Runs) -> Section | None:
        """Ten bins of equal width, over all pairs of image and label."""
        found = {n: reliability(r.scores) for n, r in runs.scored.items() if r.scores is not None}
        if not found:
            return None
        lead = (
            "Of the labels with a score of 30 %, 30 % should be there. Below the diagonal a model "
            "is too sure, above it too cautious. The error (ECE) is the mean distance from the "
            "diagonal, weighted by the number of scores; most scores are low, and dominate it."
        )
        facts = [(f"ECE, {name}", f"{100 * r.error:.1f} %") for name, r in found.items()]
        if runs.alone:
            (only,) = found.values()
            facts = [("expected calibration error", f"{100 * only.error:.1f} %")]
            facts += [
                (f"scores around {100 * score:.0f} %", f"{count:,}, {100 * share:.0f} % there")
                for score, share, count in zip(only.score, only.share, only.count, strict=True)
            ]
        picture = _picture(found, styles(runs))
        return Section("Calibration", lead, (picture,), legend(runs, found), facts=tuple(facts))


def _picture(found: Mapping[str, Reliability], looks: Mapping[str, Style]) -> Picture:
    drawing, up, across = percent_axes("score, %")
    drawing.line([(across(0), up(0)), (across(100), up(100))], svg.MUTED, 1, svg.DASHED.dashes)
    for name, one in found.items():
        points = [(across(100 * x), up(100 * y)) for x, y in zip(one.score, one.share, strict=True)]
        drawing.line(points, looks[name].colour, 1.4, looks[name].dashes)
        for point, count in zip(points, one.count, strict=True):
            drawing.mark(*point, looks[name], opacity=0.35 if count < FEW else "")
    described = drawing.svg("Share of labels that are there against their scores")
    note = f"Faint marks: fewer than {FEW} scores."
    return Picture("Labels that are there, %", described, note)
