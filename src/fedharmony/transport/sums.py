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

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from fedharmony.aggregate import added
from fedharmony.methods.base import Stage
from fedharmony.transport.base import Transport, answers
from fedharmony.types import Failure, Messages, Record, Reply, shapes_of


@dataclass(frozen=True)
class Total:
    """The sum of a cohort's shares, float64, or none; who is in it, and who is not, and why.

    ``nbytes`` are of all shares together; ``saved`` was trained again on the plain path.
    """

    record: Record | None
    clients: tuple[int, ...]
    failures: tuple[Failure, ...]
    nbytes: int
    saved: tuple[int, ...] = ()


@runtime_checkable
class Summing(Protocol):
    """A transport that brings back a sum, and no reply."""

    def total(self, stage: Stage, round: int, messages: Messages) -> Total:
        """The sum of the shares of all clients that could give one."""


class AddedUp:
    """Adds up, in the open, the shares that a transport brings back.

    A share that is not finite is left out by its client; one that has another form than the first
    is left out here. Nothing else can be checked of a share: what bears lies (``robust.py``) needs
    replies.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def total(self, stage: Stage, round: int, messages: Messages) -> Total:
        """The sum, in the order of messages, so that it has the same bits every time."""
        total: Record | None = None
        form: object = None
        clients, saved, failures, nbytes = list[int](), list[int](), list[Failure](), 0
        for answer in answers(self._transport, stage, round, messages):
            if isinstance(answer, Reply):
                found = {group: shapes_of(t) for group, t in answer.record.groups.items()}
                if answer.finite is False:
                    reason = "its share holds a value that is not finite"
                elif form not in (None, found):
                    reason = "its share has another form than those before it"
                else:
                    form, total = found, added(total, answer.record)
                    nbytes += answer.record.nbytes
                    clients.append(answer.client)
                    saved += [answer.client] if answer.saved else []
                    continue
                answer = Failure(answer.client, stage.name, round, reason)
            failures.append(answer)
        return Total(total, tuple(clients), tuple(failures), nbytes, tuple(saved))
