"""What a tracker is, and how a run feeds those that it was asked to feed (``run.track``).

Trackers work offline: they write into the folder ``tracking`` of the run, and send nothing unless
the environment variables of their own program say so. What one of them does wrong never costs the
run: it is warned about once, and that tracker is left out from then on.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from fedharmony.errors import ConfigError
from fedharmony.registry import Registry

logger = logging.getLogger(__name__)

FOLDER = "tracking"
#: Matrices of a run that are shown as pictures, if they are of at most so many labels.
PICTURES, MOST_LABELS = ("true", "learned", "consensus", "planted"), 200
Pixels = npt.NDArray[np.uint8]


@dataclass(frozen=True)
class Subject:
    """The run that is tracked, with its settings by their full names.

    ``first`` is the number of rounds done when it started: more than 0 where a run goes on.
    """

    folder: Path
    name: str
    settings: Mapping[str, Any]
    first: int

    @property
    def place(self) -> Path:
        """Where trackers write."""
        return self.folder / FOLDER


class Tracker(ABC):
    """A program that shows a run."""

    name: ClassVar[str]
    packages: ClassVar[tuple[str, ...]]  # what must be installed: the extra of the same name

    @abstractmethod
    def __init__(self, subject: Subject) -> None:
        """Open or continue the tracker's record of the run."""

    @abstractmethod
    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        """Take numbers of a round; rounds count from 1."""

    @abstractmethod
    def table(self, rows: Sequence[Sequence[str]], metrics: Mapping[str, float]) -> None:
        """Take the final metrics, and a table of them beside those of trivial predictors."""

    @abstractmethod
    def pictures(self, pictures: Mapping[str, Pixels]) -> None:
        """Take pictures by name: (height, width, 3)."""

    @abstractmethod
    def close(self, completed: bool) -> None:
        """Write out what is left."""


trackers: Registry[type[Tracker]] = Registry("tracker", "fedharmony.experiments.trackers")


def refuse_missing(names: Sequence[str]) -> None:
    """Refuse trackers whose packages are not installed, before work starts."""
    for name in names:
        tracker = trackers[name]
        missing = [p for p in tracker.packages if importlib.util.find_spec(p) is None]
        if missing:
            raise ConfigError(
                f"run.track names {name!r}, but {' and '.join(missing)} cannot be imported. Use "
                f"pip install 'fedharmony[{name}]', or leave {name!r} out."
            )


class Tracking:
    """Hands what happens in a run to its trackers."""

    def __init__(self, names: Sequence[str], subject: Subject) -> None:
        self._open: dict[str, Tracker] = {}
        for name in names:
            with self._guarded(name):
                self._open[name] = trackers[name](subject)

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take an event of the run."""
        if event["event"] in ("round", "evaluate"):
            values = dict(numbers_of(event))
            self._each(lambda tracker: tracker.numbers(int(event["round"]) + 1, values))
        elif event["event"] == "finish" and event["status"] != "completed":
            self._close(completed=False)

    def finish(
        self, results: Mapping[str, Any], matrices: Mapping[str, npt.NDArray[np.float64]]
    ) -> None:
        """Take the results of a completed run, and end."""
        metrics = {name: v for name, v in results["metrics"].items() if v is not None}
        rows = results_table(results)
        self._each(lambda tracker: tracker.table(rows, metrics))
        shown = [n for n in PICTURES if n in matrices and len(matrices[n]) <= MOST_LABELS]
        pictures = {name: heat_map(matrices[name]) for name in shown}
        self._each(lambda tracker: tracker.pictures(pictures))
        self._close(completed=True)

    def _close(self, completed: bool) -> None:
        self._each(lambda tracker: tracker.close(completed))
        self._open.clear()

    def _each(self, act: Callable[[Tracker], None]) -> None:
        for name, tracker in list(self._open.items()):
            with self._guarded(name):
                act(tracker)

    @contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """Turn an error of a tracker into a warning, and leave the tracker out from then on."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            logger.warning(
                "The tracker %s failed and is left out from now on: %s: %s. The run goes on.",
                *(name, type(error).__name__, error),
            )


def numbers_of(event: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a round's or evaluation's event, by name; those that are undefined go.

    >>> dict(numbers_of({"event": "evaluate", "round": 0, "metrics": {"mAP": 0.5}, "seconds": 2}))
    {'metrics/mAP': 0.5, 'evaluate/seconds': 2.0}
    >>> dict(numbers_of({"event": "round", "round": 0, "train_loss": None, "log": {"alpha": 1.0}}))
    {'log/alpha': 1.0}
    """
    for key, value in event.items():
        group = value if isinstance(value, Mapping) else {key: value}
        prefix = key if isinstance(value, Mapping) else event["event"]
        if key in ("event", "round", "time", "weights"):
            continue
        for name, number in group.items():
            known = isinstance(number, int | float) and not isinstance(number, bool)
            if known and math.isfinite(number):
                yield f"{prefix}/{name}", float(number)


def results_table(results: Mapping[str, Any]) -> list[list[str]]:
    """The metrics of a run and of trivial predictors, in per cent; the first row is the head.

    >>> results_table({"label": "fedavg", "metrics": {"mAP": 0.5, "CP": None}, "baselines": {}})
    [['method', 'mAP', 'CP'], ['fedavg', '50.0', '–']]
    """
    names = list(results["metrics"])
    found = {str(results["label"]): results["metrics"], **results["baselines"]}
    rows = [
        [label, *("–" if values.get(n) is None else f"{100 * values[n]:.1f}" for n in names)]
        for label, values in found.items()
    ]
    return [["method", *names], *rows]


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """A table as Markdown.

    >>> print(markdown([["method", "mAP"], ["fedavg", "50.0"]]))
    | method | mAP |
    | --- | --- |
    | fedavg | 50.0 |
    """
    head, *body = rows
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *body))


def heat_map(matrix: npt.NDArray[np.float64], cell: int = 8) -> Pixels:
    """Correlations as pixels: −1 is blue, 0 white, 1 red; undefined ones are grey.

    >>> heat_map(np.array([[1.0, 0.0], [-1.0, np.nan]]), cell=1).tolist()
    [[[255, 0, 0], [255, 255, 255]], [[0, 0, 255], [128, 128, 128]]]
    """
    value = np.clip(np.nan_to_num(matrix), -1, 1)
    faded = 255 * (1 - np.abs(value))
    red, blue = np.where(value >= 0, 255, faded), np.where(value <= 0, 255, faded)
    pixels = np.stack([red, faded, blue], axis=-1)
    pixels[~np.isfinite(matrix)] = 128
    found: Pixels = pixels.round().astype(np.uint8).repeat(cell, axis=0).repeat(cell, axis=1)
    return found
