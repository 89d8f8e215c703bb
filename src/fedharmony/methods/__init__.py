"""Federated methods, one file each. ``methods.names()`` lists them."""

from fedharmony.methods.base import Method, methods

__all__ = ["Method", "methods"]
