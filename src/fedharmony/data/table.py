"""Images of your own, listed with their labels in a CSV or Parquet table.

A table has one row per image and a column with the image's path below the folder of the data.
Labels are written in one of two ways::

    image,labels,user,split                image,cat,dog,tree
    a/1.jpg,cat|tree,anna,train            a/1.jpg,1,0,1
    a/2.jpg,|,anna,train                   a/2.jpg,0,0,0
    b/3.jpg,,bert,test                     b/3.jpg,,,1

On the left (``format = "joined"``) the names stand in one column, with ``|`` between them; ``|``
alone means that the image has none of the labels. On the right (``format = "columns"``) each class
has a column of zeros and ones. An empty cell means unknown: such labels count neither in training
nor in a metric. In Parquet, missing values are empty cells, and lists of names are joined names.

A column ``user`` (or ``client``) gives the natural clients, a column ``split`` the test images. The
test images may also stand in a table of their own; else some are held out at random: whole users
where there are users, so that nobody is both trained on and tested on. A column that has no known
meaning is refused, because it may be a misspelt one; ``ignore`` names those to pass over.
"""

from __future__ import annotations

import csv
import importlib
import io
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple, TypeAlias, TypeVar

import numpy as np
from annotated_types import Ge, Gt, Lt

from fedharmony.config import Checked
from fedharmony.data.base import datasets
from fedharmony.data.cache import Resize, decode_in_order
from fedharmony.data.check import (
    Check,
    CheckLine,
    Tell,
    counts_of,
    doubts_about,
    facts_of,
    wrong_separator,
)
from fedharmony.data.file_source import AnnotatedFiles, Content, FileSource
from fedharmony.data.tree import Tree, open_tree
from fedharmony.errors import ConfigError, DataError, nearest, shown
from fedharmony.reading import read_regular
from fedharmony.rng import numpy_rng
from fedharmony.types import Index, Labels

T = TypeVar("T")

#: Endings of tables.
TABLES = (".csv", ".parquet")
SEPARATOR = "|"
#: Columns that are understood without being named in the settings.
USER_COLUMNS = ("user", "client")
SPLIT_COLUMNS = ("split", "partition")
#: The usual words of a split column and what they mean; rows that the settings call neither
#: training nor test images are left out.
SPLITS = {"train": "train", "val": "val", "dev": "val", "test": "test"}

#: Pairs of image and label that a table may have; its label matrix takes a byte for each.
MOST_CELLS = 2 << 30

UNKNOWN = 2
#: What a cell of a label column means. Spreadsheets and data frames write numbers and truth values
#: in several ways.
CELLS = {
    **dict.fromkeys(("0", "0.0", "false", "False", "FALSE"), 0),
    **dict.fromkeys(("1", "1.0", "true", "True", "TRUE"), 1),
    "": UNKNOWN,
}


@dataclass(frozen=True)
class Division(Checked):
    """Settings of rows: whose they are, and which are training and which are test rows.

    Attributes:
        user: The column with the owner; empty for "user" or "client" if there is one.
        split: The column that tells training from test rows; empty for "split" or "partition" if
            there is one.
        ignore: Columns to pass over.
        train_split: The word for training images in the split column.
        test_split: The word for test images there.
        test_fraction: The share of images held out for testing where neither a split column nor a
            second table says which.
        hold_out: What is held out then: "users" with all their images, until the share is reached,
            or single "images". Empty for users where the table has them.
        seed: Seed of that choice.
    """

    user: str = ""
    split: str = ""
    ignore: tuple[str, ...] = ()
    train_split: str = "train"
    test_split: str = "test"
    test_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2
    hold_out: Literal["", "users", "images"] = ""
    seed: Annotated[int, Ge(0)] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if _split(self.train_split) == _split(self.test_split):
            raise ConfigError(
                f"train_split {self.train_split!r} and test_split {self.test_split!r} mean the "
                "same; test images must not be trained on."
            )

    def word(self, cell: str) -> str:
        """What a cell of the split column means."""
        own = (self.train_split, self.test_split)
        if cell not in SPLITS and cell not in own:
            raise RowError(f"there is no split {cell!r}. {nearest(cell, {*SPLITS, *own})}")
        return _split(cell)

    def divide(
        self,
        where: str,
        names: Sequence[str],
        users: Sequence[str] | None,
        words: Sequence[str] | None,
    ) -> tuple[Index, Index]:
        """The training and the test rows of a table, whose split column means ``words``."""
        if words is None:
            if users is None and self.hold_out == "users":
                raise DataError(
                    f'{where} has no column of users, but data.hold_out = "users". Name the column '
                    "in data.user, or remove data.hold_out."
                )
            if users is None or self.hold_out == "images":
                return held_out(names, self.test_fraction, self.seed)
            return held_out_users(users, self.test_fraction, self.seed)
        found = np.array(words)
        train, test = (
            np.flatnonzero(found == _split(word)) for word in (self.train_split, self.test_split)
        )
        for rows, setting in ((train, "train_split"), (test, "test_split")):
            if not len(rows):
                raise DataError(
                    f"{where} has no image of split {getattr(self, setting)!r}. Mark some so, set "
                    f"data.{setting} to another word, or name the split column in data.ignore to "
                    "have test images held out at random."
                )
        return train, test


