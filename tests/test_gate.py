"""The gate before a SuperLink: the Fleet API passes, and nothing else."""

from __future__ import annotations

import http.client
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest

from fedharmony.flower import gate
from fedharmony.site.keys import make_certificates


class Inner(BaseHTTPRequestHandler):
    """Stands for the SuperLink: says what it was asked."""

    protocol_version = "HTTP/1.1"
    connections: ClassVar[list[Any]] = []

    def setup(self) -> None:
        self.connections.append(self.client_address)
        super().setup()

    def do_POST(self) -> None:
        self.close_connection = self.path == "/v1/fleet/hang-up"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        said = f"{self.path} {self.headers['x-signature']} ".encode() + body
        self.send_response(200)
        self.send_header("x-answer", "yes")
        self.send_header("Content-Length", str(len(said)))
        self.end_headers()
        self.wfile.write(said)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[int, Path]]:
    pytest.importorskip("cryptography")
    folder = tmp_path_factory.mktemp("gate")
    make_certificates(folder, ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    inner = ThreadingHTTPServer(("127.0.0.1", 0), Inner)
    inner.socket = context.wrap_socket(inner.socket, server_side=True)
    outer = gate.Gate(("127.0.0.1", 0), ("127.0.0.1", inner.server_address[1]), folder)
    threads = [threading.Thread(target=server.serve_forever) for server in (inner, outer)]
    for thread in threads:
        thread.start()
    yield outer.server_address[1], folder
    for server in (outer, inner):
        server.shutdown()
        server.server_close()
    for thread in threads:
        thread.join()


def ask(
    place: tuple[int, Path], path: str, kind: str = "POST", body: bytes = b"x", tls: bool = True
) -> tuple[int, bytes, Any]:
    trust = ssl.create_default_context(cafile=str(place[1] / "ca.crt"))
    there = http.client.HTTPConnection("127.0.0.1", place[0], timeout=10)
    if tls:
        there = http.client.HTTPSConnection("127.0.0.1", place[0], timeout=10, context=trust)
    with closing(there):
        there.request(kind, path, body, {"x-signature": "signed"})
        answer = there.getresponse()
        return answer.status, answer.read(), answer.headers


def test_the_fleet_api_passes(port: tuple[int, Path]) -> None:
    status, said, headers = ask(port, "/v1/fleet/pull-messages", body=b"\0bytes")
    assert (status, said) == (200, b"/v1/fleet/pull-messages signed \0bytes")
    assert headers["x-answer"] == "yes"


def test_a_site_that_keeps_its_connection_needs_one_to_the_superlink(
    port: tuple[int, Path],
) -> None:
    """Unless the SuperLink hangs up, as it does after some seconds of silence."""
    trust = ssl.create_default_context(cafile=str(port[1] / "ca.crt"))
    there = http.client.HTTPSConnection("127.0.0.1", port[0], timeout=10, context=trust)
    found, before = [], len(Inner.connections)
    for path in ("pull-messages", "pull-messages", "hang-up", "pull-messages"):
        there.request("POST", f"/v1/fleet/{path}", b"x")
        answer = there.getresponse()
        answer.read()
        found.append((answer.status, len(Inner.connections) - before))
        if path == "hang-up":
            time.sleep(0.1)
    there.close()
    assert found == [(200, 1), (200, 1), (200, 1), (200, 2)]


@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/runtime/pull-task-input",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet",
        "/",
        "/v1/fleet/pull-messages?next=/v1/control",
    ],
)
def test_nothing_else_passes(port: tuple[int, Path], path: str) -> None:
    status, said, _ = ask(port, path)
    assert status == 403
    assert b"signed" not in said


def test_other_requests_and_large_ones_are_refused(
    port: tuple[int, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ask(port, "/v1/fleet/pull-messages", "GET")[0] == 501
    monkeypatch.setattr(gate, "MOST_BYTES", 3)
    assert ask(port, "/v1/fleet/pull-messages", body=b"four")[0] == 413


def test_a_line_without_tls_or_of_another_authority_is_refused(
    port: tuple[int, Path], tmp_path: Path
) -> None:
    before, path = len(Inner.connections), "/v1/fleet/pull-messages"
    with pytest.raises((OSError, http.client.HTTPException)):
        ask(port, path, tls=False)
    make_certificates(tmp_path, ["127.0.0.1"])
    with pytest.raises(ssl.SSLCertVerificationError):
        ask((port[0], tmp_path), path)
    assert len(Inner.connections) == before


def test_a_superlink_that_is_away(port: tuple[int, Path]) -> None:
    outer = gate.Gate(("127.0.0.1", 0), ("127.0.0.1", 1), port[1])
    thread = threading.Thread(target=outer.serve_forever)
    thread.start()
    assert ask((outer.server_address[1], port[1]), "/v1/fleet/pull-messages")[0] == 502
    outer.shutdown()
    outer.server_close()
    thread.join()
