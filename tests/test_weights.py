"""Weights files: formats, fitting to the image size, and errors that say what to do."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedharmony.errors import ConfigError
from fedharmony.models.base import InputSpec, Model, stack
from fedharmony.models.heads import LinearHead
from fedharmony.models.vit import ViT, ViTTiny
from fedharmony.models.weights import load_weights, resize_positions
from fedharmony.rng import torch_rng
from fedharmony.types import Tensors

BACKBONE = ViT(ViT.Config(width=8, depth=2, heads=2, patch=4), InputSpec(3, 12, 12))


def checkpoint() -> Tensors:
    """A 3 × 3 grid, and a classifier for 1000 classes."""
    tensors = BACKBONE.init(torch_rng(0, "weights"))
    return {**tensors, "head.weight": torch.ones(1000, 8), "head.bias": torch.ones(1000)}


def save(tensors: Tensors, folder: Path) -> Path:
    path = folder / "vit.safetensors"
    save_file(tensors, path)
    return path


def load(path: Path) -> Tensors:
    return load_weights(path, BACKBONE.shapes(), BACKBONE.grid)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_safetensors(tmp_path: Path, dtype: torch.dtype) -> None:
    """Values come back as float32, without the file's classifier, in the model's order."""
    rounded = {name: tensor.to(dtype) for name, tensor in checkpoint().items()}
    loaded = load(save(rounded, tmp_path))
    assert list(loaded) == list(BACKBONE.shapes())
    for name, tensor in loaded.items():
        assert tensor.dtype == torch.float32
        assert torch.equal(tensor, rounded[name].float()), name


@pytest.mark.parametrize("wrap", [None, "state_dict", "model"])
def test_pytorch_file(tmp_path: Path, wrap: str | None) -> None:
    tensors = checkpoint()
    path = tmp_path / "vit.pth"
    torch.save(tensors if wrap is None else {wrap: tensors, "epoch": 3}, path)
    loaded = load(path)
    assert all(torch.equal(loaded[name], tensors[name]) for name in BACKBONE.shapes())


def test_model_starts_from_the_file_with_a_fresh_head(tmp_path: Path) -> None:
    path = save(checkpoint(), tmp_path)
    config = ViT.Config(width=8, depth=2, heads=2, patch=4, weights=str(path))
    model = Model(ViT(config, InputSpec(3, 12, 12)), LinearHead(8, 5))
    first, second = (model.init(torch_rng(seed, "model")) for seed in (1, 2))
    for name in BACKBONE.shapes():
        assert torch.equal(first[name], checkpoint()[name])
        assert torch.equal(first[name], second[name])
    assert first["head.weight"].shape == (5, 8)
    assert not torch.equal(first["head.weight"], second["head.weight"])
    assert first["head.weight"].abs().max() < 0.2


def test_positions_by_hand() -> None:
    """Class token 7 and a 2 × 2 grid (0, 0; 1, 1): 1 × 1 is the mean 1/2, the class token stays.

    Symmetric weights that sum to one map (0, 1) to its middle, whatever the kernel.
    """
    positions = torch.tensor([7.0, 0, 0, 1, 1]).view(1, 5, 1)
    torch.testing.assert_close(
        resize_positions(positions, (1, 1)).flatten(), torch.tensor([7.0, 0.5])
    )
    wide = resize_positions(positions, (2, 3)).flatten()  # rows stay, columns are constant
    torch.testing.assert_close(wide, torch.tensor([7.0, 0, 0, 0, 1, 1, 1]))
    assert resize_positions(positions, (2, 2)) is positions


def test_positions_of_an_unknown_grid_are_left_alone() -> None:
    """Six patches are no square: they are taken as they are (and fit only a grid of six)."""
    positions = torch.arange(7.0).view(1, 7, 1)
    assert resize_positions(positions, (2, 3)) is positions
    assert resize_positions(positions, (3, 3)) is positions


@pytest.mark.parametrize("grid", [(7, 7), (9, 9), (20, 20), (4, 9), (14, 7), (7, 28), (1, 3)])
def test_positions_equal_timm(grid: tuple[int, int]) -> None:
    layers = pytest.importorskip("timm.layers")
    positions = torch.randn(1, 1 + 14 * 14, 6, generator=torch_rng(0, "positions"))
    expected = layers.resample_abs_pos_embed(positions, list(grid))
    torch.testing.assert_close(resize_positions(positions, grid), expected, rtol=0, atol=1e-6)


def test_loading_fits_the_grid(tmp_path: Path) -> None:
    tensors = checkpoint()
    config = ViT.Config(width=8, depth=2, heads=2, patch=4, weights=str(save(tensors, tmp_path)))
    loaded = ViT(config, InputSpec(3, 16, 20)).init(torch_rng(0, "model"))
    assert loaded["pos_embed"].shape == (1, 21, 8)
    assert torch.equal(loaded["pos_embed"], resize_positions(tensors["pos_embed"], (4, 5)))


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.safetensors does not exist\. Check the path"):
        load(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize("suffix", [".safetensors", ".pth"])
@pytest.mark.parametrize("damage", ["truncated", "emptied", "overwritten"])
def test_damaged_file(tmp_path: Path, suffix: str, damage: str) -> None:
    path = tmp_path / f"vit{suffix}"
    save_file(checkpoint(), path) if suffix == ".safetensors" else torch.save(checkpoint(), path)
    content = path.read_bytes()
    kept = {"truncated": content[: len(content) // 2], "emptied": b"", "overwritten": b"<html>"}
    path.write_bytes(kept[damage])
    with pytest.raises(ConfigError, match=r"cannot be read .* damaged or incomplete"):
        load(path)


def test_file_without_named_tensors(tmp_path: Path) -> None:
    torch.save([torch.zeros(2)], tmp_path / "list.pth")
    with pytest.raises(ConfigError, match="does not hold named tensors"):
        load(tmp_path / "list.pth")


def test_another_architecture_is_named_in_one_error(tmp_path: Path) -> None:
    tensors = checkpoint()
    del tensors["norm.weight"]
    tensors["cls_token"] = torch.zeros(1, 1, 9)
    tensors |= {f"blocks.{i}.ls1.gamma": torch.zeros(8) for i in range(6)}
    with pytest.raises(ConfigError) as caught:
        load(save(tensors, tmp_path))
    message = str(caught.value)
    assert "weights of another architecture" in message
    assert "missing: norm.weight;" in message
    assert "unexpected: blocks.0.ls1.gamma, " in message
    assert "blocks.4.ls1.gamma and 1 more;" in message
    assert "of another shape: cls_token (1, 1, 9) instead of (1, 1, 8)." in message


@pytest.mark.parametrize("shape", [(5,), (1, 0, 8), (1, 8, 8), (1, 10, 9)])
def test_impossible_positions(tmp_path: Path, shape: tuple[int, ...]) -> None:
    """Whatever stands in for the positions, the error names it."""
    tensors = {**checkpoint(), "pos_embed": torch.zeros(shape)}
    with pytest.raises(ConfigError, match=r"of another shape: pos_embed"):
        load(save(tensors, tmp_path))


def shared_weights() -> Path:
    folder = os.environ.get("FEDHARMONY_SHARED", Path(__file__).parents[2] / "shared")
    return Path(folder) / "weights" / "vit_tiny_patch16_224.safetensors"


@pytest.mark.parametrize("size", [(224, 224), (144, 144), (96, 160)])
@pytest.mark.skipif(not shared_weights().is_file(), reason="needs pre-trained ViT-Ti/16 weights")
def test_pretrained_features_equal_timm(size: tuple[int, int]) -> None:
    """Real weights, at their own size and interpolated to others."""
    timm = pytest.importorskip("timm")
    vision_transformer = pytest.importorskip("timm.models.vision_transformer")
    reference = timm.create_model("vit_tiny_patch16_224", img_size=size, num_classes=0).eval()
    tensors = {name: tensor.float() for name, tensor in load_file(shared_weights()).items()}
    reference.load_state_dict(vision_transformer.checkpoint_filter_fn(tensors, reference))
    backbone = ViTTiny(ViTTiny.Config(weights=str(shared_weights())), InputSpec(3, *size))
    params = stack([backbone.init(torch_rng(0, "model"))])
    images = torch.randn(2, 3, *size, generator=torch_rng(0, "images"))
    for dtype, tol in ((torch.float32, 1e-5), (torch.float64, 1e-12)):
        with torch.no_grad():
            expected = reference.to(dtype).forward_features(images.to(dtype))[:, 0]
            typed = {name: tensor.to(dtype) for name, tensor in params.items()}
            features = backbone.features(typed, images.to(dtype)[None])[0]
        scale = expected.abs().max().item()
        assert scale > 1
        torch.testing.assert_close(features, expected, rtol=0, atol=tol * scale)
