"""Differential privacy of clients: bounds, noise, its price, and the budget."""

from __future__ import annotations

import json
import math
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedharmony.aggregate import NUMBERS, weighted
from fedharmony.consensus import CORRELATION, CorrelationTable, Operator
from fedharmony.errors import ConfigError
from fedharmony.experiments.blueprint import Blueprint, Facts, blueprint
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.run import resume, start
from fedharmony.experiments.settings import load_settings
from fedharmony.methods.fedharmony import FedHarmony
from fedharmony.models.base import InputSpec, models
from fedharmony.privacy import (
    Budget,
    Clipping,
    Exchanges,
    Ledger,
    Noise,
    Price,
    PrivacySettings,
    accounting,
    budget,
    calibrated,
    clipped,
    cost,
)
from fedharmony.records import load_record, save_record
from fedharmony.report.load import load
from fedharmony.report.tables import table_of
from fedharmony.report.words import facts
from fedharmony.server.federation import FederationSettings
from fedharmony.server.sampling import Schedule
from fedharmony.transport.sums import AddedUp
from fedharmony.types import PARAMS, Group, Packed, Record
from test_sums import ABLE, SIZES, model, toy
from toy import largest_difference, same_bits, toy_data

dp_accounting = pytest.importorskip("dp_accounting")
PLDAccountant = pytest.importorskip("dp_accounting.pld").PLDAccountant
NeighboringRelation = dp_accounting.NeighboringRelation
EQUAL = FederationSettings(server_sees="sums", average="uniform")
ONCE = (Exchanges(1, 0),)
WIDE = Clipping(1e9, 1e9)
HARMONY = {"quality": False, "align_weight": 2.0}


def private(multiplier: float = 1e-30, clipping: Clipping = WIDE, seed: int | None = 0) -> Noise:
    return Noise(clipping, Ledger(Budget(1e-5, multiplier), seed))


def begun(noise: Noise, round: int = 0, cohort: int = 4) -> Noise:
    """With a round under way whose cohort is expected to be so large."""
    noise.ledger.begin(round, Exchanges(1, 0), cohort, 2 * cohort)
    return noise


# -- bounds ----------------------------------------------------------------------------------------


def test_a_share_is_cut_part_by_part_by_hand():
    """θ = (1, 1), trained (4, 5): the update (3, 4) has length 5, cut to 1 it is (0.6, 0.8).

    The sums (6, 8) have length 10 and may have 5: (3, 4). Numbers for events do not leave.
    """
    received = Record({PARAMS: {"w": torch.tensor([1.0, 1.0])}})
    share = Record(
        {
            PARAMS: {"w": torch.tensor([4.0, 5.0])},
            "sums": {"a": torch.tensor([6.0]), "b": torch.tensor([8.0])},
            NUMBERS: {"examples": torch.tensor(12.0)},
        }
    )
    cut = Clipping(1.0, 5.0).cut(share, received)
    assert cut.get(PARAMS)["w"].tolist() == pytest.approx([0.6, 0.8])
    assert [float(cut.get("sums")[n]) for n in "ab"] == pytest.approx([3, 4])
    assert NUMBERS not in cut.groups


def test_a_packed_model_stays_one_row_from_the_client_to_the_new_model() -> None:
    """Else a GPU would be asked, and waited for, once for each of a model's hundreds of tensors."""
    own = toy("fedavg", federation=EQUAL, dtype=torch.float32)
    sent = own.method.broadcast(own.initial(), 0, [0, 1])
    (reply, _) = own.trainer.run(own.method.stages(0)[0], 0, sent)
    packed, start = reply.record.get(PARAMS), own.initial().get(PARAMS)
    assert isinstance(packed, Packed)
    row = torch.zeros_like(packed.row)
    for name, place in packed.layout.views(row).items():
        place.copy_(start[name])
    clipping = Clipping(0.01, 1.0)

    def cut(trained: Group, received: Group) -> Group:
        share = weighted(Record({PARAMS: trained}), 1.0)
        return clipping.cut(share, Record({PARAMS: received})).get(PARAMS)

    by_name = cut(dict(packed), start)
    for received in (start, Packed(packed.layout, row)):
        found = cut(packed, received)
        assert isinstance(found, Packed)
        assert all(torch.allclose(found[n], by_name[n], rtol=1e-12, atol=0) for n in by_name)
        state = Record({PARAMS: received})
        released = begun(private(clipping=clipping)).released(
            Record({PARAMS: found}), state, "update", 0
        )
        assert isinstance(moved := released.get(PARAMS), Packed)
        assert all(torch.allclose(moved[n], start[n] + by_name[n].float() / 4) for n in start)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=8), st.floats(1e-3, 1e3))
