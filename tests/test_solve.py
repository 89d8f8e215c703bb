"""Linear equations over clients' sums: right with two threads and at sizes that users have."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import scipy.linalg
import torch
from torch import Tensor

from fedharmony.correlation import pack_upper
from fedharmony.engine.head_sums import SUMS, gram_of
from fedharmony.errors import NumericalError
from fedharmony.methods import spherefed
from fedharmony.server.head_start import HeadStart, solve
from fedharmony.server.head_trust import trusted
from fedharmony.solve import solve_spd
from fedharmony.types import FROZEN, PARAMS, Record, Reply
from toy import CLASSES, Toy

LABELS, WIDTH = 20, 220


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def drawn(seed: int = 0, images: int = 600) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Features, labels that follow from them, and which labels are known."""
    rng = np.random.default_rng(seed)
    f, noise = rng.normal(size=(images, WIDTH)), rng.normal(size=(images, LABELS))
    truth = np.random.default_rng(99).normal(size=(WIDTH, LABELS))  # the same for all clients
    labels = (f @ truth / np.sqrt(WIDTH) + noise > 0.5).astype(np.float64)
    return f, labels, (rng.random(labels.shape) < 0.7).astype(np.float64)


def sums_of(f: np.ndarray, labels: np.ndarray, known: np.ndarray | None) -> dict[str, Tensor]:
    """A_k, packed, and B_k of f̃ = [f, 1], by NumPy."""
    f = np.concatenate([f, np.ones((len(f), 1))], axis=1)
    masks = [np.ones(len(f))] if known is None else list(known.T)
    grams = np.stack([f.T @ (f * mask[:, None]) for mask in masks])
    cross = (labels if known is None else labels * known).T @ f
    return {"gram": pack_upper(torch.from_numpy(grams)), "cross": torch.from_numpy(cross)}


@pytest.mark.parametrize("unknown", [False, True])
def test_a_head_of_many_features_is_that_of_numpy(unknown: bool) -> None:
    """Label by label: covariance over the images where it is known, ridge, and the scale."""
    f, labels, known = drawn()
    masks = known if unknown else np.ones_like(known)
    sums = sums_of(f, labels, known if unknown else None)
    head = solve(gram_of(sums), sums["cross"], 0.1, torch.zeros(LABELS, WIDTH))
    for c in range(LABELS):
        x, y = f[masks[:, c] > 0], labels[masks[:, c] > 0, c]
        s = np.cov(x.T, bias=True)
        cov, prior = (x - x.mean(0)).T @ y / len(y), y.mean()
        v = scipy.linalg.solve(s + 0.1 * np.trace(s) / WIDTH * np.eye(WIDTH), cov)
        w = v / (prior * (1 - prior) - v @ cov)
        np.testing.assert_allclose(head["head.weight"][c].numpy(), w, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("unknown", [False, True])
def test_liars_about_many_features_are_left_out(unknown: bool) -> None:
    """One tells the sums of turned labels; one sums of squares below zero, which fit anything."""
    clients = [drawn(seed, 400) for seed in range(6)]
    honest = [sums_of(f, y, k if unknown else None) for f, y, k in clients]
    f, y, k = drawn(7, 400)
    turned = sums_of(f, 1 - y, k if unknown else None)
    negative = {**honest[0], "gram": honest[0]["gram"].clone()}
    negative["gram"][:, :-1] *= -1000
    kept = trusted([negative, turned, *honest], [400] * 8, 0.01)
    assert [id(own) for own in kept] == [id(own) for own in honest]


def test_calibration_of_many_features_is_that_of_scipy() -> None:
    toy = Toy("spherefed", config={"projection": WIDTH, "ridge": 0.1}, rounds=1)
    f, labels, _ = drawn()
    z = np.concatenate([f / np.linalg.norm(f, axis=1, keepdims=True), np.ones((len(f), 1))], axis=1)
    a, b = z.T @ z, z.T @ labels[:, :CLASSES]
    sums = {"a": pack_upper(torch.from_numpy(a)), "b": torch.from_numpy(b), "norm": torch.ones(())}
    state = toy.initial()
    reply = Reply(0, len(f), Record({spherefed.SUMS: sums}))
    head = toy.method.calibrate(state, 0, {}, iter([reply])).state.get(FROZEN)  # type: ignore
    ridge = 0.1 * np.diag(a).mean() * np.eye(len(a))
    expected = scipy.linalg.solve(a + ridge, b, assume_a="pos")
    np.testing.assert_allclose(head["head.weight"].numpy(), expected[:-1].T, rtol=1e-4, atol=1e-5)


def test_what_has_no_solution_is_an_error() -> None:
    for matrix in (torch.zeros(2, 2), -torch.eye(2), torch.full((2, 2), torch.nan)):
        with pytest.raises(NumericalError, match="not positive definite"):
            solve_spd(torch.stack([torch.eye(2), matrix]), torch.ones(2, 2, 1))


def test_a_wrong_solution_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "cholesky_solve", lambda b, factor: b)
    with pytest.raises(NumericalError, match="is wrong"):
        solve_spd(2 * torch.eye(3), torch.ones(3, 1))


def test_without_a_solution_the_head_stays_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """All features alike: their covariance is zero, whatever the ridge in its units."""
    toy = Toy(rounds=1)
    state, size = toy.initial(), toy.task.width + 1
    sums = {"gram": torch.zeros(1, size * (size + 1) // 2), "cross": torch.zeros(CLASSES, size)}
    method: Any = SimpleNamespace(task=toy.task)
    with caplog.at_level(logging.WARNING):
        outcome = HeadStart(method, 0.01).aggregate(
            state, 0, {}, iter([Reply(0, 5, Record({SUMS: sums}))])
        )
    assert outcome.state.get(PARAMS) is state.get(PARAMS)
    assert outcome.log == {"head_not_solved": 1.0}
    assert "The head stays as it was drawn" in caplog.text
