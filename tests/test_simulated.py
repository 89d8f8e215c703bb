"""Simulated clients on Flower: the bits of the simulator, through parcels and through Ray."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("flwr")

from fedharmony.errors import ConfigError
from fedharmony.experiments import run
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import Settings, load_settings
from fedharmony.flower import post as posts
from fedharmony.flower import simulated
from fedharmony.flower.simulated_app import opened, work
from fedharmony.site.parcel import Parcel
from test_cli import refuse, succeed

SMALL = [
    *("data.train=120", "data.test=40", "split.clients=6", "run.rounds=3", "federation.cohort=3"),
    *("model.width=8", "model.depth=1", "model.heads=2", "train.epochs=1", "engine.threads=1"),
    *("engine.device=cpu", "engine.stack=1", "methods.spherefed.projection=24"),
]
SAME = ("state_sha256", "metrics", "structure", "bytes_up", "bytes_down")


class Here:
    """A post to clients in this process, as bytes."""

    def __init__(self, count: int) -> None:
        self.count, self.waiting = count, dict[str, bytes]()

    def nodes(self) -> dict[int, str]:
        return dict.fromkeys(range(100, 100 + self.count), "")

    def push(self, parcels: Mapping[int, Parcel], ttl_s: float) -> dict[str, int]:
        self.waiting |= {str(node): parcel.to_bytes() for node, parcel in parcels.items()}
        return {str(node): node for node in parcels}

    def pull(self, numbers: Collection[str]) -> dict[str, Parcel]:
        number = max(numbers)  # one at a time, not in the order of the messages
        answer = work(Parcel.from_bytes(self.waiting.pop(number)))
        return {number: Parcel.from_bytes(answer.to_bytes())}


def nobody(event: dict[str, Any]) -> None:
    pass


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        *(("fedharmony", []), ("fedcurv", []), ("spherefed", [])),
        ("fedavg", ["attack.kind=sign_flip", "attack.share=0.5"]),
    ],
)
def test_parcels_give_the_bits_of_the_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, changes: list[str]
) -> None:
    """Lies are told once: a sign that flips twice would be none."""
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(posts, "POLL_S", 0.0)
    threads = torch.get_num_threads()
    settings = load_settings("demo", [*SMALL, *changes, f"run.method={method}"])
    expected = run.start(settings, RunFolder(tmp_path / "own"), nobody)
    folder = RunFolder(tmp_path / "flower")
    found = run.start(settings, folder, nobody, build=simulated.builder(folder, Here(6)))
    opened.cache_clear()
    torch.set_num_threads(threads)
    assert {k: found[k] for k in SAME} == {k: expected[k] for k in SAME}


def test_one_place_needs_no_simulation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulated, "refuse_without_ray", lambda: None)
    settings = load_settings("demo", ["run.method=fedavg", "federation.central=true"])
    with pytest.raises(ConfigError, match="one place"):
        simulated.start(settings, RunFolder(tmp_path), nobody)


def test_the_command_hands_its_run_to_the_simulation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that nobody knows is refused, before anything is written."""
    began: list[tuple[Settings, RunFolder]] = []

    def start(settings: Settings, folder: RunFolder, observe: Any) -> None:
        began.append((settings, folder))
        run.start(settings, folder, observe)

    monkeypatch.setattr(simulated, "start", start)
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))
    out = tmp_path / "run"
    words = ["run", "demo", *SMALL, "run.rounds=1", "run.method=fedavg", "-o", str(out), "--on"]
    assert "there is 'flower-sim'" in refuse(tmp_path, *words, "flower")
    assert not out.exists()
    succeed(tmp_path, *words, "flower-sim")
    assert [(settings.run.method, folder.path) for settings, folder in began] == [("fedavg", out)]
    assert (out / "report.html").exists()


@pytest.mark.skipif(os.environ.get("FEDHARMONY_FLOWER") != "1", reason="takes a minute")
@pytest.mark.filterwarnings("ignore")
def test_ray_gives_the_bits_of_the_simulator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray")
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))
    settings = load_settings("demo", [*SMALL, "run.method=fedcurv"])
    expected = run.start(settings, RunFolder(tmp_path / "own"), nobody)
    found = simulated.start(settings, RunFolder(tmp_path / "flower"), nobody)
    assert {k: found[k] for k in SAME} == {k: expected[k] for k in SAME}
