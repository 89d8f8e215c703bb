"""Reading run folders, tables, figures, the page, and live progress."""

from __future__ import annotations

import base64
import csv
import functools
import io
import itertools
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest
from PIL import Image
from rich.console import Console

from fake_run import METHODS, write_fake_comparison, write_fake_run
from fedharmony.config import read_toml
from fedharmony.errors import CheckpointError
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.run import start
from fedharmony.experiments.settings import load_settings
from fedharmony.metrics import METRIC_NAMES
from fedharmony.report import svg, words
from fedharmony.report.charts import Picture, Row, Series, curve, dots, span
from fedharmony.report.load import Runs, RunView, load, load_run
from fedharmony.report.order import LabelOrder, cluster_order, spectral_order
from fedharmony.report.page import render, write_report
from fedharmony.report.panel import Panel, Section, panels, styles
from fedharmony.report.panels import aggregation
from fedharmony.report.panels.aggregation import (
    Aggregation,
    client_rows,
    same_weights,
    weights_map,
)
from fedharmony.report.panels.clients import client_picture
from fedharmony.report.panels.correlation import Correlation, correlation_map, off_diagonal
from fedharmony.report.panels.labels import Labels
from fedharmony.report.progress import Progress
from fedharmony.report.standalone import standalone
from fedharmony.report.tables import RunRow, metric_table, table_of
from fedharmony.rng import numpy_rng

ODD_NAMES = ["<script>alert(1)</script>", '$x_1$ & "q"', "猫", "a" * 60, "x\x00y\ud800", "--></p>"]


