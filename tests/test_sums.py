"""Where the server sees sums: the same results, and nothing of a single client."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedharmony.aggregate import NUMBERS, added, pooled, weighted
from fedharmony.consensus import (
    CORRELATION,
    FOLDED,
    TABLE,
    WEIGHTED,
    CorrelationTable,
    Operator,
)
from fedharmony.errors import ConfigError
from fedharmony.experiments.blueprint import Facts, blueprint
from fedharmony.experiments.settings import load_settings
from fedharmony.methods.base import Outcome, Stage, methods
from fedharmony.methods.fedharmony import FedHarmony
from fedharmony.methods.fedharmony_sums import MEMBERS
from fedharmony.models.base import InputSpec
from fedharmony.records import load_record, save_record
from fedharmony.rng import torch_rng
from fedharmony.server.federation import FederationSettings
from fedharmony.transport.sums import AddedUp, Summing, Total
from fedharmony.types import (
    EVERYBODY,
    FROZEN,
    PARAMS,
    Failure,
    Record,
    Reply,
)
from toy import Toy, largest_difference, same_bits, toy_data

SUMS = FederationSettings(server_sees="sums")
SIZES = (20, 7, 2, 13, 19, 11)
HARMONY: dict[str, Any] = {
    "temperature": 2.0,
    "align_weight": 2.0,
    "horizon": 3,
    "consensus": "support",
}
#: Methods that can work on sums, and settings with which they do.
ABLE: dict[str, dict[str, Any]] = {
    "fedavg": {},
    "fedprox": {"mu": 0.1},
    "fedlgt": {},
    "spherefed": {"projection": 8},
    "fedharmony": HARMONY,
}


def toy(name: str, config: Mapping[str, Any] | None = None, **changes: Any) -> Toy:
    own = ABLE[name] if config is None else config
    options = {"rounds": 4, "cohort": 4, "dtype": torch.float64, "data": toy_data(72), **changes}
    return Toy(name, config=own, sizes=SIZES, **options)


def model(state: Record) -> Record:
    return Record({group: state.get(group) for group in (PARAMS, FROZEN)})


def both(name: str, config: Mapping[str, Any] | None = None, **changes: Any) -> float:
    """How far the models of the two modes are from each other."""
    settings = changes.pop("federation", FederationSettings())
    plain, _ = toy(name, config, federation=settings, **changes).run()
    summed, _ = toy(name, config, federation=replace(settings, server_sees="sums"), **changes).run()
    return largest_difference(model(plain), model(summed))


# -- the same results ------------------------------------------------------------------------------


def test_a_sum_of_shares_by_hand():
    """θ = 1 with n = 3 and θ = 5 with n = 1: Σ n θ = 8, Σ n = 4, mean 2; sums of sweeps add up."""
    first = Record({PARAMS: {"w": torch.tensor([1.0])}, "counts": {"a": torch.tensor(2.0)}})
    second = Record({PARAMS: {"w": torch.tensor([5.0])}, "counts": {"a": torch.tensor(4.0)}})
    total = added(added(None, weighted(first, 3.0)), weighted(second, 1.0))
    assert total.get(PARAMS)["w"] == 8
    assert total.get(NUMBERS)["weight"] == 4
    groups = pooled(total, first)
    assert groups[PARAMS]["w"] == 2
    assert groups[PARAMS]["w"].dtype == torch.float32
    assert groups["counts"]["a"] == 6


@pytest.mark.parametrize("name", ABLE)
def test_the_model_is_that_of_replies(name: str) -> None:
    assert both(name) < 1e-6


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedlgt", "spherefed"])
def test_without_rounding_in_between_even_the_bits_are_the_same(name: str) -> None:
    """The product n θ is exact in float64 where θ is float32; sums run in the same order."""
    settings = FederationSettings(head_start="closed_form")
    assert both(name, dtype=torch.float32, federation=settings) == 0


@pytest.mark.parametrize("head", ["all", "cohort"])
def test_the_closed_form_head_is_that_of_replies(head: Any) -> None:
    settings = FederationSettings(head_start="closed_form", head_clients=head)
    assert both("fedavg", federation=settings, rounds=1) < 1e-12
    assert both("fedharmony", federation=settings) < 1e-6


@pytest.mark.parametrize(
    "changes",
    [
        *({"consensus": operator} for operator in WEIGHTED),
        {"memory": "last_cohort"},
        {"quality_min_examples": 12},
        {"quality": False},
        {"reduction": "sum", "temperature": 0.5},
        {"normaliser": "pearson", "shrinkage": 0.03},
        {"horizon": 1},
    ],
    ids=str,
)
def test_fedharmony_is_that_of_replies_under_every_setting(changes: dict[str, Any]) -> None:
    """With plain SGD: Adam makes a step of what is left of a gradient that should be zero."""
    assert both("fedharmony", {**HARMONY, **changes}, optimiser="sgd") < 1e-8


def test_without_a_choice_the_consensus_is_one_that_sums_can_give() -> None:
    """Elsewhere it sorts the values of single clients, which nobody has here."""
    chosen = {name: value for name, value in HARMONY.items() if name != "consensus"}
    for settings, name in [(SUMS, "support"), (FederationSettings(), "support_trimmed")]:
        method = toy("fedharmony", chosen, federation=settings).method
        assert isinstance(method, FedHarmony)
        assert method.operator.name == name


def test_fedharmony_with_unknown_labels_drop_outs_and_equal_weights() -> None:
    data = toy_data(72)
    known = np.random.default_rng(0).random(data.labels.shape) < 0.7
    assert both("fedharmony", data=replace(data, known=known)) < 1e-6
    settings = FederationSettings(drop_rate=0.2, average="uniform", sum_least=2)
    assert both("fedharmony", federation=settings) < 1e-6


def told(value: float, images: int = 10) -> dict[str, torch.Tensor]:
    return {"upper": torch.tensor([1.0, value, 1.0]), "marginal": torch.full((2,), 0.5)}


def test_a_client_takes_itself_out_of_the_sums_by_hand():
    """Operator size, decay ½. Round 0: n = (30, 10), R = (0.2, 0.6): Σ nR = 12, Σ n = 40.

    Without the first client 6/10 = 0.6. In round 1 the second comes again with R = 0.4, and takes
    out what is left of its old terms: Σ nR = 12/2 + 4 − 6/2 = 7, Σ n = 40/2 + 10 − 10/2 = 25. The
    first then has the teacher (7 − 6/2) / (25 − 30/2) = 0.4, the second (7 − 4) / 15 = 0.2.
    """
    operator = Operator("size", decay=0.5)
    first, second = told(0.2), told(0.6)
    server, site = CorrelationTable(2, operator), CorrelationTable(2, operator)
    shares = [site.share(first, {}, 30, 0), site.share(second, {}, 10, 0)]
    server.add_shares({n: shares[0][n] + shares[1][n] for n in shares[0]}, 0)
    kept = {**first, "round": torch.tensor(0)}, {**second, "round": torch.tensor(0)}
    assert server.others(kept[0], 30, 1, torch.float64).matrix[0, 1] == pytest.approx(0.6)
    again = site.share(told(0.4), kept[1], 10, 1)
    server.add_shares(again, 1)
    assert server.folded["sum"][1] == pytest.approx(7)
    assert server.folded["weight"] == pytest.approx(25)
    now = {**told(0.4), "round": torch.tensor(1)}
    assert server.others(kept[0], 30, 2, torch.float64).matrix[0, 1] == pytest.approx(0.4)
    assert server.others(now, 10, 2, torch.float64).matrix[0, 1] == pytest.approx(0.2)
    assert server.others({}, 5, 2, torch.float64).matrix[0, 1] == pytest.approx(7 / 25)


def test_what_all_have_taken_out_again_is_unknown():
    """A pair that its only witness no longer supports leaves rounding, not a correlation.

    The sums fade round by round, 0.9 · 0.9 · 0.9, and what is taken out by 0.9³ at once.
    """
    operator = Operator("support", kappa=0.0, decay=0.9)
    alone = {**told(0.3), "marginal": torch.tensor([0.5, 0.0])}
    left = []
    for images in range(5, 30):
        server, site = CorrelationTable(2, operator), CorrelationTable(2, operator)
        server.add_shares(site.share(told(0.3), {}, images, 0), 0)
        for round in (1, 2):
            server.add_shares(site.share(alone, {}, 9, round), round)
        before = {**told(0.3), "round": torch.tensor(0)}
        share = site.share(alone, before, images, 3)
        left.append(float(server.folded["weight"][1] * 0.9 + share["weight"][1]))
        server.add_shares(share, 3)
        assert server.consensus(4).known.tolist() == [[True, False], [False, False]]
    assert any(weight > 0 for weight in left)  # else there is nothing to be seen


# -- nothing of a single client --------------------------------------------------------------------


class Watched:
    """A stage whose aggregate is listened to."""

    def __init__(self, heard: list[Reply]) -> None:
        self.heard = heard

    def over(self, stage: Stage) -> Stage:
        def aggregate(state: Record, round: int, sent: Any, replies: Iterator[Reply]) -> Outcome:
            return stage.aggregate(state, round, sent, self._noted(replies))

        return replace(stage, aggregate=aggregate)

    def _noted(self, replies: Iterator[Reply]) -> Iterator[Reply]:
        for reply in replies:
            self.heard.append(reply)
            yield reply


@pytest.mark.parametrize("name", ABLE)
def test_aggregate_receives_one_sum_and_nothing_else(name: str) -> None:
    """Each exchange: one reply of everybody, whose tensors are the sums of what clients made."""
    own = toy(name, federation=replace(SUMS, head_start="closed_form"), rounds=3)
    heard, shares = list[Reply](), list[list[Reply]]()
    loop, exchange, listens = own.loop(), own.transport.exchange, Watched(heard)
    stages = type(loop).stages

    def noted(stage: Stage, round: int, messages: Mapping[int, Record]) -> Iterator[Any]:
        answers = list(exchange(stage, round, messages))
        shares.append(answers)
        yield from answers

    own.transport.exchange = noted
    patched = pytest.MonkeyPatch()
    patched.setattr(
        type(loop), "stages", lambda self, t: [listens.over(s) for s in stages(self, t)]
    )
    events: list[Any] = []
    try:
        state = loop.run(own.initial(), 0, events.append, lambda t, s: None)
    finally:
        patched.undo()
    assert len(heard) == len(shares) >= 3
    for reply, answers in zip(heard, shares, strict=True):
        assert reply.client == EVERYBODY
        assert set(reply.clients) == {answer.client for answer in answers}
        assert len(answers) >= 4
        assert not reply.record.scalars
        images = sum(SIZES[k] for k in reply.clients)
        assert reply.examples == images
        for group, members in reply.record.groups.items():
            for label, tensor in members.items():
                parts = [answer.record.get(group)[label] for answer in answers]
                if group == PARAMS:
                    parts = [part / images for part in parts]
                assert torch.allclose(tensor, sum(parts[1:], parts[0]), atol=1e-9)
        # A matrix would be called by its name; and no share says how many images there are.
        assert all(answer.examples == 0 and not answer.record.scalars for answer in answers)
        assert "upper" not in reply.record.get(CORRELATION)
        assert "marginal" not in reply.record.get(CORRELATION)
    assert TABLE not in state.groups
    assert all(event["weights"] == {} for event in events)
    clients = [n for n, t in state.tensors() if t.ndim and len(t) == len(SIZES)]
    expected = {f"{MEMBERS}/client", f"{MEMBERS}/round"} if name == "fedharmony" else set()
    found = {n for n in clients if not n.startswith((PARAMS, FROZEN, FOLDED, "clusters"))}
    assert found <= expected


def test_messages_are_the_same_for_everybody_but_for_a_round() -> None:
    own = toy("fedharmony", federation=SUMS, rounds=2)
    state, _ = own.run()
    messages = own.method.broadcast(state, 2, range(len(SIZES)))
    for group, members in messages[0].groups.items():
        for name, tensor in members.items():
            if group != "own":
                assert all(message.get(group)[name] is tensor for message in messages.values())
    assert {int(message.get("own")["round"]) for message in messages.values()} <= {-1, 0, 1}


class Masked:
    """Adds shares up under masks that cancel out: where secure aggregation would go.

    Whole numbers modulo 2⁶⁴, one mask per pair of clients. Its random numbers are not fit for
    anything but this test.
    """

    SCALE = 2.0**24

    def __init__(self, transport: Any) -> None:
        self.sizes, self._transport = transport.sizes, transport
        self.seen: list[torch.Tensor] = []

    def total(self, stage: Stage, round: int, messages: Mapping[int, Record]) -> Total:
        replies = list(self._transport.exchange(stage, round, messages))
        clients = [reply.client for reply in replies]
        groups: dict[str, dict[str, torch.Tensor]] = {}
        for group, members in replies[0].record.groups.items():
            groups[group] = {}
            for name in members:
                sent = [self._sent(r, clients, group, name) for r in replies]
                self.seen += sent
                groups[group][name] = sum(sent[1:], sent[0]).double() / self.SCALE
        return Total(Record(groups), tuple(clients), (), 0)

    def _sent(self, reply: Reply, clients: list[int], group: str, name: str) -> torch.Tensor:
        value = (reply.record.get(group)[name].double() * self.SCALE).round().long()
        for other in clients:
            first, second = sorted((reply.client, other))
            generator = torch_rng(first, f"{group} {name}", second)
            mask = torch.randint(-(2**62), 2**62, value.shape, generator=generator)
            value = value + 2 * mask * ((reply.client < other) - (other < reply.client))
        return value


def test_masked_sums_give_the_same_run() -> None:
    """A transport with ``total`` takes the place of adding up in the open."""
    plain, _ = toy("fedharmony", federation=SUMS).run()
    own = toy("fedharmony", federation=SUMS)
    own.transport = Masked(own.transport)
    assert isinstance(own.transport, Summing)
    masked, _ = own.run()
    assert largest_difference(model(plain), model(masked)) < 1e-3
    assert all(tensor.double().abs().max() > 2.0**40 for tensor in own.transport.seen)


# -- failures --------------------------------------------------------------------------------------


#: Lies of a client about its share: the group, and what becomes of each of its tensors.
CHANGES: dict[str, tuple[str, Any]] = {
    "nan": (PARAMS, lambda t: t * torch.nan),
    "infinite": (CORRELATION, lambda t: t / 0),
    "huge": (PARAMS, lambda t: t * 0 + 1e300),
    "float32": (PARAMS, lambda t: t.float()),
    "ten times the weight": (NUMBERS, lambda t: t * 10),
    "no weight": (NUMBERS, lambda t: t * 0),
    "heavy correlations": (CORRELATION, lambda t: t * 0 + 1e15),
}


class Faulty:
    """A transport on which one client's shares are spoilt in one round."""

    def __init__(self, transport: Any, client: int, round: int, how: str) -> None:
        self.sizes, self._transport = transport.sizes, transport
        self._spoilt, self._how = (client, round), how

    def exchange(self, stage: Stage, round: int, messages: Mapping[int, Record]) -> Iterator[Any]:
        for answer in self._transport.exchange(stage, round, messages):
            if (answer.client, round) != self._spoilt:
                yield answer
            elif self._how in CHANGES:
                group, change = CHANGES[self._how]
                spoilt = {n: change(x) for n, x in answer.record.get(group).items()}
                yield replace(answer, record=answer.record.replace({group: spoilt}), finite=None)
            elif self._how == "not finite":
                yield replace(answer, finite=False)
            elif self._how == "form":
                yield replace(answer, record=Record({PARAMS: {"w": torch.zeros(1)}}))
            elif self._how == "more":
                yield replace(answer, record=answer.record.replace({"gift": {"w": torch.ones(1)}}))
            elif self._how == "failure":
                yield Failure(answer.client, stage.name, round, "it is ill")


