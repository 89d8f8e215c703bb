"""Differences of all methods to one of them, with intervals: how much chance may be in them.

A pair is two runs of the same seed and setting, one of the method and one of the reference. Where
all runs of the pairs kept their scores, intervals come from a paired bootstrap over the test
images; otherwise from the spread over pairs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np
from rich.table import Table
from rich.text import Text

from fedharmony.errors import CheckpointError
from fedharmony.experiments.scores import has_scores, load_scores
from fedharmony.metrics import METRIC_NAMES, MetricOptions
from fedharmony.metrics.bootstrap import evaluate_resamples, resampled
from fedharmony.metrics.multilabel import Doubles
from fedharmony.metrics.significance import (
    LEVEL,
    bootstrap_p,
    holm,
    percentile_interval,
    student_interval,
    wilcoxon_p,
)
from fedharmony.report.grid import DASH, framed, signed
from fedharmony.report.load import Runs, RunView

RESAMPLES = 1000
#: Metrics of the short table on the terminal.
SHORT = ("mAP", "CF1", "OF1")
#: With fewer pairs than this a reader is warned.
FEW = 6
Pair = tuple[RunView, RunView]


@dataclass(frozen=True)
class Difference:
    """How far a method lies from the reference in one metric; fractions, not points.

    Attributes:
        method: The method's display name.
        metric: The metric's name.
        pairs: The difference of each pair of runs.
        low, high: Ends of the interval of the mean difference; nan if unknown.
        p_images: p of the paired bootstrap, corrected by Holm over the methods; nan without it.
        p_pairs: p of Wilcoxon's signed-rank test over pairs, corrected likewise.
    """

    method: str
    metric: str
    pairs: tuple[float, ...]
    low: float
    high: float
    p_images: float
    p_pairs: float

    @property
    def mean(self) -> float:
        """The mean over pairs."""
        return statistics.fmean(self.pairs)

    @property
    def better(self) -> int:
        """Pairs in which the method is better."""
        return sum(d > 0 for d in self.pairs)

    def cells(self) -> list[str]:
        """As printed: metric, difference, interval, pairs, two p-values."""
        mean, low, high = (signed(100 * value) for value in (self.mean, self.low, self.high))
        interval = f"{low} … {high}" if math.isfinite(self.low) else DASH
        won = f"{self.better} of {len(self.pairs)}"
        return [self.metric, mean, interval, won, _p(self.p_images), _p(self.p_pairs)]


INTERVAL = f"{100 * LEVEL:.0f} % interval"
HEADINGS = ("Metric", "difference", INTERVAL, "better in", "p images", "p pairs")


@dataclass(frozen=True)
class Differences:
    """All differences to one method, by method in table order, one per metric.

    ``images`` is the number of test images that were resampled. Intervals of methods ``without``
    scores come from pairs; methods that are ``unpaired`` share no seed and setting with the
    reference.
    """

    against: str
    found: Mapping[str, tuple[Difference, ...]]
    images: int
    without: tuple[str, ...] = ()
    unpaired: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        """What the figures are."""
        return f"Difference to {self.against}, in points"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the figures must know."""
        counts = sorted({len(row[0].pairs) for row in self.found.values()})
        over = " to ".join(str(n) for n in dict.fromkeys((counts[0], counts[-1])))
        pairs, few = "pair" if counts[-1] == 1 else "pairs", counts[-1] < FEW
        found = [f"mean over {over} {pairs} of runs with the same seed and setting"]
        if self.images:
            found.append(
                f"intervals and p images: paired percentile bootstrap over {self.images:,} test "
                f"images ({RESAMPLES:,} resamples, the same for all runs). They know chance in the "
                "test images only. Other seeds give other models"
                + (": with so few, more may change than an interval says" if few else "")
            )
        if self.without:
            found.append(
                f"runs without scores ({', '.join(self.without)}): Student's interval over pairs, "
                "which takes differences for normal and needs two pairs"
            )
        found.append(
            "Wilcoxon's signed-rank test gives p pairs, two-sided; with "
            f"{counts[-1]} {pairs} it cannot be below {_p(min(1.0, 2.0 ** (1 - counts[-1])))}. "
            "Both p are corrected over the methods (Holm), intervals are not"
        )
        if self.unpaired:
            found.append(f"no common seed and setting: {', '.join(self.unpaired)}")
        return tuple(found)

    def rows(self, metrics: Sequence[str] = METRIC_NAMES) -> list[list[str]]:
        """Printed rows: method, then :meth:`Difference.cells`."""
        return [
            [method, *difference.cells()]
            for method, row in self.found.items()
            for difference in row
            if difference.metric in metrics
        ]

    def to_rich(self) -> Table:
        """For a terminal: three metrics of every method."""
        table = framed(self.notes, self.title)
        for heading in HEADINGS:
            left = heading == "Metric"
            table.add_column(heading, justify="left" if left else "right", no_wrap=True)
        last = ""
        for method, *cells in self.rows(SHORT):
            if last and last != method:
                table.add_section()
            table.add_row(Text("" if method == last else method), *map(Text, cells))
            last = method
        return table

    def csv_rows(self) -> Iterable[tuple[str, str, dict[str, float]]]:
        """Kind, method and numbers by metric, as fractions."""
        for method, row in self.found.items():
            for kind, attribute in (
                ("difference", "mean"),
                ("difference_low", "low"),
                ("difference_high", "high"),
                ("p_images", "p_images"),
                ("p_pairs", "p_pairs"),
            ):
                yield kind, method, {d.metric: getattr(d, attribute) for d in row}


