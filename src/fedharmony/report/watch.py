"""A page for the operator of a federation: sites, runs, failures and curves, as they are now.

Read-only, for this machine alone: it listens at the loopback address, answers GET, and refuses
requests that come by another name (a page elsewhere could otherwise have a browser ask for it). The
body is made anew at each look; a script of six lines puts it in place every other second.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from fedharmony.errors import CheckpointError, FedHarmonyError
from fedharmony.experiments.folder import RunFolder
from fedharmony.flower.link import SERVER, Link, began
from fedharmony.metrics import METRIC_NAMES
from fedharmony.reading import left_out
from fedharmony.report.charts import Picture, Series, curve
from fedharmony.report.load import RunView, load_run
from fedharmony.report.page import fill
from fedharmony.report.svg import style

logger = logging.getLogger(__name__)

HOST = "127.0.0.1"
#: Seconds between questions to Flower about its nodes, which cost a process each.
ASK_S = 10.0
#: Runs, and failures of each, that are shown.
MOST_RUNS, MOST_FAILURES = 6, 12
#: The page may load nothing but its own script and body.
RULES = "default-src 'none'; script-src 'self'; connect-src 'self'; style-src 'unsafe-inline'"
SCRIPT = """\
async function look() {
  try {
    const answer = await fetch("/body");
    if (answer.ok) document.getElementById("body").innerHTML = await answer.text();
    document.body.className = answer.ok ? "" : "stale";
  } catch { document.body.className = "stale"; }
}
setInterval(look, 2000);
"""


@dataclass(frozen=True)
class RunNow:
    """A run that the SuperLink was asked for.

    Its ``status`` is running, completed, failed (for a ``reason``) or killed; ``names`` are those
    of its sites, by client.
    """

    view: RunView
    status: str
    reason: str
    names: Mapping[int, str]

    @property
    def facts(self) -> dict[str, str]:
        """A few numbers, by name."""
        run, found = self.view, {}
        if run.rounds:
            cohort, reported = (len(run.rounds[-1][key]) for key in ("cohort", "reported"))
            sent = run.per_round("bytes_up") + run.per_round("bytes_down")
            found["sites in the last round"] = f"{reported} of {cohort} drawn"
            found["seconds a round"] = f"{run.per_round('seconds'):.1f}"
            found["MB a round"] = f"{sent / 1e6:,.2f}"
        known = {name: run.metrics.get(name, math.nan) for name in METRIC_NAMES[:2]}
        return found | {n: f"{100 * v:.1f} %" for n, v in known.items() if math.isfinite(v)}

    @property
    def failures(self) -> list[tuple[int, str, str]]:
        """Round, stage and reason of the latest ones."""
        found = [
            (event["round"] + 1, one["stage"], one["reason"])
            for event in self.view.rounds
            for one in (*left_out(event, "failed"), *left_out(event, "rule"))
        ]
        return found[-MOST_FAILURES:][::-1]

    @property
    def pictures(self) -> list[Picture]:
        """MAP and training loss over the rounds, as far as they have come."""
        run = self.view
        curves = {"mAP": run.curve("metrics", "mAP")}
        curves["training loss"] = run.curve("round", "train_loss")
        rounds = max(run.rounds_total, 2)
        return [
            curve(name, [Series(name, style(0), (found,))], rounds=rounds, percent=name == "mAP")
            for name, found in curves.items()
            if found
        ]

    @property
    def seen(self) -> dict[str, int]:
        """The last round that each site reported in, by name."""
        rounds, names = self.view.rounds, self.names
        return {names[k]: e["round"] + 1 for e in rounds for k in e["reported"] if k in names}


def runs_of(link: Link) -> list[RunNow]:
    """The latest runs of a SuperLink, the newest first; of each folder the latest order."""
    orders = sorted(link.home.glob("orders/*"), key=lambda place: place.stat().st_mtime)
    found: dict[Path, RunNow] = {}
    for order in reversed(orders):
        if (folder := _folder(order)) is not None and folder not in found:
            found[folder] = _run(order, folder)
        if len(found) == MOST_RUNS:
            break
    return list(found.values())


def _folder(order: Path) -> Path | None:
    try:
        app = tomllib.loads((order / "app" / "pyproject.toml").read_text())
        return Path(app["tool"]["flwr"]["app"]["config"]["out"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _run(order: Path, folder: Path) -> RunNow:
    try:
        view = load_run(folder)
    except CheckpointError:
        view = RunView(folder)  # it has written nothing that can be read yet
    outcome, server = (RunFolder(order).read_json(n) or {} for n in ("outcome.json", SERVER))
    if outcome:
        status = str(outcome.get("status"))
    elif server and began(server.get("pid", 0)) != server.get("began"):
        status = "killed"
    else:
        status = "running"
    roster = RunFolder(folder).read_json("roster.json") or {"sites": {}}
    names = {site["client"]: name for name, site in roster["sites"].items()}
    return RunNow(view, status, str(outcome.get("error", "")), names)


class Watch(ThreadingHTTPServer):
    """Serves the page at a port (0 takes a free one); ``sites`` stand in for what Flower says."""

    daemon_threads = True

    def __init__(
        self,
        link: Link,
        port: int,
        sites: Callable[[], list[tuple[str, str, str]]] | None = None,
    ) -> None:
        self.link, self._ask = link, sites or link.sites
        self._sites: list[tuple[str, str, str]] = []
        self._problem, self._asked = "", -ASK_S
        self._lock = threading.Lock()
        super().__init__((HOST, port), Handler)
        self.names = {f"{name}:{self.server_port}" for name in (HOST, "localhost")}

    def sites(self) -> tuple[list[tuple[str, str, str]], str]:
        """The registered sites, and why they are not known now; Flower is not asked too often."""
        with self._lock:
            if time.monotonic() - self._asked > ASK_S:
                try:
                    self._sites, self._problem = self._ask(), ""
                except FedHarmonyError as error:
                    self._problem = str(error)
                self._asked = time.monotonic()
            return self._sites, self._problem

    def page(self, name: str) -> str:
        """The whole page, or its body alone."""
        sites, problem = self.sites()
        words = {"sites": sites, "problem": problem, "runs": runs_of(self.link)}
        about = {"home": self.link.home, "now": time.strftime("%H:%M:%S")}
        return fill(name, words | about)


class Handler(BaseHTTPRequestHandler):
    """Answers three paths."""

    server: Watch

    def do_GET(self) -> None:
        """The page, its body, or its script."""
        if self.headers.get("Host") not in self.server.names:
            return self._answer(403, "text/plain", "This page is for its own machine.")
        if self.path == "/watch.js":
            return self._answer(200, "text/javascript", SCRIPT)
        pages = {"/": "watch.html.j2", "/body": "watch_body.html.j2"}
        if (name := pages.get(self.path)) is None:
            return self._answer(404, "text/plain", "There is nothing here.")
        return self._answer(200, "text/html", self.server.page(name))

    def _answer(self, code: int, kind: str, text: str) -> None:
        data = text.encode()
        self.send_response(code)
        for header, value in (
            ("Content-Type", f"{kind}; charset=utf-8"),
            ("Content-Length", str(len(data))),
            ("Content-Security-Policy", RULES),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(header, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """A look is no news."""
