"""Keys and ledger of a private run: what an attacker finds, and what survives a crash."""

from __future__ import annotations

import functools
import hmac
import json
import math
import random
import shutil
import struct
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedharmony.errors import CheckpointError
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.ledger import FolderLedger
from fedharmony.experiments.run import resume, start
from fedharmony.experiments.settings import load_settings
from fedharmony.methods.fedharmony_sums import CONSENSUS
from fedharmony.privacy import Budget, Clipping, Exchanges, Ledger, Noise, Price, cost
from fedharmony.rng import PAIRS, Keystream
from fedharmony.server.federation import Federation
from fedharmony.server.sampling import Cohorts, Schedule, cohort_size
from fedharmony.types import PARAMS, Record
from test_privacy import EQUAL, HARMONY, SMALL
from test_sums import SIZES, toy

dp = pytest.importorskip("dp_accounting")
kstest = pytest.importorskip("scipy.stats").kstest

# -- the stream ------------------------------------------------------------------------------------


def chacha20(key: bytes) -> bytes:
    """The first block of ChaCha20 as RFC 8439 words it; nonce and counter are zero."""
    state = [*struct.unpack("<16I", b"expand 32-byte k" + key + bytes(16))]
    x = [*state]
    for _ in range(10):
        rounds = [(i, i + 4, i + 8, i + 12) for i in range(4)]
        rounds += [(i, 4 + (i + 1) % 4, 8 + (i + 2) % 4, 12 + (i + 3) % 4) for i in range(4)]
        for a, b, c, d in rounds:
            for into, with_, by, turn in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                x[into] = (x[into] + x[with_]) % 2**32
                mixed = x[by] ^ x[into]
                x[by] = (mixed << turn | mixed >> (32 - turn)) % 2**32
    return struct.pack("<16I", *((a + b) % 2**32 for a, b in zip(x, state, strict=True)))


def test_the_stream_is_chacha20_under_a_key_for_its_purpose() -> None:
    assert chacha20(bytes(32)).hex().startswith("76b8e0ada0f13d90405d6ae55386bd28")  # RFC 8439 A.1
    own = hmac.digest(bytes(range(32)), b'["noise", 3, "w"]', "sha256")
    words = struct.unpack("<8Q", chacha20(own))
    found = Keystream(bytes(range(32)), "noise", 3, "w").uniform(8)
    assert found.tolist() == [(word >> 11) / 2**53 for word in words]


def test_gaussian_numbers_are_gaussian() -> None:
    """Mean, variance and the largest distance of 400,001 numbers, which come in two parts."""
    count = 400_001
    assert count > 2 * PAIRS
    found = Keystream(bytes(32), "test").normal(count)
    assert abs(found.mean()) < 4 / math.sqrt(count)
    assert abs(found.var() - 1) < 4 * math.sqrt(2 / count)
    assert kstest(found, "norm").pvalue > 0.01
    assert abs(np.corrcoef(found[:-1:2], found[1::2])[0, 1]) < 4 / math.sqrt(count / 2)
    half = Keystream(bytes(32), "test").normal(7)
    assert len(set(half)) == 7


def test_no_purpose_shares_a_number_with_another() -> None:
    ledger, found = Ledger(Budget(1e-5, 1.0), seed=0), list[float]()
    for round in range(3):
        ledger.begin(round, Exchanges(1, 0), 2, 4)
        purposes = [("cohort", 0), ("noise", round, "a", "b/c"), ("noise", round, "a/b", "c")]
        for purpose in [*purposes, ("noise", round, "head", "b/c")]:
            found += ledger.stream(*purpose).uniform(1000).tolist()
    assert len(set(found)) == len(found) == 12_000


# -- two runs --------------------------------------------------------------------------------------


def moved(multiplier: float, seed: int | None) -> tuple[np.ndarray[Any, Any], float]:
    """How far the first round of a run moves the model; and the deviation of its noise."""
    noise = Noise(Clipping(1.0, 1.0), Ledger(Budget(1e-5, multiplier), seed))
    own = toy("fedavg", federation=EQUAL, rounds=1, cohort=6, noise=noise)
    before, (after, _) = own.initial(), own.run()
    change = [(after.get(PARAMS)[n] - before.get(PARAMS)[n]).flatten() for n in before.get(PARAMS)]
    return 6 * torch.cat(change).double().numpy(), multiplier


