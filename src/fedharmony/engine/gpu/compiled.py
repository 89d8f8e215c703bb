"""Functions of a stack of clients, compiled by ``torch.compile`` where it can.

The parts of a backbone (:class:`CompiledPiece`) are functions ``(own parameters, x, options)`` that
a model calls many times, for instance once per transformer block: each is compiled once, which
takes a tenth of the time that the whole model would take, and loses nothing measurable. Sizes are
fixed but for the numbers of clients and images: the first pair gets code of its own, all others
share code for any pair.

The compiler times block sizes and takes the fastest, and they decide how sums are formed: two
processes differ in the last bits unless ``torch.use_deterministic_algorithms`` is on.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedharmony import fallbacks
from fedharmony.models.base import Piece
from fedharmony.types import Group

log = logging.getLogger(__name__)

#: Variants that may be compiled in one process: shapes × (training or not) × pieces of a function.
MOST_VARIANTS = 256


class Compiled:
    """A function that is compiled when it first meets a shape.

    Where compiling fails (no C compiler, no Triton, something that cannot be traced) the function
    runs as it is, with the same result, and says so once.

    ``dynamic`` is that of ``torch.compile``: by default a size or number that has changed once is
    free from then on; False fixes all but the sizes that are marked.
    """

    def __init__(
        self, function: Callable[..., Any], backend: Any = "inductor", dynamic: bool | None = None
    ) -> None:
        functools.update_wrapper(self, function)
        self.function = function
        self.compiled: Any = torch.compile(
            function, fullgraph=True, dynamic=dynamic, backend=backend
        )
        _prepare_compiler()

    def __call__(self, *arguments: Any) -> Any:
        """The value of the function."""
        if self.compiled is None:
            return self.function(*arguments)
        try:
            return self.compiled(*arguments)
        except torch._dynamo.exc.TorchDynamoException as error:
            first = str(error).strip().splitlines()[0]
            what = f"Compiling failed ({first}); the run goes on without, only slower."
            fallbacks.note("compile", what, error)
            self.compiled = None
            return self.function(*arguments)


class CompiledRows(Compiled):
    """A function of tensors (rows, length) that works through them in any number of rows.

    Their length is fixed: code that knows it to be a multiple of 16 can move 16 bytes at a time. On
    an H200 the optimiser's pass reached 3.9 TB/s so, and 2.1 with code for any size.
    """

    def __init__(self, function: Callable[..., Any], backend: Any = "inductor") -> None:
        super().__init__(function, backend, dynamic=False)

    def __call__(self, *arguments: Any) -> Any:
        """The value of the function; lists of tensors count as tensors."""
        if self.compiled is not None:
            for argument in arguments:
                for tensor in argument if isinstance(argument, list) else [argument]:
                    if isinstance(tensor, Tensor):
                        _mark(tensor, tensor.dim() - 1)
        return super().__call__(*arguments)


class CompiledPiece(Compiled):
    """A part of a backbone. All tensors carry the client axis first, inputs the images second.

    The parts of a backbone share ``said``, what was announced: each wait is explained once.
    """

    def __init__(
        self, function: Piece, backend: Any = "inductor", said: set[str] | None = None
    ) -> None:
        self._said = set() if said is None else said
        # With another model of other sizes the compiler would make the number of heads a variable,
        # and attention slow.
        super().__init__(function, backend, dynamic=False)
        self._first: dict[tuple[bool, ...], tuple[int, ...]] = {}

    def __call__(self, own: Group, inputs: Tensor | tuple[Tensor, ...], *options: Any) -> Any:
        """The value of the piece."""
        if self.compiled is not None:
            read = (inputs,) if isinstance(inputs, Tensor) else inputs
            shape = tuple(read[0].shape[:2])
            # One client, or one image each, always gets code of its own; such images are few.
            kind = torch.is_grad_enabled(), *(number == 1 for number in shape)
            vary = shape != self._first.setdefault(kind, shape) or shape[1] == 1
            self._announce(shape, vary)
            for tensor in read:
                _mark(tensor, 2 if vary else 0)
            for tensor in own.values():
                _mark(tensor, 1 if vary else 0)
        return super().__call__(own, inputs, *options)

    def _announce(self, shape: tuple[int, ...], vary: bool) -> None:
        """Say why the first call of a kind takes long."""
        what = "training" if torch.is_grad_enabled() else "evaluating"
        names = [("client", "clients"), ("image", "images")]
        parts = [
            f"1 {one}" if number == 1 else f"{'any' if vary else number} {many}"
            for number, (one, many) in zip(shape, names, strict=True)
        ]
        kind = f"{what} {' × '.join(parts)}"
        if kind not in self._said:
            self._said.add(kind)
            log.info("Compiling for %s: seconds to a minute, once in a run.", kind)


def _mark(tensor: Tensor, leading: int) -> None:
    """Only the first ``leading`` sizes may vary; a size of one is always code of its own."""
    for dim in range(tensor.dim()):
        if dim < leading and tensor.shape[dim] > 1:
            torch._dynamo.mark_dynamic(tensor, dim)
        else:
            torch._dynamo.mark_static(tensor, dim)


def _prepare_compiler() -> None:
    """Let Dynamo keep all variants of a function; it gives up after a few, but ours are known."""
    dynamo: Any = torch._dynamo.config
    name = "recompile_limit" if hasattr(dynamo, "recompile_limit") else "cache_size_limit"
    setattr(dynamo, name, max(getattr(dynamo, name), MOST_VARIANTS))
