"""Which runs a reproduction is made of, which of them are there, and carrying out the others.

All items of a study share the folder ``STUDY/runs``, where a run lies under the name of its part
(the point of the settings), its method and its seed. A run that is there counts wherever its data
and weights lay: a folder that was filled on another machine, even without checkpoints, is taken as
it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedharmony.data.base import DataSet
from fedharmony.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FedHarmonyError,
    nearest,
)
from fedharmony.experiments.binding import changed
from fedharmony.experiments.build import Observer
from fedharmony.experiments.compare import Planned, rehearse
from fedharmony.experiments.crowd import ALONE, Crowd
from fedharmony.experiments.folder import RunFolder, folder_name, make_folder
from fedharmony.experiments.machine import with_threads
from fedharmony.experiments.settings import Settings, load_settings
from fedharmony.files import refuse_if_held
from fedharmony.paper.item import Bench, Found, Item, Measured, concerns
from fedharmony.paper.scale import SEEDS, Part, Scale, Study
from fedharmony.reading import is_there
from fedharmony.report.load import RunView, load_run

RUNS, MEASURED, MATRICES = "runs", "measured.json", "matrices.safetensors"


@dataclass(frozen=True)
class Place:
    """A run of a reproduction.

    Attributes:
        study: the name of the data set.
        part: the point of the settings.
        method: as parts name it.
        run: its settings and folder.
    """

    study: str
    part: Part
    method: str
    run: Planned

    @property
    def torn(self) -> bool:
        """Whether the run is finished, and its matrices were not carried along with its results."""
        return self.run.results is not None and not self.run.folder[MATRICES].exists()

    @property
    def title(self) -> str:
        """For progress."""
        return f"{self.study} {self.part.name} {self.run.label} seed {self.run.seed}"


@dataclass(frozen=True)
class Job:
    """One study of a reproduction: what is asked, and where it lies.

    Attributes:
        scale: of the experiments.
        study: the data set.
        home: the folder of the study.
        changes: the user's paths and device, as settings.
        crowd: runs at once.
    """

    scale: Scale
    study: Study
    home: Path
    changes: tuple[str, ...] = ()
    crowd: Crowd = ALONE

    def places(self, asked: Iterable[Item]) -> list[Place]:
        """The runs of all items, each once, in the order in which items ask for them."""
        found: dict[Path, Place] = {}
        for item in asked:
            for part in item.parts(self.study) if concerns(item, self.study) else ():
                settings = self._settings(part)
                for method in part.methods:
                    for seed in range(part.seeds):
                        run = self._planned(part, settings.with_run(method, seed))
                        found.setdefault(run.folder.path, Place(self.study.name, part, method, run))
        return list(found.values())

    def _settings(self, part: Part) -> Settings:
        changes = [*self.study.changes, *part.changes, *self.changes]
        return with_threads(load_settings(self.study.config, changes), self.crowd)

    def _planned(self, part: Part, settings: Settings) -> Planned:
        place = (
            self.home / RUNS / part.name / folder_name(settings.label) / f"seed-{settings.run.seed}"
        )
        return Planned(settings, RunFolder(place))

    def found(self, item: Item) -> Found | None:
        """What an item can be shown from; None while a run, or what it measures, is missing."""
        views: dict[tuple[str, str, int], RunView] = {}
        for place in self.places([item]):
            if place.run.results is None or place.torn:
                return None
            key = place.part.name, place.method, place.run.seed
            views[key] = load_run(place.run.folder.path)
        measured = self.measured(item)
        return None if measured is None else Found(self.scale, self.study, views, measured)

    def found_so_far(self, item: Item) -> Found | None:
        """The same with as many seeds as all of its runs have, whatever was asked for now."""
        for seeds in range(SEEDS, 0, -1):
            fewer = replace(self, study=replace(self.study, seeds=seeds))
            if (found := fewer.found(item)) is not None:
                return found
        return None

    def measured(self, item: Item) -> Measured | None:
        """What was measured for an item; None if it has not been measured yet."""
        if not item.measures:
            return {}
        content = RunFolder(self.home / item.name).read_json(MEASURED)
        return content if isinstance(content, dict) and content else None

    def measure(self, item: Item) -> None:
        """Measure what is not there yet."""
        if self.measured(item) is None:
            make_folder(self.home / item.name)
            measured = item.measure(Bench(self.scale, self.study, self.changes))
            RunFolder(self.home / item.name).write_json(MEASURED, measured)


def tasks(jobs: Sequence[Job], asked: Iterable[Item]) -> Iterator[tuple[Job, Item]]:
    """Every study with each of its items; an item that is not about data goes with the first."""
    every = list(asked)
    for job in jobs:
        for item in every:
            if concerns(item, job.study) and (item.about_data or job is jobs[0]):
                yield job, item


def refuse_other_runs(places: Sequence[Place]) -> None:
    """Refuse folders that hold other runs than planned, or that another process writes to.

    Refused is a finished run, too, that came here without its matrices, or was made of other data
    than those it is compared with.
    """
    made_of: dict[tuple[str, str], tuple[Path, Mapping[str, str]]] = {}
    for place in places:
        folder = place.run.folder
        refuse_if_held(folder.path)
        if folder.holds_run() and (
            folder.outdated or identity(folder.open()) != identity(place.run.settings)
        ):
            raise CheckpointError(
                f"{folder.path} holds a run with other settings than {place.title} needs. Choose "
                "another folder with --out, or remove that one."
            )
        if place.torn:
            raise CheckpointError(
                f"{folder.path} holds a finished run without its {MATRICES}. Put that file there, "
                "or remove the folder: then the run is repeated."
            )
        if place.run.results is not None and (bound := place.run.results.get("bound")):
            key = place.study, place.part.name
            other, before = made_of.setdefault(key, (folder.path, bound))
            if parts := changed(before, bound):
                raise CheckpointError(
                    f"{folder.path} and {other} were made of different data ({', '.join(parts)}), "
                    "and cannot stand in one table. Remove one of them: then it is repeated."
                )


def identity(settings: Settings) -> str:
    """What decides on a run's results, wherever its data and weights come from."""
    tree = settings.identity()
    tree["data"].pop("path", None)
    tree["model"].pop("weights", None)
    return json.dumps(tree, sort_keys=True)


