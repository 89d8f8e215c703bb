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

from fedharmony.cli_guard import repeatable
from fedharmony.cli_options import Quiet, usable
from fedharmony.config import machine_memory
from fedharmony.errors import ConfigError, RunsFailedError
from fedharmony.report.progress import Board, Observer, Progress, duration
from fedharmony.terminal import console, say

if TYPE_CHECKING:
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
        typer.Option(help="demo: built-in data; small: ViT-Ti on VOC 2012; paper: its constants."),
    ] = "demo",
    data: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Your copy of the data; of several sets NAME=PATH."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(callback=usable, help="Weights of the backbone, as a file.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", callback=usable, help="Folder for everything.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, max=3, help="Seeds of each point at most; 3 by default.")
    ] = None,
    jobs: Annotated[int, typer.Option("--jobs", "-j", min=1, max=1024, help="Runs at once.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1, ….")] = None,
    quiet: Quiet = False,
) -> None:
    """Go through the tables, figures and theorems of the FedHarmony paper.

    Example: `fedharmony reproduce all --scale demo --jobs 2`

    Without an item, lists all of them. Items share their runs; finished runs are kept and
    unfinished ones continued, so the same command can be stopped and repeated. Writes tables,
    figures, results.json and one report.html.
    """
    from fedharmony.paper.item import all_items, items
    from fedharmony.paper.scale import scale_of

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
    _reproduce(asked, every, chosen, home, _jobs(chosen, home, data, weights, device, jobs), quiet)


def _jobs(
    scale: Scale,
    home: Path,
    data: Sequence[str] | None,
    weights: Path | None,
    device: str | None,
    jobs: int,
) -> list[Job]:
    """One for each study of the scale, with the user's paths."""
    from fedharmony.paper.plan import Job, paths_of

    paths = paths_of(scale, data or ())
    common = [] if device is None else [f'engine.device="{device}"']
    common += [] if weights is None else [f"model.weights='{weights.resolve()}'"]
    found = []
    for study in scale.studies:
        own = (f"data.path='{paths[study.name]}'",) if study.name in paths else ()
        found.append(Job(scale, study, home / study.name, (*own, *common), jobs))
    return found


def _list(every: Sequence[Item], scale: Scale, home: Path) -> None:
    """All items: claim, needs, times, and which were run."""
    from fedharmony.paper.item import concerns
    from fedharmony.paper.plan import seconds
    from fedharmony.paper.scale import SCALES

    jobs = _jobs(scale, home, None, None, None, 1)
    table = Table(box=box.HORIZONTALS, pad_edge=False, show_lines=True)
    table.add_column("item", no_wrap=True)
    table.add_column("the paper says", ratio=1)
    table.add_column("takes about", no_wrap=True)
    table.add_column("here", no_wrap=True)
    for item in every:
        times = [f"{n}: {duration(seconds(item, one))}" for n, one in SCALES.items()]
        fitting = [job for job in jobs if concerns(item, job.study)]
        done = [job.found(item) is not None for job in fitting]
        state = "done" if all(done) else f"{sum(done)} of {len(done)}" if any(done) else "–"
        table.add_row(Text(item.name, "bold"), item.claim, "\n".join(times), state)
    screen = console()
    screen.print(table)
    screen.print(f"here: in {home}.")
    for one in SCALES.values():
        needs = "; ".join(f"{s.name}: {s.needs}" for s in one.studies if s.needs) or "no data"
        screen.print(f"{one.name}: {needs}. Times: about, on {one.machine}, without shared runs.")


