"""A method in one file outside the package appears in list, run, compare and the method tests."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fake_run import write_fake_run
from fedharmony.cli_guard import exit_code_of
from fedharmony.config import to_toml
from fedharmony.data.base import datasets
from fedharmony.errors import ConfigError
from fedharmony.experiments.build import assemble
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import compose, load_settings
from fedharmony.methods.base import methods
from fedharmony.partition.base import splitters
from fedharmony.registry import Registry, load_plugins
from fedharmony.report.page import write_report
from fedharmony.report.panel import panels
from fedharmony.robust.base import rules

ROOT = Path(__file__).parents[1]


@pytest.fixture
def plugin(tmp_path: Path) -> Path:
    """The example of CONTRIBUTING.md, exactly as printed there."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    file = tmp_path / "shout.py"
    file.write_text(code)
    return file


def fedharmony(*args: str, cwd: Path) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "fedharmony.cli", *args],
        capture_output=True,
        text=True,
        cwd=cwd,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


SMALL = ["data.train=60", "data.test=30", "split.clients=3", "run.rounds=1", "train.epochs=1"]


def test_listed_run_and_compared(plugin: Path, tmp_path: Path) -> None:
    assert "shout" in fedharmony("list", "methods", "--plugin", str(plugin), cwd=tmp_path)
    options = [*SMALL, "--plugin", str(plugin)]
    fedharmony("run", "demo", "run.method=shout", "--out", "one", *options, cwd=tmp_path)
    assert (tmp_path / "one" / "report.html").exists()
    fedharmony("resume", "one", cwd=tmp_path)  # finds the plugin through the run's own settings
    methods = ["--methods", "fedavg,shout", "--seeds", "0"]
    fedharmony("compare", "demo", *methods, "--out", "both", *options, cwd=tmp_path)
    assert "shout" in (tmp_path / "both" / "table.md").read_text()


def test_passes_the_method_tests(plugin: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider"),
            *("tests/test_methods.py", "-k", "shout", "-rp"),
        ],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "FEDHARMONY_PLUGINS": str(plugin)},
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert "test_resumes_to_the_bit_from_any_round[shout]" in done.stdout


def test_works_inside_the_package(plugin: Path, tmp_path: Path) -> None:
    package = tmp_path / "fedharmony"
    shutil.copytree(ROOT / "src" / "fedharmony", package)
    shutil.copy(plugin, package / "methods")
    for module in ("config_files", "reference"):
        subprocess.run(
            [sys.executable, "-m", f"fedharmony.experiments.{module}", str(tmp_path / "page.md")],
            check=True,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
        )
    assert "# gain = 1.5" in (package / "configs" / "methods" / "shout.toml").read_text()
    assert "| `gain` | number | `1.5` | length of the server" in (tmp_path / "page.md").read_text()


FAULTY = """
from fedharmony.data.base import Source, datasets
from fedharmony.partition.base import Splitter, splitters

@datasets.register("nothing")
class Nothing(Source):
    def load(self):
        return None

@datasets.register("raising")
class Raising(Source):
    def load(self):
        return {}["gone"]

@splitters.register("odd")
class Odd(Splitter):
    def split(self, *values):
        raise ValueError("odd")
"""


