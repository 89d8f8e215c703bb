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

The server's part stays where the model is: teachers of a cohort, misfits and sums are one batched
computation each, labels are clustered once per round. Memory is bounded by the cohort and by
``table_mb``, whatever the number of clients: see :meth:`FedHarmony._remember`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, get_args

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from fedharmony import correlation as corr
from fedharmony.aggregate import ModelMean
from fedharmony.clusters import cluster_agreement, default_groups, spectral_clusters
from fedharmony.config import machine_memory
from fedharmony.consensus import (
    Consensus,
    ConsensusSums,
    EntryOperator,
    Uploads,
    WeightedOperator,
    consolidate,
)
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
from fedharmony.types import Form, Record, Reply, Tensors

CORRELATION = "correlation"  # reply: R_k (upper triangle) and p̂_k
TEACHER = "teacher"  # message: R*_k, which entries are known, clusters, λ_t
TABLE = "table"  # state: the last (R_j, p̂_j, n_j, t_j) of the clients heard
FOLDED = "folded"  # state: running sums of what no longer fits into the table
CLUSTERS = "clusters"  # state: the clusters of the last round

#: Up to here labels are clustered every round.
CLUSTERED_OFTEN = 512
#: From here on C × C numbers are what the alignment loss costs; its gradient is then formed by
#: hand, where there is a formula for it.
MANY_LABELS = 128


#: Memory per pair of labels, measured with two clients: matrices of clients, teacher and clusters.
PAIR_BYTES = 100


