"""Folders and archives as one tree, decoding once, and what loaders of files have in common."""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import logging
import multiprocessing
import os
import shutil
import tarfile
import time
import zipfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageOps

from fedharmony import fallbacks, files
from fedharmony.config import build
from fedharmony.data import cache, derived
from fedharmony.data import tree as trees
from fedharmony.data.base import TensorImages
from fedharmony.data.cache import CHUNK, PATIENCE, Decoded, MappedImages, Resize, decode, decoded
from fedharmony.data.file_source import AnnotatedFiles, CheckLine, FileSource
from fedharmony.data.tree import open_tree
from fedharmony.errors import ConfigError, DataError
from fedharmony.rng import numpy_rng

SHARED = Path(
    os.environ.get("FEDHARMONY_SHARED", Path(__file__).resolve().parents[2] / "shared"), "data"
)
IMAGES = "VOC2012/JPEGImages"


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def noise(seed: int, width: int = 6, height: int = 4) -> Image.Image:
    pixels = numpy_rng(seed, "tests/noise").integers(256, size=(height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def picture(seed: int) -> bytes:
    return encoded(noise(seed), "JPEG")


def data_folder(root: Path, count: int = 3) -> Path:
    """``root/VOCdevkit/VOC2012`` with images and one text file."""
    images = root / "VOCdevkit" / IMAGES
    images.mkdir(parents=True)
    for i in range(count):
        (images / f"{i}.jpg").write_bytes(picture(i))
    (root / "VOCdevkit" / "VOC2012" / "train.txt").write_text("0\n1\n" * 50)
    return root


def pack(folder: Path, target: Path, **options: Any) -> Path:
    """Everything below ``folder`` in one archive; its name tells the kind."""
    target.parent.mkdir(parents=True, exist_ok=True)
    if target.suffix == ".zip":
        with zipfile.ZipFile(target, "w", **options) as packed:
            for file in sorted(folder.rglob("*")):
                packed.write(file, file.relative_to(folder))
    else:
        mode: Literal["w", "w:gz"] = "w" if target.suffix == ".tar" else "w:gz"
        with tarfile.open(target, mode, format=tarfile.GNU_FORMAT) as tar:
            tar.add(folder, options.get("arcname", "."))
    return target


PLACES: dict[str, Callable[[Path, Path], Path]] = {
    "folder": lambda folder, _: folder,
    "inner folder": lambda folder, _: folder / "VOCdevkit",
    "tar": lambda folder, out: pack(folder, out / "data.tar"),
    "tar without ./": lambda folder, out: pack(
        folder / "VOCdevkit", out / "data.tar", arcname="VOCdevkit"
    ),
    "tar.gz": lambda folder, out: pack(folder, out / "data.tar.gz"),
    "tgz": lambda folder, out: pack(folder, out / "data.TGZ"),
    "stored zip": lambda folder, out: pack(folder, out / "data.zip"),
    "deflated zip": lambda folder, out: pack(
        folder, out / "data.zip", compression=zipfile.ZIP_DEFLATED
    ),
    "folder of a tar": lambda folder, out: pack(folder, out / "data.tar").parent,
    "folder of a tar.gz": lambda folder, out: pack(folder, out / "data.tar.gz").parent,
    "folder of two": lambda folder, out: (
        pack(pack(folder, out / "train.zip").parent.parent / "empty", out / "test.tar").parent
    ),
}


# ------------------------------------------------------------------------------------ trees


@pytest.mark.parametrize("place", PLACES)
def test_every_place_gives_the_same_tree(tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    folder = data_folder(tmp_path / "data")
    tree = open_tree(PLACES[place](folder, tmp_path / "packed"))
    assert tree.list("VOC2012") == ["JPEGImages", "train.txt"]
    assert tree.list(IMAGES) == ["0.jpg", "1.jpg", "2.jpg"]
    assert tree.list("VOC2007") == []
    assert tree.list() == ["VOC2012"]
    assert tree.has("VOC2012")
    assert tree.has("VOC2012/train.txt")
    assert not tree.has("VOC2012/val.txt")
    assert tree.read("VOC2012/train.txt") == b"0\n1\n" * 50
    images = tree.images([f"{IMAGES}/{i}.jpg" for i in (2, 0, 7)])
    assert len(images) == 3
    assert [images.read(i) for i in range(2)] == [picture(2), picture(0)]
    assert images.missing() == [2]
    assert images.name(0).endswith(f"{IMAGES}/2.jpg")
    with pytest.raises(DataError, match=r"7\.jpg cannot be read: there is no such file"):
        images.read(2)
    with pytest.raises(DataError, match="JPEGImages cannot be read"):
        tree.read(IMAGES)


def test_a_folder_comes_before_its_archives_which_are_opened_only_when_needed(
    tmp_path: Path,
) -> None:
    folder = data_folder(tmp_path / "data")
    (folder / "later.tar").write_bytes(b"<html>404 not found</html>")
    tree = open_tree(folder)
    assert tree.has(f"{IMAGES}/0.jpg")
    with pytest.raises(DataError, match=r"later\.tar is damaged or not an archive"):
        tree.has(f"{IMAGES}/9.jpg")

    other = data_folder(tmp_path / "other")
    (other / "VOCdevkit" / IMAGES / "0.jpg").write_bytes(b"other")
    (other / "VOCdevkit" / IMAGES / "9.jpg").write_bytes(b"nine")
    pack(other, folder / "later.tar")
    tree = open_tree(folder)
    assert tree.read(f"{IMAGES}/0.jpg") == picture(0)
    assert tree.read(f"{IMAGES}/9.jpg") == b"nine"
    assert tree.locate(f"{IMAGES}/9.jpg") == f"{folder}/later.tar:{IMAGES}/9.jpg"


def test_a_compressed_archive_is_unpacked_only_when_nothing_else_answers(
    tmp_path: Path, own_cache: Path
) -> None:
    """It may be large, and have nothing to do with the data."""
    folder = data_folder(tmp_path / "data")
    other = data_folder(tmp_path / "other", 5)
    pack(other, folder / "a.tar.gz")
    pack(other, folder / "b.tar")
    tree = open_tree(folder)
    assert tree.list() == ["VOC2012"]
    assert tree.list(IMAGES) == [f"{i}.jpg" for i in range(5)]
    assert tree.locate(f"{IMAGES}/4.jpg") == f"{folder}/b.tar:{IMAGES}/4.jpg"
    assert not own_cache.exists()
    (other / "VOCdevkit" / "new").mkdir()
    (other / "VOCdevkit" / "new" / "x.txt").write_text("x")
    pack(other, folder / "a.tar.gz")
    tree = open_tree(folder)
    assert tree.list("new") == ["x.txt"]
    assert tree.read("new/x.txt") == b"x"


def test_a_later_member_replaces_an_earlier_one_and_links_are_no_files(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "data.tar", "w") as tar:
        for content in (b"old", b"newer"):
            member = tarfile.TarInfo("a.txt")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
        link = tarfile.TarInfo("b.txt")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    tree = open_tree(tmp_path / "data.tar")
    assert tree.read("a.txt") == b"newer"
    assert tree.list() == ["a.txt"]


def fingerprint(path: Path, names: tuple[str, ...] = ("0", "1", "2")) -> str:
    return open_tree(path).images([f"{IMAGES}/{name}.jpg" for name in names]).fingerprint()


def test_fingerprint_follows_names_and_order_but_not_the_place(tmp_path: Path) -> None:
    folder = data_folder(tmp_path / "data")
    first = fingerprint(folder)
    assert len(first) == 64
    assert fingerprint(folder, ("1", "0", "2")) != first
    assert fingerprint(folder, ("0", "1")) != first
    shutil.move(folder, tmp_path / "moved")
    assert fingerprint(tmp_path / "moved") == first
    (tmp_path / "moved/VOCdevkit" / IMAGES / "2.jpg").unlink()
    without = fingerprint(tmp_path / "moved")
    assert without != first
    (tmp_path / "moved/VOCdevkit" / IMAGES / "2.jpg").write_bytes(picture(2))
    assert fingerprint(tmp_path / "moved") != without


@pytest.mark.parametrize("place", ["folder", "tar", "tar.gz", "stored zip", "deflated zip"])
def test_fingerprint_follows_content_of_the_same_length(tmp_path: Path, place: str) -> None:
    folder = data_folder(tmp_path / "data")
    first = fingerprint(PLACES[place](folder, tmp_path / "packed"))
    file = folder / "VOCdevkit" / IMAGES / "1.jpg"
    content = bytearray(file.read_bytes())
    content[-10] ^= 1
    later = file.stat().st_mtime_ns + 10**9  # the system's clock may tick between, or not
    file.write_bytes(content)
    os.utime(file, ns=(later, later))
    assert fingerprint(PLACES[place](folder, tmp_path / "packed")) != first


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "a/../../b", "", "."])
def test_names_that_leave_the_tree_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "secret").write_text("x")
    tree = open_tree(data_folder(tmp_path / "data"))
    with pytest.raises(DataError, match="does not name a file of the data set"):
        tree.read(name)


