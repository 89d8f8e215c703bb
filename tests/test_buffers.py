"""Running statistics: they travel with the model, are averaged, and serve evaluation."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torch.nn.functional as F
from torch import Tensor

from fedharmony.data.base import LabelledImages, TensorImages
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.memory import ClientMemory
from fedharmony.experiments.build import assemble
from fedharmony.experiments.evaluate import evaluate
from fedharmony.experiments.settings import load_settings
from fedharmony.methods.base import Stage, Sweep, methods
from fedharmony.models.base import Backbone, InputSpec, Shapes
from fedharmony.models.timm_backbone import PREFIX, TimmBackbone
from fedharmony.rng import numpy_rng
from fedharmony.transport.replies import problem
from fedharmony.types import BUFFERS, FROZEN, PARAMS, Form, Record, Tensors
from toy import Toy, same_bits, split


class Brightness(Backbone):
    """The mean of each channel, batch-normalised with momentum 1/2; it has no parameters."""

    stackable = False
    mixes_images = True
    class_tokens = 0
    width = 3
    mean, std = (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)  # pixels as they are

    def __init__(self) -> None:
        self.trains = False

    def shapes(self) -> Shapes:
        return {}

    def init(self, generator: torch.Generator) -> Tensors:
        return {}

    def init_buffers(self) -> Tensors:
        return {"norm.mean": torch.zeros(3), "norm.var": torch.ones(3)}

    def training(self) -> Brightness:
        twin = copy(self)
        twin.trains = True
        return twin

    def tokens(self, params: Mapping[str, Tensor], images: Tensor) -> Tensor:
        mean, var = params["norm.mean"], params["norm.var"]
        normed = [
            F.batch_norm(x.mean((2, 3)), m, v, training=self.trains, momentum=0.5)
            for x, m, v in zip(images, mean, var, strict=True)
        ]
        return torch.stack(normed).unsqueeze(2)


def grey(values: list[int]) -> LabelledImages:
    """Images of one grey each, and the labels dark and bright."""
    shades = torch.tensor(values, dtype=torch.uint8).view(-1, 1, 1, 1)
    labels = np.array([[v < 100, v >= 100] for v in values], dtype=np.uint8)
    return LabelledImages(TensorImages(shades.expand(-1, 3, 4, 4).contiguous()), labels)


def brightness(name: str = "fedavg", **options: Any) -> Toy:
    """Client 0 has 5 images of grey 80, client 1 has 2 of grey 200; batches of 3."""
    toy_task = {"sizes": (5, 2), "batch_size": 3, "epochs": 1, "rounds": 1, "stack": 1} | options
    toy = Toy(name, data=grey([80] * 5 + [200] * 2), backbone=Brightness(), **toy_task)
    task = replace(toy.task, mean=Brightness.mean, std=Brightness.std)
    toy.method.task = task
    return toy


def test_running_statistics_are_averaged_by_size() -> None:
    """By hand, with momentum 1/2 from mean 0 and variance 1; within a client images are equal.

    Client 0 sees batches of 3 and of 2 images: mean 0 → 40 → 60, variance 1 → 1/2 → 1/4. (With a
    row of padding in its second batch it would see another mean.) Client 1 sees one batch: mean
    100, variance 1/2. The server: (5 · 60 + 2 · 100) / 7 = 500/7, (5/4 + 2/2) / 7 = 2.25/7.
    """
    toy = brightness()
    state, events = toy.run()
    assert not events[0]["left_out"]
    found = state.get(BUFFERS)
    torch.testing.assert_close(found["norm.mean"], torch.full((3,), 500 / 7))
    torch.testing.assert_close(found["norm.var"], torch.full((3,), 2.25 / 7))
    assert events[0]["padding"] == 0.0


def test_averaging_equally_takes_running_statistics_along() -> None:
    """(60 + 100) / 2 = 80."""
    toy = brightness(federation=replace(Toy().federation, average="uniform"))
    torch.testing.assert_close(toy.run()[0].get(BUFFERS)["norm.mean"], torch.full((3,), 80.0))


def test_the_next_round_starts_from_the_mean() -> None:
    """Client 1 alone, two rounds of one batch: 0 → 100 → 150."""
    toy = brightness(rounds=2)
    loop = replace(toy.loop(), schedule=[[1], [1]])
    state = loop.run(toy.initial(), 0, lambda e: None, lambda t, s: None)
    torch.testing.assert_close(state.get(BUFFERS)["norm.mean"], torch.full((3,), 150.0))


@pytest.mark.parametrize("train", [False, True])
def test_passes_without_training_read_running_statistics_and_leave_them(train: bool) -> None:
    """Features of grey 200: from mean 0 and variance 1 they are 200 / √(1 + 1e-5).

    After training on one batch, mean 100 and variance 1/2: 100 / √(0.5 + 1e-5).
    """
    toy = brightness()

    def fold(carry: Tensors, features: Tensor, batch: Any) -> Tensors:
        return {"sum": carry["sum"] + (features * batch.rows.unsqueeze(-1)).sum(-2)}

    forms = {"sum": Form((3,))}
    sweep = Sweep(
        "sums",
        "features",
        lambda params: {"sum": torch.zeros(3)},
        fold,
        lambda carry, params: carry,
        lambda params: forms,
    )
    stage = Stage("look", toy.method.broadcast, toy.method.aggregate, train=train, sweep=sweep)
    sent = stage.broadcast(toy.initial(), 0, [1])
    (reply,) = toy.transport.exchange(stage, 0, sent)
    expected = 100 / (0.5 + 1e-5) ** 0.5 if train else 200 / (1 + 1e-5) ** 0.5
    found = reply.record.get("sums")["sum"] / 2
    torch.testing.assert_close(found, torch.full((3,), expected), rtol=1e-5, atol=0)
    assert sent[1].get(BUFFERS)["norm.mean"].tolist() == [0, 0, 0]


def test_gradients_per_image_are_taken_with_running_statistics() -> None:
    """FedCurv's Fisher information after one batch of greys 200, mean 100 and variance 1/2.

    Features are 100 / √(0.5 + 1e-5) = x for each channel; the gradient of the weight that reads
    one is x times that of the bias, and Fisher information x² times.
    """
    toy = brightness("fedcurv", config={"clip_quantile": 1.0}, epochs=1)
    stage = toy.method.stages(0)[0]
    (reply,) = toy.transport.exchange(stage, 0, stage.broadcast(toy.initial(), 0, [1]))
    (group,) = [g for g in reply.record.groups if g not in (PARAMS, BUFFERS)]
    fisher = {n: t for n, t in reply.record.get(group).items() if "head" in n}
    weight = next(t for n, t in fisher.items() if n.endswith("head.weight"))
    bias = next(t for n, t in fisher.items() if n.endswith("head.bias"))
    squared = 100**2 / (0.5 + 1e-5)
    torch.testing.assert_close(weight, squared * bias.unsqueeze(-1).expand(2, 3), rtol=1e-3, atol=0)


def test_a_reply_without_its_running_statistics_is_refused() -> None:
    forms = {PARAMS: {}, BUFFERS: {"mean": Form((1,))}}
    assert problem(Record({BUFFERS: {"mean": torch.ones(1)}}), forms) is None
    assert "missing" in str(problem(Record({PARAMS: {}}), forms))


def test_running_statistics_that_are_not_finite_are_noticed() -> None:
    toy = brightness()
    state = toy.initial()
    wild = {**state.get(BUFFERS), "norm.mean": torch.full((3,), torch.nan)}
    stage = toy.method.stages(0)[0]
    sent = stage.broadcast(state.replace({BUFFERS: wild}), 0, [0])
    (reply,) = toy.trainer.run(stage, 0, sent)
    assert not reply.finite


def test_steps_of_any_size_are_neither_compiled_nor_recorded() -> None:
    fast = ComputeMode(half=True, graphs=True, compile=True, fixed=True)
    assert fast.exact() == ComputeMode(half=True)


# -- timm -----------------------------------------------------------------------------------------


def resnet(**options: Any) -> Toy:
    rng = np.random.default_rng(0)
    pixels = torch.from_numpy(rng.integers(0, 255, (11, 3, 32, 32), dtype=np.uint8))
    data = LabelledImages(TensorImages(pixels), rng.integers(0, 2, (11, 6), dtype=np.uint8))
    backbone = TimmBackbone(TimmBackbone.Config("resnet10t"), InputSpec(3, 32, 32))
    given = {"sizes": (7, 4), "batch_size": 3, "optimiser": "sgd", "stack": 1} | options
    return Toy(data=data, backbone=backbone, **given)


def trained_by_torch(toy: Toy, client: int, state: Record) -> dict[str, Tensor]:
    """One client, by timm's own module in training mode; of one image, in evaluation mode."""
    module = timm.create_model("resnet10t", num_classes=0)
    own = {n.removeprefix(PREFIX): t for n, t in state.get(PARAMS).items() if n.startswith(PREFIX)}
    buffers = {n.removeprefix(PREFIX): t for n, t in state.get(BUFFERS).items()}
    module.load_state_dict({**own, **buffers}, strict=False)
    head = torch.nn.Linear(module.num_features, 6)
    names = ("weight", "bias")
    head.load_state_dict({n: state.get(PARAMS)[f"head.{n}"] for n in names})
    optimiser = torch.optim.SGD([*module.parameters(), *head.parameters()], lr=toy.lr)
    rng = numpy_rng(toy.seed, "order", 0, client)
    orders = [rng.permutation(split(toy.sizes)[client]) for _ in range(toy.epochs)]
    assert toy.data is not None
    for order in orders:
        for first in range(0, len(order), toy.batch_size):
            index = order[first : first + toy.batch_size]
            pixels = toy.data.images.gather(torch.from_numpy(index), "cpu")
            module.train(len(index) > 1)
            outputs = head(module((pixels.float() - 127.5) / 127.5))
            labels = torch.from_numpy(toy.data.labels[index]).float()
            optimiser.zero_grad()
            F.binary_cross_entropy_with_logits(outputs, labels).backward()
            optimiser.step()
    found = {PREFIX + n: t.detach() for n, t in module.state_dict().items()}
    return found | {f"head.{n}": t.detach() for n, t in head.state_dict().items()}


