"""What panels compute from the scores that a run kept."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from fedharmony.experiments.scores import Scores

Array: TypeAlias = npt.NDArray[np.float64]
Bools: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class Decisions:
    """Which labels of which images were found, missed or wrongly given; unknown are neither."""

    found: Bools
    missed: Bools
    wrong: Bools


def decide(scores: Scores, thresholds: Array) -> Decisions:
    """What thresholds make of scores."""
    given, present = scores.scores >= thresholds, scores.labels == 1
    known = np.ones_like(present) if scores.known is None else scores.known
    return Decisions(given & present & known, ~given & present & known, given & ~present & known)


def taken_for(decisions: Decisions) -> Array:
    """``(C, C)``: images in which label a is missed and b is wrongly given in its place."""
    return _together(decisions.missed, decisions.wrong)


def overlooked_beside(decisions: Decisions) -> Array:
    """``(C, C)``: images in which label a is missed, though b, which is there too, is found."""
    return _together(decisions.missed, decisions.found)


def _together(one: Bools, other: Bools) -> Array:
    counts: Array = (one.T.astype(np.float32) @ other.astype(np.float32)).astype(np.float64)
    np.fill_diagonal(counts, 0)
    return counts


@dataclass(frozen=True, eq=False)
class Trade:
    """Precision and recall at every threshold, from the highest score down ``(T,)``.

    ``at`` are recall and precision where labels are given; none where none is.
    """

    recall: Array
    precision: Array
    at: tuple[float, float] | None


def trade(scores: npt.ArrayLike, present: Bools, given: Bools) -> Trade:
    """Precision TP/(TP + FP) against recall TP/(TP + FN) of one ranked list.

    >>> curve = trade([0.9, 0.6, 0.4], np.array([1, 0, 1]) == 1, np.array([1, 1, 0]) == 1)
    >>> curve.recall.tolist(), curve.precision.round(2).tolist(), curve.at
    ([0.5, 0.5, 1.0], [1.0, 0.5, 0.67], (0.5, 0.5))
    """
    values = np.asarray(scores, np.float32)
    order = np.argsort(-values, kind="stable")
    last = np.flatnonzero(np.append(np.diff(values[order]) < 0, True))
    hits = np.cumsum(present[order])[last]
    found = int((present & given).sum())
    at = (found / int(present.sum()), found / int(given.sum())) if given.any() else None
    return Trade(hits / present.sum(), hits / (last + 1), at)


@dataclass(frozen=True, eq=False)
class Reliability:
    """Mean score of each bin of equal width that has any, and the share of present labels in it."""

    score: Array
    share: Array
    count: npt.NDArray[np.int64]

    @property
    def error(self) -> float:
        """Expected calibration error: ``Σ n_b/N · |share_b − score_b|``.

        >>> both = np.array([0.2, 0.8])
        >>> round(Reliability(both, np.array([0.3, 0.5]), np.array([3, 1])).error, 3)
        0.15
        """
        weights = self.count / self.count.sum()
        return float(weights @ np.abs(self.share - self.score))


def reliability(scores: Scores, bins: int = 10) -> Reliability:
    """How far scores are probabilities, over all known pairs of image and label."""
    known = slice(None) if scores.known is None else scores.known
    values = scores.scores[known].astype(np.float64).ravel()
    present = (scores.labels[known] == 1).ravel()
    bin_of = np.minimum((values * bins).astype(np.int64), bins - 1)
    count = np.bincount(bin_of, minlength=bins)
    some = count > 0
    score = np.bincount(bin_of, values, bins)[some] / count[some]
    share = np.bincount(bin_of, present, bins)[some] / count[some]
    return Reliability(score, share, count[some])


def worst_decile(values: Sequence[float]) -> float:
    """The mean of the lowest tenth of the values, of at least one.

    >>> worst_decile([0.5, 0.1, 0.9]), worst_decile([i / 20 for i in range(20)])
    (0.1, 0.025)
    """
    lowest = sorted(values)[: max(1, len(values) // 10)]
    return sum(lowest) / len(lowest)
