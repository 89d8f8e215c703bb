"""Local training, sampling, failures, the round loop and its records on disk."""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import os
import resource
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedharmony import stopping
from fedharmony.aggregate import ModelMean, RunningMean
from fedharmony.data.augment import AugmentSettings
from fedharmony.data.base import LabelledImages, TensorImages
from fedharmony.engine.batches import plan_batches
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.optimise import TrainSettings
from fedharmony.errors import CheckpointError, ClientLimitError, ConfigError, Stopped
from fedharmony.losses import Batch, LossSettings, task_loss
from fedharmony.methods.base import Groups, Reads, Stage, Sweep, methods
from fedharmony.methods.fedavg import FedAvg
from fedharmony.models.base import Model
from fedharmony.records import digest, from_bytes, load_record, save_record, to_bytes
from fedharmony.rng import numpy_rng
from fedharmony.server.federation import FederationSettings, Tally
from fedharmony.server.sampling import Schedule, cohort_size, drops_out
from fedharmony.transport.replies import problem
from fedharmony.types import BUFFERS, PARAMS, Failure, Form, Layout, Packed, Record, Reply, Tensors
from toy import CLASSES, Toy, largest_difference, same_bits, split, toy_data

# -- local training -------------------------------------------------------------------------------


def trained_alone(toy: Toy, client: int, round: int = 0) -> dict[str, Tensor]:
    """Plain PyTorch, one client, no stacking, no padding: the reference."""
    assert toy.data is not None
    start = toy.initial().get(PARAMS)
    params = {name: t.clone().requires_grad_() for name, t in start.items()}
    make = {
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "momentum": functools.partial(torch.optim.SGD, momentum=0.9),
    }[toy.optimiser]
    optimiser = make(list(params.values()), lr=0.01)
    rng = numpy_rng(toy.seed, "order", round, client)
    own = split(toy.sizes)[client]
    assert isinstance(toy.data.images, TensorImages)
    for _ in range(toy.epochs):
        order = rng.permutation(own)
        for first in range(0, len(order), toy.batch_size):
            index = order[first : first + toy.batch_size]
            pixels = toy.data.images.pixels[index].double() / 255
            x = ((pixels - 0.5) / 0.5).flatten(1)
            y = torch.from_numpy(toy.data.labels[index]).double()
            hidden = torch.tanh(x @ params["hidden.weight"].T + params["hidden.bias"])
            logits = hidden @ params["head.weight"].T + params["head.bias"]
            optimiser.zero_grad()
            F.binary_cross_entropy_with_logits(logits, y).backward()
            optimiser.step()
    return {name: p.detach() for name, p in params.items()}


@pytest.mark.parametrize("stack", [1, 2, 8])
@pytest.mark.parametrize("optimiser", ["adam", "sgd", "momentum"])
def test_stacked_unequal_clients_train_as_each_would_alone(stack: int, optimiser: Any) -> None:
    """Sizes 20, 7, 1, 13, 19 with batch 4: every kind of last batch, and a shrinking stack."""
    toy = Toy(dtype=torch.float64, stack=stack, optimiser=optimiser)
    messages = toy.method.broadcast(toy.initial(), 0, range(5))
    stage = toy.method.stages(0)[0]
    replies = list(toy.transport.exchange(stage, 0, messages))
    assert [reply.client for reply in replies] == [0, 1, 2, 3, 4]
    for reply in replies:
        alone = Record({PARAMS: trained_alone(toy, reply.client)})
        got = Record({PARAMS: reply.record.get(PARAMS)})
        # Float32 normalisation (x − 127.5)/127.5 against float64 (x/255 − 0.5)/0.5 sets the limit.
        assert largest_difference(got, alone) < 1e-6
        steps = toy.epochs * -(-toy.sizes[reply.client] // toy.batch_size)
        assert reply.record.scalars["steps"] == steps
        assert reply.examples == toy.sizes[reply.client]


def test_first_adam_step_moves_every_weight_by_the_learning_rate() -> None:
    """A fresh Adam's first step is lr · g / (|g| + 1e-8): one image, one step, |Δ| ≈ 0.01."""
    toy = Toy(sizes=(1,), epochs=1, rounds=1, dtype=torch.float64)
    before = toy.initial()
    after, _ = toy.run()
    moved = (after.get(PARAMS)["head.bias"] - before.get(PARAMS)["head.bias"]).abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.01), rtol=1e-5, atol=0)


@pytest.mark.parametrize("optimiser", ["sgd", "adam", "momentum"])
def test_the_learning_rate_of_a_round(optimiser: Any) -> None:
    """Cosine over four rounds: ½(1 + cos 90°) = ½ in round 2, so a client moves half as far.

    One full batch, one step: SGD and a fresh heavy ball move by lr · g, a fresh Adam by lr in every
    weight, whatever the round.
    """
    assert [TrainSettings(schedule="cosine").rate(t, 4) for t in (0, 2)] == [1.0, 0.5]
    assert TrainSettings(schedule="cosine").rate(1, 4) == pytest.approx((1 + math.sqrt(0.5)) / 2)
    moved = {}
    for schedule in ("constant", "cosine"):
        toy = Toy(
            rounds=4, optimiser=optimiser, epochs=1, batch_size=20, dtype=torch.float64, sizes=(12,)
        )
        toy.trainer.trainer.settings = replace(toy.trainer.trainer.settings, schedule=schedule)
        stage, start = toy.method.stages(2)[0], toy.initial()
        (answer,) = toy.transport.exchange(stage, 2, stage.broadcast(start, 2, [0]))
        before, after = start.get(PARAMS), answer.record.get(PARAMS)
        moved[schedule] = {n: after[n] - before[n] for n in before}
    for name, step in moved["constant"].items():
        torch.testing.assert_close(moved["cosine"][name], step / 2, rtol=1e-9, atol=1e-12)


