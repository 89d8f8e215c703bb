"""Joint label skew: every client prefers images that fit its own label prior.

With p̄ the global label frequencies (p̄_c = n_c / Σ n, sum 1), every client draws a prior

    π_k ~ Dir(γ·C·p̄)

and the images, in random order, go one after the other to client k with probability

    ∝ room_k · exp(mean over the labels c of the image of log π_kc),

the geometric mean of the prior over the image's labels times the number of images that client k
still lacks of its size (∝ room_k for an image without a label). All labels of an image count, where
the pivot splits look at one of them. Every client ends with exactly the size it was given, so a
split always ends, and the last images go wherever there is room: however small γ, the skew stays
limited.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, TypeAlias

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Le

from fedharmony.partition.base import Owners, Splitter, by_owner, splitters
from fedharmony.partition.dirichlet import smallest_client
from fedharmony.partition.quantity import dirichlet_sizes, lifted
from fedharmony.rng import numpy_rng
from fedharmony.types import Index, Labels

Float64: TypeAlias = npt.NDArray[np.float64]

#: Draws of unequal sizes before the best of them is repaired.
SIZE_TRIES = 200
#: Scores (image, client) computed at a time: bounds the memory of large splits.
SCORES = 2**22


@splitters.register("prior_dirichlet")
class PriorDirichlet(Splitter):
    """Joint label skew: clients draw label priors, images go where their labels fit.

    >>> labels = np.eye(3, dtype=np.uint8).repeat(40, axis=0)
    >>> partition = PriorDirichlet(PriorDirichlet.Config(gamma=0.1)).partition(labels, 4, seed=0)
    >>> partition.sizes.tolist()
    [30, 30, 30, 30]
    """

    @dataclass(frozen=True)
    class Config(Splitter.Config):
        """Settings of the split.

        Attributes:
            gamma: Concentration γ of the label priors; smaller is more skewed.
            size_gamma: Concentration of the client sizes, as in ``quantity_dirichlet``. None gives
                all clients the same size.
            min_size: Images every client has at least. None takes 10, but not more than half of
                N / K, so that small clients stay possible, and not less than 1.
        """

        gamma: Annotated[float, Ge(1e-6), Le(1e6)] = 0.5
        size_gamma: Annotated[float, Ge(1e-6), Le(1e6)] | None = None
        min_size: Annotated[int, Ge(1)] | None = None

    config: Config

    def split(self, labels: Labels, clients: int, seed: int, users: Owners = None) -> list[Index]:
        """See :meth:`Splitter.split`."""
        rng = numpy_rng(seed, "split/prior_dirichlet")
        sizes = self._sizes(len(labels), clients, rng)
        priors = log_priors(labels.sum(0, dtype=np.int64), clients, self.config.gamma, rng)
        return by_owner(assign(labels, priors, sizes, rng), clients)

    def _sizes(self, images: int, clients: int, rng: np.random.Generator) -> Index:
        config = self.config
        min_size = smallest_client(images, clients, config.min_size)
        if config.size_gamma is None:
            return np.diff(np.arange(clients + 1) * images // clients)
        sizes = dirichlet_sizes(images, clients, config.size_gamma, min_size, SIZE_TRIES, rng)
        return lifted(sizes, min_size)


def log_priors(positives: Index, clients: int, gamma: float, rng: np.random.Generator) -> Float64:
    """The logarithms ``(K, C)`` of label priors π_k ~ Dir(γ·C·p̄).

    Drawn as log Gamma(a) = log Gamma(a + 1) − E / a with E ~ Exp(1), because π underflows for small
    a = γ·C·p̄_c. ``positives`` are the images n_c with each label; a label without any, which no
    image asks for, has 0.

    >>> priors = log_priors(np.array([3, 1, 0]), 2, 1e6, np.random.default_rng(0))
    >>> np.exp(priors).round(2).tolist()   # large γ: p̄ for everyone
    [[0.75, 0.25, 1.0], [0.75, 0.25, 1.0]]
    """
    occurs = positives > 0
    priors = np.zeros((clients, len(positives)))
    if occurs.any():
        shape = gamma * len(positives) * positives[occurs] / positives.sum()
        draws = rng.standard_exponential((clients, len(shape))) / shape
        log_gamma = np.log(rng.standard_gamma(shape + 1, (clients, len(shape)))) - draws
        priors[:, occurs] = log_gamma - np.logaddexp.reduce(log_gamma, axis=1, keepdims=True)
    return priors


def assign(labels: Labels, priors: Float64, sizes: Index, rng: np.random.Generator) -> Index:
    """The owner ``(N,)`` of every image; client k ends with ``sizes[k]`` images.

    ``priors`` are log π, ``(K, C)``; the sizes sum to N.

    >>> labels = np.array([[1, 0], [0, 1], [1, 0]], np.uint8)
    >>> assign(labels, np.log([[1 - 1e-9, 1e-9], [1e-9, 1 - 1e-9]]), np.array([2, 1]),
    ...        np.random.default_rng(0)).tolist()
    [0, 1, 0]
    """
    images, clients = len(labels), len(sizes)
    weights = labels / np.maximum(labels.sum(1, keepdims=True, dtype=np.int64), 1)
    log_number = [-math.inf, *np.log(np.arange(1, sizes.max() + 1)).tolist()]
    room = sizes.tolist()
    log_room = np.array([log_number[size] for size in room])
    owner = np.empty(images, np.int64)
    order = rng.permutation(images)
    rows = max(1, SCORES // clients)
    for start in range(0, images, rows):
        chunk = order[start : start + rows]
        # The largest of log p + Gumbel noise is a draw from p: no exponential can underflow.
        scores = weights[chunk] @ priors.T + rng.gumbel(size=(len(chunk), clients))
        for image, score in zip(chunk, scores, strict=True):
            client = int((score + log_room).argmax())
            owner[image] = client
            room[client] -= 1
            log_room[client] = log_number[room[client]]
    return owner
