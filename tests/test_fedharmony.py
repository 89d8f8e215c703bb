"""FedHarmony against its equations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import hypothesis
import numpy as np
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from fedharmony import alignment
from fedharmony import correlation as corr
from fedharmony.config import build
from fedharmony.consensus import CORRELATION, FOLDED, TABLE, Operator
from fedharmony.errors import ConfigError
from fedharmony.losses import Batch, LossSettings, task_loss
from fedharmony.methods.base import ClientView, Task
from fedharmony.methods.fedharmony import CLUSTERS, TEACHER, FedHarmony
from fedharmony.records import from_bytes, to_bytes
from fedharmony.types import BUFFERS, PARAMS, Record, Reply
from toy import CLASSES, Toy, largest_difference, same_bits, toy_data

TASK = Task(classes=3, clients=4, rounds=10, batch_size=4, epochs=1, seed=0, width=8, lr=0.01)


def method(task: Task = TASK, **settings: Any) -> FedHarmony:
    return FedHarmony(FedHarmony.Config(**settings), task)


def matrix(a: float, b: float, c: float) -> Tensor:
    """A 3 × 3 correlation matrix with off-diagonals R01, R02, R12."""
    return torch.tensor([[0.5, a, b], [a, 0.5, c], [b, c, 0.5]])


def reply(client: int, examples: int, R: Tensor, theta: float = 0.0) -> Reply:
    groups = {
        PARAMS: {"w": torch.tensor([theta])},
        BUFFERS: {},
        CORRELATION: {"upper": corr.pack_upper(R), "marginal": torch.full((3,), 0.3)},
    }
    return Reply(client, examples, Record(groups))


def state_after(harmony: FedHarmony, replies: list[Reply], round: int = 0) -> Record:
    start = harmony.init_state({"w": torch.zeros(1)}, {})
    sent = harmony.broadcast(start, round, [r.client for r in replies])
    return harmony.aggregate(start, round, sent, iter(replies)).state


# -- identities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [{"align_weight": 0.0}, {"align": False}])
def test_without_alignment_and_quality_it_is_fedavg(settings: dict[str, Any]) -> None:
    """λ = 0 and α ≡ 1: the same bits as FedAvg, round by round."""
    states: dict[str, list[Record]] = {}
    for name, config in (("fedavg", {}), ("fedharmony", {**settings, "quality": False})):
        toy = Toy(name, config, rounds=4, cohort=3)
        seen = states[name] = []
        toy.loop().run(toy.initial(), 0, lambda e: None, lambda t, s, seen=seen: seen.append(s))
    for plain, harmony in zip(states["fedavg"], states["fedharmony"], strict=True):
        model = [Record({PARAMS: s.get(PARAMS)}) for s in (plain, harmony)]
        assert same_bits(*model)


def test_alignment_changes_the_model_from_round_one_on() -> None:
    toys = [Toy("fedharmony", {"quality": False, "align_weight": w}, rounds=2) for w in (0.0, 3.0)]
    after_one = [
        Record({PARAMS: Toy(t.name, t.config, rounds=1).run()[0].get(PARAMS)}) for t in toys
    ]
    assert same_bits(*after_one)  # round 0 has no teacher
    after_two = [Record({PARAMS: t.run()[0].get(PARAMS)}) for t in toys]
    assert not same_bits(*after_two)


# -- the client -----------------------------------------------------------------------------------


def fold_all(harmony: FedHarmony, logits: Tensor, size: int) -> dict[str, Tensor]:
    """Sweep over batches of ``size``, the last one padded."""
    sweep = harmony.sweep()
    carry = sweep.start({})
    for first in range(0, len(logits), size):
        part = logits[first : first + size]
        rows = torch.zeros(size)
        rows[: len(part)] = 1
        padded = torch.full((size, logits.shape[1]), 9.0)
        padded[: len(part)] = part
        batch = Batch(torch.zeros_like(padded), rows, rows[:, None].expand(size, 3))
        carry = sweep.fold(carry, padded, batch)
    return sweep.finish(carry, {})


def test_sweep_is_equation_two_on_the_whole_set() -> None:
    """Four images with scores (1,1,0), (1,0,0), (0,0,1), (0,0,0) (nearly): φ by hand.

    p̂ = (1/2, 1/4, 1/4); p̂01 = 1/4, p̂02 = 0, p̂12 = 0.
    R01 = (1/4 − 1/8) / sqrt(1/4 · 3/16) = 0.57735; R02 = (0 − 1/8) / 0.21651 = −0.57735;
    R12 = (0 − 1/16) / (3/16) = −1/3; the diagonal is 1.
    """
    scores = torch.tensor([[1.0, 1, 0], [1, 0, 0], [0, 0, 1], [0, 0, 0]])
    logits = (scores - 0.5) * 80  # sigmoid is 0 or 1 to 1e-17
    expected = torch.tensor([1, 0.57735, -0.57735, 1, -1 / 3, 1])
    for size in (4, 3, 1):  # however it is batched
        result = fold_all(method(), logits, size)
        torch.testing.assert_close(result["upper"], expected, atol=2e-5, rtol=0)
        torch.testing.assert_close(result["marginal"], torch.tensor([0.5, 0.25, 0.25]))


def test_correlations_measured_during_training_are_those_of_the_last_epoch() -> None:
    """A model that hardly moves gives the same scores during its last epoch and after it."""
    found = {}
    for measured in ("after", "during"):
        for lr in (1e-12, 0.05):
            toy = Toy("fedharmony", {"measured": measured}, rounds=1, lr=lr, sizes=(20, 7, 1, 13))
            stage = toy.method.stages(0)[0]
            sent = stage.broadcast(toy.initial(), 0, range(4))
            replies = list(toy.transport.exchange(stage, 0, sent))
            found[measured, lr] = [Record({"r": r.record.get("correlation")}) for r in replies]
    still = zip(found["after", 1e-12], found["during", 1e-12], strict=True)
    moving = zip(found["after", 0.05], found["during", 0.05], strict=True)
    assert all(largest_difference(a, b) < 1e-6 for a, b in still)
    assert max(largest_difference(a, b) for a, b in moving) > 1e-3


def test_sweep_of_one_image_is_zero() -> None:
    result = fold_all(method(), torch.tensor([[2.0, -1.0, 0.3]]), 2)
    torch.testing.assert_close(result["upper"], torch.zeros(6), atol=1e-6, rtol=0)


def loss_inputs(harmony: FedHarmony, round: int = 5) -> tuple[Any, Any, Any, Any]:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    rows = torch.tensor([1.0, 1.0, 1.0, 0.0])
    labels = (torch.rand(4, 3, generator=generator) < 0.5).double()
    batch = Batch(labels, rows, rows[:, None].expand(4, 3))
    teacher = {
        "matrix": matrix(0.4, -0.1, 0.2),
        "known": torch.tensor([[1, 1, 0], [1, 1, 1], [0, 1, 1]], dtype=torch.bool),
        "clusters": torch.tensor([0, 0, 0]),
        "weight": torch.tensor(harmony.align_weight(round)),
    }
    message = Record({TEACHER: teacher})
    carry = harmony.carry(ClientView(40, torch.tensor([3, 2, 0])), message)
    return logits, batch, message.groups, carry


@pytest.mark.parametrize("settings", [{}, {"reduction": "sum"}, {"denominator_grad": False}])
def test_many_labels_train_like_few(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any]
) -> None:
    """From ``MANY_LABELS`` on the loss has a gradient by hand: the same after three rounds."""
    found = []
    for many in (10**9, 1):
        monkeypatch.setattr(alignment, "MANY_LABELS", many)
        toy = Toy("fedharmony", settings, rounds=3, dtype=torch.float64)
        assert toy.method.align.by_hand == (many == 1)
        found.append(Record({PARAMS: toy.run()[0].get(PARAMS)}))
    assert largest_difference(*found) < 1e-6
    plain = Toy("fedharmony", {**settings, "align_weight": 0.0}, rounds=3, dtype=torch.float64)
    assert largest_difference(found[1], Record({PARAMS: plain.run()[0].get(PARAMS)})) > 1e-5


def test_settings_reach_correlation_alignment_and_consensus() -> None:
    """Each setting at a value of its own, so that none can stand in the place of another."""
    task = replace(TASK, unknown_labels=True)
    harmony = method(
        task,
        normaliser="pearson",
        epsilon=0.01,
        clamp=0.02,
        denominator_grad=False,
        estimator="batch",
        window=33,
        reduction="sum",
        consensus="size",
        kappa=3.0,
        min_examples=7,
        min_support=0.05,
        staleness_decay=0.6,
        trim=0.2,
    )
    kind = corr.Correlation(3, True, "pearson", eps=0.01, clamp=0.02, denominator_grad=False)
    assert harmony.align == alignment.Alignment(kind, estimator="batch", window=33, reduction="sum")
    assert harmony.operator == Operator(
        "size", 3.0, min_examples=7, min_support=0.05, decay=0.6, trim=0.2, eps=0.01, clamp=0.02
    )
    table = harmony.table(Record())
    assert (table.classes, table.operator, table.capacity) == (
        3,
        harmony.operator,
        harmony.capacity,
    )
    assert table.unknown_labels
    assert not table.last_only
    assert method(memory="last_cohort").table(Record()).last_only


def test_a_client_carries_moments_of_at_most_its_images() -> None:
    harmony = method()
    state = state_after(harmony, [reply(k, 20, matrix(0.1 * k, 0.2, 0)) for k in range(4)])
    message = harmony.broadcast(state, 2, [0])[0]
    views = [ClientView(n, torch.tensor([n, 1, n - 1])) for n in (1, 30, 900)]
    assert [float(harmony.carry(view, message)["span"]) for view in views] == [1, 30, 512]


def test_loss_is_bce_plus_weighted_discrepancy() -> None:
    """First batch: R̃ is that of the batch. Known off-diagonal pairs: (0,1) and (1,2), mean of two.

    Recomputed here with plain NumPy from the three real rows.
    """
    harmony = method(align_weight=2.0)
    logits, batch, message, carry = loss_inputs(harmony)
    value, after = harmony.loss(logits, batch, message, carry)

    scores = 1 / (1 + np.exp(-logits.detach().numpy()[:3]))
    p, joint = scores.mean(0), scores.T @ scores / 3
    spread = np.sqrt(p * (1 - p))
    R = (joint - np.outer(p, p)) / (np.outer(spread, spread) + 1e-6)
    misfit = ((R[0, 1] - 0.4) ** 2 + (R[1, 2] - 0.2) ** 2) / 2
    expected = task_loss(LossSettings(), logits, batch).item() + 2.0 * misfit
    assert value.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(after["moments"][0].double(), torch.from_numpy(p), rtol=1e-6, atol=0)


def test_second_batch_uses_running_moments() -> None:
    """ω = rows / n = 3/40: value from 37/40 · first batch + 3/40 · second."""
    harmony = method()
    logits, batch, message, carry = loss_inputs(harmony)
    _, carry = harmony.loss(logits, batch, message, carry)
    other = (logits.detach() * -1.5).requires_grad_()
    value, _ = harmony.loss(other, batch, message, carry)
    first, second = (corr.score_moments(z.sigmoid(), batch.rows) for z in (logits, other))
    mixed = corr.Moments(0.925 * first.values + 0.075 * second.values)
    pairs = message[TEACHER]["known"] & ~torch.eye(3, dtype=torch.bool)
    psi = corr.discrepancy(corr.correlation(mixed), message[TEACHER]["matrix"].double(), pairs)
    expected = task_loss(LossSettings(), other, batch) + psi
    assert value.item() == pytest.approx(expected.item(), rel=1e-5)
    value.backward()
    assert other.grad is not None
    assert other.grad[:3].abs().sum() > 0
    assert (other.grad[3] == 0).all()  # a padding row


def test_batch_estimator_gradient_equals_finite_differences() -> None:
    harmony = method(estimator="batch", align_weight=2.0, reduction="sum", diagonal=True)
    logits, batch, message, carry = loss_inputs(harmony)
    doubled = {TEACHER: {**message[TEACHER], "matrix": message[TEACHER]["matrix"].double()}}

    def value(z: Tensor) -> Tensor:
        return harmony.loss(z, batch, doubled, carry)[0]

    assert torch.autograd.gradcheck(value, (logits,), eps=1e-6, atol=1e-5)


def test_masking_unseen_labels() -> None:
    """The view has no positive of label 2, so (1, 2) is not aligned: only (0, 1) is left."""
    harmony = method(align_unseen="mask")
    *_, carry = loss_inputs(harmony)
    assert carry["pairs"].nonzero().tolist() == [[0, 1], [1, 0]]
    *_, carry = loss_inputs(method())
    assert carry["pairs"].nonzero().tolist() == [[0, 1], [1, 0], [1, 2], [2, 1]]


def pairs_of(positives: list[int], teacher: Tensor, **settings: Any) -> list[tuple[int, int]]:
    """The pairs (c, c') with c < c' that a client with these positives aligns."""
    harmony = method(blocks=False, **settings)
    state = state_after(harmony, [reply(1, 50, teacher), reply(2, 50, teacher)])
    message = harmony.broadcast(state, 1, [0])[0]
    carry = harmony.carry(ClientView(10, torch.tensor(positives)), message)
    return [(c, d) for c, d in carry["pairs"].nonzero().tolist() if c < d]


def test_which_pairs_are_aligned_by_hand() -> None:
    """Label 2 is absent here; the others agree on R01 = 0.3, R02 = −0.2, R12 = 0.05."""
    teacher = matrix(0.3, -0.2, 0.05)
    assert pairs_of([4, 2, 0], teacher) == [(0, 1), (0, 2), (1, 2)]
    assert pairs_of([4, 2, 0], teacher, align_unseen="mask") == [(0, 1)]
    assert pairs_of([4, 2, 0], teacher, align_unseen="only") == [(0, 2), (1, 2)]
    assert pairs_of([4, 2, 0], teacher, least_teacher=0.1) == [(0, 1), (0, 2)]
    both = {"align_unseen": "only", "least_teacher": 0.1}
    assert pairs_of([4, 2, 0], teacher, **both) == [(0, 2)]


def test_softened_scores_have_the_marginals_of_plain_ones() -> None:
    """R of σ(z/T), p̂ of σ(z): what counts as support does not depend on T."""
    logits = torch.randn(7, 3, generator=torch.Generator().manual_seed(1)) * 3
    pearson = {"normaliser": "pearson", "epsilon": 1e-12}
    soft = fold_all(method(softness=4.0, **pearson), logits, 3)
    scores = (logits.double() / 4).sigmoid().numpy()
    expected = np.corrcoef(scores.T)[np.triu_indices(3)]
    np.testing.assert_allclose(soft["upper"].numpy(), expected, atol=1e-6)
    plain = fold_all(method(), logits, 3)
    torch.testing.assert_close(soft["marginal"], plain["marginal"])
    # Far out, the correlation of scores is that of the logits.
    far = fold_all(method(softness=1000.0, **pearson), logits, 3)
    logit = np.corrcoef(logits.double().numpy().T)[np.triu_indices(3)]
    np.testing.assert_allclose(far["upper"].numpy(), logit, atol=1e-4)  # float32 scores


def test_neutral_alignment_neither_shifts_nor_stretches() -> None:
    """The alignment's part of the gradient is orthogonal to 1 and to the outputs, per label."""
    for neutral in (True, False):
        harmony = method(blocks=False, neutral=neutral, warmup_rounds=0)
        outputs, batch, message, carry = loss_inputs(harmony)
        outputs = outputs.detach().requires_grad_()
        whole = torch.autograd.grad(harmony.loss(outputs, batch, message, carry)[0], outputs)[0]
        plain = method(align=False)
        fit = torch.autograd.grad(plain.loss(outputs, batch, message, {})[0], outputs)[0]
        g, z = (whole - fit)[batch.rows > 0], outputs.detach()[batch.rows > 0]
        assert g.abs().max() > 1e-3
        shift, stretch = g.sum(0).abs().max(), (g * (z - z.mean(0))).sum(0).abs().max()
        assert (max(shift, stretch) < 1e-6) == neutral


def test_warm_up() -> None:
    """⅓, ⅔, 1 of λ from the first round that has a teacher: round 1, or 0 if one is asked for."""
    for settings in ({}, {"cold_start": "labels"}, {"teacher": "this_round"}):
        harmony = method(align_weight=3.0, **settings)
        first = 0 if settings else 1
        weights = [harmony.align_weight(first + t) for t in (0, 1, 2, 9)]
        assert weights == pytest.approx([1.0, 2.0, 3.0, 3.0])
    assert method(align_weight=3.0, warmup_rounds=0).align_weight(1) == 3.0
    assert method(align=False).align_weight(5) == 0.0


# -- the server -----------------------------------------------------------------------------------


def test_round_zero_sends_no_teacher_and_averages_by_size() -> None:
    harmony = method()
    start = harmony.init_state({"w": torch.zeros(1)}, {})
    sent = harmony.broadcast(start, 0, [0, 1])
    assert all(TEACHER not in message.groups for message in sent.values())
    replies = [reply(0, 30, matrix(0.1, 0.1, 0.1), 1.0), reply(1, 10, matrix(0.3, 0.1, 0.1), 5.0)]
    outcome = harmony.aggregate(start, 0, sent, iter(replies))
    assert outcome.state.get(PARAMS)["w"].item() == 2.0  # (30·1 + 10·5) / 40
    assert outcome.weights == {0: 0.75, 1: 0.25}
    assert outcome.log["alpha"] == 1.0


def test_teacher_leaves_the_client_out() -> None:
    """Weights n²/(n+10): 30 → 22.5, 10 → 5, 20 → 13.333. Client 0 is taught by 1 and 2 alone:
    R01 = (5·0.3 + 13.333·0.6) / 18.333 = 0.51818. Client 9, not in the table, by all three:
    (22.5·0.1 + 1.5 + 8) / 40.833 = 0.28776."""
    harmony = method(consensus="support")
    table = [reply(k, n, matrix(r, 0, 0)) for k, n, r in [(0, 30, 0.1), (1, 10, 0.3), (2, 20, 0.6)]]
    state = state_after(harmony, table)
    sent = harmony.broadcast(state, 1, [0, 9])
    assert sent[0].get(TEACHER)["matrix"][0, 1].item() == pytest.approx(0.518182, abs=1e-6)
    assert sent[9].get(TEACHER)["matrix"][0, 1].item() == pytest.approx(0.287755, abs=1e-6)
    assert sent[0].get(PARAMS) is sent[9].get(PARAMS)  # the model travels by reference


def test_one_liar_does_not_move_a_trimmed_teacher() -> None:
    """Four clients of 20 images say 0.1, 0.2, 0.3 and, lying, 1.

    For the first, 0.45 of the weight of 0.2, 0.3, 1 is cut at either end: 0.3 is left. For client 9
    a twentieth of all on both sides of the middle: (0.2 + 0.3)/2.
    """
    harmony = method(consensus="support_trimmed")
    told = [(0, 0.1), (1, 0.2), (2, 0.3), (3, 1.0)]
    state = state_after(harmony, [reply(k, 20, matrix(r, 0, 0)) for k, r in told])
    sent = harmony.broadcast(state, 1, [0, 9])
    taught = [sent[k].get(TEACHER)["matrix"][0, 1].item() for k in (0, 9)]
    assert taught == pytest.approx([0.3, 0.25], abs=1e-6)


def test_a_table_in_any_order_leaves_the_right_client_out() -> None:
    """Replies of 3, then 1: client 1 is taught by 3, client 3 by 1, clients 0, 2, 9 by both."""
    for settings in ({"memory": "last_cohort"}, {}):
        harmony = method(consensus="mean", **settings)
        replies = [reply(3, 20, matrix(0.1, 0, 0)), reply(1, 20, matrix(0.3, 0, 0))]
        sent = harmony.broadcast(state_after(harmony, replies), 1, [0, 1, 2, 3, 9])
        taught = [message.get(TEACHER)["matrix"][0, 1].item() for message in sent.values()]
        assert taught == pytest.approx([0.2, 0.1, 0.2, 0.3, 0.2])


def test_stale_matrices_fade() -> None:
    """Client 1 was heard two rounds before client 2: weight 5 · 0.9² against 13.333 · 0.9⁰."""
    harmony = method(consensus="support")
    state = state_after(harmony, [reply(0, 30, matrix(0, 0, 0)), reply(1, 10, matrix(0.3, 0, 0))])
    sent = harmony.broadcast(state, 2, [2])
    state = harmony.aggregate(state, 2, sent, iter([reply(2, 20, matrix(0.6, 0, 0))])).state
    assert state.get(TABLE)["round"].tolist() == [0, 0, 2]
    got = harmony.broadcast(state, 3, [0])[0].get(TEACHER)["matrix"][0, 1].item()
    old = 5 * 0.9**2
    assert got == pytest.approx((old * 0.3 + 13.333333 * 0.6) / (old + 13.333333), abs=1e-6)


def test_table_keeps_the_last_matrix_of_each_client_in_client_order() -> None:
    harmony = method()
    state = state_after(harmony, [reply(3, 30, matrix(0.1, 0, 0)), reply(1, 10, matrix(0.3, 0, 0))])
    sent = harmony.broadcast(state, 1, [3, 0])
    again = [reply(3, 30, matrix(0.7, 0, 0)), reply(0, 5, matrix(0.2, 0, 0))]
    table = harmony.aggregate(state, 1, sent, iter(again)).state.get(TABLE)
    assert table["client"].tolist() == [0, 1, 3]
    assert table["round"].tolist() == [1, 0, 1]
    torch.testing.assert_close(table["upper"][:, 1], torch.tensor([0.2, 0.3, 0.7]))
    last = method(memory="last_cohort")
    state = state_after(last, [reply(3, 30, matrix(0.1, 0, 0)), reply(1, 10, matrix(0.3, 0, 0))])
    sent = last.broadcast(state, 1, [3, 0])
    assert last.aggregate(state, 1, sent, iter(again)).state.get(TABLE)["client"].tolist() == [3, 0]


def test_weights_by_size_and_quality() -> None:
    """Three clients, G = 1, T_0 = 5, t = 3: α = 0.4.

    The teacher's R01 is known, all entries count. s_k is the mean of three squared differences
    (each pair counts twice in numerator and denominator). Weights follow from s by
    q̄ = softmax(−s/std(s)) and ω = 0.4 n̄ + 0.6 q̄; recomputed here with NumPy.
    """
    harmony = method(blocks=False, temperature="adaptive")
    first = [reply(k, n, matrix(r, r, r)) for k, n, r in [(0, 30, 0.1), (1, 20, 0.3), (2, 50, 0.6)]]
    state = state_after(harmony, first)
    sent = harmony.broadcast(state, 3, [0, 1, 2])
    uploads = [(0, 30, 0.2, 1.0), (1, 20, 0.5, 2.0), (2, 50, 0.3, 4.0)]
    replies = [reply(k, n, matrix(r, r, r), theta) for k, n, r, theta in uploads]
    outcome = harmony.aggregate(state, 3, sent, iter(replies))

    taught = [float(sent[k].get(TEACHER)["matrix"][0, 1]) for k in range(3)]
    s = np.array([(r - t) ** 2 for (_, _, r, _), t in zip(uploads, taught, strict=True)])
    q = np.exp(-s / s.std())
    omega = 0.4 * np.array([0.3, 0.2, 0.5]) + 0.6 * q / q.sum()
    assert list(outcome.weights.values()) == pytest.approx(omega.tolist(), rel=1e-5)
    expected = float(omega @ np.array([1.0, 2.0, 4.0]))
    assert outcome.state.get(PARAMS)["w"].item() == pytest.approx(expected, rel=1e-5)
    assert outcome.log["alpha"] == pytest.approx(0.4)
    assert outcome.log["discrepancy"] == pytest.approx(s.mean(), rel=1e-5)
    assert outcome.log["effective_clients"] == pytest.approx(1 / (omega**2).sum(), rel=1e-5)


def test_a_round_without_a_teacher_averages_by_size() -> None:
    """One client was heard, so nobody is taught; in round 5 α would be 0."""
    harmony = method()
    state = state_after(harmony, [reply(0, 30, matrix(0.1, 0, 0))])
    sent = harmony.broadcast(state, 5, [0, 1])
    replies = [reply(0, 30, matrix(0.1, 0, 0), 1.0), reply(1, 10, matrix(0.5, 0, 0), 5.0)]
    outcome = harmony.aggregate(state, 5, sent, iter(replies))
    assert outcome.weights == {0: 0.75, 1: 0.25}
    assert outcome.state.get(PARAMS)["w"].item() == 2.0
    assert outcome.log["alpha"] == 1


def test_fixed_temperature() -> None:
    """γ = 0 makes every quality equal: at α = 0 the plain mean (1 + 2 + 4)/3."""
    harmony = method(temperature=0.0, horizon=1.0)
    state = state_after(harmony, [reply(k, 20, matrix(0.1 * k, 0, 0)) for k in range(3)])
    sent = harmony.broadcast(state, 2, [0, 1, 2])
    replies = [
        reply(k, 20 + k, matrix(0.3, 0.1, 0), theta) for k, theta in enumerate([1.0, 2.0, 4.0])
    ]
    outcome = harmony.aggregate(state, 2, sent, iter(replies))
    assert outcome.state.get(PARAMS)["w"].item() == pytest.approx(7 / 3)


def test_quality_prefers_the_client_that_fits() -> None:
    harmony = method(horizon=1.0)
    table = [reply(k, 50, matrix(0.5, 0.2, 0.1)) for k in range(4)]
    state = state_after(harmony, table)
    sent = harmony.broadcast(state, 5, [0, 1, 2])
    fits = [matrix(0.5, 0.2, 0.1), matrix(0.4, 0.2, 0.1), matrix(-0.5, 0.9, 0.7)]
    replies = [reply(k, 50, R) for k, R in enumerate(fits)]
    weights = harmony.aggregate(state, 5, sent, iter(replies)).weights
    assert weights[0] > weights[1] > weights[2]


def test_nothing_to_compare_is_no_perfect_fit() -> None:
    """Client 1 supports no label, so client 0 (taught by client 1 alone) is compared with nothing.

    In round 9 α is 0. Client 0 gets the mean of s_1 = 0 and s_3 = 0.9²/3 = 0.27, hence a weight
    between theirs, and not that of s = 0.
    """
    harmony = method(blocks=False)
    first = [reply(0, 30, matrix(0.4, 0.2, 0.1)), reply(1, 30, matrix(0, 0, 0))]
    state = state_after(harmony, first)
    table = dict(state.get(TABLE))
    table["marginal"] = torch.tensor([[0.3] * 3, [0.0] * 3])
    state = state.replace({TABLE: table})
    sent = harmony.broadcast(state, 9, [0, 1, 3])
    assert not sent[0].get(TEACHER)["known"].any()
    uploads = [matrix(0.9, 0.9, 0.9), matrix(0.4, 0.2, 0.1), matrix(-0.5, 0.2, 0.1)]
    replies = [reply(k, 30, R) for k, R in zip((0, 1, 3), uploads, strict=True)]
    outcome = harmony.aggregate(state, 9, sent, iter(replies))
    assert outcome.weights[1] > outcome.weights[0] > outcome.weights[3]
    assert outcome.log["discrepancy"] == pytest.approx(0.135, abs=1e-6)


def test_nobody_replied() -> None:
    harmony = method()
    state = state_after(harmony, [reply(k, 20, matrix(0.1, 0, 0)) for k in range(3)])
    outcome = harmony.aggregate(state, 4, harmony.broadcast(state, 4, [0, 1]), iter([]))
    assert outcome.state is state


def test_clusters_restrict_the_pairs() -> None:
    """Two planted blocks {0, 1}, {2, 3} with G = 2: only their two pairs are compared."""
    task = Task(classes=4, clients=3, rounds=10, batch_size=4, epochs=1, seed=0, width=8, lr=0.01)
    harmony = method(task, groups=2)
    R = torch.full((4, 4), 0.02)
    R[:2, :2] = R[2:, 2:] = 0.8
    replies = []
    for k in range(3):
        part = {"upper": corr.pack_upper(R), "marginal": torch.full((4,), 0.3)}
        replies.append(Reply(k, 30, Record({PARAMS: {}, BUFFERS: {}, CORRELATION: part})))
    start = harmony.init_state({}, {})
    state = harmony.aggregate(start, 0, harmony.broadcast(start, 0, [0, 1, 2]), iter(replies)).state
    message = harmony.broadcast(state, 1, [0])[0]
    assert message.get(TEACHER)["clusters"].tolist() == [0, 0, 1, 1]
    carry = harmony.carry(ClientView(30, torch.ones(4)), message)
    assert carry["pairs"].nonzero().tolist() == [[0, 1], [1, 0], [2, 3], [3, 2]]
    outcome = harmony.aggregate(state, 1, {0: message}, iter(replies[:1]))
    assert outcome.state.get(CLUSTERS)["ids"].tolist() == [0, 0, 1, 1]


def test_cluster_every_keeps_the_last_clusters() -> None:
    calls: list[int] = []

    class Counting(FedHarmony):
        def clusters(self, matrix: Tensor, round: int) -> Tensor:
            calls.append(round)
            return super().clusters(matrix, round)

    Toy("fedharmony", {"cluster_every": 3}, rounds=8, method_class=Counting).run()
    assert calls == [1, 3, 6]
    calls.clear()  # with clusters of each client's own, none in common
    Toy("fedharmony", {"client_clusters": True}, rounds=3, method_class=Counting).run()
    assert calls == [1] * 5 + [2] * 5


def test_teachers_are_parts_of_one_stack() -> None:
    """What m clients are sent is one tensor (m, C, C); clients never heard share theirs."""
    harmony = method()
    state = state_after(harmony, [reply(k, 20, matrix(0.1 * k, 0, 0)) for k in range(4)])
    sent = {k: m.get(TEACHER) for k, m in harmony.broadcast(state, 2, [0, 2, 8, 9]).items()}
    assert sent[0]["matrix"].untyped_storage().nbytes() == 2 * 9 * 4
    for name in ("matrix", "known"):
        addresses = [sent[k][name].untyped_storage().data_ptr() for k in (0, 2)]
        assert addresses[0] == addresses[1]
        assert sent[8][name] is sent[9][name]
    assert all(teacher["weight"] is sent[0]["weight"] for teacher in sent.values())


@pytest.mark.parametrize("settings", [{}, {"diagonal": True}])
def test_misfits_in_parts_of_any_size(
    settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five clients at once, two at a time and one by one: the same bits, and the definition."""
    harmony = method(blocks=False, **settings)
    state = state_after(harmony, [reply(k, 20, matrix(0.1 * k, 0.3, -0.1 * k)) for k in range(5)])
    sent = harmony.broadcast(state, 2, range(5))
    replies = [reply(k, 20, matrix(0.2, 0.1 * k, 0.4)) for k in range(5)]
    whole = harmony.misfits(replies, sent)
    assert whole.compared.all()
    for at_once in (18, 1):
        monkeypatch.setitem(corr.AT_ONCE, "cpu", at_once)
        assert all(map(torch.equal, harmony.misfits(replies, sent), whole))
    for own, misfit in zip(replies, whole.values.tolist(), strict=True):
        teacher = sent[own.client].get(TEACHER)
        pairs = corr.pair_mask(
            teacher["clusters"], teacher["known"], diagonal=harmony.config.diagonal
        )
        local = corr.unpack_upper(own.record.get(CORRELATION)["upper"], 3).double()
        assert misfit == float(corr.discrepancy(local, teacher["matrix"].double(), pairs))
    assert len(set(whole.values.tolist())) == 5


# -- α, q and ω ------------------------------------------------------------------------------------


def test_alpha_falls_linearly_from_one() -> None:
    """T_0 is half of the ten rounds, or the setting."""
    assert [method().alpha(t) for t in (0, 1, 5, 9)] == [1.0, 0.8, 0.0, 0.0]
    assert [method(horizon=25.0).alpha(t) for t in (0, 5, 25, 49)] == [1.0, 0.8, 0.0, 0.0]
    assert method(quality=False).alpha(9) == 1


def omega(
    s: Any, reliable: Any = None, n: Any = None, alpha: float = 0.0, **settings: Any
) -> list[float]:
    """ω of clients with misfits s; by default of quality alone, everybody reliable."""
    misfits = torch.as_tensor(s, dtype=torch.float64)
    trusted = torch.ones(len(misfits), dtype=torch.bool) if reliable is None else reliable
    sizes = torch.ones(len(misfits)) if n is None else torch.tensor(n)
    found = method(**settings).weights(sizes.double(), misfits, torch.as_tensor(trusted), alpha)
    assert found.dtype == torch.float64
    assert abs(found.sum().item() - 1) <= 1e-12
    return found.tolist()  # type: ignore[no-any-return]


def test_quality_by_hand() -> None:
    """With s = (1, 2, 4): mean 7/3, variance (16 + 1 + 25)/27 = 42/27, so γ = 0.801784."""
    s = [1.0, 2.0, 4.0]
    for temperature, gamma in (("adaptive", math.sqrt(27 / 42)), (2.0, 2.0)):
        powers = [math.exp(-gamma * x) for x in s]
        expected = [p / sum(powers) for p in powers]
        assert omega(s, temperature=temperature) == pytest.approx(expected, abs=1e-15)
        half = [(1 / 3 + q) / 2 for q in expected]
        assert omega(s, alpha=0.5, temperature=temperature) == pytest.approx(half, abs=1e-15)


def test_clients_that_are_not_reliable_get_the_mean_quality() -> None:
    """Reliable are s = 1 and 3, mean 2, deviation 1, so s − mean = −1, 1 and 0 for the third."""
    powers = [math.e, 1 / math.e, 1.0]
    found = omega([1.0, 3.0, 0.0], [True, True, False], temperature="adaptive")
    assert found == pytest.approx([p / sum(powers) for p in powers], abs=1e-15)
    assert len(set(omega([1.0, 3.0, 0.0], [False] * 3))) == 1


@pytest.mark.parametrize("temperature", ["adaptive", "bounded", 5.0])
def test_equal_misfits_give_equal_qualities(temperature: Any) -> None:
    assert len(set(omega([0.37] * 3, temperature=temperature))) == 1
    assert omega([0.3], temperature=temperature) == [1.0]
    if temperature != 5.0:
        assert len(set(omega([0.1, 0.1 + 1e-14, 0.1], temperature=temperature))) == 1


@hypothesis.settings(max_examples=40, derandomize=True)
@hypothesis.given(
    s=st.lists(st.floats(0, 1e3), min_size=1, max_size=20),
    temperature=st.sampled_from(["adaptive", "bounded"]),
)
def test_quality_falls_with_the_misfit(s: list[float], temperature: Any) -> None:
    weights = torch.tensor(omega(s, temperature=temperature), dtype=torch.float64)
    assert (weights[torch.tensor(s).double().argsort()].diff() <= 1e-15).all()


def test_bounded_quality_by_hand() -> None:
    """Two clients of equal size with s = 0 and 1, α = 0, at least 0.9 · 2 = 1.8 effective clients.

    ω = (½ + x, ½ − x) has 1/(½ + 2x²) effective clients: 1.8 at x² = (1/1.8 − ½)/2 = 1/36, so
    x = 1/6 and ω = (⅔, ⅓). "adaptive" (γ = 2) would give (0.881, 0.119): 1.27 effective clients.
    """
    found = omega([0.0, 1.0], temperature="bounded", min_effective=0.9)
    assert found == pytest.approx([2 / 3, 1 / 3], abs=1e-8)
    equal = omega([0.0, 1.0], temperature="bounded", min_effective=1.0)
    assert equal == pytest.approx([0.5, 0.5], abs=1e-4)  # 1/Σω² is flat there
    free = omega([0.0, 1.0], temperature="bounded", min_effective=0.5)
    assert free == omega([0.0, 1.0], temperature="adaptive")
    assert free[0] == pytest.approx(1 / (1 + math.exp(-2)))


@hypothesis.settings(max_examples=40, derandomize=True)
@hypothesis.given(
    s=st.lists(st.floats(0, 10), min_size=2, max_size=12),
    alpha=st.floats(0, 1),
    least=st.floats(0.1, 1),
    data=st.data(),
)
def test_bounded_quality_keeps_effective_clients(
    s: list[float], alpha: float, least: float, data: st.DataObject
) -> None:
    """At least the stated share of those without quality, so also of those by size."""
    n = data.draw(st.lists(st.integers(1, 500), min_size=len(s), max_size=len(s)))
    found = omega(s, n=n, alpha=alpha, temperature="bounded", min_effective=least)
    by_size = [k / sum(n) for k in n]
    without = [alpha * share + (1 - alpha) / len(n) for share in by_size]

    def effective(weights: list[float]) -> float:
        return 1 / sum(w * w for w in weights)

    assert effective(found) >= least * effective(without) * (1 - 1e-9)
    assert effective(without) >= effective(by_size) * (1 - 1e-9)


@pytest.mark.parametrize(("least", "reliable"), [(10, [True, True, False]), (0, [True] * 3)])
def test_small_clients_are_not_reliable(least: int, reliable: list[bool]) -> None:
    """50, 10 and 9 images: from ``quality_min_examples`` on a client's own s counts."""
    asked: list[list[bool]] = []

    class Asked(FedHarmony):
        def weights(self, n: Tensor, misfits: Tensor, reliable: Tensor, alpha: float) -> Tensor:
            asked.append(reliable.tolist())
            return super().weights(n, misfits, reliable, alpha)

    harmony = Asked(FedHarmony.Config(quality_min_examples=least, blocks=False), TASK)
    state = state_after(harmony, [reply(k, 20, matrix(0.1 * k, 0, 0)) for k in range(3)])
    sent = harmony.broadcast(state, 3, [0, 1, 2])
    replies = [reply(k, n, matrix(0.2, 0.1 * k, 0)) for k, n in enumerate((50, 10, 9))]
    harmony.aggregate(state, 3, sent, iter(replies))
    assert asked == [[False] * 3, reliable]  # round 0 has no teacher


# -- a table with a limit -------------------------------------------------------------------------

WEIGHTED = ("mean", "size", "support", "pooled")


def limited(capacity: int, **settings: Any) -> FedHarmony:
    harmony = method(**{"consensus": "support", **settings})  # which has sums to fold into
    harmony.capacity = capacity
    return harmony


def drawn_reply(client: int, round: int) -> Reply:
    """Random scores of a client, another set each round; labels it may not show, unequal sizes."""
    generator = torch.Generator().manual_seed(100 * round + client)
    scores = torch.rand(6, 3, generator=generator, dtype=torch.float64) ** 2
    scores[:, client % 4 : client % 4 + 1] *= 1e-5  # clients 3, 7, ... show all labels
    moments = corr.score_moments(scores)
    upper = corr.pack_upper(corr.correlation(moments)).float()
    part = {"upper": upper, "marginal": moments.marginal.float()}
    groups = {PARAMS: {"w": torch.tensor([1.0])}, BUFFERS: {}, CORRELATION: part}
    return Reply(client, 4 + client % 5 * 20, Record(groups))


def after_rounds(
    harmony: FedHarmony, cohorts: list[list[int]], state: Record | None = None, first: int = 0
) -> Record:
    state = state or harmony.init_state({"w": torch.zeros(1)}, {})
    for round, cohort in enumerate(cohorts, start=first):
        sent = harmony.broadcast(state, round, cohort)
        replies = [drawn_reply(k, round) for k in cohort]
        state = harmony.aggregate(state, round, sent, iter(replies)).state
    return state


NEVER_TWICE = [[0, 1, 2], [3, 4, 5], [6, 7], [8, 9, 10], [11, 12, 13], [14, 15]]


@pytest.mark.parametrize(("classes", "clients"), [(17, 418_300), (80, 19_753), (1628, 48)])
def test_what_fits_into_the_table(classes: int, clients: int) -> None:
    """C(C+1)/2 float32: 612 B, 12,960 B and 5,304,024 B per client."""
    task = Task(classes, clients=4, rounds=9, batch_size=4, epochs=1, seed=0, width=8, lr=0.01)
    assert method(task).capacity == clients
    assert method(task, table_mb=1).capacity == max(1, 10**6 // (2 * classes * (classes + 1)))


@pytest.mark.parametrize("operator", WEIGHTED)
@pytest.mark.parametrize("decay", [0.9, 1.0])
def test_a_full_table_teaches_the_same_while_nobody_returns(operator: Any, decay: float) -> None:
    """16 clients heard once; a table of 4 and sums of the rest against a table of all."""
    settings = {"consensus": operator, "staleness_decay": decay}
    whole, small = limited(99, **settings), limited(4, **settings)
    everything, state = (after_rounds(harmony, NEVER_TWICE) for harmony in (whole, small))
    assert everything.get(TABLE)["client"].tolist() == list(range(16))
    assert state.get(TABLE)["client"].tolist() == [12, 13, 14, 15]
    for round in (6, 9):
        expected, found = (
            harmony.table(remembered).teachers([13, 99], round)[1]  # one that was heard, one not
            for harmony, remembered in ((whole, everything), (small, state))
        )
        for theirs, ours in zip(expected, found, strict=True):
            torch.testing.assert_close(ours.matrix, theirs.matrix, rtol=0, atol=1e-9)
            assert torch.equal(ours.known, theirs.known)
    shown, other = small.artifacts(state), whole.artifacts(everything)
    torch.testing.assert_close(shown["consensus"], other["consensus"], rtol=0, atol=1e-6)


def test_a_limit_that_is_not_reached_changes_nothing() -> None:
    one, other = (after_rounds(limited(n), NEVER_TWICE) for n in (16, 99))
    assert FOLDED not in one.groups
    assert same_bits(one, other)
    assert FOLDED in after_rounds(limited(15), NEVER_TWICE).groups


def test_what_is_folded_by_hand() -> None:
    """``mean``, decay 0.5, room for two; R01 of clients 0, 1, 2 is 0.8, 0.4, 0.2 in rounds 0, 1, 2.

    Round 2 folds client 0 at age 2: Σ w R = 0.25 · 0.8, Σ w = 0.25. Round 3 sees
    (0.25·0.8 + 0.5·0.4 + 1·0.2) / 1.75 = 0.342857. In round 3 client 0 returns with −0.6 and client
    1 (age 2) is folded too: Σ w R = 0.5·0.2 + 0.25·0.4 = 0.2, Σ w = 0.125 + 0.25. Round 4 sees
    (0.2 + 0.5·0.2 − 0.6) / (0.375 + 0.5 + 1) = −0.16; client 0's teacher lacks its new matrix, not
    its old one: (0.2 + 0.1) / 0.875 = 0.342857.
    """
    harmony = limited(2, consensus="mean", staleness_decay=0.5, quality=False)
    state = harmony.init_state({"w": torch.zeros(1)}, {})
    seen = []
    for round, (client, value) in enumerate([(0, 0.8), (1, 0.4), (2, 0.2), (0, -0.6)]):
        sent = harmony.broadcast(state, round, [client])
        answer = reply(client, 20, matrix(value, 0, 0))
        state = harmony.aggregate(state, round, sent, iter([answer])).state
        seen.append(harmony.table(state).consensus(round + 1).matrix[0, 1].item())
    assert seen == pytest.approx([0.8, (0.4 + 0.4) / 1.5, 0.6 / 1.75, -0.16], abs=1e-6)
    folded = state.get(FOLDED)
    assert folded["sum"][1].item() == pytest.approx(0.2, abs=1e-7)
    assert folded["weight"].tolist() == [0.375]
    assert folded["round"].item() == 3
    teacher = harmony.broadcast(state, 4, [0])[0].get(TEACHER)
    assert teacher["matrix"][0, 1].item() == pytest.approx(0.3 / 0.875, abs=1e-6)


def test_a_table_of_one_and_sums_teach() -> None:
    harmony = limited(1)
    state = after_rounds(harmony, [[3]])
    assert TEACHER not in harmony.broadcast(state, 1, [3])[3].groups
    state = after_rounds(harmony, [[3], [7]])
    assert len(state.get(TABLE)["client"]) == 1
    assert harmony.broadcast(state, 2, [7])[7].get(TEACHER)["known"].any()


@pytest.mark.parametrize("operator", ["median", "trimmed"])
def test_order_statistics_forget_the_oldest(operator: Any) -> None:
    state = after_rounds(limited(4, consensus=operator), NEVER_TWICE)
    assert state.get(TABLE)["client"].tolist() == [12, 13, 14, 15]
    assert FOLDED not in state.groups


def test_the_oldest_leave_by_round_then_client() -> None:
    """Client 1 returns in round 2, so 0 and 2 (round 0) are the oldest, then 3 (round 1)."""
    cohorts = [[0, 1, 2], [3, 4], [1, 5], [6]]
    clients = [
        after_rounds(limited(5), cohorts[: n + 1]).get(TABLE)["client"].tolist() for n in range(4)
    ]
    assert clients == [[0, 1, 2], [0, 1, 2, 3, 4], [1, 2, 3, 4, 5], [1, 3, 4, 5, 6]]


def test_the_last_cohort_stays_whatever_the_limit() -> None:
    state = after_rounds(limited(2), [[0, 1, 2], [3, 4, 5, 6, 7], [0, 8]])
    assert state.get(TABLE)["client"].tolist() == [0, 8]
    state = after_rounds(limited(2), [[0, 1, 2], [3, 4, 5, 6, 7]])
    assert state.get(TABLE)["client"].tolist() == [3, 4, 5, 6, 7]
    asked = limited(3, teacher="this_round")
    state = asked.init_state({"w": torch.zeros(1)}, {})
    for cohort in ([4, 5, 6], [0, 1]):  # both in round 1: those asked last stay
        stage = asked.stages(1)[0]
        sent = stage.broadcast(state, 1, cohort)
        state = stage.aggregate(state, 1, sent, iter([drawn_reply(k, 1) for k in cohort])).state
    assert state.get(TABLE)["client"].tolist() == [0, 1, 6]


def test_last_cohort_has_no_limit() -> None:
    one, other = (after_rounds(limited(n, memory="last_cohort"), NEVER_TWICE[:2]) for n in (1, 99))
    assert same_bits(one, other)
    assert len(one.get(TABLE)["client"]) == 3


@pytest.mark.parametrize("memory", ["all_seen", "last_cohort"])
def test_a_cold_start_asks_everyone_in_parts(memory: Any) -> None:
    """13 clients tell their labels before round 0: with room for 4, nine of them go into sums."""
    found = {}
    for capacity in (4, 99):
        harmony = limited(capacity, cold_start="labels", consensus="pooled", memory=memory)
        start = harmony.init_state({"w": torch.zeros(1)}, {})
        first = harmony.stages(0)[0]
        replies = iter([drawn_reply(k, 0) for k in range(13)])
        state = first.aggregate(start, 0, first.broadcast(start, 0, range(13)), replies).state
        found[capacity] = harmony.table(state).consensus(0)[0], len(state.get(TABLE)["client"])
    torch.testing.assert_close(found[4][0], found[99][0], rtol=0, atol=1e-12)
    assert found[4][1] == (4 if memory == "all_seen" else 13)


@pytest.mark.parametrize("operator", [*WEIGHTED, "median"])
def test_state_is_bounded_and_survives_a_checkpoint(operator: Any) -> None:
    """30 rounds of 3 of 24 clients, who return, with room for 5: as large as after 3 rounds; going
    on from a checkpoint after 11 rounds gives the same bits."""
    harmony = limited(5, consensus=operator)
    cohorts = [sorted({(5 * t + s) % 24 for s in (0, 7, 11)}) for t in range(30)]
    early = after_rounds(harmony, cohorts[:3])
    whole = after_rounds(harmony, cohorts)
    assert whole.nbytes == early.nbytes
    saved = from_bytes(to_bytes(after_rounds(harmony, cohorts[:11])))
    assert same_bits(after_rounds(harmony, cohorts[11:], saved, first=11), whole)
    assert (FOLDED in whole.groups) == (operator != "median")
    matrix, known = harmony.table(whole).consensus(30)
    assert known.any()
    assert torch.isfinite(matrix).all()


# -- settings -------------------------------------------------------------------------------------


def test_more_clusters_than_labels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"groups = 4 is more than the 3 labels"):
        method(groups=4)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"softness": 2.0, "consensus": "pooled"}, "softness = 1"),
        ({"shrinkage": 0.1}, "belongs to normaliser = 'pearson'"),
    ],
)
def test_settings_that_do_not_go_together(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        method(**settings)


@pytest.mark.parametrize("name", FedHarmony.Config.REMOVED)
def test_settings_that_are_gone_say_what_to_do(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"methods\.fedharmony\.{name} is gone: .*leave it out"):
        build(FedHarmony.Config, {name: 1}, "methods.fedharmony")


def test_pooled_pearson_is_refused() -> None:
    with pytest.raises(ConfigError, match="pooled"):
        FedHarmony.Config(normaliser="pearson", consensus="pooled")


VARIANTS: list[Mapping[str, Any]] = [
    *({k: v for k, v in p.items() if k != "federation"} for p in FedHarmony.presets.values()),
    {"normaliser": "pearson"},
    {"estimator": "batch"},
    {"denominator_grad": False},
    {"align_unseen": "mask"},
    *({"consensus": c} for c in ("mean", "size", "support", "median", "trimmed", "pooled")),
    {"memory": "last_cohort"},
    {"teacher": "this_round"},
    {"cold_start": "labels"},
    {"client_clusters": True},
    {"temperature": 3.0},
    {"temperature": "adaptive"},
    {"align_unseen": "only"},
    {"least_teacher": 0.05},
    {"neutral": True},
    {"softness": 4.0},
    {"normaliser": "pearson", "shrinkage": 0.01},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_variant_trains(settings: Mapping[str, Any]) -> None:
    """No NaN, nobody left out, and each variant really differs from the recommended one."""
    sizes = (20, 7, 3, 13, 17)  # the third client lacks labels
    state, events = Toy("fedharmony", settings, sizes, rounds=4, cohort=4).run()
    assert all(not event["left_out"] for event in events)
    assert all(torch.isfinite(t).all() for _, t in state.tensors() if t.is_floating_point())
    if settings:
        plain, _ = Toy("fedharmony", {}, sizes, rounds=4, cohort=4).run()
        assert not same_bits(
            Record({PARAMS: state.get(PARAMS)}), Record({PARAMS: plain.get(PARAMS)})
        )


def test_this_round_asks_before_training() -> None:
    """The teacher of round 0 comes from the received model: a second exchange, twice the bytes."""
    toy = Toy("fedharmony", {"teacher": "this_round"}, rounds=1)
    assert [stage.name for stage in toy.method.stages(0)] == ["correlate", "update"]
    _, events = toy.run()
    plain = Toy("fedharmony", rounds=1).run()[1]
    assert events[0]["bytes_down"] > 2 * plain[0]["bytes_down"]
    assert events[0]["log"]["discrepancy"] > 0


def test_label_cold_start_teaches_true_cooccurrence() -> None:
    """With ``cold_start = "labels"`` round 0's teacher is the φ of the clients' labels."""
    toy = Toy(
        "fedharmony", {"cold_start": "labels", "consensus": "pooled"}, sizes=(30, 30), rounds=1
    )
    sent: list[Record] = []

    class Listening:
        sizes = toy.transport.sizes
        inner = toy.transport

        def exchange(self, stage: Any, round: int, messages: Mapping[int, Record]) -> Any:
            sent.extend(messages.values())
            return self.inner.exchange(stage, round, messages)

    toy.transport = Listening()
    toy.run()
    others = toy_data(60).labels[30:]  # client 0 is taught by client 1
    expected = corr.label_correlation(others)[0].float()
    off = ~torch.eye(CLASSES, dtype=torch.bool)
    got = sent[2].get(TEACHER)["matrix"]
    torch.testing.assert_close(got[off], expected[off], atol=1e-4, rtol=0)


def test_consensus_and_clusters_are_shown() -> None:
    toy = Toy("fedharmony", rounds=2)
    state, _ = toy.run()
    shown = toy.method.artifacts(state)
    assert shown["consensus"].shape == (CLASSES, CLASSES)
    assert shown["clusters"].shape == (CLASSES,)
    assert toy.method.artifacts(toy.initial()) == {}


def test_many_labels_are_clustered_every_fifth_round() -> None:
    """A third of a second each time with 1,628 labels; the setting overrules it."""
    task = Task(classes=511, clients=2, rounds=1, batch_size=1, epochs=1, seed=0, width=1, lr=0.1)
    many = replace(task, classes=512)
    config = FedHarmony.Config()
    assert (FedHarmony(config, task).cluster_every, FedHarmony(config, many).cluster_every) == (
        1,
        5,
    )
    assert FedHarmony(FedHarmony.Config(cluster_every=2), many).cluster_every == 2


def test_more_pairs_than_the_machine_can_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """(110 + 20 · 3) · 50² bytes are refused before the first matrix if half of all is less."""
    monkeypatch.setattr("fedharmony.methods.fedharmony.machine_memory", lambda: 850_000)
    task = replace(TASK, classes=50, cohort=3)
    FedHarmony(FedHarmony.Config(), task)
    for change in ({"classes": 51}, {"cohort": 4}):
        with pytest.raises(ConfigError, match=r"5\d labels and a cohort of . need about 0.0 GB"):
            FedHarmony(FedHarmony.Config(), replace(task, **change))


# -- unknown labels --------------------------------------------------------------------------------

UNKNOWN = replace(TASK, unknown_labels=True)


def known_batch(labels: Tensor, known: Tensor, rows: Tensor | None = None) -> Batch:
    rows = torch.ones(len(labels)) if rows is None else rows
    known = known * rows[:, None]
    return Batch(labels * known, rows, known, known=known)


@pytest.mark.parametrize("normaliser", ["phi", "pearson"])
def test_sweep_looks_at_known_labels_only(normaliser: Any) -> None:
    """Label 2 is never known, label 1 on four of six images, by two batches; a padding row."""
    logits = torch.randn(6, 3, generator=torch.Generator().manual_seed(1))
    known = torch.tensor([[1.0, 1, 0], [1, 0, 0], [1, 1, 0], [1, 1, 0], [1, 0, 0], [1, 1, 0]])
    harmony = method(UNKNOWN, normaliser=normaliser)
    sweep = harmony.sweep()
    carry = sweep.start({})
    for part in (slice(0, 4), slice(4, 6)):
        shown = torch.cat([logits[part], torch.full((1, 3), 9.0)])
        mask = torch.cat([known[part], torch.ones(1, 3)])
        rows = torch.ones(len(shown))
        rows[-1] = 0
        carry = sweep.fold(carry, shown, known_batch(torch.zeros_like(shown), mask, rows))
    found = sweep.finish(carry, {})
    assert {n: tuple(t.shape) for n, t in found.items()} == {
        n: form.shape for n, form in sweep.forms({}).items()
    }
    scores, both = logits.sigmoid().double(), known[:, 1] > 0
    first = corr.soft_correlation(scores[:, :1], normaliser=normaliser)[0, 0]
    pair = corr.soft_correlation(scores[both][:, :2], normaliser=normaliser)
    expected = torch.stack([first, pair[0, 1], first * 0, pair[1, 1], first * 0, first * 0])
    torch.testing.assert_close(found["upper"], expected.float(), rtol=1e-5, atol=1e-6)
    assert (6 * found["known"]).round().tolist() == [6, 4, 0, 4, 0, 0]
    marginal = torch.stack([scores[:, 0].mean(), scores[both, 1].mean(), first * 0])
    torch.testing.assert_close(found["marginal"], marginal.float())


def unknown_loss(
    harmony: FedHarmony, logits: Tensor, known: Tensor | None, batches: int = 2
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of the last of several equal batches."""
    *_, message, carry = loss_inputs(harmony)
    labels = torch.zeros_like(logits)
    if known is None:
        batch = Batch(labels, torch.ones(len(logits)), torch.ones_like(logits))
    else:
        batch = known_batch(labels, known)
    for _ in range(batches):
        value, carry = harmony.loss(logits, batch, message, carry)
    return value, carry


@pytest.mark.parametrize("estimator", ["running", "batch"])
@pytest.mark.parametrize("normaliser", ["phi", "pearson"])
def test_unknown_labels_have_no_part_in_the_loss(estimator: Any, normaliser: Any) -> None:
    """Neither their scores change it, nor do they get a gradient; known ones are aligned."""
    harmony = method(UNKNOWN, estimator=estimator, normaliser=normaliser, align_weight=4.0)
    plain = method(UNKNOWN, align=False)
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(5, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    known = torch.tensor([[1.0, 1, 0], [1, 1, 1], [1, 0, 1], [1, 1, 0], [1, 1, 1]])
    value, _ = unknown_loss(harmony, logits, known)
    (gradient,) = torch.autograd.grad(value, logits)
    assert not gradient[known == 0].any()
    (fit,) = torch.autograd.grad(unknown_loss(plain, logits, known)[0], logits)
    assert (gradient - fit)[known == 1].abs().max() > 1e-3
    other = torch.where(known == 1, logits, 7.0)
    assert unknown_loss(harmony, other, known)[0].item() == value.item()


def test_a_label_that_is_never_known_is_not_aligned() -> None:
    """Known pairs of the teacher are (0, 1) and (1, 2); without label 2 Ψ is that of (0, 1)."""
    logits = torch.randn(4, 3, generator=torch.Generator().manual_seed(4), dtype=torch.float64)
    known = torch.tensor([[1.0, 1, 0]] * 4)
    harmony = method(UNKNOWN, align_weight=1.0)
    value, carry = unknown_loss(harmony, logits, known)
    local = corr.soft_correlation(logits.sigmoid())
    fit = task_loss(LossSettings(), logits, known_batch(torch.zeros_like(logits), known))
    assert value.item() == pytest.approx(fit.item() + (local[0, 1].item() - 0.4) ** 2, rel=1e-5)
    assert carry["pairs"][1, 2]


@pytest.mark.parametrize("normaliser", ["phi", "pearson"])
def test_a_mask_that_hides_nothing_changes_nothing(normaliser: Any) -> None:
    """Three rounds with every label marked as known, and without a mask: equal up to rounding."""
    data = toy_data(60)
    masked = replace(data, known=np.ones(data.labels.shape, bool))
    settings = {"normaliser": normaliser, "align_weight": 3.0}
    states = [
        Toy("fedharmony", settings, dtype=torch.float64, data=d).run()[0] for d in (data, masked)
    ]
    plain, other = (Record({PARAMS: state.get(PARAMS)}) for state in states)
    assert largest_difference(plain, other) < 1e-6
    assert "known" in states[1].get(TABLE)


def test_unknown_labels_stay_out_of_a_whole_run() -> None:
    """Clients that never know labels 4 and 5: their scores are not moved, nor their entries told.

    With other images and labels in the place of the unknown ones, the run has the same bits.
    """
    data = toy_data(60)
    known = np.ones(data.labels.shape, bool)
    known[:, 4:] = False
    known[::3, 1] = False
    hidden = np.where(known, data.labels, 1 - data.labels)
    settings = {"align_weight": 5.0, "cold_start": "labels", "groups": 1}
    runs = [
        Toy("fedharmony", settings, data=replace(data, labels=labels, known=known))
        for labels in (data.labels, hidden)
    ]
    states = [toy.run()[0] for toy in runs]
    assert same_bits(*states)
    before, after = runs[0].initial().get(PARAMS), states[0].get(PARAMS)
    for name in ("head.weight", "head.bias"):
        assert torch.equal(before[name][4:], after[name][4:])
        assert not torch.equal(before[name][:4], after[name][:4])
    matrix, told = runs[0].method.table(states[0]).consensus(3)
    assert not told[4:].any()
    assert not matrix[4:].any()
    assert told[0, 2]


def test_label_cold_start_counts_known_labels_only() -> None:
    """Each client knows half of the labels: the consensus is near φ, not near 0."""
    data = toy_data(4000)
    sizes = [200] * 20
    rng = np.random.default_rng(0)
    known = np.zeros(data.labels.shape, bool)
    for k in range(20):
        known[200 * k : 200 * (k + 1), rng.permutation(CLASSES)[:3]] = True
    toy = Toy(
        "fedharmony",
        {"cold_start": "labels"},
        sizes=sizes,
        data=replace(data, known=known),
    )
    stage = toy.method.stages(0)[0]
    sent = stage.broadcast(toy.initial(), 0, range(20))
    replies = iter(toy.transport.exchange(stage, 0, sent))
    state = stage.aggregate(toy.initial(), 0, sent, replies).state
    matrix, told = toy.method.table(state).consensus(0)
    truth, _ = corr.label_correlation(data.labels)
    off = told & ~torch.eye(CLASSES, dtype=torch.bool)
    assert off.sum() == CLASSES * (CLASSES - 1)
    assert (matrix - truth)[off].square().mean().sqrt() < 0.04
    assert truth[off].abs().mean() > 0.2


@pytest.mark.parametrize("operator", ["pooled", "median", "trimmed"])
def test_operators_without_a_form_for_unknown_labels_are_refused(operator: Any) -> None:
    with pytest.raises(ConfigError, match="some labels of the training images are unknown"):
        method(UNKNOWN, consensus=operator)


def test_misfit_of_known_pairs_only() -> None:
    """Client 0 does not know label 2: its s is that of (0, 1) alone, 0.3² = 0.09."""
    harmony = method(UNKNOWN, groups=1)
    teacher = {
        "matrix": matrix(0.4, 0.4, 0.4),
        "known": torch.ones(3, 3, dtype=torch.bool),
        "clusters": torch.zeros(3, dtype=torch.int64),
        "weight": torch.tensor(1.0),
    }
    replies = []
    for client, images in enumerate(([9.0, 9, 0, 9, 0, 0], [9.0] * 6, [9.0, 0, 0, 9, 0, 9])):
        answer = reply(client, 9, matrix(0.1, 0.0, 0.0))
        told = {**answer.record.get(CORRELATION), "known": torch.tensor(images) / 9}
        replies.append(replace(answer, record=Record({CORRELATION: told})))
    sent = {k: Record({TEACHER: teacher}) for k in range(3)}
    found = harmony.misfits(replies, sent)
    assert found.values.tolist() == pytest.approx([0.09, (0.09 + 0.16 + 0.16) / 3, 0])
    assert found.compared.tolist() == [True, True, False]


@pytest.mark.parametrize("operator", ["mean", "size", "support"])
def test_full_table_of_unknown_labels_folds(operator: Any) -> None:
    """Two clients fit into the table; what is folded still teaches, and survives a checkpoint."""
    data = toy_data(60)
    known = np.random.default_rng(1).random(data.labels.shape) < 0.7
    settings = {"consensus": operator, "min_examples": 0, "cold_start": "labels"}
    found = []
    for capacity in (2, 10**6):
        toy = Toy("fedharmony", settings, cohort=2, rounds=1, data=replace(data, known=known))
        toy.method.capacity = capacity
        found.append(toy)
        stage = toy.method.stages(0)[0]
        sent = stage.broadcast(toy.initial(), 0, range(5))
        state = stage.aggregate(
            toy.initial(), 0, sent, iter(toy.transport.exchange(stage, 0, sent))
        ).state
        assert bool(state.get(FOLDED)) == (capacity == 2)
        found[-1] = toy.method.table(from_bytes(to_bytes(state))).consensus(0)
    torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=1e-9)
    assert torch.equal(found[0][1], found[1][1])


def test_unknown_labels_take_room_in_the_table() -> None:
    assert method().capacity == 2 * method(UNKNOWN).capacity


@pytest.mark.parametrize("many", [10**9, 1])
def test_the_loss_knows_how_much_of_a_batch_is_there(
    many: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five images, B = 4: batches of four and of one leave the moments of all five images."""
    monkeypatch.setattr(alignment, "MANY_LABELS", many)
    harmony = method()
    logits, batch, message, _ = loss_inputs(harmony)
    carry = harmony.carry(ClientView(5, torch.tensor([3, 2, 0])), Record(message))
    other = -logits.detach()
    scores = torch.cat([logits.detach(), other[:1]]).sigmoid()
    for z, rows in ((logits, 4), (other, 1)):
        real = (torch.arange(4) < rows).float()
        batch = Batch(batch.labels, real, real[:, None].expand(4, 3))
        _, carry = harmony.loss(z, batch, message, carry)
    torch.testing.assert_close(carry["moments"][0].double(), scores.mean(0), rtol=0, atol=1e-6)


@pytest.mark.parametrize("settings", [{"cold_start": "labels"}, {"teacher": "this_round"}])
def test_what_is_asked_before_training_is_as_old_as_the_round_before(settings: Any) -> None:
    """Matrices asked for in round t count whole in round t, and once decayed in round t + 1."""
    toy = Toy("fedharmony", settings, rounds=1)
    stage = toy.method.stages(0)[0]
    sent = stage.broadcast(toy.initial(), 0, range(5))
    replies = iter(toy.transport.exchange(stage, 0, sent))
    state = stage.aggregate(toy.initial(), 0, sent, replies).state
    table = state.get(TABLE)
    assert table["round"].tolist() == [-1] * 5
    ages = [toy.method.table(state).age(table["round"], round).tolist() for round in (0, 1, 2)]
    assert ages == [[0] * 5, [1] * 5, [2] * 5]
