"""The same training in other ways: fixed memory and few shapes, half precision, compiled pieces."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import itertools
import json
import logging
import weakref
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._functorch.aot_autograd import make_boxed_func

from fedharmony import fallbacks
from fedharmony.aggregate import ModelMean, RunningMean
from fedharmony.data.base import TensorImages
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.gpu import barrier
from fedharmony.engine.gpu.compiled import Compiled, CompiledPiece
from fedharmony.engine.gpu.graphs import Program, Recorder, StepInput
from fedharmony.engine.lanes import Lanes
from fedharmony.engine.optimise import (
    MOMENTS,
    TrainSettings,
    adam_step,
    sgd_step,
    step_factors,
)
from fedharmony.engine.room import RoomTest, StackRule
from fedharmony.engine.stacking import StackedMessage
from fedharmony.errors import ConfigError, DeviceMemoryError
from fedharmony.experiments import build, run
from fedharmony.experiments.build import assemble
from fedharmony.experiments.evaluate import evaluate
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.machine import choose_device, choose_mode, keep_to_share, switch_torch
from fedharmony.experiments.settings import EngineSettings, load_settings
from fedharmony.losses import LossSettings
from fedharmony.methods.base import methods
from fedharmony.metrics import evaluate as metrics_of
from fedharmony.models.base import InputSpec, Model, models, stack
from fedharmony.models.heads import LinearHead
from fedharmony.models.vit import ViT, block
from fedharmony.server.federation import FederationSettings
from fedharmony.types import FROZEN, PARAMS, Layout, Packed, Record
from toy import Toy, largest_difference

FIXED = ComputeMode(fixed=True)
#: Below and above a batch of 4.
SIZES = (20, 7, 1, 13, 19, 2, 5, 14, 15, 16, 8)


# -- the whole of a round, for every method --------------------------------------------------------


def no_retry(stage: Any, round: int, clients: list[int], error: Exception) -> Any:
    """Clients that fail together are tried alone: here that would hide what went wrong."""
    raise AssertionError("a stack failed") from error


@pytest.mark.parametrize("name", methods.names())
@pytest.mark.parametrize("stack", [3, 16])
def test_fixed_memory_and_few_shapes_train_like_exact_stacks(name: str, stack: int) -> None:
    """Three rounds in float64: padded lanes, saved clients and packed replies change nothing."""
    plain, _ = Toy(name, sizes=SIZES, dtype=torch.float64, stack=16, rounds=3).run()
    toy = Toy(name, sizes=SIZES, dtype=torch.float64, stack=stack, rounds=3, mode=FIXED)
    toy.transport._smaller = no_retry
    fixed, _ = toy.run()
    models = [Record({PARAMS: state.get(PARAMS)}) for state in (plain, fixed)]
    assert largest_difference(*models) < 1e-9
    assert largest_difference(plain, fixed) < 1e-7  # some methods keep statistics in float32


@pytest.mark.filterwarnings("ignore:The .grad attribute")
@pytest.mark.parametrize("name", ["fedavg", "fedharmony"])
@pytest.mark.parametrize(
    "mode",
    [ComputeMode(), FIXED, ComputeMode(compile=True, backend="eager")],
    ids=["plain", "fixed", "compiled"],
)
def test_a_stack_of_any_width_trains_as_each_client_alone(name: str, mode: ComputeMode) -> None:
    """1 to 40 clients: widths that few shapes round up, and widths that they leave as they are."""
    options: dict[str, Any] = {"sizes": [5] + [4] * 20 + [3] * 19, "dtype": torch.float64}
    options |= {"loss": LossSettings(name="balanced"), "rounds": 2, "epochs": 1}
    state, _ = Toy(name, **options | {"rounds": 1}, stack=40).run()
    alone, together = Toy(name, **options), Toy(name, **options, mode=mode)
    stage = alone.method.stages(1)[-1]
    sent = stage.broadcast(state, 1, list(range(40)))
    expected = [alone.trainer.run(stage, 1, {k: sent[k]})[0].record for k in sent]
    for width in range(1, 41):
        stacked = together.trainer.run(stage, 1, {k: sent[k] for k in range(width)})
        for reply, record in zip(stacked, expected, strict=False):
            assert largest_difference(reply.record, record) < 1e-12


@pytest.mark.parametrize("name", ["fedavg", "fedharmony"])
def test_a_client_that_is_done_while_its_lane_goes_on_is_saved(name: str) -> None:
    """19 clients, 17 of them with three steps, two with one: lanes come in 18, so one goes on.

    Of Adam a lane that sees padding only would still move on by its momentum.
    """
    options: dict[str, Any] = {"sizes": [9] * 17 + [3] * 2, "dtype": torch.float64, "rounds": 2}
    plain, _ = Toy(name, **options, stack=32).run()
    fixed, _ = Toy(name, **options, stack=32, mode=FIXED).run()
    models = [Record({PARAMS: state.get(PARAMS)}) for state in (plain, fixed)]
    assert largest_difference(*models) < 1e-9


@pytest.mark.parametrize("optimiser", ["adam", "sgd", "momentum"])
def test_fixed_memory_with_every_optimiser(optimiser: Any) -> None:
    options: dict[str, Any] = {"sizes": SIZES, "dtype": torch.float64, "optimiser": optimiser}
    options["stack"] = 16
    plain, events = Toy(**options).run()
    fixed, others = Toy(**options, mode=FIXED).run()
    assert largest_difference(plain, fixed) < 1e-9
    for event, other in zip(events, others, strict=True):
        assert other["train_loss"] == pytest.approx(event["train_loss"], rel=1e-6)
        assert other["bytes_up"] == event["bytes_up"]  # gaps between packed tensors do not travel


@pytest.mark.parametrize("name", methods.names())
def test_half_precision_stays_near_full_precision(name: str) -> None:
    """bfloat16 has 8 bits: after two rounds of Adam steps of 0.01 weights agree to a few steps."""
    full, _ = Toy(name, sizes=SIZES, rounds=2).run()
    half, _ = Toy(name, sizes=SIZES, rounds=2, mode=ComputeMode(half=True, fixed=True)).run()
    a, b = (Record({PARAMS: state.get(PARAMS)}) for state in (full, half))
    assert all(t.dtype == torch.float32 for _, t in b.tensors())  # master weights
    assert 0 < largest_difference(a, b) < 0.1


def mean_average_precision(toy: Toy, state: Record) -> float:
    """Of the global model, in float32, on all images of the clients."""
    assert toy.data is not None
    assert isinstance(toy.data.images, TensorImages)
    params = {n: t.unsqueeze(0) for g in (PARAMS, FROZEN) for n, t in state.get(g).items()}
    message = toy.method.evaluation(state)
    images = toy.method.normalise(toy.data.images.pixels, message, {})
    scores = toy.method.predict(toy.model.apply(params, images.unsqueeze(0))[0], state)
    return metrics_of(scores, toy.data.labels).map


@pytest.mark.parametrize("name", methods.names())
def test_half_precision_costs_at_most_a_point_of_mean_average_precision(name: str) -> None:
    """Three rounds of bfloat16 products and of float32: |Δ mAP| ≤ 0.01, far from chance."""
    options: dict[str, Any] = {"sizes": (60, 40, 30, 25, 20, 3, 2), "epochs": 1, "batch_size": 8}
    found = []
    for mode in (ComputeMode(), ComputeMode(half=True, fixed=True)):
        toy = Toy(name, **options, rounds=3, mode=mode)
        found.append(mean_average_precision(toy, toy.run()[0]))
    assert found[1] == pytest.approx(found[0], abs=0.01)
    assert min(found) > 0.6


def test_a_personal_model_for_each_client_is_trained_from() -> None:
    """Clients that receive models of their own: lanes are filled one by one, not all alike."""
    toys = [Toy(dtype=torch.float64, mode=mode, stack=8) for mode in (ComputeMode(), FIXED)]
    replies = []
    for toy in toys:
        messages = toy.method.broadcast(toy.initial(), 0, range(5))
        own = {
            k: m.replace({PARAMS: {n: t + 0.1 * k for n, t in m.get(PARAMS).items()}})
            for k, m in messages.items()
        }
        replies.append(list(toy.transport.exchange(toy.method.stages(0)[0], 0, own)))
    for plain, fixed in zip(*replies, strict=True):
        a, b = (Record({PARAMS: r.record.get(PARAMS)}) for r in (plain, fixed))
        assert largest_difference(a, b) < 1e-12


def test_replies_survive_the_next_stack() -> None:
    """Lanes are used again; what they gave out must not change."""
    toy = Toy(dtype=torch.float64, mode=FIXED, stack=2)
    messages = toy.method.broadcast(toy.initial(), 0, range(5))
    seen = []
    for reply in toy.transport.exchange(toy.method.stages(0)[0], 0, messages):
        params = reply.record.get(PARAMS)
        seen.append((params, {n: t.clone() for n, t in params.items()}))
    for now, then in seen:
        assert all(torch.equal(now[n], then[n]) for n in then)


# -- shapes ----------------------------------------------------------------------------------------


def test_narrow_batches_for_clients_with_few_images() -> None:
    """A stack whose largest client has 5 images of a batch of 16: 5 rows, or 6 of few sizes."""
    toy = Toy(sizes=(5, 2), batch_size=16)
    assert toy.trainer.trainer.rows(0) == 5
    assert Toy(sizes=(5, 2), batch_size=16, mode=FIXED).trainer.trainer.rows(0) == 6


def test_clients_with_few_images_form_wider_stacks() -> None:
    """Full: 4 clients of 16 rows = 64 rows. Of 2 rows that is 32, but no more than 20 at once."""
    rule = StackRule(4, 16, 20)
    assert [rule.width(rows) for rows in (16, 8, 4, 2, 1)] == [4, 8, 16, 20, 20]
    toy = Toy(sizes=(20, 2, 2, 2, 2, 2), batch_size=4)
    widths: list[int] = []
    run = toy.trainer.run
    toy.trainer.run = lambda stage, round, messages, *rest: (  # type: ignore[method-assign]
        widths.append(len(messages)),
        run(stage, round, messages, *rest),
    )[1]
    toy.transport._rule = StackRule(1, 4, 4)
    toy.rounds = 1
    toy.run()
    assert widths == [1, 2, 2, 1]  # of five alike, two and two and one: no more than two fit


@pytest.mark.parametrize("name", methods.names())
def test_messages_in_any_order_reach_their_clients(name: str) -> None:
    """A stack is ordered by size, whatever the order of its messages: nobody gets another's."""
    toy = Toy(name, sizes=(3, 13, 1, 9), rounds=2, dtype=torch.float64)
    state, _ = toy.run()
    stage = toy.method.stages(2)[-1]
    sent = stage.broadcast(state, 2, range(4))
    found = []
    for order in (range(4), (2, 0, 3, 1)):
        replies = toy.trainer.run(stage, 2, {k: sent[k] for k in order})
        assert [reply.client for reply in replies] == list(order)
        found.append({reply.client: reply.record for reply in replies})
    for client, record in found[0].items():
        assert largest_difference(record, found[1][client]) == 0


