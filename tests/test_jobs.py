"""Several runs at once, in processes of their own."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from fedharmony import stopping
from fedharmony.cli import app
from fedharmony.data.base import DataSet
from fedharmony.errors import Stopped
from fedharmony.experiments import build, jobs
from fedharmony.experiments.compare import carry_out, plan, rehearse
from fedharmony.experiments.crowd import Crowd
from fedharmony.experiments.jobs import Workers
from fedharmony.experiments.run import start
from fedharmony.experiments.settings import load_settings
from fedharmony.report.progress import Board
from test_cli import call

SMALL = [
    *("data.train=90", "data.test=30", "split.clients=3", "split.min_size=5", "run.rounds=2"),
    *("train.epochs=1", "model.width=16", "model.depth=1", "model.heads=2", "engine.device=cpu"),
]
#: Methods that do not live long.
PLUGIN = '''
import os
import signal
import time

from fedharmony import stopping
from fedharmony.methods.base import Method, methods

class Broken(Method):
    """FedAvg until its second round."""

    def aggregate(self, state, round, sent, replies):
        if round:
            self.end()
        return super().aggregate(state, round, sent, replies)

@methods.register("raises")
class Raises(Broken):
    """Has a fault."""

    def end(self):
        raise RuntimeError("a fault of mine")

@methods.register("dies")
class Dies(Broken):
    """Takes its process along."""

    def end(self):
        os.kill(os.getpid(), signal.SIGKILL)

@methods.register("lasts")
class Lasts(Broken):
    """Takes until it is stopped."""

    def end(self):
        while True:
            stopping.end_if_asked()
            time.sleep(0.01)
'''


@pytest.fixture
def plugin(tmp_path: Path) -> str:
    (tmp_path / "plugin.py").write_text(PLUGIN)
    return str(tmp_path / "plugin.py")


def test_one_after_the_other_failed_runs_do_not_stop_the_others_either(
    plugin: str, tmp_path: Path
) -> None:
    """They are named at the end; the same command repeats them alone."""
    out = tmp_path / "out"
    options = ["--methods", "raises,fedavg", "--seeds", "0", "--plugin", plugin, "--out", str(out)]
    for _ in range(2):
        code, table, err = call(tmp_path, "compare", "demo", *SMALL, *options)
        assert code == 2
        assert f"1 run failed; all others are done. {out / 'raises' / 'seed-0'}" in err
        assert "a fault of mine. Mend the cause and give the same command again" in err
        assert "fedavg" in table
        assert (out / "fedavg" / "seed-0" / "results.json").exists()
        for trace in (out / "raises" / "seed-0").glob("fedharmony-error-*.txt"):
            assert "in end" in trace.read_text()
            trace.unlink()


def test_runs_that_fail_do_not_stop_the_others(plugin: str, tmp_path: Path) -> None:
    """One raises, one kills its process; the others end, with the bits they have alone."""
    out = tmp_path / "out"
    chosen = ["--methods", "raises,dies,fedavg,fedprox", "--seeds", "0", "--against", "fedavg"]
    options = ["--jobs", "2", "--plugin", plugin, "--out", str(out)]
    command = [sys.executable, "-m", "fedharmony", "compare", "demo", *SMALL, "engine.threads=1"]
    result = subprocess.run(
        [*command, *chosen, *options], capture_output=True, text=True, check=False
    )
    assert result.returncode == 2
    assert "2 runs failed; all others are done." in result.stderr
    assert "a fault of mine" in result.stderr
    assert "SIGKILL" in result.stderr
    assert "4 of 4 done, 0 running, 0 left" in result.stdout
    (trace,) = (out / "raises" / "seed-0").glob("fedharmony-error-*.txt")
    assert "in end" in trace.read_text()
    assert "please report" not in result.stderr  # it is the plug-in's fault
    table = (out / "table.md").read_text()
    assert "Difference to fedavg" in table
    settings = load_settings("demo", [*SMALL, "engine.threads=1"])
    for method in ("fedavg", "fedprox"):
        (run,) = plan(settings, [method], [0], tmp_path / "alone")
        alone = start(run.settings, run.folder, lambda event: None)
        found = json.loads((out / method / "seed-0" / "results.json").read_text())
        assert found["state_sha256"] == alone["state_sha256"]
        assert found["metrics"] == alone["metrics"]


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_ctrl_c_ends_all_processes_and_loses_nothing(plugin: str, tmp_path: Path) -> None:
    """The signal reaches the first process alone; the workers' first rounds are saved."""
    command = [sys.executable, "-m", "fedharmony", "compare", "demo", *SMALL]
    command += ["--methods", "lasts", "--seeds", "0,1", "--jobs", "2", "--plugin", plugin]
    process = subprocess.Popen(
        [*command, "--out", "out"], cwd=tmp_path, stderr=subprocess.PIPE, text=True
    )
    folders = [tmp_path / "out" / "lasts" / f"seed-{seed}" for seed in (0, 1)]
    logs = [folder / "events.jsonl" for folder in folders]
    until = time.monotonic() + 120
    while not all(log.exists() and '"round"' in log.read_text() for log in logs):
        assert time.monotonic() < until
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.1)
    workers = [json.loads((folder / ".fedharmony-lock").read_text())["pid"] for folder in folders]
    assert len({process.pid, *workers}) == 3
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=300)
    assert process.returncode == 130
    assert "the same command goes on" in errors
    assert not any(map(alive, workers))
    for folder, log in zip(folders, logs, strict=True):
        assert json.loads(log.read_text().splitlines()[-1])["status"] == "interrupted"
        assert (folder / "checkpoint.safetensors").exists()
    assert not list(tmp_path.rglob(".fedharmony-lock"))
    engine = tomllib.loads((folders[0] / "config.toml").read_text())["engine"]
    assert engine["threads"] == max(1, torch.get_num_threads() // 2)


def test_a_process_that_waits_ends_even_if_no_signal_wakes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On a GPU a thread of CUDA may take the signal."""
    worker = jobs._Worker(None)
    monkeypatch.setattr(worker.process, "terminate", lambda: None)
    worker.dismiss()
    worker.process.join(60)
    assert worker.process.exitcode == 0


def test_threads_and_memory_are_shared_unless_they_are_set(tmp_path: Path) -> None:
    threads = torch.get_num_threads()
    demo = load_settings("demo")
    for number in (1, 2, 1000):
        (run,) = plan(demo, ["fedavg"], [0], tmp_path, Crowd(number))
        assert run.settings.engine.threads == max(1, threads // number)
        assert run.settings.engine.gpu_share == (1 / number if number > 1 else None)
    own = load_settings("demo", ["engine.threads=7", "engine.gpu_share=0.5"])
    (run,) = plan(own, ["fedavg"], [0], tmp_path, Crowd(4))
    assert (run.settings.engine.threads, run.settings.engine.gpu_share) == (7, 0.5)


def test_runs_on_several_gpus_share_one_with_their_own_neighbours_alone(tmp_path: Path) -> None:
    """Four on two GPUs: half of one each; five: three of them on one; two: a whole one each."""
    demo, devices = load_settings("demo"), ("cuda:0", "cuda:1")
    for number, part in ((4, 1 / 2), (5, 1 / 3), (2, None)):
        (run,) = plan(demo, ["fedavg"], [0], tmp_path, Crowd(number, devices))
        assert run.settings.engine.gpu_share == part


def test_a_run_goes_on_with_the_part_of_a_gpu_that_is_planned_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cut short for want of memory beside 10 others, it is told to go on beside fewer."""
    asked: list[float] = []
    monkeypatch.setattr(build, "keep_to_share", lambda device, part: asked.append(part))
    small = ["data.train=60", "data.test=12", "split.clients=3", "run.rounds=1", "train.epochs=1"]
    demo = load_settings("demo", [*small, "engine.device=cpu"])
    for number in (11, 2, 1):
        (run,) = plan(demo, ["fedavg"], [0], tmp_path, Crowd(number))
        run.folder["results.json"].unlink(missing_ok=True)
        asked.clear()
        carry_out(run, lambda event: None, None)
        assert asked == [1 / number]


def test_devices_are_checked_first(tmp_path: Path) -> None:
    for devices, words in (
        ("cpu,cpu:0", "names 2 devices for --jobs 1"),
        ("cuda:99", "engine.device = 'cuda:99'"),
    ):
        command = ["compare", "demo", "--device", devices, "--jobs", "1"]
        result = CliRunner().invoke(app, [*command, "--out", str(tmp_path / "out")])
        assert words in str(result.exception)
    assert not (tmp_path / "out").exists()


def test_a_worker_loads_data_once_and_never_takes_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of a sweep may differ in their data: the third has 60 training images, not 90."""
    loads: list[int] = []

    def counted(runs: Any, observe: Any) -> DataSet:
        data = rehearse(runs, observe)
        loads.append(len(data.train))
        return data

    class Pipe:
        def send(self, message: tuple[str, Any]) -> None:
            sent.append(message)

    monkeypatch.setattr(jobs, "rehearse", counted)
    sent: list[Any] = []
    held: dict[str, DataSet] = {}
    for number, size in enumerate((90, 90, 60)):
        settings = load_settings("demo", [*SMALL, f"data.train={size}", "run.rounds=1"])
        tree = settings.with_run("fedavg").tree()
        jobs._carry_out(cast(Any, Pipe()), held, tmp_path / str(number), tree, "cpu")
    assert [kind for kind, _ in sent if kind != "event"] == ["done"] * 3
    starts = [content for kind, content in sent if kind == "event" and content["event"] == "start"]
    assert [event["train_images"] for event in starts] == [90, 90, 60]
    assert loads == [90, 60]
    assert len(held) == 1


def test_devices_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that died is replaced on its own device."""

    class Fake:
        def __init__(self, device: str | None) -> None:
            self.device, self.gone = device, False

    monkeypatch.setattr(jobs, "_Worker", Fake)
    workers = Workers(Crowd(4, ("cpu", "cpu:0")))
    busy: list[jobs._Worker] = []
    for _ in range(4):
        busy.append(workers._idle(set(map(id, busy))))
    assert [worker.device for worker in busy] == ["cpu", "cpu:0", "cpu", "cpu:0"]
    assert workers._idle({id(worker) for worker in busy[:3]}) is busy[3]  # who is free goes on
    busy[1].gone = True
    assert workers._idle({id(worker) for worker in busy if not worker.gone}).device == "cpu:0"
    alone = Workers(Crowd(2))
    assert alone._idle(set()).device is None


def test_the_board_knows_that_runs_may_have_unlike_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three runs, of 10 and 40 rounds. 10 rounds in 60 s leave 40 and, in the mean, 25.

    That is 6 min 30 s; with the third, of 2 rounds, 42 are left: 4 min 12 s.
    """
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    with Board(quiet=True) as board:
        first = board.follow(1, 3, "a", 10)
        board.follow(2, 3, "b", 40)
        for i in range(10):
            first({"event": "round", "round": i, "seconds": 1.0})
        clock[0] = 60.0
        assert board.standing.endswith("1 left, about 6 min 30 s")
        first({"event": "finish", "status": "completed"})
        board.follow(3, 3, "c", 2)
        assert board.standing == "1 of 3 done, 2 running, 0 left, about 4 min 12 s"


def test_the_board_counts_runs_and_foretells_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four runs of 10 rounds, the first done before, the third resumed after round 5.

    That leaves 10 + 5 + 10 rounds. 5 of them in 60 s leave 20: 4 min.
    """
    clock = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: clock[0])
    target = io.StringIO()
    board = Board(console=Console(file=target, width=120))
    with board:
        second = board.follow(2, 4, "b", 10)
        third = board.follow(3, 4, "c", 10)
        second({"event": "start", "rounds": 10})
        third({"event": "start", "rounds": 10, "resumed_at": 5})
        for i in range(5):
            second({"event": "round", "round": i, "seconds": 1.0})
        clock[0] = 60.0
        assert board.standing == "1 of 4 done, 2 running, 1 left, about 4 min 0 s"
        third({"event": "finish", "status": "failed", "reason": "Why."})
        third({"event": "finish", "status": "failed", "reason": "Why."})
        board.follow(4, 4, "d", 10)
        assert board.standing == "2 of 4 done, 2 running, 0 left, about 3 min 0 s"
    lines = target.getvalue().splitlines()
    assert lines[0] == "b: started; 1 of 4 done, 1 running, 2 left"
    assert len([line for line in lines if "failed after 5 of 10 rounds. Why." in line]) == 1


def test_a_worker_whose_pipe_was_closed_with_the_signal_hears_the_signal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a run that was stopped would end without a word in its log."""

    class Closed:
        def send(self, content: Any) -> None:
            if content[1].get("event") == "round":
                stopping.ask(Stopped("SIGTERM", signal.SIGTERM))
                raise BrokenPipeError

    settings = load_settings("demo", [*SMALL, "engine.threads=1", "run.method=fedavg"])
    try:
        with pytest.raises(Stopped):
            jobs._carry_out(Closed(), {}, tmp_path / "run", settings.tree(), None)  # type: ignore[arg-type]
    finally:
        stopping.forget()
    log = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    assert json.loads(log[-1])["status"] == "interrupted"
