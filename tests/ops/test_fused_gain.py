"""The fused gain against the reference: values, every gradient, and what it keeps for backward."""

import pytest
import torch

from nagnet import ops
from nagnet.ops import fused, reference

BOTH = (fused.recomputing_gain, reference.gain)
NAMES = ("gain", "grad direction", "grad weight", "grad bias", "grad mixture", "grad raw_beta", "grad scale")


@pytest.fixture(autouse=True)
def plain(monkeypatch):
    """Fused bodies without a compiler: the mathematics alone, in seconds."""
    monkeypatch.setattr(fused, "_call", lambda body, *arguments: body(*arguments))


def _inputs(rows, d, n_directions, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(wide)

    direction = reference.split(draw(*rows, d))[0].to(dtype)
    weight, bias, mixture = draw(n_directions, d) / d**0.5, draw(n_directions), draw(n_directions)
    return direction, weight, bias, mixture, draw(), draw().abs()


def _run(function, tensors, floor=reference.MODULATION_FLOOR):
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    output = function(*leaves, floor)
    upstream = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    output.backward(upstream.to(output.dtype))
    return [output.detach(), *(leaf.grad for leaf in leaves)]


def _relative(result, truth):
    error = (result.double() - truth.double()).square().mean().sqrt()
    return float(error / truth.double().square().mean().sqrt().clamp(min=1e-30))


@pytest.mark.parametrize("shape", [(), (1,), (7,), (2, 1), (2, 5)], ids=str)
@pytest.mark.parametrize(("d", "n_directions"), [(1, 1), (3, 4), (123, 32)])
def test_equals_the_reference_in_float64(shape, d, n_directions):
    inputs = _inputs(shape, d, n_directions)
    for name, a, b in zip(NAMES, *(_run(function, inputs) for function in BOTH), strict=True):
        assert a.shape == b.shape and _relative(a, b) < 1e-11, name


def test_gradcheck():
    inputs = [tensor.requires_grad_() for tensor in _inputs((4,), 5, 3)]
    assert torch.autograd.gradcheck(fused.recomputing_gain, inputs, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_is_at_most_twice_that_of_the_reference(dtype):
    runs = []  # several, since the rounding of one scalar gradient is a matter of luck
    for seed in range(16):
        inputs = _inputs((200,), 64, 8, dtype, seed)
        truth = _run(reference.gain, [tensor.double() for tensor in inputs])
        runs.append([_run(function, inputs) for function in BOTH] + [truth])
    floor = torch.finfo(torch.float32).eps / 4  # where both are exact to rounding a ratio means nothing
    for index, name in enumerate(NAMES):
        fast, slow, truth = (torch.stack([run[arm][index].double() for run in runs]) for arm in range(3))
        assert _relative(fast, truth) <= 2.0 * max(_relative(slow, truth), floor), name


@pytest.mark.parametrize("bias", [-200.0, 200.0], ids=["floor", "ceiling"])
def test_a_clamped_modulation_has_the_gradients_of_the_reference(bias):
    direction, weight, _, mixture, raw_beta, scale = _inputs((9,), 8, 4)
    inputs = (direction, weight, torch.full((4,), bias, dtype=torch.float64), mixture, raw_beta, scale)
    for name, a, b in zip(NAMES, *(_run(function, inputs) for function in BOTH), strict=True):
        assert a.isfinite().all(), name
        torch.testing.assert_close(a, b, msg=name)


def test_keeps_its_inputs_only():
    inputs = [tensor.requires_grad_() for tensor in _inputs((50,), 64, 8, torch.float32)]
    own, kept = {tensor.data_ptr() for tensor in inputs}, set()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.add(t.data_ptr()), lambda t: t):
        fused.recomputing_gain(*inputs)
    assert kept == own


def test_is_float32_under_autocast():
    inputs = _inputs((50,), 64, 8, torch.bfloat16)
    outside = _run(fused.recomputing_gain, inputs)
    with torch.autocast("cpu", torch.bfloat16):
        within = _run(fused.recomputing_gain, inputs)
    assert within[0].dtype == torch.float32
    for name, a, b in zip(NAMES, within, outside, strict=True):
        torch.testing.assert_close(a, b, msg=name, rtol=0, atol=0)


@pytest.mark.parametrize(("dtype", "recomputes"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_activations_are_formed_again_beside_a_16_bit_direction_only(dtype, recomputes):
    inputs = [tensor.requires_grad_() for tensor in _inputs((50,), 64, 8, dtype)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape), lambda t: t):
        fused.gain(*inputs, reference.MODULATION_FLOOR)
    assert ((50, 8) not in kept) == recomputes


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_row_compiled(dtype):
    """The path of decoding: its own product, no library call, the reference's value and gradients."""
    arguments = [torch.randn(size) for size in ((1, 1, 48), (6, 48), (6,), (6,), (), ())]
    arguments[0] = arguments[0].to(dtype)
    for argument in arguments:
        argument.requires_grad_(True)
    compiled = torch.compile(lambda *inputs: ops.gain(*inputs), fullgraph=True)
    found, expected = compiled(*arguments), reference.gain(*arguments)
    torch.testing.assert_close(found, expected)
    for a, b in zip(
        torch.autograd.grad(found.sum(), arguments), torch.autograd.grad(expected.sum(), arguments), strict=True
    ):
        torch.testing.assert_close(a, b)
