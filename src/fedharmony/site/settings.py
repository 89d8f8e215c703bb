"""``site.toml``: what a site is called, which data it has, and what it takes part in.

============  =====================================================================================
``site``      name, the federation's labels, which of them are annotated here, socket and memory
``data``      ``name`` of the loader and its own settings, as in a run
``labels``    the site's own name of a label = the federation's
``files``     names that a server may use = files of this site (weights, label texts)
``policy``    methods that the site takes part in, statistics that may leave it
``engine``    device and threads
============  =====================================================================================

Paths are relative to the file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from annotated_types import Ge, Le
from pydantic import AfterValidator

from fedharmony.config import Tree, build, file_settings, read_toml
from fedharmony.data.base import Source, datasets
from fedharmony.errors import ConfigError, nearest, shown
from fedharmony.experiments.settings import DATA, Component, DataSettings, EngineSettings
from fedharmony.reading import is_there, user_path
from fedharmony.site.labels import Vocabulary
from fedharmony.site.policy import Policy

#: A Unix socket's address has room for so many bytes.
LONGEST_SOCKET = 100


def site_name(text: str) -> str:
    """The name of a site, which files, keys and messages carry; any other is a ValueError."""
    if not re.fullmatch(r"[a-z0-9][a-z0-9_.-]{0,62}", text):
        raise ValueError(
            "use up to 63 small letters (a-z), digits, '-', '_' and '.', a letter or digit first"
        )
    return text


@dataclass(frozen=True)
class SiteSection:
    """The site itself.

    Attributes:
        name: as the operator of the federation registered it.
        classes: the federation's labels, in its order; a server with others is refused.
        annotated: those that are annotated here; none takes all that the data have.
        socket: where the worker listens.
        memory: the folder of what the site keeps between rounds.
        parcel_mb: the most that is taken from a server at once.
    """

    name: Annotated[str, AfterValidator(site_name)]
    classes: tuple[str, ...]
    annotated: tuple[str, ...] | None = None
    socket: str = "worker.sock"
    memory: str = "memory"
    parcel_mb: Annotated[int, Ge(1), Le(1 << 20)] = 4096

    def __post_init__(self) -> None:
        """Refuse a vocabulary that is none."""
        if not self.classes or len(set(self.classes)) < len(self.classes):
            raise ConfigError("site.classes must name every label of the federation once.")


@dataclass(frozen=True)
class SiteSettings:
    """All sections of a ``site.toml``."""

    site: SiteSection
    data: Component[DataSettings, Source.Config]
    vocabulary: Vocabulary
    files: Mapping[str, str]
    policy: Policy
    engine: EngineSettings
    folder: Path

    @property
    def socket(self) -> Path:
        """Where the worker listens."""
        return self.folder / self.site.socket

    @property
    def memory(self) -> Path:
        """What the site keeps between rounds, one folder per run."""
        return self.folder / self.site.memory

    def own_sections(self) -> Tree:
        """The sections of a run that this site decides."""
        engine = {k: v for k, v in vars(self.engine).items() if v is not None}
        return {"data": self.data.tree(), "engine": engine}


def load_site(file: str | Path) -> SiteSettings:
    """Read and check a ``site.toml``; whatever is wrong is a ConfigError."""
    path = user_path(file).absolute()
    tree, folder = read_toml(path), path.parent
    sections = ("site", "data", "labels", "files", "policy", "engine")
    for name, section in tree.items():
        if name not in sections:
            raise ConfigError(f"{path}: unknown section [{name}]. {nearest(name, sections)}")
        if not isinstance(section, Mapping):
            raise ConfigError(f"{path}: {name} must be a section, [{name}].")
    part = {name: dict(tree.get(name, {})) for name in sections}
    site = build(SiteSection, part["site"], "site")
    files = _paths(part["files"], list(part["files"]), folder)
    for name, place in files.items():
        if not is_there(place):
            raise ConfigError(f"{path}: files.{name} is {place}, and there is no such file.")
    loader = part["data"].get("name", "")
    if loader in datasets:
        part["data"] = _paths(part["data"], file_settings(datasets[loader].Config), folder)
    settings = SiteSettings(
        site=site,
        data=DATA.component(part["data"], "data"),
        vocabulary=Vocabulary(site.classes, _texts(part["labels"], "labels"), site.annotated),
        files=_texts(files, "files"),
        policy=build(Policy, part["policy"], "policy"),
        engine=build(EngineSettings, part["engine"], "engine"),
        folder=folder,
    )
    if len(str(settings.socket).encode()) > LONGEST_SOCKET:
        raise ConfigError(
            f"The address of a socket has at most {LONGEST_SOCKET} bytes: {settings.socket} is "
            "longer. Set site.socket to a shorter path, for instance /run/fedharmony/worker.sock."
        )
    return settings


def _texts(section: Tree, where: str) -> dict[str, str]:
    for key, value in section.items():
        if not isinstance(value, str):
            raise ConfigError(f"{where}.{key} = {shown(value)} must be text.")
    return section


def _paths(section: Tree, keys: list[str], folder: Path) -> Tree:
    """A section with paths that are relative to the file made absolute."""
    given: dict[str, Any] = {k: v for k, v in section.items() if k in keys and v}
    return {**section, **{k: str(folder / user_path(str(v))) for k, v in given.items()}}


#: What ``fedharmony site init`` writes.
TEMPLATE = """\
# A site of a federation. Paths are relative to this file.

[site]
name = {name}
# The federation's labels, in its order; the operator has the list.
classes = {classes}
# Those that are annotated here. Left out: all that the data have. What is not annotated is unknown
# here, not absent.
# annotated = [...]
socket = "worker.sock"
memory = "memory"

[data]
# As in a run: a loader and its settings ('fedharmony list datasets').
name = "table"
path = {path}
table = ""
format = "joined"
image_size = {image_size}

[labels]
# The name of a label here = its name in the federation; "" leaves a label out.

[files]
# Files that a server may name (weights) = where they are here.

[policy]
# Methods that this site takes part in, or "all".
methods = "all"
# Statistics beside the trained model that may leave it. A refusal names the one that is missing.
statistics = []
fewest_images = 1
# What is told of scores on the test images here: "none", "histograms" or "scores".
evaluation = "histograms"

[engine]
device = "auto"
"""
