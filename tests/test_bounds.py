"""Input is bounded: what is opened, how far it is unpacked, and what a run's files may hold."""

from __future__ import annotations

import gzip
import io
import json
import os
import shutil
import struct
import tracemalloc
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError
from safetensors.numpy import load_file, save_file

import fake_run
from fedharmony.data import tree as trees
from fedharmony.data.cache import Resize, decode, decoded
from fedharmony.data.tree import open_tree
from fedharmony.errors import CheckpointError, DataError
from fedharmony.partition.report import paired_labels
from fedharmony.report.load import load_run
from fedharmony.report.page import write_report
from test_cli import SMALL, succeed


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


# -- images ---------------------------------------------------------------------------------------

POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"


def test_no_program_is_started_for_an_image(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow hands PostScript to Ghostscript, whatever the file is called."""
    from PIL import EpsImagePlugin

    def refuse(*_: Any, **__: Any) -> None:
        raise AssertionError("Ghostscript was asked")

    Image.init()
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", refuse)
    with pytest.raises(UnidentifiedImageError):
        decode(POSTSCRIPT, Resize(4))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM", "MPO"])
def test_the_usual_formats_are_read(kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (8, 8), (200, 10, 10)).save(file, kind)
    assert decode(file.getvalue(), Resize(4)).shape == (3, 4, 4)


@pytest.mark.parametrize("kind", ["PCX", "ICNS", "SGI", "TGA", "PDF", "EPS"])
def test_others_are_not(kind: str) -> None:
    file = io.BytesIO()
    Image.new("RGB", (64, 64), (200, 10, 10)).save(file, kind)
    with pytest.raises(UnidentifiedImageError):
        decode(file.getvalue(), Resize(4))


def test_a_pipe_among_the_images_is_named(tmp_path: Path) -> None:
    """Opening it would wait for a writer that never comes."""
    (tmp_path / "data").mkdir()
    os.mkfifo(tmp_path / "data" / "0.jpg")
    images = open_tree(tmp_path / "data").images(["0.jpg"])
    with pytest.raises(DataError, match=r"0\.jpg \(it is a pipe, socket or device"):
        decoded(images, Resize(4))


def test_an_image_file_has_a_largest_size(tmp_path: Path) -> None:
    with (tmp_path / "0.jpg").open("wb") as file:
        file.truncate(trees.IMAGE_LIMIT + 1)
    images = open_tree(tmp_path).images(["0.jpg"])
    with pytest.raises(DataError, match="more than the 268,435,456 that are read"):
        images.read(0)


def test_a_folder_one_may_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Path) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(DataError, match="cannot be read: Permission denied"):
        open_tree(tmp_path)


def test_names_that_no_file_can_have() -> None:
    for name in ("x" * 5000, "~nobody-of-that-name/x"):
        with pytest.raises(DataError, match="no file or folder"):
            open_tree(name)


# -- archives -------------------------------------------------------------------------------------

ZEROS = 32 << 20


def zip_with(path: Path, content: bytes, declared: int) -> Path:
    """A zip of one member whose headers declare another size."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("a.jpg", content)
    data = bytearray(path.read_bytes())
    for at in (22, data.index(b"PK\x01\x02") + 24):  # in the member's header and in the directory
        data[at : at + 4] = struct.pack("<I", declared)
    path.write_bytes(data)
    return path


def test_unpacking_stops_at_the_declared_size(tmp_path: Path) -> None:
    """32 MB of zeros that call themselves 100 bytes take no 32 MB."""
    tree = open_tree(zip_with(tmp_path / "a.zip", bytes(ZEROS), 100))
    tree.has("a.jpg")  # indexes the archive
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match="Bad CRC-32"):
            tree.read("a.jpg")
        assert tracemalloc.get_traced_memory()[1] < ZEROS / 8
    finally:
        tracemalloc.stop()


def test_what_is_out_of_proportion_is_not_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "UNPACKED_LEAST", 1 << 20)
    tree = open_tree(zip_with(tmp_path / "a.zip", bytes(ZEROS), ZEROS))
    with pytest.raises(DataError, match="more than the"):
        tree.read("a.jpg")


def test_a_compressed_tar_does_not_fill_the_disk(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trees, "UNPACKED_LEAST", 1 << 20)
    (tmp_path / "a.tar.gz").write_bytes(gzip.compress(bytes(ZEROS)))
    with pytest.raises(DataError, match="unpacks to more than 100 times its size"):
        open_tree(tmp_path / "a.tar.gz").list()
    assert not [path for path in own_cache.rglob("*") if path.is_file() and path.name != ".lock"]


def test_honest_archives_of_zeros_are_read(tmp_path: Path) -> None:
    """Masks and depth maps shrink a lot, too; below 64 MB nobody asks."""
    assert open_tree(zip_with(tmp_path / "a.zip", bytes(ZEROS), ZEROS)).read("a.jpg")