def test_paths_that_hold_no_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"There is no file or folder .*nowhere"):
        open_tree(tmp_path / "nowhere")
    (tmp_path / "data.rar").write_bytes(b"Rar!")
    with pytest.raises(DataError, match=r"neither a folder nor an archive \(\.tar, \.tar\.gz"):
        open_tree(tmp_path / "data.rar")


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2 + 100])


def spoil_a_header(path: Path) -> None:
    """The header of an image: left to itself, tarfile stops there and says nothing."""
    content = bytearray(path.read_bytes())
    content[content.rindex(b"1.jpg")] ^= 0xFF
    path.write_bytes(content)


def empty(path: Path) -> None:
    path.write_bytes(b"")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("data.tar", cut),
        ("data.tar", spoil_a_header),
        ("data.tar", empty),
        ("data.tar.gz", cut),
        ("data.zip", cut),
        ("data.zip", empty),
    ],
)
def test_damaged_archives_are_named(
    tmp_path: Path, name: str, damage: Any, own_cache: Path
) -> None:
    path = pack(data_folder(tmp_path / "data"), tmp_path / "packed" / name)
    damage(path)
    with pytest.raises(DataError, match=rf"Archive .*{name} is damaged.*etch it again"):
        open_tree(path).has(f"{IMAGES}/0.jpg")
    assert not list(own_cache.rglob("*.tar"))
    assert not list(own_cache.rglob(f"*{files.PARTIAL}"))


def test_an_archive_that_changes_after_it_was_indexed(tmp_path: Path) -> None:
    path = pack(data_folder(tmp_path / "data"), tmp_path / "data.tar")
    tree = open_tree(path)
    assert tree.has(f"{IMAGES}/2.jpg")
    path.write_bytes(path.read_bytes()[:1024])
    with pytest.raises(DataError, match=r"2\.jpg cannot be read: the archive is cut short"):
        tree.read(f"{IMAGES}/2.jpg")
    path.unlink()
    with pytest.raises(DataError, match=r"2\.jpg cannot be read: .*No such file"):
        tree.read(f"{IMAGES}/2.jpg")


