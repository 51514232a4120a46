"""Residual rules: read, gain, write, advance, and what the norm-agnostic one promises as a module."""

import copy
import math
import pickle

import pytest
import torch

from nagnet.errors import UserError
from nagnet.nn.attention import Attention
from nagnet.nn.mlp import SquaredReLU
from nagnet.nn.residual import (
    COMPONENTS,
    RESIDUAL_STREAMS,
    LayerNormScalingResidual,
    NGPTResidual,
    NGPTStream,
    NoResidual,
    NormAgnosticResidual,
    NormAgnosticStream,
    PostNormResidual,
    PreNormResidual,
    ResidualUpdate,
    SandwichResidual,
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


@pytest.mark.parametrize(("index", "block"), [(1, 1), (2, 1), (3, 2), (8, 4)])
def test_layernorm_scaling_reads_less_the_deeper(x, branch, index, block):
    rule = LayerNormScalingResidual(8, update_index=index)
    torch.testing.assert_close(rms(rule.read(rule.begin(x))), torch.full((2, 5), block**-0.5))
    assert torch.equal(rule.write(rule.begin(x), branch).merge(), x + branch)
    assert not list(rule.parameters())


@pytest.mark.parametrize("size", [0.1, 1.0, 1e3])
def test_sandwich_adds_a_branch_of_unit_rms(x, branch, size):
    rule = SandwichResidual(8, update_index=5)
    torch.testing.assert_close(rms(rule.read(rule.begin(x))), torch.ones(2, 5))
    change = rule.write(rule.begin(x), size * branch).merge() - x
    torch.testing.assert_close(change, branch / rms(branch).unsqueeze(-1), rtol=1e-4, atol=1e-5)


def test_ngpt_by_hand_with_unit_lengths(x, branch):
    """The paper's formula with N of unit length, on a stream that is sqrt(d) times as long."""
    rule = NGPTResidual(8, update_index=3)
    torch.testing.assert_close(rule.step_size(), torch.full((8,), 0.05))
    torch.testing.assert_close(rule.step_size.weight, torch.full((8,), 8**-0.5))
    step = torch.linspace(-0.3, 0.9, 8)
    rule.step_size.weight.data = step / 0.05 * 8**-0.5

    def unit(vector):
        return vector / vector.norm(dim=-1, keepdim=True)

    state = rule.begin(x)
    assert torch.equal(rule.read(state), x)
    moved = unit(unit(x) + step.abs() * (unit(branch) - unit(x)))
    torch.testing.assert_close(rule.write(state, branch).merge(), math.sqrt(8) * moved)


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
def test_only_streams_that_want_other_embedding_rows_change_them(name, generator):
    weight = torch.randn(6, 8, generator=generator) + 3
    before = weight.clone()
    RESIDUAL_STREAMS[name](8, 2).constrain_(weight)
    assert torch.equal(weight, before) == (name not in ("norm_agnostic", "ngpt"))


def test_ngpt_constrains_rows_that_read_and_columns_that_write(generator):
    attention = Attention(8, n_heads=2, n_kv_heads=1, head_dim=4, qk_gain=1.0, channel_scales=True)
    mlp, embedding = SquaredReLU(8, 12), torch.randn(6, 8, generator=generator)
    embedding[2] = 0.0
    scale = attention.qk_scale.weight.detach().clone()
    NGPTStream(8, 2).constrain_(embedding, [attention, mlp])
    for reads in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.up_proj):
        torch.testing.assert_close(reads.weight.norm(dim=1), torch.ones(reads.out_features))
    for writes in (attention.out_proj, mlp.out_proj):
        torch.testing.assert_close(writes.weight.norm(dim=0), torch.ones(writes.in_features))
    torch.testing.assert_close(rms(embedding), torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0, 1.0]))
    assert torch.equal(attention.qk_scale.weight, scale)


# Ablations of the norm-agnostic rule


def ablated(component, index=4, **options):
    return NormAgnosticResidual(8, index, n_directions=3, without=(component,), **options)


def test_every_component_can_be_left_out_alone_and_with_all_others(x, branch):
    for without in [*((name,) for name in COMPONENTS), tuple(COMPONENTS)]:
        rule = NormAgnosticResidual(8, 2, n_directions=3, without=without)
        state = rule.write(rule.begin(x), branch)
        torch.testing.assert_close(rms(state.direction), torch.ones(2, 5), msg=str(without))


def test_without_a_modulator_the_gain_is_half_of_alpha_and_nothing_else_learns(x):
    rule = ablated("modulator")
    torch.testing.assert_close(rule.gain(rule.begin(x)), torch.full((2, 5), 0.25))  # alpha = 4^-1/2
    assert [name for name, _ in rule.named_parameters()] == ["alpha"]
    rule.set_injection(0.5)
    torch.testing.assert_close(rule.gain(rule.begin(x)), torch.full((2, 5), 0.125))


def test_without_beta_the_modulation_is_the_mean_of_the_gates(x):
    rule = ablated("beta")
    assert "modulator.raw_beta" not in dict(rule.named_parameters())
    with torch.no_grad():
        for parameter in rule.modulator.parameters():
            parameter.copy_(torch.randn_like(parameter))
    state = rule.begin(x)
    gates = torch.sigmoid(state.direction @ rule.modulator.weight.T + rule.modulator.bias)
    mean = (gates * rule.modulator.mixture.softmax(0)).sum(-1)
    torch.testing.assert_close(rule.gain(state), 0.5 * mean)


def test_the_mixture_of_one_direction_does_not_learn():
    names = {name for name, _ in NormAgnosticResidual(8, 1, n_directions=1).modulator.named_parameters()}
    assert names == {"weight", "bias", "raw_beta"}


@pytest.mark.parametrize("component", ["output_norm", "orthogonal", "centring"])
def test_ablations_of_the_update_start_from_the_same_gain(x, component):
    rule, whole = ablated(component), NormAgnosticResidual(8, 4, n_directions=3)
    rule.load_state_dict(whole.state_dict())
    assert torch.equal(rule.gain(rule.begin(x)), whole.gain(whole.begin(x)))


def test_without_the_output_norm_the_angle_is_the_branchs(x, branch):
    rule, gain = ablated("output_norm"), torch.full((2, 5), 0.25)
    state = rule.begin(x)
    small, large = (reference.angle(rule.write(state, c * branch, gain)[0], state[0]) for c in (1.0, 2.0))
    torch.testing.assert_close(large.tan(), 2 * small.tan())


def test_without_orthogonalisation_a_branch_along_the_stream_changes_its_norm_alone(x):
    rule, gain = ablated("orthogonal", branch_eps=0.0), torch.full((2, 5), 0.25)
    state = rule.begin(x - x.mean(-1, keepdim=True))
    for sign in (1.0, -1.0):
        written = rule.write(state, sign * 3.0 * state.direction, gain)
        torch.testing.assert_close(written.direction, state.direction)
        torch.testing.assert_close(written.log_norm - state.log_norm, torch.full((2, 5), math.log(1 + sign * 0.25)))


def test_without_centring_means_stay(x, branch, generator):
    rule, embedding = ablated("centring"), torch.randn(6, 8, generator=generator) + 3
    state = rule.begin(x - x.mean(-1, keepdim=True))
    assert rule.write(state, branch + 5.0).direction.mean(-1).abs().min() > 0.01
    before = embedding.clone()
    NormAgnosticStream(8, 2, without=("centring",)).constrain_(embedding)
    assert torch.equal(embedding, before)


def test_an_unknown_component_is_named():
    with pytest.raises(UserError, match="component 'gate': choose among output_norm, orthogonal, modulator"):
        ablated("gate")