def test_optimiser_is_fresh_each_round() -> None:
    """With kept moments the second round's first step would not be lr·sign(g)."""
    toy = Toy(sizes=(1,), epochs=1, rounds=2, dtype=torch.float64)
    states: list[Record] = []
    toy.loop().run(toy.initial(), 0, lambda e: None, lambda t, s: states.append(s))
    first, second = (s.get(PARAMS)["head.bias"] for s in states)
    torch.testing.assert_close(
        (second - first).abs(), torch.full_like(first, 0.01), rtol=1e-5, atol=0
    )


def test_padding_rows_and_unknown_labels_do_not_count() -> None:
    """Two of four entries count: mean of −log σ(2) and −log(1 − σ(−1)) = (0.1269 + 0.3133) / 2."""
    logits = torch.tensor([[2.0, 9.0], [9.0, -1.0], [7.0, 7.0]])
    labels = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 1.0]])
    counted = torch.tensor([[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]])
    batch = Batch(labels, torch.tensor([1.0, 1.0, 0.0]), counted)
    assert float(task_loss(LossSettings(), logits, batch)) == pytest.approx(0.220095, abs=1e-5)
    assert float(task_loss(LossSettings(), logits, batch._replace(counted=counted * 0))) == 0.0


def test_known_mask_reaches_the_loss() -> None:
    """A label that is unknown everywhere leaves its row of the head untouched."""
    data = toy_data(20)
    known = np.ones(data.labels.shape, dtype=bool)
    known[:, 2] = False
    toy = Toy(sizes=(12, 8), data=replace(data, known=known))
    before, (after, _) = toy.initial().get(PARAMS), toy.run()
    weight = after.get(PARAMS)["head.weight"]
    assert torch.equal(weight[2], before["head.weight"][2])
    assert not torch.equal(weight[1], before["head.weight"][1])


def test_labels_a_client_lacks_can_be_left_out_of_its_loss() -> None:
    """With weight 0 the head's row of an absent label stays; with weight 1 it moves."""
    data = toy_data(20)
    labels = data.labels.copy()
    labels[:, 2] = 0
    data = replace(data, labels=labels)

    def row(weight: float) -> Tensor:
        settings = LossSettings(absent_label_weight=weight)
        state, _ = Toy(sizes=(12, 8), data=data, loss=settings).run()
        return state.get(PARAMS)["head.weight"][2]

    start = Toy(sizes=(12, 8), data=data).initial().get(PARAMS)["head.weight"][2]
    assert torch.equal(row(0.0), start)
    assert not torch.equal(row(1.0), start)


@pytest.mark.parametrize("name", ["balanced", "focal", "asymmetric"])
def test_the_loss_is_a_setting_of_every_method(name: Any) -> None:
    for method in ("fedavg", "fedharmony"):
        bce, _ = Toy(method).run()
        other, _ = Toy(method, loss=LossSettings(name)).run()
        assert not same_bits(bce, other)


# -- what methods may ask for ---------------------------------------------------------------------


class Probe(FedAvg):
    """Draws numbers, reads them as inputs, and sweeps over whatever a test asks for."""

    reads: Reads = "features"
    limit: int | None = None

    def draw(self, generator: torch.Generator, images: int) -> Tensors:
        return {"noise": torch.rand(images, generator=generator)}

    def loss(
        self, outputs: Tensor, batch: Batch, message: Groups, carry: Tensors
    ) -> tuple[Tensor, Tensors]:
        value, carry = super().loss(outputs, batch, message, carry)
        return value + (batch.draws["noise"] * batch.rows * outputs[..., 0]).sum(-1), carry

    def sweep(self) -> Sweep:
        def start(params: Mapping[str, Tensor]) -> Tensors:
            return {"sum": torch.zeros((), dtype=torch.float64), "rows": torch.zeros(())}

        def fold(carry: Tensors, values: Tensor, batch: Batch) -> Tensors:
            rows = batch.rows.view(-1, *[1] * (values.dim() - 1))
            total = (values.double() * rows).sum()
            return {"sum": carry["sum"] + total, "rows": carry["rows"] + batch.rows.sum()}

        return Sweep(
            "probe",
            self.reads,
            start,
            fold,
            lambda carry, params: carry,
            lambda params: {
                "sum": Form((), torch.float64),
                "rows": Form(()),
            },
            limit=self.limit,
        )


def swept(
    reads: Reads, stack: int = 8, limit: int | None = None
) -> dict[int, Mapping[str, Tensor]]:
    kind = type("Probe", (Probe,), {"reads": reads, "limit": limit})
    toy = Toy(method_class=kind, dtype=torch.float64, stack=stack)
    messages = toy.method.broadcast(toy.initial(), 0, range(5))
    stage = replace(toy.method.stages(0)[0], train=False)
    answers = toy.transport.exchange(stage, 0, messages)
    return {reply.client: reply.record.get("probe") for reply in answers}


@pytest.mark.parametrize("stack", [1, 3, 8])
def test_a_sweep_reads_what_it_asks_for(stack: int) -> None:
    """Sums over each client's images of pixels, labels, features and outputs."""
    toy = Toy(dtype=torch.float64)
    assert toy.data is not None
    params = {n: t.unsqueeze(0) for n, t in toy.initial().get(PARAMS).items()}
    for client, index in split(toy.sizes).items():
        pixels = toy.data.images.gather(torch.from_numpy(index), "cpu")
        images = ((pixels.float() - 127.5) / 127.5).double().unsqueeze(0)
        expected = {
            "images": pixels.double().sum(),
            "labels": torch.tensor(float(toy.data.labels[index].sum())),
            "features": toy.model.backbone.features(params, images).sum(),
            "outputs": toy.model.apply(params, images).sum(),
        }
        for reads in ("images", "labels", "features", "outputs"):
            found = swept(reads, stack)[client]
            assert float(found["rows"]) == len(index)
            torch.testing.assert_close(found["sum"], expected[reads].double())


