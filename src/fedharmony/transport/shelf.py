"""Answers that runs have in common, kept for the next one.

Every run whose head is solved in closed form begins with a pass over all images (see
``server/head_start.py``). Runs of a comparison or sweep begin with the same backbone on the same
images: what clients answer is the same to the bit, whatever the method, and with pre-trained
weights whatever the seed. The first run asks, the others take the answers from the shelf, which
lives as long as the data that they share.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedharmony.config import machine_memory
from fedharmony.engine.cohort import Cohort
from fedharmony.methods.base import Method, Stage
from fedharmony.models.base import Head
from fedharmony.types import BUFFERS, PARAMS, Answers, Messages, Record, Reply

#: Of the machine's memory, what answers on the shelf may take.
SHARE = 1 / 16


@dataclass(frozen=True)
class Shelf:
    """Answers to one kind of question: sums over the features of a backbone, without training.

    Attributes:
        kept: answers by their question; runs that share it share them.
        place: data, clients, device and settings that answers depend on, as text.
    """

    kept: dict[str, tuple[Reply, ...]]
    place: str

    def question(self, cohort: Cohort, stage: Stage, messages: Messages) -> str | None:
        """What is asked, as a hash; None if the answers may be others in another run.

        Features depend on the backbone and its inputs alone, unless the method shows images in its
        own way or its head looks at features differently: then on all of the message.
        """
        sweep, method = stage.sweep, cohort.method
        if sweep is None or stage.train or sweep.reads != "features" or method.task.sums:
            return None
        if sweep.draw is not None or sweep.limit is not None:
            return None
        own = type(method).normalise is not Method.normalise
        own |= type(cohort.model.head).embed is not Head.embed
        asked = {id(message): message for message in messages.values()}
        facts = {
            "place": self.place,
            "stage": [stage.name, sweep.group],
            "clients": [[client, list(asked).index(id(m))] for client, m in messages.items()],
            "own": repr((method.name, method.config)) if own else "",
            "task": repr([method.task.mean, method.task.std, method.task.unknown_labels]),
        }
        sha = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
        for message in asked.values():
            _hash(sha, message.tensors() if own else _backbone(message))
        _hash(sha, cohort.frozen.items())
        return sha.hexdigest()

    def answers(self, question: str, ask: Answers, device: torch.device) -> Answers:
        """What was answered before, or else what clients answer now, kept on the way."""
        if question not in self.kept:
            yield from self._keeping(question, ask)
            return
        for reply in self.kept[question]:
            yield replace(reply, record=reply.record.to(device))

    def _keeping(self, question: str, answers: Answers) -> Answers:
        """Pass answers on, and keep them if all are whole and there is room; older ones may go."""
        room, size, whole = SHARE * machine_memory(), 0, True
        found: list[Reply] = []
        for answer in answers:
            yield answer
            whole = whole and isinstance(answer, Reply) and bool(answer.finite)
            if whole and isinstance(answer, Reply):
                size += answer.record.nbytes
                whole = size <= room
                found.append(replace(answer, record=answer.record.to("cpu")))
            if not whole:
                found.clear()
        if whole:
            while sum(map(_size, self.kept.values())) + size > room:
                del self.kept[next(iter(self.kept))]
            self.kept[question] = tuple(found)


def _size(replies: Iterable[Reply]) -> int:
    return sum(reply.record.nbytes for reply in replies)


def _backbone(message: Record) -> Iterator[tuple[str, Tensor]]:
    """Parameters and buffers of the backbone: names of a head begin with ``head.``."""
    for group in (PARAMS, BUFFERS):
        for name, tensor in message.get(group).items():
            if not name.startswith("head."):
                yield f"{group} {name}", tensor


def _hash(sha: hashlib._Hash, tensors: Iterable[tuple[str, Tensor]]) -> None:
    for name, tensor in tensors:
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        sha.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().data)
