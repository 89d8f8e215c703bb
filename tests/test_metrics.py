"""The eight metrics and the correlation-structure metrics."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter, ValidationError
from sklearn.metrics import average_precision_score, precision_recall_fscore_support

from fedharmony.errors import ConfigError, DataError
from fedharmony.metrics import (
    METRIC_NAMES,
    MetricOptions,
    MultiLabelResult,
    average_precision,
    evaluate,
    evaluate_clients,
    multilabel,
    structure_metrics,
    trivial_baselines,
)
from fedharmony.rng import numpy_rng

# Label 2 has no positive but one prediction; label 3 has positives but no prediction; one score is
# exactly 0.5.
TARGETS = np.array(
    [[1, 0, 0, 1], [0, 1, 0, 0], [1, 1, 0, 0], [0, 0, 0, 0], [1, 0, 0, 1], [0, 1, 0, 1]]
)
SCORES = np.array(
    [
        [0.90, 0.20, 0.10, 0.45],
        [0.40, 0.80, 0.30, 0.10],
        [0.60, 0.70, 0.20, 0.35],
        [0.50, 0.10, 0.10, 0.20],
        [0.20, 0.55, 0.40, 0.05],
        [0.30, 0.65, 0.60, 0.15],
    ]
)


def close(value: float) -> object:
    return pytest.approx(value, abs=5e-7)


def random_case(n: int, c: int, purpose: str, levels: int | None = None):
    """Scores that carry some signal about random targets; ``levels`` makes ties."""
    rng = numpy_rng(0, purpose)
    targets = (rng.random((n, c)) < rng.uniform(0.05, 0.5, c)).astype(np.uint8)
    scores = np.clip(0.25 * targets + 0.75 * rng.random((n, c)), 0, 1)
    if levels:
        scores = np.round(scores * levels) / levels
    return scores, targets


def assert_same_bits(a: MultiLabelResult, b: MultiLabelResult) -> None:
    for field in dataclasses.fields(MultiLabelResult):
        np.testing.assert_array_equal(getattr(a, field.name), getattr(b, field.name), field.name)


@st.composite
def cases(draw, max_images: int = 25, masked: bool = False):
    """Small problems with many ties: scores are multiples of 1/8."""
    n, c = draw(st.integers(1, max_images)), draw(st.integers(2, 5))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    levels = draw(st.sampled_from([1, 2, 4, 8]))
    scores = rng.integers(0, levels + 1, (n, c)) / levels
    targets = (rng.random((n, c)) < draw(st.sampled_from([0.05, 0.3, 0.8]))).astype(np.uint8)
    return (scores, targets, rng.random((n, c)) < 0.6) if masked else (scores, targets)


# ------------------------------------------------------------------------- worked example


def test_worked_example_ranking():
    """By hand, the precision at each positive from the top.

    Label 0: ranks 1, 2, 6 -> (1/1 + 2/2 + 3/6)/3 = 0.8333; label 1: ranks 1, 2, 3 -> 1;
    label 2: no positive; label 3: ranks 1, 4, 6 -> (1/1 + 2/4 + 3/6)/3 = 0.6667.
    """
    result = evaluate(SCORES, TARGETS)
    np.testing.assert_allclose(result.per_label_ap, [5 / 6, 1, np.nan, 2 / 3], atol=1e-12)
    assert result.map == close(0.833333)
    assert result.o_map == close(0.742771)
    assert evaluate(SCORES, TARGETS, MetricOptions(empty_class="zero")).map == close(0.625)
    assert math.isnan(evaluate(SCORES, TARGETS, MetricOptions(empty_class="nan")).map)
    assert result.n_classes_with_positives == 3
    np.testing.assert_allclose(result.prevalence, [1 / 2, 1 / 2, 0, 1 / 2])


def test_worked_example_operating_point():
    """TP = [2,3,0,0], FP = [1,1,1,0], FN = [1,0,0,3], hence P = [2/3, 3/4, 0, 0] and
    R = [2/3, 1, 0, 0]; CP = 17/48, CR = 5/12, OP = 5/8, OR = 5/9."""
    result = evaluate(SCORES, TARGETS)
    np.testing.assert_allclose(result.per_label_precision, [2 / 3, 3 / 4, 0, 0])
    np.testing.assert_allclose(result.per_label_recall, [2 / 3, 1, 0, 0])
    assert (result.cp, result.cr, result.cf1) == (close(0.354167), close(0.416667), close(0.382883))
    assert (result.op, result.or_, result.of1) == (close(0.625), close(0.555556), close(0.588235))
    assert result.n_classes_never_predicted == 1
    assert result.n_images == 6


def test_worked_example_other_conventions():
    present = evaluate(SCORES, TARGETS, MetricOptions(cr_over="present"))
    assert (present.cp, present.cr) == (close(0.472222), close(0.555556))
    mlgcn = evaluate(SCORES, TARGETS, MetricOptions(op_mode="mlgcn"))
    assert mlgcn.op == close(0.555556)  # 5 / (8 + 1): one label is never predicted
    assert mlgcn.of1 == close(0.555556)  # OR is 5/9 too
    mean_of_f1 = evaluate(SCORES, TARGETS, MetricOptions(f1_mode="mean_of_f1"))
    assert mean_of_f1.cf1 == close(0.380952)  # (2/3 + 6/7 + 0 + 0) / 4


def test_as_dict_has_the_order_of_the_paper():
    result = evaluate(SCORES, TARGETS)
    assert METRIC_NAMES == ("mAP", "O-mAP", "CP", "CR", "CF1", "OP", "OR", "OF1")
    assert tuple(result.as_dict()) == METRIC_NAMES
    assert result.as_dict()["OR"] == result.or_
    assert result.as_dict()["O-mAP"] == result.o_map


# ---------------------------------------------------------------------- against references


@settings(max_examples=60)
@given(cases())
def test_matches_scikit_learn_with_ties(case):
    scores, targets = case
    result = evaluate(scores, targets)
    for label in np.flatnonzero(targets.any(axis=0)):
        expected = average_precision_score(targets[:, label], scores[:, label])
        assert result.per_label_ap[label] == pytest.approx(expected, abs=1e-12)
    assert np.isnan(result.per_label_ap[~targets.any(axis=0)]).all()
    if targets.any():
        expected = average_precision_score(targets.ravel(), scores.ravel())
        assert result.o_map == pytest.approx(expected, abs=1e-12)
    else:
        assert math.isnan(result.o_map)

    predicted = (scores >= 0.5).astype(int)
    precision, recall, f1, _ = precision_recall_fscore_support(
        targets, predicted, average=None, zero_division=0
    )
    np.testing.assert_allclose(result.per_label_precision, precision)
    np.testing.assert_allclose(result.per_label_recall, recall)
    macro_f1 = evaluate(scores, targets, MetricOptions(f1_mode="mean_of_f1"))
    assert macro_f1.cf1 == pytest.approx(f1.mean())
    micro = precision_recall_fscore_support(targets, predicted, average="micro", zero_division=0)
    assert (result.op, result.or_, result.of1) == pytest.approx(micro[:3])
    assert (result.cp, result.cr) == pytest.approx((precision.mean(), recall.mean()))


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_matches_scikit_learn_on_a_larger_set(dtype):
    scores, targets = random_case(3000, 20, "metrics/large")
    scores = scores.astype(dtype)
    result = evaluate(scores, targets)
    assert result.map == pytest.approx(average_precision_score(targets, scores), abs=1e-12)
    micro = average_precision_score(targets, scores, average="micro")
    assert result.o_map == pytest.approx(micro, abs=1e-12)


def reference(scores, targets, known, k):
    """Plain loops over the known entries of each image and label."""
    n, c = scores.shape
    predicted = np.zeros((n, c), bool)
    for i in range(n):
        candidates = [j for j in range(c) if known[i, j]]
        best = sorted(candidates, key=lambda j: (-scores[i, j], j))[:k]
        for j in best:
            predicted[i, j] = scores[i, j] >= 0.5
    precisions, recalls = [], []
    for j in range(c):
        rows = known[:, j]
        tp = (predicted[rows, j] & (targets[rows, j] == 1)).sum()
        precisions.append(tp / max(predicted[rows, j].sum(), 1))
        recalls.append(tp / max((targets[rows, j] == 1).sum(), 1))
    tp = (predicted & (targets == 1) & known).sum()
    return (
        np.mean(precisions),
        np.mean(recalls),
        tp / max((predicted & known).sum(), 1),
        tp / max(((targets == 1) & known).sum(), 1),
    )


@settings(max_examples=60)
@given(cases(masked=True), st.sampled_from([None, 1, 2, 9]), st.sampled_from(["grouped", "stable"]))
def test_known_mask_equals_dropping_entries(case, topk, ties):
    """Also the top-k rule, on whole images when everything is known. What stands in an unknown
    place must not matter: here its score is the highest and its target is no label at all."""
    scores, targets, known = case
    scores, targets = np.where(known, scores, 1.0), np.where(known, targets, 7)
    options = MetricOptions(topk=topk, ap_ties=ties)
    result = evaluate(scores, targets, options, known)
    kept_ap = []
    for label in range(scores.shape[1]):
        rows = known[:, label]
        if (targets[rows, label] == 1).any():
            kept_ap.append(average_precision(scores[rows, label], targets[rows, label], ties=ties))
    assert result.per_label_ap[~np.isnan(result.per_label_ap)].tolist() == kept_ap
    if kept_ap:
        assert result.map == pytest.approx(np.mean(kept_ap))
        assert result.o_map == average_precision(scores[known], targets[known], ties=ties)
    expected = reference(scores, targets, known, topk if topk else scores.shape[1])
    assert (result.cp, result.cr, result.op, result.or_) == pytest.approx(expected)
    for label in range(scores.shape[1]):
        rows = known[:, label]
        share = (targets[rows, label] == 1).mean() if rows.any() else math.nan
        assert result.prevalence[label] == pytest.approx(share, nan_ok=True)


def test_everything_known_changes_nothing():
    scores, targets = random_case(200, 6, "metrics/known")
    everything = np.ones_like(targets)
    for options in (MetricOptions(), MetricOptions(topk=2), MetricOptions(ap_bins=50)):
        masked = evaluate(scores, targets, options, everything)
        assert_same_bits(evaluate(scores, targets, options), masked)


def test_blocks_do_not_change_the_result(monkeypatch):
    scores, targets = random_case(300, 7, "metrics/blocks", levels=20)
    known = numpy_rng(0, "metrics/blocks/known").random(scores.shape) < 0.7
    options = [MetricOptions(topk=3), MetricOptions(ap_bins=30), MetricOptions(ap_ties="stable")]
    whole = [evaluate(scores, targets, o, known) for o in options]
    monkeypatch.setattr(multilabel, "_ENTRIES_AT_ONCE", 11)
    for o, expected in zip(options, whole, strict=True):
        assert_same_bits(evaluate(scores, targets, o, known), expected)


def test_order_of_images_does_not_matter():
    scores, targets = random_case(150, 5, "metrics/order", levels=10)
    order = numpy_rng(0, "metrics/order/shuffle").permutation(len(scores))
    assert_same_bits(evaluate(scores, targets), evaluate(scores[order], targets[order]))


def test_ranking_metrics_ignore_threshold_and_topk():
    scores, targets = random_case(100, 5, "metrics/threshold")
    default, other = (
        evaluate(scores, targets, o)
        for o in (MetricOptions(), MetricOptions(threshold=0.8, topk=1))
    )
    assert (default.map, default.o_map) == (other.map, other.o_map)
    assert default.or_ > other.or_


# ------------------------------------------------------------------------ average precision


def test_tied_list_depends_on_order_only_when_stable():
    """Four equal scores, two positives: grouped 2/4; walking down the list between
    (1/3 + 2/4)/2 = 0.4167 (positives last) and (1/1 + 2/2)/2 = 1 (positives first)."""
    tied = [0.3] * 4
    assert average_precision(tied, [0, 0, 1, 1]) == average_precision(tied, [1, 1, 0, 0]) == 0.5
    assert average_precision(tied, [0, 0, 1, 1], ties="stable") == pytest.approx(5 / 12)
    assert average_precision(tied, [1, 1, 0, 0], ties="stable") == 1.0


def test_stable_equals_grouped_without_ties():
    scores, targets = random_case(400, 4, "metrics/stable")
    grouped, stable = (
        evaluate(scores, targets, MetricOptions(ap_ties=ties)).per_label_ap
        for ties in ("grouped", "stable")
    )
    np.testing.assert_allclose(grouped, stable, rtol=1e-13)
    assert np.ptp(grouped) > 0.05


def test_any_score_scale_ranks_alike():
    scores, targets = random_case(100, 3, "metrics/scale")
    logits = np.log(scores / (1 - scores))
    for label in range(3):
        expected = average_precision(scores[:, label], targets[:, label])
        assert average_precision(logits[:, label], targets[:, label]) == expected


def binned_reference(scores, targets, bins):
    """Precision and recall at every threshold b/(bins−1), b = 0 … bins−1, then the step sum."""
    thresholds = np.arange(bins) / (bins - 1)
    precision, recall = [], []
    for b, threshold in enumerate(thresholds):
        passed = scores > threshold if b else np.ones(len(scores), bool)
        tp = targets[passed].sum()
        precision.append(tp / max(passed.sum(), 1))
        recall.append(tp / targets.sum())
    return sum((recall[b] - recall[b + 1]) * precision[b] for b in range(bins - 1))


def test_binned_by_hand():
    """Five thresholds: 0.2 and 0.1 share the bin (0, 0.25], so the perfect ranking of the exact
    value becomes a tie; 0.25 belongs to that bin too, 0.26 does not."""
    assert average_precision([0.2, 0.1], [1, 0]) == 1.0
    assert average_precision([0.2, 0.1], [1, 0], bins=5) == 0.5
    assert average_precision([0.25, 0.1], [1, 0], bins=5) == 0.5
    assert average_precision([0.26, 0.1], [1, 0], bins=5) == 1.0
    assert average_precision([1.0, 0.0], [1, 0], bins=2) == 0.5  # a single bin: prevalence


@pytest.mark.parametrize("bins", [2, 5, 200])
def test_binned_matches_direct_formula(bins):
    scores, targets = random_case(500, 4, f"metrics/bins/{bins}")
    scores = scores**4  # under-confident: many scores in the lowest bins
    result = evaluate(scores, targets, MetricOptions(ap_bins=bins))
    for label in range(4):
        expected = binned_reference(scores[:, label], targets[:, label], bins)
        assert result.per_label_ap[label] == pytest.approx(expected, abs=1e-12)
    expected = binned_reference(scores.ravel(), targets.ravel(), bins)
    assert result.o_map == pytest.approx(expected, abs=1e-12)


def test_binning_costs_points_for_an_under_confident_model():
    """All scores below 0.05 fall into 10 of the 199 bins."""
    rng = numpy_rng(0, "metrics/under-confident")
    targets = rng.random(5000) < 0.02
    scores = 0.05 * np.clip(rng.random(5000) ** 2 + 0.45 * targets, 0, 1)
    exact, binned = (average_precision(scores, targets, bins=b) for b in (None, 200))
    assert exact - binned > 0.02


# -------------------------------------------------------------------- meaning of the numbers


def test_f1_of_means_is_not_mean_of_f1():
    """Two labels with (P, R) = (0.9, 0.1) and (0.1, 0.9): CP = CR = 0.5, so CF1 = 0.5; each
    label's own F1 is 2·0.9·0.1/1.0 = 0.18. Label 0: 90 positives, 10 predictions, 9 right.
    Label 1 mirrors it: 10 positives, 90 predictions, 9 right."""
    targets, scores = np.zeros((200, 2), int), np.zeros((200, 2))
    targets[:90, 0], scores[81:91, 0] = 1, 1.0
    targets[81:91, 1], scores[:90, 1] = 1, 1.0
    of_means = evaluate(scores, targets)
    assert of_means.per_label_precision.tolist() == [0.9, 0.1]
    assert of_means.per_label_recall.tolist() == [0.1, 0.9]
    assert of_means.cf1 == pytest.approx(0.5)
    mean_of_f1 = evaluate(scores, targets, MetricOptions(f1_mode="mean_of_f1"))
    assert mean_of_f1.cf1 == pytest.approx(0.18)
    assert mean_of_f1.of1 == of_means.of1


def test_only_one_label_predicted_reads_as_op_over_c():
    """The signature of a barely trained head (FedNova's row on VOC: OP 94.9, CP 4.7 = OP/20).
    One of 20 labels is predicted, 95 of 100 times rightly, and has 250 positives: its recall is
    0.38, so CR = 0.38/20 = 1.9 per cent; never-predicted labels count with precision 0."""
    targets, scores = np.zeros((400, 20), int), np.full((400, 20), 0.1)
    targets[:250, 14] = 1
    targets[np.arange(400), np.arange(400) % 14] = 1  # the other labels occur as well
    scores[155:255, 14] = 0.9
    result = evaluate(scores, targets)
    assert result.op == 0.95
    assert result.cp == pytest.approx(result.op / 20)
    assert result.cr == pytest.approx(0.38 / 20)
    assert result.or_ == pytest.approx(0.38 * 250 / 650)
    assert result.n_classes_never_predicted == 19
    mlgcn = evaluate(scores, targets, MetricOptions(op_mode="mlgcn"))
    assert mlgcn.op == pytest.approx(95 / (100 + 19))


def test_score_at_the_threshold_is_predicted():
    assert evaluate([[0.5]], [[1]]).or_ == 1.0
    assert evaluate([[np.nextafter(0.5, 0)]], [[1]]).or_ == 0.0
    single = np.array([[0.8]], np.float32)  # 0.8 as float32 is the threshold 0.8 for float32
    assert evaluate(single, [[1]], MetricOptions(threshold=0.8)).or_ == 1.0


def test_topk_needs_rank_and_threshold():
    """Image 0: three scores pass 0.5, the two highest stay. Image 1: two are highest, one passes.
    Image 2: a tie for the second place goes to the lower label."""
    scores = [[0.9, 0.8, 0.7, 0.1], [0.6, 0.4, 0.3, 0.2], [0.1, 0.7, 0.9, 0.7]]
    result = evaluate(scores, np.ones((3, 4), int), MetricOptions(topk=2))
    np.testing.assert_allclose(result.per_label_recall, [2 / 3, 2 / 3, 1 / 3, 0])
    assert evaluate(scores, np.ones((3, 4), int)).or_ == 7 / 12


def test_labels_that_never_occur():
    """Nothing to find: ranking is undefined, precision and recall are 0, nothing is raised."""
    for options in (MetricOptions(), MetricOptions(cr_over="present"), MetricOptions(ap_bins=10)):
        result = evaluate([[0.9, 0.1]], [[0, 0]], options)
        assert math.isnan(result.map)
        assert math.isnan(result.o_map)
        assert [result.as_dict()[n] for n in METRIC_NAMES[2:]] == [0.0] * 6
    assert evaluate([[0.9, 0.1]], [[0, 0]], MetricOptions(empty_class="zero")).map == 0.0


# ------------------------------------------------------------------------------- baselines


def test_constant_predictors_have_prevalence_as_map():
    _, targets = random_case(500, 8, "metrics/baselines")
    targets[:, 3] = 0  # a label that never occurs is skipped, not averaged in
    prevalence = targets.mean(axis=0)
    floor = trivial_baselines(targets)
    assert list(floor) == ["prevalence", "all positive", "all negative"]
    for result in floor.values():
        assert result.map == pytest.approx(prevalence[prevalence > 0].mean(), abs=1e-12)
    positive, negative = floor["all positive"], floor["all negative"]
    assert positive.o_map == pytest.approx(targets.mean())
    assert (positive.cp, positive.cr) == pytest.approx((prevalence.mean(), 7 / 8))
    assert (positive.op, positive.or_) == pytest.approx((targets.mean(), 1.0))
    assert (negative.cp, negative.cr, negative.op, negative.or_) == (0, 0, 0, 0)
    assert floor["prevalence"].o_map > positive.o_map


def test_prevalence_baseline_uses_training_prevalence_and_mask():
    """Training prevalence ranks all pairs of label 1 above those of label 0. The first group holds
    1 positive of 2, both together 3 of 4: O-mAP = (1·1/2 + 2·3/4)/3 = 2/3."""
    targets = np.array([[1, 0], [1, 1]])
    floor = trivial_baselines(targets, prevalence=torch.tensor([0.2, 0.6]))["prevalence"]
    assert floor.o_map == pytest.approx(2 / 3)
    assert floor.per_label_recall.tolist() == [0.0, 1.0]  # 0.6 passes the threshold
    masked = trivial_baselines(targets, known=np.array([[1, 1], [0, 0]]))["all positive"]
    assert (masked.map, masked.op) == (1.0, 0.5)
    with pytest.raises(DataError, match="one number per label"):
        trivial_baselines(targets, prevalence=[0.5])


# --------------------------------------------------------------------------------- clients


def test_averaging_client_maps_overstates_map():
    """2,000 images, labels on 3 % of them, at random over 50 clients: the same predictions, another
    number, because each of a client's one or two positives competes with 40 images, not 2,000."""
    rng = numpy_rng(0, "metrics/clients")
    targets = (rng.random((2000, 20)) < 0.03).astype(np.uint8)
    scores = 1 / (1 + np.exp(-(2.0 * targets - 1 + rng.standard_normal((2000, 20)))))
    order = numpy_rng(0, "metrics/clients/split").permutation(2000)
    both = evaluate_clients(scores, targets, np.array_split(order, 50))
    assert_same_bits(both.pooled, evaluate(scores, targets))
    assert len(both.per_client) == 50
    client_maps = [evaluate(scores[i], targets[i]).map for i in np.array_split(order, 50)]
    assert both.mean["mAP"] == pytest.approx(np.mean(client_maps))
    assert both.mean["mAP"] > both.pooled.map + 0.1


def test_client_mean_skips_undefined_values():
    """The second client has no positive: its mAP is undefined and the mean is the first's; its
    recall is 0 by definition and counts."""
    scores, targets = np.array([[0.9], [0.2], [0.8]]), np.array([[1], [0], [0]])
    both = evaluate_clients(scores, targets, [np.array([0, 1]), np.array([2])])
    assert both.mean["mAP"] == 1.0
    assert both.mean["OR"] == 0.5
    known = np.array([[1], [0], [1]])  # without the first client's negative
    masked = evaluate_clients(scores, 1 - targets, [np.array([0, 1]), np.array([2])], known=known)
    assert masked.mean["mAP"] == 1.0
    assert masked.pooled.n_classes_with_positives == 1
    assert masked.pooled.map == 0.5  # 0.9 is negative and ranks above the positive at 0.8
    nobody = evaluate_clients(scores, targets * 0, [np.array([0, 1, 2])])
    assert math.isnan(nobody.mean["mAP"])
    with pytest.raises(DataError, match="client 1 has none"):
        evaluate_clients(scores, targets, [np.array([0, 1]), np.array([], int)])
    with pytest.raises(DataError, match="no client was given"):
        evaluate_clients(scores, targets, [])


# ------------------------------------------------------------------------------ validation


@pytest.mark.parametrize(
    "dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str
)
def test_torch_and_numpy_agree(dtype):
    scores = torch.from_numpy(SCORES).to(dtype).requires_grad_()
    result = evaluate(scores, torch.from_numpy(TARGETS))
    assert_same_bits(result, evaluate(scores.detach().double().numpy(), TARGETS))


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_scores_are_an_error(value):
    scores = SCORES.copy()
    scores[1, 2] = scores[4, 0] = value
    with pytest.raises(DataError, match="2 of 24 scores are not finite, the first at row 1, label"):
        evaluate(scores, TARGETS)
    with pytest.raises(DataError, match="not finite"):
        structure_metrics(scores, TARGETS)


@pytest.mark.parametrize("value", [-0.001, 1.001])
def test_scores_that_are_no_probabilities_are_an_error(value):
    scores = SCORES.copy()
    scores[5, 3] = value
    with pytest.raises(DataError, match=r"\[0, 1\]; 1 of 24 do not, the first at row 5, label 3"):
        evaluate(scores, TARGETS)


def test_other_bad_input_is_an_error():
    with pytest.raises(DataError, match=r"shape \(6, 4\) and targets \(5, 4\)"):
        evaluate(SCORES, TARGETS[:5])
    with pytest.raises(DataError, match="both must be"):
        evaluate(SCORES[0], TARGETS[0])
    with pytest.raises(DataError, match="nothing to evaluate"):
        evaluate(np.zeros((0, 4)), np.zeros((0, 4)))
    targets = TARGETS.astype(float)
    targets[3, 1] = 0.5
    with pytest.raises(DataError, match="1 of 24 are not, the first at row 3, label 1"):
        evaluate(SCORES, targets)
    with pytest.raises(DataError, match="0 or 1"):
        evaluate(SCORES, TARGETS * np.nan)
    with pytest.raises(DataError, match=r"known entries has shape \(4,\)"):
        evaluate(SCORES, TARGETS, known=np.ones(4))
    with pytest.raises(DataError, match="zeros and ones"):
        evaluate(SCORES, TARGETS, known=TARGETS * 0.5)
    with pytest.raises(DataError, match="must be numbers"):
        evaluate([["high"]], [[1]])


@pytest.mark.parametrize(
    ("settings_", "message"),
    [
        ({"ap_ties": "sorted"}, "ap_ties = 'sorted' is not allowed: .*'grouped' or 'stable'"),
        ({"empty_class": "skp"}, "empty_class = 'skp' .*'skip', 'zero' or 'nan'"),
        ({"threshold": 1.5}, "less than or equal to 1"),
        ({"threshold": math.nan}, "must be finite"),
        ({"topk": 0}, "greater than or equal to 1"),
        ({"ap_bins": 1}, "greater than or equal to 2"),
    ],
)
def test_bad_options_are_an_error(settings_, message):
    with pytest.raises(ConfigError, match=message):
        MetricOptions(**settings_)


def test_options_validate_as_a_plain_dataclass():
    adapter = TypeAdapter(MetricOptions)
    assert adapter.validate_python({"ap_bins": 200, "topk": 3}) == MetricOptions(
        ap_bins=200, topk=3
    )
    with pytest.raises(ValidationError):
        adapter.validate_python({"op_mode": "other"})


# ------------------------------------------------------------------------------- structure


def test_structure_of_perfect_predictions():
    """Labels with p = (1/2, 3/4, 1/2): φ_01 = (1/2 − 3/8)/sqrt(1/4·3/16) = 1/√3,
    φ_02 = 0, φ_12 = (1/4 − 3/8)/sqrt(3/16·1/4) = −1/√3; hence mean |φ| = 2/(3√3)."""
    labels = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 1], [0, 1, 0]])
    result = structure_metrics(labels.astype(float), labels)
    root = 1 / math.sqrt(3)
    expected = [[1, root, 0], [root, 1, -root], [0, -root, 1]]
    np.testing.assert_allclose(result.true_matrix, expected, atol=1e-12)
    np.testing.assert_allclose(result.hard_matrix, expected, atol=1e-12)
    np.testing.assert_allclose(result.soft_matrix, expected, atol=1e-5)  # ε of the denominator
    assert result.n_pairs == 3
    assert result.true_mean_abs == pytest.approx(2 * root / 3)
    assert result.hard_mean_abs == pytest.approx(2 * root / 3)
    assert (result.hard_rmse, result.hard_pearson) == (0.0, pytest.approx(1.0))
    assert (result.soft_rmse, result.soft_pearson) == pytest.approx((0, 1), abs=1e-5)


