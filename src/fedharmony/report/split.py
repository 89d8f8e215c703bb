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
from fedharmony.report.charts import Picture
from fedharmony.report.order import LabelOrder, spectral_order
from fedharmony.report.panels.clients import client_picture
from fedharmony.types import Labels

#: How much larger the file is shown than a figure of the page.
SCALE = 2
#: Pixels left of a figure: names may be wider than they were thought to be.
EDGE = 10
#: Caption: letters in a line, and the height of one.
LETTERS, LINE = 60, 14
_TEXT = (
    "text { font-family: system-ui, sans-serif } .caption { font-size: 10px; fill: var(--muted) }"
)


def split_picture(labels: Labels, partition: Partition, classes: Sequence[str]) -> str:
    """Images per client and label shares, as an SVG file that follows light and dark."""
    paired = paired_labels(labels)
    shares = label_shares(labels, partition)[:, paired]
    matrix, _ = label_correlation(labels[:, paired])
    classes = [classes[i] for i in paired]
    order = LabelOrder(spectral_order(matrix.numpy().astype(np.float64)))
    sizes = partition.sizes.astype(np.float64)
    return standalone(client_picture(sizes, shares, order, classes, partition.names))


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
    colours = resources.files("fedharmony.report").joinpath("colours.css").read_text("utf-8")
    head, body = picture.svg.split(">", 1)
    head = head.replace(box[0], f'viewBox="{-EDGE} 0 {width + EDGE:g} {whole:g}"')
    return (
        f'{head} width="{SCALE * (width + EDGE):g}" height="{SCALE * whole:g}" '
        f'xmlns="http://www.w3.org/2000/svg">\n<style>{colours}{_TEXT}</style>\n'
        f'<rect x="{-EDGE}" width="100%" height="100%" style="fill: var(--paper)"/>'
        f"{body.removesuffix('</svg>')}{caption}</svg>\n"
    )
