"""What the runs of a comparison say together: means over seeds, paired differences, verdicts."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from nagnet.evaluation.bits_per_byte import DocumentScores
from nagnet.evaluation.statistics import paired_bootstrap_bits_per_byte, seed_interval
from nagnet.training.budget import resolve_budget
from nagnet.training.plan import Plan, differences

Results = Mapping[tuple[str, int], Mapping[str, Any]]
DASH = "–"
BETTER, WORSE, UNDECIDED, DIVERGED = "better", "worse", "no difference seen", "diverged"


def summarize(
    plan: Plan,
    results: Results,
    text: Mapping[str, Any],
    environment: Mapping[str, Any],
    sweep: Mapping[str, Any] | None = None,
    interrupted: bool = False,
) -> dict[str, Any]:
    """All results as plain values; the content of summary.json.

    Args:
        plan: with tuned arms. results: of `read_result` by arm and seed; arms or seeds may be missing after an
            interruption, which leaves out what depends on them.
        text, environment: plain facts. sweep: seed, FLOPs and rows of the trials.
    """
    base = resolve_budget(plan.arms[plan.baseline])
    shared = plan.config.to_dict()
    return {
        "recipe": plan.recipe,
        "run": shared,
        "corpus": dict(text),
        "budget": {
            "match": plan.match,
            "flops": plan.arms[plan.baseline].flops or base.flops,
            "convention": base.convention,
        },
        "baseline": plan.baseline,
        "seeds": list(plan.seeds),
        "seed": plan.seeds[0],
        "arms": {arm: _arm(plan, arm, results) for arm in plan.arms if (arm, plan.seeds[0]) in results},
        "differences": [_difference(plan, arm, results) for arm in plan.others()] if not interrupted else [],
        "sweep": None if sweep is None else dict(sweep),
        **environment,
        "interrupted": interrupted,
    }


def _arm(plan: Plan, arm: str, results: Results) -> dict[str, Any]:
    """An arm over its seeds: sizes and the sample of the first, medians of times, means of what was measured."""
    runs = [results[arm, seed] for seed in plan.seeds if (arm, seed) in results]
    first, config = runs[0], plan.arms[arm]
    shared = plan.config.to_dict()
    own = {name: value for name, value in config.to_dict().items() if name != "model" and shared[name] != value}
    same = ("optimizers", "parameters", "steps", "tokens", "flops", "compiled", "step_seconds_quartiles")
    summary = {
        "arm": plan.kinds[arm],
        "config": config.model.to_dict(),
        "run": own,
        "differs": [list(entry) for entry in differences(plan, arm)],
        **{name: first[name] for name in same},
        "seconds": _mean([run["seconds"] for run in runs]),
        "median_step_seconds": _of(statistics.median, [run["median_step_seconds"] for run in runs]),
        "peak_memory_bytes": max(run["peak_memory_bytes"] for run in runs),
        "final_loss": _mean([run["final_loss"] for run in runs]),
        "health": _health(runs),
    }
    if not all(run["finished"] for run in runs):
        return summary
    scores = [run["bits_per_byte"] for run in runs]
    summary |= {
        "bits_per_byte": _mean(scores),
        "bits_per_byte_by_seed": scores,
        "diverged": [run["seed"] for run in runs if run["diverged"] is not None],
        "confidence": _confidence(runs),
    }
    return summary | {name: first[name] for name in ("evaluated", "sample") if name in first}


def _health(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Gates at the end of each seed's run; None for a rule without gates."""
    found = [run["health"] for run in runs if run["health"] is not None]
    if not found:
        return None
    return {
        "updates": found[0]["updates"],
        "dead_updates_by_seed": [health["dead_updates"] for health in found],
        "alarms_by_seed": [health["alarms_ever"] for health in found],
        "mean_gain": np.mean([health["mean_gain"] for health in found], axis=0).tolist(),
        "initial_gain": found[0]["initial_gain"],
    }


