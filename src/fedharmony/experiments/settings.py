"""All settings of a run, read from TOML sections and checked before anything starts.

:class:`Settings` has one field per section. ``[methods.NAME]`` holds a method's own settings, and
its subsections ``train`` and ``federation`` replace some of those that all methods share;
``[tune.NAME]`` holds what ``fedharmony tune`` tries for it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, Protocol, TypeAlias, TypeVar

from annotated_types import Ge, Gt, Le, Lt
from pydantic import AfterValidator

from fedharmony.attacks import AttackSettings
from fedharmony.config import (
    Checked,
    FilePath,
    Tree,
    build,
    built_in_configs,
    file_settings,
    flat,
    keys,
    merge,
    nested,
    override,
    parse_override,
    read_toml,
    tree_of,
)
from fedharmony.data.augment import AugmentSettings
from fedharmony.data.base import Source, datasets
from fedharmony.data.transforms import check_transforms
from fedharmony.engine.optimise import TrainSettings
from fedharmony.errors import ConfigError, nearest, shown
from fedharmony.experiments.trackers import trackers
from fedharmony.losses import LossSettings
from fedharmony.methods.base import Method, methods
from fedharmony.metrics import MetricOptions
from fedharmony.models.base import Backbone, models
from fedharmony.partition.base import Splitter, splitters
from fedharmony.privacy import PrivacySettings
from fedharmony.reading import is_there, user_path
from fedharmony.registry import load_plugins
from fedharmony.server.federation import FederationSettings
from fedharmony.terminal import plain

logger = logging.getLogger(__name__)


def _printable(text: str) -> str:
    if text != plain(text) or "\n" in text or "\t" in text:
        raise ValueError("it holds control characters")
    if len(text) > 100:
        raise ValueError("it has more than 100 characters")
    return text


#: Text that tables, pages and folders show as it is.
Label: TypeAlias = Annotated[str, AfterValidator(_printable)]


@dataclass(frozen=True)
class RunSettings(Checked):
    """The run itself.

    Attributes:
        method: name of a method, or ``name:preset``.
        rounds: communication rounds (T).
        seed: seeds cohorts, batch orders and everything else that is drawn during a run.
        eval_every: evaluate on the test set after every so many rounds (and after the last).
        label: shown in tables and figures instead of the method's name.
        plugins: Python files that register further components.
        scores: keep the scores of the test images if they are at most so many (images × labels).
        examples: keep so many test images, small, to show with their labels in the report; 0 keeps
            none, for images that must not leave their place.
        thresholds: share of each client's images that it does not train on, so that each label's
            threshold can be chosen on them; 0 holds none out, and all labels share
            ``metrics.threshold``.
        track: programs that show the run as it goes: "tensorboard", "mlflow", "wandb". They work
            offline, in the run's folder.
    """

    method: str = "fedavg"
    rounds: Annotated[int, Ge(1), Le(100_000)] = 50
    seed: Annotated[int, Ge(0)] = 0
    eval_every: Annotated[int, Ge(1)] = 1
    label: Label | None = None
    plugins: tuple[str, ...] = ()
    scores: Annotated[int, Ge(0)] = 10_000_000
    examples: Annotated[int, Ge(0), Le(1000)] = 64
    thresholds: Annotated[float, Ge(0), Lt(1)] = 0.0
    track: tuple[str, ...] = ()


#: Settings of a run that decide on what is kept and shown of it, and not on its results.
KEPT = ("eval_every", "label", "plugins", "scores", "examples", "track")


@dataclass(frozen=True)
class DataSettings(Checked):
    """The data set; its own settings stand beside this one.

    Attributes:
        name: the data set.
    """

    name: str = "digits"


@dataclass(frozen=True)
class SplitSettings(Checked):
    """The split; the splitter's own settings stand beside these.

    Attributes:
        name: the splitter.
        clients: number of clients (K); none lets the splitter decide (50, or all natural users).
        seed: seeds the split alone, so that repeats can share it.
        file: use this partition file instead of splitting.
        transforms: names of image transforms, given to the clients in turn ("feature skew"): images
            of different clients look different. The test images stay as they are.
        annotated: share of the labels that each client annotates; the others are unknown there, in
            loss and correlation.
        holdout: share of each client's images on which the model is evaluated *instead of* the test
            set, and which the client does not train on. For choosing settings.
    """

    name: str = "pivot_dirichlet"
    clients: Annotated[int, Ge(1), Le(1_000_000)] | None = None
    seed: Annotated[int, Ge(0)] = 0
    file: FilePath | None = None
    transforms: tuple[str, ...] = ()
    annotated: Annotated[float, Gt(0), Le(1)] = 1.0
    holdout: Annotated[float, Ge(0), Lt(1)] = 0.0

    def __post_init__(self) -> None:
        """Refuse unknown transforms before any data are read."""
        super().__post_init__()
        if self.transforms:
            check_transforms(self.transforms)
        if self.transforms and self.file is not None:
            raise ConfigError(
                "split.transforms and split.file are both set, but a partition file brings its own "
                "transforms. Remove one of them."
            )


@dataclass(frozen=True)
class ModelSettings(Checked):
    """The backbone; its own settings stand beside these.

    Attributes:
        name: the backbone.
        seed: seeds the initial parameters alone.
    """

    name: str = "vit"
    seed: Annotated[int, Ge(0)] = 0


@dataclass(frozen=True)
class EngineSettings(Checked):
    """How to compute.

    Attributes:
        device: "auto", "cpu", "cuda", "cuda:1", …
        stack: most clients trained at once; none takes what fills the device and fits into it.
        precision: "float32"; "bfloat16" products with float32 weights and moments; "auto" is
            bfloat16 on a GPU that has it, else float32.
        compile: compile the model with torch.compile; none does on a GPU where the run is long
            enough for it to pay, and says what it decided.
        graphs: record steps as CUDA graphs; none does on a GPU.
        deterministic: let torch refuse every kernel that does not promise to repeat to the bit.
            Compiled runs need it to repeat to the bit on a GPU; others repeated without it, too,
            where it was tried (docs/architecture.md).
        sweep_batch: images per client and step in passes without gradient.
        threads: CPU threads; none takes torch's choice when the run starts. The bits of a result
            depend on it, so a resumed run keeps the number.
        tf32: matrix products on CUDA with shorter mantissas: faster, less exact.
        gpu_share: part of a GPU's memory that the run may take; none means all of it, and of
            several runs at once an equal part each.
        memory_mb: what clients keep between rounds is on disk; this much of it also in memory.
        wait_s: of several processes, how many seconds one waits for another in an exchange.
    """

    device: str = "auto"
    stack: Annotated[int, Ge(1), Le(100_000)] | None = None
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    compile: bool | None = None
    graphs: bool | None = None
    deterministic: bool = False
    sweep_batch: Annotated[int, Ge(1), Le(65_536)] = 32
    threads: Annotated[int, Ge(1), Le(1024)] | None = None
    tf32: bool = False
    gpu_share: Annotated[float, Gt(0), Le(1)] | None = None
    memory_mb: Annotated[int, Ge(0)] = 1024
    wait_s: Annotated[float, Gt(0), Le(1e6)] = 1800.0


@dataclass(frozen=True)
class TuneSettings(Checked):
    """What ``fedharmony tune`` tries; every trial is a run with ``split.holdout`` set.

    Attributes:
        lr: learning rates; none means a third of, exactly, and three times the configured one.
        holdout: share of each client's images held out.
        rounds: rounds of a trial; none means ``run.rounds``.
    """

    lr: tuple[Annotated[float, Gt(0)], ...] | None = None
    holdout: Annotated[float, Gt(0), Lt(1)] = 0.2
    rounds: Annotated[int, Ge(1), Le(100_000)] | None = None


#: What stands for training in one place in a comparison, and how it trains.
CENTRAL, CENTRAL_METHOD = "central", "fedavg"

#: Sections of which a method, or a preset of it, may have a part for itself, and which part. Epochs
#: and batch size stay common: they decide how much work a round is.
OWN_SECTIONS: Mapping[str, tuple[str, ...]] = {
    "train": ("optimiser", "lr", "momentum", "weight_decay"),
    "federation": ("head_start", "head_ridge", "head_scale", "head_clients", "server_average"),
}


class Named(Protocol):
    """The settings that all components of a section share: at least which one is chosen."""

    @property
    def name(self) -> str:
        """The chosen component."""


Common = TypeVar("Common", bound=Named, covariant=True)
Own = TypeVar("Own", covariant=True)
Section = TypeVar("Section", TrainSettings, FederationSettings)


@dataclass(frozen=True)
class Component(Generic[Common, Own]):
    """A section that chooses a registered component: shared settings and the component's own."""

    common: Common
    own: Own

    def tree(self) -> Tree:
        """Both as one section."""
        return {**tree_of(self.common), **tree_of(self.own)}


