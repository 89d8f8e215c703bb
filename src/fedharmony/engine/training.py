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

import torch

from fedharmony.data.augment import AugmentSettings, draw_changes
from fedharmony.engine.batches import Plan, plan_batches
from fedharmony.engine.clients import ClientData
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.gpu.graphs import Program, Recorder, StepInput
from fedharmony.engine.lanes import Lanes, Trained
from fedharmony.engine.optimise import TrainSettings
from fedharmony.engine.shapes import padded
from fedharmony.engine.stacking import StackedMessage, constants, narrow
from fedharmony.engine.step import Show, StackState, Step
from fedharmony.methods.base import Method, Sweep
from fedharmony.models.base import Model, stack
from fedharmony.types import BUFFERS, PARAMS, Group, Messages, Record, Tensors

#: Called with (steps done, steps in all) during local training.
Tick = Callable[[int, int], None]


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
        self.step = Step(model, method, data, mode, changes, show)
        self.method, self.settings, self.data = method, settings, data
        self.mode, self.shapes, self.frozen, self.changes = mode, mode.shapes, frozen, changes
        self._lanes: Lanes | None = None
        self._states: dict[object, StackState] = {}
        #: Recorded steps by state, width, rows, and whether a sweep is folded in.
        self._programs: dict[tuple[object, int, int, bool], Program] = {}
        self._recorder = Recorder() if mode.graphs else None

    def rows(self, client: int) -> int:
        """Rows of a batch in a stack whose largest client this is."""
        return self.shapes.rows(self.data.sizes[client], self.settings.batch_size)

    def train(
        self,
        round: int,
        clients: Sequence[int],
        messages: Messages,
        sweep: Sweep | None,
        tick: Tick,
    ) -> tuple[Trained, Plan, Tensors]:
        """Train a stack, largest client first; with a sweep, its result over the last epoch."""
        data, settings, shapes = self.data, self.settings, self.shapes
        orders = [data.epochs(round, k, settings.epochs) for k in clients]
        plan = plan_batches(orders, self.rows(clients[0]))
        wide, batch = shapes.lanes(len(clients)), settings.batch_size
        drawn = functools.partial(data.drawn, round, clients, plan, wide, batch)
        draws = drawn(self.method.draw, "draws") if self.method.draws else {}
        change = functools.partial(draw_changes, self.changes)
        changes = drawn(change, "augment") if self.changes.active else {}
        state = self._prepared(round, clients, [messages[k] for k in clients], sweep)
        lanes, lowest, rows = state.lanes, len(clients), 0
        exact = self.step.model.backbone.mixes_images  # then padding would change results
        # Rounded up, a stack may end with clients that do not exist: they see padding only.
        index = data.upload(plan.widened(lanes.size))
        final = data.upload(plan.final_epoch(settings.epochs, lanes.size)) if sweep else None
        for first, last, width, folds in plan.segments(settings.epochs if sweep else None):
            wide = shapes.lanes(width)
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
        self._programs.clear()
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
        if not self.shapes.few:
            return StackState(lanes, message, frozen, groups)
        key = (message.signature, *(_signature(tensors) for tensors in groups.values()))
        state = self._states.get(key)
        if state is None:
            places = {name: padded(tensors, lanes.size) for name, tensors in groups.items()}
            state = StackState(lanes, message.placed(lanes.size), frozen, places, key)
            self._states[key] = state
        state.message.fill(message, model=self.method.asks_received_model or self.method.pulls)
        for name, tensors in groups.items():
            state.keep(name, tensors, len(clients))
        return state

    def _loaded_lanes(self, round: int, message: StackedMessage, clients: int) -> Lanes:
        """The lanes of earlier stacks if they suffice, with the received model in them."""
        size, packed = self.shapes.lanes(clients), message.packed(PARAMS)
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

    def _program(
        self, state: StackState, width: int, rows: int, sweep: Sweep | None
    ) -> Callable[[StepInput], None]:
        """The step of the first ``width`` lanes."""
        key = (state.key, width, rows, sweep is not None)
        if key in self._programs:
            return self._programs[key]
        step = functools.partial(self.step, state, width, state.lanes.leaves(width), sweep)
        if state.key is None:
            return step
        self._programs[key] = Program(step, self._recorder)
        return self._programs[key]


def _signature(tensors: Tensors) -> object:
    """Shapes of stacked tensors but for the client axis."""
    return tuple((name, t.shape[1:], t.dtype) for name, t in tensors.items())
