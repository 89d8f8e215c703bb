"""Every setting is found, described, and shown with the place that its value comes from."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fedharmony.cli import main
from fedharmony.cli_options import complete_config, complete_methods
from fedharmony.cli_settings import print_plan
from fedharmony.config import keys
from fedharmony.errors import FedHarmonyError
from fedharmony.experiments import compare, dry_run
from fedharmony.experiments.crowd import ALONE, Crowd
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.origins import show
from fedharmony.experiments.reference import all_settings, matching, page
from fedharmony.experiments.run import start
from fedharmony.experiments.settings import COMPONENTS, PLAIN, compose, layers_of, load_settings
from fedharmony.experiments.tune import Search
from fedharmony.methods.base import methods

DOCS = Path(__file__).parents[1] / "docs"
SMALL = [
    *("data.train=60", "data.test=20", "split.clients=3", "run.rounds=1"),
    *("train.epochs=1", "engine.threads=1", "model.width=16", "model.depth=1", "model.heads=2"),
]


def call(*args: str) -> tuple[int, str, str]:
    """The program in this process: exit code, output, errors."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = mock.patch.object(sys, "argv", ["fedharmony", *args])
    with argv, contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


# -- the reference ---------------------------------------------------------------------------------


def test_the_page_is_up_to_date() -> None:
    found = (DOCS / "settings.md").read_text(encoding="utf-8")
    assert found == page(), "python -m fedharmony.experiments.reference docs/settings.md"


def test_every_setting_is_listed_and_described() -> None:
    listed = {(setting.name, setting.owner) for setting in all_settings()}
    for section, cls in PLAIN.items():
        assert {(f"{section}.{key}", "") for key in keys(cls)} <= listed
    for section, choice in COMPONENTS.items():
        for name in choice.names():
            assert {(f"{section}.{key}", name) for key in keys(choice.own(name))} <= listed
    for name in methods.names():
        assert {(f"methods.{name}.{k}", name) for k in keys(methods[name].Config)} <= listed
    text = page()
    ours = [s for s in all_settings() if f"`{s.name.rpartition('.')[2]}`" in text]
    assert [s.name for s in ours if not s.about] == []


def test_settings_are_found_by_name_owner_and_words() -> None:
    assert "split.gamma" in {setting.name for setting in matching("pivot_dirichlet")}
    assert "train.lr" in {setting.name for setting in matching("Learning")}
    assert matching("no such setting") == []
    code, out, _ = call("list", "settings", "participation")
    assert code == 0
    assert "federation.participation" in out
    assert "train.lr" not in out


# -- where values come from ------------------------------------------------------------------------


def origins(*changes: str) -> dict[str, str]:
    """The origin of every value, by its dotted name."""
    found, section = {}, ""
    for line, origin in show(layers_of("demo", changes)):
        if line.startswith("["):
            section = line.strip("[]")
        elif line and not line.startswith("#"):
            found[f"{section}.{line.partition(' = ')[0]}"] = origin
    return found


def test_each_value_says_where_it_comes_from(tmp_path: Path) -> None:
    """Default, built-in file, file of one's own, preset and command line, each beating the last."""
    mine = tmp_path / "mine.toml"
    mine.write_text("[run]\nrounds = 3\nseed = 5\n")
    found = origins(
        str(mine), "run.method=fedharmony:a", "run.seed=6", "methods.fedharmony.blocks=true"
    )
    assert found["run.eval_every"] == "default"
    assert found["train.epochs"] == "demo"
    assert found["run.rounds"] == str(mine)
    assert found["run.seed"] == "the command line"
    assert found["methods.fedharmony.quality"] == "preset a"
    assert found["methods.fedharmony.blocks"] == "the command line"


def test_what_is_shown_is_the_same_config(tmp_path: Path) -> None:
    changes = ["methods/fedprox", "split.name=iid", "train.lr=0.5", "model.patch="]
    code, out, err = call("show", "demo", *changes)
    assert code == 0, err
    assert compose(tomllib.loads(out)).tree() == load_settings("demo", changes).tree()
    assert "# label = (left out)" in out


