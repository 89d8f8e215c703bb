"""The command line around settings: show them, list them, plan a run, complete their names."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedharmony.config import built_in_configs
from fedharmony.report.progress import duration
from fedharmony.terminal import console

if TYPE_CHECKING:
    from fedharmony.experiments.dry_run import Plan

METHOD_FILES = "methods/"


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


def print_settings(config: str, changes: Sequence[str]) -> None:
    """All settings as a config file, each with a comment that says where it comes from."""
    from fedharmony.experiments.origins import show
    from fedharmony.experiments.settings import layers_of

    screen = console(highlight=False)
    for line, origin in show(layers_of(config, changes)):
        text = Text(line, "bold" if line.startswith("[") else "dim" if line.startswith("#") else "")
        if origin:
            pad = " " * max(2, 44 - len(line))
            text = Text.assemble(
                text, pad, (f"# {origin}", "dim" if origin == "default" else "cyan")
            )
        screen.print(text, soft_wrap=True)


def print_settings_list(pattern: str) -> None:
    """The settings that match, with what they can be, their default and what they do."""
    from fedharmony.experiments.reference import matching

    screen, found = console(highlight=False), matching(pattern)
    if not found:
        screen.print(f"No setting has to do with {pattern!r}.")
    for setting in found:
        owner = f" ({setting.owner})" if setting.owner else ""
        default = f"; default {setting.value}" if setting.value else ""
        head = Text.assemble((setting.name, "bold"), owner, "  ", (setting.kind + default, "cyan"))
        screen.print(head, soft_wrap=True)
        screen.print(Padding(Text(setting.summary), (0, 0, 0, 4)))


def print_plan(found: Plan) -> None:
    """What a command would do."""
    screen = console(highlight=False)
    facts = Table(box=None, pad_edge=False, show_header=False)
    for name, words in found.facts.items():
        facts.add_row(name, Text(words))
    screen.print(facts)
    table = Table(box=None, pad_edge=False)
    table.add_column("method")
    for heading in ("runs", "finished", "rounds", "parameters", "time"):
        table.add_column(heading, justify="right")
    for group in found.groups:
        time = "unknown" if group.seconds is None else f"about {duration(group.seconds)}"
        numbers = (group.runs, group.done, group.rounds, group.parameters)
        table.add_row(Text(group.label), *(f"{number:,}" for number in numbers), time)
    screen.print(table)
    for warning in found.warnings:
        screen.print(Text(warning, "yellow"), soft_wrap=True)
    runs = sum(group.runs - group.done for group in found.groups)
    times = [group.seconds for group in found.groups]
    total = sum(seconds for seconds in times if seconds is not None)
    took = "" if None in times else f", about {duration(total)} in all"
    screen.print(
        f"{runs:,} to be trained{took}, into {found.folder}. Nothing was trained, no run was "
        "written.",
        soft_wrap=True,
    )
