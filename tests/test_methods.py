"""What every registered method must do; a new file is tested the day it appears."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedharmony.config import build
from fedharmony.data.base import LabelledImages
from fedharmony.methods.base import Stage, methods
from fedharmony.records import load_record, save_record
from fedharmony.server.federation import FederationSettings
from fedharmony.types import PARAMS, Record
from toy import Toy, largest_difference, same_bits, toy_data

every_method = pytest.mark.parametrize("name", methods.names())


@every_method
def test_presets_are_valid_settings(name: str) -> None:
    method = methods[name]
    assert method.presets
    for preset, values in method.presets.items():
        own = {key: value for key, value in values.items() if key != "federation"}
        build(method.Config, own, f"{name}:{preset}")


@every_method
def test_trains_and_repeats_to_the_bit(name: str) -> None:
    first, events = Toy(name, cohort=3).run()
    again, _ = Toy(name, cohort=3).run()
    assert same_bits(first, again)
    assert [len(e["reported"]) for e in events] == [3, 3, 3]
    assert not same_bits(first, Toy(name, cohort=3, seed=1).run()[0])
    params = first.get(PARAMS)
    assert any(not torch.equal(params[n], t) for n, t in Toy(name).initial().get(PARAMS).items())


@every_method
def test_a_stage_is_found_by_its_name(name: str) -> None:
    """As a transport to other hosts does it: the other side has a method object of its own."""
    here, there = Toy(name, cohort=3), Toy(name, cohort=3)

    class ByName:
        sizes = there.transport.sizes

        def exchange(self, stage: Stage, round: int, messages: Any) -> Any:
            (found,) = [s for s in there.method.stages(round) if s.name == stage.name]
            return there.transport.exchange(found, round, messages)

    expected, _ = here.run()
    here.transport = ByName()
    assert same_bits(here.run()[0], expected)


@every_method
def test_learns(name: str) -> None:
    _, events = Toy(name, rounds=25).run()
    assert events[-1]["train_loss"] < 0.8 * events[0]["train_loss"]


@every_method
def test_stacked_equals_one_client_at_a_time(name: str) -> None:
    stacked, _ = Toy(name, dtype=torch.float64, stack=8).run()
    single, _ = Toy(name, dtype=torch.float64, stack=1).run()
    assert largest_difference(stacked, single) < 1e-6  # tables are float32
    models = [Record({PARAMS: state.get(PARAMS)}) for state in (stacked, single)]
    assert largest_difference(*models) < 1e-9


@every_method
def test_stacked_functions_equal_mapped_ones(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a method says its functions take stacks, mapping them over clients gives the same."""
    native, _ = Toy(name, dtype=torch.float64).run()

    def always_map(function: Any, dims: Any) -> Any:
        return torch.vmap(function, in_dims=dims)

    monkeypatch.setattr("fedharmony.engine.step.over_clients", always_map)
    mapped, _ = Toy(name, dtype=torch.float64).run()
    assert largest_difference(native, mapped) < 1e-6
    models = [Record({PARAMS: state.get(PARAMS)}) for state in (native, mapped)]
    # A weight whose gradient is zero in theory (a key's bias) moves by rounding under Adam.
    assert largest_difference(*models) < 1e-9


@every_method
def test_resumes_to_the_bit_from_any_round(name: str, tmp_path: Path) -> None:
    toy = Toy(name, rounds=4, cohort=3, memory=tmp_path / "memory")

    def save(round: int, state: Record) -> None:
        save_record(tmp_path / f"{round + 1}", state)

    whole = toy.loop().run(toy.initial(), 0, lambda e: None, save)
    for done in (1, 2, 3):
        state = load_record(tmp_path / f"{done}")
        fresh = Toy(name, rounds=4, cohort=3, memory=tmp_path / "memory")
        fresh.trainer.data.memory.rewind(done)
        assert same_bits(whole, fresh.loop().run(state, done, lambda e: None, lambda t, s: None))


@every_method
def test_survives_half_of_the_clients_dropping_out(name: str) -> None:
    settings = FederationSettings(drop_rate=0.5)
    state, events = Toy(name, rounds=6, federation=settings).run()
    assert 0 < sum(len(e["left_out"]) for e in events) < 30
    assert all(torch.isfinite(t).all() for _, t in state.tensors() if t.is_floating_point())


def with_labels(labels: np.ndarray) -> LabelledImages:
    return LabelledImages(toy_data(60).images, labels.astype(np.uint8))


@every_method
@pytest.mark.parametrize("case", ["no positives", "all positive", "one label"])
def test_odd_labels(name: str, case: str) -> None:
    labels = toy_data(60).labels.copy()
    if case == "no positives":
        labels[20:27] = 0  # client 1 has none
        labels[:, 3] = 0  # and nobody has label 3
    elif case == "all positive":
        labels[:20] = 1
    else:
        labels = labels[:, :1]
    state, events = Toy(name, data=with_labels(labels)).run()
    assert all(not e["left_out"] for e in events)
    assert all(torch.isfinite(t).all() for _, t in state.tensors() if t.is_floating_point())


@every_method
def test_single_client_and_one_image_clients(name: str) -> None:
    for sizes in ((9,), (1, 1, 1)):
        _, events = Toy(name, sizes=sizes).run()
        assert all(e["reported"] == list(range(len(sizes))) for e in events)


@every_method
def test_cohorts_do_not_depend_on_the_method(name: str) -> None:
    cohorts = [[e["cohort"] for e in Toy(n, rounds=5, cohort=2).run()[1]] for n in (name, "fedavg")]
    assert cohorts[0] == cohorts[1]


@every_method
def test_counts_bytes(name: str) -> None:
    toy = Toy(name, rounds=1)
    _, events = toy.run()
    model = sum(t.numel() * 4 for t in toy.initial().get(PARAMS).values())
    assert events[0]["bytes_down"] >= 5 * model
    assert events[0]["bytes_up"] >= 5 * model
