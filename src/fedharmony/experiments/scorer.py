"""A global model that scores images: the same code for the test set, new images and exports."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedharmony import stopping
from fedharmony.data.base import Images
from fedharmony.methods.base import Method
from fedharmony.models.base import Model
from fedharmony.types import BUFFERS, FROZEN, PARAMS, Groups, Record, Tensors

#: Images that are scored at a time.
BATCH = 256


@dataclass(frozen=True, eq=False)
class Scorer:
    """Images as they are to scores in [0, 1], by the model in the state, as the method says.

    ``given`` is what the method's normalisation reads; none takes it from the state.
    """

    model: Model
    method: Method
    state: Record
    given: Groups | None = None

    @cached_property
    def parameters(self) -> Tensors:
        """All tensors of the model, as those of a stack of one client.

        In one memory order, whether the state comes from clients or from a file: products of
        transposed matrices have other last bits.
        """
        groups = [self.state.get(group) for group in (PARAMS, FROZEN, BUFFERS)]
        return {n: t.contiguous().unsqueeze(0) for group in groups for n, t in group.items()}

    @cached_property
    def message(self) -> Groups:
        """What the method's normalisation reads beside the images."""
        return self.method.evaluation(self.state) if self.given is None else self.given

    @torch.no_grad()
    def __call__(self, images: Tensor) -> Tensor:
        """Scores (B, C) of images (B, channels, H, W) uint8, or of feature vectors (B, F)."""
        inputs = self.method.normalise(images, self.message, {})
        outputs = self.model.apply(self.parameters, inputs.unsqueeze(0))[0]
        return self.method.predict(outputs.float(), self.state)

    def all(self, images: Images, device: torch.device) -> npt.NDArray[np.float32]:
        """Scores (N, C) of all images, some at a time."""
        batches = torch.split(torch.arange(len(images)), BATCH)
        scores = []
        for index in batches:
            stopping.end_if_asked()
            scores.append(self(images.gather(index, device)).float().cpu())
        return torch.cat(scores).numpy()