def test_what_losses_carry_is_made_from_each_clients_own_message() -> None:
    """Clients get their number of images told; the view of each has the same number."""
    seen: list[tuple[int, int]] = []

    class Told(methods["fedavg"]):  # type: ignore[misc]
        def broadcast(self, state: Record, round: int, clients: Any) -> Any:
            messages = super().broadcast(state, round, clients)
            told = {k: {"size": torch.tensor(toy.sizes[k])} for k in clients}
            return {k: message.replace({"told": told[k]}) for k, message in messages.items()}

        def carry(self, view: Any, message: Any) -> Any:
            seen.append((view.examples, int(message.groups["told"]["size"])))
            return super().carry(view, message)

    toy = Toy(method_class=Told, sizes=(3, 13, 1, 9))
    stage = toy.method.stages(0)[0]
    sent = stage.broadcast(toy.initial(), 0, range(4))
    toy.trainer.run(stage, 0, sent)
    assert seen == [(n, n) for n in (13, 9, 3, 1)]


def spoil(monkeypatch: pytest.MonkeyPatch, toy: Toy, client: int, but: Any = lambda: False) -> None:
    """The labels of a client count NaN times, unless ``but`` says otherwise."""
    data = toy.trainer.data
    labelled, own = data.batch, torch.from_numpy(data.clients[client])

    def broken(index: Tensor, weights: dict[str, Tensor]) -> Any:
        batch = labelled(index, weights)
        bad = torch.isin(index, own).unsqueeze(-1) & (not but())
        return batch._replace(counted=torch.where(bad, torch.nan, batch.counted))

    monkeypatch.setattr(data, "batch", broken)


@pytest.mark.parametrize("mode", [ComputeMode(), FIXED], ids=["exact", "fixed"])
@pytest.mark.parametrize("name", ["fedavg", "fedharmony"])
def test_a_client_that_diverges_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, mode: ComputeMode, name: str
) -> None:
    half = FederationSettings(max_failures=0.5)
    toy = Toy(name, sizes=(5, 5, 4), rounds=1, mode=mode, federation=half)
    spoil(monkeypatch, toy, client=1)
    _, events = toy.run()
    assert events[0]["reported"] == [0, 2]
    (failure,) = events[0]["left_out"]
    assert failure["client"] == 1
    assert "holds a value that is not finite" in failure["reason"]


