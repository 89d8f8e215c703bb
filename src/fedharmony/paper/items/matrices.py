"""Figs. 2 and 4 and Algorithm 1: label correlations, true, learned and in clusters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from fedharmony.clusters import cluster_agreement, default_groups, spectral_clusters
from fedharmony.paper.item import BASE, OURS, Found, Item, Shown, items, mean
from fedharmony.paper.published import LOOKS, NAMES, RANDOM_TEXT
from fedharmony.paper.scale import Part, Study
from fedharmony.paper.verdict import Gap, Verdict, decide
from fedharmony.report.charts import Row, dots
from fedharmony.report.grid import Grid, spread
from fedharmony.report.load import RunView
from fedharmony.report.order import LabelOrder, cluster_order
from fedharmony.report.panel import Section, count
from fedharmony.report.panels.correlation import common_limit, correlation_map, off_diagonal
from fedharmony.report.svg import Array

#: A correlation is called weak below this size.
WEAK = 0.1


def true_matrix(run: RunView) -> Array:
    """φ of the test labels; nan on the diagonal and where it is not defined."""
    return off_diagonal(run.matrices["true"], run.matrices.get("true_defined"))


def clusters_of(matrix: Array) -> torch.Tensor:
    """Algorithm 1 on a matrix, with the default number of clusters."""
    whole = torch.from_numpy(np.nan_to_num(matrix))
    return spectral_clusters(whole, default_groups(len(matrix)), seed=0)


@dataclass(frozen=True)
class Grouping:
    """How far clusters hold the strong pairs of a matrix.

    Attributes:
        weak: share of all pairs with |φ| below :data:`WEAK`.
        together: share of the pairs with φ of at least :data:`WEAK` that lie inside of a cluster.
        chance: share of all pairs that do.
    """

    weak: float
    together: float
    chance: float


def grouping(matrix: Array, clusters: torch.Tensor) -> Grouping:
    """What clusters make of a matrix without diagonal.

    >>> m = np.array([[np.nan, 0.4, 0.05], [0.4, np.nan, 0.2], [0.05, 0.2, np.nan]])
    >>> found = grouping(m, torch.tensor([0, 0, 1]))  # of the pairs 0.4, 0.05, 0.2
    >>> round(found.weak, 3), found.together, round(found.chance, 3)
    (0.333, 0.5, 0.333)
    """
    ids = clusters.numpy()
    same = (ids[:, None] == ids) & (ids[:, None] >= 0)
    known = np.isfinite(matrix)
    strong = known & (np.nan_to_num(matrix) >= WEAK)
    return Grouping(
        weak=float((np.abs(matrix[known]) < WEAK).mean()),
        together=float(same[strong].mean()) if strong.any() else math.nan,
        chance=float(same[known].mean()),
    )


def _scale(limit: float) -> tuple[str, str]:
    return f"−{limit:.1f}", f"+{limit:.1f}"


@items.register("fig2")
class Fig2(Item):
    """The true label correlations: sparse and in blocks."""

    place = 65
    title = "Fig. 2: label correlations are sparse and in blocks"
    claim = (
        "The label correlation matrix is sparse and approximately made of blocks. (Drawn for VOC "
        "and FLAIR; no numbers.)"
    )
    rule = (
        f"Reproduced if at least half of the pairs have |φ| < {WEAK} (sparse) and at least 80 % of "
        f"the pairs with φ ≥ {WEAK} lie inside of the clusters of Algorithm 1 (blocks). Not "
        "reproduced if fewer than half are weak, or clusters hold less than twice as many of the "
        "strong pairs as of all pairs, which counts first. (The limits are ours. An earlier rule, "
        "by the mean |φ| inside and outside of clusters, said not reproduced on the digits: strong "
        "negative φ between their themes lie outside.)"
    )

    def parts(self, study: Study) -> Sequence[Part]:
        """Any run knows the test labels."""
        return [study.base((BASE,), 1)]

    def show(self, found: Found) -> Shown:
        """The matrix, in the order of its clusters."""
        run = found.group(self.parts(found.study)[0], BASE)[0]
        matrix = true_matrix(run)
        clusters = clusters_of(matrix)
        groups = grouping(matrix, clusters)
        limit = common_limit([matrix])
        order = cluster_order(clusters.numpy())
        maps = [correlation_map("True: the test labels", matrix, order, run.paired, limit)]
        if "planted" in run.matrices:
            planted = off_diagonal(run.matrices["planted"])
            title = "Planted: how the data were made"
            maps.append(correlation_map(title, planted, order, run.paired, limit))
        table = Grid(
            f"Label correlations of {found.study.title}",
            ("quantity", "ours", "paper"),
            (
                ("labels", f"{len(matrix):,}", "VOC 20, FLAIR 17"),
                (f"pairs with |φ| < {WEAK}", f"{groups.weak:.0%}", "“sparse”"),
                (
                    f"pairs with φ ≥ {WEAK} inside of clusters",
                    f"{groups.together:.0%}",
                    "“block-structured”",
                ),
                ("all pairs inside of clusters", f"{groups.chance:.0%}", "–"),
            ),
        )
        lead = (
            "φ of the test labels, hundredths. Frames are the clusters that Algorithm 1 finds in "
            "this matrix; the diagonal is left blank."
        )
        why = (
            f"{groups.weak:.0%} of the pairs have |φ| < {WEAK}; clusters hold "
            f"{groups.together:.0%} of the pairs with φ ≥ {WEAK} and {groups.chance:.0%} of all."
        )
        no = groups.weak < 0.5 or groups.together < 2 * groups.chance
        yes = groups.together >= 0.8 and not no
        section = Section(self.title, lead, tuple(maps), scale=_scale(limit), grids=(table,))
        return Shown((section,), decide(yes, no, why, self.rule))


@items.register("fig4")
class Fig4(Item):
    """The label correlations that models have learned."""

    place = 75
    title = "Fig. 4: learned label correlations"
    claim = (
        "FedHarmony's learned correlations are close to the true ones (equipment and material: "
        "0.43, true 0.42), those of other methods, such as FedRDN and FedNova, collapse towards "
        "zero. (Drawn for FLAIR; this is the only pair with numbers.)"
    )
    rule = (
        "Reproduced if FedHarmony's r is the highest and its RMSE the lowest of all methods, both "
        "with an interval of the difference to each that excludes 0. Not reproduced if another "
        "method's r is higher, or RMSE lower, with an interval that excludes 0, or if FedNova and "
        "FedRDN keep at least 80 % of FedHarmony's mean |R|. Intervals: Student's, 95 %."
    )

    def parts(self, study: Study) -> Sequence[Part]:
        """All methods of Table 1."""
        return [study.base(tuple(NAMES))]

    def show(self, found: Found) -> Shown:
        """Maps on one scale, and how far each is from the truth."""
        (part,) = self.parts(found.study)
        runs = found.runs(part)
        first = runs.first
        true, defined = true_matrix(first), first.matrices.get("true_defined")
        learned = {
            m: off_diagonal(group[0].matrices["learned"], defined)
            for m, group in runs.groups.items()
        }
        limit = common_limit([true, *learned.values()])
        order = LabelOrder(cluster_order(clusters_of(true).numpy()).index)
        maps = [correlation_map("True: the test labels", true, order, first.paired, limit)]
        numbers = {
            m: {k: [run.structure[k] for run in group] for k in _KEYS}
            for m, group in runs.groups.items()
        }
        for m, matrix in learned.items():
            note = (
                f"r {mean(numbers[m]['soft_pearson']):.2f}, "
                f"RMSE {mean(numbers[m]['soft_rmse']):.3f}"
            )
            maps.append(correlation_map(NAMES[m], matrix, order, first.paired, limit, note))
        size = first.structure.get("true_mean_abs", math.nan)
        table = Grid(
            f"Learned against true correlations, {found.study.title}",
            ("method", "Pearson r", "RMSE", "mean |R|", "paper (FLAIR)"),
            tuple(
                (
                    NAMES[m],
                    spread(values["soft_pearson"], 3),
                    spread(values["soft_rmse"], 3),
                    spread(values["soft_mean_abs"], 3),
                    _PRINTED.get(m, "–"),
                )
                for m, values in numbers.items()
            ),
            f"Over {count(part.seeds, 'seed')}, all pairs of labels. {RANDOM_TEXT} Mean |φ| of the "
            f"truth: {size:.3f}. "
            "Soft correlations are correlation times confidence: timid scores shrink them.",
        )
        dotted = [
            Row(NAMES[m], ((LOOKS[m], mean(values["soft_pearson"])),))
            for m, values in numbers.items()
        ]
        maps.append(dots("Pearson r with the truth", dotted, least=0.05, spacing=20))
        lead = (
            "Soft correlations (Eq. 2) of the final scores on the test images, first seed, "
            "hundredths, all on one scale and in one order; r and RMSE are means over seeds."
        )
        section = Section(self.title, lead, tuple(maps), scale=_scale(limit), grids=(table,))
        return Shown((section,), self._verdict(numbers))

    def _verdict(self, numbers: dict[str, dict[str, list[float]]]) -> Verdict:
        others = [m for m in numbers if m != OURS]

        def apart(method: str, key: str) -> Gap:
            pairs = zip(numbers[OURS][key], numbers[method][key], strict=True)
            return Gap.of([100 * (a - b) for a, b in pairs])

        best = max(others, key=lambda m: mean(numbers[m]["soft_pearson"]))
        closest = min(others, key=lambda m: mean(numbers[m]["soft_rmse"]))
        r = [apart(method, "soft_pearson") for method in others]
        rmse = [apart(method, "soft_rmse") for method in others]
        kept = {
            m: mean(numbers[m]["soft_mean_abs"]) / mean(numbers[OURS]["soft_mean_abs"])
            for m in ("fednova", "fedrdn")
        }
        stands = min(kept.values()) >= 0.8
        lower, larger = any(gap.below(0) for gap in r), any(gap.above(0) for gap in rmse)
        yes = all(gap.above(0) for gap in r) and all(gap.below(0) for gap in rmse) and not stands
        no = lower or larger or stands
        why = (
            f"FedHarmony's r is {mean(numbers[OURS]['soft_pearson']):.3f}, the best other's "
            f"({NAMES[best]}) {mean(numbers[best]['soft_pearson']):.3f}; RMSE "
            f"{mean(numbers[OURS]['soft_rmse']):.3f} against {NAMES[closest]}'s "
            f"{mean(numbers[closest]['soft_rmse']):.3f}. FedNova and FedRDN keep "
            f"{kept['fednova']:.0%} and {kept['fedrdn']:.0%} of FedHarmony's mean |R|."
        )
        return decide(yes, no, why, self.rule)


_KEYS = ("soft_pearson", "soft_rmse", "soft_mean_abs")
_PRINTED = {
    OURS: "0.43 where 0.42 is true",
    "fednova": "collapses towards 0",
    "fedrdn": "collapses towards 0",
}


@items.register("algorithm1")
class Algorithm1(Item):
    """The clusters of the consensus, and those of the truth."""

    place = 68
    title = "Algorithm 1: clusters of labels"
    claim = "Spectral clustering of the consensus puts strongly correlated labels into one group."
    rule = (
        f"Reproduced if in every seed the clusters that the run ended with hold at least 80 % of "
        f"the pairs whose true φ is at least {WEAK}. Not reproduced if in every seed they hold "
        "less than twice as many of these as of all pairs, which counts first. (The limits are "
        "ours, and the rule was changed as that of Fig. 2 was.)"
    )

    def parts(self, study: Study) -> Sequence[Part]:
        """FedHarmony's runs keep their last consensus and clusters."""
        return [study.base((OURS,))]

    def show(self, found: Found) -> Shown:
        """The consensus in the order of its clusters, and how they agree with the truth."""
        (part,) = self.parts(found.study)
        runs = found.group(part, OURS)
        rows, held = [], []
        for run in runs:
            ids = torch.from_numpy(run.matrices["clusters"].astype(np.int64))
            true = true_matrix(run)
            groups = grouping(true, ids)
            held.append(groups)
            rows.append(
                (
                    f"seed {run.seed}",
                    str(len(set(ids.tolist()) - {-1})),
                    f"{groups.together:.0%}",
                    f"{groups.chance:.0%}",
                    f"{cluster_agreement(ids, clusters_of(true)):.2f}",
                )
            )
        table = Grid(
            f"Clusters at the end of training, {found.study.title}",
            ("run", "clusters", "strong pairs inside", "all pairs inside", "adjusted Rand index"),
            tuple(rows),
            f"Strong: true φ ≥ {WEAK}. Rand index: agreement with the clusters of the true matrix, "
            "1 where they are the same, 0 by chance. The paper prints no clusters.",
        )
        first = runs[0]
        consensus = off_diagonal(first.matrices["consensus"], first.matrices["consensus_known"])
        true = true_matrix(first)
        limit = common_limit([consensus, true])
        order = cluster_order(first.matrices["clusters"].astype(np.int64))
        maps = (
            correlation_map("Consensus of the clients", consensus, order, first.paired, limit),
            correlation_map("True: the test labels", true, order, first.paired, limit),
        )
        lead = "Both in the order of the run's clusters (framed), first seed; φ in hundredths."
        shares = [groups.together for groups in held]
        why = (
            f"the clusters hold {min(shares):.0%} to {max(shares):.0%} of the pairs whose true φ "
            f"is at least {WEAK}, and {held[0].chance:.0%} of all pairs."
        )
        section = Section(self.title, lead, maps, scale=_scale(limit), grids=(table,))
        no = all(groups.together < 2 * groups.chance for groups in held)
        return Shown((section,), decide(min(shares) >= 0.8 and not no, no, why, self.rule))
