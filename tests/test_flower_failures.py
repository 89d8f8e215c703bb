"""What happens to a real federation: kills, stalls, wrong keys. Minutes: FEDHARMONY_FLOWER=1."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import re
import signal
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedharmony.errors import CheckpointError, ClientLimitError, TransportError
from fedharmony.experiments import run
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.flower import link
from fedharmony.flower.link import Ordered
from fedharmony.records import write_file
from fedharmony.site.keys import make_key
from sites import site_file
from superlink import Federation, federation, free_port, wait_for

pytestmark = pytest.mark.skipif(
    os.environ.get("FEDHARMONY_FLOWER") != "1", reason="takes minutes; set FEDHARMONY_FLOWER=1"
)
#: Of a round, in order: before messages go out, while sites work on them, after the first answer,
#: after all of them, and while the checkpoint is written and takes its place.
MOMENTS = ("push", "wait", "answer", "answers", "write", "replace")
#: In three of four rounds. A server whose SuperLink is killed after all answers still finishes its
#: round.
KILLS = {
    "server": list(itertools.product(range(3), MOMENTS)),
    "SuperLink": [(r, m) for r in range(3) for m in (*MOMENTS[:3], MOMENTS[3 + r])],
}
SAME = ("state_sha256", "metrics", "structure")


def nobody(event: dict[str, Any]) -> None:
    pass


def rounds(folder: RunFolder) -> list[dict[str, Any]]:
    return [event for event in folder.read_events() if event["event"] == "round"]


def order(there: Federation, out: Path, *changes: str, resume: bool = False) -> Ordered:
    settings = load_settings("demo", [*there.changes, *changes])
    return there.link.order(None if resume else settings.tree(), out, 3, 120.0, 120.0)


def server_of(ordered: Ordered) -> int:
    """The process that carries an order out, as soon as there is one."""
    file = ordered.outcome.with_name("server.json")
    wait_for(file.exists)
    return int(json.loads(file.read_bytes())["pid"])


def at(there: Federation, round: int, moment: str, pid: int) -> Path:
    """Have the server kill a process (0 is itself) at a moment of a round."""
    file = there.folder / "kill.json"
    write_file(file, json.dumps({"round": round, "moment": moment, "pid": pid}).encode())
    return file


@pytest.mark.parametrize("victim", KILLS)
def test_killed_at_every_moment_of_every_round_runs_go_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """FedCurv, whose clients keep something; one kill after the other in the same run."""
    changes = ("run.method=fedcurv", "run.rounds=4")
    monkeypatch.setenv("FEDHARMONY_KILL", str(tmp_path / "kill.json"))
    monkeypatch.setattr(link, "APP", link.APP.replace("fedharmony.flower.server_app", "killed_app"))
    with federation(tmp_path) as there:
        out = tmp_path / "run"
        for round, moment in KILLS[victim]:
            pid = (there.link.pid or 0) if victim == "SuperLink" else 0
            file = at(there, round, moment, pid)
            resume = (out / "roster.json").exists()
            ordered = order(there, out, *changes, resume=resume)
            if victim == "server":
                with pytest.raises(CheckpointError, match="it was killed"):
                    ordered.follow(nobody)
            else:
                with pytest.raises(TransportError, match="has ended"):
                    ordered.follow(nobody)
                there.link.up("127.0.0.1", there.port, there.inner)
            assert not file.exists()
            print(f"{victim} killed: round {round}, {moment}", flush=True)
        order(there, out, resume=True).follow(nobody)
    settings = load_settings("demo", [*there.changes, *changes])
    expected = run.start(settings, RunFolder(tmp_path / "simulated"), nobody)
    found = json.loads((out / "results.json").read_bytes())
    assert {k: found[k] for k in SAME} == {k: expected[k] for k in SAME}


def test_a_killed_node_ends_its_round_and_is_used_again(tmp_path: Path) -> None:
    """The worker of ada stands still while its node is killed."""
    with federation(tmp_path) as there:
        folder = RunFolder(tmp_path / "run")
        ordered = order(there, folder.path, "federation.cohort=3", "run.rounds=500")
        wait_for(lambda: len(rounds(folder)) == 1)
        worker = there.processes["worker-ada"]
        os.kill(worker.pid, signal.SIGSTOP)
        with pytest.raises(CheckpointError, match="is being written by process"):
            order(there, folder.path, resume=True).follow(nobody)  # a second server
        there.end("node-ada", signal.SIGKILL)
        lost = wait_for(lambda: [e for e in rounds(folder) if 0 not in e["reported"]])[0]
        assert lost["left_out"][0]["reason"].startswith("site ada: Flower says")
        os.kill(worker.pid, signal.SIGCONT)
        there.start_node("ada")
        wait_for(lambda: [e for e in rounds(folder)[lost["round"] :] if 0 in e["reported"]])
        ordered.stop()


def test_a_stall_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    """The worker of cy stands still for two rounds and more."""
    with federation(tmp_path) as there:
        folder = RunFolder(tmp_path / "run")
        settings = load_settings("demo", [*there.changes, "federation.cohort=3", "run.rounds=500"])
        ordered = there.link.order(settings.tree(), folder.path, 3, 120.0, 8.0)
        wait_for(lambda: len(rounds(folder)) == 1)
        worker = there.processes["worker-cy"]
        os.kill(worker.pid, signal.SIGSTOP)
        wait_for(lambda: sum(2 not in event["reported"] for event in rounds(folder)) >= 2)
        os.kill(worker.pid, signal.SIGCONT)
        stalled = [event for event in rounds(folder) if 2 not in event["reported"]]
        reasons = [event["left_out"][0]["reason"] for event in stalled]
        print(len(stalled), "rounds went on:", sorted(set(reasons)))
        assert reasons[0] == "site cy: no answer within 8 seconds"
        assert reasons[1] == "site cy: it still works on an earlier message"
        done = len(rounds(folder))
        wait_for(lambda: [e for e in rounds(folder)[done:] if 2 in e["reported"]])
        ordered.stop()


def test_every_way_to_fail_is_named_and_the_run_goes_on(tmp_path: Path) -> None:
    """Ben's worker sends no numbers, other shapes, raises, and dies, a round each."""
    with federation(tmp_path) as there:
        there.end("worker-ben")
        script, file = Path(__file__).with_name("broken_worker.py"), there.folder / "data" / "ben"
        there.start("worker-ben", sys.executable, str(script), str(file / "site.toml"))
        folder = RunFolder(tmp_path / "run")
        ordered = order(there, folder.path, "federation.cohort=3", "run.rounds=500")
        wait_for(lambda: len(rounds(folder)) > 6)
        found = [e["left_out"] for e in rounds(folder)[1:6]]
        expected = ("not finite", "has shape", "the disk is full", "ended while", "does not answer")
        for (failure,), words in zip(found, expected, strict=True):
            print(failure)
            assert failure["name"] == "ben"
            assert words in failure["reason"]
        there.end("worker-ben")
        there.start_worker("ben")
        wait_for(lambda: 1 in rounds(folder)[-1]["reported"])
        ordered.stop()