def spoil_pass(monkeypatch: pytest.MonkeyPatch, toy: Toy) -> None:
    """What the third client of a stack finds out about its data is not finite."""
    sweep = toy.trainer.sweeper.sweep

    def broken(*arguments: Any) -> dict[str, Tensor]:
        found = sweep(*arguments)
        found["upper"][2, 1] = torch.inf
        return found

    monkeypatch.setattr(toy.trainer.sweeper, "sweep", broken)


@pytest.mark.parametrize("mode", [ComputeMode(), FIXED], ids=["exact", "fixed"])
def test_a_pass_that_diverges_is_left_out_by_name(
    monkeypatch: pytest.MonkeyPatch, mode: ComputeMode
) -> None:
    """Parameters are finite, what a client found out about its data is not."""
    half = FederationSettings(max_failures=0.5)
    config = {"measured": "after"}
    toy = Toy("fedharmony", config, sizes=(5, 5, 4), rounds=1, mode=mode, federation=half)
    spoil_pass(monkeypatch, toy)
    _, events = toy.run()
    assert events[0]["reported"] == [0, 1]
    assert "correlation/upper holds a value" in events[0]["left_out"][0]["reason"]


# -- the fast path fails ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "fedcurv", "fedharmony"])
def test_a_client_that_only_the_fast_path_spoils_is_trained_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """NaN in half precision, not on the plain path: the client is kept, named, and its model is
    that of a run in full precision.
    """
    toy = Toy(name, sizes=(5, 5, 4), rounds=1, mode=ComputeMode(half=True, fixed=True))
    plain = toy.trainer._plain[0]
    state = toy.initial()
    inside: list[bool] = []
    train = plain.train
    monkeypatch.setattr(
        plain, "train", lambda *a: (inside.append(True), train(*a), inside.clear())[1]
    )
    spoil(monkeypatch, toy, client=1, but=lambda: bool(inside))
    with caplog.at_level(logging.WARNING, "fedharmony"):
        _, events = toy.run()
    assert events[0]["fallbacks"] == {"plain": 1}
    assert events[0]["reported"] == [0, 1, 2]
    assert not events[0]["left_out"]
    assert "Client 1, round 1: values that are not finite came from the fast path" in caplog.text
    stage = toy.method.stages(0)[-1]
    sent = {1: stage.broadcast(state, 0, [1])[1]}
    (again,) = toy.transport.exchange(stage, 0, sent)
    (full,) = Toy(name, sizes=(5, 5, 4)).transport.exchange(stage, 0, sent)
    assert largest_difference(*(Record({PARAMS: r.record.get(PARAMS)}) for r in (again, full))) == 0


def test_a_pass_that_only_the_fast_path_spoils_is_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The model is finite, what the pass over the data found is not."""
    mode = ComputeMode(half=True, fixed=True)
    toy = Toy("fedharmony", {"measured": "after"}, sizes=(5, 5, 4), rounds=1, mode=mode)
    spoil_pass(monkeypatch, toy)
    _, events = toy.run()
    assert events[0]["fallbacks"] == {"plain": 1}
    assert events[0]["reported"] == [0, 1, 2]


def test_after_a_few_saved_clients_the_run_goes_on_without_the_fast_path(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Client 0 is spoiled in each of six rounds: saved in four, then nothing is fast any more."""
    toy = Toy(sizes=(5, 5, 4), rounds=6, mode=ComputeMode(half=True, fixed=True))
    fast = toy.trainer.trainer
    spoil(monkeypatch, toy, client=0, but=lambda: toy.trainer.trainer is not fast or inside)
    inside: list[bool] = []
    plain = toy.trainer._plain[0]
    train = plain.train
    monkeypatch.setattr(
        plain, "train", lambda *a: (inside.append(True), train(*a), inside.clear())[1]
    )
    with caplog.at_level(logging.WARNING, "fedharmony"):
        _, events = toy.run()
    causes = [{"plain": 1}] * 3 + [{"plain": 1, "slow": 1}] + [{}] * 2
    assert [e["fallbacks"] for e in events] == causes
    assert all(e["reported"] == [0, 1, 2] for e in events)
    assert "The rest of the run is neither compiled nor recorded" in caplog.text
    assert toy.trainer.mode == ComputeMode()


def test_a_client_that_both_paths_spoil_is_lost_and_remembers_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    half = FederationSettings(max_failures=0.5)
    mode = ComputeMode(half=True, fixed=True)
    toy = Toy("fedcurv", sizes=(5, 5, 4), rounds=1, mode=mode, federation=half)
    spoil(monkeypatch, toy, client=2)
    _, events = toy.run()
    assert [f["client"] for f in events[0]["left_out"]] == [2]
    assert events[0]["fallbacks"] == {}
    kept = [bool(toy.trainer.data.memory.read(k, before=1)) for k in range(3)]
    assert kept == [True, True, False]


def cramped(toy: Toy) -> list[list[int]]:
    """Give the toy a device that holds two clients; returns what will be tried."""
    run, tried = toy.trainer.run, list[list[int]]()

    def run_two(stage: Any, round: int, messages: Any, *rest: Any) -> Any:
        tried.append(list(messages))
        if len(messages) > 2:
            raise torch.OutOfMemoryError("full")
        return run(stage, round, messages, *rest)

    toy.trainer.run = run_two  # type: ignore[method-assign]
    return tried


def test_out_of_memory_halves_the_stack(caplog: pytest.LogCaptureFixture) -> None:
    toy = Toy(sizes=(5, 5, 5, 5, 5), rounds=1)
    tried = cramped(toy)
    with caplog.at_level(logging.WARNING, "fedharmony"):
        _, events = toy.run()
    assert list(map(len, tried)) == [5, 3, 2, 1, 2]
    assert events[0]["reported"] == [0, 1, 2, 3, 4]
    assert not events[0]["left_out"]
    assert "do not fit" in caplog.text
    assert events[0]["fallbacks"] == {"memory": 2}


def test_stacks_that_are_still_to_come_fit_after_one_that_did_not() -> None:
    """Twelve clients in stacks of 4, where the device holds 2: only the first stack fails."""
    toy = Toy(sizes=(5,) * 12, rounds=1, stack=4)
    tried = cramped(toy)
    _, events = toy.run()
    assert tried == [[0, 1, 2, 3], *([k, k + 1] for k in range(0, 12, 2))]
    assert events[0]["reported"] == list(range(12))