@pytest.mark.parametrize("client", [0, 3])
@pytest.mark.parametrize("how", ["not finite", "form", "more", "failure", "silent", *CHANGES])
def test_a_share_that_cannot_be_added_is_left_out(how: str, client: int) -> None:
    """Client 0 is the largest, whose share comes first: it dictates nothing to the others.

    Afterwards the client subtracts nothing: the sums do not hold what it remembers.
    """
    own = toy("fedharmony", federation=SUMS, cohort=6, rounds=3, names=tuple("abcdef"))
    own.transport = Faulty(own.transport, client, 1, how)
    state, events = own.run()
    assert [(f["client"], f["name"]) for f in events[1]["left_out"]] == [(client, "abcdef"[client])]
    assert events[1]["reported"] == [k for k in range(6) if k != client]
    assert [event["left_out"] for event in (events[0], events[2])] == [[], []]
    assert all(t.isfinite().all() for _, t in state.tensors() if t.is_floating_point())
    assert (state.get(FOLDED)["weight"] >= 0).all()


def test_bytes_of_shares_by_hand() -> None:
    """446 numbers of the toy model and 4 beside it, 8 bytes each, of each of six clients."""
    own = toy("fedavg", federation=SUMS, cohort=6, rounds=1)
    assert sum(t.numel() for t in own.parameters()[0].values()) == 446
    _, (event,) = own.run()
    assert event["bytes_up"] == 6 * 8 * (446 + 4)


