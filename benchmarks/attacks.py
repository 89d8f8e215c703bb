"""Rules of averaging × attacks: what does the worst attack cost, under each rule?

    python benchmarks/attacks.py --stage a [--jobs 16] [section.key=value ...]
    python benchmarks/attacks.py --stage b [--jobs 16] [section.key=value ...]

Stage a: the demo with FedAvg, one seed, 30 % of the clients malicious, who claim ten times their
images: every rule × every attack from the first round; then every attack from round 6 on, for the
four rules that did best. Stage b: the three best rules of stage a × the five attacks that cost them
most × FedAvg and FedHarmony × 10 % and 30 % × three seeds; false label correlations, which only
FedHarmony asks for; and all honest. A late start is an attack of its own.

Every run is compared with the honest run, plain mean, without the malicious clients. Results are
kept in results/attacks.json after each run; runs that it holds are not done again. The tables of
docs/robustness.md are made of it (tables.py): rules with the best worst case first, attacks with
the worst first. Rules that the file names and the registry does not have are removed ones.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from fedharmony.attacks import attacks
from fedharmony.data.base import DataSet
from fedharmony.engine.memory import ClientMemory
from fedharmony.errors import ClientLimitError
from fedharmony.experiments.build import assemble
from fedharmony.experiments.evaluate import evaluate
from fedharmony.experiments.machine import switch_torch
from fedharmony.experiments.settings import load_settings
from fedharmony.report.grid import signed
from fedharmony.robust import rules

METHODS, SHARES, SEEDS = ("fedavg", "fedharmony"), (0.1, 0.3), (0, 1, 2)
CLAIM, LATE = 10.0, 6
#: Attacks with another strength than their own.
STRONGER = ("alie:0.5", "inner_product:2", "blend:1")
#: What FedAvg does not ask for, and what the checks find as they find "not_a_number".
APART = ("correlation", "head_sums", "infinite")
FALSE_R = "correlation_coordinated"
LATE_RULES, BEST_RULES, WORST_ATTACKS = 4, 3, 5
HONEST = "none"
#: The columns of stage b.
PLACES = {f"{m}, {100 * s:g} %": (m, s) for m in METHODS for s in SHARES}


@dataclass(frozen=True)
class Cell:
    """One run: an attack ("kind", or "kind:strength") of a share of the clients, from a round on.

    ``without`` leaves the malicious clients out of every cohort.
    """

    method: str
    rule: str
    attack: str = HONEST
    share: float = 0.0
    start: int = 1
    seed: int = 0
    without: bool = False

    @property
    def name(self) -> str:
        """The attack, as tables name it."""
        return self.attack if self.start == 1 else f"{self.attack}, from round {self.start}"

    @property
    def baseline(self) -> Cell:
        """The honest run without the malicious clients, or with all where there are none."""
        plain = Cell(self.method, "none", share=self.share, seed=self.seed)
        return replace(plain, without=self.share > 0)

    def changes(self, rounds: int) -> list[str]:
        """The settings of this run."""
        found = [
            f"run.method={self.method}",
            f"run.seed={self.seed}",
            f"federation.robust={self.rule}",
        ]
        if self.share:
            kind, _, strength = ("size" if self.without else self.attack).partition(":")
            found += [f"attack.kind={kind}", f"attack.share={self.share:g}"]
            found += [f"attack.claim={CLAIM:g}", f"attack.rounds=[{self.start}, {rounds}]"]
            found += [f"attack.strength={strength}"] if strength else []
        return found


def run(cell: Cell, config: str, fixed: Sequence[str], data: DataSet | None) -> tuple[float, Any]:
    """MAP in per cent, and the data, for the next run."""
    rounds = load_settings(config, list(fixed)).run.rounds
    settings = load_settings(config, [*fixed, *cell.changes(rounds)])
    switch_torch(settings.engine)
    assembly = assemble(settings, data=data)
    loop = assembly.federation(ClientMemory())
    if cell.without:
        malicious = assembly.attackers.malicious
        schedule = [[k for k in cohort if k not in malicious] for cohort in loop.schedule]
        loop = replace(loop, schedule=schedule, transport=assembly.transport(ClientMemory()))
    try:
        state = loop.run(assembly.initial_state(), 0, lambda event: None, lambda round, s: None)
    except ClientLimitError:  # more clients sent nonsense than the run allows
        return 0.0, assembly.loaded
    found = evaluate(assembly, state).metrics.as_dict()["mAP"]
    return 100 * float(found or 0), assembly.loaded


_data: DataSet | None = None


def _run(cell: Cell, config: str, fixed: Sequence[str]) -> float:
    global _data
    value, _data = run(cell, config, fixed, _data)
    return value


class Results:
    """Runs that are done, in a file.

    >>> results = Results(Path("/nonexistent"), "demo", [])
    >>> cell = at("median", "noise")
    >>> results.found |= {cell: 40.0, cell.baseline: 44.0}
    >>> results.text([cell])
    '40.0 (−4.0)'
    """

    def __init__(self, file: Path, config: str, fixed: Sequence[str] | None) -> None:
        self.file, self.config, self.fixed = file, config, list(fixed or [])
        self.found: dict[Cell, float] = {}
        if file.exists():
            kept = json.loads(file.read_text())
            if fixed is None:  # they are read, and none are done
                self.fixed = kept["fixed"]
            if kept.get("fixed") != self.fixed or kept.get("config") != config:
                sys.exit(f"{file} holds results of other settings: {kept.get('fixed')}. Move it.")
            self.found = {Cell(**row["cell"]): row["mAP"] for row in kept["runs"]}

    def carry_out(self, cells: Iterable[Cell], jobs: int) -> None:
        """Run what is missing, several at once."""
        work = [cell for cell in dict.fromkeys(cells) if cell not in self.found]
        began, spawn = time.perf_counter(), multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(jobs, spawn) as pool:
            waiting = {pool.submit(_run, cell, self.config, self.fixed): cell for cell in work}
            for i, done in enumerate(as_completed(waiting), 1):
                cell = waiting[done]
                self.found[cell] = done.result()
                seconds = time.perf_counter() - began
                line = f"{i}/{len(work)} {seconds:.0f} s: {cell} {self.found[cell]:.1f}"
                print(line, file=sys.stderr, flush=True)
                self.keep()

    def keep(self) -> None:
        """Write the file anew."""
        runs = [{"cell": asdict(cell), "mAP": value} for cell, value in self.found.items()]
        runs.sort(key=lambda row: json.dumps(row["cell"], sort_keys=True))
        kept = {"config": self.config, "fixed": self.fixed, "claim": CLAIM, "runs": runs}
        draft = self.file.with_suffix(".draft")
        draft.write_text(json.dumps(kept, indent=1) + "\n")
        draft.replace(self.file)

    def complete(self, cell: Cell) -> bool:
        """Whether a run is there, and what it is compared with."""
        return cell in self.found and cell.baseline in self.found

    def cost(self, cells: Iterable[Cell]) -> float:
        """The mean difference of runs to what they are compared with."""
        return statistics.mean(self.found[cell] - self.found[cell.baseline] for cell in cells)

    def text(self, cells: Sequence[Cell]) -> str:
        """A cell of a table: the mean mAP, and its difference."""
        value = statistics.mean(self.found[cell] for cell in cells)
        return f"{value:.1f} ({signed(self.cost(cells))})"

    def table(
        self, rows: Sequence[str], columns: Sequence[str], cells: Callable[[str, str], list[Cell]]
    ) -> str:
        """Markdown; rows with the worst cell first. A cell without runs is empty."""
        known = [[[c for c in cells(r, k) if self.complete(c)] for k in columns] for r in rows]
        costs = [min((self.cost(one) for one in line if one), default=0.0) for line in known]
        lines = [f"| Attack | {' | '.join(columns)} |", f"| --- |{' --: |' * len(columns)}"]
        for place in sorted(range(len(rows)), key=costs.__getitem__):
            texts = [self.text(one) if one else "" for one in known[place]]
            lines.append(f"| {shown(rows[place])} | {' | '.join(texts)} |")
        return "\n".join(lines)

    def rules(self, late: bool = False) -> list[str]:
        """The rules of stage a, that with the best worst case first; ``late``: of its second part.

        Of a rule with late attacks these count, too.
        """
        start = LATE if late else 1
        found = {c.rule for c in self.found if c.start == start and c.share == SHARES[-1]}
        worst = {}
        for rule in sorted(found):
            cells = [c for name in every_name() if (c := at(rule, name)) in self.found]
            worst[rule] = min(self.cost([cell]) for cell in cells)
        return sorted(worst, key=lambda rule: -worst[rule])

    def best(self) -> list[str]:
        """The rules of stage b."""
        return self.rules(late=True)[:BEST_RULES]

    def worst(self) -> list[str]:
        """The attacks of stage b."""
        named = sorted(
            every_name(), key=lambda name: min(self.cost([at(r, name)]) for r in self.best())
        )
        return named[:WORST_ATTACKS]


def every_attack() -> list[str]:
    """All attacks that FedAvg can be attacked with."""
    return [n for n in attacks.names() if not n.startswith(APART)] + list(STRONGER)


def late_of(named: Sequence[str]) -> list[str]:
    """The same attacks, later; claims last for the whole run."""
    return [f"{name}, from round {LATE}" for name in named if name != "size"]


def at(rule: str, attack: str) -> Cell:
    """The cell of stage a with an attack as tables name it."""
    kind, late, _ = attack.partition(", from")
    start = LATE if late else 1
    return Cell("fedavg", rule, kind, 0.0 if attack == HONEST else SHARES[-1], start)


def every_name() -> list[str]:
    """The attacks of stage a, as tables name them."""
    return [*every_attack(), *late_of(every_attack())]


def seeds_of(rule: str, name: str, method: str, share: float) -> list[Cell]:
    """The runs of a cell of stage b."""
    one = replace(at(rule, name), method=method, share=share if name != HONEST else 0.0)
    return [replace(one, seed=seed) for seed in SEEDS]


def shown(name: str) -> str:
    """An attack, for readers."""
    return "nobody attacks" if name == HONEST else name


def stage_a(results: Results, jobs: int) -> None:
    """Every rule × every attack; late ones for the best rules."""
    cells = [at(r, n) for r in ("none", *rules.names()) for n in (HONEST, *every_attack())]
    results.carry_out([*cells, *(cell.baseline for cell in cells)], jobs)
    best = results.rules()[:LATE_RULES]
    results.carry_out([at(rule, name) for rule in best for name in every_name()], jobs)


def stage_b(results: Results, jobs: int) -> None:
    """The best rules × the attacks that cost them most × methods × shares × seeds."""
    if not results.best():
        sys.exit("Stage b follows on stage a. Run that first: --stage a.")
    wanted = [
        cell
        for rule in results.best()
        for name in (HONEST, *results.worst(), FALSE_R)
        for method, share in PLACES.values()
        for cell in seeds_of(rule, name, method, share)
        if name != FALSE_R or method == "fedharmony"
    ]
    results.carry_out([*wanted, *(cell.baseline for cell in wanted)], jobs)


def worst_cases(results: Results, rule: str) -> list[tuple[str, str, list[Cell]]]:
    """By method and share: the attack of stage b that costs a rule most, and its runs."""
    found = []
    for place, (method, share) in PLACES.items():
        of_names = {n: seeds_of(rule, n, method, share) for n in (*results.worst(), FALSE_R)}
        done = [n for n, cells in of_names.items() if all(results.complete(c) for c in cells)]
        name = min(done, key=lambda n: results.cost(of_names[n]))
        found.append((place, name, of_names[name]))
    return found


def page_tables(file: Path) -> dict[str, Callable[[str], str]]:
    """What docs/robustness.md shows, by kind; some of one rule."""
    results = Results(file, "demo", None)

    def one_a(name: str, rule: str) -> list[Cell]:
        return [at(rule, name)]

    def worst(rule: str) -> str:
        lines = ["| Method | worst attack | mAP | nobody attacks |", "| --- | --- | --: | --: |"]
        for place, name, cells in worst_cases(results, rule):
            honest = results.text(seeds_of(rule, HONEST, *PLACES[place]))
            lines.append(f"| {place} | {shown(name)} | {results.text(cells)} | {honest} |")
        return "\n".join(lines)

    def listed(_: str) -> str:
        rows = [f"| `{name}` | {attacks.summary(name)} |" for name in attacks.names()]
        return "\n".join(["| Attack | a malicious client |", "| --- | --- |", *rows])

    return {
        "attacks": listed,
        "worst": worst,
        "stage-a": lambda _: results.table([HONEST, *every_name()], results.rules(), one_a),
        "stage-b": lambda rule: results.table(
            [HONEST, *results.worst(), FALSE_R],
            list(PLACES),
            lambda name, place: seeds_of(rule, name, *PLACES[place]),
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("changes", nargs="*", metavar="section.key=value")
    parser.add_argument("--stage", choices=["a", "b"], required=True)
    parser.add_argument("--config", default="demo")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    options = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"  # of each worker
    options.out.mkdir(parents=True, exist_ok=True)
    fixed = ["engine.threads=1", *options.changes]
    results = Results(options.out / "attacks.json", options.config, fixed)
    began = time.perf_counter()
    (stage_a if options.stage == "a" else stage_b)(results, options.jobs)
    print(f"\n{len(results.found)} runs; {time.perf_counter() - began:.0f} s this time")


if __name__ == "__main__":
    main()
