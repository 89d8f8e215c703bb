"""Every random draw of the package, derived from (seed, purpose, round, client).

There is no global random state anywhere: a generator is made where it is needed and thrown away.
Hence a resumed run draws what the undisturbed run draws, and adding a draw for one purpose never
shifts the draws for another. Split, model and run use separate seeds (``split.seed``,
``model.seed``, ``run.seed``).

>>> a, b = numpy_rng(0, "order", 3, 7), numpy_rng(0, "order", 3, 7)
>>> bool((a.permutation(5) == b.permutation(5)).all())
True
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def _entropy(seed: int, purpose: str, round: int, client: int) -> np.random.SeedSequence:
    if min(seed, round, client) < 0:
        raise ValueError(f"seed, round and client must be >= 0, got {seed}, {round}, {client}")
    word = int.from_bytes(hashlib.sha256(purpose.encode()).digest()[:8], "little")
    return np.random.SeedSequence((seed, word, round, client))


def numpy_rng(seed: int, purpose: str, round: int = 0, client: int = 0) -> np.random.Generator:
    """A NumPy generator for one purpose of one client in one round."""
    return np.random.Generator(np.random.PCG64(_entropy(seed, purpose, round, client)))


def torch_rng(seed: int, purpose: str, round: int = 0, client: int = 0) -> torch.Generator:
    """A torch CPU generator for one purpose of one client in one round."""
    state = _entropy(seed, purpose, round, client).generate_state(1, np.uint64)[0]
    return torch.Generator().manual_seed(int(state) >> 1)


def derived_seed(seed: int, purpose: str, round: int = 0, client: int = 0) -> int:
    """A 32-bit seed for libraries that take an integer (for instance k-means)."""
    return int(_entropy(seed, purpose, round, client).generate_state(1, np.uint32)[0])
