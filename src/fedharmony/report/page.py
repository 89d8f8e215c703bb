"""One self-contained HTML page about a run or a comparison.

No script, no font, no image is loaded from anywhere: the page is one file that can be mailed, kept
and printed. It holds no time stamp, so the same folder always gives the same bytes.
"""

from __future__ import annotations

import json
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from fedharmony.errors import CheckpointError
from fedharmony.files import write_atomically
from fedharmony.report import plots
from fedharmony.report.load import (
    COMPARISON_FILE,
    Array,
    ComparisonView,
    RunView,
    gather,
    load_comparison,
    load_run,
)
from fedharmony.report.plots import Key, Picture, Series
from fedharmony.report.progress import duration
from fedharmony.report.tables import table_of

#: Metrics drawn over the rounds; the other four are in the table.
_CURVES = ("mAP", "CF1", "OF1", "O-mAP")
_MOST_LOG_PANELS = 12
_MOST_FAILURES = 40
_SPLIT_WORDS = {
    "size_min": "images, smallest client",
    "size_median": "images, median client",
    "size_max": "images, largest client",
    "labels_seen_mean": "labels a client has, mean",
    "labels_seen_min": "labels a client has, fewest",
    "left_out": "images that no client holds",
    "absent_pairs": "client-label pairs without positives",
    "jensen_shannon": "label skew (Jensen-Shannon, nats)",
    "correlation_drift": "correlation drift (RMSE to global φ)",
    "correlation_drift_iid": "the same for a random split (noise floor)",
    "drift_clients": "clients behind the drift",
    "sha256": "partition, SHA-256",
}
_FILES = {
    "config.toml": "all settings, resolved",
    "environment.json": "versions, device, command",
    "partition.json": "which client holds which images",
    "split_report.json": "how uneven the split is",
    "events.jsonl": "every round and evaluation, one JSON object per line",
    "results.json": "final metrics, per label too",
    "matrices.safetensors": "label correlations, clusters, client sizes",
    "checkpoint.safetensors": "the model and everything needed to resume",
    "comparison.json": "which runs belong to the comparison",
    "table.md": "the metric table as Markdown",
    "table.csv": "one row per run at full precision",
    "table.tex": "the metric table for LaTeX (booktabs)",
}


@dataclass(frozen=True)
class Scale:
    """The colour scale of heat maps: the texts at its ends."""

    low: str
    high: str


@dataclass(frozen=True)
class Section:
    """A part of the page: words, a legend, and figures in a grid of two or three columns."""

    id: str
    title: str
    lead: str
    pictures: tuple[Picture, ...]
    keys: tuple[Key, ...] = ()
    scale: Scale | None = None
    facts: tuple[tuple[str, str], ...] = ()

    @property
    def columns(self) -> int:
        """Two where three would leave a figure alone in a row."""
        return 2 if len(self.pictures) in (1, 2, 4) else 3


@dataclass(frozen=True)
class Tile:
    """A headline number with what to compare it with."""

    name: str
    value: str
    beside: str


@dataclass(frozen=True)
class _Subject:
    """What the page is about, in the one form that all sections are made from."""

    groups: Mapping[str, tuple[RunView, ...]]
    name: str
    missing: tuple[tuple[str, int], ...] = ()
    comparison: bool = False
    slots: Mapping[str, int] = field(default_factory=dict)

    @property
    def runs(self) -> tuple[RunView, ...]:
        return tuple(run for runs in self.groups.values() for run in runs)

    @property
    def first(self) -> RunView:
        return self.runs[0]

    @property
    def rounds(self) -> int:
        return max(run.rounds_total for run in self.runs)

    @property
    def seeds(self) -> int:
        return max(len(runs) for runs in self.groups.values())

    def legend(self, names: Sequence[str] | None = None) -> tuple[Key, ...]:
        """Legend entries; a single run needs none."""
        if not self.comparison:
            return ()
        return tuple(plots.key(n, self.slots[n]) for n in (names or self.groups))

    def series(self, group: str, key: str) -> list[Series]:
        return [
            Series(name, self.slots[name], tuple(run.curve(group, key) for run in runs))
            for name, runs in self.groups.items()
        ]

    def with_matrix(self, name: str, like: RunView | None = None) -> RunView | None:
        """The first run that has the matrix, and the same labels as ``like`` if given."""
        runs = (run for run in self.runs if like is None or run.paired == like.paired)
        return next((run for run in runs if name in run.matrices), None)

    def order(self, run: RunView) -> plots.LabelOrder:
        """The order of the run's labels: that of clusters, if any run has some for them."""
        return plots.label_order(self.with_matrix("clusters", run), run.matrices.get("true"))


