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
            draw(generator, images)               random numbers of one batch
            normalise(images, message, draws)     pixels or features as they are -> model input
            inputs(batch, message, received)      what the head reads beside the image
            loss(outputs, batch, message, carry)  one batch of one client
            pull(params, start, message, carry)   gradient of a penalty on the parameters
            sweep                                 one pass over the client's data after training
            remember(round, reply)                what the client keeps for its next round
            received(view, message)               where the server sees sums: the own message,
            share(round, view, message, reply)    and what is added to the sum of the cohort
    server  share_forms(round, message, reply, images)   what such a share must look like
    server  aggregate(state, round, sent, replies)
            evaluation(state)                     the message that normalise sees at evaluation
            predict(outputs, state)               model outputs -> scores in [0, 1]

Only FedAvg's behaviour is built in; a method overrides what differs.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from fedharmony.aggregate import NUMBERS, ModelMean, weighted
from fedharmony.config import Checked
from fedharmony.losses import Batch, LossSettings, task_loss
from fedharmony.models.base import Head, unstack
from fedharmony.models.heads import LinearHead
from fedharmony.registry import Registry
from fedharmony.robust import Robust
from fedharmony.types import (
    BUFFERS,
    EVERYBODY,
    PARAMS,
    Form,
    Forms,
    Group,
    Groups,
    Messages,
    Record,
    Replies,
    Reply,
    Tensors,
)

methods: Registry[type[Method]] = Registry("method", "fedharmony.methods")


@dataclass(frozen=True)
class Task:
    """What a method may know before the first round."""

    classes: int
    clients: int
    rounds: int
    batch_size: int
    epochs: int
    seed: int
    width: int
    lr: float
    optimiser: Literal["adam", "sgd", "momentum"] = "adam"
    momentum: float = 0.9
    schedule: Literal["constant", "cosine"] = "constant"
    loss: LossSettings = field(default_factory=LossSettings)
    labels: tuple[str, ...] = ()
    average: Literal["size", "uniform"] = "size"
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    #: Whether inputs are images of pixels 0 to 255, with ``mean`` and ``std`` per channel and for
    #: pixels in [0, 1]; else they are feature vectors, with ``mean`` and ``std`` per feature.
    pixels: bool = True
    #: Whether some labels of the training images are unknown to the clients.
    unknown_labels: bool = False
    #: How models are averaged where clients may lie.
    robust: Robust = field(default_factory=Robust)
    #: What of a cohort reaches the server: each reply, or the sum of all.
    server_sees: Literal["replies", "sums"] = "replies"
    #: Whether shares are cut and sums get noise, for differential privacy.
    private: bool = False
    #: Clients per round, as expected of random cohorts.
    cohort: int = 1

    @property
    def sums(self) -> bool:
        """Whether the server sees nothing but sums over clients."""
        return self.server_sees == "sums"


@dataclass(frozen=True)
class ClientView:
    """What a client knows when a round begins: its number of images, positives, and memory.

    The memory is what :meth:`Method.remember` kept when it last took part; empty the first time.
    """

    examples: int
    counted: Tensor | Callable[[], Tensor]
    memory: Group = field(default_factory=dict)

    @property
    def positives(self) -> Tensor:
        """(C,) its positives per label."""
        return self.counted if isinstance(self.counted, Tensor) else self.counted()


#: What helps every method with a linear head: settings of the federation, as a preset that all
#: methods have. Measured in docs/results.md.
INGREDIENTS: Mapping[str, Any] = {
    "federation": {"head_start": "closed_form", "server_average": "adaptive"}
}


#: What a sweep is shown of each batch, beside its labels.
Reads = Literal["outputs", "labels", "features", "images", "gradients"]