def test_structure_of_timid_predictions():
    """Halving the scores above: covariances shrink by 4, p becomes (1/4, 3/8, 1/4), so
    R_01 = (1/32)/sqrt(3/16·15/64) = 0.1491 instead of 0.5774; RMSE = sqrt(2/3)·0.4283 = 0.3497,
    while the entries stay proportional (Pearson 1) and the thresholded labels stay right."""
    labels = np.array([[1, 1, 0], [1, 1, 1], [0, 0, 1], [0, 1, 0]])
    result = structure_metrics(torch.from_numpy(labels) * 0.5, torch.from_numpy(labels))
    shrunk = (1 / 32) / math.sqrt(3 / 16 * 15 / 64)
    assert result.soft_matrix[0, 1] == pytest.approx(shrunk, abs=1e-5)
    assert result.soft_rmse == pytest.approx(math.sqrt(2 / 3) * (3**-0.5 - shrunk), abs=1e-5)
    assert result.soft_mean_abs == pytest.approx(2 * shrunk / 3, abs=1e-5)
    assert result.soft_pearson == pytest.approx(1.0)
    assert result.hard_rmse == 0.0


def test_structure_matches_numpy():
    scores, targets = random_case(400, 6, "metrics/structure")
    result = structure_metrics(scores, targets, threshold=0.4)
    upper = np.triu_indices(6, 1)
    true, hard = np.corrcoef(targets.T)[upper], np.corrcoef((scores >= 0.4).T)[upper]
    p = scores.mean(axis=0)
    spread = np.sqrt(p * (1 - p))
    soft = (np.cov(scores.T, bias=True) / (np.outer(spread, spread) + 1e-6))[upper]
    for name, entries in (("soft", soft), ("hard", hard)):
        rmse = np.sqrt(np.mean((entries - true) ** 2))
        assert getattr(result, f"{name}_rmse") == pytest.approx(rmse, abs=1e-12)
        pearson = np.corrcoef(entries, true)[0, 1]
        assert getattr(result, f"{name}_pearson") == pytest.approx(pearson, abs=1e-10)
        mean_abs = np.abs(entries).mean()
        assert getattr(result, f"{name}_mean_abs") == pytest.approx(mean_abs, abs=1e-12)
    assert result.true_mean_abs == pytest.approx(np.abs(true).mean(), abs=1e-12)


