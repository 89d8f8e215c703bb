"""The command line: the program, its commands and how it begins and ends."""

from __future__ import annotations

# torch and scikit-learn take seconds to import. What needs them is imported by the
# commands themselves, so that --help and mistyped commands answer at once.
import atexit
import gc
import logging
import os
import sys
from typing import Annotated, Any

import typer

import fedharmony
from fedharmony.cli_data import data_app, init, models_app, partition
from fedharmony.cli_flower import flower_app
from fedharmony.cli_guard import exit_code_of, leave
from fedharmony.cli_paper import reproduce
from fedharmony.cli_privacy import privacy
from fedharmony.cli_report import report
from fedharmony.cli_run import compare, demo, resume, run, sweep, tune
from fedharmony.cli_settings import list_components, show
from fedharmony.cli_site import site_app
from fedharmony.cli_use import export, predict
from fedharmony.terminal import PlainFormatter, replace_unknown, say

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

for command in (
    *(run, resume, compare, sweep, tune, show, demo, report, list_components, reproduce),
    *(privacy, predict, export, init, partition),
):
    app.command(name=command.__name__.removesuffix("_components"))(command)
for group in (data_app, models_app, site_app, flower_app):
    app.add_typer(group)


def _version(show: bool) -> None:
    if show:
        say(f"fedharmony {fedharmony.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option("--version", callback=_version, is_eager=True, help="Print the version."),
    ] = False,
    debug: Annotated[
        bool, typer.Option(DEBUG, help="Show the trace of an error; works anywhere.")
    ] = False,
) -> None:
    """Options of the program itself."""


def main() -> None:
    """Run the command that the arguments of the process name, and end the process."""
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
    words = [word for word in sys.argv[1:] if word != DEBUG]
    command = _flags_without_type(typer.main.get_command(app))
    leave(exit_code_of(lambda: command(words, standalone_mode=False), debug=DEBUG in sys.argv[1:]))


def _flags_without_type(command: Any) -> Any:
    """The command; help shows ``--quiet`` and not ``--quiet <bool>``, below it as well."""
    for option in command.get_params(typer.Context(command)):
        if getattr(option, "is_flag", False):
            option.metavar = ""
    for inner in getattr(command, "commands", {}).values():
        _flags_without_type(inner)
    return command


def _leave_garbage() -> None:
    """Spare the last search for garbage: half a second, just before the process gives all back."""
    if "triton" not in sys.modules:  # it would complain about what is left
        gc.freeze()


if __name__ == "__main__":
    main()
