"""FLAIR in its two forms: the same classes, images, labels and users; damaged files are told."""

import io
import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import fedharmony.data.flair as module
import fixtures_flair as flair
from fedharmony.config import build
from fedharmony.data.base import DataSet, datasets
from fedharmony.data.file_source import AnnotatedFiles
from fedharmony.data.flair import COARSE, Flair
from fedharmony.data.flair_forms import parquet as parquet_form
from fedharmony.errors import ConfigError, DataError
from fixtures_flair import RECORDS, Record

FINE = ("bag", "blue_sky", "dog", "door", "flower", "material", "tree")


def parquet(**options: bool | int) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        pytest.importorskip("pyarrow")
        return flair.write_parquet(folder, **options)  # type: ignore[arg-type]

    return make


FORMS = {
    "json": flair.write_json,
    "packed": flair.write_packed,
    "parquet": parquet(),
    "parquet, no partition column": parquet(partition_column=False, row_group=1000),
}


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return FORMS[request.param](tmp_path / "data")


def source(path: Path, **settings: object) -> Flair:
    return Flair(Flair.Config(str(path), image_size=flair.SIDE, **settings))  # type: ignore[arg-type]


def by_id(part: AnnotatedFiles, classes: tuple[str, ...]) -> dict[str, tuple[str, set[str]]]:
    """Owner and label names of every image."""
    assert part.users is not None
    return {
        image: (str(user), {classes[c] for c in np.flatnonzero(row)})
        for image, user, row in zip(part.ids, part.users, part.labels, strict=True)
    }


def expected(records: list[Record], level: str) -> dict[str, tuple[str, set[str]]]:
    field = "labels" if level == "coarse" else "fine_grained_labels"
    return {record.image_id: (record.user_id, set(getattr(record, field))) for record in records}


# All forms ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("level", ["coarse", "fine"])
def test_every_form_gives_the_records(form: Path, level: str) -> None:
    """33 training and 7 test images; a fine label is not turned into a coarse one or back.

    "bag" stands under equipment and under material; image kind 3 has coarse {material} and fine
    {bag}, kind 0 has the fine label material, which is a coarse name too.
    """
    classes, train, test = source(form, labels=level).annotations()
    assert classes == (COARSE if level == "coarse" else FINE)
    assert (len(train), len(test)) == (33, 7)
    assert by_id(train, classes) == expected(flair.part("train"), level)
    assert by_id(test, classes) == expected(flair.part("test"), level)
    assert train.labels.dtype == np.uint8
    assert train.known is None


def test_dev_is_another_word_for_val(form: Path) -> None:
    classes, _, test = source(form, test_split="val").annotations()
    assert by_id(test, classes) == expected(flair.part("val"), "coarse")
    assert len(test) == 3


def test_every_form_gives_the_pixels(form: Path) -> None:
    data = source(form).load()
    assert isinstance(data, DataSet)
    for part, word in ((data.train, "train"), (data.test, "test")):
        pixels = part.images.gather(torch.arange(len(part)), "cpu").numpy()
        assert part.ids is not None
        found = dict(zip(part.ids, pixels, strict=True))
        for record in flair.part(word):
            original = np.asarray(Image.open(io.BytesIO(flair.jpeg(record))))
            assert np.array_equal(found[record.image_id], original.transpose(2, 0, 1))


def test_names_and_fingerprints_tell_images_apart(form: Path) -> None:
    _, train, test = source(form).annotations()
    names = [part.files.name(i) for part in (train, test) for i in range(len(part))]
    assert len(set(names)) == 40
    assert all(str(form) in name for name in names)
    again = source(form).annotations()[1].files.fingerprint()
    assert train.files.fingerprint() == again != test.files.fingerprint()


def test_natural_clients_have_one_two_and_thirty_images(form: Path) -> None:
    _, train, _ = source(form).annotations()
    users, counts = np.unique(train.users, return_counts=True)
    assert dict(zip(users.tolist(), counts.tolist(), strict=True)) == {
        "30000001@N07": 1,
        "59769174@N00": 2,
        "7@N01": 30,
    }


