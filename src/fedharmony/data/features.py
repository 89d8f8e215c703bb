"""Feature vectors with labels: tabular data, or embeddings of texts, sounds and images.

One file holds one sample per row. Four forms are read, told apart by the ending of the file:

==========  =======================================================================================
``.npz``    arrays ``X`` (N, F) and ``Y`` (N, C) of zeros and ones; where there are any, ``known``
            (N, C), ``ids``, ``users`` and ``split`` (N,), ``features`` (F,) and ``classes`` (C,)
``.csv``    a header, then one row per sample; label columns begin with ``label_``, or are named or
``.parquet`` counted in the settings
``.arff``   as MULAN and MEKA have it, dense or sparse; labels are those of the XML file beside it,
            of ``-C`` in the relation's name, or of the settings
==========  =======================================================================================

A column ``user`` (or ``client``) gives the natural clients, ``split`` the test samples and ``id`` a
name of each sample; in ARFF only where the settings say so, because such names are often words of a
text there. All other columns are features: numbers, none missing. An empty label (``?`` in ARFF) is
unknown. What is not understood is refused with its line and column.
"""

from __future__ import annotations

import io
import zipfile
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge

from fedharmony.config import FilePath, machine_memory
from fedharmony.data.arff import Sheet, labels_of_xml, read_arff
from fedharmony.data.base import DataSet, Images, LabelledImages, Source, TensorImages, datasets
from fedharmony.data.check import Check, Tell, counts_of, doubts_about, facts_of
from fedharmony.data.table import (
    SPLIT_COLUMNS,
    UNKNOWN,
    USER_COLUMNS,
    Division,
    Header,
    Row,
    RowError,
    label_values,
    read_file,
    refuse_other_width,
    repeated,
    table_rows,
)
from fedharmony.errors import ConfigError, DataError, nearest, shown, some
from fedharmony.reading import is_file, is_folder, user_path
from fedharmony.types import Index, Labels

Values: TypeAlias = npt.NDArray[np.float32]

#: Endings of the files that are read.
FORMS = (".npz", ".csv", ".parquet", ".arff")
ID_COLUMNS = ("id",)
#: The arrays of an ``.npz`` file; the first two must be there.
ARRAYS = ("X", "Y", "known", "ids", "users", "split", "features", "classes")
#: The largest float32.
LARGEST = float(np.finfo(np.float32).max)
#: How many standard deviations a feature's mean may lie from zero: float32 has 24 bits, and about
#: seven of them should be left for the values themselves.
FARTHEST = 2.0**17
#: Samples whose statistics are taken at a time.
CHUNK = 4096


