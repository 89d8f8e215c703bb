"""ARFF files as MULAN and MEKA write them, dense or sparse, and MULAN's list of labels.

scipy reads ARFF too, but no sparse rows, and its errors name no line.
"""

from __future__ import annotations

import csv
import re
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import NamedTuple

from fedharmony.data.table import Row
from fedharmony.errors import DataError, shown
from fedharmony.reading import read_regular, user_path


class Sheet(NamedTuple):
    """A table: its columns and rows, and what it says itself about its labels.

    Attributes:
        where: The file.
        names: Of the columns.
        rows: Behind the header.
        labels: Names of label columns; empty where nothing says so.
        label_count: Number of label columns at the start or, if negative, at the end; 0 if unknown.
        speaking: Whether a column called id, user or split is one. In ARFF, a feature often is a
            word of a text, and then "user" and "split" are words like others.
    """

    where: str
    names: list[str]
    rows: Iterator[Row]
    labels: tuple[str, ...] = ()
    label_count: int = 0
    speaking: bool = True


_NAME = r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[^\s{]+"""
_ATTRIBUTE = re.compile(rf"@attribute\s+({_NAME})\s*\S", re.IGNORECASE)
_MEKA = re.compile(r"-C\s+(-?\d{1,9})\b")
_ENTRY = re.compile(r"(\d{1,9})\s+(.+)")


def read_arff(data: bytes, where: str) -> Sheet:
    """The columns and rows of an ARFF file; a missing value is an empty cell."""
    try:
        lines = enumerate(data.decode("utf-8-sig").split("\n"), 1)
    except UnicodeDecodeError as error:
        number = data.count(b"\n", 0, error.start) + 1
        raise DataError(
            f"{where}, line {number} is not UTF-8 text. Save the file in UTF-8."
        ) from None
    full = ((i, text) for i, line in lines if (text := line.strip()) and not text.startswith("%"))
    names: list[str] = []
    count = 0
    for number, line in full:
        word = line.split(None, 1)[0].lower()
        if word == "@data":
            rows = _arff_rows(full, len(names), where)
            return Sheet(where, names, rows, label_count=count, speaking=False)
        if word == "@relation":
            count = int(found[1]) if (found := _MEKA.search(line)) else 0
        elif word == "@attribute" and (match := _ATTRIBUTE.match(line)):
            names.append(_unquoted(match[1]))
        else:
            raise DataError(
                f"{where}, line {number}: {shown(line)} is not understood. Before @data an ARFF "
                "file has lines @relation NAME and @attribute NAME TYPE."
            )
    raise DataError(f"{where} has no line @data, so it has no samples.")


def _arff_rows(lines: Iterator[tuple[int, str]], width: int, where: str) -> Iterator[Row]:
    """The rows behind ``@data``: cells with commas, or ``{place value, …}`` for those not 0."""
    for number, line in lines:
        place = f"{where}, line {number}"
        if not line.startswith("{"):
            try:
                yield Row(place, [_missing(cell) for cell in _separated(line)])
            except csv.Error as error:
                raise DataError(f"{place}: {error}.") from None
            continue
        cells = ["0"] * width
        for entry in filter(None, map(str.strip, line.strip("{}").split(","))):
            found = _ENTRY.fullmatch(entry)
            if not found or int(found[1]) >= width:
                raise DataError(
                    f"{place}: {shown(entry)} is not a place from 0 to {width - 1} and a value."
                )
            cells[int(found[1])] = _missing(_unquoted(found[2]))
        yield Row(place, cells)


def _separated(line: str) -> list[str]:
    quote = '"' if '"' in line else "'"
    reader = csv.reader([line], quotechar=quote, escapechar="\\", skipinitialspace=True)
    return [cell.strip() for cell in next(reader)]


def _missing(cell: str) -> str:
    return "" if cell == "?" else cell


def _unquoted(text: str) -> str:
    """A name without the quotes around it.

    >>> _unquoted("'a \\\\'b\\\\''"), _unquoted("c")
    ("a 'b'", 'c')
    """
    if len(text) > 1 and text[0] in "'\"" and text[-1] == text[0]:
        return re.sub(r"\\(.)", r"\1", text[1:-1])
    return text


def labels_of_xml(path: str) -> tuple[str, ...]:
    """The names of MULAN's list of labels."""
    try:
        root = ET.fromstring(read_regular(user_path(path)))
    except (OSError, ET.ParseError, ValueError) as error:
        raise DataError(f"The list of labels {path} cannot be read: {error}.") from None
    found = [node.get("name", "") for node in root.iter() if node.tag.rpartition("}")[2] == "label"]
    if not found or "" in found or len(set(found)) < len(found):
        raise DataError(
            f"The list of labels {path} must hold elements <label name=…/> with different names."
        )
    return tuple(found)
