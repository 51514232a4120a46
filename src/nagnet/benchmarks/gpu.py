"""All that a GPU can say of the Triton kernels, in one run of less than eight minutes and one JSON.

Nothing here has run on a GPU yet: its parts are tested on a CPU at tiny shapes, the kernels in Triton's interpreter.
"""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, cast

import torch

from nagnet import ops
from nagnet.benchmarks import training_step
from nagnet.benchmarks.gpu_kernels import bench_errors, bench_offsets, bench_tiles, bench_update
from nagnet.benchmarks.loss import bench_loss, bench_loss_time
from nagnet.benchmarks.skipping import bench_skipping_training
from nagnet.errors import UserError
from nagnet.models.config import ModelConfig

TIME_LIMIT = 360.0  # seconds after which no further part begins, so that the last ends within eight minutes
STEP_TARGET, MEMORY_TARGET = 1.03, 1.03  # norm-agnostic / pre-norm, at most
COPY_TARGET = 0.80  # of the bandwidth of a copy, by an update, at least
COMPILE_TARGET = 1.0  # seconds / those of torch.compile, below
WIDTHS = (640, 2048)
TILES = (16, 32, 64)  # rows of a tile to try


@dataclass(frozen=True)
class Shapes:
    """Sizes of all parts; the defaults are those of the GPU run, 16 x 2,048 tokens of the walkthrough's model.

    Attributes:
        rows: tokens of an update. widths: of the updates. checked: widths and types whose errors are measured, over
            ``checked_rows`` rows. offset_rows: of 640 numbers, more than 2^31 in all.
        step: key of `training_step.SHAPES`. dtype: of products and streams. loss_layers: blocks beside the loss.
    """

    rows: int = 16 * 2048
    widths: tuple[int, ...] = WIDTHS
    n_directions: int = 32
    checked: tuple[tuple[int, str], ...] = (
        (640, "bfloat16"),
        (640, "float32"),
        (640, "float16"),
        (123, "float32"),
        (2048, "bfloat16"),
        (4097, "bfloat16"),
    )
    checked_rows: int = 1000
    offset_rows: int = 2**31 // 640 + 1000
    step: str = "64x640"
    dtype: torch.dtype = torch.bfloat16
    loss_layers: int = 2
    compiled: bool = True

    @property
    def model(self) -> tuple[ModelConfig, int, int]:
        """Model, batch size and sequence length of a training step."""
        return training_step.SHAPES[self.step]


def require_gpu() -> ModuleType:
    """The kernels, on a machine that can run them.

    Raises:
        UserError: without a CUDA GPU, or without Triton.
    """
    if not torch.cuda.is_available():
        raise UserError("nagnet bench gpu needs a CUDA GPU, and this machine has none")
    return ops.triton_kernels()


