"""The decoder: loss, constraints, tied rows, casts, copies, and parameters that matter."""

import copy
import math
import pickle

import pytest
import torch

from nagnet.errors import UserError
from nagnet.models.decoder import Decoder
from nagnet.nn.readout import ReadoutConfig
from nagnet.nn.residual import RESIDUAL_STREAMS, NormAgnosticState


def finite(gradients):
    return all(gradient is None or bool(gradient.isfinite().all()) for gradient in gradients)


def all_gradients(model):
    return [parameter.grad for parameter in model.parameters()]


# Loss


def test_logits_are_float32_of_the_right_shape(small, residual, tokens):
    logits = Decoder(small(residual))(tokens)
    assert logits.shape == (2, 9, 32) and logits.dtype == torch.float32


def test_loss_is_the_mean_over_targets(small, residual, randomised, tokens, targets):
    model = randomised(small(residual))
    targets[0, 2:] = -100
    picked = model(tokens).log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[..., 0]
    expected = -picked[targets >= 0].mean()
    torch.testing.assert_close(model.loss(tokens, targets), expected)


def test_token_losses_are_zero_where_ignored(small, tokens, targets):
    targets[1, 4:] = -100
    losses = Decoder(small()).score(tokens, targets)[0]
    assert losses.shape == (2, 9) and not losses[1, 4:].any() and (losses[0] > 0).all()


def test_ignored_targets_have_no_gradient(small, randomised, tokens, targets):
    model = randomised(small())
    targets[:, 5:] = -100
    model.loss(tokens, targets).backward()
    with_tail = all_gradients(model)
    model.zero_grad()
    model.loss(tokens[:, :5], targets[:, :5]).backward()
    for a, b in zip(with_tail, all_gradients(model), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_micro_batch_without_targets_adds_nothing(small, residual, randomised, tokens):
    model = randomised(small(residual))
    loss = model.loss(tokens, torch.full_like(tokens, -100))
    loss.backward()
    assert loss.item() == 0.0
    assert all(not gradient.any() for gradient in all_gradients(model) if gradient is not None)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0), (2, 1)], ids=["no-rows", "no-tokens", "one-token"])
def test_small_batches(small, residual, shape):
    model = Decoder(small(residual, sliding_windows=(2, 0)))
    tokens = torch.zeros(shape, dtype=torch.long)
    loss = model.loss(tokens, tokens)
    loss.backward()
    assert loss.isfinite() and finite(all_gradients(model))


def test_32_bit_tokens(small, tokens, targets):
    model = Decoder(small(), seed=0)
    assert torch.equal(model.loss(tokens.int(), targets.int()), model.loss(tokens, targets))


def test_targets_may_be_a_view(small, generator):
    model = Decoder(small())
    chunk = torch.randint(32, (2, 10), generator=generator)
    inputs, targets = chunk[:, :-1], chunk[:, 1:]
    assert torch.equal(model.loss(inputs, targets), model.loss(inputs.contiguous(), targets.contiguous()))


@pytest.mark.parametrize("token", [-1, 32, 10_000])
def test_token_outside_the_vocabulary_is_named(small, tokens, token):
    tokens[1, 3] = token
    with pytest.raises(UserError, match=rf"token id {token} is outside the vocabulary 0\.\.31"):
        Decoder(small())(tokens)


def test_longer_inputs_than_prepared(small, residual):
    tokens = torch.randint(32, (1, 40))
    short, long = (Decoder(small(residual, max_seq_len=length), seed=0) for length in (4, 64))
    assert torch.equal(short(tokens), long(tokens))


def test_inference_mode_beyond_the_table_still_serves_training(small):
    model = Decoder(small(max_seq_len=4))
    tokens = torch.randint(32, (1, 9))
    with torch.inference_mode():
        model(tokens)
    model.loss(tokens, tokens).backward()


# Stream and readout


def test_zero_projections_leave_a_pre_norm_stream_alone(small, tokens):
    model = Decoder(small("pre_norm"))
    start = model.stream.begin(model.embedding(tokens)).merge()
    assert torch.equal(model.trunk(tokens).merge(), start)


def test_zero_projections_leave_a_norm_agnostic_stream_alone(small, tokens):
    model = Decoder(small())
    for a, b in zip(model.trunk(tokens), model.stream.begin(model.embedding(tokens)), strict=True):
        assert torch.equal(a, b)


