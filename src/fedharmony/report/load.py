"""Reading run folders and comparison folders.

A run that is still going, was interrupted or was killed is read as far as it got: results, matrices
and the last line of the event log may be missing. What cannot be a run at all, or is damaged, is a
:class:`~fedharmony.errors.CheckpointError` that says which file and what to do.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedharmony.config import read_toml
from fedharmony.errors import CheckpointError, ConfigError
from fedharmony.reading import is_file, is_folder, is_there, parse_json, read_regular
from fedharmony.report.shapes import (
    COMPARISON,
    RESULTS,
    refuse_misshapen,
    refuse_odd_matrices,
    well_shaped,
)

Event: TypeAlias = Mapping[str, Any]
Array: TypeAlias = npt.NDArray[np.float64]

COMPARISON_FILE = "comparison.json"
#: What runs must have in common to stand in one table: how names of such parts begin.
TESTED_ON = ("class names", "test ", "held-out ")
TRAINED_ON = (*TESTED_ON, "training ")


def number(value: object) -> float:
    """A JSON number as a float; null, text and anything else is nan.

    >>> number(0.5), number(None), number(True)
    (0.5, nan, nan)
    """
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    return math.nan


@dataclass(frozen=True)
class LabelScore:
    """How well one label is recognised on the test set; nan where undefined."""

    label: str
    ap: float
    precision: float
    recall: float
    positives: int


@dataclass(frozen=True, eq=False)
class RunView:
    """Everything a run folder says, as far as the run got.

    Attributes:
        folder: Where it was read from.
        config: The resolved settings.
        environment: Versions, device, and the command that was given.
        split: The report on the client split.
        start: The last start event; empty if the run never started.
        rounds: Round events, one per round, in order.
        evaluations: Evaluation events, in order.
        finish: The finish event; None if the run is going on or was killed.
        results: ``results.json``; empty if not written yet.
        matrices: ``matrices.safetensors`` as float64 arrays; empty if not written yet.
        bound: Hashes of what the run is made of, by part; empty if it does not say.
        damaged_lines: Lines of the event log, other than the last, that could not be read.
    """

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, Any] = field(default_factory=dict)
    split: Mapping[str, Any] = field(default_factory=dict)
    start: Event = field(default_factory=dict)
    rounds: tuple[Event, ...] = ()
    evaluations: tuple[Event, ...] = ()
    finish: Event | None = None
    results: Mapping[str, Any] = field(default_factory=dict)
    matrices: Mapping[str, Array] = field(default_factory=dict)
    bound: Mapping[str, Any] = field(default_factory=dict)
    damaged_lines: int = 0

    def setting(self, section: str, key: str) -> Any:
        """One setting; None where the run has no such section or key."""
        part = self.config.get(section)
        return part.get(key) if isinstance(part, Mapping) else None

    @property
    def label(self) -> str:
        """The display name of the method and its settings."""
        methods = self.config.get("methods")
        first = next(iter(methods), None) if isinstance(methods, Mapping) else None
        candidates = (self.start.get("label"), self.results.get("label"))
        return str(next((c for c in candidates if c), first or self.folder.name))

    @property
    def seed(self) -> int:
        """The run seed (0 if the run does not say)."""
        for value in (self.results.get("seed"), self.setting("run", "seed")):
            if isinstance(value, int):
                return value
        return 0

    @property
    def clients_lost(self) -> int:
        """How often a client failed and was left out of a round for good."""
        return sum(len(event.get("failures") or ()) for event in self.rounds)

    @property
    def clients_saved(self) -> int:
        """How often a client failed on the fast path and was trained again on the plain one."""
        return sum(len(event.get("saved") or ()) for event in self.rounds)

    @property
    def status(self) -> str:
        """``completed``, ``interrupted``, ``failed``, or ``unfinished`` (going on, or killed)."""
        if self.finish is not None:
            return str(self.finish.get("status", "completed"))
        if self.results and self._results_are_latest:
            return str(self.results.get("status", "unfinished"))
        return "unfinished"

    @property
    def rounds_total(self) -> int:
        """Rounds the run was to have."""
        for value in (self.start.get("rounds"), self.results.get("rounds")):
            if isinstance(value, int):
                return value
        return self.rounds_done

    @property
    def rounds_done(self) -> int:
        """Rounds that are in the event log, or in the results where the log is missing."""
        if self.rounds:
            return int(self.rounds[-1]["round"]) + 1
        return int(self.results.get("rounds_done") or 0)

    @property
    def measured_after(self) -> int:
        """The number of rounds after which :attr:`metrics` were measured."""
        if self._results_are_latest and self.results.get("metrics"):
            return int(self.results.get("rounds_done") or self.rounds_done)
        return int(self.evaluations[-1]["round"]) + 1 if self.evaluations else 0

    @property
    def _results_are_latest(self) -> bool:
        """False where the log tells of another round, as after resuming an interrupted run."""
        return self.rounds_done == int(self.results.get("rounds_done") or 0)

    @property
    def metrics(self) -> dict[str, float]:
        """The final metrics as fractions, or the latest evaluation of an unfinished run."""
        return self._latest("metrics")

    @property
    def structure(self) -> dict[str, float]:
        """Agreement of learned and true label correlation, final or latest."""
        return self._latest("structure")

    def _latest(self, key: str) -> dict[str, float]:
        source = self.results if self._results_are_latest and self.results.get(key) else None
        if source is None:
            source = self.evaluations[-1] if self.evaluations else {}
        return {str(k): number(v) for k, v in (source.get(key) or {}).items()}

    @property
    def seconds(self) -> float:
        """Time spent on rounds and evaluations; nan if nothing is known."""
        if self._results_are_latest and "seconds" in self.results:
            return number(self.results["seconds"])
        events = (*self.rounds, *self.evaluations)
        return sum(number(e.get("seconds")) for e in events) if events else math.nan

    def per_round(self, key: str) -> float:
        """Mean over rounds of ``seconds`` (without evaluation), ``bytes_up`` or ``bytes_down``."""
        values = [number(event.get(key)) for event in self.rounds]
        return sum(values) / len(values) if values else math.nan

    @property
    def baselines(self) -> dict[str, dict[str, float]]:
        """Metrics of the trivial predictors on the same test set."""
        return {
            str(name): {str(k): number(v) for k, v in values.items()}
            for name, values in (self.results.get("baselines") or {}).items()
        }

    @cached_property
    def classes(self) -> tuple[str, ...]:
        """All label names."""
        return tuple(str(c) for c in self.start.get("classes") or ()) or tuple(
            score.label for score in self.per_label
        )

    @cached_property
    def paired(self) -> tuple[str, ...]:
        """Label names in the order of the matrices, which of very many labels hold some."""
        chosen = self.matrices.get("labels")
        return self.classes if chosen is None else tuple(self.classes[int(i)] for i in chosen)

    @cached_property
    def per_label(self) -> tuple[LabelScore, ...]:
        """Scores of the labels; empty if the run has no results yet."""
        return tuple(
            LabelScore(
                str(row.get("label", "")),
                number(row.get("ap")),
                number(row.get("precision")),
                number(row.get("recall")),
                int(row.get("positives") or 0),
            )
            for row in self.results.get("per_label") or ()
        )

    def curve(self, group: str, key: str) -> dict[int, float]:
        """A number by round (1-based), from evaluations (``metrics``, ``structure``) or rounds.

        Args:
            group: ``"metrics"``, ``"structure"``, ``"log"``, or ``"round"`` for the numbers of the
                round events themselves.
            key: Name within the group.
        """
        if group in ("metrics", "structure"):
            pairs = [(e["round"], (e.get(group) or {}).get(key)) for e in self.evaluations]
        elif group == "log":
            pairs = [(e["round"], (e.get("log") or {}).get(key)) for e in self.rounds]
        else:
            pairs = [(e["round"], e.get(key)) for e in self.rounds]
        return {int(r) + 1: number(v) for r, v in pairs if math.isfinite(number(v))}

    @property
    def log_keys(self) -> tuple[str, ...]:
        """Names of the method's own numbers, in the order they first appear."""
        return tuple(dict.fromkeys(str(k) for e in self.rounds for k in (e.get("log") or {})))


