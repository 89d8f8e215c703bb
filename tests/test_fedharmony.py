"""FedHarmony against its equations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedharmony import correlation as corr
from fedharmony.errors import ConfigError
from fedharmony.losses import Batch, binary_cross_entropy
from fedharmony.methods.base import ClientView, Task
from fedharmony.methods.fedharmony import CLUSTERS, CORRELATION, TABLE, TEACHER, FedHarmony
from fedharmony.types import BUFFERS, PARAMS, Record, Reply
from toy import CLASSES, Toy, same_bits, toy_data

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
    expected = binary_cross_entropy(logits, batch).item() + 2.0 * misfit
    assert value.item() == pytest.approx(expected, rel=1e-6)
    torch.testing.assert_close(after["moments"][0].double(), torch.from_numpy(p), rtol=1e-6, atol=0)


def test_second_batch_uses_running_moments() -> None:
    """ω = B / n = 4/40: value from 0.9 · first batch + 0.1 · second, whatever the gradient is."""
    harmony = method()
    logits, batch, message, carry = loss_inputs(harmony)
    _, carry = harmony.loss(logits, batch, message, carry)
    other = (logits.detach() * -1.5).requires_grad_()
    value, _ = harmony.loss(other, batch, message, carry)
    first, second = (corr.score_moments(z.sigmoid(), batch.rows) for z in (logits, other))
    mixed = corr.Moments(0.9 * first.values + 0.1 * second.values)
    pairs = message[TEACHER]["known"] & ~torch.eye(3, dtype=torch.bool)
    psi = corr.discrepancy(corr.correlation(mixed), message[TEACHER]["matrix"].double(), pairs)
    expected = binary_cross_entropy(other, batch) + psi
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


def test_warm_up() -> None:
    weights = [method(align_weight=3.0).align_weight(t) for t in (1, 2, 3, 9)]
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
    harmony = method()
    table = [reply(k, n, matrix(r, 0, 0)) for k, n, r in [(0, 30, 0.1), (1, 10, 0.3), (2, 20, 0.6)]]
    state = state_after(harmony, table)
    sent = harmony.broadcast(state, 1, [0, 9])
    assert sent[0].get(TEACHER)["matrix"][0, 1].item() == pytest.approx(0.518182, abs=1e-6)
    assert sent[9].get(TEACHER)["matrix"][0, 1].item() == pytest.approx(0.287755, abs=1e-6)
    assert sent[0].get(PARAMS) is sent[9].get(PARAMS)  # the model travels by reference


def test_stale_matrices_fade() -> None:
    """Client 1 was heard two rounds before client 2: weight 5 · 0.9² against 13.333 · 0.9⁰."""
    harmony = method()
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
    harmony = method(blocks=False)
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


# -- settings -------------------------------------------------------------------------------------


def test_more_clusters_than_labels_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"groups = 4 is more than the 3 labels"):
        method(groups=4)


def test_pooled_pearson_is_refused() -> None:
    with pytest.raises(ConfigError, match="pooled"):
        FedHarmony.Config(normaliser="pearson", consensus="pooled")


VARIANTS: list[Mapping[str, Any]] = [
    *FedHarmony.presets.values(),
    {"normaliser": "pearson"},
    {"estimator": "batch"},
    {"distance": "frobenius"},
    {"distance": "cosine"},
    {"denominator_grad": False},
    {"align_unseen": "mask"},
    *({"consensus": c} for c in ("mean", "size", "median", "trimmed", "pooled")),
    {"memory": "last_cohort"},
    {"teacher": "this_round"},
    {"cold_start": "labels"},
    {"client_clusters": True},
    {"temperature": 3.0},
]


@pytest.mark.parametrize("settings", VARIANTS, ids=str)
def test_every_variant_trains(settings: Mapping[str, Any]) -> None:
    """No NaN, nobody left out, and each variant really differs from the recommended one."""
    sizes = (20, 7, 3, 13, 17)  # the third client lacks labels
    state, events = Toy("fedharmony", settings, sizes, rounds=4, cohort=4).run()
    assert all(not event["failures"] for event in events)
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
