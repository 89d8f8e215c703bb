"""A global model on the test images of a site: what a server sends, and what the site answers.

The model rides on a message that trains from it, if one does: then what the two have in common
travels once. The server is told what ``policy.evaluation`` allows: sorted scores label by label, or
counts of scores in intervals (:mod:`fedharmony.metrics.parts`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedharmony.data.base import LabelledImages
from fedharmony.experiments.blueprint import Blueprint
from fedharmony.experiments.scorer import Scorer
from fedharmony.metrics.parts import part_of
from fedharmony.site.policy import Policy
from fedharmony.types import BUFFERS, FROZEN, PARAMS, Record

#: Name of the words and of the answer's group, and beginning of the names of a question's groups.
MEASURED = "measured"
BEGIN = f"{MEASURED}."
#: Groups of what a method's normalisation reads have names of their own.
GIVEN = "given."


def shown(plan: Blueprint, state: Record) -> Record:
    """What a site needs to use the (averaged) global model; frozen tensors if they have changed."""
    state = plan.average.shown(state)
    groups = {group: state.get(group) for group in (PARAMS, BUFFERS)}
    frozen, made = state.get(FROZEN), plan.parameters[1]
    changed = {n: t for n, t in frozen.items() if not torch.equal(t.cpu(), made[n].cpu())}
    given = {f"{GIVEN}{group}": g for group, g in plan.method.evaluation(state).items()}
    return Record({**groups, FROZEN: changed, **given}, state.scalars)


@dataclass(frozen=True)
class Question:
    """A model to be measured at sites, and from which score on a label is predicted."""

    model: Record
    threshold: float

    def beside(self, message: Record) -> tuple[dict[str, Any], Record]:
        """Words for a site, and the message with what the question needs beyond its groups."""
        same = [g for g, tensors in self.model.groups.items() if message.get(g) is tensors]
        more = {f"{BEGIN}{g}": t for g, t in self.model.groups.items() if g not in same}
        words = {"same": same, "scalars": dict(self.model.scalars), "threshold": self.threshold}
        return {MEASURED: words}, message.replace(more)

    @classmethod
    def of(cls, words: Mapping[str, Any], message: Record) -> Question:
        """The question behind :meth:`beside`."""
        said = words[MEASURED]
        own = {g: t for g, t in message.groups.items() if g.startswith(BEGIN)}
        groups = {name.removeprefix(BEGIN): tensors for name, tensors in own.items()}
        groups |= {str(group): message.get(str(group)) for group in said["same"]}
        return cls(Record(groups, dict(said["scalars"])), float(said["threshold"]))


def without(message: Record) -> Record:
    """A message without what is there for a question or an answer about a measurement."""
    groups = {g: t for g, t in message.groups.items() if not f"{g}.".startswith(BEGIN)}
    return Record(groups, message.scalars)


def measure(
    plan: Blueprint,
    test: LabelledImages,
    question: Question,
    policy: Policy,
    device: torch.device,
) -> tuple[dict[str, Any], Record]:
    """Words and tensors of the answer."""
    policy.refuse_measuring(len(test))
    model, given = question.model.to(device), dict[str, Any]()
    for group, tensors in model.groups.items():
        if group.startswith(GIVEN):
            given[group.removeprefix(GIVEN)] = tensors
    frozen = {**plan.parameters[1], **model.get(FROZEN)}
    frozen = {name: tensor.to(device) for name, tensor in frozen.items()}
    state = Record({PARAMS: model.get(PARAMS), BUFFERS: model.get(BUFFERS), FROZEN: frozen})
    scorer = Scorer(plan.model, plan.method, state.replace(scalars=model.scalars), given)
    scores, exact = scorer.all(test.images, device), policy.evaluation == "scores"
    part = part_of(scores, test.labels, test.known, question.threshold, exact)
    return {"images": part.images}, Record({MEASURED: part.tensors(question.threshold)})
