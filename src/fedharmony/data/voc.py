"""PASCAL VOC 2007 and 2012 in the layout of their archives.

::

    VOCdevkit/VOC2007/                                   (VOC2012: the same)
      JPEGImages/000005.jpg
      Annotations/000005.xml                             objects: name, difficult
      ImageSets/Main/{train,val,trainval,test}.txt       one image name per line

Labels come from the XML files: a class is present when the image has an object of it. An annotator
could mark an object as *difficult*, that is, hard to recognise. What becomes of a class of which an
image has difficult objects only is a choice (:attr:`Voc.Config.difficult`) that changes every
published figure a little.
"""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator

from fedharmony.data.base import datasets
from fedharmony.data.file_source import AnnotatedFiles, Content, FileSource
from fedharmony.data.tree import Tree
from fedharmony.errors import ConfigError, DataError, nearest

#: A name, not a number; `year=2012` on a command line is understood all the same.
Year: TypeAlias = Annotated[Literal["2007", "2012"], BeforeValidator(str)]
ImageSet: TypeAlias = Literal["train", "val", "trainval", "test"]
Bools: TypeAlias = npt.NDArray[np.bool_]

#: The 20 classes in label order, which is alphabetical.
CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person"),
    *("pottedplant", "sheep", "sofa", "train", "tvmonitor"),
)
INDEX = {name: c for c, name in enumerate(CLASSES)}

#: The sets that are training pool and test set by default.
DEFAULT_SETS: Mapping[Year, tuple[ImageSet, ImageSet]] = {
    "2007": ("trainval", "test"),
    "2012": ("train", "val"),
}
IMAGES: Mapping[Year, Mapping[ImageSet, int]] = {
    "2007": {"train": 2501, "val": 2510, "trainval": 5011, "test": 4952},
    "2012": {"train": 5717, "val": 5823, "trainval": 11540},
}
# Images with an object of the class that is not difficult, in label order.
TRAINVAL_2007 = (
    *(238, 243, 330, 181, 244, 186, 713, 337, 445, 141),
    *(200, 421, 287, 245, 2008, 245, 96, 229, 261, 256),
)
TEST_2007 = (
    *(204, 239, 282, 172, 212, 174, 721, 322, 417, 127),
    *(190, 418, 274, 222, 2007, 224, 97, 223, 259, 229),
)
TRAINVAL_2012 = (
    *(670, 552, 765, 508, 706, 421, 1161, 1080, 1119, 303),
    *(538, 1286, 482, 526, 4087, 527, 325, 507, 544, 575),
)

PAGE = "http://host.robots.ox.ac.uk/pascal/VOC/voc{year}/"
#: The archive with a set's lists, annotations and images.
ARCHIVES: Mapping[Year, Mapping[ImageSet, str]] = {
    "2007": {"trainval": "VOCtrainval_06-Nov-2007.tar", "test": "VOCtest_06-Nov-2007.tar"},
    "2012": {"trainval": "VOCtrainval_11-May-2012.tar"},
}


