"""Differential privacy of clients: bounded shares, Gaussian noise on their sums, and its price.

A client's share of a sum (``transport/sums.py``) has parts: the update of its model, and whatever
else its reply holds (terms of correlations, counts, sums of features). Each part is cut to a length
(``clip``, ``clip_sums``), so that one client can move a sum by no more than that, and each sum gets
Gaussian noise before anybody reads it:

====================================================  ============================
``u_k ← u_k · min(1, S / ‖u_k‖)``                     ``Clipping``
``Σ u_k + N(0, (z Δ √P)²)``, P parts                  ``Noise``
``ε(δ)`` of all exchanges                             ``Ledger``
====================================================  ============================

Noise of z Δ √P on each of P parts is, for all of them together, the Gaussian mechanism with noise
multiplier z. What Δ and ε mean depends on how cohorts are drawn:

=============  ======================================================  ============
``poisson``    each client by itself with chance q; neighbours differ  Δ = S
               by one client that is there or not
``uniform``    so many of K without replacement; neighbours differ by  Δ = 2 S
               what one client holds
=============  ======================================================  ============

ε comes from dp-accounting's RDP accountant. It holds for who sees models and sums, but not who took
part when: that is what drawing cohorts hides.
"""

from __future__ import annotations

import bisect
import functools
import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import torch
from annotated_types import Gt, Le, Lt

from fedharmony.aggregate import NUMBERS, scaled, shift, typed
from fedharmony.config import Checked
from fedharmony.errors import ConfigError
from fedharmony.rng import torch_rng
from fedharmony.terminal import warn_once
from fedharmony.types import PARAMS, Group, Packed, Record, mapped

if TYPE_CHECKING:
    from dp_accounting import DpEvent

Sampling = Literal["poisson", "uniform"]
#: The least noise multiplier that is looked for.
LEAST = 1e-3


@dataclass(frozen=True)
class PrivacySettings(Checked):
    """Differential privacy of clients; none unless ``epsilon`` or ``noise_multiplier`` is set.

    Attributes:
        epsilon: ε for the whole run. Alone, it finds the noise; with ``noise_multiplier`` it is a
            budget: the run ends before the round that would go beyond it. None means ∞.
        noise_multiplier: z: standard deviation of the noise, in units of what a client can change.
        delta: δ; it should be below 1 / (number of clients).
        clip: longest update of a model; longer ones are cut.
        clip_sums: longest vector of anything else that is summed (each group of a reply).
    """

    epsilon: Annotated[float, Gt(0), Le(1e6)] | None = None
    noise_multiplier: Annotated[float, Gt(0), Le(1e6)] | None = None
    delta: Annotated[float, Gt(0), Lt(1)] = 1e-5
    clip: Annotated[float, Gt(0)] = 1.0
    clip_sums: Annotated[float, Gt(0)] = 10.0

    @property
    def active(self) -> bool:
        """Whether anything is bounded or noised at all."""
        return self.epsilon is not None or self.noise_multiplier is not None


@dataclass(frozen=True)
class Clipping:
    """What a client does to its share before it leaves; S of the update, and of all other parts."""

    model: float
    sums: float

    def cut(self, share: Record, received: Record) -> Record:
        """The update in place of the model, and all parts no longer than they may be.

        Numbers for events would tell of a single client, and are left out. The share is used up:
        its model becomes the update in place.
        """
        groups = {}
        for group, members in share.groups.items():
            if group == PARAMS:
                update = shift(members, received.get(PARAMS), -1.0)
                groups[group] = clipped(update, self.model)
            elif group != NUMBERS and members:
                groups[group] = clipped(members, self.sums)
        return Record(groups)


def clipped(tensors: Group, most: float) -> Group:
    """Tensors times the one factor that leaves them together no longer than ``most``.

    >>> clipped({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, 1.0)["b"]
    tensor([0.8000], dtype=torch.float64)
    >>> clipped({"a": torch.tensor([0.5])}, 1.0)["a"]
    tensor([0.5000], dtype=torch.float64)
    """
    parts = [tensors.row] if isinstance(tensors, Packed) else list(tensors.values())
    lengths = torch.stack([torch.linalg.vector_norm(t.double()) for t in parts])
    length = float(torch.linalg.vector_norm(lengths))  # read once: that waits for a GPU
    return scaled(tensors, min(1.0, most / length) if length else 1.0)


@dataclass(frozen=True)
class Noise:
    """What is added to the sum of clipped shares.

    Attributes:
        multiplier: z.
        cohort: expected clients per round, which updates are divided by, whoever has answered.
        seed: of the run. A simulation repeats to the bit; whoever knows the seed knows the noise.
    """

    multiplier: float
    clipping: Clipping
    sampling: Sampling
    cohort: int
    seed: int

    def deviation(self, group: str, parts: int) -> float:
        """The standard deviation z Δ √P of one part."""
        bound = self.clipping.model if group == PARAMS else self.clipping.sums
        change = bound * (1 if self.sampling == "poisson" else 2)
        return self.multiplier * change * math.sqrt(parts)

    def released(self, total: Record, state: Record, stage: str, round: int) -> Record:
        """The groups of a reply, from the sum of a cohort's shares: the new model, noisy sums.

        ``total`` is changed in place. The scalar ``noise GROUP`` says how much each sum got.
        """
        generator = torch_rng(self.seed, f"privacy noise {stage}", round)
        groups: dict[str, Group] = {}
        scalars = {}
        for group, sums in total.groups.items():
            deviation = self.deviation(group, len(total.groups))
            views = sums.layout.views(sums.row) if isinstance(sums, Packed) else sums
            for tensor in views.values():
                drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
                tensor.add_(drawn.to(tensor.device), alpha=deviation)
            scalars[f"noise {group}"] = deviation
            groups[group] = sums
        if PARAMS in groups:
            before = state.get(PARAMS)
            mean = mapped(lambda t: t / self.cohort, groups[PARAMS])
            groups[PARAMS] = typed(shift(mean, before), before)
        return Record(groups, scalars)


