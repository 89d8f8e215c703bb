"""A site's own parts: labels, settings, parcels, the socket, keys and units."""

from __future__ import annotations

import os
import pickle
import queue
import re
import shlex
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedharmony.data.base import DataSet, LabelledImages, Source, TensorImages
from fedharmony.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    FedHarmonyError,
    Stopped,
    TransportError,
)
from fedharmony.experiments.settings import load_settings
from fedharmony.flower.roster import _enrolled
from fedharmony.flower.server import _test_only
from fedharmony.site import worker as site_worker
from fedharmony.site.keys import make_certificates, make_key
from fedharmony.site.labels import Vocabulary
from fedharmony.site.parcel import Parcel, ask, receive, send
from fedharmony.site.policy import Policy, offered
from fedharmony.site.records import pack, record_of
from fedharmony.site.settings import TEMPLATE, load_site
from fedharmony.site.units import units
from fedharmony.types import Record
from sites import CLASSES, draw_site, site_file
from test_cli import refuse, succeed

# -- labels ---------------------------------------------------------------------------------------


def local(labels: list[list[int]], names: str, known: list[list[int]] | None = None) -> DataSet:
    images = TensorImages(torch.zeros(len(labels), 3, 2, 2, dtype=torch.uint8))
    mask = None if known is None else np.array(known, np.bool_)
    part = LabelledImages(images, np.array(labels, np.uint8), known=mask)
    return DataSet("own", tuple(names.split()), part, part)


def test_what_a_site_does_not_annotate_is_unknown_never_absent() -> None:
    """Here: cat and Baum. There: cat, dog, tree. dog is unknown on both images, not absent."""
    data = local([[1, 0], [0, 1]], "cat Baum")
    found = Vocabulary(CLASSES, {"Baum": "tree"}).translate(data)
    assert found.train.labels.tolist() == [[1, 0, 0], [0, 0, 1]]
    assert found.train.known is not None
    assert found.train.known.tolist() == [[True, False, True], [True, False, True]]
    assert found.classes == CLASSES


def test_a_label_may_be_annotated_without_ever_being_seen() -> None:
    """Annotated names all three: dog is absent on both images, and nothing is unknown."""
    data = local([[1, 0], [0, 1]], "cat tree")
    found = Vocabulary(CLASSES, {}, annotated=CLASSES).translate(data)
    assert found.train.known is None
    assert found.train.labels[:, 1].tolist() == [0, 0]


def test_a_label_that_is_not_annotated_hides_what_the_data_say() -> None:
    found = Vocabulary(CLASSES, {}, ("cat",)).translate(local([[1, 1, 1]], "cat dog tree"))
    assert found.train.known is not None
    assert found.train.known.tolist() == [[True, False, False]]
    assert found.train.labels.tolist() == [[1, 0, 0]]


def test_two_names_for_one_label() -> None:
    """Oak or fir is a tree. Present if one is known to be; absent only if both are known not to be.

    (oak, fir): (1, unknown) → present; (0, unknown) → unknown; (0, 0) → absent.
    """
    data = local([[1, 0], [0, 0], [0, 0]], "oak fir", [[1, 0], [1, 0], [1, 1]])
    found = Vocabulary(("tree",), {"oak": "tree", "fir": "tree"}).translate(data)
    assert found.train.labels.ravel().tolist() == [1, 0, 0]
    assert found.train.known is not None
    assert found.train.known.ravel().tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("names", "annotated", "reason"),
    [
        ({}, None, "'tre' of these data is none of the federation's. Did you mean 'tree'"),
        ({"tre": "tree", "dgo": "dog"}, None, r"translates 'dgo'"),
        ({"tre": "tree"}, ("cats",), "annotated names 'cats'"),
    ],
)
def test_labels_that_nobody_knows_are_refused(names: Any, annotated: Any, reason: str) -> None:
    with pytest.raises(DataError, match=reason):
        Vocabulary(CLASSES, names, annotated).translate(local([[1, 0]], "cat tre"))


