"""All clients in this process: messages are handed over by reference, stacks train together."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from fedharmony.engine.cohort import Cohort
from fedharmony.engine.room import StackRule
from fedharmony.errors import CheckpointError
from fedharmony.methods.base import Stage
from fedharmony.types import Failure, Record, Reply

log = logging.getLogger(__name__)


class InProcess:
    """Runs clients in stacks, as wide as a rule (or a number) allows.

    When a whole stack raises, its clients are run one by one, so that only those at fault are left
    out; each is named with its stage, round and reason. A stack that does not fit into the memory
    of the device is halved.
    """

    def __init__(
        self,
        cohort: Cohort,
        stack: StackRule | int,
        tick: Callable[[int, int, int], None] | None = None,
    ) -> None:
        self.cohort = cohort
        self.sizes: Sequence[int] = cohort.sizes
        self._rule = StackRule(stack) if isinstance(stack, int) else stack
        self._tick = tick

    def exchange(
        self, stage: Stage, round: int, messages: Mapping[int, Record]
    ) -> Iterator[Reply | Failure]:
        """Train stack after stack, in the order of the messages (largest first fills them best)."""
        stacks = self._rule.stacks(list(messages), self.sizes)
        done, total = 0, len(messages)
        while stacks:
            if answers := self._abreast(stage, round, messages, stacks):
                yield from answers
                return
            members = stacks.pop(0)

            def tick(step: int, steps: int, done: int = done, size: int = len(members)) -> None:
                if self._tick is not None:
                    self._tick(round, int(100 * (done + size * step / steps) / total), 100)

            yield from self._run(stage, round, {k: messages[k] for k in members}, tick)
            done += len(members)

    def _abreast(
        self, stage: Stage, round: int, messages: Mapping[int, Record], stacks: list[list[int]]
    ) -> list[Reply]:
        """All stacks, the first beside the others, if the first has a long and narrow end.

        Empty if it has none, if there is no room for it, or if anything went wrong: then stacks
        are run one after the other, and what is wrong is found there.
        """
        clients = sum(map(len, stacks))
        first = sorted((self.cohort.steps(k) for k in stacks[0]), reverse=True)
        narrow = first[0] >= 2 * first[len(first) // 2]
        if not (stage.train and len(stacks) > 1 and narrow and clients <= self._rule.abreast):
            return []

        def tick(step: int, steps: int) -> None:
            if self._tick is not None:
                self._tick(round, int(100 * step / steps), 100)

        try:
            parts = [{k: messages[k] for k in members} for members in stacks]
            return self.cohort.run_abreast(stage, round, parts, tick)
        except CheckpointError:
            raise
        except Exception as error:
            log.warning("Stacks cannot train side by side (%s); going on one by one.", error)
            self.cohort.release()
            self._rule = replace(self._rule, abreast=0)
            return []

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
                for part in self._smaller(list(messages), error):
                    yield from self._run(stage, round, {k: messages[k] for k in part}, tick)
                return
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}:{place.lineno}"
            reason = f"{type(error).__name__}: {error} ({where})"
            yield Failure(next(iter(messages)), stage.name, round, reason)

    def _smaller(self, clients: list[int], error: Exception) -> list[list[int]]:
        """The parts of a stack that failed, to be tried again."""
        if not isinstance(error, torch.OutOfMemoryError):
            return [[client] for client in clients]
        self.cohort.release()
        half = -(-len(clients) // 2)
        self._rule = replace(self._rule, full=min(half, self._rule.full), widest=half)
        log.warning(
            "%d clients at once do not fit into the memory of the device; going on with %d.",
            len(clients),
            half,
        )
        return [clients[:half], clients[half:]]
