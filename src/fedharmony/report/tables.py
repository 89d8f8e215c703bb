"""The table of the eight metrics, for the terminal, Markdown, CSV and LaTeX.

One row per method. With several seeds a cell reads ``mean ± standard deviation`` over the runs
(sample standard deviation, n − 1 in the denominator); with one seed it is the number alone. Values
stay unrounded fractions until they are printed, in per cent with one decimal. The best of each
quality column is marked; values that print the same are all marked, because the table gives no
reason to prefer one. Costs (seconds, megabytes) are never marked. Training in one place and the
trivial predictors, which stand below a rule, do not compete.

>>> rows = [
...     RunRow("fedavg", 0, {"mAP": 0.70}),
...     RunRow("fedavg", 1, {"mAP": 0.72}),
...     RunRow("fedharmony", 0, {"mAP": 0.74}),
...     RunRow("fedharmony", 1, {"mAP": 0.75}),
... ]
>>> print(metric_table(rows, {"prevalence": {"mAP": 0.071}}).to_markdown())
| Method | mAP |
|:--|--:|
| fedavg | 71.0 ± 1.4 |
| fedharmony | **74.5 ± 0.7** |
| *prevalence* | 7.1 |
<BLANKLINE>
mean ± sample standard deviation over 2 seeds.
"""

from __future__ import annotations

import csv
import io
import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from rich.table import Table
from rich.text import Text

from fedharmony.metrics import METRIC_NAMES
from fedharmony.report.differences import HEADINGS, Differences, differences
from fedharmony.report.grid import DASH, escape_latex, framed, latex, latex_row
from fedharmony.report.load import Runs, RunView


@dataclass(frozen=True)
class Column:
    """A quantity of the table: its key in the data and in CSV files, and how it is printed.

    ``scale`` leads from the stored to the printed value; of a ``quality`` the highest is marked.
    """

    key: str
    heading: str
    meaning: str
    scale: float
    digits: int
    quality: bool

    def number(self, value: float) -> str:
        """The printed value; a dash where it is undefined.

        >>> COLUMNS[0].number(0.7126), COLUMNS[0].number(float("nan")), COLUMNS[8].number(-0.001)
        ('71.3', '–', '0.00')
        """
        if not math.isfinite(value):
            return DASH
        text = f"{value * self.scale:.{self.digits}f}"
        return text.lstrip("-") if not text.strip("-0.") else text


_MEANINGS = {
    "mAP": "mean over labels of average precision",
    "O-mAP": "average precision over all image-label pairs at once",
    "CP": "precision, averaged over labels",
    "CR": "recall, averaged over labels",
    "CF1": "harmonic mean of CP and CR",
    "OP": "precision over all predictions",
    "OR": "recall over all positives",
    "OF1": "harmonic mean of OP and OR",
}
_STRUCTURE = "Pearson correlation of learned and true label correlations (off-diagonal)"
#: Columns that stay where space is short; others go first.
_KEEP_FIRST = ("mAP", "CF1", "OF1", "O-mAP", "CP", "CR", "OP", "OR")

#: All columns in table order; a table shows those for which some run has a value.
COLUMNS: tuple[Column, ...] = (
    *(Column(name, name, _MEANINGS[name], 100.0, 1, True) for name in METRIC_NAMES),
    Column("structure_r", "structure r", _STRUCTURE, 1.0, 2, True),
    Column("epsilon", "ε", "differential privacy of clients: what all rounds cost", 1.0, 2, False),
    Column("seconds", "s/round", "mean time of a round, without evaluation", 1.0, 2, False),
    Column("bytes_up", "MB up", "sent by all clients, per round", 1e-6, 2, False),
    Column("bytes_down", "MB down", "sent to all clients, per round", 1e-6, 2, False),
)


@dataclass(frozen=True)
class RunRow:
    """The numbers of one run by column key, unrounded.

    ``complete`` is False if it did not end, ``ranked`` if it does not compete; ``lost`` counts how
    often a client failed and was left out of a round.
    """

    label: str
    seed: int
    values: Mapping[str, float]
    complete: bool = True
    lost: int = 0
    ranked: bool = True


