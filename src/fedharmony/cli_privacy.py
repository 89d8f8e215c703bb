"""The command that says what leaves a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box

from fedharmony.cli_options import ConfigArgument, Overrides, Plugins, settings_of
from fedharmony.terminal import columns, console, say

if TYPE_CHECKING:
    from fedharmony.experiments.disclosure import Disclosure


def privacy(config: ConfigArgument, overrides: Overrides = None, plugin: Plugins = None) -> None:
    """Say what leaves a client under given settings: name, size, whether a sum, and its bound.

    A few tiny clients take part in three rounds, and what they send is looked at. Nothing is
    written.

    Example: `fedharmony privacy demo federation.server_sees=sums methods.fedharmony.temperature=1`
    """
    from fedharmony.experiments.disclosure import disclosure

    print_disclosure(disclosure(settings_of(config, overrides, plugins=plugin)))


def print_disclosure(found: Disclosure) -> None:
    """The table, and what it does not show."""
    headings = ("when", "stage", "asked", "what a client sends", "numbers", "bytes")
    more = ("the server sees", "bound")
    table = columns(*headings, *more, right=("numbers", "bytes"), box=box.SIMPLE_HEAD)
    for item in found.items:
        sees = "the sum" if item.summed else "each client's"
        size = (f"{item.numbers:,}", f"{item.nbytes:,}")
        table.add_row(item.when, item.stage, item.asked, item.name, *size, sees, item.bound)
    console(highlight=False).print(table)
    if found.privacy:
        say(
            f"Differential privacy of clients after {found.rounds} rounds: ε = "
            f"{found.privacy['epsilon']:.3g}, δ = {found.privacy['delta']:g} (noise multiplier "
            f"{found.privacy['noise_multiplier']:.3g})."
        )
    else:
        say("No noise: ε = ∞.")
    say(
        "Beside this the server knows who takes part when. A site of a federation also tells how "
        "many images it has, and a hash of them, when it joins."
    )
