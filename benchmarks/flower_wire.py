"""What a message of a real federation costs: requests, bytes beside the model, and seconds.

A SuperLink with TLS and keys, three workers and three SuperNodes on this machine, which reach it
through a gate that counts. Needs the extra `flower` and Linux; uses the federation of the tests.

    python benchmarks/flower_wire.py --methods fedavg,fedharmony,fedcurv --rounds 4
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.flower.gate import Gate, Handler
from superlink import Federation, federation, wait_for

#: A round's training takes about as long as that of a small site, not milliseconds.
WIDER = ("model.width=64", "model.depth=2", "train.epochs=5", "federation.cohort=3")


class Counting(Handler):
    """A gate's handler that counts requests and bytes by path."""

    requests: ClassVar[Counter[str]] = Counter()
    bytes: ClassVar[Counter[str]] = Counter()
    lock = threading.Lock()

    def do_POST(self) -> None:  # noqa: N802 (Python's name)
        with self.lock:
            self.requests[self.path] += 1
            self.bytes[self.path] += int(self.headers.get("Content-Length", 0))
        super().do_POST()

    def send_header(self, keyword: str, value: str) -> None:
        if keyword == "Content-Length":
            with self.lock:
                self.bytes[self.path] += int(value)
        super().send_header(keyword, value)


def counted(there: Federation) -> Gate:
    """Lead the SuperNodes through a gate that counts."""
    gate = Gate(("127.0.0.1", 0), ("127.0.0.1", there.inner), there.link.certificates)
    gate.RequestHandlerClass = Counting
    threading.Thread(target=gate.serve_forever, daemon=True).start()
    there.port = gate.server_address[1]
    for name in ("ada", "ben", "cy"):
        there.end(f"node-{name}")
        there.start_node(name)
    wait_for(lambda: all(status == "online" for _, status, _ in there.link.sites()))
    return gate


def of_objects(counts: Counter[str]) -> int:
    return sum(n for path, n in counts.items() if "object" in path)


def measure(there: Federation, method: str, rounds: int) -> dict[str, Any]:
    """One run, and what its messages cost."""
    changes = [*there.changes, *WIDER, f"run.method={method}", f"run.rounds={rounds}"]
    settings, out = load_settings("demo", changes), there.folder / f"run-{method}"
    before, bytes_before, told = Counting.requests.copy(), Counting.bytes.copy(), stages(there)
    there.link.order(settings.tree(), out, 3, 300.0, 300.0).follow(lambda event: None)
    requests, moved = Counting.requests - before, Counting.bytes - bytes_before
    events = [e for e in RunFolder(out).read_events() if e["event"] == "round"]
    payload = sum(e["bytes_up"] + e["bytes_down"] for e in events)
    log = (there.folder / "worker-ben.log").read_text()
    worked = [float(s) for s in re.findall(r"images in ([\d.]+) s", log)][-rounds:]
    # A message and its answer: three sites enrol, then take part in every stage.
    messages = 3 + stages(there) - told
    traffic = sum(n for path, n in moved.items() if "heartbeat" not in path)
    return {
        "method": method,
        "messages": messages,
        "payload_kb": round(payload / messages / 1e3, 1),
        "object_requests": round(of_objects(requests) / messages, 1),
        "requests": {path: round(n / messages, 2) for path, n in sorted(requests.items())},
        "overhead_kb": round((traffic - payload) / messages / 1e3, 1),
        "exchange_s": round(statistics.median(e["seconds"] for e in events), 2),
        "worker_s": round(statistics.median(worked), 2),
        "load": os.getloadavg()[0],
    }


def stages(there: Federation) -> int:
    """How many stages workers have carried out."""
    logs = [there.folder / f"worker-{name}.log" for name in ("ada", "ben", "cy")]
    return sum(log.read_text().count("images in") for log in logs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="fedavg,fedharmony,fedcurv")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, federation(Path(folder)) as there:
        gate = counted(there)
        rows = [measure(there, method, options.rounds) for method in options.methods.split(",")]
        gate.shutdown()
    for row in rows:
        print({key: value for key, value in row.items() if key != "requests"})
    (Path(options.out) / "flower_wire.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
