"""What helps every method: a head in closed form, and an averaged server model."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.discriminant_analysis import LinearDiscriminantAnalysis
from sklearn.linear_model import Ridge
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fedharmony.engine.head_sums import gram_of
from fedharmony.errors import ConfigError, NumericalError
from fedharmony.experiments.build import assemble
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.run import resume, start
from fedharmony.experiments.settings import Settings, load_settings
from fedharmony.methods.base import INGREDIENTS, Task, methods
from fedharmony.methods.fedavg import FedAvg
from fedharmony.server import head_start
from fedharmony.server.federation import FederationSettings
from fedharmony.server.head_start import HeadStart, solve
from fedharmony.server.server_average import ServerAverage, share_kept, watch
from fedharmony.terminal import warn_once
from fedharmony.types import PARAMS, Record, Reply
from toy import SMALL, Toy, largest_difference, same_bits, toy_data

CLOSED = FederationSettings(head_start="closed_form")
SMALL_DEMO = ["data.train=160", "data.test=60", "split.clients=4", "run.rounds=3", "train.epochs=1"]


def sums(features: np.ndarray, labels: np.ndarray, known: np.ndarray | None = None) -> Any:
    """Σ f̃ f̃ᵀ and Σ y f̃ᵀ, of one matrix, or of one per label."""
    f = np.concatenate([features, np.ones((len(features), 1))], axis=1)
    if known is None:
        return torch.from_numpy(f.T @ f)[None], torch.from_numpy(labels.T @ f)
    grams = np.stack([(f * mask[:, None]).T @ f for mask in known.T])
    return torch.from_numpy(grams), torch.from_numpy((labels * known).T @ f)


def features_of(toy: Toy) -> np.ndarray:
    """The features that the toy's backbone gives for its data, in float64."""
    assert toy.data is not None
    params = {n: t[None] for n, t in toy.parameters()[0].items()}
    images = toy.data.images.gather(torch.arange(len(toy.data)), torch.device("cpu"))
    shown = toy.method.normalise(images, {}, {}).to(toy.dtype)
    found: Tensor = toy.model.features(params, shown[None])[0]
    return found.double().numpy()


def example(seed: int = 0, images: int = 200, width: int = 5, classes: int = 4) -> Any:
    rng = np.random.default_rng(seed)
    labels = (rng.random((images, classes)) < 0.3).astype(np.float64)
    features = labels @ rng.normal(size=(classes, width)) + rng.normal(size=(images, width))
    return features, labels


# -- the head --------------------------------------------------------------------------------------


def test_head_by_hand() -> None:
    """Features −1, 1 without the label, 1, 3 with it.

    mean(f) = 1, S = (4 + 0 + 0 + 4)/4 = 2, π = ½, Cov(f, y) = (1 + 3)/4 − ½ · 1 = ½. With ρ = 1 of
    the variance: V = ½/(2 + 2) = ⅛, R² = ⅛ · ½ / ¼ = ¼, w = ⅛ / (¼ · ¾) = ⅔, b = 0 − ⅔ · 1.
    """
    gram, cross = sums(np.array([[-1.0], [1], [1], [3]]), np.array([[0.0], [0], [1], [1]]))
    head = solve(gram, cross, 1.0, torch.zeros(1, 1))
    assert head["head.weight"].item() == pytest.approx(2 / 3, abs=1e-12)
    assert head["head.bias"].item() == pytest.approx(-2 / 3, abs=1e-12)


