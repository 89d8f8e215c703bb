"""Clusters of correlated labels: Algorithm 1 of FedHarmony (arXiv 2604.28024), {S_g}.

On a CPU SciPy and scikit-learn do the work. Elsewhere it is done where the matrix is, all restarts
of k-means at once: with 1,628 labels scikit-learn would hold a round up for a tenth of a second.
"""

from __future__ import annotations

import functools
import math
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from threadpoolctl import ThreadpoolController  # type: ignore[import-untyped]
from torch import Tensor

from fedharmony.errors import ConfigError, DataError


def default_groups(num_classes: int) -> int:
    """How many clusters to form when nothing else is known: ``round(sqrt(C))``.

    >>> [default_groups(c) for c in (1, 17, 20, 80, 1628)]
    [1, 4, 4, 9, 40]
    """
    return max(1, round(math.sqrt(num_classes)))


def spectral_clusters(matrix: Tensor, groups: int, seed: int, *, n_init: int = 10) -> Tensor:
    """Clusters of correlated labels, Algorithm 1.

    Affinity ``S = ½(|R*| + |R*|ᵀ)`` without diagonal; normalised Laplacian
    ``L = D^{-1/2} (D − S) D^{-1/2}``; eigenvectors of its G smallest eigenvalues; rows scaled to
    length 1; k-means. Algorithm 1 is undefined for a label correlated with no other (degree 0):
    such a label is left out and belongs to no cluster.

    Args:
        matrix: Consensus R*, (C, C), with 0 for unknown entries.
        groups: G. With at least as many groups as connected labels each is a cluster of its own.
        seed: Of k-means, see :func:`fedharmony.rng.derived_seed`. The same seed gives the same
            clusters, whatever the number of threads.
        n_init: Restarts of k-means.

    Returns:
        Cluster of each label, int64 (C,) on the matrix's device: numbered from 0 in order of first
        appearance, without gaps; −1 for a label in no cluster. On a CPU SciPy and scikit-learn do
        the work; elsewhere it is done where the matrix is.

    >>> blocks = torch.block_diag(torch.ones(2, 2), torch.zeros(1, 1), torch.ones(2, 2))
    >>> spectral_clusters(blocks, 2, seed=0)
    tensor([ 0,  0, -1,  1,  1])
    """
    if groups < 1:
        raise ConfigError(f"The number of label clusters must be at least 1, got {groups}.")
    affinity = matrix.detach().double().abs()
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
        clusters[connected] = torch.arange(len(connected), device=clusters.device)
    else:
        block = affinity.index_select(0, connected).index_select(1, connected)
        clusters[connected] = torch.from_numpy(_partition(block, groups, seed, n_init)).to(clusters)
    return clusters


def cluster_agreement(a: Tensor, b: Tensor) -> float:
    """Adjusted Rand index of two clusterings: 1 for the same, about 0 for unrelated ones.

    A label in no cluster (−1) counts as a cluster of its own.

    >>> cluster_agreement(torch.tensor([0, 0, 1, 1]), torch.tensor([5, 5, 2, 2]))
    1.0
    """
    from sklearn.metrics import adjusted_rand_score

    own = [torch.where(c >= 0, c, -1 - torch.arange(len(c))).numpy() for c in (a.cpu(), b.cpu())]
    return float(adjusted_rand_score(*own))


def k_means(rows: Tensor, groups: int, seed: int, *, n_init: int = 10, steps: int = 300) -> Tensor:
    """k-means where the rows are, all restarts at once: the clusters of the best restart.

    Greedy k-means++ (each new centre is the best of ``2 + log G`` candidates, drawn by squared
    distance), then Lloyd's steps until no row changes its cluster. A cluster that loses all rows
    keeps its centre. Sums are matrix products, which repeat to the bit on a GPU, too.

    Args:
        rows: (C, D).
        groups: G, at most C.
        seed: Of the draws, which are the same on every device.
        n_init: Restarts.
        steps: At most so many of Lloyd's steps.

    Returns:
        Cluster of each row, (C,) int64.

    >>> found = k_means(torch.tensor([[0.0], [9.0], [0.1], [9.1]]), 2, seed=0)
    >>> bool(found[0] == found[2]), bool(found[1] == found[3]), bool(found[0] == found[1])
    (True, True, False)
    """
    centres = _spread_centres(rows, groups, seed, n_init)
    assigned = rows.new_full((n_init, len(rows)), -1, dtype=torch.int64)
    names = torch.arange(groups, device=rows.device)
    for _ in range(steps):
        least, nearest_centre = _squared_distances(rows, centres).min(-1)
        if torch.equal(nearest_centre, assigned):
            break
        assigned = nearest_centre
        member = (assigned.unsqueeze(-1) == names).to(rows.dtype)
        size = member.sum(1).unsqueeze(-1)
        centres = torch.where(size > 0, member.mT @ rows / size.clamp_min(1), centres)
    return assigned[least.sum(1).argmin()]