def events_of(folder: Path) -> list[dict[str, Any]]:
    lines = (folder / "events.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def write_events(folder: Path, events: list[dict[str, Any]]) -> None:
    text = "".join(json.dumps(event) + "\n" for event in events)
    (folder / "events.jsonl").write_text(text, encoding="utf-8")


# ------------------------------------------------------------------------------------- load


def test_a_finished_run_is_read_whole(tmp_path: Path) -> None:
    run = load_run(write_fake_run(tmp_path / "run", seed=3))
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert (run.label, run.seed, run.status) == ("fedharmony", 3, "completed")
    assert (run.rounds_done, run.rounds_total, run.measured_after) == (30, 30, 30)
    assert run.metrics == results["metrics"]
    assert run.baselines["all positive"]["CR"] == 1.0
    assert len(run.classes) == len(run.per_label) == 20
    assert math.isnan(run.per_label[-1].ap)  # null in the file: no test positives
    assert run.matrices["consensus"].shape == (20, 20)
    assert run.curve("metrics", "mAP")[30] == results["metrics"]["mAP"]
    assert min(run.curve("log", "alpha")) == 1  # rounds count from 1 for people


def test_an_unfinished_run_shows_its_latest_evaluation(tmp_path: Path) -> None:
    folder = write_fake_run(tmp_path, done=11, status="unfinished", results=False)
    run = load_run(folder)
    last = [e for e in events_of(folder) if e["event"] == "evaluate"][-1]
    assert (run.status, run.rounds_done, run.rounds_total) == ("unfinished", 11, 30)
    assert run.metrics == last["metrics"]
    rounds = [e for e in events_of(folder) if e["event"] == "round"]
    assert run.per_round("bytes_up") == sum(e["bytes_up"] for e in rounds) / len(rounds)


def test_the_torn_last_line_of_a_killed_run_is_ignored(tmp_path: Path) -> None:
    folder = write_fake_run(tmp_path, done=5, status="unfinished", results=False)
    text = (folder / "events.jsonl").read_bytes()
    (folder / "events.jsonl").write_bytes(text[:-40])
    run = load_run(folder)
    assert (len(run.rounds), len(run.evaluations), run.damaged_lines) == (5, 4, 0)


def test_a_damaged_line_in_the_middle_is_counted_and_reported(tmp_path: Path) -> None:
    folder = write_fake_run(tmp_path / "run", rounds=4, classes=5)
    lines = (folder / "events.jsonl").read_text().splitlines()
    lines[3] = lines[3][:20]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n")
    assert load_run(folder).damaged_lines == 1
    assert "1 line in events.jsonl that could not be read" in _words(write_report(folder))


def test_a_resumed_run_forgets_the_rounds_it_repeats(tmp_path: Path) -> None:
    """Interrupted after 8 rounds, resumed after 5, then going on: rounds 0-4 and the new ones."""
    folder = write_fake_run(tmp_path, classes=5, done=8, status="interrupted")
    events = events_of(folder)
    again = {**events[0], "resumed_at": 5}
    repeated = [{**e, "seconds": 99.0} for e in events if e.get("round") == 5][:2]
    write_events(folder, [*events, again, *repeated])
    run = load_run(folder)
    assert [e["round"] for e in run.rounds] == [0, 1, 2, 3, 4, 5]
    assert run.rounds[-1]["seconds"] == 99.0
    assert run.status == "unfinished"  # the finish event belongs to the first start
    assert run.metrics == repeated[1]["metrics"]  # and so do the results
    assert run.metrics != run.results["metrics"]
    assert "label scores and correlations as they were after round 8" in _words(
        write_report(folder)
    )


@pytest.mark.parametrize(
    ("make", "advice"),
    [
        (lambda p: None, "There is no folder"),
        (lambda p: p.mkdir(), "not a run folder"),
        (lambda p: write_fake_run(p / "inner", rounds=1), "Did you mean a run inside it? inner."),
        (lambda p: write_fake_comparison(p, seeds=(0,), rounds=1), "It is a comparison folder"),
    ],
)
def test_a_folder_that_is_no_run_is_refused_with_advice(
    tmp_path: Path, make: Any, advice: str
) -> None:
    make(tmp_path / "x")
    with pytest.raises(CheckpointError, match=re.escape(advice)):
        load_run(tmp_path / "x")


@pytest.mark.parametrize(
    "file", ["results.json", "config.toml", "matrices.safetensors", "environment.json"]
)
def test_a_damaged_file_is_named(tmp_path: Path, file: str) -> None:
    folder = write_fake_run(tmp_path, rounds=2)
    (folder / file).write_bytes(b'{"half')
    with pytest.raises(CheckpointError, match=re.escape(file)):
        load_run(folder)


def test_a_comparison_is_read_as_far_as_it_got(tmp_path: Path) -> None:
    folder = write_fake_comparison(tmp_path, seeds=(1, 0), rounds=3)
    for file in (folder / "fedharmony" / "seed-0").iterdir():
        file.unlink()
    view = load(folder)
    assert [run.seed for run in view.groups["fedavg"]] == [0, 1]
    assert view.missing == (("fedharmony", 0),)
    with pytest.raises(CheckpointError, match="not a run folder"):
        load(folder / "fedavg")


def test_runs_of_one_name_and_seed_are_told_apart(tmp_path: Path) -> None:
    for name, method in (("a", "fedavg"), ("b", "fedavg"), ("c", "fedprox")):
        write_fake_run(tmp_path / name, method=method, rounds=2)
    assert list(load([tmp_path / n for n in "abc"]).groups) == [
        "fedavg (a)",
        "fedavg (b)",
        "fedprox",
    ]


# ----------------------------------------------------------------------------------- tables


def rows_of(name: str, *values: float) -> list[RunRow]:
    return [RunRow(name, seed, {"mAP": value}) for seed, value in enumerate(values)]


def test_mean_and_sample_deviation_by_hand() -> None:
    """0.70, 0.72, 0.77: mean 0.73; deviations −.03, −.01, .04; √((9 + 1 + 16)e−4 / 2) = 0.0361."""
    table = metric_table([*rows_of("three", 0.70, 0.72, 0.77), *rows_of("one", 0.5)])
    three, one = table.lines
    assert three.cells[0].mean == pytest.approx(0.73)
    assert three.cells[0].deviation == pytest.approx(math.sqrt(13e-4))
    assert table.text(table.columns[0], three.cells[0]) == "73.0 ± 3.6"
    assert table.text(table.columns[0], one.cells[0]) == "50.0"  # one seed has no spread
    assert table.notes == ("mean ± sample standard deviation over 1 to 3 seeds",)


def test_rounding_happens_only_in_print() -> None:
    """Two runs of 0.71244: rounded first, 71.2; the mean with 0.71268 is 0.71256, printed 71.3."""
    table = metric_table([*rows_of("a", 0.71244, 0.71268)])
    assert table.text(table.columns[0], table.lines[0].cells[0]) == "71.3 ± 0.0"
    assert "0.71244" in table.to_csv()


def test_values_that_print_alike_are_all_best() -> None:
    rows = [*rows_of("a", 0.7141), *rows_of("b", 0.7144), *rows_of("c", 0.7136), *rows_of("d", 0.7)]
    marked = [line.cells[0].best for line in metric_table(rows).lines]
    assert marked == [True, True, True, False]  # 71.4, 71.4, 71.4, 70.0


def test_undefined_values_and_baselines_do_not_compete() -> None:
    rows = [
        RunRow("a", 0, {"mAP": 0.4, "CR": math.nan, "OR": 0.1}),
        RunRow("b", 0, {"mAP": 0.3, "CR": 0.2, "OR": 0.2}),
        RunRow("c", 0, {"mAP": 0.2, "OR": math.nan}),
    ]
    table = metric_table(rows, {"all positive": {"CR": 1.0, "mAP": 0.1, "OR": 1.0}})
    assert [c.key for c in table.columns] == ["mAP", "CR", "OR"]
    assert [[c.best for c in line.cells] for line in table.lines] == [
        [True, False, False],
        [False, False, True],  # alone in CR: nothing to be better than
        [False, False, False],
    ]
    assert not any(c.best for c in table.baselines[0].cells)
    assert table.text(table.columns[1], table.lines[0].cells[1]) == "–"


def test_costs_are_never_marked_and_a_single_method_has_no_best() -> None:
    rows = [RunRow("a", 0, {"mAP": 0.5, "seconds": 9.0}), RunRow("b", 0, {"seconds": 3.0})]
    assert [c.best for c in metric_table(rows).lines[1].cells] == [False, False]
    assert not metric_table(rows_of("a", 0.5)).lines[0].cells[0].best


def test_markdown_escapes_names_and_keeps_its_shape() -> None:
    table = metric_table([*rows_of("a|b_*c*", 0.5), *rows_of("<i>\nd", 0.6)])
    lines = table.to_markdown().splitlines()
    assert lines[2:4] == [r"| a\|b\_\*c\* | 50.0 |", r"| \<i\> d | **60.0** |"]


def test_latex_escapes_names_and_is_balanced() -> None:
    rows = [
        RunRow(r"50% a_b & {c} \d ~^", 0, {"mAP": 0.5, "structure_r": -0.5}),
        RunRow("e", 0, {"structure_r": -0.125}),
    ]
    text = metric_table(rows, {"prevalence": {"mAP": 0.1}}).to_latex()
    assert r"50\% a\_b \& \{c\} \textbackslash{}d \textasciitilde{}\textasciicircum{}" in text
    assert r"e & -- & \textbf{$-$0.12} \\" in text
    assert text.count(r"\midrule") == 2  # below the head, and above the trivial predictors
    body = [line for line in text.splitlines() if line.endswith(r"\\")]
    assert all(len(re.findall(r"(?<!\\)&", line)) == 2 for line in body)
    plain = re.sub(r"\\[{}]", "", text)
    assert plain.count("{") == plain.count("}")


def test_csv_has_one_row_per_run_at_full_precision() -> None:
    rows = [
        RunRow('a,"b"\nc', 0, {"mAP": 1 / 3, "bytes_up": 5e9}),
        RunRow("d", 1, {"mAP": 0.1}, complete=False),
    ]
    text = metric_table(rows, {"prevalence": {"mAP": 0.07}}).to_csv()
    head, *body = csv.reader(io.StringIO(text))
    assert head == ["kind", "method", "seed", "complete", "mAP", "bytes_up"]
    assert body[0] == ["run", 'a,"b"\nc', "0", "true", repr(1 / 3), "5000000000.0"]
    assert body[1] == ["run", "d", "1", "false", "0.1", ""]
    assert body[2] == ["baseline", "prevalence", "", "true", "0.07", ""]


@pytest.mark.parametrize("seeds", [(0,), (0, 1, 2)])
def test_the_terminal_table_fits(tmp_path: Path, seeds: tuple[int, ...]) -> None:
    methods = ("fedavg", "fedharmony:recommended")
    view = load(write_fake_comparison(tmp_path, methods, seeds, rounds=2))
    table = table_of(view)
    for width in (60, 80, 100, 220):
        console = Console(width=width, file=io.StringIO(), force_terminal=False)
        console.print(table.to_rich(width))
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert max(map(len, text.splitlines())) <= width
        assert "…" not in text
        if width >= 80:
            assert all(name in text for name in ("mAP", "CF1", "OF1", "all positive", *methods))
        assert ("left out" in text) == (width < 220 if len(seeds) > 1 else width <= 100)
    assert "MB down" in text


def test_the_terminal_table_takes_no_name_for_markup() -> None:
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(metric_table(rows_of("[bold]x[/bold]", 0.5)).to_rich())
    assert "[bold]x[/bold]" in console.file.getvalue()  # type: ignore[attr-defined]


# ------------------------------------------------------------------------------------ plots


def test_spectral_order_gathers_hidden_blocks() -> None:
    rng = numpy_rng(0, "blocks")
    blocks = rng.permutation(np.repeat([0, 1, 2], 5))
    matrix = np.where(blocks[:, None] == blocks[None, :], 0.5, -0.1)
    noise = rng.normal(0, 0.02, matrix.shape)
    along = blocks[spectral_order(matrix + noise + noise.T)]
    assert int((np.diff(along) != 0).sum()) == 2  # each block is one stretch


def test_clusters_come_in_order_and_loners_last() -> None:
    order = cluster_order(np.array([1, -1, 0, 1, 0]))
    assert order.index.tolist() == [2, 4, 0, 3, 1]
    assert order.clusters == ((0, 2), (2, 4))


def test_shrinking_keeps_positions() -> None:
    """A step at three quarters of 1,628 cells is a step at three quarters of 400."""
    values = np.where(np.arange(1628) >= 1221, 1.0, 0.0)[None, :]
    small = svg.shrink(values, svg.known_mean)
    assert small.shape == (1, 400)
    assert small[0, 299] == 0.0
    assert small[0, 300] == 1.0


def test_shrinking_skips_what_is_not_known() -> None:
    """Blocks (1, nan), (nan, nan) and (2, 4): means 1, nan, 3; largest 1, nan, 4."""
    values = np.array([[1.0, np.nan, np.nan, np.nan, 2.0, 4.0]])
    assert np.array_equal(
        svg.shrink(values, svg.known_mean, 3), [[1.0, np.nan, 3.0]], equal_nan=True
    )
    assert np.array_equal(
        svg.shrink(values, svg.known_most, 3), [[1.0, np.nan, 4.0]], equal_nan=True
    )


def test_many_clients_share_rows_as_shrinking_would_join_them() -> None:
    """1,000 clients in 400 rows, by size: of each row the largest weight, as shrinking gives it."""
    rng = np.random.default_rng(0)
    sizes, weights = rng.integers(1, 50, 1000).astype(float), rng.random((1000, 1))
    rows = client_rows(sizes)
    joined = np.zeros((400, 1))
    np.maximum.at(joined, rows, weights)
    ordered = weights[np.argsort(-sizes, kind="stable")]
    assert np.array_equal(joined, svg.shrink(ordered, svg.known_most))


def test_clients_in_one_row_show_the_largest_weight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """800 clients of one size, two in a row: clients 0 and 1 have weights 0.7 and 0.3."""
    seen: list[np.ndarray] = []
    draw = svg.sequential
    monkeypatch.setattr(svg, "sequential", lambda v, *a, **k: seen.append(v) or draw(v, *a, **k))
    event = {"round": 0, "weights": {"0": 0.7, "1": 0.3, "9": 0.1}, "left_out": [{"client": 2}]}
    run = RunView(tmp_path, rounds=(event,), matrices={"client_sizes": np.ones(800)})
    picture = weights_map("", run, 0.7)
    assert seen[0][0].tolist() == [0.7]
    assert picture.note == (
        "Blank: not in the cohort; full colour: weight 0.70. Orange: dropped out, "
        "failed, or left out by the rule."
    )


def test_weight_maps_side_by_side_share_one_scale(tmp_path: Path) -> None:
    """Largest weights 0.6 and 0.9: both maps reach full colour at 0.9."""

    def run(*weights: float) -> tuple[RunView]:
        event = {"round": 0, "weights": {str(k): w for k, w in enumerate(weights)}}
        return (RunView(tmp_path, rounds=(event,)),)

    section = Aggregation().draw(Runs("", tmp_path, {"a": run(0.6, 0.4), "b": run(0.9, 0.1)}))
    assert section is not None
    assert [p.note for p in section.pictures[1:]] == [
        "Blank: not in the cohort; full colour: weight 0.90."
    ] * 2


def test_the_map_learned_minus_true_by_hand(tmp_path: Path) -> None:
    """True φ 0.5, learned 0.3: the difference −0.2 is written as −20, once on either side."""
    true, learned = np.array([[1, 0.5], [0.5, 1]]), np.array([[1, 0.3], [0.3, 1]])
    matrices = {"true": true, "learned": learned}
    run = RunView(tmp_path, start={"classes": ["a", "b"]}, matrices=matrices)
    section = Correlation().draw(Runs("", tmp_path, {"x": (run,)}, alone=True))
    assert section is not None
    found = {p.title: re.findall(r">([−\d]+)</text>", p.svg) for p in section.pictures}
    assert found == {
        "True: the test labels": ["50", "50"],
        "Learned by the model": ["30", "30"],
        "Learned − true": ["−20", "−20"],
    }


def scored(folder: Path, ap: float, central: bool = False) -> tuple[RunView]:
    """A run with one label of this average precision."""
    row = {"label": "cat", "ap": ap, "positives": 3}
    config = {"federation": {"central": central}}
    return (RunView(folder, config, results={"per_label": [row]}),)


def test_gains_of_labels_are_against_the_first_method_on_an_axis_of_ten_points(
    tmp_path: Path,
) -> None:
    """Central 90, a 50, b 52: b gains 2 points over a, which an axis of 10 shows as little."""
    groups = {"central": scored(tmp_path, 0.9, True), "a": scored(tmp_path, 0.50)}
    section = Labels().draw(Runs("", tmp_path, {**groups, "b": scored(tmp_path, 0.52)}))
    assert section is not None
    gains = section.pictures[1]
    assert gains.title == "AP compared with a, points"
    assert gains.svg.count('fill="var(--s2)"') == 1
    assert svg.CENTRAL.outline not in gains.svg
    ticks = [float(t.replace("−", "-")) for t in re.findall(r'middle">([−\d.]+)<', gains.svg)]
    assert max(ticks) - min(ticks) >= 7.5


def test_curves_of_the_method_say_what_they_are(pages: Callable[[str], Path]) -> None:
    words = _words(pages("fedharmony"))
    assert "Mean distance of a client's correlations to the consensus of the others." in words


def test_shares_stand_in_the_order_of_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two clients, labels in the order 2, 0, 1: a row per label, a column per client."""
    seen: list[np.ndarray] = []
    draw = svg.sequential
    monkeypatch.setattr(
        svg, "sequential", lambda values, *more: seen.append(values) or draw(values, *more)
    )
    shares = np.array([[0.1, 0.2, 0.3], [0.4, 0.5, 0.6]])
    client_picture(np.array([9.0, 4.0]), shares, LabelOrder(np.array([2, 0, 1])), ["a", "b", "c"])
    assert seen[0].tolist() == [[0.3, 0.6], [0.1, 0.4], [0.2, 0.5]]


def test_heat_map_pixels_by_hand() -> None:
    """Limit 0.5: 0.25 is half opaque (128) in the positive hue, −0.5 opaque in the negative one."""
    pixels = svg.diverging(np.array([[0.25, -0.5, np.nan, 0.0, 0.9]]), 0.5)[0]
    assert pixels[0].tolist() == [*svg.POSITIVE, 128]
    assert pixels[1].tolist() == [*svg.NEGATIVE, 255]
    assert pixels[2].tolist() == [*svg.UNKNOWN[:3], 0]
    assert (pixels[3][3], pixels[4][3]) == (0, 255)


def picture_of(text: str) -> np.ndarray:
    """The pixels of the first image in SVG text."""
    data = re.search(r'href="data:image/png;base64,([^"]*)"', text)
    assert data is not None
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(data[1]))))


def test_values_that_are_not_known_are_hatched_and_others_are_not() -> None:
    """Two labels with one unknown pair out of four cells: stripes in it, flat colour elsewhere."""
    drawing = svg.Drawing(100)
    drawing.image(svg.diverging(np.array([[0.5, np.nan]]), 0.5), 0, 0, 100, 50)
    pixels = picture_of(drawing.svg(""))
    half = pixels.shape[1] // 2
    known, unknown = pixels[:, :half], pixels[:, half:]
    assert len(np.unique(known.reshape(-1, 4), axis=0)) == 1
    assert 0.2 < float((unknown[..., 3] > 0).mean()) < 0.5  # a third is stripe


def test_small_heat_maps_say_their_values_and_name_rows_and_columns() -> None:
    """φ of −0.126 and 0.5 in three labels, one pair unknown: −13 and 50 twice each, no third."""
    matrix = np.array([[1, -0.126, 0.5], [-0.126, 1, np.nan], [0.5, np.nan, 1]])
    order = LabelOrder(np.arange(3))
    text = correlation_map("x", off_diagonal(matrix), order, ["cat", "dog", "owl"], 0.5).svg
    values = re.findall(r"<text x=[^>]*>([−\d]+)</text>", text)
    assert sorted(values) == ["50", "50", "−13", "−13"]
    assert text.count(">dog</text>") == 2
    assert text.count("rotate(-90") == 3
    many = correlation_map("x", np.zeros((21, 21)), LabelOrder(np.arange(21)), ["l"] * 21, 0.5).svg
    assert not re.findall(r">[−\d]+</text>", many)


def test_numbers_of_clusters_do_not_overlap() -> None:
    """400 labels on 336 units: clusters of 2 labels are 1.7 units apart, a number is 11 high."""
    order = LabelOrder(np.arange(400), ((0, 300), *((i, i + 2) for i in range(300, 400, 2))))
    drawn = correlation_map("x", np.zeros((400, 400)), order, [], 0.5).svg
    places = [float(y) for y in re.findall(r'<text x="[^"]*" y="([^"]*)"', drawn)]
    assert len(places) > 5
    assert min(b - a for a, b in itertools.pairwise(places)) >= svg.FONT


def test_unknown_entries_and_the_diagonal_are_left_out() -> None:
    matrix = np.ones((3, 3))
    by_label = off_diagonal(matrix, np.array([1.0, 1.0, 0.0]))
    assert np.isfinite(by_label).tolist() == [
        [False, True, False],
        [True, False, False],
        [False] * 3,
    ]
    by_pair = off_diagonal(matrix, np.array([[1, 0, 1], [0, 1, 1], [1, 1, 1]], dtype=float))
    assert int(np.isfinite(by_pair).sum()) == 4


def test_effective_clients_and_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights ½, ¼, ¼: 1 / (¼ + 1/16 + 1/16) = 8/3. Sizes 1, 1, 4: 36 / (1 + 1 + 16) = 2."""
    event = {"round": 0, "weights": {"0": 0.25, "1": 0.25, "2": 0.5}}
    run = RunView(tmp_path, rounds=(event,), matrices={"client_sizes": np.array([1.0, 1.0, 4.0])})
    seen: dict[str, Any] = {}

    def draw(title: str, lines: Sequence[Series], **how: Any) -> Picture:
        seen.update({line.name: line.curves for line in lines})
        return Picture(title, "")

    monkeypatch.setattr(aggregation, "curve", draw)
    panels["aggregation"]().draw(Runs("", tmp_path, {"fedavg": (run,)}))
    assert seen == {
        "fedavg": ({1: pytest.approx(8 / 3)},),
        "equal weights": ({1: pytest.approx(3.0)},),
        "weights by size": ({1: pytest.approx(2.0)},),
    }


def test_methods_with_the_same_weights_share_a_picture(tmp_path: Path) -> None:
    def run(*weights: float) -> RunView:
        event = {"round": 0, "weights": {str(k): w for k, w in enumerate(weights)}}
        return RunView(tmp_path, rounds=(event,))

    runs = {"a": run(0.5, 0.5), "b": run(0.4, 0.6), "c": run(0.5, 0.5 + 1e-9)}
    assert same_weights(runs) == [["a", "c"], ["b"]]


def test_a_curve_by_hand() -> None:
    """Seeds 10 % and 20 % in round 1, 30 % and 30 % in round 2: the line goes from 15 to 30 %.

    The band is 15 ± 7.07 and 30 ± 0. Two rounds span 0.5 to 2.5 over the width from 40 to 340
    (no last value is written beside two curves), so that they stand at 115 and 265.
    """
    two = Series("a", svg.style(0), ({1: 0.1, 2: 0.3}, {1: 0.2, 2: 0.3}))
    flat = Series("b", svg.style(1), ({1: 0.2, 2: 0.2},))
    text = curve("mAP", [two, flat], rounds=2, percent=True).svg
    lines = [
        [tuple(map(float, point.split())) for point in path.split("L")]
        for path in re.findall(r'<path d="M([^"z]*)" fill="none" stroke="var\(--s1\)"', text)
    ]
    band = re.search(r'<path d="M([^"]*)z" fill="var\(--s1\)" fill-opacity', text)
    assert band is not None
    outline = [tuple(map(float, p.split())) for p in band[1].split("L")]
    ((x1, y1), (x2, y2)) = lines[0]
    assert (x1, x2) == (115, 265)
    per_point = (y1 - y2) / 15
    assert [y for _, y in outline] == pytest.approx(
        [y1 - 7.07 * per_point, y2, y2, y1 + 7.07 * per_point], abs=0.1
    )


def test_a_belt_to_compare_with_is_drawn_and_fits_the_axis() -> None:
    """A line from 20 to 24 %, a belt from 30 to 32: the axis reaches to it, at the same scale."""
    series = [Series("a", svg.style(0), ({1: 0.20, 2: 0.24},))]
    text = curve("mAP", series, rounds=2, percent=True, belt=(0.30, 0.32)).svg
    belt = re.search(r'<path d="M([^"]*)z" fill="var\(--muted\)" fill-opacity', text)
    line = re.search(r'<path d="M([^"z]*)" fill="none" stroke="var\(--s1\)"', text)
    assert belt is not None
    assert line is not None
    corners, ends = ([float(p.split()[1]) for p in found[1].split("L")] for found in (belt, line))
    per_point = (ends[0] - ends[1]) / 4
    assert corners[0] == pytest.approx(ends[1] - 6 * per_point, abs=0.05)
    assert corners[0] - corners[2] == pytest.approx(2 * per_point, abs=0.05)
    assert corners[2] >= 0
    assert text.count('stroke-dasharray="4,2"') == 2


def test_a_figure_that_stands_alone_says_what_it_shows() -> None:
    """Title and a legend of both lines above, the note below, all inside of the frame."""
    series = [Series(n, svg.style(i), ({1: 0.1, 2: 0.2 + i},)) for i, n in enumerate("a<")]
    picture = replace(curve("mAP, %", series, rounds=2), note="Bands: none.")
    text = standalone(picture)
    root = ET.fromstring(text)
    left, top, width, height = map(float, root.attrib["viewBox"].split())
    words = {t.text: t for t in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"mAP, %", "a", "<", "Bands: none."} <= set(words)
    inner = curve("mAP, %", series, rounds=2).svg
    size = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', inner)
    assert size is not None
    assert top == -(14 + 14 + 8)  # a line of title, one of legend, and room
    assert left + width == float(size[1])
    assert float(words["Bands: none."].attrib["y"]) < top + height
    assert float(words["Bands: none."].attrib["y"]) > float(size[2])
    assert inner.count(svg.style(1).outline) + 1 == text.count(svg.style(1).outline)
    alone = curve("mAP, %", series[:1], rounds=2)
    assert alone.keys == ()  # one line needs no legend


def test_a_figure_brings_a_legend_where_the_section_has_none() -> None:
    series = [Series(n, svg.style(i), ({1: 0.1, 2: 0.2},)) for i, n in enumerate("ab")]
    picture = curve("mAP", series, rounds=2)
    kind = {"kind": "x", "title": "", "headline": "", "table": None, "version": ""}
    empty = {k: [] for k in ("facts", "notices", "tiles", "glance", "rules", "options", "settings")}
    more = {k: [] for k in ("environment", "commands", "files")} | {"table_keys": {}}
    failures = {"failures": {"summary": "", "rows": [], "left_out": 0}, "crowned": False}
    for keys, legends in ((picture.keys, 1), ((), 1), (picture.keys[:1], 2)):
        section = Section("A", "", (picture,), keys)
        text = render({**kind, **empty, **more, **failures, "sections": {"a": section}})
        assert text.count('<ul class="legend">') == legends
        own = re.search(r'</figcaption>\s*<ul class="legend">', text)
        assert (own is not None) == (keys != picture.keys)


def test_an_interval_that_goes_on_outside_is_marked() -> None:
    rows = [Row("a", ((svg.style(0), 1.0),), interval=(-9.0, 2.0))]
    assert "◂" in dots("x", rows, ends=(-5.0, 5.0)).svg
    assert "▸" not in dots("x", rows, ends=(-5.0, 5.0)).svg
    assert "◂" not in dots("x", rows, ends=(-10.0, 5.0)).svg


def test_a_map_that_stands_alone_has_its_colours_explained() -> None:
    order = LabelOrder(np.arange(2))
    matrix = off_diagonal(np.array([[0.0, 0.34], [0.34, 0.0]]), None)
    text = standalone(correlation_map("True", matrix, order, ("a", "b"), 0.4))
    assert ">−0.4</text>" in text
    assert ">+0.4; hatched: unknown; cells: hundredths</text>" in text
    assert f'fill="rgb{svg.POSITIVE}"' in text
    large = np.zeros((30, 30))
    names = tuple(map(str, range(30)))
    text = standalone(correlation_map("True", large, LabelOrder(np.arange(30)), names, 0.4))
    assert "hundredths" not in text  # too many cells for numbers


def test_a_run_of_one_round_has_one_tick() -> None:
    text = curve("loss", [Series("a", svg.style(0), ({1: 0.5},))], rounds=1).svg
    ticks = re.findall(r'text-anchor="middle">([^<]*)<', text)
    assert ticks == ["1", "round"]


def test_figures_are_deterministic_and_take_their_colours_from_the_page() -> None:
    series = [Series("a", svg.style(0), ({1: 0.1, 2: 0.2}, {1: 0.2, 2: 0.3}))]
    drawn = [curve("mAP", series, rounds=2, percent=True).svg for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert not re.search("#[0-9a-f]{3}", drawn[0])
    colours = (Path(svg.__file__).parent / "colours.css").read_text(encoding="utf-8")
    used = set(
        re.findall(r"var\((--[\w-]+)\)", drawn[0] + "".join(svg.style(i).colour for i in range(8)))
    )
    assert len(used) >= 10
    for variable in used:
        assert colours.count(f"{variable}: #") == 2  # by day and by night
    assert f"--positive: {', '.join(map(str, svg.POSITIVE))};" in colours
    assert f"--negative: {', '.join(map(str, svg.NEGATIVE))};" in colours


def test_a_far_baseline_is_named_at_the_edge() -> None:
    series = [Series("a", svg.style(0), ({1: 0.60, 2: 0.64},))]
    near = curve("mAP", series, rounds=2, percent=True, reference=("trivial", 0.58)).svg
    far = curve("mAP", series, rounds=2, percent=True, reference=("trivial", 0.1)).svg
    assert "trivial 58.0" in near
    assert "↓" not in near
    assert "↓ trivial 10.0" in far


def test_a_flat_curve_keeps_a_sensible_scale() -> None:
    """All zero: the axis starts at 0 and reaches the baseline, however far it is."""
    series = [Series("a", svg.style(0), ({1: 0.0, 2: 0.0},))]
    text = curve("CF1", series, rounds=2, percent=True, reference=("trivial", 0.2)).svg
    assert "trivial 20.0" in text
    assert "↑" not in text
    assert "−" not in text  # no negative per cent


def test_central_training_does_not_squeeze_the_methods() -> None:
    """Methods at 30 to 35 %, central at 90 %: the axis ends near 35 and central is named there."""
    series = [
        Series("a", svg.style(0), ({1: 0.30, 2: 0.35},)),
        Series("central", svg.CENTRAL, ({1: 0.8, 2: 0.9},)),
    ]
    text = curve("mAP", series, rounds=2, percent=True).svg
    assert "↑ central 90.0" in text
    assert ">40<" not in text


def test_dots_far_from_the_others_are_clipped_and_named() -> None:
    """70 to 73 and 20: quartiles 70 and 72, so the axis begins at 70 − 3 · 2 = 64."""
    values = [70.0, 71.0, 72.0, 73.0, 20.0]
    assert span(values, 1.0) == (64.0, 73.0)
    text = dots("x", [Row(f"r{v}", ((svg.style(0), v),)) for v in values]).svg
    assert "◂ 20" in text
    assert text.count("<path") - text.count('fill="none"') == 4  # the other four have their marks


def test_an_axis_of_dots_has_a_least_span() -> None:
    """Two points of 0.5 apart on an axis of at least 10: five on either side of their middle."""
    assert span([0.0, 0.5], 10.0) == (-4.75, 5.25)


# ------------------------------------------------------------------------------------- page

VOID = {"meta", "br", "hr", "img", "link", "input", "wbr"}


class Checker(HTMLParser):
    """Notes everything in a page that could be wrong."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.open.append(tag)
        self._note(attrs)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._note(attrs)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"</{tag}> closes something else at {self.getpos()}"

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text.append(data)

    def _note(self, attrs: list[tuple[str, str | None]]) -> None:
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"repeated attribute at {self.getpos()}"
        assert not any(name.startswith("on") for name in names)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            elif name in ("src", "href", "xlink:href", "srcset", "action", "data"):
                self.links.append(value or "")
            self.links += [f"{m}" for m in re.findall(r"url\(([^)]*)\)", value or "")]


def _check(path: Path) -> str:
    """Assert that a page is well formed and self-contained; returns its text."""
    text = path.read_text(encoding="utf-8")
    checker = Checker()
    checker.feed(text)
    checker.close()
    assert not checker.open
    assert len(checker.ids) == len(set(checker.ids))
    for link in checker.links:
        inside = link.startswith("#") and link[1:] in checker.ids
        assert inside or link.startswith("data:image/png;base64,"), link
    style = text[text.index("<style>") : text.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    assert "<script" not in text.lower()
    assert len(text.encode()) < 3_000_000
    return " ".join("".join(checker.text).split())


def _words(path: Path) -> str:
    return _check(path)


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    odd = [*ODD_NAMES, *(f"l{i}" for i in range(6))]
    return {
        "fedavg": write_fake_run(root / "fedavg", method="fedavg", classes=8, failures=False),
        "fedharmony": write_fake_run(root / "fedharmony"),
        "unfinished": write_fake_run(
            root / "unfinished", done=11, status="unfinished", results=False
        ),
        "interrupted": write_fake_run(
            root / "interrupted", classes=8, done=11, status="interrupted"
        ),
        "nothing": write_fake_run(root / "nothing", done=0, status="unfinished", results=False),
        "many labels": write_fake_run(root / "many", classes=120, clients=150, rounds=5),
        "odd names": write_fake_run(root / "odd", names=odd, label='fed<b>&"avg"', rounds=5),
        "two": write_fake_comparison(root / "two", classes=8, rounds=10),
        "eight": write_fake_comparison(root / "eight", METHODS, (0, 1), classes=6, rounds=8),
    }


@pytest.fixture(scope="module")
def pages(cases: dict[str, Path]) -> Callable[[str], Path]:
    """The page of a case, written once."""
    return functools.cache(lambda case: write_report(cases[case]))


ALL = ["results", "curves", "correlation", "clients", "labels", "aggregation", "method"]
SECTIONS = {
    "fedavg": ALL[:-1],  # it has nothing to say about itself
    "fedharmony": ALL,
    "unfinished": ["results", "curves", "clients", "aggregation", "method"],
    "interrupted": ALL,
    "nothing": ["clients"],
    "many labels": ALL,
    "odd names": ALL,
    "two": ALL,
    "eight": ALL,
}


@pytest.mark.parametrize("case", SECTIONS)
def test_the_page_is_well_formed_and_complete(pages: Callable[[str], Path], case: str) -> None:
    _check(pages(case))
    text = pages(case).read_text(encoding="utf-8")
    found = re.findall('<section id="(.*)">', text)
    assert found == [*SECTIONS[case], "failures", "settings", "repeat"]


@pytest.mark.parametrize("write", [write_fake_run, write_fake_comparison])
def test_the_same_folder_gives_the_same_bytes(write: Callable[..., Path], tmp_path: Path) -> None:
    folder = write(tmp_path / "it", classes=6, rounds=3)
    first = write_report(folder).read_bytes()
    again = write_report(folder, tmp_path / "again.html")  # report.html now lies in the folder
    assert again.read_bytes() == first


def test_the_run_page_says_what_was_reached(
    cases: dict[str, Path], pages: Callable[[str], Path]
) -> None:
    words = _words(pages("fedharmony"))
    results = json.loads((cases["fedharmony"] / "results.json").read_text())
    score, trivial = results["metrics"]["mAP"], results["baselines"]["prevalence"]["mAP"]
    assert f"After 30 of 30 rounds it reaches {100 * score:.1f} % mAP" in words
    assert f"would give {100 * trivial:.1f} % mAP" in words
    for name in METRIC_NAMES:
        assert f"{100 * results['metrics'][name]:.1f}" in words
    assert "mAP averages over the labels that occur in the test set (19 of 20)" in words
    assert "empty_class = skip" in words
    assert "fedharmony run demo.toml --method fedharmony --seed 0" in words
    assert "3 drop-outs and 2 failures (2.1 % of 240 invitations)" in words
    assert "loss is not finite" in words
    assert "No client dropped out or failed." in _words(pages("fedavg"))


def test_the_page_names_the_command_or_one_that_does_the_same(tmp_path: Path) -> None:
    folder = write_fake_run(tmp_path)
    about = json.loads((folder / "environment.json").read_text())
    (folder / "environment.json").write_text(json.dumps({**about, "command": "fedharmony run x"}))
    assert "<code>fedharmony run x</code>" in write_report(folder).read_text()
    (folder / "environment.json").unlink()
    assert "<code>fedharmony run config.toml</code>" in write_report(folder).read_text()


def test_lost_clients_are_said_at_the_top_and_marked_in_tables(tmp_path: Path) -> None:
    """Two failures in each of 2 × 2 runs; without failures there is neither mark nor notice."""
    lossy = write_fake_comparison(tmp_path / "lossy", seeds=(0, 1), failures=True)
    sound = write_fake_comparison(tmp_path / "sound", seeds=(0, 1), failures=False)
    words = _words(write_report(lossy, tmp_path / "lossy.html"))
    assert "fedavg, seed 0 lost 2 client replies for good" in words
    assert words.index("for good") < words.index("On the pooled test set")
    assert "fedavg †" in words
    note = "† clients that failed and were left out of rounds: fedavg 4, fedharmony 4"
    assert note in words
    table = table_of(load(lossy))
    assert f"{note}." in table.to_markdown()
    assert "fedharmony †" in table.to_markdown()
    words = _words(write_report(sound, tmp_path / "sound.html"))
    assert "†" not in words
    assert "for good" not in words


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({0: {"saved": [3, 5]}}, "This run trained a client a second time, in full precision"),
        ({0: {"saved": [3, 5]}}, "values were not finite (2 times, in round 1)"),
        (
            {2: {"fallbacks": {"memory": 1}}, 0: {"fallbacks": {"memory": 2, "plain": 1}}},
            "device's memory (3 times, in rounds 1, 3): free the device, or set engine.stack",
        ),
        ({1: {"fallbacks": {"later": 1}}}, "This run fell back (later) (1 time, in round 2)"),
    ],
)
def test_fallbacks_are_said_first(tmp_path: Path, changes: dict[int, Any], sentence: str) -> None:
    """``saved`` is what runs wrote before."""
    folder = write_fake_run(tmp_path / "run", failures=False)
    lines = (folder / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    rounds = [e for e in events if e["event"] == "round"]
    for number, change in changes.items():
        del rounds[number]["fallbacks"]
        rounds[number].update(change)
    (folder / "events.jsonl").write_text("\n".join(map(json.dumps, events)) + "\n")
    words = _words(write_report(folder, tmp_path / "page.html"))
    assert sentence in words
    assert words.index(sentence) < words.index("On the pooled test set")


def test_what_is_missing_is_said(pages: Callable[[str], Path]) -> None:
    words = _words(pages("unfinished"))
    assert "This run has not finished: 11 of 30 rounds are in its log." in words
    words = _words(pages("interrupted"))
    assert "This run was interrupted after 11 of 30 rounds: stopped by Ctrl-C." in words
    assert "There is no mAP to report yet." in _words(pages("nothing"))
    words = _words(pages("many labels"))
    assert "The 40 most frequent of 119 labels are shown." in words


def test_odd_names_are_shown_as_they_are(pages: Callable[[str], Path]) -> None:
    path = pages("odd names")
    words = _words(path)
    assert 'fed<b>&"avg" on digits' in words
    assert '$x_1$ & "q"' in words
    assert "猫" in words
    assert "&lt;script&gt;" in path.read_text(encoding="utf-8")


def test_the_comparison_page(cases: dict[str, Path], pages: Callable[[str], Path]) -> None:
    words = _words(pages("two"))
    table = table_of(load(cases["two"]))
    for line in table.lines:
        assert table.text(table.columns[0], line.cells[0]) in words
    assert "fedharmony has the highest mAP" in words
    text = pages("eight").read_text(encoding="utf-8")
    assert "7 methods: weights (seed 0)" in text  # those that weight by size
    assert re.findall("<summary>(.*)</summary>", text) == [
        "Cost: time and traffic",
        "All failures",
        "Shared by all runs",
        *METHODS,  # each with all settings of its own
        "Environment",
    ]


def test_the_difference_is_paired_by_seed() -> None:
    """Gaps 0.01, 0.02, 0.03 on seeds 0-2: 2.0 ± 1.0 points; seed 7 has no partner."""
    scores = {"a": {0: 0.71, 1: 0.62, 2: 0.83, 7: 0.1}, "b": {0: 0.70, 1: 0.60, 2: 0.80}}
    text = words.difference_sentence("a", "b", scores)
    assert "the difference is 2.0 ± 1.0 points." in text
    scores = {"a": {0: 0.71, 1: 0.60}, "b": {0: 0.68, 1: 0.60}}
    assert "no more than its own spread" in words.difference_sentence("a", "b", scores)
    assert "on one seed" in words.difference_sentence("a", "b", {"a": {0: 0.7}, "b": {0: 0.6}})
    shown = words.difference_sentence("a", "b", {"a": {0: 0.86751}, "b": {0: 0.84249}})
    assert "2.6 points" in shown  # 86.8 and 84.2, as they are shown


def test_runs_made_apart_can_be_compared(tmp_path: Path) -> None:
    folders = [write_fake_run(tmp_path / m, method=m, classes=5, rounds=3) for m in METHODS[::7]]
    path = write_report(folders)
    assert path == tmp_path.resolve() / "report.html"
    assert "fedavg and fedharmony on digits" in _words(path)


def test_runs_on_different_data_are_flagged(tmp_path: Path) -> None:
    one = write_fake_run(tmp_path / "one", classes=5, rounds=3)
    other = write_fake_run(tmp_path / "other", method="fedavg", classes=10, rounds=4)
    words = _words(write_report([one, other]))
    assert "The runs differ in their data settings" in words


def test_runs_on_different_data_have_no_winner(tmp_path: Path) -> None:
    one = write_fake_run(tmp_path / "one", classes=5, rounds=3)
    other = write_fake_run(tmp_path / "other", method="fedavg", classes=10, rounds=4)
    page = write_report([one, other])
    words = _words(page)
    assert "none is called the best" in words
    assert "highest" not in words
    assert "bold" not in words
    assert "<b>" not in page.read_text(encoding="utf-8")


def test_comparison_folders_are_merged(tmp_path: Path) -> None:
    """Two comparisons share fedavg, which both have trained with seed 0: it is told apart."""
    a = write_fake_comparison(tmp_path / "a", ("fedavg", "fedprox"), (0, 1), classes=5, rounds=2)
    b = write_fake_comparison(tmp_path / "b", ("fedavg", "fedharmony"), (0,), classes=5, rounds=2)
    run = write_fake_run(tmp_path / "c", method="fednova", classes=5, rounds=2)
    runs = load([a, b, run])
    assert {name: [r.seed for r in group] for name, group in runs.groups.items()} == {
        "fedavg (a)": [0, 1],
        "fedprox": [0, 1],
        "fedavg (b)": [0],
        "fedharmony": [0],
        "fednova": [0],
    }
    assert runs.home == tmp_path.resolve()
    assert "5 methods on digits" in _words(write_report(runs))
    assert len(load([a, a]).runs) == 4  # naming a folder twice adds nothing


def test_central_training_stays_out_of_the_ranking(tmp_path: Path) -> None:
    """Central is best by far: the next one is called best, bold and compared with."""
    methods = ("fedavg", "fedprox", "central")
    folder = write_fake_comparison(tmp_path, methods, (0, 1), classes=5, rounds=3)
    for seed in (0, 1):
        place = folder / "central" / f"seed-{seed}"
        results = json.loads((place / "results.json").read_text())
        results["metrics"]["mAP"] = 0.99
        (place / "results.json").write_text(json.dumps(results))
    runs = load(folder)
    assert runs.ranked == ("fedavg", "fedprox")
    assert styles(runs)["central"] == svg.CENTRAL
    assert svg.CENTRAL not in [svg.style(i) for i in range(20)]
    best = {line.name: line.cells[0].best for line in table_of(runs).lines}
    assert not best["central"]
    assert sum(best.values()) == 1
    words = _words(write_report(folder))
    assert re.search("fed(avg|prox) has the highest mAP", words)
    assert "Trained in one place (central), which is no federated method: 99.0" in words
    assert "2 methods" in words
    assert "99 ▸" in words  # the dots of the methods have the axis to themselves


@pytest.mark.parametrize(
    ("settings", "title"),
    [
        ('name = "table"\npath = "/data/my shapes"', "fedharmony on my shapes"),
        ('name = "voc"\nyear = 2012', "fedharmony on voc 2012"),
    ],
)
def test_the_title_says_which_data(tmp_path: Path, settings: str, title: str) -> None:
    folder = write_fake_run(tmp_path, classes=5, rounds=1)
    config = (folder / "config.toml").read_text()
    (folder / "config.toml").write_text(config.replace('name = "digits"', settings))
    assert title in _words(write_report(folder))


def test_a_panel_is_one_class_and_appears_in_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    panels.names()  # those of the package first
    monkeypatch.setattr(panels, "_items", dict(panels._items))

    @panels.register("greeting")
    class Greeting(Panel):
        """Says hello between label correlation and clients."""

        place = 25

        def draw(self, runs: Runs) -> Section:
            return Section("Greeting", f"Hello from {runs.first.label}.")

    path = write_report(write_fake_run(tmp_path, classes=5, rounds=2))
    assert "Hello from fedharmony." in _words(path)
    found = re.findall('<section id="(.*)">', path.read_text(encoding="utf-8"))
    assert found[found.index("greeting") - 1 : found.index("greeting") + 2] == [
        "correlation",
        "greeting",
        "clients",
    ]


def test_a_page_that_cannot_be_written_is_refused_with_advice(tmp_path: Path) -> None:
    write_fake_run(tmp_path / "run")
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"Cannot write the report .*Choose another place"):
        write_report(tmp_path / "run", tmp_path / "file" / "report.html")


# --------------------------------------------------------------------------------- progress


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)


def console(*, terminal: bool) -> Console:
    return Console(file=io.StringIO(), width=90, force_terminal=terminal)


def output(target: Console) -> str:
    return str(target.file.getvalue())  # type: ignore[attr-defined]


def test_elsewhere_there_is_one_line_per_round(cases: dict[str, Path]) -> None:
    target = console(terminal=False)
    events = events_of(cases["fedharmony"])
    with Progress(console=target) as show:
        show.follow(2, 6, "fedharmony seed 1", 30)
        for event in events:
            show(event)
            if event["event"] == "evaluate":
                show({"event": "progress", "round": event["round"] + 1, "done": 1, "total": 9})
    lines = output(target).splitlines()
    assert lines[0].startswith("run 2 of 6: fedharmony seed 1: 30 rounds, 20 clients, 8 per round")
    rounds = [line for line in lines if line.startswith("round")]
    assert len(rounds) == 30
    assert len(lines) == 32
    evaluations = [e["metrics"]["mAP"] for e in events if e["event"] == "evaluate"]
    for line, score in zip(rounds, evaluations, strict=True):
        assert f"mAP {100 * score:.1f}" in line
    assert "7 of 8 clients (1 dropped)" in rounds[4]
    assert "client 19 failed in update: loss is not finite" in rounds[7]
    assert lines[-1].startswith("completed after 30 of 30 rounds in 40 s: mAP")


def test_names_stand_beside_their_clients_largest_first(tmp_path: Path) -> None:
    """20 clients: below the columns of the split, and beside the rows of the weights."""
    folder = write_fake_run(tmp_path / "run", clients=20)
    log = folder / "events.jsonl"
    first, _, rest = log.read_text().partition("\n")
    called = [f"site {k}" for k in range(20)]
    log.write_text(json.dumps({**json.loads(first), "client_names": called}) + "\n" + rest)
    by_size = np.argsort(-load(folder).first.matrices["client_sizes"], kind="stable")
    found = re.findall(r">(site \d+)</text>", write_report(folder).read_text())
    assert found == [called[k] for k in by_size] * 2


def test_clients_with_names_are_called_by_them(tmp_path: Path) -> None:
    """40 are too many to stand below a picture; what failed is named in table and line."""
    folder, called = write_fake_run(tmp_path / "run", clients=40), [f"site {k}" for k in range(40)]
    log = folder / "events.jsonl"
    events = [json.loads(line) for line in log.read_text().splitlines()]
    failure = next(f for e in events for f in e.get("left_out", ()) if f["cause"] == "failed")
    failure["name"] = called[failure["client"]]
    events[0]["client_names"] = called
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    page = write_report(folder)
    assert f"<td>{failure['name']}</td><td>update</td>" in page.read_text()
    words = _words(page)
    sizes = load(folder).first.matrices["client_sizes"]
    largest, smallest = int(sizes.argmax()), len(sizes) - 1 - int(sizes[::-1].argmin())
    assert f"The largest client is site {largest}, the smallest site {smallest}." in words
    target = console(terminal=False)
    show = Progress(console=target)
    for event in events:
        show(event)
    assert f"client {failure['name']} failed in update" in output(target)


def test_time_left_and_rounds_without_evaluation() -> None:
    """Resumed after 2 of 6 rounds: one round in 3 s leaves three, 9 s. Old metrics stay away."""
    target = console(terminal=False)
    show = Progress(console=target)
    show({"event": "start", "label": "x", "rounds": 6, "resumed_at": 2})
    show({"event": "round", "round": 2, "seconds": 2.0})
    show({"event": "evaluate", "round": 2, "seconds": 1.0, "metrics": {"mAP": 0.5}})
    show({"event": "round", "round": 3, "seconds": 3.0})
    show({"event": "round", "round": 4, "seconds": 3.0})
    lines = output(target).splitlines()
    assert lines[0] == "x: 6 rounds, resumed after round 2"
    assert lines[1] == "round 3/6  mAP 50.0  0 of 0 clients  9 s left"
    assert lines[2] == "round 4/6  0 of 0 clients  6 s left"
    assert len(lines) == 3  # round 5 waits for its evaluation


def test_time_left_of_all_runs() -> None:
    """Four rounds of 2 s each, then two runs: 2 · 2 s + 2 · 8 s. A run of 8 s, and the next takes
    4 s a round: 3 · 4 s + (8 s + 16 s) / 2 for the run that follows.
    """
    target = console(terminal=False)
    show = Progress(console=target)
    for seconds, later in ((2.0, 2), (4.0, 1)):
        show.follow(3 - later, 3, "x", 4)
        show({"event": "start", "rounds": 4})
        for round in range(4):
            show({"event": "round", "round": round, "seconds": seconds})
        show({"event": "finish", "status": "completed"})
    lines = output(target).splitlines()
    assert lines[2].endswith("4 s left, 20 s for all runs")
    assert lines[4].endswith("0 of 0 clients  16 s for all runs")
    assert lines[7].endswith("12 s left, 24 s for all runs")


def interrupted(show: Progress, events: list[dict[str, Any]]) -> None:
    """Show the events, then die as Ctrl-C would."""
    with show:
        for event in events:
            show(event)
        show({"event": "progress", "round": 20, "done": 40, "total": 100})
        show._bars.refresh()
        raise KeyboardInterrupt


def test_quiet_prints_nothing(cases: dict[str, Path], terminal: None) -> None:
    target = console(terminal=True)
    with pytest.raises(KeyboardInterrupt):
        interrupted(Progress(quiet=True, console=target), events_of(cases["fedharmony"])[:5])
    assert output(target) == ""


def test_bars_show_the_run_and_the_terminal_is_restored(
    cases: dict[str, Path], terminal: None
) -> None:
    target = console(terminal=True)
    with pytest.raises(KeyboardInterrupt):
        interrupted(Progress(console=target), events_of(cases["fedharmony"])[:41])
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output(target))
    assert re.search(r"round +━+.*20/30 .* left", text)
    assert "40/100" in text
    assert "client 19 failed in update: loss is not finite" in text
    assert text.rstrip().endswith("stopped in round 21 of 30")
    assert output(target).rfind("\x1b[?25h") > output(target).rfind("\x1b[?25l")  # cursor is back


@pytest.mark.parametrize("variable", [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_plain_terminals_get_plain_lines(
    cases: dict[str, Path],
    terminal: None,
    monkeypatch: pytest.MonkeyPatch,
    variable: tuple[str, str],
) -> None:
    monkeypatch.setenv(*variable)
    target = console(terminal=True)
    with Progress(console=target) as show:
        for event in events_of(cases["fedharmony"]):
            show(event)
    assert "\x1b[?25l" not in output(target)
    assert sum(line.startswith("round") for line in output(target).splitlines()) == 30


def test_without_a_with_block_the_terminal_is_left_alone(
    cases: dict[str, Path], terminal: None
) -> None:
    target = console(terminal=True)
    show = Progress(console=target)
    for event in events_of(cases["fedharmony"])[:4]:
        show(event)
    assert "\x1b[?25l" not in output(target)


def test_decoding_is_announced_once_for_each_part() -> None:
    out = io.StringIO()
    show = Progress(console=Console(file=out, width=80, force_terminal=False))
    for total in (300, 100):
        for done in range(0, total + 1, 50):
            show({"event": "decode", "done": done, "total": total})
    lines = out.getvalue().splitlines()
    assert [line.split(";")[0] for line in lines] == ["decoding 300 images", "decoding 100 images"]


def test_losses_of_another_kind_are_shown_relative(tmp_path: Path) -> None:
    """A method that sums over images and labels would squeeze the others to a line at zero."""
    write_fake_comparison(tmp_path, ("fedavg", "fedlgt"), (0,), rounds=4)
    page = write_report(tmp_path).read_text()
    assert "relative to the first round" not in page
    log = next(tmp_path.glob("fedlgt/*/events.jsonl"))
    events = [json.loads(line) for line in log.read_text().splitlines()]
    for event in events:
        if event["event"] == "round":
            event["train_loss"] *= 320
    log.write_text("".join(json.dumps(event) + "\n" for event in events))
    assert "Training loss, relative to the first round" in write_report(tmp_path).read_text()


def test_costs_in_the_table_are_means_over_rounds(tmp_path: Path) -> None:
    folder = write_fake_comparison(tmp_path, ("fedavg",), (0,), rounds=3)
    view = load(folder)
    (run,) = view.groups["fedavg"]
    (row,) = table_of(view).runs
    for key in ("seconds", "bytes_up", "bytes_down"):
        rounds = [e[key] for e in events_of(run.folder) if e["event"] == "round"]
        assert len(rounds) == 3
        assert row.values[key] == pytest.approx(sum(rounds) / 3)


def test_bars_are_as_high_as_the_clients_are_large() -> None:
    """Sizes 1, 4, 2, largest first: heights 4 : 2 : 1, each 0.78 of a column, on one ground."""
    order = LabelOrder(np.zeros(0, np.int64))
    text = client_picture(np.array([1.0, 4.0, 2.0]), None, order, []).svg
    drawn = re.search(r'<path d="([^"]*)"[^>]*var\(--s1', text)
    assert drawn is not None
    numbers = np.array(re.findall(r"-?\d+(?:\.\d+)?", drawn[1]), np.float64)[2:]
    low, high = (f(numbers.reshape(3, -1, 2), axis=1) for f in (np.min, np.max))
    width, height = (high - low).T
    assert height / height[2] == pytest.approx([4, 2, 1], abs=0.01)
    assert width / (low[1, 0] - low[0, 0]) == pytest.approx([0.78] * 3, abs=0.01)
    assert len(set(high[:, 1])) == 1


def test_names_stand_beside_their_rows() -> None:
    """In the order given, right-aligned at one place, at even distances."""
    order = LabelOrder(np.array([2, 0, 1]))
    drawn = correlation_map("", np.eye(3), order, ["ape", "bee", "cat"], 1.0).svg
    found = re.findall(r'<text x="([\d.]+)" y="([\d.]+)" font[^>]*end">(\w+)', drawn)
    assert [name for *_, name in found] == ["cat", "ape", "bee"]
    assert len({x for x, *_ in found}) == 1
    first, second, third = (float(y) for _, y, _ in found)
    assert second - first == pytest.approx(third - second, abs=0.02)
    assert second > first


# -- the runs that these tests make up -------------------------------------------------------------


def test_made_up_runs_hold_what_real_ones_do(tmp_path: Path) -> None:
    """Settings and events key by key; of other files, nothing that no run writes."""
    tiny = [
        *("data.train=40", "data.test=16", "split.clients=3", "run.rounds=3"),
        *("train.epochs=1", "engine.threads=1", "model.width=8", "model.depth=1", "model.heads=2"),
        *("federation.cohort=2", "federation.drop_rate=0.05", "model.patch=16"),
    ]
    for method in ("fedavg", "fedharmony", "fedcurv"):
        real, made_up = tmp_path / method, tmp_path / f"made up {method}"
        settings = load_settings("demo", [*tiny, f"run.method={method}"])
        start(settings, RunFolder(real), lambda event: None)
        write_fake_run(made_up, method=method, rounds=3, clients=3, cohort=2)
        assert names_in(read_toml(made_up / "config.toml")) == {
            name for name in names_in(settings.tree()) if name != "engine.threads"
        }
        for name in ("environment.json", "split_report.json", "results.json"):
            found, wanted = (names_in(json.loads((f / name).read_text())) for f in (made_up, real))
            assert found <= wanted, name
        logs: list[set[str]] = []
        for folder in (made_up, real):
            events = RunFolder(folder).read_events()
            names = [names_in({**e, "weights": "weights" in e}, f"{e['event']}.") for e in events]
            logs.append(set().union(*names))
        assert logs[0] == logs[1]


def names_in(tree: dict[str, Any], at: str = "") -> set[str]:
    """The dotted names of all values of a tree."""
    pairs = ((f"{at}{key}", value) for key, value in tree.items())
    return set().union(*(names_in(v, f"{k}.") if isinstance(v, dict) else {k} for k, v in pairs))
