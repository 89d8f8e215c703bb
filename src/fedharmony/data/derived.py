"""Writing files that are derived from data: whole or not at all, and by one process at a time."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from fedharmony import stopping
from fedharmony.errors import DataError
from fedharmony.files import replacing, take_lock


@contextmanager
def building(folder: Path) -> Iterator[None]:
    """Make ``folder`` and keep other processes from building in it meanwhile.

    Inside, look again whether the wanted file has appeared: another process may have made it while
    this one waited. Where the file system has no locks two processes may do the same work; each
    still replaces the file in one step.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("ab")
    except OSError as error:
        raise _unwritable(folder, error) from error
    with lock:
        with suppress(OSError), stopping.interruptible():
            take_lock(lock.fileno(), wait=True)
        yield


@contextmanager
def new_file(file: Path, size: int, what: str, advice: str) -> Iterator[BinaryIO]:
    """A file to write that becomes ``file`` when the block ends well, and vanishes otherwise.

    ``what`` is being written, of so many bytes; more than the disk has free is refused, with the
    ``advice``. The folder is being :func:`built <building>`.
    """
    folder = file.parent
    free = shutil.disk_usage(folder).free
    too_small = (
        f"{what} needs {in_bytes(size)}, but the disk of {folder} has {in_bytes(free)} free. Make "
        f"room, set FEDHARMONY_CACHE to a folder on a larger disk, {advice}."
    )
    if size > free:
        raise DataError(too_small)
    try:
        with replacing(file) as out:
            yield out
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DataError(too_small) from error
        if error.errno in (errno.EFBIG, errno.EIO, errno.EROFS, errno.EACCES):
            raise _unwritable(folder, error) from error
        raise  # not of this file: whatever the block did besides writing


def _unwritable(folder: Path, error: OSError) -> DataError:
    return DataError(
        f"The folder {folder} for derived data cannot be written: {error.strerror or error}. Set "
        "FEDHARMONY_CACHE to a folder that can."
    )


def in_bytes(size: int) -> str:
    """A size for people.

    >>> in_bytes(1_721_000_000), in_bytes(35_000_000), in_bytes(12)
    ('1.72 GB', '35 MB', '0 MB')
    """
    return f"{size / 1e9:.2f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
