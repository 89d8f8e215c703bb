"""What fails in a real federation: killed processes, wrong keys. Minutes: FEDHARMONY_FLOWER=1."""

from __future__ import annotations

import http.client
import itertools
import json
import os
import signal
import ssl
import time
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from fedharmony.engine.checkpoint import write_file
from fedharmony.errors import CheckpointError, ClientLimitError, TransportError
from fedharmony.experiments import run
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.flower import link
from fedharmony.flower.link import Ordered
from fedharmony.site.keys import make_key
from sites import site_file
from superlink import Federation, federation, wait_for

pytestmark = pytest.mark.skipif(
    os.environ.get("FEDHARMONY_FLOWER") != "1", reason="takes minutes; set FEDHARMONY_FLOWER=1"
)
#: Of a round, in order: before messages go out, while sites work on them, after the first answer,
#: after all of them, and while the checkpoint is written and takes its place.
MOMENTS = ("push", "wait", "answer", "answers", "write", "replace")
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


@pytest.mark.parametrize("victim", ["server", "SuperLink"])
def test_killed_at_every_moment_of_every_round_runs_go_on_to_the_same_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, victim: str
) -> None:
    """FedCurv, whose clients keep something; one kill after the other in the same run."""
    changes = ("run.method=fedcurv", "run.rounds=3")
    monkeypatch.setenv("FEDHARMONY_KILL", str(tmp_path / "kill.json"))
    monkeypatch.setattr(link, "APP", link.APP.replace("fedharmony.flower.server_app", "killed_app"))
    killed = 0
    with federation(tmp_path) as there:
        out = tmp_path / "run"
        for round, moment in itertools.product(range(3), MOMENTS):
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
            killed += 1
            print(f"{time.monotonic():.0f} {victim} killed: round {round}, {moment}", flush=True)
        again = order(there, out, resume=True)
        second = order(there, out, resume=True)
        with pytest.raises(CheckpointError, match="is being written by process"):
            second.follow(nobody)
        again.follow(nobody)
    settings = load_settings("demo", [*there.changes, *changes])
    expected = run.start(settings, RunFolder(tmp_path / "simulated"), nobody)
    found = json.loads((out / "results.json").read_bytes())
    assert {k: found[k] for k in SAME} == {k: expected[k] for k in SAME}
    assert killed == 3 * len(MOMENTS)


def test_a_killed_node_ends_a_round_within_90_seconds_and_is_used_again(tmp_path: Path) -> None:
    """The worker of ada stands still while its SuperNode is killed; then a dead worker is named."""
    with federation(tmp_path) as there:
        folder = RunFolder(tmp_path / "run")
        ordered = order(there, folder.path, "federation.cohort=3", "run.rounds=8")
        wait_for(lambda: len(rounds(folder)) == 1)
        worker = there.processes["worker-ada"]
        os.kill(worker.pid, signal.SIGSTOP)
        time.sleep(10)  # its message is on its way
        there.end("node-ada", signal.SIGKILL)
        began = time.monotonic()
        wait_for(lambda: any(0 not in event["reported"] for event in rounds(folder)))
        assert time.monotonic() - began < 90
        (lost,) = [event for event in rounds(folder) if 0 not in event["reported"]]
        assert lost["failures"][0]["reason"].startswith("site ada: Flower says")
        os.kill(worker.pid, signal.SIGCONT)
        there.start_node("ada")
        back = wait_for(lambda: [e for e in rounds(folder)[lost["round"] :] if 0 in e["reported"]])
        there.end("worker-ben", signal.SIGKILL)
        dead = wait_for(lambda: [e for e in rounds(folder) if 1 not in e["reported"]])
        assert "site ben: The worker" in dead[0]["failures"][0]["reason"]
        there.start_worker("ben")
        ordered.follow(nobody)
        assert back[0]["round"] < len(rounds(folder)) == 8


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
