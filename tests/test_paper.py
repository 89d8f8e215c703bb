"""The paper item by item: its numbers, shared runs, verdicts, and what is written."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch

from fake_run import write_fake_run
from fedharmony import cli_paper
from fedharmony.correlation import pair_mask
from fedharmony.errors import CheckpointError, ConfigError, DataError
from fedharmony.experiments import run as runs
from fedharmony.experiments.scores import Scores, save_scores
from fedharmony.experiments.settings import load_settings
from fedharmony.metrics import METRIC_NAMES
from fedharmony.paper import output, page, plan
from fedharmony.paper import scale as scales
from fedharmony.paper.item import OURS, Found, Item, all_items, items
from fedharmony.paper.items import fig5
from fedharmony.paper.items.fig1 import correlations, most_frequent, qualities
from fedharmony.paper.items.fig3 import errors
from fedharmony.paper.items.matrices import Fig4
from fedharmony.paper.items.table2 import matrix_form, pair_loop
from fedharmony.paper.items.tables34 import exact_p, printed_differences, signed_ranks
from fedharmony.paper.published import NAMES, row, rows
from fedharmony.paper.scale import DEMO, PAPER, SCALES, Scale, Study
from fedharmony.paper.verdict import NOT_REPRODUCED, UNDECIDED, Gap, decide
from fedharmony.report.load import RunView, load_run
from test_cli import call, refuse, succeed

ROOT = Path(__file__).parents[1]
SHARED = os.environ.get("FEDHARMONY_SHARED", Path(__file__).parents[2] / "shared")
COCO = Path(SHARED, "data", "coco2017_mini_144px.tar.gz")
TINY = (
    *("data.train=60", "data.test=30", "split.clients=3", "split.name=iid", "run.rounds=2"),
    *("model.width=8", "model.depth=1", "model.heads=2", "train.epochs=1", "engine.threads=1"),
)


# -- what the paper prints ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("table", "where", "column", "value"),
    [
        ("table1", {"data": "FLAIR", "method": "FedHarmony"}, "mAP", "51.0"),
        ("table1", {"data": "COCO-80", "method": "FedNova"}, "CR", "49.0"),
        ("table1", {"data": "VOC2007", "method": "FedNova"}, "OP", "94.9"),
        ("table1", {"data": "VOC2007", "method": "FedRDN"}, "OF1", "67.7"),
        ("table2", {"data": "FLAIR", "round": "10"}, "no block seconds", str(56 * 60 + 19)),
        ("table2", {"data": "VOC2007", "round": "1"}, "block seconds", str(60 + 32)),
        ("table3", {"data": "FLAIR", "variant": "Block-Optimized"}, "O-mAP", "83.8"),
        ("table4", {"data": "VOC2007"}, "W", "0.0"),
        ("table5", {"data": "COCO-80", "variant": "A+B"}, "CP", "73.8"),
        ("table5", {"data": "FLAIR", "variant": "A"}, "OR", "73.3"),
    ],
)
def test_printed_cells(table: str, where: dict[str, str], column: str, value: str) -> None:
    found = row(table, **where)
    assert found is not None
    assert found[column] == value
    assert found["source"].startswith(f"Table {table[-1]}, ")


@pytest.mark.parametrize("table", ["table1", "table5"])
def test_printed_f1_are_harmonic_means(table: str) -> None:
    """CF1 = 2 · CP · CR / (CP + CR), and OF1 alike: a misread cell would show."""
    assert len(rows(table)) == {"table1": 24, "table5": 6}[table]
    for printed in rows(table):
        for kind in "CO":
            p, r, f1 = (float(printed[f"{kind}{name}"]) for name in ("P", "R", "F1"))
            assert abs(2 * p * r / (p + r) - f1) < 0.11, printed["source"]


def test_printed_savings_are_those_of_the_text() -> None:
    """28.3 % on FLAIR and 31.7 % on VOC2007, over ten rounds."""
    for data, share in (("FLAIR", 0.283), ("VOC2007", 0.317)):
        last = row("table2", data=data, round="10")
        assert last is not None
        saved = 1 - float(last["block seconds"]) / float(last["no block seconds"])
        assert saved == pytest.approx(share, abs=5e-4)


# -- numbers --------------------------------------------------------------------------------------


@pytest.mark.parametrize("w", range(19))
def test_exact_p_is_scipys(w: int) -> None:
    """Eight differences of sizes 1 to 8, of which those whose ranks add up to W are negative."""
    ranks, left = list(range(8, 0, -1)), w
    negative = set()
    for rank in ranks:
        if rank <= left:
            negative.add(rank)
            left -= rank
    assert not left
    differences = [-float(r) if r in negative else float(r) for r in ranks]
    statistic, p = signed_ranks(differences)
    assert statistic == w
    assert exact_p(w) == pytest.approx(p)


def test_the_printed_w_and_p_contradict_each_other() -> None:
    for printed in rows("table4"):
        assert abs(exact_p(float(printed["W"])) - float(printed["p"])) > 0.1
    assert signed_ranks(printed_differences("FLAIR")) == (3.0, pytest.approx(0.0390625))
    assert printed_differences("VOC2007") == []


def test_a_loop_over_pairs_is_the_matrix_form() -> None:
    """Two labels that exclude each other: R = −1, and (−1 − 0.5)² = 2.25."""
    scores, teacher = torch.tensor([[0.0, 1.0], [1.0, 0.0]]), torch.full((2, 2), 0.5)
    assert float(pair_loop(scores, teacher, [(0, 1)])) == pytest.approx(2.25, rel=1e-4)
    generator = torch.Generator().manual_seed(1)
    scores = torch.rand(16, 6, generator=generator, dtype=torch.float64)
    teacher = torch.rand(6, 6, generator=generator, dtype=torch.float64)
    teacher = (teacher + teacher.T) / 2
    clusters = torch.tensor([0, 0, 0, 1, 1, -1])
    pairs = [(0, 1), (0, 2), (1, 2), (3, 4)]
    expected = matrix_form(scores, teacher, pair_mask(clusters))
    torch.testing.assert_close(pair_loop(scores, teacher, pairs), expected)


def test_gaps_and_verdicts() -> None:
    """Of 1, 2, 3 the interval is 2 ± 4.303 · 1 / √3 = −0.48 to 4.48."""
    gap = Gap.of([1.0, 2.0, 3.0])
    assert (gap.low, gap.high) == (pytest.approx(-0.484, abs=1e-3), pytest.approx(4.484, abs=1e-3))
    assert not gap.above(0)
    assert gap.above(-0.5)
    assert not gap.below(4.4)
    one = Gap.of([5.0])
    assert not one.above(0)
    assert not one.below(9)
    assert "one pair" in str(one)
    words = [decide(yes, no, "", "").word for yes, no in ((1, 0), (0, 1), (0, 0))]
    assert words == ["reproduced", "not reproduced", "cannot be decided"]
    with pytest.raises(AssertionError):
        decide(True, True, "", "")


# -- which runs there are -------------------------------------------------------------------------


def job(home: Path, study: Study | None = None, **more: Any) -> plan.Job:
    return plan.Job(DEMO, study or DEMO.studies[0], home, **more)


def named(*names: str) -> list[Item]:
    return [items[name]() for name in names]


def test_items_share_their_runs(tmp_path: Path) -> None:
    """Eight methods on three seeds; A and A+B come on top; blocks, maps and images need no more."""
    first = job(tmp_path).places(named("table1"))
    assert len(first) == 24
    assert len(job(tmp_path).places(named("table1", "table5"))) == 30
    every = job(tmp_path).places(
        named("table1", "table3", "table4", "table5", "fig1", "fig2", "fig3", "fig4", "algorithm1")
    )
    assert len(every) == 30
    gammas = job(tmp_path).places(named("table1", "fig6"))
    assert len(gammas) == 24 + 2 * 3 * 3  # γ = 0.25 is the base
    folders = [place.run.folder.path for place in every]
    assert len(set(folders)) == len(folders)
    assert tmp_path / "runs/base/fedlgt-randtext/seed-2" in folders


def test_every_item_is_planned_at_every_scale(tmp_path: Path) -> None:
    """Settings are read and checked; no data are."""
    every = all_items()
    assert len(every) == 14
    for scale in SCALES.values():
        for study in scale.studies:
            places = plan.Job(scale, study, tmp_path / study.name).places(every)
            assert len(places) == 2 if study.only else len(places) >= 30
            for place in places:
                assert place.run.settings.run.seed < 3
    (voc, coco, flair) = PAPER.studies
    assert not items["fig6"]().fits(flair)
    settings = plan.Job(PAPER, voc, tmp_path).places(named("table1"))[0].run.settings
    assert (settings.train.lr, settings.train.batch_size, settings.train.epochs) == (1e-4, 16, 5)
    assert settings.run.rounds == 50
    assert coco.beside == "COCO-80"


def test_fewer_seeds(tmp_path: Path) -> None:
    study = replace(DEMO.studies[0], seeds=1)
    assert len(job(tmp_path, study).places(named("table1", "fig6"))) == 8 + 2 * 3


def test_the_longest_runs_come_first_after_those_that_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Participation 0.75 costs 1.5 runs, 2,500 clients cost 2; one of 0.25 is finished.

    One after the other, runs keep the order of the items.
    """
    places = job(tmp_path).places(named("fig5"))
    done = next(place for place in places if place.part.name == "participation-0.25")
    monkeypatch.setattr(
        plan.Planned, "results", property(lambda run: {} if run == done.run else None)
    )
    for jobs in (1, 2):
        first, *others = plan.in_order(places, jobs)
        costs = [place.part.cost for place in others]
        assert first is done
        assert (costs == sorted(costs, reverse=True)) == (jobs == 2)
        assert jobs == 2 or others == [place for place in places if place is not done]


