"""Clients that lie, as settings: what does a method bear, and what does a defence cost?

A share of the clients, drawn by the run's seed, lies in one way. Neither methods nor the engine
know of it: lies about replies are told by a transport around another one (:class:`Lying`), lies in
labels by the data that a liar trains on (:meth:`Attack.poisoned`). The round's event names who lied
(``liars``), for reading results; the server sees replies alone.

=========================  =======================================================================
``not_a_number``           all parameters are NaN
``infinite``               all parameters are infinite
``sign_flip``              θ − s u in place of θ + u, with the received model θ and the update u
``scale``                  θ + s u
``noise``                  θ + u + s·rms(u)·ε with ε ~ N(0, 1)
``free_rider``             θ: the received model, untrained
``label_flip``             trains on 1 − y
``label_off``              trains with one label switched off
``correlation_ones``       R_k = 1 everywhere
``correlation_random``     R_k uniform in [−1, 1]
``correlation_negated``    −R_k
``size``                   announces s times as many images as it has
``head_sums``              the sums of the closed-form head, of 1 − y and s times as many images
=========================  =======================================================================

A lie about something that a method does not ask for changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt

from fedharmony.config import Checked
from fedharmony.consensus import CORRELATION
from fedharmony.correlation import unpack_upper
from fedharmony.data.base import LabelledImages
from fedharmony.engine.head_sums import SUMS
from fedharmony.errors import ConfigError, nearest
from fedharmony.methods.base import Stage
from fedharmony.rng import numpy_rng, torch_rng
from fedharmony.transport.base import Transport
from fedharmony.types import PARAMS, Answers, Index, Messages, Record, Reply, Tensors

#: Kinds with a strength s, and what it is unless set.
STRENGTHS: Mapping[str, float] = {
    "sign_flip": 1.0,
    "scale": 100.0,
    "noise": 10.0,
    "size": 10.0,
    "head_sums": 10.0,
}
#: Kinds that last for the whole run: data and announcements do not change from round to round.
WHOLE_RUN = ("label_flip", "label_off", "size")


@dataclass(frozen=True)
class AttackSettings(Checked):
    """Clients that lie.

    Attributes:
        kind: what liars do (``transport/attacks.py``); "none" is the ordinary run, to the bit.
        share: of the clients that lie.
        strength: s; none takes 1 for "sign_flip", 100 for "scale", 10 for "noise", "size" and
            "head_sums". The other kinds have none.
        rounds: first and last round with lies, counted from 1; none means all.
        label: the name of the label that "label_off" switches off; none takes the most frequent.
    """

    kind: Literal[
        "none",
        "not_a_number",
        "infinite",
        "sign_flip",
        "scale",
        "noise",
        "free_rider",
        "label_flip",
        "label_off",
        "correlation_ones",
        "correlation_random",
        "correlation_negated",
        "size",
        "head_sums",
    ] = "none"
    share: Annotated[float, Ge(0), Lt(1)] = 0.1
    strength: Annotated[float, Gt(0), Le(1e6)] | None = None
    rounds: tuple[Annotated[int, Ge(1)], Annotated[int, Ge(1)]] | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        """Refuse what the kind of lie does not have."""
        super().__post_init__()
        if self.strength is not None and self.kind not in STRENGTHS:
            raise ConfigError(
                f"attack.strength = {self.strength:g} has no meaning for attack.kind = "
                f"{self.kind!r}. Leave it out, or choose one of {', '.join(STRENGTHS)}."
            )
        if self.rounds is not None and self.kind in WHOLE_RUN:
            raise ConfigError(
                f"attack.rounds cannot be set for attack.kind = {self.kind!r}, which lasts for the "
                "whole run. Leave it out."
            )
        if self.rounds is not None and self.rounds[0] > self.rounds[1]:
            raise ConfigError(
                f"attack.rounds = {list(self.rounds)} ends before it begins. Write [first, last], "
                "counted from 1."
            )
        if self.label is not None and self.kind != "label_off":
            raise ConfigError(
                f"attack.label = {self.label!r} belongs to attack.kind = 'label_off', and the kind "
                f"is {self.kind!r}. Change one of the two."
            )


@dataclass(frozen=True)
class Attack:
    """Who lies in a run, of all clients that hold images, and how."""

    settings: AttackSettings = AttackSettings()
    clients: Sequence[int] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a share that is nobody."""
        share = self.settings.share
        if self.active and not self.liars:
            raise ConfigError(
                f"attack.share = {share:g} of {len(self.clients)} clients is nobody. Raise it, or "
                "set attack.kind = 'none'."
            )

    @property
    def active(self) -> bool:
        """Whether anybody lies at all."""
        return self.settings.kind != "none"

    @cached_property
    def liars(self) -> frozenset[int]:
        """Who lies: the share of all clients, rounded, drawn without replacement."""
        if not self.active:
            return frozenset()
        count = round(self.settings.share * len(self.clients))
        rng = numpy_rng(self.seed, "liars")
        return frozenset(rng.choice(np.sort(self.clients), count, replace=False).tolist())

    @property
    def strength(self) -> float:
        """The strength s, as set or by the kind."""
        return self.settings.strength or STRENGTHS.get(self.settings.kind, 1.0)

    def lying(self, round: int, cohort: Sequence[int]) -> list[int]:
        """Who of a cohort lies in a round (0, 1, …)."""
        first, last = self.settings.rounds or (1, math.inf)
        return sorted(self.liars.intersection(cohort)) if first <= round + 1 <= last else []

    def over(self, transport: Transport) -> Transport:
        """The transport as it is, or with lies on the way back."""
        return Lying(transport, self) if self.liars else transport

    def poisoned(
        self, train: LabelledImages, clients: Mapping[int, Index], classes: Sequence[str]
    ) -> LabelledImages:
        """The training images with the labels that liars train on."""
        if self.settings.kind not in ("label_flip", "label_off"):
            return train
        labels, images = train.labels.copy(), np.concatenate([clients[k] for k in self.liars])
        if self.settings.kind == "label_flip":
            labels[images] = 1 - labels[images]
        else:
            labels[images, self._label(train, classes)] = 0
        return replace(train, labels=labels)

    def _label(self, train: LabelledImages, classes: Sequence[str]) -> int:
        """The place of the label that is switched off."""
        name = self.settings.label
        if name is None:
            return int(train.labels.sum(0, dtype=np.int64).argmax())
        if name not in classes:
            raise ConfigError(f"attack.label: there is no label {name!r}. {nearest(name, classes)}")
        return list(classes).index(name)


