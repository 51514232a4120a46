"""Analytic gradients of the reference against finite differences in float64."""

import pytest
import torch

from nagnet.nn.residual import NormAgnosticResidual
from nagnet.ops import reference


@pytest.fixture
def leaf(generator):
    """Makes a random float64 tensor that wants a gradient."""

    def make(*shape, scale=1.0):
        return (scale * torch.randn(shape, generator=generator, dtype=torch.float64)).requires_grad_()

    return make


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_split(leaf, scale):
    assert torch.autograd.gradcheck(reference.split, (leaf(2, 3, 5, scale=scale),), eps=1e-6 * scale)


def test_merge(leaf):
    assert torch.autograd.gradcheck(reference.merge, (leaf(2, 5), leaf(2)))


@pytest.mark.parametrize("branch_eps", [0.0, 1e-6, 0.5])
def test_rotate(leaf, branch_eps):
    def rotate(*inputs):
        return reference.rotate(*inputs, branch_eps=branch_eps)

    assert torch.autograd.gradcheck(rotate, (leaf(2, 3, 5), leaf(2, 3), leaf(2, 3, 5), leaf(2, 3)))


@pytest.mark.parametrize("n_directions", [1, 4])
def test_modulation(leaf, n_directions):
    inputs = leaf(2, 3, 5), leaf(n_directions, 5), leaf(n_directions), leaf(n_directions), leaf()
    assert torch.autograd.gradcheck(reference.modulation, inputs)


def test_whole_update(leaf):
    """Split, modulate, rotate: with respect to the stream, the branch and every parameter."""
    rule = NormAgnosticResidual(5, update_index=2, n_directions=3).double()
    rule.forward = lambda x, branch: tuple(rule.write(rule.begin(x), branch))
    names = [name for name, _ in rule.named_parameters()]

    def update(x, branch, *parameters):
        given = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(rule, given, (x, branch))

    parameters = [leaf(*parameter.shape) for parameter in rule.parameters()]
    assert len(names) == 5
    assert torch.autograd.gradcheck(update, (leaf(2, 3, 5), leaf(2, 3, 5), *parameters))
