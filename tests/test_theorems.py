"""Theorems 1 and 2 of FedHarmony (arXiv 2604.28024), checked with numbers.

Both are about a free matrix R, ``f(R) = ‖Γ ∘ (R − R*)‖²_F`` and gradient descent with step η. Every
entry is by itself: ``R(T) − R* = (1 − 2ηγ²)^T (R(0) − R*)``. From that the printed bounds can be
recomputed; one of them does not hold.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from fedharmony.correlation import discrepancy, pair_mask
from fedharmony.paper.descent import BLOCKS, ETA, INSIDE, Descent, bound, drawn, slow_pair
from fedharmony.paper.items.theorems import both_sides


@pytest.mark.parametrize("seed", range(3))
def test_every_entry_descends_by_itself(seed: int) -> None:
    case = drawn(seed)
    exact = (1 - 2 * ETA * case.gamma**2) ** 50 * (case.start - case.goal)
    torch.testing.assert_close(case.after(50) - case.goal, exact)


@pytest.mark.parametrize("blocks", [True, False])
def test_the_alignment_loss_descends_like_that(blocks: bool) -> None:
    """Γ is 0 or 1 in the algorithm: "No-Block" is Γ ≡ 1, blocks are its mask; autograd agrees."""
    case = drawn(0)
    ids = BLOCKS if blocks else torch.zeros_like(BLOCKS)
    pairs = pair_mask(ids, diagonal=True)
    matrix = case.start.clone().requires_grad_()
    (slope,) = torch.autograd.grad(discrepancy(matrix, case.goal, pairs, reduction="sum"), matrix)
    masked = replace(case, gamma=pairs.double())
    torch.testing.assert_close(case.start - ETA * slope, masked.after(1))


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_inside_blocks_holds_and_is_loose(seed: int) -> None:
    """``f_blk(T) ≤ (1 − 2ηγ_in²)^T f_blk(0)``; the exponent may even be 2T."""
    case = replace(drawn(seed), gamma=INSIDE.double() * 0.7)
    path = case.path(100)
    for steps in (1, 10, 100):
        assert path[steps] <= bound(path[0], 0.7, steps)
        assert path[steps] <= bound(path[0], 0.7, 2 * steps) * (1 + 1e-9) + 1e-25 * path[0]


def test_the_full_bound_fails_as_printed() -> None:
    """With ``γ_out`` the largest weight outside: the smallest one decides how slow the end is.

    f(0) = 48 · 1 + 94 · 0.09 + 2 · 0.0004 = 56.4608. The factor is 1 − 2 · 0.1 · 0.09 = 0.982; the
    pair contracts by (1 − 2 · 0.1 · 0.0004)² = 0.99984 a step: first above the bound at T = 621.
    """
    path = slow_pair().path(1000)
    assert path[0] == pytest.approx(56.4608)
    violated = [path[steps] > bound(path[0], 0.3, steps) for steps in (620, 621, 1000)]
    assert violated == [False, True, True]
    assert all(f <= bound(path[0], 0.02, t) for t, f in enumerate(path))  # the smallest weight
    assert path[1000] == pytest.approx(6.817e-4, rel=1e-3)
    assert bound(path[0], 0.3, 1000) == pytest.approx(7.299e-7, rel=1e-3)


def test_the_full_bound_holds_where_all_outer_weights_are_equal() -> None:
    path = replace(slow_pair(), gamma=torch.where(INSIDE, 1.0, 0.3).double()).path(1000)
    assert all(f <= bound(path[0], 0.3, t) for t, f in enumerate(path))


def test_without_outer_weights_both_objectives_are_one() -> None:
    """γ_out = 0: the printed bound says nothing, and nothing is accelerated."""
    full = drawn(1)
    block = full.inside()
    for steps in (1, 20):
        one, other = block.after(steps), full.after(steps)
        assert block.misfit(one) == pytest.approx(block.misfit(other))
        torch.testing.assert_close(one[INSIDE], other[INSIDE])  # the same path inside blocks
        assert torch.equal(one[~INSIDE], full.start[~INSIDE])  # and none outside


@pytest.mark.parametrize("zero", [True, False])
def test_theorem_2_needs_a_start_that_is_zero_outside(zero: bool) -> None:
    """``f_full(R_blk) = f_blk(R_blk) + ‖Γ_out ∘ E‖²`` with E = R* outside, if R(0) is 0 there.

    In general the second term is ``‖Γ_out ∘ (R(0) − R*)‖²``: descent inside blocks never moves
    entries outside. It is a summand, and at most γ_out² times the squared norm.
    """
    case: Descent = drawn(2)
    case = replace(case, start=torch.where(INSIDE, case.start, 0.0)) if zero else case
    whole, printed, general = both_sides(case)
    assert whole == pytest.approx(general)
    assert (whole == pytest.approx(printed)) is zero
    apart = torch.where(INSIDE, 0.0, case.start - case.goal)
    inner = case.inside().misfit(case.inside().after(30))
    assert general - inner <= 0.3**2 * float(apart.square().sum())
