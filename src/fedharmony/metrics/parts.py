"""Metrics of a test set that nobody has in one place: what its parts tell, and what that gives.

None of the eight metrics needs to know which scores belong to one image. A part of the test set
tells, label by label, its scores in ascending order, each with the label: pooled, these give every
metric exactly. Or it tells how many of them lie in each of :data:`BINS` equal intervals: scores are
then rounded down to a boundary. The threshold is a boundary, too, so that CP, CR, CF1, OP, OR and
OF1 stay exact; average precision lies between :func:`precision_bounds`, which pooled counts give.
How labels go together comes from sums over images, which add up (:func:`pair_sums`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedharmony.correlation import correlation, mean_moments, phi, score_sums
from fedharmony.errors import DataError
from fedharmony.metrics.multilabel import (
    Bools,
    Counts,
    Doubles,
    MetricOptions,
    MultiLabelResult,
    checked_arrays,
    evaluate,
    mean_average_precision,
)
from fedharmony.metrics.structure import StructureResult, compare
from fedharmony.types import MOST_IMAGES, Labels, Tensors

#: Equal intervals of [0, 1] in which scores are counted.
BINS = 4096
#: Cells of a table of scores that counts of a part may stand for: 125,000 images by 80 labels.
ROOM = 10_000_000
#: Types of the tensors of a part.
TYPES = {
    "pairs": torch.float64,
    "known": torch.int64,
    "scores": torch.float32,
    "hits": torch.uint8,
    "bins": torch.int32,
}


@dataclass(frozen=True, eq=False)
class Part:
    """What a part of a test set tells of a model's scores.

    Attributes:
        images: how many it has.
        scores: float32, those of known labels, label after label, ascending in each.
        hits: whether the label is present, for each score.
        known: ``(C,)`` how many scores each label has.
        pairs: ``(7, C, C)``, see :func:`pair_sums`.
        exact: whether scores are as the model gave them, and not rounded to a boundary.
    """

    images: int
    scores: npt.NDArray[np.float32]
    hits: Bools
    known: Counts
    pairs: Tensor
    exact: bool

    def of_label(self, label: int) -> slice:
        """Where the scores of a label are."""
        end = int(self.known[: label + 1].sum())
        return slice(end - int(self.known[label]), end)

    def tensors(self, threshold: float) -> Tensors:
        """As it travels."""
        found = {"pairs": self.pairs, "known": torch.from_numpy(self.known)}
        if self.exact:
            scores, hits = torch.from_numpy(self.scores), torch.from_numpy(self.hits)
            return found | {"scores": scores, "hits": hits.to(torch.uint8)}
        edges = boundaries(threshold)
        counts = torch.zeros(len(self.known), 2, len(edges), dtype=torch.int32)
        for label in range(len(self.known)):
            own = self.of_label(label)
            place = np.searchsorted(edges, self.scores[own])
            for hit in (0, 1):
                counted = np.bincount(place[self.hits[own] == hit], minlength=len(edges))
                counts[label, hit] = torch.from_numpy(counted)
        return found | {"bins": counts}


def boundaries(threshold: float) -> npt.NDArray[np.float32]:
    """The numbers that scores are rounded down to: k/BINS, and the threshold."""
    grid = np.arange(BINS + 1, dtype=np.float32) / np.float32(BINS)
    return np.union1d(grid, np.float32(threshold)).astype(np.float32)


def part_of(
    scores: npt.NDArray[np.float32],
    labels: Labels,
    known: Bools | None,
    threshold: float,
    exact: bool,
) -> Part:
    """What a part of a test set tells of its scores (N, C)."""
    values, positive, mask = checked_arrays(scores, labels, known)
    mask = np.ones(values.shape, np.bool_) if mask is None else mask
    pairs = pair_sums(values, positive, mask, threshold)
    kept = values.astype(np.float32)
    if not exact:
        edges = boundaries(threshold)
        kept = edges[np.searchsorted(edges, kept, side="right") - 1]
    lists, hits = [], []
    for label in range(values.shape[1]):
        own, hit = kept[mask[:, label], label], positive[mask[:, label], label]
        order = np.lexsort((hit, own))  # of equal scores the hits last: no order of images is told
        lists.append(own[order])
        hits.append(hit[order])
    counts = mask.sum(axis=0, dtype=np.int64)
    return Part(len(values), np.concatenate(lists), np.concatenate(hits), counts, pairs, exact)


def pair_sums(
    scores: npt.NDArray[np.float32] | Doubles, positive: Bools, known: Bools, threshold: float
) -> Tensor:
    """Sums over images for all pairs of labels, float64 (7, C, C).

    The images that know both; then of scores s, labels and predictions, each 0 where unknown:
    ``Σ k_c s_c'`` and ``Σ s_c s_c'``.
    """
    mask = torch.from_numpy(known)
    columns = (scores.astype(np.float64), positive, scores >= threshold)
    sums = [
        score_sums(torch.from_numpy(np.array(c, np.float64)), torch.ones(len(mask)), mask)
        for c in columns
    ]
    matrices = [s.reshape(3, s.shape[1], s.shape[1]) for s in sums]
    return torch.cat([matrices[0][:1], *(m[1:] for m in matrices)])


def read_part(
    tensors: Mapping[str, Tensor], images: int, classes: int, options: MetricOptions
) -> Part:
    """The part behind :meth:`Part.tensors`; what cannot be true is a DataError."""
    pairs, known = tensors.get("pairs"), tensors.get("known")
    if any(tensor.dtype != TYPES.get(name) for name, tensor in tensors.items()):
        raise DataError("its answer has tensors of other names or types")
    if pairs is None or pairs.shape != (7, classes, classes) or not bool(pairs.isfinite().all()):
        raise DataError("its sums over pairs of labels are missing, or not numbers")
    if known is None or known.shape != (classes,) or not bool((known >= 0).all()):
        raise DataError("it does not say how many scores each label has")
    counts, sent = known.numpy(), tensors.get("scores", torch.zeros(0)).numel()
    if not 0 <= counts.max(initial=0) <= images <= MOST_IMAGES:
        raise DataError(f"it has scores of more images than it says, or than {MOST_IMAGES:,}")
    if (cells := int(counts.max(initial=0)) * classes) > max(ROOM, 2 * sent):
        raise DataError(
            f"its scores take a table of {cells:,} cells, and the server has room for {ROOM:,}, or "
            "for twice as many as are sent one by one (policy.evaluation = 'scores')"
        )
    if "bins" in tensors:
        scores, hits = _of_bins(tensors["bins"], counts, options.threshold)
    else:
        scores = tensors.get("scores", torch.zeros(0)).numpy()
        hits = tensors.get("hits", torch.zeros(0)).numpy().astype(np.bool_)
    if not len(scores) == len(hits) == counts.sum():
        raise DataError("its scores are not as many as it says")
    part = Part(images, scores, hits, counts, pairs, "bins" not in tensors)
    positives = [int(hits[part.of_label(c)].sum()) for c in range(classes)]
    if len(scores) and not (scores.min() >= 0 and scores.max() <= 1):
        raise DataError("it has scores outside of [0, 1]")
    told = (pairs[0].diagonal().tolist(), pairs[4].diagonal().tolist())
    if told != (counts.tolist(), positives):
        raise DataError("its sums over pairs of labels are not those of its scores")
    return part


def _of_bins(
    bins: Tensor, known: Counts, threshold: float
) -> tuple[npt.NDArray[np.float32], Bools]:
    """Scores on boundaries, ascending label by label, and whether each is a hit.

    What a label's counts add up to is looked at before that many scores are made of them.
    """
    edges, classes = boundaries(threshold), len(known)
    if bins.shape != (classes, 2, len(edges)) or not bool((bins >= 0).all()):
        raise DataError("its counts of scores have another form")
    if bins.sum((1, 2), dtype=torch.int64).tolist() != known.tolist():
        raise DataError("its scores are not as many as it says")
    counts = bins.mT.reshape(-1).numpy()  # label, boundary, absent before present
    scores = np.tile(np.repeat(edges, 2), classes)
    hits = np.tile(np.array([False, True]), classes * len(edges))
    return np.repeat(scores, counts), np.repeat(hits, counts)


# -- all parts together ----------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Pooled:
    """All parts of a test set as one table that has the same metrics, row by row no image."""

    images: int
    scores: npt.NDArray[np.float32]
    labels: Labels
    known: Bools
    exact: bool

    def metrics(self, options: MetricOptions) -> MultiLabelResult:
        """The eight metrics."""
        found = evaluate(self.scores, self.labels, options, self.known)
        return replace(found, n_images=self.images)

    def map_bounds(self) -> tuple[float, float]:
        """Between which mAP lies, if scores were rounded."""
        columns = zip(self.scores.T, self.labels.T, self.known.T, strict=True)
        bounds = [precision_bounds(s[k], y[k] > 0) for s, y, k in columns]
        low, high = (mean_average_precision(np.array(b), "skip") for b in zip(*bounds, strict=True))
        return float(low), float(high)


def pool(parts: Sequence[Part]) -> Pooled:
    """All parts together. If one has rounded its scores, those of the others stay as they are."""
    classes = len(parts[0].known)
    counts = sum((part.known for part in parts), np.zeros(classes, np.int64))
    shape = max(int(counts.max()), 1), classes
    scores, labels = np.zeros(shape, np.float32), np.zeros(shape, np.uint8)
    known = np.arange(shape[0])[:, None] < counts
    for label in range(classes):
        own = [part.of_label(label) for part in parts]
        rows = slice(0, counts[label])
        scores[rows, label] = np.concatenate([p.scores[o] for p, o in zip(parts, own, strict=True)])
        labels[rows, label] = np.concatenate([p.hits[o] for p, o in zip(parts, own, strict=True)])
    exact = all(part.exact for part in parts)
    return Pooled(sum(part.images for part in parts), scores, labels, known, exact)


def precision_bounds(scores: npt.NDArray[np.float32], hits: Bools) -> tuple[float, float]:
    """Between which numbers the average precision lies, if scores were rounded down to these.

    Let T hits and F others lie above a boundary, and p hits and n others at it. In truth the j-th
    best of these hits has at least T + j hits and at most F + n others at or above it, and at most
    T + p hits and at least F others. So its precision lies between ``(T + j)/(T + j + F + n)`` and
    ``(T + p)/(T + p + F)``.

    >>> precision_bounds(np.array([0.5, 0.5], np.float32), np.array([True, False]))
    (0.5, 1.0)
    """
    if not hits.any():
        return np.nan, np.nan
    values, place = np.unique(-scores, return_inverse=True)  # from the highest down
    p = np.bincount(place, hits, minlength=len(values))
    n = np.bincount(place, ~hits, minlength=len(values))
    above_hits, above_others = np.cumsum(p) - p, np.cumsum(n) - n
    high = p * (above_hits + p) / np.maximum(above_hits + p + above_others, 1)
    # The j-th hit at each boundary, for all hits from the highest down.
    at = np.repeat(np.arange(len(values)), p.astype(np.int64))
    rank = np.arange(1, len(at) + 1)
    low = rank / (rank + (above_others + n)[at])
    return float(low.sum() / hits.sum()), float(high.sum() / hits.sum())


def structure_of(parts: Sequence[Part]) -> StructureResult:
    """How labels go together in predictions and in truth, from the sums of all parts."""
    total = torch.stack([part.pairs for part in parts]).sum(0)
    images = torch.tensor(float(sum(part.images for part in parts)))
    known = total[0]
    true, defined = phi(total[4], total[3].mT, known)
    hard, _ = phi(total[6], total[5].mT, known)
    soft = correlation(mean_moments(torch.cat([known, total[1], total[2]]), images))
    soft = (soft + soft.mT) / 2
    return compare(true.numpy(), defined.numpy(), hard.numpy(), soft.numpy())
