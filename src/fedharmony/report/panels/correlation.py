"""Which labels occur together: the truth, what clients agreed on, and what models learned."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedharmony.report import svg
from fedharmony.report.charts import MOST_NAMED, Picture, column_names, row_names
from fedharmony.report.load import Runs
from fedharmony.report.order import LabelOrder, label_order
from fedharmony.report.panel import Panel, Section, count, panels
from fedharmony.report.svg import Array, Drawing

#: Labels up to which every cell says its value.
MOST_VALUES = 20


@panels.register("correlation")
class Correlation(Panel):
    """Heat maps of label correlations, all on one scale."""

    place = 20

    def draw(self, runs: Runs) -> Section | None:
        """The true matrix first, then what there is of each method."""
        reference = runs.with_matrix("true")
        if reference is None:
            return None
        defined = reference.matrices.get("true_defined")
        true = off_diagonal(reference.matrices["true"], defined)
        maps = [("True: the test labels", true, "")]
        planted = runs.with_matrix("planted", reference)
        if planted is not None:
            values = off_diagonal(planted.matrices["planted"])
            maps.append(("Planted: how the data were made", values, ""))
        for name, group in runs.groups.items():
            run = next((r for r in group if "learned" in r.matrices), None)
            if run is None or run.paired != reference.paired:
                continue
            prefix = "" if runs.alone else f"{name}: "
            if "consensus" in run.matrices:
                known = run.matrices.get("consensus_known")
                values = off_diagonal(run.matrices["consensus"], known)
                maps.append((_capital(f"{prefix}consensus of the clients"), values, ""))
            learned = off_diagonal(run.matrices["learned"], defined)
            pearson = run.structure.get("soft_pearson", math.nan)
            note = f"Pearson r with the truth {pearson:.2f}" if math.isfinite(pearson) else ""
            note += f" (seed {run.seed})" if note and runs.seeds > 1 else ""
            maps.append((_capital(f"{prefix}learned by the model"), learned, note))
            maps.append((_capital(f"{prefix}learned − true"), learned - true, ""))
        limit = common_limit([values for _, values, _ in maps])
        order = label_order(runs, reference)
        pictures = tuple(
            correlation_map(title, values, order, reference.paired, limit, note)
            for title, values, note in maps
        )
        size = len(true)
        unknown = any(np.isnan(values).sum() > size for _, values, _ in maps)  # diagonals are nan
        lead = _lead(size, len(reference.classes), order, unknown)
        scale = (f"−{limit:.1f}", f"+{limit:.1f}")
        return Section("Label correlation", lead, pictures, scale=scale)


def _lead(size: int, classes: int, order: LabelOrder, unknown: bool) -> str:
    lead = "Which labels occur together (φ coefficient). Rows and columns have the same order"
    if order.clusters:
        lead += f": by cluster, {count(len(order.clusters), 'cluster')} framed"
        lead += " and numbered" if size > MOST_NAMED else ""
    else:
        lead += ", which puts correlated labels side by side"
    lead += ". The diagonal is left blank"
    lead += "; hatched pairs are not known (a label does not occur)." if unknown else "."
    if size <= MOST_VALUES:
        lead += " Figures are hundredths."
    if size < classes:
        lead += f" Of {classes:,} labels the {size:,} most frequent are compared."
    if size > svg.MOST_CELLS:
        lead += f" {size:,} labels are averaged down to {svg.MOST_CELLS} cells per side."
    return lead


def _capital(text: str) -> str:
    return text if ":" in text else text[:1].upper() + text[1:]


def off_diagonal(matrix: Array, known: Array | None = None) -> Array:
    """A copy with nan where the correlation is not known; the diagonal says nothing and is nan."""
    result = matrix.astype(np.float64).copy()
    if known is not None:
        mask = known > 0
        result[~(mask if mask.ndim == 2 else np.outer(mask, mask))] = np.nan
    np.fill_diagonal(result, np.nan)
    return result


def common_limit(matrices: Sequence[Array]) -> float:
    """The end of a shared colour scale: the largest known size, rounded up to a tenth.

    Large matrices use their 99.9th percentile, so that one odd pair does not wash out the rest.

    >>> common_limit([np.array([[np.nan, 0.42], [0.1, np.nan]])])
    0.5
    """
    sizes = [np.abs(m[np.isfinite(m)]) for m in matrices]
    peaks = [float(np.quantile(s, 0.999) if s.size > 10_000 else s.max()) for s in sizes if s.size]
    return min(1.0, max(0.1, math.ceil(10 * max(peaks, default=1.0) - 1e-9) / 10))


def correlation_map(
    title: str,
    matrix: Array,
    order: LabelOrder,
    labels: Sequence[str],
    limit: float,
    note: str = "",
) -> Picture:
    """A label correlation matrix in the given order, clusters framed, diagonal left blank.

    The matrix is from :func:`off_diagonal`: nan is hatched. ``limit`` ends the colour scale on both
    sides of zero.
    """
    size = len(matrix)
    names = [svg.printable(labels[i], 18) for i in order.index] if len(labels) == size else []
    names = names if len(names) <= MOST_NAMED else []
    left = svg.margin(names) if names else 24.0
    side = svg.WIDTH - left - 4
    step = side / size
    drawing = Drawing(4 + side + (left - 4 if names else 4))
    ordered = matrix[np.ix_(order.index, order.index)]
    pixels = svg.diverging(svg.shrink(ordered, svg.known_mean), limit)
    if len(pixels) == size:  # otherwise each cell on the diagonal holds other pairs, too
        pixels[np.eye(size, dtype=bool)] = 0
    drawing.image(pixels, left, 4, side, side)
    for first, end in order.clusters:
        length = step * (end - first)
        place = (left + step * first, 4 + step * first, length, length)
        drawing.rect(*place, fill="none", stroke=svg.INK, stroke_width=1.1)
    row_names(drawing, names, left - 4, 4, step)
    column_names(drawing, names, left, 4 + side + 4, step)
    if not names:
        free = 0.0  # where the next number of a cluster has room
        for i, (first, end) in enumerate(order.clusters):
            middle = 4 + step * (first + end) / 2
            if middle >= free:
                drawing.text(left - 4, middle, str(i + 1), colour=svg.MUTED, anchor="end")
                free = middle + svg.FONT
    words = f"+{limit:.1f}; hatched: unknown"
    if size <= MOST_VALUES:
        _write_values(drawing, ordered, left, step)
        words = f"{words}; cells: hundredths"
    described = drawing.svg(f"Heat map: {title}")
    return Picture(title, described, note, colours=(f"−{limit:.1f}", words))


def _write_values(drawing: Drawing, ordered: Array, left: float, step: float) -> None:
    """Every known value, in hundredths."""
    places = [
        (left + step * (column + 0.5), 4 + step * (row + 0.5), svg.plain(round(100 * value)))
        for (row, column), value in np.ndenumerate(ordered)
        if np.isfinite(value)
    ]
    drawing.figures(places, size=min(svg.FONT, 0.5 * step))
