"""How the training images are split over the clients."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedharmony.report import svg
from fedharmony.report.charts import MOST_NAMED, Picture, column_names, row_names, y_axis
from fedharmony.report.load import Runs
from fedharmony.report.order import LabelOrder, label_order
from fedharmony.report.panel import Panel, Section, panels
from fedharmony.report.svg import Array, Drawing, Scale

_WORDS = {
    "size_min": "images, smallest client",
    "size_median": "images, median client",
    "size_max": "images, largest client",
    "labels_seen_mean": "labels a client has, mean",
    "labels_seen_min": "labels a client has, fewest",
    "left_out": "images that no client holds",
    "absent_pairs": "client-label pairs without positives",
    "jensen_shannon": "label skew (Jensen-Shannon, nats)",
    "correlation_drift": "correlation drift (RMSE to global φ)",
    "correlation_drift_iid": "the same for a random split (noise floor)",
    "drift_clients": "clients behind the drift",
    "sha256": "partition, SHA-256",
}


@panels.register("clients")
class Clients(Panel):
    """Who holds how many images, with which labels."""

    place = 30

    def draw(self, runs: Runs) -> Section | None:
        """The picture of the split, and its numbers."""
        facts = tuple(
            (_WORDS.get(str(k), str(k).replace("_", " ")), _value(v))
            for k, v in runs.first.split.items()
            if isinstance(v, str | int | float)
        )
        run = runs.with_matrix("client_sizes")
        if run is None:
            return Section("Clients", "How the images are split.", facts=facts) if facts else None
        order = label_order(runs, run)
        shares = run.matrices.get("client_label_shares")
        if shares is not None and len(order.index) != shares.shape[1]:
            shares = None
        sizes, clients = run.matrices["client_sizes"], run.start.get("client_names") or ()
        picture = client_picture(sizes, shares, order, run.paired, clients)
        lead = "How the training images are split: each column is a client."
        return Section("Clients", lead, (picture,), facts=facts)


def _value(value: str | int | float) -> str:
    if isinstance(value, str):
        return value
    return f"{value:,}" if isinstance(value, int) else f"{value:,.4g}"


def client_picture(
    sizes: Array,
    shares: Array | None,
    order: LabelOrder,
    labels: Sequence[str],
    clients: Sequence[str] = (),
) -> Picture:
    """Who holds what: images per client, and below the share of them that carries each label.

    ``shares`` has a row for each client or group of clients, largest first (see
    :func:`fedharmony.partition.report.label_shares`). Of many named clients only the first and the
    last is told.
    """
    rows = len(order.index) if shares is not None else 0
    named = 0 < rows <= MOST_NAMED and len(labels) == rows
    names = [svg.printable(labels[i], 18) for i in order.index] if named else []
    left = svg.margin(names, 38)
    top, bars, width = 6.0, 84.0, svg.WIDTH - left - 6
    below = (max(120.0, 11.5 * rows) if named else 240.0) if rows else 0.0
    end = top + bars + (12 + below if below else 0)
    by_size = np.argsort(-sizes, kind="stable") if len(clients) == len(sizes) else ()
    called = [svg.printable(clients[k], 18) for k in by_size]
    columns = called if len(called) <= MOST_NAMED else []
    foot = svg.margin(columns) if columns else 0.0
    drawing = Drawing(end + foot + 22)
    heights = svg.shrink(np.sort(sizes)[None, ::-1], svg.known_mean)[0]
    _bars(drawing, heights, left, top, width, bars)
    note = (
        f"Bars: images per client (least {int(sizes.min()):,}, median {np.median(sizes):,.0f}, "
        f"most {int(sizes.max()):,})."
    )
    if shares is not None:
        cells = svg.shrink(shares.T[order.index], svg.known_mean)
        limit = max(0.05, math.ceil(20 * float(np.max(cells, initial=0.0)) - 1e-9) / 20)
        place = (left, top + bars + 12, width, below)
        drawing.image(svg.sequential(cells, limit), *place)
        row_names(drawing, names, left - 4, place[1], below / max(rows, 1))
        note += (
            " Cells: share of a client's images that carry the label, from none (blank) to "
            f"{100 * limit:.0f} % (full colour)."
        )
    if called and not columns:
        note += f" The largest client is {called[0]}, the smallest {called[-1]}."
    column_names(drawing, columns, left, end + 4, width / len(sizes))
    text = f"{len(sizes):,} clients, largest first"
    drawing.text(left + width / 2, end + foot + 14, text, colour=svg.MUTED, anchor="middle")
    described = "Images per client, and share of them carrying each label"
    return Picture("Images per client and label shares", drawing.svg(described), note)


def _bars(
    drawing: Drawing, heights: Array, left: float, top: float, width: float, height: float
) -> None:
    """A bar for each client, or for neighbours of one size; more than 120 become one area."""
    up = Scale(0, 1.05 * max(float(heights.max()), 1.0), top + height, top)
    y_axis(drawing, up, left, left + width, up.ticks(3, whole=True))
    step = width / len(heights)
    gap = 0.11 * step if len(heights) <= 120 else 0.0
    outline = [(left, up(0))]
    for i, value in enumerate(heights):
        start, stop = left + step * i + gap, left + step * (i + 1) - gap
        outline += [(start, up(0)), (start, up(value)), (stop, up(value)), (stop, up(0))]
    drawing.area(outline, svg.style(0).colour, 1.0)
    drawing.line([(left, up(0)), (left + width, up(0))], svg.MUTED, 0.8)
