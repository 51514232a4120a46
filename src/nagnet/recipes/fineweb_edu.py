"""A pair for one GPU and about an hour an arm."""

from __future__ import annotations

from nagnet.models.presets import PRESETS
from nagnet.recipes.walkthrough import walkthrough_decay, walkthrough_optimizer
from nagnet.training.config import RunConfig


def fineweb_edu_24x512() -> RunConfig:
    """24 blocks x 512 on FineWeb-Edu, 20 tokens per parameter, about an hour an arm on one H100."""
    model = PRESETS["fineweb-edu-24x512"]
    batch_size, seq_len = 128, 2048
    return RunConfig(
        model=model,
        flops=1.3e18,
        batch_size=batch_size,
        seq_len=seq_len,
        device_batch_size=16,
        optimizer=walkthrough_optimizer(walkthrough_decay(model, batch_size * seq_len)),
        dtype="bfloat16",
        data="hf:fineweb-edu",
        eval_bytes=20_000_000,
    )
