"""A run whose clients are sites: the same folder, events, checkpoints and report as any run.

The server has no training images. It needs settings and what the sites say of themselves.
``[data]`` names a data set whose *test* part the global model is measured on, and whose labels are
the federation's; or it is ``sites``, and the model is measured there.
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from fedharmony.data.base import DataSet, LabelledImages, Source, TensorImages, datasets, load_data
from fedharmony.data.sites import AtSites
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.memory import ClientMemory
from fedharmony.errors import ConfigError
from fedharmony.experiments import run as runs
from fedharmony.experiments.binding import bind
from fedharmony.experiments.blueprint import Blueprint, Facts, blueprint
from fedharmony.experiments.build import Assembly, Observer, on_device
from fedharmony.experiments.evaluate import Judge, Results
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.machine import choose_device
from fedharmony.experiments.settings import Settings
from fedharmony.flower import judge
from fedharmony.flower.judge import refuse_options
from fedharmony.flower.post import Post
from fedharmony.flower.roster import Calls, Roster, Site, Terms
from fedharmony.flower.transport import Sites
from fedharmony.models.base import InputSpec
from fedharmony.partition.base import Partition
from fedharmony.records import digest
from fedharmony.server.federation import Federation
from fedharmony.site.policy import offered
from fedharmony.types import FROZEN, Record

logger = logging.getLogger(__name__)

ROSTER = "roster.json"


@dataclass(frozen=True, kw_only=True)
class Remote(Assembly):
    """A run whose clients are elsewhere; only the test images are here.

    Attributes:
        sites: makes the transport to the sites, when the run's folder is there.
    """

    sites: Callable[[], Sites]

    @property
    def train_images(self) -> int:
        """The number of training images at the sites that the run began with."""
        return sum(self.blueprint.facts.sizes.values())

    def federation(
        self, memory: ClientMemory, tick: Callable[[int, int, int], None] | None = None
    ) -> Federation:
        """The round loop over the sites that are online."""
        sites, plan = self.transport(memory), self.blueprint
        seed = None if plan.budget else plan.settings.run.seed
        calls = Calls(sites.roster, plan.taking_part, plan.settings.run.rounds, seed)
        return replace(plan.federation(sites), schedule=calls)

    def transport(
        self, memory: ClientMemory, tick: Callable[[int, int, int], None] | None = None
    ) -> Sites:
        """The way to the sites; what clients keep is theirs."""
        return self.sites()

    def judge(self, federation: Federation) -> Judge | None:
        """The sites, where the server has no test images of its own."""
        if len(self.data.test):
            return None
        assert isinstance(federation.transport, Sites)
        return judge.AtSites(self.blueprint, federation.transport)


def start(
    settings: Settings, folder: RunFolder, observe: Observer, post: Post, terms: Terms
) -> Results:
    """A new run over sites; what the same call left when it was cut short goes on."""
    return runs.start(settings, folder, observe, build=_builder(folder, post, terms))


def resume(folder: RunFolder, observe: Observer, post: Post, terms: Terms) -> Results:
    """Continue a run over sites where its last checkpoint stands."""
    return runs.resume(folder, observe, build=_builder(folder, post, terms))


def _builder(folder: RunFolder, post: Post, terms: Terms) -> runs.Build:
    """What puts the run together: enrol the sites, then make method and model for them."""

    def build(
        settings: Settings, partition: Path | None, data: DataSet | None, observe: Observer
    ) -> Remote:
        public = offered(settings)
        loaded = _test_only(datasets[settings.data.common.name](settings.data.own))
        if not len(loaded.test):
            refuse_options(settings.metrics, len(loaded.classes))
        kept = folder.read_json(ROSTER) or {"run": uuid.uuid4().hex, "sites": {}}
        about = {
            "id": kept["run"],
            "settings": public,
            "classes": list(loaded.classes),
            "shape": list(loaded.test.images.shape),
        }
        sites = {name: Site(**site) for name, site in kept["sites"].items()}
        roster = Roster(post, about, terms, sites)
        roster.gather()
        plan = blueprint(settings, _facts(loaded, roster))
        if plan.rounds < settings.run.rounds:  # sites count rounds by the settings
            raise ConfigError(
                f"privacy.epsilon = {settings.privacy.epsilon} suffices for {plan.rounds} rounds "
                f"only. Set run.rounds = {plan.rounds}."
            )
        partition_by_size = _partition(plan.facts)

        def sites_of_run() -> Sites:
            roster.keep = lambda: folder.write_json(ROSTER, roster.tree())
            roster.keep()
            return _transport(plan, roster, folder)

        founders = {f"data of site {name}": s.bound for name, s in roster.founders.items()}
        device = choose_device(settings.engine.device)
        return Remote(
            blueprint=plan,
            loaded=loaded,
            data=on_device(loaded, device),
            partition=partition_by_size,
            clients={},
            device=device,
            mode=ComputeMode(),
            bound=bind(loaded, partition_by_size) | founders,
            sites=sites_of_run,
        )

    return build


def _test_only(source: Source) -> DataSet:
    """The test part of the server's data; whatever it has to train on stays out of the run."""
    if isinstance(source, AtSites):
        return source.vocabulary()
    data = load_data(source)
    shape, classes = data.test.images.shape, len(data.classes)
    if len(shape) != 3:
        raise ConfigError(
            "A federation of sites needs images: feature vectors are standardised by the means of "
            "all training data, which nobody has in one place. Set data.name to images."
        )
    none = TensorImages(torch.zeros(0, *shape, dtype=torch.uint8))
    empty = LabelledImages(none, np.zeros((0, classes), np.uint8))
    return replace(data, train=empty)


def _facts(data: DataSet, roster: Roster) -> Facts:
    """What is known of the sites that the run began with; those that are away are as they were."""
    sizes = {site.client: site.images for site in roster.founders.values()}
    spec, names = InputSpec(*data.test.images.shape), list(roster.founders)
    return Facts(data.classes, spec, sizes, roster.unknown, names)


def _partition(facts: Facts) -> Partition:
    """A stand-in for the split: how many images each site has, as consecutive numbers."""
    ends = np.cumsum(list(facts.sizes.values()))
    starts = np.concatenate([[0], ends[:-1]])
    indices = tuple(np.arange(a, b) for a, b in zip(starts, ends, strict=True))
    return Partition(indices, int(ends[-1]), splitter="sites")


def _transport(plan: Blueprint, roster: Roster, folder: RunFolder) -> Sites:
    """The transport of a run, with what its log says of who was heard last."""
    heard: dict[int, int] = {}
    for event in folder.read_events():
        if event["event"] == "round":
            heard |= dict.fromkeys(event["reported"], event["round"])
    frozen = digest(Record({FROZEN: plan.parameters[1]}))
    said = {**roster.run, "unknown": plan.facts.unknown_labels, "frozen": frozen}
    return Sites(roster.post, said, roster, roster.terms.limit_s, heard)
