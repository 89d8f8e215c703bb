"""Benchmarks reach into the engine; a tiny run of those that do shows that they still fit it."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from fedharmony.data.digits import Digits
from fedharmony.data.features import Features
from fedharmony.engine.batches import plan_batches
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.experiments.build import assemble
from fedharmony.experiments.settings import load_settings
from fedharmony.report.grid import signed
from toy import Toy

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
TINY = ("--device", "cpu", "--side", "16", "--images", "4", "--out")


def run(script: str, *options: str) -> None:
    command = [sys.executable, str(BENCHMARKS / f"{script}.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr


def result(script: str, folder: Path, *options: str) -> Any:
    run(script, *options, *TINY, str(folder))
    return json.loads((folder / f"{script}.json").read_text())


def test_the_profile_finds_the_time_of_a_round_where_it_is_spent(tmp_path: Path) -> None:
    """Most of a round trains; a phase that no longer exists would hand its time to the rest."""
    (found,) = result("profile", tmp_path, "--model", "demo").values()
    phases = found["phase"]
    assert max(phases, key=phases.get) == "training steps"
    for phase in ("label clusters", "batches", "received model to all clients, carries"):
        assert phases[phase] > 0


def test_whole_rounds_are_measured_beside_training_in_one_place(tmp_path: Path) -> None:
    """A second run puts its rows over those of the first, and leaves others alone."""
    other = {"model": "B", "part": "central, batch 256", "machine": "another"}
    (tmp_path / "engine.json").write_text(json.dumps([other]))
    options = ("--models", "demo", "--parts", "equal", "--rounds", "1", "--profile")
    for _ in range(2):
        kept, central, rounds = result("engine", tmp_path, *options)
        assert kept == other
        assert central["of_limit"] == 1.0
        assert rounds["speed"] / central["speed"] == rounds["of_limit"] > 0
        assert 0 < rounds["train_loss"] < 1
    (profile,) = json.loads((tmp_path / "profile.json").read_text()).values()
    assert profile["phase"]["training steps"] > 0


def test_one_table_of_scale_leaves_the_others_alone(tmp_path: Path) -> None:
    """Those made in the same way; those of another number of threads are no company for it."""
    file = tmp_path / "scale.json"
    file.write_text(json.dumps({"threads": 7, "labels": ["others"]}))
    run("scale", "table", "--out", str(tmp_path))
    made = json.loads(file.read_text())
    assert "labels" not in made
    assert made["table"]["clients"] == 41_131
    file.write_text(json.dumps({**made, "labels": ["mine"], "table": {}}))
    run("scale", "table", "--out", str(tmp_path))
    again = json.loads(file.read_text())
    assert again["labels"] == ["mine"]
    assert again["table"]["clients"] == 41_131


def test_steps_of_fixed_shape_are_timed_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients of 9 and 4 images, batches of 4: both train for four steps, then one for two more."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from round_profile import times_of_steps

    toy = Toy(sizes=(9, 4), rounds=1, mode=ComputeMode(fixed=True))
    toy.run()
    watched = SimpleNamespace(
        loop=SimpleNamespace(transport=toy.transport), device=torch.device("cpu")
    )
    found = times_of_steps(watched)
    assert set(found) == {"2 x 4", "1 x 4"}
    assert all(seconds > 0 for seconds in found.values())


@pytest.fixture
def soak(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark, with fresh memory that holds NaN."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    torch.use_deterministic_algorithms(True)  # torch then fills what it does not initialise
    assert torch.empty(4).isnan().all()
    yield importlib.import_module("soak")
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("method", ["fedavg", "fedharmony"])
def test_the_soak_finds_a_client_that_is_not_as_on_the_plain_path(
    monkeypatch: pytest.MonkeyPatch, soak: Any, method: str
) -> None:
    """Four clients with five images: five rows on the plain path, six on the other, one of padding.

    If padding were not masked, the soak would say so; and it says so of an update that is not
    finite, and of a client that the plain path had to save.
    """

    def verdict() -> tuple[float, float, bool]:
        made = soak.Soaked(method, "demo", [5] * 4, 0, 16, torch.device("cpu"))
        found: tuple[float, float, bool] = soak.judge(list(made.rounds(2)))
        return found

    apart, allowed, good = verdict()
    assert good
    assert apart < allowed

    def unmasked(*arguments: Any) -> Any:
        plan = plan_batches(*arguments)
        plan.index[plan.index < 0] = 0
        return plan

    monkeypatch.setattr("fedharmony.engine.training.plan_batches", unmasked)
    assert not verdict()[2]
    good = {"fast": 0.01, "half": 0.01, "fast saved": 0.0, "half saved": 0.0}
    assert soak.judge([good])[2]
    for change in ({"fast": float("inf")}, {"fast saved": 1.0}, {"half saved": 1.0}):
        assert not soak.judge([{**good, **change}])[2]


def test_the_soak_runs_fresh_processes(tmp_path: Path) -> None:
    options = ("--models", "demo", "--sizes", "few", "--methods", "fedavg", "--rounds", "1")
    run("soak", *options, "--device", "cpu", "--side", "16", "--out", str(tmp_path))
    (row,) = json.loads((tmp_path / "soak.json").read_text())["results"]
    assert row["ok"]
    assert row["fast"] <= row["limit"]


def test_the_benchmark_of_attacks_compares_with_the_run_without_malicious_clients(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Runs of one round; what the file holds is not run again."""
    monkeypatch.syspath_prepend(BENCHMARKS)  # spawned processes take it over
    attacks = importlib.import_module("attacks")
    small = ["data.train=100", "data.test=30", "run.rounds=1", "train.epochs=1", "split.clients=6"]
    small += ["model.width=16", "model.depth=1", "engine.threads=1"]
    results = attacks.Results(tmp_path / "attacks.json", "demo", small)
    cell = attacks.at("agreement", "inner_product:2")
    assert "attack.strength=2" in cell.changes(1)
    assert "attack.kind=size" in cell.baseline.changes(1)
    results.carry_out([cell, cell.baseline, cell], 1)
    attacked, honest = results.found[cell], results.found[cell.baseline]
    assert results.text([cell]) == f"{attacked:.1f} ({signed(attacked - honest)})"
    again = attacks.Results(tmp_path / "attacks.json", "demo", small)
    assert again.found == results.found
    monkeypatch.setattr(attacks, "_run", None)
    again.carry_out([cell, cell.baseline], 1)


