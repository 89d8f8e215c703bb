"""The little that is needed of Flower: something that carries parcels to nodes.

:mod:`fedharmony.flower.wire` makes one of a Flower grid, and tests make one of a dictionary.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Mapping
from typing import Protocol

from fedharmony import stopping
from fedharmony.site.parcel import Parcel

#: Least and most seconds between looks for replies; those before a site that could not answer is
#: asked again; and those that a message outlives the wait for its answer: else Flower says, in its
#: own words, that it has expired.
POLL_S, MOST_S, AGAIN_S, GRACE_S = 0.1, 1.0, 3.0, 10.0


class Post(Protocol):
    """Carries parcels to nodes, and answers back."""

    def nodes(self) -> Mapping[int, str]:
        """The nodes that are online now, with the names they are registered by ("" without)."""

    def push(self, parcels: Mapping[int, Parcel], ttl_s: float) -> Mapping[str, int]:
        """Send a parcel to each node; the numbers of the messages, with the node of each."""

    def pull(self, numbers: Collection[str]) -> Mapping[str, Parcel | str]:
        """Answers that have come since, by the message's number; text says why there is none."""


def pause(since: float | None = None, again: bool = False) -> None:
    """Wait before the next look, or (``again``) before a site is asked again.

    A tenth of the time that has passed ``since``, within bounds: a look costs both sides, and a
    site that trains for minutes is not missed for a second.
    """
    waited = 0.0 if since is None else time.monotonic() - since
    with stopping.interruptible():
        time.sleep(AGAIN_S if again else max(POLL_S, min(waited / 10, MOST_S)))


def collect(
    post: Post, parcels: Mapping[int, Parcel], wait_s: float, late: dict[int, str] | None = None
) -> Iterator[tuple[int, Parcel | str]]:
    """One answer per node, as they come; who is silent for too long has text for an answer.

    The numbers of messages that nobody has answered then are left in ``late``, by node.
    """
    waiting, since = dict(post.push(parcels, wait_s + GRACE_S)), time.monotonic()
    for node in parcels.keys() - waiting.values():
        yield node, "its message could not be sent"
    while waiting:
        for number, answer in post.pull(list(waiting)).items():
            if number in waiting:
                yield waiting.pop(number), answer
        if time.monotonic() > since + wait_s:
            break
        if waiting:
            pause(since)
    for number, node in waiting.items():
        if late is not None:
            late[node] = number
        yield node, f"no answer within {wait_s:g} seconds"
