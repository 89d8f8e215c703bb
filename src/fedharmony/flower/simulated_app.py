"""What Ray's processes run for a simulated client: a stage, in a run that they open themselves."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedharmony.engine.memory import GROUP, ClientMemory
from fedharmony.experiments.blueprint import Blueprint
from fedharmony.experiments.build import assemble
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.machine import switch_torch
from fedharmony.flower.wire import content_of, parcel_of
from fedharmony.reading import user_path
from fedharmony.site.parcel import FAILED, REPLY, Parcel, failed
from fedharmony.site.records import pack, record_of
from fedharmony.transport.base import Transport
from fedharmony.types import Record, Reply

app = ClientApp()


@app.query()
def carry_out(message: Message, context: Context) -> Message:
    """Do what a parcel asks; whatever goes wrong is an answer, for a missing one stops the run."""
    try:
        answer = work(parcel_of(message.content))
    except Exception as error:
        answer = failed(error)
    return Message(content_of(answer), reply_to=message)


@functools.lru_cache(maxsize=1)
def opened(folder: str) -> tuple[Blueprint, Transport, ClientMemory, torch.device]:
    """The run in a folder, with what its clients hold; the last one stays open."""
    place = RunFolder(user_path(folder))
    settings = place.open()
    switch_torch(settings.engine)
    settings = replace(settings, engine=replace(settings.engine, stack=1))
    assembly, memory = assemble(settings, place["partition.json"]), ClientMemory()
    return assembly.blueprint, assembly.transport(memory), memory, assembly.device


def work(question: Parcel) -> Parcel:
    """A stage of one client."""
    words = question.words
    round, client = int(words["round"]), int(words["client"])
    plan, clients, memory, device = opened(str(words["folder"]))
    record = record_of(question.parts, words["scalars"])
    memory.rewind(0)
    if kept := record.get(GROUP):
        memory.write(client, round - 1, kept)
    groups = {name: group for name, group in record.groups.items() if name != GROUP}
    message = Record(groups, record.scalars).to(device)
    stage = next(s for s in plan.stages(round) if s.name == words["stage"])
    (answer,) = clients.exchange(stage, round, {client: message})
    if not isinstance(answer, Reply):
        return Parcel(FAILED, {"reason": answer.reason})
    found = {"examples": answer.examples, "finite": answer.finite is not False}
    scalars = {"scalars": dict(answer.record.scalars)}
    return Parcel(REPLY, {**found, **scalars}, *pack([answer.record]))