def test_embedded_images_keep_labels_split_and_what_is_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Read back as feature vectors; a second call finds the file, other weights make another."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path))
    embedding = importlib.import_module("embedding")
    loaded = Digits(Digits.Config(train=40, test=20)).load()
    known = np.random.default_rng(0).random(loaded.test.labels.shape) < 0.9
    partly = replace(
        loaded, test=replace(loaded.test, known=known, labels=loaded.test.labels * known)
    )
    monkeypatch.setattr(Digits, "load", lambda self: partly)
    small = ["data.train=40", "data.test=20", "split.clients=2", "model.width=16", "model.depth=1"]
    small += ["engine.threads=1", "engine.device=cpu"]
    file = embedding.embedded("demo", small)
    found = Features(Features.Config(path=str(file))).load()
    assert np.array_equal(found.train.labels, partly.train.labels)
    assert np.array_equal(found.test.known, known)
    assert found.classes == partly.classes
    assembly = assemble(load_settings("demo", ["run.method=fedavg", *small]))
    params = {n: t[None] for n, t in assembly.blueprint.parameters[0].items()}
    images = partly.test.images.gather(torch.arange(3, 5), "cpu")
    shown = assembly.blueprint.method.normalise(images, {}, {})
    own = found.test.images.gather(torch.arange(3, 5), "cpu")
    torch.testing.assert_close(own, assembly.blueprint.model.features(params, shown[None])[0])
    monkeypatch.setattr(embedding, "features", None)
    assert embedding.embedded("demo", small) == file
    with pytest.raises(TypeError):  # there is no such file, and nothing that could make it now
        embedding.embedded("demo", [*small, "model.seed=1"])
