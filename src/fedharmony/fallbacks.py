"""Fallbacks: a run does something in a slower or another way than it was meant to.

Each is logged where it happens, with its trace once per cause in a process; the event of the round
counts it, whatever process it happened in; the first section of the report says so.
"""

from __future__ import annotations

import logging
import traceback
from collections import Counter
from collections.abc import Mapping

log = logging.getLogger(__name__)

#: By cause: what the run did, for the report, and what its user can do.
CAUSES: Mapping[str, tuple[str, str]] = {
    "stack": (
        "ran the clients of a stack one by one, because the stack failed",
        "see its error in the log",
    ),
    "memory": (
        "halved a stack of clients that did not fit into the device's memory",
        "free the device, or set engine.stack to a smaller number",
    ),
    "plain": (
        "trained a client a second time, in full precision and step by step, because its values "
        "were not finite",
        "set engine.precision = 'float32' if it happens often",
    ),
    "slow": (
        "gave up half precision, compiled and recorded steps for the rest of the run",
        "set engine.precision = 'float32'",
    ),
    "compile": ("ran uncompiled what could not be compiled", "see the log for what to mend"),
    "graphs": ("could not record a step, and launched it piece by piece", "see the log"),
    "device": ("computed on the CPU beside a GPU that torch does not see", "install its driver"),
    "cache": ("decoded images again, because their cache was damaged", "check the cache's disk"),
}
#: Most fallbacks of one cause that another process can have counted in one exchange.
MOST = 10**6

_counts: Counter[str] = Counter()
_traced: set[str] = set()


def note(cause: str, what: str, error: BaseException | None = None) -> None:
    """Count a fallback, and log in one sentence ``what`` happened."""
    _counts[cause] += 1
    trace = ""
    if error is not None and cause not in _traced:
        _traced.add(cause)
        # As text: a log that keeps the error would keep the tensors of its frames.
        trace = "\n" + "".join(traceback.format_exception(error)).rstrip()
    log.warning("%s%s", what, trace)


def add(counts: object) -> None:
    """Count what another process has noted; it may send anything.

    >>> add({"stack": 2, "unknown": 1, "memory": "many"})
    >>> drain(), drain()
    ({'stack': 2}, {})
    """
    for cause, count in counts.items() if isinstance(counts, dict) else ():
        if cause in CAUSES and type(count) is int and 0 < count <= MOST:
            _counts[cause] += count


def drain() -> dict[str, int]:
    """How often what was noted since the last call, by cause."""
    found = {cause: _counts[cause] for cause in CAUSES if _counts[cause]}
    _counts.clear()
    return found
