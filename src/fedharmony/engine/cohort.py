"""Local training of M clients at once, on one device.

Parameters carry a leading client axis; the model is natively stacked; a method's loss, written for
one client, is mapped over that axis. Clients of unequal size keep their own batches: the stack is
ordered by size and shrinks as clients finish, so padding never enters a result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from annotated_types import Ge, Gt
from torch import Tensor

from fedharmony.data.base import LabelledImages
from fedharmony.engine.batches import Plan, plan_batches
from fedharmony.losses import Batch
from fedharmony.methods.base import ClientView, Method, Stage, Sweep
from fedharmony.models.base import Model, stack
from fedharmony.rng import numpy_rng
from fedharmony.types import BUFFERS, PARAMS, Index, Record, Reply, Tensors

#: Called with (steps done, steps in all) during local training.
Tick = Callable[[int, int], None]


@dataclass(frozen=True)
class TrainSettings:
    """Local training.

    Attributes:
        epochs: passes over the local data per round (E).
        batch_size: images per step (B).
        lr: learning rate of Adam, constant.
        weight_decay: L2 weight decay of Adam.
    """

    epochs: Annotated[int, Ge(1)] = 5
    batch_size: Annotated[int, Ge(1)] = 16
    lr: Annotated[float, Gt(0)] = 1e-4
    weight_decay: Annotated[float, Ge(0)] = 0.0


class Cohort:
    """Trains and sweeps stacks of clients whose data it holds.

    Attributes:
        positives: (K, C) positives per client and label.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        data: LabelledImages,
        clients: Sequence[Index],
        settings: TrainSettings,
        seed: int,
        device: torch.device,
        sweep_batch: int = 32,
    ) -> None:
        self.model, self.method, self.settings = model, method, settings
        self.images, self.clients, self.seed, self.device = data.images, clients, seed, device
        self.sweep_batch = sweep_batch
        self.labels = torch.from_numpy(data.labels).to(device, torch.float32)
        self.known = None if data.known is None else torch.from_numpy(data.known).to(device)
        self.positives = torch.from_numpy(
            np.stack([data.labels[index].sum(axis=0, dtype=np.int64) for index in clients])
        ).to(device)

    def run(
        self,
        stage: Stage,
        round: int,
        messages: Mapping[int, Record],
        tick: Tick = lambda done, total: None,
    ) -> list[Reply]:
        """Carry out a stage for the clients of ``messages`` as one stack; replies in order."""
        clients = sorted(messages, key=lambda k: -len(self.clients[k]))
        message = StackedMessage([messages[k] for k in clients])
        tensors = message.stacked(PARAMS)
        results: list[dict[str, Tensors]] = [{} for _ in clients]
        scalars: list[dict[str, float]] = [{} for _ in clients]
        if stage.train:
            tensors = {name: t.clone() for name, t in tensors.items()}
            trained, losses, steps = self._train(round, clients, messages, message, tensors, tick)
            for m in range(len(clients)):
                results[m][PARAMS] = {name: tensors[name][m] for name in trained}
                results[m][BUFFERS] = {}
                scalars[m] = {"loss": float(losses[m] / steps[m]), "steps": int(steps[m])}
        if stage.sweep is not None:
            swept = self._sweep(stage.sweep, clients, message, tensors)
            for m in range(len(clients)):
                results[m][stage.sweep.group] = {name: t[m] for name, t in swept.items()}
        replies = {
            k: Reply(k, len(self.clients[k]), Record(results[m], scalars[m]))
            for m, k in enumerate(clients)
        }
        return [replies[k] for k in messages]

    def _train(
        self,
        round: int,
        clients: Sequence[int],
        messages: Mapping[int, Record],
        message: StackedMessage,
        tensors: Tensors,
        tick: Tick,
    ) -> tuple[list[str], Tensor, Index]:
        """E epochs with a fresh Adam, in place on ``tensors``; also the summed loss per client."""
        plan = plan_batches([self._epochs(round, k) for k in clients], self.settings.batch_size)
        carry = stack([self.method.carry(self.view(k), messages[k]) for k in clients])
        loss = over_clients(self.method.loss, (0, 0, message.dims, 0))
        normalise = over_clients(self.method.normalise, (0, message.dims))
        names = self.model.trainable(tensors)
        dtype = tensors[names[0]].dtype  # a run is as precise as its parameters
        losses = torch.zeros(len(clients), device=self.device)
        optimiser = None
        for first, last, width in plan.segments():
            params = narrow(tensors, width)
            leaves = [params[name].requires_grad_() for name in names]
            optimiser = self._optimiser(leaves, optimiser)
            groups, carry = message.first(width), narrow(carry, width)
            for step in range(first, last):
                index = self._index(plan, step, width)
                inputs = normalise(self.images.gather(index, self.device), groups)
                outputs = self.model.apply(params, inputs.to(dtype))
                values, carry = loss(outputs, self._batch(index), groups, carry)
                optimiser.zero_grad()
                torch.autograd.backward(values.sum())
                optimiser.step()
                losses[:width] += values.detach()
                tick(step + 1, len(plan.index))
        return names, losses, plan.steps

    @torch.no_grad()
    def _sweep(
        self, sweep: Sweep, clients: Sequence[int], message: StackedMessage, tensors: Tensors
    ) -> Tensors:
        """One pass over each client's data in stored order, with its own parameters."""
        plan = plan_batches([self.clients[k][None] for k in clients], self.sweep_batch)
        carry = {n: t.to(self.device) for n, t in stack([sweep.start() for _ in clients]).items()}
        fold = torch.vmap(sweep.fold)
        normalise = over_clients(self.method.normalise, (0, message.dims))
        dtype = next(iter(tensors.values())).dtype
        for first, last, width in plan.segments():
            params, groups = narrow(tensors, width), message.first(width)
            part = narrow(carry, width)
            for step in range(first, last):
                index = self._index(plan, step, width, trim=True)
                batch = self._batch(index)
                values = batch.labels
                if sweep.reads == "outputs":
                    inputs = normalise(self.images.gather(index, self.device), groups)
                    values = self.model.apply(params, inputs.to(dtype))
                part = fold(part, values, batch)
            for name, value in part.items():
                carry[name][:width] = value
        return torch.vmap(sweep.finish)(carry)

    def _index(self, plan: Plan, step: int, width: int, trim: bool = False) -> Tensor:
        """Image indices (width, B) of a step; trimmed, without rows that all clients only pad."""
        index = plan.index[step, :width]
        if trim:
            index = index[:, (index >= 0).any(axis=0)]
        return torch.from_numpy(index).to(self.device)

    def _batch(self, index: Tensor) -> Batch:
        rows = (index >= 0).float()
        counted = rows.unsqueeze(-1).expand(*index.shape, self.labels.shape[1])
        if self.known is not None:
            counted = counted * self.known[index]
        return Batch(self.labels[index], rows, counted)

    def _epochs(self, round: int, client: int) -> Index:
        """(E, n_k) image indices, each epoch in its own random order."""
        rng = numpy_rng(self.seed, "order", round, client)
        own = self.clients[client]
        return np.stack([rng.permutation(own) for _ in range(self.settings.epochs)])

    def _optimiser(
        self, leaves: list[Tensor], previous: torch.optim.Optimizer | None
    ) -> torch.optim.Optimizer:
        """Adam on the clients still training; it goes on where ``previous`` stood."""
        optimiser = torch.optim.Adam(
            leaves, lr=self.settings.lr, weight_decay=self.settings.weight_decay, fused=True
        )
        if previous is not None:
            before = previous.param_groups[0]["params"]
            for leaf, old in zip(leaves, before, strict=True):
                optimiser.state[leaf] = {
                    name: value[: len(leaf)] if value.dim() else value
                    for name, value in previous.state[old].items()
                }
        return optimiser

    def view(self, client: int) -> ClientView:
        """What a client knows of its own data."""
        return ClientView(len(self.clients[client]), self.positives[client])


