"""One look for every figure of the project.

The colours stay apart for colour-blind readers (after Okabe and Ito); a residual rule has a dash pattern too,
for print in grey. Nothing here touches matplotlib's global state: no pyplot, no rcParams that outlive a call.
Sizes follow from ``DPI``: matplotlib's own 10 pt text is 17 pixels tall in a figure 1,000 pixels wide.
"""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import TypedDict

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from nagnet.files import write_atomically

DPI = 120

INK = "#222222"
MUTED = "#6b6b6b"
GRID = "#e3e3e3"
BACKGROUND = "#ffffff"


class LineStyle(TypedDict):
    """Keyword arguments of ``Axes.plot`` that mark one arm."""

    color: str
    linestyle: str | tuple[int, tuple[int, ...]]
    linewidth: float
    label: str


_DASHED = (0, (5, 2))
_DOTTED = (0, (1, 1))
_DASH_DOT = (0, (5, 1, 1, 1))

_ARMS: dict[str, LineStyle] = {
    "norm_agnostic": LineStyle(color="#0072B2", linestyle="-", linewidth=2.4, label="norm-agnostic"),
    "pre_norm": LineStyle(color="#D55E00", linestyle=_DASHED, linewidth=2.0, label="pre-norm"),
    "post_norm": LineStyle(color="#009E73", linestyle=_DASH_DOT, linewidth=2.0, label="post-norm"),
    "none": LineStyle(color="#4D4D4D", linestyle=_DOTTED, linewidth=2.4, label="no residual"),
}
# For arms without a colour of their own, in the order in which a figure names them.
_OTHER_COLORS = ("#AA3377", "#E69F00", "#56B4E9", "#332288", "#999933")
_OTHER_DASHES = ("-", _DASHED, _DASH_DOT)  # from one to the next where the colours are used up


def arm_styles(arms: Iterable[str]) -> dict[str, LineStyle]:
    """How each arm of a figure is drawn.

    Args:
        arms: Names of arms. A residual rule's name has the same look in every figure; other names take the
            remaining colours, then dashes, in the order given here, so name all arms of a report at once.

    Returns:
        For each arm the keyword arguments of ``Axes.plot``: color, linestyle, linewidth (pt) and label.
    """
    styles: dict[str, LineStyle] = {}
    for arm in arms:
        if arm in _ARMS:
            styles[arm] = _ARMS[arm]
        elif arm not in styles:
            round_, index = divmod(sum(name not in _ARMS for name in styles), len(_OTHER_COLORS))
            dashes = _OTHER_DASHES[round_ % len(_OTHER_DASHES)]
            styles[arm] = LineStyle(color=_OTHER_COLORS[index], linestyle=dashes, linewidth=2.0, label=arm)
    return styles


def figure(width_px: int = 1000, height_px: int = 560, rows: int = 1, columns: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure in the project's style.

    Args:
        width_px: Width in pixels of the PNG; text is legible when it is shown at 1,000.
        height_px: Height in pixels.
        rows: Panels down.
        columns: Panels across.

    Returns:
        The figure and its panels, row by row.
    """
    # Padding in inches: text at the very edge looks cut off.
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    size = (width_px / DPI, height_px / DPI)
    fig = Figure(figsize=size, dpi=DPI, facecolor=BACKGROUND, layout=layout)
    panels = [fig.add_subplot(rows, columns, index + 1) for index in range(rows * columns)]
    for axes in panels:
        _style_axes(axes)
    return fig, panels


def _style_axes(axes: Axes) -> None:
    axes.set_facecolor(BACKGROUND)
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(MUTED)
    axes.tick_params(which="both", color=MUTED, labelcolor=INK)


def set_text(axes: Axes, title: str, x_label: str, y_label: str) -> None:
    """Write a panel's title, left-aligned, and its axis labels.

    Args:
        axes: The panel.
        title: What the panel shows, as a statement where it can be one.
        x_label: Quantity and unit.
        y_label: Quantity and unit.
    """
    axes.set_title(title, loc="left", color=INK, fontweight="bold")
    axes.set_xlabel(x_label, color=INK)
    axes.set_ylabel(y_label, color=INK)


def label_line(axes: Axes, x: float, y: float, text: str, color: str) -> None:
    """Write a line's name to the right of its last point, in its colour; it may lie beyond the panel.

    Args:
        axes: The panel.
        x: Data coordinate of the last point.
        y: Data coordinate of the last point.
        text: One or two short lines.
        color: The line's colour.
    """
    axes.annotate(
        text,
        (x, y),
        xytext=(6, 0),
        textcoords="offset points",
        color=color,
        fontweight="bold",
        verticalalignment="center",
        annotation_clip=False,
    )


def save_figure(fig: Figure, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG; the same figure gives the same bytes.

    Args:
        fig: The figure.
        folder: An existing folder.
        name: File name without suffix.

    Returns:
        The paths of the PNG and of the SVG. Each is whole or absent, never half-written.
    """
    metadata = {"png": {"Software": None}, "svg": {"Date": None}}
    paths = []
    for suffix, fields in metadata.items():
        buffer = io.BytesIO()
        with matplotlib.rc_context({"svg.hashsalt": name}):
            fig.savefig(buffer, format=suffix, dpi=DPI, metadata=fields)
        path = folder / f"{name}.{suffix}"
        write_atomically(path, buffer.getvalue())
        paths.append(path)
    return paths
