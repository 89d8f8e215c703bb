"""The worker of a site: it owns data, model, compiled code and memory, and answers by name.

It stays up between rounds, so that a round costs its training alone. Questions come as parcels over
a Unix socket, one at a time: ``enrol`` (may this run use the site?), ``stage`` (do this stage of
this round), ``status``. A stage is found by its name in the site's own method, which is made of the
server's settings; so no code travels.
"""

from __future__ import annotations

import hashlib
import json
import logging
import queue
import re
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np

import fedharmony
from fedharmony import fallbacks, stopping
from fedharmony.data.base import DataSet, datasets, load_data
from fedharmony.engine.memory import ClientMemory
from fedharmony.errors import ConfigError, DataError, FedHarmonyError, PolicyError, TransportError
from fedharmony.experiments.binding import Binding, bind, changed
from fedharmony.experiments.blueprint import Blueprint, Facts, blueprint
from fedharmony.experiments.build import Assembly, on_device
from fedharmony.experiments.folder import now
from fedharmony.experiments.machine import choose_device, choose_mode, switch_torch
from fedharmony.experiments.settings import Settings
from fedharmony.files import sole_writer
from fedharmony.methods.base import Stage
from fedharmony.models.base import InputSpec
from fedharmony.partition.base import Partition
from fedharmony.records import digest, write_file
from fedharmony.site.measure import MEASURED, Question, measure, without
from fedharmony.site.parcel import (
    ENROL,
    FAILED,
    MEASURE,
    REFUSED,
    REPLY,
    STAGE,
    STATUS,
    Parcel,
    failed,
    hear_out,
    receive,
    send,
)
from fedharmony.site.policy import accepted
from fedharmony.site.records import pack, record_of
from fedharmony.site.settings import SiteSettings
from fedharmony.transport.base import Transport
from fedharmony.types import FROZEN, Record, Reply

logger = logging.getLogger(__name__)

#: A peer that is silent for so many seconds in the middle of a parcel is given up.
SILENCE_S = 60.0
#: One that sends more than it may is heard out for so many seconds.
HEARD_OUT_S = 10.0
#: The most clients that a server may speak of.
MOST_CLIENTS = 1_000_000
#: Questions that wait for the worker, and where their answers go.
Waiting: TypeAlias = "queue.Queue[tuple[socket.socket, Parcel]]"


@dataclass(frozen=True)
class RunAtSite:
    """A run that this site takes part in.

    Attributes:
        about: what the server said of the run.
        plan: the run without its data.
        transport: the way to the one client that is here.
        memory: what the client keeps.
    """

    about: Mapping[str, Any]
    plan: Blueprint
    transport: Transport
    memory: ClientMemory

    def stage(self, name: str, round: int) -> Stage:
        """The stage of that name in that round."""
        if not 0 <= round < self.plan.rounds:
            raise PolicyError(f"there is no round {round + 1} in this run")
        found = [s for s in self.plan.stages(round) if s.name == name]
        if not found:
            raise PolicyError(f"there is no stage {name!r} in round {round + 1} of this method")
        return found[0]


