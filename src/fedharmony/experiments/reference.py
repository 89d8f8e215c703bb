"""Every setting there is: its name, what it can be, its default and what it does.

    python -m fedharmony.experiments.reference docs/settings.md

writes the page of all settings. Everything is taken from the settings dataclasses and their
docstrings, so that nothing is said twice; a test compares page and dataclasses.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from annotated_types import Ge, Gt, Le, Lt, MinLen

from fedharmony.config import FilePath, NameOf, in_toml
from fedharmony.experiments.config_files import descriptions
from fedharmony.experiments.settings import COMPONENTS, PLAIN, Settings
from fedharmony.methods.base import methods

#: How an end of a range is written.
SIGNS: Mapping[type[object], str] = {Ge: "≥", Gt: ">", Le: "≤", Lt: "<"}
KINDS = {bool: "true or false", int: "whole number", float: "number", str: "text"}


@dataclass(frozen=True)
class Setting:
    """One setting, for instance ``train.lr``: what it can be, its default, and what it does.

    ``owner`` is the data set, splitter, model or method that has it; empty where all do.
    """

    name: str
    owner: str
    kind: str
    default: Any
    about: str

    @property
    def summary(self) -> str:
        """The first sentence of what it does.

        >>> Setting("a", "", "", None, 'none, e.g. "x.y": one thing. Another.').summary
        'none, e.g. "x.y": one thing.'
        """
        return re.split(r"(?<=[^.]\w\.|.[)\"\]]\.) (?=[A-Z])", self.about)[0]

    @property
    def value(self) -> str:
        """The default as TOML."""
        return "" if self.default is None else in_toml(self.default)


def all_settings() -> Iterator[Setting]:
    """Every setting of the package and of plug-ins, section by section."""
    for section in Settings.__dataclass_fields__:
        if section in PLAIN:
            yield from settings_of(PLAIN[section], section)
        elif section in COMPONENTS:
            choice = COMPONENTS[section]
            for setting in settings_of(choice.common, section):
                chosen = setting.name == f"{section}.name"
                yield replace(setting, kind=", ".join(choice.names())) if chosen else setting
            for name in choice.names():
                yield from settings_of(choice.own(name), section, name)
        elif section == "methods":
            for name in methods.names():
                yield from settings_of(methods[name].Config, f"methods.{name}", name)


def settings_of(config: type[Any], section: str, owner: str = "") -> Iterator[Setting]:
    """The settings of one dataclass."""
    hints, about = get_type_hints(config, include_extras=True), descriptions(config)
    for field in fields(config):
        if field.init:
            default = None if field.default is MISSING else field.default
            words = about.get(field.name, "")
            yield Setting(
                f"{section}.{field.name}", owner, kind_of(hints[field.name]), default, words
            )


def kind_of(hint: Any) -> str:
    """What a setting of this type can be, in words.

    >>> kind_of(Annotated[int, Ge(1), Le(1000)] | None)
    'whole number ≥ 1, ≤ 1,000, or none'
    >>> kind_of(tuple[Annotated[float, Gt(0)], ...]), kind_of(Literal["a", "b"])
    ('list of number > 0', '"a", "b"')
    >>> kind_of(tuple[float, float, float]), kind_of(FilePath)
    ('list of 3 × number', 'file')
    """
    if hint == FilePath:
        return "file"
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        ends = [
            f"{SIGNS[type(mark)]} {_number(getattr(mark, type(mark).__name__.lower()))}"
            for mark in inner[1:]
            if type(mark) in SIGNS
        ]
        for mark in inner[1:]:
            if isinstance(mark, NameOf):
                return ", ".join(map(in_toml, mark.names()))
        least = [", not empty" for mark in inner[1:] if isinstance(mark, MinLen)]
        return " ".join([kind_of(inner[0]), ", ".join(ends)]).strip() + "".join(least)
    if origin is Literal:
        return ", ".join(map(in_toml, inner))
    if origin in (Union, UnionType):
        kinds = [kind_of(part) for part in inner if part is not NoneType]
        return ", or ".join([*kinds, "none"] if NoneType in inner else kinds)
    if origin is tuple:
        many = inner[-1] is Ellipsis
        return (
            f"list of {kind_of(inner[0])}"
            if many
            else f"list of {len(inner)} × {kind_of(inner[0])}"
        )
    return KINDS.get(hint, str(hint))


def _number(value: float) -> str:
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def matching(pattern: str) -> list[Setting]:
    """The settings with ``pattern`` in their name or owner, or at the start of a word about them.

    >>> [setting.name for setting in matching("lr")]
    ['train.lr', 'train.schedule', 'tune.lr']
    """
    word = re.compile(rf"\b{re.escape(pattern)}", re.IGNORECASE)
    wanted = pattern.lower()
    return [s for s in all_settings() if wanted in f"{s.name} {s.owner}" or word.search(s.about)]


# The page -----------------------------------------------------------------------------------------

HEAD = """\
# Settings

<!-- Written by `python -m fedharmony.experiments.reference docs/settings.md`: do not edit. -->

Settings stand in TOML files and on the command line as `section.key=value`; from Python they are
`settings={"section.key": value}`. Files and changes come in layers
([how](architecture.md#settings)).

```sh
fedharmony show demo train.lr=0.01     # every value, and where it comes from
fedharmony list settings lr            # the settings that have to do with lr
fedharmony run demo --dry-run          # check everything, train nothing
```

Where no default is given, the setting is left out. A setting of a data set, splitter, model or
method exists only where that one is chosen. A method's section may also hold a part of `[train]`
and `[federation]` for itself, for instance `[methods.fedprox.train]`; `[tune.NAME]` lists values
that `fedharmony tune` tries for the settings of a method.
"""
TABLE = "\n| setting | values | default | |\n| --- | --- | --- | --- |\n"


def page() -> str:
    """The page of all settings, in Markdown."""
    text, chapters = HEAD, set[str]()
    ours = filter(_is_ours, all_settings())
    for (section, owner), group in groupby(ours, lambda s: (s.name.rpartition(".")[0], s.owner)):
        chapter = section.partition(".")[0]
        if chapter not in chapters:
            chapters.add(chapter)
            text += f"\n## `[{chapter}]`\n"
        if owner:
            text += f"\n### `{section}`" + (
                f' with `name = "{owner}"`\n' if chapter == section else "\n"
            )
        text += TABLE + "".join(map(_row, group))
    return text


def _row(setting: Setting) -> str:
    default = f"`{setting.value}`" if setting.value else ""
    cells = (f"`{setting.name.rpartition('.')[2]}`", setting.kind, default, setting.about)
    return f"| {' | '.join(map(_cell, cells))} |\n"


def _is_ours(setting: Setting) -> bool:
    """Whether a setting belongs to the package, and to no plug-in."""
    section, owner = setting.name.partition(".")[0], setting.owner
    if not owner:
        return True
    config = methods[owner].Config if section == "methods" else COMPONENTS[section].own(owner)
    return config.__module__.startswith("fedharmony.")


def _cell(text: str) -> str:
    """Text that stays in its cell and is not taken for a tag."""
    return text.replace("|", r"\|").replace("<", "&lt;")


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
