"""Training, comparing and using models from Python.

In short::

    import fedharmony as fh
    run = fh.train(images, labels, clients=10, rounds=5)
    print(run.metrics["mAP"], run.predict(new_images))

A call does what the command of the same name does, and leaves the same folder behind: ``fedharmony
report``, ``predict`` and ``compare`` work on it, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedharmony.config import built_in_configs, flat, nested, refuse_chosen
from fedharmony.data.arrays import data_set, in_order, inputs_of, labels_of, refuse_other_rows
from fedharmony.data.base import DataSet, datasets
from fedharmony.data.table import UNKNOWN
from fedharmony.errors import CheckpointError, ConfigError, DataError
from fedharmony.experiments.build import Observer
from fedharmony.experiments.compare import (
    Planned,
    carry_out,
    execute,
    plan,
    rehearse,
    write_index,
)
from fedharmony.experiments.folder import RunFolder, choose_folder, folder_name
from fedharmony.experiments.init import fitting
from fedharmony.experiments.machine import with_threads
from fedharmony.experiments.predict import Rule, predictions
from fedharmony.experiments.settings import Layer, Settings, combine, compose, layers_of
from fedharmony.experiments.trained import TrainedModel, load_model
from fedharmony.metrics import MultiLabelResult
from fedharmony.metrics import evaluate as metrics_of
from fedharmony.models.base import FeatureSpec
from fedharmony.report.load import Runs
from fedharmony.report.load import load as read_runs
from fedharmony.report.page import write_report
from fedharmony.report.progress import Progress
from fedharmony.report.tables import table_of, write_tables

Array = npt.NDArray[np.float32]


class Run:
    """A finished run: its folder, its settings and results, and the model it ended with."""

    def __init__(self, folder: str | Path, device: str | None = None) -> None:
        self.folder = Path(folder)
        self.settings: Settings = RunFolder(self.folder).open()
        results = RunFolder(self.folder).results()
        if results is None:
            raise CheckpointError(
                f"The run in {self.folder} is not finished. Go on with it by the same call of "
                "fedharmony.train with out=FOLDER, or by 'fedharmony resume FOLDER'."
            )
        self.results: dict[str, Any] = results
        self._device = device

    def __repr__(self) -> str:
        score = self.metrics["mAP"]
        return f"<Run {self.settings.label}: mAP {100 * score:.1f}, in {self.folder}>"

    @cached_property
    def model(self) -> TrainedModel:
        """The model after the last round."""
        return load_model(RunFolder(self.folder), self._device or "auto")

    @property
    def classes(self) -> tuple[str, ...]:
        """The label names."""
        return self.model.classes

    @property
    def metrics(self) -> dict[str, float]:
        """The eight metrics on the test set, as fractions; nan where one is not defined."""
        found = self.results["metrics"]
        return {name: float("nan") if v is None else float(v) for name, v in found.items()}

    def predict(self, images: Any) -> Array:
        """The score of every label, from 0 to 1, for new images.

        These are an array or tensor as :func:`train` takes it; or paths of image files, folders and
        tables, or of files of features. Columns of a data frame are put in order by their names.
        The result is float32 (N, C), labels in the order of :attr:`classes`.
        """
        if places := _paths(images):
            found = list(predictions(self.model, places))
            unread = [prediction for prediction in found if prediction.scores is None]
            if unread:
                raise DataError(
                    f"{len(unread):,} of {len(found):,} images cannot be read, first "
                    f"{unread[0].name}: {unread[0].trouble}. 'fedharmony predict' leaves such "
                    "images out."
                )
            return np.stack([p.scores for p in found if p.scores is not None])
        wanted = self.model.facts.input
        names = wanted.names if isinstance(wanted, FeatureSpec) else ()
        inputs = inputs_of(in_order(images, names, "images"))
        if inputs.shape != wanted.shape:
            raise DataError(
                f"The model takes {wanted}, an array of shape {('N', *wanted.shape)}; these have "
                f"shape {('N', *inputs.shape)}. Resize them as the training images were, or give "
                "the paths of image files."
            )
        return self.model.scorer.all(inputs, self.model.device)

    def predict_labels(self, images: Any, top: int | None = None) -> list[list[str]]:
        """The names of the labels that each image is given, the surest first, ``top`` at most."""
        rule = Rule(self.model.thresholds, top)
        return [[self.classes[i] for i in rule.labels(row)] for row in self.predict(images)]

    def evaluate(self, images: Any, labels: Any) -> MultiLabelResult:
        """All metrics on other images, by the run's own metric settings.

        Labels are (N, C) zeros and ones; NaN or −1 where a label is unknown.
        """
        refuse_other_rows(images, labels)
        truth = labels_of(in_order(labels, self.classes, "labels"))
        return metrics_of(self.predict(images), truth, self.settings.metrics, truth != UNKNOWN)

    def report(self, path: str | Path | None = None) -> Path:
        """Write the HTML page about the run, by default into its folder; returns its path."""
        return write_report(self.folder, path)


class Comparison:
    """Runs of several methods and seeds on the same data; ``runs`` by method and seed."""

    def __init__(self, folder: str | Path, device: str | None = None) -> None:
        self.folder = Path(folder)
        self.view: Runs = read_runs(self.folder)
        self.runs: dict[tuple[str, int], Run] = {
            (name, run.seed): Run(run.folder, device)
            for name, group in self.view.groups.items()
            for run in group
        }

    def __repr__(self) -> str:
        return self.table

    @property
    def metrics(self) -> dict[str, dict[str, float]]:
        """The metrics of each method: means over the seeds in which they are defined."""
        return {
            name: {key: float(np.mean(known or math.nan)) for key, known in values.items()}
            for name, values in self._defined().items()
        }

    @property
    def counts(self) -> dict[str, dict[str, int]]:
        """In how many seeds each metric of each method is defined."""
        return {
            name: {key: len(known) for key, known in values.items()}
            for name, values in self._defined().items()
        }

    def _defined(self) -> dict[str, dict[str, list[float]]]:
        found: dict[str, dict[str, list[float]]] = {}
        for (name, _), run in self.runs.items():
            for key, value in run.metrics.items():
                known = found.setdefault(name, {}).setdefault(key, [])
                known += [value] if math.isfinite(value) else []
        return found

    @property
    def table(self) -> str:
        """Mean ± standard deviation of the eight metrics, as Markdown."""
        return table_of(self.view).to_markdown()

    def report(self, path: str | Path | None = None) -> Path:
        """Write the HTML page of the comparison, by default into its folder; returns its path."""
        return write_report(self.view, path)


def train(
    images: Any,
    labels: Any = None,
    *,
    clients: Any = None,
    method: str | None = None,
    rounds: int | None = None,
    seed: int | None = None,
    test: float | tuple[Any, Any] = 0.2,
    classes: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    device: str | None = None,
    quiet: bool = False,
) -> Run:
    """Train one method on federated data.

    Args:
        images: uint8 (N, H, W, 3), (N, 3, H, W) or, if grey, (N, H, W); or feature vectors (N, F);
            as array, tensor or list. Or the name of a config (``"demo"``) or data set
            (``"digits"``), or a TOML file.
        labels: (N, C) of 0 and 1; NaN or −1 where a label is unknown. The columns of a data frame
            name the labels.
        clients: How many clients the images are split among, with skewed labels; or the owner of
            every image; or a list with the images (their numbers) of each client. By default the
            number of clients follows from the number of images.
        method: ``"fedharmony"``, ``"fedavg"``, …, ``"name:preset"``; by default what the config
            says, or FedHarmony.
        rounds: Communication rounds; 20 for arrays, or what the config says.
        seed: Of the run and of the initial model; 0, or what the config says.
        test: Images and labels to test on, or the share of the images that is held out for that.
        classes: The names of the labels.
        settings: Further settings by their names, ``{"train.lr": 0.01}`` or ``{"train": {"lr":
            0.01}}``; docs/settings.md lists them all.
        out: The folder of the run; by default the first in ``runs`` without another run. The same
            run there (settings and data) is continued, or returned if it is finished.
        device: ``"cpu"``, ``"cuda"``, …; by default CUDA where there is one.
        quiet: Print nothing.

    Returns:
        The run, with :meth:`Run.predict` and its metrics.

    Raises:
        FedHarmonyError: Something about data or settings must be mended first; nothing was written.
    """
    given = {"run.method": method, "run.rounds": rounds, "run.seed": seed, "model.seed": seed}
    name, composed, data = _prepare(images, labels, clients, test, classes, settings, given, device)
    composed = with_threads(composed)
    usual = Path("runs") / f"{name}-{folder_name(composed.label)}-seed{composed.run.seed}"
    with Progress(quiet=quiet) as progress:
        place, (runs, loaded) = choose_folder(
            out,
            usual,
            lambda at: (runs := [Planned(composed, RunFolder(at))], rehearse(runs, progress, data)),
        )
        if runs[0].results is None:
            carry_out(runs[0], progress, loaded)
    return Run(place, device)


def compare(
    images: Any,
    labels: Any = None,
    *,
    methods: Sequence[str] = ("fedavg", "fedharmony"),
    seeds: Sequence[int] = (0,),
    against: str | None = None,
    clients: Any = None,
    rounds: int | None = None,
    test: float | tuple[Any, Any] = 0.2,
    classes: Sequence[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    out: str | Path | None = None,
    device: str | None = None,
    quiet: bool = False,
) -> Comparison:
    """Train several methods on several seeds: same data, split and cohorts for all.

    (With [privacy], each run draws cohorts and noise of its own.)

    Arguments are those of :func:`train`, and these: ``methods`` are ``"name"``, ``"name:preset"``,
    ``"all"``, or ``"central"`` for training in one place; ``seeds`` are of run and initial model;
    ``against`` names the method from which the distance of all others is shown, with intervals.
    Runs that the folder holds already are kept, unfinished ones continued.
    """
    refuse_chosen(flat(settings or {}))
    name, composed, data = _prepare(
        *(images, labels, clients, test, classes, settings, {"run.rounds": rounds}, device)
    )
    usual = Path("runs") / f"{name}-comparison"
    with Progress(quiet=quiet) as progress:
        place, (planned, loaded) = choose_folder(
            out,
            usual,
            lambda at: (
                runs := plan(composed, methods, seeds, at, against=against),
                rehearse(runs, progress, data),
            ),
        )

        def observer(i: int, run: Planned) -> Observer:
            title, rounds = f"{run.label} seed {run.seed}", run.settings.run.rounds
            return progress.follow(i + 1, len(planned), title, rounds)

        with RunFolder(place).writing():
            write_index(place, name, planned, against)
            try:
                execute(planned, observer, {repr(composed.data): loaded})
            finally:
                if any(run.results for run in planned):
                    write_tables(read_runs(place))
    return Comparison(place, device)


def load(folder: str | Path, device: str | None = None) -> Run:
    """A finished run, from its folder: trained by :func:`train` or by ``fedharmony run``."""
    return Run(folder, device)


def _prepare(
    images: Any,
    labels: Any,
    clients: Any,
    test: float | tuple[Any, Any],
    classes: Sequence[str] | None,
    settings: Mapping[str, Any] | None,
    given: Mapping[str, Any],
    device: str | None,
) -> tuple[str, Settings, DataSet | None]:
    """What the run is called, its settings, and its data where they are arrays."""
    number = clients if isinstance(clients, int | np.integer) else None
    given = {**given, "engine.device": device, "split.clients": number}
    top = {name: value for name, value in given.items() if value is not None}
    data: DataSet | None = None
    if isinstance(images, str | Path):
        if labels is not None or classes is not None or (clients is not None and number is None):
            raise ConfigError(
                f"{str(images)!r} names data, which bring their own labels and clients: labels, "
                "classes and clients (other than a number) go with arrays."
            )
        name, layers = Path(images).stem, _layers(str(images))
    else:
        if labels is None:
            raise DataError("Images need their labels: train(images, labels).")
        data = data_set(images, labels, test, classes, clients if number is None else None)
        name, layers = data.name, [Layer("what fits the data", dict(fitting(data)))]
    layers.append(Layer("settings", _tree(settings or {})))
    layers.append(Layer("arguments", _tree(top)))
    return name, compose(combine(layers)[0]), data


def _tree(values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted or nested names as a tree; numbers of NumPy become Python's."""
    plain = {k: v.item() if isinstance(v, np.generic) else v for k, v in flat(values).items()}
    return nested(plain)


def _layers(name: str) -> list[Layer]:
    """The settings of a config, or of a data set that no config is named after."""
    if name in datasets and name not in built_in_configs():
        return [Layer(name, {"data": {"name": name}})]
    return layers_of(name)


def _paths(images: Any) -> list[Path]:
    """Files and folders, where ``images`` names some."""
    several = [images] if isinstance(images, str | Path) else images
    if isinstance(several, list | tuple) and all(isinstance(p, str | Path) for p in several):
        return [Path(p) for p in several]
    return []
