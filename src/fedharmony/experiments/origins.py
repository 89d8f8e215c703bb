"""The settings of a run as a config file that says where each value comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fedharmony.config import flat, in_toml, keys
from fedharmony.experiments.settings import (
    COMPONENTS,
    PLAIN,
    Layer,
    Settings,
    combine,
    compose,
)
from fedharmony.methods.base import methods

DEFAULT = "default"


def show(layers: Sequence[Layer]) -> Iterator[tuple[str, str]]:
    """Lines of TOML, each with the place that its value comes from.

    The lines are a config file themselves, with the same meaning as all layers together. Settings
    that are left out stand there as comments.
    """
    tree, origins = combine(layers)
    settings = compose(tree)
    preset, values = settings.preset
    chosen = flat({"methods": {settings.method_name: values}})
    sources = {**dict.fromkeys(chosen, f"preset {preset}"), **origins}
    for section, values in _sections(settings).items():
        yield f"[{section}]", ""
        for key, value in values.items():
            yield f"{key} = {in_toml(value)}", sources.get(f"{section}.{key}", DEFAULT)
        for key in _names(section, settings):
            if key not in values:
                yield f"# {key} = (left out)", DEFAULT
        yield "", ""


def _sections(settings: Settings) -> dict[str, dict[str, object]]:
    """Values by section and key; sections may be nested (``methods.fedprox.train``)."""
    sections: dict[str, dict[str, object]] = {}
    for name, value in flat(settings.tree()).items():
        section, _, key = name.rpartition(".")
        sections.setdefault(section, {})[key] = value
    return sections


def _names(section: str, settings: Settings) -> Sequence[str]:
    """All keys of a section, as far as it is known what they are."""
    if section in PLAIN:
        return keys(PLAIN[section])
    if section in COMPONENTS:
        component = getattr(settings, section)
        return [*keys(type(component.common)), *keys(type(component.own))]
    if section == f"methods.{settings.method_name}":
        return keys(methods[settings.method_name].Config)
    return ()
