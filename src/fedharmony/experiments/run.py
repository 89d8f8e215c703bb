"""One run, from settings to results."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist

from fedharmony.config import machine_memory
from fedharmony.correlation import label_correlation
from fedharmony.data.annotations import FileSource
from fedharmony.data.base import DataSet, Images, LabelledImages, TensorImages, datasets
from fedharmony.data.cache import MappedImages
from fedharmony.data.features import moments
from fedharmony.engine.checkpoint import digest
from fedharmony.engine.cohort import Cohort
from fedharmony.engine.federation import Event, Federation, FederationSettings
from fedharmony.engine.gpu.barrier import compiler_is_safe
from fedharmony.engine.gpu.payoff import compiling_pays
from fedharmony.engine.means import Means
from fedharmony.engine.memory import SEALS, ClientMemory
from fedharmony.engine.optimise import TrainSettings
from fedharmony.engine.room import StackRule, Trial
from fedharmony.engine.sampling import cohort_size, draw_schedule, gathered_rounds
from fedharmony.errors import CheckpointError, ConfigError, FedHarmonyError, Stopped
from fedharmony.experiments.binding import Binding, bind
from fedharmony.experiments.folder import EventLog, RunFolder, Saved, environment, jsonable
from fedharmony.experiments.outlook import scratch_warning, time_warning
from fedharmony.experiments.settings import CENTRAL_METHOD, EngineSettings, Settings
from fedharmony.files import refuse_if_held
from fedharmony.methods.base import Method, Task, methods
from fedharmony.metrics import (
    ClientsResult,
    MultiLabelResult,
    ScoreStore,
    StructureResult,
    evaluate_clients,
    structure_metrics,
    trivial_baselines,
)
from fedharmony.models.base import Backbone, FeatureSpec, InputSpec, Model, models
from fedharmony.partition.annotation import client_known
from fedharmony.partition.base import Partition, splitters
from fedharmony.partition.feature_skew import feature_skew, skewed_images
from fedharmony.partition.report import label_shares, paired_labels, split_report
from fedharmony.rng import numpy_rng, torch_rng
from fedharmony.transport.base import Transport
from fedharmony.transport.inprocess import InProcess
from fedharmony.transport.processes import Processes, crew, join
from fedharmony.types import BUFFERS, FROZEN, PARAMS, Index, Labels, Record, Tensors

logger = logging.getLogger(__name__)

Observer = Callable[[Event], None]
Results = dict[str, Any]
EVAL_BATCH = 256
#: Test users times labels up to which each user's metrics are computed: a minute or so.
MOST_USER_LABELS = 200_000


def choose_device(name: str) -> torch.device:
    """The device of a run: "auto" takes CUDA where there is one."""
    if name == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda", crew().local_rank)
        return torch.device("cpu")
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"engine.device = {name!r} is no device: {error}.") from None
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"engine.device = {name!r}: runs work on 'cpu' and 'cuda' only.")
    present = torch.cuda.device_count() if device.type == "cuda" else 1
    if device.type == "cuda" and not present:
        raise ConfigError(f"engine.device = {name!r}, but torch sees no CUDA device. Use 'cpu'.")
    if (device.index or 0) >= present:
        raise ConfigError(
            f"engine.device = {name!r}, but the last one is '{device.type}:{present - 1}'."
        )
    return device


def choose_means(engine: EngineSettings, device: torch.device, elements: int, images: int) -> Means:
    """How to compute on a device, where the settings leave it open.

    ``elements`` per image that the layers hand on, and ``images`` to be trained on in all.
    """
    cuda = device.type == "cuda"
    if engine.graphs and not cuda:
        raise ConfigError(
            f"engine.graphs = true needs a CUDA device, but the run is on {device}. Leave it out."
        )
    half = cuda and torch.cuda.is_bf16_supported()
    compile = engine.compile
    if compile is None:
        compile = cuda and compiling_pays(elements, images)
    if compile and cuda and not compiler_is_safe():
        if engine.compile:
            raise ConfigError(
                f"engine.compile = true, but the compiler of torch {torch.__version__} can write "
                "kernels that read what they have not written yet. Use torch 2.14 or later, or "
                "leave it out."
            )
        compile = False
    return Means(
        half=half if engine.precision == "auto" else engine.precision == "bfloat16",
        graphs=cuda if engine.graphs is None else engine.graphs,
        compile=compile,
    )


@dataclass(frozen=True)
class Evaluation:
    """The global model on the pooled test set."""

    metrics: MultiLabelResult
    structure: StructureResult
    users: ClientsResult | None = None  # where the test images have owners

    def structure_numbers(self) -> dict[str, Any]:
        """The correlation-structure metrics without their matrices."""
        found = asdict(self.structure)
        return {name: value for name, value in found.items() if not name.endswith("_matrix")}

    def event(self, round: int, seconds: float) -> Event:
        """As one JSON line."""
        return {
            "event": "evaluate",
            "round": round,
            "seconds": seconds,
            "metrics": self.metrics.as_dict(),
            "structure": self.structure_numbers(),
        }


@dataclass(frozen=True)
class Assembly:
    """Everything a run is made of, built and checked before round 0."""

    settings: Settings
    data: DataSet
    partition: Partition
    clients: Sequence[Index]  # what each client trains on: its part, less what is held out
    model: Model
    method: Method
    schedule: list[list[int]]
    device: torch.device
    means: Means
    bound: Binding  # what all this was made of

    @cached_property
    def parameters(self) -> tuple[Tensors, Tensors]:
        """The initial model: what is trained, and what is frozen."""
        seed = self.settings.model.common.seed
        return self.model.divide(self.model.init(torch_rng(seed, "model")))

    def initial_state(self) -> Record:
        """The server's state before round 0."""
        trained, frozen = self.parameters
        state = self.method.init_state(trained, {})
        return (state.replace({FROZEN: frozen}) if frozen else state).to(self.device)

    def refuse_other_constants(self, state: Record, rounds_done: int) -> None:
        """Refuse to go on with other frozen tensors than the run began with."""
        saved, made = state.get(FROZEN), self.parameters[1]
        same = saved.keys() == made.keys() and all(torch.equal(saved[n], made[n]) for n in made)
        # After the last round a method may have fitted them; nothing is trained with them then.
        if not same and rounds_done < self.settings.run.rounds:
            raise CheckpointError(
                "The frozen part of the model is not the one this run began with: a file it is "
                "read from (weights, label text) has changed since. Put the old file back, or "
                "start a new run."
            )

    def federation(
        self, memory: ClientMemory, tick: Callable[[int, int, int], None] | None = None
    ) -> Federation:
        """The round loop over in-process clients."""
        cohort = Cohort(
            self.model,
            self.method,
            self.data.train,
            self.clients,
            self.training,
            self.settings.run.seed,
            self.device,
            self.settings.engine.sweep_batch,
            self.parameters[1],
            memory,
            self.settings.augment,
            self.means,
        )
        transport: Transport = InProcess(cohort, self.stack_rule(), tick)
        if crew().size > 1:
            join(self.device, self.settings.engine.wait_s)
            transport = Processes(transport, crew(), self.device)
        return Federation(
            method=self.method,
            transport=transport,
            schedule=self.schedule,
            settings=self.taking_part,
            seed=self.settings.run.seed,
            epochs=self.training.epochs,
        )

    @property
    def training(self) -> TrainSettings:
        """Local training; what one party sees in place of a cohort is counted out already."""
        training = self.settings.training
        return replace(training, epochs=1) if self.settings.federation.central else training

    @property
    def taking_part(self) -> FederationSettings:
        """Who takes part; one party in place of a cohort does not drop out."""
        federation = self.settings.federation
        return replace(federation, drop_rate=0.0) if federation.central else federation

    def stack_rule(self) -> StackRule:
        """How many clients train at once: as the settings say, or as a trial shows."""
        engine, params = self.settings.engine, {**self.parameters[0], **self.parameters[1]}
        batch, image = self.settings.train.batch_size, self.data.train.images.shape
        if engine.stack is None:
            return Trial(self.model, params, self.means, self.device, batch, image).rule()
        return StackRule(engine.stack if self.model.backbone.stackable else 1)

    @torch.no_grad()
    def evaluate(self, state: Record, by_user: bool = False) -> Evaluation:
        """The global model on the pooled test set; on request also user by user."""
        store, test = ScoreStore(), self.data.test
        groups, message = (PARAMS, FROZEN, BUFFERS), self.method.evaluation(state)
        # In one memory order, whether the state comes from clients or from a file: products of
        # transposed matrices have other last bits.
        params = {n: t.contiguous().unsqueeze(0) for g in groups for n, t in state.get(g).items()}
        for start in range(0, len(test), EVAL_BATCH):
            index = torch.arange(start, min(start + EVAL_BATCH, len(test)))
            images = test.images.gather(index, self.device)
            inputs = self.method.normalise(images, message, {})
            outputs = self.model.apply(params, inputs.unsqueeze(0))[0]
            scores = self.method.predict(outputs.float(), state)
            known = None if test.known is None else test.known[start : start + EVAL_BATCH]
            store.add(scores, test.labels[start : start + EVAL_BATCH], known)
        scores_seen, targets, known = store.arrays()
        options, paired = self.settings.metrics, paired_labels(test.labels)
        users = None
        if by_user and (parts := owners(test)) is not None:
            users = evaluate_clients(scores_seen, targets, parts, options, known)
        if len(paired) < len(self.data.classes):
            scores_seen, targets = scores_seen[:, paired], targets[:, paired]
            known = None if known is None else known[:, paired]
        structure = structure_metrics(scores_seen, targets, options.threshold, known)
        return Evaluation(store.result(options), structure, users)


