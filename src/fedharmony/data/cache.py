"""Decode once: encoded images of any size become one memory-mapped file of equal squares.

Decoding a JPEG costs milliseconds, copying its pixels microseconds. :func:`decoded` therefore
decodes every image of a data set once, at the wanted size, into a file of uint8 pixels in the cache
folder, and later runs map that file into memory. Two files make an entry:

- ``KEY.u8``, the pixels ``(N, 3, S, S)`` without any header;
- ``KEY.json``, what they are: the fingerprint of the encoded files, the size and mode, the images
  that could not be read, and a checksum of every part of the pixels. It is written last, and
  without it the pixels do not count. The checksums are verified whenever the entry is opened; where
  one does not fit, the images are decoded again.

KEY is a SHA-256 of fingerprint, size and mode, so other files or settings make another entry.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
from collections import deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import BinaryIO, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, UnidentifiedImageError
from PIL import __version__ as pillow_version
from torch import Tensor

from fedharmony import fallbacks, stopping
from fedharmony.data.base import Images, TensorImages, cache_folder
from fedharmony.data.check import Tell
from fedharmony.data.derived import building, in_bytes, new_file
from fedharmony.data.tree import ImageFiles
from fedharmony.errors import DataError
from fedharmony.types import Index

Pixels: TypeAlias = npt.NDArray[np.uint8]
ResizeMode: TypeAlias = Literal["stretch", "crop", "pad"]
Unreadable: TypeAlias = Literal["error", "skip"]

#: Raise when the same file and settings give other pixels, so that old entries are not used.
FORMAT = 1
#: Images a thread decodes at a time.
CHUNK = 16
#: Bytes of pixels behind one checksum.
PART = 1 << 24
#: Verifying more bytes than this takes so long that it is announced.
SAID_FROM = 4 << 30
#: Images copied to a GPU at a time.
SLAB = 1024
#: With ``unreadable="error"``, decoding stops after this many unreadable images.
PATIENCE = 20
#: How many unreadable images a message names, and what it advises.
NAMED = 5
ADVICE = 'Fetch or unpack the data again, or set unreadable = "skip" to leave such images out.'

#: Formats of images, for Pillow. Others are not opened at all: for some of them Pillow starts
#: programs (PostScript: Ghostscript), and no data set uses them.
FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "TIFF", "GIF", "PPM")
#: How names of such files end.
IMAGE_ENDINGS = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".tif", ".tiff", ".gif", ".ppm")

#: The tag of EXIF data that says how the camera was held, and what undoes each of its values.
ORIENTATION = 0x0112
UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resize:
    """How an image becomes a square of ``size`` pixels.

    Attributes:
        size: The side S.
        mode: ``"stretch"`` resizes both sides to S; ``"crop"`` resizes the shorter side to S and
            cuts the middle out; ``"pad"`` resizes the longer side to S and adds black bars.
    """

    size: int
    mode: ResizeMode = "stretch"

    def nbytes(self, count: int) -> int:
        """The size of ``count`` decoded images: 3·S² bytes each.

        >>> Resize(224).nbytes(5717)
        860568576
        """
        return count * 3 * self.size**2


class MappedImages:
    """Images ``(N, 3, S, S)`` in a memory-mapped file: only what is asked for is read.

    ``sha256`` identifies the pixels, where that is known.
    """

    def __init__(self, file: Path, count: int, size: int, sha256: str | None = None) -> None:
        self.file, self.sha256 = file, sha256
        mapped = np.memmap(file, np.uint8, "r", shape=(count, 3, size, size))
        self._pixels = np.asarray(mapped)  # a plain view: indexing a memmap object is slower

    def __len__(self) -> int:
        return len(self._pixels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of every image."""
        channels, height, width = self._pixels.shape[1:]
        return channels, height, width

    def to(self, device: torch.device | str) -> Images:
        """The images in the GPU's memory where they take at most half of what is free there.

        Otherwise, and on the CPU, they stay as they are: the system keeps the pages of a mapped
        file in memory while there is room.
        """
        device = torch.device(device)
        if device.type != "cuda":
            return self
        free, _ = torch.cuda.mem_get_info(device)
        return self.copy_to(device) if 2 * self._pixels.nbytes <= free else self

    def copy_to(self, device: torch.device | str) -> TensorImages:
        """The images in the memory of ``device``, whether there is room or not."""
        pixels = torch.empty((len(self), *self.shape), dtype=torch.uint8, device=device)
        for start in range(0, len(self), SLAB):
            slab = self._pixels[start : start + SLAB].copy()
            pixels[start : start + SLAB] = torch.from_numpy(slab)
        return TensorImages(pixels)

    def gather(self, index: Tensor, device: torch.device | str) -> Tensor:
        """See :meth:`Images.gather`; padding rows repeat image 0.

        Rows are read in the order of the file, which is what disks are good at; on their way to a
        GPU they go through page-locked memory, so that the copy need not be waited for.
        """
        ordered, places = index.reshape(-1).cpu().clamp(min=0).sort()
        shape = (*index.shape, *self.shape)
        if torch.device(device).type == "cuda":
            rows = torch.empty(shape, dtype=torch.uint8, pin_memory=True)
        else:  # NumPy asks for large memory pages: a third of the time for a batch of 60 MB
            rows = torch.from_numpy(np.empty(shape, np.uint8))
        target = rows.view(-1, *self.shape).numpy()
        for row, place in zip(ordered.tolist(), places.tolist(), strict=True):
            target[place] = self._pixels[row]
        return rows.to(device, non_blocking=True)


