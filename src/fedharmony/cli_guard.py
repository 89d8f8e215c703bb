"""What guards a command: signals, crash files, output that nobody takes, and exit codes."""

from __future__ import annotations

import atexit
import errno
import os
import shlex
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.text import Text

from fedharmony import stopping
from fedharmony.errors import ClientLimitError, FedHarmonyError, RunsFailedError, Stopped
from fedharmony.reading import is_folder
from fedharmony.registry import plugin_place, plugins
from fedharmony.terminal import console, say


class UnexpectedError(Exception):
    """What nobody foresaw happened while a folder was being written; its cause says what."""

    def __init__(self, folder: Path) -> None:
        super().__init__(str(folder))
        self.folder = folder


def _is_output_lost(error: Exception) -> bool:
    """Whether the disk or the device that is written to takes no more."""
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EIO)


@contextmanager
def stoppable(folder: Path, kept: str, command: str) -> Iterator[None]:
    """Ctrl-C and SIGTERM say what is kept and which command goes on.

    The trace of an unexpected error belongs into the folder that is being written.
    """
    try:
        yield
        stopping.end_if_asked()
    except (FedHarmonyError, BrokenPipeError, typer.Exit, typer.Abort):
        raise
    except (KeyboardInterrupt, Stopped) as stop:
        say(f"\nStopped. {kept}\n  {command}", err=True)
        # What a shell expects of a program that a signal ended: 128 and its number.
        raise typer.Exit(getattr(stop, "code", 128 + signal.SIGINT)) from None
    except Exception as error:
        if _is_output_lost(error):
            raise
        raise UnexpectedError(folder) from error


def resumable(folder: Path, command: str = "fedharmony resume") -> AbstractContextManager[None]:
    """What guards a single run."""
    again = f"{command} {shlex.quote(str(folder))}"
    return stoppable(folder, "Every finished round is saved; go on with", again)


def repeatable(folder: Path) -> AbstractContextManager[None]:
    """What guards a sequence of runs."""
    kept = f"Finished runs and rounds are kept in {folder}; the same command goes on:"
    return stoppable(folder, kept, shlex.join(["fedharmony", *sys.argv[1:]]))


def _trace(error: Exception) -> str:
    """The whole trace as text; what a wrapped error was caused by comes first."""
    return "".join(traceback.format_exception(error))


def _keep(text: str, folder: Path | None) -> Path | None:
    """Write a trace into the folder of the run, or else where there is room; None where nowhere."""
    from fedharmony.files import write_atomically

    name = f"fedharmony-error-{datetime.now(UTC):%Y%m%d-%H%M%S}-{os.getpid()}.txt"
    places = [folder] if folder is not None and is_folder(folder) else []
    for place in (*places, Path(tempfile.gettempdir())):
        try:
            write_atomically(place / name, text.encode(errors="backslashreplace"))
        except OSError:
            continue
        return place / name
    return None


def _unexpected(error: Exception, debug: bool) -> str:
    """One paragraph about an error that nobody foresaw, or that a plug-in raised."""
    folder = error.folder if isinstance(error, UnexpectedError) else None
    cause = error.__cause__ if isinstance(error, UnexpectedError) and error.__cause__ else error
    what = " ".join(str(cause).split())[:500]
    if isinstance(cause, MemoryError):
        what = f"The memory does not suffice. {what}".strip()
    text = f"{type(cause).__name__}: {what or 'no reason given'}"
    text += "" if text.endswith(".") else "."
    kept = None if debug else _keep(_trace(error), folder)
    hint = "" if debug else " With --debug the trace is shown here."
    if place := plugin_place(error):
        return f"The {place}: {text}{f' The trace is in {kept}.' if kept else ''}{hint}"
    whose = (
        f"this program or of a plug-in ({', '.join(plugins())})" if plugins() else "this program"
    )
    report = f" The trace is in {kept}; please report it." if kept else ""
    return f"Something unexpected happened, which is a fault of {whose}: {text}{report}{hint}"


def _complain(text: str) -> None:
    """Print an error; where even that cannot be written, nothing is left to be done."""
    if sys.stderr is None:  # closed before the program began
        return
    paragraph = Text.assemble(("Error:", "bold red"), f" {text}")
    with suppress(OSError):
        console(stderr=True).print(paragraph, soft_wrap=not sys.stderr.isatty())


def _flushed(code: int) -> int:
    """Write out what is left; the exit code.

    At the very end, where Python would try, nobody could say that it failed.
    """
    if sys.stdout is None:  # closed before the program began
        return code
    try:
        sys.stdout.flush()
    except OSError as error:
        # What is still in the stream must not be tried again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return code or _last_resort(error, debug=False)
    return code


def _last_resort(error: Any, debug: bool) -> int:
    """Say what happened; the exit code."""
    # Typer has these errors from click, or from a copy of its own, under a name that changes.
    if type(error).__name__ == "NoArgsIsHelpError":
        error.show()
        return int(error.exit_code)
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        context = getattr(error, "ctx", None)
        advice = "" if context is None else f" Try '{context.command_path} --help'."
        _complain(error.format_message() + advice)
        return int(error.exit_code)
    if isinstance(error, BrokenPipeError):  # whoever read the output has gone
        return 1
    if _is_output_lost(error):
        _complain(f"The output cannot be written: {error.strerror}.")
        return 1
    if debug:
        say(_trace(error), err=True)
    _complain(_unexpected(error, debug))
    return 2 if plugin_place(error) else 70


def exit_code_of(command: Callable[[], int | None], debug: bool) -> int:
    """Run a command: an error is one paragraph and an exit code, never a traceback.

    Exit codes: 2 for what the user can mend, in a plug-in too, 1 for clients that failed and for
    output that nobody takes, 70 for what nobody foresaw.
    """
    try:
        with stopping.hearing_signals():
            code = command() or 0
            if code == 0:  # else what the signal interrupted has said so
                stopping.end_if_asked()
    except Stopped as stop:
        say(f"\nThe program was {stop}.", err=True)
        code = stop.code
    except FedHarmonyError as error:
        if debug:
            say(_trace(error), err=True)
        traces = error.failures if isinstance(error, RunsFailedError) else ()
        where = ""
        for failure in traces:
            if failure.details and (file := _keep(failure.details, failure.folder)):
                ours = "" if failure.reason.startswith("The plug-in") else "; please report it"
                where += f" A trace is in {file}{ours}."
        place = plugin_place(error)
        source = f" (The {place}.)" if place and place not in str(error) else ""
        _complain(f"{error}{source}{where}")
        code = 1 if isinstance(error, ClientLimitError) else 2
    except (typer.Abort, KeyboardInterrupt):
        say("Stopped.", err=True)
        code = 130
    except Exception as error:
        code = _last_resort(error, debug)
    return _flushed(code)


def leave(code: int) -> NoReturn:
    """End the process with an exit code."""
    if code == 128 + signal.SIGINT:
        # In about one case of seven Python then ended by the signal instead of with this code, as
        # it does after an interrupt that nobody handled. Why it takes this one for such is unknown.
        atexit._run_exitfuncs()
        os._exit(code)
    raise SystemExit(code)
