"""Sites in this process, behind a post in memory: the bits of the simulator, and what fails."""

from __future__ import annotations

import hashlib
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedharmony import fallbacks
from fedharmony.config import flat
from fedharmony.errors import CheckpointError, ClientLimitError, ConfigError, DataError
from fedharmony.experiments import run
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.flower import post as posts
from fedharmony.flower import roster as rosters
from fedharmony.flower import server
from fedharmony.flower.roster import Terms
from fedharmony.methods.base import methods
from fedharmony.privacy import Budget, Exchanges, Ledger, Noise, Price, cost
from fedharmony.records import digest, from_bytes, to_bytes
from fedharmony.report.load import load_run
from fedharmony.rng import torch_rng
from fedharmony.server.sampling import Schedule
from fedharmony.site.parcel import Parcel
from fedharmony.site.policy import accepted, offered
from fedharmony.site.records import record_of
from fedharmony.site.settings import load_site
from fedharmony.site.worker import Worker
from fedharmony.types import Record
from sites import CLASSES, Memory, draw_sites, site_file, workers

TERMS = Terms(sites=3, wait_s=5.0, limit_s=60.0)
SAME = ("parameters_sha256", "state_sha256", "metrics", "structure", "per_label", "bytes_up")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("sites")
        patch.setenv("FEDHARMONY_CACHE", str(folder / "cache"))
        patch.setattr(posts, "POLL_S", 0.0)
        patch.setattr(posts, "AGAIN_S", 0.0)
        patch.setattr(rosters, "REJOIN_S", 0.0)
        threads = torch.get_num_threads()
        yield folder, draw_sites(folder / "data")
        torch.set_num_threads(threads)


def nobody(event: dict[str, Any]) -> None:
    pass


@pytest.mark.parametrize("method", methods.names())
def test_sites_give_the_bits_of_the_simulator(home: Any, tmp_path: Path, method: str) -> None:
    folder, changes = home
    settings = load_settings("demo", [*changes, f"run.method={method}"])
    expected = run.start(settings, RunFolder(tmp_path / "simulated"), nobody)
    post = Memory(workers(folder / "data"), seed=len(method))
    found = server.start(settings, RunFolder(tmp_path / "sites"), nobody, post, TERMS)
    assert {k: found[k] for k in SAME} == {k: expected[k] for k in SAME}


PRIVATE = ["run.method=fedavg", "federation.average=uniform", "privacy.noise_multiplier=0.5"]
PRIVATE += ["federation.server_sees=sums", "federation.cohort=2"]
SEEDED = [*PRIVATE, "privacy.noise_seed=3"]


@pytest.mark.parametrize(
    "more",
    [
        ["run.method=fedavg"],
        ["run.method=fedharmony", "methods.fedharmony.temperature=1"],
        SEEDED,
    ],
    ids=["fedavg", "fedharmony", "private"],
)
def test_sums_over_sites_are_those_of_the_simulator(
    home: Any, tmp_path: Path, more: list[str]
) -> None:
    """Sites send shares, which hold no number of images, and cut them where they are private."""
    folder, changes = home
    if "privacy" in more[-1]:
        pytest.importorskip("dp_accounting")
    sums = ["federation.server_sees=sums", "federation.cohort=3"]
    settings = load_settings("demo", [*changes, *sums, *more])
    expected = run.start(settings, RunFolder(tmp_path / "simulated"), nobody)
    post = Memory(workers(folder / "data"))
    found = server.start(settings, RunFolder(tmp_path / "sites"), nobody, post, TERMS)
    assert {k: found[k] for k in SAME} == {k: expected[k] for k in SAME}


def test_privacy_counts_with_the_chance_that_a_site_has_among_all(
    home: Any, tmp_path: Path
) -> None:
    """Ada is away from the second round on: the others are drawn as if she were there."""
    pytest.importorskip("dp_accounting")
    post = Memory(workers(home[0] / "data"))
    settings = settings_of(home, *SEEDED, "run.rounds=6")
    run.start(settings, RunFolder(tmp_path / "simulated"), nobody)
    observe = over_rounds(after_0=lambda: post.offline.add(1000))
    server.start(settings, RunFolder(tmp_path / "sites"), observe, post, replace(TERMS, least=1))
    everybody, here = (
        [e["cohort"] for e in rounds_of(RunFolder(tmp_path / name))]
        for name in ("simulated", "sites")
    )
    assert any(0 in cohort for cohort in everybody[1:])
    assert here == [everybody[0], *([k for k in cohort if k] for cohort in everybody[1:])]


SHARES: dict[str, tuple[Any, str]] = {
    "nan": (lambda r: times(r, "params", torch.nan), "not finite"),
    "huge": (lambda r: times(r, "params", 1e300), "overflows"),
    "form": (lambda r: r.replace({"extra": {"a": torch.zeros(1).double()}}), "not asked for"),
    "weight": (lambda r: times(r, "numbers", 1e15), "outside of [18, 18]"),
}


