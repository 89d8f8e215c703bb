"""The contract of all splitters, the first two of them, partition files and the split report."""

import json
import math
import tracemalloc
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fedharmony.config import build, keys
from fedharmony.errors import ConfigError, PartitionError
from fedharmony.partition import report as split_reports
from fedharmony.partition.base import Partition, Splitter, splitters
from fedharmony.partition.dirichlet import (
    PivotDirichlet,
    cumulative_dirichlet,
    pivot_labels,
    repaired,
    smallest_client,
)
from fedharmony.partition.iid import Iid
from fedharmony.partition.report import (
    client_positives,
    correlation_drift,
    jensen_shannon,
    label_shares,
    split_report,
)
from fedharmony.types import Index, Labels
from work import counted

ALL = splitters.names()
#: Images per class of PASCAL VOC 2007 trainval (5,011 images).
VOC = [238, 243, 330, 181, 244, 186, 713, 337, 445, 141]
VOC += [200, 421, 287, 245, 2008, 245, 96, 229, 261, 256]


def voc_like(images: int = 5011) -> Labels:
    """VOC's frequencies, with every class made likelier by one of four latent factors."""
    rng = np.random.default_rng(0)
    latent = rng.standard_normal((images, 4))[:, np.arange(20) % 4]
    score = 0.5 * latent + rng.standard_normal((images, 20))
    ranks = score.argsort(0).argsort(0)
    return (ranks >= images - np.array(VOC) * images // 5011).astype(np.uint8)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Labels, int, int]:
    """Labels, clients and a seed: one image to eighty, one class to six, K from 1 to N."""
    images, classes = draw(st.integers(1, 80)), draw(st.integers(1, 6))
    labels = draw(arrays(np.uint8, (images, classes), elements=st.integers(0, 1)))
    return labels, draw(st.integers(1, images)), draw(st.integers(0, 2**32))


def made(name: str, gamma: float) -> Splitter:
    """A splitter with the given concentration, where it has one."""
    cls = splitters[name]
    return cls(build(cls.Config, {"gamma": gamma} if "gamma" in keys(cls.Config) else {}, "split"))


def covers_once(indices: tuple[Index, ...], images: int) -> bool:
    return sorted(np.concatenate(indices).tolist()) == list(range(images))


# Every splitter ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=40)
@given(problem=problems(), gamma=st.sampled_from([1e-6, 0.01, 0.5, 1e6]))
def test_every_image_has_one_owner(
    name: str, problem: tuple[Labels, int, int], gamma: float
) -> None:
    labels, clients, seed = problem
    before, users = labels.copy(), np.arange(len(labels)) % clients
    partition = made(name, gamma).partition(labels, clients, seed, users)
    assert covers_once(partition.indices, len(labels))
    assert len(partition.indices) == clients
    assert partition.sizes.min() >= 1
    for index in partition.indices:
        assert index.dtype == np.int64
        assert (np.diff(index) > 0).all()
    assert np.array_equal(labels, before)


@pytest.mark.parametrize("name", ALL)
def test_the_seed_decides(name: str) -> None:
    labels, users = voc_like(400), np.arange(400) % 40
    first, again, other = (
        splitters[name]().partition(labels, 8, seed, users) for seed in (5, 5, 6)
    )
    assert first.sha256 == again.sha256 != other.sha256
    assert all(map(np.array_equal, first.indices, again.indices))
    assert (first.splitter, first.seed, first.images) == (name, 5, 400)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize(("images", "clients"), [(5717, 1), (5717, 2500), (11540, 2500)])
def test_every_splitter_ends(name: str, images: int, clients: int) -> None:
    """The sizes of VOC 2012 (train, and train with val), at most 5 images per client, γ = 0.01.

    Nothing is done for every pair of an image and a client.
    """
    labels, users = voc_like(images), np.arange(images) % clients
    partition, calls = counted(lambda: made(name, 0.01).partition(labels, clients, 0, users))
    assert calls < 500 * (images + clients)
    assert not splitters[name].covers or covers_once(partition.indices, images)
    report, calls = counted(lambda: split_report(labels, partition, 0))
    assert (report.clients, report.left_out) == (clients, images - partition.sizes.sum())
    assert calls < 1000 + 100 * clients


@pytest.mark.parametrize("name", ALL)
def test_impossible_requests_are_refused(name: str) -> None:
    labels = voc_like(30)
    with pytest.raises(PartitionError, match="at least one"):
        splitters[name]().partition(labels, 0, 0)
    with pytest.raises(PartitionError, match="at most 30 clients"):
        splitters[name]().partition(labels, 31, 0)


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([[0, 1], [1, 2]], "image 1 belongs to 2 clients"),
        ([[0, 1], [2, 3]], "outside 0 … 2"),
        ([[-1, 0], [1, 2]], "outside 0 … 2"),
        ([[1, 0], [2]], "ascending order"),
        ([[0, 1, 2], []], "client 1 has no image"),
        ([[0], [1]], "2 clients with 2 images instead of 2 with 3"),
        ([[0, 1, 2]], "1 clients with 3 images instead of 2 with 3"),
    ],
)
def test_a_splitter_that_breaks_its_contract_is_caught(
    parts: list[list[int]], problem: str
) -> None:
    with pytest.raises(PartitionError, match=problem):
        fixed(parts).partition(np.zeros((3, 1), np.uint8), 2, 0)


