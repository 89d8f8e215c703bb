"""Which images a stack of clients sees at which step.

Clients of one stack advance together, each through its own batches. They are ordered by size, so
those that still work at a step are always the first ``width`` of the stack, and a client that is
done leaves the stack instead of being padded along.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from fedharmony.types import Index


@dataclass(frozen=True)
class Plan:
    """Image indices (S, M, B) of S steps for M clients; −1 marks a padding row.

    Attributes:
        index: (S, M, B) int64.
        steps: (M,) number of steps of each client, not increasing.
    """

    index: Index
    steps: Index

    def segments(self) -> Iterator[tuple[int, int, int]]:
        """``(first, last, width)``: steps first…last−1 belong to the first ``width`` clients."""
        ends = sorted({int(s) for s in self.steps} - {0})
        for first, last in zip([0, *ends], ends, strict=False):
            yield first, last, int((self.steps > first).sum())


def costs(steps: Sequence[int], rows: int) -> Index:
    """What each step of a stack costs a GPU, in rows, of clients with so many steps and such rows.

    Beside its rows, every client costs about one (its weights are read and renewed), and every step
    as much as 64 (hundreds of small kernels, one after the other).

    >>> costs([2, 1], rows=16).tolist()
    [98, 81]
    """
    widths = len(steps) - np.searchsorted(sorted(steps), np.arange(max(steps)), side="right")
    return np.asarray(widths * (rows + 1) + 64)


def beside_from(first: Index, others: int) -> int:
    """The step of the first stack from which on other stacks run beside it: both end together.

    Beside each other both run at about half their speed. What a wide stack leaves free is little,
    so they meet at the narrow end of the first.

    >>> first = np.array([9, 9, 4, 2, 2])
    >>> beside_from(first, others=5), beside_from(first, others=4), beside_from(first, others=30)
    (2, 3, 0)
    """
    left = first[::-1].cumsum()
    return max(0, len(first) - 1 - int(np.searchsorted(left, others)))


def plan_batches(orders: Sequence[Index], batch_size: int) -> Plan:
    """Cut each client's sequence of epochs into batches.

    Args:
        orders: per client (E, n_k) image indices in the order of each epoch; n_k not increasing.
        batch_size: B; an epoch's last batch may be smaller (it is padded with −1, never merged).

    >>> plan = plan_batches([np.array([[4, 5, 6]]), np.array([[9]])], batch_size=2)
    >>> plan.index.tolist()
    [[[4, 5], [9, -1]], [[6, -1], [-1, -1]]]
    >>> list(plan.segments())
    [(0, 1, 2), (1, 2, 1)]
    """
    per_epoch = [-(-order.shape[1] // batch_size) for order in orders]
    steps = np.array(
        [order.shape[0] * b for order, b in zip(orders, per_epoch, strict=True)], dtype=np.int64
    )
    if (np.diff(steps) > 0).any():
        raise ValueError("clients of a stack must be ordered by size, largest first")
    index: npt.NDArray[np.int64] = np.full(
        (int(steps.max()), len(orders), batch_size), -1, dtype=np.int64
    )
    for m, (order, batches) in enumerate(zip(orders, per_epoch, strict=True)):
        epochs, images = order.shape
        padded = np.full((epochs, batches * batch_size), -1, dtype=np.int64)
        padded[:, :images] = order
        index[: steps[m], m] = padded.reshape(-1, batch_size)
    return Plan(index, steps)