def _p(value: float) -> str:
    if not math.isfinite(value):
        return DASH
    return f"{value:.3f}" if value >= 0.001 else "<0.001"


@lru_cache(maxsize=1)
def differences(runs: Runs) -> Differences | None:
    """The differences to the method that ``runs.against`` names; None where it names none.

    Unfinished runs do not count.
    """
    if runs.against is None or runs.differing:
        return None
    complete = runs.by_setting()
    references = complete.pop(runs.against, {})
    paired = {
        method: [(run, references[key]) for key, run in found.items() if key in references]
        for method, found in complete.items()
    }
    pairs = {method: found for method, found in paired.items() if found}
    if not pairs:
        return None
    scored = {
        m for m, found in pairs.items() if all(has_scores(r.folder) for p in found for r in p)
    }
    samples = _resampled_metrics([run for m in scored for pair in pairs[m] for run in pair])
    found: dict[str, list[Difference]] = {method: [] for method in pairs}
    for metric in METRIC_NAMES:
        row = [
            _difference(method, metric, pairs[method], samples if method in scored else None)
            for method in pairs
        ]
        images, tests = holm([d.p_images for d in row]), holm([d.p_pairs for d in row])
        for d, p_images, p_pairs in zip(row, images, tests, strict=True):
            found[d.method].append(replace(d, p_images=p_images, p_pairs=p_pairs))
    some = next((r for m in scored for r, _ in pairs[m]), None)
    return Differences(
        runs.against,
        {method: tuple(row) for method, row in found.items()},
        0 if some is None else len(load_scores(some.folder).ids),
        tuple(m for m in pairs if m not in scored),
        tuple(m for m in paired if m not in pairs),
    )


def _resampled_metrics(runs: Iterable[RunView]) -> dict[RunView, dict[str, Doubles]]:
    """The metrics of every run on the same resamples of the test images."""
    found: dict[RunView, dict[str, Doubles]] = {}
    first, counts = None, np.empty((0, 0), np.int32)
    for run in dict.fromkeys(runs):
        kept = load_scores(run.folder)
        if first is None:
            first, counts = kept, resampled(len(kept.ids), RESAMPLES)
        elif kept.ids != first.ids or not np.array_equal(kept.labels, first.labels):
            raise CheckpointError(
                f"The scores in {run.folder} are of other test images than those of the other "
                "runs. Restore its scores.safetensors, or delete it to compare without scores."
            )
        options = MetricOptions(**(run.results.get("metric_options") or {}))
        found[run] = evaluate_resamples(kept.scores, kept.labels, counts, options, kept.known)
    return found


def _difference(
    method: str,
    metric: str,
    pairs: Sequence[Pair],
    samples: Mapping[RunView, Mapping[str, Doubles]] | None,
) -> Difference:
    """One difference, its p-values not corrected yet."""
    each = [
        run.metrics.get(metric, math.nan) - ref.metrics.get(metric, math.nan) for run, ref in pairs
    ]
    p_pairs = wilcoxon_p([d for d in each if math.isfinite(d)])
    if samples is None:
        return Difference(method, metric, tuple(each), *student_interval(each), math.nan, p_pairs)
    mean = np.mean([samples[run][metric] - samples[ref][metric] for run, ref in pairs], axis=0)
    interval = percentile_interval(mean)
    return Difference(method, metric, tuple(each), *interval, bootstrap_p(mean), p_pairs)
