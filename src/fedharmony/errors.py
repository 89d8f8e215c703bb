"""Errors a user can act on.

Every :class:`FedHarmonyError` carries one paragraph: what is wrong, where, and what to do next.
The command line prints that paragraph and exits with code 2; anything else is a bug, of which it
keeps the trace.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Characters of a value that a message repeats.
SHOWN = 120
#: Names of a list that a message gives.
NAMED = 5


class FedHarmonyError(Exception):
    """Base class of all errors that are the user's to mend."""


class ConfigError(FedHarmonyError):
    """A setting is unknown, of the wrong type, or impossible."""


class DataError(FedHarmonyError):
    """Data are missing, damaged, or do not fit the request."""


class PartitionError(FedHarmonyError):
    """A split cannot be made, or a partition file does not match."""


class CheckpointError(FedHarmonyError):
    """A checkpoint or run folder cannot be read, written, or continued."""


class OccupiedError(CheckpointError):
    """A folder holds other files, or a run with other settings or other data."""


class TransportError(FedHarmonyError):
    """A message between a server and a site cannot be sent, read, or believed."""


class NumericalError(FedHarmonyError):
    """Equations have no solution, or none that can be trusted."""


class PolicyError(FedHarmonyError):
    """A site refuses what a server asks: its own rules or data do not allow it."""


class Stopped(BaseException):
    """A signal asked the program to end, as Ctrl-C does.

    Like :class:`KeyboardInterrupt` no :class:`Exception`: nothing that handles failures of clients
    or files takes it for one. The program exits with its ``code``.
    """

    def __init__(self, signal: str, number: int) -> None:
        super().__init__(f"stopped by {signal}")
        self.code = 128 + number


class DeviceMemoryError(FedHarmonyError):
    """A run does not fit into what is free of a device's memory; its finished rounds are saved."""

    def __init__(self, what: str, error: object) -> None:
        super().__init__(
            f"{what} ({error}). Other programs may hold the rest of it. Make room, or run fewer "
            "--jobs at once, and 'resume': rounds that are finished are kept."
        )


class ClientLimitError(FedHarmonyError):
    """More clients failed than the run allows; its state has been saved."""


@dataclass(frozen=True)
class Failure:
    """A run that failed; ``details`` are the trace of what nobody foresaw, else empty."""

    folder: Path
    reason: str
    details: str = ""


class RunsFailedError(FedHarmonyError):
    """Some of several runs failed; the others are done."""

    def __init__(self, failures: Sequence[Failure]) -> None:
        told = " ".join(f"{failure.folder}: {failure.reason}" for failure in failures)
        many = "1 run failed" if len(failures) == 1 else f"{len(failures)} runs failed"
        super().__init__(
            f"{many}; all others are done. {told} Mend the cause and give the same command again: "
            "it repeats only what is not finished."
        )
        self.failures = tuple(failures)


def nearest(word: str, choices: Iterable[str]) -> str:
    """Advice for a misspelt word: the nearest choice, then all of them.

    >>> nearest("fedavgg", ["fedavg", "fedharmony"])
    "Did you mean 'fedavg'? Valid: fedavg, fedharmony."
    >>> nearest("xyz", ["fedavg"])
    'Valid: fedavg.'
    """
    known = sorted(choices)
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    hint = f"Did you mean {close[0]!r}? " if close else ""
    return f"{hint}Valid: {', '.join(known) or '(none)'}."


def shown(value: Any) -> str:
    """A value for messages, cut where it is long.

    >>> shown("a" * 500)[-8:], shown(10**5000)
    ('aaaaa...', 'a number of more than 4,300 digits')
    """
    try:
        text = repr(value)
    except ValueError:  # Python prints no number of more digits
        return "a number of more than 4,300 digits"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."


def some(names: list[str] | tuple[str, ...]) -> str:
    """The first names of a list for messages, and how many more there are.

    >>> some(list("abc")), some(list("abcdefgh"))
    ('a, b, c', 'a, b, c, d, e and 3 more')
    """
    more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + more
