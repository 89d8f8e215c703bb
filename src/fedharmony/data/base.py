"""What a data set is: images or feature vectors as they are, and a label matrix that needs neither.

A loader is one class in one file, registered in :data:`datasets`; its ``load`` gives a
:class:`DataSet`. Splitting and reporting read only ``labels``; training asks for pixels through
:meth:`Images.gather`, which an in-memory tensor, a tensor on the device and a memory-mapped cache
can all answer. Inputs are arrays of one shape and type: images are uint8 (channels, height, width),
feature vectors float32 (width,). Both are called images wherever the difference does not matter.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedharmony.config import Checked
from fedharmony.data.check import Check, Tell
from fedharmony.errors import DataError, shown
from fedharmony.registry import Registry
from fedharmony.types import Index, Labels

datasets: Registry[type[Source]] = Registry("dataset", "fedharmony.data")


class Images(Protocol):
    """N images of one size, or N feature vectors of one width, read by index."""

    def __len__(self) -> int:
        """The number of images N."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height and width of every image; the width of every feature vector."""

    def gather(self, index: Tensor, device: torch.device | str) -> Tensor:
        """The images at ``index``, on ``device``.

        Args:
            index: int64 of any shape. Negative entries are padding: their rows have the right
                shape and arbitrary content.
            device: Where the result lives.

        Returns:
            ``(*index.shape, *shape)``: uint8 for images, float32 for feature vectors.
        """


class TensorImages:
    """Images in one uint8 tensor ``(N, channels, height, width)``, or features ``(N, width)``.

    >>> images = TensorImages(torch.arange(12, dtype=torch.uint8).reshape(3, 1, 2, 2))
    >>> images.gather(torch.tensor([[2], [-1]]), "cpu").shape
    torch.Size([2, 1, 1, 2, 2])
    >>> images.gather(torch.tensor(2), "cpu").tolist()
    [[[8, 9], [10, 11]]]
    >>> TensorImages(torch.tensor([[0.5, -1.0], [2.0, 3.5]])).gather(torch.tensor(1), "cpu")
    tensor([2.0000, 3.5000])
    """

    def __init__(self, pixels: Tensor) -> None:
        if (pixels.dtype, pixels.ndim) not in ((torch.uint8, 4), (torch.float32, 2)):
            raise DataError(
                "Images must be a uint8 tensor of shape (N, channels, height, width), and feature "
                f"vectors a float32 tensor of shape (N, width); got {pixels.dtype} of shape "
                f"{tuple(pixels.shape)}. Convert them before wrapping."
            )
        self.pixels = pixels
        # Eight bytes at a time: a GPU copies by number, not by byte.
        flat = pixels.flatten(1)
        row = flat.shape[1] * flat.element_size()
        whole = pixels.is_contiguous() and row % 8 == 0 and flat.data_ptr() % 8 == 0
        self._words = flat.view(torch.int64) if whole else flat

    def __len__(self) -> int:
        return len(self.pixels)

    @property
    def shape(self) -> tuple[int, ...]:
        """See :attr:`Images.shape`."""
        return tuple(self.pixels.shape[1:])

    def to(self, device: torch.device | str) -> TensorImages:
        """The same images with the tensor on ``device``, so that ``gather`` copies nothing over."""
        return TensorImages(self.pixels.to(device))

    def gather(self, index: Tensor, device: torch.device | str) -> Tensor:
        """See :meth:`Images.gather`; padding rows repeat image 0."""
        flat = index.to(self.pixels.device).reshape(-1).clamp(min=0)
        rows = self._words.index_select(0, flat).view(self.pixels.dtype)
        return rows.reshape(*index.shape, *self.shape).to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class SomeImages:
    """Some of the images of another collection, by index.

    >>> images = TensorImages(torch.arange(12, dtype=torch.uint8).reshape(3, 1, 2, 2))
    >>> SomeImages(images, torch.tensor([2, 0])).gather(torch.tensor([0]), "cpu").flatten().tolist()
    [8, 9, 10, 11]
    """

    images: Images
    index: Tensor

    def __len__(self) -> int:
        return len(self.index)

    @property
    def shape(self) -> tuple[int, ...]:
        """See :attr:`Images.shape`."""
        return self.images.shape

    def gather(self, index: Tensor, device: torch.device | str) -> Tensor:
        """See :meth:`Images.gather`."""
        chosen = self.index[index.cpu().clamp(min=0)]
        return self.images.gather(torch.where(index.cpu() < 0, -1, chosen), device)


def refuse_unequal(**parts: Sized | None) -> None:
    """Refuse parts of a data set that are not of one length; None is not there."""
    lengths = {name: len(part) for name, part in parts.items() if part is not None}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{count} {name}" for name, count in lengths.items())
        raise DataError(f"The parts of a data set do not match: {counts}. Correct the loader.")


