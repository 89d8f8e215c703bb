"""Differential privacy of clients: bounded shares, Gaussian noise on their sums, and its price.

A client's share of a sum (``transport/sums.py``) has parts: the update of its model, and whatever
else its reply holds (terms of correlations, counts, sums of features). Each part is cut to a length
(``clip``, ``clip_sums``), so that one client can move a sum by no more than that, and each sum gets
Gaussian noise before anybody reads it:

====================================================  ============================
``u_k ← u_k · min(1, S / ‖u_k‖)``                     ``Clipping``
``Σ u_k + N(0, (z S √P)²)``, P parts                  ``Noise``
``ε(δ)`` of all exchanges                             ``cost``
====================================================  ============================

Noise of z S √P on each of P parts is, for all of them together, the Gaussian mechanism with noise
multiplier z. Each client takes part by itself, with chance q (Poisson sampling). Neighbours are
federations that differ by one client, which is there or not. The number K of registered clients,
the expected cohort q K that updates are divided by, and the rounds are taken for public.

Noise and cohorts of a round come from a key of its own (:class:`Ledger`), which the process that
adds the noise draws from the operating system and throws away when the round is over. Nothing that
a client is sent tells it.

ε comes from dp-accounting's accountant of privacy loss distributions (PLD). It holds for who sees
models and sums, but not who took part when: that is what drawing cohorts hides. It is that of real
numbers. Noise in floating point lies on a grid that depends on the value it hides (Mironov, CCS
2012), and ends at 8.6 deviations; what both give away is not defended against, nor is the time that
drawing takes.
"""

from __future__ import annotations

import bisect
import functools
import hashlib
import logging
import math
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Annotated, Any, NamedTuple

import torch
from annotated_types import Ge, Gt, Le, Lt

from fedharmony.aggregate import NUMBERS, scaled, shift, typed
from fedharmony.config import Checked
from fedharmony.errors import ConfigError
from fedharmony.rng import Keystream
from fedharmony.terminal import warn_once
from fedharmony.types import PARAMS, Group, Packed, Record, mapped

logger = logging.getLogger(__name__)

