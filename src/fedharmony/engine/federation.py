"""The round loop. It knows stages, never methods; messages, never where clients are."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Gt, Le, Lt
from torch import Tensor

from fedharmony.engine.sampling import drops_out
from fedharmony.errors import ClientLimitError
from fedharmony.methods.base import Method, Stage
from fedharmony.transport.base import Transport
from fedharmony.types import PARAMS, Failure, Packed, Record, Reply

Event = dict[str, Any]
Shapes = Mapping[str, Mapping[str, tuple[int, ...]]]


@dataclass(frozen=True)
class FederationSettings:
    """Who takes part, and what happens when clients fail.

    Attributes:
        participation: share of the clients that take part in a round.
        cohort: number of clients per round; overrides ``participation``.
        sampling: draw clients with equal chance, or with chance ∝ their number of images.
        average: weigh models by number of images, or equally. Sampling *and* averaging by size
            gives large clients weight ∝ n²; that is what the FedHarmony paper prints.
        drop_rate: chance that a selected client is lost after it received its message.
        max_failures: a round in which a larger share of the asked clients fails stops the run.
    """

    participation: Annotated[float, Gt(0), Le(1)] = 0.5
    cohort: Annotated[int, Ge(1)] | None = None
    sampling: Literal["uniform", "size"] = "uniform"
    average: Literal["size", "uniform"] = "size"
    drop_rate: Annotated[float, Ge(0), Lt(1)] = 0.0
    max_failures: Annotated[float, Ge(0), Le(1)] = 0.5


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
    dropped: list[int] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)
    saved: list[int] = field(default_factory=list)
    weights: dict[int, float] = field(default_factory=dict)
    log: dict[str, float] = field(default_factory=dict)

    def count(self, reply: Reply, epochs: int) -> None:
        """Add a good reply; ``epochs`` is 0 for a stage without training."""
        self.bytes_up += reply.record.nbytes
        if reply.saved:
            self.saved.append(reply.client)
        if epochs:
            self.reported.append(reply.client)
            self.examples += reply.examples
            self.images += reply.examples * epochs
            self.rows += float(reply.record.scalars.get("rows", 0.0))
            self.loss += float(reply.record.scalars.get("loss", 0.0)) * reply.examples

    def event(self, round: int, cohort: Sequence[int], seconds: float) -> Event:
        """The round as one JSON line."""
        return {
            "event": "round",
            "round": round,
            "cohort": list(cohort),
            "reported": sorted(self.reported),
            "dropped": self.dropped,
            "failures": [asdict(f) for f in sorted(self.failures, key=lambda f: f.client)],
            # Clients whose fast path failed, and who were trained again on the plain one.
            "saved": sorted(self.saved),
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
    """One method, its clients, and the cohorts of all rounds."""

    method: Method
    transport: Transport
    schedule: Sequence[Sequence[int]]
    settings: FederationSettings
    seed: int
    epochs: int

    def run(
        self,
        state: Record,
        start: int,
        observe: Callable[[Event], None],
        after_round: Callable[[int, Record], None],
    ) -> Record:
        """Rounds ``start`` … T−1; ``after_round(t, state)`` evaluates and saves."""
        everyone = [k for k, size in enumerate(self.transport.sizes) if size > 0]
        for round in range(start, len(self.schedule)):
            began, tally, cohort = time.perf_counter(), Tally(), self.schedule[round]
            for stage in self.method.stages(round):
                sent = stage.broadcast(state, round, everyone if stage.everyone else cohort)
                replies = self._replies(stage, state, round, sent, tally)
                outcome = stage.aggregate(state, round, sent, replies)
                self._enforce_limit(stage, round, len(sent), tally)
                state = outcome.state
                tally.weights.update(outcome.weights)
                tally.log.update(outcome.log)
            observe(tally.event(round, cohort, time.perf_counter() - began))
            after_round(round, state)
        return state

    def _replies(
        self, stage: Stage, state: Record, round: int, sent: Mapping[int, Record], tally: Tally
    ) -> Iterator[Reply]:
        """Good replies, largest clients first; drop-outs and failures only leave a note.

        The order is one that a transport can train well in (clients of like size together), and
        the same whatever the transport: sums over replies have the same bits.
        """
        rate, expected = self.settings.drop_rate, self._expected(stage, state)
        lost = {k for k in sent if drops_out(rate, self.seed, round, k)}
        tally.dropped = sorted({*tally.dropped, *lost})
        tally.bytes_down += sum(message.nbytes for message in sent.values())
        order = sorted(sent, key=lambda k: (-self.transport.sizes[k], k))
        asked = {k: sent[k] for k in order if k not in lost}
        for answer in self.transport.exchange(stage, round, asked):
            if isinstance(answer, Reply):
                reason = problem(answer.record, expected, answer.finite)
                if reason is None:
                    tally.count(answer, self.epochs if stage.train else 0)
                    yield answer
                    continue
                answer = Failure(answer.client, stage.name, round, reason)
            tally.failures.append(answer)

    def _expected(self, stage: Stage, state: Record) -> Shapes:
        """Groups, names and shapes that a reply of this stage must have."""
        shapes: dict[str, Mapping[str, tuple[int, ...]]] = {}
        if stage.train:
            shapes[PARAMS] = {n: tuple(t.shape) for n, t in state.get(PARAMS).items()}
        if stage.sweep is not None:
            shapes[stage.sweep.group] = stage.sweep.shapes(state.get(PARAMS))
        return shapes

    def _enforce_limit(self, stage: Stage, round: int, asked: int, tally: Tally) -> None:
        failed = [f for f in tally.failures if f.stage == stage.name]
        if len(failed) > self.settings.max_failures * asked:
            shown = "; ".join(str(f) for f in failed[:3])
            raise ClientLimitError(
                f"{len(failed)} of {asked} clients failed in {stage.name} of round {round + 1}, "
                f"more than federation.max_failures = {self.settings.max_failures:g} allows: "
                f"{shown}. The state after {round} rounds is saved. Mend the cause and resume."
            )


def problem(record: Record, expected: Shapes, finite: bool | None = None) -> str | None:
    """Why a reply cannot be used, or None: a missing, misshapen or non-finite tensor.

    ``finite`` says that values are known to be finite; otherwise they are looked at.

    >>> problem(Record({"params": {"w": torch.tensor([float("nan")])}}), {"params": {"w": (1,)}})
    'params/w holds a value that is not finite'
    """
    for group, shapes in expected.items():
        tensors = record.get(group)
        if isinstance(tensors, Packed) and tensors.layout.shapes == tuple(shapes.items()):
            continue  # the same, as most replies have it, at one look
        if tensors.keys() != shapes.keys():
            odd = sorted(tensors.keys() ^ shapes.keys())
            return f"group {group!r} has missing or unexpected tensors: {', '.join(odd[:3])}"
        if isinstance(tensors, Packed):
            found = dict(tensors.layout.shapes)
        else:
            found = {name: tuple(t.shape) for name, t in tensors.items()}
        for name, shape in shapes.items():
            if found[name] != shape:
                return f"{group}/{name} has shape {found[name]}, expected {shape}"
    if finite:
        return None
    # One look at the device for the whole record, not one per tensor.
    values: list[Tensor] = []
    for members in record.groups.values():
        values += [members.row] if isinstance(members, Packed) else members.values()
    checks = [t.isfinite().all() for t in values if t.is_floating_point()]
    if not checks or bool(torch.stack(checks).all()):
        return None
    bad = next(n for n, t in record.tensors() if t.is_floating_point() and not t.isfinite().all())
    return f"{bad} holds a value that is not finite"
