"""One run, from settings to results: what is written when, and how a run goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from fedharmony.config import flat
from fedharmony.data.base import DataSet
from fedharmony.engine.memory import SEALS, ClientMemory
from fedharmony.errors import (
    CheckpointError,
    ConfigError,
    DeviceMemoryError,
    FedHarmonyError,
    Stopped,
)
from fedharmony.experiments import ledger, trained
from fedharmony.experiments.build import Assembly, Observer, assemble
from fedharmony.experiments.evaluate import Evaluation, Results, judge_here, matrices, summarise
from fedharmony.experiments.folder import EventLog, RunFolder, Saved, environment
from fedharmony.experiments.machine import switch_torch, with_threads
from fedharmony.experiments.outlook import outlook
from fedharmony.experiments.scores import save_examples, save_scores, scores_of
from fedharmony.experiments.settings import Settings
from fedharmony.experiments.trackers.base import Subject, Tracking, refuse_missing
from fedharmony.files import refuse_if_held
from fedharmony.partition.report import split_report
from fedharmony.privacy import REPRODUCIBLE, Ledger
from fedharmony.server.federation import Event
from fedharmony.terminal import warn_once
from fedharmony.transport.processes import passed, process_group
from fedharmony.types import Record

logger = logging.getLogger(__name__)


#: How a run is put together: :func:`assemble`, or something that does the same for clients which
#: are elsewhere.
Build = Callable[[Settings, Path | None, DataSet | None, Observer], Assembly]


@contextmanager
def _full_device_told() -> Iterator[None]:
    """A full device is told as what it is, wherever in a run it shows."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        what = "The run stopped: it does not fit into what is free of the device's memory"
        raise DeviceMemoryError(what, error) from None


@_full_device_told()
def start(
    settings: Settings,
    folder: RunFolder,
    observe: Observer,
    data: DataSet | None = None,
    build: Build = assemble,
) -> Results:
    """A run, new or gone on with if the same call began it here; returns its results.

    ``data`` saves loading them once more. Of several processes, the first writes; the others return
    nothing.
    """
    settings = with_threads(settings)
    refuse_missing(settings.run.track)
    switch_torch(settings.engine)
    if process_group().leads:
        refuse_if_held(folder.path)
        folder.refuse_if_taken(settings)
    results = folder.results()
    if results is None and process_group().size == 1 and folder.holds_run():
        logger.info("Going on with the run in %s.", folder.path)
        return resume(folder, observe, data=data, build=build, asked=settings)
    assembly = build(settings, None, data, observe)
    if results is not None:
        folder.refuse_other_material(results.get("bound") or {}, assembly.bound)
        logger.info("The run in %s is finished already: nothing is trained.", folder.path)
        return results
    state = assembly.initial_state()  # what a method refuses, it refuses before a folder is made
    with _writing(folder):
        if process_group().leads:
            folder.create(settings)
        return _first_round(assembly, state, folder, observe)


@_full_device_told()
def resume(
    folder: RunFolder,
    observe: Observer,
    device: str | None = None,
    data: DataSet | None = None,
    build: Build = assemble,
    gpu_share: float | None = None,
    asked: Settings | None = None,
) -> Results:
    """Continue a run where its last checkpoint stands; on a CPU the result is the same to the bit.

    A completed run is left alone; its results are returned. On another ``device`` than the run
    began on, or with another part of a GPU's memory, results agree up to rounding. ``data`` saves
    loading them once more. What the run keeps, and where its files lie, is as ``asked`` now.
    """
    before = folder.open()
    settings = before if asked is None else replace(asked, engine=before.engine)
    if process_group().leads:
        refuse_if_held(folder.path)
    noted = settings
    engine = replace(
        settings.engine,
        device=device or settings.engine.device,
        gpu_share=gpu_share or settings.engine.gpu_share,
    )
    settings = replace(settings, engine=engine)
    if (results := folder.results()) is not None:
        return results
    refuse_missing(settings.run.track)
    switch_torch(settings.engine)
    with _writing(folder):
        if noted.tree() != before.tree() and process_group().leads:
            folder.note(noted)
        if not folder.checkpoint.exists():  # killed before round 0
            folder.refuse_lost_checkpoint()
            assembly = build(settings, None, data, observe)
            return _first_round(assembly, assembly.initial_state(), folder, observe)
        saved = folder.load_state(settings)
        if settings.privacy.active and process_group().leads:
            ledger.read(folder, saved.rounds_done)  # refuses what is damaged
        assembly = build(settings, folder["partition.json"], data, observe)
        folder.refuse_other_material(saved.bound, assembly.bound)
        assembly.blueprint.refuse_other_constants(saved.state, saved.rounds_done)
        _say_what_differs(folder, assembly.device)
        return _rounds(assembly, folder, saved, observe)


