"""Time and memory of the robust averages of one cohort.

    python benchmarks/robust.py [--model vit_base_patch16] [--clients 25] [--labels 20]
                                [--device cuda] [--repeats 5]

Updates are random. Prints, per rule, the seconds of one average (median), the ratio to the plain
mean, and the largest memory beyond the models held; writes results/robust.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch

from fedharmony.models.base import InputSpec, Model, models
from fedharmony.models.heads import LinearHead
from fedharmony.robust import Robust, rules
from fedharmony.types import PARAMS, Layout, Packed, Record, Reply


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="vit_base_patch16")
    parser.add_argument("--clients", type=int, default=25)
    parser.add_argument("--labels", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    device, kind = torch.device(options.device), models[options.model]
    backbone = kind(kind.Config(), InputSpec(3, 224, 224))
    model = Model(backbone, LinearHead(backbone.width, options.labels))
    first = model.init(torch.Generator().manual_seed(0))
    layout = Layout.of({name: tuple(tensor.shape) for name, tensor in first.items()})
    draw = torch.Generator(device).manual_seed(0)

    def drawn() -> Record:
        row = torch.randn(layout.length, generator=draw, device=device)
        return Record({PARAMS: Packed(layout, row)})

    received, cohort = drawn(), [drawn() for _ in range(options.clients)]
    held = options.clients * layout.length * 4
    rows = []
    for rule in ("none", *rules.names()):
        times, peak = [], 0
        for _ in range(options.repeats + 1):  # the first warms up
            if device.type == "cuda":
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
            began = time.perf_counter()
            mean = Robust(rule).mean(received)
            for k, record in enumerate(cohort):
                mean.fold(Reply(k, 100, record), 100.0 + k)
            mean.update(received)
            if device.type == "cuda":
                torch.cuda.synchronize()
                peak = torch.cuda.max_memory_allocated() - before
            times.append(time.perf_counter() - began)
        rows.append(
            {"rule": rule, "seconds": statistics.median(times[1:]), "beyond_gb": peak / 1e9}
        )
        over = rows[-1]["seconds"] / rows[0]["seconds"]
        print(f"{rule:17} {rows[-1]['seconds']:8.4f} s  x {over:5.1f}  {peak / 1e9:5.2f} GB beyond")
    found = {
        **{"model": options.model, "clients": options.clients, "device": str(device)},
        **{"numbers": layout.length, "held_gb": held / 1e9, "torch": torch.__version__},
        "rules": rows,
    }
    file = Path(__file__).parent / "results" / "robust.json"
    known = json.loads(file.read_text()) if file.exists() else {}
    known[f"{options.model}, {options.clients} clients, {device.type}"] = found
    file.write_text(json.dumps(known, indent=1) + "\n")


if __name__ == "__main__":
    main()