def test_a_run_counts_wherever_its_data_lay(tmp_path: Path) -> None:
    study = SCALES["small"].studies[0]
    here = plan.Job(SCALES["small"], study, tmp_path, ("data.path='/a/b.tar'",))
    there = plan.Job(SCALES["small"], study, tmp_path, ("model.weights='/c.safetensors'",))
    one, two = (j.places(named("fig2"))[0].run for j in (here, there))
    assert one.settings.sha256() != two.settings.sha256()
    assert plan.identity(one.settings) == plan.identity(two.settings)
    bounded, private = (
        load_settings(study.config, [*study.changes, "run.method=fedavg", *changes])
        for changes in (
            ["privacy.clip_sums=3"],
            ["privacy.noise_multiplier=2", "privacy.clip_sums=3"],
        )
    )
    assert plan.identity(bounded) == plan.identity(one.settings)  # a bound of noise that is off
    assert json.loads(plan.identity(private))["privacy"]["clip_sums"] == 3
    one.folder.path.mkdir(parents=True)
    one.folder.create(one.settings)
    plan.refuse_other_runs(there.places(named("fig2")))
    other = replace(study, changes=("train.lr=0.5",))
    with pytest.raises(CheckpointError, match="other settings than voc2012 base fedavg seed 0"):
        plan.refuse_other_runs(plan.Job(SCALES["small"], other, tmp_path).places(named("fig2")))