def _writing(folder: RunFolder) -> AbstractContextManager[None]:
    """Of several processes, the first keeps others out of the folder."""
    return folder.writing() if process_group().leads else nullcontext()


def _say_what_differs(folder: RunFolder, device: torch.device) -> None:
    """Say why a resumed run may end in other bits, where it may."""
    before, here = folder.read_json("environment.json"), environment(device)
    if not process_group().leads or not isinstance(before, dict):
        return
    keys = ("fedharmony", "torch", "numpy", "processor", "device", "accelerator", "threads")
    other = [f"{k} {before[k]}, now {here[k]}" for k in keys if before.get(k, here[k]) != here[k]]
    if other:
        logger.warning(
            "The run began under other conditions (%s): results agree up to rounding, not to the "
            "bit.",
            "; ".join(other),
        )


def _first_round(
    assembly: Assembly, state: Record, folder: RunFolder, observe: Observer
) -> Results:
    """Write what is known before round 0, the checkpoint last, and run all rounds."""
    settings = assembly.settings
    saved = Saved(0, state, b"", assembly.bound, f"{0:064x}")
    if process_group().leads:
        folder.write_json("environment.json", environment(assembly.device))
        folder.write_json("binding.json", assembly.bound)
        folder.write_json(trained.FILE, trained.describe(assembly.blueprint))
        if assembly.clients:  # else their images are elsewhere
            assembly.partition.save(folder["partition.json"])
            if not settings.privacy.active:  # the report, which can be mailed, shows it
                labels, seed = assembly.loaded.train.labels, settings.split.common.seed
                report = split_report(labels, assembly.partition, seed)
                folder.write_json("split_report.json", report.as_dict())
        log = EventLog(folder.events)
        folder.save_state(0, state, settings, saved.bound, log, saved.memory)
    return _rounds(assembly, folder, saved, observe)


def _rounds(assembly: Assembly, folder: RunFolder, saved: Saved, observe: Observer) -> Results:
    """Run the remaining rounds, and leave events, checkpoints and results in the folder."""
    settings, began, first = assembly.settings, time.perf_counter(), saved.rounds_done
    rounds, latest, done = assembly.blueprint.rounds, list[Evaluation](), first
    seal, spending = saved.memory, _ledger(assembly, folder, first)
    memory = ClientMemory(folder["memory"], settings.engine.memory_mb * 2**20)
    if first < rounds and f"{memory.seal(first):064x}" != saved.memory:
        raise CheckpointError(
            f"What clients kept ({folder['memory']}) is not what they had kept at the last "
            "checkpoint: files were removed, added or replaced. Put them back, or start a new run "
            "in another folder."
        )
    memory.rewind(first)
    log = EventLog(folder.events, saved.events) if process_group().leads else None
    track = _tracking(settings, folder, first)

    def record(event: Event) -> None:
        if log is None:
            return
        if event["event"] == "round" and assembly.attackers.active:
            attacking = assembly.attackers.attacking(event["round"], event["cohort"])
            event = {**event, "malicious": attacking}
        log.append(event)
        track(event)
        observe(event)

    def after_round(round: int, state: Record) -> None:
        nonlocal done, seal
        own = memory.seal(
            round + 1, lambda client: client % process_group().size == process_group().rank
        )
        seal = f"{_sum_of_all(own, assembly.device):064x}"
        if log is not None:
            folder.save_state(round + 1, state, settings, assembly.bound, log, seal)
        if spending is not None:
            spending.commit(round)
        memory.commit(round + 1)
        done = round + 1
        evaluate_if_due(round, state, done == rounds)

    def evaluate_if_due(round: int, state: Record, last: bool) -> None:
        clock = time.perf_counter()
        due = last or (round + 1) % settings.run.eval_every == 0
        for measured, found in judge(round, state, due, last) if log is not None else ():
            latest[:] = [found]
            record(found.event(measured, time.perf_counter() - clock))
            clock = time.perf_counter()

    def tick(round: int, done: int, total: int) -> None:
        observe({"event": "progress", "round": round, "done": done, "total": total})

    record(start_event(assembly, first))
    if process_group().leads:
        for warning in outlook(assembly, first):
            warn_once(warning)
    state = saved.state.to(assembly.device)
    try:
        federation = assembly.federation(memory, tick)
        if spending is not None and federation.noise is not None:
            federation = replace(federation, noise=replace(federation.noise, ledger=spending))
        judge = assembly.judge(federation) or judge_here(assembly)
        if first:  # a checkpoint is written before its round is evaluated
            evaluate_if_due(first - 1, state, first == rounds)
        state = federation.run(state, first, record, after_round)
        if done < rounds:
            _say_that_it_ends(settings, done)
            if log is not None:
                folder.save_state(done, state, settings, assembly.bound, log, seal)
            evaluate_if_due(done - 1, state, True)
    except (KeyboardInterrupt, Stopped, FedHarmonyError, torch.OutOfMemoryError) as error:
        failed = not isinstance(error, KeyboardInterrupt | Stopped)
        ending = {
            "event": "finish",
            "status": "failed" if failed else "interrupted",
            "seconds": time.perf_counter() - began,
            "reason": str(error) or "stopped by Ctrl-C",
        }
        with suppress(FedHarmonyError):  # a full disk must not hide what happened
            record(ending)
        raise
    if not process_group().leads:
        memory.forget()
        return {}
    (evaluation,) = latest
    found = matrices(assembly, state, evaluation)
    folder.save_tensors("matrices.safetensors", found)
    if evaluation.scores is not None:
        scores = scores_of(evaluation.scores, assembly.data.test, assembly.data.classes)
        save_scores(folder.path, scores, settings.run.scores)
        save_examples(folder.path, assembly.data.test, settings.run.examples)
    record({"event": "finish", "status": "completed", "seconds": time.perf_counter() - began})
    noise_by = "simulator" if assembly.clients else "server"
    private = None if spending is None else spending.statement(done, noise_by)
    results = summarise(assembly, state, evaluation, folder.read_events(), private)
    memory.forget()  # no round is left that could ask for it
    track.finish(results, {n: t.double().cpu().numpy() for n, t in found.items() if t.ndim == 2})
    folder.write_json("results.json", results)  # last: with it the run is complete
    return results