def test_a_label_may_be_left_out() -> None:
    found = Vocabulary(("cat",), {"x-ray": ""}).translate(local([[1, 1]], "cat x-ray"))
    assert found.train.labels.tolist() == [[1]]


# -- parcels --------------------------------------------------------------------------------------


@given(
    st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=9), max_size=3),
    st.dictionaries(st.text("ab/", min_size=1, max_size=4), st.binary(max_size=40), max_size=2),
)
def test_a_parcel_comes_back_as_it_was(words: dict[str, Any], parts: dict[str, bytes]) -> None:
    parcel = Parcel("stage", words, parts)
    assert Parcel.from_bytes(parcel.to_bytes()) == parcel


@given(st.binary(max_size=200))
def test_no_bytes_do_more_than_be_refused(data: bytes) -> None:
    with pytest.raises(TransportError):
        Parcel.from_bytes(data)


def test_nothing_is_unpickled() -> None:
    evil = pickle.dumps(test_nothing_is_unpickled)
    with pytest.raises(TransportError, match="no parcel"):
        Parcel.from_bytes(evil)
    with pytest.raises(TransportError, match="is damaged"):
        record_of({"params": evil}, {})


def test_a_group_must_not_come_twice() -> None:
    (parts,) = pack([Record({"params": {"w": torch.ones(2)}})])
    with pytest.raises(TransportError, match="Two parts of a parcel hold the group 'params'"):
        record_of({**parts, "more": parts["own"]}, {})


def test_what_records_share_is_packed_once_and_all_in_at_most_two_parts() -> None:
    """Three groups are common to both, two are not: one by its tensors, one by its name."""
    shared = {name: {"w": torch.ones(2)} for name in ("params", "fisher", "pull")}
    records = [
        Record({**shared, "teacher": {"r": torch.full((2,), k)}, f"only{k}": {"a": torch.ones(1)}})
        for k in (1.0, 2.0)
    ]
    one, other = pack(records)
    assert sorted(one) == ["own", "shared"]
    assert one["shared"] is other["shared"]
    for record, parts in zip(records, (one, other), strict=True):
        found = record_of(parts, {})
        assert sorted(found.groups) == sorted(record.groups)
        assert torch.equal(found.get("teacher")["r"], record.get("teacher")["r"])
    assert pack([Record(shared), Record(shared)])[0].keys() == {"shared"}
    assert pack([]) == []


def test_records_keep_order_bits_and_types() -> None:
    tensors = {"z": torch.tensor([0.1, -0.0]), "a": torch.tensor(3), "m": torch.ones(2, 3).T}
    (parts,) = pack([Record({"params": tensors, "buffers": {}})])
    found = record_of(parts, {"loss": 0.1})
    assert list(found.get("params")) == ["z", "a", "m"]
    assert all(torch.equal(found.get("params")[n], t) for n, t in tensors.items())
    assert found.get("params")["a"].dtype == torch.int64


def test_a_parcel_that_is_too_large_is_not_read() -> None:
    here, there = socket.socketpair()
    with here, there:
        send(here, Parcel("status", {}, {"a": bytes(1000)}))
        with pytest.raises(TransportError, match=r"announced; at most 500"):
            receive(there, 500)


def test_a_parcel_that_breaks_off_is_refused() -> None:
    here, there = socket.socketpair()
    with there:
        with here:
            here.sendall((100).to_bytes(8, "big") + b"half")
        with pytest.raises(TransportError, match="broke off after 4"):
            receive(there)
        assert receive(there) is None  # nothing more


