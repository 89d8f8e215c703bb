"""Small data sets in the official layouts of PASCAL VOC and MS-COCO, odd cases included.

Both writers draw objects and pixels from a fixed generator, add the cases that real data contain,
and return what they wrote, so that a test compares a loader with the truth and not with itself.
"""

from __future__ import annotations

import io
import json
import tarfile
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fedharmony.rng import numpy_rng

SIDE = 32

VOC_CLASSES = (
    *("aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow"),
    *("diningtable", "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa"),
    *("train", "tvmonitor"),
)

#: id, name and super-category, in an order that neither ids nor names have.
COCO_CATEGORIES = (
    (90, "toothbrush", "indoor"),
    (1, "person", "person"),
    (44, "bottle", "kitchen"),
    (3, "car", "vehicle"),
    (2, "bicycle", "vehicle"),
    (17, "cat", "animal"),
    (13, "stop sign", "outdoor"),
    (62, "chair", "furniture"),
)


def jpeg(rng: np.random.Generator, *, mode: str = "RGB") -> bytes:
    """A 32 × 32 JPEG of noise; ``mode`` may be "RGB", "L" or "CMYK"."""
    channels = {"RGB": (3,), "L": (), "CMYK": (4,)}[mode]
    pixels = rng.integers(0, 256, (SIDE, SIDE, *channels), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.frombytes(mode, (SIDE, SIDE), pixels.tobytes()).save(buffer, "JPEG")
    return buffer.getvalue()


# --- PASCAL VOC --------------------------------------------------------------------------------


@dataclass(frozen=True)
class VocObject:
    """One annotated object; ``difficult`` is the text of the element, None leaves it out."""

    name: str
    difficult: str | None = "0"
    parts: tuple[str, ...] = ()

    def xml(self) -> str:
        # Parts stand before the name here: their own <name> must not be taken for it.
        parts = "".join(f"<part><name>{part}</name></part>" for part in self.parts)
        difficult = "" if self.difficult is None else f"<difficult>{self.difficult}</difficult>"
        box = "<bndbox><xmin>1</xmin><ymin>1</ymin><xmax>9</xmax><ymax>9</ymax></bndbox>"
        return (
            f"\t<object>\n\t\t{parts}\n\t\t<name>{self.name}</name>\n\t\t<pose>Left</pose>\n"
            f"\t\t{difficult}\n\t\t{box}\n\t</object>\n"
        )


def voc_xml(name: str, year: str, objects: Sequence[VocObject]) -> str:
    return (
        f"<annotation>\n\t<folder>VOC{year}</folder>\n\t<filename>{name}.jpg</filename>\n"
        f"\t<size><width>{SIDE}</width><height>{SIDE}</height><depth>3</depth></size>\n"
        f"\t<segmented>0</segmented>\n{''.join(o.xml() for o in objects)}</annotation>\n"
    )


#: What random objects would give too rarely; every set starts with these, in this order.
VOC_ODD: tuple[tuple[VocObject, ...], ...] = (
    (VocObject("chair", "1"), VocObject("person")),  # chair is there, but only as difficult
    (VocObject("boat", "1"),),  # nothing but a difficult object
    (),  # nothing at all
    (VocObject("dog", "1"), VocObject("dog"), VocObject("dog", "1")),  # one is not: present
    (VocObject("sheep", None),),  # no <difficult> element: not difficult
    (VocObject("person", "0", ("head", "hand")),),  # parts have names of their own
)


@dataclass(frozen=True)
class WrittenVoc:
    """What :func:`write_voc` wrote.

    Attributes:
        folder: The folder ``VOC2007`` or ``VOC2012``.
        sets: Image names of every list in ``ImageSets/Main``.
        states: Per image, 1, 0 or -1 for each of the 20 classes (present, difficult only, absent).
    """

    folder: Path
    sets: dict[str, list[str]]
    states: dict[str, list[int]]

    def matrix(self, which: str) -> np.ndarray[Any, np.dtype[np.int64]]:
        return np.array([self.states[name] for name in self.sets[which]])

    def xml(self, name: str) -> Path:
        return self.folder / "Annotations" / f"{name}.xml"

    def image(self, name: str) -> Path:
        return self.folder / "JPEGImages" / f"{name}.jpg"

    def list(self, which: str) -> Path:
        return self.folder / "ImageSets" / "Main" / f"{which}.txt"


def write_voc(root: Path, year: str = "2007", per_set: int = 12) -> WrittenVoc:
    """Write ``root/VOCdevkit/VOC{year}``: train, val and trainval; for 2007 also test."""
    rng = numpy_rng(int(year), "VOC fixture")
    parts = ["train", "val", "test"] if year == "2007" else ["train", "val"]
    folder = root / "VOCdevkit" / f"VOC{year}"
    for name in ("JPEGImages", "Annotations", "ImageSets/Main"):
        (folder / name).mkdir(parents=True)
    names = [
        f"{i:06d}" if year == "2007" else f"2008_{i:06d}"
        for i in range(5, 5 + 3 * per_set * len(parts), 3)
    ]
    sets = {part: names[i :: len(parts)] for i, part in enumerate(parts)}
    voc = WrittenVoc(folder, {**sets, "trainval": sorted(sets["train"] + sets["val"])}, {})
    for part in parts:
        for i, name in enumerate(voc.sets[part]):
            objects = VOC_ODD[i] if i < len(VOC_ODD) else _voc_objects(rng)
            voc.states[name] = _voc_state(objects)
            voc.xml(name).write_text(voc_xml(name, year, objects))
            voc.image(name).write_bytes(jpeg(rng, mode="L" if i == 0 else "RGB"))
    for which, members in voc.sets.items():
        voc.list(which).write_text("".join(f"{name}\n" for name in members))
        for c, label in enumerate(VOC_CLASSES):
            lines = [f"{name} {voc.states[name][c]:2d}\n" for name in members]
            voc.list(f"{label}_{which}").write_text("".join(lines))
    return voc


def _voc_objects(rng: np.random.Generator) -> tuple[VocObject, ...]:
    """One to four objects; person is as common as in the real data, a fifth is difficult."""
    weights = np.where(np.array(VOC_CLASSES) == "person", 8.0, 1.0)
    drawn = rng.choice(VOC_CLASSES, rng.integers(1, 5), p=weights / weights.sum())
    return tuple(VocObject(str(name), str(int(rng.random() < 0.2))) for name in drawn)


def _voc_state(objects: Sequence[VocObject]) -> list[int]:
    easy = {o.name for o in objects if o.difficult != "1"}
    hard = {o.name for o in objects} - easy
    return [1 if c in easy else 0 if c in hard else -1 for c in VOC_CLASSES]


# --- MS-COCO -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class WrittenCoco:
    """What :func:`write_coco` wrote.

    Attributes:
        root: The folder with ``annotations`` and the image folders.
        year: "2014" or "2017".
        present: Per part, image id → the ids of its categories.
    """

    root: Path
    year: str
    present: dict[str, dict[int, set[int]]]

    def json(self, part: str) -> Path:
        return self.root / "annotations" / f"instances_{part}{self.year}.json"

    def image(self, part: str, image: int) -> Path:
        return self.root / f"{part}{self.year}" / coco_file(part, self.year, image)

    def edit(self, part: str, **sections: Any) -> None:
        """Replace sections of a part's JSON file."""
        path = self.json(part)
        path.write_text(json.dumps({**json.loads(path.read_text()), **sections}))

    def section(self, part: str, name: str) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = json.loads(self.json(part).read_text())[name]
        return rows


def coco_file(part: str, year: str, image: int) -> str:
    return f"COCO_{part}2014_{image:012d}.jpg" if year == "2014" else f"{image:012d}.jpg"


def write_coco(root: Path, year: str = "2014", train: int = 24, val: int = 12) -> WrittenCoco:
    """Write ``root/coco`` with both annotation files and all images.

    In each part, the image of lowest id has no annotation, and the next one has a crowd of bottles
    and nothing else. Images, annotations and categories are listed in no particular order.
    """
    rng = numpy_rng(int(year), "COCO fixture")
    coco = WrittenCoco(root / "coco", year, {})
    (coco.root / "annotations").mkdir(parents=True)
    ids = rng.choice(np.arange(9, 580_000), train + val, replace=False).tolist()
    categories = [{"id": i, "name": n, "supercategory": s} for i, n, s in COCO_CATEGORIES]
    for part, members in (("train", ids[:train]), ("val", ids[train:])):
        (coco.root / f"{part}{year}").mkdir()
        empty, crowd, *_ = sorted(members)
        rows: list[dict[str, Any]] = []
        for image in members:
            mode = "CMYK" if image == crowd else "L" if image == empty else "RGB"
            coco.image(part, image).write_bytes(jpeg(rng, mode=mode))
            if image == crowd:
                rows.append(coco_annotation(image, 44, crowd=True))
            elif image != empty:
                drawn = rng.choice([i for i, *_ in COCO_CATEGORIES], rng.integers(1, 6))
                rows += [coco_annotation(image, int(category)) for category in drawn]
        rows = [{**rows[i], "id": 7 * n + 3} for n, i in enumerate(rng.permutation(len(rows)))]
        document = {
            "info": {"description": f"COCO {year} Dataset", "year": int(year)},
            "licenses": [{"id": 1, "name": "Attribution License", "url": "none"}],
            "images": [coco_image(part, year, image) for image in members],
            "annotations": rows,
            "categories": categories,
        }
        coco.json(part).write_text(json.dumps(document))
        coco.present[part] = {image: set() for image in members}
        for row in rows:
            coco.present[part][row["image_id"]].add(row["category_id"])
    return coco


def coco_image(part: str, year: str, image: int) -> dict[str, Any]:
    return {
        "license": 1,
        "file_name": coco_file(part, year, image),
        "coco_url": "none",
        "height": SIDE,
        "width": SIDE,
        "date_captured": "2013-11-14 17:02:52",
        "flickr_url": "none",
        "id": image,
    }


def coco_annotation(image: int, category: int, *, crowd: bool = False) -> dict[str, Any]:
    """One annotation; a crowd has a run-length mask (an object of its own) for its outline."""
    mask = {"counts": [100, 50, 874], "size": [SIDE, SIDE]}
    return {
        "segmentation": mask if crowd else [[1.5, 1.5, 9.25, 1.5, 9.25, 9.75]],
        "area": 31.97,
        "iscrowd": int(crowd),
        "image_id": image,
        "bbox": [1.5, 1.5, 7.75, 8.25],
        "category_id": category,
    }


def write_large_instances(
    path: Path, images: int, annotations: int, points: int, part: str = "train", year: str = "2014"
) -> None:
    """An instances file of any size, written in pieces; outlines have ``points`` points each.

    With 82,783 images, 600,000 annotations and 42 points it has 485 MB, about as many as the
    official file.
    """
    rng = numpy_rng(0, "large COCO file")
    owners = rng.integers(0, images, annotations)
    kinds = rng.integers(0, len(COCO_CATEGORIES), annotations)
    outlines = [(rng.integers(0, 64_000, 2 * points) / 100).tolist() for _ in range(100)]
    texts = [json.dumps([outline]) for outline in outlines]
    with path.open("w") as file:
        file.write('{"info": {}, "images": [')
        file.write(", ".join(json.dumps(coco_image(part, year, i + 1)) for i in range(images)))
        file.write('], "annotations": [')
        for n, (owner, kind) in enumerate(zip(owners.tolist(), kinds.tolist(), strict=True)):
            file.write(
                f'{", " if n else ""}{{"segmentation": {texts[n % 100]}, "area": 31.97, '
                f'"iscrowd": 0, "image_id": {owner + 1}, "bbox": [1.5, 1.5, 7.75, 8.25], '
                f'"category_id": {COCO_CATEGORIES[kind][0]}, "id": {n + 1}}}'
            )
        categories = [{"id": i, "name": n, "supercategory": s} for i, n, s in COCO_CATEGORIES]
        file.write(f'], "categories": {json.dumps(categories)}}}')


# --- Archives ----------------------------------------------------------------------------------


def pack(archive: Path, top: Path, names: Sequence[str]) -> None:
    """Put folders and files below ``top`` into a .tar, .tar.gz or .zip under their own names."""
    files = sorted(
        file
        for name in names
        for file in ([top / name] if (top / name).is_file() else (top / name).rglob("*"))
        if file.is_file()
    )
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive, "w") as target:
            for file in files:
                target.write(file, file.relative_to(top).as_posix())
        return
    compression = "w:gz" if archive.suffix == ".gz" else "w"
    with tarfile.open(archive, compression) as target:  # type: ignore[call-overload]
        for file in files:
            target.add(file, file.relative_to(top).as_posix())
