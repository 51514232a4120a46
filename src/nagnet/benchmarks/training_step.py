"""Forward and backward of a norm-agnostic model against its pre-norm twin, and what each keeps in memory."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config as inductor_config

from nagnet.benchmarks.timing import clear_gradients, interleave, kept_bytes
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.models.presets import PRESETS
from nagnet.training.compute import autocast, peak_memory_bytes, release_freed_memory, reset_peak_memory

# shape name -> model and batch: two for a CPU, and one for a GPU
SHAPES: dict[str, tuple[ModelConfig, int, int]] = {
    "12x512": (ModelConfig(d_model=512, n_layers=12, n_heads=8, vocab_size=8192, n_directions=32), 4, 512),
    "64x640": (PRESETS["walkthrough-64x640"], 16, 2048),
    "24x128": (ModelConfig(d_model=128, n_layers=24, n_heads=2, vocab_size=2048, n_directions=32), 16, 256),
}
ARMS = ("norm_agnostic", "pre_norm")


def bench_kept_bytes(
    shape: str, dtype: torch.dtype, device: torch.device, batch_size: int | None = None, seq_len: int | None = None
) -> dict[str, Any]:
    """What the compiled blocks of both arms keep for backward, by a forward pass alone: exact, and untimed.

    Args:
        shape: a key of ``SHAPES``. batch_size, seq_len: in place of the shape's.

    Returns:
        Bytes per arm (parameters left out, their casts to ``dtype`` included) and their ratio norm_agnostic / pre_norm.
    """
    model_config, inputs, targets = _shape(shape, device, batch_size, seq_len)
    kept = {}
    for arm in ARMS:
        model = Decoder(model_config.replace(residual=arm), seed=0).to(device)
        model.compile_blocks()
        _, forward = _passes(model, inputs, targets, device, dtype)
        forward()
        kept[arm] = kept_bytes(forward, model)
    size = {"batch_size": inputs.shape[0], "seq_len": inputs.shape[1], "dtype": str(dtype).removeprefix("torch.")}
    ours, twin = (kept[arm] for arm in ARMS)
    return {"shape": shape} | size | {"bytes": kept, "ratio": ours / twin}


def _shape(
    shape: str, device: torch.device, batch_size: int | None, seq_len: int | None
) -> tuple[ModelConfig, Tensor, Tensor]:
    """Model of a shape, and inputs and targets [B, T] of random tokens."""
    model_config, default_batch_size, default_seq_len = SHAPES[shape]
    size = (batch_size or default_batch_size, (seq_len or default_seq_len) + 1)
    tokens = torch.randint(model_config.vocab_size, size, device=device)
    return model_config, tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def bench_training_step(
    shape: str,
    dtype: torch.dtype,
    device: torch.device,
    repeats: int,
    batch_size: int | None = None,
    seq_len: int | None = None,
    compiled: bool = True,
) -> dict[str, Any]:
    """Times forward and backward of both arms, interleaved.

    Args:
        shape: a key of ``SHAPES``. dtype: of the products (autocast); parameters are float32.
        batch_size, seq_len: in place of the shape's.

    Returns:
        Per arm: seconds, compile_seconds, kept_bytes (of the blocks, for backward) and peak_bytes (above the
        memory before its step); and the ratios norm_agnostic / pre_norm of the three.
    """
    model_config, inputs, targets = _shape(shape, device, batch_size, seq_len)
    steps: dict[str, Callable[[], None]] = {}
    results: dict[str, Any] = {}
    for arm in ARMS:
        model = Decoder(model_config.replace(residual=arm), seed=0).to(device)
        if compiled:
            model.compile_blocks()

        step, forward = _passes(model, inputs, targets, device, dtype)
        start = time.perf_counter()
        step()
        results[arm] = {"compile_seconds": time.perf_counter() - start, "kept_bytes": kept_bytes(forward, model)}
        steps[arm] = step
    for arm, timing in interleave(steps, repeats).items():
        results[arm]["seconds"] = timing.to_dict()
    for arm, step in steps.items():
        release_freed_memory()
        reset_peak_memory(device)
        before = peak_memory_bytes(device)
        step()
        results[arm]["peak_bytes"] = peak_memory_bytes(device) - before
    ours, twin = (results[arm] for arm in ARMS)
    ratios = {
        "time": ours["seconds"]["median"] / twin["seconds"]["median"],
        "kept_bytes": ours["kept_bytes"] / twin["kept_bytes"],
        "peak_bytes": ours["peak_bytes"] / max(1, twin["peak_bytes"]),
    }
    return {
        "shape": shape,
        "batch_size": inputs.shape[0],
        "seq_len": inputs.shape[1],
        "dtype": str(dtype).removeprefix("torch."),
        "arms": results,
        "ratios": ratios,
    }


def _passes(
    model: Decoder, inputs: Tensor, targets: Tensor, device: torch.device, dtype: torch.dtype
) -> tuple[Callable[[], None], Callable[[], Any]]:
    """Forward and backward of the loss, and the forward of the blocks alone."""

    def step() -> None:
        with autocast(device, dtype):
            loss = model.loss(inputs, targets)
        loss.backward()
        clear_gradients(*model.parameters())

    def forward() -> Any:
        with autocast(device, dtype):
            return model.trunk(inputs)

    return step, forward


def bench_compile_time(depths: tuple[int, int], device: torch.device) -> dict[str, Any]:
    """Seconds of the first compiled step of models that differ in depth alone, each compiled afresh.

    Returns:
        Seconds by depth and the ratio of the second to the first.
    """
    seconds = {}
    for depth in depths:
        torch.compiler.reset()
        model = Decoder(ModelConfig(d_model=64, n_layers=depth, n_heads=2, vocab_size=256, n_directions=4), seed=0)
        model.to(device)
        tokens = torch.randint(256, (2, 33), device=device)
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        start = time.perf_counter()
        model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        eager = time.perf_counter() - start
        model.compile_blocks()
        start = time.perf_counter()
        with inductor_config.patch(force_disable_caches=True):
            model.loss(tokens[:, :-1], tokens[:, 1:]).backward()
        seconds[depth] = {"first_step": time.perf_counter() - start, "eager_step": eager}
    first, second = (seconds[depth]["first_step"] for depth in depths)
    return {"seconds": seconds, "ratio": second / first}
