"""Feature vectors of the user's own: four kinds of file, what their columns mean, and bad input."""

from __future__ import annotations

import csv
import io
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedharmony.config import build
from fedharmony.data.arff import read_arff
from fedharmony.data.base import DataSet, LabelledImages, TensorImages
from fedharmony.data.features import Features, moments
from fedharmony.errors import ConfigError, DataError
from test_cli import call, refuse, succeed

CSV = """\
id,height,label_cat,weight,label_dog,client,split
a,1.5,1,-2e3,0,anna,train
b,2.5,0,4,,anna,train
c,0,1,1,1,bert,test
"""
DENSE = """\
% a comment
@relation 'animals: -C -2'
@attribute height numeric
@attribute 'body weight' real
@ATTRIBUTE cat {0,1}
@attribute dog {0,1}
@data
1.5,-2000,1,0
2.5,4,0,?

0,1,1,1
"""
SPARSE = DENSE.partition("1.5")[0] + "{0 1.5, 1 -2000, 2 1}\n{0 2.5,1 4,3 ?}\n{1 1, 2 1,3 1}\n"
HEAD = "@relation r\n@attribute x real\n@attribute label_a {0,1}\n@data\n"
XML = '<labels xmlns="http://mulan.sourceforge.net/labels"><label name="dog"/></labels>'


def write(folder: Path, name: str, text: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def source(path: Path, **settings: Any) -> Features:
    return Features(build(Features.Config, {"path": str(path), **settings}, "data"))


def told(path: Path, **settings: Any) -> str:
    """The error that loading ends with."""
    with pytest.raises(DataError) as error:
        source(path, **settings).load()
    return str(error.value)


def rows(part: LabelledImages) -> list[list[float]]:
    values: list[list[float]] = part.images.gather(torch.arange(len(part)), "cpu").tolist()
    return values


def all_rows(data: DataSet) -> list[list[float]]:
    return sorted(rows(data.train) + rows(data.test))


# Four kinds of file -------------------------------------------------------------------------------


def test_csv(tmp_path: Path) -> None:
    """Classes lose their prefix; what is no label, id, user or split is a feature, in order."""
    data = source(write(tmp_path, "a.csv", CSV)).load()
    assert data.classes == ("cat", "dog")
    assert rows(data.train) == [[1.5, -2000.0], [2.5, 4.0]]
    assert rows(data.test) == [[0.0, 1.0]]
    assert data.train.labels.tolist() == [[1, 0], [0, 0]]
    assert data.train.known is not None
    assert data.train.known.tolist() == [[True, True], [True, False]]
    assert data.test.known is None
    assert (data.train.ids, data.test.ids) == (("a", "b"), ("c",))
    assert data.train.users is not None
    assert data.train.users.tolist() == ["anna", "anna"]


def test_parquet_is_read_as_csv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"x": [1.5, 2.0, 0.1], "label_cat": [1, 0, None], "split": ["train", "train", "test"]}
    columns["label_dog"] = [True, False, True]
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    data = source(tmp_path / "a.parquet").load()
    assert (rows(data.train), rows(data.test)) == ([[1.5], [2.0]], [[np.float32(0.1)]])
    assert data.test.known is not None
    assert data.test.known.tolist() == [[False, True]]
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    assert 'pip install "fedharmony[parquet]"' in told(tmp_path / "a.parquet")


@pytest.mark.parametrize("text", [DENSE, SPARSE, DENSE.replace("\n", "\r\n")])
def test_arff(tmp_path: Path, text: str) -> None:
    """MEKA's ``-C -2``: the last two columns are labels; ``?`` is an unknown one."""
    sheet = read_arff(text.encode(), "a.arff")
    assert sheet.names == ["height", "body weight", "cat", "dog"]
    assert sheet.label_count == -2
    data = source(write(tmp_path, "a.arff", text)).load()
    assert data.classes == ("cat", "dog")
    assert all_rows(data) == [[0.0, 1.0], [1.5, -2000.0], [2.5, 4.0]]
    known = [part.known is None or part.known.all() for part in (data.train, data.test)]
    assert known.count(False) == 1


