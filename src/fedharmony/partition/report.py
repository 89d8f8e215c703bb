"""What a split does to the labels of its clients, in a few numbers.

Two kinds of skew: the *marginal* one (which labels a client has) and the *joint* one (which labels
go together, the label correlation φ). A client's φ comes from few images, so most of its distance
to the global φ is sampling noise; the report therefore gives the same number for an IID split of
the same sizes, the noise floor.

Label counts of K clients are never held at once (51,414 clients and 1,628 labels: 670 MB), but made
a part at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from fedharmony.correlation import label_correlation
from fedharmony.partition.base import Partition
from fedharmony.rng import numpy_rng
from fedharmony.types import Index, Labels

Float64: TypeAlias = npt.NDArray[np.float64]

#: Clients with fewer images are left out of the correlation drift.
MIN_IMAGES = 20
#: Correlations are computed between this many labels at most, the most frequent ones.
MOST_PAIRED = 2000
# Entries of the label matrix counted at a time.
_AT_ONCE = 2**19


@dataclass(frozen=True)
class SplitReport:
    """The realised skew of a split.

    Attributes:
        left_out: Images that no client holds; the other numbers are about those that one does.
        labels_seen_mean: Mean number of classes with a positive image at a client.
        absent_pairs: (client, class) pairs without a positive image.
        jensen_shannon: Mean Jensen–Shannon divergence, in nats (at most ln 2), of the clients'
            label distributions to the global one; see :func:`jensen_shannon`. None without labels.
        correlation_drift: Mean over clients with n_k >= 20 of the off-diagonal RMSE between their φ
            and the global φ; see :func:`correlation_drift`. None when no client is large enough.
        correlation_drift_iid: The same for a random split of the same sizes, the noise floor.
        drift_clients: The number of clients in ``correlation_drift``.
    """

    clients: int
    images: int
    left_out: int
    size_min: int
    size_median: float
    size_max: int
    labels_seen_mean: float
    labels_seen_min: int
    absent_pairs: int
    jensen_shannon: float | None
    correlation_drift: float | None
    correlation_drift_iid: float | None
    drift_clients: int
    sha256: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON."""
        return asdict(self)


def split_report(labels: Labels, partition: Partition, seed: int) -> SplitReport:
    """Measure a split of ``labels``; ``seed`` is that of the IID split that gives the noise floor.

    >>> labels = np.array([[1, 0], [1, 0], [0, 1], [0, 1]], np.uint8)
    >>> report = split_report(labels, Partition((np.array([0, 1]), np.array([2, 3])), 4), seed=0)
    >>> report.labels_seen_mean, report.absent_pairs, round(report.jensen_shannon, 4)
    (1.0, 2, 0.2158)
    """
    partition.refuse_other(labels)
    sizes, classes = partition.sizes, labels.shape[1]
    seen = np.concatenate([(p > 0).sum(1) for p in client_positives(labels, partition.indices)])
    held = np.sort(np.concatenate(partition.indices))
    iid = np.split(numpy_rng(seed, "split_report/iid").permutation(held), np.cumsum(sizes)[:-1])
    paired = labels[:, paired_labels(labels)] if classes > MOST_PAIRED else labels
    overall = _overall(paired, held)
    drift, drift_clients = correlation_drift(paired, partition.indices, overall)
    return SplitReport(
        clients=len(sizes),
        images=partition.images,
        left_out=partition.images - len(held),
        size_min=int(sizes.min()),
        size_median=float(np.median(sizes)),
        size_max=int(sizes.max()),
        labels_seen_mean=float(seen.mean()),
        labels_seen_min=int(seen.min()),
        absent_pairs=len(seen) * classes - int(seen.sum()),
        jensen_shannon=jensen_shannon(labels, partition.indices),
        correlation_drift=drift,
        correlation_drift_iid=correlation_drift(paired, iid, overall)[0],
        drift_clients=drift_clients,
        sha256=partition.sha256,
    )


def paired_labels(labels: Labels) -> Index:
    """The labels whose correlations are computed and shown, ascending: at most MOST_PAIRED.

    Pairs grow with the square of the labels: those of 11,200 take a gigabyte for each matrix. Of
    more labels the most frequent are taken, of equally frequent ones the first.

    >>> paired_labels(np.eye(3, dtype=np.uint8)).tolist()
    [0, 1, 2]
    """
    if labels.shape[1] <= MOST_PAIRED:
        return np.arange(labels.shape[1])
    positives = labels.sum(0, dtype=np.int64)
    return np.sort(np.argsort(-positives, kind="stable")[:MOST_PAIRED])


