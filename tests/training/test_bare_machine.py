"""A machine without a compiler, without Triton and without SIGALRM trains all the same, and says what it lacks."""

import os
import subprocess
import sys

CODE = """
import signal, sys
if hasattr(signal, "SIGALRM"):
    del signal.SIGALRM
sys.modules["triton"] = None
import numpy as np, torch
from nagnet.data.loader import BatchLoader, PackedTokens
from nagnet.models.config import ModelConfig
from nagnet.training.config import RunConfig
from nagnet.training.loop import Trainer
model = ModelConfig(d_model=16, n_layers=2, n_heads=2, vocab_size=32, n_directions=3)
tokens = (np.arange(2000) % 31).astype(np.uint16)
tokens[::100] = 31
packed = PackedTokens(tokens, np.arange(0, 2001, 100), bos_id=31, vocab_size=32)
run = RunConfig(model=model, flops=1e9, batch_size=4, seq_len=16)
trainer = Trainer("norm_agnostic", run, model, BatchLoader(packed, 4, 16, seed=0), torch.device("cpu"))
trainer.prepare()
losses = [trainer.step()["loss"] for _ in range(5)]
print(trainer.compiled, losses[-1] < losses[0])
"""


def test_trains_eagerly_and_warns_where_no_compiler_is(tmp_path):
    environment = os.environ | {
        "CXX": "no-such-compiler",
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    run = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, env=environment)
    assert run.stdout.split() == ["False", "True"], run.stderr
    assert "running eagerly" in run.stderr
