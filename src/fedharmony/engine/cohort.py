"""M clients at once, on one device: local training, then a pass over their data, then replies.

Parameters carry a leading client axis; the model is natively stacked; a method's functions, written
for one client, are mapped over that axis. Clients of unequal size keep their own batches: the stack
is ordered by size and shrinks as clients finish, so padding never enters a result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fedharmony.aggregate import NUMBERS, numbers_of
from fedharmony.data.augment import AugmentSettings
from fedharmony.data.base import LabelledImages
from fedharmony.engine.clients import ClientData
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.gpu.compiled import Compiled, CompiledPiece
from fedharmony.engine.lanes import Trained, all_finite
from fedharmony.engine.memory import ClientMemory
from fedharmony.engine.optimise import TrainSettings
from fedharmony.engine.stacking import StackedMessage, over_clients
from fedharmony.engine.step import Show
from fedharmony.engine.sweeping import Sweeper
from fedharmony.engine.training import Tick, Trainer
from fedharmony.methods.base import Method, Stage
from fedharmony.models.base import Model, unstack
from fedharmony.privacy import Clipping
from fedharmony.types import BUFFERS, PARAMS, Group, Groups, Index, Messages, Record, Reply, Tensors


class Cohort:
    """Trains and sweeps stacks of clients whose data it holds.

    Args:
        clients: by client id, the indices of its images.
        sweep_batch: images per client and step in passes without training.
        frozen: the model's frozen tensors, which never travel.
        clipping: bounds of what leaves a client, for differential privacy.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        data: LabelledImages,
        clients: Mapping[int, Index],
        settings: TrainSettings,
        seed: int,
        device: torch.device,
        sweep_batch: int = 32,
        frozen: Group | None = None,
        memory: ClientMemory | None = None,
        changes: AugmentSettings | None = None,
        mode: ComputeMode | None = None,
        clipping: Clipping | None = None,
    ) -> None:
        self.mode, self.method, self.clipping = mode or ComputeMode(), method, clipping
        self.data = ClientData(data, clients, seed, device, memory or ClientMemory())
        self.sizes = self.data.sizes
        self.model, self._settings, self._sweep_batch = model, settings, sweep_batch
        self.frozen = {name: tensor.to(device) for name, tensor in (frozen or {}).items()}
        self._changes = changes or AugmentSettings()
        self.trainer, self.sweeper = self._workers(self.mode)

    def _workers(self, mode: ComputeMode) -> tuple[Trainer, Sweeper]:
        """Who trains and who sweeps, with everything compiled that ``mode`` says."""
        model, method, frozen, show = self.model, self.method, self.frozen, _shower(self.method)
        if mode.compile:
            said: set[str] = set()
            model = model.compiled(lambda piece: CompiledPiece(piece, mode.backend, said))
            show = Compiled(show, mode.backend)
        trainer = Trainer(
            model, method, self._settings, self.data, mode, frozen, self._changes, show
        )
        return trainer, Sweeper(model, self.data, mode, frozen, show, self._sweep_batch)

    @cached_property
    def _plain(self) -> tuple[Trainer, Sweeper]:
        """The same clients on the plain path."""
        return self._workers(self.mode.made_plain())

    def go_plain(self) -> None:
        """Take the plain path from now on."""
        self.release()
        self.mode, (self.trainer, self.sweeper) = self.mode.made_plain(), self._plain

    def release(self) -> None:
        """Give memory back that is kept from stack to stack."""
        self.trainer.release()

    def run(
        self,
        stage: Stage,
        round: int,
        messages: Messages,
        tick: Tick = lambda done, total: None,
        plain: bool = False,
    ) -> list[Reply]:
        """Carry out a stage for the clients of ``messages`` as one stack; replies in order.

        ``plain`` takes the plain path this once.
        """
        trainer, sweeper = self._plain if plain else (self.trainer, self.sweeper)
        if self.method.task.sums:
            views = {k: self.data.view(k, round) for k in messages}
            messages = {k: self.method.received(views[k], m) for k, m in messages.items()}
        clients, sweep = self.data.by_size(messages), stage.sweep
        results: list[dict[str, Group]] = [{} for _ in clients]
        scalars: list[dict[str, float]] = [{} for _ in clients]
        trained: Trained | None = None
        swept: Tensors = {}
        if stage.train:
            during = sweep if sweep is not None and sweep.during_training else None
            trained, plan, swept = trainer.train(round, clients, messages, during, tick)
        tensors = trained.params if trained else _received(clients, messages, PARAMS)
        buffers = trained.buffers if trained else _received(clients, messages, BUFFERS)
        good = torch.ones(len(clients), dtype=torch.bool, device=self.data.device)
        if sweep is not None:
            for part in sweeper.parts(sweep, clients, tensors):
                own = {name: tensor[part] for name, tensor in tensors.items()}
                found = {name: tensor[part] for name, tensor in swept.items()}
                if not (trained and sweep.during_training):
                    renewed = {name: tensor[part] for name, tensor in buffers.items()}
                    found = sweeper.sweep(sweep, round, clients[part], messages, own, renewed)
                for m, result in enumerate(results[part]):
                    result[sweep.group] = unstack(found, m)
                for tensor in found.values():
                    good[part] &= all_finite(tensor)
        for tensor in buffers.values():
            good &= all_finite(tensor)
        if trained:  # last: the losses are read when all work has been given out
            read = torch.stack([trained.losses, trained.finite & good])
            losses, flags = read.tolist()
            total = sum(self.sizes[k] for k in clients)
            for m, loss in enumerate(losses):
                results[m] = {PARAMS: trained.each[m], BUFFERS: unstack(buffers, m), **results[m]}
                steps = int(plan.steps[m])
                rows = trained.rows * self.sizes[clients[m]] / total  # padding is shared
                scalars[m] = {"loss": loss / steps, "steps": steps, "rows": rows}
        else:
            flags = good.tolist()
        replies = {
            k: Reply(k, self.sizes[k], Record(results[m], scalars[m]), bool(flags[m]))
            for m, k in enumerate(clients)
        }
        for k, reply in replies.items():
            # What is not finite will be left out: its client has not taken part.
            kept = self.method.remember(round, reply.record) if stage.train and reply.finite else {}
            if kept:
                self.data.memory.write(k, round, kept)
        return [replies[k] for k in messages]

    def share(self, round: int, message: Record, reply: Reply) -> Reply:
        """What leaves a client where the server sees sums: its share, with numbers for events."""
        share = self.method.share(round, self.data.view(reply.client, round), message, reply)
        made = {n: torch.tensor(x, dtype=torch.float64) for n, x in numbers_of(reply).items()}
        record = Record({**share.groups, NUMBERS: {**share.get(NUMBERS), **made}})
        if self.clipping is not None:
            record = self.clipping.cut(record, message)
        return Reply(reply.client, 0, record, reply.finite)


def _shower(method: Method) -> Show:
    """From pixels (M, B, 3, H, W) to what the model takes in."""

    def show(
        pixels: Tensor, groups: Groups, dims: Any, draws: Tensors, dtype: torch.dtype
    ) -> Tensor:
        normalise = over_clients(method.normalise, (0, dims, 0))
        images: Tensor = normalise(pixels, groups, draws).to(dtype)
        return images

    return show


def _received(clients: Sequence[int], messages: Messages, group: str) -> Tensors:
    """A group of the messages as a stack, in one memory order, however the messages came here.

    Products of transposed matrices have other last bits.
    """
    stack = StackedMessage([messages[k] for k in clients]).stacked(group)
    return {
        n: t[:1].contiguous().expand_as(t) if t.stride(0) == 0 else t.contiguous()
        for n, t in stack.items()
    }
