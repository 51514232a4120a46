"""The residual updates by Triton kernels, for GPUs: memory is read once forward and once backward.

`triton_rotate.py` and `triton_add_norm.py` have the kernels, with pseudocode and the shape behind every pointer; here
they become operators of torch. `torch.library.triton_op` shows their inside to a compiler, so that a compiled block has
them beside its own code. `nagnet.ops.reference` is the specification; `nagnet.ops` gives it what is wider than float32.

Triton's interpreter has checked them, and they compile for GPUs, but none has run them: `nagnet bench gpu` will.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor
from torch.library import triton_op, wrap_triton

from nagnet.ops import reference
from nagnet.ops.reference import BRANCH_EPS, MODULATION_FLOOR, SPLIT_FLOOR
from nagnet.ops.triton_add_norm import add_norm_backward, add_norm_forward
from nagnet.ops.triton_rotate import advance_forward
from nagnet.ops.triton_rotate_backward import advance_backward, weight_gradient

MIN_DOT = 16  # smallest side of a matrix product on tensor cores
ROWS = 32  # of a tile: W is read once a tile, so fewer would make it the larger part of the reads
WIDE, CHUNK = 128, 32  # columns at a time, without and with products: more does not fit in the registers
MAX_PARTS = 64  # of the rows, in the gradient of W
ROWS_OF_A_PART = 256  # at least


def _empty(shape: Any, like: Tensor, dtype: torch.dtype) -> Tensor:
    """Room for an output; tests fill it with NaN, so that what no kernel wrote shows."""
    return torch.empty(shape, device=like.device, dtype=dtype)


def _tiles(d: int, n_directions: int, dtype: torch.dtype) -> dict[str, int]:
    """Sizes that the kernels of the norm-agnostic update are compiled for, by the type of the stream."""
    columns = max(MIN_DOT, int(triton.next_power_of_2(d)))
    block_c = max(MIN_DOT, int(triton.next_power_of_2(n_directions)))
    wide = min(WIDE if dtype.itemsize == 2 else WIDE // 2, columns)
    sizes = {"ROWS": ROWS, "WIDE": wide, "CHUNK": min(CHUNK, columns), "BLOCK_C": block_c}
    return {"D": int(d), "C": int(n_directions)} | sizes | {"num_warps": 4, "num_stages": 1}


def _advance_forward(
    direction: Tensor,
    log_norm: Tensor,
    branch: Tensor,
    gain: Tensor,
    branch_eps: float,
    parameters: tuple[Tensor, ...] = (),
    floor: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """R' [..., d], s' [...], what backward needs [n, 4], and the next gain [...] (empty without parameters)."""
    d, with_gain = direction.shape[-1], bool(parameters)
    n = direction.numel() // d
    tiles = _tiles(d, parameters[1].shape[0] if with_gain else 1, direction.dtype)
    new_direction = _empty(direction.shape, direction, direction.dtype)
    new_log_norm = _empty(direction.shape[:-1], direction, torch.float32)
    kept = _empty((n, 4), direction, torch.float32)
    next_gain = _empty(direction.shape[:-1] if with_gain else (0,), direction, torch.float32)
    wrap_triton(advance_forward)[(triton.cdiv(n, tiles["ROWS"]),)](
        direction.contiguous(),
        log_norm.contiguous(),
        branch.contiguous(),
        gain.contiguous(),
        *(parameter.contiguous() for parameter in parameters or [direction] * 5),
        new_direction,
        new_log_norm,
        kept,
        next_gain,
        n,
        branch_eps,
        floor,
        WITH_GAIN=with_gain,
        **tiles,
    )
    return new_direction, new_log_norm, kept, next_gain


def _advance_backward(
    grads: tuple[Tensor, ...],
    direction: Tensor,
    branch: Tensor,
    gain: Tensor,
    kept: Tensor,
    branch_eps: float,
    new_direction: Tensor | None = None,
    parameters: tuple[Tensor, ...] = (),
    floor: float = 0.0,
) -> tuple[Tensor, ...]:
    """Gradients of direction, branch [..., d], gain [...], and of the parameters, if any.

    Args:
        grads: of new direction, new log norm and, with parameters, next gain.
    """
    d, with_gain = direction.shape[-1], bool(parameters)
    n = direction.numel() // d
    tiles = _tiles(d, parameters[1].shape[0] if with_gain else 1, direction.dtype)
    programs = triton.cdiv(n, tiles["ROWS"])
    to_direction = _empty(direction.shape, direction, direction.dtype)
    to_branch = _empty(branch.shape, branch, branch.dtype)
    to_gain = _empty(gain.shape, gain, torch.float32)
    grad_logits = _empty((n if with_gain else 0, tiles["C"]), direction, torch.float32)
    partial = _empty((programs if with_gain else 0, 2 * tiles["C"] + 2), direction, torch.float32)
    wrap_triton(advance_backward)[(programs,)](
        *(grad.contiguous() for grad in (*grads, grads[1])[:3]),
        direction.contiguous(),
        branch.contiguous(),
        gain.contiguous(),
        kept,
        *(parameter.contiguous() for parameter in parameters or [direction] * 5),
        to_direction,
        to_branch,
        to_gain,
        grad_logits,
        partial,
        n,
        branch_eps,
        floor,
        WITH_GAIN=with_gain,
        **tiles,
    )
    if new_direction is None:
        return to_direction, to_branch, to_gain.to(gain.dtype)
    to_weight = _weight_gradient(grad_logits, new_direction.contiguous(), tiles)
    to_parameters = _second_stage(to_weight, partial, *parameters)
    return to_direction, to_branch, to_gain.to(gain.dtype), *to_parameters


def _weight_gradient(grad_logits: Tensor, new_direction: Tensor, tiles: dict[str, int]) -> Tensor:
    """Partial sums of the gradient of W, [parts, C, d]."""
    n, n_directions = grad_logits.shape
    parts = min(MAX_PARTS, triton.cdiv(n, ROWS_OF_A_PART))
    partial = _empty((parts, n_directions, tiles["D"]), new_direction, torch.float32)
    sizes = {name: tiles[name] for name in ("D", "C", "ROWS", "BLOCK_C", "num_warps")}
    wrap_triton(weight_gradient)[(triton.cdiv(tiles["D"], tiles["WIDE"]), parts)](
        grad_logits, new_direction, partial, n, triton.cdiv(n, parts), CHUNK=tiles["WIDE"], **sizes
    )
    return partial


def _second_stage(
    partial_weight: Tensor,
    partial: Tensor,
    weight: Tensor,
    bias: Tensor,
    mixture: Tensor,
    raw_beta: Tensor,
    scale: Tensor,
) -> tuple[Tensor, ...]:
    """Gradients of W, bias, mixture, raw beta and scale from sums over a program's rows, added in a fixed order."""
    c = bias.shape[0]
    to_bias, to_share = partial[:, :c].sum(dim=0), partial[:, c : 2 * c].sum(dim=0)
    to_beta, to_scale = partial[:, 2 * c].sum(), partial[:, 2 * c + 1].sum()
    share = torch.softmax(mixture.float(), dim=0)
    to_mixture = share * (to_share - (share * to_share).sum())
    return (
        partial_weight.sum(dim=0).to(weight.dtype),
        to_bias.to(bias.dtype),
        to_mixture.to(mixture.dtype),
        (to_beta * torch.sigmoid(raw_beta.float())).to(raw_beta.dtype),
        to_scale.to(scale.dtype),
    )


