"""Fig. 5: how many clients take part, and how many there are."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from fedharmony import stopping
from fedharmony.experiments.folder import RunFolder
from fedharmony.experiments.jobs import end_with_parent
from fedharmony.experiments.run import start
from fedharmony.experiments.settings import compose
from fedharmony.paper.item import BASE, OURS, Bench, Found, Item, Measured, Shown, items, mean
from fedharmony.paper.lines import lines_over
from fedharmony.paper.published import LOOKS, NAMES
from fedharmony.paper.scale import CROWDS, Part, Study
from fedharmony.paper.verdict import decide
from fedharmony.report.charts import Picture, Row, dots
from fedharmony.report.grid import Grid, spread
from fedharmony.report.panel import Section, count
from fedharmony.report.svg import style
from fedharmony.server.sampling import cohort_size

METHODS = (BASE, OURS)
KEYS = tuple((NAMES[method], LOOKS[method]) for method in METHODS)
#: Points by which the paper's values vary at most, as its text has it.
PRINTED = 2.0
#: What the text of the paper speaks of.
METRICS = ("mAP", "OR", "OF1")
#: Rounds of the runs whose memory is measured.
ROUNDS = 2
#: What is measured of it, by its key, in words.
MEMORY = {"peak_mb": "same share", "same_cohort_mb": "same cohort"}


@items.register("fig5")
class Fig5(Item):
    """Metrics over participation and over the number of clients."""

    place = 80
    title = "Fig. 5: participation and number of clients"
    claim = (
        "(a, b) With 25, 50 and 75 % of the clients per round results vary by 1 to 2 points. (c, "
        "d) From 1,000 to 2,500 clients with the same images, OR and OF1 vary by 1 to 2 points."
    )
    measures = f"the memory of runs of {ROUNDS} rounds with 1,000 to 2,500 clients"
    measuring = 80.0
    rule = (
        "Range: largest less smallest mean of FedHarmony's metric. Reproduced if the ranges of mAP "
        "and OF1 over participation and of OR and OF1 over the number of clients are all at most 2 "
        "points, and OF1 is above 10 everywhere. Not reproduced if some range exceeds 2 points. "
        "Undecided if none does, but nothing was learnt somewhere (OF1 below 10)."
    )

    def parts(self, study: Study) -> Sequence[Part]:
        """Both halves."""
        return [*self.by_share(study).values(), *self.by_crowd(study).values()]

    def by_share(self, study: Study) -> dict[str, Part]:
        """(a, b)."""
        return {f"{float(share):.0%}": study.at_share(share, METHODS) for share in study.shares}

    def by_crowd(self, study: Study) -> dict[str, Part]:
        """(c, d); not for clients that are given."""
        if study.crowd is None:
            return {}
        return {f"{n:,}": study.with_clients(n, METHODS) for n in CROWDS}

    def fits(self, study: Study) -> bool:
        """Whether there is something to vary."""
        return bool(study.shares)

    def measure(self, bench: Bench) -> Measured:
        """The largest memory of a short run of FedHarmony, in a process of its own.

        Once with the share of the clients that the runs have, once with the same number of clients
        a round.
        """
        crowd = self.by_crowd(bench.study)
        fewest = bench.settings(bench.study.with_clients(CROWDS[0], METHODS), OURS).federation
        cohort = cohort_size(CROWDS[0], fewest.participation, fewest.cohort)
        changes = {"peak_mb": (), "same_cohort_mb": (f"federation.cohort={cohort}",)}
        return {
            key: {name: peak_memory(bench, part, *more) for name, part in crowd.items()}
            for key, more in changes.items()
        }

    def show(self, found: Found) -> Shown:
        """Two sections: participation, and number of clients."""
        share, crowd = self.by_share(found.study), self.by_crowd(found.study)
        first = Section(
            self.title,
            "(a, b) Share of the clients that train in a round. Lines are means over seeds, bands "
            "± one standard deviation. The paper's figure has no numbers; its text says 1 to 2 "
            "points of variation.",
            _lines(found, "participation", share),
            KEYS,
            grids=(_grid(found, share, "participation"),),
        )
        sections = [first]
        ranges = {f"{k} over participation": _range(found, share, k) for k in ("mAP", "OF1")}
        if crowd:
            sections.append(self._crowds(found, crowd))
            ranges |= {f"{k} over clients": _range(found, crowd, k) for k in ("OR", "OF1")}
        points = [*share.values(), *crowd.values()]
        learnt = min(mean(found.values(part, OURS, "OF1")) for part in points) > 10
        steady = max(ranges.values()) <= PRINTED
        told = ", ".join(f"{name} {value:.1f}" for name, value in ranges.items())
        why = f"FedHarmony's ranges, in points: {told}."
        verdict = decide(learnt and steady, not steady, why, self.rule)
        return Shown(tuple(sections), verdict)

    def _crowds(self, found: Found, crowd: Mapping[str, Part]) -> Section:
        memory = {
            words: {n: float(mb) for n, mb in found.measured[key].items()}
            for key, words in MEMORY.items()
            if key in found.measured
        }
        rows = [
            Row(name, tuple((style(i), values[name]) for i, values in enumerate(memory.values())))
            for name in crowd
        ]
        top = 1.1 * max(value for values in memory.values() for value in values.values())
        note = (
            f"Of a process that trains {ROUNDS} rounds of FedHarmony, everything included. It "
            "holds the models of a round's cohort: the same share of more clients is a larger "
            "cohort, the same cohort is that of 1,000 clients. The paper says nothing of memory."
        )
        keys = tuple((words, style(i)) for i, words in enumerate(memory))
        title = "Largest memory, MB, by the number of clients"
        picture = dots(title, rows, ends=(0.0, top), spacing=22, note=note, keys=keys)
        return Section(
            "Fig. 5 (c, d): number of clients",
            "The same training images on more clients; the same share of the clients, and so of "
            "the images, trains in a round. Fewer images per client are fewer local steps a round: "
            "FedAvg stands beside. The paper's text: OR and OF1 vary by 1 to 2 points.",
            (*_lines(found, "clients", crowd), picture),
            KEYS,
            grids=(_grid(found, crowd, "clients", memory),),
        )


def _grid(
    found: Found,
    parts: Mapping[str, Part],
    axis: str,
    memory: Mapping[str, Mapping[str, float]] | None = None,
) -> Grid:
    extra = {
        f"memory, MB: {words}": [f"{mb[n]:,.0f}" for n in parts]
        for words, mb in (memory or {}).items()
    }
    rows = []
    for i, (name, part) in enumerate(parts.items()):
        cells = [spread(found.values(part, method, k)) for method in METHODS for k in METRICS]
        rows.append((name, *cells, *(column[i] for column in extra.values())))
    ranges = [f"{_range(found, parts, k, m):.1f}" for m in METHODS for k in METRICS]
    rows.append(("range", *ranges, *("" for _ in extra)))
    printed = [*("–" for _ in METRICS), *("1–2" for _ in METRICS)]
    rows.append(("paper, range", *printed, *("" for _ in extra)))
    return Grid(
        f"Over {axis}, {found.study.title}, per cent",
        (axis, *(f"{NAMES[m]} {k}" for m in METHODS for k in METRICS), *extra),
        tuple(rows),
        f"{count(next(iter(parts.values())).seeds, 'seed')}.{_changed(parts)}",
    )


def _changed(parts: Mapping[str, Part]) -> str:
    """The settings that all points share beside the study's own."""
    first, *others = (part.changes for part in parts.values())
    common = [c for c in first if c[-1] != "=" and all(c in changes for changes in others)]
    return f" Settings of these runs alone: {', '.join(common)}." if common else ""


