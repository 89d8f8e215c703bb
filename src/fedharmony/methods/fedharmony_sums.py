"""FedHarmony where the server sees sums over a cohort, and nothing of single clients.

The server keeps Σ w_j R_j and Σ w_j and sends them to everybody. A client takes its own terms out
of them to get its teacher R*_k, finds its own quality q_k = exp(−γ s_k), and adds n θ, q θ and its
terms to the sums of its cohort. So γ must be a number, and the consensus a weighted mean.
:class:`~fedharmony.methods.fedharmony.FedHarmony` calls these functions with itself.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from fedharmony.aggregate import NUMBERS, scaled, typed
from fedharmony.consensus import CORRELATION, FOLDED, WEIGHTED
from fedharmony.methods.base import ClientView, Outcome, members, rounds_of
from fedharmony.types import BUFFERS, PARAMS, Form, Forms, Group, Messages, Record, Replies, Reply

if TYPE_CHECKING:
    from fedharmony.methods.fedharmony import FedHarmony

TEACHER = "teacher"  # message: R*_k, which entries are known, clusters, λ_t
CONSENSUS = "consensus"  # message: Σ w R and Σ w, clusters, λ_t; the same for everybody
OWN = "own"  # message: the round of the client's terms in these sums, −1 if they hold none
MEMBERS = "members"  # state: whose terms the sums hold, and of which round
QUALITY, REST = "quality_", "rest_"  # share: models by q_k, and those whose s_k is not trusted


def refusal(config: FedHarmony.Config) -> str:
    """The settings that need matrices, or misfits, of single clients on the server."""
    if config.consensus not in (None, *WEIGHTED):
        return (
            f"methods.fedharmony.consensus = {config.consensus!r} sorts the values of single "
            f"clients. Use one of {', '.join(WEIGHTED)}"
        )
    if config.quality and isinstance(config.temperature, str):
        return (
            f"methods.fedharmony.temperature = {config.temperature!r} is found from the "
            "misfits of all clients of a cohort. Set it to a number, for instance 1, or "
            "methods.fedharmony.quality = false"
        )
    if config.client_clusters:
        return (
            "methods.fedharmony.client_clusters = true makes clusters of each client's own "
            "teacher, which the server does not know. Set it to false"
        )
    if config.teacher == "this_round" or config.cold_start == "labels":
        return (
            "a teacher of the same round (teacher = 'this_round', cold_start = 'labels') holds "
            "terms that clients have not remembered yet, and cannot leave out. Use teacher = "
            "'last_round' and cold_start = 'none'"
        )
    return ""


def broadcast(method: FedHarmony, messages: Messages, state: Record, round: int) -> Messages:
    """θ, Σ w R, Σ w, clusters and λ_t for everybody; to each, of which round its terms are."""
    rounds = rounds_of(state.get(MEMBERS))
    # Who has taken part is no secret, or where clients are private, none that may matter.
    enough = bool(state.get(FOLDED)) if method.task.private else len(rounds) > 1
    if not enough:
        return messages
    matrix = method.table(state).consensus(round).matrix
    clusters = method.common_clusters(state, matrix, round)
    weight = torch.full((), method.align_weight(round), device=matrix.device)
    common = {**state.get(FOLDED), "clusters": clusters, "align_weight": weight}
    return {
        k: message.replace({CONSENSUS: common, OWN: {"round": torch.tensor(rounds.get(k, -1))}})
        for k, message in messages.items()
    }


def received(method: FedHarmony, view: ClientView, message: Record) -> Record:
    """The message with R*_k: the client takes its own terms out of the sums of everybody."""
    if CONSENSUS not in message.groups:
        return message
    common = message.get(CONSENSUS)
    table, now = method.table(Record({FOLDED: common})), int(common["round"]) + 1
    own = {} if method.task.private else _own_terms(view, message)
    matrix, known = table.others(own, view.examples, now, torch.float32)
    names = {"clusters": common["clusters"], "weight": common["align_weight"]}
    groups = {g: t for g, t in message.groups.items() if g not in (CONSENSUS, OWN)}
    teacher = {"matrix": matrix, "known": known, **names}
    return Record({**groups, TEACHER: teacher}, message.scalars)


def share(
    method: FedHarmony, plain: Record, round: int, view: ClientView, message: Record, reply: Reply
) -> Record:
    """``plain`` (n θ), the terms of R_k and, while quality counts, q θ with the client's own q."""
    upload, examples = reply.record.get(CORRELATION), reply.examples
    if CORRELATION not in reply.record.groups:
        return plain
    # Terms that were cut cannot be taken out again; they fade.
    once = method.task.private or method.config.memory == "last_cohort"
    before = {} if once else _own_terms(view, message)
    terms = method.table(Record()).share(upload, before, examples, round)
    told = plain.replace({CORRELATION: terms})
    if method.task.private:  # then quality is off, and numbers for events do not leave
        return told
    personal = received(method, view, message)
    if TEACHER not in personal.groups:
        return told
    misfit = method.misfits([reply], {reply.client: personal})
    enough = examples >= max(1, method.config.quality_min_examples)
    trusted, s = float(bool(misfit.compared) and enough), float(misfit.values)
    numbers = {"trusted": trusted, "rest": 1 - trusted, "misfit": trusted * s}
    models: dict[str, Group] = {}
    if method.alpha(round) < 1:
        numbers["quality"] = q = trusted * math.exp(-float(method.config.temperature) * s)
        for group in (PARAMS, BUFFERS):
            models[QUALITY + group] = scaled(reply.record.get(group), q)
            models[REST + group] = scaled(reply.record.get(group), 1 - trusted)
    made = {name: torch.tensor(value).double() for name, value in numbers.items()}
    return told.replace({**models, NUMBERS: {**told.get(NUMBERS), **made}})


