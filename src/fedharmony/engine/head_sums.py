"""What a client sends so that the server can solve a linear head: sums over its features.

``A_k = Σ f̃ f̃ᵀ`` and ``B_k = Σ y f̃ᵀ`` with f̃ = [f, 1], where f are the features of an image in the
received backbone and y its labels. Only these sums leave a client. Where labels are unknown, a
label's sums run over the images on which it is known: one matrix A_k per label.
``server/head_start.py`` solves the head.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedharmony.correlation import pack_upper, unpack_upper
from fedharmony.losses import Batch
from fedharmony.methods.base import Sweep, Task, zeros
from fedharmony.types import Form, Group, Tensors

SUMS = "head_sums"  # reply: A_k (upper triangle) and B_k


def matrices(task: Task) -> int:
    """How many matrices A_k a client sends: one, or one per label where some are unknown."""
    return task.classes if task.unknown_labels else 1


def head_sums(task: Task, scale: float = 1.0) -> Sweep:
    """A_k and B_k of f / scale in float64; the last column counts images, or those with a label.

    Where the length of all sums together is bounded, features much longer than the 1 beside them
    would leave little of Σ y f̃ᵀ: it grows with their length, Σ f̃ f̃ᵀ with its square.
    """
    size, classes, count = task.width + 1, task.classes, matrices(task)
    forms = {
        "gram": Form((count, size * (size + 1) // 2), torch.float64),
        "cross": Form((classes, size), torch.float64),
    }

    start = zeros(gram=(count, size, size), cross=(classes, size))

    def fold(carry: Tensors, features: Tensor, batch: Batch) -> Tensors:
        f = features.double() / scale
        f = torch.cat([f, torch.ones_like(f[:, :1])], dim=-1)
        rows = batch.rows.unsqueeze(-1)
        known = (batch.known if isinstance(batch.known, Tensor) else rows).double()
        counted = known if count > 1 else rows.double()
        return {
            "gram": carry["gram"] + (counted.mT.unsqueeze(1) * f.mT) @ f,
            "cross": carry["cross"] + (batch.labels * known).mT @ f,
        }

    def finish(carry: Tensors, params: Group) -> Tensors:
        return {**carry, "gram": pack_upper(carry["gram"])}

    return Sweep(SUMS, "features", start, fold, finish, lambda params: forms)


def gram_of(sums: Group) -> Tensor:
    """A_k as matrices, (1 or C, D + 1, D + 1)."""
    return unpack_upper(sums["gram"], sums["cross"].shape[-1])
