"""Whether a claim was found again, by a rule that is stated beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from fedharmony.metrics.significance import student_interval
from fedharmony.report.grid import signed

REPRODUCED, NOT_REPRODUCED, UNDECIDED = "reproduced", "not reproduced", "cannot be decided"


@dataclass(frozen=True)
class Verdict:
    """What came out.

    Attributes:
        word: one of the three.
        why: a sentence with the figures.
        rule: how the word follows from the figures.
    """

    word: str
    why: str
    rule: str

    def __str__(self) -> str:
        """Word and sentence."""
        return f"{self.word[:1].upper()}{self.word[1:]}: {self.why}"


def decide(yes: bool, no: bool, why: str, rule: str) -> Verdict:
    """The word: ``yes`` and ``no`` cannot both hold, neither is undecided.

    >>> decide(False, False, "one seed.", "…").word
    'cannot be decided'
    """
    assert not (yes and no), rule
    return Verdict(REPRODUCED if yes else NOT_REPRODUCED if no else UNDECIDED, why, rule)


@dataclass(frozen=True)
class Gap:
    """A difference of paired runs, with Student's 95 % interval over the pairs.

    >>> gap = Gap.of([1.0, 2.0, 3.0])
    >>> gap.mean, gap.above(0), gap.below(5), str(gap)
    (2.0, False, True, '+2.0 (−0.5 to +4.5)')
    """

    mean: float
    low: float
    high: float
    count: int

    @classmethod
    def of(cls, differences: Sequence[float]) -> Gap:
        """The mean of the differences; of fewer than two pairs nothing is known of its spread."""
        low, high = student_interval(differences)
        mean = sum(differences) / len(differences) if differences else math.nan
        return cls(mean, low, high, len(differences))

    def above(self, value: float) -> bool:
        """Whether the whole interval lies above; never, where there is none."""
        return self.low > value

    def below(self, value: float) -> bool:
        """Whether the whole interval lies below; never, where there is none."""
        return self.high < value

    def __str__(self) -> str:
        """Mean and interval."""
        if not math.isfinite(self.low):
            return f"{signed(self.mean)} (one pair)" if self.count else "–"
        return f"{signed(self.mean)} ({signed(self.low)} to {signed(self.high)})"
