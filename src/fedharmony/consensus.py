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

Where labels are unknown, a client tells how many images each entry stands on; these numbers take
the place of n_j (``mean`` counts who has any). Only the first three have a form for that.

A matrix that is ``age`` rounds old counts ``decay ** age`` times its weight; the two order
statistics have no weights. Only ``support`` looks at supports, and only ``pooled`` at marginals.

All teachers of a round cost one pass over the clients and O(C²) each. Matrices come and are kept as
upper triangles (see :func:`fedharmony.correlation.pack_upper`), so a consensus is symmetric. It is
computed in float64 where the table lies: on a CPU clients are summed one after the other, on a GPU
by its (repeatable) reductions. Entries are clipped to [−1, 1]; one that no client tells anything
about is 0 and not ``known``.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal, NamedTuple, TypeAlias, get_args

import numpy as np
import torch
from torch import Tensor

from fedharmony.correlation import (
    CLAMP,
    EPS,
    Moments,
    Triangle,
    bernoulli_deviation,
    correlation,
    numbers_at_once,
)
from fedharmony.errors import ConfigError, DataError, nearest
from fedharmony.types import Tensors

WeightedOperator: TypeAlias = Literal["mean", "size", "support", "pooled"]
EntryOperator: TypeAlias = Literal["mean", "size", "support"]
OrderOperator: TypeAlias = Literal["median", "trimmed"]
Operator: TypeAlias = Literal["mean", "size", "support", "pooled", "median", "trimmed"]

# The others are unknown where their weight is below this part of the total: what a subtraction in
# float64 then leaves of them is rounding. Takes, for instance, decay 0.9 and 175 rounds of age.
_FADED = 1e-8


class Uploads(NamedTuple):
    """What clients tell about their correlations: one client, or J of them on a leading axis.

    An operator reads only what it needs; the rest may be left out.
    """

    upper: Tensor
    """Upper triangle of R with its diagonal, (J, C(C+1)/2), or (C(C+1)/2,) for one client."""
    examples: Tensor | int | None = None
    """n, numbers of images, (J,); or of each entry, (J, C(C+1)/2), where labels are unknown."""
    supports: Tensor | None = None
    """Labels that count for a client, boolean (J, C)."""
    marginals: Tensor | None = None
    """p̂, (J, C)."""
    ages: Tensor | int | None = None
    """Rounds since each matrix was made, (J,); 0 if left out."""


class Consensus(ABC):
    """The consensus of J clients, and of all but one."""

    @abstractmethod
    def full(self) -> tuple[Tensor, Tensor]:
        """Consensus of all clients: matrix and known entries, both (C, C)."""

    @abstractmethod
    def without_each(
        self, rows: Sequence[int], dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor]:
        """For each of m clients the consensus of all others: matrices and known entries (m, C, C).

        Args:
            rows: Where the clients stand in the table.
            dtype: Of the matrices, which are rounded at the very end.
        """

    def without(self, row: int) -> tuple[Tensor, Tensor]:
        """Consensus of all but one client, matrix and known entries, both (C, C)."""
        matrices, known = self.without_each([row])
        return matrices[0], known[0]


