"""The owners that come with the data: one client per user."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from fedharmony.errors import PartitionError
from fedharmony.partition.base import Owners, Splitter, by_owner, splitters
from fedharmony.rng import numpy_rng
from fedharmony.types import Index, Labels


@splitters.register("natural")
class Natural(Splitter):
    """One client per user of the data, with limits on the images of a user.

    Clients are all users with at least ``min_images`` images, in the order of their names. When a
    smaller number of clients is asked for, the seed chooses which; a larger one is refused.

    >>> users = np.array(["eve", "bob", "eve", "ann", "eve", "bob"])
    >>> labels = np.zeros((6, 1), np.uint8)
    >>> partition = Natural(Natural.Config(min_images=2)).partition(labels, None, 0, users)
    >>> [index.tolist() for index in partition.indices]   # bob and eve
    [[1, 5], [0, 2, 4]]
    """

    covers: ClassVar[bool] = False

    @dataclass(frozen=True)
    class Config(Splitter.Config):
        """Settings of the split.

        Attributes:
            max_images: A user with more images keeps as many of them, chosen by the seed.
            min_images: A user with fewer images is left out.
        """

        max_images: Annotated[int, Ge(1)] = 512
        min_images: Annotated[int, Ge(1)] = 1

    config: Config

    def default_clients(self, users: Owners) -> int:
        """All users with enough images."""
        return len(self._eligible(_by_user(users)))

    def split(self, labels: Labels, clients: int, seed: int, users: Owners = None) -> list[Index]:
        """See :meth:`Splitter.split`; the choice of a user's images does not depend on others."""
        images_of = _by_user(users)
        eligible = self._eligible(images_of)
        if clients > len(eligible):
            raise PartitionError(
                f"The data have {len(eligible)} users with {self.config.min_images} images or "
                f"more, fewer than the {clients} clients asked for. Set split.clients to "
                f"{len(eligible)} or less, leave it out to take them all, or lower "
                "split.min_images."
            )
        chosen = numpy_rng(seed, "split/natural/users").choice(eligible, clients, replace=False)
        priority = numpy_rng(seed, "split/natural/images").random(len(labels))
        most = self.config.max_images
        own = (images_of[user] for user in np.sort(chosen))
        return [np.sort(images[np.argsort(priority[images])[:most]]) for images in own]

    def _eligible(self, images_of: list[Index]) -> Index:
        """The users with enough images, by their number."""
        sizes = np.array([len(images) for images in images_of])
        eligible = np.flatnonzero(sizes >= self.config.min_images)
        if not len(eligible):
            raise PartitionError(
                f"No user has {self.config.min_images} images; the largest has {sizes.max()}. "
                f"Set split.min_images to {sizes.max()} or less."
            )
        return eligible


def _by_user(users: Owners) -> list[Index]:
    """The sorted images of every user, users in the order of their names."""
    if users is None:
        raise PartitionError(
            "This data set does not say to whom its images belong, so it has no natural split. "
            "Choose another split.name, or data with users."
        )
    names, owner = np.unique(users, return_inverse=True)
    return by_owner(owner.reshape(-1), len(names))