@dataclass(frozen=True)
class Sweep:
    """One pass over a client's data: evaluation mode, no augmentation, no training.

    ``fold`` sees one batch of one client; padding rows have ``batch.rows == 0``. The result of
    ``finish`` is sent to the server as the group ``group``.

    Attributes:
        group: name of the group in the reply.
        reads: what ``fold`` is given beside the batch: the model's ``outputs`` (B, C); the
            ``labels`` (B, C), which spares the forward pass; the backbone's ``features`` (B, D);
            the ``images`` as they are, uint8 (B, channels, H, W) or features (B, F); or
            ``gradients``: per parameter (B, ...), one gradient of ``objective`` for each image.
        start: ``params -> carry``, the initial carry of every client of a stack, from the
            parameters of its first one.
        fold: ``(carry, values, batch) -> carry``.
        finish: ``(carry, params) -> tensors``.
        forms: ``params -> forms``: what the result looks like (shape, type, range), so that a wrong
            reply is refused.
        objective: for ``gradients``: outputs (..., B, C) and their batch to values (..., B).
        limit: look at no more than this many images of a client, drawn anew each round.
        draw: ``(generator, images) -> draws`` for all images of one client, handed to ``fold`` and
            ``objective`` as ``batch.draws``.
        during_training: fold the ``outputs`` of the last local epoch, as they come out of training,
            instead of a pass of its own; a stage without training makes the pass all the same.
    """

    group: str
    reads: Reads
    start: Callable[[Group], Tensors]
    fold: Callable[[Tensors, Any, Batch], Tensors]
    finish: Callable[[Tensors, Group], Tensors]
    forms: Callable[[Group], Mapping[str, Form]]
    objective: Callable[[Tensor, Batch], Tensor] | None = None
    limit: int | None = None
    draw: Callable[[torch.Generator, int], Tensors] | None = None
    during_training: bool = False

    def started(self, params: Group, clients: int, device: torch.device) -> Tensors:
        """The initial carry of a stack of clients with parameters (M, ...), (M, ...) each."""
        one = self.start(unstack(params, 0))
        return {n: torch.stack([t.to(device)] * clients) for n, t in one.items()}


def zeros(**shapes: tuple[int, ...]) -> Callable[[Group], Tensors]:
    """The ``start`` of a sweep that adds up in float64."""
    return lambda params: {n: torch.zeros(s, dtype=torch.float64) for n, s in shapes.items()}


@dataclass(frozen=True)
class Outcome:
    """What a stage leaves behind: the new state, the weights used, and numbers for the log.

    ``left_out`` says which clients the rule of averaging left out, and why.
    """

    state: Record
    weights: Mapping[int, float] = field(default_factory=dict)
    log: Mapping[str, float] = field(default_factory=dict)
    left_out: Mapping[int, str] = field(default_factory=dict)


#: Server before a stage: ``(state, round, clients) -> messages``, in client order.
Broadcast: TypeAlias = Callable[[Record, int, Sequence[int]], Messages]
#: Server after a stage: ``(state, round, sent, replies) -> outcome``, replies largest client first.
Aggregate: TypeAlias = Callable[[Record, int, Messages, Replies], Outcome]


@dataclass(frozen=True)
class Stage:
    """One exchange with clients.

    Attributes:
        name: unique within a round; clients elsewhere find the stage by it, and logs show it.
        train: whether clients train before the sweep; if so they return their model.
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


def members(rounds: Mapping[int, int]) -> Tensors:
    """Whose terms a sum holds, and of which round they are, as a group of the server's state."""
    clients = sorted(rounds)
    return {"client": torch.tensor(clients), "round": torch.tensor([rounds[k] for k in clients])}


def rounds_of(members: Group) -> dict[int, int]:
    """The round of each client's terms, from what :func:`members` gave; {} from nothing.

    >>> rounds_of(members({7: 2, 3: 1}))
    {3: 1, 7: 2}
    """
    clients, rounds = (members[n].tolist() if members else [] for n in ("client", "round"))
    return dict(zip(clients, rounds, strict=True))


def of_pixels(values: Tensor) -> Tensor:
    """Numbers per channel (..., channels) for pixels in [0, 1], as numbers for pixels 0 to 255.

    >>> of_pixels(torch.tensor([0.0, 0.2, 1.0])).flatten().tolist()
    [0.0, 51.0, 255.0]
    """
    return values[..., None, None] * 255.0


@functools.cache
def _constant(values: tuple[float, ...], pixels: bool, device: torch.device) -> Tensor:
    """Constants per channel of pixels 0 to 255, or per feature, made once per device."""
    constant = torch.tensor(values, device=device)
    return of_pixels(constant) if pixels else constant


