"""Drawing primitives: SVG text for a page that is read by day, by night and on paper.

Colours are CSS variables (``colours.css``), so that one drawing serves both themes. Heat maps
encode the sign as a hue and the size as opacity: zero is the colour of the page. Drawings hold no
identifiers, dates or random numbers: many can stand in one page, and the same input gives the same
bytes.
"""

from __future__ import annotations

import base64
import html
import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from PIL import Image

Array: TypeAlias = npt.NDArray[np.float64]
Pixels: TypeAlias = npt.NDArray[np.uint8]
Look: TypeAlias = Mapping[str, float | str]

#: Width of every figure in pixels: legible when the columns of a page stack on a phone.
WIDTH = 352.0
#: Height of letters, and a generous mean width of one.
FONT = 11.0
LETTER = 0.58 * FONT
#: Heat maps with more cells per side are averaged down to this.
MOST_CELLS = 400

INK, MUTED, GRID, PAPER = "var(--ink)", "var(--muted)", "var(--grid)", "var(--paper)"
#: Mid-tone hues that stand out on white and on near-black alike; amounts take the second.
POSITIVE, NEGATIVE = (217, 84, 26), (38, 120, 214)
UNKNOWN = (128, 128, 128, 150)
#: Pixels from one stripe to the next where a value is not known.
_HATCH = 12

# The lines and marks of the palette: methods differ in more than colour.
_DASHES = ("", "", "10.8,3.6", "2.5,3.2", "12.6,3.6,2.5,3.6", "5.4,2.9", "16.2,4.3", "")
_OUTLINES = (
    "M-3.5 0a3.5 3.5 0 1 0 7 0a3.5 3.5 0 1 0-7 0z",
    "M-3-3h6v6h-6z",
    "M0-3.6L3.6 3.2H-3.6z",
    "M0-4.2L4.2 0L0 4.2L-4.2 0z",
    "M0 3.6L3.6-3.2H-3.6z",
    "M-1.3-3.8h2.6v2.5h2.5v2.6h-2.5v2.5h-2.6v-2.5h-2.5v-2.6h2.5z",
    "M0-1.9L2-3.9L3.9-2L1.9 0L3.9 2L2 3.9L0 1.9L-2 3.9L-3.9 2L-1.9 0L-3.9-2L-2-3.9z",
    "M0-3.9L3.7-1.2L2.3 3.2H-2.3L-3.7-1.2z",
)


@dataclass(frozen=True)
class Style:
    """How a method is drawn: colour, dash pattern and the outline of its mark."""

    colour: str
    dashes: str = ""
    outline: str = ""


#: What is not a method in the race: training in one place, and lines to compare with.
CENTRAL = Style(INK, "1.2,3", "M0-5L1.3-1.6L5 0L1.3 1.6L0 5L-1.3 1.6L-5 0L-1.3-1.6z")
DASHED, DOTTED = Style(MUTED, "4,2"), Style(MUTED, "1.2,2")


