"""What rules have in common: the updates of a cohort, a judgement of them, and the new model.

**Memory.** A rule needs all models of a cohort: they are held, by reference, where they are (ViT-B
with 25 clients: 86 million numbers × 4 bytes × 25 = 8.6 GB). What is computed from them is computed
in parts of a few million numbers; beyond that only the new model is made. Most rules need no more
than the products u_j·u_k of all pairs, (m, m) for the model or for each of its blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedharmony.aggregate import ModelMean, RunningMean
from fedharmony.correlation import parts
from fedharmony.registry import Registry
from fedharmony.types import BUFFERS, PARAMS, Group, Packed, Record, Tensors

ROBUST = "robust"  # the group of the state in which rules remember earlier rounds
#: Shares that add up to one half within this are taken for one half.
ROUNDING = 1e-9

rules: Registry[type[Rule]] = Registry("rule of averaging", "fedharmony.robust")


@dataclass(frozen=True)
class Robust:
    """How models are averaged: a rule of the registry, or "none" for the weighted mean."""

    rule: str = "none"
    bad: float = 0.3
    bound: float | None = None

    def mean(self, state: Record) -> ModelMean:
        """What the replies to a model are folded into."""
        return ModelMean() if self.rule == "none" else RobustMean(rules[self.rule](self), state)

    @property
    def smallest(self) -> int:
        """The smallest cohort in which the rule tolerates a malicious client."""
        return 1 if self.rule == "none" else rules[self.rule](self).smallest


@dataclass
class Judgement:
    """What a rule makes of a cohort of m clients.

    Attributes:
        factors: what each client's weight is multiplied with, (m,); 0 leaves it out.
        reasons: why clients are left out, by their place in the cohort.
        cuts: by block of the model, what the length of each update is multiplied with, (m,).
        mixing: (m, m), rows of sum 1: updates are replaced by means of these shares.
        trim: the part of the weight that is cut at either end of each number's sorted values.
        memory: what the rule remembers for the next round.
    """

    factors: Tensor
    reasons: Mapping[int, str] = field(default_factory=dict)
    cuts: Mapping[str, Tensor] = field(default_factory=dict)
    mixing: Tensor | None = None
    trim: float | None = None
    memory: Tensors = field(default_factory=dict)


class Rule:
    """A rule of averaging; see the registry :data:`rules`."""

    name: ClassVar[str]
    #: The longest update, in medians of the cohort's lengths, unless ``robust_bound`` is set.
    bound: ClassVar[float] = 2.0

    def __init__(self, settings: Robust) -> None:
        self.bad = settings.bad
        self.longest = self.bound if settings.bound is None else settings.bound

    @property
    def smallest(self) -> int:
        """The smallest cohort in which the rule tolerates one malicious client: two others."""
        return 3

    def judge(self, updates: Updates) -> Judgement:
        """What becomes of each client's update."""
        raise NotImplementedError


@dataclass(frozen=True)
class Updates:
    """The updates of a cohort: the received model, clients' models, weights, and what was kept."""

    received: Group
    models: Sequence[Group]
    weights: Tensor
    clients: Sequence[int]
    memory: Group

    @cached_property
    def blocks(self) -> dict[str, list[str]]:
        """Names of parameters by block of the model."""
        blocks: dict[str, list[str]] = {}
        for name, tensor in self.received.items():
            if tensor.is_floating_point():
                blocks.setdefault(block_of(name), []).append(name)
        return blocks

    def products(self, names: Sequence[str] | None = None) -> Tensor:
        """u_j·u_k, float64 (m, m), of these parameters, or of all."""
        models = [self.received, *self.models]
        if names is not None:
            models = [{name: model[name] for name in names} for model in models]
        return products(models).cpu()


