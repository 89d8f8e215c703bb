"""Flower itself: messages as it carries them, and a real SuperLink with three SuperNodes.

Skipped where Flower is not installed. The real federation takes minutes; it runs where
FEDHARMONY_FLOWER=1 is set, as in CI.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, RecordDict

from fedharmony.errors import ClientLimitError, TransportError
from fedharmony.experiments import run
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.flower.link import Link, program
from fedharmony.flower.wire import content_of, parcel_of
from fedharmony.site.keys import make_key
from fedharmony.site.parcel import Parcel
from sites import SIZES, draw_sites, site_file

slow = pytest.mark.skipif(
    os.environ.get("FEDHARMONY_FLOWER") != "1", reason="takes minutes; set FEDHARMONY_FLOWER=1"
)
METHODS = ("fedavg", "fedharmony", "fedcurv", "spherefed", "fedrdn")


def test_a_parcel_is_one_array_per_group() -> None:
    parcel = Parcel("stage", {"round": 1}, {"params": b"abc", "correlation": b""})
    content = content_of(parcel)
    assert parcel_of(content) == parcel
    (arrays,) = content.array_records.values()
    assert {name: array.data for name, array in arrays.items()} == dict(parcel.parts)


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"about": ConfigRecord({"kind": "stage", "words": "{}"})}),
        RecordDict({"about": ConfigRecord({"kind": "stage", "words": "no JSON"})}),
    ],
)
def test_other_messages_are_no_parcels(content: RecordDict) -> None:
    with pytest.raises(TransportError, match="no parcel"):
        parcel_of(content)


def test_the_relay_needs_no_torch() -> None:
    code = "import sys, fedharmony.flower.client_app; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- a real federation ----------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as stream:
        stream.bind(("127.0.0.1", 0))
        return int(stream.getsockname()[1])


class Processes:
    """Processes of a test, in groups of their own; none is left behind."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment
        self.all: list[subprocess.Popen[bytes]] = []

    def start(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                words, env=self.environment, stdout=log, stderr=log, start_new_session=True
            )
        self.all.append(process)
        return process

    def end(self) -> None:
        for process in self.all:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.all:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A SuperLink with TLS and keys, three workers and three SuperNodes, on ports of its own."""
    folder = tmp_path_factory.mktemp("flower")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDHARMONY_CACHE", str(folder / "cache"))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("OMP_NUM_THREADS", "1")
        changes = draw_sites(folder / "data")
        link, port = Link(folder / "home"), free_port()
        link.certify(["127.0.0.1"])
        link.up("127.0.0.1", port, free_port())
        nodes = {**link.environment, "FLWR_HOME": str(folder / "nodes")}
        processes = Processes(folder, nodes)
        try:
            for name in SIZES:
                key = folder / f"{name}.key"
                link.register(name, make_key(key))
                file = site_file(folder / "data", name)
                processes.start(
                    f"worker-{name}", sys.executable, "-m", "fedharmony", "site", "serve", str(file)
                )
                processes.start(
                    f"node-{name}",
                    *(program("flower-supernode"), "--superlink", f"127.0.0.1:{port}"),
                    *("--root-certificates", str(link.certificates / "ca.crt")),
                    *("--auth-supernode-private-key", str(key), "--port", str(free_port())),
                    *("--node-config", f'socket="{file.parent / "worker.sock"}"'),
                )
            yield folder, link, changes, processes
        finally:
            processes.end()
            link.down()


@slow
@pytest.mark.parametrize("method", METHODS)
def test_a_superlink_and_three_supernodes_give_the_bits_of_the_simulator(
    federation: Any, tmp_path: Path, method: str
) -> None:
    _, link, changes, _ = federation
    settings = load_settings("demo", [*changes, f"run.method={method}", "run.rounds=2"])
    expected = run.start(settings, RunFolder(tmp_path / "simulated"), lambda event: None)
    events: list[Any] = []
    link.order(settings.tree(), tmp_path / "run", 3, 120.0, 120.0).follow(events.append)
    found = json.loads((tmp_path / "run" / "results.json").read_bytes())
    same = ("state_sha256", "metrics", "structure", "bytes_up", "bytes_down")
    assert {k: found[k] for k in same} == {k: expected[k] for k in same}
    assert [e["round"] for e in events if e["event"] == "round"] == [0, 1]


@slow
def test_a_site_with_the_key_of_another_is_refused(federation: Any, tmp_path: Path) -> None:
    """The SuperNode of ben reaches a worker that says it is eve."""
    folder, link, changes, processes = federation
    file = site_file(folder / "data", "ben")
    worker = next(p for p in processes.all if str(file) in p.args)
    worker.terminate()
    worker.wait(30)
    eve = file.with_name("eve.toml")
    eve.write_text(file.read_text().replace('name = "ben"', 'name = "eve"'))
    serve = (sys.executable, "-m", "fedharmony", "site", "serve")
    impostor = processes.start("eve", *serve, str(eve))
    settings = load_settings("demo", changes)
    ordered = link.order(settings.tree(), tmp_path / "run", 3, 60.0, 60.0)
    with pytest.raises(ClientLimitError, match="site ben calls itself 'eve'"):
        ordered.follow(lambda event: None)
    assert not (tmp_path / "run").exists()
    impostor.terminate()
    impostor.wait(30)
