"""Heads: what turns the features of a backbone into one output per label."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedharmony.models.base import Head, Shapes, linear
from fedharmony.types import Tensors


@dataclass(frozen=True)
class LinearHead(Head):
    """One logit per label: ``z = W f + b`` (``head.weight``, ``head.bias``).

    >>> head = LinearHead(width=4, classes=3)
    >>> params = head.init(torch.Generator().manual_seed(0))
    >>> {name: tuple(tensor.shape) for name, tensor in params.items()}
    {'head.weight': (3, 4), 'head.bias': (3,)}

    Attributes:
        width: feature width D.
        classes: number of labels C.
    """

    width: int
    classes: int

    def shapes(self) -> Shapes:
        """``head.weight`` (C, D) and ``head.bias`` (C,)."""
        return {"head.weight": (self.classes, self.width), "head.bias": (self.classes,)}

    def init(self, generator: torch.Generator) -> Tensors:
        """Small random weights (normal, σ = 0.02, cut at ±2) and zero biases."""
        weight = torch.empty(self.classes, self.width)
        torch.nn.init.trunc_normal_(weight, std=0.02, generator=generator)
        return {"head.weight": weight, "head.bias": torch.zeros(self.classes)}

    def apply(
        self,
        params: Mapping[str, Tensor],
        features: Tensor,
        inputs: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Logits (M, B, C) from features (M, B, D)."""
        return linear(features, params["head.weight"], params["head.bias"])
