"""Users that are made up: long tails, themes, and the same draw every time."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedharmony.correlation import label_correlation
from fedharmony.data.base import datasets
from fedharmony.data.synthetic_users import SyntheticUsers, label_chances
from fedharmony.errors import ConfigError
from fedharmony.experiments.preview import preview
from fedharmony.experiments.settings import load_settings

SMALL = SyntheticUsers.Config(users=60, test=300, classes=40, themes=4, width=8)


def test_the_same_draw_every_time() -> None:
    one, two = (datasets["synthetic_users"](SMALL).load() for _ in range(2))
    assert (one.train.labels == two.train.labels).all()
    first = torch.arange(3)
    assert one.train.images.gather(first, "cpu").equal(two.train.images.gather(first, "cpu"))
    other = datasets["synthetic_users"](SyntheticUsers.Config(**{**vars(SMALL), "seed": 1})).load()
    assert (
        other.train.labels.shape != one.train.labels.shape
        or (other.train.labels != one.train.labels).any()
    )


def test_chances_add_up() -> None:
    chances = label_chances(SMALL)
    assert chances.shape == (4, 40)
    assert chances.sum(1) == pytest.approx(1.0)
    assert (chances[1].argsort()[::-1][:2] == [1, 5]).all()  # theme 1: labels 1, 5, 9, …


def test_tails_themes_and_owners() -> None:
    data = SyntheticUsers(SMALL).load()
    labels, users = data.train.labels, data.train.users
    assert users is not None
    sizes = np.bincount(users)
    assert len(sizes) == 60
    assert sizes.min() >= 1
    assert sizes.max() > 4 * np.median(sizes)  # a long tail of users
    assert labels.sum(1).min() >= 1
    counts = labels.sum(0)
    assert counts[:4].mean() > 5 * counts[-20:].mean()  # and of labels
    phi = label_correlation(labels)[0].numpy()
    same = (np.arange(40) % 4)[:, None] == np.arange(40) % 4
    frequent = np.ix_(range(12), range(12))
    inside = phi[frequent][same[frequent] & ~np.eye(12, dtype=bool)]
    assert inside.mean() > phi[frequent][~same[frequent]].mean() + 0.05
    assert data.test.users is None
    assert len(data.test) == 300


def test_the_built_in_config() -> None:
    split = preview(load_settings("synthetic_users", ["data.classes=80", "data.users=50"]))
    assert len(split.partition.sizes) == 50
    assert split.labels.shape[1] == 80


def test_themes_without_labels_are_refused() -> None:
    with pytest.raises(ConfigError, match="40 themes cannot share"):
        load_settings("synthetic_users", ["data.classes=30"])
