"""Partial annotation: every client knows only some of the labels of its images."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from fedharmony.errors import PartitionError
from fedharmony.partition.base import Partition
from fedharmony.rng import numpy_rng
from fedharmony.types import Labels


def client_known(
    labels: Labels, partition: Partition, share: float, seed: int
) -> npt.NDArray[np.bool_]:
    """Which labels are known when each client annotates only a share of the classes.

    Every client draws max(1, ⌊share · C + ½⌋) classes without replacement and annotates these on
    all of its images, and no others. The result, bool ``(N, C)``, is True where the owner of the
    image annotates the class; nothing is known about images without an owner.

    >>> labels = np.zeros((4, 3), np.uint8)
    >>> two = Partition((np.array([0, 1]), np.array([2])), images=4)
    >>> client_known(labels, two, share=0.4, seed=0).astype(int).tolist()
    [[1, 0, 0], [1, 0, 0], [0, 1, 0], [0, 0, 0]]
    """
    if not 0 < share <= 1:
        raise PartitionError(
            f"Clients cannot annotate a share of {share:g} of the classes. Give a number above 0 "
            "and up to 1."
        )
    partition.refuse_other(labels)
    classes = labels.shape[1]
    count = max(1, math.floor(share * classes + 0.5))
    rng = numpy_rng(seed, "split/annotation")
    known = np.zeros(labels.shape, bool)
    for index in partition.indices:
        known[np.ix_(index, rng.permutation(classes)[:count])] = True
    return known
