"""Named experiments: functions that return a run config."""

from __future__ import annotations

from collections.abc import Callable

from nagnet.models.presets import PRESETS
from nagnet.training.config import RunConfig


def stdlib_tiny() -> RunConfig:
    """16 blocks x 64 on Python's standard library: minutes on two CPU cores."""
    return RunConfig(model=PRESETS["stdlib-tiny"], flops=3.6e12, batch_size=4, seq_len=256, eval_bytes=400_000)


RECIPES: dict[str, Callable[[], RunConfig]] = {"stdlib-tiny": stdlib_tiny}
