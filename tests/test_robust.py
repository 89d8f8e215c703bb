"""Rules of averaging that tolerate malicious clients: by hand, attacked, and as identities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedharmony import correlation as corr
from fedharmony.aggregate import ModelMean
from fedharmony.attacks import Attackers, AttackSettings
from fedharmony.consensus import CORRELATION
from fedharmony.errors import ConfigError
from fedharmony.experiments.blueprint import refuse_small_cohort
from fedharmony.experiments.settings import load_settings
from fedharmony.methods.base import methods
from fedharmony.methods.fedharmony import FedHarmony
from fedharmony.robust import ROBUST, Robust, rules
from fedharmony.robust.agreement import agreeing, cosines
from fedharmony.robust.base import capped
from fedharmony.server import head_trust
from fedharmony.server.federation import FederationSettings
from fedharmony.types import BUFFERS, PARAMS, Layout, Packed, Record, Reply
from toy import Toy, largest_difference, same_bits, toy_data

RULES = rules.names()
F64 = torch.float64


def model(*numbers: float, **buffers: Tensor) -> Record:
    return Record({PARAMS: {"w": torch.tensor(numbers, dtype=F64)}, BUFFERS: buffers})


def averaged(rule: str, models: list[Record], weights: list[float]) -> list[float]:
    """The new model after a received one of zeros."""
    size = len(models[0].get(PARAMS)["w"])
    state = model(*[0.0] * size)
    mean = Robust(rule).mean(state)
    for client, (record, weight) in enumerate(zip(models, weights, strict=True)):
        mean.fold(Reply(client, 1, record), weight)
    return mean.update(state).get(PARAMS)["w"].tolist()


def draws(clients: int, numbers: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(clients, numbers, generator=generator, dtype=F64)


def in_agreement(updates: Tensor) -> list[int]:
    """1 for those that agree with most."""
    gram = updates.double() @ updates.double().mT
    return agreeing(cosines(gram), gram.diagonal() > 0).int().tolist()


# -- the rule "agreement" by hand ------------------------------------------------------------------


def test_agreement_by_hand():
    """Directions a = b = (1, 0), c = (0.6, 0.8), d = (−1, 0), and an update e of zero.

    c agrees with a and b by 0.6, d with nobody, e has no direction: both are left out. Of the
    lengths 2, 4, 5, 9 and 0 the median is 4, and so it is of a, b and c: c is cut to (2.4, 3.2).
    a and b are different voices: their distance 2 is all of that to the client in the middle.
    (2 + 4 + 2.4)/3 = 2.8, and 3.2/3.
    """
    models = [model(2, 0), model(4, 0), model(3, 4), model(-9, 0), model(0, 0)]
    assert averaged("agreement", models, [1] * 5) == pytest.approx([2.8, 3.2 / 3])


@pytest.mark.parametrize(("cosine", "kept"), [(0.51, 1), (0.49, 0)])
def test_half_of_the_mean_cosine_decides_about_a_minority(cosine: float, kept: int):
    """Three updates with cosines of 1; a fourth has this one with each of them."""
    updates = torch.tensor([[1.0, 0], [2, 0], [1, 0], [cosine, (1 - cosine**2) ** 0.5]])
    assert in_agreement(updates) == [1, 1, 1, kept]


@pytest.mark.parametrize(("cosine", "kept"), [(0.11, 1), (0.09, 0)])
def test_more_is_needed_where_clients_hardly_agree(cosine: float, kept: int):
    """Four clients with cosines of 0.25 to each other, a fifth with this one to each of them.

    Both are less than half of 0.25, but only the second is by 0.15 less.
    """
    seen = torch.full((5, 5), 0.25, dtype=F64).fill_diagonal_(1)
    seen[4, :4] = seen[:4, 4] = cosine
    assert agreeing(seen, torch.ones(5) > 0).int().tolist() == [1, 1, 1, 1, kept]


@pytest.mark.parametrize("updates", [[[1.0, 0], [1, 0], [-1, 0], [-1, 0]], [[0.0, 0]] * 3])
def test_ties_leave_nobody_out(updates: list[list[float]]):
    """Two against two, and three updates of zero: nobody can say who is honest."""
    assert in_agreement(torch.tensor(updates)) == [1] * len(updates)


@pytest.mark.parametrize("lie", [-1.0, 0.0])
def test_malicious_clients_that_agree_are_still_a_minority(lie: float):
    """Nine honest updates with cosines of 0.4, against six that say the same, which is the opposite
    or has nothing to do with it; they agree among themselves more than the honest ones do."""
    honest, other = draws(9, 500, 0), torch.eye(500, dtype=F64)
    honest = honest / honest.norm(dim=1, keepdim=True) + 0.8 * other[0]
    updates = torch.cat([honest, (lie * other[0] + (1 + lie) * other[1]).expand(6, 500)])
    assert in_agreement(updates) == [1] * 9 + [0] * 6


def test_honest_clients_that_hardly_agree_all_stay():
    honest = draws(15, 500, 1)
    honest = honest / honest.norm(dim=1, keepdim=True) + 0.5 * torch.eye(500, dtype=F64)[0]
    assert in_agreement(honest) == [1] * 15


def test_updates_of_zero_are_all_left_out_however_many_there_are():
    """They have no direction, and would only blur that of the others."""
    honest = draws(9, 500, 2)
    honest = honest / honest.norm(dim=1, keepdim=True) + 0.8 * torch.eye(500, dtype=F64)[0]
    assert in_agreement(torch.cat([honest, torch.zeros(6, 500)])) == [1] * 9 + [0] * 6


def test_more_than_half_of_a_cohort_is_always_kept():
    """Three pairs that have nothing to do with each other: leaving out two would leave a third."""
    assert sum(in_agreement(torch.eye(3).repeat_interleave(2, 0))) > 3


def judged(heads: Tensor, bodies: Tensor) -> tuple[dict[int, float], dict[int, str]]:
    """Weights and reasons for a cohort with these updates of the head and of a numbered block."""
    names = {"head.weight": heads, "blocks.0.weight": bodies}
    state = Record({PARAMS: {name: torch.zeros_like(rows[0]) for name, rows in names.items()}})
    mean = Robust("agreement").mean(state)
    for k in range(len(heads)):
        reply = Record({PARAMS: {name: rows[k] for name, rows in names.items()}})
        mean.fold(Reply(k, 1, reply), 1.0)
    mean.update(state)
    return mean.weights, mean.left_out


def test_an_honest_head_does_not_hide_another_backbone():
    """Nine honest bodies hardly agree; six others, with honest heads, agree with each other."""
    heads = 1 + 0.5 * draws(15, 300, 0)
    bodies, common = draws(15, 3000, 1), draws(2, 3000, 2)
    bodies[:9] += 0.35 * common[0]
    bodies[9:] += common[1]
    weights, left_out = judged(heads, bodies)
    assert sorted(left_out) == [9, 10, 11, 12, 13, 14]
    assert all("blocks.0" in reason for reason in left_out.values())
    assert list(weights.values()) == pytest.approx([1 / 9] * 9 + [0] * 6)


def test_a_group_that_half_agrees_stays():
    """The known limit: honest updates have nothing in common, six others have cosines of ½.

    Heads that agree, as they do in training, give the six away: the whole model shows them.
    """
    bodies = draws(15, 3000, 1)
    bodies[9:] += draws(1, 3000, 2)
    weights, left_out = judged(torch.zeros(15, 300), bodies)
    assert not left_out
    assert list(weights.values()) == pytest.approx([1 / 15] * 15)
    assert sorted(judged(1 + 0.5 * draws(15, 300, 0), bodies)[1]) == [9, 10, 11, 12, 13, 14]


def test_fewer_than_half_are_left_out_whatever_blocks_say():
    """Clients 3 and 4 point back in the head, 0 and 1 in the body: two of the four are left out."""
    common = draws(2, 500, 0)
    heads, bodies = common[0] + 0.5 * draws(5, 500, 1), common[1] + 0.5 * draws(5, 500, 2)
    heads[3:], bodies[:2] = -heads[3:], -bodies[:2]
    assert len(judged(heads, bodies)[1]) == 2


def test_copies_of_one_update_share_one_weight():
    """Nine honest clients, and six who all send their mean and a standard deviation."""
    heads = 1 + 0.5 * draws(9, 300, 0)
    lie = heads.mean(0) + heads.std(0)
    weights, left_out = judged(torch.cat([heads, lie.expand(6, 300)]), torch.zeros(15, 300))
    assert not left_out
    assert list(weights.values()) == pytest.approx([1 / 10] * 9 + [1 / 60] * 6)


def test_small_deviations_add_up_over_rounds():
    """Cosines 0.6 and 0.2: their running mean with share 0.7 is 0.48."""
    state = model(0, 0)
    for cosine in (0.6, 0.2):
        mean = Robust("agreement").mean(state)
        for k in range(3):
            row = [1.0, 0.0] if k < 2 else [cosine, (1 - cosine**2) ** 0.5]
            mean.fold(Reply(k, 1, model(*row)), 1)
        state = model(0, 0).replace({ROBUST: mean.update(state).get(ROBUST)})
    assert state.get(ROBUST)["rest"][0, 2].item() == pytest.approx(0.7 * 0.6 + 0.3 * 0.2)


def test_long_updates_that_are_most_of_those_kept_are_still_cut():
    """Updates 1, 90 and 80 east, 1 north and 1 south-west: north and south-west are left out.

    Of the three lengths that are kept the median is 80, of all five it is 1: none counts for more.
    """
    models = [model(1, 0), model(90, 0), model(80, 0), model(0, 1), model(-0.6, -0.8)]
    assert averaged("agreement", models, [1] * 5) == pytest.approx([1, 0])


def test_weights_are_capped_by_hand():
    """Weights 2, 4, 4, 90 have the median 4, and none counts for more."""
    assert capped(torch.tensor([2.0, 4, 4, 90])).tolist() == [2, 4, 4, 4]


@pytest.mark.parametrize("rule", RULES)
def test_claims_of_ten_times_the_images_gain_nothing(rule: str):
    """Three of seven claim ten times their images: the median claim is an honest one."""
    models = [model(*row) for row in (1 + 0.3 * draws(7, 50, 0)).tolist()]
    assert averaged(rule, models, [1] * 4 + [10] * 3) == averaged(rule, models, [1] * 7)
    assert averaged("none", models, [1] * 4 + [10] * 3) != averaged("none", models, [1] * 7)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("packed", [True, False])
def test_parts_and_memory_do_not_matter(rule: str, packed: bool, monkeypatch: pytest.MonkeyPatch):
    """Packed rows, or tensor by tensor; all at once, or a few numbers at a time."""
    layout = Layout.of({"a": (3, 2), "b": (5,)})

    def record(seed: int, pack: bool = packed) -> Record:
        row = torch.zeros(layout.length)
        for place in layout.places.values():
            size = place.stop - place.start
            row[place] = torch.randn(size, generator=torch.Generator().manual_seed(seed))
        tensors = Packed(layout, row)
        return Record({PARAMS: tensors if pack else {n: t.clone() for n, t in tensors.items()}})

    def result(pack: bool, at_once: int) -> Record:
        monkeypatch.setitem(corr.AT_ONCE, "cpu", at_once)
        mean = Robust(rule).mean(record(0, pack))
        for seed in range(1, 10):
            mean.fold(Reply(seed, 1, record(seed, pack)), float(seed))
        return mean.update(record(0, pack))

    assert largest_difference(result(packed, 13), result(False, 10**6)) < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_two_liars_of_seven_cannot_carry_the_model_away(rule: str):
    """Honest updates lie within 1 of (1, 1); two liars are 1e6 away, in the same direction."""
    values = draws(5, 2, 0)
    honest = [model(*(1 + 0.3 * v).tolist()) for v in values]
    liars = [model(1e6, -1e6)] * 2
    assert abs(averaged("none", honest + liars, [1] * 7)[0]) > 1e5
    assert np.linalg.norm(np.subtract(averaged(rule, honest + liars, [1] * 7), 1)) < 2


# -- identities -----------------------------------------------------------------------------------


def trained(name: str, **options: Any) -> Record:
    return Toy(name, rounds=2, federation=FederationSettings(**options)).run()[0]


def test_no_rule_is_the_plain_mean():
    assert type(Robust().mean(model(0))) is ModelMean


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", sorted(methods.names()))
def test_every_method_trains_with_every_rule(name: str, rule: str):
    """Sizes of 20 to 1."""
    options = FederationSettings(robust=rule)
    state, events = Toy(name, rounds=1, epochs=1, federation=options).run()
    assert all(entry["cause"] == "rule" for entry in events[0]["left_out"])
    plain = Toy(name, rounds=1, epochs=1).run()[0]
    assert all(bool(t.isfinite().all()) for t in state.get(PARAMS).values())
    pairs = [(state.get(PARAMS)[n], t) for n, t in plain.get(PARAMS).items()]
    assert any(not torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_buffers_keep_their_type_and_whole_numbers_their_value(rule: str, kind: torch.dtype):
    state = model(0, steps=torch.tensor(3), mean=torch.zeros(1, dtype=kind))
    mean = Robust(rule).mean(state)
    for k in range(5):
        reply = model(k, steps=torch.tensor(k), mean=torch.full((1,), 2.0, dtype=kind))
        mean.fold(Reply(k, 1, reply), 1)
    buffers = mean.update(state).get(BUFFERS)
    assert buffers["steps"] == 3
    assert buffers["mean"] == 2
    assert buffers["mean"].dtype == kind


def test_buffers_of_a_client_that_is_left_out_do_not_count():
    state = model(0, 0, mean=torch.zeros(1))
    mean = Robust("agreement").mean(state)
    rows = [(2, 0), (4, 0), (3, 4), (-9, 0), (0, 0)]
    for k, value in enumerate([1.0, 2.0, 3.0, 100.0, 100.0]):
        mean.fold(Reply(k, 1, model(*rows[k], mean=torch.tensor([value]))), 1)
    assert mean.update(state).get(BUFFERS)["mean"] == 2
    assert list(mean.left_out) == [3, 4]


def test_nobody_answered_keeps_the_state():
    state = model(1, 2)
    assert all(Robust(rule).mean(state).update(state) is state for rule in RULES)


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_resumes_to_the_bit(rule: str):
    """Two rounds, then two more from the state alone: as four at once, memory and all."""
    toy = Toy(rounds=4, federation=FederationSettings(robust=rule))
    states: list[Record] = []
    toy.loop().run(toy.initial(), 0, lambda e: None, lambda t, state: states.append(state))
    later: list[Record] = []
    toy.loop().run(states[1], 2, lambda e: None, lambda t, state: later.append(state))
    assert same_bits(later[-1], states[-1])
    assert ROBUST in states[-1].groups
    forgotten = Record({g: m for g, m in states[1].groups.items() if g != ROBUST})
    toy.loop().run(forgotten, 2, lambda e: None, lambda t, state: later.append(state))
    assert not same_bits(later[-1], states[-1])


def test_the_event_has_the_weights_that_were_used_and_who_was_left_out():
    """Two of seven clients send the opposite update: nothing of them is in the mean."""
    options = FederationSettings(robust="agreement", average="uniform")
    toy = Toy(sizes=(9,) * 7, rounds=1, federation=options)
    toy.transport = Attackers(AttackSettings("sign_flip", 0.3), range(7), 0).over(toy.transport)
    malicious = {str(k) for k in toy.transport._attackers.malicious}
    (event,) = toy.run()[1]
    assert {str(entry["client"]) for entry in event["left_out"]} == malicious
    assert all(entry["cause"] == "rule" for entry in event["left_out"])
    assert "disagrees with most" in event["left_out"][0]["reason"]
    expected = {str(k): 0.0 if str(k) in malicious else 1 / 5 for k in range(7)}
    assert event["weights"] == pytest.approx(expected)


@pytest.mark.parametrize("few", [1, 2])
def test_a_round_that_is_too_small_for_the_rule_keeps_the_model(few: int):
    """Of seven clients one or two answer: nobody can say which is honest."""
    options = FederationSettings(robust="agreement")
    toy = Toy(sizes=(9,) * 7, rounds=1, cohort=few, federation=options)
    state, (event,) = toy.run()
    assert same_bits(state, toy.initial())
    assert [entry["client"] for entry in event["left_out"]] == event["cohort"]
    assert f"agreement needs 3 clients, and the round has {few}" in event["left_out"][0]["reason"]
    assert event["weights"] == {}


# -- refused before round 0 -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("federation.robust=mean", "robust"),
        ("federation.robust=multi_krum", "'multi_krum' is gone: .* Write .* 'agreement'"),
        ("federation.robust_bad=0.3", "robust_bad is gone: .* leave it out"),
        ("federation.robust_bound=2", "robust_bound is gone: .* leave it out"),
        ("federation.robust_cap=3", "robust_cap is gone: .* leave it out"),
        ("methods.fedharmony.trim=0.5", "trim"),
        ("methods.fedharmony.consensus=krum", "consensus"),
    ],
)
def test_bad_settings_are_refused(change: str, words: str):
    with pytest.raises(ConfigError, match=words):
        load_settings("demo", [change])


@pytest.mark.parametrize("rule", RULES)
def test_a_cohort_in_which_no_malicious_client_is_tolerated_is_refused(rule: str):
    """Of two clients nobody can say which is honest."""
    with pytest.raises(ConfigError, match="the smallest cohort is 3"):
        refuse_small_cohort(Robust(rule), 2)
    refuse_small_cohort(Robust(rule), 3)
    refuse_small_cohort(Robust(), 1)


# -- the closed-form head -------------------------------------------------------------------------


def sums_of(features: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """What a client sends: A_k and B_k of f̃ = [f, 1]."""
    f = torch.cat([features, torch.ones(len(features), 1)], dim=1).double()
    return {"gram": corr.pack_upper((f.mT @ f)[None]), "cross": labels.double().mT @ f}


def test_the_error_of_a_head_follows_from_sums():
    """F = 0, 1, 3 with y = 0, 1, 0 and v = (½, ¼): residuals −¼, ¼, −1¾; squares sum to 3.1875."""
    f, y = torch.tensor([[0.0], [1.0], [3.0]]), torch.tensor([[0.0], [1.0], [0.0]])
    head = torch.tensor([[0.5, 0.25]], dtype=F64)
    assert head_trust._error(sums_of(f, y), head) == pytest.approx(3.1875 / 3)


def clients_of(count: int) -> list[tuple[Tensor, Tensor]]:
    """30 images each: five features, three labels at about a tenth that a line predicts."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(5, 3, generator=generator)
    found = []
    for _ in range(count):
        features = torch.randn(30, 5, generator=generator)
        found.append((features, (features @ truth > 2.5).float()))
    return found