# -- settings and socket --------------------------------------------------------------------------


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))
    draw_site(tmp_path, "ada", 6)
    return site_file(tmp_path, "ada")


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("[policy]", "[polcy]", "Did you mean 'policy'"),
        ('name = "ada"', 'name = "../ada"', "small letters"),
        ('name = "ada"', 'name = "ada"\nlabel = 1', "Unknown setting site.label"),
        ('"cat", ', '"dog", ', "every label of the federation once"),
        ('statistics = "all"', 'methods = ["fedavgg"]', "Did you mean 'fedavg'"),
        ("[engine]", "[labels]\ncat = 3\n[engine]", "labels.cat = 3 must be text"),
        ("[engine]", '[files]\nw = "gone"\n[engine]', "files.w is .*gone"),
        ('name = "ada"', f'name = "ada"\nsocket = "{"x" * 100}"', "at most 100 bytes"),
    ],
)
def test_a_wrong_site_file_is_refused(site: Path, old: str, new: str, reason: str) -> None:
    text = site.read_text().replace("'", '"')
    assert old in text
    site.write_text(text.replace(old, new, 1))
    with pytest.raises(FedHarmonyError, match=reason):
        load_site(site)


def test_paths_are_relative_to_the_file(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir("/")
    settings = load_site(site)
    assert settings.data.tree()["path"] == str(site.parent)
    assert settings.socket == site.parent / "worker.sock"


def test_the_template_is_a_site_file(site: Path) -> None:
    text = TEMPLATE.format(name='"ada"', classes=list(CLASSES), path='"."', image_size=16)
    site.write_text(text)
    found = load_site(site)
    assert (found.policy, found.data.own.image_size) == (Policy("all", (), 1), 16)


def test_a_worker_answers_at_its_socket_and_survives_bad_guests(site: Path) -> None:
    worker = site_worker.Worker(load_site(site))
    place = worker.settings.socket
    with site_worker.listening(place) as listener:
        assert stat.S_IMODE(place.stat().st_mode) == 0o660

        def serve() -> None:
            for _ in range(3):
                stream, _ = listener.accept()
                with site_worker._peer(stream):
                    site_worker._take_in(worker, stream, 10_000, queue.Queue(1))

        thread = threading.Thread(target=serve)
        thread.start()
        with socket.socket(socket.AF_UNIX) as rude:
            rude.connect(str(place))
            rude.sendall(b"GET / HTTP/1.1\r\n\r\n")
        # Much more than a socket holds: a refusal must not tear the line that it is sent over.
        answer = ask(place, Parcel("status", {}, {"much": bytes(20_000_000)}), 10)
        assert (answer.kind, "at most 10,000" in answer.reason) == ("refused", True)
        assert ask(place, Parcel("status"), 10).words["site"] == "ada"
        thread.join()
        with pytest.raises(TransportError, match="Another worker answers"):
            site_worker.listening(place).__enter__()
    assert not place.exists()
    with pytest.raises(TransportError, match="site serve"):
        ask(place, Parcel("status"), 10)


def test_a_busy_worker_says_how_it_is_and_lets_one_question_wait(site: Path) -> None:
    """It works until it is told to end: whatever is answered meanwhile did not wait for that."""
    begun, end, answers = threading.Event(), threading.Event(), queue.Queue[Parcel]()

    class Busy(site_worker.Worker):
        def _answer(self, question: Parcel) -> Parcel:
            if question.words.get("last"):
                raise Stopped("the test", 0)
            begun.set()
            assert end.wait(120)
            return Parcel("reply")

    def serve() -> None:
        with suppress(Stopped):
            site_worker.serve(worker)

    def put(**words: bool) -> None:
        answers.put(ask(place, Parcel("stage", words)))

    worker = Busy(load_site(site))
    place = worker.settings.socket
    threads = [threading.Thread(target=serve, daemon=True)]
    threads[0].start()
    while not place.is_socket():
        assert threads[0].is_alive()
    for _ in range(3):  # one is worked on, one waits, one is refused
        threads.append(threading.Thread(target=put))
        threads[-1].start()
        assert begun.wait(120)
    refused = answers.get(timeout=120)
    assert (refused.kind, "another message waits" in refused.reason) == ("refused", True)
    assert "state: busy since 20" in succeed(site.parent, "site", "status", str(site))
    assert answers.empty()
    end.set()
    for thread in threads[1:]:
        thread.join()
    assert [answers.get().kind, answers.get().kind] == ["reply", "reply"]
    assert ask(place, Parcel("status")).words["state"] == "idle"
    with pytest.raises(TransportError, match="ended while it was asked"):
        put(last=True)
    threads[0].join()


def test_a_socket_that_a_dead_worker_left_is_replaced(site: Path) -> None:
    place = site.parent / "worker.sock"
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(place))
    with site_worker.listening(place):
        assert place.is_socket()


