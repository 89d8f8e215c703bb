"""Eq. (1) and (2), running moments, Ψ and the aggregation weights."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import matthews_corrcoef
from torch import Tensor

from fedharmony.correlation import (
    Moments,
    MomentsApart,
    PairMoments,
    RunningMoments,
    aggregation_weights,
    alpha_schedule,
    correlation,
    discrepancy,
    effective_clients,
    empty_running,
    label_correlation,
    pair_correlation,
    pair_mask,
    pair_moments,
    quality_weights,
    running_discrepancy,
    running_step,
    score_moments,
    soft_correlation,
    update_rate,
)
from fedharmony.errors import ConfigError, DataError

F64 = torch.float64
quick = settings(deadline=None, max_examples=60, derandomize=True)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


# Eq. (1) and (2)


def test_moments_by_hand():
    """Scores (0.8, 0.1), (0.4, 0.5): means 0.6, 0.3; joint (0.08 + 0.2)/2 = 0.14, squares
    (0.64 + 0.16)/2 = 0.4 and (0.01 + 0.25)/2 = 0.13. R_01 = (0.14 − 0.18)/sqrt(0.24·0.21) =
    −0.178174 and R_00 = (0.4 − 0.36)/0.24 = 1/6. Two points lie on a line: Pearson is −1.
    """
    moments = score_moments(torch.tensor([[0.8, 0.1], [0.4, 0.5]], dtype=F64))
    first, second = moments.first, moments.second
    torch.testing.assert_close(first, torch.tensor([0.6, 0.3], dtype=F64))
    torch.testing.assert_close(second, torch.tensor([[0.4, 0.14], [0.14, 0.13]], dtype=F64))
    matrix = correlation(moments, eps=0)
    assert matrix[0, 1].item() == pytest.approx(-0.04 / math.sqrt(0.24 * 0.21), abs=1e-12)
    assert matrix[0, 0].item() == pytest.approx(1 / 6, abs=1e-12)
    pearson = correlation(moments, normaliser="pearson", eps=0)
    torch.testing.assert_close(pearson, torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=F64))


def test_epsilon_is_added_to_the_denominator():
    moments = score_moments(draw(8, 2))
    deviation = (moments.first * (1 - moments.first)).sqrt()
    expected = correlation(moments, eps=0)[0, 1] * deviation.prod() / (deviation.prod() + 0.5)
    torch.testing.assert_close(correlation(moments, eps=0.5)[0, 1], expected)


def test_hard_scores_give_the_phi_coefficient():
    labels = (draw(300, 6) < torch.tensor([0.5, 0.3, 0.1, 0.7, 0.2, 0.4])).to(F64)
    labels[:, 1] = labels[:, 0] * labels[:, 1]
    matrix = soft_correlation(labels, eps=0)
    for c, d in itertools.product(range(6), repeat=2):
        expected = matthews_corrcoef(labels[:, c].numpy(), labels[:, d].numpy())
        assert matrix[c, d].item() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("logit", "expected"), [(0.5, 0.04), (1, 0.15), (2, 0.43), (4, 0.74), (40, 0.81)]
)
def test_uncertain_scores_shrink_the_correlation(logit, expected):
    """Two labels of prevalence π = 0.3 with φ = 0.81, hence P(both) = 0.09 + 0.81·0.21 = 0.2601.

    A score σ(±a) is σ(−a) + y·t with t = tanh(a/2), so the covariance is t²·0.21·φ and the mean
    p = σ(−a) + 0.3t, and R = φ·0.21·t² / (p(1−p)). For a = 2: t = 0.761594, p = 0.347681,
    R = 0.81·0.21·0.580026/0.226799 = 0.4350.
    """
    counts = {(1, 1): 2601, (1, 0): 399, (0, 1): 399, (0, 0): 6601}
    labels = torch.tensor([pair for pair, n in counts.items() for _ in range(n)], dtype=F64)
    assert label_correlation(labels)[0][0, 1].item() == pytest.approx(0.81, abs=1e-12)
    matrix = soft_correlation(torch.sigmoid(logit * (2 * labels - 1)))
    assert matrix[0, 1].item() == pytest.approx(expected, abs=0.01)
    t, p = math.tanh(logit / 2), 1 / (1 + math.exp(logit)) + 0.3 * math.tanh(logit / 2)
    assert matrix[0, 1].item() == pytest.approx(0.81 * 0.21 * t**2 / (p * (1 - p)), abs=1e-5)


@quick
@given(rows=st.integers(1, 12), classes=st.integers(1, 6), seed=st.integers(0, 10**6))
def test_matrix_is_symmetric_positive_and_shrunk(rows, classes, seed):
    """A covariance scaled on both sides is positive semidefinite, and Var(F) <= p(max F − p) gives
    |R_cc'| <= sqrt(max F_c max F_c').
    """
    scores = draw(rows, classes, seed=seed) ** (1 + seed % 5)
    matrix = soft_correlation(scores, eps=0)
    assert torch.equal(matrix, matrix.T)
    assert torch.linalg.eigvalsh(matrix).min() >= -1e-12
    largest = scores.max(0).values.sqrt()
    assert (matrix.abs() <= torch.outer(largest, largest) + 1e-12).all()
    # ε takes at most ε/(s s') off an entry, s² = p(1−p) >= 1e-4.
    assert (soft_correlation(scores) - matrix).abs().max() <= 1e-2


@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize("normaliser", ["phi", "pearson"])
def test_one_image_gives_exactly_zero(dtype, normaliser):
    scores = draw(1, 9, dtype=dtype)
    assert not soft_correlation(scores, normaliser=normaliser).any()
    padded = torch.cat((scores, draw(3, 9, seed=1, dtype=dtype)))
    real = torch.tensor([1, 0, 0, 0])
    assert not soft_correlation(padded, real, normaliser=normaliser).any()


@pytest.mark.parametrize("normaliser", ["phi", "pearson"])
@pytest.mark.parametrize("dtype", [torch.float32, F64])
@pytest.mark.parametrize(
    "scores",
    [
        torch.zeros(4, 3),
        torch.ones(4, 3),
        torch.full((4, 3), 0.3),
        torch.full((7, 3), 1e-30),
        torch.tensor([[0.0, 1.0, 0.5], [0.0, 1.0, 0.7], [1e-9, 1.0 - 1e-7, 0.1]]),
        torch.tensor([[0.9]]),
        torch.zeros(0, 3),
    ],
    ids=["zeros", "ones", "constant", "tiny", "mixed", "single", "empty"],
)
def test_degenerate_scores_stay_finite(scores, dtype, normaliser):
    scores = scores.to(dtype).requires_grad_()
    matrix = soft_correlation(scores, normaliser=normaliser)
    (gradient,) = torch.autograd.grad(matrix.square().sum() + matrix.sum(), scores)
    assert finite(matrix)
    assert finite(gradient)
    assert matrix.abs().max() <= 1 + 1e-5


def test_constant_score_has_pearson_correlation_zero_after_averaging_too():
    """Averaged moments are rounded, so that the variance of a constant is not exactly 0."""
    variances = []
    for constant in torch.linspace(0.05, 0.95, 19).tolist():
        column = torch.full((10, 1), constant)
        scores = torch.cat((column, draw(10, 1).float()), 1)
        parts = score_moments(scores[:3]), score_moments(scores[3:])
        whole = Moments(*((3 * one + 7 * two) / 10 for one, two in zip(*parts, strict=True)))
        variances.append((whole.second[0, 0] - whole.first[0] ** 2).item())
        matrix = correlation(whole, normaliser="pearson", eps=0)
        assert matrix[0].tolist() == [0, 0]
        assert matrix[1, 1].item() == pytest.approx(1, abs=1e-5)
    assert max(variances) > 0


def test_clamp_acts_on_the_denominator_only():
    """One positive in 10⁵: p = 1e-5, Var = p(1−p); the clamped variance is 1e-4·(1 − 1e-4)."""
    scores = torch.zeros(100_000, 1, dtype=F64)
    scores[0] = 1
    variance = 1e-5 * (1 - 1e-5)
    expected = variance / (1e-4 * (1 - 1e-4))
    assert soft_correlation(scores, eps=0).item() == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("normaliser", ["phi", "pearson"])
def test_gradient_against_finite_differences(normaliser):
    scores = draw(5, 3).requires_grad_()
    weights = torch.tensor([1, 1, 0, 1, 1])
    assert torch.autograd.gradcheck(
        lambda s: soft_correlation(s, weights, normaliser=normaliser), (scores,)
    )


def test_detached_denominator_scales_the_gradient_of_the_covariance():
    scores = draw(6, 3).requires_grad_()
    moments = score_moments(scores)
    covariance = moments.second - torch.outer(moments.first, moments.first)
    deviation = (moments.first * (1 - moments.first)).sqrt().detach()
    weights = draw(3, 3, seed=5)
    expected = (weights * covariance / (torch.outer(deviation, deviation) + 1e-6)).sum()
    actual = (weights * soft_correlation(scores, denominator_grad=False)).sum()
    (one,), (two,) = (torch.autograd.grad(x, scores, retain_graph=True) for x in (actual, expected))
    torch.testing.assert_close(one, two)
    (through,) = torch.autograd.grad((weights * soft_correlation(scores)).sum(), scores)
    assert not torch.allclose(one, through)


def test_padding_changes_nothing():
    scores = draw(5, 4)
    padded = torch.cat((scores[:2], draw(3, 4, seed=1), scores[2:]))
    real = torch.tensor([1, 1, 0, 0, 0, 1, 1, 1])
    for plain, masked in zip(score_moments(scores), score_moments(padded, real), strict=True):
        torch.testing.assert_close(plain, masked, rtol=0, atol=1e-15)
    empty = score_moments(padded, torch.zeros(8))
    assert not empty.first.any()
    assert not empty.second.any()


def test_padding_rows_get_no_gradient():
    scores = draw(4, 3).requires_grad_()
    real = torch.tensor([1, 0, 1, 1])
    (gradient,) = torch.autograd.grad(soft_correlation(scores, real).sum(), scores)
    assert not gradient[1].any()
    assert gradient[0].any()
    (gradient,) = torch.autograd.grad(soft_correlation(scores, torch.zeros(4)).sum(), scores)
    assert not gradient.any()


@pytest.mark.parametrize("normaliser", ["phi", "pearson"])
def test_vmap_loop_and_native_stack_agree(normaliser):
    scores = draw(2, 3, 6, 4)
    weights = (draw(2, 3, 6, seed=1) < 0.7).to(F64)
    teacher, pairs = draw(4, 4, seed=2), pair_mask(torch.tensor([0, 1, 0, 1]))

    def loss(scores: Tensor, weights: Tensor) -> Tensor:
        running = empty_running(4, leading=scores.shape[:-2], dtype=F64)
        for _ in range(2):
            valid = weights.sum(-1) > 0
            rate = 0.3 * valid
            estimate, running = running_step(running, score_moments(scores, weights), rate)
        return discrepancy(correlation(estimate, normaliser=normaliser), teacher, pairs)

    native = loss(scores, weights)
    stacked = torch.vmap(torch.vmap(loss))(scores, weights)
    looped = [loss(s, w) for s, w in zip(scores.flatten(0, 1), weights.flatten(0, 1), strict=True)]
    torch.testing.assert_close(native, stacked, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(native.flatten(), torch.stack(looped), rtol=1e-12, atol=1e-15)
    gradients = torch.vmap(torch.vmap(torch.func.grad(loss)))(scores, weights)
    variable = scores.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(variable, weights).sum(), variable)
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-14)


def test_autocast_and_half_precision_compute_in_float32():
    scores = draw(16, 5).float()
    exact = soft_correlation(scores)
    with torch.autocast("cpu", torch.bfloat16):
        assert (scores.mT @ scores).dtype == torch.bfloat16  # autocast is on
        assert torch.equal(soft_correlation(scores), exact)
        low = scores.bfloat16()
        assert torch.equal(soft_correlation(low), soft_correlation(low.float()))
        psi = discrepancy(low.mT @ low, low.mT @ low, torch.ones(5, 5, dtype=torch.bool))
    assert psi.dtype == torch.float32
    assert exact.dtype == torch.float32


def test_centring_keeps_float32_accurate_for_frequent_labels():
    """At p ≈ 0.999 joint probabilities agree to 3 digits with p p', which is where R comes from."""
    scores = 1 - 0.002 * draw(64, 4)
    exact = soft_correlation(scores.float().double())
    torch.testing.assert_close(soft_correlation(scores.float()).double(), exact, rtol=0, atol=5e-4)


