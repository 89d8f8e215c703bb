"""The search for label sets behind counts: it finds all of them, and nothing else."""

from __future__ import annotations

import importlib
import sys
from collections import Counter
from collections.abc import Iterator
from itertools import combinations_with_replacement, product
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.fixture(scope="module")
def search() -> Iterator[Any]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("reconstruction")
    finally:
        sys.path.remove(str(BENCHMARKS))


def sets_of(labels: np.ndarray) -> Counter[frozenset[int]]:
    return Counter(frozenset(np.flatnonzero(row).tolist()) for row in labels)


def test_counts_of_labels_by_hand(search: Any) -> None:
    """Images {0, 1}, {0}, {}: label 0 twice, label 1 once, both once; no other collection fits."""
    labels = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    pairs = search.counts(*search.told(labels), 3)
    assert pairs.tolist() == [[2, 1], [1, 1]]
    found = search.recovered(pairs, labels.numpy().astype(np.uint8))
    assert found["known"] == found["unique"] == found["counts_right"] == 1


def test_two_collections_with_the_same_counts(search: Any) -> None:
    """{0, 1}, {0, 2}, {1, 2}, {} and {0, 1, 2}, {0}, {1}, {2}: nothing is certain."""
    pairs = np.array([[2, 1, 1], [1, 2, 1], [1, 1, 2]])
    found, complete = search.label_sets(pairs, 4)
    assert complete
    assert len(found) == 2
    assert not search.certain(found)


@settings(max_examples=40)
@given(arrays.arrays(np.uint8, (4, 3), elements=st.integers(0, 1)))
def test_all_collections_are_found(labels: np.ndarray) -> None:
    """Against all 330 collections of four sets of three labels."""
    sys.path.insert(0, str(BENCHMARKS))
    try:
        search = importlib.import_module("reconstruction")
    finally:
        sys.path.remove(str(BENCHMARKS))
    pairs = labels.T.astype(np.int64) @ labels
    expected = []
    for rows in combinations_with_replacement(product((0, 1), repeat=3), 4):
        other = np.array(rows, dtype=np.int64)
        if (other.T @ other == pairs).all():
            expected.append(sets_of(other))
    found, complete = search.label_sets(pairs, 4)
    assert complete
    key = lambda sets: sorted(map(sorted, sets.elements()))  # noqa: E731
    assert sorted(map(key, found)) == sorted(map(key, expected))
    assert sets_of(labels) in found


def test_protections_leave_less(search: Any) -> None:
    """Labels give everything away; noise of one image a pair, and timid scores, nothing."""
    rows = search.measure([6], clients=3)
    known = {row["attacker sees"]: row["known"] for row in rows}
    assert known["R_k of labels"] == 1
    assert known["R_k of scores, off by 0.2"] == known["counts + noise 1"] == 0


def test_the_curves_of_privacy_are_drawn_and_written(search: Any) -> None:
    """Two runs with noise and one without: two marks, one line, one dashed line, their name.

    Curves of VOC 2012 have a panel of their own, if there are any.
    """
    sys.path.insert(0, str(BENCHMARKS))
    try:
        drawn = importlib.import_module("privacy")
    finally:
        sys.path.remove(str(BENCHMARKS))
    rows = [{"curve": "demo", "mAP": 0.4}]
    rows += [{"curve": "demo", "mAP": m, "epsilon": e} for m, e in ((0.1, 1.0), (0.3, 100.0))]
    figure = ElementTree.fromstring(drawn.figure(rows))
    kinds = Counter(element.tag.rpartition("}")[2] for element in figure.iter())
    assert kinds["circle"] == 2
    assert kinds["polyline"] == 1
    assert "demo, 20 clients" in [element.text for element in figure.iter()]
    rows = [{**row, "deviation": None} for row in rows]
    real = [{**row, "curve": "voc", "deviation": 0.02} for row in rows]
    figure = ElementTree.fromstring(drawn.figure([*rows, *real]))
    kinds = Counter(element.tag.rpartition("}")[2] for element in figure.iter())
    assert kinds["circle"] == 4
    assert kinds["g"] == 2
    assert drawn.table([*rows, *real[:2]]).splitlines() == [
        *("| ε | 1 | 100 | ∞ |", "| --- | --: | --: | --: |"),
        *("| demo | 10.0 | 30.0 | 40.0 |", "| voc | 10.0 ± 2.0 |  | 40.0 ± 2.0 |"),
    ]
