"""What a run is going to be like, said before it begins: how long it takes, what it can learn."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedharmony.experiments.blueprint import Blueprint
from fedharmony.experiments.build import Assembly
from fedharmony.models.base import InputSpec, Model

#: A run that takes longer, in seconds, is announced.
LONG = 7200.0
#: Below so many products and sums no machine takes that long, so that nothing needs to be timed.
POSSIBLY_LONG = 3.6e13
#: A single image that takes so many seconds is not followed by a whole batch.
PATIENCE = 0.3
#: Parameters per training image above which a model of images that starts from nothing is doubted,
#: unless there are many images. (The demo has 37 per image and learns.)
MANY_PARAMETERS, MANY_IMAGES = 100, 50_000


def outlook(assembly: Assembly, first: int) -> list[str]:
    """What should be known before round ``first`` begins."""
    plan = assembly.blueprint
    warnings = [plan.method.remark, scratch_warning(plan, assembly.train_images)]
    if assembly.device.type == "cpu" and assembly.clients:
        warnings.append(time_warning(plan, len(assembly.data.test), first))
    return [warning for warning in warnings if warning]


def work(plan: Blueprint, tested: int, first: int = 0) -> tuple[int, float]:
    """Images to be trained on from round ``first`` on, repetitions counted; and all work.

    Each evaluation of ``tested`` images is worth training on a third of them.
    """
    rounds = plan.rounds - first
    trained = plan.images * rounds // plan.rounds
    evaluations = math.ceil(rounds / plan.settings.run.eval_every)
    return trained, trained + evaluations * tested / 3


def seconds_each(plan: Blueprint) -> float:
    """Seconds that training on one image of a run takes on the CPU, measured."""
    params = {**plan.parameters[0], **plan.parameters[1]}
    batch = plan.settings.train.batch_size
    return seconds_per_image(plan.model, params, plan.facts.input.shape, batch)


def seconds_per_image(
    model: Model, params: Mapping[str, Tensor], shape: Sequence[int], batch_size: int
) -> float:
    """Seconds that training on one image takes on the CPU, from one timed step of one client."""
    leaves = {n: t.unsqueeze(0).requires_grad_(t.is_floating_point()) for n, t in params.items()}

    def step(rows: int) -> float:
        began = time.perf_counter()
        outputs = model.apply(leaves, torch.zeros(1, rows, *shape))
        wanted = [t for t in leaves.values() if t.requires_grad]
        torch.autograd.grad(outputs.sum(), wanted, allow_unused=True)
        return (time.perf_counter() - began) / rows

    first = step(1)  # includes what torch does only once
    return step(1) if first > PATIENCE else step(batch_size)


def time_warning(plan: Blueprint, tested: int, first: int = 0) -> str | None:
    """A sentence about a run on the CPU that takes hours; none where it does not."""
    model, (trained, images) = plan.model, work(plan, tested, first)
    matrices = sum(math.prod(s) for s in model.shapes().values() if len(s) > 1)
    if 6.0 * matrices * (model.backbone.patches + 1) * images < POSSIBLY_LONG:
        return None
    each = seconds_each(plan)
    if each * images < LONG:
        return None
    return (
        f"This run will take about {each * images / 3600:,.0f} hours on this machine: it trains on "
        f"{trained:,} images, repetitions counted, at {1 / each:,.1f} images per second. A GPU, "
        "smaller images (data.image_size), a smaller model or fewer rounds (run.rounds) make it "
        "shorter. Ctrl-C stops it; finished rounds are kept."
    )


def scratch_warning(plan: Blueprint, images: int) -> str | None:
    """A sentence about a model of images that starts from nothing and has few of them, or none."""
    model, weights = plan.model, getattr(plan.settings.model.own, "weights", None)
    if weights is not None or model.backbone.takes is not InputSpec or images >= MANY_IMAGES:
        return None
    if model.num_parameters <= MANY_PARAMETERS * images:
        return None
    return (
        f"The model starts from random weights, with {model.num_parameters:,} parameters for "
        f"{images:,} training images; it will probably learn little. Start from pre-trained "
        "weights (model.weights; 'fedharmony models fetch NAME' brings them), or take a smaller "
        "model."
    )
