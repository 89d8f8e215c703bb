"""Shared test set-up: one thread per worker, so that xdist workers do not fight over cores."""

import torch

torch.set_num_threads(1)
