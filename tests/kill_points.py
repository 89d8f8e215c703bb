"""Kills a command at each of its file operations, repeats it, and compares what there is then.

    python tests/kill_points.py run|compare|tune|prepare|reproduce|sites [--every N] [--at NAME]...

Every operation that changes a file or folder of ours (make, open for writing, truncate, force to
the disk, rename, remove) is a point. A process is forked from this one, which has imported
everything already, and gets SIGKILL *before* its n-th operation; where data are forced to the disk,
once more with half of what was written missing. The same command then has to end well, in the same
bits, and leave nothing over. ``tests/test_kill_points.py`` tries a few points of each command.

``sites`` is the server of a run over three sites, whose workers live on and keep what clients keep:
there every step of its messages is a point as well, before they go out, while sites work on them,
and after each answer.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from sites import SIZES, SMALL, draw_sites, site_file

TINY = [
    *("data.train=30", "data.test=12", "split.clients=3", "split.name=iid", "split.gamma="),
    *("train.epochs=1", "engine.threads=1", "engine.device=cpu", "run.rounds=2"),
    *("model.width=8", "model.depth=1", "model.heads=2", "model.patch=16"),
]
COMMANDS = {
    # FedCurv keeps something on its clients.
    "run": ["run", "demo", *TINY, "run.method=fedcurv", "--out", "out", "--quiet"],
    "compare": [
        *("compare", "demo", *TINY, "run.rounds=1", "--methods", "fedavg,fedcurv"),
        *("--seeds", "0", "--out", "out", "--quiet"),
    ],
    "tune": [
        *("tune", "demo", *TINY, "run.rounds=1", "tune.lr=[0.001]", "tune.fedprox.mu=[1.0]"),
        *("--methods", "fedprox", "--out", "out", "--quiet"),
    ],
    "prepare": [
        *("data", "prepare", "table", "images", "image_size=8", "table=labels.csv"),
        *("format=columns", "-q"),
    ],
    "reproduce": ["reproduce", "fig1", "theorem2", "--out", "out", "--quiet"],
    "sites": [],  # no command: Flower would start the server
}
#: Audit events of operations that change something, and which of their arguments are paths.
CHANGES = {
    "os.mkdir": (0,),
    "os.rename": (0, 1),
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.truncate": (0,),
    "os.chmod": (0,),
}


def make_images(place: Path) -> None:
    """What ``data prepare`` reads."""
    folder = place / "images"
    folder.mkdir()
    rng = np.random.default_rng(0)
    for i in range(5):
        pixels = rng.integers(0, 255, (6, 6, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    lines = [f"{i}.png,{i % 2},{(i + 1) % 2},{'test' if i > 3 else 'train'}" for i in range(5)]
    (folder / "labels.csv").write_text("\n".join(["image,cat,dog,split", *lines]) + "\n")


class Counter:
    """Counts changes below a folder, and ends the process before one of them.

    Args:
        root: changes elsewhere do not count.
        deadly: the number of the change that is not made; None lets all of them through.
        torn: whether half of what was written is lost before it is forced to the disk.
    """

    def __init__(self, root: Path, deadly: int | None = None, torn: bool = False) -> None:
        self.root, self.deadly, self.torn = f"{root.resolve()}{os.sep}", deadly, torn
        self.seen: list[str] = []
        self._sizes: dict[str, int] = {}  # of files when they were opened

    def install(self) -> None:
        sys.addaudithook(self._audit)
        force = os.fsync

        def fsync(file: int) -> None:
            self._change("fsync", Path(f"/proc/self/fd/{file}").readlink(), file)
            force(file)

        os.fsync = fsync

    def _audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                self._change("open", path)
        elif event in CHANGES:
            self._change(event, *(arguments[i] for i in CHANGES[event][:1]))

    def moment(self, name: str) -> None:
        """A point that changes no file."""
        self.seen.append(name)
        if len(self.seen) - 1 == self.deadly:
            os.kill(os.getpid(), signal.SIGKILL)

    def _change(self, what: str, path: Any, file: int | None = None) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return
        place = os.path.abspath(os.fsdecode(path))  # noqa: PTH100 (links stay links)
        if not place.startswith(self.root):
            return
        self.seen.append(f"{what} {place.removeprefix(self.root)}")
        if len(self.seen) - 1 == self.deadly:
            if self.torn and file is not None:
                before, now = self._sizes.get(place, 0), os.fstat(file).st_size
                os.ftruncate(file, (before + now) // 2)
            os.kill(os.getpid(), signal.SIGKILL)
        if what == "open" and Path(place).exists():
            self._sizes[place] = Path(place).stat().st_size


class Sockets:
    """A post to workers that outlive the server: its messages are on their way when it dies."""

    def __init__(self, sites: Path, counter: Counter) -> None:
        self.places = {i: sites / name / "worker.sock" for i, name in enumerate(SIZES)}
        self.counter, self.streams = counter, dict[str, socket.socket]()

    def nodes(self) -> dict[int, str]:
        return dict(enumerate(SIZES))

    def push(self, parcels: Any, ttl_s: float) -> dict[str, int]:
        from fedharmony.site.parcel import send

        numbers = {}
        for node, parcel in parcels.items():
            what = f"{parcel.kind} {parcel.words.get('round', '')}".strip()
            self.counter.moment(f"push {what} to {node}")
            stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            stream.connect(str(self.places[node]))
            send(stream, parcel)
            number = f"{what} from {node}, {len(self.streams)}"
            self.streams[number], numbers[number] = stream, node
        return numbers

    def pull(self, numbers: Any) -> dict[str, Any]:
        from fedharmony.site.parcel import receive

        number = min(numbers)
        self.counter.moment(f"wait {number}")
        answer = receive(self.streams[number])
        self.streams[number].close()
        self.counter.moment(f"answer {number}")
        return {number: answer}


def serve_sites(folder: Path) -> list[int]:
    """Three sites with workers, each in a process of its own."""
    from fedharmony.site.parcel import STATUS, Parcel, ask
    from fedharmony.site.settings import load_site
    from fedharmony.site.worker import Worker, serve

    draw_sites(folder)
    children = []
    for name in SIZES:
        file = site_file(folder, name)
        if (child := os.fork()) == 0:
            with (folder / f"{name}.log").open("w") as log:
                os.dup2(log.fileno(), 1)
                os.dup2(log.fileno(), 2)
                serve(Worker(load_site(file)))
        children.append(child)
        while True:
            with contextlib.suppress(Exception):
                ask(folder / name / "worker.sock", Parcel(STATUS), 10.0)
                break
            time.sleep(0.05)
    return children


def run_over_sites(sites: Path, counter: Counter) -> None:
    """The server of a run; FedCurv, whose clients keep something, two of three in a round."""
    from fedharmony.experiments.folder import RunFolder
    from fedharmony.experiments.settings import load_settings
    from fedharmony.flower.roster import Terms
    from fedharmony.flower.server import start

    settings = load_settings("demo", [*SMALL, f"data.path={sites}", "run.method=fedcurv"])
    start(settings, RunFolder(Path("out")), lambda event: None, Sockets(sites, counter), Terms(3))


def warm_up() -> None:
    """Import all that the commands use, so that a fork has it; start no thread."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import torch

    torch.set_num_threads(1)
    import sklearn.datasets

    import fedharmony.cli
    import fedharmony.cli_data
    import fedharmony.data.table
    import fedharmony.experiments.tune
    import fedharmony.flower.server
    import fedharmony.report.page
    import fedharmony.site.worker
    from fedharmony.methods.base import methods
    from fedharmony.paper import output, scale
    from fedharmony.paper.item import all_items

    methods.names()
    assert output
    assert all_items()
    study = replace(scale.DEMO.studies[0], changes=tuple(TINY), gammas=(), shares=(), crowd=None)
    scale.SCALES = {"demo": replace(scale.DEMO, studies=(study,))}
    assert sklearn.datasets
    assert fedharmony.cli


