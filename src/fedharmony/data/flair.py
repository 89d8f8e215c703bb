"""FLAIR: 429,078 annotated photographs of 51,414 Flickr users, who are its natural clients.

The publisher divides the users, and with them the images, into train, val and test; "dev" is
another word for val. Each image has labels at two levels, 17 coarse and 1,628 fine ones, and both
lists stand beside the image. A fine label may be the name of a coarse one, and the published table
of fine and coarse names is no function; so neither level is ever derived from the other.

Four forms of the same data are read:

* ``labels_and_metadata.json`` with the folder ``small_images``, as published, packed or unpacked;
* the HDF5 file of apple/ml-flair: ``/{partition}/{user}/{images, image_ids, labels,
  fine_grained_labels}``, the labels of an image joined by ``|``;
* the HDF5 file of pfl-research: the same with ``labels_row, labels_col, fine_grained_labels_row,
  fine_grained_labels_col``, the places of the ones in the label matrix of a user, and the names in
  ``/metadata/{label_mapping, fine_grained_label_mapping}``;
* the Parquet files of the Hugging Face data set apple/flair, with the encoded images inside.

All four give the same classes in the same order and the same images with the same labels. The order
of the images is that of the form: the HDF5 files list users by name.
"""

from __future__ import annotations

import functools
import hashlib
import math
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedharmony.data.annotations import Annotated, FileSource
from fedharmony.data.base import datasets
from fedharmony.data.files import IMAGE_LIMIT, ImageFiles, Tree
from fedharmony.data.table import RowError, open_parquet, optional_module
from fedharmony.errors import DataError, nearest
from fedharmony.reading import is_file, is_folder, parse_json, user_path
from fedharmony.types import Index, Labels

Level: TypeAlias = Literal["coarse", "fine"]
Partition: TypeAlias = Literal["train", "val", "test"]

#: The coarse classes, in label order.
COARSE = (
    "animal",
    "art",
    "celebration",
    "equipment",
    "fire",
    "food",
    "games",
    "interior_room",
    "light",
    "liquid",
    "material",
    "music",
    "outdoor",
    "plant",
    "recreation",
    "religion",
    "structure",
)
#: Where the labels of a level stand in a record.
FIELD: Mapping[Level, str] = {"coarse": "labels", "fine": "fine_grained_labels"}
PARTITIONS: tuple[Partition, ...] = ("train", "val", "test")
#: Every word for a partition, and the partition it means.
WORDS: Mapping[str, Partition] = {"train": "train", "val": "val", "dev": "val", "test": "test"}

METADATA = "labels_and_metadata.json"
IMAGES = "small_images"
#: Joins the labels of an image in the HDF5 file of apple/ml-flair.
SEPARATOR = "|"
HDF5 = (".hdf5", ".h5")
#: How much of the Parquet files' images is kept in memory while they are read.
RECENT_BYTES = 256 << 20

#: The publisher's figures: images and users of a partition, images with a coarse label.
OFFICIAL_IMAGES: Mapping[Partition, int] = {"train": 345_879, "val": 39_239, "test": 43_960}
OFFICIAL_USERS: Mapping[Partition, int] = {"train": 41_131, "val": 5_141, "test": 5_142}
OFFICIAL_CLASSES: Mapping[Level, int] = {"coarse": len(COARSE), "fine": 1_628}
OFFICIAL_LABELS: Mapping[str, int] = {
    "structure": 228_923,
    "equipment": 225_862,
    "material": 139_733,
    "outdoor": 131_322,
    "plant": 123_363,
    "food": 110_792,
    "animal": 68_858,
    "liquid": 68_677,
    "art": 37_230,
    "interior_room": 32_042,
    "light": 11_326,
    "recreation": 5_651,
    "celebration": 3_769,
    "fire": 3_011,
    "music": 2_571,
    "games": 1_093,
    "religion": 866,
}


