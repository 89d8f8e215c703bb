"""What all forms of FLAIR have in common: partitions, labels, and the records of its images."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

from fedharmony.data.file_source import AnnotatedFiles
from fedharmony.data.table import SPLITS, RowError
from fedharmony.data.tree import ImageFiles
from fedharmony.errors import DataError, nearest
from fedharmony.types import Index, Labels

Level: TypeAlias = Literal["coarse", "fine"]
Partition: TypeAlias = Literal["train", "val", "test"]

#: The publisher's figures: images with a coarse label.
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
#: The coarse classes, in label order.
COARSE = tuple(sorted(OFFICIAL_LABELS))
#: Where the labels of a level stand in a record.
FIELD: Mapping[Level, str] = {"coarse": "labels", "fine": "fine_grained_labels"}
PARTITIONS: tuple[Partition, ...] = ("train", "val", "test")


@dataclass(frozen=True, eq=False)
class Records:
    """What is known about all images of all partitions, in the order of the form they came in.

    ``rows`` and ``columns`` are image and class of every label that is present, no pair twice;
    ``partitions`` are places in :data:`PARTITIONS`; ``files`` gives the image files at some
    indices.
    """

    classes: tuple[str, ...]
    ids: list[str]
    users: list[str]
    partitions: npt.NDArray[np.int8]
    rows: npt.NDArray[np.int32]
    columns: npt.NDArray[np.int32]
    files: Callable[[Index], ImageFiles]
    where: str

    def part(self, partition: Partition) -> AnnotatedFiles:
        """The images of one partition, with a dense label matrix."""
        index = np.flatnonzero(self.partitions == PARTITIONS.index(partition))
        if not len(index):
            raise DataError(
                f"{self.where} has no image of partition {partition!r}. Get the file again: all "
                "partitions are in it."
            )
        return AnnotatedFiles(
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
        if not isinstance(partition, str) or partition not in SPLITS:
            raise RowError(
                f"there is no partition {partition!r}. {nearest(str(partition), SPLITS)}"
            )
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise RowError(f"the labels are {names!r}, not a list of names.")
        row = len(self._ids)
        self._ids[str(image)] = None
        if len(self._ids) == row:
            raise RowError(f"image {str(image)!r} has been listed before.")
        self._users.append(str(user))
        self._partitions.append(PARTITIONS.index(SPLITS[partition]))
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


def fingerprint(paths: Iterable[Path], places: Iterable[object]) -> str:
    """SHA-256 of the files' names, sizes and times of the last change, and of the places."""
    digest = hashlib.sha256()
    for path in paths:
        found = path.stat()
        digest.update(repr((path.name, found.st_size, found.st_mtime_ns)).encode())
    for place in places:
        digest.update(repr(place).encode())
    return digest.hexdigest()
