"""Bootstrap, intervals over seeds, area under ROC and rank correlation on cases small enough to do by hand."""

import math

import numpy as np
import pytest

from nagnet.errors import UserError
from nagnet.evaluation.bits_per_byte import DocumentScores
from nagnet.evaluation.statistics import (
    area_under_roc,
    paired_bootstrap_bits_per_byte,
    seed_interval,
    spearman,
    t_quantile,
)

LN2 = math.log(2)


def scores(bits, n_bytes, names=None) -> DocumentScores:
    names = names or [str(i) for i in range(len(bits))]
    return DocumentScores(
        tuple(names), np.array(bits, dtype=float) * LN2, np.array(n_bytes), np.array(n_bytes, dtype=np.int64)
    )


def test_a_constant_difference_has_no_width():
    n_bytes = [10, 1000, 77]
    a = scores([20, 2000, 154], n_bytes)
    b = scores([15, 1500, 115.5], n_bytes)
    result = paired_bootstrap_bits_per_byte(a, b, n_resamples=100)
    assert result.difference == pytest.approx(0.5)
    assert result.low == pytest.approx(0.5)
    assert result.high == pytest.approx(0.5)
    assert (result.n_documents, result.confidence) == (3, 0.95)


def test_two_documents_give_the_three_possible_values():
    """Differences 0 and 1 bit per byte over 100 and 300 bytes: 0, 300/400 or 1, with odds 1:2:1."""
    a, b = scores([100, 600], [100, 300]), scores([100, 300], [100, 300])
    result = paired_bootstrap_bits_per_byte(a, b, n_resamples=4000, confidence=0.9)
    assert result.difference == pytest.approx(0.75)
    assert (result.low, result.high) == (pytest.approx(0.0), pytest.approx(1.0))
    middle = paired_bootstrap_bits_per_byte(a, b, n_resamples=4000, confidence=0.4)
    assert (middle.low, middle.high) == (pytest.approx(0.75), pytest.approx(0.75))


def test_the_interval_has_the_width_of_the_normal_approximation():
    random = np.random.default_rng(0)
    n = 400
    shared = random.normal(300, 100, n)
    differences = random.normal(1.0, 5.0, n)
    a, b = scores(shared + differences, [100] * n), scores(shared, [100] * n)
    result = paired_bootstrap_bits_per_byte(a, b, seed=1)
    standard_error = differences.std() / math.sqrt(n) / 100
    assert result.difference == pytest.approx(differences.mean() / 100)
    assert result.low == pytest.approx(result.difference - 1.96 * standard_error, abs=0.2 * standard_error)
    assert result.high == pytest.approx(result.difference + 1.96 * standard_error, abs=0.2 * standard_error)
    swapped = paired_bootstrap_bits_per_byte(b, a, seed=1)
    assert swapped.difference == pytest.approx(-result.difference)
    assert swapped.low == pytest.approx(-result.high)


def test_bootstrap_is_deterministic_in_chunks_of_any_size(monkeypatch):
    random = np.random.default_rng(2)
    a, b = scores(random.normal(size=50), [10] * 50), scores(random.normal(size=50), [10] * 50)
    first = paired_bootstrap_bits_per_byte(a, b, n_resamples=501, seed=4)
    assert first == paired_bootstrap_bits_per_byte(a, b, n_resamples=501, seed=4)
    assert first != paired_bootstrap_bits_per_byte(a, b, n_resamples=501, seed=5)
    monkeypatch.setattr("nagnet.evaluation.statistics._MAX_DRAWS", 140)
    chunked = paired_bootstrap_bits_per_byte(a, b, n_resamples=501, seed=4)
    assert (chunked.low, chunked.high) == (pytest.approx(first.low), pytest.approx(first.high))


def test_only_the_same_documents_in_the_same_order_can_be_compared():
    a = scores([1, 2], [10, 20], ["x", "y"])
    for other in (
        scores([2, 1], [20, 10], ["y", "x"]),
        scores([1, 2], [10, 20], ["y", "x"]),
        scores([1, 2], [10, 21], ["x", "y"]),
        scores([1, 2, 3], [10, 20, 30]),
    ):
        with pytest.raises(UserError, match="different documents"):
            paired_bootstrap_bits_per_byte(a, other)
    with pytest.raises(UserError, match="at least 2"):
        paired_bootstrap_bits_per_byte(scores([1], [10]), scores([1], [10]))
    with pytest.raises(UserError, match="confidence 95"):
        paired_bootstrap_bits_per_byte(a, a, confidence=95)


