"""The model that is evaluated: a running mean of the global models.

With few clients a round, the global model jumps to and fro with the cohorts; the mean of its last
few positions is better than any of them. Clients go on from the last position θ: averaging changes
nothing about training, and costs nothing but memory on the server. Averaging global models in
federated learning: Caldarola et al., ECCV 2022.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from fedharmony.aggregate import RunningMean
from fedharmony.types import BUFFERS, PARAMS, Record

MODEL = (PARAMS, BUFFERS)
AVERAGE = "average_"  # state: s, by group
PAST = "past_{}_"  # state: the global models of the last rounds by place, and group


@dataclass(frozen=True)
class ServerAverage:
    """How global models are averaged.

    Attributes:
        rule: the largest e of ``s ← e s + (1 − e) θ``, where e = t/(t + 3) before it is reached in
            round t = 0, 1, …; 0 averages nothing. Or ``"last:K"``: the plain mean of the last K
            global models.
    """

    rule: float | str = 0.0

    @property
    def last(self) -> int:
        """K of ``last:K``, else 0."""
        return int(self.rule.removeprefix("last:")) if isinstance(self.rule, str) else 0

    def add(self, state: Record, round: int) -> Record:
        """The state with the global model of a round in the average."""
        if not self.rule:
            return state
        if self.last:
            kept = {PAST.format(round % self.last) + g: state.get(g) for g in MODEL}
            return state.replace(kept)
        keep = min(float(self.rule), round / (round + 3))
        if not keep:
            return state.replace({AVERAGE + g: state.get(g) for g in MODEL})
        return state.replace({AVERAGE + g: self._mean(state, g, keep) for g in MODEL})

    def _mean(self, state: Record, group: str, keep: float) -> Mapping[str, Tensor]:
        """``e s + (1 − e) θ`` of one group, in float64; whole numbers are the last ones."""
        mean = RunningMean()
        mean.add(state.get(group), 1 - keep)
        mean.add(state.get(AVERAGE + group), keep)
        return mean.result()

    def shown(self, state: Record) -> Record:
        """The state with the averaged model in the place of the global one, and without memory."""
        past = [PAST.format(place) for place in range(self.last)]
        found = [p for p in past if p + PARAMS in state.groups]
        if not found and AVERAGE + PARAMS not in state.groups:
            return state
        own = tuple(past) or (AVERAGE,)
        groups = {g: t for g, t in state.groups.items() if not g.startswith(own)}
        for group in MODEL:
            mean = RunningMean()
            for prefix in found or [AVERAGE]:
                mean.add(state.get(prefix + group), 1.0)
            groups[group] = mean.result()
        return Record(groups, state.scalars)
