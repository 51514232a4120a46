"""The training loop against a hand-written one of the same model, and what a step spends beside computing."""

from __future__ import annotations

import itertools
import tempfile
import time
from typing import Any

import numpy as np
import torch
from torch import nn

from nagnet.benchmarks.timing import interleave, synchronize
from nagnet.data.loader import BatchLoader, PackedTokens
from nagnet.diagnostics.health import stream_health
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.ops.loss import IGNORED_TARGET
from nagnet.training.config import RunConfig
from nagnet.training.health import HealthMonitor, health_tokens
from nagnet.training.loop import Trainer
from nagnet.training.metrics import MetricsWriter
from nagnet.training.optimizer import build_optimizers

BATCHES = 200  # of the loader's rate
DOCUMENT = 700  # tokens


def bench_training_loop(model: ModelConfig, batch_size: int, device: torch.device, repeats: int) -> dict[str, Any]:
    """Times a step of `Trainer` and one of a minimal loop, interleaved, both compiled, in float32, on random tokens.

    Args:
        model: of both; batch_size: sequences of its ``max_seq_len`` per step.

    Returns:
        seconds of ``trainer`` and ``minimal``; throughput, their ratio minimal / trainer; beside_computing, the share
        of the trainer's step that is neither forward, backward nor optimizer; per_interval, seconds of one
        measurement of health and of one line of metrics; loader, its tokens per second, and as a multiple of the
        trainer's.
    """
    config = RunConfig(model=model, steps=10_000, batch_size=batch_size, seq_len=model.max_seq_len)
    loader = BatchLoader(_random_tokens(config), batch_size, config.seq_len, config.seed)
    trainer = Trainer(model.residual, config, model, loader, device)
    trainer.prepare()
    minimal = _minimal_loop(config, loader, device)
    rows: list[dict[str, Any]] = []
    timings = interleave({"trainer": lambda: rows.append(trainer.step()), "minimal": minimal}, repeats)
    timed = rows[-repeats:]
    computing = sum(row["pass_seconds"] + row["optimizer_seconds"] for row in timed)
    start = time.perf_counter()
    for step in range(BATCHES):
        loader.batch(step)
    rate = BATCHES * config.tokens_per_step / (time.perf_counter() - start)
    return {
        "residual": model.residual,
        "shape": f"{model.n_layers} x {model.d_model}, {config.tokens_per_step} tokens",
        "seconds": {name: timing.to_dict() for name, timing in timings.items()},
        "throughput": timings["minimal"].median / timings["trainer"].median,
        "beside_computing": 1.0 - computing / sum(row["seconds"] for row in timed),
        "per_interval": _interval_seconds(trainer, rows[-1]),
        "loader": {
            "tokens_per_second": rate,
            "multiple_of_trainer": rate * timings["trainer"].median / config.tokens_per_step,
        },
    }


def _random_tokens(config: RunConfig) -> PackedTokens:
    n_documents = 2000
    draw = np.random.default_rng(0)
    tokens = draw.integers(1, config.model.vocab_size, n_documents * DOCUMENT, dtype=np.uint16)
    offsets = np.arange(0, len(tokens) + 1, DOCUMENT)
    tokens[offsets[:-1]] = 0
    return PackedTokens(tokens, offsets, bos_id=0, vocab_size=config.model.vocab_size)


def _minimal_loop(config: RunConfig, loader: BatchLoader, device: torch.device) -> Any:
    """A step as one would write it in a notebook: all logits at once, no schedule, no norms, no metrics."""
    model = Decoder(config.model, seed=config.seed).to(device)
    optimizers = build_optimizers(model, config.optimizer)
    model.compile_blocks()
    steps = itertools.count()

    def step() -> None:
        inputs, targets = (part.to(device) for part in loader.batch(next(steps)))
        logits = model(inputs).flatten(0, 1)
        nn.functional.cross_entropy(logits, targets.flatten(), ignore_index=IGNORED_TARGET).backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        model.constrain_()

    step()
    return step


def _interval_seconds(trainer: Trainer, row: dict[str, Any]) -> dict[str, float]:
    monitor = HealthMonitor()
    seconds = {}
    with tempfile.TemporaryDirectory() as folder, MetricsWriter(folder) as writer:
        for _ in range(2):  # the first call warms up
            start = time.perf_counter()
            health, _ = monitor.check(stream_health(trainer.model, health_tokens(trainer.batch(0)[0])))
            synchronize()
            seconds["health"] = time.perf_counter() - start
            start = time.perf_counter()
            writer.write(row | health)
            seconds["metrics"] = time.perf_counter() - start
    return seconds
