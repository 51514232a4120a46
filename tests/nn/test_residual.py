"""Residual rules: read, gain, write, advance, and what the norm-agnostic one promises as a module."""

import copy
import math
import pickle

import pytest
import torch

from nagnet.errors import UserError
from nagnet.nn.residual import (
    RESIDUAL_STREAMS,
    NoResidual,
    NormAgnosticResidual,
    NormAgnosticStream,
    PostNormResidual,
    PreNormResidual,
    ResidualUpdate,
    centre_rows_,
    set_injection,
)
from nagnet.ops import reference


@pytest.fixture
def x(generator):
    return 3.0 * torch.randn(2, 5, 8, generator=generator)


@pytest.fixture
def branch(generator):
    return torch.randn(2, 5, 8, generator=generator)


def rms(x):
    return x.square().mean(-1).sqrt()


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e-3, 1.0, 1e4])
def test_merge_inverts_begin(rule_class, x, scale):
    rule = rule_class(8, update_index=3)
    torch.testing.assert_close(rule.begin(scale * x).merge(), scale * x, rtol=2e-6, atol=0)


@pytest.mark.parametrize("shape", [(8,), (0, 8), (2, 3, 4, 8)], ids=["one-vector", "no-rows", "four-axes"])
def test_any_leading_shape(rule_class, shape):
    rule = rule_class(8, update_index=1)
    state = rule.write(rule.begin(torch.randn(shape)), torch.randn(shape))
    assert state.merge().shape == shape


def test_split_gives_direction_and_log_norm(rule_class, x):
    direction, log_norm = rule_class(8, update_index=1).begin(x).split()
    torch.testing.assert_close(rms(direction), torch.ones(2, 5))
    torch.testing.assert_close(log_norm, rms(x).log())


@pytest.mark.parametrize("given", [True, False], ids=["gain-given", "gain-computed"])
def test_advance_is_write_then_read_then_gain(rule_class, x, branch, given):
    rule, following = rule_class(8, update_index=2), rule_class(8, update_index=3)
    state = rule.begin(x)
    gain = rule.gain(state) if given else None
    expected = rule.write(state, branch, gain)
    new_state, reading, next_gain = rule.advance(state, branch, gain, following)
    for a, b in zip(new_state, expected, strict=True):
        assert torch.equal(a, b)
    assert torch.equal(reading, following.read(expected))
    expected_gain = following.gain(expected)
    assert next_gain is None if expected_gain is None else torch.equal(next_gain, expected_gain)


def test_advance_ends_with_the_state_alone(rule_class, x, branch):
    rule = rule_class(8, update_index=2)
    state, reading, gain = rule.advance(rule.begin(x), branch, None, None)
    assert reading is None and gain is None
    assert torch.equal(state.merge(), rule.write(rule.begin(x), branch).merge())


def test_no_residual_is_a_plain_stack(x, branch):
    rule = NoResidual(8, update_index=1)
    torch.testing.assert_close(rule.read(rule.begin(x)), x / rms(x).unsqueeze(-1))
    assert torch.equal(rule.write(rule.begin(x), branch).merge(), branch)


def test_post_norm_normalises_the_sum(x, branch):
    rule = PostNormResidual(8, update_index=1)
    assert torch.equal(rule.read(rule.begin(x)), x)
    total = x + branch
    torch.testing.assert_close(rule.write(rule.begin(x), branch).merge(), total / rms(total).unsqueeze(-1))


def test_pre_norm_adds_to_the_stream(x, branch):
    rule = PreNormResidual(8, update_index=1)
    torch.testing.assert_close(rule.read(rule.begin(x)), x / rms(x).unsqueeze(-1))
    assert torch.equal(rule.write(rule.begin(x), branch).merge(), x + branch)


def test_pre_norm_with_zero_branches_is_the_identity(x):
    rule = PreNormResidual(8, update_index=1)
    assert torch.equal(rule.write(rule.begin(x), torch.zeros_like(x)).merge(), x)


def test_norm_agnostic_reads_the_direction(x):
    rule = NormAgnosticResidual(8, update_index=1)
    torch.testing.assert_close(rule.read(rule.begin(7.0 * x)), rule.read(rule.begin(x)))


def test_norm_agnostic_gain_by_hand(x):
    rule = NormAgnosticResidual(8, update_index=4, n_directions=3)
    with torch.no_grad():
        for parameter in rule.modulator.parameters():
            parameter.copy_(torch.randn_like(parameter))
    rule.injection.fill_(0.5)
    state = rule.begin(x)
    p = rule.modulator.mixture.exp() / rule.modulator.mixture.exp().sum()
    scores = torch.einsum("btd,cd->btc", state.direction, rule.modulator.weight) + rule.modulator.bias
    beta = torch.log1p(rule.modulator.raw_beta.exp())
    expected = 0.5 * 0.5 * ((1 / (1 + torch.exp(-scores))) * p).sum(-1) ** beta  # alpha = 4^-1/2
    torch.testing.assert_close(rule.gain(state), expected)


