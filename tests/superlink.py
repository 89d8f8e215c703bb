"""A real federation for tests: a SuperLink with TLS and keys, workers and SuperNodes."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from fedharmony.flower.link import Link, program
from fedharmony.site.keys import make_key
from sites import SIZES, draw_sites, site_file


def free_port() -> int:
    with socket.socket() as stream:
        stream.bind(("127.0.0.1", 0))
        return int(stream.getsockname()[1])


def wait_for(found: Callable[[], Any], seconds: float = 300.0) -> Any:
    """What a function gives, as soon as it gives something."""
    until = time.monotonic() + seconds
    while not (value := found()):
        assert time.monotonic() < until, "it did not come about"
        time.sleep(0.1)
    return value


@dataclass
class Federation:
    """Three sites at a SuperLink, on ports and in folders of their own.

    Attributes:
        folder: of everything.
        link: the SuperLink.
        changes: settings of a run on the sites' images.
        port: of the gate.
        processes: workers and SuperNodes by name, in groups of their own.
    """

    folder: Path
    link: Link
    changes: list[str]
    port: int
    inner: int
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def start(self, name: str, *words: str, user: int | None = None) -> subprocess.Popen[bytes]:
        home = {"FLWR_HOME": str(self.folder / "nodes" / name)}
        with (self.folder / f"{name}.log").open("ab") as log:
            self.processes[name] = process = subprocess.Popen(
                words,
                env={**self.link.environment, **home},
                stdout=log,
                stderr=log,
                start_new_session=True,
                user=user,
            )
        return process

    def start_worker(self, name: str, file: Path | None = None) -> subprocess.Popen[bytes]:
        file = file or site_file(self.folder / "data", name)
        serve = (sys.executable, "-m", "fedharmony", "site", "serve", str(file))
        return self.start(f"worker-{name}", *serve)

    def start_node(
        self, name: str, key: Path | None = None, flowers_own: bool = False
    ) -> subprocess.Popen[bytes]:
        """The node of a site: our relay, or Flower's own SuperNode."""
        gate, ca = f"127.0.0.1:{self.port}", str(self.link.certificates / "ca.crt")
        private = str(key or self.folder / f"{name}.key")
        socket = self.folder / "data" / name / "worker.sock"
        if flowers_own:
            return self.start(
                f"node-{name}",
                *(program("flower-supernode"), "--superlink", gate, "--root-certificates", ca),
                *("--auth-supernode-private-key", private, "--port", str(free_port())),
                *("--node-config", f'socket="{socket}"'),
            )
        relay = (sys.executable, "-m", "fedharmony", "site", "relay", "--superlink", gate)
        return self.start(
            f"node-{name}", *relay, "--ca", ca, "--key", private, "--socket", str(socket)
        )

    def end(self, name: str, kind: signal.Signals = signal.SIGTERM) -> None:
        """End a process with all that it started."""
        process = self.processes.pop(name)
        try:
            os.killpg(process.pid, kind)
            process.wait(30)
        except ProcessLookupError:
            process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@contextmanager
def federation(folder: Path, flowers_own: Collection[str] = ()) -> Iterator[Federation]:
    """A federation that is up, and gone afterwards; some sites with Flower's own SuperNode."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDHARMONY_CACHE", str(folder / "cache"))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
        patch.setenv("OMP_NUM_THREADS", "1")
        changes = draw_sites(folder / "data")
        link = Link(folder / "home")
        link.certify(["127.0.0.1"])
        made = Federation(folder, link, changes, free_port(), free_port())
        try:
            link.up("127.0.0.1", made.port, made.inner)
            for name in SIZES:
                link.register(name, make_key(folder / f"{name}.key"))
                made.start_worker(name)
                made.start_node(name, flowers_own=name in flowers_own)
            yield made
        finally:
            for name in list(made.processes):
                made.end(name)
            link.down()
