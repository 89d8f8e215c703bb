"""Label correlations of a client: estimation, alignment, aggregation weights.

The quantities of FedHarmony (arXiv 2604.28024, Section 2) in the order a round needs them; how the
matrices of many clients become one teacher is in :mod:`fedharmony.consensus`, how labels are
clustered in :mod:`fedharmony.clusters`.

=======================================  =========================================================
Paper                                    Here
=======================================  =========================================================
Eq. (1), p̂_c and p̂_cc'                   :func:`score_moments`
Eq. (2), R                               :func:`correlation`, :func:`soft_correlation`
the same where labels are unknown        :func:`pair_moments`, :func:`pair_correlation`
R during training                        :func:`running_step` (moments over many batches)
pairs inside clusters                    :func:`pair_mask`
Ψ(R, R*) within clusters, s_i            :func:`discrepancy`, :func:`running_discrepancy`
q̄_i, α(t), w_i                           :func:`quality_weights`, :func:`alpha_schedule`,
                                         :func:`aggregation_weights`
=======================================  =========================================================

Everything up to :func:`discrepancy` is a pure function of one client's tensors. It takes any number
of leading dimensions (a stack of clients), and gives the same inside :func:`torch.vmap`. Half
precision is raised to float32 and autocast is switched off where it would lower precision, because
Eq. (2) subtracts nearly equal numbers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, Literal, NamedTuple, TypeAlias, TypeVar, get_args

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedharmony.errors import ConfigError, DataError, nearest

Normaliser: TypeAlias = Literal["phi", "pearson"]
Distance: TypeAlias = Literal["squared_frobenius", "frobenius", "cosine"]
Reduction: TypeAlias = Literal["mean", "sum"]

#: ε of Eq. (2).
EPS = 1e-6
#: Marginals are kept this far from 0 and 1 in the denominator of Eq. (2), which is then >= 1e-4.
CLAMP = 1e-4

# Rows converted to floating point at a time when labels are counted: float32 counts stay exact.
_COUNT_ROWS = 8192
# Numbers that a computation over many clients holds at a time: as float64, 2 MiB on a CPU (what its
# caches hold is two to three times as fast) and 256 MiB on a GPU.
_AT_ONCE = {"cpu": 2**18, "cuda": 2**25}
# Entries from which on a row is long enough to be treated by itself.
_LONG = 4096
# Variances below this many roundings of the second moment are rounding: the score is constant.
_ROUNDINGS = 8


class Moments(NamedTuple):
    """Marginal and joint probabilities of predicted labels, p̂_c and p̂_cc' of Eq. (1).

    One tensor holds both, the mean of ``(1, F_i)ᵀ F_i`` over images: every training step then needs
    half as many operations.

    Attributes:
        values: (..., C + 1, C); row 0 is p̂_c, row 1 + c' is p̂_c'c.
    """

    values: Tensor

    @classmethod
    def of(cls, first: Tensor, second: Tensor) -> Moments:
        """From p̂_c (..., C) and p̂_cc' (..., C, C)."""
        return cls(torch.cat([first.unsqueeze(-2), second], dim=-2))

    @property
    def first(self) -> Tensor:
        """p̂_c, (..., C)."""
        return self.values[..., 0, :]

    @property
    def second(self) -> Tensor:
        """p̂_cc', (..., C, C), symmetric."""
        return self.values[..., 1:, :]


def score_moments(scores: Tensor, row_weights: Tensor | None = None) -> Moments:
    """Marginal and joint probabilities of a set of scores, Eq. (1).

    ``p̂_c = mean_i F_ic`` and ``p̂_cc' = mean_i F_ic F_ic'``.

    Args:
        scores: Sigmoid outputs F, shape (..., B, C).
        row_weights: Shape (..., B), 1 for a real row and 0 for padding (whose scores must be
            finite). Without a real row all moments are 0.

    Returns:
        Moments of shape (..., C) and (..., C, C).

    >>> moments = score_moments(torch.tensor([[1.0, 1.0], [0.0, 1.0]]))
    >>> moments.first.tolist(), moments.second.tolist()
    ([0.5, 1.0], [[0.5, 0.5], [0.5, 1.0]])
    """
    scores = _full_precision(scores)
    with torch.autocast(scores.device.type, enabled=False):
        if row_weights is None:
            row_weights = scores.new_ones(scores.shape[:-1])
        weights = row_weights.to(scores.dtype).unsqueeze(-1)
        real = weights * scores
        sums = torch.cat([real.sum(-2, keepdim=True), real.mT @ scores], dim=-2)
        return Moments(sums / weights.sum(-2, keepdim=True).clamp_min(1))


