"""FedHarmony: a consensus label-correlation teacher, and aggregation by size and quality.

Kou et al., "FedHarmony: Harmonizing Heterogeneous Label Correlations in Federated Multi-Label
Learning", CVPR 2026, arXiv 2604.28024. Idea: each client's predicted label correlation is pulled
towards what all *other* clients agree on, inside clusters of related labels; the server weighs
clients by data size first and, later, by how well their correlation fits that agreement.

====================================================  ============================
Eq. (1), (2)  p̂, R_k from scores on the local data    ``sweep``
Eq. (3)       R*_k = A({R_j}, j ≠ k)                  ``table``, ``broadcast``
Algorithm 1   label clusters S_g                      ``clusters``
Eq. (4), (8)  BCE + λ Σ_g Ψ(R_k[S_g], R*_k[S_g])      ``pairs``, ``loss``
Eq. (9)       s_k = Σ_g Ψ(...), q_k = exp(−γ s_k)     ``misfits``, ``qualities``
Eq. (10)      ω_k = α_t n̄_k + (1 − α_t) q̄_k           ``alpha``, ``weights``
====================================================  ============================

The paper leaves many points open (the operator A, the distance Ψ, λ, γ, T_0, G, when R_k is
computed, what round 0 does). Each is a named setting of :class:`FedHarmony.Config`; the preset
``recommended`` holds our choices, ``paper_literal`` the nearest reading of the printed text.
Deviation: ``recommended`` aligns Pearson correlations; Eq. (2) rewards timid scores.

Weights need every s_k of the cohort (the adaptive temperature is 1/std of them), so while α_t < 1
the models of one cohort are held, by reference, until the last reply; at α_t = 1 they stream.

Where the server sees sums only (``federation.server_sees``): :mod:`fedharmony_sums
<fedharmony.methods.fedharmony_sums>`.

The server's part stays where the model is. Its memory is bounded by the cohort and by ``table_mb``,
whatever the number of clients: see :class:`~fedharmony.consensus.CorrelationTable`. Variants of the
correlation belong into :class:`~fedharmony.correlation.Correlation`, variants of what is compared
into :meth:`FedHarmony.pairs`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from fedharmony.aggregate import effective_clients
from fedharmony.alignment import Alignment, neutral
from fedharmony.clusters import cluster_agreement, default_groups, spectral_clusters
from fedharmony.config import machine_memory, shared
from fedharmony.consensus import (
    BY_ENTRY,
    CORRELATION,
    CorrelationTable,
    Operator,
    OperatorName,
)
from fedharmony.correlation import (
    Correlation,
    Triangle,
    mean_moments,
    pack_upper,
    pair_mask,
    parts,
)
from fedharmony.errors import ConfigError
from fedharmony.losses import Batch, task_loss
from fedharmony.methods import fedharmony_sums as sums
from fedharmony.methods.base import (
    INGREDIENTS,
    ClientView,
    Method,
    Outcome,
    Stage,
    Sweep,
    Task,
    methods,
    stacked,
)
from fedharmony.methods.fedharmony_sums import TEACHER
from fedharmony.models.base import stack
from fedharmony.rng import derived_seed
from fedharmony.types import Form, Forms, Group, Groups, Messages, Record, Replies, Reply, Tensors

CLUSTERS = "clusters"  # state: the clusters of the last round

#: Up to here labels are clustered every round.
CLUSTERED_OFTEN = 512
#: Halvings of the interval in which a bounded temperature is looked for.
BISECTIONS = 30
#: Memory per pair of labels while one client trains, measured with 2 to 30 clients: at all, and for
#: each client of a cohort. Each client that trains beside the first takes another 50 bytes.
PAIR_BYTES, COHORT_BYTES = 110, 20


#: An alignment that does not make scores timid, chosen on held-out training images (docs).
RECOMMENDED: Mapping[str, Any] = {
    "normaliser": "pearson",
    "shrinkage": 0.03,
    "align_weight": 0.2,
}


class Misfits(NamedTuple):
    """How far clients are from their teachers: s_k, float64 (m,), and who could be compared, (m,).

    A client that shares no pair of labels with its teacher is not: that is not a perfect fit.
    """

    values: Tensor
    compared: Tensor


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
            shrinkage: added to the variances of "pearson", so that scores which hardly vary (of
                labels that a client lacks) correlate little instead of at random.
            softness: T: correlated are σ(z / T). The correlation of probabilities (1) rewards timid
                scores; with a larger T and "pearson" it comes near to that of the logits, which
                does not depend on how bold they are.
            epsilon: ε of Eq. (2).
            clamp: p is kept in [clamp, 1 − clamp] inside the denominator.
            denominator_grad: differentiate the denominator of Eq. (2).
            estimator: R in the loss from "running" moments with straight-through gradient, or from
                the "batch" alone (biased: it also penalises the variance of the estimate).
            window: memory of the running moments, in images.
            reduction: Ψ is the "mean" of squares over the compared entries, or, as printed, "sum".
            diagonal: compare R_cc too (it measures confidence, not correlation).
            align_unseen: "include" labels without a local positive in the loss, or "mask" them, or
                align "only" pairs with such a label, of which a client knows nothing itself.
            least_teacher: pairs are aligned where |R*_k| is at least this: where the others agree
                that there is something to know.
            neutral: keep the alignment from making scores bolder or more timid: its gradient may
                reorder the images of a label, but neither shift nor stretch their outputs.
            consensus: the operator A; none means "support_trimmed", which bears liars, and
                "support" where the server sees sums only.
            kappa: "support", "support_trimmed": a client counts n²/(n + kappa).
            min_examples: likewise: clients with fewer images do not teach.
            min_support: likewise: a label counts on a client when p̂ ≥ max(min_support, 1/(2n)).
            trim: "trimmed": share of the values cut at each end; "support_trimmed": share of their
                weight.
            memory: teach from "all_seen" clients or the "last_cohort" only.
            staleness_decay: weight of an entry per round of age.
            table_mb: megabytes (10⁶ bytes) of matrices the server remembers one by one, and never
                less than the last cohort. What is older goes into running sums ("median",
                "trimmed" and "support_trimmed" forget it): it still teaches, and fades, but a
                client whose matrix is in the sums can no longer be left out of its own teacher.
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
            temperature: γ of q = exp(−γ s); "adaptive" is 1/std(s) over the cohort; "bounded" the
                largest γ up to that which leaves ``min_effective``.
            min_effective: "bounded": least effective clients 1/Σω², as a share of those that the
                same weights without quality (γ = 0) have; never fewer than that share of those that
                weights by size have.
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
        shrinkage: Annotated[float, Ge(0)] = 0.0
        softness: Annotated[float, Gt(0)] = 1.0
        epsilon: Annotated[float, Gt(0)] = 1e-6
        clamp: Annotated[float, Gt(0), Lt(0.5)] = 1e-4
        denominator_grad: bool = True
        estimator: Literal["running", "batch"] = "running"
        window: Annotated[int, Ge(1)] = 512
        reduction: Literal["mean", "sum"] = "mean"
        diagonal: bool = False
        align_unseen: Literal["include", "mask", "only"] = "include"
        least_teacher: Annotated[float, Ge(0), Lt(1)] = 0.0
        neutral: bool = False
        consensus: OperatorName | None = None
        kappa: Annotated[float, Ge(0)] = 10.0
        min_examples: Annotated[int, Ge(0)] = 5
        min_support: Annotated[float, Ge(0), Le(1)] = 1e-3
        trim: Annotated[float, Ge(0), Lt(0.5)] = 0.45
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
        temperature: Annotated[float, Ge(0)] | Literal["adaptive", "bounded"] = "bounded"
        min_effective: Annotated[float, Gt(0), Le(1)] = 0.99
        quality_min_examples: Annotated[int, Ge(0)] = 10

        REMOVED: ClassVar[Mapping[str, str]] = {
            "distance": "Ψ is the squared Frobenius norm; leave it out",
        }

        def __post_init__(self) -> None:
            super().__post_init__()
            clash = ""
            if self.normaliser == "pearson" and self.consensus == "pooled":
                clash = (
                    "consensus = 'pooled' needs normaliser = 'phi': joint probabilities cannot be "
                    "recovered from a Pearson matrix"
                )
            elif self.softness != 1 and self.consensus == "pooled":
                clash = "consensus = 'pooled' needs softness = 1: it pools probabilities"
            elif self.shrinkage and self.normaliser == "phi":
                belongs = f"shrinkage = {self.shrinkage:g} belongs to normaliser = 'pearson'"
                clash = f"{belongs}; 'phi' has clamp instead"
            if clash:
                raise ConfigError(f"{clash}. Change one of the two.")

    config: Config

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "recommended": RECOMMENDED,
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
        "a": {**RECOMMENDED, "quality": False, "blocks": False},
        "ab": {**RECOMMENDED, "blocks": False},
        "plus": {**RECOMMENDED, **INGREDIENTS},
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
        needed = (PAIR_BYTES + COHORT_BYTES * task.cohort) * task.classes**2
        if needed > machine_memory() / 2:
            raise ConfigError(
                f"FedHarmony compares all pairs of labels: {task.classes:,} labels and a cohort of "
                f"{task.cohort} need about {needed / 1e9:.1f} GB, more than half of this machine's "
                "memory. Use fewer labels, a smaller cohort, or another method."
            )
        consensus = config.consensus or ("support" if task.sums else "support_trimmed")
        if task.unknown_labels and consensus not in BY_ENTRY:
            raise ConfigError(
                f"methods.fedharmony.consensus = {consensus!r} cannot leave out what a "
                "client does not know, and some labels of the training images are unknown. Use "
                f"one of {', '.join(BY_ENTRY)}."
            )
        self.horizon = task.rounds / 2 if config.horizon is None else config.horizon
        self.cluster_every = config.cluster_every or (1 if task.classes < CLUSTERED_OFTEN else 5)
        kind = shared(Correlation, config, eps=config.epsilon)
        self.correlation = Correlation(task.classes, task.unknown_labels, **kind)
        self.align = Alignment(self.correlation, **shared(Alignment, config))
        kind = shared(Operator, config, eps=config.epsilon, decay=config.staleness_decay)
        self.operator = Operator(consensus, **kind)
        self.triangle = task.classes * (task.classes + 1) // 2
        #: Clients whose matrices (float32, and what each entry stands on) fit into the table.
        numbers = self.triangle * (2 if task.unknown_labels else 1)
        self.capacity = max(1, config.table_mb * 10**6 // (4 * numbers))

    @property
    def no_sums(self) -> str:
        """The settings that need matrices, or misfits, of single clients on the server."""
        return sums.refusal(self.config)

    @property
    def no_privacy(self) -> str:
        """Quality would need a second noisy sum of models."""
        if not self.config.quality:
            return ""
        return "weights by quality are sums of their own. Set methods.fedharmony.quality = false"

    # -- Eq. (1), (2): a client's correlation, from its own scores ---------------------------------

    def sweep(self, reads: Literal["outputs", "labels"] = "outputs") -> Sweep:
        """p̂_k and R_k over the whole local set; ``labels`` instead of scores for a cold start.

        Where labels are unknown, with the share of the images that each entry stands on.
        """
        kind = self.correlation

        def start(params: Group) -> Tensors:
            device = next((tensor.device for tensor in params.values()), None)
            zero = torch.zeros((), dtype=torch.float64, device=device)
            # A view of one number: memory is first needed for the stack of clients.
            sums = zero.expand(kind.rows, kind.classes)
            softened = {} if kind.softness == 1 else {"chances": sums}
            return {"images": zero, "sums": sums, **softened}

        def fold(carry: Tensors, values: Tensor, batch: Batch) -> Tensors:
            scores = kind.scores(values) if reads == "outputs" else values
            chances = values.sigmoid() if reads == "outputs" else values
            added = {"images": batch.rows.sum(-1), "sums": kind.sums(scores.double(), batch)}
            if "chances" in carry:
                added["chances"] = kind.sums(chances.double(), batch)
            return {name: carry[name] + sum for name, sum in added.items()}

        def finish(carry: Tensors, params: Group) -> Tensors:
            moments = mean_moments(carry["sums"], carry["images"])
            upper = pack_upper(kind.matrix(moments)).float().clamp(-1, 1)  # beyond by rounding only
            chances = mean_moments(carry.get("chances", carry["sums"]), carry["images"])
            upload = {"upper": upper, "marginal": chances.marginal.float()}
            if moments.known is not None:
                upload["known"] = pack_upper(moments.known).float()
            return upload

        forms = {
            "upper": Form((self.triangle,), low=-1, high=1),
            "marginal": Form((kind.classes,), low=0, high=1),
        }
        if kind.unknown_labels:
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
        def collect(state: Record, round: int, sent: Messages, replies: Replies) -> Outcome:
            table = self.table(state)
            # A cohort as a whole; all clients in parts that fit into a table with a limit.
            size = self.capacity if everyone and not table.last_only else None
            while part := list(islice(replies, size)):
                table.add(self.capped(part), round - 1)
            return Outcome(state.replace(table.state_dict()))

        return Stage("correlate", super().broadcast, collect, False, sweep, everyone)

    # -- Eq. (3), Algorithm 1: what the others agree on --------------------------------------------

    def table(self, state: Record) -> CorrelationTable:
        """The matrices that the server remembers, and the operator A."""
        table = CorrelationTable(
            self.task.classes,
            self.operator,
            capacity=self.capacity,
            last_only=self.config.memory == "last_cohort",
            unknown_labels=self.task.unknown_labels,
        )
        return table.load(state.groups)

    def clusters(self, matrix: Tensor, round: int) -> Tensor:
        """Algorithm 1 on a consensus matrix (unknown entries are 0)."""
        seed = derived_seed(self.task.seed, "clusters", round)
        return spectral_clusters(matrix, self.groups, seed)

    def broadcast(self, state: Record, round: int, clients: Sequence[int]) -> Messages:
        """θ for everybody; R*_k, its known entries, the clusters and λ_t for each."""
        messages, table = super().broadcast(state, round, clients), self.table(state)
        if self.task.sums:
            return sums.broadcast(self, messages, state, round)
        if not table.teaches:
            return messages
        # Clusters of a client's own are found from its matrix before it is rounded.
        dtype = torch.float64 if self.config.client_clusters else torch.float32
        common, teachers = table.teachers(clients, round, dtype)
        each = self.config.client_clusters
        kept = None if each else self.common_clusters(state, common.matrix, round)
        weight = torch.full((), self.align_weight(round), device=common.matrix.device)
        personal = {}
        for client, (matrix, known) in zip(clients, teachers, strict=True):
            ids = self.clusters(matrix, round) if kept is None else kept
            teacher = {"matrix": matrix.float(), "known": known, "clusters": ids, "weight": weight}
            personal[client] = messages[client].replace({TEACHER: teacher})
        return personal

    def common_clusters(self, state: Record, matrix: Tensor, round: int) -> Tensor:
        """The clusters of a consensus, or the last ones while they are kept."""
        kept = state.get(CLUSTERS).get("ids")
        if kept is None or round % self.cluster_every == 0:
            return self.clusters(matrix, round)
        return kept

    def align_weight(self, round: int) -> float:
        """λ_t: off without part A, then growing to λ over the warm-up rounds."""
        if not self.config.align:
            return 0.0
        weight, warm = float(self.config.align_weight), self.config.warmup_rounds
        at_once = self.config.cold_start == "labels" or self.config.teacher == "this_round"
        taught = max(1, round + 1 if at_once else round)
        return weight * min(1.0, taught / warm) if warm else weight

    # -- Eq. (4), (8): the client's loss -----------------------------------------------------------

    def pairs(self, clusters: Tensor, known: Tensor) -> Tensor:
        """Which entries of R_k and R*_k are compared, (..., C, C): ∪_g S_g × S_g where known.

        ``known`` are entries of R* and, in s_k, of R_k too.
        """
        return pair_mask(clusters, known, diagonal=self.config.diagonal)

    def carry(self, view: ClientView, message: Record) -> Tensors:
        """The pairs of labels this client aligns, and running moments before the first batch."""
        if not self._aligns(message.groups):
            return {}
        teacher = message.get(TEACHER)
        pairs = self.pairs(teacher["clusters"], teacher["known"])
        if self.config.align_unseen != "include":
            seen = view.positives > 0
            both = seen.unsqueeze(-1) & seen.unsqueeze(-2)
            pairs = pairs & (both if self.config.align_unseen == "mask" else ~both)
        if self.config.least_teacher > 0:
            pairs = pairs & (teacher["matrix"].abs() >= self.config.least_teacher)
        return self.align.start(pairs, torch.full((), view.examples, device=pairs.device))

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
        teacher = message[TEACHER]
        seen = neutral(outputs, batch.rows) if self.config.neutral else outputs
        scores = self.correlation.scores(seen)
        misfit, carry = self.align(scores, batch, teacher["matrix"], carry)
        return fit + teacher["weight"] * misfit, carry

    # -- where the server sees sums: methods/fedharmony_sums.py -----------------------------------

    def received(self, view: ClientView, message: Record) -> Record:
        """The message with R*_k: the client takes its own terms out of the sums of everybody."""
        return sums.received(self, view, message)

    def remember(self, round: int, reply: Record) -> Tensors:
        """R_k and p̂_k: only the client itself can take them out of the sums again."""
        if not self.task.sums:
            return {}
        return {**reply.get(CORRELATION), "round": torch.tensor(round)}

    def share(self, round: int, view: ClientView, message: Record, reply: Reply) -> Record:
        """``n θ``, the terms of R_k and, while quality counts, ``q θ`` with the client's own q."""
        return sums.share(
            self, super().share(round, view, message, reply), round, view, message, reply
        )

    def share_forms(self, round: int, message: Record, reply: Forms, images: int) -> Forms:
        """What :meth:`share` gives, of a client with so many images."""
        plain = super().share_forms(round, message, reply, images)
        return sums.share_forms(self, plain, round, message, images)

    # -- Eq. (9), (10): aggregation by size and quality --------------------------------------------

    def misfits(self, replies: Sequence[Reply], sent: Messages) -> Misfits:
        """Eq. (9): s_k, each uploaded R_k against the teacher that was sent to its client."""
        teachers = [sent[reply.client].get(TEACHER) for reply in replies]
        if not all(teachers):
            nothing = torch.zeros(len(replies), dtype=torch.float64)
            return Misfits(nothing, compared=nothing.bool())
        uploads = [reply.record.get(CORRELATION) for reply in replies]
        device, classes = uploads[0]["upper"].device, self.task.classes
        triangle, found = Triangle(classes, device), []
        for part in parts(len(replies), classes**2, device):
            upload, teacher = stack(uploads[part]), stack(teachers[part])
            known = teacher["known"]
            if self.task.unknown_labels:
                known = known & triangle.square(upload["known"] > 0)
            pairs = self.pairs(teacher["clusters"], known)
            matrix = triangle.square(upload["upper"]).double()
            s = self.align.psi(matrix, teacher["matrix"].double(), pairs)
            found.append(torch.stack([s, pairs.any(-1).any(-1).double()]))
        values, compared = torch.cat(found, dim=-1).cpu()
        return Misfits(values, compared > 0)

    def qualities(self, misfits: Tensor, reliable: Tensor, gamma: float) -> Tensor:
        """q̄_k = exp(−γ s_k) / Σ_j exp(−γ s_j), float64 (m,).

        Deviation: a client that is not reliable is given the mean s of the others. Of a few images
        R_k is close to 0, whatever was learnt.

        >>> task = Task(2, 2, rounds=1, batch_size=1, epochs=1, seed=0, width=1, lr=0.1)
        >>> method = FedHarmony(FedHarmony.Config(), task)
        >>> both = torch.tensor([True, True])
        >>> method.qualities(torch.tensor([1.0, 3.0]), both, gamma=1.0)  # e^-1 : e^-3
        tensor([0.8808, 0.1192], dtype=torch.float64)
        """
        s = misfits.double()
        # Deviations from the mean: the same softmax, and 0 for a client that is not reliable.
        excess = torch.where(reliable, s - s[reliable].mean(), 0) if reliable.any() else s * 0
        return torch.softmax(-gamma * excess, 0)

    def weights(self, n: Tensor, misfits: Tensor, reliable: Tensor, alpha: float) -> Tensor:
        """Eq. (10): ``ω_k = α n̄_k + (1 − α) q̄_k``, float64 (m,).

        γ "adaptive" is 1 / (population) standard deviation of the reliable s, so that their scale
        does not matter; where they do not vary (below 1e-12) all qualities are equal. In a cohort
        of ten that leaves half of the clients without weight. "bounded" takes no more of γ than
        leaves ``min_effective`` of the effective clients 1/Σω² that γ = 0 has.

        ``n`` are weights by size, not normalised; ``reliable`` is whose s_k can be trusted.
        """
        size, gamma = n / n.sum(), self.config.temperature
        deviation = float(misfits[reliable].std(correction=0)) if reliable.any() else 0.0
        most = 1 / deviation if deviation >= 1e-12 else 0.0

        def omega(gamma: float) -> Tensor:
            return alpha * size + (1 - alpha) * self.qualities(misfits, reliable, gamma)

        if gamma == "adaptive":
            return omega(most)
        if gamma != "bounded":
            return omega(float(gamma))
        least = self.config.min_effective * effective_clients(omega(0.0))
        low, high = 0.0, most
        if effective_clients(omega(high)) >= least:
            return omega(high)
        for _ in range(BISECTIONS):
            middle = (low + high) / 2
            enough = effective_clients(omega(middle)) >= least
            low, high = (middle, high) if enough else (low, middle)
        return omega(low)

    def alpha(self, round: int) -> float:
        """α_t = max(0, 1 − t/T_0), t = 0, 1, …: the share of size in the weights."""
        return max(0.0, 1.0 - round / self.horizon) if self.config.quality else 1.0

    def aggregate(self, state: Record, round: int, sent: Messages, replies: Replies) -> Outcome:
        """``θ ← Σ_k ω_k θ_k`` with ``ω_k = α_t n̄_k + (1 − α_t) q̄_k``; then remember R_k."""
        if self.task.sums:
            return sums.aggregate(self, state, round, sent, replies)
        taught = any(TEACHER in message.groups for message in sent.values())
        alpha = self.alpha(round) if taught else 1.0
        model, heard = self.model_mean(state), []
        for reply in replies:
            if alpha == 1.0:
                model.fold(reply, self.weight(reply))
                kept = Record({CORRELATION: reply.record.get(CORRELATION)})
                reply = Reply(reply.client, reply.examples, kept)
            heard.append(reply)
        if not heard:
            return Outcome(state)
        misfits = self.misfits(heard, sent)
        examples = torch.tensor([reply.examples for reply in heard])
        enough = examples >= max(1, self.config.quality_min_examples)
        n = torch.tensor([self.weight(reply) for reply in heard], dtype=torch.float64)
        omega = self.weights(n, misfits.values, misfits.compared & enough, alpha)
        weights = dict(zip([reply.client for reply in heard], omega.tolist(), strict=True))
        if alpha < 1.0:
            for reply in heard:
                model.fold(reply, weights[reply.client])
        table = self.table(state)
        table.add(self.capped(heard), round)
        state = model.update(state).replace(table.state_dict())
        log = {"alpha": alpha}
        if used := list(model.weights.values()):
            log["effective_clients"] = effective_clients(torch.tensor(used, dtype=torch.float64))
        if taught:
            log["align_weight"] = self.align_weight(round)
        if compared := misfits.values[misfits.compared].tolist():
            log["discrepancy"] = sum(compared) / len(compared)
        state, agreement = self.keep_clusters(state, sent)
        return Outcome(state, model.weights, {**log, **agreement}, model.left_out)

    def capped(self, replies: Sequence[Reply]) -> Sequence[Reply]:
        """The replies; under a robust rule none counts as more images than the cohort's median.

        A size is a claim, by which the consensus weighs.
        """
        if self.task.robust.rule == "none":
            return replies
        most = int(np.median([reply.examples for reply in replies]))
        return [replace(reply, examples=min(reply.examples, most)) for reply in replies]

    def keep_clusters(
        self, state: Record, sent: Messages, group: str = TEACHER
    ) -> tuple[Record, dict[str, float]]:
        """Store the round's clusters; how far they agree with the last ones (adjusted Rand)."""
        teachers = [m.get(group) for m in sent.values() if group in m.groups]
        if not teachers or self.config.client_clusters:
            return state, {}
        ids, before = teachers[0]["clusters"], state.get(CLUSTERS).get("ids")
        log = {} if before is None else {"cluster_agreement": cluster_agreement(before, ids)}
        return state.replace({CLUSTERS: {"ids": ids}}), log

    def artifacts(self, state: Record) -> Tensors:
        """The consensus of all clients heard so far, and the label clusters."""
        table = self.table(state)
        if not (table.rows or table.folded):
            return {}
        last = table.rows["round"].max() if table.rows else table.folded["round"]
        matrix, known = table.consensus(int(last) + 1)
        ids = state.get(CLUSTERS).get("ids")
        ids = self.clusters(matrix, self.task.rounds) if ids is None else ids
        return {"consensus": matrix.float(), "consensus_known": known, "clusters": ids}
