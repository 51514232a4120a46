"""The specification of the norm-agnostic update: plain PyTorch, any floating type, no tricks.

Symbols and equation numbers are those of docs/mathematics.md (arXiv 2606.16112). Every function computes in
``float32`` or wider whatever its input type, and casts down once at the end. Faster code elsewhere is tested
against this file in float64.

Shapes: ``direction``, ``branch`` [..., d]; ``log_norm``, ``gain`` and every other per-token scalar [...].
"""

from __future__ import annotations

import contextlib

import torch
from torch import Tensor

from nagnet.typing import Float

SPLIT_FLOOR = 1e-14  # t: added to a mean square before its logarithm or its inverse, so that zero stays finite
MODULATION_FLOOR = 1e-6  # smallest u: u^(beta-1) has no bound at 0 for beta < 1
RMS_EPS = torch.finfo(torch.float32).eps
BRANCH_EPS = 1e-6


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Returns the type arithmetic runs in: the widest of the inputs, but never below float32."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def without_autocast(device_type: str) -> contextlib.AbstractContextManager:
    """Products run in the type of what they are given.

    Nothing where autocast is off already: torch's caches of compiled code take no graph with the switch in it.
    """
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return contextlib.nullcontext()


def mean_square(x: Tensor) -> Tensor:
    """Mean over the last axis of x^2, [..., d] -> [..., 1]."""
    return x.square().mean(dim=-1, keepdim=True)


def one_where_zero(power: Tensor, scale: Tensor) -> Tensor:
    """A zero vector is zero whatever multiplies it; 1 keeps 1e3 to 1e7 per norm out of its gradient."""
    return torch.where(power == 0, torch.ones_like(scale), scale)


def split(x: Float[Tensor, "*batch d"]) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch"]]:
    """Splits a vector into direction and log norm (equations 3-5), exactly invertible by `merge`.

    ``s = 0.5 log(mean(x^2) + t)``, ``R = x exp(-s)`` with t = 1e-14. A zero vector gives R = 0 and a finite s,
    and passes its gradient on as it is: it has no direction whose change could be measured.

    Args:
        x: [..., d], any floating type.

    Returns:
        direction R [..., d] in the type of ``x`` (RMS 1), log norm s [...] (natural log of the RMS) in float32,
        or float64 for float64 input.
    """
    wide = x.to(compute_dtype(x))
    power = mean_square(wide)
    log_norm = 0.5 * torch.log(power + SPLIT_FLOOR)
    scale = one_where_zero(power, torch.exp(-log_norm))
    return (wide * scale).to(x.dtype), log_norm.squeeze(-1)


def merge(direction: Float[Tensor, "*batch d"], log_norm: Float[Tensor, "*batch"]) -> Float[Tensor, "*batch d"]:
    """Joins direction and log norm into the vector ``exp(s) R``, the inverse of `split`.

    Returns:
        [..., d] in the type of ``direction``.
    """
    wide = direction.to(compute_dtype(direction, log_norm))
    return (wide * torch.exp(log_norm).unsqueeze(-1)).to(direction.dtype)


def rms_norm(x: Float[Tensor, "*batch d"], eps: float = RMS_EPS) -> Float[Tensor, "*batch d"]:
    """Scales the last axis to RMS 1, without an affine part: ``x / sqrt(mean(x^2) + eps)``.

    A zero vector passes its gradient on as it is: a stack of norms would otherwise multiply it beyond any range.

    Returns:
        [..., d] in the type of ``x``.
    """
    wide = x.to(compute_dtype(x))
    power = mean_square(wide)
    return (wide * one_where_zero(power, torch.rsqrt(power + eps))).to(x.dtype)


