"""The rule "agreement": who points another way than most, in any block of layers.

Honest updates of skewed clients differ in many ways, but all point downhill. So a cohort is parted
in two by the cosines of its updates, as Sattler et al. (ICASSP 2020) and FLAME (Nguyen et al.,
USENIX Security 2022) do. When the smaller part is left out is our choice.

An attack that is to move the model needs several clients that push the same way. If they push
another way than the others, the block of layers in which they do it shows it: each block is judged
alone, and who is left out in one is left out. If they agree with each other more than independent
clients do (FoolsGold, Fung et al., RAID 2020), that shows them where honest updates hardly agree.
Cosines are running means over the rounds, so that small deviations add up.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import pad

from fedharmony.robust.base import Judgement, Rule, Updates, bounded, median, rules
from fedharmony.types import Tensors

#: By how much cosines must differ to count, for the larger part and for the smaller one; and the
#: squared distance below which updates are one voice, in units of that between honest ones.
APART, TIGHT, ALIKE = 0.15, 0.2, 0.3
#: Cosines are remembered of clients with smaller ids; the share that is kept of an old cosine; and
#: what stands for one that was never seen.
REMEMBERED, KEPT, UNSEEN = 256, 0.7, 2.0
WHOLE = "the whole model"

Tree: TypeAlias = npt.NDArray[np.float64]


@rules.register("agreement")
class Agreement(Rule):
    """Mean of updates that agree in every block of layers; copies of one update share a weight."""

    def judge(self, updates: Updates) -> Judgement:
        """In each block and the whole: who copies others, and who points another way."""
        grams = {block: updates.products(names) for block, names in updates.blocks.items()}
        looked = {**grams, WHOLE: torch.stack([*grams.values()]).sum(0)}
        clients = len(updates.clients)
        share, doubts = torch.ones(clients, dtype=torch.float64), dict[int, dict[str, None]]()
        memory: Tensors = {}
        for block, gram in looked.items():
            voices = one_voice(gram)
            for voice in voices:
                share[voice] = share[voice].clamp(max=1 / len(voice))
            first = [voice[0] for voice in voices]
            seen = running_mean(block, cosines(gram), updates, memory)
            agree = agreeing(seen[first][:, first], gram.diagonal()[first] > 0)
            for voice, agrees in zip(voices, agree.tolist(), strict=True):
                for place in [] if agrees else voice:
                    doubts.setdefault(place, {})[block] = None
        # Most doubted first: less than half of a cohort may be malicious.
        out = sorted(doubts, key=lambda place: -len(doubts[place]))[: (clients - 1) // 2]
        share[out] = 0
        reasons = {
            k: f"its update of {', '.join(doubts[k])} disagrees with most" for k in sorted(out)
        }
        cuts = {}
        for block, gram in grams.items():
            lengths = gram.diagonal().sqrt()
            # Of all and of those kept: where honest updates are left out, others may be most of it.
            cuts[block] = bounded(lengths, min(median(lengths), median(lengths[share > 0])))
        return Judgement(share, reasons, cuts, memory)


def running_mean(block: str, cosines: Tensor, updates: Updates, memory: Tensors) -> Tensor:
    """Means of this round's cosines and earlier ones of the same pairs; ``memory`` takes them."""
    places = [i for i, client in enumerate(updates.clients) if 0 <= client < REMEMBERED]
    if not places:
        return cosines
    ids = torch.tensor([updates.clients[i] for i in places])
    table = updates.memory.get(block, torch.empty(0, 0)).to(cosines)
    more = max(0, int(ids.max()) + 1 - len(table))
    table = pad(table, (0, more, 0, more), value=UNSEEN)
    old, new = table[ids][:, ids], cosines[places][:, places]
    new = torch.where(old == UNSEEN, new, KEPT * old + (1 - KEPT) * new)
    table[ids[:, None], ids], mean = new, cosines.clone()
    mean[torch.tensor(places)[:, None], places] = new
    memory[block] = table
    return mean