def recovered(seeds: tuple[int | None, int | None]) -> float:
    """The error of the sum that two runs with different noise multipliers give away.

    6 Δ = Σ u + z N in both, so Σ u = (z₁ 6 Δ₂ − z₂ 6 Δ₁) / (z₁ − z₂) where N is the same.
    """
    (first, one), (second, two) = moved(1.0, seeds[0]), moved(3.0, seeds[1])
    exact, _ = moved(1e-30, 0)
    return float(np.std((one * second - two * first) / (one - two) - exact))


def test_two_runs_do_not_cancel_their_noise() -> None:
    """The deviation is then √(3² + 3²) / 2 = 2.12; with one and the same seed nothing is hidden."""
    assert recovered((0, 0)) < 1e-5
    assert recovered((None, None)) == pytest.approx(2.12, rel=0.2)


# -- nobody in a sum -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fedavg", "fedharmony", "spherefed"])
@pytest.mark.parametrize("head", ["random", "closed_form"])
def test_a_sum_that_nobody_is_in_is_noise_alone(name: str, head: Any) -> None:
    """1 of 6 clients a round: every third round has none. All lost, after that: the same."""
    federation = replace(EQUAL, head_start=head, head_clients="cohort", server_average=0.5)
    for settings in (federation, replace(federation, drop_rate=0.999)):
        noise = Noise(Clipping(1.0, 1.0), Ledger(Budget(1e-5, 1.0), seed=4))
        config = HARMONY if name == "fedharmony" else None
        own = toy(name, config, federation=settings, rounds=8, cohort=1, noise=noise)
        states, events = [own.initial()], list[dict[str, Any]]()
        keep = functools.partial(lambda kept, t, state: kept.append(state), states)
        own.loop().run(states[0], 0, events.append, keep)
        alone = [bool(event["privacy"].get("noise_alone")) for event in events]
        answered = [bool(event["reported"]) for event in events]
        assert alone == [not some for some in answered]
        assert sum(alone) > 0
        assert any(not event["cohort"] for event in events)
        parts = 2 if name == "fedharmony" else 1
        for round, (before, after) in enumerate(pairwise(states[:-1])):  # the last is an average
            steps = [after.get(PARAMS)[n] - before.get(PARAMS)[n] for n in before.get(PARAMS)]
            if alone[round] and round:
                found = float(torch.cat([step.flatten() for step in steps]).std())
                assert found == pytest.approx(math.sqrt(parts), rel=0.2)
        assert all(t.isfinite().all() for _, t in states[-1].tensors() if t.is_floating_point())


def test_what_fedharmony_sends_does_not_tell_how_many_have_taken_part() -> None:
    """Its sums are sent from the second round on, though at most one client was in the first."""
    noise = Noise(Clipping(1.0, 1.0), Ledger(Budget(1e-5, 1.0), seed=4))
    own = toy("fedharmony", HARMONY, federation=EQUAL, rounds=3, cohort=1, noise=noise)
    sent, broadcast = set[tuple[bool, bool]](), own.method.broadcast

    def spied(state: Record, round: int, clients: Any) -> Any:
        messages = broadcast(state, round, clients)
        sent.update((round > 0, CONSENSUS in message.groups) for message in messages.values())
        return messages

    own.method.broadcast = spied
    _, events = own.run()
    assert len(events[0]["cohort"]) < 2
    assert sent == {(False, False), (True, True)}


# -- the key and a crash ---------------------------------------------------------------------------

ONCE = ["privacy.noise_multiplier=2", "run.rounds=3"]


def begin(folder: Path, *changes: str) -> dict[str, Any]:
    settings = load_settings("demo", [*SMALL, *ONCE, *changes])
    return start(settings, RunFolder(folder), lambda event: None)


def ledger_of(folder: Path) -> list[dict[str, Any]]:
    return list(json.loads((folder / "privacy.json").read_text())["rounds"])


