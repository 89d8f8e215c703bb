"""Following a run while it happens: a live display on a terminal, one line per round elsewhere.

A :class:`Progress` is called with the events of a run, the same objects that go into
``events.jsonl``, and with one more kind that is shown but not stored, counting steps of local
training within a round: ``{"event": "progress", "round": 3, "done": 40, "total": 100}``. Rounds
count from 0 in events and from 1 on the screen.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from fedharmony.terminal import console as plain_console

_SHOWN = ("mAP", "CF1", "OF1")
_FAILURES_KEPT = 3


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


def _percent(value: object) -> str:
    known = isinstance(value, int | float) and math.isfinite(value)
    return f"{100 * value:.1f}" if known else "–"  # type: ignore[operator]


@dataclass
class _State:
    """What is known of the run that is going on."""

    title: str
    rounds: int = 0
    done: int = 0
    began_at: int = 0
    seconds: float = 0.0
    round: Mapping[str, Any] = field(default_factory=dict)
    steps: tuple[int, int] = (0, 0)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    measured: int = 0
    best: Mapping[str, Any] = field(default_factory=dict)
    best_round: int = 0
    lost: int = 0
    failed: int = 0
    failures: list[str] = field(default_factory=list)

    def take_round(self, event: Mapping[str, Any]) -> None:
        self.round, self.steps = event, (0, 0)
        self.done = int(event.get("round", self.done)) + 1
        self.seconds += float(event.get("seconds") or 0.0)
        failures = event.get("failures") or ()
        self.lost += len(failures) + len(event.get("dropped") or ())
        self.failed += len(failures)
        self.failures += [_failure(f, self.done) for f in failures]
        del self.failures[:-_FAILURES_KEPT]

    def take_evaluation(self, event: Mapping[str, Any]) -> None:
        self.seconds += float(event.get("seconds") or 0.0)
        self.metrics = event.get("metrics") or {}
        self.measured = int(event.get("round", 0)) + 1
        score = self.metrics.get("mAP")
        if score is not None and score > self.best.get("mAP", -math.inf):
            self.best, self.best_round = self.metrics, self.measured

    @property
    def left(self) -> str:
        """Time left, as long as the coming rounds take what those of this start have taken."""
        finished, remaining = self.done - self.began_at, self.rounds - self.done
        if finished <= 0 or remaining <= 0:
            return ""
        return f"{duration(self.seconds / finished * remaining)} left"

    @property
    def clients(self) -> str:
        cohort = len(self.round.get("cohort") or ())
        reported = len(self.round.get("reported") or ())
        dropped = len(self.round.get("dropped") or ())
        failed = len(self.round.get("failures") or ())
        parts = [f"{n} {word}" for n, word in ((dropped, "dropped"), (failed, "failed")) if n]
        return f"{reported} of {cohort} clients" + (f" ({', '.join(parts)})" if parts else "")

    @property
    def speed(self) -> str:
        rate = self.round.get("images_per_second")
        return f"{rate:,.0f} images/s" if isinstance(rate, int | float) else ""

    @property
    def loss(self) -> str:
        loss = self.round.get("train_loss")
        return f"loss {loss:.3f}" if isinstance(loss, int | float) else ""


def _failure(failure: Mapping[str, Any], round: int) -> str:
    where = f"client {failure.get('client')} left out of {failure.get('stage')}, round {round}"
    return f"{where}: {failure.get('reason')}"


class Progress:
    """Shows the events it is called with.

    On a terminal, inside a ``with`` block: a live display, which is taken down and the terminal
    restored however the block ends. Everywhere else (a pipe, a file, a dumb terminal, ``NO_COLOR``
    set, or no ``with`` block that could restore the terminal): one line per round.

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
        self._live: Live | None = None
        self._sequence = ""
        self._state: _State | None = None
        self._held = False  # a round whose line waits for its evaluation
        self._decoded = (0, 0)  # images decoded before the run, and to be decoded

    def __enter__(self) -> Self:
        """Start the live display where there can be one."""
        if not self._quiet and self._can_animate():
            self._live = Live(
                get_renderable=self._display,
                console=self._console,
                transient=True,
                refresh_per_second=8,
            )
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the terminal; say where a run stopped that has not finished."""
        state = self._state
        self._state = None  # the display is empty from here on
        if self._live is not None:
            self._live.stop()
            self._live = None
        if state is not None:
            self._print_held(state)
            self._print(f"stopped in round {min(state.done + 1, state.rounds)} of {state.rounds}")

    def _can_animate(self) -> bool:
        plain = os.environ.get("NO_COLOR") or self._console.is_dumb_terminal
        return self._console.is_terminal and not plain

    def begin(self, number: int, total: int, name: str) -> None:
        """Announce the next run of a sequence: "run 2 of 6: fedharmony seed 1"."""
        self._sequence = f"run {number} of {total}: {name}"

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Show one event; kinds that are not known are ignored."""
        if self._quiet:
            return
        kind = event.get("event")
        state = self._state
        if kind == "start":
            self._start(event)
        elif kind == "decode":
            self._decode(int(event.get("done") or 0), int(event.get("total") or 0))
        elif state is None:
            return
        elif kind == "progress":
            self._print_held(state)
            state.steps = (int(event.get("done") or 0), int(event.get("total") or 0))
        elif kind == "round":
            self._print_held(state)
            state.take_round(event)
            self._held = True
        elif kind == "evaluate":
            state.take_evaluation(event)
            self._print_held(state)
        elif kind == "finish":
            self._print_held(state)
            self._state = None
            self._print(_summary(state, event))

    def _decode(self, done: int, total: int) -> None:
        """Images are decoded once, before the first run that needs them."""
        if total != self._decoded[1] or done < self._decoded[0]:
            self._print(f"decoding {total:,} images; later runs find them in the cache")
        self._decoded = (done, total)

    def _start(self, event: Mapping[str, Any]) -> None:
        self._decoded = (0, 0)
        title = self._sequence or str(event.get("label") or event.get("method") or "run")
        begin = int(event.get("resumed_at") or 0)
        self._state = _State(title, int(event.get("rounds") or 0), done=begin, began_at=begin)
        self._sequence, self._held = "", False
        parts = [f"{event.get('rounds', 0):,} rounds"]
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
        """Print the line of the last round, once, unless a live display shows it."""
        if self._held and self._live is None:
            self._print(_line(state))
        self._held = False

    def _display(self) -> RenderableType:
        state = self._state
        if state is not None:
            return _panel(state, self._console.width)
        done, total = self._decoded
        if not total:
            return Text("")
        bar = Table.grid(padding=(0, 1))
        width = max(10, min(48, self._console.width - 44))
        bar.add_row(ProgressBar(total=total, completed=done, width=width), f"{done:,}/{total:,}")
        return bar


