"""The Triton kernels on a CPU, by Triton's interpreter: run by test_triton.py in a process with TRITON_INTERPRET=1.

A process is either interpreted or not, from its first import of triton on, so these tests have one. By hand:
TRITON_INTERPRET=1 python -m pytest tests/ops/triton_interpreted.py
"""

import os

import pytest
import torch

from nagnet import ops
from nagnet.benchmarks import gpu_kernels
from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.residual import NormAgnosticResidual, PreNormResidual
from nagnet.nn.skip import SkipPolicy
from nagnet.ops import fused, reference

assert os.environ.get("TRITON_INTERPRET") == "1", "set TRITON_INTERPRET=1"
interpreter = pytest.importorskip("triton.runtime.interpreter")
kernels = pytest.importorskip("nagnet.ops.triton")

# numpy warns of lanes that a mask or tl.where drops.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
EPS = torch.finfo(torch.float32).eps


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """Outputs hold NaN until a kernel writes them; bfloat16 is rounded as on a GPU, where the interpreter cuts off."""
    monkeypatch.setattr(kernels, "_empty", lambda shape, like, dtype: torch.full(shape, torch.nan, dtype=dtype))
    plain = interpreter.InterpreterBuilder.cast_impl

    def rounded(self, source, to):
        if source.dtype.scalar == interpreter.tl.float32 and to.scalar == interpreter.tl.bfloat16:
            bits = torch.tensor(source.data).to(torch.bfloat16).view(torch.int16).numpy().view("uint16")
            return interpreter.TensorHandle(bits, to.scalar)
        return plain(self, source, to)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", rounded)


def draw_inputs(batch, d, dtype=torch.float32, n_directions=5, seed=0):
    """Direction, log norm, branch and gain, then the parameters of the next gain."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.promote_types(dtype, torch.float32)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    direction = reference.split(draw(*batch, d))[0].to(dtype)
    branch = (0.5 * draw(*batch, d) + 0.2).to(dtype)
    rows = (direction, draw(*batch).to(wide), branch, draw(*batch).abs().to(wide))
    weight = draw(n_directions, d) / d**0.5
    parameters = (weight, draw(n_directions), draw(n_directions), draw(), draw().abs())
    return *rows, *(parameter.to(wide) for parameter in parameters)


def advance(module, *options):
    return lambda *t: module.advance(*t[:4], t[4:], *options)


def run(function, tensors, rounding=None):
    """Outputs, then the gradients of all inputs, for a fixed random upstream, rounded to the types ``rounding``."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    outputs = function(*leaves)
    generator = torch.Generator().manual_seed(1)
    draws = [torch.randn(output.shape, generator=generator, dtype=torch.float64) for output in outputs]
    rounding = rounding or [output.dtype for output in outputs]
    upstream = [draw.to(dtype).to(o.dtype) for draw, dtype, o in zip(draws, rounding, outputs, strict=True)]
    torch.autograd.backward(outputs, upstream)
    return [*(output.detach() for output in outputs), *(leaf.grad for leaf in leaves)]


def rms(x):
    return float(x.double().square().mean().sqrt())


def cancelling(direction, branch, gain):
    """What gradients are differences of: a u, for u of size 1. With d of 1 or 3 little of it remains."""
    f = branch - branch.mean(dim=-1, keepdim=True)
    f = f - (f * direction).mean(dim=-1, keepdim=True) / reference.mean_square(direction) * direction
    return gain.unsqueeze(-1) * torch.rsqrt(reference.mean_square(f) + reference.BRANCH_EPS)


