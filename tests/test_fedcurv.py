"""FedCurv against its equations."""

from __future__ import annotations

import itertools
import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedharmony.config import build
from fedharmony.data.base import LabelledImages, TensorImages
from fedharmony.engine import sweeping as engine
from fedharmony.engine.cohort import Cohort
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.optimise import TrainSettings
from fedharmony.errors import CheckpointError, ConfigError
from fedharmony.experiments import run
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.losses import Batch, LossSettings
from fedharmony.methods.base import ClientView, Stage, Task
from fedharmony.methods.fedcurv import FISHER, MEMBERS, SUM_U, SUM_V, FedCurv
from fedharmony.models.base import Backbone, InputSpec, Model, Shapes
from fedharmony.models.heads import LinearHead
from fedharmony.models.vit import ViT
from fedharmony.rng import numpy_rng
from fedharmony.server.federation import Event, FederationSettings
from fedharmony.transport.inprocess import InProcess
from fedharmony.types import BUFFERS, PARAMS, Failure, Index, Record, Reply, Tensors
from toy import CLASSES, Pixels, Toy, largest_difference, same_bits, split, toy_data

TASK = Task(classes=1, clients=3, rounds=9, batch_size=4, epochs=1, seed=0, width=1, lr=0.01)
LN3 = math.log(3.0)  # σ(ln 3) = 3/4
EXACT = {"clip_quantile": 1.0}
TEMPERATE = {"weight": 0.5, **EXACT}


def curv(task: Task = TASK, **settings: Any) -> FedCurv:
    return FedCurv(FedCurv.Config(**{**EXACT, **settings}), task)


def doubles(tensors: Mapping[str, Tensor]) -> Tensors:
    return {name: t.double() for name, t in tensors.items()}


