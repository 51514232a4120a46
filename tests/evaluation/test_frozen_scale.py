"""One scale for every token: the direction decides alone, and the model is left as it was."""

import pytest
import torch

from nagnet.errors import UserError
from nagnet.evaluation.frozen_scale import final_log_norm, frozen_scale
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.readout import ReadoutConfig


def build(residual="norm_agnostic", **changes):
    config = ModelConfig(residual, d_model=16, n_layers=2, n_heads=2, vocab_size=40, n_directions=3, **changes)
    model = Decoder(config, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape))
    return model


@pytest.mark.parametrize(
    "options",
    [{}, {"residual": "pre_norm", "readout": ReadoutConfig("unit", "learned_log_norm")}],
    ids=["norm_agnostic", "pre_norm"],
)
@torch.no_grad()
def test_logits_have_one_scale(options):
    model, ids = build(**options), torch.randint(40, (2, 9))
    own = model(ids)
    log_norm = final_log_norm(model)(ids, ids)
    assert log_norm.shape == (2, 9) and log_norm.std() > 0.01
    with frozen_scale(model, 0.7):
        frozen, losses = model(ids), model.score(ids, ids)[0]
    expected = own * torch.exp(0.7 - log_norm).unsqueeze(-1)
    torch.testing.assert_close(frozen, expected)
    targets = torch.nn.functional.cross_entropy(expected.flatten(0, 1), ids.flatten(), reduction="none")
    torch.testing.assert_close(losses.flatten(), targets)
    assert torch.equal(model(ids), own) and "trunk" not in vars(model)


def test_the_model_is_put_back_after_an_error():
    model = build()
    with pytest.raises(KeyboardInterrupt), frozen_scale(model, 0.0):
        raise KeyboardInterrupt
    assert "trunk" not in vars(model)


def test_a_readout_without_a_token_scale_is_refused():
    with pytest.raises(UserError, match="this pre_norm model has scale 'none'"), frozen_scale(build("pre_norm"), 0.0):
        pass