def times(record: Record, group: str, factor: float) -> Record:
    return record.replace({group: {n: t * factor for n, t in record.get(group).items()}})


@pytest.mark.parametrize("how", SHARES)
def test_a_share_that_cannot_be_true_costs_its_site_alone(
    home: Any, tmp_path: Path, how: str
) -> None:
    """Ben is the largest, and his share the first: the others are not measured by it."""
    post, (change, reason) = Memory(workers(home[0] / "data")), SHARES[how]

    def spoilt(question: Parcel) -> Parcel:
        found = post.sites[1001][1].answer(question)
        if question.kind != "stage" or question.words["round"] != 1:
            return found
        record = change(from_bytes(found.parts["own"]))
        return Parcel(found.kind, found.words, {"own": to_bytes(record)})

    post.instead = {1001: spoilt}
    sums = ["run.method=fedavg", "federation.server_sees=sums", "federation.cohort=3"]
    folder = RunFolder(tmp_path / "run")
    settings = settings_of(home, *sums, "federation.sum_least=2")
    server.start(settings, folder, nobody, post, TERMS)
    events = rounds_of(folder)
    assert [event["reported"] for event in events] == [[0, 1, 2], [0, 2], [0, 1, 2]]
    (failure,) = events[1]["left_out"]
    assert (failure["client"], failure["name"]) == (1, "ben")
    assert reason in failure["reason"]


