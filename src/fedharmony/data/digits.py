"""Scenes of red and blue handwritten digits: a multi-label task that needs no download.

Every scene is a 3 × 32 × 32 image with one to four digits, each on its own cell of a 4 × 4 grid of
8-pixel cells. A label is a colour and a digit ("red 3"), so there are C = 20. Black digits are
clutter and carry no label. The glyphs are the 1,797 handwritten digits (8 × 8 pixels) that come
with scikit-learn; training and test scenes use different glyphs.

**Label process.** Labels fall into four themes of five, theme = (digit + 2·colour) mod 4, so that
neither a colour nor a digit gives a theme away. A scene draws a theme b uniformly, a number of
digits m, and then m labels independently: with probability ``theme_strength`` from its theme, else
from all labels. With p_b(c) the resulting probability of label c in a draw,

    P(c ∈ scene | b, m) = 1 − (1 − p_b(c))^m
    P(c, c' ∈ scene | b, m) = 1 − (1 − p_b(c))^m − (1 − p_b(c'))^m + (1 − p_b(c) − p_b(c'))^m

and averaging over b and m gives the label correlation φ exactly (:func:`planted_correlation`).
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge, Gt, Le

from fedharmony.data.base import DataSet, LabelledImages, Source, TensorImages, datasets
from fedharmony.rng import numpy_rng
from fedharmony.types import Index

Float64: TypeAlias = npt.NDArray[np.float64]
Float32: TypeAlias = npt.NDArray[np.float32]
Pixels: TypeAlias = npt.NDArray[np.uint8]

COLOURS = ("red", "blue")
CLASSES = tuple(f"{colour} {digit}" for colour in COLOURS for digit in range(10))
THEMES = 4
#: P(m digits) for m = 1, …, 4.
DIGITS_PER_SCENE = np.array([0.2, 0.3, 0.3, 0.2])

#: Where scikit-learn keeps the digits: 64 opacities from 0 to 16 in a row, and the digit.
BUNDLED = "datasets/data/digits.csv.gz"
CELL = 8
GRID = 4
SIDE = CELL * GRID
#: Content of a cell besides a label index.
EMPTY, BLACK = -1, len(CLASSES)
#: Mean paint of red, blue and black digits, in [0, 1].
PAINT = np.array([[0.95, 0.15, 0.10], [0.10, 0.25, 0.95], [0.12, 0.12, 0.12]], np.float32)
#: Scenes rendered at a time: bounds the memory of large data sets.
CHUNK = 2048


@datasets.register("digits")
class Digits(Source):
    """Red and blue handwritten digits in 32 × 32 scenes, with planted co-occurrence; offline."""

    @dataclass(frozen=True)
    class Config(Source.Config):
        """Settings of the scenes; the defaults leave a small model something to get wrong.

        Attributes:
            train: Training scenes.
            test: Test scenes.
            seed: Seed of everything below.
            theme_strength: Probability that a digit's label is drawn from the scene's theme.
            imbalance: How many times the weight of digit 0 in a draw exceeds that of digit 9.
            jitter: Probability that a digit is a pixel off its cell's centre, on either axis.
            contrast: Opacity of the faintest digits; each digit draws from [contrast, 1].
            noise: Standard deviation of the pixel noise, in units of the full range.
            clutter: Probability that a cell without a labelled digit shows a black one.
            occlusion: Probability that a two-pixel strip of a digit is hidden.
        """

        train: Annotated[int, Ge(1), Le(1_000_000)] = 3000
        test: Annotated[int, Ge(1), Le(1_000_000)] = 1000
        seed: Annotated[int, Ge(0)] = 0
        theme_strength: Annotated[float, Ge(0), Le(1)] = 0.8
        imbalance: Annotated[float, Ge(1), Le(1e6)] = 3.0
        jitter: Annotated[float, Ge(0), Le(1)] = 0.05
        contrast: Annotated[float, Gt(0), Le(1)] = 0.5
        noise: Annotated[float, Ge(0), Le(1)] = 0.06
        clutter: Annotated[float, Ge(0), Le(1)] = 0.1
        occlusion: Annotated[float, Ge(0), Le(1)] = 0.1

    config: Config

    def load(self) -> DataSet:
        """Compose the scenes: 3,000 take half a second."""
        arrays = compose(self.config)
        parts = {
            part: LabelledImages(
                TensorImages(torch.from_numpy(arrays[f"{part}_images"])), arrays[f"{part}_labels"]
            )
            for part in ("train", "test")
        }
        planted = planted_correlation(self.config)
        return DataSet(self.name, CLASSES, parts["train"], parts["test"], planted)


def label_themes() -> Index:
    """The theme of every label, ``(C,)``: (digit + 2·colour) mod 4.

    >>> [CLASSES[c] for c in np.flatnonzero(label_themes() == 0)]
    ['red 0', 'red 4', 'red 8', 'blue 2', 'blue 6']
    """
    colour, digit = np.divmod(np.arange(len(CLASSES)), 10)
    return np.asarray((digit + 2 * colour) % THEMES, np.int64)


def draw_probabilities(config: Digits.Config) -> Float64:
    """p_b(c), the probability of label c in one draw of a scene with theme b; ``(themes, C)``.

    Within a theme the weight of a label is imbalance^(−digit / 9).

    >>> p = draw_probabilities(Digits.Config(theme_strength=1.0, imbalance=2.0**9))
    >>> p[0, [0, 12, 4, 16, 8]].round(3).tolist()   # red 0, blue 2, red 4, blue 6, red 8
    [0.751, 0.188, 0.047, 0.012, 0.003]
    """
    digit = np.arange(len(CLASSES)) % 10
    weight = (label_themes() == np.arange(THEMES)[:, None]) * config.imbalance ** (-digit / 9)
    within = weight / weight.sum(1, keepdims=True)
    strength = config.theme_strength
    return np.asarray(strength * within + (1 - strength) * within.mean(0))


def planted_correlation(config: Digits.Config) -> Float64:
    """The exact correlation φ ``(C, C)`` of the label process, unit diagonal.

    φ(c, c') = (P(c, c') − P(c) P(c')) / √(P(c)(1 − P(c)) P(c')(1 − P(c'))), with the probabilities
    of the module's docstring averaged over themes and numbers of digits.

    >>> phi = planted_correlation(Digits.Config())
    >>> bool(phi[0, 4] > 0.1), bool(phi[0, 1] < 0)   # same theme, different themes
    (True, True)
    """
    p = draw_probabilities(config)
    counts = np.arange(1, len(DIGITS_PER_SCENE) + 1)

    def mean_power(absent: Float64) -> Float64:
        """E over b and m of absent_b^m."""
        powers = (absent[..., None] ** counts) @ DIGITS_PER_SCENE
        return np.asarray(powers.mean(0))

    neither = mean_power(1 - p[:, :, None] - p[:, None, :])
    absent = mean_power(1 - p)
    present = 1 - absent
    both = 1 - absent[:, None] - absent[None, :] + neither
    scale = np.sqrt(present * absent)
    phi = (both - np.outer(present, present)) / np.outer(scale, scale)
    np.fill_diagonal(phi, 1.0)
    return np.asarray(phi)


def draw_labels(config: Digits.Config, scenes: int, rng: np.random.Generator) -> Index:
    """The labels of every scene's digits, ``(scenes, 4)``; :data:`EMPTY` past the last digit.

    A label may occur twice in a scene; the label matrix then has one 1.
    """
    slots = len(DIGITS_PER_SCENE)
    count = rng.choice(slots, size=scenes, p=DIGITS_PER_SCENE) + 1
    theme = rng.integers(THEMES, size=scenes)
    cumulative = np.cumsum(draw_probabilities(config), axis=1)[theme]
    # The last bound is left out: rounding may have put it below 1.
    draws = rng.random((scenes, slots))[..., None] >= cumulative[:, None, :-1]
    return np.where(np.arange(slots) < count[:, None], draws.sum(-1), EMPTY)


def compose(config: Digits.Config) -> dict[str, Pixels]:
    """All arrays of the data set: ``{train,test}_images`` and ``{train,test}_labels``.

    >>> arrays = compose(Digits.Config(train=5, test=2))
    >>> {name: array.shape for name, array in arrays.items()}  # doctest: +NORMALIZE_WHITESPACE
    {'train_images': (5, 3, 32, 32), 'train_labels': (5, 20),
     'test_images': (2, 3, 32, 32), 'test_labels': (2, 20)}
    """
    arrays: dict[str, Pixels] = {}
    for part, glyphs in _glyphs(config.seed).items():
        scenes = config.train if part == "train" else config.test
        rng = numpy_rng(config.seed, f"digits/{part}")
        slots = draw_labels(config, scenes, rng)
        chunks = np.split(slots, range(CHUNK, scenes, CHUNK))
        arrays[f"{part}_images"] = np.concatenate(
            [_render(config, chunk, glyphs, rng) for chunk in chunks]
        )
        present = (slots[:, :, None] == np.arange(len(CLASSES))).any(1)
        arrays[f"{part}_labels"] = present.astype(np.uint8)
    return arrays


@dataclass(frozen=True)
class _Glyphs:
    """Handwritten digits sorted by class: opacity ``(n, 8, 8)``, and where each class begins."""

    opacity: Float32
    starts: Index  # (11,)

    def pick(self, digit: Index, u: Float64) -> Float32:
        """One glyph of each wanted digit, chosen by ``u`` in [0, 1)."""
        first, after = self.starts[digit], self.starts[digit + 1]
        return np.asarray(self.opacity[first + (u * (after - first)).astype(np.int64)])


@functools.cache
def _glyphs(seed: int) -> dict[str, _Glyphs]:
    """The bundled digits, two thirds for training and one third for testing."""
    # What its load_digits gives, without importing scikit-learn, which takes a second and more.
    package = importlib.util.find_spec("sklearn")
    assert package is not None, "it is a dependency"
    rows = np.loadtxt(Path(package.origin or "").parent / BUNDLED, delimiter=",")
    opacity = (rows[:, :-1] / 16).astype(np.float32).reshape(-1, CELL, CELL)
    digit = rows[:, -1].astype(np.int64)
    shuffled = numpy_rng(seed, "digits/glyphs").permutation(len(digit))
    cut = len(digit) * 2 // 3
    glyphs = {}
    for part, chosen in (("train", shuffled[:cut]), ("test", shuffled[cut:])):
        by_class = chosen[np.argsort(digit[chosen], kind="stable")]
        starts = np.searchsorted(digit[by_class], np.arange(11))
        glyphs[part] = _Glyphs(opacity[by_class], np.asarray(starts, np.int64))
    return glyphs


def _render(
    config: Digits.Config, slots: Index, glyphs: _Glyphs, rng: np.random.Generator
) -> Pixels:
    """Paint scenes with the given labels: uint8 ``(n, 3, 32, 32)``."""
    n, cells = len(slots), GRID * GRID
    content = _place(config, slots, rng)
    paint_index, digit = np.divmod(np.where(content == EMPTY, BLACK, content), 10)
    digit = np.where(content == BLACK, rng.integers(10, size=(n, cells)), digit)
    paint = PAINT[paint_index] + rng.uniform(-0.07, 0.07, (n, cells, 3))
    contrast = rng.uniform(config.contrast, 1, (n, cells))
    opacity = glyphs.pick(digit, rng.random((n, cells))) * contrast[..., None, None]
    opacity *= _visible(config, (n, cells), rng)
    moved = rng.random((2, n, cells)) < config.jitter
    jitter = moved * rng.choice([-1, 1], size=moved.shape)

    # One pixel of margin on every side takes what jitter pushes over the edge.
    canvas = _background(n, rng)
    for cell in range(cells):
        row = np.flatnonzero(content[:, cell] != EMPTY)
        top, left = (
            CELL * at + 1 + jitter[axis, row, cell] for axis, at in enumerate(divmod(cell, GRID))
        )
        y, x = top[:, None] + np.arange(CELL), left[:, None] + np.arange(CELL)
        where = (
            row[:, None, None, None],
            np.arange(3)[:, None, None],
            y[:, None, :, None],
            x[:, None, None, :],
        )
        alpha = opacity[row, cell, None]
        canvas[where] += alpha * (paint[row, cell, :, None, None] - canvas[where])
    scene = canvas[:, :, 1:-1, 1:-1]
    scene += config.noise * rng.standard_normal(scene.shape, np.float32)
    return np.asarray(np.rint(scene.clip(0, 1) * 255), np.uint8)


def _place(config: Digits.Config, slots: Index, rng: np.random.Generator) -> Index:
    """Put every scene's digits on different cells and clutter on some others: ``(n, 16)``."""
    n = len(slots)
    content = np.full((n, GRID * GRID), EMPTY, np.int64)
    cells = rng.random(content.shape).argsort(1)[:, : slots.shape[1]]
    np.put_along_axis(content, cells, slots, axis=1)
    clutter = (content == EMPTY) & (rng.random(content.shape) < config.clutter)
    content[clutter] = BLACK
    return content


def _visible(
    config: Digits.Config, shape: tuple[int, int], rng: np.random.Generator
) -> npt.NDArray[np.bool_]:
    """``(*shape, 8, 8)``, False on the hidden strip: two rows or two columns of the cell."""
    start = rng.integers(1, CELL - 2, size=shape)[..., None]
    strip = (np.arange(CELL) >= start) & (np.arange(CELL) < start + 2)
    upright = rng.random(shape)[..., None, None] < 0.5
    hit = rng.random(shape)[..., None, None] < config.occlusion
    return ~(hit & np.where(upright, strip[..., None, :], strip[..., :, None]))


def _background(n: int, rng: np.random.Generator) -> Float32:
    """Mid-grey, slightly tinted grounds with a linear slope: ``(n, 3, 34, 34)``."""
    ramp = np.linspace(-0.5, 0.5, SIDE + 2, dtype=np.float32)
    level = rng.uniform(0.4, 0.6, (n, 1, 1, 1)) + rng.uniform(-0.04, 0.04, (n, 3, 1, 1))
    down, right = rng.uniform(-0.15, 0.15, (2, n, 1, 1, 1))
    return np.asarray(level + down * ramp[:, None] + right * ramp, np.float32)
