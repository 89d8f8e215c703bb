"""Named components: methods, datasets, splitters, models.

A component is one class in one file. The decorator names it; every module of the package folder is
imported when a registry is first used, so adding a file is enough. A file outside the package is
found through ``--plugin FILE``, the setting ``run.plugins``, or the variable
``FEDHARMONY_PLUGINS`` (paths separated like ``PATH``).

>>> shapes: Registry[type] = Registry("shape", "fedharmony.data")
>>> @shapes.register("square")
... class Square:
...     '''Four equal sides.'''
>>> shapes["square"] is Square, shapes.summary("square")
(True, 'Four equal sides.')
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Generic, TypeVar

from fedharmony.errors import ConfigError, nearest
from fedharmony.reading import is_file, user_path

T = TypeVar("T", bound=type[Any])

_PLUGIN = "fedharmony_plugin_"


class Registry(Generic[T]):
    """Components of one kind by name."""

    def __init__(self, kind: str, package: str) -> None:
        self.kind = kind
        self._package = package
        self._items: dict[str, T] = {}
        self._imported = False

    def register(self, name: str) -> Callable[[T], T]:
        """Class decorator: make the class known under ``name``."""

        def add(cls: T) -> T:
            both = (self._items.get(name, cls), cls)
            known, new = (f"{kind.__module__}.{kind.__qualname__}" for kind in both)
            if known != new:
                raise ConfigError(
                    f"Two classes want to be the {self.kind} {name!r}: {known} and {new}. "
                    "Rename one."
                )
            if inspect.isabstract(cls):
                missing = ", ".join(sorted(cls.__abstractmethods__))
                raise ConfigError(f"The {self.kind} {name!r} lacks {missing}.")
            config = getattr(cls, "Config", None)
            if config is not None and "__dataclass_fields__" not in vars(config):
                raise ConfigError(
                    f"The Config of the {self.kind} {name!r} needs @dataclass(frozen=True)."
                )
            cls.name = name
            self._items[name] = cls
            return cls

        return add

    def _import_package(self) -> None:
        if self._imported:
            return
        self._imported = True  # what is imported may ask this registry
        try:
            package = importlib.import_module(self._package)
            for module in pkgutil.iter_modules(package.__path__, package.__name__ + "."):
                importlib.import_module(module.name)
            load_plugins(filter(None, os.environ.get("FEDHARMONY_PLUGINS", "").split(os.pathsep)))
        except BaseException:
            self._imported = False
            raise

    def names(self) -> list[str]:
        """All names, sorted."""
        self._import_package()
        return sorted(self._items)

    def __contains__(self, name: object) -> bool:
        self._import_package()
        return name in self._items

    def __getitem__(self, name: str) -> T:
        self._import_package()
        if name not in self._items:
            raise ConfigError(f"There is no {self.kind} {name!r}. {nearest(name, self._items)}")
        return self._items[name]

    def summary(self, name: str) -> str:
        """The first line of a component's docstring; empty without one."""
        return (self[name].__doc__ or "").strip().partition("\n")[0]


def load_plugins(files: Iterable[str | Path]) -> None:
    """Import Python files that register components; each file is imported once."""
    for file in files:
        path = Path(os.path.realpath(user_path(file)))
        name = _PLUGIN + hashlib.sha256(str(path).encode(errors="surrogateescape")).hexdigest()
        if name in sys.modules:
            continue
        if not is_file(path):
            raise ConfigError(f"The plug-in {path} does not exist. Check the path you passed.")
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ConfigError(
                f"The plug-in {path} is not a Python file (its name must end in .py)."
            )
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            del sys.modules[name]
            place = plugin_place(error) or f"plug-in {path}"
            raise ConfigError(
                f"The {place} could not be imported: {type(error).__name__}: {error}"
            ) from error


def plugin_place(error: BaseException | None) -> str:
    """The plug-in from which an error came, and its line; empty where no plug-in took part."""
    while error is not None:
        for frame, line in reversed([*traceback.walk_tb(error.__traceback__)]):
            if str(frame.f_globals.get("__name__")).startswith(_PLUGIN):
                return f"plug-in {frame.f_code.co_filename}, line {line}"
        error = error.__cause__ or error.__context__
    return ""


def plugins() -> list[str]:
    """The files of the plug-ins of this process."""
    loaded = (module for name, module in sys.modules.items() if name.startswith(_PLUGIN))
    return [str(module.__file__) for module in loaded]
