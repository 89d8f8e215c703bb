"""FedCurv: each client is pulled to the other clients' optima, by their Fisher information.

Shoham et al., "Overcoming Forgetting in Federated Learning on Non-IID Data", NeurIPS 2019 workshop,
arXiv 1910.07796. Elastic weight consolidation carried over to clients: coordinates that matter to
the others are held, the rest may move.

====================================================  ============================
``u_j = I_j``, ``v_j = I_j ∘ θ̂_j``                    ``sweep``
``U = Σ_j u_j``, ``V = Σ_j v_j`` (unweighted)         ``aggregate``
``U_{−k} = U − u_k``, ``V_{−k} = V − v_k``            ``carry``, from the client's own memory
``F_k + λ Σ_{j≠k} Σ_d I_jd (θ_d − θ̂_jd)²``            ``pull``: ``2λ (U_{−k} ∘ θ − V_{−k})``
====================================================  ============================

``I_j`` is the diagonal Fisher information of the C independent Bernoulli outputs at θ̂_j: the mean
over images of the squared gradient of ``Σ_c BCE_c``, one gradient per image. A square of batch
means would be smaller by about the batch size.

Deviation: the paper lets every client take part in every round; here U and V are sums over those
who took part last. Deviation: the largest entries of I_j are cut (``clip_quantile``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from fedharmony.losses import Batch, LossSettings, entries
from fedharmony.methods.base import (
    ClientView,
    Method,
    Outcome,
    Sweep,
    members,
    methods,
    rounds_of,
    stacked,
)
from fedharmony.types import PARAMS, Form, Group, Groups, Messages, Record, Replies, Tensors

FISHER = "fisher"  # reply: u_k, v_k; message: of which round the client's share in U, V is
SUM_U, SUM_V = "fisher_u", "fisher_v"  # state and message: U, V
MEMBERS = "fisher_members"  # state: whose share is in U and V, and of which round it is


@methods.register("fedcurv")
class FedCurv(Method):
    """Pull towards the other clients' optima by Fisher information (Shoham et al., 2019)."""

    @dataclass(frozen=True)
    class Config(Method.Config):
        """Settings of FedCurv.

        Attributes:
            weight: λ, for the mean task loss; 0 is FedAvg, at FedAvg's cost.
            fisher_labels: gradients at the "true" labels (empirical Fisher), or at labels "sampled"
                from the model (Fisher).
            fisher_samples: at most this many images of a client, drawn each round.
            clip_quantile: larger entries of I are cut to this quantile of the client's; 1 is off.
        """

        weight: Annotated[float, Ge(0)] = 1e-2
        fisher_labels: Literal["true", "sampled"] = "true"
        fisher_samples: Annotated[int, Ge(1)] = 500
        clip_quantile: Annotated[float, Gt(0), Le(1)] = 0.999

        REMOVED: ClassVar[Mapping[str, str]] = {
            "policy": "U and V are of the last cohort, as with 'last_cohort'; leave it out",
            "payload": "u and v are sent in the model's precision; leave it out",
        }

    config: Config

    search: ClassVar[Mapping[str, Sequence[Any]]] = {"weight": (1e-3, 1e-2, 1e-1, 1.0)}

    @property
    def no_sums(self) -> str:
        """The Fisher information of each client."""
        return (
            "its server side reads u and v of single clients. Use federation.server_sees = "
            "'replies', or fedprox"
        )

    # -- client ------------------------------------------------------------------------------------

    def broadcast(self, state: Record, round: int, clients: Sequence[int]) -> Messages:
        """θ, U and V for everybody; to each client, of which round its own share in them is."""
        messages = super().broadcast(state, round, clients)
        if MEMBERS not in state.groups:
            return messages
        rounds = rounds_of(state.get(MEMBERS))
        sums = {group: state.get(group) for group in (SUM_U, SUM_V)}
        return {
            k: messages[k].replace({**sums, FISHER: {"round": torch.tensor(rounds.get(k, -1))}})
            for k in clients
        }

    def carry(self, view: ClientView, message: Record) -> Tensors:
        """``U_{−k}``, ``V_{−k}``: the sums without the client's own share, if they hold one.

        A client whose last reply was refused remembers another share than the sums may hold; then
        it subtracts nothing.
        """
        if SUM_U not in message.groups:
            return {}
        own = int(message.get(FISHER)["round"])
        mine = "round" in view.memory and own == int(view.memory["round"])
        return {
            f"{kind}.{name}": total - view.memory[f"{kind}.{name}"] if mine else total
            for kind, group in (("u", SUM_U), ("v", SUM_V))
            for name, total in message.get(group).items()
        }

    @stacked
    def pull(self, params: Group, start: Group, message: Groups, carry: Tensors) -> Tensors:
        """``2λ (U_{−k} ∘ θ − V_{−k})``."""
        if not carry:
            return {}
        return {
            name: (carry[f"u.{name}"] * theta).sub_(carry[f"v.{name}"]).mul_(2 * self.config.weight)
            for name, theta in params.items()
        }

    def sweep(self) -> Sweep | None:
        """``u_k`` and ``v_k`` of the trained model."""
        config, classes = self.config, self.task.classes
        if config.weight == 0:
            return None

        def start(params: Group) -> Tensors:
            return {"": torch.zeros(())} | {n: torch.zeros_like(t) for n, t in params.items()}

        def draw(generator: torch.Generator, images: int) -> Tensors:
            return {"labels": torch.rand(images, classes, generator=generator)}

        def objective(outputs: Tensor, batch: Batch) -> Tensor:
            if config.fisher_labels == "sampled":
                guess = batch.draws["labels"] < outputs.sigmoid()
                batch = batch._replace(labels=guess.to(outputs.dtype))
            return (entries(LossSettings(), outputs, batch) * (batch.counted > 0)).sum(-1)

        def fold(carry: Tensors, gradients: Tensors, batch: Batch) -> Tensors:
            squares = {n: carry[n] + g.square().sum(0) for n, g in gradients.items()}
            return {"": carry[""] + batch.rows.sum()} | squares

        def finish(carry: Tensors, params: Group) -> Tensors:
            fisher = {n: carry[n] / carry[""] for n in params}
            if config.clip_quantile < 1:
                largest = _quantile(fisher, config.clip_quantile)
                fisher = {n: t.minimum(largest) for n, t in fisher.items()}
            u = {f"u.{n}": t for n, t in fisher.items()}
            return u | {f"v.{n}": fisher[n] * t for n, t in params.items()}

        def forms(params: Group) -> Mapping[str, Form]:
            return {
                f"{kind}.{name}": Form(tuple(t.shape), t.dtype, low)
                for kind, low in (("u", 0.0), ("v", -math.inf))  # u is a mean of squares
                for name, t in params.items()
            }

        return Sweep(
            FISHER,
            "gradients",
            start,
            fold,
            finish,
            forms,
            objective,
            limit=config.fisher_samples,
            draw=draw if config.fisher_labels == "sampled" else None,
        )

    def remember(self, round: int, reply: Record) -> Tensors:
        """What was sent, as it was sent: only that can be taken out of U and V again."""
        sent = reply.get(FISHER)
        return {**sent, "round": torch.tensor(round)} if sent else {}

    # -- server ------------------------------------------------------------------------------------

    def aggregate(self, state: Record, round: int, sent: Messages, replies: Replies) -> Outcome:
        """FedAvg's mean; U and V are plain sums over the last cohort."""
        if self.config.weight == 0:
            return super().aggregate(state, round, sent, replies)
        rounds: dict[int, int] = {}
        sums: Tensors = {}

        def noted() -> Replies:
            for reply in replies:
                rounds[reply.client] = round
                for name, tensor in reply.record.get(FISHER).items():
                    known = name in sums
                    sums[name] = sums[name].add_(tensor) if known else tensor.double().clone()
                yield reply

        outcome = super().aggregate(state, round, sent, noted())
        if not rounds:
            return outcome
        params = state.get(PARAMS)
        U, V = ({n: sums[f"{kind}.{n}"].to(t.dtype) for n, t in params.items()} for kind in "uv")
        total = sum(t.sum(dtype=torch.float64) for t in U.values())
        mean = float(total) / sum(t.numel() for t in U.values())
        return Outcome(
            outcome.state.replace({SUM_U: U, SUM_V: V, MEMBERS: members(rounds)}),
            outcome.weights,
            {**outcome.log, "pull_strength": self.config.weight * mean},
            outcome.left_out,
        )


def _quantile(tensors: Tensors, share: float) -> Tensor:
    """The smallest entry of all tensors that at least ``share`` of the entries do not exceed.

    >>> float(_quantile({"a": torch.tensor([4.0, 1.0]), "b": torch.tensor([[3.0, 2.0]])}, 0.75))
    3.0
    """
    values = torch.cat([t.flatten() for t in tensors.values()])
    above = len(values) - math.ceil(share * len(values))
    # torch.quantile takes no more than 16 million entries.
    return values.topk(above + 1, sorted=False).values.amin()