@datasets.register("table")
class Table(FileSource):
    """Images of your own, listed in a CSV or Parquet table with labels, users and split."""

    @dataclass(frozen=True)
    class Config(FileSource.Config, Division):
        """Where the table is, and what its columns mean.

        Attributes:
            table: The table's name in the folder ``path``; empty for the only one there.
            test_table: A second table, of the test images.
            format: "joined" for names in one column, "columns" for a column of 0 and 1 per class.
            image: The column with the image's path below ``path``.
            labels: With "joined", the column with the names.
            classes: The classes in label order. Empty for all names, sorted, or with "columns" for
                all columns that mean nothing else, in their order.
        """

        table: str = ""
        test_table: str = ""
        format: Literal["joined", "columns"] = "joined"
        image: str = "image"
        labels: str = "labels"
        classes: tuple[str, ...] = ()

        def __post_init__(self) -> None:
            super().__post_init__()
            if twice := repeated(self.classes):
                raise ConfigError(f"classes names {twice!r} twice.")

    config: Config

    def tree(self) -> Tree:
        """The files at ``path``; unlike in published data sets, no folder name is special."""
        super().tree()  # refuses a path that is not there
        return open_tree(self.config.path, drop=())

    def annotations(self) -> Content:
        """The classes, and the rows of the table as training and test part."""
        tree, config = self.tree(), self.config
        joined = config.format == "joined"
        labels = (
            JoinedCells(config.labels, config.classes) if joined else ColumnCells(config.classes)
        )
        places: dict[str, str] = {}
        main, *second = [self._read(tree, name, labels, places) for name in self._tables(tree)]
        classes, values = labels.finish()
        if second:
            count = len(main.images)
            train = main.part(tree, np.arange(count), values[:count])
            test = second[0].part(tree, np.arange(len(second[0].images)), values[count:])
        else:
            divided = config.divide(
                main.where, main.images, main.users or None, main.splits or None
            )
            train, test = (main.part(tree, rows, values[rows]) for rows in divided)
        sign = repr(SEPARATOR) if joined else "0"
        for word, part in (("training", train), ("test", test)):
            if part.known is not None and not part.known.any():
                raise DataError(
                    f"No label of any {word} image is known in {tree.where}: every cell is empty. "
                    f"If the images have none of the labels, write {sign} instead."
                )
        return classes, train, test

    def check(self, tell: Tell | None = None) -> Check:
        """Say what the table holds, doubt names that look alike, and decode every image."""
        classes, train, test = self.annotations()
        counts = counts_of(classes, train, test)
        lines, faults = [], []
        if self.config.format == "joined" and (fault := wrong_separator(classes, SEPARATOR)):
            faults.append(fault)
        for word, part in (("training", train), ("test", test)):
            faulty = image_faults(part, tell)
            readable = len(part) - len(faulty)
            lines.append(CheckLine(f"{word} images that can be read", len(part), readable))
            faults += faulty
        advice = self._advice(lines, len(train) + len(test))
        if faults:
            advice = (
                "Correct the table or the files. Images that cannot be read are left out with "
                'data.unreadable = "skip".'
            )
        facts = [("classes", f"{len(classes):,}"), *facts_of(train, test, "image")]
        return Check(
            tuple(lines), advice, tuple(facts), counts, doubts_about(counts), tuple(faults)
        )

    def obtain(self) -> str:
        """What to prepare, and where it goes."""
        return (
            f"The folder or archive that `path` names must hold a table ({' or '.join(TABLES)}) "
            "and the images that it lists, under paths relative to that folder."
        )

    def _tables(self, tree: Tree) -> list[str]:
        """The names of the table and, where there is one, of the test images' table."""
        name, test = self.config.table, self.config.test_table
        if not name:
            found = [file for file in tree.list() if _is_table(file) and file != test]
            if len(found) != 1:
                listed = f" ({', '.join(found[:5])})" if found else ""
                raise DataError(
                    f"There is not one table in {tree.where} but {len(found)}{listed}. Set "
                    f"data.table to the name of yours. {self.obtain()}"
                )
            name = found[0]
        names = [name, test] if test else [name]
        self.require(tree, *names)
        for wrong in (file for file in names if not _is_table(file)):
            raise DataError(f"{tree.locate(wrong)} is not a table ({' or '.join(TABLES)}).")
        if name == test:
            raise DataError(
                f"data.table and data.test_table are both {name!r}. Test images must not be "
                "trained on; name two tables."
            )
        return names

    def _read(self, tree: Tree, name: str, labels: LabelCells, places: dict[str, str]) -> Listing:
        """The rows of a table; labels are added to ``labels``, images to ``places``."""
        where = tree.locate(name)
        names, rows = table_rows(tree.read(name), where, self.obtain())
        header = Header(where, names, self.config.ignore)
        image_at, user_at, split_at, labels_at = self._columns(header, labels)
        listing = Listing(where)
        for row in rows:
            try:
                refuse_other_width(row, header.names)
                image = _image_name(row.cells[image_at])
                if places.setdefault(image, row.place) != row.place:
                    raise RowError(f"image {image!r} is listed already in {places[image]}.")
                listing.images.append(image)
                if user_at is not None:
                    if not row.cells[user_at]:
                        raise RowError("the user is missing.")
                    listing.users.append(row.cells[user_at])
                if split_at is not None:
                    listing.splits.append(self.config.word(row.cells[split_at]))
                labels.add([row.cells[column] for column in labels_at])
            except RowError as problem:
                raise DataError(f"{row.place}: {problem} Correct the table.") from None
        if not listing.images:
            raise DataError(f"{where} has a header but lists no image. {self.obtain()}")
        return listing

    def _columns(
        self, header: Header, labels: LabelCells
    ) -> tuple[int, int | None, int | None, tuple[int, ...]]:
        """Where in a row stand image, user, split and labels."""
        config, where = self.config, header.where
        image = header.place(config.image, "image")
        user = header.place_if_any(config.user, "user", USER_COLUMNS)
        split = header.place_if_any(config.split, "split", SPLIT_COLUMNS)
        if split is not None and config.test_table:
            raise DataError(
                f"{where} has the split column {header.names[split]!r}, but data.test_table names "
                "the test images. Name the column in data.ignore, or remove data.test_table."
            )
        free = [name for name, i in header.places.items() if i not in (image, user, split)]
        wanted = labels.columns(free)
        if not wanted:
            raise DataError(f"{where} has no label column. Add a column of 0 and 1 per class.")
        labelled = tuple(header.place(name, labels.setting) for name in wanted)
        roles = [column for column in (image, user, split, *labelled) if column is not None]
        if (doubled := repeated(roles)) is not None:
            raise DataError(
                f"The settings give the column {header.names[doubled]!r} of {where} two meanings. "
                f"Look at data.image, data.user, data.split and data.{labels.setting}."
            )
        if unknown := [name for name in free if name not in wanted]:
            raise DataError(
                f"{where} has the column {unknown[0]!r}, and no setting says what it is. Name it "
                f"in data.ignore, or in data.user, data.split or data.{labels.setting}."
            )
        return image, user, split, labelled


