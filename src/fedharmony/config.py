"""Settings: TOML files, ``key=value`` overrides, and typed dataclasses that refuse early.

Each component keeps its settings in a frozen dataclass beside its code, a subclass of
:class:`Checked`: whoever makes one gets a :class:`~fedharmony.errors.ConfigError` for a wrong type
or an illegal value. Types are checked strictly (``rounds = "5"`` is an error, ``lr = 1`` is fine).
:func:`build` makes one of a mapping, and names the nearest valid key where one is unknown.

What no setting can mean is refused here for all of them, those of plug-ins too: numbers that are
not finite, whole numbers beyond 2⁵³, text that is not Unicode, and sections nested without end.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import tomllib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, TypeAlias, TypeVar, get_args, get_type_hints

import tomli_w
from pydantic import AfterValidator, GetCoreSchemaHandler, TypeAdapter, ValidationError
from pydantic_core.core_schema import no_info_after_validator_function

import fedharmony
from fedharmony.errors import ConfigError, nearest, shown
from fedharmony.reading import is_there, read_regular, user_path
from fedharmony.registry import Registry

T = TypeVar("T")
Tree = dict[str, Any]

#: Bytes of a settings file, and how deep its sections and lists may be nested.
FILE_LIMIT, DEPTH = 16 << 20, 8
#: The largest whole number that every program reads from JSON as it was written.
LARGEST = 2**53
#: Which control groups this process belongs to, and where their limits are.
CGROUP, CGROUPS = Path("/proc/self/cgroup"), Path("/sys/fs/cgroup")


def read_toml(path: str | Path) -> Tree:
    """Read a TOML file, with errors a user can act on; a byte-order mark is passed over."""
    path = Path(path)
    try:
        text = read_regular(path, FILE_LIMIT).decode("utf-8-sig")
    except FileNotFoundError:
        raise ConfigError(f"Config file {path} does not exist. Check the path.") from None
    except OSError as error:
        raise ConfigError(f"Config file {path} cannot be read: {error.strerror}.") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"Config file {path} is not UTF-8 text (byte {error.start}). Save it as UTF-8."
        ) from None
    try:
        return _loads(text)
    except ValueError as error:
        raise ConfigError(f"Config file {path} is not valid TOML: {error}.") from error


def built_in_configs() -> dict[str, Path]:
    """Config files that come with the package, by name (``demo``, ``methods/fedprox``)."""
    folder = Path(fedharmony.__file__).parent / "configs"
    files = sorted(folder.rglob("*.toml"), key=lambda p: (len(p.parts), p))
    return {path.relative_to(folder).with_suffix("").as_posix(): path for path in files}


def _loads(text: str) -> Tree:
    """Parse TOML; whatever is wrong with it is a ValueError."""
    try:
        tree = tomllib.loads(text)
    except RecursionError:
        raise ValueError("its lists or tables are nested too deeply") from None
    if _deeper(tree, DEPTH):
        raise ValueError(f"its lists or tables are nested more than {DEPTH} deep")
    return tree


def _deeper(value: Any, depth: int) -> bool:
    """Whether lists and tables are nested more than ``depth`` deep."""
    if not isinstance(value, dict | list):
        return False
    inner = value.values() if isinstance(value, dict) else value
    return depth == 0 or any(_deeper(part, depth - 1) for part in inner)


def parse_override(text: str) -> tuple[list[str], Any]:
    """Split ``a.b=value``; the value is TOML, or a bare string where that fails.

    >>> parse_override("train.lr=1e-3")
    (['train', 'lr'], 0.001)
    >>> parse_override("run.method=fedavg")
    (['run', 'method'], 'fedavg')
    """
    key, equals, value = text.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path):
        raise ConfigError(
            f"Override {shown(text)} is not of the form section.key=value, for instance "
            "train.lr=0.001."
        )
    if len(path) > DEPTH:
        raise ConfigError(f"Override {shown(text)} names a section more than {DEPTH} deep.")
    try:
        read = _loads(f"value = {value.strip()}")
    except ValueError:
        return path, value.strip()
    return path, read["value"] if len(read) == 1 else value.strip()


#: Settings that options decide where several runs are compared.
CHOSEN = {"run.method": "--methods", "run.seed": "--seeds", "model.seed": "--seeds"}


def refuse_chosen(changes: Iterable[str], chosen: Iterable[str] = CHOSEN) -> None:
    """Refuse ``section.key=value`` that would have no effect, because an option decides it."""
    for change in changes:
        if (key := change.partition("=")[0].strip()) in chosen:
            raise ConfigError(
                f"{shown(change)}: {key} is not set here, it is chosen with {CHOSEN[key]} (in "
                f"Python: {CHOSEN[key].removeprefix('--')}=[…]). Give that in place of the setting."
            )


def _absolute(path: str) -> str:
    """The same file from any folder; what is no file here (a model's name) stays as it is."""
    found = user_path(path)
    return os.path.realpath(found) if path and is_there(found) else path


#: A setting that names a file or folder: a run can be resumed, and repeated, from any folder.
FilePath: TypeAlias = Annotated[str, AfterValidator(_absolute)]


def file_settings(cls: type[Any]) -> list[str]:
    """The settings of a dataclass that name files."""
    hints = get_type_hints(cls, include_extras=True)
    return [name for name, hint in hints.items() if FilePath in (hint, *get_args(hint))]


def override(tree: Mapping[str, Any], assignments: Iterable[str]) -> Tree:
    """A copy of ``tree`` with ``section.key=value`` assignments applied; ``key=`` removes a key.

    >>> override({"split": {"name": "iid", "gamma": 0.3}}, ["split.gamma=", "split.clients=5"])
    {'split': {'name': 'iid', 'clients': 5}}
    """
    result = _copy(tree)
    for text in assignments:
        path, value = parse_override(text)
        node = result
        for part in path[:-1]:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"Override {shown(text)}: {part!r} is a value, not a section.")
        if value == "":
            node.pop(path[-1], None)
        else:
            node[path[-1]] = value
    return result


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> Tree:
    """``base`` with the values of ``top`` in place of its own, section by section.

    >>> merge({"run": {"rounds": 5, "seed": 1}}, {"run": {"rounds": 9}, "train": {"lr": 0.1}})
    {'run': {'rounds': 9, 'seed': 1}, 'train': {'lr': 0.1}}
    """
    result = _copy(base)
    for key, value in top.items():
        below = result.get(key)
        if isinstance(below, Mapping) and isinstance(value, Mapping):
            result[key] = merge(below, value)
        else:
            result[key] = _copy(value) if isinstance(value, Mapping) else value
    return result


