"""Triton kernels of the norm-agnostic update, alone (write) or with the next update's gain (advance): the forward.

The backward is in `triton_rotate_backward.py`; what follows explains both.

A program has a tile of ROWS rows (tokens), whose columns it sweeps in chunks: the first sweep reads memory, the others
find the rows in a cache. All arithmetic is float32, whatever type the pointers have. Names are those of
docs/mathematics.md ("The update as an affine map"), which derives the backward; `nagnet.ops.reference` is the
specification. For each row, with mean() over its d columns, t the floor of the split, and W_i r = sum over the columns:

    forward                                         backward, of gradients u (R'), sigma (s') and v (next gain)
    mean_b = mean(b)                                z_i  = h (W_i R + a W_i f) + bias_i     and o, S, m again
    L      = mean(R^2)                              dz_i = [floor <= S <= 1] v c beta m / clamp(S) p_i o_i (1 - o_i)
    k      = mean((b - mean_b) R) / (L + t)         u'   = u + sum_i dz_i W_i
    f      = b - mean_b - k R                       mean(u' R) = mean(u R) + sum_i dz_i W_i R / d, and so mean(u' f)
    p      = mean(f^2)                              dR, db = affine in (u', R, f, 1), one sweep after that of the sums
    a      = gain / sqrt(p + eps)                   dgain  = a formula of the sums;  ds = sigma
    G      = gain^2 p / (p + eps)                   dW     = dz^T R'    by a kernel of its own
    h      = 1 / sqrt(L + 2 a k t + a^2 p + t)      of bias, mixture, raw_beta and c: one partial sum per program
    R'     = h (R + a f), or R where G = 0
    s'     = s + log(1 + G) / 2
    z_i    = W_i R' + bias_i      o_i = sigmoid(z_i)      S = sum_i p_i o_i,  p = softmax(mixture)
    next   = c m,   m = clamp(S, floor, 1)^beta,  beta = softplus(raw_beta)

Behind the pointers, all contiguous; n rows, d columns (D), C directions, P programs, K parts of the rows:

    direction R, branch b, new_direction R', and the gradients of them  [n, d]       float32, bfloat16 or float16
    log_norm s, gain, new_log_norm, next_gain, and their gradients      [n]          what is written is float32
    kept: mean_b, k, p, h for the backward                              [n, 4]       float32
    weight W [C, d]; bias, mixture [C]; raw_beta, scale c []                         any
    grad_logits dz                                                      [n, C]       float32
    partial: sums over a program's rows of dz, of o dS, of what belongs
        to beta, and of v m                                             [P, 2C + 2]  float32
    partial_weight: dz^T R' of a part of the rows                       [K, C, d]    float32

Parameters are reduced in two stages, these partial sums and then a sum over P or K in a fixed order, so a result does
not depend on which program came first, as it would with atomic additions. Row numbers are int64: n d may exceed 2^31.
"""

# pyright: reportGeneralTypeIssues=false
# To pyright, what one kernel function calls of another never returns, as outside of a kernel it would not.

from __future__ import annotations

import triton
import triton.language as tl

from nagnet.ops import reference

SPLIT_FLOOR = tl.constexpr(reference.SPLIT_FLOOR)
# Three TF32 products stand for a float32 one, on tensor cores; a single one would lose 13 bits of W.
PRECISION = tl.constexpr("tf32x3")


@triton.jit
def log1p(x):
    """log(1 + x) for x >= 0, to the last bits where x is small, where log(1 + x) as written has none."""
    w = 1.0 + x
    slope = tl.where(w - 1.0 == x, 1.0, x / (w - 1.0))
    return tl.where(w == 1.0, x, tl.log(w) * slope)


@triton.jit
def tile(rows, live, columns, D: tl.constexpr):
    """Offsets of rows and columns in [n, d], and which of them exist."""
    return rows[:, None] * D + columns[None, :], live[:, None] & (columns < D)[None, :]


@triton.jit
def load(pointer, at, inside):
    """Numbers as float32, 0 outside."""
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_weight(weight_ptr, directions, columns, D: tl.constexpr, C: tl.constexpr):
    """Columns of W, [BLOCK_C, CHUNK]."""
    inside = (directions < C)[:, None] & (columns < D)[None, :]
    return load(weight_ptr, directions[:, None] * D + columns[None, :], inside)


