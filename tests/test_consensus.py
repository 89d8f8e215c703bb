"""Consensus operators, whole and leaving one client out, against recomputation from scratch."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import trim_mean
from torch import Tensor

from fedharmony import consensus
from fedharmony.consensus import Consensus, ConsensusSums, Uploads, consolidate
from fedharmony.correlation import (
    Moments,
    correlation,
    label_correlation,
    pack_upper,
    score_moments,
)
from fedharmony.errors import ConfigError, DataError

F64 = torch.float64
OPERATORS = ["mean", "size", "support", "pooled", "median", "trimmed"]
WEIGHTED = OPERATORS[:4]
quick = settings(deadline=None, max_examples=40, derandomize=True)


@dataclasses.dataclass
class Table:
    """Clients with true moments, so that every operator has something to work on."""

    moments: Moments
    matrices: Tensor
    examples: Tensor
    supports: Tensor
    ages: Tensor

    @property
    def uploads(self) -> Uploads:
        upper = pack_upper(self.matrices)
        return Uploads(upper, self.examples, self.supports, self.moments.first, self.ages)

    def consolidate(self, operator: str, **options: float) -> Consensus:
        return consolidate(**self.uploads._asdict(), operator=operator, **options)


def make_table(clients: int, classes: int, seed: int, ties: bool = False) -> Table:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=F64)

    scores = draw(clients, 6, classes) ** 2
    if ties:
        scores = scores.round()  # hard scores of six images: few distinct values, many zeros
    moments = score_moments(scores)
    return Table(
        moments,
        correlation(moments),
        (1 + 3000 * draw(clients) ** 5).long(),
        draw(clients, classes) < 0.6,
        (20 * draw(clients) ** 2).long(),
    )


def recompute(
    table: Table, operator: str, keep: list[int], trim: float
) -> tuple[np.ndarray, np.ndarray]:
    """The definition, entry by entry."""
    classes = table.matrices.shape[-1]
    matrix, known = np.zeros((classes, classes)), np.zeros((classes, classes), bool)
    n = table.examples.double().numpy()
    fresh = 0.9 ** table.ages.double().numpy()
    weight = {
        "mean": fresh,
        "size": n * fresh,
        "pooled": n * fresh,
        "support": np.where(n >= 5, n**2 / (n + 10), 0) * fresh,
    }
    if operator == "pooled":
        if not keep:
            return matrix, known
        values = table.moments.values[keep].numpy()
        pool = np.average(values, axis=0, weights=weight["pooled"][keep])
        return correlation(Moments(torch.from_numpy(pool))).numpy(), ~known
    for c in range(classes):
        for d in range(classes):
            values = [table.matrices[j, c, d].item() for j in keep]
            if operator == "median":
                told, value = bool(values), np.median(values) if values else 0
            elif operator == "trimmed":
                told, value = bool(values), trim_mean(values, trim) if values else 0
            else:
                weights = [
                    weight[operator][j]
                    if operator != "support" or (table.supports[j, c] and table.supports[j, d])
                    else 0.0
                    for j in keep
                ]
                told = sum(weights) > 0
                value = np.average(values, weights=weights) if told else 0
            matrix[c, d], known[c, d] = value, told
    return matrix, known


def assert_matches(result: tuple[Tensor, Tensor], expected: tuple[np.ndarray, np.ndarray]) -> None:
    matrix, known = result
    np.testing.assert_array_equal(known.numpy(), expected[1])
    np.testing.assert_allclose(matrix.numpy(), expected[0], rtol=0, atol=1e-10)
    assert torch.equal(matrix, matrix.T)
    assert matrix.dtype == F64
    assert not matrix[~known].any()


@pytest.mark.parametrize("operator", OPERATORS)
@quick
@given(
    clients=st.integers(1, 9),
    classes=st.integers(1, 4),
    seed=st.integers(0, 10**6),
    ties=st.booleans(),
    trim=st.sampled_from([0.0, 0.1, 0.25, 0.49]),
)
def test_whole_and_leave_one_out_match_recomputation(operator, clients, classes, seed, ties, trim):
    table = make_table(clients, classes, seed, ties)
    result = table.consolidate(operator, trim=trim)
    everyone = list(range(clients))
    assert_matches(result.full(), recompute(table, operator, everyone, trim))
    for j in everyone:
        keep = [i for i in everyone if i != j]
        assert_matches(result.without(j), recompute(table, operator, keep, trim))


@quick
@given(clients=st.integers(1, 12), seed=st.integers(0, 10**6), ties=st.booleans())
def test_median_is_exact(clients, seed, ties):
    """Not only close: values of the table, or the mean of two of them, to the last bit."""
    table = make_table(clients, 3, seed, ties)
    result = table.consolidate("median")
    values = table.matrices.numpy()
    assert np.array_equal(result.full()[0].numpy(), np.median(values, axis=0))
    for j in range(clients if clients > 1 else 0):
        expected = np.median(np.delete(values, j, axis=0), axis=0)
        assert np.array_equal(result.without(j)[0].numpy(), expected)


def test_weights_by_hand():
    """Entry (0, 1) of three clients: 0.1, 0.4, 0.7 from 4, 10, 30 images, the last 2 rounds old.

    mean: weights 1, 1, 0.81 → (0.1 + 0.4 + 0.567)/2.81 = 0.379715.
    size: 4, 10, 24.3 → (0.4 + 4 + 17.01)/38.3 = 0.559008.
    support: 0 (fewer than 5), 100/20 = 5, 900/40·0.81 = 18.225 → (2 + 12.7575)/23.225 = 0.635414.
    """
    matrices = torch.tensor([0.1, 0.4, 0.7], dtype=F64)[:, None, None].expand(3, 2, 2)
    arguments = {
        "examples": torch.tensor([4, 10, 30]),
        "supports": torch.ones(3, 2, dtype=torch.bool),
        "ages": torch.tensor([0, 0, 2]),
    }
    for operator, expected in (("mean", 0.379715), ("size", 0.559008), ("support", 0.635414)):
        result = consolidate(pack_upper(matrices), operator=operator, **arguments)
        assert result.full()[0][0, 1].item() == pytest.approx(expected, abs=1e-6)
    arguments["supports"][2, 0] = False  # the old client does not predict label 0
    result = consolidate(pack_upper(matrices), operator="support", **arguments)
    matrix, known = result.without(1)
    assert known.tolist() == [[False, False], [False, True]]
    assert matrix.tolist() == [[0, 0], [0, pytest.approx(0.7, abs=1e-15)]]


@pytest.mark.parametrize(("eps", "clamp"), [(1e-6, 1e-4), (0.0, 0.2)])
def test_pooled_is_the_correlation_of_all_images(eps, clamp):
    """Pooling moments gives what one client with all images would have computed."""
    scores = torch.rand(60, 4, generator=torch.Generator().manual_seed(0), dtype=F64) ** 6
    options = {"eps": eps, "clamp": clamp}  # marginals of about 0.14, below the larger clamp
    parts = [scores[:10], scores[10:15], scores[15:]]
    moments = [score_moments(part) for part in parts]
    result = consolidate(
        pack_upper(torch.stack([correlation(m, **options) for m in moments])),
        operator="pooled",
        **options,
        examples=torch.tensor([10, 5, 45]),
        marginals=torch.stack([m.first for m in moments]),
    )
    torch.testing.assert_close(result.full()[0], correlation(score_moments(scores), **options))
    others = torch.cat((parts[0], parts[2]))
    expected = correlation(score_moments(others), **options)
    torch.testing.assert_close(result.without(1)[0], expected)


@pytest.mark.parametrize("operator", OPERATORS)
def test_of_two_clients_the_teacher_is_the_other(operator):
    table = make_table(2, 4, 3)
    table.supports[:], table.examples[:] = True, torch.tensor([5, 4000])
    result = table.consolidate(operator)
    for j in (0, 1):
        matrix, known = result.without(j)
        assert known.all()
        torch.testing.assert_close(matrix, table.matrices[1 - j], rtol=0, atol=1e-12)


@pytest.mark.parametrize("operator", OPERATORS)
def test_alone_a_client_has_no_teacher(operator):
    table = make_table(1, 3, 0)
    table.supports[:], table.examples[:] = True, 50
    result = table.consolidate(operator)
    assert result.full()[1].all()
    torch.testing.assert_close(result.full()[0], table.matrices[0], rtol=0, atol=1e-14)
    matrix, known = result.without(0)
    assert not known.any()
    assert not matrix.any()
    with pytest.raises(IndexError, match="no client 1"):
        result.without(1)


@pytest.mark.parametrize("operator", OPERATORS)
def test_empty_table_knows_nothing(operator):
    matrix, known = make_table(0, 3, 0).consolidate(operator).full()
    assert matrix.shape == (3, 3)
    assert not matrix.any()
    assert not known.any()


@pytest.mark.parametrize("operator", WEIGHTED)
@pytest.mark.parametrize("chunk", [2**22, 100, 1])
def test_table_and_stream_agree_to_the_last_bit(operator, chunk, monkeypatch):
    table = make_table(61, 5, 7)
    expected = table.consolidate(operator)
    monkeypatch.setattr(consensus, "numbers_at_once", lambda device: chunk)
    chunked = table.consolidate(operator)
    sums = ConsensusSums(5, operator)
    for start, stop in ((0, 1), (1, 30), (30, 32), (32, 61)):
        sums.add(Uploads(*(field[start:stop] for field in table.uploads)))
    singly = ConsensusSums(5, operator)
    for j in range(61):
        singly.add(Uploads(*(field[j] for field in table.uploads)))
    for result in (chunked.full(), sums.mean(), singly.mean()):
        assert all(map(torch.equal, result, expected.full()))
    own = Uploads(*(field[9] for field in table.uploads))
    for result in (chunked.without(9), sums.without(own), singly.without(own)):
        assert all(map(torch.equal, result, expected.without(9)))


@pytest.mark.parametrize("operator", ["median", "trimmed"])
def test_order_statistics_do_not_depend_on_chunks_or_order(operator, monkeypatch):
    table = make_table(20, 5, 1)
    expected = table.consolidate(operator).full()[0]
    monkeypatch.setattr(consensus, "numbers_at_once", lambda device: 60)
    reverse = consolidate(pack_upper(table.matrices.flip(0)), operator=operator).full()[0]
    assert torch.equal(reverse, expected)


def test_python_numbers_serve_for_one_client():
    sums = ConsensusSums(2, "size")
    sums.add(Uploads(torch.full((3,), 0.5), examples=3, ages=1))
    sums.add(Uploads(torch.full((3,), 0.0), examples=3))
    assert sums.mean()[0][0, 1].item() == pytest.approx(0.5 * 0.9 / 1.9)


@pytest.mark.parametrize("age", [200, 340, 400])
def test_faded_clients_are_unknown_instead_of_rounding(age):
    """Two clients, one of them old: 0.9²⁰⁰ = 7e-10, 0.9³⁴⁰ = 2.8e-16, 0.9⁴⁰⁰ = 5e-19. Of such a
    weight w, (1 + w) − 1 leaves seven digits, a wrong value, nothing. Without the fresh client the
    entry is unknown; without the old one it is known, and so is the whole.
    """
    upper = torch.tensor([0.2, -0.6])[:, None].expand(2, 3)
    result = consolidate(upper, operator="mean", ages=torch.tensor([0, age]))
    matrix, known = result.without(0)
    assert not known.any()
    assert not matrix.any()
    for matrix, known in (result.without(1), result.full()):
        assert known.all()
        assert matrix[0, 1].item() == pytest.approx(0.2)


def test_common_age_does_not_matter():
    upper = torch.tensor([0.2, -0.6])[:, None].expand(2, 3)
    stale = consolidate(upper, operator="mean", ages=torch.tensor([6000, 6000]))
    assert stale.full()[0][0, 1].item() == pytest.approx(-0.2)
    assert stale.without(0)[0][0, 1].item() == pytest.approx(-0.6)


def test_entry_told_by_one_client_alone_is_unknown_without_it():
    table = make_table(30, 2, 0)
    table.examples += 5
    table.supports[:] = torch.tensor([True, False])
    table.supports[0] = True
    result = table.consolidate("support")
    assert result.full()[1].all()
    assert result.without(0)[1].tolist() == [[True, False], [False, False]]
    assert result.without(1)[1].all()


def test_result_is_clipped():
    upper = torch.full((3, 3), 1.5)
    upper[0] = -1.5
    for operator in ("mean", "median", "trimmed"):
        result = consolidate(upper, operator=operator)
        assert result.without(0)[0].tolist() == [[1, 1], [1, 1]]


@pytest.mark.parametrize("operator", OPERATORS)
def test_many_classes(operator):
    classes = 1628
    scores = torch.rand(3, 2, classes, generator=torch.Generator().manual_seed(0))
    moments = score_moments(scores)
    matrices = correlation(moments)
    result = consolidate(
        pack_upper(matrices),
        operator=operator,
        examples=torch.tensor([20, 20, 20]),
        supports=torch.ones(3, classes, dtype=torch.bool),
        marginals=moments.first,
    )
    matrix, known = result.without(1)
    assert known.all()
    assert torch.equal(matrix, matrix.T)
    if operator != "pooled":
        expected = (matrices[0].double() + matrices[2].double()) / 2
        torch.testing.assert_close(matrix, expected, rtol=0, atol=1e-14)


@pytest.mark.parametrize("operator", OPERATORS)
def test_many_clients(operator):
    """41,131 clients, as in FLAIR (here with 4 labels): no loop over clients, little memory."""
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(41_131, generator=generator, dtype=F64) * 2 - 1
    clients = len(values)
    result = consolidate(
        values[:, None].expand(-1, 10),
        operator=operator,
        examples=torch.full((clients,), 10),
        supports=torch.ones(clients, 4, dtype=torch.bool),
        marginals=torch.full((clients, 4), 0.5),
    )
    rest = values[1:].numpy()
    expected = {"median": np.median, "trimmed": lambda x: trim_mean(x, 0.1)}.get(operator, np.mean)
    assert result.without(0)[0][0, 1].item() == pytest.approx(expected(rest), abs=1e-9)


def test_median_of_small_clients_teaches_independence():
    """Sizes as in FLAIR (a quarter one image, the median two, few large), two labels with φ ≈ 0.5.

    Most clients never see one of the labels vary; their matrix is 0, and so is the median. The
    plain mean is close to it, weights by size recover a good part, the pool all of it.
    """
    generator = np.random.default_rng(0)
    sizes = np.concatenate(([1] * 110, [2] * 130, generator.integers(3, 12, 100), [200] * 20))
    both = generator.random(sizes.sum()) < 0.06
    labels = np.stack([both | (generator.random(sizes.sum()) < 0.06) for _ in range(2)], 1)
    owner = np.repeat(np.arange(len(sizes)), sizes)
    moments = [
        score_moments(torch.from_numpy(labels[owner == j]).double()) for j in range(len(sizes))
    ]
    matrices = torch.stack([correlation(m) for m in moments])

    def entry(operator: str) -> float:
        result = consolidate(
            pack_upper(matrices),
            operator=operator,
            examples=torch.from_numpy(sizes),
            supports=torch.stack([m.first > 0 for m in moments]),
            marginals=torch.stack([m.first for m in moments]),
        )
        return float(result.full()[0][0, 1])

    truth = label_correlation(labels)[0][0, 1].item()
    assert truth > 0.4
    assert entry("median") == 0
    assert entry("mean") < 0.3 * truth
    assert entry("size") > 0.8 * truth
    assert entry("support") == pytest.approx(truth, abs=0.05)
    assert entry("pooled") == pytest.approx(truth, abs=1e-4)


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"operator": "medain"}, "Did you mean 'median'"),
        ({"operator": "trimmed", "trim": 0.5}, "below 0.5"),
        ({"operator": "mean", "decay": 0.0}, "decay"),
        ({"kappa": -1.0}, "κ"),
    ],
)
def test_impossible_settings_are_refused(change, match):
    with pytest.raises(ConfigError, match=match):
        consolidate(torch.zeros(2, 6), **change)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"operator": "size"}, "examples"),
        ({"operator": "support", "examples": torch.ones(2)}, "supports"),
        ({"operator": "pooled", "examples": torch.ones(2)}, "marginals"),
        ({"operator": "size", "examples": torch.ones(3)}, r"shape \(2,\), got \(3,\)"),
        ({"operator": "mean", "ages": torch.ones(2, 1)}, "ages"),
    ],
)
def test_missing_or_misshapen_arguments_are_refused(arguments, match):
    with pytest.raises(DataError, match=match):
        consolidate(torch.zeros(2, 6), **arguments)
    for table in (torch.zeros(3), torch.zeros(2, 3, 3), torch.zeros(2, 5)):
        with pytest.raises(DataError, match="table of upper triangles"):
            consolidate(table, **arguments)
    with pytest.raises(DataError, match=r"upper triangles .* shape \(1, 3\), got \(1, 4\)"):
        ConsensusSums(2, "mean").add(Uploads(torch.zeros(4)))


def test_order_operators_cannot_be_streamed():
    with pytest.raises(ConfigError, match="running sums"):
        ConsensusSums(2, "median")


# -- many teachers at once ------------------------------------------------------------------------


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("numbers", [2**22, 60, 1])
def test_all_teachers_at_once_are_those_of_each(operator, numbers, monkeypatch):
    """In the order asked for, in parts of any size, to the last bit; rounded only at the end."""
    result = make_table(12, 5, 4).consolidate(operator)
    expected = [result.without(row) for row in range(12)]
    monkeypatch.setattr(consensus, "numbers_at_once", lambda device: numbers)
    rows = [7, 0, 11, 7]
    matrices, known = result.without_each(rows)
    rounded, _ = result.without_each(rows, torch.float32)
    assert rounded.dtype == torch.float32
    for place, row in enumerate(rows):
        assert torch.equal(matrices[place], expected[row][0])
        assert torch.equal(known[place], expected[row][1])
        assert torch.equal(rounded[place], expected[row][0].float())
    assert [part.shape for part in result.without_each([])] == [(0, 5, 5)] * 2
    for row in (-1, 12):
        with pytest.raises(IndexError, match=f"no client {row} in a table of 12"):
            result.without_each([0, row])


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_way_of_a_device_agrees_with_that_of_the_cpu(operator, monkeypatch):
    """Sums and sorting of other devices, tried on the CPU: the same up to rounding."""
    table = make_table(40, 5, 2)
    expected = table.consolidate(operator)
    monkeypatch.setattr(consensus, "_in_order", lambda tensor: False)
    monkeypatch.setattr(consensus, "numbers_at_once", lambda device: 100)
    found = table.consolidate(operator)
    for ours, theirs in ((found.full(), expected.full()), (found.without(3), expected.without(3))):
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-13)
        assert torch.equal(ours[1], theirs[1])


# -- sums that are kept ---------------------------------------------------------------------------


@pytest.mark.parametrize("operator", WEIGHTED)
@pytest.mark.parametrize("age", [0, 3])
def test_folded_clients_count_as_in_the_table(operator, age):
    """Half of the clients as sums made ``age`` rounds ago: whole and leave-one-out as if all were
    in the table (whose ages are those of now), up to rounding."""
    table = make_table(14, 4, 5)
    table.ages += age
    whole = table.consolidate(operator)
    early = Uploads(*(field[:7] for field in table.uploads))
    late = Uploads(*(field[7:] for field in table.uploads))
    sums = ConsensusSums(4, operator)
    sums.add(early._replace(ages=early.ages - age))
    kept = {name: tensor.clone() for name, tensor in sums.tensors().items()}
    rest = consolidate(**late._asdict(), operator=operator, folded=kept, folded_age=age)
    for ours, theirs in ((rest.full(), whole.full()), (rest.without(2), whole.without(9))):
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-12)
        assert torch.equal(ours[1], theirs[1])
    assert all(torch.equal(kept[name], tensor) for name, tensor in sums.tensors().items())


def test_sums_that_faded_away_are_unknown():
    """0.9 to the power of 10,000 is 0 in float64: nothing is left to divide by."""
    sums = ConsensusSums(2, "mean")
    sums.add(Uploads(torch.ones(3)))
    nobody = torch.zeros(0, 3)
    gone = consolidate(nobody, operator="mean", folded=sums.tensors(), folded_age=10_000)
    matrix, known = gone.full()
    assert not matrix.any()
    assert not known.any()
    back = consolidate(nobody, operator="mean", folded=sums.tensors(), folded_age=100)
    assert back.full()[0].tolist() == [[1, 1], [1, 1]]


def test_sums_of_another_operator_are_refused():
    with pytest.raises(DataError, match=r"'support' over 2 labels hold 3 numbers as 'weight'"):
        ConsensusSums(2, "support").restore(ConsensusSums(2, "mean").tensors())


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        # Entry (0, 1) stands on 30 images of the first client, none of the second, 10 of the third.
        ("mean", (0.2 + 0.8) / 2),
        ("size", (30 * 0.2 + 10 * 0.8) / 40),
        # 30²/(30 + 10) = 22.5 and 10²/20 = 5
        ("support", (22.5 * 0.2 + 5 * 0.8) / 27.5),
    ],
)
def test_entries_count_by_the_images_behind_them(operator, expected):
    upper = torch.tensor([[1.0, 0.2, 1.0], [1.0, -0.9, 1.0], [1.0, 0.8, 1.0]])
    images = torch.tensor([[30.0, 30.0, 40.0], [50.0, 0.0, 50.0], [10.0, 10.0, 0.0]])
    supports = torch.ones(3, 2, dtype=torch.bool)
    consensus = consolidate(
        upper, operator=operator, examples=images, supports=supports, kappa=10, min_examples=5
    )
    matrix, known = consensus.full()
    assert matrix[0, 1].item() == pytest.approx(expected)
    assert known.all()
    matrices, known = consensus.without_each([0, 1, 2])
    assert matrices[:, 0, 1].tolist() == pytest.approx([0.8, expected, 0.2])
    assert known[:, 0, 1].all()


def test_an_entry_that_one_client_knows_is_unknown_without_it():
    upper = torch.tensor([[1.0, 0.2, 1.0], [1.0, 0.4, 1.0]])
    images = torch.tensor([[9.0, 9.0, 9.0], [9.0, 0.0, 9.0]])
    for operator in ("mean", "size"):
        _, known = consolidate(upper, operator=operator, examples=images).without_each([0, 1])
        assert known[:, 0, 1].tolist() == [False, True]


def test_few_images_of_an_entry_do_not_teach():
    """``min_examples`` looks at each entry: 4 images of (0, 1) are too few, whatever n is."""
    upper, support = torch.tensor([[1.0, 0.2, 1.0]]), torch.ones(1, 2, dtype=torch.bool)
    images = torch.tensor([[90.0, 4.0, 90.0]])
    _, known = consolidate(upper, examples=images, supports=support, min_examples=5).full()
    assert known.tolist() == [[True, False], [False, True]]


@pytest.mark.parametrize("operator", ["median", "trimmed", "pooled"])
def test_other_operators_cannot_leave_entries_out(operator):
    with pytest.raises(ConfigError, match="cannot leave out what a client does not know"):
        consolidate(
            torch.ones(2, 3),
            operator=operator,
            examples=torch.ones(2, 3),
            marginals=torch.ones(2, 2),
        )