def test_rows_are_those_of_ridge_regression() -> None:
    """Up to each label's factor, and that factor is 1/(π(1−π)(1−R²))."""
    features, labels = example()
    ridge = 0.01
    spread = features.var(axis=0).mean()
    fitted = Ridge(alpha=ridge * spread * len(features)).fit(features, labels)
    head = solve(*sums(features, labels), ridge, torch.zeros(4, 5))
    prior = labels.mean(axis=0)
    centred = features - features.mean(axis=0)
    explained = (fitted.coef_ * (labels.T @ centred / len(labels))).sum(1) / (prior * (1 - prior))
    expected = fitted.coef_ / (prior * (1 - prior) * (1 - explained))[:, None]
    np.testing.assert_allclose(head["head.weight"].numpy(), expected, rtol=1e-9)
    bias = np.log(prior / (1 - prior)) - expected @ features.mean(axis=0)
    np.testing.assert_allclose(head["head.bias"].numpy(), bias, rtol=1e-9, atol=1e-9)


def test_directions_are_those_of_discriminant_analysis() -> None:
    """Without a penalty, w = Σ_w⁻¹ (μ₁ − μ₀) with the covariance inside the two groups."""
    features, labels = example(1)
    head = solve(*sums(features, labels), 1e-12, torch.zeros(4, 5))
    for c in range(4):
        lda = LinearDiscriminantAnalysis(solver="lsqr").fit(features, labels[:, c])
        np.testing.assert_allclose(head["head.weight"][c].numpy(), lda.coef_[0], rtol=1e-6)


def test_a_head_of_noisy_sums_by_hand() -> None:
    """The numbers of the first test, with ρ ≈ 0 and noise of deviation ½ in each sum.

    Noise adds 2 · 2 · ½ · √1 / 4 = ½ to S = 2: V = ½/2½ = ⅕, R² = ⅕ · ½ / ¼ = ⅖, and so
    w = ⅕ / (¼ · ⅗) = 4/3, b = −4/3. With deviation 1, the two images with the label are no more
    than two deviations, and it is not solved for.
    """
    gram, cross = sums(np.array([[-1.0], [1], [1], [3]]), np.array([[0.0], [0], [1], [1]]))
    head = solve(gram, cross, 1e-12, torch.zeros(1, 1), noise=0.5)
    assert head["head.weight"].item() == pytest.approx(4 / 3, abs=1e-9)
    assert head["head.bias"].item() == pytest.approx(-4 / 3, abs=1e-9)
    assert not solve(gram, cross, 1e-12, torch.zeros(1, 1), noise=1.0)["head.weight"].any()


@pytest.mark.parametrize("seed", range(5))
def test_noise_that_makes_the_covariance_negative_leaves_a_useful_head(seed: int) -> None:
    """Solved as if there were no noise, the same sums have no solution."""
    images, width, noise = 1000, 60, 75.0
    features, labels = example(seed, images, width)
    gram, cross = sums(features, labels)
    drawn = torch.Generator().manual_seed(seed)
    upper = torch.randn(width + 1, width + 1, generator=drawn, dtype=torch.float64).triu()
    noisy = gram + noise * (upper + upper.triu(1).mT)
    cross = cross + noise * torch.randn(cross.shape, generator=drawn, dtype=torch.float64)
    assert float(torch.linalg.eigvalsh(noisy)[0, 0]) < 0

    def quality(noise: float) -> float:
        weight = solve(noisy, cross, 0.01, torch.zeros(4, width), noise)["head.weight"].numpy()
        found = [roc_auc_score(y, features @ w) for y, w in zip(labels.T, weight, strict=True)]
        return float(np.mean(found))

    assert quality(noise) > 0.9
    with pytest.raises(NumericalError, match="not positive definite"):
        quality(0.0)


def test_the_server_knows_the_noise_in_the_sums() -> None:
    toy = Toy(federation=CLOSED, rounds=1, dtype=torch.float64)
    (stage,), state = toy.loop().opening, toy.initial()
    sent = stage.broadcast(state, 0, [0])
    (reply,) = toy.transport.exchange(stage, 0, sent)
    assert isinstance(reply, Reply)
    record = reply.record.replace(scalars={"noise head_sums": 0.25})
    found = stage.aggregate(state, 0, sent, iter([replace(reply, record=record)])).state
    before = state.get(PARAMS)["head.weight"]
    own = record.get("head_sums")
    expected = solve(gram_of(own), own["cross"], 0.01, before, 0.25)
    torch.testing.assert_close(found.get(PARAMS)["head.weight"], expected["head.weight"])
    silent = solve(gram_of(own), own["cross"], 0.01, before)
    assert not torch.allclose(silent["head.weight"], expected["head.weight"])


