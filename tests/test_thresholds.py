"""Thresholds of labels: the highest F1 by trying all, held-out images that nobody trains on."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedharmony.experiments.build import assemble
from fedharmony.experiments.evaluate import score
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.run import start
from fedharmony.experiments.settings import load_settings
from fedharmony.metrics import best_thresholds

SMALL = [
    *("data.train=90", "data.test=23", "split.clients=3", "run.rounds=1", "split.name=iid"),
    *("train.epochs=1", "engine.threads=1", "model.width=16", "model.depth=1", "model.heads=2"),
    "run.method=fedavg",
]


def f1(scores: np.ndarray, targets: np.ndarray, threshold: float) -> float:
    predicted = scores >= threshold
    return 2 * (predicted & (targets == 1)).sum() / (predicted.sum() + targets.sum())


def test_thresholds_by_hand() -> None:
    """Scores 0.9, 0.6, 0.4, 0.2 with labels 1, 0, 1, 0.

    Predicting 1, 2, 3 or 4 images gives F1 = 2/3, 2/4, 4/5 and 4/6: three images are best, and the
    middle between 0.4 and 0.2 is 0.3. A label with positives only is best predicted everywhere:
    half of its lowest score, 0.1. A label without positives keeps the default.
    """
    scores = np.array([[0.9, 0.9, 0.9], [0.6, 0.6, 0.6], [0.4, 0.4, 0.4], [0.2, 0.2, 0.2]])
    targets = np.array([[1, 1, 0], [0, 1, 0], [1, 1, 0], [0, 1, 0]])
    found = best_thresholds(scores, targets, default=0.7)
    np.testing.assert_allclose(found, [0.3, 0.1, 0.7])
    # One image and all four are equally good (2/3 and 4/6): the higher threshold is taken.
    tied = best_thresholds(scores[:, :1], [[1], [0], [0], [1]], default=0.5)
    np.testing.assert_allclose(tied, [0.75])
    # Without the third image, one image is best (2/2): the middle of 0.9 and 0.6.
    known = np.ones((4, 3), bool)
    known[2] = False
    np.testing.assert_allclose(best_thresholds(scores, targets, 0.7, known)[0], 0.75)


@given(st.lists(st.tuples(st.integers(0, 8), st.booleans()), min_size=1, max_size=30))
def test_no_other_threshold_is_better(pairs: list[tuple[int, bool]]) -> None:
    """Many equal scores; thresholds at and between all levels are tried."""
    scores = np.array([[level / 8] for level, _ in pairs], np.float32)
    targets = np.array([[int(hit)] for _, hit in pairs])
    (found,) = best_thresholds(scores, targets, default=0.5)
    if not targets.any():
        assert found == 0.5
        return
    best = max(f1(scores, targets, t) for t in np.arange(0, 17) / 16)
    assert f1(scores, targets, found) == pytest.approx(best)


def test_a_run_chooses_thresholds_on_images_that_nobody_trains_on(tmp_path: Path) -> None:
    """A third of 30 images of each of three clients; with split.holdout, apart from those too."""
    settings = load_settings("demo", [*SMALL, "run.thresholds=0.3333"])
    assembly = assemble(settings)
    part = assembly.for_thresholds
    assert part is not None
    assert len(part) == 30
    assert {k: len(v) for k, v in assembly.clients.items()} == {0: 20, 1: 20, 2: 20}
    assert dict(assembly.blueprint.facts.sizes) == {0: 20, 1: 20, 2: 20}
    trained = np.concatenate(list(assembly.clients.values()))
    left = np.setdiff1d(np.arange(90), trained)
    np.testing.assert_array_equal(part.labels, assembly.data.train.labels[left])
    folder = RunFolder(tmp_path / "run")
    results = start(settings, folder, lambda event: None)
    found = results["thresholds"]
    state = folder.load_state(folder.open()).state
    scores, labels = score(assembly, state, part.images), part.labels
    expected = best_thresholds(scores, labels, settings.metrics.threshold)
    np.testing.assert_allclose(found["per_label"], expected)
    assert found["images"] == 30
    assert found["positives"] == labels.sum(0).tolist()
    assert set(found["metrics"]) == {"CP", "CR", "CF1", "OP", "OR", "OF1"}
    tests, truth = score(assembly, state, assembly.data.test.images), assembly.data.test.labels
    hits = ((tests >= expected) & (truth == 1)).sum()
    assert found["metrics"]["OR"] == pytest.approx(hits / truth.sum())

    both = assemble(load_settings("demo", [*SMALL, "run.thresholds=0.2", "split.holdout=0.2"]))
    assert both.for_thresholds is not None
    sizes = [len(both.for_thresholds), len(both.data.test), *map(len, both.clients.values())]
    assert sizes == [15, 18, 19, 19, 19]


def test_without_held_out_images_there_are_no_thresholds(tmp_path: Path) -> None:
    settings = load_settings("demo", SMALL)
    assert assemble(settings).for_thresholds is None
    results = start(settings, RunFolder(tmp_path / "run"), lambda event: None)
    assert results["thresholds"] is None
