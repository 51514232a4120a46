"""Figures of what each update does: sizes, modulation, alignment, temperature, removal, outliers.

As in `figures`, each takes a dict from arm name to data, None for an arm that has no such thing, and has its caption
beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from nagnet.diagnostics import style
from nagnet.diagnostics.figures import share_log_y
from nagnet.diagnostics.health import StreamHealth
from nagnet.diagnostics.temperature import FREQUENCY_STEP, TemperatureSplit
from nagnet.diagnostics.updates import (
    BlockRemoval,
    ModulationHistogram,
    Outliers,
    PreferredDirections,
    RelativeUpdate,
)

RELATIVE_CAPTION = (
    "Size of each update relative to the stream it changes, ‖x′ − x‖ / ‖x‖, token mean; attention and MLP apart. "
    "For norm-agnostic it is |α| m, less where a branch is damped or a token skips. Where the norm grows with depth "
    "and the branches do not, it falls."
)


def relative_figure(sizes: Mapping[str, RelativeUpdate | None]) -> Figure:
    """Relative size of the updates, attention (left) and MLP (right); see `RELATIVE_CAPTION`."""
    fig, panels = _by_sublayer({arm: size and size.mean for arm, size in sizes.items()}, "relative size ‖x′ − x‖ / ‖x‖")
    share_log_y(panels)
    return fig


ALIGNMENT_CAPTION = (
    "Cosine between a sublayer's output F(R) and the direction R that it is added to, token mean; attention and MLP "
    "apart. Far from 0 a branch mostly rescales the stream: that part is what the norm-agnostic rule takes out "
    "before it normalises the rest."
)


def alignment_figure(health: Mapping[str, StreamHealth | None]) -> Figure:
    """Alignment of branches with the stream, attention (left) and MLP (right); see `ALIGNMENT_CAPTION`."""
    values = {arm: part and np.array(part.alignment) for arm, part in health.items()}
    fig, panels = _by_sublayer(values, "cosine of F(R) with R")
    bottom = min(axes.get_ylim()[0] for axes in panels)
    top = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.axhline(0.0, color=style.INK, linewidth=0.8)
        axes.set_ylim(bottom, top)
    return fig


def _by_sublayer(values: Mapping[str, Any], quantity: str) -> tuple[Figure, list[Axes]]:
    """Lines by update, attention left and MLP right, with one legend below."""
    fig, panels = style.figure(height_px=480, columns=2)
    looks = style.arm_styles(values)
    for axes, sublayer, start in zip(panels, ("Attention", "MLP"), (0, 1), strict=True):
        for arm, of_arm in values.items():
            if of_arm is not None:
                every = range(start + 1, len(of_arm) + 1, 2)
                axes.plot(every, np.asarray(of_arm)[start::2], **looks[arm], marker="o", markersize=3.5)
        axes.set_xlim(left=0)
        style.set_text(axes, sublayer, "update", quantity)
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return fig, panels


MODULATION_CAPTION = (
    "How the tokens share out over the modulation m of each update, which says how much of its cap |α| a token "
    "uses: darker is a larger share of the tokens. Line: token mean. Attention has the odd updates, the MLP the "
    "even ones. At the start of training every m is near 1/2; a column near 0 is a gate that has shut."
)


def modulation_figure(histograms: Mapping[str, ModulationHistogram | None]) -> Figure:
    """Histogram of m by update, one panel an arm; see `MODULATION_CAPTION`."""
    present = _present(histograms)
    fig, panels = style.figure(height_px=100 + 330 * len(present), rows=len(present))
    looks = style.arm_styles(histograms)
    for axes, (arm, histogram) in zip(panels, present.items(), strict=True):
        updates = histogram.update_index.numpy()
        share = 100.0 * histogram.share.T.numpy()
        edges = np.append(updates - 0.5, updates[-1] + 0.5)
        mesh = axes.pcolormesh(edges, histogram.edges.numpy(), share, cmap="Blues", vmin=0.0, rasterized=True)
        axes.plot(updates, histogram.mean.numpy(), color=style.INK, linewidth=1.2, marker="o", markersize=2.5)
        axes.set_ylim(0.0, 1.0)
        axes.grid(False)
        fig.colorbar(mesh, ax=axes, label="tokens (%)", pad=0.01)
        style.set_text(axes, f"Modulation, {looks[arm]['label']}", "update", "modulation m")
    return fig


PREFERRED_CAPTION = (
    "Which directions of the stream each update opens for: cosine between the vectors Σ m R / Σ m of two updates "
    "(left), and between the plain means of R (right), the control. What the left shows beyond the right is the "
    "gates' doing; neighbours read nearly the same stream, so the diagonal is broad in both."
)


def preferred_figure(directions: Mapping[str, PreferredDirections | None]) -> Figure:
    """Cosine matrices of preferred directions and their control, one row an arm; see `PREFERRED_CAPTION`."""
    present = _present(directions)
    fig, panels = style.figure(height_px=60 + 420 * len(present), rows=len(present), columns=2)
    looks = style.arm_styles(directions)
    lowest = min(float(part.min()) for found in present.values() for part in (found.weighted, found.unweighted))
    for row, (arm, matrices) in enumerate(present.items()):
        pair = panels[2 * row : 2 * row + 2]
        kinds = ((f"{looks[arm]['label']}: gated", matrices.weighted), ("control: plain mean", matrices.unweighted))
        image = None
        for axes, (kind, matrix) in zip(pair, kinds, strict=True):
            first, last = 0.5, len(matrix) + 0.5
            image = axes.imshow(matrix.numpy(), cmap="cividis", vmin=lowest, vmax=1, extent=(first, last, last, first))
            axes.grid(False)
            style.set_text(axes, kind, "update", "update")
        assert image is not None
        fig.colorbar(image, ax=pair, label="cosine", shrink=0.85, pad=0.03)
    return fig


TEMPERATURE_CAPTION = (
    f"Where exp(s_N) comes from, by how often a token occurs in the text (groups of ×{FREQUENCY_STEP}; marker: the "
    "least of a group): mean log of the embedding's RMS, of G_encode, of the gain through all updates (travel), and "
    "their sum s_N = −log T_eff, natural logarithms. Position 0 is left out. A rule that normalises its embeddings "
    "has 0 for the first two; where the logits do not use exp(s_N), the sum is no temperature."
)


def temperature_figure(splits: Mapping[str, TemperatureSplit | None]) -> Figure:
    """Parts of the log norm by token frequency, one panel an arm; see `TEMPERATURE_CAPTION`."""
    present = _present(splits)
    fig, panels = style.figure(height_px=480, columns=len(present))
    looks = style.arm_styles(splits)
    for axes, (arm, split) in zip(panels, present.items(), strict=True):
        least = split.least.numpy()
        parts = (
            ("embedding", split.embedding.numpy(), "s"),
            ("encode", np.full(len(least), split.encode), "^"),
            ("travel", split.travel.numpy(), "D"),
            ("sum, s_N", split.total.numpy(), "o"),
        )
        for (name, values, marker), color in zip(parts, _PART_COLORS, strict=True):
            width = 2.4 if marker == "o" else 1.4
            axes.plot(least, values, color=color, marker=marker, markersize=4.5, linewidth=width, label=name)
        axes.axhline(0.0, color=style.INK, linewidth=0.8)
        axes.set_xscale("log")
        note = "" if split.in_logits else "\n(not in its logits)"
        style.set_text(axes, looks[arm]["label"] + note, "occurrences of the token", "mean log")
    _share_y(panels)
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return fig


_PART_COLORS = ("#009E73", "#E69F00", "#56B4E9", style.INK)

WIDE_LOSS = 1.0  # nats; beyond it the axis is linear up to 0.1 and logarithmic from there
REMOVAL_CAPTION = (
    "Next-token loss when the two updates of one block leave the stream as it is, minus the loss of the whole "
    "model. The evaluation rows alone, so small differences are noise; nothing is trained after the removal. A "
    "block near 0 barely matters where it stands."
)


def removal_figure(removals: Mapping[str, BlockRemoval | None]) -> Figure:
    """Loss added by removing each block; see `REMOVAL_CAPTION`."""
    fig, (axes,) = style.figure(height_px=460)
    looks = style.arm_styles(removals)
    for arm, removal in _present(removals).items():
        added = removal.loss.numpy() - removal.full_loss
        label = f"{looks[arm]['label']} (whole: {removal.full_loss:.3f})"
        axes.plot(range(1, len(added) + 1), added, **{**looks[arm], "label": label}, marker="o", markersize=4)
    axes.axhline(0.0, color=style.INK, linewidth=0.8)
    if max(float(removal.loss.max()) - removal.full_loss for removal in _present(removals).values()) > WIDE_LOSS:
        axes.set_yscale("symlog", linthresh=0.1)
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    style.set_text(axes, "What is lost without one block", "block removed", "loss added (nats per token)")
    axes.legend(frameon=False)
    return fig


WIDE_RATIO = 10.0  # of the largest value to the smallest, beyond which an axis is logarithmic
OUTLIERS_CAPTION = (
    "Left: largest channel of the stream's direction over its RMS after each update, token mean. Middle: kurtosis "
    "of the channels there (3 for a normal distribution). Right: kurtosis of every weight matrix, in the order of "
    "the model. Large values make numbers of few bits lose the rest."
)


def outlier_figure(found: Mapping[str, Outliers | None]) -> Figure:
    """Outliers of activations and weights; see `OUTLIERS_CAPTION`."""
    fig, panels = style.figure(height_px=480, columns=3)
    looks = style.arm_styles(found)
    for arm, values in _present(found).items():
        updates = range(1, len(values.stream_kurtosis) + 1)
        panels[0].plot(updates, values.stream_max_over_rms.numpy(), **looks[arm])
        panels[1].plot(updates, values.stream_kurtosis.numpy(), **looks[arm])
        color = looks[arm]["color"]
        panels[2].plot(values.weight_kurtosis.numpy(), "o", color=color, markersize=3, alpha=0.6)
    style.set_text(panels[0], "Largest channel", "update", "max / RMS")
    style.set_text(panels[1], "Kurtosis of channels", "update", "kurtosis")
    style.set_text(panels[2], "Kurtosis of weights", "matrix", "kurtosis")
    for axes in panels[1:]:
        low, high = axes.get_ylim()
        if high > WIDE_RATIO * max(low, 1.0):
            share_log_y([axes])
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return fig


def _present(values: Mapping[str, Any]) -> dict[str, Any]:
    return {arm: value for arm, value in values.items() if value is not None}


def _share_y(panels: list[Axes]) -> None:
    limits = [axes.get_ylim() for axes in panels]
    for axes in panels:
        axes.set_ylim(min(low for low, _ in limits), max(high for _, high in limits))
