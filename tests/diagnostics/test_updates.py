import math

import pytest
import torch

from nagnet.diagnostics.updates import (
    block_removal,
    modulation_histogram,
    outliers,
    preferred_directions,
    relative_update,
)
from nagnet.errors import UserError
from nagnet.nn.residual import RESIDUAL_STREAMS

RULES = list(RESIDUAL_STREAMS)


def test_relative_size_is_alpha_m(build_model, fix_modulation, tokens):
    model = build_model(n_layers=8, branch_eps=0.0)
    fix_modulation(model, 0.5)
    sizes = relative_update(model, tokens)
    expected = torch.tensor([0.5 / math.sqrt(index) for index in range(1, 17)], dtype=torch.float64)
    torch.testing.assert_close(sizes.mean, expected, rtol=1e-4, atol=0)
    torch.testing.assert_close(sizes.median, expected, rtol=1e-4, atol=0)


def test_relative_size_of_pre_norm_is_that_of_its_vectors(build_model, tokens):
    model = build_model("pre_norm", n_layers=1)
    before = model.stream.begin(model.embedding(tokens)).stream
    branch = model.blocks[0].attention(
        model.stream.updates[0].read(model.stream.begin(model.embedding(tokens))), *model.rotary(6)
    )
    expected = (branch.norm(dim=-1) / before.norm(dim=-1)).mean().item()
    assert relative_update(model, tokens).mean[0].item() == pytest.approx(expected, rel=1e-5)


def test_constant_modulation_fills_one_bin(build_model, fix_modulation, tokens):
    model = build_model()
    fix_modulation(model, 0.5)
    histogram = modulation_histogram(model, tokens, bins=10)
    assert histogram.update_index.tolist() == [1, 2, 3, 4]
    assert histogram.edges.tolist() == pytest.approx([place / 10 for place in range(11)])
    # 1/2 is the edge of two bins: rounding may put it to either side, but nowhere else.
    torch.testing.assert_close(histogram.share[:, 4:6].sum(dim=1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(histogram.mean, torch.full((4,), 0.5, dtype=torch.float64), rtol=1e-6, atol=0)
    fix_modulation(model, 1.0)
    assert modulation_histogram(model, tokens, bins=10).share[:, 9].tolist() == [1.0] * 4


def test_nan_modulation_is_named(build_model, tokens):
    model = build_model()
    torch.nn.init.constant_(model.stream.updates[1].modulator.bias, math.nan)
    with pytest.raises(UserError, match="update 2 is NaN"):
        modulation_histogram(model, tokens)


def test_equal_gates_prefer_what_the_stream_has_anyway(build_model, fix_modulation, tokens):
    model = build_model()
    fix_modulation(model, 0.5)
    found = preferred_directions(model, tokens)
    torch.testing.assert_close(found.weighted, found.unweighted)
    torch.testing.assert_close(found.weighted.diagonal(), torch.ones(4, dtype=torch.float64))


def test_a_gate_prefers_the_tokens_it_opens_for(build_model, tokens):
    model = build_model(n_layers=1)
    direction = model.stream.begin(model.embedding(tokens)).direction.detach().flatten(0, 1)
    gate = model.stream.updates[0].modulator
    with torch.no_grad():  # open for the first token alone
        gate.weight.copy_(direction[0].expand_as(gate.weight) * 10)
        gate.bias.fill_(-100.0)
        second = model.stream.updates[1].modulator
        second.weight.zero_()
    m = gate(direction).double()
    first = m @ direction.double() / m.sum()
    found = preferred_directions(model, tokens)
    assert torch.cosine_similarity(first, direction[0].double(), dim=0) > 0.99
    assert found.weighted[0, 1] < found.unweighted[0, 1]


@pytest.mark.parametrize("measure", [modulation_histogram, preferred_directions])
def test_rules_without_gates_have_none(build_model, tokens, measure):
    assert measure(build_model("pre_norm"), tokens) is None


@pytest.mark.parametrize("rule", ["norm_agnostic", "pre_norm", "sandwich"])
def test_a_block_that_does_nothing_is_not_missed(build_model, tokens, rule):
    model = build_model(rule, n_layers=3)
    for name in ("attention", "mlp"):
        torch.nn.init.zeros_(getattr(model.blocks[1], name).out_proj.weight)
    found = block_removal(model, tokens)
    direct = model.loss(tokens[:, :-1], tokens[:, 1:]).item()
    assert found.full_loss == pytest.approx(direct, rel=1e-6)
    assert found.loss[1].item() == found.full_loss
    assert found.loss[0].item() != found.full_loss
    assert found.loss[2].item() != found.full_loss


def test_a_model_without_its_only_block_sees_the_token_alone(build_model, tokens):
    model = build_model("pre_norm", n_layers=1)
    bare = model.readout(*model.stream.begin(model.embedding(tokens[:, :-1])).split())
    expected = torch.nn.functional.cross_entropy(bare.flatten(0, 1), tokens[:, 1:].flatten()).item()
    assert block_removal(model, tokens).loss.item() == pytest.approx(expected, rel=1e-6)


def test_removal_leaves_the_model_as_it_was(build_model, tokens):
    model = build_model().train()
    before = model(tokens)
    block_removal(model, tokens)
    assert model.training
    assert torch.equal(model(tokens), before)


def test_one_token_has_no_loss(build_model):
    with pytest.raises(UserError, match="2 tokens or more"):
        block_removal(build_model(), torch.zeros(1, 1, dtype=torch.long))


def test_outliers_of_known_weights(build_model, tokens):
    model = build_model(n_layers=1)
    weight = model.blocks[0].mlp.out_proj.weight
    with torch.no_grad():
        weight.fill_(0.0)
        weight.view(-1)[0] = 3.0
    found = outliers(model, tokens)
    place = found.matrix.index("blocks.0.mlp.out_proj.weight")
    n = weight.numel()
    # One entry of n: max / RMS = sqrt(n); kurtosis of a coin with p = 1/n is 1/(p(1-p)) - 3.
    assert found.weight_max_over_rms[place].item() == pytest.approx(math.sqrt(n))
    assert found.weight_kurtosis[place].item() == pytest.approx(n * n / (n - 1) - 3.0)
    assert found.stream_kurtosis.shape == found.branch_max_over_rms.shape == (2,)


def test_a_zero_branch_has_no_outlier_and_does_not_disturb_the_rest(build_model, tokens):
    model = build_model(n_layers=1)
    torch.nn.init.zeros_(model.blocks[0].attention.out_proj.weight)
    found = outliers(model, tokens)
    assert found.branch_max_over_rms.isnan().tolist() == [True, False]
    assert found.stream_max_over_rms.isfinite().all()


@pytest.mark.parametrize("rule", RULES)
def test_every_rule_can_be_measured(build_model, tokens, rule):
    model = build_model(rule)
    assert relative_update(model, tokens).mean.isfinite().all()
    assert block_removal(model, tokens).loss.isfinite().all()
    assert outliers(model, tokens).stream_kurtosis.isfinite().all()


@pytest.mark.parametrize(
    "measure", [relative_update, modulation_histogram, preferred_directions, block_removal, outliers]
)
def test_no_tokens_are_refused(build_model, measure):
    with pytest.raises(UserError, match="tokens"):
        measure(build_model(), torch.zeros(0, 4, dtype=torch.long))
