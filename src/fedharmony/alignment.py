"""The alignment term of FedHarmony's loss: Ψ(R̃, R*), Eq. (4) and (8), one batch after the other.

R of a batch of 16 images has a standard deviation of about 0.2, and ``E|R̂ − R*|² = |R − R*|² +
Var(R̂)``: aligning it would also push its variance down, that is, damp the predictions. So R̃ is made
of *running moments*, with the value of many batches and the gradient of this one,

``p̃ = sg[(1−ω) p_run + ω p_batch] + (p_batch − sg[p_batch])``, ``ω = min(1, rows / span)``,

where sg stops the gradient and span = min(n, window) is the number of images that the moments
remember. The first batch initialises them (ω = 1); a batch without an image leaves them alone.

Deviation: ω is the share of the batch itself, not of a full one. A last batch of one image would
else replace nearly all of the moments of a small client.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedharmony.correlation import (
    Correlation,
    Moments,
    Reduction,
    bernoulli_deviation,
    discrepancy,
)
from fedharmony.losses import Batch
from fedharmony.types import Group, Tensors

#: From here on C × C numbers are what the alignment costs; its gradient is then formed by hand,
#: where there is a formula for it.
MANY_LABELS = 128


@dataclass(frozen=True)
class Alignment:
    """Compares the R̃ of one client, or of a stack of clients, with its teacher R*.

    R̃ is of "running" moments, which remember at most ``window`` images, or of the "batch" alone.

    >>> align = Alignment(Correlation(classes=2))
    >>> carry = align.start(torch.tensor([[False, True], [True, False]]), torch.tensor(2.0))
    >>> scores, rows = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.ones(2)
    >>> value, carry = align(scores, Batch(scores, rows, scores), torch.zeros(2, 2), carry)
    >>> round(float(value), 4)  # two labels that exclude each other: R = −1
    1.0
    """

    correlation: Correlation
    estimator: Literal["running", "batch"] = "running"
    window: int = 512
    reduction: Reduction = "mean"

    @property
    def by_hand(self) -> bool:
        """Whether the gradient is formed by hand."""
        kind = self.correlation
        return (
            kind.classes >= MANY_LABELS
            and kind.normaliser == "phi"
            and not kind.unknown_labels
            and self.estimator == "running"
        )

    def start(self, pairs: Tensor, examples: Tensor) -> Tensors:
        """What a client of n ``examples`` (...) carries from batch to batch: no moments yet.

        ``pairs`` are the pairs of labels to align, boolean (..., C, C), symmetric.
        """
        kind, leading, device = self.correlation, pairs.shape[:-2], pairs.device
        return {
            "pairs": pairs,
            "span": examples.float().clamp(1, self.window),
            "moments": torch.zeros(*leading, kind.rows, kind.classes, device=device),
            "started": torch.zeros(leading, dtype=torch.bool, device=device),
        }

    def __call__(
        self, scores: Tensor, batch: Batch, teacher: Tensor, carry: Group
    ) -> tuple[Tensor, Tensors]:
        """Ψ(R̃, R*) of one batch, (...), with its gradient; and the carry after the batch.

        ``scores`` are F, (..., B, C), and ``teacher`` is R*, (..., C, C), symmetric.
        """
        if self.by_hand:
            return self._with_gradient(scores, batch, teacher, carry)
        moments = self.correlation.moments(scores, batch)
        if self.estimator == "running":
            now = moments.values.detach()
            carry = running(carry, now, batch.rows)
            moments = Moments(carry["moments"] + (moments.values - now))
        pairs = carry["pairs"]
        if moments.known is not None:
            pairs = pairs & (moments.known > 0)
        return self.psi(self.correlation.matrix(moments), teacher, pairs), dict(carry)

    def psi(self, matrix: Tensor, teacher: Tensor, pairs: Tensor) -> Tensor:
        """Ψ(R, R*) over pairs of labels, (...)."""
        return discrepancy(matrix, teacher, pairs, reduction=self.reduction)

    def _with_gradient(
        self, scores: Tensor, batch: Batch, teacher: Tensor, carry: Group
    ) -> tuple[Tensor, Tensors]:
        """``Ψ = Σ_pairs (R̃ − R*)² / count`` of φ and running moments, with a gradient by hand.

        Autograd keeps C × C numbers for the backward pass and goes over them about twenty times;
        for many labels that costs more than the model. Here the gradient by the scores is formed on
        the way. With ``d = sqrt(p̃(1−p̃))``, ``d' = dd/dp̃``, E the derivative by R̃ and
        ``W = E / (d dᵀ + ε)``, all matrices being symmetric,

        ``∂Ψ/∂p̃ = −2 W p̃ − 2 d' (W ∘ R̃) d``, ``∂Ψ/∂F_i = (∂Ψ/∂p̃ + 2 W F_i) / B``.
        """
        with torch.no_grad(), torch.autocast(scores.device.type, enabled=False):
            kind = self.correlation
            carry = running(carry, kind.moments(scores, batch).values, batch.rows)
            moments, pairs = Moments(carry["moments"]), carry["pairs"]
            # In place where that is possible: (..., C, C) numbers are what this function costs.
            matrix, scale = kind.quotient(moments)
            matrix.mul_(scale.reciprocal_())
            weight = (matrix - teacher).mul_(pairs)
            value = weight.square().sum((-2, -1))
            count = torch.ones_like(value)
            if self.reduction == "mean":
                count = pairs.sum((-2, -1)).clamp_min(1).to(value.dtype)
            weight.mul_(scale).mul_((2 / count).unsqueeze(-1).unsqueeze(-1))  # W
            first = moments.marginal
            slope = -2 * (weight * first.unsqueeze(-2)).sum(-1)
            if kind.denominator_grad:
                spread = bernoulli_deviation(first, kind.clamp)
                inside = (first >= kind.clamp) & (first <= 1 - kind.clamp)
                steep = torch.where(inside, (0.5 - first) / spread, 0)
                across = matrix.mul_(weight).mul_(spread.unsqueeze(-2)).sum(-1)
                slope = slope - 2 * steep * across
            shares = batch.rows.to(value.dtype).unsqueeze(-1)
            shares = shares / shares.sum(-2, keepdim=True).clamp_min(1)
            exact = scores.to(value.dtype)
            gradient = shares * (slope.unsqueeze(-2) + 2 * (exact @ weight))
        # Zero, with the gradient found above.
        tangent = ((scores - scores.detach()) * gradient).sum((-2, -1))
        return value / count + tangent, dict(carry)


def neutral(outputs: Tensor, rows: Tensor) -> Tensor:
    """The same outputs, whose gradients cannot make a label's scores bolder or more timid.

    A gradient g that reaches them is passed on as ``g − g·1 1/‖1‖² − g·z̃ z̃/‖z̃‖²`` per label, with
    z̃ the outputs less their mean over the batch: neither their level nor their spread moves, to
    first order; their order does. Outputs are (..., B, C), ``rows`` (..., B) 0 for padding.

    >>> z = torch.tensor([[1.0], [2], [3]], requires_grad=True)
    >>> torch.autograd.grad(neutral(z, torch.ones(3)).square().sum(), z)[0].abs().max() < 1e-6
    tensor(True)
    """
    real, fixed = rows.unsqueeze(-1).to(outputs.dtype), outputs.detach()
    count = real.sum(-2, keepdim=True).clamp_min(1)
    centred = (fixed - (fixed * real).sum(-2, keepdim=True) / count) * real
    length = centred.square().sum(-2, keepdim=True)
    # A projection is its own transpose: what it does to a step, it does to a gradient.
    step = (outputs - fixed) * real
    level = real * step.sum(-2, keepdim=True) / count
    along = (centred * step).sum(-2, keepdim=True) / length.clamp_min(
        torch.finfo(length.dtype).tiny
    )
    return fixed + (step - level - centred * along)


def running(carry: Group, now: Tensor, rows: Tensor) -> Tensors:
    """The carry after a batch with the moments ``now`` (..., rows, C) of ``rows`` (..., B).

    >>> pairs, examples = torch.ones(1, 1, dtype=torch.bool), torch.tensor(16)
    >>> carry = Alignment(Correlation(classes=1)).start(pairs, examples)
    >>> for p in (0.2, 0.6):
    ...     carry = running(carry, torch.full((2, 1), p), torch.ones(4))
    >>> carry["moments"][0]  # 0.75·0.2 + 0.25·0.6
    tensor([0.3000])
    """
    rate = (rows.sum(-1) / carry["span"]).clamp(max=1).to(now.dtype)
    some = rate > 0
    rate = torch.where(carry["started"], rate, some.to(now.dtype))  # 1 for the first batch
    past = carry["moments"].to(now.dtype)
    moments = torch.lerp(past, now, rate.unsqueeze(-1).unsqueeze(-1))
    return {**carry, "moments": moments, "started": carry["started"] | some}
