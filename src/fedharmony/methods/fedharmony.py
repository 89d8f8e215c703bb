"""FedHarmony: a consensus label-correlation teacher, and aggregation by size and quality.

Kou et al., "FedHarmony: Harmonizing Heterogeneous Label Correlations in Federated Multi-Label
Learning", CVPR 2026, arXiv 2604.28024. Idea: each client's predicted label correlation is pulled
towards what all *other* clients agree on, inside clusters of related labels; the server weighs
clients by data size first and, later, by how well their correlation fits that agreement.

====================================================  ============================
Eq. (1), (2)  p̂, R_k from scores on the local data    ``sweep``
Eq. (3)       R*_k = A({R_j}, j ≠ k)                  ``consensus``, ``broadcast``
Algorithm 1   label clusters S_g                      ``clusters``
Eq. (4), (8)  BCE + λ Σ_g Ψ(R_k[S_g], R*_k[S_g])      ``loss``
Eq. (9)       s_k = Σ_g Ψ(...), q_k = exp(−γ s_k)     ``aggregate``
Eq. (10)      ω_k = α_t n̄_k + (1 − α_t) q̄_k           ``aggregate``
====================================================  ============================

The paper leaves many points open (the operator A, the distance Ψ, λ, γ, T_0, G, when R_k is
computed, what round 0 does). Each is a named setting of :class:`FedHarmony.Config`; the preset
``recommended`` holds our choices, ``paper_literal`` the nearest reading of the printed text.

Weights need every s_k of the cohort (the adaptive temperature is 1/std of them), so while α_t < 1
the models of one cohort are held, by reference, until the last reply; at α_t = 1 they stream.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from fedharmony import correlation as corr
from fedharmony.aggregate import ModelMean
from fedharmony.consensus import Consensus, consolidate
from fedharmony.errors import ConfigError
from fedharmony.losses import Batch, task_loss
from fedharmony.methods.base import (
    ClientView,
    Groups,
    Method,
    Outcome,
    Stage,
    Sweep,
    Task,
    methods,
    stacked,
)
from fedharmony.rng import derived_seed
from fedharmony.types import Record, Reply, Tensors

CORRELATION = "correlation"  # reply: R_k (upper triangle) and p̂_k
TEACHER = "teacher"  # message: R*_k, which entries are known, clusters, λ_t
TABLE = "table"  # state: the last (R_j, p̂_j, n_j, t_j) of every client heard
CLUSTERS = "clusters"  # state: the clusters of the last round


@methods.register("fedharmony")
class FedHarmony(Method):
    """Consensus correlation teacher and quality-aware aggregation (Kou et al., CVPR 2026)."""

    @dataclass(frozen=True)
    class Config:
        """Settings of FedHarmony; the paper's parts A, B and C switch independently.

        Attributes:
            align: part A, the alignment loss.
            quality: part B, aggregation by correlation quality (off: α ≡ 1).
            blocks: part C, alignment inside label clusters (off: one cluster, "No-Block").
            align_weight: λ, for mean-BCE and mean-Ψ.
            warmup_rounds: λ grows linearly over this many rounds after the first teacher.
            normaliser: "phi" divides by Bernoulli variances as Eq. (2); "pearson" by Var(F).
            epsilon: ε of Eq. (2).
            clamp: p is kept in [clamp, 1 − clamp] inside the denominator.
            denominator_grad: differentiate the denominator of Eq. (2).
            estimator: R in the loss from "running" moments with straight-through gradient, or from
                the "batch" alone (biased: it also penalises the variance of the estimate).
            window: memory of the running moments, in images.
            distance: Ψ.
            reduction: "mean" over the compared entries, or "sum" as printed.
            diagonal: compare R_cc too (it measures confidence, not correlation).
            align_unseen: "include" labels without a local positive in the loss, or "mask" them.
            consensus: the operator A.
            kappa: "support": a client counts n²/(n + kappa).
            min_examples: "support": clients with fewer images do not teach.
            min_support: "support": a label counts on a client when p̂ ≥ max(min_support, 1/(2n)).
            trim: "trimmed": share cut at each end.
            memory: teach from "all_seen" clients or the "last_cohort" only.
            staleness_decay: weight of an entry per round of age.
            teacher: "last_round" uses R_j uploaded with the models (one exchange per round);
                "this_round" asks the cohort for R_j of the received model first.
            cold_start: round 0 trains without a teacher ("none"), or with one made from the
                clients' true label statistics ("labels": it reveals co-occurrence).
            groups: G; none means round(√C).
            cluster_every: rounds between clusterings.
            client_clusters: cluster each client's own R*_k instead of the common consensus.
            horizon: T_0 of α_t = max(0, 1 − t/T_0), t = 0, 1, …; none means half of the rounds.
            temperature: γ of q = exp(−γ s); "adaptive" is 1/std(s) over the cohort.
            quality_min_examples: smaller clients get the cohort's mean discrepancy.
        """

        align: bool = True
        quality: bool = True
        blocks: bool = True
        align_weight: Annotated[float, Ge(0)] = 1.0
        warmup_rounds: Annotated[int, Ge(0)] = 3
        normaliser: Literal["phi", "pearson"] = "phi"
        epsilon: Annotated[float, Gt(0)] = 1e-6
        clamp: Annotated[float, Gt(0), Lt(0.5)] = 1e-4
        denominator_grad: bool = True
        estimator: Literal["running", "batch"] = "running"
        window: Annotated[int, Ge(1)] = 512
        distance: Literal["squared_frobenius", "frobenius", "cosine"] = "squared_frobenius"
        reduction: Literal["mean", "sum"] = "mean"
        diagonal: bool = False
        align_unseen: Literal["include", "mask"] = "include"
        consensus: Literal["mean", "size", "support", "median", "trimmed", "pooled"] = "support"
        kappa: Annotated[float, Ge(0)] = 10.0
        min_examples: Annotated[int, Ge(0)] = 5
        min_support: Annotated[float, Ge(0), Le(1)] = 1e-3
        trim: Annotated[float, Ge(0), Lt(0.5)] = 0.1
        memory: Literal["all_seen", "last_cohort"] = "all_seen"
        staleness_decay: Annotated[float, Gt(0), Le(1)] = 0.9
        teacher: Literal["last_round", "this_round"] = "last_round"
        cold_start: Literal["none", "labels"] = "none"
        groups: Annotated[int, Ge(1)] | None = None
        cluster_every: Annotated[int, Ge(1)] = 1
        client_clusters: bool = False
        horizon: Annotated[float, Gt(0)] | None = None
        temperature: Annotated[float, Ge(0)] | Literal["adaptive"] = "adaptive"
        quality_min_examples: Annotated[int, Ge(0)] = 10

        def __post_init__(self) -> None:
            if self.normaliser == "pearson" and self.consensus == "pooled":
                raise ConfigError(
                    "consensus = 'pooled' needs normaliser = 'phi': joint probabilities cannot be "
                    "recovered from a Pearson matrix. Change one of the two."
                )

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "recommended": {},
        # As printed: plain leave-one-out mean of this round's matrices, Σ_g ‖·‖²_F per batch,
        # exp(−s), every client alike; ε alone guards the denominator (clamp: only float32's limit).
        "paper_literal": {
            "warmup_rounds": 0,
            "clamp": 1e-6,
            "estimator": "batch",
            "reduction": "sum",
            "diagonal": True,
            "consensus": "mean",
            "memory": "last_cohort",
            "staleness_decay": 1.0,
            "teacher": "this_round",
            "client_clusters": True,
            "temperature": 1.0,
            "quality_min_examples": 0,
        },
        # The rows of the paper's ablation table; "recommended" is A+B+C.
        "a": {"quality": False, "blocks": False},
        "ab": {"blocks": False},
    }
    search: ClassVar[Mapping[str, Sequence[Any]]] = {"align_weight": (0.3, 1.0, 3.0, 10.0)}

    def __init__(self, config: Config, task: Task) -> None:
        super().__init__(config, task)
        self.groups = 1 if not config.blocks else config.groups or corr.default_groups(task.classes)
        if self.groups > task.classes:
            raise ConfigError(
                f"methods.fedharmony.groups = {self.groups} is more than the {task.classes} labels "
                "of the data. Choose fewer clusters, or leave it out for round(√C)."
            )
        self.horizon = task.rounds / 2 if config.horizon is None else config.horizon
        self.options: dict[str, Any] = {
            "normaliser": config.normaliser,
            "eps": config.epsilon,
            "clamp": config.clamp,
        }

    # -- Eq. (1), (2): a client's correlation, from its own scores ---------------------------------

    def sweep(self, reads: Literal["outputs", "labels"] = "outputs") -> Sweep:
        """p̂_k and R_k over the whole local set; ``labels`` instead of scores for a cold start."""
        classes = self.task.classes

        def start(params: Mapping[str, Tensor]) -> Tensors:
            zeros = torch.zeros(classes + 1, classes, dtype=torch.float64)
            return {"rows": torch.zeros((), dtype=torch.float64), "sums": zeros}

        def fold(carry: Tensors, values: Tensor, batch: Batch) -> Tensors:
            scores = values.sigmoid() if reads == "outputs" else values
            scores = scores.double() * batch.rows.unsqueeze(-1)
            joint = scores.mT @ scores
            sums = torch.cat([scores.sum(-2, keepdim=True), joint], dim=-2)
            return {"rows": carry["rows"] + batch.rows.sum(-1), "sums": carry["sums"] + sums}

        def finish(carry: Tensors, params: Mapping[str, Tensor]) -> Tensors:
            moments = corr.Moments(carry["sums"] / carry["rows"].clamp(min=1.0))
            matrix = corr.correlation(moments, **self.options)
            return {"upper": corr.pack_upper(matrix).float(), "marginal": moments.first.float()}

        triangle = classes * (classes + 1) // 2
        shapes = {"upper": (triangle,), "marginal": (classes,)}
        return Sweep(CORRELATION, reads, start, fold, finish, lambda params: shapes)

    def stages(self, round: int) -> Sequence[Stage]:
        """``update``; before it, in round 0 or each round, ``correlate`` where a setting asks."""
        update = Stage("update", self.broadcast, self.aggregate, sweep=self.sweep())
        if self.config.cold_start == "labels" and round == 0:
            first = self._correlate(self.sweep("labels"), everyone=True)
        elif self.config.teacher == "this_round":
            first = self._correlate(self.sweep(), everyone=False)
        else:
            return [update]
        return [first, update]

    def _correlate(self, sweep: Sweep, everyone: bool) -> Stage:
        def collect(
            state: Record, round: int, sent: Mapping[int, Record], replies: Iterator[Reply]
        ) -> Outcome:
            return Outcome(self._remember(state, round - 1, list(replies)))

        return Stage("correlate", super().broadcast, collect, False, sweep, everyone)

    # -- Eq. (3), Algorithm 1: what the others agree on --------------------------------------------

    def consensus(self, table: Mapping[str, Tensor], round: int) -> Consensus:
        """The operator A over the table, ready to leave one client out in O(C²)."""
        examples = table["examples"]
        floor = (0.5 / examples).clamp(min=self.config.min_support).unsqueeze(-1)
        return consolidate(
            corr.unpack_upper(table["upper"], self.task.classes),
            operator=self.config.consensus,
            examples=examples,
            supports=table["marginal"] >= floor,
            marginals=table["marginal"],
            ages=(round - 1 - table["round"]).clamp(min=0),
            kappa=self.config.kappa,
            min_examples=self.config.min_examples,
            decay=self.config.staleness_decay,
            trim=self.config.trim,
            eps=self.config.epsilon,
            clamp=self.config.clamp,
        )

    def clusters(self, matrix: Tensor, round: int) -> Tensor:
        """Algorithm 1 on a consensus matrix (unknown entries are 0)."""
        seed = derived_seed(self.task.seed, "clusters", round)
        return corr.spectral_clusters(matrix, self.groups, seed)

    def broadcast(self, state: Record, round: int, clients: Sequence[int]) -> Mapping[int, Record]:
        """θ for everybody; R*_k, its known entries, the clusters and λ_t for each."""
        messages = super().broadcast(state, round, clients)
        table = state.get(TABLE)
        if not table or len(table["client"]) < 2:
            return messages
        consensus = self.consensus(table, round)
        row = {int(client): j for j, client in enumerate(table["client"])}
        common, known = consensus.full()
        device = table["upper"].device
        kept = state.get(CLUSTERS).get("ids")
        if kept is None or round % self.config.cluster_every == 0:
            kept = self.clusters(common, round)
        personal = {}
        for client in clients:
            matrix, seen = consensus.without(row[client]) if client in row else (common, known)
            ids = self.clusters(matrix, round) if self.config.client_clusters else kept
            teacher = {
                "matrix": matrix.float(),
                "known": seen,
                "clusters": ids,
                "weight": torch.tensor(self.align_weight(round)),
            }
            # The consensus is formed on the CPU; clients train where the model is.
            teacher = {name: tensor.to(device) for name, tensor in teacher.items()}
            personal[client] = messages[client].replace({TEACHER: teacher})
        return personal

    def align_weight(self, round: int) -> float:
        """λ_t: off without part A, then growing to λ over the warm-up rounds."""
        if not self.config.align:
            return 0.0
        weight, warm = float(self.config.align_weight), self.config.warmup_rounds
        return weight * min(1.0, max(round, 1) / warm) if warm else weight

    # -- Eq. (4), (8): the client's loss -----------------------------------------------------------

    def carry(self, view: ClientView, message: Record) -> Tensors:
        """Empty running moments, their rate, and the pairs of labels this client aligns."""
        if not self._aligns(message.groups):
            return {}
        teacher = message.groups[TEACHER]
        pairs = corr.pair_mask(teacher["clusters"], teacher["known"], diagonal=self.config.diagonal)
        if self.config.align_unseen == "mask":
            seen = view.positives > 0
            pairs = pairs & seen.unsqueeze(-1) & seen
        running = corr.empty_running(self.task.classes, device=pairs.device)
        rate = corr.update_rate(self.task.batch_size, view.examples, self.config.window)
        return {
            "pairs": pairs,
            "moments": running.moments.values,
            "started": running.started,
            "rate": torch.tensor(rate, dtype=torch.float32, device=pairs.device),
        }

    def _aligns(self, message: Groups) -> bool:
        return TEACHER in message and self.config.align and self.config.align_weight > 0

    @stacked
    def loss(
        self, outputs: Tensor, batch: Batch, message: Groups, carry: Tensors
    ) -> tuple[Tensor, Tensors]:
        """BCE + λ_t Ψ(R̃, R*_k), R̃ from running moments with the gradient of this batch."""
        fit = task_loss(self.task.loss, outputs, batch)
        if not self._aligns(message):
            return fit, carry
        moments = corr.score_moments(outputs.sigmoid(), batch.rows)
        if self.config.estimator == "running":
            before = corr.RunningMoments(corr.Moments(carry["moments"]), carry["started"])
            moments, after = corr.running_step(before, moments, carry["rate"])
            carry = {**carry, "moments": after.moments.values, "started": after.started}
        local = corr.correlation(
            moments, denominator_grad=self.config.denominator_grad, **self.options
        )
        teacher = message[TEACHER]
        misfit = self.discrepancy(local, teacher["matrix"], carry["pairs"])
        return fit + teacher["weight"] * misfit, carry

    def discrepancy(self, matrix: Tensor, teacher: Tensor, pairs: Tensor) -> Tensor:
        """Ψ over the included pairs of labels."""
        return corr.discrepancy(
            matrix, teacher, pairs, kind=self.config.distance, reduction=self.config.reduction
        )

    # -- Eq. (9), (10): aggregation by size and quality --------------------------------------------

    def aggregate(
        self, state: Record, round: int, sent: Mapping[int, Record], replies: Iterator[Reply]
    ) -> Outcome:
        """``θ ← Σ_k ω_k θ_k`` with ``ω_k = α_t n̄_k + (1 − α_t) q̄_k``; then remember R_k."""
        taught = any(TEACHER in message.groups for message in sent.values())
        alpha = corr.alpha_schedule(round, self.horizon) if self.config.quality and taught else 1.0
        by_size, heard = ModelMean(), []
        for reply in replies:
            if alpha == 1.0:
                by_size.add(reply.record, self.weight(reply))
                kept = Record({CORRELATION: reply.record.get(CORRELATION)})
                reply = Reply(reply.client, reply.examples, kept)
            heard.append(reply)
        if not heard:
            return Outcome(state)
        counts = torch.tensor([self.weight(reply) for reply in heard], dtype=torch.float64)
        found = [self._misfit(reply, sent[reply.client]) for reply in heard]
        # Nothing to compare is not a perfect fit: such a client counts as one without images.
        trust = [0 if s is None else r.examples for s, r in zip(found, heard, strict=True)]
        misfits = torch.tensor([s or 0.0 for s in found], dtype=torch.float64)
        quality = corr.quality_weights(
            misfits,
            temperature=self.config.temperature,
            examples=torch.tensor(trust),
            min_examples=max(1, self.config.quality_min_examples),
        )
        weights = corr.aggregation_weights(counts, quality, alpha)
        log = {"alpha": alpha, "effective_clients": float(corr.effective_clients(weights))}
        if taught:
            log["align_weight"] = self.align_weight(round)
        if compared := [s for s in found if s is not None]:
            log["discrepancy"] = sum(compared) / len(compared)
        if alpha == 1.0:
            state = by_size.update(state)
        else:
            blend = ModelMean()
            for reply, weight in zip(heard, weights.tolist(), strict=True):
                blend.add(reply.record, weight)
            state = blend.update(state)
        state, agreement = self._keep_clusters(state, sent)
        shares = dict(zip([reply.client for reply in heard], weights.tolist(), strict=True))
        return Outcome(self._remember(state, round, heard), shares, {**log, **agreement})

    def _misfit(self, reply: Reply, message: Record) -> float | None:
        """s_k: the uploaded R_k against the teacher this client was sent, if they share a pair."""
        teacher = message.get(TEACHER)
        if not teacher:
            return None
        pairs = corr.pair_mask(teacher["clusters"], teacher["known"], diagonal=self.config.diagonal)
        if not bool(pairs.any()):
            return None
        upper = reply.record.get(CORRELATION)["upper"]
        matrix = corr.unpack_upper(upper, self.task.classes).double()
        return float(self.discrepancy(matrix, teacher["matrix"].double(), pairs))

    def _keep_clusters(
        self, state: Record, sent: Mapping[int, Record]
    ) -> tuple[Record, dict[str, float]]:
        """Store the round's clusters; how far they agree with the last ones (adjusted Rand)."""
        teachers = [m.get(TEACHER) for m in sent.values() if TEACHER in m.groups]
        if not teachers or self.config.client_clusters:
            return state, {}
        ids, before = teachers[0]["clusters"], state.get(CLUSTERS).get("ids")
        log = {} if before is None else {"cluster_agreement": corr.cluster_agreement(before, ids)}
        return state.replace({CLUSTERS: {"ids": ids}}), log

    def _remember(self, state: Record, round: int, replies: Sequence[Reply]) -> Record:
        """Put the replies' matrices into the table, over older entries of the same clients."""
        if not replies:
            return state
        device = next(iter(replies[0].record.get(CORRELATION).values())).device
        fresh = {
            "client": torch.tensor([r.client for r in replies], device=device),
            "examples": torch.tensor([r.examples for r in replies], device=device),
            "round": torch.full((len(replies),), round, device=device),
            **{
                name: torch.stack([r.record.get(CORRELATION)[name] for r in replies])
                for name in ("upper", "marginal")
            },
        }
        table = state.get(TABLE)
        if table and self.config.memory == "all_seen":
            old = ~torch.isin(table["client"], fresh["client"])
            fresh = {name: torch.cat([table[name][old], new]) for name, new in fresh.items()}
            order = torch.argsort(fresh["client"])
            fresh = {name: tensor[order] for name, tensor in fresh.items()}
        return state.replace({TABLE: fresh})

    def artifacts(self, state: Record) -> Tensors:
        """The consensus of all clients heard so far, and the label clusters."""
        table = state.get(TABLE)
        if not table:
            return {}
        matrix, known = self.consensus(table, int(table["round"].max()) + 1).full()
        ids = state.get(CLUSTERS).get("ids")
        ids = self.clusters(matrix, self.task.rounds) if ids is None else ids
        return {"consensus": matrix.float(), "consensus_known": known, "clusters": ids}
