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
equal work, and then the result is FedAvg's to the bit. (With a proximal local objective the
authors' code has ``τ_eff = Σ p_k τ_k``, and A > 1 even then.) Nothing multiplies by the learning
rate: it is inside Δ_k.

Deviation: clients send θ_k, from which the server, which knows θ^t, forms Δ_k.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

from annotated_types import Ge, Lt

from fedharmony.errors import ConfigError
from fedharmony.methods.base import Method, Outcome, Task, methods, stacked
from fedharmony.methods.fedprox import proximal
from fedharmony.types import PARAMS, Group, Groups, Messages, Record, Replies, Tensors

MOMENTUM = "momentum"  # state: the server's momentum buffer, float64


@methods.register("fednova")
class FedNova(Method):
    """Updates normalised by local work (Wang et al., 2020)."""

    @dataclass(frozen=True)
    class Config(Method.Config):
        """Settings of FedNova.

        Attributes:
            mu: weight μ of a pull ``μ (θ − θ^t)`` on clients (plain SGD only); 0 is none.
            tau_eff: "mean" is the method: τ_eff = Σ p_k ‖a_k‖₁. "ones" sets τ_eff = 1, a
                *diagnostic*: it shows how results collapse when the server divides by the local
                work and does not multiply by τ_eff. Such runs are named ``fednova-diagnostic``.
            max_amplification: upper limit of A; none leaves it alone, 1 gives ``Σ q_k θ_k``.
            server_momentum: of the server's step; 0 is none.
        """

        mu: Annotated[float, Ge(0)] = 0.0
        tau_eff: Literal["mean", "ones"] = "mean"
        max_amplification: Annotated[float, Ge(1)] | None = None
        server_momentum: Annotated[float, Ge(0), Lt(1)] = 0.0

    config: Config

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "default": {},
        "diagnostic": {"tau_eff": "ones"},
    }
    search: ClassVar[Mapping[str, Sequence[Any]]] = {"max_amplification": (1.0, 1.5, 3.0)}

    def __init__(self, config: Config, task: Task) -> None:
        super().__init__(config, task)
        if config.mu > 0 and task.optimiser != "sgd":
            raise ConfigError(
                f"methods.fednova.mu = {config.mu:g} needs train.optimiser = 'sgd': with a pull, "
                f"‖a_k‖₁ is known for plain SGD alone, and this is {task.optimiser!r}. Set mu to "
                "0, or use plain SGD."
            )
        if config.mu > 0 and task.schedule != "constant":
            raise ConfigError(
                f"methods.fednova.mu = {config.mu:g} needs train.schedule = 'constant': with a "
                "pull, ‖a_k‖₁ is known for one learning rate alone. Set mu to 0, or leave the "
                "schedule out."
            )
        if config.mu * task.lr >= 1:
            raise ConfigError(
                f"methods.fednova.mu · train.lr = {config.mu * task.lr:g} must be below 1, or the "
                "pull overshoots. Lower one of the two."
            )

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

    @stacked
    def pull(self, params: Group, start: Group, message: Groups, carry: Tensors) -> Tensors:
        """``μ (θ − θ^t)`` of a proximal local objective."""
        return proximal(self.config.mu, params, start)

    def work(self, steps: int) -> float:
        """‖a_k‖₁ after τ local steps.

        ``τ`` for SGD; ``(τ − ρ (1 − ρ^τ)/(1 − ρ)) / (1 − ρ)`` for momentum ρ;
        ``(1 − (1 − ημ)^τ) / (ημ)`` for proximal SGD: summed step by step, since for small 1 − ρ or
        ημ these forms cancel. ``τ`` for Adam, whose bias-corrected first moment weighs past
        gradients with weights that sum to 1 at every step.
        """
        rho = self.task.momentum if self.task.optimiser == "momentum" else 0.0
        shrink = self.task.lr * self.config.mu
        work = velocity = 0.0
        for _ in range(steps):
            velocity = rho * velocity + 1
            work = (1 - shrink) * work + velocity
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
            effort += weight * ((steps if self.config.mu > 0 else work) / unit)
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
        moved = {n: (1 - factor) * t.double() + factor * after[n] for n, t in before.items()}
        groups: dict[str, Group] = {}
        if self.config.server_momentum > 0:
            # u ← γ u + (θ − θ') with the plain step's result θ'; then θ − u.
            past, gamma = state.get(MOMENTUM), self.config.server_momentum
            step = {n: t.double() - moved[n] for n, t in before.items()}
            velocity = {n: gamma * past[n] + t for n, t in step.items()} if past else step
            moved = {n: t.double() - velocity[n] for n, t in before.items()}
            groups[MOMENTUM] = velocity
        groups[PARAMS] = {n: t.to(before[n].dtype) for n, t in moved.items()}
        return Outcome(
            averaged.replace(groups),
            mean.weights,
            {"amplification": amplification, "server_step": factor},
            mean.left_out,
        )
