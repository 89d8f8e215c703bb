"""Splitters besides the first two, feature skew and partial annotation; see test_partition."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedharmony.data.base import TensorImages
from fedharmony.data.transforms import TRANSFORMS
from fedharmony.errors import ConfigError, PartitionError
from fedharmony.partition import prior
from fedharmony.partition.annotation import client_known
from fedharmony.partition.base import Partition, splitters
from fedharmony.partition.dirichlet import pivot_labels
from fedharmony.partition.feature_skew import feature_skew, skewed_images
from fedharmony.partition.iid import Iid
from fedharmony.partition.labelset import LabelsetDirichlet, labelset_groups
from fedharmony.partition.natural import Natural
from fedharmony.partition.prior import PriorDirichlet, assign, log_priors
from fedharmony.partition.quantity import QuantityDirichlet, dirichlet_sizes, lifted
from fedharmony.partition.report import split_report
from fedharmony.partition.shards import Shards, shards_per_label
from fedharmony.types import Index, Labels
from test_partition import covers_once, made, problems, voc_like
from work import counted

COVERING = [name for name in splitters.names() if splitters[name].covers]


@pytest.mark.parametrize("name", COVERING)
@settings(max_examples=3)
@given(
    classes=st.integers(1, 20),
    density=st.sampled_from([0.0, 0.002, 0.07, 1.0]),
    steepness=st.floats(0, 2),
    seed=st.integers(0, 2**32),
)
def test_any_labels_are_divided_among_2500_clients(
    name: str, classes: int, density: float, steepness: float, seed: int
) -> None:
    """VOC's 5,717 images with no, few, usual or all labels, of equal or steep frequencies."""
    frequency = density * np.arange(1, classes + 1) ** -steepness
    labels = (np.random.default_rng(seed).random((5717, classes)) < frequency).astype(np.uint8)
    partition, calls = counted(lambda: made(name, 0.01).partition(labels, 2500, seed))
    assert calls < 500 * (5717 + 2500)
    assert covers_once(partition.indices, 5717)
    assert partition.sizes.min() >= 1


def skew(name: str, labels: Labels, gamma: float, seed: int) -> tuple[float, float]:
    """Marginal and joint skew beyond the noise of an IID split: Δ Jensen–Shannon and Δ drift."""
    report = split_report(labels, made(name, gamma).partition(labels, 50, seed), seed)
    floor = split_report(labels, Iid().partition(labels, 50, seed), seed)
    marginal = (report.jensen_shannon or 0) - (floor.jensen_shannon or 0)
    return marginal, (report.correlation_drift or 0) - (report.correlation_drift_iid or 0)


def test_label_sets_move_co_occurrence_most_and_priors_least() -> None:
    """Drift per unit of marginal skew, γ = 0.5 and 0.25: about 0.8, 0.5 and 0.3 in this order."""
    labels = voc_like()
    rates = []
    for name in ("labelset_dirichlet", "pivot_dirichlet", "prior_dirichlet"):
        found = np.array(
            [skew(name, labels, gamma, seed) for gamma in (0.5, 0.25) for seed in range(3)]
        )
        assert (found > 0).all()
        marginal, joint = found.sum(0)
        rates.append(joint / marginal)
    assert rates[0] > 1.2 * rates[1]
    assert rates[1] > 1.2 * rates[2]


# Label priors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("gamma", [0.1, 1.0, 10.0])
def test_prior_moments(gamma: float) -> None:
    """Dir(γ·C·p̄) has mean p̄ and variance p̄(1 − p̄) / (γ·C + 1); here p̄ = (.6, .3, .1, 0), C = 4."""
    positives, mean = np.array([60, 30, 10, 0]), np.array([0.6, 0.3, 0.1])
    drawn = log_priors(positives, 20_000, gamma, np.random.default_rng(0))
    assert (drawn[:, 3] == 0).all()
    priors = np.exp(drawn[:, :3])
    np.testing.assert_allclose(priors.sum(1), 1)
    np.testing.assert_allclose(priors.mean(0), mean, atol=0.015)
    np.testing.assert_allclose(priors.var(0), mean * (1 - mean) / (4 * gamma + 1), rtol=0.06)


