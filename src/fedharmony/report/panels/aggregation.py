"""How much each client counts when the server averages the models."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import numpy as np
import torch

from fedharmony.aggregate import effective_clients
from fedharmony.report import svg
from fedharmony.report.charts import MOST_NAMED, Picture, Series, curve, round_axis, row_names
from fedharmony.report.load import Runs, RunView
from fedharmony.report.panel import Panel, Section, legend, panels, styles
from fedharmony.report.svg import Array, Drawing, Scale
from fedharmony.types import Index


@panels.register("aggregation")
class Aggregation(Panel):
    """Effective number of clients, and weights by client and round."""

    place = 50

    def draw(self, runs: Runs) -> Section | None:
        """Weight maps share one scale; methods with the same weights share a map."""
        found = {n: next((r for r in group if r.weights), None) for n, group in runs.groups.items()}
        shown = {n: run for n, run in found.items() if run is not None and not run.central}
        if not shown:
            return None
        looks = styles(runs)
        lines = [
            Series(n, looks[n], tuple(effective(r, lambda r, k, w: w) for r in runs.groups[n]))
            for n in shown
        ]
        peers = runs.groups[next(iter(shown))]  # all methods are given the same cohorts
        note = "(Σw)² / Σw². Dashed: equal weights"
        equal = tuple(effective(run, lambda r, k, w: 1.0) for run in peers)
        lines.append(Series("equal weights", svg.DASHED, equal))
        sized = [run for run in peers if "client_sizes" in run.matrices]
        by_size = [effective(run, lambda r, k, w: r.matrices["client_sizes"][k]) for run in sized]
        if by_size:
            lines.append(Series("weights by size", svg.DOTTED, tuple(by_size)))
            note += "; dotted: weights by client size"
        title = "Effective number of clients"
        pictures = [curve(title, lines, rounds=runs.rounds, note=f"{note}.")]
        weights = [w for run in shown.values() for ws in run.weights.values() for w in ws.values()]
        limit = max(filter(math.isfinite, weights), default=1.0)
        for names in same_weights(shown):
            run = shown[names[0]]
            who = names[0] if len(names) == 1 else f"{len(names)} methods"
            title = "Weights by client and round" if runs.alone else f"{who}: weights"
            title += f" (seed {run.seed})" if runs.seeds > 1 else ""
            note = f"{', '.join(names)} have the same weights. " if len(names) > 1 else ""
            pictures.append(weights_map(title, run, limit, note))
        lead = "How much each client counts when the server averages the models."
        return Section("Aggregation", lead, tuple(pictures), legend(runs, shown))


def effective(run: RunView, weigh: Callable[[RunView, int, float], float]) -> dict[int, float]:
    """Effective number of clients by round; ``weigh`` makes another weight of a client's own."""
    found = {}
    for round, weights in run.weights.items():
        values = torch.tensor([weigh(run, k, w) for k, w in weights.items()], dtype=torch.float64)
        found[round] = effective_clients(values / values.sum())
    return {round: value for round, value in found.items() if math.isfinite(value)}


def same_weights(runs: Mapping[str, RunView]) -> list[list[str]]:
    """Group runs whose clients had the same weights in every round (to six decimals)."""
    groups: dict[str, list[str]] = {}
    for name, run in runs.items():
        rounded = [sorted((k, round(w, 6)) for k, w in ws.items()) for ws in run.weights.values()]
        groups.setdefault(str(rounded), []).append(name)
    return list(groups.values())


def weights_map(title: str, run: RunView, limit: float, note: str = "") -> Picture:
    """Aggregation weights: a row per client (largest on top), a column per round.

    Colour is the weight, up to ``limit``; a client that was left out of a round is marked
    in the warning colour; blank cells were not in the cohort.
    """
    sizes = run.matrices.get("client_sizes")
    clients = len(sizes) if sizes is not None else int(run.start.get("clients") or 0)
    seen = [int(k) for e in run.rounds for k in (*(e.get("weights") or {}), *e.get("cohort", ()))]
    clients = max([clients, *(k + 1 for k in seen)])
    rows = client_rows(np.zeros(clients) if sizes is None else sizes)
    weights = np.full((min(clients, svg.MOST_CELLS), max(run.rounds_total, 1)), np.nan)
    absent = np.zeros_like(weights)
    for number, found in run.weights.items():
        for client, weight in found.items():
            place = rows[client], number - 1
            weights[place] = np.fmax(weights[place], weight)
    for event in run.rounds:
        lost = [entry["client"] for entry in event.get("left_out", ())]
        absent[rows[[int(k) for k in lost]], int(event["round"])] = 1
    pixels = svg.sequential(svg.shrink(weights, svg.known_most), max(limit, 1e-12), least=0.12)
    pixels[svg.shrink(absent, svg.known_most) > 0] = (*svg.POSITIVE, 255)
    named = len(run.start.get("client_names") or ()) == clients <= MOST_NAMED
    names = [svg.printable(run.named(k), 18) for k in np.argsort(rows)] if named else []
    drawing, left, height = Drawing(250), 16 + svg.margin(names, 14.0), 208.0
    drawing.image(pixels, left, 6, svg.WIDTH - left - 8, height)
    round_axis(drawing, Scale(0.5, weights.shape[1] + 0.5, left, svg.WIDTH - 8), 6 + height)
    row_names(drawing, names, left - 4, 6, height / max(clients, 1))
    words = "clients, largest on top" if sizes is not None else "clients"
    drawing.text(
        8 if names else 14, 6 + height / 2, words, colour=svg.MUTED, anchor="middle", turn=-90
    )
    note += f"Blank: not in the cohort; full colour: weight {limit:.2f}."
    if absent.any():
        note += " Orange: dropped out, failed, or left out by the rule."
    return Picture(title, drawing.svg(f"Heat map: {title}"), note)


def client_rows(sizes: Array) -> Index:
    """The row of each client, largest first; neighbours share one if there are more than cells.

    >>> client_rows(np.array([3.0, 9.0, 5.0])).tolist()
    [2, 0, 1]
    """
    rank = np.empty(len(sizes), np.int64)
    rank[np.argsort(-sizes, kind="stable")] = np.arange(len(sizes))
    rows = min(len(sizes), svg.MOST_CELLS)
    ends = len(sizes) * np.arange(1, rows + 1) // max(1, rows)
    return np.searchsorted(ends, rank, side="right")
