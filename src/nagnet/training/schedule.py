"""What changes during a run, as functions of the step: rates, momentum, weight decay and the injection scale."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch.optim import Optimizer

from nagnet.errors import UserError
from nagnet.training.overrides import coerce_fields

SHARES = ("warmup", "warmdown", "final_lr", "injection_warmup")


@dataclass(frozen=True)
class ScheduleConfig:
    """Shares of the run, so that one schedule serves every budget; or steps and tokens, where those are given.

    Attributes:
        warmup: share of the steps over which rates rise from 0. warmup_steps: their number, in place of the share.
        warmdown: share at the end over which rates fall linearly. final_lr: rate at the end, as a share of the peak.
        injection_warmup: share over which the injection scale rises from 0 to 1 (the cure of gate collapse).
            injection_warmup_tokens: tokens over which it does, in place of the share.
        momentum_start: momentum of the matrices at step 0, from which it rises linearly to the optimizer's over
            ``momentum_warmup_steps`` steps; None: the optimizer's from the start.
        momentum_end: momentum at the last step, to which it falls during the warm-down; None: it stays.
        weight_decay: of the matrices, as a function of the step: ``constant``, or ``cosine``, half a period down to 0.
    """

    warmup: float = 0.02
    warmup_steps: int | None = None
    warmdown: float = 0.65
    final_lr: float = 0.05
    injection_warmup: float = 0.05
    injection_warmup_tokens: int | None = None
    momentum_start: float | None = None
    momentum_warmup_steps: int = 400
    momentum_end: float | None = None
    weight_decay: Literal["constant", "cosine"] = "constant"

    def __post_init__(self):
        coerce_fields(self, "schedule ")
        for name in SHARES:
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UserError(f"schedule {name} is {getattr(self, name)}; give a share from 0 to 1")
        for name in ("warmup_steps", "injection_warmup_tokens", "momentum_warmup_steps"):
            if (getattr(self, name) or 0) < 0:
                raise UserError(f"schedule {name} is {getattr(self, name)}; give 0 or more")
        for name in ("momentum_start", "momentum_end"):
            value = getattr(self, name)
            if value is not None and not 0.0 <= value < 1.0:
                raise UserError(f"schedule {name} is {value}; give a number from 0 to below 1")

    def lr_scale(self, step: float, n_steps: int) -> float:
        """Factor of every peak rate at ``step`` (0-based) of ``n_steps``, in (0, 1]."""
        warmup_steps = self.warmup * n_steps if self.warmup_steps is None else self.warmup_steps
        rising = (step + 1) / warmup_steps if warmup_steps else 1.0
        remaining = (n_steps - step) / (self.warmdown * n_steps) if self.warmdown else 1.0
        falling = self.final_lr + (1.0 - self.final_lr) * min(1.0, remaining)
        return min(1.0, rising, falling)

    def injection(self, step: float, n_steps: int, tokens_per_step: int | None = None) -> float:
        """Injection scale at ``step`` (0-based), in (0, 1]; a warm-up in tokens needs ``tokens_per_step``.

        The tokens of the step itself count, so that no step runs at 0.
        """
        if self.injection_warmup_tokens is not None:
            if tokens_per_step is None:
                raise ValueError("injection_warmup_tokens: the schedule needs tokens_per_step")
            length, done = float(self.injection_warmup_tokens), (step + 1) * tokens_per_step
        else:
            length, done = self.injection_warmup * n_steps, step + 1
        return min(1.0, done / length) if length else 1.0

    def momentum(self, step: float, n_steps: int, peak: float) -> float:
        """Momentum of the matrices at ``step`` (0-based), where the optimizer's own is ``peak``."""
        if self.momentum_start is not None and step < self.momentum_warmup_steps:
            return self.momentum_start + (peak - self.momentum_start) * step / self.momentum_warmup_steps
        warmdown_steps = self.warmdown * n_steps
        warmed_down = step - (n_steps - warmdown_steps)
        if self.momentum_end is None or warmed_down < 0 or not warmdown_steps:
            return peak
        return peak + (self.momentum_end - peak) * warmed_down / warmdown_steps

    def decay_scale(self, step: float, n_steps: int) -> float:
        """Factor of the matrices' weight decay at ``step`` (0-based), in [0, 1]."""
        return 1.0 if self.weight_decay == "constant" else 0.5 * (1.0 + math.cos(math.pi * step / n_steps))


def apply_schedule(
    optimizers: Iterable[Optimizer], schedule: ScheduleConfig, step: float, n_steps: int, tokens_per_step: int
) -> dict[str, float]:
    """Puts a step's rate, momentum and weight decay into the groups of ``build_optimizers``.

    The injection scale is returned and not applied: ``model.set_injection(values["injection"])``.

    Args:
        step: 0-based, of ``n_steps``; a fraction where skipping makes a step cost less than one.

    Returns:
        What is in force: ``lr_scale`` and ``injection``; with matrices also their ``momentum`` and ``weight_decay``.
    """
    values = {
        "lr_scale": schedule.lr_scale(step, n_steps),
        "injection": schedule.injection(step, n_steps, tokens_per_step),
    }
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = group["peak_lr"] * values["lr_scale"]
            if group["role"] == "matrix":
                values["momentum"] = group["momentum"] = schedule.momentum(step, n_steps, group["peak_momentum"])
                decay = group["peak_weight_decay"] * schedule.decay_scale(step, n_steps)
                values["weight_decay"] = group["weight_decay"] = decay
    return values
