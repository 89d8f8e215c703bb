"""What the report makes of scores: counts by hand, panels, and runs that kept none."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import precision_recall_curve

from fake_run import class_names, write_fake_comparison, write_fake_run
from fedharmony.data.base import LabelledImages, TensorImages
from fedharmony.errors import CheckpointError
from fedharmony.experiments.scores import (
    Examples,
    Scores,
    load_examples,
    save_examples,
    save_scores,
)
from fedharmony.report.load import load
from fedharmony.report.measures import (
    decide,
    overlooked_beside,
    reliability,
    taken_for,
    trade,
    worst_decile,
)
from fedharmony.report.page import write_report
from fedharmony.report.panel import sections
from fedharmony.report.panels.examples import _wrapped, chosen
from fedharmony.report.remarks import remarks

OURS = {"precision-recall", "mistakes", "examples", "calibration", "users"}


def scores_of(values: list[list[float]], labels: list[list[int]], **more: Any) -> Scores:
    scores, truth = np.array(values, np.float16), np.array(labels, np.uint8)
    ids, classes = map(str, range(len(truth))), map(str, range(truth.shape[1]))
    return Scores(scores, truth, tuple(ids), tuple(classes), **more)


# -- measures -------------------------------------------------------------------------------------


def test_pairs_of_mistakes_by_hand() -> None:
    """Image 0 has label 0, and 1 is given: 0 taken for 1. Image 1 has 0 and 2, and 2 is found.

    In image 2 the same mistake as in image 0 does not count where label 0 is unknown.
    """
    values = [[0.1, 0.9, 0.0], [0.2, 0.3, 0.8], [0.1, 0.9, 0.0]]
    labels = [[1, 0, 0], [1, 0, 1], [1, 0, 0]]
    made = decide(scores_of(values, labels), np.full(3, 0.5))
    assert made.found.sum() == 1
    assert made.missed.sum() == 3
    assert made.wrong.sum() == 2
    assert taken_for(made).tolist() == [[0, 2, 0], [0, 0, 0], [0, 0, 0]]
    assert overlooked_beside(made).tolist() == [[0, 0, 1], [0, 0, 0], [0, 0, 0]]
    known = np.ones((3, 3), bool)
    known[2, 0] = False
    masked = decide(scores_of(values, labels, known=known), np.full(3, 0.5))
    assert taken_for(masked)[0, 1] == 1
    known[0, 1] = False
    assert decide(scores_of(values, labels, known=known), np.full(3, 0.5)).wrong.sum() == 1
    # Label 1 needs 0.95 now: it is no longer given anywhere.
    assert not decide(scores_of(values, labels), np.array([0.5, 0.95, 0.5])).wrong.any()


def test_calibration_by_hand() -> None:
    """Four scores of 0.25 of which two are right, one of 1 that is: ECE = 4/5 · 0.25 + 0 = 0.2.

    A score of 1 belongs to the last bin.
    """
    scores = scores_of([[0.25], [0.25], [0.25], [0.25], [1.0]], [[1], [1], [0], [0], [1]])
    found = reliability(scores)
    assert found.score.tolist() == [0.25, 1.0]
    assert found.share.tolist() == [0.5, 1.0]
    assert found.count.tolist() == [4, 1]
    assert found.error == pytest.approx(0.2)
    three = reliability(scores_of([[0.21], [0.28], [0.31]], [[1], [0], [0]]))
    assert three.count.tolist() == [2, 1]  # from 0.2 to 0.3, and from 0.3 to 0.4
    known = np.array([[False], [True], [True], [True], [True]])
    third = reliability(replace(scores, known=known))  # one of three is right: 3/4 · 1/12
    assert third.error == pytest.approx(3 / 4 * (1 / 3 - 0.25))


@given(st.lists(st.tuples(st.integers(0, 9), st.booleans()), min_size=1, max_size=40))
def test_curves_are_those_of_scikit_learn(pairs: list[tuple[int, bool]]) -> None:
    scores = np.array([level / 16 for level, _ in pairs])
    present = np.array([hit for _, hit in pairs])
    if not present.any():
        return
    curve = trade(scores, present, scores >= 0.25)
    precision, recall, thresholds = precision_recall_curve(present, scores)
    np.testing.assert_allclose(curve.recall, recall[:-1][::-1])
    np.testing.assert_allclose(curve.precision, precision[:-1][::-1])
    if (scores >= 0.25).any():
        place = np.searchsorted(thresholds, 0.25)
        assert curve.at == pytest.approx((recall[place], precision[place]))
    else:
        assert curve.at is None


def test_the_worst_tenth_by_hand() -> None:
    """Of 25 users the worst two; of three, the worst."""
    assert worst_decile([i / 100 for i in range(25)]) == pytest.approx(0.005)
    assert worst_decile([0.4, 0.2, 0.9]) == 0.2


# -- example images -------------------------------------------------------------------------------


def test_examples_are_chosen_by_the_stated_rule() -> None:
    """Errors 0, 0, 5, 4, 1, 0 of images with 1, 3, 5, 0, 1, 2 labels."""
    missed, wrong = np.array([0, 0, 4, 0, 1, 0.0]), np.array([0, 0, 1, 4, 0, 0.0])
    found = list(chosen(missed, wrong, np.array([1, 3, 5, 0, 1, 2])))
    assert found == [
        *(("Fewest errors", 1), ("Fewest errors", 5)),
        *(("Most missed", 2), ("Most missed", 4)),
        *(("Most wrong", 3), ("Most wrong", 0)),
    ]


def test_examples_are_small_and_at_equal_distances(tmp_path: Path) -> None:
    """Ten images of 192 pixels, of which the first has no label: three of nine, halved."""
    import torch

    pixels = torch.arange(10, dtype=torch.uint8)[:, None, None, None].expand(10, 3, 192, 192)
    labels = np.ones((10, 2), np.uint8)
    labels[0] = 0
    test = LabelledImages(TensorImages(pixels.contiguous()), labels)
    save_examples(tmp_path, test, 3)
    found = load_examples(tmp_path)
    assert found is not None
    assert found.rows.tolist() == [1, 5, 9]
    assert found.pixels.shape == (3, 3, 96, 96)
    assert found.pixels[:, 0, 0, 0].tolist() == [1, 5, 9]
    other = tmp_path / "other"
    other.mkdir()
    save_examples(other, test, 0)
    vectors = LabelledImages(TensorImages(torch.zeros(10, 4)), labels)
    save_examples(other, vectors, 3)
    assert load_examples(other) is None
    (other / "examples.safetensors").write_bytes(b"nonsense")
    with pytest.raises(CheckpointError, match="damaged"):
        load_examples(other)
    with pytest.raises(ValueError, match="numbers of images"):
        Examples(np.arange(2), np.zeros((3, 3, 4, 4), np.uint8))


def test_lists_of_labels_are_wrapped_and_cut() -> None:
    assert _wrapped([], 20, "found") == []
    assert _wrapped(["a"] * 8, 100, "wrong") == ["wrong: a, a, a, a, a, a, 2 more"]
    assert _wrapped(["cat", "dog"], 7) == ["cat,", "dog"]


# -- panels ---------------------------------------------------------------------------------------


def with_scores(folder: Path, seed: int = 0, classes: int = 6, images: int = 40) -> Path:
    """Add scores, example images, thresholds and users to a run folder."""
    rng, truth = np.random.default_rng(seed), np.random.default_rng(9)
    labels = (truth.random((images, classes)) < 0.4).astype(np.uint8)
    values = np.clip(0.25 + 0.4 * labels + rng.normal(0, 0.2, labels.shape), 0, 1)
    ids = tuple(f"{i}.jpg" for i in range(images))
    scores = Scores(values.astype(np.float16), labels, ids, tuple(class_names(classes)))
    save_scores(folder, scores, 10**6)
    import torch

    pixels = torch.from_numpy(truth.integers(0, 255, (images, 3, 8, 8), dtype=np.uint8))
    save_examples(folder, LabelledImages(TensorImages(pixels), labels), 12)
    file = folder / "results.json"
    results = json.loads(file.read_text())
    results["thresholds"] = {
        **{"per_label": [0.4] * classes, "images": 30},
        "metrics": {"CF1": 0.7, "OF1": 0.8},
    }
    each = [{"user": f"u{i}", "images": 4, "O-mAP": 0.3 + 0.05 * i} for i in range(11)]
    results["per_user"] = {"users": 11, "each": [*each, {"user": "x", "O-mAP": None}]}
    file.write_text(json.dumps(results))
    return folder


def test_a_run_with_scores_has_all_panels(tmp_path: Path) -> None:
    folder = with_scores(write_fake_run(tmp_path / "run", classes=6, rounds=3))
    runs = load(folder)
    found = sections(runs)
    assert set(found) >= OURS
    assert len(found["examples"].pictures) == 6
    page = write_report(folder).read_text()
    assert page.count("data:image/jpeg;base64,") == 6
    facts = dict(found["users"].facts)
    assert facts["worst tenth, mean"] == "30.0 %"
    assert facts["median"] == "55.0 %"
    assert facts["worst 5"] == "u0 30.0, u1 35.0, u2 40.0, u3 45.0, u4 50.0"
    assert "11 test users" in found["users"].lead
    said = list(remarks(runs))
    assert "OF1" in said[0]
    assert "→ 80.0" in said[0]
    assert any("worst tenth 30.0" in line for line in said)
    assert any("(ECE)" in line for line in said)
    assert any("Most frequent mistake" in line for line in said)


def test_a_comparison_draws_every_method(tmp_path: Path) -> None:
    """Other test images do not stand beside the first method's."""
    write_fake_comparison(tmp_path, methods=("fedavg", "fedprox", "fedharmony"), seeds=(0,))
    folders = sorted(path.parent for path in tmp_path.rglob("results.json"))
    for i, folder in enumerate(folders):
        with_scores(folder, i, classes=20, images=40 if i < 2 else 39)
    runs = load(tmp_path)
    assert len(runs.scored) == 2
    found = sections(runs)
    assert set(found) >= OURS
    assert [name for name, _ in found["mistakes"].keys] == list(runs.scored)
    marks = re.findall("translate", found["precision-recall"].pictures[0].svg)
    assert len(marks) == 2
    assert list(remarks(runs)) == []


def test_a_run_without_scores_has_no_such_panels(tmp_path: Path) -> None:
    folder = write_fake_run(tmp_path / "run", classes=6, rounds=3)
    assert not OURS & set(sections(load(folder)))
    assert list(remarks(load(folder))) == []


def test_damaged_scores_are_named_and_those_of_other_labels_left_out(tmp_path: Path) -> None:
    folder = with_scores(write_fake_run(tmp_path / "run", classes=6, rounds=3))
    save_scores(folder, scores_of([[0.5]], [[1]]), 10)
    assert not (OURS - {"users"}) & set(sections(load(folder)))
    (folder / "scores.safetensors").write_bytes(b"nonsense")
    drawn = sections(load(folder))
    assert all("scores.safetensors is damaged" in drawn[name].lead for name in OURS - {"users"})
