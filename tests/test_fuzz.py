"""Bad input that nobody thought of: tables, settings files and command lines, made by hypothesis.

Whatever comes in, the program ends by itself with an exit code of its own, says what is wrong in
one paragraph, and leaves what was there as it was. ``FEDHARMONY_FUZZ=5000 pytest
tests/test_fuzz.py`` tries more than the few hundred inputs of the usual suite.
"""

from __future__ import annotations

import os
import resource
import shutil
import string
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from fedharmony.config import keys
from fedharmony.errors import FedHarmonyError
from fedharmony.experiments.settings import COMPONENTS, PLAIN
from fedharmony.methods.base import methods
from fedharmony.terminal import plain
from test_cli import SMALL, call

#: Inputs of each of the three kinds.
EXAMPLES = int(os.environ.get("FEDHARMONY_FUZZ", "100"))
#: Bytes by which the process may grow over all of them.
MEMORY = 2 << 30

trying = settings(
    max_examples=EXAMPLES,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


class StopError(FedHarmonyError):
    """Everything was accepted, and training would begin."""


@pytest.fixture(autouse=True)
def bounded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No training, a cache of our own, and a look at the memory."""

    def stop(*_: object, **__: object) -> None:
        raise StopError("Accepted.")

    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("fedharmony.experiments.run._first_round", stop)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MEMORY


def content(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def well_told(folder: Path, *words: str) -> None:
    """Exit code 0, 1 or 2; an error is one paragraph; no control character; files untouched."""
    before = content(folder)
    code, out, err = call(folder, *words)
    assert code in (0, 1, 2), err
    assert "Traceback" not in out + err
    assert plain(out + err) == out + err
    if code == 2:
        assert "Error: " in err or "Usage: " in out
    after = content(folder)
    assert {name: after.get(name) for name in before} == before


#: Text as people, editors and attackers write it.
odd_text = st.one_of(
    st.text(max_size=12),
    st.text(alphabet=string.printable, max_size=20),
    st.sampled_from(["", " ", "\0", "\x1b[2J", "..", "/", "~", "~root", "[/]", "[bold]", "nan"]),
    st.sampled_from(["a" * 400, "é" * 300, "\u202e", "../../x", "%s", "{0}", "'", '"', "\\"]),
)
odd_number = st.one_of(
    st.integers(),
    st.floats(),
    st.sampled_from([0, -1, 1e308, -1e308, 2**31, 2**63, 2**64, 10**30, 1e-320, 0.5, True]),
)
odd_value: st.SearchStrategy[Any] = st.recursive(
    st.one_of(odd_number, odd_text, st.booleans(), st.dates()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(odd_text, inner, max_size=3),
    max_leaves=6,
)


# -- tables ---------------------------------------------------------------------------------------

cell = st.one_of(
    st.sampled_from(["0.png", "1.png", "2.png", "3.png", "none.png", "cat", "dog|cat", "|", ""]),
    st.sampled_from(["0", "1", "train", "test", "anna", "bert", "2", "TRUE", '"', ";"]),
    odd_text,
)
heading = st.sampled_from(["image", "labels", "user", "split", "cat", "dog", "client", "", "x"])


@st.composite
def tables(draw: st.DrawFn) -> bytes:
    """Mostly tables, some of them broken, some of them no text at all."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=200))
    names = draw(st.lists(heading | odd_text, min_size=1, max_size=5))
    if draw(st.booleans()):
        names[:2] = ["image", "labels"]
    rows = draw(st.lists(st.lists(cell, min_size=1, max_size=5), max_size=8))
    join = draw(st.sampled_from([",", ",", ",", ";", "\t"]))
    end = draw(st.sampled_from(["\n", "\n", "\r\n", "\r", "\n\n"]))
    coding = draw(st.sampled_from(["utf-8", "utf-8", "utf-8-sig", "utf-16", "latin-1"]))
    return end.join(join.join(row) for row in [names, *rows]).encode(coding, "replace")


@trying
@given(
    table=tables(),
    changes=st.lists(
        st.sampled_from(
            [
                "format=columns",
                "hold_out=users",
                "hold_out=images",
                "user=user",
                "unreadable=skip",
                "classes=[]",
                "ignore=[x]",
                "image=labels",
                "test_fraction=0.5",
                "split=split",
            ]
        ),
        max_size=3,
    ),
)
def test_tables(tmp_path: Path, table: bytes, changes: list[str]) -> None:
    folder = tmp_path / "data"
    folder.mkdir(exist_ok=True)
    for i in range(4):
        if not (folder / f"{i}.png").exists():
            Image.new("RGB", (4, 4), (i, 0, 0)).save(folder / f"{i}.png")
    (folder / "t.csv").write_bytes(table)
    well_told(folder, "data", "check", "table", str(folder), "image_size=4", *changes)
    data = ["data.name=table", f"data.path={folder}", *(f"data.{change}" for change in changes)]
    well_told(folder, "partition", "demo", *data, "split.clients=2", "--out", str(tmp_path / "out"))


# -- settings -------------------------------------------------------------------------------------

SETTINGS = sorted(
    {f"{section}.{key}" for section, cls in PLAIN.items() for key in keys(cls)}
    | {
        f"{section}.{key}"
        for section, choice in COMPONENTS.items()
        for name in ("digits", "iid", "pivot_dirichlet", "vit")
        if name in choice.names()
        for key in [*keys(choice.common), *keys(choice.own(name))]
    }
    | {f"methods.{name}.{key}" for name in methods.names() for key in keys(methods[name].Config)}
)


@st.composite
def trees(draw: st.DrawFn) -> dict[str, Any]:
    """Settings by their right names with odd values, and some odd names."""
    tree: dict[str, Any] = {}
    for name in draw(st.lists(st.sampled_from(SETTINGS), min_size=1, max_size=2)):
        node, *path = tree, *name.split(".")
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = draw(odd_number | odd_number | odd_value)
    if draw(st.integers(0, 4)) == 0:
        tree.setdefault(draw(st.sampled_from(["run", "x", "data"]) | odd_text), draw(odd_value))
    return tree


def as_toml(tree: dict[str, Any]) -> bytes:
    """As far as TOML can hold it."""
    try:
        return tomli_w.dumps(tree).encode(errors="replace")
    except (TypeError, ValueError):
        return repr(tree).encode(errors="replace")


@trying
@given(
    text=st.one_of(trees().map(as_toml), trees().map(as_toml), st.binary(max_size=100)),
    method=st.sampled_from(methods.names()),
)
def test_settings_files(tmp_path: Path, text: bytes, method: str) -> None:
    """Everything up to round 0: data, split, model and method are really made."""
    (tmp_path / "own.toml").write_bytes(text)
    shutil.rmtree(tmp_path / "run", ignore_errors=True)  # an earlier example's
    own = [change for change in SMALL if not change.startswith("engine.threads")]
    well_told(tmp_path, "run", "demo", f"run.method={method}", *own, "own.toml", "--out", "run")


# -- command lines --------------------------------------------------------------------------------

words = st.one_of(
    st.sampled_from(["run", "compare", "tune", "demo", "resume", "report", "list", "partition"]),
    st.sampled_from(["data", "models", "check", "prepare", "methods", "configs", "table", "voc"]),
    st.sampled_from(["demo", "methods/fedprox", "own.toml", "none.toml", ".", "/dev/null", "run"]),
    st.sampled_from(["--out", "-o", "--quiet", "-q", "--help", "--seeds", "--methods", "--debug"]),
    st.sampled_from(["--plugin", "--device", "--version", "--", "-", "0,1", "all", "fedavg"]),
    st.builds("{}={}".format, st.sampled_from(SETTINGS), odd_number | odd_text),
    odd_text,
)


@trying
@given(line=st.lists(words, min_size=1, max_size=6))
def test_command_lines(tmp_path: Path, line: list[str]) -> None:
    """Nothing of this can train; what is valid stops before round 0."""
    (tmp_path / "own.toml").write_text("[run]\nrounds = 2\n")
    line = [word for word in line if word not in ("fetch", "--debug")]
    well_told(tmp_path, *line)
