"""Following a run while it happens: a line per round, and on a terminal bars below the lines.

A :class:`Progress` is called with the events of a run, the same objects that go into
``events.jsonl``, and with two more kinds that are shown but not stored: ``decode`` counts images
before a run, ``progress`` counts steps of local training within a round, for instance ``{"event":
"progress", "round": 3, "done": 40, "total": 100}``. Rounds count from 0 in events and from 1 on the
screen.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self, TypeAlias

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bars
from rich.text import Text

from fedharmony.reading import left_out
from fedharmony.terminal import console as plain_console

Observer: TypeAlias = Callable[[Mapping[str, Any]], None]

_SHOWN = ("mAP", "CF1", "OF1")


def duration(seconds: float) -> str:
    """A length of time in the two units that matter.

    >>> duration(41), duration(200), duration(3725), duration(200000)
    ('41 s', '3 min 20 s', '1 h 2 min', '2 d 7 h')
    """
    whole = round(seconds)
    units = ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))
    for size, unit, smaller, below in units:
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // smaller} {below}"
    return f"{whole} s"


def _scores(metrics: Mapping[str, Any]) -> list[str]:
    values = {name: metrics[name] for name in _SHOWN if name in metrics}
    known = {n: v for n, v in values.items() if isinstance(v, int | float) and math.isfinite(v)}
    return [f"{n} {100 * known[n]:.1f}" if n in known else f"{n} –" for n in values]


@dataclass
class _State:
    """What is known of the run that is going on."""

    title: str
    rounds: int = 0
    done: int = 0
    began_at: int = 0
    seconds: float = 0.0
    round: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    measured: int = 0
    best: float = -math.inf
    best_round: int = 0
    lost: int = 0
    failed: int = 0
    later: int = 0  # runs that follow
    earlier: tuple[float, ...] = ()  # seconds that each run before has taken

    def take(self, event: Mapping[str, Any]) -> None:
        """Take a round, or an evaluation."""
        number = int(event.get("round", 0)) + 1
        self.seconds += float(event.get("seconds") or 0.0)
        if event["event"] == "round":
            self.round, self.done = event, number
            failed = len(left_out(event, "failed"))
            self.lost += failed + len(left_out(event, "dropped"))
            self.failed += failed
            return
        self.metrics, self.measured = event.get("metrics") or {}, number
        score = self.metrics.get("mAP")
        if score is not None and score > self.best:
            self.best, self.best_round = score, number

    @property
    def left(self) -> str:
        """Time left, as long as the coming rounds take what those of this start have taken.

        Of a sequence also the time of all its runs: those that follow take as long as those before.
        """
        finished, remaining = self.done - self.began_at, self.rounds - self.done
        if finished <= 0:
            return ""
        each = self.seconds / finished
        runs = (*self.earlier, each * self.rounds)
        others = self.later * sum(runs) / len(runs)
        own = [f"{duration(each * remaining)} left"] if remaining > 0 else []
        total = [f"{duration(each * remaining + others)} for all runs"] if self.later else []
        return ", ".join(own + total)

    @property
    def line(self) -> str:
        """The last round in one line."""
        event = self.round
        loss, rate = event.get("train_loss"), event.get("images_per_second")
        counts = {k: len(event.get(k) or ()) for k in ("cohort", "reported")}
        causes = {"dropped": "dropped", "failed": "failed", "rule": "left out by the rule"}
        lost = [f"{n} {word}" for c, word in causes.items() if (n := len(left_out(event, c)))]
        parts = [
            f"round {self.done:>{len(str(self.rounds))}}/{self.rounds}",
            *(_scores(self.metrics) if self.measured == self.done else ()),
            f"loss {loss:.3f}" if isinstance(loss, int | float) else "",
            f"{counts['reported']} of {counts['cohort']} clients"
            + (f" ({', '.join(lost)})" if lost else ""),
            f"{rate:,.0f} images/s" if isinstance(rate, int | float) else "",
            self.left,
        ]
        parts += [
            f"client {f.get('name') or f.get('client')} failed in {f.get('stage')}: "
            f"{f.get('reason')}"
            for f in left_out(event, "failed")
        ]
        return "  ".join(" ".join(p.split()) if i else p for i, p in enumerate(parts) if p)

    def summary(self, event: Mapping[str, Any]) -> str:
        """How the run ended, in one line."""
        text = f"{event.get('status', 'finished')} after {self.done} of {self.rounds} rounds"
        seconds = event.get("seconds")
        if isinstance(seconds, int | float):
            text += f" in {duration(seconds)}"
        found = _scores(self.metrics)
        text += f": {'  '.join(found)}" if found else ""
        if self.best_round and self.best_round != self.done:
            text += f" (best mAP {100 * self.best:.1f} in round {self.best_round})"
        if self.lost:
            text += f"; {self.lost} client answers missing"
        if self.failed:
            text += f", {self.failed} of them because clients failed: see the report"
        return f"{text}. {event['reason']}" if event.get("reason") else text


class Progress:
    """Shows the events it is called with: one line per round, and bars where there can be some.

    Bars are drawn on a terminal inside a ``with`` block, and the terminal is restored however the
    block ends. Nothing but lines goes into a pipe, a file or a dumb terminal, where ``NO_COLOR`` is
    set, and where there is no ``with`` block that could restore the terminal.

    Args:
        quiet: Show nothing at all.
        console: Where to write; the standard output if None.

    >>> show = Progress(console=Console(width=60, force_terminal=False))
    >>> show({"event": "start", "label": "fedavg", "rounds": 2, "clients": 5, "cohort": 2})
    fedavg: 2 rounds, 5 clients, 2 per round
    >>> show({"event": "round", "round": 0, "cohort": [1, 4], "reported": [1, 4], "seconds": 2.0})
    >>> show({"event": "evaluate", "round": 0, "metrics": {"mAP": 0.5}, "seconds": 1.0})
    round 1/2  mAP 50.0  2 of 2 clients  3 s left
    """

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self._quiet = quiet
        self._console = console or plain_console()
        plain = os.environ.get("NO_COLOR") or self._console.is_dumb_terminal
        self._bars = Bars(
            TextColumn("{task.description}", markup=False),
            BarColumn(48),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}", style="cyan", markup=False),
            console=self._console,
            transient=True,
            disable=bool(quiet or plain or not self._console.is_terminal),
        )
        self._rounds, self._steps, self._images = (
            self._bars.add_task(name, visible=False, left="")
            for name in ("round", "clients train", "decoding")
        )
        self._sequence, self._later = "", 0
        self._seconds: tuple[float, ...] = ()  # of each run that has finished
        self._state: _State | None = None
        self._held = False  # a round whose line waits for its evaluation
        self._decoded = (0, 0)  # images decoded before the run, and to be decoded

    def __enter__(self) -> Self:
        """Start drawing bars where there can be some."""
        self._bars.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Restore the terminal; say where a run stopped that has not finished."""
        self._bars.stop()
        state, self._state = self._state, None
        if state is not None:
            self._print_held(state)
            self._print(f"stopped in round {min(state.done + 1, state.rounds)} of {state.rounds}")

    def follow(self, number: int, total: int, name: str, rounds: int) -> Observer:
        """The observer of the next run of a sequence: "run 2 of 6: fedharmony seed 1"."""
        self._sequence, self._later = f"run {number} of {total}: {name}", total - number
        return self

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show one event; kinds that are not known are ignored."""
        kind, state = event.get("event"), self._state
        done, total = int(event.get("done") or 0), int(event.get("total") or 0)
        if kind == "start":
            self._start(event)
        elif kind == "decode":
            self._decode(done, total)
        elif state is None:
            return
        elif kind == "progress":
            self._print_held(state)
            self._bars.update(self._steps, completed=done, total=total, visible=True)
        elif kind == "round":
            self._print_held(state)
            state.take(event)
            self._held = True
            self._bars.update(self._rounds, completed=state.done, left=state.left)
            self._bars.update(self._steps, visible=False)
        elif kind == "evaluate":
            state.take(event)
            self._print_held(state)
        elif kind == "finish":
            self._print_held(state)
            self._state = None
            self._seconds += (state.seconds,)
            self._bars.update(self._rounds, visible=False)
            self._print(state.summary(event))

    def _decode(self, done: int, total: int) -> None:
        """Images are decoded once, before the first run that needs them."""
        if total != self._decoded[1] or done < self._decoded[0]:
            self._print(f"decoding {total:,} images; later runs find them in the cache")
        self._decoded = (done, total)
        self._bars.update(self._images, completed=done, total=total, visible=done < total)

    def _start(self, event: Mapping[str, Any]) -> None:
        self._decoded = (0, 0)
        title = self._sequence or str(event.get("label") or event.get("method") or "run")
        begin, rounds = int(event.get("resumed_at") or 0), int(event.get("rounds") or 0)
        self._state = _State(title, rounds, done=begin, began_at=begin)
        self._state.later, self._state.earlier = self._later, self._seconds
        self._sequence, self._held = "", False
        self._bars.update(self._rounds, completed=begin, total=rounds, visible=True, left="")
        parts = [f"{rounds:,} rounds"]
        for key, words in (
            ("clients", "clients"),
            ("cohort", "per round"),
            ("parameters", "parameters"),
        ):
            if event.get(key) is not None:
                parts.append(f"{event[key]:,} {words}")
        if event.get("device"):
            parts.append(str(event["device"]))
        if begin:
            parts.append(f"resumed after round {begin}")
        self._print(f"{title}: {', '.join(parts)}")

    def _print(self, text: str) -> None:
        if not self._quiet:
            self._console.print(Text(text), soft_wrap=True)

    def _print_held(self, state: _State) -> None:
        """Print the line of the last round, once."""
        if self._held:
            self._print(state.line)
        self._held = False


class Board(Progress):
    """Shows several runs at once: a line when one starts or ends, and bars of those under way."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        super().__init__(quiet=quiet, console=console)
        self._whole = self._bars.add_task("all runs", visible=False, left="")
        self._total, self._ended, self._running = 0, 0, 0
        #: Rounds of the runs that began, those of them that are or will be done here, those done.
        self._rounds_begun, self._rounds_due, self._rounds_done = [0], 0, 0
        self._began = time.monotonic()

    def follow(self, number: int, total: int, name: str, rounds: int) -> Observer:
        """The observer of one run of several; runs that were finished before are not followed."""
        if not self._total:
            self._total, self._rounds_begun, self._began = total, [], time.monotonic()
        skipped = number - 1 - self._running - self._ended
        self._ended, self._running = self._ended + skipped, self._running + 1
        self._rounds_begun.append(rounds)
        self._rounds_due += rounds
        bar = self._bars.add_task(name, total=rounds, left="")
        state, over = _State(name, rounds), False
        self._print(f"{name}: started; {self.standing}")

        def observe(event: Mapping[str, Any]) -> None:
            nonlocal state, over
            kind = event.get("event")
            if kind == "decode":
                self(event)
            elif kind == "start":
                begin = int(event.get("resumed_at") or 0)
                self._rounds_due -= begin
                state = _State(name, rounds, done=begin, began_at=begin)
            elif kind in ("round", "evaluate"):
                state.take(event)
                self._rounds_done += kind == "round"
            elif kind == "finish" and not over:  # a run that fails says so, and so do its workers
                over = True
                self._running, self._ended = self._running - 1, self._ended + 1
                self._rounds_due -= rounds - state.done
                self._bars.update(bar, visible=False)
                self._print(f"{name}: {state.summary(event)}; {self.standing}")
            self._bars.update(bar, completed=state.done)
            self._bars.update(
                self._whole,
                completed=self._rounds_done,
                total=self._rounds_due + self._rounds_waiting,
                left=self.standing,
                visible=True,
            )

        return observe

    @property
    def _waiting(self) -> int:
        return max(0, self._total - self._ended - self._running)

    @property
    def _rounds_waiting(self) -> float:
        """Of the runs that have not begun: as many each as those that have, in the mean."""
        return self._waiting * statistics.mean(self._rounds_begun)

    @property
    def standing(self) -> str:
        """How many runs are done, under way and left, and how long that will take."""
        text = f"{self._ended} of {self._total} done, {self._running} running, {self._waiting} left"
        remaining = self._rounds_due - self._rounds_done + self._rounds_waiting
        if not self._rounds_done or not remaining:
            return text
        seconds = (time.monotonic() - self._began) * remaining / self._rounds_done
        return f"{text}, about {duration(seconds)}"