@dataclass(frozen=True, eq=False)
class Decoded:
    """The images that could be read, which file each of them is, and the trouble with others."""

    images: MappedImages
    kept: Index
    skipped: tuple[tuple[str, str], ...] = ()


def decoded(
    files: ImageFiles,
    resize: Resize,
    *,
    unreadable: Unreadable = "error",
    folder: Path | None = None,
    workers: int | None = None,
    progress: Tell | None = None,
) -> Decoded:
    """The images of ``files`` at one size, from the cache or decoded into it.

    Everything becomes RGB: grey, palette, CMYK and 16-bit images too; photographs are turned
    upright. An interrupted call leaves nothing behind. When two processes want the same images, one
    decodes and the other waits for it. Missing and damaged files are an error, or are left out with
    a warning that names them (``unreadable = "skip"``).

    The cache is in ``folder`` (by default :func:`cache_folder`), one thread per core decodes unless
    ``workers`` says otherwise, and ``progress`` hears of the number of images done and of all.
    """
    if not len(files):
        raise DataError("There are no images to decode. Check the annotations of the data set.")
    entry = _Entry((folder or cache_folder()) / "images", files, resize)
    found = entry.open()
    if found is None:
        with building(entry.folder):
            found = entry.open() or entry.make(unreadable, workers or _cores(), progress)
    if found.skipped:
        report = _report(found.skipped, len(files))
        if unreadable == "error":
            raise DataError(f"{report} {ADVICE}")
        logger.warning("%s They are left out.", report)
    return found


#: Index of a file, its name, and the trouble with it.
_Unread: TypeAlias = tuple[int, str, str]


