"""SphereFed against its equations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge
from torch import Tensor

from fedharmony.config import build
from fedharmony.data.base import DataSet, LabelledImages
from fedharmony.errors import ConfigError
from fedharmony.experiments.build import assemble
from fedharmony.experiments.settings import compose
from fedharmony.losses import Batch, LossSettings, task_loss
from fedharmony.methods.base import Outcome, Task
from fedharmony.methods.spherefed import COUNTS, SUMS, SphereFed
from fedharmony.models.heads import SphereHead, orthonormal_rows
from fedharmony.records import load_record, save_record
from fedharmony.rng import numpy_rng
from fedharmony.server.federation import FederationSettings
from fedharmony.types import FROZEN, PARAMS, Record, Reply
from toy import Toy, same_bits, toy_data

TASK = Task(classes=3, clients=2, rounds=4, batch_size=4, epochs=1, seed=0, width=4, lr=0.01)
HIDDEN = 8 * 48 + 8  # parameters of the toy backbone: 8 features of 4 × 4 × 3 pixels


def method(task: Task = TASK, **settings: Any) -> SphereFed:
    return SphereFed(SphereFed.Config(**settings), task)


def batch_of(labels: Any, known: Any = None, rows: Any = None) -> Batch:
    y = torch.tensor(labels, dtype=torch.float64)
    real = torch.ones(len(y)) if rows is None else torch.tensor(rows, dtype=torch.float32)
    counted = real[:, None].expand(y.shape)
    return Batch(y, real, counted if known is None else counted * torch.tensor(known))


def loss_of(sphere: SphereFed, outputs: Any, batch: Batch) -> tuple[float, Tensor]:
    """The loss, and its gradient with respect to the outputs."""
    o = torch.tensor(outputs, dtype=torch.float64, requires_grad=True)
    value, carry = sphere.loss(o, batch, {}, {})
    assert carry == {}
    return value.item(), torch.autograd.grad(value, o)[0]


# -- the head --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "width"), [(1, 1), (1, 8), (8, 8), (80, 768)])
def test_rows_are_orthonormal(rows: int, width: int) -> None:
    """Found in float64; what is left is the rounding of the entries (float32 QR: 4e-7)."""
    weight = orthonormal_rows(rows, width, torch.Generator().manual_seed(3))
    assert weight.dtype == torch.float32
    gram = weight.double() @ weight.double().T
    torch.testing.assert_close(gram, torch.eye(rows).double(), atol=8e-8, rtol=0)


def test_rows_are_those_of_gram_schmidt() -> None:
    """One Gaussian vector after the other, less its part along the earlier ones, to length 1."""
    gaussian = torch.randn(7, 4, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    expected: list[np.ndarray] = []
    for vector in gaussian.T.numpy():
        rest = vector - sum((vector @ row) * row for row in expected)
        expected.append(rest / np.sqrt(rest @ rest))
    rows = orthonormal_rows(4, 7, torch.Generator().manual_seed(5))
    np.testing.assert_allclose(rows.numpy(), np.stack(expected), atol=1e-7)


def test_directions_have_no_preferred_sign() -> None:
    """An uncorrected QR makes the first entry of the first row negative, always."""
    first = [orthonormal_rows(2, 3, torch.Generator().manual_seed(s))[0, 0] for s in range(300)]
    assert 110 < sum(bool(x > 0) for x in first) < 190  # 150 ± 4.6 standard deviations


def test_every_party_makes_the_same_rows_from_the_seed() -> None:
    head = SphereHead(width=9, classes=5)
    one, other, third = (head.init(torch.Generator().manual_seed(s)) for s in (1, 1, 2))
    assert same_bits(Record({FROZEN: one}), Record({FROZEN: other}))
    assert not torch.equal(one["head.weight"], third["head.weight"])
    assert not one["head.bias"].any()
    assert head.frozen == set(one)


def test_scores_are_cosines() -> None:
    """Against torch's cosine in float64; the length of the features does not matter."""
    generator = torch.Generator().manual_seed(0)
    head = SphereHead(width=6, classes=4)
    params = {n: t.double()[None] for n, t in head.init(generator).items()}
    features = torch.randn(1, 5, 6, generator=generator, dtype=torch.float64)
    scores = head.apply(params, features)
    rows = params["head.weight"][0]
    expected = torch.cosine_similarity(features[0, :, None], rows[None], dim=-1)
    torch.testing.assert_close(scores[0], expected, atol=1e-7, rtol=0)
    torch.testing.assert_close(head.apply(params, 1000 * features), scores)
    assert not head.apply(params, 0 * features).any()


