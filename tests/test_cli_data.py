"""The commands around data as a user meets them: check, prepare, preview a split, train, fetch."""

from __future__ import annotations

import json
import re
import sys
import types
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fixtures_flair
from fedharmony.data import cache, voc
from fedharmony.experiments.settings import built_in_configs, load_settings
from fedharmony.partition.base import splitters
from fedharmony.report.split import split_picture
from fedharmony.rng import numpy_rng
from fixtures_voc_coco import jpeg, write_coco, write_voc
from test_cli import call, events, refuse, results, succeed

#: Makes a run of any built-in config last a second.
TINY = [
    *("data.image_size=32", "model.name=vit", "model.weights=", "model.width=16"),
    *("model.depth=1", "model.heads=2", "model.patch=8", "train.epochs=1", "run.rounds=1"),
    *("engine.threads=1", "engine.device=cpu", "--quiet"),  # the last can be left out
]
DEMO = [
    *("data.train=120", "data.test=40", "split.clients=4", "run.rounds=1", "train.epochs=1"),
    *("engine.threads=1", "model.width=16", "model.depth=1", "model.heads=2"),
]


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Derived files go to a folder of the test's own."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("FEDHARMONY_CACHE", str(folder))
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """The user's current folder."""
    folder = tmp_path / "here"
    folder.mkdir()
    return folder


def report(folder: Path) -> Any:
    return json.loads((folder / "split_report.json").read_text())


# -- check ----------------------------------------------------------------------------------------


def count_as_official(monkeypatch: pytest.MonkeyPatch, per_set: int) -> None:
    """Let the publisher's figures be those of the fixture."""
    monkeypatch.setattr(voc, "IMAGES", {"2012": {"train": per_set, "val": per_set}})


def test_check_of_a_complete_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """24 images at 500 × 500 pixels take 24 · 3 · 500² = 18 million bytes."""
    write_voc(tmp_path, "2012")
    count_as_official(monkeypatch, 12)
    arguments = ["voc", str(tmp_path), "year=2012", "difficult=keep", "image_size=500"]
    out = succeed(tmp_path, "data", "check", *arguments)
    assert re.search(r"^training images +12 +12 *$", out, re.MULTILINE)
    assert re.search(r"^sampled test images that decode +12 +12 *$", out, re.MULTILINE)
    assert "differs" not in out
    assert "The data are ready. The first run decodes the images to 500 × 500 pixels" in out
    assert f"that takes 18 MB in {tmp_path / 'cache'}." in out


def test_check_of_an_incomplete_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = write_voc(tmp_path, "2012")
    count_as_official(monkeypatch, 12)
    written.image(written.sets["train"][3]).unlink()
    written.image(written.sets["val"][0]).write_bytes(b"not an image")
    arguments = ["data", "check", "voc", str(tmp_path), "year=2012", "difficult=keep"]
    code, out, err = call(tmp_path, *arguments)
    assert (code, err) == (1, "")
    assert re.search(r"^training image files +12 +11 +differs *$", out, re.MULTILINE)
    assert re.search(r"^sampled training images that decode +12 +11 +differs *$", out, re.MULTILINE)
    assert re.search(r"^sampled test images that decode +12 +11 +differs *$", out, re.MULTILINE)
    assert re.search(r"^test image files +12 +12 *$", out, re.MULTILINE)
    assert "not complete" in out
    assert "Get VOCtrainval_11-May-2012.tar from http://host.robots.ox.ac.uk" in out


def test_check_knows_the_official_figures(tmp_path: Path) -> None:
    """Whole small copies of other data are not the published ones."""
    for name, folder, figure in (
        ("voc", write_voc(tmp_path / "voc").folder.parent, "training images +5,011 +24 +differs"),
        ("coco", write_coco(tmp_path / "coco").root, "unlabelled test images +367 +1 +differs"),
        ("flair", fixtures_flair.write_json(tmp_path / "f"), "training users +41,131 +3 +differs"),
    ):
        code, out, _ = call(tmp_path, "data", "check", name, str(folder))
        assert code == 1
        assert re.search(figure, out)
        assert max(map(len, out.splitlines()[:-1])) <= 80