def test_nothing_is_longer_than_it_may_be(values: list[float], most: float) -> None:
    sent = torch.tensor(values, dtype=torch.float64)
    found = clipped({"a": sent}, most)["a"]
    assert float(found.norm()) <= most * (1 + 1e-9)
    if float(sent.norm()) <= most * (1 - 1e-9):
        assert found.tolist() == values


@pytest.mark.parametrize("name", ["fedavg", "fedharmony", "spherefed"])
def test_one_client_moves_a_sum_by_no_more_than_the_noise_stands_for(name: str) -> None:
    """The same cohort, one client with other images: sums differ by at most 2 S, and do differ."""
    config = HARMONY if name == "fedharmony" else ABLE[name]
    clipping, sums = Clipping(0.05, 2.0), []
    for seed in (0, 1):
        data, other = toy_data(72), toy_data(72, seed=5)
        labels = data.labels.copy()
        if seed:
            labels[: SIZES[0]] = other.labels[: SIZES[0]]
        own = toy(
            name,
            config,
            federation=EQUAL,
            noise=private(clipping=clipping),
            data=replace(data, labels=labels),
        )
        state = own.initial()
        stage = own.method.stages(0)[-1]
        sent = own.method.broadcast(state, 0, [0, 1, 3, 4])
        total = AddedUp(own.transport).total(stage, 0, sent).record
        assert total is not None
        sums.append(total)
    assert set(sums[0].groups) == {PARAMS, *([CORRELATION] if name == "fedharmony" else [])}
    for group, bound in ((PARAMS, clipping.model), (CORRELATION, clipping.sums)):
        first, second = (total.get(group) for total in sums)
        if first:
            moved = math.sqrt(sum(float((first[n] - second[n]).square().sum()) for n in first))
            assert 0 < moved <= 2 * bound * (1 + 1e-9)
            assert math.sqrt(sum(float(t.square().sum()) for t in first.values())) <= 4 * bound


# -- noise -----------------------------------------------------------------------------------------


def test_noise_has_the_deviation_that_was_paid_for() -> None:
    """The deviation is z S √P: z = 3, P = 2 parts, S = 0.5 and 7; 40,000 numbers each, within 2 %.

    (The standard error of a deviation from n numbers is 1/√(2n) = 0.35 %.)
    """
    noise = begun(private(3.0, Clipping(0.5, 7.0), seed=1), cohort=10)
    zeros = {"w": torch.zeros(200, 200, dtype=torch.float64)}
    total = Record({PARAMS: zeros, "sums": {"a": torch.zeros(40_000, dtype=torch.float64)}})
    state = Record({PARAMS: {"w": torch.zeros(200, 200, dtype=torch.float64)}})
    found = noise.released(total, state, "update", 0)
    model, sums = found.get(PARAMS)["w"] * 10, found.get("sums")["a"]
    for values, bound in ((model, 0.5), (sums, 7.0)):
        expected = 3 * bound * math.sqrt(2)
        assert float(values.std()) == pytest.approx(expected, rel=0.02)
        assert abs(float(values.mean())) < 4 * expected / 200
        beyond = float((values.abs() > 2 * expected).double().mean())
        assert beyond == pytest.approx(0.0455, abs=0.006)  # of a Gaussian
    assert found.scalars["noise sums"] == pytest.approx(3 * 7 * math.sqrt(2))
    correlation = torch.corrcoef(torch.stack([model.flatten(), sums]))[0, 1]
    assert abs(float(correlation)) < 0.03