def fixed(parts: list[list[int]], covering: bool = True) -> Splitter:
    class Fixed(Splitter):
        covers = covering

        def split(self, *_: Any, **__: Any) -> list[Index]:
            return [np.array(part, np.int64) for part in parts]

    return Fixed()


def test_a_splitter_may_leave_images_out_if_it_says_so() -> None:
    labels = np.zeros((3, 1), np.uint8)
    assert fixed([[0], [1]], covering=False).partition(labels, 2, 0).sizes.tolist() == [1, 1]
    with pytest.raises(PartitionError, match="1 clients with 2 images instead of 2 with 3"):
        fixed([[0, 1]], covering=False).partition(labels, 2, 0)
    with pytest.raises(PartitionError, match="belongs to 2 clients"):
        fixed([[0], [0]], covering=False).partition(labels, 2, 0)


def test_without_a_number_there_are_fifty_clients() -> None:
    labels = voc_like(400)
    assert len(Iid().partition(labels, None, 0).indices) == 50
    with pytest.raises(PartitionError, match="among 50 clients"):
        Iid().partition(labels[:49], None, 0)


# IID ---------------------------------------------------------------------------------------------


def test_iid_sizes_differ_by_one_at_most() -> None:
    sizes = Iid().partition(np.zeros((103, 2), np.uint8), 10, 0).sizes
    assert sorted(sizes) == [10] * 7 + [11] * 3


# Pivot Dirichlet ---------------------------------------------------------------------------------


def test_pivots_by_hand() -> None:
    """Class counts are 4, 2, 1, 2: class 2 is rarest, then 1 and 3 (the lower index first)."""
    labels = np.array(
        [[1, 1, 0, 0], [1, 0, 1, 1], [1, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]], np.uint8
    )
    rng = np.random.default_rng(0)
    assert pivot_labels(labels, "rarest", rng).tolist() == [1, 2, 1, 4, 0]
    assert pivot_labels(labels, "most_frequent", rng).tolist() == [0, 0, 0, 4, 0]
    drawn = np.stack([pivot_labels(labels, "random", rng) for _ in range(3000)])
    # Each of an image's labels is as likely as any other; 3,000 draws, five standard errors.
    share = np.stack([(drawn == c).mean(0) for c in range(4)], axis=1)
    np.testing.assert_allclose(share[:3], labels[:3] / labels[:3].sum(1, keepdims=True), atol=0.05)
    assert (drawn[:, 3] == 4).all()


@pytest.mark.parametrize("gamma", [0.05, 0.5, 5.0])
def test_dirichlet_moments(gamma: float) -> None:
    """Dir(γ·1_K) has mean 1/K and variance (1/K)(1 − 1/K) / (Kγ + 1)."""
    rng, size = np.random.default_rng(1), 4
    q = np.stack([np.diff(cumulative_dirichlet(gamma, size, rng), prepend=0) for _ in range(8_000)])
    np.testing.assert_allclose(q.sum(1), 1)
    np.testing.assert_allclose(q.mean(0), 1 / size, atol=0.02)
    np.testing.assert_allclose(q.var(0), (3 / 16) / (size * gamma + 1), rtol=0.08)


