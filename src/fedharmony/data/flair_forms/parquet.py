"""FLAIR as the Parquet files of the Hugging Face data set apple/flair."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedharmony.data.flair_forms.records import FIELD, Collector, Level, Records, fingerprint
from fedharmony.data.table import RowError, open_parquet
from fedharmony.errors import DataError
from fedharmony.types import Index

#: How much of the Parquet files' images is kept in memory while they are read.
RECENT_BYTES = 256 << 20


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
        return fingerprint(paths, self._rows.tolist())

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