def test_json_keeps_the_order_of_the_file(tmp_path: Path) -> None:
    _, train, _ = source(flair.write_json(tmp_path / "data")).annotations()
    assert train.ids == tuple(record.image_id for record in flair.part("train"))


def test_hdf5_files_are_refused_with_what_to_get(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"HDF5 files of FLAIR are not read .*small_images-42"):
        source(tmp_path / "flair.h5").annotations()


# Official figures ---------------------------------------------------------------------------------


def test_official_figures_agree_with_each_other() -> None:
    """429,078 images, 51,414 users, 17 classes and 2.79 coarse labels per image are published."""
    coarse = Flair(Flair.Config()).official_counts()
    assert coarse["images of all partitions"] == 429_078
    assert coarse["users of all partitions"] == 51_414
    assert set(module.OFFICIAL_LABELS) == set(COARSE)
    assert round(sum(module.OFFICIAL_LABELS.values()) / 429_078, 2) == 2.79
    assert list(COARSE) == sorted(COARSE)
    fine = Flair(Flair.Config(labels="fine", test_split="val")).official_counts()
    assert (fine["classes"], fine["test images"], fine["test users"]) == (1_628, 39_239, 5_141)
    assert not any("with" in name for name in fine)


def test_check_compares_with_the_publisher(tmp_path: Path) -> None:
    """Of 43 images kinds 0 and 3 (11 + 10) have the label material, counted over all partitions."""
    check = source(flair.write_json(tmp_path / "data")).check()
    lines = {line.what: (line.expected, line.found) for line in check.lines}
    assert lines["training images"] == (345_879, 33)
    assert lines["test users"] == (5_142, 2)
    assert lines["images of all partitions"] == (429_078, 43)
    assert lines["users of all partitions"] == (51_414, 7)
    assert lines["images of all partitions with material"] == (139_733, 21)
    assert lines["training image files"] == (33, 33)
    assert not check.ok
    assert "ml-flair" in check.advice


def test_a_label_given_twice_counts_once(tmp_path: Path) -> None:
    """Kind 1 alone (11 of 43 images) and kind 2 (11) have the label plant: 22."""
    folder = flair.write_json(tmp_path / "data")
    records = flair.as_json()
    records[1]["labels"] = ["plant", "plant"]
    (folder / "labels_and_metadata.json").write_text(json.dumps(records))
    flairs = source(folder)
    assert flairs.found_counts(*flairs.annotations())["images of all partitions with plant"] == 22


# Damaged JSON -------------------------------------------------------------------------------------


def broken(tmp_path: Path, text: str | bytes) -> Flair:
    data = text.encode() if isinstance(text, str) else text
    (tmp_path / "labels_and_metadata.json").write_bytes(data)
    return source(tmp_path)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (json.dumps(flair.as_json())[:-20], "not valid JSON.*get the file again"),
        ("", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        ('{"a": 1}', "dict, not a list"),
        ("[]", "no labelled image"),
        ("[1]", "record 1: a record needs image_id"),
    ],
    ids=["truncated", "empty", "binary", "object", "no records", "a number"],
)
def test_json_that_cannot_be_right(tmp_path: Path, text: str | bytes, told: str) -> None:
    with pytest.raises(DataError, match=rf"labels_and_metadata\.json.*{told}"):
        broken(tmp_path, text).annotations()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"partition": "trian"}, "no partition 'trian'. Did you mean 'train'"),
        ({"partition": None}, "no partition None"),
        ({"image_id": RECORDS[0].image_id}, f"'{RECORDS[0].image_id}' has been listed before"),
        ({"image_id": ""}, "the image is ''"),
        ({"user_id": None}, "the user is None"),
        ({"labels": "plant"}, "the labels are 'plant', not a list"),
        ({"labels": [["plant"]]}, r"the labels are \[\['plant'\]\]"),
        ({"labels": ["plants"]}, "no coarse label 'plants'. Did you mean 'plant'"),
    ],
)
def test_a_wrong_record_is_named(tmp_path: Path, change: dict[str, object], told: str) -> None:
    records = flair.as_json()
    records[4] |= change
    with pytest.raises(DataError, match=rf"record 5: .*{told}.* Get the file again\.$"):
        broken(tmp_path, json.dumps(records)).annotations()


