"""FedNova: updates normalised by the amount of local work behind them.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020, arXiv 2007.07481. Idea: a client that takes more local steps moves further and so gets
an implicitly larger say; dividing its update by ‖a_k‖₁, the sum of the coefficients with which past
gradients enter it, removes that.

====================================================  ============================
``Δ_k = θ^t − θ_k = η Σ_s a_{k,s} g_{k,s}``           ``work`` gives ‖a_k‖₁
``τ_eff = Σ p_k ‖a_k‖₁``                              ``aggregate``
``θ^{t+1} = θ^t − τ_eff Σ p_k Δ_k / ‖a_k‖₁``          ``aggregate``
====================================================  ============================

Written with ``q_k ∝ p_k / ‖a_k‖₁``, ``Σ q_k = 1``, the step is ``θ^{t+1} = θ^t + A (Σ q_k θ_k −
θ^t)``, where ``A = τ_eff Σ p_k / ‖a_k‖₁ ≥ 1`` is the amplification: 1 exactly when all clients do
equal work, and then the result is FedAvg's to the bit. Nothing multiplies by the learning rate: it
is inside Δ_k.

Deviation: clients send θ_k, from which the server, which knows θ^t, forms Δ_k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge

from fedharmony.methods.base import Method, Outcome, methods
from fedharmony.types import PARAMS, Messages, Record, Replies


@methods.register("fednova")
class FedNova(Method):
    """Updates normalised by local work (Wang et al., 2020)."""

    @dataclass(frozen=True)
    class Config(Method.Config):
        """Settings of FedNova.

        Attributes:
            tau_eff: "mean" is the method: τ_eff = Σ p_k ‖a_k‖₁. "ones" sets τ_eff = 1, a
                *diagnostic*: it shows how results collapse when the server divides by the local
                work and does not multiply by τ_eff. Such runs are named ``fednova-diagnostic``.
            max_amplification: upper limit of A; none leaves it alone, 1 gives ``Σ q_k θ_k``.
        """

        tau_eff: Literal["mean", "ones"] = "mean"
        max_amplification: Annotated[float, Ge(1)] | None = None

        REMOVED: ClassVar[Mapping[str, str]] = {
            "mu": "for a pull on clients use fedprox; leave it out",
            "server_momentum": "leave it out",
        }

    config: Config

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "diagnostic": {"tau_eff": "ones"},
    }
    search: ClassVar[Mapping[str, Sequence[Any]]] = {"max_amplification": (1.0, 1.5, 3.0)}

    @classmethod
    def suffix(cls, config: Method.Config) -> str:
        """Never show the diagnostic under the method's name."""
        assert isinstance(config, cls.Config)
        return "-diagnostic" if config.tau_eff == "ones" else ""

    @property
    def no_sums(self) -> str:
        """The steps of each client."""
        return (
            "its server side counts the steps of each client. Use federation.server_sees = "
            "'replies', or fedavg"
        )

    def work(self, steps: int) -> float:
        """‖a_k‖₁ after τ local steps.

        ``τ`` for SGD; ``(τ − ρ (1 − ρ^τ)/(1 − ρ)) / (1 − ρ)`` for momentum ρ, summed step by step,
        since for small 1 − ρ this form cancels. ``τ`` for Adam, whose bias-corrected first moment
        weighs past gradients with weights that sum to 1 at every step.
        """
        rho = self.task.momentum if self.task.optimiser == "momentum" else 0.0
        work = velocity = 0.0
        for _ in range(steps):
            velocity = rho * velocity + 1
            work += velocity
        return work

    def aggregate(self, state: Record, round: int, sent: Messages, replies: Replies) -> Outcome:
        """``θ ← θ + A (Σ q_k θ_k − θ)`` over clients that took a step; buffers as in FedAvg.

        Work is counted in units of the first client's, so that equal work is exactly 1.
        """
        mean = self.model_mean(state)
        scaled = total = effort = unit = 0.0  # effort / total is τ_eff in units
        for reply in replies:
            steps = int(reply.record.scalars["steps"])
            if steps == 0:
                continue
            weight, work = self.weight(reply), self.work(steps)
            unit = unit or work
            share = weight * (unit / work)
            mean.fold(reply, share, buffers=weight)
            scaled += share
            total += weight
            effort += weight * (work / unit)
        averaged = mean.update(state, exact=True)
        if not mean.weights:  # nobody took a step, or too few for the rule of averaging
            return Outcome(state, left_out=mean.left_out)
        inverse = scaled / total  # Σ p_k / ‖a_k‖₁, in 1/unit
        amplification = factor = (effort / total) * inverse
        if self.config.tau_eff == "ones":
            factor = inverse / unit
        elif self.config.max_amplification is not None:
            factor = min(factor, self.config.max_amplification)
        before, after = state.get(PARAMS), averaged.get(PARAMS)
        moved = {
            n: ((1 - factor) * t.double() + factor * after[n]).to(t.dtype)
            for n, t in before.items()
        }
        return Outcome(
            averaged.replace({PARAMS: moved}),
            mean.weights,
            {"amplification": amplification, "server_step": factor},
            mean.left_out,
        )
