"""Flower itself: messages as it carries them, and a real SuperLink with three SuperNodes.

Skipped where Flower is not installed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, Message, Metadata, RecordDict
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
)
from flwr.supercore.run import RunNotRunningException

from fedharmony.errors import ConfigError, TransportError
from fedharmony.experiments import run
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.flower import client_app, node
from fedharmony.flower.link import began
from fedharmony.flower.wire import content_of, parcel_of
from fedharmony.site.keys import make_key
from fedharmony.site.parcel import Parcel
from superlink import federation

#: With so many rounds; two where clients or server remember something.
METHODS = {"fedavg": 1, "fedharmony": 2, "fedcurv": 2, "spherefed": 1, "fedrdn": 1}
SAME = ("state_sha256", "metrics", "structure", "bytes_up", "bytes_down")


def nobody(event: dict[str, Any]) -> None:
    pass


def test_a_parcel_is_one_array_per_group() -> None:
    parcel = Parcel("stage", {"round": 1}, {"params": b"abc", "correlation": b""})
    content = content_of(parcel)
    assert parcel_of(content) == parcel
    (arrays,) = content.array_records.values()
    assert {name: array.data for name, array in arrays.items()} == dict(parcel.parts)


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({"about": ConfigRecord({"kind": "stage", "words": "{}"})}),
        RecordDict({"about": ConfigRecord({"kind": "stage", "words": "no JSON"})}),
    ],
)
def test_other_messages_are_no_parcels(content: RecordDict) -> None:
    with pytest.raises(TransportError, match="no parcel"):
        parcel_of(content)


def test_the_relay_needs_no_torch_and_sends_nothing_home() -> None:
    code = (
        "import sys, fedharmony.flower.node; from flwr.supercore import telemetry;"
        "print('torch' in sys.modules, telemetry.FLWR_TELEMETRY_ENABLED)"
    )
    bare = {key: value for key, value in os.environ.items() if not key.startswith("FLWR")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, env=bare, check=True)
    assert done.stdout.split() == [b"False", b"0"]


# -- a site's node -------------------------------------------------------------------------------


class Line:
    """What Flower's client gives a node, with one message in it; and what the node did."""

    def __init__(self, message: Message, broken: str = "") -> None:
        self.objects = {k: o.deflate() for k, o in get_all_nested_objects(message).items()}
        self.message, self.broken = message, broken
        self.tree, self.confirmed, self.sent = get_object_tree(message), [], dict[str, bytes]()

    def __iter__(self) -> Iterator[Any]:
        return iter((7, None, self.send, None, None, self.pull, self.push, self.confirm))

    def pull(self, run: int, number: str) -> bytes:
        if self.broken == "pull":
            raise ObjectPullError(number, "it is gone")
        if self.broken == "late":
            self.broken = ""
            raise ObjectUnavailableError(number)
        return self.objects[number]

    def confirm(self, run: int, number: str) -> None:
        self.confirmed.append((run, number))

    def send(self, reply: Message, tree: Any, seconds: float) -> tuple[set[str], str]:
        if self.broken == "run":
            raise RunNotRunningException
        self.reply = reply
        return {t.object_id for t in iterate_object_tree(tree)}, "session"

    def push(self, run: int, session: str, number: str, content: bytes) -> None:
        assert (run, session) == (5, "session")
        self.sent[number] = content


def line(broken: str = "") -> Line:
    question = content_of(Parcel("status", {}, {"params": b"abc"}))
    about = Metadata(5, "", 1, 7, "", "", 0.0, 60.0, "query")
    return Line(Message(question, metadata=about), broken)


