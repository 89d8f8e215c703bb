"""What a reproduction writes: tables, figures, results and one report page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import fedharmony
from fedharmony.experiments.folder import jsonable, make_folder
from fedharmony.files import write_atomically
from fedharmony.paper.item import Found, Item, Shown
from fedharmony.paper.plan import Job, tasks
from fedharmony.report.load import RunView
from fedharmony.report.page import render
from fedharmony.report.panel import Section, count
from fedharmony.report.standalone import standalone

RESULTS, REPORT = "results.json", "report.html"


@dataclass(frozen=True)
class Outcome:
    """An item of one study that can be shown."""

    job: Job
    item: Item
    found: Found
    shown: Shown

    @property
    def folder(self) -> Path:
        """Where its files are."""
        return self.job.home / self.item.name

    @property
    def runs(self) -> int:
        """Finished runs behind it."""
        return len(self.found.folders)

    def as_dict(self) -> dict[str, Any]:
        """Everything but the figures, for JSON."""
        return {
            "item": self.item.name,
            "study": self.job.study.name,
            "title": self.item.title,
            "claim": self.item.claim,
            "lead": " ".join(section.lead for section in self.shown.sections),
            "verdict": self.shown.verdict.word,
            "why": self.shown.verdict.why,
            "rule": self.shown.verdict.rule,
            "more": {name: str(verdict) for name, verdict in self.shown.more.items()},
            "runs": self.runs,
            "grids": [grid.as_dict() for grid in self.shown.grids],
            "figures": [name for name, _ in figures(self.shown)],
        }


def outcomes(
    jobs: Sequence[Job], every: Sequence[Item], faults: dict[Item, Exception] | None = None
) -> list[Outcome]:
    """All items whose runs are finished, with one seed at least, in the paper's order.

    An item that cannot be shown is left out and put among the ``faults``, if there are such.
    """
    shown = []
    for job, item in tasks(jobs, every):
        try:
            if (found := job.found_so_far(item)) is not None:
                shown.append(Outcome(job, item, found, _with_losses(item.show(found), found)))
        except Exception as error:
            if faults is None:
                raise
            faults[item] = error
    return shown


def _with_losses(shown: Shown, found: Found) -> Shown:
    """The same; the verdict says which clients the runs behind it lost, or trained once more."""
    lost = sum(run.clients_lost for run in found.folders.values())
    again = sum(sum(run.fallbacks.get("plain", {}).values()) for run in found.folders.values())
    if not lost + again:
        return shown
    text = (
        f"The runs behind this lost {count(lost, 'client reply', 'client replies')} for good, and "
        f"trained {count(again, 'client')} a second time, on the plain path."
    )
    return replace(shown, verdict=replace(shown.verdict, why=f"{shown.verdict.why} {text}"))


def figures(shown: Shown) -> Iterator[tuple[str, str]]:
    """Name and content of each figure as a file of its own."""
    number = 0
    for section in shown.sections:
        for picture in section.pictures:
            number += 1
            yield f"figure-{number}.svg", standalone(picture)


def write(home: Path, scale: str, found: Sequence[Outcome], command: str) -> None:
    """Write all files; those that would not change are left alone."""
    for outcome in found:
        make_folder(outcome.folder)
        grids = outcome.shown.grids
        verdict = f"{outcome.shown.verdict}\n\nRule: {outcome.shown.verdict.rule}\n"
        texts = {
            "table.md": "\n\n".join(
                [*(f"{g.title}\n\n{g.to_markdown()}\n\n{g.note}" for g in grids), verdict]
            ),
            "table.tex": "\n".join(grid.to_latex() for grid in grids),
            **{
                f"table{f'-{n}' if n > 1 else ''}.csv": grid.to_csv()
                for n, grid in enumerate(grids, start=1)
            },
            **dict(figures(outcome.shown)),
        }
        for name, text in texts.items():
            _keep(outcome.folder / name, text)
    make_folder(home)
    results = {
        "scale": scale,
        "runs": len(_runs(found)),
        "machines": sorted({machine_of(run) for run in _runs(found).values()}),
        "items": [outcome.as_dict() for outcome in found],
    }
    _keep(home / RESULTS, json.dumps(jsonable(results), indent=1, ensure_ascii=False) + "\n")
    _keep(home / REPORT, page(scale, found, command))


def _keep(path: Path, text: str) -> None:
    content = text.encode("utf-8", "replace")
    if not path.is_file() or path.read_bytes() != content:
        write_atomically(path, content)


def page(scale: str, found: Sequence[Outcome], command: str) -> str:
    """One page with all items."""
    sections: dict[str, Section] = {}
    several = len({outcome.job.study.name for outcome in found}) > 1
    for outcome in found:
        study = outcome.job.study
        for number, section in enumerate(outcome.shown.sections, start=1):
            summary = _summary(outcome) if number == 1 else ()
            name = f"{study.name}-{outcome.item.name}-{number}"
            apart = several and outcome.item.about_data
            title = f"{section.title} ({study.name})" if apart else section.title
            sections[name] = replace(section, title=title, summary=summary)
    values: Mapping[str, Any] = {
        "kind": "reproduction",
        "title": "FedHarmony (arXiv 2604.28024), item by item",
        "headline": words(found),
        "facts": [
            f"scale {scale}",
            *dict.fromkeys(o.job.study.title for o in found if o.item.about_data),
            count(len(_runs(found)), "run"),
        ],
        "notices": [],
        "tiles": [],
        "table": None,
        "table_keys": {},
        "crowned": False,
        "glance": [],
        "rules": [],
        "options": [],
        "sections": sections,
        "failures": {"summary": "", "rows": [], "left_out": 0},
        "settings": [],
        "environment": [],
        "commands": [command],
        "files": [(RESULTS, "tables and verdicts of all items")],
        "version": fedharmony.__version__,
    }
    return render(values)


def _summary(outcome: Outcome) -> tuple[tuple[str, str], ...]:
    return (
        ("The paper", outcome.item.claim),
        (_where(outcome), str(outcome.shown.verdict)),
        *((name, str(verdict)) for name, verdict in outcome.shown.more.items()),
        ("Rule", outcome.item.rule),
    )


def _where(outcome: Outcome) -> str:
    return f"Found on {outcome.job.study.title}" if outcome.item.about_data else "Found"


def words(found: Sequence[Outcome]) -> str:
    """How many claims came out how."""
    verdicts = [outcome.shown.verdict.word for outcome in found]
    parts = [f"{verdicts.count(word)} {word}" for word in dict.fromkeys(sorted(verdicts))]
    return f"Of {count(len(found), 'item')}: {', '.join(parts)}." if found else "Nothing yet."


def _runs(found: Sequence[Outcome]) -> dict[Path, RunView]:
    """All runs, each once."""
    views = (run for outcome in found for run in outcome.found.folders.values())
    return {run.folder: run for run in views}


def machine_of(run: RunView) -> str:
    """What a run was carried out on."""
    known = run.environment
    name = known.get("accelerator") or f"{known.get('processor')} CPU"
    return f"{name}, torch {known.get('torch')}"