@pytest.mark.parametrize("client", [0, 1])
def test_a_client_trains_as_torch_trains_a_module(client: int) -> None:
    """Batches of 3, 3 and 1 images, and of 3 and 1, over two epochs."""
    toy = resnet()
    state = toy.initial()
    stage = toy.method.stages(0)[0]
    (reply,) = toy.transport.exchange(stage, 0, stage.broadcast(state, 0, [client]))
    expected = trained_by_torch(toy, client, state)
    for group in (PARAMS, BUFFERS):
        assert reply.record.get(group).keys() <= expected.keys()
        for name, tensor in reply.record.get(group).items():
            torch.testing.assert_close(tensor, expected[name], rtol=1e-4, atol=1e-5, msg=name)
    moved = reply.record.get(BUFFERS)
    assert all(not torch.equal(moved[n], t) for n, t in state.get(BUFFERS).items())


def test_a_run_with_batch_normalisation_repeats_and_resumes_to_the_bit() -> None:
    first, again = resnet(rounds=2), resnet(rounds=2)
    state = first.run()[0]
    assert same_bits(state, again.run()[0])
    middle = replace(again.loop(), schedule=list(again.loop().schedule)[:1])
    half = middle.run(again.initial(), 0, lambda e: None, lambda t, s: None)
    rest = again.loop().run(half, 1, lambda e: None, lambda t, s: None)
    assert same_bits(rest, state)


