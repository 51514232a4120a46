"""The matrices of sublayers."""

from __future__ import annotations

from torch import Tensor, nn

from nagnet import ops
from nagnet.typing import Float


class Projection(nn.Linear):
    """A linear map without a bias, by whatever computes it fastest (`nagnet.ops.project`).

    Args:
        d_in, d_out: widths.
    """

    def __init__(self, d_in: int, d_out: int):
        super().__init__(d_in, d_out, bias=False)

    def forward(self, x: Float[Tensor, "*batch i"]) -> Float[Tensor, "*batch o"]:
        return ops.project(x, self.weight)
