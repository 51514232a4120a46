"""Models that see the future are found, however little and however late; all others pass."""

import pytest
import torch

from nagnet.errors import UserError
from nagnet.evaluation.causality import change_points, check_causality
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn import attention
from nagnet.nn.residual import RESIDUAL_STREAMS

VOCAB = 40


def random_decoder(residual="norm_agnostic", **changes):
    shape = {"d_model": 16, "n_layers": 2, "n_heads": 2, "vocab_size": VOCAB, "max_seq_len": 64, "n_directions": 3}
    model = Decoder(ModelConfig(residual=residual, **(shape | changes)), seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
@pytest.mark.parametrize("residual", RESIDUAL_STREAMS)
def test_every_rule_is_causal(residual, dtype):
    check_causality(random_decoder(residual).to(dtype), VOCAB, 64)


def test_windows_and_short_sequences_are_causal():
    check_causality(random_decoder(sliding_windows=(5, 0)), VOCAB, 64)
    for length in (1, 2, 3):
        check_causality(random_decoder(), VOCAB, length)


def test_attention_without_a_mask_is_found(monkeypatch):
    def sees_all(q, k, v, window=None, key_mask=None):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v)

    monkeypatch.setattr(attention, "causal_attention", sees_all)
    with pytest.raises(UserError, match="the model is not causal: changing tokens from position .* not scored"):
        check_causality(random_decoder(), VOCAB, 64)


def leak(how):
    """A causal table with a little of the future mixed in."""
    table = torch.randn(VOCAB, VOCAB, generator=torch.Generator().manual_seed(0))

    def model(ids):
        logits, future = table[ids], table.flip(0)[ids]
        if how == "next token":
            logits[:, :-1] += 0.01 * future[:, 1:]
        elif how == "next token, late":
            logits[:, 31:-1] += 0.01 * future[:, 32:]
        elif how == "mean":
            logits = logits + 0.01 * future.mean(dim=1, keepdim=True)
        elif how == "last token":
            logits[:, 0] += 0.01 * future[:, -1]
        elif how == "the likeliest next token gets more":
            logits[:, :-1].scatter_add_(2, ids[:, 1:, None], torch.full((*ids[:, 1:].shape, 1), 0.1))
        return logits

    return model


def test_a_table_is_causal():
    check_causality(leak("nothing"), VOCAB, 64)


@pytest.mark.parametrize(
    "how", ["next token", "next token, late", "mean", "last token", "the likeliest next token gets more"]
)
@pytest.mark.parametrize("length", [33, 64, 100])
def test_leaks_are_found(how, length):
    with pytest.raises(UserError, match="not causal"):
        check_causality(leak(how), VOCAB, length)


def test_logits_that_are_not_finite_are_refused():
    with pytest.raises(UserError, match="not finite"):
        check_causality(lambda ids: torch.full((*ids.shape, VOCAB), torch.nan), VOCAB, 8)
    later = torch.zeros(1, 8, VOCAB)

    def breaks(ids):
        logits = later.clone()
        logits[:, 0] = torch.nan if breaks.again else 0.0
        breaks.again = True
        return logits

    breaks.again = False
    with pytest.raises(UserError, match="not causal"):
        check_causality(breaks, VOCAB, 8)


def test_points_of_change_lie_around_powers_of_two():
    assert change_points(1) == []
    assert change_points(2) == [1]
    assert change_points(64) == [1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 63]
    assert change_points(100) == [1, 2, 3, 4, 7, 8, 15, 16, 31, 32, 50, 63, 64, 99]
