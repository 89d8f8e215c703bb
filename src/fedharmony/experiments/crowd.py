"""How many runs go on at once, and where."""

from __future__ import annotations

import math
from dataclasses import dataclass

from fedharmony.errors import ConfigError


@dataclass(frozen=True)
class Crowd:
    """Runs at once on one machine; they take the devices in turn.

    >>> Crowd(4, ("cuda:0", "cuda:1")).neighbours, Crowd(3, ("cuda:0", "cuda:1")).neighbours
    (2, 2)

    Attributes:
        size: how many.
        devices: by name; none are left to the settings.
    """

    size: int = 1
    devices: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse devices that nobody would use."""
        if self.size < len(self.devices):
            raise ConfigError(
                f"--device {','.join(self.devices)} names {len(self.devices)} devices for --jobs "
                f"{self.size}. Give at least as many jobs, or leave --jobs out."
            )

    @property
    def device(self) -> str | None:
        """The first device, if one is named."""
        return next(iter(self.devices), None)

    @property
    def neighbours(self) -> int:
        """Runs that share a device at most."""
        return math.ceil(self.size / max(1, len(self.devices)))


#: One run after the other.
ALONE = Crowd()
