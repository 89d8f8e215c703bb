"""The command line: training, comparing and reporting; :mod:`fedharmony.cli_data` has the rest."""

from __future__ import annotations

# torch and scikit-learn take seconds to import. What needs them is imported by the
# commands themselves, so that --help and mistyped commands answer at once.
import atexit
import errno
import gc
import importlib
import logging
import os
import shlex
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table
from rich.text import Text

import fedharmony
from fedharmony.cli_data import data_app, init, models_app, partition, usable
from fedharmony.cli_flower import flower_app
from fedharmony.cli_privacy import privacy
from fedharmony.cli_settings import (
    complete_change,
    complete_config,
    complete_methods,
    print_plan,
    print_settings,
    print_settings_list,
)
from fedharmony.cli_site import site_app
from fedharmony.cli_use import export, predict
from fedharmony.errors import (
    ClientLimitError,
    ConfigError,
    FedHarmonyError,
    RunsFailedError,
    Stopped,
)
from fedharmony.reading import is_folder
from fedharmony.registry import load_plugins
from fedharmony.report.progress import Board, Observer, Progress
from fedharmony.terminal import PlainFormatter, console, replace_unknown, say

if TYPE_CHECKING:
    from fedharmony.experiments.compare import Planned
    from fedharmony.experiments.jobs import Workers
    from fedharmony.experiments.settings import Settings
    from fedharmony.report.load import Runs

app = typer.Typer(
    name="fedharmony",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    help="Federated multi-label learning: FedHarmony (arXiv 2604.28024) and the methods it is "
    "compared with.\n\n"
    "New here? Run `fedharmony demo`: it needs no data and no network.",
)

#: The option that shows traces: wherever it stands, :func:`main` takes it out.
DEBUG = "--debug"

ConfigArgument = Annotated[
    str,
    typer.Argument(
        metavar="CONFIG",
        help="TOML file, or the name of a built-in one (demo).",
        autocompletion=complete_config,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE | CONFIG]...",
        help="Settings to change, for instance `train.lr=0.001` or `run.method=fedavg`, or further "
        "TOML files whose settings come on top.",
        autocompletion=complete_change,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option("--out", "-o", callback=usable, help="Folder for what the run writes."),
]
Device = Annotated[
    str | None, typer.Option(help="cpu, cuda, cuda:1, …; by default CUDA where there is one.")
]
Devices = Annotated[
    str | None,
    typer.Option(help="As for run; several, as in cuda:0,cuda:1, take turns in serving --jobs."),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs", "-j", min=1, max=1024, help="Runs at once, each in a process of its own."
    ),
]
Against = Annotated[
    str | None,
    typer.Option(
        help="Show how far every method lies from this one, with intervals: fedavg, for instance."
    ),
]


def _hush(quiet: bool) -> bool:
    """Leave warnings only of what the package says, from the first setting that is read."""
    if quiet:
        logging.getLogger("fedharmony").setLevel(logging.WARNING)
    return quiet


Methods = Annotated[
    str,
    typer.Option(
        "--methods",
        autocompletion=complete_methods,
        help="Comma-separated methods; `name:preset` picks a preset, `all` takes every method, "
        "`central` trains in one place, on as many images as the cohorts see.",
    ),
]
Seeds = Annotated[str, typer.Option(help="Comma-separated seeds of run and initial model.")]
Quiet = Annotated[
    bool,
    typer.Option("--quiet", "-q", metavar="", help="Print only the result.", callback=_hush),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        metavar="",
        help="Check everything and show the plan; train nothing, write no run.",
    ),
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", help="Python file that registers a method, data set, … of your own."),
]


class Kind(StrEnum):
    """What ``fedharmony list`` can list."""

    methods = "methods"
    datasets = "datasets"
    splitters = "splitters"
    models = "models"
    trackers = "trackers"
    configs = "configs"
    settings = "settings"


def _import_torch() -> None:
    """Import torch, and keep the garbage collector away from it from then on.

    What modules are made of lives to the end. Looking through its many thousand objects again and
    again, while torch is imported and each time that much is allocated later, would find nothing.
    """
    if "torch" in sys.modules:
        return
    gc.disable()
    try:
        importlib.import_module("torch")
    finally:
        gc.enable()
    gc.freeze()


def _changes(
    overrides: Sequence[str] | None, device: str | None, plugins: list[Path] | None
) -> list[str]:
    """What the options of a command say, as settings; plug-ins are loaded."""
    changes = list(overrides or ())
    if device is not None:
        changes.append(f'engine.device="{device}"')
    if plugins:
        load_plugins(plugins)
        files = ", ".join(f"'{path.resolve()}'" for path in plugins)
        changes.append(f"run.plugins=[{files}]")
    return changes