def correlation(
    moments: Moments,
    *,
    normaliser: Normaliser = "phi",
    eps: float = EPS,
    clamp: float = CLAMP,
    denominator_grad: bool = True,
) -> Tensor:
    """The φ-style correlation matrix of Eq. (2).

    ``R_cc' = (p̂_cc' − p̂_c p̂_c') / (sqrt(p̂_c(1−p̂_c) p̂_c'(1−p̂_c')) + ε)``. For scores of 0 and 1 this
    is the φ coefficient. For soft scores ``p̂(1−p̂)`` exceeds their variance, so R is correlation
    times confidence: ``R_cc = Var(F_c) / (p̂_c(1−p̂_c)) < 1`` and
    ``|R_cc'| <= sqrt(max F_c · max F_c')``. One image gives the zero matrix.

    Args:
        moments: Of shapes (..., C) and (..., C, C).
        normaliser: ``"phi"`` as above; ``"pearson"`` divides by the standard deviations of the
            scores instead, and a score that does not vary correlates 0 with everything.
        eps: ε, added to the denominator.
        clamp: Deviation: p̂ is clamped to [clamp, 1 − clamp] in the denominator of ``"phi"`` (not
            in the numerator), else the gradient is unbounded for a label never predicted.
        denominator_grad: Whether gradients flow through the denominator.

    Returns:
        Symmetric matrices of shape (..., C, C), finite, with finite gradients.

    >>> labels = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0]])
    >>> correlation(score_moments(labels))  # φ = (1·2 − 1·0) / sqrt(2·2·1·3) = 0.5774
    tensor([[1.0000, 0.5773],
            [0.5773, 1.0000]])
    """
    _check_choice("normaliser", normaliser, get_args(Normaliser))
    first, second = _full_precision(moments.first), _full_precision(moments.second)
    covariance = second - _outer(first)
    if normaliser == "phi":
        spread = bernoulli_deviation(first, clamp)
    else:
        raw = second.diagonal(dim1=-2, dim2=-1)
        variance = raw - first.square()
        varies = variance > _ROUNDINGS * torch.finfo(raw.dtype).eps * raw
        # The inner `where` keeps the infinite slope of the root at 0 out of the gradient.
        spread = torch.where(varies, variance, 1).sqrt()
        covariance = torch.where(varies.unsqueeze(-1) & varies.unsqueeze(-2), covariance, 0)
    denominator = _outer(spread) + eps
    return covariance / (denominator if denominator_grad else denominator.detach())


def bernoulli_deviation(first: Tensor, clamp: float = CLAMP) -> Tensor:
    """``sqrt(p̂(1−p̂))`` with p̂ kept off 0 and 1, where the slope of the root is infinite.

    >>> bernoulli_deviation(torch.tensor([0.5, 0.2, 0.0]))
    tensor([0.5000, 0.4000, 0.0100])
    """
    if not 0 < clamp < 0.5:
        raise ConfigError(f"The clamp of the marginals must lie between 0 and 0.5, got {clamp}.")
    inside = first.clamp(clamp, 1 - clamp)
    return (inside * (1 - inside)).sqrt()


class PairMoments(NamedTuple):
    """Moments where some labels are unknown: means over all images of what is known of each.

    With ``m_ic`` = 1 where label c of image i is known: means of ``m_c m_c'``, ``F_c m_c m_c'`` and
    ``F_c F_c' m_c m_c'``, on request of ``F_c² m_c m_c'`` too. Divided by the first, they are the
    moments of a pair over the images on which both of its labels are known. Means over all images
    can be averaged over batches like :class:`Moments`, whatever each batch knows.

    Attributes:
        values: (..., 3C or 4C, C), the matrices one below the other.
    """

    values: Tensor

    def part(self, index: int) -> Tensor:
        """The matrix (..., C, C) at a place in the order above."""
        classes = self.values.shape[-1]
        return self.values[..., index * classes : (index + 1) * classes, :]

    @property
    def known(self) -> Tensor:
        """Share of the images on which both labels of a pair are known, (..., C, C)."""
        return self.part(0)

    @property
    def marginal(self) -> Tensor:
        """p̂_c over the images on which c is known, (..., C); 0 where there are none."""
        own = (self.part(i).diagonal(dim1=-2, dim2=-1) for i in (0, 1))
        known, first = own
        return first / torch.where(known > 0, known, 1)