@dataclass(frozen=True, eq=False)
class LabelledImages:
    """Images with their label matrix.

    Attributes:
        images: The N images.
        labels: uint8 ``(N, C)``, 1 where the class is present.
        ids: One name per image, or None when the images have none.
        users: ``(N,)``, the natural owner of every image, or None when there are none.
        known: bool ``(N, C)``, False where a label is unknown; None means that all are known.
    """

    images: Images
    labels: Labels
    ids: tuple[str, ...] | None = None
    users: npt.NDArray[Any] | None = None
    known: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        if self.labels.dtype != np.uint8 or self.labels.ndim != 2 or (self.labels > 1).any():
            raise DataError(
                "Labels must be a uint8 matrix (images × classes) of zeros and ones, got "
                f"{self.labels.dtype} of shape {self.labels.shape}. Correct the loader."
            )
        refuse_unequal(images=self.images, labels=self.labels, ids=self.ids, users=self.users)
        if self.known is not None and self.known.shape != self.labels.shape:
            raise DataError(
                f"The mask of known labels has shape {self.known.shape}, the labels have "
                f"{self.labels.shape}. Correct the loader."
            )

    def __len__(self) -> int:
        return len(self.labels)

    def subset(self, index: Index) -> LabelledImages:
        """The images at ``index``, in that order; pixels are not copied."""
        return LabelledImages(
            SomeImages(self.images, torch.from_numpy(index)),
            self.labels[index],
            None if self.ids is None else tuple(self.ids[i] for i in index),
            None if self.users is None else self.users[index],
            None if self.known is None else self.known[index],
        )


@dataclass(frozen=True, eq=False)
class DataSet:
    """A training pool, a pooled test set, and the class names of both.

    Attributes:
        name: The registered name of its source.
        classes: C class names in label order.
        train: What is divided among the clients.
        test: What the global model is measured on; it never enters a client.
        planted: float64 ``(C, C)``, the true label correlation φ where the label process is known.
        features: Names of the features, where inputs are vectors and have names.
        shelf: What runs on these data were answered, for those that follow.
    """

    name: str
    classes: tuple[str, ...]
    train: LabelledImages
    test: LabelledImages
    planted: npt.NDArray[np.float64] | None = None
    features: tuple[str, ...] = ()
    shelf: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def __post_init__(self) -> None:
        count = len(self.classes)
        for part, columns in (
            ("training labels", self.train.labels.shape[1]),
            ("test labels", self.test.labels.shape[1]),
            ("planted correlation", count if self.planted is None else len(self.planted)),
        ):
            if columns != count:
                raise DataError(
                    f"Data set {self.name!r} names {count} classes, but its {part} have {columns}. "
                    "Correct the loader."
                )
        for part, data in (("training", self.train), ("test", self.test)):
            if data.known is not None and not data.known.any():
                raise DataError(
                    f"Data set {self.name!r}: no label of any {part} image is known, so nothing "
                    "can be learned or measured. Complete the labels."
                )
        if self.train.images.shape != self.test.images.shape:
            raise DataError(
                f"Data set {self.name!r} has training images of shape {self.train.images.shape} "
                f"and test images of shape {self.test.images.shape}. Correct the loader."
            )


class Source(ABC):
    """A loader: settings in, a :class:`DataSet` out. Nothing is read before ``load``."""

    name: ClassVar[str] = ""

    @dataclass(frozen=True)
    class Config(Checked):
        """Settings of the loader."""

    config: Config

    def __init__(self, config: Config | None = None) -> None:
        self.config = type(self).Config() if config is None else config

    @abstractmethod
    def load(self) -> DataSet:
        """Read or build the data; raises :class:`DataError` when they are missing or damaged."""

    def check(self, tell: Tell | None = None) -> Check:
        """Look at data on disk, and say what is there and what is missing.

        ``tell`` is called with the number of files looked at and of all.
        """
        raise DataError(
            f"Data set {self.name!r} is not read from files, so there is nothing to check."
        )


def load_data(source: Source) -> DataSet:
    """What a loader reads or builds; whatever is no data set is refused."""
    data: object = source.load()
    if not isinstance(data, DataSet):
        code = type(source).load.__code__
        raise DataError(
            f"{code.co_filename}, line {code.co_firstlineno}: load of the data set {source.name!r} "
            f"must return a DataSet, and returns {shown(data)}."
        )
    return data


def cache_folder() -> Path:
    """Where derived data are kept: ``FEDHARMONY_CACHE``, or else the user's cache folder.

    The folder may be missing. Data that the package makes itself do without it; image files are
    decoded into it.

    >>> import os
    >>> from unittest.mock import patch
    >>> with patch.dict(os.environ, {"FEDHARMONY_CACHE": "somewhere"}):
    ...     cache_folder().name
    'somewhere'
    """
    if own := os.environ.get("FEDHARMONY_CACHE"):
        return Path(own)
    # expanduser leaves "~" alone where there is no home folder; Path.home() would raise.
    shared = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # noqa: PTH111
    return Path(shared) / "fedharmony"