def test_paths_of_data(tmp_path: Path) -> None:
    (tmp_path / "voc").mkdir()
    voc = str(tmp_path / "voc")
    assert plan.paths_of(PAPER, [f"voc2007={voc}"]) == {"voc2007": voc}
    one = replace(PAPER, studies=PAPER.studies[:1])
    assert plan.paths_of(one, [voc]) == {"voc2007": voc}
    with pytest.raises(ConfigError, match=r"voc2007=PATH, coco=PATH, flair=PATH\. Say which"):
        plan.paths_of(PAPER, [voc])
    with pytest.raises(ConfigError, match="no data set 'vok'"):
        plan.paths_of(PAPER, [f"vok={voc}"])
    with pytest.raises(DataError, match="nothing at"):
        plan.paths_of(one, ["/nowhere"])
    with pytest.raises(ConfigError, match="takes no data"):
        plan.paths_of(DEMO, [voc])


# -- what is shown of finished runs ---------------------------------------------------------------


def fill(home: Path) -> plan.Job:
    """All runs of the demo scale, made up, and what would be measured."""
    made = job(home)
    rng = np.random.default_rng(0)
    labels = (rng.random((50, 20)) < 0.2).astype(np.uint8)
    for place in made.places(all_items()):
        folder, label = place.run.folder.path, place.run.label
        method = place.method.partition(":")[0]
        write_fake_run(folder, method=method, label=label, seed=place.run.seed, rounds=4)
        classes = tuple(load_run(folder).classes)
        noisy = np.clip(labels + rng.normal(0, 0.4, labels.shape), 0, 1).astype(np.float16)
        scores = Scores(noisy, labels, tuple(map(str, range(50))), classes)
        save_scores(folder, scores, 10**6)
    square = np.eye(4).tolist()
    measured = {
        "fig1": {
            "labels": list("abcd"),
            "sizes": [30] * 19 + [90],
            "apart": [0.1] * 20,
            "drift": 0.2,
            "floor": 0.1,
            "whole": square,
            "drawn": {"0": square, "19": [[None] * 4] * 4},
        },
        "fig5": {k: {f"{n:,}": 900.0 for n in scales.CROWDS} for k in fig5.MEMORY},
        "table2": {
            "kind": "seconds",
            "machine": "abacus",
            "rounds": {"block": [[1.0] * 10] * 2, "no block": [[1.26] * 10] * 2},
            "steps": {
                "17": {
                    **{"pairs": 136.0, "block pairs": 24.0, "loop": 0.02},
                    **{"loop blocks": 0.004, "matrix": 1e-4, "matrix blocks": 1e-4},
                }
            },
        },
    }
    for name, content in measured.items():
        (home / name).mkdir()
        (home / name / "measured.json").write_text(json.dumps(content))
    return made


@pytest.fixture(scope="module")
def shown(tmp_path_factory: pytest.TempPathFactory) -> dict[str, output.Outcome]:
    made = fill(tmp_path_factory.mktemp("paper") / "digits")
    found = output.outcomes([made], all_items())
    output.write(made.home.parent, "demo", found, "fedharmony reproduce all")
    return {outcome.item.name: outcome for outcome in found}


def test_every_item_is_shown(shown: dict[str, output.Outcome]) -> None:
    assert list(shown) == [item.name for item in all_items()]
    home = next(iter(shown.values())).job.home.parent
    text = (home / "report.html").read_text()
    for name, outcome in shown.items():
        verdict = outcome.shown.verdict
        assert outcome.item.title in text
        assert verdict.why[-1] == "."
        assert outcome.shown.grids, name
        table = (outcome.folder / "table.md").read_text()
        assert verdict.why in table
        assert r"\toprule" in (outcome.folder / "table.tex").read_text()
    results = json.loads((home / "results.json").read_text())
    assert [content["item"] for content in results["items"]] == list(shown)
    assert "reproduced" in text


@pytest.mark.parametrize("name", ["table1", "table2", "table3", "table4", "table5"])
def test_the_papers_numbers_stand_beside(name: str, shown: dict[str, output.Outcome]) -> None:
    cells = {cell for grid in shown[name].shown.grids for r in grid.rows for cell in r}
    expected = {
        "table1": ("+15.6", "−59.1", "+11.2"),  # FLAIR: 51.0 − 35.4
        "table2": ("3,379", "28.3%"),
        "table3": ("−1.9", "+1.9"),
        "table4": ("0.547", "0.008"),
        "table5": ("+6.1", "+11.0", "71.2"),
    }
    assert cells >= set(expected[name])
    if name == "table1":
        assert any(cell.startswith("94.9 (") for cell in cells)