def _confidence(runs: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """How well each signal ranks right answers, by seed and as a mean; None where a seed has no such order."""
    found = [run["confidence"] for run in runs if "confidence" in run]
    if not found:
        return None
    by_seed = {
        "auroc_scale": [confidence["scale"]["auroc"] for confidence in found],
        "auroc_negative_entropy": [confidence["negative_entropy"]["auroc"] for confidence in found],
        "spearman_scale_entropy": [confidence["spearman_scale_entropy"] for confidence in found],
    }
    summary: dict[str, Any] = {name: _mean(values) for name, values in by_seed.items()}
    summary |= {f"{name}_by_seed": values for name, values in by_seed.items()}
    return summary | {"scale_in_logits": found[0]["scale_in_logits"], "tokens": found[0]["n_tokens"]}


def _difference(plan: Plan, arm: str, results: Results) -> dict[str, Any]:
    """An arm minus the baseline: per seed, their mean, its interval, and the verdict."""
    base = plan.baseline
    pairs = [(results[arm, seed], results[base, seed]) for seed in plan.seeds]
    values = [_minus(ours["bits_per_byte"], theirs["bits_per_byte"]) for ours, theirs in pairs]
    row: dict[str, Any] = {
        "arm_a": arm,
        "arm_b": base,
        "bits_per_byte": _mean(values),
        "by_seed": values,
        "final_loss_by_seed": [_minus(ours["final_loss"], theirs["final_loss"]) for ours, theirs in pairs],
        "low": None,
        "high": None,
        "standard_error": None,
        "confidence": 0.95,
        "n_seeds": len(values),
        "basis": "seeds" if len(values) > 1 else "documents",
        "n_documents": pairs[0][1].get("evaluated", {}).get("documents"),
    }
    known = [value for value in values if value is not None]
    if len(known) < len(values):
        return row | {"bits_per_byte": None, "verdict": DIVERGED}
    if len(known) > 1:
        interval = seed_interval(known, row["confidence"])
        row["standard_error"] = interval.standard_error
    else:
        interval = paired_bootstrap_bits_per_byte(_scores(pairs[0][0]), _scores(pairs[0][1]))
    return row | {"low": interval.low, "high": interval.high, "verdict": _verdict(interval.low, interval.high)}


def _verdict(low: float, high: float) -> str:
    """Fewer bits are better."""
    if high < 0:
        return BETTER
    return WORSE if low > 0 else UNDECIDED


def describe_difference(row: Mapping[str, Any]) -> str:
    """A row of ``differences`` in one line: verdict, number, interval, and what the interval is over."""
    pair = f"{row['arm_a']} - {row['arm_b']}"
    if row["verdict"] == DIVERGED:
        lost = sum(value is None for value in row["by_seed"])
        return f"{pair}: an arm diverged on {lost} of {row['n_seeds']} seeds"
    numbers = (
        f"{pair}: {row['bits_per_byte']:+.4f} bits per byte, {row['confidence']:.0%} interval "
        f"{row['low']:+.4f} to {row['high']:+.4f}"
    )
    if row["basis"] == "documents":
        return f"{numbers} (one seed; paired bootstrap over {row['n_documents']} held-out documents, not over seeds)"
    seeds = ", ".join(f"{value:+.4f}" for value in row["by_seed"])
    return f"{numbers} (t over {row['n_seeds']} seeds: {seeds}): {describe_verdict(row)}"


def describe_verdict(row: Mapping[str, Any]) -> str:
    """``better``, ``worse``, or that no difference was seen, and at how many seeds."""
    n = f"{row['n_seeds']} seed{'s' if row['n_seeds'] > 1 else ''}"
    return f"{row['verdict']} at {n}" if row["basis"] == "seeds" else f"{row['verdict']} on these documents, {n}"


def format_auroc(confidence: Mapping[str, Any]) -> str:
    """AUROC of exp(s_N), in brackets where it is a control, a dash where it ranks nothing."""
    value = format_number(confidence.get("auroc_scale"))
    return value if confidence.get("scale_in_logits") or value == DASH else f"({value})"


def format_dead(health: Mapping[str, Any]) -> str:
    """Dead updates of each seed, and of how many."""
    return f"{', '.join(str(len(dead)) for dead in health['dead_updates_by_seed'])} of {health['updates']}"


def format_alarms(health: Mapping[str, Any]) -> str:
    """How many updates the alarm named, of each seed."""
    return ", ".join(str(len(alarms)) for alarms in health["alarms_by_seed"])


def format_number(value: float | None, pattern: str = ".4f") -> str:
    """A number, or a dash where there is none."""
    return DASH if value is None else format(value, pattern)


def _scores(result: Mapping[str, Any]) -> DocumentScores:
    stored = result["documents"]
    nats, n_bytes, n_tokens = (np.array(stored[name]) for name in ("nats", "n_bytes", "n_tokens"))
    return DocumentScores(tuple(stored["names"]), nats, n_bytes, n_tokens)


def _minus(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b


def _mean(values: Sequence[float | None]) -> float | None:
    """None where one is missing."""
    return _of(statistics.fmean, values)


def _of(function: Callable[[Sequence[float]], float], values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return function(known) if len(known) == len(values) > 0 else None
