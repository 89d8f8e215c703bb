"""Reading run folders and comparison folders.

A run that is still going, was interrupted or was killed is read as far as it got: results, matrices
and the last line of the event log may be missing. What cannot be a run at all, or is damaged, is a
:class:`~fedharmony.errors.CheckpointError` that says which file and what to do.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter
from safetensors import SafetensorError
from safetensors.numpy import load_file

from fedharmony import stopping
from fedharmony.config import read_toml
from fedharmony.errors import CheckpointError, ConfigError
from fedharmony.experiments.binding import changed
from fedharmony.experiments.compare import refuse_reference
from fedharmony.experiments.scores import (
    Examples,
    Scores,
    has_scores,
    load_examples,
    load_scores,
)
from fedharmony.reading import (
    is_file,
    is_folder,
    is_there,
    left_out,
    parse_events,
    parse_json,
    read_regular,
)
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
    def central(self) -> bool:
        """Whether one party trained on all images: no method of the comparison."""
        return self.setting("federation", "central") is True

    @property
    def data(self) -> str:
        """What the data are called: their name with a year, or the folder of the user's own."""
        name, place = str(self.setting("data", "name") or ""), self.setting("data", "path")
        if name in ("table", "features") and place:
            return Path(str(place)).resolve().name or name
        year = self.setting("data", "year")
        return f"{name} {year}" if year else name

    def named(self, client: int) -> str:
        """What a client is called: by its name where it has one, else by its number."""
        names = self.start.get("client_names") or ()
        return str(names[client]) if client < len(names) else str(client)

    @property
    def clients_lost(self) -> int:
        """How often a client failed and was left out of a round for good."""
        return sum(len(left_out(event, "failed")) for event in self.rounds)

    @property
    def fallbacks(self) -> dict[str, dict[int, int]]:
        """By cause and round (1, 2, …) how often the run fell back to something else.

        Older runs have ``saved``, the clients that were trained again on the plain path.
        """
        found: dict[str, dict[int, int]] = {}
        for event in self.rounds:
            older = {"plain": len(event["saved"])} if event.get("saved") else {}
            for cause, times in event.get("fallbacks", older).items():
                found.setdefault(cause, {})[int(event["round"]) + 1] = times
        return found

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
    def privacy(self) -> dict[str, Any]:
        """What clients were promised after the last round; empty where they are not private.

        The log, which an unfinished run has, too, counts before the results.
        """
        blocks = [part.get("privacy") for part in (self.results, *self.rounds[-1:])]
        spent = {k: v for block in blocks if isinstance(block, Mapping) for k, v in block.items()}
        known = math.isfinite(number(spent.get("epsilon")) + number(spent.get("delta")))
        return spent if known else {}

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
        found = self.results.get(key) if self._results_are_latest else None
        if not found:
            found = self.evaluations[-1].get(key) if self.evaluations else None
        return {str(k): number(v) for k, v in (found or {}).items()}

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

    @cached_property
    def scores(self) -> Scores | None:
        """What the final model says of each test image; None where the run kept no scores."""
        kept = self._results_are_latest and has_scores(self.folder)
        found = load_scores(self.folder) if kept else None
        return found if found is not None and found.classes == self.classes else None

    @cached_property
    def examples(self) -> Examples | None:
        """Some of the test images, if the run kept any."""
        found = load_examples(self.folder)
        if found is None or self.scores is None or found.rows.max() >= len(self.scores.ids):
            return None
        return found

    @cached_property
    def thresholds(self) -> Array:
        """What the score of each label must reach: chosen by the run, or one for all."""
        chosen = (self.results.get("thresholds") or {}).get("per_label")
        one = number((self.results.get("metric_options") or {}).get("threshold", 0.5))
        values = [one] * len(self.classes) if chosen is None else [number(v) for v in chosen]
        return np.array(values, np.float64)

    @cached_property
    def per_user(self) -> dict[str, float]:
        """O-mAP of each test user for whom it is defined, by name; empty without users."""
        rows = (self.results.get("per_user") or {}).get("each") or ()
        values = {str(row.get("user")): number(row.get("O-mAP")) for row in rows}
        return {user: value for user, value in values.items() if math.isfinite(value)}

    def curve(self, group: str, key: str) -> dict[int, float]:
        """A number by round (1-based), from evaluations (``metrics``, ``structure``) or rounds.

        A further ``group`` is ``"log"``; ``"round"`` are the numbers of the round events
        themselves.
        """
        events = self.evaluations if group in ("metrics", "structure") else self.rounds
        places = [(e["round"], e if group == "round" else e.get(group) or {}) for e in events]
        values = {int(round) + 1: number(place.get(key)) for round, place in places}
        return {round: value for round, value in values.items() if math.isfinite(value)}

    @cached_property
    def weights(self) -> dict[int, dict[int, float]]:
        """Aggregation weights by round (1-based) and client, of rounds that tell them."""
        return {
            int(e["round"]) + 1: {int(k): number(w) for k, w in e["weights"].items()}
            for e in self.rounds
            if e.get("weights")
        }

    @property
    def log_keys(self) -> tuple[str, ...]:
        """Names of the method's own numbers, in the order they first appear."""
        return tuple(dict.fromkeys(str(k) for e in self.rounds for k in (e.get("log") or {})))