class Exchanges(NamedTuple):
    """How often the cohort, and everyone, is asked in a round: each time is one noisy sum."""

    cohort: int
    everyone: int


@dataclass(frozen=True)
class Ledger:
    """What a run costs, with cohorts of so many of K clients on average."""

    delta: float
    clients: int
    cohort: int
    sampling: Sampling

    def epsilon(self, multiplier: float, rounds: Sequence[Exchanges]) -> float:
        """ε of these rounds."""
        library, kinds = accounting(), Counter(rounds)
        orders = library.rdp.RdpAccountant().orders
        divergence = sum(count * self._divergence(multiplier, k) for k, count in kinds.items())
        if not kinds:
            return 0.0
        with _quiet():
            return float(library.rdp.compute_epsilon(orders, divergence, self.delta)[0])

    @functools.lru_cache(maxsize=64)  # noqa: B019 (ledgers are few, and equal ones share it)
    def _divergence(self, multiplier: float, kind: Exchanges) -> Any:
        """The Rényi divergence of one round at each of the accountant's orders."""
        with _quiet():
            return self._accountant().compose(self.event(multiplier, [kind])).rdp

    def multiplier(self, epsilon: float, rounds: Sequence[Exchanges]) -> float:
        """The least z with which these rounds cost no more than ε."""
        library = accounting()
        with _quiet():
            found: float = library.calibrate_dp_mechanism(
                self._accountant,
                lambda multiplier: self.event(multiplier, rounds),
                epsilon,
                self.delta,
                library.LowerEndpointAndGuess(LEAST, 1.0),
                tol=1e-4 * min(1.0, 1 / epsilon),
            )
        return found

    def event(self, multiplier: float, rounds: Sequence[Exchanges]) -> DpEvent:
        """All rounds in the library's words.

        Exchanges of a round ask one and the same cohort: it is drawn once, and s Gaussian
        mechanisms with multiplier z are one with z/√s.
        """
        library, events = accounting(), []
        for kind, count in Counter(rounds).items():
            if kind.cohort:
                gaussian = library.GaussianDpEvent(multiplier / math.sqrt(kind.cohort))
                if self.sampling == "poisson":
                    chance = self.cohort / self.clients
                    sampled = library.PoissonSampledDpEvent(chance, gaussian)
                else:
                    draw = self.clients, self.cohort
                    sampled = library.SampledWithoutReplacementDpEvent(*draw, gaussian)
                events.append(library.SelfComposedDpEvent(sampled, count))
            if kind.everyone:
                gaussian = library.GaussianDpEvent(multiplier / math.sqrt(kind.everyone))
                events.append(library.SelfComposedDpEvent(gaussian, count))
        return library.ComposedDpEvent(events)

    def _accountant(self) -> Any:
        library = accounting()
        poisson, relations = self.sampling == "poisson", library.NeighboringRelation
        relation = relations.ADD_OR_REMOVE_ONE if poisson else relations.REPLACE_ONE
        return library.rdp.RdpAccountant(neighboring_relation=relation)


@dataclass(frozen=True)
class Budget:
    """What a run costs, round by round: it does not depend on data, and is known beforehand."""

    ledger: Ledger
    multiplier: float
    rounds: tuple[Exchanges, ...]

    def spent(self, done: int) -> dict[str, float]:
        """What so many rounds have cost, for events."""
        return {
            "epsilon": self.ledger.epsilon(self.multiplier, self.rounds[:done]),
            "delta": self.ledger.delta,
            "noise_multiplier": self.multiplier,
        }


def budget(
    settings: PrivacySettings,
    ledger: Ledger,
    rounds: int,
    exchanges: Callable[[int], tuple[Exchanges, ...]],
) -> Budget:
    """The noise, and as many of the rounds asked for as ε allows.

    ``exchanges`` gives those of each round, for a run of so many rounds.
    """
    if settings.noise_multiplier is None:
        assert settings.epsilon is not None
        planned = exchanges(rounds)
        return Budget(ledger, ledger.multiplier(settings.epsilon, planned), planned)
    multiplier, most = settings.noise_multiplier, settings.epsilon or math.inf

    def cost(count: int) -> float:
        return ledger.epsilon(multiplier, exchanges(count))

    if cost(rounds) <= most:
        return Budget(ledger, multiplier, exchanges(rounds))
    enough = bisect.bisect_right(range(1, rounds), most, key=cost)
    if not enough:
        raise ConfigError(
            f"privacy.epsilon = {most:g} is spent before the first round ends: with "
            f"privacy.noise_multiplier = {multiplier:g} it costs "
            f"{cost(1):.3g}. Raise one of the two, or leave the "
            "multiplier out: it is then found from epsilon."
        )
    warn_once(
        f"privacy.epsilon = {most:g} suffices for {enough} of the {rounds} rounds with "
        f"privacy.noise_multiplier = {multiplier:g}: the run ends after them."
    )
    return Budget(ledger, multiplier, exchanges(enough))


@functools.cache
def accounting() -> Any:
    """Google's dp-accounting, or an error that says how to get it."""
    try:
        import dp_accounting
        from dp_accounting import rdp  # noqa: F401 (found as an attribute)
    except ImportError as error:
        raise ConfigError(
            "[privacy] needs the package dp-accounting, which counts ε. Install it: pip install "
            "'fedharmony[privacy]'."
        ) from error
    return dp_accounting


@contextmanager
def _quiet() -> Iterator[None]:
    """Without a line for each order of Rényi divergence that the accountant leaves out."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
