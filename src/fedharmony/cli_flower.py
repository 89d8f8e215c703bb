"""The commands of a federation's operator: certificates, a SuperLink, sites, and runs over them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedharmony import stopping
from fedharmony.cli_guard import resumable
from fedharmony.cli_options import (
    ConfigArgument,
    Overrides,
    Quiet,
    RunFolderArgument,
    settings_of,
    usable,
)
from fedharmony.cli_report import show_folder
from fedharmony.errors import ConfigError, Stopped
from fedharmony.report.progress import Progress
from fedharmony.terminal import columns, console, say

if TYPE_CHECKING:
    from fedharmony.flower.link import Link, Ordered

flower_app = typer.Typer(
    name="flower",
    no_args_is_help=True,
    help="Real federations on Flower: a SuperLink, its sites, and runs over them.",
)

Home = Annotated[
    Path, typer.Option("--home", callback=usable, help="Folder of the federation's SuperLink.")
]
Sites = Annotated[int, typer.Option(min=1, help="How many sites to wait for before round 1.")]
Least = Annotated[
    int | None,
    typer.Option(min=1, help="Fewest sites online when a round begins; 2 if there are as many."),
]
Wait = Annotated[float, typer.Option("--wait", min=0, help="Seconds to wait for them.")]
Limit = Annotated[
    float, typer.Option("--limit", min=1, help="Seconds a site has to answer in an exchange.")
]
HOME = Path("federation")


def _link(home: Path) -> Link:
    from fedharmony.flower.link import Link

    return Link(home.absolute())


@flower_app.command()
def certs(
    host: Annotated[
        list[str], typer.Option("--host", help="Name or address that sites reach the server by.")
    ],
    home: Home = HOME,
) -> None:
    """Make the SuperLink's certificates; sites get `certs/ca.crt`.

    Example: `fedharmony flower certs --host fed.example.org --host 127.0.0.1`
    """
    link = _link(home)
    link.certify([*host, *(name for name in ("localhost", "127.0.0.1") if name not in host)])
    say(f"Wrote {link.certificates}. Give ca.crt to every site.")


@flower_app.command()
def up(
    host: Annotated[str, typer.Option(help="Address where sites reach the gate.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port of the gate.")] = 8443,
    control_port: Annotated[
        int, typer.Option(min=1, max=65535, help="The SuperLink's own port, on 127.0.0.1.")
    ] = 8444,
    home: Home = HOME,
) -> None:
    """Start a SuperLink with TLS, keys of sites and a database, and a gate; both stay up.

    The gate lets sites reach the Fleet API alone. Whoever reaches the SuperLink's own port can
    submit code to every site's relay; it listens at 127.0.0.1 only.
    """
    link = _link(home)
    link.up(host, port, control_port)
    say(f"Sites reach the SuperLink at {link.address}. End it with 'fedharmony flower down'.")


@flower_app.command()
def down(home: Home = HOME) -> None:
    """End the SuperLink, with every run on it; its database stays."""
    say("Ended." if _link(home).down() else "No SuperLink runs here.")


@flower_app.command()
def register(
    name: Annotated[str, typer.Argument(help="The site's name, as its site.toml says.")],
    key: Annotated[Path, typer.Argument(callback=usable, help="The site's public key.")],
    home: Home = HOME,
) -> None:
    """Let a site join, by its name and public key."""
    if not key.is_file():
        raise ConfigError(f"There is no key {key}. 'fedharmony site init' writes NAME.key.pub.")
    _link(home).register(name, key)
    say(f"Registered {name}.")


@flower_app.command()
def status(
    home: Home = HOME,
    serve: Annotated[
        bool, typer.Option("--serve", metavar="", help="Show a page that follows, until Ctrl-C.")
    ] = False,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of the page.")] = 8445,
) -> None:
    """Say where the SuperLink is, and which sites are online; or show a page of it.

    The page is read-only and listens at 127.0.0.1: reach it from elsewhere through `ssh -L`.
    """
    link = _link(home)
    if serve:
        from fedharmony.report.watch import Watch

        try:
            watch = Watch(link, port)
        except OSError as error:
            raise ConfigError(
                f"Port {port} cannot be used: {error.strerror or error}. Choose one with --port."
            ) from None
        with watch:
            say(f"http://127.0.0.1:{watch.server_port} shows the federation in {link.home}.")
            with stopping.interruptible():
                watch.serve_forever()
    say(f"Sites reach the SuperLink, process {link.pid}, at {link.address}.")
    table = columns("site", "status", "last came online")
    for site in link.sites():
        table.add_row(*site)
    console().print(table)


@flower_app.command()
def run(
    config: ConfigArgument,
    overrides: Overrides = None,
    *,
    out: Annotated[
        Path, typer.Option("--out", "-o", callback=usable, help="Folder for what the run writes.")
    ],
    sites: Sites,
    least: Least = None,
    wait: Wait = 600.0,
    limit: Limit = 3600.0,
    home: Home = HOME,
    quiet: Quiet = False,
) -> None:
    """Train one method over sites; leaves the same folder and report as `fedharmony run`.

    Example: `fedharmony flower run study.toml --sites 3 --out runs/study`
    """
    from fedharmony.experiments.folder import RunFolder
    from fedharmony.site.policy import offered

    settings = settings_of(config, overrides)
    offered(settings)
    RunFolder(out).refuse_if_taken(settings)
    link = _link(home)
    _follow(lambda: link.order(settings.tree(), out, sites, wait, limit, least), out, quiet)


@flower_app.command()
def resume(
    folder: RunFolderArgument,
    least: Annotated[int, typer.Option(min=1, help="Fewest sites online when a round begins.")] = 2,
    wait: Wait = 600.0,
    limit: Limit = 3600.0,
    home: Home = HOME,
    quiet: Quiet = False,
) -> None:
    """Continue a run over sites that was stopped or killed."""
    from fedharmony.experiments.folder import RunFolder

    RunFolder(folder).open()
    if RunFolder(folder).read_json("roster.json") is None:
        raise ConfigError(
            f"{folder} has no roster.json: the run was killed before its sites were known, or is "
            "none over sites. Give the same 'fedharmony flower run' command again."
        )
    link = _link(home)
    _follow(lambda: link.order(None, folder, least, wait, limit, least), folder, quiet)


def _follow(order: Callable[[], Ordered], folder: Path, quiet: bool) -> None:
    """Show a run until it ends, then its table and report; Ctrl-C ends the run, too."""
    with Progress(quiet=quiet) as progress, resumable(folder, "fedharmony flower resume"):
        ordered = order()
        try:
            ordered.follow(progress)
        except (KeyboardInterrupt, Stopped):
            ordered.stop()
            raise
    show_folder(folder, quiet)