def test_a_verdict_says_which_clients_its_runs_lost(shown: dict[str, output.Outcome]) -> None:
    outcome = shown["fig4"]
    losses = [
        SimpleNamespace(clients_lost=n, fallbacks=f)
        for n, f in ((0, {"plain": {3: 1}}), (2, {}), (1, {}))
    ]
    folders = {("base", "fedavg", seed): run for seed, run in enumerate(losses)}
    why = outcome.shown.verdict.why
    found = replace(outcome.found, folders=cast("dict[Any, RunView]", folders))
    assert output._with_losses(outcome.shown, found).verdict.why == (
        f"{why} The runs behind this lost 3 client replies for good, and trained 1 client a second "
        "time, on the plain path."
    )
    assert output._with_losses(outcome.shown, replace(found, folders={})) == outcome.shown


def test_fig_4_compares_with_every_method() -> None:
    """FedAvg has the best mean r, 0.813, by chance; FedCurv lies 0.01 higher in every seed."""
    r = {
        **{method: [0.5, 0.5, 0.5] for method in ("fednova", "fedrdn")},
        "fedharmony": [0.8, 0.7, 0.8],
        "fedavg": [0.99, 0.5, 0.95],
        "fedcurv": [0.81, 0.711, 0.81],
    }
    numbers = {
        m: {"soft_pearson": r[m], "soft_rmse": [0.1] * 3, "soft_mean_abs": [float(m == OURS)] * 3}
        for m in r
    }
    (item,) = named("fig4")
    assert isinstance(item, Fig4)
    assert item._verdict(numbers).word == NOT_REPRODUCED
    del numbers["fedcurv"]
    assert item._verdict(numbers).word == UNDECIDED


def test_figures_are_files_and_nothing_is_written_twice(shown: dict[str, output.Outcome]) -> None:
    outcome = shown["fig4"]
    figures = sorted(outcome.folder.glob("figure-*.svg"))
    assert len(figures) == 1 + len(NAMES) + 1
    assert figures[0].read_text().startswith("<svg")
    home = outcome.job.home.parent
    before = {p: p.stat().st_mtime_ns for p in home.rglob("*") if p.is_file()}
    again = output.outcomes([outcome.job], all_items())
    output.write(home, "demo", again, "fedharmony reproduce all")
    assert {p: p.stat().st_mtime_ns for p in home.rglob("*") if p.is_file()} == before


def test_an_item_without_all_of_its_runs_is_not_shown(tmp_path: Path) -> None:
    made = job(tmp_path)
    for place in made.places(named("fig2", "algorithm1"))[:1]:
        method = place.method
        write_fake_run(place.run.folder.path, method=method, seed=place.run.seed, rounds=2)
    assert made.found(named("fig2")[0]) is not None
    assert made.found(named("algorithm1")[0]) is None
    assert made.found(named("table2")[0]) is None  # not measured
    names = [o.item.name for o in output.outcomes([made], all_items())]
    assert names == ["fig2", "theorem1", "theorem2"]


def test_an_item_is_shown_with_the_seeds_that_all_of_its_runs_have(tmp_path: Path) -> None:
    """Two of three here: seed 2 of one method is missing, as is all of another part's."""
    made, (item,) = job(tmp_path), named("fig6")
    places = made.places([item])
    assert {place.run.seed for place in places} == {0, 1, 2}
    for place in places:
        if place.run.seed < 2 or place.method == "fedavg":
            path, seed = place.run.folder.path, place.run.seed
            write_fake_run(path, method=place.method, seed=seed, rounds=2)
    assert made.found(item) is None
    for asked in (3, 1):  # as with --seeds 1: what is there is shown
        jobs = [replace(made, study=replace(made.study, seeds=asked))]
        (outcome,) = [o for o in output.outcomes(jobs, all_items()) if o.item.name == "fig6"]
        assert {seed for _, _, seed in outcome.found.folders} == {0, 1}
    assert "2 seeds" in outcome.shown.grids[0].note


def test_verdict_of_table_2(shown: dict[str, output.Outcome]) -> None:
    """1 − 10 / 12.6 = 21 % is reproduced, 1 − 10 / 10.5 = 5 % is not."""
    assert shown["table2"].shown.verdict.word == "reproduced"
    item = shown["table2"].item
    slow = json.loads(json.dumps(shown["table2"].found.measured))
    slow["rounds"]["no block"] = [[1.05] * 10] * 2
    found = replace(shown["table2"].found, measured=slow)
    assert item.show(found).verdict.word == "not reproduced"


def made(item: Item, level: Callable[[str, str, int, str], float]) -> str:
    """The verdict on runs whose metrics are ``level(part, method, seed, metric)``, per cent."""
    study, views = DEMO.studies[0], {}
    for part in item.parts(study):
        for method in part.methods:
            for seed in range(part.seeds):
                found = {k: level(part.name, method, seed, k) / 100 for k in METRIC_NAMES}
                results = {"metrics": found, "seed": seed, "rounds_done": 0}
                views[part.name, method, seed] = RunView(Path("run"), results=results)
    peak = {"peak_mb": {f"{n:,}": 900.0 for n in scales.CROWDS}}  # as earlier versions measured
    return item.show(Found(DEMO, study, views, peak)).verdict.word


