"""Predictions: the run's own scores again, from its folder alone; and what cannot be predicted."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import save_file

from fedharmony.data.loose import find_images
from fedharmony.errors import CheckpointError, DataError
from fedharmony.experiments.build import assemble
from fedharmony.experiments.evaluate import score
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.predict import Rule, predictions
from fedharmony.experiments.run import start
from fedharmony.experiments.settings import load_settings
from fedharmony.experiments.trained import load_model
from fedharmony.methods import methods
from fedharmony.models.label_text import write_label_text
from test_cli import call, refuse, succeed

NAMES = ("cat", "dog", "tree")
SMALL = [
    *("data.name=table", "data.image_size=16", 'data.resize="pad"', "split.name=iid"),
    *("split.clients=3", "run.rounds=2", "train.epochs=1", "train.batch_size=4"),
    *("engine.threads=1", "model.width=8", "model.depth=1", "model.heads=2", "model.patch=8"),
]


def images(folder: Path, count: int = 24) -> list[Path]:
    """Pictures of several sizes with a table of labels; every fourth is a test image."""
    rng = np.random.default_rng(0)
    (folder / "deep").mkdir(parents=True)
    rows, tests = ["image,labels,split"], []
    for i in range(count):
        name = f"{'deep/' if i % 2 else ''}{i:02d}.png"
        pixels = rng.integers(0, 255, (12 + i % 5, 20 - i % 3, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / name)
        labels = "|".join(NAMES[k] for k in range(3) if (i >> k) & 1) or "|"
        rows.append(f"{name},{labels},{'test' if i % 4 == 0 else 'train'}")
        tests += [folder / name] if i % 4 == 0 else []
    (folder / "labels.csv").write_text("\n".join(rows))
    return tests


def trained(folder: Path, data: Path, *changes: str) -> Path:
    settings = load_settings("demo", [*SMALL, f"data.path='{data}'", *changes])
    start(settings, RunFolder(folder), lambda event: None)
    return folder


@pytest.fixture(scope="module", autouse=True)
def _cache(tmp_path_factory: pytest.TempPathFactory) -> object:
    """Decoded images go to a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FEDHARMONY_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[Path]]:
    """A run of FedAvg with thresholds, its data and the test images."""
    folder = tmp_path_factory.mktemp("run")
    tests = images(folder / "data")
    here = trained(folder / "run", folder / "data", "run.method=fedavg", "run.thresholds=0.3")
    return here, folder / "data", tests


VARIANTS = [*methods.names(), "fedavg:plus", "spherefed:s2"]


@pytest.mark.parametrize(
    ("method", "average"), [*((name, "0") for name in VARIANTS), ("fedavg", "0.9")]
)
def test_every_method_predicts_what_it_was_measured_by(
    method: str, average: str, tmp_path: Path
) -> None:
    """The table and the training images are gone; the test images are read from elsewhere."""
    tests = images(tmp_path / "data")
    own = [] if ":" in method else [f"federation.server_average={average}"]
    changes = [
        f"run.method={method}",
        *own,
        "methods.fedlgt.embedding=8",
        "methods.fedlgt.layers=1",
    ]
    here = trained(tmp_path / "run", tmp_path / "data", *changes)
    settings = RunFolder(here).open()
    assembly = assemble(settings, RunFolder(here)["partition.json"])
    state = RunFolder(here).load_state(settings).state
    expected = score(assembly, state, assembly.data.test.images)
    elsewhere = [Path(shutil.copy(path, tmp_path)) for path in tests]
    shutil.rmtree(tmp_path / "data")
    model = load_model(RunFolder(here), "cpu")
    found = list(predictions(model, elsewhere))
    assert model.classes == NAMES
    assert [p.name for p in found] == [str(path) for path in elsewhere]
    np.testing.assert_allclose(np.stack([p.scores for p in found]), expected, atol=1e-6)