def forked(place: Path, name: str, counter: Counter) -> tuple[int, list[str]]:
    """Run a command in a child, in ``place``: its wait status, and the changes that it made."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.close(read)
            os.chdir(place)
            os.environ["FEDHARMONY_CACHE"] = str(place / "cache")
            code = _command(name, counter, place)
        finally:
            with os.fdopen(write, "w") as pipe:
                json.dump(counter.seen, pipe)
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    _, status = os.waitpid(child, 0)
    return status, json.loads(said) if said else []


def _command(name: str, counter: Counter, place: Path) -> int:
    from fedharmony.cli import main

    sys.argv = ["fedharmony", *COMMANDS[name]]
    text = io.StringIO()
    counter.install()
    try:
        with contextlib.redirect_stdout(text), contextlib.redirect_stderr(text):
            if name == "sites":
                run_over_sites(place.parent / "sites", counter)
            else:
                main()
    except SystemExit as end:
        if end.code:
            (place.parent / "said.txt").write_text(text.getvalue())
            return int(end.code)
    return 0


def snapshot(place: Path) -> dict[str, str]:
    """All files and folders, with what must be the same in them every time."""
    found = {
        path.relative_to(place).as_posix(): _identity(path)
        for path in sorted(place.rglob("*"))
        if path.name != ".lock"  # of the image cache; it stays
    }
    roster = place / "out" / "roster.json"
    if roster.exists():  # with what the sites keep of this run
        number = json.loads(roster.read_bytes())["run"]
        for memory in sorted((place.parent / "sites").glob(f"*/memory/{number}")):
            found |= {f"{memory.parts[-3]} {k}": v for k, v in snapshot(memory).items()}
    return found


def _identity(path: Path) -> str:
    """A file's content, less times and places."""
    if path.is_dir():
        return "folder"
    if path.name == "roster.json":
        return str(json.loads(path.read_text())["sites"])
    if path.name == "events.jsonl":
        events = [json.loads(line) for line in path.read_text().splitlines()]
        return str([(e["event"], e["round"]) for e in events if "round" in e])
    if path.name == "results.json":
        found = json.loads(path.read_text())
        return str([v for k, v in sorted(found.items()) if "seconds" not in k])
    if path.suffix == ".safetensors" and (path.stem == "checkpoint" or path.stem.isdecimal()):
        from fedharmony.records import digest, load_record
        from fedharmony.types import Record

        return digest(Record(load_record(path).groups))
    if path.name in ("environment.json", "report.html") or path.name.startswith("table."):
        return "times"
    return hashlib.sha256(path.read_bytes()).hexdigest()