def _lines(found: Found, axis: str, parts: Mapping[str, Part]) -> tuple[Picture, ...]:
    """The metrics over the points, with as wide a belt as the paper's values have, around ours."""
    pictures = []
    for metric in METRICS:
        middle = mean([mean(found.values(part, OURS, metric)) for part in parts.values()])
        words = f"{PRINTED:g} points, as far as the paper's values lie apart at most"
        belt = middle - PRINTED / 2, middle + PRINTED / 2, words
        pictures.append(lines_over(found, axis, parts, METHODS, metric, belt))
    return tuple(pictures)


def _range(found: Found, parts: Mapping[str, Part], metric: str, method: str = OURS) -> float:
    """Largest less smallest mean over the points."""
    means = [mean(found.values(part, method, metric)) for part in parts.values()]
    return max(means) - min(means)


def peak_memory(bench: Bench, part: Part, *more: str) -> float:
    """Megabytes that a short run of a part needs at most, measured in a process of its own."""
    short = (f"run.rounds={ROUNDS}", f"run.eval_every={ROUNDS}", *more)
    settings = bench.settings(part, OURS, *short)
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as processes, stopping.interruptible():
        return processes.submit(_trained_memory, settings.tree()).result()


def _trained_memory(tree: Mapping[str, Any]) -> float:
    """Train in a folder that goes, in this process, and say what memory that took."""
    threading.Thread(target=end_with_parent, daemon=True).start()
    with tempfile.TemporaryDirectory() as folder:
        start(compose(tree), RunFolder(Path(folder) / "run"), lambda event: None)
    status = Path("/proc/self/status")
    if status.is_file():  # what the parent process held does not count here
        (line,) = (x for x in status.read_text().splitlines() if x.startswith("VmHWM"))
        return int(line.split()[1]) * 1024 / 1e6
    import resource  # of Unix alone

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e6
