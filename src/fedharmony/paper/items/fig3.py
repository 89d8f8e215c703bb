"""Fig. 3: images with the predictions of the methods."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from fedharmony.experiments.scores import load_scores
from fedharmony.paper.item import BASE, OURS, Found, Item, Shown, items
from fedharmony.paper.published import LOOKS, NAMES, RANDOM_TEXT
from fedharmony.paper.scale import Part, Study
from fedharmony.paper.verdict import Gap, decide
from fedharmony.report.grid import Grid, spread
from fedharmony.report.load import RunView
from fedharmony.report.measures import decide as decisions
from fedharmony.report.panel import Section, count
from fedharmony.report.panels.examples import ExampleImages


@items.register("fig3")
class Fig3(Item):
    """Images, and what each method says of them."""

    place = 70
    shows_images = True
    title = "Fig. 3: images and predictions"
    claim = (
        "FedAvg often gives labels that are not there or misses some that are; FedHarmony gives "
        "fewer wrong ones and recovers missing ones. (A few chosen images; no numbers.)"
    )
    rule = (
        "Counted over all test images: reproduced if FedHarmony has fewer wrong and fewer missed "
        "labels than FedAvg, both with an interval of the difference that excludes 0. Not "
        "reproduced if it has more of one of them, with such an interval. Student's, 95 %, over "
        "seeds."
    )

    def parts(self, study: Study) -> Sequence[Part]:
        """All methods of Table 1."""
        return [study.base(tuple(NAMES))]

    def show(self, found: Found) -> Shown:
        """Images chosen by the same rule for all methods, and counts over all images."""
        (part,) = self.parts(found.study)
        counts = {m: [errors(run) for run in found.group(part, m)] for m in part.methods}
        table = Grid(
            f"Labels per 100 test images, {found.study.title}",
            ("method", "wrong", "missed"),
            tuple(
                (NAMES[m], spread([w for w, _ in of]), spread([s for _, s in of]))
                for m, of in counts.items()
            ),
            f"Over {count(part.seeds, 'seed')}. {RANDOM_TEXT} The paper shows chosen images and "
            "counts nothing.",
        )
        wrong, missed = (
            Gap.of([a[i] - b[i] for a, b in zip(counts[OURS], counts[BASE], strict=True)])
            for i in (0, 1)
        )
        drawn = ExampleImages().draw(found.runs(part))
        lead = "No image was kept." if drawn is None else drawn.lead
        keys = () if drawn is None else tuple((NAMES[m], LOOKS[m]) for m in part.methods)
        pictures = () if drawn is None else tuple(replace(p, keys=keys) for p in drawn.pictures)
        why = (
            f"per 100 test images FedHarmony and FedAvg differ by {wrong} wrong and {missed} "
            "missed labels."
        )
        yes = wrong.below(0) and missed.below(0)
        section = Section(self.title, lead, pictures, keys, grids=(table,))
        verdict = decide(yes, wrong.above(0) or missed.above(0), why, self.rule)
        return Shown((section,), verdict)


def errors(run: RunView) -> tuple[float, float]:
    """Wrong and missed labels per 100 test images."""
    scores = load_scores(run.folder)
    made, images = decisions(scores, run.thresholds), len(scores.ids)
    return 100 * float(made.wrong.sum()) / images, 100 * float(made.missed.sum()) / images