def pair_moments(
    scores: Tensor, known: Tensor, row_weights: Tensor | None = None, *, squares: bool = False
) -> PairMoments:
    """Marginal and joint probabilities of each pair of labels, where labels may be unknown.

    Args:
        scores: F, (..., B, C); what an unknown label scores has no part in anything.
        known: (..., B, C), 1 where a label is known, 0 where it is not and in padding rows.
        row_weights: (..., B), 1 for a real row, 0 for padding; all rows by default.
        squares: Also keep the second moments that Pearson's normaliser needs.

    >>> scores, known = torch.tensor([[0.8, 0.6], [0.4, 0.2]]), torch.tensor([[1, 1], [1, 0]])
    >>> moments = pair_moments(scores, known)
    >>> moments.known.tolist(), [round(p, 4) for p in moments.marginal.tolist()]
    ([[1.0, 0.5], [0.5, 0.5]], [0.6, 0.6])
    """
    sums = pair_sums(scores, known, squares=squares)
    if row_weights is None:
        return PairMoments(sums / scores.shape[-2])
    images = row_weights.to(sums.dtype).sum(-1).clamp_min(1)
    return PairMoments(sums / images.unsqueeze(-1).unsqueeze(-1))


def pair_sums(scores: Tensor, known: Tensor, *, squares: bool = False) -> Tensor:
    """What :func:`pair_moments` are the means of, (..., 3C or 4C, C)."""
    scores = _full_precision(scores)
    with torch.autocast(scores.device.type, enabled=False):
        mask = known.to(scores.dtype)
        shown = scores * mask
        sums = [mask.mT @ mask, shown.mT @ mask, shown.mT @ shown]
        if squares:
            sums.append(shown.square().mT @ mask)
        return torch.cat(sums, dim=-2)


def pair_correlation(
    moments: PairMoments,
    *,
    normaliser: Normaliser = "phi",
    eps: float = EPS,
    clamp: float = CLAMP,
    denominator_grad: bool = True,
) -> tuple[Tensor, Tensor]:
    """Eq. (2), each entry over the images on which both of its labels are known.

    Args:
        moments: With squares for ``"pearson"``.
        normaliser: As for :func:`correlation`, like the following.
        eps: See there.
        clamp: See there.
        denominator_grad: See there.

    Returns:
        Matrices (..., C, C), and where they are defined: pairs never known together are 0, and
        not. If everything is known, this is :func:`correlation` up to rounding.

    >>> labels = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0], [0.0, 0.0], [1.0, 0.0]])
    >>> known = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 1], [1, 0]])
    >>> matrix, _ = pair_correlation(pair_moments(labels, known))
    >>> round(matrix[0, 1].item(), 4)  # the fifth image does not tell: φ = 0.5774 of the others
    0.5773
    """
    _check_choice("normaliser", normaliser, get_args(Normaliser))
    moments = PairMoments(_full_precision(moments.values))
    defined = moments.known > 0
    images = torch.where(defined, moments.known, 1)
    first, second = moments.part(1) / images, moments.part(2) / images
    covariance = second - first * first.mT
    if normaliser == "phi":
        spread = bernoulli_deviation(first, clamp)
    else:
        raw = moments.part(3) / images
        variance = raw - first.square()
        varies = variance > _ROUNDINGS * torch.finfo(raw.dtype).eps * raw
        spread = torch.where(varies, variance, 1).sqrt()
        covariance = torch.where(varies & varies.mT, covariance, 0)
    denominator = spread * spread.mT + eps
    matrix = covariance / (denominator if denominator_grad else denominator.detach())
    return torch.where(defined, matrix, 0), defined


def soft_correlation(
    scores: Tensor,
    row_weights: Tensor | None = None,
    *,
    normaliser: Normaliser = "phi",
    eps: float = EPS,
    clamp: float = CLAMP,
    denominator_grad: bool = True,
) -> Tensor:
    """Eq. (1) and (2) in one: scores (..., B, C) to correlation matrices (..., C, C).

    The options are those of :func:`score_moments` and :func:`correlation`. The result is symmetric
    to the bit, which a matrix product alone does not promise.

    >>> soft_correlation(torch.tensor([[0.9, 0.2]]))  # one image tells nothing
    tensor([[0., 0.],
            [0., 0.]])
    """
    matrix = correlation(
        score_moments(scores, row_weights),
        normaliser=normaliser,
        eps=eps,
        clamp=clamp,
        denominator_grad=denominator_grad,
    )
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
    scale = first * (images - first)
    # A square root of the product, not a product of roots: exactly 1 on the diagonal.
    root = (scale * scale.mT).sqrt()
    matrix = torch.where(root > 0, (images * both - first * first.mT) / root.clamp_min(1), 0)
    return matrix, root > 0


