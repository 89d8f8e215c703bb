"""Synthetic users with a long tail of labels: what real photo collections look like, made up.

Nothing here is real. Each user takes a few to many pictures of a few themes; a picture has labels
of one theme and some others, whose frequencies fall off like 1 / rank; its input is the mean of its
labels' random vectors with noise. So there are natural clients of very different sizes, thousands
of labels of which most are rare, and label correlations in blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge, Gt, Le

from fedharmony.data.base import DataSet, LabelledImages, Source, TensorImages, datasets
from fedharmony.errors import ConfigError
from fedharmony.rng import numpy_rng
from fedharmony.types import Labels

#: Labels of a picture beside the first: a Poisson number with this mean.
MORE_LABELS = 3.0
#: Concentration of a user's themes: most users have two or three.
TASTE = 0.1
#: Of the logarithm of the pictures that a user has.
SIZE_MEAN, SIZE_SPREAD = 2.0, 1.0


@datasets.register("synthetic_users")
class SyntheticUsers(Source):
    """Made-up users with feature vectors: long tails of users and labels; offline."""

    @dataclass(frozen=True)
    class Config(Source.Config):
        """How many of what.

        Attributes:
            users: Clients, if the split is "natural".
            most: Pictures that a user has at most.
            test: Test pictures, of other users.
            classes: Labels.
            themes: Groups of labels that occur together.
            theme_strength: Probability that a label is drawn from the picture's theme.
            width: Numbers of an input vector.
            noise: Standard deviation of the noise, where a label's vector has 1.
            seed: Of everything.
        """

        users: Annotated[int, Ge(1), Le(100_000)] = 400
        most: Annotated[int, Ge(1), Le(100_000)] = 200
        test: Annotated[int, Ge(1), Le(100_000)] = 1000
        classes: Annotated[int, Ge(2), Le(10_000)] = 1628
        themes: Annotated[int, Ge(1), Le(1000)] = 40
        theme_strength: Annotated[float, Ge(0), Le(1)] = 0.8
        width: Annotated[int, Ge(1), Le(4096)] = 128
        noise: Annotated[float, Gt(0), Le(100)] = 0.2
        seed: Annotated[int, Ge(0)] = 0

        def __post_init__(self) -> None:
            """Refuse themes without a label."""
            super().__post_init__()
            if self.classes < self.themes:
                raise ConfigError(
                    f"data.themes = {self.themes} themes cannot share data.classes = "
                    f"{self.classes} labels. Take fewer themes, or more labels."
                )

    config: Config

    def load(self) -> DataSet:
        """Draw users, their pictures, and test pictures of as many other users."""
        config = self.config
        rng = numpy_rng(config.seed, "synthetic_users")
        vectors = rng.normal(size=(config.classes, config.width))
        sizes = user_sizes(config, rng)
        names = tuple(f"theme {c % config.themes} label {c}" for c in range(config.classes))
        owners = np.repeat(np.arange(config.users), sizes)
        strangers = rng.integers(0, config.test, config.test)
        train = self._part(owners, vectors, rng)
        test = self._part(strangers, vectors, rng)
        return DataSet(self.name, names, train, LabelledImages(test.images, test.labels))

    def _part(
        self,
        owners: npt.NDArray[np.int64],
        vectors: npt.NDArray[np.float64],
        rng: np.random.Generator,
    ) -> LabelledImages:
        config = self.config
        taste = rng.dirichlet(np.full(config.themes, TASTE), int(owners.max()) + 1)
        themes = (taste[owners].cumsum(1) > rng.random((len(owners), 1))).argmax(1)
        labels = draw_labels(config, themes, rng)
        inputs = labels @ vectors / labels.sum(1, keepdims=True)
        inputs += config.noise * rng.normal(size=inputs.shape)
        images = TensorImages(torch.from_numpy(inputs.astype(np.float32)))
        return LabelledImages(images, labels, users=owners)


def user_sizes(config: SyntheticUsers.Config, rng: np.random.Generator) -> npt.NDArray[np.int64]:
    """Pictures of each user: log-normal, at least one."""
    drawn = np.exp(rng.normal(SIZE_MEAN, SIZE_SPREAD, config.users))
    return np.clip(drawn.round().astype(np.int64), 1, config.most)


def label_chances(config: SyntheticUsers.Config) -> npt.NDArray[np.float64]:
    """Chance of each label in one draw, by theme: 1 / rank, from the theme or from all.

    Label c belongs to theme c mod themes and has rank c + 1.

    >>> config = SyntheticUsers.Config(classes=4, themes=2, theme_strength=0.5)
    >>> label_chances(config)[0].round(3).tolist()  # ½ · (¾, 0, ¼, 0) + ½ · (1, ½, ⅓, ¼) / 2.083
    [0.615, 0.12, 0.205, 0.06]
    """
    ranks = 1.0 / np.arange(1, config.classes + 1)
    own = (np.arange(config.classes) % config.themes) == np.arange(config.themes)[:, None]
    inside = own * ranks
    inside /= inside.sum(1, keepdims=True)
    everywhere = ranks / ranks.sum()
    chances: npt.NDArray[np.float64] = (
        config.theme_strength * inside + (1 - config.theme_strength) * everywhere
    )
    return chances


def draw_labels(
    config: SyntheticUsers.Config, themes: npt.NDArray[np.int64], rng: np.random.Generator
) -> Labels:
    """Labels of pictures with these themes, ``(N, C)``; each has one at least."""
    ends = label_chances(config).cumsum(1)
    counts = 1 + rng.poisson(MORE_LABELS, len(themes))
    labels = np.zeros((len(themes), config.classes), np.uint8)
    for place in range(int(counts.max())):
        rows = np.flatnonzero(counts > place)
        for theme in np.unique(themes[rows]):
            chosen = rows[themes[rows] == theme]
            drawn = np.searchsorted(ends[theme], rng.random(len(chosen)) * ends[theme, -1])
            labels[chosen, np.minimum(drawn, config.classes - 1)] = 1
    return labels
