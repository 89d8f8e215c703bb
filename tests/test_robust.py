"""Rules of averaging that bear liars: by hand, against NumPy and SciPy, and as identities."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize
from scipy.stats import trim_mean
from torch import Tensor

from fedharmony import correlation as corr
from fedharmony.aggregate import ModelMean
from fedharmony.attacks import Attackers, AttackSettings
from fedharmony.errors import ConfigError
from fedharmony.experiments.blueprint import refuse_small_cohort
from fedharmony.experiments.settings import load_settings
from fedharmony.methods.base import methods
from fedharmony.robust import ROBUST, Robust, rules
from fedharmony.robust.agreement import same_direction
from fedharmony.robust.base import capped, trimmed
from fedharmony.robust.distances import geometric_median, krum
from fedharmony.server import head_trust
from fedharmony.server.federation import FederationSettings
from fedharmony.types import BUFFERS, PARAMS, Layout, Packed, Record, Reply
from toy import Toy, largest_difference, same_bits, toy_data

RULES = rules.names()
F64 = torch.float64
quick = settings(max_examples=40, derandomize=True)


def model(*numbers: float, **buffers: Tensor) -> Record:
    return Record({PARAMS: {"w": torch.tensor(numbers, dtype=F64)}, BUFFERS: buffers})


def averaged(
    rule: str, models: list[Record], weights: list[float], **options: float
) -> list[float]:
    """The new model after a received one of zeros."""
    size = len(models[0].get(PARAMS)["w"])
    state = model(*[0.0] * size)
    mean = Robust(rule, **options).mean(state)  # type: ignore[arg-type]
    for client, (record, weight) in enumerate(zip(models, weights, strict=True)):
        mean.fold(Reply(client, 1, record), weight)
    return mean.update(state).get(PARAMS)["w"].tolist()


# -- each rule by hand ----------------------------------------------------------------------------


def test_the_norm_bound_by_hand():
    """Updates (3, 4), (0, 5), (60, 80) have lengths 5, 5, 100; their median is 5. The third is cut
    to (3, 4), and (3 + 0 + 3)/3, (4 + 5 + 4)/3 is their mean.
    """
    models = [model(3, 4), model(0, 5), model(60, 80)]
    assert averaged("norm_bound", models, [1, 1, 1], bound=1) == pytest.approx([2, 13 / 3])


def test_the_norm_bound_remembers_lengths():
    """Lengths 1, 1, 1 of the last round and 2, 2, 8 of this one: the median of all six is 1.5, and
    each update is cut to that: 1.5 · (1, 1, 1)/3 of the directions (1, 0), (0, 1), (1, 0).
    """
    state = model(0, 0).replace({ROBUST: {"lengths": torch.ones(3, dtype=F64)}})
    mean = Robust("norm_bound", bound=1).mean(state)
    for client, record in enumerate((model(2, 0), model(0, 2), model(8, 0))):
        mean.fold(Reply(client, 1, record), 1)
    after = mean.update(state)
    assert after.get(PARAMS)["w"].tolist() == pytest.approx([1.0, 0.5])
    assert after.get(ROBUST)["lengths"].tolist() == [1, 1, 1, 2, 2, 8]


def test_the_trimmed_mean_by_hand():
    """Values 0, 1, 3, 100 by weights 1, 2, 2, 1: a quarter of 6 is 1.5. Left are 1.5 of the second
    and 1.5 of the third weight: (1.5·1 + 1.5·3)/3 = 2.
    """
    values = torch.tensor([[3.0], [100.0], [0.0], [1.0]])
    weights = torch.tensor([2.0, 1.0, 1.0, 2.0], dtype=F64)
    assert trimmed(values, weights, 0.25)[0].item() == pytest.approx(2)


def test_the_weighted_median_by_hand():
    """Half of the weight 1 + 1 + 3 lies below 7: the median is 7. Of 1, 2 with equal weights it is
    their mean; with 1 + 2 against 3, exactly half each, the mean of 2 and 9.
    """

    def median(values: list[float], weights: list[float]) -> float:
        found = trimmed(torch.tensor(values)[:, None], torch.tensor(weights, dtype=F64), 0.5)
        return found[0].item()

    assert median([1, 2, 7], [1, 1, 3]) == 7
    assert median([2, 1], [1, 1]) == 1.5
    assert median([9, 1, 2], [3, 1, 2]) == 5.5


def test_multi_krum_by_hand():
    """Positions 0, 1, 2, 10, 11 with f = 1: scores are sums of the 5 − 1 − 2 = 2 smallest squared
    distances: 1 + 4, 1 + 1, 1 + 4, 1 + 64, 1 + 81. The last is left out; weights 1, 2, 1, 4 (capped
    at the median, 2), 9: (0 + 2 + 2 + 20)/6.
    """
    models = [model(0), model(1), model(2), model(10), model(11)]
    found = averaged("multi_krum", models, [1, 2, 1, 4, 9], bad=0.2)
    assert found == pytest.approx([(0 + 2 + 2 + 20) / 6])


def test_the_geometric_median_by_hand():
    """On a line it is the median. The corners of a square have their middle in common; a fifth
    point at the middle stays there, a far one moves it by little.
    """
    line = [model(x) for x in (1.0, 2.0, 50.0)]
    assert averaged("geometric_median", line, [1, 1, 1]) == pytest.approx([2.0], abs=1e-4)
    square = [model(1, 1), model(1, -1), model(-1, 1), model(-1, -1)]
    assert averaged("geometric_median", square, [1] * 4) == pytest.approx([0, 0], abs=1e-9)
    far = averaged("geometric_median", [*square, model(1e6, 0)], [1] * 5)
    assert 0 < far[0] < 1.1


def test_the_same_direction_by_hand():
    """Directions a = b = (1, 0), c = (0.6, 0.8), d = (−1, 0), and an update e of zero.

    Cosines: ab 1, ac and bc 0.6, those with e 0, those with d below. So a, b and c are joined
    first; inside their mean is 2.2/3, and d and e, with −0.65 and 0, are left out. Of the three,
    {a, b} and {c}: 0.6 between them is more than half of 1, so all are kept. Lengths 2, 4 and 5
    (and 9 and 0, with the same median): the third is cut to 4. (2 + 4 + 2.4)/3 = 2.8, and 3.2/3.
    """
    models = [model(2, 0), model(4, 0), model(3, 4), model(-9, 0), model(0, 0)]
    found = averaged("same_direction", models, [1] * 5, bound=1)
    assert found == pytest.approx([2.8, 3.2 / 3])


def test_half_of_the_mean_cosine_decides_about_a_minority():
    """{a, b, c} have cosines of 1; d has 0.51, then 0.49 with them; of 2 and 2 nobody is left."""
    for cosine, kept in [(0.51, [1, 1, 1, 1]), (0.49, [1, 1, 1, 0])]:
        sine = (1 - cosine**2) ** 0.5
        updates = torch.tensor([[1.0, 0], [2, 0], [1, 0], [cosine, sine]], dtype=F64)
        assert same_direction(updates @ updates.mT).tolist() == kept
    even = torch.tensor([[1.0, 0], [1, 0], [-1, 0], [-1, 0]], dtype=F64)
    assert same_direction(even @ even.mT).tolist() == [1, 1, 1, 1]


def test_a_quarter_less_is_needed_where_clients_hardly_agree():
    """Four clients with cosines of 0.3 to each other, a fifth with 0.06 or 0.04 to each of them.

    Both are less than half of 0.3, but only the second is by ¼ less. Cosines are taken as they are.
    """
    for cosine, kept in [(0.06, 1), (0.04, 0)]:
        gram = torch.full((5, 5), 0.3, dtype=F64).fill_diagonal_(1)
        gram[4, :4] = gram[:4, 4] = cosine
        assert same_direction(gram).tolist() == [1, 1, 1, 1, kept]


@pytest.mark.parametrize("lie", [-1.0, 0.0])
def test_liars_that_agree_are_still_a_minority(lie: float):
    """Nine honest updates with cosines of 0.4, against six that say the same, which is the opposite
    or has nothing to do with it; they agree among themselves more than the honest ones do."""
    honest, other = draws(9, 500, 0)[0], torch.eye(500, dtype=F64)
    honest = honest / honest.norm(dim=1, keepdim=True) + 0.8 * other[0]
    updates = torch.cat([honest, (lie * other[0] + (1 + lie) * other[1]).expand(6, 500)])
    assert same_direction(updates @ updates.mT).tolist() == [1] * 9 + [0] * 6


def test_without_liars_nobody_is_left_out():
    honest = draws(15, 500, 1)[0]
    honest = honest / honest.norm(dim=1, keepdim=True) + 0.5 * torch.eye(500, dtype=F64)[0]
    assert same_direction(honest @ honest.mT).all()


@pytest.mark.parametrize(
    ("head", "body", "found"),
    [
        ([-1.0, 0.0], [3.0, 0.0], [3.0, 0.0]),
        ([1.0, 0.0], [-30.0, 0.0], [3.0, 0.0]),
        ([1.0, 0.0], [0.0, 3.0], [2.25, 0.75]),
    ],
)
def test_heads_must_agree_and_the_rest_may_not_point_the_other_way(
    head: list[float], body: list[float], found: list[float]
):
    """Three clients with head (1, 0) and body (3, 0), and a fourth.

    One with the opposite head is left out, though all of it together has a cosine of 0.8 with the
    others ((−1 + 9)/10); so is one with the opposite body: (1 − 90)/(√10 √901) = −0.94. One whose
    body goes another way has a cosine of 1/10 and is kept: (9 + 0)/4 and 3/4.
    """

    def client(head: list[float], body: list[float]) -> Record:
        tensors = {"head.w": torch.tensor(head, dtype=F64), "w": torch.tensor(body, dtype=F64)}
        return Record({PARAMS: tensors})

    state = client([0.0, 0.0], [0.0, 0.0])
    mean = Robust("same_direction").mean(state)
    cohort = [client([1.0, 0.0], [3.0, 0.0])] * 3 + [client(head, body)]
    for k, record in enumerate(cohort):
        mean.fold(Reply(k, 1, record), 1.0)
    assert mean.update(state).get(PARAMS)["w"].tolist() == pytest.approx(found)


def judged(rule: str, heads: Tensor, bodies: Tensor) -> tuple[dict[int, float], dict[int, str]]:
    """Weights and reasons for a cohort with these updates of the head and of a numbered block."""
    names = {"head.weight": heads, "blocks.0.weight": bodies}
    state = Record({PARAMS: {name: torch.zeros_like(rows[0]) for name, rows in names.items()}})
    mean = Robust(rule).mean(state)
    for k in range(len(heads)):
        reply = Record({PARAMS: {name: rows[k] for name, rows in names.items()}})
        mean.fold(Reply(k, 1, reply), 1.0)
    mean.update(state)
    return mean.weights, mean.left_out


@pytest.mark.parametrize("rule", ["agreement", "agreement_memory", "agreement_both"])
def test_an_honest_head_does_not_hide_another_backbone(rule: str):
    """Nine honest bodies hardly agree; six others, with honest heads, agree with each other.

    "same_direction", which looks at the head, keeps them.
    """
    heads = 1 + 0.5 * draws(15, 300, 0)[0]
    bodies, common = draws(15, 3000, 1)[0], draws(2, 3000, 2)[0]
    bodies[:9] += 0.35 * common[0]
    bodies[9:] += common[1]
    weights, left_out = judged(rule, heads, bodies)
    assert sorted(left_out) == [9, 10, 11, 12, 13, 14]
    assert all("blocks.0" in reason for reason in left_out.values())
    assert list(weights.values()) == pytest.approx([1 / 9] * 9 + [0] * 6)
    assert not judged("same_direction", heads, bodies)[1]


@pytest.mark.parametrize("rule", ["agreement", "agreement_memory", "agreement_both"])
def test_copies_of_one_update_share_one_weight(rule: str):
    """Nine honest clients, and six who all send their mean and a standard deviation."""
    heads = 1 + 0.5 * draws(9, 300, 0)[0]
    lie = heads.mean(0) + heads.std(0)
    weights, left_out = judged(rule, torch.cat([heads, lie.expand(6, 300)]), torch.zeros(15, 300))
    assert not left_out
    assert list(weights.values()) == pytest.approx([1 / 10] * 9 + [1 / 60] * 6)


def test_small_deviations_add_up_over_rounds():
    """Cosines 0.6 and 0.2: their running mean with share 0.7 is 0.48."""
    state = model(0, 0)
    for cosine in (0.6, 0.2):
        mean = Robust("agreement_memory").mean(state)
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
    assert averaged("same_direction", models, [1] * 5, bound=1) == pytest.approx([1, 0])


def test_nobody_moved_keeps_the_model():
    assert averaged("same_direction", [model(0, 0)] * 3, [1] * 3) == [0, 0]


def test_weights_are_capped_by_hand():
    """Weights 2, 4, 4, 90 have the median 4, and none counts for more."""
    assert capped(torch.tensor([2.0, 4, 4, 90])).tolist() == [2, 4, 4, 4]


# -- against others -------------------------------------------------------------------------------


def draws(clients: int, numbers: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(clients, numbers, generator=generator, dtype=F64)
    return values, 0.2 + torch.rand(clients, generator=generator, dtype=F64)


@quick
@given(clients=st.integers(1, 9), seed=st.integers(0, 10**6), cut=st.integers(0, 4))
def test_equal_weights_give_the_rules_of_numpy_and_scipy(clients: int, seed: int, cut: int):
    values, _ = draws(clients, 4, seed)
    ones = torch.ones(clients, dtype=F64)
    np.testing.assert_allclose(trimmed(values, ones, 0.5)[0], np.median(values, axis=0), atol=1e-12)
    if 2 * cut < clients:
        expected = trim_mean(values.numpy(), (cut + 1e-9) / clients, axis=0)
        np.testing.assert_allclose(trimmed(values, ones, cut / clients)[0], expected, atol=1e-12)


@quick
@given(clients=st.integers(1, 7), seed=st.integers(0, 10**6), trim=st.sampled_from([0.1, 0.3, 0.5]))
def test_a_weight_of_three_is_three_clients(clients: int, seed: int, trim: float):
    """Whole weights: the same as so many clients that say the same."""
    values, _ = draws(clients, 3, seed)
    weights = torch.randint(1, 4, (clients,), generator=torch.Generator().manual_seed(seed))
    many = values.repeat_interleave(weights, 0)
    found = trimmed(values, weights.double(), trim)[0]
    expected = trimmed(many, torch.ones(len(many), dtype=F64), trim)[0]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_the_geometric_median_is_the_minimum_of_distances(seed: int):
    values, weights = draws(7, 3, seed)

    def cost(z: np.ndarray[Any, Any]) -> float:
        return float(weights @ (values - torch.from_numpy(z)).norm(dim=1))

    expected = minimize(cost, values.mean(0).numpy(), method="Nelder-Mead", tol=1e-10).x
    found = geometric_median(values @ values.mT, weights) @ values
    np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("seed", range(4))
def test_krum_against_its_definition(seed: int):
    values, _ = draws(9, 3, seed)
    rows, bad = values.numpy(), 2
    scores = []
    for own in rows:
        distances = sorted(float(((own - other) ** 2).sum()) for other in rows)[1:]
        scores.append(sum(distances[: len(rows) - bad - 2]))
    expected = np.isin(np.arange(9), np.argsort(scores)[: len(rows) - bad])
    assert krum(values @ values.mT, bad).bool().tolist() == expected.tolist()


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
        mean = Robust(rule).mean(record(0, pack))  # type: ignore[arg-type]
        for seed in range(1, 10):
            mean.fold(Reply(seed, 1, record(seed, pack)), float(seed))
        return mean.update(record(0, pack))

    assert largest_difference(result(packed, 13), result(False, 10**6)) < 1e-6


@pytest.mark.parametrize("rule", RULES)
def test_two_liars_of_seven_cannot_carry_the_model_away(rule: str):
    """Honest updates lie within 1 of (1, 1); two liars are 1e6 away, in the same direction."""
    values, _ = draws(5, 2, 0)
    honest = [model(*(1 + 0.3 * v).tolist()) for v in values]
    liars = [model(1e6, -1e6)] * 2
    assert abs(averaged("none", honest + liars, [1] * 7)[0]) > 1e5
    assert np.linalg.norm(np.subtract(averaged(rule, honest + liars, [1] * 7), 1)) < 2


def byzfl() -> Any:
    """The reference; it imports torchvision, which not every torch can."""
    pytest.importorskip("torchvision", exc_type=(ImportError, RuntimeError))
    return pytest.importorskip("byzfl", exc_type=(ImportError, RuntimeError))


@pytest.mark.parametrize(("rule", "name"), [("median", "Median"), ("trimmed_mean", "TrMean")])
@pytest.mark.parametrize("seed", range(3))
def test_rules_are_those_of_byzfl(rule: str, name: str, seed: int):
    """Ten clients of equal weight, three of them malicious. Its Krum counts one neighbour more."""
    values = draws(10, 7, seed)[0]
    reference = getattr(byzfl(), name)
    expected = reference()(values) if rule == "median" else reference(3)(values)
    found = averaged(rule, [model(*row) for row in values.tolist()], [1.0] * 10, bad=0.3)
    np.testing.assert_allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_mixing_is_that_of_byzfl(seed: int):
    values = draws(10, 7, seed)[0]
    expected = byzfl().TrMean(3)(byzfl().NNM(3)(values))
    found = averaged("mixed_trimmed_mean", [model(*row) for row in values.tolist()], [1.0] * 10)
    np.testing.assert_allclose(found, expected, atol=1e-6)


# -- identities -----------------------------------------------------------------------------------


def trained(name: str, **options: Any) -> Record:
    return Toy(name, rounds=2, federation=FederationSettings(**options)).run()[0]


def test_a_bound_that_nobody_reaches_changes_no_bit():
    found = trained("fedavg", robust="norm_bound", robust_bound=1e9, average="uniform")
    assert ROBUST in found.groups
    groups = {group: tensors for group, tensors in found.groups.items() if group != ROBUST}
    assert same_bits(Record(groups), trained("fedavg", average="uniform"))


def test_nothing_cut_is_the_mean():
    values, weights = draws(5, 4, 0)
    new, shares = trimmed(values, weights, 0.0)
    torch.testing.assert_close(new, weights @ values / weights.sum())
    torch.testing.assert_close(shares, (weights / weights.sum())[:, None].expand(5, 4))


def test_no_rule_is_the_plain_mean():
    assert type(Robust().mean(model(0))) is ModelMean


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", sorted(methods.names()))
def test_every_method_trains_with_every_rule(name: str, rule: str):
    """Sizes of 20 to 1; Krum's f is what five clients allow."""
    options = FederationSettings(robust=rule, robust_bad=0.2, robust_bound=0.5)  # type: ignore[arg-type]
    state, events = Toy(name, rounds=1, epochs=1, federation=options).run()
    assert all(entry["cause"] == "rule" for entry in events[0]["left_out"])
    plain = Toy(name, rounds=1, epochs=1).run()[0]
    assert all(bool(t.isfinite().all()) for t in state.get(PARAMS).values())
    pairs = [(state.get(PARAMS)[n], t) for n, t in plain.get(PARAMS).items()]
    assert any(not torch.equal(a, b) for a, b in pairs)


