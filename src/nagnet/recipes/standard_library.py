"""Recipes of minutes on a CPU: pairs that train on Python's standard library."""

from __future__ import annotations

from nagnet.models.config import ModelConfig
from nagnet.models.presets import PRESETS
from nagnet.training.config import RunConfig


def on_standard_library(model: ModelConfig, flops: float) -> RunConfig:
    """A run of minutes: small batches of Python's standard library, watched closely."""
    return RunConfig(
        model=model,
        flops=flops,
        batch_size=4,
        seq_len=256,
        eval_bytes=400_000,
        health_interval=20,
        eval_interval=100,
        checkpoint_interval=100,
    )


def stdlib_tiny() -> RunConfig:
    """The demo: 16 blocks x 64 on Python's standard library, about a minute an arm on two CPU cores."""
    return on_standard_library(PRESETS["stdlib-tiny"], 3.6e12)


def stdlib_small() -> RunConfig:
    """24 blocks x 96 on Python's standard library, minutes an arm on two CPU cores."""
    return on_standard_library(PRESETS["stdlib-small"], 1e13)


def stdlib_deep() -> RunConfig:
    """48 blocks x 64 on Python's standard library: as many FLOPs per token as stdlib-small, twice the depth."""
    return on_standard_library(PRESETS["stdlib-deep"], 1e13)