class _Entry:
    """One entry of the cache: some files at some size."""

    def __init__(self, folder: Path, files: ImageFiles, resize: Resize) -> None:
        self.folder, self.files, self.resize = folder, files, resize
        #: Why the entry cannot be used, if it is there and cannot.
        self.damage = ""
        self.settings = {
            "format": FORMAT,
            "files": files.fingerprint(),
            "count": len(files),
            **asdict(resize),
        }
        key = json.dumps(self.settings, sort_keys=True)
        name = hashlib.sha256(key.encode()).hexdigest()[:20]
        self.pixels, self.sidecar = folder / f"{name}.u8", folder / f"{name}.json"

    def open(self) -> Decoded | None:
        """What the entry holds; None when it is missing, damaged, or lacks readable images."""
        try:
            stored = json.loads(self.sidecar.read_bytes())
            settings = stored["settings"]
            unread = [(int(i), str(name), str(reason)) for i, name, reason in stored["unread"]]
            sums = [str(checksum) for checksum in stored["sha256"]]
            size = self.pixels.stat().st_size
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.damage = f"their description cannot be read: {type(error).__name__}: {error}"
            return None
        if settings != self.settings or size != self.resize.nbytes(len(self.files) - len(unread)):
            self.damage = "their size or settings are not those of their description"
            return None
        # The fingerprint has not changed, but a network disk may have come back.
        if any(isinstance(_attempt(self.files, i, self.resize), np.ndarray) for i, *_ in unread):
            return None
        if not self._verified(size, sums):
            return None
        return self._result(unread, sums)

    def _verified(self, size: int, sums: list[str]) -> bool:
        """Whether every part of the pixels has its checksum."""
        if size > SAID_FROM:
            logger.info("Verifying %s of cached images.", in_bytes(size))
        try:
            found = _checksums(self.pixels)
        except OSError:
            return False
        wrong = [i for i, pair in enumerate(zip_longest(found, sums)) if len({*pair}) > 1]
        if wrong:
            part = f"part {wrong[0] + 1} of {len(found)} of {in_bytes(PART)} each"
            self.damage = f"{part} does not have its checksum"
        return not wrong

    def _result(self, unread: list[_Unread], sums: list[str]) -> Decoded:
        kept = np.delete(np.arange(len(self.files), dtype=np.int64), [i for i, *_ in unread])
        identity = hashlib.sha256(f"{len(kept)} {self.resize.size} {sums}".encode()).hexdigest()
        images = MappedImages(self.pixels, len(kept), self.resize.size, identity)
        return Decoded(images, kept, tuple((name, reason) for _, name, reason in unread))

    def make(self, unreadable: Unreadable, workers: int, progress: Tell | None) -> Decoded:
        """Decode all files; the sidecar comes last and makes the entry valid."""
        if self.damage:
            what = f"The cached images {self.pixels} were altered or damaged ({self.damage})."
            fallbacks.note("cache", f"{what} They are decoded again.")
        count, side = len(self.files), self.resize.size
        size = self.resize.nbytes(count)
        what = f"Decoding {count:,} images to {side} × {side} pixels"
        logger.info("%s takes %s in %s.", what, in_bytes(size), self.folder)
        self.sidecar.unlink(missing_ok=True)
        advice = "or lower the image size"
        with new_file(self.pixels, size, what, advice) as out:
            unread = self._decode_into(out, unreadable, workers, progress)
        sums = _checksums(self.pixels)
        about = {
            "settings": self.settings,
            "unread": unread,
            "pillow": pillow_version,
            "sha256": sums,
        }
        text = json.dumps(about, indent=1).encode()
        with new_file(self.sidecar, len(text), what, advice) as out:
            out.write(text)
        return self._result(unread, sums)

    def _decode_into(
        self,
        out: BinaryIO,
        unreadable: Unreadable,
        workers: int,
        progress: Tell | None,
    ) -> list[_Unread]:
        """Write the readable images in order; returns index, name and trouble of the others."""
        count, done = len(self.files), 0
        unread: list[_Unread] = []
        with closing(decode_in_order(self.files, self.resize, workers)) as chunks:
            for pixels, troubles in chunks:
                out.write(pixels.data)
                done += len(pixels) + len(troubles)
                unread += [(i, self.files.name(i), reason) for i, reason in troubles]
                if unreadable == "error" and len(unread) > PATIENCE:
                    report = _report(unread, done)
                    raise DataError(f"{report} The search stopped there. {ADVICE}")
                if progress is not None:
                    progress(done, count)
        if len(unread) == count:
            report = _report(unread, count)
            raise DataError(f"{report} Nothing is left. Fetch or unpack the data again.")
        return unread


def _checksums(file: Path) -> list[str]:
    """The SHA-256 of every :data:`PART` bytes of a file, on all cores; the last may be short."""

    def checksum(start: int) -> str:
        stopping.end_if_asked()
        with file.open("rb") as stream:
            stream.seek(start)
            return hashlib.sha256(stream.read(PART)).hexdigest()

    with ThreadPoolExecutor(_cores(), "verify") as pool:
        return list(pool.map(checksum, range(0, file.stat().st_size, PART)))


#: Images of some files in a row, and index of, and trouble with, those that cannot be read.
Chunk: TypeAlias = tuple[Pixels, list[tuple[int, str]]]


