"""Trackers: what reaches them, that they cannot harm a run, and what the real programs write."""

from __future__ import annotations

import importlib.util
import json
import logging
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedharmony.errors import ConfigError
from fedharmony.experiments.compare import plan, rehearse
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.run import start
from fedharmony.experiments.settings import load_settings
from fedharmony.experiments.trackers import Tracker, trackers
from fedharmony.experiments.trackers.base import Pixels, Subject, Tracking

SMALL = [
    *("data.train=60", "data.test=30", "split.clients=3", "split.min_size=5", "run.rounds=2"),
    *("train.epochs=1", "model.width=16", "model.depth=1", "model.heads=2", "engine.device=cpu"),
    "engine.threads=1",
]
EVENTS = [
    {"event": "start", "rounds": 2},
    {"event": "round", "round": 0, "train_loss": 0.5, "weights": {"0": 1.0}, "cohort": [1]},
    {"event": "evaluate", "round": 0, "metrics": {"mAP": 0.25, "CP": None}, "seconds": 1.0},
    {"event": "round", "round": 1, "train_loss": float("nan"), "log": {"alpha": 0.1}},
    {"event": "evaluate", "round": 1, "metrics": {"mAP": 0.5}, "seconds": 1.0},
    {"event": "finish", "status": "completed"},
]
RESULTS = {"label": "fedavg", "metrics": {"mAP": 0.5}, "baselines": {"prevalence": {"mAP": 0.1}}}


class Notes(Tracker):
    """Writes down what it is told."""

    packages = ("json",)

    def __init__(self, subject: Subject) -> None:
        self.subject, self.calls = subject, list[Any]()
        opened.append(self)

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append((step, dict(values)))

    def table(self, rows: Sequence[Sequence[str]], metrics: Mapping[str, float]) -> None:
        self.calls.append((rows, metrics))

    def pictures(self, pictures: Mapping[str, Pixels]) -> None:
        self.calls.append({name: p.shape for name, p in pictures.items()})

    def close(self, completed: bool) -> None:
        self.calls.append(completed)


class Broken(Notes):
    """Fails when it is first told something."""

    def numbers(self, step: int, values: Mapping[str, float]) -> None:
        self.calls.append(step)
        raise OSError("disk full")


class Stillborn(Notes):
    """Fails at once."""

    def __init__(self, subject: Subject) -> None:
        raise RuntimeError("no server")


opened: list[Notes] = []


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> None:
    trackers.names()
    for name, tracker in (("notes", Notes), ("broken", Broken), ("stillborn", Stillborn)):
        monkeypatch.setitem(trackers._items, name, tracker)
    opened.clear()


def subject(folder: Path, first: int = 0) -> Subject:
    folder.mkdir(exist_ok=True)
    return Subject(folder, "fedavg seed 0", {"train.lr": 0.1, "run.method": "fedavg"}, first)


def track(names: Sequence[str], about: Subject, events: Sequence[Any] = EVENTS) -> None:
    tracking = Tracking(names, about)
    for event in events:
        tracking(event)
    if events and events[-1].get("status") == "completed":
        matrices = {"learned": np.eye(3), "true": np.eye(300), "other": np.eye(3)}
        tracking.finish(RESULTS, matrices)


def test_what_a_tracker_is_told(tmp_path: Path) -> None:
    """Numbers of rounds and evaluations, the table, small matrices; rounds count from 1."""
    track(["notes"], subject(tmp_path / "run"))
    (found,) = opened
    assert found.calls == [
        (1, {"round/train_loss": 0.5}),
        (1, {"metrics/mAP": 0.25, "evaluate/seconds": 1.0}),
        (2, {"log/alpha": 0.1}),
        (2, {"metrics/mAP": 0.5, "evaluate/seconds": 1.0}),
        ([["method", "mAP"], ["fedavg", "50.0"], ["prevalence", "10.0"]], {"mAP": 0.5}),
        {"learned": (24, 24, 3)},
        True,
    ]


def test_a_run_that_is_stopped_closes_its_trackers(tmp_path: Path) -> None:
    ending = {"event": "finish", "status": "interrupted", "reason": "Ctrl-C"}
    track(["notes"], subject(tmp_path / "run"), [*EVENTS[:2], ending, EVENTS[3]])
    assert opened[0].calls[1:] == [False]


