"""PASCAL VOC: labels from XML, difficult objects, and errors that say what is missing."""

from __future__ import annotations

import os
import shutil
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
from fedharmony.data.file_source import AnnotatedFiles, CheckLine
from fedharmony.data.voc import (
    CLASSES,
    IMAGES,
    TEST_2007,
    TRAINVAL_2007,
    TRAINVAL_2012,
    Voc,
    parse_objects,
)
from fedharmony.errors import ConfigError, DataError
from fedharmony.metrics.multilabel import evaluate
from fixtures_voc_coco import (
    VOC_CLASSES,
    VOC_ODD,
    VocObject,
    WrittenVoc,
    pack,
    voc_xml,
    write_voc,
)

YEARS = ("2007", "2012")
MODES = ("drop", "keep", "ignore")


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))


def source(path: Path, year: str = "2007", **options: Any) -> Voc:
    values = {"path": str(path), "year": year, "image_size": 8, **options}
    return Voc(build(Voc.Config, values, "data"))


def parts(path: Path, year: str = "2007", **options: Any) -> tuple[AnnotatedFiles, AnnotatedFiles]:
    classes, train, test = source(path, year, **options).annotations()
    assert classes == CLASSES
    return train, test


def message(path: Path, year: str = "2007", **options: Any) -> str:
    """The error that stops the loader."""
    with pytest.raises(DataError) as caught:
        source(path, year, **options).load()
    return str(caught.value)


# --- Labels ------------------------------------------------------------------------------------


def test_registered_with_the_official_class_order() -> None:
    assert datasets["voc"] is Voc
    assert CLASSES == VOC_CLASSES


@pytest.mark.parametrize(
    ("difficult", "expected"),
    [
        ("drop", [{"person"}, set(), set(), {"dog"}, {"sheep"}, {"person"}]),
        ("keep", [{"person", "chair"}, {"boat"}, set(), {"dog"}, {"sheep"}, {"person"}]),
    ],
)
def test_odd_cases_by_hand(tmp_path: Path, difficult: str, expected: list[set[str]]) -> None:
    """The first six images of each set, in order.

    A difficult chair beside a person; a difficult boat alone; nothing; a plain dog between two
    difficult ones; a sheep without a ``difficult`` element; a person whose parts are named head and
    hand.
    """
    write_voc(tmp_path)
    for part in parts(tmp_path, train_set="train", difficult=difficult):
        rows = [{CLASSES[c] for c in np.flatnonzero(row)} for row in part.labels[: len(VOC_ODD)]]
        assert rows == expected
        assert part.labels.dtype == np.uint8
        assert part.known is None


@pytest.mark.parametrize("year", YEARS)
@pytest.mark.parametrize("difficult", MODES)
def test_labels_agree_with_the_class_files(tmp_path: Path, year: str, difficult: str) -> None:
    """The class files hold the same facts as the XML: 1 present, 0 difficult only, -1 absent."""
    voc = write_voc(tmp_path, year)
    train, test = parts(tmp_path, year, difficult=difficult)
    for which, part, is_test in zip(
        Voc.Config(year=year).sets,  # type: ignore[arg-type]
        (train, test),
        (False, True),
        strict=True,
    ):
        tables = [voc.list(f"{c}_{which}").read_text().split() for c in VOC_CLASSES]
        assert tuple(tables[0][::2]) == part.ids
        states = np.array([[int(state) for state in table[1::2]] for table in tables]).T
        assert {-1, 0, 1} == set(states.flat)
        hard_counts = difficult == "keep" or (difficult == "ignore" and not is_test)
        np.testing.assert_array_equal(part.labels, states >= 0 if hard_counts else states == 1)
        if difficult == "ignore" and is_test:
            np.testing.assert_array_equal(part.known, states != 0)
        else:
            assert part.known is None


def test_ignored_pairs_count_in_no_metric(tmp_path: Path) -> None:
    """Whatever a model says about a difficult-only pair, its figures stay the same.

    Counted as negatives instead (the rule "drop"), confident hits there would cost precision.
    """
    write_voc(tmp_path)
    truth = parts(tmp_path, difficult="keep")[1].labels.astype(np.float32)
    _, ignored = parts(tmp_path, difficult="ignore")
    _, dropped = parts(tmp_path, difficult="drop")
    assert ignored.known is not None
    blind = np.where(ignored.known, truth, 0)
    perfect = evaluate(truth, ignored.labels, known=ignored.known)
    assert perfect.as_dict() == evaluate(blind, ignored.labels, known=ignored.known).as_dict()
    assert perfect.as_dict()["mAP"] == 1
    assert evaluate(truth, dropped.labels).as_dict()["mAP"] < 1


