"""From a site's own labels to those of the federation.

Sites name labels differently, and annotate different ones. What a site does not annotate is unknown
there: it counts neither as present nor as absent, in no loss and in no correlation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from fedharmony.data.base import DataSet, LabelledImages
from fedharmony.errors import DataError, nearest


@dataclass(frozen=True)
class Vocabulary:
    """The labels of a federation, as one site writes them.

    Attributes:
        classes: the federation's labels, in order.
        names: the site's own name of a label → the federation's; a name that is missing here is the
            same in both, and one that maps to "" is left out.
        annotated: the federation's labels that the site annotates; none takes all that one of its
            own labels stands for.
    """

    classes: tuple[str, ...]
    names: Mapping[str, str]
    annotated: tuple[str, ...] | None = None

    def translate(self, data: DataSet) -> DataSet:
        """The same images with the federation's labels."""
        sources = self._sources(data.classes)
        known = self._annotated(sources)
        train, test = (self._part(part, sources, known) for part in (data.train, data.test))
        return replace(data, classes=self.classes, train=train, test=test, planted=None)

    def _sources(self, local: Sequence[str]) -> dict[str, list[int]]:
        """For each label of the federation, the columns of the site's labels that stand for it."""
        if strange := sorted(self.names.keys() - set(local)):
            raise DataError(
                f"[labels] translates {strange[0]!r}, which is no label of these data. "
                f"{nearest(strange[0], local)}"
            )
        sources: dict[str, list[int]] = {name: [] for name in self.classes}
        for column, name in enumerate(local):
            common = self.names.get(name, name)
            if common and common not in sources:
                raise DataError(
                    f"The label {common!r} of these data is none of the federation's. "
                    f"{nearest(common, self.classes)} Translate it in [labels], for instance "
                    f'"{name}" = "{self.classes[0]}", or leave it out with "{name}" = "".'
                )
            if common:
                sources[common].append(column)
        return sources

    def _annotated(self, sources: Mapping[str, list[int]]) -> list[bool]:
        """For each label of the federation, whether it is annotated here."""
        if self.annotated is None:
            return [bool(columns) for columns in sources.values()]
        if strange := [name for name in self.annotated if name not in sources]:
            raise DataError(
                f"site.annotated names {strange[0]!r}, which is no label of the federation. "
                f"{nearest(strange[0], self.classes)}"
            )
        return [name in self.annotated for name in sources]

    def _part(
        self, part: LabelledImages, sources: Mapping[str, list[int]], annotated: Sequence[bool]
    ) -> LabelledImages:
        """Present if any of the site's labels is; else known if all of them are."""
        shape = len(part), len(sources)
        labels, known = np.zeros(shape, np.uint8), np.zeros(shape, np.bool_)
        seen = np.ones(part.labels.shape, np.bool_) if part.known is None else part.known
        for c, (columns, counts) in enumerate(zip(sources.values(), annotated, strict=True)):
            if counts:
                present = (part.labels[:, columns].astype(np.bool_) & seen[:, columns]).any(1)
                labels[:, c], known[:, c] = present, present | seen[:, columns].all(1)
        return replace(part, labels=labels, known=None if known.all() else known)
