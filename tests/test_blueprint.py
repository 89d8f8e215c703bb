"""A run without data, and what is made of it: each part once, and nothing lost by a kill."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedharmony.engine.memory import ClientMemory
from fedharmony.errors import ConfigError
from fedharmony.experiments import build, run
from fedharmony.experiments.blueprint import Facts, blueprint
from fedharmony.experiments.build import assemble
from fedharmony.experiments.evaluate import evaluate
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.machine import switch_torch
from fedharmony.experiments.settings import load_settings
from fedharmony.models.base import InputSpec
from fedharmony.models.vit import ViT
from test_imports import PACKAGE, imports
from toy import same_bits

SMALL = [
    *("data.train=40", "data.test=12", "split.clients=4", "split.name=iid", "run.rounds=3"),
    *("model.width=8", "model.depth=1", "model.heads=2", "model.patch=16", "train.epochs=1"),
    *("engine.device=cpu", "engine.threads=1"),
]
IDS = {3: 10, 8: 30, 5: 0}


def facts(**changes: Any) -> Facts:
    return replace(Facts(("cat", "dog"), InputSpec(3, 16, 16), IDS), **changes)


# -- without data ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["fedharmony", "spherefed", "fedrdn"])
def test_a_server_without_data_runs_the_same_rounds(method: str) -> None:
    """The blueprint of the facts alone, over the transport of the run with data."""
    changes = [*SMALL, f"run.method={method}", "methods.spherefed.projection=24"]
    assembly = assemble(load_settings("demo", changes))
    whole = assembly.federation(ClientMemory())
    expected = whole.run(assembly.initial_state(), 0, lambda e: None, lambda t, s: None)
    known = assembly.blueprint.facts
    alone = blueprint(assembly.settings, Facts(known.classes, known.input, dict(known.sizes)))
    loop = alone.federation(assembly.federation(ClientMemory()).transport)
    found = loop.run(alone.initial_state(), 0, lambda e: None, lambda t, s: None)
    assert same_bits(found, expected)


def test_a_blueprint_knows_nothing_of_data() -> None:
    found = imports(PACKAGE / "experiments" / "blueprint.py")
    assert not {name for name in found if name.split(".")[1] in ("data", "partition", "metrics")}


def test_clients_have_the_ids_that_the_facts_name() -> None:
    changes = [*SMALL, "federation.cohort=2", "federation.drop_rate=0.0"]
    plan = blueprint(load_settings("demo", changes), facts())
    assert list(plan.schedule) == [[3, 8]] * 3  # 5 has no images
    assert (plan.method.task.clients, plan.method.task.classes) == (3, 2)


@pytest.mark.parametrize(("sampling", "images"), [("uniform", 120), ("size", 150)])
def test_the_images_to_come_are_those_of_random_cohorts(sampling: str, images: int) -> None:
    """3 epochs, 2 rounds of one client of 10 or 30 images.

    Equal chances: 20 on average, 2 · 3 · 20 = 120. By size: (10² + 30²) / 40 = 25, and 150.
    """
    changes = ["federation.cohort=1", "run.rounds=2", "train.epochs=3"]
    settings = load_settings("demo", [*SMALL, *changes, f"federation.sampling={sampling}"])
    assert blueprint(settings, facts()).images == images


def test_one_party_counts_out_what_the_cohorts_see() -> None:
    """Both clients of 10 and 30 images in each of 3 rounds, 2 epochs: 80 images a round."""
    changes = ["run.method=fedavg", "federation.participation=1.0", "train.epochs=2"]
    settings = load_settings("demo", [*SMALL, *changes, "federation.drop_rate=0.3"])
    plan = blueprint(settings.central(seed=0), facts())
    assert plan.gathered is not None
    assert max(plan.gathered) <= 80
    assert (plan.training.epochs, plan.taking_part.drop_rate) == (1, 0.0)
    still = replace(settings, federation=replace(settings.federation, drop_rate=0.0))
    plan = blueprint(still.central(seed=0), facts())
    assert plan.gathered == [80, 80, 80]
    assert plan.schedule == [[0], [1], [2]]


def test_unknown_labels_are_a_fact() -> None:
    settings = load_settings("demo", SMALL)
    assert not blueprint(settings, facts()).method.task.unknown_labels
    assert blueprint(settings, facts(unknown_labels=True)).method.task.unknown_labels
    some = load_settings("demo", [*SMALL, "split.annotated=0.5"])
    assert assemble(some).blueprint.facts.unknown_labels


# -- each part once -------------------------------------------------------------------------------


def pictures(folder: Path, damaged: int | None = None) -> list[str]:
    """12 small images with labels; the changes that make the demo train on them."""
    folder.mkdir()
    rng, lines = np.random.default_rng(0), ["image,cat,dog,split"]
    for i in range(12):
        Image.fromarray(rng.integers(0, 255, (8, 8, 3), np.uint8)).save(folder / f"{i}.png")
        lines.append(f"{i}.png,{i % 2},{(i // 2) % 2},{'test' if i > 8 else 'train'}")
    if damaged is not None:
        (folder / f"{damaged}.png").write_bytes(b"no image")
    (folder / "labels.csv").write_text("\n".join(lines) + "\n")
    small = [change for change in SMALL if not change.startswith("data.")]
    own = ["data.name=table", f"data.path={folder}", "data.table=labels.csv", "data.image_size=16"]
    return [*small, *own, "data.format=columns", "split.clients=2"]


def test_nothing_is_made_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The split is drawn, and weights are read, before the images are decoded, and once."""
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))
    made: list[str] = []
    draw, init = build.draw_partition, ViT.init
    monkeypatch.setattr(build, "draw_partition", lambda *a: (made.append("split"), draw(*a))[1])
    monkeypatch.setattr(ViT, "init", lambda *a: (made.append("weights"), init(*a))[1])
    settings = load_settings("demo", pictures(tmp_path / "images"))
    assembly = assemble(settings, observe=lambda event: made.append(event["event"]))
    assembly.initial_state()
    assembly.federation(ClientMemory())
    assert list(dict.fromkeys(made)) == ["split", "weights", "decode"]
    assert (made.count("split"), made.count("weights")) == (1, 1)