def test_many_classes():
    scores = draw(16, 1628).float().requires_grad_()
    matrix = soft_correlation(scores)
    pairs = pair_mask(torch.arange(1628) % 40)
    (gradient,) = torch.autograd.grad(discrepancy(matrix, torch.zeros_like(matrix), pairs), scores)
    assert matrix.shape == (1628, 1628)
    assert torch.equal(matrix, matrix.T)
    assert finite(gradient)


def test_impossible_options_are_refused():
    moments = score_moments(draw(3, 2))
    with pytest.raises(ConfigError, match="Did you mean 'pearson'"):
        correlation(moments, normaliser="person")
    with pytest.raises(ConfigError, match="clamp"):
        correlation(moments, clamp=0)
    with pytest.raises(ConfigError, match="distance"):
        discrepancy(moments.second, moments.second, torch.ones(2, 2).bool(), kind="kl")


# φ of true labels


@pytest.mark.parametrize("container", [np.asarray, torch.as_tensor])
def test_label_correlation_against_scikit_learn(container):
    labels = (draw(10_000, 4).numpy() < [0.5, 0.1, 0.02, 0.9]).astype(np.uint8)
    labels[:, 1] |= labels[:, 2]
    matrix, defined = label_correlation(container(labels))
    for c, d in itertools.product(range(4), repeat=2):
        assert matrix[c, d].item() == pytest.approx(
            matthews_corrcoef(labels[:, c], labels[:, d]), abs=1e-12
        )
    assert matrix.dtype == F64
    assert torch.equal(matrix.diagonal(), torch.ones(4, dtype=F64))
    assert defined.all()


