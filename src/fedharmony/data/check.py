"""What ``fedharmony data check`` finds: figures, facts, doubts and faults, and what to do next."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from fedharmony.errors import some

if TYPE_CHECKING:
    from fedharmony.data.base import LabelledImages
    from fedharmony.data.file_source import AnnotatedFiles

#: Called with the number of things done and of all.
Tell = Callable[[int, int], None]

#: From this share of common characters on, two names look like one name and a misspelling of it.
SIMILAR = 0.8
#: Class names that are compared with each other: a second or so.
MOST_COMPARED = 500


@dataclass(frozen=True)
class CheckLine:
    """One figure of a check."""

    what: str
    expected: int
    found: int

    @property
    def ok(self) -> bool:
        """Whether what was found is what was expected."""
        return self.expected == self.found


@dataclass(frozen=True)
class ClassCount:
    """How many training and test rows have a class."""

    name: str
    train: int
    test: int


@dataclass(frozen=True)
class Check:
    """The outcome of a check: figures, facts, doubts and faults, and what to do next."""

    lines: tuple[CheckLine, ...]
    advice: str
    facts: tuple[tuple[str, str], ...] = ()
    classes: tuple[ClassCount, ...] = ()
    doubts: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Whether every figure is as expected, and nothing is wrong."""
        return all(line.ok for line in self.lines) and not self.faults


#: The training or the test part of a data set.
Part: TypeAlias = "LabelledImages | AnnotatedFiles"


def facts_of(train: Part, test: Part, what: str) -> list[tuple[str, str]]:
    """Sizes, clients and the share of unknown labels; ``what`` is an image, or a sample."""
    facts = [
        (f"training {what}s", f"{len(train.labels):,}"),
        (f"test {what}s", f"{len(test.labels):,}"),
    ]
    if train.users is not None:
        sizes = np.unique(train.users, return_counts=True)[1]
        words = f"{len(sizes):,}, with {sizes.min():,} to {sizes.max():,} training {what}s"
        if test.users is not None and (others := {*test.users} - {*train.users}):
            words += f"; {len(others):,} more in the test part only"
        facts.append(("clients", words))
    cells = train.labels.size + test.labels.size
    unknown = sum(int((~part.known).sum()) for part in (train, test) if part.known is not None)
    facts.append(("unknown labels", f"{100 * unknown / cells:.1f} % ({unknown:,} of {cells:,})"))
    return facts


def counts_of(classes: Sequence[str], train: Part, test: Part) -> tuple[ClassCount, ...]:
    """How often each class occurs; where a label is unknown it does not."""
    sums = [part.labels.sum(0, dtype=np.int64).tolist() for part in (train, test)]
    return tuple(ClassCount(*of_class) for of_class in zip(classes, *sums, strict=True))


def doubts_about(counts: Sequence[ClassCount]) -> tuple[str, ...]:
    """Names that look alike, and classes that cannot be learned or measured.

    >>> doubts_about([ClassCount("circle", 90, 9), ClassCount("cirlce", 1, 0)])[0]
    "Classes 'circle' (99) and 'cirlce' (1) look alike: is one of them misspelt?"
    """
    total = {count.name: count.train + count.test for count in counts}
    doubts = [
        f"Classes {a!r} ({total[a]:,}) and {b!r} ({total[b]:,}) look alike: is one of them "
        "misspelt?"
        for a, b in look_alikes(list(total))
    ]
    for part, absent in (
        ("training", [count.name for count in counts if not count.train]),
        ("test", [count.name for count in counts if not count.test]),
    ):
        if absent:
            doubts.append(f"Nothing in the {part} part has: {some(absent)}.")
    return tuple(doubts)


def look_alikes(names: Sequence[str]) -> list[tuple[str, str]]:
    """Pairs of names that differ in a few characters, only in case, or in the order of letters.

    Names that differ in a number (``box 1``, ``box 2``) are meant to. Of very many names only the
    first :data:`MOST_COMPARED` are compared.

    >>> look_alikes(["circle", "cirlce", "blue", "bule", "square", "Square", "box 1", "box 2"])
    [('circle', 'cirlce'), ('blue', 'bule'), ('square', 'Square')]
    """
    pairs = []
    names = names[:MOST_COMPARED]
    for i, name in enumerate(names):
        matcher = difflib.SequenceMatcher(b=name.casefold())
        for other in names[i + 1 :]:
            if re.sub(r"\d+", "0", name) == re.sub(r"\d+", "0", other):
                continue
            matcher.set_seq1(other.casefold())
            if matcher.real_quick_ratio() < SIMILAR or (same := matcher.quick_ratio()) < SIMILAR:
                continue
            if same == 1 or matcher.ratio() >= SIMILAR:  # 1: the same letters
                pairs.append((name, other))
    return pairs


def wrong_separator(classes: Sequence[str], right: str) -> str:
    """What is wrong where another sign stands between labels than ``right``; else empty.

    >>> wrong_separator(["cat;dog", "dog;tree", "tree"], "|")
    "2 classes hold ';', for instance 'cat;dog'. Between labels the table needs '|'."
    >>> wrong_separator(["cat", "dog, big"], "|")
    ''
    """
    for sign in (";", ",", "/", "\t"):
        joined = [name for name in classes if sign in name]
        parts = Counter(part.strip() for name in joined for part in name.split(sign))
        if any(count > 1 or part in classes for part, count in parts.items()):
            return (
                f"{len(joined):,} classes hold {sign!r}, for instance {joined[0]!r}. Between "
                f"labels the table needs {right!r}."
            )
    return ""
