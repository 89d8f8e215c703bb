"""How to compute: precision, recorded steps, compiled pieces; results agree up to rounding."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

import torch

from fedharmony.engine.shapes import Shapes
from fedharmony.types import Group, Tensors


@dataclass(frozen=True)
class ComputeMode:
    """How to compute; by default the plain path, which everything else is compared with.

    Attributes:
        half: products in bfloat16; parameters, moments, losses and correlations stay float32.
        graphs: record each shape of step once as a CUDA graph.
        compile: compile the parts of the backbone, and the optimiser's pass, by ``backend``.
        fixed: keep tensors in place and shapes few, as for compiled and recorded steps.
        share: part of a GPU's memory that the run may take.
    """

    half: bool = False
    graphs: bool = False
    compile: bool = False
    fixed: bool = False
    backend: str = "inductor"
    share: float = 1.0

    @property
    def plain(self) -> bool:
        """Whether this is the plain path: float32, neither compiled nor recorded."""
        return not (self.half or self.graphs or self.compile)

    def exact(self) -> ComputeMode:
        """The same for steps of any size: neither compiled nor recorded."""
        return replace(self, graphs=False, compile=False, fixed=False)

    def made_plain(self) -> ComputeMode:
        """The plain path in the same share of memory."""
        return ComputeMode(share=self.share)

    @property
    def shapes(self) -> Shapes:
        """Sizes of tensors: few, where a new shape is expensive."""
        return Shapes(self.graphs or self.compile or self.fixed)

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Where products are taken in half precision."""
        return torch.autocast(device.type, torch.bfloat16) if self.half else nullcontext()

    def product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The type of products, where everything else is ``dtype``."""
        return torch.bfloat16 if self.half else dtype

    def halved(self, tensors: Group) -> frozenset[str]:
        """Names of the weight matrices that the model reads in bfloat16; none in full precision.

        They enter products only. Autocast would copy them at every use; here it is once per step.
        """
        if not self.half:
            return frozenset()
        return frozenset(n for n, t in tensors.items() if n.endswith(".weight") and t.dim() > 2)

    def lowered(self, tensors: Group) -> Tensors:
        """Stacked tensors as the model reads them."""
        half = self.halved(tensors)
        return {n: t.bfloat16() if n in half else t for n, t in tensors.items()}
