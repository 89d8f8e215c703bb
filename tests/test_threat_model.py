"""The page of promises, and attacks on those that no other module attacks."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from fedharmony.experiments import run as runs
from fedharmony.experiments.export import export
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.experiments.trained import load_model
from fedharmony.flower import server
from fedharmony.methods.base import methods
from fedharmony.metrics import trivial_baselines
from fedharmony.report.load import load
from fedharmony.report.page import write_report
from fedharmony.report.remarks import remarks
from fedharmony.site.parcel import Parcel
from fedharmony.site.records import record_of
from sites import SIZES, Memory, workers
from test_sites import TERMS, home, nobody, settings_of  # noqa: F401 (a fixture)

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "threat_model.md").read_text()


def test_every_promise_names_tests_that_exist() -> None:
    there = "".join(path.read_text() for path in ROOT.glob("tests/test_*.py"))
    rows = re.findall(r"^\| (?!---|asset)(.*) \|$", PAGE, re.MULTILINE)
    assert len(rows) > 15
    for asset, _, promise, named in (row.split(" | ") for row in rows):
        tests = re.findall(r"`(test_\w+)`", named)
        assert tests or promise.startswith("none"), asset
        assert [name for name in tests if f"def {name}(" not in there] == [], asset


# -- what is given away of a private run -----------------------------------------------------------

#: Images of each client, and how many of them carry each label: rare numbers.
HELD = {1013: (37, 409, 611), 1019: (251, 53, 787), 1021: (307, 691, 71), 1031: (89, 433, 829)}
SMALL = ["data.name=features", "split.name=natural", "split.max_images=2000", "split.clients="]
SMALL += ["run.method=fedavg", "run.rounds=2", "model.name=linear", "run.seed=918273645"]
PRIVATE = ["federation.server_sees=sums", "federation.average=uniform", "federation.cohort=3"]
PRIVATE += ["federation.sampling=poisson", "privacy.noise_multiplier=1"]


def trained(folder: Path, *changes: str) -> Path:
    """A run over vectors of four clients, with its report; exported to ``folder / "out"``."""
    rng, file, run = np.random.default_rng(0), folder / "x.npz", RunFolder(folder / "run")
    labels = [np.arange(size)[:, None] < np.array(counts) for size, counts in HELD.items()]
    Y = np.concatenate([*labels, rng.random((50, 3)) < 0.5]).astype(int)
    users = np.repeat(list("abcde"), [*HELD, 50])
    split = np.where(users == "e", "test", "train")
    np.savez(file, X=rng.normal(size=(len(Y), 4)), Y=Y, users=users, split=split)
    settings = [*SMALL, "engine.threads=1", f"data.path='{file}'", *changes]
    runs.start(load_settings("demo", settings), run, nobody)
    export(load_model(run, "cpu"), folder / "out")
    return write_report(run.path).parent


def numbers_of(file: Path) -> np.ndarray:
    """Every number that stands in a file."""
    if file.suffix == ".safetensors":
        return np.concatenate([np.float64(tensor).ravel() for tensor in load_file(file).values()])
    found = re.findall(r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?", file.read_text())
    return np.array([float(number.replace(",", "")) for number in found])


def test_exact_data_of_clients_are_in_no_file_that_is_given_away(tmp_path: Path) -> None:
    """Sizes, label shares, their sums, and hashes with which a guess of them can be checked."""
    pytest.importorskip("dp_accounting")
    run = trained(tmp_path, *PRIVATE)
    sizes, counts = np.array(list(HELD), float), np.array(list(HELD.values()), float)
    exact = [sizes, counts / sizes[:, None], counts.sum(0) / sizes.sum(), sizes.sum()]
    secret = np.concatenate([np.ravel(part) for part in exact])
    bound = json.loads((run / "binding.json").read_text())
    hashes = [sha.encode() for name, sha in bound.items() if len(sha) == 64 and "test" not in name]
    files = [file for place in (run, tmp_path / "out") for file in place.iterdir()]
    holding = {
        file.name
        for file in files
        if np.isclose(numbers_of(file)[:, None], secret, rtol=1e-6, atol=0).any()
        or any(sha in file.read_bytes() for sha in hashes)
    }
    told = re.findall(r"`(\S+)`", re.search(r"^Exact data of clients: (.*)\.$", PAGE, re.M)[1])
    assert holding == set(told)
    assert {"report.html", "README.md", "config.json"} <= {file.name for file in files} - holding
    of_test = trivial_baselines(load_file(run / "scores.safetensors")["labels"])["prevalence"]
    baselines = json.loads((run / "results.json").read_text())["baselines"]
    assert baselines["prevalence"] == pytest.approx(of_test.as_dict())


def test_card_and_report_say_what_was_promised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ε, δ, unit, the rounds that were done, who added noise; neither a seed nor a key."""
    real: Callable[..., dict[str, Any]] = runs.summarise
    block = {"epsilon": 7.996, "delta": 1e-5, "noise_multiplier": 2.0, "rounds": 1}
    more = {"unit": "one client", "noise_by": "server", "reproducible": True}
    told = {"rounds_done": 1, "privacy": {**block, **more}}
    monkeypatch.setattr(runs, "summarise", lambda *given: real(*given) | told)
    run = trained(tmp_path, "privacy.clip=1.5")
    config = (run / "config.toml").read_text().replace("clip = 1.5", "noise_seed = 7654321")
    (run / "config.toml").write_text(config)
    command = {"command": "fedharmony run demo privacy.noise_seed=7654321"}
    (run / "environment.json").write_text(json.dumps(command))
    card, page = (tmp_path / "out" / "README.md").read_text(), write_report(run).read_text()
    said = ["ε = 8.00, δ = 1e-05", "unit of protection: one client", "rounds done: 1"]
    said += ["noise added by the server", "not private: its noise can be reproduced"]
    for text in (card, page, "\n".join(remarks(load(run)))):
        assert [words for words in said if words not in text] == []
        assert "7654321" not in text
    assert "in 1 rounds, as a `linear`" in card
    assert "918273645" not in card + (tmp_path / "out" / "config.json").read_text()
    assert "This run is not private" in page
    results = json.loads((run / "results.json").read_text())
    for privacy, warned in ((block, True), ({**block, "reproducible": False}, False)):
        # Earlier runs do not say whether their noise can be reproduced: it can.
        (run / "results.json").write_text(json.dumps(results | {"privacy": privacy}))
        assert ("This run is not private" in write_report(run).read_text()) == warned
        assert ("not private" in "".join(remarks(load(run)))) == warned