def compare(ours, eager, names, draws):
    """Asserts that the error against float64 is at most twice the reference's in the same type, over several draws.

    A ratio of errors means nothing where both are of the last bits: one of a number, a few of a sum of such.
    """
    runs = []
    for inputs in draws:
        fast = run(ours, inputs)
        n_outputs = len(fast) - len(inputs)
        truth = run(eager, [tensor.double() for tensor in inputs], [output.dtype for output in fast[:n_outputs]])
        runs.append((fast, run(eager, inputs), truth))
    for index, name in enumerate(names):
        fast, slow, truth = (torch.cat([r[arm][index].double().flatten() for r in runs]) for arm in range(3))
        assert fast.isfinite().all(), name
        of_sum = draws[0][0].shape[:-1].numel() ** 0.5  # size of a sum over rows whose terms have either sign
        bits = EPS * max(rms(truth), 0.5 * of_sum if name in SUMS else 0.0)
        if name in ("grad branch", "grad direction"):
            direction, _, branch, gain = (tensor.double() for tensor in draws[0][:4])
            bits = max(bits, 0.5 * EPS * rms(cancelling(direction, branch, gain)))
        assert rms(fast - truth) <= 2.0 * max(rms(slow - truth), bits), (
            f"{name}: {rms(fast - truth):.2e}, reference {rms(slow - truth):.2e}, truth {rms(truth):.2e}"
        )


ROTATED = ("direction", "log_norm", "grad direction", "grad log_norm", "grad branch", "grad gain")
PARAMETERS = ("grad weight", "grad bias", "grad mixture", "grad raw_beta", "grad scale")
SUMS = ("grad gain", *PARAMETERS)
ADVANCED = (*ROTATED[:2], "next gain", *ROTATED[2:], *PARAMETERS)


@pytest.fixture
def wide_sweeps(monkeypatch):
    """Fewer, wider chunks: the interpreter's time is per operation, not per number."""
    monkeypatch.setattr(kernels, "WIDE", 2048)
    monkeypatch.setattr(kernels, "CHUNK", 1024)


widths = pytest.mark.parametrize(
    ("d", "length"),
    [(d, 1) for d in (1, 3, 64, 123, 640, 4097)]
    + [(d, 63) for d in (1, 3, 64, 123, 640)]
    + [pytest.param(4097, 63, marks=pytest.mark.slow)],
)


@dtypes
@widths
def test_advance(dtype, length, d, wide_sweeps):
    draws = [draw_inputs((8 if length == 1 else 1, length), d, dtype)]
    compare(advance(kernels), advance(reference), ADVANCED, draws)


@pytest.mark.parametrize(("d", "dtype"), [(123, torch.float32), (640, torch.bfloat16)], ids=str)
def test_advance_in_the_chunks_of_a_gpu(d, dtype):
    draws = [draw_inputs((20,), d, dtype, n_directions=32)]
    compare(advance(kernels), advance(reference), ADVANCED, draws)


@dtypes
@pytest.mark.parametrize(("d", "length"), [(1, 63), (3, 20), (64, 1), (123, 63), (640, 1), (4097, 1)])
def test_write(dtype, length, d, wide_sweeps):
    draws = [draw_inputs((8 if length == 1 else 1, length), d, dtype)[:4]]
    compare(kernels.rotate, reference.rotate, ROTATED, draws)


