"""Tables of text: the same cells as Markdown, CSV, LaTeX and, in the report, HTML."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.box import HORIZONTALS
from rich.table import Table

DASH = "–"


@dataclass(frozen=True)
class Grid:
    """A table of cells as printed; the first heading names the rows.

    >>> print(Grid("Sums", ("a", "b"), (("1", "2"),)).to_markdown())
    | a | b |
    |:--|--:|
    | 1 | 2 |
    """

    title: str
    headings: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""

    def __post_init__(self) -> None:
        """Refuse rows of another length than the headings."""
        assert all(len(row) == len(self.headings) for row in self.rows), self.title

    @classmethod
    def read(cls, content: Mapping[str, Any]) -> Grid:
        """A table as :meth:`as_dict` gives it, after a way through JSON."""
        rows = tuple(tuple(map(str, row)) for row in content["rows"])
        return cls(content["title"], tuple(content["headings"]), rows, content["note"])

    def as_dict(self) -> dict[str, Any]:
        """Plain values."""
        return asdict(self)

    def to_markdown(self) -> str:
        """A Markdown table."""
        plain = [[cell.replace("|", r"\|") for cell in row] for row in (self.headings, *self.rows)]
        lines = [f"| {' | '.join(row)} |" for row in plain]
        lines.insert(1, "|:--|" + "--:|" * (len(self.headings) - 1))
        return "\n".join(lines)

    def to_csv(self) -> str:
        """Headings and cells."""
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([self.headings, *self.rows])
        return text.getvalue()

    def to_latex(self) -> str:
        r"""A ``tabular`` in the style of booktabs."""
        table = latex(self.headings, map(latex_row, self.rows), filter(None, [self.note]))
        return f"% {self.title}\n{table}"


def framed(notes: Sequence[str], title: str | None = None) -> Table:
    """A table for the terminal with a column of methods; notes stand below it."""
    table = Table(
        box=HORIZONTALS,
        padding=(0, 1, 0, 0),
        header_style="dim",
        title=title,
        title_justify="left",
        title_style="",
        caption="; ".join(notes) or None,
        caption_justify="left",
    )
    table.add_column("Method", overflow="fold", min_width=6)
    return table


def latex(headings: Sequence[str], rows: Iterable[str], notes: Iterable[str]) -> str:
    """A ``tabular`` in the style of booktabs, with notes as comments below it."""
    return "\n".join(
        [
            rf"\begin{{tabular}}{{l{'r' * (len(headings) - 1)}}}",
            r"\toprule",
            latex_row(headings),
            r"\midrule",
            *rows,
            r"\bottomrule",
            r"\end{tabular}",
            *(f"% {note}" for note in notes),
            "",
        ]
    )


def latex_row(cells: Iterable[str]) -> str:
    r"""Cells as they are, as a row of a ``tabular``.

    >>> print(latex_row(["a_b", "50 %"]))
    a\_b & 50 \% \\
    """
    return " & ".join(map(escape_latex, cells)) + r" \\"


_LATEX = {
    "\\": r"\textbackslash{}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "−": "$-$",
    "…": r"\dots{}",
    DASH: "--",
    **{c: f"\\{c}" for c in "&%$#_{}"},
}


def escape_latex(text: str) -> str:
    r"""Text that LaTeX prints as it is.

    >>> print(escape_latex("50% of a_b & c"))
    50\% of a\_b \& c
    """
    return " ".join("".join(_LATEX.get(c, c) for c in text).split())


def signed(value: float, digits: int = 1) -> str:
    """A difference with its sign; nothing to tell apart from zero is 0.

    >>> signed(1.26), signed(-0.04), signed(-2.0)
    ('+1.3', '0.0', '−2.0')
    """
    text = f"{value:+.{digits}f}"
    return text[1:] if not text.strip("+-0.") else text.replace("-", "−")


def spread(values: Sequence[float], digits: int = 1) -> str:
    """Mean and sample standard deviation; of one value the value, of none a dash.

    >>> spread([1.0, 3.0]), spread([2.0]), spread([])
    ('2.0 ± 1.4', '2.0', '–')
    """
    if not values:
        return DASH
    deviation = f" ± {statistics.stdev(values):.{digits}f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.{digits}f}{deviation}"
