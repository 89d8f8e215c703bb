"""MS-COCO 2014 and 2017 in the layout of their archives.

::

    coco/
      train2014/COCO_train2014_000000000009.jpg          (train2017/000000000009.jpg)
      val2014/COCO_val2014_000000000042.jpg
      annotations/instances_{train,val}2014.json         (instances_{train,val}2017.json)

A class is present when the image has at least one annotation of it, crowds included. The ids of the
80 categories run from 1 to 90 with gaps; the label index of a category is the rank of its id, so
person is 0 and toothbrush 79. (Label files in alphabetical order, airplane first, are also in use:
compare class names before exchanging any.) 2014 and 2017 are two divisions of the same images.

Nine tenths of an annotation file are outlines, which no label needs. They are dropped while the
file is read, so that 600,000 annotations fit into little more memory than their text.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, NamedTuple, TypeAlias, TypeVar, get_type_hints

import numpy as np
from pydantic import BeforeValidator

from fedharmony.data.base import datasets
from fedharmony.data.file_source import AnnotatedFiles, Content, FileSource
from fedharmony.data.tree import Tree
from fedharmony.errors import DataError
from fedharmony.types import Labels

#: A name, not a number; `year=2017` on a command line is understood all the same.
Year: TypeAlias = Annotated[Literal["2014", "2017"], BeforeValidator(str)]
Part: TypeAlias = Literal["train", "val"]

CLASSES = 80
#: Images of a part, and how many of them have no annotation.
IMAGES: Mapping[Year, Mapping[Part, tuple[int, int]]] = {
    "2014": {"train": (82_783, 702), "val": (40_504, 367)},
    "2017": {"train": (118_287, 1_021), "val": (5_000, 48)},
}
PAGE = "https://cocodataset.org/#download"


@datasets.register("coco")
class Coco(FileSource):
    """MS-COCO 2014 or 2017: 80 classes, 123,287 photographs; from the user's files."""

    @dataclass(frozen=True)
    class Config(FileSource.Config):
        """Where the data are and how they are read.

        Attributes:
            year: "2014" (82,783 training and 40,504 test images) or "2017" (118,287 and 5,000).
            unlabelled: What becomes of images without any annotation: "keep" (a row of zeros; as in
                C-Tran and FedLGT) or "drop" (as in ML-GCN and ASL), in both parts.
        """

        year: Year = "2014"
        unlabelled: Literal["keep", "drop"] = "keep"

    config: Config

    def annotations(self) -> Content:
        """Class names by rank of id; training and validation part, images in order of id."""
        tree = self._tree()
        train, val = self._read(tree, "train"), self._read(tree, "val")
        if train.categories != val.categories:
            raise DataError(
                f"{tree.locate(self._file('train'))} and {self._file('val')} have different "
                f"categories ({len(train.categories)} and {len(val.categories)}), so they are not "
                f"of one data set. {self.obtain()}"
            )
        if shared := sorted(set(train.ids) & set(val.ids)):
            raise DataError(
                f"{tree.locate(self._file('train'))} and {self._file('val')} share images "
                f"({len(shared):,}), for instance {shared[0]}; test images must not be trained on. "
                f"{self.obtain()}"
            )
        classes = tuple(category.name for category in train.categories)
        return classes, self._annotated(tree, "train", train), self._annotated(tree, "val", val)

    def obtain(self) -> str:
        """Which archives to get, and where they go."""
        year = self.config.year
        return (
            f"Get annotations_trainval{year}.zip (with {self._file('train')} and "
            f"{self._file('val')}), train{year}.zip and val{year}.zip (with the images) from "
            f"{PAGE} and put them, packed or unpacked, into the folder that data.path names."
        )

    def official_counts(self) -> dict[str, int]:
        """Classes, images, and images without annotation."""
        counts = {"classes": CLASSES}
        for name, (images, unlabelled) in zip(
            ("training images", "test images"), IMAGES[self.config.year].values(), strict=True
        ):
            keep = self.config.unlabelled == "keep"
            counts[name] = images if keep else images - unlabelled
            counts[f"unlabelled {name}"] = unlabelled if keep else 0
        return counts

    def _annotated(self, tree: Tree, part: Part, content: Instances) -> AnnotatedFiles:
        keep = self.config.unlabelled == "keep"
        rows = np.flatnonzero(keep | (content.labels.sum(1) > 0)).tolist()
        folder = f"{part}{self.config.year}"
        return AnnotatedFiles(
            files=tree.images([f"{folder}/{content.files[i]}" for i in rows]),
            labels=content.labels[rows],
            ids=tuple(str(content.ids[i]) for i in rows),
        )

    def _read(self, tree: Tree, part: Part) -> Instances:
        file = self._file(part)
        try:
            # In one expression, so that half a gigabyte of bytes is gone before the text is parsed.
            return parse_instances(tree.read(file).decode("utf-8-sig"))
        except ValueError as error:
            raise DataError(
                f"Annotation file {tree.locate(file)} cannot be used: {error}. Restore it from "
                f"annotations_trainval{self.config.year}.zip ({PAGE})."
            ) from error

    def _tree(self) -> Tree:
        """The user's files, once it is certain that both annotation files are there."""
        tree = self.tree()
        needed = [self._file("train"), self._file("val")]
        if absent := [file for file in needed if not tree.has(file)]:
            for year in IMAGES:
                if all(tree.has(file.replace(self.config.year, year)) for file in needed):
                    raise DataError(
                        f"Data set {self.name!r} lacks {absent[0]}, but {tree.where} has the files "
                        f'of {year}. Set data.year = "{year}" to use them. For '
                        f"{self.config.year}: {self.obtain()}"
                    )
        self.require(tree, *needed)
        return tree

    def _file(self, part: Part) -> str:
        return f"annotations/instances_{part}{self.config.year}.json"


