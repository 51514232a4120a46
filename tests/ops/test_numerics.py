"""Zero, tiny, huge and 16-bit inputs of the reference (docs/mathematics.md, "Numerics")."""

import math

import pytest
import torch

from nagnet.ops import reference

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
INTEGERS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
dtypes = pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.detach().view(INTEGERS[x.dtype])


@pytest.fixture
def rows(generator):
    """Direction, log norm, branch and gain of three tokens; the branch of the second is zero."""

    def make(dtype):
        direction, log_norm = reference.split(torch.randn(3, 8, generator=generator).to(dtype))
        branch = torch.randn(3, 8, generator=generator).to(dtype)
        branch[1] = 0
        inputs = direction, log_norm, branch, torch.tensor([0.6, 0.7, -0.3])
        return [tensor.clone().requires_grad_() for tensor in inputs]

    return make


def gradients(inputs, upstream):
    direction, log_norm = reference.rotate(*inputs)
    return torch.autograd.grad((direction, log_norm), inputs, upstream)


@dtypes
def test_zero_branch_leaves_its_row_to_the_bit(rows, dtype):
    inputs = rows(dtype)
    direction, log_norm = reference.rotate(*inputs)
    assert torch.equal(bits(direction[1]), bits(inputs[0][1]))
    assert torch.equal(bits(log_norm[1]), bits(inputs[1][1]))
    assert not torch.equal(direction[0], inputs[0][0]) and not torch.equal(direction[2], inputs[0][2])


@dtypes
def test_zero_gain_leaves_its_row_to_the_bit(rows, dtype):
    direction, log_norm, branch, _ = rows(dtype)
    new_direction, new_log_norm = reference.rotate(direction, log_norm, branch + 1, torch.zeros(3))
    assert torch.equal(bits(new_direction), bits(direction)) and torch.equal(bits(new_log_norm), bits(log_norm))


@dtypes
@pytest.mark.parametrize("gain", [0.0, 1.0], ids=["shut", "open"])
def test_gradients_around_a_zero_branch_are_bounded(rows, dtype, gain):
    inputs = rows(dtype)
    inputs[3] = torch.full((3,), gain, requires_grad=True)
    upstream = torch.ones(3, 8, dtype=dtype) * 0.5, torch.ones(3)
    bound = 1e4 * math.hypot(*(float(tensor.float().norm()) for tensor in upstream))
    for gradient in gradients(inputs, upstream):
        assert gradient.isfinite().all()
        assert gradient.float().norm() <= bound


@dtypes
def test_a_zero_branch_does_not_touch_the_gradients_of_other_rows(rows, dtype, generator):
    inputs = rows(dtype)
    upstream = torch.randn(3, 8, generator=generator).to(dtype), torch.randn(3, generator=generator)
    keep = torch.tensor([0, 2])
    alone = gradients([tensor[keep].detach().requires_grad_() for tensor in inputs], [g[keep] for g in upstream])
    for together, expected in zip(gradients(inputs, upstream), alone, strict=True):
        torch.testing.assert_close(together[keep], expected, rtol=1e-6, atol=1e-6)


@dtypes
def test_a_zero_branch_can_leave_zero(rows, dtype):
    """Its own gradient is that of the rotation: alive, though the forward pass returns the row untouched."""
    inputs = rows(dtype)
    upstream = torch.arange(24.0).view(3, 8).sin().to(dtype), torch.zeros(3)
    assert gradients(inputs, upstream)[2][1].float().norm() > 1.0


@dtypes
def test_branch_eps_of_zero_is_finite(rows, dtype):
    inputs = rows(dtype)
    outputs = reference.rotate(*inputs, branch_eps=0.0)
    assert all(output.isfinite().all() for output in outputs)
    assert torch.equal(bits(outputs[0][1]), bits(inputs[0][1]))


@pytest.mark.parametrize("dtype", [*DTYPES.values(), torch.float64], ids=[*DTYPES, "fp64"])
def test_zero_stream_is_finite_both_ways(dtype):
    x = torch.zeros(2, 8, dtype=dtype, requires_grad=True)
    direction, log_norm = reference.split(x)
    assert not direction.any() and log_norm.isfinite().all()
    assert torch.equal(reference.merge(direction, log_norm), x)
    (gradient,) = torch.autograd.grad((direction, log_norm), x, (torch.ones_like(direction), torch.ones_like(log_norm)))
    assert gradient.isfinite().all() and gradient.float().norm() <= 1e4