@pytest.mark.parametrize("mode", [ComputeMode(), ComputeMode(fixed=True)], ids=["exact", "fixed"])
def test_a_sweep_during_training_folds_each_image_of_the_last_epoch_once(mode: ComputeMode) -> None:
    """Three epochs, unequal clients in one stack: n_k rows each, with the labels of n_k images."""

    class Counts(methods["fedavg"]):  # type: ignore[misc]
        def sweep(self) -> Sweep:
            def fold(carry: Any, outputs: Tensor, batch: Batch) -> Any:
                labels = (batch.labels * batch.rows.unsqueeze(-1)).sum(-2)
                return {
                    "rows": carry["rows"] + batch.rows.sum(-1),
                    "labels": carry["labels"] + labels,
                }

            zero = {"rows": torch.zeros(()), "labels": torch.zeros(CLASSES)}
            return Sweep(
                "counts",
                "outputs",
                lambda params: zero,
                fold,
                lambda carry, params: carry,
                lambda params: {"rows": Form(()), "labels": Form((CLASSES,))},
                during_training=True,
            )

    toy = Toy(method_class=Counts, sizes=(20, 7, 1, 13), epochs=3, mode=mode)
    apply, passes = Model.apply, list[bool]()
    stage = toy.method.stages(0)[0]
    sent = stage.broadcast(toy.initial(), 0, range(4))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Model, "apply", lambda *a: (passes.append(torch.is_grad_enabled()), apply(*a))[1]
        )
        replies = list(toy.transport.exchange(stage, 0, sent))
    assert all(passes)  # no pass without training
    assert toy.data is not None
    for reply, own in zip(replies, toy.trainer.data.clients.values(), strict=True):
        counts = reply.record.get("counts")
        assert float(counts["rows"]) == len(own)
        assert counts["labels"].tolist() == toy.data.labels[own].sum(0).tolist()


def test_a_limited_sweep_sees_some_images_only() -> None:
    some = swept("images", limit=6)
    assert [int(some[k]["rows"]) for k in range(5)] == [6, 6, 1, 6, 6]
    whole = swept("images")
    assert float(some[0]["sum"]) < float(whole[0]["sum"])
    assert float(some[2]["sum"]) == float(whole[2]["sum"])
    assert some == swept("images", limit=6)
    assert some == swept("images", stack=1, limit=6)


def test_draws_belong_to_the_client_and_the_round() -> None:
    """The same whatever the stack; other numbers in another round, for another client or seed."""
    stacked, _ = Toy(method_class=Probe, dtype=torch.float64, stack=8).run()
    single, _ = Toy(method_class=Probe, dtype=torch.float64, stack=1).run()
    assert largest_difference(stacked, single) < 1e-9
    seen: list[Tensor] = []

    class Recorder(Probe):
        def draw(self, generator: torch.Generator, images: int) -> Tensors:
            drawn = super().draw(generator, images)
            seen.append(drawn["noise"])
            return drawn

    Toy(method_class=Recorder, sizes=(4, 4), rounds=2, epochs=1).run()
    assert len(seen) == 4
    assert len({tuple(t.tolist()) for t in seen}) == 4


class SlowImages:
    """Images that come from somewhere else than memory; remembers which thread asked."""

    def __init__(self, images: TensorImages) -> None:
        self.images, self.threads = images, set[str]()

    def __len__(self) -> int:
        return len(self.images)

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.images.shape

    def gather(self, index: Tensor, device: torch.device | str) -> Tensor:
        self.threads.add(threading.current_thread().name)
        return self.images.gather(index, device)


def test_images_from_files_are_read_ahead_and_give_the_same_bits() -> None:
    data = toy_data(60)
    assert isinstance(data.images, TensorImages)
    slow = SlowImages(data.images)
    for name in ("fedharmony", "fedrdn"):
        plain, _ = Toy(name, data=data).run()
        ahead, _ = Toy(name, data=replace(data, images=slow)).run()
        assert same_bits(plain, ahead)
    assert all(name.startswith("images") for name in slow.threads)


def test_reading_ahead_passes_errors_on_and_stops_when_nobody_listens() -> None:
    data = toy_data(20)

    class Broken(SlowImages):
        def gather(self, index: Tensor, device: torch.device | str) -> Tensor:
            raise OSError("the disk is gone")

    assert isinstance(data.images, TensorImages)
    toy = Toy(sizes=(12, 8), data=replace(data, images=Broken(data.images)))
    answers = list(
        toy.transport.exchange(
            toy.method.stages(0)[0], 0, toy.method.broadcast(toy.initial(), 0, range(2))
        )
    )
    assert all(isinstance(a, Failure) and "the disk is gone" in a.reason for a in answers)
    seen: list[int] = []

    class Noted(SlowImages):
        def gather(self, index: Tensor, device: torch.device | str) -> Tensor:
            seen.append(int(index))
            return index

    held = Toy(sizes=(12, 8), data=replace(data, images=Noted(data.images))).trainer.data
    steps = (torch.tensor(i) for i in range(100))
    with contextlib.closing(held.gathered(steps)) as images:
        assert int(next(images)[0]) == 0
    assert len(seen) <= 4


def test_what_a_client_does_not_know_it_does_not_see() -> None:
    """Positives hidden by the mask change nothing: neither loss, nor sweeps, nor counts."""
    data = toy_data(60)
    known = np.random.default_rng(0).random(data.labels.shape) < 0.5
    hidden = np.where(known, data.labels, 0).astype(np.uint8)
    for name in methods.names():
        config = {"cold_start": "labels", "align_unseen": "mask"} if name == "fedharmony" else {}
        truth, _ = Toy(name, config, data=replace(data, known=known)).run()
        blank, _ = Toy(name, config, data=replace(data, known=known, labels=hidden)).run()
        assert same_bits(truth, blank), name