@given(
    st.lists(
        st.builds(
            VocObject,
            st.sampled_from(VOC_CLASSES),
            st.sampled_from(["0", "1", None]),
            st.lists(st.sampled_from(["head", "hand", "foot"]), max_size=2).map(tuple),
        ),
        max_size=6,
    )
)
def test_parse_returns_the_objects_as_written(objects: list[VocObject]) -> None:
    found = parse_objects(voc_xml("000005", "2007", objects).encode())
    assert found == [(VOC_CLASSES.index(o.name), o.difficult == "1") for o in objects]


def test_labels_need_no_image(tmp_path: Path) -> None:
    """With every image gone, annotations are as before; only loading stops."""
    voc = write_voc(tmp_path)
    before = parts(tmp_path)
    shutil.rmtree(voc.folder / "JPEGImages")
    for old, new in zip(before, parts(tmp_path), strict=True):
        np.testing.assert_array_equal(old.labels, new.labels)


# --- Sets --------------------------------------------------------------------------------------


def test_default_sets(tmp_path: Path) -> None:
    for year, (train_set, test_set) in {
        "2007": ("trainval", "test"),
        "2012": ("train", "val"),
    }.items():
        voc = write_voc(tmp_path, year)
        train, test = parts(tmp_path, year)
        assert list(train.ids) == voc.sets[train_set]
        assert list(test.ids) == voc.sets[test_set]
        np.testing.assert_array_equal(train.labels, voc.matrix(train_set) == 1)


