"""A pass over the data of a stack of clients, without training."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedharmony.engine.batches import Plan, plan_batches
from fedharmony.engine.clients import ClientData
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.stacking import StackedMessage, constants, narrow
from fedharmony.engine.step import Show
from fedharmony.losses import Batch
from fedharmony.methods.base import Sweep
from fedharmony.models.base import Model, stack
from fedharmony.rng import torch_rng
from fedharmony.types import Group, Messages, Tensors

#: What the per-image gradients of one step of a sweep may occupy, in bytes.
GRADIENT_BYTES = {"cpu": 1 << 28, "cuda": 1 << 33}


class Sweeper:
    """Passes over the data of stacks of clients, ``batch`` images per client and step."""

    def __init__(
        self,
        model: Model,
        data: ClientData,
        mode: ComputeMode,
        frozen: Group,
        show: Show,
        batch: int,
    ) -> None:
        self.model, self.data, self.mode, self.frozen = model, data, mode, frozen
        self._show, self._batch = show, batch

    def parts(self, sweep: Sweep, clients: Sequence[int], params: Tensors) -> Iterator[slice]:
        """Parts of a stack that a sweep takes at a time."""
        width = self._room(sweep, params)[1] or len(clients)
        for first in range(0, len(clients), width):
            yield slice(first, first + width)

    @torch.no_grad()
    def sweep(
        self,
        sweep: Sweep,
        round: int,
        clients: Sequence[int],
        messages: Messages,
        tensors: Tensors,
        buffers: Group,
    ) -> Tensors:
        """One pass over each client's data in stored order, with its own parameters and buffers."""
        message = StackedMessage([messages[k] for k in clients])
        seen = [self.data.some(round, k, sweep.limit) for k in clients]
        size = self.mode.shapes.rows(len(seen[0]), self._room(sweep, tensors)[0])
        plan = plan_batches([index[None] for index in seen], size)
        index = self.data.upload(plan.index)
        read = tensors if sweep.reads == "gradients" else self.mode.lowered(tensors)
        draws = self._draws(sweep, round, clients, plan)
        carry = sweep.started(tensors, len(clients), self.data.device)
        fold = torch.vmap(sweep.fold)
        for first, last, width, _ in plan.segments():
            params, groups = narrow(read, width), message.first(width)
            kept = narrow(buffers, width)
            part = narrow(carry, width)
            exact, fetch = not self.mode.shapes.few, sweep.reads != "labels"
            looks = self.data.looks(plan, index, range(first, last), width, exact, fetch)
            for step, (shown, pixels) in enumerate(looks, start=first):
                rows = slice(step * size, step * size + shown.shape[1])
                batch = self.data.batch(shown, {})
                batch = batch._replace(draws={n: t[:width, rows] for n, t in draws.items()})
                values = self._values(sweep, params, kept, message, groups, pixels, batch)
                part = fold(part, values, batch)
            for name, value in part.items():
                carry[name][:width] = value
        return torch.vmap(sweep.finish)(carry, tensors)

    def _values(
        self,
        sweep: Sweep,
        params: Tensors,
        buffers: Tensors,
        message: StackedMessage,
        groups: Mapping[str, Tensors],
        pixels: Tensor | None,
        batch: Batch,
    ) -> Tensor | Tensors:
        """What a sweep reads of one batch."""
        if pixels is None:
            return batch.labels
        if sweep.reads == "images":
            return pixels
        # Half-precision copies of matrices aside, a pass is as precise as its parameters.
        dtype = next(t.dtype for t in params.values() if t.dtype != torch.bfloat16)
        if sweep.reads == "gradients":
            images = self._show(pixels, groups, message.dims, {}, dtype)
            return self._gradients(sweep, params, buffers, images, batch)
        images = self._show(pixels, groups, message.dims, {}, self.mode.product_dtype(dtype))
        whole = {**params, **buffers, **constants(self.frozen, len(pixels), dtype)}
        with self.mode.autocast(self.data.device):
            wanted = self.model.features if sweep.reads == "features" else self.model.apply
            return wanted(whole, images).to(dtype)

    def _gradients(
        self, sweep: Sweep, params: Tensors, buffers: Tensors, images: Tensor, batch: Batch
    ) -> Tensors:
        """One gradient per image, (M, B, ...): each image is a client of the stacked model."""
        assert sweep.objective is not None, "a sweep over gradients needs an objective"
        clients, rows = images.shape[:2]
        single = images.flatten(0, 1).unsqueeze(1)
        with torch.enable_grad():
            leaves, kept = (
                {
                    name: t.unsqueeze(1).expand(clients, rows, *t.shape[1:]).flatten(0, 1).detach()
                    for name, t in tensors.items()
                }
                for tensors in (params, buffers)
            )
            for leaf in leaves.values():
                leaf.requires_grad_()
            whole = {**leaves, **kept, **constants(self.frozen, len(single), images.dtype)}
            outputs = self.model.apply(whole, single).view(clients, rows, -1)
            total = sweep.objective(outputs, batch).sum()
            # A parameter the outputs do not depend on has gradient zero, not none.
            found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
        return {
            name: gradient.view(clients, rows, *gradient.shape[1:])
            for name, gradient in zip(leaves, found, strict=True)
        }

    def _room(self, sweep: Sweep, params: Tensors) -> tuple[int, int | None]:
        """Images and clients per step of a sweep (none: all): per-image gradients need room."""
        if sweep.reads != "gradients":
            return self._batch, None
        numbers = sum(t[0].numel() * t.element_size() for t in params.values())
        room = GRADIENT_BYTES.get(self.data.device.type, GRADIENT_BYTES["cpu"])
        rows = max(1, int(room * self.mode.share // numbers))
        batch = min(self._batch, rows)
        return batch, rows // batch

    def _draws(self, sweep: Sweep, round: int, clients: Sequence[int], plan: Plan) -> Tensors:
        """What a sweep draws, (M, S · B, ...) each, every client from a generator of its own."""
        if sweep.draw is None:
            return {}
        rows = plan.index.shape[0] * plan.index.shape[2]
        drawn = []
        for m, k in enumerate(clients):
            images = int((plan.index[:, m] >= 0).sum())
            own = sweep.draw(torch_rng(self.data.seed, "sweep draws", round, k), images)
            drawn.append(
                {
                    n: torch.cat([t, t.new_zeros(rows - images, *t.shape[1:])])
                    for n, t in own.items()
                }
            )
        return {name: tensor.to(self.data.device) for name, tensor in stack(drawn).items()}