def client_positives(labels: Labels, indices: Sequence[Index]) -> Iterator[Index]:
    """Positive images per client and class, int64 (some clients, C), part by part in client order.

    >>> labels = np.array([[1, 0], [1, 1], [0, 1]], np.uint8)
    >>> np.concatenate(list(client_positives(labels, [np.array([0, 1]), np.array([2])]))).tolist()
    [[2, 1], [0, 1]]
    """
    ends = np.cumsum([len(index) for index in indices])
    images, first, done = max(1, _AT_ONCE // max(1, labels.shape[1])), 0, 0
    while first < len(ends):
        last = max(first + 1, int(np.searchsorted(ends, done + images, side="right")))
        starts = np.concatenate(([0], ends[first : last - 1] - done))
        own = labels[np.concatenate(indices[first:last])]
        yield np.add.reduceat(own, starts, axis=0, dtype=np.int64)
        first, done = last, ends[last - 1]


def label_shares(labels: Labels, partition: Partition, most: int = 400) -> Float64:
    """Share of a client's images that carry each label, for at most ``most`` groups of clients.

    Clients stand in order of their number of images, the largest first. More than ``most`` clients
    are grouped with their neighbours, in groups of (nearly) equal number, and each group gets the
    mean of its shares: float64 ``(min(K, most), C)``, as much as a picture can show.

    >>> labels = np.array([[1, 0], [1, 1], [0, 1]], np.uint8)
    >>> two = Partition((np.array([2]), np.array([0, 1])), 3)
    >>> label_shares(labels, two).tolist(), label_shares(labels, two, most=1).tolist()
    ([[1.0, 0.5], [0.0, 1.0]], [[0.5, 0.75]])
    """
    sizes = partition.sizes
    order = np.argsort(-sizes, kind="stable")
    groups = min(len(sizes), most)
    ends = len(sizes) * np.arange(1, groups + 1) // groups
    shares = np.empty((groups, labels.shape[1]))
    for group, members in enumerate(np.split(order, ends[:-1])):
        own = client_positives(labels, [partition.indices[k] for k in members])
        shares[group] = (np.concatenate(list(own)) / sizes[members, None]).mean(0)
    return shares


def jensen_shannon(labels: Labels, indices: Sequence[Index]) -> float | None:
    """Mean Jensen–Shannon divergence of client label distributions to the global one, in nats.

    A client's label distribution P is its share of positives per class (it sums to one over the
    classes), Q that of all clients together, M = (P + Q) / 2:
    JS = ½ Σ P ln(P / M) + ½ Σ Q ln(Q / M). Clients without any label have no distribution and are
    left out.

    >>> labels = np.array([[1, 0], [0, 1]], np.uint8)
    >>> clients = [np.array([0]), np.array([1])]
    >>> round(jensen_shannon(labels, clients), 4)   # ¾ ln 4/3, from (1, 0) to (½, ½)
    0.2158
    """
    pool = np.zeros(labels.shape[1], np.int64)
    for positives in client_positives(labels, indices):
        pool += positives.sum(0)
    if not pool.any():
        return None
    overall, found = pool / pool.sum(), []
    for positives in client_positives(labels, indices):
        totals = positives.sum(1)
        found.append(_divergences(positives[totals > 0] / totals[totals > 0, None], overall))
    return float(np.concatenate(found).mean() / 2)


def _divergences(client: Float64, overall: Float64) -> Float64:
    """Twice the Jensen–Shannon divergence of distributions ``(K, C)`` to another, ``(K,)``."""
    mixed = (client + overall) / 2

    def relative_entropy(p: Float64) -> Float64:
        """Σ p ln(p / mixed), with 0 ln 0 = 0."""
        ratio = np.divide(p, mixed, out=np.ones_like(mixed), where=p > 0)
        return np.asarray((p * np.log(ratio)).sum(1))

    return relative_entropy(client) + relative_entropy(np.broadcast_to(overall, client.shape))


def correlation_drift(
    labels: Labels, indices: Sequence[Index], overall: Float64 | None = None
) -> tuple[float | None, int]:
    """Mean over clients of √(mean over pairs c ≠ c' of (φ_k(c, c') − φ(c, c'))²), and their number.

    φ is that of all these clients' images together. A pair counts at a client where both of its
    labels vary; elsewhere φ_k is undefined. (With 0 in its place a client of one label, with
    nothing but zeros, would seem closer to the global φ than the noise of an IID client.) Clients
    count when n_k >= 20 and at least one pair is defined; None when there are no such clients.
    ``overall`` is φ of all these images ``(C, C)``, where it is known already.
    """
    if overall is None:
        overall = _overall(labels, np.concatenate(indices))
    rmse = []
    for index in indices:
        if len(index) < MIN_IMAGES:
            continue
        own = labels[index]
        positives = own.sum(0, dtype=np.int64)
        # Only labels that vary: of a thousand and more classes a client sees few.
        varies = np.flatnonzero((positives > 0) & (positives < len(own)))
        if len(varies) > 1:
            error = label_correlation(own[:, varies])[0].numpy() - overall[np.ix_(varies, varies)]
            rmse.append(np.sqrt(np.mean(error[~np.eye(len(varies), dtype=bool)] ** 2)))
    return (float(np.mean(rmse)) if rmse else None), len(rmse)


def _overall(labels: Labels, held: Index) -> Float64:
    """φ of the images that clients hold, each of them once."""
    # Their order does not matter, so all images need no copy.
    return label_correlation(labels if len(held) == len(labels) else labels[held])[0].numpy()
