"""Run folders that an earlier version wrote: what is finished opens, what is not is refused.

Every setting is written down in ``config.toml``, those too that are gone by now, or had values that
are refused now. A finished run does without them: they decided on training alone. A refused value
that decides on the model, its inputs or its thresholds is never passed over.
"""

from __future__ import annotations

import hashlib
import json

from fedharmony.config import SettingError, Tree, checked, flat, keys
from fedharmony.experiments.settings import COMPONENTS, PLAIN
from fedharmony.methods.base import methods

#: Sections that a finished run no longer needs; the default takes the place of a refused value.
TRAINING = [PLAIN[name] for name in ("train", "loss", "augment", "federation", "attack", "privacy")]


def outdated(tree: Tree) -> Tree:
    """The settings of a run that this version refuses, by their dotted names."""
    values = flat(tree)
    return {name: value for name, value in values.items() if _refused(name, value, values)}


def _refused(name: str, value: object, values: Tree) -> bool:
    section, _, key = name.rpartition(".")
    for cls in _classes(section, values):
        if key in getattr(cls, "REMOVED", {}):
            return True
        if cls in TRAINING and key in keys(cls) and not section.startswith("tune."):
            try:
                checked(cls, {key: value})
            except SettingError:
                return True
    return False


def _classes(section: str, values: Tree) -> list[type[object]]:
    """The settings classes of a section: ``data``, ``methods.NAME``, ``methods.NAME.train``, …."""
    if choice := COMPONENTS.get(section):
        chosen = values.get(f"{section}.name")
        return [choice.common, *(choice.own(name) for name in choice.names() if name == chosen)]
    _, _, below = section.partition(".")
    if below in methods.names():
        return [methods[below].Config]
    _, _, part = below.partition(".")
    return [PLAIN[name] for name in (section, part) if name in PLAIN]


def sha256(tree: Tree) -> str:
    """The hash of a run's settings in versions where labels, and what else is kept, counted too."""
    sections = {name: part for name, part in tree.items() if name not in ("engine", "tune")}
    sections["run"] = {key: v for key, v in tree.get("run", {}).items() if key != "track"}
    method = str(sections["run"].get("method")).partition(":")[0]
    sections["methods"] = tree.get("methods", {}).get(method, {})
    return hashlib.sha256(json.dumps(sections, sort_keys=True).encode()).hexdigest()
