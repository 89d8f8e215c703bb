"""Flower itself: messages as it carries them, and a real SuperLink with three SuperNodes.

Skipped where Flower is not installed.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("flwr")

from flwr.app import ConfigRecord, RecordDict

from fedharmony.errors import TransportError
from fedharmony.experiments import run
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.flower.link import began
from fedharmony.flower.wire import content_of, parcel_of
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


def test_the_relay_needs_no_torch() -> None:
    code = "import sys, fedharmony.flower.client_app; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


# -- a real federation ----------------------------------------------------------------------------


def test_a_superlink_and_three_supernodes_give_the_bits_of_the_simulator(tmp_path: Path) -> None:
    """Five runs at once, whose messages come to each site in any order; then nothing is left."""
    with federation(tmp_path) as there:
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