def owners(test: LabelledImages) -> list[Index] | None:
    """The test images of each user; None without users, or with too many to look at one by one."""
    if test.users is None:
        return None
    names, user = np.unique(test.users, return_inverse=True)
    if len(names) * test.labels.shape[1] > MOST_USER_LABELS:
        return None
    order = np.argsort(user, kind="stable")
    return np.split(order, np.cumsum(np.bincount(user))[:-1])


def draw_partition(
    settings: Settings, labels: Labels, users: npt.NDArray[Any] | None, file: Path | None = None
) -> Partition:
    """The split of the training images: from a file, or drawn."""
    split = settings.split.common
    if file is not None or split.file is not None:
        partition = Partition.load(Path(file or split.file), len(labels))
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


def in_one_place(
    settings: Settings, pool: Sequence[Index], schedule: Sequence[Sequence[int]]
) -> tuple[list[Index], list[list[int]]]:
    """The rounds of one party with the images of all clients: what each trains on, and cohorts.

    Round t is a client of its own, which nobody remembers: so its images can be counted out.
    """
    if settings.method_name != CENTRAL_METHOD:
        raise ConfigError(
            f"federation.central = true trains in one place, where {settings.method_name!r} has no "
            f"meaning. Set run.method = {CENTRAL_METHOD!r}."
        )
    sizes = [len(index) for index in pool]
    rate, seed = settings.federation.drop_rate, settings.run.seed
    images = np.sort(np.concatenate(pool))
    rounds = gathered_rounds(images, sizes, schedule, settings.training.epochs, rate, seed)
    return rounds, [[t] if len(part) else [] for t, part in enumerate(rounds)]


