"""Writes the config files of the methods from their settings: ``configs/methods/NAME.toml``.

    python -m fedharmony.experiments.config_files

A file lists every setting with its default and the words of its docstring, so that nothing is said
twice. Defaults are comments: set, they would override the presets of the method. Run it after a
change of a method's ``Config``, ``presets``, ``search`` or docstrings; a test compares.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Literal, get_args, get_origin, get_type_hints

import fedharmony
from fedharmony.config import in_toml
from fedharmony.methods.base import Method, methods

WIDTH = 100


def config_file(name: str) -> str:
    """The text of a method's config file.

    >>> print(config_file("fedprox"))  # doctest: +ELLIPSIS
    # FedProx: a quadratic pull of each client towards the model it received.
    # Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, arXiv 1812.06127.
    # Use on top of any task:  fedharmony run demo methods/fedprox
    <BLANKLINE>
    [run]
    method = "fedprox"
    <BLANKLINE>
    [methods.fedprox]
    # μ, for the mean task loss; 0 is FedAvg.
    # mu = 0.01
    ...
    """
    method = methods[name]
    title, _, rest = (sys.modules[method.__module__].__doc__ or "").partition("\n\n")
    paper = re.match(r".*?arXiv\s[\d.]*\d", rest, re.DOTALL)
    lines = [*_comment(title), *_comment(f"{paper[0]}." if paper else "")]
    lines += [f"# Use on top of any task:  fedharmony run demo methods/{name}"]
    lines += ["", "[run]", _setting("method", name)]
    first = {k: v for k, v in next(iter(method.presets.values())).items() if k != "federation"}
    if settings := list(_settings(method.Config(**first))):
        lines += ["", f"[methods.{name}]", *settings]
    if method.search:
        lines += ["", f"[tune.{name}]", "# What `fedharmony tune` tries."]
        lines += [_setting(key, list(values)) for key, values in method.search.items()]
    return "\n".join(lines) + "\n"


def _settings(default: Method.Config) -> Iterator[str]:
    """Each setting behind its description, as a comment."""
    config = type(default)
    words, types = descriptions(config), get_type_hints(config)
    for field in fields(config):
        text, value = words[field.name], getattr(default, field.name)
        hint = types[field.name]
        options = [f'"{option}"' for option in get_args(hint) if get_origin(hint) is Literal]
        if not all(option in text for option in options):
            text += f" One of {', '.join(options)}."
        yield from _comment(text)
        shown = f"{field.name} = (left out)" if value is None else _setting(field.name, value)
        yield f"# {shown}"


def descriptions(config: type[object]) -> dict[str, str]:
    """What a settings dataclass, and those it is made from, say under ``Attributes:``.

    >>> class Config:
    ...     '''Settings.
    ...
    ...     Attributes:
    ...         mu: weight of the pull,
    ...             at least 0.
    ...         kind: ``"a"`` or "b".
    ...     '''
    >>> descriptions(Config)
    {'mu': 'weight of the pull, at least 0.', 'kind': '"a" or "b".'}
    """
    found: dict[str, str] = {}
    for cls in reversed(config.__mro__):  # what is inherited comes first, as with the fields
        _, _, listed = inspect.cleandoc(cls.__doc__ or "").partition("Attributes:\n")
        listed = re.split(r"\n(?=\S)", "\n" + listed)[0]  # what follows the list is not indented
        entries = re.findall(r"^    (\w+): (.*(?:\n {6,}.*)*)", listed, re.MULTILINE)
        found |= {name: " ".join(text.replace("``", "").split()) for name, text in entries}
    return found


def _comment(text: str) -> list[str]:
    return [f"# {line}" for line in textwrap.wrap(text, WIDTH - 2)]


def _setting(name: str, value: object) -> str:
    return f"{name} = {in_toml(value)}"


def write(folder: Path) -> None:
    """Write the file of every method of the package."""
    for name in methods.names():
        if methods[name].__module__ == f"fedharmony.methods.{name}":
            (folder / f"{name}.toml").write_text(config_file(name), encoding="utf-8")


if __name__ == "__main__":
    write(Path(fedharmony.__file__).parent / "configs" / "methods")