@pytest.mark.parametrize("broken", ["", "late"])
def test_a_node_carries_a_message_to_the_worker_and_its_answer_back(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    """Parts that are not there yet are asked for again, soon."""
    asked = []

    def ask(place: str, parcel: Parcel, wait_s: float) -> Parcel:
        asked.append((place, parcel, wait_s))
        return Parcel("reply", {"round": 1}, {"whole": b"trained"})

    monkeypatch.setattr(client_app, "ask", ask)
    there = line(broken)
    node.carry(there, there.message, there.tree, "worker.sock")
    assert asked == [("worker.sock", Parcel("status", {}, {"params": b"abc"}), 60.0)]
    assert there.confirmed == [(5, there.tree.object_id)]
    assert there.reply.metadata.reply_to_message_id == there.tree.object_id
    found = inflate_object_from_contents(there.reply.metadata.message_id, there.sent)
    assert parcel_of(found.content) == Parcel("reply", {"round": 1}, {"whole": b"trained"})


def test_a_worker_that_is_not_there_is_an_answer(tmp_path: Path) -> None:
    there = line()
    node.carry(there, there.message, there.tree, str(tmp_path / "nobody.sock"))
    answer = parcel_of(there.reply.content)
    assert (answer.kind, "does not answer at" in answer.reason) == ("failed", True)


@pytest.mark.parametrize("broken", ["pull", "run"])
def test_a_node_gives_up_messages_that_cannot_be_carried_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    monkeypatch.setattr(client_app, "ask", lambda *words: Parcel("reply"))
    there = line(broken)
    node.carry(there, there.message, there.tree, "worker.sock")
    assert not there.sent


def test_a_node_says_what_is_wrong_with_its_files(tmp_path: Path) -> None:
    key = tmp_path / "a.key"
    with pytest.raises(ConfigError, match=r"a\.key cannot be used as a private key: .*site init"):
        node.serve("127.0.0.1:1", tmp_path / "ca.crt", key, "worker.sock")
    make_key(key)
    with pytest.raises(ConfigError, match=r"no file .*ca\.crt\. The operator"):
        node.serve("127.0.0.1:1", tmp_path / "ca.crt", key, "worker.sock")


@pytest.mark.parametrize("let_in", [True, False])
def test_a_node_that_is_not_let_in_or_thrown_out_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, let_in: bool
) -> None:
    """Flower ends the program of a node that it does not know, and swallows what breaks later."""

    @contextmanager
    def connection(*words: object) -> Iterator[Any]:
        if not let_in:
            raise SystemExit(1)
        with suppress(OSError):
            yield 7, broken, None, None, None, None, None, None

    def broken() -> None:
        raise OSError

    monkeypatch.setattr(node, "http_request_response", connection)
    make_key(tmp_path / "a.key")
    (tmp_path / "ca.crt").write_text("")
    reason = (
        "has ended.*Start the relay again" if let_in else r"not let .*a\.key\.pub is registered"
    )
    with pytest.raises(TransportError, match=reason):
        node.serve("127.0.0.1:1", tmp_path / "ca.crt", tmp_path / "a.key", "worker.sock")


# -- a real federation ----------------------------------------------------------------------------


def test_a_superlink_and_three_sites_give_the_bits_of_the_simulator(tmp_path: Path) -> None:
    """Five runs at once, whose messages come to each site in any order; then nothing is left.

    Cy has Flower's own SuperNode, the others our relay.
    """
    with federation(tmp_path, flowers_own=("cy",)) as there:
        settings, ordered = {}, {}
        for method, rounds in METHODS.items():
            changes = [*there.changes, f"run.method={method}", f"run.rounds={rounds}"]
            settings[method] = load_settings("demo", changes)
            out = tmp_path / "runs" / method
            ordered[method] = there.link.order(settings[method].tree(), out, 3, 240.0, 240.0)
        for method in METHODS:
            expected = run.start(settings[method], RunFolder(tmp_path / method), nobody)
            ordered[method].follow(nobody)
            found = json.loads((tmp_path / "runs" / method / "results.json").read_bytes())
            assert {k: found[k] for k in SAME} == {k: expected[k] for k in SAME}
        processes = [there.link.pid, *(p.pid for p in there.processes.values())]
    assert [began(pid) for pid in processes if pid] == [None] * 7
