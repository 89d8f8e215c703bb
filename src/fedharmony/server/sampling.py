"""Which clients take part in which round: the same for every method."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from fedharmony.errors import ConfigError
from fedharmony.rng import numpy_rng
from fedharmony.types import Index


def cohort_size(clients: int, participation: float, cohort: int | None) -> int:
    """Clients per round: ``cohort`` if given, else the share ``participation`` (at least one).

    >>> cohort_size(50, 0.5, None), cohort_size(3, 0.01, None), cohort_size(50, 0.5, 7)
    (25, 1, 7)
    """
    if cohort is None:
        return max(1, round(clients * participation))
    if cohort > clients:
        raise ConfigError(
            f"federation.cohort = {cohort} is more than the {clients} clients that hold data. "
            "Lower it, or raise split.clients."
        )
    return cohort


#: Begins a private round of an expected cohort of so many of K clients: a secret number in [0, 1)
#: for each client.
Begin: TypeAlias = Callable[[int, int], npt.NDArray[np.float64]]


class Cohorts(Sequence[list[int]]):
    """The cohort of each round, drawn when it is asked for."""

    rounds: int

    def __len__(self) -> int:
        return self.rounds

    @overload
    def __getitem__(self, round: int) -> list[int]: ...
    @overload
    def __getitem__(self, round: slice) -> list[list[int]]: ...
    def __getitem__(self, round: int | slice) -> list[int] | list[list[int]]:
        if isinstance(round, slice):
            return [self.draw(t) for t in range(*round.indices(self.rounds))]
        if not 0 <= round < self.rounds:
            raise IndexError(round)
        return self.draw(round)

    @abstractmethod
    def draw(self, round: int, begin: Begin | None = None) -> list[int]:
        """The clients that take part in a round; ``begin`` says who, where that is a secret."""


@dataclass(frozen=True)
class Schedule(Cohorts):
    """The cohorts of all rounds, each sorted, drawn without replacement when it is asked for.

    A round has a generator of its own: when its cohort is drawn, and which others were, changes no
    bit of it. ``size`` draws one client after the other with probability ∝ n_k among those left. A
    client's chance to be *in* the cohort is then not exactly ∝ n_k when the cohort is large or
    sizes are very unequal. ``poisson`` draws each client by itself, with chance cohort / clients:
    cohorts differ in size, and may be empty. Clients without images are never drawn. A private run
    has no ``seed`` here.

    >>> list(Schedule({0: 5, 1: 0, 2: 5}, rounds=2, cohort=2, sampling="uniform", seed=0))
    [[0, 2], [0, 2]]
    """

    sizes: Mapping[int, int]
    rounds: int
    cohort: int
    sampling: Literal["uniform", "size", "poisson"]
    seed: int | None

    def __post_init__(self) -> None:
        if len(self._eligible()) < self.cohort:
            raise ConfigError(
                f"A cohort of {self.cohort} needs as many clients with images; only "
                f"{len(self._eligible())} have any. Lower federation.participation or "
                "federation.cohort."
            )

    def _eligible(self) -> list[int]:
        return sorted(k for k, size in self.sizes.items() if size > 0)

    def draw(self, round: int, begin: Begin | None = None) -> list[int]:
        """The cohort of a round."""
        eligible = self._eligible()
        if begin is not None:
            drawn = begin(self.cohort, len(eligible)) < self.cohort / len(eligible)
            return [k for k, taken in zip(eligible, drawn, strict=True) if taken]
        assert self.seed is not None, "cohorts of a private run follow from no seed"
        counts = np.asarray([self.sizes[k] for k in eligible], dtype=np.float64)
        chance = counts / counts.sum() if self.sampling == "size" else None
        rng = numpy_rng(self.seed, "cohort", round)
        if self.sampling == "poisson":
            drawn = rng.random(len(eligible)) < self.cohort / len(eligible)
            return [k for k, taken in zip(eligible, drawn, strict=True) if taken]
        return sorted(int(k) for k in rng.choice(eligible, self.cohort, replace=False, p=chance))


def images_of_rounds(
    sizes: Mapping[int, int],
    schedule: Iterable[Sequence[int]],
    epochs: int,
    drop_rate: float,
    seed: int,
) -> list[int]:
    """The images that each round's cohort sees in its epochs, without clients that drop out.

    >>> images_of_rounds({0: 3, 1: 1}, [[0], [0, 1]], epochs=2, drop_rate=0.0, seed=0)
    [6, 8]
    """
    return [
        epochs * sum(sizes[k] for k in cohort if not drops_out(drop_rate, seed, t, k))
        for t, cohort in enumerate(schedule)
    ]


def gathered_rounds(pool: Index, counts: Sequence[int], seed: int) -> list[Index]:
    """What one party that holds all images trains on in each round: so many images as ``counts``.

    They are taken from the images in random order, over and over: all are seen equally often, up
    to one.

    >>> parts = gathered_rounds(np.arange(4), [6, 8], seed=0)
    >>> [len(part) for part in parts], sorted(np.bincount(np.concatenate(parts)).tolist())
    ([6, 8], [3, 3, 4, 4])
    """
    passes = [
        numpy_rng(seed, "central", i).permutation(pool) for i in range(-(-sum(counts) // len(pool)))
    ]
    stream = np.concatenate([*passes, pool[:0]])
    return np.split(stream[: sum(counts)], np.cumsum(counts)[:-1])


def drops_out(rate: float, seed: int, round: int, client: int) -> bool:
    """Whether a selected client is lost after it received its message (simulated)."""
    return rate > 0 and bool(numpy_rng(seed, "drop-out", round, client).random() < rate)
