"""The relay at a site: it hands messages to the site's worker, and the worker's answers back.

The site's node calls it (:mod:`fedharmony.flower.node`); so does Flower's own SuperNode, in a
new process for every message, which is told the worker's socket by ``--node-config
'socket="/run/…"'``. Imports no torch, sees no data, and needs no right but to use that socket.
"""

from __future__ import annotations

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedharmony.flower.wire import content_of, parcel_of
from fedharmony.site.parcel import ask, failed

app = ClientApp()


@app.query()
def relay(message: Message, context: Context) -> Message:
    """What Flower's SuperNode calls."""
    return relayed(message, str(context.node_config.get("socket", "worker.sock")))


def relayed(message: Message, socket: str) -> Message:
    """Ask the worker; whatever happens there is a reply, for a missing one blocks a SuperNode."""
    try:
        answer = ask(socket, parcel_of(message.content), message.metadata.ttl)
    except Exception as error:
        answer = failed(error)
    return Message(content_of(answer), reply_to=message)
