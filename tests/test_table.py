"""Tables of the user's own images: both ways to write labels, splits, users, and bad input."""

import difflib
import io
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fedharmony.config import build
from fedharmony.data import table as tables
from fedharmony.data.base import datasets
from fedharmony.data.check import look_alikes
from fedharmony.data.table import JoinedCells, Table, held_out, held_out_users
from fedharmony.errors import ConfigError, DataError

JOINED = """\
image,labels,user,split
a/1.png,tree|cat,anna,train
a/2.png,|,anna,train
b/3.png,,bert,train
b/4.png,dog,carl,test
"""
COLUMNS = """\
image,dog,cat,client
a/1.png,0,1,anna
a/2.png,0.0,False,anna
b/3.png,,TRUE,bert
b/4.png,1.0,,carl
"""
IMAGES = ("a/1.png", "a/2.png", "b/3.png", "b/4.png")


@pytest.fixture(autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path_factory.mktemp("cache")))


def png(number: int) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (6, 6), (number, 2 * number, 3)).save(file, "PNG")
    return file.getvalue()


def write(folder: Path, table: str, images: Sequence[str] = IMAGES, name: str = "t.csv") -> Path:
    """A folder with a table and images; image i is red of strength i + 1."""
    for number, image in enumerate(images, start=1):
        (folder / image).parent.mkdir(parents=True, exist_ok=True)
        (folder / image).write_bytes(png(number))
    (folder / name).write_text(table, encoding="utf-8")
    return folder


def source(path: Path, **settings: Any) -> Table:
    return Table(build(Table.Config, {"path": str(path), "image_size": 6, **settings}, "data"))


def refuse(path: Path, told: str, **settings: Any) -> None:
    with pytest.raises(DataError, match=told):
        source(path, **settings).load()


# What a table says --------------------------------------------------------------------------------


def test_joined_names(tmp_path: Path) -> None:
    """Classes are all names, sorted: cat, dog, tree. ``|`` is none of them, empty is unknown."""
    classes, train, test = source(write(tmp_path, JOINED)).annotations()
    assert classes == ("cat", "dog", "tree")
    assert train.ids == IMAGES[:3]
    assert train.labels.tolist() == [[1, 0, 1], [0, 0, 0], [0, 0, 0]]
    assert train.known is not None
    assert train.known.tolist() == [[True] * 3, [True] * 3, [False] * 3]
    assert train.users is not None
    assert train.users.tolist() == ["anna", "anna", "bert"]
    assert (test.ids, test.labels.tolist(), test.known) == (("b/4.png",), [[0, 1, 0]], None)


def test_columns_of_zeros_and_ones(tmp_path: Path) -> None:
    """Classes in the order of the columns; data frames write 0.0 and False as well."""
    write(tmp_path, COLUMNS)
    write(tmp_path, "image,cat,dog\nc/5.png,0,1\n", ["c/5.png"], "test.csv")
    classes, train, test = source(tmp_path, format="columns", test_table="test.csv").annotations()
    assert classes == ("dog", "cat")
    assert train.labels.tolist() == [[0, 1], [0, 0], [0, 1], [1, 0]]
    assert train.known is not None
    assert train.known.tolist() == [[True] * 2, [True] * 2, [False, True], [True, False]]
    assert train.users is not None
    assert train.users.tolist() == ["anna", "anna", "bert", "carl"]
    # The second table has its columns in another order, and no users.
    assert (test.labels.tolist(), test.known, test.users) == ([[1, 0]], None, None)


def test_images_come_with_their_rows(tmp_path: Path) -> None:
    data = source(write(tmp_path, JOINED)).load()
    assert data.train.images.gather(torch.arange(3), "cpu")[:, 0, 0, 0].tolist() == [1, 2, 3]
    assert data.test.images.gather(torch.arange(1), "cpu")[0, :, 0, 0].tolist() == [4, 8, 3]
    assert data.train.known is not None
    assert not data.train.known[2].any()
    assert data.name == "table"


