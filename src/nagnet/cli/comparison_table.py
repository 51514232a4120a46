"""The table a comparison prints."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

from nagnet.training.comparison_summary import (
    describe_difference,
    format_alarms,
    format_auroc,
    format_dead,
    format_number,
)

PIPED_WIDTH = 140  # characters, where the output is not a terminal


def print_table(summary: dict[str, Any]) -> None:
    """Prints one row per arm, the paired differences, confidence and gates, from the content of summary.json."""
    arms = summary["arms"]
    seeds = len(summary["seeds"])
    title = f"{summary['recipe']}, held-out text" + (f", mean of {seeds} seeds" if seeds > 1 else "")
    table = Table(title=title, title_justify="left")
    columns = ("arm", "bits per byte", "tokens", "training FLOPs", "parameters", "step time", "peak memory")
    for column in columns:
        table.add_column(column, justify="left" if column == "arm" else "right", no_wrap=True)
    reference = arms[summary["baseline"]]["median_step_seconds"]
    for name, arm in arms.items():
        step, score = arm["median_step_seconds"], arm["bits_per_byte"]
        table.add_row(
            name,
            "diverged" if score is None else f"{score:.4f}",
            f"{arm['tokens']:,}",
            f"{arm['flops']:.4g}",
            f"{arm['parameters']:,}",
            f"{step * 1000:.0f} ms ({step / reference:.2f} x)" if step and reference else "-",
            f"{arm['peak_memory_bytes'] / 2**20:,.0f} MiB",
        )
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)
    for row in summary["differences"]:
        print(describe_difference(row))
    for name, arm in arms.items():
        print(f"{name}: {_inside(arm)}")


def _inside(arm: dict[str, Any]) -> str:
    parts = []
    confidence, health = arm["confidence"], arm["health"]
    if confidence is not None:
        entropy = format_number(confidence["auroc_negative_entropy"])
        parts.append(f"AUROC of exp(s_N) {format_auroc(confidence)}, of -entropy {entropy}")
    if health is not None:
        parts.append(f"dead updates {format_dead(health)}, alarms {format_alarms(health)}")
    return "; ".join(parts) or "not measured"
