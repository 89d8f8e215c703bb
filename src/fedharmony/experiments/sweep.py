"""Any settings over any values: one comparison for each combination of values.

A sweep is a folder of comparisons (``split.gamma=0.1/``, …) with an index, ``sweep.json``. It can
be stopped and repeated at any time, and extended by further values, methods or seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedharmony.config import refuse_chosen
from fedharmony.data.base import DataSet
from fedharmony.errors import ConfigError
from fedharmony.experiments import compare
from fedharmony.experiments.build import Observer
from fedharmony.experiments.compare import Planned
from fedharmony.experiments.crowd import ALONE, Crowd
from fedharmony.experiments.folder import RunFolder, folder_name, make_folder
from fedharmony.experiments.settings import load_settings

#: More comparisons than this are a mistake, or a plan for several sweeps.
MOST_POINTS = 200
INDEX = "sweep.json"


@dataclass(frozen=True)
class Point:
    """One combination of values, as text by setting, and the comparison that is made of it."""

    values: Mapping[str, str]
    folder: Path
    runs: Sequence[Planned]

    @property
    def name(self) -> str:
        """As folders and tables show it."""
        return ", ".join(f"{key}={value}" for key, value in self.values.items())


def split_changes(changes: Sequence[str]) -> tuple[dict[str, list[str]], list[str]]:
    """Settings with several values, and all other changes.

    Values are separated by commas; a comma inside of brackets or quotes belongs to a value.

    >>> split_changes(["split.gamma=0.1,0.5", "train.lr=1e-3", "tune.lr=[0.1, 0.2]"])
    ({'split.gamma': ['0.1', '0.5']}, ['train.lr=1e-3', 'tune.lr=[0.1, 0.2]'])
    """
    swept: dict[str, list[str]] = {}
    others = []
    for change in changes:
        key, equals, text = change.partition("=")
        values = list(_values(text)) if equals else []
        if len(values) < 2:
            others.append(change)
            continue
        if key in swept:
            raise ConfigError(f"{key} is swept twice. Give all of its values at once.")
        if any(not value for value in values):
            raise ConfigError(f"{change}: a value is empty. Write for instance {key}=0.1,0.5.")
        if len(set(values)) < len(values):
            raise ConfigError(f"{change}: a value stands there twice.")
        swept[key] = values
    return swept, others


def _values(text: str) -> Iterator[str]:
    """The parts of a text between commas outside of brackets and quotes."""
    depth, quote, start = 0, "", 0
    for i, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in ")}]":
            depth -= 1
        elif letter == "," and depth == 0:
            yield text[start:i].strip()
            start = i + 1
    yield text[start:].strip()


def plan(
    config: str,
    changes: Sequence[str],
    labels: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    crowd: Crowd = ALONE,
) -> list[Point]:
    """Every point with all of its runs, checked before the first one starts."""
    refuse_chosen(changes)
    swept, others = split_changes(changes)
    if not swept:
        raise ConfigError(
            "A sweep needs a setting with several values, for instance split.gamma=0.1,0.5,1."
        )
    combinations = list(itertools.product(*swept.values()))
    if len(combinations) > MOST_POINTS:
        raise ConfigError(
            f"{len(combinations)} combinations of values are too many for one sweep (at most "
            f"{MOST_POINTS}). Take fewer values, or several sweeps."
        )
    points, folders = [], set()
    for combination in combinations:
        values = dict(zip(swept, combination, strict=True))
        settings = load_settings(config, [*others, *(f"{k}={v}" for k, v in values.items())])
        folder = out / folder_name("_".join(f"{k}={v}" for k, v in values.items()))
        if folder in folders:
            raise ConfigError(f"Two points would share the folder {folder}.")
        folders.add(folder)
        points.append(Point(values, folder, compare.plan(settings, labels, seeds, folder, crowd)))
    return points


def rehearse(points: Sequence[Point], observe: Observer) -> dict[str, DataSet]:
    """Build what every run is made of, as a comparison does; equal settings of data share them."""
    loaded: dict[str, DataSet] = {}
    for point in points:
        kind = repr(point.runs[0].settings.data)
        loaded[kind] = compare.rehearse(point.runs, observe, loaded.get(kind))
    return loaded


def write_index(out: Path, name: str, points: Sequence[Point]) -> None:
    """``sweep.json``: which comparisons belong together; each gets an index of its own."""
    make_folder(out)
    for point in points:
        compare.write_index(point.folder, name, point.runs)
    RunFolder(out).write_json(
        INDEX,
        {
            "config": name,
            "settings": list(points[0].values),
            "methods": list(dict.fromkeys(run.label for p in points for run in p.runs)),
            "points": [
                {"values": dict(p.values), "folder": p.folder.relative_to(out).as_posix()}
                for p in points
            ],
        },
    )