def over_clients(function: Callable[..., Any], dims: tuple[Any, ...]) -> Callable[..., Any]:
    """A function of one client as a function of a stack of clients; ``dims`` as for vmap."""
    return function if getattr(function, "stacked", False) else torch.vmap(function, in_dims=dims)


def narrow(tensors: Mapping[str, Tensor], width: int) -> Tensors:
    """The first ``width`` clients of stacked tensors, as views."""
    return {name: tensor[:width] for name, tensor in tensors.items()}


class StackedMessage:
    """The messages of a stack of clients; parts that are the same object for all stay single.

    The model itself (parameters and buffers) is kept apart from the method's own groups, which are
    what its client functions see.

    Attributes:
        dims: per own group and name the client axis for ``torch.vmap``: 0, or None if shared.
    """

    def __init__(self, messages: Sequence[Record]) -> None:
        self._size = len(messages)
        self._groups: dict[str, Tensors] = {}
        self._shared: dict[str, dict[str, bool]] = {}
        for group, members in messages[0].groups.items():
            self._groups[group], self._shared[group] = {}, {}
            for name, tensor in members.items():
                own = [message.groups[group][name] for message in messages]
                shared = all(other is tensor for other in own)
                self._groups[group][name] = tensor if shared else torch.stack(own)
                self._shared[group][name] = shared
        self._own = [group for group in self._groups if group not in (PARAMS, BUFFERS)]
        self.dims = {
            group: {name: None if one else 0 for name, one in self._shared[group].items()}
            for group in self._own
        }

    def stacked(self, group: str) -> Tensors:
        """A group's tensors with their client axis (shared ones are expanded, not copied)."""
        return {
            name: t.unsqueeze(0).expand(self._size, *t.shape) if self._shared[group][name] else t
            for name, t in self._groups.get(group, {}).items()
        }

    def first(self, width: int) -> dict[str, Tensors]:
        """The own groups of the first ``width`` clients."""
        return {
            group: {
                name: t if self._shared[group][name] else t[:width]
                for name, t in self._groups[group].items()
            }
            for group in self._own
        }
