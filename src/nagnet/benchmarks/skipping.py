"""What skipping sublayers saves in time, beside the most it could save by counting.

Decisions are set, not learned: which sublayers a token skips is fixed, so that every round does the same work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from nagnet.benchmarks.decoding import COPIED_BYTES, bytes_per_step, filled_cache, step_at
from nagnet.benchmarks.timing import clear_gradients, interleave
from nagnet.generation.cache import KeyValueCache
from nagnet.generation.decoding import decode_compiled, read_out
from nagnet.generation.graph import Call, tensors_in
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.models.flops import skip_rates, skippable_parameters, training_flops_per_token
from nagnet.nn.skip import SkipPolicy
from nagnet.training.compute import autocast

DECODED = ModelConfig(d_model=768, n_layers=12, n_heads=12, vocab_size=8192, max_seq_len=1024, n_directions=32)
TRAINED = ModelConfig(d_model=512, n_layers=12, n_heads=8, vocab_size=8192, max_seq_len=512, n_directions=32)
BATCH_SIZE, SEQ_LEN = 4, 512  # of a training step
FULL, ALL, FLOOR = "full depth", "all skipped", "all skipped, floor"
# Sublayers out of every eight that are skipped: as many of attention as of MLP.
SKIPPED_OF_EIGHT = {"nothing skipped": (), "25% skipped": (0, 5), "50% skipped": (0, 3, 4, 7), ALL: range(8)}


def bench_skipping_decode(context: int, device: torch.device, repeats: int, compiled: bool = True) -> dict[str, Any]:
    """Times the step of one sequence with sublayers left out, against the same model without a policy.

    Returns:
        Per alternative: ``bytes`` that the step must read, seconds, ``speedup`` over the full depth, its ``ceiling``
        (the ratio of bytes), and ``bound``, the seconds that the bytes take at the speed of a copy. One alternative
        more is the floor of the step that skips all: its keys, values, gains and logits, and nothing else;
        ``over_floor`` is the time of that step over it.
    """
    source = torch.ones(COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    steps: dict[str, Callable[[], Any]] = {"copy": lambda: target.copy_(source)}
    n_bytes = {}
    for name in (FULL, *SKIPPED_OF_EIGHT):
        model = Decoder(DECODED, seed=0).to(device)
        cache = filled_cache(model, 1, context)
        n_bytes[name] = bytes_per_step(model, cache)
        if name != FULL:
            skipped = _skip_fixed(model, SKIPPED_OF_EIGHT[name])
            n_bytes[name] -= _bytes_saved(model, cache, skipped)
        steps[name] = functools.partial(step_at, decode_compiled, model, cache, context)
    n_bytes[FLOOR] = n_bytes[ALL]
    steps[FLOOR] = _floor(Decoder(DECODED, seed=0).to(device), context)
    timings = interleave(steps, repeats)
    bandwidth = 2 * COPIED_BYTES / timings["copy"].median
    rows = {}
    for name, size in n_bytes.items():
        rows[name] = {
            "bytes": size,
            "seconds": timings[name].to_dict(),
            "bound": size / bandwidth,
            "speedup": timings[FULL].median / timings[name].median,
            "ceiling": n_bytes[FULL] / size,
        }
    rows[ALL]["over_floor"] = timings[ALL].median / timings[FLOOR].median
    return {"shape": _shape(DECODED), "context": context, "copy_bytes_per_second": bandwidth, "alternatives": rows}


@torch.no_grad()
def _floor(model: Decoder, position: int) -> Callable[[], None]:
    """The part of a step that no token can skip: keys and values of every layer, all gains, the logits; compiled as a
    step is and called block by block, but for one direction throughout."""
    tokens = torch.ones(1, 1, dtype=torch.long, device=model.embedding.weight.device)
    state = model.stream.begin(model.embed(tokens))
    model.rotary.reserve(position + 1)
    cos, sin = model.rotary.at(position * tokens)
    kind, calls, updates = (model.config, str(tokens.device)), [], list(model.stream.updates)
    for index, block in enumerate(model.blocks):
        attention: Any = block.attention
        call = Call(_keys_values_gains, kind, attention, updates[2 * index], updates[2 * index + 1])
        calls.append((call, tensors_in((state, cos, sin))))
        call.prepare(state, cos, sin)
    readout = Call(read_out, kind, model.readout)
    readout.prepare(state)
    calls.append((readout, tensors_in(state)))

    def run() -> None:
        for call, tensors in calls:
            call.run(tensors)

    return torch.no_grad()(run)


def _keys_values_gains(attention: Any, first: Any, second: Any, state: Any, cos: Tensor, sin: Tensor) -> Any:
    return attention.keys_and_values(first.read(state), cos, sin), first.gain(state), second.gain(state)


def _skip_fixed(model: Decoder, of_eight: Any) -> list[bool]:
    """Skips the same sublayers for the one token of every step; returns which."""
    skipped = [index % 8 in of_eight for index in range(2 * model.config.n_layers)]
    model.set_skip_threshold(0.5)
    assert model.skipping is not None
    scores = torch.tensor([0.0 if skip else 1.0 for skip in skipped], device=model.embedding.weight.device)
    of_blocks = scores.view(-1, 2, 1, 1).unbind()  # made once: rotation scores cost no further call either
    model.skipping.replaced = lambda block, shape: of_blocks[block]
    return skipped


def _bytes_saved(model: Decoder, cache: KeyValueCache, skipped: list[bool]) -> int:
    """Matrices that need not be read, and keys and values that no query asks for."""
    n_bytes = next(model.blocks.parameters()).element_size()
    matrices = sum(size for skip, size in zip(skipped, skippable_parameters(model.config), strict=True) if skip)
    return matrices * n_bytes + cache.bytes_read() * sum(skipped[::2]) // model.config.n_layers


def bench_skipping_training(
    device: torch.device,
    repeats: int,
    compiled: bool = True,
    config: ModelConfig | None = None,
    batch_size: int = BATCH_SIZE,
    seq_len: int | None = None,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Times forward and backward with a quarter of all tokens' sublayers skipped, at random, against the full depth.

    Args:
        config: of the models, ``TRAINED`` if None; ``seq_len`` likewise. dtype: of the products (autocast).

    Returns:
        Per alternative: seconds, ``skip_rate``, ``speedup`` over the full depth and its ``ceiling`` by counted FLOPs.
    """
    config, seq_len = config or TRAINED, seq_len or SEQ_LEN
    tokens = torch.randint(config.vocab_size, (batch_size, seq_len + 1), device=device)
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    steps, models = {}, {}
    for name, rate in ((FULL, None), ("nothing skipped", 0.0), ("25% skipped", 0.25)):
        # A rate of 0 is that of a control: it could skip and never does.
        policy = SkipPolicy(threshold=rate) if rate else SkipPolicy(target_rate=rate)
        model = models[name] = Decoder(config.replace(skip=policy), seed=0).to(device)
        if rate:
            _skip_at_random(model)
        if compiled:
            model.compile_blocks()
        steps[name] = functools.partial(_pass, model, inputs, targets, dtype)
    timings = interleave(steps, repeats)
    whole, rows = training_flops_per_token(config, seq_len), {}
    for name, model in models.items():
        rates = [1.0] * (2 * config.n_layers) if model.skipping is None else model.skipping.run_rates()
        rows[name] = {
            "seconds": timings[name].to_dict(),
            "skip_rates": skip_rates(config, rates, seq_len)._asdict(),
            "speedup": timings[FULL].median / timings[name].median,
            "ceiling": whole / training_flops_per_token(config, seq_len, run_rates=rates),
        }
    return {"shape": _shape(config), "batch_size": batch_size, "seq_len": seq_len, "alternatives": rows}


def _skip_at_random(model: Decoder) -> None:
    device = model.embedding.weight.device
    generator = torch.Generator(device).manual_seed(0)
    assert model.skipping is not None
    model.skipping.replaced = lambda block, shape: torch.rand(2, *shape, generator=generator, device=device)


def _pass(model: Decoder, inputs: Tensor, targets: Tensor, dtype: torch.dtype) -> None:
    with autocast(inputs.device, dtype):
        loss = model.loss(inputs, targets)
    loss.backward()
    clear_gradients(*model.parameters())


def _shape(config: ModelConfig) -> str:
    return f"{config.n_layers} x {config.d_model}, vocabulary {config.vocab_size:,}"
