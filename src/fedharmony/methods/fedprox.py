"""FedProx: a quadratic pull of each client towards the model it received.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, arXiv 1812.06127.

====================================================  ============================
``h_k(θ) = F_k(θ) + (μ/2) ‖θ − θ^t‖²``                ``pull``, its gradient ``μ (θ − θ^t)``
``θ^{t+1} = Σ_k p_k θ_k``                             ``aggregate`` of the base class
====================================================  ============================

The pull is part of the gradient and passes through the optimiser: Adam's moments rescale it per
coordinate. This is what published code with Adam does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from annotated_types import Ge

from fedharmony.methods.base import Method, methods, stacked
from fedharmony.types import Group, Groups, Tensors


@methods.register("fedprox")
class FedProx(Method):
    """Local training with a pull towards the received model (Li et al., 2020)."""

    @dataclass(frozen=True)
    class Config(Method.Config):
        """Settings of FedProx.

        Attributes:
            mu: μ, for the mean task loss; 0 is FedAvg.
        """

        mu: Annotated[float, Ge(0)] = 0.01

        REMOVED: ClassVar[Mapping[str, str]] = {
            "placement": "the pull is part of the gradient, as 'coupled' was; leave it out"
        }

    config: Config

    search: ClassVar[Mapping[str, Sequence[Any]]] = {"mu": (1e-4, 1e-3, 1e-2, 1e-1, 1.0)}

    @stacked
    def pull(self, params: Group, start: Group, message: Groups, carry: Tensors) -> Tensors:
        """``μ (θ − θ^t)``: the gradient of ``(μ/2) ‖θ − θ^t‖²``; nothing at all for μ = 0."""
        mu = self.config.mu
        return {name: mu * (params[name] - start[name]) for name in params} if mu else {}
