"""Messages of a hostile site: every field of every kind with extremes.

The server names the site and goes on, and takes less than 64 MB beyond the message for it. Memory
is what the kernel counts (the high-water mark of the process), so that torch, NumPy and safetensors
are in it, too.
"""

from __future__ import annotations

import ctypes
import gc
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedharmony.errors import DataError, TransportError
from fedharmony.flower.roster import Roster, Terms
from fedharmony.flower.transport import Sites
from fedharmony.methods.base import Stage
from fedharmony.metrics import MetricOptions
from fedharmony.metrics.parts import BINS, read_part
from fedharmony.records import from_bytes
from fedharmony.server.federation import FederationSettings
from fedharmony.site.parcel import FAILED, REFUSED, REPLY, Parcel
from fedharmony.site.records import pack, record_of
from fedharmony.types import PARAMS, Failure, Reply
from toy import Toy

#: Bytes that a message may take beyond its own size.
MOST = 64 << 20
CLEAR, STATUS = Path("/proc/self/clear_refs"), Path("/proc/self/status")


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


EXTREMES: dict[str, Any] = {
    "huge": 10**400,
    "huge below zero": -(10**400),
    "2**63": 2**63,
    "-1": -1,
    "nan": math.nan,
    "inf": math.inf,
    "-inf": -math.inf,
    "1e308": 1e308,
    "long": "x" * 900_000,
    "empty": "",
    "none": None,
    "list": [0] * 200_000,
    "nested": nested(400),
    "mapping": {"a": {"a": {}}},
    "escape": "\x1b[2J",
}


def resident(name: str) -> int:
    (line,) = (x for x in STATUS.read_text().splitlines() if x.startswith(name))
    return int(line.split()[1]) << 10


def growth(call: Callable[[], Any]) -> int:
    """Bytes by which the process grows at most during a call."""
    if not CLEAR.exists():
        pytest.skip("only Linux counts the high-water mark of a process anew")
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else freed memory that the process holds is used again
    CLEAR.write_text("5")
    before = resident("VmRSS")
    call()
    return resident("VmHWM") - before


def test_the_measure_counts_what_torch_takes() -> None:
    assert growth(lambda: torch.ones(100 << 20, dtype=torch.uint8)) > 90 << 20


# -- replies and shares ---------------------------------------------------------------------------


@dataclass
class Liar:
    """A transport to sites; the answer of client 1 is changed on its way."""

    inner: Any
    change: Callable[[Parcel], Parcel]

    @property
    def sizes(self) -> Any:
        return self.inner.sizes

    def exchange(self, stage: Stage, round: int, messages: Any) -> Iterator[Reply | Failure]:
        roster: Any = SimpleNamespace(names={k: f"site {k}" for k in messages})
        sites = Sites(None, {}, roster, 1.0)  # type: ignore[arg-type]
        for answer in self.inner.exchange(stage, round, messages):
            assert isinstance(answer, Reply)
            words = {"examples": answer.examples, "scalars": dict(answer.record.scalars)}
            parcel = Parcel(REPLY, words, *pack([answer.record]))
            if answer.client == 1:
                parcel = self.change(parcel)
            yield sites._answer(stage, round, answer.client, parcel)


def with_words(**words: Any) -> Callable[[Parcel], Parcel]:
    return lambda p: Parcel(p.kind, {**p.words, **words}, p.parts)


def with_loss(value: Any) -> Callable[[Parcel], Parcel]:
    return lambda p: with_words(scalars={**p.words["scalars"], "loss": value})(p)


def with_model(tensor: torch.Tensor) -> Callable[[Parcel], Parcel]:
    def change(parcel: Parcel) -> Parcel:
        record = from_bytes(parcel.parts["own"])
        params = dict.fromkeys(record.get(PARAMS), tensor)
        return Parcel(parcel.kind, parcel.words, *pack([record.replace({PARAMS: params})]))

    return change


REPLIES = {
    "empty tensors": with_model(torch.zeros(0, 2**40)),
    "many dimensions": with_model(torch.zeros((1,) * 40)),
    "complex": with_model(torch.full((1,), 1j * math.nan)),
}
for key, extreme in EXTREMES.items():
    REPLIES[f"scalars {key}"] = with_words(scalars=extreme)
    REPLIES[f"examples {key}"] = with_words(examples=extreme)
    REPLIES[f"loss {key}"] = with_loss(extreme)
    REPLIES[f"reason {key}"] = lambda p, value=extreme: Parcel(FAILED, {"reason": value})
#: Numbers that harm nobody; a share does not say of how many images it is.
POSSIBLE = {"loss -1", "loss 2**63"}
IGNORED = {f"examples {key}" for key, extreme in EXTREMES.items() if isinstance(extreme, int)}


@pytest.mark.parametrize("sees", ["replies", "sums"])
def test_a_hostile_reply_costs_its_site_alone(sees: Any) -> None:
    settings = FederationSettings(server_sees=sees, sum_least=2)
    possible = POSSIBLE | IGNORED if sees == "sums" else POSSIBLE
    for name, change in REPLIES.items():
        toy, found = Toy(rounds=1, federation=settings), []
        toy.transport = Liar(toy.transport, change)
        assert growth(lambda toy=toy, found=found: found.append(toy.run())) < MOST, name
        ((state, (event,)),) = found
        failed = [] if name in possible else [1]
        assert [f["client"] for f in event["left_out"]] == failed, name
        assert event["reported"] == [k for k in range(5) if k not in failed], name
        assert all(len(f["reason"]) <= 1000 for f in event["left_out"]), name
        assert all(t.isfinite().all() for _, t in state.tensors()), name


