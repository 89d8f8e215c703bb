"""Local training of a stack of clients: one program per shape, in memory that stays.

A step is a function of tensors at fixed places: parameters, moments, what the method's loss
carries, and small buffers that say which images come next. On a CPU the function is simply called.
On CUDA each shape of step is recorded once as a CUDA graph, backward pass and optimiser included,
and replayed: a step then costs one launch, whatever the method does in it. Widths and numbers of
rows are rounded up to few sizes, so that few shapes are recorded; rows and clients added that way
are masked and left out of every result.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedharmony.data.augment import AugmentSettings, augment
from fedharmony.engine.batches import Plan
from fedharmony.engine.lanes import Lanes, NamedLanes, PackedLanes, Trained
from fedharmony.engine.optimise import TrainSettings, clip_gradients
from fedharmony.engine.prefetch import uploaded
from fedharmony.engine.stacking import StackedMessage, expand, narrow, over_clients
from fedharmony.losses import Batch
from fedharmony.methods.base import Groups, Method
from fedharmony.models.base import Model
from fedharmony.models.compiled import Compiled
from fedharmony.types import PARAMS, Tensors

#: Called with (steps done, steps in all) during local training.
Tick = Callable[[int, int], None]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Means:
    """How to compute; results agree up to rounding.

    Attributes:
        half: products in bfloat16; parameters, moments, losses and correlations stay float32.
        graphs: record each shape of step once as a CUDA graph.
        compile: compile the parts of the backbone, and the optimiser's pass.
        fixed: keep tensors in place and shapes few, as graphs need it, even without graphs.
        backend: of ``torch.compile``.
    """

    half: bool = False
    graphs: bool = False
    compile: bool = False
    fixed: bool = False
    backend: str = "inductor"

    @property
    def few_shapes(self) -> bool:
        """Whether a new shape is expensive."""
        return self.graphs or self.compile or self.fixed

    def autocast(self, device: torch.device) -> AbstractContextManager[object]:
        """Where products are taken in half precision."""
        return torch.autocast(device.type, torch.bfloat16) if self.half else nullcontext()

    def product_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """What products are taken in, where everything else is ``dtype``."""
        return torch.bfloat16 if self.half else dtype

    def halved(self, tensors: Mapping[str, Tensor]) -> frozenset[str]:
        """Names of the weight matrices, which enter products only, if these are in half precision.

        Their copies in bfloat16 are what autocast would make, once per step instead of per use.
        """
        if not self.half:
            return frozenset()
        return frozenset(n for n, t in tensors.items() if n.endswith(".weight") and t.dim() > 2)

    def lowered(self, tensors: Mapping[str, Tensor]) -> Tensors:
        """Stacked tensors as the model reads them."""
        half = self.halved(tensors)
        return {n: t.bfloat16() if n in half else t for n, t in tensors.items()}

    def rows(self, most: int, batch_size: int) -> int:
        """Rows of a batch that must hold ``most`` images: exactly, or the next of few sizes.

        >>> Means().rows(5, 16), Means(graphs=True).rows(5, 16), Means(graphs=True).rows(11, 11)
        (5, 6, 11)
        """
        most = min(most, batch_size)
        return min(batch_size, rounded_up(most)) if self.few_shapes else most

    def width(self, clients: int) -> int:
        """Width of a program for so many clients, likewise.

        >>> Means().width(9), [Means(graphs=True).width(w) for w in (1, 3, 5, 9, 17, 33)]
        (9, [1, 3, 5, 9, 18, 36])
        """
        return rounded_up(clients, bits=4) if self.few_shapes else clients


def rounded_up(number: int, bits: int = 2) -> int:
    """The next number with no more than so many leading bits: few sizes, little added.

    >>> [rounded_up(n) for n in (1, 2, 3, 5, 7, 9, 13, 17)], rounded_up(17, bits=3)
    ([1, 2, 3, 6, 8, 12, 16, 24], 20)
    """
    grain: int = 1 << max(0, (number - 1).bit_length() - bits)
    return -(-number // grain) * grain


@dataclass(frozen=True)
class Work:
    """What a stack of clients is asked to do.

    Attributes:
        plan: which images at which step.
        message: what the clients received.
        carry: what their losses carry, (M, ...) each.
        weights: of labels and positives in the loss, (M, C) each, where it asks for them.
        draws: random numbers of each step, (S, M, B, ...) each.
        changes: of the training images at each step, likewise.
    """

    plan: Plan
    message: StackedMessage
    carry: Tensors
    weights: Tensors = field(default_factory=dict)
    draws: Tensors = field(default_factory=dict)
    changes: Tensors = field(default_factory=dict)


class Fed(NamedTuple):
    """What changes from step to step: which images, and what was drawn for them."""

    images: Tensor
    pixels: Tensor | None
    draws: Tensors
    changes: Tensors

    def tensors(self) -> Iterator[Tensor]:
        """All of them, in a fixed order."""
        yield self.images
        if self.pixels is not None:
            yield self.pixels
        yield from self.draws.values()
        yield from self.changes.values()

    def placed(self) -> Fed:
        """A copy whose tensors stay where they are."""
        return Fed(
            self.images.clone(),
            None if self.pixels is None else self.pixels.clone(),
            {n: t.clone() for n, t in self.draws.items()},
            {n: t.clone() for n, t in self.changes.items()},
        )


class Recorder:
    """Records graphs that are replayed one at a time, in memory and in a stream of their own.

    Graphs of two recorders may be replayed side by side. Libraries keep scratch memory per stream
    (cuBLAS does), which is recorded along: recorded in one stream, each of them would write into
    the other's. (Recorded in one stream, a run gave NaN, and none since; that this was the reason
    is a conclusion, not shown by itself.)
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self._pool, self._stream = torch.cuda.graph_pool_handle(), stream

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The graph of what ``work`` would do on the device."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream):
                work()
        except RuntimeError:
            # The memory is still taken for under record: whatever came next would fail, too.
            self._pool = torch.cuda.graph_pool_handle()
            raise
        return graph


