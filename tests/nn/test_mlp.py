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


def test_channel_scales(generator):
    """relu(s u)^2 and silu(s_gate v) s_up u, with scales that start at 1 and are trained as they act."""
    x = torch.randn(2, 3, 6, generator=generator)
    squared, swiglu = SquaredReLU(6, 10, channel_scales=True), SwiGLU(6, 10, channel_scales=True)
    scales = [squared.up_scale, swiglu.up_scale, swiglu.gate_scale]
    for scale in scales:
        assert torch.equal(scale.weight, torch.ones(10)) and torch.equal(scale(), torch.ones(10))
        scale.weight.data = torch.randn(10, generator=generator)
    up, gate, act = (scale.weight for scale in scales[1:] + scales[:1])
    hidden = (act * (x @ squared.up_proj.weight.T)).clamp(min=0) ** 2
    torch.testing.assert_close(squared(x), hidden @ squared.out_proj.weight.T)
    gated = torch.nn.functional.silu(gate * (x @ swiglu.gate_proj.weight.T)) * up * (x @ swiglu.up_proj.weight.T)
    torch.testing.assert_close(swiglu(x), gated @ swiglu.out_proj.weight.T)


@pytest.mark.parametrize("name", MLPS)
def test_no_biases(name):
    assert all(parameter.dim() == 2 for parameter in MLPS[name](6, 10).parameters())
