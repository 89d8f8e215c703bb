"""Data that a Python program holds in its memory: arrays or tensors of inputs and labels.

Images are uint8 (N, H, W, 3) or (N, 3, H, W), or grey (N, H, W); feature vectors are floats (N, F).
Labels are (N, C) zeros and ones, with NaN or −1 where a label is unknown. Everything is checked
here, so that what is wrong is said in the words of the caller.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fedharmony.data.base import DataSet, LabelledImages, Source, TensorImages, datasets
from fedharmony.data.features import FARTHEST, labelled
from fedharmony.data.table import UNKNOWN, held_out
from fedharmony.errors import DataError, some
from fedharmony.types import Index, Labels

#: What decides which images are held out.
SEED = 0
#: The owner of an image that no client holds.
NOBODY = -1


@datasets.register("arrays")
class Arrays(Source):
    """Arrays that a Python program gave to fedharmony.train or fedharmony.compare."""

    def load(self) -> DataSet:
        """Refuse: nobody but the program that made them has them."""
        raise DataError(
            "The data of this run were arrays in a Python program, which are not kept. To go on "
            "with it, call fedharmony.train again with the same arrays, settings and out=FOLDER. "
            "Predictions and reports do not need them."
        )


def array_of(given: Any, what: str) -> npt.NDArray[Any]:
    """A tensor, array or list as an array."""
    if isinstance(given, torch.Tensor):
        tensor = given.detach().cpu()
        given = (tensor.double() if tensor.is_floating_point() else tensor).numpy()
    try:
        return np.asarray(given)
    except (ValueError, TypeError) as error:
        raise DataError(f"The {what} are no array: {error}.") from None


def columns_of(given: Any) -> tuple[str, ...]:
    """The names of a data frame's columns; none of anything else."""
    return tuple(map(str, getattr(given, "columns", ())))


def in_order(given: Any, names: Sequence[str], what: str) -> Any:
    """A data frame's columns as the names say; what has no names stays as it is."""
    own = columns_of(given)
    if not own or not names or own == tuple(names):
        return given
    if sorted(own) != sorted(names):
        odd = some(sorted({*own} ^ {*names})) or "one of them twice"
        raise DataError(
            f"The columns of the {what} are not those of the training data, {some(list(names))}: "
            f"they differ in {odd}. Name them alike, or give an array without names."
        )
    return array_of(given, what)[:, [own.index(name) for name in names]]


def refuse_other_rows(*several: Any) -> None:
    """Refuse data frames and series that name their rows differently."""
    indices = [getattr(one, "index", None) for one in several]  # of a list it is a method
    rows = [list(index) for index in indices if index is not None and not callable(index)]
    if any(other != rows[0] for other in rows[1:]):
        raise DataError(
            "Images, labels and clients have other row indices, or the same in another order. "
            "Align them (labels.loc[images.index]); or call reset_index(drop=True) on each, if "
            "they belong together as they stand."
        )


def inputs_of(given: Any) -> TensorImages:
    """Images or feature vectors.

    >>> inputs_of(np.zeros((2, 8, 6, 3), np.uint8)).shape, inputs_of([[0.5, 1.0]]).shape
    ((3, 8, 6), (2,))
    """
    array = array_of(given, "images")
    if array.ndim == 2 and array.dtype.kind in "fiub":
        with np.errstate(over="ignore"):
            array = array.astype(np.float32)
        if array.size == 0 or not np.isfinite(array).all():
            raise DataError(
                "The feature vectors are empty, or some of their numbers are missing or not "
                "finite. Fill them in first."
            )
        return TensorImages(torch.from_numpy(array))
    if array.dtype != np.uint8 or array.ndim not in (3, 4):
        hint = ""
        if array.ndim == 4 and array.dtype.kind == "f":
            hint = " Numbers from 0 to 1 become such images by (255 * images).astype('uint8')."
        raise DataError(
            "Images must be uint8 of shape (N, height, width, 3), (N, 3, height, width) or, if "
            "grey, (N, height, width), and feature vectors numbers of shape (N, width); got "
            f"{array.dtype} of shape {array.shape}.{hint}"
        )
    if array.ndim == 3:
        array = np.repeat(array[:, None], 3, axis=1)
    elif array.shape[3] == 3:
        array = array.transpose(0, 3, 1, 2)
    elif array.shape[1] != 3:
        raise DataError(
            f"Images must have three channels, first or last; got shape {array.shape}. Grey images "
            "are given without a channel: (N, height, width)."
        )
    if array.size == 0:
        raise DataError(f"There are no images: the array has shape {array.shape}.")
    return TensorImages(torch.from_numpy(np.ascontiguousarray(array)))


