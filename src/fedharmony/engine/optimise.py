"""The local optimiser on stacked parameters: fresh each round, cut when clients finish."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, Gt, Lt
from torch import Tensor


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

    epochs: Annotated[int, Ge(1)] = 5
    batch_size: Annotated[int, Ge(1)] = 16
    optimiser: Literal["adam", "sgd", "momentum"] = "adam"
    lr: Annotated[float, Gt(0)] = 1e-4
    momentum: Annotated[float, Ge(0), Lt(1)] = 0.9
    weight_decay: Annotated[float, Ge(0)] = 0.0


def local_optimiser(
    settings: TrainSettings, leaves: list[Tensor], previous: torch.optim.Optimizer | None
) -> torch.optim.Optimizer:
    """An optimiser on the clients still training; it goes on where ``previous`` stood."""
    optimiser: torch.optim.Optimizer
    lr, decay = settings.lr, settings.weight_decay
    if settings.optimiser == "adam":
        optimiser = torch.optim.Adam(leaves, lr=lr, weight_decay=decay, fused=True)
    else:
        rho = settings.momentum if settings.optimiser == "momentum" else 0.0
        optimiser = torch.optim.SGD(leaves, lr=lr, momentum=rho, weight_decay=decay, fused=True)
    if previous is not None:
        before = previous.param_groups[0]["params"]
        for leaf, old in zip(leaves, before, strict=True):
            optimiser.state[leaf] = {
                name: value[: len(leaf)] if torch.is_tensor(value) and value.dim() else value
                for name, value in previous.state[old].items()
            }
    return optimiser


def clip_gradients(leaves: Sequence[Tensor], largest: float) -> None:
    """Scale each client's gradient to a norm of at most ``largest``, in place.

    ``g_m ← g_m · min(1, largest / (‖g_m‖ + 1e-6))`` with the norm over all parameters of client m.
    ``torch.nn.utils.clip_grad_norm_`` would take one norm over all clients.

    >>> leaf = torch.zeros(2, 2, requires_grad=True)
    >>> leaf.grad = torch.tensor([[3.0, 4.0], [0.3, 0.4]])
    >>> clip_gradients([leaf], 1.0)
    >>> leaf.grad.round(decimals=4).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.30000001192092896, 0.4000000059604645]]
    """
    gradients = [leaf.grad for leaf in leaves if leaf.grad is not None]
    squares = [gradient.flatten(1).square().sum(1) for gradient in gradients]
    norm = torch.stack(squares).sum(0).sqrt()
    scale = (largest / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        gradient.mul_(scale.view(-1, *[1] * (gradient.dim() - 1)))