class Trial:
    """One command: what it does undisturbed, and whether it goes on after a kill."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder = name, folder
        self.sites = serve_sites(folder / "sites") if name == "sites" else []
        place = self._place()
        status, self.changes = forked(place, name, Counter(place))
        assert status == 0, self._said()
        self.whole = snapshot(place)
        shutil.rmtree(place)

    def close(self) -> None:
        """End the workers of sites."""
        for child in self.sites:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    @property
    def points(self) -> list[tuple[int, bool]]:
        """Every change; those that force data to the disk also with half of them."""
        return [
            (i, torn)
            for i, change in enumerate(self.changes)
            for torn in ((False, True) if change.startswith("fsync") else (False,))
        ]

    def named(self, name: str) -> tuple[int, bool]:
        """The first point whose change has ``name`` in it; torn, if that stands before."""
        torn, name = name.startswith("torn "), name.removeprefix("torn ")
        return next(p for p in self.points if p[1] == torn and name in self.changes[p[0]])

    def fault(self, point: tuple[int, bool]) -> str | None:
        """What is wrong after a kill at ``point`` and the same command again, if anything."""
        number, torn = point
        where = f"{self.name}, killed at {number} ({self.changes[number]}{', torn' * torn})"
        place = self._place()
        try:
            status, _ = forked(place, self.name, Counter(place, number, torn))
            if not os.WIFSIGNALED(status):
                return f"{where}: it was not killed"
            status, _ = forked(place, self.name, Counter(place))
            if status != 0:
                return f"{where}: the same command fails: {self._said()}"
            found = snapshot(place)
        finally:
            shutil.rmtree(place)
        keys = sorted({*found, *self.whole})
        other = [k for k in keys if found.get(k) != self.whole.get(k)]
        return f"{where}: {', '.join(other)} differ" if other else None

    def _place(self) -> Path:
        """A fresh folder, always at the same path: settings may name it."""
        place = self.folder / "place"
        place.mkdir()
        if self.name == "prepare":
            make_images(place)
            for file in (place / "images").iterdir():  # the cache is keyed by size and time
                os.utime(file, ns=(0, 0))
        return place

    def _said(self) -> str:
        said = self.folder / "said.txt"
        return said.read_text() if said.exists() else "a crash"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("command", choices=COMMANDS)
    parser.add_argument("--every", type=int, default=1, help="try every n-th point only")
    parser.add_argument(
        "--at", action="append", help="try the first point of this name only (with 'torn ' before)"
    )
    arguments = parser.parse_args()
    warm_up()
    with contextlib.ExitStack() as held, tempfile.TemporaryDirectory() as folder:
        trial = held.enter_context(contextlib.closing(Trial(arguments.command, Path(folder))))
        points = trial.points[:: arguments.every]
        if arguments.at:
            points = [trial.named(name) for name in arguments.at]
        bad = 0
        for fault in map(trial.fault, points):
            if fault is not None:
                bad += 1
                print(fault, flush=True)
    print(f"{arguments.command}: {len(points)} points, {len(points) - bad} held")
    raise SystemExit(bad > 0)


if __name__ == "__main__":
    main()
