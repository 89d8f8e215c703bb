"""What the files of a run look like, as far as reports read them.

Anybody may have edited, cut or swapped those files. A field of another shape is refused, with its
place, before the page is made. Fields that are not named here are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy.typing as npt
from annotated_types import Ge, Le
from pydantic import ConfigDict, StringConstraints, TypeAdapter, ValidationError, with_config
from typing_extensions import TypedDict  # pydantic wants this one before Python 3.12

from fedharmony.errors import CheckpointError

Number: TypeAlias = int | float | None
Numbers: TypeAlias = dict[str, Number] | None
#: Counts of rounds, clients, images and labels: more would be a forged or damaged file.
Count: TypeAlias = Annotated[int, Ge(0), Le(100_000_000)]
Client: TypeAlias = Annotated[str, StringConstraints(pattern=r"^\d{1,8}$")]

_as_it_is = with_config(ConfigDict(strict=True, extra="allow"))


@_as_it_is
class _LabelRow(TypedDict, total=False):
    ap: Number
    precision: Number
    recall: Number
    positives: Count | None


@_as_it_is
class _UserRow(TypedDict, total=False):
    user: str
    images: Count


@_as_it_is
class _Users(TypedDict, total=False):
    each: list[_UserRow]


@_as_it_is
class _Thresholds(TypedDict, total=False):
    per_label: list[float]


@_as_it_is
class _Results(TypedDict, total=False):
    metrics: Numbers
    structure: Numbers
    baselines: dict[str, Numbers] | None
    per_label: list[_LabelRow] | None
    rounds: Count
    rounds_done: Count | None
    metric_options: dict[str, Any]
    per_user: _Users | None
    thresholds: _Thresholds | None
    n_classes_with_positives: Count | None
    n_classes_never_predicted: Count | None


@_as_it_is
class _Start(TypedDict, total=False):
    rounds: Count
    clients: Count | None
    client_names: list[str] | None
    cohort: Count | None
    train_images: Count | None
    test_images: Count | None
    parameters: Annotated[int, Ge(0)] | None
    classes: list[str] | None
    resumed_at: Count | None


@_as_it_is
class _LeftOut(TypedDict, total=False):
    client: Count
    name: str
    cause: str


@_as_it_is
class _Round(TypedDict, total=False):
    round: Count
    cohort: list[Count]
    reported: list[Count]
    left_out: list[_LeftOut]
    fallbacks: dict[str, Count]
    weights: dict[Client, Number] | None
    log: dict[str, Any] | None


@_as_it_is
class _Evaluate(TypedDict, total=False):
    round: Count
    metrics: Numbers
    structure: Numbers


@_as_it_is
class _PlannedRun(TypedDict, total=False):
    label: str
    seed: int | None
    folder: str


@_as_it_is
class _Comparison(TypedDict, total=False):
    methods: list[str] | None
    against: str | None
    runs: list[_PlannedRun] | None


@_as_it_is
class _SweptPoint(TypedDict):
    values: dict[str, str]
    folder: str


@_as_it_is
class _Sweep(TypedDict):
    config: str
    settings: list[str]
    points: list[_SweptPoint]


RESULTS, COMPARISON, SWEEP = TypeAdapter(_Results), TypeAdapter(_Comparison), TypeAdapter(_Sweep)
EVENTS: Mapping[str, TypeAdapter[Any]] = {
    "start": TypeAdapter(_Start),
    "round": TypeAdapter(_Round),
    "evaluate": TypeAdapter(_Evaluate),
}
#: Matrices over pairs of labels, and what marks labels or pairs of them.
PAIRS = ("true", "learned", "learned_hard", "planted", "consensus")
MARKS = ("true_defined", "consensus_known")


def refuse_misshapen(path: Path, content: Mapping[str, Any], shape: TypeAdapter[Any]) -> None:
    """Refuse the content of a JSON file that no run has written so."""
    try:
        shape.validate_python(content)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(
            f"{path} was not written by fedharmony, or has been changed: {where}: {first['msg']}. "
            "Restore the file, or delete it if the run is over (the report then uses the event log "
            "alone)."
        ) from None


def well_shaped(event: Mapping[str, Any]) -> bool:
    """Whether an event can be one that a run has written."""
    shape = EVENTS.get(str(event["event"]))
    if shape is None:
        return True
    try:
        shape.validate_python(event)
    except ValidationError:
        return False
    return True


def refuse_odd_matrices(path: Path, matrices: Mapping[str, npt.NDArray[Any]], classes: int) -> None:
    """Refuse matrices whose sizes contradict each other, or that are of more than the classes."""
    shapes = {name: matrix.shape for name, matrix in matrices.items()}
    labels = next((shapes[name][0] for name in PAIRS if shapes.get(name)), 0)
    square = (labels, labels)
    odd = [name for name in PAIRS if shapes.get(name, square) != square]
    odd += [name for name in MARKS if shapes.get(name, square) not in (square, (labels,))]
    odd += [name for name in ("clusters",) if shapes.get(name, (labels,)) != (labels,)]
    odd += [name for name in ("client_sizes",) if len(shapes.get(name, (0,))) != 1]
    shares = shapes.get("client_label_shares", (0, labels))
    if len(shares) != 2 or (labels and shares[1] != labels):
        odd.append("client_label_shares")
    if "labels" in matrices:
        chosen = matrices["labels"]
        inside = chosen.shape == (labels,) and bool(((chosen >= 0) & (chosen < classes)).all())
        odd += [] if inside else ["labels"]
    if odd:
        raise CheckpointError(
            f"{path} was not written by fedharmony, or has been changed: {odd[0]!r} has the shape "
            f"{shapes[odd[0]]}, but there are {labels} labels. Delete it to report on the run "
            "without its matrices."
        )
