"""One token a sequence: the step that generation repeats, as it is and compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nagnet import ops
from nagnet.generation.cache import KeyValueCache, extend
from nagnet.generation.graph import Call
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.attention import LayerPast
from nagnet.typing import Float, Int

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

    The first call takes some fifteen seconds, in later processes five: torch caches what it compiled.
    """
    kind = _Kind(
        model.config,
        cache.dtype,
        model.stream_dtype(),
        str(cache.device),
        ops.get_backend(),
        len(tokens),
        skips=model.skipping is not None,
        replaced_scores=model.skipping is not None and model.skipping.replaced is not None,
    )
    step = _steps.get(cache)
    if step is None or step.model is not model or step.kind != kind:
        step = _steps[cache] = _Step(kind, model)
    return step(cache, tokens, counts)


class _Kind(NamedTuple):
    """All that a graph depends on beside the values of a step's tensors and the length of its cache."""

    config: ModelConfig
    dtype: torch.dtype
    stream_dtype: torch.dtype
    device: str
    backend: str
    batch_size: int
    skips: bool
    replaced_scores: bool
    d_ff: int = 0


class _Step:
    """The compiled step of one model: which graph each block has, and the tensors that it takes from its modules."""

    def __init__(self, kind: _Kind, model: Decoder):
        self.kind, self.model = kind, model
        blocks: list[Any] = list(model.blocks)
        updates = list(model.stream.updates)
        self._enter = Call(_enter, kind, model.stream)
        self._readout = Call(_read_out, kind, model.readout)
        self._first_remember = Call(_remember, kind, blocks[0].attention)
        self._blocks = []
        for index, block in enumerate(blocks):
            # Nobody reads what follows the last block; with any modules for it, all blocks have one graph.
            follows = index + 1 if index + 1 < len(blocks) else 0
            modules = (block, updates[2 * index], updates[2 * index + 1], updates[2 * follows])
            of_block = kind._replace(d_ff=block.mlp.out_proj.in_features)
            # A branch of a graph cannot read what the graph has written: keys and values come from the graph before.
            if kind.skips:
                self._blocks.append(Call(_run_and_remember, of_block, *modules, blocks[follows].attention))
            else:
                self._blocks.append(Call(_run_block, of_block, *modules))
        self._layers: Sequence[LayerPast] = ()
        self._done = 0

    def __call__(self, cache: KeyValueCache, tokens: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        past = cache.past(counts, tokens.shape[1])
        self._layers, self._done = past.layers, 0
        direction, log_norm = self.model.trunk(
            tokens, past=past, run_block=self._run_block, enter=self._enter
        ).split()
        cache.advance(counts)
        direction, log_norm = direction[:, 0], log_norm[:, 0]
        return self._readout(direction, log_norm), log_norm

    def _run_block(self, block: Any, *arguments: Any) -> Any:
        state, reading, gain, _, _, _, cos, sin, _, past, skips = arguments
        run = self._blocks[self._done]
        self._done += 1
        if skips is None:
            return run(state, reading, gain, cos, sin, past)
        if self._done == 1:
            self._first_remember(reading, cos, sin, past)
        past, skips = past._replace(written=True), skips._replace(execution="branched")
        return run(state, reading, gain, cos, sin, past, skips, self._next_past())

    def _next_past(self) -> LayerPast:
        """Past of the next block; after the last block the first one's, in the slot that nobody reads."""
        if self._done < len(self._blocks):
            return self._layers[self._done]
        unread = self._layers[0].keys.shape[2] - 1
        return self._layers[0]._replace(slots=torch.full_like(self._layers[0].slots, unread))


_steps: WeakKeyDictionary[KeyValueCache, _Step] = WeakKeyDictionary()


def _run_block(
    block: Any,
    first: Any,
    second: Any,
    following: Any,
    state: Any,
    reading: Tensor,
    gain: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    past: LayerPast,
    skips: Any = None,
) -> Any:
    return block.forward(state, reading, gain, first, second, following, cos, sin, None, past, skips)


def _run_and_remember(
    block: Any,
    first: Any,
    second: Any,
    following: Any,
    next_attention: Any,
    state: Any,
    reading: Tensor,
    gain: Tensor,
    cos: Tensor,
    sin: Tensor,
    past: LayerPast,
    skips: Any,
    next_past: LayerPast,
) -> Any:
    result = _run_block(block, first, second, following, state, reading, gain, cos, sin, past, skips)
    next_attention.remember(result[1], cos, sin, next_past)
    return result


def _remember(attention: Any, reading: Tensor, cos: Tensor, sin: Tensor, past: LayerPast) -> None:
    attention.remember(reading, cos, sin, past)


def _enter(stream: Any, embedding: Tensor) -> Any:
    return stream.enter(embedding)


def _read_out(readout: Any, direction: Tensor, log_norm: Tensor) -> Tensor:
    return readout(direction, log_norm)