# -- prepare --------------------------------------------------------------------------------------


def test_prepare_decodes_once(
    tmp_path: Path, cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """24 + 12 images at 64 × 64 pixels: 36 · 3 · 64² = 442,368 bytes, in two files."""
    write_voc(tmp_path)
    command = ["data", "prepare", "voc", str(tmp_path), "image_size=64"]
    first = succeed(tmp_path, *command)
    assert first.splitlines() == [
        "24 training and 12 test images at 64 × 64 pixels: 0 MB",
        "Ready: 24 training and 12 test images.",
    ]
    made = sorted(cache_folder.rglob("*.u8"))
    assert sorted(file.stat().st_size for file in made) == [147_456, 294_912]

    def refuse_to_decode(*_: object) -> None:
        raise AssertionError("an image was decoded")

    monkeypatch.setattr(cache, "decode", refuse_to_decode)
    assert succeed(tmp_path, *command) == first
    assert sorted(cache_folder.rglob("*.u8")) == made


def test_a_progress_bar_on_a_terminal_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_voc(tmp_path, "2012")
    command = ["data", "prepare", "voc", str(tmp_path), "year=2012"]
    code, _, piped = call(tmp_path, *command, "image_size=8")
    assert (code, piped) == (0, "")
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert call(tmp_path, *command, "image_size=16")[2].count("12/12") == 2  # for each part
    assert call(tmp_path, *command, "image_size=24", "--quiet")[2] == ""
    assert "12/12" not in call(tmp_path, *command, "image_size=16")[2]  # from the cache


def test_prepare_leaves_out_what_it_may(tmp_path: Path) -> None:
    written = write_voc(tmp_path)
    written.image(written.sets["test"][5]).write_bytes(b"not an image")
    written.image(written.sets["test"][7]).unlink()
    command = ["data", "prepare", "voc", str(tmp_path), "image_size=16"]
    code, out, err = call(tmp_path, *command)
    assert code == 2
    assert "Ready" not in out
    assert "lacks 1 of 12 test images" in err
    assert f"JPEGImages/{written.sets['test'][7]}.jpg" in err
    code, out, err = call(tmp_path, *command, "unreadable=skip")
    assert code == 0
    assert "Ready: 24 training and 10 test images, 2 unreadable ones left out." in out


# -- partition ------------------------------------------------------------------------------------


def test_a_preview_is_the_split_of_the_run(place: Path) -> None:
    options = [*DEMO, "split.gamma=0.2"]
    out = succeed(place, "partition", "demo", *options)
    folder = place / "runs" / "demo-split"
    assert {file.name for file in folder.iterdir()} == {
        "partition.json",
        "split_report.json",
        "split.svg",
    }
    sha256 = report(folder)["sha256"]
    assert f"SHA-256: {sha256}\n" in out
    assert re.search(r"^clients +4 *$", out, re.MULTILINE)
    assert re.search(r"^correlation drift +0\.\d{3} \(random split: 0\.\d{3}\) *$", out, re.M)
    assert max(map(len, out.splitlines()[:-2])) <= 80
    file = f"split.file={folder / 'partition.json'}"
    succeed(place, "run", "demo", *options, "--out", "drawn", "--quiet")
    succeed(place, "run", "demo", *DEMO, file, "split.seed=5", "--out", "read", "--quiet")
    for run in ("drawn", "read"):
        assert results(place / run)["partition_sha256"] == sha256
        assert report(place / run)["jensen_shannon"] == report(folder)["jensen_shannon"]
    before = (place / "read" / "partition.json").read_bytes()
    assert "holds a run" in refuse(place, "partition", "demo", "split.seed=1", "--out", "read")
    assert (place / "read" / "partition.json").read_bytes() == before


def test_a_preview_needs_no_image(place: Path, tmp_path: Path, cache_folder: Path) -> None:
    """Every image may be missing: only lists and annotations are read, and nothing is cached."""
    written = write_voc(tmp_path)
    for file in (written.folder / "JPEGImages").iterdir():
        file.unlink()
    transforms = 'split.transforms=["none", "none", "grey"]'
    options = [f"data.path={tmp_path}", "split.clients=3", transforms]
    out = succeed(place, "partition", "voc2007", *options, "--out", "split")
    assert re.search(r"^image transforms +grey 1, none 2 *$", out, re.MULTILINE)
    found = report(place / "split")
    assert (found["clients"], found["images"], found["left_out"]) == (3, 24, 0)
    assert not cache_folder.exists()
    # Missing images are an error of the run that needs them.
    error = refuse(place, "run", "voc2007", *options, "--out", "run")
    assert "lacks 24 of 24 training images" in error
    assert not (place / "run").exists()


def test_a_preview_of_users(place: Path, tmp_path: Path) -> None:
    """Three users with 1, 2 and 30 images; ten at most are kept, so twenty have no owner."""
    folder = fixtures_flair.write_json(tmp_path / "flair")
    options = [f"data.path={folder}", "split.max_images=10"]
    out = succeed(place, "partition", "flair_fine", *options)
    assert re.search(r"^ +of no client +20 *$", out, re.MULTILINE)
    assert re.search(r"^images per client +1 to 10, median 2 *$", out, re.MULTILINE)
    assert re.search(r"^correlation drift +– \(random split: –\) *$", out, re.MULTILINE)
    content = json.loads((place / "runs" / "flair_fine-split" / "partition.json").read_text())
    assert content["splitter"] == "natural"
    assert "split.clients to 3 or less" in refuse(
        place, "partition", "flair", *options, "split.clients=4"
    )


PLUGIN = """
import numpy as np
from fedharmony.partition.base import Splitter, splitters

@splitters.register("stripes")
class Stripes(Splitter):
    '''Every K-th image.'''

    def split(self, labels, clients, seed, users=None):
        return [np.arange(k, len(labels), clients) for k in range(clients)]
"""


def test_a_preview_of_a_splitter_of_your_own(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splitters, "_items", {name: splitters[name] for name in splitters.names()})
    (place / "stripes.py").write_text(PLUGIN)
    options = [*DEMO, "split.name=stripes", "split.gamma=", "--plugin", "stripes.py"]
    succeed(place, "partition", "demo", *options, "--out", "split")
    content = json.loads((place / "split" / "partition.json").read_text())
    assert content["indices"][1] == list(range(1, 120, 4))


def svg_of(file: Path) -> ET.Element:
    """A well-formed picture that needs nothing from elsewhere."""
    text = file.read_text()
    root = ET.fromstring(text)
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    assert re.findall(r"https?://", text) == ["http://"]  # the name of the format
    references = re.findall(r'href="([^"]*)"|url\(([^)]*)\)', text)
    assert all(a.startswith(("#", "data:image/png;base64,")) or b for a, b in references)
    ids = {element.get("id") for element in root.iter()}
    assert {b for _, b in references if b} <= {f"#{name}" for name in ids}
    variables = set(re.findall(r"var\((--[\w-]+)", text))
    assert variables
    assert all(text.count(f"{name}: ") == 2 for name in variables), "one value for light, one dark"
    return root


def words(root: ET.Element) -> list[str]:
    return [
        "".join(element.itertext()) for element in root.iter("{http://www.w3.org/2000/svg}text")
    ]


def test_the_picture_stands_alone(place: Path, tmp_path: Path) -> None:
    write_voc(tmp_path)
    options = [f"data.path={tmp_path}", "split.clients=3", "--out", "split"]
    succeed(place, "partition", "voc2007", *options)
    shown = words(svg_of(place / "split" / "split.svg"))
    assert set(voc.CLASSES) <= set(shown)
    assert "3 clients, largest first" in shown
    found = report(place / "split")
    assert f"most {found['size_max']})." in " ".join(shown)


def test_any_label_can_be_drawn(tmp_path: Path) -> None:
    """Names that XML would take for markup; a label that all images have, one that none has."""
    labels = np.array([[1, 0, 1], [1, 0, 0], [1, 0, 1], [1, 0, 0]], np.uint8)
    partition = splitters["iid"]().partition(labels, 2, seed=0)
    file = tmp_path / "split.svg"
    file.write_text(split_picture(labels, partition, ("<a & b>", '"none"', "c]]>")))
    assert {"<a & b>", '"none"', "c]]>"} <= set(words(svg_of(file)))


# -- training -------------------------------------------------------------------------------------


def test_train_on_voc(place: Path, tmp_path: Path) -> None:
    """Clients of different looks that annotate half of the labels each."""
    write_voc(tmp_path)
    options = [f"data.path={tmp_path}", "split.clients=4", "run.method=fedavg", *TINY]
    skewed = ['split.transforms=["none","grey","blur","noise"]', "split.annotated=0.5"]
    succeed(place, "data", "prepare", "voc", str(tmp_path), "image_size=32")
    out = succeed(place, "run", "voc2007", *options[:-1], *skewed, "--out", "skewed")
    assert "decoding" not in out
    (start,) = events(place / "skewed", "start")
    assert (start["train_images"], start["test_images"]) == (24, 12)
    assert start["classes"] == list(voc.CLASSES)
    content = json.loads((place / "skewed" / "partition.json").read_text())
    assert sorted(content["transforms"]) == ["blur", "grey", "noise", "none"]
    assert all(value is not None for value in results(place / "skewed")["metrics"].values())
    succeed(place, "run", "voc2007", *options, skewed[0], "--out", "transforms")
    succeed(place, "run", "voc2007", *options, skewed[1], "--out", "annotated")
    succeed(place, "run", "voc2007", *options, "--out", "plain")
    states = {
        results(place / run)["state_sha256"]
        for run in ("skewed", "transforms", "annotated", "plain")
    }
    assert len(states) == 4


def test_train_on_coco(place: Path, tmp_path: Path) -> None:
    coco = write_coco(tmp_path)
    options = [f"data.path={coco.root}", *TINY[:-1], "split.clients=4", "run.method=fedavg"]
    out = succeed(place, "run", "coco", *options, "--out", "run")
    assert "decoding 24 images; later runs find them in the cache" in out
    (start,) = events(place / "run", "start")
    assert (start["classes"][0], start["classes"][-1]) == ("person", "toothbrush")
    assert results(place / "run")["status"] == "completed"
    # images without annotation may be left out
    succeed(place, "run", "coco", *options, "data.unlabelled=drop", "--out", "dropped")
    (start,) = events(place / "dropped", "start")
    assert (start["train_images"], start["test_images"]) == (23, 11)


def test_train_on_flair(place: Path, tmp_path: Path) -> None:
    """The users are the clients, in the order of their names; two of three take part."""
    folder = fixtures_flair.write_json(tmp_path / "flair")
    options = [f"data.path={folder}", *TINY, "federation.cohort=2", "run.rounds=2"]
    succeed(place, "run", "flair", *options, "--out", "run")
    content = json.loads((place / "run" / "partition.json").read_text())
    assert [len(index) for index in content["indices"]] == [1, 2, 30]
    assert [len(event["cohort"]) for event in events(place / "run", "round")] == [2, 2]
    assert len(events(place / "run", "evaluate")) == 1  # the config asks for every tenth round
    assert results(place / "run")["status"] == "completed"


def write_table(folder: Path, unknown: str) -> None:
    """12 training images of 3 clients and 4 test images; ``unknown`` stands in some cells."""
    rng = numpy_rng(0, "table fixture")
    (folder / "images").mkdir(parents=True)
    lines = ["image,client,split,cat,dog,tree"]
    for i in range(16):
        (folder / "images" / f"{i}.jpg").write_bytes(jpeg(rng))
        cells = [str(bit) for bit in rng.integers(0, 2, 3)]
        if i % 4 == 1:
            cells[i % 3] = unknown
        split = "train" if i < 12 else "test"
        lines.append(f"images/{i}.jpg,site {i % 3},{split},{','.join(cells)}")
    (folder / "list.csv").write_text("\n".join(lines) + "\n")


OWN = """
[data]
name = "table"
format = "columns"

[split]
name = "natural"

[federation]
participation = 1.0
"""


def test_train_on_a_table(place: Path, tmp_path: Path) -> None:
    """Clients from a column; an unknown label is neither absent nor present."""
    (place / "own.toml").write_text(OWN)
    finished = {}
    for name, cell in (("unknown", ""), ("absent", "0"), ("present", "1")):
        write_table(tmp_path / name, cell)
        out = succeed(place, "data", "check", "table", str(tmp_path / name), "format=columns")
        assert "The data are ready" in out
        path = f"data.path={tmp_path / name}"
        succeed(place, "run", "own.toml", path, *TINY, "--out", name)
        finished[name] = results(place / name)
    assert len({found["state_sha256"] for found in finished.values()}) == 3
    assert len({found["partition_sha256"] for found in finished.values()}) == 1
    content = json.loads((place / "unknown" / "partition.json").read_text())
    assert content["indices"] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]
    assert content["names"] == ["site 0", "site 1", "site 2"]
    start = json.loads((place / "unknown" / "events.jsonl").read_text().splitlines()[0])
    assert start["client_names"] == content["names"]
    page = (place / "unknown" / "report.html").read_text()
    assert all(page.count(f">{name}</text>") == 2 for name in content["names"])  # split, weights
    assert [row["label"] for row in finished["unknown"]["per_label"]] == ["cat", "dog", "tree"]