def _reproduce(
    asked: Sequence[Item],
    every: Sequence[Item],
    scale: Scale,
    home: Path,
    jobs: Sequence[Job],
    quiet: bool,
) -> None:
    from fedharmony.experiments.folder import RunFolder
    from fedharmony.experiments.jobs import Workers
    from fedharmony.paper import output
    from fedharmony.paper.item import concerns
    from fedharmony.paper.plan import execute, in_order, refuse_other_runs, rehearsed, unfinished

    crowd = jobs[0].jobs
    places = in_order((place for job in jobs for place in job.places(asked)), crowd)
    refuse_other_runs(places)
    left = unfinished(places)
    _refuse_missing_data(jobs, asked)
    memory = _memory(left, jobs)
    if not quiet:
        for line in [*_outlook(places, left, scale, jobs, asked), *memory]:
            say(line)
    failed: RunsFailedError | None = None
    command = shlex.join(["fedharmony", *sys.argv[1:]])
    shown = (Board if crowd > 1 else Progress)(quiet=quiet)
    with shown as progress, repeatable(home), ExitStack() as stack:
        workers = stack.enter_context(Workers(crowd)) if crowd > 1 and left else None
        data = rehearsed(places, progress)
        stack.enter_context(RunFolder(home).writing())

        def observer(i: int, place: Place) -> Observer:
            rounds = place.run.settings.run.rounds
            return progress.follow(i + 1, len(places), place.title, rounds)

        try:
            execute(places, data, observer, workers)
        except RunsFailedError as error:
            failed = error
        for job in jobs:
            for item in asked:
                if concerns(item, job.study) and job.measured(item) is None:
                    if not quiet:
                        say(f"{item.name}: measuring {item.measures}")
                    job.measure(item)
        found = output.outcomes(jobs, every)
        output.write(home, scale.name, found, command)
    for outcome in found:
        if outcome.item in asked:
            say(f"{outcome.item.title} ({outcome.job.study.title})\n  {outcome.shown.verdict}")
    if not quiet:
        say(f"Report: {home / output.REPORT}")
    if failed is not None:
        raise failed


def _refuse_missing_data(jobs: Sequence[Job], asked: Sequence[Item]) -> None:
    """Refuse to begin where there is something to train or measure, and no data to do it with."""
    from fedharmony.paper.item import concerns
    from fedharmony.paper.plan import unfinished

    for job in jobs:
        own = [item for item in asked if concerns(item, job.study)]
        runs = len(unfinished(job.places(own)))
        measured = [item.name for item in own if job.measured(item) is None]
        given = any(change.startswith("data.path=") for change in job.changes)
        if job.study.needs and not given and (runs or measured):
            what = f"{runs} runs" + (f" and measuring {', '.join(measured)}" if measured else "")
            raise ConfigError(
                f"The scale {job.scale.name!r} needs data for {job.study.title}: {what} are still "
                f"to be done. Give --data {job.study.name}=PATH ({job.study.needs}), or bring "
                f"finished run folders to {job.home / 'runs'}."
            )


def _outlook(
    places: Sequence[Place],
    left: Sequence[Place],
    scale: Scale,
    jobs: Sequence[Job],
    asked: Sequence[Item],
) -> list[str]:
    """What is about to be done, and how long that takes."""
    from fedharmony.paper.item import concerns

    total = 0.0
    for job in jobs:
        own = [place for place in left if place.run.folder.path.is_relative_to(job.home)]
        total += sum(place.part.cost for place in own) * job.study.seconds / scale.at_once
        total += sum(
            i.measuring for i in asked if concerns(i, job.study) and job.measured(i) is None
        )
    lines = [f"{len(places)} runs in all, {len(places) - len(left)} finished."]
    if total:
        lines.append(f"What is left takes about {duration(total)} on {scale.machine}.")
    if left and any(job.study.needs for job in jobs):
        lines += _on_cpu(left)
    return lines


def _memory(left: Sequence[Place], jobs: Sequence[Job]) -> list[str]:
    """What the runs at once take of this machine's memory; refused if that is more than it has."""
    sizes = {job.study.name: job.study.gigabytes for job in jobs}
    # The largest runs may be under way at the same time.
    known = sorted((size for place in left if (size := sizes[place.study])), reverse=True)
    if not known:
        return []
    at_once, there = known[: jobs[0].jobs], machine_memory() / 1e9
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
    from fedharmony.experiments.dry_run import plan_of_run

    first = left[0]
    (run,) = plan_of_run(first.run.settings, first.run.folder.path / "plan").groups
    if run.seconds is None:
        return []
    whole = run.seconds * sum(place.part.cost for place in left) / first.part.cost
    return [
        f"Without a GPU, as here, one run takes about {duration(run.seconds)} and all that is left "
        f"{duration(whole)}. --device names another device; Ctrl-C stops, the same command goes on."
    ]