@dataclass(frozen=True, eq=False)
class Runs:
    """Runs that stand on one page, grouped by display name.

    Attributes:
        name: What was compared (name of the config, or of the folder); empty if nobody says.
        home: The folder that holds them all.
        groups: Runs of each display name, in table order, sorted by seed.
        missing: ``(label, seed)`` of runs that were planned but are not there yet.
        alone: Whether the page is about a single run, not about a comparison.
        against: The method to which differences of all others are shown, by its display name.
    """

    name: str
    home: Path
    groups: Mapping[str, tuple[RunView, ...]]
    missing: tuple[tuple[str, int], ...] = ()
    alone: bool = False
    against: str | None = None

    @cached_property
    def runs(self) -> tuple[RunView, ...]:
        """All runs in table order."""
        return tuple(run for runs in self.groups.values() for run in runs)

    @property
    def first(self) -> RunView:
        """The run that speaks for all where they agree."""
        return self.runs[0]

    @property
    def rounds(self) -> int:
        """Rounds the longest run was to have."""
        return max(run.rounds_total for run in self.runs)

    @property
    def seeds(self) -> int:
        """Seeds of the method that has most."""
        return max(len(runs) for runs in self.groups.values())

    @property
    def ranked(self) -> tuple[str, ...]:
        """The groups that compete: none of them trained in one place."""
        return tuple(name for name, runs in self.groups.items() if not runs[0].central)

    @cached_property
    def differing(self) -> tuple[str, ...]:
        """Sections of the settings (``data``, ``metrics``) that make numbers incomparable."""
        texts = {
            section: {json.dumps(run.config.get(section), sort_keys=True) for run in self.runs}
            for section in ("data", "metrics")
        }
        bound = all(run.bound for run in self.runs)
        if bound and not any(_mixture(self.runs, TRAINED_ON)):  # the same data at another path
            del texts["data"]
        return tuple(section for section, found in texts.items() if len(found) > 1)

    @property
    def baselines(self) -> dict[str, dict[str, float]]:
        """Metrics of the trivial predictors, from the first run that has them."""
        return next((run.baselines for run in self.runs if run.baselines), {})

    @cached_property
    def scored(self) -> dict[str, RunView]:
        """Of each method the first run that kept scores; all of the same test images."""
        found = {n: next((r for r in g if r.scores), None) for n, g in self.groups.items()}
        runs = {name: run for name, run in found.items() if run is not None}
        first = next(iter(runs.values()), None)
        return {n: r for n, r in runs.items() if first and _same_images(r, first)}

    def by_setting(self) -> dict[str, dict[tuple[str, int], RunView]]:
        """Completed runs of each competing method and of :attr:`against`, by setting and seed.

        A setting is what :func:`load` has put behind the names of runs that clash: the folder.
        """
        found: dict[str, dict[tuple[str, int], RunView]] = {}
        for name, group in self.groups.items():
            label = group[0].label if name.startswith(group[0].label) else name
            if name in self.ranked or label == self.against:
                done = {(name[len(label) :], r.seed): r for r in group if r.status == "completed"}
                found.setdefault(label, {}).update(done)
        return found

    def with_matrix(self, name: str, like: RunView | None = None) -> RunView | None:
        """The first run that has the matrix, and the same labels as ``like`` if given."""
        runs = (run for run in self.runs if like is None or run.paired == like.paired)
        return next((run for run in runs if name in run.matrices), None)


