"""SphereFed: unit features and one frozen orthonormal classifier for everybody.

Dong et al., "SphereFed: Hyperspherical Federated Learning", ECCV 2022, arXiv 2207.09413. Idea:
local classifiers drift apart on skewed data; with one fixed classifier all clients learn towards
the same directions, and a closed-form calibration fits the classifier at the end, without training.

====================================================  ============================
``z = φ/‖φ‖``, ``o = W z``, ``W Wᵀ = I`` frozen       ``SphereHead``
``‖W z − y/max(1, ‖y‖)‖²``                            ``loss``
``A_k = Z̃_kᵀ Z̃_k``, ``B_k = Z̃_kᵀ Y_k``, Z̃ = [Z, 1]    ``sums``
``W*ᵀ = (Σ A_k + ρI)⁻¹ Σ B_k``                        ``calibrate``
====================================================  ============================

Deviation: the paper is single-label. With k positives and orthonormal rows a score cannot exceed
1/√k where all positives score alike, so the target of variant ``s1`` is the label vector scaled to
length 1. Its decisions need the calibration, which fits the raw 0/1 labels and an intercept.
Deviation: unknown labels leave the training loss but count as absent in the calibration; leaving
them out would need one Gram matrix per label. No official code is known.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from annotated_types import Ge, Gt
from torch import Tensor

from fedharmony.correlation import pack_upper, unpack_upper
from fedharmony.errors import ConfigError, NumericalError
from fedharmony.losses import Batch, task_loss
from fedharmony.methods.base import Method, Outcome, Stage, Sweep, methods, stacked, zeros
from fedharmony.models.heads import SphereHead
from fedharmony.solve import solve_spd
from fedharmony.types import FROZEN, Form, Group, Groups, Messages, Record, Replies, Tensors

logger = logging.getLogger(__name__)

SUMS = "sums"  # reply of "calibrate": A_k and B_k
COUNTS = "counts"  # reply of "count": labels and images of a client


@methods.register("spherefed")
class SphereFed(Method):
    """Unit features, a frozen orthonormal head, closed-form calibration (Dong et al., 2022)."""

    @dataclass(frozen=True)
    class Config(Method.Config):
        """Settings of SphereFed.

        Attributes:
            variant: "s1": squared error to the scaled label vector, calibrated after the last
                round; "s2": the task loss on ``scale · W z − scale/4``, not calibrated.
            ridge: ρ of the calibration, in units of the mean diagonal entry of Σ A_k; the intercept
                is penalised like every other coefficient.
            scale: of "s2".
            projection: width of a trained linear map from features to the sphere, for more labels
                than features; none uses the features as they are.
        """

        variant: Literal["s1", "s2"] = "s1"
        ridge: Annotated[float, Gt(0)] = 1e-3
        scale: Annotated[float, Gt(0)] = 16.0
        projection: Annotated[int, Ge(1)] | None = None

    config: Config

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {"s1": {}, "s2": {"variant": "s2"}}
    search: ClassVar[Mapping[str, Sequence[Any]]] = {"variant": ("s1", "s2")}

    def head(self, width: int) -> SphereHead:
        """The frozen classifier; more labels than dimensions cannot have orthonormal rows."""
        sphere = self.config.projection or width
        if self.task.classes > sphere:
            raise ConfigError(
                f"SphereFed needs as many feature dimensions as labels: {self.task.classes} labels "
                f"cannot have orthonormal directions in {sphere} dimensions. Set "
                f"methods.spherefed.projection = {self.task.classes} to learn a linear map of the "
                "features to a wider sphere, or use a wider backbone."
            )
        return SphereHead(width, self.task.classes, self.config.projection)

    def stages(self, round: int) -> Sequence[Stage]:
        """``update``; before the first, everyone counts labels; after the last, all calibrate."""
        stages = [*super().stages(round)]
        if self.config.variant == "s2":
            return stages
        if round == 0:
            stages.insert(0, Stage("count", self.ask, self.count, False, self.counts(), True))
        if round == self.task.rounds - 1:
            stages.append(
                Stage("calibrate", self.broadcast, self.calibrate, False, self.sums(), True)
            )
        return stages

    # -- client ------------------------------------------------------------------------------------

    @stacked
    def loss(
        self, outputs: Tensor, batch: Batch, message: Groups, carry: Tensors
    ) -> tuple[Tensor, Tensors]:
        """``‖W z − y/max(1, ‖y‖)‖²`` per image, over its known labels; "s2": the task loss."""
        if self.config.variant == "s2":
            return task_loss(self.task.loss, self._logits(outputs), batch), carry
        positives = (batch.labels * (batch.counted > 0)).to(outputs.dtype)
        length = positives.sum(-1, keepdim=True).sqrt().clamp(min=1.0)
        errors = (outputs - positives / length).square() * batch.counted
        return errors.sum((-2, -1)) / batch.rows.sum(-1).clamp(min=1.0), carry

    def _logits(self, cosines: Tensor) -> Tensor:
        scale: float = self.config.scale
        return scale * (cosines - 0.25)

    def counts(self) -> Sweep:
        """How many labels and images a client has: two numbers."""

        def start(params: Group) -> Tensors:
            return {"labels": torch.zeros(()), "images": torch.zeros(())}

        def fold(carry: Tensors, labels: Tensor, batch: Batch) -> Tensors:
            found = (labels * (batch.counted > 0)).sum()
            return {"labels": carry["labels"] + found, "images": carry["images"] + batch.rows.sum()}

        return Sweep(
            COUNTS,
            "labels",
            start,
            fold,
            lambda carry, params: carry,
            lambda params: {"labels": Form((), low=0), "images": Form((), low=0)},
        )

    def sums(self) -> Sweep:
        """``A_k = Z̃ᵀZ̃`` (its upper triangle) and ``B_k = Z̃ᵀY`` with Z̃ = [Z, 1]; and ``Σ ‖φ‖``.

        In float64. The last diagonal entry of A_k is the number of images.
        """
        size, classes = (self.config.projection or self.task.width) + 1, self.task.classes
        forms = {
            "a": Form((size * (size + 1) // 2,), torch.float64),
            "b": Form((size, classes), torch.float64),
            "norm": Form((), torch.float64, low=0),
        }

        def fold(carry: Tensors, features: Tensor, batch: Batch) -> Tensors:
            features, rows = features.double(), batch.rows.double()
            z = F.normalize(features, dim=-1)
            z = torch.cat([z, torch.ones_like(z[:, :1])], dim=-1) * rows.unsqueeze(-1)
            y = (batch.labels * (batch.counted > 0)).double()
            return {
                "a": carry["a"] + z.mT @ z,
                "b": carry["b"] + z.mT @ y,
                "norm": carry["norm"] + features.norm(dim=-1) @ rows,
            }

        return Sweep(
            SUMS,
            "features",
            zeros(a=(size, size), b=(size, classes), norm=()),
            fold,
            lambda carry, params: {**carry, "a": pack_upper(carry["a"])},
            lambda params: forms,
        )

    # -- server ------------------------------------------------------------------------------------

    def count(self, state: Record, round: int, sent: Messages, replies: Replies) -> Outcome:
        """k̂, the mean number of labels per image: the cosine's threshold is 0.5/√k̂."""
        labels = images = 0.0
        for reply in replies:
            labels += float(reply.record.get(COUNTS)["labels"])
            images += float(reply.record.get(COUNTS)["images"])
        mean = labels / images if images else 1.0
        return Outcome(state.replace(scalars={"labels_per_image": mean}))

    def calibrate(self, state: Record, round: int, sent: Messages, replies: Replies) -> Outcome:
        """``W*ᵀ = (Σ A_k + ρI)⁻¹ Σ B_k``; a label nobody has keeps its fixed direction.

        Logs the mean of ‖φ‖, which nothing bounds: the cosines do not depend on it, but the steps
        on the sphere shrink as it grows.
        """
        total: Tensors = {}
        for reply in replies:
            for name, tensor in reply.record.get(SUMS).items():
                total[name] = total[name] + tensor if name in total else tensor
        if not total:
            return Outcome(state)
        size = len(total["b"])
        gram = unpack_upper(total["a"], size)
        ridge = self.config.ridge * gram.diagonal().mean()
        try:
            solved = solve_spd(gram + ridge * torch.eye(size).to(gram), total["b"]).mT
        except NumericalError as error:
            logger.warning("The classifier stays uncalibrated: %s", error)
            return Outcome(state, log={"not_calibrated": 1.0})
        seen = total["b"][-1] > 0  # the constant's row counts each label's positives
        fixed = state.get(FROZEN)
        fitted = {
            "head.weight": torch.where(seen[:, None], solved[:, :-1], fixed["head.weight"]),
            "head.bias": torch.where(seen, solved[:, -1], fixed["head.bias"]),
        }
        fitted = {name: tensor.to(fixed[name].dtype) for name, tensor in fitted.items()}
        log = {"feature_norm": float(total["norm"] / gram[-1, -1])}
        return Outcome(state.replace({FROZEN: {**fixed, **fitted}}, {"calibrated": True}), log=log)

    def predict(self, outputs: Tensor, state: Record) -> Tensor:
        """``σ(4 (ŷ − t))``: order kept, 0.5 at the threshold t, and slope 1 there.

        Calibrated scores decide at t = 0.5, cosines (before calibration) at t = 0.5/√k̂. "s2" has
        logits.
        """
        if self.config.variant == "s2":
            return self._logits(outputs).sigmoid()
        threshold = 0.5
        if not state.scalars.get("calibrated"):
            labels = float(state.scalars.get("labels_per_image", 1.0))
            threshold /= math.sqrt(max(labels, 1.0))
        return (4 * (outputs - threshold)).sigmoid()
