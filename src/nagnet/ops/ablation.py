"""The norm-agnostic update without some of its parts, for ablations: plain PyTorch, written like the reference."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from nagnet.ops.reference import BRANCH_EPS, SPLIT_FLOOR, compute_dtype, mean_square, one_where_zero
from nagnet.typing import Float


class Kept(NamedTuple):
    """Which parts of the update are kept; with all of them it is `reference.rotate`.

    Attributes:
        centring: the branch loses its mean.
        orthogonal: the branch loses its part along R. Without it the update also moves along the stream, so the
            growth of the norm is that of the vector R + gain n, measured, and not a function of the gain alone; a
            branch that opposes the stream shrinks it.
        output_norm: the branch is brought to RMS sqrt(q), q about 1. Without it the angle depends on the branch's
            size, q = mean(n^2) has no bound, and ``branch_eps`` is not used.
    """

    centring: bool = True
    orthogonal: bool = True
    output_norm: bool = True


def rotate(
    direction: Float[Tensor, "*batch d"],
    log_norm: Float[Tensor, "*batch"],
    branch: Float[Tensor, "*batch d"],
    gain: Float[Tensor, "*batch"],
    branch_eps: float = BRANCH_EPS,
    kept: Kept = Kept(),  # noqa: B008  a constant
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch"]]:
    """``x' = exp(s) (R + gain n)`` split in direction and log norm, with n made by the parts that are kept.

    ``R' ~ R + gain n`` at RMS 1 and ``s' = s + 0.5 log(1 + gain^2 q + 2 gain mean(R n))``, the last term only without
    orthogonalisation. Where gain^2 q is 0 the state is returned as it came, to the bit.

    Args:
        direction, log_norm, branch, gain, branch_eps: as `reference.rotate`.

    Returns:
        direction R' [..., d] in the type of ``direction``, log norm s' [...] in float32 or wider.
    """
    dtype = compute_dtype(direction, branch, log_norm, gain)
    unit, f, gain = direction.to(dtype), branch.to(dtype), gain.to(dtype).unsqueeze(-1)
    length = mean_square(unit)
    if kept.centring:
        f = f - f.mean(dim=-1, keepdim=True)
    if kept.orthogonal:
        f = f - (f * unit).mean(dim=-1, keepdim=True) / (length + SPLIT_FLOOR) * unit
    q = mean_square(f)
    if kept.output_norm:
        damped = q + max(branch_eps, SPLIT_FLOOR)
        f = f * one_where_zero(length + q, torch.rsqrt(damped))
        q = q / damped
    growth = gain.square() * q
    rotated = unit + gain * f
    inverse_rms = torch.rsqrt(mean_square(rotated) + SPLIT_FLOOR)
    new_direction = rotated * torch.where(growth == 0, torch.ones_like(inverse_rms), inverse_rms)
    if not kept.orthogonal:
        along = 2.0 * gain * (f * unit).mean(dim=-1, keepdim=True)
        # A branch that undoes the stream leaves nothing, whose logarithm must stay finite.
        growth = (growth + along).clamp(min=torch.finfo(dtype).eps - 1.0)
    new_log_norm = log_norm.to(dtype) + 0.5 * torch.log1p(growth.squeeze(-1))
    return new_direction.to(direction.dtype), new_log_norm
