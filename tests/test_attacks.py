"""Attacks: what each lie changes, and that nothing else knows of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedharmony.attacks import Attacked, Attackers, AttackSettings, attacks
from fedharmony.attacks.base import Scene
from fedharmony.consensus import CORRELATION
from fedharmony.correlation import unpack_upper
from fedharmony.engine.head_sums import SUMS
from fedharmony.errors import ConfigError
from fedharmony.experiments.build import assemble
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.run import start
from fedharmony.experiments.settings import compose, load_settings
from fedharmony.server.federation import FederationSettings
from fedharmony.types import BUFFERS, PARAMS, Record, Reply
from toy import Toy, same_bits, split

SMALL = ["data.train=160", "data.test=40", "split.clients=8", "run.rounds=2", "train.epochs=1"]
SMALL += ["model.width=16", "model.depth=1", "engine.threads=1"]
THETA = {"w": torch.tensor([1.0, 2.0]), "b": torch.tensor([0.5])}
TRAINED = {"w": torch.tensor([2.0, 0.0]), "b": torch.tensor([1.0])}


def attack(kind: str, clients: int = 5, share: float = 0.4, **options: Any) -> Attackers:
    return Attackers(AttackSettings(kind, share, **options), list(range(clients)), seed=0)  # type: ignore[arg-type]


class Echo:
    """A transport whose clients send one and the same record."""

    def __init__(self, reply: Record) -> None:
        self.sizes: Mapping[int, int] = dict.fromkeys(range(5), 10)
        self.reply = reply

    def exchange(self, stage: Any, round: int, messages: Mapping[int, Record]) -> Any:
        for client in messages:
            yield Reply(client, 10, self.reply, True)


def told(kind: str, reply: Record, **options: Any) -> tuple[Reply, Reply]:
    """An honest client's reply, and a liar's."""
    lies = attack(kind, **options)
    toy = Toy(rounds=1)
    messages = dict.fromkeys(range(5), Record({PARAMS: THETA}))
    stage = toy.method.stages(0)[0]
    found = {r.client: r for r in lies.over(Echo(reply)).exchange(stage, 0, messages)}
    assert list(found) == list(range(5))
    honest = next(k for k in range(5) if k not in lies.malicious)
    return found[honest], found[min(lies.malicious)]


def params(kind: str, **options: Any) -> dict[str, list[float]]:
    honest, liar = told(kind, Record({PARAMS: TRAINED, BUFFERS: {"m": torch.ones(1)}}), **options)
    assert all(torch.equal(honest.record.get(PARAMS)[n], t) for n, t in TRAINED.items())
    assert honest.finite
    assert liar.finite is None
    assert liar.record.get(BUFFERS)["m"] == 1
    return {name: tensor.tolist() for name, tensor in liar.record.get(PARAMS).items()}


def test_lies_about_the_model_by_hand():
    """θ = (1, 2; ½), the update is (1, −2; ½)."""
    assert params("sign_flip") == {"w": [0, 4], "b": [0]}
    assert params("sign_flip", strength=2.0) == {"w": [-1, 6], "b": [-0.5]}
    assert params("scale", strength=3.0) == {"w": [4, -4], "b": [2]}
    assert params("free_rider") == {"w": [1, 2], "b": [0.5]}
    assert params("infinite")["w"] == [torch.inf] * 2
    assert all(np.isnan(params("not_a_number")["w"]))


def test_noise_has_the_strength_it_says():
    """rms(u) = √((1 + 4 + ¼)/3) for three numbers; over many, the noise has s times that."""
    honest = Record({PARAMS: {"w": torch.full((20_000,), 3.0)}})
    received = Record({PARAMS: {"w": torch.ones(20_000)}})

    def noise() -> torch.Tensor:
        draw = torch.Generator().manual_seed(0)
        scene = Scene({1: received}, {1: honest}, {}, [], 5.0, lambda client: draw)
        return attacks["noise"]().replies(scene)[1].get(PARAMS)["w"] - 3

    assert noise().std().item() == pytest.approx(5.0 * 2.0, rel=0.02)
    assert torch.equal(noise(), noise())


@pytest.mark.parametrize(
    ("kind", "name", "options"),
    [
        ("alie", "ALittleIsEnough", {"tau": 0.7}),
        ("inner_product", "InnerProductManipulation", {"tau": 0.7}),
        ("mimic", "Mimic", {"epsilon": 0}),
    ],
)
def test_attacks_are_those_of_byzfl(kind: str, name: str, options: dict[str, float]):
    """Four honest updates of three numbers are seen by one malicious client."""
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    byzfl = pytest.importorskip("byzfl", exc_type=(ImportError, RuntimeError))
    updates = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    received = Record({PARAMS: {"w": torch.ones(3)}})
    honest = [Record({PARAMS: {"w": 1 + update}}) for update in updates]
    scene = Scene({9: received}, {9: honest[0]}, {}, honest, 0.7, lambda k: torch.Generator())
    found = attacks[kind]().replies(scene)[9].get(PARAMS)["w"] - 1
    expected = getattr(byzfl, name)(**options)(updates)
    torch.testing.assert_close(found, torch.as_tensor(expected))


def test_an_honest_head_stands_on_a_false_backbone():
    """θ = (1; ½), honest (2; 1), trained on false labels (0; 0): the head is the honest one."""

    def sent(body: float, head: float) -> Record:
        return Record({PARAMS: {"w": torch.tensor([body]), "head.w": torch.tensor([head])}})

    scene = Scene(
        {3: sent(1.0, 0.5)}, {3: sent(2.0, 1.0)}, {3: sent(0.0, 0.0)}, [], 0.5, torch.Generator
    )
    model = attacks["backbone"]().replies(scene)[3].get(PARAMS)
    assert (model["w"].item(), model["head.w"].item()) == (0, 1)
    # Honest update (1; ½), false one (−1; −½), of the same length: half of it is added.
    model = attacks["blend"]().replies(scene)[3].get(PARAMS)
    assert (model["w"].item(), model["head.w"].item()) == pytest.approx((1.5, 0.75))


def test_lies_about_correlations():
    upper = torch.tensor([1.0, -0.25, 1.0])
    reply = Record({CORRELATION: {"upper": upper, "marginal": torch.ones(2)}})
    for kind, expected in (("ones", [1, 1, 1]), ("negated", [-1, 0.25, -1])):
        _, liar = told(f"correlation_{kind}", reply)
        assert liar.record.get(CORRELATION)["upper"].tolist() == expected
        assert torch.equal(liar.record.get(CORRELATION)["marginal"], torch.ones(2))
    _, liar = told("correlation_coordinated", reply)
    assert liar.record.get(CORRELATION)["upper"].tolist() == [-1, 1, -1]
    honest, liar = told("correlation_random", reply)
    drawn = liar.record.get(CORRELATION)["upper"]
    assert torch.equal(honest.record.get(CORRELATION)["upper"], upper)
    assert bool((drawn.abs() <= 1).all())
    assert not torch.equal(drawn, upper)


def test_lies_about_size_are_told_alike_everywhere():
    """Announced and claimed alike, so that the server cannot see it from that."""
    lies = attack("size", claim=4.0)
    transport = lies.over(Echo(Record()))
    assert transport.sizes == {k: 40 if k in lies.malicious else 10 for k in range(5)}
    honest, liar = told("size", Record(), claim=4.0)
    assert (honest.examples, liar.examples) == (10, 40)


def test_turned_sums_are_those_of_the_other_labels():
    """Two images f = 1, 3 of one label y = 0, 1: cross (3, 1) becomes the first image's, (1, 1)."""
    f = torch.tensor([[1.0, 1], [3, 1]], dtype=torch.float64)
    gram = (f.mT @ f)[None]
    sums = {"gram": torch.stack([gram[0, 0, 0], gram[0, 0, 1], gram[0, 1, 1]])[None]}
    sums["cross"] = torch.tensor([[3.0, 1.0]], dtype=torch.float64)
    _, liar = told("head_sums", Record({SUMS: sums}), strength=2.0)
    found = liar.record.get(SUMS)
    assert found["cross"].tolist() == [[2, 2]]
    torch.testing.assert_close(unpack_upper(found["gram"], 2), 2 * gram)