def image_faults(part: AnnotatedFiles, tell: Tell | None) -> list[str]:
    """Every image of a part that is missing or cannot be decoded, by name."""
    reasons, done = dict[int, str](), 0
    for pixels, troubles in decode_in_order(part.files, Resize(1)):
        reasons |= dict(troubles)
        done += len(pixels) + len(troubles)
        if tell is not None:
            tell(done, len(part))
    return [f"{part.files.name(i)}: {reasons[i]}." for i in sorted(reasons)]


def held_out(images: Sequence[str], fraction: float, seed: int) -> tuple[Index, Index]:
    """Rows to train on and round(fraction · N) rows to test on, at least one of each.

    The choice depends on the names, not on their order.

    >>> train, test = held_out(["d", "a", "c", "b"], 0.5, seed=0)
    >>> again = held_out(["a", "b", "c", "d"], 0.5, seed=0)
    >>> [sorted("dacb"[i] for i in test), ["abcd"[i] for i in again[1]]]
    [['b', 'c'], ['b', 'c']]
    """
    count = len(images)
    if count < 2:
        raise DataError(
            "The table lists a single image, so none can be held out for testing. Add images, or a "
            "table of test images (data.test_table)."
        )
    by_name = np.array(sorted(range(count), key=images.__getitem__), np.int64)
    drawn = by_name[numpy_rng(seed, "held-out test images").permutation(count)]
    size = min(max(round(fraction * count), 1), count - 1)
    return np.sort(drawn[size:]), np.sort(drawn[:size])


