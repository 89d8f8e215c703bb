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

Deviation: the paper lets every client take part in every round; ``policy`` says what U and V hold
when they do not. Deviation: the largest entries of I_j are cut (``clip_quantile``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from fedharmony.errors import ConfigError
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
SEEN = "fisher_of_"  # state, policy "memory": the last (u_j, v_j) of client j

#: Server memory that the policy "memory" may take, in bytes.
LARGEST_TABLE = 16 * 2**30


@methods.register("fedcurv")
class FedCurv(Method):
    """Pull towards the other clients' optima by Fisher information (Shoham et al., 2019)."""

    @dataclass(frozen=True)
    class Config(Method.Config):
        """Settings of FedCurv.

        Attributes:
            weight: λ, for the mean task loss; 0 is FedAvg, at FedAvg's cost.
            policy: U and V from the "last_cohort", or from the last report of every client ever
                seen ("memory": the server keeps 2P numbers per client, for few clients only).
            fisher_labels: gradients at the "true" labels (empirical Fisher), or at labels "sampled"
                from the model (Fisher).
            fisher_samples: at most this many images of a client, drawn each round.
            clip_quantile: larger entries of I are cut to this quantile of the client's; 1 is off.
            payload: "float16" halves what u and v cost, each tensor with a scale of its own.
        """

        weight: Annotated[float, Ge(0)] = 1e-2
        policy: Literal["last_cohort", "memory"] = "last_cohort"
        fisher_labels: Literal["true", "sampled"] = "true"
        fisher_samples: Annotated[int, Ge(1)] = 500
        clip_quantile: Annotated[float, Gt(0), Le(1)] = 0.999
        payload: Literal["float32", "float16"] = "float32"

    config: Config

    search: ClassVar[Mapping[str, Sequence[Any]]] = {"weight": (1e-3, 1e-2, 1e-1, 1.0)}

    @property
    def no_sums(self) -> str:
        """The Fisher information of each client."""
        return (
            "its server side reads u and v of single clients, and with policy = 'memory' it keeps "
            "them. Use federation.server_sees = 'replies', or fedprox"
        )

    def init_state(self, params: Tensors, buffers: Tensors) -> Record:
        """As FedAvg; refuses a table that would not fit."""
        size = 2 if self.config.payload == "float16" else 4
        needed = self.task.clients * 2 * size * sum(t.numel() for t in params.values())
        if self.config.weight and self.config.policy == "memory" and needed > LARGEST_TABLE:
            raise ConfigError(
                f"methods.fedcurv.policy = 'memory' keeps (u, v) of all {self.task.clients:,} "
                f"clients on the server, {needed / 2**30:,.1f} GiB here; "
                f"{LARGEST_TABLE / 2**30:,.0f} GiB is the limit. Use policy = 'last_cohort', fewer "
                "clients or a smaller model."
            )
        return super().init_state(params, buffers)

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
            f"{kind}.{name}": total - _read(view.memory, f"{kind}.{name}") if mine else total
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
            u = self._pack({f"u.{n}": t for n, t in fisher.items()})
            # From u as it is sent: a coordinate without u has no v either, and none is pulled.
            return u | self._pack({f"v.{n}": _read(u, f"u.{n}") * t for n, t in params.items()})

        def forms(params: Group) -> Mapping[str, Form]:
            found = {}
            for kind, low in (("u", 0.0), ("v", -math.inf)):  # u is a mean of squares
                for name, t in params.items():
                    packed = config.payload != "float32"
                    dtype = torch.float16 if packed else t.dtype
                    found[f"{kind}.{name}"] = Form(tuple(t.shape), dtype, low)
                    if packed:
                        found[f"scale.{kind}.{name}"] = Form((), t.dtype, 0.0)
            return found

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

    def _pack(self, tensors: Tensors) -> Tensors:
        """As sent: float32, or float16 in units of each tensor's largest entry."""
        if self.config.payload == "float32":
            return tensors
        scales = {n: t.abs().amax().clamp(min=1e-30) for n, t in tensors.items()}
        return {n: (t / scales[n]).half() for n, t in tensors.items()} | {
            f"scale.{n}": scale for n, scale in scales.items()
        }

    def remember(self, round: int, reply: Record) -> Tensors:
        """What was sent, as it was sent: only that can be taken out of U and V again."""
        sent = reply.get(FISHER)
        return {**sent, "round": torch.tensor(round)} if sent else {}

    # -- server ------------------------------------------------------------------------------------

    def aggregate(self, state: Record, round: int, sent: Messages, replies: Replies) -> Outcome:
        """FedAvg's mean; U and V are plain sums over the last cohort, or over all ever seen."""
        if self.config.weight == 0:
            return super().aggregate(state, round, sent, replies)
        remembers = self.config.policy == "memory"
        rounds: dict[int, int] = {}
        seen: dict[str, Group] = {}
        sums: Tensors = {}

        def noted() -> Replies:
            for reply in replies:
                rounds[reply.client], fisher = round, reply.record.get(FISHER)
                if remembers:
                    # A copy: what arrives may be a view that keeps a whole stack of clients alive.
                    seen[f"{SEEN}{reply.client}"] = {n: t.clone() for n, t in fisher.items()}
                else:
                    _add(sums, fisher)
                yield reply

        outcome = super().aggregate(state, round, sent, noted())
        if not rounds:
            return outcome
        if remembers:
            rounds = {**rounds_of(state.get(MEMBERS)), **rounds}
            names = [f"{SEEN}{client}" for client in sorted(rounds)]
            seen = {name: seen.get(name) or state.get(name) for name in names}
            for fisher in seen.values():
                _add(sums, fisher)
        params = state.get(PARAMS)
        U, V = ({n: sums[f"{kind}.{n}"].to(t.dtype) for n, t in params.items()} for kind in "uv")
        total = sum(t.sum(dtype=torch.float64) for t in U.values())
        mean = float(total) / sum(t.numel() for t in U.values())
        return Outcome(
            outcome.state.replace({**seen, SUM_U: U, SUM_V: V, MEMBERS: members(rounds)}),
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


def _read(tensors: Group, name: str) -> Tensor:
    """A tensor as it was before :meth:`FedCurv._pack`, up to rounding."""
    scale = tensors.get(f"scale.{name}")
    return tensors[name] if scale is None else tensors[name].to(scale.dtype) * scale


def _add(sums: Tensors, fisher: Group) -> None:
    """Add one client's u and v to float64 sums."""
    for name in fisher:
        if not name.startswith("scale."):
            value = _read(fisher, name)
            sums[name] = sums[name].add_(value) if name in sums else value.double().clone()
