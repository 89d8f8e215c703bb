"""The eight numbers of multi-label recognition: mAP, O-mAP, CP, CR, CF1, OP, OR, OF1.

All of them are computed **once over the whole test set**, from scores ``S`` in ``[0, 1]`` and
targets ``Y`` in ``{0, 1}``, both of shape ``(N, C)``: ``N`` images, ``C`` labels. They are never
averaged over batches or clients; :func:`evaluate_clients` shows what such an average would claim.

Published code differs in nearly every detail (ties, labels without positives, labels never
predicted, F1 of means or mean of F1, threshold). The defaults are the conventions of the FedHarmony
and FedLGT tables; :class:`MetricOptions` names the alternatives, so no difference stays hidden.

Cost: average precision needs the *sorted values* only, never a permutation of them, so the largest
temporary is one copy of the scores. 40,504 × 80 scores (COCO) take a fraction of a second. For
43,960 × 1,628 (the fine labels of FLAIR) the one list of O-mAP has 71.6 million entries, 286 MB as
float32, sorted in a few seconds; ``ap_ties="stable"`` needs the permutation as well (eight bytes
per entry), ``ap_bins`` sorts nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from annotated_types import Ge, Le
from torch import Tensor

from fedharmony.config import Checked
from fedharmony.errors import DataError
from fedharmony.types import Index

Array: TypeAlias = npt.ArrayLike | Tensor
Bools: TypeAlias = npt.NDArray[np.bool_]
Counts: TypeAlias = npt.NDArray[np.int64]
Doubles: TypeAlias = npt.NDArray[np.float64]
Scores: TypeAlias = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Ties: TypeAlias = Literal["grouped", "stable"]

#: The metrics in the order of the paper's table.
METRIC_NAMES = ("mAP", "O-mAP", "CP", "CR", "CF1", "OP", "OR", "OF1")

_ENTRIES_AT_ONCE = 1 << 22  # bounds every temporary that is wider than the scores themselves


@dataclass(frozen=True)
class MetricOptions(Checked):
    """Which convention each metric follows. The defaults are those of the published tables.

    Attributes:
        ap_ties: equal scores in average precision: ``"grouped"`` makes them one threshold
            (scikit-learn), so the order of the images cannot matter; ``"stable"`` keeps their order
            in the input, as code that sorts and then walks down the list does (ML-GCN, ASL).
        ap_bins: none is exact average precision. A number, usually 200: scores are first rounded up
            to that many equidistant thresholds on [0, 1] (the FLAIR benchmarks). Binned and exact
            values differ by several points for under-confident models.
        empty_class: what a label without positives adds to mAP: nothing (``"skip"``), a ``"zero"``,
            or it makes mAP undefined (``"nan"``).
        cr_over: CP and CR (and mean-of-F1) average over ``"all"`` labels, or over those with
            positives only (``"present"``).
        op_mode: ``"mlgcn"`` adds one to the denominator of OP for every label that is never
            predicted; ``"exact"`` does not.
        f1_mode: CF1 as the harmonic mean of CP and CR (``"of_means"``), or as the mean of the
            labels' own F1 (``"mean_of_f1"``; ASL, macro F1 of scikit-learn). OF1 is the harmonic
            mean of OP and OR in both.
        threshold: a label is predicted where its score is at least this (after the sigmoid: a
            logit threshold of 0 is 0.5 here).
        topk: with a number k, a label must also be among the image's k highest scores (equal
            scores: the lower label index first). Ranking metrics do not change.
    """

    ap_ties: Ties = "grouped"
    ap_bins: Annotated[int, Ge(2)] | None = None
    empty_class: Literal["skip", "zero", "nan"] = "skip"
    cr_over: Literal["all", "present"] = "all"
    op_mode: Literal["exact", "mlgcn"] = "exact"
    f1_mode: Literal["of_means", "mean_of_f1"] = "of_means"
    threshold: Annotated[float, Ge(0), Le(1)] = 0.5
    topk: Annotated[int, Ge(1)] | None = None


@dataclass(frozen=True, eq=False)
class MultiLabelResult:
    """The eight metrics as fractions (not per cent, not rounded), and what they are made of.

    The name O-mAP is the paper's; it is one average precision (micro), not a mean.

    Attributes:
        per_label_ap: ``(C,)``; nan for a label without positives.
        per_label_precision: ``(C,)``; 0 for a label that is never predicted.
        per_label_recall: ``(C,)``; 0 for a label without positives.
        prevalence: ``(C,)`` share of positives; nan for a label with no known entry.
        n_classes_with_positives: How many labels occur at all.
        n_classes_never_predicted: How many labels no image was given.
        n_images: Images behind the numbers.
    """

    map: float
    o_map: float
    cp: float
    cr: float
    cf1: float
    op: float
    or_: float
    of1: float
    per_label_ap: Doubles
    per_label_precision: Doubles
    per_label_recall: Doubles
    prevalence: Doubles
    n_classes_with_positives: int
    n_classes_never_predicted: int
    n_images: int

    def as_dict(self) -> dict[str, float]:
        """The eight metrics by their printed names, in :data:`METRIC_NAMES` order."""
        values = (self.map, self.o_map, self.cp, self.cr, self.cf1, self.op, self.or_, self.of1)
        return dict(zip(METRIC_NAMES, values, strict=True))


@dataclass(frozen=True, eq=False)
class ClientsResult:
    """Metrics of all clients' images together, which are reported, beside those of each client.

    ``mean`` is each metric's unweighted mean over the clients for which it is defined (nan if
    none).
    """

    pooled: MultiLabelResult
    per_client: tuple[MultiLabelResult, ...]
    mean: dict[str, float]


def average_precision(
    scores: npt.ArrayLike,
    targets: npt.ArrayLike,
    *,
    ties: Ties = "grouped",
    bins: int | None = None,
) -> float:
    """Step-wise average precision of one ranked list.

    With precision ``P_n`` and recall ``R_n`` at the n-th highest distinct score and ``R_0 = 0``:
    ``AP = Σ_n (R_n − R_{n−1}) P_n``, without interpolation. Equivalently the mean, over positives,
    of the precision among all entries that score at least as high.

    Scores are finite numbers ``(N,)`` of any scale, but in [0, 1] with ``bins``. Without a positive
    the result is nan. ``ties`` and ``bins``: see :class:`MetricOptions`; bins always group ties.

    >>> average_precision([0.9, 0.8, 0.7], [1, 0, 1])  # (1/1 + 2/3) / 2
    0.8333333333333333
    >>> average_precision([0.5, 0.5, 0.5, 0.5], [1, 0, 0, 1])  # one threshold: the share of ones
    0.5
    >>> average_precision([0.5, 0.5, 0.5, 0.5], [1, 0, 0, 1], ties="stable")  # (1/1 + 2/4) / 2
    0.75
    """
    values, positive = np.asarray(scores), np.asarray(targets, np.bool_)
    if not positive.any():
        return math.nan
    if bins is not None:
        return _binned_average_precision(values, positive, bins)
    if ties == "stable":
        return _stable_average_precision(values, positive)
    return _grouped_average_precision(values, positive)


def evaluate(
    scores: Array, targets: Array, options: MetricOptions | None = None, known: Array | None = None
) -> MultiLabelResult:
    """All eight metrics of one test set.

    With ``Ŷ = 1[S ≥ threshold]`` and per label ``P_c = TP/(TP+FP)``, ``R_c = TP/(TP+FN)``, zero
    where the denominator is zero::

        mAP = mean of AP_c over labels with positives      O-mAP = AP of all N·C pairs in one list
        CP  = (1/C) Σ P_c                                  OP    = ΣTP / Σ(TP+FP)
        CR  = (1/C) Σ R_c                                  OR    = ΣTP / Σ(TP+FN)
        CF1 = 2 CP CR / (CP + CR)                          OF1   = 2 OP OR / (OP + OR)

    Args:
        scores: ``(N, C)`` in [0, 1] (after the sigmoid), NumPy or torch. Thresholds are compared in
            the precision of the scores.
        targets: ``(N, C)`` zeros and ones; entries that are not ``known`` may hold anything.
        options: Conventions; the defaults are the ones above.
        known: ``(N, C)``; entries that are false count in no metric.

    Raises:
        DataError: A score is not finite or outside [0, 1], a known target is not binary, shapes
            differ, or there is nothing to evaluate. Non-finite scores are never replaced.

    >>> result = evaluate([[0.9, 0.2], [0.6, 0.7], [0.1, 0.8]], [[1, 0], [0, 1], [0, 1]])
    >>> [f"{name} {100 * value:.1f}" for name, value in result.as_dict().items()][:5]
    ['mAP 100.0', 'O-mAP 100.0', 'CP 75.0', 'CR 100.0', 'CF1 85.7']
    """
    options = options or MetricOptions()
    values, positive, mask = checked_arrays(scores, targets, known)
    n_images, n_labels = values.shape
    tp, n_predicted = _prediction_counts(values, positive, mask, options)
    n_positive = _count(positive)
    n_known = np.full(n_labels, n_images, np.int64) if mask is None else _count(mask)

    every = slice(None) if mask is None else mask
    pairs, hits = values[every].ravel(), positive[every].ravel()
    ap = _per_label_average_precision(values, positive, mask, options.ap_ties, options.ap_bins)
    precision, recall = _ratio(tp, n_predicted), _ratio(tp, n_positive)
    point = operating_point(tp, n_predicted, n_positive, options)
    return MultiLabelResult(
        map=float(mean_average_precision(ap, options.empty_class)),
        o_map=average_precision(pairs, hits, ties=options.ap_ties, bins=options.ap_bins),
        cp=float(point["CP"]),
        cr=float(point["CR"]),
        cf1=float(point["CF1"]),
        op=float(point["OP"]),
        or_=float(point["OR"]),
        of1=float(point["OF1"]),
        per_label_ap=ap,
        per_label_precision=precision,
        per_label_recall=recall,
        prevalence=_ratio(n_positive, n_known, undefined=np.nan),
        n_classes_with_positives=int((n_positive > 0).sum()),
        n_classes_never_predicted=int((n_predicted == 0).sum()),
        n_images=n_images,
    )


def trivial_baselines(
    targets: Array,
    options: MetricOptions | None = None,
    prevalence: Array | None = None,
    known: Array | None = None,
) -> dict[str, MultiLabelResult]:
    """What predictors that never look at the image score; they make collapsed runs visible.

    - ``"prevalence"``: every image gets each label's share of positives as its score. Normally
      the highest O-mAP of the three, because it ranks common labels above rare ones.
    - ``"all positive"``: score 1 everywhere, a constant predictor above the threshold.
    - ``"all negative"``: score 0 everywhere, a constant predictor below it.

    With grouped ties the average precision of a constant score is the label's prevalence, so all
    three share one mAP: that of a model which has learnt nothing.

    ``prevalence`` ``(C,)`` is that of the training images, for the first baseline; by default that
    of ``targets`` (an optimistic choice, since a model does not know it). The other arguments are
    those of :func:`evaluate`.

    >>> floor = trivial_baselines([[1, 0], [1, 0], [0, 1], [0, 0]])
    >>> [(name, result.map, result.cr) for name, result in floor.items()]
    [('prevalence', 0.375, 0.5), ('all positive', 0.375, 1.0), ('all negative', 0.375, 0.0)]
    """
    truth = _as_numpy(targets)
    all_positive = evaluate(np.ones(truth.shape, np.float32), truth, options, known)
    all_negative = evaluate(np.zeros(truth.shape, np.float32), truth, options, known)
    if prevalence is None:
        share: npt.NDArray[Any] = np.nan_to_num(all_positive.prevalence)
    else:
        share = _as_numpy(prevalence)
        if share.shape != truth.shape[1:]:
            raise DataError(
                f"prevalence has shape {share.shape}, the targets have {truth.shape[1]} labels. "
                "Give one number per label."
            )
    constant = np.broadcast_to(share.astype(np.float32), truth.shape)
    by_prevalence = evaluate(constant, truth, options, known)
    return {"prevalence": by_prevalence, "all positive": all_positive, "all negative": all_negative}


def evaluate_clients(
    scores: Array,
    targets: Array,
    clients: Sequence[Index],
    options: MetricOptions | None = None,
    known: Array | None = None,
) -> ClientsResult:
    """The pooled metrics, and beside them the mean of the clients' own metrics.

    The two are different quantities. Most labels have no positive in a small client, and the few
    that have compete with a handful of images: with rare labels, the mean of client mAPs is far
    higher than the mAP of the same predictions. Report the pooled number; the mean describes the
    experience of a single client. ``clients`` are the indices of each client's images, at least one
    each; the other arguments are those of :func:`evaluate`.

    >>> scores, targets = [[0.9], [0.8], [0.7], [0.1]], [[1], [0], [1], [0]]
    >>> both = evaluate_clients(scores, targets, [np.array([0, 1]), np.array([2, 3])])
    >>> both.pooled.map, both.mean["mAP"]  # (1/1 + 2/3) / 2, and (1 + 1) / 2
    (0.8333333333333333, 1.0)
    """
    values, truth, mask = checked_arrays(scores, targets, known)
    empty = [client for client, images in enumerate(clients) if len(images) == 0]
    if empty or not clients:
        what = f"client {empty[0]} has none" if empty else "no client was given"
        raise DataError(
            f"Evaluation by client needs at least one image of every client, but {what}. "
            "Leave clients without test images out."
        )

    def of(images: Index) -> MultiLabelResult:
        shown = None if mask is None else mask[images]
        return evaluate(values[images], truth[images], options, shown)

    per_client = tuple(of(images) for images in clients)
    return beside(of(np.concatenate(list(clients))), per_client)


def beside(pooled: MultiLabelResult, per_client: Sequence[MultiLabelResult]) -> ClientsResult:
    """Pooled metrics beside those of each client, and their mean."""
    mean = {}
    for name in METRIC_NAMES:
        column = np.array([result.as_dict()[name] for result in per_client])
        mean[name] = float(_mean_of(column, ~np.isnan(column), empty=math.nan))
    return ClientsResult(pooled, tuple(per_client), mean)


# ---------------------------------------------------------------------------- average precision


def _grouped_average_precision(scores: Scores, positive: Bools) -> float:
    """Mean over positives of (positives scoring at least as high) / (entries scoring so).

    Both counts are read off sorted values; nothing has to be permuted.
    """
    hits = np.sort(scores[positive])
    entries = np.sort(scores)
    n_hits = hits.size - np.searchsorted(hits, hits, side="left")
    n_entries = entries.size - np.searchsorted(entries, hits, side="left")
    return float(np.mean(n_hits / n_entries))


def _stable_average_precision(scores: Scores, positive: Bools) -> float:
    """Mean over positives of the precision at their rank; equal scores keep their order."""
    ranks = np.flatnonzero(positive[np.argsort(-scores, kind="stable")]) + 1
    return float(np.mean(np.arange(1, ranks.size + 1) / ranks))


def _binned_average_precision(scores: Scores, positive: Bools, bins: int) -> float:
    """Average precision over the thresholds ``b/(bins−1)``; an entry passes where it lies above."""
    n_hits, n_entries = np.zeros(bins - 1, np.int64), np.zeros(bins - 1, np.int64)
    for start in range(0, scores.size, _ENTRIES_AT_ONCE):
        part = slice(start, start + _ENTRIES_AT_ONCE)
        bin_of = score_bins(scores[part], bins)
        n_entries += np.bincount(bin_of, minlength=bins - 1)
        n_hits += np.bincount(bin_of[positive[part]], minlength=bins - 1)
    hits_above, entries_above = np.cumsum(n_hits[::-1]), np.cumsum(n_entries[::-1])
    return float(n_hits[::-1] @ _ratio(hits_above, entries_above) / hits_above[-1])


def score_bins(scores: Scores, bins: int) -> Counts:
    """Bin ``b`` holds the scores in ``(b/(bins−1), (b+1)/(bins−1)]``; a score of 0 joins bin 0."""
    scaled = np.ceil(scores.astype(np.float64) * (bins - 1))
    return np.maximum(scaled.astype(np.int64) - 1, 0)


def _per_label_average_precision(
    scores: Scores, positive: Bools, known: Bools | None, ties: Ties, bins: int | None
) -> Doubles:
    n_images, n_labels = scores.shape
    result = np.full(n_labels, np.nan)
    width = max(1, _ENTRIES_AT_ONCE // n_images)
    occurring = np.flatnonzero(positive.any(axis=0))
    for start in range(0, occurring.size, width):
        labels = occurring[start : start + width]
        # Columns become rows once per block: sorting strided columns one by one is far slower.
        score_rows, positive_rows = scores[:, labels].T.copy(), positive[:, labels].T.copy()
        known_rows = None if known is None else known[:, labels].T.copy()
        for row, label in enumerate(labels):
            kept = slice(None) if known_rows is None else known_rows[row]
            result[label] = average_precision(
                score_rows[row][kept], positive_rows[row][kept], ties=ties, bins=bins
            )
    return result


def mean_average_precision(ap: Doubles, empty: Literal["skip", "zero", "nan"]) -> Doubles:
    """The mean over labels, the last axis; nan marks labels without positives."""
    if empty == "zero":
        ap = np.nan_to_num(ap)
    counted = np.ones(ap.shape, np.bool_) if empty == "nan" else ~np.isnan(ap)
    return _mean_of(ap, counted, empty=math.nan)


# ------------------------------------------------------------------------------ operating point


def _prediction_counts(
    scores: Scores, positive: Bools, known: Bools | None, options: MetricOptions
) -> tuple[Counts, Counts]:
    """True positives and predictions of every label."""
    n_images, n_labels = scores.shape
    tp, n_predicted = np.zeros(n_labels, np.int64), np.zeros(n_labels, np.int64)
    height = max(1, _ENTRIES_AT_ONCE // n_labels)
    for start in range(0, n_images, height):
        rows = slice(start, start + height)
        chosen = predicted(scores[rows], None if known is None else known[rows], options)
        n_predicted += _count(chosen)
        tp += _count(chosen & positive[rows])
    return tp, n_predicted


def operating_point(
    tp: Counts | Doubles,
    n_predicted: Counts | Doubles,
    n_positive: Counts | Doubles,
    options: MetricOptions,
) -> dict[str, Doubles]:
    """CP, CR, CF1, OP, OR and OF1 from the counts of every label, the last axis.

    Other axes count the same labels in other sets of images, or with other weights.
    """
    counted = n_positive > 0 if options.cr_over == "present" else np.ones(tp.shape, np.bool_)
    cp = _mean_of(_ratio(tp, n_predicted), counted, empty=0.0)
    cr = _mean_of(_ratio(tp, n_positive), counted, empty=0.0)
    if options.f1_mode == "of_means":
        cf1 = _harmonic_mean(cp, cr)
    else:
        cf1 = _mean_of(_ratio(2 * tp, n_predicted + n_positive), counted, empty=0.0)
    hits, predictions = tp.sum(axis=-1), n_predicted.sum(axis=-1)
    if options.op_mode == "mlgcn":
        predictions = predictions + (n_predicted == 0).sum(axis=-1)
    op, or_ = _ratio(hits, predictions), _ratio(hits, n_positive.sum(axis=-1))
    return {"CP": cp, "CR": cr, "CF1": cf1, "OP": op, "OR": or_, "OF1": _harmonic_mean(op, or_)}


def predicted(scores: Scores, known: Bools | None, options: MetricOptions) -> Bools:
    """Where a label is predicted: never where it is not known."""
    chosen: Bools = scores >= options.threshold
    if known is not None:
        chosen &= known
    if options.topk is not None:
        # An unknown entry must not take the place of a known one.
        contenders = scores if known is None else np.where(known, scores, -1.0)
        best = np.argsort(-contenders, axis=1, kind="stable")[:, : options.topk]
        among_best = np.zeros_like(chosen)
        np.put_along_axis(among_best, best, True, axis=1)
        chosen &= among_best
    return chosen


def _count(mask: Bools) -> Counts:
    counts: Counts = np.count_nonzero(mask, axis=0).astype(np.int64)
    return counts


def _ratio(
    numerator: Counts | Doubles, denominator: Counts | Doubles, undefined: float = 0.0
) -> Doubles:
    result = np.full(numerator.shape, undefined)
    np.divide(numerator, denominator, out=result, where=denominator > 0)
    return result


def _mean_of(values: Doubles, counted: Bools, *, empty: float) -> Doubles:
    """The mean of the counted values along the last axis."""
    total = np.where(counted, values, 0.0).sum(axis=-1)
    return _ratio(total, counted.sum(axis=-1), undefined=empty)


def _harmonic_mean(a: Doubles, b: Doubles) -> Doubles:
    return _ratio(2 * a * b, a + b)


# ---------------------------------------------------------------------------------- validation


def checked_arrays(
    scores: Array, targets: Array, known: Array | None
) -> tuple[Scores, Bools, Bools | None]:
    """Scores, positives (false where unknown) and the mask, or an error that says what is wrong."""
    values = _as_scores(scores)
    truth = _as_numpy(targets)
    if values.ndim != 2 or values.shape != truth.shape:
        raise DataError(
            f"Scores have shape {values.shape} and targets {truth.shape}; both must be (images, "
            "labels) and equal."
        )
    if values.size == 0:
        raise DataError(f"There is nothing to evaluate: the scores have shape {values.shape}.")
    _check_scores(values)
    mask = None if known is None else _as_mask(known, values.shape)
    binary = _is_binary(truth)
    if mask is not None:
        binary |= ~mask
    if not binary.all():
        place = _place(~binary)
        raise DataError(
            f"Targets must be 0 or 1; {int((~binary).sum())} of {truth.size} are not, the first at "
            f"{place}. Mark entries without a label as not known instead of giving them a value."
        )
    positive: Bools = truth == 1
    return values, positive if mask is None else positive & mask, mask


def _check_scores(scores: Scores) -> None:
    finite = np.isfinite(scores)
    if not finite.all():
        raise DataError(
            f"{int((~finite).sum())} of {scores.size} scores are not finite, the first at "
            f"{_place(~finite)}. The model has diverged or its input is damaged; lower "
            "the learning rate, or look at that image. Such scores are never replaced by numbers."
        )
    if not (scores.min() >= 0 and scores.max() <= 1):
        outside = (scores < 0) | (scores > 1)
        raise DataError(
            f"Scores must lie in [0, 1]; {int(outside.sum())} of {scores.size} do not, the first "
            f"at {_place(outside)}. Apply the sigmoid to logits before evaluating."
        )


def _place(bad: Bools) -> str:
    row, label = np.unravel_index(int(np.argmax(bad)), bad.shape)
    return f"row {row}, label {label}"


def _as_mask(known: Array, shape: tuple[int, ...]) -> Bools:
    mask = _as_numpy(known)
    if mask.shape != shape:
        raise DataError(f"The mask of known entries has shape {mask.shape}, the scores {shape}.")
    if not _is_binary(mask).all():
        raise DataError("The mask of known entries must hold booleans, or zeros and ones.")
    return mask.astype(np.bool_)


def _is_binary(values: npt.NDArray[Any]) -> Bools:
    result: Bools = (values == 0) | (values == 1)
    return result


def _as_numpy(values: Array) -> npt.NDArray[Any]:
    if isinstance(values, Tensor):
        tensor = values.detach().cpu()
        return (tensor.float() if tensor.dtype == torch.bfloat16 else tensor).numpy()
    return np.asarray(values)


def _as_scores(values: Array) -> Scores:
    """As float32 or float64; half precision widens, integers become float64."""
    array = _as_numpy(values)
    if array.dtype.kind not in "biuf":
        raise DataError(f"Scores must be numbers, got an array of {array.dtype}.")
    if array.dtype in (np.float16, np.float32):
        return array.astype(np.float32, copy=False)
    return array.astype(np.float64, copy=False)
