"""FedAvg as published research code does it: one client after the other, models copied."""

from __future__ import annotations

import copy
import sys
import time
from pathlib import Path

import numpy as np
import torch
from task import SmallViT, Task, finish, train


def main() -> None:
    task = Task.load(Path(sys.argv[1]))
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    server, seconds = SmallViT(task.labels.shape[1]), []
    for _ in range(task.rounds):
        began, states, sizes = time.perf_counter(), [], []
        for client in rng.choice(len(task.clients), task.cohort, replace=False):
            model = copy.deepcopy(server)
            train(model, task, *task.of(client))
            states.append(model.state_dict())
            sizes.append(len(task.clients[client]))
        share = [n / sum(sizes) for n in sizes]
        mean = {k: sum(w * s[k] for w, s in zip(share, states, strict=True)) for k in states[0]}
        server.load_state_dict(mean)
        seconds.append(time.perf_counter() - began)
    finish(seconds)


main()