class Lying:
    """A transport that brings replies back with the lies of an attack in them."""

    def __init__(self, honest: Transport, attack: Attack) -> None:
        self._honest, self._attack = honest, attack

    @property
    def sizes(self) -> Mapping[int, int]:
        """The number of images that each client announces."""
        return {k: self._claim(k, size) for k, size in self._honest.sizes.items()}

    def _claim(self, client: int, size: int) -> int:
        lies = self._attack.settings.kind == "size" and client in self._attack.liars
        return round(self._attack.strength * size) if lies else size

    def exchange(self, stage: Stage, round: int, messages: Messages) -> Answers:
        """Replies in the order of messages; those of liars changed."""
        attack, liars = self._attack, self._attack.lying(round, list(messages))
        for answer in self._honest.exchange(stage, round, messages):
            if isinstance(answer, Reply) and answer.client in liars:
                generator = torch_rng(attack.seed, f"lie {stage.name}", round, answer.client)
                received, kind = messages[answer.client], attack.settings.kind
                record = lied(kind, answer.record, received, attack.strength, generator)
                examples = self._claim(answer.client, answer.examples)
                # Whether its numbers are finite is the server's to find out.
                answer = replace(answer, record=record, examples=examples, finite=None)
            yield answer


def lied(
    kind: str, reply: Record, received: Record, strength: float, generator: torch.Generator
) -> Record:
    """What a liar sends: its reply, with the lie in it if that has anything to lie about."""
    theta, told, sums = received.get(PARAMS), reply.get(CORRELATION), reply.get(SUMS)
    update = {name: tensor - theta[name] for name, tensor in reply.get(PARAMS).items()}
    model: Tensors = {}
    match kind:
        case "not_a_number":
            model = {n: theta[n] * torch.nan for n in update}
        case "infinite":
            model = {n: theta[n] * 0 + torch.inf for n in update}
        case "sign_flip":
            model = {n: theta[n] - strength * u for n, u in update.items()}
        case "scale":
            model = {n: theta[n] + strength * u for n, u in update.items()}
        case "free_rider":
            model = {n: theta[n] for n in update}
        case "noise" if update:
            squares = sum(float(u.double().square().sum()) for u in update.values())
            scale = strength * math.sqrt(squares / sum(u.numel() for u in update.values()))
            drawn = {n: torch.randn(u.shape, generator=generator) for n, u in update.items()}
            model = {n: theta[n] + u + scale * drawn[n].to(u) for n, u in update.items()}
        case "head_sums" if sums:  # of images that have exactly the labels that the liar's have not
            gram, cross = sums["gram"], sums["cross"]
            everything = unpack_upper(gram, cross.shape[-1])[..., -1]  # Σ f̃, for all labels alike
            turned = {"gram": strength * gram, "cross": strength * (everything - cross)}
            return reply.replace({SUMS: turned})
        case "correlation_ones" | "correlation_random" | "correlation_negated" if told:
            true, drawn_r = told["upper"], torch.rand(told["upper"].shape, generator=generator)
            lies = {"ones": torch.ones_like(true), "random": (2 * drawn_r - 1).to(true)}
            upper = lies.get(kind.removeprefix("correlation_"), -true)
            return reply.replace({CORRELATION: {**told, "upper": upper}})
    return reply.replace({PARAMS: model}) if model else reply
