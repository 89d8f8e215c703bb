"""Theorems 1 and 2, with numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from fedharmony.paper.descent import INSIDE, Descent, bound, drawn, slow_pair
from fedharmony.paper.item import Found, Item, Shown, items
from fedharmony.paper.scale import Part, Study
from fedharmony.paper.verdict import decide
from fedharmony.report.charts import Picture, Series, curve
from fedharmony.report.grid import Grid
from fedharmony.report.panel import Section
from fedharmony.report.svg import DASHED, DOTTED, Style, style

STEPS = 1000
#: Steps between the points of a curve.
EVERY = 50
#: Largest weight outside of the blocks, smallest one, and the weight inside, of the instance.
LARGEST, SMALLEST, WITHIN = 0.3, 0.02, 1.0


class Theorem(Item):
    """An item that needs neither data nor runs."""

    about_data = False

    def parts(self, study: Study) -> Sequence[Part]:
        """None."""
        return []


@items.register("theorem1")
class Theorem1(Theorem):
    """Linear rates of the full and of the block-wise objective."""

    place = 100
    title = "Theorem 1: faster in blocks"
    claim = (
        "Gradient descent contracts f_blk by 1 − 2ηγ_in² per step and f_full by 1 − 2ηγ_out², γ_in "
        "the smallest weight inside of blocks, γ_out the largest outside: blocks converge faster."
    )
    rule = (
        "Reproduced if both printed bounds hold along the whole path of a matrix that fulfils the "
        "conditions; not reproduced if one is exceeded. (12 labels in three blocks, weights 1 "
        "inside, 0.3 outside but for one pair of 0.02, from all ones to zero, η = 0.1, 1,000 "
        "steps, float64.)"
    )

    def show(self, found: Found) -> Shown:
        """Both paths beside the printed and the corrected bounds."""
        case = slow_pair()
        full, block = case.path(STEPS), case.inside().path(STEPS)
        printed = [bound(full[0], LARGEST, t) for t in range(STEPS + 1)]
        corrected = [bound(full[0], SMALLEST, t) for t in range(STEPS + 1)]
        tight = [bound(block[0], WITHIN, t) for t in range(STEPS + 1)]
        broken = next((t for t in range(STEPS + 1) if full[t] > printed[t]), None)
        holds = all(f <= b for f, b in zip(full, corrected, strict=True))
        inside = all(f <= b for f, b in zip(block, tight, strict=True))
        same = torch.equal(case.after(100)[INSIDE], case.inside().after(100)[INSIDE])
        table = Grid(
            "f after T steps, and the bounds",
            ("T", "f_full", "printed bound", "corrected bound", "f_blk", "printed bound of f_blk"),
            tuple(
                (f"{t:,}", *(f"{path[t]:.3e}" for path in (full, printed, corrected, block, tight)))
                for t in (0, 100, 500, 620, 621, 1000)
            ),
            "Corrected: the smallest positive weight in the place of γ_out, the largest one "
            "outside. The slowest entry decides how f_full ends; the proof bounds the rate from "
            "the wrong side (μ = 2 min γ² ≤ 2γ_out²).",
        )
        picture = _curves(
            {
                "f_full": (style(1), full),
                "printed bound": (DASHED, printed),
                "corrected bound": (DOTTED, corrected),
            },
            "log₁₀ of f_full and its bounds",
            f"The printed bound (dashes) is exceeded from T = {broken} on; the corrected one "
            "(dots) holds.",
        )
        facts = Grid(
            "What else the theorem says and does not say",
            ("statement", "found"),
            (
                ("bound of f_blk", "holds" if inside else "fails"),
                ("entries inside of blocks descend alike in both runs", _yes(same)),
                (
                    "γ_out = 0 (blocks as the algorithm has them)",
                    "f_full = f_blk for all T: no acceleration",
                ),
                (
                    "“No-Block” of the algorithm",
                    "all weights 1, γ_out = γ_in: outside of the theorem's condition",
                ),
                ("R as a free matrix", "in training R is a function of the model"),
            ),
        )
        why = (
            f"the bound of f_blk {'holds' if inside else 'fails'}, that of f_full is exceeded from "
            f"T = {broken} on (f(1,000) = {full[STEPS]:.2e} against {printed[STEPS]:.2e}); with "
            f"the smallest weight it {'holds' if holds else 'fails, too'}."
        )
        yes = broken is None and inside
        lead = (
            "Gradient descent on a weighted distance of matrices, where each entry descends by "
            "itself: R(T) − R* = (1 − 2ηγ²)^T (R(0) − R*)."
        )
        section = Section(self.title, lead, (picture,), grids=(table, facts))
        return Shown((section,), decide(yes, not yes, why, self.rule))


@items.register("theorem2")
class Theorem2(Theorem):
    """What is lost outside of blocks."""

    place = 110
    title = "Theorem 2: little is lost in blocks"
    claim = (
        "The full objective of a block-wise solution is its block objective plus ‖Γ_out ∘ E‖², "
        "with E the consensus outside of blocks."
    )
    rule = (
        "Reproduced if the printed identity holds to 1e-9 at the same iterate for any start; not "
        "reproduced if it fails for some start that the theorem allows. (12 labels in three "
        "blocks, random weights, start and goal, 30 steps, float64.)"
    )

    def show(self, found: Found) -> Shown:
        """The identity from a start that is zero outside of blocks, and from any start."""
        cells, failing, corrected = [], 0, True
        for seed in range(3):
            case = drawn(seed)
            zero = replace(case, start=torch.where(INSIDE, case.start, 0.0))
            for name, one in (("zero outside", zero), ("any", case)):
                whole, printed, general = both_sides(one)
                agrees = math.isclose(whole, printed, rel_tol=1e-9)
                corrected &= math.isclose(whole, general, rel_tol=1e-9)
                failing += not agrees
                cells.append(
                    (
                        f"draw {seed}, start {name}",
                        *(f"{value:.4f}" for value in (whole, printed, general)),
                        _yes(agrees),
                    )
                )
        table = Grid(
            "f_full of the block-wise iterate after 30 steps",
            ("case", "f_full", "printed", "corrected", "printed holds"),
            tuple(cells),
            "Printed: f_blk + ‖Γ_out ∘ R*‖². Corrected: f_blk + ‖Γ_out ∘ (R(0) − R*)‖², since "
            "descent on f_blk never moves entries outside of blocks. The second term is a summand, "
            "no bound from above.",
        )
        why = (
            "the printed identity holds where the start is zero outside of blocks and fails "
            f"otherwise ({failing} of {len(cells)} cases); with R(0) − R* in the place of E it "
            f"{'holds in all' if corrected else 'fails, too'}."
        )
        lead = "The same iterate put into both sides."
        section = Section(self.title, lead, grids=(table,))
        return Shown((section,), decide(not failing, bool(failing), why, self.rule))


def both_sides(case: Descent, steps: int = 30) -> tuple[float, float, float]:
    """f_full of the block-wise iterate, and what the printed and the corrected identity say."""
    found = case.inside().after(steps)
    inner = case.inside().misfit(found)
    outer = case.outside()
    printed = inner + float((outer * case.goal).square().sum())
    general = inner + float((outer * (case.start - case.goal)).square().sum())
    return case.misfit(found), printed, general


def _curves(paths: dict[str, tuple[Style, list[float]]], title: str, note: str) -> Picture:
    places = range(0, STEPS + 1, EVERY)
    names = [f"{t:,}" if t % (4 * EVERY) == 0 else "" for t in places]
    series = [
        Series(name, look, ({i: math.log10(path[t]) for i, t in enumerate(places, start=1)},))
        for name, (look, path) in paths.items()
    ]
    return curve(title, series, rounds=len(names), values=("steps T", names), note=note)


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"
