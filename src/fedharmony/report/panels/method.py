"""Numbers that the method itself reports."""

from __future__ import annotations

from fedharmony.report.charts import curve
from fedharmony.report.load import Runs
from fedharmony.report.panel import Panel, Section, legend, panels, series

_MOST = 12
#: What a number says; those of methods from elsewhere stand without a sentence.
_SENTENCES = {
    "alpha": "How much client sizes decide in aggregation: 1 is by size alone, 0 by quality alone.",
    "align_weight": "The weight of the correlation loss beside the task loss.",
    "discrepancy": "Mean distance of a client's correlations to the consensus of the others.",
    "effective_clients": "How many equally weighted clients the weights are worth.",
    "cluster_agreement": "How far label clusters are those of the round before (1: the same).",
    "clients_listed": "Clients whose image statistics every client may draw from.",
    "normalisation_shift": "Distance of the mean of all images from the usual mean, in deviations.",
    "feature_norm": "Mean length of an image's features before they are put on the sphere.",
    "pull_strength": "Mean stiffness of the pull towards the other clients' models.",
}


@panels.register("method")
class InsideTheMethod(Panel):
    """The log of a method, a curve for each number."""

    place = 60

    def draw(self, runs: Runs) -> Section | None:
        """The first twelve numbers in the order of the log."""
        keys = list(dict.fromkeys(key for run in runs.runs for key in run.log_keys))
        curves = {key: series(runs, "log", key) for key in keys[:_MOST]}
        pictures = tuple(
            curve(key.replace("_", " "), found, rounds=runs.rounds, note=_SENTENCES.get(key, ""))
            for key, found in curves.items()
            if found
        )
        if not pictures:
            return None
        lead = "Numbers the method itself reports after each round."
        if len(keys) > _MOST:
            lead += f" The first {_MOST} of {len(keys)} are shown."
        drawn = {s.name for found in curves.values() for s in found}
        names = [name for name in runs.groups if name in drawn]
        return Section("Inside the method", lead, pictures, legend(runs, names))