def test_tiny_concentrations_do_not_underflow() -> None:
    rng = np.random.default_rng(0)
    for size in (1, 2, 3000):
        shares = np.diff(cumulative_dirichlet(1e-6, size, rng), prepend=0)
        assert sorted(shares)[-1] == pytest.approx(1)
        assert np.isfinite(shares).all()


def test_tiny_concentration_gives_a_client_whole_classes() -> None:
    """Six classes of 20 images, six clients, γ → 0: each class goes to one client whole.

    A client then holds N / K = 20 images and, with ``balance``, gets no second class. Images
    without labels are the sixth class.
    """
    labels = np.eye(6, dtype=np.uint8).repeat(20, axis=0)[:, :5]
    config = PivotDirichlet.Config(gamma=1e-6, min_size=1, max_tries=1)  # no second draw
    partition = PivotDirichlet(config).partition(labels, 6, seed=0)
    assert sorted(index[0] for index in partition.indices) == [0, 20, 40, 60, 80, 100]
    assert all(np.ptp(index) == 19 and len(index) == 20 for index in partition.indices)
    free = PivotDirichlet(replace(config, balance=False))
    assert max(free.partition(labels, 6, seed=0).sizes) > 20


def test_large_concentration_divides_every_class_evenly() -> None:
    labels = np.eye(3, dtype=np.uint8).repeat(100, axis=0)
    partition = PivotDirichlet(PivotDirichlet.Config(gamma=1e6, balance=False)).partition(
        labels, 4, 0
    )
    for index in partition.indices:
        assert (abs(labels[index].sum(0).astype(int) - 25) <= 1).all()


def test_clients_get_random_images_of_a_class() -> None:
    config = PivotDirichlet.Config(gamma=1e6)
    partition = PivotDirichlet(config).partition(np.ones((400, 1), np.uint8), 4, 0)
    assert all(np.ptp(index) > 350 for index in partition.indices)


@pytest.mark.parametrize(
    ("gamma", "pivot"),
    [(1e-6, "rarest"), (0.01, "most_frequent"), (100.0, "random")],
)
def test_extreme_settings_end(gamma: float, pivot: Any) -> None:
    labels = voc_like()
    splitter = PivotDirichlet(PivotDirichlet.Config(gamma=gamma, pivot=pivot))
    partition, calls = counted(lambda: splitter.partition(labels, 2500, seed=0))
    assert covers_once(partition.indices, len(labels))
    assert calls < 500 * (len(labels) + 2500)


@settings(max_examples=60)
@given(problem=problems(), gamma=st.sampled_from([1e-6, 0.01, 0.5, 1e6]), balance=st.booleans())
def test_repair_reaches_the_largest_possible_minimum(
    problem: tuple[Labels, int, int], gamma: float, balance: bool
) -> None:
    labels, clients, seed = problem
    largest = len(labels) // clients
    config = PivotDirichlet.Config(gamma=gamma, balance=balance, min_size=largest, max_tries=3)
    partition = PivotDirichlet(config).partition(labels, clients, seed)
    assert partition.sizes.min() >= largest
    assert covers_once(partition.indices, len(labels))


def test_repair_takes_from_the_largest() -> None:
    """Sizes 6, 5, 1, 0 and a minimum of 2: three moves, from 6, then 5 and 5, leave 4, 4, 2, 2."""
    parts = [np.arange(6), np.arange(6, 11), np.array([11]), np.array([], np.int64)]
    fixed = repaired(parts, 2, np.random.default_rng(0))
    assert [len(part) for part in fixed] == [4, 4, 2, 2]
    assert covers_once(tuple(fixed), 12)
    assert 11 in fixed[2]


def test_no_repair_without_need() -> None:
    """A split that meets its minimum at the first draw is the same with and without repair."""
    labels = voc_like(1000)
    config = PivotDirichlet.Config(gamma=1.0, min_size=5)
    with_repair = PivotDirichlet(config).partition(labels, 10, 0)
    without = PivotDirichlet(replace(config, repair=False)).partition(labels, 10, 0)
    assert with_repair.sha256 == without.sha256


def test_without_repair_the_error_names_the_best_attempt() -> None:
    labels = np.eye(2, dtype=np.uint8).repeat(20, axis=0)
    config = PivotDirichlet.Config(gamma=1e-6, min_size=10, max_tries=7, repair=False)
    with pytest.raises(PartitionError, match="best of 7 draws left one with 0"):
        PivotDirichlet(config).partition(labels, 4, 0)


