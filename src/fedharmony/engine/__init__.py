"""How stacks of clients train on a device, sweep over their data, and remember."""
