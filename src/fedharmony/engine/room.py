"""How many clients to train at once: what fits, what pays, and whether stacking pays at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedharmony.engine.training import Means, rounded_up
from fedharmony.models.base import Model
from fedharmony.types import Tensors

log = logging.getLogger(__name__)

#: Clients trained at once where memory allows it: then their batches fill the device.
FULL = {"cpu": 16, "cuda": 32}
#: Clients with fewer images than a batch fill the device in larger numbers, up to this factor.
WIDEST = 8
#: Tensors as large as the parameters that a client needs while it trains: master weights, two
#: moments, gradient and copy (half as large each in half precision), and its reply.
COPIES = 5
#: Memory of a training step per image, over what an uncompiled forward pass leaves behind: the
#: backward pass needs some more; compiled, far less is left behind.
BACKWARD, COMPILED = 1.3, 0.6
#: Replies that may wait for those of a longer stack, in bytes.
WAITING_BYTES = 1 << 33
#: From this many parameters on, one client may fill a GPU by itself.
LARGE = 50_000_000
#: What the weights of a stack may occupy on a CPU (not a share of what is free: the bits of a run
#: should not depend on that), and which share of the free memory of a GPU.
CPU_BYTES, GPU_SHARE = 1 << 32, 0.8


@dataclass(frozen=True)
class StackRule:
    """How wide a stack may be.

    Attributes:
        full: clients at once whose batches are full.
        batch_size: rows of a full batch.
        widest: most clients at once, however few rows they have; none means ``full`` and stacks
            that ignore sizes.
        abreast: clients whose replies may wait while two stacks train side by side; 0: one stack
            at a time.
    """

    full: int
    batch_size: int = 1
    widest: int | None = None
    abreast: int = 0

    def width(self, rows: int) -> int:
        """Clients at once whose batches have so many rows: the same number of rows in all.

        >>> StackRule(32, 16, 256).width(16), StackRule(32, 16, 256).width(2), StackRule(7).width(1)
        (32, 256, 7)
        """
        if self.widest is None:
            return self.full
        return max(self.full, min(self.widest, self.full * self.batch_size // max(1, rows)))

    def stacks(self, clients: Sequence[int], sizes: Sequence[int]) -> list[list[int]]:
        """Clients, largest first, in stacks of like rows and, where one is not enough, like width.

        >>> StackRule(4, 4, 8).stacks(range(9), [9, 9, 9, 9, 9, 2, 2, 2, 1])
        [[0, 1, 2], [3, 4], [5, 6, 7], [8]]
        >>> StackRule(2).stacks(range(3), [9, 5, 1])
        [[0, 1], [2]]
        """
        groups: dict[int, list[int]] = {}
        for client in clients:
            rows = min(self.batch_size, rounded_up(sizes[client])) if self.widest else 0
            groups.setdefault(rows, []).append(client)
        stacks = []
        for rows, members in groups.items():
            width = self.width(rows)
            if self.widest:
                width = -(-len(members) // -(-len(members) // width))
            stacks += [members[i : i + width] for i in range(0, len(members), width)]
        return stacks


def stack_rule(
    model: Model,
    params: Mapping[str, Tensor],
    means: Means,
    device: torch.device,
    batch_size: int,
    image: tuple[int, int, int],
) -> StackRule:
    """The widths that fit into memory and fill the device."""
    full = FULL.get(device.type, FULL["cpu"])
    weights = COPIES * sum(t.numel() * t.element_size() for t in params.values())
    if device.type == "cuda":
        free = GPU_SHARE * torch.cuda.mem_get_info(device)[0]
        row = _bytes_per_image(model, params, means, device, batch_size, image)
        fits = int(free // (weights + batch_size * row))
        full, widest = max(1, min(full, fits)), int(free // (weights + row))
        # Two stacks at a time need twice the room.
        abreast = WAITING_BYTES * COPIES // weights if means.graphs and fits >= 2 * full else 0
    else:
        widest, abreast = CPU_BYTES // weights, 0
        full = max(1, min(full, widest))
    return StackRule(full, batch_size, max(full, min(widest, WIDEST * full)), abreast)


def stacking_pays(
    model: Model,
    params: Mapping[str, Tensor],
    means: Means,
    device: torch.device,
    width: int,
    batch_size: int,
    image: tuple[int, int, int],
) -> bool:
    """Whether ``width`` clients at once are faster than one after the other, by trying both.

    Small models always gain; a CPU gains too. On a GPU a large model is timed: forward and backward
    pass, a few repetitions each.
    """
    if not model.backbone.stackable or width == 1:
        return False
    if device.type != "cuda" or model.num_parameters < LARGE:
        return True
    speeds = {
        m: _images_per_second(model, params, means, device, m, batch_size, image)
        for m in (1, width)
    }
    log.info(
        "Images per second of one client at a time: %.0f; of %d at once: %.0f.",
        speeds[1],
        width,
        speeds[width],
    )
    return speeds[width] >= speeds[1]


def _leaves(
    params: Mapping[str, Tensor], means: Means, device: torch.device, width: int
) -> Tensors:
    wide = {n: t.to(device).unsqueeze(0).repeat(width, *[1] * t.dim()) for n, t in params.items()}
    return {n: t.requires_grad_() for n, t in means.lowered(wide).items()}


def _bytes_per_image(
    model: Model,
    params: Mapping[str, Tensor],
    means: Means,
    device: torch.device,
    batch_size: int,
    image: tuple[int, int, int],
) -> int:
    """What the forward pass of an image leaves for the backward pass, and some room for that."""
    leaves = _leaves(params, means, device, 1)
    images = torch.zeros(1, batch_size, *image, device=device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    with means.autocast(device):
        outputs = model.apply(leaves, images)
    used = torch.cuda.max_memory_allocated(device) - before
    del outputs
    return max(1, int((COMPILED if means.compile else BACKWARD) * used / batch_size))


def _images_per_second(
    model: Model,
    params: Mapping[str, Tensor],
    means: Means,
    device: torch.device,
    width: int,
    batch_size: int,
    image: tuple[int, int, int],
) -> float:
    leaves = _leaves(params, means, device, width)
    images = torch.zeros(width, batch_size, *image, device=device)

    def step() -> None:
        with means.autocast(device):
            outputs = model.apply(leaves, images)
        torch.autograd.grad(outputs.float().sum(), list(leaves.values()), allow_unused=True)

    for _ in range(2):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    graph.replay()
    torch.cuda.synchronize(device)
    began = time.perf_counter()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize(device)
    return 3 * width * batch_size / (time.perf_counter() - began)