def test_whole_numbers_keep_the_servers_value():
    for rule in RULES:
        state = model(0, steps=torch.tensor(3), mean=torch.zeros(1))
        mean = Robust(rule).mean(state)  # type: ignore[arg-type]
        for k in range(5):
            reply = model(k, steps=torch.tensor(k), mean=torch.full((1,), 2.0))
            mean.fold(Reply(k, 1, reply), 1)
        buffers = mean.update(state).get(BUFFERS)
        assert buffers["steps"] == 3
        assert 0 < buffers["mean"].item() <= 2


def test_nobody_answered_keeps_the_state():
    state = model(1, 2)
    assert all(Robust(rule).mean(state).update(state) is state for rule in RULES)  # type: ignore[arg-type]


def test_the_norm_bound_resumes_to_the_bit():
    """Two rounds, then two more from the state alone: as four at once."""
    toy = Toy(rounds=4, federation=FederationSettings(robust="norm_bound", robust_bound=0.7))
    states: list[Record] = []
    toy.loop().run(toy.initial(), 0, lambda e: None, lambda t, state: states.append(state))
    later: list[Record] = []
    toy.loop().run(states[1], 2, lambda e: None, lambda t, state: later.append(state))
    assert same_bits(later[-1], states[-1])
    assert len(states[-1].get(ROBUST)["lengths"]) == 4 * len(toy.sizes)


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


