"""Run folders of an earlier version: ``data/run_508769b`` is one, with the scores it gave."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest

import fedharmony as fh
from fedharmony.config import override, read_toml, to_toml
from fedharmony.errors import CheckpointError, OccupiedError
from fedharmony.experiments import older
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.methods.base import methods
from test_cli import refuse, succeed

SAMPLE = Path(__file__).parent / "data" / "run_508769b"
#: Settings of the sample that are refused now: gone, and with a value that has no meaning.
GONE, WRONG = "federation.robust_cap", "loss.absent_label_weight"


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return shutil.copytree(SAMPLE, tmp_path / "run")


def test_a_finished_run_predicts_what_it_did(run: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING, "fedharmony")
    images = (np.arange(2 * 32 * 32 * 3) ** 2 % 251).astype(np.uint8).reshape(2, 32, 32, 3)
    model = fh.load(run)
    scores = json.loads((SAMPLE.parent / "run_508769b_scores.json").read_text())
    np.testing.assert_allclose(model.predict(images), scores, rtol=1e-4, atol=1e-9)
    assert model.settings.loss.absent_label_weight == 1.0  # as any weight above 0 acted
    assert GONE in caplog.text
    assert WRONG in caplog.text


def test_a_finished_run_is_shown_and_exported(run: Path) -> None:
    succeed(run.parent, "export", "run", "--to", "out")
    succeed(run.parent, "report", "run", "--out", "page.html")
    assert "21.4" in succeed(run.parent, "resume", "run")  # mAP
    with pytest.raises(OccupiedError, match="earlier version"):  # what is gone may differ
        RunFolder(run).refuse_if_taken(RunFolder(run).open())


def test_a_finished_run_with_changed_settings_is_refused(run: Path) -> None:
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("lr = 0.001", "lr = 0.01"))
    with pytest.raises(CheckpointError, match="other settings"):
        _ = fh.load(run).model


@pytest.mark.parametrize(("refused", "other"), [(GONE, WRONG), (WRONG, GONE)])
def test_an_unfinished_run_is_refused(run: Path, refused: str, other: str) -> None:
    (run / "results.json").unlink()
    tree = override(read_toml(run / "config.toml"), [f"{other}="])
    (run / "config.toml").write_text(to_toml(tree))
    error = refuse(run.parent, "resume", "run")
    assert f"{refused} = " in error
    assert "Finish it with the version that began it, or start a new run" in error
    with pytest.raises(OccupiedError, match="earlier version"):
        RunFolder(run).refuse_if_taken(load_settings("demo"))


def test_whatever_a_class_removed_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    grids = ["tune.fedharmony.kappa=[1.0]", "tune.fedharmony.train.lr=[0.1]"]
    tree = load_settings("demo", grids).tree()
    assert older.outdated(tree) == {}
    config = methods["fedharmony"].Config
    monkeypatch.setattr(config, "REMOVED", {"kappa": "gone", "trim": "gone"}, raising=False)
    tree = override(tree, ["federation.robust=no_rule", "federation.sampling=uniform"])
    found = ["methods.fedharmony.kappa", "methods.fedharmony.trim", "tune.fedharmony.kappa"]
    assert sorted(older.outdated(tree)) == ["federation.robust", *found]
