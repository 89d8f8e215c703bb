"""A sweep on one page: metrics over the values of a setting, a curve per method."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from fedharmony.errors import CheckpointError
from fedharmony.experiments.sweep import INDEX
from fedharmony.files import write_atomically
from fedharmony.metrics import METRIC_NAMES
from fedharmony.report.charts import Series, curve
from fedharmony.report.load import Runs, load, read_json
from fedharmony.report.page import commands, render
from fedharmony.report.panel import Section, count
from fedharmony.report.shapes import SWEEP
from fedharmony.report.svg import CENTRAL, Style, printable, style
from fedharmony.report.tables import MetricTable, metric_table, rows_of

#: Letters of a value that fit under a tick.
_TICK = 12


@dataclass(frozen=True)
class Swept:
    """A sweep as it was found: comparisons by the values of the settings that differ.

    The first of the settings is the horizontal axis; points have their values in this order. There
    are ``missing`` comparisons without any run yet.
    """

    name: str
    home: Path
    settings: tuple[str, ...]
    points: tuple[tuple[tuple[str, ...], Runs], ...]
    missing: int = 0

    @property
    def methods(self) -> list[str]:
        """Display names, in their order."""
        return list(dict.fromkeys(name for _, runs in self.points for name in runs.groups))

    @property
    def looks(self) -> dict[str, Style]:
        """How each method is drawn."""
        names = [name for name in self.methods if name != "central"]
        return {n: CENTRAL if n == "central" else style(names.index(n)) for n in self.methods}


def load_sweep(folder: str | Path) -> Swept:
    """Read a folder written by ``fedharmony sweep``, finished or not; else a CheckpointError."""
    home = Path(folder)
    index = read_json(home / INDEX, SWEEP)
    if not index:
        raise CheckpointError(f"{home} is no folder of a sweep: it has no {INDEX}.")
    points, missing = [], 0
    for point in index["points"]:
        try:
            runs = load(home / point["folder"])
        except CheckpointError:
            if any((home / point["folder"]).glob("*/*/events.jsonl")):
                raise
            missing += 1  # not begun
            continue
        points.append((tuple(str(v) for v in point["values"].values()), runs))
    if not points:
        raise CheckpointError(f"No run of the sweep in {home} has begun yet.")
    return Swept(index["config"], home, tuple(index["settings"]), tuple(points), missing)


def sections(swept: Swept) -> dict[str, Section]:
    """One section for each combination of the values of all settings but the first."""
    axis, *others = swept.settings
    found: dict[str, Section] = {}
    rest = dict.fromkeys(values[1:] for values, _ in swept.points)
    for number, fixed in enumerate(rest):
        points = [(values[0], runs) for values, runs in swept.points if values[1:] == fixed]
        names = [printable(value, _TICK) for value, _ in points]
        pictures = []
        for metric in METRIC_NAMES:
            series = [
                Series(method, look, curves)
                for method, look in swept.looks.items()
                if any(curves := _curves(points, method, metric))
            ]
            if series:
                title, places = f"{metric}, %", len(points)
                values = (axis, names)
                pictures.append(curve(title, series, rounds=places, percent=True, values=values))
        where = ", ".join(f"{k} = {v}" for k, v in zip(others, fixed, strict=True))
        lead = (
            "After the last round, on the pooled test set. Lines are means over seeds, bands ± one "
            "standard deviation; values are drawn at equal distances."
        )
        title = f"Over {axis}" + (f" ({where})" if where else "")
        keys = tuple(swept.looks.items())
        found[f"sweep-{number + 1}"] = Section(title, lead, tuple(pictures), keys)
    return found


def _curves(
    points: Sequence[tuple[str, Runs]], method: str, metric: str
) -> tuple[Mapping[int, float], ...]:
    """Of each seed the metric at every point, numbered from 1."""
    found: dict[int, dict[int, float]] = {}
    for place, (_, runs) in enumerate(points, start=1):
        for run in runs.groups.get(method, ()):
            value = run.metrics.get(metric, math.nan)
            if run.status == "completed" and math.isfinite(value):
                found.setdefault(run.seed, {})[place] = value
    return tuple(found.values())


def table_of(swept: Swept) -> MetricTable:
    """All points and methods below each other; there is no best of different tasks."""
    rows = []
    for values, runs in swept.points:
        where = ", ".join(f"{k}={v}" for k, v in zip(swept.settings, values, strict=True))
        rows += [replace(r, label=f"{where}: {r.label}", ranked=False) for r in rows_of(runs)]
    return metric_table(rows)


def to_csv(swept: Swept) -> str:
    """One row per run at full precision: the values, method, seed, metrics."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*swept.settings, "method", "seed", "status", *METRIC_NAMES])
    for values, runs in swept.points:
        for method, group in runs.groups.items():
            for run in group:
                numbers = [run.metrics.get(name, math.nan) for name in METRIC_NAMES]
                writer.writerow(
                    [*values, method, run.seed, run.status]
                    + ["" if not math.isfinite(n) else repr(float(n)) for n in numbers]
                )
    return text.getvalue()


