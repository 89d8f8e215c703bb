"""The commands that look at data, splits and weights before training."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from fedharmony.cli_options import ConfigArgument, Overrides, Plugins, bar, settings_of, usable
from fedharmony.errors import CheckpointError, ConfigError, DataError
from fedharmony.registry import load_plugins
from fedharmony.terminal import columns, console, pairs, say

if TYPE_CHECKING:
    from fedharmony.data.base import Source
    from fedharmony.data.check import Check
    from fedharmony.partition.base import Partition
    from fedharmony.partition.report import SplitReport

data_app = typer.Typer(
    name="data",
    no_args_is_help=True,
    help="Check data sets on disk, and decode their images ahead of a run.",
)
models_app = typer.Typer(name="models", no_args_is_help=True, help="Weights of pre-trained models.")

Name = Annotated[
    str,
    typer.Argument(metavar="NAME", help="voc, coco, flair, table, features or that of a plug-in."),
]
Place = Annotated[Path, typer.Argument(metavar="PATH", help="Folder or archive with the data.")]
Changes = Annotated[
    list[str] | None,
    typer.Argument(metavar="[KEY=VALUE]...", help="Settings of the loader, e.g. `year=2012`."),
]


def source(name: str, path: Path, changes: Sequence[str] | None) -> Source:
    """The loader of a data set on disk, with its settings checked."""
    from fedharmony.config import build, parse_override
    from fedharmony.config import keys as settings_of
    from fedharmony.data.base import datasets

    cls = datasets[name]
    if "path" not in settings_of(cls.Config):
        raise DataError(
            f"Data set {name!r} is not read from files, so there is nothing to check and nothing "
            "to decode."
        )
    values: dict[str, Any] = {"path": str(path)}
    for text in changes or ():
        keys, value = parse_override(text)
        if len(keys) != 1:
            raise ConfigError(f"{text!r}: settings of the loader have no section; use KEY=VALUE.")
        values[keys[0]] = value
    return cls(build(cls.Config, values, "data"))


@contextmanager
def decoding(quiet: bool = False) -> Iterator[Callable[[int, int], None]]:
    """A progress bar on a terminal, visible only while images are decoded."""
    with bar("decoding", quiet) as shown:
        task = shown.add_task("decoding", total=None, visible=False)

        def show(done: int, total: int) -> None:
            shown.update(task, completed=done, total=total, visible=True, refresh=done == total)
            if done == total:  # the line is free for messages until the test images follow
                shown.reset(task, visible=False)

        yield show


@data_app.command()
def check(name: Name, path: Place, changes: Changes = None, plugin: Plugins = None) -> None:
    """Verify files and counts of a data set, and say what is missing.

    Example: `fedharmony data check voc ~/VOCdevkit year=2012`

    Exit code 0: all is there; 1: something is missing or differs; 2: the data cannot be read.
    """
    load_plugins(plugin or ())
    with decoding() as progress:
        found = source(name, path, changes).check(progress)
    screen = console(highlight=False)
    for table in check_tables(found):
        screen.print(table)
    for words, sentences, style in (
        ("Look at this: ", found.doubts, "yellow"),
        ("", found.faults, "bold red"),
    ):
        for sentence in sentences:
            screen.print(words + sentence, style=style, soft_wrap=True)
    screen.print(found.advice, soft_wrap=True)
    if not found.ok:
        raise typer.Exit(1)


def check_tables(found: Check) -> Iterator[Table]:
    """Classes with counts, facts, and figures beside what they should be, where there are any."""
    if found.classes:
        table = columns("class", "training", "test", right=("training", "test"))
        for count in found.classes:
            table.add_row(count.name, f"{count.train:,}", f"{count.test:,}")
        yield table
    if found.facts:
        yield pairs(dict(found.facts))
    if found.lines:
        table = columns("", "expected", "found", "", right=("expected", "found"))
        for line in found.lines:
            mark, style = ("", None) if line.ok else ("differs", "bold red")
            table.add_row(line.what, f"{line.expected:,}", f"{line.found:,}", mark, style=style)
        yield table


@data_app.command()
def prepare(
    name: Name,
    path: Place,
    changes: Changes = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Decode and resize all images once, into the cache that runs read.

    Example: `fedharmony data prepare voc ~/VOCdevkit year=2012 image_size=224`

    A run does the same by itself when it finds no cache.
    """
    from fedharmony.data.cache import Resize
    from fedharmony.data.derived import in_bytes
    from fedharmony.data.file_source import FileSource

    loader = source(name, path, changes)
    if not isinstance(loader, FileSource):
        raise DataError(f"Data set {name!r} has no images, so there is nothing to decode.")
    side = loader.config.image_size
    content = loader.annotations()
    _, train, test = content
    size = in_bytes(Resize(side).nbytes(len(train) + len(test)))
    screen = console(highlight=False)
    screen.print(
        f"{len(train):,} training and {len(test):,} test images at {side} × {side} pixels: {size}"
    )
    with decoding(quiet) as progress:
        data = loader.load(progress, content)
    lost = len(train) + len(test) - len(data.train) - len(data.test)
    left = f", {lost:,} unreadable ones left out" if lost else ""
    screen.print(f"Ready: {len(data.train):,} training and {len(data.test):,} test images{left}.")