class Method:
    """Base of all methods; by itself it is FedAvg's behaviour."""

    name: ClassVar[str] = ""

    @dataclass(frozen=True)
    class Config(Checked):
        """A method's settings; a subclass inherits from this, and states ``config: Config``."""

    config: Config
    #: Named bundles of settings; the first is the default, ``name:preset`` selects another. One may
    #: hold settings of the federation, too (``{"federation": {...}}``). Every method has ``plus``.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"default": {}}
    #: One setting and the values ``fedharmony tune`` tries for it.
    search: ClassVar[Mapping[str, Sequence[Any]]] = {}
    #: Whether the received model scores each batch, without gradient, for :meth:`inputs`.
    asks_received_model: bool = False
    #: Whether :meth:`draw` and :meth:`pull` are overridden; set by themselves.
    draws: ClassVar[bool] = False
    pulls: ClassVar[bool] = False
    #: Largest norm of a client's gradient; None leaves it alone.
    max_grad_norm: float | None = None

    def __init__(self, config: Config, task: Task) -> None:
        self.config = config
        self.task = task

    def __init_subclass__(cls) -> None:
        cls.draws, cls.pulls = cls.draw is not Method.draw, cls.pull is not Method.pull
        cls.presets = {**cls.presets, "plus": cls.presets.get("plus", INGREDIENTS)}

    @classmethod
    def suffix(cls, config: Config) -> str:
        """Added to the name wherever results are shown, for settings that change what it means."""
        return ""

    @property
    def no_sums(self) -> str:
        """Why the method cannot work where the server sees sums over clients only, with advice.

        Empty if it can: ``aggregate`` is then given one reply for a whole cohort, with its mean
        model and the sums of what its sweeps found.
        """
        if type(self).aggregate is Method.aggregate:
            return ""
        return (
            "its server side reads single replies. Use federation.server_sees = 'replies', or a "
            "method that averages models"
        )

    @property
    def no_privacy(self) -> str:
        """Why clients cannot be private with the method's settings, with advice; mostly empty."""
        return ""

    @property
    def remark(self) -> str:
        """What should be known of the method's settings before a run begins; mostly nothing."""
        return ""

    # -- model ------------------------------------------------------------------------------------

    def head(self, width: int) -> Head:
        """The classifier on top of the backbone's features."""
        return LinearHead(width, self.task.classes)

    # -- server, before ---------------------------------------------------------------------------

    def init_state(self, params: Tensors, buffers: Tensors) -> Record:
        """Server state before round 0."""
        return Record({PARAMS: params, BUFFERS: buffers})

    def stages(self, round: int) -> Sequence[Stage]:
        """The exchanges of a round, in order; the same on every side that asks with a round."""
        return [Stage("update", self.broadcast, self.aggregate, sweep=self.sweep())]

    def broadcast(self, state: Record, round: int, clients: Sequence[int]) -> Messages:
        """The same model for everybody, by reference."""
        message = Record({group: state.get(group) for group in (PARAMS, BUFFERS)})
        return dict.fromkeys(clients, message)

    def ask(self, state: Record, round: int, clients: Sequence[int]) -> Messages:
        """A message without a model, for stages whose sweep reads labels or images alone."""
        return dict.fromkeys(clients, Record())

    # -- client -----------------------------------------------------------------------------------

    @stacked
    def normalise(self, images: Tensor, message: Groups, draws: Group) -> Tensor:
        """Images (B, 3, H, W) uint8, or features (B, F), to the input the backbone expects.

        ``draws`` is empty outside of training.
        """
        # Compiled code keeps constants by itself.
        made = _constant.__wrapped__ if torch.compiler.is_compiling() else _constant
        task, device = self.task, images.device
        mean, std = (made(values, task.pixels, device) for values in (task.mean, task.std))
        return (images.float() - mean) / std

    def carry(self, view: ClientView, message: Record) -> Tensors:
        """What a client's loss carries from batch to batch, at the start of a round."""
        return {}

    def draw(self, generator: torch.Generator, images: int) -> Tensors:
        """The random numbers of one batch of one client, (images, ...) each, on the CPU.

        Called once per step with a generator of this client and round alone, so that neither the
        other clients nor the device change what is drawn.
        """
        return {}

    @stacked
    def inputs(self, batch: Batch, message: Groups, received: Tensor | None) -> Tensors:
        """What the head reads beside the image, (B, ...) each; the loss finds it in its batch.

        ``received`` holds the received model's outputs (B, C) if ``asks_received_model`` is set.
        """
        return {}

    @stacked
    def loss(
        self, outputs: Tensor, batch: Batch, message: Groups, carry: Tensors
    ) -> tuple[Tensor, Tensors]:
        """Loss of one batch of one client, and the carry for the next batch."""
        return task_loss(self.task.loss, outputs, batch), carry

    @stacked
    def pull(self, params: Group, start: Group, message: Groups, carry: Tensors) -> Tensors:
        """Gradient of a penalty on the parameters, by name; what is left out is not pulled.

        ``start`` is the received model. Given as a gradient because every penalty so far is
        elementwise: no graph, and one pass over the parameters.
        """
        return {}

    def sweep(self) -> Sweep | None:
        """The pass over local data that follows training, if the method needs one."""
        return None

    def remember(self, round: int, reply: Record) -> Tensors:
        """What a client keeps until it next takes part, from what it just sent; {} is nothing."""
        return {}

    # -- where the server sees sums ---------------------------------------------------------------

    def received(self, view: ClientView, message: Record) -> Record:
        """The message as the client reads it: it may add what follows from its own memory.

        Asked only where the server sees sums, and so cannot write a message for each client.
        """
        return message

    def share(self, round: int, view: ClientView, message: Record, reply: Reply) -> Record:
        """What a client adds to the sum of its cohort: its weighted model, and its own sums."""
        return weighted(reply.record, self.weight(reply))

    def share_forms(self, round: int, message: Record, reply: Forms, images: int) -> Forms:
        """What :meth:`share` gives where a reply has these forms, of a client with so many images.

        The server asks, and leaves out whoever sends something else: a client cannot claim another
        weight than that of the images that it has announced.
        """
        weight = self.weight(Reply(EVERYBODY, images, Record()))
        ranges = {"weight": (weight, weight), "examples": (images, images)}
        ranges |= {"loss": (-math.inf, math.inf), "rows": (0.0, math.inf)}
        forms = {
            group: {
                n: f._replace(dtype=torch.float64)
                for n, f in own.items()
                if f.dtype.is_floating_point
            }
            for group, own in reply.items()
        }
        return {**forms, NUMBERS: {n: Form((), torch.float64, *r) for n, r in ranges.items()}}

    # -- server, after ----------------------------------------------------------------------------

    def weight(self, reply: Reply) -> float:
        """Weight of a reply in a plain average: its number of images, or 1."""
        return float(reply.examples) if self.task.average == "size" else 1.0

    def model_mean(self, state: Record) -> ModelMean:
        """What a method folds models into: a mean, or the rule of ``federation.robust``."""
        return self.task.robust.mean(state)

    def aggregate(self, state: Record, round: int, sent: Messages, replies: Replies) -> Outcome:
        """``θ ← Σ_k p_k θ_k`` with ``p_k = n_k / Σ_j n_j`` over the clients that replied."""
        mean = self.model_mean(state)
        for reply in replies:
            mean.fold(reply, self.weight(reply))
        return Outcome(mean.update(state), mean.weights, left_out=mean.left_out)

    # -- evaluation -------------------------------------------------------------------------------

    def evaluation(self, state: Record) -> Groups:
        """The message that ``normalise`` sees when the global model is evaluated."""
        return {}

    def normalisation(self, state: Record) -> tuple[Sequence[float], Sequence[float]]:
        """Mean and standard deviation by which ``normalise`` works outside of training.

        Per channel for images in [0, 1], or per feature; for whoever uses the model elsewhere.
        """
        return self.task.mean, self.task.std

    def predict(self, outputs: Tensor, state: Record) -> Tensor:
        """Scores in [0, 1] from the model's outputs."""
        return outputs.sigmoid()

    def artifacts(self, state: Record) -> Tensors:
        """Tensors worth showing at the end (consensus correlation, clusters)."""
        return {}