def test_files_that_a_run_began_from_may_be_gone(tmp_path: Path) -> None:
    """Weights with a normalisation of their own, and the text of the labels."""
    tests = images(tmp_path / "data")
    weights, text = tmp_path / "w" / "vit.safetensors", tmp_path / "text.safetensors"
    weights.parent.mkdir()
    (weights.parent / "config.json").write_text(
        '{"architecture": "vit",'
        ' "pretrained_cfg": {"mean": [0.1, 0.2, 0.3], "std": [0.4, 0.5, 0.6]}}'
    )
    write_label_text(text, {n: n for n in NAMES}, lambda texts: torch.eye(len(texts), 8))
    first = trained(tmp_path / "first", tmp_path / "data", "run.method=fedavg", "run.rounds=1")
    model = load_model(RunFolder(first))
    own = model.scorer.model.backbone.shapes()
    save_file({n: t[0] for n, t in model.scorer.parameters.items() if n in own}, weights)
    here = trained(
        *(tmp_path / "run", tmp_path / "data", "run.method=fedlgt", f"model.weights='{weights}'"),
        *(f"methods.fedlgt.text='{text}'", "methods.fedlgt.embedding=8"),
    )
    before = [p.scores for p in predictions(load_model(RunFolder(here)), tests)]
    weights.unlink()
    (weights.parent / "config.json").unlink()
    text.unlink()
    again = load_model(RunFolder(here))
    assert again.scorer.method.task.mean == (0.1, 0.2, 0.3)
    np.testing.assert_array_equal([p.scores for p in predictions(again, tests)], before)


def test_predict_writes_a_table_of_labels_and_scores(
    run: tuple[Path, Path, list[Path]], tmp_path: Path
) -> None:
    """A folder, with what is below it, and one file that is no image."""
    here, _, tests = run
    (tmp_path / "in" / "below").mkdir(parents=True)
    (tmp_path / "in" / ".hidden").mkdir()
    for place in ("a.png", "below/b.PNG", ".hidden/c.png"):
        shutil.copy(tests[0], tmp_path / "in" / place)
    (tmp_path / "in" / "broken.jpg").write_bytes(tests[0].read_bytes()[:40])
    (tmp_path / "in" / "notes.txt").write_text("no image")
    code, out, err = call(tmp_path, "predict", str(here), "in", "--csv", "out.csv")
    assert code == 1
    assert "2 of 3 labelled: out.csv" in out
    assert "broken.jpg cannot be read: " in err
    rows = list(csv.DictReader((tmp_path / "out.csv").read_text().splitlines()))
    assert [row["image"] for row in rows] == ["in/a.png", "in/broken.jpg", "in/below/b.PNG"]
    assert set(rows[1].values()) == {"in/broken.jpg", ""}
    model = load_model(RunFolder(here))
    (expected,) = predictions(model, [tests[0]])
    assert expected.scores is not None
    for row in (rows[0], rows[2]):
        scores = [float(row[f"score_{name}"]) for name in NAMES]
        np.testing.assert_allclose(scores, expected.scores, atol=1e-5)
        given = [n for n, s, t in zip(NAMES, scores, model.thresholds, strict=True) if s >= t]
        assert set(row["labels"].split("|")) - {""} == set(given)
        assert row["labels"] != ""
    text = (tmp_path / "out.csv").read_text()
    assert "exists already" in refuse(tmp_path, "predict", str(here), "in", "--csv", "out.csv")
    assert (tmp_path / "out.csv").read_text() == text
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_names_stay_with_their_scores_behind_images_that_cannot_be_read(
    run: tuple[Path, Path, list[Path]], tmp_path: Path
) -> None:
    """More images than are decoded at a time, of which the first is broken; none has a label."""
    here, _, tests = run
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"nonsense")
    every = [broken, *tests, *tests, *tests, *tests]
    assert len(every) > 16
    model = load_model(RunFolder(here))
    found = list(predictions(model, every))
    assert [p.name for p in found] == [str(path) for path in every]
    assert [p.trouble for p in found if p.scores is None] == ["it is not an image of a known kind"]
    expected = [p.scores for p in predictions(model, tests)]
    np.testing.assert_allclose(np.stack([p.scores for p in found[-6:]]), expected, atol=1e-6)
    words = [str(here), str(tests[0]), "--csv", "none.csv", "--threshold", "1"]
    succeed(tmp_path, "predict", *words)
    assert (tmp_path / "none.csv").read_text().splitlines()[1].startswith(f"{tests[0]},|,")


