"""What the update promises for every stream, branch and gain (docs/mathematics.md, "Invariants")."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nagnet.ops import reference

properties = settings(deadline=None, derandomize=True, max_examples=60)
any_seed = st.integers(0, 2**31)
any_width = st.integers(2, 40)
any_gain = st.floats(-2.0, 2.0).map(lambda gain: gain if abs(gain) > 1e-3 else 0.0)
any_scale = st.floats(-3.0, 4.0).map(lambda exponent: 10.0**exponent)


def draw(seed: int, d_model: int, *scales: float) -> list[torch.Tensor]:
    """Random float64 vectors [3, d], one for each RMS in ``scales``."""
    generator = torch.Generator().manual_seed(seed)
    return [scale * torch.randn(3, d_model, generator=generator, dtype=torch.float64) for scale in scales]


def update(x: torch.Tensor, branch: torch.Tensor, gain: float, branch_eps: float = 1e-6) -> torch.Tensor:
    """The vector x' = exp(s') R' that one update makes of x."""
    direction, log_norm = reference.split(x)
    return reference.merge(*reference.rotate(direction, log_norm, branch, torch.full_like(log_norm, gain), branch_eps))


def damping(x: torch.Tensor, branch: torch.Tensor, branch_eps: float = 1e-6) -> torch.Tensor:
    """q = mean(n^2) of the branch [...], by projections written out another way than in the reference."""
    basis = torch.stack((x / x.norm(dim=-1, keepdim=True), torch.ones_like(x) / math.sqrt(x.shape[-1])), dim=-1)
    centred = branch - basis[..., 1] * (branch * basis[..., 1]).sum(-1, keepdim=True)
    outside = centred - basis[..., 0] * (centred * basis[..., 0]).sum(-1, keepdim=True)
    power = outside.square().sum(-1) / x.shape[-1]
    return power / (power + branch_eps)


@properties
@given(any_seed, any_width, any_gain, any_scale, any_scale)
def test_the_change_is_orthogonal_to_the_stream(seed, d_model, gain, scale, branch_scale):
    x, branch = draw(seed, d_model, scale, branch_scale)
    change = update(x, branch, gain) - x
    cosine = (change * x).sum(-1) / x.square().sum(-1)
    assert cosine.abs().max() < 1e-7


@properties
@given(any_seed, any_width, any_gain, any_scale, any_scale)
def test_relative_change_is_the_gain(seed, d_model, gain, scale, branch_scale):
    x, branch = draw(seed, d_model, scale, branch_scale)
    relative = (update(x, branch, gain) - x).norm(dim=-1) / x.norm(dim=-1)
    torch.testing.assert_close(relative, abs(gain) * damping(x, branch).sqrt(), rtol=1e-6, atol=1e-6)


@properties
@given(any_seed, any_width, any_gain, any_scale, any_scale)
def test_norm_grows_by_g(seed, d_model, gain, scale, branch_scale):
    x, branch = draw(seed, d_model, scale, branch_scale)
    growth = update(x, branch, gain).norm(dim=-1) / x.norm(dim=-1)
    torch.testing.assert_close(growth, (1 + gain**2 * damping(x, branch)).sqrt(), rtol=1e-6, atol=0)


@properties
@given(any_seed, any_width, any_gain, any_scale)
def test_direction_turns_by_the_arctangent(seed, d_model, gain, scale):
    x, branch = draw(seed, d_model, scale, 1.0)
    turned = reference.angle(update(x, branch, gain), x)
    torch.testing.assert_close(turned, torch.atan(abs(gain) * damping(x, branch).sqrt()), rtol=1e-6, atol=1e-6)


