"""The figures of the report, drawn with matplotlib and returned as SVG text.

Made for embedding in one page that is read on a desk, on a phone, on paper, by day and by night:

- **Small multiples.** Every figure is drawn for a column about 350 pixels wide, so that its text
  stays legible when the columns stack on a phone.
- **One drawing for both themes.** Colours are drawn as placeholders and replaced by CSS variables
  with light-theme fallbacks. Heat maps encode the sign as a hue and the size as opacity: zero is
  the colour of the page in either theme.
- **Readable without colour.** Methods differ in colour (a palette made for colour-blind readers),
  dash pattern and marker.
- **Same input, same bytes.** No dates, no random identifiers; the text is real text, not outlines.

Only the object-oriented interface of matplotlib is used: no figure registry, no backend is touched.
"""

from __future__ import annotations

import html
import io
import math
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import matplotlib as mpl
import numpy as np
import numpy.typing as npt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from fedharmony.report.load import Array, LabelScore, RunView, number
from fedharmony.types import Index

Pixels: TypeAlias = npt.NDArray[np.uint8]

#: Width of every figure in pixels at scale one.
WIDTH = 352
#: Labels shown by name along a heat map; beyond this the names would not be legible.
MOST_NAMED_LABELS = 32
#: Labels shown in a chart with one row per label.
MOST_ROWS = 40
#: Methods in a chart beyond which bands over seeds are left out.
MOST_BANDS = 4
#: Heat maps with more cells per side are averaged down to this.
MOST_CELLS = 400

_FONT = 11.0
_LETTER = 0.58 * _FONT  # a generous mean width of a letter

# Placeholder colours and the CSS variables (with light-theme values) that take their place.
_INK, _MUTED, _GRID, _PAPER = "#010101", "#010102", "#010103", "#010104"
_SERIES_LIGHT = (
    "#0067b1",
    "#d1500a",
    "#00845c",
    "#a8509a",
    "#b58400",
    "#2b9ad6",
    "#737a86",
    "#1b1e23",
)
_SERIES = tuple(f"#0102{i:02x}" for i in range(len(_SERIES_LIGHT)))
_VARIABLES = {
    _INK: "var(--ink,#1b1e23)",
    _MUTED: "var(--muted,#5b626e)",
    _GRID: "var(--grid,#e6e8ec)",
    _PAPER: "var(--paper,#ffffff)",
    **{
        placeholder: f"var(--s{i + 1},{colour})"
        for i, (placeholder, colour) in enumerate(zip(_SERIES, _SERIES_LIGHT, strict=True))
    },
}
_DASHES: tuple[tuple[float, ...], ...] = (
    (),
    (),
    (6, 2),
    (1.4, 1.8),
    (7, 2, 1.4, 2),
    (3, 1.6),
    (9, 2.4),
    (),
)
_MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p")
_STROKE: dict[str, Any] = {
    "marker": "|",
    "markersize": 8.5,
    "markeredgewidth": 1.3,
    "linestyle": "none",
}
# The shapes of the markers as SVG paths around the origin, for legends.
_OUTLINES = {
    "o": "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
    "s": "M-3-3h6v6h-6z",
    "^": "M0-3.6L3.6 3.2H-3.6z",
    "D": "M0-4.2L4.2 0L0 4.2L-4.2 0z",
    "v": "M0 3.6L3.6-3.2H-3.6z",
    "P": "M-1.3-3.8h2.6v2.5h2.5v2.6h-2.5v2.5h-2.6v-2.5h-2.5v-2.6h2.5z",
    "X": "M0-1.9L2-3.9L3.9-2L1.9 0L3.9 2L2 3.9L0 1.9L-2 3.9L-3.9 2L-1.9 0L-3.9-2L-2-3.9z",
    "p": "M0-3.9L3.7-1.2L2.3 3.2H-2.3L-3.7-1.2z",
}

# Heat maps: mid-tone hues that stand out on white and on near-black alike.
_POSITIVE, _NEGATIVE, _AMOUNT = (217, 84, 26), (38, 120, 214), (38, 120, 214)
_UNKNOWN = (128, 128, 128, 64)

_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.image_inline": True,
    "text.parse_math": False,
    "text.usetex": False,
    "font.family": ["DejaVu Sans"],
    "font.size": _FONT,
    "axes.unicode_minus": True,
    "axes.edgecolor": _MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.spines.left": False,
    "axes.facecolor": "none",
    "axes.labelcolor": _MUTED,
    "axes.labelsize": _FONT,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _GRID,
    "grid.linewidth": 0.8,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "xtick.labelsize": _FONT,
    "ytick.labelsize": _FONT,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.major.width": 0.8,
    "text.color": _INK,
    "lines.linewidth": 1.8,
    "lines.solid_capstyle": "round",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True)
class Picture:
    """A figure: title and note as plain text, the drawing as SVG text."""

    title: str
    svg: str
    note: str = ""


