"""The command that writes reports, and what the commands that train show at their end."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedharmony.cli_options import Against, Plugins, usable
from fedharmony.registry import load_plugins
from fedharmony.terminal import console, say

if TYPE_CHECKING:
    from fedharmony.report.load import Runs


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


def show_folder(folder: Path, quiet: bool) -> None:
    """The table of a run or comparison on the terminal, and its report page."""
    from fedharmony.report.load import load

    show_runs(load(folder), quiet)


def show_runs(runs: Runs, quiet: bool) -> None:
    """The table of runs on the terminal, and their report page."""
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
