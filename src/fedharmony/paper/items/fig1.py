"""Fig. 1: what clients have of the label structure, beside their size."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedharmony.correlation import label_pairs
from fedharmony.experiments.preview import preview
from fedharmony.paper.item import OURS, Bench, Found, Item, Measured, Shown, items
from fedharmony.paper.scale import Part, Study
from fedharmony.paper.scatter import scatter
from fedharmony.paper.verdict import decide
from fedharmony.report.charts import Picture
from fedharmony.report.grid import Grid
from fedharmony.report.load import RunView, number
from fedharmony.report.order import LabelOrder, spectral_order
from fedharmony.report.panel import Section, count
from fedharmony.report.panels.correlation import common_limit, correlation_map, off_diagonal
from fedharmony.report.svg import Array
from fedharmony.types import Index, Labels

#: Labels up to which matrices are kept; of more, the most frequent.
MOST = 40


@items.register("fig1")
class Fig1(Item):
    """Co-occurrence in clients and in all, quality and size."""

    place = 60
    title = "Fig. 1: clients differ in their label structure"
    claim = (
        "Clients have co-occurrence patterns of their own that deviate from the global one, and a "
        "client with much data may still have poor correlations. (Drawn for FLAIR; no numbers.)"
    )
    measures = "the label correlations of every client (the labels of the training images)"
    rule = (
        "Reproduced if the clients' correlations lie at least 1.2 times as far from the global "
        "ones as in a random split of the same sizes, and some client among the largest third has "
        "a quality below the median. Not reproduced if one of the two does not hold."
    )

    def parts(self, study: Study) -> Sequence[Part]:
        """One run of FedHarmony: its weights are the qualities."""
        return [study.base((OURS,), 1)]

    def measure(self, bench: Bench) -> Measured:
        """φ of each client's labels, its distance from φ of all, and sizes."""
        (part,) = self.parts(bench.study)
        split = preview(bench.settings(part, OURS))
        frequent = most_frequent(split.labels)
        labels, names = split.labels[:, frequent], [split.classes[i] for i in frequent]
        whole = correlations(labels)
        sizes = split.partition.sizes
        order = np.argsort(-sizes, kind="stable")
        chosen = [int(order[i]) for i in (0, len(order) // 2, len(order) - 1)]
        indices = split.partition.indices
        apart = [distance(correlations(labels[index]), whole) for index in indices]
        drawn = {str(client): correlations(labels[indices[client]]) for client in chosen}
        return {
            "labels": names,
            "sizes": sizes,
            "apart": apart,
            "drift": split.report.correlation_drift,
            "floor": split.report.correlation_drift_iid,
            "whole": whole,
            "drawn": drawn,
        }

    def show(self, found: Found) -> Shown:
        """Matrices of some clients, and distance and quality over size."""
        (part,) = self.parts(found.study)
        run = found.group(part, OURS)[0]
        known = found.measured
        sizes = np.array(known["sizes"], np.float64)
        apart = np.array([number(v) for v in known["apart"]])
        quality = qualities(run, len(sizes))
        whole = _matrix(known["whole"])
        order = LabelOrder(spectral_order(np.nan_to_num(whole)))
        maps = [("All clients together", whole)]
        for client, matrix in known["drawn"].items():
            maps.append(
                (f"Client {client}: {count(int(sizes[int(client)]), 'image')}", _matrix(matrix))
            )
        limit = common_limit([values for _, values in maps])
        pictures = [
            correlation_map(title, values, order, known["labels"], limit) for title, values in maps
        ]
        pictures += self._scatters(sizes, apart, quality)
        heard = np.isfinite(quality)
        large = np.zeros(len(sizes), bool)
        large[np.argsort(-sizes, kind="stable")[: -(-len(sizes) // 3)]] = True
        median = float(np.median(quality[heard])) if heard.any() else math.nan
        poor = [int(i) for i in np.flatnonzero(large & heard & (quality < median))]
        drift, floor = (number(known[name]) for name in ("drift", "floor"))
        ratio = drift / floor if floor else math.nan
        rank = _rank_correlation(sizes[heard], quality[heard])
        table = Grid(
            f"Clients of {found.study.title}",
            ("quantity", "value"),
            (
                ("clients", f"{len(sizes):,}"),
                ("images, smallest and largest", f"{sizes.min():,.0f}, {sizes.max():,.0f}"),
                ("drift: distance of a client's φ from the global one", f"{drift:.3f}"),
                ("the same in a random split of the same sizes", f"{floor:.3f}"),
                ("large clients (top third) with quality below the median", str(len(poor))),
                ("rank correlation of size and quality", _signed(rank)),
                ("paper", "a figure of FLAIR clients without numbers"),
            ),
            "Quality: the client's mean weight over rounds in which weights are qualities alone, "
            "as a multiple of the mean weight.",
        )
        lead = (
            "Label correlations (φ, hundredths) of all training images and of the largest, a "
            "middle and the smallest client, on one scale; hatched pairs do not occur. Of many "
            f"labels the {MOST} most frequent."
        )
        why = (
            f"clients' correlations lie {ratio:.1f} times as far from the global ones as in a "
            f"random split ({drift:.3f} against {floor:.3f}); {len(poor)} of "
            f"{int((large & heard).sum())} large clients have a quality below the median."
        )
        if not math.isfinite(ratio):
            why = "clients have too few images: no correlation of theirs is known."
        drifts, told = ratio >= 1.2, bool(heard.any())
        scale = (f"−{limit:.1f}", f"+{limit:.1f}")
        section = Section(self.title, lead, tuple(pictures), scale=scale, grids=(table,))
        no = ratio < 1.2 or (drifts and told and not poor)
        return Shown((section,), decide(drifts and bool(poor), no, why, self.rule))

    def _scatters(self, sizes: Array, apart: Array, quality: Array) -> list[Picture]:
        return [
            scatter("Distance from the global φ", sizes, apart, "images of the client"),
            scatter("Quality (mean 1)", sizes, quality, "images of the client"),
        ]


def most_frequent(labels: Labels) -> Index:
    """The :data:`MOST` most frequent labels, in their order."""
    counts = labels.sum(axis=0, dtype=np.int64)
    return np.sort(np.argsort(-counts, kind="stable")[:MOST])


def correlations(labels: Labels) -> Array:
    """φ of labels; nan on the diagonal and where one of two labels does not vary."""
    matrix, defined = label_pairs(labels)
    return off_diagonal(matrix.numpy(), defined.numpy())


def distance(own: Array, whole: Array) -> float:
    """Root mean square difference over the pairs that both have; nan where there is none.

    >>> own = np.array([[np.nan, 0.5], [0.5, np.nan]])
    >>> distance(own, own - 0.3), distance(own, own * np.nan)
    (0.3, nan)
    """
    gap = (own - whole)[np.isfinite(own - whole)]
    return float(np.sqrt(np.mean(gap**2))) if gap.size else math.nan


def qualities(run: RunView, clients: int) -> Array:
    """Mean weight of each client in rounds where α is 0, in multiples of the round's mean.

    nan for a client that took no part in them.
    """
    total, heard = np.zeros(clients), np.zeros(clients)
    for event in run.rounds:
        if (event.get("log") or {}).get("alpha") == 0 and event.get("weights"):
            weights = {int(k): float(w) for k, w in event["weights"].items()}
            for client, weight in weights.items():
                total[client] += weight * len(weights)
                heard[client] += 1
    return np.where(heard > 0, total / np.maximum(heard, 1), np.nan)


def _matrix(rows: Sequence[Sequence[float | None]]) -> Array:
    """A matrix from JSON, where nan is null."""
    return np.array([[number(v) for v in row] for row in rows])


def _signed(value: float) -> str:
    return f"{value:+.2f}".replace("-", "−") if math.isfinite(value) else "–"


def _rank_correlation(a: Array, b: Array) -> float:
    from scipy import stats

    if len(a) < 3 or np.ptp(a) == 0 or np.ptp(b) == 0:
        return math.nan
    return float(stats.spearmanr(a, b).statistic)
