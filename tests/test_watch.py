"""The operator's page: what it shows, whom it answers, and that it follows, in a real browser."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from fedharmony.errors import TransportError
from fedharmony.flower.link import Link, began
from fedharmony.report import watch
from fedharmony.report.watch import Watch, runs_of

SITES = [("ada", "online", "2026-01-01"), ("<b>eve</b>", "offline", "")]


def event(kind: str, **values: Any) -> str:
    return json.dumps({"event": kind, **values}) + "\n"


def round_event(round: int, **values: Any) -> str:
    failed = {
        "client": 1,
        "stage": "update",
        "round": round,
        "reason": "site <i>ben</i>: disk full",
        "cause": "failed",
    }
    words = {"cohort": [0, 1], "reported": [0], "left_out": [failed], "seconds": 2.0}
    sizes = {"bytes_up": 1_000_000, "bytes_down": 500_000, "train_loss": 0.5 / (round + 1)}
    return event("round", round=round, **words, **sizes, **values)


def order(home: Path, name: str, rounds: int = 2, **files: Any) -> Path:
    """A run that was ordered, with so many rounds of four; files of the order are JSON."""
    place, out = home / "orders" / name, home / name
    (place / "app").mkdir(parents=True)
    out.mkdir()
    text = f'[tool.flwr.app.config]\nout = "{out}"\n'
    (place / "app" / "pyproject.toml").write_text(text)
    for file, content in files.items():
        (place / f"{file}.json").write_text(json.dumps(content))
    log = event("start", label="fedavg", rounds=4, clients=2)
    for t in range(rounds):
        metrics = {"mAP": 0.5 + 0.1 * t, "O-mAP": 0.6}
        log += round_event(t) + event("evaluate", round=t, metrics=metrics)
    (out / "events.jsonl").write_text(log)
    sites = {"ada": {"client": 0}, "ben": {"client": 1}}
    (out / "roster.json").write_text(json.dumps({"run": "1", "sites": sites}))
    return out


@contextmanager
def serving(link: Link, sites: Any = lambda: SITES) -> Iterator[Watch]:
    with Watch(link, 0, sites) as page:
        thread = threading.Thread(target=page.serve_forever)
        thread.start()
        try:
            yield page
        finally:
            page.shutdown()
            thread.join()


def get(page: Watch, path: str, kind: str = "GET", host: str = "") -> tuple[int, str, Any]:
    line = http.client.HTTPConnection("127.0.0.1", page.server_port, timeout=10)
    line.request(kind, path, headers={"Host": host} if host else {})
    answer = line.getresponse()
    found = answer.status, answer.read().decode(), answer.headers
    line.close()
    return found


def test_a_run_is_running_killed_failed_or_completed(tmp_path: Path) -> None:
    own = {"pid": os.getpid(), "began": began(os.getpid())}
    order(tmp_path, "a", server=own)
    order(tmp_path, "b", server={"pid": os.getpid(), "began": "0"})
    order(tmp_path, "c", server=own, outcome={"status": "failed", "error": "too few"})
    order(tmp_path, "d", rounds=0, outcome={"status": "completed", "error": ""})
    found = {run.view.folder.name: run for run in runs_of(Link(tmp_path))}
    states = {name: run.status for name, run in found.items()}
    assert states == {"a": "running", "b": "killed", "c": "failed", "d": "completed"}
    views = {name: run.view for name, run in found.items()}
    assert (views["a"].rounds_done, views["a"].rounds_total, views["d"].rounds_done) == (2, 4, 0)
    assert found["c"].reason == "too few"
    assert found["a"].seen == {"ada": 2}
    assert found["a"].facts["MB a round"] == "1.50"
    assert found["a"].facts["mAP"] == "60.0 %"
    assert found["a"].failures[0] == (2, "update", "site <i>ben</i>: disk full")
    assert [picture.title for picture in found["a"].pictures] == ["mAP", "training loss"]


def test_the_page_shows_text_as_text_and_loads_nothing(tmp_path: Path) -> None:
    order(tmp_path, "study")
    with serving(Link(tmp_path)) as page:
        status, text, headers = get(page, "/")
        assert (status, get(page, "/body")[0], get(page, "/watch.js")[0]) == (200, 200, 200)
        assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    assert "study" in text
    assert "&lt;b&gt;eve&lt;/b&gt;" in text
    assert "<b>eve" not in text
    assert "&lt;i&gt;ben" in text
    assert "http://" not in text.replace("http://www.w3.org", "")


def test_it_answers_its_own_machine_and_only_looks(tmp_path: Path) -> None:
    with serving(Link(tmp_path)) as page:
        assert page.server_address[0] == "127.0.0.1"
        assert get(page, "/", host="evil.example")[0] == 403
        assert get(page, "/", host=f"localhost:{page.server_port}")[0] == 200
        assert get(page, "/../home")[0] == 404
        for kind in ("POST", "PUT", "DELETE"):
            assert get(page, "/", kind)[0] == 501


def test_a_superlink_that_is_down_is_said(tmp_path: Path) -> None:
    def ask() -> Any:
        raise TransportError("No SuperLink runs in here.")

    with serving(Link(tmp_path), ask) as page:
        assert "No SuperLink runs in here." in get(page, "/")[1]


def test_a_browser_shows_the_page_and_follows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ada goes offline after the first look; the browser's own page says so two seconds later."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("there is no browser")
    monkeypatch.setattr(watch, "ASK_S", -1.0)
    looks = iter(["online"])
    order(tmp_path, "study")

    def sites() -> Any:
        return [("ada", next(looks, "offline"), "")]

    with serving(Link(tmp_path), sites) as page:
        words = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
        words += ["--virtual-time-budget=6000", f"--user-data-dir={tmp_path / 'profile'}"]
        place = f"http://127.0.0.1:{page.server_port}/"
        done = subprocess.run([*words, place], capture_output=True, text=True, timeout=120)
    assert '<td class="state offline">offline</td>' in done.stdout
    assert "2 of 4 rounds" in done.stdout
    assert done.stdout.count("<figure>") == 2
