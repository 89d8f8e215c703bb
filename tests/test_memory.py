"""What clients keep between rounds: versions, files, and how much of it is in memory."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedharmony.engine.memory import ClientMemory
from fedharmony.errors import CheckpointError
from fedharmony.experiments import run
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.files import PARTIAL


def number(value: float) -> dict[str, Tensor]:
    return {"x": torch.tensor([float(value)])}


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def value(memory: ClientMemory, client: int, before: int) -> float | None:
    found = memory.read(client, before)
    return float(found["x"]) if found else None


# -- versions -------------------------------------------------------------------------------------


@pytest.mark.parametrize("on_disk", [False, True])
def test_reads_the_newest_version_before_a_round(on_disk: bool, tmp_path: Path) -> None:
    """Versions of rounds 2 and 5: nothing before 2, 2 until 5, then 5."""
    memory = ClientMemory(tmp_path / "memory" if on_disk else None)
    for round in (5, 2):  # the order of writing does not matter
        memory.write(7, round, number(round))
    assert [value(memory, 7, t) for t in range(8)] == [None, None, None, 2, 2, 2, 5, 5]
    assert memory.read(8, before=9) == {}


def test_a_round_run_again_replaces_its_version(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path)
    memory.write(0, 1, number(10))
    memory.write(0, 1, number(20))
    assert value(memory, 0, 2) == 20
    assert memory.nbytes == 4
    assert files(tmp_path) == ["0/1.safetensors"]
    assert value(ClientMemory(tmp_path), 0, 2) == 20


@pytest.mark.parametrize("on_disk", [False, True])
def test_commit_keeps_what_a_resumed_run_may_ask_for(on_disk: bool, tmp_path: Path) -> None:
    """A checkpoint after 4 rounds resumes at round 4: it needs the newest version below 4.

    Client 0 wrote in rounds 0, 2, 3, 4: 0 and 2 go, 3 stays, 4 is not covered yet. Client 1 wrote
    in round 1 alone, which stays however old it is.
    """
    memory = ClientMemory(tmp_path if on_disk else None)
    for round in (0, 2, 3, 4):
        memory.write(0, round, number(round))
    memory.write(1, 1, number(1))
    memory.commit(4)
    assert memory.nbytes == 3 * 4
    assert [value(memory, 0, t) for t in (3, 4, 5)] == [None, 3, 4]
    assert value(memory, 1, 9) == 1
    if on_disk:
        assert files(tmp_path) == ["0/3.safetensors", "0/4.safetensors", "1/1.safetensors"]


@pytest.mark.parametrize("on_disk", [False, True])
def test_rewind_drops_what_the_checkpoint_lacks(on_disk: bool, tmp_path: Path) -> None:
    """Killed in round 4, the checkpoint has rounds 0 to 2: versions 3 and 4 never happened."""
    memory = ClientMemory(tmp_path if on_disk else None)
    for round in (2, 3, 4):
        memory.write(0, round, number(round))
    memory.rewind(3)
    assert value(memory, 0, 9) == 2
    assert memory.nbytes == 4
    if on_disk:
        assert files(tmp_path) == ["0/2.safetensors"]
    memory.rewind(0)
    assert memory.read(0, 9) == {}
    assert memory.nbytes == 0


@settings(max_examples=60)
@given(
    rounds=st.lists(st.sets(st.integers(0, 2)), min_size=1, max_size=6),
    data=st.data(),
)
def test_a_run_with_kills_reads_what_an_undisturbed_run_reads(
    rounds: list[set[int]], data: st.DataObject
) -> None:
    """A kill at any moment of any round, before or after its checkpoint or its commit."""

    def play(memory: ClientMemory, kills: bool) -> list[float | None]:
        seen: list[list[float | None]] = [[] for _ in rounds]
        done = 0
        while done < len(rounds):
            moment = data.draw(st.sampled_from(["none", "training", "commit"])) if kills else "none"
            seen[done] = [value(memory, k, done) for k in range(3)]
            took_part = sorted(rounds[done])
            if moment == "training":
                took_part = took_part[: data.draw(st.integers(0, len(took_part)))]
                kills = data.draw(st.booleans())
            for k in took_part:
                memory.write(k, done, number(10 * done + k))
            if moment != "training":
                done += 1
                if moment == "none":
                    memory.commit(done)
            if moment != "none":
                memory.rewind(done)
        return [v for round in seen for v in round]

    assert play(ClientMemory(), kills=True) == play(ClientMemory(), kills=False)


# -- what is kept is a copy -----------------------------------------------------------------------


def test_keeps_a_copy_not_a_view(tmp_path: Path) -> None:
    """One client's row of a stack of 1,000 is kept as 4 bytes; later changes do not reach it."""
    stack = torch.zeros(1000, 1)
    memory = ClientMemory()
    memory.write(0, 0, {"x": stack[3]})
    stack += 1
    kept = memory.read(0, before=1)["x"]
    assert kept.tolist() == [0.0]
    assert kept.untyped_storage().nbytes() == 4