@pytest.mark.parametrize(
    ("name", "lead", "noise", "word"),
    [
        # FedHarmony's lead over all others in every metric, in every seed the same but for noise.
        ("table1", 8.0, 0.1, "reproduced"),
        ("table1", 2.0, 0.1, "not reproduced"),  # less than half of 6.9
        ("table1", -1.0, 0.1, "not reproduced"),
        ("table1", 3.0, 5.0, "cannot be decided"),
        ("table5", 8.0, 0.1, "not reproduced"),  # A, which is not FedHarmony, gains nothing
        ("table3", 0.4, 0.1, "reproduced"),
        ("table3", 2.0, 0.1, "not reproduced"),
        ("table3", 2.0, 5.0, "cannot be decided"),
        ("table4", 1.0, 0.0, "not reproduced"),
    ],
)
def test_verdicts_by_the_lead(name: str, lead: float, noise: float, word: str) -> None:
    def level(part: str, method: str, seed: int, metric: str) -> float:
        extra = lead if method == "fedharmony" else 0.0
        own = (seed - 1) * noise if method == "fedharmony" else 0.0
        return 50 + extra + own + METRIC_NAMES.index(metric)

    assert made(named(name)[0], level) == word


def test_the_ablation_is_reproduced_where_parts_add_up() -> None:
    gains = {"fedavg": 0.0, "fedharmony:a": 6.0, "fedharmony:ab": 7.0, "fedharmony": 8.0}
    item = named("table5")[0]
    assert made(item, lambda part, m, seed, k: 60 + gains[m] + 0.1 * seed) == "reproduced"
    gains["fedharmony"] = 6.5
    assert made(item, lambda part, m, seed, k: 60 + gains[m] + 0.1 * seed) == "cannot be decided"


@pytest.mark.parametrize(
    ("own", "others", "word"),
    [
        (0.5, 4.0, "reproduced"),
        (3.0, 6.0, "not reproduced"),
        (1.8, 1.5, "not reproduced"),
        (1.5, 4.0, "cannot be decided"),
        (0.5, 1.8, "cannot be decided"),
    ],
)
def test_verdicts_on_label_skew(own: float, others: float, word: str) -> None:
    """What is lost from γ = 1.0 to 0.25, which is the base."""

    def level(part: str, method: str, seed: int, metric: str) -> float:
        loss = own if method == "fedharmony" else others
        return 80 + (loss if part == "gamma-1.0" else 0.0)

    assert made(named("fig6")[0], level) == word


@pytest.mark.parametrize(
    ("at", "step", "word"),
    [
        ("participation-0.75", 1.5, "reproduced"),
        ("participation-0.75", 2.5, "not reproduced"),
        ("clients-2500", -2.5, "not reproduced"),
        ("clients-2500", -79.0, "not reproduced"),
        ("", -75.0, "cannot be decided"),  # everywhere: nothing was learnt
    ],
)
def test_verdicts_on_clients(at: str, step: float, word: str) -> None:
    def level(part: str, method: str, seed: int, metric: str) -> float:
        return 80 + (step if part == at or not at else 0.0)

    assert made(named("fig5")[0], level) == word


def test_qualities_are_weights_of_rounds_by_quality_alone(tmp_path: Path) -> None:
    """Client 0: 0.6 · 2 in one round, 0.2 · 4 in another: 1.0 on average; client 9 never."""
    run = load_run(write_fake_run(tmp_path / "run", rounds=2, clients=10))
    events = (
        {"log": {"alpha": 0.0}, "weights": {"0": 0.6, "1": 0.4}},
        {"log": {"alpha": 0.0}, "weights": {"0": 0.2, "1": 0.2, "2": 0.3, "3": 0.3}},
        {"log": {"alpha": 0.5}, "weights": {"9": 1.0}},
    )
    found = qualities(replace(run, rounds=events), 10)
    assert found[:4] == pytest.approx([1.0, 0.8, 1.2, 1.2])
    assert math.isnan(found[9])


def test_correlations_of_a_client() -> None:
    """Labels a and b always together, c never: φ(a, b) = 1, pairs with c are not defined."""
    labels = np.array([[1, 1, 0], [0, 0, 0], [1, 1, 0], [0, 0, 0]], np.uint8)
    found = correlations(labels)
    assert found[0, 1] == 1
    assert np.isnan(found[:, 2]).all()
    assert np.isnan(np.diag(found)).all()
    many = np.zeros((300, 50), np.uint8)
    many[:, 7:47] = 1  # more than a byte can count
    assert most_frequent(many).tolist() == list(range(7, 47))


def test_errors_per_100_images(tmp_path: Path) -> None:
    """Of two images one label is missed and none is wrong; threshold 0.5."""
    folder = write_fake_run(tmp_path / "run", rounds=1, classes=2)
    scores = np.array([[0.9, 0.1], [0.2, 0.3]], np.float16)
    labels = np.array([[1, 0], [1, 0]], np.uint8)
    save_scores(folder, Scores(scores, labels, ("0", "1"), load_run(folder).classes), 100)
    assert errors(load_run(folder)) == (0.0, 50.0)


# -- the command ----------------------------------------------------------------------------------


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Scale:
    study = replace(DEMO.studies[0], changes=TINY, gamma="", gammas=(), shares=(), crowd=None)
    scale = replace(DEMO, studies=(study,))
    monkeypatch.setattr(scales, "SCALES", {"demo": scale})
    return scale


