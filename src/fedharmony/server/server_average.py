"""The model that is evaluated: a running mean of the global models.

With few clients a round, the global model jumps to and fro with the cohorts; the mean of its last
few positions is better than any of them. Clients go on from the last position θ: averaging changes
nothing about training, and costs nothing but memory on the server. Averaging global models in
federated learning: Caldarola et al., ECCV 2022.

A mean lags behind a model that still travels. Whether it does can be read off its steps
``d_t = θ_t − θ_{t−1}``: steps of a model that travels point the same way, steps of one that jitters
are unrelated, or undo each other. With their correlation ``ρ = Σ d_t·d_{t−1} / Σ ‖d‖²``, over the
last few rounds, the rule "adaptive" keeps ``e = LARGEST_SHARE · min(1, max(0, 1 − ρ/TRAVELS))``.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedharmony.aggregate import ModelMean
from fedharmony.types import BUFFERS, PARAMS, Group, Record, Tensors

MODEL = (PARAMS, BUFFERS)
AVERAGE = "average_"  # state: s, by group
STEP = "average_step"  # state, "adaptive": d of the last round
ALONG, LENGTH = "average_along", "average_length"  # state, "adaptive": Σ d_t·d_{t−1}, Σ ‖d‖²

#: "adaptive": the largest e, and the ρ from which on nothing is averaged. On the built-in data,
#: trained from scratch, ρ is 0.3 to 0.6; of a fine-tuned ViT on VOC2012 it is −0.1 to 0.13.
LARGEST_SHARE, TRAVELS = 0.9, 0.25
#: "adaptive": by how much older rounds count less in ρ.
FADES = 0.5


@dataclass(frozen=True)
class ServerAverage:
    """How global models are averaged: ``federation.server_average`` is the rule."""

    rule: float | str = 0.0

    def add(self, before: Record, state: Record, round: int) -> Record:
        """The state with a round's model in the average; ``before`` is that before its training."""
        if not self.rule:
            return state
        largest = self.rule
        if isinstance(largest, str):
            state = watch(before, state)
            largest = share_kept(*(float(state.scalars[name]) for name in (ALONG, LENGTH)))
        keep = min(largest, round / (round + 3))
        if not keep:
            return state.replace({AVERAGE + g: state.get(g) for g in MODEL})
        mean = ModelMean()  # in float64
        # θ comes first: of whole numbers, which have no mean, the last ones are kept.
        for prefix, weight in (("", 1 - keep), (AVERAGE, keep)):
            mean.add(Record({g: state.get(prefix + g) for g in MODEL}), weight)
        return state.replace({AVERAGE + g: tensors for g, tensors in mean.means().items()})

    def shown(self, state: Record) -> Record:
        """The state with the averaged model in the place of the global one, and without memory."""
        if AVERAGE + PARAMS not in state.groups:
            return state
        groups = {g: t for g, t in state.groups.items() if not g.startswith(AVERAGE)}
        groups |= {g: state.get(AVERAGE + g) for g in MODEL}
        scalars = {n: v for n, v in state.scalars.items() if n not in (ALONG, LENGTH)}
        return Record(groups, scalars)


def watch(before: Record, state: Record) -> Record:
    """The state with its last step, and the sums that ρ is made of."""
    old, new = before.get(PARAMS), state.get(PARAMS)
    step: Tensors = {n: t - old[n] for n, t in new.items() if t.is_floating_point()}
    last = state.get(STEP)
    along, length = (float(state.scalars.get(name, 0.0)) for name in (ALONG, LENGTH))
    if last:
        along = FADES * along + _dot(step, last)
        length = FADES * length + (_dot(step, step) + _dot(last, last)) / 2
    return state.replace({STEP: step}, {ALONG: along, LENGTH: length})


def share_kept(along: float, length: float) -> float:
    """E of the rule "adaptive"; 0 as long as there are no two steps.

    >>> [round(share_kept(rho, 1.0), 3) for rho in (-0.4, 0.0, 0.125, 0.25, 0.6)]
    [0.9, 0.9, 0.45, 0.0, 0.0]
    """
    if length <= 0:
        return 0.0
    return LARGEST_SHARE * min(1.0, max(0.0, 1 - along / length / TRAVELS))


def _dot(a: Group, b: Group) -> float:
    return sum(float((a[name].double() * b[name].double()).sum()) for name in a)