@dataclass(frozen=True)
class Settings:
    """All sections, resolved."""

    run: RunSettings
    data: Component[DataSettings, Source.Config]
    split: Component[SplitSettings, Splitter.Config]
    model: Component[ModelSettings, Backbone.Config]
    train: TrainSettings
    loss: LossSettings
    augment: AugmentSettings
    federation: FederationSettings
    attack: AttackSettings
    privacy: PrivacySettings
    metrics: MetricOptions
    engine: EngineSettings
    tune: TuneSettings
    grids: Mapping[str, Tree]  # of tune, by method
    methods: Mapping[str, Tree]  # as given: the preset of the chosen one comes below

    def __post_init__(self) -> None:
        """Refuse settings that the chosen method cannot have."""
        _ = self.method_config, self.training, self.taking_part

    @property
    def method_name(self) -> str:
        """The method without its preset."""
        return self.run.method.partition(":")[0]

    @property
    def label(self) -> str:
        """The method as results show it: its name, what its settings make of it, its preset."""
        if self.run.label is not None:
            return self.run.label
        name, colon, preset = self.run.method.partition(":")
        shown = f"{name}{methods[name].suffix(self.method_config)}"
        return shown if shown == f"{name}-{preset}" else f"{shown}{colon}{preset}"

    @cached_property
    def training(self) -> TrainSettings:
        """Local training of the chosen method: ``[train]``, changed by the method's own."""
        return self._with_own("train", self.train)

    @cached_property
    def taking_part(self) -> FederationSettings:
        """The federation of the chosen method: ``[federation]``, changed by the method's own."""
        found = self._with_own("federation", self.federation)
        usual: Literal["uniform", "poisson"] = "poisson" if self.privacy.active else "uniform"
        return replace(found, sampling=found.sampling or usual)

    def _with_own(self, part: str, common: Section) -> Section:
        return _section_of(self.method_name, {part: self._own(part)}, part, common)

    def _own(self, part: str) -> Tree:
        """What the chosen method has for itself of a section: its preset's, then the file's."""
        given = self.methods.get(self.method_name, {}).get(part, {})
        return {**self.preset[1].get(part, {}), **given}

    @property
    def preset(self) -> tuple[str, Mapping[str, Any]]:
        """The chosen preset of the method, or its first: its name, and what it sets."""
        name, _, preset = self.run.method.partition(":")
        presets = methods[name].presets
        preset = preset or next(iter(presets))
        if preset not in presets:
            raise ConfigError(
                f"Method {name!r} has no preset {preset!r}. {nearest(preset, presets)}"
            )
        return preset, presets[preset]

    @cached_property
    def method_config(self) -> Method.Config:
        """The chosen method's settings: its preset, then what the file says."""
        name = self.method_name
        own = {**self.preset[1], **self.methods.get(name, {})}
        own = {k: v for k, v in own.items() if k not in OWN_SECTIONS}
        return build(methods[name].Config, own, f"methods.{name}")

    def with_run(self, method: str | None = None, seed: int | None = None) -> Settings:
        """The same settings for another method or seed (of the run and of the initial model)."""
        run, model = self.run, self.model
        if method is not None:
            run = replace(run, method=method)
        if seed is not None:
            run = replace(run, seed=seed)
            model = Component(replace(model.common, seed=seed), model.own)
        return replace(self, run=run, model=model)

    def central(self, seed: int) -> Settings:
        """One party that holds all images, with all their labels, and trains on them in one place.

        Its rounds see as many images as the cohorts of the same settings do (``assemble``). Its
        learning rate decays: at a constant one it ends overfitted, and is no reference.
        """
        changed = self.with_run(CENTRAL_METHOD, seed)
        return replace(
            changed,
            train=replace(self.train, schedule="cosine"),
            federation=replace(self.federation, central=True, server_sees="replies"),
            attack=AttackSettings(),
            privacy=PrivacySettings(),
            run=replace(changed.run, label=CENTRAL),
        )

    def tree(self) -> Tree:
        """Everything as TOML sections, with the chosen method's settings written out."""
        sections: Tree = {
            "run": tree_of(self.run),
            **{name: getattr(self, name).tree() for name in ("data", "split", "model")},
            **{name: tree_of(getattr(self, name)) for name in PLAIN if name not in ("run", "tune")},
        }
        name = self.method_name
        chosen = {**self.methods.get(name, {}), **tree_of(self.method_config)}
        chosen |= {part: own for part in OWN_SECTIONS if (own := self._own(part))}
        sections["methods"] = {k: v for k, v in {**self.methods, name: chosen}.items() if v}
        sections["tune"] = {**tree_of(self.tune), **self.grids}
        return sections

    def identity(self) -> Tree:
        """What decides on the results, as sections.

        How they are computed does not count, nor other methods, nor what is kept and shown of them.
        Where files lie does not count, either: what they hold is bound to a run (``binding.py``).
        """
        idle = {"engine", "tune"} | (set() if self.privacy.active else {"privacy"})
        tree: Tree = {k: dict(v) for k, v in self.tree().items() if k not in idle}
        tree["run"] = {k: v for k, v in tree["run"].items() if k not in KEPT}
        tree["methods"] = tree["methods"].get(self.method_name, {})
        for section, files in self.files().items():
            tree[section] |= dict.fromkeys(files, "a file")
        return tree

    def files(self) -> dict[str, dict[str, str]]:
        """Paths of files and folders, by section and setting; a model of the hub has none."""
        configs: dict[str, Any] = {"data": self.data.own, "split": self.split.common}
        configs |= {"model": self.model.own, "methods": self.method_config}
        return {
            section: {
                name: path
                for name in file_settings(type(config))
                if Path(path := getattr(config, name) or "").is_absolute()
            }
            for section, config in configs.items()
        }

    def sha256(self) -> str:
        """The identity as a hash."""
        return hashlib.sha256(json.dumps(self.identity(), sort_keys=True).encode()).hexdigest()


