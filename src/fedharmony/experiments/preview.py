"""A split without a run: who would hold what. Labels are read, images are not."""

from __future__ import annotations

from dataclasses import dataclass

from fedharmony.experiments.build import contents, draw_partition
from fedharmony.experiments.settings import Settings
from fedharmony.partition.base import Partition
from fedharmony.partition.report import SplitReport, split_report
from fedharmony.types import Labels


@dataclass(frozen=True, eq=False)
class Preview:
    """A split, and what it does to the labels (N, C) of the training images."""

    classes: tuple[str, ...]
    labels: Labels
    partition: Partition
    report: SplitReport


def preview(settings: Settings) -> Preview:
    """The split that a run with these settings would use."""
    data = contents(settings)
    labels = data.train.labels
    partition = draw_partition(settings, labels, data.train.users)
    return Preview(
        data.classes, labels, partition, split_report(labels, partition, settings.split.common.seed)
    )
