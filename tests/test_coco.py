"""MS-COCO: labels by rank of category id, and annotation files that contradict themselves."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedharmony.config import build
from fedharmony.data.base import datasets
from fedharmony.data.coco import IMAGES, Coco, parse_instances
from fedharmony.data.file_source import AnnotatedFiles, CheckLine
from fedharmony.errors import ConfigError, DataError
from fixtures_voc_coco import (
    WrittenCoco,
    coco_annotation,
    coco_image,
    pack,
    write_coco,
    write_large_instances,
)

YEARS = ("2014", "2017")
#: The fixture's categories by ascending id: 1, 2, 3, 13, 17, 44, 62, 90.
CLASSES = ("person", "bicycle", "car", "stop sign", "cat", "bottle", "chair", "toothbrush")
IDS = (1, 2, 3, 13, 17, 44, 62, 90)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))


def source(path: Path, year: str = "2014", **options: Any) -> Coco:
    values = {"path": str(path), "year": year, "image_size": 8, **options}
    return Coco(build(Coco.Config, values, "data"))


def parts(path: Path, year: str = "2014", **options: Any) -> tuple[AnnotatedFiles, AnnotatedFiles]:
    classes, train, val = source(path, year, **options).annotations()
    assert classes == CLASSES
    return train, val


def message(path: Path, year: str = "2014", **options: Any) -> str:
    """The error that stops the loader."""
    with pytest.raises(DataError) as caught:
        source(path, year, **options).load()
    return str(caught.value)


# --- Labels ------------------------------------------------------------------------------------


def test_registered() -> None:
    assert datasets["coco"] is Coco


@pytest.mark.parametrize("year", YEARS)
def test_labels_are_the_annotated_categories(tmp_path: Path, year: str) -> None:
    """Rows by image id, columns by rank of category id; the fixture lists both in another order."""
    coco = write_coco(tmp_path, year)
    for part, annotated in zip(("train", "val"), parts(tmp_path, year), strict=True):
        present = coco.present[part]
        assert list(annotated.ids) == [str(image) for image in sorted(present)]
        expected = [[int(id in present[image]) for id in IDS] for image in sorted(present)]
        assert annotated.labels.tolist() == expected
        assert annotated.labels.dtype == np.uint8
        names = [annotated.files.name(row) for row in range(len(annotated))]
        assert names == [str(coco.image(part, image)) for image in sorted(present)]


def test_odd_cases_by_hand(tmp_path: Path) -> None:
    """The image of lowest id has no annotation; the next has a crowd of bottles (rank 5) alone."""
    write_coco(tmp_path)
    for part in parts(tmp_path):
        assert part.labels[0].tolist() == [0, 0, 0, 0, 0, 0, 0, 0]
        assert part.labels[1].tolist() == [0, 0, 0, 0, 0, 1, 0, 0]
        assert (part.labels.sum(1) > 1).any()


def test_unlabelled_images_stay_or_go(tmp_path: Path) -> None:
    write_coco(tmp_path)
    kept, dropped = parts(tmp_path), parts(tmp_path, unlabelled="drop")
    for before, after in zip(kept, dropped, strict=True):
        assert after.ids == before.ids[1:]
        np.testing.assert_array_equal(after.labels, before.labels[1:])
        assert after.files.name(0) == before.files.name(1)


@given(st.data())
def test_parse_does_not_depend_on_the_order_of_the_file(data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 10**12), min_size=1, max_size=6, unique=True))
    kinds = data.draw(st.lists(st.integers(1, 90), min_size=1, max_size=5, unique=True))
    pair = st.tuples(st.sampled_from(ids), st.sampled_from(kinds))
    pairs = data.draw(st.lists(pair, min_size=1, max_size=12))
    text = json.dumps(
        {
            "annotations": [
                {**coco_annotation(i, c, crowd=bool(n % 2)), "id": n}
                for n, (i, c) in enumerate(pairs)
            ],
            "categories": [{"supercategory": "s", "name": f"c{c}", "id": c} for c in kinds],
            "images": [coco_image("train", "2017", i) for i in ids],
        }
    )
    made = parse_instances(text)
    assert made.ids == tuple(sorted(ids))
    assert [category.id for category in made.categories] == sorted(kinds)
    found = {(made.ids[r], made.categories[c].id) for r, c in np.argwhere(made.labels)}
    assert found == set(pairs)


def test_labels_need_no_image(tmp_path: Path) -> None:
    coco = write_coco(tmp_path)
    before = parts(tmp_path)
    shutil.rmtree(coco.root / "train2014")
    for old, new in zip(before, parts(tmp_path), strict=True):
        np.testing.assert_array_equal(old.labels, new.labels)


def test_outlines_are_not_kept_in_memory(tmp_path: Path) -> None:
    """Reading takes less than the text again; a plain ``json.loads`` takes five times the text."""
    write_large_instances(tmp_path / "large.json", images=300, annotations=2000, points=42)
    text = (tmp_path / "large.json").read_text()
    tracemalloc.start()
    try:
        made = parse_instances(text)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(made.ids) == 300
    assert peak < len(text)


# --- Images ------------------------------------------------------------------------------------


@pytest.mark.parametrize("year", YEARS)
def test_load(tmp_path: Path, year: str) -> None:
    """The image without annotation is grey: its three channels are equal. The next is CMYK."""
    write_coco(tmp_path, year)
    data = source(tmp_path / "coco", year).load()
    assert (data.name, data.classes) == ("coco", CLASSES)
    assert (len(data.train), len(data.test)) == (24, 12)
    images = data.test.images.gather(torch.tensor([0, 1]), "cpu")
    assert images.shape == (2, 3, 8, 8)
    assert torch.equal(images[0, 0], images[0, 2])
    assert not torch.equal(images[1, 0], images[1, 2])


def test_archives_read_like_the_folder(tmp_path: Path) -> None:
    """The three archives as published, packed without the folder ``coco`` around them."""
    coco = write_coco(tmp_path)
    packed = tmp_path / "packed"
    packed.mkdir()
    pack(packed / "annotations_trainval2014.zip", coco.root, ["annotations"])
    pack(packed / "train2014.zip", coco.root, ["train2014"])
    pack(packed / "val2014.zip", coco.root, ["val2014"])
    for plain, archived in zip(parts(tmp_path), parts(packed), strict=True):
        np.testing.assert_array_equal(plain.labels, archived.labels)
        assert plain.ids == archived.ids
        assert plain.files.read(3) == archived.files.read(3)


# --- Bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"year": "2015"}, "'2014' or '2017'"),
        ({"unlabelled": "hide"}, "'keep' or 'drop'"),
        ({"difficult": "drop"}, "Unknown setting data.difficult"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(Coco.Config, values, "data")


def test_missing_folder(tmp_path: Path) -> None:
    text = message(tmp_path / "nowhere")
    assert "nowhere" in text
    assert "annotations_trainval2014.zip" in text
    assert "https://cocodataset.org/#download" in text
    assert "data.path" in text


def test_path_not_set() -> None:
    with pytest.raises(DataError, match=r"Set data\.path"):
        Coco().annotations()


def test_wrong_year(tmp_path: Path) -> None:
    write_coco(tmp_path, "2017")
    text = message(tmp_path, "2014")
    assert "lacks annotations/instances_train2014.json" in text
    assert 'data.year = "2017"' in text


def test_empty_annotation_folder(tmp_path: Path) -> None:
    coco = write_coco(tmp_path)
    for part in ("train", "val"):
        coco.json(part).unlink()
    text = message(tmp_path)
    assert "annotations/instances_train2014.json, annotations/instances_val2014.json" in text
    assert "annotations_trainval2014.zip" in text


def test_one_annotation_file_of_two(tmp_path: Path) -> None:
    coco = write_coco(tmp_path)
    coco.json("train").unlink()
    assert "lacks annotations/instances_train2014.json. Searched" in message(tmp_path)


def test_image_folder_missing(tmp_path: Path) -> None:
    coco = write_coco(tmp_path)
    shutil.rmtree(coco.root / "val2014")
    text = message(tmp_path)
    assert "12 of 12 test images" in text
    assert "val2014/COCO_val2014_" in text
    assert "val2014.zip" in text


def _extra(section: str, entry: dict[str, Any]) -> Callable[[WrittenCoco], None]:
    """One more entry in a section of the training file."""

    def change(coco: WrittenCoco) -> None:
        coco.edit("train", **{section: [*coco.section("train", section), entry]})

    return change


def _again(section: str, **fields: Any) -> Callable[[WrittenCoco], None]:
    """The first entry of a section once more, with some fields changed."""

    def change(coco: WrittenCoco) -> None:
        _extra(section, {**coco.section("train", section)[0], **fields})(coco)

    return change


def _text(content: str | bytes) -> Callable[[WrittenCoco], None]:
    def change(coco: WrittenCoco) -> None:
        data = content.encode() if isinstance(content, str) else content
        coco.json("train").write_bytes(data)

    return change


def _truncate(coco: WrittenCoco) -> None:
    data = coco.json("train").read_bytes()
    coco.json("train").write_bytes(data[: len(data) // 2])


def _other_categories(coco: WrittenCoco) -> None:
    rows = coco.section("val", "categories")
    coco.edit("val", categories=[{**row, "name": row["name"].upper()} for row in rows])


def _shared_image(coco: WrittenCoco) -> None:
    image = coco.section("val", "images")[0]
    _extra("images", {**image, "file_name": "copy.jpg"})(coco)


BAD: dict[str, tuple[Callable[[WrittenCoco], object], tuple[str, ...]]] = {
    "truncated": (_truncate, ("damaged or cut short", "annotations_trainval2014.zip")),
    "empty file": (_text(""), ("damaged or cut short", "character 1 of 0")),
    "binary": (_text(b"PK\x03\x04\xff\xfe"), ("cannot be used", "codec")),
    "a list": (_text("[]"), ("not an object with images, annotations and categories",)),
    "endless brackets": (_text('{"images": ' + "[" * 200_000), ("brackets within brackets",)),
    "no section": (
        lambda coco: coco.edit("train", annotations=None),
        ("no list 'annotations'",),
    ),
    "no images": (lambda coco: coco.edit("train", images=[]), ("list 'images' is empty",)),
    "captions": (
        lambda coco: coco.edit("train", annotations=[{"id": 1, "image_id": 9, "caption": "A"}]),
        ("entry 1 of 'annotations' does not have id (int), image_id (int), category_id (int)",),
    ),
    "fractional id": (
        _extra("images", {"id": 7.0, "file_name": "x.jpg"}),
        ("entry 25 of 'images' does not have id (int), file_name (str)",),
    ),
    "annotation of an unlisted image": (
        _extra("annotations", {"id": 1, "image_id": 9, "category_id": 12}),
        ("annotation 1 is of image 9, which is not listed",),
    ),
    "image id twice": (_again("images", file_name="other.jpg"), ("image id ", "occurs 2 times")),
    "image file twice": (_again("images", id=1), ("image file 'COCO_train2014_", "2 times")),
    "category id twice": (
        _again("categories", name="brush"),
        ("category id 90 occurs 2 times",),
    ),
    "category name twice": (
        _again("categories", id=91),
        ("category name 'toothbrush' occurs 2 times",),
    ),
    "annotation id twice": (_again("annotations"), ("annotation id 3 occurs 2 times",)),
    "other categories": (_other_categories, ("different categories (8 and 8)",)),
    "image in both parts": (_shared_image, ("share images (1), for instance",)),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(tmp_path: Path, case: str) -> None:
    coco = write_coco(tmp_path)
    change, fragments = BAD[case]
    change(coco)
    text = message(tmp_path)
    for fragment in (*fragments, "instances_train2014.json"):
        assert fragment in text
    assert not (tmp_path / "cache").exists()  # nothing was decoded


def test_annotation_of_an_unlisted_category(tmp_path: Path) -> None:
    coco = write_coco(tmp_path)
    image = min(coco.present["train"])
    _extra("annotations", {"id": 1, "image_id": image, "category_id": 12})(coco)
    assert "annotation 1 is of category 12, which is not listed" in message(tmp_path)


def test_listed_image_without_a_file(tmp_path: Path) -> None:
    coco = write_coco(tmp_path)
    coco.image("train", min(coco.present["train"])).unlink()
    assert "1 of 24 training images" in message(tmp_path)
    assert len(source(tmp_path, unreadable="skip").load().train) == 23


# --- Official figures --------------------------------------------------------------------------


def test_official_tables_are_consistent() -> None:
    """Both years divide the same 123,287 images, 1,069 of them without annotation."""
    for parts_of_year in IMAGES.values():
        assert tuple(map(sum, zip(*parts_of_year.values(), strict=True))) == (123_287, 1_069)


def test_official_counts_follow_the_settings() -> None:
    def counts(**values: str) -> list[int]:
        return list(Coco(build(Coco.Config, values, "data")).official_counts().values())

    assert counts() == [80, 82_783, 702, 40_504, 367]
    assert counts(unlabelled="drop") == [80, 82_081, 0, 40_137, 0]
    assert counts(year="2017") == [80, 118_287, 1_021, 5_000, 48]


def test_check_of_incomplete_data(tmp_path: Path) -> None:
    coco = write_coco(tmp_path)
    coco.image("val", max(coco.present["val"])).unlink()
    check = source(tmp_path).check()
    assert not check.ok
    assert set(check.lines) >= {
        CheckLine("classes", 80, 8),
        CheckLine("training images", 82_783, 24),
        CheckLine("unlabelled test images", 367, 1),
        CheckLine("test image files", 12, 11),
    }
    assert "train2014.zip" in check.advice


def shared_coco() -> Path:
    folder = os.environ.get("FEDHARMONY_SHARED", Path(__file__).parents[2] / "shared")
    return Path(folder) / "data" / "coco2017_mini_144px.tar.gz"


@pytest.mark.skipif(not shared_coco().is_file(), reason="needs the small COCO 2017 archive")
def test_real_coco2017() -> None:
    """80 official categories and 12 super-categories; 80 + 79 real images that decode."""
    coco = source(shared_coco(), "2017", image_size=16)
    data = coco.load()
    assert (data.classes[0], data.classes[11], data.classes[79]) == (
        "person",
        "stop sign",  # id 13: there is no 12
        "toothbrush",
    )
    assert len(data.classes) == 80
    assert (len(data.train), len(data.test)) == (80, 79)
