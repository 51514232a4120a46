"""From the gap between two arms at small budgets to the gap at a large one, with what the seeds leave open."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from nagnet.errors import UserError
from nagnet.evaluation.statistics import seed_interval

DRAWS = 20_000
WORTH_A_NOTE = 0.005  # share of the draws


@dataclass(frozen=True)
class Pair:
    """A matched pair that was measured.

    Attributes:
        budget: training FLOPs of each arm. gap: bits per byte of the arm minus those of its baseline.
        standard_error: of the gap, between training seeds; None where nobody knows it.
        n_seeds: that the error was estimated from; None for a stated one, which is taken as known.
    """

    budget: float
    gap: float
    standard_error: float | None = None
    n_seeds: int | None = None

    def __post_init__(self):
        if not 0 < self.budget < math.inf:
            raise UserError(f"a pair has budget {self.budget:g}; give training FLOPs above 0")
        if not math.isfinite(self.gap):
            raise UserError(f"the gap at {self.budget:g} FLOPs is {self.gap}; give a finite difference")
        if self.standard_error is not None and not 0 <= self.standard_error < math.inf:
            raise UserError(f"the standard error at {self.budget:g} FLOPs is {self.standard_error}; give 0 or more")


@dataclass(frozen=True)
class Extrapolation:
    """A predicted gap.

    Attributes:
        budget: FLOPs it is predicted for. gap: the prediction, bits per byte.
        interval: both ends, of what seed noise alone leaves open; None where a pair has no standard error.
        confidence: coverage of the interval.
        model: ``power law`` (gap = a C^-b) or ``linear in log C`` (gap = c + k ln C).
        exponent: b, or k per factor e of FLOPs.
        pairs: what it was made from. fitted: the model's gap at each of them.
        notes: what limits it, in sentences.
    """

    budget: float
    gap: float
    interval: tuple[float, float] | None
    confidence: float
    model: str
    exponent: float
    pairs: tuple[Pair, ...]
    fitted: tuple[float, ...]
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return dataclasses.asdict(self)


def pair_of_summary(summary: Mapping[str, Any], arm: str | None = None) -> Pair:
    """The pair that a comparison of several seeds measured (its summary.json).

    Args:
        arm: which arm's difference from the baseline; needed where there are several.

    Raises:
        UserError: if the arm is not among them, or there is one seed alone, or an arm diverged.
    """
    rows = {row["arm_a"]: row for row in summary.get("differences", ())}
    if arm is None and len(rows) != 1:
        raise UserError(
            f"{summary['recipe']} compares {', '.join(rows) or 'nothing'} with its baseline; choose by --arm"
        )
    if arm is not None and arm not in rows:
        raise UserError(f"{summary['recipe']} has no difference of {arm}; it has {', '.join(rows) or 'none'}")
    row = next(iter(rows.values())) if arm is None else rows[arm]
    values = row["by_seed"]
    if len(values) < 2 or None in values:
        raise UserError(
            f"{summary['recipe']}: {row['arm_a']} has {sum(value is not None for value in values)} seed with a "
            "result, so its noise is unknown; train more seeds, or give --pair FLOPS:GAP:STANDARD_ERROR"
        )
    interval = seed_interval(values)
    return Pair(summary["budget"]["flops"], interval.mean, interval.standard_error, interval.n_seeds)


def extrapolate(pairs: Sequence[Pair], budget: float, confidence: float = 0.95, seed: int = 0) -> Extrapolation:
    """Predicts the gap at ``budget`` from those at two or more others.

    The model is a power law where all gaps have one sign, fitted on logs, else a line in log C. Both are fitted by
    least squares, weighted by the standard errors where every pair has one. The interval is a parametric bootstrap:
    gaps are drawn again with their errors (t distributed where these come from few seeds), and each draw is fitted in
    the same way, choice of model included. It holds seed noise and nothing else.

    Raises:
        UserError: for fewer than two different budgets, or numbers out of range.
    """
    pairs = tuple(sorted(pairs, key=lambda pair: pair.budget))
    if len({pair.budget for pair in pairs}) < 2:
        raise UserError(f"{len(pairs)} pair(s) at one budget show no trend; give pairs at two or more budgets")
    if not 0 < budget < math.inf or not 0 < confidence < 1:
        raise UserError(f"budget {budget:g} must be above 0 and confidence {confidence} between 0 and 1")
    x = np.log([pair.budget / budget for pair in pairs])
    gaps = np.array([[pair.gap for pair in pairs]])
    errors = [pair.standard_error for pair in pairs]
    known = [error for error in errors if error is not None]
    weights = 1 / np.array(known) if len(known) == len(pairs) and all(known) else np.ones(len(pairs))
    gap, slope, power_law = (part[0] for part in _fit(x, gaps, weights))
    fitted = _curve(x, gap, slope, bool(power_law))
    interval = None
    turned = 0.0
    if len(known) == len(pairs):
        drawn = gaps + _noise(pairs, np.random.default_rng(seed))
        predicted, _, _ = _fit(x, drawn, weights)
        low, high = np.quantile(predicted, [(1 - confidence) / 2, (1 + confidence) / 2])
        interval = (float(low), float(high))
        turned = float((np.sign(drawn) != np.sign(gaps)).any(axis=1).mean())
    return Extrapolation(
        budget=budget,
        gap=float(gap),
        interval=interval,
        confidence=confidence,
        model="power law" if power_law else "linear in log C",
        exponent=float(-slope if power_law else slope),
        pairs=pairs,
        fitted=tuple(fitted.tolist()),
        notes=tuple(_notes(pairs, budget, fitted, turned)),
    )


def _noise(pairs: Sequence[Pair], random: np.random.Generator) -> np.ndarray:
    """Errors of the gaps [DRAWS, n]."""
    columns = []
    for pair in pairs:
        n = pair.n_seeds
        draws = random.standard_normal(DRAWS) if n is None else random.standard_t(n - 1, DRAWS)
        columns.append((pair.standard_error or 0.0) * draws)
    return np.stack(columns, axis=1)


def _fit(x: np.ndarray, gaps: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Fits each row of ``gaps`` [m, n] over x = ln(C / budget) [n].

    Args:
        weights: 1 / standard error of each gap, [n].

    Returns:
        The prediction at the budget, the slope, and whether it is a power law; [m] each.
    """
    one_sign: np.ndarray = np.abs(np.sign(gaps).sum(axis=1)) == gaps.shape[1]
    with np.errstate(divide="ignore"):  # rows with a gap of 0 are not fitted on logs
        values = np.where(one_sign[:, None], np.log(np.abs(gaps)), gaps)
    # The error of ln g is that of g over g.
    squared = np.where(one_sign[:, None], weights * np.abs(gaps), weights) ** 2
    squared /= squared.sum(axis=1, keepdims=True)
    mean_x = (squared * x).sum(axis=1, keepdims=True)
    mean_value = (squared * values).sum(axis=1, keepdims=True)
    slope = (squared * (x - mean_x) * (values - mean_value)).sum(axis=1) / (squared * (x - mean_x) ** 2).sum(axis=1)
    at_budget = mean_value[:, 0] - slope * mean_x[:, 0]
    with np.errstate(over="ignore"):  # of rows that are a line
        predicted = np.where(one_sign, np.sign(gaps[:, 0]) * np.exp(at_budget), at_budget)
    return predicted, slope, one_sign


