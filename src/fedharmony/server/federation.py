"""The round loop. It knows stages, never methods; messages, never where clients are.

A round is a list of stages, mostly one. In each, the method makes a message for every client of the
cohort (``broadcast``), the transport brings replies back (``exchange``), and the method folds them
into the server's state (``aggregate``). What is between the two is here: who drops out, which
replies are believed (``transport/replies.py``), how many may fail, and what a round's event says.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Annotated, Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge, Gt, Le, Lt

from fedharmony import fallbacks, stopping
from fedharmony.aggregate import NUMBERS, numbers_of, pooled
from fedharmony.config import Checked, NameOf
from fedharmony.errors import ClientLimitError, ConfigError
from fedharmony.methods.base import Method, Stage
from fedharmony.privacy import BudgetSpentError, Exchanges, Noise
from fedharmony.robust import Robust, rules
from fedharmony.server.sampling import Cohorts, drops_out
from fedharmony.server.server_average import ServerAverage
from fedharmony.transport.base import Transport, answers
from fedharmony.transport.replies import out_of_range, problem
from fedharmony.transport.sums import AddedUp, Summing, Total
from fedharmony.types import (
    BUFFERS,
    EVERYBODY,
    PARAMS,
    Failure,
    Form,
    Forms,
    Messages,
    Record,
    Replies,
    Reply,
)

Event = dict[str, Any]
#: Characters of a reason in an event; some are of a client's making.
LONGEST_REASON = 1000


@dataclass(frozen=True)
class FederationSettings(Checked):
    """Who takes part, and what happens when clients fail.

    Attributes:
        participation: share of the clients that take part in a round.
        cohort: number of clients per round; overrides ``participation``.
        sampling: draw clients with equal chance, or with chance ∝ their number of images;
            "poisson" draws each client by itself, so that cohorts differ in size. None means
            "poisson" with [privacy], which knows no other, and else "uniform".
        average: weigh models by number of images, or equally. Sampling *and* averaging by size
            gives large clients weight ∝ n²; that is what the FedHarmony paper prints.
        drop_rate: chance that a selected client is lost after it received its message.
        max_failures: a round in which a larger share of the asked clients fails stops the run.
        head_start: "closed_form" solves a linear head before the first training, from sums over the
            clients' features (``server/head_start.py``); "random" leaves it as it was drawn.
        head_ridge: ρ of that head, in units of the mean variance of a feature.
        head_scale: what features are divided by in these sums. The head is for features as they
            are; but where sums are bounded and get noise ([privacy]) it should be about the length
            of a feature vector. None means √D there (D features of size 1), and else 1.
        head_clients: who sends these sums: "all" clients, the first "cohort", or so many, drawn.
        server_average: the model that is evaluated and given away is a running mean of the global
            models, ``s ← e s + (1 − e) θ`` with e = min(this, t/(t + 3)); clients go on from θ.
            "adaptive" finds e: up to 0.9 for a model that jitters, 0 for one that still travels.
            0 averages nothing.
        robust: how models are averaged where clients may be malicious (``fedharmony list rules``);
            "none" is the mean.
        server_sees: what of a cohort reaches the server: its "replies", or nothing but their "sums"
            (``transport/sums.py``); robust rules need replies.
        sum_least: a sum over fewer clients is thrown away.
        central: one party trains, on all images with all their labels; a round sees as many images
            as the cohort would have trained on. For "fedavg" only.
    """

    participation: Annotated[float, Gt(0), Le(1)] = 0.5
    cohort: Annotated[int, Ge(1)] | None = None
    sampling: Literal["uniform", "size", "poisson"] | None = None
    average: Literal["size", "uniform"] = "size"
    drop_rate: Annotated[float, Ge(0), Lt(1)] = 0.0
    max_failures: Annotated[float, Ge(0), Le(1)] = 0.5
    head_start: Literal["random", "closed_form"] = "random"
    head_ridge: Annotated[float, Gt(0), Le(1e6)] = 0.01
    head_scale: Annotated[float, Gt(0), Le(1e6)] | None = None
    head_clients: Annotated[int, Ge(1)] | Literal["all", "cohort"] = "all"
    server_average: Annotated[float, Ge(0), Lt(1)] | Literal["adaptive"] = 0.0
    robust: Annotated[str, NameOf(rules, ("none",))] = "none"
    server_sees: Literal["replies", "sums"] = "replies"
    sum_least: Annotated[int, Ge(2)] = 3
    central: bool = False

    REMOVED: ClassVar[Mapping[str, str]] = {
        "robust_cap": "under a robust rule no client weighs more than the median; leave it out",
        "robust_bad": "the rule 'agreement' tolerates less than half of a cohort; leave it out",
        "robust_bound": "the rule 'agreement' cuts updates to the median length; leave it out",
    }
    REMOVED_RULES: ClassVar[tuple[str, ...]] = (
        *("norm_bound", "median", "trimmed_mean"),
        *("geometric_median", "multi_krum", "same_direction"),
    )

    def __post_init__(self) -> None:
        """Refuse a rule of earlier versions, unless a plug-in has it."""
        if self.robust in self.REMOVED_RULES and self.robust not in rules:
            raise ConfigError(
                f"federation.robust = {self.robust!r} is gone: its worst attack cost far more than "
                "that of 'agreement'. Write federation.robust = 'agreement'."
            )
        super().__post_init__()

    @property
    def averaging(self) -> Robust:
        """How models are averaged; one party that trains in one place is believed."""
        return Robust("none" if self.central else self.robust)


@dataclass
class Tally:
    """What happened in one round."""

    examples: int = 0
    images: int = 0
    rows: float = 0.0
    loss: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    reported: list[int] = field(default_factory=list)
    left_out: list[Failure] = field(default_factory=list)
    weights: dict[int, float] = field(default_factory=dict)
    log: dict[str, float] = field(default_factory=dict)

    def count(self, reply: Reply, epochs: int) -> None:
        """Add a good reply; ``epochs`` is 0 for a stage without training."""
        self.bytes_up += reply.record.nbytes
        if epochs:
            self.add([reply.client], numbers_of(reply), epochs)

    def add(self, clients: Sequence[int], numbers: Mapping[str, float], epochs: int) -> None:
        """Add what clients have trained: images, rows, and the sum of losses over images."""
        self.reported += clients
        self.examples += int(numbers.get("examples", 0))
        self.images += int(numbers.get("examples", 0)) * epochs
        self.rows += numbers.get("rows", 0.0)
        self.loss += numbers.get("loss", 0.0)

    def event(self, round: int, cohort: Sequence[int], seconds: float) -> Event:
        """The round as one JSON line."""
        return {
            "event": "round",
            "round": round,
            "cohort": list(cohort),
            "reported": sorted(self.reported),
            "left_out": [asdict(f) for f in sorted(self.left_out, key=lambda f: f.client)],
            "fallbacks": fallbacks.drain(),
            "examples": self.examples,
            "images": self.images,
            # Share of the rows that clients computed on without an image in them.
            "padding": 1 - self.images / self.rows if self.rows else None,
            "seconds": seconds,
            "images_per_second": self.images / seconds,
            "bytes_down": self.bytes_down,
            "bytes_up": self.bytes_up,
            "train_loss": self.loss / self.examples if self.examples else None,
            "weights": {str(client): weight for client, weight in self.weights.items()},
            "log": self.log,
        }


@dataclass(frozen=True)
class Federation:
    """Runs a method over its clients, round by round.

    Attributes:
        schedule: the cohort of each round; read when the round begins.
        epochs: local epochs, which bound the steps that a client may claim.
        opening: exchanges before the first training, whatever the method.
        names: of the clients, where they have some.
        noise: what is added to sums, for differential privacy; cohorts are then drawn in secret.
    """

    method: Method
    transport: Transport
    schedule: Sequence[Sequence[int]]
    settings: FederationSettings
    seed: int
    epochs: int
    opening: Sequence[Stage] = ()
    names: Sequence[str] = ()
    noise: Noise | None = None

    def stages(self, round: int) -> Sequence[Stage]:
        """The exchanges of a round: the method's, and before the first training the opening."""
        return stages_of(self.method, self.opening, round)

    def run(
        self,
        state: Record,
        start: int,
        observe: Callable[[Event], None],
        after_round: Callable[[int, Record], None],
    ) -> Record:
        """Run rounds ``start`` … T−1; ``after_round(t, state)`` saves and evaluates.

        After the last training nobody goes on from the global model, and the average takes its
        place: a stage that still follows sees the model that will be given away. The run ends
        early, with that model, where ε does not suffice for another round.
        """
        average = ServerAverage(self.settings.server_average)
        for round in range(start, len(self.schedule)):
            began, tally = time.perf_counter(), Tally()
            try:
                cohort = self._cohort(round)
            except BudgetSpentError:
                return average.shown(state)
            for stage in self.stages(round):
                stopping.end_if_asked()
                before, asked = state, cohort
                if stage.everyone:  # who holds images now: one may have joined since last round
                    asked = sorted(k for k, size in self.transport.sizes.items() if size > 0)
                if asked or self.noise is not None:
                    # An empty cohort of a private run must look like any other: it is noise alone.
                    messages = stage.broadcast(state, round, asked or [min(self.transport.sizes)])
                    sent = messages if asked else {}
                    bring = self._sum if self.settings.server_sees == "sums" else self._replies
                    replies = bring(stage, state, round, sent, tally)
                    outcome = stage.aggregate(state, round, messages, replies)
                    tally.left_out += (
                        self._named(Failure(client, stage.name, round, reason, cause="rule"))
                        for client, reason in outcome.left_out.items()
                    )
                    self._enforce_limit(stage, round, len(sent), tally)
                    tally.weights |= {k: w for k, w in outcome.weights.items() if k != EVERYBODY}
                    tally.log.update(outcome.log)
                    state = outcome.state
                    state = average.add(before, state, round) if stage.train else state
                if stage.train and round + 1 == len(self.schedule):  # also if nobody was asked
                    state = average.shown(state)
            event = tally.event(round, cohort, time.perf_counter() - began)
            if self.noise is not None:
                event["privacy"] = self.noise.ledger.spent()
            observe(event)
            after_round(round, state)
        return state

    def _cohort(self, round: int) -> Sequence[int]:
        """The clients of a round; of a private one, it is written down first that it begins."""
        if self.noise is None:
            return self.schedule[round]
        assert isinstance(self.schedule, Cohorts)
        ledger, everyone = self.noise.ledger, [s.everyone for s in self.stages(round)]
        asked = Exchanges(everyone.count(False), everyone.count(True))

        def begin(cohort: int, clients: int) -> npt.NDArray[np.float64]:
            ledger.begin(round, asked, cohort, clients)
            return ledger.stream("cohort", round).uniform(clients)

        return self.schedule.draw(round, begin)

    def _replies(
        self, stage: Stage, state: Record, round: int, sent: Messages, tally: Tally
    ) -> Replies:
        """Good replies, largest clients first; drop-outs and failures only leave a note.

        So clients of like size come together, which a transport can train faster. The order is the
        same for every transport, so that sums over replies have the same bits.
        """
        expected, asked = self._expected(stage, state), self._asked(stage, round, sent, tally)
        for answer in answers(self.transport, stage, round, asked):
            if isinstance(answer, Reply):
                reason = self._doubt(stage, answer, expected)
                if reason is None:
                    tally.count(answer, self.epochs if stage.train else 0)
                    yield answer
                    continue
                answer = Failure(answer.client, stage.name, round, reason)
            tally.left_out.append(self._named(answer))

    def _named(self, failure: Failure) -> Failure:
        """A failure with its client's name, and no more of its reason than can be read."""
        known = 0 <= failure.client < len(self.names)
        name = self.names[failure.client] if known else failure.name
        return replace(failure, name=name, reason=failure.reason[:LONGEST_REASON])

    def _asked(self, stage: Stage, round: int, sent: Messages, tally: Tally) -> dict[int, Record]:
        """The messages that arrive, largest clients first; the others drop out."""
        rate = self.settings.drop_rate
        lost = {k for k in sent if drops_out(rate, self.seed, round, k)}
        known = {failure.client for failure in tally.left_out if failure.cause == "dropped"}
        why = "it was lost after it received its message (federation.drop_rate)"
        tally.left_out += (
            self._named(Failure(k, stage.name, round, why, cause="dropped")) for k in lost - known
        )
        tally.bytes_down += sum(message.nbytes for message in sent.values())
        order = sorted(sent, key=lambda k: (-self.transport.sizes[k], k))
        return {k: sent[k] for k in order if k not in lost}

    def _sum(
        self, stage: Stage, state: Record, round: int, sent: Messages, tally: Tally
    ) -> Replies:
        """One reply for the whole cohort: the mean model, and sums; nothing of single clients.

        A sum over too few clients says too much of each: it is thrown away, and the event says so.
        A transport that adds up by itself may have added anything: its sum is looked at. With
        noise, a sum that nobody is in is noise alone, so that nobody can tell that; nor does the
        reply say who is.
        """
        asked, noise = self._asked(stage, round, sent, tally), self.noise

        def doubt(share: Reply) -> str | None:
            forms = self._share_forms(stage, state, round, sent[share.client], share.client)
            return problem(share.record, forms, share.finite)

        own = self.transport if isinstance(self.transport, Summing) else None
        adds = own or AddedUp(self.transport, doubt)
        total = adds.total(stage, round, asked) if asked else Total(None, (), (), 0)
        tally.left_out += map(self._named, total.failures)
        tally.bytes_up += total.nbytes
        record, least = total.record, self.settings.sum_least
        if own and record and (reason := out_of_range(record, {}, None)) is not None:
            lost = (Failure(k, stage.name, round, reason) for k in total.clients)
            tally.left_out += map(self._named, lost)
            record = None
        if noise is not None:
            if record is None:
                noise.ledger.noise_alone.append(stage.name)
                record = self._nothing(stage, state, round)
            elif stage.train:
                tally.reported += total.clients
            yield Reply(EVERYBODY, 0, noise.released(record, state, stage.name, round), True)
        elif record is not None and len(total.clients) >= least:
            numbers = {name: float(t) for name, t in record.get(NUMBERS).items()}
            if stage.train:
                tally.add(total.clients, numbers, self.epochs)
            groups, examples = pooled(record, state), int(numbers.get("examples", 0))
            yield Reply(EVERYBODY, examples, Record(groups), True, clients=total.clients)
        elif record is not None:
            few = f"its sum has {len(total.clients)} shares, federation.sum_least is {least}"
            lost = (Failure(k, stage.name, round, few, cause="rule") for k in total.clients)
            tally.left_out += map(self._named, lost)

    def _share_forms(
        self, stage: Stage, state: Record, round: int, message: Record, client: int
    ) -> Forms:
        """What a client's share must look like."""
        expected, images = self._expected(stage, state), self.transport.sizes[client]
        forms = self.method.share_forms(round, message, expected, images)
        # Numbers for events do not leave a private client.
        return {g: own for g, own in forms.items() if self.noise is None or g != NUMBERS}

    def _nothing(self, stage: Stage, state: Record, round: int) -> Record:
        """The sum of no shares at all: zeros in the form of a share."""
        client = min(self.transport.sizes)
        (message,) = stage.broadcast(state, round, [client]).values()
        forms = self._share_forms(stage, state, round, message, client)
        device = next(t.device for _, t in state.tensors())
        return Record(
            {
                group: {
                    n: torch.zeros(f.shape, dtype=f.dtype, device=device) for n, f in own.items()
                }
                for group, own in forms.items()
                if own
            }
        )

    def _doubt(self, stage: Stage, reply: Reply, expected: Forms) -> str | None:
        """Why a reply is not believed, or None."""
        announced = self.transport.sizes[reply.client]
        if reply.examples != announced:
            return f"it claims {reply.examples} images, and announced {announced}"
        reason = problem(reply.record, expected, reply.finite)
        if reason is None and stage.train:
            # Steps are what some methods weigh by; a client may stop early, but not do more.
            most = self.epochs * -(-announced // self.method.task.batch_size)
            steps = reply.record.scalars.get("steps")
            if isinstance(steps, bool) or not isinstance(steps, int) or not 0 <= steps <= most:
                reason = f"it claims {steps!r} steps; 0 to {most} are possible"
        return reason

    def _expected(self, stage: Stage, state: Record) -> Forms:
        """Groups and tensors that a reply of this stage must have."""
        forms: dict[str, Mapping[str, Form]] = {}
        if stage.train:
            for group in (PARAMS, BUFFERS):
                members = state.get(group).items()
                forms[group] = {n: Form(tuple(t.shape), t.dtype) for n, t in members}
        if stage.sweep is not None:
            forms[stage.sweep.group] = stage.sweep.forms(state.get(PARAMS))
        return forms

    def _enforce_limit(self, stage: Stage, round: int, asked: int, tally: Tally) -> None:
        failed = [f for f in tally.left_out if f.stage == stage.name and f.cause == "failed"]
        if len(failed) > self.settings.max_failures * asked:
            shown = "; ".join(str(f) for f in failed[:3])
            raise ClientLimitError(
                f"{len(failed)} of {asked} clients failed in {stage.name} of round {round + 1}, "
                f"more than federation.max_failures = {self.settings.max_failures:g} allows: "
                f"{shown}. The state after {round} rounds is saved. Mend the cause and resume."
            )


def stages_of(method: Method, opening: Sequence[Stage], round: int) -> Sequence[Stage]:
    """The exchanges of a round; what opens a run comes before the first training."""
    stages = method.stages(round)
    if round > 0 or not opening:
        return stages
    first = next((i for i, stage in enumerate(stages) if stage.train), len(stages))
    return [*stages[:first], *opening, *stages[first:]]