#: The least noise multiplier: with less, a client is not hidden at all.
LEAST = 1e-3
#: Privacy losses are counted in steps of so much, and larger ones where losses are large. Rounding
#: goes up: ε is at most some thousandths too high, and never too low.
STEP = 1e-4
#: What a run says whose noise somebody else can draw, too.
REPRODUCIBLE = "not private: its noise can be reproduced"


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
        noise_seed: for tests only: noise and cohorts are drawn from this number, so that a run can
            be repeated. Such a run is not private, and says so.
    """

    epsilon: Annotated[float, Gt(0), Le(1e6)] | None = None
    noise_multiplier: Annotated[float, Ge(LEAST), Le(1e6)] | None = None
    delta: Annotated[float, Ge(1e-12), Lt(1)] = 1e-5
    clip: Annotated[float, Gt(0)] = 1.0
    clip_sums: Annotated[float, Gt(0)] = 10.0
    noise_seed: Annotated[int, Ge(0)] | None = None

    def __post_init__(self) -> None:
        """Refuse a promise of ε for noise that anybody can draw."""
        super().__post_init__()
        if self.epsilon is not None and self.noise_seed is not None:
            raise ConfigError(
                f"noise_seed = {self.noise_seed} makes noise that can be reproduced, and epsilon = "
                f"{self.epsilon:g} promises privacy. Remove one of the two."
            )

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


class Exchanges(NamedTuple):
    """How often the cohort, and everyone, is asked in a round: each time is one noisy sum."""

    cohort: int
    everyone: int


class Price(NamedTuple):
    """What a round costs: q, z, and how often the cohort, and everyone, was asked.

    Exchanges of a round ask one and the same cohort: it is drawn once, and s Gaussian mechanisms
    with multiplier z are one with z/√s.
    """

    chance: float
    multiplier: float
    cohort: int = 1
    everyone: int = 0


def cost(rounds: Iterable[Price], delta: float) -> float:
    """ε of rounds; ∞ where there is hardly any noise."""
    return _cost(frozenset(Counter(rounds).items()), delta)


@functools.lru_cache(maxsize=4096)
def _cost(kinds: frozenset[tuple[Price, int]], delta: float) -> float:
    mechanisms = Counter[tuple[float, float]]()
    for price, count in sorted(kinds):
        for chance, asked in ((price.chance, price.cohort), (1.0, price.everyone)):
            if asked:
                mechanisms[price.multiplier / math.sqrt(asked), chance] += count
    if not mechanisms:
        return 0.0
    if min(mechanisms)[0] < LEAST / 10:
        return math.inf
    # The mean loss of all rounds, and the loss of one, bound how far the distributions reach.
    reach = sum(count * _mean_loss(*one) for one, count in mechanisms.items())
    reach += max(1 / multiplier**2 for multiplier, _ in mechanisms)
    step = STEP * 2 ** math.ceil(math.log2(max(1, min(reach, 50), reach / 100)))
    total: Any = None
    for one, count in mechanisms.items():
        composed = _loss(*one, step).self_compose(count)
        total = composed if total is None else total.compose(composed)
    return float(total.get_epsilon_for_delta(delta))


def _mean_loss(multiplier: float, chance: float) -> float:
    """At least KL((1 − q) N(0, z²) + q N(1, z²) ‖ N(0, z²)): convexity, or log(1 + χ²)."""
    square = min(1 / multiplier**2, 700.0)
    return min(chance / 2 / multiplier**2, math.log1p(chance**2 * math.expm1(square)))


@functools.lru_cache(maxsize=16)
def _loss(multiplier: float, chance: float, step: float) -> Any:
    """The distribution of a mechanism's privacy loss; making one takes up to a second."""
    made = accounting().from_gaussian_mechanism
    return made(multiplier, value_discretization_interval=step, sampling_prob=chance)


@functools.lru_cache(maxsize=64)
def calibrated(epsilon: float, delta: float, chance: float, rounds: tuple[Exchanges, ...]) -> float:
    """The least z, up to a thousandth, with which rounds cost no more than ε."""
    from scipy.optimize import brentq

    def excess(log_multiplier: float) -> float:
        prices = [Price(chance, math.exp(log_multiplier), *asked) for asked in rounds]
        return math.log(max(cost(prices, delta), 1e-300) / epsilon)

    low = high = 0.0
    while excess(high) > 0:
        low, high = high, high + 1
    while excess(low) <= 0:
        if low <= math.log(LEAST):
            return LEAST
        low, high = max(low - 1, math.log(LEAST)), low
    best: float = brentq(excess, low, high, xtol=5e-4)
    while excess(best) > 0:
        best += 5e-4
    return math.exp(best)


@dataclass(frozen=True)
class Budget:
    """What a run may cost, and what it is expected to, which does not depend on data.

    Attributes:
        limit: ε that no round may go beyond.
        multiplier: z.
        chance: q, where nobody joins later.
        rounds: the exchanges of each round.
    """

    delta: float
    multiplier: float
    limit: float = math.inf
    chance: float = 1.0
    rounds: tuple[Exchanges, ...] = ()

    def spent(self, done: int) -> dict[str, float]:
        """What so many rounds cost."""
        prices = [Price(self.chance, self.multiplier, *asked) for asked in self.rounds[:done]]
        return {
            "epsilon": cost(prices, self.delta),
            "delta": self.delta,
            "noise_multiplier": self.multiplier,
        }