def consolidate(
    upper: Tensor,
    *,
    operator: Operator = "support",
    examples: Tensor | int | None = None,
    supports: Tensor | None = None,
    marginals: Tensor | None = None,
    ages: Tensor | int | None = None,
    folded: Mapping[str, Tensor] | None = None,
    folded_age: Tensor | int = 0,
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
        upper: Upper triangles of R_j, (J, C(C+1)/2). They are kept, not copied.
        operator: See the module.
        examples: n_j, (J,), for ``size``, ``support`` and ``pooled``; or the images behind each
            entry, (J, C(C+1)/2), for ``mean``, ``size`` and ``support``: an entry without images
            is not told.
        supports: Labels that count for a client, boolean (J, C), for ``support``.
        marginals: p̂_j, (J, C), for ``pooled``.
        ages: Rounds since each matrix was made, (J,); 0 by default.
        folded: Sums of further clients that are no longer in the table, as
            :meth:`ConsensusSums.tensors` gave them; the order statistics have none.
        folded_age: Rounds since these sums were made.
        kappa: κ, the number of images at which a matrix counts half of its size.
        min_examples: Clients with fewer images have no part in ``support``.
        decay: Factor of the weight for each round of age.
        trim: Part of the values dropped at either end by ``trimmed``.
        eps: Of Eq. (2), for ``pooled``: as the matrices were made.
        clamp: Of Eq. (2), for ``pooled``: as the matrices were made.

    >>> upper = torch.tensor([[1.0, 0.25, 1.0], [1.0, 0.75, 1.0]])
    >>> consensus = consolidate(upper, operator="size", examples=torch.tensor([30, 10]))
    >>> consensus.full()[0][0, 1].item()  # (30·0.25 + 10·0.75) / 40
    0.375
    >>> matrices, known = consensus.without_each([0, 1])
    >>> matrices[:, 0, 1].tolist(), known[:, 0, 1].tolist()
    ([0.75, 0.25], [True, True])
    """
    classes = (math.isqrt(8 * upper.shape[-1] + 1) - 1) // 2 if upper.ndim == 2 else 0
    if upper.ndim != 2 or classes * (classes + 1) // 2 != upper.shape[1]:
        raise DataError(
            "A consensus needs a table of upper triangles of shape (clients, C(C+1)/2), got "
            f"{tuple(upper.shape)}. Pack matrices with fedharmony.correlation.pack_upper."
        )
    by_entry = isinstance(examples, Tensor) and examples.ndim == 2
    if by_entry and operator not in get_args(EntryOperator):
        raise ConfigError(
            f"The consensus {operator!r} cannot leave out what a client does not know. Where "
            f"labels are unknown, use one of {', '.join(get_args(EntryOperator))}."
        )
    if operator == "median":
        return _OrderConsensus(upper, classes, _median_cut)
    if operator == "trimmed":
        if not 0 <= trim < 0.5:
            raise ConfigError(f"The trimmed part must be at least 0 and below 0.5, got {trim}.")
        return _OrderConsensus(upper, classes, lambda count: int(trim * count))
    sums = ConsensusSums(
        classes,
        operator,
        kappa=kappa,
        min_examples=min_examples,
        decay=decay,
        eps=eps,
        clamp=clamp,
        device=upper.device,
        by_entry=by_entry,
    )
    if folded:
        sums.restore(folded, folded_age)
    return _TableConsensus(sums, Uploads(upper, examples, supports, marginals, ages))


class ConsensusSums:
    """Running sums of a weighted consensus: memory O(C²), however many clients are added.

    Per entry ``Σ_j w_j R_j`` and ``Σ_j w_j``; for ``pooled`` the moments take the place of R.
    Leaving a client out is subtracting its terms. On a CPU clients are summed strictly one after
    the other, hence the bits do not depend on how many of them each call of :meth:`add` brings.

    Args:
        num_classes: C.
        operator: One of the weighted operators of the module.
        kappa: As in :func:`consolidate`, like the following.
        min_examples: See there.
        decay: See there.
        eps: See there.
        clamp: See there.
        device: Where the sums are kept; clients from elsewhere are moved there.
        by_entry: Whether clients tell the images behind each entry.

    >>> sums = ConsensusSums(2, "mean")
    >>> last = Uploads(torch.tensor([1.0, 1.0, 1.0]))
    >>> for upload in (Uploads(torch.zeros(3)), Uploads(torch.tensor([1.0, 0.5, 1.0])), last):
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
        device: torch.device | str | None = None,
        by_entry: bool = False,
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
        self._triangle = Triangle(num_classes, device)
        pairs = len(self._triangle)
        width = pairs + num_classes if operator == "pooled" else pairs
        self._by_entry = by_entry
        # Otherwise a weight is the same for all entries.
        weights = pairs if by_entry or operator == "support" else 1
        self._sum = torch.zeros(width, dtype=torch.float64, device=device)
        self._weight = torch.zeros(weights, dtype=torch.float64, device=device)

    def add(self, uploads: Uploads) -> None:
        """Add one client, or several one after the other."""
        clients = self._stacked(uploads)
        for part in _parts(len(clients.upper), len(self._sum), self._sum.device):
            values, weights = self._terms(_select(clients, part))
            self._sum = _add(self._sum, values * weights)
            self._weight = _add(self._weight, weights)

    def tensors(self) -> Tensors:
        """The sums, to be kept and restored."""
        return {"sum": self._sum, "weight": self._weight}

    def restore(self, kept: Mapping[str, Tensor], age: Tensor | int = 0) -> None:
        """Go on from the :meth:`tensors` of the same operator, made ``age`` rounds ago.

        >>> old, new = ConsensusSums(1, "mean", decay=0.5), ConsensusSums(1, "mean", decay=0.5)
        >>> old.add(Uploads(torch.tensor([0.6])))
        >>> new.restore(old.tensors(), age=1)
        >>> new.add(Uploads(torch.tensor([0.0])))
        >>> round(new.mean()[0].item(), 6)  # (0.5·0.6 + 1·0) / 1.5
        0.2
        """
        for name, now in self.tensors().items():
            if kept[name].shape != now.shape:
                raise DataError(
                    f"Sums of the consensus {self.operator!r} over {self.num_classes} labels hold "
                    f"{len(now)} numbers as {name!r}, got {tuple(kept[name].shape)}. Restore sums "
                    "of the same operator and labels."
                )
        faded = self._decay ** self._exact(age)
        self._sum, self._weight = (self._exact(kept[name]) * faded for name in ("sum", "weight"))

    def mean(self) -> tuple[Tensor, Tensor]:
        """Consensus of all clients added: matrix and known entries, both (C, C)."""
        return self._finish(self._sum, self._weight, self._weight > 0)

    def without(self, upload: Uploads) -> tuple[Tensor, Tensor]:
        """Consensus of all clients but one, given as it was added: matrix and known entries."""
        matrices, known = self.without_each(upload)
        return matrices[0], known[0]

    def without_each(
        self,
        uploads: Uploads,
        rows: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> tuple[Tensor, Tensor]:
        """For each of m clients the consensus of all others: matrices and known entries (m, C, C).

        An entry is known if another client told about it, and not so long ago that its weight has
        fallen below 1e-8 of the total.

        Args:
            uploads: The clients, as they were added.
            rows: Those of them that are meant; all by default.
            dtype: Of the matrices, which are rounded at the very end.
        """
        clients, size, device = self._stacked(uploads), self.num_classes, self._sum.device
        if rows is None:
            rows = range(len(clients.upper))
        chosen = torch.as_tensor(rows, dtype=torch.int64, device=device)
        matrices = torch.empty(len(chosen), size, size, dtype=dtype, device=device)
        known = torch.empty(len(chosen), size, size, dtype=torch.bool, device=device)
        for part in _parts(len(chosen), size * size, device):
            values, weights = self._terms(_select(clients, chosen[part]))
            weight = self._weight - weights
            told = weight > _FADED * self._weight
            sums = self._sum - values * weights
            matrices[part], known[part] = self._finish(sums, weight, told, dtype)
        return matrices, known

    def _stacked(self, uploads: Uploads) -> Uploads:
        """Only what the operator reads, checked, with a client axis, where the sums are."""
        size = self.num_classes
        single = uploads.upper.ndim == 1
        clients = 1 if single else len(uploads.upper)

        def rows(name: str, given: Tensor | int | None, *width: int) -> Tensor:
            if given is None:
                raise DataError(f"The consensus {self.operator!r} needs the {name} of each client.")
            value = torch.as_tensor(given).detach().to(self._sum.device)
            value = value.unsqueeze(0) if single else value
            shape = (clients, *width)
            if value.shape != shape:
                raise DataError(
                    f"The {name} of {clients} clients and {size} labels must have shape "
                    f"{shape}, got {tuple(value.shape)}."
                )
            return value

        uses, entries = self.operator, (len(self._triangle),) if self._by_entry else ()
        told = uses != "mean" or self._by_entry
        return Uploads(
            rows("upper triangles", uploads.upper, len(self._triangle)),
            rows("examples", uploads.examples, *entries) if told else None,
            rows("supports", uploads.supports, size) if uses == "support" else None,
            rows("marginals", uploads.marginals, size) if uses == "pooled" else None,
            None if uploads.ages is None else rows("ages", uploads.ages),
        )

    def _terms(self, clients: Uploads) -> tuple[Tensor, Tensor]:
        """Values (J, width) and weights (J, width or 1) of clients in float64."""
        values = self._exact(clients.upper)
        weights = values.new_ones(len(values), 1)
        if clients.examples is not None:
            weights = self._exact(clients.examples).view(len(values), -1)
        if self.operator == "mean":
            weights = (weights > 0).double()
        if self.operator == "support":
            counts = weights >= max(1, self._min_examples)
            weights = torch.where(counts, weights.square() / (weights + self._kappa), 0)
        if clients.ages is not None:
            weights = weights * self._decay ** self._exact(clients.ages).unsqueeze(-1)
        if clients.supports is not None:
            first, second = self._triangle.ends(clients.supports.bool())
            weights = weights * (first & second)
        if clients.marginals is not None:
            values = self._moments(values, self._exact(clients.marginals))
        return values, weights

    def _moments(self, upper: Tensor, marginals: Tensor) -> Tensor:
        """p̂_c, then p̂_cc' as triangles: Eq. (2) solved for the joint probabilities."""
        deviation = bernoulli_deviation(marginals, self._clamp)
        (a, b), (s, t) = (self._triangle.ends(ends) for ends in (marginals, deviation))
        return torch.cat((marginals, upper * (s * t + self._eps) + a * b), 1)

    def _finish(
        self, sums: Tensor, weight: Tensor, known: Tensor, dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor]:
        """Sums (..., width) to matrices and known entries (..., C, C)."""
        mean = torch.where(known, sums / torch.where(known, weight, 1), 0)
        if self.operator == "pooled":
            first, second = mean[..., : self.num_classes], mean[..., self.num_classes :]
            pooled = Moments.of(first, self._triangle.square(second))
            matrix = correlation(pooled, eps=self._eps, clamp=self._clamp).clamp(-1, 1).to(dtype)
        else:
            matrix = self._triangle.square(mean.clamp(-1, 1).to(dtype))
        told = known.expand(*known.shape[:-1], len(self._triangle))
        return matrix, self._triangle.square(told)

    def _exact(self, values: Tensor | int) -> Tensor:
        return torch.as_tensor(values).to(self._sum.device, torch.float64)


class _TableConsensus(Consensus):
    """Running sums and the table they were made from."""

    def __init__(self, sums: ConsensusSums, table: Uploads) -> None:
        self._sums = sums
        self._table = table
        sums.add(table)

    def full(self) -> tuple[Tensor, Tensor]:
        return self._sums.mean()

    def without_each(
        self, rows: Sequence[int], dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor]:
        _check_rows(rows, len(self._table.upper))
        return self._sums.without_each(self._table, rows, dtype)


class _OrderConsensus(Consensus):
    """Mean of the middle of the sorted values of each entry; ``cut(J)`` are dropped at either end.

    Without one client, with ``g = cut(J − 1)`` and the sorted values x of all J, the middle lies in
    ``x[g .. J−1−g]``, which has one value too many: the smallest, a, if the client's own value is
    not above it; the largest, b, if it is not below that; else the client's own. So a, b and the
    sum of the values between them are all that is kept, and ties need no care.
    """

    def __init__(self, upper: Tensor, num_classes: int, cut: Callable[[int], int]) -> None:
        self._upper, self._size = upper.detach(), num_classes
        self._count, pairs = upper.shape
        self._triangle = Triangle(num_classes, upper.device)
        self._all, self._low, self._between, self._high = torch.zeros(
            4, pairs, dtype=torch.float64, device=upper.device
        )
        self._rest = self._count - 1 - 2 * cut(self._count - 1)  # values averaged without a client
        if not self._count:
            return
        all_cut, rest_cut = cut(self._count), cut(self._count - 1)
        for part in _parts(pairs, self._count, upper.device):
            ordered = _sorted(self._upper[:, part].double())
            self._all[part] = ordered[all_cut : self._count - all_cut].mean(0)
            self._low[part] = ordered[rest_cut]
            self._between[part] = ordered[rest_cut + 1 : self._count - 1 - rest_cut].sum(0)
            self._high[part] = ordered[self._count - 1 - rest_cut]

    def full(self) -> tuple[Tensor, Tensor]:
        matrix = self._triangle.square(self._all.clamp(-1, 1))
        return matrix, torch.full_like(matrix, self._count > 0, dtype=torch.bool)

    def without_each(
        self, rows: Sequence[int], dtype: torch.dtype = torch.float64
    ) -> tuple[Tensor, Tensor]:
        _check_rows(rows, self._count)
        chosen = torch.as_tensor(rows, dtype=torch.int64, device=self._upper.device)
        shape = (len(rows), self._size, self._size)
        matrices = torch.zeros(shape, dtype=dtype, device=self._upper.device)
        if self._count > 1:
            for part in _parts(len(rows), self._size**2, self._upper.device):
                middle = self._middle_without(self._upper[chosen[part]].double())
                middle = (middle / self._rest).clamp(-1, 1).to(dtype)
                matrices[part] = self._triangle.square(middle)
        return matrices, torch.full_like(matrices, self._count > 1, dtype=torch.bool)

    def _middle_without(self, own: Tensor) -> Tensor:
        """Sum of the middle values of all others, for clients with values ``own`` (m, pairs)."""
        inside = (self._between - own) + (self._low + self._high)
        middle = torch.where(own >= self._high, self._between + self._low, inside)
        return torch.where(own <= self._low, self._between + self._high, middle)


def _select(uploads: Uploads, rows: Tensor | slice) -> Uploads:
    others = (None if field is None else torch.as_tensor(field)[rows] for field in uploads[1:])
    return Uploads(uploads.upper[rows], *others)


def _parts(count: int, width: int, device: torch.device) -> Iterator[slice]:
    """Slices of ``count`` rows of ``width`` numbers, as many at a time as memory should hold."""
    step = max(1, numbers_at_once(device) // max(1, width))
    for start in range(0, count, step):
        yield slice(start, start + step)


def _median_cut(count: int) -> int:
    return max(0, (count - 1) // 2)


def _sorted(values: Tensor) -> Tensor:
    """Values in ascending order along the first axis."""
    if _in_order(values):
        # NumPy sorts values alone; torch also makes their indices, eight times as slow.
        return torch.from_numpy(np.sort(values.numpy(), 0))
    return values.sort(0).values


def _add(total: Tensor, terms: Tensor) -> Tensor:
    """``((total + terms[0]) + terms[1]) + ...``, on a CPU in this order and no other."""
    if not _in_order(terms):
        return total + terms.sum(0)
    if len(terms) <= 8:  # a few long rows: a running sum would only fill memory
        for term in terms:
            total = total + term
        return total
    return torch.cat((total.unsqueeze(0), terms)).cumsum(0)[-1]


def _in_order(values: Tensor) -> bool:
    """Whether to go through clients one by one: on a CPU; other devices take them all at once."""
    return values.device.type == "cpu"


def _check_rows(rows: Sequence[int], count: int) -> None:
    for row in rows:
        if not 0 <= row < count:
            raise IndexError(f"There is no client {row} in a table of {count}.")