def test_a_reader_cannot_take_names_away() -> None:
    memory = ClientMemory()
    memory.write(0, 0, number(1))
    memory.read(0, before=1).clear()
    assert value(memory, 0, 1) == 1


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_types_and_shapes_survive(limit: int, tmp_path: Path) -> None:
    kept = {
        "half": torch.tensor([0.1, 65504.0]).half(),
        "double": torch.tensor([[1 / 3]], dtype=torch.float64),
        "round": torch.tensor(7),
        "none": torch.zeros(0, 3),
        "view": torch.arange(6.0).view(2, 3).mT[1:],
        "": torch.tensor(True),
    }
    ClientMemory(tmp_path, limit).write(2, 4, kept)
    for memory in (ClientMemory(tmp_path, limit), ClientMemory(tmp_path, 0)):
        found = memory.read(2, before=5)
        assert found.keys() == kept.keys()
        assert all(found[n].dtype == t.dtype and torch.equal(found[n], t) for n, t in kept.items())


# -- on disk --------------------------------------------------------------------------------------

OTHER_PROCESS = """
import sys, torch
from pathlib import Path
from fedharmony.engine.memory import ClientMemory
memory = ClientMemory(Path(sys.argv[1]))
assert memory.nbytes == 0
print(memory.read(12, before=3)["x"].tolist(), memory.read(12, before=1), memory.nbytes)
memory.write(12, 3, {"x": torch.tensor([4.5])})
"""


def test_survives_the_process(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path)
    memory.write(12, 2, {"x": torch.tensor([1.5, 2.5])})
    done = subprocess.run(
        [sys.executable, "-c", OTHER_PROCESS, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[1.5, 2.5] {} 8\n"
    assert value(ClientMemory(tmp_path), 12, 9) == 4.5


def test_files_of_others_and_half_written_ones_are_not_versions(tmp_path: Path) -> None:
    """A process killed while it wrote leaves its temporary file behind; a resume removes it."""
    ClientMemory(tmp_path).write(3, 0, number(5))
    (tmp_path / "3" / f".1.safetensors.k2j4{PARTIAL}").write_bytes(b"half")
    (tmp_path / "3" / "notes.safetensors").write_bytes(b"?")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "1.safetensors").write_bytes(b"?")
    memory = ClientMemory(tmp_path)
    assert value(memory, 3, 9) == 5
    memory.rewind(1)
    assert value(memory, 3, 9) == 5
    assert files(tmp_path) == ["3/0.safetensors", "3/notes.safetensors", "other/1.safetensors"]


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "foreign"])
def test_a_damaged_file_is_named(damage: str, tmp_path: Path) -> None:
    ClientMemory(tmp_path).write(3, 0, {"x": torch.arange(100.0)})
    path = tmp_path / "3" / "0.safetensors"
    content = bytearray(path.read_bytes())
    if damage == "bit":
        content[-9] ^= 4
    damaged = {"cut": content[:-7], "bit": content, "empty": b"", "foreign": b"words"}[damage]
    path.write_bytes(bytes(damaged))
    with pytest.raises(CheckpointError, match=r"3/0\.safetensors is damaged.*Restore the file"):
        ClientMemory(tmp_path).read(3, before=1)


