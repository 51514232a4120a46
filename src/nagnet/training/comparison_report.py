"""Figures and report of a finished comparison, from what it left in its folder."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from nagnet.diagnostics import figures
from nagnet.diagnostics.confidence import ConfidenceSummary
from nagnet.diagnostics.geometry import gain_by_update, norm_by_depth, rotation_by_depth
from nagnet.diagnostics.probed import probe_tokens
from nagnet.diagnostics.report import ReportTable, write_report
from nagnet.diagnostics.style import save_figure
from nagnet.models.checkpoint import load_model
from nagnet.training.comparison import pack_held_out, read_result
from nagnet.training.comparison_summary import DASH, format_alarms, format_auroc, format_dead, format_number
from nagnet.training.metrics import METRICS_FILE, read_metrics
from nagnet.training.text import RunText

FIGURES_FOLDER = "figures"
REPORT_FILE = "report.html"
AVERAGED = ("tokens", "flops", "loss")


def write_comparison_report(
    out: Path, summary: Mapping[str, Any], text: RunText, seed_folder: Callable[[int], Path], device: torch.device
) -> Path:
    """Measures the trained arms on held-out text, draws the figures and writes report.html.

    Losses and differences are of all seeds; what is measured inside the models is of the first.

    Args:
        out: folder of the comparison. seed_folder: where the runs of a seed are.

    Returns:
        Path of the report; figures lie beside it in ``figures/`` as PNG and SVG.
    """
    folder = seed_folder(summary["seed"])
    whole = [arm for arm, facts in summary["arms"].items() if summary["seed"] not in facts["diverged"]]
    drawn = []
    if metrics := mean_metrics(summary, seed_folder):
        seeds = len(summary["seeds"])
        caption = figures.LOSS_CAPTION + (f" Mean of {seeds} seeds." if seeds > 1 else "")
        drawn.append(("loss", "Training loss", figures.loss_figure(metrics), caption))
    if len(summary["seeds"]) > 1 or len(summary["differences"]) > 1:
        fig = figures.difference_figure(summary["differences"])
        drawn.append(("difference", "Difference from the baseline", fig, figures.DIFFERENCE_CAPTION))
    if whole:
        drawn += _inside(folder, whole, probe_tokens(pack_held_out(text)).to(device))
    shown = []
    for name, title, fig, caption in drawn:
        paths = {path.suffix: path for path in save_figure(fig, out / FIGURES_FOLDER, name)}
        shown.append((title, caption, paths[".svg"].read_bytes()))
    path = out / REPORT_FILE
    tables = [_runs_table(summary), *_trials_table(summary)]
    write_report(path, f"{summary['recipe']}: {' against '.join(summary['arms'])}", summary, shown, tables=tables)
    return path


def _inside(folder: Path, arms: list[str], tokens: Tensor) -> list[tuple[str, str, Any, str]]:
    """Figures of the stream and of confidence."""
    models = {arm: load_model(folder / arm).to(tokens.device) for arm in arms}
    norms = {arm: norm_by_depth(model, tokens) for arm, model in models.items()}
    rotations = {arm: rotation_by_depth(model, tokens) for arm, model in models.items()}
    gains = {arm: gain_by_update(model, tokens) for arm, model in models.items()}
    results = {arm: read_result(folder, arm) or {} for arm in arms}
    confidence = {arm: ConfidenceSummary.from_dict(result["confidence"]) for arm, result in results.items()}
    drawn = [
        ("norm_by_depth", "Stream norm by depth", figures.norm_figure(norms), figures.NORM_CAPTION),
        ("rotation", "Cumulative rotation", figures.rotation_figure(rotations), figures.ROTATION_CAPTION),
        ("confidence", "Confidence", figures.confidence_figure(confidence), figures.CONFIDENCE_CAPTION),
    ]
    if any(gain is not None for gain in gains.values()):
        drawn.insert(2, ("gain", "Gain by update", figures.gain_figure(gains), figures.GAIN_CAPTION))
    return drawn


def mean_metrics(summary: Mapping[str, Any], seed_folder: Callable[[int], Path]) -> dict[str, list[dict[str, Any]]]:
    """Logged tokens, FLOPs and loss of each arm, averaged over the seeds step by step, as far as all of them got."""
    by_seed = [metrics_by_arm(seed_folder(seed)) for seed in summary["seeds"]]
    return {
        arm: [
            {name: statistics.fmean(row[name] for row in rows) for name in AVERAGED}
            for rows in zip(*(of_seed[arm] for of_seed in by_seed), strict=False)
        ]
        for arm in summary["arms"]
        if all(arm in of_seed for of_seed in by_seed)
    }


def metrics_by_arm(folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Rows of a seed's metrics.jsonl by arm."""
    by_arm: dict[str, list[dict[str, Any]]] = {}
    for row in read_metrics(folder / METRICS_FILE):
        by_arm.setdefault(row["arm"], []).append(row)
    return by_arm


def _runs_table(summary: Mapping[str, Any]) -> ReportTable:
    """Every seed of every arm, with confidence and gates."""
    rows = []
    for arm, facts in summary["arms"].items():
        confidence, health = facts["confidence"] or {}, facts["health"]
        scores = ", ".join("diverged" if score is None else f"{score:.4f}" for score in facts["bits_per_byte_by_seed"])
        rows.append(
            [arm, scores, format_auroc(confidence), format_number(confidence.get("auroc_negative_entropy"))]
            + ([] if health is None else [format_dead(health), format_alarms(health)])
        )
    width = max(map(len, rows))
    note = (
        "AUROC: how well exp(s_N), the norm at the end of the stream, and minus the entropy rank right answers; 0.5 is "
        "chance. In brackets where the logits do not use exp(s_N). Dead: updates whose mean gain fell below a tenth of "
        "its value at initialisation. Alarms: updates ever named by the gate alarm."
    )
    columns = ["arm", "bits per byte by seed", "AUROC exp(s_N)", "AUROC -entropy", "dead updates", "alarms"][:width]
    return ReportTable("Confidence and gates", columns, [row + [DASH] * (width - len(row)) for row in rows], note)


def _trials_table(summary: Mapping[str, Any]) -> list[ReportTable]:
    sweep = summary.get("sweep")
    if not sweep:
        return []
    rows = [
        [
            row["arm"],
            row["key"],
            row["value"],
            format_number(row["bits_per_byte"]) if row["bits_per_byte"] else "diverged",
        ]
        + ["chosen" + (" (at the edge)" if row["at_edge"] else "") if row["chosen"] else ""]
        for row in sweep["trials"]
    ]
    note = f"Trials before the comparison, on seed {sweep['seed']}; each arm had as many, unless it says otherwise."
    return [ReportTable("Tuning", ["arm", "field", "value", "bits per byte", ""], rows, note)]
