"""Few labels per client: every client owns some labels, and only images with such a pivot.

As in the shards of McMahan et al. (AISTATS 2017), the images of every pivot label are cut into
shards of about equal size, and clients hold a few shards each. Here a shard never crosses from one
label to the next, and the shards of a client are of different labels. Images without a label count
as a further label.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from annotated_types import Ge

from fedharmony.errors import PartitionError
from fedharmony.partition.base import Owners, Splitter, by_owner, splitters
from fedharmony.partition.dirichlet import Pivot, members_of, pivot_labels
from fedharmony.rng import numpy_rng
from fedharmony.types import Index, Labels


@splitters.register("shards")
class Shards(Splitter):
    """Few labels per client: each owns some labels, and images whose pivot is among them.

    >>> labels = np.eye(4, dtype=np.uint8).repeat(30, axis=0)
    >>> partition = Shards(Shards.Config(labels_per_client=2)).partition(labels, 6, seed=0)
    >>> [int(labels[index].any(0).sum()) for index in partition.indices]
    [2, 2, 2, 2, 2, 2]
    >>> partition.sizes.tolist()
    [20, 20, 20, 20, 20, 20]
    """

    @dataclass(frozen=True)
    class Config(Splitter.Config):
        """Settings of the split.

        Attributes:
            labels_per_client: Labels s that a client owns; fewer where there are not enough images
                for K · s shards. None takes 2, or more where K clients would not cover all labels.
            pivot: Which of an image's labels decides: its globally rarest, its most frequent, or a
                random one.
        """

        labels_per_client: Annotated[int, Ge(1)] | None = None
        pivot: Pivot = "rarest"

    config: Config

    def split(self, labels: Labels, clients: int, seed: int, users: Owners = None) -> list[Index]:
        """See :meth:`Splitter.split`."""
        rng = numpy_rng(seed, "split/shards")
        members = members_of(pivot_labels(labels, self.config.pivot, rng))
        owned = self._labels_per_client(len(members), clients)
        shards = shards_per_label([len(m) for m in members], clients, owned)
        owner = np.empty(len(labels), np.int64)
        load = np.zeros(clients, np.int64)
        for label in rng.permutation(len(members)):
            # The client with the fewest labels comes first, ties in random order. So no client owns
            # a label twice, and clients differ by one label at most.
            tie = rng.random(clients)
            chosen = np.lexsort((tie, load))[: shards[label]]
            load[chosen] += 1
            images = rng.permutation(members[label])
            # The i-th of n images belongs to shard ⌊i m / n⌋ of m.
            owner[images] = chosen[np.arange(len(images)) * len(chosen) // len(images)]
        return by_owner(owner, clients)

    def _labels_per_client(self, labels: int, clients: int) -> int:
        """Labels per client, enough to give each of the ``labels`` with images an owner."""
        needed, wanted = -(-labels // clients), self.config.labels_per_client
        if wanted is None:
            return min(labels, max(2, needed))
        if wanted < needed:
            raise PartitionError(
                f"{clients} clients with {wanted} labels each cannot own all {labels} labels that "
                f"decide on images. Set split.labels_per_client to {needed} or more, or use at "
                f"least {-(-labels // wanted)} clients."
            )
        if wanted > labels:
            raise PartitionError(
                f"Clients cannot own {wanted} labels each: only {labels} decide on images. Set "
                f"split.labels_per_client to {labels} or less."
            )
        return wanted


def shards_per_label(sizes: list[int], clients: int, owned: int) -> Index:
    """Into how many shards the images of every label are cut: int64 ``(labels,)``.

    One shard for each label; the others, up to K · s in all, one by one to the label whose shards
    are the largest. A label has at most K shards, one per client, and every shard an image. There
    are at least K shards, so every client gets one. ``sizes`` are the images of every label, at
    least one each and K in all; ``owned`` is s, with K · s >= the number of labels.

    >>> shards_per_label([60, 30, 2], clients=5, owned=2).tolist()   # of 12, 7 or 8, and 2 images
    [5, 4, 1]
    """
    most = [min(clients, size) for size in sizes]
    shards = [1] * len(sizes)
    largest = [(-float(size), label) for label, size in enumerate(sizes)]
    heapq.heapify(largest)
    for _ in range(min(clients * owned, sum(most)) - len(sizes)):
        while shards[largest[0][1]] == most[largest[0][1]]:
            heapq.heappop(largest)
        label = largest[0][1]
        shards[label] += 1
        heapq.heapreplace(largest, (-sizes[label] / shards[label], label))
    return np.array(shards, np.int64)