def test_backbones_without_batch_normalisation_have_nothing_to_renew() -> None:
    vit = TimmBackbone(TimmBackbone.Config("vit_tiny_patch16_224"), InputSpec(3, 32, 32))
    assert not vit.mixes_images
    assert not vit.init_buffers()
    assert vit.training() is vit
    swin = TimmBackbone(TimmBackbone.Config("swin_tiny_patch4_window7_224"), InputSpec(3, 64, 64))
    assert not swin.init_buffers()
    assert swin.constants()  # index tables


@pytest.mark.parametrize("name", methods.names())
def test_every_method_trains_a_timm_backbone_with_its_running_statistics(name: str) -> None:
    small = ["data.train=24", "data.test=10", "split.clients=2", "split.name=iid", "run.rounds=1"]
    changes = [*small, "model.name=timm", "model.architecture=resnet10t", "train.epochs=1"]
    quick = ["engine.threads=1", "engine.device=cpu", "methods.fedcurv.fisher_samples=2"]
    assembly = assemble(load_settings("demo", [*changes, *quick, f"run.method={name}"]))
    start, events = assembly.initial_state(), list[dict[str, Any]]()
    state = assembly.federation(ClientMemory()).run(start, 0, events.append, lambda r, s: None)
    assert not events[0]["left_out"]
    moved = [n for n, t in state.get(PARAMS).items() if not torch.equal(t, start.get(PARAMS)[n])]
    assert any(n.startswith(PREFIX) for n in moved)
    before, after = start.get(BUFFERS), state.get(BUFFERS)
    assert after.keys() == before.keys()
    assert not any(n in state.get(FROZEN) for n in after)
    assert all(not torch.equal(after[n], before[n]) for n in after)
    assert all((t >= 0).all() for n, t in after.items() if n.endswith("running_var"))
    with_them = evaluate(assembly, state).metrics.as_dict()
    without = evaluate(assembly, state.replace({BUFFERS: before})).metrics.as_dict()
    assert with_them != without
    assert 0 < with_them["mAP"] <= 1