def labels_of(given: Any) -> Labels:
    """Labels as 0, 1 and :data:`UNKNOWN`.

    >>> labels_of([[1, 0], [float("nan"), -1]]).tolist()
    [[1, 0], [2, 2]]
    """
    array = array_of(given, "labels")
    if array.ndim != 2 or array.dtype.kind not in "fiub" or not array.size:
        raise DataError(
            "Labels must be numbers of shape (images, labels): 1 where an image has a label, 0 "
            f"where it has not, NaN or -1 where that is unknown; got {array.dtype} of shape "
            f"{array.shape}."
        )
    values = array.astype(np.float64)
    unknown = np.isnan(values) | (values == -1)
    if not np.isin(values[~unknown], (0, 1)).all():
        row, column = np.argwhere(~unknown & ~np.isin(values, (0, 1)))[0]
        raise DataError(
            "Labels must be 0 or 1, or NaN or -1 where they are unknown; label "
            f"{column} of image {row} is {values[row, column]:g}."
        )
    return np.where(unknown, UNKNOWN, values).astype(np.uint8)


def names_of(given: Sequence[str] | None, labels: Any, count: int) -> tuple[str, ...]:
    """Label names: as given, of the columns of a data frame, or else "label 0", "label 1", …."""
    if given is None:
        given = getattr(labels, "columns", None)
    if given is None:
        return tuple(f"label {i}" for i in range(count))
    names = tuple(map(str, given))
    if len(names) != count or len(set(names)) != count:
        raise DataError(
            f"There are {count} labels, so classes must be as many different names; got "
            f"{len(names)}, {len(set(names))} of them different."
        )
    return names


def owners_of(clients: Any, count: int) -> npt.NDArray[Any]:
    """The client of every image, from one owner per image or one list of images per client.

    An image that nobody holds has the owner −1.

    >>> owners_of([[0, 2], [1]], 3), owners_of(["ann", "bob", "ann"], 3)
    (array([0, 1, 0]), array(['ann', 'bob', 'ann'], dtype='<U3'))
    """
    parts = list(clients) if isinstance(clients, list | tuple) else []
    if not parts or not all(np.ndim(part) == 1 for part in parts):
        owners = array_of(clients, "clients")
        told = parts or owners.tolist()
        if missing := [i for i, own in enumerate(told) if _is_missing(own)]:
            raise DataError(
                f"The client of image {missing[0]} is missing, as of {len(missing):,} of "
                f"{len(told):,} images. Fill it in, or leave these images out."
            )
        owners = owners.astype(str) if owners.dtype.kind == "O" else owners
        if owners.shape != (count,) or owners.dtype.kind not in "iuUS":
            raise DataError(
                "Clients must be a number of clients, one list of images per client, or the owner "
                f"(text or whole number) of each of the {count:,} images; got {owners.dtype} of "
                f"shape {owners.shape}."
            )
        return owners
    owners = np.full(count, NOBODY)
    for client, part in enumerate(parts):
        index = array_of(part, "clients")
        if (
            not len(index)
            or index.dtype.kind not in "iu"
            or index.min() < 0
            or index.max() >= count
        ):
            raise DataError(
                f"Client {client} must hold at least one image, each named by its number from 0 to "
                f"{count - 1}."
            )
        if len(np.unique(index)) < len(index) or (owners[index] != NOBODY).any():
            raise DataError(f"Client {client} holds an image twice, or one of another client.")
        owners[index] = client
    return owners


