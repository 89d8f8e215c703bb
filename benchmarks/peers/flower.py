"""The same under Flower's simulation engine (Ray, one CPU per client)."""

from __future__ import annotations

import os
import sys
import time
from itertools import pairwise
from pathlib import Path

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation

FOLDER = Path(os.environ.get("PEERS_TASK") or sys.argv[1])
sys.path.insert(0, str(Path(__file__).parent))
from task import SmallViT, Task, finish, train  # noqa: E402

os.environ["PEERS_TASK"] = str(FOLDER)
loaded: dict[str, Task] = {}
client_app, server_app = ClientApp(), ServerApp()


def the_task() -> Task:
    """Read once per worker."""
    if "task" not in loaded:
        torch.set_num_threads(1)  # two workers on two cores
        loaded["task"] = Task.load(FOLDER)
    return loaded["task"]


@client_app.train()
def train_one(message: Message, context: Context) -> Message:
    task = the_task()
    model = SmallViT(task.labels.shape[1])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    client = int(context.node_config["partition-id"])
    images, labels = task.of(client)
    train(model, task, images, labels)
    metrics = MetricRecord({"num-examples": len(images)})
    content = RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": metrics})
    return Message(content=content, reply_to=message)


class Timed(FedAvg):
    """FedAvg that notes when each round's replies are averaged."""

    marks: list[float] = []  # noqa: RUF012

    def aggregate_train(self, server_round, replies):  # type: ignore[no-untyped-def]
        found = super().aggregate_train(server_round, replies)
        self.marks.append(time.perf_counter())
        return found


@server_app.main()
def serve(grid: Grid, context: Context) -> None:
    task = the_task()
    torch.manual_seed(0)
    model = SmallViT(task.labels.shape[1])
    share = task.cohort / len(task.clients)
    strategy = Timed(
        fraction_train=share, fraction_evaluate=0.0, min_available_nodes=len(task.clients)
    )
    began = time.perf_counter()
    result = strategy.start(
        grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=task.rounds
    )
    marks = [began, *strategy.marks]
    model.load_state_dict(result.arrays.to_torch_state_dict())
    finish([b - a for a, b in pairwise(marks)])


if __name__ == "__main__":
    run_simulation(
        server_app,
        client_app,
        num_supernodes=len(the_task().clients),
        backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}},
    )