def zip_damage(content: bytearray, kind: str) -> str:
    """Damage 1.jpg in a zip of stored files; returns what the message must say."""
    start = content.index(b"1.jpg")
    if kind == "content":
        content[start + 50] ^= 1
        return "Bad CRC-32"
    if kind == "header":
        content[content.rindex(b"PK\x03\x04", 0, start)] ^= 1
        return "Bad magic number"
    entry = content.rindex(b"PK\x01\x02", 0, content.rindex(b"1.jpg"))
    content[entry + 8] |= 1  # the flags
    return "encrypted"


@pytest.mark.parametrize("kind", ["content", "header", "encrypted"])
def test_damaged_members_of_a_zip_are_named(tmp_path: Path, kind: str) -> None:
    path = pack(data_folder(tmp_path / "data"), tmp_path / "data.zip")
    content = bytearray(path.read_bytes())
    message = zip_damage(content, kind)
    path.write_bytes(content)
    tree = open_tree(path)
    assert tree.read(f"{IMAGES}/0.jpg") == picture(0)
    with pytest.raises(DataError, match=rf"data\.zip:{IMAGES}/1\.jpg cannot be read: .*{message}"):
        tree.read(f"{IMAGES}/1.jpg")


def test_a_compressed_tar_is_unpacked_once(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack(data_folder(tmp_path / "data"), tmp_path / "data.tar.gz")
    assert open_tree(path).has("VOC2012")
    (unpacked,) = (own_cache / "unpacked").glob("*.tar")
    assert unpacked.read_bytes() == gzip.decompress(path.read_bytes())
    # Not even a lock is needed then: the cache may have become read-only.
    monkeypatch.setattr(trees, "building", None)
    assert open_tree(path).read(f"{IMAGES}/1.jpg") == picture(1)


def test_of_two_that_want_to_unpack_one_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each opens the lock file for itself, so that threads exclude each other like processes."""
    path = pack(data_folder(tmp_path / "data"), tmp_path / "data.tar.gz")
    unpacked: list[Path] = []

    def slowly(source: Path, out: BinaryIO) -> None:
        unpacked.append(source)
        time.sleep(0.2)
        out.write(gzip.decompress(source.read_bytes()))

    monkeypatch.setattr(trees, "_gunzip", slowly)
    with ThreadPoolExecutor(2) as pool:
        first, second = (pool.submit(trees._unpacked, path, "identity") for _ in range(2))
        assert first.result() == second.result()
    assert first.result().read_bytes() == gzip.decompress(path.read_bytes())
    assert unpacked == [path]


def test_the_size_of_large_archives(tmp_path: Path) -> None:
    """Gzip notes 6·10⁹ bytes as 6·10⁹ − 2³²; what fills 5·10⁹ packed bytes must be more."""
    path = tmp_path / "large.tar.gz"
    with path.open("wb") as file:
        file.truncate(5 * 10**9 - 8)  # takes no room on the disk
        file.seek(0, os.SEEK_END)
        file.write(bytes(4) + (6 * 10**9 - 2**32).to_bytes(4, "little"))
    assert trees._unpacked_size(path) == 6 * 10**9


class Usage(NamedTuple):
    total: int
    used: int
    free: int


def test_a_disk_too_small_to_unpack_is_refused(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = pack(data_folder(tmp_path / "data"), tmp_path / "data.tar.gz")
    size = len(gzip.decompress(path.read_bytes()))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(size, 1, size - 1))
    with pytest.raises(DataError, match=r"unpacked data\.tar\.gz needs .* unpack .* yourself"):
        open_tree(path).has("VOC2012")
    assert not list(own_cache.rglob("*.tar"))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(size, 0, size))
    assert open_tree(path).has("VOC2012")


# ----------------------------------------------------------------------------------- decoding


def test_stretch_by_hand() -> None:
    """Columns 0, 0, 200, 200 to two: each source pixel weighs 1 − |distance| / 2 (factor 2).

    The first new pixel is centred at 1, the old ones at 0.5, 1.5, 2.5 (3.5 is too far): weights
    0.75, 0.75, 0.25, so 0.25·200 / 1.75 = 28.6; the second is 200 − 28.6 = 171.4.
    """
    row = np.array([0, 0, 200, 200], np.uint8)
    image = Image.fromarray(np.tile(row, (4, 1)))
    pixels = decode(encoded(image), Resize(2))
    assert pixels.shape == (3, 2, 2)
    assert pixels.dtype == np.uint8
    assert pixels.tolist() == [[[29, 171]] * 2] * 3


def test_crop_and_pad_by_hand() -> None:
    """Six equal columns 0, 10, …, 50 of height 2, at scale 1: the middle two are 20 and 30.

    Padded to side 6, the two rows get two black rows above and below.
    """
    row = np.arange(0, 60, 10, dtype=np.uint8)
    image = encoded(Image.fromarray(np.tile(row, (2, 1))))
    assert decode(image, Resize(2, "crop"))[0].tolist() == [[20, 30]] * 2
    black = [[0] * 6] * 2
    assert decode(image, Resize(6, "pad"))[0].tolist() == black + [row.tolist()] * 2 + black


@settings(max_examples=40)
@given(st.integers(1, 30), st.integers(1, 30), st.integers(1, 12), st.booleans())
@example(5, 2, 2, True)  # one and a half pixels to the left: which way to round?
@example(2, 5, 2, True)
def test_resizing_is_that_of_torchvision(width: int, height: int, side: int, crop: bool) -> None:
    transforms = pytest.importorskip("torchvision.transforms")
    image = noise(1, width, height)
    if crop:
        wanted = transforms.CenterCrop(side)(transforms.Resize(side)(image))
    else:
        wanted = transforms.Resize((side, side))(image)
    got = decode(encoded(image), Resize(side, "crop" if crop else "stretch"))
    assert np.array_equal(got.transpose(1, 2, 0), np.asarray(wanted))


@settings(max_examples=30)
@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 12))
def test_padding_is_centred_and_keeps_the_proportions(width: int, height: int, side: int) -> None:
    image = Image.new("L", (width, height), 255)
    bright = decode(encoded(image), Resize(side, "pad"))[0] == 255
    rows, columns = bright.any(1), bright.any(0)
    for used, length in ((rows, height), (columns, width)):
        assert used.sum() == max(1, round(side * length / max(width, height)))
        assert abs(int(used.argmax()) - int(used[::-1].argmax())) <= 1


def grey(value: int) -> Image.Image:
    return Image.new("L", (4, 4), value)


def palette() -> Image.Image:
    """Two colours, of which one is used."""
    image = Image.new("P", (4, 4), 1)
    image.putpalette([1, 1, 1, 9, 8, 7])
    return image


@pytest.mark.parametrize(
    ("data", "colour"),
    [
        (encoded(grey(90)), (90, 90, 90)),
        (encoded(grey(90), "JPEG"), (90, 90, 90)),
        (encoded(Image.new("1", (4, 4), 1)), (255, 255, 255)),
        (encoded(Image.new("LA", (4, 4), (90, 0))), (90, 90, 90)),
        (encoded(Image.new("RGBA", (4, 4), (1, 2, 3, 0))), (1, 2, 3)),
        (encoded(palette()), (9, 8, 7)),
        (encoded(palette(), transparency=b"\x80\x40"), (9, 8, 7)),
        # C, M, Y, K in [0, 255]: red is 255 − C where K is 0; all is black where K is 255.
        (encoded(Image.new("CMYK", (8, 8), (55, 155, 255, 0)), "JPEG"), (200, 100, 0)),
        (encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 255)), "JPEG"), (0, 0, 0)),
        # Of 16 bits the upper 8 are kept: 0x8001 -> 0x80.
        (encoded(Image.fromarray(np.full((4, 4), 0x8001, np.uint16))), (128, 128, 128)),
        (encoded(Image.fromarray(np.full((4, 4), 0x8001, np.uint16)), "TIFF"), (128, 128, 128)),
    ],
)
def test_every_kind_of_pixel_becomes_rgb(data: bytes, colour: tuple[int, int, int]) -> None:
    pixels = decode(data, Resize(2))
    assert np.abs(pixels.reshape(3, -1).T.astype(int) - colour).max() <= 1  # JPEG may round


def test_numbers_of_unknown_range_are_refused() -> None:
    data = encoded(Image.new("F", (4, 4), 0.5), "TIFF")
    with pytest.raises(ValueError, match="32-bit numbers"):
        decode(data, Resize(2))


@pytest.mark.parametrize("orientation", range(1, 9))
def test_photographs_are_turned_upright(orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(noise(3, 16, 8), "JPEG", exif=exif, quality=95)
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    assert upright.size == ((16, 8) if orientation < 5 else (8, 16))
    assert np.array_equal(
        decode(data, Resize(5, "pad")), decode(encoded(upright), Resize(5, "pad"))
    )


def test_damaged_exif_data_do_not_matter() -> None:
    data = encoded(noise(3), "JPEG", exif=b"Exif\0\0garbage, not a header")
    assert np.array_equal(decode(data, Resize(4)), decode(encoded(noise(3), "JPEG"), Resize(4)))


# -------------------------------------------------------------------------------------- cache


@dataclass
class Memory:
    """Image files in memory; ``log`` counts the reads, also of other processes."""

    contents: list[bytes]
    log: Path | None = None
    pause: float = 0.0
    mark: str = "memory"

    def __len__(self) -> int:
        return len(self.contents)

    def name(self, i: int) -> str:
        return f"image{i}.jpg"

    def read(self, i: int) -> bytes:
        if self.log is not None:
            with self.log.open("a") as log:
                log.write(".")
        time.sleep(self.pause)
        if self.contents[i] == b"":
            raise DataError(f"{self.name(i)} cannot be read: there is no such file.")
        return self.contents[i]

    def fingerprint(self) -> str:
        return self.mark

    @property
    def reads(self) -> int:
        assert self.log is not None
        return len(self.log.read_text()) if self.log.exists() else 0


def pictures(count: int, log: Path | None = None) -> Memory:
    return Memory([picture(i) for i in range(count)], log)


def pixels_of(result: Decoded) -> np.ndarray[Any, Any]:
    return result.images.gather(torch.arange(len(result.images)), "cpu").numpy()


def left_in(folder: Path) -> list[str]:
    return sorted(file.suffix for file in folder.rglob("*") if file.is_file() and file.suffix)


@pytest.mark.parametrize("workers", [1, 3, None])
def test_images_are_decoded_in_order_once(
    tmp_path: Path, own_cache: Path, workers: int | None
) -> None:
    many = pictures(3 * CHUNK + 1, tmp_path / "log")
    seen: list[tuple[int, int]] = []
    result = decoded(many, Resize(5), workers=workers, progress=lambda *at: seen.append(at))
    assert len(result.images) == len(many)
    assert result.images.shape == (3, 5, 5)
    assert result.kept.dtype == np.int64
    assert result.kept.tolist() == list(range(len(many)))
    assert result.skipped == ()
    wanted = np.stack([decode(data, Resize(5)) for data in many.contents])
    assert np.array_equal(pixels_of(result), wanted)
    assert seen == [(done, len(many)) for done in (CHUNK, 2 * CHUNK, 3 * CHUNK, len(many))]
    assert many.reads == len(many)
    assert left_in(own_cache) == [".json", ".u8"]

    again = decoded(many, Resize(5), progress=lambda *at: seen.append(at))
    assert np.array_equal(pixels_of(again), wanted)
    assert many.reads == len(many)
    assert len(seen) == 4


def test_other_settings_and_other_content_make_other_entries(tmp_path: Path) -> None:
    some = pictures(3, tmp_path / "log")
    settings = [Resize(5), Resize(6), Resize(5, "crop"), Resize(5, "pad")]
    results = [pixels_of(decoded(some, resize)) for resize in settings]
    assert some.reads == 12
    for resize, result in zip(settings, results, strict=True):
        assert np.array_equal(pixels_of(decoded(some, resize)), result)
    assert some.reads == 12
    changed = Memory([picture(9), *some.contents[1:]], mark="changed")
    assert np.array_equal(pixels_of(decoded(changed, Resize(5)))[0], decode(picture(9), Resize(5)))


def test_a_changed_file_is_decoded_again(tmp_path: Path) -> None:
    folder = data_folder(tmp_path / "data")

    def current() -> np.ndarray[Any, Any]:
        names = [f"{IMAGES}/{i}.jpg" for i in range(3)]
        return pixels_of(decoded(open_tree(folder).images(names), Resize(4)))

    before = current()
    (folder / "VOCdevkit" / IMAGES / "1.jpg").write_bytes(encoded(noise(9, 8, 8), "JPEG"))
    after = current()
    assert np.array_equal(before[[0, 2]], after[[0, 2]])
    assert not np.array_equal(before[1], after[1])


def test_packed_and_unpacked_images_decode_alike(tmp_path: Path) -> None:
    folder = data_folder(tmp_path / "data")
    names = [f"{IMAGES}/{i}.jpg" for i in range(3)]
    results = [
        pixels_of(
            decoded(open_tree(PLACES[place](folder, tmp_path / place)).images(names), Resize(4))
        )
        for place in ("folder", "tar", "tar.gz", "stored zip", "deflated zip")
    ]
    assert all(np.array_equal(result, results[0]) for result in results)


def damaged(log: Path | None = None) -> Memory:
    """Six images; number 2 is missing, 3 is cut short and 5 is no image."""
    contents = [picture(i) for i in range(6)]
    contents[2], contents[3], contents[5] = b"", contents[3][:-40], b"<html>"
    return Memory(contents, log)


def test_unreadable_images_are_named(tmp_path: Path, own_cache: Path) -> None:
    """All of them at once; the others need not be decoded again when these are left out."""
    some = damaged(tmp_path / "log")
    message = (
        r"3 of 6 images cannot be read: image2\.jpg \(there is no such file\); image3\.jpg "
        r"\(.*truncated.*\); image5\.jpg \(it is not an image of a known kind\)\. .*"
        r"unreadable = \"skip\""
    )
    for _ in range(2):
        with pytest.raises(DataError, match=message):
            decoded(some, Resize(4))
    first = some.reads
    result = decoded(some, Resize(4), unreadable="skip")
    assert some.reads - first <= 2 * 3  # only the three are tried again
    assert result.kept.tolist() == [0, 1, 4]
    assert [name for name, _ in result.skipped] == ["image2.jpg", "image3.jpg", "image5.jpg"]
    wanted = np.stack([decode(some.contents[i], Resize(4)) for i in (0, 1, 4)])
    assert np.array_equal(pixels_of(result), wanted)


def test_skipped_images_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fedharmony"):
        decoded(damaged(), Resize(4), unreadable="skip")
    stated, warned = caplog.records
    assert "Decoding 6 images to 4 × 4 pixels takes 0 MB in" in stated.getMessage()
    assert warned.levelname == "WARNING"
    assert "image3.jpg" in warned.getMessage()


def test_a_file_that_can_be_read_again_is_no_longer_left_out() -> None:
    """As after trouble with a network disk: the fingerprint is the same."""
    assert len(decoded(damaged(), Resize(4), unreadable="skip").images) == 3
    mended = damaged()
    mended.contents[2] = picture(2)
    result = decoded(mended, Resize(4), unreadable="skip")
    assert result.kept.tolist() == [0, 1, 2, 4]
    assert np.array_equal(pixels_of(result)[2], decode(picture(2), Resize(4)))


def test_many_unreadable_images_end_the_attempt(tmp_path: Path, own_cache: Path) -> None:
    bad = Memory([b""] * 50 * CHUNK, tmp_path / "log")
    with pytest.raises(DataError, match=r"image4\.jpg \(.*\); and \d+ more\. The search stopped"):
        decoded(bad, Resize(4), workers=1)
    assert PATIENCE < bad.reads < len(bad) / 2
    assert left_in(own_cache) == []
    with pytest.raises(DataError, match=r"800 of 800 images cannot be read: .*Nothing is left"):
        decoded(bad, Resize(4), unreadable="skip")
    assert left_in(own_cache) == []


def test_nothing_to_decode_is_refused() -> None:
    with pytest.raises(DataError, match="no images to decode"):
        decoded(Memory([]), Resize(4))


def test_decoding_waits_for_a_slow_disk(tmp_path: Path) -> None:
    """One thread may be two chunks ahead of what is written, so that memory does not fill up."""
    many = pictures(12 * CHUNK, tmp_path / "log")
    ahead: list[int] = []

    def slowly(done: int, _: int) -> None:
        time.sleep(0.3 if done == CHUNK else 0)
        ahead.append(many.reads - done)

    decoded(many, Resize(4), workers=1, progress=slowly)
    assert max(ahead) <= 2 * CHUNK


def test_a_crash_before_the_new_description_leaves_no_old_one(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old one could tell other images than the new pixels hold."""
    decoded(damaged(), Resize(4), unreadable="skip")
    mended = damaged()
    mended.contents[2] = picture(2)

    def crash(file: Path, *rest: Any) -> Any:
        if file.suffix == ".json":
            raise KeyboardInterrupt
        return derived.new_file(file, *rest)

    monkeypatch.setattr(cache, "new_file", crash)
    with pytest.raises(KeyboardInterrupt):
        decoded(mended, Resize(4), unreadable="skip")
    assert left_in(own_cache) == [".u8"]


@pytest.mark.parametrize("interruption", [KeyboardInterrupt, RuntimeError, BrokenPipeError])
def test_an_interruption_leaves_nothing_behind(
    own_cache: Path, interruption: type[BaseException]
) -> None:
    many = pictures(3 * CHUNK)

    def stop(done: int, _: int) -> None:
        if done > CHUNK:
            raise interruption

    with pytest.raises(interruption):
        decoded(many, Resize(4), progress=stop)
    assert left_in(own_cache) == []
    assert len(decoded(many, Resize(4)).images) == len(many)


def test_leftovers_of_killed_processes_are_removed(own_cache: Path) -> None:
    (own_cache / "images").mkdir(parents=True)
    (own_cache / "images" / f".abc{files.PARTIAL}").write_bytes(b"x")
    decoded(pictures(2), Resize(4))
    assert left_in(own_cache) == [".json", ".u8"]


def test_pixels_without_their_description_do_not_count(tmp_path: Path, own_cache: Path) -> None:
    """What a crash between the two steps would leave."""
    some = pictures(2, tmp_path / "log")
    wanted = pixels_of(decoded(some, Resize(4)))
    (pixels,) = own_cache.rglob("*.u8")
    (sidecar,) = own_cache.rglob("*.json")
    for damage in (
        sidecar.unlink,
        lambda: sidecar.write_text("{"),
        lambda: sidecar.write_text("[]"),
        lambda: sidecar.write_text('{"settings": 1, "unread": []}'),
        lambda: pixels.write_bytes(pixels.read_bytes()[:-1]),
        pixels.unlink,
    ):
        before = some.reads
        damage()
        assert np.array_equal(pixels_of(decoded(some, Resize(4))), wanted)
        assert some.reads == before + 2


@pytest.mark.parametrize("place", [0, 99, 100, -1])
def test_altered_pixels_are_decoded_again(
    place: int,
    tmp_path: Path,
    own_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Parts of 100 bytes, of which an image has 48: one wrong byte in any of them is found."""
    monkeypatch.setattr(cache, "PART", 100)
    some = pictures(2 * CHUNK + 3, tmp_path / "log")
    first = decoded(some, Resize(4))
    wanted = pixels_of(first)
    (pixels,) = own_cache.rglob("*.u8")
    (sidecar,) = own_cache.rglob("*.json")
    data = pixels.read_bytes()
    sums = [hashlib.sha256(data[i : i + 100]).hexdigest() for i in range(0, len(data), 100)]
    assert json.loads(sidecar.read_text())["sha256"] == sums
    altered = bytearray(data)
    altered[place] ^= 1
    pixels.write_bytes(altered)
    again = decoded(some, Resize(4))
    assert f"part {(place % len(data)) // 100 + 1} of {len(sums)}" in caplog.text
    assert fallbacks.drain() == {"cache": 1}
    assert np.array_equal(pixels_of(again), wanted)
    assert some.reads == 2 * len(some)
    assert again.images.sha256 == first.images.sha256
    decoded(some, Resize(4))
    assert some.reads == 2 * len(some)  # sound again


def test_pixels_are_known_by_their_content() -> None:
    """Other images of the same number and size are others; the same ones are the same."""
    one, two = pictures(3), Memory([picture(7), *pictures(3).contents[1:]], mark="other")
    found = [decoded(files, Resize(4)).images.sha256 for files in (one, two, one)]
    assert found[0] == found[2] != found[1]


def test_pixels_of_other_settings_are_never_used(own_cache: Path) -> None:
    some = pictures(2)
    decoded(some, Resize(4, "crop"))
    (old,) = own_cache.rglob("*.json")
    old_pixels = old.with_suffix(".u8")
    expected = decoded(some, Resize(4, "pad")).images.sha256
    (new,) = set(own_cache.rglob("*.json")) - {old}
    shutil.copy(old, new)
    shutil.copy(old_pixels, new.with_suffix(".u8"))
    assert decoded(some, Resize(4, "pad")).images.sha256 == expected  # decoded again
    new.write_text("{")
    assert decoded(some, Resize(4, "pad")).images.sha256 == expected
    assert fallbacks.drain() == {"cache": 2}
    about = json.loads(old.read_text())
    assert about["settings"] | {"files": ""} == {
        "format": cache.FORMAT,
        "files": "",
        "count": 2,
        "size": 4,
        "mode": "crop",
    }


def test_a_disk_too_small_is_refused_before_anything_is_read(
    tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """100 images of 3·100·100 bytes are 3 MB."""
    many = Memory([picture(0)] * 100, tmp_path / "log")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 2_999_999))
    message = r"Decoding 100 images to 100 × 100 pixels needs 3 MB, but the disk of .*cache"
    with pytest.raises(DataError, match=message + ".*FEDHARMONY_CACHE.*lower the image size"):
        decoded(many, Resize(100))
    assert many.reads == 0
    assert left_in(own_cache) == []
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 3_000_000))
    assert len(decoded(many, Resize(100)).images) == 100


def test_a_disk_that_fills_up_is_told(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(DataError, match="Make room"):
        decoded(pictures(2), Resize(4))
    assert left_in(own_cache) == []


def test_a_cache_folder_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(DataError, match=r"cannot be written: .*Set FEDHARMONY_CACHE"):
        decoded(pictures(2), Resize(4), folder=tmp_path / "file")


def decode_elsewhere(some: Memory, folder: Path, started: Any, results: Any) -> None:
    started.wait()
    results.put(pixels_of(decoded(some, Resize(4), folder=folder, workers=1)).tobytes())


def test_of_two_processes_one_decodes_and_both_have_the_images(tmp_path: Path) -> None:
    some = pictures(40, tmp_path / "log")
    some.pause = 0.01
    context = multiprocessing.get_context("spawn")
    started, results = context.Barrier(2), context.Queue()
    arguments = (some, tmp_path / "own", started, results)
    process = context.Process(target=decode_elsewhere, args=arguments)
    process.start()
    started.wait(60)
    here = pixels_of(decoded(some, Resize(4), folder=tmp_path / "own", workers=1))
    assert results.get(timeout=60) == here.tobytes()
    process.join(60)
    assert process.exitcode == 0
    assert np.array_equal(here, np.stack([decode(data, Resize(4)) for data in some.contents]))
    assert some.reads == len(some)
    assert left_in(tmp_path / "own") == [".json", ".u8"]


def test_without_locks_the_file_is_still_replaced_in_one_step(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process finishes first, while this one decodes: both files are whole."""
    monkeypatch.setattr(files, "fcntl", None)
    some = pictures(2 * CHUNK)
    other: list[Decoded] = []

    def race(_: int, __: int) -> None:
        if not other:
            other.append(decoded(some, Resize(4)))

    result = decoded(some, Resize(4), progress=race)
    assert np.array_equal(pixels_of(result), pixels_of(other[0]))
    assert left_in(own_cache) == [".json", ".u8"]


# ------------------------------------------------------------------------------ mapped images


@pytest.fixture
def mapped() -> MappedImages:
    return decoded(pictures(7), Resize(3)).images


@given(data=st.data())
@settings(max_examples=30)
def test_mapped_images_are_gathered_like_images_in_memory(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    file = tmp_path_factory.getbasetemp() / "seven.u8"
    pixels = numpy_rng(0, "tests/mapped").integers(256, size=(7, 3, 2, 2), dtype=np.uint8)
    file.write_bytes(pixels.tobytes())
    images, held = MappedImages(file, 7, 2), TensorImages(torch.from_numpy(pixels))
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    numbers = st.integers(-1, 6)
    size = int(np.prod(shape))
    index = torch.tensor(data.draw(st.lists(numbers, min_size=size, max_size=size)))
    index = index.long().reshape(shape)
    assert torch.equal(images.gather(index, "cpu"), held.gather(index, "cpu"))


def test_mapped_images_stay_mapped_on_the_cpu(
    mapped: MappedImages, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert mapped.to("cpu") is mapped
    monkeypatch.setattr(cache, "SLAB", 3)
    held = mapped.copy_to("cpu")
    everything = torch.arange(7)
    assert torch.equal(held.gather(everything, "cpu"), mapped.gather(everything, "cpu"))


def test_an_index_past_the_end_is_an_error(mapped: MappedImages) -> None:
    with pytest.raises(IndexError):
        mapped.gather(torch.tensor([7]), "cpu")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_mapped_images_on_a_gpu(mapped: MappedImages, monkeypatch: pytest.MonkeyPatch) -> None:
    index = torch.tensor([[6, 0], [-1, 3]])
    wanted = mapped.gather(index, "cpu")
    for place in ("cpu", "cuda"):
        got = mapped.gather(index.to(place), "cuda")
        assert got.device.type == "cuda"
        assert torch.equal(got.cpu(), wanted)
    held = mapped.to("cuda")
    assert isinstance(held, TensorImages)
    assert torch.equal(held.gather(index, "cuda").cpu(), wanted)
    size = 7 * 3 * 3 * 3
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2 * size - 1, 0))
    assert mapped.to("cuda") is mapped


# ------------------------------------------------------------------------- loaders of files


class Toy(FileSource):
    """Names ``{row}.jpg``; class "even" holds in even rows, "all" everywhere but in row 1."""

    name = "toy"
    rows = 6
    extra: dict[str, int] = {}  # noqa: RUF012

    def annotations(self) -> tuple[tuple[str, ...], AnnotatedFiles, AnnotatedFiles]:
        tree = self.tree()
        self.require(tree, "VOC2012/train.txt", IMAGES)
        return ("even", "all"), self.part(tree, range(self.rows)), self.part(tree, range(2))

    def part(self, tree: trees.Tree, rows: range) -> AnnotatedFiles:
        number = np.array(rows)
        labels = np.stack([number % 2 == 0, number != 1], 1)
        return AnnotatedFiles(
            tree.images([f"{IMAGES}/{row}.jpg" for row in rows]),
            labels.astype(np.uint8),
            tuple(f"id{row}" for row in rows),
            users=number // 2,
            known=np.stack([number != 0, number != 4], 1),
        )

    def obtain(self) -> str:
        return "Get toy.tar from the toy page."

    def official_counts(self) -> dict[str, int]:
        return {
            "classes": 2,
            "training images": 6,
            "test images": 2,
            "unlabelled training images": 1,
            "training images with even": 3,
            "images with all": 6,
            "training users": 3,
            **self.extra,
        }


def toy(folder: Path, **config: Any) -> Toy:
    return Toy(build(Toy.Config, {"path": str(folder), "image_size": 4, **config}, "data"))


def test_a_source_of_files_loads(tmp_path: Path) -> None:
    data = toy(data_folder(tmp_path / "data", 6)).load()
    assert data.name == "toy"
    assert data.classes == ("even", "all")
    assert data.train.ids == tuple(f"id{i}" for i in range(6))
    assert data.train.labels.tolist() == [[1, 1], [0, 0], [1, 1], [0, 1], [1, 1], [0, 1]]
    assert len(data.test) == 2
    pixels = data.train.images.gather(torch.arange(6), "cpu").numpy()
    assert np.array_equal(pixels, np.stack([decode(picture(i), Resize(4)) for i in range(6)]))


def test_unreadable_images_leave_every_part(tmp_path: Path) -> None:
    """Rows 1 (damaged) and 3 (missing) go; users are rows // 2, unknown are (0, 0) and (4, 1)."""
    folder = data_folder(tmp_path / "data", 6)
    images = folder / "VOCdevkit" / IMAGES
    (images / "3.jpg").unlink()
    with pytest.raises(DataError, match=r"lacks 1 of 6 training images: .*3\.jpg\. Get toy\.tar"):
        toy(folder).load()
    (images / "1.jpg").write_bytes(picture(1)[:-30])
    data = toy(folder, unreadable="skip").load()
    train = data.train
    assert train.ids == ("id0", "id2", "id4", "id5")
    assert train.labels.tolist() == [[1, 1], [1, 1], [1, 1], [0, 1]]
    assert train.users is not None
    assert train.users.tolist() == [0, 1, 2, 2]
    assert train.known is not None
    assert train.known.tolist() == [[False, True], [True, True], [True, False], [True, True]]
    assert data.test.ids == ("id0",)
    pixels = train.images.gather(torch.arange(4), "cpu").numpy()
    wanted = np.stack([decode(picture(i), Resize(4)) for i in (0, 2, 4, 5)])
    assert np.array_equal(pixels, wanted)


def test_missing_data_are_told_with_where_to_get_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Set data\.path .*Get toy\.tar from the toy page"):
        Toy().load()
    with pytest.raises(DataError, match=r"no file or folder .*nowhere.*Get toy\.tar"):
        toy(tmp_path / "nowhere").load()
    (tmp_path / "notes.txt").write_text("")
    message = (
        r"lacks VOC2012/train\.txt, VOC2012/JPEGImages\. Searched: folder .*, with notes\.txt at "
        r"the top\. Get toy\.tar"
    )
    with pytest.raises(DataError, match=message):
        toy(tmp_path).load()


def test_settings_of_a_source_are_checked() -> None:
    for key, value in (("resize", "squash"), ("unreadable", "maybe"), ("image_size", 0)):
        with pytest.raises(ConfigError, match=f"data.{key}"):
            build(Toy.Config, {key: value}, "data")


def test_check_agrees_with_the_official_figures(tmp_path: Path, own_cache: Path) -> None:
    """Six training and two test images at 3·224² bytes are 1.2 MB."""
    check = toy(data_folder(tmp_path / "data", 6), image_size=224).check()
    assert check.ok
    assert CheckLine("images with all", 6, 6) in check.lines  # 5 of 6 and 1 of 2
    assert CheckLine("training image files", 6, 6) in check.lines
    assert CheckLine("sampled test images that decode", 2, 2) in check.lines
    assert "ready" in check.advice
    assert "1 MB" in check.advice
    assert not own_cache.exists()


def test_check_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = data_folder(tmp_path / "data", 6)
    images = folder / "VOCdevkit" / IMAGES
    (images / "3.jpg").unlink()
    (images / "0.jpg").write_bytes(b"no image")
    monkeypatch.setattr(Toy, "extra", {"test users": 7})
    check = toy(folder).check()
    assert not check.ok
    assert [(line.what, line.expected, line.found) for line in check.lines if not line.ok] == [
        ("test users", 7, 1),
        ("training image files", 6, 5),
        ("sampled training images that decode", 6, 4),
        ("sampled test images that decode", 2, 1),
    ]
    assert "Get toy.tar" in check.advice


@pytest.mark.parametrize(
    "part", [{"ids": ("a",)}, {"users": np.zeros(3)}, {"known": np.ones((1, 2), bool)}]
)
def test_annotations_that_do_not_fit_are_refused(part: dict[str, Any]) -> None:
    parts = {"labels": np.zeros((2, 2), np.uint8), "ids": ("a", "b"), **part}
    with pytest.raises(DataError, match=rf"do not match: 2 files, 2 labels, .*{next(iter(part))}"):
        AnnotatedFiles(pictures(2), **parts)


# ------------------------------------------------------------------------------- real archives


def real(name: str) -> Path:
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"{name} is not there")
    return path


def test_the_real_voc_archive() -> None:
    tree = open_tree(real("voc2012_144px.tar.gz"))
    names = tree.list(IMAGES)
    assert len(names) == 11_540
    assert tree.has("VOC2012/ImageSets/Main/trainval.txt")
    result = decoded(tree.images([f"{IMAGES}/{name}" for name in names[::300]]), Resize(32))
    assert len(result.images) == 39
    # Photographs: neither black nor white, and no two alike.
    means = pixels_of(result).reshape(39, -1).mean(1)
    assert 40 < means.min() < means.max() < 220
    assert len(np.unique(means)) == 39


def test_the_real_coco_archive() -> None:
    tree = open_tree(real("coco2017_mini_144px.tar.gz"))
    assert tree.list() == ["annotations", "train2017", "val2017"]
    listed = json.loads(tree.read("annotations/instances_val2017.json"))["images"]
    images = tree.images([f"val2017/{image['file_name']}" for image in listed])
    assert images.missing() == []
    assert len(decoded(images, Resize(16, "crop")).images) == len(listed)
