"""A worker that fails in another way in each of its rounds; serves a site until it dies."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from fedharmony.site.parcel import STAGE, Parcel
from fedharmony.site.records import pack, record_of
from fedharmony.site.settings import load_site
from fedharmony.site.worker import Worker, serve


class Broken(Worker):
    """Round 1: not a number; 2: other shapes; 3: an exception; 4: its process ends."""

    def answer(self, question: Parcel) -> Parcel:
        round = question.words.get("round")
        if question.kind == STAGE and round == 4:
            os._exit(1)
        found = super().answer(question)
        if question.kind == STAGE and round in (1, 2):
            return changed(found, (lambda t: t * torch.nan) if round == 1 else (lambda t: t[None]))
        return found

    def _stage(self, question: Parcel) -> Parcel:
        if question.words.get("round") == 3:
            raise RuntimeError("the disk is full")
        return super()._stage(question)


def changed(found: Parcel, change: Callable[[Tensor], Tensor]) -> Parcel:
    """An answer whose model is another one."""
    record = record_of(found.parts, {})
    params = {name: change(tensor) for name, tensor in record.get("params").items()}
    return Parcel(found.kind, found.words, *pack([record.replace({"params": params})]))


if __name__ == "__main__":
    serve(Broken(load_site(Path(sys.argv[1]))))
