"""Scores of new images, or feature vectors, by the final model of a run."""

from __future__ import annotations

import csv
import math
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from fedharmony.data.base import TensorImages
from fedharmony.data.cache import decode_in_order
from fedharmony.data.features import Features
from fedharmony.data.loose import IMAGE_COLUMNS, find_images
from fedharmony.data.table import SEPARATOR
from fedharmony.errors import ConfigError, DataError
from fedharmony.experiments.trained import TrainedModel
from fedharmony.files import PARTIAL
from fedharmony.metrics.multilabel import Doubles
from fedharmony.models.base import FeatureSpec
from fedharmony.reading import is_there


@dataclass(frozen=True, eq=False)
class Prediction:
    """What the model says of one image.

    Attributes:
        name: of the image, as it was given.
        scores: float32 ``(C,)``; None for an image that cannot be read.
        trouble: why it cannot.
    """

    name: str
    scores: npt.NDArray[np.float32] | None
    trouble: str = ""


class Stream(Protocol):
    """Predictions that come one by one, of which the number is known."""

    def __len__(self) -> int:
        """How many there will be."""
        ...

    def __iter__(self) -> Iterator[Prediction]:
        """All of them, in the order of the images."""
        ...


class ImageStream:
    """Predictions of image files, decoded and resized as the run's own images were."""

    def __init__(self, model: TrainedModel, places: Sequence[Path], column: str = "") -> None:
        self.model, self.resize = model, model.resize
        own = getattr(model.settings.data.own, "image", IMAGE_COLUMNS[0])
        self.files = find_images(places, [column] if column else [own, *IMAGE_COLUMNS])

    def __len__(self) -> int:
        """The number of files."""
        return len(self.files)

    def __iter__(self) -> Iterator[Prediction]:
        """Decoded on several threads while the model works."""
        first = 0
        with closing(decode_in_order(self.files, self.resize)) as chunks:
            for pixels, troubles in chunks:
                images = torch.from_numpy(pixels).to(self.model.device)
                scores = iter(self.model.scorer(images).cpu().numpy() if len(pixels) else ())
                failed = dict(troubles)
                for i in range(first, first + len(pixels) + len(troubles)):
                    name = self.files.name(i)
                    if i in failed:
                        yield Prediction(name, None, failed[i])
                    else:
                        yield Prediction(name, next(scores))
                first += len(pixels) + len(troubles)


class FeatureStream:
    """Predictions of feature vectors from files; several files put their names before their ids."""

    def __init__(self, model: TrainedModel, places: Sequence[Path]) -> None:
        input, own = model.facts.input, model.settings.data.own
        assert isinstance(input, FeatureSpec)
        names = input.names or [f"x{i}" for i in range(input.width)]
        source = Features(own if isinstance(own, Features.Config) else None)
        self.model, self.ids = model, list[str]()
        parts = []
        for place in places:
            ids, values = source.inputs(str(place), names)
            self.ids += ids if len(places) == 1 else [f"{place}:{id}" for id in ids]
            parts.append(values)
        self.values = TensorImages(torch.from_numpy(np.concatenate(parts)))

    def __len__(self) -> int:
        """The number of samples."""
        return len(self.ids)

    def __iter__(self) -> Iterator[Prediction]:
        """In the order of the files."""
        scores = self.model.scorer.all(self.values, self.model.device)
        yield from map(Prediction, self.ids, scores)


def predictions(model: TrainedModel, places: Sequence[Path], column: str = "") -> Stream:
    """The predictions of what files, folders and tables hold.

    Args:
        model: of a finished run.
        places: images, folders and tables of paths; for a model of feature vectors, files of those.
        column: of the paths in tables; empty for the run's own, or a usual name.
    """
    if isinstance(model.facts.input, FeatureSpec):
        return FeatureStream(model, places)
    return ImageStream(model, places, column)


@dataclass(frozen=True, eq=False)
class Rule:
    """Which labels an image is given.

    Attributes:
        thresholds: ``(C,)``, what the score of a label must reach.
        top: at most so many labels, those with the highest scores; none sets no limit.
    """

    thresholds: Doubles
    top: int | None = None

    def labels(self, scores: npt.NDArray[np.float32]) -> list[int]:
        """The labels of one image, the highest score first.

        >>> rule = Rule(np.array([0.5, 0.5, 0.9]), top=1)
        >>> rule.labels(np.array([0.6, 0.7, 0.8], np.float32))
        [1]
        """
        order = np.argsort(-scores, kind="stable")
        return [int(i) for i in order if scores[i] >= self.thresholds[i]][: self.top]


def rule_of(model: TrainedModel, threshold: str | None, top: int | None) -> Rule:
    """The rule that a user asks for.

    Args:
        model: whose thresholds "run" means.
        threshold: a number in [0, 1], or "run"; none means "run" without ``top``, and 0 with it.
        top: at most so many labels.
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


class Writer:
    """Rows of a CSV file of predictions.

    Columns: ``image``, ``labels`` (names with ``|`` between them; ``|`` alone for none, empty for
    an image that cannot be read) and ``score_LABEL`` for each label.
    """

    def __init__(self, file: Path, classes: Sequence[str], rule: Rule) -> None:
        self._classes, self._rule = classes, rule
        self._stream = file.open("w", newline="", encoding="utf-8")
        self._csv = csv.writer(self._stream, lineterminator="\n")
        self._csv.writerow(["image", "labels", *(f"score_{name}" for name in classes)])

    def add(self, prediction: Prediction) -> None:
        """Write one row."""
        if prediction.scores is None:
            self._csv.writerow([prediction.name, *[""] * (1 + len(self._classes))])
            return
        names = [self._classes[i] for i in self._rule.labels(prediction.scores)]
        numbers = (f"{score:.6g}" for score in prediction.scores)
        self._csv.writerow([prediction.name, SEPARATOR.join(names) or SEPARATOR, *numbers])

    def close(self) -> None:
        """Bring everything to the disk."""
        self._stream.flush()
        os.fsync(self._stream.fileno())
        self._stream.close()


def refuse_existing(file: Path) -> None:
    """Refuse to write over a file, or where there is no folder."""
    if is_there(file):
        raise ConfigError(f"{file} exists already. Choose another name, or remove it.")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"There is no folder {file.parent} to write {file.name} to. Make it.")


@contextmanager
def writing(file: Path, classes: Sequence[str], rule: Rule) -> Iterator[Writer]:
    """A CSV file that is there when the block has ended well, and not before."""
    refuse_existing(file)
    try:
        handle, name = tempfile.mkstemp(PARTIAL, f".{file.name[:40]}.", file.parent)
        os.close(handle)
        temporary = Path(name)
        try:
            writer = Writer(temporary, classes, rule)
            yield writer
            writer.close()
            temporary.chmod(0o644)
            temporary.replace(file)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        raise DataError(f"{file} cannot be written: {error.strerror or error}.") from error
