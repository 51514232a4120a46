"""The fused updates against the reference: values, every gradient, and what they keep for backward."""

import pytest
import torch

from nagnet import ops
from nagnet.errors import UserError
from nagnet.nn.residual import NormAgnosticResidual, PreNormResidual
from nagnet.ops import fused, reference

EPS = reference.BRANCH_EPS
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def plain(monkeypatch):
    """Fused bodies without a compiler: the mathematics alone, in seconds."""
    monkeypatch.setattr(fused, "_call", lambda body, *arguments: body(*arguments))


def _inputs(rows, d, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    direction = reference.split(draw(*rows, d))[0]
    wide = torch.promote_types(dtype, torch.float32)
    branch, gain = 0.5 * draw(*rows, d) + 0.2, draw(*rows).abs()
    return direction.to(dtype), draw(*rows).to(wide), branch.to(dtype), gain.to(wide)


def _special_rows(direction, log_norm, branch, gain):
    """Rows that take another path: zero branch, zero gain, zero stream, both zero, constant branch, tiny branch."""
    branch[0] = 0
    gain[1] = 0
    direction[2] = 0
    direction[3] = 0
    branch[3] = 0
    branch[4] = 1.5
    branch[5] = branch[5] * 1e-4
    return direction, log_norm, branch, gain


def _run(function, tensors, seed=1):
    """Outputs, then gradients of all inputs, for a fixed random upstream."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    outputs = function(*leaves)
    generator = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]
    torch.autograd.backward(outputs, upstream)
    return [*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves)]


def _relative(result, truth):
    error = (result.double() - truth.double()).square().mean().sqrt()
    return float(error / truth.double().square().mean().sqrt().clamp(min=1e-30))


ROTATED = ("direction", "log_norm", "grad direction", "grad log_norm", "grad branch", "grad gain")


@pytest.mark.parametrize("d", [3, 8, 123])
def test_rotate_equals_the_reference_in_float64(plain, d):
    inputs = _special_rows(*_inputs((9,), d))
    expected, result = (_run(module.rotate, inputs) for module in (reference, fused))
    for name, a, b in zip(ROTATED, result, expected, strict=True):
        assert _relative(a, b) < 1e-11, name


@pytest.mark.parametrize("shape", [(1,), (2, 1), (2, 5)], ids=str)
def test_width_one_and_single_tokens(plain, shape):
    for d in (1, 2):
        inputs = _inputs(shape, d)
        for name, a, b in zip(ROTATED, *(_run(m.rotate, inputs) for m in (fused, reference)), strict=True):
            torch.testing.assert_close(a, b, msg=name)


def test_gradcheck(plain):
    inputs = [tensor.requires_grad_() for tensor in _inputs((4,), 7)]
    assert torch.autograd.gradcheck(fused.rotate, inputs, eps=1e-6, atol=1e-6)


@pytest.mark.parametrize("d", [64, 123, 640])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("parallel", [False, True], ids=["random", "nearly parallel"])
def test_error_is_at_most_twice_that_of_the_reference(plain, dtype, d, parallel):
    direction, log_norm, branch, gain = _inputs((200,), d, dtype)
    if parallel:  # where a difference of squares would cancel
        branch = (2.0 * direction.double() + 0.01 * branch.double()).to(dtype)
    inputs = (direction, log_norm, branch, gain)
    truth = _run(reference.rotate, [tensor.double() for tensor in inputs])
    fast, slow = (_run(module.rotate, inputs) for module in (fused, reference))
    floor = torch.finfo(torch.float32).eps / 4  # where both are exact to rounding a ratio means nothing
    for name, a, b, c in zip(ROTATED, fast, slow, truth, strict=True):
        assert _relative(a, c) <= 2.0 * max(_relative(b, c), floor), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_zero_branch_leaves_its_row_to_the_bit_and_the_others_alone(plain, dtype):
    direction, log_norm, branch, gain = _inputs((3,), 8, dtype)
    branch[1] = 0
    results = _run(fused.rotate, (direction, log_norm, branch, gain))
    assert torch.equal(results[0][1], direction[1]) and torch.equal(results[1][1], log_norm[1])
    assert all(r.isfinite().all() for r in results)
    assert results[4][1].norm() <= 1e4
    kept = torch.tensor([0, 2])
    without = _run(lambda *t: [o[kept] for o in fused.rotate(*t)], (direction, log_norm, branch, gain))
    assert without[4][1].abs().max() == 0


def test_keeps_direction_branch_and_scalars_only(plain):
    direction, log_norm, branch, gain = (t.requires_grad_() for t in _inputs((50,), 64, torch.float32))
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        fused.rotate(direction, log_norm, branch, gain)
    sizes = sorted(tensor.numel() for tensor in kept.values())
    assert sizes == [50] * 5 + [50 * 64] * 2


def test_second_derivatives_are_refused_rather_than_wrong(plain):
    inputs = [t.requires_grad_() for t in _inputs((2,), 4)]
    (gradient,) = torch.autograd.grad(fused.rotate(*inputs)[0].sum(), inputs[2], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        gradient.sum().backward()


def test_outputs_do_not_depend_on_what_memory_held(plain):
    inputs = _inputs((64,), 33, torch.float32)
    poison = [torch.full((64, 33), torch.nan) for _ in range(20)]
    del poison
    first = _run(fused.rotate, inputs)
    second = _run(fused.rotate, inputs)
    assert all(a.isfinite().all() and torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_non_contiguous_inputs(plain):
    inputs = _inputs((12,), 10)
    strided = [torch.stack([t, t], dim=-1)[..., 0] for t in inputs]
    assert not strided[0].is_contiguous()
    for a, b in zip(_run(fused.rotate, strided), _run(fused.rotate, inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_loops_equal_the_plain_bodies(dtype, monkeypatch):
    inputs = _special_rows(*_inputs((40,), 64, dtype))
    compiled = _run(fused.rotate, inputs)
    monkeypatch.setattr(fused, "_call", lambda body, *arguments: body(*arguments))
    tolerance = {"atol": 1e-5, "rtol": 1e-4} if dtype == torch.float32 else {"atol": 0.03, "rtol": 0.03}
    for name, a, b in zip(ROTATED, compiled, _run(fused.rotate, inputs), strict=True):
        torch.testing.assert_close(a, b, **tolerance, msg=name)


def test_backend_is_chosen_per_call_globally_and_refused_if_unknown(monkeypatch):
    seen = []
    monkeypatch.setattr(fused, "rotate", lambda *a: seen.append("fused"))
    monkeypatch.setattr(reference, "rotate", lambda *a: seen.append("reference"))
    inputs = _inputs((2,), 4)
    try:
        ops.rotate(*inputs, backend="fused")
        ops.rotate(*inputs)
        ops.set_backend("fused")
        ops.rotate(*inputs)
        ops.rotate(*inputs, backend="reference")
    finally:
        ops.set_backend("auto")
    assert seen == ["fused", "reference", "fused", "reference"]
    with pytest.raises(UserError, match="'fast'.*auto, reference, fused"):
        ops.set_backend("fast")


@pytest.mark.parametrize("rule", [NormAgnosticResidual, PreNormResidual])
def test_advance_is_the_same_on_both_backends(plain, rule):
    update, following = rule(16, update_index=1).double(), rule(16, update_index=2).double()
    x, branch = (torch.randn(3, 5, 16, dtype=torch.float64) for _ in range(2))
    results = []
    for backend in ("reference", "fused"):
        ops.set_backend(backend)
        try:
            state = update.begin(x)
            results.append(update.advance(state, branch, update.gain(state), following))
        finally:
            ops.set_backend("auto")
    (state_a, reading_a, gain_a), (state_b, reading_b, gain_b) = results
    for a, b in zip((*state_a, reading_a), (*state_b, reading_b), strict=True):
        torch.testing.assert_close(a, b)
    assert (gain_a is None) == (gain_b is None)
    if gain_a is not None:
        torch.testing.assert_close(gain_a, gain_b)
