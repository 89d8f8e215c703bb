"""M clients at once, on one device: local training, then a pass over their data.

Parameters carry a leading client axis; the model is natively stacked; a method's functions, written
for one client, are mapped over that axis. Clients of unequal size keep their own batches: the stack
is ordered by size and shrinks as clients finish, so padding never enters a result.
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedharmony.data.augment import AugmentSettings, draw_changes
from fedharmony.data.base import LabelledImages, TensorImages
from fedharmony.engine.batches import Plan, beside_from, costs, plan_batches
from fedharmony.engine.lanes import Trained, all_finite
from fedharmony.engine.memory import ClientMemory
from fedharmony.engine.optimise import TrainSettings
from fedharmony.engine.prefetch import gathered, uploaded
from fedharmony.engine.stacking import OneClient, StackedMessage, expand, narrow, over_clients
from fedharmony.engine.training import Means, Tick, Trainer, Work
from fedharmony.losses import Batch, label_weights, positive_weights
from fedharmony.methods.base import ClientView, Groups, Method, Stage, Sweep
from fedharmony.models.base import Model, stack, unstack
from fedharmony.models.compiled import Compiled
from fedharmony.rng import numpy_rng, torch_rng
from fedharmony.types import BUFFERS, PARAMS, Index, Record, Reply, Tensors

#: What the per-image gradients of one step of a sweep may occupy, in bytes.
GRADIENT_BYTES = {"cpu": 1 << 28, "cuda": 1 << 33}
#: Priorities of stacks side by side: the longest goes first, the others fill what it leaves free.
FIRST, SECOND = -1, 0
#: Steps given out ahead of the device, per stack side by side, and seconds between looks at it.
AHEAD, PAUSE = 2, 1e-4


class _Side:
    """One of two sequences of work on a device, in a stream of its own where there are any."""

    def __init__(self, work: Iterator[None], stream: torch.cuda.Stream | None) -> None:
        self._work, self._stream = work, stream
        self._given: deque[torch.cuda.Event] = deque()
        if stream is not None:
            stream.wait_stream(torch.cuda.current_stream(stream.device))

    @property
    def full(self) -> bool:
        """Whether enough work is given out that the device has not done yet.

        More would keep the caller waiting, and the other side without work.
        """
        while self._given and self._given[0].query():  # type: ignore[no-untyped-call]
            self._given.popleft()
        return len(self._given) >= AHEAD

    def inside(self) -> AbstractContextManager[object]:
        """Where what this side works on is made."""
        return torch.cuda.stream(self._stream)

    def advance(self) -> bool:
        """Give out the next piece of work, if there is one."""
        with self.inside():
            moved = next(self._work, self) is not self
            if self._stream is not None:
                self._given.append(self._stream.record_event())
        return moved

    def join(self, results: Iterable[Trained]) -> None:
        """What follows waits for this side; its results live on there."""
        if self._stream is None:
            return
        current = torch.cuda.current_stream(self._stream.device)
        current.wait_stream(self._stream)
        for trained in results:
            tensors = [trained.losses, trained.finite, *trained.params.values()]
            found = {t.untyped_storage().data_ptr(): t for t in tensors if t is not None}
            for tensor in found.values():  # one of each storage: most are views
                tensor.record_stream(current)


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
        means: how to compute.
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
        means: Means | None = None,
    ) -> None:
        self.means = means or Means()
        self.model = model.compiled(self.means.backend) if self.means.compile else model
        self.method, self.settings = method, settings
        self.images, self.clients, self.seed, self.device = data.images, clients, seed, device
        self.sizes = [len(index) for index in clients]
        self.sweep_batch = sweep_batch
        self.frozen = {name: tensor.to(device) for name, tensor in (frozen or {}).items()}
        self.memory = memory or ClientMemory()
        self.changes = changes or AugmentSettings()
        self.labels = torch.from_numpy(data.labels).to(device)
        self.known = None if data.known is None else torch.from_numpy(data.known).to(device)
        self._shown: Callable[..., Tensor] = self._normalised
        if self.means.compile:
            self._shown = Compiled(self._normalised, self.means.backend)
        self._trainers = [self._trainer(FIRST)]

    def _trainer(self, priority: int) -> Trainer:
        """Memory and programs for one stack at a time."""
        images, device = self.images, self.device
        resident = isinstance(images, TensorImages) and images.pixels.device == device
        return Trainer(
            self.model,
            self.method,
            self.settings,
            device,
            self.means,
            self.frozen,
            self.changes,
            self._gathered,
            (lambda index: images.gather(index, device)) if resident else None,
            self._shown,
            self._batch,
            priority,
        )

    def rows(self, client: int) -> int:
        """Rows of a batch that a stack needs whose largest client this is."""
        return self.means.rows(self.sizes[client], self.settings.batch_size)

    def steps(self, client: int) -> int:
        """Steps of a client in a round."""
        return self.settings.epochs * -(-self.sizes[client] // self.settings.batch_size)

    def release(self) -> None:
        """Give memory back that is kept from stack to stack."""
        for trainer in self._trainers:
            trainer.release()

    def run(
        self,
        stage: Stage,
        round: int,
        messages: Mapping[int, Record],
        tick: Tick = lambda done, total: None,
    ) -> list[Reply]:
        """Carry out a stage for the clients of ``messages`` as one stack; replies in order."""
        work = self._work(round, messages) if stage.train else None
        trained = None if work is None else self._trainers[0].train(work, tick)
        return self._answers(stage, round, messages, work, trained)

    def run_abreast(
        self,
        stage: Stage,
        round: int,
        stacks: Sequence[Mapping[int, Record]],
        tick: Tick = lambda done, total: None,
    ) -> list[Reply]:
        """A stage with training for several stacks: the first one beside all the others.

        On a GPU both sides have a stream of their own. The first stack begins alone; at its narrow
        end the others fill what it leaves free. Results do not depend on it.
        """
        if len(self._trainers) < 2:
            self._trainers.append(self._trainer(SECOND))
        first_costs, *others = (
            costs([self.steps(k) for k in messages], self.rows(self._by_size(messages)[0]))
            for messages in stacks
        )
        alone = beside_from(first_costs, sum(int(each.sum()) for each in others))
        works: dict[int, Work] = {}
        trained: dict[int, Trained] = {}

        def prepared(stack: int) -> Work:
            if stack not in works:
                works[stack] = self._work(round, stacks[stack])
            return works[stack]

        shares = ([0], range(1, len(stacks)))
        first, second = (
            _Side(self._side(trainer, prepared, share, trained), trainer.stream)
            for trainer, share in zip(self._trainers, shares, strict=True)
        )
        done, total = 0, len(first_costs) + sum(map(len, others))
        working = [first, second]
        while working:
            free = working if done >= alone else [first]
            ready = [side for side in free if not side.full]
            if not ready:  # time to prepare what the second side will do
                ahead = next((i for i in range(1, len(stacks)) if i not in works), None)
                if ahead is None:
                    time.sleep(PAUSE)
                else:
                    with second.inside():
                        prepared(ahead)
                continue
            for side in ready:
                if not side.advance():
                    working.remove(side)
            done = min(total, done + len(ready))  # a side's last move gives its result only
            tick(done, total)
        for side in (first, second):
            side.join(trained.values())
        replies = [
            self._answers(stage, round, messages, works[i], trained[i])
            for i, messages in enumerate(stacks)
        ]
        return [reply for part in replies for reply in part]

    def _side(
        self,
        trainer: Trainer,
        prepared: Callable[[int], Work],
        share: Iterable[int],
        trained: dict[int, Trained],
    ) -> Iterator[None]:
        """One stack of a share after the other, step by step."""
        for i in share:
            steps = trainer.steps(prepared(i))
            while i not in trained:
                try:
                    next(steps)
                except StopIteration as done:  # at once on to the next: a pause would be seen
                    trained[i] = done.value
                else:
                    yield

    def _answers(
        self,
        stage: Stage,
        round: int,
        messages: Mapping[int, Record],
        work: Work | None,
        trained: Trained | None,
    ) -> list[Reply]:
        """The pass over local data, and the replies in the order of the messages."""
        clients = self._by_size(messages)
        message = work.message if work else StackedMessage([messages[k] for k in clients])
        results: list[dict[str, Mapping[str, Tensor]]] = [{} for _ in clients]
        scalars: list[dict[str, float]] = [{} for _ in clients]
        finite = None if trained is None else trained.finite
        if stage.sweep is not None:
            tensors = trained.params if trained else message.stacked(PARAMS)
            for part in self._sweep_stacks(stage.sweep, clients, tensors):
                own = {name: tensor[part] for name, tensor in tensors.items()}
                swept = self._sweep(stage.sweep, round, clients[part], messages, own)
                for m, result in enumerate(results[part]):
                    result[stage.sweep.group] = unstack(swept, m)
                if finite is not None:
                    for tensor in swept.values():
                        finite[part] &= all_finite(tensor)
        good: list[bool | None] = [None] * len(clients)
        if trained and work:  # last: the losses are read when all work has been given out
            steps, total = work.plan.steps, sum(self.sizes[k] for k in clients)
            read = trained.losses if finite is None else torch.stack([trained.losses, finite])
            losses, *flags = read.view(-1, len(clients)).tolist()
            good = [flag > 0 for flag in flags[0]] if flags else good
            for m, loss in enumerate(losses):
                results[m] = {PARAMS: trained.each[m], BUFFERS: {}, **results[m]}
                scalars[m] = {
                    "loss": loss / int(steps[m]),
                    "steps": int(steps[m]),
                    "rows": trained.rows * self.sizes[clients[m]] / total,  # padding is shared
                }
        replies = {
            k: Reply(k, self.sizes[k], Record(results[m], scalars[m]), good[m])
            for m, k in enumerate(clients)
        }
        if stage.train:
            for k, reply in replies.items():
                if kept := self.method.remember(round, reply.record):
                    self.memory.write(k, round, kept)
        return [replies[k] for k in messages]

    # -- training ---------------------------------------------------------------------------------

    def _by_size(self, clients: Iterable[int]) -> list[int]:
        return sorted(clients, key=lambda k: -self.sizes[k])

    def _work(self, round: int, messages: Mapping[int, Record]) -> Work:
        """E epochs of each client of a stack, largest first."""
        method, clients = self.method, self._by_size(messages)
        message = StackedMessage([messages[k] for k in clients])
        plan = plan_batches([self._epochs(round, k) for k in clients], self.rows(clients[0]))
        views = [self.view(k, round) for k in clients]
        changes = functools.partial(draw_changes, self.changes)
        return Work(
            plan,
            message,
            method.carries(views, [messages[k] for k in clients]),
            self._label_weights(clients),
            self._drawn(method.draw, "draws", round, clients, plan) if method.draws else {},
            self._drawn(changes, "augment", round, clients, plan) if self.changes.active else {},
        )

    def _drawn(
        self,
        draw: Callable[[torch.Generator, int], Tensors],
        purpose: str,
        round: int,
        clients: Sequence[int],
        plan: Plan,
    ) -> Tensors:
        """What is drawn for all steps, (S, M, B, ...) each, every client from its own generator.

        A batch draws for as many rows as a full one, whatever it holds.
        """
        steps, wide, rows = len(plan.index), self.means.width(len(clients)), plan.index.shape[2]
        places: Tensors = {}
        for m, k in enumerate(clients):
            generator = torch_rng(self.seed, purpose, round, k)
            for step in range(int(plan.steps[m])):
                for name, drawn in draw(generator, self.settings.batch_size).items():
                    if name not in places:
                        places[name] = drawn.new_zeros(steps, wide, rows, *drawn.shape[1:])
                    places[name][step, m] = drawn[:rows]
        return {name: tensor.to(self.device) for name, tensor in places.items()}

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
        seen = [self._seen(sweep, round, k) for k in clients]
        size = self.means.rows(len(seen[0]), self._sweep_room(sweep, tensors)[0])
        plan = plan_batches([index[None] for index in seen], size)
        index = uploaded(torch.from_numpy(plan.index), self.device)
        read = tensors if sweep.reads == "gradients" else self.means.lowered(tensors)
        draws = self._sweep_draws(sweep, round, clients, plan)
        carry = stack([sweep.start(OneClient(tensors, m)) for m in range(len(clients))])
        carry = {name: tensor.to(self.device) for name, tensor in carry.items()}
        fold = torch.vmap(sweep.fold)
        for first, last, width in plan.segments():
            params, groups = narrow(read, width), message.first(width)
            part = narrow(carry, width)
            steps = (self._index(plan, index, step, width) for step in range(first, last))
            looked: Iterator[tuple[Tensor, Tensor | None]] = ((shown, None) for shown in steps)
            if sweep.reads != "labels":
                looked = iter(self._gathered(steps))
            for step, (shown, pixels) in enumerate(looked, start=first):
                rows = slice(step * size, step * size + shown.shape[1])
                batch = self._batch(shown, {})
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
        # Half-precision copies of matrices aside, a pass is as precise as its parameters.
        dtype = next(t.dtype for t in params.values() if t.dtype != torch.bfloat16)
        if sweep.reads == "gradients":
            images = self._shown(pixels, groups, message.dims, {}, dtype)
            return self._gradients(sweep, params, images, batch)
        images = self._shown(pixels, groups, message.dims, {}, self.means.product_dtype(dtype))
        whole = {**params, **self._fixed(len(pixels), dtype)}
        with self.means.autocast(self.device):
            wanted = self.model.features if sweep.reads == "features" else self.model.apply
            return wanted(whole, images).to(dtype)

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

    def _normalised(
        self, pixels: Tensor, groups: Groups, dims: Any, draws: Tensors, dtype: torch.dtype
    ) -> Tensor:
        """Images (M, B, 3, H, W) as the model takes them in; ``dims`` of ``groups`` as for vmap."""
        normalise = over_clients(self.method.normalise, (0, dims, 0))
        images: Tensor = normalise(pixels, groups, draws).to(dtype)
        return images

    def _index(self, plan: Plan, index: Tensor, step: int, width: int) -> Tensor:
        """Image indices (width, B) of a step, without rows that all clients only pad."""
        if self.means.few_shapes:
            return index[step, :width]
        images = int((plan.index[step, :width] >= 0).sum(axis=1).max())  # padding comes last
        return index[step, :width, :images]

    def _batch(self, index: Tensor, weights: Tensors) -> Batch:
        """Labels and masks at ``index``; ``weights`` only where a loss is trained."""
        rows = (index >= 0).float()
        labels = self.labels[index].float()
        counted = rows.unsqueeze(-1).expand_as(labels)
        known: Tensor | tuple[()] = ()
        if self.known is not None:
            known = counted = counted * self.known[index]
            labels = labels * known  # what is unknown is not shown either
        if "label" in weights:
            counted = counted * weights["label"].unsqueeze(-2)
        return Batch(labels, rows, counted, weights.get("positive", ()), known=known)

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
        return ClientView(self.sizes[client], lambda: self._counts(client)[0], kept)
