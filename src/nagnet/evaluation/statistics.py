"""Intervals of paired differences over documents and over seeds, area under ROC, and rank correlation."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from nagnet.errors import UserError
from nagnet.evaluation.bits_per_byte import DocumentScores

_MAX_DRAWS = 2_000_000  # draws held in memory at once


@dataclass(frozen=True)
class BootstrapResult:
    """A difference with its percentile interval.

    Attributes:
        difference: Bits per byte of a minus that of b on all documents; negative where a is better.
        low: Lower end of the interval.
        high: Upper end of the interval.
        n_documents: Number of documents resampled.
        confidence: Coverage of the interval, for example 0.95.
    """

    difference: float
    low: float
    high: float
    n_documents: int
    confidence: float


def paired_bootstrap_bits_per_byte(
    scores_a: DocumentScores,
    scores_b: DocumentScores,
    n_resamples: int = 2000,
    seed: int = 0,
    confidence: float = 0.95,
) -> BootstrapResult:
    """Bootstrap the difference of two models in bits per byte over the documents both scored.

    Documents are resampled, not tokens, since the tokens of one document are not independent. The interval
    covers the choice of documents only, not the training seed.

    Args:
        scores_a: Scores of one model.
        scores_b: Scores of the other on the same documents in the same order; its tokenizer may differ.
        n_resamples: Number of resamples.
        seed: Seed of the resampling.
        confidence: Coverage of the interval, between 0 and 1.

    Returns:
        The difference a - b and its percentile interval.

    Raises:
        UserError: If the documents differ, there are fewer than two, or a number is out of range.
    """
    if scores_a.names != scores_b.names or not np.array_equal(scores_a.n_bytes, scores_b.n_bytes):
        raise UserError(
            f"the two models scored different documents ({len(scores_a.names)} and {len(scores_b.names)}, or "
            "other names, order or bytes); evaluate both on the same documents"
        )
    n = len(scores_a.names)
    if n < 2:
        raise UserError(f"a bootstrap over {n} document says nothing; evaluate on at least 2 documents")
    if n_resamples < 1 or not 0 < confidence < 1:
        raise UserError(f"n_resamples {n_resamples} must be at least 1 and confidence {confidence} between 0 and 1")
    bits = (scores_a.nats - scores_b.nats) / math.log(2)
    n_bytes = scores_a.n_bytes
    random = np.random.default_rng(seed)
    rows_at_once = max(1, _MAX_DRAWS // n)
    differences = np.empty(n_resamples)
    for start in range(0, n_resamples, rows_at_once):
        stop = min(start + rows_at_once, n_resamples)
        drawn = random.integers(n, size=(stop - start, n))
        differences[start:stop] = bits[drawn].sum(axis=1) / n_bytes[drawn].sum(axis=1)
    tail = (1 - confidence) / 2
    low, high = np.quantile(differences, [tail, 1 - tail])
    return BootstrapResult(float(bits.sum() / n_bytes.sum()), float(low), float(high), n, confidence)


@dataclass(frozen=True)
class SeedInterval:
    """The mean of paired differences, one for each training seed, with Student's t interval.

    Attributes:
        mean: of the differences. standard_error: of the mean.
        low, high: ends of the interval.
        n_seeds: number of differences. confidence: coverage, for example 0.95.
    """

    mean: float
    standard_error: float
    low: float
    high: float
    n_seeds: int
    confidence: float


def seed_interval(differences: Sequence[float], confidence: float = 0.95) -> SeedInterval:
    """Mean and t interval of paired differences between two arms, one difference a seed.

    The interval covers the training seed: initial parameters and order of batches. It takes the differences for draws
    from one normal distribution; with two seeds it is very wide, since the spread itself is hardly known.

    Args:
        differences: of the two arms at each seed.
        confidence: coverage, between 0 and 1.

    Raises:
        UserError: for fewer than two seeds, or a confidence out of range.
    """
    n = len(differences)
    if n < 2:
        raise UserError(f"an interval over {n} seed says nothing; train at least 2 seeds")
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / math.sqrt(n)
    half = t_quantile(confidence, n - 1) * error
    return SeedInterval(mean, error, mean - half, mean + half, n, confidence)


def t_quantile(confidence: float, degrees: int) -> float:
    """The t with ``P(|T| <= t) = confidence`` for Student's distribution with so many degrees of freedom.

    Raises:
        UserError: if the confidence is not between 0 and 1, or there is no degree of freedom.
    """
    if degrees < 1 or not 0 < confidence < 1:
        raise UserError(f"degrees of freedom {degrees} must be at least 1 and confidence {confidence} between 0 and 1")
    low, high = 0.0, 1.0
    while _central_t_probability(high, degrees) < confidence:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _central_t_probability(middle, degrees) < confidence else (low, middle)
    return high


def _central_t_probability(t: float, degrees: int) -> float:
    """P(|T| <= t), by the finite series in the angle atan(t / sqrt(degrees)) (Abramowitz and Stegun 26.7.3 and 4)."""
    angle = math.atan(t / math.sqrt(degrees))
    sine, cosine = math.sin(angle), math.cos(angle)
    odd = degrees % 2
    term = cosine if odd else 1.0
    total = term if degrees > 1 else 0.0
    for k in range(2 + odd, degrees - 1, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    return 2 / math.pi * (angle + sine * total) if odd else sine * total


def area_under_roc(scores: ArrayLike, labels: ArrayLike) -> float:
    """Probability that a positive scores above a negative, ties counting one half.

    Args:
        scores: Any real numbers, ``[n]``.
        labels: True or 1 for positives, ``[n]``.

    Returns:
        0 to 1, 0.5 where all scores are equal; NaN if one class is absent or a score is NaN.

    Raises:
        UserError: If the lengths differ.
    """
    values, positive = _same_length(scores, labels)
    positive = positive.astype(bool)
    n_positive = int(positive.sum())
    n_negative = len(values) - n_positive
    if n_positive == 0 or n_negative == 0 or np.isnan(values).any():
        return math.nan
    rank_sum = _mid_ranks(values)[positive].sum()
    return float((rank_sum - n_positive * (n_positive + 1) / 2) / (n_positive * n_negative))


@dataclass(frozen=True)
class RocInterval:
    """Area under ROC with its percentile interval over resampled groups; NaN where a class is absent."""

    area: float
    low: float
    high: float
    n_groups: int
    confidence: float


def area_under_roc_interval(
    scores: ArrayLike,
    labels: ArrayLike,
    groups: ArrayLike,
    n_resamples: int = 1000,
    seed: int = 0,
    confidence: float = 0.95,
) -> RocInterval:
    """Area under ROC with a bootstrap interval over groups, since items of one group are not independent.

    Args:
        scores, labels: as for `area_under_roc`.
        groups: what each item belongs to, such as its document, ``[n]``.
        n_resamples: resamples; those without both classes are left out.
        seed: of the resampling. confidence: coverage, between 0 and 1.

    Raises:
        UserError: if the lengths differ or a number is out of range.
    """
    values, positive = _same_length(scores, labels)
    _, group = np.unique(np.asarray(groups).ravel(), return_inverse=True)
    if len(group) != len(values):
        raise UserError(f"there are {len(values)} scores and {len(group)} groups; give one group per item")
    if n_resamples < 1 or not 0 < confidence < 1:
        raise UserError(f"n_resamples {n_resamples} must be at least 1 and confidence {confidence} between 0 and 1")
    area = area_under_roc(values, positive)
    n_groups = int(group.max(initial=-1)) + 1
    if math.isnan(area) or n_groups < 2:
        return RocInterval(area, math.nan, math.nan, n_groups, confidence)
    # One sort serves all resamples: an item drawn k times is an item of weight k, and ties share their rank.
    order = np.argsort(values, kind="stable")
    group, hit = group[order], positive[order].astype(np.float64)
    starts = np.flatnonzero(np.diff(values[order], prepend=np.nan) != 0)
    random = np.random.default_rng(seed)
    areas = np.empty(n_resamples)
    for draw in range(n_resamples):
        weight = np.bincount(random.integers(n_groups, size=n_groups), minlength=n_groups)[group]
        positives, negatives = np.add.reduceat(np.stack([weight * hit, weight * (1 - hit)]), starts, axis=1)
        below = np.cumsum(negatives) - negatives
        pairs = positives.sum() * negatives.sum()
        areas[draw] = (positives * (below + negatives / 2)).sum() / pairs if pairs else np.nan
    tail = (1 - confidence) / 2
    low, high = np.nanquantile(areas, [tail, 1 - tail]) if np.isfinite(areas).any() else (math.nan, math.nan)
    return RocInterval(area, float(low), float(high), n_groups, confidence)


def spearman(a: ArrayLike, b: ArrayLike) -> float:
    """Spearman rank correlation with mid-ranks for ties.

    Args:
        a: Any real numbers, ``[n]``.
        b: Any real numbers, ``[n]``.

    Returns:
        -1 to 1; NaN if one side is constant or holds a NaN, or n < 2.

    Raises:
        UserError: If the lengths differ.
    """
    first, second = _same_length(a, b)
    if len(first) < 2 or np.isnan(first).any() or np.isnan(second).any():
        return math.nan
    x, y = _mid_ranks(first), _mid_ranks(second)
    x, y = x - x.mean(), y - y.mean()
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale > 0 else math.nan


def _same_length(a: ArrayLike, b: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    """Return both as flat float64 arrays."""
    first, second = np.asarray(a, dtype=np.float64).ravel(), np.asarray(b, dtype=np.float64).ravel()
    if len(first) != len(second):
        raise UserError(f"the two lists have {len(first)} and {len(second)} values; give one pair per item")
    return first, second


def _mid_ranks(values: np.ndarray) -> np.ndarray:
    """Ranks from 1; equal values share the mean of their ranks."""
    _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
    return (np.cumsum(counts) - (counts - 1) / 2)[inverse]
