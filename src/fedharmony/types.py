"""The few types that everything else is made of."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Named tensors, for instance the parameters of a model.
Tensors: TypeAlias = dict[str, Tensor]
Scalar: TypeAlias = bool | int | float | str
Index: TypeAlias = npt.NDArray[np.int64]
Labels: TypeAlias = npt.NDArray[np.uint8]

#: Groups that every method uses. Parameters and buffers are kept apart (they average differently).
#: Frozen tensors are part of the server's state but never travel: every party makes them itself.
PARAMS = "params"
BUFFERS = "buffers"
FROZEN = "frozen"


@dataclass(frozen=True)
class Record:
    """Named groups of named tensors, plus named scalars.

    The one container that crosses a boundary: message to a client, reply, server state, client
    memory and checkpoint are all records. It maps one-to-one onto a safetensors file, onto
    Flower's records, and onto a byte count; it never holds a Python object that needs pickling.

    >>> r = Record({"params": {"w": torch.zeros(2, 3)}}, {"round": 4})
    >>> r.nbytes, r.get("params")["w"].shape, r.scalars["round"]
    (24, torch.Size([2, 3]), 4)
    """

    groups: Mapping[str, Mapping[str, Tensor]] = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    def get(self, group: str) -> Mapping[str, Tensor]:
        """The tensors of a group; empty when the record has no such group."""
        return self.groups.get(group, {})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors as ``("group/name", tensor)``."""
        for group, members in self.groups.items():
            for name, tensor in members.items():
                yield f"{group}/{name}", tensor

    def replace(
        self,
        groups: Mapping[str, Mapping[str, Tensor]] | None = None,
        scalars: Mapping[str, Scalar] | None = None,
    ) -> Record:
        """A copy with the given groups and scalars added or replaced."""
        return Record({**self.groups, **(groups or {})}, {**self.scalars, **(scalars or {})})

    @property
    def nbytes(self) -> int:
        """Payload bytes of the tensors (scalars are not counted)."""
        return sum(t.numel() * t.element_size() for _, t in self.tensors())

    def to(self, device: torch.device | str) -> Record:
        """The same record with its tensors on another device."""
        return Record(
            {
                g: {n: t.to(device) for n, t in members.items()}
                for g, members in self.groups.items()
            },
            self.scalars,
        )


@dataclass(frozen=True)
class Reply:
    """What one client sends back: its record and how many images stand behind it."""

    client: int
    examples: int
    record: Record


@dataclass(frozen=True)
class Failure:
    """A client that did not answer usefully: who, in which stage and round, and why."""

    client: int
    stage: str
    round: int
    reason: str

    def __str__(self) -> str:
        return (
            f"client {self.client} left out of {self.stage}, round {self.round + 1}: {self.reason}"
        )