@pytest.fixture
def apart(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What a test loads and registers is gone after it."""
    for registry in (datasets, splitters, methods, panels, rules):
        registry.names()
        monkeypatch.setattr(registry, "_items", dict(registry._items))
    yield
    for name in [name for name in sys.modules if name.startswith("fedharmony_plugin_")]:
        del sys.modules[name]


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.name=nothing", "line 7: load of the data set 'nothing' must return a DataSet"),
        ("data.name=raising", "line 13: KeyError: 'gone'. The trace is in"),
        ("split.name=odd", "line 18: ValueError: odd. The trace is in"),
    ],
)
def test_a_fault_names_the_plug_in_and_its_line(
    change: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "faulty.py"
    file.write_text(FAULTY)
    load_plugins([file])
    assert [datasets.summary("nothing"), splitters.summary("odd")] == ["", ""]
    settings = load_settings("demo", ["split.clients=3", change])
    assert exit_code_of(lambda: assemble(settings) and 0, debug=False) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert f"{file}, {said}" in error
    assert "fault of this program" not in error


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    def laod(self): ...", "The dataset 'mine' lacks load."),
        (
            "    class Config(Source.Config):\n        path: str = ''\n    def load(self): ...",
            "The Config of the dataset 'mine' needs @dataclass",
        ),
    ],
)
def test_a_component_that_cannot_work_is_not_registered(
    body: str, said: str, tmp_path: Path
) -> None:
    file, head = tmp_path / "mine.py", "from fedharmony.data.base import Source, datasets\n"
    file.write_text(f"{head}@datasets.register('mine')\nclass Mine(Source):\n{body}\n")
    with pytest.raises(ConfigError, match=f"{re.escape(str(file))}, line 2 .*{said}"):
        load_plugins([file])


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("opened", ["its settings", "its folder"])
def test_a_run_with_a_rule_of_a_plug_in_opens_anywhere(opened: str, tmp_path: Path) -> None:
    tree = load_settings("demo").tree()
    tree["run"]["plugins"], tree["federation"]["robust"] = [str(tmp_path / "mine.py")], "mine"
    code = "from fedharmony.robust.base import Rule, rules\n@rules.register('mine')\nclass M(Rule):"
    (tmp_path / "mine.py").write_text(f"{code} ...\n")
    (tmp_path / "config.toml").write_text(to_toml(tree))
    settings = compose(tree) if opened == "its settings" else RunFolder(tmp_path).open()
    assert settings.federation.robust == "mine"


@pytest.mark.usefixtures("apart")
def test_plug_ins_of_like_names_are_both_loaded(tmp_path: Path) -> None:
    files = [tmp_path / "my-x.py", tmp_path / "my_x.py"]
    for file in files:
        name = file.stem
        code = (
            f"from fedharmony.methods.base import *\n@methods.register('{name}')\nclass X(Method):"
        )
        file.write_text(f"{code} ...\n")
    load_plugins(files)
    assert {"my-x", "my_x"} < set(methods.names())


def test_a_failing_plug_in_of_the_environment_fails_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bad.py"
    file.write_text("1 / 0")
    monkeypatch.setenv("FEDHARMONY_PLUGINS", str(file))
    registry: Registry[type] = Registry("shape", "fedharmony.partition")
    for _ in range(2):
        with pytest.raises(ConfigError, match="line 1 could not be imported: ZeroDivisionError"):
            registry.names()


@pytest.mark.usefixtures("apart")
@pytest.mark.parametrize("drawn", ["1 / 0", "return 'text'"])
def test_a_panel_that_raises_costs_its_own_place(
    drawn: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_fake_run(tmp_path / "run")
    whole = write_report(tmp_path / "run").read_text()
    code = "from fedharmony.report.panel import Panel, panels\n@panels.register('odd')\n"
    (tmp_path / "odd.py").write_text(
        f"{code}class Odd(Panel):\n    place = 3\n    def draw(self, runs):\n        {drawn}\n"
    )
    load_plugins([tmp_path / "odd.py"])
    page = write_report(tmp_path / "run").read_text()
    place = re.search(r'<section id="odd">.*?</section>\n', page, flags=re.DOTALL)
    assert place is not None
    assert "cannot be drawn: " in place[0]
    link = '<a href="#odd">Odd</a>\n'
    assert page.replace(place[0], "").replace(link, "") == whole
    (record,) = [r for r in caplog.records if "cannot be drawn" in r.message]
    assert record.exc_info is not None
    assert (f"{tmp_path / 'odd.py'}, line 6" in record.message) == (drawn == "1 / 0")
