"""The command that goes through the paper: reproduce."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.table import Table
from rich.text import Text

from fedharmony import stopping
from fedharmony.cli_crowd import crowd_of, progress_of, workers_of
from fedharmony.cli_guard import repeatable
from fedharmony.cli_options import Devices, Jobs, Quiet, changes_of, usable
from fedharmony.config import in_toml, machine_memory, refuse_chosen
from fedharmony.errors import ConfigError, FedHarmonyError, RunsFailedError
from fedharmony.experiments.crowd import ALONE, Crowd
from fedharmony.report.progress import Observer, duration
from fedharmony.terminal import console, say

if TYPE_CHECKING:
    from fedharmony.experiments.compare import Planned
    from fedharmony.paper.item import Item
    from fedharmony.paper.plan import Job, Place
    from fedharmony.paper.scale import Scale


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ITEM]...", help="table1, fig5, theorem1, …, or `all`."),
    ] = None,
    scale: Annotated[
        str,
        typer.Option(help="demo: built-in data; small: ViT-Ti on yours; paper: its constants."),
    ] = "demo",
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Your copy of a data set, as voc2012=PATH."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(callback=usable, help="Weights of the backbone, as a file.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", callback=usable, help="Folder for everything.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=3, help="Seeds of each point; 3 by default.")
    ] = None,
    jobs: Jobs = None,
    device: Devices = None,
    quiet: Quiet = False,
) -> None:
    """Go through the tables, figures and theorems of the FedHarmony paper.

    Example: `fedharmony reproduce all --scale demo --jobs 2`

    Without an item, lists all of them. Items share their runs; finished runs are kept and
    unfinished ones continued, so the same command can be stopped and repeated. Of a scale with
    several data sets those are gone through that --data names. Writes tables, figures, results.json
    and one report.html.
    """
    from fedharmony.paper.item import all_items, items
    from fedharmony.paper.scale import scale_of

    refuse_chosen(names or ())
    chosen, every = scale_of(scale), all_items()
    if seeds is not None:
        studies = tuple(replace(study, seeds=seeds) for study in chosen.studies)
        chosen = replace(chosen, studies=studies)
    home = out or Path("runs") / f"paper-{chosen.name}"
    if not names:
        _list(every, chosen, home)
        return
    asked = every if "all" in names else [item for item in every if item.name in names]
    for name in names:
        _ = None if name == "all" else items[name]  # refuses one that does not exist
    crowd = crowd_of("reproduce", jobs, device)
    _reproduce(asked, every, home, _jobs(chosen, home, data, weights, crowd), quiet)


def _jobs(
    scale: Scale,
    home: Path,
    data: Sequence[str] | None = None,
    weights: Path | None = None,
    crowd: Crowd = ALONE,
) -> list[Job]:
    """One for each study of the scale, with the user's paths."""
    from fedharmony.paper.plan import Job, paths_of

    paths = paths_of(scale, data or ())
    common = [] if weights is None else [f"model.weights={in_toml(str(weights.resolve()))}"]
    found = []
    for study in scale.studies:
        own = [f"data.path={in_toml(paths[study.name])}"] if study.name in paths else []
        changes = changes_of([*own, *common], crowd.device)
        found.append(Job(scale, study, home / study.name, tuple(changes), crowd))
    return found


