"""The product of one row with a matrix on a CPU, which decoding one sequence is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from nagnet.ops.reference import compute_dtype
from nagnet.typing import Float

STREAMS = 4  # places of the matrix read at the same time: one alone leaves a quarter of the memory's speed unused
MIN_ROWS = 256  # of a matrix for that; of a smaller one, four results to put together cost more


def is_one_row(x: Float[Tensor, "*batch i"]) -> bool:
    """Whether `matvec` is meant for this: a single row, traced by a compiler, on a CPU."""
    return torch.compiler.is_compiling() and x.device.type == "cpu" and x.numel() == x.shape[-1]


def computed_once(x: Tensor) -> Tensor:
    """``x`` as if of unknown layout: so a compiler computes it before what reads it, and not again at every reading."""
    x = x.contiguous()
    return x.as_strided(x.shape, x.stride())


def matvec(x: Float[Tensor, "*batch i"], weight: Float[Tensor, "o i"]) -> Float[Tensor, "*batch o"]:
    """``x W^T`` for a single row, formed and added in float32 or wider; to be traced by a compiler.

    Every number of W is used once, so the speed of memory is the bound. The loop that a compiler makes of this comes
    nearer to it than the libraries' products, above all for a 16-bit W on a CPU without 16-bit arithmetic
    (`nagnet bench decoding`).

    Args:
        x: [..., i] with one row. weight: W [o, i].

    Returns:
        [..., o] in the type of ``x``.
    """
    dtype = compute_dtype(x, weight)
    row = computed_once(x.flatten().to(dtype))  # and not again for each of the o outputs
    several = weight.shape[0] >= MIN_ROWS and weight.shape[0] % STREAMS == 0
    parts = weight.chunk(STREAMS if several else 1)
    product = torch.cat([(part.to(dtype) * row).sum(dim=-1) for part in parts])
    return product.to(x.dtype).view(*x.shape[:-1], -1)