@dataclass(frozen=True)
class Choice(Generic[Common, Own]):
    """A section that chooses a component by its name.

    Some of its settings are common to all components, others a component's ``own``, by its name.
    Shared settings may stand ``instead`` of a component.
    """

    kind: str
    common: type[Common]
    own: Callable[[str], type[Own]]
    names: Callable[[], list[str]]
    instead: tuple[str, ...] = ()

    def component(self, values: Tree, where: str) -> Component[Common, Own]:
        """Split a section between the shared settings and those of the component it names."""
        known = keys(self.common)
        base = build(self.common, {k: v for k, v in values.items() if k in known}, where)
        own = self.own(base.name)
        for key in values:
            if key not in {*known, *keys(own)}:
                raise ConfigError(
                    f"Unknown setting {where}.{key} (for {self.kind} {base.name!r}). "
                    f"{nearest(key, [*known, *keys(own)])} If it belongs to another {self.kind}, "
                    f"leave it out: {where}.{key}= on the command line removes it."
                )
        rest = {k: v for k, v in values.items() if k not in known}
        return Component(base, build(own, rest, where))


DATA = Choice(datasets.kind, DataSettings, lambda name: datasets[name].Config, datasets.names)
SPLIT = Choice(
    splitters.kind, SplitSettings, lambda name: splitters[name].Config, splitters.names, ("file",)
)
MODEL = Choice(models.kind, ModelSettings, lambda name: models[name].Config, models.names)
#: Sections that choose a component.
COMPONENTS: Mapping[str, Choice[Named, object]] = {"data": DATA, "split": SPLIT, "model": MODEL}
#: Sections with the same settings whatever is chosen.
PLAIN: Mapping[str, type[object]] = {
    "run": RunSettings,
    "train": TrainSettings,
    "loss": LossSettings,
    "augment": AugmentSettings,
    "federation": FederationSettings,
    "attack": AttackSettings,
    "privacy": PrivacySettings,
    "metrics": MetricOptions,
    "engine": EngineSettings,
    "tune": TuneSettings,
}


