"""The generated part of a record's README: question, protocol, tables, verdict."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from nagnet.training.comparison_summary import (
    DASH,
    describe_difference,
    describe_verdict,
    format_alarms,
    format_auroc,
    format_dead,
    format_number,
)
from nagnet.training.plan import Plan, differences

FIGURE_TITLES = {
    "difference": "Bits per byte minus the baseline's on the same seed, with 95% intervals",
    "loss": "Training loss by tokens and by FLOPs",
    "confidence": "Entropy, loss and accuracy by decile of confidence, first seed",
    "gain": "Gain of every update at the end, first seed",
}


def render_page(
    name: str, protocol: Mapping[str, Any], summary: Mapping[str, Any] | None, figures: Sequence[str]
) -> str:
    """Markdown of a record.

    Args:
        name: of its folder. protocol: of protocol.json. summary: None before there are results.
        figures: names of those in ``figures/``.
    """
    plan = Plan.from_dict(protocol["plan"])
    parts = [
        f"**Question.** {protocol['question']}",
        f"**Success rule**, written before the first step. {protocol['success_rule']}",
        f"**Protocol.** {_protocol(plan)}",
        _arms_table(plan),
    ]
    if summary is None:
        parts.append("There are no results yet.")
    else:
        parts += [_machine(summary), *_trials(summary), _results(summary), *map(_figure, figures), _verdict(summary)]
    parts.append(
        f"Run again from the stored configs: `nagnet compare --rerun records/{name}`. It was made by\n"
        f"```\n{protocol['command']}\n```"
    )
    return "\n\n".join(parts)


def _protocol(plan: Plan) -> str:
    seeds = f"seed {plan.seeds[0]}" if len(plan.seeds) == 1 else f"seeds {', '.join(map(str, plan.seeds))}"
    config = plan.arms[plan.baseline]
    budgets = {"flops": config.flops, "tokens": config.tokens, "steps": config.steps}
    amounts = [f"{value:.4g} {kind.replace('flops', 'training FLOPs')}" for kind, value in budgets.items() if value]
    amount = amounts[0] if amounts else f"{config.tokens_per_parameter} tokens per parameter"
    order = "one after another" if plan.sequential else "interleaved"
    lines = [
        f"Recipe `{plan.recipe}`: {len(plan.arms)} arms, {seeds}, matched by "
        f"{plan.match.replace('flops', 'FLOPs')} at the baseline's {amount} ({config.convention}).",
        f"Batches of {config.batch_size} x {config.seq_len} tokens, the same for all arms of a seed, trained {order}.",
    ]
    if plan.sweeps:
        trials = sum(len(sweep.values) for sweep in plan.sweeps_of(plan.baseline))
        budget = "the whole budget" if plan.sweep_budget is None else f"{plan.sweep_budget:.4g} FLOPs"
        lines.append(f"Tuned before on seed {plan.seeds[0]} with {budget} a trial; the baseline has {trials} trials.")
    return " ".join([*lines, "docs/protocol.md has the rest."])


def _arms_table(plan: Plan) -> str:
    rows = []
    for arm, kind in plan.kinds.items():
        found = [f"{key} {_value(ours)} ({_value(theirs)})" for key, ours, theirs in differences(plan, arm)]
        rows.append([arm, kind, "the baseline" if arm == plan.baseline else "; ".join(found)])
    return _table(["arm", "made from", "differs from the baseline in (its value)"], rows)


def _machine(summary: Mapping[str, Any]) -> str:
    corpus, machine = summary["corpus"], summary["machine"]
    evaluated = next((arm["evaluated"] for arm in summary["arms"].values() if "evaluated" in arm), None)
    scored = ""
    if evaluated is not None:
        scored = f"; scored on {evaluated['documents']} held-out documents of {evaluated['bytes']:,} bytes"
    versions = ", ".join(f"{name} {version}" for name, version in summary["versions"].items())
    return (
        f"Text: {corpus['source']}, {corpus['documents']:,} training documents of {corpus['tokens']:,} tokens, hash "
        f"{corpus['hash'][:12]}{scored}. "
        f"Machine: {machine['processor']}, {summary['jobs']} x {summary['threads']} threads, {summary['dtype']}; "
        f"{versions}; commit {(summary['git_commit'] or 'unknown')[:12]}."
    )


def _trials(summary: Mapping[str, Any]) -> list[str]:
    if not summary["sweep"]:
        return []
    by_field: dict[tuple[str, str], list[str]] = {}
    for row in summary["sweep"]["trials"]:
        score = "diverged" if row["bits_per_byte"] is None else f"{row['bits_per_byte']:.4f}"
        text = f"{row['value']}: {score}"
        text = f"**{text}**" + (" (edge)" if row["at_edge"] else "") if row["chosen"] else text
        by_field.setdefault((row["arm"], row["key"]), []).append(text)
    rows = [[arm, key, "; ".join(trials), str(len(trials))] for (arm, key), trials in by_field.items()]
    note = "Trials in bits per byte, the chosen value bold; edge: no larger or no smaller value was tried."
    return [_table(["arm", "field", "value: bits per byte", "trials"], rows), note]


def _results(summary: Mapping[str, Any]) -> str:
    by_arm = {row["arm_a"]: row for row in summary["differences"]}
    head = ["arm", "bits per byte", "by seed", "minus baseline", "95% interval", "verdict", "AUROC exp(s_N)"]
    head += ["AUROC -entropy", "dead updates", "alarms", "tokens", "step, ms"]
    rows = []
    for arm, facts in summary["arms"].items():
        row, confidence, health = by_arm.get(arm), facts["confidence"] or {}, facts["health"]
        scores = facts["bits_per_byte_by_seed"]
        rows.append(
            [
                arm,
                format_number(facts["bits_per_byte"]),
                ", ".join("diverged" if score is None else f"{score:.4f}" for score in scores),
                format_number(row["bits_per_byte"], "+.4f") if row else DASH,
                f"{row['low']:+.4f} to {row['high']:+.4f}" if row and row["low"] is not None else DASH,
                describe_verdict(row) if row else "baseline",
                format_auroc(confidence),
                format_number(confidence.get("auroc_negative_entropy")),
                format_dead(health) if health else DASH,
                format_alarms(health) if health else DASH,
                f"{facts['tokens']:,}",
                format_number(facts["median_step_seconds"] and 1000 * facts["median_step_seconds"], ".0f"),
            ]
        )
    note = (
        "AUROC: how well exp(s_N) and minus the entropy rank right answers (0.5 is chance), mean over seeds, in "
        "brackets where the logits do not use exp(s_N). Dead updates at the end and updates that the alarm ever named: "
        "of each seed."
    )
    return f"{_table(head, rows)}\n\n{note}"


def _figure(name: str) -> str:
    return f"![{FIGURE_TITLES[name]}](figures/{name}.png)"


def _verdict(summary: Mapping[str, Any]) -> str:
    lines = [describe_difference(row) for row in summary["differences"]]
    return "**Verdict.**\n" + "\n".join(f"- {line}" for line in lines)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _value(value: Any) -> str:
    return "none" if value is None else str(value)
