"""The operator's side of Flower: a SuperLink with certificates and a database, and runs on it.

Everything of a federation is in one folder: certificates, the SuperLink's database, log and process
id, and one folder per order. Flower's own commands do the work; they are told to send nothing home
and to install nothing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedharmony import stopping
from fedharmony.config import to_toml
from fedharmony.errors import CheckpointError, ClientLimitError, ConfigError, TransportError, shown
from fedharmony.experiments.folder import RunFolder
from fedharmony.reading import parse_events
from fedharmony.records import write_file
from fedharmony.site.keys import make_certificates
from fedharmony.site.settings import site_name

#: What Flower calls our SuperLink in its own settings.
NAME = "federation"
#: Seconds that a SuperLink has to start, and to end.
START_S, END_S = 60.0, 30.0
#: Seconds between looks at a run, and between questions to Flower, which cost a process each.
LOOK_S, ASK_S = 0.5, 20.0
#: The file of an order that says which process carries it out.
SERVER = "server.json"

APP = """\
[project]
name = "fedharmony-run"
version = "1.0.0"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "fedharmony"

[tool.flwr.app.components]
serverapp = "fedharmony.flower.server_app:app"
clientapp = "fedharmony.flower.client_app:app"

[tool.flwr.app.config]
"""


@dataclass(frozen=True)
class Link:
    """A SuperLink and its folder."""

    home: Path

    @property
    def certificates(self) -> Path:
        """The folder of certificates; ``ca.crt`` of it goes to every site."""
        return self.home / "certs"

    @property
    def _about(self) -> dict[str, Any]:
        return _read_json(self.home / "link.json")

    @property
    def _started(self) -> list[tuple[int, str]]:
        """The SuperLink, its gate, and what starts servers: each process, and when it began."""
        return [(pid, since) for pid, since in self._about.get("processes", [])]

    @property
    def pid(self) -> int | None:
        """The process of the SuperLink, if it runs."""
        return next((pid for pid, since in self._started[:1] if began(pid) == since), None)

    @property
    def address(self) -> str:
        """Host and port that sites use."""
        if self.pid is None:
            raise TransportError(
                f"No SuperLink runs in {self.home}. Start it with 'fedharmony flower up'."
            )
        return str(self._about["address"])

    @property
    def environment(self) -> dict[str, str]:
        """Variables of Flower's commands."""
        programs = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
        return {**os.environ, "FLWR_HOME": str(self.home / "flwr"), "PATH": programs}

    def certify(self, hosts: Sequence[str]) -> None:
        """Make the certificates of the SuperLink, in a folder of the operator's alone."""
        self.home.mkdir(mode=0o700, parents=True, exist_ok=True)
        make_certificates(self.certificates, hosts)

    def up(self, host: str, port: int, control_port: int) -> None:
        """Start the SuperLink on the loopback address, and a gate for sites; both stay."""
        if self.pid is not None:
            raise TransportError(f"The SuperLink of {self.home} runs already, at {self.address}.")
        self.down()  # a gate whose SuperLink is gone
        if not (self.certificates / "ca.crt").exists():
            raise ConfigError(
                f"There are no certificates in {self.certificates}. Make them first: 'fedharmony "
                "flower certs --host NAME'."
            )
        certificates = {"ca-certfile": "ca.crt", "certfile": "server.pem", "keyfile": "server.key"}
        files = [w for k, f in certificates.items() for w in (f"--ssl-{k}", self.certificates / f)]
        inner = f"127.0.0.1:{control_port}"
        superlink = [
            *(program("flower-superlink"), "--host", "127.0.0.1", "--port", control_port, *files),
            *("--enable-supernode-auth", "--database", self.home / "state.db"),
            "--disable-runtime-dependency-installation",
        ]
        gate = [sys.executable, "-m", "fedharmony.flower.gate", host, port, control_port]
        settings = {"address": inner, "root-certificates": str(self.certificates / "ca.crt")}
        (self.home / "flwr").mkdir(exist_ok=True)
        flower = to_toml({"superlink": {NAME: settings}})
        write_file(self.home / "flwr" / "config.toml", flower.encode())
        started = [self._start("superlink", superlink)]
        started.append(self._start("gate", [*gate, self.certificates]))
        until = time.monotonic() + START_S
        while True:
            # What the SuperLink starts outlives it when it is killed, with the servers of runs.
            family = [*started, *_children(started[0])]
            about = {"processes": [(p, began(p)) for p in family], "address": f"{host}:{port}"}
            write_file(self.home / "link.json", json.dumps(about).encode())
            answers = _answers("127.0.0.1", control_port) and _answers(host, port)
            if answers and len(family) > len(started):
                return
            if not all(map(_alive, started)) or time.monotonic() > until:
                self.down()
                raise TransportError(
                    f"The SuperLink did not start at {inner}, or its gate at {host}:{port}. The "
                    f"logs say why: {self.home}/superlink.log and gate.log."
                )
            with stopping.interruptible():
                time.sleep(LOOK_S)

    def _start(self, name: str, command: Sequence[object]) -> int:
        """A process that outlives this one, in a group of its own, with a log; its number."""
        words, append = [str(word) for word in command], os.O_WRONLY | os.O_CREAT | os.O_APPEND
        files = [
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(self.home / f"{name}.log"), append, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ]
        return os.posix_spawn(words[0], words, self.environment, file_actions=files, setsid=True)

    def down(self) -> bool:
        """End what :meth:`up` started, with all that it started itself; False where none ran."""
        running = [pid for pid, since in self._started if began(pid) == since]
        for pid in running:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGTERM)
        until = time.monotonic() + END_S
        while any(map(_alive, running)) and time.monotonic() < until:
            time.sleep(0.1)
        for pid in running:
            with suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
        (self.home / "link.json").unlink(missing_ok=True)
        return bool(running)

    def flwr(self, *words: str | Path) -> dict[str, Any]:
        """What a command of Flower's answers, as JSON."""
        command = [program("flwr"), *map(str, words), "--format", "json"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True)
        try:
            found = json.loads(done.stdout[done.stdout.index("{") :])
        except ValueError:
            found = {"success": False, "error-message": done.stderr or done.stdout}
        if not found.get("success"):
            said = " ".join(str(found.get("error-message", "no reason given")).split())
            raise TransportError(f"'flwr {' '.join(map(str, words[:2]))}' failed: {said[:500]}")
        return dict(found)

    def register(self, name: str, key: Path) -> None:
        """Let a site join: its name, and its public key."""
        try:
            site_name(name)
        except ValueError as error:
            raise ConfigError(f"The site cannot be called {shown(name)}: {error}.") from None
        _ = self.address
        found = self.flwr("supernode", "register", key.absolute(), NAME, "--name", name)
        names = {**self._names(), str(found["node-id"]): name}
        write_file(self.home / "sites.json", json.dumps(names, indent=1).encode())

    def sites(self) -> list[tuple[str, str, str]]:
        """The registered sites: name, whether it is online, and since when or until when it was."""
        _ = self.address
        names, found = self._names(), self.flwr("supernode", "list", NAME).get("nodes", [])
        return sorted(
            (names.get(node["node-id"], node["node-id"]), node["status"], node["online-at"])
            for node in found
        )

    def _names(self) -> dict[str, str]:
        """The names of the nodes that were registered here; Flower lists numbers alone."""
        return _read_json(self.home / "sites.json")

    # -- runs --------------------------------------------------------------------------------------

    def order(
        self,
        settings: dict[str, Any] | None,
        out: Path,
        sites: int,
        wait_s: float,
        limit_s: float,
        least: int | None = None,
    ) -> Ordered:
        """Have the SuperLink run settings, or resume the run of a folder where there are none."""
        _ = self.address
        folder = self.home / "orders" / uuid.uuid4().hex[:12]
        folder.mkdir(parents=True)
        config = folder / "settings.toml"
        if settings is not None:
            write_file(config, to_toml(settings).encode())
        order = {
            "config": str(config.absolute()) if settings is not None else "",
            "out": str(out.absolute()),
            "outcome": str((folder / "outcome.json").absolute()),
            "sites": sites,
            # A round with one site of several would make that site's model the federation's.
            "least": min(2, sites) if least is None else least,
            "registered": ",".join(sorted(self._names().values())),
            "wait-s": float(wait_s),
            "limit-s": float(limit_s),
        }
        app = folder / "app"
        app.mkdir()
        write_file(app / "pyproject.toml", (APP + to_toml(order)).encode())
        number = str(self.flwr("run", app, NAME)["run-id"])
        return Ordered(self, number, RunFolder(out), folder / "outcome.json")