def test_a_single_row():
    inputs = draw_inputs((1,), 24)
    for name, a, b in zip(ADVANCED, *(run(advance(m), inputs) for m in (kernels, reference)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5, msg=name)


@dtypes
@widths
def test_add_norm(dtype, length, d):
    draws = [[tensor.to(dtype) for tensor in draw_inputs((2, length), d)[:3:2]]]
    compare(kernels.add_norm, reference.add_norm, ("stream", "reading", "grad stream", "grad added"), draws)


def test_add_norm_of_zero_rows_and_of_two_types():
    stream, _, branch, *_ = draw_inputs((5,), 24)
    stream[1] = branch[1] = 0
    stream[2] = -branch[2]
    inputs = (stream.to(torch.bfloat16), branch)
    for a, b in zip(run(kernels.add_norm, inputs), run(reference.add_norm, inputs), strict=True):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@dtypes
@pytest.mark.parametrize("slant", [2.0, -2.0], ids=["parallel", "opposite"])
def test_a_branch_nearly_along_the_stream(dtype, slant):
    """Where a difference of squares would cancel."""
    draws = []
    for seed in range(2):
        direction, log_norm, branch, *rest = draw_inputs((20,), 64, dtype, seed=seed)
        branch = (slant * direction.double() + 0.01 * branch.double()).to(dtype)
        draws.append((direction, log_norm, branch, *rest))
    compare(advance(kernels), advance(reference), ADVANCED, draws)


def special_rows(dtype, d=24):
    """Rows of another path: zero branch, gain, stream, stream and branch; constant, tiny and huge branch."""
    direction, log_norm, branch, gain, *parameters = draw_inputs((9,), d, dtype)
    branch[0] = 0
    gain[1] = 0
    direction[2] = 0
    direction[3] = branch[3] = 0
    branch[4] = 1.5
    branch[5] *= 1e-4
    branch[6] *= 1e4
    return direction, log_norm, branch, gain, *parameters


@pytest.mark.parametrize(
    ("dtype", "branch_eps"),
    [(torch.float32, 0.0), *((dtype, eps) for dtype in DTYPES.values() for eps in (1e-6, 1.0))],
    ids=str,
)
def test_special_rows_have_the_values_and_gradients_of_the_reference(dtype, branch_eps):
    inputs = special_rows(dtype)
    results = [run(advance(module, branch_eps), inputs) for module in (kernels, reference)]
    tolerance = {"rtol": 3e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.02}
    for name, a, b in zip(ADVANCED, *results, strict=True):
        assert a.isfinite().all(), name
        scale = 1.0 + b.double().norm()  # gradients of rows with an eps of 0 reach 1e7
        torch.testing.assert_close(a.double() / scale, b.double() / scale, **tolerance, msg=name)


@dtypes
@pytest.mark.parametrize("function", [kernels.rotate, advance(kernels)], ids=["write", "advance"])
def test_rows_that_do_not_turn_are_returned_to_the_bit(dtype, function):
    inputs = special_rows(dtype)
    inputs = inputs[: 4 if function is kernels.rotate else 9]
    results = run(function, inputs)
    for row in (0, 1, 3):
        assert torch.equal(results[0][row], inputs[0][row]) and torch.equal(results[1][row], inputs[1][row])
    to_branch = results[4 if function is kernels.rotate else 5]
    assert 0 < to_branch[0].float().norm() <= 1e4
    assert not torch.equal(results[0][5], inputs[0][5])


@pytest.mark.parametrize(("bias", "floor"), [(-200.0, 1e-6), (200.0, 1e-6), (-8.0, 1e-3)], ids=str)
def test_a_clamped_modulation_has_no_gradient(bias, floor):
    direction, log_norm, branch, gain, weight, bias_, *rest = draw_inputs((9,), 8)
    inputs = (direction, log_norm, branch, gain, weight, torch.full_like(bias_, bias), *rest)
    results = [run(advance(module, 1e-6, floor), inputs) for module in (kernels, reference)]
    for name, a, b in zip(ADVANCED, *results, strict=True):
        assert a.isfinite().all(), name
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)
    if bias < -8:
        assert not results[0][7].any() and results[0][10].any()  # of W none, of raw beta some


@pytest.mark.parametrize("n_directions", [1, 16, 33])
def test_any_number_of_directions(n_directions):
    draws = [draw_inputs((9,), 20, n_directions=n_directions, seed=seed) for seed in range(2)]
    compare(advance(kernels), advance(reference), ADVANCED, draws)