@dataclass(frozen=True)
class Series:
    """One method in a chart: its name, its place in the palette, and one curve per seed.

    ``slot`` None draws a thin reference line instead, the first dashed, the second dotted.
    """

    name: str
    slot: int | None
    curves: tuple[Mapping[int, float], ...]

    def statistics(self) -> tuple[Array, Array, Array]:
        """Rounds, and over the seeds that have a value there, mean and sample deviation.

        >>> rounds, mean, deviation = Series("a", 0, ({1: 2.0, 2: 3.0}, {1: 4.0})).statistics()
        >>> rounds.tolist(), mean.tolist(), [round(float(d), 3) for d in deviation]
        ([1.0, 2.0], [3.0, 3.0], [1.414, 0.0])
        """
        rounds = sorted({r for curve in self.curves for r in curve})
        values = [[c[r] for c in self.curves if r in c] for r in rounds]
        mean = [float(np.mean(v)) for v in values]
        deviation = [float(np.std(v, ddof=1)) if len(v) > 1 else 0.0 for v in values]
        return np.array(rounds, dtype=np.float64), np.array(mean), np.array(deviation)


@dataclass(frozen=True, eq=False)
class LabelOrder:
    """An order of the labels and the clusters along it, as ``(first, one past last)``."""

    index: Index
    clusters: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class Key:
    """How a method is drawn, for a legend outside the figures."""

    name: str
    variable: str
    dashes: str
    outline: str


# --------------------------------------------------------------------------------- SVG text


@contextmanager
def _drawing(name: str) -> Iterator[None]:
    """The package's own style, whatever the reader's matplotlibrc says."""
    with mpl.rc_context(), warnings.catch_warnings():
        # A label in a script that the measuring font lacks is drawn by the browser all the same.
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from", category=UserWarning)
        mpl.rcdefaults()
        mpl.rcParams.update(_STYLE)
        mpl.rcParams["svg.hashsalt"] = name
        yield


def _box(
    height: float, left: float, right: float = 10, top: float = 6, bottom: float = 36
) -> tuple[float, float, float, float]:
    """Axes of a figure ``WIDTH`` wide, in fractions of the figure; margins in pixels."""
    return (
        left / WIDTH,
        bottom / height,
        (WIDTH - left - right) / WIDTH,
        (height - top - bottom) / height,
    )


