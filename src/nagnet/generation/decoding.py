"""One token a sequence: the step that generation repeats, as it is and compiled."""

from __future__ import annotations

import functools
import random
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nagnet import ops
from nagnet.generation.cache import KeyValueCache, extend
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.attention import LayerPast, Past
from nagnet.typing import Float, Int

# Of the compiler: no condition on arguments is kept, and no size checked before each kernel.
OPTIONS = {"guard_filter_fn": lambda guards: [False] * len(guards), "size_asserts": False}

Decoding = Callable[[Decoder, KeyValueCache, Tensor, Sequence[int]], tuple[Tensor, Tensor]]


def decode(
    model: Decoder, cache: KeyValueCache, tokens: Int[Tensor, "b one"], counts: Sequence[int]
) -> tuple[Float[Tensor, "b v"], Float[Tensor, " b"]]:
    """Adds a token to each sequence and predicts the next.

    Args:
        tokens: int64 [B, 1]. counts: 1, or 0 for a sequence that has ended, whose token is ignored.

    Returns:
        Logits [B, V] and log norm s_N [B] of the next token's prediction, both float32 or wider.
    """
    with torch.compiler.set_stance("force_eager"):  # a model compiled for training would compile each shape
        direction, log_norm = extend(model, cache, tokens, counts).split()
        direction, log_norm = direction[:, 0], log_norm[:, 0]
        return model.readout(direction, log_norm), log_norm


@torch.no_grad()
def decode_compiled(
    model: Decoder, cache: KeyValueCache, tokens: Int[Tensor, "b one"], counts: Sequence[int]
) -> tuple[Float[Tensor, "b v"], Float[Tensor, " b"]]:
    """`decode` compiled: one graph serves all blocks and lengths of a batch size, one more the readout.

    Where tokens can skip sublayers, a third serves keys and values.

    The first call takes some fifteen seconds, later calls in other processes less: torch caches what it compiled.
    """
    past = cache.past(counts, tokens.shape[1])
    kind = _Kind(
        model.config,
        next(model.blocks.parameters()).dtype,
        model.stream_dtype(),
        str(cache.device),
        ops.get_backend(),
        len(tokens),
        replaced_scores=model.skipping is not None and model.skipping.replaced is not None,
    )
    direction, log_norm = model.trunk(tokens, past=past, run_block=_Runner(kind, model, past)).split()
    cache.advance(counts)
    direction, log_norm = direction[:, 0], log_norm[:, 0]
    return _compiled(_read_out, kind)(model.readout, direction, log_norm), log_norm


class _Kind(NamedTuple):
    """All that a graph depends on beside the values of a step's tensors and the length of its cache."""

    config: ModelConfig
    dtype: torch.dtype
    stream_dtype: torch.dtype
    device: str
    backend: str
    batch_size: int
    replaced_scores: bool
    d_ff: int = 0


@functools.cache
def _compiled(function: Callable, kind: _Kind) -> _Graph:
    """A function compiled for steps of one kind."""
    # A code object of its own: torch keeps what it learns of a function with its code.
    return _Graph(types.FunctionType(function.__code__.replace(), function.__globals__, function.__name__))


class _Graph:
    """A function that is compiled at its first call and then called as it is, with nothing of its arguments checked.

    Torch's conditions on a hundred parameters and attributes, and its search for a graph that meets them, would take as
    long as the residual updates of a block of width 768. Who calls must bring arguments of one `_Kind`.
    """

    def __init__(self, function: Callable):
        self._function = function
        self._run: Callable | None = None

    def __call__(self, *arguments: Any) -> Any:
        if self._run is None:
            self._run = self._compile(arguments)
        return self._run(*arguments)

    def _compile(self, arguments: tuple[Any, ...]) -> Callable:
        for past in arguments:
            if isinstance(past, LayerPast):
                _mark_length(past)
        lazy: Any = torch.compile(self._function, fullgraph=True, options=OPTIONS)
        if not hasattr(lazy, "aot_compile"):  # an older torch: the same graph, found anew at every call
            return lazy
        state = random.getstate()
        # Torch names a graph that it cannot hash by a random number, and takes it for another of the same number.
        random.seed()
        try:
            compiled = lazy.aot_compile((arguments, {}))
        finally:
            random.setstate(state)
        compiled.disable_guard_check()
        return compiled


def _mark_length(past: LayerPast) -> None:
    """Tells the compiler which sizes grow."""
    for tensor, dim in ((past.keys, 2), (past.values, 2), (past.allowed, 3)):
        if tensor is not None:
            torch._dynamo.mark_dynamic(tensor, dim)


class _Runner:
    """Runs the blocks of one step by compiled graphs."""

    def __init__(self, kind: _Kind, model: Decoder, past: Past):
        self._kind, self._blocks, self._layers = kind, list(model.blocks), past.layers
        self._done = 0

    def __call__(self, block: Any, *arguments: Any) -> Any:
        state, reading, gain, first, second, following, cos, sin, key_mask, past, skips = arguments
        # Nobody reads what follows the last block; with any update for it, all blocks have one graph.
        updates = (first, second, first if following is None else following)
        kind = self._kind._replace(d_ff=block.mlp.out_proj.in_features)
        self._done += 1
        if skips is None:
            return _compiled(_run_block, kind)(block, updates, state, reading, gain, cos, sin, key_mask, past, skips)
        # A branch of a graph cannot read what the graph has written: keys and values come from the graph before.
        if self._done == 1:
            _compiled(_remember, kind)(block.attention, reading, cos, sin, past)
        return _compiled(_run_and_remember, kind)(
            block,
            updates,
            state,
            reading,
            gain,
            cos,
            sin,
            key_mask,
            past._replace(written=True),
            skips._replace(execution="branched"),
            *self._next(),
        )

    def _next(self) -> tuple[Any, LayerPast]:
        """Attention of the next block and its past; after the last block the first one's, in the slot nobody reads."""
        if self._done < len(self._blocks):
            return self._blocks[self._done].attention, self._layers[self._done]
        unread = self._layers[0].keys.shape[2] - 1
        return self._blocks[0].attention, self._layers[0]._replace(slots=torch.full_like(self._layers[0].slots, unread))


def _run_block(
    block: Any,
    updates: Any,
    state: Any,
    reading: Tensor,
    gain: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    key_mask: None,
    past: LayerPast,
    skips: Any,
) -> Any:
    return block.forward(state, reading, gain, *updates, cos, sin, key_mask, past, skips)


def _run_and_remember(
    block: Any,
    updates: Any,
    state: Any,
    reading: Tensor,
    gain: Tensor,
    cos: Tensor,
    sin: Tensor,
    key_mask: None,
    past: LayerPast,
    skips: Any,
    next_attention: Any,
    next_past: LayerPast,
) -> Any:
    result = block.forward(state, reading, gain, *updates, cos, sin, key_mask, past, skips)
    next_attention.remember(result[1], cos, sin, next_past)
    return result


def _remember(attention: Any, reading: Tensor, cos: Tensor, sin: Tensor, past: LayerPast) -> None:
    attention.remember(reading, cos, sin, past)


def _read_out(readout: Any, direction: Tensor, log_norm: Tensor) -> Tensor:
    return readout(direction, log_norm)