def write_sweep(folder: str | Path) -> Swept:
    """Write ``sweep.md``, ``.csv``, ``.tex`` and ``report.html`` into the folder of a sweep."""
    swept = load_sweep(folder)
    table = table_of(swept)
    texts = {
        "sweep.md": table.to_markdown(),
        "sweep.csv": to_csv(swept),
        "sweep.tex": table.to_latex(),
        "report.html": page(swept),
    }
    for name, text in texts.items():
        write_atomically(swept.home / name, text.encode("utf-8", "replace"))
    return swept


def page(swept: Swept) -> str:
    """The report page."""
    first = swept.points[0][1].first
    runs = [run for _, part in swept.points for run in part.runs]
    lost = sum(run.clients_lost or 0 for run in runs)
    notices = []
    if swept.missing:
        notices.append(f"{count(swept.missing, 'comparison')} of the sweep not begun yet.")
    unfinished = sum(run.status != "completed" for run in runs)
    if unfinished:
        notices.append(f"{count(unfinished, 'run')} not finished: left out of the curves.")
    if lost:
        notices.append(f"Clients were lost in some runs, {lost} in all: see their own reports.")
    facts = [
        count(len(swept.points), "comparison"),
        count(len(swept.methods), "method"),
        count(max(part.seeds for _, part in swept.points), "seed"),
        f"{first.rounds_total:,} rounds",
    ]
    values: dict[str, Any] = {
        "kind": "sweep",
        "title": f"{swept.name}: {', '.join(swept.settings)}",
        "headline": _headline(swept),
        "facts": facts,
        "notices": notices,
        "table": table_of(swept),
        "sections": sections(swept),
        "commands": commands(runs) or ["fedharmony sweep …"],
        "files": [
            ("sweep.csv", "one row per run at full precision"),
            ("sweep.md", "the table as Markdown"),
            ("sweep.tex", "the table for LaTeX (booktabs)"),
        ],
        "version": str(first.environment.get("fedharmony", "")),
    }
    return render(values)


def _headline(swept: Swept) -> str:
    """How far mAP moves over the sweep, method by method, where one setting is varied."""
    if len(swept.settings) > 1:
        return f"mAP and the other metrics over {' and '.join(swept.settings)}."
    parts = []
    points = [(values[0], runs) for values, runs in swept.points]
    for method, look in swept.looks.items():
        found = Series(method, look, _curves(points, method, "mAP")).points(100)
        if means := [mean for _, mean, _ in found]:
            parts.append(f"{method} {min(means):.1f} to {max(means):.1f}")
    if not parts:
        return "No run has ended yet."
    return f"mAP over {swept.settings[0]}: {'; '.join(parts)}."
