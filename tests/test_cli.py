"""The program as a user meets it: whole runs, kills, resumes, and every kind of bad input."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import logging
import os
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

import fedharmony
from fedharmony.cli import app, main
from fedharmony.experiments.settings import load_settings

#: A run of a few seconds with the demo's model and data.
SMALL = [
    *("data.train=120", "data.test=40", "split.clients=4", "run.rounds=3"),
    *("train.epochs=1", "engine.threads=1", "model.width=16", "model.depth=1", "model.heads=2"),
]


def command(*args: str) -> list[str]:
    return [sys.executable, "-m", "fedharmony.cli", *args]


def invoke(cwd: Path, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*args), capture_output=True, text=True, cwd=cwd, check=False, timeout=300
    )


def call(cwd: Path, *args: str) -> tuple[int, str, str]:
    """The program in this process (a new one needs seconds to import torch): code, out, err."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    argv = mock.patch.object(sys, "argv", ["fedharmony", *args])
    streams = contextlib.redirect_stdout(out), contextlib.redirect_stderr(err)
    with argv, streams[0], streams[1], contextlib.chdir(cwd):
        try:
            main()
        except SystemExit as ended:
            code = int(ended.code or 0)
    return code, out.getvalue(), err.getvalue()


def succeed(cwd: Path, *args: str) -> str:
    code, out, err = call(cwd, *args)
    assert code == 0, out + err
    return out


def refuse(cwd: Path, *args: str) -> str:
    """Exit code 2, one paragraph on standard error, nothing on standard output."""
    code, out, err = call(cwd, *args)
    assert code == 2, out + err
    assert err.startswith("Error: ")
    assert err.count("\n") == 1
    assert out == ""
    return err


def results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


