"""Clusters of correlated labels: Algorithm 1 of FedHarmony (arXiv 2604.28024), {S_g}.

SciPy and scikit-learn do the work, on one thread of the CPU, wherever the matrix is: the same
matrix gives the same clusters on every machine with the same libraries.
"""

from __future__ import annotations

import functools
import math
import warnings

import numpy as np
import numpy.typing as npt
import torch
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]
from torch import Tensor

from fedharmony.errors import ConfigError, DataError


def default_groups(num_classes: int) -> int:
    """How many clusters to form when nothing else is known: ``round(sqrt(C))``.

    >>> [default_groups(c) for c in (1, 17, 20, 80, 1628)]
    [1, 4, 4, 9, 40]
    """
    return max(1, round(math.sqrt(num_classes)))


def spectral_clusters(
    matrix: Tensor, groups: int, seed: int, *, n_init: int | None = None
) -> Tensor:
    """Clusters of correlated labels, Algorithm 1.

    Affinity ``S = ½(|R*| + |R*|ᵀ)`` without diagonal; normalised Laplacian
    ``L = D^{-1/2} (D − S) D^{-1/2}``; eigenvectors of its G smallest eigenvalues; rows scaled to
    length 1; k-means. Algorithm 1 is undefined for a label correlated with no other (degree 0):
    such a label is left out and belongs to no cluster.

    Args:
        matrix: Consensus R*, (C, C), with 0 for unknown entries.
        groups: G. With at least as many groups as connected labels each is a cluster of its own.
        seed: Of k-means, see :func:`fedharmony.rng.derived_seed`.
        n_init: Restarts of k-means. None means 50 for up to 80 labels, where they take
            milliseconds and 10 may miss the optimum, so that clusters depend on the seed; else 10.

    Returns:
        Cluster of each label, int64 (C,) on the matrix's device: numbered from 0 in order of first
        appearance, without gaps; −1 for a label in no cluster.

    >>> blocks = torch.block_diag(torch.ones(2, 2), torch.zeros(1, 1), torch.ones(2, 2))
    >>> spectral_clusters(blocks, 2, seed=0)
    tensor([ 0,  0, -1,  1,  1])
    """
    if groups < 1:
        raise ConfigError(f"The number of label clusters must be at least 1, got {groups}.")
    affinity = matrix.detach().cpu().double().abs()
    if not bool(affinity.isfinite().all()):
        raise DataError(
            "The correlation matrix to be clustered has entries that are not finite. "
            "Unknown entries must be 0; look for a client that uploaded NaN."
        )
    affinity = ((affinity + affinity.mT) / 2).fill_diagonal_(0)
    connected = affinity.any(1).nonzero().squeeze(1)
    clusters = affinity.new_full((len(affinity),), -1, dtype=torch.int64)
    if groups == 1:
        clusters[connected] = 0
    elif groups >= len(connected):
        clusters[connected] = torch.arange(len(connected))
    else:
        block = affinity.index_select(0, connected).index_select(1, connected).numpy()
        starts = n_init or (50 if len(affinity) <= 80 else 10)
        clusters[connected] = torch.from_numpy(_partition(block, groups, seed, starts)).to(clusters)
    return clusters.to(matrix.device)


def cluster_agreement(a: Tensor, b: Tensor) -> float:
    """Adjusted Rand index of two clusterings: 1 for the same, about 0 for unrelated ones.

    A label in no cluster (−1) counts as a cluster of its own.

    >>> cluster_agreement(torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 2, 2]))
    1.0
    """
    from sklearn.metrics import adjusted_rand_score

    own = [torch.where(c >= 0, c, -1 - torch.arange(len(c))).numpy() for c in (a.cpu(), b.cpu())]
    return float(adjusted_rand_score(*own))


@functools.cache
def _thread_pools() -> ThreadpoolController:
    """The thread pools of the loaded libraries; looking for them takes longer than clustering."""
    return ThreadpoolController()


def _partition(
    affinity: npt.NDArray[np.float64], groups: int, seed: int, n_init: int
) -> npt.NDArray[np.intp]:
    """Steps 2 to 5 of Algorithm 1, for labels that all have a neighbour."""
    # Deferred: scikit-learn and SciPy take a second to import, and only clustering needs them. Not
    # later than here: their thread pools must be loaded when the pools are looked for.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    # One thread: sums that threads share come out in another order, with other last bits.
    with _thread_pools().limit(limits=1), warnings.catch_warnings():
        # If rows coincide, k-means may find fewer clusters than asked for, and says so.
        warnings.simplefilter("ignore", ConvergenceWarning)
        rows = _spectral_embedding(affinity, groups)
        found = KMeans(groups, n_init=n_init, random_state=seed).fit_predict(rows)
    _, first_seen, index = np.unique(found, return_index=True, return_inverse=True)
    order: npt.NDArray[np.intp] = first_seen.argsort().argsort()[index]
    return order


def _spectral_embedding(affinity: npt.NDArray[np.float64], groups: int) -> npt.NDArray[np.float64]:
    """Steps 2 to 4 of Algorithm 1, (C, G); the largest entry of an eigenvector is made positive."""
    from scipy.linalg import eigh

    scale = affinity.sum(1) ** -0.5
    laplacian = np.eye(len(affinity)) - scale[:, None] * affinity * scale
    vectors = eigh(laplacian, subset_by_index=(0, groups - 1))[1]  # LAPACK finds these alone
    largest = np.abs(vectors).argmax(0)
    vectors = vectors * np.where(vectors[largest, np.arange(groups)] < 0, -1, 1)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    rows: npt.NDArray[np.float64] = vectors / length.clip(1e-12)
    return rows