def test_a_worker_that_dies_while_it_is_asked_is_told(tmp_path: Path) -> None:
    place = tmp_path / "worker.sock"
    with site_worker.listening(place) as listener:

        def die() -> None:
            stream, _ = listener.accept()
            receive(stream)
            stream.close()

        thread = threading.Thread(target=die)
        thread.start()
        with pytest.raises(TransportError, match="ended while it was asked"):
            ask(place, Parcel("status"), 10)
        thread.join()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_group_may_ask_the_worker_and_read_nothing(tmp_path: Path) -> None:
    """The SuperNode's user: it may write to the socket, and read neither data, memory nor cache."""
    with tempfile.TemporaryDirectory(dir="/tmp") as name:
        folder = Path(name)
        folder.chmod(0o755)
        draw_site(folder, "ada", 6)
        site = site_file(folder, "ada")
        (folder / "ada" / "labels.csv").chmod(0o600)
        (folder / "ada" / "0.png").chmod(0o600)
        found = {"FEDHARMONY_CACHE": str(folder / "cache")}
        paths = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        serve = [sys.executable, "-m", "fedharmony", "site", "serve", str(site)]
        worker = subprocess.Popen(serve, env={**os.environ, **found, **paths}, umask=0o022)
        try:
            while not (folder / "ada" / "worker.sock").exists():
                assert worker.poll() is None
                time.sleep(0.05)
            look = (
                "test -w ada/worker.sock && echo socket; "
                "cat ada/labels.csv ada/0.png; ls ada/memory; ls cache; find cache ada/memory"
            )
            seen = subprocess.run(
                ["/bin/sh", "-c", look],
                cwd=folder,
                user=65534,
                group=os.getegid(),
                extra_groups=[],
                capture_output=True,
                text=True,
            )
        finally:
            worker.terminate()
            worker.wait()
    assert seen.stdout.splitlines() == ["socket", "cache", "ada/memory"]  # their names alone
    assert seen.stderr.count("ermission denied") == 6


# -- keys, units, commands ------------------------------------------------------------------------


