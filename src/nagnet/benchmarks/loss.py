"""Training with a large vocabulary: memory and time of the loss by chunks against the loss of all logits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from nagnet.benchmarks.timing import clear_gradients, interleave, kept_bytes
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.ops.loss import summed_cross_entropy
from nagnet.training.compute import peak_memory_bytes, release_freed_memory, reset_peak_memory


def bench_loss(
    batch_size: int, seq_len: int, vocab_size: int, d_model: int, n_layers: int, device: torch.device
) -> dict[str, Any]:
    """One training step (forward and backward, uncompiled) with the loss by chunks.

    Returns:
        Bytes: ``peak`` above what is held before the step, ``gradients`` and ``parameters`` of the model,
        ``block_activations`` kept for backward, ``overhead`` = peak - gradients - block activations, and
        ``logits`` that one tensor of all float32 logits would take.
    """
    config = ModelConfig(d_model=d_model, n_layers=n_layers, n_heads=d_model // 64, vocab_size=vocab_size)
    model = Decoder(config, seed=0).to(device)
    tokens = torch.randint(vocab_size, (batch_size, seq_len + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    activations = kept_bytes(lambda: model.trunk(inputs), model)
    release_freed_memory()
    reset_peak_memory(device)
    before = peak_memory_bytes(device)
    model.loss(inputs, targets).backward()
    peak = peak_memory_bytes(device) - before
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return {
        "peak": peak,
        "parameters": parameters,
        "gradients": parameters,
        "block_activations": activations,
        "overhead": peak - parameters - activations,
        "logits": batch_size * seq_len * vocab_size * 4,
    }


def bench_loss_time(
    tokens: int, vocab_size: int, d_model: int, device: torch.device, repeats: int
) -> list[dict[str, Any]]:
    """Times forward and backward of the readout's loss alone, by chunks and from all logits at once."""
    hidden = torch.randn(tokens, d_model, device=device, requires_grad=True)
    # Logits of order 1, as in a model: far apart, their exponentials are denormal numbers, which CPUs are slow at.
    weight = (torch.randn(vocab_size, d_model, device=device) / d_model**0.5).requires_grad_()
    targets = torch.randint(vocab_size, (tokens,), device=device)

    def at_once(h: Tensor, w: Tensor) -> Tensor:
        return nn.functional.cross_entropy(h @ w.mT, targets, reduction="sum")

    def step(loss: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def run() -> None:
            loss(hidden, weight).backward()
            clear_gradients(hidden, weight)

        return run

    alternatives = {
        "by chunks": step(lambda h, w: summed_cross_entropy(h, w, targets)[0]),
        "all logits at once": step(at_once),
    }
    timings = interleave(alternatives, repeats)
    return [{"name": name, "seconds": timing.to_dict()} for name, timing in timings.items()]