AnyMoments = TypeVar("AnyMoments", Moments, PairMoments)


class RunningMoments(NamedTuple, Generic[AnyMoments]):
    """Moments over the batches seen so far; ``started`` (...) is False before the first one."""

    moments: AnyMoments
    started: Tensor


def empty_running(
    num_classes: int,
    *,
    leading: Sequence[int] = (),
    dtype: torch.dtype = torch.float32,
    device: torch.device | str | None = None,
) -> RunningMoments[Moments]:
    """Running moments before the first batch, for one client or a stack of shape ``leading``.

    >>> empty_running(3, leading=(2,)).moments.second.shape
    torch.Size([2, 3, 3])
    """
    shape = (*leading, num_classes + 1, num_classes)
    return RunningMoments(
        Moments(torch.zeros(shape, dtype=dtype, device=device)),
        torch.zeros(tuple(leading), dtype=torch.bool, device=device),
    )


def update_rate(rows: Tensor, span: Tensor | float) -> Tensor:
    """How much of the running moments a batch replaces: ``ω = min(1, rows / span)``.

    Deviation: the share of the batch itself, not of a full one. A last batch of one image would
    else replace nearly all of the moments of a small client.

    Args:
        rows: Images in the batch, (...): a last batch that is short moves them by its share only.
        span: Images that the moments remember, min(n, window), (...).

    >>> update_rate(torch.tensor([16.0, 1.0, 0.0, 3.0]), torch.tensor([64.0, 64.0, 64.0, 3.0]))
    tensor([0.2500, 0.0156, 0.0000, 1.0000])
    """
    return (rows / span).clamp(max=1)


def running_step(
    running: RunningMoments[AnyMoments], batch: AnyMoments, rate: float | Tensor
) -> tuple[AnyMoments, RunningMoments[AnyMoments]]:
    """Moments with the value of many batches and the gradient of this one.

    ``p̃ = sg[(1−ω) p_run + ω p_batch] + (p_batch − sg[p_batch])``, where sg stops the gradient. A
    batch of 16 estimates R with a standard deviation of about 0.2, and ``E|R̂−R*|² = |R−R*|² +
    Var(R̂)``: aligning the batch estimate alone would also push its variance down, that is, damp the
    predictions. The first batch initialises the running moments (ω = 1).

    Args:
        running: State before the batch.
        batch: Moments of the batch, with gradient.
        rate: ω, a number or one per client, shape (...), see :func:`update_rate`. At 0 (a batch
            without a real row) the state stays as it is and is also the value of the estimate.

    Returns:
        The estimate p̃ and the (detached) state after the batch.

    >>> one, two = (score_moments(torch.full((4, 1), p)) for p in (0.2, 0.6))
    >>> estimate, running = running_step(empty_running(1), one, 0.25)
    >>> estimate, running = running_step(running, two, 0.25)
    >>> estimate.first  # 0.75·0.2 + 0.25·0.6
    tensor([0.3000])
    """
    now = batch.values.detach()
    rate, started = _begun(running.started, rate, now)
    past = running.moments.values.detach().to(now.dtype)
    state = torch.lerp(past, now, rate.unsqueeze(-1).unsqueeze(-1))
    kind = type(batch)
    return kind(state + (batch.values - now)), RunningMoments(kind(state), started)