def test_a_row_that_cannot_be_solved_for_is_kept_whatever_the_scale() -> None:
    """Two deviations of this noise are more images than there are: no label is solved for."""
    toy = Toy(federation=replace(CLOSED, head_scale=8.0), rounds=1, dtype=torch.float64)
    (stage,), state = toy.loop().opening, toy.initial()
    sent = stage.broadcast(state, 0, [0])
    (reply,) = toy.transport.exchange(stage, 0, sent)
    assert isinstance(reply, Reply)
    record = reply.record.replace(scalars={"noise head_sums": 1e6})
    found = stage.aggregate(state, 0, sent, iter([replace(reply, record=record)])).state
    assert torch.equal(found.get(PARAMS)["head.weight"], state.get(PARAMS)["head.weight"])


def test_a_head_does_not_depend_on_the_scale_of_the_sums() -> None:
    def head(scale: float | None) -> tuple[Record, Record]:
        toy = Toy(federation=replace(CLOSED, head_scale=scale), rounds=1, dtype=torch.float64)
        (stage,), state = toy.loop().opening, toy.initial()
        sent = stage.broadcast(state, 0, [0, 1])
        replies = [r for r in toy.transport.exchange(stage, 0, sent) if isinstance(r, Reply)]
        solved = stage.aggregate(state, 0, sent, iter(replies)).state
        return replies[0].record, solved

    (plain, first), (scaled, second) = head(None), head(8.0)
    torch.testing.assert_close(first.get(PARAMS), second.get(PARAMS), rtol=1e-9, atol=1e-9)
    cross, smaller = (record.get("head_sums")["cross"] for record in (plain, scaled))
    torch.testing.assert_close(smaller[:, :-1], cross[:, :-1] / 8)
    assert torch.equal(smaller[:, -1], cross[:, -1])


def test_labels_that_nobody_or_everybody_has_keep_their_rows() -> None:
    """Their biases are those of the rarest prior, 0.25 here, and of its opposite."""
    features, _ = example(images=8)
    labels = np.zeros((8, 3))
    labels[:2, 0], labels[:, 2] = 1, 1
    drawn = torch.randn(3, 5, generator=torch.Generator().manual_seed(0))
    head = solve(*sums(features, labels), 0.01, drawn)
    np.testing.assert_array_equal(head["head.weight"][1:].numpy(), drawn[1:].double().numpy())
    assert not torch.equal(head["head.weight"][0], drawn[0].double())
    expected = [np.log(1 / 3), np.log(3)]
    np.testing.assert_allclose(head["head.bias"][1:].numpy(), expected, rtol=1e-12)
    nothing = solve(*sums(features, np.zeros((8, 3))), 0.01, drawn)
    assert torch.equal(nothing["head.weight"], drawn.double())
    assert not nothing["head.bias"].any()


def test_unknown_labels_are_solved_over_what_is_known() -> None:
    """Each label as if its unknown images did not exist; one that nobody knows keeps its row."""
    features, labels = example(2)
    known = (np.random.default_rng(3).random(labels.shape) < 0.6).astype(np.float64)
    known[:, 3] = 0
    drawn = torch.ones(4, 5)
    head = solve(*sums(features, labels, known), 0.01, drawn)
    for c in range(3):
        rows = known[:, c] > 0
        alone = solve(*sums(features[rows], labels[rows, c : c + 1]), 0.01, drawn[:1])
        for name in head:
            np.testing.assert_allclose(head[name][c].numpy(), alone[name][0].numpy(), rtol=1e-9)
    assert torch.equal(head["head.weight"][3], drawn[3].double())
    assert bool(torch.isfinite(head["head.bias"]).all())