def events(folder: Path, kind: str) -> list[Any]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [e for e in map(json.loads, lines) if e["event"] == kind]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished FedHarmony run."""
    folder = tmp_path_factory.mktemp("finished")
    succeed(folder, "run", "demo", *SMALL, "--out", "run", "--quiet")
    return folder / "run"


# -- whole runs -----------------------------------------------------------------------------------


def test_a_run_folder_is_complete(finished: Path) -> None:
    names = {path.name for path in finished.iterdir()}
    assert names == {
        "config.toml",
        "environment.json",
        "binding.json",
        "partition.json",
        "split_report.json",
        "events.jsonl",
        "checkpoint.safetensors",
        "results.json",
        "matrices.safetensors",
        "scores.safetensors",
        "examples.safetensors",
        "model.json",
        "report.html",
    }
    found = results(finished)
    assert found["status"] == "completed"
    assert set(found["metrics"]) == {"mAP", "O-mAP", "CP", "CR", "CF1", "OP", "OR", "OF1"}
    assert "prevalence" in found["baselines"]
    assert [e["round"] for e in events(finished, "round")] == [0, 1, 2]
    environment = json.loads((finished / "environment.json").read_text())
    assert environment["fedharmony"] == fedharmony.__version__


def test_a_mistake_in_a_real_process(tmp_path: Path) -> None:
    done = invoke(tmp_path, "run", "demo", "train.lrr=1")
    assert done.returncode == 2
    assert done.stderr == "Error: Unknown setting train.lrr. Did you mean 'lr'? Valid: " + (
        "batch_size, epochs, lr, momentum, optimiser, schedule, weight_decay.\n"
    )
    assert done.stdout == ""


def test_the_written_settings_repeat_the_run(finished: Path, tmp_path: Path) -> None:
    """config.toml alone gives the same bits again."""
    succeed(tmp_path, "run", str(finished / "config.toml"), "--out", "again", "--quiet")
    assert results(tmp_path / "again")["state_sha256"] == results(finished)["state_sha256"]


def test_seeds_are_separate(finished: Path, tmp_path: Path) -> None:
    config = str(finished / "config.toml")
    for key in ("run.seed=1", "model.seed=1", "split.seed=1"):
        succeed(tmp_path, "run", config, key, "--out", key, "--quiet")
    first = results(finished)
    changed = {
        key: results(tmp_path / key) for key in ("run.seed=1", "model.seed=1", "split.seed=1")
    }
    assert len({first["state_sha256"], *(c["state_sha256"] for c in changed.values())}) == 4
    split = first["partition_sha256"]
    assert changed["run.seed=1"]["partition_sha256"] == split
    assert changed["model.seed=1"]["partition_sha256"] == split
    assert changed["split.seed=1"]["partition_sha256"] != split


@pytest.mark.parametrize("rounds_before_kill", [0, 1, 2])
def test_kill_and_resume_gives_the_same_bits(
    finished: Path, tmp_path: Path, rounds_before_kill: int
) -> None:
    """``kill -9`` as soon as the given number of rounds is on the disk."""
    config, folder = str(finished / "config.toml"), tmp_path / "run"
    process = subprocess.Popen(
        command("run", config, "--out", str(folder), "--quiet"),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = time.monotonic() + 120
    log = folder / "events.jsonl"
    while time.monotonic() < deadline and process.poll() is None:
        if log.exists() and log.read_text().count('"round", "round"') >= rounds_before_kill:
            break
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (folder / "report.html").exists(), "the run ended before it could be killed"
    succeed(tmp_path, "resume", str(folder), "--quiet")
    assert results(folder)["state_sha256"] == results(finished)["state_sha256"]
    assert [e["round"] for e in events(folder, "round")] == [0, 1, 2]
    assert [e["round"] for e in events(folder, "evaluate")] == [0, 1, 2]


def test_interrupt_says_how_to_go_on(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "run"
    process = subprocess.Popen(
        command("run", str(finished / "config.toml"), "run.rounds=500", "--out", str(folder)),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    log = folder / "events.jsonl"
    while process.poll() is None and not (log.exists() and '"evaluate"' in log.read_text()):
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 130
    assert f"fedharmony resume {folder}" in stderr
    assert "Traceback" not in stderr
    assert events(folder, "finish")[-1]["status"] == "interrupted"
    assert (folder / "checkpoint.safetensors").exists()


def test_resuming_a_finished_run_changes_nothing(finished: Path) -> None:
    before = {p.name: p.read_bytes() for p in finished.iterdir() if p.name != "report.html"}
    code, _, err = call(finished, "resume", str(finished))
    assert code == 0
    assert "already complete" in err
    assert {p.name: p.read_bytes() for p in finished.iterdir() if p.name != "report.html"} == before


def test_plain_progress_when_piped(tmp_path: Path) -> None:
    out = succeed(tmp_path, "run", "demo", *SMALL, "run.rounds=2", "run.method=fedavg")
    assert "points (ECE)." in out
    assert "\x1b[" not in out
    assert "mAP" in out
    assert (tmp_path / "runs" / "demo-fedavg-seed0" / "report.html").exists()
    quiet = succeed(tmp_path, "run", "demo", *SMALL, "run.rounds=2", "--out", "q", "--quiet")
    assert "(ECE)" not in quiet
    assert len(quiet.splitlines()) < len(out.splitlines())
    assert logging.getLogger("fedharmony").level == logging.WARNING  # notes are left out, too


def test_compare(tmp_path: Path) -> None:
    options = ["compare", "demo", *SMALL, "run.rounds=1", "--out", "c", "--quiet", "--methods"]
    succeed(tmp_path, *options, "fedavg,fedharmony:a", "--seeds", "0,1")
    folder = tmp_path / "c"
    index = json.loads((folder / "comparison.json").read_text())
    assert index["methods"] == ["fedavg", "fedharmony:a"]
    assert [run["seed"] for run in index["runs"]] == [0, 1, 0, 1]
    for name in ("table.md", "table.csv", "table.tex", "report.html"):
        assert (folder / name).stat().st_size > 0
    with (folder / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    values = {
        (r["method"], r["seed"]): float(r["mAP"]) for r in rows if r["method"].startswith("fed")
    }
    for run in index["runs"]:
        stored = results(folder / run["folder"])["metrics"]["mAP"]
        assert values[run["label"], str(run["seed"])] == pytest.approx(stored)
    # Same data, split and cohorts for all methods.
    both = [folder / "fedavg" / "seed-1", folder / "fedharmony-a" / "seed-1"]
    assert len({results(f)["partition_sha256"] for f in both}) == 1
    assert events(both[0], "round")[0]["cohort"] == events(both[1], "round")[0]["cohort"]
    # Finished runs are skipped, new seeds are added.
    stamp = (both[0] / "results.json").stat().st_mtime_ns
    succeed(tmp_path, *options, "fedavg,fedharmony:a", "--seeds", "0,1,2")
    assert (both[0] / "results.json").stat().st_mtime_ns == stamp
    assert (folder / "fedavg" / "seed-2" / "results.json").exists()
    # Another configuration is not mixed in.
    error = refuse(tmp_path, *options, "fedavg", "--seeds", "0", "train.lr=0.5")
    assert "other settings" in error


def test_report_and_list(finished: Path, tmp_path: Path) -> None:
    page = tmp_path / "both.html"
    succeed(tmp_path, "report", str(finished), "--out", str(page))
    assert "<html" in page.read_text()
    for kind, word in [
        ("methods", "fedharmony"),
        ("datasets", "digits"),
        ("splitters", "pivot_dirichlet"),
        ("models", "vit"),
        ("configs", "demo"),
    ]:
        assert word in succeed(tmp_path, "list", kind)


def test_help_teaches(tmp_path: Path) -> None:
    assert "fedharmony demo" in succeed(tmp_path, "--help")
    assert succeed(tmp_path, "--version").strip() == f"fedharmony {fedharmony.__version__}"


def commands(app: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """The words and the function of every command."""
    for info in app.registered_commands:
        yield (*words, info.name or info.callback.__name__), info.callback
    for group in app.registered_groups:
        yield from commands(group.typer_instance, (*words, group.typer_instance.info.name))


@pytest.mark.parametrize("command", list(commands(app)), ids=lambda pair: " ".join(pair[0]))
def test_help_has_the_text_of_every_argument_and_option(
    command: tuple[tuple[str, ...], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Typer < 0.26 with click 8.5 loses the texts of all positional arguments."""
    monkeypatch.setenv("COLUMNS", "400")
    page = " ".join(succeed(tmp_path, *command[0], "--help").split())
    assert "<bool>" not in page  # a flag takes no value
    for hint in typing.get_type_hints(command[1], include_extras=True).values():
        for info in getattr(hint, "__metadata__", ()):
            assert info.help
            assert " ".join(info.help.replace("`", "").split()) in page


