"""What a run gives: the global model on the test set, matrices for the report, the results file."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedharmony.data.base import Images, LabelledImages
from fedharmony.experiments.build import Assembly
from fedharmony.experiments.folder import jsonable
from fedharmony.experiments.scorer import Scorer
from fedharmony.metrics import (
    ClientsResult,
    MultiLabelResult,
    StructureResult,
    best_thresholds,
    evaluate_clients,
    structure_metrics,
    trivial_baselines,
)
from fedharmony.metrics import evaluate as metrics_of
from fedharmony.partition.report import label_shares, paired_labels
from fedharmony.records import digest
from fedharmony.server.federation import Event
from fedharmony.types import BUFFERS, PARAMS, Index, Labels, Record, Tensors

Results = dict[str, Any]
#: Test users times labels up to which each user's metrics are computed: a minute or so.
MOST_USER_LABELS = 200_000


@dataclass(frozen=True)
class Evaluation:
    """The global model on a test set, and what it is worth.

    Scores are none where the test images are elsewhere. ``users`` has the metrics of each owner or
    site, with ``names``; ``how`` says what is worth knowing of how it was measured.
    """

    labels: Labels
    known: npt.NDArray[np.bool_] | None
    metrics: MultiLabelResult
    structure: StructureResult
    scores: npt.NDArray[np.float32] | None = None
    users: ClientsResult | None = None
    names: Sequence[str] = ()
    how: Mapping[str, Any] = field(default_factory=dict)

    def structure_numbers(self) -> dict[str, Any]:
        """The correlation-structure metrics without their matrices."""
        found = asdict(self.structure)
        return {name: value for name, value in found.items() if not name.endswith("_matrix")}

    def event(self, round: int, seconds: float) -> Event:
        """As one JSON line."""
        return {
            "event": "evaluate",
            "round": round,
            "seconds": seconds,
            "metrics": self.metrics.as_dict(),
            "structure": self.structure_numbers(),
            **self.how,
        }


class Judge(Protocol):
    """Measures global models, perhaps elsewhere, and perhaps not at once."""

    def __call__(
        self, round: int, state: Record, due: bool, last: bool
    ) -> Iterable[tuple[int, Evaluation]]:
        """After a round: what has been measured since, with the round each model is of.

        The model of this round is to be measured if it is ``due``; the ``last`` one at once.
        """


def score(assembly: Assembly, state: Record, images: Images) -> npt.NDArray[np.float32]:
    """What the (averaged) global model says of images: (N, C)."""
    plan = assembly.blueprint
    scorer = Scorer(plan.model, plan.method, plan.average.shown(state))
    return scorer.all(images, assembly.device)


def evaluate(assembly: Assembly, state: Record, by_user: bool = False) -> Evaluation:
    """Evaluate the (averaged) global model on the pooled test set; on request user by user too."""
    test, options = assembly.data.test, assembly.settings.metrics
    every, targets, known = score(assembly, state, test.images), test.labels, test.known
    scores, metrics = every, metrics_of(every, targets, options, known)
    users, names = None, list[str]()
    if by_user and (parts := owners(test)) is not None:
        users = evaluate_clients(scores, targets, parts, options, known)
        names = [str(name) for name in np.unique(np.asarray(test.users)).tolist()]
    paired = paired_labels(test.labels)
    if len(paired) < targets.shape[1]:
        scores, targets = scores[:, paired], targets[:, paired]
        known = None if known is None else known[:, paired]
    structure = structure_metrics(scores, targets, options.threshold, known)
    return Evaluation(test.labels, test.known, metrics, structure, every, users, names)


def judge_here(assembly: Assembly) -> Judge:
    """Measures models on the test images that are here, at once; the last one user by user too."""

    def judge(round: int, state: Record, due: bool, last: bool) -> Iterable[tuple[int, Evaluation]]:
        return [(round, evaluate(assembly, state, by_user=last))] if due else []

    return judge


def thresholds(assembly: Assembly, state: Record, evaluation: Evaluation) -> Results | None:
    """Each label's best threshold on the images held out for that, and what they are worth.

    None where no images were held out. The metrics are those of the test set that depend on a
    threshold.
    """
    part = assembly.for_thresholds
    if part is None or evaluation.scores is None:
        return None
    options, test = assembly.settings.metrics, assembly.data.test
    scores = score(assembly, state, part.images)
    best = best_thresholds(scores, part.labels, options.threshold, part.known)
    predicted = (evaluation.scores >= best).astype(np.float32)
    found = metrics_of(predicted, test.labels, replace(options, threshold=0.5), test.known)
    ranks = ("mAP", "O-mAP")  # of scores, which thresholds do not change
    return {
        "images": len(part),
        "per_label": best,
        "positives": _positives(part),
        "metrics": {name: v for name, v in found.as_dict().items() if name not in ranks},
    }


def owners(test: LabelledImages) -> list[Index] | None:
    """The test images of each user; None without users, or with too many to look at one by one."""
    if test.users is None:
        return None
    names, user = np.unique(test.users, return_inverse=True)
    if len(names) * test.labels.shape[1] > MOST_USER_LABELS:
        return None
    order = np.argsort(user, kind="stable")
    return np.split(order, np.cumsum(np.bincount(user))[:-1])


def per_user(names: Sequence[str], found: ClientsResult) -> Results:
    """The metrics of each test user by itself, and their mean.

    Each user's number is O-mAP, which is defined for everybody with a positive label.
    """
    return {
        "users": len(names),
        "mean": found.mean,
        "each": [
            {"user": name, "images": result.n_images, "O-mAP": result.o_map}
            for name, result in zip(names, found.per_client, strict=True)
        ],
    }


def matrices(assembly: Assembly, state: Record, evaluation: Evaluation) -> Tensors:
    """Correlation matrices and label shares for the report; of very many labels, of some."""
    structure, classes = evaluation.structure, len(assembly.data.classes)
    paired = paired_labels(evaluation.labels)
    tensors = {
        "true": torch.from_numpy(structure.true_matrix).float(),
        "true_defined": torch.from_numpy(structure.defined_matrix.diagonal().astype(np.uint8)),
        "learned": torch.from_numpy(structure.soft_matrix).float(),
        "learned_hard": torch.from_numpy(structure.hard_matrix).float(),
    }
    settings = assembly.settings
    if assembly.clients and not (settings.federation.central or settings.privacy.active):
        shares = label_shares(assembly.loaded.train.labels, assembly.partition)
        tensors["client_label_shares"] = torch.from_numpy(shares)  # of groups, if there are many
        tensors["client_sizes"] = torch.from_numpy(assembly.partition.sizes)
    if assembly.data.planted is not None:
        tensors["planted"] = torch.from_numpy(assembly.data.planted).float()
    for name, tensor in assembly.blueprint.method.artifacts(state).items():
        tensors[name] = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    if len(paired) < classes:
        index = torch.from_numpy(paired)
        for name, tensor in tensors.items():
            if name in ("true", "true_defined", "learned", "learned_hard"):
                continue  # of these labels already
            first = 1 if name.startswith("client_") else 0  # the first axis is of clients
            axes = [a for a, n in enumerate(tensor.shape) if n == classes and a >= first]
            for axis in axes:
                tensor = tensor.index_select(axis, index.to(tensor.device))
            tensors[name] = tensor
        tensors["labels"] = index
    return tensors


def _positives(part: LabelledImages | Evaluation) -> npt.NDArray[np.int64]:
    """Images on which each label is known and present."""
    present = part.labels if part.known is None else part.labels * part.known
    counts: npt.NDArray[np.int64] = present.sum(axis=0, dtype=np.int64)
    return counts


def _padding(rounds: Sequence[Event]) -> float | None:
    """Share of the rows computed in training that held no image, if any were counted."""
    counted = [e for e in rounds if e.get("padding") is not None]
    rows = sum(e["images"] / (1 - e["padding"]) for e in counted)
    return 1 - sum(e["images"] for e in rounds) / rows if rows else None


def summarise(
    assembly: Assembly,
    state: Record,
    evaluation: Evaluation,
    events: Sequence[Event],
    privacy: Results | None = None,
) -> Results:
    """The results file: metrics beside what trivial predictors reach, cost, and identities.

    ``events`` are those of the whole run; ``privacy`` is what its ledger says.
    """
    settings, data, found = assembly.settings, assembly.data, evaluation.metrics
    plan = assembly.blueprint
    prevalence = None  # where the training labels are elsewhere, or private: that of the test set
    if len(data.train) and not settings.privacy.active:
        known = data.train.known
        counted = len(data.train) if known is None else known.sum(axis=0)
        prevalence = _positives(data.train) / np.maximum(counted, 1)
    trivial = trivial_baselines(evaluation.labels, settings.metrics, prevalence, evaluation.known)
    rounds = [e for e in events if e["event"] == "round"]
    positives, users = _positives(evaluation), evaluation.users
    results = {
        "method": settings.method_name,
        "label": settings.label,
        "status": "completed",
        "seed": settings.run.seed,
        "rounds": plan.rounds,
        "rounds_done": len(rounds),
        "privacy": privacy,
        "metrics": found.as_dict(),
        "structure": evaluation.structure_numbers(),
        "per_user": None if users is None else per_user(evaluation.names, users),
        "per_label": [
            {"label": name, "ap": ap, "precision": p, "recall": r, "positives": int(n)}
            for name, ap, p, r, n in zip(
                data.classes,
                found.per_label_ap,
                found.per_label_precision,
                found.per_label_recall,
                positives,
                strict=True,
            )
        ],
        "thresholds": thresholds(assembly, state, evaluation),
        "baselines": {name: result.as_dict() for name, result in trivial.items()},
        "n_classes_with_positives": found.n_classes_with_positives,
        "n_classes_never_predicted": found.n_classes_never_predicted,
        "seconds": sum(e["seconds"] for e in rounds),
        "padding": _padding(rounds),
        "clients_lost": sum(f["cause"] == "failed" for e in rounds for f in e["left_out"]),
        "fallbacks": dict(sum((Counter(e.get("fallbacks")) for e in rounds), Counter[str]())),
        "bytes_up": sum(e["bytes_up"] for e in rounds),
        "bytes_down": sum(e["bytes_down"] for e in rounds),
        "parameters_sha256": digest(Record({g: state.get(g) for g in (PARAMS, BUFFERS)})),
        "state_sha256": digest(Record(state.groups)),
        "config_sha256": settings.sha256(),
        "partition_sha256": assembly.partition.sha256,
        "bound": assembly.bound,
        "metric_options": asdict(settings.metrics),
        **evaluation.how,
    }
    plain: Results = jsonable(results)
    return plain