def test_a_stack_that_failed_holds_no_memory_when_its_parts_are_tried() -> None:
    """An error keeps alive what its functions held: on a GPU nothing fitted any more after it."""
    toy = Toy(sizes=(5, 5, 5), rounds=1)
    run, held = toy.trainer.run, weakref.WeakSet[Tensor]()
    alive: list[int] = []

    def cramped(stage: Any, round: int, messages: Any, *rest: Any) -> Any:
        alive.append(len(held))
        activations = torch.zeros(3)
        held.add(activations)
        if len(messages) > 1:
            raise torch.OutOfMemoryError("full")
        return run(stage, round, messages, *rest)

    toy.trainer.run = cramped  # type: ignore[method-assign]
    toy.run()
    assert alive == [0] * 5  # stacks of 3, 2, 1, 1 and 1


def test_lanes_that_are_given_up_are_gone_at_once() -> None:
    """So are those of a run that is over: nothing waits for the garbage collector.

    On a GPU 23 GB of lanes were waiting for it when one client alone did not fit any more.
    """
    there = weakref.WeakSet[Lanes]()
    gc.disable()
    try:
        for release in (True, False):
            toy = Toy(sizes=(5, 5, 5), rounds=1, mode=FIXED)
            toy.run()
            lanes = toy.trainer.trainer._lanes
            assert lanes is not None
            there.add(lanes)
            del lanes
            if release:
                toy.trainer.release()
            del toy
            assert not there
    finally:
        gc.enable()


def test_a_client_that_does_not_fit_stops_the_run() -> None:
    """It is the device that is full; without the client the result would be another one."""
    toy = Toy(sizes=(5, 5), rounds=1, federation=FederationSettings(max_failures=1.0))

    def full(stage: Any, round: int, messages: Any, *rest: Any) -> Any:
        raise torch.OutOfMemoryError("20 MB are free")

    toy.trainer.run = full  # type: ignore[method-assign]
    with pytest.raises(DeviceMemoryError, match=r"client 0 alone .* \(20 MB are free\)"):
        toy.run()


# -- lanes and optimisers --------------------------------------------------------------------------


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("optimiser", ["adam", "sgd", "momentum"])
def test_the_optimiser_is_torch_s(optimiser: Any, decay: float) -> None:
    """Five steps of ``torch.optim`` and of ours, in float64."""
    settings = TrainSettings(optimiser=optimiser, lr=0.03, weight_decay=decay)
    make: Any = {
        "adam": torch.optim.Adam,
        "sgd": torch.optim.SGD,
        "momentum": functools.partial(torch.optim.SGD, momentum=settings.momentum),
    }[optimiser]
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    reference = start.clone().requires_grad_()
    theirs = make([reference], lr=0.03, weight_decay=decay)
    written = start.clone()
    moments = [torch.zeros_like(start) for _ in range(MOMENTS[optimiser])]
    copy = torch.zeros(4, 3, dtype=torch.bfloat16)
    step = adam_step if optimiser == "adam" else sgd_step
    for t in range(5):
        gradient = torch.randn(4, 3, generator=generator, dtype=torch.float64)
        reference.grad = gradient.clone()
        theirs.step()
        clock = torch.tensor(t + 1, dtype=torch.float64)
        corrections = step_factors(clock, torch.ones_like(clock), torch.float64)
        step(written, gradient, moments, copy, corrections, settings)
    torch.testing.assert_close(written, reference.detach(), rtol=0, atol=1e-12)
    assert torch.equal(copy, written.bfloat16())


def test_lanes_save_clients_that_are_done() -> None:
    """Two lanes, the second done after a step: a further step of both changes only the first."""
    received = {"b": torch.zeros(2, 3), "w": torch.ones(2, 2, 2)}
    settings = TrainSettings(optimiser="sgd", lr=1.0)
    lanes = Lanes(received, 2, settings, frozenset({"w"}))
    lanes.load(received)
    ones = {name: torch.ones_like(t) for name, t in received.items()}
    lanes.step(ones)
    lanes.losses += 1
    lanes.save(1, 2)
    lanes.step(ones)
    lanes.losses += 1
    done = lanes.result(2)
    assert [float(t["b"][0]) for t in done.each] == [-2.0, -1.0]
    assert [float(t["w"][0, 1]) for t in done.each] == [-1.0, 0.0]
    assert done.losses.tolist() == [2.0, 1.0]
    assert torch.equal(done.params["w"][1], done.each[1]["w"])
    assert lanes.leaves(2)["w"].dtype == torch.bfloat16
    assert torch.equal(lanes.leaves(2)["w"].float(), lanes.params["w"])  # the copy follows


@pytest.mark.parametrize("optimiser", ["adam", "momentum"])
def test_lanes_move_each_parameter_by_itself(optimiser: Any) -> None:
    """Lengths 3, 5 and 8 leave gaps between parameters that lie side by side in one block.

    The reference moves each parameter alone, by the optimiser's step on its own tensor.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = {"a": (3,), "w": (4, 6), "b": (5,), "c": (2, 4), "d": ()}
    received = {
        n: torch.randn(2, *shape, generator=generator, dtype=torch.float64)
        for n, shape in shapes.items()
    }
    settings = TrainSettings(optimiser=optimiser, lr=0.1)
    lanes = Lanes(received, 3, settings, frozenset({"w"}), True, "aot_eager")
    lanes.load(received)
    alone = {n: t.clone() for n, t in received.items()}
    kept = {
        n: [torch.zeros_like(t) for _ in range(MOMENTS[optimiser])] for n, t in received.items()
    }
    move = adam_step if optimiser == "adam" else sgd_step
    for t, width in enumerate((2, 2, 1), start=1):
        gradients = {
            n: torch.randn(width, *shape, generator=generator, dtype=torch.float64)
            for n, shape in shapes.items()
        }
        lanes.step(gradients)
        corrections = step_factors(
            torch.tensor(t).double(), torch.tensor(1.0).double(), torch.float64
        )
        for n, gradient in gradients.items():
            moments = [m[:width] for m in kept[n]]
            move(alone[n][:width], gradient, moments, None, corrections, settings)
    for name in shapes:
        torch.testing.assert_close(lanes.params[name][:2], alone[name], rtol=0, atol=1e-12)
    assert torch.equal(lanes.leaves(2)["w"], lanes.params["w"][:2].bfloat16())
    (one, _), layout = lanes.result(2).each, lanes.layout
    again = Lanes(received, 3, settings, frozenset({"w"}))
    again.load_row(one.row, 2)  # type: ignore[attr-defined]
    assert again.layout == layout
    assert all(torch.equal(again.params[n][1], one[n]) for n in shapes)


def test_losses_and_norms_are_taken_in_full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision is for products: losses see float32 outputs, limits float32 gradients."""
    seen: set[tuple[str, torch.dtype]] = set()

    class Watched(methods["fedavg"]):  # type: ignore[misc]
        max_grad_norm = 1.0

        def loss(self, outputs: Tensor, batch: Any, message: Any, carry: Any) -> Any:
            seen.add(("outputs", outputs.dtype))
            return super().loss(outputs, batch, message, carry)

    def watch(gradients: list[Tensor], largest: float) -> None:
        seen.update(("gradient", g.dtype) for g in gradients)

    monkeypatch.setattr("fedharmony.engine.step.clip_gradients", watch)
    Toy(method_class=Watched, rounds=1, mode=ComputeMode(half=True, fixed=True)).run()
    assert seen == {("outputs", torch.float32), ("gradient", torch.float32)}


