"""How a run computes on this machine: number type, compilation, peak memory."""

from __future__ import annotations

import contextlib
import ctypes
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch

from nagnet.models.decoder import Decoder


def choose_compute_dtype(device: torch.device, size: int = 512) -> torch.dtype:
    """Returns bfloat16 where a matrix product of ``size`` is measured at least 1.2 x faster in it, else float32.

    Many CPUs emulate bfloat16 at a small fraction of their float32 speed.
    """

    def fastest(dtype: torch.dtype) -> float:
        a = torch.ones(size, size, device=device, dtype=dtype)
        times = []
        for _ in range(4):
            start = time.perf_counter()
            float((a @ a)[0, 0])  # reading a value waits for the device
            times.append(time.perf_counter() - start)
        return min(times[1:])

    return torch.bfloat16 if fastest(torch.bfloat16) * 1.2 < fastest(torch.float32) else torch.float32


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The type that ``auto``, ``float32``, ``bfloat16`` or ``float16`` means on a device (`choose_compute_dtype`)."""
    return choose_compute_dtype(device) if name == "auto" else getattr(torch, name)


def device_name(device: torch.device) -> str:
    """What the driver calls a GPU; ``cpu`` or ``mps`` otherwise."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def autocast(device: torch.device, dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """Autocast to ``dtype``, or nothing for float32."""
    return torch.autocast(device.type, dtype) if dtype != torch.float32 else contextlib.nullcontext()


def compile_or_warn(model: Decoder, first_step: Callable[[], None]) -> bool:
    """Compiles the model's block and runs ``first_step`` once; on failure warns and goes back to eager.

    Args:
        first_step: a forward and backward pass at the shapes of training.

    Returns:
        Whether the model is compiled.
    """
    model.compile_blocks()
    try:
        first_step()
        return True
    except Exception as error:  # whatever a missing or broken compiler raises
        reason = " ".join(str(error).split("\n")[:2]) or type(error).__name__
        warnings.warn(f"torch.compile does not work here, running eagerly (slower): {reason}", stacklevel=2)
        for block in model.blocks:
            block._compiled_call_impl = None
        torch._dynamo.reset()
        first_step()
        return False


def reset_peak_memory(device: torch.device) -> None:
    """Forgets the peak so far, where the system can (Linux, CUDA)."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")


def peak_memory_bytes(device: torch.device) -> int:
    """Peak memory in bytes since `reset_peak_memory`: allocated on a CUDA device, else resident in this process
    (since its start where the system cannot reset it; 0 where it does not tell)."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with contextlib.suppress(OSError, ValueError, IndexError):
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def release_freed_memory() -> None:
    """Returns freed memory to the system (glibc), so that a peak counts from what is really held."""
    with contextlib.suppress(AttributeError, OSError, TypeError):
        ctypes.CDLL(None).malloc_trim(0)


def keep_freed_memory() -> bool:
    """Tells glibc to keep freed memory instead of returning it to the system, for the rest of the process.

    A large tensor's first touch costs page faults, more than the arithmetic of an elementwise update.

    Returns:
        Whether the allocator accepted it; False where the C library is not glibc.
    """
    mmap_threshold, trim_threshold = -3, -1  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD of malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False
    return bool(mallopt(mmap_threshold, 2**30) and mallopt(trim_threshold, 2**31 - 1))