@pytest.mark.parametrize("stack", [1, 8])
@pytest.mark.parametrize("unknown", [False, True])
def test_clients_send_the_sums_of_the_pooled_data(stack: int, unknown: bool) -> None:
    """After the opening stage the model has the head of the pooled data, whatever the split."""
    data = toy_data(60)
    if unknown:
        mask = np.random.default_rng(0).random(data.labels.shape) < 0.7
        data = replace(data, known=mask.astype(np.uint8))
    for sizes in ((20, 7, 1, 13, 19), (60,)):
        toy = Toy(
            sizes=sizes, data=data, rounds=1, dtype=torch.float64, stack=stack, federation=CLOSED
        )
        (stage,) = toy.loop().opening
        before = toy.initial()
        everyone = list(range(len(sizes)))
        sent = stage.broadcast(before, 0, everyone)
        replies = list(toy.transport.exchange(stage, 0, sent))
        state = stage.aggregate(before, 0, sent, iter(replies)).state
        known = None if data.known is None else data.known.astype(np.float64)
        found = sums(features_of(toy), data.labels.astype(np.float64), known)
        expected = solve(*found, 0.01, before.get(PARAMS)["head.weight"])
        for name, tensor in expected.items():
            torch.testing.assert_close(state.get(PARAMS)[name], tensor, rtol=1e-9, atol=1e-9)
        others = [n for n in before.get(PARAMS) if not n.startswith("head.")]
        assert all(state.get(PARAMS)[n] is before.get(PARAMS)[n] for n in others)


@given(cut=st.lists(st.integers(1, 59), max_size=6, unique=True))
def test_any_split_gives_the_same_head(cut: list[int]) -> None:
    """Sums of parts are the sums of the whole."""
    features, labels = example(images=60)
    parts = [
        sums(f, y)
        for f, y in zip(*(np.split(a, sorted(cut)) for a in (features, labels)), strict=True)
    ]
    gram, cross = (torch.stack([p[i] for p in parts]).sum(0) for i in (0, 1))
    whole = solve(*sums(features, labels), 0.01, torch.zeros(4, 5))
    for name, tensor in solve(gram, cross, 0.01, torch.zeros(4, 5)).items():
        torch.testing.assert_close(tensor, whole[name], rtol=1e-8, atol=1e-8)


def test_a_solved_head_starts_the_training() -> None:
    """In round 0, after stages of the method without training, before the first with it."""
    plain, _ = Toy(rounds=1, federation=FederationSettings()).run()
    state, events = Toy(rounds=1, federation=CLOSED).run()
    assert not same_bits(plain, state)
    names = [stage.name for stage in Toy("fedrdn", federation=CLOSED).loop().stages(0)]
    assert names == ["statistics", "head", "update"]
    assert [s.name for s in Toy("fedrdn", federation=CLOSED).loop().stages(1)] == ["update"]
    sent = HeadStart(Toy(federation=CLOSED).method, 0.01).nbytes
    assert events[0]["bytes_up"] == plain_bytes(1) + 5 * sent


def plain_bytes(rounds: int) -> int:
    _, events = Toy(rounds=rounds).run()
    return int(sum(e["bytes_up"] for e in events))