def test_classes_choose_and_order(tmp_path: Path) -> None:
    folder = write(tmp_path, JOINED)
    classes, train, _ = source(folder, classes=["tree", "dog", "cat", "fox"]).annotations()
    assert classes == ("tree", "dog", "cat", "fox")
    assert train.labels[0].tolist() == [1, 0, 1, 0]
    write(tmp_path, COLUMNS)
    chosen = {"format": "columns", "classes": ["cat"], "ignore": ["dog"], "test_fraction": 0.5}
    classes, train, test = source(folder, **chosen).annotations()
    assert classes == ("cat",)
    assert dict(zip(train.ids + test.ids, [*train.labels, *test.labels], strict=True)) == {
        "a/1.png": [1],
        "a/2.png": [0],
        "b/3.png": [1],
        "b/4.png": [0],
    }


def test_blanks_quotes_and_byte_order_marks_are_harmless(tmp_path: Path) -> None:
    lines = (
        "\ufeffimage , labels,split",
        './a//1.png,"cat, big | dog ",train',
        "",
        "a/2.png,dog,test",
    )
    text = "\r\n".join(lines)
    classes, train, test = source(write(tmp_path, text)).annotations()
    assert classes == ("cat, big", "dog")
    assert (train.ids, test.ids) == (("a/1.png",), ("a/2.png",))


def test_own_names_of_columns_and_splits(tmp_path: Path) -> None:
    text = "file,tags,owner,fold,note\na/1.png,a,x,fit,!\na/2.png,a,y,hold,!\nb/3.png,b,y,val,!\n"
    own = {"image": "file", "labels": "tags", "user": "owner", "split": "fold", "ignore": ["note"]}
    words = {"train_split": "fit", "test_split": "hold"}
    _, train, test = source(write(tmp_path, text), **own, **words).annotations()
    assert (train.ids, test.ids) == (("a/1.png",), ("a/2.png",))
    assert train.users is not None
    assert train.users.tolist() == ["x"]
    # "dev" asks for the rows that say "val".
    words["test_split"] = "dev"
    refuse(tmp_path, "line 3: there is no split 'hold'", **own, **words)
    write(tmp_path, text.replace("hold", "test"))
    assert source(tmp_path, **own, **words).annotations()[2].ids == ("b/3.png",)


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    """Published data sets may lie in a folder "coco"; here that is a folder like any other."""
    table = "image,labels,split\ncoco/1.png,a,train\n2.png,b,test\n"
    write(tmp_path, table, ["coco/1.png", "2.png"])
    assert source(tmp_path).load().train.ids == ("coco/1.png",)
    write(tmp_path, table.replace("coco/1.png", "1.png"), [])
    refuse(tmp_path, r"1 of 1 training images: .*/1\.png")


def test_parquet_reads_as_csv_does(tmp_path: Path) -> None:
    """Missing values and NaN are empty cells; truth values and floats are read as such."""
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    folder = write(tmp_path, "")
    (folder / "t.csv").unlink()
    users = [7, 7, 8, 9]
    columns = {
        "image": list(IMAGES),
        "dog": [0.0, 0.0, float("nan"), 1.0],
        "cat": [True, False, True, None],
        "user": users,
    }
    pq.write_table(pa.table(columns), folder / "t.parquet")
    write(tmp_path, COLUMNS, name="same.csv")
    found = source(folder, table="t.parquet", format="columns").annotations()
    same = source(folder, table="same.csv", format="columns").annotations()
    assert found[0] == same[0]
    for a, b in zip(found[1:], same[1:], strict=True):
        assert a.ids == b.ids
        assert np.array_equal(a.labels, b.labels)
        assert (a.known is None) == (b.known is None)
        assert a.known is None or np.array_equal(a.known, b.known)
    assert found[1].users is not None
    assert set(found[1].users.tolist()) <= {"7", "8", "9"}


