"""The same run on our engine, stacked and one client at a time, and on Flower's simulation (Ray).

Whole runs through the command line, one after the other, each in a process of its own, with one
thread (Ray: one per process, as many processes as cores). Needs the extra `flower-sim`.

    python benchmarks/flower_sim.py --rounds 6
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

RUN = ("run", "demo", "run.method=fedavg", "engine.device=cpu", "engine.threads=1", "--quiet")
CONTENDERS = {
    "fedharmony, clients stacked": (),
    "fedharmony, engine.stack=1": ("engine.stack=1",),
    "fedharmony run --on flower-sim": ("--on", "flower-sim"),
}


def measure(words: tuple[str, ...], rounds: int, folder: Path) -> dict[str, Any]:
    began = time.monotonic()
    command = [sys.executable, "-m", "fedharmony", *RUN, f"run.rounds={rounds}", *words]
    subprocess.run([*command, "-o", str(folder)], check=True, capture_output=True)
    whole = time.monotonic() - began
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    seconds = [e["seconds"] for e in events if e["event"] == "round"]
    return {
        "first_round_s": round(seconds[0], 2),
        "round_s": round(median(seconds[1:]), 2),
        "run_s": round(whole, 1),
        "state": json.loads((folder / "results.json").read_bytes())["state_sha256"],
        "load": round(os.getloadavg()[0], 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    options = parser.parse_args()
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for i, (name, words) in enumerate(CONTENDERS.items()):
            rows[name] = measure(words, options.rounds, Path(folder) / str(i))
            print(name, rows[name], flush=True)
    _, alone, ray = (row.pop("state") for row in rows.values())
    assert alone == ray, "the two must have the same bits"
    (Path(options.out) / "flower_sim.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