@pytest.mark.parametrize("name", sorted(methods.names()))
def test_every_method_takes_part_or_says_why_not(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    warn_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        toy = Toy(name, SMALL.get(name), rounds=2, federation=replace(CLOSED, server_average=0.5))
        state, _ = toy.run()
    assert all(bool(t.isfinite().all()) for _, t in state.tensors() if t.is_floating_point())
    if name in ("spherefed", "fedlgt"):
        assert not toy.loop().opening
        assert f"the head of {name} as it is:" in caplog.text
    else:
        assert [stage.name for stage in toy.loop().opening] == ["head"]
        assert not caplog.text


@pytest.mark.parametrize(("clients", "asked"), [("all", 5), (2, 2), (9, 5), ("cohort", 3)])
def test_who_is_asked(clients: Any, asked: int) -> None:
    toy = Toy(rounds=1, cohort=3, federation=replace(CLOSED, head_clients=clients))
    _, events = toy.run()
    sent = HeadStart(toy.method, 0.01).nbytes
    plain = Toy(rounds=1, cohort=3).run()[1][0]["bytes_up"]
    assert events[0]["bytes_up"] == plain + asked * sent


def test_bytes_of_a_large_model_and_the_limit() -> None:
    """ViT-B and 1,628 labels: 769 · 770/2 + 1,628 · 769 numbers of 8 bytes, 12.4 MB.

    With unknown labels each label has a triangle of its own, 3.9 GB: refused.
    """
    task = Task(
        classes=1628, clients=2, rounds=4, batch_size=4, epochs=1, seed=0, width=768, lr=0.01
    )
    method = FedAvg(FedAvg.Config(), task)
    assert HeadStart(method, 0.01).nbytes == 8 * (769 * 770 // 2 + 1628 * 769)
    unknown = FedAvg(FedAvg.Config(), replace(task, unknown_labels=True))
    with pytest.raises(ConfigError, match=r"a matrix per label: 3,8\d\d MB"):
        HeadStart(unknown, 0.01)


# -- the average -----------------------------------------------------------------------------------


def model(value: float) -> Record:
    return Record({PARAMS: {"w": torch.tensor([float(value)])}, "other": {"x": torch.ones(1)}})


def averaged(rule: float | str, values: list[float]) -> list[float]:
    """What is shown after each of the global models."""
    average, state, shown = ServerAverage(rule), Record(), []
    for round, value in enumerate(values):
        new = Record({**state.groups, **model(value).groups}, state.scalars)
        state = average.add(state if round else model(0.0), new, round)
        assert state.get(PARAMS)["w"].item() == value  # clients go on from the global model
        shown.append(average.shown(state).get(PARAMS)["w"].item())
    return shown


def test_running_mean_by_hand() -> None:
    """E = 0, ¼, ⅖, ½, ½ with the limit ½: 4; ¼ · 4 + ¾ · 8 = 7; ⅖ · 7 + ⅗ · 2 = 4; 2 + 4 = 6; 3."""
    assert averaged(0.5, [4, 8, 2, 8, 0]) == pytest.approx([4, 7, 4, 6, 3])
    assert averaged(0.3, [4, 8, 2]) == pytest.approx([4, 7, 0.3 * 7 + 0.7 * 2])


def test_adaptive_mean_by_hand() -> None:
    """θ = 0, 2, 4, 6: ρ = 1, a model that travels is not averaged.

    θ = 4, 4, 0, 4, 0 (from 0): steps 4, 0, −4, 4, −4; Σ d·d' = 0, 0, −16, −8 − 16 = −24, …, never
    positive: e = min(0.9, t/(t + 3)) from the second step on: 0, ¼, ⅖, ½, 4/7.
    """
    assert averaged("adaptive", [2, 4, 6]) == [2, 4, 6]
    s = [4.0]
    for t, theta in enumerate([4.0, 0.0, 4.0, 0.0], start=1):
        e = t / (t + 3)
        s.append(e * s[-1] + (1 - e) * theta)
    assert averaged("adaptive", [4, 4, 0, 4, 0]) == pytest.approx(s)


def test_correlation_of_steps_by_hand() -> None:
    """Steps (1, 0), (1, 1), (0, 2): d·d' = 1 and 2; (1 + 2)/2 and (2 + 4)/2; older ones count half.

    ρ = (½ · 1 + 2) / (½ · 1.5 + 3) = 2.5/3.75 = ⅔.
    """
    thetas = torch.tensor([[0.0, 0], [1, 0], [2, 1], [2, 3]])
    state = Record({PARAMS: {"w": thetas[0]}})
    for theta in thetas[1:]:
        state = watch(state, state.replace({PARAMS: {"w": theta}}))
    along, length = (state.scalars[name] for name in ("average_along", "average_length"))
    assert (along, length) == (2.5, 3.75)
    assert share_kept(2.5, 3.75) == 0.0
    assert share_kept(0.1, 1.0) == pytest.approx(0.9 * 0.6)
    assert share_kept(0.0, 0.0) == 0.0


def test_nothing_is_kept_without_a_rule() -> None:
    state = model(3.0)
    assert ServerAverage().add(model(1.0), state, 0) is state
    assert ServerAverage().shown(state) is state


def test_training_does_not_depend_on_the_average() -> None:
    """The states differ by the average alone, until it takes the model's place at the end."""
    for rule in (0.7, "adaptive"):
        settings = FederationSettings(server_average=rule)
        plain: list[Record] = []
        with_average: list[Record] = []
        for federation, states in ((FederationSettings(), plain), (settings, with_average)):
            toy = Toy("fedharmony", federation=federation, rounds=3)
            loop = toy.loop()
            last = loop.run(toy.initial(), 0, lambda e: None, lambda t, s: states.append(s))  # noqa: B023
            assert same_bits(last, states[-1])
        for a, b in zip(plain[:-1], with_average[:-1], strict=True):
            assert same_bits(a, Record({g: t for g, t in b.groups.items() if g in a.groups}))
            assert len(b.groups) > len(a.groups)
        end = with_average[-1]
        assert end.groups.keys() == plain[-1].groups.keys()
        assert end.scalars == plain[-1].scalars
        travels = rule == "adaptive"  # so does the toy in its first rounds
        assert same_bits(end, plain[-1]) == travels
        if not travels:
            expected = averaged_by_hand([s.get(PARAMS) for s in plain])
            assert largest_difference(plain[-1].replace({PARAMS: expected}), end) < 1e-6


def averaged_by_hand(thetas: Any) -> dict[str, Tensor]:
    s = dict(thetas[0])
    for t, theta in enumerate(thetas[1:], start=1):
        e = min(0.7, t / (t + 3))
        s = {n: e * s[n] + (1 - e) * theta[n] for n in s}
    return s


def test_the_average_is_given_away_even_if_the_last_cohort_is_empty() -> None:
    """Results are of the averaged model; the checkpoint must hold that one, too."""
    toy, states = Toy(rounds=3, federation=FederationSettings(server_average=0.5)), []
    loop = replace(toy.loop(), schedule=[[0, 1], [2, 3], []])
    last = loop.run(toy.initial(), 0, lambda e: None, lambda t, state: states.append(state))
    shown = ServerAverage(0.5).shown(states[1])
    assert same_bits(last, shown)
    assert not same_bits(
        Record({PARAMS: last.get(PARAMS)}), Record({PARAMS: states[1].get(PARAMS)})
    )


def test_a_stage_after_the_last_training_sees_the_average() -> None:
    """SphereFed's calibration fits the model that is given away."""
    seen: list[Record] = []
    toy = Toy("spherefed", rounds=3, federation=FederationSettings(server_average=0.7))
    stage = toy.method.stages(2)[-1]
    assert stage.name == "calibrate"
    loop = toy.loop()
    exchange = loop.transport.exchange

    def watched(stage: Any, round: int, messages: Any) -> Any:
        if stage.name == "calibrate":
            seen.append(next(iter(messages.values())))
        return exchange(stage, round, messages)

    toy.transport.exchange = watched
    end = loop.run(toy.initial(), 0, lambda e: None, lambda t, s: None)
    assert same_bits(Record({PARAMS: seen[0].get(PARAMS)}), Record({PARAMS: end.get(PARAMS)}))
    plain, _ = Toy("spherefed", rounds=3).run()
    assert not same_bits(Record({PARAMS: plain.get(PARAMS)}), Record({PARAMS: end.get(PARAMS)}))


# -- as settings -----------------------------------------------------------------------------------


def demo(*changes: str) -> Settings:
    return load_settings("demo", [*SMALL_DEMO, *changes])


@pytest.mark.parametrize("rule", ["0.6", "adaptive"])
def test_a_resumed_run_has_the_same_average(tmp_path: Path, rule: str) -> None:
    settings = demo(f"federation.server_average={rule}", "federation.head_start=closed_form")

    def stop(event: dict[str, Any]) -> None:
        if event["event"] == "evaluate" and event["round"] == 1:
            raise RuntimeError

    whole = start(settings, RunFolder(tmp_path / "whole"), lambda event: None)
    with pytest.raises(RuntimeError):
        start(settings, RunFolder(tmp_path / "cut"), stop)
    again = resume(RunFolder(tmp_path / "cut"), lambda event: None)
    assert again["state_sha256"] == whole["state_sha256"]
    assert again["metrics"] == whole["metrics"]


def test_the_average_is_what_is_evaluated(tmp_path: Path) -> None:
    """Also between the rounds, where clients go on from another model; not in round 0."""
    found, curves = [], []
    for e in (0, 0.9):
        events: list[dict[str, Any]] = []
        settings = demo(f"federation.server_average={e}")
        found.append(start(settings, RunFolder(tmp_path / str(e)), events.append))
        curves.append([x["metrics"]["mAP"] for x in events if x["event"] == "evaluate"])
    assert found[0]["metrics"] != found[1]["metrics"]
    assert found[0]["state_sha256"] != found[1]["state_sha256"]
    assert [a == b for a, b in zip(*curves, strict=True)] == [True, False, False]


def test_every_method_has_the_preset_plus() -> None:
    for name in methods.names():
        settings = load_settings("demo", [f"run.method={name}:plus"])
        assert settings.taking_part.head_start == "closed_form"
        assert settings.taking_part.server_average == INGREDIENTS["federation"]["server_average"]
        assert next(iter(methods[name].presets)) != "plus"
        assert settings.federation.head_start == "random"
        assert settings.label.endswith(":plus")


def test_a_methods_own_federation_settings() -> None:
    """The file's over the preset's; both stand in the tree that a run writes down."""
    settings = demo("run.method=fedavg:plus", "methods.fedavg.federation.server_average=0.2")
    assert settings.taking_part.server_average == 0.2
    assert settings.tree()["methods"]["fedavg"]["federation"] == {
        "head_start": "closed_form",
        "server_average": 0.2,
    }
    other = demo("run.method=fedprox", "methods.fedavg.federation.server_average=0.2")
    assert other.taking_part.server_average == 0
    with pytest.raises(ConfigError, match=r"methods.fedavg.federation.cohort.*common to all"):
        demo("methods.fedavg.federation.cohort=3")


@pytest.mark.parametrize(
    "change",
    [
        "federation.server_average=1.0",
        "federation.server_average=-0.1",
        "federation.server_average=last:3",
        "federation.head_start=ridge",
        "federation.head_ridge=0",
        "federation.head_clients=0",
        "federation.head_clients=some",
    ],
)
def test_bad_settings_are_refused(change: str) -> None:
    with pytest.raises(ConfigError, match=change.partition("=")[0].rpartition(".")[2]):
        demo(change)


def test_too_many_labels_are_refused_before_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_start, "LARGEST_REPLY", 1000)
    settings = demo("federation.head_start=closed_form", "split.annotated=0.5")
    with pytest.raises(ConfigError, match="a matrix per label"):
        assemble(settings)


def test_off_is_off() -> None:
    """Without ingredients a state holds what it held before there were any."""
    state, _ = Toy(rounds=2).run()
    assert set(state.groups) <= {"params", "buffers", "frozen"}
