"""Sums over a cohort in place of replies: what the server sees where it may see no client.

A client turns its reply into a *share* (:meth:`Method.share <fedharmony.methods.base.Method>`):
tensors that are only ever added up. Shares of one stage have one form, so a cohort's sum is one
record, from which nobody can tell what a single client has sent.

:class:`Summing` is where secure aggregation goes: a transport that has ``total`` adds shares up on
its own way, for instance under masks that cancel out, and the server never holds a single one.
:class:`AddedUp` does it in the open, around any transport: the same sums, and a server (this
process) that could look at what it adds. What goes into ``aggregate`` is the same in both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

from fedharmony.aggregate import added
from fedharmony.methods.base import Stage
from fedharmony.transport.base import Transport, answers
from fedharmony.transport.replies import out_of_range
from fedharmony.types import Failure, Messages, Record, Reply

#: Why a reply or share cannot be used, or None.
Doubt: TypeAlias = Callable[[Reply], str | None]


@dataclass(frozen=True)
class Total:
    """The sum of a cohort's shares, float64, or none; who is in it, and who is not, and why.

    ``nbytes`` are of all shares together.
    """

    record: Record | None
    clients: tuple[int, ...]
    failures: tuple[Failure, ...]
    nbytes: int


@runtime_checkable
class Summing(Protocol):
    """A transport that brings back a sum, and no reply."""

    def total(self, stage: Stage, round: int, messages: Messages) -> Total:
        """The sum of the shares of all clients that could give one."""


def _not_finite(share: Reply) -> str | None:
    return out_of_range(share.record, {}, share.finite)


class AddedUp:
    """Adds up, in the open, the shares that a transport brings back.

    ``doubt`` says why a share cannot be added, or None; its client alone is left out. A share that
    has the right form may still lie: a robust rule (``robust/``) needs replies.
    """

    def __init__(self, transport: Transport, doubt: Doubt = _not_finite) -> None:
        self._transport, self._doubt = transport, doubt

    def total(self, stage: Stage, round: int, messages: Messages) -> Total:
        """The sum, in the order of messages, so that it has the same bits every time."""
        total: Record | None = None
        clients, failures, nbytes = list[int](), list[Failure](), 0
        for answer in answers(self._transport, stage, round, messages):
            if isinstance(answer, Reply):
                reason = self._doubt(answer)
                if reason is None:
                    total = added(total, answer.record)
                    nbytes += answer.record.nbytes
                    clients.append(answer.client)
                    continue
                answer = Failure(answer.client, stage.name, round, f"its share: {reason}")
            failures.append(answer)
        return Total(total, tuple(clients), tuple(failures), nbytes)
