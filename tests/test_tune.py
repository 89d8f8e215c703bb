"""Layers of settings, settings of one method alone, held-out images, and the search."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedharmony
from fedharmony.errors import CheckpointError, ConfigError
from fedharmony.experiments import run as runs
from fedharmony.experiments import tune
from fedharmony.experiments.build import assemble, hold_out
from fedharmony.experiments.compare import Planned, plan
from fedharmony.experiments.crowd import Crowd
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.jobs import Workers
from fedharmony.experiments.run import resume, start
from fedharmony.experiments.settings import Settings, load_settings
from fedharmony.experiments.tune import Choice, Search
from fedharmony.report.page import write_report

SMALL = [
    *("data.train=120", "data.test=40", "split.clients=4", "run.rounds=2", "split.min_size=5"),
    *("train.epochs=1", "engine.threads=1", "model.width=16", "model.depth=1", "model.heads=2"),
]

# -- config files ---------------------------------------------------------------------------------


def test_files_are_laid_on_top_of_each_other_then_come_assignments(tmp_path: Path) -> None:
    (tmp_path / "more.toml").write_text("[run]\nrounds = 7\n[methods.fedprox]\nmu = 0.5\n")
    more = str(tmp_path / "more.toml")
    settings = load_settings("demo", ["run.method=fedprox", more, "run.seed=3"])
    assert (settings.run.rounds, settings.run.seed, settings.train.batch_size) == (7, 3, 16)
    assert settings.method_config.mu == 0.5
    assert load_settings("demo", [more, "run.rounds=9"]).run.rounds == 9  # whatever the order
    assert load_settings("demo", ["run.rounds=9", more]).run.rounds == 9
    odd = tmp_path / "lr=0.1"
    odd.mkdir()
    (odd / "more.toml").write_text("[run]\nrounds = 4\n")
    assert load_settings("demo", [str(odd / "more.toml")]).run.rounds == 4


def test_a_method_may_have_its_own_optimiser_settings() -> None:
    changes = ["methods.fedprox.train.lr=0.01", "methods.fedprox.train.optimiser=sgd"]
    settings = load_settings("demo", [*changes, "run.method=fedprox"])
    assert (settings.training.lr, settings.training.optimiser) == (0.01, "sgd")
    assert settings.training.epochs == settings.train.epochs
    other = settings.with_run("fedavg")
    assert (other.training.lr, other.training.optimiser) == (1e-3, "adam")
    again = runs_settings(settings)
    assert again.training == settings.training
    assert again.sha256() == settings.sha256()


def runs_settings(settings: Settings) -> Settings:
    from fedharmony.experiments.settings import compose

    return compose(settings.tree())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("methods.fedprox.train.epochs=3", ["train.epochs", "common to all"]),
        ("methods.fedprox.train.lr=-1.0", ["methods.fedprox.train.lr"]),
        ("methods.fedprox.train=3", ["must be a section"]),
        ("tune.fedprox.mu=0.1", ["tune.fedprox.mu", "list"]),
        ("tune.fedprox.mu=[-1.0]", ["tune.fedprox.mu"]),
        ("tune.fedprox.nu=[1.0]", ["tune.fedprox.nu", "'mu'"]),
        ("tune.fedprix.mu=[1.0]", ["tune.fedprix", "'fedprox'"]),
        ("tune.holdout=1.0", ["tune.holdout"]),
        ("split.holdout=-0.1", ["split.holdout"]),
        ("nothing.toml", ["nothing.toml"]),
    ],
)
def test_wrong_settings_are_refused(change: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_settings("demo", [change])
    for word in words:
        assert word in str(caught.value)


def test_a_label_says_what_the_settings_make_of_a_method() -> None:
    demo = load_settings("demo")
    assert demo.with_run("fedlgt").label == "fedlgt-randtext"
    assert demo.with_run("fednova").label == "fednova"
    assert demo.with_run("fednova:diagnostic").label == "fednova-diagnostic"
    assert demo.with_run("fedlgt:released").label == "fedlgt-randtext:released"
    changed = load_settings("demo", ['methods.fednova.tau_eff="ones"', "run.method=fednova"])
    assert changed.label == "fednova-diagnostic"
    (run,) = plan(changed, ["fednova"], [0], Path("somewhere"))
    assert run.label == "fednova-diagnostic"
    assert "fednova-diagnostic" in run.folder.path.as_posix()


CENTRAL_CASES: Sequence[list[str]] = (
    ["train.epochs=5", "federation.participation=0.5"],  # 2.5 passes over the data are not 2
    ["federation.sampling=size", "split.gamma=0.1", "train.epochs=3"],  # more than their share
    ["federation.drop_rate=0.5", "run.rounds=6"],
    ["federation.cohort=1", "train.epochs=2"],
)


@pytest.mark.parametrize("changes", CENTRAL_CASES)
def test_central_sees_as_many_images_as_the_cohorts(changes: list[str], tmp_path: Path) -> None:
    """Round by round what the federated run's own events say; every image equally often."""
    demo = load_settings("demo", [*SMALL, "run.method=fedavg", *changes])
    events: list[Any] = []
    start(demo, RunFolder(tmp_path / "federated"), events.append)
    (run,) = plan(demo.with_run("fedprox"), ["central"], [demo.run.seed], tmp_path)
    assert run.label == "central"
    start(runs_settings(run.settings), run.folder, events.append)  # as read back from its folder
    rounds = [e for e in events if e["event"] == "round"]
    federated, central = rounds[: demo.run.rounds], rounds[demo.run.rounds :]
    assert [e["images"] for e in central] == [e["images"] for e in federated]
    assert all(not e["left_out"] for e in central)
    assembly = assemble(run.settings)
    seen = np.bincount(np.concatenate(list(assembly.clients.values())), minlength=120)
    assert seen.max() - seen.min() <= 1
    assert seen.sum() == sum(e["images"] for e in federated)


