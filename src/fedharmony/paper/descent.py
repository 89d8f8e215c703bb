"""Gradient descent on a weighted distance of matrices: what Theorems 1 and 2 are about.

``f(R) = ‖Γ ∘ (R − R*)‖²_F`` of a free matrix R. Every entry descends by itself:
``R(T) − R* = (1 − 2ηγ²)^T (R(0) − R*)``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

ETA, SIZE = 0.1, 12
#: Three blocks of four labels.
BLOCKS = torch.arange(SIZE) // 4
INSIDE = BLOCKS[:, None] == BLOCKS


@dataclass(frozen=True)
class Descent:
    """Weights Γ, a start R(0) and a goal R*, float64 (C, C).

    >>> one = torch.ones(1, 1, dtype=torch.float64)
    >>> half = Descent(one, one, 0 * one)  # each step leaves 1 − 2 · 0.1 of the distance
    >>> float(half.after(2)), round(half.misfit(half.after(2)), 4)
    (0.64, 0.4096)
    """

    gamma: Tensor
    start: Tensor
    goal: Tensor

    def after(self, steps: int) -> Tensor:
        """R after so many steps, step by step."""
        matrix = self.start.clone()
        for _ in range(steps):
            matrix = matrix - ETA * 2 * self.gamma**2 * (matrix - self.goal)
        return matrix

    def misfit(self, matrix: Tensor) -> float:
        """F of a matrix."""
        return float((self.gamma * (matrix - self.goal)).square().sum())

    def path(self, steps: int) -> list[float]:
        """F after 0, 1, …, ``steps`` steps."""
        matrix, found = self.start, [self.misfit(self.start)]
        for _ in range(steps):
            matrix = replace(self, start=matrix).after(1)
            found.append(self.misfit(matrix))
        return found

    def inside(self) -> Descent:
        """The same with weights inside of the blocks alone: f_blk."""
        return replace(self, gamma=torch.where(INSIDE, self.gamma, 0.0))

    def outside(self) -> Tensor:
        """Γ_out."""
        return torch.where(INSIDE, 0.0, self.gamma)


def drawn(seed: int) -> Descent:
    """Symmetric weights, 1 inside of blocks and 0.02 to 0.3 outside; start and goal at random."""
    generator = torch.Generator().manual_seed(seed)
    outside, start, goal = torch.rand(3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    outside = 0.02 + 0.28 * outside
    outside = (outside.triu() + outside.triu(1).T).clamp(max=0.3)
    return Descent(torch.where(INSIDE, torch.ones_like(outside), outside), start, goal)


def slow_pair() -> Descent:
    """Weights 1 inside, 0.3 outside, one symmetric pair 0.02; from 1 to 0."""
    gamma = torch.where(INSIDE, 1.0, 0.3).double()
    gamma[0, 11] = gamma[11, 0] = 0.02
    return Descent(gamma, torch.ones(SIZE, SIZE).double(), torch.zeros(SIZE, SIZE).double())


def bound(first: float, weight: float, steps: int) -> float:
    """``(1 − 2ηγ²)^T f(0)``: how both theorems bound f after T steps."""
    return (1 - 2 * ETA * weight**2) ** steps * first
