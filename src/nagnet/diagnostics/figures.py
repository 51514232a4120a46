"""The figures of a comparison: each takes a dict from arm name to data and has its caption beside it.

Arms look the same in every figure if every figure is given all of them in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from nagnet.diagnostics import style
from nagnet.diagnostics.confidence import ConfidenceDeciles, ConfidenceSummary
from nagnet.diagnostics.geometry import GainByUpdate, NormByDepth, RotationByDepth
from nagnet.errors import UserError

MAX_RAW_POINTS = 1000  # per curve, so that a long run does not swell the report
SMOOTHED_SHARE = 0.05
HIDDEN_SHARE = 0.08  # of a run, at its start, where the loss falls by more than the arms ever differ

LOSS_CAPTION = (
    "Training loss (cross entropy, nats per token) against the tokens seen and against the FLOPs spent "
    "(multiply-add = 2, training = 3 × forward). Faint: the loss of each logged step; bold: running mean over "
    f"{SMOOTHED_SHARE:.0%} of the run. The legend has the mean over the last {SMOOTHED_SHARE:.0%}. The axis leaves "
    "out the first fall."
)


def loss_figure(metrics: Mapping[str, Sequence[Mapping[str, float]]]) -> Figure:
    """Training loss against tokens (left) and FLOPs (right); see `LOSS_CAPTION`.

    Args:
        metrics: for each arm its logged rows in order, with the keys ``tokens``, ``flops`` (both since the start)
            and ``loss`` (nats per token).

    Raises:
        UserError: if an arm has no rows.
    """
    for arm, rows in metrics.items():
        if not rows:
            raise UserError(f"arm {arm} has no logged training steps, so it has no loss curve")
    fig, panels = style.figure(height_px=500, columns=2)
    looks = style.arm_styles(metrics)
    tops, bottoms = [], []
    quantities = (("tokens", "training tokens"), ("flops", "training FLOPs"))
    for axes, (key, quantity) in zip(panels, quantities, strict=True):
        largest = max(rows[-1][key] for rows in metrics.values())
        unit, prefix = _unit(largest)
        for arm, rows in metrics.items():
            x = np.array([row[key] for row in rows]) / unit
            loss = np.array([row["loss"] for row in rows], dtype=np.float64)
            window = max(1, round(SMOOTHED_SHARE * len(loss)))
            smooth = running_mean(loss, window)
            stride = math.ceil(len(loss) / MAX_RAW_POINTS)
            color = looks[arm]["color"]
            axes.plot(x[::stride], loss[::stride], color=color, linewidth=0.6, alpha=0.15)
            label = f"{looks[arm]['label']}: {loss[-window:].mean():.3f} at the end"
            axes.plot(x[::stride], smooth[::stride], **{**looks[arm], "label": label})
            late = smooth[int(HIDDEN_SHARE * len(smooth)) :]
            tops.append(np.nanmax(late, initial=0.0))
            bottoms.append(np.nanmin(late, initial=np.inf))
        axes.set_xlim(0, largest / unit)
        style.set_text(axes, f"Loss by {quantity}", f"{quantity}{prefix}", "training loss (nats per token)")
    for axes in panels:
        _limit_loss(axes, min(bottoms), max(tops))
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return fig


NORM_CAPTION = (
    "RMS of the residual stream before the first update and after each one (attention and MLP count one each). "
    "Left: mean over tokens (thick), without the token at position 0 (thin), and median (dotted); colours as on the "
    "right. Right: the token at position 0 alone, where a model may park an outlier that dominates the mean."
)


def norm_figure(norms: Mapping[str, NormByDepth]) -> Figure:
    """Norm of the stream by depth: all tokens (left), position 0 (right); see `NORM_CAPTION`."""
    fig, panels = style.figure(height_px=500, columns=2)
    looks = style.arm_styles(norms)
    for arm, norm in norms.items():
        depth = range(len(norm.mean))
        color = looks[arm]["color"]
        panels[0].plot(depth, norm.mean.tolist(), **looks[arm])
        panels[0].plot(depth, norm.mean_without_first.tolist(), color=color, linewidth=1.0)
        panels[0].plot(depth, norm.median.tolist(), color=color, linewidth=1.0, linestyle=":")
        panels[1].plot(depth, norm.first.tolist(), **looks[arm])
    titles = ("All tokens", "The token at position 0")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_xlim(0, max((len(norm.mean) - 1 for norm in norms.values()), default=1))
        style.set_text(axes, title, "depth (updates)", "RMS of the stream")
    share_log_y(panels)
    kinds = (("mean", "-", 2.2), ("mean without position 0", "-", 1.0), ("median", ":", 1.0))
    entries = [(name, style.INK, dash, width) for name, dash, width in kinds]
    panels[0].legend(handles=_handles(entries), frameon=False)
    panels[1].legend(frameon=False)
    return fig


ROTATION_CAPTION = (
    "Angle between the direction of the stream before and after an update, token mean, in degrees: of each update "
    "(right; legend: the last one) and summed over depth (left). The sum counts turning there and back, so it may pass "
    "180°."
)


def rotation_figure(rotations: Mapping[str, RotationByDepth]) -> Figure:
    """Cumulative rotation by depth (left) and angle of each update (right); see `ROTATION_CAPTION`."""
    fig, panels = style.figure(height_px=500, columns=2)
    looks = style.arm_styles(rotations)
    for arm, rotation in rotations.items():
        n_updates = len(rotation.angle)
        panels[0].plot(range(n_updates + 1), [0.0, *rotation.cumulative.tolist()], **looks[arm])
        last = {**looks[arm], "label": f"{looks[arm]['label']}: last {rotation.angle[-1]:.1f}°"}
        panels[1].plot(range(1, n_updates + 1), rotation.angle.tolist(), **last)
    style.set_text(panels[0], "Rotation so far", "depth (updates)", "cumulative rotation (degrees)")
    style.set_text(panels[1], "Rotation of each update", "update", "rotation (degrees)")
    for axes in panels:
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.legend(frameon=False)
    return fig


GAIN_CAPTION = (
    "Size of each norm-agnostic update: |α|, which caps the tangent of the rotation, and the token mean of |α m|, "
    "the part that is used; attention and MLP apart. Dotted: where |α| started. A gate counts as shut where |α m| "
    "is below a tenth of its value at the start of training."
)


def gain_figure(gains: Mapping[str, GainByUpdate | None]) -> Figure:
    """|alpha| and mean |alpha m| by update, attention (left) and MLP (right); see `GAIN_CAPTION`.

    Args:
        gains: for each arm its gains; an arm of None (a rule without gains) keeps its colour free.

    Raises:
        UserError: if no arm has gains.
    """
    present = {arm: gain for arm, gain in gains.items() if gain is not None}
    if not present:
        raise UserError("no arm is norm-agnostic, so there are no gains to draw")
    fig, panels = style.figure(height_px=500, columns=2)
    looks = style.arm_styles(gains)
    for axes, sublayer, remainder in zip(panels, ("Attention", "MLP"), (1, 0), strict=True):
        for arm, gain in present.items():
            chosen = gain.update_index % 2 == remainder
            index = gain.update_index[chosen].tolist()
            color, suffix = looks[arm]["color"], f" ({looks[arm]['label']})" if len(present) > 1 else ""
            lines: tuple[tuple[Any, str, dict[str, Any]], ...] = (
                (gain.initial_alpha, f"|α| at the start{suffix}", {"color": style.MUTED, "linestyle": ":"}),
                (gain.alpha, f"|α|{suffix}", {"color": color, "linestyle": "--"}),
                (gain.mean_gain, f"mean |α m|{suffix}", {"color": color, "linewidth": 2.2, "marker": "o"}),
            )
            for values, label, look in lines:
                axes.plot(index, values[chosen].tolist(), label=label, markersize=3.5, **look)
        axes.set_xlim(0, 1 + max(int(gain.update_index.max()) for gain in present.values()))
        style.set_text(axes, sublayer, "update", "tangent of the rotation")
    share_log_y(panels)
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    return fig


DIFFERENCE_CAPTION = (
    "Held-out bits per byte of each arm minus those of the baseline trained on the same seed; negative is better. "
    "Small: each seed. Large: their mean, with its 95% interval (Student's t over seeds; with one seed a bootstrap "
    "over held-out documents, which says nothing of other seeds)."
)


def difference_figure(differences: Sequence[Mapping[str, Any]]) -> Figure:
    """Paired differences by arm, one row each; see `DIFFERENCE_CAPTION`.

    Args:
        differences: rows of a summary, with ``arm_a``, ``arm_b``, ``bits_per_byte``, ``low``, ``high`` and ``by_seed``;
            None for what diverged.

    Raises:
        UserError: if there are none.
    """
    if not differences:
        raise UserError("there are no differences to draw; a comparison has two arms or more")
    baseline = differences[0]["arm_b"]
    looks = style.arm_styles([baseline, *(row["arm_a"] for row in differences)])
    fig, (axes,) = style.figure(height_px=170 + 60 * len(differences))
    axes.axvline(0.0, color=style.INK, linewidth=1.2)
    for place, row in enumerate(differences):
        color = looks[row["arm_a"]]["color"]
        seeds = [value for value in row["by_seed"] if value is not None]
        axes.plot(seeds, [place] * len(seeds), "o", color=color, markersize=4.5, alpha=0.55)
        if row["low"] is not None:
            axes.plot([row["low"], row["high"]], [place, place], color=color, linewidth=2.2)
            axes.plot([row["bits_per_byte"]], [place], "D", color=color, markersize=8)
    diverged = [" (diverged)" if None in row["by_seed"] else "" for row in differences]
    labels = [looks[row["arm_a"]]["label"] + note for row, note in zip(differences, diverged, strict=True)]
    axes.set_yticks(range(len(differences)), labels)
    axes.set_ylim(len(differences) - 0.5, -0.5)
    baseline_label = looks[baseline]["label"]
    style.set_text(axes, "Against the baseline on the same seed", f"bits per byte minus {baseline_label}", "")
    return fig


CONFIDENCE_CAPTION = (
    "Held-out tokens sorted by a confidence signal into ten groups of equal size, and what the model did in each: "
    "mean entropy of its prediction, mean next-token loss, share of top-1 hits. Filled: sorted by exp(s_N), the "
    "RMS of the stream at the end; it scales the logits of the norm-agnostic model, while a pre-norm model "
    "normalises it away before its head, so there it is a control. Open: sorted by minus the entropy. AUROC: of "
    "the signal against top-1 correctness, 0.5 is chance."
)


def confidence_figure(summaries: Mapping[str, ConfidenceSummary]) -> Figure:
    """Entropy, loss and accuracy by decile of both confidence signals; see `CONFIDENCE_CAPTION`."""
    fig, panels = style.figure(height_px=520, columns=3)
    looks = style.arm_styles(summaries)

    def draw(deciles: ConfidenceDeciles, look: dict[str, Any]) -> None:
        accuracy = 100 * deciles.accuracy
        for axes, values in zip(panels, (deciles.entropy, deciles.loss, accuracy), strict=True):
            axes.plot(range(1, len(values) + 1), values, **look)

    for arm, summary in summaries.items():
        color = looks[arm]["color"]
        marks = {"marker": "o", "markersize": 4.5, "markerfacecolor": "white"}
        draw(summary.negative_entropy.deciles, {"color": color, "linewidth": 1.0, **marks})
        draw(summary.scale.deciles, {**looks[arm], "marker": "o", "markersize": 5})
    titles = ("Entropy (nats)", "Next-token loss (nats)", "Top-1 accuracy (%)")
    for axes, title in zip(panels, titles, strict=True):
        axes.set_ylim(bottom=0)
        axes.set_xticks([1, 4, 7, 10])
        style.set_text(axes, title, "decile of confidence", "")
    entries = []
    for arm, summary in summaries.items():
        label, color, dash = looks[arm]["label"], looks[arm]["color"], looks[arm]["linestyle"]
        control = "" if summary.scale_in_logits else " (not in its logits)"
        entries.append((f"{label}, exp($s_N$){control}: AUROC {summary.scale.auroc:.3f}", color, dash, 2.2))
        entries.append((f"{label}, −entropy: AUROC {summary.negative_entropy.auroc:.3f}", color, "-", 1.0))
    fig.legend(handles=_handles(entries, markers=True), loc="outside lower center", ncols=2, frameon=False)
    return fig


def running_mean(values: np.ndarray, window: int) -> np.ndarray:
    """Mean over ``window`` values (the next odd number) around each place, over fewer at both ends; float64 [n]."""
    half = window // 2
    return np.array([values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))])


def _limit_loss(axes: Axes, bottom: float, top: float) -> None:
    """Leaves room around the curves; a run that diverged or logged one step keeps matplotlib's own limits."""
    if np.isfinite([bottom, top]).all() and top > bottom:
        margin = 0.08 * (top - bottom)
        axes.set_ylim(bottom - margin, top + margin)


