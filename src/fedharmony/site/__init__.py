"""A site of a federation: its own data, labels and rules, and the worker that answers for it."""