def held_out_users(users: Sequence[str], fraction: float, seed: int) -> tuple[Index, Index]:
    """Rows of the users to train on, and of those to test on; at least one user each.

    Users are drawn one by one. One is held out if that brings the number of test images nearer to
    fraction · N than leaving it would; so a user with most of the images is rarely held out.

    >>> train, test = held_out_users(["ann", "bob", "ann", "cid", "bob", "dot"], 0.4, seed=0)
    >>> train.tolist(), test.tolist()
    ([0, 1, 2, 4], [3, 5])
    """
    names, owner, sizes = np.unique(np.array(users), return_inverse=True, return_counts=True)
    if len(names) < 2:
        raise DataError(
            f"All images of the table are of one user, {users[0]!r}, so no user can be held out "
            'for testing. Mark the test images in a split column, or set data.hold_out = "images".'
        )
    order = numpy_rng(seed, "held-out test users").permutation(len(names))
    held = np.zeros(len(names), bool)
    wanted = fraction * len(users)
    for user in order:
        reached = sizes[held].sum()
        nearer = abs(reached + sizes[user] - wanted) < abs(reached - wanted)
        held[user] = nearer and held.sum() < len(names) - 1
    if not held.any():  # every user has more than twice the share
        held[sizes.argmin()] = True
    rows = held[owner.reshape(-1)]
    return np.flatnonzero(~rows), np.flatnonzero(rows)


class RowError(ValueError):
    """A fault in one row; the caller adds where the row stands."""


class Row(NamedTuple):
    """The cells of a row, without surrounding blanks, and where it stands."""

    place: str
    cells: list[str]


def refuse_other_width(row: Row, names: Sequence[str]) -> None:
    """Refuse a row that does not have a cell for each column."""
    if len(row.cells) != len(names):
        raise RowError(f"there are {len(row.cells):,} cells below {len(names):,} columns.")


class Header:
    """The columns of a table that are not passed over; each must have a name of its own.

    >>> header = Header("a.csv", ["image", "note", "labels"], ignore=["note"])
    >>> header.places, header.place("labels", "labels")
    ({'image': 0, 'labels': 2}, 2)
    """

    def __init__(self, where: str, names: Sequence[str], ignore: Sequence[str]) -> None:
        self.where, self.names = where, names
        self.places = {name: i for i, name in enumerate(names) if name not in ignore}
        if (twice := repeated([name for name in names if name in self.places])) is not None:
            raise DataError(f"{where} has two columns {twice!r}. Rename or remove one.")
        if "" in self.places:
            raise DataError(
                f"{where}, column {self.places[''] + 1} has no name. Name or remove it; pandas "
                "leaves out the row numbers with index=False."
            )

    def place(self, name: str, setting: str) -> int:
        """The place of a column that ``data.SETTING`` names."""
        if name not in self.places:
            other = ' Or set data.format = "columns", if every class has a column of its own.'
            raise DataError(
                f"{self.where} has no column {name!r}, which data.{setting} asks for. "
                f"{nearest(name, self.places)}{other if setting == 'labels' else ''}"
            )
        return self.places[name]

    def place_if_any(self, name: str, setting: str, usual: Sequence[str]) -> int | None:
        """The place of a column that a setting names, or else of one with a usual name."""
        found = [name] if name else [column for column in usual if column in self.places]
        if len(found) > 1:
            raise DataError(
                f"{self.where} has columns {' and '.join(found)}. Set data.{setting} to one of "
                "them and name the other in data.ignore."
            )
        return self.place(found[0], setting) if found else None