@pytest.mark.parametrize(
    ("confidence", "degrees", "expected"),
    [
        (0.5, 1, 1.0),
        (0.95, 1, 12.7062047),
        (0.95, 2, 4.30265273),
        (0.95, 3, 3.18244631),
        (0.95, 4, 2.77644511),
        (0.95, 5, 2.57058184),
        (0.99, 9, 3.24983554),
        (0.95, 30, 2.04227246),
        (0.95, 1000, 1.96233908),
    ],
)
def test_quantiles_of_t_are_those_of_the_tables(confidence, degrees, expected):
    assert t_quantile(confidence, degrees) == pytest.approx(expected, rel=1e-7)


def test_the_interval_over_three_seeds_by_hand():
    """Mean 2, standard deviation 1, so 2 +- 4.3027 / sqrt(3)."""
    result = seed_interval([1.0, 2.0, 3.0])
    assert (result.mean, result.n_seeds, result.confidence) == (2.0, 3, 0.95)
    assert result.standard_error == pytest.approx(1 / math.sqrt(3))
    assert result.high - 2.0 == pytest.approx(4.30265273 / math.sqrt(3))
    assert 2.0 - result.low == pytest.approx(4.30265273 / math.sqrt(3))


def test_the_interval_over_seeds_covers_the_mean_as_often_as_it_says():
    random = np.random.default_rng(0)
    intervals = [seed_interval(random.normal(0.3, 2.0, 3).tolist(), 0.9) for _ in range(2000)]
    covered = np.mean([interval.low <= 0.3 <= interval.high for interval in intervals])
    assert covered == pytest.approx(0.9, abs=0.02)


def test_one_seed_has_no_interval():
    with pytest.raises(UserError, match="at least 2 seeds"):
        seed_interval([0.1])
    with pytest.raises(UserError, match="confidence 95"):
        seed_interval([0.1, 0.2], confidence=95)


@pytest.mark.parametrize(
    ("values", "labels", "expected"),
    [
        ([1, 2, 3, 4], [0, 0, 1, 1], 1.0),
        ([1, 2, 3, 4], [1, 1, 0, 0], 0.0),
        ([1, 3, 2, 4], [0, 0, 1, 1], 0.75),
        ([7, 7, 7, 7, 7], [0, 1, 0, 1, 1], 0.5),
        ([1, 2, 2, 3], [0, 0, 1, 1], 0.875),
        ([1, 2, 3], [1, 1, 1], math.nan),
        ([1, 2, 3], [False, False, False], math.nan),
        ([], [], math.nan),
        ([1, math.nan], [0, 1], math.nan),
    ],
)
def test_area_under_roc(values, labels, expected):
    assert area_under_roc(values, labels) == pytest.approx(expected, nan_ok=True)


def test_area_under_roc_counts_pairs():
    random = np.random.default_rng(0)
    values, labels = random.integers(0, 6, 60), random.integers(0, 2, 60)
    pairs = [(x > y) + 0.5 * (x == y) for x in values[labels == 1] for y in values[labels == 0]]
    assert area_under_roc(values, labels) == pytest.approx(np.mean(pairs))


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1, 2, 3], [10, 100, 1000], 1.0),
        ([1, 2, 3], [-1, -2, -30], -1.0),
        ([1, 2, 3, 4, 5], [2, 1, 4, 3, 5], 0.8),
        ([1, 1, 2], [1, 2, 3], math.sqrt(3) / 2),
        ([1, 1, 1], [1, 2, 3], math.nan),
        ([1], [1], math.nan),
        ([1, math.nan], [1, 2], math.nan),
    ],
)
def test_spearman(a, b, expected):
    assert spearman(a, b) == pytest.approx(expected, nan_ok=True)


def test_lengths_must_match():
    for function in (area_under_roc, spearman):
        with pytest.raises(UserError, match="3 and 2"):
            function([1, 2, 3], [0, 1])