def test_wrong_keys_and_the_control_api(tmp_path: Path) -> None:
    """Cy has a key that nobody registered, ben a worker that says it is eve."""
    with federation(tmp_path) as there:
        there.end("node-cy")
        there.start_node("cy", key=Path(str(make_key(tmp_path / "own.key")).removesuffix(".pub")))
        settings = load_settings("demo", there.changes)
        ordered = there.link.order(settings.tree(), tmp_path / "run", 3, 20.0, 60.0)
        with pytest.raises(ClientLimitError, match=r"2 of the 3 .*\(ada, ben\): not online: cy"):
            ordered.follow(nobody)
        there.end("worker-ben")
        file = site_file(there.folder / "data", "ben")
        eve = file.with_name("eve.toml")
        eve.write_text(file.read_text().replace('name = "ben"', 'name = "eve"'))
        there.start_worker("ben", eve)
        ordered = there.link.order(settings.tree(), tmp_path / "run", 3, 60.0, 60.0)
        with pytest.raises(ClientLimitError, match="site ben calls itself 'eve'"):
            ordered.follow(nobody)
        assert not (tmp_path / "run").exists()
        trust = ssl.create_default_context(cafile=str(there.link.certificates / "ca.crt"))
        answers = {}
        for port in (there.port, there.inner):
            line = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=trust)
            line.request("POST", "/v1/control/list-runs", b"")
            answers[port] = line.getresponse().status
            line.close()
        assert answers[there.port] == 403  # at the gate; the SuperLink itself would have answered
        assert answers[there.inner] != 403


def test_the_lines_of_the_documentation_lead_from_nothing_to_a_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As they stand there, at ports of their own; whoever started them ends nothing else."""
    page = (Path(__file__).parents[1] / "docs" / "deployment.md").read_text()
    found = re.search(r"### On one machine, to try it\n.*?```sh\n(.*?)```", page, re.DOTALL)
    assert found is not None
    gate, inner = free_port(), free_port()
    ports = f"flower up --port {gate} --control-port {inner}\n"
    lines = found[1].replace("8443", str(gate)).replace("flower up\n", ports)
    shim = tmp_path / "bin" / "fedharmony"
    shim.parent.mkdir()
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m fedharmony "$@"\n')
    shim.chmod(0o755)
    (shim.parent / "python").symlink_to(sys.executable)
    monkeypatch.setenv("PATH", f"{shim.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    home = tmp_path / "home"
    home.mkdir()
    done = subprocess.run(
        ["bash", "-e", "-c", lines], cwd=home, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "completed after 3 of 3 rounds" in done.stdout + done.stderr
    assert done.stdout.endswith("Ended.\n")
    assert (home / "run" / "report.html").exists()
    assert (home / "ada" / "worker.log").exists()