def test_projection_leads_to_a_sphere_of_its_own() -> None:
    """12 labels on 8 features: a trained map to 12 dimensions, which travels; W does not."""
    data = toy_data(60, classes=12)
    toy = Toy("spherefed", {"projection": 12}, data=data, rounds=2, dtype=torch.float64)
    start = toy.initial()
    assert start.get(PARAMS)["head.project.weight"].shape == (12, 8)
    assert start.get(FROZEN)["head.weight"].shape == (12, 12)
    features = torch.randn(1, 3, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    whole = {n: t[None] for g in (PARAMS, FROZEN) for n, t in start.get(g).items()}
    mapped = features[0].numpy() @ whole["head.project.weight"][0].numpy().T
    unit = mapped / np.linalg.norm(mapped, axis=1, keepdims=True)
    scores = toy.model.head.apply(whole, features)[0]
    np.testing.assert_allclose(scores, unit @ whole["head.weight"][0].numpy().T, atol=1e-12)
    state, events = toy.run()
    moved = state.get(PARAMS)["head.project.weight"] - start.get(PARAMS)["head.project.weight"]
    assert moved.abs().max() > 1e-3
    assert events[0]["bytes_down"] == 5 * 8 * (HIDDEN + 12 * 8)
    assert events[1]["bytes_up"] == 5 * 8 * (HIDDEN + 12 * 8 + 13 * 14 // 2 + 13 * 12 + 1)
    expected = ridge(toy, state, range(60))
    assert largest(state, expected) < 1e-8


@pytest.mark.parametrize(("width", "projection"), [(2, None), (8, 2)])
def test_more_labels_than_dimensions_are_refused(width: int, projection: int | None) -> None:
    with pytest.raises(ConfigError, match=r"3 labels .* in 2 dimensions.*projection = 3"):
        method(projection=projection).head(width)
    assert method(projection=3).head(2).shapes()["head.weight"] == (3, 3)


def experiment(**sphere: Any) -> tuple[dict[str, Any], DataSet]:
    """Settings of a run on toy images, for a backbone of width 4 and six labels."""
    data = DataSet("toy", tuple("abcdef"), toy_data(40), toy_data(20, seed=1))
    tree = {
        "run": {"method": "spherefed", "rounds": 1},
        "split": {"name": "iid", "clients": 3},
        "model": {"name": "vit", "width": 4, "depth": 1, "heads": 1, "patch": 4},
        "methods": {"spherefed": sphere},
    }
    return tree, data


def test_more_labels_than_features_are_refused_before_round_zero() -> None:
    tree, data = experiment()
    with pytest.raises(ConfigError, match=r"6 labels .* in 4 dimensions"):
        assemble(compose(tree), data=data)
    tree, data = experiment(projection=6)
    assert assemble(compose(tree), data=data).initial_state().get(FROZEN)


# -- the loss --------------------------------------------------------------------------------------


@pytest.mark.parametrize("positives", [1, 2, 3, 4, 6])
def test_best_attainable_score_and_loss(positives: int) -> None:
    """W z is the projection of a unit vector onto orthonormal rows, so ‖W z‖ ≤ 1.

    All k positives alike: at most 1/√k each, at z = Wᵀy/√k. There a raw target y leaves
    k (1 − 1/√k)² = (√k − 1)², and no unit vector does better: ‖Wz − y‖ ≥ ‖y‖ − ‖Wz‖ ≥ √k − 1.
    The scaled target leaves 0.
    """
    root = math.sqrt(positives)
    W = orthonormal_rows(6, 8, torch.Generator().manual_seed(1)).double()
    y = (torch.arange(6) < positives).double()
    best = W @ (W.T @ y / root)
    torch.testing.assert_close(best, y / root, atol=1e-7, rtol=0)
    assert float((best - y).square().sum()) == pytest.approx((root - 1) ** 2, abs=1e-6)
    z = torch.randn(4000, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    z = torch.nn.functional.normalize(z, dim=-1)
    assert float((z @ W.T - y).square().sum(-1).min()) >= (root - 1) ** 2 - 1e-6
    sphere = method(replace(TASK, classes=6, width=8))
    value, gradient = loss_of(sphere, [best.tolist()], batch_of([y.tolist()]))
    assert value < 1e-12
    assert gradient.abs().max() < 1e-6


def test_loss_by_hand() -> None:
    """Image 1 has two labels, target (1, 1, 0)/√2; image 2 has none, target 0.

    (0.6 − 0.70711)² + (0.2 − 0.70711)² + 0.1² = 0.011472 + 0.257157 + 0.01 = 0.278629;
    0.3² + 0 + 0.5² = 0.34; their mean is 0.309315. The gradient is 2 (o − target) / 2.
    """
    value, gradient = loss_of(
        method(),
        [[0.6, 0.2, -0.1], [0.3, 0.0, 0.5]],
        batch_of([[1, 1, 0], [0, 0, 0]]),
    )
    assert value == pytest.approx(0.309315, abs=1e-6)
    expected = torch.tensor([[-0.107107, -0.507107, -0.1], [0.3, 0.0, 0.5]]).double()
    torch.testing.assert_close(gradient, expected, atol=1e-6, rtol=0)


def test_loss_counts_known_labels_only() -> None:
    """Label 2 unknown: the target is (1, 1)/√2, not (1, 1, 1)/√3, and its output is not judged.

    Label 0 with weight 1/4 (no positive on this client): 0.25 · 0.4² = 0.04.
    """
    known = batch_of([[1, 1, 1]], known=[[1.0, 1, 0]])
    value, gradient = loss_of(method(), [[0.5, 0.5, 9.0]], known)
    assert value == pytest.approx(2 * (0.5 - math.sqrt(0.5)) ** 2)
    assert gradient[0, 2] == 0
    weighted = batch_of([[0, 0, 0]], known=[[0.25, 1, 1]])
    assert loss_of(method(), [[0.4, 0, 0]], weighted)[0] == pytest.approx(0.04)


def test_loss_ignores_padding() -> None:
    """The mean is over real images: two of them, whatever stands in the other rows."""
    real = loss_of(method(), [[0.6, 0.2, -0.1], [0.3, 0, 0.5]], batch_of([[1, 1, 0], [0, 1, 0]]))
    outputs = [[0.6, 0.2, -0.1], [0.3, 0, 0.5], [7, 8, 9]]
    padded = batch_of([[1, 1, 0], [0, 1, 0], [1, 1, 1]], rows=[1, 1, 0])
    value, gradient = loss_of(method(), outputs, padded)
    assert value == pytest.approx(real[0], rel=1e-12)
    assert not gradient[2].any()


def test_s2_is_the_task_loss_on_scaled_cosines() -> None:
    """Logits 16 · o − 4: o = 0.25 gives 0, loss log 2; o = 0.5 gives 4, loss log(1 + e⁻⁴).

    (0.693147 + 0.018150) / 2 = 0.355648.
    """
    value, _ = loss_of(method(variant="s2"), [[0.25, 0.5]], batch_of([[0, 1]]))
    assert value == pytest.approx(0.355648, abs=1e-6)
    focal = replace(TASK, loss=LossSettings("focal"))
    batch = batch_of([[0, 1, 1]], known=[[1.0, 1, 0]])
    value, _ = loss_of(method(focal, variant="s2", scale=6.0), [[0.3, 0.1, 9]], batch)
    logits = torch.tensor([[6 * 0.3 - 1.5, 6 * 0.1 - 1.5, 0.0]]).double()
    assert value == pytest.approx(task_loss(focal.loss, logits, batch).item(), rel=1e-6)


def test_training_equals_a_plain_loop() -> None:
    """One client, one round, in float64: torch modules, torch's Adam, an explicit target."""
    toy = Toy("spherefed", sizes=(7,), rounds=1, dtype=torch.float64)
    start, data = toy.initial(), toy_data(7)
    hidden = torch.nn.Linear(48, 8).double()
    hidden.load_state_dict({n: start.get(PARAMS)[f"hidden.{n}"] for n in ("weight", "bias")})
    W = start.get(FROZEN)["head.weight"]
    optimiser = torch.optim.Adam(hidden.parameters(), lr=toy.lr)
    order = numpy_rng(toy.seed, "order", 0, 0)
    pixels = torch.from_numpy(inputs(data))
    labels = torch.from_numpy(data.labels).double()
    for _ in range(toy.epochs):
        epoch = order.permutation(7)
        for rows in (epoch[:4], epoch[4:]):
            phi = hidden(pixels[rows]).tanh()
            z = phi / phi.norm(dim=1, keepdim=True)
            y = labels[rows]
            target = y / y.norm(dim=1, keepdim=True).clamp(min=1)
            loss = (z @ W.T - target).square().sum() / len(rows)
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
    trained = toy.run()[0].get(PARAMS)
    for name, tensor in hidden.state_dict().items():
        torch.testing.assert_close(trained[f"hidden.{name}"], tensor, atol=1e-11, rtol=0)


# -- stages and payload ----------------------------------------------------------------------------


def test_when_everyone_counts_and_calibrates() -> None:
    def names(sphere: SphereFed) -> list[list[str]]:
        return [[s.name for s in sphere.stages(t)] for t in range(sphere.task.rounds)]

    update = ["update"]
    assert names(method()) == [["count", "update"], update, update, ["update", "calibrate"]]
    assert names(method(variant="s2")) == [update] * 4
    single = method(replace(TASK, rounds=1))
    assert names(single) == [["count", "update", "calibrate"]]
    assert [(s.everyone, s.train) for s in single.stages(0)] == [
        (True, False),
        (False, True),
        (True, False),
    ]


def test_the_head_never_travels() -> None:
    """A round moves the backbone, P0 floats each way, and nothing else.

    Counting adds two floats up per client; calibrating P0 down to everyone, and up, in float64, the
    upper triangle of 9 × 9, 9 × 6 numbers, and one for ‖φ‖: 45 + 54 + 1.
    """
    model = 4 * HIDDEN
    _, events = Toy("spherefed", rounds=3, cohort=2).run()
    assert [e["bytes_down"] for e in events] == [2 * model, 2 * model, 7 * model]
    assert [e["bytes_up"] for e in events] == [
        2 * model + 5 * 8,
        2 * model,
        2 * model + 5 * 8 * 100,
    ]
    _, events = Toy("spherefed", {"variant": "s2"}, rounds=2, cohort=2).run()
    assert [e["bytes_down"] for e in events] == [e["bytes_up"] for e in events] == [2 * model] * 2


def test_the_head_is_frozen_until_it_is_calibrated() -> None:
    toy, seen = Toy("spherefed", rounds=3), []
    start = toy.initial()
    assert set(start.get(PARAMS)) == {"hidden.weight", "hidden.bias"}
    assert set(start.get(FROZEN)) == {"head.weight", "head.bias"}
    toy.loop().run(start, 0, lambda e: None, lambda t, s: seen.append(s))
    heads = [Record({FROZEN: s.get(FROZEN)}) for s in (start, *seen)]
    assert same_bits(heads[0], heads[1])
    assert same_bits(heads[0], heads[2])
    assert not same_bits(heads[0], heads[3])
    assert [s.scalars.get("calibrated", False) for s in seen] == [False, False, True]


# -- calibration -----------------------------------------------------------------------------------


def test_calibration_by_hand() -> None:
    """One feature, one label. φ = 3 has the label, φ = −2 does not: z = 1 and −1, ỹ = (1, 0).

    Z̃ = [[1, 1], [−1, 1]], A = [[2, 0], [0, 2]], B = (1, 1). With ridge = 1, ρ is the mean diagonal
    entry 2: W* = (1/4, 1/4), so ŷ = 1/2 and 0. The mean of ‖φ‖ is 2.5. A padding row changes
    nothing.
    """
    sphere = method(replace(TASK, classes=1, width=1), ridge=1.0)
    sweep = sphere.sums()
    batch = batch_of([[1], [0], [1]], rows=[1, 1, 0])
    carry = sweep.fold(sweep.start({}), torch.tensor([[3.0], [-2.0], [8.0]]), batch)
    sums = sweep.finish(carry, {})
    assert sums["a"].tolist() == [2, 0, 2]
    assert sums["b"].tolist() == [[1], [1]]
    assert {n: (tuple(t.shape), t.dtype) for n, t in sums.items()} == {
        n: form[:2] for n, form in sweep.forms({}).items()
    }
    fixed = {"head.weight": torch.ones(1, 1), "head.bias": torch.zeros(1)}
    reply = Reply(0, 2, Record({SUMS: sums}))
    outcome = sphere.calibrate(Record({FROZEN: fixed}), 3, {}, iter([reply]))
    head = outcome.state.get(FROZEN)
    assert head["head.weight"].tolist() == [[0.25]]
    assert head["head.bias"].tolist() == [0.25]
    assert head["head.weight"].dtype == torch.float32
    assert outcome.log == {"feature_norm": 2.5}
    phi = torch.tensor([[[3.0], [-2.0]]])
    scores = SphereHead(1, 1).apply({n: t[None] for n, t in head.items()}, phi)
    assert scores.flatten().tolist() == [0.5, 0.0]


def inputs(data: LabelledImages) -> np.ndarray:
    """(x − 127.5) / 127.5 as the model gets it: rounded to float32."""
    pixels = data.images.pixels.numpy().reshape(len(data), -1).astype(np.float32)
    return ((pixels - np.float32(127.5)) / np.float32(127.5)).astype(np.float64)


def features(toy: Toy, state: Record) -> np.ndarray:
    """φ of all training images, in plain NumPy and float64."""
    params = {n: t.double().numpy() for n, t in state.get(PARAMS).items()}
    phi = np.tanh(inputs(toy.data) @ params["hidden.weight"].T + params["hidden.bias"])
    return phi @ params["head.project.weight"].T if "head.project.weight" in params else phi


def ridge(toy: Toy, state: Record, images: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Weights (C, L) and intercepts of scikit-learn's ridge regression on pooled images."""
    images = list(images)
    phi = features(toy, state)[images]
    z = phi / np.linalg.norm(phi, axis=1, keepdims=True)
    z = np.hstack([z, np.ones((len(z), 1))])
    known = np.ones_like(toy.data.labels) if toy.data.known is None else toy.data.known
    y = (toy.data.labels * known)[images].astype(np.float64)
    alpha = toy.method.config.ridge * (z**2).sum() / z.shape[1]
    # A constant column in place of the intercept, so that it is penalised too.
    fitted = (
        Ridge(alpha, fit_intercept=False, solver="cholesky").fit(z, y).coef_.reshape(y.shape[1], -1)
    )
    return fitted[:, :-1], fitted[:, -1]


def largest(state: Record, expected: tuple[np.ndarray, np.ndarray]) -> float:
    head = state.get(FROZEN)
    found = (head["head.weight"].numpy(), head["head.bias"].numpy())
    return max(float(np.abs(a - b).max()) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("strength", [1e-3, 0.3])
def test_calibration_equals_centralised_ridge_regression(strength: float) -> None:
    """Everyone's images, though only two clients trained per round, and however they are held."""
    toy = Toy("spherefed", {"ridge": strength}, cohort=2, dtype=torch.float64)
    state, events = toy.run()
    assert largest(state, ridge(toy, state, range(60))) < 1e-8
    mean = np.linalg.norm(features(toy, state), axis=1).mean()
    assert [e["log"] for e in events[:-1]] == [{}, {}]
    assert events[-1]["log"]["feature_norm"] == pytest.approx(mean, rel=1e-10)


def calibrated(toy: Toy, state: Record) -> Outcome:
    """The last stage alone, from a given model."""
    stage = toy.method.stages(toy.rounds - 1)[-1]
    sent = stage.broadcast(state, toy.rounds - 1, range(len(toy.sizes)))
    replies = (r for r in toy.transport.exchange(stage, 0, sent) if isinstance(r, Reply))
    return stage.aggregate(state, toy.rounds - 1, sent, replies)


def test_calibration_does_not_depend_on_split_or_stack() -> None:
    start = Toy("spherefed", dtype=torch.float64).initial()
    one = calibrated(Toy("spherefed", sizes=(60,), dtype=torch.float64), start)
    assert largest(one.state, ridge(Toy("spherefed"), start, range(60))) < 1e-8
    head = one.state.get(FROZEN)
    expected = (head["head.weight"].numpy(), head["head.bias"].numpy())
    for sizes, stack in (((20, 7, 1, 13, 19), 8), ((20, 7, 1, 13, 19), 1), ((1,) * 60, 30)):
        other = calibrated(Toy("spherefed", sizes=sizes, stack=stack, dtype=torch.float64), start)
        assert largest(other.state, expected) < 1e-10
        assert other.log["feature_norm"] == pytest.approx(one.log["feature_norm"], rel=1e-12)


def test_calibration_in_float32_is_that_of_float64() -> None:
    """Sums are float64 whatever the model is; features and the result carry float32's rounding."""
    toy = Toy("spherefed")
    state, _ = toy.run()
    assert state.get(FROZEN)["head.weight"].dtype == torch.float32
    assert largest(state, ridge(toy, state, range(60))) < 1e-4


def test_a_label_without_positives_keeps_its_fixed_row() -> None:
    data = toy_data(60)
    labels = data.labels.copy()
    labels[:, 3] = 0
    toy = Toy("spherefed", data=LabelledImages(data.images, labels), dtype=torch.float64)
    state, _ = toy.run()
    fixed, head = toy.initial().get(FROZEN), state.get(FROZEN)
    assert torch.equal(head["head.weight"][3], fixed["head.weight"][3])
    assert head["head.bias"][3] == 0
    weight, bias = ridge(toy, state, range(60))
    weight[3], bias[3] = fixed["head.weight"][3], 0
    assert largest(state, (weight, bias)) < 1e-8


def test_unknown_labels_count_as_absent_in_the_calibration() -> None:
    data = toy_data(60)
    known = np.random.default_rng(2).random(data.labels.shape) < 0.6
    toy = Toy("spherefed", data=replace(data, known=known), dtype=torch.float64)
    state, _ = toy.run()
    assert largest(state, ridge(toy, state, range(60))) < 1e-8
    assert largest(state, ridge(Toy("spherefed", data=data), state, range(60))) > 1e-3


def test_drop_outs_are_left_out_of_the_calibration() -> None:
    settings = FederationSettings(drop_rate=0.5)
    sizes = (9,) * 6 + (6,)
    toy = Toy("spherefed", sizes=sizes, rounds=2, federation=settings, dtype=torch.float64)
    state, events = toy.run()
    lost = [entry["client"] for entry in events[-1]["left_out"]]
    assert 2 <= len(lost) <= 5
    clients = toy.trainer.data.clients.items()
    there = [i for k, own in clients if k not in lost for i in own]
    assert largest(state, ridge(toy, state, there)) < 1e-8
    assert largest(state, ridge(toy, state, range(60))) > 1e-3


def test_nobody_answers() -> None:
    """The model is kept; cosines are then judged as those of images with one label."""
    toy = Toy("spherefed")
    start = toy.initial()
    outcome = toy.method.calibrate(start, 2, {}, iter([]))
    assert outcome.state is start
    assert outcome.log == {}
    counted = toy.method.count(start, 0, {}, iter([])).state
    assert counted.scalars == {"labels_per_image": 1.0}
    threshold = torch.tensor([[0.5]])
    assert toy.method.predict(threshold, start).item() == 0.5
    assert toy.method.predict(threshold, counted).item() == 0.5


def test_one_label() -> None:
    data = toy_data(60)
    one = LabelledImages(data.images, data.labels[:, :1].copy())
    toy = Toy("spherefed", data=one, dtype=torch.float64)
    assert toy.initial().get(FROZEN)["head.weight"].norm() == pytest.approx(1.0, abs=1e-6)
    state, _ = toy.run()
    assert largest(state, ridge(toy, state, range(60))) < 1e-8


# -- decisions -------------------------------------------------------------------------------------


def test_labels_per_image_by_hand() -> None:
    """Client 0: 3 known labels on 2 images; client 1: 6 on 1: k̂ = 9/3. Padding is not counted."""
    sphere = method()
    sweep = sphere.counts()
    batch = batch_of(
        [[1, 1, 1], [0, 1, 0], [1, 1, 1]], [[1.0, 1, 0], [1, 1, 1], [1, 1, 1]], [1, 1, 0]
    )
    counts = sweep.finish(sweep.fold(sweep.start({}), batch.labels, batch), {})
    assert {n: float(t) for n, t in counts.items()} == {"labels": 3, "images": 2}
    assert {n: tuple(t.shape) for n, t in counts.items()} == {
        n: form.shape for n, form in sweep.forms({}).items()
    }
    other = {"labels": torch.tensor(6.0), "images": torch.tensor(1.0)}
    replies = [Reply(k, 1, Record({COUNTS: c})) for k, c in enumerate((counts, other))]
    state = sphere.count(Record({}, {"kept": 1}), 0, {}, iter(replies)).state
    assert state.scalars == {"kept": 1, "labels_per_image": 3.0}


def test_labels_per_image_of_a_run() -> None:
    state, _ = Toy("spherefed", cohort=2).run()
    assert state.scalars["labels_per_image"] == pytest.approx(toy_data(60).labels.sum(1).mean())


@pytest.mark.parametrize(
    ("variant", "scalars", "threshold"),
    [
        ("s1", {"labels_per_image": 4.0, "calibrated": True}, 0.5),
        ("s1", {"labels_per_image": 4.0}, 0.25),
        ("s1", {"labels_per_image": 0.3}, 0.5),  # targets are never longer than 1
        ("s2", {}, 0.25),
    ],
)
def test_decisions(variant: str, scalars: dict[str, Any], threshold: float) -> None:
    """0.5/√4 = 0.25. The threshold itself decides for the label; order is kept without ties."""
    outputs = torch.linspace(-1, 2, 3001)
    scores = method(variant=variant).predict(outputs, Record({}, scalars))
    at = torch.tensor([threshold - 1e-4, threshold, threshold + 1e-4])
    below, on, above = method(variant=variant).predict(at, Record({}, scalars)).tolist()
    assert below < 0.5
    assert on == 0.5
    assert above > 0.5
    slope = 4.0 if variant == "s2" else 1.0  # scale/4; else the score is the linear score here
    assert (above - below) / 2e-4 == pytest.approx(slope, rel=1e-2)
    inside = outputs[(outputs > -0.9) & (outputs < 0.9)] if variant == "s2" else outputs
    scores = method(variant=variant).predict(inside, Record({}, scalars))
    assert (scores.diff() > 0).all()
    assert 0 <= scores.min() < scores.max() <= 1


def test_evaluation_uses_the_calibrated_head() -> None:
    """Scores of a finished run decide like ŷ = W*[z; 1] ≥ 0.5, recomputed in NumPy."""
    toy = Toy("spherefed", dtype=torch.float64)
    state, _ = toy.run()
    phi = features(toy, state)
    z = phi / np.linalg.norm(phi, axis=1, keepdims=True)
    weight, bias = ridge(toy, state, range(60))
    linear = z @ weight.T + bias
    whole = {n: t[None] for g in (PARAMS, FROZEN) for n, t in state.get(g).items()}
    images = toy.method.normalise(toy.data.images.pixels, toy.method.evaluation(state), {}).double()
    scores = toy.method.predict(toy.model.apply(whole, images[None])[0], state).numpy()
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(-4 * (linear - 0.5))), atol=1e-6)
    assert 0 < (linear >= 0.5).mean() < 1
    clear = np.abs(linear - 0.5) > 1e-5
    assert ((scores >= 0.5) == (linear >= 0.5))[clear].all()


def test_state_survives_a_checkpoint(tmp_path: Path) -> None:
    toy = Toy("spherefed", rounds=2)
    toy.loop().run(toy.initial(), 0, lambda e: None, lambda t, s: save_record(tmp_path / str(t), s))
    half, whole = (load_record(tmp_path / name) for name in "01")
    assert set(half.scalars) == {"labels_per_image"}
    assert whole.scalars == {**half.scalars, "calibrated": True}
    resumed = toy.loop().run(half, 1, lambda e: None, lambda t, s: None)
    assert same_bits(resumed, whole)
    assert resumed.scalars == whole.scalars


def test_calibration_helps_where_labels_are_several() -> None:
    """On the toy's training images: calibrated scores fit the labels better than cosines do."""
    toy, errors = Toy("spherefed", rounds=10), []
    state, _ = toy.run()
    for head in (toy.initial(), state):
        state = state.replace({FROZEN: head.get(FROZEN)})
        whole = {n: t[None] for g in (PARAMS, FROZEN) for n, t in state.get(g).items()}
        outputs = toy.model.apply(whole, toy.method.normalise(toy.data.images.pixels, {}, {})[None])
        errors.append(float((outputs[0] - torch.from_numpy(toy.data.labels)).square().mean()))
    assert errors[1] < 0.8 * errors[0]


# -- settings --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong", [{"variant": "s0"}, {"ridge": 0.0}, {"scale": 0.0}, {"projection": 0}]
)
def test_wrong_settings_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=next(iter(wrong))):
        build(SphereFed.Config, wrong, "methods.spherefed")
