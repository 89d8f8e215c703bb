"""Client-stacked models: backbones (one file each) and heads. ``models.names()`` lists them."""

from fedharmony.models.base import Backbone, Head, InputSpec, Model, models, stack, unstack

__all__ = ["Backbone", "Head", "InputSpec", "Model", "models", "stack", "unstack"]
