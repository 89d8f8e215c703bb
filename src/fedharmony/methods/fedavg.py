"""FedAvg: train locally, average the models by their number of images.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, arXiv 1602.05629.

====================================================  ============================
``F_k(θ) = (1/n_k) Σ_i BCE(θ; x_i, y_i)``             ``loss`` of the base class
``θ^{t+1} = Σ_{k∈S_t} (n_k / Σ_{j∈S_t} n_j) θ_k``     ``aggregate`` of the base class
====================================================  ============================

Deviation: the first printing of the paper normalises by the images of all clients; with partial
participation the weights must sum to one over the clients that replied.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedharmony.methods.base import Method, methods


@methods.register("fedavg")
class FedAvg(Method):
    """Local training, models averaged by data size (McMahan et al., 2017)."""

    @dataclass(frozen=True)
    class Config(Method.Config):
        """FedAvg has no settings of its own."""
