"""The same with fedharmony, through its own command line; writes a run folder with checkpoints."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> None:
    sizes = json.loads((Path(sys.argv[1]) / "task.json").read_text())
    changes = json.loads((Path(sys.argv[1]) / "settings.json").read_text())
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "fedharmony", "run", "demo", *changes]
        command += [f"run.eval_every={sizes['rounds']}", "--out", str(out), "--quiet"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    rounds = [event for event in events if event["event"] == "round"]
    # As ``task.finish`` does; that module imports torch, which the command has already done once.
    print(json.dumps({"rounds": [event["seconds"] for event in rounds]}), flush=True)


main()
