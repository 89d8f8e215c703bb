"""Data flows one way: a module imports only from the layers to its left."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import fedharmony

PACKAGE = Path(fedharmony.__file__).parent

#: Layers from left to right; modules of one layer may import each other.
LAYERS = [
    {"types", "errors", "files", "rng", "registry", "config"},
    {"correlation", "consensus", "losses", "aggregate"},
    {"data"},
    {"partition"},
    {"models"},
    {"methods"},
    {"engine", "transport"},
    {"metrics"},
    {"experiments"},
    {"report"},
    {"cli"},
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
        assert not imports(path)
        return
    assert own in LAYER, f"{own} has no layer: add it to LAYERS"
    for module in imports(path):
        part = part_of(module)
        if part in ("", "__version__"):
            continue  # the package itself: only its version and place are taken from it
        assert LAYER[part] <= LAYER[own], f"{own} imports {module}, which is to its right"


def test_no_layer_is_stale() -> None:
    present = {p.relative_to(PACKAGE).parts[0].removesuffix(".py") for p in MODULES}
    assert set(LAYER) <= present


METHOD_FILES = [p for p in (PACKAGE / "methods").glob("*.py") if p.stem not in ("__init__", "base")]


def test_the_engine_names_no_method() -> None:
    names = {path.stem for path in METHOD_FILES}
    assert "fedharmony" in names
    for folder in ("engine", "transport", "experiments"):
        for path in (PACKAGE / folder).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Import | ast.ImportFrom):
                    continue
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    # A default value may name the first method; the engine itself may not.
                    if folder == "experiments" and path.stem == "settings":
                        continue
                    words = set(node.value.replace("'", " ").split())
                    # "fedharmony resume" is the program, not the method
                    assert not words & (names - {"fedharmony"}), f"{path}: {node.value!r}"
                if isinstance(node, ast.Attribute):
                    assert node.attr not in names, f"{path}: {node.attr}"
