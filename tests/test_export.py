"""Exports: other programs give the run's own scores; what cannot be exported says so."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from safetensors.torch import load_file

import fedharmony as fh
from fedharmony.errors import CheckpointError
from fedharmony.experiments import export as exporting
from fedharmony.experiments.export import export, samples
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.run import start
from fedharmony.experiments.settings import load_settings
from fedharmony.experiments.trained import TrainedModel, load_model
from fedharmony.methods import methods
from fedharmony.methods.base import Task
from fedharmony.types import Record
from test_cli import refuse, succeed
from test_predict import NAMES, images, trained


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of labelled images."""
    folder = tmp_path_factory.mktemp("data") / "images"
    images(folder)
    return folder


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))


def model_of(folder: Path, data: Path, *changes: str) -> TrainedModel:
    return load_model(RunFolder(trained(folder, data, *changes)), "cpu")


def scores_by_timm(folder: Path, pixels: torch.Tensor) -> torch.Tensor:
    """What a user of timm would write: the model by its config, weights, and normalisation."""
    config = json.loads((folder / "config.json").read_text())
    made = timm.create_model(
        config["architecture"], num_classes=config["num_classes"], **config["model_args"]
    )
    made.load_state_dict(load_file(folder / "model.safetensors"))
    about = config["pretrained_cfg"]
    mean, std = (torch.tensor(about[name])[:, None, None] for name in ("mean", "std"))
    with torch.no_grad():
        return made.eval()((pixels / 255 - mean) / std).sigmoid()


@pytest.mark.parametrize("method", ["fedavg", "fedavg:plus", "fedrdn", "fedharmony"])
def test_timm_gives_the_same_scores(method: str, data: Path, tmp_path: Path) -> None:
    """Also where the model is an average, and where images are normalised by pooled statistics."""
    model = model_of(tmp_path / "run", data, f"run.method={method}", "run.thresholds=0.3")
    files = export(model, tmp_path / "out")
    assert [f.name for f in files] == ["model.safetensors", "config.json", "README.md"]
    pixels = samples(model)
    expected = model.scorer(pixels)
    torch.testing.assert_close(
        scores_by_timm(tmp_path / "out", pixels), expected, atol=1e-5, rtol=0
    )
    whole = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    mean, std = (torch.tensor(whole.pretrained_cfg[n])[:, None, None] for n in ("mean", "std"))
    with torch.no_grad():
        found = whole((pixels / 255 - mean) / std).sigmoid()
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    own = about["fedharmony"]
    assert own["classes"] == about["pretrained_cfg"]["label_names"] == list(NAMES)
    assert own["thresholds"] == model.results["thresholds"]["per_label"]
    assert own["thresholds_chosen"] is True
    assert own["metrics"] == model.results["metrics"]
    assert own["image_size"] == [16, 16]
    assert own["resize"] == "pad"
    assert own["sha256"]["settings"] == model.results["config_sha256"]
    assert own["sha256"]["data"]["test labels"] == model.results["bound"]["test labels"]


