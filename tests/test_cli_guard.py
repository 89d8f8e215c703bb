"""What guards a command: exit codes and words for what can go wrong in it."""

from __future__ import annotations

import errno
import signal
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

import pytest

from fedharmony.cli_guard import exit_code_of
from fedharmony.errors import ClientLimitError, ConfigError, Stopped


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
    assert exit_code_of(raising(error), debug=False) == code
    assert said in " ".join(capsys.readouterr().err.split())
    assert len(list(tmp_path.iterdir())) == (code == 70)


def test_a_command_that_ends_well() -> None:
    assert exit_code_of(lambda: None, debug=False) == 0
    assert exit_code_of(lambda: 3, debug=False) == 3