def test_the_scale_is_not_erased_on_the_way_to_the_logits(small, randomised, tokens):
    model = randomised(small())
    logits = model(tokens)
    trunk = model.trunk
    model.trunk = lambda *inputs: NormAgnosticState(trunk(*inputs).direction, trunk(*inputs).log_norm + 1.0)
    torch.testing.assert_close(model(tokens), math.e * logits)


def test_encode_gain_scales_the_logits(small, randomised, tokens):
    model = randomised(small())
    logits = model(tokens)
    with torch.no_grad():
        model.stream.log_encode_gain += 1.0
    torch.testing.assert_close(model(tokens), math.e * logits)


def test_a_readout_that_ignores_the_norm_has_no_encode_gain(small):
    """Else it would be a parameter without effect."""
    model = Decoder(small(readout=ReadoutConfig(scale="learned")))
    assert model.stream.log_encode_gain is None


@pytest.mark.parametrize(
    "readout", [ReadoutConfig("free", "log_norm"), ReadoutConfig("unit", "learned", 15.0)], ids=str
)
def test_readouts_go_with_every_rule(small, residual, randomised, tokens, targets, readout):
    model = randomised(small(residual, readout=readout))
    model.loss(tokens, targets).backward()
    assert finite(all_gradients(model))
    assert all(gradient is not None for gradient in all_gradients(model))


@pytest.mark.parametrize("branches", [0.0, 0.3], ids=["zero-branches", "live-branches"])
@pytest.mark.parametrize(
    ("dtype", "depth"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.float16, 16)], ids=["fp32", "bf16", "fp16"]
)
def test_a_zero_embedding_is_finite_at_depth(small, residual, tokens, targets, branches, dtype, depth):
    """A first token of zeros stays zero through every block, and so do its keys and values."""
    model = Decoder(small(residual, n_layers=depth), seed=0)
    with torch.no_grad():
        model.embedding.weight[tokens[0, 0]] = 0
        for name, parameter in model.named_parameters():
            if "out_proj" in name:
                parameter.copy_(branches * torch.randn_like(parameter))
    model.to(dtype)
    state = model.trunk(tokens)
    assert state.split()[1].isfinite().all()
    model.loss(tokens, targets).backward()
    assert finite(all_gradients(model))


def test_hidden_positions_do_not_matter_to_others(small, residual, randomised, tokens):
    model = randomised(small(residual, sliding_windows=(3, 0)))
    key_mask = torch.ones(2, 9, dtype=torch.bool)
    key_mask[:, 4] = False
    before = model(tokens, key_mask)
    tokens[:, 4] = (tokens[:, 4] + 1) % 32
    after = model(tokens, key_mask)
    seen = key_mask[0]
    assert torch.equal(before[:, seen], after[:, seen]) and not torch.equal(before[:, 4], after[:, 4])


# Constraints and ties


def test_constraint_on_rows(small, randomised):
    model = randomised(small())
    with torch.no_grad():
        model.embedding.weight.add_(2.0)
        model.readout.weight.mul_(3.0).add_(1.0)
    model.constrain_()
    for weight in (model.embedding.weight, model.readout.weight):
        torch.testing.assert_close(weight.detach().mean(-1), torch.zeros(32), rtol=0, atol=1e-6)
    torch.testing.assert_close(model.readout.weight.detach().square().mean(-1), torch.ones(32))
    assert not torch.allclose(model.embedding.weight.square().mean(-1), torch.ones(32))


def test_a_fresh_model_is_constrained(small):
    model = Decoder(small())
    before = copy.deepcopy(model.state_dict())
    model.constrain_()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=1e-6, atol=1e-6)


def test_the_twin_has_no_constraint(small):
    model = Decoder(small("pre_norm"), seed=0)
    drawn = Decoder(small("pre_norm"))
    drawn.initialize_(0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), drawn.parameters(), strict=True))


@pytest.mark.parametrize(
    "clone",
    [
        lambda model: model,
        copy.deepcopy,
        lambda model: pickle.loads(pickle.dumps(model)),
        lambda model: model.to(torch.bfloat16),
        lambda model: model.double().float(),
    ],
    ids=["itself", "copy", "pickle", "bfloat16", "float64-and-back"],
)
def test_a_tied_head_shares_storage(small, residual, randomised, tokens, targets, clone):
    original = randomised(small(residual, tie_embeddings=True))
    weight = original.embedding.weight.detach().clone()
    model = clone(original)
    assert model.readout.weight is model.embedding.weight
    assert torch.equal(model.readout.weight, weight)
    model.loss(tokens, targets).backward()
    assert finite(all_gradients(model))