@datasets.register("features")
class Features(Source):
    """Feature vectors of your own (npz, CSV, Parquet or ARFF) with labels, users and split."""

    @dataclass(frozen=True)
    class Config(Source.Config, Division):
        """Where the samples are, and what their columns mean.

        Attributes:
            path: The file.
            test_path: A second file, of the test samples.
            labels: Label columns by name, in label order.
            label_prefix: Else, what the names of label columns begin with; classes do without it.
            label_count: Else, how many columns are labels.
            label_side: Whether these are the columns at the "end" or at the "start".
            label_file: With ARFF, MULAN's XML file of labels; empty for the one beside it if there
                is one (x.xml for x.arff, x-train.arff and x-test.arff).
            id: The column with the name of a sample; empty for "id" if there is one.
        """

        path: FilePath = ""
        test_path: FilePath = ""
        labels: tuple[str, ...] = ()
        label_prefix: str = "label_"
        label_count: Annotated[int, Ge(1)] | None = None
        label_side: Literal["end", "start"] = "end"
        label_file: FilePath = ""
        id: str = ""

        def __post_init__(self) -> None:
            super().__post_init__()
            ways = ("labels", "label_count", "label_file")
            if len(given := [name for name in ways if getattr(self, name)]) > 1:
                raise ConfigError(f"{' and '.join(given)} both say what the labels are. Give one.")
            if twice := repeated(self.labels):
                raise ConfigError(f"labels names {twice!r} twice.")

    config: Config

    def load(self) -> DataSet:
        """Read the file, or both; samples become the training and the test part."""
        train, test = self._parts()
        for part, samples in (("training", train), ("test", test)):
            if samples.labels.size and (samples.labels == UNKNOWN).all():
                raise DataError(
                    f"No label of any {part} sample is known in {samples.where}. Write 0 where a "
                    "sample does not have the label."
                )
        refuse_coarse(train)
        parts = train.as_images(), test.as_images()
        return DataSet(self.name, train.classes, *parts, features=train.features)

    def check(self, tell: Tell | None = None) -> Check:
        """Read everything, and say what is there."""
        train, test = self._parts()
        refuse_coarse(train)
        parts = train.as_images(), test.as_images()
        counts = counts_of(train.classes, *parts)
        constant = [n for n, v in zip(train.features, train.values.T, strict=True) if _is_flat(v)]
        doubts = doubts_about(counts)
        if constant:
            doubts += (f"{some(constant)}: the same value in every training sample.",)
        facts = [("features", f"{len(train.features):,}"), *facts_of(*parts, "sample")]
        return Check((), "The data are ready.", tuple(facts), counts, doubts)

    def _parts(self) -> tuple[Samples, Samples]:
        """The training and the test samples."""
        config = self.config
        main = self._read(config.path, "path")
        if not config.test_path:
            names = main.ids or [f"{i:012d}" for i in range(len(main.values))]
            users = None if main.users is None else main.users.tolist()
            rows = config.divide(main.where, names, users, main.splits)
            return main.some(rows[0]), main.some(rows[1])
        if main.splits is not None:
            raise DataError(
                f"{main.where} says which samples are for testing, but so does data.test_path. "
                "Name the split column in data.ignore, or remove data.test_path."
            )
        test = self._read(config.test_path, "test_path")
        for what, ours, others in (
            ("features", main.features, test.features),
            ("classes", main.classes, test.classes),
        ):
            if ours != others:
                pairs = zip(ours, others, strict=False)
                first = next((f", first {a!r} and {b!r}" for a, b in pairs if a != b), "")
                raise DataError(
                    f"{main.where} has {len(ours):,} {what} and {test.where} {len(others):,}; they "
                    f"must be the same, in the same order, and are not{first}."
                )
        if main.ids and test.ids and (both := set(main.ids) & set(test.ids)):
            raise DataError(
                f"{main.where} and {test.where} share samples, for instance {min(both)!r}. Test "
                "samples must not be trained on."
            )
        return main, test

    def inputs(self, path: str, names: Sequence[str]) -> tuple[list[str], Values]:
        """Names and feature vectors of the samples of a file, which needs no labels.

        A table has a column for each of the features ``names``, and may have more. Samples without
        an id are called by their numbers from 1 on.
        """
        content = self._content(path, "path", ("X",))
        if isinstance(content, Sheet):
            return self._inputs_of_rows(content, names)
        return _inputs_of_arrays(content, names, str(user_path(path)))

    def _read(self, path: str, setting: str) -> Samples:
        """The samples of one file."""
        content = self._content(path, setting, ("X", "Y"))
        if isinstance(content, Sheet):
            return self._of_rows(content)
        return self._of_arrays(content, str(user_path(path)))

    def _content(
        self, path: str, setting: str, arrays: Sequence[str]
    ) -> Sheet | dict[str, npt.NDArray[Any]]:
        """What stands in a file: a table, or arrays, of which some must be there."""
        file = user_path(path)
        where, form = str(file), file.suffix.lower()
        if not path:
            raise DataError(
                f"Where are the features? Set data.{setting} to a file ({', '.join(FORMS)})."
            )
        if is_folder(file):
            raise DataError(f"{where} is a folder. Set data.{setting} to the file in it.")
        if form not in FORMS:
            raise DataError(f"{where} is no file of features; they end in {', '.join(FORMS)}.")
        data, advice = read_file(file), "Write the samples into it."
        if not data:
            raise DataError(f"{where} is empty. {advice}")
        if form == ".npz":
            return _arrays(data, where, arrays)
        if form == ".arff":
            sheet = read_arff(data, where)
            found = self.config.label_file or _list_beside(file)
            return sheet._replace(labels=labels_of_xml(found)) if found else sheet
        return Sheet(where, *table_rows(data, where, advice))

    # -- rows of cells -----------------------------------------------------------------------------

    def _of_rows(self, sheet: Sheet) -> Samples:
        """The samples of a table."""
        header = Header(sheet.where, sheet.names, self.config.ignore)
        at: dict[str, int] = {}
        for role, names in {"id": ID_COLUMNS, "user": USER_COLUMNS, "split": SPLIT_COLUMNS}.items():
            usual = names if sheet.speaking else ()
            place = header.place_if_any(getattr(self.config, role), role, usual)
            if place is not None:
                at[role] = place
        free = [name for name, i in header.places.items() if i not in at.values()]
        classes = self._classes(sheet, free)
        features = [name for name in free if name not in classes]
        if not features:
            raise DataError(f"{sheet.where} has no feature column: all of them are labels.")
        values, labels = array("f"), bytearray()
        ids: dict[str, str] = {}
        texts: dict[str, list[str]] = {role: [] for role in at}
        x, y = (_picker([header.places[n] for n in names]) for names in (features, classes))
        for row in sheet.rows:
            try:
                refuse_other_width(row, header.names)
                values.extend(_numbers(x(row.cells), features))
                labels += label_values(y(row.cells), list(classes))
                for role, i in at.items():
                    texts[role].append(self._text(role, row, row.cells[i], ids))
            except RowError as problem:
                raise DataError(f"{row.place}: {problem}") from None
        if not labels:
            raise DataError(f"{sheet.where} has columns but no sample. Write the samples into it.")
        return Samples(
            sheet.where,
            tuple(features),
            tuple(classes.values()),
            np.frombuffer(values, np.float32).reshape(-1, len(features)),
            np.frombuffer(labels, np.uint8).reshape(-1, len(classes)),
            tuple(texts["id"]) if "id" in texts else None,
            np.array(texts["user"]) if "user" in texts else None,
            texts.get("split"),
        )

    def _inputs_of_rows(self, sheet: Sheet, names: Sequence[str]) -> tuple[list[str], Values]:
        """Names and feature vectors of the samples of a table."""
        if absent := [name for name in names if name not in sheet.names]:
            raise DataError(
                f"{sheet.where} has no column {absent[0]!r}, a feature that the model reads. "
                f"{nearest(absent[0], sheet.names)}"
            )
        pick = _picker([sheet.names.index(name) for name in names])
        columns = [self.config.id] if self.config.id else ID_COLUMNS if sheet.speaking else ()
        named = [sheet.names.index(c) for c in columns if c in sheet.names and c not in names]
        values, ids = array("f"), list[str]()
        for row in sheet.rows:
            try:
                refuse_other_width(row, sheet.names)
                values.extend(_numbers(pick(row.cells), names))
            except RowError as problem:
                raise DataError(f"{row.place}: {problem}") from None
            ids.append(row.cells[named[0]] if named else str(len(ids) + 1))
        if not ids:
            raise DataError(f"{sheet.where} has columns but no sample.")
        return ids, np.frombuffer(values, np.float32).reshape(-1, len(names))

    def _classes(self, sheet: Sheet, free: list[str]) -> dict[str, str]:
        """The label columns and the classes that they stand for."""
        config, count = self.config, self.config.label_count
        named = config.labels or (() if count else sheet.labels)
        if absent := [name for name in named if name not in free]:
            raise DataError(
                f"{sheet.where} has no column {absent[0]!r}, which is to be a label. "
                f"{nearest(absent[0], free)}"
            )
        if named:
            return {name: name for name in named}
        counted = count or abs(sheet.label_count)
        if counted >= len(free):
            raise DataError(
                f"{sheet.where} has {len(free):,} columns, of which {counted:,} are to be labels: "
                "no feature is left. Correct data.label_count."
            )
        if counted:
            first = config.label_side == "start" if count else sheet.label_count > 0
            return {name: name for name in (free[:counted] if first else free[-counted:])}
        prefix = config.label_prefix
        found = {n: n.removeprefix(prefix) or n for n in free if prefix and n.startswith(prefix)}
        if not found:
            raise DataError(
                f"{sheet.where} has no label column: no name begins with {prefix!r}. Name the "
                "columns in data.labels, or set data.label_prefix or data.label_count. "
                f"The columns are {some(free)}."
            )
        return found

    def _text(self, role: str, row: Row, cell: str, ids: dict[str, str]) -> str:
        """A cell with an id, user or split; all ids so far are ``ids``, with their places."""
        if role == "split":
            return self.config.word(cell)
        if not cell:
            raise RowError(f"the {role} is missing. Write one.")
        if role == "id" and ids.setdefault(cell, row.place) != row.place:
            raise RowError(f"the id {cell!r} stands in {ids[cell]} already. Ids must differ.")
        return cell

    # -- arrays ------------------------------------------------------------------------------------

    def _of_arrays(self, arrays: Mapping[str, npt.NDArray[Any]], where: str) -> Samples:
        """The samples of an ``.npz`` file."""
        X, Y = arrays["X"], arrays["Y"]
        for name, matrix in (("X", X), ("Y", Y)):
            if matrix.ndim != 2 or not matrix.size or matrix.dtype.kind not in "biuf":
                raise DataError(
                    f"{where}: {name} must be a matrix of numbers with one row per sample, but has "
                    f"shape {matrix.shape} and type {matrix.dtype}."
                )
        shapes = {
            **dict.fromkeys(("ids", "users", "split"), (len(X),)),
            **{"Y": (len(X), Y.shape[1]), "known": Y.shape},
            **{"features": (X.shape[1],), "classes": (Y.shape[1],)},
        }
        for name, shape in shapes.items():
            if name in arrays and arrays[name].shape != shape:
                raise DataError(
                    f"{where}: {name} has shape {arrays[name].shape}; beside X {X.shape} and Y "
                    f"{Y.shape} it must have {shape}."
                )
        words = {n: a.astype(str).tolist() for n, a in arrays.items() if n not in ("X", "Y")}
        for name in ("ids", "features", "classes"):
            if twice := repeated(words.get(name, ())):
                raise DataError(f"{where}: {name} has {twice!r} twice. Names must differ.")
        features = words.get("features") or [f"x{i}" for i in range(X.shape[1])]
        classes = words.get("classes") or [f"y{i}" for i in range(Y.shape[1])]
        _refuse_where(~(np.abs(X) <= LARGEST), X, "X", features, "not a finite number", where)
        known = arrays.get("known", np.ones(Y.shape, bool)).astype(bool)
        wrong = known & (Y != 0) & (Y != 1)
        _refuse_where(wrong, Y, "Y", classes, "neither 0 nor 1, nor unknown by `known`", where)
        try:
            splits = None if "split" not in words else [*map(self.config.word, words["split"])]
        except RowError as problem:
            raise DataError(f"{where}: {problem}") from None
        return Samples(
            where,
            tuple(features),
            tuple(classes),
            X.astype(np.float32),
            np.where(known, Y == 1, UNKNOWN).astype(np.uint8),
            tuple(words["ids"]) if "ids" in words else None,
            np.array(words["users"]) if "users" in words else None,
            splits,
        )


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples of a file: values ``(N, F)`` with labels, :data:`UNKNOWN` where one is unknown.

    Ids, users and the meaning of the split column are None where there are none.
    """

    where: str
    features: tuple[str, ...]
    classes: tuple[str, ...]
    values: Values
    labels: Labels
    ids: tuple[str, ...] | None
    users: npt.NDArray[Any] | None
    splits: list[str] | None

    def some(self, rows: Index) -> Samples:
        """The samples at ``rows``."""
        return replace(
            self,
            values=self.values[rows],
            labels=self.labels[rows],
            ids=None if self.ids is None else tuple(self.ids[i] for i in rows),
            users=None if self.users is None else self.users[rows],
            splits=None,
        )

    def as_images(self) -> LabelledImages:
        """The same as a part of a data set."""
        inputs = TensorImages(torch.from_numpy(self.values))
        return labelled(inputs, self.labels, self.ids, self.users)


def labelled(
    inputs: Images, labels: Labels, ids: tuple[str, ...] | None, users: npt.NDArray[Any] | None
) -> LabelledImages:
    """A part of a data set, of labels that are 0, 1 and :data:`UNKNOWN`."""
    known = labels != UNKNOWN
    return LabelledImages(inputs, labels * known, ids, users, None if known.all() else known)


def moments(images: Images) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of each feature; 1 for the deviation of one that never changes.

    >>> moments(TensorImages(torch.tensor([[1.0, 7.0], [3.0, 7.0]])))
    ((2.0, 7.0), (1.0, 1.0))
    """

    def mean_of(shift: npt.NDArray[np.float64], power: int) -> npt.NDArray[np.float64]:
        total = np.zeros(images.shape[0])
        for first in range(0, len(images), CHUNK):
            index = torch.arange(first, min(first + CHUNK, len(images)))
            rows = images.gather(index, "cpu").numpy().astype(np.float64)
            total += ((rows - shift) ** power).sum(0)
        return total / len(images)

    mean = mean_of(np.zeros(images.shape[0]), 1)
    std = np.sqrt(mean_of(mean, 2))
    # The mean of equal numbers is off by rounding.
    std[std <= 1e-12 * np.abs(mean)] = 1.0
    return tuple(mean.tolist()), tuple(std.tolist())


