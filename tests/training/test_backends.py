"""Training on the fused backend ends where training on the reference ends."""

import dataclasses
import statistics
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from nagnet import ops
from nagnet.data.loader import BatchLoader, PackedTokens
from nagnet.models.config import ModelConfig
from nagnet.training.config import RunConfig
from nagnet.training.loop import Trainer

MODEL = ModelConfig(d_model=64, n_layers=4, n_heads=2, vocab_size=257, max_seq_len=64, n_directions=4)
STEPS = 200
RUN = RunConfig(model=MODEL, steps=STEPS, batch_size=4, seq_len=64)


@pytest.fixture(scope="module")
def packed():
    text = np.frombuffer((Path(sysconfig.get_path("stdlib")) / "argparse.py").read_bytes(), dtype=np.uint8)
    tokens = np.concatenate([[256], text]).astype(np.uint16)
    return PackedTokens(tokens, np.array([0, len(tokens)]), bos_id=256, vocab_size=257)


def _final_loss(packed, backend, seed):
    run = dataclasses.replace(RUN, seed=seed)
    ops.set_backend(backend)
    try:
        trainer = Trainer("norm_agnostic", run, MODEL, BatchLoader(packed, 4, 64, seed), torch.device("cpu"))
        trainer.prepare()
        assert trainer.compiled
        losses = [trainer.step()["loss"] for _ in range(STEPS)]
    finally:
        ops.set_backend("auto")
    return statistics.mean(losses[-20:])


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # the compiler's own; that it worked is asserted
def test_two_hundred_steps_end_within_the_spread_of_seeds(packed):
    final = {name: [_final_loss(packed, name, seed) for seed in range(3)] for name in ("reference", "fused")}
    spread = max(final["reference"]) - min(final["reference"])
    assert spread > 0
    for a, b in zip(final["reference"], final["fused"], strict=True):
        assert abs(a - b) < spread
