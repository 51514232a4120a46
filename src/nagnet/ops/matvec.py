"""The product of one row with a 16-bit matrix on a CPU, which decoding one sequence is made of."""

from __future__ import annotations

import torch
from torch import Tensor

from nagnet.typing import Float

STREAMS = 4  # places of the matrix read at the same time: one alone leaves a third of the memory's speed unused


def matvec(x: Float[Tensor, "*batch i"], weight: Float[Tensor, "o i"]) -> Float[Tensor, "*batch o"]:
    """``x W^T`` for a single row, formed and added in float32; to be traced by a compiler.

    A CPU without 16-bit arithmetic converts as it reads. The libraries' products do so at 0.6 of the speed of memory;
    the loop that a compiler makes of this one at 0.8 and more (`nagnet bench decoding`).

    Args:
        x: [..., i] with one row. weight: W [o, i].

    Returns:
        [..., o] in the type of ``x``.
    """
    # As if of unknown layout, so that the compiler computes x once and not again for each of the o outputs.
    row = x.flatten().as_strided((x.shape[-1],), (1,)).float()
    streams = STREAMS if weight.shape[0] % STREAMS == 0 else 1
    product = torch.cat([(part.float() * row).sum(dim=-1) for part in weight.chunk(streams)])
    return product.to(x.dtype).view(*x.shape[:-1], -1)
