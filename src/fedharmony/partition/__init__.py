"""Dividing training images among clients, and measuring what a division does."""

from fedharmony.partition.annotation import client_known
from fedharmony.partition.base import Partition, Splitter, splitters
from fedharmony.partition.feature_skew import feature_skew, skewed_images
from fedharmony.partition.report import SplitReport, split_report

__all__ = [
    "Partition",
    "SplitReport",
    "Splitter",
    "client_known",
    "feature_skew",
    "skewed_images",
    "split_report",
    "splitters",
]