@pytest.mark.parametrize("kind", attacks.names())
def test_what_is_not_sent_cannot_be_lied_about(kind: str):
    reply = Record({"other": {"x": torch.ones(1)}})
    assert told(kind, reply)[1].record == reply


def test_labels_of_malicious_clients_are_false():
    data = Toy().data
    assert data is not None
    clients = split((20, 7, 1, 13, 19))
    classes = [f"label {c}" for c in range(6)]
    for kind, options in (("label_flip", {}), ("label_off", {"label": "label 2"})):
        lies = attack(kind, **options)
        found = lies.falsified(data, clients, classes)
        for client, images in clients.items():
            before, after = data.labels[images], found.labels[images]
            if client not in lies.malicious:
                assert np.array_equal(before, after)
            elif kind == "label_flip":
                assert np.array_equal(1 - before, after)
            else:
                assert not after[:, 2].any()
                assert np.array_equal(np.delete(before, 2, 1), np.delete(after, 2, 1))
    with pytest.raises(ConfigError, match="there is no label 'cat'"):
        attack("label_off", label="cat").falsified(data, clients, classes)
    most = int(data.labels.sum(0).argmax())
    off = attack("label_off").falsified(data, clients, classes).labels
    assert (off[:, most] != data.labels[:, most]).any()


