"""Consensus correlations: the teacher R*_k of a client, made of the matrices of all others.

The paper (arXiv 2604.28024, Eq. (3)) asks for a leave-one-out consensus
``R*_k = A({R_j}, j != k)`` and leaves the operator A open. Seven are here:

===================  =============================================================================
``mean``             every client counts the same
``size``             weight n_j, its number of images
``support``          weight n_j²/(n_j + κ), none below ``min_examples`` images; an entry (c, c') is
                     taken only from clients that predict both labels
``support_trimmed``  the same weights; of each entry's sorted values the part ``trim`` of the weight
                     is cut at either end
``pooled``           weight n_j for the moments p̂_c and p̂_cc'; one φ matrix is formed from the pool
``median``           median of each entry, all clients alike
``trimmed``          mean of each entry without its smallest and largest values, all clients alike
===================  =============================================================================

The last two and ``support_trimmed`` bear clients that lie: what a few of them send does not reach
the middle of the values.

Where labels are unknown, a client tells how many images each entry stands on; these numbers take
the place of n_j (``mean`` counts who has any). Only the first four have a form for that.

A matrix that is ``age`` rounds old counts ``decay ** age`` times its weight; ``median`` and
``trimmed`` have no weights.

All teachers of a round cost one pass over the clients and O(C²) each. Matrices come and are kept as
upper triangles (see :func:`fedharmony.correlation.pack_upper`), so a consensus is symmetric. It is
computed in float64 where the table lies: on a CPU clients are summed one after the other, on a GPU
by its (repeatable) reductions. Entries are clipped to [−1, 1]; one that no client tells anything
about is 0 and not ``known``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple, TypeAlias

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
    parts,
)
from fedharmony.types import Form, Group, Groups, Reply, Tensors

OperatorName: TypeAlias = Literal[
    "mean", "size", "support", "support_trimmed", "pooled", "median", "trimmed"
]
#: Operators that can be kept as running sums, and those that can leave out single entries.
WEIGHTED = ("mean", "size", "support", "pooled")
BY_ENTRY = ("mean", "size", "support", "support_trimmed")

CORRELATION = "correlation"  # reply: R_k (upper triangle), p̂_k, and what share of images is known
TABLE = "table"  # state: the last (R_j, p̂_j, n_j, t_j) of the clients heard
FOLDED = "folded"  # state: running sums of what no longer fits into the table

# The others are unknown where their weight is below this part of the total: what a subtraction in
# float64 then leaves of them is rounding. Takes, for instance, decay 0.9 and 175 rounds of age.
_FADED = 1e-8
# Sums from which a client takes its old terms keep rounding: this part of the largest weight.
_RESIDUE = 1e-12
# A noisy weight counts from so many standard deviations of its noise on.
_CLEAR = 2.0


@dataclass(frozen=True)
class Operator:
    """The operator A of Eq. (3), as the module describes it.

    Attributes:
        min_examples: clients (or entries) with fewer images have no part in ``support``.
        min_support: ``support``: a label counts on a client when p̂ >= max(min_support, 1/(2n)).
        eps: of Eq. (2), for ``pooled``: as the matrices were made; so is ``clamp``.
    """

    name: OperatorName = "support"
    kappa: float = 10.0
    min_examples: int = 5
    min_support: float = 1e-3
    decay: float = 0.9
    trim: float = 0.1
    eps: float = EPS
    clamp: float = CLAMP

    @property
    def by_support(self) -> bool:
        """Whether an entry is weighed by what stands behind it."""
        return self.name in ("support", "support_trimmed")


class Agreement(NamedTuple):
    """What clients agree on: a matrix (..., C, C), 0 where it is not known, and where it is."""

    matrix: Tensor
    known: Tensor


class CorrelationTable:
    """Remembers the last R_j of each client, folds what does not fit, and gives teachers.

    When the table overflows, the oldest entries are folded into running sums. As long as their
    clients do not return, the consensus is that of a table without limit; of a client that returns,
    the folded entry stays beside the new one and fades. The order statistics have no such sums:
    they forget the oldest.

    Args:
        capacity: clients in the table; the last that were added always fit.
        last_only: whether to forget all others when clients are added.
        unknown_labels: whether clients tell the share of their images behind each entry.

    >>> from fedharmony.types import Record
    >>> table = CorrelationTable(2, Operator("size"))
    >>> for client, (n, r) in enumerate([(30, 0.25), (10, 0.75)]):
    ...     told = {"upper": torch.tensor([1.0, r, 1.0]), "marginal": torch.full((2,), 0.5)}
    ...     table.add([Reply(client, n, Record({"correlation": told}))], round=0)
    >>> common, (first, second) = table.teachers([0, 1], round=1)
    >>> common.matrix[0, 1].item()  # (30·0.25 + 10·0.75) / 40
    0.375
    >>> first.matrix[0, 1].item(), second.matrix[0, 1].item()
    (0.75, 0.25)
    """

    def __init__(
        self,
        classes: int,
        operator: Operator | None = None,
        *,
        capacity: int = 10**9,
        last_only: bool = False,
        unknown_labels: bool = False,
    ) -> None:
        self.classes, self.operator = classes, operator or Operator()
        self.capacity, self.last_only = capacity, last_only
        self.unknown_labels = unknown_labels
        #: One row per client: client, examples, round, and its upload.
        self.rows: Tensors = {}
        #: Sums, weights and round of what was folded.
        self.folded: Tensors = {}
        self.place = torch.device("cpu")

    def load(self, groups: Groups) -> CorrelationTable:
        """Go on from what :meth:`state_dict` gave."""
        self.rows, self.folded = (dict(groups.get(name, {})) for name in (TABLE, FOLDED))
        return self

    def state_dict(self) -> dict[str, Tensors]:
        """All that the table remembers, as groups of the server's state."""
        return {TABLE: self.rows, **({FOLDED: self.folded} if self.folded else {})}

    @property
    def teaches(self) -> bool:
        """Whether anybody is left when one client is left out."""
        return bool(self.folded) or len(self.rows.get("client", ())) > 1

    def add(self, replies: Sequence[Reply], round: int) -> None:
        """Remember what the replies of a round tell, over older entries of the same clients."""
        uploads = [reply.record.get(CORRELATION) for reply in replies]
        device, before = uploads[0]["upper"].device, self.rows
        self.rows = {
            "client": torch.tensor([reply.client for reply in replies], device=device),
            "examples": torch.tensor([reply.examples for reply in replies], device=device),
            "round": torch.full((len(replies),), round, device=device),
            **{name: torch.stack([u[name] for u in uploads]) for name in uploads[0]},
        }
        if not before or self.last_only:
            return
        others = (~torch.isin(before["client"], self.rows["client"])).nonzero().squeeze(1)
        excess = len(others) + len(replies) - self.capacity
        if excess > 0:
            # By round, then as in the table: the sort is stable.
            oldest = others[before["round"][others].argsort(stable=True)]
            self._fold(_select(before, oldest[:excess]), round)
            others = oldest[excess:]
        rows = {name: torch.cat([before[name][others], new]) for name, new in self.rows.items()}
        self.rows = _select(rows, rows["client"].argsort())

    # -- where the server sees sums: nothing but Σ w_j R_j and Σ w_j, of everybody -----------------

    def share(self, upload: Group, before: Group, images: int, round: int) -> Tensors:
        """What a client adds to the sums in a round: its terms, less what is left of its last ones.

        ``before`` is the upload that the sums hold, with its round; empty where they hold none.
        """
        self.place = upload["upper"].device
        sums, now = _Weighted(self, {}, round + 1), torch.full((), round)
        values, weights = sums.terms(_row({**upload, "round": now}, images))
        share = {"sum": values * weights, "weight": weights}
        if before:
            values, weights = sums.terms(_row(before, images))
            share = {"sum": share["sum"] - values * weights, "weight": share["weight"] - weights}
        return {name: tensor.squeeze(0) for name, tensor in share.items()}

    def share_forms(self, images: int) -> dict[str, Form]:
        """What :meth:`share` gives, of a client with so many images.

        A weight w is at most n, a value x at most 1.5 (a moment; a correlation at most 1). The
        terms that are taken out have the same bounds.
        """
        none, most = _Weighted(self, {}, 0), 1.5 * images
        return {
            "sum": Form(tuple(none.total.shape), torch.float64, -2 * most, 2 * most),
            "weight": Form(tuple(none.weight.shape), torch.float64, -images, images),
        }

    def add_shares(self, total: Group, round: int, noise: float = 0.0) -> None:
        """Add the sum of a cohort's shares to the sums, which fade first (or are forgotten).

        ``noise`` is the standard deviation of what was added to the sum on purpose.
        """
        faded: float | Tensor = 0.0
        if self.folded and not self.last_only:
            faded = self.operator.decay ** self.age(self.folded["round"], round + 1)
        held = {n: self.folded[n] * faded if self.folded else 0.0 for n in ("sum", "weight")}
        sum, weight = (held[n] + total[n] for n in ("sum", "weight"))
        now = torch.full((), round, device=sum.device)
        if noise:
            before = self.folded.get("noise", torch.zeros((), dtype=torch.float64)) * faded
            level = (before**2 + noise**2) ** 0.5
            self.folded = {"sum": sum, "weight": weight, "round": now, "noise": level}
            return
        # Where all has been taken out again that was ever put in, rounding is left.
        some = weight > _RESIDUE * weight.max()
        sum, weight = torch.where(some, sum, 0), torch.where(some, weight, 0)
        self.folded = {"sum": sum, "weight": weight, "round": now}

    def others(self, own: Group, images: int, round: int, dtype: torch.dtype) -> Agreement:
        """Eq. (3) at a client: the sums less its own terms; ``own`` is empty if they hold none."""
        sums = _Weighted(self, {}, round)
        if not own:
            common = sums.everybody()
            return Agreement(common.matrix.to(dtype), common.known)
        matrix, known = sums.without(_row(own, images), dtype)
        return Agreement(matrix[0], known[0])

    def teachers(
        self, clients: Sequence[int], round: int, dtype: torch.dtype = torch.float64
    ) -> tuple[Agreement, list[Agreement]]:
        """Eq. (3) in a round: the consensus of everybody, and for each client that of the others.

        Clients that are not in the table share everybody's. Their matrices are rounded to ``dtype``
        at the very end.
        """
        places = {k: row for row, k in enumerate(self.rows["client"].tolist())}
        heard = torch.tensor([places[k] for k in clients if k in places], device=self.device).long()
        consensus: _Weighted | _Middle | _WeightedMiddle
        if self.operator.name in WEIGHTED:
            consensus = _Weighted(self, self.rows, round)
        elif self.operator.by_support:
            consensus = _WeightedMiddle(self, round, heard, dtype)
        else:
            consensus = _Middle(self)
        common = consensus.everybody()
        place = torch.zeros(len(places), dtype=torch.int64, device=self.device)
        place[heard] = torch.arange(len(heard), device=self.device)  # among those heard
        rows = {**self.rows, "place": place}
        others = (
            Agreement(*own)
            for part in parts(len(heard), self.classes**2, self.device)
            for own in zip(*consensus.without(_select(rows, heard[part]), dtype), strict=True)
        )
        everybody = Agreement(common.matrix.to(dtype), common.known)
        return common, [next(others) if k in places else everybody for k in clients]

    def consensus(self, round: int) -> Agreement:
        """The consensus of everybody heard so far."""
        return self.teachers([], round)[0] if self.rows else _Weighted(self, {}, round).everybody()

    def _fold(self, leaving: Group, round: int) -> None:
        """Add rows to the running sums, where the operator has such sums."""
        if self.operator.name in WEIGHTED:
            sums = _Weighted(self, leaving, round + 1)
            now = torch.full((), round, device=sums.total.device)
            self.folded = {"sum": sums.total, "weight": sums.weight, "round": now}

    def age(self, made: Tensor, round: int) -> Tensor:
        """Rounds since something was made, as round ``round`` sees it: 0 for the round before."""
        return (round - 1 - made).clamp(min=0).double()

    @property
    def device(self) -> torch.device:
        """Where the rows are, or the sums, or a client."""
        held = self.rows.get("upper", self.folded.get("sum"))
        return self.place if held is None else held.device

    @cached_property
    def triangle(self) -> Triangle:
        """Where the entries of a matrix stand in its upper triangle."""
        return Triangle(self.classes, self.device)