def test_predict_shows_a_table(run: tuple[Path, Path, list[Path]], tmp_path: Path) -> None:
    """By the thresholds of the run, by another one, and the best labels."""
    here, _, tests = run
    every = succeed(tmp_path, "predict", str(here), str(tests[0]), "--threshold", "0")
    assert every.startswith(str(tests[0]))
    assert all(name in every for name in NAMES)
    assert "no label" in succeed(tmp_path, "predict", str(here), str(tests[0]), "--threshold", "1")
    best = succeed(tmp_path, "predict", str(here), str(tests[0]), "--top", "2")
    scores = [float(word.rsplit(" ", 1)[1]) for word in best.split("  ")[-1].strip().split(", ")]
    assert scores == sorted(scores, reverse=True)
    assert len(scores) == 2


def test_a_rule_by_hand() -> None:
    """Scores 0.6, 0.7, 0.8: all reach 0.5, the third does not reach 0.9."""
    scores = np.array([0.6, 0.7, 0.8], np.float32)
    assert Rule(np.full(3, 0.5)).labels(scores) == [2, 1, 0]
    assert Rule(np.array([0.5, 0.5, 0.9])).labels(scores) == [1, 0]
    assert Rule(np.zeros(3), top=2).labels(scores) == [2, 1]


def test_thresholds_are_the_run_s_or_one_for_all(run: tuple[Path, Path, list[Path]]) -> None:
    here, _, _ = run
    model = load_model(RunFolder(here))
    assert model.thresholds.tolist() == model.results["thresholds"]["per_label"]
    without = {**model.results, "thresholds": None}
    other = type(model)(model.settings, model.facts, model.scorer, without, model.device)
    assert other.thresholds.tolist() == [0.5, 0.5, 0.5]


def test_tables_list_images(run: tuple[Path, Path, list[Path]], tmp_path: Path) -> None:
    """Paths are below the table's folder; the column is the usual one, or named."""
    _, data, tests = run
    found = find_images([data / "labels.csv"])
    assert len(found) == 24
    assert found.paths[0] == tests[0]
    (tmp_path / "t.csv").write_text("photo,n\na.png,1\n")
    assert find_images([tmp_path / "t.csv"], ["photo"]).paths == (tmp_path / "a.png",)
    with pytest.raises(DataError, match=r"a.png cannot be read: No such file"):
        find_images([tmp_path / "t.csv"], ["photo"]).read(0)
    with pytest.raises(DataError, match="no column of paths"):
        find_images([tmp_path / "t.csv"])
    (tmp_path / "t.csv").write_text("image,n\n,1\n")
    with pytest.raises(DataError, match="line 2: the path"):
        find_images([tmp_path / "t.csv"])
    (tmp_path / "t.csv").write_text("")
    with pytest.raises(DataError, match="is empty"):
        find_images([tmp_path / "t.csv"])


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["nowhere"], "no file or folder"),
        (["empty"], "holds no image"),
        (["a.png", "--threshold", "2"], "from 0 to 1"),
        (["a.png", "--threshold", "high"], "from 0 to 1"),
        (["a.png", "--threshold", "nan"], "from 0 to 1"),
        (["a.png", "--top", "0"], "at least 1"),
        (["a.png", "--csv", "no/folder/out.csv"], "no folder"),
        (["a.png", "--device", "gpu9"], "is no device"),
    ],
)
def test_bad_requests_are_refused(
    run: tuple[Path, Path, list[Path]], tmp_path: Path, words: list[str], complaint: str
) -> None:
    here, _, tests = run
    (tmp_path / "empty").mkdir()
    shutil.copy(tests[0], tmp_path / "a.png")
    assert complaint in refuse(tmp_path, "predict", str(here), *words)


def test_runs_that_cannot_predict_say_why(
    run: tuple[Path, Path, list[Path]], tmp_path: Path
) -> None:
    """Not finished, no checkpoint, no description, other classes."""
    here, _, _ = run

    def copy(name: str) -> RunFolder:
        return RunFolder(Path(shutil.copytree(here, tmp_path / name)))

    folder = copy("unfinished")
    folder["results.json"].unlink()
    with pytest.raises(CheckpointError, match=r"not finished\. Go on with 'fedharmony resume"):
        load_model(folder)
    folder = copy("lost")
    folder.checkpoint.unlink()
    with pytest.raises(CheckpointError, match="which holds its model"):
        load_model(folder)
    folder = copy("old")
    folder["model.json"].unlink()
    with pytest.raises(CheckpointError, match="missing or damaged"):
        load_model(folder)
    folder = copy("other")
    stored = folder.read_json("model.json")
    folder.write_json("model.json", {**stored, "classes": ["cat", "dog"]})
    with pytest.raises(CheckpointError, match=r"does not fit .*model.json"):
        load_model(folder)


