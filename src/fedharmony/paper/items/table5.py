"""Table 5: the parts of FedHarmony, one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from fedharmony.metrics import METRIC_NAMES
from fedharmony.paper.item import BASE, OURS, Found, Item, Shown, items, mean
from fedharmony.paper.published import row
from fedharmony.paper.scale import Part, Study
from fedharmony.paper.verdict import Gap, decide
from fedharmony.report import svg
from fedharmony.report.charts import Picture, Row, dots
from fedharmony.report.grid import Grid, signed, spread
from fedharmony.report.panel import Section, count

#: The paper's columns, and the methods that stand for them.
VARIANTS = {"Base": BASE, "A": "fedharmony:a", "A+B": "fedharmony:ab", "A+B+C": OURS}
DATA = ("COCO-80", "FLAIR")
#: What each part adds to mAP at least in the paper: A and B on COCO-80 and FLAIR (Table 5), C on
#: VOC2007 (Table 3).
GAINS = {"A": 6.1, "B": 0.6, "C": 0.9}
STEP_RULE = (
    "Reproduced if the interval of its step in mAP lies above 0; not reproduced if it ends below "
    "half of the smallest step that the paper prints."
)


@items.register("table5")
class Table5(Item):
    """Base, +A, +A+B, +A+B+C."""

    place = 50
    title = "Table 5: what each part adds"
    claim = (
        "The alignment loss (A) brings most of the gain in mAP (6.1 on COCO-80, 11.0 on FLAIR), "
        "aggregation by quality (B) and blocks (C) add to it, and all three together are best."
    )
    rule = (
        "Reproduced if the interval of A − Base in mAP lies above 0 and A+B+C has the highest "
        "mAP. Not reproduced if that interval ends below half of the paper's smaller gain (3.0 "
        "points). Intervals: Student's, 95 %, over seeds."
    )

    def parts(self, study: Study) -> Sequence[Part]:
        """The settings of Table 1."""
        return [study.base(tuple(VARIANTS.values()))]

    def show(self, found: Found) -> Shown:
        """Ours, the paper's, and the steps between the columns."""
        (part,) = self.parts(found.study)
        ours = Grid(
            f"Found on {found.study.title}, per cent",
            ("metric", *VARIANTS),
            tuple(
                (k, *(spread(found.values(part, m, k)) for m in VARIANTS.values()))
                for k in METRIC_NAMES
            ),
            f"Mean ± sample standard deviation over {count(part.seeds, 'seed')}.",
        )
        steps = [("Base", "A"), ("A", "A+B"), ("A+B", "A+B+C"), ("Base", "A+B+C")]
        gaps = {(a, b): found.gap(part, VARIANTS[b], VARIANTS[a], "mAP") for a, b in steps}
        stepwise = Grid(
            "Steps in mAP, points",
            ("step", "ours", *(f"paper, {data}" for data in DATA)),
            tuple(
                (f"{a} → {b}", str(gap), *(_step(data, a, b) for data in DATA))
                for (a, b), gap in gaps.items()
            ),
            "Ours with Student's 95 % interval over seeds; the paper prints no A+B+C column.",
        )
        paper = Grid(
            "The paper's Table 5 beside it",
            ("metric", *(f"{data} {v}" for data in DATA for v in ("Base", "A", "A+B"))),
            tuple(
                (k, *(_printed(data, v, k) for data in DATA for v in ("Base", "A", "A+B")))
                for k in METRIC_NAMES
            ),
        )
        picture = _picture(gaps)
        lead = "One part is added at a time; everything else is the same."
        gain, full = gaps["Base", "A"], gaps["Base", "A+B+C"]
        means = {v: mean(found.values(part, m, "mAP")) for v, m in VARIANTS.items()}
        top = max(means, key=lambda v: means[v])
        why = (
            f"A changes mAP by {gain} points and all three parts by {full} "
            f"(the paper: {_step('COCO-80', 'Base', 'A')} and {_step('FLAIR', 'Base', 'A')} for "
            f"A); {top} has the highest mAP, {means[top]:.1f}."
        )
        small = gain.below(GAINS["A"] / 2)
        yes = gain.above(0) and top == "A+B+C" and not small
        section = Section(self.title, lead, (picture,), grids=(ours, stepwise, paper))
        more = {}
        for part_name, step in zip(GAINS, gaps.values(), strict=False):
            least = step.below(GAINS[part_name] / 2)
            text = f"it changes mAP by {step} points (paper: at least +{GAINS[part_name]})."
            word = decide(step.above(0) and not least, least, text, STEP_RULE)
            more[f"Part {part_name}"] = word
        return Shown((section,), decide(yes, small, why, self.rule), more)


def _picture(gaps: Mapping[tuple[str, str], Gap]) -> Picture:
    """Steps with their intervals, and the paper's beside them."""
    grey, lines = svg.Style(svg.MUTED, "", svg.style(3).outline), []
    for (a, b), gap in gaps.items():
        printed = [text for data in DATA if (text := _step(data, a, b)) != "–"]
        paper = tuple((grey, float(text.replace("−", "-"))) for text in printed)
        interval = (gap.low, gap.high) if gap.count > 1 else None
        lines.append(Row(f"{a} → {b}", ((svg.style(0), gap.mean), *paper), interval=interval))
    note = "Blue: ours with 95 % interval over seeds. Grey: the paper's COCO-80 and FLAIR."
    values = [v for line in lines for v in (*(d for _, d in line.dots), *(line.interval or ()))]
    ends = min(values), max(values)
    return dots("Steps in mAP, points", lines, ends=ends, line_at=0.0, spacing=22, note=note)


def _printed(data: str, variant: str, metric: str) -> str:
    found = row("table5", data=data, variant=variant)
    return "–" if found is None else found[metric]


def _step(data: str, a: str, b: str) -> str:
    """A difference of two columns of the paper in mAP, or a dash."""
    one, two = _printed(data, a, "mAP"), _printed(data, b, "mAP")
    return "–" if "–" in (one, two) else signed(float(two) - float(one))
