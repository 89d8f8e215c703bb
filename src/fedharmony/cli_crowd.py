"""What commands with ``--jobs`` and several devices share."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING

from fedharmony.cli_options import import_torch, words_of
from fedharmony.errors import ConfigError
from fedharmony.experiments.crowd import Crowd
from fedharmony.report.progress import Board, Progress

if TYPE_CHECKING:
    from fedharmony.experiments.jobs import Workers


def crowd_of(command: str, jobs: int | None, devices: str | None) -> Crowd:
    """What the options of a command that runs in a single process make: one run per device.

    A device that is not there is refused.
    """
    import_torch()
    from fedharmony.experiments.machine import choose_device
    from fedharmony.transport.processes import process_group

    if process_group().size > 1:
        raise ConfigError(
            f"'fedharmony {command}' works in one process. Under torchrun use 'run' and 'resume'."
        )
    named = tuple(words_of(devices or ""))
    for device in named:
        choose_device(device)
    return Crowd(jobs or max(1, len(named)), named)


def progress_of(crowd: Crowd, quiet: bool) -> Progress:
    """What shows so many runs."""
    return (Board if crowd.size > 1 else Progress)(quiet=quiet)


def workers_of(crowd: Crowd) -> AbstractContextManager[Workers | None]:
    """The processes, if there are several; they end with the block."""
    from fedharmony.experiments.jobs import Workers

    return Workers(crowd) if crowd.size > 1 else nullcontext()
