"""A run with its simulated clients: the blueprint, and the data that stand behind it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from fedharmony.attacks import Attackers
from fedharmony.data.base import DataSet, Images, LabelledImages, TensorImages, datasets, load_data
from fedharmony.data.cache import MappedImages
from fedharmony.data.check import Part
from fedharmony.data.features import moments
from fedharmony.data.file_source import Content, FileSource
from fedharmony.engine.cohort import Cohort
from fedharmony.engine.compute_mode import ComputeMode
from fedharmony.engine.memory import ClientMemory
from fedharmony.engine.room import RoomTest, StackRule
from fedharmony.errors import ConfigError
from fedharmony.experiments.binding import Binding, bind, bind_files
from fedharmony.experiments.blueprint import Blueprint, Facts, blueprint
from fedharmony.experiments.machine import choose_device, choose_mode, keep_to_share
from fedharmony.experiments.settings import Settings
from fedharmony.models.base import FeatureSpec, InputSpec
from fedharmony.partition.annotation import client_known
from fedharmony.partition.base import Partition, splitters
from fedharmony.partition.feature_skew import feature_skew, skewed_images
from fedharmony.rng import numpy_rng
from fedharmony.server.federation import Event, Federation
from fedharmony.server.sampling import gathered_rounds
from fedharmony.transport.base import Transport
from fedharmony.transport.inprocess import InProcess
from fedharmony.transport.processes import Processes, join, process_group
from fedharmony.transport.shelf import Shelf
from fedharmony.types import Index, Labels, Record

if TYPE_CHECKING:
    from fedharmony.experiments.evaluate import Judge

Observer = Callable[[Event], None]


@dataclass(frozen=True)
class Assembly:
    """Everything a simulated run is made of, built and checked before round 0.

    Data are kept as ``loaded``, and as clients see them, on the device. ``clients`` is what each
    trains on: its part, less what is held out; thresholds are chosen on some of that, if on any.
    ``bound`` has the hashes of all this. Data may be ``shared`` with other runs.
    """

    blueprint: Blueprint
    loaded: DataSet
    data: DataSet
    partition: Partition
    clients: Mapping[int, Index]
    device: torch.device
    mode: ComputeMode
    bound: Binding
    for_thresholds: LabelledImages | None = None
    attackers: Attackers = field(default_factory=Attackers)
    shared: bool = False

    @property
    def settings(self) -> Settings:
        """The settings of the run."""
        return self.blueprint.settings

    @property
    def train_images(self) -> int:
        """The number of training images."""
        return len(self.data.train)

    def judge(self, federation: Federation) -> Judge | None:
        """What measures global models; none where the test images are here."""
        return None

    def initial_state(self) -> Record:
        """The server's state before round 0, on the device."""
        return self.blueprint.initial_state().to(self.device)

    def federation(
        self, memory: ClientMemory, tick: Callable[[int, int, int], None] | None = None
    ) -> Federation:
        """The round loop over all clients; malicious ones attack on the way back."""

        def false() -> Transport:
            data, classes = self.data, self.data.classes
            train = self.attackers.falsified(data.train, self.clients, classes)
            return replace(self, data=replace(data, train=train)).transport(memory)

        way = self.attackers.over(self.transport(memory, tick), false)
        return self.blueprint.federation(way)

    def transport(
        self, memory: ClientMemory, tick: Callable[[int, int, int], None] | None = None
    ) -> Transport:
        """The way to clients in this process, or in those that ``torchrun`` started."""
        plan, engine = self.blueprint, self.settings.engine
        cohort = Cohort(
            plan.model,
            plan.method,
            self.data.train,
            self.clients,
            plan.training,
            self.settings.run.seed,
            self.device,
            engine.sweep_batch,
            plan.parameters[1],
            memory,
            self.settings.augment,
            self.mode,
            plan.clipping,
        )
        transport: Transport = InProcess(cohort, self.stack_rule(), tick, self._shelf())
        if process_group().size > 1:
            join(self.device, engine.wait_s)
            transport = Processes(transport, process_group(), self.device)
        return transport

    def _shelf(self) -> Shelf | None:
        """Answers that several runs on these data share; none where some are malicious.

        Its place is what answers depend on beside the question, or how they are computed. The model
        itself is part of the question, whatever seed it comes from.
        """
        if not self.shared or self.attackers.active:
            return None
        whole = self.settings.tree()
        tree = {section: whole[section] for section in ("data", "split", "engine")}
        tree["model"] = {k: v for k, v in whole["model"].items() if k != "seed"}
        tree["head"] = {k: v for k, v in whole["federation"].items() if k.startswith("head_")}
        tree["batch"] = self.settings.train.batch_size  # decides on the width of stacks
        owners = hashlib.sha256()
        for client, images in self.clients.items():
            owners.update(f"{client} {len(images)} ".encode())
            owners.update(np.ascontiguousarray(images).data)
        facts = [tree, self.bound, owners.hexdigest(), str(self.device), repr(self.mode)]
        return Shelf(self.loaded.shelf, json.dumps(facts, sort_keys=True, default=str))

    def stack_rule(self) -> StackRule:
        """How many clients train at once: as the settings say, or as a trial shows."""
        engine, model = self.settings.engine, self.blueprint.model
        if engine.stack is not None:
            return StackRule(engine.stack if model.backbone.stackable else 1)
        trained, frozen = self.blueprint.parameters
        batch, shape = self.settings.train.batch_size, self.data.train.images.shape
        params = {**trained, **frozen}
        return RoomTest(model, params, self.mode, self.device, batch, shape).rule()


