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
from nagnet.ops.matvec import is_one_row, matvec
from nagnet.ops.reference import BRANCH_EPS, MODULATION_FLOOR, SPLIT_FLOOR, compute_dtype, mean_square

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
    dtype, d = p.dtype, direction.shape[-1]
    # As rows [n, d], and f in another order than in the forward pass: of a cast or difference that a compiler met
    # there it might keep the float32 result, where keeping the 16-bit inputs and forming it again is cheaper.
    u, r, b = (x.reshape(-1, d).to(dtype) for x in (grad_direction, direction, branch))
    g, grad_s = (x.to(dtype).reshape(-1, 1) for x in (gain, grad_log_norm))
    mean_b, k, p, h = (x.reshape(-1, 1) for x in (mean_b, k, p, h))
    length = mean_square(r)
    f = b - (k * r + mean_b)
    u_r, u_f = _mean(u * r), _mean(u * f)
    a, growth = _slope(g, p, length, branch_eps)
    damped = p + branch_eps
    w = torch.where(growth == 0, 0.0, h.pow(3) * (u_r + a * u_f))  # the measured renormalisation
    grad_a = d * (h * u_f - w * a * p)
    grad_growth = 0.5 * grad_s / (1.0 + growth)
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
    return (
        to_direction.view(direction.shape).to(direction.dtype),
        to_branch.view(branch.shape).to(branch.dtype),
        grad_gain.view(gain.shape).to(gain.dtype),
    )


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


def _gain_forward(
    direction: Tensor, weight: Tensor, bias: Tensor, mixture: Tensor, raw_beta: Tensor, scale: Tensor, floor: float
) -> Tensor:
    m = reference.modulation(direction, weight, bias, mixture, raw_beta, floor)
    return scale.to(m.dtype) * m


def _gain_backward(
    grad_gain: Tensor,
    direction: Tensor,
    weight: Tensor,
    bias: Tensor,
    mixture: Tensor,
    raw_beta: Tensor,
    scale: Tensor,
    floor: float,
) -> tuple[Tensor, ...]:
    """Gradients of R [..., d], W [C, d], b [C], a [C], raw beta and scale; the activations are formed again."""
    dtype = compute_dtype(direction, weight)
    # Transposed throughout: of a product or cast that it had seen in the forward pass a compiler would keep the result.
    columns, w = direction.reshape(-1, direction.shape[-1]).mT.to(dtype), weight.to(dtype)
    upstream = grad_gain.to(dtype).flatten()
    share = torch.softmax(mixture.to(dtype), dim=0).unsqueeze(1)
    beta = torch.nn.functional.softplus(raw_beta.to(dtype))
    open_ = torch.sigmoid(w @ columns + bias.to(dtype).unsqueeze(1))
    mean = (share * open_).sum(dim=0)
    u = mean.clamp(floor, 1.0)
    log_u = torch.log(u)
    m = torch.exp(beta * log_u)
    grad_m = upstream * scale.to(dtype)
    grad_u = torch.where((mean >= floor) & (mean <= 1.0), grad_m * beta * m / u, 0.0)
    grad_logits = grad_u * share * open_ * (1.0 - open_)
    grad_share = (open_ * grad_u).sum(dim=1, keepdim=True)
    grad_mixture = (share * (grad_share - (share * grad_share).sum())).squeeze(1)
    grad_raw_beta = (grad_m * m * log_u).sum() * torch.sigmoid(raw_beta.to(dtype))
    return (
        (grad_logits.mT @ w).view(direction.shape).to(direction.dtype),
        (grad_logits @ columns.mT).to(weight.dtype),
        grad_logits.sum(dim=1).to(bias.dtype),
        grad_mixture.to(mixture.dtype),
        grad_raw_beta.to(raw_beta.dtype),
        (upstream * m).sum().to(scale.dtype),
    )


class _Gain(torch.autograd.Function):
    @staticmethod
    def forward(ctx, direction, weight, bias, mixture, raw_beta, scale, floor):
        ctx.save_for_backward(direction, weight, bias, mixture, raw_beta, scale)
        ctx.floor = floor
        return _call(_gain_forward, direction, weight, bias, mixture, raw_beta, scale, floor)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad_gain):
        with reference.without_autocast(grad_gain.device.type):
            return *_call(_gain_backward, grad_gain, *ctx.saved_tensors, ctx.floor), None


def recomputing_gain(
    direction: Tensor,
    weight: Tensor,
    bias: Tensor,
    mixture: Tensor,
    raw_beta: Tensor,
    scale: Tensor,
    floor: float = MODULATION_FLOOR,
) -> Tensor:
    """`reference.gain`, keeping for backward nothing but its inputs: C activations per token are formed again.

    Args and returns are those of the reference.
    """
    return _Gain.apply(direction, weight, bias, mixture, raw_beta, scale, floor)


def _gain_of_one_row(
    direction: Tensor,
    weight: Tensor,
    bias: Tensor,
    mixture: Tensor,
    raw_beta: Tensor,
    scale: Tensor,
    floor: float = MODULATION_FLOOR,
) -> Tensor:
    """`reference.gain` without a library call, which for C products takes longer than they do."""
    dtype = compute_dtype(direction, weight)
    logits = matvec(direction.to(dtype), weight) + bias.to(dtype)
    m = reference.modulation_of_logits(logits, mixture, raw_beta, floor)
    return scale.to(m.dtype) * m


def gain(direction: Tensor, *arguments: Any) -> Tensor:
    """`reference.gain`, compiled; for a 16-bit direction `recomputing_gain`.

    Beside a 16-bit direction the C float32 activations of a token are a large part of what backward keeps; beside a
    wider one forming them again costs more time than it saves memory (records/0001-fused-update).
    """
    if is_one_row(direction):
        return _gain_of_one_row(direction, *arguments)
    if direction.element_size() == 2:
        return recomputing_gain(direction, *arguments)
    return _call(reference.gain, direction, *arguments)


def add_norm(stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.add_norm`, compiled: a derived backward was not faster (records/0001-fused-update)."""
    return _call(reference.add_norm, stream, branch)


def advance(
    direction: Tensor,
    log_norm: Tensor,
    branch: Tensor,
    gain_now: Tensor,
    parameters: tuple[Tensor, ...],
    branch_eps: float = BRANCH_EPS,
    floor: float = MODULATION_FLOOR,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.advance` by `rotate` and `gain`, one after the other."""
    new_direction, new_log_norm = rotate(direction, log_norm, branch, gain_now, branch_eps)
    return new_direction, new_log_norm, gain(new_direction, *parameters, floor)
