"""The page ``docs/paper.md``, written from the results of reproductions.

    python -m fedharmony.paper.page [FOLDER]...

in the root of the repository. Results and figures of each FOLDER, which ``fedharmony reproduce``
has written, are taken over into ``benchmarks/results/paper`` and ``docs/figures/paper``; the page
is made of what is there.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedharmony.files import write_atomically
from fedharmony.paper.item import all_items, items
from fedharmony.paper.scale import SCALES
from fedharmony.report.grid import Grid

HEAD = """\
# The paper, item by item

What the FedHarmony paper (arXiv 2604.28024) says in each of its tables, figures and theorems, and
what this package finds. Written by `python -m fedharmony.paper.page` from the results of

```sh
{commands}
```

`fedharmony reproduce` without an item lists them all, with the time each takes and whether it was
run here. Items share their runs. A command that was stopped or killed goes on when it is given
again, and does nothing where all is there. What a scale needs, and what would not fit into memory,
is said before the first run. With data of one's own:

```sh
fedharmony reproduce table1 fig6 --scale small --data voc2012=PATH --weights vit_tiny.safetensors
fedharmony reproduce all --scale paper --data voc2007=PATH --device cuda:0,cuda:1 --jobs 4
```

Each command writes tables (Markdown, CSV, LaTeX), figures and one page, `report.html`, to
`runs/paper-SCALE`. Data sets that `--data` does not name are left out. COCO and FLAIR were not run
in full: at small scale Table 1 and Fig. 2 went through on 159 images of COCO 2017, as a smoke test.

