"""How well the model serves each user of the test set."""

from __future__ import annotations

import statistics
from collections.abc import Mapping

from fedharmony.report import svg
from fedharmony.report.charts import Picture, percent_axes
from fedharmony.report.load import Runs
from fedharmony.report.measures import worst_decile
from fedharmony.report.panel import Panel, Section, legend, panels, styles

#: Users that are named.
WORST = 5


def worst_users(by_user: Mapping[str, float]) -> str:
    """The users served worst by name, with their O-mAP.

    >>> worst_users({"ann": 0.5, "bob": 0.25})
    'bob 25.0, ann 50.0'
    """
    worst = sorted(by_user.items(), key=lambda item: item[1])[:WORST]
    return ", ".join(f"{svg.printable(user, 18)} {100 * value:.1f}" for user, value in worst)


@panels.register("users")
class Users(Panel):
    """O-mAP of each test user, sorted; mean, median and worst tenth."""

    place = 46

    def draw(self, runs: Runs) -> Section | None:
        """One line per method, from the user served worst to the one served best."""
        found = {
            name: dict(sorted(run.per_user.items(), key=lambda item: item[1]))
            for name, group in runs.groups.items()
            if (run := next((r for r in group if r.per_user), None)) is not None
        }
        if not found:
            return None
        looks, facts = styles(runs), []
        drawing, up, across = percent_axes("users, % of all")
        ends = [(across(10), up.end), (across(10), up.start)]
        drawing.line(ends, svg.MUTED, 1, svg.DOTTED.dashes)
        for name, by_user in found.items():
            values = list(by_user.values())
            last = max(len(values) - 1, 1)
            points = [(across(100 * i / last), up(100 * v)) for i, v in enumerate(values)]
            drawing.line(points, looks[name].colour, 1.6, looks[name].dashes)
            drawing.mark(*points[len(points) // 2], looks[name])
            of = "" if runs.alone else f", {name}"
            for words, value in (
                ("mean", statistics.fmean(values)),
                ("median", statistics.median(values)),
                ("worst tenth, mean", worst_decile(values)),
            ):
                facts.append((words + of, f"{100 * value:.1f} %"))
            facts.append((f"worst {min(WORST, len(values))}{of}", worst_users(by_user)))
        users = len(next(iter(found.values())))
        lead = (
            f"O-mAP of each of {users:,} test users by itself, the worst on the left. The dotted "
            "line ends the worst tenth; marks stand at the median. Small users are "
            "easily far from the mean by chance."
        )
        picture = Picture("O-mAP by user, %", drawing.svg("O-mAP of each user, sorted"))
        return Section("Users", lead, (picture,), legend(runs, found), facts=tuple(facts))
