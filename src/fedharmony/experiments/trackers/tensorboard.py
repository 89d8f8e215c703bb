"""TensorBoard: event files under ``tracking/tensorboard``; ``tensorboard --logdir runs``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

from fedharmony.experiments.trackers.base import Pixels, Subject, Tracker, markdown, trackers


@trackers.register("tensorboard")
class TensorBoard(Tracker):
    """Event files of TensorBoard."""

    packages = ("tensorboard",)

    def __init__(self, subject: Subject) -> None:
        """Rounds that are repeated after a kill replace what was written of them."""
        writer = import_module("torch.utils.tensorboard").SummaryWriter
        again = {"purge_step": subject.first + 1} if subject.first else {}
        self._writer: Any = writer(str(subject.place / "tensorboard"), **again)
        self._last = subject.first
        if not subject.first:
            lines = [f"    {key} = {value}" for key, value in subject.settings.items()]
            self._writer.add_text("settings", "\n".join(lines))

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """One scalar per number."""
        self._last = step
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def table(self, rows: Sequence[Sequence[str]], metrics: Mapping[str, float]) -> None:
        """The table as text."""
        self._writer.add_text("results", markdown(rows), self._last)

    def pictures(self, pictures: Mapping[str, Pixels]) -> None:
        """Images."""
        for name, pixels in pictures.items():
            self._writer.add_image(name, pixels, self._last, dataformats="HWC")

    def close(self, completed: bool) -> None:
        """Write out what is left."""
        self._writer.close()