def _settings(
    config: str, overrides: Sequence[str] | None, device: str | None, plugins: list[Path] | None
) -> Settings:
    _import_torch()
    from fedharmony.experiments.settings import load_settings

    return load_settings(config, _changes(overrides, device, plugins))


class UnexpectedError(Exception):
    """What nobody foresaw happened while a folder was being written; its cause says what."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder


def _is_output_lost(error: Exception) -> bool:
    """Whether the disk or the device that is written to takes no more."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO)


@contextmanager
def _crashes_in(folder: Path) -> Iterator[None]:
    """Where the trace of an unexpected error belongs."""
    try:
        yield
    except (FedHarmonyError, BrokenPipeError, typer.Exit, typer.Abort):
        raise
    except Exception as error:
        if not _is_output_lost(error):
            raise UnexpectedError(folder) from error
        raise


def _guarded(folder: Path, work: Callable[[], Any]) -> Any:
    """Run ``work``; Ctrl-C and SIGTERM say how to go on."""
    try:
        with _crashes_in(folder):
            return work()
    except (KeyboardInterrupt, Stopped) as stop:
        say(
            f"\nStopped. Every finished round is saved; go on with\n  fedharmony resume "
            f"{shlex.quote(str(folder))}",
            err=True,
        )
        raise typer.Exit(_exit_code(stop)) from None


@contextmanager
def _repeatable(folder: Path) -> Iterator[None]:
    """A sequence of runs: Ctrl-C and SIGTERM say that the same command goes on."""
    try:
        with _crashes_in(folder):
            yield
    except (KeyboardInterrupt, Stopped) as stop:
        command = shlex.join(["fedharmony", *sys.argv[1:]])
        say(
            f"\nStopped. Finished runs and rounds are kept in {folder}; the same command goes on:\n"
            f"  {command}",
            err=True,
        )
        raise typer.Exit(_exit_code(stop)) from None