@functools.cache
def _thread_pools() -> ThreadpoolController:
    """The thread pools of the loaded libraries; looking for them takes longer than clustering."""
    return ThreadpoolController()


def _partition(affinity: Tensor, groups: int, seed: int, n_init: int) -> npt.NDArray[np.intp]:
    """Steps 2 to 5 of Algorithm 1, for labels that all have a neighbour."""
    partition = _partition_on_cpu if affinity.device.type == "cpu" else _partition_on_device
    found = partition(affinity, groups, seed, n_init)
    _, first_seen, index = np.unique(found, return_index=True, return_inverse=True)
    order: npt.NDArray[np.intp] = first_seen.argsort().argsort()[index]
    return order


def _partition_on_cpu(
    affinity: Tensor, groups: int, seed: int, n_init: int
) -> npt.NDArray[np.integer[Any]]:
    # Deferred: scikit-learn and SciPy take a second to import, and only clustering needs them. Not
    # later than here: their thread pools must be loaded when the pools are looked for.
    from sklearn.cluster import KMeans
    from sklearn.exceptions import ConvergenceWarning

    # One thread: sums that threads share come out in another order, with other last bits.
    with _thread_pools().limit(limits=1), warnings.catch_warnings():
        # If rows coincide, k-means may find fewer clusters than asked for, and says so.
        warnings.simplefilter("ignore", ConvergenceWarning)
        rows = _spectral_embedding(affinity, groups)
        found: npt.NDArray[np.integer[Any]] = KMeans(
            groups, n_init=n_init, random_state=seed
        ).fit_predict(rows)
    return found


def _partition_on_device(
    affinity: Tensor, groups: int, seed: int, n_init: int
) -> npt.NDArray[np.integer[Any]]:
    rows = F.normalize(_eigenvectors_on_device(affinity, groups), dim=1)
    found: npt.NDArray[np.integer[Any]] = k_means(rows, groups, seed, n_init=n_init).cpu().numpy()
    return found


def _spread_centres(rows: Tensor, groups: int, seed: int, n_init: int) -> Tensor:
    """Centres to start from, (n_init, G, D), by greedy k-means++."""
    trials = 2 + int(math.log(groups))
    draws = torch.rand(
        groups, n_init, trials, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    ).to(rows)
    first = (draws[0, :, :1] * len(rows)).long()
    chosen = [rows[first.squeeze(1)]]
    least = _squared_distances(rows, chosen[0].unsqueeze(1)).squeeze(-1)
    up_to = rows.new_ones(len(rows), len(rows)).triu()
    for g in range(1, groups):
        passed = least @ up_to  # running sums
        # The first row whose running sum exceeds the draw; never one of distance 0, unless all are.
        drawn = torch.searchsorted(passed, draws[g] * passed[:, -1:], right=True)
        candidates = rows[drawn.clamp(max=len(rows) - 1)]
        distances = _squared_distances(rows, candidates).minimum(least.unsqueeze(-1))
        best = distances.sum(1).argmin(1)
        chosen.append(candidates[torch.arange(n_init, device=rows.device), best])
        least = distances.gather(2, best.view(-1, 1, 1).expand(-1, len(rows), 1)).squeeze(-1)
    return torch.stack(chosen, 1)


def _squared_distances(rows: Tensor, centres: Tensor) -> Tensor:
    """(C, D) and (n, G, D) to (n, C, G)."""
    squares = rows.square().sum(1, keepdim=True) + centres.square().sum(-1).unsqueeze(1)
    return (squares - 2 * rows @ centres.mT).clamp_min(0)


def _spectral_embedding(affinity: Tensor, groups: int) -> npt.NDArray[np.float64]:
    """Steps 2 to 4 of Algorithm 1, (C, G); the largest entry of an eigenvector is made positive."""
    vectors = _eigenvectors(affinity.numpy(), groups)
    largest = np.abs(vectors).argmax(0)
    vectors = vectors * np.where(vectors[largest, np.arange(groups)] < 0, -1, 1)
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    rows: npt.NDArray[np.float64] = vectors / length.clip(1e-12)
    return rows


def _eigenvectors(affinity: npt.NDArray[np.float64], groups: int) -> npt.NDArray[np.float64]:
    """Of the smallest eigenvalues of L, (C, G); LAPACK finds these alone."""
    from scipy.linalg import eigh

    scale = affinity.sum(1) ** -0.5
    laplacian = np.eye(len(affinity)) - scale[:, None] * affinity * scale
    found: npt.NDArray[np.float64] = eigh(laplacian, subset_by_index=(0, groups - 1))[1]
    return found


def _eigenvectors_on_device(affinity: Tensor, groups: int) -> Tensor:
    """The same where the matrix is: of all eigenvalues, and still faster on a GPU."""
    scale = affinity.sum(1).rsqrt()
    laplacian = -torch.outer(scale, scale) * affinity
    laplacian.diagonal().add_(1)
    vectors: Tensor = torch.linalg.eigh(laplacian)[1]
    return vectors[:, :groups]
