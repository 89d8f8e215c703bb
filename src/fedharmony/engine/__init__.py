"""Local training of many clients at once, sampling, checkpoints, and the round loop."""
