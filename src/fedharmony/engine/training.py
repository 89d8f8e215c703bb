"""Local training of a stack of clients.

A step is a function of tensors at known places: parameters, moments, what the method's loss
carries, and small buffers that say which images come next. It is called as it is, or recorded as a
CUDA graph and replayed (:mod:`fedharmony.engine.gpu`). Where a new shape is expensive, widths and
rows are rounded up to few sizes; rows and clients added that way are masked and left out of every
result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from fedharmony.data.augment import AugmentSettings, augment, draw_changes
from fedharmony.engine.batches import Plan, plan_batches
from fedharmony.engine.clients import ClientData
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.gpu.compiled import Compiled
from fedharmony.engine.gpu.graphs import Program, Recorder, StepInput
from fedharmony.engine.lanes import Lanes, Trained
from fedharmony.engine.optimise import TrainSettings, clip_gradients
from fedharmony.engine.stacking import StackedMessage, constants, narrow, over_clients
from fedharmony.losses import Batch
from fedharmony.methods.base import Method, Sweep
from fedharmony.models.base import Model, stack
from fedharmony.types import BUFFERS, PARAMS, Group, Groups, Messages, Record, Tensors

#: Called with (steps done, steps in all) during local training.
Tick = Callable[[int, int], None]
#: From pixels, message, its client axes, draws and a type to the images that the model reads.
Show = Callable[[Tensor, Groups, Any, Tensors, torch.dtype], Tensor]


@dataclass
class StackState:
    """What the steps of a stack read and write, beside its lanes.

    Attributes:
        held: (M, ...) each, by group: the ``carry`` of their losses; ``sums``, what a sweep has
            folded of their last epoch; ``weights`` of labels and positives in the loss; ``buffers``
            that the model renews while it trains.
        fixed: whether tensors must stay where they are.
        programs: recorded steps by width, rows, and whether a sweep is folded in.
    """

    lanes: Lanes
    message: StackedMessage
    frozen: Tensors
    held: dict[str, Tensors]
    fixed: bool = False
    programs: dict[tuple[int, int, bool], Program] = field(default_factory=dict)

    def keep(self, group: str, tensors: Tensors, width: int) -> None:
        """Write a group of the first ``width`` clients to its place."""
        for name, tensor in tensors.items():
            place = self.held[group][name][:width]
            if place.data_ptr() != tensor.data_ptr():
                place.copy_(tensor)


class Trainer:
    """Trains stacks of clients on one device; ``model`` is compiled where ``mode`` says so."""

    def __init__(
        self,
        model: Model,
        method: Method,
        settings: TrainSettings,
        data: ClientData,
        mode: ComputeMode,
        frozen: Group,
        changes: AugmentSettings,
        show: Show,
    ) -> None:
        self.model, self.method, self.settings, self.data = model, method, settings, data
        self.in_training = model.training()
        self.mode, self.frozen, self.changes, self._show = mode, frozen, changes, show
        self._lanes: Lanes | None = None
        self._states: dict[object, StackState] = {}
        native = getattr(method.loss, "stacked", False)
        self._loss = Compiled(self._kept_loss, mode.backend) if mode.compile and native else None
        self._recorder = Recorder() if mode.graphs else None

    def rows(self, client: int) -> int:
        """Rows of a batch in a stack whose largest client this is."""
        return self.mode.rows(self.data.sizes[client], self.settings.batch_size)

    def train(
        self,
        round: int,
        clients: Sequence[int],
        messages: Messages,
        sweep: Sweep | None,
        tick: Tick,
    ) -> tuple[Trained, Plan, Tensors]:
        """Train a stack, largest client first; with a sweep, its result over the last epoch."""
        data, settings, mode = self.data, self.settings, self.mode
        orders = [data.epochs(round, k, settings.epochs) for k in clients]
        plan = plan_batches(orders, self.rows(clients[0]))
        wide, batch = mode.width(len(clients)), settings.batch_size
        drawn = functools.partial(data.drawn, round, clients, plan, wide, batch)
        draws = drawn(self.method.draw, "draws") if self.method.draws else {}
        change = functools.partial(draw_changes, self.changes)
        changes = drawn(change, "augment") if self.changes.active else {}
        state = self._prepared(round, clients, [messages[k] for k in clients], sweep)
        lanes, lowest, rows = state.lanes, len(clients), 0
        exact = self.model.backbone.mixes_images  # then padding would change results
        # Rounded up, a stack may end with clients that do not exist: they see padding only.
        index = data.upload(plan.widened(lanes.size))
        final = data.upload(plan.final_epoch(settings.epochs, lanes.size)) if sweep else None
        for first, last, width, folds in plan.segments(settings.epochs if sweep else None):
            wide = min(lanes.size, mode.width(width))
            if width < min(wide, lowest):  # these are done, but their lanes are computed further
                lanes.save(width, min(wide, lowest))
                lowest = width
            step = self._program(state, wide, index.shape[2], sweep if folds else None)
            looks = data.looks(plan, index, range(first, last), wide, exact, not data.resident)
            for t, (shown, pixels) in enumerate(looks, first):
                part = (t, slice(wide), slice(shown.shape[1]))
                rows += shown.numel()
                step(
                    StepInput(
                        shown,
                        pixels,
                        {n: numbers[part] for n, numbers in draws.items()},
                        {n: numbers[part] for n, numbers in changes.items()},
                        final[t, :wide] if folds and final is not None else None,
                    )
                )
                tick(t + 1, len(plan.index))
        trained = lanes.result(len(clients))
        trained = trained._replace(rows=rows, buffers=narrow(state.held["buffers"], len(clients)))
        swept = {}
        if sweep is not None:
            swept = torch.vmap(sweep.finish)(
                narrow(state.held["sums"], len(clients)), trained.params
            )
        return trained, plan, swept

    def release(self) -> None:
        """Give recorded programs and their memory back, once they are done."""
        if self.mode.graphs:
            torch.cuda.synchronize(self.data.device)
            self._recorder = Recorder()
        self._states.clear()
        self._lanes = None

    # -- before the first step ---------------------------------------------------------------------

    def _prepared(
        self, round: int, clients: Sequence[int], messages: Sequence[Record], sweep: Sweep | None
    ) -> StackState:
        """What the steps read and write: lanes with the received model, and all the rest."""
        data, message = self.data, StackedMessage(messages)
        lanes = self._loaded_lanes(round, message, len(clients))
        each = zip(clients, messages, strict=True)
        carry = stack([self.method.carry(data.view(k, round), own) for k, own in each])
        weights = data.label_weights(self.method.task.loss, clients)
        buffers = {name: tensor.clone() for name, tensor in message.stacked(BUFFERS).items()}
        sums: Tensors = {}
        if sweep is not None:
            sums = sweep.started(message.stacked(PARAMS), len(clients), data.device)
        frozen = constants(self.frozen, lanes.size, lanes.dtype)
        groups = {"carry": carry, "sums": sums, "weights": weights, "buffers": buffers}
        if not (self.mode.graphs or self.mode.fixed):
            return StackState(lanes, message, frozen, groups)
        key = (message.signature, *(_signature(tensors) for tensors in groups.values()))
        state = self._states.get(key)
        if state is None:
            places = {name: _placed(tensors, lanes.size) for name, tensors in groups.items()}
            state = StackState(lanes, message.placed(lanes.size), frozen, places, fixed=True)
            self._states[key] = state
        state.message.fill(message, model=self.method.asks_received_model or self.method.pulls)
        for name, tensors in groups.items():
            state.keep(name, tensors, len(clients))
        return state

    def _loaded_lanes(self, round: int, message: StackedMessage, clients: int) -> Lanes:
        """The lanes of earlier stacks if they suffice, with the received model in them."""
        size, packed = self.mode.width(clients), message.packed(PARAMS)
        if self._lanes is None or self._lanes.size < size:
            self.release()
            received, mode = message.stacked(PARAMS), self.mode
            half = mode.halved(received)
            self._lanes = Lanes(received, size, self.settings, half, mode.compile, mode.backend)
        if packed is not None and packed.layout == self._lanes.layout:
            self._lanes.load_row(packed.row, clients)
        else:
            self._lanes.load(message.stacked(PARAMS))
        self._lanes.rate.fill_(self.settings.rate(round, self.method.task.rounds))
        return self._lanes

    # -- one step ----------------------------------------------------------------------------------

    def _program(
        self, state: StackState, width: int, rows: int, sweep: Sweep | None
    ) -> Callable[[StepInput], None]:
        """The step of the first ``width`` lanes."""
        key = (width, rows, sweep is not None)
        if key in state.programs:
            return state.programs[key]
        leaves = state.lanes.leaves(width)
        step = functools.partial(self._step, state, width, leaves, sweep)
        if not state.fixed:
            return step
        state.programs[key] = Program(step, self._recorder)
        return state.programs[key]

    def _step(
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

    def _kept_loss(self, outputs: Tensor, batch: Batch, groups: Groups, carry: Tensors) -> Tensor:
        """The method's loss, compiled; what it carries on is written in the same pass."""
        values, after = self.method.loss(outputs, batch, groups, carry)
        with torch.no_grad():
            for name, tensor in after.items():
                if tensor is not carry[name]:
                    carry[name].copy_(tensor)
        return values

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
        if not method.pull_after_step:
            for name, more in pull(params, received, groups, carry).items():
                gradients[name] = more + gradients[name] if name in gradients else more
        if method.max_grad_norm is not None:
            gradients = {n: g.to(lanes.dtype) for n, g in gradients.items()}
            clip_gradients(list(gradients.values()), method.max_grad_norm)
        lanes.step(gradients)
        if method.pull_after_step:
            lanes.shift(pull(params, received, groups, carry), self.settings.lr, width)


def _signature(tensors: Tensors) -> object:
    """Shapes of stacked tensors but for the client axis."""
    return tuple((name, t.shape[1:], t.dtype) for name, t in tensors.items())


def _placed(tensors: Tensors, size: int) -> Tensors:
    """Zeros of the same kind for ``size`` clients."""
    return {name: t.new_zeros(size, *t.shape[1:]) for name, t in tensors.items()}
