"""Recipes of minutes on a CPU: pairs that train on Python's standard library."""

from __future__ import annotations

from nagnet.models.presets import PRESETS
from nagnet.training.config import RunConfig


def stdlib_tiny() -> RunConfig:
    """The demo: 16 blocks x 64 on Python's standard library, about a minute an arm on two CPU cores."""
    return RunConfig(
        model=PRESETS["stdlib-tiny"],
        flops=3.6e12,
        batch_size=4,
        seq_len=256,
        eval_bytes=400_000,
        health_interval=20,
        eval_interval=100,
        checkpoint_interval=100,
    )


def _stdlib_1e13(preset: str) -> RunConfig:
    """1e13 FLOPs an arm."""
    return RunConfig(
        model=PRESETS[preset],
        flops=1e13,
        batch_size=4,
        seq_len=256,
        eval_bytes=400_000,
        health_interval=20,
        eval_interval=100,
        checkpoint_interval=100,
    )


def stdlib_small() -> RunConfig:
    """24 blocks x 96 on Python's standard library, minutes an arm on two CPU cores."""
    return _stdlib_1e13("stdlib-small")


def stdlib_deep() -> RunConfig:
    """48 blocks x 64 on Python's standard library: as many FLOPs per token as stdlib-small, twice the depth."""
    return _stdlib_1e13("stdlib-deep")