def test_packed_models_get_the_same_noise_and_keep_their_gaps() -> None:
    own = toy("fedavg", federation=EQUAL, dtype=torch.float32)
    sent = own.method.broadcast(own.initial(), 0, [0, 1])
    (reply, _) = own.trainer.run(own.method.stages(0)[0], 0, sent)
    packed = reply.record.get(PARAMS)
    assert isinstance(packed, Packed)
    row = torch.zeros_like(packed.row, dtype=torch.float64)
    sums = Packed(packed.layout, row), {n: torch.zeros_like(t).double() for n, t in packed.items()}
    state, noise = own.initial(), begun(private(1.0, Clipping(1.0, 1.0)))
    both = [noise.released(Record({PARAMS: s}), state, "update", 0).get(PARAMS) for s in sums]
    assert all(torch.equal(both[0][name], both[1][name]) for name in packed)
    assert int((row != 0).sum()) == sum(math.prod(shape) for _, shape in packed.layout.shapes)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "spherefed"])
def test_without_noise_and_bounds_it_is_the_average_of_equals(name: str) -> None:
    plain, _ = toy(name, federation=EQUAL, cohort=6).run()
    found, events = toy(name, federation=EQUAL, cohort=6, noise=private()).run()
    assert largest_difference(model(plain), model(found)) < 1e-6
    for event in events:
        assert event["train_loss"] is None
        assert event["examples"] == event["images"] == 0


