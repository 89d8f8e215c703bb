"""The order of labels along heat maps: related ones side by side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from fedharmony.report.load import Runs, RunView
from fedharmony.report.svg import Array
from fedharmony.types import Index


@dataclass(frozen=True, eq=False)
class LabelOrder:
    """An order of the labels and the clusters along it, as ``(first, one past last)``."""

    index: Index
    clusters: tuple[tuple[int, int], ...] = ()


def label_order(runs: Runs, like: RunView) -> LabelOrder:
    """The order of a run's labels: by the clusters that some run has for them, if any has."""
    clustered = runs.with_matrix("clusters", like)
    if clustered is not None:
        return cluster_order(clustered.matrices["clusters"].astype(np.int64))
    true = like.matrices.get("true")
    return LabelOrder(np.zeros(0, dtype=np.int64) if true is None else spectral_order(true))


def cluster_order(clusters: Index) -> LabelOrder:
    """Labels sorted by cluster; those in none (−1) come last.

    >>> cluster_order(np.array([1, -1, 0, 1])).index.tolist()
    [2, 0, 3, 1]
    """
    keys = np.where(clusters < 0, np.iinfo(np.int64).max, clusters)
    index = np.argsort(keys, kind="stable").astype(np.int64)
    ordered = clusters[index]
    starts = [i for i in range(len(ordered)) if i == 0 or ordered[i] != ordered[i - 1]]
    spans = zip(starts, [*starts[1:], len(ordered)], strict=True)
    return LabelOrder(index, tuple((a, b) for a, b in spans if ordered[a] >= 0))


def spectral_order(matrix: Array) -> Index:
    """Labels in the order of the Fiedler vector, so that correlated ones are neighbours.

    The vector belongs to the second smallest eigenvalue of the Laplacian ``D − A`` of the positive
    correlations ``A``; a small constant connects labels that would otherwise stand alone.

    >>> m = np.eye(4); m[0, 2] = m[2, 0] = m[1, 3] = m[3, 1] = 0.9
    >>> spectral_order(m).tolist() in ([0, 2, 1, 3], [1, 3, 0, 2], [2, 0, 3, 1], [3, 1, 2, 0])
    True
    """
    affinity = np.clip(np.nan_to_num(matrix), 0, None) + 1e-3
    np.fill_diagonal(affinity, 0.0)
    laplacian = np.diag(affinity.sum(axis=1)) - affinity
    vector = np.linalg.eigh((laplacian + laplacian.T) / 2)[1][:, min(1, len(matrix) - 1)]
    if vector[np.argmax(np.abs(vector))] < 0:  # the sign of an eigenvector is arbitrary
        vector = -vector
    return np.argsort(vector.round(9), kind="stable").astype(np.int64)