def _ledger(assembly: Assembly, folder: RunFolder, first: int) -> Ledger | None:
    """What a private run has spent, before round ``first``; of several processes, one writes."""
    budget, seed = assembly.blueprint.budget, assembly.settings.privacy.noise_seed
    if budget is None:
        return None
    if not process_group().leads:
        made = Ledger(budget, seed)
    else:
        # Sites may have seen something of a round that was cut short; simulated clients are here.
        made = ledger.FolderLedger(folder, budget, seed, first, repeats=bool(assembly.clients))
        if seed is not None:
            logger.warning("privacy.noise_seed = %d: %s.", seed, REPRODUCIBLE)
    if process_group().size > 1:
        leads, device = process_group().leads, assembly.device
        made.spread = lambda key: passed(key if leads else None, 0, device)
    return made


def _say_that_it_ends(settings: Settings, done: int) -> None:
    """Say that ε does not suffice for another round; an error where there was none."""
    words = f"privacy.epsilon = {settings.privacy.epsilon:g} suffices for no further round"
    if not done:
        raise ConfigError(
            f"{words}: a round that was cut short has spent it. Start a new run in another folder, "
            "with a larger privacy.epsilon or a larger privacy.noise_multiplier."
        )
    warn_once(f"{words}: the run ends after {done} of {settings.run.rounds}.")


def _tracking(settings: Settings, folder: RunFolder, first: int) -> Tracking:
    """The trackers of a run; of several processes, the first has them."""
    names = settings.run.track if process_group().leads else ()
    name = f"{settings.label} seed {settings.run.seed}"
    return Tracking(names, Subject(folder.path, name, flat(settings.tree()), first))


def _sum_of_all(seal: int, device: torch.device) -> int:
    """The seals of all processes added up."""
    if process_group().size == 1:
        return seal
    own = torch.tensor(list(seal.to_bytes(32)), dtype=torch.uint8, device=device)
    parts = [torch.empty_like(own) for _ in range(process_group().size)]
    dist.all_gather(parts, own)
    return sum(int.from_bytes(bytes(part.tolist())) for part in parts) % SEALS


def start_event(assembly: Assembly, first: int) -> Event:
    """What is about to run."""
    settings, data, plan = assembly.settings, assembly.data, assembly.blueprint
    return {
        "event": "start",
        "method": settings.method_name,
        "label": settings.label,
        "rounds": plan.rounds,
        "clients": 1 if settings.federation.central else len(plan.facts.sizes),
        "client_names": list(plan.facts.names) or None,
        "cohort": plan.cohort,
        "classes": list(data.classes),
        "train_images": None if settings.privacy.active else assembly.train_images,
        "test_images": len(data.test),
        "parameters": plan.model.num_parameters,
        "device": str(assembly.device),
        "precision": "bfloat16" if assembly.mode.half else "float32",
        "compiled": assembly.mode.compile,
        "graphs": assembly.mode.graphs,
        "resumed_at": first or None,
    }