@pytest.mark.parametrize("half", [False, True])
def test_images_come_in_the_precision_of_products(
    monkeypatch: pytest.MonkeyPatch, half: bool
) -> None:
    """In training and in the pass after it: what products would round them to anyway."""
    seen: set[tuple[bool, torch.dtype]] = set()
    apply = Model.apply

    def watched(self: Model, params: Any, images: Tensor, *inputs: Any) -> Tensor:
        seen.add((torch.is_grad_enabled(), images.dtype))
        return apply(self, params, images, *inputs)

    monkeypatch.setattr(Model, "apply", watched)
    config = {"measured": "after"}
    Toy("fedharmony", config, rounds=1, mode=ComputeMode(half=half, fixed=True)).run()
    assert seen == {(grad, torch.bfloat16 if half else torch.float32) for grad in (False, True)}


def test_a_parameter_without_gradient_stays() -> None:
    """Like torch's optimisers, which skip it: no decay, no momentum."""
    received = {name: torch.ones(1, 2) for name in ("a", "b", "c")}
    settings = TrainSettings(optimiser="adam", lr=0.1, weight_decay=0.5)
    lanes = Lanes(received, 1, settings)
    lanes.load(received)
    lanes.step({"a": torch.ones(1, 2), "c": torch.ones(1, 2)})
    assert lanes.params["b"].tolist() == [[1.0, 1.0]]
    assert lanes.params["a"].tolist() == lanes.params["c"].tolist() != [[1.0, 1.0]]


def test_the_mean_of_packed_replies_has_the_same_bits() -> None:
    """Folded as rows, folded by name, and packed replies followed by plain ones."""
    layout = Layout.of({"w": (3, 2), "b": (5,)})
    rows = [torch.randn(layout.length, generator=torch.Generator().manual_seed(k)) for k in (1, 2)]
    packed = [Packed(layout, row) for row in rows]
    plain = [dict(p) for p in packed]
    results = []
    for replies in (packed, plain, [packed[0], plain[1]], [plain[0], packed[1]]):
        mean = RunningMean()
        for weight, reply in zip((3.0, 1.0), replies, strict=True):
            mean.add(reply, weight)
        results.append(mean.result())
    assert isinstance(results[0], Packed)
    for other in results[1:]:
        assert all(torch.equal(results[0][n], other[n]) for n in ("w", "b"))


def test_a_program_keeps_its_inputs_in_place() -> None:
    """The second call must read the second inputs, from where the first ones were."""
    seen: list[tuple[int, list[int]]] = []

    def step(given: StepInput) -> None:
        seen.append((given.images.data_ptr(), given.images.tolist()))

    program = Program(step)
    for number in (1, 2):
        program(StepInput(torch.tensor([number]), None, {}, {}))
    assert [values for _, values in seen] == [[1], [2]]
    assert seen[0][0] == seen[1][0]


def test_a_recording_that_fails_does_not_spoil_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory of a broken recording is given up; seen on a GPU: every later one failed as well."""
    pools = iter(range(9))
    used: list[int] = []

    @contextlib.contextmanager
    def graph(graph: Any, pool: int) -> Any:
        if pool in used:
            raise RuntimeError("already recording")
        used.append(pool)
        yield
        used.remove(pool)

    record_on(monkeypatch, graph, lambda: next(pools))
    recorder = Recorder()

    def broken() -> None:
        raise RuntimeError("cannot be recorded")

    recorder.record(lambda: None)
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        recorder.record(broken)
    done: list[int] = []
    recorder.record(lambda: done.append(1))
    assert done == [1]


def record_on(
    monkeypatch: pytest.MonkeyPatch,
    graph: Any,
    pool: Any,
    stream: list[str] | None = None,
) -> None:
    """Stand-ins for what recording asks of torch; the last of ``stream`` is the current one."""
    streams = ["main"] if stream is None else stream
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", pool)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", object)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: streams[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", streams.append)


def test_a_recording_that_fails_leaves_the_stream_as_it_was(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Torch before 2.15 leaves its own stream current when a recording cannot begin or end."""
    streams = ["main"]

    class Graph:
        def __init__(self, graph: Any, pool: int) -> None: ...

        def __enter__(self) -> None:
            streams.append("recording")
            raise RuntimeError("cannot begin")

        def __exit__(self, *error: object) -> None: ...

    record_on(monkeypatch, Graph, lambda: 0, streams)
    with pytest.raises(RuntimeError, match="cannot begin"):
        Recorder().record(lambda: None)
    assert streams[-1] == "main"


def test_a_step_that_cannot_be_recorded_is_called_each_time() -> None:
    called: list[int] = []

    def refused(work: Any) -> Any:
        raise RuntimeError("no graphs here")

    recorder = SimpleNamespace(record=refused)
    program = Program(lambda given: called.append(1), recorder)  # type: ignore[arg-type]
    for _ in range(3):
        program(StepInput(torch.zeros(1, 1), None, {}, {}))
    assert len(called) == 3
    assert fallbacks.drain() == {"graphs": 1}


def test_given_up_programs_take_their_recorder_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """The memory of its graphs is gone: seen on a GPU, the next recording failed."""
    pools = iter(range(9))
    record_on(monkeypatch, None, lambda: next(pools))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    toy = Toy(sizes=(4,), rounds=1, mode=ComputeMode(graphs=True))
    before = toy.trainer.trainer._recorder
    toy.trainer.release()
    assert toy.trainer.trainer._recorder is not before


# -- compiled pieces -------------------------------------------------------------------------------


def small_vit(depth: int = 3) -> Model:
    vit = ViT(ViT.Config(width=16, depth=depth, heads=2, patch=4), InputSpec(3, 8, 8))
    return Model(vit, LinearHead(vit.width, 5))


def clients(model: Model, count: int) -> dict[str, Tensor]:
    return stack([model.init(torch.Generator().manual_seed(k)) for k in range(count)])


