"""The local optimiser on stacked parameters: fresh each round, the same for all clients of a stack.

Its memory is the stack's: moments carry the client axis, and a step may move the first clients
only, those that still train. Two forms of the same arithmetic: :func:`fused_step` is torch's own
fused kernel, called directly, because ``torch.optim`` ties its state to leaf tensors, which a
shrinking stack replaces, and on its first step loads the compiler (more than a second on a CPU).
:func:`adam_step` and :func:`sgd_step` also renew the bfloat16 copy that the model reads, and are
compiled to one pass over memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from fedharmony.types import Tensors

#: Adam's decay rates and ε: its authors' and torch's.
BETAS, EPSILON = (0.9, 0.999), 1e-8
#: Tensors that an optimiser keeps per parameter.
MOMENTS = {"adam": 2, "momentum": 1, "sgd": 0}


@dataclass(frozen=True)
class TrainSettings:
    """Local training.

    Attributes:
        epochs: passes over the local data per round (E).
        batch_size: images per step (B).
        optimiser: "adam"; "sgd" without momentum; or "momentum", SGD with a heavy ball. Each client
            starts every round with a fresh one; its state is neither kept nor sent.
        lr: learning rate, constant.
        momentum: of the heavy ball.
        weight_decay: L2 weight decay, part of the gradient.
    """

    epochs: Annotated[int, Ge(1), Le(10_000)] = 5
    batch_size: Annotated[int, Ge(1), Le(65_536)] = 16
    optimiser: Literal["adam", "sgd", "momentum"] = "adam"
    lr: Annotated[float, Gt(0)] = 1e-4
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    weight_decay: Annotated[float, Ge(0)] = 0.0


class Moments(NamedTuple):
    """What the optimiser remembers of a stack of clients that took the same number of steps.

    Attributes:
        clock: steps taken.
        kept: per moment (two of Adam, one of momentum, none of SGD) a tensor per parameter.
    """

    clock: Tensor
    kept: list[Tensors]

    @classmethod
    def of(cls, settings: TrainSettings, params: Mapping[str, Tensor]) -> Moments:
        """Before the first step."""
        kept = [
            {n: torch.zeros_like(t) for n, t in params.items()}
            for _ in range(MOMENTS[settings.optimiser])
        ]
        return cls(torch.zeros((), device=next(iter(params.values())).device), kept)

    def first_clients(self, names: Iterable[str], width: int) -> Moments:
        """Of some parameters of the first ``width`` clients, as views."""
        return Moments(self.clock, [{n: m[n][:width] for n in names} for m in self.kept])


def fused_step(
    settings: TrainSettings,
    params: Mapping[str, Tensor],
    gradients: Mapping[str, Tensor],
    moments: Moments,
) -> None:
    """One step in place, by torch's fused kernel for all parameters at once.

    >>> settings, params = TrainSettings(optimiser="sgd", lr=0.5), {"w": torch.tensor([[1.0]])}
    >>> fused_step(settings, params, {"w": torch.tensor([[1.0]])}, Moments.of(settings, params))
    >>> params["w"].tolist()
    [[0.5]]
    """
    moments.clock.add_(1)
    if not gradients:
        return
    leaves, kept = list(params.values()), [list(m.values()) for m in moments.kept]
    found = [_like(gradients[n], t) for n, t in params.items()]
    if settings.optimiser == "adam":
        first, second = kept
        torch._fused_adam_(
            leaves,
            found,
            first,
            second,
            [],
            [moments.clock] * len(leaves),
            lr=settings.lr,
            beta1=BETAS[0],
            beta2=BETAS[1],
            weight_decay=settings.weight_decay,
            eps=EPSILON,
            amsgrad=False,
            maximize=False,
        )
        return
    torch._fused_sgd_(
        leaves,
        found,
        kept[0] if kept else [],
        weight_decay=settings.weight_decay,
        momentum=settings.momentum if kept else 0.0,
        lr=settings.lr,
        dampening=0.0,
        nesterov=False,
        maximize=False,
        is_first_step=False,  # a ball at rest and a first step are the same
    )


def adam_step(
    param: Tensor,
    gradient: Tensor,
    moments: list[Tensor],
    copy: Tensor | None,
    corrections: Tensor,
    settings: TrainSettings,
) -> None:
    """Adam's step in place, as one pass over memory when compiled.

    ``m ← β₁ m + (1−β₁) g``, ``v ← β₂ v + (1−β₂) g²``,
    ``θ ← θ − lr · m/(1−β₁ᵗ) / (√(v/(1−β₂ᵗ)) + ε)`` with ``g`` including ``weight_decay · θ``; then
    the copy of θ in its own precision. ``corrections`` are those of :func:`adam_corrections`.
    """
    first, second = moments
    total = _decayed(param, gradient, settings)
    first.lerp_(total, 1 - BETAS[0])
    second.mul_(BETAS[1]).addcmul_(total, total, value=1 - BETAS[1])
    root = second.sqrt() * corrections[1] + EPSILON
    param.sub_(settings.lr * corrections[0] * first / root)
    if copy is not None:
        copy.copy_(param)


def adam_corrections(clock: Tensor, dtype: torch.dtype) -> Tensor:
    """``1/(1−β₁ᵗ)`` and ``1/√(1−β₂ᵗ)`` at step t, from a clock in float64.

    >>> adam_corrections(torch.tensor(1.0, dtype=torch.float64), torch.float32)
    tensor([10.0000, 31.6228])
    """
    return torch.stack([1 / (1 - BETAS[0] ** clock), (1 - BETAS[1] ** clock).rsqrt()]).to(dtype)


def sgd_step(
    param: Tensor,
    gradient: Tensor,
    moments: list[Tensor],
    copy: Tensor | None,
    corrections: Tensor,
    settings: TrainSettings,
) -> None:
    """``b ← ρ b + g``, ``θ ← θ − lr · b`` in place; without a moment ``b = g``."""
    move = _decayed(param, gradient, settings)
    for ball in moments:
        move = ball.mul_(settings.momentum).add_(move)
    param.sub_(move, alpha=settings.lr)
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


def _like(gradient: Tensor, param: Tensor) -> Tensor:
    """A gradient in the type and memory order of its parameter: fused kernels read memory as is."""
    if gradient.dtype == param.dtype and gradient.stride() == param.stride():
        return gradient
    return torch.empty_like(param).copy_(gradient)
