"""One step of local training: a batch of each client of a stack."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedharmony.data.augment import AugmentSettings, augment
from fedharmony.engine.clients import ClientData
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.gpu.compiled import Compiled
from fedharmony.engine.gpu.graphs import StepInput
from fedharmony.engine.lanes import Lanes
from fedharmony.engine.optimise import clip_gradients
from fedharmony.engine.stacking import StackedMessage, narrow, over_clients
from fedharmony.losses import Batch
from fedharmony.methods.base import Method, Sweep
from fedharmony.models.base import Model
from fedharmony.types import BUFFERS, PARAMS, Groups, Tensors

#: From pixels, message, its client axes, draws and a type to the images that the model reads.
Show = Callable[[Tensor, Groups, Any, Tensors, torch.dtype], Tensor]


@dataclass
class StackState:
    """What the steps of a stack read and write, beside its lanes.

    Attributes:
        held: (M, ...) each, by group: the ``carry`` of their losses; ``sums``, what a sweep has
            folded of their last epoch; ``weights`` of labels and positives in the loss; ``buffers``
            that the model renews while it trains.
        key: of its programs, where tensors stay in their places so that steps can be repeated.
    """

    lanes: Lanes
    message: StackedMessage
    frozen: Tensors
    held: dict[str, Tensors]
    key: object = None

    def keep(self, group: str, tensors: Tensors, width: int) -> None:
        """Write a group of the first ``width`` clients to its place."""
        for name, tensor in tensors.items():
            place = self.held[group][name][:width]
            if place.data_ptr() != tensor.data_ptr():
                place.copy_(tensor)


class Step:
    """Moves lanes by one batch each; ``model`` is compiled where ``mode`` says so.

    It knows nothing of who repeats it: what is recorded of it goes when that one goes.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        data: ClientData,
        mode: ComputeMode,
        changes: AugmentSettings,
        show: Show,
    ) -> None:
        self.model, self.method, self.data = model, method, data
        self.in_training = model.training()
        self.mode, self.changes, self._show = mode, changes, show
        native = mode.compile and getattr(method.loss, "stacked", False)
        self._loss = Compiled(_kept_loss(method), mode.backend) if native else None

    def __call__(
        self, state: StackState, width: int, leaves: Tensors, sweep: Sweep | None, given: StepInput
    ) -> None:
        """One batch of each client: forward, backward, the method's pull, the optimiser."""
        method, data, dims = self.method, self.data, state.message.dims
        dtype, groups = state.lanes.dtype, state.message.first(width)
        frozen = narrow(state.frozen, width)
        held = {group: narrow(tensors, width) for group, tensors in state.held.items()}
        carry, received = held["carry"], narrow(state.message.stacked(PARAMS), width)
        batch = data.batch(given.images, held["weights"])._replace(draws=given.draws)
        pixels = data.pixels(given.images) if given.pixels is None else given.pixels
        if self.changes.active:
            pixels = augment(self.changes, pixels, given.changes)
        images = self._show(pixels, groups, dims, given.draws, self.mode.product_dtype(dtype))
        inputs = over_clients(method.inputs, (0, dims, 0 if method.asks_received_model else None))
        with self.mode.autocast(data.device):
            opinion = None
            if method.asks_received_model:
                with torch.no_grad():
                    theirs = {**received, **narrow(state.message.stacked(BUFFERS), width)}
                    opinion = self.model.apply({**theirs, **frozen}, images).to(dtype)
            batch = batch._replace(inputs=inputs(batch, groups, opinion))
            own = {**leaves, **held["buffers"], **frozen}
            outputs = self.in_training.apply(own, images, batch.inputs)
        outputs = outputs.to(dtype)
        if self._loss is not None:
            values, after = self._loss(outputs, batch, groups, carry), carry
        else:
            loss = over_clients(method.loss, (0, 0, dims, 0))
            values, after = loss(outputs, batch, groups, carry)
        found = torch.autograd.grad(values.sum(), list(leaves.values()), allow_unused=True)
        gradients = {n: g for n, g in zip(leaves, found, strict=True) if g is not None}
        with torch.no_grad():
            if sweep is not None and given.final is not None:
                seen = batch.of_rows(given.final.unsqueeze(-1))
                sums = torch.vmap(sweep.fold)(held["sums"], outputs.detach(), seen)
                state.keep("sums", sums, width)
            state.keep("carry", after, width)
            self._move(state, width, gradients, received, groups, after)
            state.lanes.losses[:width] += values.detach()

    def _move(
        self,
        state: StackState,
        width: int,
        gradients: Tensors,
        received: Tensors,
        groups: Groups,
        carry: Tensors,
    ) -> None:
        """One step of the optimiser, with the method's pull and limit on the gradient."""
        method, lanes = self.method, state.lanes
        params = narrow(lanes.params, width)
        pull = over_clients(method.pull, (0, 0, state.message.dims, 0))
        for name, more in pull(params, received, groups, carry).items():
            gradients[name] = more + gradients[name] if name in gradients else more
        if method.max_grad_norm is not None:
            gradients = {n: g.to(lanes.dtype) for n, g in gradients.items()}
            clip_gradients(list(gradients.values()), method.max_grad_norm)
        lanes.step(gradients)


def _kept_loss(method: Method) -> Callable[[Tensor, Batch, Groups, Tensors], Tensor]:
    """The method's loss, to be compiled; what it carries on is written in the same pass."""

    def loss(outputs: Tensor, batch: Batch, groups: Groups, carry: Tensors) -> Tensor:
        values, after = method.loss(outputs, batch, groups, carry)
        with torch.no_grad():
            for name, tensor in after.items():
                if tensor is not carry[name]:
                    carry[name].copy_(tensor)
        return values

    return loss
