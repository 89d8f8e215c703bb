"""What a command leaves alone: modules it does not need, and searches for garbage that is none."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

#: Each takes a tenth of a second to several seconds to import.
SLOW = {"numpy", "pandas", "PIL", "scipy", "sklearn", "timm", "torch"}
SLOW |= {"sympy", "torchvision", "transformers"}  # sympy comes with torch's compiler


def python(*args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *args]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
    return done


def imported(*args: str) -> list[str]:
    """The modules that ``python ARGS`` imports, in the order in which they are complete."""
    lines = python("-X", "importtime", *args).stderr.splitlines()
    return [line.rpartition("|")[2].strip() for line in lines if line.startswith("import time:")]


def packages(modules: list[str]) -> set[str]:
    return {module.partition(".")[0] for module in modules}


def answer(script: str) -> Any:
    """What a script prints, read as JSON."""
    return json.loads(python("-c", script).stdout.splitlines()[-1])


@pytest.mark.parametrize("args", [["--help"], ["run", "--help"], ["--version"]], ids=" ".join)
def test_help_imports_nothing_slow(args: list[str]) -> None:
    modules = imported("-m", "fedharmony", *args)
    assert "fedharmony.cli" in modules
    assert not packages(modules) & SLOW


def test_a_run_imports_what_it_needs_when_it_needs_it(tmp_path: Path) -> None:
    """FedAvg clusters nothing, and nothing is drawn before the last round."""
    changes = [
        *("run.method=fedavg", "run.rounds=1", "data.train=40", "data.test=20", "split.clients=2"),
        *("train.epochs=1", "model.width=16", "model.depth=1", "model.heads=2", "engine.threads=1"),
    ]
    run = ["run", "demo", *changes, "--device", "cpu", "--out", str(tmp_path / "run"), "--quiet"]
    modules = imported("-m", "fedharmony", *run)
    assert packages(modules) & SLOW == {"numpy", "PIL", "torch"}
    before_the_report = modules[: modules.index("fedharmony.report.load")]
    assert "fedharmony.server.federation" in before_the_report
    assert (tmp_path / "run" / "report.html").exists()


TORCH = """
import gc, json
from fedharmony.cli_options import import_torch
searches = []
gc.callbacks.append(lambda phase, info: searches.append(phase))
import_torch()
during, frozen = len(searches), gc.get_freeze_count()
made_by_a_run = [[] for _ in range(1000)]  # must stay in reach of the collector
import_torch()
print(json.dumps([during, frozen, gc.get_freeze_count(), gc.isenabled()]))
"""


def test_no_garbage_is_looked_for_in_torch() -> None:
    searches, frozen, afterwards, enabled = answer(TORCH)
    assert searches == 0
    assert frozen > 100_000
    assert afterwards == frozen
    assert enabled


EXIT = """
import atexit, gc, json, sys
atexit.register(lambda: print(json.dumps([len(gc.get_objects()), gc.get_freeze_count()])))
from fedharmony.cli import main
sys.argv = ["fedharmony", "--version"]
main()
"""


def test_no_garbage_is_looked_for_at_the_end() -> None:
    """What is registered first is called last: by then everything is frozen."""
    objects, frozen = answer(EXIT)
    assert objects < 1000 < 10_000 < frozen


POOLS = """
import json, torch
from threadpoolctl import ThreadpoolController
from fedharmony import clusters
pools = lambda: len(ThreadpoolController().info())
before = pools()
clusters.spectral_clusters(torch.block_diag(*[torch.ones(3, 3)] * 2), 2, seed=0)
print(json.dumps([before, len(clusters._thread_pools().info()), pools()]))
"""


def test_clustering_knows_the_thread_pools_that_it_loads() -> None:
    """One thread gives the same bits everywhere; a pool found too late would go on with many."""
    before, known, loaded = answer(POOLS)
    assert before < known == loaded
