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
# Folders that are not there yet would stop the unit. The "+" makes them as root.
ExecStartPre=+/bin/sh -c 'test -d "$$1" || install -d -o {owner} -g {group} -m 0700 "$$1"' \\
  sh {memory}
ExecStartPre=+/bin/sh -c 'test -d "$$1" || install -d -o {owner} -g {group} -m 0750 "$$1"' \\
  sh {sockets}
# Decoded images; systemd makes this folder under /var/cache.
CacheDirectory=fedharmony
CacheDirectoryMode=0700
Environment=FEDHARMONY_CACHE=/var/cache/fedharmony
ExecStart={python} -m fedharmony site serve {file}
Restart=always
RestartSec=10
NoNewPrivileges=yes
ProtectSystem=strict
ReadWritePaths={memory} {sockets}
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
# Whatever lies in a home folder is hidden from it: Python and the socket must lie elsewhere.
ProtectHome=yes

[Install]
WantedBy=multi-user.target
"""


def units(file: Path, settings: SiteSettings, superlink: str, owner: str, relay: str) -> str:
    """Both unit files as text, to be read before they are installed."""
    paths = {
        "file": file.absolute(),
        "python": Path(sys.executable),
        "memory": settings.memory,
        "sockets": settings.socket.parent,
        "socket": settings.socket,
        "ca": Path("/etc/fedharmony/ca.crt"),
        "key": Path(f"/etc/fedharmony/{settings.site.name}.key"),
    }
    words = {
        "name": settings.site.name,
        "superlink": superlink,
        "owner": owner,
        "relay": relay,
        "group": "fedharmony",
        **{name: _word(path) for name, path in paths.items()},
    }
    return f"{WORKER.format(**words)}\n{RELAY.format(**words)}"


def _word(path: Path) -> str:
    """A path as one word of a unit file, in which % begins a specifier.

    >>> _word(Path("/data/50% of it"))
    '"/data/50%% of it"'
    """
    text = str(path).replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%")
    return f'"{text}"'
