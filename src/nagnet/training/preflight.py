"""A few tiny experiments before a big run: does it fit, how fast is it, what does it cost, do the gates stay open?"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from nagnet.data.loader import BatchLoader, PackedTokens
from nagnet.diagnostics.health import StreamHealth, stream_health
from nagnet.training.budget import dollars_to_finish, resolve_budget
from nagnet.training.compute import release_freed_memory, resolve_dtype
from nagnet.training.config import RunConfig
from nagnet.training.health import health_tokens
from nagnet.training.loop import Trainer
from nagnet.training.optimizer import scale_rates
from nagnet.training.run import Run
from nagnet.training.text import open_text

SMALL_RUN_FLOPS = 2e12  # a recipe of no more is tried as it is
SMALL_WIDTH, SMALL_HEADS, SMALL_VOCABULARY = 64, 2, 2048
SMALL_BATCH, SMALL_LENGTH = 4, 128
SMALL_EVAL_BYTES = 100_000
HEALTH_INTERVALS = 20  # in the small run
CPU_SEQUENCES = 2  # measured on a CPU; more of a large model would take minutes and much memory


@dataclass(frozen=True)
class ShapeReport:
    """What a few steps at true shape say of the whole run.

    Attributes:
        sequences: per pass, as measured. device_batch: per pass of the recipe; where it is more, time is
            taken as proportional to it, and memory extrapolated along a straight line through two sizes.
        tokens_per_second: of the whole step, accumulation and optimizer included. step_seconds: of such a step.
        peak_memory_bytes: of a pass of the recipe and the optimizer.
        seconds: of all steps. dollars: their price, or None. flops_per_second: training FLOPs on this device.
        loss: of the last step measured, nats per token (random tokens where ``text`` says so).
        health: of every sublayer after it. text: what was read.
        dtype: of the products.
    """

    sequences: int
    device_batch: int
    tokens_per_second: float
    step_seconds: float
    peak_memory_bytes: int
    seconds: float
    dollars: float | None
    flops_per_second: float
    loss: float
    health: StreamHealth
    text: str
    dtype: str


def measure_true_shape(
    config: RunConfig, device: torch.device, n_steps: int, dollars_per_hour: float | None = None
) -> ShapeReport:
    """Runs a few steps of the recipe's model on random tokens, at two numbers of sequences per pass.

    Args:
        n_steps: timed at each size, after one that is not.
        dollars_per_hour: price of the device.
    """
    dtype = resolve_dtype(config.dtype, device)
    n_parts = config.accumulation_steps()
    device_batch = config.batch_size // n_parts
    largest = min(device_batch, CPU_SEQUENCES) if device.type == "cpu" else device_batch
    large = _measure(config, device, dtype, largest, n_steps)
    small = large if largest == 1 else _measure(config, device, dtype, largest // 2, n_steps)

    # Memory grows along a straight line; time is taken as proportional, which a larger pass can only better.
    more = device_batch - large.sequences
    growth = max(0.0, large.peak_memory - small.peak_memory) / max(1, large.sequences - small.sequences)
    pass_seconds = large.pass_seconds * device_batch / large.sequences
    step_seconds = n_parts * pass_seconds + large.optimizer_seconds
    budget = resolve_budget(config)
    seconds = step_seconds * budget.n_steps
    return ShapeReport(
        sequences=large.sequences,
        device_batch=device_batch,
        tokens_per_second=config.tokens_per_step / step_seconds,
        step_seconds=step_seconds,
        peak_memory_bytes=round(large.peak_memory + growth * more),
        seconds=seconds,
        dollars=dollars_to_finish(seconds, dollars_per_hour),
        flops_per_second=budget.flops_per_step / step_seconds,
        loss=large.loss,
        health=large.health,
        text="random tokens",
        dtype=str(dtype).removeprefix("torch."),
    )


@dataclass(frozen=True)
class _Measurement:
    sequences: int
    pass_seconds: float
    optimizer_seconds: float
    peak_memory: int
    loss: float
    health: StreamHealth


def _measure(config: RunConfig, device: torch.device, dtype: torch.dtype, sequences: int, n_steps: int) -> _Measurement:
    vocab_size, n_tokens = config.model.vocab_size, sequences * config.seq_len * (n_steps + 1) + 1
    tokens = np.random.default_rng(config.seed).integers(0, vocab_size, n_tokens, dtype=np.uint32)
    tokens[0] = 0
    packed = PackedTokens(tokens, np.array([0, n_tokens]), bos_id=0, vocab_size=vocab_size)
    one_pass = config.replace(batch_size=sequences, device_batch_size=None, micro_batches=1, steps=n_steps + 1)
    loader = BatchLoader(packed, sequences, config.seq_len, config.seed)
    torch.compiler.reset()
    trainer = Trainer(config.model.residual, one_pass, config.model, loader, device, dtype)
    trainer.prepare()
    release_freed_memory()
    rows = [trainer.step() for _ in range(n_steps + 1)]
    return _Measurement(
        sequences,
        statistics.median(row["pass_seconds"] for row in rows[1:]),
        statistics.median(row["optimizer_seconds"] for row in rows[1:]),
        trainer.peak_memory,
        rows[-1]["loss"],
        stream_health(trainer.model, health_tokens(trainer.batch(n_steps)[0])),
    )


def scaled_down(config: RunConfig, n_steps: int) -> RunConfig:
    """A run of minutes with the recipe's depth, rule, readout, rates and schedule, but small in all else.

    Rates are those in force in the recipe, after its scaling with batch and width; warm-ups are the same shares of
    the run. A recipe of at most ``SMALL_RUN_FLOPS`` stays as it is.
    """
    budget = resolve_budget(config)
    if budget.flops <= SMALL_RUN_FLOPS:
        return config.replace(steps=budget.n_steps, health_interval=max(1, budget.n_steps // HEALTH_INTERVALS))
    model, schedule = config.model, config.schedule
    optimizer, _ = scale_rates(config.optimizer, config.tokens_per_step, model.d_model)
    width = min(model.d_model, SMALL_WIDTH)
    n_heads = min(model.n_heads, SMALL_HEADS)
    injection = schedule.injection_warmup
    if schedule.injection_warmup_tokens is not None:
        injection = min(1.0, schedule.injection_warmup_tokens / budget.tokens)
    warmup = schedule.warmup
    if schedule.warmup_steps is not None:
        warmup = min(1.0, schedule.warmup_steps / budget.n_steps)
    momentum_steps = max(1, round(schedule.momentum_warmup_steps * n_steps / budget.n_steps))
    return config.replace(
        model=model.replace(
            d_model=width,
            n_heads=n_heads,
            n_kv_heads=max(1, n_heads * model.n_kv_heads // model.n_heads),
            head_dim=max(2, width // n_heads // 2 * 2),
            d_ff=max(1, width * model.d_ff // model.d_model),
            vocab_size=min(model.vocab_size, SMALL_VOCABULARY),
            max_seq_len=SMALL_LENGTH,
            sliding_windows=tuple(min(window, SMALL_LENGTH) for window in model.sliding_windows),
        ),
        optimizer=optimizer,
        schedule=dataclasses.replace(
            schedule,
            warmup=warmup,
            warmup_steps=None,
            injection_warmup=injection,
            injection_warmup_tokens=None,
            momentum_warmup_steps=momentum_steps,
        ),
        steps=n_steps,
        batch_size=SMALL_BATCH,
        device_batch_size=None,
        micro_batches=1,
        seq_len=SMALL_LENGTH,
        data=None,
        eval_bytes=SMALL_EVAL_BYTES,
        health_interval=max(1, n_steps // HEALTH_INTERVALS),
    )


def run_scaled_down(
    config: RunConfig, n_steps: int, device: torch.device, out: Path, echo: Callable[[str], None]
) -> dict[str, Any]:
    """Trains the scaled-down recipe in ``out``.

    Returns:
        The run's summary.

    Raises:
        NonFiniteLoss: with a post-mortem in ``out``.
        KeyboardInterrupt: if a signal stopped it.
    """
    small = scaled_down(config, n_steps).replace(eval_interval=0, checkpoint_interval=0)
    text = open_text(small.data, small.model.vocab_size, small.eval_bytes)
    run = Run("preflight", small, text, out, device, resolve_dtype(small.dtype, device), trackers=(), echo=echo)
    summary = run.train()
    if run.stopped_by is not None:
        raise KeyboardInterrupt
    return summary