def test_parquet_lists_and_bytes_are_names(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    write(tmp_path, JOINED)
    columns = {"image": [name.encode() for name in IMAGES]}
    columns["labels"] = [["tree", "cat"], [], None, ["dog"]]
    columns["split"] = ["train"] * 3 + ["test"]
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    found = source(tmp_path, table="t.parquet").annotations()
    same = source(tmp_path, table="t.csv").annotations()
    assert found[0] == same[0]
    assert found[1].ids == same[1].ids
    assert np.array_equal(found[1].labels, same[1].labels)
    assert found[1].known is not None
    assert same[1].known is not None
    assert np.array_equal(found[1].known, same[1].known)


# Held-out images ----------------------------------------------------------------------------------


@given(
    st.sets(st.text("abcdef", min_size=1), min_size=2, max_size=40),
    st.floats(0.01, 0.99),
    st.integers(0, 3),
)
def test_held_out_images(names: set[str], fraction: float, seed: int) -> None:
    """Exact size, disjoint, covering, sorted, and the same names in whatever order they come."""
    there, back = sorted(names), sorted(names, reverse=True)
    train, test = held_out(there, fraction, seed)
    assert len(test) == min(max(round(fraction * len(there)), 1), len(there) - 1)
    assert sorted([*train, *test]) == list(range(len(there)))
    assert train.tolist() == sorted(train)
    assert test.tolist() == sorted(test)
    again = held_out(back, fraction, seed)[1]
    assert {there[i] for i in test} == {back[i] for i in again}


def test_the_seed_and_the_fraction_choose(tmp_path: Path) -> None:
    names = [f"{i}.png" for i in range(20)]
    text = "image,labels\n" + "".join(f"{name},a\n" for name in names)
    folder = write(tmp_path, text, names)
    chosen = {seed: source(folder, seed=seed).annotations()[2].ids for seed in range(3)}
    assert {len(ids) for ids in chosen.values()} == {4}
    assert len(set(chosen.values())) > 1
    assert len(source(folder, test_fraction=0.5).annotations()[2]) == 10


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("image,", "imag,", r"no column 'image', which data\.image.*Did you mean 'imag'"),
        (",labels,", ",label,", r"no column 'labels', which data\.labels.*'label'.*\"columns\""),
        (",user,", ",usr,", r"the column 'usr'.*data\.ignore"),
        (",user,", ",,", "column 3 has no name.*index=False"),
        (",user,", ",labels,", "two columns 'labels'"),
        (",user,split", ",user,client", "columns user and client"),
        ("a/2.png,|", "a/1.png,|", r"line 3: image 'a/1\.png' is listed already in .*line 2\."),
        ("a/2.png,|", "./a/1.png,|", r"line 3: image 'a/1\.png' is listed already"),
        ("a/2.png", "/a/2.png", "line 3: the image '/a/2.png' is not a path below"),
        ("a/2.png", "../a/2.png", r"line 3: the image '\.\./a/2.png' is not a path below"),
        ("a/2.png", "", "line 3: the image '' is not a path"),
        ("tree|cat", "tree||cat", r"line 2: column 'labels' holds 'tree\|\|cat', which lacks"),
        ("b/3.png,,bert,", "b/3.png,bert,", "line 4: there are 3 cells below 4 columns"),
        (",bert,", ",,", "line 4: the user is missing"),
        ("carl,test", "carl,tset", "line 5: there is no split 'tset'. Did you mean 'test'"),
        ("carl,test", "carl,", "line 5: there is no split ''"),
        ("carl,test", "carl,val", "no image of split 'test'"),
        ("dog", '"dog', "line 5: unexpected end of data"),
    ],
)
def test_a_wrong_joined_table(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert JOINED.count(old) >= 1
    refuse(write(tmp_path, JOINED.replace(old, new, 1)), rf"t\.csv.*{told}")


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("a/1.png,0", "a/1.png,2", "line 2: column 'dog' holds '2', which is not 0, 1 or empty"),
        (",TRUE", ",yes", "line 4: column 'cat' holds 'yes'.*data.ignore"),
        (",client", ",owner", "line 2: column 'owner' holds 'anna'"),
    ],
)
def test_a_wrong_table_of_columns(tmp_path: Path, old: str, new: str, told: str) -> None:
    assert COLUMNS.count(old) == 1
    refuse(write(tmp_path, COLUMNS.replace(old, new)), rf"t\.csv.*{told}", format="columns")


