"""The commands that show what there is: settings, and components by name; plans of runs."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from fedharmony.cli_options import (
    ConfigArgument,
    Device,
    Overrides,
    Plugins,
    changes_of,
    import_torch,
)
from fedharmony.registry import load_plugins
from fedharmony.report.progress import duration
from fedharmony.terminal import columns, console, pairs

if TYPE_CHECKING:
    from fedharmony.experiments.dry_run import Plan


#: What ``fedharmony list`` can list.
Kind = StrEnum("Kind", "methods datasets splitters models rules attacks trackers configs settings")


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
    import_torch()
    print_settings(config, changes_of(overrides, device, plugin))


def list_components(
    kind: Kind,
    pattern: Annotated[
        str, typer.Argument(metavar="[PATTERN]", help="Only settings that have to do with this.")
    ] = "",
    plugin: Plugins = None,
) -> None:
    """What there is: methods, datasets, models, rules, attacks, configs, settings and others.

    Example: `fedharmony list settings lr`
    """
    from fedharmony.attacks import attacks
    from fedharmony.config import built_in_configs
    from fedharmony.data.base import datasets
    from fedharmony.experiments.trackers import trackers
    from fedharmony.methods.base import methods
    from fedharmony.models.base import models
    from fedharmony.partition.base import splitters
    from fedharmony.robust import rules

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
            Kind.rules: rules,
            Kind.attacks: attacks,
            Kind.trackers: trackers,
        }[kind]
        for name in registry.names():
            presets = getattr(registry[name], "presets", {})
            more = f"  (presets: {', '.join(presets)})" if len(presets) > 1 else ""
            table.add_row(Text(name, "bold"), registry.summary(name) + more)
    console().print(table)
    return None


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
    screen.print(pairs(found.facts))
    numbers = ("runs", "finished", "rounds", "parameters", "time")
    table = columns("method", *numbers, right=numbers)
    for group in found.groups:
        time = "unknown" if group.seconds is None else f"about {duration(group.seconds)}"
        counts = (group.runs, group.done, group.rounds, group.parameters)
        table.add_row(Text(group.label), *(f"{count:,}" for count in counts), time)
    screen.print(table)
    for warning in found.warnings:
        screen.print(Text(warning, "yellow"), soft_wrap=True)
    runs = sum(group.runs - group.done for group in found.groups)
    times = [group.seconds for group in found.groups]
    total = sum(seconds for seconds in times if seconds is not None)
    total /= max(1, min(found.at_once, runs))
    took = "" if None in times else f", about {duration(total)} in all"
    screen.print(
        f"{runs:,} to be trained{took}, into {found.folder}. Nothing was trained, no run was "
        "written.",
        soft_wrap=True,
    )
