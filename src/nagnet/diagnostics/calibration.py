"""Can a model's probabilities be taken at their word, and how right is it where it is surest?"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from nagnet.diagnostics.confidence import ConfidenceSummary, Predictions, summarize_confidence
from nagnet.errors import UserError
from nagnet.evaluation.statistics import RocInterval, area_under_roc_interval, spearman

RELIABILITY_BINS = 15
COVERAGE_POINTS = 100
DENSITY_BINS = 40


@dataclass(frozen=True)
class Reliability:
    """Probability of the likeliest token against how often it came; bins of equal width over [0, 1].

    Attributes:
        probability: mean probability of the likeliest token, float64 [bins]; NaN for an empty bin.
        accuracy: share of hits, float64 [bins]; NaN for an empty bin.
        n_tokens: int64 [bins].
        calibration_error: expected calibration error, the mean over tokens of ``|accuracy - probability|`` of their
            bin (Guo et al. 2017, arXiv 1706.04599).
    """

    probability: np.ndarray
    accuracy: np.ndarray
    n_tokens: np.ndarray
    calibration_error: float


@dataclass(frozen=True)
class Coverage:
    """Accuracy on the share of tokens that a signal is surest of.

    Attributes:
        share: of the tokens answered, from the surest on, float64 [points]; the last is 1.
        accuracy: share of hits among them, float64 [points]. Tokens of equal signal come in at once, at their mean.
    """

    share: np.ndarray
    accuracy: np.ndarray


@dataclass(frozen=True)
class LossByScale:
    """Tokens by s_N and by the loss of the token that came, in bins of equal width.

    Attributes:
        log_norm: edges in s_N, float64 [bins + 1]. loss: edges in nats, from 0, float64 [bins + 1].
        n_tokens: int64 [bins of s_N, bins of loss].
        mean_loss: of the tokens in each bin of s_N, nats, float64 [bins]; NaN for an empty one.
    """

    log_norm: np.ndarray
    loss: np.ndarray
    n_tokens: np.ndarray
    mean_loss: np.ndarray


@dataclass(frozen=True)
class Judgement:
    """Everything that is said of a model's confidence; dicts by signal, as in `Predictions.signals`.

    Attributes:
        summary: deciles by exp(s_N) and by minus the entropy.
        reliability: of the probability of the likeliest token.
        coverage: accuracy by coverage. area: AUROC against top-1 correctness, interval over rows.
        loss_by_scale: tokens by s_N and next-token loss.
        spearman_loss: rank correlation with the next-token loss.
        n_rows: sequences the tokens come from.
    """

    summary: ConfidenceSummary
    reliability: Reliability
    coverage: dict[str, Coverage]
    area: dict[str, RocInterval]
    loss_by_scale: LossByScale
    spearman_loss: dict[str, float]
    n_rows: int


def judge(predictions: Predictions) -> Judgement:
    """Judges all signals of confidence on the same tokens.

    Raises:
        UserError: if a signal is NaN, or s_N or a loss not finite.
    """
    signals, correct = predictions.signals, predictions.correct
    return Judgement(
        summary=summarize_confidence(predictions),
        reliability=reliability(predictions.max_probability, correct),
        coverage={name: coverage(signal, correct) for name, signal in signals.items()},
        area={name: area_under_roc_interval(signal, correct, predictions.row) for name, signal in signals.items()},
        loss_by_scale=loss_by_scale(predictions.scale, predictions.loss),
        spearman_loss={name: spearman(signal, predictions.loss) for name, signal in signals.items()},
        n_rows=len(np.unique(predictions.row)),
    )


def reliability(probability: ArrayLike, correct: ArrayLike, bins: int = RELIABILITY_BINS) -> Reliability:
    """Compares probabilities with what came.

    Args:
        probability: of the likeliest token, [n] in [0, 1]. correct: true where it came, [n].

    Raises:
        UserError: if the lengths differ or are 0, or a probability is NaN or outside [0, 1].
    """
    p, hit = _pair(probability, correct)
    if not ((p >= 0.0) & (p <= 1.0 + 1e-6)).all():
        raise UserError("probabilities must lie between 0 and 1; has the model diverged?")
    place = np.clip((p * bins).astype(np.int64), 0, bins - 1)
    count = np.bincount(place, minlength=bins)
    with np.errstate(invalid="ignore"):
        mean_p = np.bincount(place, weights=p, minlength=bins) / count
        accuracy = np.bincount(place, weights=hit, minlength=bins) / count
    error = np.nansum(np.abs(accuracy - mean_p) * count) / len(p)
    return Reliability(mean_p, accuracy, count, float(error))


def coverage(signal: ArrayLike, correct: ArrayLike, points: int = COVERAGE_POINTS) -> Coverage:
    """How accuracy falls as a model answers more and more of what it is less sure of.

    Args:
        signal: [n], larger means surer. correct: [n].

    Raises:
        UserError: if the lengths differ or are 0, or the signal holds a NaN.
    """
    values, hit = _pair(signal, correct)
    if np.isnan(values).any():
        raise UserError("the confidence signal holds NaN, so its tokens have no order; has the model diverged?")
    _, group, size = np.unique(-values, return_inverse=True, return_counts=True)
    expected = (np.bincount(group, weights=hit) / size)[group]  # equal values share their hits
    order = np.argsort(-values, kind="stable")
    right = np.cumsum(expected[order])
    n = len(values)
    counts = np.unique(-(-n * np.arange(1, points + 1) // points))  # the ceiling, in integers
    return Coverage(counts / n, right[counts - 1] / counts)


def loss_by_scale(scale: ArrayLike, loss: ArrayLike, bins: int = DENSITY_BINS) -> LossByScale:
    """Counts tokens by the log of their scale and by their next-token loss.

    Args:
        scale: exp(s_N), [n]. loss: nats, [n]. bins: of each of the two.

    Returns:
        Edges, counts and mean losses; the range of s_N is that of the tokens, that of the loss from 0 to the largest.

    Raises:
        UserError: if the lengths differ or are 0, or a value is not finite or a scale not above 0.
    """
    norm, nats = _pair(scale, loss)
    with np.errstate(divide="ignore", invalid="ignore"):
        log_norm = np.log(norm)
    if not (np.isfinite(log_norm).all() and np.isfinite(nats).all()):
        raise UserError("s_N and the loss of every token must be finite; has the model diverged?")
    top = max(float(nats.max()), 1e-3)  # a model that is always right has a range too
    count, columns, rows = np.histogram2d(log_norm, nats.clip(min=0.0), bins=bins, range=(_span(log_norm), (0.0, top)))
    place = np.clip(np.searchsorted(columns, log_norm, side="right") - 1, 0, bins - 1)
    with np.errstate(invalid="ignore"):
        mean = np.bincount(place, weights=nats, minlength=bins) / count.sum(axis=1)
    return LossByScale(columns, rows, count.astype(np.int64), mean)


def _span(values: np.ndarray) -> tuple[float, float]:
    """Smallest and largest; a little apart where all are equal."""
    low, high = float(values.min()), float(values.max())
    return (low, high) if high - low > 1e-6 else (low - 0.5, high + 0.5)


def _pair(values: ArrayLike, correct: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    first, hit = (np.asarray(part, dtype=np.float64).ravel() for part in (values, correct))
    if len(first) != len(hit) or len(first) == 0:
        raise UserError(f"give one answer for each of one token or more, not {len(first)} and {len(hit)}")
    return first, hit