def test_a_round_that_is_too_small_for_the_rule_keeps_the_model():
    """Of seven clients two answer: nobody can say which is honest."""
    options = FederationSettings(robust="median")
    toy = Toy(sizes=(9,) * 7, rounds=1, cohort=2, federation=options)
    state, (event,) = toy.run()
    assert same_bits(state, toy.initial())
    assert [entry["client"] for entry in event["left_out"]] == event["cohort"]
    assert "median needs 3 clients, and the round has 2" in event["left_out"][0]["reason"]
    assert event["weights"] == {}


# -- refused before round 0 -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("federation.robust_bad=0.5", "robust_bad"),
        ("federation.robust=mean", "robust"),
        ("federation.robust_bound=0", "robust_bound"),
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
    """Of two clients nobody can say which is honest; a tenth of less than ten is no client."""
    least = Robust(rule, bad=0.1).smallest
    assert least == {"multi_krum": 5, "trimmed_mean": 10, "mixed_trimmed_mean": 10}.get(rule, 3)
    with pytest.raises(ConfigError, match=f"the smallest cohort is {least}"):
        refuse_small_cohort(Robust(rule, bad=0.1), least - 1)
    refuse_small_cohort(Robust(rule, bad=0.1), least)
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
        options = FederationSettings(head_start="closed_form", robust=robust)  # type: ignore[arg-type]
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
    assert torch.equal(head(0.0, "median"), truth)
    lied, borne = head(0.2, "none"), head(0.2, "median")
    assert (borne - truth).norm() < 0.5 * (lied - truth).norm()


def test_free_riders_are_all_left_out_however_many_there_are():
    """Updates of zero have no direction, and would only blur that of the others."""
    honest = draws(9, 500, 2)[0]
    honest = honest / honest.norm(dim=1, keepdim=True) + 0.8 * torch.eye(500, dtype=F64)[0]
    updates = torch.cat([honest, torch.zeros(6, 500, dtype=F64)])
    assert same_direction(updates @ updates.mT).tolist() == [1] * 9 + [0] * 6


def test_more_than_half_of_a_cohort_is_always_kept():
    """Three pairs that have nothing to do with each other: leaving out two would leave a third."""
    updates = torch.eye(3, dtype=F64).repeat_interleave(2, 0)
    assert same_direction(updates @ updates.mT).sum() > 3
