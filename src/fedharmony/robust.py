"""Averages of models that bear clients who lie: one rule for all methods, in place of the mean.

u_k = θ_k − θ is a client's update, w_k the weight that the method gives it.

====================  ============================================================================
``norm_bound``        mean of updates cut to the length ``bound`` · median of the lengths ‖u_k‖ of
                      this cohort and the last ones
``median``            weighted median of each number
``trimmed_mean``      weighted mean of each number, without the part ``bad`` of the weight at either
                      end of its sorted values
``geometric_median``  the point with the smallest Σ w_k ‖θ_k − z‖ (Weiszfeld's iteration)
``multi_krum``        mean over the m − f clients whose m − f − 2 nearest others are nearest, with
                      f = ⌈bad · m⌉
``same_direction``    mean of the updates whose head points the way of most others' and whose whole
                      does not point against them, cut to ``bound`` · median of their lengths
====================  ============================================================================

Norm bound: Sun et al., 2019 (arXiv 1911.07963). Median, trimmed mean: Yin et al., ICML 2018 (arXiv
1803.01498). Geometric median: Pillutla et al., 2022 (arXiv 1912.13445). Multi-Krum: Blanchard et
al., NeurIPS 2017; it chooses clients without looking at weights, and averages the chosen with them.
The last rule parts a cohort in two by the cosines of its updates, as Sattler et al. (ICASSP 2020)
and FLAME (Nguyen et al., USENIX Security 2022) do: honest updates of skewed clients differ in many
ways, but all point downhill. When the smaller part is left out is our choice, and so is the look at
the head alone: in the millions of numbers before it, updates of honest clients soon have cosines of
hardly more than nothing.

A weight is a claim, too: under every rule but "none" no client weighs more than ``cap`` times the
median of its cohort.

**Memory.** A rule needs all models of a cohort: they are held, by reference, where they are (ViT-B
with 25 clients: 86 million numbers × 4 bytes × 25 = 8.6 GB). What is computed from them is computed
in parts of a few million numbers; beyond that only the new model is made. Four of the rules need no
more than the products u_j·u_k of all pairs: m × m numbers give lengths, distances and all steps
of Weiszfeld's iteration, and one weighted sum of models follows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor

from fedharmony.aggregate import ModelMean
from fedharmony.correlation import parts
from fedharmony.types import BUFFERS, PARAMS, Group, Packed, Record

Rule: TypeAlias = Literal[
    "none",
    "norm_bound",
    "median",
    "trimmed_mean",
    "geometric_median",
    "multi_krum",
    "same_direction",
]
BY_NUMBER = ("median", "trimmed_mean")

ROBUST = "robust"  # state, "norm_bound": lengths of the last updates
#: "norm_bound": so many lengths are remembered.
REMEMBERED = 200
#: "same_direction": how names of the parameters of a head begin; and by how much a cosine must be
#: less than another one to count: honest clients of the same labels agree better with each other.
HEAD, CLEARLY = "head.", 0.25
#: Weiszfeld's iteration ends when no share moves by more than this, or after so many steps.
STILL, STEPS = 1e-9, 200
#: Shares that add up to one half within this are taken for one half.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Robust:
    """How models are averaged: a rule of the module, or "none" for the weighted mean."""

    rule: Rule = "none"
    bad: float = 0.3
    bound: float = 2.0
    cap: float = 3.0

    def mean(self, state: Record) -> ModelMean:
        """What the replies to a model are folded into."""
        return ModelMean() if self.rule == "none" else RobustMean(self, state)

    def needs(self, cohort: int) -> int:
        """The clients that the rule needs for as many liars as a cohort may have."""
        return 2 * math.ceil(self.bad * cohort) + 3 if self.rule == "multi_krum" else 1


class RobustMean(ModelMean):
    """Holds the models of a cohort, and makes the new one by a rule.

    ``state`` is the server's, with the model that clients received.
    """

    def __init__(self, robust: Robust, state: Record) -> None:
        super().__init__()
        self.robust, self.received = robust, state
        self._held: list[Record] = []
        self._weights: list[tuple[float, float]] = []
        self._lengths: Tensor | None = None

    def add(self, record: Record, weight: float, buffers: float | None = None) -> None:
        """Hold one client's model."""
        self.clients += 1
        self._held.append(Record({group: record.get(group) for group in (PARAMS, BUFFERS)}))
        self._weights.append((weight, weight if buffers is None else buffers))

    def means(self, exact: bool = False) -> dict[str, Group]:
        """The new model: number by number, or as a weighted sum of the clients' models."""
        params, buffers = (
            capped(torch.tensor(own, dtype=torch.float64), self.robust.cap)
            for own in zip(*self._weights, strict=True)
        )
        if self.robust.rule in BY_NUMBER:
            return {
                PARAMS: self._by_number(PARAMS, params, exact),
                BUFFERS: self._by_number(BUFFERS, buffers),
            }
        kept, cut = self._judged(params)
        both, mean = torch.stack([params, buffers], 1) * kept[:, None], ModelMean()
        for record, own in zip(self._held, (both * cut[:, None]).tolist(), strict=True):
            if own[0] > 0:
                mean.add(record, *own)
        if bool((cut < 1).any()):  # what is cut from an update is given to the received model
            mean.add(self.received, *((1 - cut) @ both).tolist())
        return mean.means(exact)

    def update(self, state: Record, exact: bool = False) -> Record:
        """The state with the new model, and with the lengths of updates where they count."""
        state = super().update(state, exact)
        if self._lengths is None:
            return state
        return state.replace({ROBUST: {"lengths": self._lengths[-REMEMBERED:]}})

    def _judged(self, weights: Tensor) -> tuple[Tensor, Tensor]:
        """What a client's weight, and the length of its update, are multiplied with, (m,) each."""
        models = [self.received.get(PARAMS), *(r.get(PARAMS) for r in self._held)]
        gram = products(models).cpu()
        lengths, all_of_it = gram.diagonal().sqrt(), torch.ones_like(weights)
        if self.robust.rule == "norm_bound":
            past = self.received.get(ROBUST).get("lengths", lengths[:0]).to(lengths)
            self._lengths = torch.cat([past, lengths])
            return all_of_it, bounded(lengths, self.robust.bound * median(self._lengths))
        if self.robust.rule == "same_direction":
            heads = [head_of(model) for model in models]
            if heads[0]:
                kept = same_direction(products(heads).cpu())
                kept = same_direction(gram, least=-0.5, among=kept)
            else:
                kept = same_direction(gram)
            # Of all and of those kept: where honest updates are left out, liars may be most of it.
            usual = min(median(lengths), median(lengths[kept > 0]))
            return kept, bounded(lengths, self.robust.bound * usual)
        if self.robust.rule == "multi_krum":
            return krum(gram, math.ceil(self.robust.bad * len(gram))), all_of_it
        return geometric_median(gram, weights) / (weights / weights.sum()), all_of_it

    def _by_number(self, group: str, weights: Tensor, exact: bool = False) -> Group:
        """One group of the new model; whole numbers are the first client's."""
        members = [record.get(group) for record in self._held]
        trim = 0.5 if self.robust.rule == "median" else self.robust.bad

        def middle(tensors: Sequence[Tensor]) -> Tensor:
            first = tensors[0]
            if not first.is_floating_point():
                return first.clone()
            rows = [tensor.reshape(-1) for tensor in tensors]
            found = rows[0].new_empty(len(rows[0]), dtype=torch.float64 if exact else first.dtype)
            for part in parts(len(found), len(rows), found.device):
                found[part] = trimmed(torch.stack([row[part] for row in rows]), weights, trim)
            return found.view(first.shape)

        if (layout := _common_layout(members)) is not None:
            return Packed(layout[0].layout, middle([m.row for m in layout]))
        return {name: middle([m[name] for m in members]) for name in members[0]}