def _canvas(height: float, **margins: float) -> tuple[Figure, Axes]:
    """A figure ``WIDTH`` wide with one set of axes; margins as in :func:`_box`."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
    return figure, figure.add_axes(_box(height, **margins))


def _svg(figure: Figure, name: str, description: str) -> str:
    """The figure as an ``<svg>`` element for an HTML page."""
    buffer = io.StringIO()
    # No metadata: a date would make every file different.
    figure.savefig(
        buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type"))
    )
    return _embeddable(buffer.getvalue(), name, description)


_TAG = re.compile(r"<[^>]*>")
_LONG_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_REFERENCE = re.compile(r'(?:url\(#|href="#)([^)"]+)')
_SENTINEL = re.compile("|".join(_VARIABLES))
_FONT_SHORTHAND = re.compile(r"font: ([\d.]+)px [^;\"]*")


def _embeddable(svg: str, name: str, description: str) -> str:
    """Turn matplotlib's SVG file into an element that can stand many times in one page.

    Colours become CSS variables, identifiers get the figure's name as a prefix, unused ones go,
    fonts are inherited from the page, and coordinates are rounded to a hundredth of a pixel.
    """
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r"<style[^>]*>[^<]*</style>", "", svg)
    wanted = set(_REFERENCE.findall(svg))

    def identifier(match: re.Match[str]) -> str:
        return f' id="{name}-{match[1]}"' if match[1] in wanted else ""

    kept: list[bool] = []  # for each open group, whether it says anything

    def tidy(match: re.Match[str]) -> str:
        tag = re.sub(r' id="([^"]*)"', identifier, match[0])
        if tag in ("<g>", "<g/>"):
            kept.extend([False] if tag == "<g>" else [])
            return ""
        if tag == "</g>":
            return tag if kept.pop() else ""
        if tag.startswith("<g"):
            kept.append(True)
        if tag.startswith("<image"):
            return tag.replace("xlink:href", "href")
        tag = re.sub(r"url\(#", f"url(#{name}-", tag)
        tag = re.sub(r'(?:xlink:)?href="#', f'href="#{name}-', tag)
        tag = _SENTINEL.sub(lambda m: _VARIABLES[m[0]], tag)
        tag = _FONT_SHORTHAND.sub(r"font-size: \1px", tag)
        tag = re.sub(r" font-family: [^;\"]*;?| transform=\"rotate\(-?0 [^)]*\)\"", "", tag)
        return _LONG_NUMBER.sub(lambda m: f"{float(m[0]):.2f}".rstrip("0").rstrip("."), tag)

    body = _TAG.sub(tidy, svg[svg.index(">") + 1 :])
    body = re.sub(r"<defs>\s*</defs>", "", body)
    body = re.sub(r"\s*\n\s*", "\n", body)
    box = re.search(r'viewBox="([^"]*)"', svg)
    assert box is not None, "matplotlib writes a viewBox"
    spoken = html.escape(printable(description))
    return f'<svg viewBox="{box[1]}" role="img" aria-label="{spoken}">{body.rstrip()}'


def printable(text: str, limit: int | None = None) -> str:
    """One line of text without control characters, cut to ``limit`` letters.

    >>> printable("a\\nb"), printable("a very long label", 8)
    ('a b', 'a very …')
    """
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"


def key(name: str, slot: int) -> Key:
    """How the method in palette place ``slot`` is drawn.

    >>> key("fedprox", 1)
    Key(name='fedprox', variable='var(--s2)', dashes='', outline='M-3-3h6v6h-6z')
    """
    place = slot % len(_SERIES)
    dashes = ",".join(f"{1.8 * d:g}" for d in _dashes(slot))
    return Key(name, f"var(--s{place + 1})", dashes, _OUTLINES[_MARKERS[place]])


def _dashes(slot: int) -> tuple[float, ...]:
    """A dash pattern; the second time round the palette the patterns shift by two."""
    return _DASHES[(slot + 2 * (slot // len(_DASHES))) % len(_DASHES)]


def _pen(slot: int) -> dict[str, Any]:
    place, dashes = slot % len(_SERIES), _dashes(slot)
    return {"color": _SERIES[place], "linestyle": (0, dashes) if dashes else "-"}


def _dot(slot: int, size: float = 6) -> dict[str, Any]:
    place = slot % len(_SERIES)
    return {
        "color": _SERIES[place],
        "marker": _MARKERS[place],
        "markersize": size,
        "markeredgecolor": _PAPER,
        "markeredgewidth": 0.7,
        "linestyle": "none",
    }


# ----------------------------------------------------------------------------------- curves


def _plain(value: float, digits: int = 4) -> str:
    return f"{value:.{digits}g}".replace("-", "−")


def curve(
    name: str,
    title: str,
    series: Sequence[Series],
    *,
    rounds: int,
    percent: bool = False,
    reference: tuple[str, float] | None = None,
    zoom: bool = False,
    note: str = "",
) -> Picture:
    """A quantity over the rounds: a line per method, a band of ± one deviation over seeds.

    With more than ``MOST_BANDS`` methods the bands are left out: they would hide the lines.

    Args:
        name: Identifier, unique in the page.
        title: What is drawn.
        series: The methods.
        rounds: Length of the horizontal axis: rounds the runs were to have.
        percent: Draw fractions in per cent.
        reference: Name and value of a trivial baseline. One that lies so far away that it would
            squeeze the curves into less than half of the height is named at the edge instead.
        zoom: Fit the vertical axis to the last three quarters of the rounds, so that methods that
            end close together can be told apart; what lies outside is cut off.
        note: Text beneath the figure.
    """
    scale = 100.0 if percent else 1.0
    shown = [s for s in series if any(s.curves)]
    references = [s for s in shown if s.slot is None]
    crowded = len(shown) - len(references) > MOST_BANDS
    height = 270 if crowded else 200
    with _drawing(name):
        figure, axes = _canvas(height, left=40)
        for entry, dashes in zip(references, ((4, 2), (1.2, 2)), strict=False):
            x, y, _ = entry.statistics()
            axes.plot(x, scale * y, color=_MUTED, linewidth=1, linestyle=(0, dashes), zorder=1.5)
        for entry in shown:
            if entry.slot is not None:
                _draw_line(axes, entry, entry.slot, scale, crowded)
        room = max(0.5, 0.02 * rounds)  # so that the last dot is whole
        axes.set_xlim(1 - room, max(rounds, 2) + room)
        if zoom:
            _zoom(axes, shown, scale, zoom_start(rounds))
        flat = percent and _widen(axes)
        _round_axis(axes)
        axes.yaxis.set_major_locator(_locator(6 if crowded else 4))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda v, _: _plain(v)))
        if reference is not None and math.isfinite(reference[1]):
            value = scale * reference[1]
            stretch = math.inf if flat else 1.0 if zoom else 2.0
            _draw_reference(axes, f"{reference[0]} {value:.1f}", value, stretch)
        if percent:
            _lift(axes)
        last = _name_last(axes, shown[0], scale, percent) if len(shown) == 1 else ""
        low, high = axes.get_ylim()
        widest = max((len(_plain(v)) for v in axes.get_yticks() if low <= v <= high), default=0)
        margins = {"left": max(40, 10 + _LETTER * widest), "right": 12 + _LETTER * len(last)}
        axes.set_position(_box(height, **margins))
        return Picture(title, _svg(figure, name, f"{title} over rounds"), note)


def zoom_start(rounds: int) -> int:
    """The first of the last three quarters of the rounds (1-based).

    >>> zoom_start(30), zoom_start(1)
    (8, 1)
    """
    return rounds // 4 + 1


def _zoom(axes: Axes, series: Sequence[Series], scale: float, first: int) -> None:
    late = [v for s in series for c in s.curves for r, v in c.items() if r >= first]
    if late and max(late) > min(late):
        margin = 0.05 * (max(late) - min(late))
        axes.set_ylim(scale * (min(late) - margin), scale * (max(late) + margin))


def _widen(axes: Axes) -> bool:
    """Show at least one point of per cent, and nothing below zero; says whether it was less."""
    low, high = axes.get_ylim()
    flat = high - low < 1
    if flat:
        low, high = low - 0.5, high + 0.5
    axes.set_ylim(max(low, 0.0), high)
    return flat


def _lift(axes: Axes) -> None:
    """Leave a little room below zero, so that a line at zero is not hidden by the axis."""
    low, high = axes.get_ylim()
    axes.set_ylim(min(low, -0.03 * high) if low <= 0 else low, high)


def _draw_line(axes: Axes, series: Series, slot: int, scale: float, crowded: bool) -> None:
    x, mean, deviation = series.statistics()
    y, band = scale * mean, scale * deviation
    if band.any() and not crowded:
        colour = _SERIES[slot % len(_SERIES)]
        axes.fill_between(x, y - band, y + band, color=colour, alpha=0.16, linewidth=0)
    axes.plot(x, y, **_pen(slot), linewidth=1.4 if crowded else 1.8)
    axes.plot(x[-1:], y[-1:], **_dot(slot), zorder=3)


def _name_last(axes: Axes, series: Series, scale: float, percent: bool) -> str:
    """Write the last value beside the end of the line; returns what was written."""
    x, mean, _ = series.statistics()
    last = scale * float(mean[-1])
    text = f"{last:.1f}" if percent else _plain(last, 3)
    axes.annotate(
        text, (x[-1], last), (7, 0), textcoords="offset points", va="center", annotation_clip=False
    )
    return text


def _round_axis(axes: Axes) -> None:
    locator = MaxNLocator(6, steps=[1, 2, 5, 10], integer=True, min_n_ticks=2)
    axes.xaxis.set_major_locator(locator)
    axes.set_xlabel("round", labelpad=2)


def _locator(ticks: int) -> MaxNLocator:
    return MaxNLocator(ticks, steps=[1, 2, 2.5, 5, 10])


def _draw_reference(axes: Axes, text: str, value: float, stretch: float) -> None:
    """A dotted line if the axis grows at most by the factor ``stretch``, else words at its edge."""
    low, high = axes.get_ylim()
    reach = max(high, value) - min(low, value)
    style: dict[str, Any] = {"color": _MUTED, "fontsize": _FONT - 1}
    if reach <= stretch * (high - low):
        margin = 0.06 * reach
        axes.set_ylim(min(low, value - margin), max(high, value + margin))
        axes.axhline(value, color=_MUTED, linewidth=1, linestyle=(0, (1.5, 2)))
        axes.annotate(
            text,
            (1, value),
            (0, 3),
            xycoords=("axes fraction", "data"),
            textcoords="offset points",
            ha="right",
            **style,
        )
    else:
        below = value < low
        axes.text(
            0.99,
            0.02 if below else 0.98,
            f"{'↓' if below else '↑'} {text}",
            ha="right",
            va="bottom" if below else "top",
            transform=axes.transAxes,
            **style,
        )


def strip(name: str, title: str, groups: Mapping[str, Sequence[float]], note: str = "") -> Picture:
    """Final values in per cent: a row per method, a stroke per seed, a filled mark for the mean."""
    names = [printable(g, 24) for g in groups]
    left = _margin(names)
    height = 28 + 20 * len(names)
    with _drawing(name):
        figure, axes = _canvas(height, left=left, right=14, bottom=22)
        for row, values in enumerate(groups.values()):
            known = [100 * v for v in values if math.isfinite(v)]
            if not known:
                continue
            colour = _SERIES[row % len(_SERIES)]
            axes.plot([min(known), max(known)], [row, row], color=colour, linewidth=1.2, alpha=0.6)
            if len(known) > 1:
                axes.plot(known, [row] * len(known), color=colour, **_STROKE)
            axes.plot([sum(known) / len(known)], [row], **_dot(row, 7))
        _rows(axes, names)
        axes.xaxis.set_major_locator(_locator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _plain(v)))
        axes.margins(x=0.08)
        low, high = axes.get_xlim()
        if high - low < 1:  # a span of noise should not look like a difference
            axes.set_xlim(low - 0.5, high + 0.5)
        return Picture(title, _svg(figure, name, f"{title} by method"), note)


def _margin(names: Sequence[str]) -> float:
    return 14 + _LETTER * max((len(n) for n in names), default=0)


def _rows(axes: Axes, names: Sequence[str]) -> None:
    """Make the vertical axis a list of names, first on top."""
    _names(axes, range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.grid(True, axis="x")


def _names(
    axes: Axes,
    positions: Iterable[float],
    names: Sequence[str],
    size: float = _FONT,
    pad: float = 3.5,
    colour: str = _INK,
) -> None:
    """Write names along the vertical axis, ``pad`` to its left, in place of ticks.

    Tick labels would look the same; but a tick is five objects, and takes long to make.
    """
    axes.set_yticks([])
    transform, vertical, horizontal = axes.get_yaxis_text1_transform(pad)
    style: dict[str, Any] = {"va": vertical, "ha": horizontal, "color": colour, "fontsize": size}
    for position, text in zip(positions, names, strict=True):
        axes.text(0, position, text, transform=transform, **style)


# -------------------------------------------------------------------------------- heat maps


def label_order(run: RunView | None, true: Array | None) -> LabelOrder:
    """Labels sorted by the run's clusters (in none: last), else along the correlation itself."""
    if run is not None and "clusters" in run.matrices:
        clusters = run.matrices["clusters"].astype(np.int64)
        keys = np.where(clusters < 0, np.iinfo(np.int64).max, clusters)
        index = np.argsort(keys, kind="stable").astype(np.int64)
        ordered = clusters[index]
        starts = [i for i in range(len(ordered)) if i == 0 or ordered[i] != ordered[i - 1]]
        spans = zip(starts, [*starts[1:], len(ordered)], strict=True)
        return LabelOrder(index, tuple((a, b) for a, b in spans if ordered[a] >= 0))
    if true is not None:
        return LabelOrder(spectral_order(true))
    return LabelOrder(np.zeros(0, dtype=np.int64))


