"""Triton kernels of the norm-agnostic update: the backward. `triton_rotate.py` explains names and pointers."""

# pyright: reportGeneralTypeIssues=false
# To pyright, what one kernel function calls of another never returns, as outside of a kernel it would not.

from __future__ import annotations

import triton
import triton.language as tl

from nagnet.ops.triton_rotate import PRECISION, SPLIT_FLOOR, load, load_weight, modulate, tile, turn


@triton.jit
def sum_rows(
    grad_direction_ptr, direction_ptr, branch_ptr,
    mean_b, k, rows, live,
    D: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sums over the columns of u R, u f, u, R, R^2 and R f [ROWS]."""
    u_r = tl.zeros([ROWS], tl.float32)
    u_f = tl.zeros([ROWS], tl.float32)
    sum_u = tl.zeros([ROWS], tl.float32)
    sum_r = tl.zeros([ROWS], tl.float32)
    r_r = tl.zeros([ROWS], tl.float32)
    r_f = tl.zeros([ROWS], tl.float32)
    for start in range(0, D, WIDE):
        at, inside = tile(rows, live, start + tl.arange(0, WIDE), D)
        r, b, u = load(direction_ptr, at, inside), load(branch_ptr, at, inside), load(grad_direction_ptr, at, inside)
        f = tl.where(inside, b - mean_b[:, None] - k[:, None] * r, 0.0)
        u_r += tl.sum(u * r, axis=1)
        u_f += tl.sum(u * f, axis=1)
        sum_u += tl.sum(u, axis=1)
        sum_r += tl.sum(r, axis=1)
        r_r += tl.sum(r * r, axis=1)
        r_f += tl.sum(r * f, axis=1)
    return u_r, u_f, sum_u, sum_r, r_r, r_f


@triton.jit
def project_rows(
    direction_ptr, branch_ptr, weight_ptr,
    mean_b, k, rows, live, directions,
    D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Sums over the columns of W R and W f [ROWS, BLOCK_C], and of W [BLOCK_C]."""
    w_r = tl.zeros([ROWS, BLOCK_C], tl.float32)
    w_f = tl.zeros([ROWS, BLOCK_C], tl.float32)
    sum_w = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, D, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        at, inside = tile(rows, live, columns, D)
        r, b = load(direction_ptr, at, inside), load(branch_ptr, at, inside)
        f = b - mean_b[:, None] - k[:, None] * r  # columns beyond d meet a W of 0
        w = load_weight(weight_ptr, directions, columns, D, C)
        w_r = tl.dot(r, tl.trans(w), w_r, input_precision=PRECISION)
        w_f = tl.dot(f, tl.trans(w), w_f, input_precision=PRECISION)
        sum_w += tl.sum(w, axis=1)
    return w_r, w_f, sum_w


@triton.jit
def differentiate_gain(
    logits,
    grad_next_gain_ptr,
    bias_ptr, mixture_ptr, raw_beta_ptr, scale_ptr,
    grad_logits_ptr, partial_ptr,
    floor, rows, live, directions,
    C: tl.constexpr,
):  # fmt: skip
    """dz [ROWS, BLOCK_C] from W R', written out, and the partial sums of this program for the parameters."""
    shares, opened, mixed, clamped, m, beta = modulate(
        logits, bias_ptr, mixture_ptr, raw_beta_ptr, floor, directions, C
    )
    upstream = load(grad_next_gain_ptr, rows, live)
    grad_m = upstream * tl.load(scale_ptr).to(tl.float32)
    grad_mixed = tl.where(live & (mixed >= floor) & (mixed <= 1.0), grad_m * beta * m / clamped, 0.0)
    grad_logits = grad_mixed[:, None] * shares[None, :] * opened * (1.0 - opened)
    known = directions < C
    at = rows[:, None] * C + directions[None, :]
    tl.store(grad_logits_ptr + at, grad_logits, mask=live[:, None] & known[None, :])
    partial_ptr += tl.program_id(0).to(tl.int64) * (2 * C + 2)
    tl.store(partial_ptr + directions, tl.sum(grad_logits, axis=0), mask=known)
    tl.store(partial_ptr + C + directions, tl.sum(opened * grad_mixed[:, None], axis=0), mask=known)
    tl.store(partial_ptr + 2 * C, tl.sum(tl.where(live, grad_m * m * tl.log(clamped), 0.0), axis=0))
    tl.store(partial_ptr + 2 * C + 1, tl.sum(tl.where(live, upstream * m, 0.0), axis=0))
    return grad_logits


@triton.jit
def differentiate_row(u_r, u_f, length, k, p, h, a, growth, gain, grad_log_norm, branch_eps, D):
    """Gradient of the gain, and w, c and e [ROWS], of which the gradients of the vectors are made.

    With F = a h u' - c R + e f, db = F - mean(F) and dR = h u' - w R - c f - k F. Differences of nearly equal numbers
    are taken out by h^2 (L + 2 a k t + a^2 p + t) = 1.
    """
    damped = p + branch_eps
    flat = length + p == 0.0  # rows whose normalisation is 1, not 1 / sqrt(eps)
    w = tl.where(growth == 0.0, 0.0, h * h * h * (u_r + a * u_f))  # the measured renormalisation
    turned = h * h * h * ((length + 2.0 * a * k * SPLIT_FLOOR + SPLIT_FLOOR) * u_f - a * p * u_r)
    grad_a = D * tl.where(growth == 0.0, u_f, turned)
    grad_growth = 0.5 * grad_log_norm / (1.0 + growth)
    to_gain = grad_a * tl.where(flat, 1.0, tl.rsqrt(damped)) + grad_growth * 2.0 * gain * (p / damped)
    c = a * (h * u_r + w * SPLIT_FLOOR) / (length + SPLIT_FLOOR)
    e = tl.where(flat, 0.0, -(a * h * u_f + a * a * w * branch_eps) / damped)
    e += 2.0 / D * grad_growth * gain * gain * (branch_eps / damped) / damped
    return to_gain, w, c, e


@triton.jit
def advance_backward(
    grad_direction_ptr, grad_log_norm_ptr, grad_next_gain_ptr,
    direction_ptr, branch_ptr, gain_ptr, kept_ptr,
    weight_ptr, bias_ptr, mixture_ptr, raw_beta_ptr, scale_ptr,
    to_direction_ptr, to_branch_ptr, to_gain_ptr,
    grad_logits_ptr, partial_ptr,
    n, branch_eps, floor,
    D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr, WITH_GAIN: tl.constexpr,
):  # fmt: skip
    """The tile's gradients of R, b and gain, and WITH_GAIN dz and the partial sums of the parameters."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < n
    directions = tl.arange(0, BLOCK_C)
    mean_b, k = load(kept_ptr, 4 * rows, live), load(kept_ptr, 4 * rows + 1, live)
    p, h = load(kept_ptr, 4 * rows + 2, live), load(kept_ptr, 4 * rows + 3, live)
    u_r, u_f, sum_u, sum_r, r_r, r_f = sum_rows(
        grad_direction_ptr, direction_ptr, branch_ptr, mean_b, k, rows, live, D, ROWS, WIDE
    )
    gain, length = load(gain_ptr, rows, live), r_r / D
    a, growth = turn(gain, p, length, branch_eps)
    grad_logits = tl.zeros([ROWS, BLOCK_C], tl.float32)
    if WITH_GAIN:
        w_r, w_f, sum_w = project_rows(
            direction_ptr, branch_ptr, weight_ptr, mean_b, k, rows, live, directions, D, C, ROWS, CHUNK, BLOCK_C
        )
        logits = tl.where((growth == 0.0)[:, None], w_r, h[:, None] * (w_r + a[:, None] * w_f))
        grad_logits = differentiate_gain(
            logits, grad_next_gain_ptr, bias_ptr, mixture_ptr, raw_beta_ptr, scale_ptr, grad_logits_ptr, partial_ptr,
            floor, rows, live, directions, C,
        )  # fmt: skip
        u_r += tl.sum(grad_logits * w_r, axis=1)
        u_f += tl.sum(grad_logits * w_f, axis=1)
        sum_u += tl.sum(grad_logits * sum_w[None, :], axis=1)
    # The last bit of k leaves a part along R in f, large beside the f of a branch that is nearly parallel to R.
    u_f -= r_f / D / (length + SPLIT_FLOOR) * u_r
    grad_log_norm = load(grad_log_norm_ptr, rows, live)
    to_gain, w, c, e = differentiate_row(
        u_r / D, u_f / D, length, k, p, h, a, growth, gain, grad_log_norm, branch_eps, D
    )
    tl.store(to_gain_ptr + rows, to_gain, mask=live)
    mean_u, mean_r = (sum_u / D)[:, None], (sum_r / D)[:, None]
    offset = (a * h)[:, None] * mean_u - (c + e * k)[:, None] * mean_r  # by which db is centred
    for start in range(0, D, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        at, inside = tile(rows, live, columns, D)
        r, b, u = load(direction_ptr, at, inside), load(branch_ptr, at, inside), load(grad_direction_ptr, at, inside)
        if WITH_GAIN:
            u = tl.dot(grad_logits, load_weight(weight_ptr, directions, columns, D, C), u, input_precision=PRECISION)
        f = b - mean_b[:, None] - k[:, None] * r
        # The mean of f is -k mean(R).
        to_branch = a[:, None] * h[:, None] * (u - mean_u) - c[:, None] * (r - mean_r)
        to_branch += e[:, None] * (f + k[:, None] * mean_r)
        to_direction = h[:, None] * u - w[:, None] * r - c[:, None] * f - k[:, None] * (to_branch + offset)
        tl.store(to_branch_ptr + at, to_branch.to(to_branch_ptr.dtype.element_ty), mask=inside)
        tl.store(to_direction_ptr + at, to_direction.to(to_direction_ptr.dtype.element_ty), mask=inside)


@triton.jit
def weight_gradient(
    grad_logits_ptr, new_direction_ptr, partial_weight_ptr,
    n, rows_per_part,
    D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """``dz^T R'`` [C, CHUNK] over one part of the rows; program (i, j) has chunk i of the columns and part j."""
    columns = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    directions = tl.arange(0, BLOCK_C)
    part = tl.program_id(1).to(tl.int64)
    total = tl.zeros([BLOCK_C, CHUNK], tl.float32)
    for first in range(0, rows_per_part, ROWS):
        within = first + tl.arange(0, ROWS)
        rows = part * rows_per_part + within
        live = (within < rows_per_part) & (rows < n)
        known = (directions < C)[:, None] & live[None, :]
        z = load(grad_logits_ptr, rows[None, :] * C + directions[:, None], known)
        at, inside = tile(rows, live, columns, D)
        r = load(new_direction_ptr, at, inside)
        total = tl.dot(z, r, total, input_precision=PRECISION)
    at = (part * C + directions[:, None]) * D + columns[None, :]
    tl.store(partial_weight_ptr + at, total, mask=(directions < C)[:, None] & (columns < D)[None, :])
