"""What a single run's scores say, in a few lines for the terminal."""

from __future__ import annotations

import statistics
from collections.abc import Iterator

import numpy as np

from fedharmony.experiments.card import privacy_facts
from fedharmony.report.load import Runs
from fedharmony.report.measures import decide, reliability, taken_for, worst_decile
from fedharmony.report.panels.mistakes import MOST_LABELS
from fedharmony.report.panels.users import worst_users


def remarks(runs: Runs) -> Iterator[str]:
    """Thresholds, mistakes, calibration and users of a single run, as far as it has them."""
    if not runs.alone:
        return
    run = runs.first
    chosen = run.results.get("thresholds")
    if chosen:
        better = chosen.get("metrics") or {}
        yield (
            f"With a threshold for each label (chosen on {chosen.get('images', 0):,} held-out "
            f"training images): {_change('CF1', run.metrics, better)}, "
            f"{_change('OF1', run.metrics, better)}."
        )
    if run.privacy:
        yield f"Privacy: {'; '.join(privacy_facts(run.privacy))}."
    if run.scores is not None:
        if len(run.classes) <= MOST_LABELS:
            swaps = taken_for(decide(run.scores, run.thresholds))
            missed, given = divmod(int(np.argmax(swaps)), len(run.classes))
            if swaps[missed, given]:
                yield (
                    f"Most frequent mistake: {run.classes[missed]!r} missed and "
                    f"{run.classes[given]!r} given ({swaps[missed, given]:.0f} test images)."
                )
        error = reliability(run.scores).error
        yield f"Scores are off as probabilities by {100 * error:.1f} points (ECE)."
    if values := list(run.per_user.values()):
        yield (
            f"O-mAP of each of {len(values):,} test users: mean "
            f"{100 * statistics.fmean(values):.1f}, worst tenth {100 * worst_decile(values):.1f}; "
            f"worst: {worst_users(run.per_user)}."
        )


def _change(name: str, before: dict[str, float], after: dict[str, float]) -> str:
    return f"{name} {100 * before.get(name, 0.0):.1f} → {100 * after.get(name, 0.0):.1f}"