def load_data(settings: Settings, observe: Observer, partition_file: Path | None) -> DataSet:
    """The data set; images that must be decoded first say so as events.

    An hour of decoding should not end in a split that cannot be made, or in weights that cannot be
    read: with image files, both are tried on the annotations first.
    """
    source = datasets[settings.data.common.name](settings.data.own)
    if not isinstance(source, FileSource):
        return source.load()
    content = source.annotations()
    source.refuse_missing(content)
    draw_partition(settings, content[1].labels, content[1].users, partition_file)
    side = source.config.image_size
    make_backbone(settings, InputSpec(3, side, side)).init(torch_rng(0, "model"))
    return source.load(lambda d, n: observe({"event": "decode", "done": d, "total": n}), content)


def input_spec(images: Images) -> InputSpec | FeatureSpec:
    """What a backbone for these images, or feature vectors, is built for."""
    if len(images.shape) == 1:
        return FeatureSpec(*moments(images))
    return InputSpec(*images.shape)


def make_backbone(settings: Settings, input: InputSpec | FeatureSpec) -> Backbone:
    """The backbone for images, or feature vectors, of a shape."""
    name = settings.model.common.name
    takes = models[name].takes
    if not isinstance(input, takes):
        fitting = [other for other in models.names() if isinstance(input, models[other].takes)]
        raise ConfigError(
            f"Model {name!r} takes {takes.kind}, but data set {settings.data.common.name!r} has "
            f"{input}. Set model.name to one of: {', '.join(fitting)}."
        )
    if settings.augment.active and isinstance(input, FeatureSpec):
        raise ConfigError(
            f"Section [augment] changes images, but data set {settings.data.common.name!r} has "
            f"{input}. Remove the section."
        )
    backbone = models[name](settings.model.own, input)
    refuse_too_large(sum(math.prod(shape) for shape in backbone.shapes().values()))
    return backbone


