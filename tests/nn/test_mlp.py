"""Feed-forward sublayers by their formulas."""

import pytest
import torch

from nagnet.nn.mlp import MLPS, SquaredReLU, SwiGLU


def test_squared_relu(generator):
    mlp, x = SquaredReLU(6, 10), torch.randn(2, 3, 6, generator=generator)
    hidden = (x @ mlp.up_proj.weight.T).clamp(min=0) ** 2
    torch.testing.assert_close(mlp(x), hidden @ mlp.out_proj.weight.T)


def test_swiglu(generator):
    mlp, x = SwiGLU(6, 10), torch.randn(2, 3, 6, generator=generator)
    gate = x @ mlp.gate_proj.weight.T
    hidden = gate / (1 + torch.exp(-gate)) * (x @ mlp.up_proj.weight.T)
    torch.testing.assert_close(mlp(x), hidden @ mlp.out_proj.weight.T)


@pytest.mark.parametrize("name", MLPS)
def test_no_biases(name):
    assert all(parameter.dim() == 2 for parameter in MLPS[name](6, 10).parameters())
