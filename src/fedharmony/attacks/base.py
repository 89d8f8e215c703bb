"""Who is malicious, and what attacks have in common."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, ClassVar

import numpy as np
import torch
from annotated_types import Ge, Gt, Le, Lt

from fedharmony.config import Checked, NameOf
from fedharmony.data.base import LabelledImages
from fedharmony.errors import ConfigError, nearest
from fedharmony.methods.base import Stage
from fedharmony.registry import Registry
from fedharmony.rng import numpy_rng, torch_rng
from fedharmony.transport.base import Transport
from fedharmony.types import PARAMS, Answers, Group, Index, Labels, Messages, Record, Reply, Tensors

attacks: Registry[type[Attack]] = Registry("attack", "fedharmony.attacks")


@dataclass(frozen=True)
class AttackSettings(Checked):
    """Clients that are malicious.

    Attributes:
        kind: what malicious clients do (``fedharmony list attacks``); "none" is the ordinary run,
            to the bit.
        share: of the clients that are malicious.
        strength: s; none takes the attack's own. Some attacks have none.
        claim: how many times its images a malicious client claims to have, in all rounds; none
            takes 1, and 10 for "size".
        rounds: first and last round with attacks, counted from 1; none means all.
        label: the name of the label that "label_off" switches off; none takes the most frequent.
    """

    kind: Annotated[str, NameOf(attacks, ("none",))] = "none"
    share: Annotated[float, Ge(0), Lt(1)] = 0.1
    strength: Annotated[float, Gt(0), Le(1e6)] | None = None
    claim: Annotated[float, Gt(0), Le(1e6)] | None = None
    rounds: tuple[Annotated[int, Ge(1)], Annotated[int, Ge(1)]] | None = None
    label: str | None = None

    def __post_init__(self) -> None:
        """Refuse what the kind of attack does not have."""
        super().__post_init__()
        if self.strength is not None and (self.kind == "none" or not attacks[self.kind].strength):
            strong = [name for name in attacks.names() if attacks[name].strength]
            raise ConfigError(
                f"attack.strength = {self.strength:g} has no meaning for attack.kind = "
                f"{self.kind!r}. Leave it out, or choose one of {', '.join(strong)}."
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
class Scene:
    """What malicious clients know when they answer.

    Attributes:
        received: what each of them received.
        honest: what each of them would answer honestly; empty if the attack does not look at it.
        false: what each of them answers after training on false labels, if the attack asks for it.
        others: what the honest clients of the cohort answer.
        strength: s.
        draw: a client's own random numbers, the same whenever it is asked.
    """

    received: Messages
    honest: Mapping[int, Record]
    false: Mapping[int, Record]
    others: Sequence[Record]
    strength: float
    draw: Callable[[int], torch.Generator]

    def update(self, client: int, reply: Record) -> Tensors:
        """The update of the model in a reply to what a malicious client received."""
        return difference(reply, self.received[client])

    def other_updates(self) -> list[Tensors]:
        """The updates of honest clients, or of the malicious ones where there are no others."""
        first = next(iter(self.received.values()))
        return [difference(reply, first) for reply in self.others or self.honest.values()]


def difference(reply: Record, received: Record) -> Tensors:
    """The update of the model in a reply; empty where it has none."""
    before = received.get(PARAMS)
    return {name: tensor - before[name] for name, tensor in reply.get(PARAMS).items()}


class Attack:
    """What malicious clients do; see the registry :data:`attacks`."""

    name: ClassVar[str]
    #: The strength s unless it is set; None has none.
    strength: ClassVar[float | None] = None
    #: How many times its images a malicious client claims to have, unless it is set.
    claim: ClassVar[float] = 1.0
    #: Whether the attack asks for replies of clients that train on false labels, on honest ones.
    trains_false: ClassVar[bool] = False
    trains_honest: ClassVar[bool] = True

    def false_labels(self, labels: Labels, label: int) -> Labels:
        """The labels of a malicious client's images: all turned."""
        return 1 - labels

    def replies(self, scene: Scene) -> dict[int, Record]:
        """What malicious clients answer; those left out answer honestly."""
        found = {}
        for client, reply in scene.honest.items():
            if update := scene.update(client, reply):
                theta = scene.received[client].get(PARAMS)
                new = self.changed(update, scene, client)
                found[client] = reply.replace({PARAMS: {n: theta[n] + u for n, u in new.items()}})
        return found

    def changed(self, update: Group, scene: Scene, client: int) -> Group:
        """The update that one malicious client sends in place of its honest one."""
        return update