class _Weighted:
    """``Σ_j w_j R_j`` and ``Σ_j w_j`` per entry; for ``pooled`` the moments take the place of R.

    Leaving a client out is subtracting its terms. On a CPU clients are summed strictly one after
    the other, hence the bits do not depend on how many of them are taken at a time. What the table
    has folded is part of the sums.
    """

    def __init__(self, table: CorrelationTable, rows: Group, round: int) -> None:
        self.table, self.operator, self.round = table, table.operator, round
        if table.folded:
            faded = self.operator.decay ** table.age(table.folded["round"], round)
            self.total, self.weight = (table.folded[name] * faded for name in ("sum", "weight"))
            if "noise" in table.folded:  # a weight that may be noise tells nothing
                clear = self.weight > _CLEAR * table.folded["noise"] * faded
                self.weight = torch.where(clear, self.weight, 0)
        else:
            pairs, name = len(table.triangle), self.operator.name
            width = pairs + table.classes if name == "pooled" else pairs
            entries = pairs if table.unknown_labels or self.operator.by_support else 1
            self.total, self.weight = (
                torch.zeros(size, dtype=torch.float64, device=table.device)
                for size in (width, entries)
            )
        for part in parts(len(rows.get("round", ())), len(self.total), table.device):
            values, weights = self.terms(_select(rows, part))
            self.total = _add(self.total, values * weights)
            self.weight = _add(self.weight, weights)

    def terms(self, rows: Group, pairs: slice = slice(None)) -> tuple[Tensor, Tensor]:
        """R_j, or the moments, (J, width), and w_j, (J, width or 1), in float64, of some pairs."""
        operator, triangle = self.operator, self.table.triangle
        images = own = rows["examples"].unsqueeze(-1)
        if self.table.unknown_labels:
            own = (images * triangle.diagonal(rows["known"])).round()
            images = (images * rows["known"][:, pairs]).round()
        values, weights = rows["upper"][:, pairs].double(), images.double()
        if operator.name == "mean":
            weights = (weights > 0).double()
        elif operator.by_support:
            enough = weights >= max(1, operator.min_examples)
            weights = torch.where(enough, weights.square() / (weights + operator.kappa), 0)
        weights = weights * operator.decay ** self.table.age(rows["round"], self.round).unsqueeze(
            -1
        )
        if operator.by_support:
            # Nothing is at least half of one image of none: 0.5 / 0 is infinite.
            predicted = rows["marginal"] >= (0.5 / own).clamp(min=operator.min_support)
            first, second = triangle.ends(predicted, pairs)
            weights = weights * (first & second)
        elif operator.name == "pooled":
            values = self._moments(values, rows["marginal"].double())
        return values, weights

    def everybody(self) -> Agreement:
        """The consensus of all clients that were summed."""
        return self._mean(self.total, self.weight, self.weight > 0, torch.float64)

    def without(self, rows: Group, dtype: torch.dtype) -> Agreement:
        """For each of these clients the consensus of all others, (m, C, C).

        An entry is known if another client told about it, and not so long ago that its weight has
        fallen below 1e-8 of the total.
        """
        values, weights = self.terms(rows)
        weight = self.weight - weights
        known = weight > _FADED * self.weight
        return self._mean(self.total - values * weights, weight, known, dtype)

    def _moments(self, upper: Tensor, marginals: Tensor) -> Tensor:
        """p̂_c, then p̂_cc' as triangles: Eq. (2) solved for the joint probabilities."""
        deviation = bernoulli_deviation(marginals, self.operator.clamp)
        (a, b), (s, t) = (self.table.triangle.ends(ends) for ends in (marginals, deviation))
        return torch.cat((marginals, upper * (s * t + self.operator.eps) + a * b), 1)

    def _mean(self, total: Tensor, weight: Tensor, known: Tensor, dtype: torch.dtype) -> Agreement:
        """Sums (..., width) to matrices and known entries (..., C, C)."""
        operator, triangle, classes = self.operator, self.table.triangle, self.table.classes
        mean = torch.where(known, total / torch.where(known, weight, 1), 0)
        if operator.name == "pooled":
            first, second = mean[..., None, :classes], triangle.square(mean[..., classes:])
            pooled = Moments(torch.cat([first, second], dim=-2))
            matrix = correlation(pooled, eps=operator.eps, clamp=operator.clamp)
            matrix = matrix.clamp(-1, 1).to(dtype)
        else:
            matrix = triangle.square(mean.clamp(-1, 1).to(dtype))
        return Agreement(matrix, triangle.square(known.expand(*known.shape[:-1], len(triangle))))