@methods.register("fedharmony")
class FedHarmony(Method):
    """Consensus correlation teacher and quality-aware aggregation (Kou et al., CVPR 2026)."""

    @dataclass(frozen=True)
    class Config(Method.Config):
        """Settings of FedHarmony; the paper's parts A, B and C switch independently.

        Attributes:
            align: part A, the alignment loss.
            quality: part B, aggregation by correlation quality (off: α ≡ 1).
            blocks: part C, alignment inside label clusters (off: one cluster, "No-Block").
            align_weight: λ, for mean-BCE and mean-Ψ.
            warmup_rounds: λ grows linearly over this many rounds, from the first that has a teacher
                (round 0 with ``cold_start`` "labels" or ``teacher`` "this_round", else round 1).
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
            table_mb: megabytes (10⁶ bytes) of matrices the server remembers one by one, and never
                less than the last cohort. What is older goes into running sums ("median" and
                "trimmed" forget it): it still teaches, and fades, but a client whose matrix is in
                the sums can no longer be left out of its own teacher.
            measured: R_k "during" training, from the outputs of the last local epoch, which cost
                nothing more (they are of the augmented images, and of a model that still moves),
                or "after" it, by one more pass over the local data.
            teacher: "last_round" uses R_j uploaded with the models (one exchange per round);
                "this_round" asks the cohort for R_j of the received model first.
            cold_start: round 0 trains without a teacher ("none"), or with one made from the
                clients' true label statistics ("labels": it reveals co-occurrence).
            groups: G; none means round(√C).
            cluster_every: rounds between clusterings; none means 1, and 5 from 512 labels on, where
                a clustering takes a third of a second.
            client_clusters: cluster each client's own R*_k instead of the common consensus.
            horizon: T_0 of α_t = max(0, 1 − t/T_0), t = 0, 1, …; none means half of the rounds.
            temperature: γ of q = exp(−γ s); "adaptive" is 1/std(s) over the cohort.
            quality_min_examples: smaller clients get the cohort's mean discrepancy.

        Where labels are unknown, each pair of labels is estimated over the images on which both are
        known, and clients say what share these are: n of a pair, in ``kappa``, ``min_examples`` and
        ``min_support``, is that number.
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
        table_mb: Annotated[int, Ge(1)] = 256
        measured: Literal["after", "during"] = "during"
        teacher: Literal["last_round", "this_round"] = "last_round"
        cold_start: Literal["none", "labels"] = "none"
        groups: Annotated[int, Ge(1)] | None = None
        cluster_every: Annotated[int, Ge(1)] | None = None
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

    config: Config

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "recommended": {},
        # As printed: plain leave-one-out mean of this round's matrices, Σ_g ‖·‖²_F per batch,
        # exp(−s), every client alike; ε alone guards the denominator (clamp: only float32's limit).
        "paper_literal": {
            "warmup_rounds": 0,
            "measured": "after",
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
        self.groups = 1 if not config.blocks else config.groups or default_groups(task.classes)
        if self.groups > task.classes:
            raise ConfigError(
                f"methods.fedharmony.groups = {self.groups} is more than the {task.classes} labels "
                "of the data. Choose fewer clusters, or leave it out for round(√C)."
            )
        if (needed := PAIR_BYTES * task.classes**2) > machine_memory() / 4:
            raise ConfigError(
                f"FedHarmony compares all pairs of labels: {task.classes:,} labels need about "
                f"{needed / 1e9:.0f} GB, more than a quarter of this machine's memory. Use fewer "
                "labels, or another method."
            )
        entry_operators = get_args(EntryOperator)
        if task.unknown_labels and config.consensus not in entry_operators:
            raise ConfigError(
                f"methods.fedharmony.consensus = {config.consensus!r} cannot leave out what a "
                "client does not know, and some labels of the training images are unknown. Use "
                f"one of {', '.join(entry_operators)}."
            )
        self.horizon = task.rounds / 2 if config.horizon is None else config.horizon
        self.options: dict[str, Any] = {
            "normaliser": config.normaliser,
            "eps": config.epsilon,
            "clamp": config.clamp,
        }
        self._loss_options = {**self.options, "denominator_grad": config.denominator_grad}
        self.operator_options: dict[str, Any] = {
            "operator": config.consensus,
            "kappa": config.kappa,
            "min_examples": config.min_examples,
            "decay": config.staleness_decay,
            "eps": config.epsilon,
            "clamp": config.clamp,
        }
        self._by_hand = (
            task.classes >= MANY_LABELS
            and config.estimator == "running"
            and config.normaliser == "phi"
            and config.distance == "squared_frobenius"
            and not task.unknown_labels
        )
        self.cluster_every = config.cluster_every or (1 if task.classes < CLUSTERED_OFTEN else 5)
        # Matrices of moments one below the other: see Moments and PairMoments.
        self._squares = config.normaliser == "pearson"
        known = (4 if self._squares else 3) * task.classes
        self._height = known if task.unknown_labels else task.classes + 1
        self.triangle = task.classes * (task.classes + 1) // 2
        #: Clients whose matrices (float32, and what each entry stands on) fit into the table.
        numbers = self.triangle * (2 if task.unknown_labels else 1)
        self.capacity = max(1, config.table_mb * 10**6 // (4 * numbers))

    # -- Eq. (1), (2): a client's correlation, from its own scores ---------------------------------

    def sweep(self, reads: Literal["outputs", "labels"] = "outputs") -> Sweep:
        """p̂_k and R_k over the whole local set; ``labels`` instead of scores for a cold start.

        Where labels are unknown, with the share of the images that each entry stands on.
        """
        classes, unknown = self.task.classes, self.task.unknown_labels

        def start(params: Mapping[str, Tensor]) -> Tensors:
            device = next((tensor.device for tensor in params.values()), None)
            zero = torch.zeros((), dtype=torch.float64, device=device)
            # One number, seen many times: memory is first needed for the stack of clients.
            return {"rows": zero, "sums": zero.expand(self._height, classes)}

        def fold(carry: Tensors, values: Tensor, batch: Batch) -> Tensors:
            scores = (values.sigmoid() if reads == "outputs" else values).double()
            rows = batch.rows.sum(-1)
            if (known := self._known(batch)) is not None:
                sums = corr.pair_sums(scores, known, squares=self._squares)
            else:
                scores = scores * batch.rows.unsqueeze(-1)
                joint = scores.mT @ scores
                sums = torch.cat([scores.sum(-2, keepdim=True), joint], dim=-2)
            return {"rows": carry["rows"] + rows, "sums": carry["sums"] + sums}

        def finish(carry: Tensors, params: Mapping[str, Tensor]) -> Tensors:
            means = carry["sums"] / carry["rows"].clamp(min=1.0)
            told: Tensors = {}
            if unknown:
                pairs = corr.PairMoments(means)
                matrix, marginal = corr.pair_correlation(pairs, **self.options)[0], pairs.marginal
                told = {"known": corr.pack_upper(pairs.known).float()}
            else:
                moments = corr.Moments(means)
                matrix, marginal = corr.correlation(moments, **self.options), moments.first
            upper = corr.pack_upper(matrix).float().clamp(-1, 1)  # beyond by rounding at most
            return {"upper": upper, "marginal": marginal.float(), **told}

        forms = {
            "upper": Form((self.triangle,), low=-1, high=1),
            "marginal": Form((classes,), low=0, high=1),
        }
        if unknown:
            forms["known"] = Form((self.triangle,), low=0, high=1)
        during = self.config.measured == "during"
        return Sweep(
            CORRELATION, reads, start, fold, finish, lambda params: forms, during_training=during
        )

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
            # A cohort as a whole; all clients in parts that fit into a table with a limit.
            limited = everyone and self.config.memory == "all_seen"
            while part := list(islice(replies, self.capacity if limited else None)):
                state = self._remember(state, round - 1, part)
            return Outcome(state)

        return Stage("correlate", super().broadcast, collect, False, sweep, everyone)

    # -- Eq. (3), Algorithm 1: what the others agree on --------------------------------------------

    def consensus(self, state: Record, round: int) -> Consensus:
        """The operator A over all that is remembered, ready to leave clients out in O(C²) each."""
        folded = state.get(FOLDED)
        return consolidate(
            **self._uploads(state.get(TABLE), round)._asdict(),
            folded=folded,
            folded_age=(round - 1 - folded["round"]).clamp(min=0) if folded else 0,
            trim=self.config.trim,
            **self.operator_options,
        )

    def _uploads(self, table: Mapping[str, Tensor], round: int) -> Uploads:
        """Rows of the table as round ``round`` sees them."""
        examples, marginals = table["examples"], table["marginal"]
        told = examples.unsqueeze(-1)
        if self.task.unknown_labels:
            examples = (told * table["known"]).round()
            told = corr.Triangle(self.task.classes, examples.device).diagonal(examples)
        # Nothing is at least half of one image of none: 0.5 / 0 is infinite.
        supports = marginals >= (0.5 / told).clamp(min=self.config.min_support)
        ages = (round - 1 - table["round"]).clamp(min=0)
        return Uploads(table["upper"], examples, supports, marginals, ages)

    def clusters(self, matrix: Tensor, round: int) -> Tensor:
        """Algorithm 1 on a consensus matrix (unknown entries are 0)."""
        seed = derived_seed(self.task.seed, "clusters", round)
        return spectral_clusters(matrix, self.groups, seed)

    def broadcast(self, state: Record, round: int, clients: Sequence[int]) -> Mapping[int, Record]:
        """θ for everybody; R*_k, its known entries, the clusters and λ_t for each."""
        messages = super().broadcast(state, round, clients)
        table = state.get(TABLE)
        if not table or (len(table["client"]) < 2 and not state.get(FOLDED)):
            return messages
        consensus = self.consensus(state, round)
        common, known = consensus.full()
        kept = state.get(CLUSTERS).get("ids")
        if kept is None or round % self.cluster_every == 0:
            kept = self.clusters(common, round)
        weight = torch.full((), self.align_weight(round), device=common.device)
        rows = _rows(table["client"], clients)
        # Clusters of a client's own are found from its matrix before it is rounded.
        dtype = torch.float64 if self.config.client_clusters else torch.float32
        left_out = zip(
            *consensus.without_each([row for row in rows if row >= 0], dtype), strict=True
        )
        everyone = common.to(dtype), known
        personal = {}
        for client, row in zip(clients, rows, strict=True):
            matrix, seen = next(left_out) if row >= 0 else everyone
            ids = self.clusters(matrix, round) if self.config.client_clusters else kept
            teacher = {"matrix": matrix.float(), "known": seen, "clusters": ids, "weight": weight}
            personal[client] = messages[client].replace({TEACHER: teacher})
        return personal

    def align_weight(self, round: int) -> float:
        """λ_t: off without part A, then growing to λ over the warm-up rounds."""
        if not self.config.align:
            return 0.0
        weight, warm = float(self.config.align_weight), self.config.warmup_rounds
        at_once = self.config.cold_start == "labels" or self.config.teacher == "this_round"
        taught = max(1, round + 1 if at_once else round)
        return weight * min(1.0, taught / warm) if warm else weight

    # -- Eq. (4), (8): the client's loss -----------------------------------------------------------

    def carry(self, view: ClientView, message: Record) -> Tensors:
        """Empty running moments, their rate, and the pairs of labels this client aligns."""
        return {name: tensor[0] for name, tensor in self.carries([view], [message]).items()}

    def carries(self, views: Sequence[ClientView], messages: Sequence[Record]) -> Tensors:
        """The same of all clients of a stack at once."""
        if not self._aligns(messages[0].groups):
            return {}
        teachers = [message.groups[TEACHER] for message in messages]
        clusters, known = (
            torch.stack([teacher[name] for teacher in teachers]) for name in ("clusters", "known")
        )
        pairs = corr.pair_mask(clusters, known, diagonal=self.config.diagonal)
        if self.config.align_unseen == "mask":
            seen = torch.stack([view.positives > 0 for view in views])
            pairs = pairs & seen.unsqueeze(-1) & seen.unsqueeze(-2)
        device, classes, leading = pairs.device, self.task.classes, (len(views),)
        spans = [max(1.0, min(view.examples, self.config.window)) for view in views]
        carry = {"pairs": pairs, "span": torch.tensor(spans, dtype=torch.float32, device=device)}
        if self._by_hand:
            found = pairs.sum((-2, -1)).clamp_min(1).float()
            count = found if self.config.reduction == "mean" else torch.ones_like(found)
            apart = corr.MomentsApart.empty(classes, leading=leading, device=device)
            return {**carry, "count": count, **apart._asdict()}
        moments = torch.zeros(*leading, self._height, classes, device=device)
        started = torch.zeros(leading, dtype=torch.bool, device=device)
        return {**carry, "moments": moments, "started": started}

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
        teacher, scores = message[TEACHER], outputs.sigmoid()
        rate = corr.update_rate(batch.rows.sum(-1), carry["span"])
        if self._by_hand:
            misfit, apart = corr.running_discrepancy(
                scores,
                batch.rows,
                corr.MomentsApart(carry["first"], carry["second"], carry["started"]),
                rate,
                teacher["matrix"],
                carry["pairs"],
                carry["count"],
                eps=self.config.epsilon,
                clamp=self.config.clamp,
                denominator_grad=self.config.denominator_grad,
            )
            return fit + teacher["weight"] * misfit, {**carry, **apart._asdict()}
        if (known := self._known(batch)) is not None:
            found = corr.pair_moments(scores, known, batch.rows, squares=self._squares)
            estimate, carry = self._estimate(found, rate, carry)
            local, told = corr.pair_correlation(estimate, **self._loss_options)
            pairs = carry["pairs"] & told
        else:
            moments, carry = self._estimate(corr.score_moments(scores, batch.rows), rate, carry)
            local, pairs = corr.correlation(moments, **self._loss_options), carry["pairs"]
        misfit = self.discrepancy(local, teacher["matrix"], pairs)
        return fit + teacher["weight"] * misfit, carry

    def _estimate(
        self, moments: corr.AnyMoments, rate: Tensor, carry: Tensors
    ) -> tuple[corr.AnyMoments, Tensors]:
        """The moments R̃ is made of: those of the batch, or running ones."""
        if self.config.estimator == "batch":
            return moments, carry
        before = corr.RunningMoments(type(moments)(carry["moments"]), carry["started"])
        moments, after = corr.running_step(before, moments, rate)
        return moments, {**carry, "moments": after.moments.values, "started": after.started}

    def _known(self, batch: Batch) -> Tensor | None:
        """Which labels of a batch are known, None if all are: as the task said."""
        known = batch.known if isinstance(batch.known, Tensor) else None
        assert (known is not None) == self.task.unknown_labels, "not the data of the task"
        return known

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
        found = self._misfits(heard, sent)
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

    def _misfits(self, replies: Sequence[Reply], sent: Mapping[int, Record]) -> list[float | None]:
        """s_k: each uploaded R_k against the teacher sent to it, None if they share no pair."""
        teachers = [sent[reply.client].get(TEACHER) for reply in replies]
        if not all(teachers):
            return [None] * len(replies)
        uploads = [reply.record.get(CORRELATION)["upper"] for reply in replies]
        triangle = corr.Triangle(self.task.classes, uploads[0].device)
        step = max(1, corr.numbers_at_once(uploads[0].device) // self.task.classes**2)
        found = []
        for start in range(0, len(replies), step):
            upper = torch.stack(uploads[start : start + step])
            matrix, known, clusters = (
                torch.stack([teacher[name] for teacher in teachers[start : start + step]])
                for name in ("matrix", "known", "clusters")
            )
            if self.task.unknown_labels:
                shares = [r.record.get(CORRELATION)["known"] for r in replies[start : start + step]]
                known = known & triangle.square(torch.stack(shares) > 0)
            pairs = corr.pair_mask(clusters, known, diagonal=self.config.diagonal)
            local = triangle.square(upper).double()
            misfits = self.discrepancy(local, matrix.double(), pairs)
            found.append(torch.stack([misfits, pairs.any(-1).any(-1).double()], -1))
        return [s if shared else None for s, shared in torch.cat(found).tolist()]

    def _keep_clusters(
        self, state: Record, sent: Mapping[int, Record]
    ) -> tuple[Record, dict[str, float]]:
        """Store the round's clusters; how far they agree with the last ones (adjusted Rand)."""
        teachers = [m.get(TEACHER) for m in sent.values() if TEACHER in m.groups]
        if not teachers or self.config.client_clusters:
            return state, {}
        ids, before = teachers[0]["clusters"], state.get(CLUSTERS).get("ids")
        log = {} if before is None else {"cluster_agreement": cluster_agreement(before, ids)}
        return state.replace({CLUSTERS: {"ids": ids}}), log

    def _remember(self, state: Record, round: int, replies: Sequence[Reply]) -> Record:
        """Put the replies' matrices into the table, over older entries of the same clients.

        The table holds what ``table_mb`` allows and at least these replies. When it overflows, the
        oldest entries are folded into running sums. As long as their clients do not return, the
        consensus is that of a table without limit; of a client that returns, the folded entry
        stays beside the new one and fades.
        """
        device = next(iter(replies[0].record.get(CORRELATION).values())).device
        fresh = {
            "client": torch.tensor([r.client for r in replies], device=device),
            "examples": torch.tensor([r.examples for r in replies], device=device),
            "round": torch.full((len(replies),), round, device=device),
            **{
                name: torch.stack([r.record.get(CORRELATION)[name] for r in replies])
                for name in replies[0].record.get(CORRELATION)
            },
        }
        table = state.get(TABLE)
        if not table or self.config.memory == "last_cohort":
            return state.replace({TABLE: fresh})
        old = (~torch.isin(table["client"], fresh["client"])).nonzero().squeeze(1)
        excess = len(old) + len(replies) - self.capacity
        if excess > 0:
            # The table is in client order and the sort is stable: by round, then client.
            oldest = old[table["round"][old].argsort(stable=True)]
            state = self._fold(state, {n: t[oldest[:excess]] for n, t in table.items()}, round)
            old = oldest[excess:]
        fresh = {name: torch.cat([table[name][old], new]) for name, new in fresh.items()}
        order = torch.argsort(fresh["client"])
        return state.replace({TABLE: {name: tensor[order] for name, tensor in fresh.items()}})

    def _fold(self, state: Record, leaving: Mapping[str, Tensor], round: int) -> Record:
        """Add rows that leave the table to the running sums, where the operator has such sums."""
        if self.config.consensus not in get_args(WeightedOperator):
            return state
        device, folded = leaving["upper"].device, state.get(FOLDED)
        sums = ConsensusSums(
            self.task.classes,
            device=device,
            by_entry=self.task.unknown_labels,
            **self.operator_options,
        )
        if folded:
            sums.restore(folded, round - folded["round"])
        sums.add(self._uploads(leaving, round + 1))
        now = torch.full((), round, device=device)
        return state.replace({FOLDED: {**sums.tensors(), "round": now}})

    def artifacts(self, state: Record) -> Tensors:
        """The consensus of all clients heard so far, and the label clusters."""
        table = state.get(TABLE)
        if not table:
            return {}
        matrix, known = self.consensus(state, int(table["round"].max()) + 1).full()
        ids = state.get(CLUSTERS).get("ids")
        ids = self.clusters(matrix, self.task.rounds) if ids is None else ids
        return {"consensus": matrix.float(), "consensus_known": known, "clusters": ids}


def _rows(table: Tensor, clients: Sequence[int]) -> list[int]:
    """Where each client stands in the table's list of clients, −1 for one that is not there."""
    ids, order = table.sort()
    wanted = torch.tensor(clients, device=table.device)
    place = torch.searchsorted(ids, wanted).clamp(max=len(ids) - 1)
    rows: list[int] = torch.where(ids[place] == wanted, order[place], -1).tolist()
    return rows
