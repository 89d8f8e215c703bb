"""Consensus operators, whole and leaving one client out, against recomputation from scratch."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import trim_mean
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fedharmony import consensus
from fedharmony import correlation as corr
from fedharmony.consensus import (
    CORRELATION,
    FOLDED,
    TABLE,
    Agreement,
    CorrelationTable,
    Operator,
)
from fedharmony.correlation import (
    Moments,
    correlation,
    label_correlation,
    pack_upper,
    score_moments,
)
from fedharmony.types import Record, Reply

F64 = torch.float64
OPERATORS = ["mean", "size", "support", "pooled", "median", "trimmed", "support_trimmed"]
WEIGHTED = OPERATORS[:4]
quick = settings(max_examples=40, derandomize=True)


class Rows(CorrelationTable):
    """A table with given rows, as round 0 sees it; who of them is left out is told by place."""

    def __init__(
        self,
        upper: Tensor,
        operator: str = "support",
        *,
        examples: Tensor | None = None,
        marginals: Tensor | None = None,
        ages: Tensor | None = None,
        images: Tensor | None = None,
        **options: float,
    ) -> None:
        clients, pairs = upper.shape
        classes = int((8 * pairs + 1) ** 0.5 - 1) // 2
        super().__init__(classes, Operator(operator, **options), unknown_labels=images is not None)
        ages = torch.zeros(clients, dtype=torch.int64) if ages is None else ages
        rows = {
            "client": torch.arange(clients),
            "examples": torch.full((clients,), 100) if examples is None else examples,
            "round": -1 - ages,
            "upper": upper,
            "marginal": torch.ones(clients, classes) if marginals is None else marginals,
        }
        if images is not None:
            rows["known"] = images / 100
        self.load({TABLE: rows})

    def full(self) -> Agreement:
        return self.consensus(0)

    def without(self, place: int) -> Agreement:
        return self.teachers([place], 0)[1][0]


@dataclasses.dataclass
class Table:
    """Clients with true moments, so that every operator has something to work on."""

    moments: Moments
    matrices: Tensor
    examples: Tensor
    supports: Tensor
    ages: Tensor

    def rows(self, operator: str, **options: float) -> Rows:
        # Only "support" asks which labels are predicted, and only "pooled" how often.
        asks = operator.startswith("support")
        marginals = self.supports.double() if asks else self.moments.marginal
        return Rows(
            pack_upper(self.matrices),
            operator,
            examples=self.examples,
            marginals=marginals,
            ages=self.ages,
            **options,
        )


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


def trimmed_weights(values: list[float], weights: list[float], trim: float) -> np.ndarray:
    """What is left of each weight when the part ``trim`` of all is cut from either end."""
    left, total = np.array(weights), sum(weights)
    for order in (np.argsort(values), np.argsort(values)[::-1]):
        to_cut = trim * total
        for j in order:
            cut = min(left[j], to_cut)
            left[j], to_cut = left[j] - cut, to_cut - cut
    return left


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
                by_support = operator.startswith("support")
                weights = [
                    weight["support" if by_support else operator][j]
                    if not by_support or (table.supports[j, c] and table.supports[j, d])
                    else 0.0
                    for j in keep
                ]
                told = sum(weights) > 0
                if operator == "support_trimmed":
                    weights = trimmed_weights(values, weights, trim) if told else weights
                value = np.average(values, weights=weights) if told else 0
            matrix[c, d], known[c, d] = value, told
    return matrix, known


def assert_matches(result: Agreement, expected: tuple[np.ndarray, np.ndarray]) -> None:
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
    result = table.rows(operator, trim=trim)
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
    result = table.rows("median")
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
        "marginals": torch.ones(3, 2),
        "ages": torch.tensor([0, 0, 2]),
    }
    for operator, expected in (("mean", 0.379715), ("size", 0.559008), ("support", 0.635414)):
        result = Rows(pack_upper(matrices), operator, **arguments)
        assert result.full()[0][0, 1].item() == pytest.approx(expected, abs=1e-6)
    arguments["marginals"][2, 0] = 0  # the old client does not predict label 0
    result = Rows(pack_upper(matrices), **arguments)
    matrix, known = result.without(1)
    assert known.tolist() == [[False, False], [False, True]]
    assert matrix.tolist() == [[0, 0], [0, pytest.approx(0.7, abs=1e-15)]]


def test_trimmed_weights_by_hand():
    """Entry (0, 1): 0.1, 0.3, 0.5, 1.0 from 5, 10, 10, 5 images, which are the weights with κ = 0.

    A quarter of 30 is 7.5: cut are the first and 2.5 of the second below, the last and 2.5 of the
    third above; (7.5·0.3 + 7.5·0.5)/15 = 0.4.
    Without the last: 5, 10, 10, a quarter of 25 is 6.25: (8.75·0.3 + 3.75·0.5)/12.5 = 0.36.
    """
    upper = torch.tensor([0.1, 0.3, 0.5, 1.0], dtype=F64)[:, None].expand(4, 3)
    examples = torch.tensor([5, 10, 10, 5])
    table = Rows(upper, "support_trimmed", examples=examples, kappa=0, trim=0.25)
    assert table.full().matrix[0, 1].item() == pytest.approx(0.4)
    assert table.without(3).matrix[0, 1].item() == pytest.approx(0.36)


def test_two_liars_of_seven_do_not_reach_a_trimmed_consensus():
    """Five honest clients say −0.1 … 0.1; whatever two liars say, the teacher stays among them."""
    honest = torch.linspace(-0.1, 0.1, 5, dtype=F64)
    for lies in ([1.0, 1.0], [-1.0, -1.0], [-1.0, 1.0]):
        upper = torch.cat([honest, torch.tensor(lies, dtype=F64)])[:, None].expand(7, 3)
        matrix = Rows(upper, "support_trimmed", trim=0.35).without(0).matrix
        assert matrix.abs().max() <= 0.1
        assert Rows(upper, "support").without(0).matrix.abs().max() > 0.2 or sum(lies) == 0


@pytest.mark.parametrize(("eps", "clamp"), [(1e-6, 1e-4), (0.0, 0.2)])
def test_pooled_is_the_correlation_of_all_images(eps, clamp):
    """Pooling moments gives what one client with all images would have computed."""
    scores = torch.rand(60, 4, generator=torch.Generator().manual_seed(0), dtype=F64) ** 6
    options = {"eps": eps, "clamp": clamp}  # marginals of about 0.14, below the larger clamp
    parts = [scores[:10], scores[10:15], scores[15:]]
    moments = [score_moments(part) for part in parts]
    result = Rows(
        pack_upper(torch.stack([correlation(m, **options) for m in moments])),
        "pooled",
        **options,
        examples=torch.tensor([10, 5, 45]),
        marginals=torch.stack([m.marginal for m in moments]),
    )
    torch.testing.assert_close(result.full()[0], correlation(score_moments(scores), **options))
    others = torch.cat((parts[0], parts[2]))
    expected = correlation(score_moments(others), **options)
    torch.testing.assert_close(result.without(1)[0], expected)


@pytest.mark.parametrize("operator", OPERATORS)
def test_of_two_clients_the_teacher_is_the_other(operator):
    table = make_table(2, 4, 3)
    table.supports[:], table.examples[:] = True, torch.tensor([5, 4000])
    result = table.rows(operator)
    for j in (0, 1):
        matrix, known = result.without(j)
        assert known.all()
        torch.testing.assert_close(matrix, table.matrices[1 - j], rtol=0, atol=1e-12)


@pytest.mark.parametrize("operator", OPERATORS)
def test_alone_a_client_has_no_teacher(operator):
    table = make_table(1, 3, 0)
    table.supports[:], table.examples[:] = True, 50
    result = table.rows(operator)
    assert result.full()[1].all()
    torch.testing.assert_close(result.full()[0], table.matrices[0], rtol=0, atol=1e-14)
    matrix, known = result.without(0)
    assert not known.any()
    assert not matrix.any()
    assert not result.teaches
    assert torch.equal(result.without(1).matrix, result.full().matrix)  # a client never heard


@pytest.mark.parametrize("operator", WEIGHTED)
@pytest.mark.parametrize("chunk", [2**22, 100, 1])
def test_parts_and_folds_agree_to_the_last_bit(operator, chunk, monkeypatch):
    """In parts of any size, and with the first 30 clients folded before the others are summed."""
    table = make_table(61, 5, 7)
    at_once = table.rows(operator)  # a table computes when it is asked: here before the patch
    whole, others = at_once.full(), at_once.without(39)
    monkeypatch.setitem(corr.AT_ONCE, "cpu", chunk)
    chunked, folded = table.rows(operator), table.rows(operator)
    rows = folded.rows
    folded._fold({name: tensor[:30] for name, tensor in rows.items()}, -1)
    folded.rows = {name: tensor[30:] for name, tensor in rows.items()}
    for result in (chunked, folded):
        assert all(map(torch.equal, result.full(), whole))
        assert all(map(torch.equal, result.without(39), others))


@pytest.mark.parametrize("operator", ["median", "trimmed"])
def test_order_statistics_do_not_depend_on_chunks_or_order(operator, monkeypatch):
    table = make_table(20, 5, 1)
    expected = table.rows(operator).full()[0]
    monkeypatch.setitem(corr.AT_ONCE, "cpu", 60)
    reverse = Rows(pack_upper(table.matrices.flip(0)), operator).full()[0]
    assert torch.equal(reverse, expected)


def test_a_trimmed_consensus_takes_pairs_a_part_at_a_time(monkeypatch):
    """Nothing as large as the table is made, but for the result; the bits stay as they are."""
    table = make_table(40, 60, 1).rows("support_trimmed", trim=0.4)
    expected = table.teachers([0, 1, 2], 0, torch.float32)
    monkeypatch.setitem(corr.AT_ONCE, "cpu", 2**10)
    largest = []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            made = result if isinstance(result, list | tuple) else [result]
            largest.append(max((t.numel() for t in made if isinstance(t, Tensor)), default=0))
            return result

    with Sizes():
        common, others = table.teachers([0, 1, 2], 0, torch.float32)
    assert max(largest) <= 3 * 60 * 60 < table.rows["upper"].numel() / 6
    for found, wanted in zip([common, *others], [expected[0], *expected[1]], strict=True):
        assert all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("age", [200, 340, 400])
def test_faded_clients_are_unknown_instead_of_rounding(age):
    """Two clients, one of them old: 0.9²⁰⁰ = 7e-10, 0.9³⁴⁰ = 2.8e-16, 0.9⁴⁰⁰ = 5e-19. Of such a
    weight w, (1 + w) − 1 leaves seven digits, a wrong value, nothing. Without the fresh client the
    entry is unknown; without the old one it is known, and so is the whole.
    """
    upper = torch.tensor([0.2, -0.6])[:, None].expand(2, 3)
    result = Rows(upper, "mean", ages=torch.tensor([0, age]))
    matrix, known = result.without(0)
    assert not known.any()
    assert not matrix.any()
    for matrix, known in (result.without(1), result.full()):
        assert known.all()
        assert matrix[0, 1].item() == pytest.approx(0.2)


def test_common_age_does_not_matter():
    upper = torch.tensor([0.2, -0.6])[:, None].expand(2, 3)
    stale = Rows(upper, "mean", ages=torch.tensor([6000, 6000]))
    assert stale.full()[0][0, 1].item() == pytest.approx(-0.2)
    assert stale.without(0)[0][0, 1].item() == pytest.approx(-0.6)


def test_entry_told_by_one_client_alone_is_unknown_without_it():
    table = make_table(30, 2, 0)
    table.examples += 5
    table.supports[:] = torch.tensor([True, False])
    table.supports[0] = True
    result = table.rows("support")
    assert result.full()[1].all()
    assert result.without(0)[1].tolist() == [[True, False], [False, False]]
    assert result.without(1)[1].all()


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("operator", ["mean", "support", "median", "trimmed", "support_trimmed"])
def test_result_is_clipped_at_both_ends(operator, sign):
    upper = torch.full((3, 3), 1.5 * sign)
    upper[0] = -1.5 * sign
    assert Rows(upper, operator).without(0)[0].tolist() == [[sign, sign], [sign, sign]]


@pytest.mark.parametrize("operator", OPERATORS)
def test_many_classes(operator):
    classes = 1628
    scores = torch.rand(3, 2, classes, generator=torch.Generator().manual_seed(0))
    moments = score_moments(scores)
    matrices = correlation(moments)
    examples = torch.tensor([20, 20, 20])
    marginals = moments.marginal if operator == "pooled" else None
    result = Rows(pack_upper(matrices), operator, examples=examples, marginals=marginals)
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
    result = Rows(
        values[:, None].expand(-1, 10),
        operator,
        examples=torch.full((clients,), 10),
        marginals=torch.full((clients, 4), 0.5),
    )
    rest = values[1:].numpy()
    cut = {"trimmed", "support_trimmed"}
    expected = {"median": np.median, **dict.fromkeys(cut, lambda x: trim_mean(x, 0.1))}
    expected = expected.get(operator, np.mean)
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
        result = Rows(
            pack_upper(matrices),
            operator,
            examples=torch.from_numpy(sizes),
            marginals=torch.stack([m.marginal for m in moments]),
        )
        return float(result.full()[0][0, 1])

    truth = label_correlation(labels)[0][0, 1].item()
    assert truth > 0.4
    assert entry("median") == 0
    assert entry("mean") < 0.3 * truth
    assert entry("size") > 0.8 * truth
    assert entry("support") == pytest.approx(truth, abs=0.05)
    assert entry("pooled") == pytest.approx(truth, abs=1e-4)


# -- many teachers at once ------------------------------------------------------------------------


@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("numbers", [2**22, 60, 1])
def test_all_teachers_at_once_are_those_of_each(operator, numbers, monkeypatch):
    """In the order asked for, in parts of any size, to the last bit; rounded only at the end."""
    result = make_table(12, 5, 4).rows(operator)
    expected = [result.without(row) for row in range(12)]
    monkeypatch.setitem(corr.AT_ONCE, "cpu", numbers)
    rows = [7, 0, 11, 7]
    for dtype in (F64, torch.float32):
        _, teachers = result.teachers(rows, 0, dtype)
        for row, (matrix, known) in zip(rows, teachers, strict=True):
            assert torch.equal(matrix, expected[row][0].to(dtype))
            assert matrix.dtype == dtype
            assert torch.equal(known, expected[row][1])
    assert result.teachers([], 0)[1] == []


@pytest.mark.parametrize("operator", OPERATORS)
def test_the_way_of_a_device_agrees_with_that_of_the_cpu(operator, monkeypatch):
    """Sums and sorting of other devices, tried on the CPU: the same up to rounding."""
    table = make_table(40, 5, 2)
    on_cpu = table.rows(operator)  # a table computes when it is asked: here before the patch
    whole, others = on_cpu.full(), on_cpu.without(3)
    monkeypatch.setattr(consensus, "_in_order", lambda tensor: False)
    monkeypatch.setitem(corr.AT_ONCE, "cpu", 100)
    on_device = table.rows(operator)
    for ours, theirs in ((on_device.full(), whole), (on_device.without(3), others)):
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
    whole, rest = table.rows(operator), table.rows(operator)
    rows = rest.rows
    rest._fold({name: tensor[:7] for name, tensor in rows.items()}, -1 - age)
    assert rest.folded["round"] == -1 - age
    rest.rows = {name: tensor[7:] for name, tensor in rows.items()}
    kept = {name: tensor.clone() for name, tensor in rest.folded.items()}
    for ours, theirs in ((rest.full(), whole.full()), (rest.without(9), whole.without(9))):
        torch.testing.assert_close(ours[0], theirs[0], rtol=0, atol=1e-12)
        assert torch.equal(ours[1], theirs[1])
    assert all(torch.equal(kept[name], tensor) for name, tensor in rest.folded.items())


def test_sums_that_faded_away_are_unknown():
    """0.9 to the power of 10,000 is 0 in float64: nothing is left to divide by."""
    table = Rows(torch.ones(1, 3), "mean")
    table._fold(table.rows, -1)
    table.rows = {name: tensor[:0] for name, tensor in table.rows.items()}
    matrix, known = table.consensus(10_000)
    assert not matrix.any()
    assert not known.any()
    assert table.consensus(100).matrix.tolist() == [[1, 1], [1, 1]]


# -- a table that remembers -----------------------------------------------------------------------


def reply(client: int, value: float, examples: int = 20) -> Reply:
    """R01 of two labels, with a diagonal of 1."""
    told = {"upper": torch.tensor([1.0, value, 1.0]), "marginal": torch.full((2,), 0.5)}
    return Reply(client, examples, Record({CORRELATION: told}))


def test_a_table_remembers_the_last_of_each_client():
    """Client 1 says 0.1, then 0.5; client 3 says 0.3: rows are in client order, with their rounds.

    ``mean`` with decay 0.5 in round 2: (0.5 + 0.5 · 0.3) / 1.5 = 0.4333; without client 1: 0.3.
    """
    table = CorrelationTable(2, Operator("mean", decay=0.5))
    assert not table.teaches
    table.add([reply(1, 0.1), reply(3, 0.3, 40)], 0)
    assert table.teaches
    table.add([reply(1, 0.5)], 1)
    assert table.rows["client"].tolist() == [1, 3]
    assert table.rows["round"].tolist() == [1, 0]
    assert table.rows["examples"].tolist() == [20, 40]
    common, (own, new) = table.teachers([1, 7], 2)
    assert common.matrix[0, 1].item() == pytest.approx(0.65 / 1.5)
    assert own.matrix[0, 1].item() == pytest.approx(0.3)
    assert torch.equal(new.matrix, common.matrix)  # a client never heard
    again = CorrelationTable(2, table.operator).load(table.state_dict())
    assert torch.equal(again.consensus(2).matrix, common.matrix)
    assert FOLDED not in table.state_dict()


def test_the_last_cohort_only():
    table = CorrelationTable(2, Operator("mean"), last_only=True)
    table.add([reply(0, 0.1), reply(1, 0.3)], 0)
    table.add([reply(5, 0.5)], 1)
    assert table.rows["client"].tolist() == [5]
    assert not table.folded


def test_what_does_not_fit_is_folded():
    """Room for one: client 0 (R01 = 0.8) leaves for client 1 (0.2) and still counts half."""
    table = CorrelationTable(2, Operator("mean", decay=0.5), capacity=1)
    for round, (client, value) in enumerate([(0, 0.8), (1, 0.2)]):
        table.add([reply(client, value)], round)
    assert table.rows["client"].tolist() == [1]
    assert table.folded["weight"].tolist() == [0.5]
    assert table.teaches
    again = CorrelationTable(2, table.operator).load(table.state_dict())
    for kept in (table, again):
        common, (own,) = kept.teachers([1], 2)
        assert common.matrix[0, 1].item() == pytest.approx((0.5 * 0.8 + 0.2) / 1.5)
        assert own.matrix[0, 1].item() == pytest.approx(0.8)


# -- unknown labels -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operator", "expected"),
    [
        # Entry (0, 1) stands on 30 images of the first client, none of the second, 10 of the third.
        ("mean", (0.2 + 0.8) / 2),
        ("size", (30 * 0.2 + 10 * 0.8) / 40),
        # 30²/(30 + 10) = 22.5 and 10²/20 = 5
        ("support", (22.5 * 0.2 + 5 * 0.8) / 27.5),
        # a tenth of 27.5 is 2.75, cut on either side
        ("support_trimmed", (19.75 * 0.2 + 2.25 * 0.8) / 22),
    ],
)
def test_entries_count_by_the_images_behind_them(operator, expected):
    upper = torch.tensor([[1.0, 0.2, 1.0], [1.0, -0.9, 1.0], [1.0, 0.8, 1.0]])
    images = torch.tensor([[30.0, 30.0, 40.0], [50.0, 0.0, 50.0], [10.0, 10.0, 10.0]])
    table = Rows(upper, operator, images=images, kappa=10, min_examples=5)
    matrix, known = table.full()
    assert matrix[0, 1].item() == pytest.approx(expected)
    assert known.all()
    others = [table.without(client) for client in range(3)]
    found = [matrix[0, 1].item() for matrix, _ in others]
    assert found == pytest.approx([0.8, expected, 0.2])
    assert all(known[0, 1] for _, known in others)


def test_an_entry_that_one_client_knows_is_unknown_without_it():
    upper = torch.tensor([[1.0, 0.2, 1.0], [1.0, 0.4, 1.0]])
    images = torch.tensor([[9.0, 9.0, 9.0], [9.0, 0.0, 9.0]])
    for operator in ("mean", "size"):
        table = Rows(upper, operator, images=images)
        assert [table.without(k).known[0, 1].item() for k in (0, 1)] == [False, True]


def test_few_images_of_an_entry_do_not_teach():
    """``min_examples`` looks at each entry: 4 images of (0, 1) are too few, whatever n is."""
    upper = torch.tensor([[1.0, 0.2, 1.0]])
    images = torch.tensor([[90.0, 4.0, 90.0]])
    _, known = Rows(upper, images=images, min_examples=5).full()
    assert known.tolist() == [[True, False], [False, True]]


def test_support_of_a_label_follows_the_images_that_know_it():
    """p̂ = 0.3 counts from 0.5 / n_c on: n_c = 2 gives 0.25, n_c = 1 gives 0.5, n_c = 0 never."""
    images, marginals = torch.tensor([[2.0, 1, 0, 1, 0, 0]]), torch.full((1, 3), 0.3)
    table = Rows(torch.ones(1, 6), images=images, marginals=marginals, min_examples=0)
    assert table.full().known.nonzero().tolist() == [[0, 0]]


def test_support_floor_is_half_an_image():
    """Of n = 10 images a label counts from p̂ = 1/(2n) = 0.05 on, not from 1/n = 0.1."""
    for n, marginals in ((10, [0.049, 0.051, 0.099]), (10**6, [0.0009, 0.0011, 0.5])):
        examples = torch.tensor([n])  # of a million images: the setting, 1e-3
        table = Rows(torch.ones(1, 6), examples=examples, marginals=torch.tensor([marginals]))
        assert table.full().known.diagonal().tolist() == [False, True, True]
