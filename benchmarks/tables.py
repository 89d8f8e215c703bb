"""The tables of runs that docs/results.md, docs/voc2012.md and docs/robustness.md show.

    python benchmarks/tables.py NAME RUNS [RUNS ...]
    python benchmarks/tables.py

RUNS are folders that ``fedharmony compare`` wrote; several are merged. The first command keeps
every run and the paired differences to FedAvg in results/NAME.csv. The second writes the tables of
the pages anew from these files. A table stands behind a comment that names its file:
``<!-- metrics: NAME METHOD … -->``, or ``<!-- differences: NAME -->`` with 95 % intervals; those of
results/attacks.json behind ``<!-- rules: KIND RULE -->`` (attacks.py, ``page_tables``).
"""

from __future__ import annotations

import csv
import re
import sys
from pathlib import Path

from attacks import page_tables
from fedharmony.metrics import METRIC_NAMES
from fedharmony.report.grid import signed
from fedharmony.report.load import load
from fedharmony.report.tables import RunRow, metric_table, table_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
PAGES = ("docs/results.md", "docs/voc2012.md", "docs/robustness.md")
PLACE = re.compile(r"(<!-- (metrics|differences|rules): (\S+)((?: \S+)*) -->\n\n)(?:\|.*\n)*")


def metrics(rows: list[dict[str, str]], methods: list[str]) -> str:
    """Mean and deviation over the seeds of some methods, or of all."""
    keys = (*METRIC_NAMES, "structure_r")
    runs = [row for row in rows if row["kind"] == "run"]
    names = methods or list(dict.fromkeys(row["method"] for row in runs))
    chosen = [
        RunRow(name, int(row["seed"]), {key: float(row[key]) for key in keys})
        for name in names
        for row in runs
        if row["method"] == name and row["complete"] == "true"
    ]
    lines = metric_table(chosen).to_markdown().splitlines()
    return "\n".join(line for line in lines if line.startswith("|"))


def differences(rows: list[dict[str, str]]) -> str:
    """How far each method lies from FedAvg."""
    kinds = ("difference", "difference_low", "difference_high")
    found = {(row["kind"], row["method"]): row for row in rows}
    lines = ["| Method | mAP | CF1 | OF1 |", "|:--|--:|--:|--:|"]
    for method in (row["method"] for row in rows if row["kind"] == "difference"):
        cells = []
        for key in ("mAP", "CF1", "OF1"):
            mean, low, high = (signed(100 * float(found[kind, method][key])) for kind in kinds)
            cells.append(f"{mean} ({low} … {high})")
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def filled(page: str) -> str:
    """A page with its tables written anew."""

    def table(match: re.Match[str]) -> str:
        head, kind, name, methods = match.groups()
        if kind == "rules":
            return f"{head}{page_tables(RESULTS / 'attacks.json')[name](methods.strip())}\n"
        with (RESULTS / f"{name}.csv").open(encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        text = metrics(rows, methods.split()) if kind == "metrics" else differences(rows)
        return f"{head}{text}\n"

    return PLACE.sub(table, page)


def main() -> None:
    if len(sys.argv) > 1:
        name, *folders = sys.argv[1:]
        table = table_of(load(folders, against="fedavg"))
        (RESULTS / f"{name}.csv").write_text(table.to_csv())
        print(table.to_markdown())
    for page in PAGES if len(sys.argv) == 1 else ():
        (ROOT / page).write_text(filled((ROOT / page).read_text("utf-8")), "utf-8")


if __name__ == "__main__":
    main()