def in_order(places: Iterable[Place], jobs: int) -> list[Place]:
    """Finished runs, then the others; of several at once the longest first: none is waited for."""
    return sorted(places, key=lambda p: (p.run.results is None, jobs > 1 and -p.part.cost))


def unfinished(places: Sequence[Place]) -> list[Place]:
    """The runs that are still to be carried out."""
    return [place for place in places if place.run.results is None]


def rehearsed(places: Sequence[Place], observe: Observer) -> dict[str, DataSet]:
    """Build what all unfinished runs are made of; the data by their settings.

    Whatever cannot work is refused here, before the first run starts; so are finished runs beside
    them that were made of other data.
    """
    loaded: dict[str, DataSet] = {}
    waiting = {(place.study, place.part.name) for place in unfinished(places)}
    for study, name in dict.fromkeys((place.study, place.part.name) for place in places):
        if (study, name) not in waiting:
            continue
        runs = [p.run for p in places if (p.study, p.part.name) == (study, name)]
        kind = repr(runs[0].settings.data)
        try:
            loaded[kind] = rehearse(runs, observe, loaded.get(kind))
        except FedHarmonyError as error:
            raise type(error)(f"{study} {name}: {error}") from error
    return loaded


def paths_of(scale: Scale, given: Sequence[str]) -> dict[str, str]:
    """The data of each study, from ``--data NAME=PATH``, or ``PATH`` where there is one study."""
    names = [study.name for study in scale.studies if study.needs]
    found: dict[str, str] = {}
    for text in given:
        name, equals, path = text.partition("=")
        if not equals or is_there(text):
            if not names:
                raise ConfigError(f"--data {text}: the scale {scale.name!r} takes no data.")
            if len(names) > 1:
                known = ", ".join(f"{n}=PATH" for n in names)
                raise ConfigError(
                    f"--data {text}: the scale {scale.name!r} takes {known}. Say which it is."
                )
            name, path = names[0], text
        if name not in names:
            raise ConfigError(
                f"--data {text}: the scale {scale.name!r} has no data set {name!r}. "
                f"{nearest(name, names)}"
            )
        if not is_there(path):
            raise DataError(f"--data {text}: there is nothing at {path}. Check the path.")
        found[name] = str(Path(path).resolve())
    return found


def seconds(item: Item, study: Study, scale: Scale) -> float:
    """The time of an item by itself on the scale's machine, about."""
    runs = sum(part.cost * len(part.methods) * part.seeds for part in item.parts(study))
    return runs * study.seconds / scale.at_once + item.measuring
