"""The Triton kernels on a GPU: their errors against float64, and the time of an update against its alternatives."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from nagnet.benchmarks.timing import interleave
from nagnet.ops import fused, reference

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ADVANCED = ("direction", "log_norm", "next_gain", "to_direction", "to_log_norm", "to_branch", "to_gain")
PARAMETERS = ("to_weight", "to_bias", "to_mixture", "to_raw_beta", "to_scale")
# d-vectors a row must move at least, forward and backward. advance: read R, b, write R'; read the upstream gradient, R,
# b and R', write two gradients. add_norm: read x, b, write x', N(x'); read two upstream gradients and x', write one.
VECTORS = {"advance": 9, "add_norm": 8}
INNER = 10  # updates between two looks at the clock

Update = Callable[..., tuple[Tensor, ...]]


def draw_update(
    rows: int, d_model: int, n_directions: int, dtype: torch.dtype, device: torch.device
) -> tuple[list[Tensor], list[Tensor]]:
    """Direction, log norm, branch, gain and the parameters of the next gain; and upstream gradients of `advance`."""
    generator = torch.Generator(device).manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, device=device)
    direction = reference.split(draw(rows, d_model))[0].to(dtype)
    inputs = [direction, draw(rows), (0.5 * draw(rows, d_model) + 0.2).to(dtype), draw(rows).abs()]
    weight = draw(n_directions, d_model) / d_model**0.5
    parameters = [weight, draw(n_directions), draw(n_directions), draw(()), draw(()).abs()]
    return [*inputs, *parameters], [draw(rows, d_model).to(dtype), draw(rows), draw(rows)]


def advance_of(module: ModuleType) -> Update:
    """``module.advance`` of nine tensors."""
    return lambda *tensors: module.advance(*tensors[:4], tensors[4:])


def differentiate(function: Update, inputs: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    """Outputs, and gradients of all inputs."""
    leaves = [tensor.detach().requires_grad_() for tensor in inputs]
    outputs = function(*leaves)
    gradients = torch.autograd.grad(outputs, leaves, upstream)
    return [*(output.detach() for output in outputs), *gradients]


def bench_errors(
    kernels: ModuleType, cases: list[tuple[int, str]], rows: int, n_directions: int, device: torch.device
) -> list[dict[str, Any]]:
    """Errors of the kernels and of the eager reference in the same type, both against float64.

    Args:
        kernels: module with ``advance`` and ``add_norm``. cases: width and type.

    Returns:
        Per case and operation: root mean square errors by name, ``ratio`` of the worst (1 bit of float32 counts as no
        error), ``within`` twice the reference's, and whether a second call gave the same bits.
    """
    found = []
    for d_model, type_name in cases:
        inputs, upstream = draw_update(rows, d_model, n_directions, DTYPES[type_name], device)
        operations = {
            "advance": (advance_of(kernels), advance_of(reference), inputs, upstream, ADVANCED + PARAMETERS),
            "write": (kernels.rotate, reference.rotate, inputs[:4], upstream[:2], _without_gain()),
            "add_norm": (
                kernels.add_norm,
                reference.add_norm,
                [inputs[0], inputs[2]],
                [upstream[0], inputs[2]],
                ("added", "reading", "to_stream", "to_branch"),
            ),
        }
        for name, (fast, eager, tensors, grads, names) in operations.items():
            row = _errors(fast, eager, tensors, grads, names)
            found.append({"operation": name, "d_model": d_model, "dtype": type_name} | row)
    return found


def _without_gain() -> tuple[str, ...]:
    return tuple(name for name in ADVANCED if name != "next_gain")


def _errors(
    fast: Update, eager: Update, inputs: list[Tensor], upstream: list[Tensor], names: tuple[str, ...]
) -> dict[str, Any]:
    truth = differentiate(eager, [t.double() for t in inputs], [t.double() for t in upstream])
    ours, again = (differentiate(fast, inputs, upstream) for _ in range(2))
    theirs = differentiate(eager, inputs, upstream)
    errors, ratio = {}, 0.0
    for name, a, b, c in zip(names, ours, theirs, truth, strict=True):
        mine, reference_error, size = (float(x.double().square().mean().sqrt()) for x in (a - c, b - c, c))
        errors[name] = {"kernels": mine, "reference": reference_error, "size": size}
        # The last bits of a number, or of a sum over rows whose terms have either sign, are no error.
        natural = max(size, 0.5 * inputs[0].shape[0] ** 0.5) if name in PARAMETERS else size
        bits = torch.finfo(torch.float32).eps * max(natural, 1e-3)
        ratio = max(ratio, mine / max(reference_error, bits)) if mine == mine else float("inf")
    same = all(torch.equal(a, b) for a, b in zip(ours, again, strict=True))
    return {"errors": errors, "ratio": ratio, "within": ratio <= 2.0, "same_bits_twice": same}


@torch.no_grad()
def bench_offsets(kernels: ModuleType, rows: int, d_model: int, device: torch.device) -> dict[str, Any]:
    """Whether the last rows of a tensor of more than 2^31 numbers are computed as they are alone.

    Returns:
        ``elements``, and ``equal``; or ``left_out`` where the GPU has too little memory.
    """
    needed = 7 * rows * d_model * 2
    if device.type == "cuda" and torch.cuda.mem_get_info(device)[0] < needed:
        return {"left_out": f"needs {needed / 1e9:.0f} GB of free memory"}
    direction = torch.ones(rows, d_model, device=device, dtype=torch.bfloat16)
    branch = torch.zeros(rows, d_model, device=device, dtype=torch.bfloat16)
    log_norm, gain = torch.zeros(rows, device=device), torch.ones(rows, device=device)
    last = slice(rows - 40, rows)
    branch[last] = torch.randn(40, d_model, device=device, dtype=torch.bfloat16)
    whole = kernels.rotate(direction, log_norm, branch, gain)
    alone = kernels.rotate(*(tensor[last].clone() for tensor in (direction, log_norm, branch, gain)))
    whole_norm = kernels.add_norm(direction, branch)
    alone_norm = kernels.add_norm(direction[last].clone(), branch[last].clone())
    equal = [torch.equal(a[last], b) for a, b in zip((*whole, *whole_norm), (*alone, *alone_norm), strict=True)]
    return {"elements": rows * d_model, "equal": all(equal)}


def bench_update(
    kernels: ModuleType,
    rows: int,
    d_model: int,
    n_directions: int,
    device: torch.device,
    repeats: int,
    compiled: bool = True,
    dtype: torch.dtype = torch.bfloat16,
) -> list[dict[str, Any]]:
    """Times `advance` and `add_norm`, forward and backward, beside a copy of one vector per row.

    On a GPU each alternative is recorded as a graph once, so that what is timed is the GPU's work and not Python's.

    Returns:
        Per alternative: name, seconds of one update, ``bytes`` that must move at least, ``share_of_copy``, and whether
        it was recorded.
    """
    inputs, upstream = draw_update(rows, d_model, n_directions, dtype, device)
    pair, pair_upstream = [inputs[0], inputs[2]], [upstream[0], inputs[2]]
    compile_ = functools.partial(torch.compile, dynamic=False) if compiled else lambda function: function
    advances = {
        "reference": advance_of(reference),
        "torch.compile": compile_(advance_of(reference)),
        "fused": compile_(advance_of(fused)),
        "triton": advance_of(kernels),
    }
    norms = {
        "reference": reference.add_norm,
        "torch.compile": compile_(reference.add_norm),
        "triton": kernels.add_norm,
    }
    target = torch.empty_like(inputs[0])
    steps: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(inputs[0])}
    for name, function in advances.items():
        steps[f"advance, {name}"] = functools.partial(differentiate, function, inputs, upstream)
    for name, function in norms.items():
        steps[f"add_norm, {name}"] = functools.partial(differentiate, function, pair, pair_upstream)
    recorded = {name: _recorded(step, device) for name, step in steps.items()}
    timings = interleave({name: step for name, (step, _) in recorded.items()}, repeats)
    size = inputs[0].numel() * inputs[0].element_size()
    copy_rate = 2 * size / (timings["copy"].median / INNER)
    found = []
    for name, timing in timings.items():
        moved = VECTORS.get(name.partition(",")[0], 2) * size
        seconds = {key: value / INNER for key, value in timing.to_dict().items()}
        share = moved / seconds["median"] / copy_rate
        row = {"name": name, "rows": rows, "d_model": d_model, "seconds": seconds, "bytes": moved}
        found.append(row | {"share_of_copy": share, "recorded": recorded[name][1]})
    return found


def bench_tiles(
    kernels: Any,
    sizes: tuple[int, ...],
    rows: int,
    d_model: int,
    n_directions: int,
    device: torch.device,
    repeats: int,
    dtype: torch.dtype = torch.bfloat16,
) -> list[dict[str, Any]]:
    """Times `advance` of the kernels with tiles of other numbers of rows: what to set ``ROWS`` of ops/triton.py to.

    Args:
        sizes: rows of a tile.

    Returns:
        Per size: ``rows_of_a_tile``, seconds of one update, and whether it was recorded.
    """
    inputs, upstream = draw_update(rows, d_model, n_directions, dtype, device)
    step = functools.partial(differentiate, advance_of(kernels), inputs, upstream)
    found, before = [], kernels.ROWS
    try:
        for size in sizes:
            kernels.ROWS = size
            several, recorded = _recorded(step, device)
            seconds = interleave({"advance": several}, repeats)["advance"].to_dict()
            per_update = {key: value / INNER for key, value in seconds.items()}
            found.append({"rows_of_a_tile": size, "seconds": per_update, "recorded": recorded})
    finally:
        kernels.ROWS = before
    return found


def _recorded(step: Callable[[], Any], device: torch.device) -> tuple[Callable[[], Any], bool]:
    """``INNER`` calls of ``step``; on a GPU as one recorded graph, where it can be recorded."""

    def several() -> None:
        for _ in range(INNER):
            step()

    if device.type != "cuda":
        return several, False
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compiles, and fills the allocator
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            several()
    except RuntimeError:
        torch.cuda.synchronize()
        return several, False
    return graph.replay, True