@dataclass(frozen=True)
class Cell:
    """Mean and sample standard deviation over ``count`` runs; ``best`` in its column or not."""

    mean: float
    deviation: float
    count: int
    best: bool = False


@dataclass(frozen=True)
class Line:
    """A printed row: a method with its cells, or a trivial predictor."""

    name: str
    cells: tuple[Cell, ...]
    complete: bool = True
    lost: int = 0

    @property
    def marks(self) -> str:
        """What is put behind the name: the notes of the table explain it."""
        return ("" if self.complete else " *") + (" †" if self.lost else "")

    @property
    def marked(self) -> str:
        """The name with its marks."""
        return self.name + self.marks


def _cell(values: Iterable[float]) -> Cell:
    known = [v for v in values if math.isfinite(v)]
    mean = statistics.fmean(known) if known else math.nan
    deviation = statistics.stdev(known) if len(known) > 1 else math.nan
    return Cell(mean, deviation, len(known))


def _mark_best(column: Column, cells: Sequence[Cell], ranked: Sequence[bool]) -> list[Cell]:
    """The cells with the best marked, compared as printed; a single value has no rival."""
    rivals = [r and c.count > 0 for c, r in zip(cells, ranked, strict=True)]
    if not column.quality or sum(rivals) < 2:
        return list(cells)
    printed = [column.number(c.mean) for c in cells]
    top = max(float(p) for p, rival in zip(printed, rivals, strict=True) if rival)
    return [
        replace(c, best=rival and float(p) == top)
        for c, p, rival in zip(cells, printed, rivals, strict=True)
    ]