def test_structure_leaves_out_labels_that_do_not_vary():
    """Labels 1 (no positive) and 4 (no negative) have no φ; predictions for them cannot matter."""
    scores, targets = random_case(60, 6, "metrics/structure/constant")
    targets[:, 1], targets[:, 4] = 0, 1
    rest = [0, 2, 3, 5]
    result, expected = (
        structure_metrics(scores, targets),
        structure_metrics(scores[:, rest], targets[:, rest]),
    )
    assert result.n_pairs == expected.n_pairs == 6
    for field in dataclasses.fields(result):
        if not field.name.endswith("_matrix"):
            value = getattr(expected, field.name)
            assert getattr(result, field.name) == pytest.approx(value, abs=1e-12)
    assert result.true_matrix[1].tolist() == [0.0] * 6


@pytest.mark.parametrize("constant", [0.0, 0.3, 1.0])
def test_structure_of_a_collapsed_model(constant):
    """Constant scores correlate with nothing: R = 0, so RMSE is the size of the true entries;
    Pearson has no value. Nothing is raised and no other number is undefined."""
    _, targets = random_case(80, 5, "metrics/structure/collapse")
    result = structure_metrics(np.full(targets.shape, constant), targets)
    entries = np.corrcoef(targets.T)[np.triu_indices(5, 1)]
    size = math.sqrt(np.mean(entries**2))
    assert (result.soft_rmse, result.hard_rmse) == pytest.approx((size, size))
    assert (result.soft_mean_abs, result.hard_mean_abs) == pytest.approx((0, 0), abs=1e-12)
    assert math.isnan(result.soft_pearson)
    assert math.isnan(result.hard_pearson)


