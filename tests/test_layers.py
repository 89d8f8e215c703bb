"""Settings in layers: who wins, and what goes when a layer chooses another component."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedharmony.errors import ConfigError
from fedharmony.experiments.settings import load_settings


def layer(folder: Path, name: str, text: str) -> str:
    file = folder / name
    file.write_text(text)
    return str(file)


def test_another_model_gets_its_own_sizes(tmp_path: Path) -> None:
    """The demo's width 64 and depth 2 are the demo's, not those of a ViT-Ti."""
    own = load_settings("demo", [layer(tmp_path, "m.toml", '[model]\nname = "vit_tiny_patch16"')])
    assert (own.model.own.width, own.model.own.depth, own.model.own.heads) == (192, 12, 3)
    same = load_settings("demo", ["model.name=vit_tiny_patch16"])
    assert same.model == own.model


def test_what_every_component_shares_stays(tmp_path: Path) -> None:
    base = layer(tmp_path, "base.toml", "[split]\nclients = 7\nseed = 3\ngamma = 0.1\n")
    settings = load_settings(base, ["split.name=iid"])  # the file's is the default, unnamed
    assert (settings.split.common.clients, settings.split.common.seed) == (7, 3)
    assert load_settings(base, ["split.name=pivot_dirichlet"]).split.own.gamma == 0.1


def test_another_data_set_needs_no_clean_up(tmp_path: Path) -> None:
    base = layer(tmp_path, "base.toml", '[data]\nname = "digits"\ntrain = 50\nnoise = 0.2\n')
    changes = ["data.name=table", f"data.path={tmp_path}", "data.table=labels.csv"]
    data: Any = load_settings(base, changes).data.own
    assert (data.path, data.table) == (str(tmp_path), "labels.csv")


@pytest.mark.parametrize("order", [1, -1])
def test_what_the_command_line_says_stays(tmp_path: Path, order: int) -> None:
    """Before or behind the name: all of a command line is one layer."""
    changes = ["model.width=96", "model.name=vit_tiny_patch16"][::order]
    assert load_settings("demo", changes).model.own.width == 96
    file = layer(tmp_path, "m.toml", '[model]\nname = "vit_tiny_patch16"\nwidth = 48')
    assert load_settings("demo", ["model.width=96", file]).model.own.width == 96
    assert load_settings("demo", [file]).model.own.width == 48


def test_what_the_command_line_says_is_not_dropped_in_silence() -> None:
    with pytest.raises(ConfigError, match=r"model\.depth .*'timm'"):
        load_settings("demo", ["model.depth=3", "model.name=timm"])


def test_layers_apply_in_their_order(tmp_path: Path) -> None:
    """A third layer that returns to the first one's model does not bring its settings back."""
    there = layer(tmp_path, "a.toml", '[model]\nname = "vit_tiny_patch16"\npatch = 8')
    back = layer(tmp_path, "b.toml", '[model]\nname = "vit"')
    base = layer(tmp_path, "base.toml", '[model]\nname = "vit"\nwidth = 32')
    settings = load_settings(base, [there, back, "train.lr=0.5"])
    assert settings.model.own == type(settings.model.own)()
    assert settings.train.lr == 0.5


def test_a_layer_says_what_it_makes_void(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "fedharmony")
    load_settings("demo", ["split.name=iid", "data.name=digits"])
    (message,) = caplog.messages
    assert "split.gamma" in message
    assert "'iid'" in message


def test_a_removed_name_is_the_default(tmp_path: Path) -> None:
    base = layer(tmp_path, "base.toml", '[model]\nname = "timm"\narchitecture = "resnet18"\n')
    assert load_settings(base, ["model.name="]).model.common.name == "vit"


@pytest.mark.parametrize("name", ["iid", "pivot_dirichlet"])
@pytest.mark.parametrize("by", ["file", "command line"])
def test_a_named_splitter_is_not_overruled_by_a_file_below(
    name: str, by: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Even the splitter that would be taken by default: whoever names it wants it drawn."""
    caplog.set_level(logging.INFO, "fedharmony")
    base = layer(tmp_path, "base.toml", '[split]\nfile = "old.json"\nclients = 7\n')
    top = f"split.name={name}"
    if by == "file":
        top = layer(tmp_path, "top.toml", f'[split]\nname = "{name}"\n')
    split = load_settings(base, [top]).split.common
    assert (split.name, split.file, split.clients) == (name, None, 7)
    assert "split.file" in caplog.messages[-1]


def test_a_file_counts_where_the_same_layer_or_a_later_one_gives_it(tmp_path: Path) -> None:
    base = layer(tmp_path, "base.toml", '[split]\nname = "iid"\n')
    assert load_settings(base, ["split.file=a.json"]).split.common.file == "a.json"
    both = ["split.name=iid", "split.file=a.json"]
    assert load_settings("demo", both).split.common.file == "a.json"
    below = layer(tmp_path, "below.toml", '[split]\nfile = "old.json"\n')
    assert load_settings(below, both).split.common.file == "a.json"
    assert load_settings(below, ["split.seed=3"]).split.common.file == str(tmp_path / "old.json")


def test_the_demo_gives_way_to_other_components(tmp_path: Path) -> None:
    """`run demo` with another model or data set, as a new user tries it: no key is in the way."""
    net = load_settings("demo", ["model.name=timm", "model.architecture=resnet10t"])
    assert net.model.own.architecture == "resnet10t"
    own = ["data.name=table", f"data.path={tmp_path}", "data.table=labels.csv"]
    assert load_settings("demo", [*own, "split.name=natural"]).data.own.table == "labels.csv"


def test_a_built_in_config_is_meant_whatever_lies_here_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder with the data, as in ``run coco data.path=coco``, or a file; ./demo is that file."""
    monkeypatch.chdir(tmp_path)
    meant = {name: load_settings(name) for name in ("demo", "coco")}
    (tmp_path / "coco").mkdir()
    (tmp_path / "demo").write_text("[run]\nrounds = 7\n")
    for name, settings in meant.items():
        assert load_settings(name) == settings
    assert load_settings("./demo").run.rounds == 7
    assert load_settings("demo", ["coco"]).data.common.name == "coco"


def test_paths_of_a_config_file_are_relative_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        (folder / "data").mkdir(parents=True)
        (folder / "weights.npz").touch()
    there.joinpath("own.py").write_text("LOADED = True")
    (there / "weights.npz").unlink()
    config = there / "shared.toml"
    text = '[run]\nplugins = ["own.py"]\n[data]\nname = "table"\npath = "data"\ntable = "t.csv"\n'
    config.write_text(f'{text}[split]\nname = "iid"\n[model]\nname = "vit"\n')
    monkeypatch.chdir(here)
    settings = load_settings(config)
    assert settings.run.plugins == (str(there / "own.py"),)
    assert settings.data.own == replace(settings.data.own, path=str(there / "data"), table="t.csv")
    # The command line, and arguments in Python, start from the working folder.
    assert load_settings(config, ["data.path=data"]).data.own.path == str(here / "data")
    # A model is a file or a name: neither is looked for in another folder.
    config.write_text(f'{text}[model]\nname = "vit"\nweights = "weights.npz"\n')
    with pytest.raises(ConfigError, match=r"model.weights = 'weights.npz' is relative to its conf"):
        load_settings(config)
    config.write_text(f'{text}[model]\nname = "vit"\nweights = "timm/vit"\n')
    assert load_settings(config).model.own.weights == "timm/vit"
    # One that is not there is named in full.
    config.write_text(text.replace('path = "data"', 'path = "gone"'))
    assert load_settings(config).data.own.path == str(there / "gone")
