"""The server of a run, which kills itself or its SuperLink at a moment that a file says.

The file has the round, the moment and the process to be killed, and is gone before that happens.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from fedharmony.flower import server_app
from fedharmony.flower.wire import GridPost
from fedharmony.site.parcel import STAGE, Parcel

FILE = Path(os.environ.get("FEDHARMONY_KILL", os.devnull))


class Deadly(GridPost):
    """A post that knows the round."""

    round, left = -1, 0

    def push(self, parcels: Mapping[int, Parcel], ttl_s: float) -> dict[str, int]:
        stages = [p.words["round"] for p in parcels.values() if p.kind == STAGE]
        if stages:
            Deadly.round, Deadly.left = stages[0], len(stages)
            moment("push")
        return super().push(parcels, ttl_s)

    def pull(self, numbers: Collection[str]) -> dict[str, Parcel | str]:
        moment("wait")
        found = super().pull(list(numbers)[:1])  # one at a time, so that there is a first one
        if found and Deadly.left:
            Deadly.left -= len(found)
            moment("answers" if Deadly.left == 0 else "answer")
        return found


def moment(name: str) -> None:
    """Kill, if this is the moment that the file says (``test_flower_failures.MOMENTS``)."""
    try:
        wanted = json.loads(FILE.read_bytes())
    except (OSError, ValueError):
        return
    if (wanted["round"], wanted["moment"]) == (Deadly.round, name):
        FILE.unlink()
        os.kill(wanted["pid"] or os.getpid(), signal.SIGKILL)


def audit(event: str, arguments: tuple[Any, ...]) -> None:
    """Checkpoints are written beside their place, and then replace the old one."""
    if ".checkpoint.safetensors." not in str(arguments[:1]):
        return
    if event == "os.rename":
        moment("replace")
    elif event == "open" and arguments[2] & os.O_CREAT:
        moment("write")


app = server_app.app
if "FEDHARMONY_KILL" in os.environ:  # else somebody only looks for doctests
    server_app.GridPost = Deadly  # type: ignore[misc]
    sys.addaudithook(audit)