class _Middle:
    """Mean of the middle of the sorted values of each entry; ``cut(J)`` are dropped at either end.

    Without one client, with ``g = cut(J − 1)`` and the sorted values x of all J, the middle lies in
    ``x[g .. J−1−g]``, which has one value too many: the smallest, a, if the client's own value is
    not above it; the largest, b, if it is not below that; else the client's own. So a, b and the
    sum of the values between them are all that is kept, and ties need no care.
    """

    def __init__(self, table: CorrelationTable) -> None:
        self.table, upper = table, table.rows["upper"]
        count, pairs = upper.shape
        all_cut, cut = self._cut(count), self._cut(count - 1)
        self.others = count - 1 - 2 * cut  # values averaged without a client
        self.mean, self.low, self.between, self.high = torch.zeros(
            4, pairs, dtype=torch.float64, device=upper.device
        )
        for part in parts(pairs, count, upper.device):
            ordered = _sorted(upper[:, part].double())
            self.mean[part] = ordered[all_cut : count - all_cut].mean(0)
            self.low[part], self.high[part] = ordered[cut], ordered[count - 1 - cut]
            self.between[part] = ordered[cut + 1 : count - 1 - cut].sum(0)

    def _cut(self, count: int) -> int:
        """How many of the smallest, and of the largest, of ``count`` values are dropped."""
        if self.table.operator.name == "median":
            return max(0, (count - 1) // 2)
        return int(self.table.operator.trim * count)

    def everybody(self) -> Agreement:
        """The consensus of all clients of the table."""
        matrix = self.table.triangle.square(self.mean.clamp(-1, 1))
        return Agreement(matrix, torch.ones_like(matrix, dtype=torch.bool))

    def without(self, rows: Group, dtype: torch.dtype) -> Agreement:
        """For each of these clients the consensus of all others, (m, C, C)."""
        own = rows["upper"].double()
        inside = (self.between - own) + (self.low + self.high)
        middle = torch.where(own >= self.high, self.between + self.low, inside)
        middle = torch.where(own <= self.low, self.between + self.high, middle)
        # Alone, a client has no teacher.
        mean = middle / self.others if self.others else torch.zeros_like(middle)
        matrix = self.table.triangle.square(mean.clamp(-1, 1).to(dtype))
        return Agreement(matrix, torch.full_like(matrix, self.others > 0, dtype=torch.bool))


class _WeightedMiddle:
    """Weighted mean of the middle of each entry; ``trim`` of the weight is cut at either end.

    Sorted values x with weights w are one step function of the weight q that lies below, and S(q)
    is its integral from 0. The middle is ``(S(W − tW) − S(tW)) / (W − 2tW)`` of the total weight W.
    Without a client, whose weight w_k has A_k below it, the integral is S(q) up to A_k, and
    ``S(q + w_k) − w_k x_k`` above: two searches among the sorted weights for each of its entries.

    Pairs are taken a part at a time: what is kept are the means of everybody, and of all others for
    each client that is ``heard`` (a row of the table), as ``dtype``.
    """

    def __init__(
        self, table: CorrelationTable, round: int, heard: Tensor, dtype: torch.dtype
    ) -> None:
        self.sums, device = _Weighted(table, table.rows, round), table.device
        count, pairs = table.rows["upper"].shape
        self.mean = torch.zeros(pairs, dtype=torch.float64, device=device)
        self.others = torch.zeros(len(heard), pairs, dtype=dtype, device=device)
        for part in parts(pairs, count, device):
            values, weights = (t.mT.contiguous() for t in self.sums.terms(table.rows, part))
            common, others = _middles(values, weights, heard, table.operator.trim)
            self.mean[part], self.others[:, part] = common, others.mT.clamp(-1, 1).to(dtype)

    def everybody(self) -> Agreement:
        """The consensus of all clients of the table."""
        return self._agreement(self.mean.clamp(-1, 1), self.sums.weight > 0)

    def without(self, rows: Group, dtype: torch.dtype) -> Agreement:
        """For each of these clients the consensus of all others, (m, C, C)."""
        weights = self.sums.terms(rows)[1]
        known = self.sums.weight - weights > _FADED * self.sums.weight
        return self._agreement(self.others[rows["place"]].to(dtype), known)

    def _agreement(self, mean: Tensor, known: Tensor) -> Agreement:
        """Means and known entries (..., pairs) as matrices (..., C, C)."""
        triangle = self.sums.table.triangle
        return Agreement(triangle.square(torch.where(known, mean, 0)), triangle.square(known))


def _middles(values: Tensor, weights: Tensor, heard: Tensor, trim: float) -> tuple[Tensor, Tensor]:
    """The weighted middle of values (pairs, J), and without each of the ``heard``, (pairs, m)."""
    ordered, order = values.sort(-1)
    sorted_weights = weights.gather(-1, order)
    start = torch.zeros_like(weights[:, :1])
    ends = sorted_weights.cumsum(-1)
    upto = torch.cat([start, ends], -1)
    areas = torch.cat([start, (ordered * sorted_weights).cumsum(-1)], -1)
    below = torch.empty_like(weights).scatter_(-1, order, upto[:, :-1])

    def middle(own: Tensor, weight: Tensor, below: Tensor) -> Tensor:
        """Without values ``own``, their weights and A, (pairs, m) each."""
        rest = upto[:, -1:] - weight

        def integral(q: Tensor) -> Tensor:
            passed = q > below
            q = torch.where(passed, q + weight, q)
            place = torch.searchsorted(ends, q).clamp(max=ordered.shape[-1] - 1)
            beyond = (q - upto.gather(-1, place)) * ordered.gather(-1, place)
            return areas.gather(-1, place) + beyond - torch.where(passed, weight * own, 0)

        area = integral((1 - trim) * rest) - integral(trim * rest)
        return area / torch.where(rest > 0, (1 - 2 * trim) * rest, 1)

    common = middle(start, start, start).squeeze(-1)
    return common, middle(values[:, heard], weights[:, heard], below[:, heard])


def _row(told: Group, images: int) -> Tensors:
    """What one client told, with its round, as a table of one row."""
    row = {name: tensor.unsqueeze(0) for name, tensor in told.items()}
    at = row["upper"].device
    return {**row, "round": row["round"].to(at), "examples": torch.tensor([images], device=at)}


def _select(rows: Group, chosen: Tensor | slice) -> Tensors:
    return {name: tensor[chosen] for name, tensor in rows.items()}


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
