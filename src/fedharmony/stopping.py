"""A signal that asked the program to end, remembered.

The handler of a signal raises, wherever the program is. Inside of a library that drops errors of
its own attempts, the exception is lost with them, and the program would go on as if nobody had
asked. So the round loop looks again, whenever a round is saved.
"""

from __future__ import annotations

_asked: list[BaseException] = []


def ask(error: BaseException) -> BaseException:
    """Remember that the program is to end by this exception."""
    _asked.append(error)
    return error


def forget() -> None:
    """Whoever asked has been heard, or the program is somebody else's now."""
    _asked.clear()


def end_if_asked() -> None:
    """Raise what was asked for and did not arrive.

    >>> end_if_asked()
    >>> _ = ask(ValueError("stop"))
    >>> end_if_asked()
    Traceback (most recent call last):
    ValueError: stop
    >>> end_if_asked()
    """
    if _asked:
        raise _asked.pop()
