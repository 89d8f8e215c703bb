"""The commands that use a trained model: predict and export."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedharmony.cli_options import bar, usable
from fedharmony.terminal import say

if TYPE_CHECKING:
    from fedharmony.experiments.predict import Prediction, Rule

#: Images that cannot be read: so many are named.
NAMED = 20
#: Characters of a table's first column.
WIDEST = 60

RunArgument = Annotated[
    Path, typer.Argument(metavar="RUN", callback=usable, help="The folder of a finished run.")
]
Device = Annotated[
    str, typer.Option(help="cpu, cuda, cuda:1, …; by default CUDA where there is one.")
]


def predict(
    run: RunArgument,
    images: Annotated[
        list[Path],
        typer.Argument(
            metavar="IMAGES...",
            callback=usable,
            help="Images, folders (with all below them) and tables of paths (CSV, Parquet); for a "
            "run on features, files of features.",
        ),
    ],
    csv: Annotated[
        Path | None,
        typer.Option(callback=usable, help="Write labels and all scores to this new file."),
    ] = None,
    top: Annotated[
        int | None,
        typer.Option(help="Give each image its K best labels; with --threshold, K at most."),
    ] = None,
    threshold: Annotated[
        str | None,
        typer.Option(
            help="A label is given where its score reaches this number; `run` (the default) takes "
            "the thresholds that the run chose, or its metrics.threshold."
        ),
    ] = None,
    column: Annotated[
        str,
        typer.Option(help="The column of paths in tables; else image, path, file."),
    ] = "",
    device: Device = "auto",
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bar.")] = False,
) -> None:
    """Label new images with the model of a finished run.

    Example: `fedharmony predict runs/demo-fedharmony-seed0 photos/ --csv labels.csv`

    Needs the run folder alone, not the data it was trained on. Images that cannot be read are named
    and left out; the exit code is then 1.
    """
    from fedharmony.experiments.folder import RunFolder
    from fedharmony.experiments.predict import (
        csv_header,
        csv_row,
        predictions,
        refuse_existing,
        rule_of,
        writing,
    )
    from fedharmony.experiments.trained import load_model

    if csv is not None:
        refuse_existing(csv)
    model = load_model(RunFolder(run), device)
    rule = rule_of(model, threshold, top)
    stream = predictions(model, images, column)
    unread: list[Prediction] = []
    if csv is None:
        with bar("predicting", quiet) as shown:
            found = list(shown.track(stream, total=len(stream)))
        for line in table_of(found, rule, model.classes):
            say(line)
        unread = [prediction for prediction in found if prediction.scores is None]
    else:
        with writing(csv) as write, bar("predicting", quiet) as shown:
            write(csv_header(model.classes))
            for prediction in shown.track(stream, total=len(stream)):
                write(csv_row(prediction, model.classes, rule))
                unread += [prediction] if prediction.scores is None else []
        say(f"{len(stream) - len(unread):,} of {len(stream):,} labelled: {csv}")
    for prediction in unread[:NAMED]:
        say(f"{prediction.name} cannot be read: {prediction.trouble}.", err=True)
    if len(unread) > NAMED:
        say(f"{len(unread) - NAMED:,} more cannot be read.", err=True)
    if unread:
        raise typer.Exit(1)


def export(
    run: RunArgument,
    to: Annotated[Path, typer.Option("--to", callback=usable, help="A new folder for the model.")],
    onnx: Annotated[
        bool, typer.Option("--onnx", help="Write model.onnx, too (extra `onnx`).")
    ] = False,
) -> None:
    """Write the model of a finished run for other programs: weights, config.json, a model card.

    Example: `fedharmony export runs/demo-fedharmony-seed0 --to model --onnx`

    Weights have timm's names where timm has such a model. What is written was compared with the
    run's own scores.
    """
    from fedharmony.experiments.export import export as write
    from fedharmony.experiments.folder import RunFolder
    from fedharmony.experiments.trained import load_model

    for file in write(load_model(RunFolder(run), "cpu"), to, onnx):
        say(file)


def table_of(found: Sequence[Prediction], rule: Rule, classes: Sequence[str]) -> Iterator[str]:
    """Images and their labels with scores, as lines of a table; what cannot be read is left out."""
    width = min(max(len(prediction.name) for prediction in found), WIDEST)
    for prediction in found:
        if (scores := prediction.scores) is not None:
            labels = [f"{classes[i]} {scores[i]:.2f}" for i in rule.labels(scores)]
            yield f"{prediction.name:<{width}}  {', '.join(labels) or 'no label'}"
