"""A missing barrier in torch's compiler, and the one we put there.

Up to version 2.13 torch's compiler (Inductor) can write a kernel that stores a buffer in one loop
over a row and reads it back in the next loop, with nothing between the two that makes the threads
of a block wait for each other. Where both loops give an element to the same thread, as they do
while all types are float32, this is harmless. A bfloat16 output makes Triton deal elements out in
another way, and a thread then reads what another one has not written yet: old memory. The block of
a vision transformer in bfloat16 is such a kernel (a layer norm whose normed values are kept for
the backward pass). Whether it goes wrong depends on the block sizes that the compiler chooses by
timing: in 6 of 27 processes on an H200 it did, mostly with finite, wrong numbers.

``benchmarks/compiler_race.py`` shows it in one process. Torch 2.14 has the barrier (pytorch
pull request 190519). For older versions :func:`compiler_is_safe` adds it, and where it cannot,
denies it: then nothing is compiled for a GPU.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

#: The call that makes all threads of a block wait for each other.
BARRIER = "tl.debug_barrier()"


@functools.cache
def compiler_is_safe() -> bool:
    """Whether compiled kernels wait before they read back what they stored; made so if need be."""
    try:
        import torch._inductor.config
        from torch._inductor.codegen.common import CSE
        from torch._inductor.codegen.triton import TritonKernel
    except ImportError:
        return False
    safe = add_barrier(TritonKernel, CSE)
    if hasattr(TritonKernel.load, "__wrapped__"):  # ours
        keep_apart(getattr(torch.compiler, "config", None), torch._inductor.config)
    return safe


def keep_apart(compiler: Any, inductor: Any) -> None:
    """Let the compiler find no code on disk that was compiled without the barrier.

    Its cache does not know of the barrier. A tag of our own sets our code apart; versions of torch
    without tags do without the cache.
    """
    if hasattr(compiler, "cache_key_tag"):
        compiler.cache_key_tag += " with barrier"
    else:
        inductor.fx_graph_cache = False


def add_barrier(kernel: Any, cache: Any) -> bool:
    """Give ``kernel.load`` the barrier, unless it has it; whether it has it now.

    Args:
        kernel: the compiler's class of kernels, ``TritonKernel``.
        cache: its class of known values, which tells which buffers were stored in an earlier loop.
    """
    load, place = getattr(kernel, "load", None), getattr(kernel, "get_load_buffer", None)
    if load is None or place is None:
        return False
    if "debug_barrier" in inspect.getsource(load) or hasattr(load, "__wrapped__"):
        return True
    if "invalidated_stores" not in inspect.getsource(cache):
        return False

    @functools.wraps(load)
    def load_after_barrier(self: Any, name: str, index: Any) -> Any:
        self.read_back = name in self.cse.invalidated_stores
        try:
            return load(self, name, index)
        finally:
            self.read_back = False

    @functools.wraps(place)
    def place_after_barrier(self: Any, indexing: Any) -> Any:
        buffer = place(self, indexing)
        if getattr(self, "read_back", False):
            buffer.writeline(BARRIER)
        return buffer

    kernel.load, kernel.get_load_buffer = load_after_barrier, place_after_barrier
    return True
