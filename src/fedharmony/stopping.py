"""Signals that ask the program to end: the first one is remembered, the second one raises.

An exception that a handler raises wherever the program happens to be can be lost: a library may
drop the errors of its own attempts. So the first SIGINT or SIGTERM raises nothing. All long loops
call :func:`end_if_asked`, which raises, again and again until somebody hears it. Code that waits
or belongs to a library stands in an :func:`interruptible` block, which a signal ends at once.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from fedharmony.errors import Stopped

_HINT = b"\nStopping as soon as possible; once more stops at once.\n"
_asked: BaseException | None = None
_interruptible = False


def ask(error: BaseException) -> None:
    """Remember that the program is to end by this exception; what is asked twice is raised."""
    global _asked
    again, _asked = _asked is not None, error
    if again or _interruptible:
        raise error


def forget() -> None:
    """The request has been heard, or the program is somebody else's now."""
    global _asked
    _asked = None


def end_if_asked() -> None:
    """Raise what was asked for, at every call until it is forgotten.

    >>> end_if_asked()
    >>> ask(ValueError("stop"))
    >>> end_if_asked()
    Traceback (most recent call last):
    ValueError: stop
    >>> forget()
    >>> end_if_asked()
    """
    if _asked is not None:
        raise _asked


@contextmanager
def interruptible() -> Iterator[None]:
    """A signal ends the block at once; one that a library dropped ends it when it is done."""
    global _interruptible
    before = _interruptible
    _interruptible = before or threading.current_thread() is threading.main_thread()
    try:
        end_if_asked()
        yield
        end_if_asked()
    finally:
        _interruptible = before


@contextmanager
def hearing_signals() -> Iterator[None]:
    """SIGTERM and Ctrl-C ask what runs inside to end.

    Of several processes only the first has something to save; the others end at once.
    """

    def stop(number: int, frame: object) -> None:
        if os.isatty(2):
            os.write(2, _HINT)  # printing is not safe here: the program may be at it
        interrupted = number == signal.SIGINT
        ask(KeyboardInterrupt() if interrupted else Stopped("SIGTERM", number))

    if os.environ.get("RANK", "0") != "0" or threading.current_thread() is not (
        threading.main_thread()
    ):
        yield
        return
    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, stop)}
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # not where it is ignored
        before[signal.SIGINT] = signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        forget()