def test_a_record_without_a_field_is_shown(tmp_path: Path) -> None:
    records = flair.as_json()
    del records[2]["labels"]
    with pytest.raises(DataError, match=f"record 3: a record needs .*{records[2]['image_id']}"):
        broken(tmp_path, json.dumps(records)).annotations()


def test_a_missing_partition_is_told(tmp_path: Path) -> None:
    records = [record for record in flair.as_json() if record["partition"] != "test"]
    with pytest.raises(DataError, match="no image of partition 'test'"):
        broken(tmp_path, json.dumps(records)).annotations()


def test_a_missing_image_is_told_before_decoding(tmp_path: Path) -> None:
    folder = flair.write_json(tmp_path / "data")
    gone = folder / "small_images" / f"{flair.part('train')[3].image_id}.jpg"
    gone.unlink()
    with pytest.raises(DataError, match=f"1 of 33 training images.*{gone.name}"):
        source(folder).load()
    assert len(source(folder, unreadable="skip").load().train) == 32


def test_what_is_missing_and_where_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path.*small_images-42\.tar\.gz"):
        Flair().load()
    with pytest.raises(DataError, match=r"labels_and_metadata\.json.*download_dataset\.py"):
        source(tmp_path).annotations()
    with pytest.raises(DataError, match="nowhere"):
        source(tmp_path / "nowhere").annotations()


def test_settings_are_checked() -> None:
    assert datasets["flair"] is Flair
    assert build(Flair.Config, {"labels": "fine"}, "data").labels == "fine"
    with pytest.raises(ConfigError, match=r"data\.labels"):
        build(Flair.Config, {"labels": "medium"}, "data")
    with pytest.raises(ConfigError, match=r"data\.test_split"):
        build(Flair.Config, {"test_split": "train"}, "data")


# Damaged containers -------------------------------------------------------------------------------


def test_parquet_files_of_something_else_are_told(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"image_id": [1], "image": [b"x"]}), tmp_path / "train-0.parquet")
    with pytest.raises(DataError, match=r"no column image\.bytes, labels, user_id"):
        source(tmp_path).annotations()
    (tmp_path / "train-0.parquet").write_bytes(b"PAR1 and no more")
    with pytest.raises(DataError, match=r"train-0\.parquet is not a Parquet file"):
        source(tmp_path).annotations()


def test_a_wrong_parquet_row_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    flair.write_parquet(tmp_path)
    file = tmp_path / "data" / "test-00000-of-00001.parquet"
    content = pq.read_table(file)
    column = content.schema.get_field_index("partition")
    words = ["test"] * 5 + ["tset"] + ["test"]
    pq.write_table(content.set_column(column, "partition", [words]), file)
    with pytest.raises(DataError, match=r"test-00000-of-00001\.parquet, row 6: .*'tset'"):
        source(tmp_path).annotations()


def test_a_parquet_row_without_an_image_is_told(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    flair.write_parquet(tmp_path)
    file = tmp_path / "data" / "test-00000-of-00001.parquet"
    content = pq.read_table(file)
    column = content.schema.get_field_index("image")
    images = content.column("image").to_pylist()
    images[2]["bytes"] = None
    field = content.schema.field("image")
    pq.write_table(content.set_column(column, field, [images]), file)
    with pytest.raises(DataError, match=r"row 2 .*holds no image"):
        source(tmp_path).load()


def test_parquet_images_are_read_in_any_order_with_little_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row groups of 7 images of about 700 bytes; where 1 byte may be kept, the latest one stays."""
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(parquet_form, "RECENT_BYTES", 1)
    _, train, _ = source(flair.write_parquet(tmp_path)).annotations()
    files, records = train.files, flair.part("train")
    assert isinstance(files, parquet_form.ParquetImages)
    for i in (0, 32, 7, 6, 19, 20, 0):
        assert files.read(i) == flair.jpeg(records[i])
        assert len(files._recent) == 1
    monkeypatch.setattr(parquet_form, "RECENT_BYTES", 1 << 20)
    for i in (0, 7, 14):
        files.read(i)
    assert len(files._recent) == 3


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = FORMS["parquet"](tmp_path / "data")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r'pyarrow.*pip install "fedharmony\[parquet\]"'):
        source(path).annotations()
