"""Settings, errors, random generators, registries."""

from __future__ import annotations

import os
import random
import resource
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest
import torch
from annotated_types import Ge

from fedharmony import config
from fedharmony.config import (
    FilePath,
    build,
    keys,
    override,
    parse_override,
    read_toml,
    to_toml,
    tree_of,
)
from fedharmony.data.base import datasets
from fedharmony.engine.optimise import TrainSettings
from fedharmony.errors import ConfigError
from fedharmony.experiments.settings import COMPONENTS, PLAIN, SplitSettings
from fedharmony.methods.base import methods
from fedharmony.models.base import models
from fedharmony.partition.base import splitters
from fedharmony.registry import Registry, load_plugins
from fedharmony.rng import derived_seed, numpy_rng, torch_rng


@dataclass(frozen=True)
class Sample:
    lr: Annotated[float, Ge(0)] = 0.1
    rounds: int = 5
    kind: Literal["a", "b"] = "a"
    groups: Annotated[int, Ge(1)] | None = None
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    flag: bool = False


def test_values_keep_their_types() -> None:
    built = build(Sample, {"lr": 1, "groups": 3, "mean": [0.1, 0.2, 0.3]}, "train")
    assert built == Sample(lr=1.0, groups=3, mean=(0.1, 0.2, 0.3))
    assert isinstance(built.lr, float)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"lrr": 1}, ["train.lrr", "'lr'"]),
        ({"lr": "fast"}, ["train.lr", "'fast'", "number"]),
        ({"lr": -1.0}, ["train.lr", "-1.0", "greater than or equal to 0"]),
        ({"rounds": 2.5}, ["train.rounds", "2.5"]),
        ({"rounds": "5"}, ["train.rounds", "integer"]),
        ({"rounds": True}, ["train.rounds", "integer"]),
        ({"flag": 1}, ["train.flag", "boolean"]),
        ({"kind": "c"}, ["train.kind", "'a' or 'b'"]),
        ({"mean": [0.5]}, ["train.mean"]),
    ],
)
def test_mistakes_are_named(values: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        build(Sample, values, "train")
    for word in words:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("value", "word"),
    [
        (float("inf"), "finite"),
        (float("-inf"), "finite"),
        (float("nan"), "finite"),
        (10**400, "9,007,199,254,740,992"),
    ],
)
def test_numbers_that_no_setting_can_mean(value: float, word: str) -> None:
    """For every field of every dataclass, whatever its own type allows."""
    for values in ({"lr": value}, {"mean": [0.1, value, 0.1]}):
        with pytest.raises(ConfigError, match=word):
            build(Sample, values, "methods.own")
    with pytest.raises(ConfigError, match=r"a number of more than|9,007"):
        build(Sample, {"rounds": 10**5000}, "methods.own")


@pytest.mark.parametrize("value", ["a\0b", "a\udc80b"])
def test_text_that_no_file_can_hold(value: str) -> None:
    @dataclass(frozen=True)
    class Named:
        name: str = ""

    with pytest.raises(ConfigError, match="not UTF-8"):
        build(Named, {"name": value}, "run")


def test_odd_toml_files(tmp_path: Path) -> None:
    file = tmp_path / "a.toml"
    file.write_bytes(b"\xef\xbb\xbf[run]\r\nrounds = 3\r\n")  # as an editor on Windows writes it
    assert read_toml(file) == {"run": {"rounds": 3}}
    for text in ("a = " + "[" * 9000, "a." * 9000 + "b = 1", "[" + "a." * 20 + "b]"):
        file.write_text(text)
        with pytest.raises(ConfigError, match="nested"):
            read_toml(file)
    file.write_text("a = " + "9" * 5000)
    with pytest.raises(ConfigError, match="not valid TOML"):
        read_toml(file)
    file.write_bytes(b"a = '\xff'")
    with pytest.raises(ConfigError, match="UTF-8"):
        read_toml(file)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path)


@pytest.mark.parametrize("special", ["pipe", "/dev/zero"])
def test_only_regular_files_are_read(tmp_path: Path, special: str) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="pipe, socket or device"):
        read_toml(tmp_path / special)


def test_files_of_any_size_are_not_read(tmp_path: Path) -> None:
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)  # a hole: takes no room
    with pytest.raises(ConfigError, match="more than the 16,777,216"):
        read_toml(tmp_path / "large")


def test_an_override_is_one_value() -> None:
    assert parse_override("run.label=1\nother = 2") == (["run", "label"], "1\nother = 2")


def test_a_file_is_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(frozen=True)
    class Place:
        file: FilePath | None = None

    (tmp_path / "here.txt").write_text("x")
    monkeypatch.chdir(tmp_path)
    assert build(Place, {"file": "here.txt"}, "data").file == str(tmp_path / "here.txt")
    assert build(Place, {"file": "timm/a_model"}, "data").file == "timm/a_model"
    assert build(Place, {"file": ""}, "data").file == ""
    assert build(Place, {}, "data").file is None


def test_overrides() -> None:
    tree = override({"train": {"lr": 0.1}}, ["train.lr=1e-3", "run.method=fedavg", "a.b.c=[1, 2]"])
    assert tree == {"train": {"lr": 0.001}, "run": {"method": "fedavg"}, "a": {"b": {"c": [1, 2]}}}
    assert parse_override('x="5"') == (["x"], "5")
    original = {"train": {"lr": 0.1}}
    override(original, ["train.lr=2"])
    assert original == {"train": {"lr": 0.1}}


