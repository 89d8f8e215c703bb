"""The alignment term: running moments, Ψ of them, and its gradient by hand."""

import pytest
import torch
from torch import Tensor

from fedharmony import alignment
from fedharmony.alignment import Alignment, neutral, running
from fedharmony.correlation import (
    Correlation,
    Moments,
    correlation,
    discrepancy,
    pair_mask,
    score_moments,
)
from fedharmony.losses import Batch

F64 = torch.float64


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=F64)


def batch_of(scores: Tensor, rows: Tensor | None = None, known: Tensor | tuple[()] = ()) -> Batch:
    rows = scores.new_ones(scores.shape[:-1]) if rows is None else rows
    return Batch(torch.zeros_like(scores), rows, torch.ones_like(scores), known=known)


def start(align: Alignment, examples: object, *leading: int) -> dict[str, Tensor]:
    """All pairs of labels, in float64."""
    pairs = pair_mask(torch.zeros(*leading, align.correlation.classes))
    carry = align.start(pairs, torch.as_tensor(examples))
    return {**carry, "moments": carry["moments"].double()}


@pytest.fixture(params=[False, True], ids=["autograd", "by_hand"])
def either(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways to the gradient; whether by hand."""
    monkeypatch.setattr(alignment, "MANY_LABELS", 1 if request.param else 10**9)
    return bool(request.param)


# The term as a whole


def test_value_and_gradient_of_two_images(either):
    """Two labels, scores (1, 1) and (0, 0), teacher ½: p̃ = ½, p̃_12 = ½, d = ½, so R_12 = 1.

    Ψ = (½² + ½²) / 2 = ¼; E = 2 · ½ / 2 = ½; W = ½ / ¼ = 2. d' = (½ − p̃)/d = 0, so ∂Ψ/∂p̃_1 =
    −2 · 2 · ½ = −2 and ∂Ψ/∂F_i1 = (−2 + 2 · 2 · F_i2) / 2: 1 for the first image, −1 for the
    second.
    """
    scores = torch.tensor([[1.0, 1.0], [0.0, 0.0]], dtype=F64, requires_grad=True)
    align = Alignment(Correlation(2, eps=1e-12))
    assert align.by_hand == either
    value, after = align(scores, batch_of(scores), torch.full((2, 2), 0.5), start(align, 2))
    value.backward()
    assert value.item() == pytest.approx(0.25)
    torch.testing.assert_close(scores.grad, torch.tensor([[1.0, 1], [-1, -1]]).double())
    assert after["moments"].flatten().tolist() == [0.5] * 6
    assert bool(after["started"])


@pytest.mark.parametrize(("denominator_grad", "clamp"), [(True, 1e-4), (True, 0.45), (False, 0.45)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("batches", [1, 3])
def test_gradient_by_hand_is_that_of_autograd(
    batches, reduction, denominator_grad, clamp, monkeypatch
):
    """Value, gradient and state over batches; padding rows, unequal rates, p̂ beyond the clamp."""
    clients, images, labels = 3, 5, 7
    generator = torch.Generator().manual_seed(batches)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=F64)

    teacher = normal(clients, labels, labels).tanh()
    teacher = (teacher + teacher.mT) / 2
    pairs = normal(clients, labels, labels) > 0
    pairs = pairs | pairs.mT
    pairs[2] = False
    rows = torch.ones(clients, images, dtype=F64)
    rows[1, 3:] = 0
    kind = Correlation(labels, clamp=clamp, denominator_grad=denominator_grad)
    align = Alignment(kind, reduction=reduction)
    carries = [align.start(pairs, torch.tensor([25, 10, 5]))] * 2
    for _ in range(batches):
        logits = 3 * normal(clients, images, labels)
        logits[0, :, 0] = -20.0
        found = []
        for by_hand in (0, 1):
            monkeypatch.setattr(alignment, "MANY_LABELS", 1 if by_hand else 10**9)
            assert align.by_hand == by_hand
            scores = logits.sigmoid().requires_grad_()
            batch = batch_of(scores, rows)
            value, carries[by_hand] = align(scores, batch, teacher, carries[by_hand])
            (gradient,) = torch.autograd.grad((value * torch.arange(1, 4)).sum(), scores)
            found.append((value.detach(), gradient))
        for by_autograd, by_formula in zip(*found, strict=True):
            torch.testing.assert_close(by_formula, by_autograd, rtol=1e-10, atol=1e-12)
        for name in ("moments", "started"):
            torch.testing.assert_close(carries[1][name], carries[0][name])
    assert found[1][1][1, 3:].abs().max() == 0  # padding rows
    assert found[1][1][:2].abs().max() > 1e-3


@pytest.mark.parametrize("normaliser", ["phi", "pearson"])
@pytest.mark.parametrize("estimator", ["running", "batch"])
def test_vmap_loop_and_native_stack_agree(normaliser, estimator):
    scores = draw(2, 3, 6, 4)
    rows = (draw(2, 3, 6, seed=1) < 0.7).to(F64)
    teacher, pairs = draw(4, 4, seed=2), pair_mask(torch.tensor([0, 1, 0, 1]))
    align = Alignment(Correlation(4, normaliser=normaliser), estimator)

    def loss(scores: Tensor, rows: Tensor) -> Tensor:
        shape = scores.shape[:-2]
        carry = align.start(pairs.expand(*shape, 4, 4), torch.full(shape, 9))
        for _ in range(2):
            value, carry = align(scores, batch_of(scores, rows), teacher, carry)
        return value

    native = loss(scores, rows)
    stacked = torch.vmap(torch.vmap(loss))(scores, rows)
    looped = [loss(s, w) for s, w in zip(scores.flatten(0, 1), rows.flatten(0, 1), strict=True)]
    torch.testing.assert_close(native, stacked, rtol=1e-12, atol=1e-15)
    torch.testing.assert_close(native.flatten(), torch.stack(looped), rtol=1e-12, atol=1e-15)
    gradients = torch.vmap(torch.vmap(torch.func.grad(loss)))(scores, rows)
    variable = scores.clone().requires_grad_()
    (expected,) = torch.autograd.grad(loss(variable, rows).sum(), variable)
    torch.testing.assert_close(gradients, expected, rtol=1e-10, atol=1e-14)


def test_the_batch_alone():
    """Without running moments a second batch knows nothing of the first."""
    align = Alignment(Correlation(3), "batch", reduction="sum")
    carry, teacher = start(align, 12), draw(3, 3, seed=3)
    for seed in (1, 2):
        scores = draw(4, 3, seed=seed)
        value, carry = align(scores, batch_of(scores), teacher, carry)
        local = correlation(score_moments(scores))
        expected = discrepancy(local, teacher, carry["pairs"], reduction="sum")
        assert torch.equal(value, expected)
    assert not carry["started"]


@pytest.mark.parametrize(
    "other",
    [
        Alignment(Correlation(200), "batch"),
        Alignment(Correlation(200, normaliser="pearson")),
        Alignment(Correlation(200, unknown_labels=True)),
        Alignment(Correlation(127)),
    ],
)
def test_there_is_one_formula_by_hand(other):
    assert Alignment(Correlation(128)).by_hand
    assert not other.by_hand


# Running moments


def test_running_value_is_the_average_and_gradient_is_the_batch():
    """24 images in batches of 6, so ω = ¼; the first batch initialises. Ψ of R̃ against 0, whose
    gradient is that of R̃ made of the average with the batch's gradient in its place.
    """
    align = Alignment(Correlation(3), reduction="sum")
    carry, teacher, mean = start(align, 24), torch.zeros(3, 3), None
    for seed in range(3):
        scores = draw(6, 3, seed=seed).requires_grad_()
        value, carry = align(scores, batch_of(scores), teacher, carry)
        now = score_moments(scores).values
        mean = now.detach() if mean is None else 0.75 * mean + 0.25 * now.detach()
        torch.testing.assert_close(carry["moments"], mean, rtol=0, atol=1e-15)
        variable = mean.clone().requires_grad_()
        psi = discrepancy(correlation(Moments(variable)), teacher, carry["pairs"], reduction="sum")
        torch.testing.assert_close(value, psi, rtol=1e-12, atol=0)
        (slope,) = torch.autograd.grad(psi, variable)
        (expected,) = torch.autograd.grad((slope * now).sum(), scores, retain_graph=True)
        (actual,) = torch.autograd.grad(value, scores)
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-14)
        assert not carry["moments"].requires_grad


def test_batch_without_a_real_row_changes_nothing(either):
    """Client 0 has rows in both batches, client 1 in the first only, client 2 in none."""
    align = Alignment(Correlation(2))
    scores, rows, teacher = draw(3, 4, 2), torch.ones(3, 4), torch.ones(2, 2)
    rows[2] = 0
    _, before = align(scores, batch_of(scores, rows), teacher, start(align, [8, 8, 8], 3))
    assert before["started"].tolist() == [True, True, False]
    torch.testing.assert_close(before["moments"][0], score_moments(scores[0]).values)  # ω = 1
    rows[1] = 0
    scores = draw(3, 4, 2, seed=1).requires_grad_()
    value, after = align(scores, batch_of(scores, rows), teacher, before)
    assert after["started"].tolist() == [True, True, False]
    assert torch.equal(before["moments"][1:], after["moments"][1:])
    assert not torch.equal(before["moments"][0], after["moments"][0])
    assert not after["moments"][2].any()
    (gradient,) = torch.autograd.grad(value.sum(), scores)
    assert gradient[0].any()
    assert not gradient[1:].any()


def test_state_takes_the_precision_of_the_batch():
    align = Alignment(Correlation(2))
    carry = align.start(pair_mask(torch.zeros(2)), torch.tensor(8))
    assert carry["moments"].dtype == torch.float32
    now = score_moments(draw(4, 2)).values
    after = running(carry, now, torch.ones(4))
    assert torch.equal(after["moments"], now)


def test_how_much_a_batch_replaces():
    """ω = min(1, rows / span) with span = min(n, 512): past 0, now 1, so the moments are ω."""
    align = Alignment(Correlation(1))
    rows = (torch.arange(16) < torch.tensor([16, 16, 4, 1, 0])[:, None]).float()
    carry = start(align, [320, 9000, 0, 16, 16], 5)
    assert carry["span"].tolist() == [320, 512, 1, 16, 16]
    carry = running({**carry, "started": torch.ones(5).bool()}, torch.ones(5, 2, 1), rows)
    expected = torch.tensor([0.05, 16 / 512, 1.0, 1 / 16, 0.0])
    assert torch.equal(carry["moments"][:, 0, 0], expected)


def test_a_short_batch_moves_running_moments_by_its_share(either):
    """17 images in batches of 16 and 1: (16 · first + 1 · second) / 17 is their mean, to rounding.

    At the rate of a full batch, 16/17, the one image of the second would all but replace them.
    """
    scores, align = draw(17, 3), Alignment(Correlation(3))
    carry = start(align, 17)
    for part in (scores[:16], scores[16:]):
        _, carry = align(part, batch_of(part), torch.zeros(3, 3), carry)
    whole = score_moments(scores).values
    torch.testing.assert_close(carry["moments"], whole, rtol=0, atol=1e-14)


def test_running_pairs_are_the_pairs_of_all_batches():
    """Batches of 3, 3 and 2 images with other labels known in each: a pair not known in any batch
    so far is not compared, whatever R is there.
    """
    scores, known = draw(8, 3), (draw(8, 3, seed=5) < 0.5).double()
    known[:, 2] = 0
    known[7, 2] = known[7, 0] = 1
    align = Alignment(Correlation(3, unknown_labels=True))
    carry = start(align, 8)
    assert carry["moments"].shape == (9, 3)
    seen = 0
    for part in (slice(0, 3), slice(3, 6), slice(6, 8)):
        carry["span"] = torch.tensor(float(seen := seen + len(scores[part])))
        batch = batch_of(scores[part], known=known[part])
        value, carry = align(scores[part], batch, torch.ones(3, 3), carry)
        whole = score_moments(scores[:seen], known=known[:seen])
        torch.testing.assert_close(carry["moments"], whole.values, rtol=0, atol=1e-14)
        told = carry["pairs"] & (whole.known > 0)
        assert told[0, 2] == (seen == 8)
        expected = discrepancy(correlation(whole), torch.ones(3, 3), told)
        torch.testing.assert_close(value, expected)


def test_neutral_gradient_by_hand() -> None:
    """Outputs 0, 1, 5 of one label: mean 2, z̃ = (−2, −1, 3), ‖z̃‖² = 14; the gradient is (1, 0, 0).

    Less its mean ⅓: (⅔, −⅓, −⅓). Along z̃: (−4/3 + 1/3 − 1)/14 = −1/7, so that
    (⅔ − 2/7, −⅓ − 1/7, −⅓ + 3/7) = (8, −10, 2)/21 is left. A padding row passes nothing on.
    """
    outputs = torch.tensor([[0.0], [1.0], [5.0], [7.0]], requires_grad=True)
    seen = neutral(outputs, torch.tensor([1.0, 1, 1, 0]))
    assert torch.equal(seen, outputs)
    (gradient,) = torch.autograd.grad(seen[0, 0], outputs)
    expected = torch.tensor([[8.0], [-10], [2], [0]]) / 21
    torch.testing.assert_close(gradient, expected)


def test_neutral_outputs_of_a_stack_are_those_of_each() -> None:
    """Also one image, or equal outputs: nothing is left to move, and nothing is not finite."""
    outputs = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0))
    outputs[1] = 0.5
    rows = torch.ones(3, 5)
    rows[2, 1:] = 0
    leaf = outputs.clone().requires_grad_()
    factor = torch.arange(30.0).view(3, 5, 2).square()
    (whole,) = torch.autograd.grad((neutral(leaf, rows) * factor).sum(), leaf)
    for m in range(3):
        own = outputs[m].clone().requires_grad_()
        (alone,) = torch.autograd.grad((neutral(own, rows[m]) * factor[m]).sum(), own)
        torch.testing.assert_close(whole[m], alone)
    assert bool(whole.isfinite().all())
    assert not whole[2].any()
