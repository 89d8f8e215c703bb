"""Shared test set-up: one thread per worker, so that xdist workers do not fight over cores."""

import pytest
import torch

from fedharmony import fallbacks

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def no_fallbacks_of_other_tests() -> None:
    """Each test counts its own, and sees their traces."""
    fallbacks.drain()
    fallbacks._traced.clear()
