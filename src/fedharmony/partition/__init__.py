"""Dividing training images among clients, and measuring what a division does."""

from fedharmony.partition.base import Partition, Splitter, splitters
from fedharmony.partition.report import SplitReport, split_report

__all__ = ["Partition", "SplitReport", "Splitter", "split_report", "splitters"]
