"""Sizes of the tensors that a stack of clients computes on."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from fedharmony.types import Group, Tensors


@dataclass(frozen=True)
class Shapes:
    """Exact sizes, or few sizes: compiled and recorded steps make each new shape expensive.

    Attributes:
        few: round sizes up. Then a stack also keeps its tensors in place from step to step.

    >>> exact, few = Shapes(), Shapes(few=True)
    >>> exact.lanes(9), [few.lanes(clients) for clients in (1, 3, 5, 9, 17, 33)]
    (9, [1, 3, 5, 9, 18, 36])
    >>> exact.rows(5, 16), few.rows(5, 16), few.rows(11, 11)
    (5, 6, 11)
    """

    few: bool = False

    def lanes(self, clients: int) -> int:
        """Clients that a stack computes, with those added that do not exist."""
        return rounded_up(clients, bits=4) if self.few else clients

    def rows(self, most: int, batch_size: int) -> int:
        """Rows of a batch that must hold ``most`` images."""
        most = min(most, batch_size)
        return min(batch_size, rounded_up(most)) if self.few else most


def padded(tensors: Group, lanes: int) -> Tensors:
    """A copy of stacked tensors (M, ...) with zeros for the clients up to ``lanes``."""
    return {
        n: torch.cat([t, t.new_zeros(lanes - len(t), *t.shape[1:])]) for n, t in tensors.items()
    }


def rounded_up(number: int, bits: int = 2) -> int:
    """The next number with no more than so many leading bits: few sizes, little added.

    >>> [rounded_up(n) for n in (1, 2, 3, 5, 7, 9, 13, 17)], rounded_up(17, bits=3)
    ([1, 2, 3, 6, 8, 12, 16, 24], 20)
    """
    grain: int = 1 << max(0, (number - 1).bit_length() - bits)
    return -(-number // grain) * grain