@datasets.register("flair")
class Flair(FileSource):
    """FLAIR, Flickr photographs with their users as clients; 17 coarse or 1,628 fine labels."""

    @dataclass(frozen=True)
    class Config(FileSource.Config):
        """Where the data are and which labels count.

        Attributes:
            labels: "coarse" (17 classes) or "fine" (1,628).
            test_split: The partition the model is measured on: "test", or "val" for tuning.
        """

        labels: Level = "coarse"
        test_split: Literal["test", "val"] = "test"

    config: Config

    def annotations(self) -> tuple[tuple[str, ...], Annotated, Annotated]:
        """The coarse classes, or all fine names in alphabetical order; train and test part."""
        records = self._records
        return records.classes, records.part("train"), records.part(self.config.test_split)

    def obtain(self) -> str:
        """What to get, and where it goes."""
        return (
            f"Get {METADATA} and small_images-00.tar.gz to small_images-42.tar.gz with "
            "download_dataset.py of https://github.com/apple/ml-flair and put them, packed or "
            "unpacked, into the folder that `path` names. An HDF5 file made by prepare_dataset.py "
            "of apple/ml-flair or by pfl-research, and the folder with the Parquet files of "
            "https://huggingface.co/datasets/apple/flair, can be named instead."
        )

    def official_counts(self) -> Mapping[str, int]:
        """Images and users per partition and, at the coarse level, images per class."""
        test = self.config.test_split
        counts = {
            "classes": OFFICIAL_CLASSES[self.config.labels],
            "training images": OFFICIAL_IMAGES["train"],
            "test images": OFFICIAL_IMAGES[test],
            "training users": OFFICIAL_USERS["train"],
            "test users": OFFICIAL_USERS[test],
            "images of all partitions": sum(OFFICIAL_IMAGES.values()),
            "users of all partitions": sum(OFFICIAL_USERS.values()),
        }
        if self.config.labels == "coarse":
            counts |= {_everywhere(name): count for name, count in OFFICIAL_LABELS.items()}
        return counts

    def found_counts(
        self, classes: tuple[str, ...], train: Annotated, test: Annotated
    ) -> dict[str, int]:
        """The figures of the two parts, and those of all three partitions together."""
        records = self._records
        counts = {
            "images of all partitions": len(records.ids),
            "users of all partitions": len(set(records.users)),
        }
        images = np.bincount(records.columns, minlength=len(classes))
        counts |= {_everywhere(name): int(n) for name, n in zip(classes, images, strict=True)}
        return super().found_counts(classes, train, test) | counts

    @functools.cached_property
    def _records(self) -> Records:
        level, path = self.config.labels, user_path(self.config.path)
        if is_file(path) and path.suffix in HDF5:
            return read_hdf5(path, level)
        tree = self.tree()
        # Asking the tree first would open every archive in the folder.
        if is_folder(path) and not is_file(path / METADATA):
            if files := sorted([*path.glob("*.parquet"), *path.glob("data/*.parquet")]):
                return read_parquet(files, level)
            if len(files := [file for file in path.iterdir() if file.suffix in HDF5]) == 1:
                return read_hdf5(files[0], level)
        self.require(tree, METADATA)
        return read_json(tree, level)


def _everywhere(name: str) -> str:
    return f"images of all partitions with {name}"


