"""Choosing settings: the learning rate, and some settings of each method.

Methods differ in the settings that suit them; compared at one common setting, some are compared at
a bad one. A trial is an ordinary run that is evaluated on images held out of the training clients
(``split.holdout``): the test set plays no part. First the learning rates are tried at the method's
own defaults, then, one after the other, the values of its settings at the best found so far.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from fedharmony.config import flat, merge, nested, to_toml
from fedharmony.errors import ConfigError
from fedharmony.experiments.build import Observer
from fedharmony.experiments.compare import Planned, execute, names_of, rehearse
from fedharmony.experiments.crowd import ALONE, Crowd
from fedharmony.experiments.evaluate import Results
from fedharmony.experiments.folder import RunFolder, folder_name
from fedharmony.experiments.jobs import Workers
from fedharmony.experiments.machine import with_threads
from fedharmony.experiments.settings import Component, Settings
from fedharmony.files import refuse_if_held
from fedharmony.methods.base import methods
from fedharmony.records import write_file

#: The metric that decides.
CRITERION = "mAP"
#: One run of a search, as ``tune.json`` has it: what was tried, and its score.
Trial: TypeAlias = dict[str, Any]


@dataclass(frozen=True)
class Choice:
    """The best value of one setting: None if the default won."""

    setting: str
    value: Any
    default: Any

    def __str__(self) -> str:
        return f"{self.setting} = {self.default if self.value is None else self.value}"


@dataclass(frozen=True)
class BestSettings:
    """The best settings of one method: learning rate, and what was searched, in its order.

    ``start`` is the score at the configured learning rate and the method's defaults, if tried;
    ``edges`` are the settings whose best value lies at the end of its grid.
    """

    method: str
    lr: float
    choices: tuple[Choice, ...]
    score: float
    start: float | None
    edges: tuple[str, ...]


class Search:
    """Trials of several methods, in one folder; finished ones are kept, so it can be continued."""

    def __init__(
        self, settings: Settings, labels: Sequence[str], out: Path, crowd: Crowd = ALONE
    ) -> None:
        self.settings, self.out, self.crowd = with_threads(settings, crowd), out, crowd
        self.methods = names_of(labels)
        for name in self.methods:
            if ":" in name:
                raise ConfigError(
                    f"'fedharmony tune' searches settings of methods, not of presets: {name!r}. "
                    f"Give {name.partition(':')[0]!r}."
                )
            self.grid(name)
        refuse_if_held(out)
        owners: dict[Path, str] = {}
        for run in self.plan():
            run.folder.refuse_if_taken(run.settings)
            if owners.setdefault(run.folder.path, run.settings.sha256()) != run.settings.sha256():
                raise ConfigError(
                    f"Two trials would share the folder {run.folder.path}: values of the search "
                    "differ by less than their names show. Take values further apart."
                )

    # -- what is tried -----------------------------------------------------------------------------

    def rates(self) -> tuple[float, ...]:
        """Learning rates, ascending."""
        lr = self.settings.train.lr
        return tuple(sorted({*(self.settings.tune.lr or (lr / 3, lr, lr * 3))}))

    def grid(self, method: str) -> dict[str, tuple[Any, ...]]:
        """The settings of a method that are searched, and their values.

        A common setting that a method may have for itself counts as one of its own:
        ``federation.server_average``, ``train.weight_decay``.
        """
        found = flat(self.settings.grids.get(method) or methods[method].search)
        if "train.lr" in found:
            raise ConfigError(
                f"tune.{method}.train.lr: learning rates are searched first, for all methods "
                "alike. Set tune.lr."
            )
        return {key: tuple(values) for key, values in found.items()}

    def trial(self, method: str, lr: float, changes: Mapping[str, Any]) -> Planned:
        """The run that tries a learning rate and values of settings."""
        base, tune = self.settings, self.settings.tune
        given = base.methods.get(method, {})
        own = merge(given, nested({"train.lr": lr, **changes}))
        common = replace(base.split.common, holdout=tune.holdout)
        settings = replace(
            base.with_run(method),
            run=replace(base.run, method=method, rounds=tune.rounds or base.run.rounds),
            split=Component(common, base.split.own),
            methods={**base.methods, method: own},
        )
        name = "_".join([f"lr={lr:g}", *(f"{key}={value}" for key, value in changes.items())])
        return Planned(settings, RunFolder(self.out / "trials" / method / folder_name(name)))

    def plan(self) -> Iterator[Planned]:
        """Trials that may be run, each setting by itself: to be checked before the first one is."""
        for method in self.methods:
            for lr in self.rates():
                yield self.trial(method, lr, {})
                for setting, values in self.grid(method).items():
                    for value in values:
                        yield self.trial(method, lr, {setting: value})

    def count(self, method: str) -> int:
        """The number of trials of a method; a value that is the default anyway is none."""
        changes = [
            value
            for setting, values in self.grid(method).items()
            for value in values
            if value != self._default(method, setting)
        ]
        return len(self.rates()) + len(changes)

    @property
    def size(self) -> int:
        """The number of all trials."""
        return sum(map(self.count, self.methods))

    # -- the search --------------------------------------------------------------------------------

    def run(
        self,
        observer: Callable[[int, Planned], Observer],
        observe: Observer = lambda event: None,
        workers: Workers | None = None,
    ) -> list[BestSettings]:
        """Search all methods; ``tune.json`` and ``tuned.toml`` grow with them.

        Methods are searched one after the other, or all at once where there are ``workers``.
        ``observer(i, run)`` gives the observer of the i-th trial, ``observe`` is that of what comes
        before the first.
        """
        loaded = {repr(self.settings.data): rehearse(list(self.plan()), observe)}
        trials: list[Trial] = []
        found: list[BestSettings] = []

        def carry_out(runs: Sequence[Planned]) -> list[Results]:
            first = len(trials)
            if workers is not None:
                return workers.execute(runs, lambda i, run: observer(first + i, run))
            return execute(runs, lambda i, run: observer(first + i, run), loaded)

        groups = [[method] for method in self.methods] if workers is None else [self.methods]
        with RunFolder(self.out).writing():
            for group in groups:
                found += self._search_together(group, carry_out, trials)
                self._write(found, trials)
        return found

    def _search_together(
        self,
        group: Sequence[str],
        carry_out: Callable[[Sequence[Planned]], list[Results]],
        trials: list[Trial],
    ) -> list[BestSettings]:
        """Search some methods: the trials that all of them ask for next are carried out at once."""
        searches = {method: self._search(method) for method in group}
        asked = {method: next(search) for method, search in searches.items()}
        best: dict[str, BestSettings] = {}
        while asked:
            wanted = [(method, lr, changes) for method in asked for lr, changes in asked[method]]
            runs = [self.trial(*trial) for trial in wanted]
            scores: dict[str, list[float]] = {method: [] for method in asked}
            for (method, lr, changes), run, result in zip(
                wanted, runs, carry_out(runs), strict=True
            ):
                score = float(result["metrics"][CRITERION] or 0.0)
                scores[method].append(score)
                path = run.folder.path.relative_to(self.out).as_posix()
                tried = {"method": method, "changes": {"train.lr": lr, **changes}}
                trials.append({**tried, CRITERION: score, "folder": path})
            asked = {}
            for method, values in scores.items():
                try:
                    asked[method] = searches[method].send(values)
                except StopIteration as end:
                    best[method] = end.value
        return [best[method] for method in group]

    def _search(
        self, method: str
    ) -> Generator[list[tuple[float, Mapping[str, Any]]], list[float], BestSettings]:
        """Ask for trials (learning rate and changes), take their scores, and so on to the best."""
        rates = self.rates()
        by_rate = dict(zip(rates, (yield [(lr, {}) for lr in rates]), strict=True))
        lr = _best(by_rate)
        best, edges = by_rate[lr], ["train.lr"] if _at_edge(lr, rates) else []
        chosen: dict[str, Any] = {}
        choices = []
        for setting, values in self.grid(method).items():
            default = self._default(method, setting)
            tried = [value for value in dict.fromkeys(values) if value != default]
            scores = yield [(lr, {**chosen, setting: value}) for value in tried]
            by_value = {default: best} | dict(zip(tried, scores, strict=True))
            value = _best(by_value)
            best = by_value[value]
            if value != default:
                chosen[setting] = value
            choices.append(Choice(setting, chosen.get(setting), default))
            numbers = [v for v in values if isinstance(v, int | float)]
            if len(numbers) == len(values) and _at_edge(value, numbers):
                edges.append(setting)
        start = by_rate.get(self.settings.train.lr)
        return BestSettings(method, lr, tuple(choices), best, start, tuple(edges))

    def _default(self, method: str, setting: str) -> Any:
        """The value of a setting where the search leaves it alone."""
        settings = self.settings.with_run(method)
        section, _, key = setting.rpartition(".")
        homes = {"train": settings.training, "federation": settings.taking_part}
        return getattr(homes.get(section, settings.method_config), key)

    def _write(self, found: Sequence[BestSettings], trials: Sequence[Trial]) -> None:
        RunFolder(self.out).write_json(
            "tune.json",
            {
                "criterion": f"{CRITERION} on held-out images",
                "holdout": self.settings.tune.holdout,
                "found": [asdict(f) for f in found],
                "trials": trials,
            },
        )
        sections = {
            f.method: nested(
                {c.setting: c.value for c in f.choices if c.value is not None} | {"train.lr": f.lr}
            )
            for f in found
        }
        head = (
            "# Found by `fedharmony tune` on images held out of the training clients.\n"
            "# Use on top of the same task: fedharmony compare CONFIG tuned.toml --methods all\n\n"
        )
        write_file(self.out / "tuned.toml", (head + to_toml({"methods": sections})).encode())


def _best(scores: Mapping[Any, float]) -> Any:
    """The key with the highest score; the first of equals, and never one without a score."""
    return max(scores, key=lambda key: -math.inf if math.isnan(scores[key]) else scores[key])


def _at_edge(value: Any, grid: Sequence[Any]) -> bool:
    """Whether a better value may lie outside of the grid."""
    return len(grid) > 1 and value in (min(grid), max(grid))
