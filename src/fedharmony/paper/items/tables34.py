"""Tables 3 and 4: block against no block, and whether the difference is one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

from fedharmony.metrics import METRIC_NAMES
from fedharmony.paper.item import OURS, Found, Item, Shown, items, mean
from fedharmony.paper.published import row, rows
from fedharmony.paper.scale import Part, Study
from fedharmony.paper.verdict import Gap, decide
from fedharmony.report import svg
from fedharmony.report.charts import Row, dots
from fedharmony.report.grid import Grid, signed, spread
from fedharmony.report.panel import Section, count

NO_BLOCK = "fedharmony:ab"
#: Metrics that the paper pairs.
PAIRS = 8


def gaps_of(found: Found, part: Part) -> dict[str, Gap]:
    """Block − no block, in points, by metric."""
    return {k: found.gap(part, OURS, NO_BLOCK, k) for k in METRIC_NAMES}


@items.register("table3")
class Table3(Item):
    """Block against no block, metric by metric."""

    place = 30
    title = "Table 3: block against no block"
    claim = (
        "Alignment inside blocks alone changes the metrics little, typically by 0.3 to 0.5 points. "
        "(Its own Table 3 has changes of up to 1.9 points: COCO-80 CP, FLAIR O-mAP.)"
    )
    rule = (
        "Reproduced if the mean size of the eight differences is at most 0.5 points. Not "
        "reproduced if it is more and some difference has an interval that lies beyond ± 0.5."
    )

    def parts(self, study: Study) -> Sequence[Part]:
        """No block is the paper's A+B."""
        return [study.base((NO_BLOCK, OURS))]

    def show(self, found: Found) -> Shown:
        """All eight metrics; the paper prints three."""
        (part,) = self.parts(found.study)
        gaps = gaps_of(found, part)
        cells = []
        for k in METRIC_NAMES:
            values = [spread(found.values(part, m, k)) for m in (NO_BLOCK, OURS)]
            printed = [_change(data, k) for data in ("COCO-80", "VOC2007", "FLAIR")]
            cells.append((k, *values, str(gaps[k]), *printed))
        table = Grid(
            f"Found on {found.study.title}, per cent, and the paper's differences",
            (
                *("metric", "no block", "block", "block − no block"),
                *("paper, COCO-80", "paper, VOC2007", "paper, FLAIR"),
            ),
            tuple(cells),
            f"Ours over {count(part.seeds, 'seed')}, with Student's 95 % interval of the "
            "difference.",
        )
        look = svg.style(0)
        grey = svg.Style(svg.MUTED, "", svg.style(3).outline)
        lines = []
        for k, gap in gaps.items():
            paper = [_change(data, k) for data in ("COCO-80", "VOC2007", "FLAIR")]
            known = tuple((grey, float(p.replace("−", "-"))) for p in paper if p != "–")
            interval = (gap.low, gap.high) if gap.count > 1 else None
            lines.append(Row(k, ((look, gap.mean), *known), interval=interval))
        note = "Blue: ours with 95 % interval over seeds. Grey: the paper's three data sets."
        picture = dots("Block − no block, points", lines, line_at=0.0, spacing=20, note=note)
        size = mean([abs(gap.mean) for gap in gaps.values()])
        beyond = [k for k, gap in gaps.items() if gap.above(0.5) or gap.below(-0.5)]
        largest = max(gaps, key=lambda k: abs(gaps[k].mean))
        why = (
            f"the eight differences have a mean size of {size:.1f} points; the largest is "
            f"{gaps[largest]} in {largest}."
        )
        yes = size <= 0.5
        section = Section(
            self.title,
            "Both variants share data, split, cohorts and batches.",
            (picture,),
            grids=(table,),
        )
        return Shown((section,), decide(yes, not yes and bool(beyond), why, self.rule))


def _change(data: str, metric: str) -> str:
    one = row("table3", data=data, variant="No-Block")
    two = row("table3", data=data, variant="Block-Optimized")
    if one is None or two is None or metric not in one:
        return "–"
    return signed(float(two[metric]) - float(one[metric]))