def _is_missing(owner: Any) -> bool:
    """Whether it is empty text, None, NaN, or what pandas has in their place."""
    return owner == "" if isinstance(owner, str) else str(owner) in ("None", "nan", "<NA>", "NaT")


def data_set(
    images: Any,
    labels: Any,
    test: float | tuple[Any, Any],
    classes: Sequence[str] | None = None,
    clients: Any = None,
) -> DataSet:
    """A data set of arrays; ``test`` are images and labels to test on, or the share held out.

    An image that none of the ``clients`` holds is not used; None: not said who holds which. Columns
    of data frames are put in order by their names, and rows have to be named alike.
    """
    refuse_other_rows(images, labels, clients)
    if classes is not None and sorted(columns_of(labels)) == sorted(map(str, classes)):
        labels = in_order(labels, tuple(map(str, classes)), "labels")
    features = columns_of(images)
    pool, told = _matching(images, labels)
    names = names_of(classes, labels, told.shape[1])
    owners = None if clients is None else owners_of(clients, len(told))
    rows = np.arange(len(told)) if owners is None else np.flatnonzero(owners != NOBODY)
    if isinstance(test, float | int):
        if not 0 < test < 1:
            raise DataError(f"test = {test} must be a share between 0 and 1, or (images, labels).")
        kept, held = held_out([f"{i:012d}" for i in rows], float(test), SEED)
        train, tested = (_part(pool, told, owners, rows[some]) for some in (kept, held))
        return DataSet("arrays", names, train, tested, features=features)
    try:
        others, truth = test
    except (TypeError, ValueError):
        raise DataError("test must be a share between 0 and 1, or (images, labels).") from None
    refuse_other_rows(others, truth)
    truth = in_order(truth, names if columns_of(labels) else (), "test labels")
    test_images, truth = _matching(in_order(others, features, "test images"), truth)
    if test_images.shape != pool.shape or truth.shape[1] != told.shape[1]:
        raise DataError(
            f"Training images of shape {pool.shape} with {told.shape[1]} labels do not fit test "
            f"images of shape {test_images.shape} with {truth.shape[1]}."
        )
    train = _part(pool, told, owners, rows)
    tested = _part(test_images, truth, None, np.arange(len(truth)))
    return DataSet("arrays", names, train, tested, features=features)


def _matching(images: Any, labels: Any) -> tuple[TensorImages, Labels]:
    """Inputs and their labels, one row each."""
    inputs, told = inputs_of(images), labels_of(labels)
    if len(inputs) != len(told):
        raise DataError(f"There are {len(inputs):,} images but {len(told):,} rows of labels.")
    if len(inputs.shape) == 1:
        _refuse_coarse(array_of(images, "images").astype(np.float64))
    return inputs, told


def _refuse_coarse(values: npt.NDArray[np.float64]) -> None:
    """Refuse features so far from zero that 32 bits can hardly tell their values apart."""
    mean, std = values.mean(0), values.std(0)
    far = (np.abs(mean) > FARTHEST * std) & (values.max(0) > values.min(0))
    if far.any():
        i = int(np.argmax(far))
        raise DataError(
            f"Column {i} of the feature vectors has mean {mean[i]:g} and standard deviation "
            f"{std[i]:g}; in 32 bits its values can hardly be told apart. Subtract the mean."
        )


def _part(
    inputs: TensorImages, labels: Labels, owners: npt.NDArray[Any] | None, rows: Index
) -> LabelledImages:
    """Some rows as a part of a data set."""
    chosen, ids = TensorImages(inputs.pixels[torch.from_numpy(rows)]), map(str, rows.tolist())
    users = None if owners is None else owners[rows]
    return labelled(chosen, labels[rows], tuple(ids), users)
