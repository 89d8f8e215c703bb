"""FedProx against its equations."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedharmony.config import build
from fedharmony.errors import ConfigError
from fedharmony.losses import Batch
from fedharmony.methods.base import ClientView, Groups, Task
from fedharmony.methods.fedprox import FedProx
from fedharmony.models.base import Head
from fedharmony.models.heads import SphereHead
from fedharmony.types import FROZEN, PARAMS, Record, Reply, Tensors
from toy import CLASSES, Toy, same_bits

TASK = Task(classes=3, clients=4, rounds=10, batch_size=4, epochs=1, seed=0, width=8, lr=0.01)
OPTIMISERS = ("adam", "sgd", "momentum")


def prox(**settings: Any) -> FedProx:
    return FedProx(FedProx.Config(**settings), TASK)


def replies_of(toy: Toy) -> list[Reply]:
    """What the clients answer in round 0."""
    sent = toy.method.broadcast(toy.initial(), 0, range(len(toy.sizes)))
    return toy.trainer.run(toy.method.stages(0)[0], 0, sent)


def states_of(toy: Toy) -> list[Record]:
    """The state after each round."""
    states: list[Record] = []
    toy.loop().run(toy.initial(), 0, lambda e: None, lambda t, s: states.append(s))
    return states


class Slope(FedProx):
    """A loss with slope 1 in every entry of ``head.bias``: a path one can follow by hand."""

    def loss(
        self, outputs: Tensor, batch: Batch, message: Groups, carry: Tensors
    ) -> tuple[Tensor, Tensors]:
        return outputs.mean(-2).sum(-1), carry


class OneSlope(Slope):
    """Slope 1 in the first step, then none."""

    def carry(self, view: ClientView, message: Record) -> Tensors:
        return {"slope": torch.ones(())}

    def loss(
        self, outputs: Tensor, batch: Batch, message: Groups, carry: Tensors
    ) -> tuple[Tensor, Tensors]:
        value, _ = super().loss(outputs, batch, message, carry)
        return value * carry["slope"], {"slope": carry["slope"] * 0}


def bias_after(method: type[FedProx], steps: int, **settings: Any) -> float:
    """``head.bias − its received value``, 0, after so many full batches; lr = 0.1."""
    optimiser = settings.pop("optimiser", "sgd")
    toy = Toy(
        "fedprox",
        settings,
        sizes=(4 * steps,),
        epochs=1,
        optimiser=optimiser,
        lr=0.1,
        dtype=torch.float64,
        method_class=method,
    )
    (reply,) = replies_of(toy)
    bias = reply.record.get(PARAMS)["head.bias"]
    torch.testing.assert_close(bias, bias[0].expand(CLASSES), rtol=1e-12, atol=0)
    return float(bias[0])


# -- identities -----------------------------------------------------------------------------------


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_without_a_pull_it_is_fedavg(optimiser: Any) -> None:
    """μ = 0: the same bits as FedAvg, round by round."""
    plain = states_of(Toy("fedavg", cohort=3, optimiser=optimiser))
    states = states_of(Toy("fedprox", {"mu": 0.0}, cohort=3, optimiser=optimiser))
    assert all(same_bits(*pair) for pair in zip(plain, states, strict=True))


def test_one_step_from_the_received_model_is_fedavgs() -> None:
    """At θ = θ^t the pull is 0, so a round of a single step is FedAvg's whatever μ is."""
    one_step: dict[str, Any] = {"sizes": (4, 3, 2), "epochs": 1, "rounds": 1}
    plain, _ = Toy("fedavg", **one_step).run()
    assert same_bits(plain, Toy("fedprox", {"mu": 50.0}, **one_step).run()[0])


# -- the pull -------------------------------------------------------------------------------------


def test_pull_by_hand() -> None:
    """μ = 0.5: 0.5 · ((3, 1) − (1, 2)) = (1, −0.5); nothing at θ^t."""
    params, start = {"w": torch.tensor([3.0, 1.0])}, {"w": torch.tensor([1.0, 2.0])}
    assert prox(mu=0.5).pull(params, start, {}, {})["w"].tolist() == [1.0, -0.5]
    assert prox(mu=0.5).pull(start, start, {}, {})["w"].tolist() == [0.0, 0.0]


@pytest.mark.parametrize("mu", [0.01, 3.0])
def test_pull_is_the_gradient_of_the_penalty(mu: float) -> None:
    """Against central differences of (μ/2) ‖θ − θ^t‖² in float64, exact for a quadratic form."""
    generator = torch.Generator().manual_seed(5)
    draw = {"a": (2, 3), "b": (4,)}
    params, start = (
        {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in draw.items()}
        for _ in range(2)
    )

    def penalty(at: Mapping[str, Tensor]) -> float:
        return mu / 2 * sum(float((at[n] - start[n]).square().sum()) for n in at)

    got, h = prox(mu=mu).pull(params, start, {}, {}), 1e-3
    assert got.keys() == params.keys()
    for name, tensor in params.items():
        for place in range(tensor.numel()):
            nudge = torch.zeros_like(tensor)
            nudge.view(-1)[place] = h
            slope = penalty({**params, name: tensor + nudge})
            slope = (slope - penalty({**params, name: tensor - nudge})) / (2 * h)
            assert float(got[name].view(-1)[place]) == pytest.approx(slope, rel=1e-9, abs=1e-11)


