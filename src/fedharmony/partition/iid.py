"""Independent and identically distributed clients: a permutation cut into equal parts."""

from __future__ import annotations

import numpy as np

from fedharmony.partition.base import Owners, Splitter, splitters
from fedharmony.rng import numpy_rng
from fedharmony.types import Index, Labels


@splitters.register("iid")
class Iid(Splitter):
    """A random permutation cut into equal parts; sizes differ by one image at most.

    >>> labels = np.zeros((7, 2), np.uint8)
    >>> Iid().partition(labels, clients=3, seed=0).sizes.tolist()
    [3, 2, 2]
    """

    def split(self, labels: Labels, clients: int, seed: int, users: Owners = None) -> list[Index]:
        """See :meth:`Splitter.split`."""
        order = numpy_rng(seed, "split/iid").permutation(len(labels))
        return [np.sort(part) for part in np.array_split(order, clients)]
