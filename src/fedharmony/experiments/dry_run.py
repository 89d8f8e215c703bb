"""What a command would train, found out without training and without writing anything."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fedharmony.experiments.build import Contents, Draft, contents, draft
from fedharmony.experiments.compare import Planned
from fedharmony.experiments.crowd import ALONE, Crowd
from fedharmony.experiments.machine import choose_device, switch_torch
from fedharmony.experiments.outlook import scratch_warning, seconds_each, work
from fedharmony.experiments.settings import Settings
from fedharmony.experiments.sweep import Point
from fedharmony.experiments.tune import Search


@dataclass(frozen=True)
class Group:
    """Runs that differ in their seed at most, or in values that are tried; some may be done.

    ``seconds`` is about what the others take; none where that is not known.
    """

    label: str
    runs: int
    done: int
    rounds: int
    parameters: int
    seconds: float | None


@dataclass(frozen=True)
class Plan:
    """What a command would do: data, split, model and device in words, its runs, and warnings.

    So many runs go on ``at_once``.
    """

    folder: Path
    facts: dict[str, str]
    groups: tuple[Group, ...]
    warnings: tuple[str, ...] = ()
    at_once: int = 1


def plan_of_search(search: Search) -> Plan:
    """The plan of ``fedharmony tune``: how many trials there are, not which."""
    trials = {name: search.trial(name, search.rates()[0], {}) for name in search.methods}
    counted = [trials[name] for name in search.methods for _ in range(search.count(name))]
    return plan_of_runs(search.out, counted, search.crowd)


def plan_of_sweep(points: Sequence[Point], folder: Path, crowd: Crowd = ALONE) -> Plan:
    """The plan of ``fedharmony sweep``: what all points have in common, and the runs of each."""
    plans = [plan_of_runs(folder, point.runs, crowd) for point in points]
    facts = {
        name: words if all(plan.facts[name] == words for plan in plans) else "one for each point"
        for name, words in plans[0].facts.items()
    }
    groups = tuple(
        replace(group, label=f"{point.name} {group.label}")
        for point, plan in zip(points, plans, strict=True)
        for group in plan.groups
    )
    warnings = dict.fromkeys(warning for plan in plans for warning in plan.warnings)
    return Plan(folder, facts, groups, tuple(warnings), crowd.size)


def plan_of_runs(folder: Path, runs: Sequence[Planned], crowd: Crowd = ALONE) -> Plan:
    """The plan of ``fedharmony run`` and ``compare``."""
    settings = runs[0].settings
    switch_torch(settings.engine)
    data = contents(settings, complete=True)
    chosen = {run.label: run.settings for run in runs}  # one of those that differ in their seed
    drafts = {label: draft(own, data) for label, own in chosen.items()}
    for drafted in drafts.values():
        drafted.blueprint.initial_state()  # reads weights, and lets the method refuse
    first = drafts[runs[0].label]
    images = sum(first.blueprint.facts.sizes.values())
    warnings = [drafted.blueprint.method.remark for drafted in drafts.values()]
    warnings.append(scratch_warning(first.blueprint, images) or "")
    groups = tuple(_group(label, runs, drafted, data) for label, drafted in drafts.items())
    facts = _facts(settings, first, data)
    if crowd.size > 1:
        facts |= _at_once(settings, crowd)
    return Plan(folder, facts, groups, tuple(filter(None, warnings)), crowd.size)


def _at_once(settings: Settings, crowd: Crowd) -> dict[str, str]:
    engine = settings.engine
    words = f"{crowd.size} runs, each in a process with {engine.threads} CPU threads"
    if choose_device(engine.device).type == "cuda":
        words += f" and up to {100 * (engine.gpu_share or 1):.0f} % of a GPU's memory"
    places = {"device": ", ".join(crowd.devices)} if crowd.devices else {}
    return {**places, "at once": f"{words}; each process has the data in its own memory"}


def _group(label: str, runs: Iterable[Planned], drafted: Draft, data: Contents) -> Group:
    own = [run for run in runs if run.label == label]
    done = sum(run.results is not None for run in own)
    plan, left = drafted.blueprint, None
    if choose_device(plan.settings.engine.device).type == "cpu":
        tested = len(data.test.labels) if drafted.held_out is None else len(drafted.held_out)
        left = seconds_each(plan) * work(plan, tested)[1] * (len(own) - done)
    rounds, parameters = plan.settings.run.rounds, plan.model.num_parameters
    return Group(label, len(own), done, rounds, parameters, left)


def _facts(settings: Settings, drafted: Draft, data: Contents) -> dict[str, str]:
    blueprint, split = drafted.blueprint, settings.split.common
    sizes = sorted(blueprint.facts.sizes.values())
    tested = f"{len(data.test.labels):,} for the test"
    if drafted.held_out is not None:
        tested = f"{len(drafted.held_out):,} of them held out instead of the test set"
    return {
        "data": f"{settings.data.common.name}: {len(data.train.labels):,} {data.input} for "
        f"training, {tested}, {len(data.classes):,} labels",
        "split": f"{split.file or split.name}: {len(sizes):,} clients with {sizes[0]:,} to "
        f"{sizes[-1]:,} images; {blueprint.cohort:,} per round",
        "model": settings.model.common.name,
        "device": str(choose_device(settings.engine.device)),
    }
