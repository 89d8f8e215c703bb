"""A gate before the SuperLink: sites reach what they need of it, and nothing else.

Flower has one port for three purposes. Sites need its Fleet API (``/v1/fleet/``). The other two let
whoever reaches them start code at every site's relay; they stay on the loopback address. The gate
ends the sites' TLS connections with the SuperLink's own certificate, looks at the path of every
request, and hands on what is allowed.
"""

from __future__ import annotations

import http.client
import re
import select
import socket
import ssl
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

#: What is let through: no dots, no escapes, nothing that another reader could take for a way out.
ALLOWED = re.compile(r"/v1/fleet/[a-z0-9/-]+")
#: The most bytes of a request; Flower sends objects in pieces of five megabytes.
MOST_BYTES = 64 << 20
#: Seconds that either side may be silent.
SILENCE_S = 120.0
#: Headers that belong to one connection, not to the request.
OF_CONNECTION = {
    "connection",
    "keep-alive",
    "transfer-encoding",
    "content-length",
    "host",
    "upgrade",
}


class Handler(BaseHTTPRequestHandler):
    """Hands one connection's requests on."""

    protocol_version = "HTTP/1.1"
    timeout = SILENCE_S
    server: Gate

    def setup(self) -> None:
        """One connection to the SuperLink for each that a site has here."""
        host, port = self.server.inner
        self.inner = http.client.HTTPSConnection(
            host, port, timeout=SILENCE_S, context=self.server.trust
        )
        super().setup()

    def finish(self) -> None:
        """Both end together."""
        self.inner.close()
        super().finish()

    def do_POST(self) -> None:
        """The only kind of request that the Fleet API has."""
        length = self.headers.get("Content-Length", "")
        if not ALLOWED.fullmatch(self.path):
            return self._refuse(403, "Only the Fleet API is open here.")
        if not length.isdecimal() or int(length) > MOST_BYTES:
            return self._refuse(413, "The request is too large, or does not say how large it is.")
        body = self.rfile.read(int(length))
        headers = {k: v for k, v in self.headers.items() if k.lower() not in OF_CONNECTION}
        try:
            self._forget_closed()
            self.inner.request("POST", self.path, body, headers)
            answer = self.inner.getresponse()
            data = answer.read()
        except (OSError, http.client.HTTPException):
            self.inner.close()
            return self._refuse(502, "The SuperLink does not answer.")
        self.send_response(answer.status)
        for name, value in answer.getheaders():
            if name.lower() not in OF_CONNECTION | {"date", "server"}:
                self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        return None

    def _forget_closed(self) -> None:
        """Connect anew where the SuperLink has hung up: there is something to read, its end."""
        if self.inner.sock is not None and select.select([self.inner.sock], [], [], 0)[0]:
            self.inner.close()

    def _refuse(self, code: int, reason: str) -> None:
        self.close_connection = True
        self.send_error(code, reason)

    def log_message(self, format: str, *args: Any) -> None:
        """Only refusals are worth a line."""
        if len(args) > 1 and str(args[1]).startswith(("4", "5")):
            super().log_message(format, *args)


class Gate(ThreadingHTTPServer):
    """Listens at a public address for sites.

    Args:
        place: host and port to listen at.
        inner: host and port of the SuperLink.
        certificates: the SuperLink's.
    """

    daemon_threads = True

    def __init__(self, place: tuple[str, int], inner: tuple[str, int], certificates: Path) -> None:
        self.inner = inner
        self.trust = ssl.create_default_context(cafile=str(certificates / "ca.crt"))
        self._own = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._own.load_cert_chain(certificates / "server.pem", certificates / "server.key")
        super().__init__(place, Handler)

    def get_request(self) -> tuple[socket.socket, Any]:
        """A new connection; its greeting is left to its own thread, so that nobody waits for it."""
        stream, peer = self.socket.accept()
        stream.settimeout(SILENCE_S)
        own = self._own.wrap_socket(stream, server_side=True, do_handshake_on_connect=False)
        return own, peer

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A peer that breaks off is no news."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            super().handle_error(request, client_address)


def main(host: str, port: str, inner: str, certificates: str) -> None:
    """Serve until ended: public host and port, the SuperLink's port, the certificates."""
    Gate((host, int(port)), ("127.0.0.1", int(inner)), Path(certificates)).serve_forever()


if __name__ == "__main__":
    main(*sys.argv[1:])