def make_model(settings: Settings, backbone: Backbone, method: Method) -> Model:
    """The backbone with the method's head; refused where one lacks what the other needs."""
    head = method.head(backbone.width)
    names = f"Method {settings.method_name!r} cannot be used with model {backbone.name!r}"
    if head.reads == "patches" and not backbone.patches:
        raise ConfigError(
            f"{names}: it reads the patches (tokens) of an image, and this model has none. Choose "
            "another method or, if the data are images, a vision transformer."
        )
    model = Model(backbone, head)
    if model.shapes().keys() <= head.frozen:
        raise ConfigError(
            f"{names}: the method keeps the classifier as it is, and this model has no other layer "
            "to train. Choose a model with hidden layers, for instance mlp."
        )
    refuse_too_large(model.num_parameters)
    return model


def refuse_too_large(parameters: int) -> None:
    """Refuse a model that this machine cannot hold twice: once as it is, and once trained."""
    memory = machine_memory()
    if 8 * parameters > memory:
        raise ConfigError(
            f"A model of {parameters:,} parameters needs {8 * parameters / 1e9:,.0f} GB at the "
            f"very least; this machine has {memory / 1e9:,.0f} GB. Choose a smaller model."
        )


def assemble(
    settings: Settings,
    partition_file: Path | None = None,
    data: DataSet | None = None,
    observe: Observer = lambda event: None,
) -> Assembly:
    """Build data, split, model and method; whatever does not fit is refused here."""
    device = choose_device(settings.engine.device)
    if settings.engine.threads is not None:
        torch.set_num_threads(settings.engine.threads)
    torch.set_float32_matmul_precision("high" if settings.engine.tf32 else "highest")
    if settings.engine.deterministic:
        # Read when the first product is computed on a GPU; without it products may not repeat.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # noqa: B010
    if settings.engine.deterministic != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(settings.engine.deterministic)  # loads the compiler
    loaded = data or load_data(settings, observe, partition_file)
    data = on_device(loaded, device)
    partition = draw_partition(settings, data.train.labels, data.train.users, partition_file)
    clients: Sequence[Index] = partition.indices
    held = None
    if settings.split.common.holdout > 0:
        clients, held = hold_out(partition, settings.split.common.holdout)
        # A label that the owner of an image does not annotate cannot serve to choose settings.
        data = replace(data, test=as_annotated(data.train, partition, settings).subset(held))
    spec = input_spec(loaded.train.images)
    backbone = make_backbone(settings, spec)
    run, train, federation = settings.run, settings.training, settings.federation
    seen = data if federation.central else as_clients_see(data, partition, settings)
    task = Task(
        classes=len(data.classes),
        clients=len(partition.indices),
        rounds=run.rounds,
        batch_size=train.batch_size,
        epochs=train.epochs,
        seed=run.seed,
        width=backbone.width,
        lr=train.lr,
        optimiser=train.optimiser,
        momentum=train.momentum,
        loss=settings.loss,
        labels=data.classes,
        average=federation.average,
        mean=backbone.mean,
        std=backbone.std,
        pixels=isinstance(spec, InputSpec),
        unknown_labels=seen.train.known is not None,
    )
    method = methods[settings.method_name](settings.method_config(), task)
    sizes = [len(index) for index in clients]
    holders = sum(size > 0 for size in sizes)
    cohort = cohort_size(holders, federation.participation, federation.cohort)
    schedule = draw_schedule(sizes, run.rounds, cohort, federation.sampling, run.seed)
    if federation.central:
        clients, schedule = in_one_place(settings, clients, schedule)
    model = make_model(settings, backbone, method)
    return Assembly(
        settings=settings,
        data=seen,
        partition=partition,
        clients=clients,
        model=model,
        method=method,
        schedule=schedule,
        device=device,
        means=choose_means(
            settings.engine,
            device,
            model.backbone.elements(),
            train.epochs * sum(len(clients[k]) for cohort in schedule for k in cohort),
        ),
        bound=bind(loaded, partition, held),
    )


