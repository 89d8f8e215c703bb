"""The config files of the methods are those that their settings give."""

from __future__ import annotations

import re
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import pytest

import fedharmony
from fedharmony.config import build, tree_of
from fedharmony.experiments import config_files
from fedharmony.experiments.config_files import config_file, descriptions
from fedharmony.methods.base import Method, methods

OWN = [n for n in methods.names() if methods[n].__module__ == f"fedharmony.methods.{n}"]
FOLDER = Path(fedharmony.__file__).parent / "configs" / "methods"


@pytest.mark.parametrize("name", OWN)
def test_files_are_up_to_date(name: str) -> None:
    found = (FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    assert found == config_file(name), (
        "Write the files anew: python -m fedharmony.experiments.config_files"
    )


def test_there_is_a_file_for_each_method_and_no_other() -> None:
    assert sorted(path.stem for path in FOLDER.iterdir()) == OWN


@pytest.mark.parametrize("name", OWN)
def test_files_hold_defaults_and_grids(name: str) -> None:
    """Without their comment signs, the values of the default preset; with them, nothing."""
    tree, config = tomllib.loads(config_file(name)), methods[name].Config
    assert not tree.get("methods", {}).get(name)
    preset = {k: v for k, v in next(iter(methods[name].presets.values())).items()}
    preset.pop("federation", None)
    bare = re.sub(r"(?m)^# (\w+ = (?!\(left out\)).*)$", r"\1", config_file(name))
    own = tomllib.loads(bare).get("methods", {}).get(name, {})
    assert own == tree_of(config(**preset))
    assert build(config, own, name) == config(**preset)
    grid = tree.get("tune", {}).get(name, {})
    assert grid == {key: list(values) for key, values in methods[name].search.items()}
    assert "arXiv" in config_file(name)


@pytest.mark.parametrize("name", OWN)
def test_every_setting_is_described(name: str) -> None:
    config = methods[name].Config
    assert [field.name for field in fields(config)] == list(descriptions(config))


class Odd(Method):
    """A method with one setting of each kind."""

    @dataclass(frozen=True)
    class Config(Method.Config):
        """Settings.

        Attributes:
            kind: what to do,
                in two lines.
            told: "yes" or "no".
            limit: none is no limit.

        What follows is not of a setting: none.
        """

        kind: Literal["a", "b"] = "a"
        told: Literal["yes", "no"] = "yes"
        limit: float | None = None


def test_words_of_a_list_are_named_where_the_description_does_not() -> None:
    assert list(config_files._settings(Odd.Config())) == [
        '# what to do, in two lines. One of "a", "b".',
        '# kind = "a"',
        '# "yes" or "no".',
        '# told = "yes"',
        "# none is no limit.",
        "# limit = (left out)",
    ]


def test_all_files_are_written(tmp_path: Path) -> None:
    config_files.write(tmp_path)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written == {path.name: path.read_bytes() for path in FOLDER.iterdir()}
