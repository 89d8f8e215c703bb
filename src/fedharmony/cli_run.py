"""The commands that train: run, resume, compare, sweep, tune and demo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedharmony.cli_crowd import crowd_of, progress_of, workers_of
from fedharmony.cli_guard import repeatable, resumable
from fedharmony.cli_options import (
    Against,
    ConfigArgument,
    Device,
    Devices,
    DryRun,
    Jobs,
    Methods,
    Out,
    Overrides,
    Plugins,
    Quiet,
    RunFolderArgument,
    Seeds,
    changes_of,
    complete_methods,
    hush,
    import_torch,
    settings_of,
    words_of,
)
from fedharmony.cli_report import show_folder, show_runs
from fedharmony.cli_settings import print_plan
from fedharmony.config import refuse_chosen
from fedharmony.errors import ConfigError, RunsFailedError
from fedharmony.experiments.crowd import Crowd
from fedharmony.report.progress import Observer, Progress
from fedharmony.terminal import columns, console, say

if TYPE_CHECKING:
    from fedharmony.experiments.compare import Planned
    from fedharmony.experiments.evaluate import Results
    from fedharmony.experiments.folder import RunFolder
    from fedharmony.experiments.settings import Settings
    from fedharmony.experiments.sweep import Point
    from fedharmony.report.load import Runs


def run(
    config: ConfigArgument,
    overrides: Overrides = None,
    out: Out = None,
    device: Device = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="`flower-sim`: clients work in Ray's processes, for those with a Ray cluster."
        ),
    ] = None,
    quiet: Quiet = False,
    dry_run: DryRun = False,
    plugin: Plugins = None,
) -> None:
    """Train one method, as a config file says.

    Example: `fedharmony run demo run.method=fedavg run.rounds=5`

    The run folder (by default `runs/CONFIG-METHOD-seedN`) holds config, environment, partition,
    one JSON line per event, a checkpoint after every round, results and report. The same command
    again continues the run, or shows it if it is finished; other settings get another folder.
    """
    settings = settings_of(config, overrides, device, plugin)
    start = _start(on)
    from fedharmony.experiments.folder import RunFolder, choose_folder, folder_name

    method = folder_name(settings.label)
    usual = Path("runs") / f"{Path(config).stem}-{method}-seed{settings.run.seed}"
    folder, _ = choose_folder(out, usual, lambda at: RunFolder(at).refuse_if_taken(settings))
    if dry_run:
        from fedharmony.experiments.compare import Planned
        from fedharmony.experiments.dry_run import plan_of_runs

        return print_plan(plan_of_runs(folder, [Planned(settings, RunFolder(folder))]))
    return _carry_out(folder, quiet, lambda o: start(settings, RunFolder(folder), o))


def resume(
    folder: RunFolderArgument,
    device: Annotated[
        str | None, typer.Option(help="Another device than the run's own; same up to rounding.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Continue a run that was stopped or killed; on a CPU the result is the same to the bit.

    Example: `fedharmony resume runs/demo-fedharmony-seed0`
    """
    import_torch()
    from fedharmony.experiments import run as runs
    from fedharmony.experiments.folder import RunFolder

    run_folder = RunFolder(folder)
    run_folder.open()
    if run_folder.results() is not None and not quiet:
        say(f"{folder} is already complete; nothing to do.", err=True)
    _carry_out(folder, quiet, lambda observe: runs.resume(run_folder, observe, device))


def _start(on: str | None) -> Callable[[Settings, RunFolder, Observer], Results]:
    """What starts a run on the engine of that name."""
    if on is None:
        from fedharmony.experiments import run as runs

        return runs.start
    if on != "flower-sim":
        raise ConfigError(f"--on {on}: there is 'flower-sim', and without --on our own engine.")
    try:
        from fedharmony.flower import simulated
    except ImportError:
        raise ConfigError(
            "Flower is not installed. Install it with pip install 'fedharmony[flower-sim]'."
        ) from None
    return simulated.start


def _carry_out(folder: Path, quiet: bool, work: Callable[[Observer], object]) -> None:
    """Follow one run, and show its table and report; of several processes the first does so."""
    from fedharmony.transport.processes import process_group

    leads = process_group().leads
    with Progress(quiet=hush(quiet or not leads)) as progress, resumable(folder):
        work(progress)
    if leads:
        show_folder(folder, quiet)