def share_forms(
    method: FedHarmony, plain: Forms, round: int, message: Record, images: int
) -> Forms:
    """What :func:`share` gives beside ``plain``, of a client with so many images."""
    if CORRELATION not in plain:
        return plain
    told = {**plain, CORRELATION: method.table(Record()).share_forms(images)}
    if method.task.private or CONSENSUS not in message.groups:
        return told
    part = Form((), torch.float64, 0.0, 1.0)
    numbers = {"trusted": part, "rest": part, "misfit": part._replace(high=math.inf)}
    if method.alpha(round) < 1:
        numbers["quality"] = part
        told |= {m + group: plain[group] for m in (QUALITY, REST) for group in (PARAMS, BUFFERS)}
    return {**told, NUMBERS: {**plain[NUMBERS], **numbers}}


def aggregate(
    method: FedHarmony, state: Record, round: int, sent: Messages, replies: Replies
) -> Outcome:
    """The same model, and the same consensus, from sums over the cohort."""
    pool = next(replies, None)
    if pool is None:
        return Outcome(state)
    record, numbers = pool.record, pool.record.get(NUMBERS)
    taught = any(CONSENSUS in message.groups for message in sent.values())
    alpha = method.alpha(round) if taught else 1.0
    log, model = {"alpha": alpha}, method.model_mean(state)
    model.add(record if alpha == 1.0 else _by_quality(method, record, state, alpha), 1.0)
    if taught:
        log["align_weight"] = method.align_weight(round)
        if trusted := float(numbers.get("trusted", 0.0)):
            log["discrepancy"] = float(numbers["misfit"]) / trusted
    table = method.table(state)
    noise = float(record.scalars.get(f"noise {CORRELATION}", 0.0))
    table.add_shares(record.get(CORRELATION), round, noise)
    rounds = {} if table.last_only else rounds_of(state.get(MEMBERS))
    rounds |= dict.fromkeys(pool.clients, round)
    state = model.update(state).replace({FOLDED: table.folded, MEMBERS: members(rounds)})
    state, agreement = method.keep_clusters(state, sent, CONSENSUS)
    return Outcome(state, {}, {**log, **agreement})


def _by_quality(method: FedHarmony, sums: Record, state: Record, alpha: float) -> Record:
    """``θ = α Σ n θ / Σ n + (1 − α) Σ q θ / Σ q``.

    Who is not trusted has ``q = exp(−γ s̄)`` with the mean s̄ of the others. Where all qualities
    are too small for float64, size decides.
    """
    numbers = {name: float(value) for name, value in sums.get(NUMBERS).items()}
    level = numbers["misfit"] / max(1.0, numbers["trusted"])
    rest = math.exp(-float(method.config.temperature) * level)
    total = numbers["quality"] + rest * numbers["rest"]
    if not total:
        return sums
    groups = {}
    for group in (PARAMS, BUFFERS):
        by_quality, others = sums.get(QUALITY + group), sums.get(REST + group)
        mixed = {
            name: alpha * by_size.double()
            + (1 - alpha) * (by_quality[name] + rest * others[name]) / total
            for name, by_size in sums.get(group).items()
        }
        groups[group] = typed(mixed, state.get(group))
    return Record(groups)


def _own_terms(view: ClientView, message: Record) -> Group:
    """What a client told last, if that is what the sums hold of it; else nothing.

    A client whose last reply was lost remembers other terms than the sums may hold.
    """
    held = message.get(OWN).get("round", torch.tensor(-1))
    mine = "round" in view.memory and int(view.memory["round"]) == int(held)
    return view.memory if mine else {}