def test_augmentation_does_not_depend_on_the_stack_and_spares_sweeps() -> None:
    changes = AugmentSettings(flip=True, crop=0.5, brightness=0.3, hue=0.1)
    plain, _ = Toy("fedrdn").run()
    stacked, _ = Toy("fedrdn", dtype=torch.float64, changes=changes, stack=8).run()
    single, _ = Toy("fedrdn", dtype=torch.float64, changes=changes, stack=1).run()
    assert largest_difference(stacked, single) < 1e-9
    assert not same_bits(plain, Toy("fedrdn", changes=changes).run()[0])
    table = "statistics_table"  # a sweep over images, which are not changed there
    assert same_bits(*(Record({table: s.get(table)}) for s in (plain, stacked)))


def test_plan_has_every_image_once_per_epoch() -> None:
    orders = [np.stack([np.random.default_rng(e).permutation(n) for e in range(3)]) for n in (9, 4)]
    plan = plan_batches(orders, 4)
    assert plan.steps.tolist() == [9, 3]
    for m, n in enumerate((9, 4)):
        seen = Counter(int(i) for i in plan.index[:, m].ravel() if i >= 0)
        assert seen == dict.fromkeys(range(n), 3)
    assert [s[:3] for s in plan.segments()] == [(0, 3, 2), (3, 9, 1)]
    with pytest.raises(ValueError, match="ordered by size"):
        plan_batches(orders[::-1], 4)


def test_counters_keep_the_servers_value() -> None:
    """Buffers: floating ones are averaged, (1·2 + 3·5)/4 = 4.25; a counter is not."""
    mean = ModelMean()
    for weight, value in ((1.0, 2.0), (3.0, 5.0)):
        mean.add(Record({BUFFERS: {"mean": torch.tensor(value), "seen": torch.tensor(7)}}), weight)
    state = Record({PARAMS: {}, BUFFERS: {"mean": torch.tensor(0.0), "seen": torch.tensor(3)}})
    after = mean.update(state).get(BUFFERS)
    assert (float(after["mean"]), int(after["seen"])) == (4.25, 3)


# -- sampling -------------------------------------------------------------------------------------


def test_schedule() -> None:
    sizes = {0: 10, 1: 0, 2: 20, 5: 30, 7: 40}
    schedule = list(Schedule(sizes, 50, 2, "uniform", seed=3))
    assert schedule == list(Schedule(sizes, 50, 2, "uniform", seed=3))
    assert schedule != list(Schedule(sizes, 50, 2, "uniform", seed=4))
    # A longer run begins with the shorter one's cohorts; each is drawn by itself.
    longer = Schedule(sizes, 60, 2, "uniform", seed=3)
    assert longer[:50] == schedule
    assert [longer[t] for t in (49, 0)] == [schedule[49], schedule[0]]
    assert all(len(set(c)) == 2 and c == sorted(c) and 1 not in c for c in schedule)
    assert {k for cohort in schedule for k in cohort} == {0, 2, 5, 7}
    with pytest.raises(ConfigError, match="only 4 have"):
        Schedule(sizes, 1, 5, "uniform", seed=0)


def test_a_client_that_joins_is_drawn_from_then_on() -> None:
    sizes = {0: 1, 1: 1}
    schedule = Schedule(sizes, 100, 2, "uniform", seed=0)
    assert schedule[0] == [0, 1]
    sizes[9] = 1
    assert {k for cohort in schedule for k in cohort} == {0, 1, 9}


def test_sampling_by_size_follows_sizes() -> None:
    """Cohorts of one: client k is drawn with probability n_k / Σ n = 0.1, 0.9."""
    counts = Counter(c[0] for c in Schedule({0: 10, 1: 90}, 2000, 1, "size", seed=0))
    assert counts[1] / 2000 == pytest.approx(0.9, abs=0.02)
    even = Counter(c[0] for c in Schedule({0: 10, 1: 90}, 2000, 1, "uniform", seed=0))
    assert even[1] / 2000 == pytest.approx(0.5, abs=0.035)


def test_cohort_size() -> None:
    assert cohort_size(3, 0.5, 3) == 3
    assert cohort_size(3, 0.01, None) == 1
    assert cohort_size(7, 0.5, None) == 4
    with pytest.raises(ConfigError, match="more than the 3 clients"):
        cohort_size(3, 1.0, 4)


def test_drop_out_rate() -> None:
    drawn = [drops_out(0.3, 0, t, k) for t in range(40) for k in range(50)]
    assert np.mean(drawn) == pytest.approx(0.3, abs=0.03)
    assert not drops_out(0.0, 0, 0, 0)


# -- aggregation ----------------------------------------------------------------------------------


def test_running_mean_by_hand() -> None:
    """Weights 1, 3: (1·[1, 2] + 3·[5, 6]) / 4 = [4, 5]; the integer counter is not averaged."""
    mean = RunningMean()
    mean.add({"w": torch.tensor([1.0, 2.0]), "steps": torch.tensor(7)}, 1.0)
    mean.add({"w": torch.tensor([5.0, 6.0]), "steps": torch.tensor(9)}, 3.0)
    result = mean.result()
    assert result["w"].tolist() == [4.0, 5.0]
    assert result["steps"].item() == 7
    assert result["w"].dtype == torch.float32


def test_order_of_clients_does_not_matter() -> None:
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(50, generator=generator), float(n)) for n in range(1, 30)]
    results = []
    for order in (clients, clients[::-1]):
        mean = RunningMean()
        for tensor, weight in order:
            mean.add({"w": tensor}, weight)
        results.append(mean.result()["w"])
    assert torch.equal(*results)


