"""The operator's SuperLink: what is started is ended, and how a run ended is told truly."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from fedharmony.errors import CheckpointError, ClientLimitError, ConfigError, TransportError
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.flower import link as links
from fedharmony.flower import post as posts
from fedharmony.flower.link import Link, Ordered
from test_cli import refuse


def written(home: Path, pid: int, began: str | None) -> Link:
    about = {"processes": [[pid, began]], "address": "127.0.0.1:1"}
    (home / "link.json").write_text(json.dumps(about))
    return Link(home)


def test_what_is_started_is_ended(tmp_path: Path) -> None:
    link = Link(tmp_path)
    code = "print('hello', flush=True); import time; time.sleep(60)"
    pid = link._start("sleeper", [sys.executable, "-c", code])
    link = written(tmp_path, pid, links.began(pid))
    assert (link.pid, link.address) == (pid, "127.0.0.1:1")
    assert os.getsid(pid) == pid
    assert link.down()
    assert links.began(pid) is None
    assert not link.down()


def test_another_process_of_the_same_number_is_left_alone(tmp_path: Path) -> None:
    link = written(tmp_path, os.getpid(), "0")
    assert link.pid is None
    assert not link.down()  # else this test would have ended itself


def test_a_gate_without_its_superlink_is_ended(tmp_path: Path) -> None:
    link = Link(tmp_path)
    gate = link._start("gate", [sys.executable, "-c", "import time; time.sleep(60)"])
    about = {"processes": [[1, "gone"], [gate, links.began(gate)]], "address": "127.0.0.1:1"}
    (tmp_path / "link.json").write_text(json.dumps(about))
    assert link.pid is None
    assert link.down()
    assert links.began(gate) is None


def test_without_a_superlink(tmp_path: Path) -> None:
    with pytest.raises(TransportError, match="flower up"):
        _ = Link(tmp_path).address
    with pytest.raises(ConfigError, match="flower certs"):
        Link(tmp_path).up("127.0.0.1", 1, 2)


def test_the_folder_is_the_operators_alone(tmp_path: Path) -> None:
    """Its database holds the models that are on their way."""
    pytest.importorskip("cryptography")
    link = Link(tmp_path / "home")
    link.certify(["127.0.0.1"])
    assert link.home.stat().st_mode & 0o777 == 0o700


def test_flower_is_told_to_send_nothing_home(tmp_path: Path) -> None:
    found = Link(tmp_path).environment
    assert (found["FLWR_TELEMETRY_ENABLED"], found["FLWR_DISABLE_UPDATE_CHECK"]) == ("0", "1")
    assert found["FLWR_HOME"] == str(tmp_path / "flwr")


def test_what_a_killed_superlink_started_is_ended_too(tmp_path: Path) -> None:
    """A child in a session of its own outlives its parent, and is still known."""
    child = "import time; time.sleep(60)"
    code = (
        "import subprocess, sys, time;"
        f"subprocess.Popen([sys.executable, '-c', {child!r}], start_new_session=True);"
        "time.sleep(60)"
    )
    parent = Link(tmp_path)._start("superlink", [sys.executable, "-c", code])
    while not (found := links._children(parent)):
        time.sleep(0.01)
    family = [[pid, links.began(pid)] for pid in (parent, *found)]
    os.kill(parent, signal.SIGKILL)
    os.waitpid(parent, 0)
    (tmp_path / "link.json").write_text(json.dumps({"processes": family, "address": ":1"}))
    assert Link(tmp_path).pid is None
    assert Link(tmp_path).down()
    assert links.began(found[0]) is None


def test_a_superlink_that_has_ended_ends_the_watch(tmp_path: Path) -> None:
    run = Ordered(Link(tmp_path), "7", RunFolder(tmp_path), tmp_path / "outcome.json")
    with pytest.raises(TransportError, match=r"has ended.*flower up.*flower resume"):
        run.follow(print)


def ordered(folder: Path, **outcome: Any) -> Ordered:
    (folder / "outcome.json").write_text(json.dumps(outcome))
    return Ordered(Link(folder), "7", RunFolder(folder), folder / "outcome.json")


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("ClientLimitError", ClientLimitError),
        ("ConfigError", ConfigError),
        ("DataError", CheckpointError),
        ("", CheckpointError),
    ],
)
def test_a_failed_run_fails_here_too(tmp_path: Path, kind: str, error: type[Exception]) -> None:
    with pytest.raises(error, match="too few"):
        ordered(tmp_path, status="failed", kind=kind, error="too few").follow(print)


def test_events_are_told_once_and_whole(tmp_path: Path) -> None:
    run = ordered(tmp_path, status="completed", error="")
    log = tmp_path / "events.jsonl"
    told: list[Any] = []
    lines = [json.dumps({"event": name}) for name in ("start", "round", "finish")]
    log.write_text(f"{lines[0]}\n{lines[1][:5]}")
    seen = run._tell(0, told.append)
    log.write_text("\n".join(lines) + "\n")
    seen = run._tell(seen, told.append)
    assert [event["event"] for event in told] == ["start", "round", "finish"]
    log.write_text(lines[0] + "\n")  # a resumed run cuts its log
    assert run._tell(seen, told.append) == len(lines[0]) + 1
    assert len(told) == 3


def test_a_server_that_ended_without_a_word_is_found_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "ASK_S", 0.0)
    monkeypatch.setattr(links, "LOOK_S", 0.0)
    written(tmp_path, os.getpid(), links.began(os.getpid()))
    answers = iter([{"runs": [{"status": "running"}]}, {"runs": [{"status": "finished:failed"}]}])
    monkeypatch.setattr(Link, "flwr", lambda *words: next(answers))
    run = Ordered(Link(tmp_path), "7", RunFolder(tmp_path), tmp_path / "outcome.json")
    with pytest.raises(CheckpointError, match=r"ended without a word \(finished:failed\)"):
        run.follow(print)


def test_a_server_that_was_killed_is_found_out_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Flower is not even asked: the process that the server named is gone."""
    monkeypatch.setattr(Link, "flwr", lambda *words: pytest.fail("a process for nothing"))
    run = Ordered(Link(tmp_path), "7", RunFolder(tmp_path), tmp_path / "outcome.json")
    (tmp_path / "server.json").write_text(json.dumps({"pid": os.getpid(), "began": "0"}))
    with pytest.raises(CheckpointError, match=r"ended without a word \(it was killed\)"):
        run.follow(print)


def test_a_run_without_a_roster_is_not_resumed(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    folder.path.mkdir()
    folder.create(load_settings("demo"))
    said = refuse(tmp_path, "flower", "resume", str(folder.path))
    assert "no roster.json" in said
    assert "flower run" in said


def test_looks_become_rarer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tenth of the time waited: after 0.5 s, 5 s and an hour, within 0.1 and 1 s."""
    slept: list[float] = []
    monkeypatch.setattr(posts.time, "sleep", slept.append)
    for waited in (0.5, 5.0, 3600.0):
        posts.pause(time.monotonic() - waited)
    posts.pause()
    assert slept == pytest.approx([0.1, 0.5, 1.0, 0.1], abs=0.05)