def _exit_code(stop: KeyboardInterrupt | Stopped) -> int:
    """What a shell expects of a program that a signal ended: 128 and its number."""
    return stop.code if isinstance(stop, Stopped) else 128 + signal.SIGINT


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM ends what runs inside as Ctrl-C does; a second one ends it at once.

    Of several processes only the first has something to save; the others end at once.
    """

    def stop(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise Stopped("SIGTERM", number)

    if os.environ.get("RANK", "0") != "0" or threading.current_thread() is not (
        threading.main_thread()
    ):
        yield
        return
    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _progress(quiet: bool, kind: type[Progress] = Progress) -> Progress:
    """Live progress, and what the parts of a run have to say; quiet, only their warnings."""
    return kind(quiet=_hush(quiet))


def _leads() -> bool:
    """Whether this process prints: the first of those that torchrun started, or the only one."""
    from fedharmony.transport.processes import crew

    return crew().leads


def _one_process(command: str) -> None:
    _import_torch()
    from fedharmony.transport.processes import crew

    if crew().size > 1:
        raise ConfigError(
            f"'fedharmony {command}' works in one process. Under torchrun use 'run' and 'resume'."
        )


def _show(folder: Path, quiet: bool) -> None:
    """The table of a run or comparison on the terminal, and its report page."""
    from fedharmony.report.load import load

    _show_runs(load(folder), quiet)


def _show_runs(runs: Runs, quiet: bool) -> None:
    from fedharmony.report.page import write_report
    from fedharmony.report.remarks import remarks
    from fedharmony.report.tables import table_of

    report, table = write_report(runs), table_of(runs)
    screen = console()
    screen.print(table.to_rich(screen.width))
    if table.differences is not None:
        screen.print(table.differences.to_rich())
    if not quiet:
        for remark in remarks(runs):
            screen.print(remark, soft_wrap=True, highlight=False)
        screen.print(f"Report: {report}", soft_wrap=True)


@app.command()
def run(
    config: ConfigArgument,
    overrides: Overrides = None,
    out: Out = None,
    device: Device = None,
    quiet: Quiet = False,
    dry_run: DryRun = False,
    plugin: Plugins = None,
) -> None:
    """Train one method, as a config file says.

    Example: `fedharmony run demo run.method=fedavg run.rounds=5`

    The run folder (by default `runs/CONFIG-METHOD-seedN`) holds config, environment, partition,
    one JSON line per event, a checkpoint after every round, results and report.
    """
    settings = _settings(config, overrides, device, plugin)
    from fedharmony.experiments import run as runs
    from fedharmony.experiments.folder import RunFolder, folder_name

    method = folder_name(settings.label)
    folder = out or Path("runs") / f"{Path(config).stem}-{method}-seed{settings.run.seed}"
    if dry_run:
        from fedharmony.experiments.dry_run import plan_of_run

        return print_plan(plan_of_run(settings, folder))
    with _progress(quiet or not _leads()) as progress:
        _guarded(folder, lambda: runs.start(settings, RunFolder(folder), progress))
    if _leads():
        _show(folder, quiet)
    return None


@app.command()
def resume(
    folder: Annotated[
        Path, typer.Argument(metavar="RUN", callback=usable, help="The folder of the run.")
    ],
    device: Annotated[
        str | None, typer.Option(help="Another device than the run's own; same up to rounding.")
    ] = None,
    quiet: Quiet = False,
) -> None:
    """Continue a run that was stopped or killed; on a CPU the result is the same to the bit.

    Example: `fedharmony resume runs/demo-fedharmony-seed0`
    """
    _import_torch()
    from fedharmony.experiments import run as runs
    from fedharmony.experiments.folder import RunFolder

    run_folder = RunFolder(folder)
    run_folder.open()
    if runs.finished(run_folder) is not None and not quiet:
        say(f"{folder} is already complete; nothing to do.", err=True)
    with _progress(quiet or not _leads()) as progress:
        _guarded(folder, lambda: runs.resume(run_folder, progress, device))
    if _leads():
        _show(folder, quiet)


@app.command()
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
    _one_process("compare")
    crowd = _Crowd(jobs, _words(device or ""))
    settings = _settings(config, overrides, crowd.devices[0] if crowd.devices else None, plugin)
    folder = out or Path("runs") / f"{Path(config).stem}-comparison"
    names, numbers = _words(method_list), _numbers(seeds)
    if dry_run:
        from fedharmony.experiments.dry_run import plan_of_comparison

        print_plan(plan_of_comparison(settings, names, numbers, folder))
    else:
        _compare(settings, Path(config).stem, names, numbers, folder, quiet, against, crowd)


@app.command()
def sweep(
    config: ConfigArgument,
    overrides: Overrides = None,
    method_list: Methods = "fedavg,fedharmony",
    seeds: Seeds = "0,1,2",
    jobs: Jobs = None,
    out: Out = None,
    device: Devices = None,
    quiet: Quiet = False,
) -> None:
    """Compare methods at every value of a setting: lines with bands, tables, a page.

    Example: `fedharmony sweep demo split.gamma=0.1,0.3,1 --methods fedavg,fedharmony --seeds 0,1`

    A setting with several values, separated by commas, is varied; of several such settings every
    combination is tried. Finished runs are skipped and unfinished ones continued, so the same
    command can be repeated or extended. Each combination is a comparison in a folder of its own.
    """
    _one_process("sweep")
    _import_torch()
    from fedharmony.experiments import sweep as sweeps
    from fedharmony.experiments.folder import RunFolder
    from fedharmony.report.load import load
    from fedharmony.report.sweep import table_of, write_sweep
    from fedharmony.report.tables import write_tables

    crowd = _Crowd(jobs, _words(device or ""))
    changes = _changes(overrides, crowd.devices[0] if crowd.devices else None, None)
    folder = out or Path("runs") / f"{Path(config).stem}-sweep"
    numbers = _numbers(seeds)
    points = sweeps.plan(config, changes, _words(method_list), numbers, folder, crowd.size)
    planned = [run for point in points for run in point.runs]
    failed: RunsFailedError | None = None
    with crowd.progress(quiet) as progress, _repeatable(folder), crowd.workers() as workers:
        data = sweeps.rehearse(points, progress)
        titles = [f"{point.name} {r.label} seed {r.seed}" for point in points for r in point.runs]

        def observer(i: int, run: Planned) -> Observer:
            return progress.follow(i + 1, len(planned), titles[i], run.settings.run.rounds)

        with RunFolder(folder).writing(), ExitStack() as held:
            sweeps.write_index(folder, Path(config).stem, points)
            for point in points:
                held.enter_context(RunFolder(point.folder).writing())
            try:
                if workers is None:
                    sweeps.execute(points, observer, data)
                else:
                    workers.execute(planned, observer)
            except RunsFailedError as error:
                failed = error
            for point in points:
                if any(run.results is not None for run in point.runs):
                    write_tables(load(point.folder))
            swept = write_sweep(folder)
    screen = console()
    screen.print(table_of(swept).to_rich(screen.width))
    if not quiet:
        screen.print(f"Report: {folder / 'report.html'}", soft_wrap=True)
    if failed is not None:
        raise failed


@app.command()
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
    _one_process("tune")
    from fedharmony.experiments.tune import CRITERION, Search

    crowd = _Crowd(jobs, _words(device or ""))
    settings = _settings(config, overrides, crowd.devices[0] if crowd.devices else None, plugin)
    folder = out or Path("runs") / f"{Path(config).stem}-tuned"
    if dry_run:
        from fedharmony.experiments.dry_run import plan_of_search

        return print_plan(plan_of_search(settings, _words(method_list), folder))
    search = Search(settings, _words(method_list), folder, crowd.size)
    with crowd.progress(quiet) as progress, _repeatable(folder), crowd.workers() as workers:

        def observer(i: int, planned: Planned) -> Observer:
            name, rounds = (
                f"{planned.label} {planned.folder.path.name}",
                planned.settings.run.rounds,
            )
            return progress.follow(i + 1, search.size, name, rounds)

        found = search.run(observer, progress, workers)
    table = Table(box=None, pad_edge=False)
    for heading in ("Method", "lr", "setting", f"{CRITERION} before", f"{CRITERION} found", ""):
        table.add_column(heading, justify="left" if heading in ("Method", "setting") else "right")
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


@app.command()
def show(
    config: ConfigArgument,
    overrides: Overrides = None,
    device: Device = None,
    plugin: Plugins = None,
) -> None:
    """Show every setting that a run would have, and where each value comes from.

    Example: `fedharmony show demo methods/fedprox train.lr=0.01`

    What is printed is a config file itself: `fedharmony show demo > mine.toml`.
    """
    _import_torch()
    print_settings(config, _changes(overrides, device, plugin))


@app.command()
def demo(
    out: Out = None,
    seeds: Annotated[str, typer.Option(help="Comma-separated seeds.")] = "0",
    rounds: Annotated[int | None, typer.Option(help="Fewer rounds for a quicker look.")] = None,
    device: Device = None,
    quiet: Quiet = False,
) -> None:
    """FedAvg, FedHarmony and FedHarmony:plus side by side, on data the package makes itself.

    Needs no data and no network and takes about two minutes on two CPU cores.
    """
    overrides = [] if rounds is None else [f"run.rounds={rounds}"]
    settings = _settings("demo", overrides, device, None)
    from fedharmony.experiments.folder import unused

    folder = out or unused(Path("runs") / "demo")
    names = ["fedavg", "fedharmony", "fedharmony:plus"]
    _compare(settings, "demo", names, _numbers(seeds), folder, quiet)


@dataclass(frozen=True)
class _Crowd:
    """How many runs go on at once, and where."""

    jobs: int | None = None
    devices: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Refuse devices that nobody would use."""
        if self.size < len(self.devices):
            raise ConfigError(
                f"--device {','.join(self.devices)} names {len(self.devices)} devices for --jobs "
                f"{self.size}. Give at least as many jobs, or leave --jobs out."
            )

    @property
    def size(self) -> int:
        """Runs at once: one per device if nobody says."""
        return self.jobs or max(1, len(self.devices))

    def progress(self, quiet: bool) -> Progress:
        """What shows so many runs."""
        return _progress(quiet, Board if self.size > 1 else Progress)

    @contextmanager
    def workers(self) -> Iterator[Workers | None]:
        """The processes, if there are several; they end with the block."""
        from fedharmony.experiments.jobs import Workers

        if self.size == 1:
            yield None
            return
        with Workers(self.size, self.devices) as workers:
            yield workers