@dataclass
class Listing:
    """The rows of one table beside their labels; no users, no splits without such a column."""

    where: str
    images: list[str] = field(default_factory=list)
    users: list[str] = field(default_factory=list)
    splits: list[str] = field(default_factory=list)

    def part(self, tree: Tree, rows: Index, values: Labels) -> AnnotatedFiles:
        """Some rows, whose labels and unknown labels are ``values``; these become the labels."""
        images = [self.images[i] for i in rows]
        known = None
        if values.max() == UNKNOWN:
            known = values != UNKNOWN
            values *= known  # in place: the matrix may be large
        return AnnotatedFiles(
            files=tree.images(images),
            labels=values,
            ids=tuple(images),
            users=np.array([self.users[i] for i in rows]) if self.users else None,
            known=known,
        )


# Labels -------------------------------------------------------------------------------------------


class JoinedCells:
    """Names in one cell, joined by ``|``; all names become classes where none are given.

    It takes the cells of row after row and makes a matrix of them, as :class:`ColumnCells` does.

    >>> cells = JoinedCells("labels")
    >>> for cell in ("tree|cat", "|", ""):
    ...     cells.add([cell])
    >>> classes, values = cells.finish()
    >>> classes, values.tolist()
    (('cat', 'tree'), [[1, 1], [0, 0], [2, 2]])
    """

    setting = "labels"

    def __init__(self, column: str, classes: Sequence[str] = ()) -> None:
        self._column = column
        self._fixed = bool(classes)
        self._codes = {name: code for code, name in enumerate(classes)}
        self._count = 0
        self._rows, self._columns, self._unknown = array("q"), array("q"), array("q")

    def columns(self, free: Sequence[str]) -> Sequence[str]:
        """The columns with labels, given those of a table that mean nothing else."""
        return (self._column,)

    def add(self, cells: list[str]) -> None:
        """Take a row's cells under those columns; :class:`RowError` when they make no sense."""
        (cell,) = cells
        if not cell:
            self._unknown.append(self._count)
        elif cell != SEPARATOR:
            for name in cell.split(SEPARATOR):
                self._rows.append(self._count)
                self._columns.append(self._code(name.strip(), cell))
        self._count += 1

    def _code(self, name: str, cell: str) -> int:
        code = self._codes.get(name)
        if code is None:
            if not name:
                raise RowError(f"column {self._column!r} holds {cell!r}, which lacks a name.")
            if self._fixed:
                raise RowError(
                    f"column {self._column!r} holds {cell!r}, and data.classes has no {name!r}. "
                    f"{nearest(name, self._codes)}"
                )
            code = self._codes[name] = len(self._codes)
        return code

    def finish(self) -> tuple[tuple[str, ...], Labels]:
        """The classes, and ``(N, C)`` with 1 where a class is present and UNKNOWN where unknown."""
        if not self._codes:
            raise DataError(
                f"The column {self._column!r} names no label at all. Write names into it, with "
                f"{SEPARATOR} between them."
            )
        classes = tuple(self._codes) if self._fixed else tuple(sorted(self._codes))
        if self._count * len(classes) > MOST_CELLS:
            raise DataError(
                f"The table has {len(classes):,} different labels for {self._count:,} images. If "
                f"{SEPARATOR} stands between the names, are they labels at all? A table may have "
                f"{MOST_CELLS:,} pairs of image and label."
            )
        place = np.empty(len(classes), np.int64)
        place[[self._codes[name] for name in classes]] = np.arange(len(classes))
        values = np.zeros((self._count, len(classes)), np.uint8)
        values[self._rows, place[self._columns]] = 1
        values[self._unknown] = UNKNOWN
        return classes, values


class ColumnCells:
    """One cell per class: 0, 1 or empty; all free columns are classes where none are given.

    >>> cells = ColumnCells()
    >>> cells.columns(["cat", "tree"])
    ('cat', 'tree')
    >>> cells.add(["1", ""])
    >>> cells.add(["0.0", "True"])
    >>> cells.finish()[1].tolist()
    [[1, 2], [0, 1]]
    """

    setting = "classes"

    def __init__(self, classes: Sequence[str] = ()) -> None:
        self._classes = tuple(classes)
        self._values = bytearray()

    def columns(self, free: Sequence[str]) -> Sequence[str]:
        """See :meth:`JoinedCells.columns`; a second table must have the columns of the first."""
        if not self._classes:
            self._classes = tuple(free)
        return self._classes

    def add(self, cells: list[str]) -> None:
        """See :meth:`JoinedCells.add`."""
        self._values += label_values(cells, self._classes)

    def finish(self) -> tuple[tuple[str, ...], Labels]:
        """See :meth:`JoinedCells.finish`."""
        values = np.frombuffer(self._values, np.uint8)
        return self._classes, values.reshape(-1, len(self._classes))


