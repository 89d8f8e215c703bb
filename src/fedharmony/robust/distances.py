"""Rules that look at lengths and distances of updates, or at single numbers.

Norm bound: Sun et al., 2019 (arXiv 1911.07963). Median, trimmed mean: Yin et al., ICML 2018 (arXiv
1803.01498). Geometric median: Pillutla et al., 2022 (arXiv 1912.13445). Multi-Krum: Blanchard et
al., NeurIPS 2017; it chooses clients without looking at weights, and averages the chosen with them.
Nearest-neighbour mixing: Allouah et al., AISTATS 2023 (arXiv 2302.01772).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedharmony.robust.base import Judgement, Rule, Updates, bounded, median, rules

#: "norm_bound": so many lengths are remembered.
REMEMBERED = 200
#: Weiszfeld's iteration ends when no share moves by more than this, or after so many steps.
STILL, STEPS = 1e-9, 200


@rules.register("norm_bound")
class NormBound(Rule):
    """Mean of updates, each cut to robust_bound medians of the last lengths."""

    def judge(self, updates: Updates) -> Judgement:
        """Cut what is longer than ``bound`` medians."""
        lengths = updates.products().diagonal().sqrt()
        known = torch.cat([updates.memory.get("lengths", lengths[:0]).to(lengths), lengths])
        cut = bounded(lengths, self.longest * median(known))
        cuts, memory = dict.fromkeys(updates.blocks, cut), {"lengths": known[-REMEMBERED:]}
        return Judgement(torch.ones_like(lengths), cuts=cuts, memory=memory)


@rules.register("median")
class Median(Rule):
    """Weighted median of each number."""

    def judge(self, updates: Updates) -> Judgement:
        """Trim all but the middle."""
        return Judgement(torch.ones_like(updates.weights), trim=0.5)


@rules.register("trimmed_mean")
class TrimmedMean(Rule):
    """Weighted mean of each number, without robust_bad of the weight at either end."""

    @property
    def smallest(self) -> int:
        """A whole client of a cohort with equal weights is cut at either end."""
        return math.ceil(1 / self.bad - 1e-9) if self.bad else 1 << 62

    def judge(self, updates: Updates) -> Judgement:
        """Trim either end."""
        return Judgement(torch.ones_like(updates.weights), trim=self.bad)


@rules.register("mixed_trimmed_mean")
class MixedTrimmedMean(TrimmedMean):
    """Trimmed mean of mixed updates: each is first the mean of its nearest, but for robust_bad."""

    def judge(self, updates: Updates) -> Judgement:
        """Mix each with its m − f nearest, itself among them, for f = ⌊bad · m⌋."""
        away = squared_distances(updates.products())
        left = len(away) - int(self.bad * len(away) + 1e-9)
        nearest = away.argsort(dim=1, stable=True)[:, :left]
        mixing = torch.zeros_like(away).scatter_(1, nearest, 1 / left)
        return Judgement(torch.ones_like(updates.weights), mixing=mixing, trim=self.bad)


@rules.register("geometric_median")
class GeometricMedian(Rule):
    """The point with the smallest weighted sum of distances to all models (Weiszfeld)."""

    def judge(self, updates: Updates) -> Judgement:
        """Weights that make the mean the geometric median."""
        weights = updates.weights
        return Judgement(geometric_median(updates.products(), weights) / weights * weights.sum())


@rules.register("multi_krum")
class MultiKrum(Rule):
    """Mean over the m − f clients with the nearest m − f − 2 others, f = ⌈robust_bad · m⌉."""

    @property
    def smallest(self) -> int:
        """2f + 3 clients for f = 1."""
        return 5

    def judge(self, updates: Updates) -> Judgement:
        """Leave out those whose neighbours are far."""
        chosen = krum(updates.products(), math.ceil(self.bad * len(updates.weights)))
        out = (chosen == 0).nonzero().flatten().tolist()
        return Judgement(chosen, dict.fromkeys(out, "its update is far from its nearest others"))


def squared_distances(gram: Tensor) -> Tensor:
    """‖u_j − u_k‖² from products; exactly 0 of a client to itself."""
    own = gram.diagonal()
    return (own[:, None] + own - 2 * gram).clamp(min=0).fill_diagonal_(0)


def krum(gram: Tensor, bad: int) -> Tensor:
    """1 for the m − f clients that are nearest to their m − f − 2 nearest others, else 0.

    Where fewer clients answered than 2f + 3, f is as large as they allow.

    >>> gram = torch.tensor([0.0, 1, 2, 3, 50])[:, None] * torch.tensor([0.0, 1, 2, 3, 50])
    >>> krum(gram, 1)
    tensor([1., 1., 1., 1., 0.])
    """
    clients = len(gram)
    bad = max(0, min(bad, (clients - 3) // 2))
    ordered = squared_distances(gram).sort(1).values  # the first is a client's distance to itself
    score = ordered[:, 1 : max(1, clients - bad - 2) + 1].sum(1)
    chosen = torch.zeros_like(score)
    chosen[score.argsort(stable=True)[: clients - bad]] = 1
    return chosen


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
