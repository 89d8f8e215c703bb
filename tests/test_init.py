"""Config files made from the user's own data, and what a run says before it begins."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedharmony.experiments import init, outlook
from fedharmony.experiments.blueprint import Blueprint, Facts, blueprint
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.run import start
from fedharmony.experiments.settings import compose, load_settings
from fedharmony.models.base import FeatureSpec, InputSpec, Model
from fedharmony.models.heads import LinearHead
from fedharmony.models.vit import ViT
from fedharmony.terminal import warn_once
from test_cli import refuse, results, succeed


@pytest.fixture(autouse=True)
def _alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of the test's own, a CPU, no weights, and a speed that no clock decides."""
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(init, "cached", lambda name: False)
    monkeypatch.setattr(init, "seconds_per_image", lambda *args: 0.01)


def photos(
    folder: Path, header: str, cells: Sequence[str], size: tuple[int, int] = (90, 50)
) -> Path:
    """A folder with one image per row of a table."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(len(cells)):
        pixels = rng.integers(0, 255, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    lines = [f"{i}.png,{cell}" for i, cell in enumerate(cells)]
    (folder / "list.csv").write_text("\n".join([f"image,{header}", *lines]))
    return folder


def made(folder: Path, *args: str) -> Any:
    succeed(folder, "init", *args, "--out", "own.toml", "--force")
    return load_settings(folder / "own.toml")


def test_a_table_with_users(tmp_path: Path) -> None:
    """The shorter side is 50: the largest multiple of 8 is 48. Four users become four clients.

    A user is held out for the test, so 3 · 10 images train, five times a round: 150 · 0.01 s = 1.5
    s a round; 1,800 s would be enough for more than the 50 rounds at most.
    """
    cells = [f"{'cat|dog' if i % 2 else 'dog'},u{i % 4},x" for i in range(40)]
    photos(tmp_path / "photos", "labels,user,remark", cells)
    said = succeed(tmp_path, "init", "photos")
    assert "30 for training, 10 for the test, 2 classes, 3 users" in said
    assert "fedharmony run photos.toml" in said
    settings = load_settings(tmp_path / "photos.toml")
    assert settings.data.own.path == str(tmp_path / "photos")
    assert (settings.data.own.format, settings.data.own.ignore) == ("joined", ("remark",))
    assert settings.data.own.image_size == 48
    assert settings.split.common.name == "natural"
    assert (settings.model.common.name, settings.model.own.weights) == ("vit", None)
    assert settings.run.rounds == 50
    text = (tmp_path / "photos.toml").read_text()
    assert "fedharmony models fetch timm/vit_tiny" in text
    assert "images/s" in text


def test_the_file_runs(tmp_path: Path) -> None:
    photos(tmp_path / "photos", "cat,dog", [f"{i % 2},{int(i % 3 == 0)}" for i in range(80)])
    settings = made(tmp_path, "photos")
    assert settings.data.own.format == "columns"
    assert settings.split.common.name == "pivot_dirichlet"
    assert settings.split.common.clients == 2  # 64 images for training, 30 each at least
    tiny = ["run.rounds=1", "train.epochs=1", "engine.threads=1", "engine.device=cpu"]
    succeed(tmp_path, "run", "own.toml", *tiny, "--out", "run", "--quiet")
    assert results(tmp_path / "run")["status"] == "completed"


def test_weights_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "cached", lambda name: "small" in name)
    monkeypatch.setattr(init, "_seconds", lambda *args: 1.0)
    photos(tmp_path / "photos", "labels", ["cat"] * 60 + ["dog"] * 40, size=(300, 200))
    settings = made(tmp_path, "photos/list.csv")
    assert settings.model.common.name == "vit_small_patch16"
    assert settings.model.own.weights == init.PRETRAINED["vit_small_patch16"]
    assert settings.data.own.image_size == 192
    assert settings.train.lr == 1e-4
    assert settings.run.rounds == 5  # 80 · 5 images take 400 s: 4 rounds in 1,800 s, but 5 at least


def test_features(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(init, "seconds_per_image", lambda *args: 0.02)
    rng = np.random.default_rng(0)
    X, Y = rng.normal(size=(900, 3)), rng.integers(0, 2, (900, 2))
    np.savez(tmp_path / "a.npz", X=X, Y=Y)
    settings = made(tmp_path, "a.npz")
    assert (settings.data.common.name, settings.model.common.name) == ("features", "mlp")
    assert settings.split.common.clients == 24  # 720 samples for training
    assert settings.federation.cohort == 20
    assert settings.run.rounds == 30  # 5 · 720 · 20/24 = 3,000 samples a round take a minute
    rows = [",".join(map(str, [*x, *y])) for x, y in zip(X, Y, strict=True)]
    (tmp_path / "b.csv").write_text("\n".join(["h,w,d,cat,dog", *rows]))
    assert made(tmp_path, "b.csv").data.own.labels == ("cat", "dog")
    assert "please check" in (tmp_path / "own.toml").read_text()


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", X=np.eye(4), Y=np.eye(4))
    (tmp_path / "a.toml").write_text("mine")
    assert "--force" in refuse(tmp_path, "init", "a.npz")
    assert (tmp_path / "a.toml").read_text() == "mine"
    succeed(tmp_path, "init", "a.npz", "--force")
    assert load_settings(tmp_path / "a.toml").data.common.name == "features"
    assert "cannot be written" in refuse(tmp_path, "init", "a.npz", "--out", "none/a.toml")


def test_what_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert "There is no file or folder none" in refuse(tmp_path, "init", "none")
    assert "not one table or file of features in empty but 0" in refuse(tmp_path, "init", "empty")
    (tmp_path / "a.txt").write_text("x")
    assert "neither a folder nor a table" in refuse(tmp_path, "init", "a.txt")
    photos(tmp_path / "photos", "labels", ["cat;dog", "dog;tree", "tree", "cat"])
    assert "needs '|'" in refuse(tmp_path, "init", "photos")
    (tmp_path / "photos" / "list.csv").write_text("image,labels\n0.png,cat\n9.png,dog\n1.png,cat")
    assert "lacks 1 of" in refuse(tmp_path, "init", "photos")
    (tmp_path / "photos" / "1.png").write_bytes(b"no image")
    (tmp_path / "photos" / "list.csv").write_text("image,labels\n1.png,cat\n1b.png,dog")
    (tmp_path / "photos" / "1b.png").write_bytes(b"no image")
    assert "cannot be read" in refuse(tmp_path, "init", "photos")
    assert not list(tmp_path.glob("*.toml"))


# What a run says before it begins -----------------------------------------------------------------


SPEC, SMALL_VIT = InputSpec(3, 32, 32), ViT.Config(width=16, depth=1, heads=2)


def vit() -> Model:
    return Model(ViT(SMALL_VIT, SPEC), LinearHead(16, 2))


def plan(images: int = 60, spec: InputSpec | FeatureSpec = SPEC, **model: Any) -> Blueprint:
    """Ten rounds with one client that has so many images."""
    small = {"name": "vit", "width": 16, "depth": 1, "heads": 2}
    tree: dict[str, Any] = {"run": {"rounds": 10}, "train": {"epochs": 1}, "federation": {}}
    tree["federation"]["participation"] = 1.0
    tree["model"] = model if "name" in model else {**small, **model}
    return blueprint(compose(tree), Facts(("a", "b"), spec, {0: images}))


def test_few_images_from_scratch() -> None:
    """The small transformer has 6,722 parameters: too many for 67 images, not for 68."""
    scratch = plan()
    assert scratch.model.num_parameters == 6722
    said = outlook.scratch_warning(scratch, 67)
    assert said is not None
    assert "6,722 parameters for 67 training images" in said
    assert outlook.scratch_warning(scratch, 68) is None
    assert outlook.scratch_warning(plan(weights="file.safetensors"), 67) is None
    vectors = FeatureSpec((0.0,) * 50, (1.0,) * 50)
    assert outlook.scratch_warning(plan(spec=vectors, name="mlp"), 10) is None


def test_hours(monkeypatch: pytest.MonkeyPatch) -> None:
    """At 1/50 s an image, 900,000 trained and 300,000 evaluated images take 20,000 s: 6 hours."""
    monkeypatch.setattr(outlook, "seconds_per_image", lambda *args: 0.02)

    def said(trained: int, evaluated: int, first: int = 0) -> str | None:
        return outlook.time_warning(plan(trained // 10), evaluated // 10, first)

    monkeypatch.setattr(outlook, "POSSIBLY_LONG", 0.0)
    words = said(900_000, 300_000)
    assert words is not None
    assert "about 6 hours on this machine: it trains on 900,000 images" in words
    assert "50.0 images per second" in words
    assert said(359_000, 0) is None
    assert said(361_000, 0) is not None
    assert said(340_000, 59_000) is None  # evaluating takes a third: 359,667 images
    assert said(340_000, 61_000) is not None
    assert said(718_000, 0, first=5) is None  # half of the rounds are done
    assert said(722_000, 0, first=5) is not None
    monkeypatch.undo()
    assert said(1000, 1000) is None  # not even timed


def test_the_timed_step_is_one_of_training() -> None:
    model = vit()
    params = model.init(torch.Generator().manual_seed(0))
    assert 0 < outlook.seconds_per_image(model, params, (3, 32, 32), 4) < 10
    assert not any(tensor.requires_grad for tensor in params.values())


def test_a_run_says_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    small = ["data.train=60", "data.test=20", "split.clients=2", "run.rounds=1", "train.epochs=1"]
    settings = load_settings("demo", [*small, "run.method=fedavg", "engine.device=cpu"])
    warn_once.cache_clear()  # another test may have said it in this process
    with caplog.at_level(logging.WARNING, "fedharmony"):
        start(settings, RunFolder(tmp_path / "run"), lambda event: None)
    assert "for 60 training images" in caplog.text