def cut_short(folder: Path, round: int, patch: pytest.MonkeyPatch, *changes: str) -> None:
    """A run that ends in a round, after its noise was added."""
    released = Noise.released

    def dies(self: Noise, total: Record, state: Record, stage: str, at: int) -> Record:
        found = released(self, total, state, stage, at)
        if at == round:
            raise KeyboardInterrupt
        return found

    with patch.context() as context:
        context.setattr(Noise, "released", dies)
        with pytest.raises(KeyboardInterrupt):
            begin(folder, *changes)


def test_the_key_is_written_before_noise_and_deleted_with_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is for the owner alone, and no copy of the folder holds that of an earlier round."""
    file, stream, used = tmp_path / "run" / "noise.key", Ledger.stream, list[tuple[str, int]]()
    keys = list[str]()

    def spied(self: Ledger, *purpose: Any) -> Keystream:
        assert file.stat().st_mode & 0o777 == 0o600
        held = json.loads(file.read_text())
        assert held["round"] == purpose[1] == ledger_of(tmp_path / "run")[-1]["round"]
        assert ledger_of(tmp_path / "run")[-1]["state"] == "begun"
        used.append(purpose[:2])
        keys.append(held["key"])
        return stream(self, *purpose)

    monkeypatch.setattr(Ledger, "stream", spied)
    copies = list[Path]()

    def observe(event: dict[str, Any]) -> None:
        if event["event"] == "evaluate":
            copies.append(tmp_path / f"copy-{event['round']}")
            shutil.copytree(tmp_path / "run", copies[-1])

    settings = load_settings("demo", [*SMALL, *ONCE])
    results = start(settings, RunFolder(tmp_path / "run"), observe)
    assert {("cohort", t) for t in range(3)} | {("noise", t) for t in range(3)} == set(used)
    assert len(set(keys)) == len(copies) == 3
    for copy in [*copies, tmp_path / "run"]:
        held = b"".join(p.read_bytes() for p in copy.rglob("*") if p.is_file())
        assert not (copy / "noise.key").exists()
        assert not any(key.encode() in held or bytes.fromhex(key) in held for key in keys)
    assert [e["state"] for e in ledger_of(tmp_path / "run")] == ["committed"] * 3
    assert results["privacy"]["epsilon"] == cost([Price(0.75, 2.0)] * 3, 1e-5)


def test_a_round_is_repeated_with_its_key_to_the_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last round: the run and its copy end alike. Without its key it counts twice."""
    run, copy, lost = (tmp_path / name for name in ("run", "copy", "lost"))
    cut_short(run, 2, monkeypatch)
    for other in (copy, lost):
        shutil.copytree(run, other)
    (lost / "noise.key").unlink()
    first, second = (resume(RunFolder(f), lambda event: None) for f in (run, copy))
    assert first["state_sha256"] == second["state_sha256"]
    assert "note" not in first["privacy"]
    assert "counts as spent" not in caplog.text
    third = resume(RunFolder(lost), lambda event: None)
    assert third["state_sha256"] != first["state_sha256"]
    assert [e["round"] for e in ledger_of(lost)] == [0, 1, 2, 2]
    assert third["privacy"]["epsilon"] == cost([Price(0.75, 2.0)] * 4, 1e-5)
    assert third["privacy"]["rounds"] == 3
    assert third["privacy"]["note"] == "rounds that were cut short and count as spent: 1"
    assert "Round 3 was cut short and cannot be repeated: it counts as spent" in caplog.text


def test_a_seed_for_tests_resumes_to_the_bit_and_is_not_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = begin(tmp_path / "a", "privacy.noise_seed=5")
    assert caplog.text.count("not private: its noise can be reproduced") == 1
    cut_short(tmp_path / "b", 1, monkeypatch, "privacy.noise_seed=5")
    found = resume(RunFolder(tmp_path / "b"), lambda event: None)
    assert found["state_sha256"] == expected["state_sha256"]
    assert found["privacy"]["reproducible"] is True
    assert found["privacy"]["note"].startswith("not private: its noise can be reproduced")
    assert begin(tmp_path / "c")["state_sha256"] != begin(tmp_path / "d")["state_sha256"]