def test_images_that_are_not_square_are_exported(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    pixels, labels = rng.integers(0, 256, (24, 8, 16, 3), np.uint8), rng.integers(0, 2, (24, 3))
    tiny = {"model.width": 8, "model.depth": 1, "model.heads": 2, "train.epochs": 1}
    run = fh.train(
        *(pixels, labels), clients=2, rounds=1, settings=tiny, out=tmp_path / "run", quiet=True
    )
    export(run.model, tmp_path / "out")
    about = json.loads((tmp_path / "out" / "config.json").read_text())
    assert about["fedharmony"]["image_size"] == [8, 16]
    assert about["pretrained_cfg"]["input_size"] == [3, 8, 16]
    found = scores_by_timm(tmp_path / "out", torch.from_numpy(pixels).movedim(-1, 1)).numpy()
    np.testing.assert_allclose(found, run.predict(pixels), atol=1e-5)


def test_a_timm_backbone_keeps_its_names_and_running_statistics(data: Path, tmp_path: Path) -> None:
    """Its classifier is called otherwise, and batch normalisation has buffers."""
    none = ("model.width=", "model.depth=", "model.heads=", "model.patch=")
    model = model_of(
        *(tmp_path / "run", data, *none, "model.name=timm", "model.architecture='test_resnet'"),
        *("run.method=fedavg", "run.rounds=1", "data.image_size=32"),
    )
    export(model, tmp_path / "out")
    names = set(load_file(tmp_path / "out" / "model.safetensors"))
    assert {"fc.weight", "fc.bias", "bn1.running_mean"} <= names
    pixels = samples(model)
    found = scores_by_timm(tmp_path / "out", pixels)
    torch.testing.assert_close(found, model.scorer(pixels), atol=1e-5, rtol=0)


@pytest.mark.parametrize("method", ["spherefed", "fedlgt"])
def test_what_timm_lacks_keeps_its_own_names_and_says_so(
    method: str, data: Path, tmp_path: Path
) -> None:
    changes = ("methods.fedlgt.embedding=8", "methods.fedlgt.layers=1", f"run.method={method}")
    model = model_of(tmp_path / "run", data, *changes)
    export(model, tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "architecture" not in config
    assert config["fedharmony"]["form"] == "fedharmony"
    assert method in config["fedharmony"]["why_not_timm"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    own = {name: t[0] for name, t in model.scorer.parameters.items()}
    assert tensors.keys() == own.keys()
    assert all(torch.equal(tensors[name], own[name]) for name in own)
    assert "no model of timm" in (tmp_path / "out" / "README.md").read_text()


def test_onnx_takes_images_as_they_are(data: Path, tmp_path: Path) -> None:
    """One image and several; normalisation and scores are part of the graph."""
    ort = pytest.importorskip("onnxruntime")
    model = model_of(tmp_path / "run", data, "run.method=fedrdn")
    export(model, tmp_path / "out", onnx=True)
    session = ort.InferenceSession(tmp_path / "out" / "model.onnx")
    pixels = torch.randint(0, 256, (5, 3, 16, 16), generator=torch.Generator().manual_seed(3))
    pixels = pixels.to(torch.uint8)
    for rows in (pixels, pixels[:1]):
        (found,) = session.run(None, {"images": rows.numpy()})
        np.testing.assert_allclose(found, model.scorer(rows).numpy(), atol=1e-4)
    assert "model.onnx" in (tmp_path / "out" / "README.md").read_text()


def test_features_are_exported_with_names_and_statistics(tmp_path: Path) -> None:
    """The statistics of FedRDN come on top of the standardisation: z = ((x − m)/s − μ)/σ."""
    rng = np.random.default_rng(0)
    X = rng.normal(5, 2, (30, 3)).astype(np.float32)
    np.savez(tmp_path / "x.npz", X=X, Y=(X[:, :2] > 5).astype(int), features=list("abc"))
    settings = load_settings(
        "demo",
        [
            *("data.name=features", f"data.path='{tmp_path / 'x.npz'}'", "split.name=iid"),
            *("split.clients=3", "run.rounds=1", "run.method=fedrdn", "engine.threads=1"),
            "model.name=linear",
        ],
    )
    start(settings, RunFolder(tmp_path / "run"), lambda event: None)
    model = load_model(RunFolder(tmp_path / "run"), "cpu")
    export(model, tmp_path / "out", onnx=exporting.importlib.util.find_spec("onnx") is not None)
    own = json.loads((tmp_path / "out" / "config.json").read_text())["fedharmony"]
    assert own["features"] == ["a", "b", "c"]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    x = torch.from_numpy(X[:5]).double()
    mean, std = (torch.tensor(own["normalisation"][n]).double() for n in ("mean", "std"))
    z = ((x - mean) / std).float()
    found = (z @ tensors["head.weight"].T + tensors["head.bias"]).sigmoid()
    torch.testing.assert_close(found, model.scorer(torch.from_numpy(X[:5])), atol=1e-5, rtol=0)


def test_statistics_of_features_on_top_of_the_model_s_by_hand() -> None:
    """X − 5 is divided by 2, and z − 0.5 by 4: together x − (5 + 2 · 0.5) is divided by 2 · 4."""
    task = Task(
        **{"classes": 1, "clients": 1, "rounds": 1, "batch_size": 1, "epochs": 1, "seed": 0},
        **{"width": 1, "lr": 0.1, "mean": (5.0,), "std": (2.0,), "pixels": False},
    )
    method = methods["fedrdn"](methods["fedrdn"].Config(), task)
    table = {"mean": torch.tensor([[0.5]]), "std": torch.tensor([[4.0]])}
    table |= {"examples": torch.tensor([9]), "client": torch.tensor([0])}
    state = Record({"statistics_table": table})
    assert method.normalisation(state) == ([6.0], [8.0])
    assert method.normalisation(Record({})) == ((5.0,), (2.0,))
    x = torch.tensor([[7.0]])
    found = method.normalise(x, method.evaluation(state), {})
    torch.testing.assert_close(found, (x - 6) / 8)


def test_the_card_says_what_the_model_is_and_is_not(data: Path, tmp_path: Path) -> None:
    model = model_of(tmp_path / "run", data, "run.method=fedavg")
    out = succeed(tmp_path, "export", str(tmp_path / "run"), "--to", "out")
    assert out.splitlines() == ["out/model.safetensors", "out/config.json", "out/README.md"]
    card = (tmp_path / "out" / "README.md").read_text()
    value = 100 * model.results["metrics"]["mAP"]
    assert f"| mAP | {value:.1f} |" in card
    assert "by 3 clients on 18 images of the data set `table`" in card
    assert "resized to 16 × 16 pixels (`pad`" in card
    assert "All labels share one threshold" in card
    assert str(data) not in card + (tmp_path / "out" / "config.json").read_text()


def test_exports_never_write_over_anything(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A filled folder, a missing extra, a check that fails: nothing is written."""
    model = model_of(tmp_path / "run", data, "run.method=fedavg")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("keep")
    assert "not an empty folder" in refuse(tmp_path, "export", "run", "--to", "full")
    assert [p.name for p in (tmp_path / "full").iterdir()] == ["mine"]
    assert "--to" in refuse(tmp_path, "export", "run", "--to", "full/mine")
    find = exporting.importlib.util.find_spec
    monkeypatch.setattr(
        exporting.importlib.util, "find_spec", lambda n: None if n == "onnxruntime" else find(n)
    )
    message = refuse(tmp_path, "export", "run", "--to", "out", "--onnx")
    assert 'onnxruntime: pip install "fedharmony[onnx]"' in message
    monkeypatch.undo()
    if find("onnxruntime") is not None:
        monkeypatch.setattr(exporting, "CLOSE", -1.0)
        with pytest.raises(CheckpointError, match="not written"):
            export(model, tmp_path / "out", onnx=True)
        assert exporting.form_of(model).timm is None

        def fail(*_: object) -> bytes:
            raise NotImplementedError("no such operation")

        monkeypatch.setattr(exporting, "_traced", fail)
        with pytest.raises(CheckpointError, match=r"as ONNX \(NotImplementedError: no such"):
            export(model, tmp_path / "out", onnx=True)
    assert not (tmp_path / "out").exists()