@dataclass(frozen=True, eq=False)
class Records:
    """What is known about all images of all partitions, in the order of the form they came in.

    Attributes:
        classes: C names in label order.
        ids: One name per image.
        users: The owner of every image.
        partitions: int8 ``(N,)``, places in :data:`PARTITIONS`.
        rows: int32, the image of every label that is present; no pair occurs twice.
        columns: int32, the class of every label that is present.
        files: Gives the image files at some indices.
        where: For messages.
    """

    classes: tuple[str, ...]
    ids: list[str]
    users: list[str]
    partitions: npt.NDArray[np.int8]
    rows: npt.NDArray[np.int32]
    columns: npt.NDArray[np.int32]
    files: Callable[[Index], ImageFiles]
    where: str

    def part(self, partition: Partition) -> Annotated:
        """The images of one partition, with a dense label matrix."""
        index = np.flatnonzero(self.partitions == PARTITIONS.index(partition))
        if not len(index):
            raise DataError(
                f"{self.where} has no image of partition {partition!r}. Get the file again: all "
                "partitions are in it."
            )
        return Annotated(
            files=self.files(index),
            labels=self._labels(index),
            ids=tuple(self.ids[i] for i in index),
            users=np.array([self.users[i] for i in index]),
        )

    def _labels(self, index: Index) -> Labels:
        place = np.full(len(self.ids), -1, np.int32)
        place[index] = np.arange(len(index), dtype=np.int32)
        rows = place[self.rows]
        labels = np.zeros((len(index), len(self.classes)), np.uint8)
        labels[rows[rows >= 0], self.columns[rows >= 0]] = 1
        return labels


class Collector:
    """Takes the records of a form one by one, checks them, and makes :class:`Records` of them.

    >>> records = Collector("fine")
    >>> records.add("1", "anna", "train", ["tree", "cat"])
    >>> records.add("2", "bert", "dev", ["cat"])
    >>> made = records.finish(lambda index: index, "an example")
    >>> made.classes, made.part("val").labels.tolist()
    (('cat', 'tree'), [[1, 0]])
    >>> records.add("2", "bert", "test", ["cat"])
    Traceback (most recent call last):
    fedharmony.data.table.RowError: image '2' has been listed before.
    """

    def __init__(self, level: Level) -> None:
        self._fixed = level == "coarse"
        names = COARSE if self._fixed else ()
        self._codes = {name: code for code, name in enumerate(names)}
        # A dictionary keeps the order of the images and finds the ones listed twice.
        self._ids: dict[str, None] = {}
        self._users: list[str] = []
        self._partitions = array("b")
        self._rows = array("i")
        self._columns = array("i")

    def add(self, image: Any, user: Any, partition: Any, names: Any) -> None:
        """Take one image; raises :class:`RowError` when its record cannot be right."""
        for what, value in (("image", image), ("user", user)):
            if not isinstance(value, str | int) or value == "":
                raise RowError(f"the {what} is {value!r}, not a name.")
        if not isinstance(partition, str) or partition not in WORDS:
            raise RowError(f"there is no partition {partition!r}. {nearest(str(partition), WORDS)}")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise RowError(f"the labels are {names!r}, not a list of names.")
        row = len(self._ids)
        self._ids[str(image)] = None
        if len(self._ids) == row:
            raise RowError(f"image {str(image)!r} has been listed before.")
        self._users.append(str(user))
        self._partitions.append(PARTITIONS.index(WORDS[partition]))
        for name in dict.fromkeys(names):
            self._rows.append(row)
            self._columns.append(self._code(name))

    def _code(self, name: str) -> int:
        code = self._codes.get(name)
        if code is None:
            if self._fixed:
                raise RowError(f"there is no coarse label {name!r}. {nearest(name, COARSE)}")
            code = self._codes[name] = len(self._codes)
        return code

    def finish(self, files: Callable[[Index], ImageFiles], where: str) -> Records:
        """All records, with the classes in alphabetical order."""
        if not self._rows:
            raise DataError(f"{where} has no labelled image. Get the file again.")
        classes = sorted(self._codes)
        rank = np.empty(len(classes), np.int32)
        rank[[self._codes[name] for name in classes]] = np.arange(len(classes), dtype=np.int32)
        return Records(
            classes=tuple(classes),
            ids=list(self._ids),
            users=self._users,
            partitions=np.array(self._partitions, np.int8),
            rows=np.array(self._rows, np.int32),
            columns=rank[np.array(self._columns, np.int32)],
            files=files,
            where=where,
        )


# The published form -------------------------------------------------------------------------------


