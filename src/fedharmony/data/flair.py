"""FLAIR: 429,078 annotated photographs of 51,414 Flickr users, who are its natural clients.

The publisher divides the users, and with them the images, into train, val and test; "dev" is
another word for val. Each image has labels at two levels, 17 coarse and 1,628 fine ones, and both
lists stand beside the image. A fine label may be the name of a coarse one, and the published table
of fine and coarse names is no function; so neither level is ever derived from the other.

Two forms of the same data are read (:mod:`fedharmony.data.flair_forms`):

* ``labels_and_metadata.json`` with the folder ``small_images``, as published, packed or unpacked;
* the Parquet files of the Hugging Face data set apple/flair, with the encoded images inside.

Both give the same classes in the same order and the same images with the same labels.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np

from fedharmony.data.base import datasets
from fedharmony.data.file_source import AnnotatedFiles, Content, FileSource
from fedharmony.data.flair_forms.parquet import read_parquet
from fedharmony.data.flair_forms.published import METADATA, read_json
from fedharmony.data.flair_forms.records import COARSE, OFFICIAL_LABELS, Level, Partition, Records
from fedharmony.errors import DataError
from fedharmony.reading import is_file, user_path

#: The publisher's figures: images and users of a partition.
OFFICIAL_IMAGES: Mapping[Partition, int] = {"train": 345_879, "val": 39_239, "test": 43_960}
OFFICIAL_USERS: Mapping[Partition, int] = {"train": 41_131, "val": 5_141, "test": 5_142}
OFFICIAL_CLASSES: Mapping[Level, int] = {"coarse": len(COARSE), "fine": 1_628}


@datasets.register("flair")
class Flair(FileSource):
    """FLAIR, Flickr photographs with their users as clients; 17 coarse or 1,628 fine labels."""

    @dataclass(frozen=True)
    class Config(FileSource.Config):
        """Where the data are and which labels count.

        Attributes:
            labels: "coarse" (17 classes) or "fine" (1,628).
            test_split: The partition the model is measured on: "test", or "val" for tuning.
        """

        labels: Level = "coarse"
        test_split: Literal["test", "val"] = "test"

    config: Config

    def annotations(self) -> Content:
        """The coarse classes, or all fine names in alphabetical order; train and test part."""
        records = self._records
        return records.classes, records.part("train"), records.part(self.config.test_split)

    def obtain(self) -> str:
        """What to get, and where it goes."""
        return (
            f"Get {METADATA} and small_images-00.tar.gz to small_images-42.tar.gz with "
            "download_dataset.py of https://github.com/apple/ml-flair and put them, packed or "
            "unpacked, into the folder that `path` names. The folder with the Parquet files of "
            "https://huggingface.co/datasets/apple/flair can be named instead."
        )

    def official_counts(self) -> Mapping[str, int]:
        """Images and users per partition and, at the coarse level, images per class."""
        test = self.config.test_split
        counts = {
            "classes": OFFICIAL_CLASSES[self.config.labels],
            "training images": OFFICIAL_IMAGES["train"],
            "test images": OFFICIAL_IMAGES[test],
            "training users": OFFICIAL_USERS["train"],
            "test users": OFFICIAL_USERS[test],
            "images of all partitions": sum(OFFICIAL_IMAGES.values()),
            "users of all partitions": sum(OFFICIAL_USERS.values()),
        }
        if self.config.labels == "coarse":
            counts |= {_everywhere(name): count for name, count in OFFICIAL_LABELS.items()}
        return counts

    def found_counts(
        self, classes: tuple[str, ...], train: AnnotatedFiles, test: AnnotatedFiles
    ) -> dict[str, int]:
        """The figures of the two parts, and those of all three partitions together."""
        records = self._records
        counts = {
            "images of all partitions": len(records.ids),
            "users of all partitions": len(set(records.users)),
        }
        images = np.bincount(records.columns, minlength=len(classes))
        counts |= {_everywhere(name): int(n) for name, n in zip(classes, images, strict=True)}
        return super().found_counts(classes, train, test) | counts

    @functools.cached_property
    def _records(self) -> Records:
        level, path = self.config.labels, user_path(self.config.path)
        if path.suffix in (".hdf5", ".h5"):
            raise DataError(f"HDF5 files of FLAIR are not read ({path}). {self.obtain()}")
        tree = self.tree()
        # Asking the tree first would open every archive in the folder.
        tables = sorted([*path.glob("*.parquet"), *path.glob("data/*.parquet")])
        if tables and not is_file(path / METADATA):
            return read_parquet(tables, level)
        self.require(tree, METADATA)
        return read_json(tree, level)


def _everywhere(name: str) -> str:
    return f"images of all partitions with {name}"
