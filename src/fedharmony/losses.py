"""Multi-label losses, written for one client's batch.

Convention for the whole package: the task loss is the *mean* over the entries that count (images ×
labels). Every relative coefficient (alignment weight, proximal weight) refers to this convention.
"""

from __future__ import annotations

from typing import NamedTuple

import torch.nn.functional as F
from torch import Tensor


class Batch(NamedTuple):
    """One client's mini-batch beside its images.

    Attributes:
        labels: (B, C) float, 0 or 1.
        rows: (B,) float; 1 for an image, 0 for a padding row.
        counted: (B, C) float; 1 where the label is known and the row is an image.
    """

    labels: Tensor
    rows: Tensor
    counted: Tensor


def binary_cross_entropy(logits: Tensor, batch: Batch) -> Tensor:
    """Mean binary cross-entropy over the counted entries; 0 when none counts.

    ``−Σ m [y log σ(z) + (1−y) log(1−σ(z))] / Σ m`` with logits z (B, C) and mask m = ``counted``.
    Leading dimensions are clients: (..., B, C) gives (...).

    >>> import torch
    >>> ones = torch.ones(1, 2)
    >>> batch = Batch(labels=torch.tensor([[1.0, 0.0]]), rows=torch.ones(1), counted=ones)
    >>> round(float(binary_cross_entropy(torch.zeros(1, 2), batch)), 4)  # log 2
    0.6931
    """
    entries = F.binary_cross_entropy_with_logits(
        logits, batch.labels.to(logits.dtype), reduction="none"
    )
    counted = batch.counted
    return (entries * counted).sum((-2, -1)) / counted.sum((-2, -1)).clamp(min=1.0)
