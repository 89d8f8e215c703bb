"""Several runs at once: processes on one machine, each taking the next run that is not finished.

The processes share nothing but the folders of the runs, each of which one process writes at a time.
The first process plans, hands out runs and follows them; a worker loads data once for all runs
that share them, and sends back what its runs have to say. Workers do not outlive the first process:
it stops them when it is stopped, and they stop themselves when it is gone. The same command then
goes on.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Self

import torch

from fedharmony import stopping
from fedharmony.data.base import DataSet
from fedharmony.errors import Failure, RunsFailedError, Stopped
from fedharmony.experiments.build import Observer
from fedharmony.experiments.compare import Planned, carry_out, reason_of, rehearse
from fedharmony.experiments.crowd import Crowd
from fedharmony.experiments.evaluate import Results
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import compose
from fedharmony.server.federation import Event

logger = logging.getLogger(__name__)

#: Seconds that a worker has to end its step and write down that it was stopped.
PATIENCE = 60.0
_context = multiprocessing.get_context("spawn")  # a process that uses CUDA cannot be forked


class Workers:
    """At most so many processes that carry out runs; inside a ``with`` block, which ends them.

    They take the crowd's devices in turn; without any, it is left to the settings.
    """

    def __init__(self, crowd: Crowd) -> None:
        self._crowd = crowd
        self._all: list[_Worker] = []
        self._said: set[str] = set()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """End all processes; those that are at work write down how far they got."""
        patience_ends = time.monotonic() + PATIENCE
        try:
            for worker in self._all:
                worker.dismiss()
            for worker in self._all:
                worker.process.join(max(0.0, patience_ends - time.monotonic()))
        finally:  # even if a second Ctrl-C comes
            for worker in self._all:
                worker.process.kill()
                worker.process.join()

    def execute(
        self, runs: Sequence[Planned], observer: Callable[[int, Planned], Observer]
    ) -> list[Results]:
        """Carry out all runs; ``observer(i, run)`` gives the observer of the i-th run.

        Where some failed, a RunsFailedError says so when all others are done.
        """
        found = {i: done for i, run in enumerate(runs) if (done := run.results)}
        waiting = deque(i for i in range(len(runs)) if i not in found)
        failures: list[Failure] = []
        if waiting and not self._all:
            threads = runs[0].settings.engine.threads
            logger.info("%d processes, CPU threads of each: %s.", self._crowd.size, threads)
        busy: dict[Connection, tuple[_Worker, int, Observer]] = {}
        while waiting or busy:
            while waiting and len(busy) < self._crowd.size:
                number = waiting.popleft()
                worker = self._idle({id(w) for w, *_ in busy.values()})
                busy[worker.pipe] = worker, number, observer(number, runs[number])
                worker.order(runs[number])
            with stopping.interruptible():
                ready = wait(list(busy))
            for pipe in ready:
                assert isinstance(pipe, Connection)
                worker, number, observe = busy[pipe]
                kind, content = worker.answer()
                if kind == "event":
                    observe(content)
                elif kind == "log":
                    self._say(runs[number], *content)
                else:
                    del busy[pipe]
                    if kind == "done":
                        found[number] = content
                    else:
                        run, (reason, details) = runs[number], content
                        failures.append(Failure(run.folder.path, reason, details))
                        observe({"event": "finish", "status": "failed", "reason": reason})
        if failures:
            raise RunsFailedError(failures)
        return [found[i] for i in range(len(runs))]

    def _say(self, run: Planned, level: int, text: str) -> None:
        """Pass on what a run has to say; what others have said already is not repeated."""
        if text not in self._said:
            logger.log(level, "%s seed %d: %s", run.label, run.seed, text)
        self._said.add(text)

    def _idle(self, busy: set[int]) -> _Worker:
        """A process without work, or a new one."""
        self._all = [w for w in self._all if not w.gone]
        free = next((w for w in self._all if id(w) not in busy), None)
        if free is None:
            taken = [w.device for w in self._all]
            device = min(self._crowd.devices, key=taken.count, default=None)
            free = _Worker(device)
            self._all.append(free)
        return free


class _Worker:
    """One process, as the first one sees it."""

    def __init__(self, device: str | None) -> None:
        self.device, self.gone = device, False
        self.pipe, other = _context.Pipe()
        self.process = _context.Process(target=_work, args=(other,), name="fedharmony worker")
        self.process.start()
        other.close()  # so that the pipe ends with the process

    def order(self, run: Planned) -> None:
        """Hand out a run."""
        settings = run.settings
        if self.device is not None:
            settings = replace(settings, engine=replace(settings.engine, device=self.device))
        try:
            # Settings travel as a tree: plug-ins are loaded to read them.
            self.pipe.send((run.folder.path, settings.tree(), self.device))
        except OSError:  # it has died: its answer says so
            return

    def answer(self) -> tuple[str, Any]:
        """What the process sends; its death is an answer, too."""
        try:
            kind, content = self.pipe.recv()
        except (EOFError, OSError):
            self.gone = True
            self.process.join()
            return "failed", (f"its process ended ({_ending(self.process.exitcode)}).", "")
        return str(kind), content

    def dismiss(self) -> None:
        """Ask the process to end, whatever it does.

        The signal may reach a thread of CUDA, which does not wake one that waits for work: that one
        sees the pipe end.
        """
        if self.process.is_alive():
            self.process.terminate()
        self.pipe.close()


def _ending(code: int | None) -> str:
    """How a process ended, in words.

    >>> _ending(-9), _ending(3)
    ('SIGKILL: often the memory did not suffice', 'exit code 3')
    """
    if code is None or code >= 0:
        return f"exit code {code}"
    hint = ": often the memory did not suffice" if code == -signal.SIGKILL else ""
    return f"{signal.Signals(-code).name}{hint}"


# --------------------------------------------------------------------------- in the worker


class _SendLog(logging.Handler):
    """Sends what the package has to say to the first process."""

    def __init__(self, pipe: Connection) -> None:
        super().__init__()
        self._pipe = pipe

    def emit(self, record: logging.LogRecord) -> None:
        self._pipe.send(("log", (record.levelno, record.getMessage())))


def _work(pipe: Connection) -> None:
    """Take orders until the first process says stop, or is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process decides what Ctrl-C means
    threading.Thread(target=end_with_parent, daemon=True).start()
    package = logging.getLogger("fedharmony")
    package.setLevel(logging.WARNING)
    package.addHandler(_SendLog(pipe))
    held: dict[str, DataSet] = {}
    try:
        with stopping.hearing_signals():
            while True:
                with stopping.interruptible():
                    order = pipe.recv()
                _carry_out(pipe, held, *order)
                gc.collect()  # a run's recorded steps hold memory of the GPU until they go
                torch.cuda.empty_cache()  # does nothing where no GPU was used
    except (Stopped, EOFError, OSError):
        os._exit(0)


def _carry_out(
    pipe: Connection,
    held: dict[str, DataSet],
    folder: Path,
    settings: dict[str, Any],
    device: str | None,
) -> None:
    """Carry out one run and send its results, or why there are none.

    ``held`` keeps the data by their settings, until a run needs others.
    """

    def send(event: Event) -> None:
        if event["event"] != "progress":
            try:
                pipe.send(("event", dict(event)))
            except BrokenPipeError:  # closed by whoever has also sent the signal
                stopping.end_if_asked()
                raise

    try:
        run = Planned(compose(settings), RunFolder(folder))
        kind = repr(run.settings.data)
        if kind not in held:
            held.clear()
            held[kind] = rehearse([run], send)
        results = carry_out(run, send, held[kind], device)
    except BrokenPipeError:  # nobody is left who would listen
        raise
    except Exception as error:
        pipe.send(("failed", reason_of(error)))
    else:
        pipe.send(("done", results))


def end_with_parent() -> None:
    """Stop this process when the first one is gone, however it ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
