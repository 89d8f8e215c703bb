"""What leaves a client, as the command says it."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

from fedharmony.cli import app
from fedharmony.experiments.disclosure import Item, disclosure
from fedharmony.experiments.settings import load_settings

SMALL = ["data.train=120", "data.test=20", "model.width=16", "model.depth=1", "engine.threads=1"]
SMALL += ["split.clients=8", "run.rounds=5"]
SUMS = ["federation.server_sees=sums"]


def found(*changes: str) -> dict[tuple[str, str], Item]:
    items = disclosure(load_settings("demo", [*SMALL, *changes])).items
    return {(item.stage, item.name): item for item in items}


def test_replies_are_listed_with_sizes_and_ranges() -> None:
    """20 labels: 210 numbers of R, 20 of p̂, in float32."""
    items = found("run.method=fedharmony", "federation.head_start=closed_form")
    upper, marginal = items["update", "correlation/upper"], items["update", "correlation/marginal"]
    assert (upper.numbers, upper.nbytes, upper.bound) == (210, 840, "in [-1, 1]")
    assert (marginal.numbers, marginal.nbytes, marginal.bound) == (20, 80, "in [0, 1]")
    assert {upper.when, marginal.when} == {"every round"}
    assert ("update", "number of images") in items
    head = items["head", "head_sums/gram"]  # 17 · 18 / 2 numbers in float64
    assert (head.numbers, head.nbytes, head.when) == (153, 1224, "first round")
    assert head.asked == "all clients"
    assert not any(item.summed for item in items.values())


def test_sums_are_listed_as_such_and_hold_no_matrix() -> None:
    items = found("run.method=fedharmony", "methods.fedharmony.temperature=1", *SUMS)
    assert all(item.summed for item in items.values())
    assert ("update", "correlation/upper") not in items
    assert ("update", "number of images") not in items
    assert items["update", "correlation/sum"].nbytes == 8 * 210
    (models,) = [item for (_, name), item in items.items() if name.startswith("quality_params")]
    assert models.when == "from round 2"


def test_stages_before_and_after_the_rounds_are_listed() -> None:
    items = found("run.method=spherefed", "methods.spherefed.projection=24")
    assert items["count", "counts/labels"].when == "first round"
    assert items["calibrate", "sums/a"].when == "last round"


def test_noise_is_listed_with_its_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("dp_accounting")
    own = ["federation.average=uniform", "federation.sampling=poisson", "run.method=fedharmony"]
    own += ["methods.fedharmony.quality=false", "privacy.noise_multiplier=2", "privacy.clip=0.5"]
    items = found(*SUMS, *own)
    assert items["update", "correlation/sum"].bound == "length ≤ 10, sum + noise 28.3"  # 2 · 10 √2
    (update,) = [item for (_, name), item in items.items() if name.startswith("params")]
    assert update.bound == "length ≤ 0.5, sum + noise 1.41"
    assert not any(name.startswith("numbers") for _, name in items)
    monkeypatch.setenv("COLUMNS", "160")
    done = CliRunner().invoke(app, ["privacy", "demo", *SMALL, *SUMS, *own])
    assert done.exit_code == 0
    assert "length ≤ 0.5, sum + noise 1.41" in done.output
    assert "ε = " in done.output
    done = CliRunner().invoke(app, ["privacy", "demo", *SMALL, "run.method=fedavg"])
    assert "each client's" in done.output
    assert "ε = ∞" in done.output
