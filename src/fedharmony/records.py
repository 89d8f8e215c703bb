"""Records as bytes and as files: safetensors with a checksum, replaced atomically.

A crash at any moment leaves either the old file or the new one, never a mixture.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError, safe_open

from fedharmony.errors import CheckpointError
from fedharmony.files import write_atomically
from fedharmony.reading import parse_json
from fedharmony.types import Group, Record, Tensors

FORMAT = "fedharmony-record-1"
#: Bytes of a header in a message: some ten thousand tensors, which take ten times that in memory.
LONGEST_HEADER = 1 << 20


def digest(record: Record) -> str:
    """SHA-256 over names, types, shapes and bytes of all tensors, and over the scalars.

    >>> a = Record({"params": {"w": torch.zeros(2)}})
    >>> digest(a) == digest(Record({"params": {"w": torch.zeros(2)}}))
    True
    """
    sha = hashlib.sha256(json.dumps(dict(record.scalars), sort_keys=True).encode())
    for name, tensor in sorted(record.tensors()):
        sha.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        sha.update(flat.view(torch.uint8).numpy().data)
    return sha.hexdigest()


def write_file(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file of a run atomically; a failure says what survives and how to go on."""
    try:
        write_atomically(path, data, mode)
    except OSError as error:
        kept = " The last good version is still in place." if path.exists() else ""
        raise CheckpointError(
            f"Could not write {path}: {error.strerror or error}.{kept} Free some space or check "
            "the permissions of the folder, then continue with 'fedharmony resume'."
        ) from error


def apart(tensors: Tensors) -> Tensors:
    """The same tensors, none of which shares memory with another: files hold each by itself.

    >>> both = torch.ones(2)
    >>> one, other = apart({"a": both, "b": both}).values()
    >>> one.data_ptr() == other.data_ptr(), torch.equal(one, other)
    (False, True)
    """
    taken = set[int]()
    result = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        result[name] = tensor.clone() if place in taken else tensor
        taken.add(place)
    return result


def to_bytes(record: Record, **more: str) -> bytes:
    """A record as the bytes of a safetensors file; ``more`` goes into its header.

    >>> record = Record({"params": {"w": torch.ones(2)}}, {"steps": 3})
    >>> digest(from_bytes(to_bytes(record))) == digest(record)
    True
    """
    tensors = apart({name: t.detach().cpu().contiguous() for name, t in record.tensors()})
    header = {
        "format": FORMAT,
        "scalars": json.dumps(dict(record.scalars)),
        "groups": json.dumps({g: list(members) for g, members in record.groups.items()}),
        **more,
    }
    return safetensors.torch.save(tensors, header)


def from_bytes(data: bytes) -> Record:
    """The record behind :func:`to_bytes`."""
    return _assemble(header_of(data), safetensors.torch.load(data))


def header_of(data: bytes) -> dict[str, str]:
    """What :func:`to_bytes` wrote into the header."""
    if (length := int.from_bytes(data[:8], "little")) > LONGEST_HEADER:
        raise ValueError(f"its header is longer than {LONGEST_HEADER:,} bytes")
    return dict(parse_json(data[8 : 8 + length])["__metadata__"])


def _assemble(header: Mapping[str, str], tensors: Group) -> Record:
    groups: dict[str, Tensors] = {
        group: {name: tensors[f"{group}/{name}"] for name in names}
        for group, names in parse_json(header["groups"]).items()
    }
    return Record(groups, parse_json(header["scalars"]))


def save_record(path: Path, record: Record) -> str:
    """Write a record and return its digest; the last good file survives any failure."""
    found = digest(record)
    write_file(path, to_bytes(record, sha256=found))
    return found


ADVICE = "Restore the file from a backup, or start a new run in another folder."


def load_record(path: Path) -> Record:
    """Read a record and verify it."""
    header = _header(path)
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        record = _assemble(header, tensors)
    except (SafetensorError, OSError, KeyError, ValueError, TypeError) as error:
        raise CheckpointError(f"Checkpoint {path} is damaged ({error}). {ADVICE}") from error
    if digest(record) != header.get("sha256"):
        raise CheckpointError(
            f"Checkpoint {path} is damaged: its checksum does not match its content. {ADVICE}"
        )
    return record


def named_digest(path: Path) -> str:
    """The digest that a file names; :func:`load_record` verifies that its content has it."""
    return str(_header(path).get("sha256", ""))


def _header(path: Path) -> dict[str, str]:
    """What a file says of itself; tensors are not read."""
    try:
        with path.open("rb"):
            pass
    except FileNotFoundError:
        raise CheckpointError(f"There is no checkpoint {path}. {ADVICE}") from None
    except OSError as error:  # a healthy file may be out of reach
        raise CheckpointError(
            f"Checkpoint {path} cannot be read: {error.strerror or error}. Check its permissions "
            "and the disk, then give the same command again."
        ) from error
    try:
        with safe_open(path, framework="pt") as file:
            header: dict[str, str] = file.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"Checkpoint {path} is damaged ({error}). {ADVICE}") from error
    if header.get("format") != FORMAT:
        raise CheckpointError(f"{path} is not a checkpoint of this version ({FORMAT}). {ADVICE}")
    return header
