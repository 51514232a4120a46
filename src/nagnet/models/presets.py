"""Named model shapes."""

from __future__ import annotations

from nagnet.models.config import ModelConfig

PRESETS: dict[str, ModelConfig] = {
    # Small enough for minutes on two CPU cores, deep enough that the residual rule matters. With G_encode = 1 the
    # first logits lie within +-1.4, too flat to learn from for the first tenth of so short a run.
    "stdlib-tiny": ModelConfig(
        d_model=64, n_layers=16, n_heads=2, vocab_size=2048, max_seq_len=256, n_directions=4, init_encode_gain=8.0
    ),
    # The dense model of the public walkthrough (356,515,840 parameters in the pre-norm twin).
    "walkthrough-64x640": ModelConfig(
        d_model=640, n_layers=64, n_heads=5, vocab_size=32_768, max_seq_len=2048, n_directions=32
    ),
}