def test_who_lies_is_drawn_by_the_seed():
    first = attack("not_a_number", clients=50, share=0.3)
    assert len(first.malicious) == 15
    assert first.malicious == attack("scale", clients=50, share=0.3).malicious
    assert first.malicious != replace(first, seed=1).malicious
    assert not attack("none", clients=50).malicious


def test_lies_last_for_the_rounds_that_are_set():
    lies = attack("scale", rounds=(2, 3))
    assert [bool(lies.attacking(t, range(5))) for t in range(4)] == [False, True, True, False]
    liar = min(lies.malicious)
    assert lies.attacking(1, [liar]) == [liar]


# -- in a run -------------------------------------------------------------------------------------


def run(tmp_path: Path, name: str, *changes: str) -> list[dict[str, Any]]:
    folder = RunFolder(tmp_path / name)
    start(load_settings("demo", [*SMALL, *changes]), folder, lambda event: None)
    return [json.loads(line) for line in folder.events.read_text().splitlines()]


def test_a_run_names_its_liars_and_leaves_out_what_is_not_finite(tmp_path: Path):
    changes = ("run.method=fedavg", "attack.kind=not_a_number", "attack.share=0.25")
    events = run(tmp_path, "not_a_number", *changes, "attack.rounds=[2, 2]")
    first, second = (event for event in events if event["event"] == "round")
    assert first["malicious"] == []
    failed = [failure["client"] for failure in second["left_out"]]
    assert failed == second["malicious"] != []
    plain = run(tmp_path, "plain", "run.method=fedavg")
    assert all("malicious" not in event for event in plain)
    losses = [e["train_loss"] for e in plain if e["event"] == "round"]
    assert losses[0] == first["train_loss"]


