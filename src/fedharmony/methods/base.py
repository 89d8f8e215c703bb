"""What a method is: a few pure functions around one model, for one client and for the server.

A method is one class in one file. Its object never changes after construction: what a client needs
travels in its message, what the server remembers lives in its state, and both are
:class:`~fedharmony.types.Record`. Client functions are written for **one** client; the engine gives
them a client axis. Nothing here loops over clients except :meth:`Method.aggregate`, which consumes
replies as an iterator.

The hooks, in the order in which a round meets them::

    server  stages(round)                         usually one: "update"
            broadcast(state, round, clients)      one message per client (shared parts by reference)
    client  carry(view, message)                  what the loss carries from batch to batch
            normalise(images, message)            uint8 -> float
            loss(outputs, batch, message, carry)  one batch of one client
            sweep                                 one pass over the client's data after training
    server  aggregate(state, round, sent, replies)
            predict(outputs, state)               model outputs -> scores in [0, 1] (evaluation)

Only FedAvg's behaviour is built in; a method overrides what differs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from fedharmony.aggregate import ModelMean
from fedharmony.losses import Batch, binary_cross_entropy
from fedharmony.models.base import Head
from fedharmony.models.heads import LinearHead
from fedharmony.registry import Registry
from fedharmony.types import BUFFERS, PARAMS, Record, Reply, Tensors

methods: Registry[type[Method]] = Registry("method", "fedharmony.methods")

#: The groups of one client's message, as a method's client functions see them.
Groups = Mapping[str, Mapping[str, Tensor]]


@dataclass(frozen=True)
class Task:
    """What a method may know before the first round."""

    classes: int
    clients: int
    rounds: int
    batch_size: int
    epochs: int
    seed: int
    average: Literal["size", "uniform"] = "size"
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)


@dataclass(frozen=True)
class ClientView:
    """What a client knows of its own data: its size and its positives per label (C,)."""

    examples: int
    positives: Tensor


@dataclass(frozen=True)
class Sweep:
    """One pass over a client's whole data: evaluation mode, no augmentation, no gradient.

    ``fold`` sees one batch of one client; padding rows have ``batch.rows == 0``. The result of
    ``finish`` is sent to the server as the group ``group``.

    Attributes:
        group: name of the group in the reply.
        reads: what ``fold`` is given beside the batch: the model's ``outputs`` (B, C), or the
            ``labels`` themselves, which spares the forward pass.
        start: the initial carry of a client.
        fold: ``(carry, values, batch) -> carry``.
        finish: ``carry -> tensors``.
        shapes: shape of each tensor of the result, so that a wrong reply is refused.
    """

    group: str
    reads: Literal["outputs", "labels"]
    start: Callable[[], Tensors]
    fold: Callable[[Tensors, Tensor, Batch], Tensors]
    finish: Callable[[Tensors], Tensors]
    shapes: Mapping[str, tuple[int, ...]]


@dataclass(frozen=True)
class Outcome:
    """What a stage leaves behind: the new state, the weights used, and numbers for the log."""

    state: Record
    weights: Mapping[int, float] = field(default_factory=dict)
    log: Mapping[str, float] = field(default_factory=dict)


class Broadcast(Protocol):
    """Server before a stage: one message per client."""

    def __call__(self, state: Record, round: int, clients: Sequence[int]) -> Mapping[int, Record]:
        """Messages by client id, in client order."""


class Aggregate(Protocol):
    """Server after a stage: fold the replies, in client order, into a new state."""

    def __call__(
        self, state: Record, round: int, sent: Mapping[int, Record], replies: Iterator[Reply]
    ) -> Outcome:
        """``sent`` holds the messages this stage sent."""


@dataclass(frozen=True)
class Stage:
    """One exchange with clients.

    Attributes:
        name: shown in logs and errors.
        broadcast: makes the messages.
        aggregate: folds the replies.
        train: whether clients train before the sweep; if so they return their model.
        sweep: the pass over local data, if the stage has one.
        everyone: ask all clients instead of the round's cohort.
    """

    name: str
    broadcast: Broadcast
    aggregate: Aggregate
    train: bool = True
    sweep: Sweep | None = None
    everyone: bool = False


Function = TypeVar("Function", bound=Callable[..., Any])


def stacked(function: Function) -> Function:
    """Marks a client function whose every operation works on the last dimensions only.

    It then also takes a whole stack of clients, with a leading client axis on its arguments, and
    the engine calls it as it is. Without the mark the engine maps the function over clients with
    ``torch.vmap``: the same result, for about a quarter of a millisecond a step. The mark belongs
    to the function: a subclass that overrides it starts without.
    """
    function.stacked = True  # type: ignore[attr-defined]
    return function


@functools.cache
def _constant(values: tuple[float, ...], device: torch.device) -> Tensor:
    """Per-channel constants for pixel values 0 to 255, (channels, 1, 1), made once per device."""
    return torch.tensor(values, device=device).view(-1, 1, 1) * 255.0


class Method:
    """Base of all methods; by itself it is FedAvg's behaviour."""

    name: ClassVar[str] = ""
    #: Frozen dataclass of the method's settings.
    Config: ClassVar[type[Any]]
    #: Named bundles of settings; the first is the default, ``name:preset`` selects another.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}}

    def __init__(self, config: Any, task: Task) -> None:
        self.config = config
        self.task = task

    # -- model ------------------------------------------------------------------------------------

    def head(self, width: int) -> Head:
        """The classifier on top of the backbone's features."""
        return LinearHead(width, self.task.classes)

    # -- server, before ---------------------------------------------------------------------------

    def init_state(self, params: Tensors, buffers: Tensors) -> Record:
        """Server state before round 0."""
        return Record({PARAMS: params, BUFFERS: buffers})

    def stages(self, round: int) -> Sequence[Stage]:
        """The exchanges of a round."""
        return [Stage("update", self.broadcast, self.aggregate, sweep=self.sweep())]

    def broadcast(self, state: Record, round: int, clients: Sequence[int]) -> Mapping[int, Record]:
        """The same model for everybody, by reference."""
        message = Record({group: state.get(group) for group in (PARAMS, BUFFERS)})
        return dict.fromkeys(clients, message)

    # -- client -----------------------------------------------------------------------------------

    @stacked
    def normalise(self, images: Tensor, message: Groups) -> Tensor:
        """Images (B, 3, H, W) uint8 to the float input the backbone expects."""
        mean, std = (
            _constant(self.task.mean, images.device),
            _constant(self.task.std, images.device),
        )
        return (images.float() - mean) / std

    def carry(self, view: ClientView, message: Record) -> Tensors:
        """What a client's loss carries from batch to batch, at the start of a round."""
        return {}

    @stacked
    def loss(
        self, outputs: Tensor, batch: Batch, message: Groups, carry: Tensors
    ) -> tuple[Tensor, Tensors]:
        """Loss of one batch of one client, and the carry for the next batch."""
        return binary_cross_entropy(outputs, batch), carry

    def sweep(self) -> Sweep | None:
        """The pass over local data that follows training, if the method needs one."""
        return None

    # -- server, after ----------------------------------------------------------------------------

    def weight(self, reply: Reply) -> float:
        """Weight of a reply in a plain average: its number of images, or 1."""
        return float(reply.examples) if self.task.average == "size" else 1.0

    def aggregate(
        self, state: Record, round: int, sent: Mapping[int, Record], replies: Iterator[Reply]
    ) -> Outcome:
        """``θ ← Σ_k p_k θ_k`` with ``p_k = n_k / Σ_j n_j`` over the clients that replied."""
        mean, weights = ModelMean(), {}
        for reply in replies:
            weights[reply.client] = self.weight(reply)
            mean.add(reply.record, weights[reply.client])
        total = sum(weights.values())
        return Outcome(mean.update(state), {k: w / total for k, w in weights.items()})

    # -- evaluation -------------------------------------------------------------------------------

    def predict(self, outputs: Tensor, state: Record) -> Tensor:
        """Scores in [0, 1] from the model's outputs."""
        return outputs.sigmoid()

    def artifacts(self, state: Record) -> Tensors:
        """Tensors worth showing at the end (consensus correlation, clusters)."""
        return {}
