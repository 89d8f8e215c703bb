"""Co-occurrence skew: groups of similar label sets, divided by Dirichlet proportions.

The label vectors of the images, scaled to length 1, are grouped by k-means; the group then takes
the place of the pivot in :mod:`fedharmony.partition.dirichlet`. Images of a group show the same
labels *together*, so small γ skews which labels co-occur at a client, not only which occur.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import numpy.typing as npt
from annotated_types import Ge
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from fedharmony.partition.base import splitters
from fedharmony.partition.dirichlet import ClasswiseDirichlet
from fedharmony.rng import derived_seed
from fedharmony.types import Index, Labels

#: Bound on the steps of k-means, for label sets without structure; real ones need fewer.
MAX_STEPS = 50


@splitters.register("labelset_dirichlet")
class LabelsetDirichlet(ClasswiseDirichlet):
    """Co-occurrence skew: groups of similar label sets are divided by Dirichlet proportions.

    >>> labels = np.array([[1, 1, 0], [1, 0, 1], [1, 0, 0]], np.uint8).repeat(30, axis=0)
    >>> config = LabelsetDirichlet.Config(gamma=1e-6)   # each set to a client of its own
    >>> partition = LabelsetDirichlet(config).partition(labels, 3, seed=0)
    >>> sorted(labels[index].sum(0).tolist() for index in partition.indices)
    [[30, 0, 0], [30, 0, 30], [30, 30, 0]]
    """

    @dataclass(frozen=True)
    class Config(ClasswiseDirichlet.Config):
        """Settings of the split, besides those of :class:`ClasswiseDirichlet`.

        Attributes:
            groups: Groups of label sets; where there are fewer distinct sets, each is a group.
        """

        groups: Annotated[int, Ge(1)] = 50

    config: Config

    def classes(self, labels: Labels, seed: int, rng: np.random.Generator) -> Index:
        """The group of every image; see :func:`labelset_groups`."""
        return labelset_groups(labels, self.config.groups, derived_seed(seed, f"split/{self.name}"))


def labelset_groups(labels: Labels, groups: int, seed: int) -> Index:
    """Groups ``(N,)`` of images with similar label sets, from 0.

    k-means with k = min(``groups``, number of distinct sets) on y / ‖y‖₂. Images without a label
    have no direction; they form a group of their own, numbered k.

    >>> labels = np.array([[1, 0], [1, 1], [0, 0], [1, 0]], np.uint8)
    >>> labelset_groups(labels, 50, seed=0).tolist()
    [0, 1, 2, 0]
    """
    labelled = labels.any(1)
    if not labelled.any():
        return np.zeros(len(labels), np.int64)
    # Equal sets are one weighted point each: the same clusters from a fraction of the points.
    packed = np.packbits(labels[labelled], axis=1)
    _, first, which, weight = np.unique(
        packed, axis=0, return_index=True, return_inverse=True, return_counts=True
    )
    sets = labels[labelled][first].astype(np.float64)
    if len(sets) <= groups:
        of_set = np.arange(len(sets))
    else:
        of_set = _k_means(sets / np.linalg.norm(sets, axis=1, keepdims=True), weight, groups, seed)
    found = np.full(len(labels), of_set.max() + 1, np.int64)
    found[labelled] = of_set[which.reshape(-1)]
    return found


def _k_means(
    points: npt.NDArray[np.float64], weight: npt.NDArray[np.intp], groups: int, seed: int
) -> Index:
    """The cluster of every point, from 0; fewer than ``groups`` clusters are possible."""
    # Deferred: scikit-learn takes a second to import, and the other splitters do without.
    from sklearn.cluster import KMeans

    # One thread: sums that threads share come out in another order, with other last bits.
    with threadpool_limits(limits=1):
        k_means = KMeans(groups, n_init=1, max_iter=MAX_STEPS, random_state=seed)
        return np.asarray(k_means.fit_predict(points, sample_weight=weight), np.int64)
