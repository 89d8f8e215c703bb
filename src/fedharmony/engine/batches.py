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

    Clients have numbers of ``steps``, (M,), that do not increase.
    """

    index: Index
    steps: Index

    def segments(self, epochs: int | None = None) -> Iterator[tuple[int, int, int, bool]]:
        """``(first, last, width, final)``: steps first…last−1 belong to the first clients.

        Where the number of ``epochs`` is given, ``final`` tells whether one of them is in its last.

        >>> plan = plan_batches([np.zeros((2, 3), int), np.zeros((2, 1), int)], batch_size=2)
        >>> list(plan.segments()), list(plan.segments(epochs=2))
        ([(0, 2, 2, False), (2, 4, 1, False)], [(0, 1, 2, False), (1, 2, 2, True), (2, 4, 1, True)])
        """
        marks = {int(s) for s in self.steps} - {0}
        final = np.zeros(len(self.index), dtype=bool)
        if epochs is not None:
            final[:] = self.final_epoch(epochs, len(self.steps)).any(axis=1)
            marks |= {int(t) + 1 for t in np.flatnonzero(final[1:] != final[:-1])}
        ends = sorted(marks)
        for first, last in zip([0, *ends], ends, strict=False):
            yield first, last, int((self.steps > first).sum()), bool(final[first])

    def rows(self, step: int, width: int) -> int:
        """Rows of a step that hold an image of one of the first clients; padding comes last.

        >>> plan = plan_batches([np.array([[4, 5, 6]]), np.array([[9]])], batch_size=2)
        >>> plan.rows(0, 2), plan.rows(1, 1)
        (2, 1)
        """
        return int((self.index[step, :width] >= 0).sum(axis=1).max())

    def widened(self, size: int) -> Index:
        """The image indices with padding for ``size`` clients, (S, size, B)."""
        added = ((0, 0), (0, size - len(self.steps)), (0, 0))
        return np.pad(self.index, added, constant_values=-1)

    def final_epoch(self, epochs: int, size: int) -> npt.NDArray[np.float32]:
        """(S, size): 1 at the steps of each client's last epoch."""
        step = np.arange(len(self.index))[:, None]
        inside = (step < self.steps) & (step >= self.steps - self.steps // epochs)
        return np.pad(inside.astype(np.float32), ((0, 0), (0, size - len(self.steps))))


def plan_batches(orders: Sequence[Index], batch_size: int) -> Plan:
    """Cut each client's sequence of epochs into batches.

    Args:
        orders: per client (E, n_k) image indices in the order of each epoch; n_k not increasing.
        batch_size: B; an epoch's last batch may be smaller (it is padded with −1, never merged).

    >>> plan = plan_batches([np.array([[4, 5, 6]]), np.array([[9]])], batch_size=2)
    >>> plan.index.tolist()
    [[[4, 5], [9, -1]], [[6, -1], [-1, -1]]]
    >>> list(plan.segments())
    [(0, 1, 2, False), (1, 2, 1, False)]
    """
    per_epoch = [-(-order.shape[1] // batch_size) for order in orders]
    steps = np.array(
        [order.shape[0] * b for order, b in zip(orders, per_epoch, strict=True)], dtype=np.int64
    )
    if (np.diff(steps) > 0).any():
        raise ValueError("clients of a stack must be ordered by size, largest first")
    index = np.full((int(steps.max()), len(orders), batch_size), -1, dtype=np.int64)
    for m, (order, batches) in enumerate(zip(orders, per_epoch, strict=True)):
        epochs, images = order.shape
        padded = np.full((epochs, batches * batch_size), -1, dtype=np.int64)
        padded[:, :images] = order
        index[: steps[m], m] = padded.reshape(-1, batch_size)
    return Plan(index, steps)