def test_words_are_features_of_arff(tmp_path: Path) -> None:
    """In a bag of words "user" and "split" are words like others, unless the settings name them."""
    head = "".join(f"@attribute {name} {{0,1}}\n" for name in ("user", "split", "label_a"))
    text = f"@relation r\n{head}@data\n{{0 1}}\n{{1 1, 2 1}}\n{{2 1}}\n"
    data = source(write(tmp_path, "a.arff", text)).load()
    assert data.train.images.shape == (2,)
    assert data.train.users is None
    owned = source(tmp_path / "a.arff", user="user").load()
    assert owned.train.images.shape == (1,)
    assert owned.train.users is not None


def test_labels_of_arff(tmp_path: Path) -> None:
    """Settings come first, then MULAN's XML file, then the relation's name."""
    path = write(tmp_path, "a.arff", DENSE.replace("?", "1"))
    assert source(path, labels=("dog",)).load().classes == ("dog",)
    counted = source(path, label_count=1).load()
    assert counted.classes == ("dog",)
    assert all_rows(counted) == [[0.0, 1.0, 1.0], [1.5, -2000.0, 1.0], [2.5, 4.0, 0.0]]
    other = write(tmp_path, "other.xml", XML.replace("dog", "cat"))
    write(tmp_path, "a.xml", XML)
    assert source(path).load().classes == ("dog",)
    train = write(tmp_path, "a-train.arff", path.read_bytes())
    assert source(train).load().classes == ("dog",)
    assert source(path, label_file=str(other)).load().classes == ("cat",)
    first = write(tmp_path, "b.arff", DENSE.replace("-C -2", "-C 2").replace("?", "1"))
    assert "'height' holds '1.5', which is not 0, 1 or empty" in told(first)


@given(st.lists(st.lists(st.floats(-1e6, 1e6, width=32), min_size=3, max_size=3), min_size=2))
def test_dense_and_sparse_rows_agree(values: list[list[float]]) -> None:
    """A sparse row leaves out zeros; read back, it is the dense row."""
    head = "@relation r\n" + "".join(f"@attribute x{i} numeric\n" for i in range(3)) + "@data\n"
    dense = "".join(",".join(map(repr, row)) + "\n" for row in values)
    sparse = "".join(
        "{" + ", ".join(f"{i} {x!r}" for i, x in enumerate(row) if x) + "}\n" for row in values
    )
    first, second = (list(read_arff((head + text).encode(), "a").rows) for text in (dense, sparse))
    for row, a, b in zip(values, first, second, strict=True):
        assert [float(cell) for cell in a.cells] == [float(cell) for cell in b.cells] == row


def arrays(**others: Any) -> dict[str, Any]:
    X = np.array([[1.5, -2.0], [2.5, 4.0], [0.0, 1.0]])
    return {"X": X, "Y": np.array([[1, 0], [0, 1], [1, 1]]), **others}


def save(folder: Path, values: Mapping[str, Any]) -> Path:
    np.savez(folder / "a.npz", **values)
    return folder / "a.npz"


def test_npz(tmp_path: Path) -> None:
    known = np.array([[1, 1], [1, 0], [1, 1]])
    more = {"Y": np.array([[1, 0], [0, -1], [1, 1]])}  # what is unknown may be anything
    more |= {"known": known, "ids": ["a", "b", "c"], "users": [7, 7, 8], "classes": ["cat", "dog"]}
    path = save(tmp_path, arrays(**more, split=["train", "train", "test"], features=["h", "w"]))
    data = source(path).load()
    assert data.classes == ("cat", "dog")
    assert rows(data.train) == [[1.5, -2.0], [2.5, 4.0]]
    assert data.train.labels.tolist() == [[1, 0], [0, 0]]  # what is unknown is not shown
    assert data.train.known is not None
    assert data.train.known.tolist() == [[True, True], [True, False]]
    assert data.train.ids == ("a", "b")
    assert data.train.users is not None
    assert data.train.users.tolist() == ["7", "7"]
    plain = source(save(tmp_path, arrays())).load()
    assert plain.classes == ("y0", "y1")
    assert plain.train.ids is plain.train.users is plain.train.known is None
    assert (len(plain.train), len(plain.test)) == (2, 1)


# Training and test part ---------------------------------------------------------------------------


def test_whole_users_are_held_out(tmp_path: Path) -> None:
    users = np.repeat(np.arange(10), 6)
    X, Y = np.arange(120.0).reshape(60, 2), np.tile([[0, 1]], (60, 1))
    path = save(tmp_path, {"X": X, "Y": Y, "users": users})
    data = source(path, test_fraction=0.3).load()
    assert data.train.users is not None
    assert data.test.users is not None
    assert len(data.test) == 18
    assert not set(data.train.users) & set(data.test.users)
    assert all_rows(data) == X.tolist()
    single = source(path, test_fraction=0.25, hold_out="images").load()
    assert len(single.test) == 15
    again = source(path, test_fraction=0.25, hold_out="images").load()
    assert rows(again.test) == rows(single.test)
    other = source(path, test_fraction=0.25, hold_out="images", seed=1).load()
    assert rows(other.test) != rows(single.test)


