"""A trained model, from the folder of its run alone: no training data, no weights file.

``model.json``, written when a run begins, says what the model is of: labels, inputs and their
normalisation. With the settings and the last checkpoint that is everything.
"""

from __future__ import annotations

import shlex
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch

from fedharmony.config import file_settings
from fedharmony.data.cache import Resize, ResizeMode
from fedharmony.data.file_source import FileSource
from fedharmony.errors import CheckpointError, DataError
from fedharmony.experiments.blueprint import (
    Blueprint,
    Facts,
    make_backbone,
    make_method,
    make_model,
)
from fedharmony.experiments.evaluate import Results
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.machine import choose_device
from fedharmony.experiments.scorer import Scorer
from fedharmony.experiments.settings import Settings
from fedharmony.metrics.multilabel import Doubles
from fedharmony.models.base import FeatureSpec, InputSpec

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

FILE = "model.json"
#: What is stored of feature vectors.
VECTORS = ("mean", "std", "names")


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """The final model of a finished run."""

    settings: Settings
    facts: Facts
    scorer: Scorer
    results: Results
    device: torch.device

    @property
    def classes(self) -> tuple[str, ...]:
        """The label names."""
        return self.facts.classes

    @cached_property
    def thresholds(self) -> Doubles:
        """(C,) those that the run chose for each label, or else its one for all."""
        chosen = self.results.get("thresholds")
        if chosen is None:
            return np.full(len(self.classes), self.settings.metrics.threshold)
        return np.array(chosen["per_label"], np.float64)

    @property
    def resize_mode(self) -> ResizeMode:
        """How the run's images came to their size; images that were made that way are stretched."""
        own = self.settings.data.own
        return own.resize if isinstance(own, FileSource.Config) else "stretch"

    @property
    def resize(self) -> Resize:
        """How the run's image files became squares."""
        input = self.facts.input
        if isinstance(input, FeatureSpec) or input.height != input.width or input.channels != 3:
            raise DataError(f"The model takes {input}; image files cannot be turned into these.")
        return Resize(input.height, self.resize_mode)


def describe(plan: Blueprint) -> dict[str, Any]:
    """What ``model.json`` holds."""
    facts, backbone = plan.facts, plan.model.backbone
    return {
        "classes": facts.classes,
        "input": asdict(facts.input),
        "normalisation": {"mean": backbone.mean, "std": backbone.std},
        "sizes": [facts.sizes[client] for client in range(len(facts.sizes))],
        "unknown_labels": facts.unknown_labels,
    }


def load_model(folder: RunFolder, device: str = "auto") -> TrainedModel:
    """The final model of the run in a folder; refused where the run is not finished."""
    settings = folder.open()
    if (results := folder.results()) is None:
        raise CheckpointError(
            f"The run in {folder.path} is not finished. Go on with 'fedharmony resume "
            f"{shlex.quote(str(folder.path))}'."
        )
    if not folder.checkpoint.exists():
        raise CheckpointError(
            f"The run in {folder.path} has no {folder.checkpoint.name}, which holds its model. "
            "Restore the file from a backup, or run again."
        )
    facts, mean, std = _read(folder)
    backbone = make_backbone(settings, without_files(settings.model.own), facts.input)
    backbone.mean, backbone.std = mean, std
    method = make_method(settings, without_files(settings.method_config), facts, backbone)
    model = make_model(settings, backbone, method)
    place = choose_device(device)
    # Where global models are averaged, the last checkpoint holds the average.
    scorer = Scorer(model, method, folder.load_state(settings).state.to(place))
    wanted = model.shapes()
    found = {name: tuple(tensor.shape[1:]) for name, tensor in scorer.parameters.items()}
    if differing := [name for name in wanted if found.get(name) != wanted[name]]:
        raise CheckpointError(
            f"{folder.checkpoint} does not fit {folder[FILE]}: {differing[0]} has shape "
            f"{found.get(differing[0])}, not {wanted[differing[0]]}. One of the two was changed: "
            "restore it from a backup, or run again."
        )
    return TrainedModel(settings, facts, scorer, results, place)


def _read(folder: RunFolder) -> tuple[Facts, tuple[float, ...], tuple[float, ...]]:
    """Labels and inputs of a run, mean and standard deviation of the normalisation."""
    stored = folder.read_json(FILE)
    try:
        input = stored["input"]
        vectors = {name: tuple(values) for name, values in input.items() if name in VECTORS}
        facts = Facts(
            tuple(stored["classes"]),
            FeatureSpec(**vectors) if vectors else InputSpec(**input),
            dict(enumerate(stored["sizes"])),
            stored["unknown_labels"],
        )
        normalisation = stored["normalisation"]
        return facts, tuple(normalisation["mean"]), tuple(normalisation["std"])
    except (TypeError, KeyError, AttributeError):
        raise CheckpointError(
            f"{folder[FILE]} is missing or damaged: it says what the model was trained on. Runs of "
            "earlier versions do not have it. Restore it from a backup, or run again."
        ) from None


Config = TypeVar("Config", bound="DataclassInstance")


def without_files(config: Config) -> Config:
    """The same settings without the files they name: what was read of them is in the checkpoint."""
    return replace(config, **dict.fromkeys(file_settings(type(config))))