def test_buffers_and_frozen_parameters() -> None:
    state = Record({PARAMS: {"w": torch.zeros(1), "frozen": torch.ones(1)}, BUFFERS: {}})
    mean = ModelMean()
    assert mean.update(state) is state
    mean.add(Record({PARAMS: {"w": torch.tensor([2.0])}, BUFFERS: {"b": torch.tensor([4.0])}}), 1)
    new = mean.update(state)
    assert new.get(PARAMS) == {"w": torch.tensor([2.0]), "frozen": torch.ones(1)}
    assert new.get(BUFFERS) == {"b": torch.tensor([4.0])}


def test_equal_clients_equal_one_client() -> None:
    """M clients with the same data, order and size: the mean is any one of them."""
    data = toy_data(8)
    doubled = LabelledImages(
        TensorImages(torch.cat([data.images.gather(torch.arange(8), "cpu")] * 2)),
        np.concatenate([data.labels] * 2),
    )
    two = Toy(sizes=(8, 8), epochs=1, rounds=1, batch_size=8, data=doubled)
    one = Toy(sizes=(8,), epochs=1, rounds=1, batch_size=8, data=data)
    # Full batches: the order inside the only batch differs, hence a tolerance.
    assert largest_difference(two.run()[0], one.run()[0]) < 1e-5


def test_uniform_averaging() -> None:
    _, events = Toy(federation=FederationSettings(average="uniform"), rounds=1).run()
    assert set(events[0]["weights"].values()) == {0.2}


# -- failures -------------------------------------------------------------------------------------


@dataclass
class Unreliable:
    """A transport that spoils the replies of some clients."""

    inner: Any
    spoil: Mapping[int, str]

    @property
    def sizes(self) -> Any:
        return self.inner.sizes

    def exchange(
        self, stage: Stage, round: int, messages: Mapping[int, Record]
    ) -> Iterator[Reply | Failure]:
        for answer in self.inner.exchange(stage, round, messages):
            how = self.spoil.get(answer.client)
            if how == "nan":
                params = dict(answer.record.get(PARAMS))
                params["head.bias"] = params["head.bias"] * float("nan")
                record = answer.record.replace({PARAMS: params})
                answer = replace(answer, record=record, finite=None)  # nobody has looked
            elif how == "shape":
                params = dict(answer.record.get(PARAMS))
                params["head.bias"] = params["head.bias"][:2]
                answer = replace(answer, record=answer.record.replace({PARAMS: params}))
            elif how == "missing":
                answer = replace(answer, record=Record())
            yield answer


def test_a_stage_for_everyone_asks_who_joined_since_the_last_round() -> None:
    """Client 2 has images from round 1 on; until then a stage for everyone asks 0 and 1 only."""
    toy = Toy(sizes=(5, 4, 3), rounds=2, cohort=1)
    asked: list[list[int]] = []

    class Later:
        sizes: ClassVar[dict[int, int]] = {1: 4, 0: 5}

        def exchange(self, stage: Stage, round: int, messages: Mapping[int, Record]) -> Any:
            asked.append(sorted(messages))
            self.sizes[2] = 3
            return toy.transport.exchange(stage, round, messages)

    class Asking(type(toy.method)):  # type: ignore[misc]
        def stages(self, round: int) -> list[Stage]:
            return [Stage("update", self.broadcast, self.aggregate, everyone=True)]

    method = Asking(toy.method.config, toy.task)
    loop = replace(toy.loop(), transport=Later(), method=method)
    loop.run(toy.initial(), 0, lambda event: None, lambda round, state: None)
    assert asked == [[0, 1], [0, 1, 2]]


def test_clients_are_asked_largest_first_whatever_the_transport() -> None:
    """Sizes 20, 7, 1, 13, 7: equal sizes in client order; sums over replies keep this order."""
    toy, asked = Toy(sizes=(20, 7, 1, 13, 7), rounds=1), []
    exchange = toy.transport.exchange

    def listen(stage: Stage, round: int, messages: Any) -> Any:
        asked.append(list(messages))
        return exchange(stage, round, messages)

    toy.transport.exchange = listen
    _, events = toy.run()
    assert asked == [[0, 3, 1, 4, 2]]
    assert events[0]["reported"] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("nan", "params/head.bias holds a value that is not finite"),
        ("shape", "params/head.bias has shape (2,), expected (6,)"),
        ("missing", "group 'params' has missing or unexpected tensors"),
    ],
)
def test_bad_replies_are_named_and_left_out(how: str, reason: str) -> None:
    toy = Toy(rounds=2)
    toy.transport = Unreliable(toy.transport, {1: how, 3: how})
    _, events = toy.run()
    for event in events:
        assert event["reported"] == [0, 2, 4]
        assert [f["client"] for f in event["left_out"]] == [1, 3]
        assert all(reason in f["reason"] and f["stage"] == "update" for f in event["left_out"])
        assert event["weights"].keys() == {"0", "2", "4"}
        assert sum(event["weights"].values()) == pytest.approx(1.0)


def test_left_out_means_left_out() -> None:
    """Without clients 1 and 3 the round equals one whose cohort never had them."""
    spoilt, clean = Toy(rounds=1), Toy(rounds=1)
    spoilt.transport = Unreliable(spoilt.transport, {1: "nan", 3: "nan"})
    state, _ = spoilt.run()
    loop = replace(clean.loop(), schedule=[[0, 2, 4]])
    alone = loop.run(clean.initial(), 0, lambda e: None, lambda t, s: None)
    assert largest_difference(state, alone) < 1e-6


class BrokenFile(TensorImages):
    """Images of which one cannot be read."""

    bad = 22

    def gather(self, index: Tensor, device: Any) -> Tensor:
        if (index == self.bad).any():
            raise OSError(f"image {self.bad} cannot be read")
        return super().gather(index, device)