def test_a_removed_setting_has_its_default_again() -> None:
    assert origins("train.lr=")["train.lr"] == "default"
    found = origins("split.name=iid")
    assert "split.gamma" not in found
    assert found["split.clients"] == "demo"


# -- plans -----------------------------------------------------------------------------------------


def plan_is_empty_handed(folder: Path, *args: str) -> str:
    """What ``--dry-run`` prints; it leaves nothing behind."""
    code, out, err = call(*args, *SMALL, "--dry-run", "--out", str(folder))
    assert code == 0, err
    assert not folder.exists()
    return out


def test_a_plan_of_a_sweep(tmp_path: Path) -> None:
    """Two values of γ split the images in two ways; data and model are the same for both."""
    swept = ("sweep", "demo", "split.gamma=0.1,9", "--methods", "fedavg", "--seeds", "0,1")
    plugin = tmp_path / "shout.py"
    plugin.write_text("print('Shout is here.')")
    out = plan_is_empty_handed(tmp_path / "out", *swept, "--plugin", str(plugin))
    assert "Shout is here." in out
    rows = [line.split() for line in out.splitlines() if line.startswith("split.gamma")]
    assert [row[:5] for row in rows] == [
        ["split.gamma=0.1", "fedavg", "2", "0", "1"],
        ["split.gamma=9", "fedavg", "2", "0", "1"],
    ]
    assert "one for each point" in next(line for line in out.splitlines() if "split " in line)
    assert "4 to be trained" in out


def test_a_plan_of_a_run(tmp_path: Path) -> None:
    out = plan_is_empty_handed(tmp_path / "run", "run", "demo")
    assert "60 images of 32 × 32 pixels for training, 20 for the test" in " ".join(out.split())
    assert "3 clients" in out
    assert "1 to be trained" in out


def test_a_plan_counts_what_is_finished(tmp_path: Path) -> None:
    settings = load_settings("demo", [*SMALL, "run.seed=1"])
    folder = tmp_path / "comparison"
    done = compare.plan(settings, ["fedavg"], [1], folder)[0]
    start(done.settings, done.folder, lambda event: None)
    planned = compare.plan(settings, ["fedavg", "fedprox"], [0, 1], folder)
    found = dry_run.plan_of_runs(folder, planned)
    assert [(g.label, g.runs, g.done) for g in found.groups] == [
        ("fedavg", 2, 1),
        ("fedprox", 2, 0),
    ]
    assert all(g.seconds is not None and g.seconds > 0 for g in found.groups)


