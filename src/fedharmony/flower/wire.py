"""Parcels as Flower messages: one array per part, never one per tensor.

A model has hundreds of tensors, and Flower asks for every array several times; a part is one array
whatever it holds. Arrays that are equal are stored and sent once, so a model that is packed once
for all sites travels once into the SuperLink.

Imports no torch: the relay at a site uses this module.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, RecordDict

from fedharmony.errors import TransportError
from fedharmony.site.parcel import MOST_REASON, Parcel, checked, checked_words

if TYPE_CHECKING:
    from flwr.serverapp import Grid

#: Names of the two records of a message.
PARTS, ABOUT = "parts", "about"
#: What Flower is told the bytes of an array are.
KIND_OF_BYTES = "safetensors"
#: A message is announced before its parts are there. Flower asks again for a part after one second,
#: then two; we so soon, and no less often than every second, for as long.
PATIENCE: dict[str, Any] = {
    "initial_backoff": 0.1,
    "backoff_cap": 1.0,
    "max_tries_per_object": None,
}


def content_of(parcel: Parcel) -> RecordDict:
    """A parcel as the content of a message."""
    arrays = {n: Array("uint8", (len(b),), KIND_OF_BYTES, b) for n, b in parcel.parts.items()}
    about = ConfigRecord({"kind": parcel.kind, "words": json.dumps(parcel.words)})
    return RecordDict({PARTS: ArrayRecord(arrays), ABOUT: about})


def parcel_of(content: RecordDict) -> Parcel:
    """The parcel behind :func:`content_of`; anything else is a :class:`TransportError`."""
    try:
        about, arrays = content.config_records[ABOUT], content.array_records[PARTS]
        words = checked_words(about["words"])
    except (KeyError, ValueError) as error:
        raise TransportError(f"A message is no parcel: {error}.") from None
    return checked(Parcel(str(about["kind"]), words, {n: a.data for n, a in arrays.items()}))


class GridPost:
    """A post over a Flower grid."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def nodes(self) -> dict[int, str]:
        """The nodes that are online, with the names they are registered by."""
        return {node.node_id: node.name for node in self._grid.get_nodes()}

    def push(self, parcels: Mapping[int, Parcel], ttl_s: float) -> dict[str, int]:
        """Send a parcel to each node; what is not answered by then is not worked on any more."""
        if not parcels:
            return {}
        messages = [
            Message(content_of(parcel), dst_node_id=node, message_type=MessageType.QUERY, ttl=ttl_s)
            for node, parcel in parcels.items()
        ]
        numbers = self._grid.push_messages(messages)
        return {number: node for number, node in zip(numbers, parcels, strict=True) if number}

    def pull(self, numbers: Collection[str]) -> dict[str, Parcel | str]:
        """Answers that have come; an error of Flower's becomes text."""
        answers: dict[str, Parcel | str] = {}
        for message in self._grid.pull_messages(numbers) if numbers else ():
            number = message.metadata.reply_to_message_id
            if message.has_error():
                reason = str(message.error.reason)[:MOST_REASON]
                answers[number] = f"Flower says: {reason} ({message.error.code})"
                continue
            try:
                answers[number] = parcel_of(message.content)
            except TransportError as error:
                answers[number] = str(error)
        return answers