def exact_p(w: float, pairs: int = PAIRS) -> float:
    """Two-sided p of Wilcoxon's W (the smaller sum of ranks), without ties or zeros.

    Each of the 2ⁿ choices of signs is equally likely; p is twice the share of those whose positive
    ranks add up to W at most.

    >>> [round(exact_p(w), 3) for w in (0, 2, 7)]  # 2 · 1/256, 2 · 3/256, 2 · 19/256
    [0.008, 0.023, 0.148]
    """
    ranks = range(1, pairs + 1)
    sums = (sum(chosen) for n in range(pairs + 1) for chosen in combinations(ranks, n))
    return min(1.0, 2 * sum(total <= w for total in sums) / float(2**pairs))


def signed_ranks(differences: Sequence[float]) -> tuple[float, float]:
    """W and p of Wilcoxon's signed-rank test, by scipy; differences of zero are left out."""
    from scipy import stats  # slow to import

    nonzero = [d for d in differences if d != 0]
    if not nonzero:
        return 0.0, 1.0
    test = stats.wilcoxon(nonzero)
    return float(test.statistic), float(test.pvalue)


def printed_differences(data: str) -> list[float]:
    """Table 1's FedHarmony − Table 5's A+B, the eight metrics the paper prints of both variants."""
    full, no_block = (
        row("table1", data=data, method="FedHarmony"),
        row("table5", data=data, variant="A+B"),
    )
    if full is None or no_block is None:
        return []
    return [round(float(full[k]) - float(no_block[k]), 1) for k in METRIC_NAMES]


@items.register("table4")
class Table4(Item):
    """Wilcoxon's signed-rank test of block against no block."""

    place = 40
    title = "Table 4: Wilcoxon signed-rank test"
    claim = (
        "Paired over eight metrics, block and no block do not differ significantly: W and p are 7 "
        "and 0.382 (COCO-80), 0 and 0.148 (VOC2007), 2 and 0.547 (FLAIR)."
    )
    rule = (
        "Reproduced if p of our eight paired metrics (means over seeds) exceeds 0.05, else not "
        "reproduced. The printed W and p are held against each other apart from that: eight pairs "
        "without ties are assumed."
    )

    def parts(self, study: Study) -> Sequence[Part]:
        """The same runs as Table 3."""
        return [study.base((NO_BLOCK, OURS))]

    def show(self, found: Found) -> Shown:
        """Ours, and what the printed W would mean."""
        (part,) = self.parts(found.study)
        tests = [("means over seeds", [gap.mean for gap in gaps_of(found, part).values()])]
        for seed in range(part.seeds):
            own, other = (
                [found.values(part, m, k)[seed] for k in METRIC_NAMES] for m in (OURS, NO_BLOCK)
            )
            tests.append((f"seed {seed}", [a - b for a, b in zip(own, other, strict=True)]))
        results = [(name, *signed_ranks(differences)) for name, differences in tests]
        ours = Grid(
            f"Found on {found.study.title}: eight paired metrics",
            ("pairs of", "W", "p"),
            tuple((name, f"{w:g}", f"{p:.3f}") for name, w, p in results),
            "By scipy (exact up to 50 pairs). Eight metrics of one run depend on each other, so "
            "that no such test is valid, whatever it says.",
        )
        cells = []
        for printed in rows("table4"):
            w, p = float(printed["W"]), float(printed["p"])
            matching = [v for v in range(37) if abs(exact_p(v) - p) < 1e-3]
            again = printed_differences(printed["data"])
            recomputed = "–"
            if again:
                statistic, probability = signed_ranks(again)
                recomputed = f"W {statistic:g}, p {probability:.3f}"
            belongs = ", ".join(map(str, matching)) or "none"
            cells.append(
                (printed["data"], f"{w:g}", f"{p:.3f}", f"{exact_p(w):.3f}", belongs, recomputed)
            )
        paper = Grid(
            "The paper's W and p contradict each other",
            (
                *("data", "W printed", "p printed", "p that belongs to W"),
                *("W that belongs to p", "from Tables 1 and 5"),
            ),
            tuple(cells),
            "Exact two-sided p of eight pairs. By its own W, two of three comparisons would be "
            "significant at 0.05. Last column: the full method of Table 1 against A+B of Table 5, "
            "the only pair of which all eight metrics are printed.",
        )
        w, p = results[0][1:]
        why = (
            f"our eight metrics give W = {w:g}, p = {p:.3f}. In the paper's table W and p do not "
            "belong together: its W of 0 and 2 mean p = 0.008 and 0.023."
        )
        section = Section(self.title, "Exact tests of paired metrics.", grids=(ours, paper))
        return Shown((section,), decide(p > 0.05, p <= 0.05, why, self.rule))
