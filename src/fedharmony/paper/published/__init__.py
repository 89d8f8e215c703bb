"""What the paper itself prints, cell by cell, with the place of every row.

The files are copies of the numbers of Tables 1 to 5. Its figures are pictures without numbers; what
the text says of them stands in the items.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache
from importlib import resources

from fedharmony.report.svg import Style, style

#: Methods as this package and as the paper calls them, in the paper's order.
NAMES: Mapping[str, str] = {
    "fedavg": "FedAvg",
    "fedcurv": "FedCurv",
    "fedprox": "FedProx",
    "fednova": "FedNova",
    "fedlgt": "FedLGT",
    "spherefed": "SphereFed",
    "fedrdn": "FedRDN",
    "fedharmony": "FedHarmony",
}

#: What is not as in FedLGT's own paper, in every run here.
RANDOM_TEXT = "FedLGT describes labels by random vectors, not by text (fedlgt-randtext)."
#: How the methods are drawn, in whatever figure.
LOOKS: Mapping[str, Style] = {name: style(place) for place, name in enumerate(NAMES)}


@cache
def rows(table: str) -> tuple[Mapping[str, str], ...]:
    """All rows of a file, by column.

    >>> rows("table4")[0]["source"], rows("table4")[0]["p"]
    ('Table 4, row COCO-80', '0.382')
    """
    text = resources.files(__name__).joinpath(f"{table}.csv").read_text("utf-8")
    return tuple(csv.DictReader(text.splitlines()))


def row(table: str, **where: str) -> Mapping[str, str] | None:
    """The row whose columns have these values; None where the paper has none.

    >>> row("table1", data="VOC2007", method="FedNova")["OP"]
    '94.9'
    """
    found = (r for r in rows(table) if all(r[key] == value for key, value in where.items()))
    return next(found, None)
