"""The memory of a stack of clients while they train: parameters, moments, half-precision copies.

It stays from stack to stack, at addresses that recorded programs may rely on, in blocks over which
the optimiser passes fastest; what it gives back is one row per client.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from fedharmony.engine.gpu.compiled import CompiledRows
from fedharmony.engine.optimise import (
    MOMENTS,
    TrainSettings,
    adam_step,
    sgd_step,
    step_factors,
)
from fedharmony.types import LARGEST, Group, Layout, Packed, Tensors

#: A parameter with so many numbers has memory of its own, over which the optimiser passes alone.
APART = 1 << 13
#: The optimiser's pass sees flat memory as rows of at most this length.
ROW = 1 << 10


class Trained(NamedTuple):
    """What became of a stack of clients: parameters and buffers (M, ...), losses and finite (M,).

    Attributes:
        each: the parameters of each client.
        losses: summed over steps.
        rows: rows computed in all, padding included.
    """

    params: Tensors
    each: Sequence[Group]
    losses: Tensor
    finite: Tensor
    rows: int = 0
    buffers: Group = MappingProxyType({})


def all_finite(values: Tensor) -> Tensor:
    """(M, ...) to (M,): whether all values of a client are finite and of a size one can work with.

    >>> all_finite(torch.tensor([[1.0, 2.0], [torch.inf, 0.0], [0.0, torch.nan]])).tolist()
    [True, False, False]
    >>> all_finite(torch.tensor([[1e30], [1e15]])).tolist()  # the square of 1e30 overflows
    [False, True]
    """
    if not values.is_floating_point():
        return torch.ones(len(values), dtype=torch.bool, device=values.device)
    least, most = values.reshape(len(values), -1).aminmax(dim=1)  # a NaN is both
    return (least >= -LARGEST) & (most <= LARGEST)


class Lanes:
    """M clients side by side: parameters, the optimiser's moments, sums of losses.

    A matrix in half precision is a block (size, in, out) of its own. Its numbers lie in the order
    in which a product writes its gradient, so that its update is one pass over flat memory. Every
    other large parameter is a block, too. The rest lie side by side in one block (size, length) and
    are updated together.

    There is room for ``size`` clients, with parameters like those ``received``, (M, ...) each; the
    model reads those that ``half`` names in bfloat16.
    """

    def __init__(
        self,
        received: Group,
        size: int,
        settings: TrainSettings,
        half: frozenset[str] = frozenset(),
        compile: bool = False,
        backend: str = "inductor",
    ) -> None:
        some, shapes = next(iter(received.values())), {n: t.shape[1:] for n, t in received.items()}
        apart = [n for n, shape in shapes.items() if n in half or math.prod(shape) >= APART]
        parts = {n: Layout.of({n: shapes[n]}) for n in apart}
        rest = Layout.of({n: shape for n, shape in shapes.items() if n not in parts})
        self.layout = Layout(sum((p.shapes for p in parts.values()), ()) + rest.shapes)
        self.size, self.dtype, self._settings = size, some.dtype, settings
        kept = MOMENTS[settings.optimiser]
        self._blocks = [_Block(p, size, some, kept, copied=n in half) for n, p in parts.items()]
        self._blocks += [_Block(rest, size, some, kept)] if rest.shapes else []
        self.params = {n: t for b in self._blocks for n, t in b.layout.views(b.values).items()}
        copies = [b.layout.views(b.copy) for b in self._blocks if b.copy is not None]
        self._copies = {n: t for views in copies for n, t in views.items()}
        self.losses = torch.zeros(size, device=some.device)
        self._clock = torch.zeros((), device=some.device, dtype=torch.float64)
        #: The round's learning rate as a share of the settings'; read by every step.
        self.rate = torch.ones_like(self._clock)
        step = adam_step if settings.optimiser == "adam" else sgd_step
        self._update = CompiledRows(step, backend) if compile else step
        self._saved: list[tuple[int, int, Tensor, Tensor]] = []

    def load(self, received: Group) -> None:
        """Clients start from what they received, (M, ...) each."""
        for name, tensor in received.items():
            self.params[name][: len(tensor)].copy_(tensor)
        self._begin(len(next(iter(received.values()))))

    def load_row(self, row: Tensor, clients: int) -> None:
        """The first clients start from one model, a row in the order of the lanes."""
        lengths = [block.layout.length for block in self._blocks]
        rows = [part.expand(clients, -1) for part in row.split_with_sizes(lengths)]
        torch._foreach_copy_([block.values[:clients] for block in self._blocks], rows)
        self._begin(clients)

    def _begin(self, clients: int) -> None:
        halved = [block for block in self._blocks if block.copy is not None]
        if halved:
            copies = [block.copy[:clients] for block in halved if block.copy is not None]
            torch._foreach_copy_(copies, [block.values[:clients] for block in halved])
        zeroed = [moment[:clients] for block in self._blocks for moment in block.moments]
        torch._foreach_zero_([*zeroed, self.losses[:clients]])
        self._clock.zero_()
        self._saved.clear()

    def leaves(self, width: int) -> Tensors:
        """What the model reads of the first ``width`` clients and is differentiated by.

        Half-precision copies where there are some, else the parameters.
        """
        read = {**self.params, **self._copies}
        return {n: t[:width].detach().requires_grad_() for n, t in read.items()}

    def step(self, gradients: Group) -> None:
        """The optimiser's step of the first clients, (W, ...) each; what has no gradient stays.

        One pass over each parameter with memory of its own, one over all the rest.
        """
        self._clock += 1
        factors = step_factors(self._clock, self.rate, self.dtype)
        for block in self._blocks:
            for run in _runs(block.layout, [n for n in block.layout.places if n in gradients]):
                places = [block.layout.places[name] for name in run]
                joint = _joined([_as_rows(gradients[n]) for n in run], places, self.dtype)
                self._pass(block, joint, slice(places[0].start, places[-1].stop), factors)

    def _pass(self, block: _Block, gradient: Tensor, place: slice, factors: Tensor) -> None:
        """The optimiser's step on a range of a block; the whole of it is flat memory."""
        part, length = (slice(len(gradient)), place), block.values.shape[1]
        memory = [block.values[part], *(m[part] for m in block.moments)]
        copy = None if block.copy is None else block.copy[part]
        if gradient.shape[1] == length:
            row = math.gcd(length, ROW)
            memory, gradient = [t.reshape(-1, row) for t in memory], gradient.reshape(-1, row)
            copy = None if copy is None else copy.reshape(-1, row)
        self._update(memory[0], gradient, memory[1:], copy, factors, self._settings)

    def _rows(self, first: int, last: int) -> Tensor:
        """Clients ``first`` … ``last − 1`` as rows, copied."""
        return torch.cat([block.values[first:last] for block in self._blocks], dim=1)

    def save(self, first: int, last: int) -> None:
        """Clients ``first`` … ``last − 1`` are done: keep them as they are now."""
        self._saved.append((first, last, self._rows(first, last), self.losses[first:last].clone()))

    def result(self, clients: int) -> Trained:
        """A copy of what the first clients have become: other clients will take their lanes."""
        rows, losses = self._rows(0, clients), self.losses[:clients].clone()
        for first, last, kept, lost in self._saved:
            rows[first:last], losses[first:last] = kept, lost
        each = [Packed(self.layout, row) for row in rows.unbind(0)]
        return Trained(self.layout.views(rows), each, losses, all_finite(rows))


