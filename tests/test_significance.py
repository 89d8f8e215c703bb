"""How much of a difference is chance: bootstrap, Wilcoxon, Holm, and what the report shows."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from fake_run import write_fake_comparison
from fedharmony.cli import app
from fedharmony.errors import CheckpointError, ConfigError
from fedharmony.experiments.scores import Scores, load_scores, save_scores
from fedharmony.metrics import METRIC_NAMES, MetricOptions, evaluate
from fedharmony.metrics import bootstrap as bootstrap_module
from fedharmony.metrics.bootstrap import evaluate_resamples, resampled
from fedharmony.metrics.significance import (
    bootstrap_p,
    holm,
    percentile_interval,
    student_interval,
    wilcoxon_p,
)
from fedharmony.report.differences import Differences, differences
from fedharmony.report.load import load
from fedharmony.report.page import write_report
from fedharmony.report.tables import table_of
from fedharmony.rng import numpy_rng


def random_case(n: int, c: int, levels: int | None = None, purpose: str = "case"):
    rng = numpy_rng(0, purpose)
    targets = (rng.random((n, c)) < rng.uniform(0.05, 0.5, c)).astype(np.uint8)
    scores = 0.25 * targets + 0.75 * rng.random((n, c))
    return (np.round(scores * levels) / levels if levels else scores), targets


# -------------------------------------------------------------------------------- bootstrap


def test_a_resample_by_hand() -> None:
    """Image 0 twice, image 1 once, image 2 never, image 3 once.

    Label 0, best first: image 0 (positive, 2 copies), 1 (negative), 3 (positive):
    AP = (2 · 2/2 + 1 · 3/4) / 3 = 11/12. Label 1: image 1 (positive), 3 (negative), 0 (negative,
    2 copies): AP = 1. mAP = 23/24. Predicted (score ≥ 0.5): label 0 for images 0, 1; label 1 for
    1, 3. TP = 2, 1; predicted 3, 2; positive 3, 1. OP = 3/5, OR = 3/4.
    """
    scores = [[0.9, 0.1], [0.8, 0.9], [0.7, 0.6], [0.3, 0.5]]
    targets = [[1, 0], [0, 1], [0, 1], [1, 0]]
    found = evaluate_resamples(scores, targets, np.array([[2], [1], [0], [1]]))
    assert found["mAP"][0] == pytest.approx(23 / 24)
    assert found["OP"][0] == pytest.approx(3 / 5)
    assert found["OR"][0] == pytest.approx(3 / 4)
    assert found["CP"][0] == pytest.approx((2 / 3 + 1 / 2) / 2)


@pytest.mark.parametrize(
    ("levels", "options"),
    [
        (None, MetricOptions()),
        (8, MetricOptions()),
        (None, MetricOptions(ap_bins=20, empty_class="zero", f1_mode="mean_of_f1")),
        (8, MetricOptions(topk=2, cr_over="present", op_mode="mlgcn", threshold=0.4)),
    ],
)
@pytest.mark.parametrize("unknown", [False, True])
def test_resamples_are_evaluations_of_repeated_images(
    levels: int | None, options: MetricOptions, unknown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One by one, with the images written out as often as they were drawn; in blocks, too."""
    monkeypatch.setattr(bootstrap_module, "_NUMBERS_AT_ONCE", 300)
    scores, targets = random_case(40, 6, levels)
    targets[:, 5] = 0
    targets[0, 5] = 1  # a label that many resamples miss
    known = numpy_rng(1, "known").random(scores.shape) < 0.8 if unknown else None
    counts = resampled(40, 12)
    found = evaluate_resamples(scores, targets, counts, options, known)
    for b in range(counts.shape[1]):
        rows = np.repeat(np.arange(40), counts[:, b])
        mask = None if known is None else known[rows]
        expected = evaluate(scores[rows], targets[rows], options, mask).as_dict()
        assert {n: found[n][b] for n in METRIC_NAMES} == pytest.approx(expected, abs=1e-12)


def test_stable_ties_keep_the_order_of_images_but_not_of_copies() -> None:
    """Equal scores, positive first: copies of image 0 share rank 2, so AP = 2 · (2/2) / 2 = 1."""
    options = MetricOptions(ap_ties="stable")
    found = evaluate_resamples([[0.5], [0.5]], [[1], [0]], np.array([[2], [1]]), options)
    assert found["mAP"][0] == 1.0
    assert evaluate_resamples([[0.5], [0.5]], [[1], [0]], np.array([[2], [1]]))["mAP"][0] == 2 / 3


