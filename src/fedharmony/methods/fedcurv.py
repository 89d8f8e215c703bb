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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le
from torch import Tensor

from fedharmony.errors import ConfigError
from fedharmony.losses import Batch, LossSettings, entries
from fedharmony.methods.base import ClientView, Groups, Method, Outcome, Sweep, methods, stacked
from fedharmony.types import PARAMS, Record, Reply, Tensors

FISHER = "fisher"  # reply: u_k, v_k; message: which entry of U is the client's own
SUM_U, SUM_V = "fisher_u", "fisher_v"  # state and message: U, V
MEMBERS = "fisher_members"  # state: whose Fisher information is in U, and of which round
SEEN = "fisher_of_"  # state, policy "memory": the last (u_j, v_j) of client j

#: Server memory that the policy "memory" may take.
LARGEST_TABLE = 16 * 2**30


@methods.register("fedcurv")
class FedCurv(Method):
    """Pull towards the other clients' optima by Fisher information (Shoham et al., 2019)."""

    @dataclass(frozen=True)
    class Config:
        """Settings of FedCurv.

        Attributes:
            weight: λ, for the mean task loss; 0 is FedAvg.
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

    search: ClassVar[Mapping[str, Sequence[Any]]] = {"weight": (1e-3, 1e-2, 1e-1, 1.0)}

    def init_state(self, params: Tensors, buffers: Tensors) -> Record:
        """As FedAvg; refuses a table that would not fit."""
        numbers = sum(t.numel() for t in params.values())
        needed = 2 * 4 * numbers * self.task.clients
        if self.config.policy == "memory" and needed > LARGEST_TABLE:
            raise ConfigError(
                f"methods.fedcurv.policy = 'memory' keeps (u, v) of all {self.task.clients} "
                f"clients on the server, {needed / 2**30:.0f} GiB here. Use 'last_cohort', or "
                "fewer clients."
            )
        return super().init_state(params, buffers)

    # -- client ------------------------------------------------------------------------------------

    def broadcast(self, state: Record, round: int, clients: Sequence[int]) -> Mapping[int, Record]:
        """θ, U and V for everybody; to each client, of which round its own share in them is."""
        messages = super().broadcast(state, round, clients)
        members = state.get(MEMBERS)
        if not members or self.config.weight == 0:
            return messages
        rounds = dict(zip(members["client"].tolist(), members["round"].tolist(), strict=True))
        sums = {group: state.get(group) for group in (SUM_U, SUM_V)}
        return {
            k: messages[k].replace({**sums, FISHER: {"round": torch.tensor(rounds.get(k, -1))}})
            for k in clients
        }

    def carry(self, view: ClientView, message: Record) -> Tensors:
        """``U_{−k}``, ``V_{−k}``: the sums without the client's own share, if it has one."""
        if SUM_U not in message.groups:
            return {}
        own = int(message.get(FISHER)["round"])
        share = view.memory if own >= 0 and own == int(view.memory.get("round", -1)) else {}
        return {
            f"{kind}.{name}": total - _read(share, f"{kind}.{name}") if share else total
            for kind, group in (("u", SUM_U), ("v", SUM_V))
            for name, total in message.get(group).items()
        }

    @stacked
    def pull(
        self,
        params: Mapping[str, Tensor],
        start: Mapping[str, Tensor],
        message: Groups,
        carry: Tensors,
    ) -> Tensors:
        """``2λ (U_{−k} ∘ θ − V_{−k})``."""
        if not carry:
            return {}
        return {
            name: 2 * self.config.weight * (carry[f"u.{name}"] * theta - carry[f"v.{name}"])
            for name, theta in params.items()
        }

    def sweep(self) -> Sweep:
        """``u_k`` and ``v_k`` of the trained model."""
        config, classes = self.config, self.task.classes

        def start(params: Mapping[str, Tensor]) -> Tensors:
            return {"": torch.zeros(())} | {n: torch.zeros_like(t) for n, t in params.items()}

        def objective(outputs: Tensor, batch: Batch) -> Tensor:
            if config.fisher_labels == "sampled":
                guess = batch.draws["labels"] < outputs.detach().sigmoid()
                batch = batch._replace(labels=guess.to(outputs.dtype))
            return (entries(LossSettings(), outputs, batch) * (batch.counted > 0)).sum(-1)

        def fold(carry: Tensors, gradients: Tensors, batch: Batch) -> Tensors:
            squares = {n: carry[n] + g.square().sum(0) for n, g in gradients.items()}
            return {"": carry[""] + batch.rows.sum()} | squares

        def finish(carry: Tensors, params: Mapping[str, Tensor]) -> Tensors:
            fisher = {n: t / carry[""].clamp(min=1.0) for n, t in carry.items() if n}
            if config.clip_quantile < 1:
                entries = torch.cat([t.flatten() for t in fisher.values()])
                rank = max(1, round(config.clip_quantile * len(entries)))
                largest = entries.kthvalue(rank).values
                fisher = {n: t.minimum(largest) for n, t in fisher.items()}
            return self._pack(
                {f"u.{n}": t for n, t in fisher.items()}
                | {f"v.{n}": t * params[n] for n, t in fisher.items()}
            )

        def draw(generator: torch.Generator, images: int) -> Tensors:
            return {"labels": torch.rand(images, classes, generator=generator)}

        def shapes(params: Mapping[str, Tensor]) -> Mapping[str, tuple[int, ...]]:
            return {n: tuple(t.shape) for n, t in finish(start(params), params).items()}

        sampled = draw if config.fisher_labels == "sampled" else None
        return Sweep(
            FISHER,
            "gradients",
            start,
            fold,
            finish,
            shapes,
            objective,
            config.fisher_samples,
            sampled,
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
        return {**reply.get(FISHER), "round": torch.tensor(round)} if self.config.weight else {}

    # -- server ------------------------------------------------------------------------------------

    def aggregate(
        self, state: Record, round: int, sent: Mapping[int, Record], replies: Iterator[Reply]
    ) -> Outcome:
        """FedAvg's mean; U and V are plain sums over the last cohort, or over all ever seen."""
        heard: dict[int, Mapping[str, Tensor]] = {}
        sums: Tensors = {}

        def noted() -> Iterator[Reply]:
            for reply in replies:
                fisher = reply.record.get(FISHER)
                heard[reply.client] = fisher if self.config.policy == "memory" else {}
                if self.config.policy == "last_cohort":
                    _add(sums, fisher)
                yield reply

        outcome = super().aggregate(state, round, sent, noted())
        if not heard:
            return outcome
        rounds = dict.fromkeys(heard, round)
        groups: dict[str, Mapping[str, Tensor]] = {}
        if self.config.policy == "memory":
            members = state.get(MEMBERS)
            if members:
                old = zip(members["client"].tolist(), members["round"].tolist(), strict=True)
                rounds = {**dict(old), **rounds}
            for client in sorted(rounds):
                fisher = heard.get(client) or state.get(f"{SEEN}{client}")
                groups[f"{SEEN}{client}"] = fisher
                _add(sums, fisher)
        dtype = next(iter(state.get(PARAMS).values())).dtype
        for kind, group in (("u.", SUM_U), ("v.", SUM_V)):
            groups[group] = {
                n.removeprefix(kind): t.to(dtype) for n, t in sums.items() if n.startswith(kind)
            }
        groups[MEMBERS] = {
            "client": torch.tensor(sorted(rounds)),
            "round": torch.tensor([rounds[k] for k in sorted(rounds)]),
        }
        numbers = sum(t.numel() for t in groups[SUM_U].values())
        mean = float(sum(t.double().sum() for t in groups[SUM_U].values())) / numbers
        log = {**outcome.log, "pull_strength": self.config.weight * mean}
        return Outcome(outcome.state.replace(groups), outcome.weights, log)


def _read(tensors: Mapping[str, Tensor], name: str) -> Tensor:
    """A tensor as it was before :meth:`FedCurv._pack`, up to rounding."""
    scale = tensors.get(f"scale.{name}")
    return tensors[name] if scale is None else tensors[name].to(scale.dtype) * scale


def _add(sums: Tensors, fisher: Mapping[str, Tensor]) -> None:
    """Add one client's u and v to float64 sums."""
    for name in fisher:
        if not name.startswith("scale."):
            value = _read(fisher, name).double()
            sums[name] = sums[name].add_(value) if name in sums else value.clone()
