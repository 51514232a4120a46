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
from nagnet.evaluation.saved_model import find_model
from nagnet.models.checkpoint import load_parameters
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.models.flops import training_flops_per_token
from nagnet.ops.loss import IGNORED_TARGET
from nagnet.training.budget import Budget, resolve_budget
from nagnet.training.compute import autocast, compile_or_warn, peak_memory_bytes, reset_peak_memory
from nagnet.training.config import RunConfig
from nagnet.training.distributed import World, sum_over_ranks
from nagnet.training.health import GradientNorms, gradient_norms
from nagnet.training.optimizer import build_optimizers, constrain_after_step
from nagnet.training.parallel import Parallel, parallelize
from nagnet.training.schedule import apply_schedule

MAX_SKIPPED_STEPS = 20  # in a row, before float16's loss scale is no longer what is wrong


class NonFiniteLoss(UserError):
    """The loss or a gradient is NaN or infinite; the model still holds the parameters of the step before.

    Attributes:
        step: steps done. loss: in nats. gradient_norm: over all parameters, or None where the loss said enough.
    """

    def __init__(self, message: str, step: int, loss: float, gradient_norm: float | None):
        super().__init__(message)
        self.step, self.loss, self.gradient_norm = step, loss, gradient_norm


def backward(
    parallel: Parallel, inputs: Tensor, targets: Tensor, n_parts: int, scaler: torch.amp.GradScaler | None = None
) -> float:
    """Adds the gradient of the mean loss over all targets of a step, computed in parts, on all processes.

    Each part weighs as many targets as it holds, so the result depends neither on ``n_parts`` nor on the number of
    processes; a part without a target adds nothing.

    Args:
        inputs, targets: this process's [B, T] int64, targets -100 where ignored. n_parts: divides B.
        scaler: of the loss, for float16.

    Returns:
        The mean loss in nats per target.
    """
    n_targets = sum_over_ranks((targets != IGNORED_TARGET).sum()).clamp(min=1)
    total = torch.zeros((), device=inputs.device)
    parts = list(zip(inputs.chunk(n_parts), targets.chunk(n_parts), strict=True))
    for number, part in enumerate(parts, start=1):
        with parallel.micro_batch(last=number == n_parts):
            loss = parallel.summed_loss(*part)[0] / n_targets
            (loss if scaler is None else scaler.scale(loss)).backward()
        total += loss.detach()
    parallel.reduce_gradients()
    return float(sum_over_ranks(total))


