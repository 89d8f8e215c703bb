"""Real federations on Flower: the server's side, the relay at a site, and the operator's tools."""

import os

# Before anything of Flower or Ray is imported: they send nothing home, and install nothing.
os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
