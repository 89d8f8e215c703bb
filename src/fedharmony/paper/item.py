"""What an item of the paper is: its claim, the runs it needs, and what it shows of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeAlias

import numpy as np

from fedharmony.experiments.settings import Settings, load_settings
from fedharmony.paper.scale import Part, Scale, Study
from fedharmony.paper.verdict import Gap, Verdict
from fedharmony.registry import Registry
from fedharmony.report.grid import Grid
from fedharmony.report.load import Runs, RunView
from fedharmony.report.panel import Section

Measured: TypeAlias = Mapping[str, Any]
#: The method that is examined, and the one that it starts from.
OURS, BASE = "fedharmony", "fedavg"


@dataclass(frozen=True)
class Shown:
    """What an item has to show for one study.

    Attributes:
        sections: words, tables and figures; the first has the item's title.
        verdict: whether the claim was found again.
        more: verdicts on single parts of the claim, by name.
    """

    sections: tuple[Section, ...]
    verdict: Verdict
    more: Mapping[str, Verdict] = field(default_factory=dict)

    @property
    def grids(self) -> list[Grid]:
        """All tables."""
        return [grid for section in self.sections for grid in section.grids]


@dataclass(frozen=True)
class Found:
    """The finished runs of a study, and what was measured for an item.

    Attributes:
        scale: of the experiments.
        study: the data set.
        folders: of all runs that are finished, by part, method and seed.
        measured: by :meth:`Item.measure`.
    """

    scale: Scale
    study: Study
    folders: Mapping[tuple[str, str, int], RunView]
    measured: Measured = field(default_factory=dict)

    def runs(self, part: Part) -> Runs:
        """All runs of a part, by method."""
        groups = {method: self.group(part, method) for method in part.methods}
        home = groups[part.methods[0]][0].folder.parent.parent
        return Runs(self.study.title, home, groups)

    def group(self, part: Part, method: str) -> tuple[RunView, ...]:
        """The runs of one method, by seed."""
        return tuple(self.folders[part.name, method, seed] for seed in range(part.seeds))

    def values(self, part: Part, method: str, metric: str) -> list[float]:
        """A metric of every seed, per cent."""
        return [100 * run.metrics[metric] for run in self.group(part, method)]

    def gap(self, part: Part, method: str, other: str, metric: str) -> Gap:
        """How far one method lies above another, seed by seed, in points."""
        own, others = (self.values(part, name, metric) for name in (method, other))
        return Gap.of([a - b for a, b in zip(own, others, strict=True)])


@dataclass(frozen=True)
class Bench:
    """Where an item measures what no run has written down.

    Attributes:
        scale: of the experiments.
        study: the data set.
        changes: the user's paths and device, as settings.
    """

    scale: Scale
    study: Study
    changes: tuple[str, ...]

    def settings(self, part: Part, method: str, *more: str) -> Settings:
        """The settings of a run of a part, with further changes."""
        changes = [*self.study.changes, *part.changes, *self.changes, *more]
        return load_settings(self.study.config, changes).with_run(method, 0)


class Item(ABC):
    """A table, figure, algorithm or theorem of the paper."""

    name: ClassVar[str]
    place: ClassVar[int]
    #: As the paper calls it, and what it is about.
    title: ClassVar[str]
    #: What the paper says, in our words.
    claim: ClassVar[str]
    #: How the verdict follows from the figures.
    rule: ClassVar[str]
    #: Whether it is about data: what is not is gone through once, for the first study.
    about_data: ClassVar[bool] = True
    #: Whether its figures show images of the data, which may be somebody else's.
    shows_images: ClassVar[bool] = False
    #: What is measured beside the runs; empty where nothing is.
    measures: ClassVar[str] = ""
    #: Seconds that measuring takes on the scale's machine.
    measuring: ClassVar[float] = 0.0

    @abstractmethod
    def parts(self, study: Study) -> Sequence[Part]:
        """The runs that the item needs; those of other items are shared."""

    def measure(self, bench: Bench) -> Measured:
        """What no run has written down, measured once and kept as JSON."""
        return {}

    @abstractmethod
    def show(self, found: Found) -> Shown:
        """Tables, figures and verdict, from finished runs alone."""

    def fits(self, study: Study) -> bool:
        """Whether the study has what the item is about."""
        return True


def concerns(item: Item, study: Study) -> bool:
    """Whether an item is gone through for a study."""
    return item.fits(study) and (not study.only or item.name in study.only)


items: Registry[type[Item]] = Registry("item of the paper", "fedharmony.paper.items")


def all_items() -> list[Item]:
    """Every item, in the paper's order."""
    found = [items[name]() for name in items.names()]
    return sorted(found, key=lambda item: item.place)


def mean(values: Sequence[float]) -> float:
    """The mean of what is known.

    >>> mean([1.0, 2.0])
    1.5
    """
    return float(np.mean(values))
