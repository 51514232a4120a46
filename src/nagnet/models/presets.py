"""Named model shapes."""

from __future__ import annotations

from nagnet.models.config import ModelConfig

# Writes that grow with their branch (docs/findings.md), of the presets that Muon trains from projections of zero.
DAMPED = 1.0


def _minutes(d_model: int, n_layers: int, n_heads: int) -> ModelConfig:
    """For minutes on two CPU cores. With G_encode = 1 the first logits would lie within +-1.4, too flat."""
    return ModelConfig(
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        vocab_size=2048,
        max_seq_len=256,
        n_directions=4,
        init_encode_gain=8.0,
        branch_eps=DAMPED,
    )


PRESETS: dict[str, ModelConfig] = {
    # Deep enough that the residual rule matters.
    "stdlib-tiny": _minutes(64, 16, 2),
    # About the size of one another, one half as wide per block: what depth costs and gives each rule.
    "stdlib-small": _minutes(96, 24, 3),
    "stdlib-deep": _minutes(64, 48, 2),
    # A GPT-2-small-sized model, deeper and narrower. G_encode = sqrt(d) gives the first logits the spread that was best
    # at width 64 (records/0004-tuned-pair).
    "fineweb-edu-24x512": ModelConfig(
        d_model=512,
        n_layers=24,
        n_heads=4,
        vocab_size=32_768,
        max_seq_len=2048,
        init_encode_gain=22.6,
        branch_eps=DAMPED,
    ),
    # The dense models of the public walkthrough (356,515,840 and 169,738,240 parameters in the pre-norm twins).
    "walkthrough-64x640": ModelConfig(
        d_model=640, n_layers=64, n_heads=5, vocab_size=32_768, max_seq_len=2048, n_directions=32
    ),
    "walkthrough-26x640": ModelConfig(
        d_model=640, n_layers=26, n_heads=5, vocab_size=32_768, max_seq_len=2048, n_directions=32
    ),
    # The walkthrough's rules in a model of minutes on a CPU: no floor under the branch norm but float32's epsilon, and
    # G_encode = 1. Within 60 steps two or more updates of 24 blocks collapse with each of three seeds; of 16, one.
    "walkthrough-24x64": ModelConfig(
        d_model=64, n_layers=24, n_heads=2, vocab_size=2048, max_seq_len=128, n_directions=8, branch_eps=1.2e-7
    ),
}
