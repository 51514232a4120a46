"""Interleaved timing, and the machine it was done on."""

from __future__ import annotations

import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nagnet.errors import UserError
from nagnet.training.environment import processor_name

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Timing:
    """Seconds of one alternative over all repeats: median, quartiles and fastest."""

    median: float
    low: float
    high: float
    fastest: float

    def to_dict(self) -> dict[str, float]:
        """Plain values."""
        return asdict(self)


Timed = Callable[[], Any] | Sequence[Callable[[], Any]]


def interleave(functions: Mapping[str, Timed], repeats: int, warm_up: int = 2) -> dict[str, Timing]:
    """Times every function once per round, so that all of them see the same moments of a noisy machine.

    Args:
        functions: name -> what to time, or several of a kind whose times are taken together.
        repeats: rounds, at least 2. warm_up: untimed rounds.

    Raises:
        UserError: for fewer than 2 repeats.
    """
    if repeats < 2:
        raise UserError(f"repeats is {repeats}; a median needs 2 or more")
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    turns = [(name, one) for name, timed in functions.items() for one in ([timed] if callable(timed) else timed)]
    for round_index in range(warm_up + repeats):
        for name, function in turns:
            start = time.perf_counter()
            function()
            synchronize()
            if round_index >= warm_up:
                seconds[name].append(time.perf_counter() - start)
    return {name: _timing(values) for name, values in seconds.items()}


def _timing(values: list[float]) -> Timing:
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Timing(median, low, high, min(values))


def synchronize() -> None:
    """Waits for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def clear_gradients(*tensors: Tensor) -> None:
    """Drops the gradients of leaves or parameters."""
    for tensor in tensors:
        tensor.grad = None


def kept_bytes(forward: Callable[[], Any], model: nn.Module) -> int:
    """Bytes of all storages that ``forward`` keeps for backward, each counted once, the model's own left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = forward()
        total = sum(kept.values())
    del result
    return total


def machine() -> dict[str, Any]:
    """What a reader needs to place the numbers: processor, threads, GPU, versions."""
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"
    return {
        "processor": processor_name(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "platform": platform.platform(),
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