def bench_gpu(
    kernels: ModuleType,
    device: torch.device,
    repeats: int,
    shapes: Shapes | None = None,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Checks and times everything, part by part. A part that fails is recorded as ``error`` and the next one runs.

    Args:
        kernels: module of the kernels. keep: called with the result so far after every part, so that a run that is cut
            short leaves what it had.

    Returns:
        Per part its result and ``part_seconds``; ``targets``, each with its value, its target, and whether it is met.
    """
    shapes = shapes or Shapes()
    model, batch_size, seq_len = shapes.model
    size = (shapes.rows, shapes.n_directions)
    parts: dict[str, Callable[[], Any]] = {
        "errors": lambda: bench_errors(kernels, list(shapes.checked), shapes.checked_rows, shapes.n_directions, device),
        "offsets": lambda: bench_offsets(kernels, shapes.offset_rows, WIDTHS[0], device),
    }
    for width in shapes.widths:
        parts[f"update {width}"] = lambda width=width: bench_update(
            kernels, size[0], width, size[1], device, repeats, shapes.compiled, shapes.dtype
        )
    parts |= {
        "training_step": lambda: _step(shapes, device, repeats),
        "loss_memory": lambda: bench_loss(
            batch_size, seq_len, model.vocab_size, model.d_model, shapes.loss_layers, device
        ),
        "loss_time": lambda: bench_loss_time(
            batch_size * seq_len, model.vocab_size, model.d_model, device, max(2, repeats // 2)
        ),
        "skipping": lambda: bench_skipping_training(
            device, max(2, repeats // 2), shapes.compiled, model, batch_size, seq_len, shapes.dtype
        ),
        "tiles": lambda: bench_tiles(kernels, TILES, size[0], shapes.widths[0], size[1], device, repeats, shapes.dtype),
        "training_step without kernels": lambda: _step_without_kernels(shapes, device, repeats),
    }
    start, result, seconds = time.perf_counter(), {}, {}
    for name, part in parts.items():
        began = time.perf_counter()
        if began - start > TIME_LIMIT:
            result[name] = {"left_out": f"the parts before it took {began - start:.0f} s"}
            continue
        print(f"{name}: begins after {began - start:.0f} s", file=sys.stderr, flush=True)
        result[name] = _attempt(part)
        seconds[name] = time.perf_counter() - began
        if device.type == "cuda":
            torch.cuda.empty_cache()
        torch.compiler.reset()
        keep(result | {"part_seconds": seconds, "targets": targets(result)})
    return result | {"part_seconds": seconds, "targets": targets(result)}


def _attempt(part: Callable[[], Any]) -> Any:
    try:
        return part()
    except Exception:  # one fault must not cost the other parts of a rare run
        return {"error": traceback.format_exc()}


def _step(shapes: Shapes, device: torch.device, repeats: int) -> dict[str, Any]:
    return training_step.bench_training_step(shapes.step, shapes.dtype, device, repeats, compiled=shapes.compiled)


def _step_without_kernels(shapes: Shapes, device: torch.device, repeats: int) -> dict[str, Any]:
    """The same with the update that torch.compile makes, for both arms."""
    before = ops.get_backend()
    ops.set_backend("fused")
    try:
        return _step(shapes, device, repeats)
    finally:
        ops.set_backend(cast(ops.Backend, before))


def targets(result: dict[str, Any]) -> list[dict[str, Any]]:
    """What the parts that ran say of the targets: name, value, target and whether it is met."""
    found: list[dict[str, Any]] = []

    def at_most(name: str, value: float, target: float) -> None:
        found.append({"name": name, "value": value, "target": f"<= {target}", "met": value <= target})

    for row in _rows(result, "errors"):
        name = f"error of {row['operation']}, {row['d_model']} {row['dtype']}, / reference"
        at_most(name, row["ratio"], 2.0)
    for part in result:
        if part.startswith("update "):
            found += _update_targets(part, _rows(result, part))
    step = result.get("training_step", {})
    if "ratios" in step:
        at_most("training step, norm_agnostic / pre_norm", step["ratios"]["time"], STEP_TARGET)
        at_most("peak memory, norm_agnostic / pre_norm", step["ratios"]["peak_bytes"], MEMORY_TARGET)
    without = result.get("training_step without kernels", {})
    if "ratios" in step and "ratios" in without:
        ours, theirs = (part["arms"]["norm_agnostic"]["seconds"]["median"] for part in (step, without))
        at_most("norm_agnostic step / with torch.compile's update", ours / theirs, COMPILE_TARGET)
    return found


def _rows(result: dict[str, Any], part: str) -> list[dict[str, Any]]:
    return result[part] if isinstance(result.get(part), list) else []


def _update_targets(part: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_name, found = {row["name"]: row for row in rows}, []
    for operation in ("advance", "add_norm"):
        if f"{operation}, triton" not in by_name:
            continue
        ours, compiled = by_name[f"{operation}, triton"], by_name[f"{operation}, torch.compile"]
        share = ours["share_of_copy"]
        ratio = ours["seconds"]["median"] / compiled["seconds"]["median"]
        found += [
            {"name": f"{part}, {operation}: share of copy", "value": share, "target": f">= {COPY_TARGET}"}
            | {"met": share >= COPY_TARGET},
            {"name": f"{part}, {operation}: seconds / torch.compile", "value": ratio, "target": f"< {COMPILE_TARGET}"}
            | {"met": ratio < COMPILE_TARGET},
        ]
    return found


def summary(result: dict[str, Any]) -> list[str]:
    """Lines for a terminal: the targets, and what did not run."""
    lines = [
        f"  {'met   ' if row['met'] else 'MISSED'} {row['name']}: {row['value']:.3f} (target {row['target']})"
        for row in result["targets"]
    ]
    for name, part in result.items():
        if isinstance(part, dict) and "error" in part:
            lines.append(f"  FAILED {name}: {part['error'].strip().splitlines()[-1]}")
        elif isinstance(part, dict) and "left_out" in part:
            lines.append(f"  left out {name}: {part['left_out']}")
    return lines
