"""M clients at once, on one device: local training, then a pass over their data.

Parameters carry a leading client axis; the model is natively stacked; a method's functions, written
for one client, are mapped over that axis. Clients of unequal size keep their own batches: the stack
is ordered by size and shrinks as clients finish, so padding never enters a result.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from fedharmony.data.augment import AugmentSettings, augment, draw_changes
from fedharmony.data.base import LabelledImages
from fedharmony.engine.batches import Plan, plan_batches
from fedharmony.engine.memory import ClientMemory
from fedharmony.engine.optimise import TrainSettings, clip_gradients, local_optimiser
from fedharmony.engine.prefetch import gathered
from fedharmony.engine.stacking import StackedMessage, expand, narrow, over_clients
from fedharmony.losses import Batch, label_weights, positive_weights
from fedharmony.methods.base import ClientView, Method, Stage, Sweep
from fedharmony.models.base import Model, stack, unstack
from fedharmony.rng import numpy_rng, torch_rng
from fedharmony.types import BUFFERS, PARAMS, Index, Record, Reply, Tensors

#: Called with (steps done, steps in all) during local training.
Tick = Callable[[int, int], None]

#: What the per-image gradients of one step of a sweep may occupy, in bytes.
GRADIENT_BYTES = {"cpu": 1 << 28, "cuda": 1 << 33}


class Cohort:
    """Trains and sweeps stacks of clients whose data it holds.

    Args:
        model: what is trained.
        method: whose client functions are run.
        data: the training images of all clients.
        clients: per client the indices of its images.
        settings: of local training.
        seed: of the run.
        device: where to compute.
        sweep_batch: images per client and step in passes without training.
        frozen: the model's frozen tensors, which never travel.
        memory: what clients keep between rounds.
        changes: random changes of training images.
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
        frozen: Mapping[str, Tensor] | None = None,
        memory: ClientMemory | None = None,
        changes: AugmentSettings | None = None,
    ) -> None:
        self.model, self.method, self.settings = model, method, settings
        self.images, self.clients, self.seed, self.device = data.images, clients, seed, device
        self.sweep_batch = sweep_batch
        self.frozen = {name: tensor.to(device) for name, tensor in (frozen or {}).items()}
        self.memory = memory or ClientMemory()
        self.changes = changes or AugmentSettings()
        self.labels = torch.from_numpy(data.labels).to(device)
        self.known = None if data.known is None else torch.from_numpy(data.known).to(device)

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
            losses, steps = self._train(round, clients, messages, message, tensors, tick)
            for m in range(len(clients)):
                results[m][PARAMS] = unstack(tensors, m)
                results[m][BUFFERS] = {}
                scalars[m] = {"loss": float(losses[m] / steps[m]), "steps": int(steps[m])}
        if stage.sweep is not None:
            params = {name: tensor.detach() for name, tensor in tensors.items()}
            for part in self._sweep_stacks(stage.sweep, clients, params):
                own = {name: tensor[part] for name, tensor in params.items()}
                swept = self._sweep(stage.sweep, round, clients[part], messages, own)
                for m, result in enumerate(results[part]):
                    result[stage.sweep.group] = unstack(swept, m)
        replies = {
            k: Reply(k, len(self.clients[k]), Record(results[m], scalars[m]))
            for m, k in enumerate(clients)
        }
        if stage.train:
            for k, reply in replies.items():
                if kept := self.method.remember(round, reply.record):
                    self.memory.write(k, round, kept)
        return [replies[k] for k in messages]

    # -- training ---------------------------------------------------------------------------------

    def _train(
        self,
        round: int,
        clients: Sequence[int],
        messages: Mapping[int, Record],
        message: StackedMessage,
        tensors: Tensors,
        tick: Tick,
    ) -> tuple[Tensor, Index]:
        """E epochs with a fresh optimiser, in place on ``tensors``; summed loss and steps."""
        method = self.method
        plan = plan_batches([self._epochs(round, k) for k in clients], self.settings.batch_size)
        views = [self.view(k, round) for k in clients]
        carry = stack([method.carry(v, messages[k]) for v, k in zip(views, clients, strict=True)])
        weights = self._label_weights(clients)
        own, common = (
            [torch_rng(self.seed, purpose, round, k) for k in clients]
            for purpose in ("draws", "augment")
        )
        normalise = over_clients(method.normalise, (0, message.dims, 0))
        inputs = over_clients(method.inputs, (0, message.dims, 0 if method.consults else None))
        loss = over_clients(method.loss, (0, 0, message.dims, 0))
        dtype = next(iter(tensors.values())).dtype  # a run is as precise as its parameters
        received, fixed = message.stacked(PARAMS), self._fixed(len(clients), dtype)
        losses = torch.zeros(len(clients), device=self.device)
        optimiser = None
        for first, last, width in plan.segments():
            params = narrow(tensors, width)
            leaves = [tensor.requires_grad_() for tensor in params.values()]
            optimiser = local_optimiser(self.settings, leaves, optimiser)
            groups, carry = message.first(width), narrow(carry, width)
            start, constant = narrow(received, width), narrow(fixed, width)
            steps = (self._index(plan, step, width) for step in range(first, last))
            for step, (index, pixels) in enumerate(self._gathered(steps), start=first):
                batch = self._batch(index, narrow(weights, width))
                batch = batch._replace(draws=self._draws(method.draw, own[:width]))
                pixels = self._changed(pixels, common[:width])
                images = normalise(pixels, groups, batch.draws).to(dtype)
                opinion = None
                if method.consults:
                    with torch.no_grad():
                        opinion = self.model.apply({**start, **constant}, images)
                batch = batch._replace(inputs=inputs(batch, groups, opinion))
                outputs = self.model.apply({**params, **constant}, images, batch.inputs)
                values, carry = loss(outputs, batch, groups, carry)
                optimiser.zero_grad()
                torch.autograd.backward(values.sum())
                self._step(optimiser, params, start, message, groups, carry)
                losses[:width] += values.detach()
                tick(step + 1, len(plan.index))
        return losses, plan.steps

    @torch.no_grad()
    def _step(
        self,
        optimiser: torch.optim.Optimizer,
        params: Tensors,
        start: Tensors,
        message: StackedMessage,
        groups: Mapping[str, Tensors],
        carry: Tensors,
    ) -> None:
        """One step of the optimiser, with the method's pull and limit on the gradient."""
        method = self.method
        pull = over_clients(method.pull, (0, 0, message.dims, 0))
        if not method.pull_after_step:
            for name, gradient in pull(params, start, groups, carry).items():
                before = params[name].grad
                params[name].grad = gradient if before is None else before.add_(gradient)
        if method.max_grad_norm is not None:
            clip_gradients(list(params.values()), method.max_grad_norm)
        optimiser.step()
        if method.pull_after_step:
            for name, gradient in pull(params, start, groups, carry).items():
                params[name].sub_(gradient, alpha=self.settings.lr)

    def _draws(
        self,
        draw: Callable[[torch.Generator, int], Tensors],
        generators: Sequence[torch.Generator],
    ) -> Tensors:
        """What is drawn for one step, stacked; padding rows draw too."""
        drawn = [draw(generator, self.settings.batch_size) for generator in generators]
        return {name: tensor.to(self.device) for name, tensor in stack(drawn).items()}

    def _changed(self, pixels: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """Training images after the random changes that settings ask for."""
        if not self.changes.active:
            return pixels
        drawn = self._draws(functools.partial(draw_changes, self.changes), generators)
        return augment(self.changes, pixels, drawn)

    def _epochs(self, round: int, client: int) -> Index:
        """(E, n_k) image indices, each epoch in its own random order."""
        rng = numpy_rng(self.seed, "order", round, client)
        own = self.clients[client]
        return np.stack([rng.permutation(own) for _ in range(self.settings.epochs)])

    # -- passes over the data ---------------------------------------------------------------------

    @torch.no_grad()
    def _sweep(
        self,
        sweep: Sweep,
        round: int,
        clients: Sequence[int],
        messages: Mapping[int, Record],
        tensors: Tensors,
    ) -> Tensors:
        """One pass over each client's data in stored order, with its own parameters."""
        message = StackedMessage([messages[k] for k in clients])
        size = self._sweep_room(sweep, tensors)[0]
        plan = plan_batches([self._seen(sweep, round, k)[None] for k in clients], size)
        draws = self._sweep_draws(sweep, round, clients, plan)
        carry = stack([sweep.start(unstack(tensors, m)) for m in range(len(clients))])
        carry = {name: tensor.to(self.device) for name, tensor in carry.items()}
        fold = torch.vmap(sweep.fold)
        for first, last, width in plan.segments():
            params, groups = narrow(tensors, width), message.first(width)
            part = narrow(carry, width)
            steps = (self._index(plan, step, width, trim=True) for step in range(first, last))
            looked: Iterator[tuple[Tensor, Tensor | None]] = ((index, None) for index in steps)
            if sweep.reads != "labels":
                looked = iter(self._gathered(steps))
            for step, (index, pixels) in enumerate(looked, start=first):
                rows = slice(step * size, step * size + index.shape[1])
                batch = self._batch(index, {})
                batch = batch._replace(draws={n: t[:width, rows] for n, t in draws.items()})
                values = self._values(sweep, params, message, groups, pixels, batch)
                part = fold(part, values, batch)
            for name, value in part.items():
                carry[name][:width] = value
        return torch.vmap(sweep.finish)(carry, tensors)

    def _values(
        self,
        sweep: Sweep,
        params: Tensors,
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
        dtype = next(iter(params.values())).dtype
        normalise = over_clients(self.method.normalise, (0, message.dims, 0))
        images = normalise(pixels, groups, {}).to(dtype)
        whole = {**params, **self._fixed(len(pixels), dtype)}
        if sweep.reads == "features":
            return self.model.features(whole, images)
        if sweep.reads == "gradients":
            return self._gradients(sweep, params, images, batch)
        return self.model.apply(whole, images)

    def _gradients(self, sweep: Sweep, params: Tensors, images: Tensor, batch: Batch) -> Tensors:
        """One gradient per image, (M, B, ...): each image is a client of the stacked model."""
        assert sweep.objective is not None, "a sweep over gradients needs an objective"
        clients, rows = images.shape[:2]
        single = images.flatten(0, 1).unsqueeze(1)
        with torch.enable_grad():
            leaves = {
                name: t.unsqueeze(1).expand(clients, rows, *t.shape[1:]).flatten(0, 1).detach()
                for name, t in params.items()
            }
            for leaf in leaves.values():
                leaf.requires_grad_()
            whole = {**leaves, **self._fixed(len(single), images.dtype)}
            outputs = self.model.apply(whole, single).view(clients, rows, -1)
            total = sweep.objective(outputs, batch).sum()
            # A parameter the outputs do not depend on has gradient zero, not none.
            found = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
        return {
            name: gradient.view(clients, rows, *gradient.shape[1:])
            for name, gradient in zip(leaves, found, strict=True)
        }

    def _sweep_stacks(
        self, sweep: Sweep, clients: Sequence[int], params: Tensors
    ) -> Iterator[slice]:
        """Parts of the stack that a sweep takes at a time."""
        width = self._sweep_room(sweep, params)[1] or len(clients)
        for first in range(0, len(clients), width):
            yield slice(first, first + width)

    def _sweep_room(self, sweep: Sweep, params: Tensors) -> tuple[int, int | None]:
        """Images and clients per step of a sweep (none: all): per-image gradients need room."""
        if sweep.reads != "gradients":
            return self.sweep_batch, None
        numbers = sum(t[0].numel() * t.element_size() for t in params.values())
        room = GRADIENT_BYTES.get(self.device.type, GRADIENT_BYTES["cpu"])
        rows = max(1, room // numbers)
        batch = min(self.sweep_batch, rows)
        return batch, rows // batch

    def _seen(self, sweep: Sweep, round: int, client: int) -> Index:
        """The images of a client that a sweep looks at, in stored order."""
        own = self.clients[client]
        if sweep.limit is None or len(own) <= sweep.limit:
            return own
        rng = numpy_rng(self.seed, "sweep", round, client)
        return np.sort(rng.choice(own, sweep.limit, replace=False))

    def _sweep_draws(self, sweep: Sweep, round: int, clients: Sequence[int], plan: Plan) -> Tensors:
        """What a sweep draws, (M, S · B, ...) each, every client from a generator of its own."""
        if sweep.draw is None:
            return {}
        rows = plan.index.shape[0] * plan.index.shape[2]
        drawn = []
        for m, k in enumerate(clients):
            images = int((plan.index[:, m] >= 0).sum())
            own = sweep.draw(torch_rng(self.seed, "sweep draws", round, k), images)
            drawn.append(
                {
                    n: torch.cat([t, t.new_zeros(rows - images, *t.shape[1:])])
                    for n, t in own.items()
                }
            )
        return {name: tensor.to(self.device) for name, tensor in stack(drawn).items()}

    # -- batches ----------------------------------------------------------------------------------

    def _gathered(self, steps: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """Indices and images of the steps to come."""
        return gathered(self.images, lambda i: self.images.gather(i, self.device), steps)

    def _index(self, plan: Plan, step: int, width: int, trim: bool = False) -> Tensor:
        """Image indices (width, B) of a step; trimmed, without rows that all clients only pad."""
        index = plan.index[step, :width]
        if trim:
            index = index[:, (index >= 0).any(axis=0)]
        return torch.from_numpy(index).to(self.device)

    def _batch(self, index: Tensor, weights: Tensors) -> Batch:
        """Labels and masks at ``index``; ``weights`` only where a loss is trained."""
        rows = (index >= 0).float()
        labels = self.labels[index].float()
        counted = rows.unsqueeze(-1).expand_as(labels)
        if self.known is not None:
            known = self.known[index]
            counted, labels = counted * known, labels * known  # what is unknown is not shown either
        if "label" in weights:
            counted = counted * weights["label"].unsqueeze(-2)
        return Batch(labels, rows, counted, weights.get("positive", ()))

    def _label_weights(self, clients: Sequence[int]) -> Tensors:
        """Per client (M, C), where the loss asks for them: factors on positives, absent labels."""
        settings = self.method.task.loss
        weights: Tensors = {}
        if settings.name == "balanced":
            found = [positive_weights(settings, *self._counts(k)) for k in clients]
            weights["positive"] = torch.stack(found)
        if settings.absent_label_weight != 1.0:
            found = [label_weights(settings, self._counts(k)[0]) for k in clients]
            weights["label"] = torch.stack(found)
        return weights

    def _counts(self, client: int) -> tuple[Tensor, Tensor]:
        """A client's positives and negatives per label (C,), among its known labels."""
        index = torch.from_numpy(self.clients[client]).to(self.device)
        positive = self.labels[index].bool()
        known = torch.ones_like(positive) if self.known is None else self.known[index]
        return (positive & known).sum(0), (~positive & known).sum(0)

    def _fixed(self, width: int, dtype: torch.dtype) -> Tensors:
        """The frozen tensors of a stack, without a copy."""
        cast = {n: t.to(dtype) if t.is_floating_point() else t for n, t in self.frozen.items()}
        return expand(cast, width)

    def view(self, client: int, round: int) -> ClientView:
        """What a client knows when a round begins."""
        memory = self.memory.read(client, before=round)
        kept = {name: tensor.to(self.device) for name, tensor in memory.items()}
        return ClientView(len(self.clients[client]), self._counts(client)[0], kept)
