"""Commands go on after a kill: a few points of each; ``kill_points.py`` tries all of them.

The points are those at which something was once in the way or left over.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import kill_points

POINTS = {
    "run": ["open out/.environment", "torn fsync out/events", "rename out/.results.json"],
    "compare": ["remove out/fedavg/seed-0/.fedharmony-lock"],
    "tune": ["rename out/.tune.json"],
    "prepare": ["torn fsync cache/images"],
    "sites": ["wait stage 1", "answer stage 1", "torn fsync out/.checkpoint"],
    "reproduce": ["rename out/digits/fig1/.measured.json", "open out/.report.html"],
}


@pytest.mark.parametrize("command", POINTS)
def test_the_same_command_goes_on_after_a_kill(command: str) -> None:
    """In a process of its own: it forks, which must not happen beside other threads."""
    points = [word for name in POINTS[command] for word in ("--at", name)]
    done = subprocess.run(
        [sys.executable, kill_points.__file__, command, *points],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    count = len(POINTS[command])
    assert done.stdout == f"{command}: {count} points, {count} held\n"


def test_a_kill_is_noticed(tmp_path: Path) -> None:
    """The harness itself: the change that is not made is the one asked for."""
    script = (
        "import sys; from pathlib import Path; sys.path.insert(0, sys.argv[1]);"
        "from kill_points import Counter; root = Path(sys.argv[2]);"
        "Counter(root, 1).install(); (root / 'a').mkdir(); (root / 'b').mkdir()"
    )
    here = str(Path(kill_points.__file__).parent)
    command = [sys.executable, "-c", script, here, str(tmp_path)]
    assert subprocess.run(command, check=False).returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
