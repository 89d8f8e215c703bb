"""Loaders of image files: annotations first, pixels second.

Splits and reports need labels only, and a wrong path should be found before an hour of decoding. A
:class:`FileSource` therefore reads annotations without touching an image; decoding, caching,
leaving out unreadable images and checking against the publisher's figures are the same for all.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeAlias

import numpy as np
import numpy.typing as npt
from annotated_types import Ge, Le

from fedharmony.config import FilePath
from fedharmony.data.base import DataSet, LabelledImages, Source, cache_folder, refuse_unequal
from fedharmony.data.cache import Resize, ResizeMode, Unreadable, decode, decoded
from fedharmony.data.check import Check, CheckLine, Tell
from fedharmony.data.derived import in_bytes
from fedharmony.data.tree import ImageFiles, Tree, TreeImages, open_tree
from fedharmony.errors import DataError, some
from fedharmony.types import Labels

#: Images that a check decodes, of each part.
SAMPLE = 16


@dataclass(frozen=True, eq=False)
class AnnotatedFiles:
    """Image files with what :class:`LabelledImages` has of images; a file's row is its index."""

    files: ImageFiles
    labels: Labels
    ids: tuple[str, ...]
    users: npt.NDArray[Any] | None = None
    known: npt.NDArray[np.bool_] | None = None

    def __post_init__(self) -> None:
        refuse_unequal(
            files=self.files, labels=self.labels, ids=self.ids, users=self.users, known=self.known
        )

    def __len__(self) -> int:
        return len(self.labels)


#: Class names, training part, test part.
Content: TypeAlias = tuple[tuple[str, ...], AnnotatedFiles, AnnotatedFiles]


