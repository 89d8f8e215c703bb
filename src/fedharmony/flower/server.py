"""A run whose clients are sites: the same folder, events, checkpoints and report as any run.

The server has no training images. It needs settings, what the sites say of themselves, and a test
set of its own: ``[data]`` names a data set whose *test* part the global model is measured on, and
whose labels are the federation's.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedharmony.data.base import DataSet, LabelledImages, TensorImages, datasets
from fedharmony.engine.checkpoint import digest
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.federation import Federation
from fedharmony.engine.memory import ClientMemory
from fedharmony.errors import ConfigError
from fedharmony.experiments import run
from fedharmony.experiments.binding import bind
from fedharmony.experiments.blueprint import Blueprint, Facts, blueprint
from fedharmony.experiments.build import Assembly, Observer, on_device
from fedharmony.experiments.evaluate import Results
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.machine import choose_device
from fedharmony.experiments.settings import Settings
from fedharmony.flower.transport import Enrolled, Post, Sites, gather
from fedharmony.models.base import InputSpec
from fedharmony.partition.base import Partition
from fedharmony.site.policy import offered
from fedharmony.types import FROZEN, Record

logger = logging.getLogger(__name__)

ROSTER = "roster.json"


@dataclass(frozen=True)
class Terms:
    """How a server deals with its sites.

    Attributes:
        sites: how many it waits for before round 0, and again when it resumes.
        wait_s: how long it waits for them.
        limit_s: how long an exchange may take; who has not answered then has failed.
    """

    sites: int
    wait_s: float = 600.0
    limit_s: float = 3600.0


@dataclass(frozen=True, kw_only=True)
class Remote(Assembly):
    """A run whose clients are elsewhere; only the test images are here.

    Attributes:
        transport: makes the transport to the sites, when the run's folder is there.
    """

    transport: Callable[[], Sites]

    @property
    def train_images(self) -> int:
        """The number of training images at all sites."""
        return sum(self.blueprint.facts.sizes.values())

    def federation(
        self, memory: ClientMemory, tick: Callable[[int, int, int], None] | None = None
    ) -> Federation:
        """The round loop over the sites; what clients keep is theirs."""
        return self.blueprint.federation(self.transport())


def start(
    settings: Settings, folder: RunFolder, observe: Observer, post: Post, terms: Terms
) -> Results:
    """A new run over sites; what the same call left when it was cut short goes on."""
    return run.start(settings, folder, observe, build=_builder(folder, post, terms))


def resume(folder: RunFolder, observe: Observer, post: Post, terms: Terms) -> Results:
    """Continue a run over sites where its last checkpoint stands."""
    return run.resume(folder, observe, build=_builder(folder, post, terms))


def _builder(folder: RunFolder, post: Post, terms: Terms) -> run.Build:
    """What puts the run together: enrol the sites, then make method and model for them."""

    def build(
        settings: Settings, partition: Path | None, data: DataSet | None, observe: Observer
    ) -> Remote:
        public = offered(settings)
        loaded = _test_only(datasets[settings.data.common.name](settings.data.own).load())
        roster = folder.read_json(ROSTER) or {"run": uuid.uuid4().hex, "sites": []}
        about = {
            "id": roster["run"],
            "settings": public,
            "classes": list(loaded.classes),
            "shape": list(loaded.test.images.shape),
        }
        names = roster["sites"]
        least = min(terms.sites, len(names)) if names else terms.sites
        sites = gather(post, about, least, terms.wait_s, names)
        names = names or sorted(sites)
        facts = _facts(loaded, names, {**roster.get("seen", {}), **_seen(names, sites)})
        plan = blueprint(settings, facts)
        device = choose_device(settings.engine.device)
        partition_by_size = _partition(facts)

        def transport() -> Sites:
            seen = {**roster.get("seen", {}), **_seen(names, sites)}
            folder.write_json(ROSTER, {"run": roster["run"], "sites": names, "seen": seen})
            return _transport(post, plan, about, dict(enumerate(names)), sites, terms, folder)

        bound = bind(loaded, partition_by_size)
        bound |= {f"data of site {name}": sites[name].bound for name in names if name in sites}
        before = folder.read_json("binding.json") or {}
        missing = {f"data of site {name}" for name in names if name not in sites}
        bound |= {part: before[part] for part in missing if part in before}
        return Remote(
            blueprint=plan,
            loaded=loaded,
            data=on_device(loaded, device),
            partition=partition_by_size,
            clients={},
            device=device,
            mode=ComputeMode(),
            bound=bound,
            transport=transport,
        )

    return build


def _test_only(data: DataSet) -> DataSet:
    """The test part of the server's data; whatever it has to train on stays out of the run."""
    shape, classes = data.test.images.shape, len(data.classes)
    if len(shape) != 3:
        raise ConfigError(
            "A federation of sites needs images: feature vectors are standardised by the means of "
            "all training data, which nobody has in one place. Set data.name to images."
        )
    none = TensorImages(torch.zeros(0, *shape, dtype=torch.uint8))
    empty = LabelledImages(none, np.zeros((0, classes), np.uint8))
    return replace(data, train=empty)


def _seen(names: list[str], sites: Mapping[str, Enrolled]) -> dict[str, Any]:
    """What sites said of themselves, as the roster keeps it."""
    return {n: {"images": s.images, "unknown": s.unknown} for n, s in sites.items() if n in names}


def _facts(data: DataSet, names: list[str], seen: Mapping[str, Any]) -> Facts:
    """What is known of the sites; those that are away now are as they were."""
    sizes = {client: int(seen[name]["images"]) for client, name in enumerate(names)}
    unknown = any(seen[name]["unknown"] for name in names)
    return Facts(data.classes, InputSpec(*data.test.images.shape), sizes, unknown, names)


def _partition(facts: Facts) -> Partition:
    """A stand-in for the split: how many images each site has, as consecutive numbers."""
    ends = np.cumsum(list(facts.sizes.values()))
    starts = np.concatenate([[0], ends[:-1]])
    indices = tuple(np.arange(a, b) for a, b in zip(starts, ends, strict=True))
    return Partition(indices, int(ends[-1]), splitter="sites")


def _transport(
    post: Post,
    plan: Blueprint,
    about: Mapping[str, Any],
    names: Mapping[int, str],
    sites: Mapping[str, Enrolled],
    terms: Terms,
    folder: RunFolder,
) -> Sites:
    """The transport of a run, with what its log says of who was heard last."""
    heard: dict[int, int] = {}
    for event in folder.read_events():
        if event["event"] == "round":
            heard |= dict.fromkeys(event["reported"], event["round"])
    said = {
        **about,
        "clients": len(names),
        "unknown": plan.facts.unknown_labels,
        "frozen": digest(Record({FROZEN: plan.parameters[1]})),
    }
    nodes = {client: sites[name].node if name in sites else 0 for client, name in names.items()}
    return Sites(post, said, names, plan.facts.sizes, nodes, terms.limit_s, heard)