def test_a_site_that_keeps_everything_finds_neither_noise_nor_cohort(
    home: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ada keeps every parcel that she was sent; two of three sites take part in a round.

    With the noise she would have the sum of the others, θ' − θ = (Σ u + z N) / 2, up to rounding.
    She tries the way in which noise and cohorts were once made of the run's seed, and the product's
    own way with every number that she was sent, and all small ones. No parcel holds a key.
    """
    more = ["privacy.noise_multiplier=20", "run.seed=918273645", "run.rounds=10"]
    settings = settings_of(home, *PRIVATE, *more)
    post, keys, totals = Memory(workers(home[0] / "data")), list[bytes](), dict[int, Any]()
    released, folder = Noise.released, RunFolder(tmp_path / "run")

    def drawn(count: int) -> bytes:  # the same in each run of this test; ada does not know it
        found = hashlib.sha256(b"entropy %d" % len(keys)).digest()[:count]
        keys.extend([found] if count == 32 else [])
        return found

    def summed(self: Noise, total: Record, state: Record, stage: str, round: int) -> Record:
        name, first = next(iter(total.get("params").items()))
        totals[round] = name, first.clone()
        return released(self, total, state, stage, round)

    monkeypatch.setattr("fedharmony.privacy.os.urandom", drawn)
    monkeypatch.setattr(Noise, "released", summed)
    server.start(settings, folder, nobody, post, TERMS)
    parcels = [parcel for node, parcel in post.log if node == 1000]
    held = b"".join(parcel.to_bytes() for parcel in parcels)
    assert len(keys) == 10
    assert not any(key in held or key.hex().encode() in held for key in keys)
    (told,) = [p.words["run"]["settings"] for p in parcels if p.kind == "enrol"]
    assert told["privacy"].keys() == {"noise_multiplier", "delta", "clip", "clip_sums"}
    name, shape = totals[0][0], totals[0][1].shape
    seen = {
        p.words["round"]: record_of(p.parts, {}).get("params")[name].double()
        for p in parcels
        if p.kind == "stage"
    }
    pairs = [t for t in seen if t + 1 in seen]
    assert len(pairs) > 1
    cohorts = [e["cohort"] for e in rounds_of(folder)]
    numbers = {value for value in flat(told).values() if type(value) is int}
    for seed in {*numbers, *range(300)}:
        guess, guessed = Ledger(Budget(1e-5, 20.0), seed), list[list[int]]()
        for t in range(10):
            guess.begin(t, Exchanges(1, 0), 2, 3)
            uniform = guess.stream("cohort", t).uniform(3)
            guessed.append([k for k in range(3) if uniform[k] < 2 / 3])
            if t in pairs:
                stream = guess.stream("noise", t, "update", "params", name)
                own = torch.from_numpy(stream.normal(shape.numel())).view(shape)
                generator = torch_rng(seed, "privacy noise update", t)
                once = torch.randn(shape, generator=generator, dtype=torch.float64)
                for noise in (own, once):
                    sums = 2 * (seen[t + 1] - seen[t]) - 20 * noise
                    assert float((sums - totals[t][1]).abs().max()) > 5
        assert cohorts != guessed
        assert cohorts != list(Schedule({0: 12, 1: 18, 2: 8}, 10, 2, "poisson", seed))


def test_a_seed_of_the_noise_is_not_sent_to_sites(home: Any) -> None:
    told = offered(settings_of(home, *SEEDED))["privacy"]
    assert told.keys() == {"noise_multiplier", "delta", "clip", "clip_sums"}


def test_a_late_site_s_chance_is_what_the_ledger_counts_with(home: Any, tmp_path: Path) -> None:
    """Half of 2 founders is 1 (q = ½), half of 3 sites is 2 (q = ⅔): ε is that of both."""
    post, folder = Memory(workers(home[0] / "data")), RunFolder(tmp_path / "run")
    post.offline = {1000}
    share = ["federation.cohort=", "federation.participation=0.5"]
    settings = settings_of(home, *PRIVATE, *share, "run.rounds=5")
    observe, terms = over_rounds(after_0=post.offline.clear), replace(TERMS, sites=2)
    found = server.start(settings, folder, observe, post, terms)["privacy"]
    spent = [event["privacy"] for event in rounds_of(folder)]
    assert [one["clients"] for one in spent] == [2, 2, 3, 3, 3]
    prices = [Price(1 / 2, 0.5)] * 2 + [Price(2 / 3, 0.5)] * 3
    assert [one["epsilon"] for one in spent] == [cost(prices[: t + 1], 1e-5) for t in range(5)]
    assert (found["epsilon"], found["noise_by"]) == (spent[-1]["epsilon"], "server")


def test_a_round_of_sites_that_was_cut_short_is_spent_and_gets_another_key(
    home: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site could answer otherwise the second time: the difference would be without noise."""
    folder, keys, released = RunFolder(tmp_path / "run"), list[bytes](), Noise.released

    def dies(self: Noise, *given: Any) -> Record:
        keys.append(self.ledger._key)
        if len(keys) == 2:
            raise KeyboardInterrupt
        return released(self, *given)

    monkeypatch.setattr(Noise, "released", dies)
    settings, post = settings_of(home, *PRIVATE), Memory(workers(home[0] / "data"))
    with pytest.raises(KeyboardInterrupt):
        server.start(settings, folder, nobody, post, TERMS)
    found = server.resume(folder, nobody, post, TERMS)["privacy"]
    assert len(set(keys)) == len(keys) == 4
    assert found["epsilon"] == cost([Price(2 / 3, 0.5)] * 4, 1e-5)
    assert found["rounds"] == 3
    assert "cut short" in found["note"]


# -- a run goes on --------------------------------------------------------------------------------


def settings_of(home: Any, *more: str) -> Any:
    return load_settings("demo", [*home[1], *more])


@pytest.mark.parametrize("where", ["server", "worker"])
def test_a_run_cut_short_goes_on_to_the_same_bits(home: Any, tmp_path: Path, where: str) -> None:
    """The server dies in round 2, after one site has trained and kept its share; or all workers."""
    settings = settings_of(home, "run.method=fedcurv", "run.rounds=4")
    expected = run.start(settings, RunFolder(tmp_path / "simulated"), nobody)
    sites, folder = workers(home[0] / "data"), RunFolder(tmp_path / "sites")
    post = Memory(sites)
    trained = 0

    def die(node: int) -> Any:
        def answer(question: Parcel) -> Parcel:
            nonlocal trained
            found = sites[post.sites[node][0]].answer(question)
            trained += question.words.get("round") == 2
            if trained == 2:
                raise KeyboardInterrupt
            return found

        return answer

    post.instead = {node: die(node) for node in post.sites}
    with pytest.raises(KeyboardInterrupt):
        server.start(settings, folder, nobody, post, TERMS)
    again = Memory(workers(home[0] / "data") if where == "worker" else sites, seed=5)
    found = server.resume(folder, nobody, again, TERMS)
    assert {k: found[k] for k in SAME} == {k: expected[k] for k in SAME}


def test_a_resumed_run_waits_for_all_of_its_sites(
    home: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Relays come back one after the other; a run that begins without ada draws other cohorts."""
    settings, sites = settings_of(home, "run.rounds=6"), workers(home[0] / "data")
    expected = run.start(settings, RunFolder(tmp_path / "simulated"), nobody)

    class Returning(Memory):
        """Ada comes back when others have been looked for a few times."""

        def nodes(self) -> dict[int, str]:
            looks.append(None)
            if len(looks) == 5:
                self.offline.clear()
            return super().nodes()

    found = {}
    for waits in (5.0, 0.0):
        monkeypatch.setattr(rosters, "REJOIN_S", waits)
        looks: list[None] = []
        folder = RunFolder(tmp_path / f"waits-{waits}")
        with pytest.raises(KeyboardInterrupt):
            server.start(settings, folder, over_rounds(after_0=stop), Memory(sites), TERMS)
        post = Returning(sites)
        post.offline = {1000}
        found[waits] = server.resume(folder, nobody, post, replace(TERMS, least=2))["state_sha256"]
    assert found[5.0] == expected["state_sha256"] != found[0.0]


def test_a_site_forgets_what_the_server_never_heard(home: Any, tmp_path: Path) -> None:
    """One site trains in round 1 and its answer is lost: it has not taken part, here as there."""
    changes = ["run.method=fedcurv", "federation.cohort=3"]
    settings = settings_of(home, *changes)

    def lost(post: Memory, delivered: bool) -> Any:
        """Node 1000 fails in round 1; ``delivered``: after it has done the work."""
        worker = post.sites[1000][1]

        def answer(question: Parcel) -> Parcel | str:
            fails = question.words.get("round") == 1
            found = worker.answer(question) if delivered or not fails else None
            return "lost" if fails or found is None else found

        return answer

    results = []
    for delivered in (False, True):
        post = Memory(workers(home[0] / "data"))
        post.instead[1000] = lost(post, delivered)
        out = RunFolder(tmp_path / str(delivered))
        results.append(server.start(settings, out, nobody, post, TERMS))
    assert results[0]["state_sha256"] == results[1]["state_sha256"]
    assert results[0]["clients_lost"] == 1


def test_a_second_server_on_the_folder_is_refused(home: Any, tmp_path: Path) -> None:
    settings, folder = settings_of(home), RunFolder(tmp_path / "run")
    post, said = Memory(workers(home[0] / "data")), []

    def observe(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            with pytest.raises(CheckpointError, match="is being written by process") as caught:
                server.resume(folder, nobody, Memory({}), TERMS)
            said.append(caught)

    server.start(settings, folder, observe, post, TERMS)
    assert len(said) == 3


# -- failures are named ---------------------------------------------------------------------------


def broken(found: Parcel) -> Parcel:
    parts = {**found.parts, "own": b"no tensors"}
    return Parcel(found.kind, found.words, parts)


def with_params(found: Parcel, change: Any) -> Parcel:
    """An answer whose model is another one; one to an enrolment has none."""
    if "own" not in found.parts:
        return found
    record = from_bytes(found.parts["own"])
    params = {name: change(tensor) for name, tensor in record.get("params").items()}
    data = to_bytes(record.replace({"params": params}))
    return Parcel(found.kind, found.words, {**found.parts, "own": data})


def unknown_numbers(found: Parcel) -> Parcel:
    return with_params(found, lambda tensor: tensor * torch.nan)


def other_shape(found: Parcel) -> Parcel:
    return with_params(found, lambda tensor: torch.cat([tensor, tensor]))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda found: "Flower says: gone (5)", "site ada: Flower says: gone"),
        (lambda found: Parcel("failed", {"reason": "disk full"}), "site ada: disk full"),
        (lambda found: Parcel("refused", {"reason": "no"}), "site ada: no"),
        (lambda found: Parcel("reply", {"examples": "many"}), "not of the form"),
        (broken, "is damaged"),
        (unknown_numbers, "not finite"),
        (other_shape, "has shape"),
    ],
)
def test_a_site_that_fails_is_named_and_left_out(
    home: Any, tmp_path: Path, answer: Any, reason: str
) -> None:
    post, folder = Memory(workers(home[0] / "data")), RunFolder(tmp_path / "run")
    worker = post.sites[1000][1]

    def fail(question: Parcel) -> Any:
        found = worker.answer(question)
        return answer(found) if question.words.get("round") == 1 else found

    post.instead[1000] = fail
    settings = settings_of(home, "federation.cohort=3")
    server.start(settings, folder, nobody, post, TERMS)
    rounds = [e for e in folder.read_events() if e["event"] == "round"]
    assert [e["reported"] for e in rounds] == [[0, 1, 2], [1, 2], [0, 1, 2]]
    assert reason in rounds[1]["left_out"][0]["reason"]


def test_fallbacks_of_a_site_reach_the_event(home: Any, tmp_path: Path) -> None:
    """Also of one that lies; what it may say is bounded."""
    post, folder = Memory(workers(home[0] / "data")), RunFolder(tmp_path / "run")
    ada, bea = (post.sites[node][1] for node in (1000, 1001))

    def halves(question: Parcel) -> Parcel:
        fallbacks.note("memory", "halved")
        found = ada.answer(question)
        assert question.kind != "stage" or found.words["fallbacks"] == {"memory": 1}
        return found

    def lies(question: Parcel) -> Parcel:
        found = bea.answer(question)
        said = {"plain": 10**400, "slow": True, "graphs": -1, "odd": 1}
        return Parcel(found.kind, {**found.words, "fallbacks": said}, found.parts)

    post.instead |= {1000: halves, 1001: lies}
    server.start(settings_of(home, "federation.cohort=3"), folder, nobody, post, TERMS)
    rounds = [e for e in folder.read_events() if e["event"] == "round"]
    assert rounds[-1]["fallbacks"] == {"memory": 1}


def test_a_silent_site_is_given_up_and_not_asked_while_it_owes(home: Any, tmp_path: Path) -> None:
    post, folder = Memory(workers(home[0] / "data")), RunFolder(tmp_path / "run")
    post.instead[1000] = lambda question: None if question.kind == "stage" else ada.answer(question)
    ada = post.sites[1000][1]
    terms = Terms(sites=3, wait_s=5.0, limit_s=1.5)
    server.start(settings_of(home, "federation.cohort=3"), folder, nobody, post, terms)
    reasons = [e["left_out"][0]["reason"] for e in folder.read_events() if e["event"] == "round"]
    assert reasons[0] == "site ada: no answer within 1.5 seconds"
    assert reasons[1] == "site ada: it still works on an earlier message"


def test_a_model_is_packed_once_for_all_sites(home: Any, tmp_path: Path) -> None:
    post = Memory(workers(home[0] / "data"))
    settings = settings_of(home, "federation.cohort=3", "run.method=fedharmony")
    server.start(settings, RunFolder(tmp_path / "run"), nobody, post, TERMS)
    asked = [p for _, p in post.log if p.kind == "stage" and p.words["round"] == 2]
    assert len({id(p.parts["shared"]) for p in asked}) == 1
    assert len(asked) == 3


def test_a_worker_that_is_not_up_yet_is_waited_for(home: Any, tmp_path: Path) -> None:
    post, asked = Memory(workers(home[0] / "data")), 0
    ada = post.sites[1000][1]

    def late(question: Parcel) -> Parcel:
        nonlocal asked
        asked += question.kind == "enrol"
        return ada.answer(question) if asked > 2 else Parcel("failed", {"reason": "not there"})

    post.instead[1000] = late
    server.start(settings_of(home), RunFolder(tmp_path / "run"), nobody, post, TERMS)
    assert asked == 3


def test_too_few_sites_are_an_error_that_says_why(home: Any, tmp_path: Path) -> None:
    post = Memory(workers(home[0] / "data"))
    post.offline = {1000}
    post.instead[1001] = lambda question: "Flower says: gone (5)"
    terms = Terms(sites=3, wait_s=0.0, registered=("ada", "ben", "cy"))
    why = r"1 of the 3 .* \(cy\): site ben: Flower says: gone \(5\); not online: ada\."
    with pytest.raises(ClientLimitError, match=why):
        server.start(settings_of(home), RunFolder(tmp_path / "run"), nobody, post, terms)


# -- who takes part -------------------------------------------------------------------------------


def over_rounds(**changes: Any) -> Any:
    """Observes a run, and calls ``after_N`` when round N is over."""

    def observe(event: dict[str, Any]) -> None:
        if event["event"] == "evaluate" and (change := changes.get(f"after_{event['round']}")):
            change()

    return observe


def stop() -> None:
    raise KeyboardInterrupt


def rounds_of(folder: RunFolder) -> list[dict[str, Any]]:
    return [event for event in folder.read_events() if event["event"] == "round"]


def roster(folder: RunFolder) -> dict[str, tuple[int, int]]:
    """Client id and first round of each site, as the folder has them."""
    sites = (folder.read_json("roster.json") or {})["sites"]
    return {name: (site["client"], site["joined"]) for name, site in sites.items()}


@pytest.mark.parametrize("node", [1000, 2000])
def test_a_site_that_is_away_is_no_failure_and_comes_back(
    home: Any, tmp_path: Path, node: int
) -> None:
    """As the same node at once; as another node it is asked first, and drawn a round later."""
    post, folder = Memory(workers(home[0] / "data"), registered=False), RunFolder(tmp_path / "run")

    def away() -> None:
        post.offline.add(1000)

    def back() -> None:
        post.sites[node] = post.sites[1000]
        post.offline -= {node}

    observe = over_rounds(after_0=away, after_1=back)
    settings = settings_of(home, "federation.cohort=3", "run.rounds=4")
    server.start(settings, folder, observe, post, TERMS)
    later = [[0, 1, 2], [0, 1, 2]] if node == 1000 else [[1, 2], [0, 1, 2]]
    assert [e["reported"] for e in rounds_of(folder)] == [[0, 1, 2], [1, 2], *later]
    assert [e["left_out"] for e in rounds_of(folder)] == [[]] * 4


def test_a_late_site_joins_with_the_next_number(home: Any, tmp_path: Path) -> None:
    """Ada comes after the first round: asked in the second, drawn from the third on.

    The first sites are numbered by their names; ada, first of all by name, is the last by number.
    """
    sites, folder = workers(home[0] / "data"), RunFolder(tmp_path / "run")
    post = Memory(sites)
    post.offline = {1000}

    settings = settings_of(
        home, "run.method=spherefed", "federation.cohort=", "federation.participation=1.0"
    )
    terms = replace(TERMS, sites=2)
    observe = over_rounds(after_0=post.offline.clear, after_1=stop)
    with pytest.raises(KeyboardInterrupt):
        server.start(settings, folder, observe, post, terms)
    assert roster(folder) == {"ben": (0, 0), "cy": (1, 0)}
    found = server.resume(folder, nobody, post, terms)
    assert [e["reported"] for e in rounds_of(folder)] == [[0, 1], [0, 1], [0, 1, 2]]
    assert roster(folder) == {"ben": (0, 0), "cy": (1, 0), "ada": (2, 2)}
    assert found["clients_lost"] == 0
    # A stage for everyone reaches it, too.
    assert {n for n, p in post.log if p.words.get("stage") == "calibrate"} == {1000, 1001, 1002}


def test_a_late_site_goes_on_after_the_server_was_killed(home: Any, tmp_path: Path) -> None:
    """The bits of a run that was not cut short, though the roster grew in between."""
    settings = settings_of(home, "federation.cohort=", "run.rounds=4", "run.method=fedcurv")
    terms, results = replace(TERMS, sites=2), []

    for killed in (False, True):
        post, folder = Memory(workers(home[0] / "data")), RunFolder(tmp_path / str(killed))
        post.offline = {1000}
        changes = {"after_0": post.offline.clear} | ({"after_2": stop} if killed else {})
        with suppress(KeyboardInterrupt):
            results.append(server.start(settings, folder, over_rounds(**changes), post, terms))
        if killed:
            again = Memory(workers(home[0] / "data"), seed=3)
            results.append(server.resume(folder, nobody, again, terms))
        assert roster(folder)["ada"] == (2, 2)
    assert results[0]["state_sha256"] == results[1]["state_sha256"]


def test_how_models_are_averaged_is_no_business_of_a_site(home: Any) -> None:
    """A robust rule needs three clients a round; at a site there is one."""
    worker = workers(home[0] / "data")["ben"]
    tree = offered(settings_of(home, "federation.robust=agreement"))
    words = about(home, settings=tree, id="2" * 32)
    assert worker.answer(Parcel("enrol", {"run": words})).kind == "reply"


def test_a_late_site_that_does_not_fit_is_left_out(home: Any, tmp_path: Path) -> None:
    """At ada dog is not annotated; the run began without unknown labels."""
    sites, folder = workers(home[0] / "data"), RunFolder(tmp_path / "run")
    lines = 'name = "ada"\nclasses = ["cat", "dog", "tree"]\nannotated = ["cat", "tree"]'
    sites["ada"] = Worker(load_site(site_file(home[0] / "data", "ada", site=lines)))
    post = Memory(sites)
    post.offline = {1000}
    observe = over_rounds(after_0=post.offline.clear)
    server.start(settings_of(home), folder, observe, post, replace(TERMS, sites=2))
    assert set(roster(folder)) == {"ben", "cy"}


def test_a_round_waits_for_the_least_number_of_sites(home: Any, tmp_path: Path) -> None:
    post, folder = Memory(workers(home[0] / "data")), RunFolder(tmp_path / "run")
    observe = over_rounds(after_0=lambda: post.offline.update((1000, 1002)))
    terms = replace(TERMS, least=2, wait_s=0.2)
    with pytest.raises(ClientLimitError, match=r"1 of the 2 .* away: ada, cy.* after 1 rounds is"):
        server.start(settings_of(home), folder, observe, post, terms)
    post.offline = {1002}
    results = server.resume(folder, nobody, post, terms)
    assert results["status"] == "completed"
    assert [e["reported"] for e in rounds_of(folder)][1:] == [[0, 1], [0, 1]]


# -- refused before round 0 -----------------------------------------------------------------------


def refused(home: Any, tmp_path: Path, post: Memory, *changes: str) -> str:
    folder = RunFolder(tmp_path / "refused")
    with pytest.raises(ClientLimitError) as caught:
        server.start(settings_of(home, *changes), folder, nobody, post, TERMS)
    assert not folder.path.exists()
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"policy": 'methods = ["fedavg"]'}, "does not take part in method 'fedharmony'"),
        ({"policy": "statistics = []"}, "sends the statistic 'correlation'"),
        ({"policy": 'statistics = "all"\nfewest_images = 13'}, "has 12 training images"),
        ({"site": 'name = "ada"\nclasses = ["cat", "tree", "dog"]'}, "order is another one"),
        ({"site": 'name = "ada"\nclasses = ["cat", "dog", "tree", "bird"]'}, "['bird'] which the"),
        ({"data": 'name = "table"\npath = "."\nimage_size = 8'}, "images of shape [3, 16, 16]"),
        ({"site": 'name = "eve"\nclasses = ["cat", "dog", "tree"]'}, "calls itself 'eve'"),
    ],
)
def test_a_site_refuses_what_its_settings_do_not_allow(
    home: Any, tmp_path: Path, changes: dict[str, str], reason: str
) -> None:
    sites = workers(home[0] / "data")
    sites["ada"] = Worker(load_site(site_file(home[0] / "data", "ada", **changes)))
    said = refused(home, tmp_path, Memory(sites), "run.method=fedharmony")
    assert "site ada" in said
    assert reason in said
    assert "2 of the 3 sites" in said


def test_data_that_changed_since_enrolment_are_refused(home: Any, tmp_path: Path) -> None:
    sites, folder = workers(home[0] / "data"), RunFolder(tmp_path / "run")

    def observe(event: dict[str, Any]) -> None:
        if event["event"] == "evaluate":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        server.start(settings_of(home), folder, observe, Memory(sites), TERMS)
    ada = sites["ada"]
    labels = 1 - ada.data.train.labels
    changed = replace(ada.data, train=replace(ada.data.train, labels=labels))
    sites["ada"] = Worker(ada.settings, changed)
    with pytest.raises(ClientLimitError, match=r"site ada: the data .* have changed.*labels"):
        server.resume(folder, nobody, Memory(sites), TERMS)


def about(home: Any, **changes: Any) -> dict[str, Any]:
    words = {"id": "0" * 32, "settings": offered(settings_of(home)), "shape": [3, 16, 16]}
    return {**words, "classes": list(CLASSES), **changes}


@pytest.mark.parametrize(
    ("section", "values", "reason"),
    [
        ("run", {"plugins": ["/tmp/evil.py"]}, "name plug-ins"),
        ("data", {"name": "table", "path": "/etc"}, "'data', which a server does not decide"),
        ("engine", {"device": "cuda"}, "'engine', which a server does not decide"),
        ("model", {"weights": "/etc/passwd"}, "the file '/etc/passwd'"),
        ("model", {"weights": "hub.safetensors"}, "the file 'hub.safetensors'"),
        ("federation", {"central": True}, "train in one place"),
        ("train", {"lrr": 1.0}, "Unknown setting train.lrr"),
    ],
)
def test_settings_cannot_name_code_or_files(
    home: Any, section: str, values: dict[str, Any], reason: str
) -> None:
    worker = workers(home[0] / "data")["ben"]
    tree = offered(settings_of(home))
    tree[section] = {**tree.get(section, {}), **values}
    answer = worker.answer(Parcel("enrol", {"run": about(home, settings=tree)}))
    assert answer.kind == "refused"
    assert reason in answer.reason


def test_files_are_found_by_the_name_that_the_site_gives_them(home: Any, tmp_path: Path) -> None:
    weights = tmp_path / "own.safetensors"
    weights.write_bytes(b"")
    settings = offered(settings_of(home, f"model.weights={weights}"))
    assert settings["model"]["weights"] == "own.safetensors"
    here = {"own.safetensors": "/somewhere/else.safetensors"}
    found = accepted(settings, {}, here)
    assert found.tree()["model"]["weights"] == "/somewhere/else.safetensors"


def test_nonsense_is_refused_and_the_worker_lives(home: Any) -> None:
    worker = workers(home[0] / "data")["ben"]
    run_words = about(home, id="1" * 32, client=1, unknown=False)
    run_words["frozen"] = digest(Record({"frozen": {}}))
    asked = {"run": run_words, "stage": "update", "round": 0, "heard": -1, "scalars": {}}
    assert "not enrolled" in worker.answer(Parcel("stage", asked)).reason
    assert worker.answer(Parcel("enrol", {"run": run_words})).kind == "reply"
    for changes, reason in (
        ({"stage": "nonsense"}, "no stage 'nonsense'"),
        ({"round": 99}, "no round 100"),
        ({"round": "first"}, "no whole number"),
        ({"run": 3}, "says nothing of 'run'"),
        ({"run": {**run_words, "client": -1}}, "no client -1"),
        ({"run": {**run_words, "frozen": "other"}}, "frozen part"),
        ({"run": {**run_words, "id": "../../etc"}}, "does not name a run"),
    ):
        answer = worker.answer(Parcel("stage", {**asked, **changes}))
        assert (answer.kind, reason in answer.reason) == ("refused", True), answer.reason
    assert worker.answer(Parcel("stage", asked)).kind == "failed"  # no model in the message
    assert worker.answer(Parcel("status")).words["images"] == 18
    assert "not asked for" in worker.answer(Parcel("reply")).reason


# -- evaluation at sites --------------------------------------------------------------------------

AT_SITES = ("data.name=sites", "data.path=", "data.table=", "federation.cohort=3")


def measured_at_sites(home: Any, folder: Path, detail: str, *changes: str) -> tuple[Any, Any, Any]:
    """A run without test images at the server, beside the same run with all of them."""
    policy = f'statistics = "all"\nevaluation = "{detail}"'
    post = Memory(workers(home[0] / "data", policy=policy))
    settings = settings_of(home, *AT_SITES, *changes)
    found = server.start(settings, RunFolder(folder / "sites"), nobody, post, TERMS)
    settings = settings_of(home, "federation.cohort=3", *changes)
    expected = run.start(settings, RunFolder(folder / "here"), nobody)
    return found, expected, post


def curve(folder: Path) -> dict[int, float]:
    events = RunFolder(folder).read_events()
    return {e["round"]: e["metrics"]["mAP"] for e in events if e["event"] == "evaluate"}


@pytest.mark.parametrize("method", ["fedharmony", "spherefed", "fedrdn"])
def test_models_measured_at_sites_have_the_metrics_of_the_pooled_test_set(
    home: Any, tmp_path: Path, method: str
) -> None:
    """With sorted scores: the eight numbers, structure, every site's row, every round's curve.

    SphereFed fits its frozen classifier after the last round, and FedRDN normalises by statistics
    of all sites: both reach the sites with the model.
    """
    found, expected, post = measured_at_sites(home, tmp_path, "scores", f"run.method={method}")
    assert found["state_sha256"] == expected["state_sha256"]
    assert found["metrics"] == pytest.approx(expected["metrics"], abs=1e-6)
    assert found["structure"] == pytest.approx(expected["structure"], abs=1e-5, nan_ok=True)
    assert found["baselines"]["all positive"] == expected["baselines"]["all positive"]
    assert [row["positives"] for row in found["per_label"]] == [
        row["positives"] for row in expected["per_label"]
    ]
    rows = {row["user"]: row for row in found["per_user"]["each"]}
    assert {name: row["images"] for name, row in rows.items()} == {"ada": 4, "ben": 4, "cy": 4}
    for row in expected["per_user"]["each"]:
        assert rows[row["user"]]["O-mAP"] == pytest.approx(row["O-mAP"], abs=1e-6)
    assert curve(tmp_path / "sites") == pytest.approx(curve(tmp_path / "here"), abs=1e-6)
    assert (found["measured_at"], found["test_images"]) == (["ada", "ben", "cy"], 12)
    assert load_run(tmp_path / "sites").start["test_images"] == 12
    # No exchange more in a round, and the model travels once; one exchange after the last.
    trained = [p for _, p in post.log if p.kind == "stage" and p.words["stage"] == "update"]
    assert [p.words["measured"]["same"][0] for p in trained if "measured" in p.words] == [
        "params"
    ] * 6
    assert [p.kind for _, p in post.log].count("measure") == 3


def test_counts_of_scores_say_how_far_average_precision_may_be_off(
    home: Any, tmp_path: Path
) -> None:
    found, expected, _ = measured_at_sites(home, tmp_path, "histograms")
    for name in ("CP", "CR", "CF1", "OP", "OR", "OF1"):
        assert found["metrics"][name] == pytest.approx(expected["metrics"][name], abs=1e-9)
    low, high = found["mAP_between"]
    assert low <= expected["metrics"]["mAP"] <= high
    assert high - low < 0.1
    assert not (tmp_path / "sites" / "scores.safetensors").exists()


def test_sites_that_measure_nothing_are_left_out(home: Any, tmp_path: Path) -> None:
    """Ada's policy forbids it, ben answers nonsense; the curve goes on with cy alone."""
    sites = workers(home[0] / "data")
    policy = 'statistics = "all"\nevaluation = "none"'
    sites["ada"] = Worker(load_site(site_file(home[0] / "data", "ada", policy=policy)))
    post, folder = Memory(sites), RunFolder(tmp_path / "run")
    ben = post.sites[1001][1]

    def nonsense(question: Parcel) -> Parcel:
        found = ben.answer(question)
        if "own" not in found.parts:
            return found
        groups = from_bytes(found.parts["own"]).groups
        kept = {name: group for name, group in groups.items() if name != "measured"}
        return Parcel(found.kind, found.words, {"own": to_bytes(Record(kept))})

    post.instead[1001] = nonsense
    results = server.start(settings_of(home, *AT_SITES), folder, nobody, post, TERMS)
    assert results["measured_at"] == ["cy"]
    assert results["clients_lost"] == 0
    assert len(curve(folder.path)) == 3
    post.offline = {1002}
    out = RunFolder(tmp_path / "none")
    two = settings_of(home, *AT_SITES, "federation.cohort=2")
    with pytest.raises(ClientLimitError, match=r"No site measured .*: this site tells nothing"):
        server.start(two, out, nobody, post, replace(TERMS, sites=2))


def test_what_sites_cannot_measure_is_refused_before_round_0(home: Any, tmp_path: Path) -> None:
    post, folder = Memory({}), RunFolder(tmp_path / "run")
    for change, reason in (("metrics.topk=3", "whole images"), ("data.classes=[]", "data.classes")):
        with pytest.raises(ConfigError, match=reason):
            server.start(settings_of(home, *AT_SITES, change), folder, nobody, post, TERMS)
    with pytest.raises(DataError, match="flower run"):
        run.start(settings_of(home, *AT_SITES), folder, nobody)
