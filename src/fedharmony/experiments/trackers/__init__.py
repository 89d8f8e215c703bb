"""Trackers: programs that show runs as they go; one file each, found by themselves."""

from fedharmony.experiments.trackers.base import Tracker, trackers

__all__ = ["Tracker", "trackers"]