@dataclass(frozen=True, eq=False)
class ComparisonView:
    """Several runs, grouped by display name.

    Attributes:
        name: What was compared (name of the config, or of the folder).
        groups: Runs of each display name, in table order, sorted by seed.
        missing: ``(label, seed)`` of runs that were planned but are not there yet.
    """

    name: str
    groups: Mapping[str, tuple[RunView, ...]]
    missing: tuple[tuple[str, int], ...] = ()

    @property
    def runs(self) -> tuple[RunView, ...]:
        """All runs in table order."""
        return tuple(run for runs in self.groups.values() for run in runs)


def _read_json(path: Path, shape: TypeAdapter[Any] | None = None) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    if not is_file(path):
        return {}
    try:
        value = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. The file is damaged or still being written; try "
            "again, or delete it if the run is over (the report then uses the event log alone)."
        ) from error
    if not isinstance(value, dict):
        raise CheckpointError(
            f"{path} should hold one JSON object, but holds a {type(value).__name__}. It was not "
            "written by fedharmony; restore it or delete it."
        )
    if shape is not None:
        refuse_misshapen(path, value, shape)
    return value


def _read_config(path: Path) -> dict[str, Any]:
    if not is_file(path):
        return {}
    try:
        return read_toml(path)
    except ConfigError as error:
        raise CheckpointError(
            f"{error} Restore the file, or delete it to report on the run without its settings."
        ) from error


