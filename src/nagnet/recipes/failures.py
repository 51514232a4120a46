"""The two failures of the walkthrough and their cure in minutes on a CPU: what the gate alarm must and must not see.

The rates are those in force in the walkthrough's main run, after its scaling with batch and width.
"""

from __future__ import annotations

from nagnet.models.presets import PRESETS
from nagnet.recipes.walkthrough import walkthrough_decay, walkthrough_optimizer
from nagnet.training.config import RunConfig
from nagnet.training.optimizer import scale_rates
from nagnet.training.schedule import ScheduleConfig

BATCH_TOKENS, WIDTH = 2**20, 640  # of the walkthrough's main run
CURED_GATE_LR = 1e-3
COLLAPSING_GATE_LR = 0.012  # the matrices' rate
UNDERFLOWING_GATE_LR = 0.7
INJECTION_WARMUP = 0.1


def _small_walkthrough(gate_lr: float, injection_warmup: float, modulation_floor: float | None = None) -> RunConfig:
    decay = walkthrough_decay(PRESETS["walkthrough-64x640"], BATCH_TOKENS)
    optimizer, _ = scale_rates(walkthrough_optimizer(decay, gate_lr), BATCH_TOKENS, WIDTH)
    model = PRESETS["walkthrough-24x64"]
    if modulation_floor is not None:
        model = model.replace(modulation_floor=modulation_floor)
    return RunConfig(
        model=model,
        flops=1e12,
        batch_size=4,
        seq_len=128,
        optimizer=optimizer,
        schedule=ScheduleConfig(injection_warmup=injection_warmup),
        dtype="float32",
        eval_bytes=200_000,
        health_interval=20,
        eval_interval=100,
        checkpoint_interval=100,
    )


def walkthrough_collapse() -> RunConfig:
    """Gate collapse: the gates learn at the matrices' rate, without injection warm-up. The alarm must see it."""
    return _small_walkthrough(COLLAPSING_GATE_LR, injection_warmup=0.0)


def walkthrough_cure() -> RunConfig:
    """The same run with gate rate 1e-3 and injection warm-up. The alarm must not fire."""
    return _small_walkthrough(CURED_GATE_LR, INJECTION_WARMUP)


def walkthrough_nan() -> RunConfig:
    """Modulation without its clamp: gates underflow to 0, whose gradient is not finite. The run must stop there.

    The underflow needs gates of -100 before the sigmoid. Gates of width 640 get there at a fraction of the rate that
    this narrow model needs within its minute, so its gate rate is raised; with the clamp the same run stays finite.
    """
    return _small_walkthrough(UNDERFLOWING_GATE_LR, injection_warmup=0.0, modulation_floor=0.0)
