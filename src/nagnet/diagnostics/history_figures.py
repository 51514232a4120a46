"""Figures of the course of training, from the rows of metrics that a run wrote."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from nagnet.diagnostics import style

Histories = Mapping[str, Sequence[Mapping[str, Any]] | None]  # arm -> rows in order

BITS_CAPTION = "Bits per byte of held-out text during training, where the run scored them."


def bits_figure(histories: Histories) -> Figure:
    """Held-out bits per byte by training tokens (left) and FLOPs (right); see `BITS_CAPTION`."""
    fig, panels = style.figure(height_px=440, columns=2)
    looks = style.arm_styles(histories)
    for axes, (key, quantity) in zip(panels, (("tokens", "tokens"), ("flops", "FLOPs")), strict=True):
        for arm, rows in histories.items():
            if rows:
                x, y = [row[key] for row in rows], [row["bits_per_byte"] for row in rows]
                axes.plot(x, y, **looks[arm], marker="o", markersize=4)
        style.set_text(axes, f"By training {quantity}", f"training {quantity}", "bits per byte")
    panels[0].legend(frameon=False)
    return fig


_QUARTERS = "From the run's metrics: means over each quarter of the depth, first (light, thin) to last (dark, thick). "
STREAM_CAPTION = (
    _QUARTERS + "RMS of the stream after the updates, angle of an update, and cosine of a sublayer's output with the "
    "direction it is added to."
)
GATES_CAPTION = (
    _QUARTERS
    + "Cap |α| of the rotation's tangent; mean gain |α m| without the injection scale; tokens whose modulation "
    "is at its floor (u ≤ 1e-6), where its gradient is clamped away; tokens with |α m| > 0.25; updates with a mean "
    "gain below 0.05, which healthy ones of deep models have too."
)
_STREAM = (
    ("norm", "Norm", "RMS of the stream", 1.0),
    ("rotation", "Rotation", "degrees", 1.0),
    ("alignment", "Alignment", "cosine of F(R) with R", 1.0),
)
_GATES = (
    ("alpha", "Cap", "|α|", 1.0),
    ("mean_gain", "Gain", "mean |α m|", 1.0),
    ("legacy_floor_fraction", "Floor", "tokens (%)", 100.0),
    ("legacy_on_fraction", "> 0.25", "tokens (%)", 100.0),
    ("legacy_dead", "< 0.05", "updates (%)", 100.0),
)


def stream_figure(histories: Histories) -> Figure:
    """The stream by quarter of the depth through training, one row an arm; see `STREAM_CAPTION`."""
    return _by_quarter(histories, _STREAM)


def gates_figure(histories: Histories) -> Figure:
    """The gates by quarter of the depth through training, one row an arm; see `GATES_CAPTION`."""
    return _by_quarter(histories, _GATES)


def _by_quarter(histories: Histories, quantities: Sequence[tuple[str, str, str, float]]) -> Figure:
    present = {arm: rows for arm, rows in histories.items() if rows}
    # What an earlier version wrote has no alpha.
    known = {name for rows in present.values() for row in rows for name in row["health"]}
    quantities = [quantity for quantity in quantities if quantity[0] in known]
    fig, panels = style.figure(height_px=90 + 230 * len(present), rows=len(present), columns=len(quantities))
    looks = style.arm_styles(histories)
    for place, (arm, rows) in enumerate(present.items()):
        of_arm = panels[place * len(quantities) : (place + 1) * len(quantities)]
        for axes, (name, title, unit, factor) in zip(of_arm, quantities, strict=True):
            for quarter in range(1, 5):
                values = [row["health"]["quartiles"].get(name, {}).get(f"q{quarter}", np.nan) for row in rows]
                color, share = looks[arm]["color"], quarter / 4
                line = axes.plot([row["step"] for row in rows], factor * np.array(values), color=color)[0]
                line.set(alpha=0.3 + 0.7 * share, linewidth=0.8 + 1.6 * share, marker="o" if len(rows) == 1 else "")
            if factor == 100.0:
                axes.set_ylim(0.0, max(1.0, axes.get_ylim()[1]))
            of_first = f"{looks[arm]['label']}\n{unit}" if axes is of_arm[0] else unit
            x_label = "step" if place == len(present) - 1 else ""
            style.set_text(axes, title if place == 0 else "", x_label, of_first)
    return fig
