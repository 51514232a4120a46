"""Initial parameters: each drawn from a generator of its own, so that arms share every draw they can share."""

from __future__ import annotations

import hashlib
import math

import torch
from torch import nn

from nagnet.nn.attention import Attention
from nagnet.nn.mlp import SquaredReLU, SwiGLU
from nagnet.nn.readout import Readout
from nagnet.nn.residual import ResidualStream, ResidualUpdate
from nagnet.nn.rotary import RotaryTable
from nagnet.nn.scale import LearnedScale

EMBEDDING_STD = 0.8
READOUT_STD = 0.001
TIED_STD = 0.02  # as readout rows, 0.8 would start a model with free rows at twice the loss of a guess
MLP_IN_FACTOR = 0.4


def named_generator(seed: int, name: str) -> torch.Generator:
    """A CPU generator that depends on the seed and the parameter's name alone.

    A parameter keeps its draw whatever other parameters a model has: two arms share theirs to the bit.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)


@torch.no_grad()
def _uniform(weight: torch.Tensor, std: float, generator: torch.Generator) -> None:
    bound = math.sqrt(3.0) * std
    weight.copy_(torch.empty(weight.shape, device="cpu").uniform_(-bound, bound, generator=generator))


@torch.no_grad()
def _initialize_projection(weight: torch.Tensor, how: str, generator: torch.Generator) -> None:
    if how == "zero":
        weight.zero_()
    elif how == "uniform":
        _uniform(weight, 1.0 / math.sqrt(weight.shape[1]), generator)
    else:
        drawn = torch.empty(weight.shape, device="cpu")
        weight.copy_(nn.init.orthogonal_(drawn, generator=generator))


@torch.no_grad()
def initialize_(model: nn.Module, seed: int, projections: str) -> None:
    """Draws every parameter of a `Decoder` but the rows of embedding and readout, and fills its buffers.

    Works on storage that holds anything: a model built on the meta device and given memory by ``to_empty``.

    Queries, keys, values uniform with standard deviation 1/sqrt(d); MLP inputs 0.4 times that (docs/mathematics.md,
    source: the walkthrough).

    Args:
        seed: of all draws.
        projections: output projections are ``zero``, ``uniform`` with standard deviation 1/sqrt(fan-in), or
            ``orthogonal``: orthonormal rows or columns, whichever are fewer.
    """
    for name, module in model.named_modules():
        if isinstance(module, Attention | RotaryTable):
            module.reset_buffers()
        if isinstance(module, Readout):
            module.reset_scale()
        if isinstance(module, ResidualUpdate | ResidualStream | LearnedScale):
            module.reset_parameters(named_generator(seed, name))
        if not isinstance(module, Attention | SquaredReLU | SwiGLU):
            continue
        factor = 1.0 if isinstance(module, Attention) else MLP_IN_FACTOR
        for child, layer in module.named_children():
            if not isinstance(layer, nn.Linear):
                continue
            generator = named_generator(seed, f"{name}.{child}")
            if child == "out_proj":
                _initialize_projection(layer.weight, projections, generator)
            else:
                _uniform(layer.weight, factor / math.sqrt(layer.in_features), generator)


@torch.no_grad()
def initialize_rows_(weight: torch.Tensor, std: float, seed: int, name: str) -> None:
    """Draws the rows of an embedding or readout [V, d] from N(0, std)."""
    weight.copy_(torch.empty(weight.shape, device="cpu").normal_(std=std, generator=named_generator(seed, name)))
