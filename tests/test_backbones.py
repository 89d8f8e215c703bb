"""Weights by file or name, and backbones of timm."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedharmony.errors import ConfigError
from fedharmony.models import hub
from fedharmony.models.base import InputSpec, Model, stack
from fedharmony.models.heads import LinearHead
from fedharmony.models.timm_backbone import PREFIX, TimmBackbone
from fedharmony.models.vit import ViT
from fedharmony.models.weights import load_weights
from fedharmony.terminal import warn_once

timm = pytest.importorskip("timm")

SMALL = ViT.Config(width=8, depth=2, heads=2, patch=4)


# -- files and names ------------------------------------------------------------------------------


def test_a_numpy_archive_is_refused_with_what_to_use(tmp_path: Path) -> None:
    for path in (tmp_path / "ViT.npz", tmp_path / "none.npz"):
        np.savez(tmp_path / "ViT.npz", cls=np.zeros((1, 1, 8)))
        with pytest.raises(ConfigError, match=r"npz'.*not read.*\.safetensors.*model's name"):
            ViT(ViT.Config(**{**vars(SMALL), "weights": str(path)}), InputSpec(3, 8, 8))


def write_weights(folder: Path, mean: list[float] | None = None) -> Path:
    vit = ViT(SMALL, InputSpec(3, 8, 8))
    folder.mkdir(parents=True, exist_ok=True)
    save_file(vit.init(torch.Generator().manual_seed(5)), folder / "model.safetensors")
    if mean is not None:
        config = {"architecture": "vit", "pretrained_cfg": {"mean": mean, "std": [0.2, 0.3, 0.4]}}
        (folder / "config.json").write_text(json.dumps(config))
    return folder / "model.safetensors"


def test_the_input_normalisation_follows_the_weights(tmp_path: Path) -> None:
    file = write_weights(tmp_path / "a", mean=[0.485, 0.456, 0.406])
    chosen = {**vars(SMALL), "weights": str(file)}
    vit = ViT(ViT.Config(**chosen), InputSpec(3, 8, 8))
    assert (vit.mean, vit.std) == ((0.485, 0.456, 0.406), (0.2, 0.3, 0.4))
    own = ViT(ViT.Config(**{**chosen, "mean": (0.1, 0.2, 0.3)}), InputSpec(3, 8, 8))
    assert (own.mean, own.std) == ((0.1, 0.2, 0.3), (0.2, 0.3, 0.4))
    silent = {**vars(SMALL), "weights": str(write_weights(tmp_path / "b"))}
    assert ViT(ViT.Config(**silent), InputSpec(3, 8, 8)).mean == (0.5, 0.5, 0.5)


@pytest.mark.parametrize("odd", ["two files", "no architecture", "no object", "brackets"])
def test_a_config_that_may_be_another_networks_is_not_taken(
    tmp_path: Path, odd: str, caplog: pytest.LogCaptureFixture
) -> None:
    file = write_weights(tmp_path, mean=[0.4, 0.4, 0.4])
    texts = {"no architecture": '{"mean": [0.4, 0.4, 0.4], "std": [1, 1, 1]}', "no object": "[]"}
    if odd == "two files":
        (tmp_path / "other.pth").touch()
    else:
        (tmp_path / "config.json").write_text(texts.get(odd, "[" * 100_000))
    warn_once.cache_clear()
    found = hub.locate(str(file))
    assert (found.path, found.mean, found.std) == (file, None, None)
    assert "config.json is not taken" in caplog.text


def test_a_home_that_nobody_has_is_a_path_that_is_not_there() -> None:
    path = "~nobody-of-that-name/x.safetensors"
    assert str(hub.locate(path).path) == path
    vit = ViT(SMALL, InputSpec(3, 8, 8))
    for name in (path, "x" * 5000):
        with pytest.raises(ConfigError, match="does not exist"):
            load_weights(name, vit.shapes(), vit.grid)


class EntryNotFoundError(Exception):
    """As the hub's own."""


class FakeHub(types.ModuleType):
    """A hub with one model, and the cache of an earlier download."""

    def __init__(self, folder: Path, online: bool) -> None:
        super().__init__("huggingface_hub")
        self.folder, self.online, self.asked = folder, online, list[tuple[str, str]]()

    def try_to_load_from_cache(self, model: str, file: str) -> str | None:
        path = self.folder / "cache" / model / file
        return str(path) if path.exists() else None

    def hf_hub_download(self, model: str, file: str) -> str:
        self.asked.append((model, file))
        if not self.online:
            raise ConnectionError("no route to the hub")
        path = self.folder / "remote" / model / file
        if not path.exists():
            raise EntryNotFoundError(f"{file} is not in {model}")
        return str(path)