def test_equal_weights_are_one_and_no_more() -> None:
    """The server knows the weight of each client, whatever that client claims."""
    settings = replace(SUMS, average="uniform")
    own = toy("fedavg", federation=settings, cohort=6, rounds=1)
    own.transport = Faulty(own.transport, 3, 0, "ten times the weight")
    _, (event,) = own.run()
    assert "outside of [1, 1]" in event["left_out"][0]["reason"]
    assert event["reported"] == [0, 1, 2, 4, 5]


@pytest.mark.parametrize("operator", WEIGHTED)
def test_what_honest_clients_share_is_within_its_bounds(operator: str) -> None:
    """Over rounds in which clients come, stay away and come again."""
    config = {**HARMONY, "consensus": operator}
    for settings in (SUMS, replace(SUMS, average="uniform", head_start="closed_form")):
        _, events = toy("fedharmony", config, federation=settings, rounds=5).run()
        assert [event["left_out"] for event in events] == [[]] * 5


def test_a_sum_that_cannot_be_used_names_all_who_are_in_it() -> None:
    """Nobody can tell whose share it was: the round counts for nothing."""

    class Spoilt(Masked):
        def total(self, *arguments: Any) -> Total:
            total = super().total(*arguments)
            return replace(total, record=Record({PARAMS: {"w": torch.full((1,), torch.nan)}}))

    few = replace(SUMS, max_failures=1.0)
    own = toy("fedavg", federation=few, cohort=6, rounds=1, names=tuple("abcdef"))
    own.transport = Spoilt(own.transport)
    state, (event,) = own.run()
    assert sorted(f["name"] for f in event["left_out"]) == list("abcdef")
    assert "not finite" in event["left_out"][0]["reason"]
    assert same_bits(Record({PARAMS: state.get(PARAMS)}), Record({PARAMS: own.parameters()[0]}))