class Program:
    """A step that can be repeated: called, or recorded at its second call and replayed.

    The first call runs the step as it is, which also lets libraries allocate and compile.
    """

    def __init__(self, step: Callable[[Fed], None], recorder: Recorder | None = None) -> None:
        self._step, self._recorder = step, recorder
        self._fed: Fed | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, fed: Fed) -> None:
        """One step."""
        if self._fed is None:
            self._fed = fed.placed()
            self._step(self._fed)
            return
        placed = self._fed
        for place, tensor in zip(placed.tensors(), fed.tensors(), strict=True):
            place.copy_(tensor)
        if self._recorder is None:
            self._step(placed)
            return
        if self._graph is None:
            try:
                self._graph = self._recorder.record(lambda: self._step(placed))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # recording runs nothing: the step is still to be done
                first = str(error).strip().splitlines()[0]
                log.warning("A step cannot be recorded (%s) and is launched piece by piece.", first)
                self._recorder = None
                self._step(placed)
                return
        self._graph.replay()


@dataclass
class Bound:
    """A stack's lanes and everything else its steps read, for one structure of messages.

    Attributes:
        lanes: the memory of the stack.
        message: what the clients received.
        carry: what their losses carry, (M, ...) each.
        weights: of labels and positives in the loss.
        constants: the frozen tensors.
        fixed: whether tensors must stay where they are.
        programs: by width and rows.
    """

    lanes: Lanes
    message: StackedMessage
    carry: Tensors
    weights: Tensors
    constants: Tensors
    fixed: bool = False
    programs: dict[tuple[int, int], Program] = field(default_factory=dict)

    def keep(self, carry: Tensors, width: int) -> None:
        """The carry of the first ``width`` clients after a step."""
        if not self.fixed:
            self.carry = carry
            return
        for name, tensor in carry.items():
            place = self.carry[name][:width]
            if place.data_ptr() != tensor.data_ptr():
                place.copy_(tensor)