# -- bad input ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def voc2007(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("voc")
    write_voc(folder)
    return folder


@pytest.mark.parametrize(
    ("name", "path", "changes", "said"),
    [
        ("voc", "nowhere", [], ["no file or folder", "VOCtrainval_06-Nov-2007.tar"]),
        ("voc", "DATA", ["year=2012"], ["there is VOC2007", 'data.year = "2007"']),
        ("voc", "DATA", ["year=2010"], ["data.year = 2010", "'2007' or '2012'"]),
        ("voc", "DATA", ["yeer=2007"], ["data.yeer", "Did you mean 'year'"]),
        ("voc", "DATA", ["data.year=2007"], ["data.year=2007", "KEY=VALUE"]),
        ("voc", "DATA", ["image_size=0"], ["data.image_size = 0", "greater than or equal to 1"]),
        ("vok", "DATA", [], ["no dataset 'vok'", "Did you mean 'voc'"]),
        ("digits", "DATA", [], ["'digits'", "not read from files"]),
        ("coco", "DATA", [], ["annotations/instances_train2014.json", "cocodataset.org"]),
        ("flair", "DATA", [], ["labels_and_metadata.json", "apple/ml-flair"]),
        ("table", "DATA", [], ["data.table", ".csv or .parquet"]),
    ],
)
def test_data_that_cannot_be_read(
    name: str, path: str, changes: list[str], said: list[str], voc2007: Path, place: Path
) -> None:
    path = path.replace("DATA", str(voc2007))
    for command in ("check", "prepare"):
        error = refuse(place, "data", command, name, path, *changes)
        for word in said:
            assert word in error
    assert list(place.iterdir()) == []