def test_a_png_that_claims_to_be_huge_is_not_decoded() -> None:
    """Pillow's own limit, which stays on: 20,000 × 20,000 pixels in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = chunk(b"IHDR", struct.pack(">IIBBBBB", 20_000, 20_000, 8, 2, 0, 0, 0))
    data = b"\x89PNG\r\n\x1a\n" + head + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    with pytest.raises(Image.DecompressionBombError):
        decode(data, Resize(4))


# -- run folders ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_run.write_fake_run(tmp_path_factory.mktemp("whole") / "run", classes=5, rounds=3)


def changed_json(name: str, change: Callable[[Any], Any]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / name
        file.write_text(json.dumps(change(json.loads(file.read_text()))))

    return apply


def changed_matrix(name: str, value: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        file = folder / "matrices.safetensors"
        save_file({**load_file(file), name: np.asarray(value, np.float32)}, file)

    return apply


@pytest.mark.parametrize(
    "change",
    [
        changed_json("results.json", lambda r: {**r, "metrics": 3}),
        changed_json("results.json", lambda r: {**r, "metrics": {"mAP": {}}}),
        changed_json("results.json", lambda r: {**r, "per_label": {"a": 1}}),
        changed_json("results.json", lambda r: {**r, "per_label": [3]}),
        changed_json("results.json", lambda r: {**r, "baselines": [1]}),
        changed_json("results.json", lambda r: {**r, "rounds_done": "many"}),
        changed_json("results.json", lambda r: {**r, "rounds_done": 10**30}),
        changed_json("results.json", lambda r: {**r, "metric_options": 1}),
        changed_json("results.json", lambda r: [r]),
        lambda folder: (folder / "results.json").write_text("[" * 100_000),
        lambda folder: (folder / "results.json").write_bytes(b"\xff\xfe{}"),
        lambda folder: (folder / "config.toml").write_text("a = " + "[" * 9000),
        changed_matrix("true", [1.0, 2.0]),
        changed_matrix("learned", np.zeros((3, 3))),
        changed_matrix("clusters", np.zeros((2, 2))),
        changed_matrix("client_sizes", 3.0),
        changed_matrix("client_label_shares", np.zeros((4, 3))),
    ],
)
def test_files_that_no_run_has_written(
    whole: Path, tmp_path: Path, change: Callable[[Path], None]
) -> None:
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    change(folder)
    with pytest.raises(CheckpointError, match=r"results\.json|config\.toml|matrices\.safetensors"):
        write_report(folder)


@pytest.mark.parametrize(
    "event",
    [
        {"event": "round", "round": 10**12},
        {"event": "round", "round": 1, "cohort": 5},
        {"event": "round", "round": 1, "weights": {"a": 1}},
        {"event": "round", "round": 1, "left_out": [3]},
        {"event": "round", "round": 1, "log": 3},
        {"event": "evaluate", "round": 1, "metrics": [1]},
        {"event": "start", "classes": 5},
        {"event": "start", "resumed_at": "x"},
        {"event": "round", "round": []},
        {"event": "round", "round": 1, "cohort": [10**18]},
    ],
)
def test_events_that_no_run_has_written(whole: Path, tmp_path: Path, event: Any) -> None:
    """They count as damaged lines, of which a page tells."""
    folder = Path(shutil.copytree(whole, tmp_path / "run"))
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps(event) + "\n")
    run = load_run(folder)
    assert run.damaged_lines == 1
    assert len(run.rounds) == 3


# -- very many labels -----------------------------------------------------------------------------


def test_pairs_of_very_many_labels_are_those_of_the_frequent_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A whole run whose twenty labels are too many: matrices and page are of six, and say so."""
    monkeypatch.setattr("fedharmony.partition.report.MOST_PAIRED", 6)
    succeed(tmp_path, "run", "demo", *SMALL, "run.rounds=1", "--out", "run", "--quiet")
    matrices = load_file(tmp_path / "run" / "matrices.safetensors")
    shapes = {name: matrix.shape for name, matrix in matrices.items()}
    for name in ("true", "learned", "learned_hard", "planted", "consensus"):
        assert shapes[name] == (6, 6)
    assert shapes["clusters"] == shapes["labels"] == (6,)
    assert shapes["client_label_shares"] == (4, 6)
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert len(results["per_label"]) == 20
    positives = np.array([row["positives"] for row in results["per_label"]])
    chosen = matrices["labels"]
    assert positives[chosen].min() >= np.delete(positives, chosen).max()
    assert results["structure"]["n_pairs"] <= 15
    run = load_run(tmp_path / "run")
    assert run.paired == tuple(run.classes[i] for i in chosen)
    page = write_report(tmp_path / "run").read_text()
    assert "Of 20 labels the 6 most frequent are compared." in page


def test_a_split_of_very_many_labels_is_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedharmony.partition.report.MOST_PAIRED", 6)
    succeed(tmp_path, "partition", "demo", "data.train=200", "split.clients=5", "--out", "split")
    assert (tmp_path / "split" / "split.svg").exists()


def test_few_labels_are_all_paired() -> None:
    labels = np.zeros((2, 2001), np.uint8)
    labels[:, 5:] = 1
    labels[0, 9] = 0
    assert paired_labels(labels[:, :2000]).tolist() == list(range(2000))
    assert paired_labels(labels).tolist() == [i for i in range(2001) if i != 4]
