"""What a run is, without any data: method, model and cohorts, from settings and a few facts.

A server needs no more than this. :mod:`~fedharmony.experiments.build` adds the data to it, where
clients are simulated.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch

from fedharmony.attacks import attacks
from fedharmony.config import machine_memory
from fedharmony.engine.optimise import TrainSettings
from fedharmony.errors import CheckpointError, ConfigError
from fedharmony.experiments.settings import CENTRAL_METHOD, Settings
from fedharmony.methods.base import Method, Stage, Task, methods
from fedharmony.models.base import Backbone, FeatureSpec, InputSpec, Model, models
from fedharmony.privacy import Budget, Clipping, Exchanges, Ledger, Noise, budget
from fedharmony.rng import torch_rng
from fedharmony.robust import Robust
from fedharmony.server.federation import Federation, FederationSettings, stages_of
from fedharmony.server.head_start import opening
from fedharmony.server.sampling import Schedule, cohort_size, images_of_rounds
from fedharmony.server.server_average import ServerAverage
from fedharmony.terminal import warn_once
from fedharmony.transport.base import Transport
from fedharmony.types import FROZEN, Record, Tensors


@dataclass(frozen=True)
class Facts:
    """What must be known of the clients' data before round 0.

    ``input`` is what a model of these data is built for; ``sizes`` are the images that each client
    trains on, by its id; clients may have names.
    """

    classes: tuple[str, ...]
    input: InputSpec | FeatureSpec
    sizes: Mapping[int, int]
    unknown_labels: bool = False
    names: Sequence[str] = ()


@dataclass(frozen=True)
class Blueprint:
    """A run without data: method, model, and the cohort of each round.

    ``opening`` are exchanges before the first training, whatever the method; ``gathered`` is the
    number of images that each round sees where one party trains; ``budget`` is what a run with
    private clients costs.
    """

    settings: Settings
    facts: Facts
    model: Model
    method: Method
    schedule: Sequence[Sequence[int]]
    opening: Sequence[Stage] = ()
    gathered: Sequence[int] | None = None
    budget: Budget | None = None

    @property
    def rounds(self) -> int:
        """Rounds of the run: as many as were asked for, or as a budget allows."""
        return len(self.schedule)

    @property
    def cohort(self) -> int:
        """Clients per round, as expected where cohorts differ in size."""
        return self.schedule.cohort if isinstance(self.schedule, Schedule) else 1

    @property
    def clipping(self) -> Clipping | None:
        """How clients bound what they send, if they do."""
        privacy = self.settings.privacy
        return Clipping(privacy.clip, privacy.clip_sums) if privacy.active else None

    @property
    def noise(self) -> Noise | None:
        """What sums get before they are read, if anything; each time with a ledger of its own."""
        if self.budget is None or (clipping := self.clipping) is None:
            return None
        return Noise(clipping, Ledger(self.budget, self.settings.privacy.noise_seed))

    @cached_property
    def parameters(self) -> tuple[Tensors, Tensors]:
        """The initial model: what is trained, and what is frozen."""
        seed = self.settings.model.common.seed
        return self.model.divide(self.model.init(torch_rng(seed, "model")))

    def initial_state(self) -> Record:
        """The server's state before round 0."""
        trained, frozen = self.parameters
        state = self.method.init_state(trained, self.model.backbone.init_buffers())
        return state.replace({FROZEN: frozen}) if frozen else state

    def refuse_other_constants(self, state: Record, rounds_done: int) -> None:
        """Refuse to go on with other frozen tensors than the run began with."""
        saved, made = state.get(FROZEN), self.parameters[1]
        same = saved.keys() == made.keys() and all(torch.equal(saved[n], made[n]) for n in made)
        # After the last round a method may have fitted them; nothing is trained with them then.
        if not same and rounds_done < self.rounds:
            raise CheckpointError(
                "The frozen part of the model is not the one this run began with: a file it is "
                "read from (weights, label text) has changed since. Put the old file back, or "
                "start a new run."
            )

    @property
    def training(self) -> TrainSettings:
        """Local training; the epochs of training in one place are in ``gathered`` already."""
        training = self.settings.training
        return training if self.gathered is None else replace(training, epochs=1)

    @property
    def taking_part(self) -> FederationSettings:
        """Who takes part; one party in place of a cohort does not drop out."""
        federation = self.settings.taking_part
        return federation if self.gathered is None else replace(federation, drop_rate=0.0)

    @property
    def images(self) -> int:
        """The number of images to be trained on in all rounds, as expected of random cohorts."""
        sizes = [n for n in self.facts.sizes.values() if n > 0]
        federation = self.settings.federation
        by_size = federation.sampling == "size"
        cohort = cohort_size(len(sizes), federation.participation, federation.cohort)
        mean = float(np.average(sizes, weights=sizes if by_size else None))
        return round(self.rounds * self.settings.training.epochs * cohort * mean)

    def stages(self, round: int) -> Sequence[Stage]:
        """The exchanges of a round."""
        return stages_of(self.method, self.opening, round)

    def federation(self, transport: Transport) -> Federation:
        """The round loop over clients that a transport reaches."""
        return Federation(
            method=self.method,
            transport=transport,
            schedule=self.schedule,
            settings=self.taking_part,
            seed=self.settings.run.seed,
            epochs=self.training.epochs,
            opening=self.opening,
            names=self.facts.names,
            noise=self.noise,
        )

    @property
    def average(self) -> ServerAverage:
        """How the model that is evaluated is made of the global ones."""
        return ServerAverage(self.taking_part.server_average)


