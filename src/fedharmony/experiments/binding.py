"""What a run is made of, as one hash per part: data that changed are told from data that did not.

A run's checkpoint and its ``binding.json`` carry these hashes, and so do its results. Whoever goes
on with a run, or sets its numbers beside others, first compares them, and can say *which* part is
another one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fedharmony import stopping
from fedharmony.data.base import DataSet, Images, LabelledImages, SomeImages, TensorImages
from fedharmony.data.cache import MappedImages
from fedharmony.partition.base import Partition
from fedharmony.types import Index

#: Name of a part → its hash; :data:`NOTHING` for a part that the data do not have.
Binding: TypeAlias = dict[str, str]

NOTHING = "none"
#: How the names of files begin.
FILE = "file"
#: Images hashed at a time where they are not at hand as one array.
SLAB = 256


def bind(data: DataSet, partition: Partition, held_out: Index | None = None) -> Binding:
    """The hashes of classes, images, names, labels, unknown marks, users and partition.

    Data are hashed as loaded: before clients see them through transforms, and where they were
    loaded to. ``held_out`` are the training images that take the place of the test set, if any do.
    """
    return {
        "class names": _text(data.classes),
        **_part("training", data.train),
        **_part("test", data.test),
        "partition": partition.sha256,
        "held-out images": NOTHING if held_out is None else _array(held_out),
    }


def bind_files(files: Mapping[str, Mapping[str, str]]) -> Binding:
    """The hashes of the files that model and method begin with, by section and setting."""
    named = {
        f"{section}.{name}": Path(path)
        for section in ("model", "methods")
        for name, path in files[section].items()
    }
    return {f"{FILE} {name}": _sha(path) for name, path in named.items() if path.is_file()}


def _sha(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The names of the parts that differ, in order; a file that one side lacks is not compared.

    >>> changed({"class names": "a", "partition": "b"}, {"class names": "a", "partition": "c"})
    ['partition']
    """
    names = [n for n in {**now, **before} if n.split()[0] != FILE or (n in now and n in before)]
    return [name for name in names if before.get(name) != now.get(name)]


def _part(name: str, part: LabelledImages) -> Binding:
    return {
        f"{name} images": _pixels(part.images),
        f"{name} image names": NOTHING if part.ids is None else _text(part.ids),
        f"{name} labels": _array(part.labels),
        f"{name} unknown marks": NOTHING if part.known is None else _array(part.known),
        f"{name} users": NOTHING if part.users is None else _text(part.users.tolist()),
    }


def _pixels(images: Images) -> str:
    if isinstance(images, MappedImages) and images.sha256 is not None:
        return images.sha256  # verified when the file was opened
    if isinstance(images, SomeImages):
        return _text([_pixels(images.images), _array(images.index.numpy())])
    if isinstance(images, TensorImages):
        return _array(images.pixels.cpu().numpy())
    sha = hashlib.sha256(str((len(images), *images.shape)).encode())
    for start in range(0, len(images), SLAB):
        stopping.end_if_asked()
        index = torch.arange(start, min(start + SLAB, len(images)))
        sha.update(np.ascontiguousarray(images.gather(index, "cpu").numpy()).data)
    return sha.hexdigest()


def _array(array: npt.NDArray[Any]) -> str:
    sha = hashlib.sha256(f"{array.dtype} {array.shape}".encode())
    sha.update(np.ascontiguousarray(array).data)
    return sha.hexdigest()


def _text(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, default=str).encode()).hexdigest()
