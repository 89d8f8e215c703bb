"""Data sets: labelled images behind one small interface."""

from fedharmony.data.base import (
    DataSet,
    Images,
    LabelledImages,
    Source,
    TensorImages,
    cache_folder,
    datasets,
)

__all__ = [
    "DataSet",
    "Images",
    "LabelledImages",
    "Source",
    "TensorImages",
    "cache_folder",
    "datasets",
]
