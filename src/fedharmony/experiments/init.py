"""A config file for data of one's own: what the data are decides size, model, rounds and splitter.

A folder with a table of images, a table, or a file of features is looked at; the text that comes
out is a commented TOML file, checked as ``run`` would check it.
"""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedharmony.config import build, in_toml
from fedharmony.data.base import DataSet
from fedharmony.data.cache import FORMATS, IMAGE_ENDINGS
from fedharmony.data.check import Part, wrong_separator
from fedharmony.data.features import FORMS, ID_COLUMNS, Features
from fedharmony.data.file_source import AnnotatedFiles
from fedharmony.data.table import (
    CELLS,
    SEPARATOR,
    SPLIT_COLUMNS,
    TABLES,
    USER_COLUMNS,
    Table,
    read_file,
    table_rows,
)
from fedharmony.errors import ConfigError, DataError
from fedharmony.experiments.blueprint import make_backbone
from fedharmony.experiments.build import input_spec
from fedharmony.experiments.outlook import seconds_per_image
from fedharmony.experiments.settings import Settings, compose
from fedharmony.files import write_atomically
from fedharmony.models.base import FeatureSpec, InputSpec, Model
from fedharmony.models.heads import LinearHead
from fedharmony.models.hub import cached
from fedharmony.reading import is_folder, is_there
from fedharmony.rng import torch_rng

LABEL_COLUMNS = ("labels", "label", "tags", "classes")
#: Models with pre-trained weights, smallest first.
PRETRAINED = {
    "vit_tiny_patch16": "timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k",
    "vit_small_patch16": "timm/vit_small_patch16_224.augreg_in21k_ft_in1k",
    "vit_base_patch16": "timm/vit_base_patch16_224.augreg_in21k_ft_in1k",
}
NO_WEIGHTS = (
    "from scratch: there are no pre-trained weights on this machine. With network, `fedharmony "
    f"models fetch {PRETRAINED['vit_tiny_patch16']}` brings some; then repeat init"
)
#: Images whose size is looked at, and rows that tell what a column holds.
SAMPLE = 32
#: Local epochs and batch size, as the built-in configs have them.
EPOCHS, BATCH = 5, 16
#: Rounds that a run has at least and at most, and the seconds it should take on a CPU.
FEWEST, MOST, BUDGET = 5, 50, 1800.0
#: Rounds of a run on arrays, and patches that its images are cut into at most.
ROUNDS, PATCHES = 20, 64
#: Clients of a split that is drawn: at most so many, with at least so many samples on average; and
#: how many of them take part in a round.
CLIENTS, PER_CLIENT, COHORT = 50, 30, 20


@dataclass(frozen=True)
class Line:
    """A setting, its value, and why."""

    key: str
    value: Any
    why: str = ""


#: Sections and their settings, in order.
Draft = dict[str, list[Line]]


@dataclass(frozen=True)
class Proposal:
    """A config file and what it was made from, in a few words."""

    text: str
    seen: str


def propose(path: Path) -> Proposal:
    """A config that fits the data at ``path``; data that cannot be used are a DataError."""
    file = find(path)
    if file.suffix.lower() in TABLES and (columns := Columns.read(file)).images is not None:
        return _for_images(file, columns)
    return _for_features(file)


def find(path: Path) -> Path:
    """The table or file of features that ``path`` is, or that the folder ``path`` holds."""
    if not is_there(path):
        raise DataError(f"There is no file or folder {path}. Check the path.")
    if not is_folder(path):
        if path.suffix.lower() not in FORMS:
            raise DataError(
                f"{path} is neither a folder nor a table or file of features ({', '.join(FORMS)})."
            )
        return path
    found = sorted(file for file in path.iterdir() if file.suffix.lower() in FORMS)
    if len(found) != 1:
        names = f" ({', '.join(file.name for file in found[:5])})" if found else ""
        raise DataError(
            f"There is not one table or file of features in {path} but {len(found)}{names}. Name "
            "the file itself. A table lists images with their labels; docs/data.md shows how."
        )
    return found[0]


@dataclass(frozen=True)
class Columns:
    """What the columns of a table hold, as far as one can tell.

    Attributes:
        names: Of all columns.
        images: The column with names of image files, if there is one.
        binary: The columns that hold 0, 1 and nothing else but empty cells.
    """

    names: list[str]
    images: str | None
    binary: set[str]

    @classmethod
    def read(cls, file: Path) -> Columns:
        """Look at all cells of a table."""
        advice = "Write a header and the rows into it."
        header, rows = table_rows(read_file(file), str(file), advice)
        binary, images = set(header), list(header)
        for row in rows:
            named = list(zip(header, row.cells, strict=False))
            binary -= {name for name, cell in named if cell not in CELLS}
            other = {name for name, cell in named if not cell.lower().endswith(IMAGE_ENDINGS)}
            images = [name for name in images if name not in other]
        return cls(header, images[0] if images else None, binary)

    def free(self, *roles: str) -> list[str]:
        """The columns that are neither ids, users, splits nor ``roles``."""
        usual = {*ID_COLUMNS, *USER_COLUMNS, *SPLIT_COLUMNS, *roles}
        return [name for name in self.names if name not in usual]


