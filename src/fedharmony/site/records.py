"""Records as the parts of a parcel, and back, bit by bit."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fedharmony.errors import TransportError, shown
from fedharmony.records import from_bytes, to_bytes
from fedharmony.site.parcel import Parcel
from fedharmony.types import Record, Scalar

#: The part that several messages have in common, and the one of a message's own.
SHARED, OWN = "shared", "own"


def pack(records: Sequence[Record]) -> list[dict[str, bytes]]:
    """Records as parts: one of the groups that all share, packed once, and one of the others.

    No more than two, because every part costs a message several requests.

    >>> import torch
    >>> shared = {"w": torch.ones(2)}
    >>> one, other = pack([Record({"params": shared, "own": {"b": torch.ones(1)}}) for _ in "ab"])
    >>> sorted(one), one["shared"] is other["shared"]
    (['own', 'shared'], True)
    """
    first = records[0].groups if len(records) > 1 else {}
    same = [g for g, tensors in first.items() if all(r.get(g) is tensors for r in records)]
    common = _part(SHARED, {group: first[group] for group in same})
    return [
        common | _part(OWN, {g: tensors for g, tensors in r.groups.items() if g not in same})
        for r in records
    ]


def parcels(kind: str, said: Mapping[int, tuple[Mapping[str, Any], Record]]) -> dict[int, Parcel]:
    """Words and a record for each node as parcels."""
    parts = pack([record for _, record in said.values()])
    return {
        node: Parcel(kind, words, own)
        for (node, (words, _)), own in zip(said.items(), parts, strict=True)
    }


def _part(name: str, groups: Mapping[str, Mapping[str, Tensor]]) -> dict[str, bytes]:
    """Groups as a part; those without tensors are left out."""
    filled = {group: tensors for group, tensors in groups.items() if len(tensors)}
    return {name: to_bytes(Record(filled))} if filled else {}


def record_of(parts: Mapping[str, bytes], scalars: Mapping[str, Scalar]) -> Record:
    """The record of some parts; what is damaged, or there twice, is refused."""
    groups: dict[str, Mapping[str, Tensor]] = {}
    for name, data in parts.items():
        try:
            found = from_bytes(data).groups
        except Exception as error:  # whatever a parser makes of bytes that anybody may have sent
            raise TransportError(
                f"Part {shown(name)} of a parcel is damaged: {type(error).__name__}: {error}."
            ) from None
        if twice := groups.keys() & found.keys():
            raise TransportError(f"Two parts of a parcel hold the group {shown(min(twice))}.")
        groups |= found
    return Record(groups, dict(scalars))
