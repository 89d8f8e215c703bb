"""What leaves a client under given settings: overheard, not listed by hand.

A few clients with a few images each take part in the first, the second and the last round of the
run that the settings describe, and what they send is looked at.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedharmony.data.base import DataSet
from fedharmony.engine.memory import ClientMemory
from fedharmony.experiments.build import assemble
from fedharmony.experiments.settings import Settings
from fedharmony.methods.base import Stage
from fedharmony.privacy import Ledger
from fedharmony.server.federation import Federation
from fedharmony.server.sampling import Schedule
from fedharmony.transport.base import Transport
from fedharmony.types import BUFFERS, PARAMS, Failure, Form, Record, Reply

#: Clients that are overheard, at least, and images of each, at most.
CLIENTS, IMAGES = 3, 4


@dataclass(frozen=True)
class Item:
    """Something that a client sends: when, in which stage, who is asked, and how much it is.

    ``summed``: the server sees it only as a sum over clients; ``bound``: what is known of its
    values.
    """

    when: str
    stage: str
    asked: str
    name: str
    numbers: int
    nbytes: int
    summed: bool
    bound: str


@dataclass(frozen=True)
class Disclosure:
    """All that a client sends in a run, in the order in which it is first sent; and what it costs.

    ``privacy`` has ε, δ and the noise multiplier after all rounds; it is empty where there is no
    noise.
    """

    items: tuple[Item, ...]
    privacy: Mapping[str, float]
    rounds: int


@dataclass
class Overheard:
    """A transport that is listened to: one reply of each stage and round."""

    transport: Transport
    heard: dict[tuple[str, int], tuple[Stage, Reply]] = field(default_factory=dict)

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of images of each client."""
        return self.transport.sizes

    def exchange(
        self, stage: Stage, round: int, messages: Mapping[int, Record]
    ) -> Iterator[Reply | Failure]:
        """What the transport brings, in its order."""
        for answer in self.transport.exchange(stage, round, messages):
            if isinstance(answer, Reply):
                self.heard.setdefault((stage.name, round), (stage, answer))
            yield answer


def disclosure(settings: Settings, data: DataSet | None = None) -> Disclosure:
    """Find out what clients send under these settings; ``data`` saves loading them."""
    plain = replace(settings.engine, compile=False, graphs=False, precision="float32", stack=1)
    short = replace(settings, train=replace(settings.train, epochs=1), engine=plain)
    assembly = assemble(short, data=data)
    plan = assembly.blueprint
    most = max(CLIENTS, settings.federation.sum_least)
    holders = sorted((len(own), k) for k, own in assembly.clients.items() if len(own))[:most]
    tiny = {k: assembly.clients[k][:IMAGES] for _, k in holders}
    few = replace(assembly, clients=tiny)
    federation = few.federation(ClientMemory())
    overheard = Overheard(federation.transport)
    last = plan.rounds - 1
    sizes = {k: len(images) for k, images in tiny.items()}
    everybody = Schedule(sizes, plan.rounds, len(tiny), "uniform", 0)
    listening = replace(
        federation,
        transport=overheard,
        settings=replace(federation.settings, drop_rate=0.0, max_failures=0.0),
        schedule=everybody,
    )
    if (noise := listening.noise) is not None:  # with as much noise, and no end to the budget
        ledger = Ledger(replace(noise.ledger.budget, limit=math.inf))
        listening = replace(listening, noise=replace(noise, ledger=ledger))
    state = assembly.initial_state()
    brief = replace(everybody, rounds=min(2, last + 1))
    state = _rounds(replace(listening, schedule=brief), state, 0)
    if last > 1:
        _rounds(listening, state, last)
    spent = {} if plan.budget is None else plan.budget.spent(plan.rounds)
    return Disclosure(tuple(_items(listening, state, overheard, last)), spent, plan.rounds)


def _rounds(federation: Federation, state: Record, first: int) -> Record:
    return federation.run(state, first, lambda event: None, lambda round, state: None)


def _items(
    federation: Federation, state: Record, overheard: Overheard, last: int
) -> Iterator[Item]:
    """One line per stage and tensor (or model), with the rounds in which it is sent."""
    found: dict[tuple[str, str], tuple[Item, list[int]]] = {}
    for (name, round), (stage, reply) in overheard.heard.items():
        for item in _parts(federation, state, stage, reply):
            found.setdefault((name, item.name), (item, []))[1].append(round)
    for item, rounds in found.values():
        yield replace(item, when=_when(rounds, last))


def _parts(federation: Federation, state: Record, stage: Stage, reply: Reply) -> Iterator[Item]:
    asked = "all clients" if stage.everyone else "cohort"
    summed = federation.settings.server_sees == "sums"
    forms = {} if stage.sweep is None else stage.sweep.forms(state.get(PARAMS))
    group_of_forms = "" if stage.sweep is None else stage.sweep.group

    def item(name: str, numbers: int, nbytes: int, bound: str) -> Item:
        return Item("", stage.name, asked, name, numbers, nbytes, summed, bound)

    groups = {group: members for group, members in reply.record.groups.items() if members}
    for group, members in groups.items():
        noisy = ""
        if (noise := federation.noise) is not None:
            bound = noise.clipping.model if group == PARAMS else noise.clipping.sums
            added = noise.deviation(group, len(groups))
            noisy = f"length ≤ {bound:g}, sum + noise {added:.3g}"
        sizes = {n: (t.numel(), t.numel() * t.element_size()) for n, t in members.items()}
        if group.endswith((PARAMS, BUFFERS)):
            numbers, nbytes = (sum(column) for column in zip(*sizes.values(), strict=True))
            yield item(f"{group} ({len(sizes)} tensors)", numbers, nbytes, noisy or "none")
            continue
        for name, (numbers, nbytes) in sizes.items():
            form = forms.get(name) if group == group_of_forms and not summed else None
            yield item(f"{group}/{name}", numbers, nbytes, noisy or _range(form))
    if reply.examples:
        yield item("number of images", 1, 8, "none")
    for name in reply.record.scalars:
        yield item(f"{name} (a number)", 1, 8, "none")


def _range(form: Form | None) -> str:
    if form is None or (form.low, form.high) == (-float("inf"), float("inf")):
        return "none"
    return f"in [{form.low:g}, {form.high:g}]"


def _when(rounds: Sequence[int], last: int) -> str:
    """Rounds that were overheard (of the first, second and last), in words.

    >>> [_when(rounds, 9) for rounds in ([0], [0, 1, 9], [1, 9], [9])]
    ['first round', 'every round', 'from round 2', 'last round']
    """
    if set(rounds) == {0, min(1, last), last}:
        return "every round"
    if list(rounds) == [0]:
        return "first round"
    return "last round" if list(rounds) == [last] else f"from round {min(rounds) + 1}"