def test_a_test_file(tmp_path: Path) -> None:
    train = write(tmp_path, "train.csv", "id,x,label_a\np,1,1\nq,2,0\n")
    test = write(tmp_path, "test.csv", "id,x,label_a\nr,3,1\n")
    data = source(train, test_path=str(test)).load()
    assert (rows(data.train), rows(data.test)) == ([[1.0], [2.0]], [[3.0]])
    other = write(tmp_path, "other.csv", "id,y,label_a\nr,3,1\n")
    assert "first 'x' and 'y'" in told(train, test_path=str(other))
    assert "share samples, for instance 'p'" in told(train, test_path=str(train))
    divided = write(tmp_path, "divided.csv", "x,label_a,split\n1,1,train\n2,0,test\n")
    assert "so does data.test_path" in told(divided, test_path=str(test))


# Bad input ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "settings", "said"),
    [
        ("", {}, "is empty"),
        ("\n\n", {}, "is empty"),
        ("x,label_a\n", {}, "columns but no sample"),
        ("x,label_a\n1,0\nred,1\n", {}, "line 3: column 'x' holds 'red', which is not a number"),
        ("x,label_a\n1,0\nnan,1\n", {}, "line 3: column 'x' holds 'nan', which is not a finite"),
        ("x,label_a\n-inf,0\n", {}, "line 2: column 'x' holds '-inf'"),
        ("x,label_a\n1e39,0\n", {}, "line 2: column 'x' holds '1e39'"),
        ("x,label_a\n1,0\n,1\n", {}, "line 3: column 'x' is empty. Features must be known"),
        ("x,label_a\n1,0\n1\n", {}, "line 3: there are 1 cells below 2 columns"),
        ("x,label_a\n1,2\n", {}, "line 2: column 'label_a' holds '2', which is not 0, 1"),
        ("x,y\n1,2\n", {}, "no label column: no name begins with 'label_'"),
        ("label_a,label_b\n1,0\n", {}, "no feature column"),
        ("x,x,label_a\n1,2,0\n", {}, "two columns 'x'"),
        (",x,label_a\n0,2,0\n", {}, "column 1 has no name"),
        ("id,x,label_a\np,1,0\np,2,0\n", {}, "line 3: the id 'p' stands in"),
        ("user,x,label_a\n,1,0\n", {}, "line 2: the user is missing"),
        ("user,client,x,label_a\na,b,1,0\n", {}, "columns user and client"),
        (
            "x,label_a,split\n1,0,tset\n",
            {},
            "line 2: there is no split 'tset'. Did you mean",
        ),
        ("x,label_a\n1,0\n2,1\n", {"labels": ["b"]}, "no column 'b', which is to be a label"),
        ("x,label_a\n1,0\n2,1\n", {"user": "who"}, "no column 'who', which data.user asks for"),
        ("x,label_a\n1,0\n2,1\n", {"label_count": 2}, "no feature is left"),
        ("x,label_a\n1,\n2,\n", {}, "No label of any training sample is known"),
        ("x,label_a\n1,0\n", {}, "single image"),
        ("x,label_a\n1,0\n2,1\n", {"hold_out": "users"}, "no column of users"),
        ("t,label_a\n" + "1e9,0\n1000000064,1\n" * 9, {}, "column 't' has mean 1e+09"),
    ],
)
def test_bad_tables(tmp_path: Path, text: str, settings: dict[str, Any], said: str) -> None:
    assert said in told(write(tmp_path, "a.csv", text), **settings)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"X": np.array([[1.0, np.nan], [0, 0], [0, 0]])}, "X[0, 1] ('x1') is nan"),
        ({"X": np.array([["a", "b"]] * 3)}, "X must be a matrix of numbers"),
        ({"X": np.zeros(3)}, "X must be a matrix of numbers"),
        ({"X": np.zeros((0, 2))}, "X must be a matrix of numbers"),
        ({"X": np.zeros((4, 2))}, "Y has shape (3, 2); beside X (4, 2)"),
        ({"Y": np.array([[0, 1], [0, 3], [0, 1]])}, "Y[1, 1] ('y1') is 3, neither 0 nor 1"),
        ({"known": np.ones((3, 1))}, "known has shape (3, 1)"),
        ({"classes": ["a", "a"]}, "classes has 'a' twice"),
        ({"features": ["a"]}, "features has shape (1,)"),
        ({"split": ["train", "tran", "test"]}, "no split 'tran'"),
        ({"user": [1, 2, 3]}, "array 'user', which means nothing here. Did you mean 'users'"),
        ({"ids": np.array([{}, 1, "a"], dtype=object)}, "not an .npz file of plain arrays"),
    ],
)
def test_bad_arrays(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    assert said in told(save(tmp_path, arrays(**changes)))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("@relation r\n@attribute x numeric\n", "no line @data"),
        ("@relation r\n@atribute x numeric\n@data\n", "line 2: '@atribute x numeric' is not under"),
        ("@relation r\n@attribute x\n@data\n", "line 2: '@attribute x' is not understood"),
        (
            HEAD + "{2 1}\n",
            "line 5: '2 1'",
        ),
        (
            HEAD + "1\n",
            "line 5: there are 1",
        ),
        (b"@relation r\n\xff\n", "line 2 is not UTF-8"),
    ],
)
def test_bad_arff(tmp_path: Path, text: str | bytes, said: str) -> None:
    assert said in told(write(tmp_path, "a.arff", text))