def _list(every: Sequence[Item], scale: Scale, home: Path) -> None:
    """All items: claim, times, and which were run; then what every scale needs."""
    from fedharmony.paper.plan import seconds, tasks
    from fedharmony.paper.scale import SCALES

    table = Table(box=box.HORIZONTALS, pad_edge=False, show_lines=True)
    table.add_column("item", no_wrap=True)
    table.add_column("the paper says", ratio=1)
    table.add_column("takes about", no_wrap=True)
    table.add_column("here", no_wrap=True)
    jobs = _jobs(scale, home)
    for item in every:
        studies = [job for job, _ in tasks(jobs, [item])]
        times = [
            f"{job.study.name}: {duration(seconds(item, job.study, scale))}" for job in studies
        ]
        done = [_state(job, item) for job in studies]
        table.add_row(Text(item.name, "bold"), item.claim, "\n".join(times), "\n".join(done))
    screen = console()
    screen.print(table)
    times_of = f"of each item alone, on {scale.machine} with --jobs {scale.jobs}"
    screen.print(f"Scale {scale.name}, in {home}. Times: {times_of}.")
    for one in SCALES.values():
        needs = [f"--data {s.name}=PATH ({s.needs})" for s in one.studies if s.needs]
        screen.print(f"--scale {one.name}: {', '.join(needs) or 'no data'}.")


def _state(job: Job, item: Item) -> str:
    """Whether an item is shown in the folder: with all seeds, with some, or not."""
    if not (job.home / item.name / "table.md").is_file():
        return "–"
    try:
        found = job.found_so_far(item)
    except FedHarmonyError:
        return "damaged"
    seeds = {seed for _, _, seed in found.folders} if found is not None else set()
    wanted = max((part.seeds for part in item.parts(job.study)), default=0)
    return (
        "–"
        if found is None
        else "done"
        if len(seeds) >= wanted
        else f"{len(seeds)} of {wanted} seeds"
    )


def _reproduce(
    asked: Sequence[Item], every: Sequence[Item], home: Path, jobs: Sequence[Job], quiet: bool
) -> None:
    from fedharmony.experiments.compare import execute
    from fedharmony.experiments.folder import RunFolder
    from fedharmony.paper import output
    from fedharmony.paper.plan import (
        in_order,
        refuse_other_runs,
        rehearsed,
        tasks,
        unfinished,
    )

    scale, crowd = jobs[0].scale, jobs[0].crowd
    there = (RunFolder(home).read_json(output.RESULTS) or {}).get("scale", scale.name)
    if there != scale.name:
        raise ConfigError(
            f"{home} holds a reproduction at scale {there!r}. Choose another folder with --out."
        )
    ready, left_out = _with_data(jobs, asked)
    places = in_order((place for job in ready for place in job.places(asked)), crowd.size)
    refuse_other_runs(places)
    left = unfinished(places)
    memory = _memory(left, jobs)
    if not quiet:
        for line in [*left_out, *_outlook(places, left, ready, asked), *memory]:
            say(line)
    failed: RunsFailedError | None = None
    command = shlex.join(["fedharmony", *sys.argv[1:]])
    with progress_of(crowd, quiet) as progress, repeatable(home), ExitStack() as stack:
        workers = stack.enter_context(workers_of(crowd)) if left else None
        data = rehearsed(places, progress)
        stack.enter_context(RunFolder(home).writing())

        def observer(i: int, run: Planned) -> Observer:
            rounds = run.settings.run.rounds
            return progress.follow(i + 1, len(places), places[i].title, rounds)

        runs = [place.run for place in places]
        try:
            if workers is None:
                execute(runs, observer, data)
            else:
                workers.execute(runs, observer)
        except RunsFailedError as error:
            failed = error
        for job, item in tasks(ready, asked):
            stopping.end_if_asked()
            if job.measured(item) is None:
                if not quiet:
                    say(f"{item.name}: measuring {item.measures}")
                job.measure(item)
        faults: dict[Item, Exception] = {}
        found = output.outcomes(jobs, every, faults)
        output.write(home, scale.name, found, command)
    for outcome in found:
        if outcome.item in asked:
            where = f" ({outcome.job.study.title})" if outcome.item.about_data else ""
            say(f"{outcome.item.title}{where}\n  {outcome.shown.verdict}")
    for item, fault in faults.items():
        say(f"{item.title} is not shown: {fault}", err=True)
    if not quiet:
        say(f"Report: {home / output.REPORT}")
    if failed is not None:
        raise failed
    for item in asked:
        if item in faults:
            raise faults[item]


