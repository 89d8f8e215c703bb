"""Correlations of labels: Eq. (1) and (2) of FedHarmony (arXiv 2604.28024), and the distance Ψ.

=======================================  =========================================================
Paper                                    Here
=======================================  =========================================================
Eq. (1), p̂_c and p̂_cc'                   :func:`score_sums`, :func:`score_moments`
Eq. (2), R                               :func:`correlation`, :func:`soft_correlation`
both of a model's outputs                :class:`Correlation`
pairs inside clusters                    :func:`pair_mask`
Ψ(R, R*) within clusters                 :func:`discrepancy`
=======================================  =========================================================

All of these are pure functions that take any number of leading dimensions (a stack of clients), and
give the same inside :func:`torch.vmap`. Half precision is raised to float32 and autocast is
switched off where it would lower precision, because Eq. (2) subtracts nearly equal numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedharmony.errors import ConfigError, DataError, nearest
from fedharmony.losses import Batch

Normaliser: TypeAlias = Literal["phi", "pearson"]
Reduction: TypeAlias = Literal["mean", "sum"]

#: ε of Eq. (2).
EPS = 1e-6
#: Marginals are kept this far from 0 and 1 in the denominator of Eq. (2), which is then >= 1e-4.
CLAMP = 1e-4

# Rows converted to floating point at a time when labels are counted: float32 counts stay exact.
_COUNT_ROWS = 8192
# Numbers that a computation over many clients holds at a time: as float64, 2 MiB on a CPU (what its
# caches hold is two to three times as fast) and 256 MiB on a GPU.
AT_ONCE = {"cpu": 2**18, "cuda": 2**25}
# Entries from which on a row is long enough to be treated by itself.
_LONG = 4096
# Variances below this many roundings of the second moment are rounding: the score is constant.
_ROUNDINGS = 8


class Moments(NamedTuple):
    """Marginal and joint probabilities of predicted labels, p̂_c and p̂_cc' of Eq. (1).

    Where labels are unknown, a pair of labels has moments of its own: over the images on which both
    are known. With F the scores and m = 1 for a known label, the moments are means over all images,
    which can be averaged over batches, whatever each batch knows:

    ====================  ==============================================  ==========
    every label is known  ``1ᵀF``, ``FᵀF``                                C + 1 rows
    some are not          ``mᵀm``, ``mᵀ(Fm)``, ``(Fm)ᵀ(Fm)``              3C rows
    with squares          ``mᵀm``, ``mᵀ(Fm)``, ``(Fm)ᵀ(Fm)``, ``mᵀ(F²m)``  4C rows
    ====================  ==============================================  ==========

    Attributes:
        values: these matrices one below the other, (..., rows, C): one tensor needs half as many
            operations in each training step as two.
    """

    values: Tensor

    @property
    def known(self) -> Tensor | None:
        """Share of the images on which both labels of a pair are known, (..., C, C); None: all."""
        rows, classes = self.values.shape[-2:]
        return None if rows == classes + 1 else self.values[..., :classes, :]

    @property
    def first(self) -> Tensor:
        """p̂_c' over the images of each pair (c, c'), (..., C, C); (..., 1, C) if all are known."""
        return self.values[..., :1, :] if self.known is None else self._per_image(1)

    @property
    def second(self) -> Tensor:
        """p̂_cc', (..., C, C), symmetric."""
        return self.values[..., 1:, :] if self.known is None else self._per_image(2)

    @property
    def square(self) -> Tensor:
        """Mean of F_c'² over the images of each pair, of the shape of :attr:`first`."""
        if self.known is None:
            return self.second.diagonal(dim1=-2, dim2=-1).unsqueeze(-2)
        return self._per_image(3)

    @property
    def marginal(self) -> Tensor:
        """p̂_c over the images on which c is known, (..., C); 0 where there are none."""
        return (
            self.first.squeeze(-2) if self.known is None else self.first.diagonal(dim1=-2, dim2=-1)
        )

    def _per_image(self, part: int) -> Tensor:
        """A matrix in the order above, divided by the share of the images that know the pair."""
        classes = self.values.shape[-1]
        known = self.values[..., :classes, :]
        matrix = self.values[..., part * classes : (part + 1) * classes, :]
        return matrix / torch.where(known > 0, known, 1)


