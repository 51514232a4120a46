"""Initial parameters: each drawn from a generator of its own, so that arms share every draw they can share."""

from __future__ import annotations

import hashlib
import math
from typing import Any

import torch
from torch import nn

from nagnet.nn.attention import Attention
from nagnet.nn.mlp import SquaredReLU, SwiGLU
from nagnet.nn.readout import Readout
from nagnet.nn.residual import ResidualStream, ResidualUpdate
from nagnet.nn.rotary import RotaryTable

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
def initialize_(model: nn.Module, seed: int, zero_projections: bool) -> None:
    """Draws every parameter of a `Decoder` but the rows of embedding and readout, and fills its buffers.

    Works on storage that holds anything: a model built on the meta device and given memory by ``to_empty``.

    Queries, keys, values uniform with standard deviation 1/sqrt(d); MLP inputs 0.4 times that; output projections
    zero, or uniform with standard deviation 1/sqrt(fan-in) where the residual rule cannot start from zero branches
    (docs/mathematics.md, source: the walkthrough).

    Args:
        seed: of all draws. zero_projections: whether output projections start at zero.
    """
    inputs: tuple[tuple[str, Any], ...]
    for name, module in model.named_modules():
        if isinstance(module, Attention | RotaryTable):
            module.reset_buffers()
        if isinstance(module, Readout):
            module.reset_scale()
        if isinstance(module, Attention):
            inputs, factor = (
                (("q_proj", module.q_proj), ("k_proj", module.k_proj), ("v_proj", module.v_proj)),
                1.0,
            )
        elif isinstance(module, SquaredReLU | SwiGLU):
            inputs = tuple((child, layer) for child, layer in module.named_children() if child != "out_proj")
            factor = MLP_IN_FACTOR
        else:
            if isinstance(module, ResidualUpdate | ResidualStream):
                module.reset_parameters(named_generator(seed, name))
            continue
        for child, layer in inputs:
            _uniform(layer.weight, factor / math.sqrt(layer.in_features), named_generator(seed, f"{name}.{child}"))
        if zero_projections:
            module.out_proj.weight.zero_()
        else:
            std = 1.0 / math.sqrt(module.out_proj.in_features)
            _uniform(module.out_proj.weight, std, named_generator(seed, f"{name}.out_proj"))


@torch.no_grad()
def initialize_rows_(weight: torch.Tensor, std: float, seed: int, name: str) -> None:
    """Draws the rows of an embedding or readout [V, d] from N(0, std)."""
    weight.copy_(torch.empty(weight.shape, device="cpu").normal_(std=std, generator=named_generator(seed, name)))
