"""FedNova against its equations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score
from torch import Tensor

from fedharmony.config import build
from fedharmony.errors import ConfigError
from fedharmony.experiments.settings import load_settings
from fedharmony.losses import Batch
from fedharmony.methods.base import Groups, Outcome, Task
from fedharmony.methods.fedavg import FedAvg
from fedharmony.methods.fednova import FedNova
from fedharmony.server.federation import FederationSettings
from fedharmony.types import BUFFERS, PARAMS, Record, Reply, Tensors
from toy import CLASSES, Toy, same_bits, toy_data

TASK = Task(
    classes=3, clients=4, rounds=10, batch_size=4, epochs=1, seed=0, width=8, lr=0.1,
    optimiser="sgd",
)  # fmt: skip
OPTIMISERS = ("adam", "sgd", "momentum")
quick = settings(max_examples=60, derandomize=True)


def nova(task: Task = TASK, **config: Any) -> FedNova:
    return FedNova(FedNova.Config(**config), task)


def with_momentum(rho: float) -> Task:
    return replace(TASK, optimiser="momentum", momentum=rho)


def reply(
    client: int, examples: int, steps: int, theta: float, buffers: Tensors | None = None
) -> Reply:
    groups = {PARAMS: {"w": torch.tensor([theta])}, BUFFERS: buffers or {}}
    return Reply(client, examples, Record(groups, {"steps": steps, "loss": 0.5}))


#: 3/4 and 1/4 of the images, 6 and 2 steps; from θ = 10 to 4 and to 6.
PAIR = (reply(0, 30, 6, 4.0), reply(1, 10, 2, 6.0))


def after(
    method: FedNova | FedAvg,
    replies: Sequence[Reply],
    theta: float = 10.0,
    buffers: Tensors | None = None,
) -> Outcome:
    state = method.init_state({"w": torch.tensor([theta])}, buffers or {})
    return method.aggregate(state, 0, {}, iter(replies))


def value(outcome: Outcome) -> float:
    return float(outcome.state.get(PARAMS)["w"])


# -- ‖a‖₁ -----------------------------------------------------------------------------------------


def test_work_by_hand() -> None:
    """SGD: 1 + 1 + 1 = 3; so is Adam's.

    Momentum ½: the buffer holds 1, 3/2, 7/4 gradients; sum 17/4.
    """
    assert nova().work(3) == 3.0
    assert nova(replace(TASK, optimiser="adam")).work(3) == 3.0
    assert [nova(with_momentum(0.5)).work(s) for s in (1, 2, 3)] == [1.0, 2.5, 4.25]


@quick
@given(steps=st.integers(1, 300), rho=st.floats(0, 0.99))
def test_work_with_momentum_has_a_closed_form(steps: int, rho: float) -> None:
    """``(τ − ρ (1 − ρ^τ)/(1 − ρ)) / (1 − ρ)``."""
    closed = (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)
    assert nova(with_momentum(rho)).work(steps) == pytest.approx(closed, rel=1e-9)


def test_work_where_the_closed_form_cancels() -> None:
    """ρ → 1 gives τ (τ + 1)/2, where the closed form loses all digits."""
    assert nova(with_momentum(1 - 1e-15)).work(4) == pytest.approx(10.0)


def displacement(gradients: Tensor, momentum: float) -> Tensor:
    """(θ^t − θ)/η after torch's SGD was fed row s of ``gradients`` in step s."""
    theta = torch.zeros(gradients.shape[1], dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.SGD([theta], lr=TASK.lr, momentum=momentum)
    for gradient in gradients:
        theta.grad = gradient.clone()
        optimiser.step()
    return -theta.detach() / TASK.lr


@pytest.mark.parametrize("rho", [0.0, 0.9])
def test_work_is_the_sum_of_the_coefficients(rho: float) -> None:
    """Coordinate s is shown a gradient in step s alone, so it ends at the coefficient a_s.

    All a_s ≥ 0, they sum to ``work``, and any other gradients enter with the same coefficients.
    """
    tau, method = 25, nova(with_momentum(rho)) if rho else nova()
    coefficients = displacement(torch.eye(tau, dtype=torch.float64), rho)
    assert (coefficients > 0).all()
    assert method.work(tau) == pytest.approx(float(coefficients.sum()), rel=1e-12)
    gradients = torch.randn(tau, 7, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    torch.testing.assert_close(displacement(gradients, rho), coefficients @ gradients)


def test_adams_first_moment_weighs_gradients_with_sum_one() -> None:
    """Coordinate s is shown a gradient in step s alone: torch's ``exp_avg`` then holds
    (1 − β₁) β₁^{t−s}, which over 1 − β₁^t sum to 1 at every step t. So ‖a‖₁ = τ; the formula of
    heavy-ball momentum at ρ = β₁ would give 910 for τ = 100.
    """
    tau = 100
    theta = torch.zeros(tau, dtype=torch.float64, requires_grad=True)
    optimiser = torch.optim.Adam([theta], lr=0.1)
    for step, gradient in enumerate(torch.eye(tau, dtype=torch.float64), start=1):
        theta.grad = gradient
        optimiser.step()
        weights = optimiser.state[theta]["exp_avg"] / (1 - 0.9**step)
        assert float(weights.sum()) == pytest.approx(1.0, rel=1e-12)
    assert nova(replace(TASK, optimiser="adam")).work(tau) == tau
    assert nova(with_momentum(0.9)).work(tau) == pytest.approx(910.0, abs=0.01)


class Slope(FedNova):
    """A loss with slope 1 in every entry of ``head.bias``."""

    def loss(
        self, outputs: Tensor, batch: Batch, message: Groups, carry: Tensors
    ) -> tuple[Tensor, Tensors]:
        return outputs.mean(-2).sum(-1), carry


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_trained_clients_move_by_their_work(optimiser: Any) -> None:
    """With gradient 1 in every step, ``Δ_k = η ‖a_k‖₁`` for clients of 1, 2 and 5 batches; so all
    d_k are η, and the server moves by ``η τ_eff``."""
    toy = Toy(
        "fednova",
        sizes=(4, 8, 20),
        epochs=1,
        optimiser=optimiser,
        rounds=1,
        dtype=torch.float64,
        method_class=Slope,
    )
    sent = toy.method.broadcast(toy.initial(), 0, range(3))
    replies = toy.trainer.run(toy.method.stages(0)[0], 0, sent)
    assert [r.record.scalars["steps"] for r in replies] == [1, 2, 5]
    assert isinstance(toy.method, FedNova)
    work = [toy.method.work(s) for s in (1, 2, 5)]
    for r, a in zip(replies, work, strict=True):
        bias = r.record.get(PARAMS)["head.bias"]
        torch.testing.assert_close(bias, torch.full_like(bias, -toy.lr * a), rtol=1e-7, atol=0)
    tau_eff = (4 * work[0] + 8 * work[1] + 20 * work[2]) / 32
    moved = toy.method.aggregate(toy.initial(), 0, sent, iter(replies)).state.get(PARAMS)
    expected = torch.full((CLASSES,), -toy.lr * tau_eff, dtype=torch.float64)
    torch.testing.assert_close(moved["head.bias"], expected, rtol=1e-7, atol=0)


# -- the server's step ----------------------------------------------------------------------------


def test_step_by_hand() -> None:
    """With p = (3/4, 1/4), a = (6, 2), Δ = (6, 4): d = (1, 2) and Σ p d = 1.25; τ_eff = 5.

    θ = 10 − 5 · 1.25 = 3.75, where FedAvg has 4.5. A = 5 · (0.75/6 + 0.25/2) = 1.25 and
    q = (1/2, 1/2): again 10 + 1.25 · (5 − 10) = 3.75. The learning rate plays no part.
    """
    for task in (TASK, replace(TASK, lr=1e-4), replace(TASK, optimiser="adam")):
        outcome = after(nova(task), PAIR)
        assert value(outcome) == 3.75
        assert outcome.log == {"amplification": 1.25, "server_step": 1.25}
        assert outcome.weights == {0: 0.5, 1: 0.5}
    assert value(after(FedAvg(FedAvg.Config(), TASK), PAIR)) == 4.5


def test_step_with_momentum_by_hand() -> None:
    """ρ = ½: ‖a‖₁ is 4.25 for 3 steps and 1 for one; p = ½ each, Δ = (8.5, 1).

    d = (2, 1), Σ p d = 1.5, τ_eff = 2.625: θ = 10 − 3.9375.
    """
    replies = (reply(0, 7, 3, 1.5), reply(1, 7, 1, 9.0))
    assert value(after(nova(with_momentum(0.5)), replies)) == pytest.approx(10 - 3.9375)


def test_uniform_average() -> None:
    """With p = ½ each, Σ p d = 1.5 and τ_eff = 4: θ = 10 − 6, whatever the sizes are."""
    assert value(after(nova(replace(TASK, average="uniform")), PAIR)) == 4.0


def test_amplification_can_be_limited() -> None:
    """A = 1.25 is cut to 1.2: 10 − 1.2 · 5 = 4; a limit above A changes nothing. With A ≤ 1 the
    result is Σ q_k θ_k = 5: τ_eff cancels."""
    outcome = after(nova(max_amplification=1.2), PAIR)
    assert value(outcome) == 4.0
    assert outcome.log == {"amplification": 1.25, "server_step": 1.2}
    assert value(after(nova(max_amplification=1.0), PAIR)) == 5.0
    assert value(after(nova(max_amplification=2.0), PAIR)) == 3.75


cohorts = st.lists(
    st.tuples(st.integers(1, 500), st.integers(1, 200), st.floats(-5, 5)), min_size=1, max_size=8
)


@quick
@given(clients=cohorts, optimiser=st.sampled_from(OPTIMISERS))
def test_amplification_is_at_least_one(
    clients: list[tuple[int, int, float]], optimiser: Any
) -> None:
    """Jensen: Σ p a · Σ p/a ≥ 1, with equality for equal work only."""
    replies = [reply(k, n, s, theta) for k, (n, s, theta) in enumerate(clients)]
    outcome = after(nova(replace(TASK, optimiser=optimiser)), replies)
    a = outcome.log["amplification"]
    assert a >= 1 - 1e-12
    assert (a == 1.0) == (len({s for _, s, _ in clients}) == 1)
    assert sum(outcome.weights.values()) == pytest.approx(1.0)


@quick
@given(clients=cohorts, optimiser=st.sampled_from(OPTIMISERS))
def test_both_published_forms(clients: list[tuple[int, int, float]], optimiser: Any) -> None:
    """``θ − τ_eff Σ p_k Δ_k/a_k`` and ``(1 − c₁c₂) θ + c₁ Σ (p_k/a_k) θ_k`` with c₁ = Σ p_k a_k
    and c₂ = Σ p_k/a_k, in plain Python floats."""
    method = nova(replace(TASK, optimiser=optimiser))
    start = torch.tensor([1.7], dtype=torch.float64)
    replies = [
        Reply(k, n, Record({PARAMS: {"w": torch.tensor([x], dtype=torch.float64)}}, {"steps": s}))
        for k, (n, s, x) in enumerate(clients)
    ]
    state = method.init_state({"w": start}, {})
    got = float(method.aggregate(state, 0, {}, iter(replies)).state.get(PARAMS)["w"])
    images = sum(n for n, _, _ in clients)
    p, a = [n / images for n, _, _ in clients], [method.work(s) for _, s, _ in clients]
    thetas = [theta for *_, theta in clients]
    tau_eff = sum(x * y for x, y in zip(p, a, strict=True))
    c2 = sum(x / y for x, y in zip(p, a, strict=True))
    direct = 1.7 - tau_eff * sum(x * (1.7 - t) / y for x, y, t in zip(p, a, thetas, strict=True))
    mixed = sum(tau_eff * x / y * t for x, y, t in zip(p, a, thetas, strict=True))
    assert got == pytest.approx(direct, rel=1e-9, abs=1e-9)
    assert got == pytest.approx((1 - tau_eff * c2) * 1.7 + mixed, rel=1e-9, abs=1e-9)


# -- against FedAvg and the formula, in training --------------------------------------------------


def states_of(toy: Toy) -> tuple[list[Record], list[dict[str, Any]]]:
    """The state after each round, and the events."""
    states: list[Record] = []
    events: list[dict[str, Any]] = []
    toy.loop().run(toy.initial(), 0, events.append, lambda t, s: states.append(s))
    return states, events


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("average", ["size", "uniform"])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_equal_steps_are_fedavg_to_the_bit(optimiser: Any, average: Any, dtype: Any) -> None:
    """Clients of 17 to 20 images in batches of 4 all take 5 steps an epoch; some drop out."""
    common: dict[str, Any] = {
        "sizes": (17, 20, 18, 19, 20),
        "cohort": 4,
        "optimiser": optimiser,
        "dtype": dtype,
        "federation": FederationSettings(average=average, drop_rate=0.3),
    }
    plain, plain_events = states_of(Toy("fedavg", **common))
    states, events = states_of(Toy("fednova", **common))
    assert all(same_bits(*pair) for pair in zip(plain, states, strict=True))
    for event, other in zip(events, plain_events, strict=True):
        assert event["weights"] == other["weights"]
        assert event["log"] == {"amplification": 1.0, "server_step": 1.0}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_unequal_steps_follow_the_formula(optimiser: Any) -> None:
    """Three rounds in float64 against ``θ − τ_eff Σ p_k Δ_k/‖a_k‖₁``, recomputed from replies.

    ‖a_k‖₁ is written out here: τ, or the closed form for momentum 0.9.
    """
    checked = 0

    class Checked(FedNova):
        def aggregate(
            self, state: Record, round: int, sent: Mapping[int, Record], replies: Iterator[Reply]
        ) -> Outcome:
            nonlocal checked
            kept = list(replies)
            outcome = super().aggregate(state, round, sent, iter(kept))
            images = sum(r.examples for r in kept)
            p = [r.examples / images for r in kept]
            a = [float(r.record.scalars["steps"]) for r in kept]
            assert a == [2.0 * -(-r.examples // 4) for r in kept]  # E ⌈n/B⌉
            if self.task.optimiser == "momentum":
                a = [(tau - 0.9 * (1 - 0.9**tau) / 0.1) / 0.1 for tau in a]
            tau_eff = sum(x * y for x, y in zip(p, a, strict=True))
            for name, theta in state.get(PARAMS).items():
                step = sum(
                    x / y * (theta - r.record.get(PARAMS)[name])
                    for x, y, r in zip(p, a, kept, strict=True)
                )
                expected = theta - tau_eff * step
                torch.testing.assert_close(
                    outcome.state.get(PARAMS)[name], expected, atol=1e-12, rtol=0
                )
                checked += 1
            return outcome

    toy = Toy("fednova", cohort=4, dtype=torch.float64, optimiser=optimiser, method_class=Checked)
    _, events = toy.run()
    assert checked == 3 * 4
    assert all(event["log"]["amplification"] > 1.05 for event in events)


def test_more_work_does_not_mean_more_say() -> None:
    """Two clients of equal size; one takes 90 steps of 0.1 along x, the other 10 along y.

    FedAvg moves nine times as far along x as along y. FedNova moves equally far: τ_eff = 50, and
    50 · ½ · 0.1 = 2.5 each.
    """
    thetas = torch.tensor([[9.0, 0.0], [0.0, 1.0]])
    replies = [
        Reply(k, 50, Record({PARAMS: {"w": thetas[k]}}, {"steps": steps}))
        for k, steps in enumerate((90, 10))
    ]
    state = nova().init_state({"w": torch.zeros(2)}, {})
    plain = FedAvg(FedAvg.Config(), TASK).aggregate(state, 0, {}, iter(replies))
    assert plain.state.get(PARAMS)["w"].tolist() == [4.5, 0.5]
    moved = nova().aggregate(state, 0, {}, iter(replies)).state.get(PARAMS)["w"]
    assert moved.tolist() == pytest.approx([2.5, 2.5])


# -- who takes part -------------------------------------------------------------------------------


def test_sums_run_over_those_who_replied() -> None:
    """A lost client leaves the others' step as if it had never been asked."""
    third = reply(2, 40, 9, -3.0)
    whole, without = after(nova(), [*PAIR, third]), after(nova(), PAIR)
    assert value(whole) != value(without) == 3.75
    assert sum(without.weights.values()) == 1.0


def test_a_client_without_a_step_is_left_out() -> None:
    """τ = 0 has no d_k; its images do not count in p either."""
    idle = reply(2, 60, 0, 10.0, {"mean": torch.tensor([50.0])})
    for replies in ([idle, *PAIR], [*PAIR, idle]):
        outcome = after(nova(), replies)
        assert value(outcome) == 3.75
        assert outcome.weights == {0: 0.5, 1: 0.5}
        assert outcome.state.get(BUFFERS) == {}
    assert value(after(nova(), [idle])) == 10.0


def test_nobody_replied() -> None:
    for config in ({}, {"tau_eff": "ones"}):
        method = nova(**config)
        state = method.init_state({"w": torch.tensor([10.0])}, {})
        state = method.aggregate(state, 0, {}, iter(PAIR)).state
        outcome = method.aggregate(state, 1, {}, iter([]))
        assert outcome.state is state
        assert outcome.weights == {}


def test_training_with_drop_outs() -> None:
    """Nine of ten clients are lost: some rounds hear nobody, and those keep the model."""
    toy = Toy("fednova", rounds=6, federation=FederationSettings(drop_rate=0.9))
    states, events = states_of(toy)
    before = toy.initial()
    silent = 0
    for state, event in zip(states, events, strict=True):
        if event["reported"]:
            assert set(event["weights"]) == {str(k) for k in event["reported"]}
            assert sum(event["weights"].values()) == pytest.approx(1.0)
            assert not same_bits(before, state)
        else:
            silent += 1
            assert same_bits(before, state)
        before = state
    assert 0 < silent < 6


# -- buffers --------------------------------------------------------------------------------------


def test_buffers_are_averaged_plainly() -> None:
    """Running statistics: (30 · 1 + 10 · 5)/40 = 2, the steps play no part. Counters are not
    averaged. Both exactly as in FedAvg."""
    own = [
        {"mean": torch.tensor([1.0]), "batches": torch.tensor(7)},
        {"mean": torch.tensor([5.0]), "batches": torch.tensor(90)},
    ]
    replies = [reply(0, 30, 6, 4.0, own[0]), reply(1, 10, 2, 6.0, own[1])]
    start = {"mean": torch.tensor([100.0]), "batches": torch.tensor(7)}
    plain = after(FedAvg(FedAvg.Config(), TASK), replies, buffers=start).state.get(BUFFERS)
    for config in ({}, {"tau_eff": "ones"}):
        outcome = after(nova(**config), replies, buffers=start)
        buffers = outcome.state.get(BUFFERS)
        assert buffers["mean"].tolist() == [2.0]
        assert buffers["mean"].dtype == torch.float32
        assert buffers["batches"].item() == 7
        assert buffers["batches"].dtype == torch.int64
        assert all(torch.equal(buffers[name], plain[name]) for name in plain)
    assert value(after(nova(), replies, buffers=start)) == 3.75


def test_buffers_that_do_not_travel_are_kept() -> None:
    outcome = after(nova(), PAIR, buffers={"mean": torch.tensor([100.0])})
    assert outcome.state.get(BUFFERS)["mean"].tolist() == [100.0]


# -- the diagnostic -------------------------------------------------------------------------------


def test_diagnostic_by_hand() -> None:
    """τ_eff = 1: θ = 10 − 1.25 = 8.75. A is still logged; the step is c₂ = 0.75/6 + 0.25/2 = ¼."""
    outcome = after(nova(tau_eff="ones"), PAIR)
    assert value(outcome) == 8.75
    assert outcome.log == {"amplification": 1.25, "server_step": 0.25}
    limited = nova(tau_eff="ones", max_amplification=1.0)
    assert value(after(limited, PAIR)) == 8.75


def test_diagnostic_is_never_called_fednova() -> None:
    assert FedNova.suffix(FedNova.Config()) == ""
    assert FedNova.suffix(FedNova.Config(tau_eff="ones")) == "-diagnostic"
    assert load_settings("demo", ["run.method=fednova"]).label == "fednova"
    changes = ["run.method=fednova", "methods.fednova.tau_eff=ones"]
    assert load_settings("demo", changes).label == "fednova-diagnostic"
    preset = load_settings("demo", ["run.method=fednova:diagnostic"])
    assert preset.method_config == FedNova.Config(tau_eff="ones")
    assert preset.label.startswith("fednova-diagnostic")


def test_without_tau_eff_nothing_is_learnt() -> None:
    """Six clients of 5 to 85 steps, Adam, ten rounds, held-out images.

    FedNova learns as FedAvg does. Without the factor τ_eff the server moves by Σ p_k/τ_k = 2.7 %
    of the way: scores stay those of an untrained model.
    """
    sizes, held_out = (4, 8, 16, 32, 48, 68), 300
    images = sum(sizes)
    data = toy_data(images + held_out)
    index = torch.arange(images, images + held_out).unsqueeze(0)
    truth = data.labels[images:]
    precision, losses, spread = {}, {}, {}
    for label, name, config in (
        ("fedavg", "fedavg", {}),
        ("fednova", "fednova", {}),
        ("diagnostic", "fednova", {"tau_eff": "ones"}),
    ):
        toy = Toy(name, config, sizes=sizes, rounds=10, epochs=5, batch_size=4, lr=1e-3, data=data)
        state, events = toy.run()
        pixels = toy.method.normalise(data.images.gather(index, torch.device("cpu")), {}, {})
        params = {n: t.unsqueeze(0) for n, t in state.get(PARAMS).items()}
        scores = toy.method.predict(toy.model.apply(params, pixels)[0], state)
        precision[label] = average_precision_score(truth, scores.numpy(), average="macro")
        losses[label] = events[-1]["train_loss"]
        spread[label] = float(scores.std(0).mean())
        if label == "diagnostic":
            assert events[-1]["log"]["server_step"] == pytest.approx(3 / 110)
    assert abs(precision["fednova"] - precision["fedavg"]) < 0.03 < 0.8 < precision["fednova"]
    assert abs(losses["fednova"] - losses["fedavg"]) < 0.02
    assert precision["diagnostic"] < 0.6
    assert losses["diagnostic"] > losses["fednova"] + 0.2
    assert spread["diagnostic"] < 0.01 < 0.2 < spread["fednova"]


# -- payload and settings -------------------------------------------------------------------------


def test_payload_is_fedavgs() -> None:
    events = [Toy(name, rounds=1).run()[1][0] for name in ("fedavg", "fednova")]
    floats = 48 * 8 + 8 + 8 * CLASSES + CLASSES
    for event in events:
        assert event["bytes_up"] == event["bytes_down"] == 5 * 4 * floats


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mu": 0.1}, r"methods\.fednova\.mu is gone: .*use fedprox"),
        ({"tau_eff": "one"}, r"tau_eff = 'one' is not allowed.*'mean' or 'ones'"),
        ({"max_amplification": 0.9}, r"max_amplification = 0\.9 is not allowed.*equal to 1"),
        ({"server_momentum": 0.9}, r"methods\.fednova\.server_momentum is gone: leave it out"),
        ({"gmf": 0.9}, r"Unknown setting methods\.fednova\.gmf"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(FedNova.Config, values, "methods.fednova")