def test_a_draw_is_cut_short_exactly_when_it_is_no_better() -> None:
    """The same generator with and without a bound: None if and only if the bound is missed."""
    splitter, outcomes = PivotDirichlet(PivotDirichlet.Config(gamma=0.1)), set()
    for seed in range(40):
        whole = splitter._attempt([15] * 20, 60, 4, math.inf, np.random.default_rng(seed))
        assert whole is not None
        missing = int(np.maximum(4 - whole.sum(0), 0).sum())
        for bound in (missing - 3, missing, missing + 1, missing + 4):
            found = splitter._attempt([15] * 20, 60, 4, bound, np.random.default_rng(seed))
            assert (found is None) == (missing >= bound)
            assert found is None or np.array_equal(found, whole)
        outcomes.add(missing)
    assert len(outcomes) > 5


def test_redrawing_keeps_the_best_attempt() -> None:
    """More draws never leave more images to move."""
    missing = []
    for tries in (1, 5, 25, 125):
        splitter = PivotDirichlet(PivotDirichlet.Config(gamma=0.1, max_tries=tries))
        counts = splitter._draw([15] * 20, 60, 4, np.random.default_rng(3))
        assert (counts.sum(1) == 15).all()
        missing.append(int(np.maximum(4 - counts.sum(0), 0).sum()))
    assert missing == sorted(missing, reverse=True)
    assert missing[-1] < missing[0]


def test_minimum_size() -> None:
    assert [smallest_client(5011, k, None) for k in (1, 50, 250, 251, 1000, 5011)] == [
        10,
        10,
        10,
        9,
        2,
        1,
    ]
    assert smallest_client(100, 10, 10) == 10
    with pytest.raises(PartitionError, match="min_size to 10 or less, or use at most 9 clients"):
        smallest_client(100, 10, 11)


def test_settings_are_checked() -> None:
    assert build(PivotDirichlet.Config, {"gamma": 1, "min_size": 3}, "split").min_size == 3
    for key, value in [
        ("gamma", 0.0),
        ("gamma", float("inf")),
        ("pivot", "first"),
        ("min_size", 0),
    ]:
        with pytest.raises(ConfigError, match=f"split.{key}"):
            build(PivotDirichlet.Config, {key: value}, "split")


# Partition files ---------------------------------------------------------------------------------


@pytest.fixture
def partition() -> Partition:
    return PivotDirichlet().partition(voc_like(60), 4, seed=9)


@pytest.mark.parametrize("transforms", [None, ("none", "grey", "none", "blur")])
def test_files_keep_everything(
    partition: Partition, tmp_path: Path, transforms: tuple[str, ...] | None
) -> None:
    kept = replace(partition, transforms=transforms, names=("ann", "bob", "eve", "x"))
    file = tmp_path / "new folder" / "partition.json"
    kept.save(file)
    loaded = Partition.load(file, images=60)
    assert all(map(np.array_equal, loaded.indices, kept.indices))
    for name in ("images", "splitter", "settings", "seed", "transforms", "names", "sha256"):
        assert getattr(loaded, name) == getattr(kept, name)
    assert loaded.settings["gamma"] == 0.5
    assert [f.name for f in file.parent.iterdir()] == ["partition.json"]
    kept.save(file)  # over an old one
    assert Partition.load(file).sha256 == kept.sha256


def test_names_are_no_part_of_a_split(partition: Partition, tmp_path: Path) -> None:
    """Files of earlier versions have none; the hash says who holds what, not its name."""
    file = tmp_path / "partition.json"
    partition.save(file)
    content = json.loads(file.read_text())
    del content["names"]
    file.write_text(json.dumps(content))
    assert Partition.load(file).names == ()
    assert replace(partition, names=("a", "b", "c", "d")).sha256 == partition.sha256
    with pytest.raises(PartitionError, match="4 clients needs as many names, got 1"):
        replace(partition, names=("ann",))


def test_the_hash_covers_owners_and_transforms(partition: Partition) -> None:
    swapped = replace(partition, indices=partition.indices[::-1])
    transformed = replace(partition, transforms=("a", "b", "c", "d"))
    larger = replace(partition, images=61)
    hashes = {p.sha256 for p in (partition, swapped, transformed, larger)}
    assert len(hashes) == 4
    with pytest.raises(PartitionError, match="transforms"):
        replace(partition, transforms=("a",))


