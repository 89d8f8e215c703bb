"""Metrics from what parts of a test set tell: exact, or within stated bounds."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedharmony.errors import DataError
from fedharmony.metrics import MetricOptions, average_precision, evaluate, structure_metrics
from fedharmony.metrics.parts import (
    BINS,
    TYPES,
    Part,
    boundaries,
    part_of,
    pool,
    precision_bounds,
    read_part,
    structure_of,
)

NUMBERS = ("mAP", "O-mAP", "CP", "CR", "CF1", "OP", "OR", "OF1")


def drawn(seed: int, images: int = 60, classes: int = 5, coarse: bool = False) -> tuple:
    rng = np.random.default_rng(seed)
    labels = (rng.random((images, classes)) < 0.3).astype(np.uint8)
    scores = np.clip(labels * 0.3 + rng.random((images, classes)) * 0.7, 0, 1).astype(np.float32)
    scores = np.round(scores, 1) if coarse else scores
    known = rng.random((images, classes)) < 0.8
    return scores.astype(np.float32), labels, known


def told(
    scores: np.ndarray, labels: np.ndarray, known: np.ndarray | None, exact: bool, at: float = 0.5
) -> list[Part]:
    """Three parts, as they come out of a parcel."""
    parts = []
    for rows in (slice(0, 11), slice(11, 40), slice(40, None)):
        mask = None if known is None else known[rows]
        part = part_of(scores[rows], labels[rows], mask, at, exact)
        options = MetricOptions(threshold=at)
        parts.append(read_part(part.tensors(at), part.images, labels.shape[1], options))
    return parts


@pytest.mark.parametrize("coarse", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_sorted_scores_give_every_metric_exactly(coarse: bool, masked: bool) -> None:
    scores, labels, known = drawn(3, coarse=coarse)
    known = known if masked else None
    pooled = pool(told(scores, labels, known, exact=True))
    expected = evaluate(scores, labels, known=known)
    found = pooled.metrics(MetricOptions())
    assert found.as_dict() == expected.as_dict()
    assert found.n_images == expected.n_images == 60
    assert found.per_label_ap.tolist() == expected.per_label_ap.tolist()


@pytest.mark.parametrize("threshold", [0.5, 0.37, 1 / 3])
def test_counts_leave_the_operating_point_exact(threshold: float) -> None:
    """A score just below the threshold stays below it, whatever the boundaries beside it."""
    scores, labels, known = drawn(4)
    scores[:10, 0] = np.float32(threshold)
    scores[10:20, 0] = np.nextafter(np.float32(threshold), np.float32(0))
    options = MetricOptions(threshold=threshold)
    pooled = pool(told(scores, labels, known, exact=False, at=threshold))
    expected = evaluate(scores, labels, options, known).as_dict()
    found = pooled.metrics(options).as_dict()
    assert {n: found[n] for n in NUMBERS[2:]} == {n: expected[n] for n in NUMBERS[2:]}
    assert found["mAP"] == pytest.approx(expected["mAP"], abs=0.005)
    low, high = pooled.map_bounds()
    assert low <= expected["mAP"] <= high


def test_bounds_with_numbers_to_recompute() -> None:
    """Boundaries 0.8 (one hit, one other) and 0.4 (two hits, one other); three hits in all.

    Low: the others of a boundary come first. 1/2; then 2/(2 + 2), 3/(3 + 2). Sum 1.6, by 3.
    High: they come last, and hits are tied. 1/1; then 3/(3 + 1) twice. Sum 2.5, by 3.
    """
    scores = np.array([0.8, 0.8, 0.4, 0.4, 0.4], np.float32)
    hits = np.array([True, False, True, True, False])
    low, high = precision_bounds(scores, hits)
    assert (low, high) == (pytest.approx(1.6 / 3), pytest.approx(2.5 / 3))


@settings(max_examples=60)
@given(st.integers(0, 10**6), st.integers(2, 30), st.integers(2, 9))
def test_average_precision_lies_within_its_bounds(seed: int, images: int, steps: int) -> None:
    """Against scores before they were rounded down to ``steps`` boundaries, ties among them."""
    rng = np.random.default_rng(seed)
    scores, hits = rng.integers(0, 40, images) / 40, rng.random(images) < 0.5
    hits[0] = True
    rounded = (np.floor(scores * steps) / steps).astype(np.float32)
    low, high = precision_bounds(rounded, hits)
    assert low - 1e-12 <= average_precision(scores, hits) <= high + 1e-12
    assert low - 1e-12 <= average_precision(rounded, hits) <= high + 1e-12


@pytest.mark.parametrize("masked", [False, True])
def test_sums_over_pairs_give_the_structure(masked: bool) -> None:
    scores, labels, known = drawn(5)
    known = known if masked else None
    found = asdict(structure_of(told(scores, labels, known, exact=True)))
    expected = asdict(structure_metrics(scores, labels, known=known))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, atol=1e-12, err_msg=name)


def test_rounding_down_keeps_the_order_of_images_out() -> None:
    """Of equal scores hits come last, in whatever order images stand."""
    part = part_of(
        np.array([[0.5], [0.5], [0.1]], np.float32), np.array([[1], [0], [1]]), None, 0.5, True
    )
    assert part.scores.tolist() == [np.float32(0.1), 0.5, 0.5]
    assert part.hits.tolist() == [True, False, True]
    assert len(boundaries(0.5)) == BINS + 1  # the threshold is one of them
    assert len(boundaries(0.3)) == BINS + 2


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("pairs", torch.full((7, 5, 5), torch.nan), "not numbers"),
        ("pairs", torch.zeros(7, 5, 5), "not those of its scores"),
        ("pairs", torch.zeros(7, 4, 4), "missing"),
        ("known", torch.full((5,), 61), "more images than it says"),
        ("known", torch.full((5,), -1), "how many scores"),
        ("scores", torch.full((300,), 2.0), "outside"),
        ("hits", torch.ones(3), "not as many"),
        ("bins", torch.zeros(5, 2, 7), "another form"),
        ("bins", torch.full((5, 2, BINS + 1), -1), "another form"),
        ("bins", torch.full((5, 2, BINS + 1), 2**31 - 1, dtype=torch.int32), "not as many"),
    ],
)
def test_what_cannot_be_true_is_refused(name: str, value: torch.Tensor, reason: str) -> None:
    scores, labels, _ = drawn(6)
    tensors = part_of(scores, labels, None, 0.5, True).tensors(0.5) | {name: value.to(TYPES[name])}
    with pytest.raises(DataError, match=reason):
        read_part(tensors, 60, 5, MetricOptions())
    with pytest.raises(DataError, match="other names or types"):
        read_part(tensors | {name: value.half()}, 60, 5, MetricOptions())
