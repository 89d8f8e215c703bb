"""What guards a command: exit codes and words for what can go wrong in it."""

from __future__ import annotations

import errno
import signal
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
import typer

from fedharmony import cli_guard, stopping
from fedharmony.cli_guard import exit_code_of, resumable
from fedharmony.data.base import TensorImages
from fedharmony.data.cache import Resize, _checksums, decode_in_order
from fedharmony.errors import ClientLimitError, ConfigError, Stopped
from fedharmony.experiments.scorer import Scorer


def raising(error: BaseException) -> Callable[[], NoReturn]:
    def command() -> NoReturn:
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (ConfigError("Unknown setting."), 2, "Error: Unknown setting."),
        (ClientLimitError("3 of 5 clients failed."), 1, "Error: 3 of 5 clients failed."),
        (Stopped("SIGTERM", signal.SIGTERM), 143, "The program was"),
        (KeyboardInterrupt(), 130, "Stopped."),
        (BrokenPipeError(), 1, ""),
        (OSError(errno.ENOSPC, "No space left"), 1, "cannot be written: No space left."),
        (RuntimeError("odd"), 70, "a fault of this program: RuntimeError: odd. The trace is in"),
    ],
)
def test_exit_codes(
    error: BaseException,
    code: int,
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # for traces
    monkeypatch.setattr(cli_guard, "plugins", list)  # other tests may have loaded some
    assert exit_code_of(raising(error), debug=False) == code
    assert said in " ".join(capsys.readouterr().err.split())
    assert len(list(tmp_path.iterdir())) == (code == 70)


def test_a_command_that_ends_well() -> None:
    assert exit_code_of(lambda: None, debug=False) == 0
    assert exit_code_of(lambda: 3, debug=False) == 3


def test_the_first_signal_is_remembered_and_the_second_raises() -> None:
    """Whatever drops exceptions drops none of the first signal's: every look raises it again."""
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    with stopping.hearing_signals():
        signal.raise_signal(signal.SIGINT)
        for _ in range(2):
            with pytest.raises(KeyboardInterrupt):
                stopping.end_if_asked()
        with pytest.raises(Stopped, match="SIGTERM"):
            signal.raise_signal(signal.SIGTERM)
    stopping.end_if_asked()
    assert before == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_a_signal_ends_what_waits_even_if_a_library_drops_it() -> None:
    """Before the block, inside of it, and where the block drops the exception."""
    reached = []

    def wait(drop: bool) -> None:
        with stopping.interruptible():
            with suppress(KeyboardInterrupt) if drop else nullcontext():
                signal.raise_signal(signal.SIGINT)
            reached.append(drop)

    for drops in ([False, True], [True]):
        with stopping.hearing_signals():
            for drop in drops:
                with pytest.raises(KeyboardInterrupt):
                    wait(drop)
    assert reached == [True]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_command_that_was_asked_to_end_says_so_wherever_it_was(
    number: signal.Signals, code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The last step of a command is not followed by any look but the guard's."""

    def command() -> int:
        with pytest.raises(typer.Exit) as end, resumable(tmp_path):
            signal.raise_signal(number)
        return int(end.value.exit_code)

    assert exit_code_of(command, debug=False) == code
    errors = capsys.readouterr().err
    assert errors.count("topped") == 1
    assert f"go on with\n  fedharmony resume {tmp_path}" in errors
    assert exit_code_of(lambda: signal.raise_signal(number), debug=False) == code


def test_reading_and_scoring_many_images_ends_between_steps(tmp_path: Path) -> None:
    """Decoding, checksums and scores: each looks before its next step."""
    file = tmp_path / "pixels"
    file.write_bytes(bytes(10))
    files: Any = ["a.png"]
    images = TensorImages(torch.zeros(1, 3, 4, 4, dtype=torch.uint8))
    works: list[Callable[[], object]] = [
        lambda: list(decode_in_order(files, Resize(4))),
        lambda: _checksums(file),
        lambda: Scorer(None, None, None).all(images, torch.device("cpu")),  # type: ignore[arg-type]
    ]
    try:
        stopping.ask(KeyboardInterrupt())
        for work in works:
            with pytest.raises(KeyboardInterrupt):
                work()
    finally:
        stopping.forget()