@dataclass(frozen=True)
class Ordered:
    """A run that a SuperLink carries out."""

    link: Link
    number: str
    folder: RunFolder
    outcome: Path

    def follow(self, observe: Callable[[dict[str, Any]], None]) -> None:
        """Tell the run's events as they come, until it ends; a failure is raised here."""
        seen = len(self.folder.events.read_bytes()) if self.folder.events.exists() else 0
        asked = time.monotonic()
        while True:
            alive = self._server_lives()
            ended = self.outcome.exists()
            seen = self._tell(seen, observe)
            if ended:
                break
            if alive is False:
                self._refuse_dead("it was killed")
            if self.link.pid is None:
                raise TransportError(
                    f"The SuperLink of {self.link.home} has ended. Finished rounds are kept; start "
                    f"it again with 'fedharmony flower up', and go on with 'fedharmony flower "
                    f"resume {self.folder.path}'."
                )
            if alive is None and time.monotonic() - asked > ASK_S:
                self._refuse_never_begun()
                asked = time.monotonic()
            with stopping.interruptible():
                time.sleep(LOOK_S)
        found = json.loads(self.outcome.read_bytes())
        if found["status"] != "completed":
            kinds = {"ClientLimitError": ClientLimitError, "ConfigError": ConfigError}
            raise kinds.get(found.get("kind", ""), CheckpointError)(found["error"])

    def stop(self) -> None:
        """Have the SuperLink end the run; finished rounds are kept."""
        self.link.flwr("stop", self.number, NAME)

    def _tell(self, seen: int, observe: Callable[[dict[str, Any]], None]) -> int:
        """Tell what the log has beyond ``seen`` bytes; how many it has now, in whole lines."""
        log = self.folder.events.read_bytes() if self.folder.events.exists() else b""
        seen = min(seen, len(log))  # a resumed run cuts what came after its checkpoint
        whole = log[seen : log.rfind(b"\n") + 1]
        for event in parse_events(whole)[0]:
            observe(event)
        return seen + len(whole)

    def _server_lives(self) -> bool | None:
        """Whether the server's process runs; None before it began."""
        found = _read_json(self.outcome.with_name(SERVER))
        return began(found["pid"]) == found["began"] if found else None

    def _refuse_never_begun(self) -> None:
        """Find out about a server that Flower could not start."""
        runs = self.link.flwr("list", NAME, "--run-id", self.number).get("runs", [])
        status = str(runs[0].get("status", "")) if runs else "unknown"
        if status.startswith("finished") and not self.outcome.exists():
            self._refuse_dead(status)

    def _refuse_dead(self, why: str) -> None:
        raise CheckpointError(
            f"The server of this run ended without a word ({why}); the log of the SuperLink may "
            f"say more: {self.link.home / 'superlink.log'}. Finished rounds are kept; go on with "
            f"'fedharmony flower resume {self.folder.path}'."
        )


def program(name: str) -> str:
    """A program of Flower's, beside this Python or on the path."""
    beside = Path(sys.executable).parent / name
    found = str(beside) if beside.exists() else shutil.which(name)
    if found is None:
        raise ConfigError(
            f"There is no program {name}: Flower is not installed. Install it with "
            "pip install 'fedharmony[flower]'."
        )
    return found


def _read_json(file: Path) -> dict[str, Any]:
    """What a file of ours says; nothing where there is none, or where it is broken."""
    try:
        return dict(json.loads(file.read_bytes()))
    except (OSError, ValueError):
        return {}


def _alive(pid: int) -> bool:
    """Whether a process runs; one of ours that has ended is put away."""
    with suppress(ChildProcessError, OSError):
        if os.waitpid(pid, os.WNOHANG)[0]:
            return False
    return began(pid) is not None


def _children(pid: int) -> list[int]:
    """The processes that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if stat.read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(int(stat.parent.name))
    return found


def began(pid: int) -> str | None:
    """When a process began, which tells it from a later one of the same number."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] == "Z" else fields[19]


def _answers(host: str, port: int) -> bool:
    with suppress(OSError), socket.create_connection((host, port), timeout=1):
        return True
    return False
