"""What defines a training run, apart from the machine it runs on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, Literal

from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.models.flops import Convention
from nagnet.training.optimizer import OptimizerConfig
from nagnet.training.overrides import coerce_fields, from_plain
from nagnet.training.schedule import ScheduleConfig

MAX_SEED = 2**63
BUDGETS = ("flops", "tokens", "steps", "tokens_per_parameter")
AT_LEAST_ONE = (
    "batch_size",
    "seq_len",
    "micro_batches",
    "device_batch_size",
    "eval_bytes",
    "log_interval",
    "keep_checkpoints",
)
NOT_NEGATIVE = ("max_grad_norm", "health_interval", "eval_interval", "checkpoint_interval")


@dataclass(frozen=True)
class RunConfig:
    """One recipe: a model, how it is trained, and for how long.

    Exactly one budget is given: ``flops``, ``tokens``, ``steps`` or ``tokens_per_parameter``
    (`nagnet.training.budget.resolve_budget`). Intervals are in steps; 0 means at the end of the run alone.

    Attributes:
        model: of the first arm; other arms are copies with another residual rule.
        flops: training FLOPs of each arm. convention: how they are counted (`nagnet.models.flops`).
        tokens: training tokens. steps: optimizer steps.
        tokens_per_parameter: training tokens per parameter, where all count but the embedding table (a tied one
            counts, as it is the readout too).
        batch_size: sequences per optimizer step, over all processes. seq_len: tokens per sequence.
        micro_batches: passes per step and process, to save memory; gradients are weighted by target tokens.
        device_batch_size: sequences per pass and process, which fixes ``micro_batches`` instead.
        optimizer, schedule: rates by role, and what changes during the run.
        max_grad_norm: gradients are scaled down to this norm over all parameters; 0: they are not.
        seed: of initial parameters and batch order.
        init_from: a model to start from, as `find_model` takes it, in place of initial parameters. Vectors X that it
            does not have start at zero, so a model of the full depth can be trained on with skipping.
        dtype: of the products: ``auto`` takes bfloat16 where it is faster, else float32. Parameters stay float32.
        compile: compile the block where a compiler exists.
        activation_checkpointing: keep the input of each block alone and compute the rest again in the backward.
        strategy: of several processes: ``ddp`` replicates parameters, ``fsdp`` shards them.
        data: a file or folder of text, a prepared folder, or the name of a Hugging Face data set; None: Python's
            standard library.
        eval_bytes: held-out text that is scored, in bytes of whole documents.
        log_interval, health_interval, eval_interval, checkpoint_interval: steps between lines of metrics, measurements
            of the gates, evaluations, checkpoints.
        keep_checkpoints: how many of the last checkpoints stay, beside the best.
    """

    model: ModelConfig
    flops: float | None = None
    tokens: int | None = None
    steps: int | None = None
    tokens_per_parameter: float | None = None
    convention: Convention = "causal"
    batch_size: int = 8
    seq_len: int = 256
    micro_batches: int = 1
    device_batch_size: int | None = None
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    max_grad_norm: float = 0.0
    seed: int = 0
    init_from: str | None = None
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    compile: bool = True
    activation_checkpointing: bool = False
    strategy: Literal["ddp", "fsdp"] = "ddp"
    data: str | None = None
    eval_bytes: int = 1_000_000
    log_interval: int = 10
    health_interval: int = 100
    eval_interval: int = 250
    checkpoint_interval: int = 500
    keep_checkpoints: int = 2

    def __post_init__(self):
        coerce_fields(self)
        self._check_budget()
        for name in AT_LEAST_ONE:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(f"{name} is {value}; give 1 or more")
        for name in NOT_NEGATIVE:
            if getattr(self, name) < 0:
                raise UserError(f"{name} is {getattr(self, name)}; give 0 or more")
        if not 0 <= self.seed < MAX_SEED:
            raise UserError(f"seed is {self.seed}; give 0 or more, below 2^63")
        self.accumulation_steps()

    def _check_budget(self) -> None:
        given = [name for name in BUDGETS if getattr(self, name) is not None]
        if not given:
            raise UserError(f"the run has no budget; give one of {', '.join(BUDGETS)}")
        if len(given) > 1:
            values = ", ".join(f"{name} {getattr(self, name):g}" for name in given)
            raise UserError(f"the run has {len(given)} budgets that may contradict each other ({values}); give one")
        if getattr(self, given[0]) <= 0:
            raise UserError(f"{given[0]} is {getattr(self, given[0])}; it must be a number above 0")

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, over all processes."""
        return self.batch_size * self.seq_len

    def sequences_per_process(self, n_processes: int = 1) -> int:
        """Sequences of one step that one of ``n_processes`` takes.

        Raises:
            UserError: if they cannot be shared evenly.
        """
        if self.batch_size % n_processes:
            raise UserError(
                f"batch_size {self.batch_size} cannot be shared by {n_processes} processes; make it a multiple"
            )
        return self.batch_size // n_processes

    def accumulation_steps(self, n_processes: int = 1) -> int:
        """Passes per step of each of ``n_processes``, whose gradients are added up.

        Raises:
            UserError: if a process's sequences cannot be cut evenly.
        """
        share = self.sequences_per_process(n_processes)
        of = f"batch_size {self.batch_size}" + (f" / {n_processes} processes" if n_processes > 1 else "")
        if self.device_batch_size is None:
            if share % self.micro_batches:
                raise UserError(f"micro_batches {self.micro_batches} does not divide {of}")
            return self.micro_batches
        if self.micro_batches != 1:
            raise UserError(
                f"device_batch_size {self.device_batch_size} and micro_batches {self.micro_batches} both say how a "
                "batch is cut; give one"
            )
        if share % self.device_batch_size:
            raise UserError(f"device_batch_size {self.device_batch_size} does not divide {of}")
        return share // self.device_batch_size

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON; `from_dict` takes them back."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> RunConfig:
        """Builds a config from plain values; keys that are missing take their default.

        Raises:
            UserError: for an unknown key, naming the nearest one, or a value that does not fit.
        """
        return from_plain(cls, values, "run config")

    def replace(self, **changes: Any) -> RunConfig:
        """A copy with ``changes``; a new budget takes the place of the old one, whatever its kind."""
        if any(changes.get(name) is not None for name in BUDGETS):
            changes = dict.fromkeys(BUDGETS) | changes
        return dataclasses.replace(self, **changes)