def _compare(
    settings: Settings,
    name: str,
    labels: Sequence[str],
    seeds: Sequence[int],
    folder: Path,
    quiet: bool,
    against: str | None = None,
    crowd: _Crowd = _Crowd(),  # noqa: B008 (frozen)
) -> None:
    from fedharmony.experiments import compare as comparison
    from fedharmony.experiments.folder import RunFolder
    from fedharmony.report.load import load
    from fedharmony.report.tables import write_tables

    planned = comparison.plan(settings, labels, seeds, folder, crowd.size)
    if against is not None:
        comparison.refuse_reference(against, {run.label for run in planned})
    failed: RunsFailedError | None = None
    with crowd.progress(quiet) as progress, _repeatable(folder), crowd.workers() as workers:
        data = comparison.rehearse(planned, progress)

        def observer(i: int, run: Planned) -> Observer:
            title, rounds = f"{run.label} seed {run.seed}", run.settings.run.rounds
            return progress.follow(i + 1, len(planned), title, rounds)

        with RunFolder(folder).writing():
            comparison.write_index(folder, name, planned, against)  # can be reported from now on
            try:
                if workers is None:
                    comparison.execute(planned, observer, data)
                else:
                    workers.execute(planned, observer)
            except RunsFailedError as error:
                failed = error
                if all(run.results is None for run in planned):
                    raise
            runs = load(folder)
            write_tables(runs)
    _show_runs(runs, quiet)
    if failed is not None:
        raise failed


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _numbers(text: str) -> list[int]:
    try:
        seeds = [int(word) for word in _words(text)]
    except ValueError:
        raise ConfigError(f"--seeds {text!r} must be whole numbers, for instance 0,1,2.") from None
    if any(seed < 0 for seed in seeds):
        raise ConfigError(f"--seeds {text!r}: seeds must not be negative.")
    return seeds