@triton.jit
def measure(direction_ptr, branch_ptr, rows, live, D: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr):
    """mean_b, k, p and L [ROWS]; three sweeps, since differences of sums of one would cancel."""
    mean_b = tl.zeros([ROWS], tl.float32)
    for start in range(0, D, WIDE):
        at, inside = tile(rows, live, start + tl.arange(0, WIDE), D)
        mean_b += tl.sum(load(branch_ptr, at, inside), axis=1)
    mean_b /= D
    length = tl.zeros([ROWS], tl.float32)
    along = tl.zeros([ROWS], tl.float32)
    for start in range(0, D, WIDE):
        at, inside = tile(rows, live, start + tl.arange(0, WIDE), D)
        r, b = load(direction_ptr, at, inside), load(branch_ptr, at, inside)
        length += tl.sum(r * r, axis=1)
        along += tl.sum((b - mean_b[:, None]) * r, axis=1)
    length /= D
    k = along / D / (length + SPLIT_FLOOR)
    p = tl.zeros([ROWS], tl.float32)
    for start in range(0, D, WIDE):
        at, inside = tile(rows, live, start + tl.arange(0, WIDE), D)
        r, b = load(direction_ptr, at, inside), load(branch_ptr, at, inside)
        f = tl.where(inside, b - mean_b[:, None] - k[:, None] * r, 0.0)
        p += tl.sum(f * f, axis=1)
    return mean_b, k, p / D, length


@triton.jit
def turn(gain, p, length, branch_eps):
    """a = gain / sqrt(p + eps), the factor of f in the rotation, and G = gain^2 q, [ROWS]."""
    damped = p + branch_eps
    # A zero branch on a zero stream has the factor 1, as in the reference.
    a = gain * tl.where(length + p == 0.0, 1.0, tl.rsqrt(damped))
    return a, gain * gain * (p / damped)


@triton.jit
def modulate(logits, bias_ptr, mixture_ptr, raw_beta_ptr, floor, directions, C: tl.constexpr):
    """Of W R' [ROWS, BLOCK_C]: shares p [BLOCK_C], sigmoids o, their mixture S, clamped S, m [ROWS], and beta."""
    known = directions < C
    mixture = tl.load(mixture_ptr + directions, mask=known, other=float("-inf")).to(tl.float32)
    shares = tl.exp(mixture - tl.max(mixture, axis=0))
    shares /= tl.sum(shares, axis=0)
    opened = tl.sigmoid(logits + load(bias_ptr, directions, known)[None, :])
    mixed = tl.sum(opened * shares[None, :], axis=1)
    # Comparisons, unlike minimum and maximum, let a NaN through.
    clamped = tl.where(mixed < floor, floor, tl.where(mixed > 1.0, 1.0, mixed))
    raw_beta = tl.load(raw_beta_ptr).to(tl.float32)
    beta = tl.where(raw_beta > 20.0, raw_beta, log1p(tl.exp(raw_beta)))  # softplus as torch has it
    return shares, opened, mixed, clamped, tl.exp(beta * tl.log(clamped)), beta


@triton.jit
def advance_forward(
    direction_ptr, log_norm_ptr, branch_ptr, gain_ptr,
    weight_ptr, bias_ptr, mixture_ptr, raw_beta_ptr, scale_ptr,
    new_direction_ptr, new_log_norm_ptr, kept_ptr, next_gain_ptr,
    n, branch_eps, floor,
    D: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_C: tl.constexpr, WITH_GAIN: tl.constexpr,
):  # fmt: skip
    """The tile's R', s', kept numbers and, WITH_GAIN, next gains."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    live = rows < n
    mean_b, k, p, length = measure(direction_ptr, branch_ptr, rows, live, D, ROWS, WIDE)
    a, growth = turn(load(gain_ptr, rows, live), p, length, branch_eps)
    h = tl.rsqrt(length + 2.0 * a * k * SPLIT_FLOOR + a * a * p + SPLIT_FLOOR)
    h = tl.where(growth == 0.0, 1.0, h)
    tl.store(new_log_norm_ptr + rows, load(log_norm_ptr, rows, live) + 0.5 * log1p(growth), mask=live)
    tl.store(kept_ptr + 4 * rows, mean_b, mask=live)
    tl.store(kept_ptr + 4 * rows + 1, k, mask=live)
    tl.store(kept_ptr + 4 * rows + 2, p, mask=live)
    tl.store(kept_ptr + 4 * rows + 3, h, mask=live)
    directions = tl.arange(0, BLOCK_C)
    logits = tl.zeros([ROWS, BLOCK_C], tl.float32)
    for start in range(0, D, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        at, inside = tile(rows, live, columns, D)
        r, b = load(direction_ptr, at, inside), load(branch_ptr, at, inside)
        f = tl.where(inside, b - mean_b[:, None] - k[:, None] * r, 0.0)
        rotated = tl.where((growth == 0.0)[:, None], r, h[:, None] * (r + a[:, None] * f))
        rotated = rotated.to(new_direction_ptr.dtype.element_ty)
        tl.store(new_direction_ptr + at, rotated, mask=inside)
        if WITH_GAIN:  # of the rounded direction, the one that the next update reads
            w = load_weight(weight_ptr, directions, columns, D, C)
            logits = tl.dot(rotated.to(tl.float32), tl.trans(w), logits, input_precision=PRECISION)
    if WITH_GAIN:
        _, _, _, _, m, _ = modulate(logits, bias_ptr, mixture_ptr, raw_beta_ptr, floor, directions, C)
        tl.store(next_gain_ptr + rows, tl.load(scale_ptr).to(tl.float32) * m, mask=live)
