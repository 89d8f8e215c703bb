"""What a site does for a server, and what it refuses, before its data are touched.

The server's settings say how to train. They name no code, no file and no data of a site: sections
other than :data:`SECTIONS`, plug-ins and paths are refused, and files (weights, label texts) are
found by a name that the site itself gives to one of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge

from fedharmony.config import Tree, file_settings
from fedharmony.errors import ConfigError, PolicyError, nearest, shown
from fedharmony.experiments.settings import Settings, compose
from fedharmony.methods.base import Stage, methods
from fedharmony.models.base import models

#: Sections that a server may fill. Data, device and metrics are not its business.
SECTIONS = ("run", "model", "train", "loss", "augment", "federation", "privacy", "methods")


@dataclass(frozen=True)
class Policy:
    """What this site takes part in, and what it shares beside the model it trained.

    Attributes:
        methods: names of methods, or "all" that are installed here.
        statistics: names of statistics that may leave the site (a method that needs another one is
            refused, and the refusal names it), or "all".
        fewest_images: with fewer training images the site takes part in nothing: a model or a mean
            of very few images tells much about each. With fewer test images it measures nothing.
        evaluation: what the site tells of a model's scores on its own test images: nothing
            ("none"), how many lie in each of 4,096 intervals, label by label, and how labels go
            together ("histograms"), or all scores of each label in order ("scores").
    """

    methods: Literal["all"] | tuple[str, ...] = "all"
    statistics: Literal["all"] | tuple[str, ...] = ()
    fewest_images: Annotated[int, Ge(1)] = 1
    evaluation: Literal["none", "histograms", "scores"] = "histograms"

    def __post_init__(self) -> None:
        """Refuse misspelt methods: they would silently allow nothing."""
        for name in () if self.methods == "all" else self.methods:
            if name not in methods:
                raise PolicyError(
                    f"policy.methods names {name!r}, which is no method. "
                    f"{nearest(name, methods.names())}"
                )

    def refuse_method(self, name: str) -> None:
        """Refuse a method that this site does not take part in."""
        if self.methods != "all" and name not in self.methods:
            raise PolicyError(
                f"this site does not take part in method {shown(name)}; its policy allows "
                f"{', '.join(self.methods) or 'none'}"
            )

    def refuse_stages(self, stages: Iterable[Stage]) -> None:
        """Refuse stages whose statistics must not leave this site."""
        for sweep in (stage.sweep for stage in stages if stage.sweep is not None):
            if self.statistics != "all" and sweep.group not in self.statistics:
                raise PolicyError(
                    f"the method sends the statistic {sweep.group!r}, which policy.statistics of "
                    f"this site does not allow ({', '.join(self.statistics) or 'none'})"
                )

    def refuse_few(self, images: int) -> None:
        """Refuse to take part with fewer images than the site wants."""
        if images < self.fewest_images:
            raise PolicyError(
                f"this site has {images} training images and takes part only with "
                f"{self.fewest_images} or more (policy.fewest_images)"
            )

    def refuse_measuring(self, images: int) -> None:
        """Refuse to measure a model on this site's own test images."""
        if self.evaluation == "none":
            raise PolicyError("this site tells nothing of its test images (policy.evaluation)")
        if images < self.fewest_images:
            raise PolicyError(
                f"this site has {images} test images and measures models only with "
                f"{self.fewest_images} or more (policy.fewest_images)"
            )


def offered(settings: Settings) -> Tree:
    """What a server tells sites of its settings: how to train, and files by their names alone.

    Nothing from which the noise or the cohorts of a private run follow is among it.
    """
    if settings.run.plugins:
        raise ConfigError(
            "run.plugins cannot travel to sites. Install the plug-in at the server and at every "
            "site, name it there in FEDHARMONY_PLUGINS, and leave run.plugins out."
        )
    tree, method = settings.tree(), settings.method_name
    tree = {name: tree[name] for name in SECTIONS if name in tree}
    tree["privacy"] = {k: v for k, v in tree["privacy"].items() if k != "noise_seed"}
    chosen = _with_names(tree["methods"].get(method, {}), methods[method].Config)
    model = _with_names(tree["model"], models[settings.model.common.name].Config)
    return {**tree, "model": model, "methods": {method: chosen} if chosen else {}}


def accepted(tree: Mapping[str, Any], own: Tree, files: Mapping[str, str]) -> Settings:
    """The server's settings, completed by this site's own sections; what is not allowed is refused.

    Args:
        tree: as the server sent it.
        own: sections of this site.
        files: the site's own files by the names that servers may use.
    """
    sections = {}
    for name, section in tree.items():
        if name not in SECTIONS or not isinstance(section, Mapping):
            raise PolicyError(f"the settings hold {name!r}, which a server does not decide")
        sections[name] = dict(section)
    run, federation = sections.get("run", {}), sections.get("federation", {})
    if run.get("plugins"):
        raise PolicyError("the settings name plug-ins, and a server does not bring code to a site")
    if federation.get("central"):
        raise PolicyError("the settings train in one place (federation.central)")
    method = str(run.get("method", "")).partition(":")[0]
    chosen = dict(sections.get("methods", {}))
    if method in chosen and isinstance(chosen[method], Mapping):
        chosen[method] = _with_files(chosen[method], methods[method].Config, files)
    model = sections.get("model", {})
    if model.get("name") in models:
        model = _with_files(model, models[model["name"]].Config, files)
    return compose({**sections, "methods": chosen, "model": model, **own})


def _with_names(section: Mapping[str, Any], cls: type[Any]) -> Tree:
    """A section with the names of files in place of their paths."""
    files = {k: Path(section[k]).name for k in file_settings(cls) if section.get(k)}
    return {**section, **files}


def _with_files(section: Mapping[str, Any], cls: type[Any], files: Mapping[str, str]) -> Tree:
    """A section with this site's own files in place of the names that the server used."""
    result = dict(section)
    for key in file_settings(cls):
        if name := section.get(key):
            if name not in files:
                raise PolicyError(
                    f"the settings name the file {shown(name)} ({key}); the files that this site "
                    f"offers by name in [files] are: {', '.join(files) or 'none'}"
                )
            result[key] = files[name]
    return result
