"""All clients in this process: messages are handed over by reference, stacks train together."""

from __future__ import annotations

import traceback
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import torch

from fedharmony import fallbacks, stopping
from fedharmony.engine.cohort import Cohort
from fedharmony.engine.room import StackRule
from fedharmony.errors import CheckpointError, DeviceMemoryError
from fedharmony.methods.base import Stage
from fedharmony.registry import plugin_place
from fedharmony.transport.shelf import Shelf
from fedharmony.types import Answers, Failure, Messages, Reply

#: Clients that may be saved by the plain path; after one more, the whole run takes it.
SAVED_AT_MOST = 3


class InProcess:
    """Runs clients in stacks, as wide as a rule (or a number) allows.

    What an earlier run on the same data was answered is taken from the shelf.

    When a whole stack raises, its clients are run one by one, so that only those at fault are left
    out; each is named with its stage, round and reason. A stack that does not fit into the memory
    of the device is halved; if one client alone does not fit, the run stops: leaving it out would
    make the result depend on what else runs on the device.

    Each of these is a fallback, and so is the next (``fallbacks.py``).

    A client that comes back with values that are not finite is trained again on the plain path
    (float32, neither compiled nor recorded). If that helps more than a few times, the fast path is
    at fault, and the rest of the run goes without it.
    """

    def __init__(
        self,
        cohort: Cohort,
        stack: StackRule | int,
        tick: Callable[[int, int, int], None] | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        self.cohort = cohort
        self.sizes: Mapping[int, int] = cohort.sizes
        self._rule = StackRule(stack) if isinstance(stack, int) else stack
        self._tick, self._shelf = tick, shelf
        self._saved = 0

    def exchange(self, stage: Stage, round: int, messages: Messages) -> Answers:
        """Train stack after stack, in the order of the messages (largest first fills them best)."""
        asked, shelf = self._ask(stage, round, messages), self._shelf
        question = None if shelf is None else shelf.question(self.cohort, stage, messages)
        if shelf is None or question is None:
            return asked
        return shelf.answers(question, asked, self.cohort.data.device)

    def _ask(self, stage: Stage, round: int, messages: Messages) -> Answers:
        done, total, rule = 0, len(messages), self._rule
        waiting = deque(rule.stacks(list(messages), self.sizes))
        while waiting:
            stopping.end_if_asked()
            members = waiting.popleft()

            def tick(step: int, steps: int, done: int = done, size: int = len(members)) -> None:
                stopping.end_if_asked()
                if self._tick is not None:
                    self._tick(round, int(100 * (done + size * step / steps) / total), 100)

            for answer in self._run(stage, round, {k: messages[k] for k in members}, tick):
                if isinstance(answer, Reply) and self.cohort.method.task.sums:
                    answer = self.cohort.share(round, messages[answer.client], answer)
                yield answer
            done += len(members)
            if rule is not self._rule:  # the device holds fewer clients than the rule allowed
                rule, clients = self._rule, [k for stack in waiting for k in stack]
                waiting = deque(rule.stacks(clients, self.sizes))

    def _run(
        self, stage: Stage, round: int, messages: Messages, tick: Callable[[int, int], None]
    ) -> Answers:
        answers: list[Reply | Failure] = []
        parts: list[list[int]] = []
        try:
            replies = self.cohort.run(stage, round, messages, tick)
            answers = [self._made_finite(stage, round, messages, reply) for reply in replies]
        except (CheckpointError, DeviceMemoryError):
            raise  # a damaged memory, a full disk or a full device is no client's fault
        except Exception as error:
            if len(messages) > 1:
                parts = self._smaller(stage, round, list(messages), error)
            elif isinstance(error, torch.OutOfMemoryError):
                alone = f"client {next(iter(messages))} alone does not fit into what is free"
                raise DeviceMemoryError(
                    f"Round {round + 1} stopped: {alone} of the device's memory", error
                ) from None
            else:
                frames = traceback.extract_tb(error.__traceback__)
                ours = [frame for frame in frames if "site-packages" not in frame.filename]
                place = (ours or frames)[-1]
                where = plugin_place(error) or f"{Path(place.filename).name}:{place.lineno}"
                reason = f"{type(error).__name__}: {error} ({where})"
                answers = [Failure(next(iter(messages)), stage.name, round, reason)]
        # Here the error is gone, which held the memory of the stack that failed.
        for part in parts:
            yield from self._run(stage, round, {k: messages[k] for k in part}, tick)
        yield from answers

    def _made_finite(self, stage: Stage, round: int, messages: Messages, reply: Reply) -> Reply:
        """The reply; of the plain path if the fast one gave values that are not finite."""
        if reply.finite or self.cohort.mode.plain:
            return reply
        client = reply.client
        again = self.cohort.run(stage, round, {client: messages[client]}, plain=True)[0]
        if not again.finite:
            return again
        self._saved += 1
        fallbacks.note(
            "plain",
            f"Client {client}, round {round + 1}: values that are not finite came from the fast "
            "path, and finite ones from the plain path, which are used.",
        )
        if self._saved == SAVED_AT_MOST + 1:
            self.cohort.go_plain()
            fallbacks.note(
                "slow",
                f"That was client number {self._saved} of this run. The rest of the run is neither "
                "compiled nor recorded, and in float32.",
            )
        return again

    def _smaller(
        self, stage: Stage, round: int, clients: list[int], error: Exception
    ) -> list[list[int]]:
        """The parts of a stack that failed, to be tried again."""
        size, where = len(clients), f"{stage.name} of round {round + 1}"
        if not isinstance(error, torch.OutOfMemoryError):
            what = f"A stack of {size} clients failed in {where}: they are run one by one."
            fallbacks.note("stack", what, error)
            return [[client] for client in clients]
        self.cohort.release()
        half = -(-size // 2)
        narrower = self._rule.widest and min(half, self._rule.widest)
        self._rule = replace(self._rule, full=min(half, self._rule.full), widest=narrower)
        what = f"{size} clients at once do not fit into the memory of the device in {where}"
        fallbacks.note("memory", f"{what}; going on with {half}.", error)
        return [clients[:half], clients[half:]]
