"""The few types that everything else is made of.

============  =====================================================================================
`Record`      named groups of named tensors: a message, a reply, the server's state, a checkpoint
`Reply`       what a client sends back; a `Failure` where it could not
`Form`        what a tensor of a reply must look like to be believed
`Packed`      the tensors of a group as one row of memory (`Layout`), where that is faster
============  =====================================================================================

The server sends a record to each client of a round, gets a reply or failure from each, and folds
the replies into its new state: `server/federation.py` is that loop, and `methods/base.py` says what
is sent, what clients do with it, and how replies are folded.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

#: Named tensors, for instance the parameters of a model.
Tensors: TypeAlias = dict[str, Tensor]
#: The same, only to be read: one group of a record; and all its groups by name.
Group: TypeAlias = Mapping[str, Tensor]
Groups: TypeAlias = Mapping[str, Group]
Scalar: TypeAlias = bool | int | float | str
Index: TypeAlias = npt.NDArray[np.int64]
Labels: TypeAlias = npt.NDArray[np.uint8]

#: Groups that every method uses. Parameters are trained. Buffers are what training changes beside
#: them (running statistics): they travel and are averaged, and no optimiser touches them. Frozen
#: tensors are part of the server's state but never travel: every party makes them itself.
PARAMS = "params"
BUFFERS = "buffers"
FROZEN = "frozen"


@dataclass(frozen=True)
class Layout:
    """Where named tensors lie in one row of memory.

    Matrices (out, in) lie transposed, as products with them leave their gradients; every tensor
    starts at a multiple of 16 bytes in half precision.

    >>> layout = Layout.of({"w": (2, 3), "b": (2,)})
    >>> layout.length, {n: tuple(t.shape) for n, t in layout.views(torch.zeros(16)).items()}
    (16, {'w': (2, 3), 'b': (2,)})
    >>> layout.views(torch.zeros(5, 16))["w"].shape  # leading dimensions stay
    torch.Size([5, 2, 3])
    """

    shapes: tuple[tuple[str, tuple[int, ...]], ...]

    #: Numbers between starts: 16 bytes of bfloat16.
    GRAIN: ClassVar[int] = 8

    @classmethod
    def of(cls, shapes: Mapping[str, Sequence[int]]) -> Layout:
        """The layout of tensors in the given order."""
        return cls(tuple((name, tuple(shape)) for name, shape in shapes.items()))

    @cached_property
    def places(self) -> dict[str, slice]:
        """Each tensor's part of the row."""
        places, start = {}, 0
        for name, shape in self.shapes:
            size = math.prod(shape)
            places[name] = slice(start, start + size)
            start += -(-size // self.GRAIN) * self.GRAIN
        return places

    @cached_property
    def length(self) -> int:
        """Numbers in a row, gaps included."""
        if not self.shapes:
            return 0
        last: int = self.places[self.shapes[-1][0]].stop
        return -(-last // self.GRAIN) * self.GRAIN

    @cached_property
    def _shape(self) -> dict[str, tuple[int, ...]]:
        return dict(self.shapes)

    def view(self, rows: Tensor, name: str) -> Tensor:
        """One tensor (..., *shape) in rows (..., length)."""
        shape = self._shape[name]
        part, lead = rows[..., self.places[name]], rows.shape[:-1]
        if len(shape) == 2:
            return part.view(*lead, *shape[::-1]).mT
        return part.view((*lead, *shape))

    def views(self, rows: Tensor) -> Tensors:
        """All named tensors in rows."""
        return {name: self.view(rows, name) for name, _ in self.shapes}


class Packed(Mapping[str, Tensor]):
    """Named tensors that are parts of one row; who knows that can treat them as one tensor.

    >>> packed = Packed(Layout.of({"w": (1, 2)}), torch.arange(8.0))
    >>> packed["w"], len(packed)
    (tensor([[0., 1.]]), 1)

    The ``row`` is (length,), as its ``layout`` says; gaps hold zeros.
    """

    def __init__(self, layout: Layout, row: Tensor) -> None:
        self.layout, self.row = layout, row

    def __getitem__(self, name: str) -> Tensor:
        """A view, made when asked for: most replies are only ever summed as rows."""
        return self.layout.view(self.row, name)

    def __iter__(self) -> Iterator[str]:
        """Names in the order of the row."""
        return iter(self.layout.places)

    def __len__(self) -> int:
        """The number of tensors."""
        return len(self.layout.shapes)


def mapped(function: Callable[[Tensor], Tensor], group: Group) -> Group:
    """A function of each tensor of a group; of the row as a whole, where they are packed."""
    if isinstance(group, Packed):
        return Packed(group.layout, function(group.row))
    return {name: function(tensor) for name, tensor in group.items()}


def shapes_of(group: Group) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Shape and type of each tensor of a group, without a view of every one that is packed."""
    if isinstance(group, Packed):
        return {name: (shape, group.row.dtype) for name, shape in group.layout.shapes}
    return {name: (tuple(t.shape), t.dtype) for name, t in group.items()}


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

    groups: Groups = field(default_factory=dict)
    scalars: Mapping[str, Scalar] = field(default_factory=dict)

    def get(self, group: str) -> Group:
        """The tensors of a group; empty when the record has no such group."""
        return self.groups.get(group, {})

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """All tensors as ``("group/name", tensor)``."""
        for group, members in self.groups.items():
            for name, tensor in members.items():
                yield f"{group}/{name}", tensor

    def replace(
        self, groups: Groups | None = None, scalars: Mapping[str, Scalar] | None = None
    ) -> Record:
        """A copy with the given groups and scalars added or replaced."""
        return Record({**self.groups, **(groups or {})}, {**self.scalars, **(scalars or {})})

    @cached_property
    def nbytes(self) -> int:
        """Payload bytes of the tensors (scalars are not counted)."""
        kinds = (kind for group in self.groups.values() for kind in shapes_of(group).values())
        return sum(math.prod(shape) * dtype.itemsize for shape, dtype in kinds)

    def to(self, device: torch.device | str) -> Record:
        """The same record with its tensors on another device."""
        moved = {g: mapped(lambda t: t.to(device), own) for g, own in self.groups.items()}
        return Record(moved, self.scalars)


#: No number of a reply may be larger: its square would overflow in float32, and so would a model
#: that is made with it.
LARGEST = 2.0**64


class Form(NamedTuple):
    """What a tensor of a reply must look like: no number lies outside of [low, high]."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    low: float = -math.inf
    high: float = math.inf


#: More images than any client has: what it claims is bounded before anybody computes with it.
MOST_IMAGES = 10**9

#: By group and name, what a tensor must look like.
Forms: TypeAlias = Mapping[str, Mapping[str, Form]]

#: In the place of a client's id: the sum of a whole cohort.
EVERYBODY = -1


@dataclass(frozen=True)
class Reply:
    """What one client sends back: its record and how many images stand behind it.

    Attributes:
        finite: whether all values of the record are finite, if that is known: a stack of clients
            is looked at once, instead of each of them.
        clients: of a sum over clients (``client`` is then :data:`EVERYBODY`), who is in it.
    """

    client: int
    examples: int
    record: Record
    finite: bool | None = None
    clients: tuple[int, ...] = ()


@dataclass(frozen=True)
class Failure:
    """A client that was left out of a stage: who, in which stage and round, and why.

    ``name`` is what the client is called, where clients have names. ``cause`` is "failed" (no
    usable answer), "dropped" (lost after it received its message) or "rule" (its answer was left
    out by the rule of averaging).
    """

    client: int
    stage: str
    round: int
    reason: str
    name: str = ""
    cause: str = "failed"

    def __str__(self) -> str:
        who = f"client {self.client}" + (f" ({self.name})" if self.name else "")
        return f"{who} left out of {self.stage}, round {self.round + 1}: {self.reason}"


#: What the server sends, by client; what comes back; and what of that it believes.
Messages: TypeAlias = Mapping[int, Record]
Answers: TypeAlias = Iterator[Reply | Failure]
Replies: TypeAlias = Iterator[Reply]
