"""Image files without labels, as a user names them: one by one, by folder, or in a table."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedharmony.data.cache import IMAGE_ENDINGS
from fedharmony.data.table import TABLES, read_file, table_rows
from fedharmony.data.tree import IMAGE_LIMIT
from fedharmony.errors import DataError, nearest
from fedharmony.reading import is_folder, is_there, read_regular

#: Columns of a table that hold paths of images, without being named.
IMAGE_COLUMNS = ("image", "path", "file", "filename")


@dataclass(frozen=True)
class LooseImages:
    """Encoded images at any places; see :class:`~fedharmony.data.tree.ImageFiles`."""

    paths: tuple[Path, ...]

    def __len__(self) -> int:
        """The number of files."""
        return len(self.paths)

    def name(self, i: int) -> str:
        """The path of file ``i``, as it was given."""
        return str(self.paths[i])

    def read(self, i: int) -> bytes:
        """The encoded bytes of file ``i``."""
        try:
            return read_regular(self.paths[i], IMAGE_LIMIT)
        except OSError as error:
            raise DataError(f"{self.name(i)} cannot be read: {error.strerror}.") from None

    def fingerprint(self) -> str:
        """SHA-256 of the paths."""
        return hashlib.sha256("\0".join(map(str, self.paths)).encode()).hexdigest()


def find_images(places: Sequence[Path], columns: Sequence[str] = IMAGE_COLUMNS) -> LooseImages:
    """The images that files, folders (with all below them) and tables name, in that order.

    Tables are CSV or Parquet files with paths relative to their folder, in the first of ``columns``
    that is there. A place that is not there or holds no image is a DataError.
    """
    found: list[Path] = []
    for place in places:
        if not is_there(place):
            raise DataError(f"There is no file or folder {place}. Check the path.")
        before = len(found)
        if is_folder(place):
            found += _below(place)
        elif place.suffix.lower() in TABLES:
            found += _listed(place, columns)
        else:
            found.append(place)
        if len(found) == before:
            endings = ", ".join(IMAGE_ENDINGS)
            raise DataError(f"{place} holds no image (files that end in {endings}).")
    return LooseImages(tuple(found))


def _below(folder: Path) -> Iterator[Path]:
    """The images in a folder and in all folders below it, by name; hidden ones are left out."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith(".") and name.lower().endswith(IMAGE_ENDINGS):
                yield Path(place, name)


def _listed(table: Path, columns: Sequence[str]) -> Iterator[Path]:
    """The images that a table lists."""
    advice = "Write a header and one row per image."
    header, rows = table_rows(read_file(table), str(table), advice)
    name = next((name for name in columns if name in header), None)
    if name is None:
        raise DataError(
            f"{table} has no column of paths ({' or '.join(columns)}). "
            f"{nearest(columns[0], header)} --column names another."
        )
    place = header.index(name)
    for row in rows:
        if place >= len(row.cells) or not row.cells[place]:
            raise DataError(f"{row.place}: the path in column {name!r} is missing. Correct it.")
        yield table.parent / row.cells[place]
