"""Quantity skew: clients hold IID images, in amounts of Dirichlet proportions.

The split "iid-diff-quantity" of NIID-Bench (Li et al., ICDE 2022): q ~ Dir(γ·1_K), and a random
permutation of the images is cut at ⌊N · cumsum(q)⌋. A draw with a client below ``min_size`` is
made anew. Deviation: after ``max_tries`` draws the best of them is repaired, where the original
would draw for ever.
"""

from __future__ import annotations

import heapq

import numpy as np

from fedharmony.partition.base import Owners, Splitter, splitters
from fedharmony.partition.dirichlet import DrawnSizes, cumulative_dirichlet, smallest_client
from fedharmony.rng import numpy_rng
from fedharmony.types import Index, Labels


@splitters.register("quantity_dirichlet")
class QuantityDirichlet(Splitter):
    """Quantity skew: IID content, client sizes in Dirichlet proportions.

    >>> labels = np.zeros((1000, 2), np.uint8)
    >>> partition = QuantityDirichlet().partition(labels, clients=4, seed=0)
    >>> sorted(partition.sizes.tolist())
    [49, 302, 304, 345]
    """

    Config = DrawnSizes
    config: DrawnSizes

    def split(self, labels: Labels, clients: int, seed: int, users: Owners = None) -> list[Index]:
        """See :meth:`Splitter.split`."""
        config, images = self.config, len(labels)
        min_size = smallest_client(images, clients, config.min_size)
        rng = numpy_rng(seed, "split/quantity_dirichlet")
        sizes = dirichlet_sizes(images, clients, config.gamma, min_size, config.max_tries, rng)
        if sizes.min() < min_size:
            config.refuse_small(int(sizes.min()), images, clients, min_size)
            sizes = lifted(sizes, min_size)
        return [np.sort(part) for part in np.split(rng.permutation(images), np.cumsum(sizes)[:-1])]


def dirichlet_sizes(
    images: int, clients: int, gamma: float, min_size: int, tries: int, rng: np.random.Generator
) -> Index:
    """Sizes ``(K,)`` in Dir(γ·1_K) proportions that sum to N.

    The first draw with every size >= ``min_size``; without one in ``tries`` draws, that which
    misses the fewest images.
    """
    best, missing = np.empty(0, np.int64), images + 1
    for _ in range(tries):
        cuts = np.floor(cumulative_dirichlet(gamma, clients, rng) * images).astype(np.int64)
        sizes = np.diff(cuts, prepend=0)
        lacking = int(np.maximum(min_size - sizes, 0).sum())
        if lacking < missing:
            best, missing = sizes, lacking
        if missing == 0:
            break
    return best


def lifted(sizes: Index, min_size: int) -> Index:
    """Raise small sizes to ``min_size``, one image at a time from the currently largest client.

    The sum stays the same; it must be at least ``min_size`` · K.

    >>> lifted(np.array([6, 5, 1, 0]), 2).tolist()
    [4, 4, 2, 2]
    """
    raised = np.maximum(sizes, min_size)
    largest = [(-int(size), client) for client, size in enumerate(raised)]
    heapq.heapify(largest)
    for _ in range(int((raised - sizes).sum())):
        size, client = largest[0]
        heapq.heapreplace(largest, (size + 1, client))
    return np.array([-size for size, _ in sorted(largest, key=lambda held: held[1])], np.int64)