def hold_out(partition: Partition, share: float) -> tuple[list[Index], Index]:
    """What each client keeps, and what is held out of all of them; one image stays at least.

    Drawn with the split's own seed: the same for every method and run seed.
    """
    kept, held = [], []
    for client, own in enumerate(partition.indices):
        order = numpy_rng(partition.seed, "holdout", client=client).permutation(own)
        cut = min(round(share * len(own)), len(own) - 1)
        kept.append(np.sort(order[cut:]))
        held.append(order[:cut])
    pool = np.sort(np.concatenate(held))
    if not len(pool):
        raise ConfigError(
            f"split.holdout = {share:g} holds out no image at all: every client is too small. Use "
            "fewer clients or a larger share."
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


def with_threads(settings: Settings) -> Settings:
    """The same settings with the number of CPU threads written down: the bits depend on it."""
    threads = settings.engine.threads or torch.get_num_threads()
    return replace(settings, engine=replace(settings.engine, threads=threads))


def start(
    settings: Settings, folder: RunFolder, observe: Observer, data: DataSet | None = None
) -> Results:
    """A new run; returns its results. What the same call left when it was cut short goes on.

    ``data`` saves loading them once more. Of several processes, the first writes; the others return
    nothing.
    """
    settings = with_threads(settings)
    if crew().leads:
        folder.refuse_if_taken(settings)
    if crew().size == 1 and folder.goes_on(settings):
        logger.info("Going on with the run in %s.", folder.path)
        return resume(folder, observe, data=data)
    assembly = assemble(settings, data=data, observe=observe)
    state = assembly.initial_state()  # what a method refuses, it refuses before a folder is made
    with _writing(folder):
        if crew().leads:
            folder.create(settings)
        return _first_round(assembly, state, folder, observe)


def resume(
    folder: RunFolder, observe: Observer, device: str | None = None, data: DataSet | None = None
) -> Results:
    """Continue a run where its last checkpoint stands; on a CPU the result is the same to the bit.

    A completed run is left alone; its results are returned. On another ``device`` than the run
    began on, results agree up to rounding. ``data`` saves loading them once more.
    """
    settings = folder.open()
    if crew().leads:
        refuse_if_held(folder.path)
    if device is not None:
        settings = replace(settings, engine=replace(settings.engine, device=device))
    if (results := finished(folder)) is not None:
        return results
    with _writing(folder):
        if not folder.checkpoint.exists():  # killed before round 0
            folder.refuse_lost_checkpoint()
            assembly = assemble(settings, data=data, observe=observe)
            return _first_round(assembly, assembly.initial_state(), folder, observe)
        saved = folder.load_state(settings)
        assembly = assemble(settings, folder["partition.json"], data, observe)
        folder.refuse_other_material(saved.bound, assembly.bound)
        assembly.refuse_other_constants(saved.state, saved.rounds_done)
        _say_what_differs(folder, assembly.device)
        return _rounds(assembly, folder, saved, observe)


def _writing(folder: RunFolder) -> AbstractContextManager[None]:
    """Of several processes, the first keeps others out of the folder."""
    return folder.writing() if crew().leads else nullcontext()


def _say_what_differs(folder: RunFolder, device: torch.device) -> None:
    """Say why a resumed run may end in other bits, where it may."""
    before, here = folder.read_json("environment.json"), environment(device)
    if not crew().leads or not isinstance(before, dict):
        return
    keys = ("fedharmony", "torch", "numpy", "processor", "device", "accelerator", "threads")
    other = [f"{k} {before[k]}, now {here[k]}" for k in keys if before.get(k, here[k]) != here[k]]
    if other:
        logger.warning(
            "The run began under other conditions (%s): results agree up to rounding, not to the "
            "bit.",
            "; ".join(other),
        )


def finished(folder: RunFolder) -> Results | None:
    """The results of a completed run, else None."""
    results = folder.read_json("results.json")
    return results if isinstance(results, dict) and results.get("status") == "completed" else None


def _first_round(
    assembly: Assembly, state: Record, folder: RunFolder, observe: Observer
) -> Results:
    """Write what is known before round 0, the checkpoint last, and run all rounds."""
    settings = assembly.settings
    saved = Saved(0, state, b"", assembly.bound, f"{0:064x}")
    if crew().leads:
        folder.write_json("environment.json", environment(assembly.device))
        folder.write_json("binding.json", assembly.bound)
        assembly.partition.save(folder["partition.json"])
        labels, seed = assembly.data.train.labels, settings.split.common.seed
        report = split_report(labels, assembly.partition, seed)
        folder.write_json("split_report.json", report.as_dict())
        log = EventLog(folder.events)
        folder.save_state(0, state, settings, saved.bound, log, saved.memory)
    return _rounds(assembly, folder, saved, observe)


def _rounds(assembly: Assembly, folder: RunFolder, saved: Saved, observe: Observer) -> Results:
    """Run the remaining rounds, and leave events, checkpoints and results in the folder."""
    settings, began, first = assembly.settings, time.perf_counter(), saved.rounds_done
    latest: list[Evaluation] = []
    memory = ClientMemory(folder["memory"], settings.engine.memory_mb * 2**20)
    if first < settings.run.rounds and f"{memory.seal(first):064x}" != saved.memory:
        raise CheckpointError(
            f"What clients kept ({folder['memory']}) is not what they had kept at the last "
            "checkpoint: files were removed, added or replaced. Put them back, or start a new run "
            "in another folder."
        )
    memory.rewind(first)
    log = EventLog(folder.events, saved.events) if crew().leads else None

    def record(event: Event) -> None:
        if log is not None:
            log.append(event)
            observe(event)

    def after_round(round: int, state: Record) -> None:
        own = memory.seal(round + 1, lambda client: client % crew().size == crew().rank)
        seal = f"{_sum_of_all(own, assembly.device):064x}"
        if log is None:
            memory.commit(round + 1)
            return
        if (round + 1) % settings.run.eval_every == 0 or round + 1 == settings.run.rounds:
            clock = time.perf_counter()
            latest[:] = [assembly.evaluate(state, by_user=round + 1 == settings.run.rounds)]
            record(latest[0].event(round, time.perf_counter() - clock))
        folder.save_state(round + 1, state, settings, assembly.bound, log, seal)
        memory.commit(round + 1)

    def tick(round: int, done: int, total: int) -> None:
        observe({"event": "progress", "round": round, "done": done, "total": total})

    record(start_event(assembly, first))
    for warning in outlook(assembly, first):
        logger.warning(warning)
    state = saved.state.to(assembly.device)
    try:
        state = assembly.federation(memory, tick).run(state, first, record, after_round)
    except (KeyboardInterrupt, Stopped, FedHarmonyError) as error:
        failed = isinstance(error, FedHarmonyError)
        ending = {
            "event": "finish",
            "status": "failed" if failed else "interrupted",
            "seconds": time.perf_counter() - began,
            "reason": str(error) or "stopped by Ctrl-C",
        }
        with suppress(FedHarmonyError):  # a full disk must not hide what happened
            record(ending)
        raise
    if not crew().leads:
        memory.forget()
        return {}
    evaluation = latest[0] if latest else assembly.evaluate(state, by_user=True)
    folder.save_tensors("matrices.safetensors", matrices(assembly, state, evaluation.structure))
    record({"event": "finish", "status": "completed", "seconds": time.perf_counter() - began})
    results = summarise(assembly, folder, state, evaluation)
    memory.forget()  # no round is left that could ask for it
    folder.write_json("results.json", results)  # last: with it the run is complete
    return results


def _sum_of_all(seal: int, device: torch.device) -> int:
    """The seals of all processes added up."""
    if crew().size == 1:
        return seal
    own = torch.tensor(list(seal.to_bytes(32)), dtype=torch.uint8, device=device)
    parts = [torch.empty_like(own) for _ in range(crew().size)]
    dist.all_gather(parts, own)
    return sum(int.from_bytes(bytes(part.tolist())) for part in parts) % SEALS


def start_event(assembly: Assembly, first: int) -> Event:
    """What is about to run."""
    settings, data = assembly.settings, assembly.data
    return {
        "event": "start",
        "method": settings.method_name,
        "label": settings.label,
        "rounds": settings.run.rounds,
        "clients": 1 if settings.federation.central else len(assembly.partition.indices),
        "cohort": len(assembly.schedule[0]),
        "classes": list(data.classes),
        "train_images": len(data.train),
        "test_images": len(data.test),
        "parameters": assembly.model.num_parameters,
        "device": str(assembly.device),
        "precision": "bfloat16" if assembly.means.half else "float32",
        "compiled": assembly.means.compile,
        "graphs": assembly.means.graphs,
        "resumed_at": first or None,
    }


def outlook(assembly: Assembly, first: int) -> list[str]:
    """What should be known before round ``first`` begins."""
    settings, model, data = assembly.settings, assembly.model, assembly.data
    weights = getattr(settings.model.own, "weights", None)
    warnings = [scratch_warning(model, weights, len(data.train))]
    if assembly.device.type == "cpu":
        left = [assembly.clients[k] for cohort in assembly.schedule[first:] for k in cohort]
        evaluations = math.ceil(len(assembly.schedule[first:]) / settings.run.eval_every)
        warnings.append(
            time_warning(
                model,
                {**assembly.parameters[0], **assembly.parameters[1]},
                data.train.images.shape,
                settings.train.batch_size,
                assembly.training.epochs * sum(map(len, left)),
                evaluations * len(data.test),
            )
        )
    return [warning for warning in warnings if warning and crew().leads]


def matrices(assembly: Assembly, state: Record, structure: StructureResult) -> Tensors:
    """Correlation matrices and label shares for the report; of very many labels, of some."""
    test, classes = assembly.data.test, len(assembly.data.classes)
    paired = paired_labels(test.labels)
    known = None if test.known is None else test.known[:, paired]
    defined = label_correlation(test.labels[:, paired], known=known)[1]
    tensors = {
        "true": torch.from_numpy(structure.true_matrix).float(),
        "true_defined": defined.to(torch.uint8),
        "learned": torch.from_numpy(structure.soft_matrix).float(),
        "learned_hard": torch.from_numpy(structure.hard_matrix).float(),
    }
    if not assembly.settings.federation.central:
        shares = label_shares(assembly.data.train.labels, assembly.partition)
        tensors["client_label_shares"] = torch.from_numpy(shares)  # of groups, if there are many
        tensors["client_sizes"] = torch.from_numpy(assembly.partition.sizes)
    if assembly.data.planted is not None:
        tensors["planted"] = torch.from_numpy(assembly.data.planted).float()
    for name, tensor in assembly.method.artifacts(state).items():
        tensors[name] = tensor.to(torch.uint8) if tensor.dtype == torch.bool else tensor
    if len(paired) < classes:
        index = torch.from_numpy(paired)
        for name, tensor in tensors.items():
            if name in ("true", "true_defined", "learned", "learned_hard"):
                continue  # of these labels already
            first = 1 if name.startswith("client_") else 0  # the first axis is of clients
            axes = [a for a, n in enumerate(tensor.shape) if n == classes and a >= first]
            for axis in axes:
                tensor = tensor.index_select(axis, index.to(tensor.device))
            tensors[name] = tensor
        tensors["labels"] = index
    return tensors


def _known(part: LabelledImages) -> npt.NDArray[np.int64]:
    """Images on which each label is known."""
    known = np.ones_like(part.labels) if part.known is None else part.known
    counts: npt.NDArray[np.int64] = known.sum(axis=0, dtype=np.int64)
    return counts


def _positives(part: LabelledImages) -> npt.NDArray[np.int64]:
    """Images on which each label is known and present."""
    present = part.labels if part.known is None else part.labels * part.known
    counts: npt.NDArray[np.int64] = present.sum(axis=0, dtype=np.int64)
    return counts


def _padding(rounds: Sequence[Event]) -> float | None:
    """Share of the rows computed in training that held no image, if any were counted."""
    counted = [e for e in rounds if e.get("padding") is not None]
    rows = sum(e["images"] / (1 - e["padding"]) for e in counted)
    return 1 - sum(e["images"] for e in rounds) / rows if rows else None


def summarise(
    assembly: Assembly, folder: RunFolder, state: Record, evaluation: Evaluation
) -> Results:
    """The results file: metrics beside what trivial predictors reach, cost, and identities."""
    settings, data, found = assembly.settings, assembly.data, evaluation.metrics
    prevalence = _positives(data.train) / np.maximum(_known(data.train), 1)
    trivial = trivial_baselines(data.test.labels, settings.metrics, prevalence, data.test.known)
    rounds = [e for e in folder.read_events() if e["event"] == "round"]
    positives = _positives(data.test)
    results = {
        "method": settings.method_name,
        "label": settings.label,
        "status": "completed",
        "seed": settings.run.seed,
        "rounds": settings.run.rounds,
        "rounds_done": settings.run.rounds,
        "metrics": found.as_dict(),
        "structure": evaluation.structure_numbers(),
        "per_user": None
        if evaluation.users is None
        else {"users": len(evaluation.users.per_client), "mean": evaluation.users.mean},
        "per_label": [
            {"label": name, "ap": ap, "precision": p, "recall": r, "positives": int(n)}
            for name, ap, p, r, n in zip(
                data.classes,
                found.per_label_ap,
                found.per_label_precision,
                found.per_label_recall,
                positives,
                strict=True,
            )
        ],
        "baselines": {name: result.as_dict() for name, result in trivial.items()},
        "n_classes_with_positives": found.n_classes_with_positives,
        "n_classes_never_predicted": found.n_classes_never_predicted,
        "seconds": sum(e["seconds"] for e in rounds),
        "padding": _padding(rounds),
        "clients_lost": sum(len(e["failures"]) for e in rounds),
        "clients_saved": sum(len(e.get("saved", ())) for e in rounds),
        "bytes_up": sum(e["bytes_up"] for e in rounds),
        "bytes_down": sum(e["bytes_down"] for e in rounds),
        "parameters_sha256": digest(Record({g: state.get(g) for g in (PARAMS, BUFFERS)})),
        "state_sha256": digest(Record(state.groups)),
        "config_sha256": settings.sha256(),
        "partition_sha256": assembly.partition.sha256,
        "bound": assembly.bound,
        "metric_options": asdict(settings.metrics),
    }
    plain: Results = jsonable(results)
    return plain
