"""FedNova: updates normalised by the amount of local work behind them.

Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization",
NeurIPS 2020, arXiv 2007.07481. Idea: a client that takes more local steps moves further and so gets
an implicitly larger say; dividing its update by ‖a_k‖₁, the sum of the coefficients with which past
gradients enter it, removes that.

====================================================  ============================
``Δ_k = θ^t − θ_k``, ``d_k = Δ_k / ‖a_k‖₁``           ``work`` gives ‖a_k‖₁
``τ_eff = Σ p_k ‖a_k‖₁``                              ``aggregate``
``θ^{t+1} = θ^t − τ_eff Σ p_k d_k``                   ``aggregate``
====================================================  ============================

Written with ``q_k ∝ p_k / ‖a_k‖₁`` the step is ``θ^{t+1} = θ^t + A (Σ q_k θ_k − θ^t)``, where
``A = τ_eff Σ p_k / ‖a_k‖₁ ≥ 1`` is the amplification: 1 exactly when all clients do equal work, and
then the result is FedAvg's to the bit. Nothing multiplies by the learning rate: it is inside Δ_k.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt
from torch import Tensor

from fedharmony.aggregate import RunningMean
from fedharmony.errors import ConfigError
from fedharmony.methods.base import Groups, Method, Outcome, Task, methods, stacked
from fedharmony.types import BUFFERS, PARAMS, Record, Reply, Tensors

MOMENTUM = "momentum"  # state: the server's momentum buffer


@methods.register("fednova")
class FedNova(Method):
    """Updates normalised by local work (Wang et al., 2020)."""

    @dataclass(frozen=True)
    class Config:
        """Settings of FedNova.

        Attributes:
            mu: weight of a proximal term in the local objective (plain SGD only); 0 is none.
            tau_eff: "mean" is the method: τ_eff = Σ p_k ‖a_k‖₁. "ones" sets τ_eff = 1, a
                *diagnostic*: it shows how results collapse when the server divides by the local
                work and does not multiply by τ_eff. Such runs are named ``fednova-diagnostic``.
            max_amplification: upper limit of A; none leaves it alone.
            server_momentum: of the server's step; 0 is none.
        """

        mu: Annotated[float, Ge(0)] = 0.0
        tau_eff: Literal["mean", "ones"] = "mean"
        max_amplification: Annotated[float, Ge(1)] | None = None
        server_momentum: Annotated[float, Ge(0), Lt(1)] = 0.0

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "diagnostic": {"tau_eff": "ones"},
    }
    search: ClassVar[Mapping[str, Sequence[Any]]] = {"max_amplification": (1.0, 1.5, 3.0)}

    def __init__(self, config: Config, task: Task) -> None:
        super().__init__(config, task)
        if config.mu > 0 and task.optimiser != "sgd":
            raise ConfigError(
                f"methods.fednova.mu = {config.mu:g} needs train.optimiser = 'sgd': with "
                f"{task.optimiser!r} the sum of the coefficients is not known. Set mu to 0, or use "
                "plain SGD."
            )
        if config.mu * task.lr >= 1:
            raise ConfigError(
                f"methods.fednova.mu · train.lr = {config.mu * task.lr:g} must be below 1, or the "
                "pull overshoots. Lower one of the two."
            )

    @classmethod
    def suffix(cls, config: Any) -> str:
        """Never show the diagnostic under the method's name."""
        return "-diagnostic" if config.tau_eff == "ones" else ""

    @stacked
    def pull(
        self,
        params: Mapping[str, Tensor],
        start: Mapping[str, Tensor],
        message: Groups,
        carry: Tensors,
    ) -> Tensors:
        """``μ (θ − θ^t)`` of a proximal local objective."""
        if self.config.mu == 0:
            return {}
        return {name: self.config.mu * (params[name] - start[name]) for name in params}

    def work(self, steps: int) -> float:
        """‖a_k‖₁ after τ local steps, by local solver.

        ``τ`` for SGD; ``(τ − ρ (1 − ρ^τ)/(1 − ρ)) / (1 − ρ)`` for momentum ρ;
        ``(1 − (1 − ημ)^τ) / (ημ)`` for proximal SGD; ``τ`` for Adam, whose bias-corrected first
        moment weighs past gradients with weights that sum to 1 at every step.
        """
        if self.task.optimiser == "momentum":
            rho = self.task.momentum
            return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
        if self.config.mu > 0:
            shrink = self.task.lr * self.config.mu
            return float((1 - (1 - shrink) ** steps) / shrink)
        return float(steps)

    def aggregate(
        self, state: Record, round: int, sent: Mapping[int, Record], replies: Iterator[Reply]
    ) -> Outcome:
        """``θ ← θ + A (Σ q_k θ_k − θ)``; buffers are averaged plainly."""
        params, buffers = RunningMean(), RunningMean()
        shares: dict[int, float] = {}
        total = effort = unit = 0.0  # Σ w_k; Σ w_k of τ_eff's summands; the first client's work
        for reply in replies:
            steps = int(reply.record.scalars["steps"])
            weight, work = self.weight(reply), self.work(steps)
            unit = unit or work  # work is measured in units of the first client's: equal gives 1
            shares[reply.client] = weight * (unit / work)
            params.add(reply.record.get(PARAMS), shares[reply.client])
            buffers.add(reply.record.get(BUFFERS), weight)
            total += weight
            effort += weight * ((steps if self.config.mu > 0 else work) / unit)
        if not shares:
            return Outcome(state)
        per_work = sum(shares.values()) / total  # Σ p_k / ‖a_k‖₁, in 1/unit
        factor = (effort / total) * per_work
        log = {"amplification": factor}
        if self.config.tau_eff == "ones":
            factor = per_work / unit
        elif self.config.max_amplification is not None:
            factor = min(factor, self.config.max_amplification)
        log["server_step"] = factor
        before, mean = state.get(PARAMS), params.result(exact=True)
        moved = {n: (1 - factor) * t.double() + factor * mean[n] for n, t in before.items()}
        groups: dict[str, Mapping[str, Tensor]] = {}
        if self.config.server_momentum > 0:
            moved = groups[MOMENTUM] = self._accelerate(state, moved)
            moved = {n: before[n].double() - t for n, t in moved.items()}
        groups[PARAMS] = {n: t.to(before[n].dtype) for n, t in moved.items()}
        groups[BUFFERS] = {**state.get(BUFFERS), **buffers.result()}
        normalised = {k: share / (per_work * total) for k, share in shares.items()}
        return Outcome(state.replace(groups), normalised, log)

    def _accelerate(self, state: Record, moved: Tensors) -> Tensors:
        """``u ← ρ u + (θ − θ')``: the momentum buffer after a step to θ'."""
        before, buffer = state.get(PARAMS), state.get(MOMENTUM)
        return {
            name: self.config.server_momentum * buffer[name] + (before[name].double() - t)
            if buffer
            else before[name].double() - t
            for name, t in moved.items()
        }
