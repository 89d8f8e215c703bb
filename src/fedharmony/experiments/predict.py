"""Scores of new images, or feature vectors, by the final model of a run."""

from __future__ import annotations

import codecs
import csv
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from fedharmony.data.base import TensorImages
from fedharmony.data.cache import Resize, decode_in_order
from fedharmony.data.features import Features
from fedharmony.data.loose import IMAGE_COLUMNS, find_images
from fedharmony.data.table import SEPARATOR
from fedharmony.data.tree import ImageFiles
from fedharmony.errors import ConfigError, DataError
from fedharmony.experiments.trained import TrainedModel
from fedharmony.files import replacing
from fedharmony.metrics.multilabel import Doubles
from fedharmony.models.base import FeatureSpec
from fedharmony.reading import is_there

Scores: TypeAlias = npt.NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class Prediction:
    """What the model says of one image; or the ``trouble`` with one that cannot be read."""

    name: str
    scores: Scores | None
    trouble: str = ""


@dataclass(frozen=True, eq=False)
class Stream:
    """Predictions that come one by one, of which the number is known.

    ``found`` has the scores of each image, or why it cannot be read.
    """

    names: Sequence[str]
    found: Iterable[Scores | str]

    def __len__(self) -> int:
        return len(self.names)

    def __iter__(self) -> Iterator[Prediction]:
        for name, found in zip(self.names, self.found, strict=True):
            if isinstance(found, str):
                yield Prediction(name, None, found)
            else:
                yield Prediction(name, found)


def predictions(model: TrainedModel, places: Sequence[Path], column: str = "") -> Stream:
    """The predictions for images, folders and tables of paths; or for files of features.

    ``column`` is that of the paths in tables; empty for the run's own, or a usual name.
    """
    own, input = model.settings.data.own, model.facts.input
    if isinstance(input, FeatureSpec):
        return _of_vectors(model, input, places)
    usual = [getattr(own, "image", IMAGE_COLUMNS[0]), *IMAGE_COLUMNS]
    files = find_images(places, [column] if column else usual)
    names = [files.name(i) for i in range(len(files))]
    return Stream(names, _of_images(model, files, model.resize))


def _of_images(model: TrainedModel, files: ImageFiles, resize: Resize) -> Iterator[Scores | str]:
    """Decoded on several threads while the model works, as the run's own images were."""
    first = 0
    with closing(decode_in_order(files, resize)) as chunks:
        for pixels, troubles in chunks:
            images = torch.from_numpy(pixels).to(model.device)
            scores = iter(model.scorer(images).cpu().numpy() if len(pixels) else ())
            failed, count = dict(troubles), len(pixels) + len(troubles)
            for i in range(first, first + count):
                yield failed[i] if i in failed else next(scores)
            first += count


def _of_vectors(model: TrainedModel, input: FeatureSpec, places: Sequence[Path]) -> Stream:
    """Of files of features; several files put their names before their ids."""
    own, names, parts = model.settings.data.own, list[str](), []
    source = Features(own if isinstance(own, Features.Config) else None)
    for place in places:
        wanted = input.names or [f"x{i}" for i in range(input.width)]
        ids, values = source.inputs(str(place), wanted)
        names += ids if len(places) == 1 else [f"{place}:{id}" for id in ids]
        parts.append(torch.from_numpy(values))
    return Stream(names, model.scorer.all(TensorImages(torch.cat(parts)), model.device))


@dataclass(frozen=True, eq=False)
class Rule:
    """Which labels an image is given: those that reach their thresholds, ``top`` at most."""

    thresholds: Doubles
    top: int | None = None

    def labels(self, scores: Scores) -> list[int]:
        """The labels of one image, the highest score first.

        >>> rule = Rule(np.array([0.5, 0.5, 0.9]), top=1)
        >>> rule.labels(np.array([0.6, 0.7, 0.8], np.float32))
        [1]
        """
        order = np.argsort(-scores, kind="stable")
        return [int(i) for i in order if scores[i] >= self.thresholds[i]][: self.top]


def rule_of(model: TrainedModel, threshold: str | None, top: int | None) -> Rule:
    """The rule that a user asks for.

    ``threshold`` is a number in [0, 1], or "run" for the thresholds of the run; none means "run"
    without ``top``, and 0 with it.
    """
    if top is not None and top < 1:
        raise ConfigError(f"--top {top} must be at least 1.")
    if threshold is None:
        threshold = "run" if top is None else "0"
    if threshold == "run":
        return Rule(model.thresholds, top)
    try:
        number = float(threshold)
    except ValueError:
        number = math.nan
    if not 0 <= number <= 1:
        raise ConfigError(
            f"--threshold {threshold!r} must be a number from 0 to 1, or 'run' for what the run "
            "chose."
        )
    return Rule(np.full(len(model.classes), number), top)


def csv_header(classes: Sequence[str]) -> list[str]:
    """The columns of a CSV file of predictions."""
    return ["image", "labels", *(f"score_{name}" for name in classes)]


def csv_row(prediction: Prediction, classes: Sequence[str], rule: Rule) -> list[str]:
    """Image, names with ``|`` between them (``|`` alone for none), and the score of each label.

    All but the image is empty where that cannot be read.
    """
    if prediction.scores is None:
        return [prediction.name, *[""] * (1 + len(classes))]
    names = [classes[i] for i in rule.labels(prediction.scores)]
    numbers = (f"{score:.6g}" for score in prediction.scores)
    return [prediction.name, SEPARATOR.join(names) or SEPARATOR, *numbers]


def refuse_existing(file: Path) -> None:
    """Refuse to write over a file, or where there is no folder."""
    if is_there(file):
        raise ConfigError(f"{file} exists already. Choose another name, or remove it.")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder {file.parent} to write {file.name} to. Make it.")


@contextmanager
def writing(file: Path) -> Iterator[Callable[[Sequence[str]], object]]:
    """Writes rows of a CSV file that is there when the block has ended well, and not before."""
    refuse_existing(file)
    try:
        with replacing(file) as stream:
            yield csv.writer(codecs.getwriter("utf-8")(stream), lineterminator="\n").writerow
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error.strerror or error}.") from error
