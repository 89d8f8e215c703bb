"""What the numbers of a run are made of: every test image, known labels, the set threshold."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedharmony.correlation import label_correlation
from fedharmony.experiments import evaluate as evaluating
from fedharmony.experiments import run as runs
from fedharmony.experiments import scorer
from fedharmony.experiments.build import Assembly, as_annotated, as_clients_see, assemble
from fedharmony.experiments.evaluate import evaluate, matrices, owners, summarise
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.metrics import evaluate as metrics_of
from fedharmony.metrics import structure_metrics, trivial_baselines
from fedharmony.partition.annotation import client_known
from fedharmony.types import PARAMS

SMALL = [
    *("data.train=60", "data.test=23", "split.clients=3", "run.rounds=1", "split.min_size=5"),
    *("train.epochs=1", "engine.threads=1", "model.width=16", "model.depth=1", "model.heads=2"),
    *("run.method=fedavg", "split.name=iid", "split.gamma=", "split.min_size="),
]


def built(*changes: str) -> Assembly:
    return assemble(load_settings("demo", [*SMALL, *changes]))


def with_known(assembly: Assembly, share: float = 0.7) -> Assembly:
    """The same with unknown test labels, under which the labels are wrong."""
    test, rng = assembly.data.test, np.random.default_rng(0)
    known = rng.random(test.labels.shape) < share
    labels = np.where(known, test.labels, 1 - test.labels).astype(np.uint8)
    hidden = replace(test, known=known, labels=labels)
    return replace(assembly, data=replace(assembly.data, test=hidden))


def scores_of(assembly: Assembly) -> torch.Tensor:
    """All test images at once."""
    test, state = assembly.data.test, assembly.initial_state()
    images = test.images.gather(torch.arange(len(test)), torch.device("cpu"))
    params = {n: t.unsqueeze(0) for n, t in state.get(PARAMS).items()}
    inputs = assembly.blueprint.method.normalise(images, {}, {})
    return assembly.blueprint.model.apply(params, inputs.unsqueeze(0))[0].sigmoid().detach()


@pytest.mark.parametrize("batch", [8, 10, 23, 100])
def test_every_test_image_counts_and_only_known_labels_do(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """23 images in batches of 8 and 10 leave a last one that is not full."""
    monkeypatch.setattr(scorer, "BATCH", batch)
    assembly = with_known(built("metrics.threshold=0.52"))
    test, found = assembly.data.test, evaluate(assembly, assembly.initial_state())
    scores = scores_of(assembly)
    options = assembly.settings.metrics
    expected = metrics_of(scores, test.labels, options, test.known)
    assert found.metrics.n_images == 23
    for name, value in expected.as_dict().items():
        assert found.metrics.as_dict()[name] == pytest.approx(value, abs=1e-6), name
    unmasked = metrics_of(scores, test.labels, options)
    assert abs(unmasked.map - expected.map) > 1e-3
    structure = structure_metrics(scores, test.labels, 0.52, test.known)
    assert found.structure.hard_mean_abs == pytest.approx(structure.hard_mean_abs, abs=1e-6)
    at_half = structure_metrics(scores, test.labels, 0.5, test.known)
    assert abs(at_half.hard_mean_abs - structure.hard_mean_abs) > 1e-3
    assert found.users is None


def test_results_are_of_training_prevalence_and_known_labels(tmp_path: Path) -> None:
    """The trivial predictor scores by the training labels; counts leave unknown entries out."""
    assembly = with_known(built())
    rng = np.random.default_rng(1)
    train = assembly.data.train
    hidden = rng.random(train.labels.shape) < 0.5
    assembly = replace(assembly, data=replace(assembly.data, train=replace(train, known=~hidden)))
    state = assembly.initial_state()
    results = summarise(assembly, state, evaluate(assembly, state), [])
    test = assembly.data.test
    assert test.known is not None
    share = [train.labels[~hidden[:, c], c].mean() for c in range(train.labels.shape[1])]
    options = assembly.settings.metrics
    expected = trivial_baselines(test.labels, options, share, test.known)["prevalence"]
    assert results["baselines"]["prevalence"] == pytest.approx(expected.as_dict())
    of_test = trivial_baselines(test.labels, options, None, test.known)["prevalence"]
    assert expected.o_map != pytest.approx(of_test.o_map, abs=1e-4)
    positives = (test.labels * test.known).sum(axis=0)
    assert [row["positives"] for row in results["per_label"]] == positives.tolist()
    shown = matrices(assembly, state, evaluate(assembly, state))
    defined = label_correlation(test.labels, known=test.known)[1]
    assert shown["true_defined"].bool().tolist() == defined.tolist()


def test_annotation_comes_on_top_of_what_the_data_do_not_know() -> None:
    assembly = built("split.annotated=0.5")
    plain = built()
    labels = plain.data.train.labels
    own = np.random.default_rng(0).random(labels.shape) < 0.6
    train = replace(plain.data.train, known=own)
    settings = assembly.settings
    annotated = client_known(labels, plain.partition, 0.5, settings.split.common.seed)
    for found in (
        as_annotated(train, plain.partition, settings),
        as_clients_see(replace(plain.data, train=train), plain.partition, settings).train,
    ):
        assert found.known is not None
        assert np.array_equal(found.known, own & annotated)
    alone = as_annotated(plain.data.train, plain.partition, settings).known
    assert alone is not None
    assert np.array_equal(alone, annotated)
    assert as_annotated(train, plain.partition, plain.settings) is train


def test_held_out_images_have_the_labels_that_their_owners_annotate() -> None:
    """Else settings would be chosen by labels that no client has."""
    assembly = built("split.annotated=0.5", "split.holdout=0.3")
    test, train = assembly.data.test, assembly.data.train
    assert test.known is not None
    assert train.known is not None
    held = np.setdiff1d(np.arange(60), np.concatenate(list(assembly.clients.values())))
    assert np.array_equal(test.known, train.known[held])
    assert 0.3 < test.known.mean() < 0.7
    assert built("split.holdout=0.3").data.test.known is None


def test_users_of_test_images(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where test images have owners, the mean over these stands beside the pooled numbers."""
    assembly = with_known(built())
    assert owners(assembly.data.test) is None
    users = np.array(["b", "a", "b"] + ["c"] * 20)
    test = replace(assembly.data.test, users=users)
    parts = owners(test)
    assert parts is not None
    assert [part.tolist() for part in parts] == [[1], [0, 2], list(range(3, 23))]
    assembly = replace(assembly, data=replace(assembly.data, test=test))
    state = assembly.initial_state()
    assert evaluate(assembly, state).users is None
    found = evaluate(assembly, state, by_user=True)
    assert found.users is not None
    assert found.users.pooled.as_dict() == pytest.approx(found.metrics.as_dict())
    each = [metrics_of(scores_of(assembly)[p], test.labels[p], None, test.known[p]) for p in parts]
    precision = np.mean([result.op for result in each])
    assert found.users.mean["OP"] == pytest.approx(precision, abs=1e-6)
    results = summarise(assembly, state, found, [])
    assert results["per_user"]["users"] == 3
    assert results["per_user"]["mean"]["OP"] == pytest.approx(precision, abs=1e-6)
    monkeypatch.setattr(evaluating, "MOST_USER_LABELS", 3 * test.labels.shape[1] - 1)
    assert owners(test) is None


def test_a_run_evaluates_users_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def listen(assembly: Assembly, state: Any, by_user: bool = False) -> Any:
        asked.append(by_user)
        return evaluate(assembly, state, by_user)

    monkeypatch.setattr("fedharmony.experiments.evaluate.evaluate", listen)
    settings = load_settings("demo", [*SMALL, "run.rounds=2"])
    results = runs.start(settings, RunFolder(tmp_path / "run"), lambda event: None)
    assert asked == [False, True]
    assert results["per_user"] is None
