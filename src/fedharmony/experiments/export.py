"""A trained model in forms that other programs read: safetensors with timm's names, ONNX, a card.

What cannot be a model of timm (a head that timm lacks, scores that are not the sigmoid of logits,
feature vectors) keeps this package's own names, and says so.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import tempfile
import warnings
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

import fedharmony
from fedharmony.config import tree_of
from fedharmony.errors import CheckpointError, ConfigError
from fedharmony.experiments.card import model_card
from fedharmony.experiments.folder import jsonable, make_folder
from fedharmony.experiments.scorer import Scorer
from fedharmony.experiments.trained import TrainedModel, without_files
from fedharmony.methods.base import Method
from fedharmony.models.base import FeatureSpec
from fedharmony.models.heads import LinearHead
from fedharmony.records import apart, write_file
from fedharmony.types import Tensors

logger = logging.getLogger(__name__)

#: How far scores of an exported model may lie from the run's.
CLOSE = 1e-4
#: What the extra ``onnx`` brings.
ONNX_PACKAGES = ("onnx", "onnxruntime", "onnxscript")


@dataclass(frozen=True, eq=False)
class Form:
    """A model as timm has it (``config.json`` says how), or else as this package has, and why."""

    tensors: Tensors
    timm: dict[str, Any] | None = None
    reason: str = ""


def export(model: TrainedModel, out: Path, onnx: bool = False) -> list[Path]:
    """Write the model into a new folder; returns the files. Nothing is written if a check fails."""
    refuse_filled(out)
    if onnx:
        refuse_missing_packages()
    form = form_of(model)
    config = config_of(model, form)
    files = {
        "model.safetensors": safetensors.torch.save(form.tensors, {"format": "pt"}),
        "config.json": (json.dumps(jsonable(config), indent=1) + "\n").encode(),
    }
    if onnx:
        files["model.onnx"] = onnx_of(model)
    files["README.md"] = model_card(model, config, onnx).encode()
    make_folder(out)
    for name, content in files.items():
        write_file(out / name, content)
    return [out / name for name in files]


def refuse_filled(folder: Path) -> None:
    """Refuse a folder that holds anything."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise CheckpointError(
            f"{folder} exists and is not an empty folder. Choose another with --to."
        )


# -- names ----------------------------------------------------------------------------------------


def form_of(model: TrainedModel) -> Form:
    """The tensors under timm's names where timm has such a model, else under our own."""
    tensors = apart({n: t[0].cpu().contiguous() for n, t in model.scorer.parameters.items()})
    if reason := why_not_timm(model.scorer):
        return Form(tensors, reason=reason)
    made = model.scorer.model.backbone.as_timm()
    assert made is not None
    architecture, arguments = made
    about: dict[str, Any] = {"architecture": architecture, "model_args": arguments}
    about |= {"num_classes": len(model.classes), "classifier": "head"}
    if importlib.util.find_spec("timm") is None:
        logger.warning(
            'timm is not installed (pip install "fedharmony[vision]"): the weights have its names, '
            "but were not tried with it."
        )
        return Form(tensors, about)
    create = importlib.import_module("timm").create_model
    module = create(architecture, num_classes=len(model.classes), **arguments).eval()
    about["classifier"] = module.pretrained_cfg.get("classifier", "head")
    named = {n.removeprefix("backbone."): t for n, t in tensors.items()}
    for part in ("weight", "bias"):
        named[f"{about['classifier']}.{part}"] = named.pop(f"head.{part}")
    named = {n: t for n, t in named.items() if n in module.state_dict()}
    try:
        module.load_state_dict(named)
    except RuntimeError:
        return Form(tensors, reason=f"timm's {architecture} has parameters of other shapes")
    images = samples(model)
    mean, std = map(torch.tensor, model.scorer.method.normalisation(model.scorer.state))
    with torch.no_grad():
        logits = module(((images / 255 - mean[:, None, None]) / std[:, None, None]).float())
    if (off := furthest(logits.sigmoid(), scores_of(model, images))) > CLOSE:
        return Form(tensors, reason=f"the scores of timm's {architecture} are {off:.1g} off")
    return Form(named, about)


def why_not_timm(scorer: Scorer) -> str:
    """Why timm cannot have such a model; empty where it can."""
    head, backbone = scorer.model.head, scorer.model.backbone
    if backbone.as_timm() is None:
        return f"timm has no model {backbone.name!r}"
    if not isinstance(head, LinearHead):
        return f"timm has no head like {type(head).__name__} of method {scorer.method.name!r}"
    if type(scorer.method).predict is not Method.predict:
        return f"the scores of method {scorer.method.name!r} are not the sigmoid of logits"
    return ""


# -- description ----------------------------------------------------------------------------------