# Images -------------------------------------------------------------------------------------------


def _for_images(file: Path, columns: Columns) -> Proposal:
    assert columns.images is not None
    joined = [n for n in LABEL_COLUMNS if n in columns.names and n not in columns.binary]
    form = "joined" if joined else "columns"
    free = columns.free(columns.images, *joined[:1])
    named = [*ID_COLUMNS] if ID_COLUMNS[0] in columns.names else []
    ignore = [*named, *(name for name in free if joined or name not in columns.binary)]
    lines = [
        Line("name", "table"),
        Line("path", str(file.parent.resolve())),
        Line("table", file.name),
        Line("format", form, "labels joined by | in one column" if joined else "one per class"),
        Line("image", columns.images, "the column with the images"),
    ]
    if joined:
        lines.append(Line("labels", joined[0], "the column with their labels"))
    if ignore:
        lines.append(Line("ignore", ignore, "columns that are not used"))
    own = {line.key: line.value for line in lines if line.key != "name"}
    source = Table(build(Table.Config, own, "data"))
    content = source.annotations()
    source.refuse_missing(content)
    classes, train, test = content
    if joined and (fault := wrong_separator(classes, SEPARATOR)):
        raise DataError(f"{file}: {fault}")
    model, size, lr = _image_model(_typical_side(train))
    lines.append(Line("image_size", size, "every image becomes a square of so many pixels"))
    why = "" if lr < 1e-3 else "a model from scratch takes larger steps"
    draft = _draft(lines, train, model, Line("lr", lr, why))
    draft["augment"] = [Line("flip", True, "mirror training images at random")]
    spec = InputSpec(3, size, size)
    return _proposal(draft, spec, len(classes), train, test, f"{file.name}: a table of images")


def _typical_side(part: AnnotatedFiles) -> float:
    """The median of the shorter sides of some images."""
    sides = []
    for i in np.unique(np.linspace(0, len(part) - 1, SAMPLE).astype(int)):
        try:
            with Image.open(io.BytesIO(part.files.read(int(i))), formats=FORMATS) as image:
                sides.append(min(image.size))
        except Exception as error:  # Pillow raises almost anything
            raise DataError(
                f"{part.files.name(int(i))} cannot be read: {error}. 'fedharmony data check table' "
                "names every such image."
            ) from None
    return statistics.median(sides)


def _image_model(side: float) -> tuple[list[Line], int, float]:
    """A model for images of a size, the size it takes them at, and its learning rate."""
    names = list(PRETRAINED) if not torch.cuda.is_available() else list(reversed(PRETRAINED))
    for name in names:
        if cached(PRETRAINED[name]):
            lines = [Line("name", name), Line("weights", PRETRAINED[name], "pre-trained")]
            return lines, _multiple(side, 16, 64, 224), 1e-4
    lines = [
        Line("name", "vit", NO_WEIGHTS),
        *(Line("width", 64), Line("depth", 2), Line("heads", 4), Line("patch", 8)),
    ]
    return lines, _multiple(side, 8, 32, 64), 1e-3