class Worker:
    """Answers what a server asks of a site.

    Args:
        settings: of the site.
        data: as loaded before; none loads them.
    """

    def __init__(self, settings: SiteSettings, data: DataSet | None = None) -> None:
        self.settings = settings
        switch_torch(settings.engine)
        self.device = choose_device(settings.engine.device)
        self.data = site_data(settings) if data is None else data
        self._here = on_device(self.data, self.device)
        self._run: RunAtSite | None = None
        self.state = "idle"

    @property
    def images(self) -> int:
        """Training images of this site."""
        return len(self.data.train)

    @cached_property
    def binding(self) -> Binding:
        """One hash per part of the data."""
        return bind(self.data, Partition((np.arange(self.images),), self.images))

    def answer(self, question: Parcel) -> Parcel:
        """The answer to a question; whatever goes wrong is an answer too."""
        if question.kind == STATUS:
            return Parcel(REPLY, {**self._about(), "state": self.state})
        self.state = f"busy since {now()} ({question.kind})"
        try:
            return self._answer(question)
        finally:
            self.state = "idle"

    def _answer(self, question: Parcel) -> Parcel:
        try:
            if question.kind == ENROL:
                return Parcel(REPLY, self._enrol(question.words))
            if question.kind == STAGE:
                return self._stage(question)
            if question.kind == MEASURE:
                run = self._open(_mapping(question.words, "run"))
                said, found = self._measure(run, question.words, record_of(question.parts, {}))
                return Parcel(REPLY, said, *pack([found]))
            raise PolicyError(f"a site is not asked for {question.kind!r}")
        except (PolicyError, ConfigError, DataError) as error:
            logger.warning("Refused: %s.", str(error).rstrip("."))
            return Parcel(REFUSED, {"reason": str(error)})
        except Exception as error:
            logger.exception("A question could not be answered.")
            return failed(error)

    def _about(self) -> dict[str, Any]:
        return {
            "site": self.settings.site.name,
            "images": self.images,
            "device": str(self.device),
            "fedharmony": fedharmony.__version__,
        }

    # -- enrolment ---------------------------------------------------------------------------------

    def _enrol(self, words: Mapping[str, Any]) -> dict[str, Any]:
        """Check that this site may and can take part, and remember with which data it does."""
        about = _mapping(words, "run")
        settings = self._accepted(about)
        folder = self._folder(about)
        if (before := _read_json(folder / "enrolled.json")) is not None:
            self._refuse_changed(before, settings)
        # A rehearsal: whatever does not fit together is refused now, not in a round.
        own = {"client": 0, "unknown": self.data.train.known is not None}
        rehearsed = self._assembly(settings, {**about, **own})
        rehearsed.transport(ClientMemory())
        for round in range(settings.run.rounds):
            self.settings.policy.refuse_stages(rehearsed.blueprint.stages(round))
        folder.mkdir(parents=True, exist_ok=True)
        enrolled = {"bound": self.binding, "settings": settings.sha256()}
        write_file(folder / "enrolled.json", json.dumps(enrolled, indent=1).encode())
        logger.info("Enrolled in run %s: %s.", about["id"][:8], settings.label)
        found = {"unknown": own["unknown"], "bound": _sha(self.binding)}
        return {**self._about(), **found}

    def _accepted(self, about: Mapping[str, Any]) -> Settings:
        """The settings of a run, if this site takes part in it."""
        policy, site = self.settings.policy, self.settings.site
        if (classes := about.get("classes")) != list(site.classes):
            raise PolicyError(
                "the labels of the run are not those of this site's site.classes: "
                + _odd(classes, site.classes)
            )
        shape = list(self.data.train.images.shape)
        if about.get("shape") != shape:
            raise PolicyError(
                f"the model is for images of shape {about.get('shape')}, and this site has "
                f"{shape}; set data.image_size in its site.toml"
            )
        tree = _mapping(about, "settings")
        method = str(_mapping(tree, "run").get("method", ""))
        policy.refuse_method(method.partition(":")[0])
        policy.refuse_few(self.images)
        return accepted(tree, self.settings.own_sections(), self.settings.files)

    def _refuse_changed(self, before: Mapping[str, Any], settings: Settings) -> None:
        """Refuse to go on with other data or settings than this site was enrolled with."""
        if parts := changed(before.get("bound", {}), self.binding):
            raise PolicyError(
                f"the data of this site have changed since it was enrolled in this run: "
                f"{', '.join(parts)}; put the old data back, or start a new run"
            )
        if before.get("settings") != settings.sha256():
            raise PolicyError("the settings are not those that this site was enrolled with")

    def _folder(self, about: Mapping[str, Any]) -> Path:
        """What this site keeps of a run."""
        if not re.fullmatch("[0-9a-f]{32}", name := str(about.get("id"))):
            raise PolicyError(f"{name[:40]!r} does not name a run")
        return self.settings.memory / name

    # -- a stage -----------------------------------------------------------------------------------

    def _stage(self, question: Parcel) -> Parcel:
        """Carry a stage out, and send what it gives."""
        words, began = question.words, time.perf_counter()
        about = _mapping(words, "run")
        run, client = self._open(about), _whole(about, "client")
        round, heard = _whole(words, "round"), _whole(words, "heard")
        stage = run.stage(str(words.get("stage")), round)
        self.settings.policy.refuse_stages([stage])
        # What the server never heard has not happened; what is older it will not ask for.
        run.memory.rewind(heard + 1)
        run.memory.commit(round)
        message = record_of(question.parts, _mapping(words, "scalars")).to(self.device)
        measured, more = self._ridden(run, words, message)
        (answer,) = run.transport.exchange(stage, round, {client: without(message)})
        logger.info(
            "Round %d, %s: %s images in %.2f s.",
            *(round + 1, stage.name, f"{self.images:,}", time.perf_counter() - began),
        )
        if not isinstance(answer, Reply):
            return Parcel(FAILED, {"reason": answer.reason})
        found = {"examples": answer.examples, "fallbacks": fallbacks.drain(), **measured}
        (parts,) = pack([answer.record.replace(more.groups)])
        return Parcel(REPLY, {**found, "scalars": dict(answer.record.scalars)}, parts)

    def _ridden(
        self, run: RunAtSite, words: Mapping[str, Any], message: Record
    ) -> tuple[dict[str, Any], Record]:
        """The answer to a measurement that rides on a stage; it never spoils the stage."""
        if MEASURED not in words:
            return {}, Record()
        try:
            said, found = self._measure(run, words, message)
        except Exception as error:
            known = isinstance(error, FedHarmonyError)
            logger.warning("A model could not be measured: %s", error, exc_info=not known)
            said, found = dict(failed(error).words), Record()
        return {MEASURED: said}, found

    def _measure(
        self, run: RunAtSite, words: Mapping[str, Any], message: Record
    ) -> tuple[dict[str, Any], Record]:
        """What the test images of this site say of a model."""
        asked, policy = Question.of(words, message), self.settings.policy
        return measure(run.plan, self._here.test, asked, policy, self.device)

    def _open(self, about: Mapping[str, Any]) -> RunAtSite:
        """The run that a stage belongs to; the last one asked for stays open."""
        if self._run is not None and self._run.about == about:
            return self._run
        settings, folder = self._accepted(about), self._folder(about)
        before = _read_json(folder / "enrolled.json")
        if before is None:
            raise PolicyError("this site is not enrolled in this run; start the server again")
        self._refuse_changed(before, settings)
        memory = ClientMemory(folder / "memory", self.settings.engine.memory_mb << 20)
        assembly = self._assembly(settings, about)
        plan = assembly.blueprint
        if about.get("frozen") != digest(Record({FROZEN: plan.parameters[1]})):
            raise PolicyError(
                "the frozen part of the model is not the server's: a file it is read from "
                "(weights, label text) is another one here"
            )
        self._run = RunAtSite(about, plan, assembly.transport(memory), memory)
        return self._run

    def _assembly(self, settings: Settings, about: Mapping[str, Any]) -> Assembly:
        """A run over the one client of this site."""
        client = _whole(about, "client")
        if not 0 <= client < MOST_CLIENTS:
            raise PolicyError(f"there is no client {client}")
        # Who else takes part is not this site's business, nor is how models are averaged.
        alone = replace(settings.federation, cohort=None, robust="none")
        settings = replace(settings, federation=alone)
        shape, sizes = self.data.train.images.shape, {client: self.images}
        facts = Facts(self.data.classes, InputSpec(*shape), sizes, bool(about.get("unknown")))
        plan = blueprint(settings, facts, at_site=True)
        backbone, images = plan.model.backbone, np.arange(self.images)
        mode = choose_mode(settings.engine, self.device, backbone.elements(), plan.images)
        return Assembly(
            blueprint=plan,
            loaded=self.data,
            data=self._here,
            partition=Partition((images,), self.images),
            clients={client: images},
            device=self.device,
            mode=mode.exact() if backbone.mixes_images else mode,
            bound=self.binding,
        )