@dataclass
class Trainer:
    """One arm in training.

    Attributes:
        name: of the arm, as it appears in metrics.
        config: the recipe; ``model_config``: this arm's model.
        loader: gives this process's batch of a step, the same for every arm.
        device, dtype: where and in which type the products run; parameters stay float32.
        world: the processes that train it together.
    """

    name: str
    config: RunConfig
    model_config: ModelConfig
    loader: BatchLoader
    device: torch.device
    dtype: torch.dtype = torch.float32
    world: World = field(default_factory=World)
    budget: Budget = field(init=False)
    parallel: Parallel = field(init=False)
    n_done: int = field(init=False, default=0)
    n_skipped: int = field(init=False, default=0)
    compiled: bool = field(init=False, default=False)
    peak_memory: int = field(init=False, default=0)
    flops: int = field(init=False, default=0)  # training FLOPs spent so far, over all processes
    step_seconds: list[float] = field(init=False, default_factory=list)

    def __post_init__(self):
        config = self.config
        self.budget = resolve_budget(config, self.model_config)
        self.n_parts = config.accumulation_steps(self.world.size)
        self.model = Decoder(self.model_config, seed=config.seed)
        if config.init_from is not None:
            load_parameters(self.model, find_model(config.init_from).folder)
        self.model.to(self.device)
        self.model.checkpoint_blocks = config.activation_checkpointing
        if self.model.skipping is not None:
            self.model.skipping.set_threshold(None)  # until its start step
        self.last_step_flops = self.flops_per_step  # of the last step done; what skipped is not in it
        self.parallel = parallelize(self.model, self.world, config.strategy, self.dtype)
        self.optimizers = build_optimizers(self.model, config.optimizer, config.tokens_per_step)
        constrain_after_step(self.model, *self.optimizers)
        self.scaler = torch.amp.GradScaler(self.device.type) if self.dtype == torch.float16 else None

    def prepare(self) -> None:
        """Compiles the block if the recipe asks for it, with one forward and backward that changes nothing."""
        if not self.config.compile:
            return
        inputs, targets = self.batch(0)

        def first_step() -> None:
            with autocast(self.device, self.dtype):
                backward(self.parallel, inputs, targets, self.n_parts)
            self.model.zero_grad(set_to_none=True)

        self.compiled = compile_or_warn(self.model, first_step)

    def step(self) -> dict[str, Any]:
        """One optimizer step.

        Returns:
            Metrics: arm, step (steps done), tokens, flops (training FLOPs so far), loss (nats per token, before
            this step's update), grad_norm (total and by role), what the schedule put in force, epoch, seconds of the
            step, pass_seconds of its forward and backward, and optimizer_seconds.

        Raises:
            NonFiniteLoss: before the parameters change.
        """
        start = time.perf_counter()
        scheduled = apply_schedule(
            self.optimizers, self.config.schedule, self._position, self.budget.n_steps, self.config.tokens_per_step
        )
        self.model.set_injection(scheduled["injection"])
        inputs, targets = self.batch(self.n_done)
        reset_peak_memory(self.device)
        self.model.train()
        if self.model.skipping is not None:
            self.model.skipping.forget()  # what evaluation counted
        pass_start = time.perf_counter()
        with autocast(self.device, self.dtype):
            loss = backward(self.parallel, inputs, targets, self.n_parts, self.scaler)
        pass_end = time.perf_counter()
        norms = self._gradient_norms()
        update_start = time.perf_counter()
        if self._check_finite(loss, norms):
            self._clip(norms.total)
            for optimizer in self.optimizers:
                optimizer.step()
        update_end = time.perf_counter()
        self.model.zero_grad(set_to_none=True)
        self.peak_memory = max(self.peak_memory, peak_memory_bytes(self.device))
        self.n_done += 1
        skipped = self._count_and_steer(scheduled["injection"])
        self.step_seconds.append(time.perf_counter() - start)
        return {
            "arm": self.name,
            "step": self.n_done,
            "tokens": self.tokens,
            "flops": self.flops,
            "loss": loss,
            **scheduled,
            "grad_norm": {"total": norms.total} | norms.by_role,
            **skipped,
            "epoch": self.loader.epoch_of(self.n_done - 1),
            "seconds": self.step_seconds[-1],
            "pass_seconds": pass_end - pass_start,
            "optimizer_seconds": update_end - update_start,
        }

    def _count_and_steer(self, injection: float) -> dict[str, Any]:
        """Adds the FLOPs that the step took, and sets the threshold of the next from its rotation scores.

        Returns:
            Where the model skips, metrics of it: ``skip_threshold`` in force during the step, ``skip_rate`` of all
            tokens' sublayers, and ``run_rates`` of each sublayer.
        """
        model, skipping, metrics = self.model_config, self.model.skipping, {}
        if skipping is not None and skipping.policy is not None:
            for counts in (skipping.counts, skipping.histogram):
                sum_over_ranks(counts)
            rates, start = skipping.run_rates(), skipping.policy.start_step
            self.last_step_flops = self.config.tokens_per_step * training_flops_per_token(
                model, self.config.seq_len, self.config.convention, rates
            )
            metrics = {"skip_threshold": float(skipping.threshold), "skip_rate": 1.0 - sum(rates) / len(rates)}
            metrics |= {"run_rates": rates}
            skipping.steer(injection == 1.0 if start is None else self.n_done >= start)
        self.flops += self.last_step_flops
        return metrics

    def _gradient_norms(self) -> GradientNorms:
        if self.scaler is not None:
            for optimizer in self.optimizers:
                self.scaler.unscale_(optimizer)
        return gradient_norms(self.optimizers)

    def _check_finite(self, loss: float, norms: GradientNorms) -> bool:
        """Whether the step can be taken. In float16 an overflow only lowers the loss scale and costs the step."""
        finite = math.isfinite(loss) and math.isfinite(norms.total)
        if self.scaler is not None:
            self.scaler.update()
            self.n_skipped = 0 if finite else self.n_skipped + 1
            if not finite and self.n_skipped <= MAX_SKIPPED_STEPS:
                return False
        if not finite:
            what = f"the gradient norm is {norms.total}" if math.isfinite(loss) else f"the loss is {loss}"
            message = f"{self.name}: {what} at step {self.n_done}; lower the learning rates"
            raise NonFiniteLoss(message, self.n_done, loss, norms.total if math.isfinite(loss) else None)
        return True

    def _clip(self, norm: float) -> None:
        limit = self.config.max_grad_norm
        if limit and norm > limit:
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(limit / norm)

    @property
    def _position(self) -> float:
        """What is done of the budget's steps: of a budget in FLOPs, the spent ones in steps of the full depth."""
        if self.config.flops is None or self.model.skipping is None:
            return self.n_done
        return self.flops / self.flops_per_step

    @property
    def share_done(self) -> float:
        """Of the budget, 0 to 1."""
        return min(1.0, self._position / self.budget.n_steps)

    @property
    def n_steps(self) -> int:
        """Optimizer steps of the whole run; where skipping saves FLOPs of the budget, as many as it now seems."""
        left = self.budget.n_steps - self._position
        return self.n_done + math.floor(max(0.0, left) * self.flops_per_step / self.last_step_flops + 0.5)

    @property
    def flops_per_step(self) -> int:
        """Training FLOPs of one optimizer step, over all processes."""
        return self.budget.flops_per_step

    @property
    def tokens(self) -> int:
        """Tokens seen so far, over all processes."""
        return self.n_done * self.config.tokens_per_step

    @property
    def finished(self) -> bool:
        """Whether the budget is spent, to half a step."""
        half_a_step = 0.5 * self.last_step_flops / self.flops_per_step
        return self._position > self.budget.n_steps - half_a_step

    def state_dict(self) -> dict[str, Any]:
        """What is not in parameters and optimizers, as plain JSON values."""
        scaler = None if self.scaler is None else self.scaler.state_dict()
        counts = {"step": self.n_done, "skipped": self.n_skipped, "flops": [self.flops, self.last_step_flops]}
        return counts | {"peak_memory": self.peak_memory, "scaler": scaler}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes on from a `state_dict`."""
        self.n_done, self.n_skipped, self.peak_memory = state["step"], state["skipped"], state["peak_memory"]
        # Earlier checkpoints have no FLOPs: nothing was skipped then.
        self.flops, self.last_step_flops = state.get("flops", (self.n_done * self.flops_per_step, self.flops_per_step))
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])

    def batch(self, step: int) -> tuple[Tensor, Tensor]:
        """This process's inputs and targets [B, T] of a step, on the device."""
        inputs, targets = self.loader.batch(step)
        return inputs.to(self.device), targets.to(self.device)


@contextmanager
def interrupt_flag() -> Iterator[list[int]]:
    """Turns the first Ctrl-C or SIGTERM into an entry of the yielded list, so that a step is never cut in half.

    A second Ctrl-C raises KeyboardInterrupt at once.
    """
    received: list[int] = []

    def handle(signum, frame):
        if received and signum == signal.SIGINT:
            raise KeyboardInterrupt
        received.append(signum)

    if threading.current_thread() is not threading.main_thread():  # only the main thread gets signals
        yield received
        return
    previous = {number: signal.signal(number, handle) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