def write_report(source: str | Path | Sequence[str | Path], out: str | Path | None = None) -> Path:
    """Write the report of a run folder, a comparison folder, or several run folders.

    Args:
        source: A run folder, a comparison folder, or a list of run folders to compare.
        out: The file to write; ``report.html`` in the folder (of several: in the folder that
            holds them all) if None.

    Returns:
        The path of the page. The file appears complete or not at all.

    Raises:
        CheckpointError: A folder is not a run, or one of its files is damaged.
    """
    single = isinstance(source, str | Path)
    folders = [Path(source)] if isinstance(source, str | Path) else [Path(s) for s in source]
    if single and (folders[0] / COMPARISON_FILE).is_file():
        subject = _comparison(load_comparison(folders[0]))
        home = folders[0]
    elif len(folders) == 1:
        run = load_run(folders[0])
        subject = _Subject({run.label: (run,)}, run.label, slots={run.label: 0})
        home = folders[0]
    else:
        subject = _comparison(gather(folders))
        home = Path(os.path.commonpath([folder.resolve() for folder in folders]))
    path = Path(out) if out is not None else home / "report.html"
    # A lone surrogate in a label name must not cost the reader the whole page.
    content = _render(subject, home).encode("utf-8", "replace")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(path, content)
    except OSError as error:
        raise CheckpointError(
            f"Cannot write the report {path}: {error.strerror or error}. Choose another place "
            "with --out."
        ) from error
    return path


def _comparison(view: ComparisonView) -> _Subject:
    slots = {name: i for i, name in enumerate(view.groups)}
    return _Subject(view.groups, view.name, view.missing, comparison=True, slots=slots)


