"""How many label sets of a small client can be read off what it sends?

A client that tells n_k, and R_k and p̂_k of its *labels* (FedHarmony: ``cold_start = "labels"``),
tells how many of its images have each label and each pair of labels: Eq. (2) is solved for them.
:func:`label_sets` then looks for all collections of n_k label sets with these counts. What is in
every one of them is known for certain.

R_k of *scores*, which clients send otherwise, is only near to that; a sum over clients mixes them;
noise hides the counts. All of this is tried here, on clients with a few images of the built-in
data, and on the replies of a run whose clients have few::

    python benchmarks/reconstruction.py --sizes 2,4,8,16 --clients 20 --epochs 5,50
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedharmony.consensus import CORRELATION
from fedharmony.correlation import Correlation, mean_moments, pack_upper, unpack_upper
from fedharmony.data.digits import Digits
from fedharmony.engine.memory import ClientMemory
from fedharmony.experiments.build import assemble
from fedharmony.experiments.settings import load_settings
from fedharmony.losses import Batch

Counts = npt.NDArray[np.int64]
LabelSet = frozenset[int]
#: A search ends after so many solutions, or so many steps.
MOST, STEPS = 200, 200_000


def told(scores: Tensor) -> tuple[Tensor, Tensor]:
    """R_k (upper triangle, float32) and p̂_k of scores or labels (n, C), as a client sends them."""
    kind = Correlation(scores.shape[1], False)
    rows = torch.ones(len(scores))
    batch = Batch(scores, rows, rows.unsqueeze(-1).expand_as(scores))
    moments = mean_moments(kind.sums(scores.double(), batch), rows.sum())
    return pack_upper(kind.matrix(moments)).float().clamp(-1, 1), moments.marginal.float()


def counts(upper: Tensor, marginal: Tensor, images: int, clamp: float = 1e-4) -> Counts:
    """Images with both labels of each pair, (C, C): Eq. (2) solved for n p̂_cc', and rounded.

    >>> labels = torch.tensor([[1.0, 1.0], [1.0, 0.0], [0.0, 0.0]])
    >>> counts(*told(labels), 3).tolist()
    [[2, 1], [1, 1]]
    """
    p = marginal.double()
    bounded = p.clamp(clamp, 1 - clamp)
    deviation = (bounded * (1 - bounded)).sqrt()
    joint = unpack_upper(upper.double(), len(p)) * (deviation[:, None] * deviation + 1e-6)
    joint = images * (joint + p[:, None] * p)
    joint.diagonal().copy_(images * p)
    return joint.round().long().numpy()


def label_sets(
    pairs: Counts, images: int, most: int = MOST
) -> tuple[list[Counter[LabelSet]], bool]:
    """All collections of so many label sets with these counts, and whether all were found.

    Label by label, each group of images that are alike so far is divided into those with the label
    and those without, such that the counts of the label, and of its pairs with earlier ones, hold.

    >>> found, all_of_them = label_sets(np.array([[2, 1], [1, 1]]), 3)
    >>> [sorted(map(sorted, sets.elements())) for sets in found], all_of_them
    ([[[], [0], [0, 1]]], True)
    """
    order = np.argsort(-pairs.diagonal(), kind="stable")
    solutions: list[Counter[LabelSet]] = []
    left = [STEPS]

    def divide(
        label: int, groups: Sequence[tuple[LabelSet, int]], place: int
    ) -> Iterator[list[int]]:
        """How many images of each group have the label."""
        earlier = [int(c) for c in order[:place]]
        need = np.array([pairs[label, label], *(pairs[label, c] for c in earlier)])
        has = np.array([[1, *(c in labels for c in earlier)] for labels, _ in groups])
        room = np.array([size for _, size in groups])
        # What the groups from each one on can still give.
        reach = np.cumsum((has * room[:, None])[::-1], 0)[::-1]

        def take(group: int, need: Counts, chosen: list[int]) -> Iterator[list[int]]:
            left[0] -= 1
            if left[0] < 0 or (need < 0).any():
                return
            if group == len(groups):
                if not need.any():
                    yield list(chosen)
                return
            if (need > reach[group]).any():
                return
            for number in range(int(room[group]), -1, -1):
                yield from take(group + 1, need - number * has[group], [*chosen, number])

        yield from take(0, need, [])

    def extend(place: int, groups: Sequence[tuple[LabelSet, int]]) -> None:
        if len(solutions) >= most or left[0] < 0:
            return
        if place == len(order):
            solutions.append(Counter(dict(groups)))
            return
        label = int(order[place])
        for chosen in divide(label, groups, place):
            divided = []
            for (labels, size), number in zip(groups, chosen, strict=True):
                divided += [(labels | {label}, number)] if number else []
                divided += [(labels, size - number)] if size > number else []
            extend(place + 1, divided)
            if len(solutions) >= most or left[0] < 0:
                return

    extend(0, [(frozenset(), images)])
    return solutions, len(solutions) < most and left[0] >= 0


def certain(solutions: Sequence[Counter[LabelSet]]) -> Counter[LabelSet]:
    """Label sets that are in every solution."""
    if not solutions:
        return Counter()
    common = solutions[0]
    for other in solutions[1:]:
        common = common & other
    return common


def recovered(pairs: Counts, truth: npt.NDArray[np.uint8]) -> dict[str, float]:
    """What a search in counts finds of the label sets behind them.

    ``known`` is the share of them that is certain; ``guessed`` that of the first solution which is
    right; both are 0 where the search ends without a solution.
    """
    sets = Counter(frozenset(np.flatnonzero(row).tolist()) for row in truth)
    solutions, complete = label_sets(pairs, len(truth))
    known = certain(solutions) & sets if complete else Counter[LabelSet]()
    guessed = solutions[0] & sets if solutions else Counter[LabelSet]()
    exact = truth.T.astype(np.int64) @ truth
    return {
        "known": known.total() / len(truth),
        "guessed": guessed.total() / len(truth),
        "solutions": float(len(solutions)),
        "unique": float(complete and len(solutions) == 1),
        "counts_right": float((pairs == exact).mean()),
    }


def soft(labels: Tensor, error: float, generator: torch.Generator) -> Tensor:
    """Scores that are off by ``error`` on average: |score − label| is uniform, up to twice that."""
    off = 2 * error * torch.rand(labels.shape, generator=generator)
    return (labels - off).abs()


def measure(sizes: Sequence[int], clients: int, seed: int = 0) -> list[dict[str, Any]]:
    """What labels, scores, sums and noisy counts of clients with so many images give away."""
    data = Digits(Digits.Config()).load().train.labels
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    rows = []
    for size in sizes:
        ways: dict[str, list[dict[str, float]]] = {}
        for _ in range(clients):
            drawn = [data[rng.choice(len(data), size, replace=False)] for _ in range(3)]
            truth, labels = drawn[0], torch.from_numpy(drawn[0]).float()
            exact = truth.T.astype(np.int64) @ truth
            tried = {"R_k of labels": (counts(*told(labels), size), truth)}
            for error in (0.01, 0.05, 0.2):
                scores = soft(labels, error, generator)
                name = f"R_k of scores, off by {error:g}"
                tried[name] = (counts(*told(scores), size), truth)
            three = np.concatenate(drawn)
            tried["sum of 3 clients"] = (three.T.astype(np.int64) @ three, three)
            for deviation in (0.3, 1.0):
                noise = np.triu(rng.normal(0, deviation, exact.shape))
                noisy = (exact + noise + np.triu(noise, 1).T).round().astype(np.int64)
                tried[f"counts + noise {deviation:g}"] = (noisy.clip(0), truth)
            for name, (pairs, behind) in tried.items():
                ways.setdefault(name, []).append(recovered(pairs, behind))
        for name, found in ways.items():
            mean = {key: float(np.mean([one[key] for one in found])) for key in found[0]}
            rows.append({"images": size, "attacker sees": name, "clients": clients, **mean})
    return rows


def trained(epochs: int, changes: Sequence[str] = ()) -> list[dict[str, Any]]:
    """What the replies of a run give away: 60 clients with 10 images each, R_k as in Eq. (2)."""
    own = ["data.train=600", "split.name=iid", "split.clients=60", "run.rounds=3"]
    own += [f"train.epochs={epochs}", "engine.threads=1", "run.method=fedharmony"]
    plain = ["normaliser=phi", "shrinkage=0", "measured=after"]
    own += [f"methods.fedharmony.{change}" for change in plain]
    settings = load_settings("demo", [*own, *changes])
    assembly = assemble(settings)
    federation = assembly.federation(ClientMemory())
    labels, found = assembly.data.train.labels, []
    exchange = federation.transport.exchange

    def overheard(stage: Any, round: int, messages: Any) -> Iterator[Any]:
        for answer in exchange(stage, round, messages):
            if round == settings.run.rounds - 1:
                own = answer.record.get(CORRELATION)
                truth = labels[assembly.clients[answer.client]]
                pairs = counts(own["upper"], own["marginal"], answer.examples)
                found.append(recovered(pairs, truth))
            yield answer

    object.__setattr__(federation.transport, "exchange", overheard)
    federation.run(assembly.initial_state(), 0, lambda event: None, lambda t, state: None)
    mean = {key: float(np.mean([one[key] for one in found])) for key in found[0]}
    name = f"R_k of a run, {epochs} epochs a round"
    return [{"images": 10, "attacker sees": name, "clients": len(found), **mean}]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", default="2,4,8,16")
    parser.add_argument("--clients", type=int, default=20)
    parser.add_argument("--epochs", default="5,50")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rows = measure([int(size) for size in options.sizes.split(",")], options.clients)
    for epochs in filter(None, options.epochs.split(",")):
        rows += trained(int(epochs))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "reconstruction.json").write_text(json.dumps(rows, indent=1) + "\n")
    for row in rows:
        print(
            f"{row['images']:3d} images, {row['attacker sees']:30s} certain {row['known']:6.1%}  "
            f"guessed {row['guessed']:6.1%}  unique {row['unique']:5.1%}  counts right "
            f"{row['counts_right']:.1%}"
        )


if __name__ == "__main__":
    main()