def test_keys_are_private_and_never_replaced(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    public = make_key(tmp_path / "ada.key")
    assert public.read_text().startswith("ecdsa-sha2-nistp384 ")
    assert stat.S_IMODE((tmp_path / "ada.key").stat().st_mode) == 0o600
    with pytest.raises(CheckpointError, match="never replaced"):
        make_key(tmp_path / "ada.key")


def test_certificates_name_the_hosts(tmp_path: Path) -> None:
    x509 = pytest.importorskip("cryptography.x509")
    make_certificates(tmp_path, ["fed.example.org", "127.0.0.1"])
    server = x509.load_pem_x509_certificate((tmp_path / "server.pem").read_bytes())
    ca = x509.load_pem_x509_certificate((tmp_path / "ca.crt").read_bytes())
    server.verify_directly_issued_by(ca)
    # Whoever had the authority's key could be the server of this federation.
    assert {file.name for file in tmp_path.iterdir()} == {"ca.crt", "server.pem", "server.key"}
    assert server.public_key() != ca.public_key()
    names = server.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    assert [str(name.value) for name in names] == ["fed.example.org", "127.0.0.1"]
    assert stat.S_IMODE((tmp_path / "server.key").stat().st_mode) == 0o600


def test_units_keep_two_users_apart(site: Path) -> None:
    text = units(site, load_site(site), "fed.example.org:8443", "owner", "relay")
    worker, relay = text.split("fedharmony-relay.service")
    assert "User=owner" in worker
    assert "PrivateNetwork=yes" in worker
    assert "UMask=0077" in worker
    assert "User=relay" in relay
    assert f'--socket "{site.parent / "worker.sock"}"' in relay
    assert str(site) not in relay  # nor anything else of the data


def test_units_name_no_folder_that_is_not_there(site: Path) -> None:
    site.write_text(site.read_text().replace("[data]", 'socket = "run/50%/w.sock"\n[data]', 1))
    settings = load_site(site)
    text = units(site, settings, "fed.example.org:8443", "owner", "relay").replace("\\\n", "")
    lines = [line.partition("=")[::2] for line in text.splitlines() if "=" in line]
    (writes,) = (shlex.split(value) for key, value in lines if key == "ReadWritePaths")
    created = [shlex.split(value)[-1] for key, value in lines if key == "ExecStartPre"]
    assert writes == created == [str(settings.memory), str(site.parent / "run" / "50%%")]
    assert ("CacheDirectory", "fedharmony") in lines  # systemd makes it, for the user of the unit
    assert ("Environment", "FEDHARMONY_CACHE=/var/cache/fedharmony") in lines
    assert not re.search("%[^%]", text.replace("%%", ""))  # a home folder would be root's


def test_check_counts_what_is_unknown(site: Path, tmp_path: Path) -> None:
    site.write_text(site.read_text().replace("[data]", 'annotated = ["cat"]\n[data]', 1))
    shown = succeed(tmp_path, "site", "check", str(site)).split()
    assert shown[shown.index("dog") + 1 :][:3] == ["0", "0", "6"]
    assert "6 training images" in " ".join(shown)


def test_init_writes_what_load_reads(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    file = tmp_path / "own.toml"
    words = ("site", "init", "clinic-a", "--classes", "cat, dog", "--data", str(tmp_path))
    succeed(tmp_path, *words, "--out", str(file))
    settings = load_site(file)
    assert settings.site.classes == ("cat", "dog")
    assert (tmp_path / "clinic-a.key.pub").exists()
    assert "exists already" in refuse(tmp_path, *words, "--out", str(file))


@pytest.mark.parametrize(
    ("name", "labels", "reason"),
    [
        ("a/b", "cat", "small letters"),
        ("Clinic A", "cat", "small letters"),
        ("a", "cat,cat", "every label"),
        ("a", ",", "every label"),
    ],
)
def test_init_writes_nothing_that_check_refuses(
    name: str, labels: str, reason: str, tmp_path: Path
) -> None:
    words = ("site", "init", name, "--classes", labels, "--data", str(tmp_path))
    assert reason in refuse(tmp_path, *words, "--out", str(tmp_path / "site.toml"))
    assert not list(tmp_path.iterdir())


def test_a_name_that_no_site_can_have_is_not_enrolled() -> None:
    words = {"site": "Clinic A", "images": 3, "bound": "0"}
    with pytest.raises(TransportError, match=r"node 7 calls itself 'Clinic A': .*small letters"):
        _enrolled("node 7", words)
    assert _enrolled("node 7", {**words, "site": "clinic-a"})[0] == "clinic-a"


def test_what_a_relay_imports_of_a_site_needs_no_torch() -> None:
    code = "import sys, fedharmony.site.parcel; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_plug_ins_do_not_travel() -> None:
    settings = load_settings("demo")
    named = replace(settings, run=replace(settings.run, plugins=("shout.py",)))
    with pytest.raises(ConfigError, match="cannot travel to sites"):
        offered(named)


def test_feature_vectors_are_refused() -> None:
    rows = LabelledImages(TensorImages(torch.zeros(1, 4)), np.ones((1, 1), np.uint8))

    class Vectors(Source):
        def load(self) -> DataSet:
            return DataSet("own", ("a",), rows, rows)

    with pytest.raises(ConfigError, match="needs images"):
        _test_only(Vectors())
