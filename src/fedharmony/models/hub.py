"""Where weights come from: a local file, or a model of the Hugging Face hub through its cache.

``weights`` may be a path, or a model's name: ``timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k``, or
the part after the slash, which then means ``timm/…``. Names are looked up in the hub's own cache
first, so that a machine without network uses what another one fetched (``fedharmony models
fetch``); only then is the network asked.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedharmony import stopping
from fedharmony.errors import ConfigError
from fedharmony.reading import is_there, parse_json, read_regular, user_path
from fedharmony.terminal import warn_once

#: Files a model of the hub may keep its weights in, best first.
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
FILE_SUFFIXES = (".safetensors", ".pth", ".pt", ".bin")

#: Bytes of a ``config.json``.
CONFIG_LIMIT = 1 << 20

Triple = tuple[float, float, float]


@dataclass(frozen=True)
class Weights:
    """A weights file, and the input normalisation it was trained with where that is known."""

    path: Path
    mean: Triple | None = None
    std: Triple | None = None


def locate(weights: str) -> Weights:
    """The file behind a path or a model's name, which is fetched if it is not in the cache."""
    path = user_path(weights)
    if path.suffix == ".npz":
        raise ConfigError(
            f"model.weights = {weights!r}: NumPy archives are not read. The hub has the original "
            "vision transformers as .safetensors; give a model's name, such as "
            "'timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k'."
        )
    if path.suffix in FILE_SUFFIXES or is_there(path):
        return Weights(path, *_normalisation(path, local=True))
    file = _in_cache(repository(weights)) or fetch(weights)
    return Weights(file, *_normalisation(file))


def repository(name: str) -> str:
    """The hub's name of a model; without an owner it is timm's.

    >>> repository("vit_tiny_patch16_224.augreg_in21k_ft_in1k")
    'timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k'
    >>> repository("hf:somebody/net")
    'somebody/net'
    """
    name = name.removeprefix("hf:").removeprefix("hf-hub:")
    found = name if "/" in name else f"timm/{name}"
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", found):
        raise ConfigError(
            f"model.weights = {name!r} is neither a file nor the name of a model. Give a path that "
            f"ends in {', '.join(FILE_SUFFIXES)}, or a name such as "
            "'timm/vit_tiny_patch16_224.augreg_in21k_ft_in1k'."
        )
    return found


def fetch(name: str) -> Path:
    """Bring a model of the hub into the cache; returns its weights file."""
    hub, model = _hub(), repository(name)
    failure: Exception | None = None
    for file in WEIGHT_FILES:
        try:
            with stopping.interruptible():
                path = Path(hub.hf_hub_download(model, file))
        except Exception as error:  # the hub's own errors, and those of the network below it
            failure = failure or error
            if type(error).__name__ not in ("EntryNotFoundError", "RemoteEntryNotFoundError"):
                break  # the model may be there, but cannot be reached
            continue  # the model has no such file, but perhaps the other
        try:
            hub.hf_hub_download(model, "config.json")
        except Exception:  # a model without one keeps the default normalisation
            return path
        return path
    reason = next(iter(str(failure).splitlines()), type(failure).__name__)
    raise ConfigError(
        f"The weights of {model!r} are neither in the local cache nor could they be fetched "
        f"({reason}). On a machine with network, run 'fedharmony models fetch {model}', and copy "
        "the file it prints here; then set model.weights to its path."
    )


def cached(name: str) -> bool:
    """Whether the weights of a model are on this machine."""
    try:
        return _in_cache(repository(name)) is not None
    except ConfigError:  # without the hub's package there is no cache
        return False


def _in_cache(model: str) -> Path | None:
    hub = _hub()
    for file in WEIGHT_FILES:
        found = hub.try_to_load_from_cache(model, file)
        if isinstance(found, str):
            return Path(found)
    return None


def _hub() -> Any:
    try:
        import huggingface_hub
    except ImportError:
        raise ConfigError(
            "Weights by model name need the package 'huggingface_hub': pip install "
            '"fedharmony[vision]". Without it, set model.weights to a file.'
        ) from None
    return huggingface_hub


def _normalisation(file: Path, local: bool = False) -> tuple[Triple | None, Triple | None]:
    """Input mean and standard deviation from the timm ``config.json`` beside a file of weights.

    One beside a local file has to name its network, and no other weights may be there.
    """
    config = file.parent / "config.json"
    try:
        content = parse_json(read_regular(config, CONFIG_LIMIT))
        others = {other for other in file.parent.iterdir() if other.suffix in FILE_SUFFIXES}
        if local and ("architecture" not in content or others != {file}):
            raise ValueError("it names no network, or may be of other weights in this folder")
        found = content.get("pretrained_cfg", content)
        mean, std = (_triple(found.get(key)) for key in ("mean", "std"))
    except FileNotFoundError:
        return None, None
    except (OSError, ValueError, TypeError, AttributeError) as error:
        warn_once(f"{config} is not taken for the input mean and std of {file.name}: {error}.")
        return None, None
    return mean, std


def _triple(values: Sequence[float] | None) -> Triple | None:
    if values is None or len(values) != 3:
        return None
    red, green, blue = (float(v) for v in values)
    return red, green, blue