def test_a_sum_over_too_few_is_thrown_away() -> None:
    """The event names whose shares were not used; none of them is at fault."""
    own = toy("fedavg", federation=replace(SUMS, sum_least=5, max_failures=0.0), rounds=1)
    state, (event,) = own.run()
    assert same_bits(Record({PARAMS: state.get(PARAMS)}), Record({PARAMS: own.parameters()[0]}))
    assert event["reported"] == []
    assert [f["client"] for f in event["left_out"]] == event["cohort"]
    assert "its sum has 4 shares, federation.sum_least is 5" in event["left_out"][0]["reason"]
    enough = toy("fedavg", federation=replace(SUMS, sum_least=4), rounds=1)
    assert len(enough.run()[1][0]["reported"]) == 4


def test_a_stranger_and_a_second_answer_are_not_added() -> None:
    class Twice:
        sizes = {0: 1, 1: 1}  # noqa: RUF012

        def exchange(self, stage: Any, round: int, messages: Any) -> Iterator[Reply]:
            for client in (0, 0, 7):
                yield Reply(client, 0, Record({PARAMS: {"w": torch.ones(1)}}), True)

    stage = toy("fedavg").method.stages(0)[0]
    total = AddedUp(Twice()).total(stage, 0, {0: Record(), 1: Record()})
    assert total.record is not None
    assert total.record.get(PARAMS)["w"] == 1
    assert total.clients == (0,)
    assert [failure.client for failure in total.failures] == [0, 7, 1]


