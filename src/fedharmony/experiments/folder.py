"""A run on disk: settings, environment, partition, events, checkpoint, results.

Everything is written atomically or appended line by line, in an order that loses nothing: a round's
events come before its checkpoint, and events later than the checkpoint are cut off on resume. One
process writes at a time. A checkpoint names the settings, data, events and client memory that it
belongs to.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import safetensors.torch
import torch

import fedharmony
from fedharmony.config import Tree, override, read_toml, to_toml
from fedharmony.errors import CheckpointError, ConfigError, OccupiedError
from fedharmony.experiments import older
from fedharmony.experiments.binding import Binding, changed
from fedharmony.experiments.settings import KEPT, Layer, Settings, combine, compose
from fedharmony.files import is_ours, sole_writer
from fedharmony.reading import parse_events
from fedharmony.records import load_record, save_record, write_file
from fedharmony.server.federation import Event
from fedharmony.terminal import warn_once
from fedharmony.types import Record, Scalar, Tensors

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class Saved:
    """What a run goes on from: the server's state, and all that belongs to it.

    ``events`` is the log up to there, byte for byte, ``memory`` the seal of what clients keep.
    """

    rounds_done: int
    state: Record
    events: bytes
    bound: Binding
    memory: str


#: What a checkpoint names beside its settings.
NAMED = {"rounds_done", "bound", "memory", "events_bytes", "events_sha256"}


class EventLog:
    """The events of a run, one JSON object per line.

    A checkpoint names the log's length and SHA-256, so that a resumed run goes on with just the
    events that belong to it: what the file holds beside ``kept`` is cut off. What a failed write
    left of a line is overwritten by the next.
    """

    def __init__(self, path: Path, kept: bytes = b"") -> None:
        self._path, self._length, self._sha = path, len(kept), hashlib.sha256(kept)
        if kept or path.exists():
            write_file(path, kept)

    def append(self, event: Event) -> None:
        """Add one event; it is on the disk when this returns."""
        line = json.dumps(jsonable({"time": now(), **event}), allow_nan=False).encode() + b"\n"
        try:
            with self._path.open("ab") as file:
                file.truncate(self._length)
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"Could not write {self._path}: {error.strerror}. Free some space or check the "
                "permissions, then continue with 'fedharmony resume'."
            ) from error
        self._length += len(line)
        self._sha.update(line)

    def mark(self) -> dict[str, Scalar]:
        """How to recognise the log as it is now."""
        return {"events_bytes": self._length, "events_sha256": self._sha.hexdigest()}


@dataclass(frozen=True)
class RunFolder:
    """The files of one run."""

    path: Path

    def __getitem__(self, name: str) -> Path:
        return self.path / name

    @property
    def config(self) -> Path:
        """All settings."""
        return self["config.toml"]

    @property
    def checkpoint(self) -> Path:
        """The state after the last finished round."""
        return self["checkpoint.safetensors"]

    @property
    def events(self) -> Path:
        """One JSON object per line."""
        return self["events.jsonl"]

    def holds_run(self) -> bool:
        """Whether a run has been started here."""
        return self.config.exists()

    def refuse_if_taken(self, settings: Settings) -> None:
        """Never write over a run with other settings, nor into a folder with other files.

        Say what a finished run keeps otherwise than it is asked for now.
        """
        here = self.path
        if self.holds_run():
            if self.outdated or (before := self.open()).sha256() != settings.sha256():
                raise OccupiedError(
                    f"{here} holds a run with other settings, or of an earlier version. Choose "
                    "another folder with --out, or remove that one."
                )
            pairs = {
                name: (getattr(before.run, name), getattr(settings.run, name)) for name in KEPT
            }
            other = [f"run.{name} = {a!r}, not {b!r}" for name, (a, b) in pairs.items() if a != b]
            if other and self["results.json"].exists():
                warn_once(
                    f"The run in {here} is finished and stays as it is: {'; '.join(other)}. Remove "
                    "the folder to have the run repeated."
                )
        elif here.exists() and not (here.is_dir() and all(map(is_ours, here.iterdir()))):
            raise OccupiedError(
                f"{here} exists and is not an empty folder. Choose another with --out."
            )

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Make the folder, and write to it as the only process; see :func:`sole_writer`."""
        make_folder(self.path)
        with sole_writer(self.path):
            yield

    def create(self, settings: Settings) -> None:
        """Write the settings: from now on the folder holds a run, which can be resumed."""
        if self.holds_run():  # another process was faster, or torchrun gave the command again
            raise CheckpointError(
                f"{self.path} already holds a run. Continue it with 'fedharmony resume "
                f"{shlex.quote(str(self.path))}', or choose another folder with --out."
            )
        self.note(settings)

    def note(self, settings: Settings) -> None:
        """Write the settings down."""
        write_file(self.config, to_toml(settings.tree()).encode())

    def open(self) -> Settings:
        """The settings of the run that is already here."""
        if not self.holds_run():
            raise CheckpointError(
                f"{self.path} holds no run (it has no config.toml). Give the folder that "
                "'fedharmony run' printed."
            )
        tree = read_toml(self.config)
        if found := self.outdated:
            words = ", ".join(f"{name} = {value!r}" for name, value in found.items())
            if self.results() is None:
                raise ConfigError(
                    f"The run in {self.path} is not finished, and this version of fedharmony "
                    f"refuses {words}. Finish it with the version that began it, or start a new "
                    "run in another folder."
                )
            warn_once(
                f"An earlier version of fedharmony made the run in {self.path}: {words} mattered "
                "to its training alone, and is passed over now."
            )
            tree = override(tree, [f"{name}=" for name in found])
        return compose(tree)

    @property
    def outdated(self) -> Tree:
        """The settings of the run that this version refuses, by their dotted names."""
        tree, _ = combine([Layer(str(self.config), read_toml(self.config))])  # loads its plug-ins
        return older.outdated(tree)

    def results(self) -> dict[str, Any] | None:
        """The results of a completed run, else None."""
        found = self.read_json("results.json")
        return found if isinstance(found, dict) and found.get("status") == "completed" else None

    def write_json(self, name: str, content: Any) -> None:
        """Write a JSON file; NaN becomes null."""
        text = json.dumps(jsonable(content), indent=1, allow_nan=False)
        write_file(self[name], text.encode())

    def read_json(self, name: str) -> Any:
        """Read a JSON file, or None when it is not there or damaged."""
        try:
            return json.loads(self[name].read_text())
        except (OSError, ValueError):
            return None

    def read_events(self) -> list[Event]:
        """All whole events; a line cut short by a crash is left out."""
        return parse_events(self.events.read_bytes())[0] if self.events.exists() else []

    def refuse_other_material(self, before: Mapping[str, Any], found: Binding) -> None:
        """Refuse to go on with, or to reuse, what was made of other data than are there now."""
        if parts := changed(before, found):
            raise OccupiedError(
                f"The run in {self.path} was made of other data. Changed since: "
                f"{', '.join(parts)}. Put the old data back, or start a new run in another folder."
            )

    def refuse_lost_checkpoint(self) -> None:
        """Refuse to begin again where rounds have been run: the log says so."""
        if any(e["event"] == "start" for e in self.read_events()):
            raise CheckpointError(
                f"The run in {self.path} has been under way, but its checkpoint "
                f"{self.checkpoint.name} is gone. Restore the file from a backup, or start a new "
                "run in another folder."
            )

    def save_state(
        self,
        rounds_done: int,
        state: Record,
        settings: Settings,
        bound: Binding,
        log: EventLog,
        memory: str,
    ) -> None:
        """Checkpoint the server state, and all that it belongs to."""
        scalars: dict[str, Scalar] = {
            "rounds_done": rounds_done,
            "settings": settings.sha256(),
            "bound": json.dumps(bound),
            "memory": memory,
            **log.mark(),
        }
        save_record(self.checkpoint, state.replace(scalars=scalars))

    def load_state(self, settings: Settings) -> Saved:
        """The last checkpoint; what does not belong to it is refused."""
        record = load_record(self.checkpoint)
        found = record.scalars
        hashes = settings.sha256(), older.sha256(read_toml(self.config))
        if found.get("settings") not in hashes:
            raise CheckpointError(
                f"{self.checkpoint} belongs to other settings than {self.config}. Restore the "
                "original config.toml, or start a new run in another folder."
            )
        if not found.keys() >= NAMED:
            raise CheckpointError(
                f"{self.checkpoint} does not say what data it was made of: an earlier version of "
                "fedharmony wrote it. Finish the run with that version, or start a new one in "
                "another folder."
            )
        rounds_done, length = int(found["rounds_done"]), int(found["events_bytes"])
        try:
            events = self.events.read_bytes()[:length] if length else b""
        except OSError as error:
            raise CheckpointError(
                f"{self.events} cannot be read: {error.strerror}. Put it back or check its "
                "permissions, then give the same command again."
            ) from error
        if hashlib.sha256(events).hexdigest() != found["events_sha256"]:
            raise CheckpointError(
                f"{self.events} is not the log that {self.checkpoint.name} was written beside: it "
                "was changed, cut short or replaced. Restore it from a backup, or start a new run "
                "in another folder."
            )
        logged = [e.get("round") for e in parse_events(events)[0] if e["event"] == "round"]
        if logged != list(range(rounds_done)) or rounds_done > settings.run.rounds:
            raise CheckpointError(
                f"{self.checkpoint} claims {rounds_done} of {settings.run.rounds} rounds, its "
                f"event log has {len(logged)}. One of them was changed: restore it from a backup, "
                "or start a new run in another folder."
            )
        bound = json.loads(str(found["bound"]))
        return Saved(rounds_done, record, events, bound, str(found["memory"]))

    def save_tensors(self, name: str, tensors: Tensors) -> None:
        """Write named tensors beside the results."""
        content = {key: t.detach().cpu().contiguous() for key, t in tensors.items()}
        write_file(self[name], safetensors.torch.save(content))


