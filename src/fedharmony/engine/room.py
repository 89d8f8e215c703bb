"""How many clients to train at once: what fills the device and fits into it.

Nothing is timed here: stacks change the last bits of a result, so no clock may decide on them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.shapes import rounded_up
from fedharmony.models.base import Model
from fedharmony.types import Group

log = logging.getLogger(__name__)

#: Clients trained at once where memory allows it: then their batches fill the device.
FULL = {"cpu": 16, "cuda": 48}
#: Clients with fewer images than a batch fill the device in larger numbers, up to this factor.
WIDEST = 8
#: Leading bits that the sizes of clients in a stack share (:class:`StackRule`). On a GPU each step
#: has a cost of its own, so that fewer, larger stacks are worth some padding.
COMMON_BITS = {"cpu": 2, "cuda": 1}
#: Tensors as large as the parameters that a client needs while it trains: master weights, two
#: moments, gradient and copy (half as large each in half precision), and its reply.
COPIES = 5
#: Memory of a training step per image, over what an uncompiled forward pass leaves behind: the
#: backward pass needs some more; compiled, far less is left behind.
BACKWARD, COMPILED = 1.3, 0.6
#: What the weights of a stack may occupy on a CPU, and the share of a GPU's memory that a stack may
#: occupy. The share is of all memory, or of the run's part of it, unless less is free: bits should
#: not depend on what is free.
CPU_BYTES, GPU_SHARE = 1 << 32, 0.8


@dataclass(frozen=True)
class StackRule:
    """How wide a stack may be.

    Attributes:
        full: clients at once whose batches are full.
        batch_size: rows of a full batch.
        widest: most clients at once, however few rows they have; none means ``full`` and stacks
            that ignore sizes.
        common_bits: leading bits that the sizes of clients in a stack share, where these are below
            a full batch: fewer bits make fewer stacks, and more padding.
    """

    full: int
    batch_size: int = 1
    widest: int | None = None
    common_bits: int = 2

    def width(self, rows: int) -> int:
        """Clients at once whose batches have so many rows: the same number of rows in all.

        >>> StackRule(32, 16, 256).width(16), StackRule(32, 16, 256).width(2), StackRule(7).width(1)
        (32, 256, 7)
        """
        if self.widest is None:
            return self.full
        return max(self.full, min(self.widest, self.full * self.batch_size // max(1, rows)))

    def stacks(self, clients: Sequence[int], sizes: Mapping[int, int]) -> list[list[int]]:
        """Clients, largest first, in stacks of like rows and, where one is not enough, like width.

        >>> StackRule(4, 4, 8).stacks(range(9), dict(enumerate([9, 9, 9, 9, 9, 2, 2, 2, 1])))
        [[0, 1, 2], [3, 4], [5, 6, 7], [8]]
        >>> StackRule(2).stacks(range(3), {0: 9, 1: 5, 2: 1})
        [[0, 1], [2]]
        >>> sizes = {0: 8, 1: 6, 2: 5}
        >>> [StackRule(4, 8, 32, common_bits=bits).stacks(range(3), sizes) for bits in (2, 1)]
        [[[0], [1, 2]], [[0, 1, 2]]]
        """
        groups: dict[int, list[int]] = {}
        for client in clients:
            size = rounded_up(sizes[client], self.common_bits)
            rows = min(self.batch_size, size) if self.widest else 0
            groups.setdefault(rows, []).append(client)
        stacks = []
        for rows, members in groups.items():
            width = self.width(rows)
            if self.widest:
                width = -(-len(members) // -(-len(members) // width))
            stacks += [members[i : i + width] for i in range(0, len(members), width)]
        return stacks


@dataclass(frozen=True)
class RoomTest:
    """Finds out, before the first round, how many clients the device holds at once.

    The model is not compiled yet; ``params`` are of one client, frozen ones included.
    """

    model: Model
    params: Group
    mode: ComputeMode
    device: torch.device
    batch_size: int
    image: tuple[int, ...]

    def rule(self) -> StackRule:
        """The widths that fit into memory and fill the device."""
        if not self.model.backbone.stackable:
            return StackRule(1)
        weights = COPIES * sum(t.numel() * t.element_size() for t in self.params.values())
        full, kind = FULL.get(self.device.type, FULL["cpu"]), self.device.type
        if kind == "cuda":
            row, room = self._bytes_per_image(), self._room()
            full = max(1, min(full, int(room // (weights + self.batch_size * row))))
            widest = int(room // (weights + row))
        else:
            widest = CPU_BYTES // weights
            full = max(1, min(full, widest))
        widest = max(full, min(widest, WIDEST * full))
        return StackRule(full, self.batch_size, widest, COMMON_BITS.get(kind, 2))

    def _room(self) -> float:
        """Bytes that a stack may occupy on a GPU."""
        free, total = torch.cuda.mem_get_info(self.device)
        allowed = GPU_SHARE * total * self.mode.share
        if free < allowed:
            log.info(
                "%.0f of %.0f GB of the GPU's memory are taken: stacks may be narrower than when "
                "the GPU is free, and results then differ in their last bits.",
                (total - free) / 1e9,
                total / 1e9,
            )
        return min(free, allowed)

    def _bytes_per_image(self) -> int:
        """What the forward pass of an image leaves for the backward pass, and room for that."""
        device = self.device
        single = self.mode.lowered({n: t.to(device)[None] for n, t in self.params.items()})
        leaves = {n: t.requires_grad_(t.is_floating_point()) for n, t in single.items()}
        images = torch.zeros(1, self.batch_size, *self.image, device=device)
        before = torch.cuda.memory_allocated(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        with self.mode.autocast(self.device):
            outputs = self.model.apply(leaves, images)
        used = torch.cuda.max_memory_allocated(self.device) - before
        del outputs
        factor = COMPILED if self.mode.compile else BACKWARD
        return max(1, int(factor * used / self.batch_size))
