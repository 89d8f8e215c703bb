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
from fedharmony.site.records import Packer, record_of
from fedharmony.types import BUFFERS, FROZEN, PARAMS, Record

#: Name of the words, and beginning of the names of the parts.
MEASURED = "measured"
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

    def put(
        self, words: dict[str, Any], parts: dict[str, bytes], message: Record, packer: Packer
    ) -> None:
        """Add the question to what a site is sent; groups that the message has are not repeated."""
        same = [g for g, tensors in self.model.groups.items() if message.get(g) is tensors]
        own = {g: t for g, t in self.model.groups.items() if g not in same}
        renamed = Record({f"{MEASURED}.{group}": tensors for group, tensors in own.items()})
        parts |= packer.parts(renamed)
        words[MEASURED] = {
            "same": same,
            "scalars": dict(self.model.scalars),
            "threshold": self.threshold,
        }

    @classmethod
    def of(cls, words: Mapping[str, Any], parts: Mapping[str, bytes], message: Record) -> Question:
        """The question behind :meth:`put`."""
        said = words[MEASURED]
        begin = f"{MEASURED}."
        own = record_of({n: part for n, part in parts.items() if n.startswith(begin)}, {})
        groups = {name.removeprefix(begin): tensors for name, tensors in own.groups.items()}
        groups |= {str(group): message.get(str(group)) for group in said["same"]}
        return cls(Record(groups, dict(said["scalars"])), float(said["threshold"]))


def measure(
    plan: Blueprint,
    test: LabelledImages,
    question: Question,
    policy: Policy,
    device: torch.device,
) -> tuple[dict[str, Any], dict[str, bytes]]:
    """Words and parts of the answer."""
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
    tensors = part.tensors(question.threshold)
    return {"images": part.images}, Packer().parts(Record({MEASURED: tensors}))