def _unknown_section(name: str, value: Any, sections: Sequence[str]) -> ConfigError:
    """What is wrong with a key at the top: a misspelt section, or a setting without its section."""
    if isinstance(value, Mapping):
        return ConfigError(f"Unknown section [{name}]. {nearest(name, sections)}")
    homes = {section: set(keys(cls)) for section, cls in PLAIN.items()}
    for section, choice in COMPONENTS.items():
        own = (keys(choice.own(component)) for component in choice.names())
        homes[section] = set(keys(choice.common)).union(*own)
    found = [f"{section}.{name}" for section, known in homes.items() if name in known]
    if found:
        return ConfigError(
            f"The setting {name} needs its section. Did you mean {' or '.join(found)}?"
        )
    return ConfigError(
        f"There is no setting {name} outside of the sections. {nearest(name, sections)} Write "
        "section.key, for instance train.lr."
    )


def compose(tree: Mapping[str, Any]) -> Settings:
    """Check a whole settings tree; any mistake is a ConfigError before work starts."""
    sections = [name for name in Settings.__dataclass_fields__ if name != "grids"]
    for name, value in tree.items():
        if name not in sections:
            raise _unknown_section(name, value, sections)
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} = {shown(value)} must be a section, for instance [{name}].")
    part = {name: dict(tree.get(name, {})) for name in sections}
    grids = {k: dict(v) for k, v in part["tune"].items() if isinstance(v, Mapping)}
    part["tune"] = {k: v for k, v in part["tune"].items() if k not in grids}
    run = build(RunSettings, part["run"], "run")
    load_plugins(run.plugins)  # other sections may name what they bring
    plain: dict[str, Any] = {name: build(cls, part[name], name) for name, cls in PLAIN.items()}
    for name in plain["run"].track:
        _ = trackers[name]  # refuses one that does not exist
    for name, values in part["methods"].items():
        _check_method(name, values, plain)
    for name, grid in grids.items():
        _check_grid(name, grid, plain)
    return Settings(
        data=DATA.component(part["data"], "data"),
        split=SPLIT.component(part["split"], "split"),
        model=MODEL.component(part["model"], "model"),
        **plain,
        grids=grids,
        methods=part["methods"],
    )


