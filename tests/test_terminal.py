"""What reaches a terminal: no traceback, no foreign control sequence, no character it lacks."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
from rich.live import Live
from rich.table import Table
from rich.text import Text

from fedharmony import cli
from fedharmony.terminal import PlainConsole, PlainFormatter, plain, replace_unknown
from test_cli import call, command

#: As for most users: what is printed is kept back for a while.
BUFFERED = {**os.environ, "PYTHONUNBUFFERED": ""}
ESCAPE = "\x1b]0;title\x07\x1b[31mred\x9b0m\x08"


def fails(*_: object, **__: object) -> None:
    raise ZeroDivisionError("one in\n  a thousand")


@pytest.fixture
def unforeseen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A program with a fault, and the folder where it keeps traces."""
    monkeypatch.setattr("fedharmony.experiments.build.choose_device", fails)
    place = tmp_path / "temporary"
    place.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(place))
    return place


def test_the_unforeseen_is_one_paragraph(unforeseen: Path, tmp_path: Path) -> None:
    code, out, err = call(tmp_path, "run", "demo")
    assert (code, out) == (70, "")
    assert err.startswith("Error: Something unexpected happened")
    assert "ZeroDivisionError: one in a thousand." in err
    assert err.count("\n") == 1
    (kept,) = unforeseen.iterdir()
    assert str(kept) in err
    text = kept.read_text()
    assert "Traceback (most recent call last)" in text
    assert "fails" in text  # the place


def test_a_trace_lies_with_its_run(
    unforeseen: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    code, _, err = call(tmp_path, "run", "demo", "--out", str(folder))
    assert code == 70
    (kept,) = folder.iterdir()
    assert str(kept) in err
    assert not list(unforeseen.iterdir())


@pytest.mark.parametrize("place", [0, 1, 3])
def test_debug_shows_the_trace(unforeseen: Path, tmp_path: Path, place: int) -> None:
    words = ["run", "demo", "run.rounds=1"]
    words.insert(place, "--debug")
    code, _, err = call(tmp_path, *words)
    assert code == 70
    assert err.startswith("Traceback (most recent call last)")
    assert "Something unexpected" in err.splitlines()[-1]
    assert not list(unforeseen.iterdir())


def test_debug_shows_where_a_mistake_was_found(tmp_path: Path) -> None:
    code, _, err = call(tmp_path, "run", "demo", "train.lrr=1", "--debug")
    assert code == 2
    assert "Traceback" in err
    assert "Did you mean 'lr'?" in err


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["run"], "Missing argument"),
        (["run", "demo", "--nope"], "--nope"),
        (["rum"], "rum"),
        (["list", "sheep"], "sheep"),
        (["run", "demo", f"--{ESCAPE}"], "No such option"),
        (["run", "demo", "--out", "x" * 300], "File name too long"),
        (["report", "x" * 300], "File name too long"),
        (["resume", "x" * 300], "File name too long"),
        (["partition", "demo", "--out", "x" * 300], "File name too long"),
        (["run", "demo", "--plugin", "~nobody-of-that-name/x.py"], "does not exist"),
        (["data", "check", "table", "x[/]y" + ESCAPE], "no file or folder"),
    ],
)
def test_mistyped_commands(tmp_path: Path, words: list[str], expected: str) -> None:
    code, out, err = call(tmp_path, *words)
    assert (code, out) == (2, "")
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert expected in err
    assert plain(err) == err
    assert list(tmp_path.iterdir()) == []


def test_options_without_a_value_show_no_type(tmp_path: Path) -> None:
    _, out, _ = call(tmp_path, "run", "--help")
    (line,) = [line for line in out.splitlines() if "--quiet" in line]
    assert "bool" not in line.lower()


def test_foreign_control_sequences_do_not_pass() -> None:
    """In text, tables and live displays; the console's own colours do."""
    file = io.StringIO()
    console = PlainConsole(file=file, force_terminal=True, width=60, color_system="standard")
    table = Table(ESCAPE)
    table.add_row(ESCAPE)
    console.print(table)
    console.print(Text(ESCAPE, "red"))
    console.print(ESCAPE, markup=False)
    with Live(Text(ESCAPE), console=console, auto_refresh=False):
        pass
    written = file.getvalue()
    assert "\x1b[31m" in written  # the style of the second line
    for bad in ("\x1b]0", "\x07", "\x08", "\x9b"):
        assert bad not in written
    assert "�[31mred" in written


def test_logged_text_is_plain() -> None:
    record = logging.LogRecord("a", logging.INFO, "", 0, "%s", (ESCAPE,), None)
    assert PlainFormatter().format(record) == plain(ESCAPE)


def test_an_encoding_that_lacks_a_character() -> None:
    stream = io.TextIOWrapper(io.BytesIO(), "latin-1")
    replace_unknown(stream)
    stream.write("mean ± sd, 3 – 4, λ")
    stream.flush()
    assert stream.buffer.getvalue().decode("latin-1") == "mean ± sd, 3 ? 4, ?"  # type: ignore[attr-defined]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device without room")
def test_an_output_without_room() -> None:
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command("--version"),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=BUFFERED,
        )
    assert done.returncode == 1
    assert done.stderr == "Error: The output cannot be written: No space left on device.\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device without room")
def test_a_mistake_is_told_although_the_output_has_no_room(tmp_path: Path) -> None:
    """A plug-in prints, and what it printed is still in the stream when the program ends."""
    (tmp_path / "own.py").write_text("print('hello')\n")
    words = ["run", "demo", "train.lrr=1", "--plugin", str(tmp_path / "own.py")]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            command(*words),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=BUFFERED,
        )
    assert done.returncode == 2
    assert done.stderr.startswith("Error: Unknown setting train.lrr.")
    assert done.stderr.count("\n") == 1


def test_a_closed_pipe_and_closed_streams() -> None:
    read, write = os.pipe()
    os.close(read)
    with os.fdopen(write, "w") as nobody:
        done = subprocess.run(
            command("--help"),
            stdout=nobody,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env=BUFFERED,
        )
    assert (done.returncode, done.stderr) == (1, "")


def test_streams_that_are_not_there() -> None:
    """Closed by whoever started the program: Python then has None in their place."""
    with (
        mock.patch.object(sys, "argv", ["fedharmony", "run", "dmo"]),
        mock.patch.object(sys, "stderr", None),
        contextlib.redirect_stdout(None),
        pytest.raises(SystemExit) as ended,
    ):
        cli.main()
    assert ended.value.code == 2
