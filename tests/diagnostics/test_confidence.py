import json
import math

import numpy as np
import pytest
import torch
from torch import nn

from nagnet.diagnostics.confidence import ConfidenceSummary, collect_confidence, confidence_deciles
from nagnet.diagnostics.prediction import confidence
from nagnet.errors import UserError


@pytest.mark.parametrize("residual", ["none", "post_norm", "pre_norm", "norm_agnostic"])
def test_confidence_is_that_of_the_logits(build_model, tokens, residual):
    model = build_model(residual).train()
    measured = confidence(model, tokens)
    p = model(tokens).detach().double().softmax(-1)
    torch.testing.assert_close(measured.entropy.double(), -(p * p.log()).sum(-1), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(measured.max_probability.double(), p.amax(-1), rtol=1e-5, atol=1e-6)
    rms = model.trunk(tokens).merge().detach().square().mean(-1).sqrt()
    torch.testing.assert_close(measured.scale, rms, rtol=1e-5, atol=1e-6)
    assert model.training and not measured.scale.requires_grad


def test_entropy_of_a_certain_and_of_a_blank_model(build_model, tokens):
    model = build_model("pre_norm")
    nn.init.zeros_(model.readout.weight)
    blank = confidence(model, tokens)
    torch.testing.assert_close(blank.entropy, torch.full((3, 6), math.log(32)))
    torch.testing.assert_close(blank.max_probability, torch.full((3, 6), 1 / 32))
    certain = build_model(init_encode_gain=1e6)  # probabilities of all other tokens underflow to 0
    measured = confidence(certain, tokens)
    assert (measured.entropy == 0).all() and (measured.max_probability == 1).all()


def test_a_summary_survives_json_with_what_is_not_a_number(build_model, tokens):
    model = build_model("post_norm")  # its norm is the same everywhere, so it ranks nothing
    summary = collect_confidence(model, [(tokens[:1, :4], tokens[:1, :4])])
    again = ConfidenceSummary.from_dict(json.loads(json.dumps(summary.to_dict(), allow_nan=False)))
    np.testing.assert_equal(again.to_dict(), summary.to_dict())
    assert np.isnan(again.scale.deciles.loss).sum() == 6
    assert again.scale.deciles.n_tokens.tolist() == [1] * 4 + [0] * 6
    np.testing.assert_array_equal(again.negative_entropy.deciles.loss, summary.negative_entropy.deciles.loss)


def test_deciles_sort_by_the_signal():
    n = 1000
    order = np.random.default_rng(0).permutation(n)
    deciles = confidence_deciles(order, entropy=-order, loss=2 * order, correct=order >= 500)
    centre = np.arange(10) * 100 + 49.5
    np.testing.assert_allclose(deciles.entropy, -centre)
    np.testing.assert_allclose(deciles.loss, 2 * centre)
    np.testing.assert_allclose(deciles.accuracy, [0] * 5 + [1] * 5)
    assert deciles.n_tokens.tolist() == [100] * 10


def test_equal_signals_keep_the_order_of_the_tokens():
    loss = np.arange(1000.0)
    deciles = confidence_deciles(np.ones(1000), loss, loss, np.zeros(1000))
    np.testing.assert_array_equal(deciles.loss, 100 * np.arange(10) + 49.5)
    deciles = confidence_deciles(np.tile([1.0, 0.0], 500), loss, loss, np.zeros(1000))
    np.testing.assert_array_equal(deciles.loss, np.tile(200 * np.arange(5), 2) + np.repeat([100, 99], 5))


def test_a_remainder_is_spread_and_fewer_than_ten_tokens_leave_empty_groups():
    assert confidence_deciles(range(23), range(23), range(23), range(23)).n_tokens.tolist() == [3] * 3 + [2] * 7
    few = confidence_deciles([2.0, 1.0], [0.1, 0.2], [3.0, 4.0], [True, False])
    np.testing.assert_array_equal(few.loss[:2], [4.0, 3.0])
    assert np.isnan(few.loss[2:]).all() and few.n_tokens.sum() == 2


@pytest.mark.parametrize("signal", [[], [1.0, 2.0, 3.0], [1.0, math.nan]])
def test_deciles_of_bad_lists(signal):
    with pytest.raises(UserError):
        confidence_deciles(signal, [0.0, 0.0], [0.0, 0.0], [0, 1])


def test_batches_are_joined_and_ignored_targets_left_out(build_model, tokens):
    model = build_model()
    targets = tokens.roll(-1, dims=1)
    targets[0, 2:] = -100
    targets[2] = -100
    whole = collect_confidence(model, [(tokens, targets)])
    parts = collect_confidence(model, [(tokens[:1, :4], targets[:1, :4]), (tokens[1:], targets[1:])])
    assert whole.n_tokens == parts.n_tokens == 8
    deciles = whole.scale.deciles
    kept = targets != -100
    expected = model.score(tokens, targets)[0][kept].mean().item()
    assert np.nansum(deciles.loss * deciles.n_tokens) / 8 == pytest.approx(expected, rel=1e-5)
    np.testing.assert_allclose(parts.scale.deciles.loss, deciles.loss, rtol=1e-5)
    assert whole.scale_in_logits and not collect_confidence(build_model("pre_norm"), [(tokens, tokens)]).scale_in_logits


def test_a_planted_signal_ranks_perfectly(build_model, fix_modulation):
    """Rows of the readout are the embeddings, so a token predicts itself, and more surely the larger its norm."""
    model = build_model(d_model=64, tie_embeddings=False)
    model.set_injection(0.0)
    with torch.no_grad():
        model.embedding.weight.mul_(torch.linspace(0.1, 8.0, 32)[:, None])
        model.readout.weight.copy_(model.embedding.weight)
    model.constrain_()
    tokens = torch.arange(32).view(2, 16)
    targets = tokens.clone()
    targets[0] = (targets[0] + 1) % 32  # the small ones are wrong
    summary = collect_confidence(model, [(tokens, targets)])
    assert summary.scale.auroc == summary.negative_entropy.auroc == 1.0
    assert summary.spearman_scale_entropy < -0.95
    assert summary.negative_entropy.spearman_loss < 0 and summary.scale.spearman_loss < 0
    np.testing.assert_array_equal(summary.scale.deciles.accuracy[[0, 9]], [0, 1])


def test_an_equal_confidence_for_all_ranks_nothing(build_model, tokens):
    model = build_model("post_norm")
    nn.init.zeros_(model.readout.weight)  # every token is as likely as any other; the first one wins the argmax
    targets = torch.zeros_like(tokens)
    targets[1:] = 1
    summary = collect_confidence(model, [(tokens, targets)])
    assert summary.negative_entropy.auroc == 0.5
    assert math.isnan(summary.negative_entropy.spearman_loss)
    np.testing.assert_allclose(summary.negative_entropy.deciles.loss, math.log(32), rtol=1e-6)


def test_one_token_of_one_document(build_model):
    summary = collect_confidence(build_model(), [(torch.tensor([[3]]), torch.tensor([[4]]))])
    assert summary.n_tokens == 1 and math.isnan(summary.scale.auroc) and math.isnan(summary.spearman_scale_entropy)


def test_no_tokens_and_a_diverged_model(build_model, tokens):
    model = build_model()
    for batches in ([], [(tokens, torch.full_like(tokens, -100))]):
        with pytest.raises(UserError, match="no token"):
            collect_confidence(model, batches)
    nn.init.constant_(model.stream.updates[0].alpha, math.nan)
    with pytest.raises(UserError, match="NaN"):
        collect_confidence(model, [(tokens, tokens)])