def _check_method(
    name: str, values: Any, common: Mapping[str, Any], section: str = "methods"
) -> None:
    """Refuse settings of an unknown method, and settings it does not have."""
    if name not in methods:
        raise ConfigError(
            f"Section [methods.{name}]: there is no such method. {nearest(name, methods.names())}"
        )
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"methods.{name} = {shown(values)} must be a section, for instance [methods.{name}]. "
            f"The method is chosen by run.method={name}."
        )
    for part in OWN_SECTIONS:
        _section_of(name, values, part, common[part], section)
    values = {key: value for key, value in values.items() if key not in OWN_SECTIONS}
    build(methods[name].Config, values, f"{section}.{name}")


def _section_of(
    name: str, values: Mapping[str, Any], part: str, common: Section, section: str = "methods"
) -> Section:
    """A common section, changed by what a method has of it for itself."""
    own, where = values.get(part, {}), f"{section}.{name}.{part}"
    if not isinstance(own, Mapping):
        raise ConfigError(f"{where} must be a section, [{where}].")
    for key in own:
        if key not in OWN_SECTIONS[part]:
            raise ConfigError(
                f"Unknown setting {where}.{key}. {nearest(key, OWN_SECTIONS[part])} "
                f"Everything else of [{part}] is common to all methods."
            )
    return build(type(common), {**tree_of(common), **own}, where)


def _check_grid(name: str, grid: Mapping[str, Any], common: Mapping[str, Any]) -> None:
    """Refuse a grid for an unknown method, and values its setting cannot have."""
    if name not in methods:
        raise ConfigError(
            f"Section [tune.{name}]: there is no such method. {nearest(name, methods.names())}"
        )
    for key, values in flat(grid).items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"tune.{name}.{key} = {shown(values)} must be a list of values to try."
            )
        for value in values:
            _check_method(name, nested({key: value}), common, "tune")


@dataclass(frozen=True)
class Layer:
    """Settings from one place; they come on top of the layers before.

    ``removed`` are dotted names that are taken away from the layers before. Paths are relative to
    the ``folder``: that of a config file, or else the working folder.
    """

    name: str
    tree: Tree
    removed: tuple[str, ...] = ()
    folder: Path | None = None


def load_settings(source: str | Path, changes: Sequence[str] = ()) -> Settings:
    """Settings from a TOML file, or from a built-in one by its name (``demo``).

    ``changes`` are ``section.key=value``, or further files (or names), whose settings come on top.
    """
    return compose(combine(layers_of(source, changes))[0])


def layers_of(source: str | Path, changes: Sequence[str] = ()) -> list[Layer]:
    """The layers of a command: the file, further files in their order, and the changes together."""
    files = [source, *filter(_is_file, changes)]
    assignments = [change for change in changes if not _is_file(change)]
    parsed = [parse_override(text) for text in assignments]
    removed = tuple(".".join(path) for path, value in parsed if value == "")
    top = Layer("the command line", override({}, assignments), removed)
    return [*map(_layer_of, files), top]


