"""The data interface, and the digit scenes: labels, pixels, planted correlation."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedharmony.data.digits as digits
from fedharmony.config import build
from fedharmony.data.base import DataSet, LabelledImages, TensorImages, cache_folder, datasets
from fedharmony.data.digits import CLASSES, Digits, compose, planted_correlation
from fedharmony.errors import ConfigError, DataError
from fedharmony.rng import numpy_rng

SMALL = Digits.Config(train=60, test=30)
CLEAN = Digits.Config(
    train=60, test=30, jitter=0.0, contrast=1.0, noise=0.0, clutter=0.0, occlusion=0.0
)


def same(a: dict[str, np.ndarray], b: dict[str, np.ndarray]) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def arrays_of(data: DataSet) -> dict[str, np.ndarray]:
    found = {}
    for part, content in (("train", data.train), ("test", data.test)):
        found[f"{part}_images"] = content.images.gather(torch.arange(len(content)), "cpu").numpy()
        found[f"{part}_labels"] = content.labels
    return found


# The interface -----------------------------------------------------------------------------------


def test_gather_keeps_the_shape_of_the_index() -> None:
    pixels = torch.randint(0, 256, (5, 3, 4, 6), dtype=torch.uint8)
    images = TensorImages(pixels)
    index = torch.tensor([[4, 0, -1], [2, 2, 1]])
    found = images.gather(index, "cpu")
    assert (len(images), images.shape, found.dtype) == (5, (3, 4, 6), torch.uint8)
    assert found.shape == (2, 3, 3, 4, 6)
    real = index >= 0
    assert torch.equal(found[real], pixels[index[real]])
    assert images.gather(torch.empty(0, 2, dtype=torch.int64), "cpu").shape == (0, 2, 3, 4, 6)
    assert images.to("cpu").pixels is pixels


def test_gather_refuses_an_index_past_the_end() -> None:
    with pytest.raises(IndexError):
        TensorImages(torch.zeros(2, 3, 1, 1, dtype=torch.uint8)).gather(torch.tensor([2]), "cpu")


def test_parts_that_do_not_fit_are_refused() -> None:
    images = TensorImages(torch.zeros(3, 3, 2, 2, dtype=torch.uint8))
    labels = np.zeros((3, 2), np.uint8)
    good = LabelledImages(images, labels, ids=("a", "b", "c"), users=np.array([7, 7, 8]))
    assert len(good) == 3
    with pytest.raises(DataError, match="3 images, 2 labels"):
        LabelledImages(images, labels[:2])
    with pytest.raises(DataError, match="2 ids"):
        LabelledImages(images, labels, ids=("a", "b"))
    with pytest.raises(DataError, match="1 users"):
        LabelledImages(images, labels, users=np.array([1]))
    with pytest.raises(DataError, match="zeros and ones"):
        LabelledImages(images, labels + 2)
    with pytest.raises(DataError, match="known"):
        LabelledImages(images, labels, known=np.ones((3, 1), bool))
    with pytest.raises(DataError, match="uint8"):
        TensorImages(torch.zeros(3, 3, 2, 2))
    with pytest.raises(DataError, match="names 3 classes"):
        DataSet("x", ("a", "b", "c"), good, good)
    with pytest.raises(DataError, match="planted correlation"):
        DataSet("x", ("a", "b"), good, good, planted=np.eye(3))
    other = LabelledImages(TensorImages(torch.zeros(3, 3, 4, 4, dtype=torch.uint8)), labels)
    with pytest.raises(DataError, match="test images of shape"):
        DataSet("x", ("a", "b"), good, other)


def test_cache_folder_follows_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("FEDHARMONY_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", "/nobody")
    assert cache_folder() == Path("/nobody/.cache/fedharmony")
    monkeypatch.setenv("XDG_CACHE_HOME", "/shared")
    assert cache_folder() == Path("/shared/fedharmony")
    monkeypatch.setenv("FEDHARMONY_CACHE", "/own")
    assert cache_folder() == Path("/own")


# Labels ------------------------------------------------------------------------------------------


def test_themes_mix_colours_and_digits() -> None:
    themes = digits.label_themes()
    assert np.bincount(themes).tolist() == [5, 5, 5, 5]
    for theme in range(4):
        names = [CLASSES[c] for c in np.flatnonzero(themes == theme)]
        assert {name.split()[0] for name in names} == {"red", "blue"}
        assert len({name.split()[1] for name in names}) == 5


def test_draw_probabilities_are_distributions() -> None:
    p = digits.draw_probabilities(Digits.Config(theme_strength=0.7, imbalance=4.0))
    member = digits.label_themes() == np.arange(4)[:, None]
    np.testing.assert_allclose(p.sum(1), 1)
    # 0.7 from the theme, and a quarter of the other 0.3 by chance.
    np.testing.assert_allclose((p * member).sum(1), 0.7 + 0.3 / 4)
    assert p[0, 0] / p[0, 8] == pytest.approx(4 ** (8 / 9))  # red 0 and red 8, both theme 0


def test_planted_correlation_by_hand() -> None:
    """Without themes and imbalance every draw has p = 1/20.

    E[0.95^m] = 0.2·0.95 + 0.3·0.9025 + 0.3·0.857375 + 0.2·0.81450625 = 0.88086375 (absent),
    E[0.90^m] = 0.2·0.9 + 0.3·0.81 + 0.3·0.729 + 0.2·0.6561 = 0.77292 (neither of two), so
    P(both) = 1 − 2·0.88086375 + 0.77292 = 0.0111925, and
    φ = (0.0111925 − 0.11913625²) / (0.11913625 · 0.88086375) = −0.028596.
    """
    phi = planted_correlation(Digits.Config(theme_strength=0.0, imbalance=1.0))
    off = ~np.eye(20, dtype=bool)
    np.testing.assert_allclose(phi[off], -0.028596, atol=1e-6)
    assert (np.diag(phi) == 1).all()


def test_planted_correlation_equals_enumeration() -> None:
    """Against all 20 + 20² + 20³ + 20⁴ sequences of labels of every theme, with their weights."""
    config = Digits.Config(theme_strength=0.65, imbalance=5.0)
    p = digits.draw_probabilities(config)
    joint = np.zeros((20, 20))
    for count, chance in enumerate(digits.DIGITS_PER_SCENE, start=1):
        sequences = np.array(list(itertools.product(range(20), repeat=count)))
        present = np.zeros((len(sequences), 20))
        present[np.arange(len(sequences))[:, None], sequences] = 1
        weight = sum(p[theme][sequences].prod(1) for theme in range(4)) / 4 * chance
        joint += present.T @ (present * weight[:, None])
    mean = np.diag(joint)
    spread = np.sqrt(mean * (1 - mean))
    expected = (joint - np.outer(mean, mean)) / np.outer(spread, spread)
    np.testing.assert_allclose(planted_correlation(config), expected, atol=1e-12)


def test_planted_correlation_is_what_samples_show() -> None:
    config = Digits.Config()
    slots = digits.draw_labels(config, 100_000, numpy_rng(0, "test"))
    labels = (slots[:, :, None] == np.arange(20)).any(1)
    planted = planted_correlation(config)
    # Five standard errors of a correlation from 100,000 scenes, 1 / √N each.
    np.testing.assert_allclose(np.corrcoef(labels.T), planted, atol=5 / 100_000**0.5)
    same_theme = digits.label_themes()[:, None] == digits.label_themes()
    off = ~np.eye(20, dtype=bool)
    assert planted[same_theme & off].min() > 0.1 > 0 > planted[~same_theme].max()


# Pixels ------------------------------------------------------------------------------------------


def test_scenes_are_a_data_set() -> None:
    data = datasets["digits"](SMALL).load()
    assert (data.name, len(data.classes), data.classes[3]) == ("digits", 20, "red 3")
    for part, scenes in ((data.train, 60), (data.test, 30)):
        assert (len(part), part.images.shape, part.labels.shape) == (
            scenes,
            (3, 32, 32),
            (scenes, 20),
        )
        assert set(part.labels.sum(1)) <= {1, 2, 3, 4}
    np.testing.assert_array_equal(data.planted, planted_correlation(SMALL))
    assert same(arrays_of(data), compose(SMALL))


def standardised(rows: np.ndarray) -> np.ndarray:
    return np.asarray((rows - rows.mean(1, keepdims=True)) / rows.std(1, keepdims=True))


@pytest.mark.parametrize("part", ["train", "test"])
def test_labels_can_be_read_off_clean_scenes(part: str) -> None:
    """Every coloured cell of a clean scene is a glyph of its part's pool, in its label's colour.

    Red minus blue is the glyph's opacity times a constant, on an almost flat ground: the glyph that
    was painted correlates with it almost perfectly.
    """
    arrays, pool = compose(CLEAN), digits._glyphs(CLEAN.seed)[part]
    glyphs = standardised(pool.opacity.reshape(len(pool.opacity), -1))
    digit = np.repeat(np.arange(10), np.diff(pool.starts))
    for image, labels in zip(arrays[f"{part}_images"], arrays[f"{part}_labels"], strict=True):
        difference = image[0].astype(float) - image[2]
        cells = difference.reshape(4, 8, 4, 8).swapaxes(1, 2).reshape(16, 64)
        coloured = cells[abs(cells).max(1) > 60]
        red = coloured.max(1, keepdims=True) > 60
        likeness = standardised(np.where(red, coloured, -coloured)) @ glyphs.T / glyphs.shape[1]
        assert likeness.max(1).min() > 0.999
        found = {
            CLASSES[d if r else d + 10]
            for d, r in zip(digit[likeness.argmax(1)], red[:, 0], strict=True)
        }
        assert found == {CLASSES[c] for c in np.flatnonzero(labels)}
        assert len(coloured) <= 4


def test_training_and_test_scenes_share_no_glyph() -> None:
    from sklearn.datasets import load_digits

    pools = digits._glyphs(seed=3)
    content = {}
    for part, pool in pools.items():
        digit = np.repeat(np.arange(10), np.diff(pool.starts))
        content[part] = [(d, g.tobytes()) for d, g in zip(digit, pool.opacity, strict=True)]
    pixels, digit = load_digits(return_X_y=True)
    bundled = [
        (d, (g / 16).astype(np.float32).tobytes()) for d, g in zip(digit, pixels, strict=True)
    ]
    assert not set(content["train"]) & set(content["test"])
    assert sorted(content["train"] + content["test"]) == sorted(bundled)
    assert all((np.diff(pool.starts) > 30).all() for pool in pools.values())


@pytest.mark.parametrize(
    "change",
    [{"jitter": 1.0}, {"contrast": 0.1}, {"noise": 0.2}, {"clutter": 1.0}, {"occlusion": 1.0}],
)
def test_every_disturbance_changes_pixels_but_not_labels(change: dict[str, Any]) -> None:
    clean, disturbed = compose(CLEAN), compose(replace(CLEAN, **change))
    assert np.array_equal(clean["train_labels"], disturbed["train_labels"])
    distance = abs(clean["train_images"].astype(int) - disturbed["train_images"]).mean((1, 2, 3))
    assert (distance > 0).mean() > 0.9


def test_scenes_depend_on_the_seed_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    first = compose(SMALL)
    assert same(first, compose(SMALL))
    other = compose(replace(SMALL, seed=1))
    assert not np.array_equal(first["train_images"], other["train_images"])
    assert not np.array_equal(first["train_labels"], other["train_labels"])
    # Large data sets are rendered in chunks, and come out whole.
    monkeypatch.setattr(digits, "CHUNK", 7)
    chunked = compose(SMALL)
    assert np.array_equal(chunked["train_labels"], first["train_labels"])
    assert chunked["train_images"].shape == first["train_images"].shape


def test_settings_are_checked() -> None:
    assert build(Digits.Config, {"noise": 0.3, "train": 5}, "data").noise == 0.3
    for key, value in [
        ("train", 0),
        ("seed", -1),
        ("noise", -0.1),
        ("contrast", 0.0),
        ("clutter", 1.5),
        ("theme_strength", 2.0),
        ("imbalance", 0.5),
    ]:
        with pytest.raises(ConfigError, match=f"data.{key}"):
            build(Digits.Config, {key: value}, "data")