def cosines(gram: Tensor) -> Tensor:
    """Cosines from products; 0 with an update of zero."""
    lengths = gram.diagonal().clamp(min=0).sqrt()
    scale = torch.where(lengths > 0, 1 / lengths, 0.0)
    return gram * scale * scale[:, None]


def squared_distances(gram: Tensor) -> Tensor:
    """‖u_j − u_k‖² from products; exactly 0 of a client to itself."""
    squares = gram.diagonal()
    return (squares[:, None] + squares - 2 * gram).clamp(min=0).fill_diagonal_(0)


def joined(apart: Tensor) -> Tree:
    """Clients joined by their mean distance, two groups at a time (average linkage)."""
    from scipy.cluster.hierarchy import linkage  # here: most runs do without
    from scipy.spatial.distance import squareform

    found: Tree = linkage(squareform(apart.numpy(), checks=False), "average")
    return found


def one_voice(gram: Tensor) -> list[list[int]]:
    """Groups of clients that send nearly the same update; most stand alone.

    A squared distance counts in units of that to the client in the middle of all others, by
    distance: more than half of a cohort are honest, so it is no longer than between honest clients.
    Updates longer than the median are cut to it first.

    >>> updates = torch.tensor([[2.0, 1], [1, 0], [1, 1], [-1, -1], [-1, -1]]).double()
    >>> one_voice(updates @ updates.mT)
    [[0], [1], [2], [3, 4]]
    """
    from scipy.cluster.hierarchy import fcluster

    lengths = gram.diagonal().sqrt()
    cut = bounded(lengths, median(lengths))
    away = squared_distances(gram * cut * cut[:, None])
    usual = away.sort(1).values[:, len(away) // 2]
    unit = torch.minimum(usual[:, None], usual)
    apart = torch.where(unit > 0, away / unit, 1.0).fill_diagonal_(0)
    groups: dict[int, list[int]] = {}
    for place, label in enumerate(fcluster(joined(apart), ALIKE, "distance").tolist()):
        groups.setdefault(label, []).append(place)
    return sorted(groups.values())


def mean_cosine(cosines: Tensor) -> float:
    """The mean over pairs of different clients; −1 where there is only one."""
    pairs = cosines.numel() - len(cosines)
    return float((cosines.sum() - cosines.trace()) / pairs) if pairs else -1.0


def parted(cosines: Tensor) -> tuple[list[int], list[int], float]:
    """The larger group, the smaller one, and the mean cosine between them."""
    from scipy.cluster.hierarchy import to_tree

    top = to_tree(joined((1 - cosines).clamp(min=0)))  # 1 − 1 may be a little less than nothing
    rest, most = sorted((top.get_left().pre_order(), top.get_right().pre_order()), key=len)
    return most, rest, float(cosines[most][:, rest].mean())


def agreeing(cosines: Tensor, moved: Tensor) -> Tensor:
    """Whether each client belongs to the part of a cohort that agrees.

    The smaller of two groups does not belong to it if the mean cosine between the groups is less
    than half of that inside one of them, and by ``APART`` less (inside the larger) or by ``TIGHT``
    less (inside the smaller). Then once more, as long as more than half are left.

    >>> updates = torch.nn.functional.normalize(torch.tensor([[2.0, 1], [1, 0], [1, 1], [-1, 2]]))
    >>> agreeing(updates @ updates.mT, torch.ones(4) > 0)
    tensor([ True,  True,  True, False])
    """
    everybody = torch.arange(len(cosines))
    kept = everybody[moved] if 2 * int(moved.sum()) > len(moved) else everybody
    while len(kept) > 2:
        own = cosines[kept][:, kept]
        most, rest, between = parted(own)
        large, small = mean_cosine(own[most][:, most]), mean_cosine(own[rest][:, rest])
        apart = between < min(large / 2, large - APART) or between < min(small / 2, small - TIGHT)
        if 2 * len(most) <= len(cosines) or not apart:
            break
        kept = kept[sorted(most)]
    return torch.zeros(len(cosines), dtype=torch.bool).index_fill(0, kept, value=True)