def combine(layers: Sequence[Layer]) -> tuple[Tree, dict[str, str]]:
    """All layers as one tree, and the layer that each value comes from, by its dotted name.

    Where a layer chooses another data set, splitter or model than the layers before, what those
    said about their own goes; what all components of the section share stays. A layer that names a
    splitter wants it drawn: a partition file of the layers before goes, too.
    """
    tree: Tree = {}
    origins: dict[str, str] = {}
    for layer in layers:
        result = merge(_without(tree, layer.removed), layer.tree)
        tree = _without_others(tree, layer.tree, result, layer.name)
        tree = merge(_without(tree, layer.removed), layer.tree)
        origins |= dict.fromkeys(flat(layer.tree), layer.name)
    folders = {layer.name: layer.folder for layer in layers}
    origins = {name: origins[name] for name in flat(tree)}
    return _located(tree, {name: folders[layer] for name, layer in origins.items()}), origins


def _located(tree: Tree, folders: Mapping[str, Path | None]) -> Tree:
    """The tree with absolute paths: a run can be resumed from any folder. Loads its plug-ins."""
    plugins = flat(tree).get("run.plugins")
    if isinstance(plugins, list) and all(isinstance(file, str) for file in plugins):
        start = folders["run.plugins"] or Path()
        plugins = [os.path.realpath(start / user_path(file)) for file in plugins]
        tree = merge(tree, nested({"run.plugins": plugins}))
        load_plugins(plugins)
    kinds: list[tuple[str, type[object]]] = [
        (section, kind)
        for section, choice in COMPONENTS.items()
        for kind in (choice.common, *map(choice.own, choice.names()))
    ]
    kinds += [(f"methods.{name}", methods[name].Config) for name in methods.names()]
    known = {f"{section}.{key}" for section, kind in kinds for key in file_settings(kind)}
    for name, path in flat(tree).items():
        if name in known and path and isinstance(path, str) and (folder := folders[name]):
            tree = merge(tree, nested({name: _beside(folder, name, path)}))
    return tree


def _beside(folder: Path, name: str, path: str) -> str:
    """The path that a config file in a folder names; a model may be named in place of a file."""
    place = folder / user_path(path)
    if not name.startswith("model.") or is_there(place):
        return os.path.realpath(place)
    if is_there(user_path(path)):
        raise ConfigError(
            f"{name} = {shown(path)} is relative to its config file, and there is no {place}. For "
            f"the one in the working folder, give {name} on the command line."
        )
    return path


def _without(tree: Tree, names: Sequence[str]) -> Tree:
    """The tree without settings, or whole sections, of dotted names."""
    return override(tree, [f"{name}=" for name in names])


def _without_others(below: Tree, top: Tree, result: Tree, layer: str) -> Tree:
    """``below`` without what it says of components that the layer on top of it does not choose.

    ``result`` is both together; what goes is logged in the name of the ``layer``.
    """
    kept = dict(below)
    for name, choice in COMPONENTS.items():
        old, said, new = (tree.get(name, {}) for tree in (below, top, result))
        if not all(isinstance(section, Mapping) for section in (old, said, new)):
            continue  # refused when the whole is checked
        was, now = (section.get("name", choice.common().name) for section in (old, new))
        gone = [key for key in old if was != now and key not in keys(choice.common)]
        gone += [key for key in choice.instead if "name" in said and key in old]
        if gone:
            kept[name] = {key: value for key, value in old.items() if key not in gone}
            logger.info(
                "%s chooses %s %r; what was set before no longer counts: %s.",
                *(layer, choice.kind, now, ", ".join(f"{name}.{key}" for key in gone)),
            )
    return kept


def _is_file(change: str) -> bool:
    """Whether a change names a config file; a path may hold an equals sign."""
    if change in built_in_configs():
        return True
    return change.endswith(".toml") and ("=" not in change or is_there(change))


def _layer_of(source: str | Path) -> Layer:
    known = built_in_configs()
    path = known.get(str(source), Path(source))  # whatever lies here by the name of a built-in one
    if path.suffix != ".toml" and not is_there(path):
        raise ConfigError(
            f"There is neither a file nor a built-in config {shown(str(source))}. "
            f"{nearest(str(source), known)}"
        )
    folder = None if str(source) in known else path.absolute().parent
    return Layer(str(source), read_toml(path), folder=folder)