@datasets.register("voc")
class Voc(FileSource):
    """PASCAL VOC 2007 or 2012: 20 classes, 9,963 or 11,540 photographs; from the user's files."""

    @dataclass(frozen=True)
    class Config(FileSource.Config):
        """Where the data are and how they are read.

        ``difficult`` decides about a class of which an image has difficult objects only. (With an
        object of the class that is not difficult, the class is present in any case.)

        - ``"drop"``: the class is absent. An image may then have no label at all; it stays, with
          a row of zeros.
        - ``"keep"``: the class is present.
        - ``"ignore"``: in the training pool the class is present, so it is positive in the loss,
          in splits and in label correlations. In the test set its label is 0 and marked as not
          known, so the pair of image and class is left out of every metric.

          The devkit leaves such pairs out of average precision, too. Deviation: ML-GCN counts them
          as negatives in precision and recall at a threshold; here they are left out there as well.

        Attributes:
            year: "2007" or "2012".
            difficult: "drop", "keep" or "ignore", as above.
            train_set: The list of ``ImageSets/Main`` to train on; None is trainval for 2007 and
                train for 2012.
            test_set: The list to test on; None is test for 2007 and val for 2012, whose test
                annotations are not public.
        """

        year: Year = "2007"
        difficult: Literal["drop", "keep", "ignore"] = "drop"
        train_set: ImageSet | None = None
        test_set: ImageSet | None = None

        def __post_init__(self) -> None:
            super().__post_init__()
            train, test = self.sets
            if self.year == "2012" and "test" in (train, test):
                raise ConfigError(
                    "The annotations of the VOC 2012 test set are not public. Use the sets train, "
                    'val or trainval, or year = "2007".'
                )
            if train == test or {train, test} in ({"trainval", "train"}, {"trainval", "val"}):
                raise ConfigError(
                    f"train_set = {train!r} and test_set = {test!r} share images, and test images "
                    "must not be trained on. Choose sets without common images."
                )

        @property
        def sets(self) -> tuple[ImageSet, ImageSet]:
            """The names of the training set and of the test set."""
            train, test = DEFAULT_SETS[self.year]
            return self.train_set or train, self.test_set or test

    config: Config

    def annotations(self) -> Content:
        """Class names, training pool and test set, from the lists and XML files alone."""
        tree = self.tree()
        self._require_year(tree)
        train_set, test_set = self.config.sets
        train, test = self._names(tree, train_set), self._names(tree, test_set)
        if shared := sorted(set(train) & set(test)):
            raise DataError(
                f"{tree.locate(self._list(train_set))} and {self._list(test_set)} share images "
                f"({len(shared):,}), for instance {shared[0]}; test images must not be trained on. "
                f"Restore the lists from {self._archive(test_set)}."
            )
        return (
            CLASSES,
            self._annotated(tree, train_set, train, test=False),
            self._annotated(tree, test_set, test, test=True),
        )

    def obtain(self) -> str:
        """Which archives to get, and where they go."""
        return self._obtain(*self.config.sets)

    def official_counts(self) -> dict[str, int]:
        """Images per set, and images per class where the publisher's table fits the settings."""
        year, sets = self.config.year, self.config.sets
        train, test = (IMAGES[year][which] for which in sets)
        counts = {"classes": len(CLASSES), "training images": train, "test images": test}
        tables = {}
        if year == "2012" and set(sets) == {"train", "val"}:
            tables = {"images": TRAINVAL_2012}
        elif year == "2007" and sets == ("trainval", "test"):
            tables = {"training images": TRAINVAL_2007, "test images": TEST_2007}
        if self.config.difficult == "drop":
            for what, table in tables.items():
                counts |= {f"{what} with {c}": n for c, n in zip(CLASSES, table, strict=True)}
        return counts

    def _annotated(
        self, tree: Tree, which: ImageSet, names: Sequence[str], *, test: bool
    ) -> AnnotatedFiles:
        easy, present = self._objects(tree, which, names)
        labels, known = present, None
        if self.config.difficult == "drop":
            labels = easy
        elif self.config.difficult == "ignore" and test:
            labels, known = easy, easy | ~present
        files = tree.images([f"{self._top}/JPEGImages/{name}.jpg" for name in names])
        return AnnotatedFiles(files, labels.astype(np.uint8), tuple(names), known=known)

    def _objects(self, tree: Tree, which: ImageSet, names: Sequence[str]) -> tuple[Bools, Bools]:
        """``(N, 20)`` twice: classes with an object that is not difficult; classes with any."""
        folder = f"{self._top}/Annotations"
        present = set(tree.list(folder))
        absent = [name for name in names if f"{name}.xml" not in present]
        if absent:
            raise DataError(
                f"{len(absent):,} of the {len(names):,} images of {tree.locate(self._list(which))} "
                f"have no annotation: {folder} holds {len(present):,} files and lacks, for "
                f"instance, {absent[0]}.xml. {self._obtain(which)}"
            )
        easy = np.zeros((len(names), len(CLASSES)), bool)
        there = np.zeros_like(easy)
        for row, name in enumerate(names):
            file = f"{folder}/{name}.xml"
            try:
                objects = parse_objects(tree.read(file))
            except ValueError as error:
                raise DataError(
                    f"Annotation {tree.locate(file)} cannot be used: {error}. Correct it, or "
                    f"restore it from {self._archive(which)}."
                ) from error
            for c, difficult in objects:
                there[row, c] = True
                easy[row, c] |= not difficult
        return easy, there

    def _names(self, tree: Tree, which: ImageSet) -> list[str]:
        """The image names of a list, in its order."""
        file = self._list(which)
        if not tree.has(file):
            raise DataError(
                f"Data set {self.name!r} lacks {file}, the list of its set {which!r}. Searched: "
                f"{tree.where}. {self._obtain(which)}"
            )
        lines = tree.read(file).decode("utf-8", "replace").splitlines()
        names = [name for line in lines if (name := line.strip())]
        fault = ""
        if not names:
            fault = "is empty"
        elif (most := Counter(names).most_common(1)[0])[1] > 1:
            fault = f"names image {most[0]} {most[1]} times"
        if fault:
            raise DataError(
                f"The list {tree.locate(file)} {fault}. Restore it from {self._archive(which)}."
            )
        return names

    def _require_year(self, tree: Tree) -> None:
        """Say so where the data are of the other year, or ``path`` is one folder too deep."""
        if tree.has(self._top):
            return
        found = [year for year in IMAGES if tree.has(f"VOC{year}")]
        if found:
            raise DataError(
                f"Data set {self.name!r} lacks {self._top}, but there is VOC{found[0]} in "
                f'{tree.where}. Set data.year = "{found[0]}" to use it. For {self._top}: '
                f"{self.obtain()}"
            )
        if tree.has("ImageSets/Main"):
            raise DataError(
                f"Data set {self.name!r} lacks {self._top}, but {tree.where} looks like the inside "
                f"of one. Set data.path to the folder around it."
            )
        self.require(tree, self._top)

    def _obtain(self, *sets: ImageSet) -> str:
        archives = dict.fromkeys(self._archive(which) for which in sets)
        return (
            f"Get {' and '.join(archives)} from {PAGE.format(year=self.config.year)} and put "
            f"{'it' if len(archives) == 1 else 'them'}, packed or unpacked, into the folder that "
            "data.path names."
        )

    def _archive(self, which: ImageSet) -> str:
        return ARCHIVES[self.config.year]["test" if which == "test" else "trainval"]

    def _list(self, which: ImageSet) -> str:
        return f"{self._top}/ImageSets/Main/{which}.txt"

    @property
    def _top(self) -> str:
        return f"VOC{self.config.year}"


