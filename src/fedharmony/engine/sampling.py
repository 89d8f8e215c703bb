"""Which clients take part in which round, drawn up front: the same for every method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np

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


def draw_schedule(
    sizes: Sequence[int],
    rounds: int,
    cohort: int,
    sampling: Literal["uniform", "size"],
    seed: int,
) -> list[list[int]]:
    """Sorted cohorts for all rounds, without replacement inside a round.

    ``size`` draws one client after the other with probability ∝ n_k among those left. A client's
    chance to be *in* the cohort is then not exactly ∝ n_k when the cohort is large or sizes are
    very unequal. Clients without images are never drawn.

    >>> draw_schedule([5, 0, 5], rounds=2, cohort=2, sampling="uniform", seed=0)
    [[0, 2], [0, 2]]
    """
    counts = np.asarray(sizes, dtype=np.float64)
    eligible = np.flatnonzero(counts > 0)
    if len(eligible) < cohort:
        raise ConfigError(
            f"A cohort of {cohort} needs as many clients with images; only {len(eligible)} have "
            "any. Lower federation.participation or federation.cohort."
        )
    chance = counts[eligible] / counts[eligible].sum() if sampling == "size" else None
    return [
        sorted(
            int(k)
            for k in numpy_rng(seed, "cohort", t).choice(eligible, cohort, replace=False, p=chance)
        )
        for t in range(rounds)
    ]


def gathered_rounds(
    pool: Sequence[int] | Index,
    sizes: Sequence[int],
    schedule: Sequence[Sequence[int]],
    epochs: int,
    drop_rate: float,
    seed: int,
) -> list[Index]:
    """What one party that holds all images trains on in each round, in the place of the cohorts.

    As many images as the cohort's clients that do not drop out see in their epochs, taken from the
    images in random order, over and over: all are seen equally often, up to one.

    >>> parts = gathered_rounds(range(4), [3, 1], [[0], [0, 1]], epochs=2, drop_rate=0.0, seed=0)
    >>> [len(part) for part in parts], sorted(np.bincount(np.concatenate(parts)).tolist())
    ([6, 8], [3, 3, 4, 4])
    """
    images = np.asarray(pool, dtype=np.int64)
    counts = [
        epochs * sum(sizes[k] for k in cohort if not drops_out(drop_rate, seed, t, k))
        for t, cohort in enumerate(schedule)
    ]
    passes = [
        numpy_rng(seed, "central", i).permutation(images)
        for i in range(-(-sum(counts) // len(images)))
    ]
    stream = np.concatenate([*passes, images[:0]])
    return np.split(stream[: sum(counts)], np.cumsum(counts)[:-1])


def drops_out(rate: float, seed: int, round: int, client: int) -> bool:
    """Whether a selected client is lost after it received its message (simulated)."""
    return rate > 0 and bool(numpy_rng(seed, "drop-out", round, client).random() < rate)
