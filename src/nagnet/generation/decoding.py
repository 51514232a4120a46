"""One token a sequence: the step that generation repeats, as it is and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
from nagnet.nn.skip import SkipsInForce
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
    """`decode` compiled: one graph serves all blocks and lengths of a batch size, and two the ends of the stream.

    Where tokens can skip sublayers, a fourth serves the keys and values of the first block.

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
        self._is_prepared = False
        self._counts = (
            [] if model.skipping is None else [model.skipping.counts_of(index) for index in range(len(blocks))]
        )
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
        model = self.model
        past = cache.past(counts, tokens.shape[1])
        cos, sin = model.rotary.at(past.positions, past.end)
        entered = state, reading, _ = self._enter(model.embed(tokens))
        if self.kind.skips:
            self._remember(reading, cos, sin, past.layers[0])
        if not self._is_prepared:
            self._prepare(entered, cos, sin, past)
        carried = tensors_in(entered)
        for run, further in zip(self._blocks, self._further(past), strict=True):
            carried = run.run([*carried, cos, sin, *further])
        cache.advance(counts)
        return self._read_out(like(state, carried[: len(state)]))

    def _prepare(self, entered: Any, cos: Tensor, sin: Tensor, past: Past) -> None:
        """Compiles the graphs of the blocks that are not there yet, for inputs like these."""
        skipping = self.model.skipping
        for index, run in enumerate(self._blocks):
            further: tuple[Any, ...] = (past.layers[index],)
            if skipping is not None:
                in_force = skipping.in_force(index, past.positions.shape)._replace(execution="branched")
                written = past.layers[index]._replace(written=True)
                further = written, in_force, past.is_token, self._counts[index], past.layers[0]
            run.prepare(*entered, cos, sin, *further)
        self._is_prepared = True

    def _further(self, past: Past) -> Iterator[list[Tensor]]:
        """The tensors of what each block takes beside the stream and its position, in the order of `_prepare`."""
        layers, skipping = [tensors_in(layer) for layer in past.layers], self.model.skipping
        if skipping is None:
            yield from layers
            return
        # Nobody asks for what follows the last block: keys and values of the first, in the slot that nobody reads.
        first = past.layers[0]
        unread = torch.full_like(first.slots, first.keys.shape[2] - 1)
        following = [*layers[1:], tensors_in(first._replace(slots=unread))]
        for index, layer in enumerate(layers):
            in_force = tensors_in(skipping.in_force(index, past.positions.shape))
            yield [*layer, *in_force, past.is_token, self._counts[index], *following[index]]


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
) -> Any:
    return block.forward(state, reading, gain, first, second, following, cos, sin, None, past)[:-1]


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
    skips: SkipsInForce,
    is_token: Tensor,
    counts: Tensor,
    next_past: LayerPast,
) -> Any:
    *carried, decisions = block.forward(state, reading, gain, first, second, following, cos, sin, None, past, skips)
    next_attention.remember(carried[1], cos, sin, next_past)
    counts += torch.stack([torch.stack([is_token.sum(), (each.run & is_token).sum()]) for each in decisions], dim=1)
    return carried


def _remember(attention: Any, reading: Tensor, cos: Tensor, sin: Tensor, past: LayerPast) -> None:
    attention.remember(reading, cos, sin, past)


def _read_out(readout: Any, state: Any) -> tuple[Tensor, Tensor]:
    direction, log_norm = state.split()
    direction, log_norm = direction[:, 0], log_norm[:, 0]
    return readout(direction, log_norm), log_norm


_steps: WeakKeyDictionary[KeyValueCache, _Step] = WeakKeyDictionary()