Every verdict follows from the figures by the rule that is stated with it. The paper's appendix
(splits, numbers of clients, most constants) and code are not public: a claim that is not found
again here is not refuted on its own data, and one that is found again at a small scale is not
proven at a large one. What was chosen where the paper is silent:
[FedHarmony](methods/fedharmony.md). FedLGT describes labels by random vectors in all of these runs,
as `fedlgt-randtext`: embeddings of their names need a language model ([FedLGT](methods/fedlgt.md)).
"""

RESULTS, FIGURES = Path("benchmarks/results/paper"), Path("docs/figures/paper")
PAGE = Path("docs/paper.md")
#: Width of a figure on the page, in pixels.
WIDTH = 330
NOT_OURS = (
    "The images, with the predictions of every method, are in the report that the command writes. "
    "They are not ours to publish."
)

#: The claims of the abstract and of the experiments, and the items that speak to them.
CLAIMS: Sequence[tuple[str, tuple[str, ...]]] = (
    ("Label correlations of clients drift away from the global structure.", ("fig1",)),
    (
        "Label correlations are sparse and in blocks, and clustering finds the blocks.",
        ("fig2", "algorithm1"),
    ),
    ("The consensus teacher corrects what clients learn.", ("table5/Part A", "fig4")),
    ("Weighing clients by size and correlation quality helps.", ("table5/Part B",)),
    (
        "The accelerated (block-wise) optimisation converges faster.",
        ("theorem1", "table2"),
    ),
    ("It does so without a loss of accuracy.", ("theorem2", "table3", "table4")),
    ("FedHarmony outperforms all other methods.", ("table1", "fig3")),
    ("It is robust to label skew.", ("fig6",)),
    ("It is robust to participation and to the number of clients.", ("fig5",)),
)


def text(results: Sequence[Mapping[str, Any]], figures: Mapping[str, str]) -> str:
    """The whole page; ``figures`` are those that can be shown, by name, in words."""
    commands = "\n".join(f"fedharmony reproduce {_asked(result)}" for result in results)
    parts = [HEAD.format(commands=commands), *_runs(results), *_claims(results)]
    for item in all_items():
        parts += _item(item.name, results, figures)
    return "\n".join(parts).rstrip() + "\n"


def _found(results: Sequence[Mapping[str, Any]], name: str) -> Iterator[tuple[str, Any]]:
    """Scale and content of an item, wherever it was run; once, if it is not about data."""
    for result in results:
        for content in result["items"]:
            if content["item"] == name:
                yield result["scale"], content
                if not items[name].about_data:
                    return


def _runs(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "| scale | data | items | runs | machine |"
    yield "|:--|:--|--:|--:|:--|"
    for result in results:
        names = {study.name: study.title for study in SCALES[result["scale"]].studies}
        used = [c["study"] for c in result["items"] if items[c["item"]].about_data]
        data = "; ".join(dict.fromkeys(names[study] for study in used))
        cells = (
            *(result["scale"], data, str(len(result["items"])), str(result["runs"])),
            "; ".join(result["machines"]),
        )
        yield f"| {' | '.join(cells)} |"
    yield ""


def _asked(result: Mapping[str, Any]) -> str:
    """The items and data sets that a result holds, as the command takes them."""
    held = {content["item"] for content in result["items"]}
    names = [item.name for item in all_items() if item.name in held]
    what = "all" if len(names) == len(all_items()) else " ".join(names)
    used = {c["study"] for c in result["items"] if items[c["item"]].about_data}
    studies = [s for s in SCALES[result["scale"]].studies if s.needs and s.name in used]
    return " ".join(
        [what, f"--scale {result['scale']}", *(f"--data {s.name}=PATH" for s in studies)]
    )


def _claims(results: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    yield "## The claims\n\nWhat the abstract and the experiments say, and what was found here:\n"
    for claim, names in CLAIMS:
        yield f"**{claim}**\n"
        for name, _, part in (name.partition("/") for name in names):
            for scale, content in _found(results, name):
                link = f"[{_short(content['title'])}](#{_anchor(content['title'])})"
                where = f", {scale}, {content['study']}" if items[name].about_data else ""
                yield f"- {link}{where}: {_said(content, part)}"
        yield ""


def _said(content: Mapping[str, Any], part: str) -> str:
    """The verdict on an item, or on a part of its claim, and why."""
    if part:
        word, _, why = str(content["more"][part]).partition(": ")
    else:
        word, why = content["verdict"], content["why"]
    return f"**{word.lower()}**; {why}"


def _item(
    name: str, results: Sequence[Mapping[str, Any]], figures: Mapping[str, str]
) -> Iterator[str]:
    found = list(_found(results, name))
    if not found:
        return
    of_data = items[name].about_data
    _, first = found[0]
    yield f"## {first['title']}\n\n**The paper:** {first['claim']}\n\n**Rule:** {first['rule']}\n"
    yield f"**Shown:** {first['lead']}\n"
    for scale, content in found:
        title = next(s.title for s in SCALES[scale].studies if s.name == content["study"])
        word = content["verdict"]
        if of_data:
            yield f"### {_short(first['title'])}, scale {scale}: {title}\n"
        yield f"**{word[:1].upper()}{word[1:]}:** {content['why']}\n"
        yield from (f"{part}: {said}\n" for part, said in content["more"].items())
        for grid in map(Grid.read, content["grids"]):
            yield f"{grid.title}:\n\n{grid.to_markdown()}\n"
            if grid.note:
                yield f"{grid.note}\n"
        names = [_figure(scale, content, file) for file in content["figures"]]
        shown = [
            f'<img src="figures/paper/{file}" width="{WIDTH}" alt="{figures[file]}">'
            for file in names
            if file in figures
        ]
        yield "\n".join([*shown, ""])
        if items[name].shows_images and not shown:
            yield f"{NOT_OURS}\n"


def _figure(scale: str, content: Mapping[str, Any], file: str) -> str:
    """The name of a figure among those of all reproductions."""
    return f"{scale}-{content['study']}-{content['item']}-{file.removeprefix('figure-')}"


def _short(title: str) -> str:
    return title.partition(":")[0]


def _anchor(title: str) -> str:
    """The name of a heading in links.

    >>> _anchor("Fig. 6: label skew γ")
    'fig-6-label-skew-γ'
    """
    kept = "".join(c for c in title.lower() if c.isalnum() or c in " -_")
    return kept.replace(" ", "-")


def load(root: Path) -> tuple[list[Mapping[str, Any]], dict[str, str]]:
    """Results by scale, and figures with what they say of themselves, of a repository."""
    files = [root / RESULTS / f"{name}.json" for name in SCALES]
    results = [json.loads(file.read_text("utf-8")) for file in files if file.is_file()]
    texts = {file.name: file.read_text("utf-8") for file in (root / FIGURES).glob("*.svg")}
    labels = {name: re.search(r'aria-label="([^"]*)"', text) for name, text in texts.items()}
    return results, {name: found[1] if found else "" for name, found in labels.items()}


def take_over(reproduction: Path, root: Path) -> None:
    """Copy the results and figures of a reproduction; older figures of its scale go."""
    content = json.loads((reproduction / "results.json").read_text("utf-8"))
    for folder in (RESULTS, FIGURES):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for old in (root / FIGURES).glob(f"{content['scale']}-*.svg"):
        old.unlink()
    shutil.copyfile(reproduction / "results.json", root / RESULTS / f"{content['scale']}.json")
    needs = {study.name: study.needs for study in SCALES[content["scale"]].studies}
    for item in content["items"]:
        if items[item["item"]].shows_images and needs[item["study"]]:
            continue  # not ours
        for file in item["figures"]:
            target = root / FIGURES / _figure(content["scale"], item, file)
            shutil.copyfile(reproduction / item["study"] / item["item"] / file, target)


def main(folders: Sequence[str], root: Path = Path()) -> None:
    """Take over reproductions and write the page."""
    for folder in folders:
        take_over(Path(folder), root)
    write_atomically(root / PAGE, text(*load(root)).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