def site_data(settings: SiteSettings) -> DataSet:
    """Load a site's data, with the federation's labels."""
    data = load_data(datasets[settings.data.common.name](settings.data.own))
    if len(data.train.images.shape) != 3:
        raise DataError(
            "Feature vectors cannot be used at a site yet: their means would have to be known to "
            "all sites first. Use images."
        )
    return settings.vocabulary.translate(data)


# -- the socket ------------------------------------------------------------------------------------


def serve(worker: Worker) -> None:
    """Answer at the site's socket until a signal ends it, one question at a time.

    A thread reads the questions. It lets one wait while another is being answered.
    """
    place, limit = worker.settings.socket, worker.settings.site.parcel_mb << 20
    worker.settings.memory.mkdir(parents=True, exist_ok=True)
    with sole_writer(worker.settings.memory), listening(place) as listener:
        logger.info("Site %s answers at %s.", worker.settings.site.name, place)
        waiting: Waiting = queue.Queue(1)

        def take_in() -> None:
            while listener.fileno() >= 0:  # until the worker ends
                try:
                    stream, _ = listener.accept()
                except OSError:  # the system is out of files: some may be closed soon
                    time.sleep(1.0)
                    continue
                with _peer(stream):
                    _take_in(worker, stream, limit, waiting)

        threading.Thread(target=take_in, daemon=True).start()
        while True:
            with stopping.interruptible():
                stream, question = waiting.get()
            with _peer(stream), stream:
                send(stream, worker.answer(question))


