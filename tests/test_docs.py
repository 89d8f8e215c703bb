"""The pages: their links lead somewhere, the notebook runs, the site has every page."""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

import fedharmony
from fedharmony.experiments.reference import all_settings

ROOT = Path(__file__).parents[1]
PAGES = sorted(
    path.relative_to(ROOT).as_posix()
    for path in (*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("benchmarks/*.md"))
)
NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def text_of(page: str) -> str:
    """A page without its code blocks."""
    return FENCE.sub("", (ROOT / page).read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """The names of a page's headings, as GitHub and MkDocs make them."""
    found = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.MULTILINE)
    plain = (re.sub(r"[^\w\s-]", "", heading.lower()) for heading in found)
    return {re.sub(r"\s", "-", heading.strip()) for heading in plain}


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page: str) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        if target.startswith(("http://", "https://", "mailto:")):
            continue
        name, _, anchor = target.partition("#")
        file = ROOT / page if not name else (ROOT / page).parent / name
        assert file.exists(), f"{page}: {target}"
        assert not anchor or anchor in anchors(file), f"{page}: {target}"


def test_every_page_is_in_the_menu_of_the_site() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("nav:")[2]
    listed = set(re.findall(r": (\S+\.md)$", menu, re.MULTILINE))
    there = {page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")}
    assert listed == there | {"benchmarks.md", "contributing.md"}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_are_kept_without_outputs(path: Path) -> None:
    for cell in nbformat.read(path, as_version=4).cells:
        assert cell.get("execution_count") is None
        assert not cell.get("outputs")


# ipykernel and jupyter_client warn about themselves.
@pytest.mark.filterwarnings("ignore")
def test_the_notebook_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tenth of the images and two rounds."""
    monkeypatch.setenv("FEDHARMONY_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    notebook = nbformat.read(NOTEBOOKS[0], as_version=4)
    first = next(cell for cell in notebook.cells if cell.cell_type == "code")
    assert first.source.startswith("images, rounds = 300, 15")
    first.source = "images, rounds = 30, 2"
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    ).execute()
    assert (tmp_path / "report.html").exists()
    text = str([cell.get("outputs") for cell in notebook.cells])
    assert "triangle" in text  # the classes, by the check
    assert "Written: shapes.toml" in text
    assert "new/2.png" in text
    assert "| fedharmony |" in text


def parts_of_the_package() -> dict[str, list[object]]:
    """Modules by their last name, and classes by theirs."""
    found: dict[str, list[object]] = {}
    for file in pkgutil.walk_packages(fedharmony.__path__, "fedharmony."):
        if file.name.endswith("__main__"):
            continue
        module = importlib.import_module(file.name)
        found.setdefault(file.name.rpartition(".")[2], []).append(module)
        for name, kind in inspect.getmembers(module, inspect.isclass):
            found.setdefault(name, []).append(kind)
    return found


def test_names_in_the_architecture_exist() -> None:
    """Every `Class.method`, `module.function`, `section.setting` and `path/file.py`."""
    pytest.importorskip("flwr")  # all modules are imported
    text, parts = text_of("docs/architecture.md"), parts_of_the_package()
    known = {setting.name for setting in all_settings()}
    spans = set(re.findall(r"`([A-Za-z_][\w./]*)(?:\([^`]*\))?`", text))
    files = {span for span in spans if span.endswith((".py", "/"))} - {"memory/", "tracking/"}
    for file in sorted(files):
        roots = (ROOT, ROOT / "src" / "fedharmony")
        assert any((root / file).exists() for root in roots), file
    endings = r".*\.(py|toml|jsonl?|html|safetensors|key)"
    dotted = {s for s in spans if re.fullmatch(r"\w+\.\w+", s) and not re.fullmatch(endings, s)}
    names = {name for name in dotted - known if not name.startswith("torch.")}
    assert {"Trainer.train", "Federation.run", "consensus.WEIGHTED"} <= names
    for name in sorted(names):
        owner, _, part = name.partition(".")
        kinds = parts.get(owner, [])
        assert any(hasattr(k, part) or part in vars(k).get("__annotations__", ()) for k in kinds), (
            name
        )


def test_tables_of_results_are_those_of_the_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    tables = importlib.import_module("tables")
    for page in tables.PAGES:
        text = (ROOT / page).read_text(encoding="utf-8")
        assert tables.filled(text) == text, "Write them anew: python benchmarks/tables.py"
        heads = re.findall(r"(.*)\n\n\| (?:Method|Attack) \|", text)
        assert heads
        assert all(tables.PLACE.match(f"{head}\n\n") for head in heads)
