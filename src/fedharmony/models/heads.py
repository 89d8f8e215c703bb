"""Heads: what turns the features of a backbone into one output per label."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedharmony.models.base import Head, Shapes, linear
from fedharmony.types import Group, Tensors


@dataclass(frozen=True)
class LinearHead(Head):
    """One logit per label: ``z = W f + b`` (``head.weight``, ``head.bias``).

    >>> head = LinearHead(width=4, classes=3)
    >>> params = head.init(torch.Generator().manual_seed(0))
    >>> {name: tuple(tensor.shape) for name, tensor in params.items()}
    {'head.weight': (3, 4), 'head.bias': (3,)}
    """

    width: int
    classes: int

    no_closed_form = ""

    def shapes(self) -> Shapes:
        """``head.weight`` (C, D) and ``head.bias`` (C,)."""
        return {"head.weight": (self.classes, self.width), "head.bias": (self.classes,)}

    def init(self, generator: torch.Generator) -> Tensors:
        """Small random weights (normal, σ = 0.02, cut at ±2) and zero biases."""
        weight = torch.empty(self.classes, self.width)
        torch.nn.init.trunc_normal_(weight, std=0.02, generator=generator)
        return {"head.weight": weight, "head.bias": torch.zeros(self.classes)}

    def apply(self, params: Group, features: Tensor, inputs: Group | None = None) -> Tensor:
        """Logits (M, B, C) from features (M, B, D)."""
        return linear(features, params["head.weight"], params["head.bias"])


@dataclass(frozen=True)
class SphereHead(Head):
    """Cosines between unit features and frozen orthonormal directions: ``o = W φ/‖φ‖ + b``.

    W and b (zero at first) are never trained and never sent: everybody draws them from the model's
    seed. A later calibration may replace them.

    >>> head = SphereHead(width=4, classes=3)
    >>> weight = head.init(torch.Generator().manual_seed(0))["head.weight"]
    >>> torch.allclose(weight @ weight.T, torch.eye(3), atol=1e-6)
    True

    Attributes:
        classes: number of labels C, at most the dimension of the sphere.
        projection: dimension of the sphere where a trained linear map leads to it; none means D.
    """

    width: int
    classes: int
    projection: int | None = None

    frozen = frozenset({"head.weight", "head.bias"})
    no_closed_form = (
        "its directions are fixed so that all clients learn towards the same ones, and it has a "
        "calibration in closed form of its own, after the last round"
    )

    def shapes(self) -> Shapes:
        """``head.weight`` (C, L), ``head.bias`` (C,), and ``head.project.weight`` (L, D) if any."""
        sphere = self.projection or self.width
        shapes: Shapes = {"head.weight": (self.classes, sphere), "head.bias": (self.classes,)}
        if self.projection:
            shapes["head.project.weight"] = (sphere, self.width)
        return shapes

    def init(self, generator: torch.Generator) -> Tensors:
        """Orthonormal rows, zero biases and, if there is one, a Gaussian map to the sphere."""
        sphere = self.projection or self.width
        params = {"head.weight": orthonormal_rows(self.classes, sphere, generator)}
        params["head.bias"] = torch.zeros(self.classes)
        if self.projection:
            weight = torch.empty(sphere, self.width)
            torch.nn.init.trunc_normal_(weight, std=self.width**-0.5, generator=generator)
            params["head.project.weight"] = weight
        return params

    def embed(self, params: Group, features: Tensor) -> Tensor:
        """φ (M, B, L) before it is scaled to the sphere: its length is worth watching."""
        return features @ params["head.project.weight"].mT if self.projection else features

    def apply(self, params: Group, features: Tensor, inputs: Group | None = None) -> Tensor:
        """Cosines (M, B, C), 0 for φ = 0; after a calibration, its linear scores."""
        z = F.normalize(self.embed(params, features), dim=-1)
        return linear(z, params["head.weight"], params["head.bias"])


def orthonormal_rows(rows: int, width: int, generator: torch.Generator) -> Tensor:
    """Random orthonormal rows (rows, width), rows <= width, uniform over all such.

    Found in float64 (the Q of a Gaussian matrix, with the signs that make R's diagonal positive),
    given in float32: orthonormal up to that rounding.

    >>> rows = orthonormal_rows(2, 3, torch.Generator().manual_seed(0))
    >>> torch.allclose(rows @ rows.T, torch.eye(2), atol=1e-6)
    True
    """
    gaussian = torch.randn(width, rows, generator=generator, dtype=torch.float64)
    q, r = torch.linalg.qr(gaussian)
    signed: Tensor = (q * r.diagonal().sign()).mT
    return signed.contiguous().float()