def test_images_that_cannot_be_read_are_in_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 9 training images one is damaged: 8 are split, as if the ninth had never been there."""
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))
    changes = [*pictures(tmp_path / "images", damaged=4), "data.unreadable=skip"]
    assembly = assemble(load_settings("demo", changes))
    assert assembly.partition.images == 8
    assert sum(assembly.blueprint.facts.sizes.values()) == 8


def test_building_leaves_torch_as_it_is() -> None:
    before = torch.get_num_threads()
    settings = load_settings("demo", [*SMALL, f"engine.threads={before + 1}"])
    assemble(settings)
    assert torch.get_num_threads() == before
    try:
        switch_torch(settings.engine)
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_what_does_not_fit_is_refused_before_data_are_split() -> None:
    with pytest.raises(ConfigError, match=r"federation\.cohort = 3"):
        blueprint(load_settings("demo", [*SMALL, "federation.cohort=3"]), facts())


# -- a checkpoint stands before its evaluation ----------------------------------------------------


def told(events: list[Any]) -> list[Any]:
    """Rounds and evaluations with their numbers, less times."""
    timed = ("seconds", "images_per_second", "time")
    return [
        {k: v for k, v in e.items() if k not in timed}
        for e in events
        if e["event"] in ("round", "evaluate")
    ]


@pytest.mark.parametrize(("every", "round"), [(1, 0), (1, 1), (1, 2), (2, 1), (2, 2)])
def test_a_killed_evaluation_costs_no_training(
    every: int, round: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The round that was being evaluated is not trained again, and its evaluation is made up."""
    settings = load_settings("demo", [*SMALL, f"run.eval_every={every}"])
    whole, cut = RunFolder(tmp_path / "whole"), RunFolder(tmp_path / "cut")
    expected = run.start(settings, whole, lambda event: None)
    due = [t for t in range(3) if (t + 1) % every == 0 or t == 2]
    assert [e["round"] for e in whole.read_events() if e["event"] == "evaluate"] == due
    done: list[int] = []

    def killed(*arguments: Any, **options: Any) -> Any:
        done.append(1)
        if len(done) == due.index(round) + 1:
            raise KeyboardInterrupt
        return evaluate(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr("fedharmony.experiments.evaluate.evaluate", killed)
        with pytest.raises(KeyboardInterrupt):
            run.start(settings, cut, lambda event: None)
    seen: list[Any] = []
    results = run.resume(cut, seen.append)
    assert [e["round"] for e in seen if e["event"] == "round"] == list(range(round + 1, 3))
    assert told(cut.read_events()) == told(whole.read_events())
    for key in ("metrics", "structure", "per_label", "state_sha256"):
        assert results[key] == expected[key]
