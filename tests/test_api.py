"""The interface for Python programs: arrays in, a run out that commands understand, too."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest
import torch

import fedharmony as fh
from fake_run import write_fake_comparison
from fedharmony.data.arrays import data_set
from fedharmony.errors import CheckpointError, ConfigError, DataError, FedHarmonyError
from fedharmony.experiments.build import draw_partition
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.init import fitting
from fedharmony.experiments.run import start
from fedharmony.experiments.scores import load_scores
from fedharmony.experiments.settings import compose, load_settings
from fedharmony.report.progress import Progress

ROOT = Path(__file__).parents[1]
Array = npt.NDArray[Any]


def features(count: int = 120) -> tuple[Array, Array]:
    """Vectors that tell four labels apart."""
    rng = np.random.default_rng(0)
    labels = (rng.random((count, 4)) < 0.4).astype(int)
    return labels @ rng.normal(size=(4, 6)) + 0.2 * rng.normal(size=(count, 6)), labels


def pictures(count: int = 40) -> tuple[Array, Array]:
    rng = np.random.default_rng(1)
    return rng.integers(0, 256, (count, 12, 8, 3), np.uint8), rng.integers(0, 2, (count, 3))


TINY = {"model.width": 16, "model.depth": 1, "model.heads": 2, "train.epochs": 1}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> fh.Run:
    x, y = features()
    place = tmp_path_factory.mktemp("api") / "run"
    return fh.train(x, y, clients=4, rounds=3, out=place, classes=["a", "b", "c", "d"], quiet=True)


def results(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())


# -- a run -----------------------------------------------------------------------------------------


def test_a_run_has_the_results_of_its_folder(run: fh.Run) -> None:
    assert run.metrics == results(run.folder)["metrics"]
    assert run.metrics["mAP"] > 0.8
    assert run.classes == ("a", "b", "c", "d")
    assert f"mAP {100 * run.metrics['mAP']:.1f}" in repr(run)
    assert fh.load(run.folder).metrics == run.metrics


def test_predictions_are_those_of_the_run(run: fh.Run) -> None:
    """The held-out images have the scores, and the metrics, that the run itself measured."""
    x, y = features()
    kept = load_scores(run.folder)
    test = [int(name) for name in kept.ids]
    assert len(test) == 24
    scores = run.predict(x[test])
    assert scores.dtype == np.float32
    np.testing.assert_array_equal(scores.astype(np.float16), kept.scores)
    np.testing.assert_array_equal(run.predict(torch.from_numpy(x[test])), scores)
    assert run.evaluate(x[test], y[test]).as_dict() == pytest.approx(run.metrics)


def test_unknown_labels_do_not_count(run: fh.Run) -> None:
    x, y = features()
    unknown = y.astype(float)
    unknown[:, 0], unknown[3, 1] = np.nan, -1
    known = run.evaluate(x, unknown)
    assert np.isnan(known.per_label_ap[0])
    assert known.per_label_ap[2] == run.evaluate(x, y).per_label_ap[2]


def test_labels_by_name(run: fh.Run) -> None:
    x, _ = features()
    scores = run.predict(x)
    for row, names in zip(scores, run.predict_labels(x), strict=True):
        assert set(names) == {run.classes[i] for i in np.flatnonzero(row >= 0.5)}
    assert max(map(len, run.predict_labels(x, top=1))) == 1


def test_inputs_of_another_shape_are_refused(run: fh.Run) -> None:
    with pytest.raises(DataError, match=r"takes vectors of 6 features.*\('N', 5\)"):
        run.predict(np.zeros((2, 5)))


def test_a_report_is_written_where_one_likes(run: fh.Run, tmp_path: Path) -> None:
    assert run.report(tmp_path / "a.html") == tmp_path / "a.html"
    assert "<html" in (tmp_path / "a.html").read_text()


def test_a_config_trains_as_the_command_does(tmp_path: Path) -> None:
    changes = {**TINY, "data.train": 60, "data.test": 20, "engine.threads": 1}
    found = fh.train(
        "demo",
        method="fedavg",
        rounds=1,
        clients=3,
        seed=2,
        settings=changes,
        out=tmp_path / "python",
        quiet=True,
    )
    words = [f"{key}={value}" for key, value in changes.items()]
    words += ["run.method=fedavg", "run.rounds=1", "split.clients=3", "run.seed=2", "model.seed=2"]
    folder = RunFolder(tmp_path / "command")
    expected = start(load_settings("demo", words), folder, lambda event: None)
    assert found.results["state_sha256"] == expected["state_sha256"]
    assert found.results["config_sha256"] == expected["config_sha256"]


def test_a_data_set_without_a_config_of_its_name(tmp_path: Path) -> None:
    changes = {"data": {"train": 40, "test": 20}, **TINY}
    found = fh.train(
        "digits", clients=2, rounds=1, settings=changes, out=tmp_path / "run", quiet=True
    )
    assert found.settings.data.common.name == "digits"
    assert found.settings.method_name == "fedavg"  # as the settings have it


# -- going on --------------------------------------------------------------------------------------


def test_the_same_call_returns_the_same_run(run: fh.Run) -> None:
    x, y = features()
    names = ["a", "b", "c", "d"]
    before = (run.folder / "results.json").stat().st_mtime_ns
    again = fh.train(x, y, clients=4, rounds=3, out=run.folder, classes=names, quiet=True)
    assert again.metrics == run.metrics
    assert (run.folder / "results.json").stat().st_mtime_ns == before
    with pytest.raises(CheckpointError, match="other settings"):
        fh.train(x, y, clients=4, rounds=4, out=run.folder, classes=names, quiet=True)
    with pytest.raises(CheckpointError, match="training images"):
        fh.train(x + 1, y, clients=4, rounds=3, out=run.folder, classes=names, quiet=True)


def test_an_interrupted_run_goes_on(run: fh.Run, tmp_path: Path) -> None:
    x, y = features()
    show = Progress.__call__

    def interrupt(self: Progress, event: dict[str, Any]) -> None:
        show(self, event)
        if event["event"] == "evaluate":
            raise KeyboardInterrupt

    def call() -> fh.Run:
        names = ["a", "b", "c", "d"]
        return fh.train(x, y, clients=4, rounds=3, out=tmp_path / "x", classes=names, quiet=True)

    with mock.patch.object(Progress, "__call__", interrupt), pytest.raises(KeyboardInterrupt):
        call()
    with pytest.raises(CheckpointError, match="not finished"):
        fh.load(tmp_path / "x")
    assert call().results["state_sha256"] == run.results["state_sha256"]


def test_other_settings_and_other_arrays_get_a_folder_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    x, y = features(40)
    trained = []
    for inputs, rounds in [(x, 1), (x, 1), (x + 1, 1), (x, 2), (x + 1, 1)]:
        found = fh.train(inputs, y, clients=2, method="fedavg", rounds=rounds, quiet=True)
        trained.append(found.folder.name.removeprefix("arrays-fedavg-seed0"))
    assert trained == ["", "", "-2", "-3", "-2"]
    assert "arrays-fedavg-seed0 is occupied by other settings or data: using" in caplog.text
    given = {"methods": ["fedavg"], "clients": 2, "rounds": 1, "quiet": True}
    compared = [fh.compare(inputs, y, **given).folder.name for inputs in (x, x, x + 1)]
    assert compared == [f"arrays-comparison{number}" for number in ("", "", "-2")]


def test_arrays_are_not_kept(run: fh.Run, tmp_path: Path) -> None:
    settings = RunFolder(run.folder).open()
    with pytest.raises(DataError, match="with the same arrays"):
        start(settings, RunFolder(tmp_path / "x"), lambda event: None)


# -- arrays ----------------------------------------------------------------------------------------


def test_images_may_have_their_channels_first_or_last() -> None:
    x, y = pictures()
    last, first = data_set(x, y, 0.2), data_set(x.transpose(0, 3, 1, 2), y, 0.2)
    index = torch.arange(32)
    np.testing.assert_array_equal(
        last.train.images.gather(index, "cpu"), first.train.images.gather(index, "cpu")
    )
    assert last.train.images.shape == (3, 12, 8)
    grey = data_set(x[..., 0], y, 0.2).train.images.gather(index, "cpu")
    assert (grey[:, 0] == grey[:, 2]).all()


def test_rows_stay_with_their_labels_and_owners() -> None:
    """Each image is filled with its own number; owner and label follow from it."""
    x = np.arange(30, dtype=np.uint8).reshape(30, 1, 1) * np.ones((1, 4, 4), np.uint8)
    y = np.stack([np.arange(30) % 2, np.arange(30) % 3 == 0], axis=1)
    made = data_set(x, y, 0.3, clients=np.arange(30) % 5)
    for part in (made.train, made.test):
        number = part.images.gather(torch.arange(len(part)), "cpu")[:, 0, 0, 0].numpy()
        np.testing.assert_array_equal(part.labels[:, 0], number % 2)
        assert part.users is not None
        np.testing.assert_array_equal(part.users, number % 5)
        assert part.ids == tuple(map(str, number))
    assert (len(made.train), len(made.test)) == (21, 9)


def test_an_image_that_nobody_holds_is_not_used() -> None:
    x, y = features(10)
    made = data_set(x, y, (x, y), clients=[[7, 1], np.array([3])])
    assert made.train.ids == ("1", "3", "7")
    assert made.train.users is not None
    assert made.train.users.tolist() == [0, 1, 0]
    assert len(made.test) == 10


def test_clients_train_on_what_they_hold(tmp_path: Path) -> None:
    x, y = pictures()
    parts = [range(0, 10), range(10, 34), [39]]
    found = fh.train(
        *(x, y), clients=parts, test=(x, y), rounds=1, settings=TINY, out=tmp_path / "x", quiet=True
    )
    split = json.loads((tmp_path / "x" / "partition.json").read_text())
    assert split["indices"] == [list(range(10)), list(range(10, 34)), [34]]  # of the 35 used
    assert found.predict(x).shape == (40, 3)


def test_tensors_objects_and_numbers_of_other_kinds_will_do(tmp_path: Path) -> None:
    x, y = features(20)
    half = data_set(torch.tensor(x, dtype=torch.bfloat16), torch.tensor(y == 1), 0.5)
    assert half.train.images.shape == (6,)
    owners = np.array(["ann", "bob"] * 10, dtype=object)
    users = data_set(x, y, 0.5, clients=owners).train.users
    assert users is not None
    assert set(users) == {"ann", "bob"}
    given: dict[str, Any] = {"clients": np.int64(2), "rounds": np.int64(1), "quiet": True}
    found = fh.train(x, y, method="fedavg", out=tmp_path / "x", **given)
    assert found.settings.split.common.clients == 2


def test_clients_keep_all_their_images() -> None:
    """A natural split would take 512 of each at most."""
    data = data_set(*features(1300), 0.1, clients=np.arange(1300) % 2)
    settings = compose(fitting(data))
    split = draw_partition(settings, data.train.labels, data.train.users)
    assert split.sizes.sum() == len(data.train) == 1170


def test_unknown_labels_are_marked() -> None:
    x, y = features(10)
    told = y.astype(float)
    told[0, 0], told[1, 1] = np.nan, -1
    made = data_set(x, told, (x, y))
    assert made.train.known is not None
    assert np.argwhere(~made.train.known).tolist() == [[0, 0], [1, 1]]
    assert made.test.known is None


class Frame:
    """As much of a data frame as is looked at."""

    columns = ("cat", "dog")

    def __array__(self, dtype: Any = None, copy: Any = None) -> Array:
        return np.eye(2)[[0, 1, 1, 0]]


def test_columns_of_a_data_frame_name_the_labels() -> None:
    assert data_set(np.zeros((4, 3)), Frame(), 0.5).classes == ("cat", "dog")
    assert data_set(np.zeros((4, 3)), np.eye(2)[[0, 1, 1, 0]], 0.5).classes == (
        "label 0",
        "label 1",
    )


def frames(count: int = 120) -> tuple[Any, Any]:
    x, y = features(count)
    rows = [f"p{i}" for i in range(count)]
    return (
        pd.DataFrame(x, columns=list("uvwxyz"), index=rows),
        pd.DataFrame(y, columns=list("abcd"), index=rows),
    )


def test_columns_of_data_frames_are_put_in_order_by_their_names(tmp_path: Path) -> None:
    x, y = frames()
    given: dict[str, Any] = {"clients": 3, "rounds": 1, "quiet": True}
    run = fh.train(x, y, test=(x[list("zyxwvu")], y[list("dcba")]), out=tmp_path / "1", **given)
    expected = run.predict(x)
    assert np.array_equal(run.predict(x[list("wzuxyv")]), expected)
    assert np.array_equal(run.predict(x.to_numpy()), expected)
    same = fh.train(x, y, test=(x.to_numpy(), y.to_numpy()), out=tmp_path / "2", **given)
    assert same.metrics == run.metrics
    assert run.evaluate(x[list("wzuxyv")], y[list("badc")]).map == run.evaluate(x, y).map
    with pytest.raises(DataError, match="differ in t, u"):
        run.predict(x.rename(columns={"u": "t"}))
    with pytest.raises(DataError, match="other row indices"):
        run.evaluate(x, y[::-1])
    turned = data_set(x, y[list("dcba")], 0.5, classes=list("abcd"))
    assert np.array_equal(turned.train.labels, data_set(x, y, 0.5).train.labels)


def test_rows_of_data_frames_have_to_be_named_alike() -> None:
    x, y = frames(10)
    sites = pd.Series(["n", "s"] * 5, index=x.index)
    for given in ((x, y[::-1], 0.5), (x, y, 0.5, None, sites[::-1]), (x, y, (x, y[::-1]))):
        with pytest.raises(DataError, match="other row indices"):
            data_set(*given)
    whole = data_set(x, y, 0.5, clients=sites)
    assert set(whole.train.users) == {"n", "s"}  # type: ignore[arg-type]


@pytest.mark.parametrize("missing", [None, float("nan"), "", pd.NA, pd.NaT])
def test_an_image_without_its_client_is_refused(missing: Any) -> None:
    x, y = frames(6)
    owners = ["n", "s", missing, "s", "n", missing]
    for clients in (owners, pd.Series(owners, index=x.index), np.array(owners, object)):
        with pytest.raises(DataError, match="client of image 2 is missing, as of 2 of 6"):
            data_set(x, y, 0.5, clients=clients)
    numbers = pd.Series([1, 2, None, 1, 2, 1], index=x.index)  # which makes floats of them
    with pytest.raises(DataError, match="client of image 2 is missing"):
        data_set(x, y, 0.5, clients=numbers)


X, Y = features(10)
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"images": X[:9]}, "9 images but 10 rows"),
    ({"images": X * np.nan}, "not finite"),
    ({"images": np.zeros((10, 4, 4, 3))}, "astype"),
    ({"images": np.zeros((10, 4, 4, 2), np.uint8)}, "three channels"),
    ({"images": np.zeros((0, 4, 4, 3), np.uint8)}, "no images"),
    ({"images": [["a"]] * 10}, "must be uint8"),
    ({"images": [[1, 2], [3]]}, "no array"),
    ({"images": X + 1e9}, "Subtract the mean"),
    ({"images": X * 1e300}, "not finite"),
    ({"labels": Y[:, 0]}, r"shape \(images, labels\)"),
    ({"labels": Y + 1}, "label . of image . is 2"),
    ({"labels": None}, "need their labels"),
    ({"classes": ["a"]}, "as many different names"),
    ({"classes": ["a", "a", "b", "c"]}, "as many different names"),
    ({"clients": [[0, 1], [1]]}, "twice, or one of another"),
    ({"clients": [[0], [10]]}, "from 0 to 9"),
    ({"clients": [[0], []]}, "at least one image"),
    ({"clients": ["ann"]}, "owner"),
    ({"clients": np.zeros(10)}, "owner"),
    ({"clients": 11}, "11"),
    ({"test": 1.5}, "between 0 and 1"),
    ({"test": X}, "between 0 and 1"),
    ({"test": (X[:, :3], Y)}, "do not fit"),
    ({"settings": {"train.lrr": 1}}, "Did you mean 'lr'"),
    ({"settings": {"train": 1}}, "must be a section"),
    ({"method": "fedavgg"}, "Did you mean 'fedavg'"),
    ({"images": "demo"}, "bring their own labels"),
    ({"images": "dmo", "labels": None}, "Did you mean 'demo'"),
]


@pytest.mark.parametrize(("change", "complaint"), WRONG)
def test_what_is_wrong_is_said_before_anything_is_written(
    change: dict[str, Any], complaint: str, tmp_path: Path
) -> None:
    given = {"images": X, "labels": Y, "clients": None, **change}
    with pytest.raises(FedHarmonyError, match=complaint):
        fh.train(**given, rounds=1, out=tmp_path / "x", quiet=True)
    assert not (tmp_path / "x").exists()


# -- comparisons -----------------------------------------------------------------------------------


def test_a_comparison_can_be_extended(tmp_path: Path) -> None:
    x, y = features(60)
    given: dict[str, Any] = {"clients": 3, "rounds": 1, "out": tmp_path / "x", "quiet": True}
    fh.compare(x, y, methods=["fedavg"], **given)
    found = fh.compare(x, y, methods=["fedavg", "fedprox"], seeds=[0, 1], **given)
    assert sorted(found.runs) == [(m, s) for m in ("fedavg", "fedprox") for s in (0, 1)]
    scores = [found.runs["fedavg", seed].metrics["mAP"] for seed in (0, 1)]
    assert found.metrics["fedavg"]["mAP"] == pytest.approx(sum(scores) / 2)
    assert "| fedprox |" in found.table
    assert (tmp_path / "x" / "table.csv").exists()
    assert found.report() == tmp_path / "x" / "report.html"
    with pytest.raises(ConfigError, match="at least one method"):
        fh.compare(x, y, methods=[], **given)


# -- the package -----------------------------------------------------------------------------------

LOOK = """
import sys
import fedharmony
print(sorted({"torch", "numpy", "pydantic"} & set(sys.modules)), dir(fedharmony))
"""


def test_importing_the_package_imports_nothing_slow() -> None:
    done = subprocess.run([sys.executable, "-c", LOOK], capture_output=True, text=True, check=True)
    names = ["Comparison", "Run", "__version__", "compare", "load", "train"]
    assert done.stdout.strip() == f"[] {names}"


def test_what_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'trian'"):
        _ = fh.trian


def blocks(file: Path) -> list[str]:
    """Python code of a page that uses the interface."""
    found = re.findall(r"^```python\n(.*?)^```", file.read_text(encoding="utf-8"), re.M | re.S)
    return [block for block in found if "import fedharmony as fh" in block]


EXAMPLES = [
    pytest.param(block, id=f"{file.name}-{i}")
    for file in (ROOT / "README.md", ROOT / "docs" / "python.md")
    for i, block in enumerate(blocks(file))
]


@pytest.mark.parametrize("block", EXAMPLES)
def test_examples_run(block: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "example", "exec"), {})


def test_there_are_examples() -> None:
    assert blocks(ROOT / "docs" / "python.md")


def test_a_metric_of_a_comparison_is_that_of_the_seeds_that_define_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RunFolder, "open", lambda folder: None)  # their settings do not count here
    write_fake_comparison(tmp_path, methods=("fedavg",), rounds=2)
    for seed, value in enumerate([0.5, None, 0.7]):
        file = tmp_path / "fedavg" / f"seed-{seed}" / "results.json"
        results = json.loads(file.read_text())
        results["metrics"] |= {"mAP": value, "CF1": None}
        file.write_text(json.dumps(results))
    found = fh.Comparison(tmp_path)
    assert found.metrics["fedavg"]["mAP"] == pytest.approx(0.6)  # of 0.5 and 0.7
    assert np.isnan(found.metrics["fedavg"]["CF1"])
    counts = found.counts["fedavg"]
    assert [counts[name] for name in ("mAP", "CF1", "OF1")] == [2, 0, 3]
    assert "fedavg: mAP over 2 of 3 seeds, else undefined" in found.table
    assert "| 60.0 ± 14.1 |" in found.table