def test_a_client_that_raises_is_found_in_its_stack(caplog: pytest.LogCaptureFixture) -> None:
    """Image 22 belongs to client 1 (sizes 20, 7, …); the other four are not harmed.

    That they ran one by one is counted in each round, and the first error is logged whole.
    """
    data = toy_data(60)
    assert isinstance(data.images, TensorImages)
    toy = Toy(rounds=2, data=replace(data, images=BrokenFile(data.images.pixels)))
    with caplog.at_level(logging.WARNING, "fedharmony"):
        _, events = toy.run()
    assert events[0]["reported"] == [0, 2, 3, 4]
    assert [event["fallbacks"] for event in events] == [{"stack": 1}] * 2
    assert caplog.text.count("A stack of 5 clients failed in update of round") == 2
    assert caplog.text.count("Traceback") == 1
    assert "OSError: image 22 cannot be read" in caplog.text
    (failure,) = events[0]["left_out"]
    assert (failure["client"], failure["stage"], failure["round"]) == (1, "update", 0)
    assert failure["reason"].startswith("OSError: image 22 cannot be read (test_engine.py:")


def test_failures_name_the_client() -> None:
    toy = Toy(rounds=1, names=("ann", "bob", "cy", "dan", "eve"))
    toy.transport = Unreliable(toy.transport, {1: "nan"})
    _, events = toy.run()
    assert [(f["client"], f["name"]) for f in events[0]["left_out"]] == [(1, "bob")]
    toy.transport = Unreliable(toy.transport, dict.fromkeys(range(3), "nan"))
    with pytest.raises(ClientLimitError, match=r"client 0 \(ann\) left out of update, round 1: "):
        toy.run()


def test_nobody_left_keeps_the_model() -> None:
    toy = Toy(rounds=1, federation=FederationSettings(max_failures=1.0))
    toy.transport = Unreliable(toy.transport, dict.fromkeys(range(5), "nan"))
    state, events = toy.run()
    assert same_bits(state, toy.initial())
    assert events[0]["reported"] == []
    assert events[0]["train_loss"] is None


def test_too_many_failures_stop_the_run() -> None:
    toy = Toy(rounds=3)
    toy.transport = Unreliable(toy.transport, dict.fromkeys(range(3), "nan"))
    with pytest.raises(ClientLimitError, match=r"3 of 5 clients failed in update of round 1, "):
        toy.run()


def test_drop_outs_are_not_failures() -> None:
    toy = Toy(rounds=6, federation=FederationSettings(drop_rate=0.5))
    _, events = toy.run()
    dropped = [{entry["client"] for entry in e["left_out"]} for e in events]
    assert any(dropped)
    for event, lost in zip(events, dropped, strict=True):
        assert all(entry["cause"] == "dropped" for entry in event["left_out"])
        assert set(event["reported"]) == set(event["cohort"]) - lost
        assert event["bytes_down"] > event["bytes_up"] or not lost


def test_problem_accepts_a_good_record() -> None:
    record = Record({"g": {"x": torch.ones(2), "n": torch.ones(2, dtype=torch.int64)}})
    assert problem(record, {"g": {"x": Form((2,)), "n": Form((2,), torch.int64)}}) is None
    empty = Record({"g": {"x": torch.ones(0), "n": torch.ones(0, dtype=torch.int64)}})
    assert problem(empty, {"g": {"x": Form((0,)), "n": Form((0,), torch.int64)}}) is None


# -- records on disk ------------------------------------------------------------------------------

RECORD = Record(
    {
        "params": {"w": torch.randn(3, 4, dtype=torch.float64), "half": torch.ones(2).half()},
        "table": {
            "ids": torch.arange(5),
            "known": torch.tensor([True, False]),
            "none": torch.ones(0),
        },
        "empty": {},
    },
    {"round": 3, "name": "x", "share": 0.5, "flag": True},
)


def test_checkpoint_round_trip(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    save_record(path, RECORD)
    loaded = load_record(path)
    assert same_bits(loaded, RECORD)
    assert loaded.scalars == RECORD.scalars
    assert list(loaded.groups) == ["params", "table", "empty"]
    assert digest(loaded) == digest(RECORD)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.safetensors"]


@pytest.mark.parametrize("cut", [0, 5, 100, -1])
def test_truncated_checkpoint(tmp_path: Path, cut: int) -> None:
    path = tmp_path / "checkpoint.safetensors"
    save_record(path, RECORD)
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(CheckpointError, match="is damaged"):
        load_record(path)


def test_flipped_bit_in_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.safetensors"
    save_record(path, RECORD)
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="checksum"):
        load_record(path)


def test_missing_and_foreign_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="There is no checkpoint"):
        load_record(tmp_path / "none")
    import safetensors.torch

    foreign = tmp_path / "foreign.safetensors"
    safetensors.torch.save_file({"w": torch.ones(1)}, foreign)
    with pytest.raises(CheckpointError, match="not a checkpoint of this version"):
        load_record(foreign)


FILL_THE_DISK = """
import resource, sys, torch
from pathlib import Path
from fedharmony.records import save_record
from fedharmony.errors import CheckpointError
from fedharmony.types import Record
path = Path(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    save_record(path, Record({"params": {"w": torch.zeros(100_000)}}))
except CheckpointError as error:
    print(error)
"""


