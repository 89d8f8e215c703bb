"""Who takes part in a run: sites by their registered names, those that join late, those away.

A site's client id is given once and kept in the run's folder. The first sites are numbered in the
order of their names; one that comes later gets the next number, and is drawn from the round on that
begins after its answer. A site that is offline when a round begins is not drawn: it is no failure.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from fedharmony.errors import ClientLimitError, TransportError, shown
from fedharmony.experiments.blueprint import refuse_small_cohort
from fedharmony.flower.post import Post, collect, pause
from fedharmony.server.federation import FederationSettings
from fedharmony.server.sampling import Begin, Cohorts, Schedule, cohort_size
from fedharmony.site.parcel import ENROL, FAILED, REPLY, Parcel
from fedharmony.site.settings import site_name
from fedharmony.types import MOST_IMAGES

logger = logging.getLogger(__name__)

#: Seconds that a site has to say whether it takes part; and those in which a resumed run waits for
#: all of its sites: relays whose SuperLink was away come back one after the other, and with all of
#: them the rounds draw the cohorts that they would have drawn.
ENROL_S, REJOIN_S = 300.0, 60.0
#: Characters of a site's name, and of the hash of its data.
LONGEST_TEXT = 200


@dataclass(frozen=True)
class Terms:
    """How a server deals with its sites.

    Attributes:
        sites: how many it waits for before round 0.
        least: how many must be online when a round begins, and when a run is resumed.
        wait_s: how long it waits for them.
        limit_s: how long an exchange may take; who has not answered then has failed.
        registered: names of the sites that could be there, to say who is missing.
    """

    sites: int
    least: int = 1
    wait_s: float = 600.0
    limit_s: float = 3600.0
    registered: tuple[str, ...] = ()


@dataclass(frozen=True)
class Enrolled:
    """What a site says of itself when it takes part: images, unknown labels, hash of its data."""

    images: int
    unknown: bool
    bound: str


@dataclass(frozen=True)
class Site(Enrolled):
    """A site of a run: also its client id, and the first round that may draw it."""

    client: int
    joined: int


@dataclass
class Roster:
    """The sites of a run, and where they are now.

    Attributes:
        post: carries parcels.
        run: what every site is told of the run.
        terms: how many sites there must be, and how long to wait for them.
        sites: those that take part, by name.
        keep: writes them down; called when one has joined.
        nodes: where sites are, by name.
        refused: why nodes do not take part.
        here: the clients that were online when the round began.
    """

    post: Post
    run: Mapping[str, Any]
    terms: Terms
    sites: dict[str, Site] = field(default_factory=dict)
    keep: Callable[[], None] = lambda: None
    nodes: dict[str, int] = field(default_factory=dict)
    refused: dict[int, str] = field(default_factory=dict)
    here: list[int] = field(default_factory=list)
    #: Sites without a number yet; nodes without an answer yet, by the question's number.
    _new: dict[str, Enrolled] = field(default_factory=dict)
    _asked: dict[str, int] = field(default_factory=dict)

    @property
    def names(self) -> dict[int, str]:
        """Names of the sites, by client id."""
        return {site.client: name for name, site in self.sites.items()}

    @property
    def sizes(self) -> dict[int, int]:
        """Number of images of each site, by client id."""
        return {site.client: site.images for site in self.sites.values()}

    @property
    def founders(self) -> dict[str, Site]:
        """The sites that the run began with, in the order of their ids."""
        return {name: site for name, site in self.sites.items() if site.joined == 0}

    @property
    def unknown(self) -> bool:
        """Whether labels are unknown at a site that the run began with."""
        return any(site.unknown for site in self.founders.values())

    def tree(self) -> dict[str, Any]:
        """As the run's folder keeps it."""
        return {"run": self.run["id"], "sites": {n: asdict(s) for n, s in self.sites.items()}}

    # -- before the first round --------------------------------------------------------------------

    def gather(self) -> None:
        """Wait until enough sites take part; too few at the end is an error that says why."""
        least = min(self.terms.least, len(self.sites)) if self.sites else self.terms.sites
        until = time.monotonic() + self.terms.wait_s
        rejoined = time.monotonic() + min(self.terms.wait_s, REJOIN_S)
        while True:
            online, before, failed = self.post.nodes(), len(self.refused), list[str]()
            unmet = sorted(set(online) - set(self.refused) - set(self.nodes.values()))
            questions = dict.fromkeys(unmet, self._question)
            for node, answer in collect(self.post, questions, ENROL_S):
                failed += self._take(node, online.get(node, ""), answer)
            # A site that took part and refuses now has to be looked at, or taken offline.
            members = [node for node in self.refused if online.get(node) in self.sites]
            now = time.monotonic()
            wanted = least if now > rejoined else max(least, len(self.sites))
            if len(self.nodes) >= wanted and not members:
                break
            # A refusal is not waited away: the operator should know at once.
            if len(self.refused) > before or now > until:
                raise self._too_few(least, online, [*self.refused.values(), *failed])
            pause(again=bool(failed))
        if not self.sites:
            self._number(0)

    def _too_few(
        self, least: int, online: Mapping[int, str], reasons: Sequence[str]
    ) -> ClientLimitError:
        away = sorted({*self.terms.registered, *self.sites} - {*online.values(), *self.nodes})
        said = [*reasons, *([f"not online: {', '.join(away)}"] if away else [])]
        return ClientLimitError(
            f"{len(self.nodes)} of the {least} sites that this run waits for take part "
            f"({', '.join(sorted(self.nodes)) or 'none'}): "
            f"{'; '.join(said) or f'{len(online)} nodes are online'}. Nothing was trained. Mend "
            "the cause at the sites named, or ask for fewer sites, and give the same command again."
        )

    # -- between rounds ----------------------------------------------------------------------------

    def begin(self, round: int) -> list[int]:
        """The clients that a round may draw, as soon as enough of them are online."""
        until = time.monotonic() + self.terms.wait_s
        least = min(self.terms.least, len(self.sites))
        while len(here := self._look(round)) < least:
            if time.monotonic() > until:
                away = [name for name, site in self.sites.items() if site.client not in here]
                raise ClientLimitError(
                    f"{len(here)} of the {least} sites that a round needs are online; "
                    f"away: {', '.join(sorted(away))}. The state after {round} rounds is saved. "
                    "Resume when they are back, or with a smaller --least."
                )
            pause()
        self.here = sorted(here)
        return self.here

    def _look(self, round: int) -> list[int]:
        """The clients that are online; sites that have come since join.

        Nobody waits for a site that is new: it is asked now, and joins when its answer has come.
        """
        online = self.post.nodes()
        answers = self.post.pull(list(self._asked)) if self._asked else {}
        for number, answer in answers.items():
            if (node := self._asked.pop(number, None)) is not None:
                self._take(node, online.get(node, ""), answer)
        self._number(round)
        self._asked = {number: node for number, node in self._asked.items() if node in online}
        known = {*self.refused, *self.nodes.values(), *self._asked.values()}
        if unmet := sorted(set(online) - known):
            self._asked |= self.post.push(dict.fromkeys(unmet, self._question), ENROL_S)
        return [s.client for name, s in self.sites.items() if self.nodes.get(name) in online]

    # -- enrolment ---------------------------------------------------------------------------------

    @property
    def _question(self) -> Parcel:
        return Parcel(ENROL, {"run": dict(self.run)})

    def _take(self, node: int, known: str, answer: Parcel | str) -> list[str]:
        """Note what a node answered; the reason of a failure, after which it may be asked again."""
        who = f"site {known}" if known else f"node {node}"
        if isinstance(answer, str) or answer.kind == FAILED:
            reason = f"{who}: {answer if isinstance(answer, str) else answer.reason}"
            logger.warning("Not taking part: %s.", reason.rstrip("."))
            return [reason]
        try:
            if answer.kind != REPLY:
                raise TransportError(f"{who}: {answer.reason}")
            name, site = _enrolled(who, answer.words)
            self._refuse_odd(node, known, name, site)
        except TransportError as error:
            logger.warning("Not taking part: %s.", str(error).rstrip("."))
            self.refused[node] = str(error)
            return []
        self.nodes[name] = node
        if name not in self.sites:
            self._new[name] = site
        return []

    def _refuse_odd(self, node: int, known: str, name: str, site: Enrolled) -> None:
        """Refuse a site that is not who it says, or not what it was."""
        if known and name != known:
            raise TransportError(f"site {known} calls itself {name!r}: it has the key of another")
        if self.nodes.get(name, node) != node and self.nodes[name] in self.post.nodes():
            raise TransportError(f"node {node} calls itself {name!r}, as another node does")
        before = self.sites.get(name)
        if before is not None and (before.images, before.bound) != (site.images, site.bound):
            raise TransportError(f"site {name}: its data are not those that it joined with")
        if self.sites and before is None and site.unknown and not self.unknown:
            raise TransportError(
                f"site {name}: labels are unknown there, and the run began without unknown labels; "
                "it can take part in a new run"
            )

    def _number(self, round: int) -> None:
        """Give ids to the sites that are new."""
        for name, site in sorted(self._new.items()):
            self.sites[name] = Site(**vars(site), client=len(self.sites), joined=round)
            if round:
                logger.info("Site %s joins in round %d.", name, round + 1)
        if self._new:
            self._new.clear()
            self.keep()