def test_resamples_repeat_and_differ() -> None:
    counts = resampled(50, 20, seed=3)
    assert (counts.sum(axis=0) == 50).all()
    assert np.array_equal(counts, resampled(50, 20, seed=3))
    assert not np.array_equal(counts[:, 0], counts[:, 1])
    # An image is left out with probability (1 − 1/N)^N ≈ 0.364.
    assert (resampled(50, 2000) == 0).mean() == pytest.approx(0.364, abs=0.01)


def test_a_resample_without_a_positive_is_left_out_of_the_interval() -> None:
    counts = np.array([[1, 0, 2], [1, 2, 0]])
    found = evaluate_resamples([[0.9], [0.2]], [[1], [0]], counts)["mAP"]
    assert np.isnan(found).tolist() == [False, True, False]
    assert percentile_interval(found) == (1.0, 1.0)
    assert math.isnan(percentile_interval(np.array([math.nan]))[0])


def test_intervals_hold_the_true_difference_about_as_often_as_they_say() -> None:
    """60 test sets of 200 images from one population: 95 % intervals of the mAP difference.

    Of 60 intervals that each hold it with probability 0.95, between 51 and 60 do, but for one case
    in a hundred.
    """
    rng = numpy_rng(0, "population")
    targets = (rng.random((20_000, 3)) < 0.3).astype(np.uint8)
    noise = 0.6 * rng.random(targets.shape)  # what both models see alike
    models = [
        np.clip(signal * targets + noise + 0.2 * rng.random(targets.shape), 0, 1)
        for signal in (0.15, 0.20)
    ]
    true = evaluate(models[1], targets).map - evaluate(models[0], targets).map
    counts, held, widths = resampled(200, 300), 0, []
    for _ in range(60):
        rows = rng.choice(len(targets), 200, replace=False)
        first, second = (evaluate_resamples(m[rows], targets[rows], counts)["mAP"] for m in models)
        low, high = percentile_interval(second - first)
        held += low <= true <= high
        alone = [b - a for a, b in map(percentile_interval, (first, second))]
        widths.append((high - low, math.hypot(*alone)))
    assert 51 <= held <= 60
    paired, apart = np.mean(widths, axis=0)
    assert paired < 0.8 * apart  # sharing the images pays


# ------------------------------------------------------------------------------------ tests


def test_wilcoxon_is_exact() -> None:
    """Every one of the 2ⁿ choices of signs is as likely; W is the sum of ranks of positive ones."""
    values = [0.5, -0.1, 0.9, 0.3, -0.2]  # ranks 4, 1, 5, 3, 2: W⁺ = 12, W⁻ = 3
    sums = [sum(r for r, s in zip((4, 1, 5, 3, 2), signs, strict=True) if s)
            for signs in itertools.product((False, True), repeat=5)]  # fmt: skip
    expected = 2 * np.mean([w >= 12 for w in sums])
    assert wilcoxon_p(values) == pytest.approx(expected) == pytest.approx(0.3125)
    assert wilcoxon_p([*values, 0.0]) == pytest.approx(0.3125)  # a zero says nothing
    assert wilcoxon_p([1.0, 1.0, 1.0]) == pytest.approx(0.25)  # of equal size: all on one side


def test_holm_by_hand() -> None:
    """Sorted 0.005 · 4, 0.01 · 3, 0.03 · 2, 0.04 · 1; the last may not fall below 0.06."""
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.6, 0.9]) == [1.0, 1.0]
    assert holm([math.nan, 0.02])[1] == 0.02
    assert holm([]) == []


def test_the_other_figures_by_hand() -> None:
    assert bootstrap_p(np.zeros(10)) == 1.0
    assert bootstrap_p(np.ones(999)) == pytest.approx(2 / 1000)
    assert bootstrap_p(-np.ones(999)) == pytest.approx(2 / 1000)
    low, high = student_interval([1.0, 3.0, 2.0, 6.0])
    expected = stats.t.interval(0.95, 3, 3.0, np.std([1, 3, 2, 6], ddof=1) / 2)
    assert (low, high) == pytest.approx(expected)
    assert math.isnan(student_interval([1.0])[0])
    assert student_interval([1.0, 3.0]) == pytest.approx(stats.t.interval(0.95, 1, 2.0, 1.0))
    assert percentile_interval(np.arange(201.0)) == pytest.approx((5.0, 195.0))