def test_a_tracker_that_fails_does_not_cost_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each failure is told once; the other trackers are fed on, and results are the same."""
    settings = load_settings("demo", [*SMALL, "run.method=fedavg"])
    alone = start(settings, RunFolder(tmp_path / "alone"), lambda event: None)
    tracked = load_settings(
        "demo", [*SMALL, "run.method=fedavg", "run.track=['stillborn', 'broken', 'notes']"]
    )
    assert tracked.sha256() == settings.sha256()
    with caplog.at_level(logging.WARNING, logger="fedharmony.experiments.trackers"):
        found = start(tracked, RunFolder(tmp_path / "tracked"), lambda event: None)
    told = [r.getMessage() for r in caplog.records if "tracker" in r.getMessage()]
    assert [text.split(":")[0] for text in told] == [
        "The tracker stillborn failed and is left out from now on",
        "The tracker broken failed and is left out from now on",
    ]
    assert "OSError: disk full" in told[1]
    assert found["state_sha256"] == alone["state_sha256"]
    broken, notes = opened
    assert broken.calls == [1]
    assert notes.calls[-1] is True
    assert {call[0] for call in notes.calls[:4]} == {1, 2}
    assert notes.subject.settings["train.lr"] == settings.train.lr
    assert set(notes.calls[-2]) == {"true", "learned", "planted"}


def test_trackers_are_refused_before_work_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"no tracker 'tensorbord'. Did you mean 'tensorboard'"):
        load_settings("demo", ["run.track=['tensorbord']"])
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda n: None if n == "wandb" else find(n))
    settings = load_settings("demo", [*SMALL, "run.track=['wandb']"])
    advice = r"wandb cannot be imported. Use pip install 'fedharmony\[wandb\]'"
    with pytest.raises(ConfigError, match=advice):
        start(settings, RunFolder(tmp_path / "run"), lambda event: None)
    with pytest.raises(ConfigError, match=advice):
        rehearse(plan(settings, ["fedavg"], [0], tmp_path / "c"), lambda event: None)
    assert not list(tmp_path.iterdir())


# -- the real programs ----------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    """Round 2 is repeated after a kill: the later numbers count."""
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    lost = {"event": "evaluate", "round": 1, "metrics": {"mAP": 0.9}}
    track(["tensorboard"], subject(tmp_path / "run"), [*EVENTS[:3], lost])
    track(["tensorboard"], subject(tmp_path / "run", first=1), EVENTS[3:])
    found = EventAccumulator(str(tmp_path / "run" / "tracking" / "tensorboard"))
    found.Reload()
    assert [(e.step, e.value) for e in found.Scalars("metrics/mAP")] == [(1, 0.25), (2, 0.5)]
    assert found.Scalars("log/alpha")[0].value == pytest.approx(0.1)
    assert found.Images("learned")[0].width == 24
    text = found.Tensors("results/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "| fedavg | 50.0 |" in text
    settings = found.Tensors("settings/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "train.lr = 0.1" in settings


@pytest.mark.filterwarnings("ignore")
def test_mlflow_reads_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on is one run of MLflow."""
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("alembic")
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    track(["mlflow"], subject(tmp_path / "run"), [*EVENTS[:3], {**EVENTS[5], "status": "failed"}])
    track(["mlflow"], subject(tmp_path / "run", first=1), EVENTS[3:])
    place = tmp_path / "run" / "tracking" / "mlflow"
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{place / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("fedharmony")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "fedavg seed 0"
    assert run.data.params == {"train.lr": "0.1", "run.method": "fedavg"}
    history = client.get_metric_history(run.info.run_id, "metrics/mAP")
    assert [(m.step, m.value) for m in history] == [(1, 0.25), (2, 0.5)]
    assert run.data.metrics["final/mAP"] == 0.5
    files = {path.name for path in place.rglob("artifacts/*")}
    assert files == {"results.md", "learned.png"}


def wandb_records(file: Path) -> Iterator[bytes]:
    """The records of a file that wandb wrote: a log in the format of LevelDB behind seven bytes.

    A block of 32 KiB holds pieces: checksum (4 bytes), length (2), kind (1: whole, 2: first,
    3: middle, 4: last piece), content. Fewer than seven bytes at the end of a block are padding.
    """
    content, at, parts = file.read_bytes(), 7, b""
    assert content.startswith(b":W&B")
    while at + 7 <= len(content):
        if (room := 32768 - at % 32768) < 7:
            at += room
            continue
        length, kind = struct.unpack_from("<HB", content, at + 4)
        parts += content[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield parts
            parts = b""


@pytest.mark.filterwarnings("ignore")
def test_wandb_writes_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    from wandb.proto import wandb_internal_pb2 as protocol

    for name in ("WANDB_MODE", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    track(["wandb"], subject(tmp_path / "run"))
    (file,) = (tmp_path / "run" / "tracking" / "wandb").glob("offline-run-*/*.wandb")
    until, found = time.monotonic() + 60, list[Any]()
    while not any(record.HasField("exit") for record in found):  # wandb's own process writes
        assert time.monotonic() < until
        found = [protocol.Record.FromString(data) for data in wandb_records(file)]
    names = {record.run.display_name for record in found if record.HasField("run")}
    rows = [
        {"/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]
    assert names == {"fedavg seed 0"}
    assert [row["metrics/mAP"] for row in rows] == [0.25, 0.5]
    assert [row["_step"] for row in rows] == [1, 2]
    assert rows[1]["results/nrows"] == 2
    assert rows[1]["learned/width"] == 24