@triton_op("nagnet::write", mutates_args=())
def _write(
    direction: Tensor, log_norm: Tensor, branch: Tensor, gain: Tensor, branch_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    return _advance_forward(direction, log_norm, branch, gain, branch_eps)[:3]


@triton_op("nagnet::write_backward", mutates_args=())
def _write_backward(
    grad_direction: Tensor,
    grad_log_norm: Tensor,
    direction: Tensor,
    branch: Tensor,
    gain: Tensor,
    kept: Tensor,
    branch_eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    to_direction, to_branch, to_gain = _advance_backward(
        (grad_direction, grad_log_norm), direction, branch, gain, kept, branch_eps
    )
    return to_direction, to_branch, to_gain


@triton_op("nagnet::advance", mutates_args=())
def _advance(
    direction: Tensor,
    log_norm: Tensor,
    branch: Tensor,
    gain: Tensor,
    weight: Tensor,
    bias: Tensor,
    mixture: Tensor,
    raw_beta: Tensor,
    scale: Tensor,
    branch_eps: float,
    floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parameters = (weight, bias, mixture, raw_beta, scale)
    return _advance_forward(direction, log_norm, branch, gain, branch_eps, parameters, floor)


@triton_op("nagnet::advance_backward", mutates_args=())
def _advance_backward_op(
    grad_direction: Tensor,
    grad_log_norm: Tensor,
    grad_next_gain: Tensor,
    direction: Tensor,
    branch: Tensor,
    gain: Tensor,
    kept: Tensor,
    new_direction: Tensor,
    weight: Tensor,
    bias: Tensor,
    mixture: Tensor,
    raw_beta: Tensor,
    scale: Tensor,
    branch_eps: float,
    floor: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    grads = (grad_direction, grad_log_norm, grad_next_gain)
    parameters = (weight, bias, mixture, raw_beta, scale)
    a, b, c, d, e, f, g, h = _advance_backward(
        grads, direction, branch, gain, kept, branch_eps, new_direction, parameters, floor
    )
    return a, b, c, d, e, f, g, h


def _setup_write(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    direction, log_norm, branch, gain, ctx.branch_eps = inputs
    ctx.save_for_backward(direction, branch, gain, output[2])
    ctx.log_norm_dtype = log_norm.dtype
    ctx.mark_non_differentiable(output[2])


def _backward_of_write(ctx: Any, grad_direction: Tensor, grad_log_norm: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    direction, branch, gain, kept = ctx.saved_tensors
    to_direction, to_branch, to_gain = _write_backward(
        grad_direction, grad_log_norm, direction, branch, gain, kept, ctx.branch_eps
    )
    return to_direction, grad_log_norm.to(ctx.log_norm_dtype), to_branch, to_gain, None


def _setup_advance(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    direction, log_norm, branch, gain, *parameters, ctx.branch_eps, ctx.floor = inputs
    ctx.save_for_backward(direction, branch, gain, output[2], output[0], *parameters)
    ctx.log_norm_dtype = log_norm.dtype
    ctx.mark_non_differentiable(output[2])


def _backward_of_advance(
    ctx: Any, grad_direction: Tensor, grad_log_norm: Tensor, _: Any, grad_next_gain: Tensor
) -> tuple[Tensor | None, ...]:
    grads = (grad_direction, grad_log_norm, grad_next_gain)
    arguments: list[Any] = [*grads, *ctx.saved_tensors, ctx.branch_eps, ctx.floor]
    to_direction, to_branch, to_gain, *to_parameters = _advance_backward_op(*arguments)
    return to_direction, grad_log_norm.to(ctx.log_norm_dtype), to_branch, to_gain, *to_parameters, None, None


_write.register_autograd(_backward_of_write, setup_context=_setup_write)
_advance.register_autograd(_backward_of_advance, setup_context=_setup_advance)


def rotate(
    direction: Tensor, log_norm: Tensor, branch: Tensor, gain: Tensor, branch_eps: float = BRANCH_EPS
) -> tuple[Tensor, Tensor]:
    """`reference.rotate`, keeping for backward direction, branch, gain and four scalars per token."""
    batch = direction.shape[:-1]
    return _write(direction, log_norm.expand(batch), branch, gain.expand(batch), max(branch_eps, SPLIT_FLOOR))[:2]


def advance(
    direction: Tensor,
    log_norm: Tensor,
    branch: Tensor,
    gain_now: Tensor,
    parameters: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    branch_eps: float = BRANCH_EPS,
    floor: float = MODULATION_FLOOR,
) -> tuple[Tensor, Tensor, Tensor]:
    """`reference.advance`, with the products of the next gain formed while the new direction is written."""
    batch = direction.shape[:-1]
    inputs = (direction, log_norm.expand(batch), branch, gain_now.expand(batch), *parameters)
    new_direction, new_log_norm, _, next_gain = _advance(*inputs, max(branch_eps, SPLIT_FLOOR), floor)
    return new_direction, new_log_norm, next_gain


gain = reference.gain  # of the first update of a model, which no write comes before: one call of 2 x blocks


def _row_tiles(d: int) -> dict[str, int]:
    """Sizes that the kernels of pre-norm are compiled for: about 4,096 numbers of each vector a program."""
    block_d = int(triton.next_power_of_2(d))
    return {"D": int(d), "ROWS": max(1, 4096 // block_d), "BLOCK_D": block_d, "num_warps": 8 if block_d >= 4096 else 4}


@triton_op("nagnet::add_norm", mutates_args=())
def _add_norm(stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    d = stream.shape[-1]
    n, tiles = stream.numel() // d, _row_tiles(d)
    added, reading = (_empty(stream.shape, stream, stream.dtype) for _ in range(2))
    wrap_triton(add_norm_forward)[(triton.cdiv(n, tiles["ROWS"]),)](
        stream.contiguous(), branch.contiguous(), added, reading, n, **tiles
    )
    return added, reading


@triton_op("nagnet::add_norm_backward", mutates_args=())
def _add_norm_backward(grad_added: Tensor, grad_reading: Tensor, added: Tensor) -> Tensor:
    d = added.shape[-1]
    n, tiles = added.numel() // d, _row_tiles(d)
    to_stream = _empty(added.shape, added, added.dtype)
    wrap_triton(add_norm_backward)[(triton.cdiv(n, tiles["ROWS"]),)](
        grad_added.contiguous(), grad_reading.contiguous(), added.contiguous(), to_stream, n, **tiles
    )
    return to_stream


def _setup_add_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(output[0])
    ctx.branch_dtype = inputs[1].dtype


def _backward_of_add_norm(ctx: Any, grad_added: Tensor, grad_reading: Tensor) -> tuple[Tensor, Tensor]:
    to_stream = _add_norm_backward(grad_added, grad_reading, *ctx.saved_tensors)
    return to_stream, to_stream.to(ctx.branch_dtype)


_add_norm.register_autograd(_backward_of_add_norm, setup_context=_setup_add_norm)


def add_norm(stream: Tensor, branch: Tensor) -> tuple[Tensor, Tensor]:
    """`reference.add_norm`, keeping for backward the sum alone."""
    return _add_norm(stream, branch)
