"""A site's node: it fetches messages from the SuperLink and brings the worker's answers back.

It takes the place of Flower's own SuperNode and speaks its protocol, by Flower's own client. A
SuperNode starts a process for every message, which runs code that came with the run, and looks for
work every three seconds. This node runs no code but its own, starts no process, listens at no port,
and looks more often. It is the one place where modules are imported that Flower keeps to itself.
"""

from __future__ import annotations

import logging
import time
from functools import partial
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePrivateKey
from cryptography.hazmat.primitives.serialization import load_ssh_private_key
from flwr.app import Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.inflatable.inflatable_utils import (
    pull_and_inflate_object_from_tree,
    push_objects,
)
from flwr.supercore.run import RunNotRunningException
from flwr.supernode.fleet_http_connection import http_request_response

from fedharmony.errors import ConfigError, TransportError
from fedharmony.flower.client_app import relayed
from fedharmony.flower.post import pause
from fedharmony.flower.wire import PATIENCE

logger = logging.getLogger(__name__)


def serve(superlink: str, authority: Path, key: Path, socket: str) -> None:
    """Carry messages between a SuperLink and the worker at a socket, until a signal ends it.

    Args:
        superlink: host and port of the federation's gate.
        authority: the certificate that the SuperLink's was signed with.
        key: the site's private key, as it was registered.
        socket: where the worker answers.
    """
    private = _key(key)
    keys = private, private.public_key()
    try:
        with http_request_response(superlink, False, _file(authority), keys) as line:
            logger.info("Node %d of %s answers for the worker at %s.", line[0], superlink, socket)
            receive, since = line[1], time.monotonic()
            while True:
                if (found := receive()) is None:
                    pause(since)
                else:
                    head, tree = found
                    carry(line, head, tree, socket)
                    since = time.monotonic()
    except SystemExit:
        raise TransportError(
            f"The federation at {superlink} does not let this relay in; Flower says why above. "
            f"Check that {key}.pub is registered there, that {authority} is its ca.crt, and that "
            "no other relay has this key (after a kill Flower waits a minute for the old one)."
        ) from None
    raise TransportError(
        f"The connection to {superlink} has ended; Flower says why above. Start the relay again."
    )


def carry(line: Any, head: Message, tree: Any, socket: str) -> None:
    """Have the worker answer a message.

    One that cannot be fetched, or whose answer cannot be sent, is given up: the server goes on
    without this site when its time is over.
    """
    _, _, send, _, _, pull, push, confirm = line
    run = head.metadata.run_id
    try:
        message = pull_and_inflate_object_from_tree(
            tree, partial(pull, run), partial(confirm, run), return_type=Message, **PATIENCE
        )
        message.metadata.__dict__["_message_id"] = tree.object_id
        began = time.monotonic()
        reply = relayed(message, socket)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        missing, session = send(reply, get_object_tree(reply), time.monotonic() - began)
        push_objects(
            get_all_nested_objects(reply), partial(push, run, session), object_ids_to_push=missing
        )
    except RunNotRunningException:
        logger.info("A message of a run that has ended was dropped.")
    except Exception:
        logger.exception("A message was lost.")


def _file(path: Path) -> str:
    if not path.is_file():
        raise ConfigError(f"There is no file {path}. The operator of the federation has it.")
    return str(path)


def _key(file: Path) -> EllipticCurvePrivateKey:
    try:
        key = load_ssh_private_key(file.read_bytes(), None)
    except (OSError, ValueError, UnsupportedAlgorithm) as error:
        raise ConfigError(
            f"{file} cannot be used as a private key: {error}. 'fedharmony site init' makes one."
        ) from None
    if not isinstance(key, EllipticCurvePrivateKey):
        raise ConfigError(
            f"{file} is a key of another kind than Flower takes. 'fedharmony site init' makes one."
        )
    return key
