"""One token a sequence: the step that generation repeats, as it is and compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from nagnet import ops
from nagnet.generation.cache import KeyValueCache, extend
from nagnet.generation.graph import Call, like, tensors_in
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.attention import LayerPast, Past
from nagnet.nn.skip import Skipping
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
        self._remember = Call(_remember, kind, blocks[0].attention)
        self._read_out = Call(_read_out, kind, model.readout)
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

    def __call__(self, cache: KeyValueCache, tokens: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Blocks are called with the plain tensors that the block before has returned: what Python does between two
        graphs waits for its own code, which the weights have driven out of the processor's caches."""
        model, skipping = self.model, self.model.skipping
        past = cache.past(counts, tokens.shape[1])
        cos, sin = model.rotary.at(past.positions, past.end)
        example = state, reading, _ = self._enter(model.embed(tokens))
        carried, runs = tensors_in(example), []
        if skipping is not None:
            self._remember(reading, cos, sin, past.layers[0])
        for index, run in enumerate(self._blocks):
            further = (past.layers[index],) if skipping is None else self._skips(skipping, index, past, tokens.shape)
            run.prepare(*example, cos, sin, *further)
            found = run.run([*carried, cos, sin, *tensors_in(further)])
            carried, decided = found[: len(carried)], found[len(carried) :]
            runs += decided
        if skipping is not None:
            skipping.count(runs, past.is_token)
        cache.advance(counts)
        return self._read_out(like(state, carried[: len(state)]))

    def _skips(self, skipping: Skipping, index: int, past: Past, shape: torch.Size) -> tuple[Any, ...]:
        """What a block takes that can skip: its past, written already, how to decide, and the past of the next block.

        After the last block that is the first one's, in the slot that nobody reads.
        """
        layers = past.layers
        if index + 1 < len(layers):
            following = layers[index + 1]
        else:
            unread = layers[0].keys.shape[2] - 1
            following = layers[0]._replace(slots=torch.full_like(layers[0].slots, unread))
        in_force = skipping.in_force(index, shape)._replace(execution="branched")
        return layers[index]._replace(written=True), in_force, following


def _enter(stream: Any, embedding: Tensor) -> Any:
    return stream.enter(embedding)


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
    *carried, decisions = block.forward(state, reading, gain, first, second, following, cos, sin, None, past, skips)
    return *carried, [decision.run for decision in decisions]


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


def _read_out(readout: Any, state: Any) -> tuple[Tensor, Tensor]:
    direction, log_norm = state.split()
    direction, log_norm = direction[:, 0], log_norm[:, 0]
    return readout(direction, log_norm), log_norm


_steps: WeakKeyDictionary[KeyValueCache, _Step] = WeakKeyDictionary()