def parse_objects(xml: bytes) -> list[tuple[int, bool]]:
    """The objects of one annotation file: class index, and whether the object is difficult.

    Without an element ``difficult`` an object is not difficult. Parts of an object (head, hand,
    foot) have names, too, which are no class names and are not read.

    Raises:
        ValueError: The file is damaged, is no annotation, or has an object of an unknown class.

    >>> parse_objects(b"<annotation><object><name>bird</name></object></annotation>")
    [(2, False)]
    """
    try:
        root = ET.fromstring(xml)
    except (ET.ParseError, LookupError) as error:  # LookupError: unknown encoding
        raise ValueError(f"it is damaged or cut short ({error})") from error
    if root.tag != "annotation":
        raise ValueError(f"its outermost element is <{root.tag}>, not <annotation>")
    objects = []
    for element in root.findall("object"):
        name = element.findtext("name", "").strip()
        difficult = element.findtext("difficult", "0").strip()
        if name not in INDEX:
            raise ValueError(
                f"it has an object of the unknown class {name!r}. {nearest(name, CLASSES)[:-1]}"
            )
        if difficult not in ("0", "1"):
            raise ValueError(f"its {name} has difficult = {difficult!r}, not 0 or 1")
        objects.append((INDEX[name], difficult == "1"))
    return objects
