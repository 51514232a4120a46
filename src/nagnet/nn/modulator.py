"""The modulator: how much of its allowed rotation a token uses in one sublayer."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from nagnet import ops
from nagnet.nn.precision import Float32Module
from nagnet.ops import reference
from nagnet.typing import Float

RAW_BETA_FOR_ONE = math.log(math.e - 1.0)  # softplus of this is 1


class Modulator(Float32Module):
    """Per-token modulation ``m = (sum_i softmax(a)_i sigmoid(<R, w_i> + b_i))^softplus(raw_beta)`` (equation 13).

    Args:
        d_model: width d of the stream.
        n_directions: C, number of learned directions w_i.
        floor: smallest value of the sum before the power; 0 leaves its gradient without a bound.
    """

    def __init__(self, d_model: int, n_directions: int = 32, floor: float = reference.MODULATION_FLOOR):
        super().__init__()
        self.floor = floor
        self.weight = nn.Parameter(torch.empty(n_directions, d_model, dtype=torch.float32))
        self.bias = nn.Parameter(torch.empty(n_directions, dtype=torch.float32))
        self.mixture = nn.Parameter(torch.empty(n_directions, dtype=torch.float32))
        self.raw_beta = nn.Parameter(torch.empty((), dtype=torch.float32))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """W uniform with standard deviation 1/sqrt(d); b = a = 0; beta = 1. So m is about 1/2 everywhere."""
        bound = math.sqrt(3.0 / self.weight.shape[1])
        draw = torch.empty_like(self.weight, device=self.weight.device if generator is None else generator.device)
        self.weight.copy_(draw.uniform_(-bound, bound, generator=generator))
        self.bias.zero_()
        self.mixture.zero_()
        self.raw_beta.fill_(RAW_BETA_FOR_ONE)

    def forward(self, direction: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """Returns m [...] in [0, 1], float32 or wider."""
        return reference.modulation(direction, *self._parameters_in_order(), self.floor)

    def scaled(self, direction: Float[Tensor, "*batch d"], scale: Float[Tensor, ""]) -> Float[Tensor, "*batch"]:
        """Returns ``scale m`` [...], float32 or wider, by the backend in force."""
        return ops.gain(direction, *self._parameters_in_order(), scale, self.floor)

    def _parameters_in_order(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.weight, self.bias, self.mixture, self.raw_beta
