"""Scores of the test images: what is written is what was computed, and what is damaged is told."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open

from fedharmony.errors import CheckpointError
from fedharmony.experiments import scores as scoring
from fedharmony.experiments.build import assemble
from fedharmony.experiments.evaluate import evaluate
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.run import start
from fedharmony.experiments.scores import Scores, has_scores, load_scores, save_scores, scores_of
from fedharmony.experiments.settings import load_settings

SMALL = [
    *("data.train=60", "data.test=23", "split.clients=3", "run.rounds=1", "split.name=iid"),
    *("train.epochs=1", "engine.threads=1", "model.width=16", "model.depth=1", "model.heads=2"),
    "run.method=fedavg",
]


def some(known: bool = True, users: bool = True) -> Scores:
    """Two images, three labels."""
    return Scores(
        np.array([[0.1, 0.25, 1.0], [0.5, 0.0, 0.75]], np.float16),
        np.array([[0, 1, 1], [1, 0, 0]], np.uint8),
        ("a.jpg", "ß/b.jpg"),
        ("cat", "dog", "cow"),
        np.array([[True, False, True], [True, True, True]]) if known else None,
        ("ann", "bob") if users else None,
    )


@pytest.mark.parametrize(("known", "users"), [(True, True), (False, False)])
def test_scores_come_back_as_they_were(tmp_path: Path, known: bool, users: bool) -> None:
    written = some(known, users)
    assert not has_scores(tmp_path)
    save_scores(tmp_path, written, 6)
    found = load_scores(tmp_path)
    assert has_scores(tmp_path)
    assert found.scores.dtype == np.float16
    np.testing.assert_array_equal(found.scores, written.scores)
    np.testing.assert_array_equal(found.labels, written.labels)
    if known:
        np.testing.assert_array_equal(found.known, written.known)
    else:
        assert found.known is None
    assert (found.ids, found.classes, found.users) == (written.ids, written.classes, written.users)


def test_the_same_scores_give_the_same_bytes(tmp_path: Path) -> None:
    """One entry in the header: the format writes several in any order."""
    save_scores(tmp_path, some(), 6)
    with safe_open(tmp_path / "scores.safetensors", framework="numpy") as file:
        assert list(file.metadata()) == ["names"]


def test_too_many_scores_are_not_kept_and_that_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six numbers are too many for a limit of five; what an earlier try left goes."""
    save_scores(tmp_path, some(), 6)
    with caplog.at_level(logging.WARNING):
        save_scores(tmp_path, some(), 5)
    assert not has_scores(tmp_path)
    assert "there are 6" in caplog.text
    assert "run.scores allows 5" in caplog.text
    monkeypatch.setattr(scoring, "MOST_NAMES", 10)
    save_scores(tmp_path, some(), 6)
    assert not has_scores(tmp_path)


def test_missing_and_damaged_scores_are_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="has no scores"):
        load_scores(tmp_path)
    file = tmp_path / "scores.safetensors"
    file.write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="damaged"):
        load_scores(tmp_path)
    with pytest.raises(ValueError, match="different shapes"):
        replace(some(), ids=("a",))


def test_a_run_keeps_the_scores_it_is_measured_by(tmp_path: Path) -> None:
    """Half precision of the very scores; images without names have numbers."""
    settings = load_settings("demo", SMALL)
    folder = RunFolder(tmp_path / "run")
    start(settings, folder, lambda event: None)
    found = load_scores(folder.path)
    assembly = assemble(settings)
    state = folder.load_state(folder.open()).state
    scores = evaluate(assembly, state).scores
    expected = scores_of(scores, assembly.data.test, assembly.data.classes)
    np.testing.assert_array_equal(found.scores, expected.scores)
    np.testing.assert_array_equal(found.scores, scores.astype(np.float16))
    np.testing.assert_array_equal(found.labels, assembly.data.test.labels)
    assert len(found.ids) == 23
    assert found.classes == assembly.data.classes
