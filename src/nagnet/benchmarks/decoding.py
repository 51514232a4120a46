"""Decoding against the speed of memory: seconds a step of a norm-agnostic model and its twin, and their bound."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nagnet.benchmarks.timing import Timed, interleave
from nagnet.generation.cache import KeyValueCache, prefill
from nagnet.generation.decoding import Decoding, decode, decode_compiled
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.ops.matvec import matvec

MODEL = ModelConfig(d_model=768, n_layers=12, n_heads=12, vocab_size=32_768, max_seq_len=1024, n_directions=32)
ARMS = ("norm_agnostic", "pre_norm")
COPIED_BYTES = 2**28  # far beyond any cache
PRODUCT_BYTES = 2**27  # of the matrices that a product is timed on
CONTEXT = 256
COPIES = 3  # of each model, taken together: where one lies in memory changes its speed by some 5%


def bytes_per_step(model: Decoder, cache: KeyValueCache) -> int:
    """Bytes that a step must read: every parameter once but the embedding table, and the keys and values seen.

    A table that is the readout too is read.
    """
    parameters = sum(parameter.nbytes for parameter in model.parameters())
    if not model.config.tie_embeddings:
        parameters -= model.embedding.weight.nbytes
    return parameters + cache.bytes_read()


def bench_decoding(
    model_config: ModelConfig,
    dtype: torch.dtype,
    batch_size: int,
    context: int,
    device: torch.device,
    repeats: int,
    compiled: bool = True,
) -> dict[str, Any]:
    """Times the step that adds one token to each of ``batch_size`` sequences of ``context`` tokens.

    The steps of both arms, compiled and as they are, take turns with a copy of 256 MiB, whose bytes read and written
    per second are taken as the speed of memory. Drawing the token is not in it. The compiled step is that of
    ``COPIES`` equal models in turn.

    Returns:
        Per arm: ``bytes`` a step, their ``bound`` in seconds, seconds, ``share_of_bound`` (bound / median), tokens per
        second, the same uncompiled, and seconds of the first compiled step. ``ratio``: of the medians, norm_agnostic /
        pre_norm.
    """
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    steps: dict[str, Timed] = {"copy": lambda: target.copy_(source)}
    arms: dict[str, dict[str, Any]] = {}
    for arm in ARMS:
        config = model_config.replace(residual=arm)
        models = [Decoder(config, seed=0).to(device=device, dtype=dtype) for _ in range(COPIES if compiled else 1)]
        filled = [(model, filled_cache(model, batch_size, context)) for model in models]
        arms[arm] = {"bytes": bytes_per_step(*filled[0])}
        steps[f"{arm} uncompiled"] = functools.partial(step_at, decode, *filled[0], context)
        if compiled:
            copies = [functools.partial(step_at, decode_compiled, *each, context) for each in filled]
            start = time.perf_counter()
            copies[0]()
            arms[arm]["first_step_seconds"] = time.perf_counter() - start
            steps[arm] = copies
    timings = interleave(steps, repeats)
    bandwidth = 2 * COPIED_BYTES / timings["copy"].median
    for arm, row in arms.items():
        row["bound"] = row["bytes"] / bandwidth
        for key, name in (("seconds", arm), ("uncompiled_seconds", f"{arm} uncompiled")):
            if name in timings:
                row[key] = timings[name].to_dict()
        median = row["seconds" if compiled else "uncompiled_seconds"]["median"]
        row |= {"share_of_bound": row["bound"] / median, "tokens_per_second": batch_size / median}
    ours, twin = (timings[arm if compiled else f"{arm} uncompiled"].median for arm in ARMS)
    return {
        "shape": f"{model_config.n_layers} x {model_config.d_model}, vocabulary {model_config.vocab_size:,}",
        "dtype": str(dtype).removeprefix("torch."),
        "batch_size": batch_size,
        "context": context,
        "copy_bytes_per_second": bandwidth,
        "copy_seconds": timings["copy"].to_dict(),
        "arms": arms,
        "ratio": ours / twin,
    }


def bench_products(
    model_config: ModelConfig, dtype: torch.dtype, device: torch.device, repeats: int, compiled: bool = True
) -> list[dict[str, Any]]:
    """Times the product of one row with the matrices of a model's shapes: the library's, and `matvec` compiled.

    Each product is called from Python, at a cost that a compiled block has not: small matrices seem slow.

    Returns:
        Per shape and product: ``bytes`` of the matrices, seconds, bytes per second and ``share_of_copy``, as above.
    """
    d, d_ff, vocab_size = model_config.d_model, model_config.d_ff, model_config.vocab_size
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    functions: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(source)}
    sizes = {}
    products = {"library": torch.nn.functional.linear, "matvec": matvec}
    for shape in ((d, d), (d_ff, d), (d, d_ff), (vocab_size, d)):
        one = torch.randn(shape, device=device).to(dtype)
        matrices = [one.clone() for _ in range(max(1, PRODUCT_BYTES // one.nbytes))]
        row = torch.randn(1, shape[1], device=device).to(dtype)
        for name, product in products.items():
            traced = torch.compile(product, dynamic=False) if compiled and name == "matvec" else product
            key = f"{shape[0]} x {shape[1]}, {name}"
            functions[key] = functools.partial(_each, traced, row, matrices)
            sizes[key] = len(matrices) * one.nbytes
    with torch.no_grad():
        timings = interleave(functions, repeats)
    bandwidth = 2 * COPIED_BYTES / timings["copy"].median
    rows = []
    for key, size in sizes.items():
        rate = size / timings[key].median
        row = {"name": key, "bytes": size, "seconds": timings[key].to_dict(), "bytes_per_second": rate}
        rows.append(row | {"share_of_copy": rate / bandwidth})
    return rows


def _each(product: Callable[[Tensor, Tensor], Tensor], row: Tensor, matrices: list[Tensor]) -> None:
    for matrix in matrices:
        product(row, matrix)


@torch.no_grad()
def filled_cache(model: Decoder, batch_size: int, context: int) -> KeyValueCache:
    """A cache with ``context`` tokens of each sequence."""
    cache = KeyValueCache(model, batch_size, context + 1)
    tokens = torch.randint(model.config.vocab_size, (batch_size, context), generator=torch.Generator().manual_seed(0))
    prefill(model, cache, tokens.tolist())
    return cache


@torch.no_grad()
def step_at(decoding: Decoding, model: Decoder, cache: KeyValueCache, context: int) -> tuple[Tensor, Tensor]:
    """One step at a fixed length, so that every round does the same work."""
    cache.lengths = [context] * len(cache.lengths)
    tokens = torch.ones(len(cache.lengths), 1, dtype=torch.long, device=cache.device)
    return decoding(model, cache, tokens, [1] * len(cache.lengths))
