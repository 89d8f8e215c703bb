"""Files appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedharmony.files import write_atomically


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