@pytest.mark.parametrize("branch_scale", [0.0, 1.0], ids=["zero-branches", "live-branches"])
def test_zero_stream_at_depth(generator, branch_scale):
    x = torch.zeros(2, 8, requires_grad=True)
    direction, log_norm = reference.split(x)
    for index in range(1, 129):
        branch = branch_scale * torch.randn(2, 8, generator=generator)
        direction, log_norm = reference.rotate(direction, log_norm, branch, torch.full((2,), index**-0.5))
    assert direction.isfinite().all() and log_norm.isfinite().all()
    (direction.square().sum() + log_norm.sum() + direction.sum()).backward()
    assert x.grad.isfinite().all()


def test_fp16_row_whose_square_overflows():
    x = torch.full((768,), 300.0, dtype=torch.float16)
    direction, log_norm = reference.split(x)
    assert log_norm.item() == pytest.approx(5.7038, abs=1e-3)
    torch.testing.assert_close(direction, torch.ones_like(x))


@pytest.mark.parametrize("exponent", [-6, -4, -2, 0, 2, 4])
def test_round_trip_in_fp32(generator, exponent):
    x = 10.0**exponent * torch.randn(4, 8, generator=generator)
    torch.testing.assert_close(reference.merge(*reference.split(x)), x, rtol=2e-6, atol=0)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.01), (torch.float16, 0.002)], ids=["bf16", "fp16"])
@pytest.mark.parametrize("scale", [0.01, 1.0, 1e4])
def test_round_trip_in_16_bit(generator, dtype, tolerance, scale):
    x = (scale * torch.randn(4, 8, generator=generator).clamp(-3, 3)).to(dtype)
    torch.testing.assert_close(reference.merge(*reference.split(x)), x, rtol=tolerance, atol=0)


def test_lane_sum():
    """0.03 is lost beside 8.0 in bfloat16; the lane adds it 96 times."""
    direction, log_norm = torch.ones(1, 4, dtype=torch.bfloat16), torch.tensor([8.0])
    branch = torch.tensor([[1.0, -1.0, 1.0, -1.0]], dtype=torch.bfloat16)
    gain = torch.tensor([math.sqrt(math.expm1(0.06))])
    for _ in range(96):
        new, log_norm = reference.rotate(direction, log_norm, branch, gain)
        assert new.dtype == torch.bfloat16
    assert log_norm.dtype == torch.float32
    assert log_norm.item() == pytest.approx(10.88, abs=1e-3)


@pytest.mark.parametrize("kind", ["random", "nearly-parallel", "nearly-opposite", "huge", "tiny", "constant"])
@pytest.mark.parametrize("gain", [None, 1.0], ids=["schedule", "full"])
def test_rms_stays_one_over_128_updates_in_bf16(generator, kind, gain):
    direction, log_norm = reference.split(torch.randn(16, 64, generator=generator).bfloat16())
    for index in range(1, 129):
        noise = torch.randn(16, 64, generator=generator).bfloat16()
        branch = {
            "random": noise,
            "nearly-parallel": 100 * direction + 0.1 * noise,
            "nearly-opposite": -100 * direction + 0.1 * noise,
            "huge": 1e6 * noise,
            "tiny": 1e-4 * noise,
            "constant": torch.full_like(noise, 3.3),
        }[kind]
        gains = torch.full((16,), index**-0.5 if gain is None else gain)
        direction, log_norm = reference.rotate(direction, log_norm, branch, gains)
        rms = direction.float().square().mean(-1).sqrt()
        assert (rms - 1).abs().max() < 0.005, f"update {index}"
    assert direction.dtype == torch.bfloat16 and log_norm.isfinite().all()


@pytest.mark.parametrize(("branch_rms", "share"), [(1.0, 1.0), (0.01, 0.99), (0.001, 0.53)])
def test_branch_eps_damps_small_branches(branch_rms, share):
    direction = torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64)
    branch = branch_rms * torch.tensor([1.0, -1.0, 1.0, -1.0], dtype=torch.float64)
    _, growth = reference.rotate(direction, torch.zeros((), dtype=torch.float64), branch, torch.tensor(0.5))
    assert growth.item() / (0.5 * math.log1p(0.25)) == pytest.approx(share, abs=0.005)


