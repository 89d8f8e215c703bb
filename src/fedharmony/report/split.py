"""The picture of a split, as a file of its own."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources

import numpy as np

from fedharmony.correlation import label_correlation
from fedharmony.partition.base import Partition
from fedharmony.report.plots import client_picture, label_order
from fedharmony.types import Labels


def split_picture(labels: Labels, partition: Partition, classes: Sequence[str]) -> str:
    """Images per client and label shares, as an SVG file that follows light and dark."""
    counts = np.stack([labels[i].sum(axis=0, dtype=np.int64) for i in partition.indices])
    matrix, _ = label_correlation(labels)
    order = label_order(None, matrix.numpy().astype(np.float64))
    sizes = partition.sizes.astype(np.float64)
    return standalone(client_picture("split", sizes, counts.astype(np.float64), order, classes).svg)


def standalone(svg: str) -> str:
    """A figure of the report page as a file: with the page's colours, on its paper."""
    style = f"<style>{_palette()} text {{ font-family: system-ui, sans-serif }}</style>"
    paper = '<rect width="100%" height="100%" style="fill: var(--paper)"/>'
    head, rest = svg.split(">", 1)
    return f'{head} xmlns="http://www.w3.org/2000/svg">{style}{paper}{rest}\n'


def _palette() -> str:
    """The colour variables of the report page, for light and for dark."""
    page = resources.files("fedharmony.report").joinpath("page.html.j2").read_text("utf-8")
    light, dark = re.findall(r":root \{.*?\}", page, re.DOTALL)[:2]
    return re.sub(r"\s+", " ", f"{light} @media (prefers-color-scheme: dark) {{ {dark} }}")
