"""FLAIR as an HDF5 file, of apple/ml-flair or of pfl-research."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from fedharmony.data.flair_forms.records import FIELD, Collector, Level, Records, fingerprint
from fedharmony.data.table import SEPARATOR, SPLITS, RowError, optional_module
from fedharmony.data.tree import IMAGE_LIMIT
from fedharmony.errors import DataError, nearest
from fedharmony.reading import parse_json

HDF5 = (".hdf5", ".h5")


class Place(NamedTuple):
    """Where an image lies in an HDF5 file: the group of its user, and its row there."""

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
        if word not in SPLITS or not isinstance(partition, Mapping):
            raise DataError(
                f"{file.filename} has /{word}, which is no partition. {nearest(word, SPLITS)} Name "
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
        return fingerprint([self._path], self._places)

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