def test_priors_do_not_underflow() -> None:
    """At the smallest γ almost all of π is one label, and every logarithm is still finite."""
    drawn = log_priors(np.array([5000, 1, 0]), 300, 1e-6, np.random.default_rng(0))
    assert np.isfinite(drawn).all()
    assert (drawn[:, :2].max(1) > -1e-3).all()
    assert (log_priors(np.zeros(3, np.int64), 2, 0.5, np.random.default_rng(0)) == 0).all()


@pytest.mark.parametrize(
    ("image", "chance"),
    [
        ((1, 1), 0.6 / 1.1),  # 2 √(.9 · .1) against 1 √(.5 · .5)
        ((1, 0), 1.8 / 2.3),  # 2 · .9 against .5
        ((0, 0), 2 / 3),  # the room alone
    ],
)
def test_owners_by_hand(image: tuple[int, int], chance: float) -> None:
    """Two clients with π = (.9, .1) and (.5, .5) and room for two images and one.

    The first image in the order goes to client 0 with the chance given; 3,000 draws, four standard
    errors of 0.009.
    """
    labels = np.tile(np.array(image, np.uint8), (3, 1))
    priors, sizes, first = np.log([[0.9, 0.1], [0.5, 0.5]]), np.array([2, 1]), 0
    for seed in range(3000):
        owner = assign(labels, priors, sizes, np.random.default_rng(seed))
        assert np.bincount(owner).tolist() == [2, 1]
        first += owner[np.random.default_rng(seed).permutation(3)[0]] == 0
    assert first / 3000 == pytest.approx(chance, abs=0.037)


@settings(max_examples=60)
@given(problem=problems(), data=st.data())
def test_clients_get_the_sizes_they_were_given(
    problem: tuple[Labels, int, int], data: st.DataObject
) -> None:
    labels, clients, seed = problem
    cuts = data.draw(st.lists(st.integers(0, len(labels)), min_size=clients, max_size=clients))
    sizes = np.diff([*sorted(cuts)[:-1], len(labels)], prepend=0)
    rng = np.random.default_rng(seed)
    priors = log_priors(labels.sum(0, dtype=np.int64), clients, 0.01, rng)
    assert np.bincount(assign(labels, priors, sizes, rng), minlength=clients).tolist() == [*sizes]


def test_working_in_parts_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    labels = voc_like(300)
    whole = PriorDirichlet().partition(labels, 7, 0)
    monkeypatch.setattr(prior, "SCORES", 50)
    assert PriorDirichlet().partition(labels, 7, 0).sha256 == whole.sha256


def test_sizes_of_the_prior_split() -> None:
    """Equal sizes, or those of the quantity split with its minimum."""
    labels = voc_like(1003)
    equal = PriorDirichlet().partition(labels, 10, 0).sizes
    assert sorted(equal) == [100] * 7 + [101] * 3
    config = PriorDirichlet.Config(size_gamma=0.2, min_size=20)
    unequal = PriorDirichlet(config).partition(labels, 10, 0).sizes
    assert unequal.min() >= 20
    assert unequal.max() > 200
    nearly = PriorDirichlet(PriorDirichlet.Config(size_gamma=1e6)).partition(labels, 10, 0).sizes
    assert np.ptp(nearly) <= 2
    with pytest.raises(PartitionError, match="min_size to 100 or less"):
        PriorDirichlet(PriorDirichlet.Config(min_size=101)).partition(labels, 10, 0)


def test_smaller_gamma_skews_more() -> None:
    labels = voc_like(2000)
    reports = [
        split_report(labels, made("prior_dirichlet", gamma).partition(labels, 20, 0), 0)
        for gamma in (1e6, 1.0, 0.1)
    ]
    iid = split_report(labels, Iid().partition(labels, 20, 0), 0)
    divergences = [report.jensen_shannon or 0 for report in reports]
    assert divergences[0] == pytest.approx(iid.jensen_shannon, rel=0.1)
    assert divergences[0] < 0.5 * divergences[1] < 0.25 * divergences[2]


# Label sets --------------------------------------------------------------------------------------