def close(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(got[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


def same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> bool:
    return same_bits(Record({"": a}), Record({"": b}))


def part(tensors: Mapping[str, Tensor], kind: str) -> Tensors:
    """The u or the v of a reply, by parameter."""
    return {n[2:]: t for n, t in tensors.items() if n.startswith(f"{kind}.")}


# -- a model one can differentiate by hand --------------------------------------------------------


class Value(Backbone):
    """The feature of an image is the value of its only pixel (that of its first channel)."""

    class_tokens = 0

    def __init__(self) -> None:
        self.width = 1
        self.mean, self.std = (0.0,) * 3, (1 / 255,) * 3

    def shapes(self) -> Shapes:
        return {}

    def init(self, generator: torch.Generator) -> Tensors:
        return {}

    def tokens(self, params: Mapping[str, Tensor], images: Tensor) -> Tensor:
        return images[:, :, :1, 0]


def values(features: Sequence[int], labels: Sequence[Sequence[int]]) -> LabelledImages:
    """Images of one pixel each."""
    pixels = torch.tensor(features, dtype=torch.uint8).view(-1, 1, 1, 1).expand(-1, 3, 1, 1)
    return LabelledImages(TensorImages(pixels.contiguous()), np.array(labels, dtype=np.uint8))


def logistic(weight: Sequence[float], bias: Sequence[float]) -> Tensors:
    """``z_c = w_c x + b_c``."""
    return {
        "head.weight": torch.tensor(weight, dtype=torch.float64).view(-1, 1),
        "head.bias": torch.tensor(bias, dtype=torch.float64),
    }


def swept(
    method: FedCurv,
    model: Model,
    data: LabelledImages,
    params: Sequence[Tensors],
    clients: Mapping[int, Index] | None = None,
    stack: int = 8,
    sweep_batch: int = 5,
    round: int = 0,
) -> list[Mapping[str, Tensor]]:
    """What each client reports of ``params[k]`` on its images (all of them where there is one)."""
    clients = clients or split([len(data)])
    seed, settings, cpu = method.task.seed, TrainSettings(), torch.device("cpu")
    cohort = Cohort(model, method, data, clients, settings, seed, cpu, sweep_batch)
    messages = {k: Record({PARAMS: p, BUFFERS: {}}) for k, p in enumerate(params)}
    stage = Stage("sweep", method.broadcast, method.aggregate, train=False, sweep=method.sweep())
    answers = list(InProcess(cohort, stack).exchange(stage, round, messages))
    assert all(isinstance(answer, Reply) for answer in answers), answers
    return [answer.record.get(FISHER) for answer in answers if isinstance(answer, Reply)]


def logistic_fisher(
    data: LabelledImages, params: Tensors, round: int = 0, seed: int = 0, **settings: Any
) -> Mapping[str, Tensor]:
    """One client with all images."""
    classes, value = data.labels.shape[1], Value()
    task = replace(TASK, classes=classes, mean=value.mean, std=value.std, seed=seed)
    model = Model(value, LinearHead(1, classes))
    method = curv(task, **settings)
    return swept(method, model, data, [params], sweep_batch=500, round=round)[0]


def test_fisher_by_hand() -> None:
    """Two images, one feature, two labels; ∂ℓ/∂z_c = p_c − y_c and ∂z_c/∂(w_c, b_c) = (x, 1).

    Label 0 has w = 0, b = ln 3, so p = 3/4 for both images::

        x = 1, y = 1:  −1/4   squares of (w, b): 1/16, 1/16
        x = 3, y = 0:   3/4                     81/16, 9/16     means: 41/16, 5/16

    Label 1 has w = 0, b = 0, so p = 1/2: both are absent, squares 1/4, 1/4 and 9/4, 1/4, means 5/4,
    1/4. Then v = u ∘ θ: zero but for the first bias, 5/16 ln 3.
    """
    params = logistic([0.0, 0.0], [LN3, 0.0])
    found = logistic_fisher(values([1, 3], [[1, 0], [0, 0]]), params)
    close(part(found, "u"), logistic([41 / 16, 5 / 4], [5 / 16, 1 / 4]), 1e-7)
    close(part(found, "v"), logistic([0.0, 0.0], [5 / 16 * LN3, 0.0]), 1e-7)


def test_fisher_is_not_the_square_of_a_mean() -> None:
    """As above: the mean gradient of label 0 is ((−1 + 9)/8, (−1 + 3)/8) = (1, 1/4).

    Its square (1, 1/16) is far from (41/16, 5/16), in one batch as in two.
    """
    params, data = logistic([0.0], [LN3]), values([1, 3], [[1], [0]])
    found = part(logistic_fisher(data, params), "u")
    w = torch.zeros((), dtype=torch.float64, requires_grad=True)
    z, y = w * torch.tensor([1.0, 3.0]) + LN3, torch.tensor([1.0, 0.0]).double()
    (slope,) = torch.autograd.grad(F.binary_cross_entropy_with_logits(z, y), w)
    assert float(slope) ** 2 == pytest.approx(1.0)
    assert float(found["head.weight"]) == pytest.approx(41 / 16)


def test_a_label_the_client_does_not_have() -> None:
    """No image of label 1 is positive: (p − 0)² = 1/4 is in its bias, and nothing is undefined."""
    found = logistic_fisher(values([0, 2, 4], [[1, 0]] * 3), logistic([0.0, 0.0], [LN3, 0.0]))
    close(part(found, "u"), logistic([20 / 48, 20 / 12], [1 / 16, 1 / 4]), 1e-7)


def test_unknown_labels_leave_the_fisher_untouched() -> None:
    """Label 0 is known of image 0 alone: its bias has (1/4)²/2 instead of 5/16.

    Label 1 is known of none: zero, whatever its entries say.
    """
    params = logistic([0.0, 0.0], [LN3, LN3])
    known = np.array([[True, False], [False, False]])
    for hidden in (0, 1):
        data = replace(values([1, 3], [[1, hidden], [hidden, 0]]), known=known)
        for labels in ("true", "sampled"):
            u = part(logistic_fisher(data, params, fisher_labels=labels), "u")
            assert u["head.bias"][1] == u["head.weight"][1] == 0.0
            if labels == "true":
                assert float(u["head.bias"][0]) == pytest.approx(1 / 32)


def test_the_task_loss_does_not_change_the_fisher() -> None:
    """It is the information of Bernoulli outputs; the loss's focusing and weights are not in it."""
    toy = Toy("fedcurv", TEMPERATE)
    assert toy.data is not None
    params = [doubles(toy.parameters()[0])]
    plain = swept(curv(toy.task), toy.model, toy.data, params)[0]
    for loss in (LossSettings("focal"), LossSettings(absent_label_weight=0.0)):
        other = swept(curv(replace(toy.task, loss=loss)), toy.model, toy.data, params)[0]
        assert same(plain, other)


# -- against a loop over images -------------------------------------------------------------------

SIZES = (11, 1, 6, 3)


def tiny_vit() -> tuple[Model, LabelledImages]:
    rng = np.random.default_rng(3)
    pixels = torch.from_numpy(rng.integers(0, 256, (sum(SIZES), 3, 8, 8), dtype=np.uint8))
    labels = (rng.random((sum(SIZES), CLASSES)) < 0.3).astype(np.uint8)
    backbone = ViT(ViT.Config(width=8, depth=1, heads=2, patch=4), InputSpec(3, 8, 8))
    return Model(backbone, LinearHead(8, CLASSES)), LabelledImages(TensorImages(pixels), labels)


def pixels_model() -> tuple[Model, LabelledImages]:
    data = toy_data(sum(SIZES))
    return Model(Pixels(InputSpec(3, 4, 4)), LinearHead(8, CLASSES)), data


def scattered(model: Model, client: int) -> Tensors:
    """Parameters far from their initial zeros and ones, different for each client."""
    generator = torch.Generator().manual_seed(client)
    return {
        name: (t + 0.3 * torch.randn(t.shape, generator=generator)).double()
        for name, t in model.init(generator).items()
    }


def image_gradients(
    model: Model, params: Tensors, data: LabelledImages, index: Index, labels: Tensor | None = None
) -> list[Tensors]:
    """One image at a time: the gradient of its summed cross-entropy."""
    found = []
    for i, image in enumerate(index):
        leaves = {n: t.clone().requires_grad_() for n, t in params.items()}
        x = (data.images.gather(torch.tensor([image]), "cpu").float() - 127.5) / 127.5
        z = model.apply({n: t[None] for n, t in leaves.items()}, x[None].double())[0, 0]
        y = torch.from_numpy(data.labels[image]).double() if labels is None else labels[i]
        torch.autograd.backward(F.binary_cross_entropy_with_logits(z, y, reduction="sum"))
        found.append({n: leaf.grad for n, leaf in leaves.items() if leaf.grad is not None})
    return found


def mean_square(gradients: Sequence[Tensors]) -> Tensors:
    return {n: torch.stack([g[n] ** 2 for g in gradients]).mean(0) for n in gradients[0]}


@pytest.mark.parametrize("make", [tiny_vit, pixels_model])
def test_fisher_equals_a_loop_over_images(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every parameter, in float64, whatever the stack, the batch, and the room for gradients."""
    model, data = make()
    clients, params = split(SIZES), [scattered(model, k) for k in range(len(SIZES))]
    expected = [
        mean_square(image_gradients(model, p, data, own))
        for p, own in zip(params, clients.values(), strict=True)
    ]
    method = curv(replace(TASK, classes=CLASSES))
    room = 8 * model.num_parameters * 3 * 2  # two clients at a time with batches of three
    for stack, sweep_batch, bytes in ((8, 4, 1 << 28), (1, 32, 1 << 28), (8, 3, room), (8, 1, 0)):
        monkeypatch.setitem(engine.GRADIENT_BYTES, "cpu", bytes)
        found = swept(method, model, data, params, clients, stack, sweep_batch)
        for report, own, fisher in zip(found, params, expected, strict=True):
            close(part(report, "u"), fisher, 1e-11)
            close(part(report, "v"), {n: t * own[n] for n, t in fisher.items()}, 1e-11)
            assert all((t > 0).any() or n.endswith("qkv.bias") for n, t in fisher.items())


def test_squared_batch_means_are_smaller_by_the_batch_size() -> None:
    """Labels drawn from the model: gradients have mean zero, so a mean of 8 has 1/8 the square."""
    data, batch = toy_data(400), 8
    model = pixels_model()[0]
    params = scattered(model, 0)
    x = (data.images.gather(torch.arange(400), "cpu").float() - 127.5) / 127.5
    with torch.no_grad():
        p = model.apply({n: t[None] for n, t in params.items()}, x[None].double())[0].sigmoid()
    labels = torch.bernoulli(p, generator=torch.Generator().manual_seed(0))
    gradients = image_gradients(model, params, data, np.arange(400), labels)
    batches = [
        {n: torch.stack([g[n] for g in gradients[i : i + batch]]).mean(0) for n in params}
        for i in range(0, 400, batch)
    ]
    drawn = LabelledImages(data.images, labels.to(torch.uint8).numpy())
    method = curv(replace(TASK, classes=CLASSES), fisher_samples=400)
    found = part(swept(method, model, drawn, [params], sweep_batch=batch)[0], "u")
    close(found, mean_square(gradients), 1e-11)
    squares = mean_square(batches)
    ratio = sum(float(t.sum()) for t in found.values()) / sum(
        float(t.sum()) for t in squares.values()
    )
    assert ratio == pytest.approx(batch, rel=0.15)


# -- which labels, which images -------------------------------------------------------------------


def test_sampled_labels_by_hand() -> None:
    """With p = 3/4 the bias has (p − y)² = 1/16 with chance 3/4 and 9/16 with chance 1/4.

    Mean (3 + 9)/64 = 3/16 = p(1 − p), standard deviation 1/2 · √(3/16) = 0.217; over 4,000 images
    0.0034. At the true labels, all positive here, it would be 1/16.
    """
    data, params = values([1] * 4000, [[1]] * 4000), logistic([0.0], [LN3])
    settings: Any = {"fisher_labels": "sampled", "fisher_samples": 4000}
    found = logistic_fisher(data, params, **settings)
    assert float(found["u.head.bias"]) == pytest.approx(3 / 16, abs=4 * 0.0034)
    again = logistic_fisher(data, params, **settings)
    assert same(found, again)
    for other in ({"seed": 1}, {"round": 1}):
        assert not same(found, logistic_fisher(data, params, **settings, **other))
    true = logistic_fisher(data, params, fisher_samples=4000)
    assert float(true["u.head.bias"]) == pytest.approx(1 / 16)


def test_sampled_labels_do_not_depend_on_the_stack() -> None:
    model, data = pixels_model()
    clients, params = split(SIZES), [scattered(model, k) for k in range(len(SIZES))]
    method = curv(replace(TASK, classes=CLASSES), fisher_labels="sampled")
    runs = [
        swept(method, model, data, params, clients, stack, sweep_batch)
        for stack, sweep_batch in ((8, 4), (1, 32), (2, 1))
    ]
    for first, *others in zip(*runs, strict=True):
        for other in others:
            close(other, first, 1e-12)
    true = swept(curv(replace(TASK, classes=CLASSES)), model, data, params, clients)
    assert not any(same(a, b) for a, b in zip(true, runs[0], strict=True))


def test_no_more_images_than_fisher_samples() -> None:
    """Of 6 images 3 are looked at: one of the 20 choices, another one in later rounds."""
    model, data = pixels_model()
    params, data = scattered(model, 0), data.subset(np.arange(6))
    squares = [mean_square([g]) for g in image_gradients(model, params, data, np.arange(6))]

    def mean(some: Sequence[int]) -> Tensors:
        return {n: torch.stack([squares[i][n] for i in some]).mean(0) for n in params}

    def choices(report: Mapping[str, Tensor]) -> list[tuple[int, ...]]:
        u = part(report, "u")
        return [
            some
            for some in itertools.combinations(range(6), 3)
            if all(torch.allclose(u[n], mean(some)[n]) for n in u)
        ]

    method = curv(replace(TASK, classes=CLASSES), fisher_samples=3)
    chosen = [choices(swept(method, model, data, [params], round=t)[0]) for t in range(6)]
    assert all(len(found) == 1 for found in chosen)
    assert len({found[0] for found in chosen}) > 1
    for limit in (6, 7):
        method = curv(replace(TASK, classes=CLASSES), fisher_samples=limit)
        close(part(swept(method, model, data, [params])[0], "u"), mean(range(6)), 1e-11)


# -- the cut --------------------------------------------------------------------------------------


def finished(method: FedCurv, fisher: Mapping[str, Tensor], images: int = 1) -> Tensors:
    """The report of a client with these squares summed over its images, at θ = 2."""
    sweep = method.sweep()
    assert sweep is not None
    params = {n: torch.full_like(t, 2.0) for n, t in fisher.items()}
    return sweep.finish({"": torch.tensor(float(images)), **fisher}, params)


def test_cut_by_hand() -> None:
    """Ten entries 1, …, 10 in two tensors: at least 75 % of them do not exceed 8; 9, 10 become 8.

    They are means over two images: the sums are twice as large. v follows u.
    """
    fisher = {"a": torch.tensor([20.0, 2, 14, 8]), "b": torch.tensor([[4.0, 18, 6], [10, 12, 16]])}
    found = finished(curv(clip_quantile=0.75), fisher, images=2)
    assert found["u.a"].tolist() == [8, 1, 7, 4]
    assert found["u.b"].tolist() == [[2, 8, 3], [5, 6, 8]]
    assert found["v.b"].tolist() == [[4, 16, 6], [10, 12, 16]]
    whole = finished(curv(clip_quantile=1.0), fisher, images=2)
    assert whole["u.a"].tolist() == [10, 1, 7, 4]


@pytest.mark.parametrize("share", [0.001, 0.3, 0.5, 0.9, 0.999, 0.9999])
@pytest.mark.parametrize("entries", [1, 2, 999, 1000, 1001, 5000])
def test_the_cut_is_a_quantile(share: float, entries: int) -> None:
    """NumPy's "inverted_cdf": the smallest entry that a share of all does not exceed."""
    rng = np.random.default_rng(entries)
    fisher = torch.from_numpy(rng.exponential(size=entries) ** 3)
    found = finished(curv(clip_quantile=share), {"w": fisher})["u.w"]
    limit = np.quantile(fisher.numpy(), share, method="inverted_cdf")
    assert torch.equal(found, fisher.clamp(max=float(limit)))


def test_each_client_has_its_own_cut() -> None:
    """Mapped over clients, as the engine does it: 1 … 4 and 10 … 40 are cut at 3 and at 30."""
    sweep = curv(clip_quantile=0.75).sweep()
    assert sweep is not None
    fisher = torch.tensor([[1.0, 2, 3, 4], [10, 40, 20, 30]])
    carry = {"": torch.ones(2), "w": fisher}
    found = torch.vmap(sweep.finish)(carry, {"w": torch.ones(2, 4)})
    assert found["u.w"].tolist() == [[1, 2, 3, 3], [10, 30, 20, 30]]


def test_an_infinite_square_does_not_cost_the_client() -> None:
    fisher = torch.ones(2000)
    fisher[7] = math.inf
    found = finished(curv(clip_quantile=0.999), {"w": fisher})
    assert found["u.w"].max() == 1
    assert found["v.w"].isfinite().all()


def test_the_cut_of_a_large_model() -> None:
    """More entries than torch.quantile takes (2²⁴).

    Of n = 16,778,216 entries ⌈0.99999 n⌉ = 16,778,049 do not exceed the cut, 167 may. The largest
    are 200, 199, …, so the cut is at 200 − 167 = 33.
    """
    fisher = torch.zeros(2**24 + 1000)
    fisher[5::5000][:200] = torch.arange(1.0, 201.0)
    found = finished(curv(clip_quantile=0.99999), {"w": fisher})["u.w"]
    assert float(found.max()) == 33


# -- the pull -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Report:
    """What a client of the toy problems below reported: θ̂ and I of two tensors."""

    theta: Tensors
    fisher: Tensors

    @staticmethod
    def of(client: int) -> Report:
        generator = torch.Generator().manual_seed(client)

        def draw(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        return Report(
            {"a": draw(2, 3), "b": draw(4)}, {"a": draw(2, 3) ** 2, "b": draw(4) ** 2 * 10}
        )

    def reply(self, method: FedCurv, client: int, examples: int = 1) -> Reply:
        sweep = method.sweep()
        assert sweep is not None
        sent = sweep.finish({"": torch.tensor(1.0), **self.fisher}, self.theta)
        return Reply(client, examples, Record({PARAMS: self.theta, BUFFERS: {}, FISHER: sent}))


def after(method: FedCurv, rounds: Sequence[Mapping[int, Report]]) -> Record:
    """The server's state after rounds with these reports."""
    state = method.init_state({n: torch.zeros_like(t) for n, t in Report.of(0).theta.items()}, {})
    for t, reports in enumerate(rounds):
        sent = method.broadcast(state, t, list(reports))
        replies = (report.reply(method, k) for k, report in reports.items())
        state = method.aggregate(state, t, sent, replies).state
    return state


def carried(
    method: FedCurv, state: Record, client: int, kept: tuple[int, Report] | None
) -> Tensors:
    """What a client carries that remembers a report of a round."""
    memory: Tensors = {}
    if kept is not None:
        memory = method.remember(kept[0], kept[1].reply(method, client).record)
    view = ClientView(1, torch.zeros(1), memory)
    return method.carry(view, method.broadcast(state, 9, [client])[client])


def penalty(weight: float, theta: Tensors, others: Sequence[Report]) -> Tensor:
    """λ Σ_j Σ_d I_jd (θ_d − θ̂_jd)², as it stands in the paper."""
    total = torch.zeros((), dtype=torch.float64)
    for other in others:
        for name in theta:
            total = total + (other.fisher[name] * (theta[name] - other.theta[name]) ** 2).sum()
    return weight * total


def test_pull_is_the_slope_of_the_double_sum() -> None:
    """Central differences, exact for a quadratic, of λ Σ_{j≠k} Σ_d I_jd (θ_d − θ̂_jd)²; k = 1."""
    method, reports = curv(weight=0.3), {k: Report.of(k) for k in range(4)}
    carry = carried(method, after(method, [reports]), 1, (0, reports[1]))
    theta = Report.of(77).theta
    pull = method.pull(theta, {}, {}, carry)
    assert pull.keys() == theta.keys()
    others = [reports[j] for j in (0, 2, 3)]
    for name, tensor in theta.items():
        for place in np.ndindex(*tensor.shape):
            sides = []
            for step in (0.5, -0.5):
                moved = {n: t.clone() for n, t in theta.items()}
                moved[name][place] += step
                sides.append(penalty(0.3, moved, others))
            slope = float(sides[0] - sides[1])
            assert float(pull[name][place]) == pytest.approx(slope, abs=1e-10)


def test_pull_by_hand() -> None:
    """λ = 1/2; the others: I = 2 at θ̂ = 1, and I = 4 at θ̂ = −1. So U = 6, V = 2 − 4 = −2.

    At θ = 3 the slope of ½ (2 (θ − 1)² + 4 (θ + 1)²) is ½ (4 · 2 + 8 · 4) = 20 = 2 · ½ (6 · 3 + 2).
    Own share (I = 1 at θ̂ = 5) in the sums U = 7, V = 3 does not count.
    """

    def report(fisher: float, theta: float) -> Report:
        return Report({"w": torch.tensor([theta])}, {"w": torch.tensor([fisher])})

    method = curv(weight=0.5)
    reports = {0: report(2, 1), 1: report(4, -1), 2: report(1, 5)}
    state = method.init_state({"w": torch.zeros(1)}, {})
    sent = method.broadcast(state, 0, [0, 1, 2])
    replies = [r.reply(method, k, examples=10**k) for k, r in reports.items()]
    outcome = method.aggregate(state, 0, sent, iter(replies))
    state = outcome.state
    assert state.get(SUM_U)["w"].item() == 7  # unweighted, whatever the sizes are
    assert state.get(SUM_V)["w"].item() == 3
    assert outcome.log["pull_strength"] == 0.5 * 7
    assert outcome.weights == {0: 1 / 111, 1: 10 / 111, 2: 100 / 111}
    carry = carried(method, state, 2, (0, reports[2]))
    assert {n: t.item() for n, t in carry.items()} == {"u.w": 6, "v.w": -2}
    pull = method.pull({"w": torch.tensor([3.0])}, {}, {}, carry)
    assert pull["w"].item() == 20


def sums(method: FedCurv, reports: Sequence[Report]) -> Tensors:
    """U and V of these reports as one client would carry them."""
    return {
        f"{kind}.{n}": torch.stack(
            [r.fisher[n] * (1 if kind == "u" else r.theta[n]) for r in reports]
        ).sum(0)
        for kind in "uv"
        for n in reports[0].theta
    }


def test_leave_one_out() -> None:
    """A member subtracts its share; who was not in the cohort subtracts nothing."""
    method, reports = curv(), {k: Report.of(k) for k in range(3)}
    state = after(method, [reports])
    close(carried(method, state, 1, (0, reports[1])), sums(method, [reports[0], reports[2]]), 1e-12)
    close(carried(method, state, 8, None), sums(method, list(reports.values())), 1e-12)


def test_a_refused_reply_is_not_subtracted() -> None:
    """Rounds 0 and 1; the client remembers its reply of round 1, which the server did not take.

    Nothing of the client is in the sums, and it subtracts nothing.
    """
    reports = {k: Report.of(k) for k in range(3)}
    later = {0: Report.of(10), 2: Report.of(12)}
    method = curv()
    state = after(method, [reports, later])
    close(carried(method, state, 1, (1, Report.of(11))), sums(method, [*later.values()]), 1e-12)


def test_an_old_share_is_not_subtracted_from_the_last_cohort() -> None:
    """Client 1 took part in round 0, not in round 1: its memory is not in U any more."""
    method = curv()
    state = after(method, [{0: Report.of(0), 1: Report.of(1)}, {0: Report.of(10)}])
    close(carried(method, state, 1, (0, Report.of(1))), sums(method, [Report.of(10)]), 1e-12)


def test_the_sums_are_of_the_last_cohort() -> None:
    """Cohorts {0, 1}, then {1, 2}: nothing of client 0 is left."""
    rounds = [{0: Report.of(0), 1: Report.of(1)}, {1: Report.of(11), 2: Report.of(12)}]
    method = curv()
    state = after(method, rounds)
    table = state.get(MEMBERS)
    listed = zip(table["client"].tolist(), table["round"].tolist(), strict=True)
    assert dict(listed) == {1: 1, 2: 1}
    close(carried(method, state, 9, None), sums(method, [*rounds[1].values()]), 1e-12)


def test_nobody_reported() -> None:
    method = curv()
    state = after(method, [{0: Report.of(0)}])
    outcome = method.aggregate(state, 1, {}, iter(()))
    assert outcome.state is state
    assert outcome.log == {}


def test_dead_coordinates_are_not_pulled() -> None:
    """I = 0 for everybody, or for everybody else: no pull, in float32 and to the bit."""
    reports = {k: Report.of(k) for k in range(3)}
    for k, report in reports.items():
        report.fisher["b"][0] = 0.0
        report.fisher["b"][1] = 1 / 3 if k == 1 else 0.0
    method = curv(weight=1e6)
    single = {
        k: Report(*({n: t.float() for n, t in x.items()} for x in (r.theta, r.fisher)))
        for k, r in reports.items()
    }
    state = after(method, [single])
    carry = carried(method, state, 1, (0, single[1]))
    pull = method.pull({n: t.float() for n, t in Report.of(9).theta.items()}, {}, {}, carry)
    assert pull["b"][:2].tolist() == [0.0, 0.0]
    assert (pull["b"][2:] != 0).all()


# -- whole rounds ---------------------------------------------------------------------------------


def states(toy: Toy) -> list[Record]:
    seen: list[Record] = []
    toy.loop().run(toy.initial(), 0, lambda e: None, lambda t, s: seen.append(s))
    return seen


def model_of(state: Record) -> Record:
    return Record({PARAMS: state.get(PARAMS)})


def test_weight_zero_is_fedavg() -> None:
    """The same state to the bit after every round, the same bytes, the same log."""
    runs: list[tuple[list[Record], list[Event]]] = []
    for name, config in (("fedavg", {}), ("fedcurv", {"weight": 0.0})):
        toy = Toy(name, config, rounds=4, cohort=3)
        runs.append((states(toy), toy.run()[1]))
    plain, zero = runs
    assert all(same_bits(a, b) for a, b in zip(plain[0], zero[0], strict=True))
    for mine, other in zip(zero[1], plain[1], strict=True):
        assert all(mine[x] == other[x] for x in ("bytes_up", "bytes_down", "log", "train_loss"))


def test_the_first_round_is_fedavg_and_the_second_is_not() -> None:
    """Nobody's Fisher information is known in round 0."""
    plain, curved = (states(Toy(name, rounds=2)) for name in ("fedavg", "fedcurv"))
    assert same_bits(model_of(plain[0]), model_of(curved[0]))
    assert not same_bits(model_of(plain[1]), model_of(curved[1]))


def test_a_single_client_is_never_pulled() -> None:
    """With m = 1, U − u and V − v are exactly zero: every round equals FedAvg's to the bit."""
    plain = states(Toy("fedavg", sizes=(9,)))
    curved = states(Toy("fedcurv", {"weight": 1e3}, sizes=(9,)))
    for a, b in zip(plain, curved, strict=True):
        assert same_bits(model_of(a), model_of(b))
    assert curved[0].get(SUM_U)["head.bias"].max() > 0


def plainly(toy: Toy, weight: float, refused: set[tuple[int, int]]) -> list[Record]:
    """FedCurv again, one client after another, with the penalty as the paper writes it.

    What the server took of the last cohort is in ``table``; it is never turned into sums.
    """
    assert toy.data is not None
    theta, clients = dict(toy.initial().get(PARAMS)), split(toy.sizes)
    table: dict[int, tuple[int, Report]] = {}
    last_trained: dict[int, int] = {}
    result = []
    for t, cohort in enumerate(toy.loop().schedule):
        models, reports = {}, {}
        for k in cohort:
            mine = k in table and table[k][0] == last_trained.get(k)
            others = [report for j, (_, report) in table.items() if j != k or not mine]
            leaves = {n: p.clone().requires_grad_() for n, p in theta.items()}
            optimiser = torch.optim.Adam(list(leaves.values()), lr=toy.lr)
            rng = numpy_rng(toy.seed, "order", t, k)
            for _ in range(toy.epochs):
                order = rng.permutation(clients[k])
                for first in range(0, len(order), toy.batch_size):
                    index = order[first : first + toy.batch_size]
                    pixels = toy.data.images.gather(torch.from_numpy(index), "cpu").float()
                    x = (pixels - 127.5) / 127.5
                    hidden = x.double().flatten(1) @ leaves["hidden.weight"].T
                    hidden = torch.tanh(hidden + leaves["hidden.bias"])
                    z = hidden @ leaves["head.weight"].T + leaves["head.bias"]
                    y = torch.from_numpy(toy.data.labels[index]).double()
                    loss = F.binary_cross_entropy_with_logits(z, y)
                    optimiser.zero_grad()
                    torch.autograd.backward(loss + penalty(weight, leaves, others))
                    optimiser.step()
            last_trained[k] = t
            if (t, k) not in refused:
                models[k] = {n: p.detach() for n, p in leaves.items()}
                gradients = image_gradients(toy.model, models[k], toy.data, clients[k])
                reports[k] = (t, Report(models[k], mean_square(gradients)))
        total = sum(toy.sizes[k] for k in models)
        theta = {
            n: sum((toy.sizes[k] / total) * m[n] for k, m in models.items())  # type: ignore[misc]
            for n in theta
        }
        table = reports
        sums_now = sums(curv(), [report for _, report in table.values()])
        result.append(
            Record({PARAMS: theta, SUM_U: part(sums_now, "u"), SUM_V: part(sums_now, "v")})
        )
    return result


@dataclass
class Refusing:
    """A transport that spoils some replies on their way to the server."""

    inner: Any
    refused: set[tuple[int, int]]

    @property
    def sizes(self) -> Any:
        return self.inner.sizes

    def exchange(
        self, stage: Stage, round: int, messages: Mapping[int, Record]
    ) -> Iterator[Reply | Failure]:
        for answer in self.inner.exchange(stage, round, messages):
            if (round, answer.client) in self.refused:
                answer = replace(answer, record=Record())
            yield answer


def test_rounds_equal_a_plain_reimplementation() -> None:
    """Six rounds, cohorts of 3 out of 5, two replies refused; models, U and V in float64."""
    toy = Toy(
        "fedcurv",
        TEMPERATE,
        rounds=6,
        cohort=3,
        dtype=torch.float64,
        epochs=1,
        federation=FederationSettings(max_failures=0.5),
    )
    schedule = toy.loop().schedule
    # One in its first round; one that was heard before and is asked again in the next round.
    early = (0, schedule[0][0])
    again = next(
        (t, k)
        for t in range(1, 5)
        for k in schedule[t]
        if k in schedule[t + 1] and any(k in schedule[s] and (s, k) != early for s in range(t))
    )
    refused = {early, again}
    toy.transport = Refusing(toy.transport, refused)
    expected = plainly(toy, TEMPERATE["weight"], refused)
    for found, wanted in zip(states(toy), expected, strict=True):
        for group in wanted.groups:
            close(found.get(group), wanted.get(group), 1e-8)
    weaker = Toy(**{**vars_of(toy), "config": {**TEMPERATE, "weight": 0.0}})
    weaker.transport = Refusing(weaker.transport, refused)
    gap = states(weaker)[-1].get(PARAMS)["head.weight"] - expected[-1].get(PARAMS)["head.weight"]
    assert gap.abs().max() > 1e-3  # the pull matters here


def vars_of(toy: Toy) -> dict[str, Any]:
    names = ("name", "sizes", "rounds", "cohort", "dtype", "epochs", "federation")
    return {name: getattr(toy, name) for name in names}


def test_pull_strength_is_logged() -> None:
    """λ times the mean of U over all coordinates."""
    toy = Toy("fedcurv", {"weight": 0.25}, rounds=2)
    state, events = toy.run()
    U = torch.cat([t.flatten().double() for t in state.get(SUM_U).values()])
    assert events[-1]["log"]["pull_strength"] == pytest.approx(0.25 * float(U.mean()), rel=1e-6)


# -- what travels ---------------------------------------------------------------------------------


def test_payload_is_counted() -> None:
    """P numbers, m = 5 clients.

    Up: θ, u, v are 12 P bytes. Down: 4 P in round 0, then 12 P and 8 bytes that tell the round of
    the client's share.
    """
    P, m = 48 * 8 + 8 + 8 * CLASSES + CLASSES, 5
    _, events = Toy("fedcurv", rounds=2).run()
    assert [e["bytes_up"] for e in events] == [m * 12 * P] * 2
    assert [e["bytes_down"] for e in events] == [m * 4 * P, m * (12 * P + 8)]


def test_u_and_v_are_sent_by_reference() -> None:
    """One copy of the sums for the whole cohort."""
    method = curv()
    state = after(method, [{k: Report.of(k) for k in range(3)}])
    messages = method.broadcast(state, 1, [0, 1, 2])
    for group in (PARAMS, SUM_U, SUM_V):
        assert all(m.get(group)["a"] is state.get(group)["a"] for m in messages.values())


def test_a_reply_must_have_its_form() -> None:
    params, sweep = {"w": torch.zeros(2, 3)}, curv().sweep()
    assert sweep is not None
    sent = sweep.finish({"": torch.tensor(1.0), **params}, params)
    expected = {n: form[:2] for n, form in sweep.forms(params).items()}
    assert expected == {n: (tuple(t.shape), t.dtype) for n, t in sent.items()}


def test_one_kind_of_labels_draws_nothing() -> None:
    sweeps = [curv(fisher_labels=labels).sweep() for labels in ("true", "sampled")]
    assert [sweep is not None and sweep.draw is None for sweep in sweeps] == [True, False]
    batch = Batch(torch.ones(2, 1), torch.ones(2), torch.tensor([[1.0], [0.0]]))
    assert sweeps[0] is not None
    assert sweeps[0].objective is not None
    found = sweeps[0].objective(torch.zeros(2, 1), batch)
    torch.testing.assert_close(found, torch.tensor([math.log(2), 0.0]))


# -- a run that is killed -------------------------------------------------------------------------

SMALL = [
    *("run.method=fedcurv", "run.rounds=4", "methods.fedcurv.weight=1.0", "data.train=60"),
    *("data.test=20", "split.clients=4", "split.name=iid", "split.gamma=", "train.epochs=1"),
    *("model.width=8", "model.depth=1", "model.heads=2", "model.patch=16"),
    *("engine.threads=1", "engine.stack=1", "engine.device=cpu", "engine.memory_mb=0"),
]


class Killed(BaseException):
    """Ends a run as a kill does: no handler of the run sees it."""


def kill_in(round: int, percent: int) -> Any:
    def observe(event: Mapping[str, Any]) -> None:
        if event["event"] == "progress" and event["round"] == round and event["done"] >= percent:
            raise Killed

    return observe


def test_a_killed_run_resumes_to_the_bit(tmp_path: Path) -> None:
    """Killed in round 2 when two of three clients have remembered what they sent.

    The memory matters: without it the rest would be another run, and is refused.
    """
    settings = load_settings("demo", SMALL)
    whole = run.start(settings, RunFolder(tmp_path / "whole"), lambda e: None)
    with pytest.raises(Killed):
        run.start(settings, RunFolder(tmp_path / "cut"), kill_in(2, 67))
    versions = sorted(p.stem for p in (tmp_path / "cut" / "memory").glob("*/*.safetensors"))
    assert versions.count("2") == 2  # of the round that was cut short
    shutil.copytree(tmp_path / "cut", tmp_path / "forgetful")
    resumed = run.resume(RunFolder(tmp_path / "cut"), lambda e: None)
    assert resumed["state_sha256"] == whole["state_sha256"]
    shutil.rmtree(tmp_path / "forgetful" / "memory")
    with pytest.raises(CheckpointError, match="What clients kept"):
        run.resume(RunFolder(tmp_path / "forgetful"), lambda e: None)


# -- settings -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("weight", -0.1),
        ("weight", math.nan),
        ("fisher_labels", "soft"),
        ("fisher_samples", 0),
        ("clip_quantile", 0.0),
        ("clip_quantile", 1.01),
        ("policy", "memory"),
        ("payload", "float16"),
        ("lambda", 1.0),
    ],
)
def test_settings_out_of_range_are_refused(setting: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"methods\.fedcurv\.{setting}"):
        build(FedCurv.Config, {setting: value}, "methods.fedcurv")


# -- in the engine --------------------------------------------------------------------------------


@pytest.mark.parametrize("share", [1.0, 0.25])
def test_gradients_stay_within_their_room(monkeypatch: pytest.MonkeyPatch, share: float) -> None:
    """Room for three images' gradients: steps of at most three, whatever the sweep's batch.

    A run that may take a quarter of the memory has a quarter of the room.
    """
    toy = Toy("fedcurv", rounds=1, mode=ComputeMode(share=share))
    room = 3 * 4 * toy.model.num_parameters
    monkeypatch.setitem(engine.GRADIENT_BYTES, "cpu", int(room / share))
    seen: list[int] = []
    compute = toy.trainer.sweeper._gradients

    def watched(*args: Any) -> dict[str, Tensor]:
        found = compute(*args)
        seen.append(sum(t.nbytes for t in found.values()))
        return found

    monkeypatch.setattr(toy.trainer.sweeper, "_gradients", watched)
    tight, _ = toy.run()
    assert max(seen) <= room
    monkeypatch.undo()
    wide, _ = Toy("fedcurv", rounds=1).run()
    assert largest_difference(tight, wide) < 1e-6


def test_a_damaged_memory_stops_the_run_instead_of_costing_a_client(tmp_path: Path) -> None:
    state, _ = Toy("fedcurv", rounds=1, memory=tmp_path).run()
    (tmp_path / "1" / "0.safetensors").write_bytes(b"")
    fresh = Toy("fedcurv", rounds=2, memory=tmp_path)
    with pytest.raises(CheckpointError, match="damaged"):
        fresh.loop().run(state, 1, lambda event: None, lambda round, state: None)