def test_structure_without_a_pair_is_undefined():
    result = structure_metrics([[0.2, 0.9]], [[0, 1]])
    assert result.n_pairs == 0
    values = [result.soft_rmse, result.hard_rmse, result.true_mean_abs, result.soft_pearson]
    assert all(math.isnan(v) for v in values)
    assert np.isfinite(result.soft_matrix).all()


def test_structure_compares_a_pair_where_both_labels_are_known():
    """Each pair alone, cut to the images that know both, must give the same entries."""
    scores, targets = random_case(60, 4, "metrics/structure known")
    known = numpy_rng(0, "metrics/known").random(targets.shape) < 0.7
    targets = np.where(known, targets, 1)  # what an unknown entry holds does not matter
    result = structure_metrics(scores, targets, known=known)
    for c in range(4):
        for d in range(c + 1, 4):
            both = known[:, c] & known[:, d]
            alone = structure_metrics(scores[both][:, [c, d]], targets[both][:, [c, d]])
            for name in ("soft_matrix", "hard_matrix", "true_matrix"):
                pair = getattr(alone, name)[0, 1]
                assert getattr(result, name)[c, d] == pytest.approx(pair, abs=1e-9), name
    entries = [
        (a.soft_matrix[0, 1], a.hard_matrix[0, 1], a.true_matrix[0, 1])
        for c in range(4)
        for d in range(c + 1, 4)
        for both in [known[:, c] & known[:, d]]
        for a in [structure_metrics(scores[both][:, [c, d]], targets[both][:, [c, d]])]
    ]
    soft, hard, true = np.array(entries).T
    assert result.n_pairs == 6
    assert result.soft_rmse == pytest.approx(np.sqrt(np.mean((soft - true) ** 2)), abs=1e-9)
    assert result.hard_rmse == pytest.approx(np.sqrt(np.mean((hard - true) ** 2)), abs=1e-9)
    whole = structure_metrics(scores, targets, known=np.ones_like(known))
    plain = structure_metrics(scores, targets)
    assert whole.soft_rmse == pytest.approx(plain.soft_rmse, abs=1e-12)


