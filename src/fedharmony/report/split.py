"""The picture of a split, as a file of its own."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Sequence
from importlib import resources

import numpy as np

from fedharmony.correlation import label_correlation
from fedharmony.partition.base import Partition
from fedharmony.partition.report import label_shares, paired_labels
from fedharmony.report.plots import Picture, client_picture, label_order
from fedharmony.types import Labels

#: The file is shown at so many times the size at which a page of figures shows it.
SCALE = 2
#: Caption: letters in a line, and the height of one.
LETTERS, LINE = 60, 14


def split_picture(labels: Labels, partition: Partition, classes: Sequence[str]) -> str:
    """Images per client and label shares, as an SVG file that follows light and dark."""
    paired = paired_labels(labels)
    shares = label_shares(labels, partition)[:, paired]
    matrix, _ = label_correlation(labels[:, paired])
    classes = [classes[i] for i in paired]
    order = label_order(None, matrix.numpy().astype(np.float64))
    sizes = partition.sizes.astype(np.float64)
    return standalone(client_picture("split", sizes, shares, order, classes))


def standalone(picture: Picture) -> str:
    """A figure of the report page as a file: with the page's colours and its note as caption."""
    box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', picture.svg)
    assert box is not None, "figures begin with their size"
    width, height = map(float, box.groups())
    lines = textwrap.wrap(picture.note, LETTERS)
    caption = "".join(
        f'<text class="caption" x="6" y="{height + LINE * n:g}">{html.escape(line)}</text>\n'
        for n, line in enumerate(lines, start=1)
    )
    whole = height + LINE * (len(lines) + 1)
    head, body = picture.svg.split(">", 1)
    head = head.replace(box[0], f'viewBox="0 0 {width:g} {whole:g}"')
    return (
        f'{head} width="{SCALE * width:g}" height="{SCALE * whole:g}" '
        f'xmlns="http://www.w3.org/2000/svg">\n<style>{_style()}</style>\n'
        '<rect width="100%" height="100%" style="fill: var(--paper)"/>'
        f"{body.removesuffix('</svg>')}{caption}</svg>\n"
    )


def _style() -> str:
    """The colour variables of the report page, for light and for dark."""
    page = resources.files("fedharmony.report").joinpath("page.html.j2").read_text("utf-8")
    light, dark = re.findall(r":root \{.*?\}", page, re.DOTALL)[:2]
    dark = f"@media (prefers-color-scheme: dark) {{ {dark} image {{ filter: brightness(1.25) }} }}"
    text = "text { font-family: system-ui, sans-serif }"
    caption = ".caption { font-size: 10px; fill: var(--muted) }"
    return re.sub(r"\s+", " ", f"{light} {dark} {text} {caption}")
