"""A run is bound to what it was made of: data, partition, events, client memory, threads."""

from __future__ import annotations

import csv
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fake_run import write_fake_run
from fedharmony import stopping
from fedharmony.data.base import DataSet, LabelledImages, SomeImages, TensorImages, datasets
from fedharmony.engine.memory import ClientMemory
from fedharmony.errors import CheckpointError, ConfigError
from fedharmony.experiments import build, compare, run
from fedharmony.experiments.binding import bind, changed
from fedharmony.experiments.folder import RunFolder, folder_name
from fedharmony.experiments.scores import load_examples
from fedharmony.experiments.settings import Settings, load_settings
from fedharmony.partition.base import Partition
from fedharmony.records import load_record, save_record
from fedharmony.report.load import load, load_run
from test_cli import call, refuse, results, succeed
from toy import toy_data

TINY = [
    *("data.train=40", "data.test=16", "split.clients=3", "split.name=iid", "split.gamma="),
    *("train.epochs=1", "engine.threads=1", "engine.device=cpu", "run.rounds=3"),
    *("model.width=8", "model.depth=1", "model.heads=2", "model.patch=16"),
]


def quiet(event: Mapping[str, Any]) -> None:
    pass


def stop_after(rounds: int) -> Callable[[Mapping[str, Any]], None]:
    """Ctrl-C when the checkpoint after so many rounds stands and the next has begun."""

    def observe(event: Mapping[str, Any]) -> None:
        if event["event"] == "progress" and event["round"] == rounds:
            raise KeyboardInterrupt

    return observe


def cut_short(settings: Settings, folder: Path, rounds: int = 2) -> RunFolder:
    with pytest.raises(KeyboardInterrupt):
        run.start(settings, RunFolder(folder), stop_after(rounds))
    return RunFolder(folder)


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


# -- the hashes -----------------------------------------------------------------------------------


def small(**changes: Any) -> DataSet:
    train, test = toy_data(12), toy_data(6, seed=1)
    train = replace(train, ids=tuple(map(str, range(12))), users=np.arange(12) % 3)
    return replace(DataSet("toy", tuple("abcdef"), train, test), **changes)


def other(part: LabelledImages, **changes: Any) -> LabelledImages:
    return replace(part, **changes)


HALVES = Partition((np.arange(6), np.arange(6, 12)), images=12)


def test_every_part_is_told_from_the_others() -> None:
    """One change each, one name each."""
    data = small()
    before = bind(data, HALVES)
    assert changed(before, bind(small(), HALVES)) == []
    labels = data.train.labels.copy()
    labels[0, 0] ^= 1
    known = np.ones(data.train.labels.shape, bool)
    assert isinstance(data.train.images, TensorImages)
    pixels = data.train.images.pixels.clone()
    pixels[3, 0, 0, 0] ^= 1
    train = {
        "training labels": other(data.train, labels=labels),
        "training unknown marks": other(data.train, known=known),
        "training images": other(data.train, images=TensorImages(pixels)),
        "training image names": other(data.train, ids=tuple("abcdefghijkl")),
        "training users": other(data.train, users=np.arange(12) % 2),
    }
    for name, part in train.items():
        assert changed(before, bind(small(train=part), HALVES)) == [name]
    test = other(data.test, labels=1 - data.test.labels)
    assert changed(before, bind(small(test=test), HALVES)) == ["test labels"]
    assert changed(before, bind(small(classes=tuple("abcdeg")), HALVES)) == ["class names"]
    uneven = Partition((np.arange(5), np.arange(5, 12)), images=12)
    assert changed(before, bind(data, uneven)) == ["partition"]
    assert changed(before, bind(data, HALVES, np.array([1, 2]))) == ["held-out images"]


def test_some_of_the_images_are_known_by_which() -> None:
    images = small().train.images
    first, second = (
        bind(small(train=replace(small().train, images=SomeImages(images, index))), HALVES)
        for index in (torch.arange(12), torch.arange(12).flip(0))
    )
    assert changed(first, second) == ["training images"]