# -- feature vectors ------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def features(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, np.ndarray]:
    """A run on a table of four features and two labels, and the values of the table."""
    folder, rng = tmp_path_factory.mktemp("features"), np.random.default_rng(1)
    values = rng.normal(5, 2, (40, 4)).astype(np.float32)
    labels = (values[:, :2] > 5).astype(int)
    lines = ["id,a,b,c,d,label_p,label_q"]
    lines += [",".join(map(str, [f"s{i}", *values[i], *labels[i]])) for i in range(40)]
    (folder / "data.csv").write_text("\n".join(lines))
    settings = load_settings(
        "demo",
        [
            *("data.name=features", f"data.path='{folder / 'data.csv'}'", "split.name=iid"),
            *("split.clients=3", "run.rounds=1", "run.method=fedrdn", "engine.threads=1"),
            *("model.name=mlp", "model.hidden=[8]", "train.batch_size=4"),
        ],
    )
    start(settings, RunFolder(folder / "run"), lambda event: None)
    (folder / "data.csv").unlink()
    return folder / "run", values


def test_features_are_predicted_from_files_without_labels(
    features: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    """Columns in another order and one more; the same as arrays."""
    here, values = features
    model = load_model(RunFolder(here))
    expected = model.scorer(torch.from_numpy(values[:3])).numpy()
    lines = ["d,id,extra,c,b,a"]
    lines += [
        ",".join([str(v[3]), f"n{i}", "?", *map(str, v[2::-1])]) for i, v in enumerate(values[:3])
    ]
    (tmp_path / "new.csv").write_text("\n".join(lines))
    np.savez(tmp_path / "new.npz", X=values[:3])
    table = list(predictions(model, [tmp_path / "new.csv"]))
    arrays = list(predictions(model, [tmp_path / "new.npz"]))
    assert [p.name for p in table] == ["n0", "n1", "n2"]
    assert [p.name for p in arrays] == ["1", "2", "3"]
    np.testing.assert_allclose(np.stack([p.scores for p in table]), expected, atol=1e-6)
    np.testing.assert_allclose(np.stack([p.scores for p in arrays]), expected, atol=1e-6)
    both = list(predictions(model, [tmp_path / "new.csv", tmp_path / "new.npz"]))
    assert both[0].name == f"{tmp_path / 'new.csv'}:n0"
    assert len(both) == 6


def test_features_that_do_not_fit_are_refused(
    features: tuple[Path, np.ndarray], tmp_path: Path
) -> None:
    here, values = features
    model = load_model(RunFolder(here))

    def complaint(name: str, text: str = "", **arrays: np.ndarray) -> str:
        path = tmp_path / name
        if arrays:
            np.savez(path, **arrays)
        else:
            path.write_text(text)
        with pytest.raises(DataError) as caught:
            predictions(model, [path])
        return str(caught.value)

    assert "has no column 'd'" in complaint("x.csv", "a,b,c\n1,2,3")
    assert "not a number" in complaint("x.csv", "a,b,c,d\n1,2,3,red")
    assert "not a finite number" in complaint("x.csv", "a,b,c,d\n1,2,3,nan")
    assert "3 cells below 4" in complaint("x.csv", "a,b,c,d\n1,2,3")
    assert "no sample" in complaint("x.csv", "a,b,c,d")
    assert "with 4 columns" in complaint("x.npz", X=values[:2, :3])
    assert "not a finite number" in complaint("x.npz", X=np.full((1, 4), np.inf))
    names = np.array(["a", "c", "b", "d"])
    assert "'c' in the place of 'b'" in complaint("x.npz", X=values[:2], features=names)
    assert "has no array 'X'" in complaint("x.npz", Y=values[:2])
    with pytest.raises(DataError, match="cannot be turned into these"):
        _ = model.resize