def budget(
    settings: PrivacySettings,
    chance: float,
    rounds: int,
    exchanges: Callable[[int], tuple[Exchanges, ...]],
) -> Budget:
    """The noise, and as many of the rounds asked for as ε allows.

    ``exchanges`` gives those of each round, for a run of so many rounds.
    """
    _ = accounting(), Keystream(bytes(32))  # what is not installed is told now
    delta, most = settings.delta, settings.epsilon or math.inf
    if settings.noise_multiplier is None:
        assert settings.epsilon is not None
        planned = exchanges(rounds)
        multiplier = calibrated(settings.epsilon, delta, chance, planned)
        return Budget(delta, multiplier, most, chance, planned)

    def of(count: int) -> Budget:
        assert settings.noise_multiplier is not None
        return Budget(delta, settings.noise_multiplier, most, chance, exchanges(count))

    def price(count: int) -> float:
        return of(count).spent(count)["epsilon"]

    if most == math.inf or price(rounds) <= most:
        return of(rounds)
    enough = bisect.bisect_right(range(1, rounds), most, key=price)
    if not enough:
        raise ConfigError(
            f"privacy.epsilon = {most:g} is spent before the first round ends: with "
            f"privacy.noise_multiplier = {settings.noise_multiplier:g} it costs "
            f"{price(1):.3g}. Raise one of the two, or leave the "
            "multiplier out: it is then found from epsilon."
        )
    warn_once(
        f"privacy.epsilon = {most:g} suffices for {enough} of the {rounds} rounds with "
        f"privacy.noise_multiplier = {settings.noise_multiplier:g}: the run ends after them."
    )
    return of(enough)


class BudgetSpentError(ConfigError):
    """The next round would cost more than ε allows."""


@dataclass(frozen=True)
class Entry:
    """A round in the ledger.

    Attributes:
        chance: q.
        clients: K, the clients that were registered when the round began.
        cohort: how often its cohort was asked; ``everyone``: how often everybody was.
        state: "begun"; "committed" when the server's state after it is saved; "lost" where it was
            cut short and cannot be repeated: it counts as spent.
    """

    round: int
    chance: float
    multiplier: float
    clients: int
    cohort: int
    everyone: int
    state: str = "begun"

    @property
    def price(self) -> Price:
        """What accounting needs to know of it."""
        return Price(self.chance, self.multiplier, self.cohort, self.everyone)


