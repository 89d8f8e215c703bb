"""Several methods on several seeds, on the same data, split and cohorts.

Cohorts and noise of private runs are secrets of each run: there, methods share data and split.

Finished runs are kept, unfinished ones continued, so that a comparison can be stopped and repeated
at any time, and extended by further methods or seeds.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedharmony import stopping
from fedharmony.data.base import DataSet
from fedharmony.errors import ConfigError, Failure, FedHarmonyError, RunsFailedError, nearest
from fedharmony.experiments.binding import Binding
from fedharmony.experiments.build import Observer, assemble
from fedharmony.experiments.crowd import ALONE, Crowd
from fedharmony.experiments.evaluate import Results
from fedharmony.experiments.folder import RunFolder, folder_name, make_folder
from fedharmony.experiments.machine import with_threads
from fedharmony.experiments.run import resume, start
from fedharmony.experiments.settings import CENTRAL, Settings
from fedharmony.experiments.trackers.base import refuse_missing
from fedharmony.files import refuse_if_held
from fedharmony.methods.base import methods
from fedharmony.registry import plugin_place


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

    @property
    def results(self) -> Results | None:
        """What the run gave; None if it is not finished."""
        return self.folder.results() if self.folder.holds_run() else None


def names_of(labels: Sequence[str]) -> list[str]:
    """Methods as asked for, each once; ``all`` is every one, ``all:plus`` all with this preset.

    >>> names_of(["fedavg", "fedavg:plus", "fedavg"])
    ['fedavg', 'fedavg:plus']
    """
    names = []
    for label in labels:
        name, colon, preset = label.partition(":")
        names += [f"{n}{colon}{preset}" for n in (methods.names() if name == "all" else [name])]
    return list(dict.fromkeys(names))


def plan(
    base: Settings,
    labels: Sequence[str],
    seeds: Sequence[int],
    out: Path,
    crowd: Crowd = ALONE,
    against: str | None = None,
) -> list[Planned]:
    """All runs, checked before the first one starts.

    A seed sets the run and the initial model; data and split stay as configured. ``all`` stands
    for every registered method, ``central`` for training on all images in one place. Runs of the
    crowd are to share the machine. All are compared with ``against``.
    """
    names, base = names_of(labels), with_threads(base, crowd)
    if not names or not seeds:
        raise ConfigError("A comparison needs at least one method and one seed.")
    refuse_if_held(out)
    runs = []
    owners: dict[str, str] = {}  # whose folder it is; file systems may not tell A from a
    for name in names:
        for seed in dict.fromkeys(seeds):
            settings = base.central(seed) if name == CENTRAL else base.with_run(name, seed)
            folder = folder_name(settings.label)
            if (owner := owners.setdefault(folder.casefold(), name)) != name:
                raise ConfigError(
                    f"{owner} and {name} would both be called {settings.label!r} and share the "
                    f"folder {out / folder}. Remove run.label, which gives every method of a "
                    "comparison the same name, or compare them one by one."
                )
            runs.append(Planned(settings, RunFolder(out / folder / f"seed-{seed}")))
    if against is not None:
        refuse_reference(against, {run.label for run in runs})
    for run in runs:
        run.folder.refuse_if_taken(run.settings)
    if against is not None:
        refuse_reference(against, {run.label for run in runs})
    return runs


def refuse_reference(against: str, labels: Collection[str]) -> None:
    """Refuse a method to compare with that is not among those compared."""
    if against not in labels:
        raise ConfigError(
            f"--against {against}: no method of the comparison has this name. "
            f"{nearest(against, labels)}"
        )
    if len(labels) < 2:
        raise ConfigError(f"--against {against}: there is no other method to compare with it.")


def rehearse(runs: Sequence[Planned], observe: Observer, data: DataSet | None = None) -> DataSet:
    """Build what every run is made of, and hold it against the runs that are there already.

    Whatever cannot work (a head that a method needs, data that changed since a run was made) is
    refused here, before the first run starts. Returns the data, which all runs share; ``data``
    saves loading them.
    """
    built: dict[str, Binding] = {}
    for run in runs:
        stopping.end_if_asked()
        refuse_missing(run.settings.run.track)
        run.folder.refuse_if_taken(run.settings)
        refuse_if_held(run.folder.path)
        kind = repr((run.label, run.settings.method_config))
        if kind not in built:
            assembly = assemble(run.settings, data=data, observe=observe)
            assembly.initial_state()
            data, built[kind] = assembly.loaded, assembly.bound
        made_of = (run.folder.results() or {}).get("bound") or run.folder.read_json("binding.json")
        if run.folder.results() is not None or run.folder.checkpoint.exists():
            run.folder.refuse_other_material(made_of or {}, built[kind])
    assert data is not None
    return data


def execute(
    runs: Sequence[Planned],
    observer: Callable[[int, Planned], Observer],
    data: Mapping[str, DataSet],
) -> list[Results]:
    """Carry out a plan, one run after the other; ``observer(i, run)`` gives the i-th observer.

    ``data`` are the data by their settings. Where some runs failed, a RunsFailedError says so when
    all others are done.
    """
    results, failures = list[Results](), list[Failure]()
    for i, run in enumerate(runs):
        if (done := run.results) is None:
            stopping.end_if_asked()
            observe = observer(i, run)
            try:
                done = carry_out(run, observe, data[repr(run.settings.data)])
            except BrokenPipeError:  # nobody is left who would listen
                raise
            except Exception as error:
                reason, details = reason_of(error)
                failures.append(Failure(run.folder.path, reason, details))
                observe({"event": "finish", "status": "failed", "reason": reason})
                continue
        results.append(done)
    if failures:
        raise RunsFailedError(failures)
    return results


def reason_of(error: Exception) -> tuple[str, str]:
    """Why a run failed; of what nobody foresaw, the trace, too; a plug-in by its line."""
    if isinstance(error, FedHarmonyError):
        return str(error), ""
    place, trace = plugin_place(error), "".join(traceback.format_exception(error))
    return f"{f'The {place}: ' if place else ''}{type(error).__name__}: {error}.", trace


def carry_out(
    run: Planned, observe: Observer, data: DataSet | None, device: str | None = None
) -> Results:
    """Start a run, or go on with what is there of it, on another ``device`` if one is given.

    It goes on with the part of a GPU's memory that is planned now: before, others may have run
    beside it.
    """
    if run.folder.holds_run():
        share = run.settings.engine.gpu_share or 1.0
        return resume(run.folder, observe, device, data, gpu_share=share, asked=run.settings)
    return start(run.settings, run.folder, observe, data)


def write_index(out: Path, name: str, runs: Sequence[Planned], against: str | None = None) -> None:
    """``comparison.json``: which runs belong together, in order, and which one is the reference."""
    make_folder(out)
    RunFolder(out).write_json(
        "comparison.json",
        {
            "config": name,
            "against": against,
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