def _with_data(jobs: Sequence[Job], asked: Sequence[Item]) -> tuple[list[Job], list[str]]:
    """The studies that have the data they still need, and what is said of the others.

    Refused where none has.
    """
    from fedharmony.paper.plan import tasks, unfinished
    from fedharmony.report.panel import count

    ready, lines = [], []
    own: dict[Job, list[Item]] = {}
    for job, item in tasks(jobs, asked):
        own.setdefault(job, []).append(item)
    for job, its in own.items():
        runs = len(unfinished(job.places(its)))
        measured = [item.name for item in its if job.measured(item) is None]
        given = any(change.startswith("data.path=") for change in job.changes)
        if given or not job.study.needs or not (runs or measured):
            ready.append(job)
            continue
        what = [count(runs, "run")] if runs else []
        what += [f"what is measured for {', '.join(measured)}"] if measured else []
        lines.append(
            f"{job.study.title}: {' and '.join(what)} to be done. Give --data "
            f"{job.study.name}=PATH ({job.study.needs}), or bring finished run folders to "
            f"{job.home / 'runs'}."
        )
    if lines and not ready:
        raise ConfigError(f"The scale {jobs[0].scale.name!r} needs data. {' '.join(lines)}")
    return ready, [f"Left out: {line}" for line in lines]


def _outlook(
    places: Sequence[Place], left: Sequence[Place], jobs: Sequence[Job], asked: Sequence[Item]
) -> list[str]:
    """What is about to be done, and how long that takes."""
    from fedharmony.paper.plan import tasks
    from fedharmony.report.panel import count

    scale, size = jobs[0].scale, jobs[0].crowd.size
    seconds = {job.study.name: job.study.seconds / min(scale.at_once, size) for job in jobs}
    total = sum(place.part.cost * seconds[place.study] for place in left)
    total += sum(item.measuring for job, item in tasks(jobs, asked) if job.measured(item) is None)
    lines = [f"{count(len(places), 'run')} in all, {len(places) - len(left)} finished."]
    if total:
        where = f"{scale.machine} with --jobs {size}"
        lines.append(f"What is left takes about {duration(total)} on {where}.")
    if left and any(job.study.needs for job in jobs):
        lines += _on_cpu(left)
    return lines


def _memory(left: Sequence[Place], jobs: Sequence[Job]) -> list[str]:
    """What the runs at once take of this machine's memory; refused if that is more than it has."""
    sizes = {job.study.name: job.study.gigabytes for job in jobs}
    # The largest runs may be under way at the same time.
    known = sorted((size for place in left if (size := sizes[place.study])), reverse=True)
    if not known:
        return ["How much memory these runs take was not measured."] if left else []
    at_once, there = known[: jobs[0].crowd.size], machine_memory() / 1e9
    taken = (
        f"A run takes up to about {known[0]:.1f} GB of memory, {len(at_once)} at once "
        f"{sum(at_once):.1f} GB; this machine has {there:.1f} GB."
    )
    if sum(at_once) > there:
        fewer = max(1, sum(total <= there for total in accumulate(at_once)))
        raise ConfigError(f"{taken} Use --jobs {fewer}, or a smaller --scale.")
    return [taken]


def _on_cpu(left: Sequence[Place]) -> list[str]:
    """How long it takes without a GPU, from one timed step of the first run."""
    from fedharmony.experiments.dry_run import plan_of_runs

    first = left[0]
    (run,) = plan_of_runs(first.run.folder.path, [first.run]).groups
    if run.seconds is None:
        return []
    whole = run.seconds * sum(place.part.cost for place in left) / first.part.cost
    return [
        f"Without a GPU, as here, one run takes about {duration(run.seconds)} and all that is left "
        f"{duration(whole)}. --device names another device; Ctrl-C stops, the same command goes on."
    ]