def test_norm_agnostic_write_computes_the_gain_itself(x, branch):
    rule = NormAgnosticResidual(8, update_index=1)
    state = rule.begin(x)
    for a, b in zip(rule.write(state, branch), rule.write(state, branch, rule.gain(state)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(("index", "exponent", "alpha"), [(1, 0.5, 1.0), (4, 0.5, 0.5), (4, 1.0, 0.25), (9, 0.0, 1.0)])
def test_alpha_starts_at_the_published_schedule(index, exponent, alpha):
    assert NormAgnosticResidual(8, index, init_exponent=exponent).alpha.item() == pytest.approx(alpha)


def test_modulator_starts_half_open():
    rule = NormAgnosticResidual(64, 1)
    m = rule.modulator(reference.rms_norm(torch.randn(500, 64)))
    assert m.mean().item() == pytest.approx(0.5, abs=0.02)
    weight = rule.modulator.weight
    assert weight.std().item() == pytest.approx(1 / 8, rel=0.05)
    assert weight.abs().max() <= math.sqrt(3) / 8


def test_branch_eps_reaches_the_update(x, branch):
    sharp, damped = NormAgnosticResidual(8, 1, branch_eps=0.0), NormAgnosticResidual(8, 1, branch_eps=10.0)
    gain = torch.ones(2, 5)
    grown = [rule.write(rule.begin(x), branch, gain).log_norm - rule.begin(x).log_norm for rule in (sharp, damped)]
    torch.testing.assert_close(grown[0], torch.full((2, 5), 0.5 * math.log(2.0)))
    assert (grown[1] < 0.5 * grown[0]).all()


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"d_model": 0, "update_index": 1}, "d_model is 0"),
        ({"d_model": 8, "update_index": 0}, "update_index is 0"),
        ({"d_model": 8, "update_index": 1, "n_directions": 0}, "n_directions=0"),
        ({"d_model": 8, "update_index": 1, "branch_eps": -1.0}, "branch_eps=-1.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_arguments_are_named(arguments, names):
    with pytest.raises(UserError, match=names):
        NormAgnosticResidual(**arguments)


def test_a_rule_without_write_says_so(x, branch):
    class Unfinished(ResidualUpdate):
        pass

    rule = Unfinished(8, 1)
    with pytest.raises(TypeError, match="Unfinished does not define write"):
        rule.write(rule.begin(x), branch)


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda rule: pickle.loads(pickle.dumps(rule))], ids=["copy", "pickle"]
)
def test_a_copied_rule_is_its_own(rule_class, x, branch, clone):
    rule = rule_class(8, update_index=2)
    twin = clone(rule)
    assert torch.equal(twin.write(twin.begin(x), branch).merge(), rule.write(rule.begin(x), branch).merge())
    assert all(a is not b for a, b in zip(twin.parameters(), rule.parameters(), strict=True))


# Streams


@pytest.mark.parametrize("name", RESIDUAL_STREAMS)
def test_stream_numbers_its_updates_from_one(name):
    stream = RESIDUAL_STREAMS[name](8, 6)
    assert [update.update_index for update in stream.updates] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("name", ["pre_norm", "post_norm", "none"])
def test_vector_streams_start_at_unit_rms(name, x):
    state = RESIDUAL_STREAMS[name](8, 2).begin(x)
    torch.testing.assert_close(rms(state.merge()), torch.ones(2, 5))


def test_encode_gain_enters_the_norm_lane_alone(x):
    state = NormAgnosticStream(8, 2, encode_gain=3.0).begin(x)
    plain = NormAgnosticStream(8, 2, encode_gain=None).begin(x)
    assert torch.equal(state.direction, plain.direction)
    torch.testing.assert_close(state.log_norm, plain.log_norm + math.log(3.0))


def test_embedding_scale_enters_the_norm_lane(x):
    """G_embedding is a part of the temperature: the stream must not normalise it away."""
    stream = NormAgnosticStream(8, 2)
    difference = stream.begin(5.0 * x).log_norm - stream.begin(x).log_norm
    torch.testing.assert_close(difference, torch.full((2, 5), math.log(5.0)))


def test_injection_scales_every_gain(x):
    stream = NormAgnosticStream(8, 3)
    state = stream.begin(x)
    full = [update.gain(state) for update in stream.updates]
    stream.set_injection(0.25)
    for update, gain in zip(stream.updates, full, strict=True):
        torch.testing.assert_close(update.gain(state), 0.25 * gain)


def test_injection_zero_is_the_identity(x, branch):
    stream = NormAgnosticStream(8, 1)
    stream.set_injection(0.0)
    state = stream.begin(x)
    assert torch.equal(stream.updates[0].write(state, branch).direction, state.direction)


def test_injection_reaches_rules_inside_any_module():
    model = torch.nn.ModuleDict({"inner": torch.nn.ModuleList([NormAgnosticResidual(8, 1)])})
    set_injection(model, 0.5)
    assert model["inner"][0].injection.item() == 0.5


@pytest.mark.parametrize("scale", [-0.1, 1.1, math.nan])
def test_injection_outside_zero_and_one_is_refused(scale):
    with pytest.raises(UserError, match="injection scale is .*give a number from 0 to 1"):
        NormAgnosticStream(8, 1).set_injection(scale)


def test_injection_is_part_of_the_checkpoint():
    stream = NormAgnosticStream(8, 1)
    stream.set_injection(0.5)
    other = NormAgnosticStream(8, 1)
    other.load_state_dict(stream.state_dict())
    assert other.updates[0].injection.item() == 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_centre_rows(generator, dtype):
    weight = torch.nn.Parameter((torch.randn(6, 16, generator=generator) + 3).to(dtype))
    centre_rows_(weight)
    assert weight.detach().float().mean(-1).abs().max() < (1e-6 if dtype == torch.float32 else 2e-3)
    assert weight.detach().float().std() > 0.5


@pytest.mark.parametrize("name", RESIDUAL_STREAMS)
def test_only_the_norm_agnostic_stream_centres_the_embedding(name, generator):
    weight = torch.randn(6, 8, generator=generator) + 3
    before = weight.clone()
    RESIDUAL_STREAMS[name](8, 2).constrain_(weight)
    assert torch.equal(weight, before) == (name != "norm_agnostic")
