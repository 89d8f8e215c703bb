"""Runs that begin alike ask clients once for the sums of a closed-form head."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedharmony.data.base import DataSet
from fedharmony.engine.memory import ClientMemory
from fedharmony.engine.sweeping import Sweeper
from fedharmony.experiments.build import assemble
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.run import start
from fedharmony.experiments.settings import load_settings
from fedharmony.transport import shelf
from fedharmony.transport.shelf import Shelf
from fedharmony.types import Failure, Record, Reply

TINY = (
    *("data.train=90", "data.test=12", "split.clients=3", "run.rounds=1", "train.epochs=1"),
    *("model.width=8", "model.depth=1", "model.heads=2", "engine.threads=1", "engine.device=cpu"),
)


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What passes over clients' data were made for, as they are made."""
    made: list[str] = []
    sweep = Sweeper.sweep

    def counted(self: Sweeper, asked: Any, *rest: Any) -> Any:
        made.append(asked.group)
        return sweep(self, asked, *rest)

    monkeypatch.setattr(Sweeper, "sweep", counted)
    return made


def train(place: Path, data: DataSet | None, *changes: str) -> dict[str, torch.Tensor]:
    """All that a run leaves in its checkpoint."""
    settings = load_settings("demo", [*TINY, *changes])
    start(settings, RunFolder(place), lambda event: None, data)
    return load_file(place / "checkpoint.safetensors")


def loaded() -> DataSet:
    return assemble(load_settings("demo", [*TINY])).loaded


def test_methods_that_begin_alike_ask_once_and_end_in_the_same_bits(
    tmp_path: Path, passes: list[str]
) -> None:
    data = loaded()
    train(tmp_path / "first", data, "run.method=fedavg:plus")
    assert passes.count("head_sums") == 1
    shared = train(tmp_path / "shared", data, "run.method=fedprox:plus")
    assert passes.count("head_sums") == 1
    alone = train(tmp_path / "alone", None, "run.method=fedprox:plus")
    assert passes.count("head_sums") == 2
    assert shared.keys() == alone.keys()
    assert all(torch.equal(shared[name], alone[name]) for name in shared)


@pytest.mark.parametrize(
    ("changes", "asks"),
    [
        ((), 0),
        (("train.lr=0.01", "run.rounds=2"), 0),
        (("federation.head_ridge=0.5",), 1),  # all settings of the head count
        (("federation.head_scale=2",), 1),
        (("federation.head_clients=2",), 1),
        (("split.gamma=5",), 1),
        (("split.annotated=0.5",), 1),
        (("engine.stack=1",), 3),  # a stack for each client
        (("train.batch_size=8",), 1),
        (("model.seed=7",), 1),  # another backbone
        (("run.method=fedrdn:plus",), 1),  # shows images in its own way
        (("attack.kind=label_flip", "attack.share=0.4"), 2),  # honest clients, and malicious ones
    ],
)
def test_what_may_be_answered_otherwise_is_asked_again(
    changes: tuple[str, ...], asks: int, tmp_path: Path, passes: list[str]
) -> None:
    data = loaded()
    train(tmp_path / "first", data, "run.method=fedavg:plus")
    passes.clear()
    train(tmp_path / "second", data, "run.method=fedavg:plus", *changes)
    assert passes.count("head_sums") == asks


def test_seeds_share_the_sums_of_one_backbone(tmp_path: Path, passes: list[str]) -> None:
    """Another seed draws another head, of which features know nothing."""
    made = assemble(load_settings("demo", [*TINY])).blueprint.parameters[0]
    backbone = {n: t.contiguous() for n, t in made.items() if not n.startswith("head.")}
    save_file(backbone, tmp_path / "vit.safetensors")
    weights, data = f"model.weights='{tmp_path / 'vit.safetensors'}'", loaded()
    for seed in (0, 1):
        seeds = (f"run.seed={seed}", f"model.seed={seed}")
        train(tmp_path / str(seed), data, "run.method=fedavg:plus", weights, *seeds)
    assert passes.count("head_sums") == 1


def reply(client: int, finite: bool = True) -> Reply:
    return Reply(client, 1, Record({"g": {"t": torch.zeros(4)}}), finite)


def test_only_whole_answers_are_kept_and_no_more_than_there_is_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Answers of 16 bytes each, on a machine of 800 bytes: three of them fit into its 50."""
    monkeypatch.setattr(shelf, "machine_memory", lambda: 800)
    one, here = Shelf({}, "here"), torch.device("cpu")

    def ask(question: str, *answers: Reply | Failure) -> None:
        assert list(one.answers(question, iter(answers), here)) == list(answers)

    ask("lost", reply(0), Failure(1, "head", 0, "gone"))
    ask("lost first", Failure(1, "head", 0, "gone"), reply(0))
    ask("infinite", reply(0, finite=False))
    next(one.answers("broken off", iter([reply(0), reply(1)]), here))
    assert one.kept == {}
    for name in "abcd":
        ask(name, reply(0))
    assert list(one.kept) == ["b", "c", "d"]
    ask("large", *(reply(k) for k in range(4)))
    assert list(one.kept) == ["b", "c", "d"]
    (known,) = one.answers("b", iter([]), here)
    assert known.client == 0


def test_a_run_by_itself_keeps_nothing() -> None:
    """Sums of thousands of clients, which nobody would ask for again."""
    settings, data = load_settings("demo", [*TINY, "run.method=fedavg:plus"]), loaded()
    for shared, kept in ((None, 0), (data, 1)):
        assembly = assemble(settings, data=shared)
        federation = assembly.federation(ClientMemory())
        federation.run(assembly.initial_state(), 0, lambda event: None, lambda round, state: None)
        assert len(assembly.loaded.shelf) == kept