def blueprint(settings: Settings, facts: Facts, at_site: bool = False) -> Blueprint:
    """Make method, model and cohorts; whatever does not fit together is refused here.

    ``at_site``: all clients but one are elsewhere, and what concerns cohorts is the server's.
    """
    run, train, federation = settings.run, settings.training, settings.taking_part
    backbone = make_backbone(settings, settings.model.own, facts.input)
    method = make_method(settings, settings.method_config, facts, backbone)
    model = make_model(settings, backbone, method)
    holders = sum(size > 0 for size in facts.sizes.values())
    cohort = cohort_size(holders, federation.participation, federation.cohort)
    if not at_site:
        refuse_small_cohort(federation.averaging, cohort)
        if federation.server_sees == "sums":
            refuse_without_replies(settings, method, cohort)
    rounds, spending = run.rounds, None
    if settings.privacy.active:
        refuse_unprotected(settings, method, model, holders)
    if settings.privacy.active and not at_site:
        spending = _spending(settings, facts, backbone, cohort / holders)
        rounds = len(spending.rounds)
        method = make_method(settings, settings.method_config, facts, backbone, rounds)
    seed = None if settings.privacy.active else run.seed
    schedule = Schedule(facts.sizes, rounds, cohort, federation.sampling or "uniform", seed)
    first = opening(method, model.head, settings.taking_part)
    if not federation.central:
        return Blueprint(settings, facts, model, method, schedule, first, budget=spending)
    if settings.attack.kind != "none":
        raise ConfigError(
            f"federation.central = true trains in one place, where nobody is malicious, and "
            f"attack.kind = {settings.attack.kind!r}. Remove one of the two."
        )
    if settings.method_name != CENTRAL_METHOD:
        raise ConfigError(
            f"federation.central = true trains in one place, where {settings.method_name!r} has no "
            f"meaning. Set run.method = {CENTRAL_METHOD!r}."
        )
    # Round t is a client of its own, which nobody remembers: so its images can be counted out.
    counts = images_of_rounds(facts.sizes, schedule, train.epochs, federation.drop_rate, run.seed)
    parties = [[t] if count else [] for t, count in enumerate(counts)]
    return Blueprint(settings, facts, model, method, parties, first, counts)


def refuse_small_cohort(robust: Robust, cohort: int) -> None:
    """Refuse a rule of averaging that does not tolerate one malicious client among so few."""
    if cohort < robust.smallest:
        raise ConfigError(
            f"federation.robust = {robust.rule!r} tolerates no malicious client in a cohort of "
            f"{cohort}; the smallest cohort is {robust.smallest}. Raise federation.cohort or "
            "federation.participation, or set federation.robust = 'none'."
        )


def refuse_without_replies(settings: Settings, method: Method, cohort: int) -> None:
    """Refuse what needs single replies where the server sees sums."""
    federation, sees = settings.federation, "federation.server_sees = 'sums'"
    if method.no_sums:
        raise ConfigError(f"{sees} is not possible for {settings.method_name}: {method.no_sums}.")
    if federation.robust != "none":
        raise ConfigError(
            f"{sees} and federation.robust = {federation.robust!r} exclude each other: a rule that "
            "tolerates malicious clients compares single replies, and a sum has none. Choose one "
            "of the two."
        )
    if federation.sampling == "size":
        raise ConfigError(
            f"{sees} keeps the number of a client's images from the server, and "
            "federation.sampling = 'size' draws clients by it. Leave federation.sampling out."
        )
    if federation.central:
        raise ConfigError(
            f"{sees} has no meaning where one party trains (federation.central = true). Remove one "
            "of the two."
        )
    if cohort < federation.sum_least and not settings.privacy.active:
        raise ConfigError(
            f"{sees} needs at least federation.sum_least = {federation.sum_least} clients in every "
            f"sum, and {cohort} take part in a round. Raise federation.cohort or "
            "federation.participation."
        )
    in_data = [name for name in attacks.names() if not attacks[name].trains_honest]
    if settings.attack.kind not in ("none", *in_data):
        raise ConfigError(
            f"attack.kind = {settings.attack.kind!r} changes replies, and {sees} has none. Use one "
            f"that trains on false labels ({', '.join(in_data)}), or federation.server_sees = "
            "'replies'."
        )