def test_a_file_that_went_away_is_named(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path, limit=0)
    memory.write(3, 0, number(1))
    (tmp_path / "3" / "0.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"There is no checkpoint .*3/0\.safetensors"):
        memory.read(3, before=1)


def test_a_write_that_fails_leaves_the_older_version(tmp_path: Path) -> None:
    """The client's folder becomes a file: the write is refused, and is not half remembered."""
    memory = ClientMemory(tmp_path, limit=0)
    memory.write(0, 0, number(1))
    (tmp_path / "1").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"Cannot create the folder .*/1: File exists"):
        memory.write(1, 1, number(2))
    assert memory.read(1, before=9) == {}
    (tmp_path / "0" / "1.safetensors").mkdir()  # and a file that cannot be replaced
    with pytest.raises(CheckpointError, match="Could not write"):
        memory.write(0, 1, number(2))
    assert value(memory, 0, 9) == 1


# -- how much is in memory ------------------------------------------------------------------------


def test_least_recently_used_go_first(tmp_path: Path) -> None:
    """Room for three numbers of 4 bytes: client 0, read last, outlives clients 1 and 2.

    What is no longer held is read from its file; files that are gone show what was held.
    """
    memory = ClientMemory(tmp_path, limit=12)
    for client in range(3):
        memory.write(client, 0, number(client))
    assert (memory.nbytes, value(memory, 0, 1)) == (12, 0)
    for client in (3, 4):
        memory.write(client, 0, number(client))
        assert memory.nbytes == 12
    for path in tmp_path.rglob("*.safetensors"):
        path.unlink()
    assert [value(memory, k, 1) for k in (0, 3, 4)] == [0, 3, 4]
    for client in (1, 2):
        with pytest.raises(CheckpointError):
            memory.read(client, before=1)


def test_more_than_the_limit_is_not_held(tmp_path: Path) -> None:
    memory = ClientMemory(tmp_path, limit=12)
    memory.write(0, 0, {"x": torch.zeros(4)})
    assert memory.nbytes == 0
    assert memory.read(0, before=1)["x"].tolist() == [0.0] * 4
    assert memory.nbytes == 0


def test_without_a_folder_nothing_is_let_go() -> None:
    memory = ClientMemory(limit=4)
    for client in range(5):
        memory.write(client, 0, number(client))
    assert memory.nbytes == 20
    assert [value(memory, k, 1) for k in range(5)] == [0, 1, 2, 3, 4]


def test_many_clients_do_not_fill_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1,000 clients of 4 kB each and room for 64 kB: never more is held, and nothing is lost.

    The tensors themselves are counted beside the memory's own books.
    """
    monkeypatch.setattr("os.fsync", lambda handle: None)  # 1,000 disk flushes are not the point
    memory = ClientMemory(tmp_path, limit=64 * 1024)
    for client in range(1000):
        memory.write(client, 0, {"x": torch.full((1024,), float(client))})
        assert memory.nbytes <= 64 * 1024
    assert memory.nbytes == 64 * 1024
    assert sum(t.nbytes for kept in memory._held.values() for t in kept.values()) == 64 * 1024
    for client in range(0, 1000, 37):
        assert memory.read(client, before=1)["x"].tolist() == [float(client)] * 1024
        assert memory.nbytes <= 64 * 1024
    memory.rewind(0)
    assert memory.nbytes == 0
    assert files(tmp_path) == []


def test_a_completed_run_leaves_no_memory_behind(tmp_path: Path) -> None:
    """While it runs every client heard has a file; a completed run needs none of them."""
    small = ["data.train=60", "data.test=20", "split.clients=3", "train.epochs=1", "run.rounds=2"]
    shape = ["model.width=16", "model.depth=1", "model.heads=2", "engine.threads=1"]
    chosen = load_settings("demo", [*small, *shape, "run.method=fedcurv"])
    seen: list[int] = []

    def watch(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            seen.append(len(list((tmp_path / "run" / "memory").glob("*/*.safetensors"))))

    run.start(chosen, RunFolder(tmp_path / "run"), watch)
    assert min(seen) > 0
    assert not list((tmp_path / "run" / "memory").glob("*/*.safetensors"))