def config_of(model: TrainedModel, form: Form) -> dict[str, Any]:
    """``config.json``: what timm reads, and all that is known of the model under ``fedharmony``."""
    settings, results, input = model.settings, model.results, model.facts.input
    mean, std = (list(v) for v in model.scorer.method.normalisation(model.scorer.state))
    own: dict[str, Any] = {
        "version": fedharmony.__version__,
        "form": "timm" if form.timm else "fedharmony",
        "why_not_timm": form.reason or None,
        "model": {**tree_of(settings.model.common), **tree_of(without_files(settings.model.own))},
        "method": settings.run.method,
        "classes": model.classes,
        "normalisation": {"mean": mean, "std": std},
        "thresholds": model.thresholds,
        "thresholds_chosen": results.get("thresholds") is not None,
        "metrics": results["metrics"],
        "rounds": results["rounds_done"],
        "privacy": results.get("privacy"),
        "sha256": {"settings": results["config_sha256"], "state": results["state_sha256"]},
    }
    if not own["privacy"]:  # a hash of all data tells who guesses the last client that he is right
        own["seed"] = results["seed"]
        own["sha256"] |= {"partition": results["partition_sha256"], "data": results["bound"]}
    if isinstance(input, FeatureSpec):
        return {"fedharmony": {**own, "features": input.names, "width": input.width}}
    own["image_size"] = [input.height, input.width]
    own["resize"] = model.resize_mode
    if form.timm is None:
        return {"fedharmony": own}
    crop = {"stretch": "squash", "crop": "center", "pad": "border"}[model.resize_mode]
    classifier = form.timm.pop("classifier")
    pretrained = {
        "num_classes": len(model.classes),
        "input_size": [input.channels, input.height, input.width],
        "mean": mean,
        "std": std,
        "interpolation": "bilinear",
        "crop_pct": 1.0,
        "crop_mode": crop,
        "classifier": classifier,
        "label_names": model.classes,
    }
    return {**form.timm, "pretrained_cfg": pretrained, "fedharmony": own}


# -- ONNX -----------------------------------------------------------------------------------------


class Graph(torch.nn.Module):
    """The whole way from images as they are to scores."""

    def __init__(self, scorer: Scorer) -> None:
        super().__init__()
        self.scorer = scorer
        _ = scorer.parameters, scorer.message  # computed now, not in the graph

    def forward(self, images: Tensor) -> Tensor:
        """Scores (B, C)."""
        return self.scorer(images)


def onnx_of(model: TrainedModel) -> bytes:
    """The model as ONNX: images (uint8) or features (float32) to scores, checked by onnxruntime."""
    runtime: Any = importlib.import_module("onnxruntime")
    graph, images = Graph(model.scorer).eval(), samples(model)
    try:
        content = _traced(graph, images.to(model.device))
    except Exception as error:  # of the exporter: it meets something that it does not know
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(
            f"The model cannot be written as ONNX ({type(error).__name__}: {reason}). Export "
            "without --onnx."
        ) from error
    session = runtime.InferenceSession(content, providers=["CPUExecutionProvider"])
    for rows in (images, images[:1]):
        (found,) = session.run(None, {"images": rows.numpy()})
        if (off := furthest(torch.from_numpy(found), scores_of(model, rows))) > CLOSE:
            raise CheckpointError(
                f"The ONNX model gives scores that are {off:.1g} off those of the run, so it is "
                "not written. Export without --onnx, and please report this."
            )
    return content


def _traced(graph: Graph, images: Tensor) -> bytes:
    """The graph as ONNX, for any number of images."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), ExitStack() as after:
        after.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.WARNING)  # what the exporter notes, and warns of, about itself
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            graph,
            (images,),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=["scores"],
            dynamic_shapes=({0: torch.export.Dim("images")},),
        )
        assert program is not None
        file = Path(folder, "model.onnx")
        program.save(file, external_data=False)
        return file.read_bytes()


def refuse_missing_packages() -> None:
    """Refuse ONNX where its packages are not installed."""
    absent = [name for name in ONNX_PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        raise ConfigError(
            f'--onnx needs {", ".join(absent)}: pip install "fedharmony[onnx]". Without it, leave '
            "--onnx out."
        )


# -- checks ---------------------------------------------------------------------------------------


def samples(model: TrainedModel, count: int = 4) -> Tensor:
    """Inputs to compare scores on: noise of several strengths, or vectors around the mean."""
    rng, input = np.random.default_rng(0), model.facts.input
    if isinstance(input, FeatureSpec):
        values = rng.normal(input.mean, input.std, (count, input.width))
        return torch.from_numpy(values.astype(np.float32))
    shape = (count, input.channels, input.height, input.width)
    strength = np.linspace(0.2, 1, count).reshape(-1, 1, 1, 1)
    return torch.from_numpy((rng.integers(0, 256, shape) * strength).astype(np.uint8))


def scores_of(model: TrainedModel, images: Tensor) -> Tensor:
    """The model's own scores."""
    return model.scorer(images.to(model.device)).cpu()


def furthest(found: Tensor, expected: Tensor) -> float:
    """The largest distance between scores; infinite where one is not a number."""
    worst = float((found - expected).abs().max())
    return worst if worst == worst else float("inf")
