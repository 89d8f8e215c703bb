"""Text for people: everything that the program prints passes through here.

Labels, file names and messages come from files that anybody may have written. A terminal obeys
escape sequences in them (it can be made to hide, forge or type text) and cannot show every
character. So control characters are replaced by visible ones, and what an encoding lacks by a mark.
"""

from __future__ import annotations

import functools
import io
import logging
import re
import sys
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

#: Control characters but tabulator and end of line, and those that turn the direction of text.
_UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


def plain(text: str) -> str:
    """``text`` with control characters made visible.

    >>> plain("a\\x1b[31mb"), plain("tab\\tand line\\n")
    ('a�[31mb', 'tab\\tand line\\n')
    """
    return _UNSAFE.sub("\N{REPLACEMENT CHARACTER}", text)


class PlainConsole(Console):
    """A console that sends its own control sequences and nobody else's."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """See :meth:`rich.console.Console.render`."""
        for segment in super().render(renderable, options):
            safe = segment.control or not _UNSAFE.search(segment.text)
            yield segment if safe else Segment(plain(segment.text), segment.style)


def console(*, stderr: bool = False, **options: Any) -> Console:
    """A console on the standard output, or on the standard error; brackets are no markup."""
    return PlainConsole(stderr=stderr, markup=False, **options)


def columns(*headings: str, right: Collection[str] = (), **options: Any) -> Table:
    """A table for the console, without lines; some of its columns stand at the right."""
    table = Table(**{"box": None, "pad_edge": False, **options})
    for heading in headings:
        table.add_column(heading, justify="right" if heading in right else "left")
    return table


def pairs(rows: Mapping[str, str]) -> Table:
    """Names and values."""
    table = columns("", "", show_header=False)
    for name, value in rows.items():
        table.add_row(name, Text(value))
    return table


def say(text: object, *, err: bool = False) -> None:
    """Print one line or paragraph as it is."""
    print(plain(str(text)), file=sys.stderr if err else sys.stdout, flush=True)


class PlainFormatter(logging.Formatter):
    """Formats log records for people."""

    def format(self, record: logging.LogRecord) -> str:
        """See :meth:`logging.Formatter.format`."""
        return plain(super().format(record))


def replace_unknown(*streams: TextIO) -> None:
    """Let streams write a mark for characters that their encoding lacks, instead of failing."""
    for stream in streams:
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning that several runs of one process have in common, the first time only."""
    logging.getLogger("fedharmony").warning(text)