def block_of(name: str) -> str:
    """The block of layers that a parameter belongs to: a numbered one, the head, or the rest.

    >>> [block_of(n) for n in ("blocks.0.attn.qkv.weight", "head.bias", "pos_embed")]
    ['blocks.0', 'head', 'rest']
    """
    parts = name.split(".")
    number = next((i for i, part in enumerate(parts[:-1]) if part.isdigit()), None)
    if number is not None:
        return ".".join(parts[: number + 1])
    return "head" if parts[0] == "head" else "rest"


class RobustMean(ModelMean):
    """Holds the models of a cohort, and makes the new one by a rule.

    ``state`` is the server's, with the model that clients received. A cohort in which the rule does
    not tolerate a single malicious client leaves the model as it is.
    """

    def __init__(self, rule: Rule, state: Record) -> None:
        super().__init__()
        self.rule, self.received = rule, state
        self._held: list[Record] = []
        self._weights: list[tuple[float, float]] = []
        self._memory: Tensors = {}

    def add(self, record: Record, weight: float, buffers: float | None = None) -> None:
        """Hold one client's model."""
        self.clients += 1
        self._held.append(Record({group: record.get(group) for group in (PARAMS, BUFFERS)}))
        self._weights.append((weight, weight if buffers is None else buffers))

    def update(self, state: Record, exact: bool = False) -> Record:
        """The state with the new model, and with what the rule remembers."""
        least = self.rule.smallest
        if 0 < self.clients < least:
            few = f"{self.rule.name} needs {least} clients, and the round has {self.clients}"
            self.left_out = dict.fromkeys(self.weights, f"the model is kept: {few}")
            self.weights = {}
            return state
        state = super().update(state, exact)
        return state.replace({ROBUST: self._memory}) if self._memory else state

    def means(self, exact: bool = False) -> dict[str, Group]:
        """The new model: number by number, or as a weighted sum of the clients' models."""
        params, buffers = (
            capped(torch.tensor(own, dtype=torch.float64))
            for own in zip(*self._weights, strict=True)
        )
        clients = list(self.weights)
        models = [record.get(PARAMS) for record in self._held]
        updates = Updates(
            self.received.get(PARAMS), models, params, clients, self.received.get(ROBUST)
        )
        verdict = self.rule.judge(updates)
        self._memory = verdict.memory
        self.left_out = {clients[place]: reason for place, reason in verdict.reasons.items()}
        params, buffers = params * verdict.factors, buffers * verdict.factors
        if verdict.trim is None:
            shares = params / params.sum()
            found = {
                PARAMS: self._summed(updates, params, verdict.cuts, exact),
                BUFFERS: self._mean(BUFFERS, buffers),
            }
        else:
            new, shares = self._by_number(PARAMS, params, verdict, exact)
            found = {PARAMS: new, BUFFERS: self._by_number(BUFFERS, buffers, verdict)[0]}
        self.weights = dict(zip(clients, shares.tolist(), strict=True))
        return found

    def _summed(
        self, updates: Updates, weights: Tensor, cuts: Mapping[str, Tensor], exact: bool
    ) -> Group:
        """The weighted mean, block by block where the lengths of updates are cut."""
        if all(bool((cut == 1).all()) for cut in cuts.values()):
            return self._mean(PARAMS, weights, exact)
        found: dict[str, Tensor] = {}
        for block, names in updates.blocks.items():
            mean = RunningMean()
            for model, weight in zip(updates.models, (weights * cuts[block]).tolist(), strict=True):
                if weight > 0:
                    mean.add({name: model[name] for name in names}, weight)
            # What is cut from an update is given to the received model.
            if (rest := float((1 - cuts[block]) @ weights)) > 0:
                mean.add({name: updates.received[name] for name in names}, rest)
            found |= mean.result(exact)
        return found

    def _mean(self, group: str, weights: Tensor, exact: bool = False) -> Group:
        mean = RunningMean()
        for record, weight in zip(self._held, weights.tolist(), strict=True):
            if weight > 0:
                mean.add(record.get(group), weight)
        return mean.result(exact)

    def _by_number(
        self, group: str, weights: Tensor, verdict: Judgement, exact: bool = False
    ) -> tuple[Group, Tensor]:
        """One group of the new model, and the mean share of each client in its numbers.

        Whole numbers are the first client's.
        """
        members, trim, mixing = [r.get(group) for r in self._held], verdict.trim, verdict.mixing
        assert trim is not None
        totals, numbers = torch.zeros(len(members), dtype=torch.float64), 0

        def middle(tensors: Sequence[Tensor]) -> Tensor:
            nonlocal totals, numbers
            first = tensors[0]
            if not first.is_floating_point():
                return first.clone()
            rows = [tensor.reshape(-1) for tensor in tensors]
            found = rows[0].new_empty(len(rows[0]), dtype=torch.float64 if exact else first.dtype)
            for part in parts(len(found), len(rows), found.device):
                values = torch.stack([row[part] for row in rows]).double()
                values = values if mixing is None else mixing.to(values.device) @ values
                found[part], shares = trimmed(values, weights, trim)
                totals, numbers = totals + shares.sum(1).cpu(), numbers + len(found[part])
            return found.view(first.shape)

        if (layout := _common_layout(members)) is not None:
            new: Group = Packed(layout[0].layout, middle([m.row for m in layout]))
        else:
            new = {name: middle([m[name] for m in members]) for name in members[0]}
        shares = totals / max(1, numbers)
        return new, shares if mixing is None else shares @ mixing


