"""The four task losses, their masks and weights, and what a client counts for them."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedharmony.config import build, tree_of
from fedharmony.errors import ConfigError
from fedharmony.losses import (
    Batch,
    LossSettings,
    entries,
    label_weights,
    positive_weights,
    task_loss,
)

F64 = torch.float64
LOG3, LOG4 = math.log(3.0), math.log(4.0)
BCE = LossSettings()
LOSSES = [
    BCE,
    LossSettings("balanced"),
    LossSettings("focal"),
    LossSettings("focal", focal_gamma=0.5, focal_alpha=0.25),
    LossSettings("asymmetric"),
    LossSettings("asymmetric", asymmetric_gamma_pos=1.0, asymmetric_gamma_neg=0.5),
    LossSettings("asymmetric", asymmetric_gamma_neg=0.5, asymmetric_margin=0.0),
]
every_loss = pytest.mark.parametrize("loss", LOSSES, ids=lambda s: s.name)
quick = settings(max_examples=60, derandomize=True)


def column(
    logits: list[float], labels: list[float], *, weight: float = 1.0
) -> tuple[Tensor, Batch]:
    """Images with one label, float64; all entries count."""
    z = torch.tensor(logits, dtype=F64)[:, None].requires_grad_()
    y = torch.tensor(labels, dtype=F64)[:, None]
    return z, Batch(y, torch.ones(len(y)), torch.ones_like(y), torch.tensor([weight], dtype=F64))


def random_batch(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> tuple[Tensor, Batch]:
    """Logits (..., B, C) up to about ±9 and a batch with weights of all kinds."""
    generator = torch.Generator().manual_seed(seed)
    logits = 3.0 * torch.randn(shape, generator=generator, dtype=dtype)
    labels = (torch.rand(shape, generator=generator) < 0.4).to(dtype)
    counted = torch.tensor([0.0, 0.25, 1.0], dtype=dtype)[
        torch.randint(3, shape, generator=generator)
    ]
    weight = 0.1 + 5.0 * torch.rand(*shape[:-2], shape[-1], generator=generator, dtype=dtype)
    return logits, Batch(labels, torch.ones(shape[:-1], dtype=dtype), counted, weight)


def slope(loss: LossSettings, logits: Tensor, batch: Batch) -> Tensor:
    (gradient,) = torch.autograd.grad(entries(loss, logits, batch).sum(), logits)
    return gradient


def close(actual: Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(
        actual.detach().flatten(), torch.tensor(expected, dtype=actual.dtype), rtol=1e-5, atol=1e-6
    )


# Small numbers


def test_balanced_by_hand() -> None:
    """Factor 3 at z = log 3, p = 3/4: y = 1 costs 3 log(4/3) = 0.863046, y = 0 costs log 4 =
    1.386294; slopes 3(p − 1) = −3/4 and p = 3/4.
    """
    logits, batch = column([LOG3, LOG3], [1, 0], weight=3.0)
    close(entries(LossSettings("balanced"), logits, batch), [0.863046, 1.386294])
    close(slope(LossSettings("balanced"), logits, batch), [-0.75, 0.75])


@pytest.mark.parametrize("loss", [s for s in LOSSES if s.name != "balanced"])
def test_only_the_balanced_loss_reads_the_positive_weight(loss: LossSettings) -> None:
    logits, batch = random_batch(4, 3)
    other = batch._replace(positive_weight=torch.full((3,), 7.0))
    assert torch.equal(entries(loss, logits, batch), entries(loss, logits, other))


def test_focal_by_hand() -> None:
    """γ = 2, z = log 3, p = 3/4, dp/dz = 3/16. y = 1: (1/4)² log(4/3) = 0.017980 with slope
    3/16 · [−2 (1/4) log(4/3) − (1/4)²/(3/4)] = 3/16 · −0.227174 = −0.042595. y = 0:
    (3/4)² log 4 = 0.779791 with slope 3/16 · [2 (3/4) log 4 + (3/4)²/(1/4)] = 0.811770.
    α = 1/4 makes them a quarter and three quarters: 0.004495, 0.584843.
    """
    logits, batch = column([LOG3, LOG3], [1, 0])
    close(entries(LossSettings("focal"), logits, batch), [0.017980, 0.779791])
    close(slope(LossSettings("focal"), logits, batch), [-0.042595, 0.811770])
    close(entries(LossSettings("focal", focal_alpha=0.25), logits, batch), [0.004495, 0.584843])


def test_asymmetric_by_hand() -> None:
    """γ₊ = 1, γ₋ = 2, m = 1/4, z = log 3, p = 3/4. y = 1: (1/4) log(4/3) = 0.071921. y = 0:
    q = 1/2, (1/2)² log 2 = 0.173287; slope p(1−p) [2q log(1/(1−q)) + q²/(1−q)] =
    3/16 · (log 2 + 1/2) = 0.223715. y = 0 at z = −log 4, p = 1/5 ≤ m: nothing, and no slope.
    """
    loss = LossSettings(
        "asymmetric", asymmetric_gamma_pos=1.0, asymmetric_gamma_neg=2.0, asymmetric_margin=0.25
    )
    logits, batch = column([LOG3, LOG3, -LOG4], [1, 0, 0])
    close(entries(loss, logits, batch), [0.071921, 0.173287, 0.0])
    close(slope(loss, logits, batch)[1:], [0.223715, 0.0])


def test_mean_by_weights() -> None:
    """Negatives at z = 0 and z = −log 3 cost log 2 and log(4/3) = 0.287682. Weights 1 and 1/2:
    (0.693147 + 0.143841) / 1.5 = 0.557992; a hundredth of both weights is the same mean.
    """
    logits, batch = column([0.0, -LOG3], [0, 0])
    weights = torch.tensor([[1.0], [0.5]])
    for scale in (1.0, 0.01, 1e-30):
        batch = batch._replace(counted=scale * weights)
        close(task_loss(BCE, logits, batch), [0.557992])


def test_positive_weights_by_hand() -> None:
    """n⁻/n⁺ = 8/2, 1/4, 7/0, 0/5 and 0/0: the last label is not known, all others are clipped."""
    positives, negatives = torch.tensor([2, 4, 0, 5, 0]), torch.tensor([8, 1, 7, 0, 0])

    def weights(**options: Any) -> Tensor:
        return positive_weights(LossSettings("balanced", **options), positives, negatives)

    close(weights(), [4, 0.25, 20, 0.05, 1])
    close(weights(balance_power=0.5), [2, 0.5, 20, 0.05, 1])
    close(weights(balance_power=0.01), [4**0.01, 0.25**0.01, 20, 0.05, 1])
    close(weights(balance_power=0.0), [1, 1, 1, 1, 1])
    close(weights(max_positive_weight=3.0), [3, 1 / 3, 3, 1 / 3, 1])
    for loss in (LossSettings("bce"), LossSettings("focal"), LossSettings("asymmetric")):
        close(positive_weights(loss, positives, negatives), [1, 1, 1, 1, 1])


def test_full_balance_gives_both_sides_the_same_total() -> None:
    """At z = 0 each entry costs log 2 times its weight: 3 negatives and 1 positive at w = 3."""
    logits, batch = column([0.0] * 4, [1, 0, 0, 0])
    loss = LossSettings("balanced")
    batch = batch._replace(positive_weight=positive_weights(loss, *torch.tensor([[1], [3]])))
    close(slope(loss, logits, batch).sum(), [0.0])
    close(entries(loss, logits, batch)[0], [3 * math.log(2)])


def test_label_weights() -> None:
    positives = torch.tensor([[3, 0], [0, 1]])
    weights = label_weights(LossSettings(absent_label_weight=0), positives)
    assert weights.shape == (2, 2)
    close(weights, [1, 0, 0, 1])
    close(label_weights(BCE, positives), [1, 1, 1, 1])


# References and identities


def plain_bce(logits: Tensor, labels: Tensor, mask: Tensor) -> Tensor:
    """Masked mean BCE for masks of zeros and ones, spelt out."""
    values = F.binary_cross_entropy_with_logits(logits, labels, reduction="none")
    return (values * mask).sum((-2, -1)) / mask.sum((-2, -1)).clamp(min=1.0)


@pytest.mark.parametrize("shape", [(5, 4), (3, 16, 20)])
def test_masked_bce_to_the_bit(shape: tuple[int, ...]) -> None:
    """Values and gradients; with weights 0 and 1, and with a client whose mask is all zeros."""
    logits, batch = random_batch(*shape, dtype=torch.float32)
    mask = (batch.counted > 0.5).float()
    for counted in (mask, torch.ones_like(mask), mask.index_fill(0, torch.tensor([0]), 0.0)):
        batch = batch._replace(counted=counted, positive_weight=torch.ones(shape[:-2] + shape[-1:]))
        z = logits.clone().requires_grad_()
        expected = plain_bce(z, batch.labels, counted)
        (gradient,) = torch.autograd.grad(expected.sum(), z)
        value = task_loss(BCE, z, batch)
        assert torch.equal(value, expected)
        assert torch.equal(torch.autograd.grad(value.sum(), z)[0], gradient)


@pytest.mark.parametrize(
    "loss",
    [
        LossSettings("balanced"),
        LossSettings("focal", focal_gamma=0.0),
        LossSettings(
            "asymmetric",
            asymmetric_gamma_pos=0.0,
            asymmetric_gamma_neg=0.0,
            asymmetric_margin=0.0,
        ),
    ],
    ids=lambda s: s.name,
)
def test_without_its_parameters_each_loss_is_bce(loss: LossSettings) -> None:
    """A batch without positive weights has them all at 1."""
    logits, batch = random_batch(6, 5)
    batch = Batch(batch.labels, batch.rows, batch.counted)
    logits.requires_grad_()
    torch.testing.assert_close(entries(loss, logits, batch), entries(BCE, logits, batch))
    torch.testing.assert_close(slope(loss, logits, batch), slope(BCE, logits, batch))


def test_focal_without_alpha_is_asymmetric_without_margin() -> None:
    logits, batch = random_batch(6, 5)
    focal = LossSettings("focal", focal_gamma=1.5)
    asymmetric = LossSettings(
        "asymmetric", asymmetric_gamma_pos=1.5, asymmetric_gamma_neg=1.5, asymmetric_margin=0.0
    )
    assert torch.equal(entries(focal, logits, batch), entries(asymmetric, logits, batch))


@pytest.mark.parametrize("gamma", [0.0, 0.5, 2.0, 5.0])
@pytest.mark.parametrize("alpha", [None, 0.0, 0.25, 1.0])
def test_focal_against_torchvision(gamma: float, alpha: float | None) -> None:
    ops = pytest.importorskip("torchvision.ops")
    logits, batch = random_batch(6, 5)
    logits.requires_grad_()
    loss = LossSettings("focal", focal_gamma=gamma, focal_alpha=alpha)
    expected = ops.sigmoid_focal_loss(
        logits, batch.labels, alpha=-1.0 if alpha is None else alpha, gamma=gamma
    )
    torch.testing.assert_close(entries(loss, logits, batch), expected)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(slope(loss, logits, batch), gradient)


@pytest.mark.parametrize("margin", [0.0, 0.05, 0.4])
@pytest.mark.parametrize("gammas", [(0.0, 4.0), (1.0, 0.5), (0.0, 0.0)])
def test_asymmetric_against_its_definition(margin: float, gammas: tuple[float, float]) -> None:
    logits, batch = random_batch(6, 5)
    logits.requires_grad_()
    loss = LossSettings("asymmetric", 1.0, 1.0, 20.0, 2.0, None, *gammas, margin)
    p = logits.sigmoid()
    q = (p - margin).clamp(min=0.0)
    positive = -((1 - p) ** gammas[0]) * p.log()
    # A negative below the margin would meet 0^(γ−1): its own entry is 0 whatever the factor.
    factor = torch.where(q > 0, q, torch.ones_like(q)) ** gammas[1]
    expected = torch.where(batch.labels == 1, positive, -factor * (1 - q).log())
    torch.testing.assert_close(entries(loss, logits, batch), expected)
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    torch.testing.assert_close(slope(loss, logits, batch), gradient)


@every_loss
def test_gradients(loss: LossSettings) -> None:
    logits, batch = random_batch(2, 4, 3, seed=1)
    assert torch.autograd.gradcheck(
        lambda z: task_loss(loss, z, batch), (logits.requires_grad_(),), check_forward_ad=False
    )


@quick
@given(
    z=st.floats(-60, 60),
    y=st.booleans(),
    gamma=st.floats(0, 6),
    margin=st.sampled_from([0.0, 1e-9, 0.05, 0.5]),
)
def test_float32_is_near_float64(z: float, y: bool, gamma: float, margin: float) -> None:
    for loss in (
        LossSettings("focal", focal_gamma=gamma),
        LossSettings("asymmetric", asymmetric_gamma_neg=gamma, asymmetric_margin=margin),
    ):
        logits, batch = column([z], [float(y)])
        single = logits.detach().float().requires_grad_()
        exact = single.detach().double().requires_grad_()
        for of in (entries, slope):
            expected = of(loss, exact, batch)
            torch.testing.assert_close(
                of(loss, single, batch).double(), expected, rtol=1e-4, atol=1e-4
            )


# Extreme logits


def test_small_losses_are_not_rounded_away() -> None:
    """Right at |z| = 20: 1 − p and −log p are both e⁻²⁰, and γ = 1 multiplies them to e⁻⁴⁰; as a
    difference, 1 − p would be 0 in float32.
    """
    logits, labels = torch.tensor([[20.0], [-20.0]]), torch.tensor([[1.0], [0.0]])
    batch = Batch(labels, torch.ones(2), torch.ones(2, 1))
    loss = LossSettings("focal", focal_gamma=1.0)
    expected = torch.full((2, 1), math.exp(-40))
    torch.testing.assert_close(entries(loss, logits, batch), expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [1e3, 1e4, 1e30])
@pytest.mark.parametrize("gamma", [0.0, 0.01, 0.5, 1.0, 2.0, 4.0])
@pytest.mark.parametrize("margin", [0.0, 1e-40, 1e-9, 0.05])
def test_finite_at_extreme_logits(size: float, gamma: float, margin: float) -> None:
    """Certain and right costs 0. Certain and wrong costs |z|, but a negative with a margin m > 0,
    where q = 1 − m, costs (1 − m)^γ log(1/m) without slope.
    """
    logits = torch.tensor([[size], [size], [-size], [-size]], requires_grad=True)
    labels = torch.tensor([[1.0], [0.0], [0.0], [1.0]])
    batch = Batch(labels, torch.ones(4), torch.ones(4, 1), torch.ones(1))
    asymmetric = LossSettings("asymmetric", 1.0, 1.0, 20.0, 2.0, None, gamma, gamma, margin)
    for loss in (BCE, LossSettings("balanced"), LossSettings("focal", focal_gamma=gamma)):
        close(entries(loss, logits, batch), [0.0, size, 0.0, size])
        close(slope(loss, logits, batch), [0.0, 1.0, 0.0, -1.0])
    wrong = (1 - margin) ** gamma * math.log(1 / margin) if margin else size
    close(entries(asymmetric, logits, batch), [0.0, wrong, 0.0, size])
    close(slope(asymmetric, logits, batch), [0.0, float(margin == 0), 0.0, -1.0])


# Masks


@every_loss
def test_what_does_not_count_has_no_gradient(loss: LossSettings) -> None:
    """Nor does its value matter, even an extreme one."""
    logits, batch = random_batch(6, 5)
    hidden = batch.counted == 0
    logits.requires_grad_()
    value = task_loss(loss, logits, batch)
    (gradient,) = torch.autograd.grad(value, logits)
    assert hidden.any()
    assert (gradient[hidden] == 0).all()
    assert (gradient[~hidden & (batch.labels == 1)] != 0).all()
    wild = torch.where(hidden, 1e4 * logits.sign(), logits)
    assert torch.equal(task_loss(loss, wild, batch), value)
    flipped = batch._replace(labels=torch.where(hidden, 1 - batch.labels, batch.labels))
    assert torch.equal(task_loss(loss, logits, flipped), value)


@every_loss
def test_zero_when_nothing_counts(loss: LossSettings) -> None:
    logits, batch = random_batch(6, 5, dtype=torch.float32)
    logits.requires_grad_()
    value = task_loss(loss, logits, batch._replace(counted=torch.zeros(6, 5)))
    assert value.item() == 0.0
    assert (torch.autograd.grad(value, logits)[0] == 0).all()


# Clients


def client(batch: Batch, k: int) -> Batch:
    assert isinstance(batch.positive_weight, Tensor)
    return Batch(batch.labels[k], batch.rows[k], batch.counted[k], batch.positive_weight[k])


@every_loss
def test_a_stack_is_its_clients(loss: LossSettings) -> None:
    """A leading client axis, torch.vmap over it, and one call per client."""
    logits, batch = random_batch(3, 4, 5)
    single = torch.stack([task_loss(loss, logits[k], client(batch, k)) for k in range(3)])
    assert len(set(single.tolist())) == 3
    torch.testing.assert_close(task_loss(loss, logits, batch), single)
    mapped = torch.vmap(lambda z, b: task_loss(loss, z, b))(logits, batch)
    torch.testing.assert_close(mapped, single)


@every_loss
def test_gradient_through_vmap(loss: LossSettings) -> None:
    logits, batch = random_batch(3, 4, 5)
    logits.requires_grad_()
    mapped = torch.vmap(lambda z, b: task_loss(loss, z, b))(logits, batch).sum()
    (expected,) = torch.autograd.grad(task_loss(loss, logits, batch).sum(), logits)
    torch.testing.assert_close(torch.autograd.grad(mapped, logits)[0], expected)


def test_vmap_takes_a_batch_with_and_without_its_optional_fields() -> None:
    logits, full = random_batch(3, 4, 5)
    bare = Batch(full.labels, full.rows, full.counted)
    assert (bare.positive_weight, dict(bare.draws), dict(bare.inputs)) == ((), {}, {})
    expected = torch.vmap(lambda z, batch: task_loss(BCE, z, batch))(logits, bare)
    extra = full._replace(draws={"shift": torch.arange(12.0).view(3, 4)}, inputs={"tokens": logits})

    def loss(z: Tensor, batch: Batch) -> Tensor:
        assert batch.draws["shift"].shape == (4,)
        assert batch.inputs["tokens"].shape == (4, 5)
        return task_loss(BCE, z, batch)

    torch.testing.assert_close(torch.vmap(loss)(logits, extra), expected)


# Settings


def test_settings_from_a_section() -> None:
    loss = build(LossSettings, {"name": "focal", "focal_alpha": 0.25}, "loss")
    assert loss == LossSettings("focal", focal_alpha=0.25)
    assert build(LossSettings, tree_of(loss), "loss") == loss
    assert build(LossSettings, tree_of(BCE), "loss") == BCE


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("name", "hinge"),
        ("absent_label_weight", -0.1),
        ("absent_label_weight", 0.1),
        ("absent_label_weight", 1.1),
        ("balance_power", -0.1),
        ("balance_power", 1.1),
        ("max_positive_weight", 0.9),
        ("focal_gamma", -1.0),
        ("focal_alpha", 1.5),
        ("asymmetric_gamma_pos", -1.0),
        ("asymmetric_gamma_neg", -1.0),
        ("asymmetric_margin", -0.1),
        ("asymmetric_margin", 1.0),
    ],
)
def test_illegal_settings_are_refused(key: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"loss\.{key} = .* is not allowed"):
        build(LossSettings, {key: value}, "loss")
