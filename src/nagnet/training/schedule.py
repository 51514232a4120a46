"""What changes during a run: learning rates and the injection scale, as functions of the step."""

from __future__ import annotations

from dataclasses import dataclass

from nagnet.errors import UserError


@dataclass(frozen=True)
class ScheduleConfig:
    """Fractions of the run, so that one schedule serves every budget.

    Attributes:
        warmup: share of the steps over which rates rise from 0.
        warmdown: share at the end over which they fall linearly.
        final_lr: rate at the last step, as a share of the peak.
        injection_warmup: share over which the injection scale rises from 0 to 1 (the cure of gate collapse).
    """

    warmup: float = 0.02
    warmdown: float = 0.65
    final_lr: float = 0.05
    injection_warmup: float = 0.05

    def __post_init__(self):
        for name in ("warmup", "warmdown", "final_lr", "injection_warmup"):
            if not 0.0 <= getattr(self, name) <= 1.0:
                raise UserError(f"schedule {name} is {getattr(self, name)}; give a share from 0 to 1")

    def lr_scale(self, step: int, n_steps: int) -> float:
        """Factor of every peak rate at ``step`` (0-based) of ``n_steps``, in (0, 1]."""
        rising = (step + 1) / (self.warmup * n_steps) if self.warmup else 1.0
        remaining = (n_steps - step) / (self.warmdown * n_steps) if self.warmdown else 1.0
        falling = self.final_lr + (1.0 - self.final_lr) * min(1.0, remaining)
        return min(1.0, rising, falling)

    def injection(self, step: int, n_steps: int) -> float:
        """Injection scale at ``step`` (0-based), in (0, 1]."""
        if not self.injection_warmup:
            return 1.0
        return min(1.0, (step + 1) / (self.injection_warmup * n_steps))