def refuse_coarse(samples: Samples) -> None:
    """Refuse features so far from zero that float32 can hardly tell their values apart."""
    mean, std = moments(TensorImages(torch.from_numpy(samples.values)))
    for name, m, s, values in zip(samples.features, mean, std, samples.values.T, strict=True):
        if abs(m) > FARTHEST * s and not _is_flat(values):
            raise DataError(
                f"{samples.where}, column {name!r} has mean {m:g} and standard deviation {s:g}; "
                "in 32 bits its values can hardly be told apart. Subtract the mean in the file."
            )


def _inputs_of_arrays(
    arrays: Mapping[str, npt.NDArray[Any]], names: Sequence[str], where: str
) -> tuple[list[str], Values]:
    """Names and feature vectors of the samples of an ``.npz`` file."""
    X, count = arrays["X"], len(names)
    if X.ndim != 2 or X.shape[1] != count or X.dtype.kind not in "biuf" or not len(X):
        raise DataError(
            f"{where}: X has shape {X.shape} and type {X.dtype}; the model reads a matrix of "
            f"numbers with {count:,} columns, one row per sample."
        )
    own = arrays["features"].astype(str).tolist() if "features" in arrays else list(names)
    if own != list(names):
        found, read = next(pair for pair in zip_longest(own, names) if pair[0] != pair[1])
        raise DataError(
            f"{where} has other features than the model reads, or in another order: {found!r} in "
            f"the place of {read!r}."
        )
    _refuse_where(~(np.abs(X) <= LARGEST), X, "X", names, "not a finite number", where)
    numbers = np.arange(1, len(X) + 1)
    return arrays.get("ids", numbers).astype(str).tolist(), X.astype(np.float32)