def _read_matrices(path: Path, classes: int) -> dict[str, Array]:
    if not is_file(path):
        return {}
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path} cannot be read: {error}. Delete it to report on the run without its "
            "correlation matrices."
        ) from error
    refuse_odd_matrices(path, tensors, classes)
    return {name: np.asarray(tensor, dtype=np.float64) for name, tensor in tensors.items()}


def _read_events(path: Path) -> tuple[list[dict[str, Any]], int]:
    """The events of a log, and how many lines were damaged.

    A last line that is not whole is what a killed run leaves behind: it is ignored.
    """
    if not is_file(path):
        return [], 0
    lines = read_regular(path).split(b"\n")
    events, damaged = [], 0
    for position, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            event = parse_json(line)
        except ValueError:
            damaged += position < len(lines) - 1
            continue
        if isinstance(event, dict) and "event" in event and well_shaped(event):
            events.append(event)
        else:
            damaged += 1
    return events, damaged


@dataclass
class _Replay:
    """The state of a run while its events are read in order."""

    start: Event = field(default_factory=dict)
    rounds: dict[int, Event] = field(default_factory=dict)
    evaluations: dict[int, Event] = field(default_factory=dict)
    finish: Event | None = None

    def take(self, event: Event) -> None:
        kind, index = event["event"], event.get("round")
        if kind == "start":
            self._restart(event)
        elif kind == "finish":
            self.finish = event
        elif kind == "round" and isinstance(index, int):
            self.rounds[index] = event
        elif kind == "evaluate" and isinstance(index, int):
            self.evaluations[index] = event

    def _restart(self, event: Event) -> None:
        """A resumed run repeats the rounds from ``resumed_at`` on; a fresh one repeats them all."""
        begin = event.get("resumed_at") or 0
        self.rounds = {i: e for i, e in self.rounds.items() if i < begin}
        self.evaluations = {i: e for i, e in self.evaluations.items() if i < begin}
        self.start, self.finish = event, None


def load_run(folder: str | Path) -> RunView:
    """Read a run folder.

    Args:
        folder: A folder written by ``fedharmony run``, finished or not.

    Returns:
        What the folder says, as far as the run got.

    Raises:
        CheckpointError: The folder is not a run folder, or one of its files is damaged.
    """
    folder = Path(folder)
    if not is_file(folder / "events.jsonl") and not is_file(folder / "config.toml"):
        raise CheckpointError(_not_a_run(folder))
    events, damaged = _read_events(folder / "events.jsonl")
    replay = _Replay()
    for event in events:
        replay.take(event)
    classes = len(replay.start.get("classes") or ())
    results = _read_json(folder / "results.json", RESULTS)
    bound = _read_json(folder / "binding.json")
    claimed = results.get("bound")
    if bound and isinstance(claimed, dict) and (parts := _differing(bound, claimed)):
        raise CheckpointError(
            f"{folder / 'results.json'} is not of this run: binding.json says that the run was "
            f"made of other data ({', '.join(parts)}). Put the run's own results back."
        )
    return RunView(
        folder=folder,
        config=_read_config(folder / "config.toml"),
        environment=_read_json(folder / "environment.json"),
        split=_read_json(folder / "split_report.json"),
        start=replay.start,
        rounds=tuple(replay.rounds[i] for i in sorted(replay.rounds)),
        evaluations=tuple(replay.evaluations[i] for i in sorted(replay.evaluations)),
        finish=replay.finish,
        results=results,
        matrices=_read_matrices(folder / "matrices.safetensors", classes),
        bound=bound,
        damaged_lines=damaged,
    )