def test_label_that_does_not_vary_is_undefined():
    labels = np.array([[1, 0, 1], [1, 0, 0], [1, 0, 1]], dtype=np.uint8)
    matrix, defined = label_correlation(labels)
    assert defined.tolist() == [False, False, True]
    assert matrix.tolist() == [[0, 0, 0], [0, 0, 0], [0, 0, 1]]
    assert not label_correlation(np.zeros((0, 2), np.uint8))[1].any()


@quick
@given(seed=st.integers(0, 10**6), rows=st.integers(1, 15))
def test_missing_labels_are_left_out_pair_by_pair(seed, rows):
    labels = (draw(rows, 3, seed=seed) < 0.5).numpy()
    known = (draw(rows, 3, seed=seed + 1) < 0.8).numpy()
    matrix, defined = label_correlation(labels, known=known)
    for c, d in itertools.product(range(3), repeat=2):
        both = known[:, c] & known[:, d]
        one, two = labels[both, c], labels[both, d]
        varies = both.any() and one.min() < one.max() and two.min() < two.max()
        expected = np.corrcoef(one, two)[0, 1] if varies else 0.0
        assert matrix[c, d].item() == pytest.approx(expected, abs=1e-12)
        if c == d:
            assert defined[c].item() == varies


def test_labels_other_than_0_and_1_are_refused():
    with pytest.raises(DataError, match="0 and 1"):
        label_correlation(np.array([[0, 2]]))
    with pytest.raises(DataError, match="shape"):
        label_correlation(np.array([0, 1]))
    unknown = torch.tensor([[True, False], [True, False]])
    matrix, _ = label_correlation(torch.tensor([[0, -1], [1, -1]]), known=unknown)
    assert matrix.tolist() == [[1, 0], [0, 0]]