def compare(
    config: ConfigArgument,
    overrides: Overrides = None,
    method_list: Methods = "fedavg,fedharmony",
    seeds: Seeds = "0,1,2",
    against: Against = None,
    jobs: Jobs = None,
    out: Out = None,
    device: Devices = None,
    quiet: Quiet = False,
    dry_run: DryRun = False,
    plugin: Plugins = None,
) -> None:
    """Train several methods on several seeds: same data, split and cohorts for all.

    Example: `fedharmony compare demo --methods fedavg,fedharmony,fedharmony:a --seeds 0,1,2`

    Finished runs are skipped and unfinished ones continued, so the same command can be repeated or
    extended. With `--jobs N`, N runs go on at once and share the CPU threads. The table (mean ± sd)
    is printed and written as table.md, table.csv and table.tex.
    """
    refuse_chosen(overrides or ())
    crowd = crowd_of("compare", jobs, device)
    settings = settings_of(config, overrides, crowd.device, plugin)
    from fedharmony.experiments import compare as comparison
    from fedharmony.experiments.folder import choose_folder
    from fedharmony.experiments.sweep import Point

    usual = Path("runs") / f"{Path(config).stem}-comparison"
    names, numbers = words_of(method_list), _numbers(seeds)
    folder, planned = choose_folder(
        out, usual, lambda at: comparison.plan(settings, names, numbers, at, crowd, against)
    )
    if dry_run:
        from fedharmony.experiments.dry_run import plan_of_runs

        return print_plan(plan_of_runs(folder, planned, crowd))
    index = partial(comparison.write_index, folder, Path(config).stem, planned, against)
    trained, failed = _train([Point({}, folder, planned)], folder, quiet, crowd, index)
    for runs in trained:
        show_runs(runs, quiet)
    if failed is not None:
        raise failed
    return None


def sweep(
    config: ConfigArgument,
    overrides: Overrides = None,
    method_list: Methods = "fedavg,fedharmony",
    seeds: Seeds = "0,1,2",
    jobs: Jobs = None,
    out: Out = None,
    device: Devices = None,
    quiet: Quiet = False,
    dry_run: DryRun = False,
    plugin: Plugins = None,
) -> None:
    """Compare methods at every value of a setting: lines with bands, tables, a page.

    Example: `fedharmony sweep demo split.gamma=0.1,0.3,1 --methods fedavg,fedharmony --seeds 0,1`

    A setting with several values, separated by commas, is varied; of several such settings every
    combination is tried. Finished runs are skipped and unfinished ones continued, so the same
    command can be repeated or extended. Each combination is a comparison in a folder of its own.
    """
    crowd = crowd_of("sweep", jobs, device)
    from fedharmony.experiments import sweep as sweeps
    from fedharmony.experiments.folder import choose_folder
    from fedharmony.report.sweep import table_of, write_sweep

    changes = changes_of(overrides, crowd.device, plugin)
    names, numbers = words_of(method_list), _numbers(seeds)
    folder, points = choose_folder(
        out,
        Path("runs") / f"{Path(config).stem}-sweep",
        lambda at: sweeps.plan(config, changes, names, numbers, at, crowd),
    )
    if dry_run:
        from fedharmony.experiments.dry_run import plan_of_sweep

        return print_plan(plan_of_sweep(points, folder, crowd))
    index = partial(sweeps.write_index, folder, Path(config).stem, points)
    _, failed = _train(points, folder, quiet, crowd, index)
    swept, screen = write_sweep(folder), console()
    screen.print(table_of(swept).to_rich(screen.width))
    if not quiet:
        screen.print(f"Report: {folder / 'report.html'}", soft_wrap=True)
    if failed is not None:
        raise failed
    return None


