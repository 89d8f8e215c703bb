"""Label skew through one pivot label per image, divided by Dirichlet proportions.

The label-Dirichlet split of single-label federated learning (NIID-Bench: Li et al., ICDE 2022),
applied to one *pivot* label per image:

1. The pivot of an image is its globally rarest label (or its most frequent, or a random one);
   images without a label form a class of their own.
2. For each pivot class with n_c images, in random order: proportions q ~ Dir(γ·1_K); with
   ``balance``, clients that already hold N / K images get none; the shuffled images are cut at
   ⌊n_c · cumsum(q)⌋.
3. The draw is accepted when every client has ``min_size`` images, else made anew; after
   ``max_tries`` draws the best of them is repaired.

Small γ concentrates a pivot on few clients. The other labels of an image travel with its pivot, so
frequent labels are skewed less than γ suggests; ``pivot="rarest"`` skews most.
"""

from __future__ import annotations

import heapq
import math
from abc import abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Le

from fedharmony.errors import PartitionError
from fedharmony.partition.base import Owners, Splitter, by_owner, splitters
from fedharmony.rng import numpy_rng
from fedharmony.types import Index, Labels

Pivot = Literal["rarest", "most_frequent", "random"]


@dataclass(frozen=True)
class DrawnSizes(Splitter.Config):
    """Settings of splits whose sizes are drawn.

    Attributes:
        gamma: Concentration γ of the Dirichlet distribution; smaller is more skewed.
        min_size: Images every client has at least. None takes 10, but not more than half of N / K,
            so that small clients stay possible, and not less than 1.
        max_tries: Draws before giving up on meeting ``min_size`` by chance. Where N / K is small no
            number of draws helps; 200 take a few seconds for 2,500 clients.
        repair: After ``max_tries``: take the draw that misses the fewest images, and move images,
            one by one, from the currently largest client to those below ``min_size``. False raises
            an error instead.
    """

    gamma: Annotated[float, Ge(1e-6), Le(1e6)] = 0.5
    min_size: Annotated[int, Ge(1)] | None = None
    max_tries: Annotated[int, Ge(1), Le(10_000)] = 200
    repair: bool = True

    def refuse_small(self, smallest: int, images: int, clients: int, min_size: int) -> None:
        """Refuse the best draw, whose smallest client is too small, where nothing is repaired."""
        if not self.repair:
            raise PartitionError(
                f"No split of {images} images among {clients} clients with gamma = {self.gamma:g} "
                f"gave every client {min_size} images; the best of {self.max_tries} draws left one "
                f"with {smallest}. Lower split.min_size, raise split.gamma, use fewer clients, or "
                "set split.repair = true."
            )


class ClasswiseDirichlet(Splitter):
    """Steps 2 and 3 of the split, for images that fall into classes; a subclass gives step 1."""

    @dataclass(frozen=True)
    class Config(DrawnSizes):
        """Settings of the split.

        Attributes:
            balance: Whether clients that already hold N / K images get no more of later classes.
        """

        balance: bool = True

    config: Config

    @abstractmethod
    def classes(self, labels: Labels, seed: int, rng: np.random.Generator) -> Index:
        """The class of every image, int64 ``(N,)``, from 0; classes may be empty.

        Draws come from ``rng``, the split's generator; libraries that want a seed get ``seed``.
        """

    def split(self, labels: Labels, clients: int, seed: int, users: Owners = None) -> list[Index]:
        """See :meth:`Splitter.split`."""
        config, images = self.config, len(labels)
        min_size = smallest_client(images, clients, config.min_size)
        rng = numpy_rng(seed, f"split/{self.name}")
        members = members_of(self.classes(labels, seed, rng))
        counts = self._draw([len(m) for m in members], clients, min_size, rng)
        owner = np.empty(images, np.int64)
        for images_of_class, shares in zip(members, counts, strict=True):
            owner[rng.permutation(images_of_class)] = np.repeat(np.arange(clients), shares)
        parts = by_owner(owner, clients)
        smallest = min(map(len, parts))
        if smallest >= min_size:
            return parts
        config.refuse_small(smallest, images, clients, min_size)
        return repaired(parts, min_size, rng)

    def _draw(
        self, class_sizes: list[int], clients: int, min_size: int, rng: np.random.Generator
    ) -> Index:
        """Images of each pivot class for each client ``(classes, K)``: accepted, or the best."""
        best, missing = None, math.inf
        for _ in range(self.config.max_tries):
            counts = self._attempt(class_sizes, clients, min_size, missing, rng)
            if counts is not None:
                best = counts
                missing = _shortfall(counts.sum(0), min_size)
                if missing == 0:
                    break
        assert best is not None  # the first attempt has an infinite bound
        return best

    def _attempt(
        self,
        class_sizes: list[int],
        clients: int,
        min_size: int,
        bound: float,
        rng: np.random.Generator,
    ) -> Index | None:
        """Draw all classes once; None as soon as it is sure to lack ``bound`` images or more."""
        counts = np.zeros((len(class_sizes), clients), np.int64)
        held = np.zeros(clients, np.int64)
        left = sum(class_sizes)
        target = left / clients
        for c in rng.permutation(len(class_sizes)):
            open_to = np.flatnonzero(held < target) if self.config.balance else np.arange(clients)
            # Dirichlet proportions with some entries set to zero and the rest renormalised are
            # Dirichlet proportions of the rest: closed clients need no draw.
            shares = cumulative_dirichlet(self.config.gamma, len(open_to), rng)
            cuts = np.floor(shares * class_sizes[c]).astype(np.int64)
            counts[c, open_to] = np.diff(cuts, prepend=0)
            held += counts[c]
            left -= class_sizes[c]
            if _shortfall(held, min_size) - left >= bound:
                return None
        return counts


