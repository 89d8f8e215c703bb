"""Simulated clients on Flower's simulation engine, for those whose cluster is Ray.

The run is that of ``fedharmony run``: the same data, split, folder and report. Only the clients'
work is done elsewhere, one message per client, in Ray's processes, which open the run's folder and
load the data themselves: so the folder must be one that all of them see. What clients keep between
rounds stays with the server and travels with the message. The result has the bits of
``engine.stack=1``.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from fedharmony.data.base import DataSet
from fedharmony.engine.memory import GROUP, ClientMemory
from fedharmony.errors import ConfigError, TransportError
from fedharmony.experiments import run
from fedharmony.experiments.build import Assembly, Observer, assemble, contents, draft
from fedharmony.experiments.evaluate import Results
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.machine import choose_device, with_threads
from fedharmony.experiments.settings import Settings
from fedharmony.flower.post import Post, collect, pause
from fedharmony.flower.wire import GridPost
from fedharmony.methods.base import Method, Stage
from fedharmony.site.parcel import REPLY, STAGE, Parcel
from fedharmony.site.records import parcels, record_of
from fedharmony.types import Failure, Record, Reply

#: Seconds that Ray has to start its nodes, and that an exchange may take.
START_S, EXCHANGE_S = 300.0, 24 * 3600.0


@dataclass
class Simulated:
    """The transport to clients in Ray's processes; node i of Flower's does the work of client i.

    Attributes:
        post: carries parcels.
        folder: the run's.
        sizes: number of images of each client.
        method: says what clients keep.
        memory: has it.
    """

    post: Post
    folder: Path
    sizes: Mapping[int, int]
    method: Method
    memory: ClientMemory

    def exchange(
        self, stage: Stage, round: int, messages: Mapping[int, Record]
    ) -> Iterator[Reply | Failure]:
        """One message per client; answers in the order of the messages."""
        node_of = dict(zip(sorted(self.sizes), self._nodes(), strict=False))
        client_at = {node_of[k]: k for k in messages}
        said = {node_of[k]: self._said(stage, round, k, m) for k, m in messages.items()}
        found = collect(self.post, parcels(STAGE, said), EXCHANGE_S)
        answers = {client_at[node]: answer for node, answer in found}
        for client in messages:
            yield self._answer(stage, round, client, answers[client])

    def _nodes(self) -> list[int]:
        until = time.monotonic() + START_S
        while len(nodes := sorted(self.post.nodes())) < len(self.sizes):
            if time.monotonic() > until:
                raise TransportError(
                    f"Flower's simulation has {len(nodes)} nodes after {START_S:g} seconds, and "
                    f"the run {len(self.sizes)} clients. Look at what Ray says above."
                )
            pause()
        return nodes

    def _said(
        self, stage: Stage, round: int, client: int, message: Record
    ) -> tuple[dict[str, Any], Record]:
        """Words and record for a client, with what it keeps."""
        words = {
            "folder": str(self.folder),
            "stage": stage.name,
            "round": round,
            "client": client,
            "scalars": dict(message.scalars),
        }
        return words, message.replace({GROUP: self.memory.read(client, before=round)})

    def _answer(
        self, stage: Stage, round: int, client: int, answer: Parcel | str
    ) -> Reply | Failure:
        if isinstance(answer, str) or answer.kind != REPLY:
            reason = answer if isinstance(answer, str) else answer.reason
            return Failure(client, stage.name, round, reason)
        record = record_of(answer.parts, answer.words["scalars"])
        finite = bool(answer.words["finite"])
        kept = self.method.remember(round, record) if stage.train and finite else {}
        if kept:
            self.memory.write(client, round, kept)
        return Reply(client, int(answer.words["examples"]), record, finite or None)


@dataclass(frozen=True, kw_only=True)
class OnFlower(Assembly):
    """A simulated run whose clients work in Ray's processes."""

    post: Post
    folder: Path

    def transport(
        self, memory: ClientMemory, tick: Callable[[int, int, int], None] | None = None
    ) -> Simulated:
        """The way to them."""
        plan = self.blueprint
        return Simulated(self.post, self.folder, plan.facts.sizes, plan.method, memory)


def builder(folder: RunFolder, post: Post) -> run.Build:
    """What puts such a run together."""

    def build(
        settings: Settings, partition: Path | None, data: DataSet | None, observe: Observer
    ) -> OnFlower:
        made = assemble(settings, partition, data, observe)
        return OnFlower(**vars(made), post=post, folder=folder.path.absolute())

    return build


def start(settings: Settings, folder: RunFolder, observe: Observer) -> Results:
    """A run on Flower's simulation.

    Each of Ray's processes has as many CPUs as the run has threads, and the GPU of a run on one.
    """
    refuse_without_ray()
    if settings.federation.central:
        raise ConfigError(
            "federation.central = true trains in one place, and not on Flower's simulation."
        )
    from flwr.simulation import run_simulation

    from fedharmony.flower.simulated_app import app as client_app

    outcome: list[Results | BaseException] = []

    def main(grid: Grid, context: Context) -> None:
        try:
            build = builder(folder, GridPost(grid))
            outcome.append(run.start(settings, folder, observe, build=build))
        except BaseException as error:
            outcome.append(error)

    server = ServerApp()
    server.main()(main)
    settings = with_threads(replace(settings, engine=replace(settings.engine, stack=1)))
    folder.refuse_if_taken(settings)
    gpus = int(choose_device(settings.engine.device).type == "cuda")
    resources: dict[str, Any] = {"num_cpus": settings.engine.threads, "num_gpus": gpus}
    run_simulation(
        server,
        client_app,
        num_supernodes=len(draft(settings, contents(settings)).clients),
        backend_config={"client_resources": resources},
    )
    if not outcome:
        raise TransportError("Flower's simulation ended before the run did. Look at its log above.")
    if isinstance(found := outcome[0], BaseException):
        raise found
    return found


def refuse_without_ray() -> None:
    """Refuse to start where Ray is not installed."""
    try:
        import ray  # noqa: F401
    except ImportError:
        raise ConfigError(
            "Flower's simulation needs Ray. Install it with pip install 'fedharmony[flower-sim]'."
        ) from None
