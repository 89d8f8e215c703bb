"""systemd units of a site: two services under two users, so that the relay cannot read the data."""

from __future__ import annotations

import sys
from pathlib import Path

from fedharmony.site.settings import SiteSettings

WORKER = """\
# /etc/systemd/system/fedharmony-worker.service
[Unit]
Description=fedharmony worker of site {name}
After=local-fs.target

[Service]
# The owner of the data. The group is shared with the relay, for the socket alone: what else the
# worker writes, memory and decoded images, is the owner's.
User={owner}
Group={group}
UMask=0077
ExecStart={python} -m fedharmony site serve {file}
Restart=always
RestartSec=10
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={writes}
PrivateNetwork=yes

[Install]
WantedBy=multi-user.target
"""

RELAY = """\
# /etc/systemd/system/fedharmony-relay.service
[Unit]
Description=fedharmony relay of site {name}
After=network-online.target fedharmony-worker.service
Wants=network-online.target

[Service]
# A user that may use the worker's socket and may read neither the data nor the memory.
User={relay}
Group={group}
ExecStart={python} -m fedharmony site relay --superlink {superlink} --ca {ca} \\
  --key {key} --socket {socket}
# It also ends with code 0 when its SuperLink goes; it must come back all the same.
Restart=always
RestartSec=10
NoNewPrivileges=yes
ProtectSystem=strict
ProtectHome=yes

[Install]
WantedBy=multi-user.target
"""


def units(file: Path, settings: SiteSettings, superlink: str, owner: str, relay: str) -> str:
    """Both unit files as text, to be read before they are installed."""
    cache = "%h/.cache/fedharmony"
    words = {
        "name": settings.site.name,
        "file": file.absolute(),
        "socket": settings.socket,
        "python": sys.executable,
        "superlink": superlink,
        "owner": owner,
        "relay": relay,
        "group": "fedharmony",
        "ca": "/etc/fedharmony/ca.crt",
        "key": f"/etc/fedharmony/{settings.site.name}.key",
        "writes": f"{settings.memory} {settings.socket.parent} {cache}",
    }
    return f"{WORKER.format(**words)}\n{RELAY.format(**words)}"
