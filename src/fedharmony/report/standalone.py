"""A figure of the report page as a file of its own: title, legend and note belong to it."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Iterator, Sequence
from importlib import resources

from fedharmony.report import svg
from fedharmony.report.charts import Picture
from fedharmony.report.svg import Drawing, Style

#: How much larger the file is shown than a figure of the page.
SCALE = 2
#: Pixels left of a figure: names may be wider than they were thought to be.
EDGE = 10
#: Letters in a line of the title and of the note, and the height of a line.
TITLE, LETTERS, LINE = 56, 66, 14
#: Pixels of a line and its mark in the legend, before the name, and after it.
SAMPLE, GAP = 28.0, 12.0
_TEXT = (
    "text { font-family: system-ui, sans-serif } .caption { font-size: 10px; fill: var(--muted) } "
    ".title { font-size: 11px; font-weight: 600; fill: var(--ink) }"
)


def standalone(picture: Picture) -> str:
    """An SVG file that follows light and dark."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture.svg)
    assert box is not None, "figures begin with their size"
    width, height = map(float, box.groups())
    title = list(_lines(picture.title, "title", TITLE, LINE))
    legend = list(_legend(picture.keys, width))
    top = LINE * (len(title) + len(legend)) + (8 if title else 0)
    bar = "" if picture.colours is None else _colours(picture.colours, height + 2)
    above_note = height + (LINE if bar else 0)
    note = list(_lines(picture.note, "caption", LETTERS, above_note + LINE))
    below = LINE * (len(note) + bool(bar) + 1) if note or bar else 0
    colours = resources.files("fedharmony.report").joinpath("colours.css").read_text("utf-8")
    head, body = picture.svg.split(">", 1)
    head = head.replace(
        box[0], f'viewBox="{-EDGE} {-top:g} {width + EDGE:g} {top + height + below:g}"'
    )
    return (
        f'{head} width="{SCALE * (width + EDGE):g}" height="{SCALE * (top + height + below):g}" '
        f'xmlns="http://www.w3.org/2000/svg">\n<style>{colours}{_TEXT}</style>\n'
        f'<rect x="{-EDGE}" y="{-top:g}" width="100%" height="100%" style="fill: var(--paper)"/>'
        f'<g transform="translate(0 {-top:g})">{"".join(title)}</g>'
        f'<g transform="translate(0 {LINE * len(title) - top + 4:g})">{"".join(legend)}</g>'
        f"{body.removesuffix('</svg>')}{bar}{''.join(note)}</svg>\n"
    )


def _lines(text: str, kind: str, letters: int, first: float) -> Iterator[str]:
    for n, line in enumerate(textwrap.wrap(text, letters)):
        yield f'<text class="{kind}" x="6" y="{first + LINE * n:g}">{html.escape(line)}</text>\n'


def _colours(ends: tuple[str, str], top: float) -> str:
    """The colour scale of a map between the words at its ends."""
    drawing, middle, cells = Drawing(LINE), top + 6, 12
    drawing.text(6, middle, ends[0], size=svg.FONT - 1, colour=svg.MUTED)
    for i in range(cells):
        size = (i + 0.5) / cells * 2 - 1
        colour = svg.POSITIVE if size > 0 else svg.NEGATIVE
        drawing.rect(34 + 5 * i, top + 1, 5, 9, fill=f"rgb{colour}", fill_opacity=abs(size))
    drawing.text(38 + 5 * cells, middle, ends[1], size=svg.FONT - 1, colour=svg.MUTED)
    return drawing.body


def _legend(keys: Sequence[tuple[str, Style]], width: float) -> Iterator[str]:
    """Rows of samples with their names, as many as the width takes."""
    rows: list[list[tuple[float, str, Style]]] = []
    x = width
    for name, style in keys:
        room = SAMPLE + svg.LETTER * len(name) + GAP
        if x + room > width or not rows:
            rows.append([])
            x = 6.0
        rows[-1].append((x, name, style))
        x += room
    for n, row in enumerate(rows):
        drawing, y = Drawing(LINE), LINE * (n + 0.5)
        for x, name, style in row:
            drawing.line([(x, y), (x + SAMPLE - 6, y)], style.colour, 1.8, style.dashes)
            if style.outline:
                drawing.mark(x + (SAMPLE - 6) / 2, y, style)
            drawing.text(x + SAMPLE, y, name, size=svg.FONT - 1)
        yield drawing.body
