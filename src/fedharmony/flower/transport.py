"""Messages to sites and replies back, over anything that carries parcels."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from fedharmony import fallbacks
from fedharmony.errors import TransportError
from fedharmony.flower.post import Post, collect
from fedharmony.flower.roster import Roster
from fedharmony.methods.base import Stage
from fedharmony.site.measure import MEASURED, Question, without
from fedharmony.site.parcel import MEASURE, REPLY, STAGE, Parcel
from fedharmony.site.records import pack, parcels, record_of
from fedharmony.types import Failure, Record, Reply


@dataclass
class Sites:
    """The transport of a run whose clients are sites.

    Replies are taken as they come and given on in the order of the messages, so that sums have the
    same bits whoever is faster. A site that does not answer in time is a failure of this exchange;
    it is not asked again before its answer, or an error in its place, has come.

    Attributes:
        post: carries parcels.
        run: what every site is told of the run.
        roster: who the sites are, and where.
        limit_s: seconds that an exchange may take.
        heard: the last round in which a site's training arrived; a site forgets later ones.
        riding: a model to be measured, which goes with the next message that trains.
        measured: what sites answered to that, by client id.
    """

    post: Post
    run: Mapping[str, Any]
    roster: Roster
    limit_s: float
    heard: dict[int, int] = field(default_factory=dict)
    riding: Question | None = None
    measured: dict[int, Parcel | str] = field(default_factory=dict)
    _owing: dict[int, tuple[str, float]] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[int, int]:
        """Number of images of each site that was online when the round began."""
        return {k: n for k, n in self.roster.sizes.items() if k in self.roster.here}

    def exchange(
        self, stage: Stage, round: int, messages: Mapping[int, Record]
    ) -> Iterator[Reply | Failure]:
        """Ask every site for the stage of that name; answers in the order of the messages."""
        node_of = {k: self.roster.nodes.get(name, 0) for k, name in self.roster.names.items()}
        reasons = self._unable(messages, node_of)
        said = {
            node_of[k]: self._said(stage, round, k, message)
            for k, message in messages.items()
            if k not in reasons
        }
        client_at = {node_of[k]: k for k in messages}
        late: dict[int, str] = {}
        arriving = collect(self.post, parcels(STAGE, said), self.limit_s, late)
        answers: dict[int, Parcel | str] = dict(reasons)
        for client in messages:
            while client not in answers:
                node, answer = next(arriving)
                answers[client_at[node]] = answer
                if node in late:
                    self._owing[client_at[node]] = late[node], time.monotonic() + self.limit_s
            yield self._answer(stage, round, client, answers.pop(client))

    def _said(
        self, stage: Stage, round: int, client: int, message: Record
    ) -> tuple[dict[str, Any], Record]:
        """Words and record for a site."""
        words = {
            "run": {**self.run, "client": client},
            "stage": stage.name,
            "round": round,
            "heard": self.heard.get(client, -1),
            "scalars": dict(message.scalars),
        }
        if stage.train and self.riding is not None:
            more, message = self.riding.beside(message)
            words |= more
        return words, message

    def measure(self, question: Question) -> dict[int, Parcel | str]:
        """Ask all sites that are online for a measurement, in an exchange of its own."""
        online, said, client_at = self.post.nodes(), {}, dict[int, int]()
        asked, model = question.beside(Record())
        for client, name in self.roster.names.items():
            if (node := self.roster.nodes.get(name, 0)) in online and client not in self._owing:
                said[node] = {"run": {**self.run, "client": client}, **asked}, model
                client_at[node] = client
        answers = collect(self.post, parcels(MEASURE, said), self.limit_s)
        return {client_at[node]: answer for node, answer in answers}

    def _unable(self, messages: Mapping[int, Record], node_of: Mapping[int, int]) -> dict[int, str]:
        """Why some sites cannot be asked now: they are offline, or still owe an answer."""
        online = self.post.nodes()
        owed = {number: k for k, (number, _) in self._owing.items()}
        answered = self.post.pull(list(owed)) if owed else {}
        for number, client in owed.items():
            if number in answered or time.monotonic() > self._owing[client][1]:
                del self._owing[client]
        reasons = {k: "it still works on an earlier message" for k in messages if k in self._owing}
        offline = [k for k in messages if node_of[k] not in online]
        return reasons | dict.fromkeys(offline, "it is not online")

    def _answer(
        self, stage: Stage, round: int, client: int, answer: Parcel | str
    ) -> Reply | Failure:
        """What the round loop sees of an answer; the site is named where it failed."""

        def failure(reason: str) -> Failure:
            return Failure(client, stage.name, round, f"site {self.roster.names[client]}: {reason}")

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
        if isinstance(told := answer.words.get(MEASURED), dict):
            found = Record({MEASURED: record.get(MEASURED)})
            self.measured[client] = Parcel(REPLY, told, *pack([found]))
            record = without(record)
        fallbacks.add(answer.words.get("fallbacks"))
        if stage.train:
            self.heard[client] = round
        return Reply(client, examples, record)


def _numbers(scalars: Mapping[str, Any]) -> bool:
    return all(isinstance(value, int | float) for value in scalars.values())