@pytest.mark.parametrize("kind", [name for name in attacks.names() if attacks[name].strength])
def test_lies_pass_the_servers_checks_and_change_the_model(kind: str):
    """Nobody is left out: these lies cannot be told from the truth by looking at one reply."""
    opening = FederationSettings(head_start="closed_form")
    plain = Toy("fedharmony", rounds=1, federation=opening).run()[0]
    toy = Toy("fedharmony", rounds=1, federation=opening)
    toy.transport = attack(kind).over(toy.transport)
    assert isinstance(toy.transport, Attacked)
    state, events = toy.run()
    assert not events[0]["left_out"]
    assert not same_bits(Record({PARAMS: state.get(PARAMS)}), Record({PARAMS: plain.get(PARAMS)}))


def test_false_labels_are_the_malicious_clients_alone_and_by_round(tmp_path: Path):
    """Round 1 is that of an honest run; the run's data, split and hashes are always the true ones.

    In round 2 the losses of malicious clients are on other labels, and so is the mean loss.
    """
    changes = ["run.method=fedavg", "attack.kind=label_flip", "attack.share=0.25"]
    attacked, honest = (assemble(load_settings("demo", [*SMALL, *c])) for c in (changes, ()))
    malicious = attacked.attackers.malicious
    assert len(malicious) == 2
    train = attacked.data.train
    false = attacked.attackers.falsified(train, attacked.clients, attacked.data.classes)
    for client, images in attacked.clients.items():
        changed = false.labels[images] != honest.data.train.labels[images]
        assert changed.all() if client in malicious else not changed.any()
    assert attacked.bound == honest.bound
    assert np.array_equal(train.labels, honest.data.train.labels)
    late = run(tmp_path, "late", *changes, "attack.rounds=[2, 2]")
    plain = run(tmp_path, "plain", "run.method=fedavg")
    losses = [[e["train_loss"] for e in es if e["event"] == "round"] for es in (late, plain)]
    assert losses[0][0] == losses[1][0]
    assert losses[0][1] != losses[1][1]


def test_attacks_are_written_down_as_they_are_read():
    settings = load_settings("demo", ["attack.kind=scale", "attack.rounds=[2, 3]"])
    assert settings.attack.rounds == (2, 3)
    assert compose(settings.tree()).attack == settings.attack


def test_no_attack_adds_nothing():
    honest = Echo(Record())
    assert attack("none").over(honest) is honest


def test_an_attacked_run_repeats_and_resumes_to_the_bit():
    def states(start: int, state: Record | None) -> list[Record]:
        toy = Toy("fedharmony", rounds=3)
        toy.transport = attack("noise").over(toy.transport)
        found: list[Record] = []
        toy.loop().run(state or toy.initial(), start, lambda e: None, lambda t, s: found.append(s))
        return found

    first = states(0, None)
    assert same_bits(first[-1], states(2, first[1])[-1])


# -- refused before round 0 -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["attack.kind=nonsense"], "attack.kind"),
        (["attack.kind=not_a_number", "attack.share=1"], "attack.share"),
        (["attack.kind=not_a_number", "attack.share=-0.1"], "attack.share"),
        (["attack.kind=not_a_number", "attack.strength=2"], "has no meaning"),
        (["attack.kind=not_a_number", "attack.rounds=[3, 2]"], "ends before it begins"),
        (["attack.kind=not_a_number", "attack.label=cat"], "label_off"),
    ],
)
def test_bad_settings_are_refused(changes: list[str], words: str):
    with pytest.raises(ConfigError, match=words):
        load_settings("demo", changes)


def test_an_attack_by_nobody_is_refused():
    changes = [*SMALL, "attack.kind=not_a_number", "attack.share=0.01"]
    with pytest.raises(ConfigError, match="is nobody"):
        assemble(load_settings("demo", changes))


def test_one_party_cannot_be_attacked():
    changes = [*SMALL, "run.method=fedavg", "federation.central=true", "attack.kind=not_a_number"]
    with pytest.raises(ConfigError, match="nobody is malicious"):
        assemble(load_settings("demo", changes))
    central = load_settings("demo", [*SMALL, "attack.kind=not_a_number"]).central(0)
    assert central.attack.kind == "none"
