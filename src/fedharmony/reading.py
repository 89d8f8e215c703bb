"""Reading what a user names: whole regular files of a bounded size, and nothing else.

A name can stand for a pipe nobody writes to, a device without an end, or a file of any size.
Whoever reads a small file in one piece reads it here, so that such a name is an error and not a
hang.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: More than any configuration, table of results or annotation file has.
FILE_LIMIT = 4 << 30


def read_regular(path: str | Path, limit: int = FILE_LIMIT) -> bytes:
    """The content of a regular file of at most ``limit`` bytes.

    Raises:
        OSError: There is no such file, it is a folder, pipe, socket or device, it is larger than
            ``limit``, or it cannot be read.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     file = Path(folder, "a")
    ...     _ = file.write_bytes(b"1234")
    ...     read_regular(file), read_regular(file, limit=3)
    Traceback (most recent call last):
    OSError: [Errno 27] it has 4 bytes, more than the 3 that are read: ...
    """
    name = os.fspath(path)
    try:
        _refuse_irregular(os.stat(name), name)  # noqa: PTH116 (a device must not even be opened)
        # A pipe that takes the file's place meanwhile would make a plain open wait for a writer.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
        with os.fdopen(os.open(name, flags), "rb") as file:
            found = os.fstat(file.fileno())
            _refuse_irregular(found, name)
            if found.st_size > limit:
                raise OSError(
                    errno.EFBIG,
                    f"it has {found.st_size:,} bytes, more than the {limit:,} that are read",
                    name,
                )
            return file.read(limit)
    except ValueError as error:  # a name with a null character
        raise OSError(errno.EINVAL, str(error), name) from None


def _refuse_irregular(found: os.stat_result, name: str) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), name)
    if not stat.S_ISREG(found.st_mode):
        raise OSError(errno.EINVAL, "it is a pipe, socket or device, not a regular file", name)


def parse_json(text: str | bytes) -> Any:
    """JSON values; whatever is wrong with the text is a ValueError.

    >>> parse_json("[" * 100_000)
    Traceback (most recent call last):
    ValueError: brackets within brackets without end
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets within brackets without end") from None


def parse_events(log: bytes) -> tuple[list[dict[str, Any]], int]:
    """The events in the lines of a log, and how many lines are none.

    A last line that is not whole is what a killed run leaves behind: it is not counted.

    >>> parse_events(b'{"event": "start"}\\nnonsense\\n{"event": "ro')
    ([{'event': 'start'}], 1)
    """
    lines = log.split(b"\n")
    events, damaged = [], 0
    for position, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            event = parse_json(line)
        except ValueError:
            damaged += position < len(lines) - 1
            continue
        if isinstance(event, dict) and "event" in event:
            events.append(event)
        else:
            damaged += 1
    return events, damaged


# Unlike their namesakes of Path, these raise nothing: what cannot be a name, or lies where one may
# not look, is not there.


def is_there(path: str | Path) -> bool:
    """Whether a file or folder is there.

    >>> is_there("."), is_there("x" * 5000), is_there("a" + chr(0))
    (True, False, False)
    """
    return os.path.exists(path)  # noqa: PTH110


def is_file(path: str | Path) -> bool:
    """Whether a regular file is there.

    >>> is_file("."), is_file("x" * 5000)
    (False, False)
    """
    return os.path.isfile(path)  # noqa: PTH113


def is_folder(path: str | Path) -> bool:
    """Whether a folder is there.

    >>> is_folder("."), is_folder("x" * 5000)
    (True, False)
    """
    return os.path.isdir(path)  # noqa: PTH112


def fault_of(path: str | Path) -> str:
    """Why no file can have this name; empty where one can, whether it is there or not.

    >>> fault_of("a/b"), fault_of("x" * 300), fault_of("a" + chr(0))
    ('', 'File name too long', 'embedded null byte')
    """
    try:
        os.lstat(path)
    except OSError as error:
        # A name that is too long, or one whose symbolic links go round in a circle.
        return (error.strerror or "") if error.errno in (errno.ENAMETOOLONG, errno.ELOOP) else ""
    except ValueError as error:
        return str(error)
    return ""


def user_path(path: str | Path) -> Path:
    """``path`` with a leading ``~`` replaced where the user it names is known.

    >>> user_path("~nobody-of-that-name/x").as_posix()
    '~nobody-of-that-name/x'
    """
    return Path(os.path.expanduser(path))  # noqa: PTH111 (Path.expanduser raises for unknown users)


def left_out(event: Mapping[str, Any], cause: str) -> list[Mapping[str, Any]]:
    """Who was left out of a round by this cause: "failed", "dropped", or "rule"."""
    if "left_out" not in event:  # an older run
        older = {"failed": event.get("failures"), "dropped": event.get("dropped")}
        found = older.get(cause) or ()
        return [one if isinstance(one, dict) else {"client": one} for one in found]
    return [entry for entry in event["left_out"] if entry.get("cause") == cause]