# -- enrolment ------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", ["site", "images", "bound"])
def test_a_hostile_site_does_not_enrol(field: str) -> None:
    for name, value in EXTREMES.items():
        roster = Roster(None, {}, Terms(1, 1.0, 1.0))  # type: ignore[arg-type]
        words = {"site": "ada", "images": 5, "bound": "0" * 64, "unknown": False, field: value}
        answer = Parcel(REPLY, words)
        assert growth(lambda r=roster, a=answer: r._take(7, "", a)) < MOST
        if not (name == "escape" and field != "images"):
            assert list(roster.refused) == [7], name
            assert len(roster.refused[7]) < 1100, name
        refusal = Parcel(REFUSED, {"reason": value})
        roster._take(8, "", refusal)
        assert len(roster.refused[8]) < 1100, name


# -- measurements ---------------------------------------------------------------------------------


def measured(classes: int, counts: int, bins: bool = True) -> dict[str, torch.Tensor]:
    """What a site may say of so many scores of its first label: all at one boundary."""
    known = torch.zeros(classes, dtype=torch.int64)
    known[0], pairs = counts, torch.zeros(7, classes, classes, dtype=torch.float64)
    pairs[0, 0, 0] = counts
    table = torch.zeros(classes, 2, BINS + 1, dtype=torch.int32)
    table[0, 0, 0] = min(counts, 2**31 - 1)
    scores = {"scores": torch.zeros(counts if not bins else 0)}
    scores["hits"] = torch.zeros(len(scores["scores"]), dtype=torch.uint8)
    return {"pairs": pairs, "known": known, **({"bins": table} if bins else scores)}


@pytest.mark.parametrize(
    ("tensors", "images"),
    [
        (measured(2, 2**31 - 1), 10**12),
        (measured(2, 2**31 - 1), 2**31 - 1),
        (measured(2, 400_000_000), 400_000_000),
        (measured(500, 50_000), 50_000),
        (measured(500, 50_000, bins=False), 50_000),
        (measured(2, 5), 10**400),
        (measured(2, 5), -1),
        (measured(2, 5) | {"known": torch.tensor([2**62, 2**62])}, 5),
        (measured(2, 5) | {"known": torch.tensor([5, 400_000_000])}, 10**9),
    ],
)
def test_counts_are_compared_before_scores_are_made_of_them(
    tensors: Mapping[str, torch.Tensor], images: int
) -> None:
    def read() -> None:
        with pytest.raises(DataError):
            read_part(tensors, images, len(tensors["known"]), MetricOptions())

    assert growth(read) < MOST


def test_counts_of_a_large_honest_test_set_are_read() -> None:
    part = read_part(measured(80, 120_000), 120_000, 80, MetricOptions())
    assert len(part.scores) == 120_000


# -- bytes ----------------------------------------------------------------------------------------


def file_of(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def record(dtype: str = "F32", shape: Any = (1,), end: int = 4, **changes: str) -> bytes:
    """A file of one tensor, as a part of a parcel is."""
    about = {"format": "fedharmony-record-1", "groups": '{"a": ["b"]}', "scalars": "{}"} | changes
    tensor = {"dtype": dtype, "shape": shape, "data_offsets": [0, end]}
    return file_of({"__metadata__": about, "a/b": tensor}, bytes(4))


def parcel(parts: int = 0, **changes: str) -> bytes:
    about = {"format": "fedharmony-parcel-1", "kind": "reply", "words": "{}"} | changes
    part = {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}
    return file_of({"__metadata__": about, **{str(i): part for i in range(parts)}})


MANY = b"[" + b",".join([b"[]"] * 8_000_000) + b"]"
FILES = {
    "nothing": b"",
    "no header": b"\xff" * 8,
    "lists": file_of(MANY),
    "metadata": file_of(b'{"__metadata__": ' + MANY + b"}"),
    "nested": file_of(b"[" * 500_000),
    "number": file_of(5),
    "without": file_of({}),
    "many tensors": parcel(200_000),
    "shape": record(shape=[2**40]),
    "overflow": record(shape=[2**33, 2**33]),
    "negative shape": record(shape=[-1]),
    "type": record("X9"),
    "scalars": record(scalars="[" * 5000),
    **{f"groups {x[:9]}": record(groups=x) for x in ("[]", "5", "[" * 5000, '{"a": 5}')},
}
PARCELS = FILES | {
    "long words": parcel(words=MANY.decode()),
    "most words": parcel(words="[" + ",".join(["{}"] * 349_000) + "]"),
    "words": parcel(words="5"),
    "kind": parcel(kind="x" * 500_000),
    "parts": parcel(5),
}


@pytest.mark.parametrize(
    ("name", "read"),
    [
        *((name, lambda data: record_of({"own": data}, {})) for name in FILES),
        *((name, Parcel.from_bytes) for name in PARCELS),
    ],
)
def test_bytes_that_are_no_message_are_refused(name: str, read: Callable[[bytes], Any]) -> None:
    data = PARCELS[name]

    def refused() -> None:
        with pytest.raises(TransportError) as caught:
            read(data)
        assert len(str(caught.value)) < 2000

    assert growth(refused) < MOST + len(data)


def test_as_much_json_as_a_message_may_hold() -> None:
    """The words of an accepted message, at their longest and most wasteful."""
    data = parcel(words='{"a": [' + ",".join(["{}"] * 349_000) + "]}")
    assert growth(lambda: Parcel.from_bytes(data)) < MOST