def _curve(x: np.ndarray, gap: float, slope: float, power_law: bool) -> np.ndarray:
    """The fitted model at each x = ln(C / budget)."""
    return gap * np.exp(slope * x) if power_law else gap + slope * x


def _notes(pairs: Sequence[Pair], budget: float, fitted: np.ndarray, turned: float) -> list[str]:
    notes = []
    if any(pair.standard_error is None for pair in pairs):
        notes.append("A pair has no standard error, so there is no interval.")
    if len({pair.budget for pair in pairs}) == 2:
        notes.append(
            "Two budgets fix both parameters: they cannot tell how wrong the model itself is, and no interval here "
            "holds that error."
        )
    else:
        worst = max(pairs, key=lambda pair: abs(pair.gap - fitted[pairs.index(pair)]))
        off = worst.gap - fitted[pairs.index(worst)]
        against = f", {abs(off) / worst.standard_error:.1f} standard errors" if worst.standard_error else ""
        notes.append(f"Farthest from the fit: {off:+.4f} at {worst.budget:g} FLOPs{against}.")
    beyond = budget / max(pair.budget for pair in pairs)
    if beyond > 1:
        notes.append(f"The prediction lies {beyond:.3g} x beyond the largest budget measured.")
    if turned > WORTH_A_NOTE:
        notes.append(f"In {turned:.1%} of the draws noise turned the sign of a gap.")
    return notes
