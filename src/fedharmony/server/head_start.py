"""A linear head in closed form, before the first training: from sums that clients send.

A new head on a trained backbone is what the first rounds of a federation are spent on, and skewed
clients teach it badly. Its best linear start needs no training: every client sends sums over the
features of the received backbone, and the server solves one ridge regression for all labels.

====================================================  ============================
``A_k = Σ f̃ f̃ᵀ``, ``B_k = Σ y f̃ᵀ`` with f̃ = [f, 1]      ``engine/head_sums.py``
``V = (S + ρI)⁻¹ Cov(f, y)``                          ``solve``
``w = V / (π (1 − π) (1 − R²))``                      ``solve``
``b = logit(π) − wᵀ mean(f)``                         ``solve``
====================================================  ============================

S is the covariance of the features over all clients, ρ a share of its mean variance, π the share of
the images with the label, and R² = Vᵀ Cov(f, y) / (π (1 − π)). The third line turns a regression on
0/1 labels into logits: for two Gaussians with one covariance it is the direction of linear
discriminant analysis, exactly.

A label that all its images have, or none has, cannot be solved for; it keeps its random row.

Where sums have noise of deviation σ, for differential privacy, S is off by a random matrix whose
eigenvalues reach ± 2 σ √D / n: below that it may not even be positive. Twice that is added to ρ. A
label is solved for if it is on, and off, more images than two deviations.

The same sums for one label per image: Fed3R (Fanì et al., ICML 2024, arXiv 2406.01116); class means
alone: FedNCM (Legate et al., NeurIPS 2023); Gaussian heads: GH-OFL (Turazza et al., ICLR 2026,
arXiv 2602.01186).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedharmony.engine.head_sums import SUMS, gram_of, head_sums, matrices
from fedharmony.errors import ConfigError, NumericalError
from fedharmony.methods.base import Method, Outcome, Stage
from fedharmony.models.base import Head
from fedharmony.rng import numpy_rng
from fedharmony.server.federation import FederationSettings
from fedharmony.server.head_trust import trusted
from fedharmony.solve import solve_spd
from fedharmony.terminal import warn_once
from fedharmony.types import PARAMS, Messages, Record, Replies, Tensors

log = logging.getLogger(__name__)

#: Bytes that a client may send at most where each label has a matrix of its own.
LARGEST_REPLY = 256 * 10**6
#: 1 − R² is no smaller: so few images that a label is fitted without error say little about it.
LEAST_UNEXPLAINED = 0.01
#: What ρ gets for noise, in units of the largest eigenvalue that noise alone has.
NOISE_RIDGE = 2.0


def opening(method: Method, head: Head, settings: FederationSettings) -> list[Stage]:
    """What comes before the first training: nothing, or the stage that solves the head."""
    if settings.head_start == "random":
        return []
    if head.no_closed_form:
        warn_once(
            f"federation.head_start = 'closed_form' leaves the head of {method.name} as it is: "
            f"{head.no_closed_form}."
        )
        return []
    task = method.task
    scale = settings.head_scale or (math.sqrt(task.width) if task.private else 1.0)
    return [HeadStart(method, settings.head_ridge, settings.head_clients, scale).stage()]


@dataclass(frozen=True)
class HeadStart:
    """The stage that solves the head of a method, by the settings ``federation.head_…``."""

    method: Method
    ridge: float
    clients: int | str = "all"
    scale: float = 1.0

    def __post_init__(self) -> None:
        if matrices(self.method.task) > 1 and self.nbytes > LARGEST_REPLY:
            raise ConfigError(
                f"federation.head_start = 'closed_form' with unknown labels needs a matrix per "
                f"label: {self.nbytes / 1e6:,.0f} MB from each client, for "
                f"{self.method.task.classes:,} labels and {self.method.task.width} features. Use "
                "federation.head_start = 'random', a narrower backbone or fewer labels."
            )

    @property
    def nbytes(self) -> int:
        """Bytes that a client sends."""
        forms = head_sums(self.method.task).forms({})
        return 8 * sum(math.prod(form.shape) for form in forms.values())

    def stage(self) -> Stage:
        """The exchange; it comes before the first training."""
        everyone, sums = self.clients != "cohort", head_sums(self.method.task, self.scale)
        return Stage("head", self.broadcast, self.aggregate, False, sums, everyone)

    def broadcast(self, state: Record, round: int, clients: Sequence[int]) -> Messages:
        """What the method sends before training, to those who are asked."""
        if isinstance(self.clients, int) and self.clients < len(clients):
            rng = numpy_rng(self.method.task.seed, "head start")
            clients = sorted(rng.choice(clients, self.clients, replace=False).tolist())
        return self.method.broadcast(state, round, clients)

    def aggregate(self, state: Record, round: int, sent: Messages, replies: Replies) -> Outcome:
        """Add the sums up, one client at a time, and put the solved head into the model.

        Where clients may lie (``federation.robust``), only sums that are believed.
        """
        total, noise = dict[str, Tensor](), 0.0
        all_sums: Iterable[Record] = (reply.record for reply in replies)
        if self.method.task.robust.rule != "none":
            heard = list(replies)
            own = [reply.record.get(SUMS) for reply in heard]
            believed = trusted(own, [reply.examples for reply in heard], self.ridge)
            all_sums = (Record({SUMS: sums}) for sums in believed)
        for sums in all_sums:
            noise = float(sums.scalars.get(f"noise {SUMS}", noise))  # of the one sum of a cohort
            for name, tensor in sums.get(SUMS).items():
                total[name] = total[name] + tensor if name in total else tensor
        if not total:
            return Outcome(state)
        params = state.get(PARAMS)
        before = params["head.weight"] * self.scale
        try:
            head = solve(gram_of(total), total["cross"], self.ridge, before, noise)
        except NumericalError as error:
            log.warning("The head stays as it was drawn (federation.head_start): %s", error)
            return Outcome(state, log={"head_not_solved": 1.0})
        head["head.weight"] /= self.scale
        fitted = {name: tensor.to(params[name].dtype) for name, tensor in head.items()}
        return Outcome(state.replace({PARAMS: {**params, **fitted}}))


def solve(gram: Tensor, cross: Tensor, ridge: float, weight: Tensor, noise: float = 0.0) -> Tensors:
    """``head.weight`` and ``head.bias`` from the sums of all clients.

    >>> f, y = torch.tensor([[-1.0], [1], [1], [3]]).double(), torch.tensor([0.0, 0, 1, 1]).double()
    >>> f = torch.cat([f, torch.ones(4, 1).double()], dim=1)
    >>> head = solve((f.T @ f)[None], (y @ f)[None], 1e-9, torch.zeros(1, 1))
    >>> [round(float(head[name]), 4) for name in ("head.weight", "head.bias")]
    [2.0, -2.0]

    (S = 2, Cov = ½, so V = ¼ and R² = ½: w = ¼ / (¼ · ½) = 2, b = 0 − 2 · 1.)

    Args:
        gram: Σ f̃ f̃ᵀ, (1, D + 1, D + 1), or one per label, (C, D + 1, D + 1).
        cross: Σ y f̃ᵀ, (C, D + 1).
        ridge: ρ in units of the mean variance.
        weight: (C, D), the rows of labels that cannot be solved for.
        noise: σ, the deviation of the noise in each sum.
    """
    images = gram[:, -1, -1].clamp(min=1.0)  # (1,) or (C,)
    mean = gram[:, :-1, -1] / images[:, None]
    covariance = gram[:, :-1, :-1] / images[:, None, None] - mean[:, :, None] * mean[:, None, :]
    prior = cross[:, -1] / images
    moved = cross[:, :-1] / images[:, None] - prior[:, None] * mean  # Cov(f, y), (C, D)
    size = covariance.shape[-1]
    shift = ridge * covariance.diagonal(dim1=-2, dim2=-1).mean(-1).clamp(min=0.0)
    shift = shift + NOISE_RIDGE * 2 * noise * math.sqrt(size) / images
    penalised = covariance + shift[:, None, None] * torch.eye(size).to(covariance)
    seen = (cross[:, -1] > 2 * noise) & (images - cross[:, -1] > 2 * noise)
    if len(gram) == 1:
        solved = solve_spd(penalised[0], moved.mT).mT
    else:  # of a label that nobody knows, the matrix is zero
        identity = torch.eye(size).to(covariance)
        penalised = torch.where(seen[:, None, None], penalised, identity)
        solved = solve_spd(penalised, moved.unsqueeze(-1)).squeeze(-1)
    spread = prior * (1 - prior)
    explained = (solved * moved).sum(-1) / spread
    scale = spread * (1 - explained).clamp(min=LEAST_UNEXPLAINED)
    rows = torch.where(seen[:, None], solved / scale[:, None], weight.to(solved))
    bias = prior.logit() - (rows * mean).sum(-1)
    if bool(seen.any()):  # a label that nobody has is as rare as the rarest
        rarest = prior[seen].min()
        bounded = prior.clamp(rarest, 1 - rarest)
        bias = torch.where(seen, bias, bounded.logit())
    else:
        bias = torch.zeros_like(prior)
    return {"head.weight": rows, "head.bias": bias}
