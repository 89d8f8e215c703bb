"""Options that commands share, how a shell completes them, and the settings that they make."""

from __future__ import annotations

import gc
import importlib
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from fedharmony.config import built_in_configs, in_toml
from fedharmony.errors import ConfigError, shown
from fedharmony.reading import fault_of
from fedharmony.registry import load_plugins
from fedharmony.terminal import console

if TYPE_CHECKING:
    from fedharmony.experiments.settings import Settings

METHOD_FILES = "methods/"


def usable(given: Any) -> Any:
    """Refuse names that no file can have before anything is done."""
    for path in given if isinstance(given, list) else [given]:
        if path is not None and (fault := fault_of(path)):
            raise ConfigError(f"{shown(str(path))} cannot be the name of a file: {fault}.")
    return given


def bar(word: str, quiet: bool) -> Bar:
    """A progress bar on a terminal."""
    screen = console(stderr=True)
    columns = (TextColumn(word), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    hidden = quiet or not screen.is_terminal
    return Bar(*columns, console=screen, transient=True, disable=hidden)


def complete_config(incomplete: str) -> list[str]:
    """Built-in configs, and TOML files here, that begin like this."""
    files = [str(path) for path in Path().glob("*.toml")]
    return [name for name in (*built_in_configs(), *files) if name.startswith(incomplete)]


def complete_change(ctx: typer.Context, incomplete: str) -> list[str]:
    """Configs that come on top, and the choice of a method.

    bash takes ``run.method=fedavg`` for three words and completes the last one.
    """
    before = [word for word in ctx.params.get("overrides") or () if word != "="]
    if before[-1:] == ["run.method"]:
        return [name for name in _methods() if name.startswith(incomplete)]
    chosen = [f"run.method={name}" for name in _methods()]
    return [*complete_config(incomplete), *(text for text in chosen if text.startswith(incomplete))]


def complete_methods(incomplete: str) -> list[str]:
    """The last of several methods that are separated by commas."""
    before, comma, last = incomplete.rpartition(",")
    names = [*_methods(), "all", "central"]
    return [f"{before}{comma}{name}" for name in names if name.startswith(last)]


def _methods() -> list[str]:
    """Methods of the package. Their config files name them; to import them would take seconds."""
    files = [name for name in built_in_configs() if name.startswith(METHOD_FILES)]
    return [name.removeprefix(METHOD_FILES) for name in files]


def hush(quiet: bool) -> bool:
    """Leave warnings only of what the package says, from the first setting that is read."""
    if quiet:
        logging.getLogger("fedharmony").setLevel(logging.WARNING)
    return quiet


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
RunFolderArgument = Annotated[
    Path, typer.Argument(metavar="RUN", callback=usable, help="The folder of the run.")
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
    typer.Option("--quiet", "-q", help="Print only the result.", callback=hush),
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check everything and show the plan; train nothing, write no run.",
    ),
]
Plugins = Annotated[
    list[Path] | None,
    typer.Option("--plugin", help="Python file that registers a method, data set, … of your own."),
]


def words_of(text: str) -> list[str]:
    """What is listed with commas.

    >>> words_of("a, b,")
    ['a', 'b']
    """
    return [word.strip() for word in text.split(",") if word.strip()]


def import_torch() -> None:
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


def changes_of(
    overrides: Sequence[str] | None, device: str | None = None, plugins: list[Path] | None = None
) -> list[str]:
    """What the options of a command say, as settings; plug-ins are loaded."""
    changes = list(overrides or ())
    if device is not None:
        changes.append(f'engine.device="{device}"')
    if plugins:
        load_plugins(plugins)
        changes.append(f"run.plugins={in_toml([str(path.resolve()) for path in plugins])}")
    return changes


def settings_of(
    config: str,
    overrides: Sequence[str] | None,
    device: str | None = None,
    plugins: list[Path] | None = None,
) -> Settings:
    """The settings that the arguments and options of a command make."""
    import_torch()
    from fedharmony.experiments.settings import load_settings

    return load_settings(config, changes_of(overrides, device, plugins))