def tune(
    config: ConfigArgument,
    overrides: Overrides = None,
    method_list: Annotated[
        str,
        typer.Option(
            "--methods",
            autocompletion=complete_methods,
            help="Comma-separated methods; `all` takes every method.",
        ),
    ] = "all",
    jobs: Jobs = None,
    out: Out = None,
    device: Devices = None,
    quiet: Quiet = False,
    dry_run: DryRun = False,
    plugin: Plugins = None,
) -> None:
    """Search the learning rate and settings of each method, on held-out training images.

    Example: `fedharmony tune demo tune.rounds=8 --methods fedavg,fedprox`

    Every trial is a run that is evaluated on images held out of the training clients; the test set
    is not looked at. Writes tune.json (all trials) and tuned.toml, which goes on top of the same
    config: `fedharmony compare demo tuned/tuned.toml --methods fedavg,fedprox`. Finished trials are
    kept, so the same command can be repeated or extended.
    """
    refuse_chosen(overrides or (), ("run.method",))
    crowd = crowd_of("tune", jobs, device)
    from fedharmony.experiments.folder import choose_folder
    from fedharmony.experiments.tune import CRITERION, Search

    settings, names = settings_of(config, overrides, crowd.device, plugin), words_of(method_list)
    usual = Path("runs") / f"{Path(config).stem}-tuned"
    folder, search = choose_folder(out, usual, lambda at: Search(settings, names, at, crowd))
    if dry_run:
        from fedharmony.experiments.dry_run import plan_of_search

        return print_plan(plan_of_search(search))
    with progress_of(crowd, quiet) as progress, repeatable(folder), workers_of(crowd) as workers:

        def observer(i: int, planned: Planned) -> Observer:
            name = f"{planned.label} {planned.folder.path.name}"
            return progress.follow(i + 1, search.size, name, planned.settings.run.rounds)

        found = search.run(observer, progress, workers)
    scores = (f"{CRITERION} before", f"{CRITERION} found")
    table = columns("Method", "lr", "setting", *scores, "", right=("lr", *scores, ""))
    for f in found:
        table.add_row(
            f.method,
            f"{f.lr:g}",
            ", ".join(map(str, f.choices)),
            "" if f.start is None else f"{100 * f.start:.1f}",
            f"{100 * f.score:.1f}",
            "; ".join(f"{name} is at the end of its grid" for name in f.edges),
        )
    screen = console()
    screen.print(table)
    if not quiet:
        screen.print(f"Settings: {folder / 'tuned.toml'}", soft_wrap=True)
    return None


def demo(
    out: Out = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0",
    rounds: Annotated[int | None, typer.Option(help="Fewer rounds for a quicker look.")] = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """FedAvg and FedHarmony side by side, each also as `:plus`, on data the package makes itself.

    With `plus` a method starts with a head solved in closed form and ends with an averaged model.
    Needs no data and no network and takes about a minute and a half on two CPU cores.
    """
    changes = [] if rounds is None else [f"run.rounds={rounds}"]
    names = "fedavg,fedharmony,fedavg:plus,fedharmony:plus"
    compare("demo", changes, names, seeds, out=out, device=device, quiet=quiet)


def _train(
    points: Sequence[Point],
    folder: Path,
    quiet: bool,
    crowd: Crowd,
    write_index: Callable[[], None],
) -> tuple[list[Runs], RunsFailedError | None]:
    """Carry out comparisons and write the tables of those that have results; and what failed."""
    from fedharmony.experiments import sweep as sweeps
    from fedharmony.experiments.compare import execute
    from fedharmony.experiments.folder import RunFolder
    from fedharmony.report.load import load
    from fedharmony.report.tables import write_tables

    every = [(f"{point.name} ".lstrip(), run) for point in points for run in point.runs]
    every.sort(key=lambda named: named[1].results is None)  # who counts them counts finished first
    planned = [run for _, run in every]
    failed: RunsFailedError | None = None
    with progress_of(crowd, quiet) as progress, repeatable(folder), workers_of(crowd) as workers:
        data = sweeps.rehearse(points, progress)

        def observer(i: int, run: Planned) -> Observer:
            title = f"{every[i][0]}{run.label} seed {run.seed}"
            return progress.follow(i + 1, len(planned), title, run.settings.run.rounds)

        with ExitStack() as held:
            for place in dict.fromkeys([folder, *(point.folder for point in points)]):
                held.enter_context(RunFolder(place).writing())
            write_index()  # can be reported from now on
            try:
                if workers is None:
                    execute(planned, observer, data)
                else:
                    workers.execute(planned, observer)
            except RunsFailedError as error:
                failed = error
            begun = [p.folder for p in points if any(run.results is not None for run in p.runs)]
            found = [load(place) for place in begun]
            for runs in found:
                write_tables(runs)
    return found, failed


def _numbers(text: str) -> list[int]:
    try:
        seeds = [int(word) for word in words_of(text)]
    except ValueError:
        raise ConfigError(f"--seeds {text!r} must be whole numbers, for instance 0,1,2.") from None
    if any(seed < 0 for seed in seeds):
        raise ConfigError(f"--seeds {text!r}: seeds must not be negative.")
    return seeds