def refuse_unprotected(settings: Settings, method: Method, model: Model, clients: int) -> None:
    """Refuse what would leave clients past the noise, where they are to be private."""
    federation, privacy = settings.federation, settings.privacy
    if federation.server_sees != "sums":
        raise ConfigError(
            "[privacy] puts noise on sums, and federation.server_sees = 'replies' shows each reply "
            "without it. Set federation.server_sees = 'sums'."
        )
    if federation.average != "uniform":
        raise ConfigError(
            "[privacy] bounds what a client can change, and federation.average = 'size' lets it "
            "weigh by its number of images, which is a secret, too. Set federation.average = "
            "'uniform'."
        )
    if federation.sampling not in (None, "poisson"):
        raise ConfigError(
            "[privacy] counts with cohorts for which each client is drawn by itself, and "
            f"federation.sampling = {federation.sampling!r} draws them otherwise. Leave it out, or "
            "set federation.sampling = 'poisson'."
        )
    if method.no_privacy:
        raise ConfigError(f"[privacy] and {settings.method_name}: {method.no_privacy}.")
    if model.backbone.init_buffers():
        raise ConfigError(
            f"[privacy] bounds updates of parameters; model {model.backbone.name!r} also sends the "
            "running statistics of batch normalisation. Choose a model without them."
        )
    if settings.run.thresholds > 0:
        raise ConfigError(
            f"run.thresholds = {settings.run.thresholds:g} chooses thresholds on the clients' "
            "images, without noise. Set it to 0 where clients are to be private."
        )
    if privacy.delta >= 1 / max(clients, 1):
        warn_once(
            f"privacy.delta = {privacy.delta:g} is not below 1/{clients}, the share of one client: "
            "a mechanism that gives one client away altogether would pass. Lower it."
        )


def _spending(settings: Settings, facts: Facts, backbone: Backbone, chance: float) -> Budget:
    """The noise, the rounds and the cost of a run whose clients take part with a chance."""

    def exchanges(rounds: int) -> tuple[Exchanges, ...]:
        method = make_method(settings, settings.method_config, facts, backbone, rounds)
        first = opening(method, method.head(backbone.width), settings.taking_part)
        asked = [[s.everyone for s in stages_of(method, first, t)] for t in range(rounds)]
        return tuple(Exchanges(stages.count(False), stages.count(True)) for stages in asked)

    return budget(settings.privacy, chance, settings.run.rounds, exchanges)


def make_method(
    settings: Settings,
    config: Method.Config,
    facts: Facts,
    backbone: Backbone,
    rounds: int | None = None,
) -> Method:
    """The chosen method with its own settings ``config``, for a task of so many rounds."""
    run, train, federation = settings.run, settings.training, settings.federation
    task = Task(
        classes=len(facts.classes),
        clients=len(facts.sizes),
        rounds=rounds or run.rounds,
        batch_size=train.batch_size,
        epochs=train.epochs,
        seed=run.seed,
        width=backbone.width,
        lr=train.lr,
        optimiser=train.optimiser,
        momentum=train.momentum,
        schedule=train.schedule,
        loss=settings.loss,
        labels=facts.classes,
        average=federation.average,
        mean=backbone.mean,
        std=backbone.std,
        pixels=isinstance(facts.input, InputSpec),
        unknown_labels=facts.unknown_labels,
        robust=federation.averaging,
        server_sees=federation.server_sees,
        private=settings.privacy.active,
        cohort=cohort_size(len(facts.sizes), federation.participation, federation.cohort),
    )
    return methods[settings.method_name](config, task)


def make_backbone(
    settings: Settings, config: Backbone.Config, input: InputSpec | FeatureSpec
) -> Backbone:
    """The chosen backbone with its own settings ``config``, for inputs of a shape."""
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
    backbone = models[name](config, input)
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