def choose_folder(out: str | Path | None, usual: Path, use: Callable[[Path], T]) -> tuple[Path, T]:
    """``out``, or else the first of ``usual``, ``usual-2``, … that is not occupied.

    ``use`` raises :class:`OccupiedError` for a folder that is; what it returns comes along.
    """
    number, place = 1, usual if out is None else Path(out)
    while True:
        try:
            result = use(place)
            break
        except OccupiedError:
            if out is not None:
                raise
        number += 1
        place = usual.with_name(f"{usual.name}-{number}")
    if number > 1:
        logger.warning("%s is occupied by other settings or data: using %s.", usual, place)
    return place, result


def folder_name(label: str) -> str:
    """The folder of a method, by its display name; a name that leads elsewhere is refused.

    >>> folder_name("fedharmony:a")
    'fedharmony-a'
    """
    name = label.replace(":", "-")
    if name in ("", ".", "..") or any(c in "/\\" or not c.isprintable() for c in name):
        raise ConfigError(
            f"{label!r} cannot name a folder. Choose another run.label: one without slashes and "
            "control characters."
        )
    return name


def make_folder(path: Path) -> None:
    """Create a folder for output, or say why that is not possible."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CheckpointError(
            f"Cannot create the folder {path}: {error.strerror}. Choose a folder you may write to "
            "with --out."
        ) from error


def now() -> str:
    """The time, to the second, with its zone."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def environment(device: torch.device) -> dict[str, Any]:
    """What one needs to know to repeat a run."""
    return {
        "fedharmony": fedharmony.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "processor": platform.machine(),
        "device": str(device),
        "accelerator": torch.cuda.get_device_name(device) if device.type == "cuda" else None,
        "threads": torch.get_num_threads(),
        "command": shlex.join(["fedharmony", *sys.argv[1:]]),
        "started": now(),
    }


def jsonable(value: Any) -> Any:
    """Plain JSON values: arrays and tensors become lists, NaN and infinities null."""
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(v) for v in value]
    if isinstance(value, np.ndarray | torch.Tensor | np.generic):
        return jsonable(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
