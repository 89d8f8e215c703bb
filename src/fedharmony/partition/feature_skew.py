"""Feature skew: clients whose images look different. It comes on top of any split.

Each client is given one image transform (see :mod:`fedharmony.data.transforms`) for all of its
training images. The test images stay as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from fedharmony.data.base import Images
from fedharmony.data.transforms import check_transforms, transform_images
from fedharmony.partition.base import Partition
from fedharmony.rng import numpy_rng


def feature_skew(partition: Partition, transforms: Sequence[str], seed: int) -> Partition:
    """Give the clients, in random order, one of ``transforms`` each in turn.

    Each name goes to the same number of clients, give or take one; a name given twice goes to twice
    as many.

    >>> six = Partition(tuple(np.arange(6)[:, None]), images=6)
    >>> feature_skew(six, ("none", "grey"), seed=1).transforms
    ('grey', 'grey', 'none', 'none', 'grey', 'none')
    """
    check_transforms(transforms)
    given = [""] * len(partition.indices)
    order = numpy_rng(seed, "split/feature_skew").permutation(len(given))
    for turn, client in enumerate(order):
        given[client] = transforms[turn % len(transforms)]
    return replace(partition, transforms=tuple(given))


def skewed_images(images: Images, partition: Partition) -> Images:
    """The images as their owners see them; the same object where no client has a transform.

    >>> import torch
    >>> from fedharmony.data.base import TensorImages
    >>> white = TensorImages(torch.full((2, 3, 1, 1), 255, dtype=torch.uint8))
    >>> two = Partition((np.array([0]), np.array([1])), 2, transforms=("none", "dark"))
    >>> skewed_images(white, two).gather(torch.arange(2), "cpu")[:, 0, 0, 0].tolist()
    [255, 153]
    """
    if partition.transforms is None:
        return images
    names = sorted({"none", *partition.transforms})
    of_image = np.full(partition.images, names.index("none"), np.int64)
    for index, name in zip(partition.indices, partition.transforms, strict=True):
        of_image[index] = names.index(name)
    return transform_images(images, names, of_image)