@pytest.mark.parametrize(
    ("config", "changes", "said"),
    [
        ("voc2007", [], ["Set data.path", "VOCtrainval_06-Nov-2007.tar"]),
        ("voc2007", ["data.path=nowhere"], ["no file or folder nowhere", "VOCtest_06-Nov-2007"]),
        ("voc2012", ["data.path=DATA"], ["there is VOC2007", 'data.year = "2007"']),
        ("voc2007", ["data.path=DATA", "data.yeer=1"], ["data.yeer", "Did you mean 'year'"]),
        (
            "voc2007",
            ["data.name=imagenet"],
            ["no dataset 'imagenet'", "flair, sites, synthetic_users, table, voc"],
        ),
        ("voc2007", ["data.path=DATA", "split.clients=25"], ["24 images among 25 clients"]),
        (
            "voc2007",
            ["data.path=DATA", "split.name=natural", "split.gamma=", "split.clients="],
            ["no natural split"],
        ),
        ("voc2007", ["data.path=DATA", 'split.transforms=["gray"]'], ["Did you mean 'grey'"]),
    ],
)
def test_nothing_starts_with_bad_data(
    config: str, changes: list[str], said: list[str], voc2007: Path, place: Path
) -> None:
    changes = [change.replace("DATA", str(voc2007)) for change in changes]
    for command in (["run", config, *TINY], ["partition", config]):
        error = refuse(place, *command, *changes)
        for word in said:
            assert word in error
    assert list(place.iterdir()) == []