@pytest.mark.parametrize("text", ["novalue", "=3", "a..b=1"])
def test_malformed_overrides(text: str) -> None:
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        parse_override(text)


def test_override_through_a_value() -> None:
    with pytest.raises(ConfigError, match="not a section"):
        override({"train": 3}, ["train.lr=1"])


def test_toml_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_toml(tmp_path / "none.toml")
    bad = tmp_path / "bad.toml"
    bad.write_text("[run\nrounds = 1")
    with pytest.raises(ConfigError, match=r"bad\.toml is not valid TOML.*line 1"):
        read_toml(bad)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(tmp_path)
    good = tmp_path / "good.toml"
    good.write_text(to_toml({"train": tree_of(Sample(groups=2))}))
    assert build(Sample, read_toml(good)["train"], "train") == Sample(groups=2)


def test_generators_depend_on_every_part_and_on_nothing_else() -> None:
    def draw(*key: object) -> float:
        return float(numpy_rng(*key).random())  # type: ignore[arg-type]

    first = draw(1, "order", 2, 3)
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)
    assert draw(1, "order", 2, 3) == first
    others = [
        draw(2, "order", 2, 3),
        draw(1, "drop", 2, 3),
        draw(1, "order", 3, 3),
        draw(1, "order", 2, 4),
    ]
    assert len({first, *others}) == 5
    drawn = torch.rand(3, generator=torch_rng(1, "model"))
    assert torch.equal(drawn, torch.rand(3, generator=torch_rng(1, "model")))
    assert not torch.equal(drawn, torch.rand(3, generator=torch_rng(2, "model")))
    assert 0 <= derived_seed(0, "clusters", 5) < 2**32
    with pytest.raises(ValueError, match=">= 0"):
        numpy_rng(-1, "order")


def test_registry_refuses_unknown_names_and_double_claims() -> None:
    shapes: Registry[type] = Registry("shape", "fedharmony.data")
    shapes.register("square")(type("A", (), {}))
    with pytest.raises(ConfigError, match="Did you mean 'square'"):
        shapes["squara"]
    with pytest.raises(ConfigError, match="Two classes want to be the shape 'square'"):
        shapes.register("square")(type("B", (), {}))


def test_plugin_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load_plugins([tmp_path / "none.py"])
    bad = tmp_path / "bad.py"
    bad.write_text("import nothing_of_that_name")
    with pytest.raises(ConfigError, match=r"could not be imported: ModuleNotFoundError"):
        load_plugins([bad])


def settings_classes() -> list[type[Any]]:
    """Every dataclass of settings that a config file can fill."""
    kinds = (datasets, splitters, models, methods)
    own = [registry[name].Config for registry in kinds for name in registry.names()]
    common = [choice.common for choice in COMPONENTS.values()]
    return list(dict.fromkeys([*own, *common, *PLAIN.values()]))


def test_settings_refuse_wrong_values_however_they_are_made() -> None:
    """By hand, or changed by ``replace``, as when a file says them: no type takes an object."""
    for cls in settings_classes():
        required = {f.name: "x" for f in fields(cls) if f.default is f.default_factory is MISSING}
        made = cls(**required)
        for name in keys(cls):
            with pytest.raises(ConfigError, match=rf"Setting {cls.__qualname__}.{name} = .* not"):
                cls(**{**required, name: object()})
            with pytest.raises(ConfigError, match="is not allowed"):
                replace(made, **{name: object()})


def test_checked_settings_hold_what_a_file_would_give() -> None:
    """A whole number for a real one, and a list for a tuple; ranges count as in a file."""
    assert TrainSettings(lr=1) == build(TrainSettings, {"lr": 1}, "train")
    assert type(TrainSettings(lr=1).lr) is float
    assert SplitSettings(transforms=["grey"]).transforms == ("grey",)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"TrainSettings.lr = -1 is not allowed: .*greater than"):
        TrainSettings(lr=-1)
    with pytest.raises(ConfigError, match=r"^Setting train.lr = -1 is not allowed: .*greater than"):
        build(TrainSettings, {"lr": -1}, "train")


@pytest.mark.parametrize(
    ("groups", "files", "expected"),
    [
        ("0::/", {"memory.max": "4000000\n"}, 4_000_000),
        ("0::/job/step", {"job/memory.max": "3000000", "job/step/memory.max": "max"}, 3_000_000),
        ("4:memory:/a\n0::/", {"memory/a/memory.limit_in_bytes": "2000000"}, 2_000_000),
        ("4:memory:/hidden", {"memory/memory.limit_in_bytes": "1000000"}, 1_000_000),
        ("3:cpu:/\n0::/", {"memory.max": "max"}, None),
    ],
)
def test_the_memory_of_a_machine_is_what_its_groups_allow(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    groups: str,
    files: dict[str, str],
    expected: int | None,
) -> None:
    """Control groups of versions 2 and 1; a container may not see the path of its own group."""
    monkeypatch.setattr(config, "CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(config, "CGROUPS", tmp_path / "fs")
    whole = config.machine_memory()
    (tmp_path / "cgroup").write_text(groups + "\n")
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    assert config.machine_memory() == (expected or whole)


def test_the_memory_of_a_process_is_bounded_by_ulimit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (5_000_000, resource.RLIM_INFINITY))
    assert config.machine_memory() == 5_000_000