# Cells --------------------------------------------------------------------------------------------


def _picker(places: list[int]) -> Callable[[list[str]], Sequence[str]]:
    """What takes the cells at ``places`` out of a row.

    >>> _picker([2, 0])(["a", "b", "c"]), _picker([1])(["a", "b", "c"])
    (('c', 'a'), ('b',))
    """
    if len(places) == 1:
        return lambda cells: (cells[places[0]],)
    pick: Callable[[list[str]], Sequence[str]] = itemgetter(*places)
    return pick


def _numbers(cells: Sequence[str], names: Sequence[str]) -> list[float]:
    """The features of a row."""
    try:
        numbers = list(map(float, cells))
    except ValueError:
        numbers = []
    # A sum is finite if no part is NaN or infinite; then comparisons mean what they say.
    total = sum(numbers) if numbers else float("nan")
    if total - total == 0 and max(numbers) <= LARGEST and min(numbers) >= -LARGEST:
        return numbers
    for cell, name in zip(cells, names, strict=True):
        if not cell:
            raise RowError(
                f"column {name!r} is empty. Features must be known: fill it in, or name the column "
                "in data.ignore."
            )
        try:
            number = float(cell)
        except ValueError:
            raise RowError(
                f"column {name!r} holds {shown(cell)}, which is not a number. Write categories as "
                "columns of 0 and 1, or name the column in data.ignore or data.labels."
            ) from None
        if not abs(number) <= LARGEST:
            raise RowError(f"column {name!r} holds {shown(cell)}, which is not a finite number.")
    return numbers