def swap_images(content: dict[str, Any]) -> None:
    first, second = content["indices"][:2]
    first[0], second[0] = second[0], first[0]
    first.sort()
    second.sort()


def set_index(value: Any) -> Any:
    def change(content: dict[str, Any]) -> None:
        content["indices"][0][-1] = value

    return change


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (swap_images, "was changed"),
        (lambda c: c["indices"][0].pop(), "was changed"),
        (lambda c: c.update(sha256="0" * 64), "was changed"),
        (lambda c: c.update(images=61), "was changed"),
        (lambda c: c.update(transforms=["grey"] * 4), "was changed"),
        (set_index(60), "outside"),
        (set_index(2**70), "whole numbers"),
        (set_index(59.5), "whole numbers"),
        (set_index("59"), "whole numbers"),
        (lambda c: c["indices"][1].clear(), "no image"),
        (lambda c: c["indices"].__setitem__(1, c["indices"][0]), "belongs to 2 clients"),
        (lambda c: c.update(indices=[]), "no client"),
        (lambda c: c.update(indices=3), "valid partition"),
        (lambda c: c.pop("sha256"), "KeyError"),
        (lambda c: c.pop("seed"), "KeyError"),
        (lambda c: c.update(format="other"), "format"),
    ],
)
def test_changed_files_are_refused(
    partition: Partition, tmp_path: Path, change: Any, problem: str
) -> None:
    file = tmp_path / "partition.json"
    partition.save(file)
    content = json.loads(file.read_text())
    change(content)
    file.write_text(json.dumps(content))
    with pytest.raises(PartitionError, match=problem) as caught:
        Partition.load(file)
    assert str(file) in str(caught.value)
    assert "split again" in str(caught.value)


