"""Shared test set-up: one thread per worker, so that xdist workers do not fight over cores.

Hypothesis times nothing: how long an example takes depends on what else the machine does.
"""

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

from fedharmony import fallbacks

too_slow = [HealthCheck.too_slow]
settings.register_profile("untimed", deadline=None, suppress_health_check=too_slow)
settings.load_profile("untimed")
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_fallbacks_of_other_tests() -> None:
    """Each test counts its own, and sees their traces."""
    fallbacks.drain()
    fallbacks._traced.clear()


def pytest_xdist_auto_num_workers() -> int:
    """One for each core, eight at most. With ``--pdb`` xdist takes none."""
    return min(os.cpu_count() or 1, 8)
