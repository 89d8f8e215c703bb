"""Sites in this process, behind a post in memory: the bits of the simulator, and what fails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedharmony.experiments import run
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.flower import server, transport
from fedharmony.flower.server import Terms
from fedharmony.methods.base import methods
from sites import Memory, draw_sites, workers

TERMS = Terms(sites=3, wait_s=5.0, limit_s=60.0)
SAME = ("parameters_sha256", "state_sha256", "metrics", "structure", "per_label", "bytes_up")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("sites")
        patch.setenv("FEDHARMONY_CACHE", str(folder / "cache"))
        patch.setattr(transport, "POLL_S", 0.0)
        threads = torch.get_num_threads()
        yield folder, draw_sites(folder / "data")
        torch.set_num_threads(threads)


def nobody(event: dict[str, Any]) -> None:
    pass


@pytest.mark.parametrize("method", methods.names())
def test_sites_give_the_bits_of_the_simulator(home: Any, tmp_path: Path, method: str) -> None:
    folder, changes = home
    settings = load_settings("demo", [*changes, f"run.method={method}"])
    expected = run.start(settings, RunFolder(tmp_path / "simulated"), nobody)
    post = Memory(workers(folder / "data"), seed=len(method))
    found = server.start(settings, RunFolder(tmp_path / "sites"), nobody, post, TERMS)
    assert {k: found[k] for k in SAME} == {k: expected[k] for k in SAME}
