"""Messages to sites and replies back, over anything that carries parcels.

:class:`Post` is the little that is needed of Flower; :mod:`fedharmony.flower.wire` makes one of a
Flower grid, and tests make one of a dictionary.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from fedharmony.errors import ClientLimitError, TransportError
from fedharmony.methods.base import Stage
from fedharmony.site.parcel import ENROL, FAILED, REPLY, STAGE, Parcel
from fedharmony.site.records import Packer, record_of
from fedharmony.types import Failure, Record, Reply

logger = logging.getLogger(__name__)

#: Seconds between looks for replies.
POLL_S = 0.3
#: Seconds before a site that could not answer is asked again.
AGAIN_S = 3.0
#: Seconds that a site has to say whether it takes part.
ENROL_S = 300.0


class Post(Protocol):
    """Carries parcels to nodes, and answers back."""

    def nodes(self) -> Mapping[int, str]:
        """The nodes that are online now, with the names they are registered by ("" without)."""

    def push(self, parcels: Mapping[int, Parcel], ttl_s: float) -> Mapping[str, int]:
        """Send a parcel to each node; the numbers of the messages, with the node of each."""

    def pull(self, numbers: Collection[str]) -> Mapping[str, Parcel | str]:
        """Answers that have come since, by the message's number; text says why there is none."""


@dataclass(frozen=True)
class Enrolled:
    """A site that takes part in a run.

    Attributes:
        node: where it is.
        images: how many it trains on.
        unknown: whether labels are unknown there.
        bound: hash of its data.
    """

    node: int
    images: int
    unknown: bool
    bound: str


@dataclass
class Enrolment:
    """What nodes said when they were asked to take part.

    Attributes:
        sites: those that do, by name.
        refused: why others do not, by node.
        failed: why others gave no answer that counts, by node; they may be asked again.
    """

    sites: dict[str, Enrolled] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)


def enrol(
    post: Post, run: Mapping[str, Any], nodes: Collection[int], wait_s: float = ENROL_S
) -> Enrolment:
    """Ask nodes to take part in a run."""
    registered, found = post.nodes(), Enrolment()
    parcels = {node: Parcel(ENROL, {"run": dict(run)}) for node in nodes}
    for node, answer in collect(post, parcels, wait_s):
        known = registered.get(node, "")
        who = f"site {known}" if known else f"node {node}"
        if isinstance(answer, str) or answer.kind == FAILED:
            found.failed[node] = f"{who}: {answer if isinstance(answer, str) else answer.reason}"
            continue
        if answer.kind != REPLY:
            found.refused[node] = f"{who}: {answer.reason}"
            continue
        try:
            name, site = _enrolled(node, answer.words)
        except TransportError as error:
            found.refused[node] = f"{who}: {error}"
            continue
        if known and name != known:
            found.refused[node] = f"{who} calls itself {name!r}: it has the key of another site"
        elif name in found.sites:
            found.refused[node] = f"node {node} calls itself {name!r}, as another node does"
        else:
            found.sites[name] = site
    return found


def _enrolled(node: int, words: Mapping[str, Any]) -> tuple[str, Enrolled]:
    name, images, bound = (words.get(key) for key in ("site", "images", "bound"))
    unknown = words.get("unknown")
    whole = isinstance(images, int) and not isinstance(images, bool) and images > 0
    if not (isinstance(name, str) and name and whole and isinstance(bound, str)):
        raise TransportError("its answer does not say who it is and what it has")
    return name, Enrolled(node, images, bool(unknown), bound)  # type: ignore[arg-type]


def collect(
    post: Post, parcels: Mapping[int, Parcel], wait_s: float
) -> Iterator[tuple[int, Parcel | str]]:
    """One answer per node, as they come; who is silent for too long has text for an answer."""
    waiting, until = dict(post.push(parcels, wait_s)), time.monotonic() + wait_s
    while waiting:
        for number, answer in post.pull(list(waiting)).items():
            if number in waiting:
                yield waiting.pop(number), answer
        if waiting and time.monotonic() > until:
            break
        if waiting:
            time.sleep(POLL_S)
    for node in waiting.values():
        yield node, f"no answer within {wait_s:g} seconds"