@splitters.register("pivot_dirichlet")
class PivotDirichlet(ClasswiseDirichlet):
    """Label skew: each image's pivot class is divided among clients by Dirichlet proportions.

    >>> labels = np.eye(3, dtype=np.uint8).repeat(40, axis=0)
    >>> partition = PivotDirichlet(PivotDirichlet.Config(gamma=0.1)).partition(labels, 4, seed=0)
    >>> int(partition.sizes.sum()), bool(partition.sizes.min() >= 10)
    (120, True)
    """

    @dataclass(frozen=True)
    class Config(ClasswiseDirichlet.Config):
        """Settings of the split, besides those of :class:`ClasswiseDirichlet`.

        Attributes:
            pivot: Which of an image's labels decides: its globally rarest, its most frequent, or a
                random one.
        """

        pivot: Pivot = "rarest"

    config: Config

    def classes(self, labels: Labels, seed: int, rng: np.random.Generator) -> Index:
        """The pivot of every image; see :func:`pivot_labels`."""
        return pivot_labels(labels, self.config.pivot, rng)


def smallest_client(images: int, clients: int, min_size: int | None) -> int:
    """The smallest size allowed; :class:`PartitionError` where there are too few images for it.

    >>> [smallest_client(5011, clients, None) for clients in (50, 1000, 2500)]
    [10, 2, 1]
    """
    largest = images // clients
    if min_size is None:
        return max(1, min(10, largest // 2))
    if min_size > largest:
        raise PartitionError(
            f"{images} images cannot give {clients} clients {min_size} images each. Set "
            f"split.min_size to {largest} or less, or use at most {images // min_size} clients."
        )
    return min_size


def members_of(classes: Index) -> list[Index]:
    """The sorted images of every class that has any, given the class ``(N,)`` of every image.

    >>> [images.tolist() for images in members_of(np.array([2, 0, 2]))]
    [[1], [0, 2]]
    """
    return [images for images in by_owner(classes, int(classes.max()) + 1) if len(images)]


def pivot_labels(labels: Labels, pivot: Pivot, rng: np.random.Generator) -> Index:
    """One label of every image ``(N,)``; C for images without a label.

    Labels are ranked by their number of images, equal numbers by their index.

    >>> labels = np.array([[1, 1, 0], [1, 0, 0], [0, 0, 0]], np.uint8)
    >>> pivot_labels(labels, "rarest", np.random.default_rng(0)).tolist()
    [1, 0, 3]
    >>> pivot_labels(labels, "most_frequent", np.random.default_rng(0)).tolist()
    [0, 0, 3]
    """
    images, classes = labels.shape
    if pivot == "random":
        priority = rng.random((images, classes))
    else:
        frequency = labels.sum(0, dtype=np.float64)
        priority = np.broadcast_to(-frequency if pivot == "rarest" else frequency, labels.shape)
    chosen = np.where(labels > 0, priority, -np.inf).argmax(1)
    return np.asarray(np.where(labels.any(1), chosen, classes), np.int64)


def cumulative_dirichlet(
    gamma: float, size: int, rng: np.random.Generator
) -> npt.NDArray[np.float64]:
    """Cumulative sums ``(size,)`` of q ~ Dir(γ·1), safe for any γ; the last is exactly 1.

    q is a normalised vector of Gamma(γ) draws. For small γ these underflow, all of them if there
    are few; their logarithms do not: log Gamma(γ) = log Gamma(γ + 1) − E / γ with E ~ Exp(1).

    >>> cumulative_dirichlet(1e-6, 3, np.random.default_rng(0)).tolist()   # all to the first
    [1.0, 1.0, 1.0]
    """
    log_gamma = np.log(rng.standard_gamma(gamma + 1, size)) - rng.standard_exponential(size) / gamma
    cumulative = np.cumsum(np.exp(log_gamma - log_gamma.max()))
    return np.asarray(cumulative / cumulative[-1])


def repaired(parts: list[Index], min_size: int, rng: np.random.Generator) -> list[Index]:
    """Move random images, one by one, from the largest client to those below ``min_size``.

    Ends because ``min_size`` · K <= N: while one client is below, the largest is above.

    >>> parts = [np.arange(5), np.array([], np.int64)]
    >>> [len(part) for part in repaired(parts, 2, np.random.default_rng(0))]
    [3, 2]
    """
    lists = [part.tolist() for part in parts]
    largest = [(-len(images), client) for client, images in enumerate(lists)]
    heapq.heapify(largest)
    for receiver in [client for client, images in enumerate(lists) if len(images) < min_size]:
        while len(lists[receiver]) < min_size:
            # A client that receives images gives none: the largest has more than min_size.
            _, donor = largest[0]
            images = lists[donor]
            at = rng.integers(len(images))
            images[at], images[-1] = images[-1], images[at]
            lists[receiver].append(images.pop())
            heapq.heapreplace(largest, (-len(images), donor))
    return [np.sort(np.array(images, np.int64)) for images in lists]


def _shortfall(sizes: Index, min_size: int) -> int:
    """How many images the clients below ``min_size`` lack in total."""
    return int(np.maximum(min_size - sizes, 0).sum())
