"""Weights & Biases: offline, under ``tracking/wandb``.

``wandb sync RUN/tracking/wandb/offline-run-*`` sends what was written; with WANDB_MODE=online in
the environment runs are sent as they go.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from fedharmony.experiments.trackers.base import Pixels, Subject, Tracker, trackers


@trackers.register("wandb")
class WandB(Tracker):
    """A run of Weights & Biases."""

    packages = ("wandb",)

    def __init__(self, subject: Subject) -> None:
        """A run that goes on has the identity it began with."""
        subject.place.mkdir(parents=True, exist_ok=True)
        self._last = subject.first
        self._wandb: Any = import_module("wandb")
        identity = hashlib.sha256(str(subject.folder.resolve()).encode()).hexdigest()[:16]
        self._run = self._wandb.init(
            project=os.environ.get("WANDB_PROJECT", "fedharmony"),
            name=subject.name,
            id=identity,
            resume="allow",
            config=dict(subject.settings),
            dir=str(subject.place),
            mode=os.environ.get("WANDB_MODE", "offline"),
            settings=self._wandb.Settings(silent=True, console="off"),
        )

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """One row of the history per round."""
        self._last = step
        self._run.log(dict(values), step=step)

    def table(self, rows: Sequence[Sequence[str]], metrics: Mapping[str, float]) -> None:
        """The final metrics in the summary, the table as a table."""
        head, *body = map(list, rows)
        self._run.summary.update({f"final/{name}": value for name, value in metrics.items()})
        self._run.log({"results": self._wandb.Table(columns=head, data=body)}, step=self._last)

    def pictures(self, pictures: Mapping[str, Pixels]) -> None:
        """Images."""
        images = {name: self._wandb.Image(pixels) for name, pixels in pictures.items()}
        self._run.log(images, step=self._last)

    def close(self, completed: bool) -> None:
        """Write out what is left."""
        self._run.finish(exit_code=0 if completed else 1)