@dataclass
class Sites:
    """The transport of a run whose clients are sites.

    Replies are taken as they come and given on in the order of the messages, so that sums have the
    same bits whoever is faster. A site that does not answer in time is a failure of this exchange;
    it is not asked again before its answer, or an error in its place, has come.

    Attributes:
        post: carries parcels.
        run: what every site is told of the run.
        names: of the sites, by client id.
        sizes: number of images of each, by client id.
        nodes: where each is, by client id.
        limit_s: seconds that an exchange may take.
        heard: the last round in which a site's training arrived; a site forgets later ones.
    """

    post: Post
    run: Mapping[str, Any]
    names: Mapping[int, str]
    sizes: Mapping[int, int]
    nodes: dict[int, int]
    limit_s: float
    heard: dict[int, int] = field(default_factory=dict)
    _owing: dict[int, tuple[str, float]] = field(default_factory=dict)
    _strangers: set[int] = field(default_factory=set)

    def exchange(
        self, stage: Stage, round: int, messages: Mapping[int, Record]
    ) -> Iterator[Reply | Failure]:
        """Ask every site for the stage of that name; answers in the order of the messages."""
        reasons = self._unable(messages)
        packer = Packer()
        parcels = {
            self.nodes[k]: self._parcel(stage, round, k, message, packer)
            for k, message in messages.items()
            if k not in reasons
        }
        client_at = {self.nodes[k]: k for k in messages}
        numbers = self.post.push(parcels, self.limit_s)
        waiting = {client_at[node]: number for number, node in numbers.items()}
        until = time.monotonic() + self.limit_s
        answers: dict[int, Parcel | str] = dict(reasons)
        for client in messages:
            while client not in answers:
                self._pull(waiting, answers)
                if client in answers:
                    break
                if time.monotonic() > until or client not in waiting:
                    answers[client] = self._late(client, waiting)
                else:
                    time.sleep(POLL_S)
            yield self._answer(stage, round, client, answers.pop(client))

    def _parcel(
        self, stage: Stage, round: int, client: int, message: Record, packer: Packer
    ) -> Parcel:
        words = {
            "run": {**self.run, "client": client},
            "stage": stage.name,
            "round": round,
            "heard": self.heard.get(client, -1),
            "scalars": dict(message.scalars),
        }
        return Parcel(STAGE, words, packer.parts(message))

    def _pull(self, waiting: dict[int, str], answers: dict[int, Parcel | str]) -> None:
        """Take the answers that have come."""
        client_of = {number: client for client, number in waiting.items()}
        for number, answer in self.post.pull(list(client_of)).items():
            if (client := client_of.pop(number, None)) is not None:
                answers[client] = answer
                del waiting[client]

    def _late(self, client: int, waiting: dict[int, str]) -> str:
        if client not in waiting:
            return "its message could not be sent"
        self._owing[client] = waiting.pop(client), time.monotonic() + self.limit_s
        return f"no answer within {self.limit_s:g} seconds"

    def _unable(self, messages: Mapping[int, Record]) -> dict[int, str]:
        """Why some sites cannot be asked now: they are offline, or still owe an answer."""
        online = self.post.nodes()
        new = set(online) - set(self.nodes.values()) - self._strangers
        if new and any(self.nodes[k] not in online for k in messages):
            self._meet(new)
        owed = {number: k for k, (number, _) in self._owing.items()}
        answered = self.post.pull(list(owed)) if owed else {}
        for number, client in owed.items():
            if number in answered or time.monotonic() > self._owing[client][1]:
                del self._owing[client]
        reasons = {k: "it still works on an earlier message" for k in messages if k in self._owing}
        offline = [k for k in messages if self.nodes[k] not in online]
        return reasons | dict.fromkeys(offline, "it is not online")

    def _meet(self, nodes: Collection[int]) -> None:
        """Look whether a site has come back as another node."""
        sites = enrol(self.post, self.run, nodes, min(ENROL_S, self.limit_s)).sites
        by_name = {name: client for client, name in self.names.items()}
        for name, site in sites.items():
            if (client := by_name.get(name)) is not None and site.images == self.sizes[client]:
                logger.info("Site %s is back.", name)
                self.nodes[client] = site.node
        self._strangers |= set(nodes) - set(self.nodes.values())

    def _answer(
        self, stage: Stage, round: int, client: int, answer: Parcel | str
    ) -> Reply | Failure:
        """What the round loop sees of an answer; the site is named where it failed."""

        def failure(reason: str) -> Failure:
            return Failure(client, stage.name, round, f"site {self.names[client]}: {reason}")

        if isinstance(answer, str):
            return failure(answer)
        if answer.kind != REPLY:
            return failure(answer.reason)
        examples, scalars = answer.words.get("examples"), answer.words.get("scalars")
        if not isinstance(examples, int) or not isinstance(scalars, dict) or not _numbers(scalars):
            return failure("its answer is not of the form that was asked for")
        try:
            record = record_of(answer.parts, scalars)
        except TransportError as error:
            return failure(str(error))
        if stage.train:
            self.heard[client] = round
        return Reply(client, examples, record, saved=answer.words.get("saved") is True)


def _numbers(scalars: Mapping[str, Any]) -> bool:
    return all(isinstance(value, int | float) for value in scalars.values())


def gather(
    post: Post, run: Mapping[str, Any], least: int, wait_s: float, names: Collection[str] = ()
) -> dict[str, Enrolled]:
    """Wait until enough sites take part; too few at the end is an error that says why.

    Args:
        post: carries parcels.
        run: what sites are told of the run.
        least: the number of sites to wait for.
        wait_s: how long.
        names: sites that the run began with; no others are taken, if there are any.
    """
    sites: dict[str, Enrolled] = {}
    refused: dict[int, str] = {}
    until = time.monotonic() + wait_s
    while True:
        online = post.nodes()
        new = set(online) - set(refused) - {site.node for site in sites.values()}
        found = enrol(post, run, sorted(new)) if new else Enrolment()
        sites |= {name: site for name, site in found.sites.items() if not names or name in names}
        strangers = [site for name, site in found.sites.items() if name not in sites]
        refused |= found.refused | {site.node: "not of this run" for site in strangers}
        for reason in [*found.refused.values(), *found.failed.values()]:
            logger.warning("Not taking part: %s.", reason.rstrip("."))
        if len(sites) >= least:
            return sites
        # A refusal is not waited away: the operator should know at once.
        if found.refused or time.monotonic() > until:
            break
        time.sleep(AGAIN_S if found.failed else POLL_S)
    reasons = [*refused.values(), *found.failed.values()]
    said = "; ".join(reasons) or f"{len(online)} nodes are online"
    raise ClientLimitError(
        f"{len(sites)} of the {least} sites that this run waits for take part "
        f"({', '.join(sorted(sites)) or 'none'}): {said}. Nothing was trained. Mend the cause at "
        "the sites named, or ask for fewer sites, and give the same command again."
    )