def test_a_private_client_computes_no_misfit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its quality does not count, and a number of it may not leave."""
    own = toy("fedharmony", HARMONY, federation=EQUAL, noise=private())
    computed: list[Any] = []
    monkeypatch.setattr(FedHarmony, "misfits", lambda method, *given: computed.append(given))
    own.run()
    assert not computed


def test_updates_are_divided_by_the_planned_cohort_whoever_answers() -> None:
    """Otherwise the number of those who answer would have to be private, too."""
    settings = replace(EQUAL, drop_rate=0.5)
    one = {"rounds": 1, "cohort": 6}
    some, events = toy("fedavg", federation=settings, noise=private(), **one).run()
    answered = len(events[0]["reported"])
    assert 0 < answered < 6
    own = toy("fedavg", federation=settings, **one)
    mean, _ = toy("fedavg", federation=replace(settings, sum_least=2), **one).run()
    start = own.parameters()[0]
    for name, before in start.items():
        full = mean.get(PARAMS)[name] - before
        assert torch.allclose(some.get(PARAMS)[name] - before, full * answered / 6, atol=1e-9)


def test_a_noisy_weight_is_known_only_above_its_noise() -> None:
    """Weights (20, 6, 20) with noise of deviation 4: below 2 · 4 nothing is known."""
    table = CorrelationTable(2, Operator("support", decay=0.5))
    total = {"sum": torch.tensor([10.0, 6.0, 10.0]), "weight": torch.tensor([20.0, 6.0, 20.0])}
    table.add_shares({n: t.double() for n, t in total.items()}, 0, noise=4.0)
    assert table.consensus(1).known.tolist() == [[True, False], [False, True]]
    assert table.consensus(1).matrix[0, 0] == 0.5
    # A second round: (20/2 + 10, 6/2 + 10, …), and the noise is √((4/2)² + 3²) = √13.
    table.add_shares({n: torch.full((3,), 10.0).double() for n in total}, 1, noise=3.0)
    assert float(table.folded["noise"]) == pytest.approx(math.sqrt(13))
    assert bool(table.consensus(2).known.all())


def test_fedharmony_and_the_closed_form_head_stay_finite_under_noise() -> None:
    settings = replace(EQUAL, head_start="closed_form")
    noise = private(1.0, Clipping(1.0, 100.0))
    state, _ = toy("fedharmony", HARMONY, federation=settings, noise=noise).run()
    assert all(t.isfinite().all() for _, t in state.tensors() if t.is_floating_point())
    state, _ = toy("spherefed", federation=EQUAL, noise=noise).run()
    assert all(t.isfinite().all() for _, t in state.tensors() if t.is_floating_point())


def test_features_are_of_length_one_in_noisy_sums_unless_a_scale_is_given() -> None:
    """√D for D features of size 1: then Σ y f̃ᵀ, which holds the counts, is no small part of all."""

    def counted(scale: float | None) -> Record:
        settings = replace(EQUAL, head_start="closed_form", head_scale=scale)
        own = toy("fedavg", federation=settings, noise=private())
        (stage,), state = own.loop().opening, own.initial()
        sent = stage.broadcast(state, 0, [0])
        total = AddedUp(own.transport).total(stage, 0, sent).record
        assert total is not None
        return total

    width = toy("fedavg").method.task.width
    assert same_bits(counted(None), counted(math.sqrt(width)))
    assert not same_bits(counted(None), counted(1.0))


def test_resumes_to_the_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"federation": EQUAL, "noise": private(1.0, Clipping(1.0, 10.0))}
    own = toy("fedharmony", HARMONY, memory=tmp_path / "memory", **options)
    state = own.loop().run(
        own.initial(),
        0,
        lambda e: None,
        lambda t, s: save_record(tmp_path / f"{t + 1}", s) and None,
    )
    fresh = toy("fedharmony", HARMONY, memory=tmp_path / "memory", **options)
    fresh.trainer.data.memory.rewind(2)
    saved = load_record(tmp_path / "2")
    assert same_bits(state, fresh.loop().run(saved, 2, lambda e: None, lambda t, s: None))


# -- the price -------------------------------------------------------------------------------------


def test_epsilon_is_the_library_s_own() -> None:
    """Two exchanges with one cohort are one with z/√2; one with everybody is not sampled."""
    accountant = PLDAccountant(NeighboringRelation.ADD_OR_REMOVE_ONE)
    gaussian = dp_accounting.GaussianDpEvent
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.1, gaussian(1.2)), 30)
    assert cost([Price(0.1, 1.2)] * 30, 1e-5) == pytest.approx(
        accountant.get_epsilon(1e-5), rel=1e-4
    )
    accountant.compose(gaussian(1.2))
    accountant.compose(dp_accounting.PoissonSampledDpEvent(0.2, gaussian(3.0 / math.sqrt(2))), 5)
    rounds = [Price(0.1, 1.2, 1, 1), *[Price(0.1, 1.2)] * 29, *[Price(0.2, 3.0, 2)] * 5]
    assert cost(rounds, 1e-6) == pytest.approx(accountant.get_epsilon(1e-6), rel=1e-4)


def test_a_known_price_by_hand() -> None:
    """One Gaussian mechanism with z = 1 has δ(ε) = Φ(½ − ε) − e^ε Φ(−½ − ε) (Balle, Wang 2018).

    At ε = 4.377 these are 5.29e-5 and 79.6 · 5.40e-7 = 4.29e-5, whose difference is δ = 1e-5.
    """
    normal = statistics.NormalDist()
    found = cost([Price(1.0, 1.0)], 1e-5)
    assert normal.cdf(0.5 - found) - math.exp(found) * normal.cdf(-0.5 - found) == pytest.approx(
        1e-5, rel=1e-3
    )
    assert found == pytest.approx(4.377, abs=1e-3)
    assert cost([], 1e-5) == 0
    assert cost([Price(1.0, 1e-30)], 1e-5) == math.inf


def test_steps_that_grow_with_the_loss_are_at_most_some_thousandths_too_dear() -> None:
    """10,000 rounds of everybody at z = 1 are one at z = 0.01: δ(ε) = Φ(−t) − φ(t)/(100 + t).

    (For ε = 5000 + 100 t, up to 1/(100 + t)² of the last term.) δ = 1e-5 at t = 4.25510.
    """
    for rounds in ([Price(1.0, 1.0)] * 10_000, [Price(1.0, 0.01)]):
        assert 5425.51 <= cost(rounds, 1e-5) <= 5425.51 * 1.003


def test_more_noise_and_fewer_rounds_cost_less() -> None:
    prices = [cost([Price(0.1, z)] * 10, 1e-5) for z in (0.5, 1.0, 2.0)]
    assert prices == sorted(prices, reverse=True)
    prices = [cost([Price(0.1, 1.0)] * t, 1e-5) for t in range(5)]
    assert prices == sorted(prices)
    assert cost([Price(0.1, 1.0)], 1e-5) < cost([Price(1.0, 1.0)], 1e-5)


@pytest.mark.parametrize("epsilon", [0.5, 8.0])
def test_noise_found_from_epsilon_costs_just_that(epsilon: float) -> None:
    multiplier = calibrated(epsilon, 1e-5, 0.1, ONCE * 10)
    assert 0.99 * epsilon <= cost([Price(0.1, multiplier)] * 10, 1e-5) <= epsilon


def planned(epsilon: float | None, rounds: int = 20) -> Budget:
    settings = PrivacySettings(epsilon=epsilon, noise_multiplier=1.0)
    return budget(settings, 0.1, rounds, lambda count: ONCE * count)


def test_a_budget_leaves_as_many_rounds_as_it_pays_for() -> None:
    free = planned(None)
    assert len(free.rounds) == 20
    costs = [free.spent(t)["epsilon"] for t in range(21)]
    for allowed in (1, 7, 19):
        found = planned((costs[allowed] + costs[allowed + 1]) / 2)
        assert len(found.rounds) == allowed
    assert len(planned(costs[20]).rounds) == 20
    with pytest.raises(ConfigError, match="before the first round ends"):
        planned(costs[1] / 2)


def test_poisson_cohorts_differ_in_size_and_may_be_empty() -> None:
    schedule = Schedule(dict.fromkeys(range(40), 5), 400, 10, "poisson", 0)
    sizes = [len(cohort) for cohort in schedule]
    assert sum(sizes) / 400 == pytest.approx(10, abs=0.6)  # deviation √(40 · ¼ · ¾ / 400) = 0.14
    assert len(set(sizes)) > 8
    joint = sum(0 in cohort and 1 in cohort for cohort in schedule) / 400
    assert joint == pytest.approx(1 / 16, abs=0.05)
    own = toy("fedavg", rounds=2)
    loop = replace(own.loop(), schedule=[[], [0, 1]])
    events: list[Any] = []
    loop.run(own.initial(), 0, events.append, lambda t, s: None)
    assert [event["reported"] for event in events] == [[], [0, 1]]


# -- a whole run -----------------------------------------------------------------------------------

SMALL = ["data.train=160", "data.test=40", "split.clients=8", "run.rounds=4", "train.epochs=1"]
SMALL += ["model.width=16", "model.depth=1", "engine.threads=1", "run.method=fedavg"]
SMALL += ["federation.server_sees=sums", "federation.average=uniform"]


def run(folder: Path, *changes: str) -> dict[str, Any]:
    settings = load_settings("demo", [*SMALL, *changes])
    return start(settings, RunFolder(folder), lambda event: None)


def test_without_epsilon_it_is_the_ordinary_run_bit_for_bit(tmp_path: Path) -> None:
    plain = run(tmp_path / "a")
    unlimited = run(tmp_path / "b", "privacy.delta=1e-6", "privacy.clip=0.01")
    assert plain["state_sha256"] == unlimited["state_sha256"]
    assert plain["privacy"] is None
    bounded = run(tmp_path / "c", "privacy.noise_multiplier=1", "privacy.clip=0.01")
    assert bounded["state_sha256"] != plain["state_sha256"]


def test_the_budget_ends_the_run_and_resuming_does_not_go_beyond(tmp_path: Path) -> None:
    """Events, results, table and report say what was spent."""
    once, spent, more = (cost([Price(0.75, 1.0)] * t, 1e-5) for t in (1, 2, 3))
    limit = (spent + more) / 2
    results = run(tmp_path / "run", "privacy.noise_multiplier=1", f"privacy.epsilon={limit}")
    assert results["rounds"] == results["rounds_done"] == 2
    assert results["privacy"] == {
        "epsilon": spent,
        "delta": 1e-5,
        "noise_multiplier": 1.0,
        "rounds": 2,
        "unit": "add or remove one client",
        "sampling": "poisson",
        "noise_by": "simulator",
        "reproducible": False,
    }
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    rounds = [event for event in events if event["event"] == "round"]
    assert [event["privacy"]["epsilon"] for event in rounds] == [once, spent]
    assert {(e["privacy"]["q"], e["privacy"]["clients"]) for e in rounds} == {(0.75, 8)}
    assert next(e for e in events if e["event"] == "start")["rounds"] == 2
    again = resume(RunFolder(tmp_path / "run"), lambda event: None)
    assert again == results
    (tmp_path / "run" / "results.json").unlink()  # as if killed just before its end
    again = resume(RunFolder(tmp_path / "run"), lambda event: None)
    assert again["rounds_done"] == 2
    assert again["state_sha256"] == results["state_sha256"]
    runs = load([tmp_path / "run"])
    assert f"{spent:.2f}" in table_of(runs).to_markdown()
    assert f"differential privacy of clients: ε = {spent:.2f}, δ = 1e-05" in facts(runs)


# -- refused before round 0 ------------------------------------------------------------------------


def made(*changes: str) -> Blueprint:
    sums = ["federation.server_sees=sums", "federation.average=uniform"]
    own = ["run.method=fedavg", "privacy.noise_multiplier=1"]
    settings = load_settings("demo", [*sums, *own, *changes])
    sizes = dict.fromkeys(range(20), 10)
    return blueprint(settings, Facts(tuple("abcdefghijkl"), InputSpec(3, 16, 16), sizes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["privacy.epsilon=0"], "greater than 0"),
        (["privacy.epsilon=-1"], "greater than 0"),
        (["privacy.epsilon=inf"], "finite"),
        (["privacy.noise_multiplier=0"], "greater than or equal to 0.001"),
        (["privacy.delta=1"], "less than 1"),
        (["privacy.delta=0"], "greater than or equal to 0.000000000001"),
        (["privacy.clip=0"], "greater than 0"),
        (["federation.server_sees=replies"], "server_sees = 'sums'"),
        (["federation.average=size"], "average = 'uniform'"),
        (["federation.sampling=size"], "Leave federation.sampling out"),
        (["federation.sampling=uniform"], "federation.sampling = 'uniform' draws them otherwise"),
        (["privacy.epsilon=8", "privacy.noise_seed=1"], "noise_seed = 1 makes noise that can be"),
        (["run.thresholds=0.1"], "without noise"),
        (["run.method=fedharmony", "methods.fedharmony.temperature=1"], "quality = false"),
        (["privacy.epsilon=0.01"], "before the first round ends"),
        (["federation.robust=agreement"], "exclude each other"),
    ],
)
def test_what_would_not_be_private_is_refused(changes: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        made(*changes)


def test_a_delta_as_large_as_a_client_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    made("privacy.delta=0.051")
    assert "share of one client" in caplog.text
    caplog.clear()
    made("privacy.delta=0.049")
    assert "share of one client" not in caplog.text


def test_a_model_with_running_statistics_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    statistics = {"norm.running_mean": torch.zeros(1)}
    monkeypatch.setattr(models["vit"], "init_buffers", lambda self: statistics)
    with pytest.raises(ConfigError, match="batch normalisation"):
        made()


def test_without_the_library_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "dp_accounting.pld", None)
    accounting.cache_clear()
    try:
        with pytest.raises(ConfigError, match=r"fedharmony\[privacy\]"):
            made()
    finally:
        accounting.cache_clear()


def test_calibration_after_the_last_round_is_paid_for(tmp_path: Path) -> None:
    """SphereFed asks all clients twice beside its rounds: before the first, and after the last."""
    plan = made("run.method=spherefed", "run.rounds=3")
    assert plan.budget is not None
    assert plan.budget.rounds == (Exchanges(1, 1), Exchanges(1, 0), Exchanges(1, 1))
    head = made("run.rounds=2", "federation.head_start=closed_form")
    assert head.budget is not None
    assert head.budget.rounds == (Exchanges(1, 1), Exchanges(1, 0))
