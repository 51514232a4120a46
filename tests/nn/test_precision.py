"""Gates, norms and the readout stay float32, whatever is done to the model around them."""

import copy
import math

import pytest
import torch

from nagnet.nn.modulator import Modulator
from nagnet.nn.precision import Float32Embedding
from nagnet.nn.readout import Readout, ReadoutConfig
from nagnet.nn.residual import NormAgnosticResidual, NormAgnosticStream
from nagnet.nn.rotary import RotaryTable


class Host(torch.nn.Module):
    """A 16-bit model with everything in it that must not be 16-bit."""

    def __init__(self):
        super().__init__()
        self.body = torch.nn.Linear(8, 8)
        self.embedding = Float32Embedding(6, 8)
        self.stream = NormAgnosticStream(8, 2, n_directions=3)
        self.rotary = RotaryTable(4, 1e4, 6)
        self.readout = Readout(8, 6, ReadoutConfig(scale="learned"))

    def wide(self):
        return [*self.stream.parameters(), *self.readout.parameters(), *self.embedding.parameters()]


def assigned(model, dtype):
    model.load_state_dict({name: value.to(dtype) for name, value in model.state_dict().items()}, assign=True)
    return model


def reloaded(model, dtype):
    twin = Host().to(dtype)
    twin.load_state_dict(model.state_dict())
    return twin


def autocast(model, dtype):
    with torch.autocast("cpu", dtype):
        state = model.stream.begin(model.embedding(torch.tensor([1, 2])))
        state = model.stream.updates[0].write(state, model.body(state.direction))
        model.readout(*state).sum().backward()
    model.zero_grad()
    return model


ROUTES = {
    "to-bfloat16": lambda model: model.to(torch.bfloat16),
    "half": lambda model: model.half(),
    "bfloat16-twice": lambda model: model.bfloat16().float().bfloat16(),
    "autocast-bfloat16": lambda model: autocast(model, torch.bfloat16),
    "autocast-float16": lambda model: autocast(model, torch.float16),
    "copied": lambda model: copy.deepcopy(model.to(torch.bfloat16)),
    "loaded-into-bfloat16": lambda model: reloaded(model, torch.bfloat16),
    "assigned-from-bfloat16": lambda model: assigned(model, torch.bfloat16),
    "assigned-from-half": lambda model: assigned(model, torch.float16),
}


@pytest.fixture(params=ROUTES.values(), ids=ROUTES)
def host(request):
    return request.param(Host())


def test_slow_gates_train(host):
    """1.0 - 1e-3 is 1.0 in bfloat16, and so is every one of a thousand such steps."""
    parameters = host.wide()
    assert len(parameters) == 2 * 5 + 1 + 2 + 1
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(1.0)
    optimizer = torch.optim.SGD(parameters, lr=1e-3)
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    for _ in range(1000):
        optimizer.step()
    for parameter in parameters:
        torch.testing.assert_close(parameter.detach(), torch.zeros(parameter.shape), rtol=0, atol=1e-4)


def test_small_gates_train_upward(host):
    parameters = host.wide()
    with torch.no_grad():
        for parameter in parameters:
            parameter.fill_(0.05)
        for _ in range(1000):
            torch._foreach_add_(parameters, 1e-4)
    for parameter in parameters:
        torch.testing.assert_close(parameter.detach(), torch.full(parameter.shape, 0.15), rtol=0, atol=1e-4)


def test_buffers_stay_wide(host):
    buffers = dict(host.named_buffers())
    assert {"rotary.cos", "rotary.sin", "stream.updates.0.injection"} <= set(buffers)
    assert all(buffer.dtype == torch.float32 for buffer in buffers.values())


def test_the_rest_follows_the_cast():
    assert Host().to(torch.bfloat16).body.weight.dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_cast_keeps_every_digit(dtype):
    modulator = Modulator(8)
    before = copy.deepcopy(modulator.state_dict())
    modulator.to(dtype)
    for name, value in modulator.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_float64_passes_through():
    rule = NormAgnosticResidual(8, 1).double()
    assert all(parameter.dtype == torch.float64 for parameter in rule.parameters())
    state = rule.begin(torch.randn(2, 8, dtype=torch.float64))
    assert state.log_norm.dtype == rule.gain(state).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("route", ["cast", "autocast"])
def test_lane_and_gain_are_float32(dtype, route):
    rule = NormAgnosticResidual(768, 1)
    x = torch.full((2, 768), 300.0)
    if route == "cast":
        rule, x = rule.to(dtype), x.to(dtype)
    with torch.autocast("cpu", dtype, enabled=route == "autocast"):
        state = rule.begin(x)
        branch = torch.randn(2, 768, dtype=dtype)
        gain = rule.gain(state)
        written = rule.write(state, branch, gain)
    assert gain.dtype == state.log_norm.dtype == written.log_norm.dtype == torch.float32
    assert written.direction.dtype == x.dtype
    assert state.log_norm[0].item() == pytest.approx(math.log(300.0), abs=1e-3)


def test_loading_does_not_change_the_dictionary_it_is_given():
    narrow = {name: value.bfloat16() for name, value in Modulator(8).state_dict().items()}
    Modulator(8).load_state_dict(narrow, assign=True)
    assert all(value.dtype == torch.bfloat16 for value in narrow.values())
