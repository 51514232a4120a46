"""The CPU ladder: what depth does to an arm when parameters stay the same, in minutes a run.

Each rung has about 2 million parameters in its blocks and about the same training FLOPs per token. Its name is its
ratio of width to blocks, against which the paper reports its results by depth.
"""

from __future__ import annotations

from dataclasses import replace

from nagnet.models.config import ModelConfig
from nagnet.models.presets import DAMPED
from nagnet.recipes.standard_library import on_standard_library
from nagnet.training.config import RunConfig


def _rung(d_model: int, n_layers: int, n_heads: int) -> RunConfig:
    model = ModelConfig(
        d_model=d_model,
        n_layers=n_layers,
        n_heads=n_heads,
        vocab_size=2048,
        max_seq_len=256,
        n_directions=max(4, round(d_model / 20)),
        init_encode_gain=8.0,
        branch_eps=DAMPED,
    )
    return on_standard_library(model, 4e12)


def ladder_40() -> RunConfig:
    """CPU ladder: 5 blocks x 184, the widest rung of 2M parameters."""
    return _rung(184, 5, 4)


def ladder_20() -> RunConfig:
    """CPU ladder: 8 blocks x 144."""
    return _rung(144, 8, 4)


def ladder_10() -> RunConfig:
    """CPU ladder: 12 blocks x 120."""
    return _rung(120, 12, 4)


def ladder_5() -> RunConfig:
    """CPU ladder: 18 blocks x 96."""
    return _rung(96, 18, 3)


def ladder_2() -> RunConfig:
    """CPU ladder: 32 blocks x 72."""
    return _rung(72, 32, 2)


def ladder_1() -> RunConfig:
    """CPU ladder: 54 blocks x 56, the deepest rung of 2M parameters, with an injection warm-up of 30% of the run."""
    run = _rung(56, 54, 2)
    # The default of 5% loses 0.009 bits per byte here and one update of 324; with 24 blocks it is as good (0029, 0019).
    return run.replace(schedule=replace(run.schedule, injection_warmup=0.3))
