"""The sentences of the report page: what was run, what came of it, and what limits the numbers."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from markupsafe import Markup, escape

from fedharmony.errors import some
from fedharmony.experiments.card import privacy_facts
from fedharmony.fallbacks import CAUSES
from fedharmony.report.grid import spread
from fedharmony.report.load import Runs, RunView
from fedharmony.report.panel import count
from fedharmony.report.progress import duration


def percent(value: float) -> str:
    """A fraction in per cent; a dash where it is undefined."""
    return f"{100 * value:.1f}\u202f%" if math.isfinite(value) else "–"


def _spread(values: Sequence[float], unit: str = "\u202f%") -> str:
    """Mean ± sample deviation of fractions, in per cent."""
    return f"{spread([100 * value for value in values])}{unit}"


def title(runs: Runs) -> str:
    """Who was trained, on what data."""
    data = " and ".join(dict.fromkeys(run.data for run in runs.runs if run.data))
    names = list(runs.ranked or runs.groups)
    what = " and ".join(names) if len(names) <= 2 else f"{len(names)} methods"
    if not runs.alone and runs.ranked and len(runs.ranked) < len(runs.groups):
        what += " and central training"
    return f"{what} on {data}" if data else what


def headline(runs: Runs) -> Markup:
    """The result in two or three sentences."""
    if not any(_finite(run.metrics.get("mAP")) for run in runs.runs):
        return Markup("There is no mAP to report yet.")
    return _run_headline(runs.first) if runs.alone else _comparison_headline(runs)


def _run_headline(run: RunView) -> Markup:
    model, data = run.setting("model", "name"), run.data
    trained = Markup("{} trained{}{} with {}").format(
        run.label,
        f" {_article(str(model))}" if model else " a model",
        f" on {data}" if data else "",
        count(int(run.start.get("clients") or 0), "client"),
    )
    images = run.start.get("test_images")
    reached = Markup(
        " After {} of {} rounds it reaches <strong>{} mAP</strong> and {} CF1{}."
    ).format(
        run.measured_after,
        run.rounds_total,
        percent(run.metrics.get("mAP", math.nan)),
        percent(run.metrics.get("CF1", math.nan)),
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
    return Markup(escape(text.format(percent(prevalence))))


def _comparison_headline(runs: Runs) -> Markup:
    if runs.differing:
        return Markup(
            "These runs differ in their {} settings: their numbers stand side by side, and none is "
            "called the best."
        ).format(" and ".join(runs.differing))
    scores = {
        name: {run.seed: run.metrics["mAP"] for run in group if _finite(run.metrics.get("mAP"))}
        for name, group in runs.groups.items()
    }
    measured = [name for name in scores if scores[name]]
    competing = [name for name in measured if name in runs.ranked] or measured
    first, *others = sorted(competing, key=lambda name: -statistics.fmean(scores[name].values()))
    found = list(scores[first].values())
    if not others:
        only = Markup("Only <strong>{}</strong> has been measured yet: <strong>{}</strong> mAP.")
        return only.format(first, _spread(found))
    unfinished = runs.missing or any(run.status != "completed" for run in runs.runs)
    text = Markup("{}<strong>{}</strong> has the highest mAP: <strong>{}</strong>{}.").format(
        "So far, " if unfinished else "",
        first,
        _spread(found),
        f" over {count(len(found), 'seed')}" if len(found) > 1 else " (one seed)",
    )
    text += difference_sentence(first, others[0], scores)
    for name in measured:
        if name not in competing:
            apart = " Trained in one place ({}), which is no federated method: {}."
            text += Markup(escape(apart.format(name, _spread(list(scores[name].values())))))
    return text + _baseline_sentence(next((r for r in runs.runs if r.baselines), runs.first))


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def difference_sentence(
    best: str, second: str, scores: Mapping[str, Mapping[int, float]]
) -> Markup:
    """How far ahead the best is, on the seeds both have, and whether the seeds agree."""
    shared = sorted(scores[best].keys() & scores[second].keys())
    text = Markup(" Next is {} with {}").format(second, _spread(list(scores[second].values())))
    if not shared:
        return text + "; they share no seed."
    gaps = [scores[best][s] - scores[second][s] for s in shared]
    if len(gaps) == 1:
        # Of the numbers as they are shown: whoever subtracts them finds the same.
        gap = round(100 * scores[best][shared[0]], 1) - round(100 * scores[second][shared[0]], 1)
        return text + Markup(
            "; the difference is {} points on one seed, so its spread is unknown."
        ).format(f"{gap:.1f}".replace("-", "−"))
    text += Markup("; seed by seed the difference is {} points").format(_spread(gaps, unit=""))
    if statistics.fmean(gaps) <= statistics.stdev(gaps):
        return text + ", no more than its own spread."
    return text + "."


def facts(runs: Runs) -> list[str]:
    """What was run, in figures."""
    run, start = runs.first, runs.first.start
    found = []
    if not runs.alone:
        found.append(count(len(runs.ranked or runs.groups), "method"))
        found.append(count(runs.seeds, "seed"))
    if start.get("clients"):
        cohort = f", {start['cohort']:,} per round" if start.get("cohort") else ""
        found.append(f"{count(int(start['clients']), 'client')}{cohort}")
    found.append(count(runs.rounds, "round"))
    found.append(count(len(run.classes), "label"))
    for key, words in (
        ("train_images", "training images"),
        ("test_images", "test images"),
        ("parameters", "parameters"),
    ):
        if isinstance(start.get(key), int):
            found.append(f"{start[key]:,} {words}")
    if start.get("device"):
        found.append(str(start["device"]))
    if runs.alone and run.privacy:
        found += privacy_facts(run.privacy)
    if runs.alone:
        found.append(f"seed {run.seed}")
        if math.isfinite(run.seconds):
            found.append(duration(run.seconds))
    return found


def notices(runs: Runs) -> list[str]:
    """What limits the numbers below, most important first."""
    found = []
    for name, group in runs.groups.items():
        for run in group:
            who = "This run" if runs.alone else f"{name}, seed {run.seed}"
            found += [f"{who} {text}" for text in _shortcomings(run)]
    if runs.missing:
        names = ", ".join(f"{label} seed {seed}" for label, seed in runs.missing)
        found.append(f"Not started yet: {names}.")
    found += [
        f"The runs differ in their {section} settings, so their numbers may not be comparable (see "
        "the settings below)."
        for section in runs.differing
    ]
    return found


def _shortcomings(run: RunView) -> list[str]:
    found = []
    progress = f"{run.rounds_done} of {count(run.rounds_total, 'round')}"
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
    if run.privacy.get("reproducible", bool(run.privacy)):
        found.append("is not private: its noise can be reproduced.")
    stale = int(run.results.get("rounds_done") or 0)
    if run.results and stale != run.rounds_done:
        found.append(f"has label scores and correlations as they were after round {stale}.")
    if run.clients_lost:
        found.append(
            f"lost {count(run.clients_lost, 'client reply', 'client replies')} for good: its "
            "rounds went on with the others, and its numbers are not those of an undisturbed run "
            "(see Failures)."
        )
    for cause, times in run.fallbacks.items():
        done, advice = CAUSES.get(cause, (f"fell back ({cause})", "see the log"))
        rounds = f"{'round' if len(times) == 1 else 'rounds'} {some([str(t) for t in times])}"
        found.append(f"{done} ({count(sum(times.values()), 'time')}, in {rounds}): {advice}.")
    if run.damaged_lines:
        lines = count(run.damaged_lines, "line")
        found.append(f"has {lines} in events.jsonl that could not be read and are left out here.")
    return found


def tiles(runs: Runs) -> list[tuple[str, str, str]]:
    """Headline numbers of a single run: name, value, and what to compare it with."""
    if not runs.alone or not runs.first.metrics:
        return []
    run = runs.first
    found = []
    for name, baseline in (
        ("mAP", "prevalence"),
        ("O-mAP", "prevalence"),
        ("CF1", "all positive"),
        ("OF1", "all positive"),
    ):
        beside = run.baselines.get(baseline, {}).get(name, math.nan)
        text = f"{baseline} {percent(beside)}" if math.isfinite(beside) else ""
        found.append((name, percent(run.metrics.get(name, math.nan)), text))
    pearson = run.structure.get("soft_pearson", math.nan)
    if math.isfinite(pearson):
        found.append(("structure r", f"{pearson:.2f}", "1 = that of the test labels"))
    return found


def metric_rules(runs: Runs) -> list[str]:
    """The conventions behind the numbers, in words."""
    run = next((run for run in runs.runs if run.results), runs.first)
    options = run.results.get("metric_options") or {}
    if not options:
        return []
    labels = len(run.classes)
    present = run.results.get("n_classes_with_positives")
    never = run.results.get("n_classes_never_predicted") if runs.alone else None
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