def _enrolled(who: str, words: Mapping[str, Any]) -> tuple[str, Enrolled]:
    name, images, bound = (words.get(key) for key in ("site", "images", "bound"))
    whole = type(images) is int and 0 < images <= MOST_IMAGES
    texts = all(isinstance(text, str) and 0 < len(text) <= LONGEST_TEXT for text in (name, bound))
    if not (whole and texts):
        raise TransportError(f"{who}: its answer does not say who it is and what it has")
    try:
        site_name(str(name))
    except ValueError as error:
        raise TransportError(f"{who} calls itself {shown(name)}: {error}") from None
    return str(name), Enrolled(int(str(images)), bool(words.get("unknown")), str(bound))


@dataclass(frozen=True)
class Calls(Cohorts):
    """The cohort of each round, drawn when it begins of the sites that are online.

    While all sites of a run are online from the first round on, these are the cohorts of the
    simulator. A cohort is no larger than it would be with all sites. Under ``poisson`` a site keeps
    the chance that it has among all registered sites, whoever is away: the accounting of privacy
    relies on it, and is told how many are registered when the round begins.

    Attributes:
        roster: who is there.
        settings: how many take part, and how they are drawn.
        rounds: how many there are.
        seed: of the run; none where cohorts are secret.
    """

    roster: Roster
    settings: FederationSettings
    rounds: int
    seed: int | None

    def draw(self, round: int, begin: Begin | None = None) -> list[int]:
        """The cohort of a round, which begins now."""
        here, sizes, wanted = self.roster.begin(round), self.roster.sizes, self.settings
        share = cohort_size(len(sizes), wanted.participation, None)
        if wanted.sampling == "poisson":
            of_all = Schedule(sizes, self.rounds, wanted.cohort or share, "poisson", self.seed)
            return [k for k in of_all.draw(round, begin) if k in here]
        cohort = min(wanted.cohort or share, len(here))
        refuse_small_cohort(wanted.averaging, cohort)
        rule = wanted.sampling or "uniform"
        return Schedule({k: sizes[k] for k in here}, self.rounds, cohort, rule, self.seed)[round]