def read_json(tree: Tree, level: Level) -> Records:
    """``labels_and_metadata.json`` and the folder ``small_images``."""
    where = tree.locate(METADATA)
    try:
        content = parse_json(tree.read(METADATA))
    except ValueError as error:  # also what is not text at all
        raise DataError(
            f"{where} is not valid JSON: {error}. It is damaged or was not copied to its end; get "
            "the file again."
        ) from error
    if not isinstance(content, list):
        raise DataError(
            f"{where} holds {type(content).__name__}, not a list of records. Get the file again."
        )
    collector = Collector(level)
    names = []
    for number, record in enumerate(content, start=1):
        try:
            image, labels = record["image_id"], record[FIELD[level]]
            collector.add(image, record["user_id"], record["partition"], labels)
        except (KeyError, TypeError):
            raise DataError(
                f"{where}, record {number}: a record needs image_id, user_id, partition and "
                f"{FIELD[level]}, this one is {str(record)[:200]}. Get the file again."
            ) from None
        except RowError as problem:
            raise DataError(f"{where}, record {number}: {problem} Get the file again.") from None
        names.append(f"{IMAGES}/{image}.jpg")
    return collector.finish(lambda index: tree.images([names[i] for i in index]), where)


# HDF5 ---------------------------------------------------------------------------------------------


class Place(NamedTuple):
    """Where an image lies in an HDF5 file: the group of its user and its row there."""

    group: str
    row: int


#: Reads a whole array of a user by its name.
Reader: TypeAlias = Callable[[str], npt.NDArray[Any]]
#: Gives the label names of every one of a user's n images.
NamesOf: TypeAlias = Callable[[Reader, int], list[list[str]]]


def read_hdf5(path: Path, level: Level) -> Records:
    """An HDF5 file of apple/ml-flair or of pfl-research, whichever it is."""
    h5py = optional_module("h5py", path)
    collector = Collector(level)
    places: list[Place] = []
    try:
        with h5py.File(path, "r") as file:
            names_of = _hdf5_names(file, level)
            for word, partition in _hdf5_partitions(file):
                for user in partition:
                    group = f"/{word}/{user}"
                    content = _hdf5_images(h5py, partition, user, names_of)
                    for row, (image, names) in enumerate(content):
                        try:
                            collector.add(image, user, word, names)
                        except RowError as problem:
                            raise DataError(
                                f"{path}:{group}, image {row + 1}: {problem} Make the file again."
                            ) from None
                        places.append(Place(group, row))
    except (OSError, RuntimeError) as error:
        raise DataError(
            f"{path} is not an HDF5 file, or is damaged: {error}. Make or copy the file again."
        ) from error
    return collector.finish(lambda index: Hdf5Images(path, [places[i] for i in index]), str(path))


def _hdf5_partitions(file: Any) -> Iterator[tuple[str, Any]]:
    for word, partition in file.items():
        if word == "metadata":
            continue
        if word not in WORDS or not isinstance(partition, Mapping):
            raise DataError(
                f"{file.filename} has /{word}, which is no partition. {nearest(word, WORDS)} Name "
                "a file made by prepare_dataset.py of apple/ml-flair or by pfl-research."
            )
        yield word, partition


def _hdf5_names(file: Any, level: Level) -> NamesOf:
    """How the labels of a user are written in this file."""
    field = FIELD[level]

    def joined(read: Reader, count: int) -> list[list[str]]:
        cells = (cell.decode() for cell in read(field))
        return [cell.split(SEPARATOR) if cell else [] for cell in cells]

    def sparse(read: Reader, count: int) -> list[list[str]]:
        names: list[list[str]] = [[] for _ in range(count)]
        rows, columns = read(f"{field}_row").tolist(), read(f"{field}_col").tolist()
        for row, column in zip(rows, columns, strict=True):
            names[row].append(classes[column])
        return names

    mapping = f"/metadata/{field.removesuffix('s')}_mapping"
    if mapping not in file:
        return joined
    try:
        codes = parse_json(file[mapping][()])
        classes = sorted(codes, key=codes.__getitem__)
        numbered = [codes[name] for name in classes] == list(range(len(classes)))
    except (ValueError, TypeError):
        numbered = False
    if not numbered:
        raise DataError(
            f"{file.filename}:{mapping} does not number the classes from 0 on. Files that are not "
            "grouped by user look like that: make the file without --not_group_data_by_user."
        )
    return sparse