def test_the_list(tmp_path: Path, tiny: Scale) -> None:
    shown = succeed(tmp_path, "reproduce")
    for item in all_items():
        assert item.name in shown
    assert "two CPU cores" in shown


def test_runs_that_do_not_fit_into_memory_are_refused_before_the_first_one(
    tmp_path: Path, tiny: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four runs of 0.8 GB need 3.2 GB; 2.5 GB bear three of them."""
    monkeypatch.setattr("fedharmony.cli_paper.machine_memory", lambda: 2_500_000_000)
    said = refuse(tmp_path, "reproduce", "table5", "--jobs", "4", "--out", "out", "--quiet")
    assert "4 at once 3.2 GB; this machine has 2.5 GB. Use --jobs 3" in said
    assert not (tmp_path / "out").exists()


def test_what_was_asked_is_run_once(
    tmp_path: Path, tiny: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run, cut short after it began, goes on; what is finished is not run again."""
    command = ["reproduce", "fig2", "theorem2", "--out", "out"]

    def stop(*args: Any, **options: Any) -> Any:
        raise CheckpointError("The power went out.")

    with monkeypatch.context() as patch:
        patch.setattr(runs, "_rounds", stop)
        code, out, err = call(tmp_path, *command, "--quiet")
    assert code == 2
    assert "1 run failed; all others are done." in err
    assert "The power went out" in err
    assert "Theorem 2" in out  # what can be shown is shown
    folder = tmp_path / "out/digits/runs/base/fedavg/seed-0"
    assert (folder / "config.toml").is_file()
    assert not (folder / "results.json").exists()
    shown = succeed(tmp_path, *command)
    assert "1 run in all, 0 finished" in shown
    assert "A run takes up to about 0.8 GB of memory, 1 at once 0.8 GB" in shown
    assert "Fig. 2" in shown
    assert (folder / "results.json").is_file()
    assert (tmp_path / "out/digits/fig2/figure-1.svg").is_file()
    before = (tmp_path / "out/report.html").stat().st_mtime_ns
    with monkeypatch.context() as patch:
        patch.setattr(runs, "_rounds", stop)
        assert "1 run in all, 1 finished" in succeed(tmp_path, *command)
    assert (tmp_path / "out/report.html").stat().st_mtime_ns == before
    assert "done" in succeed(tmp_path, "reproduce", "--out", "out")


def test_run_folders_from_elsewhere_need_no_data(tmp_path: Path, tiny: Scale) -> None:
    """Without a checkpoint, as runs are brought back from another machine."""
    command = ["reproduce", "fig2", "--out", "out", "--quiet"]
    shown = succeed(tmp_path, *command)
    folder = tmp_path / "out/digits/runs/base/fedavg/seed-0"
    (folder / "checkpoint.safetensors").unlink()
    (folder / "partition.json").unlink()
    assert succeed(tmp_path, *command) == shown
    (folder / "matrices.safetensors").unlink()
    assert "finished run without its matrices.safetensors" in refuse(tmp_path, *command)
    others = succeed(tmp_path, "reproduce", "theorem1", "--out", "out")  # shows what it can
    assert "Theorem 1" in others


@pytest.mark.skipif(not COCO.is_file(), reason="needs the small COCO 2017 archive")
def test_real_images_of_coco_go_through(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A smoke test of the paper's scale: 80 labels of 159 real images, one round, no weights."""
    small = (
        *("data.year=2017", "data.image_size=16", "split.clients=4", "run.rounds=1"),
        *("train.epochs=1", "model.name=vit", "model.weights=", "model.width=80"),
        *("model.depth=1", "model.heads=2", "model.patch=8", "engine.threads=1"),
    )
    study = replace(PAPER.studies[1], changes=small, seeds=1)
    monkeypatch.setattr(scales, "SCALES", {"paper": replace(PAPER, studies=(study,))})
    command = ("reproduce", "table1", "fig2", "fig3", "fig4", "algorithm1", "--scale", "paper")
    shown = succeed(tmp_path, *command, "--data", str(COCO), "--out", "out", "--quiet")
    assert shown.count("COCO-80") >= 5
    assert len(list(tmp_path.glob("out/coco/runs/base/*/seed-0/results.json"))) == 8


def test_data_sets_without_data_are_left_out_and_nothing_is_said_of_them_twice(
    tmp_path: Path, tiny: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three data sets: one needs nothing, one lacks its data, one is not what the item is about."""
    (plenty,) = tiny.studies
    missing = replace(plenty, name="far", title="far away", needs="far.zip")
    other = replace(missing, name="other", only=("fig1",))
    scale = replace(tiny, studies=(plenty, missing, other))
    monkeypatch.setattr(scales, "SCALES", {"demo": scale})
    shown = succeed(tmp_path, "reproduce", "fig2", "theorem1", "--out", "out")
    assert "Left out: far away: 1 run to be done. Give --data far=PATH (far.zip)" in shown
    assert "other" not in shown
    assert shown.count("Theorem 1") == 1
    assert {p.name for p in (tmp_path / "out").iterdir() if p.is_dir()} == {"digits"}
    monkeypatch.setattr(scales, "SCALES", {"demo": replace(scale, studies=(missing, other))})
    refused = refuse(tmp_path, "reproduce", "fig2", "--out", "again")
    assert "The scale 'demo' needs data. far away: 1 run " in refused
    assert not (tmp_path / "again").exists()
    assert "Theorem 1" in succeed(tmp_path, "reproduce", "theorem1", "--out", "again")


def test_items_that_are_not_about_data_are_gone_through_once(tmp_path: Path) -> None:
    jobs = [plan.Job(PAPER, study, tmp_path / study.name) for study in PAPER.studies]
    found = [(job.study.name, item.name) for job, item in plan.tasks(jobs, all_items())]
    assert [study for study, item in found if item == "theorem1"] == ["voc2007"]
    assert [study for study, item in found if item == "table1"] == ["voc2007", "coco", "flair"]
    assert [study for study, item in found if item == "fig6"] == ["voc2007", "coco"]


def test_small_data_sets_differ_in_their_data_alone(tmp_path: Path) -> None:
    """COCO is trained as VOC 2012 is; FLAIR has users of its own, 50 of them in a round."""
    small = SCALES["small"]
    found = {}
    for study in small.studies:
        place = plan.Job(small, study, tmp_path).places(named("fig2"))[0]
        found[study.name] = place.run.settings
    voc, coco, flair = (found[name] for name in ("voc2012", "coco", "flair"))
    assert coco.tree() | {"data": voc.tree()["data"]} == voc.tree()
    assert [s.tree()["data"]["image_size"] for s in (voc, coco, flair)] == [144] * 3
    assert (flair.tree()["split"]["name"], flair.federation.cohort) == ("natural", 50)
    assert flair.model == voc.model


def test_devices_of_several_runs_are_checked_first(tmp_path: Path, tiny: Scale) -> None:
    command = ["reproduce", "fig2", "--out", "out", "--device"]
    assert "engine.device = 'cuda:99'" in refuse(tmp_path, *command, "cpu,cuda:99")
    both = "names 2 devices for --jobs 1"
    assert both in refuse(tmp_path, *command, "cpu,cpu:0", "--jobs", "1")
    assert not (tmp_path / "out").exists()


def test_all_items_in_one_go_and_nothing_the_second_time(
    tmp_path: Path, tiny: Scale, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every item trains, measures and is shown, from 19 tiny runs; memory is made up here.

    Base: eight methods, A, A+B. Another γ: three; another share: two; two numbers of clients: four.
    """
    study = replace(
        *tiny.studies,
        changes=(*TINY, "split.name=pivot_dirichlet", "split.gamma=1.0", "model.width=20"),
        **{"gamma": "1.0", "gammas": ("0.25", "1.0"), "share": "1.0", "shares": ("0.5", "1.0")},
        **{"crowd": ((), 1.0), "seeds": 1},
    )
    scale = replace(tiny, studies=(study,), pairs=(5,))
    monkeypatch.setattr(scales, "SCALES", {"demo": scale})
    monkeypatch.setattr(fig5, "CROWDS", (4, 5))
    monkeypatch.setattr(fig5, "peak_memory", lambda bench, part, *more: 1.0)
    command = ["reproduce", "all", "--out", "out"]
    shown = succeed(tmp_path, *command)
    assert "19 runs in all, 0 finished." in shown
    for item in all_items():
        assert item.title in shown
        assert (tmp_path / "out/digits" / item.name / "table.csv").is_file()
    files = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()}
    assert "19 runs in all, 19 finished." in succeed(tmp_path, *command)
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.is_file()} == files


def test_runs_of_different_data_do_not_stand_in_one_table(tmp_path: Path, tiny: Scale) -> None:
    """Two finished ones, and a finished one beside another that is to be trained."""
    made = plan.Job(tiny, tiny.studies[0], tmp_path / "out/digits")
    succeed(tmp_path, "reproduce", "fig2", "--out", "out", "--quiet")
    (place,) = made.places(named("fig2"))
    file = place.run.folder["results.json"]
    results = json.loads(file.read_text())
    results["bound"]["training labels"] = "another hash"
    file.write_text(json.dumps(results))
    said = refuse(tmp_path, "reproduce", "table5", "--out", "out", "--quiet", "--seeds", "1")
    assert "digits base: The run in" in said
    assert "made of other data. Changed since: training labels" in said
    other = made.places(named("table5"))[1].run.folder
    other.path.mkdir(parents=True)
    for name in ("config.toml", "results.json", "matrices.safetensors"):
        (other.path / name).write_bytes((place.run.folder.path / name).read_bytes())
    results["bound"]["training labels"] = "a third one"
    (other.path / "results.json").write_text(json.dumps(results))
    places = [place, replace(place, run=replace(place.run, folder=other))]
    with pytest.raises(CheckpointError, match=r"different data \(training labels\), and cannot"):
        plan.refuse_other_runs(places)


def test_what_is_damaged_is_named_and_all_others_are_shown(tmp_path: Path, tiny: Scale) -> None:
    command = ["reproduce", "fig2", "--out", "out"]
    succeed(tmp_path, *command, "--quiet")
    folder = tmp_path / "out/digits/runs/base/fedavg/seed-0"
    (folder / "matrices.safetensors").write_bytes(b"no such file")
    shown = call(tmp_path, "reproduce", "theorem1", "--out", "out")
    assert shown[0] == 0
    assert "Theorem 1" in shown[1]
    assert "Fig. 2: label correlations are sparse and in blocks is not shown" in shown[2]
    assert "damaged" in succeed(tmp_path, "reproduce", "--out", "out")
    assert call(tmp_path, *command)[0] == 2


def test_a_folder_of_another_scale_is_left_alone(tmp_path: Path, tiny: Scale) -> None:
    succeed(tmp_path, "reproduce", "theorem1", "--out", "out")
    before = (tmp_path / "out/results.json").read_bytes()
    scales.SCALES["paper"] = replace(tiny, name="paper")  # type: ignore[index]
    said = refuse(tmp_path, "reproduce", "theorem1", "--scale", "paper", "--out", "out")
    assert "holds a reproduction at scale 'demo'" in said
    assert (tmp_path / "out/results.json").read_bytes() == before


def test_the_list_says_what_is_there(tmp_path: Path, tiny: Scale) -> None:
    """Theorems count as done when they were gone through; algorithm1 has one seed of three."""
    assert "done" not in succeed(tmp_path, "reproduce", "--out", "out")
    succeed(tmp_path, "reproduce", "algorithm1", "theorem1", "--seeds", "1", "--out", "out", "-q")
    rows = succeed(tmp_path, "reproduce", "--out", "out")
    assert rows.count("1 of 3 seeds") == 1
    assert rows.count("done") >= 1


def test_paths_may_hold_any_letter(tmp_path: Path) -> None:
    place = tmp_path / 'it\'s "here"'
    place.mkdir()
    (job, *_) = cli_paper._jobs(PAPER, tmp_path, [f"voc2007={place}"], place / "w.safetensors")
    (run, *_) = job.places(named("fig2"))
    tree = run.run.settings.tree()
    assert tree["data"]["path"] == str(place)
    assert tree["model"]["weights"] == str(place / "w.safetensors")


def test_one_large_cluster_is_no_block_structure(shown: dict[str, output.Outcome]) -> None:
    """All labels in one: it holds all strong pairs, and as many of the others."""
    outcome = shown["algorithm1"]
    views = {
        key: replace(run, matrices={**run.matrices, "clusters": 0 * run.matrices["clusters"]})
        for key, run in outcome.found.folders.items()
    }
    verdict = outcome.item.show(replace(outcome.found, folders=views)).verdict
    assert "100% to 100%" in verdict.why
    assert verdict.word == "not reproduced"


def test_clients_without_known_correlations_decide_nothing(
    shown: dict[str, output.Outcome],
) -> None:
    outcome = shown["fig1"]
    measured = {**outcome.found.measured, "drift": None, "floor": None}
    found = outcome.item.show(replace(outcome.found, measured=measured))
    assert found.verdict.word == "cannot be decided"
    assert "nan" not in found.verdict.why


def test_fedlgt_is_said_to_have_random_text(shown: dict[str, output.Outcome]) -> None:
    for name in ("table1", "fig3", "fig4"):
        assert any("fedlgt-randtext" in grid.note for grid in shown[name].shown.grids)


def test_measuring(tmp_path: Path, tiny: Scale) -> None:
    succeed(tmp_path, "reproduce", "fig1", "--out", "out", "--quiet")
    known = json.loads((tmp_path / "out/digits/fig1/measured.json").read_text())
    assert len(known["sizes"]) == 3
    assert sum(known["sizes"]) == 60
    assert len(known["drawn"]) == 3
    whole = np.array(known["whole"], dtype=float)
    assert whole.shape == (20, 20)
    assert np.isnan(np.diag(whole)).all()
    assert all(value > 0 for value in known["apart"])
    assert all(np.isfinite(np.array(m, dtype=float)).any() for m in known["drawn"].values())


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (["reproduce", "tabel1"], "Did you mean 'table1'"),
        (["reproduce", "all", "--scale", "huge"], "no such scale"),
        (["reproduce", "table1", "--scale", "small"], "24 runs to be done"),
        (["reproduce", "all", "--scale", "paper", "--data", "x"], "Say which it is"),
    ],
)
def test_what_is_refused(command: list[str], words: str, tmp_path: Path) -> None:
    assert words in refuse(tmp_path, *command)
    assert not list(tmp_path.iterdir())


