"""Changes the code in small ways, one at a time, and sees whether a test fails.

    python tests/mutations.py --each 25 [--seed 0] [MODULE ...]

A mutant that no test catches shows code that could be wrong without anybody noticing, or two ways
to write the same. The working tree is not touched: mutants live in a copy of ``src``. Every mutant
is tested in a fork of one process that has torch loaded, with the test files listed here only.
"""

from __future__ import annotations

import argparse
import ast
import copy
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
#: Per module the tests that should know it.
MODULES = {
    "correlation": ["test_correlation"],
    "alignment": ["test_alignment"],
    "clusters": ["test_clusters"],
    "consensus": ["test_consensus", "test_sums", "test_privacy"],
    "losses": ["test_losses"],
    "robust": ["test_robust"],
    "privacy": ["test_privacy"],
    "methods/fedharmony": ["test_fedharmony"],
    "methods/fednova": ["test_fednova"],
    "methods/fedcurv": ["test_fedcurv"],
    "methods/fedrdn": ["test_fedrdn", "test_engine"],
    "aggregate": ["test_engine", "test_sums"],
    "metrics/multilabel": ["test_metrics"],
    "metrics/parts": ["test_parts"],
    "metrics/structure": ["test_metrics"],
    "metrics/bootstrap": ["test_significance"],
    "metrics/significance": ["test_significance"],
    "report/differences": ["test_significance"],
    "server/federation": ["test_engine"],
    "server/replies": ["test_engine", "test_buffers"],
    "server/sampling": ["test_engine", "test_tune"],
    "transport/sums": ["test_sums"],
    "transport/processes": ["test_processes"],
    "partition/dirichlet": ["test_partition"],
    "partition/annotation": ["test_splitters", "test_evaluation"],
    "experiments/blueprint": ["test_blueprint", "test_tune"],
    "experiments/build": ["test_blueprint", "test_evaluation", "test_tune"],
    "experiments/evaluate": ["test_evaluation"],
    "experiments/run": ["test_evaluation", "test_tune", "test_binding"],
    "experiments/compare": ["test_tune"],
}
SECONDS = 120  # a mutant that takes longer hangs, which somebody would notice
SWAPS: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
}


def looked_at(node: ast.AST) -> Iterator[ast.AST]:
    """All nodes but annotations, decorators and what is raised: messages are not mutated."""
    yield node
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list") or isinstance(value, ast.Raise):
            continue
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Attribute):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise):
                yield from looked_at(child)


def change(node: ast.AST) -> str | None:
    """Mutate a node in place; what was done, or None if it is not of a kind that is mutated."""
    if isinstance(node, ast.Compare | ast.BoolOp | ast.BinOp):
        operator = node.ops[0] if isinstance(node, ast.Compare) else node.op
        if (other := SWAPS.get(type(operator))) is None:
            return None
        before = ast.unparse(node)
        if isinstance(node, ast.Compare):
            node.ops[0] = other()  # type: ignore[call-overload]
        else:
            node.op = other()  # type: ignore[assignment]
        return f"{before}  ->  {ast.unparse(node)}"
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        before = node.value
        node.value = not before if isinstance(before, bool) else before + 1
        return f"{before}  ->  {node.value}"
    if isinstance(node, ast.IfExp):
        before = ast.unparse(node)
        node.body, node.orelse = node.orelse, node.body
        return f"{before}  ->  {ast.unparse(node)}"
    return None


def places(source: str) -> list[int]:
    """Which nodes of the source can be mutated."""
    nodes = enumerate(looked_at(ast.parse(source)))
    return [place for place, node in nodes if change(copy.deepcopy(node)) is not None]


def mutant(source: str, place: int) -> tuple[int, str | None, str]:
    """Line, what was done, and the source with the node at a place mutated."""
    tree = ast.parse(source)
    node = list(looked_at(tree))[place]
    return getattr(node, "lineno", 0), change(node), ast.unparse(ast.fix_missing_locations(tree))


def survives(tests: list[str], source: Path) -> bool:
    """Whether the tests pass with the package in ``source``."""
    child = os.fork()
    if child == 0:
        os.setsid()
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1), os.dup2(quiet, 2)
        os.chdir(ROOT)
        sys.path.insert(0, str(source))
        os.environ["PYTHONPATH"] = str(source)
        import pytest

        files = [f"tests/{name}.py" for name in tests]
        os._exit(int(pytest.main(["-x", "-q", "-n0", "-p", "no:cacheprovider", *files])))
    ends = time.monotonic() + SECONDS
    while time.monotonic() < ends:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return status == 0
        time.sleep(0.02)
    os.killpg(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def main() -> None:
    """Sample mutants of each module, and print those that no test caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("modules", nargs="*", default=list(MODULES))
    parser.add_argument("--each", type=int, default=25, help="mutants per module")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import sklearn.metrics  # noqa: F401
    import torch  # noqa: F401

    caught = tried = 0
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "src"
        shutil.copytree(ROOT / "src", copied)
        for module in options.modules:
            path = copied / "fedharmony" / f"{module}.py"
            source = path.read_text()
            if not survives(MODULES[module], copied):
                sys.exit(f"The tests of {module} fail without a mutation. Mend them first.")
            every = places(source)
            chosen = random.Random(options.seed).sample(every, min(options.each, len(every)))
            left = []
            for line, done, text in (mutant(source, place) for place in sorted(chosen)):
                path.write_text(text)
                if survives(MODULES[module], copied):
                    left.append(f"  line {line}: {done}")
            path.write_text(source)
            caught, tried = caught + len(chosen) - len(left), tried + len(chosen)
            print(f"{module}: {len(chosen) - len(left)} of {len(chosen)} ({len(every)} possible)")
            print("\n".join(left), flush=True)
    print(f"caught {caught} of {tried}")


if __name__ == "__main__":
    main()
