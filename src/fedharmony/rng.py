"""Every random draw of the package, derived from (seed, purpose, round, client).

There is no global random state anywhere: a generator is made where it is needed and thrown away.
Hence a resumed run draws what the undisturbed run draws, and adding a draw for one purpose never
shifts the draws for another. Split, model and run use separate seeds (``split.seed``,
``model.seed``, ``run.seed``).

What has to stay secret, the noise and the cohorts of a private run, comes from no seed: it is drawn
from a :class:`Keystream`, under a key that nobody else has.

>>> a, b = numpy_rng(0, "order", 3, 7), numpy_rng(0, "order", 3, 7)
>>> bool((a.permutation(5) == b.permutation(5)).all())
True
"""

from __future__ import annotations

import hashlib
import hmac
import json

import numpy as np
import numpy.typing as npt
import torch

from fedharmony.errors import ConfigError

#: Pairs of Gaussian numbers that are made at a time, so that memory stays bounded.
PAIRS = 2**17


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


class Keystream:
    """Random numbers for one purpose under a secret key: ChaCha20, read from its first block on.

    The cipher's own key is HMAC-SHA256(key, purpose): numbers of one purpose say nothing about
    those of another, nor about the key.

    >>> one, other = (Keystream(bytes(32), "noise", round).uniform(3) for round in (0, 1))
    >>> bool((one == other).any()), bool((0 <= one).all() and (one < 1).all())
    (False, True)
    """

    def __init__(self, key: bytes, *purpose: str | int) -> None:
        try:
            from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
        except ImportError as error:
            raise ConfigError(
                "[privacy] needs the package cryptography, which draws the noise. Install it: pip "
                "install 'fedharmony[privacy]'."
            ) from error
        own = hmac.digest(key, json.dumps(purpose).encode(), "sha256")
        self._cipher = Cipher(algorithms.ChaCha20(own, bytes(16)), mode=None).encryptor()

    def uniform(self, count: int) -> npt.NDArray[np.float64]:
        """Multiples of 2⁻⁵³ in [0, 1), each with the same chance."""
        words = np.frombuffer(self._cipher.update(bytes(8 * count)), "<u8")
        return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53

    def normal(self, count: int) -> npt.NDArray[np.float64]:
        """Gaussian numbers of deviation 1, by Box and Muller: two from two uniform ones."""
        found = np.empty(count + count % 2)
        for start in range(0, len(found), 2 * PAIRS):
            part = found[start : start + 2 * PAIRS]
            first, second = self.uniform(len(part)).reshape(2, -1)
            radius, angle = np.sqrt(-2 * np.log(1 - first)), 2 * np.pi * second  # 1 − u > 0
            part[::2], part[1::2] = radius * np.cos(angle), radius * np.sin(angle)
        return found[:count]