def test_structure_leaves_out_pairs_that_are_never_known_together():
    """Labels 0 and 1 on the first half, 2 and 3 on the second: 2 pairs of 6 can be compared.

    The others are 0 on every side and would count as exact matches.
    """
    scores, targets = random_case(80, 4, "metrics/structure apart")
    known = np.zeros(targets.shape, bool)
    known[:40, :2] = known[40:, 2:] = True
    result = structure_metrics(scores, targets, known=known)
    halves = [
        structure_metrics(scores[:40, :2], targets[:40, :2]),
        structure_metrics(scores[40:, 2:], targets[40:, 2:]),
    ]
    assert result.n_pairs == 2
    for name in ("soft_rmse", "hard_rmse"):
        expected = math.sqrt(np.mean([getattr(half, name) ** 2 for half in halves]))
        assert getattr(result, name) == pytest.approx(expected, abs=1e-9)
    for name in ("soft_mean_abs", "hard_mean_abs", "true_mean_abs"):
        expected = np.mean([getattr(half, name) for half in halves])
        assert getattr(result, name) == pytest.approx(expected, abs=1e-9)


def test_structure_leaves_out_pairs_that_do_not_vary_where_both_are_known():
    """Label 1 varies, but not among the images that know label 0 as well."""
    targets = np.array([[1, 0], [0, 0], [1, 0], [0, 1]])
    known = np.array([[1, 1], [1, 1], [1, 1], [0, 1]], bool)
    assert structure_metrics(targets * 0.9, targets, known=known).n_pairs == 0
    assert structure_metrics(targets * 0.9, targets).n_pairs == 1


@pytest.mark.parametrize("f1_mode", ["of_means", "mean_of_f1"])
def test_without_a_present_label_means_over_present_labels_are_zero(f1_mode):
    options = MetricOptions(cr_over="present", f1_mode=f1_mode)
    result = evaluate([[0.9, 0.1]], [[0, 0]], options)
    assert (result.cp, result.cr, result.cf1) == (0.0, 0.0, 0.0)


def test_structure_refuses_scores_that_are_no_probabilities():
    with pytest.raises(DataError, match=r"must lie in \[0, 1\]"):
        structure_metrics([[1.5, 0.2], [0.1, 0.3]], [[1, 0], [0, 1]])
