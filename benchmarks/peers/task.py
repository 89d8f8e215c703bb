"""The task all contenders share: data from a file, a small ViT in plain PyTorch, local training.

Written as a user of a framework would write it; the parameters are as many as ours.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Task:
    """Sizes of a comparison, as the driver writes them beside the data."""

    rounds: int
    cohort: int
    epochs: int
    batch: int
    lr: float
    images: Tensor
    labels: Tensor
    clients: list[np.ndarray]

    @classmethod
    def load(cls, folder: Path) -> Task:
        sizes = json.loads((folder / "task.json").read_text())
        data = np.load(folder / "data.npz")
        images = (torch.from_numpy(data["images"]).float() - 127.5) / 127.5
        clients = np.split(data["order"], data["ends"][:-1])
        return cls(**sizes, images=images, labels=torch.from_numpy(data["labels"]), clients=clients)

    def of(self, client: int) -> tuple[Tensor, Tensor]:
        index = torch.from_numpy(self.clients[client])
        return self.images[index], self.labels[index]


class SmallViT(nn.Module):
    """Width 64, two blocks, patches of 8 pixels: what ``configs/demo.toml`` trains."""

    def __init__(self, classes: int, side: int = 32, width: int = 64, patch: int = 8) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, width, patch, patch)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.place = nn.Parameter(torch.randn(1, 1 + (side // patch) ** 2, width) * 0.02)
        layer = nn.TransformerEncoderLayer(
            width, 4, 4 * width, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), False)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).mT
        x = torch.cat([self.token.expand(len(x), -1, -1), x], dim=1) + self.place
        return self.head(self.blocks(x)[:, 0])


def train(model: nn.Module, task: Task, images: Tensor, labels: Tensor) -> None:
    """E epochs of Adam with a fresh state."""
    optimiser = torch.optim.Adam(model.parameters(), lr=task.lr)
    for _ in range(task.epochs):
        for part in torch.randperm(len(images)).split(task.batch):
            optimiser.zero_grad()
            loss = nn.functional.binary_cross_entropy_with_logits(model(images[part]), labels[part])
            loss.backward()
            optimiser.step()


def finish(seconds: list[float]) -> None:
    """What the driver reads: the last line of the output."""
    sys.stdout.flush()
    print(json.dumps({"rounds": seconds}), flush=True)