# -- settings, weights, help ----------------------------------------------------------------------


@pytest.mark.parametrize("name", built_in_configs())
def test_every_built_in_config_composes(name: str) -> None:
    """Files of methods come on top of a task."""
    settings = load_settings("demo", [name]) if "/" in name else load_settings(name)
    assert settings.tree()["run"]["rounds"] > 0


@pytest.mark.parametrize("name", ["voc2007", "voc2012", "coco", "flair", "flair_fine"])
def test_the_constants_of_the_paper(name: str) -> None:
    """ViT-B/16; Adam, 1e-4, batch 16, 5 local epochs; 50 rounds; chances by size."""
    settings = load_settings(name)
    train, federation = settings.training, settings.federation
    assert settings.model.common.name == "vit_base_patch16"
    assert (train.optimiser, train.lr, train.batch_size, train.epochs) == ("adam", 1e-4, 16, 5)
    assert settings.run.rounds == 50
    assert (federation.sampling, federation.average) == ("size", "size")
    if name.startswith("flair"):
        assert (settings.split.common.name, federation.cohort) == ("natural", 50)
        assert settings.data.own.labels == ("fine" if name == "flair_fine" else "coarse")
    else:
        assert settings.split.common.name == "pivot_dirichlet"
        assert (settings.split.own.gamma, settings.split.common.clients) == (0.5, 50)
        assert federation.participation == 0.5


