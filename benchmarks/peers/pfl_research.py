"""The same under Apple's pfl-research."""

from __future__ import annotations

import sys
import time
from itertools import pairwise
from pathlib import Path

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.aggregate.weighting import WeightByDatapoints
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam import NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from task import SmallViT, Task, finish


class Net(SmallViT):
    """With the two functions that pfl-research calls."""

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.binary_cross_entropy_with_logits(self(x), y)

    @torch.no_grad()
    def metrics(self, x: torch.Tensor, y: torch.Tensor) -> dict[str, Weighted]:
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Clock(TrainingProcessCallback):
    """Notes when each round ends."""

    def __init__(self) -> None:
        self.marks: list[float] = []

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):  # type: ignore[no-untyped-def]
        self.marks.append(time.perf_counter())
        return False, super().after_central_iteration(
            aggregate_metrics, model, central_iteration=central_iteration
        )[1]


def main() -> None:
    task = Task.load(Path(sys.argv[1]))
    torch.manual_seed(0)
    np.random.seed(0)
    net = Net(task.labels.shape[1])
    model = PyTorchModel(net, torch.optim.Adam, torch.optim.SGD(net.parameters(), lr=1.0))
    users = list(range(len(task.clients)))
    data = FederatedDataset(
        lambda user: Dataset(raw_data=list(task.of(user)), user_id=user),
        get_user_sampler("minimize_reuse", users),
    )
    backend = SimulatedBackend(data, data, postprocessors=[WeightByDatapoints()])
    params = NNAlgorithmParams(
        central_num_iterations=task.rounds,
        evaluation_frequency=10**9,
        train_cohort_size=task.cohort,
        val_cohort_size=None,
    )
    local = NNTrainHyperParams(
        local_num_epochs=task.epochs, local_learning_rate=task.lr, local_batch_size=task.batch
    )
    clock = Clock()
    began = time.perf_counter()
    FederatedAveraging().run(params, backend, model, local, callbacks=[clock])
    marks = [began, *clock.marks]
    finish([b - a for a, b in pairwise(marks)])


main()