def flat(tree: Mapping[str, Any]) -> Tree:
    """Values by their dotted names.

    >>> flat({"mu": 1, "train": {"lr": 0.1}})
    {'mu': 1, 'train.lr': 0.1}
    """
    found: Tree = {}
    for key, value in tree.items():
        below = flat(value) if isinstance(value, Mapping) else {"": value}
        found |= {f"{key}.{name}" if name else key: leaf for name, leaf in below.items()}
    return found


def nested(values: Mapping[str, Any]) -> Tree:
    """The tree of values by their dotted names, the inverse of :func:`flat`.

    >>> nested({"mu": 1, "train.lr": 0.1})
    {'mu': 1, 'train': {'lr': 0.1}}
    """
    tree: Tree = {}
    for name, value in values.items():
        first, dot, rest = name.partition(".")
        tree = merge(tree, {first: nested({rest: value}) if dot else value})
    return tree


def _copy(tree: Mapping[str, Any]) -> Tree:
    return {k: _copy(v) if isinstance(v, Mapping) else v for k, v in tree.items()}


@functools.cache
def _adapters(cls: Any) -> dict[str, TypeAdapter[Any]]:
    hints = get_type_hints(cls, include_extras=True)
    return {f.name: TypeAdapter(hints[f.name]) for f in dataclasses.fields(cls) if f.init}


def keys(cls: type[Any]) -> list[str]:
    """The names of a settings dataclass."""
    return [f.name for f in dataclasses.fields(cls) if f.init]


def shared(cls: type[Any], settings: Any, **others: Any) -> Tree:
    """Those arguments of a dataclass that settings have by the same name, and ``others``.

    >>> @dataclasses.dataclass
    ... class Ball:
    ...     radius: float
    ...     mass: float
    >>> shared(Ball, Ball(1.0, 2.0), mass=3.0)
    {'radius': 1.0, 'mass': 3.0}
    """
    return {k: getattr(settings, k) for k in keys(cls) if hasattr(settings, k)} | others


class SettingError(ConfigError):
    """A setting has a value that it cannot have; ``words`` say which, without its section."""

    def __init__(self, owner: str, words: str) -> None:
        super().__init__(f"Setting {owner}.{words}")
        self.words = words


class Checked:
    """Settings that refuse wrong values when they are made: the base of their dataclasses.

    A subclass with a ``__post_init__`` of its own calls this one first.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Train(Checked):
    ...     lr: float = 0.1
    >>> Train(lr=math.nan)
    Traceback (most recent call last):
    fedharmony.config.SettingError: Setting Train.lr = nan is not allowed: a number must be finite.
    """

    def __post_init__(self) -> None:
        for name, value in checked(type(self), vars(self)).items():
            object.__setattr__(self, name, value)


