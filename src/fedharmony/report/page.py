"""One self-contained HTML page about a run or a comparison.

No script, no font, no image is loaded from anywhere: the page is one file that can be mailed, kept
and printed. It holds no time stamp, so the same folder always gives the same bytes. Its figures
come from panels (:mod:`fedharmony.report.panel`), its sentences from
:mod:`fedharmony.report.words`.
"""

from __future__ import annotations

import json
import math
import re
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from fedharmony.config import flat
from fedharmony.errors import CheckpointError
from fedharmony.files import write_atomically
from fedharmony.reading import left_out
from fedharmony.report import words
from fedharmony.report.charts import Picture, Row, dots
from fedharmony.report.load import Runs, RunView, load
from fedharmony.report.panel import count, sections, styles
from fedharmony.report.tables import table_of

_MOST_FAILURES = 40
#: A setting that the page, which is given away, does not tell.
NOISE_SEED = "privacy.noise_seed"
#: Parts of the page that not every page has.
_OPTIONAL = (
    *("notices", "tiles", "table", "table_keys", "crowned", "glance", "rules", "options"),
    *("failures", "settings", "environment"),
)
_FILES = {
    "config.toml": "all settings, resolved",
    "environment.json": "versions, device, command",
    "partition.json": "which client holds which images",
    "split_report.json": "how uneven the split is",
    "events.jsonl": "every round and evaluation, one JSON object per line",
    "results.json": "final metrics, per label too",
    "matrices.safetensors": "label correlations, clusters, client sizes",
    "scores.safetensors": "what the model says of each test image",
    "examples.safetensors": "some test images, small",
    "model.json": "what the model is of: labels, input, normalisation",
    "checkpoint.safetensors": "the model and everything needed to resume",
    "comparison.json": "which runs belong to the comparison",
    "table.md": "the metric table as Markdown",
    "table.csv": "one row per run at full precision",
    "table.tex": "the metric table for LaTeX (booktabs)",
}


def write_report(
    source: Runs | str | Path | Sequence[str | Path], out: str | Path | None = None
) -> Path:
    """Write the report of a run folder, a comparison folder, or several of them; returns its path.

    ``source`` is what :func:`~fedharmony.report.load.load` takes, or has given. The file is
    ``out``, or ``report.html`` in the folder (of several: in the folder that holds them all); it
    appears complete or not at all. What cannot be read or written is a CheckpointError.
    """
    runs = source if isinstance(source, Runs) else load(source)
    path = Path(out) if out is not None else runs.home / "report.html"
    # A lone surrogate in a label name must not cost the reader the whole page.
    content = _render(runs).encode("utf-8", "replace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise CheckpointError(
            f"Cannot write the report {path}: {error.strerror or error}. Choose another place "
            "with --out."
        ) from error
    return path


