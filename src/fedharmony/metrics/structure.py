"""How well predictions reproduce the correlations between labels.

Three correlation matrices of one test set are compared off the diagonal: that of the true labels
(φ coefficients), the soft one of the scores (Eq. (2) of the FedHarmony paper), and the hard one of
the thresholded predictions (φ again). Soft values are correlation times confidence: uncertain
scores shrink every entry towards zero, at any quality of ranking. Hence the soft RMSE of two models
is only comparable at equal confidence, whereas the Pearson correlation of the entries, which no
common factor can change, compares their structure; the mean of ``|R|`` shows a collapse to zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedharmony.correlation import correlation, label_pairs, score_moments, soft_correlation
from fedharmony.metrics.multilabel import Array, Doubles, checked_arrays

# Spreads below this are rounding of the matrices, not differences between labels.
_ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class StructureResult:
    """Predicted against true label correlations (see :func:`structure_metrics`).

    Numbers of the soft entries, of the hard ones (of thresholded predictions), and of how many
    pairs; then the matrices ``(C, C)``. Hard and true entries are 0 where a prediction or label is
    constant; ``defined_matrix`` says for which pairs the true labels have a φ.
    """

    soft_rmse: float
    soft_pearson: float
    soft_mean_abs: float
    hard_rmse: float
    hard_pearson: float
    hard_mean_abs: float
    true_mean_abs: float
    n_pairs: int
    soft_matrix: Doubles
    hard_matrix: Doubles
    true_matrix: Doubles
    defined_matrix: npt.NDArray[np.bool_]


def structure_metrics(
    scores: Array, targets: Array, threshold: float = 0.5, known: Array | None = None
) -> StructureResult:
    """Compare the label correlations of predictions with those of the true labels.

    Over the unordered pairs ``(c, c')`` of different labels that both have positives and negatives
    among the targets (of the images on which both are known), with predicted entries ``R`` and true
    entries ``φ``::

        RMSE = sqrt(mean (R − φ)²)      Pearson = corr(R, φ)      mean |R|

    A label that is never (or always) predicted correlates with nothing: its hard entries are 0 and
    stay in the comparison, since failing to predict it is an error of the model, not of the data.

    Where labels are not ``known``, a pair is compared, on both sides, over the images on which both
    of its labels are, and left out if the true labels have no correlation there. Numbers are nan
    only where they have no value: all of them without a single pair, and Pearson where either side
    is the same in all pairs.

    >>> labels = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 1], [0, 1, 0]])
    >>> timid = structure_metrics(labels * 0.5, labels)  # right everywhere, at half confidence
    >>> timid.n_pairs, timid.hard_rmse, round(timid.soft_rmse, 2), round(timid.soft_pearson, 4)
    (3, 0.0, 0.35, 1.0)
    """
    values, positive, mask = checked_arrays(scores, targets, known)
    true, defined = label_pairs(positive, known=mask)
    hard, _ = label_pairs(values >= threshold, known=mask)
    soft = _soft(torch.from_numpy(np.array(values, np.float64)), mask)
    return compare(true.numpy(), defined.numpy(), hard.numpy(), soft.numpy())


def compare(
    true_matrix: Doubles,
    defined: npt.NDArray[np.bool_],
    hard_matrix: Doubles,
    soft_matrix: Doubles,
) -> StructureResult:
    """The numbers of :func:`structure_metrics` from the three matrices (C, C).

    ``defined`` says for which pairs the true labels have a correlation.
    """
    first, second = np.triu_indices(len(true_matrix), k=1)
    pair = defined[first, second]
    first, second = first[pair], second[pair]
    true, soft, hard = (m[first, second] for m in (true_matrix, soft_matrix, hard_matrix))
    return StructureResult(
        soft_rmse=_rmse(soft, true),
        soft_pearson=_pearson(soft, true),
        soft_mean_abs=_mean_abs(soft),
        hard_rmse=_rmse(hard, true),
        hard_pearson=_pearson(hard, true),
        hard_mean_abs=_mean_abs(hard),
        true_mean_abs=_mean_abs(true),
        n_pairs=int(first.size),
        soft_matrix=soft_matrix,
        hard_matrix=hard_matrix,
        true_matrix=true_matrix,
        defined_matrix=defined,
    )


def _soft(scores: Tensor, known: npt.NDArray[np.bool_] | None) -> Tensor:
    """Soft correlations; with unknown labels, each entry over the images that know both."""
    if known is None:
        return soft_correlation(scores)
    matrix = correlation(score_moments(scores, known=torch.from_numpy(known)))
    return (matrix + matrix.mT) / 2


def _rmse(predicted: Doubles, true: Doubles) -> float:
    return math.sqrt(np.mean((predicted - true) ** 2)) if true.size else math.nan


def _mean_abs(entries: Doubles) -> float:
    return float(np.mean(np.abs(entries))) if entries.size else math.nan


def _pearson(a: Doubles, b: Doubles) -> float:
    if a.size == 0:
        return math.nan
    a, b = a - a.mean(), b - b.mean()
    if min(np.abs(a).max(), np.abs(b).max()) < _ROUNDING:
        return math.nan
    return float(a @ b / math.sqrt((a @ a) * (b @ b)))