@pytest.mark.parametrize("lie", ["turned", "scaled", "labels"])
def test_sums_of_liars_are_left_out(lie: str):
    honest = [sums_of(f, y) for f, y in clients_of(10)]
    liars = [sums_of(f, 1 - y if lie == "turned" else y) for f, y in clients_of(3)]
    if lie == "scaled":  # ten times as many images as announced
        liars = [{name: 10 * tensor for name, tensor in own.items()} for own in liars]
    if lie == "labels":  # more images of a label than there are
        liars = [{**own, "cross": own["cross"] * 100} for own in liars]
    kept = head_trust.trusted([*liars, *honest], [30] * 13, 0.01)
    assert [id(own) for own in kept] == [id(own) for own in honest]


def test_honest_sums_are_all_believed():
    honest = [sums_of(f, y) for f, y in clients_of(8)]
    assert len(head_trust.trusted(honest, [30] * 8, 0.01)) == 8
    assert head_trust.trusted([], [], 0.01) == []


@pytest.mark.parametrize("known", [False, True])
def test_a_head_start_with_liars_is_that_of_the_others(known: bool):
    """With a matrix per label, too: where some labels are unknown."""
    data = toy_data(200)
    if known:
        mask = np.random.default_rng(0).random(data.labels.shape) < 0.8
        data = replace(data, known=mask)

    def head(share: float, robust: str) -> Tensor:
        options = FederationSettings(head_start="closed_form", robust=robust)
        toy = Toy(sizes=(40,) * 5, rounds=1, data=data, federation=options)
        if share:
            lies = AttackSettings("head_sums", share, strength=5.0)
            toy.transport = Attackers(lies, range(5), 0).over(toy.transport)
        first, *_ = toy.loop().stages(0)
        sent = first.broadcast(toy.initial(), 0, range(5))
        replies = toy.transport.exchange(first, 0, sent)
        state = first.aggregate(toy.initial(), 0, sent, iter(list(replies))).state
        return state.get(PARAMS)["head.weight"]

    truth = head(0.0, "none")
    assert torch.equal(head(0.0, "agreement"), truth)
    lied, borne = head(0.2, "none"), head(0.2, "agreement")
    assert (borne - truth).norm() < 0.5 * (lied - truth).norm()


@pytest.mark.parametrize(("rule", "expected"), [("agreement", 10), ("none", 100)])
def test_the_consensus_weighs_by_no_larger_claim_than_the_median(rule: str, expected: int):
    """Client 4 of five with 10 images claims 100."""
    federation = FederationSettings(robust=rule, participation=1.0)
    toy = Toy("fedharmony", sizes=(10,) * 5, rounds=1, federation=federation)
    told = {"upper": torch.ones(21), "marginal": torch.full((6,), 0.5)}
    replies = [Reply(k, 100 if k == 4 else 10, Record({CORRELATION: told})) for k in range(5)]
    assert isinstance(toy.method, FedHarmony)
    assert [reply.examples for reply in toy.method.capped(replies)] == [10] * 4 + [expected]
