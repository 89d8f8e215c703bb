"""All clients in this process: messages are handed over by reference, stacks train together."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from fedharmony.engine.cohort import Cohort
from fedharmony.errors import CheckpointError
from fedharmony.methods.base import Stage
from fedharmony.types import Failure, Record, Reply


class InProcess:
    """Runs clients in stacks of at most ``stack``.

    When a whole stack raises, its clients are run one by one, so that only those at fault are left
    out; each is named with its stage, round and reason.
    """

    def __init__(
        self, cohort: Cohort, stack: int, tick: Callable[[int, int, int], None] | None = None
    ) -> None:
        self.cohort = cohort
        self.sizes: Sequence[int] = [len(index) for index in cohort.clients]
        self._stack = stack
        self._tick = tick

    def exchange(
        self, stage: Stage, round: int, messages: Mapping[int, Record]
    ) -> Iterator[Reply | Failure]:
        """Train stack after stack, in client order."""
        clients = list(messages)
        for start in range(0, len(clients), self._stack):
            members = clients[start : start + self._stack]

            def tick(done: int, total: int, start: int = start, size: int = len(members)) -> None:
                if self._tick is not None:
                    share = (start + size * done / total) / len(clients)
                    self._tick(round, int(100 * share), 100)

            yield from self._run(stage, round, {k: messages[k] for k in members}, tick)

    def _run(
        self,
        stage: Stage,
        round: int,
        messages: Mapping[int, Record],
        tick: Callable[[int, int], None],
    ) -> Iterator[Reply | Failure]:
        try:
            yield from self.cohort.run(stage, round, messages, tick)
        except CheckpointError:  # a damaged memory or a full disk is no client's fault
            raise
        except Exception as error:
            if len(messages) > 1:
                for client, message in messages.items():
                    yield from self._run(stage, round, {client: message}, tick)
                return
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            reason = f"{type(error).__name__}: {error} ({where})"
            yield Failure(next(iter(messages)), stage.name, round, reason)
