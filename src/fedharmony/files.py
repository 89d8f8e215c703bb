"""Writing files: whole or not at all, and by one process at a time.

A file that is being written lies beside its final place under a name of our own, and is locked by
the process that writes it; the kernel lets the lock go when that process ends, however it ends. So
whoever comes next can tell what a dead process left behind from what is being written now.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from fedharmony.errors import CheckpointError
from fedharmony.terminal import warn_once

try:
    import fcntl
except ImportError:  # not a POSIX system
    fcntl = None  # type: ignore[assignment]

#: How the names of files end that are being written.
PARTIAL = ".fedharmony-partial"
#: The file that a folder's writer holds. It is gone when nobody writes.
LOCK = ".fedharmony-lock"
#: A temporary name takes so much of the final one: names have at most 255 bytes.
KEPT_NAME = 40


def write_atomically(path: str | Path, data: bytes, mode: int = 0o644) -> None:
    """Write ``data`` to ``path`` in one step; see :func:`replacing`."""
    with replacing(Path(path), mode) as file:
        file.write(data)


@contextmanager
def replacing(path: Path, mode: int = 0o644) -> Iterator[BinaryIO]:
    """A file that takes the place of ``path`` when the block ends well, and vanishes otherwise.

    What is written goes to a temporary file in the same folder, is forced to the disk, and replaces
    the old file in one step; several processes may do so at once. Raises :class:`OSError` when that
    fails; the old file is then untouched. What dead processes were writing there is removed. Until
    the end nobody but the owner can read the new file, and then whoever ``mode`` lets.
    """
    remove_leftovers(path.parent)
    handle, temporary = _temporary(path)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            temporary.chmod(mode)
            temporary.replace(path)  # still locked: nobody takes it for a leftover
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def sync_folder(folder: Path) -> None:
    """Force to the disk which files a folder holds, where the system can."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def _temporary(path: Path) -> tuple[int, Path]:
    """A new file beside ``path``, locked while its handle is open."""
    while True:
        prefix = f".{path.name[:KEPT_NAME]}."
        handle, name = tempfile.mkstemp(PARTIAL, prefix, path.parent)
        with suppress(OSError):  # without locks it is never taken for a leftover either
            take_lock(handle, wait=True)
        if Path(name).exists():  # else it was swept away before it was locked
            return handle, Path(name)
        os.close(handle)


def remove_leftovers(folder: Path) -> None:
    """Remove what dead processes were writing in ``folder``; files being written stay."""
    for file in folder.glob(f".*{PARTIAL}"):
        with suppress(OSError), file.open("r+b") as stream:
            take_lock(stream.fileno())
            file.unlink()


def is_ours(path: Path) -> bool:
    """Whether a file is a lock or a temporary file of this package, and no content.

    >>> is_ours(Path("run/.fedharmony-lock")), is_ours(Path("run/config.toml"))
    (True, False)
    """
    return path.name == LOCK or (path.name.startswith(".") and path.name.endswith(PARTIAL))


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Keep other processes from writing in ``folder`` meanwhile; readers are not hindered.

    A folder in which another process writes is refused. What dead processes were writing there is
    removed. Where the file system has no locks, that is said once, and the work goes on.
    """
    file = folder / LOCK
    handle = _hold(file)
    try:
        remove_leftovers(folder)
        yield
    finally:
        with suppress(OSError):
            file.unlink()  # while it is held: who waits for it looks again
        os.close(handle)


def refuse_if_held(folder: Path) -> None:
    """Refuse a folder in which another process writes, before any work is done for it.

    A lock that a dead process left behind is removed.
    """
    file = folder / LOCK
    try:
        handle = os.open(file, os.O_RDWR)
    except OSError:
        return  # nobody, or a folder that cannot be written: that is told when it is
    try:
        take_lock(handle)
        file.unlink(missing_ok=True)
    except BlockingIOError:
        raise _held(file) from None
    except OSError:
        return
    finally:
        os.close(handle)


def _hold(file: Path) -> int:
    """Open and lock a folder's lock file, and write into it who holds it."""
    while True:
        try:
            handle = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise CheckpointError(
                f"The folder {file.parent} cannot be written: {error.strerror}. Choose a folder "
                "you may write to with --out."
            ) from error
        try:
            take_lock(handle)
        except BlockingIOError:
            os.close(handle)
            raise _held(file) from None
        except OSError as error:
            warn_once(
                f"The file system has no locks ({error.strerror or error}): take care that no "
                "second process writes to the same folder."
            )
        with suppress(OSError):
            if os.fstat(handle).st_ino == file.stat().st_ino:
                break
        os.close(handle)  # its last holder removed it meanwhile
    now = datetime.now(UTC).isoformat(timespec="seconds")
    about = {"pid": os.getpid(), "host": socket.gethostname(), "since": now}
    with suppress(OSError):  # a full disk; it holds all the same
        os.ftruncate(handle, 0)
        os.pwrite(handle, json.dumps(about).encode(), 0)
    return handle


def take_lock(handle: int, wait: bool = False) -> None:
    """Lock an open file for this process alone; OSError where that cannot be."""
    if fcntl is None:
        raise OSError("this system has no file locks")
    fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)


def _held(file: Path) -> CheckpointError:
    about: dict[str, Any] = {}
    with suppress(OSError, ValueError):
        about = dict(json.loads(file.read_bytes()))
    who = (
        f"process {about.get('pid')} on {about.get('host')}, since {about.get('since')}"
        if about
        else "another process"
    )
    return CheckpointError(
        f"{file.parent} is being written by {who}. Wait until it ends or stop it, then give the "
        "same command again."
    )