def init(
    path: Annotated[
        Path,
        typer.Argument(
            metavar="FOLDER",
            callback=usable,
            help="Folder with a table of images, the table itself, or a file of features.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", callback=usable, help="The config file; by default NAME.toml."),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Write over a file that is there.")
    ] = False,
) -> None:
    """Look at data of your own and write a commented config file that fits them.

    Example: `fedharmony init photos/` writes photos.toml; `fedharmony run photos.toml` trains.
    """
    from fedharmony.experiments.init import propose, refuse_overwriting, save

    file = out or Path(f"{path.resolve().stem}.toml")
    refuse_overwriting(file, force)
    found = propose(path)
    save(found, file, force)
    screen = console(highlight=False)
    screen.print(found.seen, soft_wrap=True)
    screen.print(f"Written: {file}. Read it, change what you like, and go on with", soft_wrap=True)
    for command in ("partition", "run"):
        screen.print(f"  fedharmony {command} {shlex.quote(str(file))}", soft_wrap=True)


def partition(
    config: ConfigArgument,
    overrides: Overrides = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", callback=usable, help="Folder for table, picture and partition."
        ),
    ] = None,
    plugin: Plugins = None,
) -> None:
    """Preview a split as table and picture, without training and without decoding an image.

    Example: `fedharmony partition demo split.gamma=0.1 split.clients=50`

    Writes partition.json (usable as `split.file`), split_report.json and split.svg.
    """
    from fedharmony.experiments.folder import RunFolder, make_folder
    from fedharmony.experiments.preview import preview
    from fedharmony.records import write_file
    from fedharmony.report.split import split_picture

    folder = RunFolder(out or Path("runs") / f"{Path(config).stem}-split")
    if folder.holds_run():
        raise CheckpointError(
            f"{folder.path} holds a run, whose partition must stay as it is. Choose another folder "
            "with --out."
        )
    found = preview(settings_of(config, overrides, plugins=plugin))
    make_folder(folder.path)
    found.partition.save(folder["partition.json"])
    folder.write_json("split_report.json", found.report.as_dict())
    picture = split_picture(found.labels, found.partition, found.classes)
    write_file(folder["split.svg"], picture.encode())
    screen = console(highlight=False)
    screen.print(split_table(found.report, found.partition))
    screen.print(f"SHA-256: {found.report.sha256}", soft_wrap=True)
    screen.print(f"Written: {folder.path}", soft_wrap=True)


def split_table(report: SplitReport, partition: Partition) -> Table:
    """A split in a few lines."""
    median = f"{report.size_median:,.0f}"
    floor = _number(report.correlation_drift_iid)
    rows = {
        "clients": f"{report.clients:,}",
        "images": f"{report.images:,}",
        "  of no client": f"{report.left_out:,}" if report.left_out else None,
        "images per client": f"{report.size_min:,} to {report.size_max:,}, median {median}",
        "labels per client": f"mean {report.labels_seen_mean:.1f}, least {report.labels_seen_min}",
        "(client, label) without images": f"{report.absent_pairs:,}",
        "label skew": f"{_number(report.jensen_shannon)} (Jensen–Shannon, 0 to 0.693)",
        "correlation drift": f"{_number(report.correlation_drift)} (random split: {floor})",
        "  over clients of 20 images up": f"{report.drift_clients:,}",
        "image transforms": _tally(partition.transforms),
    }
    return pairs({name: value for name, value in rows.items() if value is not None})


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _tally(names: Sequence[str] | None) -> str | None:
    """How many clients have each transform."""
    if names is None:
        return None
    return ", ".join(f"{name} {count:,}" for name, count in sorted(Counter(names).items()))


@models_app.command()
def fetch(
    name: Annotated[
        str, typer.Argument(help="Model of the Hugging Face hub; without an owner it is timm's.")
    ],
) -> None:
    """Bring the weights of a model into the local cache, on a machine with network.

    Example: `fedharmony models fetch vit_base_patch16_224.augreg_in21k_ft_in1k`
    """
    from fedharmony.models.hub import fetch as bring

    say(bring(name))
