"""The shapes and dtypes in the signatures of ops and nn hold when models run.

In a process of its own, because the checks rewrite a module as it is imported and torch.compile cannot
trace them.
"""

import subprocess
import sys

PROGRAM = """
import sys
from jaxtyping import TypeCheckError, install_import_hook

with install_import_hook(["nagnet.ops", "nagnet.nn"], "beartype.beartype"):
    import torch
    from nagnet.models.config import ModelConfig
    from nagnet.models.decoder import Decoder
    from nagnet.nn.residual import RESIDUAL_STREAMS
    from nagnet.ops import reference

try:
    reference.merge(torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2))
except TypeCheckError:
    pass
else:
    sys.exit("the checks are not on")

tokens = torch.randint(32, (2, 8))
for rule in RESIDUAL_STREAMS:
    config = ModelConfig(residual=rule, d_model=16, n_layers=2, n_heads=2, vocab_size=32, max_seq_len=8)
    Decoder(config).loss(tokens, tokens).backward()
"""


def test_annotations_hold_for_every_residual_rule():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