def capped(weights: Tensor) -> Tensor:
    """Weights of which none is above their median.

    >>> capped(torch.tensor([1.0, 2.0, 100.0]))
    tensor([1., 2., 2.])
    """
    return weights.clamp(max=median(weights))


def median(values: Tensor) -> float:
    """The middle value, or the mean of the two in the middle."""
    return float(values.quantile(0.5))


def bounded(lengths: Tensor, most: float) -> Tensor:
    """Factors that leave no update longer than ``most``; exactly 1 for those that are not.

    >>> bounded(torch.tensor([1.0, 2.0, 8.0]), 2.0)
    tensor([1.0000, 1.0000, 0.2500])
    """
    return torch.where(lengths > most, most / lengths, 1.0)


def trimmed(values: Tensor, weights: Tensor, trim: float) -> tuple[Tensor, Tensor]:
    """Weighted mean along the first axis, (m, n) to (n,), and each row's share of it, (m, n).

    The part ``trim`` of the weight is cut at either end of the sorted values, through the middle of
    a client's weight where need be; ½ leaves the weighted median.

    >>> values, weights = torch.tensor([[1.0], [2.0], [6.0], [90.0]]), torch.ones(4).double()
    >>> [float(trimmed(values, weights, t)[0]) for t in (0.25, 0.375, 0.5)]  # (2 + 6)/2 each
    [4.0, 4.0, 4.0]
    >>> float(trimmed(values, weights, 0.125)[0])  # (½·1 + 2 + 6 + ½·90) / 3
    17.833333333333332
    """
    ordered, order = values.double().sort(0)
    share = (weights / weights.sum()).to(values.device)[order]
    upto = share.cumsum(0)
    if trim == 0.5:
        # The first value with half of the weight up to it, and the first with more than half.
        last = len(values) - 1
        ends = (upto < 0.5 - ROUNDING).sum(0), (upto <= 0.5 + ROUNDING).sum(0)
        used, half = torch.zeros_like(share), torch.full_like(share[:1], 0.5)
        for end in ends:
            used.scatter_add_(0, end.clamp(max=last)[None], half)
    else:
        used = upto.clamp(trim, 1 - trim) - (upto - share).clamp(trim, 1 - trim)
        used = used / used.sum(0)
    return (ordered * used).sum(0), torch.zeros_like(used).scatter_(0, order, used)


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
