"""The same run on several devices: do they agree, does each repeat to the bit, how fast is each?

Runs the demo's settings for both methods. Per device: images trained per second (median of rounds
after the first), mAP after the last round, whether a second run gives the same bits, and the
largest difference of the parameters after ONE round from those of the first device. (After many
rounds two devices drift apart like two seeds: rounding is amplified by training.)

    python benchmarks/devices.py cpu cuda [--rounds 16]

Prints a table and writes benchmarks/results/devices.json.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fedharmony.experiments import run
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.records import load_record
from fedharmony.types import PARAMS, Record

METHODS = ("fedavg", "fedharmony")


def train(method: str, device: str, rounds: int) -> tuple[dict[str, Any], list[float], Record]:
    settings = load_settings(
        "demo",
        [
            *(f"run.method={method}", f"run.rounds={rounds}"),
            *(f"engine.device={device}", "engine.precision=float32"),
        ],
    )
    speeds: list[float] = []

    def observe(event: dict[str, Any]) -> None:
        if event["event"] == "round":
            speeds.append(event["images_per_second"])

    with tempfile.TemporaryDirectory() as folder:
        place = RunFolder(Path(folder) / "run")
        results = run.start(settings, place, observe)
        return results, speeds, load_record(place.checkpoint)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("devices", nargs="+")
    parser.add_argument("--rounds", type=int, default=16)
    options = parser.parse_args()
    rows, first = [], {}
    for method in METHODS:
        for device in options.devices:
            results, speeds, _ = train(method, device, options.rounds)
            again, _, _ = train(method, device, options.rounds)
            one = train(method, device, 1)[2].get(PARAMS)
            reference = first.setdefault(method, one)
            difference = max(float((one[n] - reference[n]).abs().max()) for n in one)
            rows.append(
                {
                    "method": method,
                    "device": device,
                    "images_per_second": statistics.median(speeds[1:] or speeds),
                    "mAP": results["metrics"]["mAP"],
                    "repeats_to_the_bit": results["state_sha256"] == again["state_sha256"],
                    "difference_after_one_round": difference,
                }
            )
    cuda = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    content = {
        "date": datetime.now(UTC).date().isoformat(),
        "machine": f"{platform.machine()}, {torch.get_num_threads()} threads, {cuda or 'no GPU'}",
        "torch": torch.__version__,
        "rounds": options.rounds,
        "rows": rows,
    }
    folder = Path(__file__).parent / "results"
    folder.mkdir(exist_ok=True)
    (folder / "devices.json").write_text(json.dumps(content, indent=1) + "\n")
    print(
        f"{'method':12s} {'device':8s} {'images/s':>9s} {'mAP':>6s} {'repeats':>8s} "
        f"{'difference':>11s}"
    )
    for r in rows:
        print(
            f"{r['method']:12s} {r['device']:8s} {r['images_per_second']:9.0f} "
            f"{100 * r['mAP']:6.1f} {r['repeats_to_the_bit']!s:>8s} "
            f"{r['difference_after_one_round']:11.1e}"
        )


if __name__ == "__main__":
    main()