# -- what another site sees ------------------------------------------------------------------------


@pytest.mark.parametrize("method", methods.names())
def test_a_site_is_sent_no_reply_of_another(home: Any, tmp_path: Path, method: str) -> None:  # noqa: F811
    """Nor its name, nor what it has. FedRDN alone sends everybody's means to everybody."""
    post, replies = Memory(workers(home[0] / "data")), list[torch.Tensor]()

    def listen(node: int) -> Callable[[Parcel], Parcel]:
        def answer(question: Parcel) -> Parcel:
            found = post.sites[node][1].answer(question)
            replies.extend(t.flatten() for _, t in record_of(found.parts, {}).tensors())
            return found

        return answer

    post.instead = {node: listen(node) for node in (1001, 1002)}
    settings = settings_of(home, f"run.method={method}", "federation.cohort=3")
    server.start(settings, RunFolder(tmp_path / "run"), nobody, post, TERMS)
    parcels = [parcel for node, parcel in post.log if node == 1000]
    words = json.dumps([parcel.words for parcel in parcels])
    assert not [name for name in SIZES if f'"{name}"' in words]
    keys = {"id", "settings", "classes", "shape", "client", "unknown", "frozen"}
    assert set().union(*(parcel.words["run"] for parcel in parcels)) == keys
    sent = [t for parcel in parcels for _, t in record_of(parcel.parts, {}).tensors()]
    exposed = any(
        bool((tensor.reshape(-1, len(reply)) == reply).all(1).any())
        for reply in replies
        for tensor in sent
        if len(reply) > 2 and len(reply.unique()) > 1 and tensor.numel() % len(reply) == 0
    )
    assert exposed == (method == "fedrdn")