def test_no_room_for_a_checkpoint_keeps_the_last_good_one(tmp_path: Path) -> None:
    """The file-size limit of a child process makes its write fail half-way, like a full disk."""
    assert resource.RLIMIT_FSIZE is not None
    path = tmp_path / "checkpoint.safetensors"
    save_record(path, RECORD)
    done = subprocess.run(
        [sys.executable, "-c", FILL_THE_DISK, str(path)],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    assert "Could not write" in done.stdout
    assert "last good version is still in place" in done.stdout
    assert same_bits(load_record(path), RECORD)
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.safetensors"]


def test_packed_replies_are_checked_like_others() -> None:
    """One row per client: same names and shapes in any order, or a reason why not."""
    expected = {PARAMS: {"w": Form((2, 3)), "b": Form((3,))}}

    def reason(finite: bool | None = None, value: float = 0.0, **shapes: tuple[int, ...]) -> Any:
        layout = Layout.of(shapes)
        packed = Packed(layout, torch.full((layout.length,), value))
        return problem(Record({PARAMS: packed}), expected, finite)

    assert reason(w=(2, 3), b=(3,)) is None
    assert reason(b=(3,), w=(2, 3)) is None
    assert "params/w has shape (3, 2)" in reason(w=(3, 2), b=(3,))
    assert "missing or unexpected tensors" in reason(w=(2, 3), c=(3,))
    assert "params/w holds a value that is not finite" in reason(w=(2, 3), b=(3,), value=math.inf)
    assert "not finite" in reason(False, math.nan, w=(2, 3), b=(3,))
    assert reason(True, w=(2, 3), b=(3,)) is None


def test_one_tensor_under_two_names_is_saved() -> None:
    """A plug-in's state may hold one; the format of the file refuses shared memory."""
    tied = torch.arange(3.0)
    state = Record({"params": {"w": tied, "copy": tied}, "own": {"part": tied[1:]}})
    again = from_bytes(to_bytes(state))
    assert digest(again) == digest(state)


# -- replies that lie -----------------------------------------------------------------------------


@dataclass
class Altered:
    """A transport that changes the replies of client 1."""

    inner: Any
    change: Any

    @property
    def sizes(self) -> Any:
        return self.inner.sizes

    def exchange(self, stage: Stage, round: int, messages: Any) -> Iterator[Reply | Failure]:
        for answer in self.inner.exchange(stage, round, messages):
            if answer.client != 1:
                yield answer
            else:
                yield from self.change(answer)


def with_params(change: Any) -> Any:
    def altered(reply: Reply) -> Iterator[Reply]:
        params = {n: change(t) for n, t in reply.record.get(PARAMS).items()}
        yield replace(reply, record=reply.record.replace({PARAMS: params}), finite=None)

    return altered


def with_scalars(**scalars: Any) -> Any:
    return lambda reply: [replace(reply, record=reply.record.replace(scalars=scalars))]


def with_group(group: str, **tensors: Any) -> Any:
    def altered(reply: Reply) -> Iterator[Reply]:
        before = dict(reply.record.get(group))
        new = before | {n: made(before.get(n)) for n, made in tensors.items()}
        yield replace(reply, record=reply.record.replace({group: new}))

    return altered


LIES: Mapping[str, tuple[str, Any, str]] = {
    "float64": ("fedavg", with_params(lambda t: t.double()), "is of torch.float64, expected"),
    "half": ("fedavg", with_params(lambda t: t.half()), "is of torch.float16, expected"),
    "int": ("fedavg", with_params(lambda t: t.long()), "is of torch.int64, expected"),
    "complex": ("fedavg", with_params(lambda t: t + 0j), "is of torch.complex64, expected"),
    "huge": ("fedavg", with_params(lambda t: t * 1e30), "the square of a number above 1.8e+19"),
    "fewer than none": ("fedavg", lambda r: [replace(r, examples=-5)], "claims -5 images"),
    "too many": ("fedavg", lambda r: [replace(r, examples=10**9)], "images, and announced 7"),
    "another's": ("fedavg", lambda r: [replace(r, client=0)], "answered already"),
    "twice": ("fedavg", lambda r: [r, r], "answered already"),
    "silent": ("fedavg", lambda r: [], "it did not answer"),
    "steps": ("fednova", with_scalars(steps=10**9), "it claims 1000000000 steps; 0 to 4"),
    "no steps back": ("fednova", with_scalars(steps=-1), "it claims -1 steps"),
    "half a step": ("fednova", with_scalars(steps=0.5), "it claims 0.5 steps"),
    "word": ("fedavg", with_scalars(loss="low"), "loss is 'low', no finite number"),
    "nan loss": ("fedavg", with_scalars(loss=math.nan), "loss is nan"),
    "buffer": (
        "fedavg",
        with_group(BUFFERS, spare=lambda _: torch.ones(1)),
        "'buffers' has missing or unexpected tensors: spare",
    ),
    "group": ("fedavg", with_group("gift", x=lambda _: torch.ones(1)), "'gift' was not asked for"),
    "R": (
        "fedharmony",
        with_group("correlation", upper=lambda t: t + 1e30),
        "correlation/upper holds 1e+30",
    ),
    "R above 1": (
        "fedharmony",
        with_group("correlation", upper=lambda t: t * 0 + 1.01),
        "correlation/upper holds 1.01, outside of [-1, 1]",
    ),
    "R below -1": (
        "fedharmony",
        with_group("correlation", upper=lambda t: t * 0 - 1.01),
        "correlation/upper holds -1.01, outside of [-1, 1]",
    ),
    "marginal": (
        "fedharmony",
        with_group("correlation", marginal=lambda t: t - 1),
        "outside of [0, 1]",
    ),
    "R float64": (
        "fedharmony",
        with_group("correlation", upper=lambda t: t.double()),
        "correlation/upper is of torch.float64",
    ),
    "fisher": ("fedcurv", with_group("fisher", **{"u.head.bias": lambda t: t - 1}), "[0, inf]"),
    "pixels": ("fedrdn", with_group("statistics", mean=lambda _: torch.full((3,), 1.5)), "[0, 1]"),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_reply_that_cannot_be_true_is_left_out_and_named(lie: str) -> None:
    name, change, reason = LIES[lie]
    toy = Toy(name, rounds=1)
    toy.transport = Altered(toy.transport, change)
    state, events = toy.run()
    assert any(reason in f["reason"] for f in events[0]["left_out"])
    if lie != "twice":
        assert 1 not in events[0]["reported"] or name == "fedrdn"
    assert all(t.isfinite().all() for _, t in state.tensors() if t.is_floating_point())


def test_known_finite_replies_are_still_looked_at_for_their_range() -> None:
    """A stack knows that its values are finite, not that they lie in a range."""
    expected = {PARAMS: {"w": Form((2,))}, "c": {"p": Form((1,), low=0, high=1)}}
    good = {PARAMS: {"w": torch.full((2,), torch.inf)}, "c": {"p": torch.tensor([1.0])}}
    assert problem(Record(good), expected, True) is None
    good["c"] = {"p": torch.tensor([1.1])}
    assert problem(Record(good), expected, True) == "c/p holds 1.1, outside of [0, 1]"
    good["c"] = {"p": torch.tensor([1 + 1e-7])}  # rounding
    assert problem(Record(good), expected, True) is None
    assert problem(Record(good), expected) == "params/w holds a value that is not finite"


# -- means of packed replies ----------------------------------------------------------------------


def packed(**values: list[float]) -> Packed:
    layout = Layout.of({name: (len(own),) for name, own in values.items()})
    row = torch.zeros(layout.length)
    for name, own in values.items():
        row[layout.places[name]] = torch.tensor(own)
    return Packed(layout, row)


def test_mean_of_packed_tensors_by_hand() -> None:
    """(1 · 1 + 3 · 5) / 4 = 4 and (1 · 2 + 3 · 6) / 4 = 5, in one row as long as all are packed."""
    mean = RunningMean()
    mean.add(packed(a=[1.0], b=[2.0]), 1.0)
    mean.add(packed(a=[5.0], b=[6.0]), 3.0)
    found = mean.result()
    assert isinstance(found, Packed)
    assert {name: t.tolist() for name, t in found.items()} == {"a": [4.0], "b": [5.0]}


@pytest.mark.parametrize("first", [True, False])
def test_mean_of_packed_and_other_tensors(first: bool) -> None:
    """Rows in another order, or no rows at all, are summed by name."""
    for other in (packed(b=[6.0], a=[5.0]), {"a": torch.tensor([5.0]), "b": torch.tensor([6.0])}):
        mean = RunningMean()
        replies: list[tuple[Any, float]] = [(packed(a=[1.0], b=[2.0]), 1.0), (other, 3.0)]
        for tensors, weight in replies if first else reversed(replies):
            mean.add(tensors, weight)
        found = mean.result()
        assert {name: t.tolist() for name, t in found.items()} == {"a": [4.0], "b": [5.0]}
        assert found["a"].dtype == torch.float32


def test_a_packed_mean_is_the_new_model_as_it_is() -> None:
    mean = ModelMean()
    assert mean.clients == 0
    mean.add(Record({PARAMS: packed(a=[1.0])}), 2.0)
    assert mean.clients == 1
    state = mean.update(Record({PARAMS: {"a": torch.zeros(1)}}))
    assert isinstance(state.get(PARAMS), Packed)
    more = mean.update(Record({PARAMS: {"a": torch.zeros(1), "kept": torch.ones(1)}}))
    assert {n: t.tolist() for n, t in more.get(PARAMS).items()} == {"a": [1.0], "kept": [1.0]}


def test_a_round_in_numbers() -> None:
    """Two clients of 6 and 2 images, two epochs, 20 rows: 4 of them are padding."""
    tally = Tally()
    for client, images, loss, rows in ((3, 6, 1.0, 15.0), (1, 2, 3.0, 5.0)):
        record = Record({PARAMS: {"w": torch.ones(2)}}, {"loss": loss, "rows": rows})
        tally.count(Reply(client, images, record), epochs=2)
    event = tally.event(0, [1, 3], 4.0)
    assert (event["examples"], event["images"], event["images_per_second"]) == (8, 16, 4.0)
    assert event["padding"] == pytest.approx(0.2)
    assert event["train_loss"] == (6 * 1.0 + 2 * 3.0) / 8
    assert (event["bytes_up"], event["bytes_down"], event["reported"]) == (16, 0, [1, 3])
    silent = Tally().event(0, [], 1.0)
    assert (silent["padding"], silent["train_loss"], silent["images"]) == (None, None, 0)
    quiet = Tally()
    quiet.count(Reply(0, 5, Record({PARAMS: {"w": torch.ones(1)}})), epochs=1)  # tells no loss
    assert (quiet.loss, quiet.rows, quiet.examples) == (0.0, 0.0, 5)
    asked = Tally()
    asked.count(Reply(0, 5, Record({PARAMS: {"w": torch.ones(1)}})), epochs=0)  # no training
    assert (asked.images, asked.examples, asked.bytes_up, asked.reported) == (0, 0, 4, [])


def test_the_value_outside_of_the_range_is_told() -> None:
    expected = {"c": {"p": Form((2,), low=0, high=1)}}
    for values, worst in (([-0.5, 0.3], "-0.5"), ([0.3, 1.5], "1.5"), ([-2.0, 3.0], "-2")):
        reason = problem(Record({"c": {"p": torch.tensor(values)}}), expected)
        assert reason == f"c/p holds {worst}, outside of [0, 1]"


def test_packed_replies_of_another_type_are_refused() -> None:
    layout = Layout.of({"w": (2,)})
    reply = Record({PARAMS: Packed(layout, torch.zeros(layout.length, dtype=torch.float64))})
    reason = problem(reply, {PARAMS: {"w": Form((2,))}}, True)
    assert reason == "params/w is of torch.float64, expected torch.float32"
    assert problem(reply, {PARAMS: {"w": Form((2,), torch.float64)}}, True) is None


def test_a_signal_ends_the_run_after_the_round() -> None:
    saved: list[int] = []

    def after(round: int, state: Record) -> None:
        saved.append(round)
        stopping.ask(Stopped("SIGTERM", 15))

    toy = Toy()
    try:
        with pytest.raises(Stopped):
            toy.loop().run(toy.initial(), 0, lambda event: None, after)
    finally:
        stopping.forget()
    assert saved == [0]