def _render(subject: _Subject, home: Path) -> str:
    environment = Environment(
        loader=PackageLoader("fedharmony.report", ""),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    table = table_of(subject.groups)
    sections = [
        section
        for section in (
            _curves(subject),
            _correlation(subject),
            _clients(subject),
            _labels(subject),
            _aggregation(subject),
            _method(subject),
        )
        if section is not None
    ]
    page = environment.get_template("page.html.j2").render(
        kind="comparison" if subject.comparison else "run",
        title=_title(subject),
        headline=_headline(subject),
        facts=_facts(subject),
        notices=_notices(subject),
        tiles=_tiles(subject),
        table=table if table.columns else None,
        table_keys={key.name: key for key in subject.legend()},
        glance=_glance(subject),
        rules=_metric_rules(subject),
        options=_options(subject),
        sections=sections,
        failures=_failures(subject),
        settings=_settings(subject),
        environment=_environment(subject),
        commands=_commands(subject),
        files=[(n, text) for n, text in _FILES.items() if (home / n).is_file()],
        version=str(subject.first.environment.get("fedharmony", "")),
    )
    return page if page.endswith("\n") else page + "\n"


# ------------------------------------------------------------------------------------ words


def _comparable(series: Sequence[Series]) -> bool:
    """Whether losses are of one kind: a method that sums where others average is far off."""
    first = [c[min(c)] for s in series for c in s.curves if c and c[min(c)] > 0]
    return not first or max(first) < 10 * min(first)


def _relative(series: Series) -> Series:
    """Curves in units of their own first value."""
    curves = tuple({t: v / c[min(c)] for t, v in c.items()} if c else c for c in series.curves)
    return Series(series.name, series.slot, curves)


def _percent(value: float) -> str:
    return f"{100 * value:.1f}\u202f%" if math.isfinite(value) else "–"


def _spread(values: Sequence[float], unit: str = "\u202f%") -> str:
    """Mean ± sample deviation of fractions, in per cent."""
    mean = f"{100 * statistics.fmean(values):.1f}"
    deviation = f" ± {100 * statistics.stdev(values):.1f}" if len(values) > 1 else ""
    return f"{mean}{deviation}{unit}"


def _count(number: int, singular: str, plural: str | None = None) -> str:
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def _data_name(run: RunView) -> str:
    return str(run.setting("data", "name") or "")


def _title(subject: _Subject) -> str:
    data = _data_name(subject.first)
    if not subject.comparison:
        return f"{subject.name} on {data}" if data else subject.name
    names = list(subject.groups)
    what = " and ".join(names) if len(names) <= 2 else f"{len(names)} methods"
    return f"{what} on {data}" if data else what


def _headline(subject: _Subject) -> Markup:
    if not any(_finite(run.metrics.get("mAP")) for run in subject.runs):
        return Markup("There is no mAP to report yet.")
    return _comparison_headline(subject) if subject.comparison else _run_headline(subject.first)


def _run_headline(run: RunView) -> Markup:
    model, data = run.setting("model", "name"), _data_name(run)
    trained = Markup("{} trained{}{} with {}").format(
        run.label,
        f" {_article(str(model))}" if model else " a model",
        f" on {data}" if data else "",
        _count(int(run.start.get("clients") or 0), "client"),
    )
    images = run.start.get("test_images")
    reached = Markup(
        " After {} of {} rounds it reaches <strong>{} mAP</strong> and {} CF1{}."
    ).format(
        run.measured_after,
        run.rounds_total,
        _percent(run.metrics.get("mAP", math.nan)),
        _percent(run.metrics.get("CF1", math.nan)),
        f" on {images:,} test images" if isinstance(images, int) else "",
    )
    return trained + "." + reached + _baseline_sentence(run)


def _article(word: str) -> str:
    return f"{'an' if word[:1].lower() in 'aeiou' else 'a'} {word}"


def _baseline_sentence(run: RunView) -> Markup:
    prevalence = run.baselines.get("prevalence", {}).get("mAP", math.nan)
    if not math.isfinite(prevalence):
        return Markup("")
    text = " Scoring every image by how common each label is would give {} mAP."
    return Markup(escape(text.format(_percent(prevalence))))


def _comparison_headline(subject: _Subject) -> Markup:
    scores = {
        name: {run.seed: run.metrics["mAP"] for run in runs if _finite(run.metrics.get("mAP"))}
        for name, runs in subject.groups.items()
    }
    ranked = sorted(
        (name for name in scores if scores[name]),
        key=lambda name: -statistics.fmean(scores[name].values()),
    )
    best = ranked[0]
    if len(ranked) == 1:
        only = Markup("Only <strong>{}</strong> has been measured yet: <strong>{}</strong> mAP.")
        return only.format(best, _spread(list(scores[best].values())))
    unfinished = subject.missing or any(run.status != "completed" for run in subject.runs)
    text = Markup("{}<strong>{}</strong> has the highest mAP: <strong>{}</strong>{}.").format(
        "So far, " if unfinished else "",
        best,
        _spread(list(scores[best].values())),
        f" over {_count(len(scores[best]), 'seed')}" if len(scores[best]) > 1 else " (one seed)",
    )
    text += _difference_sentence(best, ranked[1], scores)
    return text + _baseline_sentence(next((r for r in subject.runs if r.baselines), subject.first))


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _difference_sentence(
    best: str, second: str, scores: Mapping[str, Mapping[int, float]]
) -> Markup:
    """How far ahead the best is, on the seeds both have, and whether the seeds agree."""
    shared = sorted(scores[best].keys() & scores[second].keys())
    text = Markup(" Next is {} with {}").format(second, _spread(list(scores[second].values())))
    if not shared:
        return text + "; they share no seed."
    gaps = [scores[best][s] - scores[second][s] for s in shared]
    if len(gaps) == 1:
        return text + Markup(
            "; the difference is {} points on one seed, so its spread is unknown."
        ).format(f"{100 * gaps[0]:.1f}".replace("-", "−"))
    text += Markup("; seed by seed the difference is {} points").format(_spread(gaps, unit=""))
    if statistics.fmean(gaps) <= statistics.stdev(gaps):
        return text + ", no more than its own spread."
    return text + "."


def _facts(subject: _Subject) -> list[str]:
    """What was run, in figures."""
    run, start = subject.first, subject.first.start
    facts = []
    if subject.comparison:
        facts.append(_count(len(subject.groups), "method"))
        facts.append(_count(subject.seeds, "seed"))
    if start.get("clients"):
        cohort = f", {start['cohort']:,} per round" if start.get("cohort") else ""
        facts.append(f"{_count(int(start['clients']), 'client')}{cohort}")
    facts.append(_count(subject.rounds, "round"))
    facts.append(_count(len(run.classes), "label"))
    for key, words in (
        ("train_images", "training images"),
        ("test_images", "test images"),
        ("parameters", "parameters"),
    ):
        if isinstance(start.get(key), int):
            facts.append(f"{start[key]:,} {words}")
    if start.get("device"):
        facts.append(str(start["device"]))
    if not subject.comparison:
        facts.append(f"seed {run.seed}")
        if math.isfinite(run.seconds):
            facts.append(duration(run.seconds))
    return facts


def _notices(subject: _Subject) -> list[str]:
    """What limits the numbers below, most important first."""
    notices = []
    for name, runs in subject.groups.items():
        for run in runs:
            who = f"{name}, seed {run.seed}" if subject.comparison else "This run"
            notices += [f"{who} {text}" for text in _shortcomings(run)]
    if subject.missing:
        names = ", ".join(f"{label} seed {seed}" for label, seed in subject.missing)
        notices.append(f"Not started yet: {names}.")
    if subject.comparison:
        for section in ("data", "metrics"):
            variants = {json.dumps(r.config.get(section), sort_keys=True) for r in subject.runs}
            if len(variants) > 1:
                notices.append(
                    f"The runs differ in their {section} settings, so their numbers may not be "
                    "comparable (see the settings below)."
                )
    return notices


def _shortcomings(run: RunView) -> list[str]:
    found = []
    progress = f"{run.rounds_done} of {_count(run.rounds_total, 'round')}"
    if run.status == "unfinished":
        found.append(
            f"has not finished: {progress} are in its log. The numbers are those of its latest "
            f"evaluation (round {run.measured_after})."
            if run.measured_after
            else f"has not finished: {progress} are in its log, and it has not been evaluated yet."
        )
    elif run.status != "completed":
        given = (run.finish or {}).get("reason")
        stopped = "the user stopped it" if run.status == "interrupted" else "no reason given"
        reason = str(given or stopped).rstrip(".")
        verb = "failed" if run.status == "failed" else f"was {run.status}"
        found.append(f"{verb} after {progress}: {reason}.")
    stale = int(run.results.get("rounds_done") or 0)
    if run.results and stale != run.rounds_done:
        found.append(f"has label scores and correlations as they were after round {stale}.")
    if run.clients_lost:
        found.append(
            f"lost {_count(run.clients_lost, 'client reply', 'client replies')} for good: its "
            "rounds went on with the others, and its numbers are not those of an undisturbed run "
            "(see Failures)."
        )
    if run.clients_saved:
        found.append(
            f"trained {_count(run.clients_saved, 'client')} a second time, in full precision and "
            "step by step, because the fast path gave values that are not finite."
        )
    if run.damaged_lines:
        lines = _count(run.damaged_lines, "line")
        found.append(f"has {lines} in events.jsonl that could not be read and are left out here.")
    return found


def _tiles(subject: _Subject) -> list[Tile]:
    if subject.comparison or not subject.first.metrics:
        return []
    run = subject.first
    tiles = []
    for name, baseline in (
        ("mAP", "prevalence"),
        ("O-mAP", "prevalence"),
        ("CF1", "all positive"),
        ("OF1", "all positive"),
    ):
        beside = run.baselines.get(baseline, {}).get(name, math.nan)
        text = f"{baseline} {_percent(beside)}" if math.isfinite(beside) else ""
        tiles.append(Tile(name, _percent(run.metrics.get(name, math.nan)), text))
    pearson = run.structure.get("soft_pearson", math.nan)
    if math.isfinite(pearson):
        tiles.append(Tile("structure r", f"{pearson:.2f}", "1 = that of the test labels"))
    return tiles


def _metric_rules(subject: _Subject) -> list[str]:
    """The conventions behind the numbers, in words."""
    run = next((run for run in subject.runs if run.results), subject.first)
    options = run.results.get("metric_options") or {}
    if not options:
        return []
    labels = len(run.classes)
    present = run.results.get("n_classes_with_positives")
    never = None if subject.comparison else run.results.get("n_classes_never_predicted")
    share = f" ({present} of {labels})" if present is not None else ""
    rules = [
        {
            "skip": f"mAP averages over the labels that occur in the test set{share}.",
            "zero": f"In mAP, labels other than those in the test set{share} count as 0.",
            "nan": "mAP is undefined where a label does not occur in the test set.",
        }.get(str(options.get("empty_class", "skip")), ""),
        f"A label counts as predicted where its score is at least {options.get('threshold', 0.5)}"
        + (f" and among the image's top {options['topk']}." if options.get("topk") else "."),
        "CP and CR average over "
        + ("all labels" if options.get("cr_over", "all") == "all" else "labels that occur")
        + "; a label that is never predicted has precision 0"
        + (f" (here: {never})." if never is not None else "."),
        "CF1 is the harmonic mean of CP and CR."
        if options.get("f1_mode", "of_means") == "of_means"
        else "CF1 is the mean of the labels' own F1.",
    ]
    if options.get("ap_bins"):
        rules.append(f"Average precision is binned ({options['ap_bins']} thresholds), not exact.")
    if options.get("op_mode", "exact") != "exact":
        rules.append("The denominator of OP grows by one for each label that is never predicted.")
    return [rule for rule in rules if rule]


def _options(subject: _Subject) -> list[tuple[str, str]]:
    options: Mapping[str, Any] = next(
        (r.results["metric_options"] for r in subject.runs if "metric_options" in r.results), {}
    )
    return [(str(k), _value(v)) for k, v in options.items()]


# --------------------------------------------------------------------------------- sections


def _glance(subject: _Subject) -> list[Picture]:
    """Final values of a comparison, every seed visible."""
    if not subject.comparison:
        return []
    pictures: list[Picture] = []
    for metric in ("mAP", "CF1", "OF1"):
        values = {
            name: [run.metrics.get(metric, math.nan) for run in runs]
            for name, runs in subject.groups.items()
        }
        if any(_finite(v) for found in values.values() for v in found):
            pictures.append(plots.strip(f"glance-{len(pictures)}", f"{metric}, %", values))
    return pictures


def _curves(subject: _Subject) -> Section | None:
    baselines = next((run.baselines for run in subject.runs if run.baselines), {})
    zoom = len(subject.groups) > 2  # with two methods, the whole curve is worth more than detail
    pictures: list[Picture] = []
    for metric, baseline in zip(
        _CURVES, ("prevalence", "all positive", "all positive", "prevalence"), strict=True
    ):
        series = subject.series("metrics", metric)
        if any(any(s.curves) for s in series):
            value = baselines.get(baseline, {}).get(metric, math.nan)
            pictures.append(
                plots.curve(
                    f"curve-{len(pictures)}",
                    f"{metric}, %",
                    series,
                    rounds=subject.rounds,
                    percent=True,
                    reference=(baseline, value),
                    zoom=zoom,
                )
            )
    for group, key, title in (
        ("structure", "soft_pearson", "Structure r (learned against true)"),
        ("round", "train_loss", "Training loss"),
    ):
        series = subject.series(group, key)
        if key == "train_loss" and not _comparable(series):
            series, title = [_relative(s) for s in series], f"{title}, relative to the first round"
        if any(any(s.curves) for s in series):
            name = f"curve-{len(pictures)}"
            pictures.append(plots.curve(name, title, series, rounds=subject.rounds, zoom=zoom))
    if not pictures:
        return None
    lead = "Measured on the whole test set after each evaluated round."
    if subject.seeds > 1:
        lead += " Lines are means over seeds"
        if len(subject.groups) <= plots.MOST_BANDS:
            lead += ", bands ± one standard deviation"
        partial = any(run.status != "completed" for run in subject.runs)
        lead += ", over the seeds that got that far." if partial else "."
    if zoom:
        first = plots.zoom_start(subject.rounds)
        lead += f" The scales fit rounds {first} to {subject.rounds}; the start is cut off."
    return Section("curves", "Training", lead, tuple(pictures), subject.legend())


def _correlation(subject: _Subject) -> Section | None:
    reference = subject.with_matrix("true")
    if reference is None:
        return None
    defined = reference.matrices.get("true_defined")
    size = len(reference.matrices["true"])
    shown: list[tuple[str, Array, str]] = [
        ("True: the test labels", plots.off_diagonal(reference.matrices["true"], defined), "")
    ]
    planted = subject.with_matrix("planted", reference)
    if planted is not None:
        values = plots.off_diagonal(planted.matrices["planted"])
        shown.append(("Planted: how the data were made", values, ""))
    for name, runs in subject.groups.items():
        run = next((r for r in runs if "learned" in r.matrices), None)
        if run is None or run.paired != reference.paired:
            continue
        prefix = f"{name}: " if subject.comparison else ""
        if "consensus" in run.matrices:
            known = run.matrices.get("consensus_known")
            values = plots.off_diagonal(run.matrices["consensus"], known)
            shown.append((_capital(f"{prefix}consensus of the clients"), values, ""))
        values = plots.off_diagonal(run.matrices["learned"], defined)
        pearson = run.structure.get("soft_pearson", math.nan)
        note = f"Pearson r with the truth {pearson:.2f}" if math.isfinite(pearson) else ""
        note += f" (seed {run.seed})" if note and subject.seeds > 1 else ""
        shown.append((_capital(f"{prefix}learned by the model"), values, note))
    limit = plots.common_limit([values for _, values, _ in shown])
    order = subject.order(reference)
    pictures = tuple(
        plots.correlation_map(
            f"correlation-{i}", title, values, order, reference.paired, limit, note
        )
        for i, (title, values, note) in enumerate(shown)
    )
    scale = Scale(f"−{limit:.1f}", f"+{limit:.1f}")
    unknown = any(np.isnan(values).sum() > size for _, values, _ in shown)  # diagonals are nan
    lead = _correlation_lead(size, len(reference.classes), order, unknown)
    return Section("correlation", "Label correlation", lead, pictures, scale=scale)


def _correlation_lead(size: int, classes: int, order: plots.LabelOrder, unknown: bool) -> str:
    lead = "Which labels occur together (φ coefficient). Rows and columns have the same order"
    if order.clusters:
        lead += f": by cluster, {_count(len(order.clusters), 'cluster')} framed"
        lead += " and numbered" if size > plots.MOST_NAMED_LABELS else ""
    else:
        lead += ", which puts correlated labels side by side"
    lead += ". The diagonal is left blank"
    lead += "; grey pairs are not known (a label does not occur)." if unknown else "."
    if size < classes:
        lead += f" Of {classes:,} labels the {size:,} most frequent are compared."
    if size > plots.MOST_CELLS:
        lead += f" {size:,} labels are averaged down to {plots.MOST_CELLS} cells per side."
    return lead


def _capital(text: str) -> str:
    return text if ":" in text else text[:1].upper() + text[1:]


def _clients(subject: _Subject) -> Section | None:
    run = subject.with_matrix("client_sizes")
    facts = tuple(
        (_SPLIT_WORDS.get(str(k), str(k).replace("_", " ")), _split_value(v))
        for k, v in subject.first.split.items()
        if isinstance(v, str | int | float)
    )
    if run is None:
        if not facts:
            return None
        return Section("clients", "Clients", "How the images are split.", (), facts=facts)
    order = subject.order(run)
    shares = run.matrices.get("client_label_shares")
    if shares is not None and len(order.index) != shares.shape[1]:
        shares = None
    picture = plots.client_picture(
        "clients-0", run.matrices["client_sizes"], shares, order, run.paired
    )
    lead = "How the training images are split: each column is a client."
    return Section("clients", "Clients", lead, (picture,), facts=facts)


def _split_value(value: str | int | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def _labels(subject: _Subject) -> Section | None:
    groups = {name: [run for run in runs if run.per_label] for name, runs in subject.groups.items()}
    groups = {name: runs for name, runs in groups.items() if runs}
    if not groups:
        return None
    first = next(iter(groups.values()))[0]
    scores = first.per_label
    aps = {
        name: [_mean([r.per_label[i].ap for r in runs]) for i in range(len(scores))]
        for name, runs in groups.items()
        if all(r.classes == first.classes for r in runs)
    }
    rows = plots.most_frequent(scores)
    if not rows or not aps:
        return None
    rows.sort(key=lambda i: -_mean([values[i] for values in aps.values()]))
    names = [scores[i].label for i in rows]
    images = first.start.get("test_images")
    rates = [scores[i].positives / images for i in rows] if images else None
    defined = sum(math.isfinite(s.ap) for s in scores)
    lead = "Average precision (AP) on the test set, best label on top."
    if rates:
        lead += " The tick is the label's prevalence: the AP of a random ranking."
    if defined > len(rows):
        lead += f" The {len(rows)} most frequent of {defined:,} labels are shown."
    if defined < len(scores):
        lead += f" {_count(len(scores) - defined, 'label')} without test positives left out."
    chosen = {name: [values[i] for i in rows] for name, values in aps.items()}
    pictures = [
        plots.label_dots(
            "label-ap",
            "Average precision, %",
            names,
            [(subject.slots[name], values) for name, values in chosen.items()],
            origin=rates,
        )
    ]
    if subject.comparison:
        pictures += _label_gains(subject, names, chosen)
        return Section("labels", "Labels", lead, tuple(pictures), subject.legend(list(chosen)))
    pictures.append(
        plots.label_dots(
            "label-pr",
            "Precision and recall, %",
            names,
            [(1, [scores[i].precision for i in rows]), (2, [scores[i].recall for i in rows])],
        )
    )
    pictures.append(plots.frequency_scatter("label-frequency", scores))
    keys = tuple(plots.key(n, i) for i, n in enumerate(("AP", "precision", "recall")))
    return Section("labels", "Labels", lead, tuple(pictures), keys)


def _mean(values: Sequence[float]) -> float:
    known = [v for v in values if math.isfinite(v)]
    return statistics.fmean(known) if known else math.nan


def _label_gains(
    subject: _Subject, names: Sequence[str], chosen: Mapping[str, Sequence[float]]
) -> list[Picture]:
    """How far each method is ahead of the first one, label by label."""
    base, *others = chosen
    if not others:
        return []
    gains = [
        (subject.slots[n], [a - b for a, b in zip(chosen[n], chosen[base], strict=True)])
        for n in others
    ]
    title = f"AP compared with {base}, points"
    return [plots.label_dots("label-gain", title, names, gains, origin=0.0, ends=None)]


def _aggregation(subject: _Subject) -> Section | None:
    weighted = {
        name: next((r for r in runs if any(e.get("weights") for e in r.rounds)), None)
        for name, runs in subject.groups.items()
    }
    shown = {name: run for name, run in weighted.items() if run is not None}
    if not shown:
        return None
    series = [
        Series(
            name,
            subject.slots[name],
            tuple(plots.effective_curve(r) for r in subject.groups[name]),
        )
        for name in shown
    ]
    note = "(Σw)² / Σw². Dashed: equal weights"
    peers = subject.groups[next(iter(shown))]  # all methods are given the same cohorts
    equal = tuple(plots.reference_effective(r, by_size=False) for r in peers)
    by_size = tuple(plots.reference_effective(r, by_size=True) for r in peers)
    series.append(Series("equal weights", None, equal))
    if any(by_size):
        series.append(Series("weights by size", None, by_size))
        note += "; dotted: weights by client size"
    pictures = [
        plots.curve(
            "aggregation-effective",
            "Effective number of clients",
            series,
            rounds=subject.rounds,
            note=f"{note}.",
        )
    ]
    for i, names in enumerate(plots.same_weights(shown)):
        entry = shown[names[0]]
        who = names[0] if len(names) == 1 else f"{len(names)} methods"
        title = f"{who}: weights" if subject.comparison else "Weights by client and round"
        title += f" (seed {entry.seed})" if subject.seeds > 1 else ""
        alike = f"{', '.join(names)} weight alike. " if len(names) > 1 else ""
        picture = plots.weights_map(f"aggregation-{i}", title, entry)
        pictures.append(replace(picture, note=alike + picture.note))
    lead = "How much each client counts when the server averages the models."
    return Section("aggregation", "Aggregation", lead, tuple(pictures), subject.legend(list(shown)))


def _method(subject: _Subject) -> Section | None:
    log_keys = list(dict.fromkeys(k for run in subject.runs for k in run.log_keys))
    pictures, drawn = [], set()
    for i, log_key in enumerate(log_keys[:_MOST_LOG_PANELS]):
        series = [s for s in subject.series("log", log_key) if any(s.curves)]
        if series:
            drawn |= {s.name for s in series}
            title = log_key.replace("_", " ")
            pictures.append(plots.curve(f"log-{i}", title, series, rounds=subject.rounds))
    if not pictures:
        return None
    lead = "Numbers the method itself reports after each round."
    if len(log_keys) > _MOST_LOG_PANELS:
        lead += f" The first {_MOST_LOG_PANELS} of {len(log_keys)} are shown."
    names = [name for name in subject.groups if name in drawn]
    return Section("method", "Inside the method", lead, tuple(pictures), subject.legend(names))


# ------------------------------------------------------------------- failures and settings


@dataclass(frozen=True)
class _Failures:
    """Who did not answer: a sentence, and the failures by name."""

    summary: str
    rows: tuple[tuple[str, int, int, str, str], ...]
    left_out: int


def _failures(subject: _Subject) -> _Failures:
    rows, dropped, invited = [], 0, 0
    for name, runs in subject.groups.items():
        for run in runs:
            who = f"{name}, seed {run.seed}" if subject.comparison else ""
            for event in run.rounds:
                dropped += len(event.get("dropped") or ())
                invited += len(event.get("cohort") or ())
                rows += [
                    (
                        who,
                        int(event["round"]) + 1,
                        int(f.get("client", -1)),
                        str(f.get("stage", "")),
                        str(f.get("reason", "")),
                    )
                    for f in event.get("failures") or ()
                ]
    if not dropped and not rows:
        summary = "No client dropped out or failed."
    else:
        lost = dropped + len(rows)
        share = (
            f" ({100 * lost / invited:.1f}\u202f% of {invited:,} invitations)" if invited else ""
        )
        summary = (
            f"{_count(dropped, 'drop-out')} and {_count(len(rows), 'failure')}{share}. "
            "A round goes on with the clients that answered."
        )
    return _Failures(summary, tuple(rows[:_MOST_FAILURES]), max(0, len(rows) - _MOST_FAILURES))


def _value(value: Any) -> str:
    """A setting, as short as it can be read."""
    if value is None:
        return "none"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    flat: dict[str, str] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = _value(value)
    return flat


def _settings(subject: _Subject) -> list[tuple[str, list[tuple[str, str]]]]:
    """Settings that all methods share, then those of each; values of several seeds are joined."""
    flat = {name: [_flatten(run.config) for run in runs] for name, runs in subject.groups.items()}
    joined = {
        name: {
            key: ", ".join(dict.fromkeys(settings.get(key, "–") for settings in group))
            for key in dict.fromkeys(k for settings in group for k in settings)
        }
        for name, group in flat.items()
    }
    first = next(iter(joined.values()))
    shared = {k: v for k, v in first.items() if all(j.get(k) == v for j in joined.values())}
    blocks = [("Shared by all runs" if subject.comparison else "All settings", [*shared.items()])]
    for name, own in joined.items():
        blocks.append((name, [(k, v) for k, v in own.items() if k not in shared]))
    return [block for block in blocks if block[1]]


def _environment(subject: _Subject) -> list[tuple[str, str]]:
    """Versions and device; values that differ between runs are all named."""
    found: dict[str, dict[str, None]] = {}
    for run in subject.runs:
        for name, value in run.environment.items():
            if name != "command" and value is not None:
                found.setdefault(str(name), {})[_value(value)] = None
    return [(name, "; ".join(values)) for name, values in found.items()]


def _commands(subject: _Subject) -> list[str]:
    """The commands that were given, or one that repeats the run from its folder."""
    given = dict.fromkeys(str(run.environment.get("command") or "") for run in subject.runs)
    return [command for command in given if command] or ["fedharmony run config.toml"]