@pytest.mark.parametrize("place", ["cache", "remote"])
def test_weights_by_name(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeHub(tmp_path, online=True)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    write_weights(tmp_path / place / "timm" / "tiny", mean=[0.1, 0.2, 0.3])
    found = hub.locate("tiny")
    assert found.path == tmp_path / place / "timm" / "tiny" / "model.safetensors"
    assert found.mean == (0.1, 0.2, 0.3)
    assert bool(fake.asked) == (place == "remote")  # what is cached is not asked for


def test_the_other_file_is_tried_only_where_the_first_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = FakeHub(tmp_path, online=True)
    monkeypatch.setitem(sys.modules, "huggingface_hub", fake)
    folder = tmp_path / "remote" / "timm" / "old"
    folder.mkdir(parents=True)
    (folder / "pytorch_model.bin").write_bytes(b"x")
    assert hub.fetch("old").name == "pytorch_model.bin"
    offline = FakeHub(tmp_path, online=False)
    monkeypatch.setitem(sys.modules, "huggingface_hub", offline)
    with pytest.raises(ConfigError):
        hub.fetch("old")
    assert offline.asked == [("timm/old", "model.safetensors")]


def test_a_name_that_cannot_be_fetched_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", FakeHub(tmp_path, online=False))
    with pytest.raises(ConfigError) as caught:
        hub.locate("timm/nothing")
    for word in ("timm/nothing", "no route to the hub", "fedharmony models fetch"):
        assert word in str(caught.value)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(ConfigError, match=r"fedharmony\[vision\]"):
        hub.locate("timm/nothing")
    with pytest.raises(ConfigError, match="neither a file nor the name"):
        hub.locate("a/b/c")


# -- timm -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "size"),
    [("resnet10t", 32), ("vit_tiny_patch16_224", 32), ("convnext_atto", 32)],
)
def test_features_and_tokens_are_timms_own(architecture: str, size: int) -> None:
    backbone = TimmBackbone(TimmBackbone.Config(architecture), InputSpec(3, size, size))
    params = backbone.init(torch.Generator().manual_seed(1))
    assert {n: tuple(t.shape) for n, t in params.items()} == backbone.shapes()
    again = backbone.init(torch.Generator().manual_seed(1))
    assert all(torch.equal(params[n], again[n]) for n in params)
    other = backbone.init(torch.Generator().manual_seed(2))
    assert any(not torch.equal(params[n], other[n]) for n in params)
    whole = stack([{**params, **backbone.init_buffers()}, {**other, **backbone.init_buffers()}])
    images = torch.randn(2, 3, 3, size, size, generator=torch.Generator().manual_seed(0))
    features, tokens = backbone.features(whole, images), backbone.tokens(whole, images)
    assert features.shape == (2, 3, backbone.width)
    assert tokens.shape == (2, 3, backbone.class_tokens + backbone.patches, backbone.width)
    module = backbone.module
    own = {n.removeprefix(PREFIX): t for n, t in {**other, **backbone.init_buffers()}.items()}
    assert not module.load_state_dict(own, strict=False).missing_keys
    torch.testing.assert_close(features[1], module(images[1]))


def test_global_random_state_is_left_alone() -> None:
    backbone = TimmBackbone(TimmBackbone.Config("resnet10t"), InputSpec(3, 32, 32))
    before = torch.random.get_rng_state()
    backbone.init(torch.Generator().manual_seed(1))
    assert torch.equal(before, torch.random.get_rng_state())


def test_weights_of_a_timm_backbone_with_its_running_statistics(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = timm.create_model("resnet10t", num_classes=5)
    for name, buffer in module.named_buffers():
        if name.endswith("running_mean"):
            buffer.fill_(0.25)
    path = tmp_path / "net.pth"
    torch.save(module.state_dict(), path)
    config = TimmBackbone.Config("resnet10t", weights=str(path))
    backbone = TimmBackbone(config, InputSpec(3, 32, 32))
    params = backbone.init(torch.Generator())
    assert torch.equal(params[PREFIX + "conv1.0.weight"], module.state_dict()["conv1.0.weight"])
    means = [b for n, b in backbone.init_buffers().items() if n.endswith("running_mean")]
    assert means
    assert all((b == 0.25).all() for b in means)
    model = Model(backbone, LinearHead(backbone.width, 3))
    trained, frozen = model.divide(model.init(torch.Generator()))
    assert not any("running" in name for name in {**trained, **frozen})
    other = TimmBackbone.Config("resnet18", weights=str(path))
    with pytest.raises(ConfigError, match="another architecture"):
        TimmBackbone(other, InputSpec(3, 32, 32)).init(torch.Generator())


def test_an_unknown_architecture_is_named() -> None:
    with pytest.raises(ConfigError, match="resnet18"):
        TimmBackbone(TimmBackbone.Config("resnet18x"), InputSpec(3, 32, 32))
