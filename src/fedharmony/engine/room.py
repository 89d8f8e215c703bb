"""How many clients to train at once: what fits, what pays, and whether stacking pays at all."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedharmony.engine.training import Means, rounded_up
from fedharmony.models.base import Model
from fedharmony.types import Tensors

log = logging.getLogger(__name__)

#: Clients trained at once where memory allows it: then their batches fill the device.
FULL = {"cpu": 16, "cuda": 48}
#: Clients with fewer images than a batch fill the device in larger numbers, up to this factor.
WIDEST = 8
#: How alike clients of a stack are, in bits of their numbers of images (:class:`StackRule`): a step
#: has a cost of its own on a GPU, which is worth some padding.
ALIKE = {"cpu": 2, "cuda": 1}
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
        alike: leading bits of their numbers of images that clients of a stack have in common, below
            a full batch: fewer make fewer stacks, and more padding.
    """

    full: int
    batch_size: int = 1
    widest: int | None = None
    abreast: int = 0
    alike: int = 2

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
        >>> [StackRule(4, 8, 32, alike=bits).stacks(range(3), [8, 6, 5]) for bits in (2, 1)]
        [[[0], [1, 2]], [[0, 1, 2]]]
        """
        groups: dict[int, list[int]] = {}
        for client in clients:
            rows = min(self.batch_size, rounded_up(sizes[client], self.alike)) if self.widest else 0
            groups.setdefault(rows, []).append(client)
        stacks = []
        for rows, members in groups.items():
            width = self.width(rows)
            if self.widest:
                width = -(-len(members) // -(-len(members) // width))
            stacks += [members[i : i + width] for i in range(0, len(members), width)]
        return stacks


@dataclass(frozen=True)
class Trial:
    """What is tried on the device, before the first round, to find out how to train.

    Attributes:
        model: what is trained, not compiled.
        params: its parameters, frozen ones included, of one client.
        means: how to compute.
        device: where.
        batch_size: rows of a full batch.
        image: channels, height and width.
    """

    model: Model
    params: Mapping[str, Tensor]
    means: Means
    device: torch.device
    batch_size: int
    image: tuple[int, int, int]

    def rule(self, path: Literal["auto", "stacked", "single"] = "auto") -> StackRule:
        """The widths that fit into memory and fill the device; one client where that is faster."""
        if path == "single" or not self.model.backbone.stackable:
            return StackRule(1)
        rule = self._widths()
        return rule if path == "stacked" or self._stacking_pays(rule.full) else StackRule(1)

    def _widths(self) -> StackRule:
        full = FULL.get(self.device.type, FULL["cpu"])
        weights = COPIES * sum(t.numel() * t.element_size() for t in self.params.values())
        if self.device.type == "cuda":
            free = GPU_SHARE * torch.cuda.mem_get_info(self.device)[0]
            row = self._bytes_per_image()
            fits = int(free // (weights + self.batch_size * row))
            full, widest = max(1, min(full, fits)), int(free // (weights + row))
            # Two stacks at a time need twice the room.
            two = self.means.graphs and fits >= 2 * full
            abreast = WAITING_BYTES * COPIES // weights if two else 0
        else:
            widest, abreast = CPU_BYTES // weights, 0
            full = max(1, min(full, widest))
        widest, alike = max(full, min(widest, WIDEST * full)), ALIKE.get(self.device.type, 2)
        return StackRule(full, self.batch_size, widest, abreast, alike)

    def _stacking_pays(self, width: int) -> bool:
        """Whether ``width`` clients at once are faster than one after the other, by trying both.

        Small models always gain; a CPU gains too. On a GPU a large model is timed: forward and
        backward pass, a few repetitions each. What is timed is not compiled, so fewer of them fit.
        """
        if width == 1 or self.device.type != "cuda" or self.model.num_parameters < LARGE:
            return True
        if self.means.compile:
            width = max(2, int(width * COMPILED / BACKWARD))
        alone, together = self._images_per_second(1), self._images_per_second(width)
        log.info(
            "Images per second of one client at a time: %.0f; of %d at once: %.0f.",
            alone,
            width,
            together,
        )
        return together >= alone

    def _inputs(self, width: int) -> tuple[Tensors, Tensor]:
        """Leaves and images of so many clients."""
        device = self.device
        wide = {n: t.to(device).repeat(width, *[1] * t.dim()) for n, t in self.params.items()}
        leaves = {
            n: t.requires_grad_(t.is_floating_point()) for n, t in self.means.lowered(wide).items()
        }
        return leaves, torch.zeros(width, self.batch_size, *self.image, device=device)

    def _bytes_per_image(self) -> int:
        """What the forward pass of an image leaves for the backward pass, and room for that."""
        leaves, images = self._inputs(1)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        with self.means.autocast(self.device):
            outputs = self.model.apply(leaves, images)
        used = torch.cuda.max_memory_allocated(self.device) - before
        del outputs
        factor = COMPILED if self.means.compile else BACKWARD
        return max(1, int(factor * used / self.batch_size))

    def _images_per_second(self, width: int) -> float:
        leaves, images = self._inputs(width)
        trained = [t for t in leaves.values() if t.requires_grad]

        def step() -> None:
            with self.means.autocast(self.device):
                outputs = self.model.apply(leaves, images)
            torch.autograd.grad(outputs.float().sum(), trained, allow_unused=True)

        for _ in range(2):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        graph.replay()
        torch.cuda.synchronize(self.device)
        began = time.perf_counter()
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize(self.device)
        return 3 * width * self.batch_size / (time.perf_counter() - began)