# ----------------------------------------------------------------------------------- report


def write_comparison(folder: Path, seeds: tuple[int, ...] = (0, 1, 2), scores: bool = True) -> Path:
    """Fake runs whose metrics are those of their scores; fedharmony is better than fedavg."""
    methods = {"fedavg": 0.30, "fedprox": 0.30, "fedharmony": 0.36}
    write_fake_comparison(folder, methods=tuple(methods), seeds=seeds)
    plan = json.loads((folder / "comparison.json").read_text())
    targets = (numpy_rng(0, "targets").random((300, 20)) < 0.2).astype(np.uint8)
    for entry in plan["runs"]:
        place = folder / entry["folder"]
        rng = numpy_rng(entry["seed"], entry["label"])
        signal = methods[entry["label"]] * targets
        values = (signal + (1 - 0.36) * rng.random(targets.shape)).astype(np.float16)
        results = json.loads((place / "results.json").read_text())
        results["metrics"] = evaluate(values, targets).as_dict()
        results["metric_options"] = {}
        (place / "results.json").write_text(json.dumps(results))
        names = tuple(f"label {i}" for i in range(20))
        if scores:
            kept = Scores(values, targets, tuple(map(str, range(300))), names)
            save_scores(place, kept, 10**7)
    return folder


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_comparison(tmp_path_factory.mktemp("compared") / "c")


def found_in(folder: Path, against: str = "fedavg") -> Differences:
    found = differences(load(folder, against))
    assert found is not None
    return found


def test_differences_are_those_of_the_table_with_intervals_around_them(compared: Path) -> None:
    found = found_in(compared)
    assert list(found.found) == ["fedprox", "fedharmony"]
    runs = load(compared)
    for method, row in found.found.items():
        assert [d.metric for d in row] == list(METRIC_NAMES)
        for d in row:
            pairs = zip(runs.groups[method], runs.groups["fedavg"], strict=True)
            each = [a.metrics[d.metric] - b.metrics[d.metric] for a, b in pairs]
            assert d.pairs == pytest.approx(each)
            assert d.low < d.mean < d.high
    better, equal = found.found["fedharmony"][0], found.found["fedprox"][0]
    assert better.low > 0
    assert better.better == 3
    assert better.p_images == pytest.approx(
        2 * 2 / 1001
    )  # the smallest there is, times two methods
    assert equal.p_images > 0.05
    assert better.p_pairs == pytest.approx(0.5)  # three pairs: 0.25, times two methods


def test_the_interval_is_that_of_the_mean_over_seeds_on_shared_resamples(compared: Path) -> None:
    """By a plain loop over resamples, seeds and methods."""
    counts, differences_of = resampled(300, 1000), []
    kept = {
        (m, s): load_scores(r.folder)
        for m, group in load(compared).groups.items()
        for s, r in enumerate(group)
    }
    for b in range(0, 1000, 250):
        rows = np.repeat(np.arange(300), counts[:, b])
        each = [
            evaluate(x.scores[rows], x.labels[rows]).cf1
            - evaluate(y.scores[rows], y.labels[rows]).cf1
            for x, y in ((kept["fedharmony", s], kept["fedavg", s]) for s in range(3))
        ]
        differences_of.append(np.mean(each))
    fast = np.mean(
        [
            np.subtract(
                *(
                    evaluate_resamples(kept[m, s].scores, kept[m, s].labels, counts)["CF1"]
                    for m in ("fedharmony", "fedavg")
                )
            )
            for s in range(3)
        ],
        axis=0,
    )
    assert fast[::250] == pytest.approx(differences_of)
    d = found_in(compared).found["fedharmony"][METRIC_NAMES.index("CF1")]
    assert (d.low, d.high) == pytest.approx(percentile_interval(fast))


def test_runs_without_scores_are_compared_over_seeds(tmp_path: Path) -> None:
    found = found_in(write_comparison(tmp_path / "c", scores=False))
    d = found.found["fedharmony"][0]
    assert (found.images, found.without) == (0, ("fedprox", "fedharmony"))
    assert (d.low, d.high) == pytest.approx(student_interval(d.pairs))
    assert math.isnan(d.p_images)
    assert any("without scores" in note for note in found.notes)
    assert not any("bootstrap" in note for note in found.notes)


