"""Sites in this process, behind a post in memory: the bits of the simulator, and what fails."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedharmony.engine.checkpoint import digest, from_bytes, to_bytes
from fedharmony.errors import ClientLimitError
from fedharmony.experiments import run
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.flower import server, transport
from fedharmony.flower.server import Terms
from fedharmony.methods.base import methods
from fedharmony.site.parcel import Parcel
from fedharmony.site.policy import accepted, offered
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
        patch.setattr(transport, "POLL_S", 0.0)
        patch.setattr(transport, "AGAIN_S", 0.0)
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


@pytest.mark.parametrize(
    "more",
    [
        ["run.method=fedavg"],
        ["run.method=fedharmony", "methods.fedharmony.temperature=1"],
        ["run.method=fedavg", "federation.average=uniform", "privacy.noise_multiplier=0.5"],
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


def test_a_site_forgets_what_the_server_never_heard(home: Any, tmp_path: Path) -> None:
    """One site trains in round 1 and its answer is lost: it has not taken part, here as there."""
    changes = ["run.method=fedcurv", "federation.cohort=3", "methods.fedcurv.policy=memory"]
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


# -- failures are named ---------------------------------------------------------------------------


def broken(found: Parcel) -> Parcel:
    parts = {**found.parts, "params": b"no tensors"}
    return Parcel(found.kind, found.words, parts)


def unknown_numbers(found: Parcel) -> Parcel:
    (key, data), *rest = found.parts.items()
    record = from_bytes(data)
    spoilt = {n: t * torch.nan for n, t in record.groups[key].items()}
    return Parcel(found.kind, found.words, {key: to_bytes(Record({key: spoilt})), **dict(rest)})


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (lambda found: "Flower says: gone (5)", "site ada: Flower says: gone"),
        (lambda found: Parcel("failed", {"reason": "disk full"}), "site ada: disk full"),
        (lambda found: Parcel("refused", {"reason": "no"}), "site ada: no"),
        (lambda found: Parcel("reply", {"examples": "many"}), "not of the form"),
        (broken, "is damaged"),
        (unknown_numbers, "not finite"),
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
    assert reason in rounds[1]["failures"][0]["reason"]


def test_a_silent_site_is_given_up_and_not_asked_while_it_owes(home: Any, tmp_path: Path) -> None:
    post, folder = Memory(workers(home[0] / "data")), RunFolder(tmp_path / "run")
    post.instead[1000] = lambda question: None if question.kind == "stage" else ada.answer(question)
    ada = post.sites[1000][1]
    terms = Terms(sites=3, wait_s=5.0, limit_s=1.5)
    server.start(settings_of(home, "federation.cohort=3"), folder, nobody, post, terms)
    reasons = [e["failures"][0]["reason"] for e in folder.read_events() if e["event"] == "round"]
    assert reasons[0] == "site ada: no answer within 1.5 seconds"
    assert reasons[1] == "site ada: it still works on an earlier message"


def test_a_site_that_is_away_comes_back_as_another_node(home: Any, tmp_path: Path) -> None:
    post, folder = Memory(workers(home[0] / "data"), registered=False), RunFolder(tmp_path / "run")

    def observe(event: dict[str, Any]) -> None:
        if event["event"] == "evaluate" and event["round"] == 0:
            post.offline.add(1000)
        if event["event"] == "evaluate" and event["round"] == 1:
            post.sites[2000] = post.sites[1000]

    server.start(settings_of(home, "federation.cohort=3"), folder, observe, post, TERMS)
    rounds = [e for e in folder.read_events() if e["event"] == "round"]
    assert [e["reported"] for e in rounds] == [[0, 1, 2], [1, 2], [0, 1, 2]]
    assert rounds[1]["failures"][0]["reason"] == "site ada: it is not online"


def test_a_model_is_packed_once_for_all_sites(home: Any, tmp_path: Path) -> None:
    post = Memory(workers(home[0] / "data"))
    settings = settings_of(home, "federation.cohort=3", "run.method=fedharmony")
    server.start(settings, RunFolder(tmp_path / "run"), nobody, post, TERMS)
    asked = [p for _, p in post.log if p.kind == "stage" and p.words["round"] == 2]
    assert len({id(p.parts["params"]) for p in asked}) == 1
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
    terms = Terms(sites=3, wait_s=0.0)
    with pytest.raises(ClientLimitError, match=r"1 of the 3 .* \(cy\): site ben: Flower says"):
        server.start(settings_of(home), RunFolder(tmp_path / "run"), nobody, post, terms)


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
    run_words = about(home, id="1" * 32, clients=3, client=1, unknown=False)
    run_words["frozen"] = digest(Record({"frozen": {}}))
    asked = {"run": run_words, "stage": "update", "round": 0, "heard": -1, "scalars": {}}
    assert "not enrolled" in worker.answer(Parcel("stage", asked)).reason
    assert worker.answer(Parcel("enrol", {"run": run_words})).kind == "reply"
    for changes, reason in (
        ({"stage": "nonsense"}, "no stage 'nonsense'"),
        ({"round": 99}, "no round 100"),
        ({"round": "first"}, "no whole number"),
        ({"run": 3}, "says nothing of 'run'"),
        ({"run": {**run_words, "client": 7}}, "no client 7 among 3"),
        ({"run": {**run_words, "frozen": "other"}}, "frozen part"),
        ({"run": {**run_words, "id": "../../etc"}}, "does not name a run"),
    ):
        answer = worker.answer(Parcel("stage", {**asked, **changes}))
        assert (answer.kind, reason in answer.reason) == ("refused", True), answer.reason
    assert worker.answer(Parcel("stage", asked)).kind == "failed"  # no model in the message
    assert worker.answer(Parcel("status")).words["images"] == 18
    assert "not asked for" in worker.answer(Parcel("reply")).reason
