"""The picture of a split, as a file of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedharmony.correlation import label_correlation
from fedharmony.partition.base import Partition
from fedharmony.partition.report import label_shares, paired_labels
from fedharmony.report.order import LabelOrder, spectral_order
from fedharmony.report.panels.clients import client_picture
from fedharmony.report.standalone import standalone
from fedharmony.types import Labels


def split_picture(labels: Labels, partition: Partition, classes: Sequence[str]) -> str:
    """Images per client and label shares, as an SVG file that follows light and dark."""
    paired = paired_labels(labels)
    shares = label_shares(labels, partition)[:, paired]
    matrix, _ = label_correlation(labels[:, paired])
    classes = [classes[i] for i in paired]
    order = LabelOrder(spectral_order(matrix.numpy().astype(np.float64)))
    sizes = partition.sizes.astype(np.float64)
    return standalone(client_picture(sizes, shares, order, classes, partition.names))