def _hdf5_images(
    h5py: Any, partition: Any, user: str, names_of: NamesOf
) -> list[tuple[str, list[str]]]:
    """The image ids and label names of one user."""

    def read(name: str) -> npt.NDArray[Any]:
        # There are 100,000 arrays and more, most of a few bytes: h5py's convenience costs the most.
        dataset = h5py.h5d.open(partition.id, f"{user}/{name}".encode())
        if (size := math.prod(dataset.shape) * dataset.dtype.itemsize) > IMAGE_LIMIT:
            raise ValueError(f"{name} would have {size:,} bytes")  # declared, not there
        values = np.empty(dataset.shape, dataset.dtype)
        dataset.read(h5py.h5s.ALL, h5py.h5s.ALL, values)
        return values

    try:
        images = [image.decode() for image in read("image_ids")]
        return list(zip(images, names_of(read, len(images)), strict=True))
    except (KeyError, IndexError, ValueError, AttributeError) as error:
        advice = (
            "The file is not grouped by user: make it without --not_group_data_by_user."
            if f"{user}/image" in partition
            else "Make or copy the file again."
        )
        raise DataError(
            f"{partition.file.filename}:{partition.name}/{user} does not hold the images and "
            f"labels of a user ({error}). {advice}"
        ) from error


class Hdf5Images:
    """Arrays in an HDF5 file as :class:`ImageFiles`: each in the PPM format, a header and no more.

    Rows of ``images``: uint8 ``(height, width, 3)``.
    """

    def __init__(self, path: Path, places: Sequence[Place]) -> None:
        self._path = path
        self._places = places

    def __len__(self) -> int:
        """The number of images N."""
        return len(self._places)

    def name(self, i: int) -> str:
        """See :meth:`ImageFiles.name`."""
        group, row = self._places[i]
        return f"{self._path}:{group}/images[{row}]"

    def read(self, i: int) -> bytes:
        """See :meth:`ImageFiles.read`."""
        group, row = self._places[i]
        try:
            images = self._file[f"{group}/images"]
            if (size := math.prod(images.shape[1:])) > IMAGE_LIMIT:
                raise ValueError(f"it would have {size:,} bytes")
            return as_ppm(images[row])
        except (OSError, KeyError, ValueError, IndexError) as error:
            raise DataError(f"{self.name(i)} cannot be read: {error}.") from error

    def fingerprint(self) -> str:
        """SHA-256 of the file's name, size and time of the last change, and of the places."""
        return _fingerprint([self._path], self._places)

    @functools.cached_property
    def _file(self) -> Any:
        return optional_module("h5py", self._path).File(self._path, "r")


def as_ppm(pixels: npt.NDArray[np.uint8]) -> bytes:
    """An image ``(height, width, 3)`` as a file that image libraries read.

    >>> as_ppm(np.zeros((1, 2, 3), np.uint8))
    b'P6 2 1 255\\n\\x00\\x00\\x00\\x00\\x00\\x00'
    """
    if pixels.dtype != np.uint8 or pixels.ndim != 3 or pixels.shape[2] != 3:
        raise ValueError(
            f"pixels are uint8 of shape (height, width, 3), not {pixels.dtype} of {pixels.shape}"
        )
    height, width, _ = pixels.shape
    return b"P6 %d %d 255\n" % (width, height) + pixels.tobytes()


# Parquet ------------------------------------------------------------------------------------------


class RowGroup(NamedTuple):
    """A piece of a Parquet file, the least that can be read; ``start`` counts over all files."""

    start: int
    path: Path
    number: int