def _multiple(value: float, step: int, low: int, high: int) -> int:
    """The largest multiple of ``step`` up to ``value``, between ``low`` and ``high``.

    >>> _multiple(100, 16, 64, 224), _multiple(20, 16, 64, 224), _multiple(900, 16, 64, 224)
    (96, 64, 224)
    """
    return min(max(int(value) // step * step, low), high)


# Features -----------------------------------------------------------------------------------------


def _for_features(file: Path) -> Proposal:
    lines = [Line("name", "features"), Line("path", str(file.resolve()))]
    prefix = Features.Config.label_prefix
    if file.suffix.lower() in TABLES:
        columns = Columns.read(file)
        free = columns.free()
        if not any(name.startswith(prefix) for name in free):
            labels = _trailing(free, columns.binary)
            if labels and len(labels) < len(free):
                why = "the columns of 0 and 1 at the end: please check"
                lines.append(Line("labels", labels, why))
    own = {line.key: line.value for line in lines if line.key != "name"}
    data = Features(build(Features.Config, own, "data")).load()
    model = [Line("name", "mlp", 'or "linear"'), Line("hidden", [256], "widths of hidden layers")]
    draft = _draft(lines, data.train, model, Line("lr", 1e-3))
    spec = input_spec(data.train.images)
    words = f"{file.name}: {spec}"
    return _proposal(draft, spec, len(data.classes), data.train, data.test, words)


def _trailing(names: Sequence[str], wanted: set[str]) -> list[str]:
    """The names at the end that are all wanted.

    >>> _trailing(["a", "b", "c", "d"], {"a", "c", "d"})
    ['c', 'd']
    """
    return [*takewhile(wanted.__contains__, reversed(names))][::-1]


# Arrays -------------------------------------------------------------------------------------------


def fitting(data: DataSet) -> Mapping[str, Any]:
    """Settings for data in memory.

    They are the same on every machine: nothing is timed, and no pre-trained weights are looked for.
    """
    shape = data.train.images.shape
    if len(shape) == 1:
        model = [Line("name", "mlp"), Line("hidden", [256])]
    else:
        sizes = (Line("width", 64), Line("depth", 2), Line("heads", 4))
        model = [Line("name", "vit"), *sizes, Line("patch", _patch(*shape[1:]))]
    draft = _draft([Line("name", data.name)], data.train, model, Line("lr", 1e-3))
    if data.train.users is not None:
        draft["split"].append(Line("max_images", len(data.train)))
    draft["run"].append(Line("rounds", ROUNDS))
    return _tree(draft)


def _patch(height: int, width: int) -> int:
    """The side of the patches that images are cut into: the smallest that gives 64 or fewer.

    >>> _patch(32, 32), _patch(64, 64), _patch(28, 28), _patch(37, 37), _patch(480, 640)
    (4, 8, 4, 37, 80)
    """
    both = math.gcd(height, width)
    sides = [side for side in range(4, both + 1) if both % side == 0]
    return next((side for side in sides if height * width <= PATCHES * side**2), both)


# The file -----------------------------------------------------------------------------------------


def _draft(data: list[Line], train: Part, model: list[Line], lr: Line) -> Draft:
    """All sections but the number of rounds."""
    clients = _clients(train)
    split = [Line("name", "natural", f"one client per user: {clients:,}")]
    if train.users is None:
        split = [
            Line("name", "pivot_dirichlet", "the data name no users: clients with skewed labels"),
            Line("clients", clients),
            Line("gamma", 0.3, "smaller is more skewed"),
        ]
    everyone = Line("participation", 1.0, "every client in every round")
    some = Line("cohort", COHORT, "clients that take part in a round")
    return {
        "run": [Line("method", "fedharmony", "`fedharmony list methods` shows the others")],
        "data": data,
        "split": split,
        "model": model,
        "train": [Line("epochs", EPOCHS), Line("batch_size", BATCH), lr],
        "federation": [everyone if clients <= COHORT else some],
    }


def _clients(train: Part) -> int:
    """The number of users, or of clients that the data are split among."""
    if train.users is not None:
        return len(np.unique(train.users))
    return min(max(len(train.labels) // PER_CLIENT, 2), CLIENTS)


def _proposal(
    draft: Draft,
    spec: InputSpec | FeatureSpec,
    classes: int,
    train: Part,
    test: Part,
    what: str,
) -> Proposal:
    """The file, with as many rounds as fit into the time."""
    clients, why = _clients(train), "go on for longer if mAP still rises at the end"
    per_round = EPOCHS * len(train.labels) * min(COHORT, clients) / clients
    rounds = MOST
    if not torch.cuda.is_available():
        each = _seconds(compose(_tree(draft)), spec, classes)
        rounds = min(max(int(BUDGET / (each * per_round)), FEWEST), MOST)
        minutes = max(1, round(each * per_round * rounds / 60))
        why = f"about {minutes:,} min on this machine, at {1 / each:,.0f} images/s; {why}"
    draft["run"].append(Line("rounds", rounds, why))
    users = "no users" if train.users is None else f"{clients:,} users"
    seen = (
        f"{what}; {len(train.labels):,} for training, {len(test.labels):,} for the test, "
        f"{classes:,} classes, {users}"
    )
    text = f"# Made by `fedharmony init`. {seen}.\n" + "".join(_section(*s) for s in draft.items())
    compose(_tree(draft))
    return Proposal(text, seen)


def _seconds(settings: Settings, spec: InputSpec | FeatureSpec, classes: int) -> float:
    """Seconds to train on one image, measured."""
    backbone = make_backbone(settings, settings.model.own, spec)
    model = Model(backbone, LinearHead(backbone.width, classes))
    return seconds_per_image(model, model.init(torch_rng(0, "model")), spec.shape, BATCH)


def _tree(draft: Draft) -> Mapping[str, Any]:
    return {name: {line.key: line.value for line in lines} for name, lines in draft.items()}


def _section(name: str, lines: Sequence[Line]) -> str:
    """One section as TOML, each value with its reason behind it.

    >>> print(_section("split", [Line("name", "iid"), Line("clients", 5, "few")]), end="")
    <BLANKLINE>
    [split]
    name = "iid"
    clients = 5  # few
    """
    rows = [
        f"{line.key} = {in_toml(line.value)}" + (f"  # {line.why}" if line.why else "")
        for line in lines
    ]
    return "\n".join(["", f"[{name}]", *rows, ""])


def refuse_overwriting(out: Path, force: bool) -> None:
    """Refuse to write over a file unless asked to."""
    if is_there(out) and not force:
        raise ConfigError(
            f"{out} is there already. Choose another name with --out, or write over it with "
            "--force."
        )


def save(proposal: Proposal, out: Path, force: bool) -> None:
    """Write the config file."""
    refuse_overwriting(out, force)
    try:
        write_atomically(out, proposal.text.encode())
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}. Choose --out.") from None