@dataclass(frozen=True)
class Attackers:
    """Who is malicious in a run, of all clients that hold images, and how."""

    settings: AttackSettings = AttackSettings()
    clients: Sequence[int] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse a share that is nobody."""
        share = self.settings.share
        if self.active and not self.malicious:
            raise ConfigError(
                f"attack.share = {share:g} of {len(self.clients)} clients is nobody. Raise it, or "
                "set attack.kind = 'none'."
            )

    @property
    def active(self) -> bool:
        """Whether anybody attacks at all."""
        return self.settings.kind != "none"

    @cached_property
    def attack(self) -> Attack:
        """What they do."""
        return attacks[self.settings.kind]()

    @cached_property
    def malicious(self) -> frozenset[int]:
        """Who is malicious: the share of all clients, rounded, drawn without replacement."""
        if not self.active:
            return frozenset()
        count = round(self.settings.share * len(self.clients))
        rng = numpy_rng(self.seed, "liars")
        return frozenset(rng.choice(np.sort(self.clients), count, replace=False).tolist())

    def attacking(self, round: int, cohort: Sequence[int]) -> list[int]:
        """Who of a cohort attacks in a round (0, 1, …)."""
        first, last = self.settings.rounds or (1, math.inf)
        return sorted(self.malicious.intersection(cohort)) if first <= round + 1 <= last else []

    def over(self, transport: Transport, false: Callable[[], Transport] | None = None) -> Transport:
        """The transport as it is, or with attacks on the way back.

        ``false`` makes a way to the same clients with false labels.
        """
        if not self.active:
            return transport
        return Attacked(transport, self, false() if false and self.attack.trains_false else None)

    def falsified(
        self, train: LabelledImages, clients: Mapping[int, Index], classes: Sequence[str]
    ) -> LabelledImages:
        """The training images with the false labels of malicious clients."""
        labels, images = train.labels.copy(), np.concatenate([clients[k] for k in self.malicious])
        label = self.label(train, classes)
        labels[images] = self.attack.false_labels(labels[images], label)
        return replace(train, labels=labels)

    def label(self, train: LabelledImages, classes: Sequence[str]) -> int:
        """The place of the label that is switched off."""
        name = self.settings.label
        if name is None:
            return int(train.labels.sum(0, dtype=np.int64).argmax())
        if name not in classes:
            raise ConfigError(f"attack.label: there is no label {name!r}. {nearest(name, classes)}")
        return list(classes).index(name)


class Attacked:
    """A transport that brings replies back as malicious clients send them."""

    def __init__(
        self, honest: Transport, attackers: Attackers, false: Transport | None = None
    ) -> None:
        self._honest, self._attackers, self._false = honest, attackers, false
        settings, attack = attackers.settings, attackers.attack
        self._strength = settings.strength or attack.strength or 1.0
        self._claim = settings.claim or attack.claim

    @cached_property
    def sizes(self) -> Mapping[int, int]:
        """The number of images that each client announces."""
        sizes = dict(self._honest.sizes)
        for client in self._attackers.malicious & sizes.keys():
            sizes[client] = self._claimed(sizes[client])
        return sizes

    def _claimed(self, images: int) -> int:
        return round(self._claim * images)

    def exchange(self, stage: Stage, round: int, messages: Messages) -> Answers:
        """Replies in the order of messages; all honest ones are there before an attack is made."""
        attackers, attack = self._attackers, self._attackers.attack
        attacking = attackers.attacking(round, list(messages))
        received = {client: messages[client] for client in attacking}
        alone = self._false is not None and not attack.trains_honest
        asked = {k: m for k, m in messages.items() if not (alone and k in received)}
        answers = {answer.client: answer for answer in self._honest.exchange(stage, round, asked)}
        false: dict[int, Record] = {}
        if self._false is not None and received:
            for answer in self._false.exchange(stage, round, received):
                if isinstance(answer, Reply):
                    false[answer.client] = answer.record
                if alone:
                    answers[answer.client] = answer
        honest = {k: a.record for k in received if isinstance(a := answers.get(k), Reply)}
        rest = [a for client, a in answers.items() if client not in received]
        others = [answer.record for answer in rest if isinstance(answer, Reply)]
        scene = Scene(
            received,
            honest,
            false,
            others,
            self._strength,
            lambda client: torch_rng(attackers.seed, f"lie {stage.name}", round, client),
        )
        sent = attack.replies(scene) if honest else {}
        for client in messages:
            answer = answers[client]
            if isinstance(answer, Reply) and client in attackers.malicious:
                answer = replace(answer, examples=self._claimed(answer.examples))
            if isinstance(answer, Reply) and client in sent:
                # Whether its numbers are finite is the server's to find out.
                answer = replace(answer, record=sent[client], finite=None)
            yield answer
