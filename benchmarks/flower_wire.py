"""What a message of a real federation costs: requests, bytes beside the model, and seconds.

A SuperLink with TLS and keys, and three sites on this machine, which reach it through a gate that
counts: every method with our relay, the first one with Flower's own SuperNode, too. Needs the extra
`flower` and Linux; uses the federation of the tests.

    python benchmarks/flower_wire.py --rounds 5
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from statistics import median
from typing import Any, ClassVar

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.settings import load_settings
from fedharmony.flower.gate import Gate, Handler
from sites import SIZES
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
    """A gate that counts, which nodes use from now on."""
    gate = Gate(("127.0.0.1", 0), ("127.0.0.1", there.inner), there.link.certificates)
    gate.RequestHandlerClass = Counting
    threading.Thread(target=gate.serve_forever, daemon=True).start()
    there.port = gate.server_address[1]
    return gate


def restart_nodes(there: Federation, flowers_own: bool) -> None:
    for name in SIZES:
        there.end(f"node-{name}")
    wait_for(lambda: not online(there))
    for name in SIZES:
        there.start_node(name, flowers_own=flowers_own)
    wait_for(lambda: len(online(there)) == len(SIZES))


def online(there: Federation) -> list[str]:
    return [name for name, status, _ in there.link.sites() if status == "online"]


def of_objects(counts: Counter[str]) -> int:
    return sum(n for path, n in counts.items() if "object" in path)


def measure(there: Federation, method: str, rounds: int, flowers_own: bool) -> dict[str, Any]:
    """One run, and what its messages cost."""
    changes = [*there.changes, *WIDER, f"run.method={method}", f"run.rounds={rounds}"]
    settings, out = load_settings("demo", changes), there.folder / f"run-{method}-{flowers_own}"
    before, bytes_before, told = Counting.requests.copy(), Counting.bytes.copy(), stages(there)
    there.link.order(settings.tree(), out, 3, 300.0, 300.0).follow(lambda event: None)
    requests, moved = Counting.requests - before, Counting.bytes - bytes_before
    events = [e for e in RunFolder(out).read_events() if e["event"] == "round"]
    payload = sum(e["bytes_up"] + e["bytes_down"] for e in events)
    done = {name: found[len(told[name]) :] for name, found in stages(there).items()}
    # A message and its answer: three sites enrol, then take part in every stage.
    messages = 3 + sum(map(len, done.values()))
    traffic = sum(n for path, n in moved.items() if "heartbeat" not in path)
    # An exchange is as long as its slowest site; a round may have several.
    exchanges = [max(seconds) for seconds in zip(*done.values(), strict=True)]
    worked = sum(exchanges) / len(events)
    beside = [(e["seconds"] - worked) * len(events) / len(exchanges) for e in events]
    return {
        "method": method,
        "node": "flower-supernode" if flowers_own else "fedharmony site relay",
        "messages": messages,
        "payload_kb": round(payload / messages / 1e3, 1),
        "object_requests": round(of_objects(requests) / messages, 1),
        "requests": {path: round(n / messages, 2) for path, n in sorted(requests.items())},
        "overhead_kb": round((traffic - payload) / messages / 1e3, 1),
        "worker_s": round(median(exchanges), 2),
        "beside_worker_s": {"least": round(min(beside), 2), "median": round(median(beside), 2)},
        "load": os.getloadavg()[0],
    }


def stages(there: Federation) -> dict[str, list[float]]:
    """Seconds of each stage that workers have carried out, by site."""
    logs = {name: (there.folder / f"worker-{name}.log").read_text() for name in SIZES}
    return {n: [float(s) for s in re.findall(r"images in ([\d.]+) s", t)] for n, t in logs.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--methods", default="fedavg,fedharmony,fedcurv,spherefed,fedrdn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", default=str(Path(__file__).parent / "results"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, federation(Path(folder)) as there:
        gate = counted(there)
        methods = options.methods.split(",")
        restart_nodes(there, flowers_own=True)
        rows = [measure(there, methods[0], options.rounds, flowers_own=True)]
        restart_nodes(there, flowers_own=False)
        rows += [measure(there, method, options.rounds, flowers_own=False) for method in methods]
        gate.shutdown()
    for row in rows:
        print({key: value for key, value in row.items() if key != "requests"})
    (Path(options.out) / "flower_wire.json").write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
