"""Settings over values: what is planned, what is drawn, and that it can be repeated."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

import fedharmony
from fake_run import write_fake_comparison
from fedharmony.errors import CheckpointError, ConfigError
from fedharmony.experiments import compare
from fedharmony.experiments import run as runs
from fedharmony.experiments.compare import execute
from fedharmony.experiments.sweep import plan, split_changes
from fedharmony.report.sweep import load_sweep, page, sections, table_of, to_csv, write_sweep
from test_cli import refuse, succeed

SMALL = [
    *("data.train=60", "data.test=30", "split.clients=3", "split.name=iid", "run.rounds=1"),
    *("model.width=8", "model.depth=1", "model.heads=2", "train.epochs=1", "engine.threads=1"),
]


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ("split.gamma=0.1, 0.5,1", ["0.1", "0.5", "1"]),
        ("split.transforms=[],['grey']", ["[]", "['grey']"]),
        ('run.label="a,b",c', ['"a,b"', "c"]),
    ],
)
def test_values_between_commas(change: str, values: list[str]) -> None:
    assert split_changes([change]) == ({change.partition("=")[0]: values}, [])


def test_other_changes_stay(tmp_path: Path) -> None:
    others = ["train.lr=1e-3", "tune.lr=[0.1, 0.2]", "methods/fedprox", "split.gamma="]
    assert split_changes(others) == ({}, others)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["train.lr=0.1"], "needs a setting with several values"),
        (["train.lr=0.1,0.1"], "twice"),
        (["train.lr=0.1,"], "empty"),
        (["train.lr=0.1,0.2", "train.lr=0.3,0.4"], "swept twice"),
        (["train.lr=0.1,-1"], "train.lr"),
        (["train.lrr=0.1,1"], "Did you mean 'lr'"),
        ([f"train.lr={','.join(f'0.{i}1' for i in range(300))}"], "too many for one sweep"),
    ],
)
def test_bad_sweeps_are_refused(changes: list[str], words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        plan("demo", changes, ["fedavg"], [0], tmp_path)


def test_every_combination_is_a_comparison(tmp_path: Path) -> None:
    changes = ["train.lr=0.1,0.2", "split.gamma=0.1,1", "run.rounds=3"]
    points = plan("demo", changes, ["fedavg", "fedprox"], [0, 1], tmp_path)
    found = [(p.values["train.lr"], p.values["split.gamma"]) for p in points]
    assert found == [("0.1", "0.1"), ("0.1", "1"), ("0.2", "0.1"), ("0.2", "1")]
    assert [len(p.runs) for p in points] == [4] * 4
    settings = points[2].runs[0].settings
    assert (settings.train.lr, settings.split.own.gamma, settings.run.rounds) == (0.2, 0.1, 3)  # type: ignore[attr-defined]
    assert points[2].name == "train.lr=0.2, split.gamma=0.1"


def test_a_sweep_runs_repeats_and_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["sweep", "demo", *SMALL, "--seeds", "0", "--out", "out", "--quiet"]
    shown = succeed(tmp_path, *command, "train.lr=0.01,0.1", "--methods", "fedavg")
    assert "train.lr=0.01: fedavg" in shown
    out = tmp_path / "out"
    rows = list(csv.DictReader((out / "sweep.csv").read_text().splitlines()))
    assert [(r["train.lr"], r["method"], r["seed"]) for r in rows] == [
        ("0.01", "fedavg", "0"),
        ("0.1", "fedavg", "0"),
    ]
    first = json.loads((out / "train.lr=0.01/fedavg/seed-0/results.json").read_text())
    assert float(rows[0]["mAP"]) == first["metrics"]["mAP"]
    assert (out / "train.lr=0.01" / "table.md").is_file()

    def never(*args: Any, **options: Any) -> Any:
        raise AssertionError("finished runs are not run again")

    with monkeypatch.context() as patch:
        patch.setattr(runs, "_first_round", never)
        assert succeed(tmp_path, *command, "train.lr=0.01,0.1", "--methods", "fedavg") == shown
    more = succeed(tmp_path, *command, "train.lr=0.01,0.1,0.5", "--methods", "fedavg,fedprox")
    assert "train.lr=0.5: fedprox" in more
    assert "Error" in refuse(tmp_path, *command, "train.lr=0.01", "--methods", "fedavg")


def write_fake_sweep(folder: Path, values: dict[str, list[str]]) -> Path:
    points = []
    first, *others = values
    for a in values[first]:
        for b in values[others[0]] if others else [None]:
            name = f"{first}={a}" if b is None else f"{first}={a}_{others[0]}={b}"
            write_fake_comparison(folder / name, seeds=(0, 1), rounds=2)
            point = {first: a} | ({others[0]: b} if b is not None else {})
            points.append({"values": point, "folder": name})
    index = {"config": "demo", "settings": list(values), "methods": [], "points": points}
    (folder / "sweep.json").write_text(json.dumps(index))
    return folder


def test_what_is_drawn(tmp_path: Path) -> None:
    """One section per value of the second setting; eight metrics over those of the first."""
    folder = write_fake_sweep(tmp_path, {"train.lr": ["0.1", "0.2"], "split.gamma": ["0.3", "1"]})
    swept = write_sweep(folder)
    found = sections(swept)
    assert [s.title for s in found.values()] == [
        "Over train.lr (split.gamma = 0.3)",
        "Over train.lr (split.gamma = 1)",
    ]
    assert all(len(s.pictures) == 8 for s in found.values())
    assert "train.lr" in found["sweep-1"].pictures[0].svg
    page = (folder / "report.html").read_text()
    assert "train.lr=0.1, split.gamma=0.3: fedavg" in page
    assert "Failures" not in page
    assert len(to_csv(swept).splitlines()) == 1 + 4 * 2 * 2
    assert not any(cell.best for line in table_of(swept).lines for cell in line.cells)


def test_a_sweep_under_way(tmp_path: Path) -> None:
    folder = write_fake_sweep(tmp_path, {"train.lr": ["0.1", "0.2"]})
    index = json.loads((folder / "sweep.json").read_text())
    index["points"].append({"values": {"train.lr": "0.3"}, "folder": "train.lr=0.3"})
    (folder / "sweep.json").write_text(json.dumps(index))
    swept = load_sweep(folder)
    assert (len(swept.points), swept.missing) == (2, 1)
    write_sweep(folder)
    assert "1 comparison of the sweep not begun yet" in (folder / "report.html").read_text()


def test_runs_are_numbered_through_all_points(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    points = plan("demo", ["data.seed=1,2"], ["fedavg", "fedprox"], [0], tmp_path)
    planned = [run for point in points for run in point.runs]
    data: Any = {repr(run.settings.data): f"data of {run.settings.data}" for run in planned}
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(compare, "carry_out", lambda *of: seen.append(of))
    execute(planned, lambda i, run: i, data)  # type: ignore[arg-type,return-value]
    assert seen == [(run, i, f"data of {run.settings.data}") for i, run in enumerate(planned)]
    assert (len(data), len(planned)) == (2, 4)


def test_runs_under_way_are_not_drawn(tmp_path: Path) -> None:
    folder = write_fake_sweep(tmp_path, {"train.lr": ["0.1", "0.2"]})
    whole = sections(load_sweep(folder))["sweep-1"].pictures[0].svg
    run = folder / "train.lr=0.2" / "fedavg" / "seed-1"
    (run / "results.json").unlink()
    log = (run / "events.jsonl").read_text().splitlines()
    (run / "events.jsonl").write_text("\n".join(x for x in log if '"finish"' not in x) + "\n")
    swept = load_sweep(folder)
    assert [r.status == "completed" for r in swept.points[1][1].groups["fedavg"]] == [True, False]
    assert sections(swept)["sweep-1"].pictures[0].svg != whole
    assert "1 run not finished" in page(swept)


@pytest.mark.parametrize("text", ["{}", "[]", '{"points": 3}', "{"])
def test_damaged_index(tmp_path: Path, text: str) -> None:
    (tmp_path / "sweep.json").write_text(text)
    with pytest.raises(CheckpointError):
        load_sweep(tmp_path)
    with pytest.raises(CheckpointError, match="no folder of a sweep"):
        load_sweep(tmp_path / "nowhere")


@pytest.mark.parametrize("command", ["compare", "sweep", "tune", "reproduce"])
def test_what_options_choose_is_no_setting_beside_them(command: str, tmp_path: Path) -> None:
    """Passed over in silence, ``fedavg`` and ``fedharmony`` would be trained instead."""
    seeds = [] if command == "tune" else ["run.seed=1", "model.seed=0,1"]  # it has no --seeds
    words = [] if command == "reproduce" else ["demo", "--dry-run"]
    for change in ["run.method=fedharmony:paper_literal", *seeds]:
        error = refuse(tmp_path, command, *words, change, "split.gamma=0.1,0.5")
        assert f"{change!r}: {change.partition('=')[0]} is not set here" in error
        assert f"chosen with {'--seeds' if 'seed' in change else '--methods'}" in error
    with pytest.raises(ConfigError, match=r"run.method is not set here.*methods=\["):
        fedharmony.compare("demo", settings={"run": {"method": "fedprox"}})
    assert not list(tmp_path.iterdir())
