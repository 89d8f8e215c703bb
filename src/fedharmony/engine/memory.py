"""What clients keep between rounds: on disk, one file per client, with a bounded share in memory.

A round that is cut short must be repeatable: what a client wrote in it must not be what it reads
when the round is run again. Hence every version carries its round, a reader asks for what was there
*before* a round, old versions go only once a later checkpoint stands, and a resumed run first drops
what is newer than its checkpoint.

A checkpoint names what was kept when it was written (:meth:`ClientMemory.seal`): a resumed run must
find just that.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fedharmony.errors import CheckpointError
from fedharmony.files import remove_leftovers
from fedharmony.records import load_record, named_digest, save_record
from fedharmony.types import Group, Record, Tensors

GROUP = "memory"
#: Seals are numbers below this.
SEALS = 2**256


class ClientMemory:
    """The last tensors each client chose to keep.

    Args:
        folder: where versions are written, ``<client>/<round>.safetensors``; None keeps all of them
            in memory (and nothing survives the process).
        limit: bytes held in memory beside the files; the least recently used go first.

    Attributes:
        nbytes: bytes of tensors held in memory now.

    >>> import torch
    >>> memory = ClientMemory()
    >>> memory.write(3, 0, {"u": torch.ones(2)})
    >>> memory.read(3, before=1)["u"].tolist(), memory.read(3, before=0), memory.read(4, before=9)
    ([1.0, 1.0], {}, {})
    """

    def __init__(self, folder: Path | None = None, limit: int = 1 << 30) -> None:
        self._folder, self._limit = folder, limit
        self._held: OrderedDict[tuple[int, int], Tensors] = OrderedDict()
        self.nbytes = 0
        self._rounds: dict[int, list[int]] = {}  # ascending, per client
        self._digests: dict[tuple[int, int], str] = {}  # of files, once they are written or asked
        if folder is not None and folder.exists():
            for file in folder.glob("*/*.safetensors"):
                if file.parent.name.isdecimal() and file.stem.isdecimal():
                    self._rounds.setdefault(int(file.parent.name), []).append(int(file.stem))
            for rounds in self._rounds.values():
                rounds.sort()

    def write(self, client: int, round: int, tensors: Group) -> None:
        """Keep ``tensors`` as the client's version of ``round``."""
        # Copies: a view would keep alive, unseen by the limit, the stack of clients it looks into.
        kept = {name: t.detach().to("cpu", copy=True) for name, t in tensors.items()}
        if self._folder is not None:
            file = self._file(client, round)
            try:
                file.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(
                    f"Cannot create the folder {file.parent}: {error.strerror}. Free some space or "
                    "check the permissions, then continue with 'fedharmony resume'."
                ) from error
            self._digests[client, round] = save_record(file, Record({GROUP: kept}))
        self._rounds[client] = sorted({*self._rounds.get(client, []), round})
        self._hold((client, round), kept)

    def read(self, client: int, before: int) -> Tensors:
        """The client's newest version older than round ``before``; {} when it has none.

        The tensors are the memory's own: not to be changed in place.
        """
        rounds = [t for t in self._rounds.get(client, []) if t < before]
        if not rounds:
            return {}
        key = (client, rounds[-1])
        found = self._held.get(key)
        if found is None:
            found = dict(load_record(self._file(*key)).get(GROUP))
        self._hold(key, found)
        return dict(found)

    def commit(self, rounds_done: int) -> None:
        """A checkpoint after ``rounds_done`` rounds stands: versions it made useless may go."""
        for client, rounds in self._rounds.items():
            for round in [t for t in rounds if t < rounds_done][:-1]:
                self._drop(client, round)

    def rewind(self, rounds_done: int) -> None:
        """Drop versions of rounds that the checkpoint after ``rounds_done`` rounds lacks."""
        for folder in self._folders():
            remove_leftovers(folder)
        for client, rounds in self._rounds.items():
            for round in [t for t in rounds if t >= rounds_done]:
                self._drop(client, round)

    def forget(self) -> None:
        """Drop everything: a completed run needs it no more."""
        self.rewind(0)
        for folder in self._folders():
            with suppress(OSError):  # holds files of somebody else
                folder.rmdir()

    def seal(self, rounds_done: int, mine: Callable[[int], bool] = lambda client: True) -> int:
        """A number that stands for all that clients keep after ``rounds_done`` rounds.

        The sum, modulo 2²⁵⁶, of one SHA-256 per client (of its number, the round and the digest of
        its newest version): seals of parts of the clients (``mine``) add up to that of all.
        """
        total = 0
        for client, rounds in self._rounds.items():
            past = [t for t in rounds if t < rounds_done]
            if self._folder is None or not past or not mine(client):
                continue
            key = (client, past[-1])
            if key not in self._digests:
                self._digests[key] = named_digest(self._file(*key))
            line = f"{client} {past[-1]} {self._digests[key]}"
            total += int.from_bytes(hashlib.sha256(line.encode()).digest())
        return total % SEALS

    def _folders(self) -> list[Path]:
        """The folder of every client, then the one that holds them all."""
        if self._folder is None or not self._folder.is_dir():
            return []
        inner = [f for f in self._folder.iterdir() if f.name.isdecimal() and f.is_dir()]
        return [*inner, self._folder]

    def _file(self, client: int, round: int) -> Path:
        assert self._folder is not None
        return self._folder / str(client) / f"{round}.safetensors"

    def _hold(self, key: tuple[int, int], tensors: Tensors) -> None:
        """Hold as the most recently used; without a folder there is nowhere else to keep it."""
        self._release(key)
        self._held[key] = tensors
        self.nbytes += Record({GROUP: tensors}).nbytes
        while self._folder is not None and self.nbytes > self._limit and self._held:
            self._release(next(iter(self._held)))

    def _release(self, key: tuple[int, int]) -> None:
        if key in self._held:
            self.nbytes -= Record({GROUP: self._held.pop(key)}).nbytes

    def _drop(self, client: int, round: int) -> None:
        self._rounds[client].remove(round)
        self._release((client, round))
        self._digests.pop((client, round), None)
        if self._folder is not None:
            self._file(client, round).unlink(missing_ok=True)