def score_sums(
    scores: Tensor, rows: Tensor, known: Tensor | None = None, *, squares: bool = False
) -> Tensor:
    """Sums over images of what :class:`Moments` are the means of: Eq. (1) without 1/N.

    Args:
        scores: Sigmoid outputs F, (..., B, C); those of unknown labels have no part in anything.
        rows: (..., B), 1 for an image, 0 for padding (whose scores must be finite).
        known: (..., B, C), 1 where a label is known, 0 where it is not and in padding rows.
        squares: Where labels are unknown: with the squares that Pearson's normaliser needs.
    """
    scores = _full_precision(scores)
    with torch.autocast(scores.device.type, enabled=False):
        if known is None:
            real = rows.to(scores.dtype).unsqueeze(-1) * scores
            return torch.cat([real.sum(-2, keepdim=True), real.mT @ scores], dim=-2)
        mask = known.to(scores.dtype)
        real = scores * mask
        sums = [mask.mT @ mask, mask.mT @ real, real.mT @ real]
        return torch.cat([*sums, mask.mT @ real.square()] if squares else sums, dim=-2)


def score_moments(
    scores: Tensor,
    rows: Tensor | None = None,
    known: Tensor | None = None,
    *,
    squares: bool = False,
) -> Moments:
    """Marginal and joint probabilities of a set of scores, Eq. (1).

    ``p̂_c = mean_i F_ic`` and ``p̂_cc' = mean_i F_ic F_ic'``. The arguments are those of
    :func:`score_sums`; all rows are images by default. Without an image all moments are 0.

    >>> moments = score_moments(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    >>> moments.marginal.tolist(), moments.second.tolist()
    ([0.5, 1.0], [[0.5, 0.5], [0.5, 1.0]])
    >>> known = torch.tensor([[1, 1], [1, 0]])
    >>> moments = score_moments(torch.tensor([[0.8, 0.6], [0.4, 0.2]]), known=known)
    >>> moments.known.tolist(), [round(p, 4) for p in moments.marginal.tolist()]
    ([[1.0, 0.5], [0.5, 0.5]], [0.6, 0.6])
    """
    rows = scores.new_ones(scores.shape[:-1]) if rows is None else rows
    sums = score_sums(scores, rows, known, squares=squares)
    return mean_moments(sums, rows.to(sums.dtype).sum(-1))


def mean_moments(sums: Tensor, images: Tensor) -> Moments:
    """The means of :func:`score_sums` over so many images (...); 0 without an image."""
    return Moments(sums / images.to(sums.dtype).clamp_min(1).unsqueeze(-1).unsqueeze(-1))


def correlation(moments: Moments, **options: Any) -> Tensor:
    """The φ-style correlation matrix of Eq. (2).

    ``R_cc' = (p̂_cc' − p̂_c p̂_c') / (sqrt(p̂_c(1−p̂_c) p̂_c'(1−p̂_c')) + ε)``. For scores of 0 and 1 this
    is the φ coefficient. For soft scores ``p̂(1−p̂)`` exceeds their variance, so R is correlation
    times confidence: ``R_cc = Var(F_c) / (p̂_c(1−p̂_c)) < 1`` and
    ``|R_cc'| <= sqrt(max F_c · max F_c')``. One image gives the zero matrix. Where labels are
    unknown, each entry is that of the images on which both of its labels are known.

    The options are settings of :class:`Correlation`; ``"pearson"`` needs moments with squares, if
    labels are unknown. Matrices (..., C, C) are symmetric and finite, with finite gradients; 0 for
    pairs of labels that are never known together.

    >>> labels = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    >>> correlation(score_moments(labels[:4]))  # φ = (1·2 − 1·0) / sqrt(2·2·1·3) = 0.5774
    tensor([[1.0000, 0.5773],
            [0.5773, 1.0000]])
    >>> known = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 1], [1, 0]])
    >>> round(correlation(score_moments(labels, known=known))[0, 1].item(), 4)  # of the first four
    0.5773
    """
    return Correlation(moments.values.shape[-1], **options).matrix(moments)


def bernoulli_deviation(first: Tensor, clamp: float = CLAMP) -> Tensor:
    """``sqrt(p̂(1−p̂))`` with p̂ kept off 0 and 1, where the slope of the root is infinite.

    >>> bernoulli_deviation(torch.tensor([0.5, 0.2, 0.0]))
    tensor([0.5000, 0.4000, 0.0100])
    """
    if not 0 < clamp < 0.5:
        raise ConfigError(f"The clamp of the marginals must lie between 0 and 0.5, got {clamp}.")
    inside = first.clamp(clamp, 1 - clamp)
    return (inside * (1 - inside)).sqrt()


