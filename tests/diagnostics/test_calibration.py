import math

import numpy as np
import pytest

from nagnet.diagnostics.calibration import coverage, judge, loss_by_scale, reliability
from nagnet.diagnostics.confidence import Predictions
from nagnet.errors import UserError
from nagnet.evaluation.statistics import area_under_roc, area_under_roc_interval


def test_calibrated_probabilities_have_no_error():
    probability = np.repeat([0.25, 0.75], 400)
    correct = np.concatenate([np.arange(400) % 4 == 0, np.arange(400) % 4 != 0])
    found = reliability(probability, correct, bins=10)
    assert found.calibration_error == pytest.approx(0.0, abs=1e-12)
    assert found.accuracy[2] == 0.25 and found.accuracy[7] == 0.75
    assert found.n_tokens.tolist() == [0, 0, 400, 0, 0, 0, 0, 400, 0, 0]
    assert np.isnan(found.probability[0])


def test_calibration_error_is_the_mean_distance():
    found = reliability([1.0, 1.0, 1.0, 0.6], [1, 0, 0, 1], bins=5)
    assert found.calibration_error == pytest.approx((3 * (1 - 1 / 3) + 0.4) / 4)


@pytest.mark.parametrize("wrong", [math.nan, -0.1, 1.1])
def test_what_is_no_probability_is_refused(wrong):
    with pytest.raises(UserError, match="between 0 and 1"):
        reliability([0.5, wrong], [1, 0])


def test_coverage_of_a_perfect_and_of_no_signal():
    correct = np.arange(100) < 30
    perfect = coverage(-np.arange(100), correct)
    assert perfect.share[-1] == 1.0
    assert perfect.accuracy[perfect.share <= 0.3].tolist() == [1.0] * 30
    assert perfect.accuracy[-1] == pytest.approx(0.3)
    constant = coverage(np.ones(100), correct)
    assert constant.accuracy == pytest.approx(np.full(100, 0.3))


def test_coverage_of_one_token():
    found = coverage([2.0], [True])
    assert (found.share.tolist(), found.accuracy.tolist()) == ([1.0], [1.0])


def test_judgement_of_perfectly_ranked_confidence():
    n = 60
    correct = np.arange(n) >= 30
    values = Predictions(
        scale=np.arange(1.0, n + 1),
        entropy=np.full(n, 2.0),
        max_probability=np.linspace(0.1, 0.9, n),
        loss=np.linspace(3.0, 0.1, n),
        correct=correct,
        row=np.arange(n) % 6,
        scale_in_logits=True,
    )
    found = judge(values)
    assert found.area["scale"].area == 1.0
    assert (found.area["scale"].low, found.area["scale"].high) == (1.0, 1.0)
    assert found.area["negative_entropy"].area == 0.5  # all equal: mid-ranks
    assert found.spearman_loss["scale"] == pytest.approx(-1.0)
    assert math.isnan(found.spearman_loss["negative_entropy"])
    assert found.n_rows == 6


def test_tokens_by_scale_and_loss_are_counted_where_they_lie():
    found = loss_by_scale(np.exp([0.0, 0.0, 0.4, 1.0]), [4.0, 2.0, 3.0, 0.0], bins=2)
    assert found.log_norm == pytest.approx([0.0, 0.5, 1.0])
    assert found.loss == pytest.approx([0.0, 2.0, 4.0])
    assert found.n_tokens.tolist() == [[0, 3], [1, 0]]
    assert found.mean_loss == pytest.approx([3.0, 0.0])


def test_equal_scales_and_a_model_that_is_always_right_have_a_place():
    found = loss_by_scale([2.0, 2.0, 2.0], [0.0, 0.0, 0.0], bins=4)
    assert found.n_tokens.sum() == 3
    assert np.nanmax(found.mean_loss) == 0.0 and np.isnan(found.mean_loss).sum() == 3
    assert found.log_norm[0] < math.log(2.0) < found.log_norm[-1]


@pytest.mark.parametrize(
    ("scale", "loss"), [([1.0, math.nan], [1.0, 1.0]), ([1.0, 0.0], [1.0, 1.0]), ([1.0, 1.0], [1.0, math.inf])]
)
def test_scale_and_loss_without_a_place_are_refused(scale, loss):
    with pytest.raises(UserError, match="diverged"):
        loss_by_scale(scale, loss)


def test_interval_of_area_holds_what_resampling_by_hand_gives():
    random = np.random.default_rng(3)
    groups = np.repeat(np.arange(20), 15)
    labels = random.random(300) < 0.4
    scores = np.round(labels + random.normal(size=300) + random.normal(size=20)[groups], 1)  # with ties
    found = area_under_roc_interval(scores, labels, groups, n_resamples=200, seed=5)
    draws = np.random.default_rng(5)
    by_hand = []
    for _ in range(200):
        chosen = draws.integers(20, size=20)
        items = np.concatenate([np.flatnonzero(groups == group) for group in chosen])
        by_hand.append(area_under_roc(scores[items], labels[items]))
    assert found.area == area_under_roc(scores, labels)
    assert (found.low, found.high) == pytest.approx(tuple(np.quantile(by_hand, [0.025, 0.975])), abs=1e-12)


@pytest.mark.parametrize(("labels", "groups"), [([1, 1, 1], [0, 1, 2]), ([1, 0, 1], [7, 7, 7])])
def test_interval_without_two_classes_or_groups_is_nan(labels, groups):
    found = area_under_roc_interval([1.0, 2.0, 3.0], labels, groups)
    assert math.isnan(found.low) and math.isnan(found.high)


def test_one_group_per_item():
    with pytest.raises(UserError, match="one group per item"):
        area_under_roc_interval([1.0, 2.0], [1, 0], [0])
