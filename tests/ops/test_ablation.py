"""The update without its parts: each by its definition, in float64, and the whole one against the reference."""

import itertools
import math

import pytest
import torch

from nagnet.ops import ablation, reference

KEPT = [ablation.Kept(*flags) for flags in itertools.product([True, False], repeat=3)]


def name(kept):
    return "-".join(part for part, kept_ in kept._asdict().items() if kept_) or "nothing"


@pytest.fixture(params=KEPT, ids=name)
def kept(request):
    return request.param


@pytest.fixture
def state_and_branch(generator):
    def make(dtype=torch.float64, d_model=8):
        x, branch = (torch.randn(5, d_model, generator=generator, dtype=torch.float64) for _ in range(2))
        gain = torch.randn(5, generator=generator, dtype=torch.float64)
        direction, log_norm = reference.split(3.0 * (x + 0.5))
        return direction.to(dtype), log_norm, (branch - 0.7).to(dtype), gain

    return make


def written_out(direction, branch, kept, branch_eps):
    """n by projections."""
    n = branch.clone()
    if kept.centring:
        n -= n.mean(-1, keepdim=True)
    if kept.orthogonal:
        axis = direction / direction.norm(dim=-1, keepdim=True)
        n -= (n * axis).sum(-1, keepdim=True) * axis
    if kept.output_norm:
        n /= (n.square().mean(-1, keepdim=True) + branch_eps).sqrt()
    return n


def test_with_all_parts_it_is_the_reference_to_the_bit(state_and_branch):
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        inputs = state_and_branch(dtype)
        for a, b in zip(ablation.rotate(*inputs), reference.rotate(*inputs), strict=True):
            assert torch.equal(a, b)


def test_the_vector_moves_by_gain_times_n(state_and_branch, kept):
    """x' = exp(s) (R + gain n): the growth of the norm is whatever the vector's is."""
    direction, log_norm, branch, gain = state_and_branch()
    moved = reference.merge(*ablation.rotate(direction, log_norm, branch, gain, 0.01, kept))
    expected = log_norm.exp()[:, None] * (direction + gain[:, None] * written_out(direction, branch, kept, 0.01))
    torch.testing.assert_close(moved, expected, rtol=1e-10, atol=1e-10)


def test_directions_have_rms_one(state_and_branch, kept):
    direction, _ = ablation.rotate(*state_and_branch(), kept=kept)
    torch.testing.assert_close(direction.square().mean(-1), torch.ones(5, dtype=torch.float64))


def test_predicted_growth_holds_with_orthogonalisation_alone(state_and_branch, kept):
    direction, log_norm, branch, gain = state_and_branch()
    _, new_log_norm = ablation.rotate(direction, log_norm, branch, gain, kept=kept)
    q = written_out(direction, branch, kept, reference.BRANCH_EPS).square().mean(-1)
    predicted = 0.5 * torch.log1p(gain.square() * q)
    assert torch.allclose(new_log_norm - log_norm, predicted, rtol=1e-9, atol=1e-9) == kept.orthogonal


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
def test_zero_branch_and_zero_gain_are_the_identity_to_the_bit(state_and_branch, kept, dtype):
    direction, log_norm, branch, gain = state_and_branch(dtype)
    branch[1], gain[2] = 0.0, 0.0
    branch.requires_grad_(), direction.requires_grad_()
    new_direction, new_log_norm = ablation.rotate(direction, log_norm.float(), branch, gain.float(), kept=kept)
    for row in (1, 2):
        assert torch.equal(new_direction[row], direction[row])
        assert torch.equal(new_log_norm[row], log_norm.float()[row])
    (new_direction.float().sum() + new_log_norm.sum()).backward()
    assert branch.grad.isfinite().all() and direction.grad.isfinite().all()
    assert branch.grad[1].any()  # a branch that starts at zero can leave it


def test_zero_stream_is_finite(state_and_branch, kept):
    _, log_norm, branch, gain = state_and_branch()
    direction = torch.zeros(5, 8, dtype=torch.float64, requires_grad=True)
    branch.requires_grad_()
    outputs = ablation.rotate(direction, log_norm, branch, gain, kept=kept)
    sum(output.sum() for output in outputs).backward()
    assert all(tensor.isfinite().all() for tensor in (*outputs, direction.grad, branch.grad))


def test_a_branch_that_undoes_the_stream_leaves_a_finite_norm():
    """Without orthogonalisation R + gain n can be 0."""
    direction = torch.tensor([[1.0, -1.0, 1.0, -1.0]], requires_grad=True)
    branch = (-direction.detach()).requires_grad_()
    kept = ablation.Kept(orthogonal=False, output_norm=False)
    new_direction, log_norm = ablation.rotate(direction, torch.zeros(1), branch, torch.ones(1), kept=kept)
    (new_direction.sum() + log_norm.sum()).backward()
    assert not new_direction.any() and -10 < log_norm.item() < -5
    assert branch.grad.isfinite().all() and direction.grad.isfinite().all()


def test_gradients(state_and_branch, kept):
    inputs = [tensor.requires_grad_() for tensor in state_and_branch(d_model=4)]
    assert torch.autograd.gradcheck(lambda *args: ablation.rotate(*args, kept=kept), inputs)


def test_rms_does_not_drift_in_bfloat16(generator, kept):
    direction, log_norm = reference.split(torch.randn(4, 64, generator=generator).bfloat16())
    for index in range(1, 129):
        branch = torch.randn(4, 64, generator=generator).bfloat16()
        direction, log_norm = ablation.rotate(direction, log_norm, branch, torch.full((4,), index**-0.5), kept=kept)
    torch.testing.assert_close(direction.float().square().mean(-1).sqrt(), torch.ones(4), rtol=0, atol=5e-3)
    assert log_norm.isfinite().all() and log_norm.dtype == torch.float32
    assert log_norm.mean().item() < math.log(200)