def test_broken_files_are_refused(partition: Partition, tmp_path: Path) -> None:
    file = tmp_path / "partition.json"
    partition.save(file)
    whole = file.read_bytes()
    for length in (0, 1, len(whole) // 2, len(whole) - 1):
        file.write_bytes(whole[:length])
        with pytest.raises(PartitionError, match=r"cut short or damaged"):
            Partition.load(file)
    for text in (b"[]", b"3", b"null", b"{}"):
        file.write_bytes(text)
        with pytest.raises(PartitionError, match="does not hold a valid partition"):
            Partition.load(file)
    file.write_bytes(b"\xff\xfe")
    with pytest.raises(PartitionError, match="damaged"):
        Partition.load(file)
    with pytest.raises(PartitionError, match="Check the path"):
        Partition.load(tmp_path / "missing.json")
    with pytest.raises(PartitionError, match="Cannot write"):
        partition.save(file / "below a file")


def test_files_of_other_data_are_refused(partition: Partition, tmp_path: Path) -> None:
    partition.save(tmp_path / "p.json")
    with pytest.raises(PartitionError, match="divides 60 images, the data set has 59"):
        Partition.load(tmp_path / "p.json", images=59)


# Report ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at_once", [2**19, 400, 1])
def test_counting_in_parts_changes_nothing(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """All clients at once, twenty images at a time, client by client."""
    labels = voc_like(300)
    partition = PivotDirichlet().partition(labels, 40, 0)
    expected = split_report(labels, partition, 0)
    shares = label_shares(labels, partition)
    monkeypatch.setattr(split_reports, "_AT_ONCE", at_once)
    parts = list(client_positives(labels, partition.indices))
    assert len(parts) in {2**19: {1}, 400: range(15, 30), 1: {40}}[at_once]
    counts = np.stack([labels[index].sum(0) for index in partition.indices])
    assert np.array_equal(np.concatenate(parts), counts)
    assert split_report(labels, partition, 0) == expected
    assert np.array_equal(label_shares(labels, partition), shares)


def test_counts_of_all_clients_are_never_held_at_once() -> None:
    """20,000 clients with one image each and 400 labels: int64 counts of all would take 64 MB."""
    labels = np.zeros((20_000, 400), np.uint8)
    labels[np.arange(20_000), np.arange(20_000) % 400] = 1
    partition = Iid().partition(labels, 20_000, 0)
    tracemalloc.start()
    report, shares = split_report(labels, partition, 0), label_shares(labels, partition)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.absent_pairs == 20_000 * 399
    assert shares.shape == (400, 400)
    assert peak < 40e6


def test_label_shares_of_groups() -> None:
    """40 clients, largest first; in 7 groups of 5 or 6 neighbours each the mean of their shares."""
    labels = voc_like(300)
    partition = PivotDirichlet().partition(labels, 40, 0)
    order = np.argsort(-partition.sizes, kind="stable")
    each = np.stack([labels[partition.indices[k]].mean(0) for k in order])
    np.testing.assert_allclose(label_shares(labels, partition), each, rtol=1e-12)
    grouped = label_shares(labels, partition, most=7)
    bounds = [40 * i // 7 for i in range(8)]
    for group, (a, b) in enumerate(pairwise(bounds)):
        np.testing.assert_allclose(grouped[group], each[a:b].mean(0), rtol=1e-12)


def divergence(counts: Any) -> float | None:
    """Of clients with such numbers of images per class, one label each, and one without any."""
    images, indices = [], []
    for own in np.asarray(counts):
        first = len(images)
        images += [*np.repeat(np.eye(len(own), dtype=np.uint8), own, axis=0), np.zeros_like(own)]
        indices.append(np.arange(first, len(images)))
    return jensen_shannon(np.array(images, np.uint8), indices)


def test_jensen_shannon_by_hand() -> None:
    """One client has label 0 alone, the other both; together 3 : 1.

    P = (1, 0), Q = (¾, ¼), M = (⅞, ⅛): ½ ln(8/7) + ½ (¾ ln(6/7) + ¼ ln 2) = 0.095602.
    P = (½, ½), Q = (¾, ¼), M = (⅝, ⅜): ½ (½ ln(4/5) + ½ ln(4/3)) + ½ (¾ ln(6/5) + ¼ ln(2/3))
    = 0.033824. Their mean is 0.064713. A client without labels does not count.
    """
    assert divergence([[2, 0], [1, 1], [0, 0]]) == pytest.approx(0.064713, abs=1e-6)
    assert divergence([[2, 2], [1, 1]]) == pytest.approx(0, abs=1e-12)
    assert divergence([[0, 0, 0], [0, 0, 0]]) is None
    # Clients that share no label: each P is 1 on its own class, Q = 1/K everywhere.
    many = divergence(np.eye(1000, dtype=np.int64))
    assert many is not None
    assert 0.68 < many < np.log(2)


def test_drift_by_hand() -> None:
    """Two clients of 20 images and two labels: at one the labels agree, at the other they exclude.

    φ_k is 1 and −1; together each pair of values occurs ten times, so φ = 0 and the drift is 1. A
    third client has label 1 alone: no pair is defined there, and it does not count. Label 1 is then
    commoner: 20 of 60 against 40 of 60, both with 10: φ = (1/6 − 2/9) / (2/9) = −1/4, and the drift
    is the mean of 5/4 and 3/4.
    """
    agree = np.array([[1, 1], [0, 0]] * 10, np.uint8)
    exclude = np.array([[1, 0], [0, 1]] * 10, np.uint8)
    alone = np.array([[0, 1]] * 20, np.uint8)
    indices = [np.arange(20), np.arange(20, 40), np.arange(40, 60)]
    two, three = np.concatenate([agree, exclude]), np.concatenate([agree, exclude, alone])
    assert correlation_drift(two, indices[:2]) == (1.0, 2)
    drift, clients = correlation_drift(three, indices)
    assert drift == pytest.approx((5 / 4 + 3 / 4) / 2)
    assert clients == 2
    assert correlation_drift(agree, [np.arange(19)]) == (None, 0)


def test_drift_equals_a_plain_computation() -> None:
    labels = voc_like(1500)
    partition = PivotDirichlet(PivotDirichlet.Config(gamma=0.3)).partition(labels, 20, 0)
    labels[partition.indices[3], 14] = 1  # a label that all images of a client have
    rmse, off = [], ~np.eye(20, dtype=bool)
    with np.errstate(invalid="ignore", divide="ignore"):
        for index in partition.indices:
            error = np.asarray(np.corrcoef(labels[index].T) - np.corrcoef(labels.T))[off]
            if len(index) >= 20 and not np.isnan(error).all():
                rmse.append(np.sqrt(np.nanmean(error**2)))
    drift, clients = correlation_drift(labels, partition.indices)
    assert drift == pytest.approx(np.mean(rmse), abs=1e-12)
    assert clients == len(rmse) > 10


def test_drift_grows_with_skew_and_stands_above_the_noise() -> None:
    """On VOC-like labels and 50 clients of about 100 images; an IID client has noise of 1/√100."""
    labels = voc_like()

    def report(gamma: float) -> Any:
        splitter = PivotDirichlet(PivotDirichlet.Config(gamma=gamma))
        return split_report(labels, splitter.partition(labels, 50, 0), 0)

    iid = split_report(labels, Iid().partition(labels, 50, 0), 0)
    mild, strong = report(1.0), report(0.1)
    assert iid.correlation_drift == pytest.approx(0.1, abs=0.02)
    assert iid.correlation_drift == pytest.approx(iid.correlation_drift_iid, rel=0.03)
    assert strong.correlation_drift > mild.correlation_drift > 1.05 * mild.correlation_drift_iid
    assert strong.jensen_shannon > mild.jensen_shannon > iid.jensen_shannon
    assert strong.absent_pairs > mild.absent_pairs > iid.absent_pairs
    assert strong.labels_seen_mean < mild.labels_seen_mean < iid.labels_seen_mean


def test_report_by_hand() -> None:
    """Three clients of 3, 2 and 1 images see 2, 1 and 0 of 3 classes: 1 + 2 + 3 absent pairs."""
    labels = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 0], [0, 0, 1], [0, 0, 1], [0, 0, 0]], np.uint8)
    partition = Partition((np.arange(3), np.array([3, 4]), np.array([5])), 6)
    report = split_report(labels, partition, 0)
    found = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert found.pop("jensen_shannon") == pytest.approx(
        divergence([[2, 1, 0], [0, 0, 2], [0, 0, 0]])
    )
    assert found == {
        "clients": 3,
        "images": 6,
        "left_out": 0,
        "size_min": 1,
        "size_median": 2.0,
        "size_max": 3,
        "labels_seen_mean": 1.0,
        "labels_seen_min": 0,
        "absent_pairs": 6,
        "correlation_drift": None,
        "correlation_drift_iid": None,
        "drift_clients": 0,
        "sha256": partition.sha256,
    }