def test_missing_label_columns(tmp_path: Path) -> None:
    folder = write(tmp_path, COLUMNS)
    refuse(folder, "no column 'cow'", format="columns", classes=["dog", "cow"])
    refuse(folder, "the column 'cat'", format="columns", classes=["dog"])
    refuse(folder, "no label column", format="columns", ignore=["dog", "cat"])
    write(tmp_path, "image,cat\nc/5.png,1\n", ["c/5.png"], "test.csv")
    refuse(folder, r"test\.csv has no column 'dog'", format="columns", test_table="test.csv")


def test_a_setting_that_names_no_column(tmp_path: Path) -> None:
    folder = write(tmp_path, JOINED)
    refuse(folder, r"no column 'owner', which data\.user", user="owner")
    refuse(folder, "the column 'image' of .* two meanings", user="image", ignore=["user"])
    refuse(folder, "the column 'user' of .* two meanings", labels="user", ignore=["labels"])
    refuse(folder, r"no column 'fold', which data\.split", split="fold")
    refuse(folder, r"line 2.*data\.classes has no 'cat'", classes=["tree", "dog"])


@pytest.mark.parametrize(
    ("text", "told"),
    [("", "is empty"), ("\n\n", "is empty"), ("image,labels\n", "lists no image")],
)
def test_an_empty_table(tmp_path: Path, text: str, told: str) -> None:
    refuse(write(tmp_path, text), rf"t\.csv.* {told}")


def test_a_table_without_any_label(tmp_path: Path) -> None:
    refuse(write(tmp_path, "image,labels\na/1.png,\na/2.png,|\n"), "names no label at all")


def test_a_single_image_cannot_be_divided(tmp_path: Path) -> None:
    refuse(write(tmp_path, "image,labels\na/1.png,cat\n"), "single image")


def test_text_that_is_not_utf8(tmp_path: Path) -> None:
    folder = write(tmp_path, JOINED)
    (folder / "t.csv").write_bytes(JOINED.encode().replace(b"bert", b"b\xe9rt"))
    refuse(folder, r"t\.csv, line 4 is not UTF-8")


def test_a_missing_image_is_told_before_decoding(tmp_path: Path) -> None:
    folder = write(tmp_path, JOINED)
    (folder / "a/2.png").unlink()
    refuse(folder, r"1 of 3 training images: .*a/2\.png")
    assert source(folder, unreadable="skip").load().train.ids == ("a/1.png", "b/3.png")


def test_which_table(tmp_path: Path) -> None:
    refuse(tmp_path, "not one table in .* but 0")
    write(tmp_path, JOINED)
    write(tmp_path, JOINED, name="other.csv")
    refuse(tmp_path, r"but 2 \(other\.csv, t\.csv\).*data\.table")
    assert len(source(tmp_path, table="t.csv").annotations()[1]) == 3
    refuse(tmp_path, r"lacks none\.csv", table="none.csv")
    refuse(tmp_path, r"1\.png is not a table", table="a/1.png")
    refuse(tmp_path, "are both", table="t.csv", test_table="t.csv")
    refuse(tmp_path, "split column 'split'.*test_table", table="t.csv", test_table="other.csv")
    ignored = {"ignore": ["split"], "table": "t.csv", "test_table": "other.csv"}
    refuse(tmp_path, r"other\.csv, line 2: .*listed already in .*t\.csv, line 2", **ignored)


