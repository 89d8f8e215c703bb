"""The tables of docs/results.md and docs/voc2012.md, from folders of finished runs.

    python benchmarks/tables.py NAME RUNS [RUNS ...]

RUNS are folders that ``fedharmony compare`` wrote; several are merged. Prints the tables as
Markdown, with paired differences to FedAvg, and keeps them with every run in results/NAME.csv.
"""

from __future__ import annotations

import sys
from pathlib import Path

from fedharmony.report.load import load
from fedharmony.report.tables import table_of


def main() -> None:
    name, *folders = sys.argv[1:]
    table = table_of(load(folders, against="fedavg"))
    (Path(__file__).parent / "results" / f"{name}.csv").write_text(table.to_csv())
    print(table.to_markdown())


if __name__ == "__main__":
    main()