def test_chosen_sets(tmp_path: Path) -> None:
    voc = write_voc(tmp_path)
    train, test = parts(tmp_path, train_set="val", test_set="train")
    assert (list(train.ids), list(test.ids)) == (voc.sets["val"], voc.sets["train"])


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"train_set": "test"}, "share images"),
        ({"train_set": "trainval", "test_set": "val"}, "share images"),
        ({"year": "2012", "train_set": "trainval"}, "share images"),
        ({"year": "2012", "test_set": "test"}, "not public"),
        ({"year": "2010"}, "'2007' or '2012'"),
        ({"difficult": "maybe"}, "'drop', 'keep' or 'ignore'"),
        ({"train_set": "tests"}, "'train', 'val', 'trainval' or 'test'"),
    ],
)
def test_impossible_settings_are_refused(values: dict[str, str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        build(Voc.Config, values, "data")


# --- Images ------------------------------------------------------------------------------------


def test_load(tmp_path: Path) -> None:
    """Pixels and labels of one row are of one image; grey images have three equal channels."""
    voc = write_voc(tmp_path)
    data = source(tmp_path, image_size=32, difficult="ignore").load()
    assert (data.name, data.classes) == ("voc", CLASSES)
    assert (len(data.train), len(data.test)) == (24, 12)
    assert data.train.images.shape == (3, 32, 32)
    assert data.test.ids == tuple(voc.sets["test"])
    assert data.test.known is not None
    assert not data.test.known.all()
    grey = data.test.images.gather(torch.tensor(0), "cpu")
    assert torch.equal(grey[0], grey[1])
    voc.image(voc.sets["test"][1]).unlink()
    data = source(tmp_path, image_size=32, difficult="ignore", unreadable="skip").load()
    expected = np.delete(voc.matrix("test"), 1, axis=0)
    np.testing.assert_array_equal(data.test.labels, expected == 1)
    np.testing.assert_array_equal(data.test.known, expected != 0)


@pytest.mark.parametrize("ending", ["tar", "tar.gz"])
def test_archives_read_like_the_folder(tmp_path: Path, ending: str) -> None:
    """The two archives of 2007, as published, side by side in a folder."""
    voc = write_voc(tmp_path)
    packed = tmp_path / "packed"
    packed.mkdir()
    for archive, names in (("VOCtrainval", voc.sets["trainval"]), ("VOCtest", voc.sets["test"])):
        top = "VOCdevkit/VOC2007"
        members = [f"{top}/Annotations/{name}.xml" for name in names]
        members += [f"{top}/JPEGImages/{name}.jpg" for name in names]
        sets = ("train", "val", "trainval") if archive == "VOCtrainval" else ("test",)
        members += [f"{top}/ImageSets/Main/{which}.txt" for which in sets]
        pack(packed / f"{archive}_06-Nov-2007.{ending}", tmp_path, members)
    for plain, archived in zip(parts(tmp_path), parts(packed), strict=True):
        np.testing.assert_array_equal(plain.labels, archived.labels)
        assert plain.ids == archived.ids
        assert plain.files.read(3) == archived.files.read(3)


# --- Bad input ---------------------------------------------------------------------------------


def test_missing_folder(tmp_path: Path) -> None:
    text = message(tmp_path / "nowhere")
    assert "nowhere" in text
    assert "VOCtest_06-Nov-2007.tar" in text
    assert "host.robots.ox.ac.uk/pascal/VOC/voc2007" in text
    assert "data.path" in text


def test_path_not_set() -> None:
    with pytest.raises(DataError, match=r"Set data\.path"):
        Voc().annotations()


def test_empty_folder(tmp_path: Path) -> None:
    text = message(tmp_path, "2012")
    assert "lacks VOC2012" in text
    assert "VOCtrainval_11-May-2012.tar" in text


def test_wrong_year(tmp_path: Path) -> None:
    write_voc(tmp_path, "2012")
    text = message(tmp_path, "2007")
    assert "lacks VOC2007, but there is VOC2012" in text
    assert 'data.year = "2012"' in text


def test_path_one_folder_too_deep(tmp_path: Path) -> None:
    voc = write_voc(tmp_path)
    assert "Set data.path to the folder around it" in message(voc.folder)


def test_only_one_of_two_archives(tmp_path: Path) -> None:
    """Without the test archive, the error names that archive and not the other."""
    voc = write_voc(tmp_path)
    voc.list("test").unlink()
    text = message(tmp_path)
    assert "lacks VOC2007/ImageSets/Main/test.txt" in text
    assert "Get VOCtest_06-Nov-2007.tar from" in text
    assert "VOCtrainval" not in text


def _empty_annotations(voc: WrittenVoc) -> None:
    for file in (voc.folder / "Annotations").iterdir():
        file.unlink()


def _rewrite(text: str | bytes) -> Callable[[WrittenVoc], None]:
    """Replace the annotation of the fourth test image."""

    def change(voc: WrittenVoc) -> None:
        data = text.encode() if isinstance(text, str) else text
        voc.xml(voc.sets["test"][3]).write_bytes(data)

    return change


def _truncate(voc: WrittenVoc) -> None:
    file = voc.xml(voc.sets["test"][3])
    file.write_bytes(file.read_bytes()[:-40])


BAD: dict[str, tuple[Callable[[WrittenVoc], object], tuple[str, ...]]] = {
    "no annotations": (
        _empty_annotations,
        ("24 of the 24 images", "no annotation", "holds 0 files", "VOCtrainval_06-Nov-2007.tar"),
    ),
    "an annotation gone": (
        lambda voc: voc.xml(voc.sets["test"][2]).unlink(),
        ("1 of the 12 images", "000029.xml", "Get VOCtest_06-Nov-2007.tar"),
    ),
    "an image gone": (
        lambda voc: voc.image(voc.sets["val"][4]).unlink(),
        ("1 of 24 training images", "000044.jpg", "VOCtrainval_06-Nov-2007.tar"),
    ),
    "unknown class": (
        _rewrite(voc_xml("x", "2007", [VocObject("hors")])),
        ("unknown class 'hors'", "Did you mean 'horse'?", "000038.xml", "VOCtest"),
    ),
    "no name": (
        _rewrite("<annotation><object><pose>Left</pose></object></annotation>"),
        ("unknown class ''", "000038.xml"),
    ),
    "odd difficult": (
        _rewrite(voc_xml("x", "2007", [VocObject("cat", "yes")])),
        ("cat has difficult = 'yes'", "000038.xml"),
    ),
    "truncated": (_truncate, ("damaged or cut short", "000038.xml", "restore it from VOCtest")),
    "empty file": (_rewrite(""), ("damaged or cut short", "000038.xml")),
    "binary": (_rewrite(b"\xff\xd8\xff\xe0\0\x10JFIF"), ("damaged or cut short", "000038.xml")),
    "unknown encoding": (
        _rewrite('<?xml version="1.0" encoding="klingon"?><annotation/>'),
        ("damaged or cut short", "000038.xml"),
    ),
    "unsupported encoding": (
        _rewrite('<?xml version="1.0" encoding="utf-7"?><annotation/>'),
        ("cannot be used", "000038.xml"),
    ),
    "other XML": (_rewrite("<html/>"), ("<html>, not <annotation>", "000038.xml")),
    "empty list": (lambda voc: voc.list("test").write_text("\n"), ("test.txt is empty",)),
    "name twice": (
        lambda voc: voc.list("test").write_text("000011\n000020\n000011\n"),
        ("names image 000011 2 times", "test.txt", "VOCtest_06-Nov-2007.tar"),
    ),
    "sets that overlap": (
        lambda voc: voc.list("test").write_text(f"000011\n{voc.sets['val'][0]}\n"),
        ("trainval.txt and VOC2007/ImageSets/Main/test.txt share images (1)", "000008"),
    ),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(tmp_path: Path, case: str) -> None:
    voc = write_voc(tmp_path)
    change, fragments = BAD[case]
    change(voc)
    text = message(tmp_path)
    for fragment in fragments:
        assert fragment in text
    assert not (tmp_path / "cache").exists()  # nothing was decoded


# --- Official figures --------------------------------------------------------------------------


def test_official_tables_are_consistent() -> None:
    """Every image of a set is in train or val; the 2007 test table is known to sum to 7,013."""
    for images in IMAGES.values():
        assert images["train"] + images["val"] == images["trainval"]
    assert IMAGES["2007"]["trainval"] + IMAGES["2007"]["test"] == 9963
    assert sum(TEST_2007) == 7013
    assert {len(table) for table in (TEST_2007, TRAINVAL_2007, TRAINVAL_2012)} == {20}


def test_official_counts_follow_the_settings() -> None:
    def counts(**values: str) -> dict[str, int]:
        return Voc(build(Voc.Config, values, "data")).official_counts()

    usual = counts()
    assert (usual["training images"], usual["test images"]) == (5011, 4952)
    assert usual["training images with person"] == 2008
    assert usual["test images with person"] == 2007
    assert counts(year="2012")["images with person"] == 4087
    swapped = counts(year="2012", train_set="val", test_set="train")
    assert (swapped["training images"], swapped["images with cow"]) == (5823, 303)
    for other in ({"difficult": "keep"}, {"difficult": "ignore"}, {"train_set": "train"}):
        assert not any(" with " in name for name in counts(**other)), other


def test_check_of_incomplete_data(tmp_path: Path) -> None:
    """24 of the 5,011 images, one of them without its file: every figure stands beside its due."""
    voc = write_voc(tmp_path)
    voc.image(voc.sets["train"][7]).unlink()
    check = source(tmp_path).check()
    assert not check.ok
    assert CheckLine("training images", 5011, 24) in check.lines
    assert CheckLine("training image files", 24, 23) in check.lines
    people = int((voc.matrix("test")[:, CLASSES.index("person")] == 1).sum())
    assert CheckLine("test images with person", 2007, people) in check.lines
    assert "VOCtrainval_06-Nov-2007.tar and VOCtest_06-Nov-2007.tar" in check.advice


def shared_voc() -> Path:
    folder = os.environ.get("FEDHARMONY_SHARED", Path(__file__).parents[2] / "shared")
    return Path(folder) / "data" / "voc2012_144px.tar.gz"


@pytest.mark.skipif(not shared_voc().is_file(), reason="needs the PASCAL VOC 2012 archive")
def test_real_voc2012() -> None:
    """The official images per class, difficult objects dropped, train and val together."""
    check = source(shared_voc(), "2012").check()
    assert check.ok, check
    found = {line.what: line.found for line in check.lines}
    assert (found["training images"], found["test images"]) == (5717, 5823)
    assert [found[f"images with {c}"] for c in VOC_CLASSES] == [
        *(670, 552, 765, 508, 706, 421, 1161, 1080, 1119, 303),
        *(538, 1286, 482, 526, 4087, 527, 325, 507, 544, 575),
    ]
    kept = parts(shared_voc(), "2012", difficult="keep")
    ignored = parts(shared_voc(), "2012", difficult="ignore")
    assert ignored[1].known is not None
    assert not ignored[1].known.all()
    np.testing.assert_array_equal(ignored[0].labels, kept[0].labels)
    np.testing.assert_array_equal(ignored[1].labels, kept[1].labels & ignored[1].known)


@pytest.mark.parametrize("year", ["2012", 2012])
def test_the_year_may_be_written_as_a_number(year: Any) -> None:
    assert build(Voc.Config, {"year": year}, "data").year == "2012"
    with pytest.raises(ConfigError, match="year"):
        build(Voc.Config, {"year": 2010}, "data")
