"""What defines a training run, apart from its data."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from typing import Any

from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.models.flops import Convention
from nagnet.training.optimizer import OptimizerConfig
from nagnet.training.schedule import ScheduleConfig

MAX_SEED = 2**63


@dataclass(frozen=True)
class RunConfig:
    """One recipe: a model, how it is trained, and on how many FLOPs.

    Attributes:
        model: of the first arm; other arms are copies with another residual rule.
        flops: training budget of each arm, in FLOPs. convention: how they are counted (`nagnet.models.flops`).
        batch_size: sequences per optimizer step. seq_len: tokens per sequence.
        micro_batches: parts a batch is cut into to save memory; gradients are weighted by target tokens.
        seed: of initial parameters and batch order.
        compile: compile the block where a compiler exists.
        eval_bytes: held-out text that is scored, in bytes of whole documents.
    """

    model: ModelConfig
    flops: float
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    convention: Convention = "causal"
    batch_size: int = 8
    seq_len: int = 256
    micro_batches: int = 1
    seed: int = 0
    compile: bool = True
    eval_bytes: int = 1_000_000

    def __post_init__(self):
        for name in ("flops", "batch_size", "seq_len", "micro_batches", "eval_bytes"):
            if not 0 < getattr(self, name) < math.inf:
                raise UserError(f"{name} is {getattr(self, name)}; it must be a number above 0")
        if not 0 <= self.seed < MAX_SEED:
            raise UserError(f"seed is {self.seed}; give 0 or more, below 2^63")
        if self.batch_size % self.micro_batches:
            raise UserError(f"micro_batches {self.micro_batches} does not divide batch_size {self.batch_size}")

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for a JSON record."""
        return dataclasses.asdict(self)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        return self.batch_size * self.seq_len
