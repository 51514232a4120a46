"""Learned scales act at one size and train at another."""

import pytest
import torch

from nagnet.nn.scale import LearnedScale, scaled


def test_value_and_parameter():
    scale = LearnedScale(4, initial=0.05, stored=0.25)
    torch.testing.assert_close(scale(), torch.full((4,), 0.05))
    assert torch.equal(scale.weight, torch.full((4,), 0.25))


def test_a_step_of_the_parameter_moves_the_value_by_the_ratio():
    scale = LearnedScale(4, initial=0.05, stored=0.25)
    with torch.no_grad():
        scale.weight += 0.01
    torch.testing.assert_close(scale(), torch.full((4,), 0.05 + 0.01 * 0.05 / 0.25))


def test_reset():
    scale = LearnedScale(4, initial=2.0, stored=0.25)
    scale.weight.data.fill_(7.0)
    scale.reset_parameters()
    torch.testing.assert_close(scale(), torch.full((4,), 2.0))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_scaled_keeps_the_type_of_its_input(dtype):
    x = torch.ones(3, 4, dtype=dtype)
    assert scaled(x, None) is x
    doubled = scaled(x, LearnedScale(4, 2.0, 1.0).to(torch.bfloat16))
    assert doubled.dtype == dtype and torch.equal(doubled, 2 * x)


def test_parameter_stays_float32():
    assert LearnedScale(4, 1.0, 1.0).to(torch.bfloat16).weight.dtype == torch.float32
