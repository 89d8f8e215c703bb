"""What differential privacy of clients costs: mAP over ε.

    python benchmarks/privacy.py [--curves demo,features-100,features-1000] [--seeds 0,1,2]
        [--epsilons 1,10,...] [section.key=value ...]

====================  ==============================================================================
demo                  the demo's model of 114,900 parameters, from scratch, 20 clients (2,000
                      images, 8 rounds of 3 epochs)
features-100          logistic regression, 210 parameters, on 8,000 feature vectors (scikit-learn's
                      ``make_multilabel_classification``), 100 clients, 16 rounds
features-1000         the same with 1,000 clients of 8 vectors each
voc                   ViT-Ti/16 from ImageNet, 5.5 million parameters, closed-form head, VOC 2012 on
                      500 clients, 4 rounds of one epoch
voc-head              the last layer of that ViT alone, 3,860 parameters, on what the backbone gives
                      as it is; 1,000 clients, 16 rounds of one epoch with half of them
voc-head-100          the same with 100 clients
voc-head-fedharmony   as voc-head with FedHarmony, whose label correlations get noise, too
voc-head-closed-form  the same layer solved from one noisy sum over 1,000 clients, not trained
====================  ==============================================================================

Curves of VOC 2012 need data.path and model.weights. Every curve also has a run without noise.
Prints a table, and writes results/privacy.json and results/privacy.svg; ``--curves=`` measures
nothing, and makes table and figure of the rows that are there.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import make_multilabel_classification

from embedding import embedded
from fedharmony.data.base import DataSet
from fedharmony.engine.memory import ClientMemory
from fedharmony.experiments.build import assemble
from fedharmony.experiments.evaluate import evaluate
from fedharmony.experiments.machine import switch_torch
from fedharmony.experiments.settings import load_settings

PRIVATE = ["run.method=fedavg", "federation.server_sees=sums", "federation.average=uniform"]
PRIVATE += ["federation.sampling=poisson", "engine.threads=1"]
VECTORS = ["model.name=linear", "split.name=iid", "run.rounds=16", "train.lr=0.02"]
VECTORS += ["federation.participation=0.5", "train.batch_size=8", "train.epochs=4"]
CURVES = {
    "demo": ["data.train=2000", "run.rounds=8", "train.epochs=3"],
    "features-100": [*VECTORS, "split.clients=100"],
    "features-1000": [*VECTORS, "split.clients=1000"],
    "voc": [
        *("split.clients=500", "federation.cohort=", "federation.participation=0.2"),
        *("federation.head_start=closed_form", "run.rounds=4", "train.epochs=1"),
        *("federation.head_scale=25", "privacy.clip_sums=2"),
    ],
}
# Of the last layer alone. Features are not standardised: their statistics would tell of clients.
# Rate, rounds and bounds were chosen at ε = 3 (closed form: 10) on a fifth of the training images.
HEAD = ["model.name=linear", "model.mean=[0.0]", "model.std=[1.0]", "split.gamma=0.1"]
TRAINED = [*HEAD, "train.optimiser=sgd", "train.lr=1", "train.epochs=1", "run.rounds=16"]
TRAINED += ["federation.participation=0.5", "privacy.clip=1"]
CURVES |= {
    "voc-head": [*TRAINED, "split.clients=1000"],
    "voc-head-100": [*TRAINED, "split.clients=100"],
    "voc-head-fedharmony": [
        *(*TRAINED, "split.clients=1000", "privacy.clip_sums=3"),
        *("run.method=fedharmony", "methods.fedharmony.quality=false"),
    ],
    # A run has a round of training at least: here one of 3 clients, with steps of next to nothing.
    "voc-head-closed-form": [
        *(*HEAD, "split.clients=1000", "federation.head_start=closed_form"),
        *("federation.head_scale=25", "privacy.clip_sums=2"),
        *("run.rounds=1", "federation.cohort=3", "train.lr=1e-9", "privacy.clip=1e-9"),
    ],
}
CONFIGS = {"demo": "demo", "voc": "voc2012_tiny"}
WORDS = {
    "demo": "demo, 20 clients",
    "features-100": "features, 100 clients",
    "features-1000": "features, 1,000 clients",
    "voc": "whole ViT-Ti, 500 clients",
    "voc-head": "FedAvg, 1,000 clients",
    "voc-head-100": "FedAvg, 100 clients",
    "voc-head-fedharmony": "FedHarmony, 1,000 clients",
    "voc-head-closed-form": "closed form, 1,000 clients",
}
#: Of a panel of the figure: size, edges and colours that can be told apart without colour vision.
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 340, 52, 180, 28, 44
COLOURS = {
    "demo": "#0072b2",
    "features-100": "#d55e00",
    "features-1000": "#009e73",
    "voc": "#cc79a7",
    "voc-head": "#0072b2",
    "voc-head-100": "#56b4e9",
    "voc-head-fedharmony": "#d55e00",
    "voc-head-closed-form": "#009e73",
}


def measured(
    config: str, changes: Sequence[str], seeds: Sequence[int], data: dict[str, DataSet]
) -> dict[str, Any]:
    """Mean mAP over seeds, its deviation, and what it cost."""
    found, spent = [], {}
    for seed in seeds:
        settings = load_settings(config, [*PRIVATE, *changes]).with_run(seed=seed)
        switch_torch(settings.engine)
        key = str(settings.data.tree())
        assembly = assemble(settings, data=data.get(key))
        data[key] = assembly.loaded
        loop, state = assembly.federation(ClientMemory()), assembly.initial_state()
        state = loop.run(state, 0, lambda event: None, lambda round, state: None)
        found.append(evaluate(assembly, state).metrics.as_dict()["mAP"])
        if (budget := assembly.blueprint.budget) is not None:
            spent = budget.spent(assembly.blueprint.rounds)
    deviation = statistics.stdev(found) if len(found) > 1 else None
    return {"mAP": statistics.fmean(found), "deviation": deviation, "seeds": len(found), **spent}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """All curves as Markdown: mAP, and its deviation where there are several seeds."""
    found: dict[str, dict[float, str]] = {}
    for row in rows:
        deviation = f" ± {100 * row['deviation']:.1f}" if row["deviation"] is not None else ""
        epsilon = float(f"{row.get('epsilon', math.inf):.2g}")
        found.setdefault(row["curve"], {})[epsilon] = f"{100 * row['mAP']:.1f}{deviation}"
    columns = sorted({epsilon for curve in found.values() for epsilon in curve})
    lines = [["ε", *(f"{e:,g}" if e < math.inf else "∞" for e in columns)]]
    lines += [["---", *("--:" for _ in columns)]]
    lines += [[curve, *(own.get(e, "") for e in columns)] for curve, own in found.items()]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def figure(rows: Sequence[dict[str, Any]]) -> str:
    """The curves as SVG: one panel for VOC 2012 and one for the others, as far as there are any."""
    real = [row for row in rows if row["curve"].startswith("voc")]
    made = [row for row in rows if not row["curve"].startswith("voc")]
    titles = ((real, "VOC 2012, last layer or whole ViT-Ti"), (made, "Made-up data"))
    panels = [panel(own, title) for own, title in titles if own]
    height = HEIGHT * len(panels)
    head = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}"'
    style = 'font-family="sans-serif" font-size="12" fill="#333"'
    body = "\n".join(
        f'<g transform="translate(0 {i * HEIGHT})">\n{own}\n</g>' for i, own in enumerate(panels)
    )
    return f'<svg {head} {style}>\n<rect width="100%" height="100%" fill="#fff"/>\n{body}\n</svg>\n'


def panel(rows: Sequence[dict[str, Any]], title: str) -> str:
    """Curves of mAP over ε, with a dashed line for each run without noise."""
    noisy = [row for row in rows if "epsilon" in row]
    low, high = (f(math.log10(row["epsilon"]) for row in noisy) for f in (min, max))
    top = max(10, math.ceil(max(row["mAP"] for row in rows) * 10) * 10)

    def x(epsilon: float) -> float:
        return LEFT + (math.log10(epsilon) - low) / (high - low or 1) * (WIDTH - LEFT - RIGHT)

    def y(share: float) -> float:
        return HEIGHT - BOTTOM - 100 * share / top * (HEIGHT - TOP - BOTTOM)

    parts = []
    for value in range(0, top + 1, 20):
        at = y(value / 100)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{value}</text>')
    for power in range(math.ceil(low - 0.01), math.floor(high + 0.01) + 1):
        at = f'x="{x(10.0**power):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle"'
        label = f'10<tspan dy="-5" font-size="9">{power}</tspan>' if power > 3 else f"{10**power}"
        parts.append(f"<text {at}>{label}</text>")
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 8}" text-anchor="middle">ε (δ = 10⁻⁵)</text>')
    parts.append(f'<text x="{LEFT}" y="{TOP - 10}" text-anchor="middle">mAP</text>')
    parts.append(f'<text x="{middle}" y="{TOP - 10}" text-anchor="middle">{title}</text>')
    placed: list[float] = []
    for curve in dict.fromkeys(row["curve"] for row in rows):
        own, colour = [row for row in rows if row["curve"] == curve], COLOURS[curve]
        points = sorted((x(row["epsilon"]), y(row["mAP"])) for row in own if "epsilon" in row)
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{colour}"/>' for a, b in points]
        (free,) = [y(row["mAP"]) for row in own if "epsilon" not in row]
        across = f"M{LEFT} {free:.1f}H{WIDTH - RIGHT}"
        parts.append(f'<path d="{across}" stroke="{colour}" stroke-dasharray="4 3"/>')
        at = free + 4
        while any(abs(at - other) < 14 for other in placed):
            at += 14
        placed.append(at)
        beside = f'x="{WIDTH - RIGHT + 8}" y="{at:.1f}" fill="{colour}"'
        parts.append(f"<text {beside}>{WORDS[curve]}</text>")
    return "\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--curves", default="demo,features-100,features-1000")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--epsilons", default="1,3,10,30,100,1000,10000,100000")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    parser.add_argument("changes", nargs="*")
    options = parser.parse_args()
    seeds = [int(seed) for seed in options.seeds.split(",")]
    options.out.mkdir(parents=True, exist_ok=True)
    file = options.out / "privacy.json"
    before = json.loads(file.read_text()) if file.exists() else []
    wanted = [curve for curve in options.curves.split(",") if curve]
    rows = [row for row in before if row["curve"] not in wanted]
    data: dict[str, DataSet] = {}
    vectors = Path(tempfile.mkdtemp()) / "vectors.npz"
    x, y = make_multilabel_classification(
        10_000, n_features=20, n_classes=10, n_labels=3, random_state=0
    )
    np.savez(vectors, X=x.astype(np.float32), Y=y.astype(np.uint8))
    for curve in wanted:
        config, own, changes = CONFIGS.get(curve, "features"), CURVES[curve], options.changes
        if curve.startswith("voc-head"):
            images = [change for change in changes if change.startswith(("data.", "model."))]
            changes = [change for change in changes if change not in images]
            own = [f"data.path={embedded('voc2012_tiny', images)}", *own]
        elif config == "features":
            own = [f"data.path={vectors}", *own]
        for epsilon in ["", *options.epsilons.split(",")]:
            noise = [f"privacy.epsilon={epsilon}"] if epsilon else []
            row = measured(config, [*own, *noise, *changes], seeds, data)
            rows.append({"curve": curve, **row})
            print(f"{curve}, ε = {epsilon or '∞'}: mAP {100 * row['mAP']:.1f}", row, flush=True)
            file.write_text(json.dumps(rows, indent=1) + "\n")
    print(table(rows))
    (options.out / "privacy.svg").write_text(figure(rows))


if __name__ == "__main__":
    main()