def test_each_set_is_a_group_when_there_are_few() -> None:
    labels = np.array([[0, 1, 1], [1, 0, 0], [0, 0, 0], [0, 1, 1], [1, 1, 0]], np.uint8)
    groups = labelset_groups(labels, 3, seed=0)
    assert groups[0] == groups[3]
    assert sorted(set(groups)) == [0, 1, 2, 3]
    assert groups[2] == 3  # without a label: after the others
    assert labelset_groups(np.zeros((4, 2), np.uint8), 3, seed=0).tolist() == [0] * 4


def test_groups_by_hand() -> None:
    """Two families of sets that share no label: two groups, in whatever order."""
    left = np.array([[1, 1, 1, 0, 0, 0], [1, 1, 0, 0, 0, 0], [0, 1, 1, 0, 0, 0]], np.uint8)
    labels = np.concatenate([left, left[:, ::-1]])
    groups = labelset_groups(labels, 2, seed=0)
    assert len(set(groups[:3])) == len(set(groups[3:])) == 1
    assert groups[0] != groups[3]


def test_groups_are_a_fixed_point_of_k_means() -> None:
    """Every image is nearest to the mean of its group, taken over images (not distinct sets)."""
    labels = voc_like(3000)
    labels = labels[labels.any(1)]
    groups = labelset_groups(labels, 12, seed=0)
    points = labels / np.sqrt(labels.sum(1, keepdims=True))
    centres = np.stack([points[groups == g].mean(0) for g in range(12)])
    distance = ((points[:, None] - centres) ** 2).sum(-1)
    own = distance[np.arange(len(points)), groups]
    assert (own <= distance.min(1) + 1e-9).mean() > 0.995  # the last step may move a few
    assert len(set(groups)) == 12


def test_whole_groups_go_to_one_client() -> None:
    """γ → 0: six label sets of 20 images, six clients; every set has one owner.

    The labels are three, each in half of the sets: the pivot split could not tell {0} from {0, 1}
    where 0 is rarest.
    """
    sets = np.array(
        [[1, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 0], [0, 1, 1], [0, 0, 0]], np.uint8
    ).repeat(20, axis=0)
    config = LabelsetDirichlet.Config(gamma=1e-6, min_size=1, max_tries=1)
    partition = LabelsetDirichlet(config).partition(sets, 6, seed=0)
    assert sorted(index[0] for index in partition.indices) == [0, 20, 40, 60, 80, 100]
    assert all(np.ptp(index) == 19 for index in partition.indices)


# Quantity ----------------------------------------------------------------------------------------


