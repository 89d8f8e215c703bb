"""Files appear whole or not at all, and one process writes at a time."""

from __future__ import annotations

import errno
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedharmony import files
from fedharmony.errors import CheckpointError
from fedharmony.files import (
    LOCK,
    PARTIAL,
    refuse_if_held,
    remove_leftovers,
    sole_writer,
    write_atomically,
)
from fedharmony.terminal import warn_once


def test_writes_and_replaces(tmp_path: Path) -> None:
    for content in (b"old", b"new"):
        write_atomically(tmp_path / "file", content)
        assert (tmp_path / "file").read_bytes() == content
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_failure_keeps_the_old_content(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"old")

    def refuse(self: Path, target: Path) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="disk full"):
        write_atomically(file, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert file.read_bytes() == b"old"


# -- one writer at a time -------------------------------------------------------------------------

HOLD = """
import sys, time
from pathlib import Path
from fedharmony.files import _temporary, sole_writer
with sole_writer(Path(sys.argv[1])):
    _temporary(Path(sys.argv[1], "file"))
    print("held", flush=True)
    time.sleep(600)
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that writes in the folder, in the middle of a file."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        try:
            yield process
        finally:
            process.kill()


def test_a_second_writer_is_told_who_writes(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        for attempt in (lambda: refuse_if_held(tmp_path), sole_writer(tmp_path).__enter__):
            with pytest.raises(CheckpointError) as refused:
                attempt()
            assert f"process {process.pid} on {socket.gethostname()}, since 20" in str(
                refused.value
            )
        remove_leftovers(tmp_path)  # nothing of what is being written goes
        assert len(list(tmp_path.iterdir())) == 2
        process.kill()
        process.wait()
        assert len(list(tmp_path.iterdir())) == 2
        with sole_writer(tmp_path):  # of a dead process nothing stays
            assert [path.name for path in tmp_path.iterdir()] == [LOCK]
    assert list(tmp_path.iterdir()) == []


def test_writing_removes_what_dead_processes_left(tmp_path: Path) -> None:
    (tmp_path / f".file.abc{PARTIAL}").write_bytes(b"half")
    (tmp_path / ".file.abc").write_bytes(b"of somebody else")
    write_atomically(tmp_path / "file", b"whole")
    assert sorted(path.name for path in tmp_path.iterdir()) == [".file.abc", "file"]


def test_a_temporary_file_that_was_swept_away_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between its making and its locking it looks like one of a dead process."""
    lock, swept = files.take_lock, []

    def late(handle: int, wait: bool = False) -> None:
        if wait and not swept:
            swept.extend(tmp_path.glob(f"*{PARTIAL}"))
            swept[0].unlink()
        lock(handle, wait)

    monkeypatch.setattr(files, "take_lock", late)
    write_atomically(tmp_path / "file", b"whole")
    assert len(swept) == 1
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"whole"}


def test_a_lock_that_went_with_its_holder_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who opened the lock file before its holder removed it must not hold a file nobody sees."""
    lock, removed = files.take_lock, []

    def late(handle: int, wait: bool = False) -> None:
        if not removed:
            removed.append(tmp_path / LOCK)
            removed[0].unlink()
        lock(handle, wait)

    monkeypatch.setattr(files, "take_lock", late)
    with sole_writer(tmp_path):
        assert (tmp_path / LOCK).exists()
    assert removed


def test_a_file_system_without_locks_is_named_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(handle: int, how: int) -> None:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    warn_once.cache_clear()
    monkeypatch.setattr(files.fcntl, "flock", none)
    (tmp_path / f".other.abc{PARTIAL}").write_bytes(b"perhaps being written")
    for _ in range(2):
        refuse_if_held(tmp_path)
        with sole_writer(tmp_path):
            write_atomically(tmp_path / "file", b"whole")
    assert caplog.text.count("has no locks") == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [f".other.abc{PARTIAL}", "file"]


def test_long_names_have_room_for_temporary_ones(tmp_path: Path) -> None:
    write_atomically(tmp_path / ("a" * 250), b"whole")
    assert [path.name for path in tmp_path.iterdir()] == ["a" * 250]
