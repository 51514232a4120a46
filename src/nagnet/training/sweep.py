"""Tuning before a comparison: the same number of trials for every arm, all of them reported."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from nagnet.errors import UserError
from nagnet.training.config import RunConfig
from nagnet.training.overrides import override
from nagnet.training.plan import Plan, Sweep, matched_configs


@dataclass(frozen=True)
class Trial:
    """One value of one field of one arm; ``config`` is what would run with it, budget and seed included."""

    arm: str
    key: str
    value: str
    config: RunConfig


@dataclass(frozen=True)
class TrialScore:
    """What a trial came to: ``bits_per_byte``, or None and why in ``diverged``."""

    bits_per_byte: float | None
    diverged: str | None = None


def tune(
    plan: Plan, run_trials: Callable[[Sequence[RunConfig]], Mapping[RunConfig, TrialScore]]
) -> tuple[Plan, list[dict[str, Any]]]:
    """Runs the sweeps of a plan on its first seed and gives every arm its best values.

    An arm's sweeps follow one another, each from the best values so far. Trials of all arms that belong to the same
    place in that order are run together.

    Args:
        run_trials: trains configs and scores them.

    Returns:
        The plan with tuned arms, and a row for each trial: arm, key, value, bits_per_byte, diverged, chosen, and
        at_edge, whether the chosen value is the largest or smallest of those tried.

    Raises:
        UserError: if every trial of an arm diverged.
    """
    rows: list[dict[str, Any]] = []
    scores: dict[RunConfig, TrialScore] = {}
    for place in range(max(len(plan.sweeps_of(arm)) for arm in plan.arms)):
        sweeps = {arm: of_arm[place] for arm in plan.arms if place < len(of_arm := plan.sweeps_of(arm))}
        trials = [trial for arm, sweep in sweeps.items() for trial in _trials(plan, arm, sweep)]
        new = dict.fromkeys(trial.config for trial in trials if trial.config not in scores)
        scores |= run_trials(list(new))
        arms = dict(plan.arms)
        for arm, sweep in sweeps.items():
            own = [(trial, scores[trial.config]) for trial in trials if trial.arm == arm]
            best = _best(arm, sweep, own)
            rows += [_row(trial, score, trial.value == best, sweep) for trial, score in own]
            arms[arm] = override(arms[arm], [f"{sweep.key}={best}"])
        plan = dataclasses.replace(plan, arms=arms)
    return plan, rows


def trial_flops(plan: Plan) -> float | None:
    """Training FLOPs of each trial; None where trials have the plan's own budget in tokens."""
    matched = matched_configs(_trial_matching(plan))[plan.baseline]
    return plan.sweep_budget or matched.flops


def _trial_matching(plan: Plan) -> Plan:
    """Trials cannot be matched by time, since their step times are not known yet."""
    return dataclasses.replace(plan, match="flops") if plan.match == "time" else plan


def _trials(plan: Plan, arm: str, sweep: Sweep) -> list[Trial]:
    matched = matched_configs(_trial_matching(plan))[arm].replace(seed=plan.seeds[0])
    if plan.sweep_budget is not None:
        matched = matched.replace(flops=plan.sweep_budget)
    return [Trial(arm, sweep.key, value, override(matched, [f"{sweep.key}={value}"])) for value in sweep.values]


def _best(arm: str, sweep: Sweep, scored: Sequence[tuple[Trial, TrialScore]]) -> str:
    finite = [(score.bits_per_byte, trial.value) for trial, score in scored if score.bits_per_byte is not None]
    if not finite:
        raise UserError(f"every trial of {arm} over {sweep.key} ({', '.join(sweep.values)}) diverged; try other values")
    return min(finite, key=lambda pair: pair[0])[1]


def _row(trial: Trial, score: TrialScore, chosen: bool, sweep: Sweep) -> dict[str, Any]:
    row = {"arm": trial.arm, "key": trial.key, "value": trial.value} | vars(score) | {"chosen": chosen}
    return row | {"at_edge": chosen and _at_edge(trial.value, sweep.values)}


def _at_edge(value: str, values: Sequence[str]) -> bool:
    try:
        numbers = [float(text) for text in values]
    except ValueError:
        return False
    return len(numbers) > 1 and float(value) in (min(numbers), max(numbers))
