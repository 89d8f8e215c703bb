"""Records as the parts of a parcel, and back, bit by bit."""

from __future__ import annotations

import json
from collections.abc import Mapping

from safetensors import SafetensorError
from torch import Tensor

from fedharmony.engine.checkpoint import from_bytes, to_bytes
from fedharmony.errors import TransportError
from fedharmony.types import Record, Scalar

#: The part that holds a whole record.
WHOLE = "whole"


class Packer:
    """Packs records into parts; a group that several records share is packed once.

    >>> import torch
    >>> shared = {"w": torch.ones(2)}
    >>> packer = Packer()
    >>> one, other = (packer.parts(Record({"params": shared})) for _ in range(2))
    >>> one["params"] is other["params"]
    True
    """

    def __init__(self) -> None:
        #: By identity; the group is kept so that no other one takes its place in memory.
        self._packed: dict[tuple[str, int], tuple[Mapping[str, Tensor], bytes]] = {}

    def parts(self, record: Record) -> dict[str, bytes]:
        """The groups of a record as bytes; groups without tensors are left out."""
        return {group: self._pack(group, g) for group, g in record.groups.items() if len(g)}

    def _pack(self, group: str, members: Mapping[str, Tensor]) -> bytes:
        key = group, id(members)
        if key not in self._packed:
            self._packed[key] = members, to_bytes(Record({group: members}))
        return self._packed[key][1]


def whole(record: Record) -> dict[str, bytes]:
    """All groups of a record as one part: every part costs a message several requests.

    For answers, of which no two have a group in common.
    """
    filled = {group: tensors for group, tensors in record.groups.items() if len(tensors)}
    return {WHOLE: to_bytes(Record(filled))} if filled else {}


def record_of(parts: Mapping[str, bytes], scalars: Mapping[str, Scalar]) -> Record:
    """The record of some parts; a part that holds another group, or none, is refused."""
    groups: dict[str, Mapping[str, Tensor]] = {}
    for group, data in parts.items():
        try:
            found = from_bytes(data).groups
            groups |= found if group == WHOLE else {group: found[group]}
        except (SafetensorError, KeyError, ValueError, TypeError, json.JSONDecodeError) as error:
            raise TransportError(
                f"Part {group!r} of a parcel is damaged: {type(error).__name__}: {error}."
            ) from None
    return Record(groups, dict(scalars))