def test_bad_files(tmp_path: Path) -> None:
    assert "is a folder" in told(tmp_path)
    assert "they end in .npz" in told(write(tmp_path, "a.txt", "x"))
    assert "cannot be read" in told(tmp_path / "none.csv")
    assert "not an .npz file" in told(write(tmp_path, "a.npz", "PK and no more"))
    assert "Set data.path" in told(Path())  # an empty path, which is the current folder's name too
    assert "list of labels" in told(write(tmp_path, "a.arff", DENSE), label_file="none.xml")
    without_y = arrays()
    del without_y["Y"]
    assert "no array 'Y'" in told(save(tmp_path, without_y))
    with pytest.raises(ConfigError, match="labels and label_count both"):
        source(tmp_path, labels=("a",), label_count=1)


@given(
    st.text(alphabet="01xn,;\n\"'{}@ ?", max_size=60), st.sampled_from([".csv", ".arff", ".npz"])
)
def test_garbage_is_an_error_and_not_a_crash(text: str, form: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = write(
            Path(folder), f"a{form}", {".csv": "x,label_a\n", ".arff": HEAD}.get(form, "") + text
        )
        try:
            data = source(path).load()
        except DataError:
            return
        assert len(data.train)


# Statistics ---------------------------------------------------------------------------------------


@given(
    st.lists(
        st.lists(st.floats(-1e3, 1e3, width=32), min_size=2, max_size=2), min_size=2, max_size=20
    )
)
def test_moments_are_those_of_numpy(values: list[list[float]]) -> None:
    array = np.array(values, np.float64)
    mean, std = moments(TensorImages(torch.tensor(values)))
    np.testing.assert_allclose(mean, array.mean(0), rtol=1e-9, atol=1e-9)
    flat = (array == array[0]).all(0)
    np.testing.assert_allclose(std, np.where(flat, 1.0, array.std(0)), rtol=1e-6, atol=1e-9)


# The command --------------------------------------------------------------------------------------


def test_check(tmp_path: Path) -> None:
    table = io.StringIO()
    out = csv.writer(table)
    out.writerow(["x", "same", "label_circle", "label_cirlce", "user"])
    out.writerows([[i, 5, 1, int(i == 3), f"u{i % 4}"] for i in range(20)])
    write(tmp_path, "a.csv", table.getvalue())
    said = succeed(tmp_path, "data", "check", "features", "a.csv")
    for words in ("features", "20", "circle", "15", "unknown labels", "0.0 %", "clients", "ready"):
        assert words in said
    assert "Classes 'circle' (20) and 'cirlce' (1) look alike" in said
    assert "same: the same value in every training sample" in said
    bad = write(tmp_path, "bad.csv", "x,label_a\nred,1\n")
    assert "line 2: column 'x' holds 'red'" in refuse(
        tmp_path, "data", "check", "features", bad.name
    )
    assert call(tmp_path, "data", "prepare", "features", "a.csv")[2].startswith(
        "Error: Data set 'features' has no images"
    )