# Running moments


def test_gradient_by_hand_of_two_images():
    """Two labels, scores (1, 1) and (0, 0), teacher ½: p̃ = ½, p̃_12 = ½, d = ½, so R_12 = 1.

    Ψ = (½² + ½²) / 2 = ¼; E = 2 · ½ / 2 = ½; W = ½ / ¼ = 2. d' = (½ − p̃)/d = 0, so ∂Ψ/∂p̃_1 =
    −2 · 2 · ½ = −2 and ∂Ψ/∂F_i1 = (−2 + 2 · 2 · F_i2) / 2: 1 for the first image, −1 for the
    second.
    """
    scores = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=torch.float64, requires_grad=True)
    value, after = running_discrepancy(
        scores,
        torch.ones(2),
        MomentsApart.empty(2),
        1.0,
        torch.full((2, 2), 0.5),
        pair_mask(torch.tensor([0, 0])),
        2.0,
        eps=1e-12,
    )
    value.backward()
    assert value.item() == pytest.approx(0.25)
    torch.testing.assert_close(scores.grad, torch.tensor([[1.0, 1], [-1, -1]]).double())
    assert after.first.tolist() == [0.5, 0.5]
    assert after.second.flatten().tolist() == [0.5] * 4
    assert bool(after.started)


@pytest.mark.parametrize(("denominator_grad", "clamp"), [(True, 1e-4), (True, 0.45), (False, 0.45)])
@pytest.mark.parametrize("batches", [1, 3])
def test_gradient_by_hand_is_that_of_autograd(batches, denominator_grad, clamp):
    """Value, gradient and state over batches; padding rows, unequal rates, p̂ beyond the clamp."""
    clients, rows, labels = 3, 5, 7
    generator = torch.Generator().manual_seed(batches)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    teacher = draw(clients, labels, labels).tanh()
    teacher = (teacher + teacher.mT) / 2
    pairs = draw(clients, labels, labels) > 0
    pairs = pairs | pairs.mT
    pairs[2] = False
    rate = torch.tensor([0.2, 0.5, 1.0], dtype=torch.float64)
    weights = torch.ones(clients, rows, dtype=torch.float64)
    weights[1, 3:] = 0
    one = empty_running(labels, leading=(clients,), dtype=torch.float64)
    other = MomentsApart(one.moments.first.clone(), one.moments.second.clone(), one.started.clone())
    count = pairs.sum((-2, -1)).clamp_min(1)
    for _ in range(batches):
        logits = 3 * draw(clients, rows, labels)
        logits[0, :, 0] = -20.0
        found = []
        for by_hand in (False, True):
            scores = logits.sigmoid().requires_grad_()
            if by_hand:
                value, other = running_discrepancy(
                    scores,
                    weights,
                    other,
                    rate,
                    teacher,
                    pairs,
                    count,
                    clamp=clamp,
                    denominator_grad=denominator_grad,
                )
            else:
                estimate, one = running_step(one, score_moments(scores, weights), rate)
                local = correlation(estimate, clamp=clamp, denominator_grad=denominator_grad)
                value = discrepancy(local, teacher, pairs)
            (gradient,) = torch.autograd.grad((value * torch.arange(1, 4)).sum(), scores)
            found.append((value.detach(), gradient))
        for by_autograd, by_formula in zip(*found, strict=True):
            torch.testing.assert_close(by_formula, by_autograd, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(other.second, one.moments.second)
    assert found[1][1][1, 3:].abs().max() == 0  # padding rows
    assert found[1][1][:2].abs().max() > 1e-3


def test_running_value_is_the_average_and_gradient_is_the_batch():
    batches = [draw(6, 3, seed=s) for s in range(3)]
    running = empty_running(3, dtype=F64)
    mean: Moments | None = None
    for scores in batches:
        scores = scores.requires_grad_()
        batch = score_moments(scores)
        estimate, running = running_step(running, batch, 0.25)
        # The first batch initialises; then 3/4 of the past and 1/4 of the present.
        mean = (
            batch
            if mean is None
            else Moments(*(0.75 * old + 0.25 * new for old, new in zip(mean, batch, strict=True)))
        )
        for value, expected in zip(estimate, mean, strict=True):
            torch.testing.assert_close(value, expected, rtol=0, atol=1e-15)
        mean = Moments(*(m.detach() for m in mean))
        weights = draw(4, 3, seed=9)
        (actual, plain) = (
            torch.autograd.grad((weights * m.values).sum(), scores, retain_graph=True)[0]
            for m in (estimate, batch)
        )
        assert torch.equal(actual, plain)
        assert not running.moments.second.requires_grad
    assert running.started.item()


def test_batch_without_a_real_row_changes_nothing():
    """Client 0 has rows in both batches, client 1 in the first only, client 2 in none."""
    scores = draw(3, 4, 2)
    rows = torch.ones(3, 4)
    rows[2] = 0
    _, running = running_step(
        empty_running(2, leading=(3,), dtype=F64),
        score_moments(scores, rows),
        update_rate(rows.sum(-1), 8.0),
    )
    assert running.started.tolist() == [True, True, False]
    rows[1] = 0
    scores = draw(3, 4, 2, seed=1).requires_grad_()
    rate = update_rate(rows.sum(-1), 8.0)
    estimate, after = running_step(running, score_moments(scores, rows), rate)
    assert after.started.tolist() == [True, True, False]
    for old, new, value in zip(running.moments, after.moments, estimate, strict=True):
        assert torch.equal(old[1:], new[1:])
        assert torch.equal(value[1:], new[1:])
        assert not torch.equal(old[0], new[0])
        assert not new[2].any()
    (gradient,) = torch.autograd.grad(correlation(estimate).sum(), scores)
    assert gradient[0].any()
    assert not gradient[1:].any()


def test_each_client_may_have_its_own_rate():
    one, two = score_moments(draw(2, 4, 3)), score_moments(draw(2, 4, 3, seed=1))
    start = empty_running(3, leading=(2,), dtype=F64)
    _, running = running_step(start, one, 0.5)
    estimate, _ = running_step(running, two, torch.tensor([1.0, 0.0]))
    assert torch.equal(estimate.first[0], two.first[0])
    assert torch.equal(estimate.second[1], one.second[1])


def test_state_takes_the_precision_of_the_batch():
    batch = score_moments(draw(4, 2))
    estimate, running = running_step(empty_running(2), batch, 0.5)
    assert estimate.second.dtype == running.moments.second.dtype == F64
    assert torch.equal(estimate.second, batch.second)


def test_update_rate():
    rows = torch.tensor([16.0, 16.0, 4.0, 1.0, 0.0])
    spans = torch.tensor([320.0, 512.0, 1.0, 16.0, 16.0])
    expected = torch.tensor([0.05, 16 / 512, 1.0, 1 / 16, 0.0])
    assert torch.equal(update_rate(rows, spans), expected)


def test_a_short_batch_moves_running_moments_by_its_share():
    """17 images in batches of 16 and 1: (16 · first + 1 · second) / 17 is their mean, to rounding.

    At the rate of a full batch, 16/17, the one image of the second would all but replace them.
    """
    scores = draw(17, 3)
    whole = score_moments(scores)
    one, other = empty_running(3, dtype=F64), MomentsApart.empty(3)
    for batch in (scores[:16], scores[16:]):
        rate = update_rate(torch.tensor(len(batch), dtype=F64), 17.0)
        estimate, one = running_step(one, score_moments(batch), rate)
        _, other = running_discrepancy(
            batch,
            torch.ones(len(batch)),
            other,
            rate,
            torch.zeros(3, 3),
            pair_mask(torch.zeros(3)),
            6,
        )
    torch.testing.assert_close(estimate.values, whole.values, rtol=0, atol=1e-14)
    torch.testing.assert_close(other.first, whole.first, rtol=0, atol=1e-14)
    torch.testing.assert_close(other.second, whole.second, rtol=0, atol=1e-14)


def test_an_empty_batch_changes_nothing_by_hand_either():
    scores, pairs, zero = draw(4, 2), pair_mask(torch.zeros(2)), torch.zeros(2, 2)
    nothing, rows = torch.zeros(4), torch.ones(4)
    _, empty = running_discrepancy(scores, nothing, MomentsApart.empty(2), 0.0, zero, pairs, 2)
    assert not empty.started
    _, begun = running_discrepancy(scores, rows, empty, 0.1, zero, pairs, 2)  # the first one: ω = 1
    torch.testing.assert_close(begun.first, scores.mean(0))
    _, after = running_discrepancy(draw(4, 2, seed=1), nothing, begun, 0.0, zero, pairs, 2)
    assert after.started
    assert torch.equal(after.first, begun.first)
    assert torch.equal(after.second, begun.second)


# Unknown labels


@pytest.mark.parametrize("normaliser", ["phi", "pearson"])
@pytest.mark.parametrize("seed", range(3))
def test_pairs_are_estimated_where_both_labels_are_known(seed, normaliser):
    """Each entry is that of a matrix made of the images alone on which both labels are known."""
    scores = draw(12, 4, seed=seed)
    known = draw(12, 4, seed=seed + 10) < 0.6
    known[:, 3] = False
    rows = torch.ones(12)
    rows[10:] = 0
    known = known & (rows > 0).unsqueeze(-1)
    moments = pair_moments(scores, known, rows, squares=normaliser == "pearson")
    matrix, defined = pair_correlation(moments, normaliser=normaliser)
    assert torch.equal(defined, (known.double().mT @ known.double()) > 0)
    for a in range(3):
        torch.testing.assert_close(moments.marginal[a], scores[known[:, a], a].mean())
        for b in range(3):
            both = known[:, a] & known[:, b]
            if both.any():
                alone = soft_correlation(scores[both][:, [a, b]], normaliser=normaliser)
                torch.testing.assert_close(matrix[a, b], alone[0, 1], rtol=1e-9, atol=1e-12)
    assert not matrix[3].any()
    assert not matrix[:, 3].any()
    assert moments.marginal[3] == 0


@pytest.mark.parametrize("normaliser", ["phi", "pearson"])
def test_pairs_of_known_labels_are_the_plain_matrix(normaliser):
    scores = draw(2, 9, 4)
    moments = pair_moments(scores, torch.ones(2, 9, 4), squares=True)
    matrix, defined = pair_correlation(moments, normaliser=normaliser)
    plain = correlation(score_moments(scores), normaliser=normaliser)
    torch.testing.assert_close(matrix, plain, rtol=1e-10, atol=1e-14)
    assert defined.all()


def test_pairs_of_labels_are_phi_coefficients():
    labels, known = draw(40, 4) < 0.4, draw(40, 4, seed=1) < 0.7
    expected, _ = label_correlation(labels, known=known)
    found, _ = pair_correlation(pair_moments(labels.double(), known), eps=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("denominator_grad", [True, False])
def test_unknown_labels_get_no_gradient(denominator_grad):
    scores = draw(6, 3).requires_grad_()
    known = draw(6, 3, seed=1) < 0.6

    def total(scores: Tensor) -> Tensor:
        moments = pair_moments(scores, known, torch.ones(6))
        matrix, _ = pair_correlation(moments, denominator_grad=denominator_grad)
        return (matrix * draw(3, 3, seed=2)).sum()

    (gradient,) = torch.autograd.grad(total(scores), scores)
    assert gradient[known].ne(0).all()
    assert not gradient[~known].any()
    if denominator_grad:
        assert torch.autograd.gradcheck(total, (scores,), eps=1e-6, atol=1e-6)


def test_running_pairs_are_the_pairs_of_all_batches():
    """Batches of 3, 3 and 2 images with other labels known in each: those of all eight together."""
    scores, known = draw(8, 3), draw(8, 3, seed=5) < 0.5
    whole = pair_moments(scores, known)
    classes = 3
    running = RunningMoments(
        PairMoments(torch.zeros(3 * classes, classes, dtype=F64)), torch.tensor(False)
    )
    seen = 0
    for part in (slice(0, 3), slice(3, 6), slice(6, 8)):
        seen += len(scores[part])
        rate = len(scores[part]) / seen
        batch = pair_moments(scores[part], known[part])
        estimate, running = running_step(running, batch, rate)
    torch.testing.assert_close(estimate.values, whole.values, rtol=0, atol=1e-14)


# Pairs and Ψ


def test_pairs_by_hand():
    clusters = torch.tensor([1, 0, 1, -1, -1])
    known = torch.ones(5, 5, dtype=torch.bool)
    assert pair_mask(clusters).nonzero().tolist() == [[0, 2], [2, 0]]
    assert pair_mask(clusters, diagonal=True).sum().item() == 2 + 5
    known[0, 2] = known[2, 0] = known[3, 3] = False
    assert not pair_mask(clusters, known).any()
    assert pair_mask(clusters, known, diagonal=True).nonzero().tolist() == [
        [0, 0],
        [1, 1],
        [2, 2],
        [4, 4],
    ]
    assert not pair_mask(torch.tensor([0])).any()
    assert pair_mask(torch.stack((clusters, clusters))).shape == (2, 5, 5)


def test_distances_by_hand():
    """Included entries 0.3 and 0.4 against 0 and 0: squares 0.09 + 0.16 = 0.25, norm 0.5; mean
    0.125, root mean square 0.353553. Against 0.4 and 0.3: cosine (0.12 + 0.12)/0.25 = 0.96.
    """
    matrix = torch.tensor([[9.0, 0.3], [0.4, math.nan]], dtype=F64)  # the rest is not looked at
    zero, other = torch.zeros(2, 2, dtype=F64), torch.tensor([[1.0, 0.4], [0.3, 1.0]], dtype=F64)
    pairs = pair_mask(torch.tensor([0, 0]))

    def psi(teacher: Tensor, **options: str) -> float:
        return discrepancy(matrix, teacher, pairs, **options).item()

    assert psi(zero) == pytest.approx(0.125)
    assert psi(zero, reduction="sum") == pytest.approx(0.25)
    assert psi(zero, kind="frobenius") == pytest.approx(math.sqrt(0.125))
    assert psi(zero, kind="frobenius", reduction="sum") == pytest.approx(0.5)
    assert psi(other, kind="cosine") == pytest.approx(0.04)
    assert psi(zero, kind="cosine") == 1


def test_sum_of_squares_is_the_sum_over_blocks():
    matrix, teacher = draw(7, 7), draw(7, 7, seed=1)
    clusters = torch.tensor([0, 1, 0, 2, 1, 0, 1])
    blocks = [(clusters == g).nonzero().flatten() for g in range(3)]
    expected = sum(((matrix - teacher)[b][:, b] ** 2).sum() for b in blocks)
    pairs = pair_mask(clusters, diagonal=True)
    torch.testing.assert_close(discrepancy(matrix, teacher, pairs, reduction="sum"), expected)


@pytest.mark.parametrize("kind", ["squared_frobenius", "frobenius", "cosine"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_pairs_and_no_difference_have_zero_gradient(kind, reduction):
    matrix = draw(2, 3, 3).requires_grad_()
    options = {"kind": kind, "reduction": reduction}
    pairs = torch.stack((torch.zeros(3, 3), torch.ones(3, 3))).bool()
    value = discrepancy(matrix, draw(3, 3, seed=1), pairs, **options)
    (gradient,) = torch.autograd.grad(value.sum(), matrix)
    assert value[0].item() == 0
    assert value[1].item() > 0
    assert not gradient[0].any()
    assert gradient[1].any()
    same = discrepancy(matrix, matrix.detach(), pairs, **options)
    (gradient,) = torch.autograd.grad(same.sum(), matrix)
    assert same.abs().max().item() == pytest.approx(0, abs=1e-15)
    torch.testing.assert_close(gradient, torch.zeros_like(gradient), rtol=0, atol=1e-15)
    zero = torch.zeros(3, 3, dtype=F64, requires_grad=True)
    (gradient,) = torch.autograd.grad(discrepancy(zero, zero.detach(), pairs[1], **options), zero)
    assert not gradient.any()


@pytest.mark.parametrize("kind", ["squared_frobenius", "frobenius", "cosine"])
def test_gradient_of_the_distances(kind):
    matrix, teacher = draw(2, 4, 4).requires_grad_(), draw(4, 4, seed=1)
    pairs = pair_mask(torch.tensor([0, 0, 1, 1]))
    assert torch.autograd.gradcheck(lambda m: discrepancy(m, teacher, pairs, kind=kind), (matrix,))


# Aggregation weights


def test_alpha_falls_linearly_from_one():
    assert [alpha_schedule(t, 25) for t in (0, 5, 25, 49)] == [1.0, 0.8, 0.0, 0.0]
    assert [alpha_schedule(t, 2, start=3) for t in range(7)] == [1, 1, 1, 1, 0.5, 0, 0]
    assert alpha_schedule(100, math.inf) == 1
    assert alpha_schedule(0, 0) == 0
    assert [alpha_schedule(t, 0, start=2) for t in range(4)] == [1, 1, 0, 0]


def test_quality_by_hand():
    """With s = (1, 2, 4): mean 7/3, variance (16 + 1 + 25)/27 = 42/27, so γ = 0.801784."""
    gamma = math.sqrt(27 / 42)
    powers = [math.exp(-gamma * s) for s in (1, 2, 4)]
    s = torch.tensor([1.0, 2.0, 4.0])
    assert quality_weights(s).tolist() == pytest.approx(
        [p / sum(powers) for p in powers], abs=1e-15
    )
    fixed = [math.exp(-2 * s) for s in (1, 2, 4)]
    assert quality_weights(s, temperature=2).tolist() == pytest.approx(
        [p / sum(fixed) for p in fixed], abs=1e-15
    )


def test_small_clients_get_the_mean_quality():
    """Clients with 50 and 10 images: s = 1, 3, mean 2, deviation 1, so s − mean = −1, 1 and 0 for
    the client with 9 images, whatever its own s.
    """
    weights = quality_weights(torch.tensor([1.0, 3.0, 0.0]), examples=torch.tensor([50, 10, 9]))
    powers = [math.e, 1 / math.e, 1.0]
    assert weights.tolist() == pytest.approx([p / sum(powers) for p in powers], abs=1e-15)
    few = quality_weights(torch.tensor([1.0, 3.0]), examples=torch.tensor([9, 1]))
    assert few.tolist() == [0.5, 0.5]
    alone = quality_weights(torch.tensor([1.0]), examples=torch.tensor([9]))
    assert alone.tolist() == [1.0]


def test_equal_discrepancies_give_uniform_weights():
    for temperature in ("adaptive", 5.0):
        weights = quality_weights(torch.full((4,), 0.37), temperature=temperature)
        assert weights.tolist() == [0.25] * 4
    rounding = torch.tensor([0.1, 0.1 + 1e-14], dtype=F64)
    assert quality_weights(rounding).tolist() == [0.5, 0.5]
    assert quality_weights(torch.tensor([0.3])).tolist() == [1.0]
    assert quality_weights(torch.tensor([])).shape == (0,)


@quick
@given(
    s=st.lists(st.floats(0, 1e3), min_size=1, max_size=20),
    alpha=st.floats(0, 1),
    shift=st.integers(0, 2**16),
)
def test_weights_sum_to_one_and_quality_follows_discrepancy(s, alpha, shift):
    discrepancies = torch.tensor(s, dtype=F64)
    examples = 1 + (torch.arange(len(s)) * 7919 + shift) % 5000
    quality = quality_weights(discrepancies)
    weights = aggregation_weights(examples, quality, alpha)
    assert weights.dtype == F64
    assert abs(weights.sum().item() - 1) <= 1e-12
    assert abs(quality.sum().item() - 1) <= 1e-12
    assert (quality[discrepancies.argsort()].diff() <= 1e-15).all()
    assert 1 - 1e-9 <= effective_clients(weights) <= len(s) + 1e-9


def test_aggregation_by_hand():
    """n̄ = (0.75, 0.25), q̄ = (0.2, 0.8), α = 0.75: 0.5625 + 0.05 and 0.1875 + 0.2."""
    examples, quality = torch.tensor([30, 10]), torch.tensor([0.1, 0.4], dtype=F64)
    weights = aggregation_weights(examples, quality, 0.75)
    assert weights.tolist() == pytest.approx([0.6125, 0.3875], abs=1e-15)
    assert effective_clients(weights) == pytest.approx(1 / (0.6125**2 + 0.3875**2))
    assert aggregation_weights(examples, quality, 0).tolist() == pytest.approx([0.2, 0.8])


def test_alpha_one_is_size_weighting_to_the_last_bit():
    examples = torch.tensor([3, 7, 11])
    undefined = torch.full((3,), math.nan)
    expected = examples.double() / examples.double().sum()
    assert torch.equal(aggregation_weights(examples, undefined, 1.0), expected)


def test_undefined_weights_are_refused():
    with pytest.raises(DataError, match="not finite"):
        quality_weights(torch.tensor([0.1, math.nan]))
    with pytest.raises(DataError, match="images"):
        aggregation_weights(torch.tensor([0, 0]), torch.tensor([0.5, 0.5]), 0.5)
    with pytest.raises(DataError, match="quality"):
        aggregation_weights(torch.tensor([1, 2]), torch.tensor([0.5, math.nan]), 0.5)
    with pytest.raises(ConfigError, match="temperature"):
        quality_weights(torch.tensor([0.1]), temperature=-1)
    with pytest.raises(ConfigError, match="share"):
        aggregation_weights(torch.tensor([1]), torch.tensor([1.0]), 1.5)
