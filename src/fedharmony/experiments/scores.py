"""Scores of the test images, and some of the images, kept beside a run's results.

Half precision is kept: 2 bytes a score. Metrics of the file agree with the run's to about a
thousandth, since close scores may become equal.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import safetensors.numpy
import torch
import torch.nn.functional as F
from safetensors import SafetensorError, safe_open

from fedharmony.data.base import LabelledImages
from fedharmony.errors import CheckpointError
from fedharmony.records import write_file
from fedharmony.types import Labels

logger = logging.getLogger(__name__)

FILE = "scores.safetensors"
#: The entry of its header: a JSON object with ``ids``, ``classes`` and, where there are, ``users``.
NAMES = "names"
EXAMPLES = "examples.safetensors"
#: Side of an example image in pixels; larger ones are made smaller.
SIDE = 96
#: Names of images and users make up at most so many bytes; the format takes 100 MB.
MOST_NAMES = 50_000_000


@dataclass(frozen=True, eq=False)
class Scores:
    """What the final model says of each of N test images, and what is true.

    Attributes:
        scores: float16 ``(N, C)``, in [0, 1].
        labels: uint8 ``(N, C)``, 1 where the label is present.
        ids: one name per image; its number where images have no names.
        classes: C label names.
        known: bool ``(N, C)``, False where a label is unknown; None means that all are known.
        users: the owner of each image, where images have owners.
    """

    scores: npt.NDArray[np.float16]
    labels: Labels
    ids: tuple[str, ...]
    classes: tuple[str, ...]
    known: npt.NDArray[np.bool_] | None = None
    users: tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        """Refuse parts that do not fit together."""
        shape = (len(self.ids), len(self.classes))
        found = {self.scores.shape, self.labels.shape, shape}
        found |= set() if self.known is None else {self.known.shape}
        found |= set() if self.users is None else {(len(self.users), len(self.classes))}
        if len(found) > 1:
            raise ValueError(f"its parts have different shapes: {sorted(found)}")


def scores_of(
    scores: npt.NDArray[np.float32], test: LabelledImages, classes: Sequence[str]
) -> Scores:
    """The scores of an evaluation with what is known of its images."""
    ids = map(str, range(len(test))) if test.ids is None else test.ids
    users = None if test.users is None else tuple(map(str, test.users.tolist()))
    half = scores.astype(np.float16)
    return Scores(half, test.labels, tuple(ids), tuple(classes), test.known, users)


def save_scores(folder: Path, scores: Scores, most: int) -> None:
    """Write the scores into a run's folder; of more than ``most`` numbers it only says so."""
    names = {"ids": scores.ids, "users": scores.users, "classes": scores.classes}
    # One entry: several would be written in an order that changes from process to process.
    header = {NAMES: json.dumps({name: of for name, of in names.items() if of is not None})}
    count = scores.scores.size
    if count > most or len(header[NAMES]) > MOST_NAMES:
        logger.warning(
            "Scores of the test images are not kept: there are %s (images × labels), and "
            "run.scores allows %s. Without them the report shows no example images and no curves.",
            *(f"{count:,}", f"{most:,}"),
        )
        (folder / FILE).unlink(missing_ok=True)
        return
    tensors: dict[str, npt.NDArray[Any]] = {"scores": scores.scores, "labels": scores.labels}
    if scores.known is not None:
        tensors["known"] = scores.known.astype(np.uint8)
    write_file(folder / FILE, safetensors.numpy.save(tensors, header))


def has_scores(folder: Path) -> bool:
    """Whether the run in a folder kept its scores."""
    return (folder / FILE).is_file()


def load_scores(folder: Path) -> Scores:
    """The scores that a run kept; raises CheckpointError where there are none, or damaged ones."""
    file = folder / FILE
    if not has_scores(folder):
        raise CheckpointError(
            f"{folder} has no {FILE}: the run is not finished, was made by an earlier version of "
            "fedharmony, or has more test images than run.scores allows. Run it again."
        )
    tensors, header = _read(file)
    try:
        names = {name: tuple(of) for name, of in json.loads(header[NAMES]).items()}
        known = tensors["known"].astype(np.bool_) if "known" in tensors else None
        return Scores(tensors["scores"], tensors["labels"], known=known, **names)
    except (KeyError, ValueError, TypeError, AttributeError) as error:
        raise _damaged(file, error) from error


def _read(file: Path) -> tuple[dict[str, npt.NDArray[Any]], dict[str, str]]:
    """The arrays of a file, and the texts of its header."""
    try:
        with safe_open(file, framework="numpy") as content:
            arrays = {name: content.get_tensor(name) for name in content.keys()}  # noqa: SIM118
            return arrays, content.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _damaged(file, error) from error


def _damaged(file: Path, error: Exception) -> CheckpointError:
    return CheckpointError(
        f"{file} is damaged ({error}). Restore it from a backup, or delete it to do without."
    )


# -- example images -------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Examples:
    """Some test images, small ``(K, 3, S, S)``; ``rows`` says which of them they are."""

    rows: npt.NDArray[np.int64]
    pixels: npt.NDArray[np.uint8]

    def __post_init__(self) -> None:
        """Refuse parts that do not fit together."""
        if self.pixels.ndim != 4 or self.rows.shape != self.pixels.shape[:1]:
            raise ValueError(f"it has {self.rows.shape} numbers of images {self.pixels.shape}")


def save_examples(folder: Path, test: LabelledImages, count: int) -> None:
    """Keep ``count`` test images with labels, at equal distances; of feature vectors none."""
    present = test.labels if test.known is None else test.labels * test.known
    labelled = np.flatnonzero(present.any(axis=1))
    if len(test.images.shape) != 3 or test.images.shape[0] != 3 or not count or not len(labelled):
        return
    places = np.linspace(0, len(labelled) - 1, min(count, len(labelled))).round().astype(np.int64)
    rows = labelled[places]
    images = test.images.gather(torch.from_numpy(rows), "cpu")
    if max(images.shape[2:]) > SIDE:
        size = [round(SIDE * n / max(images.shape[2:])) for n in images.shape[2:]]
        shrunk = F.interpolate(images.float(), size, mode="bilinear", antialias=True)
        images = shrunk.round().clamp(0, 255).to(torch.uint8)
    tensors = {"rows": rows, "pixels": np.ascontiguousarray(images.numpy())}
    write_file(folder / EXAMPLES, safetensors.numpy.save(tensors))


def load_examples(folder: Path) -> Examples | None:
    """The images that a run kept; None where it kept none."""
    file = folder / EXAMPLES
    if not file.is_file():
        return None
    arrays, _ = _read(file)
    try:
        return Examples(arrays["rows"], arrays["pixels"])
    except (KeyError, ValueError) as error:
        raise _damaged(file, error) from error