class _Block:
    """Some parameters of all lanes: values, moments and, for matrices, their copy in bfloat16."""

    def __init__(
        self, layout: Layout, size: int, like: Tensor, moments: int, copied: bool = False
    ) -> None:
        self.layout = layout
        self.values = like.new_zeros(size, layout.length)
        self.moments = [torch.zeros_like(self.values) for _ in range(moments)]
        self.copy = torch.zeros_like(self.values, dtype=torch.bfloat16) if copied else None


def _joined(rows: list[Tensor], places: list[slice], dtype: torch.dtype) -> Tensor:
    """Gradients (W, ·) side by side as their parameters lie, gaps as zeros; a single one as is."""
    if len(rows) == 1:
        return rows[0]
    parts, end = [], places[0].start
    for part, place in zip(rows, places, strict=True):
        if place.start > end:
            parts.append(part.new_zeros(len(part), place.start - end, dtype=dtype))
        parts.append(part.to(dtype))
        end = place.stop
    return torch.cat(parts, dim=1)


def _as_rows(gradient: Tensor) -> Tensor:
    """(W, length) in the order of a row; no copy if the gradient lies in this order."""
    return (gradient.mT if gradient.dim() == 3 else gradient).reshape(len(gradient), -1)


def _runs(layout: Layout, names: list[str]) -> list[list[str]]:
    """Names that follow one another in the layout, together."""
    order = {name: i for i, (name, _) in enumerate(layout.shapes)}
    runs: list[list[str]] = []
    for name in names:
        if runs and order[name] == order[runs[-1][-1]] + 1:
            runs[-1].append(name)
        else:
            runs.append([name])
    return runs