def _unit(largest: float) -> tuple[float, str]:
    """A power of 1,000 that brings ``largest`` to 1..1,000, and how to write it after a quantity."""
    power = 3 * int(math.log10(largest) // 3) if largest > 0 else 0
    names = {0: "", 3: " (thousands)", 6: " (millions)", 9: " (billions)"}
    superscript = str(power).translate(str.maketrans("0123456789", "⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return 10.0**power, names.get(power, f" (10{superscript})")


def share_log_y(panels: Sequence[Axes]) -> None:
    """One logarithmic axis for all panels that writes 0.2 and 50, where matplotlib writes 2 x 10^-1 and nothing."""
    for axes in panels:
        axes.set_yscale("log")
    limits = [axes.get_ylim() for axes in panels]
    low, high = min(bottom for bottom, _ in limits), max(top for _, top in limits)
    steps = (1.0, 2.0, 5.0) if high < 1e3 * low else (1.0,)
    for axes in panels:
        axes.set_ylim(low, high)
        axes.yaxis.set_major_locator(LogLocator(subs=steps))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(NullFormatter())


def _handles(entries: Sequence[tuple[str, str, Any, float]], markers: bool = False) -> list[Line2D]:
    """Legend lines from (label, colour, dash, width); thick lines get filled markers and thin ones open."""
    handles = []
    for label, color, dash, width in entries:
        line = Line2D([], [], color=color, linestyle=dash, linewidth=width, label=label)
        if markers:
            line.set(marker="o", markersize=5, markerfacecolor=color if width > 1 else "white")
        handles.append(line)
    return handles