class Plain:
    """Images of a plug-in: it can give some, and no more."""

    def __init__(self, images: TensorImages) -> None:
        self._images = images
        self.shape = images.shape
        self.gather = images.gather

    def __len__(self) -> int:
        return len(self._images)


def test_images_of_any_kind_are_hashed(monkeypatch: pytest.MonkeyPatch) -> None:
    from fedharmony.experiments import binding

    monkeypatch.setattr(binding, "SLAB", 5)  # the last one is short
    data = small()
    assert isinstance(data.train.images, TensorImages)
    pixels = data.train.images.pixels.clone()
    pixels[11, 2, 3, 3] ^= 1
    found = [
        bind(small(train=other(data.train, images=Plain(TensorImages(p)))), HALVES)
        for p in (data.train.images.pixels, data.train.images.pixels, pixels)
    ]
    assert found[0] == found[1]
    assert changed(found[0], found[2]) == ["training images"]


# -- resuming with other data ---------------------------------------------------------------------


def write_table(folder: Path, rows: list[dict[str, str]]) -> None:
    with (folder / "labels.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)


def write_image(file: Path, seed: int) -> None:
    pixels = np.random.default_rng(seed).integers(0, 255, (16, 16, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(file)


def swapped(folder: Path, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**row, "cat": row["dog"], "dog": row["cat"]} for row in rows]


def renamed(folder: Path, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{"cow" if key == "cat" else key: row[key] for key in row} for row in rows]


def reordered(folder: Path, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return rows[::-1]


def marked(folder: Path, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    return [{**rows[0], "cat": ""}, *rows[1:]]


def replaced(folder: Path, rows: list[dict[str, str]]) -> list[dict[str, str]]:
    write_image(folder / "0.png", 99)
    return rows


@pytest.fixture(scope="module")
def of_a_table(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, str]]]:
    """A folder with a table of images, and a run on it that was cut short."""
    place = tmp_path_factory.mktemp("table")
    data = place / "data"
    data.mkdir()
    for i in range(16):
        write_image(data / f"{i}.png", i)
    rows = [
        {"image": f"{i}.png", "cat": str(i % 2), "dog": str(i // 2 % 2)}
        | {"split": "test" if i > 11 else "train"}
        for i in range(16)
    ]
    write_table(data, rows)
    own = [change for change in TINY if not change.startswith("data.")]
    changes = [
        *(*own, "data.name=table", f"data.path={data}", "data.table=labels.csv"),
        *("data.format=columns", "data.image_size=16", "run.method=fedavg"),
    ]
    cut_short(load_settings("demo", changes), place / "run", 1)
    return place, rows


@pytest.mark.parametrize(
    ("change", "names"),
    [
        (swapped, ["training labels", "test labels"]),
        (renamed, ["class names"]),
        (reordered, ["training image names"]),
        (marked, ["training unknown marks"]),
        (replaced, ["training images"]),
    ],
)
def test_a_run_does_not_go_on_with_other_data(
    of_a_table: tuple[Path, list[dict[str, str]]],
    change: Callable[[Path, list[dict[str, str]]], list[dict[str, str]]],
    names: list[str],
    tmp_path: Path,
) -> None:
    place, rows = of_a_table
    backup = shutil.copytree(place / "data", tmp_path / "data")
    folder = Path(shutil.copytree(place / "run", tmp_path / "run"))
    before = content(folder)
    try:
        write_table(place / "data", change(place / "data", rows))
        error = refuse(tmp_path, "resume", str(folder), "--quiet")
        assert "made of other data" in error
        assert all(name in error for name in names)
        assert content(folder) == before
    finally:
        shutil.copytree(backup, place / "data", dirs_exist_ok=True)


def test_a_run_goes_on_with_its_own_data(
    of_a_table: tuple[Path, list[dict[str, str]]], tmp_path: Path
) -> None:
    folder = RunFolder(Path(shutil.copytree(of_a_table[0] / "run", tmp_path / "run")))
    assert run.resume(folder, quiet)["status"] == "completed"


def test_a_run_goes_on_where_its_data_lie_now_and_keeps_what_is_asked_for_now(
    of_a_table: tuple[Path, list[dict[str, str]]],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The bits are those of the run that nothing was changed of; once finished it stays."""
    place = of_a_table[0]
    as_it_was = RunFolder(Path(shutil.copytree(place / "run", tmp_path / "as it was")))
    whole = run.resume(as_it_was, quiet)
    moved = shutil.copytree(place / "data", tmp_path / "moved")
    folder = RunFolder(Path(shutil.copytree(place / "run", tmp_path / "run")))

    def asked(**changes: Any) -> Settings:
        before = as_it_was.open()
        return replace(
            before,
            run=replace(before.run, **changes),
            data=replace(before.data, own=replace(before.data.own, path=str(moved))),
        )

    settings = asked(eval_every=3, examples=2, label="moved")
    found = run.start(settings, folder, quiet)
    assert found["state_sha256"] == whole["state_sha256"]
    assert found["label"] == "moved"
    assert folder.open().tree() == settings.tree()
    assert [e["round"] for e in folder.read_events() if e["event"] == "evaluate"] == [2]
    kept = load_examples(folder.path)
    assert kept is not None
    assert len(kept.pixels) == 2
    caplog.clear()
    folder.refuse_if_taken(settings)
    assert not caplog.messages
    folder.refuse_if_taken(asked(eval_every=3, examples=9, label="moved"))
    (message,) = caplog.messages
    assert "is finished and stays as it is: run.examples = 2, not 9. Remove the folder" in message
    with pytest.raises(CheckpointError, match="other settings"):
        folder.refuse_if_taken(asked(thresholds=0.5))


def test_a_file_of_weights_is_known_by_what_it_holds(tmp_path: Path) -> None:
    def planned(name: str, seed: int) -> compare.Planned:
        plan = build.assemble(load_settings("demo", [*TINY, f"model.seed={seed}"])).blueprint
        drawn = plan.parameters[0] | plan.parameters[1]
        tensors = {n.removeprefix("backbone."): t.contiguous() for n, t in drawn.items()}
        save_file(tensors, tmp_path / name)
        changes = ["run.method=fedavg", "run.rounds=1", f"model.weights='{tmp_path / name}'"]
        settings = load_settings("demo", [*TINY, *changes])
        return compare.Planned(settings, RunFolder(tmp_path / "run"))

    first, other, copy = (
        planned(f"{name}.safetensors", seed) for name, seed in (("a", 1), ("b", 2), ("c", 1))
    )
    assert first.settings.sha256() == other.settings.sha256() == copy.settings.sha256()
    run.start(first.settings, first.folder, quiet)
    compare.rehearse([copy], quiet)
    with pytest.raises(CheckpointError, match=r"Changed since: file model\.weights"):
        compare.rehearse([other], quiet)
    assert changed({}, {"file model.weights": "a"}) == []  # runs of earlier versions


# -- resuming beside other files ------------------------------------------------------------------


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with client memory that was cut short after two of three rounds."""
    settings = load_settings("demo", [*TINY, "run.method=fedcurv"])
    return cut_short(settings, tmp_path_factory.mktemp("stopped") / "run").path


@pytest.fixture
def folder(stopped: Path, tmp_path: Path) -> RunFolder:
    return RunFolder(Path(shutil.copytree(stopped, tmp_path / "run")))


def refused(folder: RunFolder, words: str) -> None:
    """Resuming is refused in one paragraph, and nothing is changed."""
    before = content(folder.path)
    error = refuse(folder.path.parent, "resume", str(folder.path))
    assert words in error
    assert content(folder.path) == before


def test_the_partition_of_another_run_is_refused(folder: RunFolder) -> None:
    found = Partition.load(folder["partition.json"])
    replace(found, indices=found.indices[::-1]).save(folder["partition.json"])
    refused(folder, "Changed since: partition.")


def test_swapped_memory_is_refused(folder: RunFolder) -> None:
    one, two = sorted(folder["memory"].glob("*/1.safetensors"))[:2]
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)
    refused(folder, "What clients kept")


def test_seals_of_parts_add_up(tmp_path: Path) -> None:
    """Processes seal the clients they have; the sum is what one process finds on the disk."""
    memory = ClientMemory(tmp_path)
    for client in range(5):
        for round in range(client):
            memory.write(client, round, {"x": torch.tensor([float(10 * client + round)])})
    parts = [memory.seal(3, lambda client, rank=rank: client % 2 == rank) for rank in (0, 1)]
    assert sum(parts) % 2**256 == memory.seal(3) == ClientMemory(tmp_path).seal(3)
    assert memory.seal(2) != memory.seal(3)
    assert memory.seal(0) == 0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.35, 0.5, 0.99])
def test_a_flipped_bit_in_the_log_is_refused(folder: RunFolder, share: float) -> None:
    """Wherever it is: in a name, in a number, in the mark of a character's length."""
    log = bytearray(folder.events.read_bytes())
    named = int(load_record(folder.checkpoint).scalars["events_bytes"])  # what is later is cut
    assert named < len(log)
    log[int(share * named)] ^= 0x80 if share == 0.5 else 0x04
    folder.events.write_bytes(log)
    refused(folder, "is not the log")


def test_a_log_that_is_gone_is_refused(folder: RunFolder) -> None:
    folder.events.unlink()
    refused(folder, "events.jsonl cannot be read")


def test_a_deleted_checkpoint_is_refused(folder: RunFolder) -> None:
    folder.checkpoint.unlink()
    refused(folder, "is gone")


@pytest.mark.parametrize("claimed", [0, 1, 3, 99])
def test_forged_rounds_are_refused(folder: RunFolder, claimed: int) -> None:
    record = load_record(folder.checkpoint)
    save_record(folder.checkpoint, record.replace(scalars={"rounds_done": claimed}))
    refused(folder, f"claims {claimed} of 3 rounds")


def test_a_checkpoint_out_of_reach_is_not_called_damaged(folder: RunFolder) -> None:
    """A folder in its place cannot be read even by the superuser."""
    folder.checkpoint.unlink()
    folder.checkpoint.mkdir()
    error = refuse(folder.path.parent, "resume", str(folder.path))
    assert "cannot be read: Is a directory" in error
    assert "damaged" not in error


def test_a_checkpoint_of_an_earlier_version_is_refused(folder: RunFolder) -> None:
    record = load_record(folder.checkpoint)
    kept = {key: record.scalars[key] for key in ("rounds_done", "settings")}
    save_record(folder.checkpoint, replace(record, scalars=kept))
    refused(folder, "earlier version")


def test_an_event_after_a_torn_one_stands_on_a_line_of_its_own(folder: RunFolder) -> None:
    """What a kill left of a line is cut off, and every round is logged once."""
    with folder.events.open("ab") as file:
        file.write(b'{"event": "rou')
    run.resume(folder, quiet)
    lines = [json.loads(line) for line in folder.events.read_text().splitlines()]
    assert [e["round"] for e in lines if e["event"] == "round"] == [0, 1, 2]
    assert not folder["memory"].exists()


# -- the same command again -----------------------------------------------------------------------


def test_the_same_command_goes_on(stopped: Path, tmp_path: Path) -> None:
    command = ["run", "demo", *TINY, "run.method=fedcurv", "--quiet", "--out"]
    shutil.copytree(stopped, tmp_path / "cut")
    succeed(tmp_path, *command, "cut")
    succeed(tmp_path, *command, "whole")
    found = [results(tmp_path / name)["state_sha256"] for name in ("cut", "whole")]
    assert found[0] == found[1]
    binding = tmp_path / "cut" / "results.json"
    binding.write_text(binding.read_text().replace('"training labels": "', '"training labels": "0'))
    assert "Changed since: training labels" in refuse(tmp_path, *command, "cut")


def test_the_number_of_threads_is_fixed_when_a_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Bits depend on it: the settings have it, a resumed run uses it, whatever torch would."""
    chosen = [change for change in TINY if not change.startswith("engine.threads")]
    settings = load_settings("demo", [*chosen, "run.method=fedavg"])
    used: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", used.append)
    folder = cut_short(settings, tmp_path / "run", 1)
    assert folder.open().engine.threads == torch.get_num_threads() == 1
    used.clear()
    monkeypatch.setattr(torch, "get_num_threads", lambda: 7)
    with caplog.at_level(logging.WARNING):
        run.resume(folder, quiet)
    assert used == [1]
    assert "threads 1, now 7" in caplog.text  # set_num_threads was made to do nothing


# -- comparisons ----------------------------------------------------------------------------------


def test_methods_that_would_share_a_folder_are_refused(tmp_path: Path) -> None:
    """Both would be called "same"; one of them was never trained and stood in the table."""
    options = ["compare", "demo", *TINY, "--out", "c", "--seeds", "0", "--methods"]
    error = refuse(tmp_path, *options, "fedavg,fedharmony", "run.label=same")
    assert "share the folder c/same" in error
    for label in ("x/../../out", "..", "/abs", "a\\b"):
        assert "cannot name a folder" in refuse(
            tmp_path, *options, "fedavg", f"run.label={label!r}"
        )
    assert "cannot name a folder" in refuse(tmp_path, "run", "demo", *TINY, "run.label='a/../b'")
    assert list(tmp_path.iterdir()) == []


def test_names_that_some_file_systems_do_not_tell_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings("demo", TINY)
    names = {"fedavg": "Same", "fedprox": "same"}
    monkeypatch.setattr(Settings, "label", property(lambda self: names[self.run.method]))
    with pytest.raises(ConfigError, match="share the folder"):
        compare.plan(settings, ["fedavg", "fedprox"], [0], tmp_path)
    for name in ("", ".", "a\0b", "a\x1b[31m"):
        with pytest.raises(ConfigError, match="cannot name a folder"):
            folder_name(name)


def test_every_method_is_built_before_the_first_runs(tmp_path: Path) -> None:
    """SphereFed has no room for 20 labels in 8 features: told before FedAvg has trained."""
    options = ["compare", "demo", *TINY, "--out", "c", "--seeds", "0"]
    error = refuse(tmp_path, *options, "--methods", "fedavg,spherefed")
    assert "projection" in error
    assert list(tmp_path.iterdir()) == []


def test_finished_runs_of_other_data_are_not_reused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["compare", "demo", *TINY, "run.rounds=1", "--methods", "fedavg", "--seeds"]
    succeed(tmp_path, *options, "0", "--out", "c", "--quiet")
    before = content(tmp_path / "c")
    source = datasets["digits"]
    load = source.load

    def another(self: Any) -> DataSet:
        data = load(self)
        return replace(data, train=replace(data.train, labels=data.train.labels[::-1].copy()))

    monkeypatch.setattr(source, "load", another)
    error = refuse(tmp_path, *options, "0,1", "--out", "c", "--quiet")
    assert "Changed since: training labels" in error
    assert content(tmp_path / "c") == before


# -- reports --------------------------------------------------------------------------------------


def bound(folder: Path, **changes: str) -> Path:
    parts = {"class names": "c", "training labels": "a", "test labels": "t", "partition": "p"}
    found = parts | {key.replace("_", " "): value for key, value in changes.items()}
    (folder / "binding.json").write_text(json.dumps(found))
    return folder


def test_runs_of_other_test_sets_do_not_stand_in_one_table(tmp_path: Path) -> None:
    one = bound(write_fake_run(tmp_path / "one", method="fedavg"))
    two = bound(write_fake_run(tmp_path / "two", method="fedprox"), test_labels="other")
    with pytest.raises(CheckpointError, match="differ in test labels"):
        load([one, two])
    bound(two, training_labels="other", partition="other")
    assert len(load([one, two]).runs) == 2
    plain = write_fake_run(tmp_path / "plain", method="fednova")  # does not say
    assert len(load([one, two, plain]).runs) == 3


def test_seeds_of_one_method_were_trained_on_the_same_data(tmp_path: Path) -> None:
    one = bound(write_fake_run(tmp_path / "one", method="fedavg"))
    two = bound(write_fake_run(tmp_path / "two", method="fedavg", seed=1), training_labels="b")
    with pytest.raises(CheckpointError, match="differ in training labels"):
        load([one, two])


@pytest.mark.parametrize(
    ("part", "other_method"), [("partition", False), ("training_labels", True)]
)
def test_a_comparison_is_of_one_data_set_and_split(
    part: str, other_method: bool, tmp_path: Path
) -> None:
    """Training in one place has a split of its own; the seeds of a method have the same."""
    entries = [("fedavg", 0), ("fedprox" if other_method else "fedavg", 1)]
    for i, (method, seed) in enumerate(entries):
        bound(write_fake_run(tmp_path / f"{i}", method=method, seed=seed), **{part: f"{i}"})
    index = {
        "methods": [method for method, _ in entries],
        "runs": [{"label": m, "seed": s, "folder": f"{i}"} for i, (m, s) in enumerate(entries)],
    }
    (tmp_path / "comparison.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=f"differ in {part.replace('_', ' ')}"):
        load(tmp_path)


def test_results_of_another_run_are_not_reported(tmp_path: Path) -> None:
    folder = bound(write_fake_run(tmp_path / "run"))
    found = json.loads((folder / "results.json").read_text())
    (folder / "results.json").write_text(json.dumps({**found, "bound": {"partition": "q"}}))
    with pytest.raises(CheckpointError, match="is not of this run"):
        load_run(folder)


# -- SIGTERM --------------------------------------------------------------------------------------


def test_sigterm_ends_a_run_as_ctrl_c_does(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    command = ["run", "demo", *TINY, "run.method=fedavg", "run.rounds=500", "--out", str(folder)]
    process = subprocess.Popen(
        [sys.executable, "-m", "fedharmony", *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    log = folder / "events.jsonl"
    while process.poll() is None and not (log.exists() and '"round": 1' in log.read_text()):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    _, stderr = process.communicate(timeout=300)
    assert process.returncode == 143
    assert f"fedharmony resume {folder}" in stderr
    assert "Traceback" not in stderr
    last = json.loads(log.read_text().splitlines()[-1])
    assert (last["event"], last["status"]) == ("finish", "interrupted")
    assert last["reason"] == "stopped by SIGTERM"
    assert {path.name for path in folder.iterdir() if path.name.startswith(".")} == set()
    assert RunFolder(folder).load_state(RunFolder(folder).open()).rounds_done >= 1


def test_sigterm_ends_other_commands_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command ends in order, with the exit code of the signal; the old handler comes back."""
    from fedharmony import cli_data

    def terminated(*arguments: Any) -> None:
        signal.raise_signal(signal.SIGTERM)
        stopping.end_if_asked()

    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(cli_data, "source", terminated)
    code, _, err = call(tmp_path, "data", "check", "voc", "nowhere")
    assert code == 143
    assert "stopped by SIGTERM" in err
    assert signal.getsignal(signal.SIGTERM) is before
