"""One residual update, forward and backward, against its alternatives and the machine's copy bandwidth."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nagnet.benchmarks.timing import clear_gradients, interleave
from nagnet.nn.modulator import Modulator
from nagnet.ops import fused, reference

# d-vectors a row must move at least, forward and backward, whatever the method:
# read R, b, write R'; read the upstream gradient, R, b, write two gradients. Pre-norm: read x, b, write x', N(x');
# read two upstream gradients and x', write one gradient (of both inputs).
ROTATE_VECTORS = 8
ADD_NORM_VECTORS = 8
CLONE_VECTORS = 2


def _step(function: Callable[..., Any], inputs: list[Tensor], upstream: list[Tensor]) -> Callable[[], None]:
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]

    def run() -> None:
        torch.autograd.backward(function(*leaves), upstream)
        clear_gradients(*leaves)

    return run


def bench_residual_update(
    rows: int, d_model: int, n_directions: int, dtype: torch.dtype, device: torch.device, repeats: int
) -> list[dict[str, Any]]:
    """Times ``write`` with the gain given, pre-norm's add and norm, and the gain by itself.

    Args:
        rows: tokens. d_model: width d. n_directions: C of the gain. dtype: of direction and branch.

    Returns:
        One dict per alternative: name, seconds (median, low, high, fastest), bytes (least that must move),
        bandwidth in bytes per second and as a share of the clone's; for the gain FLOPs and the share of the
        rate of a square-ish float32 product.
    """
    options: dict[str, Any] = {"device": device, "dtype": dtype}
    direction = reference.split(torch.randn(rows, d_model, **options))[0]
    branch, upstream, other = (torch.randn(rows, d_model, **options) for _ in range(3))
    gain, log_norm, upstream_norm = (torch.rand(rows, device=device) for _ in range(3))
    update = [direction, log_norm, branch, gain]
    grads = [upstream, upstream_norm]
    modulator = Modulator(d_model, n_directions).to(device)
    left, right = torch.randn(rows, d_model, device=device), torch.randn(d_model, d_model, device=device)
    wide_upstream = torch.rand(rows, device=device)
    modulate = _step(modulator, [direction], [wide_upstream])

    def modulate_and_clear() -> None:
        modulate()
        clear_gradients(*modulator.parameters())

    times = interleave(
        {
            "clone": direction.clone,
            "norm-agnostic, reference": _step(reference.rotate, update, grads),
            "norm-agnostic, torch.compile of the reference": _step(torch.compile(reference.rotate), update, grads),
            "norm-agnostic, fused": _step(fused.rotate, update, grads),
            "pre-norm, reference": _step(reference.add_norm, [direction, branch], [upstream, other]),
            "pre-norm, torch.compile of the reference": _step(
                torch.compile(reference.add_norm), [direction, branch], [upstream, other]
            ),
            "pre-norm, fused": _step(fused.add_norm, [direction, branch], [upstream, other]),
            "gain": modulate_and_clear,
            "matrix product": lambda: left @ right,
        },
        repeats,
    )
    size = direction.numel() * direction.element_size()
    vectors = {"clone": CLONE_VECTORS, "norm-agnostic": ROTATE_VECTORS, "pre-norm": ADD_NORM_VECTORS}
    flops = {"gain": 6 * rows * d_model * n_directions, "matrix product": 2 * rows * d_model * d_model}
    copy = CLONE_VECTORS * size / times["clone"].median
    rate = flops["matrix product"] / times["matrix product"].median
    results = []
    for name, timing in times.items():
        row: dict[str, Any] = {"name": name, "seconds": timing.to_dict()}
        if name in flops:
            row |= {"flops": flops[name], "share_of_product_rate": flops[name] / timing.median / rate}
        else:
            moved = vectors[name.partition(",")[0]] * size
            bandwidth = moved / timing.median
            row |= {"bytes": moved, "bytes_per_second": bandwidth, "share_of_clone": bandwidth / copy}
        results.append(row)
    return results
