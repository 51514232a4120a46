"""Measure speed and memory on this machine: alternatives side by side, interleaved, medians and quartiles.

Benchmarks: residual_update, training_step, kept_bytes, training_loop, decoding, skipping, loss, core (scoring examples
in context), compile_time, or all. Expect one to five minutes each. gpu checks and times the Triton kernels on a CUDA
GPU in less than eight minutes; all leaves it out.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from nagnet.cli.device import DeviceName, resolve_device
from nagnet.errors import UserError


@dataclass
class Options:
    """What to measure."""

    benchmark: tyro.conf.Positional[
        Literal[
            "residual_update",
            "training_step",
            "kept_bytes",
            "training_loop",
            "decoding",
            "skipping",
            "loss",
            "core",
            "compile_time",
            "gpu",
            "all",
        ]
    ] = "residual_update"
    """Which benchmark."""
    shape: Literal["12x512", "24x128", "64x640"] = "12x512"
    """Model of training_step and kept_bytes, blocks x width."""
    batch_size: int | None = None
    """Sequences of training_step and kept_bytes (default: the shape's) and of decoding (default: 1, then 8)."""
    seq_len: int | None = None
    """Tokens per sequence of training_step and kept_bytes (default: the shape's); tokens already there in decoding and
    skipping (256)."""
    rows: int = 16384
    """Tokens of residual_update."""
    d_model: int = 640
    """Width of residual_update."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the stream (residual_update), of the products (training_step) or of the blocks' matrices (decoding)."""
    repeats: int = 10
    """Timed rounds."""
    keep_freed_memory: bool = False
    """Keep freed memory in the process (glibc), which spares page faults; for all alternatives alike."""
    device: DeviceName = "auto"
    """Where to compute."""
    out: Path | None = None
    """Also write the result as JSON to this file."""
    json: bool = False
    """Print JSON instead of tables."""


def main(options: Options) -> None:
    """Measures and prints."""
    from nagnet.benchmarks.timing import machine
    from nagnet.files import write_atomically
    from nagnet.training.compute import keep_freed_memory

    device = resolve_device(options.device)
    kept = options.keep_freed_memory and keep_freed_memory()
    names = [options.benchmark] if options.benchmark != "all" else [name for name in _BENCHMARKS if name != "gpu"]
    result: dict[str, Any] = {"machine": machine(), "device": str(device), "freed_memory_kept": kept}
    if options.rows < 1 or options.d_model < 1:
        raise UserError(f"--rows {options.rows} and --d-model {options.d_model} must be 1 or more")
    if options.benchmark == "gpu" and device.type != "cuda":
        raise UserError("nagnet bench gpu needs a CUDA GPU, and this machine has none, or --device says not to use it")
    for name in names:
        print(f"{name}: compiling, then {options.repeats} timed rounds", file=sys.stderr, flush=True)
        result[name] = _BENCHMARKS[name](options, device)
    text = json.dumps(result, indent=2)
    if options.out is not None:
        write_atomically(options.out, (text + "\n").encode())
    print(text if options.json else _table(result, names))


def _residual_update(options: Options, device: Any) -> Any:
    from nagnet.benchmarks.residual_update import bench_residual_update
    from nagnet.benchmarks.timing import DTYPES

    size = (options.rows, options.d_model, 32)
    return bench_residual_update(*size, DTYPES[options.dtype], device, options.repeats)


def _training_step(options: Options, device: Any) -> Any:
    from nagnet.benchmarks.timing import DTYPES
    from nagnet.benchmarks.training_step import bench_training_step

    size = (options.batch_size, options.seq_len)
    return bench_training_step(options.shape, DTYPES[options.dtype], device, options.repeats, *size)


def _kept_bytes(options: Options, device: Any) -> Any:
    from nagnet.benchmarks.timing import DTYPES
    from nagnet.benchmarks.training_step import bench_kept_bytes

    return bench_kept_bytes(options.shape, DTYPES[options.dtype], device, options.batch_size, options.seq_len)


def _training_loop(options: Options, device: Any) -> Any:
    from nagnet.benchmarks.training_loop import bench_training_loop
    from nagnet.models.config import ModelConfig

    model = ModelConfig(d_model=256, n_layers=12, n_heads=4, vocab_size=8192, max_seq_len=256)
    return [
        bench_training_loop(model.replace(residual=residual), 16, device, options.repeats)
        for residual in ("norm_agnostic", "pre_norm")
    ]


def _decoding(options: Options, device: Any) -> Any:
    from nagnet.benchmarks.decoding import CONTEXT, MODEL, bench_decoding, bench_products
    from nagnet.benchmarks.timing import DTYPES

    dtype, repeats = DTYPES[options.dtype], options.repeats
    sizes = (1, 8) if options.batch_size is None else (options.batch_size,)
    context = options.seq_len or CONTEXT
    return {
        "steps": [bench_decoding(MODEL, dtype, size, context, device, repeats) for size in sizes],
        "products": bench_products(MODEL, dtype, device, repeats),
    }


def _skipping(options: Options, device: Any) -> Any:
    from nagnet.benchmarks.decoding import CONTEXT
    from nagnet.benchmarks.skipping import bench_skipping_decode, bench_skipping_training

    return {
        "decoding": bench_skipping_decode(options.seq_len or CONTEXT, device, options.repeats),
        "training": bench_skipping_training(device, options.repeats),
    }


def _loss(options: Options, device: Any) -> Any:
    from nagnet.benchmarks.loss import bench_loss, bench_loss_time

    return {
        "memory": bench_loss(8, 2048, 65_536, 256, 2, device),
        "time": bench_loss_time(2048, 8192, 512, device, options.repeats),
    }


def _core(options: Options, device: Any) -> Any:
    from nagnet.benchmarks.scoring import bench_core

    return bench_core(device, options.repeats)


def _compile_time(options: Options, device: Any) -> Any:
    from nagnet.benchmarks.training_step import bench_compile_time

    return bench_compile_time((8, 64), device)


def _gpu(options: Options, device: Any) -> Any:
    from nagnet.benchmarks.gpu import bench_gpu, require_gpu
    from nagnet.benchmarks.timing import machine
    from nagnet.files import write_atomically

    kernels = require_gpu()

    def keep(result: dict[str, Any]) -> None:
        if options.out is not None:
            text = json.dumps({"machine": machine(), "device": str(device), "gpu": result}, indent=2)
            write_atomically(options.out, (text + "\n").encode())

    return bench_gpu(kernels, device, options.repeats, keep=keep)


_BENCHMARKS = {
    "residual_update": _residual_update,
    "training_step": _training_step,
    "kept_bytes": _kept_bytes,
    "training_loop": _training_loop,
    "decoding": _decoding,
    "skipping": _skipping,
    "loss": _loss,
    "core": _core,
    "compile_time": _compile_time,
    "gpu": _gpu,
}


def _table(result: dict[str, Any], names: list[str]) -> str:
    place = result["machine"]
    lines = [f"{place['processor']}, {place['threads']} threads, {place['gpu']}, torch {place['torch']}"]
    for name in names:
        lines += ["", name, *_LINES[name](result[name])]
    return "\n".join(lines)


def _milliseconds(seconds: dict[str, float]) -> str:
    return f"{1000 * seconds['median']:9.1f} ms  ({1000 * seconds['low']:.1f} to {1000 * seconds['high']:.1f})"


def _update_lines(rows: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in rows:
        if "flops" in row:
            share = f"{row['share_of_product_rate']:.2f} of the matrix product's FLOP rate"
        else:
            share = f"{row['bytes_per_second'] / 1e9:6.2f} GB/s, {row['share_of_clone']:.2f} of clone"
        lines.append(f"  {row['name']:46} {_milliseconds(row['seconds'])}  {share}")
    return lines


def _step_lines(result: dict[str, Any]) -> list[str]:
    lines = [f"  {result['shape']}, {result['batch_size']} x {result['seq_len']} tokens, {result['dtype']}"]
    for arm, row in result["arms"].items():
        lines.append(
            f"  {arm:14} {_milliseconds(row['seconds'])}  kept {row['kept_bytes'] / 1e6:,.0f} MB, "
            f"peak {row['peak_bytes'] / 1e6:,.0f} MB, compiled in {row['compile_seconds']:.0f} s"
        )
    ratios = result["ratios"]
    pair = f"time {ratios['time']:.3f}, kept bytes {ratios['kept_bytes']:.3f}, peak bytes {ratios['peak_bytes']:.3f}"
    return [*lines, f"  norm_agnostic / pre_norm: {pair}"]


def _kept_lines(result: dict[str, Any]) -> list[str]:
    kept = ", ".join(f"{arm} {count / 1e6:,.1f} MB" for arm, count in result["bytes"].items())
    size = f"{result['shape']}, {result['batch_size']} x {result['seq_len']} tokens, {result['dtype']}"
    return [f"  {size}: {kept}; ratio {result['ratio']:.3f}"]


def _loop_lines(results: list[dict[str, Any]]) -> list[str]:
    lines = []
    for result in results:
        lines.append(f"  {result['residual']}, {result['shape']}")
        lines += [f"  {name:14} {_milliseconds(seconds)}" for name, seconds in result["seconds"].items()]
        intervals = ", ".join(f"{name} {1000 * value:.1f} ms" for name, value in result["per_interval"].items())
        lines += [
            f"  throughput {result['throughput']:.3f} of a minimal loop; beside computing "
            f"{result['beside_computing']:.2%} of a step; each interval {intervals}",
            f"  loader {result['loader']['tokens_per_second']:,.0f} tokens/s, "
            f"{result['loader']['multiple_of_trainer']:.0f} x the trainer's",
        ]
    return lines


def _decoding_lines(results: dict[str, Any]) -> list[str]:
    lines = []
    for result in results["steps"]:
        lines.append(
            f"  {result['shape']}, {result['dtype']}, batch {result['batch_size']} at {result['context']} tokens; copy "
            f"{result['copy_bytes_per_second'] / 1e9:.1f} GB/s"
        )
        for arm, row in result["arms"].items():
            lines.append(
                f"  {arm:14} {_milliseconds(row['seconds'])}  {row['tokens_per_second']:,.1f} tokens/s, "
                f"{row['share_of_bound']:.2f} of the bound of {1000 * row['bound']:.1f} ms ({row['bytes'] / 1e6:,.0f} "
                f"MB); uncompiled {1000 * row['uncompiled_seconds']['median']:.1f} ms; first step "
                f"{row['first_step_seconds']:.0f} s"
            )
        lines.append(f"  norm_agnostic / pre_norm: {result['ratio']:.3f}")
    for row in results["products"]:
        share = f"{row['bytes_per_second'] / 1e9:6.2f} GB/s, {row['share_of_copy']:.2f} of copy"
        lines.append(f"  one row times {row['name']:22} {_milliseconds(row['seconds'])}  {share}")
    return lines


def _skipping_lines(result: dict[str, Any]) -> list[str]:
    lines = []
    for name, part in result.items():
        lines.append(f"  {name}, {part['shape']}")
        for alternative, row in part["alternatives"].items():
            bound = (
                f", {row['seconds']['median'] / row['bound']:.2f} x the bound of its bytes" if "bound" in row else ""
            )
            against = (
                ""
                if alternative == "full depth"
                else (
                    f"  speed-up {row['speedup']:.3f}, {row['speedup'] / row['ceiling']:.2f} of the ceiling "
                    f"{row['ceiling']:.3f}"
                )
            )
            floor = f", {row['over_floor']:.2f} x its floor" if "over_floor" in row else ""
            lines.append(f"  {alternative:18} {_milliseconds(row['seconds'])}{against}{bound}{floor}")
    return lines


def _loss_lines(result: dict[str, Any]) -> list[str]:
    memory = "  " + ", ".join(f"{name} {value / 1e6:,.0f} MB" for name, value in result["memory"].items())
    return [memory, *(f"  {row['name']:20} {_milliseconds(row['seconds'])}" for row in result["time"])]


def _core_lines(result: list[dict[str, Any]]) -> list[str]:
    lines = []
    for row in result:
        lines.append(f"  {row['name']}")
        for name, seconds in row["seconds"].items():
            faster = [f"{times:.1f} x as fast as {alone}" for alone, times in row["speedup"].get(name, {}).items()]
            lines.append(f"    {name:20} {_milliseconds(seconds)}  {', '.join(faster)}".rstrip())
    return lines


def _compile_lines(result: dict[str, Any]) -> list[str]:
    seconds = ", ".join(f"{depth} blocks {row['first_step']:.1f} s" for depth, row in result["seconds"].items())
    return [f"  first step compiled: {seconds}; ratio {result['ratio']:.2f}"]


def _gpu_lines(result: dict[str, Any]) -> list[str]:
    from nagnet.benchmarks.gpu import summary

    return summary(result)


_LINES = {
    "residual_update": _update_lines,
    "training_step": _step_lines,
    "kept_bytes": _kept_lines,
    "training_loop": _loop_lines,
    "decoding": _decoding_lines,
    "skipping": _skipping_lines,
    "loss": _loss_lines,
    "core": _core_lines,
    "compile_time": _compile_lines,
    "gpu": _gpu_lines,
}