def test_one_seed_has_an_interval_over_images_only(tmp_path: Path) -> None:
    found = found_in(write_comparison(tmp_path / "c", seeds=(4,)))
    assert math.isfinite(found.found["fedharmony"][0].low)
    assert found.found["fedharmony"][0].p_pairs == 1.0
    assert "cannot be below 1.000" in " ".join(found.notes)
    assert "few" in " ".join(found.notes)


def test_folders_are_settings_and_pairs_do_not_cross_them(tmp_path: Path) -> None:
    places = [write_comparison(tmp_path / name, seeds=(0, 1)) for name in ("a", "b")]
    found = differences(load(places, "fedavg"))
    assert found is not None
    assert list(found.found) == ["fedprox", "fedharmony"]
    assert len(found.found["fedharmony"][0].pairs) == 4
    assert differences(load(places)) is None


def test_unfinished_runs_do_not_count(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c")
    for file in ("results.json", "events.jsonl"):
        (folder / load(folder).groups["fedharmony"][2].folder / file).unlink()
    assert len(found_in(folder).found["fedharmony"][0].pairs) == 2


def test_scores_of_other_images_are_refused(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c")
    place = load(folder).groups["fedharmony"][0].folder
    kept = load_scores(place)
    other = Scores(kept.scores, 1 - kept.labels, kept.ids, kept.classes)
    save_scores(place, other, 10**7)
    with pytest.raises(CheckpointError, match="other test images"):
        found_in(folder)


def test_tables_show_differences(compared: Path) -> None:
    table = table_of(load(compared, "fedavg"))
    text = table.to_markdown()
    assert "Difference to fedavg, in points" in text
    d = table.differences.found["fedharmony"][0]  # type: ignore[union-attr]
    assert f"| fedharmony | {' | '.join(d.cells())} |".replace("<", "\\<") in text
    rows = list(csv.DictReader(io.StringIO(table.to_csv())))
    kinds = {r["kind"]: float(r["mAP"]) for r in rows if r["method"] == "fedharmony"}
    assert kinds["difference_low"] == d.low
    assert kinds["difference"] == pytest.approx(d.mean)
    assert kinds["p_pairs"] == 0.5
    latex = table.to_latex()
    assert latex.count(r"\begin{tabular}") == 2
    assert not set("−…–") & set(latex.split(r"\begin{tabular}")[2].split(r"\end{tabular}")[0])
    plain = table_of(load(compared))
    assert plain.differences is None
    assert "Difference" not in plain.to_markdown()


def test_the_page_shows_a_forest_plot_and_what_it_means(compared: Path, tmp_path: Path) -> None:
    page = write_report(load(compared, "fedavg"), tmp_path / "a.html").read_text()
    assert "Differences to fedavg" in page
    assert "chance in the test images only" in page
    assert "Differences to" not in write_report(load(compared), tmp_path / "b.html").read_text()


def test_the_reference_is_checked(compared: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'fedavg'"):
        load(compared, "fedavgg")
    result = CliRunner().invoke(
        app, ["compare", "demo", "--against", "fedprox", "--out", str(tmp_path / "c")]
    )
    assert isinstance(result.exception, ConfigError)
    assert "Valid: fedavg, fedharmony" in str(result.exception)
    assert not (tmp_path / "c").exists()


def test_report_prints_differences_where_they_are_asked_for(compared: Path, tmp_path: Path) -> None:
    out = ["--out", str(tmp_path / "page.html")]
    asked = CliRunner().invoke(app, ["report", str(compared), "--against", "fedavg", *out])
    assert asked.exit_code == 0
    assert "Difference to fedavg, in points" in asked.output
    assert CliRunner().invoke(app, ["report", str(compared), *out]).output.count("\n") == 1


def test_a_comparison_remembers_its_reference(tmp_path: Path) -> None:
    folder = write_comparison(tmp_path / "c", seeds=(0,))
    plan = json.loads((folder / "comparison.json").read_text())
    (folder / "comparison.json").write_text(json.dumps({**plan, "against": "fedprox"}))
    found = differences(load(folder))
    assert found is not None
    assert found.against == "fedprox"
    assert list(found.found) == ["fedavg", "fedharmony"]
