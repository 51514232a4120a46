"""Twenty training steps of each arm against recorded losses. Record anew after a deliberate change:

python tests/golden/test_losses.py
"""

import json
import shutil
from pathlib import Path

import pytest
import torch

from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder

RECORD = Path(__file__).with_name("losses.json")
ARMS = ("norm_agnostic", "pre_norm")
STEPS, BATCH, LENGTH, VOCABULARY = 20, 4, 32, 64


def token_batch(step: int) -> torch.Tensor:
    """Tokens [4, 33] that follow a rule a model can learn: each is 5 x the last + 3, with a break now and then."""
    rows = []
    for row in range(BATCH):
        token, tokens = (7 * step + 11 * row) % VOCABULARY, []
        for position in range(LENGTH + 1):
            tokens.append(token)
            token = (token + step + row) % VOCABULARY if position % 9 == 8 else (5 * token + 3) % VOCABULARY
        rows.append(tokens)
    return torch.tensor(rows)


def train(residual: str, compiled: bool = False) -> list[float]:
    """Loss before each of 20 steps of AdamW in float32."""
    config = ModelConfig(
        residual=residual, d_model=32, n_layers=4, n_heads=2, vocab_size=VOCABULARY, max_seq_len=LENGTH, n_directions=4
    )
    model = Decoder(config, seed=1234)
    if compiled:
        model.compile_blocks()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        tokens = token_batch(step)
        loss = model.loss(tokens[:, :-1], tokens[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.constrain_()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("residual", ARMS)
def test_losses_are_the_recorded_ones(residual):
    losses = train(residual)
    assert losses == pytest.approx(json.loads(RECORD.read_text())[residual], abs=1e-3)
    assert losses[-1] < losses[0] - 0.1  # the record is one of learning


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.skipif(shutil.which("c++") is None and shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("residual", ARMS)
def test_compiled_losses_are_the_eager_ones(residual):
    torch._dynamo.reset()
    assert train(residual, compiled=True) == pytest.approx(train(residual), abs=1e-5)


if __name__ == "__main__":
    RECORD.write_text(json.dumps({residual: train(residual) for residual in ARMS}, indent=1) + "\n")
