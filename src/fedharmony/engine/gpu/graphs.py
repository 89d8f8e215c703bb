"""Steps recorded as CUDA graphs: whatever a step does, it then costs one launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedharmony import fallbacks
from fedharmony.types import Tensors


class StepInput(NamedTuple):
    """What changes from step to step.

    Attributes:
        images: image indices (M, B), −1 for a padding row.
        pixels: the images, where the step does not fetch them itself.
        draws: random numbers of the method, (M, B, ...) each; so are changes of the images.
        final: (M,) 1 for a client in its last epoch, where the step asks for it.
    """

    images: Tensor
    pixels: Tensor | None
    draws: Tensors
    changes: Tensors
    final: Tensor | None = None

    def tensors(self) -> Iterator[Tensor]:
        """All of them, in a fixed order."""
        yield self.images
        yield from (t for t in (self.pixels, self.final) if t is not None)
        yield from self.draws.values()
        yield from self.changes.values()

    def placed(self) -> StepInput:
        """A copy whose tensors stay where they are."""
        return StepInput(
            self.images.clone(),
            None if self.pixels is None else self.pixels.clone(),
            {n: t.clone() for n, t in self.draws.items()},
            {n: t.clone() for n, t in self.changes.items()},
            None if self.final is None else self.final.clone(),
        )


class Recorder:
    """Records graphs that share memory, because they are replayed one at a time.

    The memory is gone with the last of them: who gives all of them up needs a new recorder.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """The graph of what ``work`` would do on the device."""
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                work()
        except RuntimeError:
            # Before version 2.15 torch may leave the stream it records on as the current one.
            torch.cuda.set_stream(stream)
            # CUDA still counts the old pool as being recorded into: it cannot be used again.
            self._pool = torch.cuda.graph_pool_handle()
            raise
        return graph


class Program:
    """A step that can be repeated: called, or recorded at its second call and replayed.

    The first call runs the step as it is, which also lets libraries allocate and compile.
    """

    def __init__(self, step: Callable[[StepInput], None], recorder: Recorder | None = None) -> None:
        self._step, self._recorder = step, recorder
        self._placed: StepInput | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self, given: StepInput) -> None:
        """One step."""
        if self._placed is None:
            self._placed = given.placed()
            self._step(self._placed)
            return
        placed = self._placed
        for place, tensor in zip(placed.tensors(), given.tensors(), strict=True):
            place.copy_(tensor)
        if self._recorder is not None and self._graph is None:
            try:
                self._graph = self._recorder.record(lambda: self._step(placed))
            except torch.OutOfMemoryError:
                raise
            except RuntimeError as error:  # recording runs nothing: the step is still to be done
                first = str(error).strip().splitlines()[0]
                what = f"A step cannot be recorded ({first}) and is launched piece by piece."
                fallbacks.note("graphs", what, error)
                self._recorder = None
        if self._graph is not None:
            self._graph.replay()
        else:
            self._step(placed)