def assemble(
    settings: Settings,
    partition_file: Path | None = None,
    data: DataSet | None = None,
    observe: Observer = lambda event: None,
) -> Assembly:
    """Build data, split, model and method; whatever does not fit is refused here.

    The split is read from ``partition_file``, or is the one that the settings say. ``data`` saves
    loading them; ``observe`` is told of images that are decoded.
    """
    device = choose_device(settings.engine.device)
    keep_to_share(device, settings.engine.gpu_share or 1.0)
    shared = data is not None
    if data is None:
        loaded, drafted = _load(settings, partition_file, observe)
    else:
        loaded, drafted = data, draft(settings, _contents_of(data), partition_file)
    plan, partition, clients = drafted.blueprint, drafted.partition, drafted.clients
    data = on_device(loaded, device)
    # A label that the owner of an image does not annotate cannot serve to choose anything.
    annotated = as_annotated(data.train, partition, settings)
    if drafted.held_out is not None:
        data = replace(data, test=annotated.subset(drafted.held_out))
    chosen = drafted.for_thresholds
    holders = [client for client, images in clients.items() if len(images)]
    attackers = Attackers(settings.attack, holders, settings.run.seed)
    attackers.label(data.train, data.classes)  # refuses one that there is not
    if plan.gathered is None:
        data = as_clients_see(data, partition, settings)
    else:
        images = np.sort(np.concatenate(list(clients.values())))
        clients = dict(enumerate(gathered_rounds(images, plan.gathered, settings.run.seed)))
    backbone = plan.model.backbone
    mode = choose_mode(settings.engine, device, backbone.elements(), plan.images)
    return Assembly(
        blueprint=plan,
        loaded=loaded,
        data=data,
        partition=partition,
        clients=clients,
        device=device,
        mode=mode.exact() if backbone.mixes_images else mode,
        attackers=attackers,
        bound=bind(loaded, partition, drafted.held_out) | bind_files(settings.files()),
        for_thresholds=None if chosen is None else annotated.subset(chosen),
        shared=shared,
    )


@dataclass(frozen=True)
class Draft:
    """What is made of labels alone, before the images are read.

    ``held_out`` are the training images that take the place of the test set, if any do.
    """

    partition: Partition
    clients: Mapping[int, Index]
    held_out: Index | None
    for_thresholds: Index | None
    blueprint: Blueprint


@dataclass(frozen=True)
class Contents:
    """What a data set holds, less its pixels."""

    classes: tuple[str, ...]
    input: InputSpec | FeatureSpec
    train: Part
    test: Part


def contents(settings: Settings, complete: bool = False) -> Contents:
    """What the chosen data set holds; images in files are not decoded.

    ``complete`` refuses data of which image files are missing.
    """
    source = datasets[settings.data.common.name](settings.data.own)
    if not isinstance(source, FileSource):
        return _contents_of(load_data(source))
    content = source.annotations()
    if complete:
        source.refuse_missing(content)
    return _contents_of_files(source, content)


def _contents_of(data: DataSet) -> Contents:
    spec = input_spec(data.train.images, data.features)
    return Contents(data.classes, spec, data.train, data.test)


def _contents_of_files(source: FileSource, content: Content) -> Contents:
    side = source.config.image_size
    return Contents(content[0], InputSpec(3, side, side), content[1], content[2])


