"""Why a deep stack needs a residual stream: a vector through random layers, with one and without.

Each layer is W = scale x Q with Q orthogonal. Without a residual, x <- W x multiplies the norm by ``scale``
at every layer: 0.5 over 60 layers is 60 log10(2) = 18.06 decades. With one, x <- x + W x grows it by
sqrt(1 + scale^2) on average, as x and Q x are near orthogonal in many dimensions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from nagnet.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class ToyDepth(NamedTuple):
    """Norm of a vector after each layer, over its norm before the first.

    Attributes:
        plain: x <- W x; [depth + 1], float64, starting at 1.
        residual: x <- x + W x; [depth + 1], float64, starting at 1.
    """

    plain: Tensor
    residual: Tensor

    @property
    def plain_decades(self) -> float:
        """log10 of the last norm ratio without a residual; negative where the norm falls."""
        return self.plain[-1].log10().item()

    @property
    def residual_decades(self) -> float:
        """log10 of the last norm ratio with a residual."""
        return self.residual[-1].log10().item()


def toy_depth(depth: int, d_model: int, seed: int, scale: float = 0.5) -> ToyDepth:
    """Send one random vector through the same random layers, with and without a residual.

    Args:
        depth: Layers, at least 1.
        d_model: Width of the vector, at least 1. The time grows with depth x d_model^2.
        seed: Seed of the vector and of the layers; torch's global generator is not touched.
        scale: Factor of the orthogonal matrix of each layer, above 0.

    Returns:
        The norm ratios by depth.

    Raises:
        UserError: If a number is out of range.
    """
    if depth < 1 or d_model < 1:
        raise UserError(f"depth and d_model must be at least 1, not {depth} and {d_model}")
    if not scale > 0:
        raise UserError(f"scale must be above 0, not {scale}")
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(d_model, generator=generator, dtype=torch.float64)
    plain, residual = start, start
    norms = [(start.norm(), start.norm())]
    for _ in range(depth):
        # One matrix applied to both vectors, so the arms differ in the residual alone.
        plain_branch, residual_branch = scale * _rotate(torch.stack((plain, residual)), generator)
        plain, residual = plain_branch, residual + residual_branch
        norms.append((plain.norm(), residual.norm()))
    ratios = torch.tensor(norms, dtype=torch.float64) / start.norm()
    return ToyDepth(plain=ratios[:, 0], residual=ratios[:, 1])


def _rotate(vectors: Tensor, generator: torch.Generator) -> Tensor:
    """Multiply vectors by one random orthogonal matrix, drawn evenly from all of them.

    The matrix is never formed: it is a product of d reflections, each in a random direction of a space one
    dimension smaller than the last (Stewart, 1980). That costs d^2 and not the d^3 of a QR decomposition,
    whose threads, waiting for one another, also take seconds on a busy machine.

    Args:
        vectors: [n, d], float64.
        generator: Source of the draw.

    Returns:
        The products, [n, d], float64.
    """
    rotated = vectors.clone()
    d = vectors.shape[-1]
    for start in range(d):
        mirror = torch.randn(d - start, generator=generator, dtype=vectors.dtype)
        first = mirror[0].clone()
        # The reflection that takes this draw to the first axis; the sign avoids cancellation.
        mirror[0] += mirror.norm().copysign(first)
        tail = rotated[:, start:]
        along = (tail * mirror).sum(-1, keepdim=True) / mirror.square().sum()
        tail -= 2 * along * mirror
        tail[:, 0] *= -first.sign()
    return rotated


def toy_depth_figure(result: ToyDepth) -> Figure:
    """Draw the norm by depth, both arms in one panel, on a logarithmic axis.

    Args:
        result: What ``toy_depth`` measured.

    Returns:
        A figure 1,000 pixels wide.
    """
    # The numbers need torch alone; only the figure needs matplotlib, which is an extra.
    from nagnet.diagnostics import style

    fig, (axes,) = style.figure()
    depth = len(result.plain) - 1
    arms = {
        "none": (result.plain, "x ← W x", result.plain_decades),
        "residual": (result.residual, "x ← x + W x", result.residual_decades),
    }
    looks = style.arm_styles(arms)
    for arm, (ratios, rule, decades) in arms.items():
        axes.plot(range(depth + 1), ratios.tolist(), **looks[arm])
        text = f"{rule}\n{decades:+.2f} decades".replace("-", "−")
        style.label_line(axes, depth, ratios[-1].item(), text, looks[arm]["color"])
    axes.set_yscale("log")
    axes.set_xlim(0, depth)
    change = "falls" if result.plain_decades < 0 else "grows"
    style.set_text(
        axes,
        f"Without a residual the norm {change} by {abs(result.plain_decades):.2f} decades",
        "depth (layers)",
        "norm of x over its norm at depth 0",
    )
    return fig
