"""Figures of attention, of predictions and of skipping."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm
from matplotlib.figure import Figure

from nagnet.diagnostics import style
from nagnet.diagnostics.calibration import Judgement
from nagnet.diagnostics.sinks import AttentionSinks
from nagnet.diagnostics.skipping import SkipMap

MAPS_SHOWN = 6  # layers of an arm
SIGNALS = {"scale": "exp(s_N)", "negative_entropy": "−entropy", "max_probability": "largest probability"}

SINKS_CAPTION = (
    "Attention probabilities averaged over sequences and heads, queries from position 1 on: mass on key 0 (left), "
    "on keys 0 to 3 (middle) and on the query's own position (right), by block. In the legend: layers with more "
    "than half of their mass on key 0."
)


def sinks_figure(sinks: Mapping[str, AttentionSinks | None]) -> Figure:
    """Attention mass by block on the first key, the first four and the diagonal; see `SINKS_CAPTION`."""
    fig, panels = style.figure(height_px=460, columns=3)
    looks = style.arm_styles(sinks)
    titles = ("First key", "First four keys", "Own position")
    for arm, found in sinks.items():
        if found is not None:
            layers = range(1, len(found.first_key) + 1)
            label = f"{looks[arm]['label']}: {found.layers_above_half} of {len(layers)}"
            for axes, values in zip(panels, (found.first_key, found.first_four, found.diagonal), strict=True):
                axes.plot(layers, 100 * values.numpy(), **{**looks[arm], "label": label}, marker="o", markersize=3.5)
    for axes, title in zip(panels, titles, strict=True):
        axes.set_ylim(bottom=0)
        style.set_text(axes, title, "block", "attention mass (%)")
    fig.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    return fig


MAPS_CAPTION = (
    "Attention probabilities, queries (down) by keys (across), averaged over sequences and heads; blocks spread "
    "evenly over the depth. Queries from position 1 on; colour is the square root of the probability, each map "
    "scaled by its own maximum. A bright left edge is a sink on the first key."
)


def maps_figure(sinks: Mapping[str, AttentionSinks | None]) -> Figure:
    """Heat maps of attention, one row an arm; see `MAPS_CAPTION`."""
    present = {arm: found for arm, found in sinks.items() if found is not None}
    shown = min(MAPS_SHOWN, *(len(found.maps) for found in present.values()))
    fig, panels = style.figure(height_px=40 + 200 * len(present), rows=len(present), columns=shown)
    looks = style.arm_styles(sinks)
    for row, (arm, found) in enumerate(present.items()):
        chosen = np.linspace(0, len(found.maps) - 1, shown).round().astype(int)
        for place, layer in enumerate(chosen):
            axes = panels[row * shown + place]
            image = np.sqrt(np.nan_to_num(found.maps[layer, 1:].numpy()))
            axes.imshow(image, cmap="viridis", vmin=0.0, vmax=max(float(image.max(initial=0.0)), 1e-12), aspect="auto")
            axes.grid(False)
            axes.set_xticks([])
            axes.set_yticks([])
            axes.set_title(f"block {layer + 1}", color=style.INK, fontsize=9)
            if place == 0:
                axes.set_ylabel(looks[arm]["label"], color=style.INK, fontweight="bold")
    return fig


RELIABILITY_CAPTION = (
    "Left: how often the likeliest token came, against the probability it was given; on the diagonal the model can "
    "be taken at its word. Legend: expected calibration error over 15 bins of equal width. Right: accuracy on the "
    "tokens that a signal is surest of, against their share of all tokens. Solid exp(s_N), dashed minus the "
    "entropy, dotted the largest probability; the higher line knows better what it knows."
)
_SIGNAL_DASHES = {"scale": "-", "negative_entropy": "--", "max_probability": ":"}


def reliability_figure(judgements: Mapping[str, Judgement]) -> Figure:
    """Reliability diagram (left) and accuracy by coverage (right); see `RELIABILITY_CAPTION`."""
    fig, panels = style.figure(height_px=540, columns=2)
    looks = style.arm_styles(judgements)
    panels[0].plot([0, 100], [0, 100], color=style.MUTED, linewidth=1.0)
    for arm, judged in judgements.items():
        found, color = judged.reliability, looks[arm]["color"]
        look = {**looks[arm], "label": f"{looks[arm]['label']}: error {100 * found.calibration_error:.1f}%"}
        panels[0].plot(100 * found.probability, 100 * found.accuracy, **look, marker="o", markersize=4)
        for name, curve in judged.coverage.items():
            label = f"{looks[arm]['label']}, {SIGNALS[name]}"
            dash = _SIGNAL_DASHES[name]
            panels[1].plot(100 * curve.share, 100 * curve.accuracy, color=color, linestyle=dash, label=label)
    style.set_text(panels[0], "Reliability", "probability of the likeliest token (%)", "it came (%)")
    style.set_text(panels[1], "Accuracy by coverage", "tokens answered, surest first (%)", "accuracy on them (%)")
    for axes in panels:
        axes.set_xlim(0, 100)
    panels[0].set_ylim(0, 100)
    panels[0].legend(frameon=False, loc="upper left")
    panels[1].legend(frameon=False, fontsize=8)
    return fig


MIN_TOKENS = 10  # behind a point of a mean
LOSS_BY_SCALE_CAPTION = (
    "Every scored token by s_N, the log of the stream's norm at the end, and by the loss of the token that came. "
    f"Darker: more tokens, on a logarithmic scale. Line: mean loss of the tokens at that s_N, where there are at least "
    f"{MIN_TOKENS}. Title: Spearman rank correlation of the two. A control where s_N does not reach the logits."
)


def loss_by_scale_figure(judgements: Mapping[str, Judgement]) -> Figure:
    """Density of tokens by s_N and next-token loss, one panel an arm; see `LOSS_BY_SCALE_CAPTION`."""
    fig, panels = style.figure(height_px=440, columns=len(judgements))
    looks = style.arm_styles(judgements)
    top = max(judged.loss_by_scale.loss[-1] for judged in judgements.values())
    for axes, (arm, judged) in zip(panels, judgements.items(), strict=True):
        found, color = judged.loss_by_scale, looks[arm]["color"]
        shades = LinearSegmentedColormap.from_list(arm, [style.BACKGROUND, color])
        count = np.where(found.n_tokens > 0, found.n_tokens, np.nan).T
        norm = LogNorm(vmin=0.5, vmax=max(2.0, float(found.n_tokens.max())))
        axes.pcolormesh(found.log_norm, found.loss, count, cmap=shades, norm=norm, rasterized=True)
        enough = found.n_tokens.sum(axis=1) >= MIN_TOKENS
        middle = (found.log_norm[1:] + found.log_norm[:-1]) / 2
        axes.plot(middle, np.where(enough, found.mean_loss, np.nan), color=style.INK, linewidth=1.8)
        axes.set_ylim(0, top)
        control = "" if judged.summary.scale_in_logits else ", control"
        title = f"{looks[arm]['label']}{control}: {judged.spearman_loss['scale']:.2f}"
        style.set_text(axes, title, "s_N", "next-token loss (nats)" if axes is panels[0] else "")
    return fig


SKIPS_CAPTION = (
    "Where the model skips. Left: share of tokens that skip each sublayer, attention and MLP. Right: of one "
    "sequence, which sublayers (down) each token (across) ran (dark) and skipped (light)."
)


def skips_figure(maps: Mapping[str, SkipMap | None]) -> Figure:
    """Skip rate by sublayer and the run/skip map of the first sequence, one row an arm; see `SKIPS_CAPTION`."""
    present = {arm: found for arm, found in maps.items() if found is not None}
    fig, panels = style.figure(height_px=60 + 380 * len(present), rows=len(present), columns=2)
    looks = style.arm_styles(maps)
    for row, (arm, found) in enumerate(present.items()):
        rates, image = panels[2 * row : 2 * row + 2]
        percent = 100 * found.skip_rate.numpy()
        color = looks[arm]["color"]
        for sublayer, start, marker, face in (("attention", 0, "o", color), ("MLP", 1, "s", "white")):
            places = range(start + 1, len(percent) + 1, 2)
            label = f"{sublayer}, mean {np.mean(percent[start::2]):.0f}%"
            rates.plot(places, percent[start::2], color=color, marker=marker, markerfacecolor=face, label=label)
        rates.set_ylim(0, 100)
        rates.legend(frameon=False)
        style.set_text(rates, f"Skip rate, {looks[arm]['label']}", "update", "tokens that skip (%)")
        ran = found.run[:, 0].numpy()
        span = (-0.5, ran.shape[1] - 0.5, len(ran) + 0.5, 0.5)
        image.imshow(ran, cmap="Blues", vmin=-0.25, vmax=1.25, extent=span, aspect="auto", interpolation="nearest")
        image.grid(False)
        style.set_text(image, "First sequence", "position", "update")
    return fig
