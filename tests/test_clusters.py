"""Algorithm 1: label clusters, on a CPU and where it has none of its libraries."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from fedharmony.clusters import (
    _spectral_embedding,
    cluster_agreement,
    spectral_clusters,
)
from fedharmony.errors import ConfigError, DataError

F64 = torch.float64


def draw(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0), dtype=F64)


def planted(sizes: list[int], seed: int, noise: float = 0.05) -> tuple[Tensor, Tensor]:
    """A noisy block matrix with signs, labels in random order, and the block of each label."""
    generator = torch.Generator().manual_seed(seed)
    blocks = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    blocks = blocks[torch.randperm(len(blocks), generator=generator)]
    sign = torch.where(torch.rand(len(blocks), generator=generator) < 0.5, -1.0, 1.0)
    inside = (blocks[:, None] == blocks[None, :]).float() * torch.outer(sign, sign)
    matrix = 0.6 * inside + noise * torch.randn(inside.shape, generator=generator)
    return (matrix + matrix.T) / 2, blocks


@pytest.mark.parametrize("seed", range(4))
def test_planted_blocks_are_found(seed):
    matrix, blocks = planted([3, 5, 4, 8], seed)
    clusters = spectral_clusters(matrix, 4, seed)
    assert cluster_agreement(clusters, blocks) == 1
    assert clusters.dtype == torch.int64
    # Ids count up in order of first appearance.
    first_seen = [clusters.tolist().index(g) for g in range(4)]
    assert first_seen == sorted(first_seen)


def test_clusters_follow_a_permutation_of_the_labels():
    matrix, _ = planted([4, 5, 6], 3, noise=0.02)
    order = torch.randperm(15, generator=torch.Generator().manual_seed(1))
    clusters = spectral_clusters(matrix, 3, 0)
    assert cluster_agreement(spectral_clusters(matrix[order][:, order], 3, 0), clusters[order]) == 1


def test_same_seed_same_clusters():
    noise = draw(60, 60) - 0.5
    one, two = (spectral_clusters(noise, 8, 5) for _ in range(2))
    assert torch.equal(one, two)
    others = [spectral_clusters(noise, 8, seed, n_init=1) for seed in range(6)]
    assert any(not torch.equal(others[0], other) for other in others)  # the seed does reach k-means


def test_clusters_of_80_weak_blocks_do_not_depend_on_the_seed():
    """Ten restarts find seven different clusterings of these, for twenty seeds."""
    blocks = torch.repeat_interleave(torch.arange(9), torch.tensor([9] * 8 + [8]))
    noise = torch.randn(80, 80, generator=torch.Generator().manual_seed(0))
    matrix = 0.2 * (blocks[:, None] == blocks).float() + 0.15 * noise
    matrix = (matrix + matrix.T) / 2
    assert len({tuple(spectral_clusters(matrix, 9, seed).tolist()) for seed in range(20)}) == 1
    few = {tuple(spectral_clusters(matrix, 9, seed, n_init=10).tolist()) for seed in range(20)}
    assert len(few) > 1


def test_isolated_labels_are_in_no_cluster():
    matrix = torch.block_diag(torch.ones(3, 3), torch.eye(2), torch.ones(2, 2))
    assert spectral_clusters(matrix, 2, 0).tolist() == [0, 0, 0, -1, -1, 1, 1]
    assert spectral_clusters(matrix, 1, 0).tolist() == [0, 0, 0, -1, -1, 0, 0]
    assert spectral_clusters(matrix, 5, 0).tolist() == [0, 1, 2, -1, -1, 3, 4]
    assert spectral_clusters(matrix, 50, 0).tolist() == [0, 1, 2, -1, -1, 3, 4]
    assert spectral_clusters(torch.eye(3), 2, 0).tolist() == [-1, -1, -1]
    assert spectral_clusters(torch.ones(1, 1), 1, 0).tolist() == [-1]


def test_embedding_follows_algorithm_1():
    """Against the eigenvectors of L as printed; products of rows do not depend on their signs."""
    affinity = np.triu(draw(9, 9).numpy(), 1)
    affinity += affinity.T
    degree = np.diag(affinity.sum(1))
    root = np.diag(np.diag(degree) ** -0.5)
    _, vectors = np.linalg.eigh(root @ (degree - affinity) @ root)
    vectors = vectors[:, :3] / np.linalg.norm(vectors[:, :3], axis=1)[:, None]
    rows = _spectral_embedding(affinity, 3)
    np.testing.assert_allclose(rows @ rows.T, vectors @ vectors.T, rtol=0, atol=1e-12)
    assert (rows.max(0) > 0).all()


def test_affinity_is_symmetric_and_ignores_signs():
    matrix, blocks = planted([4, 5, 6], 2)
    clusters = spectral_clusters(matrix, 3, 0)
    for variant in (matrix.triu() * 2, matrix.tril() * 2, matrix.abs(), -matrix):
        assert torch.equal(spectral_clusters(variant, 3, 0), clusters)
    assert cluster_agreement(clusters, blocks) == 1


def test_coinciding_rows_leave_no_gap_and_no_warning(monkeypatch):
    """Three distinct rows for five groups: k-means warns and numbers clusters with gaps."""
    rows = np.repeat(np.eye(3), 4, axis=0)
    monkeypatch.setattr("fedharmony.clusters._spectral_embedding", lambda affinity, groups: rows)
    clusters = spectral_clusters(torch.ones(12, 12), 5, 0)
    assert clusters.tolist() == [0] * 4 + [1] * 4 + [2] * 4


def test_more_groups_than_blocks_split_blocks_only():
    matrix = torch.block_diag(torch.ones(6, 6), torch.ones(6, 6))
    clusters = spectral_clusters(matrix, 4, 0)
    assert set(clusters.tolist()) == set(range(4))
    assert not set(clusters[:6].tolist()) & set(clusters[6:].tolist())


def test_clusters_of_many_labels():
    matrix, blocks = planted([40] * 40 + [28], 0, noise=0.05)
    assert len(blocks) == 1628
    assert cluster_agreement(spectral_clusters(matrix, 41, 0, n_init=3), blocks) > 0.9


def test_clustering_refuses_what_it_cannot_do():
    with pytest.raises(ConfigError, match="at least 1"):
        spectral_clusters(torch.eye(2), 0, 0)
    with pytest.raises(DataError, match="not finite"):
        spectral_clusters(torch.full((2, 2), math.nan), 1, 0)


def test_agreement_counts_isolated_labels_one_by_one():
    """Of 4 labels, {0,1} together in both; −1, −1 are two singletons, so (a) differs from {2,3}."""
    single, pair = torch.tensor([0, 0, -1, -1]), torch.tensor([0, 0, 1, 1])
    assert cluster_agreement(single, single) == 1
    assert cluster_agreement(single, torch.tensor([0, 0, 1, 2])) == 1
    assert cluster_agreement(single, pair) < 1
    assert cluster_agreement(torch.full((3,), -1), torch.arange(3)) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("labels", [20, 80, 400])
def test_a_matrix_has_the_same_clusters_on_every_device(labels):
    matrix = draw(labels, labels)
    here = spectral_clusters(matrix, 4, seed=0)
    there = spectral_clusters(matrix.cuda(), 4, seed=0)
    assert there.device.type == "cuda"
    assert torch.equal(here, there.cpu())