def spectral_order(matrix: Array) -> Index:
    """Labels in the order of the Fiedler vector, so that correlated ones are neighbours.

    The vector belongs to the second smallest eigenvalue of the Laplacian ``D − A`` of the positive
    correlations ``A``; a small constant connects labels that would otherwise stand alone.

    >>> m = np.eye(4); m[0, 2] = m[2, 0] = m[1, 3] = m[3, 1] = 0.9
    >>> spectral_order(m).tolist() in ([0, 2, 1, 3], [1, 3, 0, 2], [2, 0, 3, 1], [3, 1, 2, 0])
    True
    """
    affinity = np.clip(np.nan_to_num(matrix), 0, None) + 1e-3
    np.fill_diagonal(affinity, 0.0)
    laplacian = np.diag(affinity.sum(axis=1)) - affinity
    vector = np.linalg.eigh((laplacian + laplacian.T) / 2)[1][:, min(1, len(matrix) - 1)]
    if vector[np.argmax(np.abs(vector))] < 0:  # the sign of an eigenvector is arbitrary
        vector = -vector
    return np.argsort(vector.round(9), kind="stable").astype(np.int64)


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
    name: str,
    title: str,
    matrix: Array,
    order: LabelOrder,
    labels: Sequence[str],
    limit: float,
    note: str = "",
) -> Picture:
    """A label correlation matrix in the given order, clusters framed, diagonal left blank.

    Args:
        name: Identifier, unique in the page.
        title: What is drawn.
        matrix: ``(C, C)`` from :func:`off_diagonal`; nan is drawn grey.
        order: Order of rows and columns.
        labels: Names in the order of the matrix.
        limit: End of the colour scale on both sides of zero.
        note: Text beneath the figure.
    """
    size = len(matrix)
    names = [printable(labels[i], 18) for i in order.index] if len(labels) == size else []
    named = 0 < len(names) <= MOST_NAMED_LABELS
    left = _margin(names) - 6 if named else 24
    side = WIDTH - left - 4
    with _drawing(name):
        figure, axes = _canvas(side + 8, left=left, right=4, top=4, bottom=4)
        ordered = matrix[np.ix_(order.index, order.index)]
        pixels = _diverging(_shrink(ordered, np.nanmean), limit)
        if len(pixels) == size:  # otherwise each cell on the diagonal holds other pairs, too
            pixels[np.eye(size, dtype=bool)] = 0
        _image(axes, pixels, (0, size, size, 0))
        for first, end in order.clusters:
            axes.add_patch(
                Rectangle(
                    (first, first),
                    end - first,
                    end - first,
                    fill=False,
                    edgecolor=_INK,
                    linewidth=1.1,
                    clip_on=False,
                    zorder=3,
                )
            )
        if named:
            _names(axes, np.arange(size) + 0.5, names, min(_FONT, 0.92 * side / size), pad=3)
        elif order.clusters:
            middles = [(a + b) / 2 for a, b in order.clusters]
            _names(axes, middles, [str(i + 1) for i in range(len(middles))], colour=_MUTED)
        _frame(axes)
        return Picture(title, _svg(figure, name, f"Heat map: {title}"), note)