def test_central_knows_every_label_and_the_images_as_they_are(tmp_path: Path) -> None:
    changes = ["split.annotated=0.3", 'split.transforms=["dark","grey"]']
    demo = load_settings("demo", [*SMALL, *changes])
    plain = assemble(load_settings("demo", SMALL)).data.train
    central = assemble(plan(demo, ["central"], [0], tmp_path)[0].settings)
    assert central.data.train.known is None
    assert not central.blueprint.method.task.unknown_labels
    index = torch.arange(20)
    cpu = torch.device("cpu")
    assert torch.equal(
        central.data.train.images.gather(index, cpu), plain.images.gather(index, cpu)
    )
    federated = assemble(demo)
    assert federated.blueprint.method.task.unknown_labels
    assert not torch.equal(
        federated.data.train.images.gather(index, cpu), plain.images.gather(index, cpu)
    )
    assert central.partition.sha256 == federated.partition.sha256  # what it stands beside


def test_central_continues_to_the_bit_and_makes_a_report(tmp_path: Path) -> None:
    demo = load_settings("demo", [*SMALL, "run.rounds=12"])  # more rounds than clients
    runs = plan(demo, ["central"], [0], tmp_path / "whole") + plan(
        demo, ["central"], [0], tmp_path / "parts"
    )
    whole = start(runs[0].settings, runs[0].folder, lambda event: None)

    def stop(event: Any) -> None:
        if event["event"] == "round" and event["round"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        start(runs[1].settings, runs[1].folder, stop)
    parts = resume(runs[1].folder, lambda event: None)
    assert parts["state_sha256"] == whole["state_sha256"]
    page = write_report(runs[1].folder.path)
    assert "central" in page.read_text()


def test_only_fedavg_trains_in_one_place() -> None:
    demo = load_settings("demo", [*SMALL, "federation.central=true"])
    with pytest.raises(ConfigError, match="'fedharmony' has no meaning"):
        assemble(demo)


def test_nothing_is_called_an_upper_bound() -> None:
    for path in Path(fedharmony.__file__).parent.rglob("*.py"):
        assert "upper bound" not in path.read_text().lower(), path


# -- held-out images ------------------------------------------------------------------------------


def test_hold_out_takes_the_share_of_each_client_and_leaves_one_image() -> None:
    """Sizes 10, 3, 1 with 0.3: round(3), round(0.9) = 1 and, of one image, none."""
    parts = {0: np.arange(10), 1: np.arange(10, 13), 2: np.array([13])}
    kept, held = hold_out(parts, 0.3, 5, "holdout")
    assert [len(k) for k in kept.values()] == [7, 2, 1]
    assert len(held) == 4
    together = np.sort(np.concatenate([*kept.values(), held]))
    assert together.tolist() == list(range(14))
    assert all((np.diff(k) > 0).all() for k in kept.values())
    _, same = hold_out(parts, 0.3, 5, "holdout")
    assert (same == held).all()
    assert (hold_out(parts, 0.3, 6, "holdout")[1] != held).any()
    assert (hold_out(parts, 0.3, 5, "thresholds")[1] != held).any()
    assert [len(k) for k in hold_out(parts, 0.999, 5, "holdout")[0].values()] == [1, 1, 1]
    with pytest.raises(ConfigError, match="no image at all"):
        hold_out({0: np.array([0]), 1: np.array([1])}, 0.4, 0, "holdout")


def test_a_run_with_held_out_images_never_sees_the_test_set() -> None:
    assembly = assemble(load_settings("demo", [*SMALL, "split.holdout=0.25"]))
    plain = assemble(load_settings("demo", SMALL))
    assert assembly.partition.sha256 == plain.partition.sha256
    trained = {int(i) for part in assembly.clients.values() for i in part}
    images = assembly.data.train
    held = [i for i in range(len(images)) if i not in trained]
    assert len(assembly.data.test) == len(held)
    shown = assembly.data.test.images.gather(torch.arange(len(held)), "cpu")
    assert torch.equal(shown, images.images.gather(torch.tensor(held), "cpu"))
    assert (assembly.data.test.labels == images.labels[held]).all()
    for part, own in zip(assembly.clients.values(), plain.clients.values(), strict=True):
        assert set(part) < set(own)


# -- the search -----------------------------------------------------------------------------------


def fake_scores(
    monkeypatch: pytest.MonkeyPatch, scores: dict[tuple[float, Any], float]
) -> list[Any]:
    """Replace training by a table from (lr, value of the setting) to the score."""
    seen: list[Any] = []

    def score(run: Planned) -> dict[str, Any]:
        config = run.settings.method_config
        key = (run.settings.training.lr, getattr(config, "mu", None))
        seen.append((run.label, *key, run.settings.split.common.holdout, run.settings.run.rounds))
        return {"metrics": {"mAP": scores.get(key, 0.0)}}

    def execute(planned: list[Planned], observer: Any, data: Any) -> list[dict[str, Any]]:
        return [score(run) for run in planned]

    monkeypatch.setattr(tune, "execute", execute)
    return seen


def test_first_the_rate_then_the_setting(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    changes = ["tune.lr=[0.1, 0.01, 0.001]", "tune.rounds=5", "tune.fedprox.mu=[0.1, 1.0]"]
    settings = load_settings("demo", [*changes, "train.lr=0.01", "methods.fedprox.mu=0.01"])
    scores = {
        (0.001, 0.01): 0.3,
        (0.01, 0.01): 0.6,
        (0.1, 0.01): 0.5,
        (0.01, 0.1): 0.7,
        (0.01, 1.0): 0.65,
        (0.1, 0.1): 0.9,  # never tried: the rate is fixed first
        (0.001, None): 0.4,
    }
    seen = fake_scores(monkeypatch, scores)
    search = Search(settings, ["fedprox", "fedavg"], tmp_path)
    assert search.size == 3 + 2 + 3
    prox, avg = search.run(lambda i, run: lambda event: None)
    assert [s[1:3] for s in seen[:5]] == [
        *((0.001, 0.01), (0.01, 0.01), (0.1, 0.01)),
        *((0.01, 0.1), (0.01, 1.0)),
    ]
    assert all(s[3:] == (0.2, 5) for s in seen)
    assert (prox.lr, prox.score, prox.start) == (0.01, 0.7, 0.6)
    assert prox.choices == (Choice("mu", 0.1, 0.01),)
    assert prox.edges == ("mu",)  # the lower end of its grid
    assert (avg.lr, avg.choices, avg.edges) == (0.001, (), ("train.lr",))
    tuned = tomllib.loads((tmp_path / "tuned.toml").read_text())
    assert tuned["methods"]["fedprox"] == {"mu": 0.1, "train": {"lr": 0.01}}
    assert tuned["methods"]["fedavg"] == {"train": {"lr": 0.001}}
    record = json.loads((tmp_path / "tune.json").read_text())
    assert len(record["trials"]) == 8
    best = load_settings("demo", [str(tmp_path / "tuned.toml"), "run.method=fedprox"])
    assert (best.training.lr, best.method_config.mu) == (0.01, 0.1)
    assert best.split.common.holdout == 0.0


def test_methods_searched_at_once_give_what_they_give_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Trials that do not wait for each other are handed out together: all rates, then values."""
    settings = load_settings("demo", ["tune.lr=[0.1, 0.01]", "tune.fedprox.mu=[0.1, 1.0, 1.0]"])
    fake_scores(monkeypatch, {(0.1, 0.01): 0.5, (0.1, 1.0): 0.7, (0.01, None): 0.4})
    handed: list[list[str]] = []
    numbers: list[int] = []

    class Together(Workers):
        def execute(self, runs: Sequence[Planned], observer: Any) -> list[dict[str, Any]]:
            handed.append([run.label for run in runs])
            for i, run in enumerate(runs):
                observer(i, run)
            return tune.execute(runs, observer, None)

    names = ["fedavg", "fedprox"]
    apart = Search(settings, names, tmp_path / "a").run(lambda i, run: lambda event: None)

    def observer(i: int, run: Planned) -> Any:
        numbers.append(i)
        return lambda event: None

    together = Search(settings, names, tmp_path / "b").run(observer, workers=Together(Crowd(2)))
    assert together == apart
    assert handed == [["fedavg", "fedavg", "fedprox", "fedprox"], ["fedprox", "fedprox"]]
    assert numbers == [0, 1, 2, 3, 4, 5]
    found = [json.loads((tmp_path / n / "tune.json").read_text()) for n in "ab"]
    assert found[0]["found"] == found[1]["found"]


def test_common_settings_of_a_method_are_searched_and_written_beside_its_rate(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def execute(planned: list[Planned], observer: Any, data: Any) -> list[dict[str, Any]]:
        return [{"metrics": {"mAP": run.settings.training.weight_decay}} for run in planned]

    monkeypatch.setattr(tune, "execute", execute)
    grid = "tune.fedavg.train.weight_decay=[0.0, 0.1, 0.5]"
    settings = load_settings("demo", ["tune.lr=[0.01]", grid])
    (found,) = Search(settings, ["fedavg"], tmp_path).run(lambda i, run: lambda event: None)
    assert found.choices == (Choice("train.weight_decay", 0.5, 0.0),)
    tuned = tomllib.loads((tmp_path / "tuned.toml").read_text())
    assert tuned["methods"]["fedavg"]["train"] == {"lr": 0.01, "weight_decay": 0.5}
    with pytest.raises(ConfigError, match=r"Set tune\.lr"):
        Search(load_settings("demo", ["tune.fedavg.train.lr=[0.1]"]), ["fedavg"], tmp_path)


def test_a_default_that_wins_is_not_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    settings = load_settings("demo", ["tune.lr=[0.001]", "methods.fedprox.mu=0.01"])
    fake_scores(monkeypatch, {(0.001, 0.01): 0.8, (0.001, 0.1): float("nan")})
    (prox,) = Search(settings, ["fedprox"], tmp_path).run(lambda i, run: lambda event: None)
    assert (prox.choices, prox.score) == ((Choice("mu", None, 0.01),), 0.8)
    tuned = tomllib.loads((tmp_path / "tuned.toml").read_text())
    assert tuned["methods"]["fedprox"] == {"train": {"lr": 0.001}}


def test_settings_are_searched_one_after_the_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Ingredients among them; each at the best values of those before it."""
    tried: list[Any] = []

    def score(run: Planned) -> dict[str, Any]:
        part = run.settings.taking_part
        key = (run.settings.method_config.mu, part.head_start, part.server_average)
        tried.append(key)
        scores = {(0.01, "random", 0.0): 0.5, (0.01, "closed_form", 0.0): 0.7}
        return {"metrics": {"mAP": scores.get(key, 0.6 if key[2] != 0.5 else 0.8)}}

    def execute(planned: list[Planned], observer: Any, data: Any) -> list[dict[str, Any]]:
        return [score(run) for run in planned]

    monkeypatch.setattr(tune, "execute", execute)
    grid = "tune.fedprox.federation"
    settings = load_settings(
        "demo",
        [
            *("tune.lr=[0.001]", "methods.fedprox.mu=0.01"),
            *(f"{grid}.head_start=['random', 'closed_form']", f"{grid}.server_average=[0.5, 0.7]"),
            "tune.fedprox.mu=[0.1]",
        ],
    )
    search = Search(settings, ["fedprox"], tmp_path)
    (found,) = search.run(lambda i, run: lambda event: None)
    assert tried == [
        (0.01, "random", 0.0),
        (0.01, "closed_form", 0.0),
        (0.01, "closed_form", 0.5),
        (0.01, "closed_form", 0.7),
        (0.1, "closed_form", 0.5),
    ]
    assert [(c.setting, c.value) for c in found.choices] == [
        ("federation.head_start", "closed_form"),
        ("federation.server_average", 0.5),
        ("mu", None),
    ]
    tuned = load_settings("demo", [str(tmp_path / "tuned.toml"), "run.method=fedprox"])
    assert (tuned.taking_part.head_start, tuned.taking_part.server_average) == ("closed_form", 0.5)
    with pytest.raises(ConfigError, match=r"fedprox.federation.cohort"):
        load_settings("demo", ["tune.fedprox.federation.cohort=[2]"])


def test_a_real_search_trains_evaluates_and_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = load_settings("demo", [*SMALL, "tune.lr=[0.001, 0.01]", "tune.fedprox.mu=[1.0]"])

    def observe(i: int, run: Planned) -> Any:
        return lambda event: None

    (first,) = Search(settings, ["fedprox"], tmp_path).run(observe)
    folders = sorted(p.name for p in (tmp_path / "trials" / "fedprox").iterdir())
    assert folders[:2] == ["lr=0.001", "lr=0.01"]
    assert len(folders) == 3
    trial = json.loads((tmp_path / "trials/fedprox/lr=0.01/results.json").read_text())
    assert 0 < trial["metrics"]["mAP"] <= 1

    def never(*args: Any) -> Any:
        raise AssertionError("finished trials are not run again")

    monkeypatch.setattr(runs, "_rounds", never)
    (again,) = Search(settings, ["fedprox"], tmp_path).run(observe)
    assert again == first
    other = load_settings("demo", [*SMALL, "tune.lr=[0.001]", "train.batch_size=8"])
    with pytest.raises(CheckpointError, match="other settings"):
        Search(other, ["fedprox"], tmp_path)


def test_what_cannot_be_searched_is_refused(tmp_path: Path) -> None:
    demo = load_settings("demo")
    with pytest.raises(ConfigError, match="not of presets"):
        Search(demo, ["fedharmony:a"], tmp_path)
    with pytest.raises(ConfigError, match="fedavgg"):
        Search(demo, ["fedavgg"], tmp_path)
