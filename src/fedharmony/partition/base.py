"""What a split is, how it is stored, and the contract every splitter keeps.

A splitter sees the label matrix alone, never an image, and draws from a generator of its own seed:
the same labels, number of clients, settings and seed give the same :class:`Partition`, recognised
by its SHA-256.
"""

from __future__ import annotations

import hashlib
import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, TypeAlias, final

import numpy as np
import numpy.typing as npt

from fedharmony.config import Checked
from fedharmony.errors import PartitionError
from fedharmony.files import write_atomically
from fedharmony.registry import Registry
from fedharmony.types import Index, Labels

splitters: Registry[type[Splitter]] = Registry("splitter", "fedharmony.partition")

#: The natural owner of every image, ``(N,)``, where the data have owners.
Owners: TypeAlias = npt.NDArray[Any] | None

FORMAT = "fedharmony-partition-1"
#: K where neither the settings nor the data say how many clients there are.
DEFAULT_CLIENTS = 50


@dataclass(frozen=True, eq=False)
class Partition:
    """Which client owns which image.

    Attributes:
        indices: Per client the sorted int64 indices of its images; disjoint, none of them empty.
        images: N, the number of images the indices refer to.
        splitter: The name of the splitter that drew it.
        settings: The splitter's settings.
        seed: The seed it was drawn with.
        transforms: Per client the name of its image transform, or None where there are none.
        names: Per client the owner of its images; empty where clients are no owners.

    >>> two = Partition((np.array([0, 2]), np.array([1])), images=3)
    >>> two.sizes.tolist(), two.sha256[:8]
    ([2, 1], 'ce42de7f')
    """

    indices: tuple[Index, ...]
    images: int
    splitter: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)
    seed: int = 0
    transforms: tuple[str, ...] | None = None
    names: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if problem := _fault(self.indices, self.images):
            raise PartitionError(f"This is not a division of {self.images} images: {problem}.")
        for what, of in (("transforms", self.transforms), ("names", self.names or None)):
            if of is not None and len(of) != len(self.indices):
                raise PartitionError(
                    f"A partition of {len(self.indices)} clients needs as many {what}, got "
                    f"{len(of)}."
                )

    @property
    def sizes(self) -> Index:
        """n_k, the number of images of every client: int64 ``(K,)``."""
        return np.array([len(index) for index in self.indices], np.int64)

    def refuse_other(self, labels: Labels) -> None:
        """Refuse labels of other images than those that are divided."""
        if self.images != len(labels):
            raise PartitionError(
                f"The partition divides {self.images} images, but there are labels for "
                f"{len(labels)}. Use the labels it was drawn from."
            )

    @cached_property
    def sha256(self) -> str:
        """Digest of the index lists, and of the transforms where there are any.

        The bytes are the format's name, then little-endian int64: N, K, and for every client n_k
        and its n_k indices; then, with transforms, their names as a JSON list.
        """
        digest = hashlib.sha256(FORMAT.encode())
        digest.update(np.array([self.images, len(self.indices)], "<i8").tobytes())
        for index in self.indices:
            digest.update(np.array(len(index), "<i8").tobytes())
            digest.update(index.astype("<i8").tobytes())
        if self.transforms is not None:
            digest.update(json.dumps(self.transforms).encode())
        return digest.hexdigest()

    def save(self, path: str | Path) -> None:
        """Write a JSON file, whole or not at all."""
        path = Path(path)
        content = {
            "format": FORMAT,
            "sha256": self.sha256,
            "splitter": self.splitter,
            "settings": dict(self.settings),
            "seed": self.seed,
            "images": self.images,
            "transforms": self.transforms,
            "names": self.names,
            "indices": [index.tolist() for index in self.indices],
        }
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, json.dumps(content, separators=(",", ":")).encode())
        except OSError as error:
            raise PartitionError(
                f"Cannot write the partition file {path}: {error}. Choose a folder that you may "
                "write to."
            ) from error

    @classmethod
    def load(cls, path: str | Path, images: int | None = None) -> Partition:
        """Read a file written by :meth:`save`, and verify it.

        ``images`` is N of the data set it is to be used with; None accepts the file's own.
        """
        path = Path(path)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise PartitionError(
                f"Cannot read the partition file {path}: {error}. Check the path."
            ) from error
        except ValueError as error:
            raise PartitionError(
                f"The partition file {path} is not whole JSON ({error}); it was cut short or "
                "damaged. Restore it from a copy, or split again."
            ) from error
        try:
            found, named = cls._parse(content), content["sha256"]
        except (PartitionError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise PartitionError(
                f"The partition file {path} does not hold a valid partition "
                f"({type(error).__name__}: {error}). Restore it from a copy, or split again."
            ) from error
        if found.sha256 != named:
            raise PartitionError(
                f"The partition file {path} was changed: its index lists have SHA-256 "
                f"{found.sha256}, but it names {named}. Restore it from a copy, or split again."
            )
        if images is not None and images != found.images:
            raise PartitionError(
                f"The partition file {path} divides {found.images} images, the data set has "
                f"{images}. Use the data it was made for, or split again."
            )
        return found

    @classmethod
    def _parse(cls, content: Any) -> Partition:
        if content["format"] != FORMAT:
            raise PartitionError(f"its format is {content['format']!r}, not {FORMAT!r}")
        transforms = content["transforms"]
        return cls(
            indices=tuple(_int64(index) for index in content["indices"]),
            images=int(content["images"]),
            splitter=str(content["splitter"]),
            settings=dict(content["settings"]),
            seed=int(content["seed"]),
            transforms=None if transforms is None else tuple(map(str, transforms)),
            names=tuple(map(str, content.get("names", ()))),
        )


def _int64(numbers: Iterable[Any]) -> Index:
    """Whole numbers as an array; fractions and words are refused rather than rounded."""
    array = np.array(numbers)
    if len(array) and array.dtype != np.int64:
        raise TypeError(f"indices must be whole numbers, got {array.dtype}")
    return array.astype(np.int64)


def _fault(indices: tuple[Index, ...], images: int) -> str | None:
    """What is wrong with ``indices`` as disjoint sorted lists within N images, if anything."""
    if not indices:
        return "there is no client"
    for client, index in enumerate(indices):
        if index.dtype != np.int64 or index.ndim != 1:
            return f"client {client} has {index.dtype} {index.shape} indices, not int64 (n,)"
        if len(index) == 0:
            return f"client {client} has no image"
        if (np.diff(index) <= 0).any():
            return f"the indices of client {client} are not in ascending order"
        if index[0] < 0 or index[-1] >= images:
            return f"client {client} has indices outside 0 … {images - 1}"
    owners = np.bincount(np.concatenate(indices), minlength=images)
    if owners.max() > 1:
        return f"image {owners.argmax()} belongs to {owners.max()} clients"
    return None


class Splitter(ABC):
    """A way of dividing images among clients: settings in, a :class:`Partition` out.

    A subclass implements :meth:`split`; users call :meth:`partition`, which refuses the impossible
    before any work and checks what comes back. ``covers`` is False where it may leave images out.
    """

    name: ClassVar[str] = ""
    covers: ClassVar[bool] = True

    @dataclass(frozen=True)
    class Config(Checked):
        """Settings of the splitter."""

    config: Config

    def __init__(self, config: Config | None = None) -> None:
        self.config = type(self).Config() if config is None else config

    @abstractmethod
    def split(self, labels: Labels, clients: int, seed: int, users: Owners = None) -> list[Index]:
        """Divide N images with labels ``(N, C)`` among K clients; all draws derive from the seed.

        Returns K sorted, disjoint, non-empty int64 arrays that hold every image once; some images
        may be missing where ``covers`` is False.
        """

    def default_clients(self, users: Owners) -> int:
        """K when the caller names none; ``users`` as in :meth:`split`."""
        return DEFAULT_CLIENTS

    @final
    def partition(
        self, labels: Labels, clients: int | None, seed: int, users: Owners = None
    ) -> Partition:
        """Divide the images, and check the result; arguments as in :meth:`split`.

        Without a number of ``clients`` there are :meth:`default_clients`.
        """
        images = len(labels)
        if clients is None:
            clients = self.default_clients(users)
        if clients < 1:
            raise PartitionError(f"Cannot split among {clients} clients. Ask for at least one.")
        if clients > images:
            raise PartitionError(
                f"Cannot split {images} images among {clients} clients: every client needs one. "
                f"Ask for at most {images} clients."
            )
        indices = tuple(self.split(labels, clients, seed, users))
        names = _owners_of(indices, users)
        partition = Partition(indices, images, self.name, asdict(self.config), seed, names=names)
        held = int(partition.sizes.sum())
        if len(indices) != clients or (self.covers and held != images):
            raise PartitionError(
                f"Splitter {self.name!r} returned {len(indices)} clients with {held} images "
                f"instead of {clients} with {images}. This is a mistake in the splitter."
            )
        return partition


def _owners_of(indices: Iterable[Index], users: Owners) -> tuple[str, ...]:
    """The owner of each client's images, where every client is one owner and no two are the same.

    >>> _owners_of([np.array([0, 2]), np.array([1])], np.array(["eve", "bob", "eve"]))
    ('eve', 'bob')
    >>> _owners_of([np.array([0, 1]), np.array([2])], np.array(["eve", "bob", "eve"]))
    ()
    """
    found = [] if users is None else [np.unique(users[index]) for index in indices]
    names = tuple(str(owners[0]) for owners in found if len(owners) == 1)
    return names if len(set(names)) == len(found) else ()


def by_owner(owner: Index, clients: int) -> list[Index]:
    """The sorted image indices of every client, given the owner ``(N,)`` of every image.

    >>> [index.tolist() for index in by_owner(np.array([1, 0, 1]), 2)]
    [[1], [0, 2]]
    """
    order = np.argsort(owner, kind="stable")
    ends = np.cumsum(np.bincount(owner, minlength=clients))
    return [np.asarray(index, np.int64) for index in np.split(order, ends[:-1])]