class Category(NamedTuple):
    """An entry of ``categories``."""

    id: int
    name: str
    supercategory: str


class Image(NamedTuple):
    """What is kept of an entry of ``images``."""

    id: int
    file_name: str


class Annotation(NamedTuple):
    """What is kept of an entry of ``annotations``."""

    id: int
    image_id: int
    category_id: int


Entry = TypeVar("Entry", Category, Image, Annotation)


@dataclass(frozen=True, eq=False)
class Instances:
    """The content of an annotation file, as far as labels need it.

    Attributes:
        categories: C categories in order of id, which is label order.
        ids: N image ids, ascending.
        files: The file name of every image.
        labels: uint8 ``(N, C)``, 1 where the image has an annotation of the category.
    """

    categories: tuple[Category, ...]
    ids: tuple[int, ...]
    files: tuple[str, ...]
    labels: Labels


def parse_instances(text: str) -> Instances:
    """Labels from the text of an ``instances_*.json`` file.

    Raises:
        ValueError: The text is damaged, is no such file, or contradicts itself: an id or file name
            twice, an annotation of an image or category that is not listed.

    >>> made = parse_instances('''{
    ...     "images": [{"id": 9, "file_name": "9.jpg"}, {"id": 4, "file_name": "4.jpg"}],
    ...     "annotations": [{"id": 1, "image_id": 9, "category_id": 44, "iscrowd": 1}],
    ...     "categories": [{"id": 44, "name": "bottle", "supercategory": "kitchen"},
    ...                    {"id": 1, "name": "person", "supercategory": "person"}]
    ... }''')
    >>> [category.name for category in made.categories], made.ids, made.labels.tolist()
    (['person', 'bottle'], (4, 9), [[0, 0], [0, 1]])
    """
    sections = _sections(text)
    categories = sorted(_entries(sections, "categories", Category))
    images = sorted(_entries(sections, "images", Image))
    annotations = _entries(sections, "annotations", Annotation)
    _refuse_repeated("category id", [category.id for category in categories])
    _refuse_repeated("category name", [category.name for category in categories])
    _refuse_repeated("image id", [image.id for image in images])
    _refuse_repeated("image file", [image.file_name for image in images])
    _refuse_repeated("annotation id", [annotation.id for annotation in annotations])
    row_of = {image.id: row for row, image in enumerate(images)}
    column_of = {category.id: column for column, category in enumerate(categories)}
    rows, columns = [], []
    for id, image, category in annotations:
        if image not in row_of:
            raise ValueError(f"annotation {id} is of image {image}, which is not listed")
        if category not in column_of:
            raise ValueError(f"annotation {id} is of category {category}, which is not listed")
        rows.append(row_of[image])
        columns.append(column_of[category])
    labels = np.zeros((len(images), len(categories)), np.uint8)
    labels[rows, columns] = 1
    return Instances(
        categories=tuple(categories),
        ids=tuple(image.id for image in images),
        files=tuple(image.file_name for image in images),
        labels=labels,
    )


def _sections(text: str) -> dict[str, Any]:
    try:
        # Only outlines and boxes hold fractions. They are left as text, which halves the time.
        content = json.loads(text, object_hook=_reduced, parse_float=str)
    except RecursionError as error:
        raise ValueError("it is damaged (brackets within brackets without end)") from error
    except json.JSONDecodeError as error:
        place = f"character {error.pos + 1:,} of {len(text):,}"
        raise ValueError(f"it is damaged or cut short ({error.msg}, {place})") from error
    if not isinstance(content, dict):
        raise ValueError("it is not an object with images, annotations and categories")
    return content


def _reduced(fields: dict[str, Any]) -> object:
    """Keep what is needed of a JSON object that has just been read, so that the rest is freed."""
    for kind in (Annotation, Image, Category):
        if kind._fields[-1] in fields:
            return kind._make(map(fields.get, kind._fields))
    return fields


def _entries(sections: Mapping[str, Any], name: str, kind: type[Entry]) -> list[Entry]:
    """A section whose entries are all of one kind and have all fields."""
    entries = sections.get(name)
    if not isinstance(entries, list):
        raise ValueError(f"it has no list {name!r}")
    types = get_type_hints(kind)
    for number, entry in enumerate(entries):
        if not (isinstance(entry, kind) and all(map(isinstance, entry, types.values()))):
            fields = ", ".join(f"{field} ({type.__name__})" for field, type in types.items())
            raise ValueError(f"entry {number + 1:,} of {name!r} does not have {fields}")
    if not entries:
        raise ValueError(f"its list {name!r} is empty")
    return entries


def _refuse_repeated(what: str, values: Sequence[Hashable]) -> None:
    if len(set(values)) < len(values):
        value, count = Counter(values).most_common(1)[0]
        raise ValueError(f"{what} {value!r} occurs {count} times")
