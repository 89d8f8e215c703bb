"""Federated multi-label learning: FedHarmony and the methods it is compared with.

:func:`train`, :func:`compare` and :func:`load` are the interface for Python programs; they are
imported when they are first used, because torch takes seconds.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedharmony.api import Comparison as Comparison
    from fedharmony.api import Run as Run
    from fedharmony.api import compare as compare
    from fedharmony.api import load as load
    from fedharmony.api import train as train

__version__ = "0.1.0"
__all__ = ["Comparison", "Run", "__version__", "compare", "load", "train"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("fedharmony.api"), name)


def __dir__() -> list[str]:
    return __all__