class Trainer:
    """Trains stacks of clients on one device.

    Args:
        model: what is trained, compiled where ``means`` says so.
        method: whose client functions are run.
        settings: of local training.
        device: where to compute.
        means: how.
        frozen: the model's frozen tensors.
        changes: random changes of training images.
        gathered: indices of the steps to come to (index, pixels), read ahead.
        fetch: image indices to pixels on the device; None if images are elsewhere.
        shown: pixels, message, its client axes, draws and a type to images for the model.
        labelled: image indices and label weights to a batch.
        priority: among trainers side by side; the lowest number goes first.

    Attributes:
        stream: where its graphs are recorded, and run while another trainer works; none on a CPU.
    """

    def __init__(
        self,
        model: Model,
        method: Method,
        settings: TrainSettings,
        device: torch.device,
        means: Means,
        frozen: Mapping[str, Tensor],
        changes: AugmentSettings,
        gathered: Callable[[Iterable[Tensor]], Iterator[tuple[Tensor, Tensor]]],
        fetch: Callable[[Tensor], Tensor] | None,
        shown: Callable[[Tensor, Groups, Any, Tensors, torch.dtype], Tensor],
        labelled: Callable[[Tensor, Tensors], Batch],
        priority: int = 0,
    ) -> None:
        self.model, self.method, self.settings = model, method, settings
        self.device, self.means, self.frozen, self.changes = device, means, frozen, changes
        self._gathered, self._fetch, self._shown = gathered, fetch, shown
        self._labelled = labelled
        self._lanes: PackedLanes | None = None
        self._bound: dict[object, Bound] = {}
        native = getattr(method.loss, "stacked", False)
        self._loss = Compiled(self._kept_loss, means.backend) if means.compile and native else None
        self.stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device, priority)  # type: ignore[no-untyped-call]
        self._recorder = Recorder(self.stream) if means.graphs and self.stream else None

    def train(self, work: Work, tick: Tick) -> Trained:
        """What becomes of a stack of clients."""
        steps = self.steps(work)
        while True:
            try:
                tick(next(steps), len(work.plan.index))
            except StopIteration as done:
                trained: Trained = done.value
                return trained

    def steps(self, work: Work) -> Generator[int, None, Trained]:
        """The training of a stack, step by step: how many are done; at last, what became of it."""
        plan, clients = work.plan, len(work.plan.steps)
        bound = self._bind(work)
        lanes, lowest, rows = bound.lanes, clients, 0
        # Rounded up, a stack may end with clients that do not exist: they see padding only.
        index = torch.full((len(plan.index), lanes.size, plan.index.shape[2]), -1)
        index[:, :clients] = torch.from_numpy(plan.index)
        index = uploaded(index, self.device)
        for first, last, width in plan.segments():
            wide = min(lanes.size, self.means.width(width))
            if width < min(wide, lowest):  # their lanes go on, they do not
                lanes.save(width, min(wide, lowest))
                lowest = width
            program = self._program(bound, wide, index.shape[2])
            rows += (last - first) * wide * index.shape[2]
            steps = (index[step, :wide] for step in range(first, last))
            for step, (shown, pixels) in enumerate(self._seen(steps), start=first):
                draws, changes = (
                    {n: t[step, :wide] for n, t in drawn.items()}
                    for drawn in (work.draws, work.changes)
                )
                program(Fed(shown, pixels, draws, changes))
                yield step + 1
        return lanes.result(clients)._replace(rows=rows)

    def release(self) -> None:
        """Give recorded programs and their memory back, once they are done."""
        if self.means.graphs:
            torch.cuda.synchronize(self.device)
        self._bound.clear()
        self._lanes = None

    def _seen(self, steps: Iterable[Tensor]) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Indices of the steps to come; with pixels, unless the step fetches them itself."""
        if self._fetch is not None:
            return ((index, None) for index in steps)
        return iter(self._gathered(steps))

    def _bind(self, work: Work) -> Bound:
        """Lanes that hold the received model, and everything else where steps find it."""
        message = work.message
        if not self.means.few_shapes:
            named = NamedLanes(message.stacked(PARAMS), self.settings)
            return Bound(named, message, work.carry, work.weights, self._constants(named))
        lanes = self._held_lanes(message, len(work.plan.steps))
        key = (message.signature, _signature(work.carry), _signature(work.weights))
        bound = self._bound.get(key)
        if bound is None:
            bound = self._bound[key] = Bound(
                lanes,
                message.placed(lanes.size),
                _placed(work.carry, lanes.size),
                _placed(work.weights, lanes.size),
                self._constants(lanes),
                fixed=True,
            )
        bound.message.fill(message, model=self.method.consults or self.method.pulls)
        for places, tensors in ((bound.carry, work.carry), (bound.weights, work.weights)):
            for name, tensor in tensors.items():
                places[name][: len(tensor)].copy_(tensor)
        return bound

    def _held_lanes(self, message: StackedMessage, clients: int) -> PackedLanes:
        """The lanes of earlier stacks if they suffice, with the received model in them."""
        size, packed = self.means.width(clients), message.packed(PARAMS)
        if self._lanes is None or self._lanes.size < size:
            self.release()
            received, means = message.stacked(PARAMS), self.means
            half = means.halved(received)
            self._lanes = PackedLanes(
                received, size, self.settings, half, means.compile, means.backend
            )
        if packed is not None and packed.layout == self._lanes.layout:
            self._lanes.load_row(packed.row, clients)
        else:
            self._lanes.load(message.stacked(PARAMS))
        return self._lanes

    def _constants(self, lanes: Lanes) -> Tensors:
        """The frozen tensors of a stack, without a copy."""
        cast = {
            n: t.to(lanes.dtype) if t.is_floating_point() else t for n, t in self.frozen.items()
        }
        return expand(cast, lanes.size)

    # -- one step ---------------------------------------------------------------------------------

    def _program(self, bound: Bound, width: int, rows: int) -> Program | Callable[[Fed], None]:
        """The step of the first ``width`` lanes."""
        program = bound.programs.get((width, rows))
        if program is None:
            leaves = bound.lanes.leaves(width)

            def step(fed: Fed) -> None:
                self._step(bound, width, leaves, fed)

            if not bound.fixed:
                return step
            program = Program(step, self._recorder)
            bound.programs[width, rows] = program
        return program

    def _step(self, bound: Bound, width: int, leaves: Tensors, fed: Fed) -> None:
        """One batch of each client: forward, backward, the method's pull, the optimiser."""
        method, dims, dtype = self.method, bound.message.dims, bound.lanes.dtype
        groups, carry = bound.message.first(width), narrow(bound.carry, width)
        constants = narrow(bound.constants, width)
        received = narrow(bound.message.stacked(PARAMS), width)
        batch = self._labelled(fed.images, narrow(bound.weights, width))._replace(draws=fed.draws)
        pixels = self._fetch(fed.images) if self._fetch is not None else fed.pixels
        assert pixels is not None
        if self.changes.active:
            pixels = augment(self.changes, pixels, fed.changes)
        images = self._shown(pixels, groups, dims, fed.draws, self.means.product_dtype(dtype))
        inputs = over_clients(method.inputs, (0, dims, 0 if method.consults else None))
        with self.means.autocast(self.device):
            opinion = None
            if method.consults:
                with torch.no_grad():
                    opinion = self.model.apply({**received, **constants}, images).to(dtype)
            batch = batch._replace(inputs=inputs(batch, groups, opinion))
            outputs = self.model.apply({**leaves, **constants}, images, batch.inputs)
        if self._loss is not None:
            values = self._loss(outputs.to(dtype), batch, groups, carry)
        else:
            loss = over_clients(method.loss, (0, 0, dims, 0))
            values, carry = loss(outputs.to(dtype), batch, groups, carry)
        found = torch.autograd.grad(values.sum(), list(leaves.values()), allow_unused=True)
        gradients = {n: g for n, g in zip(leaves, found, strict=True) if g is not None}
        with torch.no_grad():
            bound.keep(carry, width)
            self._move(bound, width, gradients, received, groups, carry)
            bound.lanes.losses[:width] += values.detach()

    def _kept_loss(self, outputs: Tensor, batch: Batch, groups: Groups, carry: Tensors) -> Tensor:
        """The method's loss; what it carries on is written over ``carry`` in the same pass."""
        values, after = self.method.loss(outputs, batch, groups, carry)
        with torch.no_grad():
            for name, tensor in after.items():
                if tensor is not carry[name]:
                    carry[name].copy_(tensor)
        return values

    def _move(
        self,
        bound: Bound,
        width: int,
        gradients: Tensors,
        received: Tensors,
        groups: Groups,
        carry: Tensors,
    ) -> None:
        """One step of the optimiser, with the method's pull and limit on the gradient."""
        method, lanes = self.method, bound.lanes
        params = narrow(lanes.params, width)
        pull = over_clients(method.pull, (0, 0, bound.message.dims, 0))
        if not method.pull_after_step:
            for name, more in pull(params, received, groups, carry).items():
                gradients[name] = more + gradients[name] if name in gradients else more
        if method.max_grad_norm is not None:
            gradients = {n: g.to(lanes.dtype) for n, g in gradients.items()}
            clip_gradients(list(gradients.values()), method.max_grad_norm)
        lanes.step(gradients, width)
        if method.pull_after_step:
            lanes.shift(pull(params, received, groups, carry), self.settings.lr, width)


def _signature(tensors: Tensors) -> object:
    """Shapes of stacked tensors but for the client axis."""
    return tuple((name, t.shape[1:], t.dtype) for name, t in tensors.items())


def _placed(tensors: Tensors, size: int) -> Tensors:
    """Zeros of the same kind for ``size`` clients."""
    return {name: t.new_zeros(size, *t.shape[1:]) for name, t in tensors.items()}