def test_modulation_floor_keeps_gradients_finite():
    """u underflows to 0 and beta < 1 would give an infinite gradient."""
    direction = torch.ones(1, 4, requires_grad=True)
    weight = torch.full((2, 4), -60.0, requires_grad=True)
    bias, mixture = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)
    raw_beta = torch.tensor(-1.0, requires_grad=True)
    m = reference.modulation(direction, weight, bias, mixture, raw_beta)
    beta = math.log1p(math.exp(-1.0))
    assert m.item() == pytest.approx(1e-6**beta, rel=1e-5)
    m.sum().backward()
    for tensor in (direction, weight, bias, mixture, raw_beta):
        assert tensor.grad.isfinite().all()


def test_modulation_never_exceeds_one():
    ones = torch.ones(3, 4)
    m = reference.modulation(ones, 50 * torch.ones(7, 4), torch.zeros(7), torch.randn(7), torch.tensor(2.0))
    assert m.max() <= 1.0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_modulation_is_float32_under_autocast(generator, dtype):
    direction = torch.randn(3, 64, generator=generator)
    parameters = (
        torch.randn(4, 64, generator=generator),
        torch.randn(4, generator=generator),
        torch.randn(4, generator=generator),
        torch.tensor(0.5),
    )
    plain = reference.modulation(direction, *parameters)
    with torch.autocast("cpu", dtype):
        assert torch.equal(reference.modulation(direction, *parameters), plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_angle_of_equal_and_opposite_directions(generator, dtype):
    a = torch.randn(200, 24, generator=generator).to(dtype)
    torch.testing.assert_close(reference.angle(a, a), torch.zeros(200), rtol=0, atol=1e-6)
    torch.testing.assert_close(reference.angle(a, -a), torch.full((200,), math.pi), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [1e-6, 1e-4, 1e-2, 1.0, math.pi - 1e-2, math.pi - 1e-4])
def test_angle_is_exact_near_zero_and_pi(size):
    """acos(cosine) is off by 3e-4 here in float32, or NaN."""
    a = torch.tensor([1.0, 0.0], dtype=torch.float64).repeat(8)
    b = torch.tensor([math.cos(size), math.sin(size)], dtype=torch.float64).repeat(8)
    assert reference.angle(a.float(), b.float()).item() == pytest.approx(size, rel=1e-3)


def test_angle_of_zero_vectors_is_not_nan():
    assert reference.angle(torch.zeros(2, 4), torch.randn(2, 4)).isfinite().all()
    assert reference.angle(torch.zeros(2, 4), torch.zeros(2, 4)).isfinite().all()


@pytest.mark.parametrize("d_model", [1, 2, 3])
def test_narrow_streams(generator, d_model):
    """With d = 1 nothing is left of a centred branch, with d = 2 nothing of one that is orthogonal too."""
    x = torch.randn(5, d_model, generator=generator) + 2
    direction, log_norm = reference.split(x)
    branch = torch.randn(5, d_model, generator=generator)
    direction, log_norm = reference.rotate(direction, log_norm, branch, torch.ones(5))
    assert direction.isfinite().all() and log_norm.isfinite().all()
    torch.testing.assert_close(direction.square().mean(-1), torch.ones(5))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0, 8), (8,)], ids=["no-rows", "no-tokens", "one-vector"])
def test_any_leading_shape(shape):
    direction, log_norm = reference.split(torch.randn(shape))
    new_direction, new_log_norm = reference.rotate(direction, log_norm, torch.randn(shape), torch.ones(shape[:-1]))
    assert new_direction.shape == shape and new_log_norm.shape == shape[:-1]


def test_strides_do_not_matter(generator):
    x, branch = (torch.randn(8, 3, generator=generator).t() for _ in range(2))
    gain = torch.full((3,), 0.5)
    strided = reference.rotate(*reference.split(x), branch, gain)
    dense = reference.rotate(*reference.split(x.contiguous()), branch.contiguous(), gain)
    for a, b in zip(strided, dense, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_nan_stays_in_its_row(generator):
    direction, log_norm = reference.split(torch.randn(3, 8, generator=generator))
    branch = torch.randn(3, 8, generator=generator)
    clean = reference.rotate(direction, log_norm, branch, torch.ones(3))
    branch[1, 2] = math.nan
    dirty = reference.rotate(direction, log_norm, branch, torch.ones(3))
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a[[0, 2]], b[[0, 2]]) and b[1].isnan().all()