# -- where the pull enters ------------------------------------------------------------------------


def test_two_sgd_steps() -> None:
    """Slope 1, lr = 0.1, μ = 2, from x = θ − θ^t = 0.

    x₁ = −0.1; x₂ = −0.1 − 0.1 (1 + 2 · (−0.1)) = −0.18.
    """
    assert bias_after(Slope, 1, mu=2.0) == pytest.approx(-0.1)
    assert bias_after(Slope, 2, mu=2.0) == pytest.approx(-0.18)


def test_two_adam_steps() -> None:
    """Slope 1, lr = 0.1, μ = 2, β = (0.9, 0.999).

    The first step is −0.1, the sign of the slope. Then g₂ = 1 + 2 · (−0.1) = 0.8,
    m̂ = (0.9 · 0.1 + 0.1 · 0.8) / 0.19 = 0.894737, v̂ = (0.999 · 0.001 + 0.001 · 0.64) / 0.001999
    = 0.819910, and x₂ = −0.1 − 0.1 · 0.894737 / √0.819910 = −0.198812: the pull, rescaled, takes
    1.2 % off the second step where in SGD it took 20 %.
    """
    second = bias_after(Slope, 2, mu=2.0, optimiser="adam")
    m, v = 0.17 / 0.19, 0.001639 / 0.001999
    assert second == pytest.approx(-0.1 - 0.1 * m / math.sqrt(v), rel=1e-7)
    assert second == pytest.approx(-0.198812, abs=1e-6)
    assert bias_after(Slope, 1, mu=2.0, optimiser="adam") == pytest.approx(-0.1, rel=1e-7)


def test_two_heavy_ball_steps() -> None:
    """ρ = 0.9, slope 1, lr = 0.1, μ = 2: x₁ = −0.1.

    The pull enters the buffer: u₂ = 0.9 + 1 − 0.2 = 1.7, x₂ = −0.27.
    """
    assert bias_after(Slope, 2, mu=2.0, optimiser="momentum") == pytest.approx(-0.27)


@pytest.mark.parametrize("mu", [1.0, 9.0, 9.99])
def test_without_slope_the_pull_shrinks_geometrically(mu: float) -> None:
    """One step of −0.1, then s = 4 steps of the pull alone: x = −0.1 (1 − lr μ)^s."""
    expected = -0.1 * (1 - 0.1 * mu) ** 4
    assert bias_after(OneSlope, 5, mu=mu) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("mu", [0.5, 5.0, 9.5])
def test_against_a_constant_slope_the_pull_holds_at_one_over_mu(mu: float) -> None:
    """Summing x ← (1 − lr μ) x − lr gives −(1 − (1 − lr μ)^s)/μ: never further than 1/μ."""
    expected = -(1 - (1 - 0.1 * mu) ** 6) / mu
    assert bias_after(Slope, 6, mu=mu) == pytest.approx(expected, rel=1e-9)


def test_large_mu_keeps_clients_at_the_received_model() -> None:
    """Plain SGD, lr μ < 1, the real loss: ‖θ_k − θ^t‖ falls with μ and is at most G/μ.

    G bounds the norm of the gradient. Mean BCE over 6 labels has ‖∂/∂logits‖ ≤ 1/√6; with 8
    features in [−1, 1] and a bias the head's part is at most √(9/6); the hidden layer's part is at
    most ‖W‖ √49/√6 < 0.5 for ‖W‖ ≈ 0.14. So G < √(1.5 + 0.25) < 1.35.
    """

    def distances(mu: float) -> list[float]:
        toy = Toy("fedprox", {"mu": mu}, epochs=10, optimiser="sgd", dtype=torch.float64, lr=1e-3)
        start = toy.initial().get(PARAMS)
        return [
            math.sqrt(sum(float((t - start[n]).square().sum()) for n, t in r.items()))
            for r in (reply.record.get(PARAMS) for reply in replies_of(toy))
        ]

    free, held, tight = (distances(mu) for mu in (0.0, 99.0, 990.0))
    assert all(a > b > c for a, b, c in zip(free, held, tight, strict=True))
    bound = 1.35 / 990
    assert max(tight) < bound < min(free)


# -- against plain PyTorch ------------------------------------------------------------------------