def capped(weights: Tensor, cap: float) -> Tensor:
    """Weights of which none is above ``cap`` times their median.

    >>> capped(torch.tensor([1.0, 2.0, 100.0]), 3.0)
    tensor([1., 2., 6.])
    """
    return weights.clamp(max=cap * median(weights))


def median(values: Tensor) -> float:
    """The middle value, or the mean of the two in the middle."""
    return float(values.quantile(0.5))


def bounded(lengths: Tensor, most: float) -> Tensor:
    """Factors that leave no update longer than ``most``; exactly 1 for those that are not.

    >>> bounded(torch.tensor([1.0, 2.0, 8.0]), 2.0)
    tensor([1.0000, 1.0000, 0.2500])
    """
    return torch.where(lengths > most, most / lengths, 1.0)


def trimmed(values: Tensor, weights: Tensor, trim: float) -> Tensor:
    """Weighted mean along the first axis, (m, n) to (n,), of what lies between two quantiles.

    The part ``trim`` of the weight is cut at either end of the sorted values, through the middle of
    a client's weight where need be; ½ leaves the weighted median.

    >>> values, weights = torch.tensor([[1.0], [2.0], [6.0], [90.0]]), torch.ones(4)
    >>> [float(trimmed(values, weights, t)) for t in (0.25, 0.375, 0.5)]  # (2 + 6)/2 each
    [4.0, 4.0, 4.0]
    >>> float(trimmed(values, weights, 0.125))  # (½·1 + 2 + 6 + ½·90) / 3
    17.833333333333332
    """
    ordered, order = values.double().sort(0)
    share = (weights / weights.sum()).to(values.device)[order]
    upto = share.cumsum(0)
    if trim == 0.5:
        # The first value with half of the weight up to it, and the first with more than half.
        last = len(values) - 1
        ends = (upto < 0.5 - ROUNDING).sum(0), (upto <= 0.5 + ROUNDING).sum(0)
        low, high = (ordered.gather(0, end.clamp(max=last)[None])[0] for end in ends)
        return (low + high) / 2
    kept = upto.clamp(trim, 1 - trim) - (upto - share).clamp(trim, 1 - trim)
    return (ordered * kept).sum(0) / kept.sum(0)


