"""A client axis for what was written for one client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fedharmony.types import BUFFERS, PARAMS, Record, Tensors


def over_clients(function: Callable[..., Any], dims: tuple[Any, ...]) -> Callable[..., Any]:
    """A function of one client as a function of a stack of clients; ``dims`` as for vmap."""
    return function if getattr(function, "stacked", False) else torch.vmap(function, in_dims=dims)


def narrow(tensors: Mapping[str, Tensor], width: int) -> Tensors:
    """The first ``width`` clients of stacked tensors, as views."""
    return {name: tensor[:width] for name, tensor in tensors.items()}


def expand(tensors: Mapping[str, Tensor], width: int) -> Tensors:
    """Tensors that all clients share, with a client axis and without a copy."""
    return {name: t.unsqueeze(0).expand(width, *t.shape) for name, t in tensors.items()}


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
        for group, members in messages[0].groups.items():
            self._groups[group], self._shared[group] = {}, {}
            for name, tensor in members.items():
                own = [message.groups[group][name] for message in messages]
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

    def first(self, width: int) -> dict[str, Tensors]:
        """The own groups of the first ``width`` clients."""
        return {
            group: {
                name: t if self._shared[group][name] else t[:width]
                for name, t in self._groups[group].items()
            }
            for group in self._own
        }
