"""What clients hold: images, labels, the order they are shown in, memory between rounds."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedharmony.data.base import LabelledImages, TensorImages
from fedharmony.engine.batches import Plan
from fedharmony.engine.memory import ClientMemory
from fedharmony.losses import Batch, LossSettings, label_weights, positive_weights
from fedharmony.methods.base import ClientView
from fedharmony.rng import numpy_rng, torch_rng
from fedharmony.types import Index, Tensors

#: Steps whose images are read ahead.
AHEAD = 2


class ClientData:
    """The data of all clients, as batches on a device.

    ``resident`` images lie on the device, so that a step can fetch them itself.
    """

    def __init__(
        self,
        data: LabelledImages,
        clients: Mapping[int, Index],
        seed: int,
        device: torch.device,
        memory: ClientMemory,
    ) -> None:
        self.images, self.clients, self.seed = data.images, clients, seed
        self.device, self.memory = device, memory
        self.sizes = {k: len(index) for k, index in clients.items()}
        self.labels = torch.from_numpy(data.labels).to(device)
        self.known = None if data.known is None else torch.from_numpy(data.known).to(device)
        held = data.images.pixels if isinstance(data.images, TensorImages) else None
        self.resident = held is not None and held.device == device
        self._reads_ahead = held is None

    def by_size(self, clients: Iterable[int]) -> list[int]:
        """Clients, largest first: the order of a stack."""
        return sorted(clients, key=lambda k: -self.sizes[k])

    def view(self, client: int, round: int) -> ClientView:
        """What a client knows when a round begins."""
        memory = self.memory.read(client, before=round)
        kept = {name: tensor.to(self.device) for name, tensor in memory.items()}
        return ClientView(self.sizes[client], lambda: self.counts(client)[0], kept)

    def counts(self, client: int) -> tuple[Tensor, Tensor]:
        """A client's positives and negatives per label (C,), among its known labels."""
        index = torch.from_numpy(self.clients[client]).to(self.device)
        positive = self.labels[index].bool()
        known = torch.ones_like(positive) if self.known is None else self.known[index]
        return (positive & known).sum(0), (~positive & known).sum(0)

    def label_weights(self, loss: LossSettings, clients: Sequence[int]) -> Tensors:
        """Per client (M, C), where the loss asks for them: factors on positives, absent labels."""
        weights: Tensors = {}
        if loss.name == "balanced":
            found = [positive_weights(loss, *self.counts(k)) for k in clients]
            weights["positive"] = torch.stack(found)
        if loss.absent_label_weight != 1.0:
            found = [label_weights(loss, self.counts(k)[0]) for k in clients]
            weights["label"] = torch.stack(found)
        return weights

    # -- which images, and what is drawn for them --------------------------------------------------

    def epochs(self, round: int, client: int, count: int) -> Index:
        """(E, n_k) image indices, each epoch in its own random order."""
        rng = numpy_rng(self.seed, "order", round, client)
        return np.stack([rng.permutation(self.clients[client]) for _ in range(count)])

    def some(self, round: int, client: int, limit: int | None) -> Index:
        """A client's images in stored order; no more than ``limit``, drawn anew each round."""
        own = self.clients[client]
        if limit is None or len(own) <= limit:
            return own
        rng = numpy_rng(self.seed, "sweep", round, client)
        return np.sort(rng.choice(own, limit, replace=False))

    def drawn(
        self,
        round: int,
        clients: Sequence[int],
        plan: Plan,
        width: int,
        batch_size: int,
        draw: Callable[[torch.Generator, int], Tensors],
        purpose: str,
    ) -> Tensors:
        """What is drawn for all steps, (S, width, B, ...) each, each client from its own generator.

        A batch draws for as many rows as a full one, whatever it holds.
        """
        steps, rows = len(plan.index), plan.index.shape[2]
        places: Tensors = {}
        for m, k in enumerate(clients):
            generator = torch_rng(self.seed, purpose, round, k)
            for step in range(int(plan.steps[m])):
                for name, drawn in draw(generator, batch_size).items():
                    if name not in places:
                        places[name] = drawn.new_zeros(steps, width, rows, *drawn.shape[1:])
                    places[name][step, m] = drawn[:rows]
        return {name: tensor.to(self.device) for name, tensor in places.items()}

    # -- batches -----------------------------------------------------------------------------------

    def upload(self, values: npt.NDArray[Any]) -> Tensor:
        """Numbers on the device; pinned memory spares a GPU the wait for what it still does."""
        tensor = torch.from_numpy(values)
        if self.device.type != "cuda":
            return tensor.to(self.device)
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def pixels(self, index: Tensor) -> Tensor:
        """The images at an index of any shape, on the device."""
        return self.images.gather(index, self.device)

    def looks(
        self, plan: Plan, index: Tensor, steps: range, width: int, exact: bool, fetch: bool
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Image indices (width, B) of each step and, where they are fetched here, the images.

        ``exact`` leaves out rows that all clients only pad.
        """
        rows = (plan.rows(t, width) if exact else None for t in steps)
        indices = (index[t, :width, :row] for t, row in zip(steps, rows, strict=True))
        return self.gathered(indices) if fetch else ((own, None) for own in indices)

    def gathered(self, steps: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor]]:
        """``(index, images at index)`` for each index; from files, a thread reads ahead."""
        if not self._reads_ahead:
            yield from ((index, self.pixels(index)) for index in steps)
            return
        waiting: deque[tuple[Tensor, Future[Tensor]]] = deque()
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="images") as pool:
            todo = iter(steps)
            for index in islice(todo, AHEAD):
                waiting.append((index, pool.submit(self.pixels, index)))
            while waiting:
                index, ready = waiting.popleft()
                found = ready.result()
                for following in islice(todo, 1):
                    waiting.append((following, pool.submit(self.pixels, following)))
                yield index, found

    def batch(self, index: Tensor, weights: Tensors) -> Batch:
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
