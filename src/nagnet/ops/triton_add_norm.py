"""Triton kernels of pre-norm's update: the branch added to the stream, and the RMS norm of the sum, the next reading.

A program has ROWS whole rows in registers. All arithmetic is float32. For each row, mean() over its d columns:

    forward                                         backward, of gradients g (x') and y (reading)
    x'      = x + b, rounded to the stream's type   i      = 1 / sqrt(mean(x'^2) + eps), or 1 where x' = 0
    reading = x' / sqrt(mean(x'^2) + eps)           dx, db = g + i y - i^3 mean(y x') x', without the last where x' = 0

Behind the pointers, all contiguous: stream x, branch b, added x', reading, and their gradients, [n, d] each, float32,
bfloat16 or float16. x and b have the same gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl

from nagnet.ops import reference

RMS_EPS = tl.constexpr(reference.RMS_EPS)


@triton.jit
def add_norm_forward(
    stream_ptr, branch_ptr, added_ptr, reading_ptr, n, D: tl.constexpr, ROWS: tl.constexpr, BLOCK_D: tl.constexpr
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    at = rows[:, None] * D + columns[None, :]
    inside = (rows < n)[:, None] & (columns < D)[None, :]
    x = tl.load(stream_ptr + at, mask=inside, other=0.0)
    b = tl.load(branch_ptr + at, mask=inside, other=0.0)
    # The reference casts the branch to the stream's type first, then adds.
    added = (x.to(tl.float32) + b.to(x.dtype).to(tl.float32)).to(x.dtype)
    tl.store(added_ptr + at, added, mask=inside)
    wide = added.to(tl.float32)
    power = tl.sum(wide * wide, axis=1) / D
    scale = tl.where(power == 0.0, 1.0, tl.rsqrt(power + RMS_EPS))
    tl.store(reading_ptr + at, (wide * scale[:, None]).to(reading_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_norm_backward(
    grad_added_ptr,
    grad_reading_ptr,
    added_ptr,
    to_stream_ptr,
    n,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, BLOCK_D)
    at = rows[:, None] * D + columns[None, :]
    inside = (rows < n)[:, None] & (columns < D)[None, :]
    x = tl.load(added_ptr + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(grad_reading_ptr + at, mask=inside, other=0.0).to(tl.float32)
    g = tl.load(grad_added_ptr + at, mask=inside, other=0.0).to(tl.float32)
    power = tl.sum(x * x, axis=1) / D
    scale = tl.where(power == 0.0, 1.0, tl.rsqrt(power + RMS_EPS))
    along = tl.where(power == 0.0, 0.0, scale * scale * scale * (tl.sum(x * y, axis=1) / D))
    to_stream = g + scale[:, None] * y - along[:, None] * x
    tl.store(to_stream_ptr + at, to_stream.to(to_stream_ptr.dtype.element_ty), mask=inside)