def _refuse_where(
    wrong: npt.NDArray[np.bool_],
    values: npt.NDArray[Any],
    array: str,
    names: Sequence[str],
    what: str,
    where: str,
) -> None:
    """Name the first entry of a matrix that is wrong, if there is one."""
    if wrong.any():
        row, column = (int(i) for i in np.argwhere(wrong)[0])
        raise DataError(
            f"{where}: {array}[{row}, {column}] ({names[column]!r}) is {values[row, column]}, "
            f"{what}. Correct the array."
        )


# Files --------------------------------------------------------------------------------------------


def _arrays(data: bytes, where: str, needed: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
    """The arrays of an ``.npz`` file, of which some must be there."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            size = sum(member.file_size for member in packed.infolist())
        if size > machine_memory() // 4:
            raise DataError(f"{where} holds {size:,} bytes, more than this machine can work with.")
        with np.load(io.BytesIO(data), allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
    except (ValueError, OSError, EOFError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{where} is not an .npz file of plain arrays, or is damaged: {error}. Write it with "
            "numpy.savez; names must be text, not objects."
        ) from None
    for name in needed:
        if name not in arrays:
            raise DataError(f"{where} has no array {name!r}. {nearest(name, arrays)}")
    if unknown := [name for name in arrays if name not in ARRAYS]:
        raise DataError(
            f"{where} has an array {unknown[0]!r}, which means nothing here. "
            f"{nearest(unknown[0], ARRAYS)}"
        )
    return arrays


def _list_beside(file: Path) -> str | None:
    """MULAN's list of labels beside a file: ``x.xml`` for ``x.arff``, and for ``x-train.arff``."""
    names = (file.stem, file.stem.removesuffix("-train").removesuffix("-test"))
    found = [str(file.with_name(f"{name}.xml")) for name in names]
    return next(filter(is_file, found), None)


def _is_flat(values: Values) -> bool:
    """Whether all values are the same."""
    return bool((values == values[0]).all())
