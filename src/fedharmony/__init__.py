"""Federated multi-label learning: FedHarmony and the methods it is compared with."""

__version__ = "0.1.0"
