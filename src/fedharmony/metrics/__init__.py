"""Metrics of a run: the eight recognition numbers, and how well label correlations are kept."""

from fedharmony.metrics.multilabel import (
    METRIC_NAMES,
    ClientsResult,
    MetricOptions,
    MultiLabelResult,
    average_precision,
    evaluate,
    evaluate_clients,
    trivial_baselines,
)
from fedharmony.metrics.structure import StructureResult, structure_metrics
from fedharmony.metrics.thresholds import best_thresholds

__all__ = [
    "METRIC_NAMES",
    "ClientsResult",
    "MetricOptions",
    "MultiLabelResult",
    "StructureResult",
    "average_precision",
    "best_thresholds",
    "evaluate",
    "evaluate_clients",
    "structure_metrics",
    "trivial_baselines",
]