@dataclass(frozen=True)
class MetricTable:
    """The metrics of several methods; build with :func:`metric_table`.

    One line per method and one per trivial predictor, with the columns that have values, and the
    single runs behind them.
    """

    columns: tuple[Column, ...]
    lines: tuple[Line, ...]
    baselines: tuple[Line, ...]
    runs: tuple[RunRow, ...]
    differences: Differences | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the numbers must know."""
        seeds = {len([r for r in self.runs if r.label == line.name]) for line in self.lines}
        notes = []
        if max(seeds, default=0) > 1:
            over = f"{min(seeds)} to {max(seeds)}" if len(seeds) > 1 else f"{max(seeds)}"
            notes.append(f"mean ± sample standard deviation over {over} seeds")
        for line in self.lines:
            runs = len([r for r in self.runs if r.label == line.name])
            notes += [
                f"{line.name}: {column.heading} over {cell.count} of {runs} seeds, else undefined"
                for column, cell in zip(self.columns, line.cells, strict=True)
                if 0 < cell.count < runs
            ]
        if any(line.name.endswith(":plus") for line in self.lines):
            notes.append("plus: starts from a head in closed form, ends with an averaged model")
        if any(not line.complete for line in self.lines):
            notes.append("* includes a run that has not finished")
        if lost := [f"{line.name} {line.lost}" for line in self.lines if line.lost]:
            notes.append(f"† clients that failed and were left out of rounds: {', '.join(lost)}")
        return tuple(notes)

    def text(self, column: Column, cell: Cell) -> str:
        """A cell as printed, without marking."""
        mean = column.number(cell.mean)
        if not math.isfinite(cell.deviation):
            return mean
        return f"{mean} ± {column.number(cell.deviation)}"

    def to_rich(self, width: int = 80) -> Table:
        """A table for a terminal ``width`` columns wide; secondary columns go first if too narrow.

        Kept as long as they fit: mAP, CF1, OF1, O-mAP, CP, CR, OP, OR, structure r, s/round, MB.
        """
        kept = self._columns_within(width)
        left_out = len(self.columns) - len(kept)
        notes = list(self.notes)
        if left_out:
            notes.append(f"{left_out} of {len(self.columns)} columns left out: terminal too narrow")
        table = framed(notes)
        for index in kept:
            table.add_column(self.columns[index].heading, justify="right", no_wrap=True)
        for group in (self.lines, self.baselines):
            for line in group:
                quiet = "dim" if group is self.baselines else ""
                cells = [
                    Text(
                        self.text(self.columns[i], line.cells[i]),
                        "bold" if line.cells[i].best else quiet,
                    )
                    for i in kept
                ]
                table.add_row(Text(line.marked, quiet), *cells)
            table.add_section()
        return table

    def _columns_within(self, width: int) -> list[int]:
        """Indices of the columns that fit, best rank first until the first that does not."""
        lines = (*self.lines, *self.baselines)
        names = max((len(line.marked) for line in lines), default=0)
        room = width - max(6, min(names, width // 3)) - 3  # with both edges of the frame
        kept: list[int] = []
        first = {key: rank for rank, key in enumerate(_KEEP_FIRST)}
        ranks = [first.get(column.key, len(first)) for column in self.columns]
        for index in sorted(range(len(self.columns)), key=ranks.__getitem__):
            column = self.columns[index]
            texts = [column.heading, *(self.text(column, line.cells[index]) for line in lines)]
            room -= max(map(len, texts)) + 2  # padding and a gap
            if room < 0 and kept:
                break
            kept.append(index)
        return sorted(kept)

    def _rows(
        self,
        escape: Callable[[str], str],
        bold: Callable[[str], str],
        lines: Iterable[Line],
        number: Callable[[str], str] = str,
    ) -> list[list[str]]:
        rows = []
        for line in lines:
            row = [escape(line.marked)]
            for column, cell in zip(self.columns, line.cells, strict=True):
                text = number(self.text(column, cell))
                row.append(bold(text) if cell.best else text)
            rows.append(row)
        return rows

    def to_markdown(self) -> str:
        """A Markdown table; trivial predictors are in italics (Markdown has no rules)."""
        rows = self._rows(_escape_markdown, "**{}**".format, self.lines)
        rows += self._rows(lambda n: f"*{_escape_markdown(n)}*", "**{}**".format, self.baselines)
        text = _markdown([c.heading for c in self.columns], rows, self.notes)
        if self.differences is None:
            return text
        rows = [[_escape_markdown(cell) for cell in row] for row in self.differences.rows()]
        more = _markdown(HEADINGS, rows, self.differences.notes)
        return f"{text}\n\n{_escape_markdown(self.differences.title)}:\n\n{more}"

    def to_csv(self) -> str:
        """One row per run and per trivial predictor, at full precision, in stored units.

        Columns: ``kind`` (``run`` or ``baseline``), ``method``, ``seed`` (empty for baselines),
        ``complete``, then the metrics as fractions, ``structure_r``, ``seconds``, ``bytes_up`` and
        ``bytes_down`` per round, as far as known. There are no summary rows: every summary follows
        from these, and a file that mixes both is easily averaged twice.

        Differences to a method, if asked for, follow as rows of the kinds ``difference``,
        ``difference_low`` and ``difference_high`` (the interval), ``p_images`` and ``p_pairs``.
        """
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        keys = [column.key for column in self.columns]
        writer.writerow(["kind", "method", "seed", "complete", *keys])

        def numbers(values: Iterable[float]) -> list[str]:
            return [repr(float(v)) if math.isfinite(v) else "" for v in values]

        for run in self.runs:
            values = numbers(run.values.get(key, math.nan) for key in keys)
            writer.writerow(["run", run.label, run.seed, str(run.complete).lower(), *values])
        for line in self.baselines:
            writer.writerow(
                ["baseline", line.name, "", "true", *numbers(c.mean for c in line.cells)]
            )
        for kind, method, found in () if self.differences is None else self.differences.csv_rows():
            writer.writerow(
                [kind, method, "", "true", *numbers(found.get(key, math.nan) for key in keys)]
            )
        return out.getvalue()

    def to_latex(self) -> str:
        r"""A ``tabular`` in the style of the booktabs package (``\usepackage{booktabs}``)."""

        def bold(text: str) -> str:
            return rf"\textbf{{{text}}}"

        def number(text: str) -> str:
            return text.replace("-", "$-$").replace("±", r"$\pm$").replace(DASH, "--")

        def render(lines: Iterable[Line]) -> list[str]:
            rows = self._rows(escape_latex, bold, lines, number)
            return [" & ".join(row) + r" \\" for row in rows]

        body = render(self.lines)
        if self.baselines:
            body += [r"\midrule", *render(self.baselines)]
        text = latex(["Method", *(c.heading for c in self.columns)], body, self.notes)
        if self.differences is None:
            return text
        rows = map(latex_row, self.differences.rows())
        notes = (self.differences.title, *self.differences.notes)
        return f"{text}\n{latex(['Method', *HEADINGS], rows, notes)}"


def _markdown(headings: Sequence[str], rows: Iterable[Sequence[str]], notes: Iterable[str]) -> str:
    head = ["Method", *map(_escape_markdown, headings)]
    lines = [f"| {' | '.join(row)} |" for row in (head, *rows)]
    lines.insert(1, "|:--|" + "--:|" * len(headings))
    return "\n".join([*lines, "", *(f"{_escape_markdown(note)}.  " for note in notes)]).rstrip()


def metric_table(
    rows: Sequence[RunRow], baselines: Mapping[str, Mapping[str, float]] | None = None
) -> MetricTable:
    """Gather runs into a table, and mark the best of each column.

    Runs with the same label are seeds of one method; methods keep the order in which they first
    appear.
    """
    groups: dict[str, list[RunRow]] = {}
    for row in rows:
        groups.setdefault(row.label, []).append(row)
    columns = tuple(
        c for c in COLUMNS if any(math.isfinite(r.values.get(c.key, math.nan)) for r in rows)
    )
    ranked = [all(row.ranked for row in group) for group in groups.values()]
    by_column = [
        _mark_best(
            column,
            [_cell(r.values.get(column.key, math.nan) for r in group) for group in groups.values()],
            ranked,
        )
        for column in columns
    ]
    lines = tuple(
        Line(
            label,
            tuple(cells[i] for cells in by_column),
            all(row.complete for row in group),
            sum(row.lost for row in group),
        )
        for i, (label, group) in enumerate(groups.items())
    )
    trivial = tuple(
        Line(name, tuple(_cell([values.get(c.key, math.nan)]) for c in columns))
        for name, values in (baselines or {}).items()
    )
    return MetricTable(columns, lines, trivial, tuple(rows))


def write_tables(runs: Runs) -> None:
    """Write the table of a comparison into its folder: as Markdown, CSV and LaTeX."""
    from fedharmony.records import write_file  # loads torch, which tables do without

    table = table_of(runs)
    texts = {"md": table.to_markdown(), "csv": table.to_csv(), "tex": table.to_latex()}
    for suffix, text in texts.items():
        write_file(runs.home / f"table.{suffix}", text.encode())


def table_of(runs: Runs) -> MetricTable:
    """The table of loaded runs; on different data none of them is the best."""
    return replace(metric_table(rows_of(runs), runs.baselines), differences=differences(runs))


def rows_of(runs: Runs) -> list[RunRow]:
    """Every run as a row of the table."""
    return [
        _run_row(label, run, label in runs.ranked and not runs.differing)
        for label, group in runs.groups.items()
        for run in group
    ]


def _run_row(label: str, run: RunView, ranked: bool) -> RunRow:
    values = {
        **{name: run.metrics.get(name, math.nan) for name in METRIC_NAMES},
        "structure_r": run.structure.get("soft_pearson", math.nan),
        "epsilon": run.privacy.get("epsilon", math.nan),
        **{key: run.per_round(key) for key in ("seconds", "bytes_up", "bytes_down")},
    }
    return RunRow(label, run.seed, values, run.status == "completed", run.clients_lost, ranked)


def _escape_markdown(text: str) -> str:
    r"""Text that no Markdown reader takes for markup.

    >>> print(_escape_markdown("a|b_c*<i>"))
    a\|b\_c\*\<i\>
    """
    escaped = "".join(f"\\{c}" if c in r"\`*_{}[]<>|#~" else c for c in text)
    return " ".join(escaped.split())