class Hub(types.ModuleType):
    """A hub with one model, kept in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__("huggingface_hub")
        self.folder = folder

    def hf_hub_download(self, model: str, file: str) -> str:
        path = self.folder / model / file
        if not path.exists():
            raise FileNotFoundError(f"there is no {model}")
        return str(path)


def test_fetch_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", Hub(tmp_path))
    file = tmp_path / "timm" / "net" / "model.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"")
    assert succeed(tmp_path, "models", "fetch", "net") == f"{file}\n"
    assert succeed(tmp_path, "models", "fetch", "timm/net") == f"{file}\n"
    error = refuse(tmp_path, "models", "fetch", "else/net")
    for word in ("'else/net'", "there is no else/net", "model.weights"):
        assert word in error


def test_help(tmp_path: Path) -> None:
    for command in (["data"], ["data", "check"], ["data", "prepare"], ["partition"], ["models"]):
        assert "Usage" in succeed(tmp_path, *command, "--help")
    assert "partition" in succeed(tmp_path, "--help")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("split.clients=10000", "Cannot split"),
        ("model.weights=nowhere.safetensors", "does not exist"),
        ("data.image_size=30", "cannot be cut into patches"),
    ],
)
def test_what_cannot_work_is_refused_before_an_image_is_decoded(
    change: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*arguments: Any, **options: Any) -> Any:
        raise AssertionError("no image is decoded for this")

    write_voc(tmp_path)
    monkeypatch.setattr("fedharmony.data.file_source.decoded", never)
    options = [*TINY, f"data.path={tmp_path}", "split.clients=2", change]
    assert words in refuse(tmp_path, "run", "voc2007", *options)
