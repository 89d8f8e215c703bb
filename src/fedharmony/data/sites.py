"""Data that are at sites: a server knows their labels and the size of their images, no more."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from annotated_types import Ge, Le

from fedharmony.data.base import DataSet, LabelledImages, Source, TensorImages, datasets
from fedharmony.errors import ConfigError, DataError


@datasets.register("sites")
class AtSites(Source):
    """Images that stay at the sites of a federation, test images too (`fedharmony flower run`)."""

    @dataclass(frozen=True)
    class Config(Source.Config):
        """What all sites agree on.

        Attributes:
            classes: the federation's labels, in its order.
            image_size: height and width of images, in pixels.
        """

        classes: tuple[str, ...] = ()
        image_size: Annotated[int, Ge(1), Le(4096)] = 224

    config: Config

    def load(self) -> DataSet:
        """There is nothing to load."""
        raise DataError(
            "data.name = 'sites' says that all images are at sites, and none are here. Start the "
            "run with 'fedharmony flower run', or name a data set."
        )

    def vocabulary(self) -> DataSet:
        """A data set without images."""
        if not self.config.classes:
            raise ConfigError("data.classes must name the labels of the federation, in its order.")
        side, count = self.config.image_size, len(self.config.classes)
        images = TensorImages(torch.zeros(0, 3, side, side, dtype=torch.uint8))
        part = LabelledImages(images, np.zeros((0, count), np.uint8))
        return DataSet(self.name, self.config.classes, part, part)