@dataclass
class Ledger:
    """What a run has spent, round by round as it was really drawn, and the key of the present one.

    This one lives in memory: its run cannot be resumed. :mod:`fedharmony.experiments.ledger` keeps
    one in a run's folder.

    Attributes:
        seed: ``privacy.noise_seed``.
        spread: gives the key of the process that leads to all that share the work.
        expected: the expected size of the present cohort.
        noise_alone: the stages of the present round whose sum nobody is in.
    """

    budget: Budget
    seed: int | None = None
    spread: Callable[[bytes], bytes] = lambda key: key
    entries: list[Entry] = field(default_factory=list)
    expected: int = 1
    noise_alone: list[str] = field(default_factory=list)
    _key: bytes = b""

    def begin(self, round: int, asked: Exchanges, cohort: int, clients: int) -> None:
        """Enter a round of a cohort of so many of K clients, and draw its key.

        Raises :class:`BudgetSpentError` where the round would cost too much: it is not begun.
        """
        self.expected, self.noise_alone = cohort, []
        entry = Entry(round, cohort / clients, self.budget.multiplier, clients, *asked)
        self._key = self.spread(self._opened(entry))
        if not self._key:
            raise BudgetSpentError(f"privacy.epsilon = {self.budget.limit:g} is spent.")

    def _opened(self, entry: Entry) -> bytes:
        """The key of a round; nothing where ε does not suffice for it."""
        limit, prices = self.budget.limit, [*self._prices, entry.price]
        if limit < math.inf and cost(prices, self.budget.delta) > limit:
            return b""
        key = os.urandom(32)
        if self.seed is not None:
            key = hashlib.sha256(f"noise seed {self.seed}, round {entry.round}".encode()).digest()
        self._enter(entry, key)
        return key

    def _enter(self, entry: Entry, key: bytes) -> None:
        """Write a round down, before anything is drawn."""
        self.entries.append(entry)

    def stream(self, *purpose: str | int) -> Keystream:
        """Random numbers of the present round for one purpose, secret and never drawn again."""
        assert self._key, "no round has begun"
        return Keystream(self._key, *purpose)

    def commit(self, round: int) -> None:
        """Forget the key: the state after the round is saved."""
        self._key = b""

    @property
    def _prices(self) -> list[Price]:
        return [entry.price for entry in self.entries]

    @property
    def lost(self) -> int:
        """Rounds that count as spent, and left nothing."""
        return sum(entry.state == "lost" for entry in self.entries)

    def spent(self) -> dict[str, Any]:
        """What all rounds so far have cost; q and K of the last one."""
        last = self.entries[-1]
        return {
            "epsilon": cost(self._prices, self.budget.delta),
            "delta": self.budget.delta,
            "noise_multiplier": self.budget.multiplier,
            "q": last.chance,
            "clients": last.clients,
            "reproducible": self.seed is not None,
            **({"lost_rounds": self.lost} if self.lost else {}),
            **({"noise_alone": self.noise_alone} if self.noise_alone else {}),
        }

    def statement(self, rounds: int, noise_by: str) -> dict[str, Any]:
        """What the results say of a run of so many rounds, and of who has added the noise."""
        notes = [f"{REPRODUCIBLE} (privacy.noise_seed)"] if self.seed is not None else []
        if self.lost:
            notes.append(f"rounds that were cut short and count as spent: {self.lost}")
        spent = self.spent()
        return {
            **{name: spent[name] for name in ("epsilon", "delta", "noise_multiplier")},
            "rounds": rounds,
            "unit": "add or remove one client",
            "sampling": "poisson",
            "noise_by": noise_by,
            "reproducible": self.seed is not None,
            **({"note": "; ".join(notes)} if notes else {}),
        }


@dataclass(frozen=True)
class Noise:
    """What is added to the sum of clipped shares: its size, and where it comes from."""

    clipping: Clipping
    ledger: Ledger

    def deviation(self, group: str, parts: int) -> float:
        """The standard deviation z S √P of one part."""
        bound = self.clipping.model if group == PARAMS else self.clipping.sums
        return self.ledger.budget.multiplier * bound * math.sqrt(parts)

    def released(self, total: Record, state: Record, stage: str, round: int) -> Record:
        """The groups of a reply, from the sum of a cohort's shares: the new model, noisy sums.

        ``total`` is changed in place. The scalar ``noise GROUP`` says how much each sum got.
        Updates are divided by the expected cohort, whoever has answered.
        """
        groups: dict[str, Group] = {}
        scalars = {}
        for group, sums in total.groups.items():
            deviation = self.deviation(group, len(total.groups))
            views = sums.layout.views(sums.row) if isinstance(sums, Packed) else sums
            for name, tensor in views.items():
                stream = self.ledger.stream("noise", round, stage, group, name)
                drawn = torch.from_numpy(stream.normal(tensor.numel())).view(tensor.shape)
                tensor.add_(drawn.to(tensor.device), alpha=deviation)
            scalars[f"noise {group}"] = deviation
            groups[group] = sums
        if PARAMS in groups:
            before, cohort = state.get(PARAMS), self.ledger.expected
            mean = mapped(lambda t: t / cohort, groups[PARAMS])
            groups[PARAMS] = typed(shift(mean, before), before)
        return Record(groups, scalars)


@functools.cache
def accounting() -> Any:
    """dp-accounting's privacy loss distributions, or an error that says how to get them."""
    try:
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError as error:
        raise ConfigError(
            "[privacy] needs the package dp-accounting, which counts ε. Install it: pip install "
            "'fedharmony[privacy]'."
        ) from error
    return privacy_loss_distribution