@app.command()
def report(
    folders: Annotated[
        list[Path],
        typer.Argument(metavar="RUN...", callback=usable, help="Run or comparison folders."),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=usable, help="Where to write the page."),
    ] = None,
    against: Against = None,
    plugin: Plugins = None,
) -> None:
    """Write the HTML report of a run, of a comparison, or of several of both side by side.

    Example: `fedharmony report runs/a runs/b --out both.html`
    """
    from fedharmony.report.differences import differences
    from fedharmony.report.load import load
    from fedharmony.report.page import write_report

    load_plugins(plugin or ())
    runs = load(folders, against)
    say(write_report(runs, out))
    found = differences(runs) if against is not None else None
    if found is not None:
        console().print(found.to_rich())


@app.command(name="list")
def list_components(
    kind: Kind,
    pattern: Annotated[
        str, typer.Argument(metavar="[PATTERN]", help="Only settings that have to do with this.")
    ] = "",
    plugin: Plugins = None,
) -> None:
    """What there is: methods, datasets, splitters, models, trackers, configs, settings.

    Example: `fedharmony list settings lr`
    """
    from fedharmony.config import built_in_configs
    from fedharmony.data.base import datasets
    from fedharmony.experiments.trackers import trackers
    from fedharmony.methods.base import methods
    from fedharmony.models.base import models
    from fedharmony.partition.base import splitters

    load_plugins(plugin or ())
    if kind is Kind.settings:
        return print_settings_list(pattern)
    table = Table(box=None, show_header=False, pad_edge=False)
    if kind is Kind.configs:
        for name, path in built_in_configs().items():
            table.add_row(Text(name, "bold"), str(path))
    else:
        registry: Any = {
            Kind.methods: methods,
            Kind.datasets: datasets,
            Kind.splitters: splitters,
            Kind.models: models,
            Kind.trackers: trackers,
        }[kind]
        for name in registry.names():
            presets = getattr(registry[name], "presets", {})
            more = f"  (presets: {', '.join(presets)})" if len(presets) > 1 else ""
            table.add_row(Text(name, "bold"), registry.summary(name) + more)
    console().print(table)
    return None


app.command()(predict)
app.command()(export)
app.command()(init)
app.command()(partition)
app.command()(privacy)
app.add_typer(data_app, name="data")
app.add_typer(models_app, name="models")
app.add_typer(site_app, name="site")
app.add_typer(flower_app, name="flower")


def _version(show: bool) -> None:
    if show:
        say(f"fedharmony {fedharmony.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_version, is_eager=True, metavar="", help="Print the version."
        ),
    ] = False,
    debug: Annotated[
        bool,
        typer.Option(DEBUG, metavar="", help="Show the trace of an error; works anywhere."),
    ] = False,
) -> None:
    """Options of the program itself."""


def _leave_garbage() -> None:
    """Spare the last search for garbage: half a second, just before the process gives all back."""
    if "triton" not in sys.modules:  # it would complain about what is left
        gc.freeze()


def _trace(error: Exception) -> str:
    """The whole trace as text; what a wrapped error was caused by comes first."""
    return "".join(traceback.format_exception(error))


