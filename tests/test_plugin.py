"""A method in one file outside the package appears in list, run, compare and the method tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """The example of CONTRIBUTING.md, exactly as printed there."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    file = tmp_path / "shout.py"
    file.write_text(code)
    return file


def fedharmony(*args: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fedharmony.cli", *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SMALL = ["data.train=60", "data.test=30", "split.clients=3", "run.rounds=1", "train.epochs=1"]


def test_listed_run_and_compared(plugin: Path, tmp_path: Path) -> None:
    assert "shout" in fedharmony("list", "methods", "--plugin", str(plugin), cwd=tmp_path)
    options = [*SMALL, "--plugin", str(plugin)]
    fedharmony("run", "demo", "run.method=shout", "--out", "one", *options, cwd=tmp_path)
    assert (tmp_path / "one" / "report.html").exists()
    fedharmony("resume", "one", cwd=tmp_path)  # finds the plugin through the run's own settings
    methods = ["--methods", "fedavg,shout", "--seeds", "0"]
    fedharmony("compare", "demo", *methods, "--out", "both", *options, cwd=tmp_path)
    assert "shout" in (tmp_path / "both" / "table.md").read_text()


def test_passes_the_method_tests(plugin: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"),
            *("tests/test_methods.py", "-k", "shout", "-rp"),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "FEDHARMONY_PLUGINS": str(plugin)},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "test_resumes_to_the_bit_from_any_round[shout]" in done.stdout