def decode_in_order(
    files: ImageFiles, resize: Resize, workers: int | None = None
) -> Generator[Chunk, None, None]:
    """Decode on several threads; Pillow lets them run side by side. Chunks come in order."""
    workers = workers or _cores()
    pool = ThreadPoolExecutor(workers, "decode")
    waiting: deque[Future[Chunk]] = deque()
    try:
        for start in range(0, len(files), CHUNK):
            stopping.end_if_asked()
            rows = range(start, min(start + CHUNK, len(files)))
            waiting.append(pool.submit(_decode_chunk, files, rows, resize))
            if len(waiting) > 2 * workers:  # bounds the memory
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _decode_chunk(files: ImageFiles, rows: range, resize: Resize) -> Chunk:
    """The images of the readable files, and the trouble with the others."""
    attempts = {i: _attempt(files, i, resize) for i in rows}
    images = [image for image in attempts.values() if isinstance(image, np.ndarray)]
    shape = (len(images), 3, resize.size, resize.size)
    pixels = np.stack(images) if images else np.empty(shape, np.uint8)
    return pixels, [(i, reason) for i, reason in attempts.items() if isinstance(reason, str)]


def _attempt(files: ImageFiles, i: int, resize: Resize) -> Pixels | str:
    """Image ``i``, or the reason why there is none."""
    try:
        return decode(files.read(i), resize)
    except MemoryError:
        raise
    except DataError as error:
        return str(error).removeprefix(f"{files.name(i)} cannot be read: ").rstrip(".")
    except UnidentifiedImageError:
        return "it is not an image of a known kind"
    except Exception as error:  # damaged files make Pillow raise almost anything
        return str(error) or type(error).__name__


def decode(data: bytes, resize: Resize) -> Pixels:
    """The image in ``data`` as uint8 ``(3, S, S)``, upright and in RGB.

    Resizing averages over the source pixels (bilinear with antialiasing), as torchvision does with
    Pillow images; grey values of 16 bits keep their upper 8. Raises whatever Pillow raises when the
    data are damaged.

    >>> file = io.BytesIO()
    >>> Image.new("L", (4, 2), 7).save(file, "PNG")
    >>> decode(file.getvalue(), Resize(2, "pad"))[0].tolist()
    [[7, 7], [0, 0]]
    """
    with Image.open(io.BytesIO(data), formats=FORMATS) as image:
        turn = UPRIGHT.get(_orientation(image))
        whole = _rgb(image)
        if turn is not None:
            whole = whole.transpose(turn)
        square = _square(whole, resize)
        # Three arrays, since turning one (S, S, 3) array around takes three times as long.
        return np.stack([np.asarray(band) for band in square.split()])


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(ORIENTATION, 1))
    except Exception:  # damaged EXIF data say nothing about the pixels
        return 1


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB":
        return image
    # Pillow would cut grey values of 16 bits off at 255; of colours it takes the upper 8 bits.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format == "PNG"):
        upper = (np.asarray(image) >> 8).astype(np.uint8)
        return Image.fromarray(upper).convert("RGB")
    if image.mode in ("I", "F"):
        raise ValueError("its pixels are 32-bit numbers of unknown range")
    if image.has_transparency_data:
        image = image.convert("RGBA")  # for a palette with transparency Pillow wants this step
    return image.convert("RGB")


def _square(image: Image.Image, resize: Resize) -> Image.Image:
    width, height = image.size
    side, bilinear = resize.size, Image.Resampling.BILINEAR
    if resize.mode == "stretch":
        return image.resize((side, side), bilinear)
    if resize.mode == "crop":
        scale = min(width, height)
        width, height = int(side * width / scale), int(side * height / scale)
        left, top = round((width - side) / 2), round((height - side) / 2)
        resized = image.resize((width, height), bilinear)
        return resized.crop((left, top, left + side, top + side))
    scale = max(width, height)
    width, height = max(1, round(side * width / scale)), max(1, round(side * height / scale))
    square = Image.new("RGB", (side, side))
    square.paste(
        image.resize((width, height), bilinear), ((side - width) // 2, (side - height) // 2)
    )
    return square


def _report(unread: Sequence[_Unread] | Sequence[tuple[str, str]], count: int) -> str:
    named = "; ".join(f"{name} ({reason})" for *_, name, reason in unread[:NAMED])
    more = f"; and {len(unread) - NAMED:,} more" if len(unread) > NAMED else ""
    return f"{len(unread):,} of {count:,} images cannot be read: {named}{more}."


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
