"""Multi-label losses: the same choice of task loss for every method.

Convention for the whole package: the task loss is the *mean* over the entries that count (images ×
labels), each with its weight. Every relative coefficient (alignment weight, proximal weight) refers
to this convention.

All functions work on the last dimensions only: leading dimensions are clients. Logits z have shape
(..., B, C), and p = σ(z).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
import torch.nn.functional as F
from annotated_types import Ge, Le, Lt
from pydantic import AfterValidator
from torch import Tensor

from fedharmony.config import Checked


class Batch(NamedTuple):
    """One client's mini-batch beside its images.

    A field that is left out is an empty tuple or mapping, which ``torch.vmap`` passes over.

    Attributes:
        labels: (B, C) float, 0 or 1.
        rows: (B,) float; 1 for an image, 0 for a padding row.
        counted: (B, C) float; the weight with which an entry counts: 0 for padding rows and unknown
            labels, 1 normally, ``absent_label_weight`` for a known label of which the client has no
            positive at all.
        positive_weight: (C,) float; factor on the positive term of each label in the class-balanced
            loss, see :func:`positive_weights`. Left out, it is 1.
        draws: what the method drew for this batch, one row per image.
        inputs: what the head reads beside the image.
        known: (B, C) float; 1 for a known label, 0 for an unknown one and in padding rows. Left
            out where every label is known.
    """

    labels: Tensor
    rows: Tensor
    counted: Tensor
    positive_weight: Tensor | tuple[()] = ()
    draws: Mapping[str, Tensor] = {}
    inputs: Mapping[str, Tensor] = {}
    known: Tensor | tuple[()] = ()

    def of_rows(self, chosen: Tensor) -> Batch:
        """The batch with the rows where ``chosen`` (..., B) is 1; the others count as padding."""
        entries = chosen.unsqueeze(-1)
        known = self.known * entries if isinstance(self.known, Tensor) else ()
        return self._replace(rows=self.rows * chosen, counted=self.counted * entries, known=known)


def _all_or_nothing(weight: float) -> float:
    if weight not in (0, 1):
        raise ValueError(
            "write 0 or 1: the rows of a head for absent labels have no other gradient, and Adam "
            "scales any weight between back to 1"
        )
    return weight


@dataclass(frozen=True)
class LossSettings(Checked):
    """The task loss, the same for every method.

    Attributes:
        name: "bce"; "balanced" (BCE with a factor on the positives, from the client's own counts);
            "focal" (Lin et al., ICCV 2017); "asymmetric" (Ridnik et al., ICCV 2021).
        absent_label_weight: weight of the entries of a label of which the client has no positive: 1
            counts them like others, 0 leaves them out.
        balance_power: "balanced": exponent of n⁻/n⁺; 1 gives both sides of a label the same total
            weight, 0.5 is the square-root balance, 0 none.
        max_positive_weight: "balanced": the factor is kept in [1/max, max].
        focal_gamma: "focal": γ, how strongly well-classified entries are played down.
        focal_alpha: "focal": factor α on positives and 1 − α on negatives; none leaves both at 1.
        asymmetric_gamma_pos: "asymmetric": γ₊, the focusing of positives.
        asymmetric_gamma_neg: "asymmetric": γ₋, the focusing of negatives.
        asymmetric_margin: "asymmetric": m; negatives with p ≤ m cost nothing.
    """

    name: Literal["bce", "balanced", "focal", "asymmetric"] = "bce"
    absent_label_weight: Annotated[float, AfterValidator(_all_or_nothing)] = 1.0
    balance_power: Annotated[float, Ge(0), Le(1)] = 1.0
    max_positive_weight: Annotated[float, Ge(1)] = 20.0
    focal_gamma: Annotated[float, Ge(0)] = 2.0
    focal_alpha: Annotated[float, Ge(0), Le(1)] | None = None
    asymmetric_gamma_pos: Annotated[float, Ge(0)] = 0.0
    asymmetric_gamma_neg: Annotated[float, Ge(0)] = 4.0
    asymmetric_margin: Annotated[float, Ge(0), Lt(1)] = 0.05


# -- what a client counts once ---------------------------------------------------------------------


def label_weights(settings: LossSettings, positives: Tensor) -> Tensor:
    """Weight (..., C) of each label's known entries, from the client's positives (..., C).

    1 for a label with a positive, else ``absent_label_weight``.

    >>> label_weights(LossSettings(absent_label_weight=0), torch.tensor([3, 0]))
    tensor([1., 0.])
    """
    weights = torch.ones_like(positives, dtype=torch.float32)
    return weights.masked_fill(positives == 0, settings.absent_label_weight)


def positive_weights(settings: LossSettings, positives: Tensor, negatives: Tensor) -> Tensor:
    """Factor (..., C) on the positive term of each label, from counts n⁺, n⁻ over known labels.

    ``(n⁻/n⁺)^power`` kept in [1/max, max] for the class-balanced loss, 1 for the others. A label
    without known entries has nothing to balance and gets 1.

    >>> balanced = LossSettings("balanced", balance_power=0.5)
    >>> positive_weights(balanced, torch.tensor([2, 9]), torch.tensor([8, 1]))  # √(8/2), √(1/9)
    tensor([2.0000, 0.3333])
    """
    if settings.name != "balanced":
        return torch.ones_like(positives, dtype=torch.float32)
    ratio = (negatives.float() / positives.float()).nan_to_num(nan=1.0, posinf=math.inf)
    largest = settings.max_positive_weight
    return ratio.pow(settings.balance_power).clamp(1.0 / largest, largest)


# -- the loss of a batch ---------------------------------------------------------------------------


def task_loss(settings: LossSettings, logits: Tensor, batch: Batch) -> Tensor:
    """Mean of :func:`entries` by their weights; (..., B, C) gives (...). 0 when no entry counts.

    ``Σ m ℓ / Σ m`` with m = ``counted``.

    >>> labels = torch.tensor([[1.0, 0.0]])
    >>> batch = Batch(labels, torch.ones(1), torch.ones(1, 2))
    >>> round(float(task_loss(LossSettings("focal"), torch.zeros(1, 2), batch)), 4)  # ¼ log 2
    0.1733
    """
    weights = batch.counted
    # The floor is below any weight: it takes effect only where nothing counts.
    total = weights.sum((-2, -1)).clamp(min=torch.finfo(weights.dtype).tiny)
    return (entries(settings, logits, batch) * weights).sum((-2, -1)) / total


def entries(settings: LossSettings, logits: Tensor, batch: Batch) -> Tensor:
    """Loss ℓ of each entry, (..., B, C), before masks and weights.

    ====================  ==========================================================================
    ``bce``               ``−y log p − (1−y) log(1−p)``
    ``balanced``          ``−w y log p − (1−y) log(1−p)`` with w = ``positive_weight``
    ``focal``             ``−α y (1−p)^γ log p − (1−α) (1−y) p^γ log(1−p)``; without α, 1 for both
    ``asymmetric``        ``−y (1−p)^γ₊ log p − (1−y) q^γ₋ log(1−q)`` with ``q = max(p − m, 0)``
    ====================  ==========================================================================

    The gradient goes through the focusing factors too, and is finite for any finite logits.
    """
    labels = batch.labels.to(logits.dtype)
    match settings.name:
        case "bce":
            return F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
        case "balanced":
            weight = batch.positive_weight
            return F.binary_cross_entropy_with_logits(
                logits,
                labels,
                reduction="none",
                pos_weight=weight.to(logits).unsqueeze(-2) if isinstance(weight, Tensor) else None,
            )
        case "focal":
            alpha, gamma = settings.focal_alpha, settings.focal_gamma
            present, absent = (1.0, 1.0) if alpha is None else (alpha, 1.0 - alpha)
            positive = present * _focused(F.logsigmoid(logits), gamma)
            negative = absent * _focused(F.logsigmoid(-logits), gamma)
        case "asymmetric":
            positive = _focused(F.logsigmoid(logits), settings.asymmetric_gamma_pos)
            log_absence = _shifted(F.logsigmoid(-logits), settings.asymmetric_margin)
            negative = _focused(log_absence, settings.asymmetric_gamma_neg)
    return labels * positive + (1.0 - labels) * negative


def _focused(log_likelihood: Tensor, gamma: float) -> Tensor:
    """``−(1 − e^ℓ)^γ ℓ`` for the log-likelihood ℓ ≤ 0 of an entry's truth."""
    miss = -torch.expm1(log_likelihood)
    # d/dx x^γ is infinite at 0 for γ < 1; there the loss and its gradient are 0.
    return -miss.clamp(min=torch.finfo(miss.dtype).tiny).pow(gamma) * log_likelihood


def _shifted(log_likelihood: Tensor, margin: float) -> Tensor:
    """``log(1 − max(p − m, 0)) = min(log(1 − p + m), 0)`` from log(1 − p)."""
    if margin == 0.0:
        return log_likelihood
    shift = log_likelihood.new_full((), math.log(margin))
    return torch.logaddexp(log_likelihood, shift).clamp(max=0.0)