def test_report_ignores_images_without_an_owner() -> None:
    """The same numbers as for data that never had them, the noise floor included."""
    labels = voc_like(600)
    held = np.flatnonzero(np.arange(600) % 3 > 0)
    whole = PivotDirichlet(PivotDirichlet.Config(gamma=0.3)).partition(labels[held], 6, 0)
    among_others = Partition(tuple(held[index] for index in whole.indices), 600)
    expected = split_report(labels[held], whole, 0).as_dict()
    found = split_report(labels, among_others, 0).as_dict()
    assert (expected.pop("images"), expected.pop("left_out")) == (400, 0)
    assert (found.pop("images"), found.pop("left_out")) == (600, 200)
    assert expected.pop("sha256") != found.pop("sha256")
    assert found == expected
    assert found["correlation_drift"] > found["correlation_drift_iid"] > 0


def test_report_needs_the_labels_of_the_split(partition: Partition) -> None:
    with pytest.raises(PartitionError, match="divides 60 images"):
        split_report(voc_like(61), partition, 0)


def test_report_is_repeatable(partition: Partition) -> None:
    labels = np.tile(voc_like(60), (10, 1))
    split = Iid().partition(labels, 5, 0)
    assert split_report(labels, split, 1) == split_report(labels, split, 1)
    floors = {split_report(labels, split, seed).correlation_drift_iid for seed in (1, 2)}
    assert len(floors) == 2


@pytest.mark.parametrize("name", ALL)
def test_large_label_matrices_are_split_and_reported_as_arrays(name: str) -> None:
    """The size of COCO: 82,783 images, 80 classes, 50 clients. No step is one of every label."""
    rng = np.random.default_rng(0)
    labels = (rng.random((82_783, 80)) < 0.036).astype(np.uint8)
    users = rng.integers(50, size=len(labels))
    split, splitting = counted(lambda: splitters[name]().partition(labels, 50, 0, users))
    report, reporting = counted(lambda: split_report(labels, split, 0))
    assert report.clients == 50
    assert report.drift_clients >= 40
    assert splitting + reporting < 2 * len(labels)