def test_resumes_to_the_bit(tmp_path: Path) -> None:
    options: dict[str, Any] = {"federation": SUMS, "rounds": 4, "memory": tmp_path / "memory"}
    own = toy("fedharmony", **options)

    def save(round: int, state: Record) -> None:
        save_record(tmp_path / f"{round + 1}", state)

    whole = own.loop().run(own.initial(), 0, lambda e: None, save)
    for done in (1, 3):
        fresh = toy("fedharmony", **options)
        fresh.trainer.data.memory.rewind(done)
        state = load_record(tmp_path / f"{done}")
        assert same_bits(whole, fresh.loop().run(state, done, lambda e: None, lambda t, s: None))


# -- refused before round 0 ------------------------------------------------------------------------


def made(*changes: str) -> None:
    settings = load_settings("demo", ["federation.server_sees=sums", *changes])
    sizes = dict.fromkeys(range(20), 10)
    blueprint(settings, Facts(tuple("abcdefghijkl"), InputSpec(3, 16, 16), sizes))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (["run.method=fedcurv"], "single clients"),
        (["run.method=fednova"], "steps of each client"),
        (["run.method=fedrdn"], "a sum is no list"),
        (["run.method=fedharmony"], "temperature = 'bounded'"),
        (["run.method=fedharmony", "methods.fedharmony.consensus=median"], "sorts the values"),
        (["run.method=fedharmony:paper_literal"], "client_clusters"),
        (
            ["methods.fedharmony.teacher=this_round", "methods.fedharmony.temperature=1"],
            "same round",
        ),
        (["run.method=fedavg", "federation.robust=agreement"], "exclude each other"),
        (["run.method=fedavg", "federation.sampling=size"], "Leave federation.sampling out"),
        (["run.method=fedavg", "federation.central=true"], "no meaning"),
        (["run.method=fedavg", "federation.cohort=2"], "sum_least = 3"),
        (["run.method=fedavg", "attack.kind=sign_flip"], "changes replies"),
    ],
)
def test_what_needs_replies_is_refused_with_advice(changes: list[str], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        made(*changes)
    assert "server_sees" in str(caught.value)


@pytest.mark.parametrize("name", ["fedavg", "fedprox", "fedlgt", "spherefed"])
def test_what_works_on_sums_is_not_refused(name: str) -> None:
    made(f"run.method={name}")
    made("run.method=fedharmony", "methods.fedharmony.temperature=1")
    made("run.method=fedharmony", "methods.fedharmony.quality=false")
    made(f"run.method={name}", "attack.kind=label_flip")


def test_a_method_of_its_own_says_whether_it_can() -> None:
    """One that overrides ``aggregate`` and says nothing is refused."""

    class Loud(methods["fedavg"]):  # type: ignore[misc]
        def aggregate(self, *arguments: Any) -> Outcome:
            return super().aggregate(*arguments)

    assert "single replies" in toy("fedavg", method_class=Loud).method.no_sums
    assert toy("fedavg").method.no_sums == ""