@dataclass(frozen=True)
class Correlation:
    """Which correlation is taken of a model's outputs: Eq. (1) and (2) with their settings.

    Variants belong here: :meth:`scores` says what is correlated, :meth:`matrix` how.

    Attributes:
        normaliser: "phi" as Eq. (2) has it; "pearson" divides by the standard deviations of the
            scores instead, and a score that does not vary correlates 0 with everything.
        eps: ε, added to the denominator.
        clamp: Deviation: p̂ is clamped to [clamp, 1 − clamp] in the denominator of "phi" (not in the
            numerator), else the gradient is unbounded for a label never predicted.
        shrinkage: added to the variances of "pearson": what hardly varies correlates little.
        softness: T of the scores σ(z / T) that are correlated; the larger, the nearer to logits.
    """

    classes: int
    unknown_labels: bool = False
    normaliser: Normaliser = "phi"
    eps: float = EPS
    clamp: float = CLAMP
    denominator_grad: bool = True
    shrinkage: float = 0.0
    softness: float = 1.0

    @property
    def rows(self) -> int:
        """Rows of the :class:`Moments`."""
        matrices = 4 if self.normaliser == "pearson" else 3
        return matrices * self.classes if self.unknown_labels else self.classes + 1

    def scores(self, outputs: Tensor) -> Tensor:
        """F, what is correlated: ``σ(z / T)``, probabilities for T = 1."""
        return outputs.sigmoid() if self.softness == 1 else (outputs / self.softness).sigmoid()

    def sums(self, scores: Tensor, batch: Batch) -> Tensor:
        """Eq. (1) of a batch without 1/N, (..., rows, C)."""
        known = batch.known if isinstance(batch.known, Tensor) else None
        assert (known is not None) == self.unknown_labels, "not the data of the task"
        return score_sums(scores, batch.rows, known, squares=self.normaliser == "pearson")

    def moments(self, scores: Tensor, batch: Batch) -> Moments:
        """Eq. (1) of a batch."""
        return mean_moments(self.sums(scores, batch), batch.rows.sum(-1))

    def quotient(self, moments: Moments) -> tuple[Tensor, Tensor]:
        """Numerator and denominator of Eq. (2), (..., C, C) each."""
        _check_choice("normaliser", self.normaliser, get_args(Normaliser))
        moments = Moments(_full_precision(moments.values))
        first = moments.first
        covariance = moments.second - first.mT * first
        if self.normaliser == "phi":
            spread = bernoulli_deviation(first, self.clamp)
        else:
            square = moments.square
            variance = square - first.square()
            varies = variance > _ROUNDINGS * torch.finfo(square.dtype).eps * square
            # The inner `where` keeps the infinite slope of the root at 0 out of the gradient.
            spread = torch.where(varies, variance + self.shrinkage, 1).sqrt()
            covariance = torch.where(varies.mT & varies, covariance, 0)
        return covariance, spread.mT * spread + self.eps

    def matrix(self, moments: Moments) -> Tensor:
        """Eq. (2), (..., C, C)."""
        covariance, denominator = self.quotient(moments)
        matrix = covariance / (denominator if self.denominator_grad else denominator.detach())
        return matrix if moments.known is None else torch.where(moments.known > 0, matrix, 0)


def soft_correlation(scores: Tensor, rows: Tensor | None = None, **options: Any) -> Tensor:
    """Eq. (1) and (2) in one: scores (..., B, C) to correlation matrices (..., C, C).

    The options are settings of :class:`Correlation`. The result is symmetric to the bit, which a
    matrix product alone does not promise.

    >>> soft_correlation(torch.tensor([[0.9, 0.2]]))  # one image tells nothing
    tensor([[0., 0.],
            [0., 0.]])
    """
    matrix = correlation(score_moments(scores, rows), **options)
    return (matrix + matrix.mT) / 2


