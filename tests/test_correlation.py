"""Eq. (1) and (2), pairs of labels and Ψ."""

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
    Correlation,
    Moments,
    Triangle,
    correlation,
    discrepancy,
    label_correlation,
    pair_mask,
    score_moments,
    soft_correlation,
)
from fedharmony.errors import ConfigError, DataError
from fedharmony.losses import Batch

F64 = torch.float64
quick = settings(max_examples=60, derandomize=True)


def draw(*shape: int, seed: int = 0, dtype: torch.dtype = F64) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def finite(tensor: Tensor) -> bool:
    return bool(tensor.isfinite().all())


# Eq. (1) and (2)


def test_no_rows_at_all_give_no_matrices():
    """Of 91 labels, where a CPU goes row by row."""
    assert Triangle(91, torch.device("cpu")).square(torch.empty(0, 91 * 92 // 2)).shape == (
        (0, 91, 91)
    )


def test_moments_by_hand():
    """Scores (0.8, 0.1), (0.4, 0.5): means 0.6, 0.3; joint (0.08 + 0.2)/2 = 0.14, squares
    (0.64 + 0.16)/2 = 0.4 and (0.01 + 0.25)/2 = 0.13. R_01 = (0.14 − 0.18)/sqrt(0.24·0.21) =
    −0.178174 and R_00 = (0.4 − 0.36)/0.24 = 1/6. Two points lie on a line: Pearson is −1.
    """
    moments = score_moments(torch.tensor([[0.8, 0.1], [0.4, 0.5]], dtype=F64))
    first, second = moments.marginal, moments.second
    torch.testing.assert_close(first, torch.tensor([0.6, 0.3], dtype=F64))
    torch.testing.assert_close(second, torch.tensor([[0.4, 0.14], [0.14, 0.13]], dtype=F64))
    matrix = correlation(moments, eps=0)
    assert matrix[0, 1].item() == pytest.approx(-0.04 / math.sqrt(0.24 * 0.21), abs=1e-12)
    assert matrix[0, 0].item() == pytest.approx(1 / 6, abs=1e-12)
    pearson = correlation(moments, normaliser="pearson", eps=0)
    torch.testing.assert_close(pearson, torch.tensor([[1.0, -1.0], [-1.0, 1.0]], dtype=F64))


def test_epsilon_is_added_to_the_denominator():
    moments = score_moments(draw(8, 2))
    deviation = (moments.marginal * (1 - moments.marginal)).sqrt()
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
        variances.append((whole.second[0, 0] - whole.marginal[0] ** 2).item())
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
    covariance = moments.second - torch.outer(moments.marginal, moments.marginal)
    deviation = (moments.marginal * (1 - moments.marginal)).sqrt().detach()
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
    assert not empty.marginal.any()
    assert not empty.second.any()


def test_padding_rows_get_no_gradient():
    scores = draw(4, 3).requires_grad_()
    real = torch.tensor([1, 0, 1, 1])
    (gradient,) = torch.autograd.grad(soft_correlation(scores, real).sum(), scores)
    assert not gradient[1].any()
    assert gradient[0].any()
    (gradient,) = torch.autograd.grad(soft_correlation(scores, torch.zeros(4)).sum(), scores)
    assert not gradient.any()


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
    with pytest.raises(ConfigError, match="reduction 'total'"):
        discrepancy(moments.second, moments.second, torch.ones(2, 2).bool(), reduction="total")


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


@pytest.mark.parametrize("normaliser", ["phi", "pearson"])
@pytest.mark.parametrize("unknown", [False, True])
def test_settings_reach_equation_two(normaliser, unknown):
    """Eq. (2) with every setting away from its default, against NumPy, pair by pair."""
    options = {"normaliser": normaliser, "eps": 0.01, "clamp": 0.2, "denominator_grad": False}
    kind = Correlation(3, unknown, **options)
    logits = 4 * draw(7, 3) - 3
    scores, rows = logits.sigmoid().requires_grad_(), torch.tensor([1.0] * 6 + [0.0])
    known = (draw(7, 3, seed=1) < 0.8).float() * rows[:, None] if unknown else ()
    assert torch.equal(kind.scores(logits), scores)
    batch = Batch(torch.zeros(7, 3), rows, torch.ones(7, 3), known=known)
    moments = kind.moments(scores, batch)
    assert moments.values.shape == (kind.rows, 3)
    plain = score_moments(scores, rows, known if unknown else None, squares=True)
    matrix, by_hand = kind.matrix(moments), np.zeros((3, 3))
    values, mask = (
        scores.detach().numpy(),
        known.bool().numpy() if unknown else np.ones((7, 3), bool),
    )
    for c, d in itertools.product(range(3), repeat=2):
        both = (mask[:, c] & mask[:, d])[:6]  # the seventh row is padding
        a, b = values[:6, c][both], values[:6, d][both]
        bounded = [np.clip(x.mean(), 0.2, 0.8) for x in (a, b)]
        spread = (
            np.sqrt(np.prod([p * (1 - p) for p in bounded]))
            if normaliser == "phi"
            else a.std() * b.std()
        )
        by_hand[c, d] = ((a * b).mean() - a.mean() * b.mean()) / (spread + 0.01)
    np.testing.assert_allclose(matrix.detach().numpy(), by_hand, rtol=1e-9)
    expected = correlation(plain, **options)
    numerator, denominator = kind.quotient(moments)
    defined = moments.known > 0 if unknown else torch.ones(3, 3, dtype=torch.bool)
    torch.testing.assert_close((numerator / denominator)[defined], matrix[defined])
    slopes = [
        torch.autograd.grad(m.square().sum(), scores, retain_graph=True)[0]
        for m in (matrix, expected)
    ]
    torch.testing.assert_close(*slopes, rtol=1e-12, atol=0)
    with pytest.raises(AssertionError, match="not the data of the task"):
        kind.sums(scores, batch._replace(known=() if unknown else torch.ones(7, 3)))


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
    moments = score_moments(scores, rows, known, squares=normaliser == "pearson")
    matrix = correlation(moments, normaliser=normaliser)
    assert torch.equal(moments.known > 0, (known.double().mT @ known.double()) > 0)
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
    moments = score_moments(scores, known=torch.ones(2, 9, 4), squares=True)
    matrix = correlation(moments, normaliser=normaliser)
    plain = correlation(score_moments(scores), normaliser=normaliser)
    torch.testing.assert_close(matrix, plain, rtol=1e-10, atol=1e-14)
    assert (moments.known == 1).all()


def test_pairs_of_labels_are_phi_coefficients():
    labels, known = draw(40, 4) < 0.4, draw(40, 4, seed=1) < 0.7
    expected, _ = label_correlation(labels, known=known)
    found = correlation(score_moments(labels.double(), known=known), eps=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("denominator_grad", [True, False])
def test_unknown_labels_get_no_gradient(denominator_grad):
    scores = draw(6, 3).requires_grad_()
    known = draw(6, 3, seed=1) < 0.6

    def total(scores: Tensor) -> Tensor:
        moments = score_moments(scores, torch.ones(6), known)
        matrix = correlation(moments, denominator_grad=denominator_grad)
        return (matrix * draw(3, 3, seed=2)).sum()

    (gradient,) = torch.autograd.grad(total(scores), scores)
    assert gradient[known].ne(0).all()
    assert not gradient[~known].any()
    if denominator_grad:
        assert torch.autograd.gradcheck(total, (scores,), eps=1e-6, atol=1e-6)


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


def test_distance_by_hand():
    """Included entries 0.3 and 0.4 against 0 and 0: squares 0.09 + 0.16 = 0.25; mean 0.125."""
    matrix = torch.tensor([[9.0, 0.3], [0.4, math.nan]], dtype=F64)  # the rest is not looked at
    zero, pairs = torch.zeros(2, 2, dtype=F64), pair_mask(torch.tensor([0, 0]))
    assert discrepancy(matrix, zero, pairs).item() == pytest.approx(0.125)
    assert discrepancy(matrix, zero, pairs, reduction="sum").item() == pytest.approx(0.25)


def test_sum_of_squares_is_the_sum_over_blocks():
    matrix, teacher = draw(7, 7), draw(7, 7, seed=1)
    clusters = torch.tensor([0, 1, 0, 2, 1, 0, 1])
    blocks = [(clusters == g).nonzero().flatten() for g in range(3)]
    expected = sum(((matrix - teacher)[b][:, b] ** 2).sum() for b in blocks)
    pairs = pair_mask(clusters, diagonal=True)
    torch.testing.assert_close(discrepancy(matrix, teacher, pairs, reduction="sum"), expected)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_no_pairs_and_no_difference_have_zero_gradient(reduction):
    matrix = draw(2, 3, 3).requires_grad_()
    options = {"reduction": reduction}
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


def test_gradient_of_the_distance():
    matrix, teacher = draw(2, 4, 4).requires_grad_(), draw(4, 4, seed=1)
    pairs = pair_mask(torch.tensor([0, 0, 1, 1]))
    assert torch.autograd.gradcheck(lambda m: discrepancy(m, teacher, pairs), (matrix,))


def test_shrunken_pearson_by_hand() -> None:
    """Scores (0, 1, 0, 1) and (0, ½, 0, ½): variances ¼ and 1/16, covariance ⅛.

    With 1/16 added: ⅛ / sqrt(5/16 · 2/16) = 2/sqrt(10) = 0.632456; without, 1.
    """
    scores = torch.tensor([[0.0, 0.0], [1.0, 0.5], [0.0, 0.0], [1.0, 0.5]], dtype=torch.float64)
    moments = score_moments(scores)
    for shrinkage, expected in ((1 / 16, 2 / math.sqrt(10)), (0.0, 1.0)):
        found = correlation(moments, normaliser="pearson", eps=1e-12, shrinkage=shrinkage)
        assert found[0, 1].item() == pytest.approx(expected, abs=1e-9)