def test_a_lost_round_ends_the_run_before_its_budget_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ε pays for three rounds; the second is lost: the run ends after two, with its average."""
    once, average = "privacy.noise_multiplier=", "federation.server_average=0.9"
    cut_short(tmp_path / "run", 1, monkeypatch, once, "privacy.epsilon=8", average)
    (tmp_path / "run" / "noise.key").unlink()
    results = resume(RunFolder(tmp_path / "run"), lambda event: None)
    assert (results["status"], results["rounds"], results["rounds_done"]) == ("completed", 3, 2)
    assert 7.9 < results["privacy"]["epsilon"] <= 8
    assert len(ledger_of(tmp_path / "run")) == 3
    events = RunFolder(tmp_path / "run").read_events()
    assert [e["round"] for e in events if e["event"] == "evaluate"][-1] == 1
    settings = RunFolder(tmp_path / "run").open()
    saved = RunFolder(tmp_path / "run").load_state(settings).state
    assert not any(group.startswith("average_") for group in saved.groups)  # the model itself


def damage(file: Path) -> None:
    file.write_text(file.read_text().replace('"clients": 8', '"clients": 9', 1))


def another_key(file: Path) -> None:
    named = json.loads((file.parent / "noise.key").read_text())
    (file.parent / "noise.key").write_text(json.dumps({**named, "run": "f" * 32}))


def cut_key(file: Path) -> None:
    named = json.loads((file.parent / "noise.key").read_text())
    (file.parent / "noise.key").write_text(json.dumps({**named, "key": named["key"][:10]}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (damage, "privacy.json is damaged"),
        (lambda file: file.write_text("[]"), "privacy.json is damaged"),
        (lambda file: file.unlink(), "privacy.json is gone"),
        (lambda file: shutil.copy(file.parent / "old.json", file), "knows nothing of round 1"),
        (another_key, "noise.key belongs to another run"),
        (cut_key, "noise.key is damaged"),
    ],
)
def test_a_ledger_or_key_that_is_not_the_run_s_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Any, reason: str
) -> None:
    enter = FolderLedger._enter
    old = tmp_path / "old.json"

    def kept(self: FolderLedger, *given: Any) -> None:
        if not old.exists():
            shutil.copy(tmp_path / "run" / "privacy.json", old)
        enter(self, *given)

    monkeypatch.setattr(FolderLedger, "_enter", kept)
    cut_short(tmp_path / "run", 1, monkeypatch)
    shutil.move(old, tmp_path / "run" / "old.json")
    change(tmp_path / "run" / "privacy.json")
    before = {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}
    with pytest.raises(CheckpointError, match=reason):
        resume(RunFolder(tmp_path / "run"), lambda event: None)
    assert before == {p: p.read_bytes() for p in (tmp_path / "run").rglob("*") if p.is_file()}


# -- a second reader of what was spent -------------------------------------------------------------


@functools.cache
def loss(chance: float, multiplier: float) -> Any:
    made = pytest.importorskip("dp_accounting.pld").privacy_loss_distribution
    return made.from_gaussian_mechanism(multiplier, sampling_prob=chance)


def by_both_accountants(rounds: list[tuple[float, float]]) -> tuple[float, float]:
    """ε of mechanisms (q, z) by privacy loss distributions in fine steps, and by Rényi."""
    counts = {one: rounds.count(one) for one in rounds}
    parts = [loss(*one).self_compose(count) for one, count in counts.items()]
    accountant = dp.rdp.RdpAccountant()
    for (chance, multiplier), count in counts.items():
        gaussian = dp.GaussianDpEvent(multiplier)
        accountant.compose(dp.PoissonSampledDpEvent(chance, gaussian), count)
    composed = functools.reduce(lambda a, b: a.compose(b), parts)
    return composed.get_epsilon_for_delta(1e-5), accountant.get_epsilon(1e-5)


@dataclass
class Joined(Cohorts):
    """Clients that join, and are away, by chance; half of those registered are drawn."""

    rng: random.Random
    rounds: int
    registered: int = 3
    asked: dict[int, int] = field(default_factory=dict)

    def draw(self, round: int, begin: Any = None) -> list[int]:
        self.registered = min(6, self.registered + self.rng.choice([0, 0, 1, 2]))
        self.asked[round] = self.registered
        sizes = dict(enumerate(SIZES[: self.registered]))
        drawn = Schedule(sizes, self.rounds, cohort_size(len(sizes), 0.5, None), "poisson", None)
        away = self.rng.sample(range(6), self.rng.choice([0, 1, 4]))
        return [k for k in drawn.draw(round, begin) if k not in away]


@pytest.mark.parametrize("seed", range(6))
def test_a_second_reader_finds_what_the_ledger_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """From the keys that noise and cohorts were drawn with, not from the ledger's file."""
    rng = random.Random(seed)
    name, multiplier = rng.choice(["fedavg", "spherefed"]), rng.choice([1.0, 2.0])
    drawn, noised = dict[bytes, int](), defaultdict[bytes, set[tuple[str, bool]]](set)
    uniform, released, rounds = Keystream.uniform, Noise.released, 4
    monkeypatch.setattr("fedharmony.privacy.Keystream", Spied := type("Spied", (Keystream,), {}))
    ever = dict[str, bool]()

    def made(self: Any, key: bytes, *purpose: Any) -> None:
        Keystream.__init__(self, key, *purpose)
        self.key, self.purpose = key, purpose
        if purpose[0] == "noise":
            noised[key].add((purpose[2], ever[purpose[2]]))

    def counted(self: Any, count: int) -> Any:
        if self.purpose[0] == "cohort":
            drawn[self.key] = count
        return uniform(self, count)

    Spied.__init__, Spied.uniform = made, counted
    z = set[float]()

    def measured(self: Noise, total: Record, *given: Any) -> Record:
        parts, found = len(total.groups), released(self, total, *given)
        bound = {group: 0.5 if group == PARAMS else 2.0 for group in total.groups}
        z.update(
            round(float(found.scalars[f"noise {g}"]) / bound[g] / math.sqrt(parts), 9)
            for g in total.groups
        )
        return found

    monkeypatch.setattr(Noise, "released", measured)
    folder, schedule, ledgers = RunFolder(tmp_path), Joined(rng, rounds), list[FolderLedger]()
    done, crashes = 0, rng.sample(range(rounds), 2)

    def after_round(t: int, state: Record) -> None:
        nonlocal done
        if t in crashes:
            crashes.remove(t)
            raise KeyboardInterrupt
        states.append(state)
        ledgers[-1].commit(t)
        done = t + 1

    settings = replace(EQUAL, drop_rate=rng.choice([0.0, 0.5]), max_failures=1.0)
    start = toy(name, federation=settings, noise=Noise(Clipping(0.5, 2.0), Ledger(Budget(1, 1))))
    states = [start.initial()]
    while done < rounds:
        budget = Budget(1e-5, multiplier)
        ledgers.append(FolderLedger(folder, budget, None, done, repeats=rng.random() < 0.5))
        if rng.random() < 0.3:
            (tmp_path / "noise.key").unlink(missing_ok=True)  # too late: it has been read
        noise = Noise(Clipping(0.5, 2.0), ledgers[-1])
        own = toy(name, federation=settings, rounds=rounds, noise=noise)
        loop: Federation = replace(own.loop(), schedule=schedule)
        ever |= {stage.name: stage.everyone for t in range(rounds) for stage in loop.stages(t)}
        try:
            loop.run(states[-1], done, lambda event: None, after_round)
        except KeyboardInterrupt:
            schedule.registered = max(schedule.asked.values())
    assert z == {multiplier}
    mechanisms = []
    for key, clients in drawn.items():
        everyone = [ever for _, ever in noised[key]]
        chance = round_half(clients) / clients
        for q, count in ((chance, everyone.count(False)), (1.0, everyone.count(True))):
            mechanisms += [(q, multiplier / math.sqrt(count))] if count else []
    exact, dear = by_both_accountants(mechanisms)
    assert len(mechanisms) >= rounds
    assert exact * (1 - 1e-6) <= ledgers[-1].spent()["epsilon"] <= dear * (1 + 1e-6)


def round_half(clients: int) -> int:
    return max(1, round(clients / 2))
