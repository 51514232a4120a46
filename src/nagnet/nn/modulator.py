"""The modulator: how much of its allowed rotation a token uses in one sublayer."""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from nagnet import ops
from nagnet.nn.precision import Float32Module
from nagnet.ops import reference
from nagnet.typing import Float

MODULATOR_TENSORS = ("weight", "bias", "mixture", "raw_beta")
RAW_BETA_FOR_ONE = math.log(math.e - 1.0)  # softplus of this is 1


class Modulator(Float32Module):
    """Per-token modulation ``m = (sum_i softmax(a)_i sigmoid(<R, w_i> + b_i))^softplus(raw_beta)`` (equation 13).

    Args:
        d_model: width d of the stream.
        n_directions: C, number of learned directions w_i.
        floor: smallest value of the sum before the power; 0 leaves its gradient without a bound.
        fixed: those of ``MODULATOR_TENSORS`` that do not learn. They are buffers at b = a = 0, beta = 1 and W = 0; with
            all of them m is 1/2 for every direction. The mixture of one direction has no effect and is fixed too.
    """

    weight: Tensor
    bias: Tensor
    mixture: Tensor
    raw_beta: Tensor

    def __init__(
        self,
        d_model: int,
        n_directions: int = 32,
        floor: float = reference.MODULATION_FLOOR,
        fixed: Collection[str] = (),
    ):
        super().__init__()
        self.floor = floor
        shapes = ((n_directions, d_model), (n_directions,), (n_directions,), ())
        for name, shape in zip(MODULATOR_TENSORS, shapes, strict=True):
            tensor = torch.empty(shape, dtype=torch.float32)
            if name in fixed or (name == "mixture" and n_directions == 1):
                self.register_buffer(name, tensor)
            else:
                self.register_parameter(name, nn.Parameter(tensor))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """W uniform with standard deviation 1/sqrt(d) or fixed at 0; b = a = 0; beta = 1: m is about 1/2 everywhere."""
        self.bias.zero_()
        self.mixture.zero_()
        self.raw_beta.fill_(RAW_BETA_FOR_ONE)
        if not isinstance(self.weight, nn.Parameter):
            self.weight.zero_()
            return
        bound = math.sqrt(3.0 / self.weight.shape[1])
        draw = torch.empty_like(self.weight, device=self.weight.device if generator is None else generator.device)
        self.weight.copy_(draw.uniform_(-bound, bound, generator=generator))

    def forward(self, direction: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch"]:
        """Returns m [...] in [0, 1], float32 or wider."""
        return reference.modulation(direction, *self.parameters_in_order(), self.floor)

    def scaled(self, direction: Float[Tensor, "*batch d"], scale: Float[Tensor, ""]) -> Float[Tensor, "*batch"]:
        """Returns ``scale m`` [...], float32 or wider, by the backend in force."""
        return ops.gain(direction, *self.parameters_in_order(), scale, self.floor)

    def parameters_in_order(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """W [C, d], b [C], a [C] and raw beta, whether they learn or not."""
        return self.weight, self.bias, self.mixture, self.raw_beta