def _same_images(one: RunView, other: RunView) -> bool:
    """Whether two runs scored the same test images."""
    a, b = one.scores, other.scores
    return a is not None and b is not None and (a.ids, a.classes) == (b.ids, b.classes)


def _damaged(path: Path, error: Exception, otherwise: str) -> CheckpointError:
    return CheckpointError(
        f"{path} cannot be read: {error}. The file is damaged or still being written; try again, "
        f"or delete it to report on the run without its {otherwise}."
    )


def read_json(path: Path, shape: TypeAdapter[Any] | None = None) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file."""
    if not is_file(path):
        return {}
    try:
        value = parse_json(read_regular(path))
    except (OSError, ValueError) as error:
        raise _damaged(path, error, "content") from error
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
        raise _damaged(path, error, "correlation matrices") from error
    refuse_odd_matrices(path, tensors, classes)
    return {name: np.asarray(tensor, dtype=np.float64) for name, tensor in tensors.items()}


def load_run(folder: str | Path) -> RunView:
    """Read a folder written by ``fedharmony run``, finished or not; else a CheckpointError."""
    folder = Path(folder)
    log = folder / "events.jsonl"
    if not is_file(log) and not is_file(folder / "config.toml"):
        raise CheckpointError(_not_a_run(folder))
    found, damaged = parse_events(read_regular(log)) if is_file(log) else ([], 0)
    events = [event for event in found if well_shaped(event)]
    start: Event = {}
    finish: Event | None = None
    rounds: dict[int, Event] = {}
    evaluations: dict[int, Event] = {}
    for event in events:
        kind, index = event["event"], event.get("round")
        if kind == "start":  # a resumed run repeats the rounds from ``resumed_at`` on
            begin = event.get("resumed_at") or 0
            rounds = {i: e for i, e in rounds.items() if i < begin}
            evaluations = {i: e for i, e in evaluations.items() if i < begin}
            start, finish = event, None
        elif kind == "finish":
            finish = event
        elif isinstance(index, int) and kind in ("round", "evaluate"):
            (rounds if kind == "round" else evaluations)[index] = event
    for measured in evaluations.values():  # at sites: only who was asked knows of how many images
        if isinstance(measured.get("test_images"), int):
            start = {**start, "test_images": measured["test_images"]}
    results = read_json(folder / "results.json", RESULTS)
    bound = read_json(folder / "binding.json")
    claimed = results.get("bound")
    if bound and isinstance(claimed, dict) and (parts := changed(claimed, bound)):
        raise CheckpointError(
            f"{folder / 'results.json'} is not of this run: binding.json says that the run was "
            f"made of other data ({', '.join(parts)}). Put the run's own results back."
        )
    classes = len(start.get("classes") or ())
    return RunView(
        folder=folder,
        config=_read_config(folder / "config.toml"),
        environment=read_json(folder / "environment.json"),
        split=read_json(folder / "split_report.json"),
        start=start,
        rounds=tuple(rounds[i] for i in sorted(rounds)),
        evaluations=tuple(evaluations[i] for i in sorted(evaluations)),
        finish=finish,
        results=results,
        matrices=_read_matrices(folder / "matrices.safetensors", classes),
        bound=bound,
        damaged_lines=damaged + len(found) - len(events),
    )


def _mixture(
    runs: Sequence[RunView], parts: tuple[str, ...]
) -> Iterator[tuple[RunView, list[str]]]:
    """Runs made of something else than the first, and what; those that do not say are let in."""
    known = [run for run in runs if run.bound]
    for run in known[1:]:
        differing = changed(run.bound, known[0].bound)
        if found := [name for name in differing if name.startswith(parts)]:
            yield run, found


def _refuse_mixture(runs: Sequence[RunView], parts: tuple[str, ...]) -> None:
    """Refuse runs whose numbers do not belong into one table."""
    for run, found in _mixture(runs, parts):
        first = next(run for run in runs if run.bound)
        raise CheckpointError(
            f"{first.folder} and {run.folder} cannot stand in one table: they differ in "
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


@dataclass
class _Found:
    """The runs of a folder that was named: itself, or those of a comparison."""

    folder: Path
    runs: list[tuple[str, RunView]]
    missing: list[tuple[str, int]] = field(default_factory=list)
    name: str = ""
    against: str | None = None


def _read_folder(folder: Path) -> _Found:
    plan = read_json(folder / COMPARISON_FILE, COMPARISON)
    if not plan:
        run = load_run(folder)
        return _Found(folder, [(run.label, run)])
    name, against = str(plan.get("config") or folder.name), plan.get("against")
    found = _Found(folder, [], name=name, against=against)
    for entry in plan.get("runs") or ():
        stopping.end_if_asked()
        label, place = str(entry.get("label")), folder / str(entry.get("folder"))
        try:
            found.runs.append((label, load_run(place)))
        except CheckpointError:
            if is_there(place / "events.jsonl"):
                raise
            found.missing.append((label, int(entry.get("seed") or 0)))
    if not found.runs:
        raise CheckpointError(
            f"No run of the comparison {folder} has started yet. Start or resume the comparison, "
            "then report on it."
        )
    order = [str(method) for method in plan.get("methods") or ()]
    found.runs.sort(key=lambda pair: order.index(pair[0]) if pair[0] in order else len(order))
    return found


def load(source: str | Path | Sequence[str | Path], against: str | None = None) -> Runs:
    """Read run folders and comparison folders that shall stand on one page.

    Runs of the same display name count as seeds of one method. Where two of them have the same seed
    they cannot be that, so the name of the folder that was given is added to tell them apart.
    Differences are shown to the method ``against``; if None, to the one that a comparison was
    given, where it is the only folder.

    Raises:
        ConfigError: There is no such method, or the runs' numbers cannot be compared with it.
        CheckpointError: A folder is neither, none of its runs is there yet, or a file is damaged;
            or the runs were not measured on the same test set, or those that count as seeds of one
            method were not trained on the same data.
    """
    named = [source] if isinstance(source, str | Path) else source
    folders = list(dict.fromkeys(Path(folder) for folder in named))
    if not folders:
        raise CheckpointError("There is nothing to compare: name at least one run folder.")
    parts = [_read_folder(folder) for folder in folders]
    pairs = [(part.folder.resolve(), label, run) for part in parts for label, run in part.runs]
    taken = [(label, run.seed) for _, label, run in pairs]
    clashing = {label for label, seed in taken if taken.count((label, seed)) > 1}
    root = Path(os.path.commonpath([folder.resolve().parent for folder in folders]))
    groups: dict[str, list[RunView]] = {}
    for folder, label, run in pairs:
        origin = f" ({folder.relative_to(root).as_posix()})" if label in clashing else ""
        groups.setdefault(label + origin, []).append(run)
    ordered = {name: tuple(sorted(g, key=lambda r: r.seed)) for name, g in groups.items()}
    together = len(parts) == 1  # made by one command: then even the training data are the same
    _refuse_mixture([run for *_, run in pairs], TRAINED_ON if together else TESTED_ON)
    for group in ordered.values():
        _refuse_mixture(group, (*TRAINED_ON, "partition") if together else TRAINED_ON)
    home = folders[0] if together else Path(os.path.commonpath([f.resolve() for f in folders]))
    missing = tuple(run for part in parts for run in part.missing)
    runs = Runs(
        parts[0].name,
        home,
        ordered,
        missing,
        alone=together and not parts[0].name,
        against=against or (parts[0].against if together else None),
    )
    if against is not None:
        refuse_reference(against, {*runs.by_setting(), *(label for label, _ in runs.missing)})
    if against is not None and runs.differing:
        raise ConfigError(
            f"--against {against}: the runs differ in their {' and '.join(runs.differing)} "
            "settings, so differences between them say nothing about methods. Report on runs with "
            "the same ones."
        )
    return runs