LabelCells: TypeAlias = JoinedCells | ColumnCells


def label_values(cells: Sequence[str], names: Sequence[str]) -> bytes:
    """What a row has under its label columns: 0, 1 or :data:`UNKNOWN` each."""
    try:
        return bytes(map(CELLS.__getitem__, cells))
    except KeyError:
        cell, name = next(pair for pair in zip(cells, names, strict=True) if pair[0] not in CELLS)
        raise RowError(
            f"column {name!r} holds {shown(cell)}, which is not 0, 1 or empty; if {name!r} is not "
            "a class, name it in data.ignore."
        ) from None


# Reading ------------------------------------------------------------------------------------------


def read_file(file: Path) -> bytes:
    """The content of a file that the user names."""
    try:
        return read_regular(file)
    except OSError as error:
        raise DataError(f"{file} cannot be read: {error.strerror}. Check the path.") from None


def table_rows(data: bytes, where: str, advice: str) -> tuple[list[str], Iterator[Row]]:
    """The columns of a CSV or Parquet file, by the ending of its name, and its rows."""
    rows = (csv_rows if where.lower().endswith(".csv") else parquet_rows)(data, where)
    header = next(rows, None)
    if header is None:
        raise DataError(f"{where} is empty. {advice}")
    return header.cells, rows


def csv_rows(data: bytes, where: str) -> Iterator[Row]:
    """The header of a CSV file and then its rows."""
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{where}, line {line} is not UTF-8 text. Save the table as CSV in UTF-8."
        ) from None
    # Only quotes may span lines, and a row is where it ends.
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        for cells in reader:
            if cells:
                yield Row(f"{where}, line {reader.line_num}", [cell.strip() for cell in cells])
    except csv.Error as error:
        raise DataError(f"{where}, line {reader.line_num}: {error}. Correct the table.") from None


def parquet_rows(data: bytes, where: str) -> Iterator[Row]:
    """The names of the columns of a Parquet file and then its rows."""
    with open_parquet(io.BytesIO(data), where) as file:
        yield Row(where, list(file.schema_arrow.names))
        number = 0
        for batch in file.iter_batches():
            columns = [column.to_pylist() for column in batch.columns]
            for cells in zip(*columns, strict=True):
                number += 1
                yield Row(f"{where}, row {number}", [_text(cell) for cell in cells])


def _text(cell: object) -> str:
    """A Parquet cell as a CSV file would hold it; missing values, NaN too, are empty.

    >>> _text(None), _text(1.0), _text(["cat", "tree"]), _text([])
    ('', '1.0', 'cat|tree', '|')
    """
    if isinstance(cell, list):
        return SEPARATOR.join(map(_text, cell)) if cell else SEPARATOR
    if isinstance(cell, bytes):  # text, written by programs that do not mark it so
        return cell.decode(errors="replace").strip()
    return "" if cell is None or cell != cell else str(cell).strip()


@contextmanager
def open_parquet(source: Path | BinaryIO, where: object) -> Iterator[Any]:
    """A ``pyarrow.parquet.ParquetFile``; trouble with it in the block is a :class:`DataError`."""
    try:
        pyarrow, parquet = map(importlib.import_module, ("pyarrow", "pyarrow.parquet"))
    except ImportError as error:
        raise DataError(
            f"Reading {where} needs the package pyarrow, which is not installed. Run: "
            'pip install "fedharmony[parquet]"'
        ) from error
    try:
        with parquet.ParquetFile(source) as file:
            yield file
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(
            f"{where} is not a Parquet file, or is damaged: {error}. Get the file again."
        ) from error


def _is_table(name: str) -> bool:
    return name.lower().endswith(TABLES)


def _split(word: str) -> str:
    return SPLITS.get(word, word)


def repeated(values: Sequence[T]) -> T | None:
    """A value that stands there twice, if one does."""
    return next((value for value, count in Counter(values).items() if count > 1), None)


def _image_name(cell: str) -> str:
    """The plain form of an image's path, so that one image has one name."""
    parts = [part for part in cell.split("/") if part not in ("", ".")]
    if cell.startswith("/") or ".." in parts or not parts:
        raise RowError(f"the image {cell!r} is not a path below the folder of the data.")
    return "/".join(parts)
