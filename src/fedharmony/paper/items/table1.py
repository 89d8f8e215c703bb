"""Table 1: eight methods by eight metrics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from fedharmony.metrics import METRIC_NAMES
from fedharmony.paper.item import BASE, OURS, Found, Item, Shown, items, mean
from fedharmony.paper.published import LOOKS, NAMES, RANDOM_TEXT, row, rows
from fedharmony.paper.scale import Part, Study
from fedharmony.paper.verdict import Verdict, decide
from fedharmony.report import svg
from fedharmony.report.charts import Picture, Row, dots
from fedharmony.report.grid import Grid, signed, spread
from fedharmony.report.panel import Section, count

#: The paper's data sets, in its order.
DATA = ("FLAIR", "COCO-80", "VOC2007")
#: The paper's smallest lead in mAP: COCO-80, 71.4 against FedLGT's 64.5.
LEAD = 6.9


@items.register("table1")
class Table1(Item):
    """All methods on the same split."""

    place = 10
    title = "Table 1: eight methods, eight metrics"
    claim = (
        "FedHarmony has the best value of every metric on every data set, and is ahead of the "
        "strongest other method by 6.9 (COCO-80) to 11.4 points of mAP (FLAIR)."
    )
    rule = (
        "Reproduced if FedHarmony's mean is the highest in all eight metrics and the interval of "
        "its lead in mAP over the best other method lies above 0. Not reproduced if another method "
        "is ahead in some metric with an interval that excludes 0, or if the interval of the lead "
        "in mAP ends below half of the paper's smallest lead (3.4 points). Intervals: Student's, "
        "95 %, over seeds."
    )

    def parts(self, study: Study) -> Sequence[Part]:
        """One part with all methods."""
        return [study.base(tuple(NAMES))]

    def show(self, found: Found) -> Shown:
        """Ours, the paper's beside it, and what each method gains over FedAvg."""
        (part,) = self.parts(found.study)
        beside = found.study.beside
        ours = {m: {k: found.values(part, m, k) for k in METRIC_NAMES} for m in part.methods}
        table = Grid(
            f"Found on {found.study.title}, per cent",
            ("method", *METRIC_NAMES),
            tuple((NAMES[m], *(spread(ours[m][k]) for k in METRIC_NAMES)) for m in ours),
            f"Mean ± sample standard deviation over {count(part.seeds, 'seed')}. {RANDOM_TEXT}",
        )
        compared = Grid(
            f"The paper's {beside}, and how far ours lies from it",
            ("method", *METRIC_NAMES),
            tuple(_beside(m, ours[m], beside) for m in ours),
            "In brackets: ours − the paper's (Table 1). Other data have other levels: compare "
            "differences between methods.",
        )
        lead = (
            "What each method gains over FedAvg in mAP: levels depend on the data, gains are the "
            "claim. Grey marks are the paper's three data sets."
        )
        section = Section(
            self.title, lead, (_gains(found, part),), grids=(table, compared, _gain_table(ours))
        )
        return Shown((section,), verdict(found, part))


def _beside(method: str, ours: Mapping[str, Sequence[float]], data: str) -> tuple[str, ...]:
    printed = row("table1", data=data, method=NAMES[method])
    assert printed is not None
    cells = [f"{printed[k]} ({signed(mean(ours[k]) - float(printed[k]))})" for k in METRIC_NAMES]
    return (NAMES[method], *cells)


def published_gain(data: str, method: str, metric: str = "mAP") -> float:
    """What a method gains over FedAvg in the paper's Table 1."""
    values = {r["method"]: float(r[metric]) for r in rows("table1") if r["data"] == data}
    return values[NAMES[method]] - values[NAMES[BASE]]


def _gain_table(ours: Mapping[str, Mapping[str, Sequence[float]]]) -> Grid:
    cells = []
    for method in ours:
        if method == BASE:
            continue
        gain = mean(ours[method]["mAP"]) - mean(ours[BASE]["mAP"])
        paper = [published_gain(data, method) for data in DATA]
        cells.append((NAMES[method], signed(gain), *(signed(value) for value in paper)))
    return Grid(
        "mAP gained over FedAvg, points",
        ("method", "ours", *(f"paper, {data}" for data in DATA)),
        tuple(cells),
    )


def _gains(found: Found, part: Part) -> Picture:
    grey = replace(svg.style(3), colour=svg.MUTED, dashes="")
    others = [m for m in part.methods if m != BASE]
    gaps = {m: found.gap(part, m, BASE, "mAP") for m in others}
    means = [gap.mean for gap in gaps.values()]
    ends = min(-10.0, *means), max(16.0, *means)
    lines, outside = [], []
    for method, gap in gaps.items():
        printed = {data: published_gain(data, method) for data in DATA}
        outside += [f"{NAMES[method]} {signed(v)} ({d})" for d, v in printed.items() if v < ends[0]]
        paper = tuple((grey, value) for value in printed.values() if value >= ends[0])
        interval = (gap.low, gap.high) if gap.count > 1 else None
        lines.append(Row(NAMES[method], ((LOOKS[method], gap.mean), *paper), interval=interval))
    note = "Lines: 95 % interval of ours over seeds. Grey: the paper's three data sets"
    note += f"; outside: {', '.join(outside)}." if outside else "."
    title = "mAP gained over FedAvg, points"
    return dots(title, lines, ends=ends, line_at=0.0, spacing=22, note=note)


def verdict(found: Found, part: Part) -> Verdict:
    """By the item's rule."""
    others = [m for m in part.methods if m != OURS]
    best, ahead = [], []
    for metric in METRIC_NAMES:
        means = {m: mean(found.values(part, m, metric)) for m in part.methods}
        best += [metric] if means[OURS] >= max(means.values()) else []
        ahead += [
            f"{NAMES[m]} in {metric}" for m in others if found.gap(part, m, OURS, metric).above(0)
        ]
    rival = max(others, key=lambda m: mean(found.values(part, m, "mAP")))
    lead = found.gap(part, OURS, rival, "mAP")
    small = lead.below(LEAD / 2)
    named = f" ({', '.join(best)})" if best else ""
    why = (
        f"FedHarmony is best in {len(best)} of {len(METRIC_NAMES)} metrics{named}; its mAP lies "
        f"{lead} points from the best "
        f"other method, {NAMES[rival]}"
    )
    why += f"; clearly ahead of it: {_some(ahead)}." if ahead else "."
    yes = len(best) == len(METRIC_NAMES) and lead.above(0) and not small and not ahead
    return decide(yes, bool(ahead) or small, why, Table1.rule)


def _some(names: Sequence[str], most: int = 4) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