def read_parquet(paths: Sequence[Path], level: Level) -> Records:
    """The Parquet files of apple/flair; without a column ``partition`` their names give it."""
    collector = Collector(level)
    groups: list[RowGroup] = []
    start = 0
    for path in paths:
        with open_parquet(path, path) as file:
            for number in range(file.num_row_groups):
                groups.append(RowGroup(start, path, number))
                start += file.metadata.row_group(number).num_rows
            for row, record in enumerate(_parquet_records(file, path, level), start=1):
                try:
                    collector.add(*record)
                except RowError as problem:
                    raise DataError(f"{path}, row {row}: {problem} Get the file again.") from None
    where = f"{paths[0].parent} ({len(paths)} Parquet files)"
    return collector.finish(lambda index: ParquetImages(groups, index), where)


def _parquet_records(file: Any, path: Path, level: Level) -> Iterator[tuple[Any, ...]]:
    """Image, user, partition and labels of every row."""
    columns = ["image_id", "user_id", "partition", FIELD[level]]
    found = [*file.schema_arrow.names, *(leaf.path for leaf in file.schema)]
    required = {*columns, "image.bytes"} - {"partition"}
    if missing := sorted(required.difference(found)):
        raise DataError(
            f"{path} has no column {', '.join(missing)}. Get the files of the data set apple/flair."
        )
    word = path.name.partition("-")[0]
    for batch in file.iter_batches(columns=[name for name in columns if name in found]):
        cells = {name: batch.column(name).to_pylist() for name in batch.schema.names}
        cells.setdefault("partition", [word] * batch.num_rows)
        yield from zip(*(cells[name] for name in columns), strict=True)


class ParquetImages:
    """The column ``image`` of Parquet files, encoded images with their names, as ImageFiles.

    Only whole row groups can be read, so the latest are kept; images are best read in order.
    """

    def __init__(self, groups: Sequence[RowGroup], rows: Index) -> None:
        self._groups = groups
        self._starts = [group.start for group in groups]
        self._rows = rows
        self._recent: OrderedDict[int, Any] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        """The number of images N."""
        return len(self._rows)

    def name(self, i: int) -> str:
        """See :meth:`ImageFiles.name`."""
        group, row = self._place(i)
        return f"{self._groups[group].path}, row group {self._groups[group].number}, row {row}"

    def read(self, i: int) -> bytes:
        """See :meth:`ImageFiles.read`."""
        group, row = self._place(i)
        with self._lock:
            content = self._content(group)
        data = content[row].as_py()
        if not isinstance(data, bytes):
            raise DataError(f"{self.name(i)} cannot be read: it holds no image.")
        return data

    def fingerprint(self) -> str:
        """SHA-256 of the files' names, sizes and times of the last change, and of the rows."""
        paths = dict.fromkeys(group.path for group in self._groups)
        return _fingerprint(paths, self._rows.tolist())

    def _place(self, i: int) -> tuple[int, int]:
        row = int(self._rows[i])
        group = bisect_right(self._starts, row) - 1
        return group, row - self._starts[group]

    def _content(self, group: int) -> Any:
        if group not in self._recent:
            _, path, number = self._groups[group]
            with open_parquet(path, path) as file:
                column = file.read_row_group(number, columns=["image.bytes"]).column("image")
            self._recent[group] = column.combine_chunks().field("bytes")
            while len(self._recent) > 1 and self._held() > RECENT_BYTES:
                self._recent.popitem(last=False)
        self._recent.move_to_end(group)
        return self._recent[group]

    def _held(self) -> int:
        return sum(content.nbytes for content in self._recent.values())


def _fingerprint(paths: Iterable[Path], places: Iterable[object]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        found = path.stat()
        digest.update(repr((path.name, found.st_size, found.st_mtime_ns)).encode())
    for place in places:
        digest.update(repr(place).encode())
    return digest.hexdigest()