# -- bad input ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.lrr=1"], ["train.lrr", "Did you mean 'lr'"]),
        (["tain.lr=1"], ["[tain]", "Did you mean 'train'"]),
        (["data.colour=1"], ["data.colour", "'digits'"]),
        (["train.lr=fast"], ["train.lr = 'fast'", "number"]),
        (["run.rounds=0"], ["run.rounds = 0", "greater than or equal to 1"]),
        (["run.method=fedavgg"], ["no method 'fedavgg'", "Did you mean 'fedavg'"]),
        (["run.method=fedharmony:papr"], ["no preset 'papr'", "paper_literal"]),
        (["data.name=digit"], ["no dataset 'digit'", "Did you mean 'digits'"]),
        (["split.name=dirichlet"], ["no splitter 'dirichlet'", "pivot_dirichlet"]),
        (["model.name=vitt"], ["no model 'vitt'", "Did you mean 'vit'"]),
        (["split.clients=0"], ["split.clients = 0", "greater than or equal to 1"]),
        (["split.clients=500"], ["500", "120"]),
        (["federation.participation=0"], ["participation = 0", "greater than 0"]),
        (["federation.participation=1.5"], ["participation = 1.5", "less than or equal to 1"]),
        (["federation.cohort=9"], ["cohort = 9", "4 clients"]),
        (
            ["methods.fedharmony.align_weight=-1"],
            ["align_weight = -1", "greater than or equal to 0"],
        ),
        (["methods.fedharmony.groups=21"], ["groups = 21", "20 labels"]),
        (["methods.fedharmony.grups=2"], ["methods.fedharmony.grups", "Did you mean 'groups'"]),
        (["methods.fedharmonny.groups=2"], ["methods.fedharmonny", "Did you mean 'fedharmony'"]),
        (["model.heads=3"], ["width", "heads"]),
        (["model.patch=7"], ["32", "7"]),
        (["engine.device=tpu9"], ["tpu9"]),
        (["split.file=none.json"], ["none.json"]),
        (["rounds"], ["section.key=value"]),
        (["engine.device=mps"], ["'mps'", "'cpu' and 'cuda' only"]),
        (["engine.device=meta"], ["'meta'", "'cpu' and 'cuda' only"]),
        (["engine.device=cpu:7"], ["'cpu:7'", "cpu:0"]),
        (["engine.threads=100000000000"], ["engine.threads", "less than or equal to"]),
        (["methods.fedavg=3"], ["methods.fedavg = 3", "section", "run.method=fedavg"]),
        (["data.train=99999999999999"], ["data.train", "less than or equal to"]),
        (["run.rounds=1000000000000"], ["run.rounds", "less than or equal to"]),
        (["model.width=100000000"], ["model.width", "less than or equal to"]),
        (["model.width=65536"], ["parameters needs", "this machine has"]),
        (["model.depth=1000000"], ["model.depth", "less than or equal to"]),
        (["methods.fedlgt.layers=100000000"], ["layers", "less than or equal to"]),
        (
            ["run.method=fedlgt", "methods.fedlgt.feedforward=100000000000"],
            ["parameters needs", "this machine has"],
        ),
        (["data.imbalance=inf"], ["data.imbalance", "finite"]),
        (["methods.fedprox.mu=inf"], ["methods.fedprox.mu", "finite"]),
        (["methods.fedprox.mu=nan"], ["methods.fedprox.mu", "finite"]),
        (["model.mean=[0.5, 0.5, -inf]"], ["model.mean", "finite"]),
        (["tune.fedprox.mu=[0.1, inf]"], ["tune.fedprox.mu", "finite"]),
        (["methods.fedprox.train.lr=inf"], ["train.lr", "finite"]),
        (["run.label=a\x1b[31m"], ["run.label", "control characters"]),
        (["run.label=a\udcff"], ["run.label", "not UTF-8"]),
        (["lr=0.01"], ["lr needs its section", "train.lr"]),
        (["path=x"], ["data.path"]),
        (["foo=1"], ["no setting foo", "train"]),
        (["train.lr=" + "[" * 5000], ["train.lr", "valid number"]),
        (["train.lr=" + "9" * 5000], ["train.lr", "valid number"]),
        (["a." * 5000 + "b=1"], ["more than 8 deep"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else None,
)
def test_bad_settings(tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    error = refuse(tmp_path, "run", "demo", *SMALL, *overrides, "--out", "run")
    for word in words:
        assert word in error
    assert list(tmp_path.iterdir()) == []


def test_bad_files(tmp_path: Path) -> None:
    assert "none.toml does not exist" in refuse(tmp_path, "run", "none.toml")
    assert "Did you mean 'demo'?" in refuse(tmp_path, "run", "dmo")
    assert "neither a file" in refuse(tmp_path, "run", "x" * 5000)
    assert "holds no run" in refuse(tmp_path, "resume", "nowhere")
    assert "nowhere" in refuse(tmp_path, "report", "nowhere")
    assert "--seeds" in refuse(tmp_path, "compare", "demo", "--seeds", "a,b")
    assert "does not exist" in refuse(tmp_path, "run", "demo", "--plugin", "none.py")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_another_run_is_left_alone(finished: Path) -> None:
    before = {p.name: p.read_bytes() for p in finished.iterdir()}
    error = refuse(finished, "run", "demo", *SMALL, "train.lr=0.5", "--out", str(finished))
    assert "holds a run with other settings" in error
    assert "--out" in error
    assert {p.name: p.read_bytes() for p in finished.iterdir()} == before


@pytest.mark.parametrize("name", ["run", "compare", "sweep", "tune"])
def test_the_same_command_again(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Finished already: the same table. Other settings: the next free folder, in one line."""
    own = {"run": ["run.method=fedavg"], "tune": ["--methods", "fedavg"]}
    words = [name, "demo", *SMALL, "run.rounds=1", *own.get(name, ["--seeds", "0"])]
    words += ["split.gamma=0.5,1"] if name == "sweep" else []
    first, again = succeed(tmp_path, *words), succeed(tmp_path, *words)
    (usual,) = (tmp_path / "runs").iterdir()
    files = {path: path.read_bytes() for path in usual.rglob("*") if path.is_file()}
    assert again.splitlines()[-3:] == first.splitlines()[-3:]
    assert "occupied" not in caplog.text
    succeed(tmp_path, *words, "train.weight_decay=0.5")
    line = f"runs/{usual.name} is occupied by other settings or data: using runs/{usual.name}-2."
    assert caplog.messages.count(line) == 1
    assert sorted(p.name for p in usual.parent.iterdir()) == [usual.name, f"{usual.name}-2"]
    assert files == {path: path.read_bytes() for path in usual.rglob("*") if path.is_file()}


def test_the_demo_compares_like_with_like(tmp_path: Path) -> None:
    """Each method by itself, and each with ``plus``; what that is stands beside the numbers."""
    with mock.patch("fedharmony.cli_run.compare") as compare:
        succeed(tmp_path, "demo")
    assert compare.call_args.args[2] == "fedavg,fedharmony,fedavg:plus,fedharmony:plus"
    assert "a head solved in closed form" in succeed(tmp_path, "demo", "--help")
    words = ["--methods", "fedavg:plus", "--seeds", "0", "--out", "out"]
    said = succeed(tmp_path, "compare", "demo", *SMALL, "run.rounds=1", *words)
    for text in (said, (tmp_path / "out" / "report.html").read_text()):
        assert "plus: starts from a head in closed form" in " ".join(text.split())


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert "not an empty folder" in refuse(tmp_path, "run", "demo", *SMALL, "--out", ".")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]


def unfinished(finished: Path, tmp_path: Path) -> Path:
    """A copy of the run without its results."""
    folder = tmp_path / "copy"
    folder.mkdir()
    for path in finished.iterdir():
        if path.name != "results.json":
            (folder / path.name).write_bytes(path.read_bytes())
    return folder


def test_damaged_checkpoints(finished: Path, tmp_path: Path) -> None:
    folder = unfinished(finished, tmp_path)
    checkpoint = folder / "checkpoint.safetensors"
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: len(whole) // 2])
    assert "is damaged" in refuse(tmp_path, "resume", str(folder))
    flipped = bytearray(whole)
    flipped[-5] ^= 4
    checkpoint.write_bytes(flipped)
    assert "checksum" in refuse(tmp_path, "resume", str(folder))


def test_changed_settings_do_not_resume(finished: Path, tmp_path: Path) -> None:
    folder = unfinished(finished, tmp_path)
    config = folder / "config.toml"
    config.write_text(config.read_text().replace("lr = 0.001", "lr = 0.002"))
    assert load_settings(config).train.lr == 0.002
    assert "other settings" in refuse(tmp_path, "resume", str(folder))


def test_changed_partition_does_not_resume(finished: Path, tmp_path: Path) -> None:
    folder = unfinished(finished, tmp_path)
    partition = folder / "partition.json"
    content = json.loads(partition.read_text())
    first, second = content["indices"][:2]
    first[0], second[0] = second[0], first[0]  # still a valid division, but another one
    first.sort()
    second.sort()
    partition.write_text(json.dumps(content))
    error = refuse(tmp_path, "resume", str(folder))
    assert "partition.json" in error
    assert "SHA-256" in error


def test_a_partition_file_can_be_shared(finished: Path, tmp_path: Path) -> None:
    file = f"split.file={finished / 'partition.json'}"
    succeed(tmp_path, "run", "demo", *SMALL, file, "split.seed=9", "--out", "run", "--quiet")
    assert results(tmp_path / "run")["partition_sha256"] == results(finished)["partition_sha256"]
    error = refuse(tmp_path, "run", "demo", *SMALL, file, "split.clients=3", "--out", "other")
    assert "4 clients" in error


def test_unwritable_output(tmp_path: Path) -> None:
    if os.geteuid() == 0:
        place = Path("/proc/fedharmony")  # refuses even the superuser
    else:
        tmp_path.chmod(0o500)
        place = tmp_path / "run"
    error = refuse(Path.cwd(), "run", "demo", *SMALL, "--out", str(place))
    assert "Cannot create the folder" in error
    assert "--out" in error


FULL_DISK = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))
sys.argv = ["fedharmony", *sys.argv[1:]]
from fedharmony.cli import main
main()
"""


def test_full_disk_while_saving(finished: Path, tmp_path: Path) -> None:
    """The file-size limit lets everything through but the checkpoint of a finished round.

    FedHarmony's checkpoint grows by its table of matrices after round 0; a limit between the two
    sizes makes exactly that write fail. The checkpoint before it survives, and resume completes.
    """
    folder = tmp_path / "run"
    config = str(finished / "config.toml")
    final = (finished / "checkpoint.safetensors").stat().st_size
    script = FULL_DISK.format(limit=final - 500)
    done = subprocess.run(
        [sys.executable, "-c", script, "run", config, "--out", str(folder), "--quiet"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert "Could not write" in done.stderr
    assert "last good version is still in place" in " ".join(done.stderr.split())
    succeed(tmp_path, "resume", str(folder), "--quiet")
    assert results(folder)["state_sha256"] == results(finished)["state_sha256"]