def test_a_tied_head_gets_both_constraints(small, randomised):
    model = randomised(small(tie_embeddings=True))
    with torch.no_grad():
        model.embedding.weight.mul_(3.0).add_(1.0)
    model.constrain_()
    weight = model.embedding.weight.detach()
    torch.testing.assert_close(weight.mean(-1), torch.zeros(32), rtol=0, atol=1e-6)
    torch.testing.assert_close(weight.square().mean(-1), torch.ones(32))


# Training


@pytest.mark.parametrize("name", [name for name, stream in RESIDUAL_STREAMS.items() if stream.zero_init_projections])
@pytest.mark.parametrize("optimizer_class", [torch.optim.AdamW, torch.optim.SGD], ids=lambda cls: cls.__name__)
def test_zero_projections_leave_zero_within_two_steps(small, name, optimizer_class, tokens, targets):
    model = Decoder(small(name), seed=0)
    optimizer = optimizer_class(model.parameters(), lr=1e-3)
    for _ in range(2):
        model.loss(tokens, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.constrain_()
    for parameter_name, parameter in model.named_parameters():
        if "out_proj" in parameter_name:
            assert parameter.any(), parameter_name


NORM_AGNOSTIC_PARTS = ("alpha", "modulator.weight", "modulator.bias", "modulator.mixture", "modulator.raw_beta")


@pytest.mark.parametrize("part", [*NORM_AGNOSTIC_PARTS, "log_encode_gain"])
def test_no_parameter_of_the_rule_is_inert(small, randomised, tokens, targets, part):
    """Perturbed by 0.1 (1 + |p|) each moves the logits, and each has a gradient."""
    model = randomised(small())
    named = {name: p for name, p in model.stream.named_parameters() if name.endswith(part)}
    assert len(named) == (1 if part == "log_encode_gain" else 4)
    model.loss(tokens, targets).backward()
    logits = model(tokens).detach()
    for name, parameter in named.items():
        assert (parameter.grad != 0).all(), name
        before = parameter.detach().clone()
        with torch.no_grad():
            for index in range(parameter.numel()):
                flat = parameter.view(-1)
                flat[index] += 0.1 * (1 + flat[index].abs())
                assert (model(tokens) - logits).abs().max() > 1e-6, f"{name}[{index}]"
                parameter.copy_(before)


def test_every_parameter_of_the_rule_is_among_these(small):
    names = {name for name, _ in Decoder(small()).stream.named_parameters()}
    assert {name.split(".", 2)[-1] for name in names} == {*NORM_AGNOSTIC_PARTS, "log_encode_gain"}


def test_every_parameter_of_the_model_has_a_gradient(small, residual, randomised, tokens, targets):
    model = randomised(small(residual, mlp="swiglu", n_kv_heads=1))
    model.loss(tokens, targets).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_every_parameter_of_variants_has_a_gradient(small, variant, randomised, tokens, targets):
    model = randomised(small(**variant))
    model.loss(tokens, targets).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None and parameter.grad.any(), name


def test_what_an_ablation_takes_away_is_no_parameter(small):
    def parts(**changes):
        return {name.split(".", 2)[-1] for name, _ in Decoder(small(**changes)).stream.named_parameters()}

    whole = parts()
    assert whole - parts(without=("modulator",)) == {part for part in whole if part.startswith("modulator.")}
    assert whole - parts(without=("beta",)) == {"modulator.raw_beta"}
    assert whole - parts(n_directions=1) == {"modulator.mixture"}
    assert whole == parts(without=("output_norm", "orthogonal", "centring"))


def test_without_centring_nothing_is_centred(small, randomised, tokens):
    whole, ablated = (randomised(small(without=without)) for without in ((), ("centring",)))
    assert whole.trunk(tokens).direction.mean(-1).abs().max() < 1e-6
    assert ablated.trunk(tokens).direction.mean(-1).abs().min() > 1e-3


def test_ngpt_is_constrained_from_the_start_and_after_every_step(small, tokens, targets):
    model = Decoder(small("ngpt"), seed=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def lengths():
        for block in model.blocks:
            for reads in (block.attention.q_proj, block.attention.v_proj, block.mlp.up_proj):
                yield reads.weight.norm(dim=1)
            for writes in (block.attention.out_proj, block.mlp.out_proj):
                yield writes.weight.norm(dim=0)
        yield model.embedding.weight.square().mean(-1)
        yield model.readout.weight.square().mean(-1)

    for _ in range(2):
        for length in lengths():
            torch.testing.assert_close(length, torch.ones_like(length))
        model.loss(tokens, targets).backward()
        optimizer.step()
        model.constrain_()


def test_tapered_blocks_have_their_widths(small):
    model = Decoder(small(n_layers=3, mlp_taper=0.5))
    assert [block.mlp.up_proj.out_features for block in model.blocks] == [96, 64, 32]
    assert [block.mlp.out_proj.in_features for block in model.blocks] == [96, 64, 32]


def test_injection_reaches_the_gains(small, randomised, tokens):
    model = randomised(small())
    full = model(tokens)
    model.set_injection(0.0)
    start = model.stream.begin(model.embedding(tokens))
    assert torch.equal(model.trunk(tokens).direction, start.direction)
    model.set_injection(1.0)
    assert torch.equal(model(tokens), full)


def test_injection_does_nothing_to_the_twin(small, tokens):
    model = Decoder(small("pre_norm"))
    before = model(tokens)
    model.set_injection(0.0)
    assert torch.equal(model(tokens), before)


# Types and copies


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("route", ["cast", "autocast"])
def test_16_bit_models_train(small, residual, randomised, tokens, targets, dtype, route):
    model = randomised(small(residual))
    exact = model.loss(tokens, targets)
    if route == "cast":
        model.to(dtype)
    with torch.autocast("cpu", dtype, enabled=route == "autocast"):
        loss = model.loss(tokens, targets)
        state = model.trunk(tokens)
    loss.backward()
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(exact.item(), abs=0.1)
    assert finite(all_gradients(model))
    assert state.merge().dtype == dtype  # in every arm, so that none has the finer stream
    if residual == "norm_agnostic":
        assert state.log_norm.dtype == torch.float32


def test_float64_models(small, residual, randomised, tokens):
    logits = randomised(small(residual)).double()(tokens)
    assert logits.dtype == torch.float64 and logits.isfinite().all()


@pytest.mark.parametrize("d_model", [1, 3])
def test_narrow_models(small, residual, tokens, targets, d_model):
    model = Decoder(small(residual, d_model=d_model, head_dim=2))
    model.loss(tokens, targets).backward()
    assert finite(all_gradients(model))


@pytest.mark.parametrize("route", ["cast", "autocast"])
def test_bfloat16_variants_train(small, variant, randomised, tokens, targets, route):
    model = randomised(small(**variant))
    exact = model.loss(tokens, targets)
    if route == "cast":
        model.to(torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16, enabled=route == "autocast"):
        loss = model.loss(tokens, targets)
    loss.backward()
    assert loss.item() == pytest.approx(exact.item(), abs=0.1) and finite(all_gradients(model))
    narrow = {name for name, p in model.named_parameters() if p.dtype != torch.float32}
    assert all("proj.weight" in name for name in narrow) and bool(narrow) == (route == "cast")


def test_variants_round_trip_through_their_state(small, variant, randomised, tokens):
    model = randomised(small(**variant))
    other = Decoder(model.config, seed=9)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens), model(tokens))


def test_state_dict_round_trip(small, residual, randomised, tokens):
    model = randomised(small(residual, sliding_windows=(3, 0)))
    model.set_injection(0.5)
    other = Decoder(model.config, seed=9)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(tokens), model(tokens))


@pytest.mark.parametrize(
    "clone", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_copies_compute_the_same(small, residual, randomised, tokens, clone):
    model = randomised(small(residual))
    assert torch.equal(clone(model)(tokens), model(tokens))


def test_no_grad_and_inference_mode(small, residual, randomised, tokens):
    model = randomised(small(residual))
    expected = model(tokens).detach()
    with torch.no_grad():
        assert torch.equal(model(tokens), expected)
    with torch.inference_mode():
        assert torch.equal(model(tokens), expected)