def _begun(started: Tensor, rate: float | Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """The rate, 1 for a first batch that is not empty; and who has begun after it."""
    rate = torch.as_tensor(rate, dtype=like.dtype, device=like.device)
    filled = rate > 0
    return torch.where(started, rate, filled.to(like.dtype)), started | filled


def pair_mask(clusters: Tensor, known: Tensor | None = None, *, diagonal: bool = False) -> Tensor:
    """Which label pairs are aligned: same cluster, known to the teacher, and different labels.

    Args:
        clusters: Cluster of each label, (..., C); −1 for a label in no cluster, which has no pairs.
        known: Pairs the teacher knows, (..., C, C); all of them by default.
        diagonal: Also include each label with itself (if known), those in no cluster too.

    Returns:
        Boolean (..., C, C).

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
    kind: Distance = "squared_frobenius",
    reduction: Reduction = "mean",
) -> Tensor:
    """Distance Ψ between a correlation matrix and its teacher over the included pairs.

    The paper leaves Ψ open. Clusters are disjoint, so one mask covers all blocks: the squared norm
    with ``reduction="sum"`` is literally ``Σ_g ||R[S_g, S_g] − R*[S_g, S_g]||_F²``.

    Args:
        matrix: R, shape (..., C, C).
        teacher: R*, shape (..., C, C).
        pairs: Included entries, boolean (..., C, C), see :func:`pair_mask`.
        kind: ``"squared_frobenius"``, the paper's f with weights 1 in a block and 0 elsewhere;
            ``"frobenius"``, its square root: one norm over all included entries, not a sum of one
            norm per cluster; ``"cosine"``, one minus the cosine of the angle between the included
            entries, where a side that is all 0 counts as orthogonal (1).
        reduction: ``"mean"`` divides the sum of squares by the number of included entries, so that
            λ means the same for 17 labels and 1,628 (``"frobenius"`` is then the root mean square);
            ``"cosine"`` has no scale and ignores it.

    Returns:
        Shape (...). Exactly 0, with zero gradient, where no pair is included.

    >>> pairs = pair_mask(torch.tensor([0, 0]))
    >>> student, teacher = torch.eye(2), torch.tensor([[1.0, 0.3], [0.3, 1.0]])
    >>> discrepancy(student, teacher, pairs), discrepancy(student, teacher, pairs, reduction="sum")
    (tensor(0.0900), tensor(0.1800))
    """
    _check_choice("distance", kind, get_args(Distance))
    _check_choice("reduction", reduction, get_args(Reduction))
    matrix, teacher = _full_precision(matrix), _full_precision(teacher)
    if kind == "cosine":
        return _cosine_distance(matrix, teacher, pairs)
    square = torch.where(pairs, matrix - teacher, 0).square().sum((-2, -1))
    if reduction == "mean":
        square = square / pairs.sum((-2, -1)).clamp_min(1)
    return square if kind == "squared_frobenius" else _root(square)


class MomentsApart(NamedTuple):
    """Running moments as :func:`running_discrepancy` keeps them: both kinds in place, apart.

    Attributes:
        first: p̂_c, (..., C).
        second: p̂_cc', (..., C, C).
        started: (...), False before the first batch.
    """

    first: Tensor
    second: Tensor
    started: Tensor

    @classmethod
    def empty(
        cls,
        num_classes: int,
        *,
        leading: Sequence[int] = (),
        device: torch.device | str | None = None,
    ) -> MomentsApart:
        """Before the first batch, for one client or a stack of shape ``leading``."""
        return cls(
            torch.zeros(*leading, num_classes, device=device),
            torch.zeros(*leading, num_classes, num_classes, device=device),
            torch.zeros(tuple(leading), dtype=torch.bool, device=device),
        )


def running_discrepancy(
    scores: Tensor,
    row_weights: Tensor,
    running: MomentsApart,
    rate: float | Tensor,
    teacher: Tensor,
    pairs: Tensor,
    count: Tensor | float,
    *,
    eps: float = EPS,
    clamp: float = CLAMP,
    denominator_grad: bool = True,
) -> tuple[Tensor, MomentsApart]:
    """``Ψ = Σ_pairs (R̃ − R*)² / count`` of :func:`running_step`'s R̃, with a gradient by hand.

    The same as :func:`score_moments`, :func:`running_step`, :func:`correlation` ("phi") and
    :func:`discrepancy` ("squared_frobenius") one after the other. Those keep C × C numbers for the
    backward pass and go over them about twenty times; for many labels that costs more than the
    model. Here the gradient by the scores is formed on the way, in one pass. With
    ``d = sqrt(p̃(1−p̃))``, ``d' = dd/dp̃``, E the derivative by R̃ and ``W = E / (d dᵀ + ε)``, all
    matrices being symmetric,

    ``∂Ψ/∂p̃ = −2 W p̃ − 2 d' (W ∘ R̃) d``, ``∂Ψ/∂F_i = (∂Ψ/∂p̃ + 2 W F_i) / B``.

    Args:
        scores: F, (..., B, C).
        row_weights: (..., B), 1 for a real row, 0 for padding.
        running: State before the batch.
        rate: ω, a number or one per client, as for :func:`running_step`.
        teacher: R*, (..., C, C), symmetric.
        pairs: Included entries, boolean (..., C, C), symmetric.
        count: What the sum is divided by, (...).
        eps: See :func:`correlation`.
        clamp: Likewise.
        denominator_grad: Likewise.

    Returns:
        Ψ, shape (...), and the state after the batch.

    >>> scores, pairs = torch.eye(2).sub(1).abs().fill_diagonal_(0), pair_mask(torch.tensor([0, 0]))
    >>> zero, ones = torch.zeros(2, 2), torch.ones(2)
    >>> value, _ = running_discrepancy(scores, ones, MomentsApart.empty(2), 1.0, zero, pairs, 2.0)
    >>> round(float(value), 4)  # two labels that exclude each other: R = −1
    1.0
    """
    scores = _full_precision(scores)
    with torch.no_grad(), torch.autocast(scores.device.type, enabled=False):
        weights = row_weights.to(scores.dtype).unsqueeze(-1)
        shares = weights / weights.sum(-2, keepdim=True).clamp_min(1)
        real = shares * scores
        rate, started = _begun(running.started, rate, scores)
        rate = rate.unsqueeze(-1)
        past_first, past_second = (t.to(scores.dtype) for t in running[:2])
        first = torch.lerp(past_first, real.sum(-2), rate)
        second = torch.lerp(past_second, scores.mT @ real, rate.unsqueeze(-1))
        spread = bernoulli_deviation(first, clamp)
        # In place where that is possible: (..., C, C) numbers are what this function costs.
        scale = _outer(spread).add_(eps).reciprocal_()
        matrix = (second - _outer(first)).mul_(scale)
        weight = (matrix - teacher).mul_(pairs)
        total = torch.as_tensor(count, dtype=scores.dtype, device=scores.device)
        value = weight.square().sum(-1).sum(-1) / total
        weight.mul_(scale).mul_((2 / total).unsqueeze(-1).unsqueeze(-1))
        slope = -2 * (weight * first.unsqueeze(-2)).sum(-1)
        if denominator_grad:
            inside = (first >= clamp) & (first <= 1 - clamp)
            steep = torch.where(inside, (0.5 - first) / spread, 0)
            across = matrix.mul_(weight).mul_(spread.unsqueeze(-2)).sum(-1)
            slope = slope - 2 * steep * across
        gradient = shares * (slope.unsqueeze(-2) + 2 * (scores @ weight))
        after = MomentsApart(first, second, started)
    # Zero, with the gradient found above.
    tangent = ((scores - scores.detach()) * gradient).sum((-2, -1))
    return value + tangent, after


def alpha_schedule(round: int, horizon: float, start: int = 0) -> float:
    """Share of data size in the aggregation weights: ``α(t) = max(0, 1 − (t − start) / T_0)``.

    Args:
        round: t, counted from 0, so that α(0) = 1 and the first round needs no quality.
        horizon: T_0, the rounds from α = 1 to α = 0. Infinite keeps α = 1; at 0 or below α is 0
            from ``start`` on.
        start: Up to this round α is 1 (before the decline begins).

    >>> [alpha_schedule(t, 4) for t in range(6)], alpha_schedule(9, math.inf), alpha_schedule(0, 0)
    ([1.0, 0.75, 0.5, 0.25, 0.0, 0.0], 1.0, 0.0)
    """
    elapsed = round - start
    if elapsed < 0:
        return 1.0
    return max(0.0, 1.0 - elapsed / horizon) if horizon > 0 else 0.0


def quality_weights(
    discrepancies: Tensor,
    *,
    temperature: float | Literal["adaptive"] = "adaptive",
    examples: Tensor | None = None,
    min_examples: int = 10,
) -> Tensor:
    """Normalised qualities ``q̄_k = exp(−γ s_k) / Σ_j exp(−γ s_j)``.

    Args:
        discrepancies: s, shape (m,).
        temperature: γ. ``"adaptive"`` is 1 / (population) standard deviation of s, so that the
            scale of s does not matter; where s does not vary (below 1e-12) the weights are uniform.
        examples: Images per client, (m,).
        min_examples: Deviation: a client with fewer images is given the mean s of the others, as
            its matrix is close to 0 whatever it has learnt. It has no part in the standard
            deviation either. If all are that small, the weights are uniform.

    Returns:
        Float64 (m,), sum 1.

    >>> quality_weights(torch.tensor([1.0, 3.0]))  # standard deviation 1: e^-1 and e^-3
    tensor([0.8808, 0.1192], dtype=torch.float64)
    """
    s = discrepancies.double()
    if not bool(s.isfinite().all()):
        raise DataError(
            f"Clients cannot be weighted by discrepancies that are not finite: {s.tolist()}. "
            "Leave out the clients whose correlation matrix is not finite."
        )
    if temperature != "adaptive" and not 0 <= temperature < math.inf:
        raise ConfigError(
            f"The quality temperature must be 'adaptive' or a number >= 0, got {temperature}."
        )
    if examples is not None:
        reliable = examples.to(s.device) >= min_examples
    else:
        reliable = torch.ones_like(s, dtype=torch.bool)
    if not bool(reliable.any()):
        return torch.full_like(s, 1 / max(1, len(s)))
    trusted = s[reliable]
    # Deviations from the mean: the same softmax, and 0 for a client that is not reliable.
    excess = torch.where(reliable, s - trusted.mean(), 0)
    if temperature == "adaptive":
        deviation = float(trusted.std(correction=0))
        gamma = 1 / deviation if deviation >= 1e-12 else 0.0
    else:
        gamma = temperature
    return torch.softmax(-gamma * excess, 0)


def aggregation_weights(examples: Tensor, quality: Tensor, alpha: float) -> Tensor:
    """Aggregation weights ``w_k = α n̄_k + (1 − α) q̄_k`` from sizes and qualities, both normalised.

    At α = 1 the qualities are not looked at: the weights are those of FedAvg to the last bit, and
    the qualities may be undefined.

    Returns:
        Float64 (m,), sum 1.

    >>> aggregation_weights(torch.tensor([30, 10]), torch.tensor([0.5, 0.5]), 0.5)
    tensor([0.6250, 0.3750], dtype=torch.float64)
    """
    if not 0 <= alpha <= 1:
        raise ConfigError(f"The share of data size in the weights must be in [0, 1], got {alpha}.")
    by_size = _share(examples, "images")
    if alpha == 1:
        return by_size
    return alpha * by_size + (1 - alpha) * _share(quality, "quality")


def effective_clients(weights: Tensor) -> float:
    """How many equally weighted clients a weighting is worth: ``1 / Σ_k w_k²`` (for sum 1).

    >>> effective_clients(torch.tensor([0.5, 0.5, 0.0]))
    2.0
    """
    return 1 / float(weights.double().square().sum())


def _share(amounts: Tensor, what: str) -> Tensor:
    shares = amounts.double() / amounts.double().sum()
    if not bool(shares.isfinite().all()):
        raise DataError(
            f"Clients cannot be weighted by {what} of {amounts.tolist()}: the sum must be positive "
            "and finite. Leave out clients without images or with undefined quality."
        )
    return shares


def _full_precision(values: Tensor) -> Tensor:
    return values if values.dtype in (torch.float32, torch.float64) else values.float()


def _outer(vector: Tensor) -> Tensor:
    return vector.unsqueeze(-1) * vector.unsqueeze(-2)


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


def _root(square: Tensor) -> Tensor:
    """Square root whose gradient at 0 is 0."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1).sqrt(), 0)


def _cosine_distance(matrix: Tensor, teacher: Tensor, pairs: Tensor) -> Tensor:
    a, b = torch.where(pairs, matrix, 0), torch.where(pairs, teacher, 0)
    lengths = _root(a.square().sum((-2, -1))) * _root(b.square().sum((-2, -1)))
    defined = lengths > 0
    cosine = torch.where(defined, (a * b).sum((-2, -1)) / torch.where(defined, lengths, 1), 0)
    return torch.where(pairs.any(-1).any(-1), 1 - cosine, 0)


def numbers_at_once(device: torch.device) -> int:
    """How many numbers a computation over many clients should hold at a time on a device.

    >>> numbers_at_once(torch.device("cpu")) // 20**2  # clients with 20 labels
    655
    """
    return _AT_ONCE.get(device.type, _AT_ONCE["cpu"])


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

    def ends(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """For each pair what (..., C) says of its first and of its second label."""
        return _pick(labels, self._rows), _pick(labels, self._columns)

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
