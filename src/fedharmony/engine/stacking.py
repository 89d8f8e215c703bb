"""A client axis for what was written for one client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from typing import Any

import torch

from fedharmony.types import BUFFERS, PARAMS, Group, Packed, Record, Tensors


def over_clients(function: Callable[..., Any], dims: tuple[Any, ...]) -> Callable[..., Any]:
    """A function of one client as a function of a stack of clients; ``dims`` as for vmap."""
    return function if getattr(function, "stacked", False) else torch.vmap(function, in_dims=dims)


def narrow(tensors: Group, width: int) -> Tensors:
    """The first ``width`` clients of stacked tensors, as views."""
    return {name: tensor[:width] for name, tensor in tensors.items()}


def expand(tensors: Group, width: int) -> Tensors:
    """Tensors that all clients share, with a client axis and without a copy."""
    return {name: t.unsqueeze(0).expand(width, *t.shape) for name, t in tensors.items()}


def constants(frozen: Group, width: int, dtype: torch.dtype) -> Tensors:
    """The frozen tensors of a model for a stack of clients, without a copy for each."""
    cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in frozen.items()}
    return expand(cast, width)


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
            if all(other is members for other in others):
                self._groups[group] = dict(members)
                self._shared[group] = dict.fromkeys(members, True)
                if isinstance(members, Packed):
                    self._packed[group] = members
                continue
            self._groups[group], self._shared[group] = {}, {}
            for name, tensor in members.items():
                own = [other[name] for other in others]
                shared = all(other is tensor for other in own)
                self._groups[group][name] = tensor if shared else torch.stack(own)
                self._shared[group][name] = shared
        self._own = [group for group in self._groups if group not in (PARAMS, BUFFERS)]
        self.dims = {
            group: {name: None if one else 0 for name, one in self._shared[group].items()}
            for group in self._own
        }

    def stacked(self, group: str) -> Tensors:
        """A group's tensors with their client axis (shared ones are expanded, not copied)."""
        return {
            name: t.unsqueeze(0).expand(self._size, *t.shape) if self._shared[group][name] else t
            for name, t in self._groups.get(group, {}).items()
        }

    def packed(self, group: str) -> Packed | None:
        """The group as one row, if all clients got the same one."""
        return self._packed.get(group)

    def first(self, width: int) -> dict[str, Tensors]:
        """The own groups of the first ``width`` clients."""
        return {
            group: {
                name: t if self._shared[group][name] else t[:width]
                for name, t in self._groups[group].items()
            }
            for group in self._own
        }

    @property
    def signature(self) -> object:
        """Two messages with the same signature have the same shapes, but for the client axis."""
        return frozenset(
            (group, name, one, t.shape if one else t.shape[1:], t.dtype)
            for group, members in self._groups.items()
            for (name, t), one in zip(members.items(), self._shared[group].values(), strict=True)
        )

    def placed(self, size: int) -> StackedMessage:
        """A copy with room for ``size`` clients, at addresses that :meth:`fill` keeps."""
        made = copy(self)
        made._size, made._packed = size, {}
        made._groups = {
            group: {
                name: t.clone() if self._shared[group][name] else t.new_zeros(size, *t.shape[1:])
                for name, t in members.items()
            }
            for group, members in self._groups.items()
        }
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