def _take_in(worker: Worker, stream: socket.socket, limit: int, waiting: Waiting) -> None:
    """Read one question, and have it wait for the worker; how that one is, is answered at once."""
    stream.settimeout(SILENCE_S)
    answer: Parcel | None = None
    try:
        question = receive(stream, limit)
        if question is not None and question.kind != STATUS:
            waiting.put_nowait((stream, question))
            return
        answer = worker.answer(question) if question is not None else None
    except queue.Full:
        answer = Parcel(REFUSED, {"reason": f"the worker is {worker.state}; another message waits"})
    except TransportError as error:
        logger.warning("%s", error)
        send(stream, Parcel(REFUSED, {"reason": str(error)}))
        hear_out(stream, HEARD_OUT_S)
    with stream:
        if answer is not None:
            send(stream, answer)


@contextmanager
def _peer(stream: socket.socket) -> Iterator[None]:
    """A peer that breaks off or sends nonsense harms nobody else."""
    try:
        yield
    except Exception as error:
        trace = not isinstance(error, OSError)
        logger.warning("A question or its answer broke off: %s.", error, exc_info=trace)
        stream.close()


@contextmanager
def listening(place: Path) -> Iterator[socket.socket]:
    """A Unix socket that listens; gone afterwards.

    A socket that nobody answers at is what a dead worker left behind, and is replaced.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other, suppress(OSError):
        other.connect(str(place))
        raise TransportError(
            f"Another worker answers at {place} already. Stop it, or give this site a socket of "
            "its own (site.socket)."
        )
    if place.is_socket():
        place.unlink()
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as stream:
        try:
            stream.bind(str(place))
            # Whoever may use the socket is of the worker's group: the relay.
            place.chmod(0o660)
            stream.listen(1)
        except OSError as error:
            raise TransportError(
                f"Cannot listen at {place}: {error.strerror or error}. Set site.socket to a place "
                "where this user may create files."
            ) from None
        try:
            yield stream
        finally:
            place.unlink(missing_ok=True)


# -- words -----------------------------------------------------------------------------------------


def _mapping(words: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = words.get(key)
    if not isinstance(value, Mapping):
        raise PolicyError(f"the question says nothing of {key!r}")
    return value


def _whole(words: Mapping[str, Any], key: str) -> int:
    value = words.get(key)
    if not isinstance(value, int) or isinstance(value, bool):
        raise PolicyError(f"{key} = {str(value)[:40]} is no whole number")
    return value


def _odd(found: Any, own: tuple[str, ...]) -> str:
    """What tells two vocabularies apart, in words."""
    names = found if isinstance(found, list) else []
    more, fewer = [n for n in names if n not in own], [n for n in own if n not in names]
    if not more and not fewer:
        return "their order is another one"
    said = [f"the run has {more[:3]} which this site has not"] if more else []
    said += [f"this site has {fewer[:3]} which the run has not"] if fewer else []
    return "; ".join(said)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _sha(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
