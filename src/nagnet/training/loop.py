"""The training loop of one arm: read `Trainer.step` from top to bottom to see all that happens in a step."""

from __future__ import annotations

import math
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from nagnet.data.loader import BatchLoader
from nagnet.errors import UserError
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.models.flops import steps_for_flops, training_flops_per_token
from nagnet.ops.loss import IGNORED_TARGET
from nagnet.training.compute import autocast, compile_or_warn, peak_memory_bytes, reset_peak_memory
from nagnet.training.config import RunConfig
from nagnet.training.optimizer import build_optimizers, constrain_after_step


class NonFiniteLoss(UserError):
    """The loss is NaN or infinite; the model still holds the parameters of the step before."""


def backward(model: Decoder, inputs: Tensor, targets: Tensor, micro_batches: int) -> float:
    """Adds the gradient of the mean loss over all targets of a batch, computed in parts.

    Each part weighs as many targets as it holds, so the result does not depend on ``micro_batches``; a part
    without a target adds nothing.

    Args:
        inputs, targets: [B, T] int64, targets -100 where ignored. micro_batches: divides B.

    Returns:
        The mean loss in nats per target.
    """
    n_targets = max(1, int((targets != IGNORED_TARGET).sum()))
    total = 0.0
    for part, part_targets in zip(inputs.chunk(micro_batches), targets.chunk(micro_batches), strict=True):
        loss = model.summed_loss(part, part_targets)[0] / n_targets
        loss.backward()
        total += float(loss.detach())
    return total


@dataclass
class Trainer:
    """One arm in training.

    Attributes:
        name: of the arm, as it appears in metrics.
        config: the recipe; ``model_config``: this arm's model.
        loader: gives the batch of a step, the same for every arm.
        device, dtype: where and in which type the products run; parameters stay float32.
    """

    name: str
    config: RunConfig
    model_config: ModelConfig
    loader: BatchLoader
    device: torch.device
    dtype: torch.dtype = torch.float32
    n_steps: int = field(init=False)
    n_done: int = field(init=False, default=0)
    compiled: bool = field(init=False, default=False)
    peak_memory: int = field(init=False, default=0)
    step_seconds: list[float] = field(init=False, default_factory=list)

    def __post_init__(self):
        config = self.config
        self.model = Decoder(self.model_config, seed=config.seed).to(self.device)
        self.optimizers = build_optimizers(self.model, config.optimizer)
        constrain_after_step(self.model, *self.optimizers)
        shape = (self.model_config, config.seq_len)
        self.n_steps = steps_for_flops(*shape, config.tokens_per_step, config.flops, config.convention)
        self.flops_per_step = training_flops_per_token(*shape, config.convention) * config.tokens_per_step

    def prepare(self) -> None:
        """Compiles the block if the recipe asks for it, with one forward and backward that changes nothing."""
        if not self.config.compile:
            return
        inputs, targets = self._batch(0)

        def first_step() -> None:
            with autocast(self.device, self.dtype):
                backward(self.model, inputs, targets, self.config.micro_batches)
            self.model.zero_grad(set_to_none=True)

        self.compiled = compile_or_warn(self.model, first_step)

    def step(self) -> dict[str, Any]:
        """One optimizer step.

        Returns:
            Metrics: arm, step (steps done), tokens, flops (training FLOPs so far), loss (nats per token, before
            this step's update), lr_scale, injection, epoch, seconds (of this step).

        Raises:
            NonFiniteLoss: before the parameters change.
        """
        config, step = self.config, self.n_done
        lr_scale = config.schedule.lr_scale(step, self.n_steps)
        injection = config.schedule.injection(step, self.n_steps)
        inputs, targets = self._batch(step)
        reset_peak_memory(self.device)
        start = time.perf_counter()
        self.model.train()
        self.model.set_injection(injection)
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * lr_scale
        with autocast(self.device, self.dtype):
            loss = backward(self.model, inputs, targets, config.micro_batches)
        if not math.isfinite(loss):
            raise NonFiniteLoss(f"{self.name}: the loss is {loss} at step {step}; lower the learning rates")
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        self.step_seconds.append(time.perf_counter() - start)
        self.peak_memory = max(self.peak_memory, peak_memory_bytes(self.device))
        self.n_done += 1
        return {
            "arm": self.name,
            "step": self.n_done,
            "tokens": self.tokens,
            "flops": self.flops,
            "loss": loss,
            "lr_scale": lr_scale,
            "injection": injection,
            "epoch": self.loader.epoch_of(step),
            "seconds": self.step_seconds[-1],
        }

    @property
    def tokens(self) -> int:
        """Tokens seen so far."""
        return self.n_done * self.config.tokens_per_step

    @property
    def flops(self) -> int:
        """Training FLOPs spent so far."""
        return self.n_done * self.flops_per_step

    @property
    def finished(self) -> bool:
        """Whether the budget is spent."""
        return self.n_done >= self.n_steps

    def _batch(self, step: int) -> tuple[Tensor, Tensor]:
        inputs, targets = self.loader.batch(step)
        return inputs.to(self.device), targets.to(self.device)


@contextmanager
def interrupt_flag() -> Iterator[list[int]]:
    """Turns the first Ctrl-C into an entry of the yielded list, so that a step is never cut in half.

    A second Ctrl-C raises KeyboardInterrupt at once.
    """
    received: list[int] = []

    def handle(signum, frame):
        if received:
            raise KeyboardInterrupt
        received.append(signum)

    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield received
        return
    previous = signal.signal(signal.SIGINT, handle)
    try:
        yield received
    finally:
        signal.signal(signal.SIGINT, previous)
