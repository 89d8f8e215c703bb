"""Data flows one way: a module imports only from the layers to its left."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fedharmony
from fedharmony.methods import methods

PACKAGE = Path(fedharmony.__file__).parent

#: Layers from left to right; modules of one layer may import each other.
LAYERS = [
    {
        "types",
        "errors",
        "files",
        "reading",
        "records",
        "terminal",
        "stopping",
        "fallbacks",
        "rng",
        "registry",
        "config",
    },
    {
        "correlation",
        "alignment",
        "clusters",
        "consensus",
        "losses",
        "aggregate",
        "robust",
        "privacy",
        "solve",
    },
    {"data"},
    {"partition"},
    {"models"},
    {"methods"},
    {"engine", "transport", "attacks"},
    {"server"},
    {"metrics"},
    {"experiments"},
    {"site"},
    {"flower"},
    {"report"},
    {"paper"},
    {"api"},
    {*(path.stem for path in PACKAGE.glob("cli*.py")), "__main__"},
]
LAYER = {part: depth for depth, layer in enumerate(LAYERS) for part in layer}
MODULES = sorted(PACKAGE.rglob("*.py"))


def part_of(module: str) -> str:
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> set[str]:
    """Every fedharmony module that a file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{path}: relative import"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= names if node.module == "fedharmony" else {node.module}
    return {name for name in found if name.split(".")[0] == "fedharmony"}


@pytest.mark.parametrize("path", MODULES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_point_left(path: Path) -> None:
    own = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
    if own == "__init__":
        assert imports(path) == {"fedharmony.api"}  # for type checkers
        return
    assert own in LAYER, f"{own} has no layer: add it to LAYERS"
    for module in imports(path):
        part = part_of(module)
        if part in ("", "__version__"):
            continue  # the package itself: only its version and place are taken from it
        assert LAYER[part] <= LAYER[own], f"{own} imports {module}, which is to its right"


def test_who_only_trains_knows_no_round_loop() -> None:
    for path in [*(PACKAGE / "site").glob("*.py"), PACKAGE / "flower" / "simulated_app.py"]:
        assert not {m for m in imports(path) if part_of(m) == "server"}, path


def test_no_layer_is_stale() -> None:
    present = {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in MODULES}
    assert set(LAYER) <= present


def test_the_engine_names_no_method() -> None:
    """No string equal to a method's name, no use of its class, in what runs all methods alike."""
    for folder in ("engine", "transport", "server", "experiments", "site", "flower"):
        for path in (PACKAGE / folder).glob("*.py"):
            found = {
                node.value if isinstance(node, ast.Constant) else getattr(node, "id", None)
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Constant | ast.Name)
            }
            named = found & {*methods.names(), *(methods[n].__name__ for n in methods.names())}
            # Others may say the program's own name, and experiments which method runs by default.
            allowed = {"experiments": {"fedavg", "fedharmony"}, "flower": {"fedharmony"}}
            allowed["site"] = allowed["flower"]
            assert named <= allowed.get(folder, set()), path
