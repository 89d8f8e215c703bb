"""What a panel of the report page is.

>>> @panels.register("hello")
... class Hello(Panel):
...     '''Greets the reader.'''
...
...     place = 5
...
...     def draw(self, runs):
...         return Section("Hello", f"{len(runs.runs)} runs are on this page.")
>>> del panels._items["hello"]
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import ClassVar

from fedharmony.errors import shown
from fedharmony.registry import Registry, plugin_place
from fedharmony.report.charts import Picture, Series
from fedharmony.report.grid import Grid
from fedharmony.report.load import Runs
from fedharmony.report.svg import CENTRAL, Style, style

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Section:
    """A part of the page: words, a legend, and figures in a grid of two or three columns.

    ``summary`` (names and texts) and ``grids`` stand above the figures, ``facts`` (names and
    values) beside them; ``scale`` has the texts at both ends of the colour scale of heat maps.
    """

    title: str
    lead: str
    pictures: tuple[Picture, ...] = ()
    keys: tuple[tuple[str, Style], ...] = ()
    scale: tuple[str, str] | None = None
    facts: tuple[tuple[str, str], ...] = ()
    grids: tuple[Grid, ...] = ()
    summary: tuple[tuple[str, str], ...] = ()

    @property
    def columns(self) -> int:
        """Two where three would leave a figure alone in a row."""
        return 2 if len(self.pictures) in (1, 2, 4) else 3


class Panel(ABC):
    """A section of the page. ``place`` orders panels from top to bottom."""

    name: ClassVar[str]
    place: ClassVar[int]

    @abstractmethod
    def draw(self, runs: Runs) -> Section | None:
        """The section; None where the runs have nothing to show."""


panels: Registry[type[Panel]] = Registry("panel", "fedharmony.report.panels")


def sections(runs: Runs) -> dict[str, Section]:
    """All sections that have something to show, by the panel's name, in their order.

    A panel that raises has one sentence about that in its place.
    """
    found = sorted((panels[name] for name in panels.names()), key=lambda p: (p.place, p.name))
    drawn = {panel.name: _drawn(panel, runs) for panel in found}
    return {name: section for name, section in drawn.items() if section is not None}


def _drawn(panel: type[Panel], runs: Runs) -> Section | None:
    try:
        section = panel().draw(runs)
        if not isinstance(section, Section | None):
            raise TypeError(f"draw must return a Section or None, and returns {shown(section)}")
    except Exception as error:
        where = plugin_place(error) or panel.__module__
        text = (
            f"The panel {panel.name!r} cannot be drawn: {type(error).__name__}: {error} ({where})"
        )
        logger.warning("%s", text, exc_info=True)
        return Section(panel.name.capitalize(), f"{text}.")
    return section


# ----------------------------------------------------------------------- what panels share


def styles(runs: Runs) -> dict[str, Style]:
    """How each method is drawn: the same on the whole page."""
    places = {name: place for place, name in enumerate(runs.ranked)}
    return {name: style(places[name]) if name in places else CENTRAL for name in runs.groups}


def legend(runs: Runs, names: Iterable[str] | None = None) -> tuple[tuple[str, Style], ...]:
    """The legend of some methods, or of all; a single run needs none."""
    looks = styles(runs)
    return () if runs.alone else tuple((n, looks[n]) for n in (names or runs.groups))


def series(runs: Runs, group: str, key: str) -> list[Series]:
    """The curves of a number (see :meth:`RunView.curve`), of the methods that have it."""
    looks = styles(runs)
    found = [
        Series(name, looks[name], tuple(run.curve(group, key) for run in group_runs))
        for name, group_runs in runs.groups.items()
    ]
    return [s for s in found if any(s.curves)]


def count(number: int, singular: str, plural: str | None = None) -> str:
    """A number of things.

    >>> count(1, "label"), count(2000, "label")
    ('1 label', '2,000 labels')
    """
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"
