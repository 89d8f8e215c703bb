"""A run on disk: settings, environment, partition, events, checkpoint, results.

Everything is written atomically or appended line by line, in an order that loses nothing: a round's
events come before its checkpoint, and events later than the checkpoint are cut off on resume.
"""

from __future__ import annotations

import json
import math
import os
import platform
import shlex
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch

import fedharmony
from fedharmony.config import read_toml, to_toml
from fedharmony.engine.checkpoint import load_record, save_record, write_file
from fedharmony.engine.federation import Event
from fedharmony.errors import CheckpointError
from fedharmony.experiments.settings import Settings, compose
from fedharmony.types import Record, Scalar, Tensors


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

    def refuse_if_taken(self) -> None:
        """Never write over another run, nor into a folder with other files."""
        if self.holds_run():
            raise CheckpointError(
                f"{self.path} already holds a run. Continue it with 'fedharmony resume "
                f"{shlex.quote(str(self.path))}', or choose another folder with --out."
            )
        if self.path.exists() and (not self.path.is_dir() or any(self.path.iterdir())):
            raise CheckpointError(
                f"{self.path} exists and is not an empty folder. Choose another with --out."
            )

    def create(self, settings: Settings, device: torch.device) -> None:
        """Make the folder and write what is known before the first round."""
        self.refuse_if_taken()
        make_folder(self.path)
        self.write_json("environment.json", environment(device))
        # The settings come last: a folder holds a run once they are there.
        write_file(self.config, to_toml(settings.tree()).encode())

    def open(self) -> Settings:
        """The settings of the run that is already here."""
        if not self.holds_run():
            raise CheckpointError(
                f"{self.path} holds no run (it has no config.toml). Give the folder that "
                "'fedharmony run' printed."
            )
        return compose(read_toml(self.config))

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

    def append(self, event: Event) -> None:
        """Add one event; it is on the disk when this returns."""
        line = json.dumps(jsonable({"time": now(), **event}), allow_nan=False) + "\n"
        try:
            with self.events.open("a", encoding="utf-8") as file:
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"Could not write {self.events}: {error.strerror}. Free some space or check the "
                "permissions, then continue with 'fedharmony resume'."
            ) from error

    def read_events(self) -> list[Event]:
        """All whole events; a line cut short by a crash is left out."""
        events = []
        if self.events.exists():
            for line in self.events.read_text(encoding="utf-8").splitlines():
                try:
                    events.append(json.loads(line))
                except ValueError:
                    continue
        return events

    def cut_events(self, first_round: int) -> None:
        """Forget events of rounds that will be run again, and how the run ended before."""
        kept = [
            e
            for e in self.read_events()
            if e["event"] != "finish" and e.get("round", -1) < first_round
        ]
        text = "".join(json.dumps(e) + "\n" for e in kept)
        write_file(self.events, text.encode())

    def save_state(self, rounds_done: int, state: Record, settings: Settings) -> None:
        """Checkpoint the server state."""
        scalars: dict[str, Scalar] = {
            "rounds_done": rounds_done,
            "settings": settings.sha256(),
        }
        save_record(self.checkpoint, state.replace(scalars=scalars))

    def load_state(self, settings: Settings) -> tuple[int, Record]:
        """The rounds done and the state after them."""
        record = load_record(self.checkpoint)
        if record.scalars.get("settings") != settings.sha256():
            raise CheckpointError(
                f"{self.checkpoint} belongs to other settings than {self.config}. Restore the "
                "original config.toml, or start a new run in another folder."
            )
        return int(record.scalars["rounds_done"]), record

    def save_tensors(self, name: str, tensors: Tensors) -> None:
        """Write named tensors beside the results."""
        content = {key: t.detach().cpu().contiguous() for key, t in tensors.items()}
        write_file(self[name], safetensors.torch.save(content))


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
