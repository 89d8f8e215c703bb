"""Several methods on several seeds, on the same data, split and cohorts.

Finished runs are kept, unfinished ones continued, so that a comparison can be stopped and repeated
at any time, and extended by further methods or seeds.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedharmony.engine.federation import Event
from fedharmony.errors import CheckpointError, ConfigError
from fedharmony.experiments.folder import RunFolder, make_folder
from fedharmony.experiments.run import Results, finished, resume, start
from fedharmony.experiments.settings import CENTRAL, Settings
from fedharmony.methods.base import methods


@dataclass(frozen=True)
class Planned:
    """One run of a comparison."""

    settings: Settings
    folder: RunFolder

    @property
    def label(self) -> str:
        """The method as results show it."""
        return self.settings.label

    @property
    def seed(self) -> int:
        """The run's seed."""
        return self.settings.run.seed


def names_of(labels: Sequence[str]) -> list[str]:
    """Methods as asked for, each once; ``all`` stands for every registered one."""
    names = [name for label in labels for name in (methods.names() if label == "all" else [label])]
    return list(dict.fromkeys(names))


def plan(base: Settings, labels: Sequence[str], seeds: Sequence[int], out: Path) -> list[Planned]:
    """All runs, checked before the first one starts.

    A seed sets the run and the initial model; data and split stay as configured. ``all`` stands
    for every registered method, ``central`` for training on all images in one place.
    """
    names = names_of(labels)
    if not names or not seeds:
        raise ConfigError("A comparison needs at least one method and one seed.")
    runs = []
    for name in names:
        for seed in dict.fromkeys(seeds):
            settings = base.central(seed) if name == CENTRAL else base.with_run(name, seed)
            folder = RunFolder(out / settings.label.replace(":", "-") / f"seed-{seed}")
            runs.append(Planned(settings, folder))
    for run in runs:
        if run.folder.holds_run() and run.folder.open().sha256() != run.settings.sha256():
            raise CheckpointError(
                f"{run.folder.path} holds a run with other settings. Choose another folder with "
                "--out, or remove that one."
            )
    return runs


def execute(
    runs: Sequence[Planned], observer: Callable[[int, Planned], Callable[[Event], None]]
) -> list[Results]:
    """Carry out a plan; ``observer(i, run)`` gives the observer of the i-th run."""
    results = []
    for i, run in enumerate(runs):
        done = finished(run.folder) if run.folder.holds_run() else None
        if done is None:
            observe = observer(i, run)
            done = (
                resume(run.folder, observe)
                if run.folder.holds_run()
                else start(run.settings, run.folder, observe)
            )
        results.append(done)
    return results


def write_index(out: Path, name: str, runs: Sequence[Planned]) -> None:
    """``comparison.json``: which runs belong together, in order."""
    make_folder(out)
    RunFolder(out).write_json(
        "comparison.json",
        {
            "config": name,
            "methods": list(dict.fromkeys(run.label for run in runs)),
            "seeds": list(dict.fromkeys(run.seed for run in runs)),
            "runs": [
                {
                    "label": run.label,
                    "seed": run.seed,
                    "folder": run.folder.path.relative_to(out).as_posix(),
                }
                for run in runs
            ],
        },
    )
