"""The commands of a site: write its settings, check its data, serve, and print its units."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedharmony.cli_options import usable
from fedharmony.errors import CheckpointError, ConfigError
from fedharmony.terminal import columns, console, say

if TYPE_CHECKING:
    from fedharmony.data.base import LabelledImages

site_app = typer.Typer(
    name="site",
    no_args_is_help=True,
    help="A site of a federation: its data, labels and rules stay its own.",
)

File = Annotated[
    Path, typer.Argument(metavar="SITE.TOML", callback=usable, help="The settings of the site.")
]


@site_app.command()
def init(
    name: Annotated[str, typer.Argument(help="The site's name, as the operator registers it.")],
    classes: Annotated[
        str, typer.Option(help="The federation's labels in their order, separated by commas.")
    ],
    data: Annotated[Path, typer.Option(callback=usable, help="Folder with table and images.")],
    image_size: Annotated[
        int, typer.Option(min=1, help="Pixels of a side of the federation's images.")
    ] = 224,
    out: Annotated[
        Path, typer.Option("--out", "-o", callback=usable, help="Where to write the settings.")
    ] = Path("site.toml"),
) -> None:
    """Write the settings of a site, to be read and completed, and a key for it.

    Example: `fedharmony site init clinic-a --classes cat,dog,tree --data images`
    """
    from fedharmony.config import build
    from fedharmony.experiments.folder import make_folder
    from fedharmony.records import write_file
    from fedharmony.site.keys import make_key
    from fedharmony.site.settings import TEMPLATE, SiteSection

    if out.exists():
        raise CheckpointError(f"{out} exists already. Choose another place with --out.")
    labels = [label.strip() for label in classes.split(",") if label.strip()]
    build(SiteSection, {"name": name, "classes": labels}, "site")  # refuses names it cannot have
    folder = str(data.absolute())
    words = {"name": name, "classes": labels, "path": folder, "image_size": image_size}
    text = TEMPLATE.format(**{k: json.dumps(v, ensure_ascii=False) for k, v in words.items()})
    make_folder(out.parent)
    key = out.with_name(f"{name}.key")
    if not key.exists():
        make_key(key)
        say(f"Wrote {key}, which stays here, and {key}.pub, which the operator registers.")
    write_file(out, text.encode())
    say(f"Wrote {out}. Complete [labels] and [policy], then:\n  fedharmony site check {out}")


@site_app.command()
def check(file: File) -> None:
    """Read the site's data, and say what a federation would see of its labels."""
    from fedharmony.site.settings import load_site
    from fedharmony.site.worker import site_data

    settings = load_site(file)
    data = site_data(settings)
    settings.policy.refuse_few(len(data.train))
    counted = ("present", "absent", "unknown")
    table = columns("label", *counted, right=counted)
    for c, name in enumerate(data.classes):
        table.add_row(name, *(f"{count:,}" for count in _counts(data.train, c)))
    screen = console()
    screen.print(table)
    policy = settings.policy
    methods, statistics = (
        allowed if isinstance(allowed, str) else ", ".join(allowed) or "none"
        for allowed in (policy.methods, policy.statistics)
    )
    screen.print(
        f"Site {settings.site.name}: {len(data.train):,} training images of shape "
        f"{data.train.images.shape}; {len(data.test):,} test images.\n"
        f"Methods allowed: {methods}. Statistics that may leave: {statistics}. Told of scores on "
        f"test images: {policy.evaluation}.",
        soft_wrap=True,
    )


def _counts(part: LabelledImages, label: int) -> tuple[int, int, int]:
    """Images on which a label is present, absent and unknown."""
    known = len(part) if part.known is None else int(part.known[:, label].sum())
    present = int(part.labels[:, label].sum())
    return present, known - present, len(part) - known


@site_app.command()
def serve(file: File) -> None:
    """Answer for the site until stopped: holds the data, trains, keeps what must be kept."""
    from fedharmony.site import worker
    from fedharmony.site.settings import load_site

    # Memory and decoded images are the owner's alone; the socket says itself who may use it.
    os.umask(0o077)
    worker.serve(worker.Worker(load_site(file)))


@site_app.command()
def relay(
    superlink: Annotated[str, typer.Option(help="Host and port of the federation.")],
    ca: Annotated[Path, typer.Option(callback=usable, help="The federation's ca.crt.")],
    key: Annotated[Path, typer.Option(callback=usable, help="The site's private key.")],
    socket: Annotated[
        Path, typer.Option(callback=usable, help="The worker's socket, as site.toml says.")
    ] = Path("worker.sock"),
) -> None:
    """Carry messages between the federation and the site's worker until stopped.

    Needs no right but to use the worker's socket. Runs nothing that the federation sends.
    """
    try:
        from fedharmony.flower import node
    except ImportError:
        raise ConfigError(
            "A relay needs Flower. Install it with pip install 'fedharmony[flower]'."
        ) from None
    node.serve(superlink, ca, key, str(socket))


@site_app.command()
def status(file: File) -> None:
    """Ask the site's worker how it is."""
    from fedharmony.site.parcel import STATUS, Parcel, ask
    from fedharmony.site.settings import load_site

    for key, value in ask(load_site(file).socket, Parcel(STATUS), 10.0).words.items():
        say(f"{key}: {value}")


@site_app.command()
def units(
    file: File,
    superlink: Annotated[str, typer.Option(help="Host and port of the federation's SuperLink.")],
    owner: Annotated[str, typer.Option(help="User that owns the data.")] = "fedharmony-data",
    relay: Annotated[str, typer.Option(help="User of the relay.")] = "fedharmony-relay",
) -> None:
    """Print systemd units of worker and relay, under two users."""
    from fedharmony.site.settings import load_site
    from fedharmony.site.units import units as unit_files

    say(unit_files(file, load_site(file), superlink, owner, relay))
