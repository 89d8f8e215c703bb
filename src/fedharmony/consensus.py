"""Consensus correlations: the teacher R*_k of a client, made of the matrices of all others.

The paper (arXiv 2604.28024, Eq. (3)) asks for a leave-one-out consensus
``R*_k = A({R_j}, j != k)`` and leaves the operator A open. Six are here:

============  ====================================================================================
``mean``      every client counts the same
``size``      weight n_j, its number of images
``support``   weight n_j²/(n_j + κ), none below ``min_examples`` images; an entry (c, c') is taken
              only from clients that predict both labels
``pooled``    weight n_j for the moments p̂_c and p̂_cc'; one φ matrix is formed from the pool
``median``    median of each entry, all clients alike
``trimmed``   mean of each entry without its smallest and largest values, all clients alike
============  ====================================================================================

A matrix that is ``age`` rounds old counts ``decay ** age`` times its weight; the two order
statistics have no weights. Only ``support`` looks at supports, and only ``pooled`` at marginals.

All teachers of a round cost one pass over the clients and O(C²) each. A consensus is bookkeeping of
the server: it lives on the CPU in float64, and only upper triangles of the matrices are read, so it
is symmetric. Entries are clipped to [−1, 1]; one that no client tells anything about is 0 and not
``known``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from fedharmony.correlation import CLAMP, EPS, Moments, correlation, second_from_correlation
from fedharmony.errors import ConfigError, DataError, nearest

WeightedOperator: TypeAlias = Literal["mean", "size", "support", "pooled"]
OrderOperator: TypeAlias = Literal["median", "trimmed"]
Operator: TypeAlias = Literal["mean", "size", "support", "pooled", "median", "trimmed"]

# Numbers held at a time when many clients are added or sorted (32 MiB in float64).
_CHUNK = 2**22
# The others are unknown where their weight is below this part of the total: what a subtraction in
# float64 then leaves of them is rounding. Takes, for instance, decay 0.9 and 175 rounds of age.
_FADED = 1e-8


class Uploads(NamedTuple):
    """What clients tell about their correlations: one client, or J of them on a leading axis.

    An operator reads only what it needs; the rest may be left out.
    """

    matrices: Tensor
    """R, shape (J, C, C), or (C, C) for one client."""
    examples: Tensor | int | None = None
    """n, numbers of images, (J,)."""
    supports: Tensor | None = None
    """Labels that count for a client, boolean (J, C)."""
    marginals: Tensor | None = None
    """p̂, (J, C)."""
    ages: Tensor | int | None = None
    """Rounds since each matrix was made, (J,); 0 if left out."""


class Consensus(Protocol):
    """The consensus of J clients, and of all but one."""

    def full(self) -> tuple[Tensor, Tensor]:
        """Consensus of all clients: matrix and known entries, both (C, C)."""

    def without(self, client: int) -> tuple[Tensor, Tensor]:
        """Consensus of all but one client (its row in the table): matrix and known entries."""


def consolidate(
    matrices: Tensor,
    *,
    operator: Operator = "support",
    examples: Tensor | None = None,
    supports: Tensor | None = None,
    marginals: Tensor | None = None,
    ages: Tensor | None = None,
    kappa: float = 10.0,
    min_examples: int = 5,
    decay: float = 0.9,
    trim: float = 0.1,
    eps: float = EPS,
    clamp: float = CLAMP,
) -> Consensus:
    """The consensus of a table of clients, whole or leaving any one of them out.

    The weighted operators go through :class:`ConsensusSums`: a table and a stream of the same
    clients in the same order agree to the last bit.

    Args:
        matrices: R_j, shape (J, C, C). They are kept, not copied.
        operator: See the module.
        examples: n_j, (J,), for ``size``, ``support`` and ``pooled``.
        supports: Labels that count for a client, boolean (J, C), for ``support``.
        marginals: p̂_j, (J, C), for ``pooled``.
        ages: Rounds since each matrix was made, (J,); 0 by default.
        kappa: κ, the number of images at which a matrix counts half of its size.
        min_examples: Clients with fewer images have no part in ``support``.
        decay: Factor of the weight for each round of age.
        trim: Part of the values dropped at either end by ``trimmed``.
        eps: Of Eq. (2), for ``pooled``: as the matrices were made.
        clamp: Of Eq. (2), for ``pooled``: as the matrices were made.

    >>> matrices = torch.tensor([[[1.0, 0.25]] * 2, [[1.0, 0.75]] * 2])
    >>> consensus = consolidate(matrices, operator="size", examples=torch.tensor([30, 10]))
    >>> consensus.full()[0][0, 1].item()  # (30·0.25 + 10·0.75) / 40
    0.375
    >>> matrix, known = consensus.without(0)
    >>> matrix[0, 1].item(), known[0, 1].item()
    (0.75, True)
    """
    if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2]:
        raise DataError(
            f"A consensus needs a table of shape (clients, C, C), got {tuple(matrices.shape)}."
        )
    if operator == "median":
        return _OrderConsensus(matrices, _median_cut)
    if operator == "trimmed":
        if not 0 <= trim < 0.5:
            raise ConfigError(f"The trimmed part must be at least 0 and below 0.5, got {trim}.")
        return _OrderConsensus(matrices, lambda count: int(trim * count))
    sums = ConsensusSums(
        matrices.shape[-1],
        operator,
        kappa=kappa,
        min_examples=min_examples,
        decay=decay,
        eps=eps,
        clamp=clamp,
    )
    return _TableConsensus(sums, Uploads(matrices, examples, supports, marginals, ages))


class ConsensusSums:
    """Running sums of a weighted consensus: memory O(C²), however many clients are added.

    Per entry ``Σ_j w_j R_j``, ``Σ_j w_j`` and the number of clients with a positive weight; for
    ``pooled`` the moments take the place of R. Leaving a client out is subtracting its terms.
    Clients are summed strictly one after the other, hence the bits do not depend on how many of
    them each call of :meth:`add` brings.

    Args:
        num_classes: C.
        operator: One of the weighted operators of the module.
        kappa: As in :func:`consolidate`, like the following.
        min_examples: See there.
        decay: See there.
        eps: See there.
        clamp: See there.

    >>> sums = ConsensusSums(2, "mean")
    >>> last = Uploads(torch.full((2, 2), 1.0))
    >>> for upload in (Uploads(torch.full((2, 2), 0.0)), Uploads(torch.full((2, 2), 0.5)), last):
    ...     sums.add(upload)
    >>> sums.mean()[0][0, 1].item(), sums.without(last)[0][0, 1].item()
    (0.5, 0.25)
    """

    def __init__(
        self,
        num_classes: int,
        operator: WeightedOperator = "support",
        *,
        kappa: float = 10.0,
        min_examples: int = 5,
        decay: float = 0.9,
        eps: float = EPS,
        clamp: float = CLAMP,
    ) -> None:
        if operator not in get_args(WeightedOperator):
            raise ConfigError(
                f"There is no consensus {operator!r}. {nearest(operator, get_args(Operator))} "
                f"Only {', '.join(get_args(WeightedOperator))} can be kept as running sums."
            )
        if not 0 < decay <= 1:
            raise ConfigError(f"The decay per round must be above 0 and at most 1, got {decay}.")
        if kappa < 0:
            raise ConfigError(f"The images κ of the support weight must be >= 0, got {kappa}.")
        self.num_classes = num_classes
        self.operator = operator
        self._kappa, self._min_examples, self._decay = kappa, min_examples, decay
        self._eps, self._clamp = eps, clamp
        self._triangle = _Triangle(num_classes)
        pairs = len(self._triangle)
        width = pairs + num_classes if operator == "pooled" else pairs
        weights = pairs if operator == "support" else 1  # else a weight is the same for all entries
        self._sum = torch.zeros(width, dtype=torch.float64)
        self._weight = torch.zeros(weights, dtype=torch.float64)
        self._count = torch.zeros(weights, dtype=torch.int64)

    def add(self, uploads: Uploads) -> None:
        """Add one client, or several one after the other."""
        clients = self._stacked(uploads)
        step = max(1, _CHUNK // len(self._sum))
        for start in range(0, len(clients.matrices), step):
            values, weights = self._terms(_select(clients, slice(start, start + step)))
            self._sum = _add_in_order(self._sum, values * weights)
            self._weight = _add_in_order(self._weight, weights)
            self._count += (weights > 0).sum(0)

    def mean(self) -> tuple[Tensor, Tensor]:
        """Consensus of all clients added: matrix and known entries, both (C, C)."""
        return self._finish(self._sum, self._weight, self._count > 0)

    def without(self, upload: Uploads) -> tuple[Tensor, Tensor]:
        """Consensus of all clients but one, given as it was added: matrix and known entries.

        An entry is known if another client told about it, and not so long ago that its weight has
        fallen below 1e-8 of the total.
        """
        values, weights = self._terms(self._stacked(upload))
        weight = self._weight - weights[0]
        others = self._count - (weights[0] > 0).long()
        known = (others > 0) & (weight > _FADED * self._weight)
        return self._finish(self._sum - values[0] * weights[0], weight, known)

    def _stacked(self, uploads: Uploads) -> Uploads:
        """Only what the operator reads, checked, and with a client axis."""
        size = self.num_classes
        single = uploads.matrices.ndim == 2
        matrices = uploads.matrices.unsqueeze(0) if single else uploads.matrices

        def rows(name: str, given: Tensor | int | None, *width: int) -> Tensor:
            if given is None:
                raise DataError(f"The consensus {self.operator!r} needs the {name} of each client.")
            value = torch.as_tensor(given)
            value = value.unsqueeze(0) if single else value
            shape = (len(matrices), *width)
            if value.shape != shape:
                raise DataError(
                    f"The {name} of {len(matrices)} clients and {size} labels must have shape "
                    f"{shape}, got {tuple(value.shape)}."
                )
            return value

        uses = self.operator
        return Uploads(
            rows("matrices", uploads.matrices, size, size),
            None if uses == "mean" else rows("examples", uploads.examples),
            rows("supports", uploads.supports, size) if uses == "support" else None,
            rows("marginals", uploads.marginals, size) if uses == "pooled" else None,
            None if uploads.ages is None else rows("ages", uploads.ages),
        )

    def _terms(self, clients: Uploads) -> tuple[Tensor, Tensor]:
        """Values (J, width) and weights (J, width or 1) of clients, float64 on the CPU."""
        weights = torch.ones(len(clients.matrices), dtype=torch.float64)
        if clients.examples is not None:
            weights = _exact(clients.examples)
        if self.operator == "support":
            counts = weights >= max(1, self._min_examples)
            weights = torch.where(counts, weights.square() / (weights + self._kappa), 0)
        if clients.ages is not None:
            weights = weights * self._decay ** _exact(clients.ages)
        weights = weights.unsqueeze(-1)
        if clients.supports is not None:
            support = clients.supports.cpu().bool()
            both = support.unsqueeze(-1) & support.unsqueeze(-2)
            weights = weights * self._triangle.of(both)
        if clients.marginals is None:
            return _exact(self._triangle.of(clients.matrices)), weights
        first = _exact(clients.marginals)
        second = second_from_correlation(
            _exact(clients.matrices), first, eps=self._eps, clamp=self._clamp
        )
        return torch.cat((first, self._triangle.of(second)), 1), weights

    def _finish(self, sums: Tensor, weight: Tensor, known: Tensor) -> tuple[Tensor, Tensor]:
        mean = torch.where(known, sums / torch.where(known, weight, 1), 0)
        if self.operator == "pooled":
            size = self.num_classes
            pooled = Moments.of(mean[:size], self._triangle.square(mean[size:]))
            matrix = correlation(pooled, eps=self._eps, clamp=self._clamp)
        else:
            matrix = self._triangle.square(mean)
        return matrix.clamp(-1, 1), self._triangle.square(known.expand(len(self._triangle)))


class _Triangle:
    """Upper triangles, diagonal included, of symmetric (C, C) matrices as vectors."""

    def __init__(self, size: int) -> None:
        rows, columns = torch.triu_indices(size, size)
        self._entries = rows * size + columns  # of the flat matrix, for each place in the triangle
        self._places = torch.empty(size, size, dtype=torch.int64)
        self._places[rows, columns] = torch.arange(len(rows))
        self._places[columns, rows] = torch.arange(len(rows))

    def __len__(self) -> int:
        return len(self._entries)

    def of(self, matrices: Tensor, part: slice = slice(None)) -> Tensor:
        """The triangles of (..., C, C) matrices, or a part of them."""
        return matrices.flatten(-2).index_select(-1, self._entries[part].to(matrices.device))

    def square(self, triangle: Tensor) -> Tensor:
        """The symmetric matrix of one triangle."""
        return triangle.index_select(0, self._places.flatten()).view_as(self._places)


class _TableConsensus:
    """Running sums and the table they were made from."""

    def __init__(self, sums: ConsensusSums, table: Uploads) -> None:
        self._sums = sums
        self._table = table
        sums.add(table)

    def full(self) -> tuple[Tensor, Tensor]:
        return self._sums.mean()

    def without(self, client: int) -> tuple[Tensor, Tensor]:
        _check_row(client, len(self._table.matrices))
        return self._sums.without(_select(self._table, client))


class _OrderConsensus:
    """Mean of the middle of the sorted values of each entry; ``cut(J)`` are dropped at either end.

    Without one client, with ``g = cut(J − 1)`` and the sorted values x of all J, the middle lies in
    ``x[g .. J−1−g]``, which has one value too many: the smallest, a, if the client's own value is
    not above it; the largest, b, if it is not below that; else the client's own. So a, b and the
    sum of the values between them are all that is kept, and ties need no care.
    """

    def __init__(self, matrices: Tensor, cut: Callable[[int], int]) -> None:
        self._matrices = matrices
        self._count = len(matrices)
        self._triangle = _Triangle(matrices.shape[-1])
        pairs = len(self._triangle)
        self._all, self._low, self._between, self._high = torch.zeros(4, pairs, dtype=torch.float64)
        self._rest = self._count - 1 - 2 * cut(self._count - 1)  # values averaged without a client
        if not self._count:
            return
        all_cut, rest_cut = cut(self._count), cut(self._count - 1)
        step = max(1, _CHUNK // self._count)
        for start in range(0, pairs, step):
            part = slice(start, start + step)
            # NumPy sorts values alone; torch also makes their indices, eight times as slow.
            ordered = torch.from_numpy(
                np.sort(_exact(self._triangle.of(matrices, part)).numpy(), 0)
            )
            self._all[part] = ordered[all_cut : self._count - all_cut].mean(0)
            self._low[part] = ordered[rest_cut]
            self._between[part] = ordered[rest_cut + 1 : self._count - 1 - rest_cut].sum(0)
            self._high[part] = ordered[self._count - 1 - rest_cut]

    def full(self) -> tuple[Tensor, Tensor]:
        return self._finish(self._all, self._count > 0)

    def without(self, client: int) -> tuple[Tensor, Tensor]:
        _check_row(client, self._count)
        if self._count == 1:
            return self._finish(torch.zeros_like(self._all), False)
        own = _exact(self._triangle.of(self._matrices[client]))
        inside = (self._between - own) + (self._low + self._high)
        middle = torch.where(own >= self._high, self._between + self._low, inside)
        middle = torch.where(own <= self._low, self._between + self._high, middle)
        return self._finish(middle / self._rest, True)

    def _finish(self, triangle: Tensor, known: bool) -> tuple[Tensor, Tensor]:
        matrix = self._triangle.square(triangle.clamp(-1, 1))
        return matrix, torch.full(matrix.shape, known)


def _select(uploads: Uploads, rows: int | slice) -> Uploads:
    others = (None if field is None else torch.as_tensor(field)[rows] for field in uploads[1:])
    return Uploads(uploads.matrices[rows], *others)


def _median_cut(count: int) -> int:
    return max(0, (count - 1) // 2)


def _exact(values: Tensor | int) -> Tensor:
    return torch.as_tensor(values).detach().to("cpu", torch.float64)


def _add_in_order(total: Tensor, terms: Tensor) -> Tensor:
    """``((total + terms[0]) + terms[1]) + ...``, in this order and no other."""
    if len(terms) <= 8:  # a few long rows: a running sum would only fill memory
        for term in terms:
            total = total + term
        return total
    return torch.cat((total.unsqueeze(0), terms)).cumsum(0)[-1]


def _check_row(client: int, count: int) -> None:
    if not 0 <= client < count:
        raise IndexError(f"There is no client {client} in a table of {count}.")
