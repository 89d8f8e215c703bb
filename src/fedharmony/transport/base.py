"""The one interface between the round loop and wherever clients are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from fedharmony.methods.base import Stage
from fedharmony.types import Answers, Failure, Messages, Reply


class Transport(Protocol):
    """Delivers messages and brings replies back.

    A stage says what clients do, and holds functions: it cannot leave the process. Its *name* can.
    A transport to other processes or hosts sends the name, the round and the message; the other
    side, which has made the same method of the same settings, finds the stage again::

        stage = next(s for s in method.stages(round) if s.name == name)

    So names of stages are unique within a round, and what ``stages`` gives depends on settings and
    round alone. Only ``train``, ``sweep`` and ``name`` matter on the client's side; ``broadcast``
    and ``aggregate`` are the server's.

    The round loop waits for an exchange as long as it takes. A transport to other processes or
    hosts bounds it, and gives a :class:`Failure` for a client that does not answer in time (or ends
    the run, where it cannot go on without). Work in this process cannot be broken off: a client
    that hangs there (an image on a network disk that is gone) hangs the run.
    """

    @property
    def sizes(self) -> Mapping[int, int]:
        """Number of images of each client, by its id. It may grow between rounds."""

    def exchange(self, stage: Stage, round: int, messages: Messages) -> Answers:
        """One reply or failure per message, in the order of ``messages``."""


def answers(transport: Transport, stage: Stage, round: int, messages: Messages) -> Answers:
    """One answer of each client that was asked; a reply of anybody else is a failure, as is none.

    A transport to other hosts passes on what it gets: whoever calls it must not trust it.
    """
    waiting = set(messages)
    for answer in transport.exchange(stage, round, messages):
        if isinstance(answer, Reply) and answer.client not in waiting:
            reason = "it was not asked, or has answered already"
            answer = Failure(answer.client, stage.name, round, reason)
        waiting.discard(answer.client)
        yield answer
    for client in sorted(waiting):
        yield Failure(client, stage.name, round, "it did not answer")