def _keep(text: str, folder: Path | None) -> Path | None:
    """Write a trace into the folder of the run, or else where there is room; None where nowhere."""
    from fedharmony.files import write_atomically

    name = f"fedharmony-error-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}.txt"
    places = [folder] if folder is not None and is_folder(folder) else []
    for place in (*places, Path(tempfile.gettempdir())):
        try:
            write_atomically(place / name, text.encode(errors="backslashreplace"))
        except OSError:
            continue
        return place / name
    return None


def _unexpected(error: Exception, debug: bool) -> str:
    """One paragraph about an error that nobody foresaw."""
    folder = error.folder if isinstance(error, UnexpectedError) else None
    cause = error.__cause__ if isinstance(error, UnexpectedError) and error.__cause__ else error
    what = " ".join(str(cause).split())[:500]
    if isinstance(cause, MemoryError):
        what = f"The memory does not suffice. {what}".strip()
    text = f"{type(cause).__name__}: {what or 'no reason given'}"
    text += "" if text.endswith(".") else "."
    kept = None if debug else _keep(_trace(error), folder)
    place = f" The trace is in {kept}; please report it." if kept else ""
    hint = "" if debug else " With --debug the trace is shown here."
    return f"Something unexpected happened, which is a fault of this program: {text}{place}{hint}"


def _complain(text: str) -> None:
    """Print an error; where even that cannot be written, nothing is left to be done."""
    if sys.stderr is None:  # closed before the program began
        return
    paragraph = Text.assemble(("Error:", "bold red"), f" {text}")
    with suppress(OSError):
        console(stderr=True).print(paragraph, soft_wrap=not sys.stderr.isatty())


def _flushed(code: int) -> int:
    """Write out what is left; the exit code.

    At the very end, where Python would try, nobody could say that it failed.
    """
    if sys.stdout is None:  # closed before the program began
        return code
    try:
        sys.stdout.flush()
    except OSError as error:
        # What is still in the stream must not be tried again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or _last_resort(error, debug=False)
    return code


def main() -> None:
    """Entry point: an error is one paragraph and an exit code, never a traceback.

    Exit codes: 2 for what the user can mend, 1 for clients that failed and for output that nobody
    takes, 70 for what nobody foresaw.
    """
    # Read when torch is first imported: idle threads soon sleep instead of spinning for long, which
    # would starve our own work on a machine that is also busy otherwise.
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")
    atexit.register(_leave_garbage)
    replace_unknown(sys.stdout, sys.stderr)
    # What the data layer has to say (sizes before it writes, images it leaves out).
    logger = logging.getLogger("fedharmony")
    logger.setLevel(logging.INFO)
    if not logger.handlers:
        handler = logging.StreamHandler()
        handler.setFormatter(PlainFormatter())
        logger.addHandler(handler)
    debug = DEBUG in sys.argv[1:]
    try:
        with _ended_by_sigterm():
            code = app([word for word in sys.argv[1:] if word != DEBUG], standalone_mode=False)
    except Stopped as stop:
        say(f"\nThe program was {stop}.", err=True)
        code = stop.code
    except FedHarmonyError as error:
        if debug:
            say(_trace(error), err=True)
        traces = error.failures if isinstance(error, RunsFailedError) else ()
        kept = [_keep(f.details, f.folder) for f in traces if f.details]
        where = "".join(f" A trace is in {place}; please report it." for place in kept if place)
        _complain(f"{error}{where}")
        code = 1 if isinstance(error, ClientLimitError) else 2
    except (typer.Abort, KeyboardInterrupt):
        say("Stopped.", err=True)
        code = 130
    except Exception as error:
        code = _last_resort(error, debug)
    code = _flushed(code or 0)
    if code == 128 + signal.SIGINT:
        # In about one case of seven Python then ended by the signal instead of with this code, as
        # it does after an interrupt that nobody handled. Why it takes this one for such is unknown.
        atexit._run_exitfuncs()
        os._exit(code)
    raise SystemExit(code)


def _last_resort(error: Any, debug: bool) -> int:
    """Say what happened; the exit code."""
    # Typer has these errors from click, or from a copy of its own, under a name that changes.
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return int(error.exit_code)
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        context = getattr(error, "ctx", None)
        advice = "" if context is None else f" Try '{context.command_path} --help'."
        _complain(error.format_message() + advice)
        return int(error.exit_code)
    if isinstance(error, BrokenPipeError):  # whoever read the output has gone
        return 1
    if _is_output_lost(error):
        _complain(f"The output cannot be written: {error.strerror}.")
        return 1
    if debug:
        say(_trace(error), err=True)
    _complain(_unexpected(error, debug))
    return 70


if __name__ == "__main__":
    main()
