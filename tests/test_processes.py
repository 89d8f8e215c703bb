"""One run over several processes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from fedharmony import fallbacks
from fedharmony.errors import ClientLimitError
from fedharmony.methods.base import Outcome, Stage
from fedharmony.transport.processes import Processes, ProcessGroup, _pack, _unpack, join
from fedharmony.types import Failure, Record, Reply

SMALL = [
    *("data.train=90", "data.test=30", "split.clients=5", "split.min_size=5", "run.rounds=3"),
    *("train.epochs=1", "engine.threads=1", "model.width=16", "model.depth=1", "model.heads=2"),
    *("engine.device=cpu", "federation.participation=0.8", "engine.stack=1"),
]


def launch(processes: int, cwd: Path, *arguments: str) -> str:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    command += ["--master-port", str(port), "-m", "fedharmony", *arguments]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


@pytest.mark.parametrize("method", ["fedcurv", "fedharmony"])
def test_two_processes_give_the_bits_of_one(method: str, tmp_path: Path) -> None:
    """Clients trained one by one sum in the same order wherever they are; both methods keep
    something between rounds, on the clients and on the server."""
    chosen = [*SMALL, f"run.method={method}", "federation.drop_rate=0.2"]
    out = launch(2, tmp_path, "run", "demo", *chosen, "--out", "two", "--quiet")
    assert out.count("prevalence") == 1  # one of them prints
    done = subprocess.run(
        [sys.executable, "-m", "fedharmony", "run", "demo", *chosen, "--out", "one", "--quiet"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    one, two = results(tmp_path / "one"), results(tmp_path / "two")
    assert one["state_sha256"] == two["state_sha256"]
    assert one["metrics"] == two["metrics"]
    assert one["bytes_up"] == two["bytes_up"]
    events = (tmp_path / "two" / "events.jsonl").read_text().splitlines()
    assert len([e for e in events if '"event": "round"' in e]) == 3


DIVERGES = '''"""FedAvg; clients with an even number of images diverge."""
import torch
from fedharmony.methods.base import methods, stacked


@methods.register("diverges")
class Diverges(methods["fedavg"]):
    """Training gives NaN at some clients."""

    def carry(self, view, message):
        return {"factor": torch.tensor(float("nan") if view.examples % 2 == 0 else 1.0)}

    @stacked
    def loss(self, outputs, batch, message, carry):
        fit, carry = super().loss(outputs, batch, message, carry)
        return fit * carry["factor"], carry
'''


def test_shares_that_are_not_finite_are_left_out_by_all_processes(tmp_path: Path) -> None:
    """Whoever adds one that its owner leaves out has another model from then on."""
    (tmp_path / "diverges.py").write_text(DIVERGES)
    chosen = [*SMALL, "--plugin", "diverges.py", "run.method=diverges", "split.clients=7"]
    chosen += ["federation.server_sees=sums", "federation.sum_least=2", "--quiet"]
    chosen += ["federation.max_failures=1"]
    launch(2, tmp_path, "run", "demo", *chosen, "--out", "two")
    launch(1, tmp_path, "run", "demo", *chosen, "--out", "one")
    lines = [(tmp_path / name / "events.jsonl").read_text() for name in ("one", "two")]
    events = [[json.loads(x) for x in own.splitlines() if '"event": "round"' in x] for own in lines]
    for one, two in zip(*events, strict=True):
        assert one["left_out"] == two["left_out"]
        assert one["reported"] == two["reported"]
    assert all(e["left_out"] and len(e["reported"]) > 1 for e in events[0])
    assert results(tmp_path / "one")["state_sha256"] == results(tmp_path / "two")["state_sha256"]


def test_processes_of_a_private_run_draw_the_same_cohorts_and_noise(tmp_path: Path) -> None:
    """From the key of the first; with one of their own they would wait for different clients."""
    pytest.importorskip("dp_accounting")
    private = ["run.method=fedavg", "federation.server_sees=sums", "federation.average=uniform"]
    private += ["privacy.noise_multiplier=1", "federation.participation=0.4", "run.rounds=6"]
    seed = "privacy.noise_seed=1"
    launch(2, tmp_path, "run", "demo", *SMALL, *private, "--out", "secret", "--quiet")
    launch(2, tmp_path, "run", "demo", *SMALL, *private, seed, "--out", "two", "--quiet")
    launch(1, tmp_path, "run", "demo", *SMALL, *private, seed, "--out", "one", "--quiet")
    found = [results(tmp_path / name) for name in ("one", "two", "secret")]
    assert found[0]["state_sha256"] == found[1]["state_sha256"] != found[2]["state_sha256"]
    assert found[2]["rounds_done"] == found[2]["privacy"]["rounds"] == 6


def test_answers_survive_the_way() -> None:
    groups = {"params": {"w": torch.randn(3, 2)}, "odd": {"n": torch.tensor(4), "": torch.ones(1)}}
    reply = Reply(7, 21, Record(groups, {"loss": 0.5, "steps": 3}), finite=False)
    found = _unpack(_pack(reply), torch.device("cpu"))
    assert isinstance(found, Reply)
    assert replace(found, record=reply.record) == reply
    assert found.record.scalars == reply.record.scalars
    for name, tensor in reply.record.tensors():
        assert torch.equal(dict(found.record.tensors())[name], tensor)
    failure = Failure(3, "update", 2, "ValueError: no (x.py:1)")
    assert _unpack(_pack(failure), torch.device("cpu")) == failure


def test_only_runs_are_shared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from test_cli import refuse

    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "works in one process" in refuse(tmp_path, "compare", "demo")
    assert "works in one process" in refuse(tmp_path, "tune", "demo")


def test_a_process_that_does_not_answer_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(tensor: Any, owner: int) -> None:
        raise RuntimeError("Timed out waiting 2000ms for recv operation to complete")

    class Nobody:
        sizes = (3, 3)

        def exchange(self, *arguments: Any) -> Any:
            return iter(())

    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    two = Processes(Nobody(), ProcessGroup(0, 2), torch.device("cpu"))
    stage = Stage("update", lambda *a: {}, lambda *a: Outcome(Record()))
    with pytest.raises(
        ClientLimitError, match=r"Process 1 did not send the answer of client 1"
    ) as e:
        list(two.exchange(stage, 4, {1: Record()}))
    assert "engine.wait_s" in str(e.value)
    assert "The state after 4 rounds is saved" in str(e.value)


def test_fallbacks_of_all_processes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process has halved one stack; the others have halved one each, or run one apart."""

    def all_reduce(counts: torch.Tensor) -> None:
        counts[:2] += torch.tensor([1, 2])  # "stack" and "memory" come first

    class Nobody:
        sizes = ()

        def exchange(self, *arguments: Any) -> Any:
            fallbacks.note("memory", "halved")
            return iter(())

    monkeypatch.setattr(torch.distributed, "all_reduce", all_reduce)
    stage = Stage("update", lambda *a: {}, lambda *a: Outcome(Record()))
    three = Processes(Nobody(), ProcessGroup(0, 3), torch.device("cpu"))
    assert list(three.exchange(stage, 0, {})) == []
    assert fallbacks.drain() == {"stack": 1, "memory": 3}


def test_processes_wait_as_long_as_they_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: False)
    monkeypatch.setattr(
        torch.distributed, "init_process_group", lambda *a, **options: asked.append((a, options))
    )
    join(torch.device("cpu"), 2.5)
    assert asked == [(("gloo",), {"timeout": timedelta(seconds=2.5)})]