# -- the page -------------------------------------------------------------------------------------


def test_the_page_is_what_the_results_say() -> None:
    results, figures = page.load(ROOT)
    assert results[0]["scale"] == "demo"
    assert (ROOT / "docs" / "paper.md").read_text("utf-8") == page.text(results, figures)


def test_a_reproduction_is_taken_over(shown: dict[str, output.Outcome], tmp_path: Path) -> None:
    old = tmp_path / page.FIGURES / "demo-digits-fig9-1.svg"
    old.parent.mkdir(parents=True)
    old.touch()
    page.main([str(shown["fig6"].job.home.parent)], tmp_path)
    assert not old.exists()
    text = (tmp_path / page.PAGE).read_text("utf-8")
    for outcome in shown.values():
        assert f"## {outcome.item.title}" in text
        assert outcome.shown.verdict.why in text
    for source in re.findall(r'src="([^"]+)"', text):
        assert (tmp_path / "docs" / source).is_file()
    assert text.count("<img") == sum(len(o.as_dict()["figures"]) for o in shown.values())


def test_every_claim_points_to_items() -> None:
    known = {item.name for item in all_items()}
    named_by_claims = {name.partition("/")[0] for _, names in page.CLAIMS for name in names}
    assert named_by_claims == known
    assert set(METRIC_NAMES) < set(rows("table1")[0])
