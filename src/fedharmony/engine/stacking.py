"""A client axis for what was written for one client."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from copy import copy
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedharmony.types import BUFFERS, PARAMS, Group, Packed, Record, Tensors

T = TypeVar("T")


def over_clients(function: Callable[..., Any], dims: tuple[Any, ...]) -> Callable[..., Any]:
    """A function of one client as a function of a stack of clients; ``dims`` as for vmap."""
    return function if getattr(function, "stacked", False) else torch.vmap(function, in_dims=dims)


def narrow(tensors: Group, width: int) -> Tensors:
    """The first ``width`` clients of stacked tensors, as views."""
    return {name: tensor[:width] for name, tensor in tensors.items()}


def constants(frozen: Group, width: int, dtype: torch.dtype) -> Tensors:
    """The frozen tensors of a model for a stack of clients, without a copy for each."""
    cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in frozen.items()}
    return {n: t.expand(width, *t.shape) for n, t in cast.items()}


class StackedMessage:
    """The messages of a stack of clients; parts that are the same object for all stay single.

    The model itself (parameters and buffers) is kept apart from the method's own groups, which are
    what its client functions see.

    Attributes:
        dims: per own group and name the client axis for ``torch.vmap``: 0, or None if shared.
    """

    def __init__(self, messages: Sequence[Record]) -> None:
        self._size = len(messages)
        self._groups: dict[str, Tensors] = {}
        self._shared: dict[str, dict[str, bool]] = {}
        self._packed: dict[str, Packed] = {}
        for group, members in messages[0].groups.items():
            others = [message.groups[group] for message in messages]
            alike = all(other is members for other in others)
            if alike and isinstance(members, Packed):
                self._packed[group] = members
            each = {n: [t] if alike else [o[n] for o in others] for n, t in members.items()}
            one = {n: all(t is own[0] for t in own) for n, own in each.items()}
            self._groups[group] = {n: t[0] if one[n] else torch.stack(t) for n, t in each.items()}
            self._shared[group] = one
        self._own = [group for group in self._groups if group not in (PARAMS, BUFFERS)]
        self.dims = self._each(lambda t, shared: None if shared else 0, self._own)

    def _each(
        self, function: Callable[[Tensor, bool], T], groups: Iterable[str]
    ) -> dict[str, dict[str, T]]:
        """A function of every tensor of some groups, and of whether all clients share it."""
        return {
            group: {n: function(t, self._shared[group][n]) for n, t in self._groups[group].items()}
            for group in groups
            if group in self._groups
        }

    def stacked(self, group: str) -> Tensors:
        """A group's tensors with their client axis (shared ones are expanded, not copied)."""
        size = self._size
        found = self._each(lambda t, one: t.expand(size, *t.shape) if one else t, [group])
        return found.get(group, {})

    def packed(self, group: str) -> Packed | None:
        """The group as one row, if all clients got the same one."""
        return self._packed.get(group)

    def first(self, width: int) -> dict[str, Tensors]:
        """The own groups of the first ``width`` clients."""
        return self._each(lambda t, one: t if one else t[:width], self._own)

    @property
    def signature(self) -> object:
        """Two messages with the same signature have the same shapes, but for the client axis."""
        kinds = self._each(lambda t, one: (one, t.shape[0 if one else 1 :], t.dtype), self._groups)
        return frozenset((g, n, kind) for g, own in kinds.items() for n, kind in own.items())

    def placed(self, size: int) -> StackedMessage:
        """A copy with room for ``size`` clients, at addresses that :meth:`fill` keeps."""
        made = copy(self)
        made._size, made._packed = size, {}
        made._groups = self._each(
            lambda t, one: t.clone() if one else t.new_zeros(size, *t.shape[1:]), self._groups
        )
        return made

    def fill(self, other: StackedMessage, model: bool = True) -> None:
        """Take over the tensors of a message with the same signature, in place.

        ``model``: the model's own too, not only the method's groups.
        """
        for group in self._groups if model else self._own:
            for name, tensor in self._groups[group].items():
                source = other._groups[group][name]
                place = tensor if self._shared[group][name] else tensor[: len(source)]
                place.copy_(source)