def test_a_plan_of_several_runs_at_once_says_what_that_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three runs of a minute: two at once take 90 s, and more than three are never at work."""
    settings = load_settings("demo", [*SMALL, "engine.threads=1"])
    names, found = ["fedavg", "fedprox"], {}
    for crowd in (ALONE, Crowd(2)):
        planned = compare.plan(settings, names, [0], tmp_path / "c", crowd)
        found[crowd] = dry_run.plan_of_runs(tmp_path / "c", planned, crowd)
    assert "at once" not in found[ALONE].facts
    assert found[Crowd(2)].facts["at once"].startswith("2 runs, each in a process with 1 CPU")
    group = dry_run.Group("fedavg", 3, 0, 1, 1, 180.0)
    for at_once, said in ((1, "3 min 0 s"), (2, "1 min 30 s"), (8, "1 min 0 s")):
        print_plan(dry_run.Plan(tmp_path, {}, (group,), (), at_once))
        assert f"3 to be trained, about {said} in all" in " ".join(capsys.readouterr().out.split())
    complaint = call("compare", "demo", *SMALL, "--dry-run", "--against", "fedavgg")[2]
    assert "--against fedavgg: no method of the comparison has this name" in complaint


def test_a_plan_of_a_search_counts_as_many_runs_as_there_will_be(tmp_path: Path) -> None:
    """FedProx tries three rates and five values of μ, one of which is its default."""
    out = plan_is_empty_handed(tmp_path / "search", "tune", "demo", "--methods", "fedprox")
    assert "held out" in out
    assert "7 to be trained" in out
    settings = load_settings("demo", [*SMALL, "methods.fedprox.mu=0.5"])
    assert Search(settings, ["fedprox"], tmp_path).size == 8


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ("split.clients=61", "61"),
        ("model.patch=7", "patch"),
        ("model.weights=/nowhere.safetensors", "nowhere"),
        ("train.lrr=1", "Did you mean 'lr'"),
    ],
)
def test_a_plan_refuses_what_a_run_would(tmp_path: Path, change: str, complaint: str) -> None:
    code, out, err = call("run", "demo", *SMALL, change, "--dry-run", "--out", str(tmp_path / "x"))
    assert code == 2, out
    assert complaint in err
    assert not (tmp_path / "x").exists()


def test_a_plan_decodes_no_image_and_misses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that are no images will do for a plan, but each must be there."""
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))
    rows = [f"{i}.png,{'ab'[i % 2]}" for i in range(20)]
    (tmp_path / "labels.csv").write_text("\n".join(["image,labels", *rows]))
    for i in range(20):
        (tmp_path / f"{i}.png").write_text("not read")
    changes = ["data.name=table", f"data.path={tmp_path}", "data.image_size=32", "split.clients=2"]
    args = ("run", "demo", *changes, "--dry-run", "--out", str(tmp_path / "run"))
    code, out, err = call(*args)
    assert code == 0, err
    assert "16 images of 32 × 32 pixels for training, 4 for the test" in " ".join(out.split())
    (tmp_path / "7.png").unlink()
    code, _, err = call(*args)
    assert code == 2
    assert "7.png" in err
    assert not (tmp_path / "cache").exists()
    assert not (tmp_path / "run").exists()


def test_weights_are_read_where_nothing_is_timed(tmp_path: Path) -> None:
    """On a GPU the time of a step is not known beforehand."""
    settings = load_settings("demo", [*SMALL, "model.weights=/nowhere.safetensors"])
    untimed = mock.patch.object(dry_run, "seconds_each", side_effect=AssertionError)
    with untimed, pytest.raises(FedHarmonyError, match="nowhere"):
        dry_run.plan_of_runs(tmp_path, [compare.Planned(settings, RunFolder(tmp_path))])


def test_a_plan_refuses_a_folder_that_is_taken(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, _, err = call("run", "demo", *SMALL, "--dry-run", "--out", str(tmp_path))
    assert code == 2
    assert "not an empty folder" in err


def test_a_method_says_what_its_name_means(tmp_path: Path) -> None:
    out = plan_is_empty_handed(tmp_path / "run", "compare", "demo", "--methods", "fedlgt")
    assert "random vectors" in out
    assert "fedlgt-randtext" in out


# -- completion ------------------------------------------------------------------------------------


def test_names_are_completed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "demonstration.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert complete_config("dem") == ["demo", "demonstration.toml"]
    assert complete_methods("fedavg,fedp") == ["fedavg,fedprox"]
    assert {name for name in complete_methods("") if name not in ("all", "central")} == {
        name
        for name in methods.names()
        if methods[name].__module__.startswith("fedharmony.methods")
    }


def completions(words: str) -> str:
    environment: dict[str, Any] = {
        **os.environ,
        "_FEDHARMONY_COMPLETE": "complete_bash",
        "COMP_WORDS": words,
        "COMP_CWORD": str(len(words.split(" ")) - 1),
    }
    script = "import sys; sys.argv[0] = 'fedharmony'; from fedharmony.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-c", script],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=60,
    )
    assert "torch" not in {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    return done.stdout


def test_the_shell_gets_its_completions_without_torch() -> None:
    """Bash itself takes ``run.method=fedh`` for three words."""
    assert completions("fedharmony run demo methods/fedp").split() == ["methods/fedprox"]
    assert completions("fedharmony run demo run.method = fedh").split() == ["fedharmony"]
    assert completions("fedharmony run demo run.method=fedh").split() == ["run.method=fedharmony"]
    assert completions("fedharmony run dem").split() == ["demo"]
    assert completions("fedharmony compare demo --methods fedc").split() == ["fedcurv"]