def _differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
    return [name for name in {**one, **other} if one.get(name) != other.get(name)]


def _refuse_mixture(runs: Sequence[RunView], parts: tuple[str, ...]) -> None:
    """Refuse runs whose numbers do not belong into one table; those that do not say are let in."""
    known = [run for run in runs if run.bound]
    for run in known[1:]:
        differing = _differing(known[0].bound, run.bound)
        if found := [name for name in differing if name.startswith(parts)]:
            raise CheckpointError(
                f"{known[0].folder} and {run.folder} cannot stand in one table: they differ in "
                f"{', '.join(found)}. Report on them one at a time."
            )


def _not_a_run(folder: Path) -> str:
    if not is_folder(folder):
        return f"There is no folder {folder}. Check the path; runs are usually under runs/."
    text = f"{folder} is not a run folder: it holds neither events.jsonl nor config.toml."
    if is_file(folder / COMPARISON_FILE):
        return (
            f"{text} It is a comparison folder: name one of the runs inside it, or report on all."
        )
    inside = sorted(p.parent.name for p in folder.glob("*/events.jsonl"))
    if inside:
        return f"{text} Did you mean a run inside it? {', '.join(inside[:5])}."
    return f"{text} Name a folder that `fedharmony run` or `fedharmony compare` has written."


def load_comparison(folder: str | Path) -> ComparisonView:
    """Read a comparison folder, as far as its runs are there.

    Raises:
        CheckpointError: The folder is not a comparison folder, none of its runs is there yet, or
            a file is damaged.
    """
    folder = Path(folder)
    plan = _read_json(folder / COMPARISON_FILE, COMPARISON)
    if not plan:
        raise CheckpointError(
            f"{folder} is not a comparison folder: it holds no {COMPARISON_FILE}. Name a folder "
            "that `fedharmony compare` has written, or pass several run folders instead."
        )
    methods = [str(m) for m in plan.get("methods") or ()]
    groups: dict[str, list[RunView]] = {m: [] for m in methods}
    missing = []
    for entry in plan.get("runs") or ():
        label, seed = str(entry.get("label")), int(entry.get("seed") or 0)
        try:
            groups.setdefault(label, []).append(load_run(folder / str(entry.get("folder"))))
        except CheckpointError:
            if is_there(folder / str(entry.get("folder")) / "events.jsonl"):
                raise
            missing.append((label, seed))
    present = {m: tuple(sorted(runs, key=lambda r: r.seed)) for m, runs in groups.items() if runs}
    if not present:
        raise CheckpointError(
            f"No run of the comparison {folder} has started yet. Start or resume the comparison, "
            "then report on it."
        )
    _refuse_mixture([run for runs in present.values() for run in runs], TRAINED_ON)
    for runs in present.values():
        _refuse_mixture(runs, (*TRAINED_ON, "partition"))
    return ComparisonView(str(plan.get("config") or folder.name), present, tuple(missing))


def gather(folders: Sequence[str | Path]) -> ComparisonView:
    """Compare run folders that were not made together.

    Runs of the same display name count as seeds of one method. Where two of them have the same
    seed they cannot be that, so the folder's name is added to tell them apart.

    Raises:
        CheckpointError: As :func:`load_run`; or the runs were not measured on the same test set, or
            those that count as seeds of one method were not trained on the same data.
    """
    runs = [load_run(folder) for folder in folders]
    if not runs:
        raise CheckpointError("There is nothing to compare: name at least one run folder.")
    keys = [(run.label, run.seed) for run in runs]
    clashing = {label for label, seed in keys if keys.count((label, seed)) > 1}
    root = Path(os.path.commonpath([run.folder.resolve().parent for run in runs]))
    groups: dict[str, list[RunView]] = {}
    for run in runs:
        name = run.label
        if name in clashing:
            name += f" ({run.folder.resolve().relative_to(root).as_posix()})"
        groups.setdefault(name, []).append(run)
    ordered = {name: tuple(sorted(g, key=lambda r: r.seed)) for name, g in groups.items()}
    _refuse_mixture(runs, TESTED_ON)
    for group in ordered.values():
        _refuse_mixture(group, TRAINED_ON)
    return ComparisonView("", ordered)