def products(models: Sequence[Group]) -> Tensor:
    """u_j·u_k, float64 (m, m), of models θ, θ_1, … θ_m."""
    total = torch.zeros((), dtype=torch.float64)
    for rows in _columns(models):
        for part in parts(len(rows[0]), len(rows), rows[0].device):
            start, *others = (row[part].double() for row in rows)
            updates = torch.stack(others) - start
            total = total.to(updates.device) + updates @ updates.mT
    return total


def _columns(models: Sequence[Group]) -> Iterator[list[Tensor]]:
    """The same numbers of all models, tensor by tensor, or all at once where they are packed."""
    if (packed := _common_layout(models)) is not None:
        yield [model.row for model in packed]
        return
    for name, first in models[0].items():
        if first.is_floating_point():
            yield [model[name].reshape(-1) for model in models]


def _common_layout(models: Sequence[Group]) -> list[Packed] | None:
    """The models if all are packed alike, else None."""
    packed = [model for model in models if isinstance(model, Packed)]
    alike = len(packed) == len(models) and len({model.layout for model in packed}) == 1
    return packed if alike else None


def krum(gram: Tensor, bad: int) -> Tensor:
    """1 for the m − f clients that are nearest to their m − f − 2 nearest others, else 0.

    Where fewer clients answered than 2f + 3, f is as large as they allow.

    >>> gram = torch.tensor([0.0, 1, 2, 3, 50])[:, None] * torch.tensor([0.0, 1, 2, 3, 50])
    >>> krum(gram, 1)
    tensor([1., 1., 1., 1., 0.])
    """
    clients = len(gram)
    bad = max(0, min(bad, (clients - 3) // 2))
    own = gram.diagonal()
    distances = (own[:, None] + own - 2 * gram).clamp(min=0)  # ‖u_j − u_k‖²
    ordered = distances.sort(1).values  # the first is a client's distance to itself
    score = ordered[:, 1 : max(1, clients - bad - 2) + 1].sum(1)
    chosen = torch.zeros_like(score)
    chosen[score.argsort(stable=True)[: clients - bad]] = 1
    return chosen


def head_of(model: Group) -> Group:
    """The parameters of a model's last layers: there honest updates agree longest."""
    return {name: tensor for name, tensor in model.items() if name.startswith(HEAD)}


def same_direction(gram: Tensor, least: float = 0.5, among: Tensor | None = None) -> Tensor:
    """1 for clients whose update points the way of most others, else 0.

    Clients are joined by the mean cosine between their updates (average linkage) until two groups
    are left. The smaller one is left out if the mean cosine between the groups is less than
    ``least`` times that inside the larger, and by ¼ less than that; then once more with those that
    are kept, as long as they are more than half of all. Weights do not count: what a client claims
    to have gives it no voice here. Clients that ``among`` leaves out stay out.

    >>> updates = torch.tensor([[2.0, 1], [1, 0], [1, 1], [-1, -1], [-1, 2]])
    >>> same_direction(updates @ updates.mT)
    tensor([1., 1., 1., 0., 0.])
    >>> same_direction(updates @ updates.mT, least=-0.5)
    tensor([1., 1., 1., 0., 1.])
    """
    from scipy.cluster.hierarchy import linkage, to_tree  # here: most runs do without
    from scipy.spatial.distance import squareform

    lengths = gram.diagonal().sqrt()
    scale = torch.where(lengths > 0, 1 / lengths, 0.0)
    cosines, kept = gram * scale * scale[:, None], torch.arange(len(gram))
    kept = kept if among is None else kept[among > 0]
    if 2 * int((lengths[kept] > 0).sum()) > len(gram):  # an update of zero has no direction
        kept = kept[lengths[kept] > 0]
    while len(kept) > 2:
        own = cosines[kept][:, kept]
        apart = (1 - own).clamp(min=0).numpy()  # 1 − 1 may be a little less than nothing
        top = to_tree(linkage(squareform(apart, checks=False), "average"))
        most, rest = sorted((top.get_left().pre_order(), top.get_right().pre_order()), key=len)[
            ::-1
        ]
        inside = own[most][:, most]
        mean_inside = (inside.sum() - inside.trace()) / max(1, inside.numel() - len(inside))
        enough = min(least * mean_inside, mean_inside - CLEARLY)
        if 2 * len(most) <= len(gram) or own[most][:, rest].mean() >= enough:
            break
        kept = kept[sorted(most)]
    return torch.zeros(len(gram), dtype=gram.dtype).index_fill(0, kept, 1.0)


def geometric_median(gram: Tensor, weights: Tensor) -> Tensor:
    """Shares a_k, sum 1, of the updates in their geometric median Σ a_k u_k, (m,).

    Weiszfeld: a_k ∝ w_k / ‖z − u_k‖ for z = Σ a_k u_k, over and over, where
    ``‖z − u_k‖² = aᵀG a − 2 (G a)_k + G_kk``. A distance counts as no less than a millionth of the
    median one: z may lie on a client's model.
    """
    shares = weights / weights.sum()
    for _ in range(STEPS):
        moved = gram @ shares
        squared = shares @ moved - 2 * moved + gram.diagonal()
        distance = squared.clamp(min=0).sqrt()
        least = 1e-6 * median(distance)
        if not least:
            break
        pulls = weights / distance.clamp(min=least)
        before, shares = shares, pulls / pulls.sum()
        if float((shares - before).abs().max()) < STILL:
            break
    return shares