def checked(cls: Any, values: Mapping[str, Any]) -> Tree:
    """The values of a settings dataclass as it holds them (lists become tuples), if they can be."""
    found, adapters = {}, _adapters(cls)
    for key, value in values.items():
        value = tuple(value) if isinstance(value, list) else value
        try:
            reasons = _senseless(value)
            if not reasons:
                found[key] = adapters[key].validate_python(value, strict=True)
        except ValidationError as error:
            told = (e["msg"].removeprefix("Value error, ") for e in error.errors())
            reasons = "; ".join(dict.fromkeys(told))
        if reasons:
            words = f"{key} = {shown(value)} is not allowed: {reasons}."
            raise SettingError(cls.__qualname__, words)
    return found


def build(cls: type[T], values: Mapping[str, Any], where: str) -> T:
    """Make the settings dataclass ``cls`` from ``values``; ``where`` names the section in errors.

    >>> @dataclasses.dataclass(frozen=True)
    ... class Train:
    ...     lr: float = 0.1
    >>> build(Train, {"lr": 1}, "train")
    Train(lr=1.0)
    >>> build(Train, {"lrr": 1}, "train")
    Traceback (most recent call last):
    fedharmony.errors.ConfigError: Unknown setting train.lrr. Did you mean 'lr'? Valid: lr.
    """
    for key in values:
        if instead := getattr(cls, "REMOVED", {}).get(key):
            raise ConfigError(f"Setting {where}.{key} is gone: {instead}.")
        if key not in keys(cls):
            raise ConfigError(f"Unknown setting {where}.{key}. {nearest(key, keys(cls))}")
    try:
        return cls(**(values if issubclass(cls, Checked) else checked(cls, values)))
    except SettingError as error:
        raise ConfigError(f"Setting {where}.{error.words}") from None
    except ConfigError as error:
        raise ConfigError(f"Section {where}: {error}") from None
    except TypeError as error:
        raise ConfigError(f"Section {where} is incomplete: {error}.") from None


def _senseless(value: Any) -> str:
    """Why no setting can have this value, whatever its type says; empty where one can."""
    if isinstance(value, float) and not math.isfinite(value):
        return "a number must be finite"
    if isinstance(value, int) and abs(value) > LARGEST:
        return f"a whole number must be at most {LARGEST:,}"
    if isinstance(value, str) and not _is_text(value):
        return "it holds bytes that are not UTF-8, or a null character"
    if isinstance(value, list | tuple):
        return next(filter(None, map(_senseless, value)), "")
    return ""


def _is_text(value: str) -> bool:
    try:
        value.encode()
    except UnicodeEncodeError:  # bytes of the command line that are not UTF-8
        return False
    return "\0" not in value


@dataclasses.dataclass(frozen=True)
class NameOf:
    """Marks a text setting as the name of a component, or one of some other words."""

    registry: Registry[Any]
    others: tuple[str, ...] = ()

    def names(self) -> list[str]:
        """All that the setting can be."""
        return [*self.others, *self.registry.names()]

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> Any:
        return no_info_after_validator_function(self._known, handler(source))

    def _known(self, name: str) -> str:
        if name not in self.names():
            words = nearest(name, self.names()).removesuffix(".")
            raise ValueError(f"there is no such {self.registry.kind}. {words}")
        return name


def machine_memory() -> int:
    """The bytes of memory that this process may have, for limits that depend on it.

    Those of the machine, or fewer: as the control groups of a container or of a Slurm job allow
    (that of the process, and all above it), or ``ulimit -v``.
    """
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    with suppress(ImportError, OSError):  # Windows has none; a sandbox may hide the groups
        import resource

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        limits += [soft] if soft != resource.RLIM_INFINITY else []
        for line in CGROUP.read_text().splitlines():
            _, kind, place = line.split(":", 2)
            if kind not in ("", "memory"):  # version 2, version 1
                continue
            group = CGROUPS / kind / place.lstrip("/")
            for folder in (group, *group.parents):
                for name in ("memory.max", "memory.limit_in_bytes"):
                    with suppress(OSError, ValueError):  # there is none, or it is "max"
                        limits.append(int((folder / name).read_text()))
    return min(limits)


def tree_of(settings: Any) -> Tree:
    """A settings dataclass as a mapping that TOML can hold (None is left out)."""
    values = {f.name: getattr(settings, f.name) for f in dataclasses.fields(settings) if f.init}
    return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items() if v is not None}


def to_toml(tree: Mapping[str, Any]) -> str:
    """TOML text of a settings tree."""
    return tomli_w.dumps(tree)


def in_toml(value: Any) -> str:
    """A single value as TOML, on one line.

    >>> in_toml((1, 2.5)), in_toml("a")
    ('[1, 2.5]', '"a"')
    """
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(in_toml, value))}]"
    return to_toml({"k": value}).partition("=")[2].strip()
