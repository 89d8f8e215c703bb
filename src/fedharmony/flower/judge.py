"""The global model measured at sites, on test images that never leave them.

A model is measured by the sites of the next cohort, with the message that they train from: no
exchange more. The last one is measured by all sites that are online. Metrics are those of all their
test images together, never means over sites; each site's own are shown beside them.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

from fedharmony.errors import ClientLimitError, ConfigError, DataError, TransportError
from fedharmony.experiments.blueprint import Blueprint
from fedharmony.experiments.evaluate import Evaluation
from fedharmony.flower.transport import Sites
from fedharmony.metrics import MetricOptions
from fedharmony.metrics.multilabel import beside
from fedharmony.metrics.parts import Part, pool, read_part, structure_of
from fedharmony.partition.report import MOST_PAIRED
from fedharmony.site.measure import MEASURED, Question, shown
from fedharmony.site.parcel import REPLY, Parcel
from fedharmony.site.records import record_of
from fedharmony.types import Record

logger = logging.getLogger(__name__)


class AtSites:
    """Measures global models at the sites of a run.

    Args:
        plan: the run without data.
        sites: who is asked.
    """

    def __init__(self, plan: Blueprint, sites: Sites) -> None:
        self.plan, self.sites = plan, sites
        self.reasons: list[str] = []  # why sites measured nothing the last time
        self._round = -1

    def __call__(
        self, round: int, state: Record, due: bool, last: bool
    ) -> Iterator[tuple[int, Evaluation]]:
        """What came with the round that is over; then this round's model, if it is due."""
        if self.sites.riding is not None:
            answers, self.sites.riding = self.sites.measured, None
            self.sites.measured = {}
            if parts := self._parts(answers):
                yield self._round, self._evaluation(parts)
        options = self.plan.settings.metrics
        question = Question(shown(self.plan, state), options.threshold)
        if last:
            parts = self._parts(self.sites.measure(question))
            if not parts:
                why = "; ".join(self.reasons) or "none is here"
                raise ClientLimitError(
                    f"No site measured the final model: {why}. The model is saved. Allow it at a "
                    "site (policy.evaluation) and resume."
                )
            yield round, self._evaluation(parts)
        elif due:
            self.sites.riding, self._round = question, round

    def _parts(self, answers: Mapping[int, Parcel | str]) -> dict[str, Part]:
        """What sites measured, by name; who did not is named in the log."""
        parts, options = {}, self.plan.settings.metrics
        self.reasons = []
        for client in sorted(answers):
            name, answer = self.sites.roster.names[client], answers[client]
            try:
                if isinstance(answer, str) or answer.kind != REPLY or "reason" in answer.words:
                    raise DataError(answer if isinstance(answer, str) else answer.reason)
                images = answer.words.get("images")
                tensors = record_of(answer.parts, {}).get(MEASURED)
                if not isinstance(images, int) or not tensors:
                    raise DataError("its answer is not of the form that was asked for")
                parts[name] = read_part(tensors, images, len(self.plan.facts.classes), options)
            except (DataError, TransportError) as error:
                self.reasons.append(f"site {name}: {str(error).rstrip('.')}")
                logger.warning("Measured nothing: %s.", self.reasons[-1])
        return {name: part for name, part in parts.items() if part.known.any()}

    def _evaluation(self, parts: Mapping[str, Part]) -> Evaluation:
        """Metrics of all parts together, and of each."""
        options, own = self.plan.settings.metrics, list(parts.values())
        pooled = pool(own)
        metrics = pooled.metrics(options)
        how: dict[str, Any] = {"measured_at": sorted(parts), "test_images": pooled.images}
        if not pooled.exact:
            how["mAP_between"] = pooled.map_bounds()
        return Evaluation(
            labels=pooled.labels,
            known=pooled.known,
            metrics=metrics,
            structure=structure_of(own),
            users=beside(metrics, [pool([part]).metrics(options) for part in own]),
            names=tuple(parts),
            how=how,
        )


def refuse_options(options: MetricOptions, classes: int) -> None:
    """Refuse conventions that need to know which scores belong to one image."""
    if options.topk is not None or options.ap_ties != "grouped":
        raise ConfigError(
            "At sites scores are measured label by label: metrics.topk and metrics.ap_ties = "
            "'stable' need those of whole images. Remove them."
        )
    if classes > MOST_PAIRED:
        raise ConfigError(
            f"Evaluation at sites takes at most {MOST_PAIRED:,} labels, and the run has "
            f"{classes:,}. Give the server test images of its own."
        )
