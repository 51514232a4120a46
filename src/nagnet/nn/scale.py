"""Learned scales per channel."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from nagnet.nn.precision import Float32Module
from nagnet.typing import Float


class LearnedScale(Float32Module):
    """A vector that acts at one scale and is trained at another (arXiv 2410.01131): ``weight initial / stored``.

    The parameter starts at ``stored`` and what it acts as at ``initial``. An optimizer whose steps do not depend on
    the size of gradients (Adam) then moves the value by its rate times ``initial / stored``.

    Args:
        size: entries. initial: their value at the start. stored: that of the parameter.
    """

    def __init__(self, size: int, initial: float, stored: float):
        super().__init__()
        self.stored = stored
        self.ratio = initial / stored
        self.weight = nn.Parameter(torch.empty(size, dtype=torch.float32))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Puts every entry to its initial value."""
        self.weight.fill_(self.stored)

    def forward(self) -> Float[Tensor, " n"]:
        """The scales [n], float32 or wider."""
        return self.weight * self.ratio


def scaled(x: Float[Tensor, "*batch n"], scale: LearnedScale | None) -> Float[Tensor, "*batch n"]:
    """``x`` times a learned scale of its last axis, in the type of ``x``; ``x`` itself where there is none."""
    return x if scale is None else x * scale().to(x.dtype)