def _shrink(values: Array, reduce: Callable[..., Array], most: int = MOST_CELLS) -> Array:
    """Reduce blocks of neighbouring cells until no side is longer than ``most``.

    >>> _shrink(np.arange(4.0).reshape(1, 4), np.nanmean, most=2).tolist()
    [[0.5, 2.5]]
    """
    for axis in (0, 1):
        length = values.shape[axis]
        if length > most:
            ends = [length * (i + 1) // most for i in range(most)]
            along = np.moveaxis(values, axis, 0)  # a view: taking along a far axis would copy all
            parts = [along[a:b] for a, b in zip([0, *ends], ends, strict=False)]
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Mean of empty slice|All-NaN", RuntimeWarning)
                blocks = [reduce(part, axis=0) for part in parts]
            values = np.stack(blocks, axis=axis)
    return values


def _rgba(shape: tuple[int, ...]) -> Pixels:
    return np.zeros((*shape, 4), dtype=np.uint8)


def _diverging(values: Array, limit: float) -> Pixels:
    """Hue by sign, opacity by size; unknown values grey."""
    pixels = _rgba(values.shape)
    known = np.isfinite(values)
    pixels[known & (values >= 0), :3] = _POSITIVE
    pixels[known & (values < 0), :3] = _NEGATIVE
    opacity = np.clip(np.abs(np.where(known, values, 0.0)) / limit, 0, 1)
    pixels[..., 3] = np.rint(255 * opacity).astype(np.uint8)
    pixels[~known] = _UNKNOWN
    return pixels


def _sequential(values: Array, limit: float, least: float = 0.0) -> Pixels:
    """Opacity by size, from ``least`` at zero to one at ``limit``; unknown values transparent."""
    pixels = _rgba(values.shape)
    known = np.isfinite(values)
    pixels[..., :3] = _AMOUNT
    opacity = least + (1 - least) * np.clip(np.where(known, values, 0.0) / limit, 0, 1)
    pixels[..., 3] = np.where(known, np.rint(255 * opacity), 0).astype(np.uint8)
    return pixels


def _image(axes: Axes, pixels: Pixels, extent: tuple[float, float, float, float]) -> None:
    """Show one cell per pixel, enlarged by whole numbers so that no viewer blurs the cells."""
    down, across = (max(1, MOST_CELLS // n) for n in pixels.shape[:2])
    enlarged = pixels.repeat(down, axis=0).repeat(across, axis=1)
    axes.imshow(enlarged, extent=extent, interpolation="none", aspect="auto")


def _frame(axes: Axes) -> None:
    """Thin frame, no ticks across: the look of every heat map."""
    axes.grid(False)
    axes.set_xticks([])
    for spine in axes.spines.values():
        spine.set_visible(True)
        spine.set_color(_GRID)


# ---------------------------------------------------------------------------------- clients


def client_picture(
    name: str, sizes: Array, shares: Array | None, order: LabelOrder, labels: Sequence[str]
) -> Picture:
    """Who holds what: images per client, and below the share of them that carries each label.

    Args:
        name: Identifier, unique in the page.
        sizes: ``(K,)`` images per client.
        shares: Share of the images that carry each label, a row for each client or group of
            clients, largest first (see :func:`fedharmony.partition.report.label_shares`), or None.
        order: Order of the labels.
        labels: Label names.
    """
    clients = np.argsort(-sizes, kind="stable")
    rows = len(order.index) if shares is not None else 0
    named = 0 < rows <= MOST_NAMED_LABELS and len(labels) == rows
    names = [printable(labels[i], 18) for i in order.index] if named else []
    left = max(38.0, _margin(names) - 6)
    top, bars = 6.0, 84.0
    below = (max(120.0, 11.5 * rows) if named else 240.0) if rows else 0.0
    height = top + bars + (12 + below if below else 0) + 22
    if shares is not None:
        shares = _shrink(shares.T[order.index], np.nanmean)
    with _drawing(name):
        figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
        upper = figure.add_axes(_box(height, left, 6, top, height - top - bars))
        edges = np.arange(len(sizes) + 1, dtype=np.float64)
        if len(sizes) <= 120:
            _bars(upper, sizes[clients])
        else:
            upper.stairs(sizes[clients], edges, fill=True, color=_SERIES[0], linewidth=0)
        upper.set_xlim(0, len(sizes))
        upper.set_xticks([])
        upper.yaxis.set_major_locator(MaxNLocator(3, integer=True))
        if shares is not None:
            lower = figure.add_axes(_box(height, left, 6, top + bars + 12, 22))
            pixels = _sequential(shares, _share_limit(shares))
            _image(lower, pixels, (0, len(sizes), rows, 0))
            size = min(_FONT, 0.92 * below / rows)
            _names(lower, np.arange(len(names)) + 0.5, names, size, pad=3)
            _frame(lower)
        last = lower if shares is not None else upper
        last.set_xlabel(f"{len(sizes):,} clients, largest first", labelpad=5)
        svg = _svg(figure, name, "Images per client, and share of them carrying each label")
    return Picture("Images per client and label shares", svg, _client_note(sizes, shares))


def _bars(axes: Axes, heights: Array) -> None:
    """Bars side by side, one per unit, as a single shape: a hundred of their own take long."""
    left = np.arange(len(heights)) + 0.11
    right, low = left + 0.78, np.zeros(len(heights))
    corners = [(left, low), (right, low), (right, heights), (left, heights)]
    outlines = np.stack([np.stack(corner, axis=1) for corner in corners], axis=1)
    path = Path.make_compound_path_from_polys(outlines)
    shape = axes.add_patch(PathPatch(path, color=_SERIES[0], linewidth=0))
    shape.sticky_edges.y.append(0)  # bars stand on the axis, without a margin
    axes.autoscale_view()


def _share_limit(shares: Array) -> float:
    return max(0.05, math.ceil(20 * float(np.max(shares, initial=0.0)) - 1e-9) / 20)


def _client_note(sizes: Array, shares: Array | None) -> str:
    note = (
        f"Bars: images per client (least {int(sizes.min()):,}, median {np.median(sizes):,.0f}, "
        f"most {int(sizes.max()):,})."
    )
    if shares is not None:
        note += (
            " Cells: share of a client's images that carry the label, from none (blank) to "
            f"{100 * _share_limit(shares):.0f} % (full colour)."
        )
    return note


# ----------------------------------------------------------------------------------- labels


def most_frequent(scores: Sequence[LabelScore], most: int = MOST_ROWS) -> list[int]:
    """Indices of labels with a defined AP: at most ``most``, the most frequent ones."""
    defined = [i for i, s in enumerate(scores) if math.isfinite(s.ap)]
    return sorted(defined, key=lambda i: (-scores[i].positives, i))[:most]


def label_dots(
    name: str,
    title: str,
    labels: Sequence[str],
    series: Sequence[tuple[int, Sequence[float]]],
    *,
    origin: Sequence[float] | float | None = None,
    ends: tuple[float, float] | None = (0.0, 1.0),
    note: str = "",
) -> Picture:
    """One row per label, one dot per method, in per cent.

    Args:
        name: Identifier, unique in the page.
        title: What is drawn.
        labels: Row names from top to bottom.
        series: Palette place and values (fractions, one per row) of each method.
        origin: Where each row's line starts: per row (the label's prevalence, marked by a tick),
            or one value for all (drawn as a vertical line). None connects the dots of a row.
        ends: Ends of the horizontal axis; None fits them to the values.
        note: Text beneath the figure.
    """
    names = [printable(label, 20) for label in labels]
    values = 100 * np.array([list(v) for _, v in series], dtype=np.float64).reshape(len(series), -1)
    rows = np.arange(len(names))
    with _drawing(name):
        figure, axes = _canvas(28 + 15 * len(names), left=_margin(names), right=12, bottom=22)
        lowest, highest = np.fmin.reduce(values), np.fmax.reduce(values)
        if isinstance(origin, int | float):
            axes.axvline(100 * origin, color=_MUTED, linewidth=1)
        elif origin is not None:
            axes.plot(100 * np.asarray(origin), rows, color=_MUTED, **_STROKE)
        starts = lowest if origin is None else 100 * np.asarray(origin, dtype=np.float64)
        axes.hlines(
            rows, np.fmin(lowest, starts), np.fmax(highest, starts), color=_GRID, linewidth=2
        )
        for (slot, _), row_values in zip(series, values, strict=True):
            axes.plot(row_values, rows, **_dot(slot))
        _rows(axes, names)
        if ends is not None:
            axes.set_xlim(100 * ends[0] - 1.5, 100 * ends[1] + 1.5)
        axes.xaxis.set_major_locator(_locator(5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda v, _: _plain(v)))
        return Picture(title, _svg(figure, name, f"{title} by label"), note)


def _log_ticks(values: Sequence[int]) -> list[int]:
    """Numbers 1, 2, 5 times a power of ten that enclose the values; every third if too many.

    >>> _log_ticks([60, 170]), _log_ticks([3, 20_000])
    ([50, 100, 200], [1, 10, 100, 1000, 10000, 100000])
    """
    steps = [digit * 10**power for power in range(10) for digit in (1, 2, 5)]
    first = max(i for i, step in enumerate(steps) if step <= min(values))
    last = min(i for i, step in enumerate(steps) if step >= max(values))
    if last - first <= 6:
        return steps[first : max(last, first + 1) + 1]
    return steps[first // 3 * 3 : last + 3 : 3]


def frequency_scatter(name: str, scores: Sequence[LabelScore]) -> Picture:
    """Average precision of every label against its number of test positives (log scale)."""
    defined = [s for s in scores if math.isfinite(s.ap) and s.positives > 0]
    title = "AP against label frequency, %"
    with _drawing(name):
        figure, axes = _canvas(250, left=38, right=14)
        axes.plot(
            [s.positives for s in defined],
            [100 * s.ap for s in defined],
            **{**_dot(0, 5 if len(defined) > 200 else 6), "alpha": 0.75},
        )
        axes.set_xscale("log")
        ticks = _log_ticks([s.positives for s in defined])
        axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_xlim(0.9 * ticks[0], 1.1 * ticks[-1])
        axes.set_ylim(-2, 102)
        axes.set_xlabel("test images with the label (log scale)", labelpad=2)
        return Picture(title, _svg(figure, name, "Average precision against label frequency"))


# ------------------------------------------------------------------------------ aggregation


def weights_map(name: str, title: str, run: RunView) -> Picture:
    """Aggregation weights: a row per client (largest on top), a column per round.

    Colour is the weight; a client that dropped out or failed in a round is marked in the warning
    colour; blank cells were not in the cohort.
    """
    sizes = run.matrices.get("client_sizes")
    clients = len(sizes) if sizes is not None else int(run.start.get("clients") or 0)
    seen = [int(k) for e in run.rounds for k in (*(e.get("weights") or {}), *e.get("cohort", ()))]
    clients = max([clients, *(k + 1 for k in seen)])
    rows = _client_rows(np.zeros(clients) if sizes is None else sizes)
    weights = np.full((min(clients, MOST_CELLS), max(run.rounds_total, 1)), np.nan)
    absent = np.zeros_like(weights, dtype=bool)
    for event in run.rounds:
        column = int(event["round"])
        for client, weight in (event.get("weights") or {}).items():
            place = rows[int(client)], column
            weights[place] = np.fmax(weights[place], number(weight))
        lost = [*event.get("dropped", ()), *(f["client"] for f in event.get("failures", ()))]
        absent[rows[[int(k) for k in lost]], column] = True
    limit = float(np.nanmax(weights)) if np.isfinite(weights).any() else 1.0
    with _drawing(name):
        figure, axes = _canvas(250, left=30, right=8)
        pixels = _sequential(_shrink(weights, np.nanmax), max(limit, 1e-12), least=0.12)
        pixels[_shrink(absent.astype(np.float64), np.max) > 0] = (*_POSITIVE, 255)
        _image(axes, pixels, (0.5, weights.shape[1] + 0.5, clients, 0))
        _frame(axes)
        _round_axis(axes)
        axes.set_yticks([])
        axes.set_ylabel("clients, largest on top" if sizes is not None else "clients", labelpad=6)
        note = f"Blank: not in the cohort; full colour: weight {limit:.2f}."
        if absent.any():
            note += " Orange: dropped out or failed."
        return Picture(title, _svg(figure, name, f"Heat map: {title}"), note)


def _client_rows(sizes: Array) -> npt.NDArray[np.int64]:
    """The row of each client, largest first; neighbours share one if there are more than cells.

    >>> _client_rows(np.array([3.0, 9.0, 5.0])).tolist()
    [2, 0, 1]
    """
    rank = np.empty(len(sizes), np.int64)
    rank[np.argsort(-sizes, kind="stable")] = np.arange(len(sizes))
    rows = min(len(sizes), MOST_CELLS)
    ends = len(sizes) * np.arange(1, rows + 1) // max(1, rows)
    return np.searchsorted(ends, rank, side="right")


def same_weights(runs: Mapping[str, RunView]) -> list[list[str]]:
    """Group runs whose clients had the same weights in every round (to six decimals)."""
    groups: dict[tuple[object, ...], list[str]] = {}
    for name, run in runs.items():
        signature = tuple(
            tuple(
                sorted((str(k), round(number(w), 6)) for k, w in (e.get("weights") or {}).items())
            )
            for e in run.rounds
        )
        groups.setdefault(signature, []).append(name)
    return list(groups.values())


def effective_clients(weights: Sequence[float]) -> float:
    """How many equally weighted clients the weights amount to, ``(Σ w)² / Σ w²``; nan if none.

    >>> effective_clients([0.25, 0.25, 0.25, 0.25]), effective_clients([1.0, 0.0])
    (4.0, 1.0)
    """
    values = np.asarray(weights, dtype=np.float64)
    squares = float((values**2).sum())
    return float(values.sum() ** 2 / squares) if squares > 0 else math.nan


def effective_curve(run: RunView) -> dict[int, float]:
    """Effective number of clients by round (1-based)."""
    found = {
        int(e["round"]) + 1: effective_clients(
            [number(w) for w in (e.get("weights") or {}).values()]
        )
        for e in run.rounds
    }
    return {r: v for r, v in found.items() if math.isfinite(v)}


def reference_effective(run: RunView, by_size: bool) -> dict[int, float]:
    """What uniform weights, or weights by client size, would have given with the same clients."""
    sizes = run.matrices.get("client_sizes")
    found = {}
    for event in run.rounds:
        members = [int(k) for k in event.get("weights") or {}]
        if not by_size:
            weights = [1.0] * len(members)
        else:
            weights = [float(sizes[k]) for k in members] if sizes is not None else []
        found[int(event["round"]) + 1] = effective_clients(weights)
    return {r: v for r, v in found.items() if math.isfinite(v)}
