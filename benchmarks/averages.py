"""Rules of averaging the global model, all on the same training.

Clients go on from the global model whatever is evaluated, so one run shows every rule. Evaluated on
images held out of the training clients (a fifth): the test set is not looked at.

    python benchmarks/averages.py [CONFIG] [section.key=value ...] [--seeds 0,1] [--every 4]
                                  [--rules 0,0.5,0.7,0.9,adaptive] [--name NAME]

Prints mAP and CF1 after every so many rounds, means over seeds, and the correlation of the model's
steps that "adaptive" reads (last seed); writes results/averages.json under the given name.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

import torch

from fedharmony.engine.memory import ClientMemory
from fedharmony.experiments.build import assemble
from fedharmony.experiments.evaluate import evaluate
from fedharmony.experiments.settings import Settings, load_settings
from fedharmony.server.server_average import ALONG, LENGTH, ServerAverage, watch
from fedharmony.types import Record

Curve = list[tuple[float, float]]


def rule_of(text: str) -> float | str:
    """A number, or the name of a rule."""
    return float(text) if text.replace(".", "").isdigit() else text


def curves(
    settings: Settings, rules: list[str], every: int
) -> tuple[dict[str, Curve], list[float | None]]:
    """MAP and CF1 of each rule, and ρ of each round."""
    assembly = assemble(settings)
    averages = {name: ServerAverage(rule_of(name)) for name in rules}
    start = assembly.initial_state()
    kept = dict.fromkeys(rules, start)
    found: dict[str, Curve] = {name: [] for name in rules}
    correlations: list[float | None] = []
    steps, last = start, [start]

    def after_round(round: int, state: Record) -> None:
        nonlocal steps
        before, last[0] = last[0], state
        steps = watch(before, state.replace(steps.groups | state.groups, steps.scalars))
        length = float(steps.scalars[LENGTH])
        correlations.append(float(steps.scalars[ALONG]) / length if length else None)
        for name, average in averages.items():
            own = kept[name]
            both = state.replace(own.groups | state.groups, own.scalars)
            kept[name] = average.add(before, both, round)
            if (round + 1) % every == 0 or round + 1 == settings.run.rounds:
                metrics = evaluate(assembly, average.shown(kept[name])).metrics.as_dict()
                found[name].append((float(metrics["mAP"] or 0), float(metrics["CF1"] or 0)))

    assembly.federation(ClientMemory()).run(start, 0, lambda event: None, after_round)
    return found, correlations


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("config", nargs="?", default="demo")
    parser.add_argument("changes", nargs="*")
    parser.add_argument("--seeds", default="0,1")
    parser.add_argument("--every", type=int, default=4)
    parser.add_argument("--rules", default="0,0.5,0.7,0.9,adaptive")
    parser.add_argument("--name")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    rules, seeds = options.rules.split(","), [int(s) for s in options.seeds.split(",")]
    fixed = ["split.holdout=0.2", "run.method=fedavg", "federation.server_average=0"]
    base = load_settings(options.config, [*fixed, *options.changes])
    results, correlations = [], []
    for seed in seeds:
        found, correlations = curves(base.with_run(seed=seed), rules, options.every)
        results.append(found)
    rounds = list(range(options.every, base.run.rounds + 1, options.every))
    rounds += [base.run.rounds] if not rounds or rounds[-1] < base.run.rounds else []
    table = {
        name: [
            [100 * statistics.mean(r[name][i][metric] for r in results) for metric in (0, 1)]
            for i in range(len(rounds))
        ]
        for name in rules
    }
    print("| average | " + " | ".join(f"round {t}" for t in rounds) + " |")
    print("| --- |" + " --: |" * len(rounds))
    for name, row in table.items():
        print(f"| {name} | " + " | ".join(f"{m:.1f} / {c:.1f}" for m, c in row) + " |")
    print("correlation of steps:", " ".join("–" if c is None else f"{c:.2f}" for c in correlations))
    options.out.mkdir(exist_ok=True)
    file = options.out / "averages.json"
    kept = json.loads(file.read_text()) if file.exists() else {}
    kept[options.name or options.config] = {
        "changes": [c for c in options.changes if "/" not in c],
        "seeds": seeds,
        "rounds": rounds,
        "mAP, CF1": table,
        "correlation of steps": correlations,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
    }
    file.write_text(json.dumps(kept, indent=1) + "\n")


if __name__ == "__main__":
    main()