def label_correlation(
    labels: npt.NDArray[Any] | Tensor, *, known: npt.NDArray[np.bool_] | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The φ coefficients of true labels, from exact integer counts.

    ``φ = (n n_11 − n_1 n_1') / sqrt(n_1 (n − n_1) n_1' (n − n_1'))`` with the numbers of images
    that are positive for both labels, and for each.

    Args:
        labels: 0/1 values, shape (N, C).
        known: Shape (N, C), False where a label is missing. A pair is then counted over the images
            on which both of its labels are known; it is 0 if either does not vary there.

    Returns:
        The matrix (C, C) in float64, 0 where undefined, and which labels have a positive and a
        negative, (C,).

    >>> matrix, defined = label_correlation(np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0], [0, 0, 0]]))
    >>> matrix[:2, :2], defined.tolist()
    (tensor([[1.0000, 0.5774],
            [0.5774, 1.0000]], dtype=torch.float64), [True, True, False])
    """
    matrix, pairs = label_pairs(labels, known=known)
    return matrix, pairs.diagonal()


def label_pairs(
    labels: npt.NDArray[Any] | Tensor, *, known: npt.NDArray[np.bool_] | Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """:func:`label_correlation`, and which pairs it is defined for, (C, C).

    A pair is, where both labels have a positive and a negative among the images that know both.

    >>> matrix, pairs = label_pairs(np.eye(2, dtype=int), known=np.array([[1, 1], [1, 0]]))
    >>> pairs.tolist()  # the second label is known once: it does not vary
    [[True, False], [False, False]]
    """
    positive = torch.as_tensor(labels)
    if positive.ndim != 2:
        raise DataError(
            "Label correlations need labels of shape (images, labels), "
            f"got {tuple(positive.shape)}."
        )
    present = None if known is None else torch.as_tensor(known, dtype=torch.bool)
    if present is not None:
        positive = positive.where(present, positive.new_zeros(()))
    # In parts: a comparison of all labels at once would need several times their memory.
    parts = (positive[i : i + _COUNT_ROWS] for i in range(0, len(positive), _COUNT_ROWS))
    if any(bool(((part != 0) & (part != 1)).any()) for part in parts):
        raise DataError(
            "Label correlations need labels of 0 and 1, and found other values. "
            "Mark missing labels with the argument `known` instead."
        )
    both = _count_pairs(positive, positive)
    if present is None:
        images = torch.full_like(both, len(positive))
        first = both.diagonal().unsqueeze(-1).expand_as(both)
    else:
        images = _count_pairs(present, present)
        first = _count_pairs(positive, present)  # positives of c among images where c' is known too
    return phi(both, first, images)


def phi(both: Tensor, first: Tensor, images: Tensor) -> tuple[Tensor, Tensor]:
    """φ of all pairs of labels from counts (C, C), and which pairs it is defined for.

    Counted are images with ``both`` labels, with the ``first`` one (of the row), and all, among
    those that know both.
    """
    scale = first * (images - first)
    # A square root of the product, not a product of roots: exactly 1 on the diagonal.
    root = (scale * scale.mT).sqrt()
    matrix = torch.where(root > 0, (images * both - first * first.mT) / root.clamp_min(1), 0)
    return matrix, root > 0


def pair_mask(clusters: Tensor, known: Tensor | None = None, *, diagonal: bool = False) -> Tensor:
    """Which label pairs are aligned: same cluster, known to the teacher, and different labels.

    Args:
        clusters: Cluster of each label, (..., C); −1 for a label in no cluster, which has no pairs.
        known: Pairs the teacher knows, (..., C, C); all of them by default.
        diagonal: Also include each label with itself (if known), those in no cluster too.

    >>> pair_mask(torch.tensor([0, 0, -1])).int()
    tensor([[0, 1, 0],
            [1, 0, 0],
            [0, 0, 0]], dtype=torch.int32)
    """
    same = clusters.unsqueeze(-1) == clusters.unsqueeze(-2)
    same = same & (clusters >= 0).unsqueeze(-1)
    itself = torch.eye(clusters.shape[-1], dtype=torch.bool, device=clusters.device)
    pairs = same | itself if diagonal else same & ~itself
    return pairs if known is None else pairs & known


def discrepancy(
    matrix: Tensor,
    teacher: Tensor,
    pairs: Tensor,
    *,
    reduction: Reduction = "mean",
) -> Tensor:
    """Distance Ψ between a correlation matrix and its teacher over the included pairs.

    The paper leaves Ψ open; here it is the squared norm. Clusters are disjoint, so one mask covers
    all blocks: with ``reduction="sum"`` it is literally ``Σ_g ||R[S_g, S_g] − R*[S_g, S_g]||_F²``.

    Args:
        matrix: R, shape (..., C, C).
        teacher: R*, likewise.
        pairs: Included entries, boolean, see :func:`pair_mask`.
        reduction: ``"mean"`` divides the sum of squares by the number of included entries, so that
            λ means the same for 17 labels and 1,628.

    Returns:
        Shape (...). Exactly 0, with zero gradient, where no pair is included.

    >>> pairs = pair_mask(torch.tensor([0, 0]))
    >>> student, teacher = torch.eye(2), torch.tensor([[1.0, 0.3], [0.3, 1.0]])
    >>> discrepancy(student, teacher, pairs), discrepancy(student, teacher, pairs, reduction="sum")
    (tensor(0.0900), tensor(0.1800))
    """
    _check_choice("reduction", reduction, get_args(Reduction))
    matrix, teacher = _full_precision(matrix), _full_precision(teacher)
    square = torch.where(pairs, matrix - teacher, 0).square().sum((-2, -1))
    if reduction == "mean":
        square = square / pairs.sum((-2, -1)).clamp_min(1)
    return square


def _full_precision(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _check_choice(what: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(f"There is no {what} {value!r}. {nearest(value, choices)}")


def _count_pairs(a: Tensor, b: Tensor) -> Tensor:
    """``aᵀ b`` of 0/1 matrices in float64, without a floating-point copy of the whole of them."""
    counts = torch.zeros(a.shape[1], b.shape[1], dtype=torch.float64, device=a.device)
    for start in range(0, len(a), _COUNT_ROWS):
        rows = slice(start, start + _COUNT_ROWS)
        counts += a[rows].float().mT @ b[rows].float()
    return counts


def parts(count: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices of ``count`` rows of ``width`` numbers, as many at a time as memory should hold.

    >>> list(parts(3, 2**17, torch.device("cpu")))
    [slice(0, 2, None), slice(2, 4, None)]
    """
    at_once = AT_ONCE.get(device.type, AT_ONCE["cpu"])
    step = max(1, at_once // max(1, width))
    for start in range(0, count, step):
        yield slice(start, start + step)


def pack_upper(matrix: Tensor) -> Tensor:
    """The upper triangle of a symmetric matrix with its diagonal, (..., C, C) to (..., C(C+1)/2).

    >>> pack_upper(torch.tensor([[1.0, 2.0], [2.0, 3.0]]))
    tensor([1., 2., 3.])
    """
    rows, columns = torch.triu_indices(*matrix.shape[-2:], device=matrix.device)
    return matrix[..., rows, columns]


def unpack_upper(packed: Tensor, num_classes: int) -> Tensor:
    """The symmetric matrix of a packed upper triangle, (..., C(C+1)/2) to (..., C, C).

    >>> unpack_upper(torch.tensor([1.0, 2.0, 3.0]), 2)
    tensor([[1., 2.],
            [2., 3.]])
    """
    return Triangle(num_classes, packed.device).square(packed)


class Triangle:
    """Where the entries of a symmetric (C, C) matrix stand in its packed upper triangle.

    >>> triangle = Triangle(2)
    >>> len(triangle), triangle.square(torch.tensor([1.0, 2.0, 3.0])).tolist()
    (3, [[1.0, 2.0], [2.0, 3.0]])
    """

    def __init__(self, num_classes: int, device: torch.device | str | None = None) -> None:
        self._rows, self._columns = torch.triu_indices(num_classes, num_classes, device=device)
        order = torch.arange(len(self._rows), device=device)
        self._places = torch.empty(num_classes, num_classes, dtype=torch.int64, device=device)
        self._places[self._rows, self._columns] = self._places[self._columns, self._rows] = order

    def __len__(self) -> int:
        return len(self._rows)

    def diagonal(self, packed: Tensor) -> Tensor:
        """What packed triangles say of each label with itself, (..., C)."""
        return _pick(packed, self._places.diagonal())

    def ends(self, labels: Tensor, pairs: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """For each of some pairs what (..., C) says of its first and of its second label."""
        return _pick(labels, self._rows[pairs]), _pick(labels, self._columns[pairs])

    def square(self, packed: Tensor) -> Tensor:
        """The symmetric matrices (..., C, C) of packed triangles."""
        return _pick(packed, self._places.flatten()).view(*packed.shape[:-1], *self._places.shape)


def _pick(values: Tensor, index: Tensor) -> Tensor:
    """``values[..., index]``."""
    if len(index) < _LONG or values.device.type != "cpu" or not values.numel():
        return values.index_select(-1, index)
    # Long rows one by one: on a CPU torch picks from a vector five times as fast as along a matrix.
    rows = values.reshape(-1, values.shape[-1])
    picked = torch.stack([row.index_select(0, index) for row in rows])
    return picked.view(*values.shape[:-1], len(index))
