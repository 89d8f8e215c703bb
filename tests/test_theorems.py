"""Theorems 1 and 2 of FedHarmony (arXiv 2604.28024), checked with numbers.

Both are about a free matrix R, ``f(R) = ‖Γ ∘ (R − R*)‖²_F`` and gradient descent with step η. Every
entry is by itself: ``R(T) − R* = (1 − 2ηγ²)^T (R(0) − R*)``. From that the printed bounds can be
recomputed; one of them does not hold.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedharmony.correlation import discrepancy, pair_mask

ETA, SIZE = 0.1, 12
#: Three blocks of four labels.
BLOCKS = torch.arange(SIZE) // 4
INSIDE = BLOCKS[:, None] == BLOCKS


def descended(gamma: Tensor, start: Tensor, goal: Tensor, steps: int) -> Tensor:
    """R after so many steps of gradient descent, step by step."""
    matrix = start.clone()
    for _ in range(steps):
        matrix = matrix - ETA * 2 * gamma**2 * (matrix - goal)
    return matrix


def misfit(gamma: Tensor, matrix: Tensor, goal: Tensor) -> float:
    return float((gamma * (matrix - goal)).square().sum())


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Symmetric weights (1 inside blocks, 0.02 to 0.3 outside), a start and a goal, float64."""
    generator = torch.Generator().manual_seed(seed)
    outside, start, goal = torch.rand(3, SIZE, SIZE, generator=generator, dtype=torch.float64)
    outside = 0.02 + 0.28 * outside
    outside = (outside.triu() + outside.triu(1).T).clamp(max=0.3)
    gamma = torch.where(INSIDE, torch.ones_like(outside), outside)
    return gamma, start, goal


@pytest.mark.parametrize("seed", range(3))
def test_every_entry_descends_by_itself(seed: int) -> None:
    gamma, start, goal = drawn(seed)
    exact = (1 - 2 * ETA * gamma**2) ** 50 * (start - goal)
    torch.testing.assert_close(descended(gamma, start, goal, 50) - goal, exact)


@pytest.mark.parametrize("blocks", [True, False])
def test_the_alignment_loss_descends_like_that(blocks: bool) -> None:
    """Γ is 0 or 1 in the algorithm: "No-Block" is Γ ≡ 1, blocks are its mask; autograd agrees."""
    _, start, goal = drawn(0)
    ids = BLOCKS if blocks else torch.zeros_like(BLOCKS)
    pairs = pair_mask(ids, diagonal=True)
    matrix = start.clone().requires_grad_()
    (slope,) = torch.autograd.grad(discrepancy(matrix, goal, pairs, reduction="sum"), matrix)
    gamma = pairs.double()
    torch.testing.assert_close(start - ETA * slope, descended(gamma, start, goal, 1))


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_inside_blocks_holds_and_is_loose(seed: int) -> None:
    """``f_blk(T) ≤ (1 − 2ηγ_in²)^T f_blk(0)``; the exponent may even be 2T."""
    _, start, goal = drawn(seed)
    gamma = INSIDE.double() * 0.7
    factor = 1 - 2 * ETA * 0.7**2
    first = misfit(gamma, start, goal)
    for steps in (1, 10, 100):
        now = misfit(gamma, descended(gamma, start, goal, steps), goal)
        assert now <= factor**steps * first
        assert now <= factor ** (2 * steps) * first * (1 + 1e-9) + 1e-25 * first


def slow_pair() -> tuple[Tensor, Tensor, Tensor]:
    """Weights 1 inside, 0.3 outside, one symmetric pair 0.02; from 1 to 0."""
    gamma = torch.where(INSIDE, 1.0, 0.3).double()
    gamma[0, 11] = gamma[11, 0] = 0.02
    return gamma, torch.ones(SIZE, SIZE).double(), torch.zeros(SIZE, SIZE).double()


def test_the_full_bound_fails_as_printed() -> None:
    """With ``γ_out`` the largest weight outside: the smallest one decides how slow the end is.

    f(0) = 48 · 1 + 94 · 0.09 + 2 · 0.0004 = 56.4608. The factor is 1 − 2 · 0.1 · 0.09 = 0.982; the
    pair contracts by (1 − 2 · 0.1 · 0.0004)² = 0.99984 a step: first above the bound at T = 621.
    """
    gamma, start, goal = slow_pair()
    first = misfit(gamma, start, goal)
    assert first == pytest.approx(56.4608)
    factor, smallest = 1 - 2 * ETA * 0.3**2, 1 - 2 * ETA * 0.02**2
    violated = []
    for steps in (620, 621, 1000):
        now = misfit(gamma, descended(gamma, start, goal, steps), goal)
        violated.append(now > factor**steps * first)
        assert now <= smallest**steps * first  # corrected: the smallest positive weight
    assert violated == [False, True, True]
    end = misfit(gamma, descended(gamma, start, goal, 1000), goal)
    assert end == pytest.approx(6.817e-4, rel=1e-3)
    assert factor**1000 * first == pytest.approx(7.299e-7, rel=1e-3)


def test_the_full_bound_holds_where_all_outer_weights_are_equal() -> None:
    gamma, start, goal = slow_pair()
    gamma = torch.where(INSIDE, 1.0, 0.3).double()
    first = misfit(gamma, start, goal)
    for steps in (1, 100, 1000):
        now = misfit(gamma, descended(gamma, start, goal, steps), goal)
        assert now <= (1 - 2 * ETA * 0.3**2) ** steps * first


def test_without_outer_weights_both_objectives_are_one() -> None:
    """γ_out = 0: the printed bound says nothing, and nothing is accelerated."""
    _, start, goal = drawn(1)
    inside = INSIDE.double()
    other = drawn(1)[0]
    for steps in (1, 20):
        blocks = descended(inside, start, goal, steps)
        full = descended(other, start, goal, steps)
        assert misfit(inside, blocks, goal) == pytest.approx(misfit(inside, full, goal))
        torch.testing.assert_close(blocks[INSIDE], full[INSIDE])  # the same path inside blocks
        assert torch.equal(blocks[~INSIDE], start[~INSIDE])  # and none outside


@pytest.mark.parametrize("zero", [True, False])
def test_theorem_2_needs_a_start_that_is_zero_outside(zero: bool) -> None:
    """``f_full(R_blk) = f_blk(R_blk) + ‖Γ_out ∘ E‖²`` with E = R* outside, if R(0) is 0 there.

    In general the second term is ``‖Γ_out ∘ (R(0) − R*)‖²``: descent inside blocks never moves
    entries outside. It is a summand, and at most γ_out² times the squared norm.
    """
    gamma, start, goal = drawn(2)
    start = torch.where(INSIDE, start, 0.0) if zero else start
    found = descended(INSIDE.double(), start, goal, 30)
    outer = torch.where(INSIDE, 0.0, gamma)
    whole, inner = misfit(gamma, found, goal), misfit(INSIDE.double(), found, goal)
    printed = float((outer * goal).square().sum())
    general = float((outer * (start - goal)).square().sum())
    assert whole == pytest.approx(inner + general)
    assert (whole == pytest.approx(inner + printed)) is zero
    assert general <= 0.3**2 * float(torch.where(INSIDE, 0.0, start - goal).square().sum())