@properties
@given(any_seed, any_width, any_gain, any_scale)
def test_scaling_the_stream_moves_the_log_norm_alone(seed, d_model, gain, factor):
    x, branch = draw(seed, d_model, 1.0, 1.0)
    gains = torch.full((3,), gain, dtype=torch.float64)
    direction, log_norm = reference.rotate(*reference.split(x), branch, gains)
    scaled_direction, scaled_log_norm = reference.rotate(*reference.split(factor * x), branch, gains)
    torch.testing.assert_close(scaled_direction, direction, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(scaled_log_norm - log_norm, torch.full_like(gains, math.log(factor)), rtol=0, atol=1e-6)


@properties
@given(any_seed, any_width, any_scale, any_scale)
def test_gain_zero_is_the_identity(seed, d_model, scale, branch_scale):
    x, branch = draw(seed, d_model, scale, branch_scale)
    direction, log_norm = reference.split(x)
    new_direction, new_log_norm = reference.rotate(direction, log_norm, branch, torch.zeros_like(log_norm))
    assert torch.equal(new_direction, direction) and torch.equal(new_log_norm, log_norm)


@properties
@given(any_seed, st.integers(3, 40), any_gain, any_scale)
def test_zero_mean_directions_stay_zero_mean(seed, d_model, gain, branch_scale):
    x, *branches = draw(seed, d_model, 1.0, *[branch_scale] * 6)
    direction, log_norm = reference.split(x - x.mean(-1, keepdim=True))
    for branch in branches:
        direction, log_norm = reference.rotate(direction, log_norm, branch + 5.0, torch.full_like(log_norm, gain))
    assert direction.mean(-1).abs().max() < 1e-9


@properties
@given(any_seed, any_width, st.floats(-6.0, 4.0).map(lambda exponent: 10.0**exponent))
def test_split_is_exactly_invertible(seed, d_model, scale):
    (x,) = draw(seed, d_model, scale)
    torch.testing.assert_close(reference.merge(*reference.split(x)), x, rtol=1e-12, atol=0)


@pytest.mark.parametrize(
    ("n_updates", "modulation", "norm", "degrees"),
    [(64, 1.0, 65**0.5, None), (128, 1.0, 129**0.5, None), (64, 0.5, 1.77, 413), (128, 0.5, 1.93, 602)],
    ids=["64-open", "128-open", "64-half", "128-half"],
)
def test_depth_schedule_accumulates_as_published(generator, n_updates, modulation, norm, degrees):
    """alpha_l = 1/sqrt(l): the norm after N updates is sqrt(N + 1) with m = 1; angles add up to 413 and 602 degrees."""
    x = torch.randn(2, 48, generator=generator, dtype=torch.float64)
    direction, log_norm = reference.split(x)
    start, angles = log_norm, torch.zeros_like(log_norm)
    for index in range(1, n_updates + 1):
        branch = torch.randn(2, 48, generator=generator, dtype=torch.float64)
        gain = torch.full_like(log_norm, modulation * index**-0.5)
        before = direction
        direction, log_norm = reference.rotate(direction, log_norm, branch, gain, branch_eps=0.0)
        angles += torch.rad2deg(reference.angle(before, direction))
    tolerance = 1e-9 if modulation == 1.0 else 0.005
    assert torch.exp(log_norm - start).tolist() == pytest.approx([norm, norm], abs=tolerance)
    if degrees is not None:
        assert angles.tolist() == pytest.approx([degrees, degrees], abs=0.5)


def test_worked_example():
    """The branch [1, 2] turns [12, 4] and [6, 2] alike; added to them it turns the short one further."""
    streams = torch.tensor([[12.0, 4.0], [6.0, 2.0]], dtype=torch.float64)
    branch = torch.tensor([1.0, 2.0], dtype=torch.float64).expand(2, 2)
    pre_norm = torch.rad2deg(reference.angle(streams, streams + branch))
    assert pre_norm.tolist() == pytest.approx([6.34, 11.31], abs=0.01)
    turned = update(streams, branch, 0.5, branch_eps=0.0)
    angles = torch.rad2deg(reference.angle(streams, turned))
    assert angles.tolist() == pytest.approx([math.degrees(math.atan(0.5))] * 2)
    torch.testing.assert_close(turned, torch.tensor([[10.0, 10.0], [5.0, 5.0]], dtype=torch.float64))