def add_norm(
    stream: Float[Tensor, "*batch d"], branch: Float[Tensor, "*batch d"]
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch d"]]:
    """Pre-norm's update and the next reading: ``x' = x + b`` and N(x'), both [..., d] in the type of ``stream``."""
    added = stream + branch.to(stream.dtype)
    return added, rms_norm(added)


def modulation(
    direction: Float[Tensor, "*batch d"],
    weight: Float[Tensor, "c d"],
    bias: Float[Tensor, " c"],
    mixture: Float[Tensor, " c"],
    raw_beta: Float[Tensor, ""],
    floor: float = MODULATION_FLOOR,
) -> Float[Tensor, "*batch"]:
    """Share of the allowed rotation that each token uses (equation 13): ``m = u^beta`` in [0, 1].

    ``u = sum_i softmax(a)_i sigmoid(<R, w_i> + b_i)``, clamped to [floor, 1], and ``beta = softplus(raw) > 0``.

    Args:
        direction: R [..., d].
        weight: W [C, d]; ``bias``: b [C]; ``mixture``: a [C]; ``raw_beta``: scalar.
        floor: smallest u; with 0 the gradient has no bound where every sigmoid underflows.

    Returns:
        m [...], float32 or wider. The projection runs in that type under autocast too.
    """
    dtype = compute_dtype(direction, weight)
    with without_autocast(direction.device.type):
        logits = torch.nn.functional.linear(direction.to(dtype), weight.to(dtype), bias.to(dtype))
    return modulation_of_logits(logits, mixture, raw_beta, floor)


def modulation_of_logits(
    logits: Float[Tensor, "*batch c"],
    mixture: Float[Tensor, " c"],
    raw_beta: Float[Tensor, ""],
    floor: float = MODULATION_FLOOR,
) -> Float[Tensor, "*batch"]:
    """`modulation` from ``<R, w_i> + b_i`` [..., C], float32 or wider; the other arguments are its own."""
    dtype = logits.dtype
    shares = torch.softmax(mixture.to(dtype), dim=0)
    u = (torch.sigmoid(logits) * shares).sum(dim=-1).clamp(floor, 1.0)
    return torch.exp(torch.nn.functional.softplus(raw_beta.to(dtype)) * torch.log(u))


def gain(
    direction: Float[Tensor, "*batch d"],
    weight: Float[Tensor, "c d"],
    bias: Float[Tensor, " c"],
    mixture: Float[Tensor, " c"],
    raw_beta: Float[Tensor, ""],
    scale: Float[Tensor, ""],
    floor: float = MODULATION_FLOOR,
) -> Float[Tensor, "*batch"]:
    """``scale m`` [...], float32 or wider: the tangent of the coming rotation; arguments as `modulation`.

    Args:
        scale: alpha times the injection scale, a scalar.
    """
    m = modulation(direction, weight, bias, mixture, raw_beta, floor)
    return scale.to(m.dtype) * m


def rotate(
    direction: Float[Tensor, "*batch d"],
    log_norm: Float[Tensor, "*batch"],
    branch: Float[Tensor, "*batch d"],
    gain: Float[Tensor, "*batch"],
    branch_eps: float = BRANCH_EPS,
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch"]]:
    """Applies one sublayer's output as a rotation of size ``gain`` (equations 10-12 and 14-17).

    The branch is centred, made orthogonal to the direction and normalised to n with mean(n^2) = q in [0, 1)
    (q = 1 but for branches with an RMS near sqrt(branch_eps)); then ``R' ~ R + gain n`` at RMS 1 and
    ``s' = s + 0.5 log(1 + gain^2 q)``. R' is divided by its measured RMS, since the predicted one drifts in
    bfloat16. Where gain^2 q is 0 the direction is returned as it came, while its gradient is still that of the
    rotation, so that a branch which starts at zero can leave it. A zero branch on a zero stream passes its gradient
    on as it is, times the gain.

    Args:
        direction: R [..., d]; ``branch``: the sublayer's output F(R) [..., d].
        log_norm: s [...]; ``gain``: alpha m [...].
        branch_eps: added to the branch's mean square before its inverse root (unit: branch squared), at least
            1e-14 so that a zero branch stays finite.

    Returns:
        direction R' [..., d] in the type of ``direction``, log norm s' [...] in float32 or wider.
    """
    dtype = compute_dtype(direction, branch, log_norm, gain)
    unit, f, gain = direction.to(dtype), branch.to(dtype), gain.to(dtype).unsqueeze(-1)
    f = f - f.mean(dim=-1, keepdim=True)
    length = mean_square(unit)
    f = f - (f * unit).mean(dim=-1, keepdim=True) / (length + SPLIT_FLOOR) * unit
    power = mean_square(f)
    damped = power + max(branch_eps, SPLIT_FLOOR)
    normal = f * one_where_zero(length + power, torch.rsqrt(damped))
    growth = gain.square() * (power / damped)
    rotated = unit + gain * normal
    inverse_rms = torch.rsqrt(mean_square(rotated) + SPLIT_FLOOR)
    new_direction = rotated * torch.where(growth == 0, torch.ones_like(inverse_rms), inverse_rms)
    new_log_norm = log_norm.to(dtype) + 0.5 * torch.log1p(growth.squeeze(-1))
    return new_direction.to(direction.dtype), new_log_norm


def advance(
    direction: Float[Tensor, "*batch d"],
    log_norm: Float[Tensor, "*batch"],
    branch: Float[Tensor, "*batch d"],
    gain_now: Float[Tensor, "*batch"],
    parameters: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    branch_eps: float = BRANCH_EPS,
    floor: float = MODULATION_FLOOR,
) -> tuple[Float[Tensor, "*batch d"], Float[Tensor, "*batch"], Float[Tensor, "*batch"]]:
    """`rotate`, then the `gain` of the following update from the new direction.

    Args:
        gain_now: alpha m [...] of this update; ``branch_eps`` and the others as `rotate`.
        parameters: weight, bias, mixture, raw_beta and scale of the following update, as `gain` takes them, and
            ``floor``.

    Returns:
        direction R' [..., d], log norm s' [...] and the following update's gain [...].
    """
    new_direction, new_log_norm = rotate(direction, log_norm, branch, gain_now, branch_eps)
    return new_direction, new_log_norm, gain(new_direction, *parameters, floor)


def angle(a: Float[Tensor, "*batch d"], b: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
    """Angle between two directions in radians, by atan2 of the chords: exact near 0 and near pi, never NaN.

    Args:
        a, b: [..., d], any length but of the same order (directions of RMS 1 are meant).

    Returns:
        [...], float32 or wider, in [0, pi].
    """
    dtype = compute_dtype(a, b)
    a, b = a.to(dtype), b.to(dtype)
    a, b = a * torch.rsqrt(mean_square(a) + SPLIT_FLOOR), b * torch.rsqrt(mean_square(b) + SPLIT_FLOOR)
    return 2.0 * torch.atan2((a - b).norm(dim=-1), (a + b).norm(dim=-1))