def _load(
    settings: Settings, partition_file: Path | None, observe: Observer
) -> tuple[DataSet, Draft]:
    """Load the data and draft the run; images that must be decoded say so as events.

    An hour of decoding should not end in a split that cannot be made, or in weights that cannot be
    read: with image files, both are made of the annotations first.
    """
    source = datasets[settings.data.common.name](settings.data.own)
    if not isinstance(source, FileSource):
        data = load_data(source)
        return data, draft(settings, _contents_of(data), partition_file)
    content = source.annotations()
    source.refuse_missing(content)
    drafted = draft(settings, _contents_of_files(source, content), partition_file)
    _ = drafted.blueprint.parameters  # reads the weights, once
    data = source.load(lambda d, n: observe({"event": "decode", "done": d, "total": n}), content)
    if len(data.train) < len(content[1]):  # images that cannot be read were left out
        drafted = draft(settings, _contents_of(data), partition_file)
    return data, drafted


def input_spec(images: Images, names: tuple[str, ...] = ()) -> InputSpec | FeatureSpec:
    """What a backbone for these images, or feature vectors (with names), is built for."""
    if len(images.shape) == 1:
        return FeatureSpec(*moments(images), names)
    return InputSpec(*images.shape)


def draft(settings: Settings, data: Contents, partition_file: Path | None = None) -> Draft:
    """Split the training images, and make everything that needs no pixels."""
    split, central, train = settings.split.common, settings.federation.central, data.train
    partition = draw_partition(settings, train.labels, train.users, partition_file)
    clients, held_out, chosen = dict(enumerate(partition.indices)), None, None
    if split.holdout > 0:
        clients, held_out = hold_out(clients, split.holdout, partition.seed, "holdout")
    if settings.run.thresholds > 0:
        share = settings.run.thresholds
        clients, chosen = hold_out(clients, share, partition.seed, "thresholds")
    sizes = {k: len(index) for k, index in clients.items()}
    unknown = train.known is not None or (split.annotated < 1 and not central)
    names = () if central else partition.names
    facts = Facts(data.classes, data.input, sizes, unknown, names)
    return Draft(partition, clients, held_out, chosen, blueprint(settings, facts))


def draw_partition(
    settings: Settings, labels: Labels, users: npt.NDArray[Any] | None, file: Path | None = None
) -> Partition:
    """The split of the training images: from a file, or drawn."""
    split = settings.split.common
    if chosen := file or split.file:
        partition = Partition.load(Path(chosen), len(labels))
        if split.clients is not None and len(partition.indices) != split.clients:
            raise ConfigError(
                f"The partition file holds {len(partition.indices)} clients, but split.clients = "
                f"{split.clients}. Set split.clients to the number in the file."
            )
        return partition
    splitter = splitters[split.name](settings.split.own)
    partition = splitter.partition(labels, split.clients, split.seed, users)
    return feature_skew(partition, split.transforms, split.seed) if split.transforms else partition


def as_clients_see(data: DataSet, partition: Partition, settings: Settings) -> DataSet:
    """The training data with each client's own transform, and its own known labels."""
    train = replace(data.train, images=skewed_images(data.train.images, partition))
    return replace(data, train=as_annotated(train, partition, settings))


def as_annotated(train: LabelledImages, partition: Partition, settings: Settings) -> LabelledImages:
    """The training images with the labels that their owners annotate."""
    split = settings.split.common
    if split.annotated == 1:
        return train
    known = client_known(train.labels, partition, split.annotated, split.seed)
    return replace(train, known=known if train.known is None else known & train.known)


def hold_out(
    clients: Mapping[int, Index], share: float, seed: int, purpose: str
) -> tuple[dict[int, Index], Index]:
    """What each client keeps, and what is held out of all of them; one image stays at least.

    Drawn with the split's own seed: the same for every method and run seed.
    """
    kept, held = {}, []
    for client, own in clients.items():
        order = numpy_rng(seed, purpose, client=client).permutation(own)
        cut = min(round(share * len(own)), len(own) - 1)
        kept[client] = np.sort(order[cut:])
        held.append(order[:cut])
    pool = np.sort(np.concatenate(held))
    if not len(pool):
        raise ConfigError(
            f"A share of {share:g} (split.holdout, run.thresholds) holds out no image at all: "
            "every client is too small. Use fewer clients or a larger share."
        )
    return kept, pool


def on_device(data: DataSet, device: torch.device) -> DataSet:
    """The same data with in-memory images moved to the device once."""

    def move(part: LabelledImages) -> LabelledImages:
        images = part.images
        if isinstance(images, TensorImages | MappedImages):
            return replace(part, images=images.to(device))
        return part

    return replace(data, train=move(data.train), test=move(data.test))
