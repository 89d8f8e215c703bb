"""Some test images, with what was found, missed and wrongly given."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping

import numpy as np

from fedharmony.report import svg
from fedharmony.report.charts import Picture
from fedharmony.report.load import Runs, RunView
from fedharmony.report.measures import Array, Decisions, decide
from fedharmony.report.panel import Panel, Section, count, legend, panels, styles
from fedharmony.report.svg import Drawing, Style

#: Images of each kind.
EACH = 2
#: Side of a picture, and letters of a line of text beside and below it.
SIDE, BESIDE, BELOW = 112.0, 34, 52
LINE = 14.5
#: Labels that a line of text names.
NAMED = 6


@panels.register("examples")
class ExampleImages(Panel):
    """Images with their labels: where nearly all is right, much is missed, much is wrong."""

    place = 44

    def draw(self, runs: Runs) -> Section | None:
        """A picture per image; below it a line per method."""
        keeper = next((run for run in runs.scored.values() if run.examples is not None), None)
        if keeper is None or keeper.examples is None or keeper.scores is None:
            return None
        rows, pixels = keeper.examples.rows, keeper.examples.pixels
        made = {n: _of(run, rows) for n, run in runs.scored.items() if run.scores is not None}
        missed = np.mean([d.missed.sum(1) for d in made.values()], axis=0)
        wrong = np.mean([d.wrong.sum(1) for d in made.values()], axis=0)
        labels = (keeper.scores.labels[rows] == 1).sum(1)
        looks = styles(runs)
        pictures = []
        for kind, i in chosen(missed, wrong, labels):
            image = np.ascontiguousarray(pixels[i].transpose(1, 2, 0))
            found = {n: Decisions(d.found[i], d.missed[i], d.wrong[i]) for n, d in made.items()}
            drawing = _drawing(image, keeper, int(rows[i]), found, looks, runs.alone)
            pictures.append(Picture(kind, drawing.svg(f"Test image and its labels: {kind}")))
        lead = (
            f"Of {count(len(rows), 'test image')}, taken at equal distances: {EACH} with the "
            f"fewest errors, {EACH} with the most missed labels and {EACH} with the most wrong "
            "ones" + ("." if runs.alone else ", by the mean over methods (first seed of each).")
        )
        return Section("Images", lead, tuple(pictures), legend(runs, made))


def _of(run: RunView, rows: np.ndarray) -> Decisions:
    assert run.scores is not None
    every = decide(run.scores, run.thresholds)
    return Decisions(every.found[rows], every.missed[rows], every.wrong[rows])


def chosen(missed: Array, wrong: Array, labels: Array) -> Iterator[tuple[str, int]]:
    """Kind and number of the images to show; none twice.

    Among equals, images with more labels come first where nearly all is right, and images with
    fewer other errors where something is wrong.
    """
    taken = set[int]()
    for kind, order in (
        ("Fewest errors", np.lexsort((-labels, missed + wrong))),
        ("Most missed", np.lexsort((wrong, -missed))),
        ("Most wrong", np.lexsort((missed, -wrong))),
    ):
        free = [int(i) for i in order if int(i) not in taken]
        for i in free[:EACH]:
            taken.add(i)
            yield kind, i


def _drawing(
    image: svg.Pixels,
    run: RunView,
    row: int,
    made: Mapping[str, Decisions],
    looks: Mapping[str, Style],
    alone: bool,
) -> Drawing:
    assert run.scores is not None
    present = np.flatnonzero(run.scores.labels[row] == 1)
    beside = ["There:", *_wrapped([run.classes[i] for i in present], BESIDE)]
    below: dict[str, list[str]] = {}
    for name, d in made.items():
        for word, part in {"found": d.found, "missed": d.missed, "wrong": d.wrong}.items():
            named = [run.classes[i] for i in np.flatnonzero(part)]
            below.setdefault(name, []).extend(_wrapped(named, BELOW, word))
    lines = sum(len(texts) for texts in below.values()) + 0.4 * len(below)
    drawing = Drawing(SIDE + 12 + LINE * lines)
    drawing.photo(image, 0, 0, SIDE, SIDE)
    name = svg.printable(run.scores.ids[row], BESIDE)
    for i, text in enumerate([name, *beside][:8]):
        colour = svg.MUTED if i < 2 else svg.INK
        drawing.text(SIDE + 10, 7 + LINE * i, text, colour=colour)
    y = SIDE + 16.0
    for method, texts in below.items():
        for i, text in enumerate(texts):
            if i == 0 and not alone:
                drawing.mark(5, y, looks[method])
            drawing.text(0 if alone else 14, y, text)
            y += LINE
        y += 0.4 * LINE
    return drawing


def _wrapped(names: list[str], letters: int, word: str = "") -> list[str]:
    """Names with commas between them, in lines of so many letters; nothing for no names.

    >>> _wrapped(["cat", "dog", "cow"], 12, "found"), _wrapped(["red 3", "blue 4"], 11)
    (['found: cat,', 'dog, cow'], ['red 3,', 'blue 4'])
    """
    shown = [svg.printable(name, 24) for name in names[:NAMED]]
    if len(names) > NAMED:
        shown.append(f"{len(names) - NAMED} more")
    text = ", ".join(name.replace(" ", "\xa0") for name in shown)  # names stay whole
    text = f"{word}: {text}" if word and shown else text
    lines = textwrap.wrap(text, letters, break_long_words=False, break_on_hyphens=False)
    return [line.replace("\xa0", " ") for line in lines]
