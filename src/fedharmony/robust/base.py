"""What rules have in common: the updates of a cohort, a judgement of them, and the new model.

**Memory.** A rule needs all models of a cohort: they are held, by reference, where they are (ViT-B
with 25 clients: 86 million numbers × 4 bytes × 25 = 8.6 GB). What is computed from them is computed
in parts of a few million numbers; beyond that only the new model is made. A rule sees the products
u_j·u_k of all pairs, (m, m) for each block of the model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor

from fedharmony.aggregate import ModelMean, RunningMean
from fedharmony.correlation import parts
from fedharmony.registry import Registry
from fedharmony.types import BUFFERS, PARAMS, Group, Record, Tensors

ROBUST = "robust"  # the group of the state in which rules remember earlier rounds

rules: Registry[type[Rule]] = Registry("rule of averaging", "fedharmony.robust")


@dataclass(frozen=True)
class Robust:
    """How models are averaged: a rule of the registry, or "none" for the weighted mean."""

    rule: str = "none"

    def mean(self, state: Record) -> ModelMean:
        """What the replies to a model are folded into."""
        return ModelMean() if self.rule == "none" else RobustMean(rules[self.rule](), state)

    @property
    def smallest(self) -> int:
        """The smallest cohort in which the rule tolerates a malicious client."""
        return 1 if self.rule == "none" else rules[self.rule].smallest


@dataclass
class Judgement:
    """What a rule makes of a cohort of m clients.

    Attributes:
        factors: what each client's weight is multiplied with, (m,); 0 leaves it out.
        reasons: why clients are left out, by their place in the cohort.
        cuts: by block of the model, what the length of each update is multiplied with, (m,).
        memory: what the rule remembers for the next round.
    """

    factors: Tensor
    reasons: Mapping[int, str] = field(default_factory=dict)
    cuts: Mapping[str, Tensor] = field(default_factory=dict)
    memory: Tensors = field(default_factory=dict)


class Rule:
    """A rule of averaging; see the registry :data:`rules`."""

    name: ClassVar[str]
    #: The smallest cohort in which the rule tolerates one malicious client: two others.
    smallest: ClassVar[int] = 3

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

    def products(self, names: Sequence[str]) -> Tensor:
        """u_j·u_k, float64 (m, m), of these parameters."""
        total = torch.zeros((), dtype=torch.float64)
        for name in names:
            rows = [model[name].reshape(-1) for model in (self.received, *self.models)]
            for part in parts(len(rows[0]), len(rows), rows[0].device):
                start, *others = (row[part].double() for row in rows)
                updates = torch.stack(others) - start
                total = total.to(updates.device) + updates @ updates.mT
        return total.cpu()


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
        """The weighted mean of what the rule leaves of the updates."""
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
        shares = params / params.sum()
        self.weights = dict(zip(clients, shares.tolist(), strict=True))
        return {
            PARAMS: self._summed(updates, params, verdict.cuts, exact),
            BUFFERS: self._mean(BUFFERS, buffers),
        }

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
