"""What a difference between two methods may owe to chance.

Two sources of chance are looked at apart. :func:`percentile_interval` and :func:`bootstrap_p` read
resampled differences (:mod:`fedharmony.metrics.bootstrap`): would other test images have said the
same? :func:`wilcoxon_p` and :func:`student_interval` read the differences of pairs of runs, one
pair per seed and setting: would other runs? :func:`holm` pays for asking about several methods.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from fedharmony.metrics.multilabel import Doubles

#: Share of cases in which an interval is meant to hold the true difference.
LEVEL = 0.95


def percentile_interval(resampled: Doubles, level: float = LEVEL) -> tuple[float, float]:
    """The middle ``level`` of resampled values; undefined ones (nan) are left out.

    >>> percentile_interval(np.arange(101.0), 0.5)
    (25.0, 75.0)
    """
    known = resampled[np.isfinite(resampled)]
    if not known.size:
        return math.nan, math.nan
    low, high = np.quantile(known, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def bootstrap_p(resampled: Doubles) -> float:
    """Two-sided p of "no difference": how rarely resampled differences lie beyond zero.

    ``p = min(1, 2 · (1 + m) / (1 + B))`` with B resamples, of which m lie at zero or on the rarer
    side of it.

    >>> bootstrap_p(np.array([1.0, 2.0, 3.0, -1.0] + [1.0] * 95))  # 2 · 2 / 100
    0.04
    """
    known = resampled[np.isfinite(resampled)]
    if not known.size:
        return math.nan
    rarer = min(int((known <= 0).sum()), int((known >= 0).sum()))
    return min(1.0, 2 * (1 + rarer) / (1 + known.size))


def student_interval(values: Sequence[float], level: float = LEVEL) -> tuple[float, float]:
    """Student's interval of the mean; undefined for fewer than two values.

    Values that are normal and independent are assumed.

    >>> low, high = student_interval([1.0, 2.0, 3.0])  # 2 ± 4.303 · 1 / √3
    >>> round(low, 3), round(high, 3)
    (-0.484, 4.484)
    """
    from scipy import stats  # slow to import, and few runs need it

    if len(values) < 2:
        return math.nan, math.nan
    mean, error = float(np.mean(values)), float(np.std(values, ddof=1)) / math.sqrt(len(values))
    reach = float(stats.t.ppf((1 + level) / 2, len(values) - 1)) * error
    return mean - reach, mean + reach


def wilcoxon_p(differences: Sequence[float]) -> float:
    """Two-sided p of Wilcoxon's signed-rank test; differences of zero are left out.

    Exact for up to 50 differences of different size (13 where sizes are equal), else by the normal
    approximation. Of n differences with one sign the ranks are 1 … n, so that no p is below
    ``2 / 2ⁿ``: three pairs never give less than 0.25.

    >>> wilcoxon_p([0.3, 0.1, 0.2]), wilcoxon_p([0.0, 0.0]), wilcoxon_p([])
    (0.25, 1.0, nan)
    """
    from scipy import stats

    if not differences:
        return math.nan
    nonzero = [d for d in differences if d != 0]
    return float(stats.wilcoxon(nonzero).pvalue) if nonzero else 1.0


def holm(p: Sequence[float]) -> list[float]:
    """p-values corrected for their number by Holm's step-down method; nan is not counted.

    The smallest of m is multiplied by m, the next by m − 1, …, and none is below one before it.

    >>> holm([0.01, 0.04, 0.03])  # 0.01 · 3, max(0.03 · 2, 0.04 · 1), 0.03 · 2
    [0.03, 0.06, 0.06]
    """
    known = sorted((value, place) for place, value in enumerate(p) if math.isfinite(value))
    found, least = [math.nan] * len(p), 0.0
    for rank, (value, place) in enumerate(known):
        least = max(least, min(1.0, (len(known) - rank) * value))
        found[place] = least
    return found
