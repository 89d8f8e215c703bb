"""Thresholds of labels: one per label, where its F1 is highest on images held out for that."""

from __future__ import annotations

import numpy as np

from fedharmony.metrics.multilabel import Array, Bools, Doubles, Scores, checked_arrays


def best_thresholds(
    scores: Array, targets: Array, default: float, known: Array | None = None
) -> Doubles:
    """Per label, the threshold with the highest F1 = 2 TP / (predicted + positive).

    Between two neighbouring scores every threshold predicts the same; the middle is taken, and
    below the lowest score its half. Of equal F1 the highest threshold is taken. A label without
    positives has the ``default``; entries that are not ``known`` are left out.

    >>> best_thresholds([[0.9], [0.6], [0.4], [0.2]], [[1], [0], [1], [0]], default=0.5)
    array([0.3])
    """
    values, positive, mask = checked_arrays(scores, targets, known)
    found = np.full(values.shape[1], default)
    for label in np.flatnonzero(positive.any(axis=0)):
        kept = slice(None) if mask is None else mask[:, label]
        found[label] = _best_threshold(values[kept, label], positive[kept, label])
    return found


def _best_threshold(scores: Scores, positive: Bools) -> float:
    order = np.argsort(-scores, kind="stable")
    sorted_scores = scores[order].astype(np.float64)
    # Only where the score changes can a threshold lie.
    last = np.flatnonzero(np.append(np.diff(sorted_scores) < 0, True))
    hits = np.cumsum(positive[order])[last]
    f1 = 2 * hits / (last + 1 + positive.sum())
    levels = np.append(sorted_scores[last], 0.0)
    best = int(np.argmax(f1))
    return float((levels[best] + levels[best + 1]) / 2)
