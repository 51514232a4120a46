"""The table a comparison prints."""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console
from rich.table import Table

PIPED_WIDTH = 110  # characters, where the output is not a terminal


def print_table(summary: dict[str, Any]) -> None:
    """Prints one row per arm, and the paired differences, from the content of summary.json."""
    arms = summary["arms"]
    table = Table(title=f"{summary['recipe']}, held-out text", title_justify="left")
    columns = ("arm", "bits per byte", "tokens", "training FLOPs", "parameters", "step time", "peak memory")
    for column in columns:
        table.add_column(column, justify="left" if column == "arm" else "right")
    reference = arms.get("pre_norm") or list(arms.values())[-1]
    for name, arm in arms.items():
        ratio = arm["median_step_seconds"] / reference["median_step_seconds"]
        table.add_row(
            name,
            f"{arm['bits_per_byte']:.4f}",
            f"{arm['tokens']:,}",
            f"{arm['flops']:.4g}",
            f"{arm['parameters']:,}",
            f"{arm['median_step_seconds'] * 1000:.0f} ms ({ratio:.2f} x)",
            f"{arm['peak_memory_bytes'] / 2**20:,.0f} MiB",
        )
    Console(width=None if sys.stdout.isatty() else PIPED_WIDTH).print(table)
    for row in summary["differences"]:
        print(
            f"{row['arm_a']} - {row['arm_b']}: {row['bits_per_byte']:+.4f} bits per byte, "
            f"{row['confidence']:.0%} interval {row['low']:+.4f} to {row['high']:+.4f} "
            f"(one seed; paired bootstrap over {row['n_documents']} held-out documents, not over seeds)"
        )
