"""Client-stacked models: backbones (one file each) and heads. ``models.names()`` lists them."""

from fedharmony.models.base import (
    Backbone,
    FeatureSpec,
    Head,
    InputSpec,
    Model,
    models,
    stack,
    unstack,
)

__all__ = [
    "Backbone",
    "FeatureSpec",
    "Head",
    "InputSpec",
    "Model",
    "models",
    "stack",
    "unstack",
]