@pytest.mark.parametrize("raw_beta", [-30.0, 0.0, 30.0])
def test_softplus_far_from_zero(raw_beta):
    inputs = list(draw_inputs((9,), 8))
    inputs[7] = torch.tensor(raw_beta)
    for name, a, b in zip(ADVANCED, *(run(advance(m), inputs) for m in (kernels, reference)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6, msg=name)


def strided(tensor):
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def test_non_contiguous_inputs_and_upstreams():
    inputs = draw_inputs((4, 10), 12)
    for function, arguments in ((advance(kernels), inputs), (kernels.add_norm, inputs[:3:2])):
        expected = run(function, arguments)
        leaves = [strided(tensor).requires_grad_() for tensor in arguments]
        assert not leaves[0].is_contiguous()
        outputs = function(*leaves)
        generator = torch.Generator().manual_seed(1)
        upstream = [torch.randn(o.shape, generator=generator, dtype=torch.float64).to(o.dtype) for o in outputs]
        torch.autograd.backward(outputs, [strided(gradient) for gradient in upstream])
        for a, b in zip([*outputs, *(leaf.grad for leaf in leaves)], expected, strict=True):
            assert torch.equal(a, b)


def test_scalars_for_all_rows_are_broadcast():
    direction, _, branch, *_ = draw_inputs((3, 4), 8)
    inputs = (direction, torch.zeros(()), branch, torch.tensor(0.5))
    for a, b in zip(run(kernels.rotate, inputs), run(reference.rotate, inputs), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("function", [kernels.rotate, advance(kernels)], ids=["write", "advance"])
def test_one_output_alone_has_a_gradient(function):
    inputs = draw_inputs((7,), 8)[: 4 if function is kernels.rotate else 9]
    leaves = [tensor.clone().requires_grad_() for tensor in inputs]
    function(*leaves)[1].sum().backward()
    torch.testing.assert_close(leaves[1].grad, torch.ones(7))
    assert all(leaf.grad is None or leaf.grad.isfinite().all() for leaf in leaves)


def test_keeps_direction_branch_and_scalars_only():
    inputs = [tensor.requires_grad_() for tensor in draw_inputs((50,), 64)]
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        new_direction, *_ = advance(kernels)(*inputs)
    own = {tensor.data_ptr() for tensor in (*inputs, new_direction)}
    extra = [tensor.numel() for pointer, tensor in kept.items() if pointer not in own]
    assert extra == [4 * 50]  # R' itself is what the next sublayer reads and keeps
    kept.clear()
    stream, branch = inputs[0].detach().requires_grad_(), inputs[2]
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.setdefault(t.data_ptr(), t), lambda t: t):
        added, _ = kernels.add_norm(stream, branch)
    assert set(kept) == {added.data_ptr()}


def test_results_do_not_depend_on_the_order_of_programs(monkeypatch):
    monkeypatch.setattr(kernels, "ROWS_OF_A_PART", 32)
    inputs = draw_inputs((70,), 16, torch.bfloat16)  # three programs, three parts of the gradient of W
    forwards = run(advance(kernels), inputs)
    plain = interpreter.GridExecutor.__call__

    def backwards(self, *arguments, **options):
        class Reversed:  # numbers of programs from the last to the first
            def __call__(self, x):
                return reversed(range(x))

        monkeypatch.setitem(plain.__globals__, "range", Reversed())
        try:
            return plain(self, *arguments, **options)
        finally:
            monkeypatch.delitem(plain.__globals__, "range")

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", backwards)
    for name, a, b in zip(ADVANCED, forwards, run(advance(kernels), inputs), strict=True):
        assert torch.equal(a, b), name


def test_a_nan_stays_in_its_row():
    inputs = draw_inputs((40,), 8)
    clean = advance(kernels)(*inputs)
    inputs[2][1, 2] = torch.nan
    others = torch.arange(40) != 1
    for a, b in zip(clean, advance(kernels)(*inputs), strict=True):
        assert torch.equal(a[others], b[others]) and b[1].isnan().all()


def test_second_derivatives_are_refused_rather_than_wrong():
    inputs = [tensor.requires_grad_() for tensor in draw_inputs((2,), 4)]
    (gradient,) = torch.autograd.grad(advance(kernels)(*inputs)[0].sum(), inputs[2], create_graph=True)
    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        gradient.sum().backward()


@pytest.fixture
def backend():
    yield ops.set_backend
    ops.set_backend("auto")


@pytest.mark.parametrize("rule", ["norm_agnostic", "with X", "pre_norm"])
def test_rules_compute_the_same_with_either_backend(backend, rule):
    results = []
    for name in ("reference", "triton"):
        backend(name)
        torch.manual_seed(0)
        make = PreNormResidual if rule == "pre_norm" else NormAgnosticResidual
        options = {"skip_vector": True} if rule == "with X" else {}
        first, second = (make(16, update_index=index, **options) for index in (1, 2))
        if rule == "with X":
            torch.nn.init.normal_(first.skip_vector)
        x, branch = torch.randn(3, 5, 16, requires_grad=True), torch.randn(3, 5, 16, requires_grad=True)
        state = first.begin(x)
        state, reading, gain = first.advance(state, branch, first.gain(state), second)
        state = second.write(state, reading.sin(), gain)
        (state.merge().square().sum() + reading.sum()).backward()
        leaves = [x, branch, *first.parameters(), *second.parameters()]
        results.append([state.merge().detach(), reading.detach(), *(leaf.grad for leaf in leaves)])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("changes", [{}, {"residual": "pre_norm"}, {"skip": SkipPolicy(threshold=0.5)}], ids=str)
def test_a_model_computes_the_same_with_either_backend(backend, changes):
    config = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=32, n_directions=3)
    config = config.replace(**changes)
    tokens = torch.arange(24).view(2, 12)
    results = []
    for name in ("reference", "triton"):
        backend(name)
        model = Decoder(config, seed=0)
        with torch.no_grad():
            for parameter in model.blocks.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        loss = model.loss(tokens, tokens.roll(-1, dims=1))
        loss.backward()
        results.append([loss.detach(), *(parameter.grad for parameter in model.parameters())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-6)


def test_what_the_kernels_are_not_for_goes_to_the_reference(monkeypatch):
    for name in ("rotate", "advance", "add_norm"):
        monkeypatch.setattr(kernels, name, lambda *a: pytest.fail("the kernels were called"))
    wide, empty = draw_inputs((3,), 8, torch.float64), draw_inputs((0,), 8)
    for inputs in (wide, empty):
        out = ops.advance(*inputs[:4], inputs[4:], backend="triton")
        assert out[0].dtype == inputs[0].dtype and out[0].shape == inputs[0].shape
        ops.add_norm(inputs[0], inputs[2], backend="triton")


def test_auto_leaves_a_cpu_alone():
    assert ops.get_backend() == "auto"
    inputs = draw_inputs((3,), 8)
    expected = reference.rotate(*inputs[:4])
    for a, b in zip(ops.rotate(*inputs[:4]), expected, strict=True):
        assert torch.equal(a, b)
    with pytest.raises(UserError, match="auto, reference, fused, triton"):
        ops.set_backend("cuda")


def test_the_benchmark_of_a_gpu_runs_with_the_kernels(monkeypatch):
    """Its CPU tests have the reference in their place."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    monkeypatch.setattr(fused, "_call", lambda body, *arguments: body(*arguments))
    monkeypatch.setattr(gpu_kernels, "INNER", 1)
    cpu = torch.device("cpu")
    rows = gpu_kernels.bench_errors(kernels, [(24, "float32")], 20, 3, cpu)
    assert [row["operation"] for row in rows] == ["advance", "write", "add_norm"]
    assert all(row["within"] and row["same_bits_twice"] for row in rows)
    assert gpu_kernels.bench_offsets(kernels, 80, 24, cpu)["equal"]
    names = [row["name"] for row in gpu_kernels.bench_update(kernels, 8, 24, 3, cpu, 2, compiled=False)]
    assert "advance, triton" in names and "add_norm, triton" in names
    tiles = gpu_kernels.bench_tiles(kernels, (16, 32), 8, 24, 3, cpu, 2)
    assert [row["rows_of_a_tile"] for row in tiles] == [16, 32]