def fill(template: str, values: Mapping[str, Any]) -> str:
    """A template of this package, filled."""
    environment = Environment(
        loader=PackageLoader("fedharmony.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template(template).render(values)


def render(values: Mapping[str, Any]) -> str:
    """The page; what is not among the values is left out of it."""
    return fill("page.html.j2", {**dict.fromkeys(_OPTIONAL, ()), **values}) + "\n"


def _render(runs: Runs) -> str:
    table = table_of(runs)
    options: Mapping[str, Any] = next(
        (o for r in runs.runs if (o := r.results.get("metric_options"))), {}
    )
    values = {
        "kind": "run" if runs.alone else "comparison",
        "title": words.title(runs),
        "headline": words.headline(runs),
        "facts": words.facts(runs),
        "notices": words.notices(runs),
        "tiles": words.tiles(runs),
        "table": table if table.columns else None,
        "table_keys": {} if runs.alone else styles(runs),
        "crowned": any(cell.best for line in table.lines for cell in line.cells),
        "glance": _glance(runs),
        "rules": words.metric_rules(runs),
        "options": [(str(k), _value(v)) for k, v in options.items()],
        "sections": sections(runs),
        "failures": _failures(runs),
        "settings": _settings(runs),
        "environment": _environment(runs),
        "commands": commands(runs.runs) or ["fedharmony run config.toml"],
        "files": [(n, text) for n, text in _FILES.items() if (runs.home / n).is_file()],
        "version": str(runs.first.environment.get("fedharmony", "")),
    }
    return render(values)


def _glance(runs: Runs) -> list[Picture]:
    """Final values of a comparison, every seed visible."""
    pictures: list[Picture] = []
    for metric in () if runs.alone else ("mAP", "CF1", "OF1"):
        rows = []
        for name, look in styles(runs).items():
            found = [100 * run.metrics.get(metric, math.nan) for run in runs.groups[name]]
            known = [v for v in found if math.isfinite(v)]
            strokes = tuple((look, v) for v in known) if len(known) > 1 else ()
            mean = ((look, statistics.fmean(known)),) if known else ()
            rows.append(Row(name, mean, strokes, fits=name in runs.ranked))
        if any(row.dots for row in rows):
            pictures.append(dots(f"{metric}, %", rows, spacing=20))
    return pictures


def _failures(runs: Runs) -> dict[str, Any]:
    """Who was left out: a sentence, and by name who did not drop out."""
    rows, invited = [], 0
    counts = dict.fromkeys(("dropped", "failed", "rule"), 0)
    for name, group in runs.groups.items():
        for run in group:
            who = "" if runs.alone else f"{name}, seed {run.seed}"
            for event in run.rounds:
                invited += len(event.get("cohort") or ())
                for cause in counts:
                    counts[cause] += len(left_out(event, cause))
                for failure in (*left_out(event, "failed"), *left_out(event, "rule")):
                    client = failure.get("name") or failure.get("client", "")
                    where = (who, event["round"] + 1, client, failure.get("stage", ""))
                    rows.append((*where, failure.get("reason", "")))
    summary = "No client dropped out or failed."
    if lost := counts["dropped"] + counts["failed"]:
        share = f" ({words.percent(lost / invited)} of {invited:,} invitations)" if invited else ""
        summary = (
            f"{count(counts['dropped'], 'drop-out')} and {count(counts['failed'], 'failure')}"
            f"{share}. A round goes on with the clients that answered."
        )
    if counts["rule"]:
        summary += f" The rule of averaging left out {count(counts['rule'], 'answer')}."
    more = max(0, len(rows) - _MOST_FAILURES)
    return {"summary": summary, "rows": rows[:_MOST_FAILURES], "left_out": more}


def _value(value: Any) -> str:
    """A setting, as short as it can be read."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _settings(runs: Runs) -> list[tuple[str, list[tuple[str, str]]]]:
    """Settings that all methods share, then those of each; values of several seeds are joined."""
    joined: dict[str, dict[str, str]] = {}
    for name, group in runs.groups.items():
        shown = [{k: v for k, v in flat(r.config).items() if k != NOISE_SEED} for r in group]
        flats = [{k: _value(v) for k, v in settings.items()} for settings in shown]
        joined[name] = {
            key: ", ".join(dict.fromkeys(settings.get(key, "–") for settings in flats))
            for key in dict.fromkeys(k for settings in flats for k in settings)
        }
    first = next(iter(joined.values()))
    shared = {k: v for k, v in first.items() if all(j.get(k) == v for j in joined.values())}
    blocks = [("All settings" if runs.alone else "Shared by all runs", [*shared.items()])]
    for name, own in joined.items():
        blocks.append((name, [(k, v) for k, v in own.items() if k not in shared]))
    return [block for block in blocks if block[1]]


def _environment(runs: Runs) -> list[tuple[str, str]]:
    """Versions and device; values that differ between runs are all named."""
    found: dict[str, dict[str, None]] = {}
    for run in runs.runs:
        for name, value in run.environment.items():
            if name != "command" and value is not None:
                found.setdefault(str(name), {})[_value(value)] = None
    return [(name, "; ".join(values)) for name, values in found.items()]


def commands(runs: Iterable[RunView]) -> list[str]:
    """The commands that were given, as far as they are known."""
    given = dict.fromkeys(str(run.environment.get("command") or "") for run in runs)
    return [re.sub(rf"({NOISE_SEED})=\S+", r"\1=…", command) for command in given if command]