def test_no_path_is_told_with_advice(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.path.*\.csv or \.parquet"):
        Table().load()
    refuse(tmp_path / "nowhere", "nowhere")


def test_settings_are_checked() -> None:
    assert datasets["table"] is Table
    for settings, told in (
        ({"test_split": "train"}, "mean the same"),
        ({"train_split": "val", "test_split": "dev"}, "mean the same"),
        ({"classes": ["a", "b", "a"]}, "'a' twice"),
        ({"format": "wide"}, r"data\.format"),
        ({"test_fraction": 1.0}, r"data\.test_fraction"),
    ):
        with pytest.raises(ConfigError, match=told):
            build(Table.Config, settings, "data")


def test_damaged_parquet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    (tmp_path / "t.parquet").write_bytes(b"PAR1 and no more")
    refuse(tmp_path, r"t\.parquet is not a Parquet file, or is damaged")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    refuse(tmp_path, r't\.parquet needs the package pyarrow.*pip install "fedharmony\[parquet\]"')


def test_a_wrong_parquet_row_is_named(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    columns = {"image": ["a.png", "b.png"], "cat": [1, 5]}
    pq.write_table(pa.table(columns), tmp_path / "t.parquet")
    refuse(tmp_path, r"t\.parquet, row 2: column 'cat' holds '5'", format="columns")


@given(st.lists(st.none() | st.sets(st.sampled_from("abcdefgh"), max_size=4), min_size=1))
def test_joined_cells_against_sets(rows: list[set[str] | None]) -> None:
    """Each row's names come back as the ones of its row; None, an empty cell, is unknown."""
    cells = JoinedCells("labels", "habcdefg")
    for row in rows:
        cells.add(["" if row is None else "|".join(sorted(row)) or "|"])
    classes, values = cells.finish()
    assert classes == tuple("habcdefg")
    for row, found in zip(rows, values, strict=True):
        if row is None:
            assert (found == 2).all()
        else:
            assert {classes[c] for c in np.flatnonzero(found == 1)} == row
            assert (found < 2).all()


def test_whole_users_are_held_out(tmp_path: Path) -> None:
    """Nobody is trained on and tested on, unless the settings ask for single images."""
    rows = [f"{user}/{i}.png,cat,{user}" for user in "abcdefgh" for i in range(5)]
    folder = write(tmp_path, "image,labels,user\n" + "\n".join(rows) + "\n", images=())
    _, train, test = source(folder, test_fraction=0.25).annotations()
    assert train.users is not None
    assert test.users is not None
    assert not set(train.users) & set(test.users)
    assert (len(train), len(test)) == (30, 10)
    _, train, test = source(folder, test_fraction=0.25, hold_out="images").annotations()
    assert train.users is not None
    assert test.users is not None
    assert set(train.users) & set(test.users)


def test_users_can_only_be_held_out_where_there_are_several(tmp_path: Path) -> None:
    text = "image,labels\na/1.png,cat\na/2.png,dog\n"
    with pytest.raises(DataError, match="no column of users"):
        source(write(tmp_path, text), hold_out="users").annotations()
    text = "image,labels,user\na/1.png,cat,anna\na/2.png,dog,anna\n"
    with pytest.raises(DataError, match="one user, 'anna'"):
        source(write(tmp_path, text)).annotations()
    assert source(tmp_path, hold_out="images").annotations()


@given(
    users=st.lists(st.sampled_from("abcdefg"), min_size=2, max_size=40).filter(
        lambda users: len(set(users)) > 1
    ),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 5),
)
def test_held_out_users_are_whole_and_near_the_share(
    users: list[str], fraction: float, seed: int
) -> None:
    """The choice depends on who has how many images, not on their order in the table."""
    train, test = held_out_users(users, fraction, seed)
    names = [{users[i] for i in rows} for rows in (train, test)]
    assert not names[0] & names[1]
    assert all(names)
    assert sorted([*train, *test]) == list(range(len(users)))
    largest = max(users.count(name) for name in users)
    assert abs(len(test) - fraction * len(users)) <= largest
    again = held_out_users(sorted(users), fraction, seed)[1]
    assert {sorted(users)[i] for i in again} == names[1]


@pytest.mark.parametrize(
    ("table", "settings", "part"),
    [
        ("image,cat\na/1.png,\na/2.png,\n", {"format": "columns"}, "training"),
        ("image,cat,split\na/1.png,1,train\na/2.png,,test\n", {"format": "columns"}, "test"),
        ("image,labels,split\na/1.png,cat,train\na/2.png,,test\n", {}, "test"),
        ("image,labels,split\na/1.png,,train\na/2.png,cat,test\n", {}, "training"),
    ],
)
def test_a_part_without_any_label_is_refused(
    tmp_path: Path, table: str, settings: dict[str, Any], part: str
) -> None:
    """It would train at loss 0, or print metrics of nothing."""
    with pytest.raises(DataError, match=f"No label of any {part} image is known.*write"):
        source(write(tmp_path, table), **settings).annotations()


def test_more_pairs_than_a_matrix_can_have(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MOST_CELLS", 5)
    with pytest.raises(DataError, match="3 different labels for 4 images"):
        source(write(tmp_path, JOINED)).annotations()


# The check ----------------------------------------------------------------------------------------


def test_check_says_what_is_there(tmp_path: Path) -> None:
    """Three of four images train, of two users; of the 3 · 4 labels, those of b/3 are unknown."""
    found = source(write(tmp_path, JOINED)).check()
    assert found.ok
    assert [(c.name, c.train, c.test) for c in found.classes] == [
        ("cat", 1, 0),
        ("dog", 0, 1),
        ("tree", 1, 0),
    ]
    facts = dict(found.facts)
    assert (facts["training images"], facts["test images"]) == ("3", "1")
    assert facts["clients"] == "2, with 1 to 2 training images; 1 more in the test part only"
    assert facts["unknown labels"] == "25.0 % (3 of 12)"
    assert found.doubts == (
        "Nothing in the training part has: dog.",
        "Nothing in the test part has: cat, tree.",
    )


def test_check_decodes_every_image(tmp_path: Path) -> None:
    """100 images, more than a sample: each one that is missing, damaged or a pipe is named."""
    names = [f"{i}.png" for i in range(100)]
    table = "image,labels\n" + "".join(f"{name},circle\n" for name in names)
    write(tmp_path, table, names)
    told: list[tuple[int, int]] = []
    assert source(tmp_path).check(lambda *seen: told.append(seen)).ok
    assert told[-1] == (20, 20)
    assert [done for done, total in told if total == 80] == [16, 32, 48, 64, 80]
    for name in ("17.png", "43.png"):
        (tmp_path / name).unlink()
    os.mkfifo(tmp_path / "43.png")
    (tmp_path / "71.png").write_bytes(png(1)[:4])
    found = source(tmp_path).check()
    assert not found.ok
    assert sum(line.found for line in found.lines) == 97
    said = "\n".join(found.faults)
    assert f"{tmp_path / '17.png'}: there is no such file." in said
    assert f"{tmp_path / '43.png'}: it is a pipe, socket or device" in said
    assert re.search(r"71\.png: .+", said)
    assert "BytesIO" not in said
    assert len(found.faults) == 3


@pytest.mark.parametrize(("sign", "ok"), [("|", True), (";", False), (",", False)])
def test_check_finds_a_wrong_separator(tmp_path: Path, sign: str, ok: bool) -> None:
    cells = [f'"cat{sign}dog"', f'"dog{sign}tree"', '"tree"', '"cat"']
    rows = "".join(f"{image},{cell}\n" for image, cell in zip(IMAGES, cells, strict=True))
    found = source(write(tmp_path, "image,labels\n" + rows)).check()
    assert found.ok == ok
    assert any("Between labels the table needs '|'" in fault for fault in found.faults) != ok


def test_check_finds_names_that_look_alike(tmp_path: Path) -> None:
    rows = "".join(f"{image},circle\n" for image in IMAGES[:3]) + f"{IMAGES[3]},cirlce\n"
    found = source(write(tmp_path, "image,labels\n" + rows)).check()
    assert found.ok
    assert "Classes 'circle' (3) and 'cirlce' (1) look alike" in found.doubts[0]


@given(st.lists(st.text("abcABC1", min_size=1, max_size=6), unique=True, max_size=8))
def test_names_that_look_alike_against_difflib(names: list[str]) -> None:
    def alike(a: str, b: str) -> bool:
        plain = [re.sub(r"\d+", "0", name) for name in (a, b)]
        ratio = difflib.SequenceMatcher(None, b.casefold(), a.casefold()).ratio()
        swapped = sorted(a.casefold()) == sorted(b.casefold())
        return plain[0] != plain[1] and (swapped or ratio >= 0.8)

    pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :] if alike(a, b)]
    assert look_alikes(names) == pairs
