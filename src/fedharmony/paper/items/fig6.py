"""Fig. 6: label skew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedharmony.paper.item import BASE, OURS, Found, Item, Shown, items, mean
from fedharmony.paper.lines import lines_over
from fedharmony.paper.published import LOOKS, NAMES
from fedharmony.paper.scale import Part, Study
from fedharmony.paper.verdict import Gap, decide
from fedharmony.report.charts import Picture
from fedharmony.report.grid import Grid, signed, spread
from fedharmony.report.panel import Section, count

METHODS = (BASE, "spherefed", OURS)
#: Points that “nearly unchanged” may lose; the limit is ours.
STEADY = 1.0
#: The metrics that the paper draws.
METRICS = ("mAP", "OF1", "CP", "CR")


@items.register("fig6")
class Fig6(Item):
    """Metrics over the concentration γ."""

    place = 90
    title = "Fig. 6: label skew"
    claim = (
        "From γ = 1.0 down to 0.25 FedHarmony keeps its mAP, OF1, CP and CR nearly unchanged, "
        "while all other methods lose quickly. (Drawn for COCO-80 and VOC2007; no numbers.)"
    )
    rule = (
        "Loss: mean mAP at the largest γ less that at 0.25. Reproduced if FedHarmony loses at most "
        "1 point and every other method more than 2. Not reproduced if FedHarmony loses more than "
        "2 points, or no less than some other method that loses more than 1. (The paper gives no "
        "numbers; the limits are ours.)"
    )

    def parts(self, study: Study) -> Sequence[Part]:
        """One part per γ."""
        return [study.at_gamma(gamma, METHODS) for gamma in study.gammas]

    def fits(self, study: Study) -> bool:
        """Clients that are given cannot be split otherwise."""
        return bool(study.gammas)

    def show(self, found: Found) -> Shown:
        """Curves and losses."""
        study = found.study
        parts = dict(zip(study.gammas, self.parts(study), strict=True))
        pictures = tuple(_lines(found, parts, metric) for metric in METRICS)
        first, last = parts["0.25"], parts[study.gammas[-1]]
        losses = {
            m: Gap.of(
                [
                    high - low
                    for high, low in zip(
                        found.values(last, m, "mAP"), found.values(first, m, "mAP"), strict=True
                    )
                ]
            )
            for m in METHODS
        }
        table = Grid(
            f"mAP on {study.title}, per cent",
            ("method", *(f"γ = {g}" for g in parts), "loss down to 0.25", "paper"),
            tuple(
                (
                    NAMES[m],
                    *(spread(found.values(part, m, "mAP")) for part in parts.values()),
                    str(losses[m]),
                    "nearly unchanged" if m == OURS else "loses quickly",
                )
                for m in METHODS
            ),
            f"{count(first.seeds, 'seed')}; the paper's figure has no numbers, only its text.",
        )
        lead = (
            f"Smaller γ is stronger skew. {count(first.seeds, 'seed')}: lines are means, bands ± "
            "one standard deviation; values of γ at equal distances."
        )
        own = losses[OURS].mean
        others = {m: losses[m].mean for m in METHODS if m != OURS}
        yes = own <= STEADY and all(loss > 2 for loss in others.values())
        no = own > 2 or any(1 < loss <= own for loss in others.values())
        told = ", ".join(f"{NAMES[m]} {signed(-loss)}" for m, loss in others.items())
        largest = study.gammas[-1]
        level = mean(found.values(first, OURS, "mAP"))
        why = (
            f"from γ = {largest} to 0.25 FedHarmony's mAP changes by {signed(-own)} points (to "
            f"{level:.1f}), the others' by {told}."
        )
        keys = tuple((NAMES[method], LOOKS[method]) for method in METHODS)
        section = Section(self.title, lead, pictures, keys, grids=(table,))
        return Shown((section,), decide(yes, no, why, self.rule))


def _lines(found: Found, parts: Mapping[str, Part], metric: str) -> Picture:
    """A metric over γ, with a belt of what FedHarmony may lose below its value at the largest."""
    top = mean(found.values(parts[found.study.gammas[-1]], OURS, metric))
    words = f"“nearly unchanged”, as the paper says of FedHarmony: {STEADY:g} point at most"
    return lines_over(found, "γ", parts, METHODS, metric, (top - STEADY, top, words))