def style(place: int) -> Style:
    """How the method in this place is drawn; after eight, the dash patterns shift by two.

    >>> style(1).colour, style(1).dashes == style(9).dashes
    ('var(--s2)', False)
    """
    colour = place % len(_OUTLINES)
    dashes = _DASHES[(place + 2 * (place // len(_DASHES))) % len(_DASHES)]
    return Style(f"var(--s{colour + 1})", dashes, _OUTLINES[colour])


def printable(text: str, limit: int | None = None) -> str:
    """One line of text without control characters, cut to ``limit`` letters.

    >>> printable("a\\nb"), printable("a very long label", 8)
    ('a b', 'a very …')
    """
    line = "".join(c if c.isprintable() else " " for c in text)
    return line if limit is None or len(line) <= limit else line[: limit - 1] + "…"


def plain(value: float, digits: int = 4) -> str:
    """A number for people.

    >>> plain(-0.25), plain(12345.6)
    ('−0.25', '12,346')
    """
    text = f"{value:,.0f}" if abs(value) >= 10 ** (digits - 1) else f"{value:.{digits}g}"
    return text.replace("-", "−")


def _number(value: float) -> str:
    """A coordinate, to a hundredth of a pixel.

    >>> _number(1.5), _number(-0.001), _number(20)
    ('1.5', '0', '20')
    """
    text = f"{value:.2f}".rstrip("0").rstrip(".")
    return "0" if text == "-0" else text


@dataclass(frozen=True)
class Scale:
    """Maps values from ``low`` to ``high`` to pixels from ``start`` to ``end``.

    >>> Scale(0, 10, 100, 200)(2.5), Scale(1, 100, 0, 10, log=True)(10)
    (125.0, 5.0)
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """The pixel of a value."""
        low, high, at = self.low, self.high, value
        if self.log:
            low, high, at = math.log(low), math.log(high), math.log(value)
        return self.start + (self.end - self.start) * (at - low) / ((high - low) or 1.0)

    def ticks(self, most: int, whole: bool = False) -> list[float]:
        """Round numbers inside the scale, at most ``most`` steps apart.

        >>> Scale(0.5, 30.5, 0, 1).ticks(4, whole=True), Scale(0.5, 1.5, 0, 1).ticks(4, whole=True)
        ([10.0, 20.0, 30.0], [1.0])
        """
        power = 10.0 ** math.floor(math.log10((self.high - self.low) / most or 1.0))
        steps = [digit * power for digit in (1, 2, 2.5, 5, 10)]
        if whole:
            steps = [s for s in steps if s == round(s)] or [1.0]
        fitting = [s for s in steps if (self.high - self.low) / s <= most]
        step = min(fitting, default=steps[-1])
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [step * i for i in range(first, last + 1)]


class Drawing:
    """An SVG element that grows by what is drawn; y points downwards."""

    def __init__(self, height: float) -> None:
        self.height = height
        self._parts: list[object] = []  # text, or a drawing to be written when the whole is

    def add(self, tag: str, content: str | None, attributes: Look) -> None:
        """Add an element; ``_`` in names of attributes is a hyphen, empty ones are left out."""
        written = "".join(
            f' {name.replace("_", "-")}="{html.escape(v) if isinstance(v, str) else _number(v)}"'
            for name, v in attributes.items()
            if v != ""
        )
        end = "/>" if content is None else f">{html.escape(content)}</{tag}>"
        self._parts.append(f"<{tag}{written}{end}")

    def line(
        self,
        points: Iterable[tuple[float, float]],
        colour: str,
        width: float = 1.0,
        dashes: str = "",
    ) -> None:
        """A line through points."""
        path = "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points)
        look: Look = {"stroke": colour, "stroke_width": width, "stroke_dasharray": dashes}
        self.add("path", None, {"d": path, "fill": "none", **look})

    def area(self, points: Iterable[tuple[float, float]], colour: str, opacity: float) -> None:
        """A filled outline."""
        path = "M" + "L".join(f"{_number(x)} {_number(y)}" for x, y in points) + "z"
        self.add("path", None, {"d": path, "fill": colour, "fill_opacity": opacity})

    def rect(
        self, left: float, top: float, width: float, height: float, **look: float | str
    ) -> None:
        """A rectangle."""
        self.add("rect", None, {"x": left, "y": top, "width": width, "height": height, **look})

    def mark(self, x: float, y: float, look: Style, opacity: float | str = "") -> None:
        """The mark of a method."""
        place = f"translate({_number(x)} {_number(y)})"
        edge: Look = {"stroke": PAPER, "stroke_width": 0.7, "fill_opacity": opacity}
        self.add("path", None, {"d": look.outline, "transform": place, "fill": look.colour, **edge})

    def text(
        self,
        x: float,
        y: float,
        text: str,
        *,
        size: float = FONT,
        colour: str = INK,
        anchor: str = "start",
        turn: float = 0,
    ) -> None:
        """A line of text whose middle is at height y; ``turn`` in degrees around its anchor."""
        turned = f"rotate({_number(turn)} {_number(x)} {_number(y)})" if turn else ""
        look: Look = {"font_size": size, "fill": colour, "text_anchor": anchor}
        place: Look = {"x": x, "y": y + 0.35 * size, "transform": turned}
        self.add("text", printable(text), {**place, **look})

    def figures(
        self, places: Iterable[tuple[float, float, str]], size: float, colour: str = INK
    ) -> None:
        """Many short texts of one look, each around its place."""
        look = f'font-size="{_number(size)}" fill="{colour}" text-anchor="middle"'
        texts = "".join(
            f'<text x="{_number(x)}" y="{_number(y + 0.35 * size)}">{html.escape(text)}</text>'
            for x, y, text in places
        )
        self._parts.append(f"<g {look}>{texts}</g>")

    def image(self, pixels: Pixels, left: float, top: float, width: float, height: float) -> None:
        """A heat map: a cell per pixel, enlarged by whole numbers so that no viewer blurs it.

        Fully transparent pixels of the colour :data:`UNKNOWN` are hatched.
        """
        down, across = (max(1, 2 * MOST_CELLS // n) for n in pixels.shape[:2])
        large = pixels.repeat(down, axis=0).repeat(across, axis=1)
        unknown = (large == (*UNKNOWN[:3], 0)).all(axis=2)
        diagonal = np.add.outer(np.arange(len(large)), np.arange(large.shape[1]))
        large[unknown & (diagonal % _HATCH < _HATCH // 3)] = UNKNOWN
        data = _encoded(large, "png", compress_level=9)
        place: Look = {"x": left, "y": top, "width": width, "height": height}
        self.add("image", None, {"href": data, "preserveAspectRatio": "none", **place})
        self.rect(left, top, width, height, fill="none", stroke=GRID, stroke_width=0.8)

    def photo(self, pixels: Pixels, left: float, top: float, width: float, height: float) -> None:
        """A picture (H, W, 3) as it is."""
        data = _encoded(pixels, "jpeg", quality=85)
        place: Look = {"x": left, "y": top, "width": width, "height": height}
        self.add("image", None, {"href": data, "class": "photo", **place})

    def inside(self, left: float, top: float, width: float, height: float) -> Drawing:
        """A drawing in the same coordinates of which only what lies in this box is seen."""
        part = _Window(left, top, width, height)
        self._parts.append(part)
        return part

    @property
    def body(self) -> str:
        """Everything drawn so far, without the frame."""
        return "\n".join(str(part) for part in self._parts)

    def svg(self, description: str) -> str:
        """The whole as an element for an HTML page."""
        spoken = html.escape(printable(description))
        box = f"0 0 {_number(WIDTH)} {_number(self.height)}"
        return f'<svg viewBox="{box}" role="img" aria-label="{spoken}">{self.body}</svg>'


def _encoded(pixels: Pixels, kind: str, **options: int) -> str:
    """An image file as a link that holds it."""
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, kind, **options)
    return f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"


class _Window(Drawing):
    """A nested drawing: viewers cut it off at its edges."""

    def __init__(self, left: float, top: float, width: float, height: float) -> None:
        super().__init__(height)
        self._box = [_number(v) for v in (left, top, width, height)]

    def __str__(self) -> str:
        left, top, width, height = self._box
        place = f'x="{left}" y="{top}" width="{width}" height="{height}"'
        return f'<svg {place} viewBox="{" ".join(self._box)}">{self.body}</svg>'


# -------------------------------------------------------------------------------- heat maps


def diverging(values: Array, limit: float) -> Pixels:
    """Hue by sign, opacity by size; values that are not known will be hatched."""
    pixels = np.zeros((*values.shape, 4), dtype=np.uint8)
    known = np.isfinite(values)
    pixels[known & (values >= 0), :3] = POSITIVE
    pixels[known & (values < 0), :3] = NEGATIVE
    pixels[~known, :3] = UNKNOWN[:3]
    opacity = np.clip(np.abs(np.where(known, values, 0.0)) / limit, 0, 1)
    pixels[..., 3] = np.rint(255 * opacity).astype(np.uint8)
    return pixels


def sequential(values: Array, limit: float, least: float = 0.0) -> Pixels:
    """Opacity by size, from ``least`` at zero to one at ``limit``; unknown values are blank."""
    pixels = np.zeros((*values.shape, 4), dtype=np.uint8)
    known = np.isfinite(values)
    pixels[..., :3] = NEGATIVE
    opacity = least + (1 - least) * np.clip(np.where(known, values, 0.0) / limit, 0, 1)
    pixels[..., 3] = np.where(known, np.rint(255 * opacity), 0).astype(np.uint8)
    return pixels


def shrink(values: Array, reduce: Callable[..., Array], most: int = MOST_CELLS) -> Array:
    """Reduce blocks of neighbouring cells until no side is longer than ``most``.

    ``reduce`` must take blocks without any known value, as :func:`known_mean` does.

    >>> shrink(np.arange(4.0).reshape(1, 4), known_mean, most=2).tolist()
    [[0.5, 2.5]]
    """
    for axis in (0, 1):
        length = values.shape[axis]
        if length > most:
            ends = [length * (i + 1) // most for i in range(most)]
            along = np.moveaxis(values, axis, 0)  # a view: taking along a far axis would copy all
            parts = [along[a:b] for a, b in zip([0, *ends], ends, strict=False)]
            values = np.stack([reduce(part, axis=0) for part in parts], axis=axis)
    return values


def known_mean(values: Array, axis: int) -> Array:
    """The mean of what is known; nan where nothing is."""
    known = np.isfinite(values)
    count = known.sum(axis=axis)
    total = np.where(known, values, 0.0).sum(axis=axis)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def known_most(values: Array, axis: int) -> Array:
    """The largest of what is known; nan where nothing is."""
    return np.asarray(np.fmax.reduce(values, axis=axis), dtype=np.float64)


def margin(names: Sequence[str], least: float = 0.0) -> float:
    """Room for names beside an axis."""
    return max(least, 8 + LETTER * max((len(name) for name in names), default=0))