@given(sizes=arrays(np.int64, st.integers(1, 8), elements=st.integers(0, 12)), data=st.data())
def test_lifting_moves_images_one_by_one_from_the_largest(
    sizes: Index, data: st.DataObject
) -> None:
    min_size = data.draw(st.integers(0, int(sizes.sum()) // len(sizes)))
    plain = sizes.copy()
    while (plain < min_size).any():
        plain[plain.argmax()] -= 1
        plain[plain.argmin()] += 1
    found = lifted(sizes, min_size)
    assert sorted(found) == sorted(plain)  # equals may differ in who gave
    assert (found[sizes < min_size] == min_size).all()
    assert found.sum() == sizes.sum()


def test_size_moments() -> None:
    """Sizes / N have mean 1/K and variance (1/K)(1 − 1/K) / (Kγ + 1), here 0.1875 / 3."""
    rng = np.random.default_rng(0)
    sizes = np.stack([dirichlet_sizes(10**6, 4, 0.5, 0, 1, rng) for _ in range(8000)])
    assert (sizes.sum(1) == 10**6).all()
    np.testing.assert_allclose(sizes.mean(0) / 10**6, 0.25, atol=0.015)
    np.testing.assert_allclose(sizes.var(0) / 10**12, 0.0625, rtol=0.06)


def test_sizes_are_drawn_until_one_fits_and_the_best_is_kept() -> None:
    fits = [
        dirichlet_sizes(100, 4, 0.5, 10, 1000, np.random.default_rng(seed)) for seed in range(20)
    ]
    assert min(sizes.min() for sizes in fits) >= 10
    assert len({tuple(sizes) for sizes in fits}) == 20
    missing = [
        np.maximum(25 - dirichlet_sizes(100, 4, 0.5, 25, tries, np.random.default_rng(1)), 0).sum()
        for tries in (1, 5, 25, 125)
    ]
    assert missing == sorted(missing, reverse=True)
    assert missing[-1] < missing[0]


def test_content_stays_iid() -> None:
    """Label distributions differ as by chance: drift and its floor agree, sizes do not."""
    labels = voc_like()
    config = QuantityDirichlet.Config(gamma=1.0)
    report = split_report(labels, QuantityDirichlet(config).partition(labels, 30, 0), 0)
    assert report.correlation_drift == pytest.approx(report.correlation_drift_iid, rel=0.1)
    assert report.size_max > 5 * report.size_median
    assert report.size_min >= 10
    by_class = np.eye(10, dtype=np.uint8).repeat(400, axis=0)  # the order of images says nothing
    partition = QuantityDirichlet(config).partition(by_class, 5, 0)
    largest = by_class[partition.indices[partition.sizes.argmax()]].mean(0)
    np.testing.assert_allclose(largest, 0.1, atol=0.04)


def test_sizes_are_repaired_or_refused() -> None:
    labels = np.zeros((100, 1), np.uint8)
    config = QuantityDirichlet.Config(gamma=0.01, min_size=25, max_tries=3)
    assert QuantityDirichlet(config).partition(labels, 4, 0).sizes.tolist() == [25] * 4
    with pytest.raises(PartitionError, match="gave every client 25 images; the best of 3 draws"):
        QuantityDirichlet(replace(config, repair=False)).partition(labels, 4, 0)
    with pytest.raises(PartitionError, match="min_size to 20 or less"):
        QuantityDirichlet(config).partition(labels, 5, 0)


# Shards ------------------------------------------------------------------------------------------


@given(
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    clients=st.integers(1, 12),
    owned=st.integers(1, 4),
)
def test_shards_are_as_equal_as_can_be(sizes: list[int], clients: int, owned: int) -> None:
    """Bounds and number are kept, and no shard can be spared to cut the largest ones."""
    clients = min(clients, sum(sizes))
    owned = max(owned, -(-len(sizes) // clients))
    shards = shards_per_label(sizes, clients, owned)
    most = np.minimum(sizes, clients)
    assert ((shards >= 1) & (shards <= most)).all()
    assert shards.sum() == min(clients * owned, most.sum()) >= clients
    growing = np.max(np.where(shards < most, sizes / shards, 0))
    spared = np.min(np.where(shards > 1, sizes / np.maximum(shards - 1, 1), np.inf))
    assert growing <= spared


@settings(max_examples=60)
@given(problem=problems(), owned=st.integers(1, 6))
def test_clients_own_few_labels(problem: tuple[Labels, int, int], owned: int) -> None:
    """At most s pivot labels each, in equal parts: sizes within a label differ by one at most."""
    labels, clients, seed = problem
    pivot = pivot_labels(labels, "rarest", np.random.default_rng(0))
    owned = min(max(owned, -(-len(set(pivot)) // clients)), len(set(pivot)))
    partition = Shards(Shards.Config(labels_per_client=owned)).partition(labels, clients, seed)
    table = np.stack(
        [np.bincount(pivot[i], minlength=labels.shape[1] + 1) for i in partition.indices]
    )
    numbers = (table > 0).sum(1)
    assert 1 <= numbers.min() <= numbers.max() <= owned
    assert np.ptp(numbers) <= 1
    for column in table.T:
        parts = column[column > 0]
        assert len(parts) == 0 or np.ptp(parts) <= 1


def test_labels_meet_in_many_ways() -> None:
    """100 clients with two of ten labels: most of the 45 pairs occur at some client."""
    labels = np.eye(10, dtype=np.uint8).repeat(100, axis=0)
    partition = Shards().partition(labels, 100, 0)
    pairs = {tuple(np.flatnonzero(labels[index].any(0))) for index in partition.indices}
    assert all(len(pair) == 2 for pair in pairs)
    assert len(pairs) > 15


def test_shards_of_frequent_labels_go_to_more_clients() -> None:
    labels = voc_like()
    sizes = Shards().partition(labels, 50, 0).sizes
    assert 70 < sizes.min() <= sizes.max() < 135


def test_shards_are_random_parts_of_a_label() -> None:
    """One label, four clients: each holds images from all over, not a run of neighbours."""
    partition = Shards().partition(np.ones((400, 1), np.uint8), 4, 0)
    assert all(len(index) == 100 and np.ptp(index) > 350 for index in partition.indices)


def test_labels_per_client() -> None:
    labels = np.eye(6, dtype=np.uint8).repeat(10, axis=0)

    def owned(clients: int, number: int | None = None, labels: Labels = labels) -> set[int]:
        partition = Shards(Shards.Config(labels_per_client=number)).partition(labels, clients, 0)
        return {int(labels[index].any(0).sum()) for index in partition.indices}

    assert owned(30) == owned(3) == {2}
    assert owned(2) == {3}
    assert owned(1) == {6}
    assert owned(4, 5) == {5}
    assert owned(5, labels=labels[:10]) == {1}
    with pytest.raises(PartitionError, match=r"cannot own all 6 .* to 2 or more, .* 6 clients"):
        owned(5, 1)
    with pytest.raises(PartitionError, match=r"only 6 decide .* to 6 or less"):
        owned(5, 7)


# Natural owners ----------------------------------------------------------------------------------

USERS = np.array(["eve", "bob", "eve", "ann", "eve", "bob", "eve"])


def natural(clients: int | None, seed: int = 0, users: Any = USERS, **config: int) -> Partition:
    labels = np.zeros((len(USERS), 1), np.uint8)
    return Natural(Natural.Config(**config)).partition(labels, clients, seed, users)


def lists(partition: Partition) -> list[list[int]]:
    return [index.tolist() for index in partition.indices]


def test_users_are_clients() -> None:
    everyone = [[3], [1, 5], [0, 2, 4, 6]]
    assert lists(natural(None)) == lists(natural(3)) == everyone
    assert lists(natural(None, min_images=2)) == everyone[1:]
    assert lists(natural(None, users=USERS.astype(object))) == everyone
    assert lists(natural(None, users=np.array([9, 5, 9, 1, 9, 5, 9]))) == everyone


def test_clients_are_called_by_their_owners() -> None:
    """Bob and eve have two images or more; nobody is named where one client has two owners."""
    assert natural(None).names == ("ann", "bob", "eve")
    assert natural(None, min_images=2).names == ("bob", "eve")
    assert natural(None, users=np.array([9, 5, 9, 1, 9, 5, 9])).names == ("1", "5", "9")
    labels = np.zeros((len(USERS), 1), np.uint8)
    assert Iid().partition(labels, 2, 0, USERS).names == ()
    assert Iid().partition(labels, len(USERS), 0, USERS).names == ()  # eve would be four clients


def test_large_users_keep_a_random_part() -> None:
    kept = {tuple(lists(natural(None, seed, max_images=2))[2]) for seed in range(60)}
    assert kept == {(0, 2), (0, 4), (0, 6), (2, 4), (2, 6), (4, 6)}
    assert lists(natural(None, max_images=2))[:2] == [[3], [1, 5]]


def test_users_are_chosen_by_the_seed() -> None:
    """Two of three; what a user keeps does not depend on who else takes part."""
    whole = lists(natural(None, 7, max_images=2))
    chosen = [lists(natural(2, seed)) for seed in range(40)]
    assert len({str(parts) for parts in chosen}) == 3
    assert all(part in lists(natural(None)) for parts in chosen for part in parts)
    assert all(part in whole for part in lists(natural(2, 7, max_images=2)))
    fits = [lists(natural(1, seed, min_images=2)) for seed in range(20)]
    assert [[3]] not in fits


def test_impossible_natural_splits_are_refused() -> None:
    with pytest.raises(PartitionError, match=r"have 3 users with 1 images .* to 3 or less, leave"):
        natural(4)
    with pytest.raises(PartitionError, match="have 2 users with 2 images"):
        natural(3, min_images=2)
    with pytest.raises(PartitionError, match="No user has 5 images; the largest has 4"):
        natural(None, min_images=5)
    with pytest.raises(PartitionError, match="no natural split"):
        natural(None, users=None)


def test_as_many_users_as_flair_has() -> None:
    """41,131 users with 345,879 images and 17 labels; most have few images."""
    rng = np.random.default_rng(0)
    weight = 1 / np.arange(1, 41_132)
    more = rng.choice(41_131, 345_879 - 41_131, p=weight / weight.sum())
    users = np.char.mod("%08d@N00", np.concatenate([np.arange(41_131), more]))
    labels = (rng.random((345_879, 17)) < 0.16).astype(np.uint8)
    partition, calls = counted(lambda: Natural().partition(labels, None, 0, users))
    assert calls < 100 * 41_131
    report, calls = counted(lambda: split_report(labels, partition, 0))
    assert calls < 100 * 41_131
    assert (report.clients, report.size_max) == (41_131, 512)
    assert report.left_out == 345_879 - partition.sizes.sum() > 0


# Feature skew ------------------------------------------------------------------------------------


def test_transforms_take_turns() -> None:
    partition = Iid().partition(np.zeros((40, 1), np.uint8), 11, 0)
    names = ("none", "grey", "blur")
    first, again, other = (feature_skew(partition, names, seed) for seed in (0, 0, 1))
    assert first.transforms == again.transforms != other.transforms
    assert first.transforms is not None
    assert sorted(first.transforms.count(name) for name in names) == [3, 4, 4]
    assert first.indices is partition.indices
    assert len({p.sha256 for p in (partition, first, again, other)}) == 3
    with pytest.raises(ConfigError, match=r"no transform 'gray'\. Did you mean 'grey'"):
        feature_skew(partition, ("none", "gray"), 0)
    with pytest.raises(ConfigError, match="No transform is named"):
        feature_skew(partition, (), 0)


def test_images_look_as_their_owner_sees_them(tmp_path: Path) -> None:
    """Image 4 belongs to nobody and stays as it is."""
    pixels = torch.randint(256, (5, 3, 8, 8), generator=torch.Generator().manual_seed(0))
    images = TensorImages(pixels.to(torch.uint8))
    partition = Partition((np.array([0, 3]), np.array([1]), np.array([2])), 5)
    assert skewed_images(images, partition) is images
    skewed = replace(partition, transforms=("noise", "none", "dark"))
    skewed.save(tmp_path / "p.json")
    seen = skewed_images(images, Partition.load(tmp_path / "p.json")).gather(torch.arange(5), "cpu")
    for image, name in enumerate(["noise", "none", "dark", "noise", "none"]):
        expected = TRANSFORMS[name](images.pixels[image], torch.tensor(image))
        assert torch.equal(seen[image], expected)
    assert not torch.equal(seen[0], images.pixels[0])
    with pytest.raises(ConfigError, match="no transform 'sepia'"):
        skewed_images(images, replace(partition, transforms=("sepia", "none", "none")))


# Partial annotation ------------------------------------------------------------------------------


@settings(max_examples=60)
@given(problem=problems(), share=st.floats(0, 1, exclude_min=True))
def test_clients_know_a_share_of_the_labels(problem: tuple[Labels, int, int], share: float) -> None:
    labels, clients, seed = problem
    partition = Iid().partition(labels, clients, seed)
    known = client_known(labels, partition, share, seed)
    assert (known.dtype, known.shape) == (np.dtype(bool), labels.shape)
    number = max(1, int(share * labels.shape[1] + 0.5))
    for index in partition.indices:
        assert (known[index] == known[index[0]]).all()
        assert known[index[0]].sum() == number
    assert np.array_equal(known, client_known(labels, partition, share, seed))


def test_every_label_is_as_likely_to_be_known() -> None:
    """3 of 10 labels, 2,000 clients: each label at 30 % of them, four standard errors of 1 %."""
    labels = np.zeros((2001, 10), np.uint8)
    partition = Partition(tuple(np.arange(2000)[:, None]), 2001)
    known = client_known(labels, partition, 0.3, seed=0)
    np.testing.assert_allclose(known[:2000].mean(0), 0.3, atol=0.041)
    assert not known[2000].any()  # nobody's
    assert client_known(labels, partition, 1.0, seed=0)[:2000].all()
    assert (client_known(labels, partition, 0.3, seed=1) != known).any()


def test_impossible_annotation_is_refused() -> None:
    labels = np.zeros((4, 3), np.uint8)
    partition = Iid().partition(labels, 2, 0)
    for share in (0.0, -0.5, 1.01, float("nan")):
        with pytest.raises(PartitionError, match="above 0 and up to 1"):
            client_known(labels, partition, share, 0)
    with pytest.raises(PartitionError, match="divides 4 images, but there are labels for 3"):
        client_known(labels[:3], partition, 0.5, 0)
