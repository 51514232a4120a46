"""Predicted gaps against known laws, and honesty about what two points cannot say."""

import numpy as np
import pytest

from nagnet.errors import UserError
from nagnet.training.extrapolation import Extrapolation, Pair, extrapolate, pair_of_summary

WALKTHROUGH = (1e18, 0.038), (3e18, 0.016)
MEASURED = 0.0086  # at 3e19


def ends(result: Extrapolation) -> tuple[float, float]:
    assert result.interval is not None
    return result.interval


def test_the_walkthroughs_small_pairs_predict_its_large_one():
    result = extrapolate([Pair(*pair) for pair in WALKTHROUGH], 3e19)
    assert 0.002 <= result.gap <= 0.010
    assert result.model == "power law" and result.exponent == pytest.approx(np.log(0.038 / 0.016) / np.log(3))
    assert result.interval is None
    assert any("no interval" in note for note in result.notes)
    assert any("cannot tell how wrong the model" in note for note in result.notes)
    noisy = extrapolate([Pair(*pair, standard_error=0.004) for pair in WALKTHROUGH], 3e19)
    assert noisy.gap == pytest.approx(result.gap)
    low, high = ends(noisy)
    assert low < result.gap < MEASURED < high < 0.02


@pytest.mark.parametrize("sign", [1, -1])
def test_a_power_law_is_found_whatever_its_sign(sign):
    pairs = [Pair(budget, sign * 5.0 * budget**-0.3, 1e-6) for budget in (1e12, 4e12, 1e13)]
    result = extrapolate(pairs, 1e15)
    assert result.gap == pytest.approx(sign * 5.0 * 1e15**-0.3)
    assert result.exponent == pytest.approx(0.3)
    low, high = ends(result)
    assert low < result.gap < high
    assert result.fitted == pytest.approx([pair.gap for pair in pairs])


def test_gaps_of_both_signs_lie_on_a_line_in_log_c():
    result = extrapolate([Pair(np.e**3, 0.02), Pair(np.e**5, -0.01)], np.e**6)
    assert result.model == "linear in log C"
    assert result.exponent == pytest.approx(-0.015)
    assert result.gap == pytest.approx(-0.025)


def test_the_interval_covers_the_truth_as_often_as_it_says():
    """A line in log C with errors known: then the estimate is linear in the gaps and coverage is exact."""
    random = np.random.default_rng(0)
    budgets, error = (1e12, 1e13), 0.01
    truth = [0.05, -0.05]
    covered = []
    for _ in range(200):
        pairs = [Pair(c, gap + error * random.normal(), error) for c, gap in zip(budgets, truth, strict=True)]
        low, high = ends(extrapolate(pairs, 1e14, confidence=0.8))
        covered.append(low <= -0.15 <= high)
    assert np.mean(covered) == pytest.approx(0.8, abs=0.08)


def test_few_seeds_widen_the_interval():
    def width(n_seeds):
        low, high = ends(extrapolate([Pair(c, gap, 0.001, n_seeds) for c, gap in WALKTHROUGH], 3e19))
        return high - low

    assert width(3) > 1.5 * width(None)


def test_precise_pairs_weigh_more():
    pairs = [Pair(1e12, 0.1, 0.01), Pair(1e13, 0.2, 0.0001), Pair(1e14, -0.3, 0.0001)]
    assert extrapolate(pairs, 1e15).gap == pytest.approx(-0.8, abs=1e-3)
    assert any("standard errors" in note for note in extrapolate(pairs, 1e15).notes)


def test_noise_that_turns_a_sign_is_reported():
    result = extrapolate([Pair(1e12, 0.02, 0.02), Pair(3e12, 0.01, 0.01)], 1e13)
    low, high = ends(result)
    assert low < 0 < high
    assert any("turned the sign" in note for note in result.notes)


def summary(**changes):
    row = {"arm_a": "norm_agnostic", "arm_b": "pre_norm", "by_seed": [0.01, 0.02, 0.03]}
    return {"recipe": "ladder-5", "budget": {"flops": 2e12}, "differences": [row]} | changes


def test_a_summary_gives_mean_and_error_of_its_seeds():
    pair = pair_of_summary(summary())
    assert (pair.budget, pair.n_seeds) == (2e12, 3)
    assert pair.gap == pytest.approx(0.02) and pair.standard_error == pytest.approx(0.01 / 3**0.5)


@pytest.mark.parametrize(
    ("changed", "arm", "message"),
    [
        ({"differences": []}, None, "choose by --arm"),
        ({"differences": [{"arm_a": "a", "by_seed": [1, 2]}, {"arm_a": "b", "by_seed": [1, 2]}]}, None, "a, b"),
        ({}, "post_norm", "no difference of post_norm"),
        ({"differences": [{"arm_a": "a", "by_seed": [0.1]}]}, None, "1 seed"),
        ({"differences": [{"arm_a": "a", "by_seed": [0.1, None]}]}, "a", "1 seed"),
    ],
)
def test_a_summary_without_a_pair_is_refused(changed, arm, message):
    with pytest.raises(UserError, match=message):
        pair_of_summary(summary(**changed), arm)


@pytest.mark.parametrize(
    ("pairs", "budget", "message"),
    [
        ([], 1e13, "two or more budgets"),
        ([Pair(1e12, 0.1), Pair(1e12, 0.2)], 1e13, "two or more budgets"),
        ([Pair(1e12, 0.1), Pair(2e12, 0.2)], 0.0, "above 0"),
    ],
)
def test_impossible_predictions_are_refused(pairs, budget, message):
    with pytest.raises(UserError, match=message):
        extrapolate(pairs, budget)


@pytest.mark.parametrize("values", [(0.0, 0.1), (1e12, float("nan")), (1e12, 0.1, -1.0)])
def test_impossible_pairs_are_refused(values):
    with pytest.raises(UserError):
        Pair(*values)