@pytest.mark.parametrize("gpu", [False, True], ids=["cpu", "gpu"])
def test_compiled_pieces_compute_the_same(monkeypatch: pytest.MonkeyPatch, gpu: bool) -> None:
    """Forward and gradients, for the first shape and for others; with the code of a GPU, too."""
    if gpu:
        for module in ("base", "vit"):
            monkeypatch.setattr(
                f"fedharmony.models.{module}.adds_bias_apart", lambda weight: len(weight) > 1
            )
        monkeypatch.setattr("fedharmony.models.base.sums_by_image", lambda x: True)
    model = small_vit()
    compiled = model.compiled(lambda piece: CompiledPiece(piece, "aot_eager"))
    assert compiled.backbone is not model.backbone
    for width, rows in ((4, 2), (3, 2), (2, 5), (1, 3), (1, 4), (4, 1), (3, 1), (1, 1)):
        params = {n: t.requires_grad_() for n, t in clients(model, width).items()}
        images = torch.randn(width, rows, 3, 8, 8, generator=torch.Generator().manual_seed(9))
        found = []
        for made in (model, compiled):
            outputs = made.apply(params, images)
            found.append([outputs, *torch.autograd.grad(outputs.square().sum(), params.values())])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_one_compilation_serves_all_blocks_and_shapes() -> None:
    """Four blocks: one variant for the first shape, one for any other with several clients and
    images; one for a single client, one for single images.
    """
    made: list[int] = []

    def backend(graph: Any, inputs: Any) -> Any:
        made.append(1)
        return graph.forward

    model = small_vit(depth=4)
    model.backbone._block = CompiledPiece(block, backend)  # type: ignore[attr-defined]
    shapes = (
        (4, 2, 1),
        (3, 5, 2),
        (2, 7, 2),
        (4, 2, 2),
        (1, 6, 3),
        (6, 1, 4),
        (3, 1, 4),
        (1, 6, 4),
    )
    for width, rows, variants in shapes:
        images = torch.zeros(width, rows, 3, 8, 8)
        with torch.no_grad():
            model.backbone.tokens(clients(model, width), images)
        assert len(made) == variants


def test_evaluating_one_model_first_does_not_cost_the_first_stack_its_own_code() -> None:
    """Sizes are constants for the first shape of one client and for the first of several."""
    free: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        free.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return graph.forward

    model = small_vit()
    model.backbone._block = CompiledPiece(block, backend)  # type: ignore[attr-defined]
    for width, rows in ((1, 6), (4, 3), (5, 3)):
        with torch.no_grad():
            model.backbone.tokens(clients(model, width), torch.zeros(width, rows, 3, 8, 8))
    assert free == [False, False, True]


def test_another_model_does_not_free_the_numbers_of_the_first() -> None:
    """Heads, widths and patches of a second model are constants of its code, too."""
    free: list[bool] = []

    def backend(graph: Any, inputs: Any) -> Any:
        free.append(any(isinstance(value, torch.SymInt) for value in inputs))
        return graph.forward

    for heads, width in ((2, 16), (4, 32)):
        vit = ViT(ViT.Config(width=width, depth=2, heads=heads, patch=4), InputSpec(3, 8, 8))
        vit._block = CompiledPiece(block, backend)
        model = Model(vit, LinearHead(width, 5))
        with torch.no_grad():
            vit.tokens(clients(model, 3), torch.zeros(3, 2, 3, 8, 8))
    assert free == [False, False]


def test_a_piece_that_cannot_be_compiled_runs_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    def double(own: Any, x: Tensor) -> Tensor:
        return x * 2

    piece = CompiledPiece(double, broken)
    with caplog.at_level(logging.WARNING, "fedharmony"):
        assert piece({}, torch.ones(2, 1)).tolist() == [[2.0], [2.0]]
        assert piece({}, torch.ones(2, 1)).tolist() == [[2.0], [2.0]]
    assert caplog.text.count("Compiling failed") == 1