def _line(state: _State) -> str:
    """A round in one line."""
    width = len(str(state.rounds))
    parts = [f"round {state.done:>{width}}/{state.rounds}"]
    evaluated = state.metrics if state.measured == state.done else {}
    parts += [f"{name} {_percent(evaluated[name])}" for name in _SHOWN if name in evaluated]
    parts += [state.loss, state.clients, state.speed, state.left]
    failures = state.round.get("failures") or ()
    parts += [
        f"client {f.get('client')} failed in {f.get('stage')}: {f.get('reason')}" for f in failures
    ]
    return "  ".join(" ".join(part.split()) if i else part for i, part in enumerate(parts) if part)


def _summary(state: _State, event: Mapping[str, Any]) -> str:
    """How a run ended, in one line."""
    text = f"{event.get('status', 'finished')} after {state.done} of {state.rounds} rounds"
    seconds = event.get("seconds")
    if isinstance(seconds, int | float):
        text += f" in {duration(seconds)}"
    found = [f"{name} {_percent(state.metrics[name])}" for name in _SHOWN if name in state.metrics]
    text += f": {'  '.join(found)}" if found else ""
    if state.best and state.best_round != state.done:
        text += f" (best mAP {_percent(state.best.get('mAP'))} in round {state.best_round})"
    if state.lost:
        text += f"; {state.lost} client answers missing"
    if state.failed:
        text += f", {state.failed} of them because clients failed: see the report"
    return f"{text}. {event['reason']}" if event.get("reason") else text


def _panel(state: _State, width: int) -> RenderableType:
    """The live display of a run."""
    bars = Table.grid(padding=(0, 1), expand=False)
    room = max(10, min(48, width - 44))
    current = state.done + (1 if state.steps[1] and state.done < state.rounds else 0)
    bars.add_row(
        Text("round"),
        ProgressBar(total=max(state.rounds, 1), completed=state.done, width=room),
        Text(f"{current}/{state.rounds}", justify="right"),
        Text(state.left, "cyan"),
    )
    if state.steps[1]:
        done, total = state.steps
        bars.add_row(
            Text("clients train", "dim"),
            ProgressBar(total=total, completed=done, width=room, complete_style="dim"),
            Text(f"{100 * done // max(total, 1)} %", "dim", justify="right"),
            Text(""),
        )
    parts: list[RenderableType] = [Text(state.title, "bold"), bars]
    facts = [state.clients if state.round else "", state.speed, state.loss]
    if any(facts):
        parts.append(Text(" · ".join(fact for fact in facts if fact), "dim"))
    if state.metrics:
        parts.append(_metrics(state, width))
    parts += [
        Text(f"! {text}", "yellow", overflow="ellipsis", no_wrap=True) for text in state.failures
    ]
    return Group(*parts)


def _metrics(state: _State, width: int) -> Table:
    """The latest metrics above the best so far; all eight if there is room."""
    names = [n for n in state.metrics if width >= 80 or n in _SHOWN]
    table = Table.grid(padding=(0, 2))
    table.add_row(Text(""), *(Text(name, "dim", justify="right") for name in names))
    table.add_row(
        Text(f"round {state.measured}"),
        *(Text(_percent(state.metrics[n]), "bold", justify="right") for n in names),
    )
    if state.best:
        table.add_row(
            Text(f"best ({state.best_round})", "dim"),
            *(Text(_percent(state.best.get(n)), "dim", justify="right") for n in names),
        )
    return table