class Plain(nn.Module):
    """The toy model as one would write it for a single client."""

    def __init__(self, toy: Toy) -> None:
        super().__init__()
        start = toy.initial().get(PARAMS)
        self.hidden = nn.Linear(48, 8, dtype=torch.float64)
        self.head = nn.Linear(8, CLASSES, dtype=torch.float64)
        self.load_state_dict(dict(start))

    def forward(self, images: Tensor) -> Tensor:
        out: Tensor = self.head(torch.tanh(self.hidden(images.flatten(1))))
        return out


def train_plainly(toy: Toy, client: int, mu: float) -> Mapping[str, Tensor]:
    """One client, one batch at a time, with the penalty written as (μ/2) Σ (θ − θ^t)²."""
    model, task = Plain(toy), toy.task
    start = [p.detach().clone() for p in model.parameters()]
    optimiser: torch.optim.Optimizer
    if task.optimiser == "adam":
        optimiser = torch.optim.Adam(model.parameters(), lr=task.lr)
    else:
        rho = 0.9 if task.optimiser == "momentum" else 0.0
        optimiser = torch.optim.SGD(model.parameters(), lr=task.lr, momentum=rho)
    assert toy.data is not None
    for order in toy.trainer.data.epochs(0, client, toy.epochs):
        for first in range(0, len(order), task.batch_size):
            index = torch.from_numpy(order[first : first + task.batch_size])
            pixels = toy.data.images.gather(index[None], torch.device("cpu"))[0]
            labels = torch.from_numpy(toy.data.labels)[index].double()
            images = ((pixels.float() - 127.5) / 127.5).double()
            loss = nn.functional.binary_cross_entropy_with_logits(model(images), labels)
            pairs = zip(model.parameters(), start, strict=True)
            loss = loss + mu / 2 * torch.stack([(p - s).square().sum() for p, s in pairs]).sum()
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_clients_equal_a_plain_training_loop(optimiser: Any) -> None:
    """Three clients of 9, 4 and 1 images in one stack, E = 3, against one loop per client."""
    mu = 4.0
    toy = Toy(
        "fedprox",
        {"mu": mu},
        sizes=(9, 4, 1),
        epochs=3,
        lr=0.05,
        optimiser=optimiser,
        dtype=torch.float64,
    )
    for reply in replies_of(toy):
        expected = train_plainly(toy, reply.client, mu)
        for name, tensor in reply.record.get(PARAMS).items():
            torch.testing.assert_close(tensor, expected[name], atol=1e-10, rtol=0)


def test_train_loss_does_not_count_the_penalty() -> None:
    """``train_loss`` stays comparable across methods.

    Two SGD steps see the same models for any μ: θ^t, then θ^t − lr g, since the pull is 0
    in the first. There the penalty is (μ/2) lr² ‖g‖² > 0, but the mean of the two losses is F_k's.
    """
    losses = []
    for mu in (0.0, 4.0):
        toy = Toy("fedprox", {"mu": mu}, sizes=(8,), epochs=1, lr=1.0, optimiser="sgd")
        losses.append(replies_of(toy)[0].record.scalars["loss"])
    assert losses[0] == losses[1]


# -- frozen tensors -------------------------------------------------------------------------------


def test_frozen_tensors_are_not_pulled() -> None:
    """With a frozen head only the hidden layer is trained, pulled and sent."""
    pulled: set[str] = set()

    class FrozenHead(FedProx):
        def head(self, width: int) -> Head:
            return SphereHead(width, self.task.classes)

        def pull(
            self,
            params: Mapping[str, Tensor],
            start: Mapping[str, Tensor],
            message: Groups,
            carry: Tensors,
        ) -> Tensors:
            found = super().pull(params, start, message, carry)
            pulled.update(found)
            return found

    toy = Toy("fedprox", {"mu": 5.0}, method_class=FrozenHead)
    state, _ = toy.run()
    assert pulled == {"hidden.weight", "hidden.bias"} == set(state.get(PARAMS))
    before = toy.initial().get(FROZEN)
    assert set(before) == {"head.weight", "head.bias"}
    assert all(torch.equal(t, before[name]) for name, t in state.get(FROZEN).items())


# -- payload and settings -------------------------------------------------------------------------


def test_payload_is_fedavgs() -> None:
    events = [Toy(name, rounds=1).run()[1][0] for name in ("fedavg", "fedprox")]
    floats = 48 * 8 + 8 + 8 * CLASSES + CLASSES
    for event in events:
        assert event["bytes_up"] == event["bytes_down"] == 5 * 4 * floats


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"mu": -0.1}, r"methods\.fedprox\.mu = -0\.1 is not allowed.*greater than or equal to 0"),
        ({"placement": "decoupled"}, r"methods\.fedprox\.placement is gone: .*leave it out"),
        ({"my": 0.1}, r"Unknown setting methods\.fedprox\.my\. Did you mean 'mu'\?"),
    ],
)
def test_wrong_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(FedProx.Config, values, "methods.fedprox")