def test_deterministic_runs_time_no_sums_in_any_compiled_function(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not in the first function, nor in its gradient, nor in the next one.

    Timed sums made the bits of compiled runs differ from process to process. The compiler's own
    setting is not enough: Dynamo sets it back when it is done with the first function.
    """
    inductor = importlib.import_module("torch._inductor.compile_fx")
    compile, settings = inductor.compile_fx, load_settings("demo", ["engine.deterministic=true"])

    def generate(graph: Any, inputs: Any, **options: Any) -> Any:
        told.append(inductor.config.deterministic)
        return make_boxed_func(graph.forward)

    def compile_fx(model: Any, inputs: Any, inner_compile: Any = generate, **options: Any) -> Any:
        return compile(model, inputs, inner_compile=inner_compile, **options)

    monkeypatch.setattr(inductor, "compile_fx", compile_fx)
    # What such a run sets for its process, put back after the test.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    told = list[bool]()
    try:
        switch_torch(settings.engine)
        for function in (lambda x: x.softmax(-1), lambda x: x.tanh().sum()):
            x = torch.rand(3, 4, requires_grad=True)
            Compiled(function)(x).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert told == [True] * 4


def test_the_optimisers_pass_knows_the_length_of_its_rows() -> None:
    """Code for memory of any length was half as fast on a GPU.

    Flat memory is shown as rows of as many numbers as divide its length, up to 1,024: two clients'
    matrix of 96 × 64 = 6 · 1,024 numbers as 12 rows. Another number of clients is no reason to
    compile again.
    """
    shapes: list[list[tuple[int, ...]]] = []

    def spy(graph: Any, inputs: Any) -> Any:
        sizes = [
            tuple(v.meta["example_value"].shape)
            for v in graph.graph.find_nodes(op="placeholder")
            if isinstance(v.meta.get("example_value"), Tensor)
        ]
        shapes.append(sizes)
        return graph.forward

    received = {"m.weight": torch.rand(4, 96, 64), "b": torch.rand(4, 24), "p": torch.rand(4, 9008)}
    lanes = Lanes(received, 4, TrainSettings(), frozenset({"m.weight"}), True, spy)  # type: ignore[arg-type]
    plain = Lanes(received, 4, TrainSettings(), frozenset({"m.weight"}))
    for one in (lanes, plain):
        one.load(received)
        for width in (4, 3, 2):
            one.step({n: t[:width] + 1 for n, t in received.items()})
    for name, tensor in plain.params.items():
        assert (lanes.params[name] - tensor).abs().max() < 1e-8  # of steps of 3e-4
    lengths = {size[1] for sizes in shapes for size in sizes if len(size) == 2}
    assert lengths == {1024, 16, 8}  # 9,008 = 16 · 563
    assert len(shapes) == 3
    read = {name: leaf.dtype for name, leaf in lanes.leaves(2).items()}  # large, but not halved: p
    assert read == {"m.weight": torch.bfloat16, "b": torch.float32, "p": torch.float32}


def test_an_optimiser_that_cannot_be_compiled_runs_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A run on a GPU without Triton goes on: the fallback holds for every compiled part."""

    def broken(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no compiler here")

    plain, _ = Toy(dtype=torch.float64, rounds=1).run()
    mode = ComputeMode(compile=True, backend=broken)  # type: ignore[arg-type]
    with caplog.at_level(logging.WARNING, "fedharmony"):
        other, events = Toy(dtype=torch.float64, rounds=1, mode=mode).run()
    assert not events[0]["left_out"]
    assert "Compiling failed" in caplog.text
    assert caplog.text.count("Traceback") == 1  # once per cause
    assert events[0]["fallbacks"] == {"compile": caplog.text.count("Compiling failed")}
    assert largest_difference(plain, other) < 1e-9


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks for one
@pytest.mark.parametrize("name", methods.names())
def test_compiled_training_agrees_for_every_method(
    caplog: pytest.LogCaptureFixture, name: str
) -> None:
    """The optimiser's compiled pass, the images' and few shapes; a toy has no pieces of its own.

    Clients have several batches, so that what a loss carries from step to step matters.
    """
    options: dict[str, Any] = {"sizes": (13, 9, 6), "rounds": 2, "dtype": torch.float64}
    plain, _ = Toy(name, **options).run()
    with caplog.at_level(logging.WARNING, "fedharmony"):
        compiled, _ = Toy(
            name, **options, mode=ComputeMode(compile=True, backend="aot_eager")
        ).run()
    assert largest_difference(plain, compiled) < 1e-9
    assert "Compiling failed" not in caplog.text


def test_the_compiler_gets_the_barrier_that_it_lacks() -> None:
    """A stand-in for Inductor's kernels that reads back what an earlier loop stored.

    Torch before 2.14 writes such a load as it is. With the barrier in front of it, and of no other.
    """

    class Known:
        def __init__(self) -> None:
            self.invalidated_stores = {"stored"}

    class Kernel:
        def __init__(self) -> None:
            self.cse, self.lines = Known(), list[str]()

        def writeline(self, line: str) -> None:
            self.lines.append(line)

        def get_load_buffer(self, indexing: Any) -> Any:
            return self

        def load(self, name: str, index: Any) -> str:
            self.get_load_buffer(index).writeline(f"load {name}")
            return name

    assert barrier.add_barrier(Kernel, Known)
    assert barrier.add_barrier(Kernel, Known)  # once is enough
    kernel = Kernel()
    assert [kernel.load(name, 0) for name in ("other", "stored", "other")][1] == "stored"
    assert kernel.lines == ["load other", "tl.debug_barrier()", "load stored", "load other"]

    class Unknown:
        pass

    assert not barrier.add_barrier(Unknown, Known)


def test_code_without_the_barrier_is_not_found_on_disk() -> None:
    """By a tag beside a user's own; where there are no tags, the cache is left out."""
    compiler, inductor = SimpleNamespace(cache_key_tag="mine"), SimpleNamespace(fx_graph_cache=True)
    barrier.keep_apart(compiler, inductor)
    assert compiler.cache_key_tag == "mine with barrier"
    assert inductor.fx_graph_cache
    barrier.keep_apart(SimpleNamespace(), inductor)
    assert not inductor.fx_graph_cache


def test_the_barrier_fits_this_torch() -> None:
    """Inductor as it is installed has the barrier, or takes ours."""
    assert barrier.compiler_is_safe()


# -- on a GPU --------------------------------------------------------------------------------------

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_cuda
@pytest.mark.parametrize("name", methods.names())
def test_recorded_steps_on_a_gpu_train_like_a_cpu(name: str) -> None:
    """CUDA graphs, float64, unequal clients: two devices, the same model."""
    options: dict[str, Any] = {"sizes": SIZES, "dtype": torch.float64, "rounds": 3}
    here, _ = Toy(name, **options).run()
    there, events = Toy(name, **options, device="cuda", mode=ComputeMode(graphs=True)).run()
    assert not any(event["left_out"] for event in events)
    models = [Record({PARAMS: state.get(PARAMS)}) for state in (here, there)]
    assert largest_difference(*models) < 1e-6


# -- settings --------------------------------------------------------------------------------------


def test_a_gpu_that_torch_does_not_see_is_not_passed_over_in_silence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("fedharmony.experiments.machine.GPU", tmp_path)
    for hidden, noted in ((None, {"device": 1}), ("", {}), ("0", {"device": 1})):
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        if hidden is not None:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
        assert choose_device("auto") == choose_device("cpu") == torch.device("cpu")
        assert fallbacks.drain() == noted


def test_on_a_cpu_nothing_is_rounded_compiled_or_recorded_unless_asked() -> None:
    cpu = torch.device("cpu")
    assert choose_mode(EngineSettings(), cpu, 10**6, 10**12) == ComputeMode()
    asked = choose_mode(EngineSettings(precision="bfloat16", compile=True), cpu, 10, 10)
    assert asked == ComputeMode(half=True, compile=True)
    with pytest.raises(ConfigError, match=r"engine\.graphs = true needs a CUDA device"):
        choose_mode(EngineSettings(graphs=True), cpu, 10, 10)


def test_a_run_on_a_gpu_is_compiled_where_that_pays_and_is_safe(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """ViT-Ti at 144 pixels hands on 82 · 192 · 12 numbers: 17 µs an image; 25 s are 1.5 million."""
    gpu, numbers = torch.device("cuda"), 82 * 192 * 12
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    with caplog.at_level(logging.INFO, "fedharmony"):
        short, long = (choose_mode(EngineSettings(), gpu, numbers, n) for n in (10**6, 2 * 10**6))
    assert short == ComputeMode(half=True, graphs=True)
    assert long == ComputeMode(half=True, graphs=True, compile=True)
    assert "is not compiled: it takes about 25 s and would spare about 17 s" in caplog.text
    assert choose_mode(EngineSettings(compile=True), gpu, numbers, 1).compile
    assert not choose_mode(EngineSettings(compile=False), gpu, numbers, 10**9).compile
    assert not choose_mode(EngineSettings(), gpu, 0, 10**12).compile  # nothing to compile
    monkeypatch.setattr("fedharmony.experiments.machine.compiler_is_safe", lambda: False)
    assert not choose_mode(EngineSettings(), gpu, numbers, 10**9).compile
    assert fallbacks.drain() == {"compile": 1}
    with pytest.raises(ConfigError, match=r"torch 2\.14 or later"):
        choose_mode(EngineSettings(compile=True), gpu, numbers, 10**9)


def test_stacks_of_a_run_follow_the_settings() -> None:
    small = ("data.train=60", "data.test=20", "split.clients=3", "engine.device=cpu")
    for given, full, widest in (
        ((), 16, 128),
        (("engine.stack=5",), 5, None),
    ):
        rule = assemble(load_settings("demo", [*small, *given])).stack_rule()
        assert (rule.full, rule.widest) == (full, widest)


def test_large_models_train_fewer_at_once_on_a_cpu() -> None:
    """Five copies of 86 M float32 weights are 1.7 GB: two clients in 4 GiB, not sixteen."""
    vit = models["vit_base_patch16"](models["vit_base_patch16"].Config(), InputSpec(3, 32, 32))
    model = Model(vit, LinearHead(vit.width, 5))
    weights = {n: torch.empty(s, device="meta") for n, s in model.shapes().items()}
    trial = RoomTest(model, weights, ComputeMode(), torch.device("cpu"), 16, (3, 32, 32))
    assert trial.rule() == StackRule(2, 16, 2)


@pytest.mark.parametrize(
    ("free", "total", "part", "rule"),
    [
        (10**11, 10**11, 1.0, StackRule(48, 16, 384, common_bits=1)),
        (9 * 10**9, 10**10, 1.0, StackRule(44, 16, 266, common_bits=1)),
        (8 * 10**9, 10**11, 1.0, StackRule(44, 16, 266, common_bits=1)),
        (9 * 10**10, 10**11, 0.1, StackRule(44, 16, 266, common_bits=1)),
    ],
)
def test_widths_on_a_gpu_follow_from_its_memory(
    monkeypatch: pytest.MonkeyPatch, free: int, total: int, part: float, rule: StackRule
) -> None:
    """A million weights, five copies: 20 MB a client, and 10 MB an image; 0.8 of the memory.

    Of 80 GB, 444 clients with 16 images fit: 48 are enough, and eight times as many with one image
    each. Of 8 GB, 44 fit, and 266 with one image (30 MB): whether the GPU has no more, whatever is
    free of it beyond that, or others have taken the rest, or this process may take a tenth.
    """
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, total))
    monkeypatch.setattr(RoomTest, "_bytes_per_image", lambda self: 10**7)
    params = {"w": torch.zeros(10**6)}
    gpu, mode = torch.device("cuda"), ComputeMode(graphs=True, share=part)
    assert RoomTest(small_vit(), params, mode, gpu, 16, (3, 8, 8)).rule() == rule


def test_a_run_is_kept_to_its_share_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 10 · 2³⁰ bytes, ½ · 10 − 600/1024 GiB = 4.414 GiB; of a tenth, half of it at least.

    Devices go to torch by number: it refuses "cuda" itself here.
    """
    bounds: list[float] = []
    devices: list[int | None] = []

    def bound(part: float, device: int | None) -> None:
        bounds.append(part)
        devices.append(device)

    room = SimpleNamespace(total_memory=10 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: room)
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", bound)
    for name, share in (("cuda", 1.0), ("cuda:1", 0.5), ("cuda", 0.1), ("cpu", 0.5)):
        keep_to_share(torch.device(name), share)
    assert bounds == pytest.approx([1.0, 0.44140625, 0.05])
    assert devices == [None, 1, None]


def test_a_share_is_passed_on_to_whoever_plans_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bound of the process and, on a GPU, to the mode; the plain path keeps it."""
    asked: list[tuple[str, float]] = []
    monkeypatch.setattr(
        build, "keep_to_share", lambda device, part: asked.append((device.type, part))
    )
    small = ["data.train=60", "data.test=12", "split.clients=3", "engine.device=cpu"]
    for more in ([], ["engine.gpu_share=0.25"]):
        assert assemble(load_settings("demo", [*small, *more])).mode.share == 1.0
    assert asked == [("cpu", 1.0), ("cpu", 0.25)]
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
    mode = choose_mode(EngineSettings(gpu_share=0.25), torch.device("cuda"), 0, 1)
    assert mode.share == mode.made_plain().share == mode.exact().share == 0.25
    assert mode.made_plain().plain


def test_a_device_that_is_full_while_the_server_averages_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is told as what it is, with what to do; finished rounds are kept and the run goes on."""
    small = ["data.train=60", "data.test=12", "split.clients=3", "run.rounds=2", "train.epochs=1"]
    settings = load_settings("demo", [*small, "run.method=fedavg", "engine.device=cpu"])
    whole = run.start(settings, RunFolder(tmp_path / "whole"), lambda event: None)
    folder, means, calls = RunFolder(tmp_path / "full"), ModelMean.means, itertools.count()

    def full(mean: ModelMean, exact: bool = False) -> Any:
        if next(calls) == 1:
            raise torch.OutOfMemoryError("44 MB are not free")
        return means(mean, exact)

    monkeypatch.setattr(ModelMean, "means", full)
    with pytest.raises(DeviceMemoryError, match=r"\(44 MB are not free\).* and 'resume'"):
        run.start(settings, folder, lambda event: None)
    events = [json.loads(line) for line in folder.events.read_text().splitlines()]
    assert (events[-1]["event"], events[-1]["status"]) == ("finish", "failed")
    assert sum(event["event"] == "round" for event in events) == 1
    again = run.resume(folder, lambda event: None)
    assert again["state_sha256"] == whole["state_sha256"]


def test_a_model_is_evaluated_alike_whether_clients_or_a_file_gave_it() -> None:
    """Clients' models lie transposed in one row; a product of that has other last bits."""
    small = ("data.train=60", "data.test=12", "split.clients=3", "engine.device=cpu")
    shape = ("model.width=8", "model.depth=1", "model.heads=2", "model.patch=16")
    assembly = assemble(load_settings("demo", [*small, *shape]))
    state = assembly.initial_state()
    params = state.get(PARAMS)
    layout = Layout.of({n: tuple(t.shape) for n, t in params.items()})
    packed = Packed(layout, torch.zeros(layout.length))
    for name, tensor in params.items():
        packed[name].copy_(tensor)
    assert not packed["blocks.0.attn.qkv.weight"].is_contiguous()
    found = [evaluate(assembly, s).structure for s in (state, state.replace({PARAMS: packed}))]
    assert (found[0].soft_matrix == found[1].soft_matrix).all()


def test_padding_of_a_round_is_counted() -> None:
    """Sizes 5, 3 and 2, batch 4, one epoch: of the exact stack 3 × 4 rows, then 1 × 4 (one image).

    Of fixed lanes the same here: three and one are sizes that stay. 10 images in 16 rows: 0.375.
    """
    for mode in (ComputeMode(), FIXED):
        _, events = Toy(sizes=(5, 3, 2), epochs=1, rounds=1, mode=mode).run()
        assert events[0]["padding"] == pytest.approx(0.375)


def test_a_signature_is_blind_to_the_number_of_clients_alone() -> None:
    """Recorded steps are found by it: own tensors (2,), and one shared tensor (3, 4)."""

    def signature(clients: int, own: int = 2, shared: int = 3) -> object:
        everybody = torch.zeros(shared, 4)
        groups = [{"own": torch.ones(own), "shared": everybody} for _ in range(clients)]
        return StackedMessage([Record({"group": group}) for group in groups]).signature

    assert signature(2) == signature(5)
    assert signature(2) != signature(2, own=3)
    assert signature(2) != signature(2, shared=5)
