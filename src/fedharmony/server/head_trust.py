"""Which clients' sums a closed-form head is made of, where clients may lie.

A mean or median of sums would not do: of most labels most clients have no image. But sums alone
say how well any linear head v fits the images behind them, without the images::

    Σ (y − vᵀf̃)² = Σ y − 2 vᵀB_k + vᵀA_k v        (y² = y for labels 0 and 1)

So the head is fitted to all clients, those that it fits far worse than the median client are left
out, and this is done over until nobody comes or goes: least squares with outliers trimmed, client
by client. Sums that cannot be true are left out first: of more images than the client announced,
with more images of a label than there are, or no sums of squares.

What passes: lies that fit as well as the truth, for instance of a client that swaps two labels
alike. All sums are held until the last reply.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor

from fedharmony.engine.head_sums import gram_of
from fedharmony.robust.base import median
from fedharmony.solve import solve_spd
from fedharmony.types import Group

#: Left out is whose error per image and label is above this many medians.
TOO_MUCH = 2.0
#: How far below 0 an eigenvalue may lie by rounding, in units of the largest diagonal entry.
ROUNDING = 1e-9
#: How often the head is fitted over.
FITS = 10


def trusted(sums: Sequence[Group], images: Sequence[int], ridge: float) -> list[Group]:
    """The sums that are believed, of clients that have announced so many images.

    ρ is in units of the mean square of a feature.
    """
    possible = [own for own, n in zip(sums, images, strict=True) if _can_be_true(own, n)]
    kept = possible
    for _ in range(FITS):
        if not kept:
            break
        head = _fit(kept, ridge)
        errors = torch.tensor([_error(own, head) for own in possible], dtype=torch.float64)
        most = TOO_MUCH * median(errors)
        before, kept = kept, [s for s, e in zip(possible, errors, strict=True) if e <= most]
        if len(before) == len(kept) and all(a is b for a, b in zip(before, kept, strict=True)):
            break
    return kept


def _can_be_true(sums: Group, images: int) -> bool:
    """Whether no more images, and of no label more than these, stand behind the sums.

    And whether A_k is a sum of squares, so that no v gives a negative vᵀA_k v.
    """
    counted, positive = sums["gram"][:, -1], sums["cross"][:, -1]  # the constant's last entries
    if not bool((counted <= images + 0.5).all() and (positive <= counted + 0.5).all()):
        return False
    gram = gram_of(sums)
    rounding = ROUNDING * gram.diagonal(dim1=-2, dim2=-1).abs().amax(-1).clamp(min=1e-12)
    shifted = gram + rounding[:, None, None] * torch.eye(gram.shape[-1]).to(gram)
    return not bool(torch.linalg.cholesky_ex(shifted).info.any())


def _fit(sums: Sequence[Group], ridge: float) -> Tensor:
    """Least squares on labels 0 and 1, (C, D + 1)."""
    gram = functools.reduce(torch.add, map(gram_of, sums))
    cross = functools.reduce(torch.add, [own["cross"] for own in sums])
    size = gram.shape[-1]
    shift = ridge * gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=1e-12)
    penalised = gram + shift[:, None, None] * torch.eye(size).to(gram)
    return solve_spd(penalised, cross.unsqueeze(-1)).squeeze(-1)


def _error(sums: Group, head: Tensor) -> float:
    """Mean square of ``y − vᵀf̃`` over a client's images and (known) labels."""
    gram, cross = gram_of(sums), sums["cross"]
    squares = (head.unsqueeze(-2) @ gram @ head.unsqueeze(-1)).flatten()
    total = cross[:, -1] - 2 * (head * cross).sum(-1) + squares
    count = gram[:, -1, -1].expand(len(cross)).sum()
    return float(total.sum() / count.clamp(min=1.0))
