"""The norm-agnostic update with a derived backward pass: few sweeps over memory, O(1) scalars kept per token.

Derivation and symbols: docs/mathematics.md, "The update as an affine map". The bodies below are plain PyTorch on
[..., d]; a compiler turns each into two or three sweeps over memory: sums, then one affine output. Inside a compiled
block they are traced into its graph; called eagerly they are compiled on first use. `nagnet.ops.reference` is the
specification they are tested against, in float64.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from nagnet.ops import reference
from nagnet.ops.reference import BRANCH_EPS, SPLIT_FLOOR, compute_dtype, mean_square

MAX_EAGER_VARIANTS = 64  # of widths and types that one process compiles for eager calls


def _mean(x: Tensor) -> Tensor:
    return x.mean(dim=-1, keepdim=True)


def _rotate_forward(
    direction: Tensor, log_norm: Tensor, branch: Tensor, gain: Tensor, branch_eps: float
) -> tuple[Tensor, ...]:
    """R' = A R + B b + C with per-row A, B, C.

    Returns:
        R' [..., d], s' [...], and what backward needs, [..., 1] each: mean(b), k, p, h.
    """
    dtype = compute_dtype(direction, branch, log_norm, gain)
    r, b, g = direction.to(dtype), branch.to(dtype), gain.to(dtype).unsqueeze(-1)
    mean_b, length = _mean(b), mean_square(r)
    k = _mean((b - mean_b) * r) / (length + SPLIT_FLOOR)
    # A second sweep for p: the difference of squares of the first would cancel for a branch parallel to R.
    p = mean_square(b - mean_b - k * r)
    a, growth = _slope(g, p, length, branch_eps)
    size = length + 2.0 * a * k * SPLIT_FLOOR + a * a * p
    h = torch.where(growth == 0, 1.0, torch.rsqrt(size + SPLIT_FLOOR))
    rotated = (h * (1.0 - a * k)) * r + (h * a) * b - h * a * mean_b
    new_log_norm = log_norm.to(dtype) + 0.5 * torch.log1p(growth.squeeze(-1))
    return rotated.to(direction.dtype), new_log_norm, mean_b, k, p, h


def _slope(gain: Tensor, p: Tensor, length: Tensor, branch_eps: float) -> tuple[Tensor, Tensor]:
    """a = gain / sqrt(p + eps), the factor of f in the rotation, and gain^2 q; [..., 1] each."""
    damped = p + branch_eps
    return gain * torch.where(length + p == 0, 1.0, torch.rsqrt(damped)), gain.square() * (p / damped)


def _rotate_backward(
    grad_direction: Tensor,
    grad_log_norm: Tensor,
    direction: Tensor,
    branch: Tensor,
    gain: Tensor,
    mean_b: Tensor,
    k: Tensor,
    p: Tensor,
    h: Tensor,
    branch_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of R, b [..., d] and of the gain [...]; the first two are affine in (upstream, R, f, 1) per row."""
    dtype = p.dtype
    u, r, b, g = grad_direction.to(dtype), direction.to(dtype), branch.to(dtype), gain.to(dtype).unsqueeze(-1)
    d, length = direction.shape[-1], mean_square(r)
    f = b - mean_b - k * r
    u_r, u_f = _mean(u * r), _mean(u * f)
    a, growth = _slope(g, p, length, branch_eps)
    damped = p + branch_eps
    w = torch.where(growth == 0, 0.0, h.pow(3) * (u_r + a * u_f))  # the measured renormalisation
    grad_a = d * (h * u_f - w * a * p)
    grad_growth = 0.5 * grad_log_norm.to(dtype).unsqueeze(-1) / (1.0 + growth)
    flat = length + p == 0  # rows whose normalisation is 1, not 1/sqrt(eps)
    grad_gain = grad_a * torch.where(flat, 1.0, torch.rsqrt(damped)) + grad_growth * 2.0 * g * (p / damped)
    grad_p = (
        torch.where(flat, 0.0, -0.5 * grad_a * a / damped) + grad_growth * g.square() * branch_eps / damped.square()
    )
    e = 2.0 * grad_p / d - a * a * w
    phi = a * (h * u_r - w * length) / (length + SPLIT_FLOOR)
    to_direction = (h * (1.0 - k * a)) * u + (k * a * w + phi * k - w) * r - (w * a + k * e + phi) * f
    offset = a * h * _mean(u) - (a * w + phi + e * k) * _mean(r)
    to_branch = (a * h) * u - (a * w + phi) * r + e * f - offset
    return to_direction.to(direction.dtype), to_branch.to(branch.dtype), grad_gain.squeeze(-1).to(gain.dtype)


@functools.cache
def _compiled(body: Callable) -> Callable:
    return torch.compile(body, fullgraph=True)


def _call(body: Callable, *arguments: Any) -> Any:
    """Runs a body: traced where a compiler is at work already, else compiled by itself."""
    if torch.compiler.is_compiling():
        return body(*arguments)
    with torch._dynamo.config.patch(recompile_limit=MAX_EAGER_VARIANTS):
        return _compiled(body)(*arguments)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx, direction, log_norm, branch, gain, branch_eps):
        rotated, new_log_norm, *kept = _call(_rotate_forward, direction, log_norm, branch, gain, branch_eps)
        ctx.save_for_backward(direction, branch, gain, *kept)
        ctx.branch_eps = branch_eps
        ctx.log_norm_dtype = log_norm.dtype
        return rotated, new_log_norm

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_direction, grad_log_norm):
        to_direction, to_branch, to_gain = _call(
            _rotate_backward, grad_direction, grad_log_norm, *ctx.saved_tensors, ctx.branch_eps
        )
        return to_direction, grad_log_norm.to(ctx.log_norm_dtype), to_branch, to_gain, None


def rotate(
    direction: Tensor, log_norm: Tensor, branch: Tensor, gain: Tensor, branch_eps: float = BRANCH_EPS
) -> tuple[Tensor, Tensor]:
    """`reference.rotate`, keeping for backward only direction, branch, gain and four scalars per token.

    Args and returns are those of the reference.
    """
    return _Rotate.apply(direction, log_norm, branch, gain, max(branch_eps, SPLIT_FLOOR))


def add_norm(stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.add_norm`, compiled: a derived backward was not faster (records/0001-fused-update)."""
    return _call(reference.add_norm, stream, branch)
