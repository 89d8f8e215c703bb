"""What travels between a server and a site: a few words, and tensors as bytes. No pickle.

A :class:`Parcel` is a kind, a few JSON values, and named parts. A part is the bytes of a
safetensors file with one group of tensors; who only hands parcels on never looks inside. As bytes a
parcel is a safetensors file itself, whose tensors are its parts.

This module needs no torch: it is all that the relay at a site imports.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from fedharmony import stopping
from fedharmony.errors import FedHarmonyError, TransportError, shown
from fedharmony.reading import parse_json

FORMAT = "fedharmony-parcel-1"
#: What a parcel may be about: a question of the server, or an answer of a site.
ENROL, STAGE, MEASURE, STATUS, REPLY, REFUSED, FAILED = (
    *("enrol", "stage", "measure", "status"),
    *("reply", "refused", "failed"),
)
KINDS = (ENROL, STAGE, MEASURE, STATUS, REPLY, REFUSED, FAILED)
#: The most bytes of a parcel, unless a site says otherwise: a ViT-L with its Fisher information.
LIMIT = 4 << 30
#: The most parts (``site/records.py`` makes two), characters of the words, and of a reason. JSON
#: takes up to thirty times its length in memory.
MOST_PARTS, MOST_WORDS, MOST_REASON = 2, 1 << 20, 1000
#: Bytes read from a socket at a time.
PIECE = 1 << 20


@dataclass(frozen=True)
class Parcel:
    """One message between server and site.

    Attributes:
        kind: one of :data:`KINDS`.
        words: JSON values by name.
        parts: groups of tensors as safetensors bytes.

    >>> parcel = Parcel("status", {"round": 3}, {"params": b"..."})
    >>> Parcel.from_bytes(parcel.to_bytes()) == parcel
    True
    """

    kind: str
    words: Mapping[str, Any] = field(default_factory=dict)
    parts: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def reason(self) -> str:
        """Why a site did not do what it was asked."""
        reason = self.words.get("reason")
        return reason[:MOST_REASON] if isinstance(reason, str) else "it gave no reason"

    def to_bytes(self) -> bytes:
        """As one safetensors file."""
        arrays = {name: np.frombuffer(part, np.uint8) for name, part in self.parts.items()}
        words = json.dumps(self.words)
        return save(arrays, {"format": FORMAT, "kind": self.kind, "words": words})

    @classmethod
    def from_bytes(cls, data: bytes) -> Parcel:
        """The parcel behind :meth:`to_bytes`; anything else is a :class:`TransportError`."""
        try:
            length = int.from_bytes(data[:8], "little")
            if length > 2 * MOST_WORDS:  # words within a header are escaped
                raise ValueError(f"its header is longer than {2 * MOST_WORDS:,} bytes")
            header = parse_json(data[8 : 8 + length])["__metadata__"]
            if header["format"] != FORMAT:
                raise ValueError(f"it is {header['format']}, not {FORMAT}")
            words = checked_words(header["words"])
            parts = {name: part.tobytes() for name, part in load(data).items()}
        except (SafetensorError, ValueError, KeyError, TypeError) as error:
            raise TransportError(
                f"What came in is no parcel of this version: {error}. Use the same version of "
                "fedharmony at the server and at every site."
            ) from None
        return checked(cls(header["kind"], words, parts))


def failed(error: Exception) -> Parcel:
    """The answer of a site where something went wrong."""
    known = isinstance(error, FedHarmonyError)
    return Parcel(FAILED, {"reason": str(error) if known else f"{type(error).__name__}: {error}"})


def checked_words(text: Any) -> dict[str, Any]:
    """JSON text as the words of a parcel, or a ValueError."""
    if not isinstance(text, str) or len(text) > MOST_WORDS:
        raise ValueError(f"its words are no text of at most {MOST_WORDS:,} characters")
    words = parse_json(text)
    if not isinstance(words, dict):
        raise ValueError("its words are no JSON object")
    return words


def checked(parcel: Parcel) -> Parcel:
    """The same parcel; one that nobody could have sent is refused."""
    if parcel.kind not in KINDS or len(parcel.parts) > MOST_PARTS:
        raise TransportError(
            f"A parcel of kind {shown(parcel.kind)} with {len(parcel.parts)} parts came in, which "
            "no version of fedharmony sends. Look at who sent it."
        )
    return parcel


def send(stream: socket.socket, parcel: Parcel) -> None:
    """Write a parcel: its length in eight bytes, then its bytes."""
    data = parcel.to_bytes()
    stream.sendall(len(data).to_bytes(8, "big"))
    stream.sendall(data)


def receive(stream: socket.socket, limit: int = LIMIT) -> Parcel | None:
    """Read a parcel of at most ``limit`` bytes; None where the other side has nothing to say."""
    head = _read(stream, 8)
    if not head:
        return None
    length = int.from_bytes(head, "big")
    if length > limit:
        raise TransportError(
            f"A parcel of {length:,} bytes was announced; at most {limit:,} are taken. Raise "
            "parcel_mb in site.toml if the model is that large."
        )
    data = _read(stream, length)
    if len(head) < 8 or len(data) < length:
        raise TransportError(f"A parcel of {length:,} bytes broke off after {len(data):,}.")
    return Parcel.from_bytes(data)


def _read(stream: socket.socket, count: int) -> bytes:
    """``count`` bytes, or fewer where the other side stops."""
    found = bytearray()
    while len(found) < count and (piece := stream.recv(min(PIECE, count - len(found)))):
        found += piece
    return bytes(found)


def hear_out(stream: socket.socket, seconds: float) -> None:
    """Drop what the other side still sends: closed before, it would not read the answer."""
    stream.shutdown(socket.SHUT_WR)
    stream.settimeout(seconds)
    end = time.monotonic() + seconds
    while time.monotonic() < end and stream.recv(PIECE):
        pass


def ask(place: str | Path, parcel: Parcel, wait_s: float | None = None) -> Parcel:
    """Ask the worker that listens at a socket, and wait for its answer."""
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream,
        stopping.interruptible(),
    ):
        stream.settimeout(wait_s)
        try:
            stream.connect(str(place))
            send(stream, parcel)
            answer = receive(stream)
        except OSError as error:
            advice = "Start it with 'fedharmony site serve site.toml'."
            advice = "It runs; its log says more." if isinstance(error, TimeoutError) else advice
            raise TransportError(
                f"The worker of this site does not answer at {place}: {error.strerror or error}. "
                f"{advice}"
            ) from None
    if answer is None:
        raise TransportError(f"The worker at {place} ended while it was asked. Look at its log.")
    return answer
