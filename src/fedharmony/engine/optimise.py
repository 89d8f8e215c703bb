"""The local optimiser on stacked parameters: fresh each round, the same for all clients of a stack.

Its memory is the stack's: moments carry the client axis, and a step may move the first clients
only, those that still train. ``torch.optim`` would tie its state to leaf tensors, which a shrinking
stack replaces, and knows no bfloat16 copy to renew. Compiled, a step is one pass over memory.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from fedharmony.config import Checked

#: Adam's decay rates and ε: its authors' and torch's.
BETAS, EPSILON = (0.9, 0.999), 1e-8
#: Tensors that an optimiser keeps per parameter.
MOMENTS = {"adam": 2, "momentum": 1, "sgd": 0}


@dataclass(frozen=True)
class TrainSettings(Checked):
    """Local training.

    Attributes:
        epochs: passes over the local data per round (E).
        batch_size: images per step (B).
        optimiser: "adam"; "sgd" without momentum; or "momentum", SGD with a heavy ball. Each client
            starts every round with a fresh one; its state is neither kept nor sent.
        lr: learning rate.
        schedule: "constant"; or "cosine": in round t of T the rate is lr · ½(1 + cos(π t/T)).
        momentum: of the heavy ball.
        weight_decay: L2 weight decay, part of the gradient.
    """

    epochs: Annotated[int, Ge(1), Le(10_000)] = 5
    batch_size: Annotated[int, Ge(1), Le(65_536)] = 16
    optimiser: Literal["adam", "sgd", "momentum"] = "adam"
    lr: Annotated[float, Gt(0)] = 1e-4
    schedule: Literal["constant", "cosine"] = "constant"
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    weight_decay: Annotated[float, Ge(0)] = 0.0

    def rate(self, round: int, rounds: int) -> float:
        """The learning rate of a round, as a share of ``lr``.

        >>> [TrainSettings(schedule="cosine").rate(t, 4) for t in (0, 2)]
        [1.0, 0.5]
        """
        if self.schedule == "constant":
            return 1.0
        return 0.5 + 0.5 * math.cos(math.pi * round / rounds)


def adam_step(
    param: Tensor,
    gradient: Tensor,
    moments: list[Tensor],
    copy: Tensor | None,
    factors: Tensor,
    settings: TrainSettings,
) -> None:
    """Adam's step in place, as one pass over memory when compiled.

    ``m ← β₁ m + (1−β₁) g``, ``v ← β₂ v + (1−β₂) g²``,
    ``θ ← θ − lr · rate · m/(1−β₁ᵗ) / (√(v/(1−β₂ᵗ)) + ε)`` with ``g`` including
    ``weight_decay · θ``; then the copy of θ in its own precision. ``factors`` are those of
    :func:`step_factors`.
    """
    first, second = moments
    total = _decayed(param, gradient, settings)
    first.lerp_(total, 1 - BETAS[0])
    second.mul_(BETAS[1]).addcmul_(total, total, value=1 - BETAS[1])
    root = second.sqrt() * factors[1] + EPSILON
    param.sub_(settings.lr * factors[0] * first / root)
    if copy is not None:
        copy.copy_(param)


def step_factors(clock: Tensor, rate: Tensor, dtype: torch.dtype) -> Tensor:
    """``rate/(1−β₁ᵗ)`` and ``1/√(1−β₂ᵗ)`` at step t, and the rate; clock and rate in float64.

    >>> one = torch.tensor(1.0, dtype=torch.float64)
    >>> step_factors(one, one / 2, torch.float32)
    tensor([ 5.0000, 31.6228,  0.5000])
    """
    first, second = rate / (1 - BETAS[0] ** clock), (1 - BETAS[1] ** clock).rsqrt()
    return torch.stack([first, second, rate]).to(dtype)


def sgd_step(
    param: Tensor,
    gradient: Tensor,
    moments: list[Tensor],
    copy: Tensor | None,
    factors: Tensor,
    settings: TrainSettings,
) -> None:
    """``b ← ρ b + g``, ``θ ← θ − lr · rate · b`` in place; without a moment ``b = g``."""
    move = _decayed(param, gradient, settings)
    for ball in moments:
        move = ball.mul_(settings.momentum).add_(move)
    param.sub_(move * factors[2], alpha=settings.lr)
    if copy is not None:
        copy.copy_(param)


def _decayed(param: Tensor, gradient: Tensor, settings: TrainSettings) -> Tensor:
    total = gradient.to(param.dtype)
    return total + settings.weight_decay * param if settings.weight_decay else total


def clip_gradients(gradients: Sequence[Tensor], largest: float) -> None:
    """Scale each client's gradient to a norm of at most ``largest``, in place.

    ``g_m ← g_m · min(1, largest / (‖g_m‖ + 1e-6))`` with the norm over all parameters of client m.
    ``torch.nn.utils.clip_grad_norm_`` would take one norm over all clients.

    >>> gradient = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> clip_gradients([gradient], 1.0)
    >>> gradient.round(decimals=4).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.30000001192092896, 0.4000000059604645]]
    """
    squares = [gradient.flatten(1).square().sum(1) for gradient in gradients]
    norm = torch.stack(squares).sum(0).sqrt()
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))