class FileSource(Source):
    """A loader of the user's own copy of a data set.

    A subclass writes :meth:`annotations` and :meth:`obtain`, and where the publisher gives figures
    :meth:`official_counts`.
    """

    @dataclass(frozen=True)
    class Config(Source.Config):
        """Settings of all loaders of image files.

        Attributes:
            path: The folder or archive with the data.
            image_size: Side of the square that every image becomes.
            resize: ``"stretch"`` resizes both sides, ``"crop"`` the shorter side and cuts the
                middle out, ``"pad"`` the longer side and adds black bars.
            unreadable: ``"error"`` stops at missing or damaged images, ``"skip"`` leaves them out.
        """

        path: FilePath = ""
        image_size: Annotated[int, Ge(1), Le(4096)] = 224
        resize: ResizeMode = "stretch"
        unreadable: Unreadable = "error"

    config: Config

    @abstractmethod
    def annotations(self) -> Content:
        """Class names, training part and test part; reads no image."""

    @abstractmethod
    def obtain(self) -> str:
        """Which official archives to get, from what page, and where to put them: full sentences."""

    def official_counts(self) -> Mapping[str, int]:
        """The publisher's figures under the names of :meth:`found_counts`; none by default."""
        return {}

    def found_counts(
        self, classes: tuple[str, ...], train: AnnotatedFiles, test: AnnotatedFiles
    ) -> dict[str, int]:
        """Figures of the data that are there; a subclass may add its own.

        "classes"; "training images" and "test images"; "unlabelled training images" and
        "unlabelled test images"; "training images with CLASS", "test images with CLASS" and "images
        with CLASS" for both together; where there are users, "training users" and "test users".
        """
        counts = {"classes": len(classes)}
        for part, data in (("training", train), ("test", test)):
            counts[f"{part} images"] = len(data)
            counts[f"unlabelled {part} images"] = int((~data.labels.any(1)).sum())
            if data.users is not None:
                counts[f"{part} users"] = len(np.unique(data.users))
            positives = data.labels.sum(0, dtype=np.int64).tolist()
            for name, count in zip(classes, positives, strict=True):
                counts[f"{part} images with {name}"] = count
                both = f"images with {name}"
                counts[both] = counts.get(both, 0) + count
        return counts

    def tree(self) -> Tree:
        """The files at ``path``; refuses a path that is not set or cannot be read."""
        if not self.config.path:
            raise DataError(
                f"Where are the images of data set {self.name!r}? Set data.path to the folder or "
                f"archive that holds them. {self.obtain()}"
            )
        try:
            return open_tree(self.config.path)
        except DataError as error:
            raise DataError(f"Data set {self.name!r}: {error} {self.obtain()}") from error

    def require(self, tree: Tree, *names: str) -> None:
        """Refuse a tree that lacks any of the files or folders ``names``."""
        absent = [name for name in names if not tree.has(name)]
        if absent:
            top = tree.list()
            holds = some(top) if top else "nothing"
            raise DataError(
                f"Data set {self.name!r} lacks {some(absent)}. Searched: {tree.where}, with "
                f"{holds} at the top. {self.obtain()}"
            )

    def load(self, progress: Tell | None = None, content: Content | None = None) -> DataSet:
        """Read the annotations, and decode the images or take them from the cache.

        ``progress`` is called with the number of images decoded and to be decoded, of the training
        part and then of the test part. ``content`` is what :meth:`annotations` gave, if asked.
        """
        content = content or self.annotations()
        self.refuse_missing(content)
        classes, train, test = content
        return DataSet(
            self.name, classes, self._images(train, progress), self._images(test, progress)
        )

    def refuse_missing(self, content: Content) -> None:
        """Tell about missing images before the others are decoded."""
        for part, data in (("training", content[1]), ("test", content[2])):
            absent = missing_files(data.files)
            if absent and self.config.unreadable == "error":
                names = some([data.files.name(i) for i in absent])
                raise DataError(
                    f"Data set {self.name!r} lacks {len(absent):,} of {len(data):,} {part} images: "
                    f'{names}. {self.obtain()} Or set data.unreadable = "skip" to leave them out.'
                )

    def _images(self, data: AnnotatedFiles, progress: Tell | None) -> LabelledImages:
        resize = Resize(self.config.image_size, self.config.resize)
        result = decoded(data.files, resize, unreadable=self.config.unreadable, progress=progress)
        kept = result.kept
        return LabelledImages(
            images=result.images,
            labels=data.labels[kept],
            ids=tuple(data.ids[i] for i in kept),
            users=None if data.users is None else data.users[kept],
            known=None if data.known is None else data.known[kept],
        )

    def check(self, tell: Tell | None = None) -> Check:
        """Compare the data with the publisher's figures, and try some of the images."""
        classes, train, test = self.annotations()
        found = self.found_counts(classes, train, test)
        lines = [
            CheckLine(what, expected, found[what])
            for what, expected in self.official_counts().items()
        ]
        for part, data in (("training", train), ("test", test)):
            there = len(data) - len(missing_files(data.files))
            lines.append(CheckLine(f"{part} image files", len(data), there))
            # From the first image to the last.
            sample = np.linspace(0, len(data) - 1, min(len(data), SAMPLE)).round().astype(int)
            readable = sum(_readable(data.files, i) for i in sample.tolist())
            lines.append(CheckLine(f"sampled {part} images that decode", len(sample), readable))
        return Check(tuple(lines), self._advice(lines, len(train) + len(test)))

    def _advice(self, lines: list[CheckLine], count: int) -> str:
        if not all(line.ok for line in lines):
            return f"The data are not complete, or not the official ones. {self.obtain()}"
        side = self.config.image_size
        size = in_bytes(Resize(side).nbytes(count))
        return (
            f"The data are ready. The first run decodes the images to {side} × {side} pixels; "
            f"that takes {size} in {cache_folder()}."
        )


def missing_files(files: ImageFiles) -> list[int]:
    """Missing files, where asking is cheap."""
    return files.missing() if isinstance(files, TreeImages) else []


def _readable(files: ImageFiles, i: int) -> bool:
    try:
        decode(files.read(i), Resize(1))
    except Exception:  # as in decoding: damaged files make Pillow raise almost anything
        return False
    return True
