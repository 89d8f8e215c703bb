"""Clients spread over several processes, one per GPU or host, started by ``torchrun``.

Every process runs the same round loop on the same state. A client always belongs to the same
process (client k to rank k mod W), where its data are on the device and its memory is known; its
reply is sent to all others. All processes fold the same replies in the same order, so their states
stay equal to the bit, and nobody needs to be told the new model.

Replies travel as the bytes of a safetensors file: no pickle crosses a boundary.
"""

from __future__ import annotations

import atexit
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from fedharmony import fallbacks, stopping
from fedharmony.errors import ClientLimitError
from fedharmony.methods.base import Stage
from fedharmony.records import from_bytes, header_of, to_bytes
from fedharmony.transport.base import Transport
from fedharmony.types import Answers, Failure, Messages, Record, Reply


@dataclass(frozen=True)
class ProcessGroup:
    """The processes of a run: which one this is, of how many, and which one on this host."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0

    @property
    def leads(self) -> bool:
        """Whether this process writes, evaluates and prints."""
        return self.rank == 0


def process_group() -> ProcessGroup:
    """What ``torchrun`` says about this process; a plain start is a group of one.

    >>> process_group()
    ProcessGroup(rank=0, size=1, local_rank=0)
    """
    usual = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0}
    return ProcessGroup(*(int(os.environ.get(name, value)) for name, value in usual.items()))


def join(device: torch.device, wait_s: float) -> None:
    """Meet the other processes, once: through NCCL on GPUs, through Gloo elsewhere.

    ``wait_s`` is how long any exchange waits for another process, in seconds.
    """
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(seconds=wait_s))
        atexit.register(_leave)


def _leave() -> None:
    """Part from the other processes: one that ends while it still listens to them is aborted."""
    if dist.is_initialized():
        dist.destroy_process_group()


class Processes:
    """A transport that shares the clients of a stage among a group of processes.

    It waits for another process as long as it was told when they met (:func:`join`), then ends the
    run: without that process's clients, and their memory, the others cannot go on.
    """

    def __init__(self, own: Transport, members: ProcessGroup, device: torch.device) -> None:
        self._own, self._group, self._device = own, members, device
        self.sizes: Mapping[int, int] = own.sizes

    def exchange(self, stage: Stage, round: int, messages: Messages) -> Answers:
        """Train this process's clients, then pass every answer around, in client order."""
        size, rank = self._group.size, self._group.rank
        mine = {k: message for k, message in messages.items() if k % size == rank}
        answers = {a.client: a for a in self._own.exchange(stage, round, mine)}
        for client in messages:
            owner = client % size
            sent = _pack(answers[client]) if owner == rank else None
            try:
                received = passed(sent, owner, self._device)
            except RuntimeError as error:
                stopping.end_if_asked()  # the same signal has ended the other process
                missing = f"Process {owner} did not send the answer of client {client}"
                raise _gone(missing, stage, round, error) from error
            # The owner keeps what it has: bytes bring tensors back bit by bit.
            yield answers[client] if sent is not None else _unpack(received, self._device)
        try:
            self._add_fallbacks()
        except RuntimeError as error:
            raise _gone("A process did not count its fallbacks", stage, round, error) from error

    def _add_fallbacks(self) -> None:
        """Count in every process what all of them have fallen back from."""
        noted = fallbacks.drain()
        counts = torch.tensor([noted.get(c, 0) for c in fallbacks.CAUSES], device=self._device)
        dist.all_reduce(counts)
        fallbacks.add(dict(zip(fallbacks.CAUSES, counts.tolist(), strict=True)))


def passed(data: bytes | None, owner: int, device: torch.device) -> bytes:
    """The owner's bytes, on every process; the others have no ``data``."""
    length = torch.tensor(0 if data is None else len(data), device=device)
    dist.broadcast(length, owner)
    buffer = torch.empty(int(length), dtype=torch.uint8, device=device)
    if data:
        buffer.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    dist.broadcast(buffer, owner)
    return data if data is not None else buffer.cpu().numpy().tobytes()


def _gone(missing: str, stage: Stage, round: int, error: Exception) -> ClientLimitError:
    return ClientLimitError(
        f"{missing} in {stage.name} of round {round + 1}: it has ended, or hangs for longer than "
        f"engine.wait_s allows ({error}). The state after {round} rounds is saved. Mend the cause, "
        "or raise engine.wait_s, and resume."
    )


def _pack(answer: Reply | Failure) -> bytes:
    if isinstance(answer, Failure):
        return to_bytes(Record(), failure=json.dumps(asdict(answer)))
    about = {name: getattr(answer, name) for name in ("client", "examples", "finite")}
    return to_bytes(answer.record, reply=json.dumps(about))


def _unpack(data: bytes, device: torch.device) -> Reply | Failure:
    header = header_of(data)
    if "failure" in header:
        return Failure(**json.loads(header["failure"]))
    return Reply(record=from_bytes(data).to(device), **json.loads(header["reply"]))
