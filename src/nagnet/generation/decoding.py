"""One token a sequence: the step that generation repeats, as it is and compiled."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from nagnet import ops
from nagnet.generation.cache import KeyValueCache, extend
from nagnet.generation.graph import Call, tensors_in
from nagnet.models.config import ModelConfig
from nagnet.models.decoder import Decoder
from nagnet.nn.attention import LayerPast, Past
from nagnet.nn.precision import product_dtype
from nagnet.nn.skip import SkipsInForce, count_
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

    The first call takes some twenty seconds, in later processes five: torch caches what it compiled.
    """
    step = cache.compiled_step
    if step is None or not step.serves(model):
        step = cache.compiled_step = _Step(model, cache)
    return step(cache, tokens, counts)


class _InForce(NamedTuple):
    """What may change from one step to the next."""

    stream_dtype: torch.dtype
    backend: str
    skips: bool
    replaced_scores: bool


class _Kind(NamedTuple):
    """All that a graph depends on beside the values of a step's tensors and the length of its cache."""

    config: ModelConfig
    dtype: torch.dtype
    device: str
    batch_size: int
    in_force: _InForce
    d_ff: int = 0
    n_positions: int = 0


class _Step:
    """The compiled step of one model and cache: which graph each block has, and the tensors it takes from its modules.

    What it does in Python takes most of its time from a step that skips all: the weights have driven that code out of
    the processor's caches. So it asks modules for little, and hands plain tensors from graph to graph.
    """

    def __init__(self, model: Decoder, cache: KeyValueCache):
        blocks: list[Any] = list(model.blocks)
        updates = list(model.stream.updates)
        self._model, self._skipping = model, model.skipping
        self._weight = blocks[0].attention.q_proj.weight
        self._in_force = self._now()
        model.rotary.reserve(cache.capacity)  # its tables are those that the graphs keep
        kind = _Kind(model.config, cache.dtype, str(cache.device), len(cache.lengths), self._in_force)
        skips = self._skipping is not None
        of_start = kind._replace(n_positions=len(model.rotary.cos))
        self._enter = Call(_enter_and_remember if skips else _enter, of_start, model)
        self._read_out = Call(_read_out_and_count if skips else read_out, kind, model.readout)
        shape = len(blocks), 2, kind.batch_size, 1
        self._ran = torch.empty(shape, dtype=torch.bool, device=cache.device)  # what was decided
        self._ran_of_blocks = self._ran.unbind()
        self._unread = torch.full((kind.batch_size, 1), cache.capacity, device=cache.device)
        self._is_prepared = False
        self._blocks = []
        for index, block in enumerate(blocks):
            # Nobody reads what follows the last block; with any modules for it, all blocks have one graph.
            follows = index + 1 if index + 1 < len(blocks) else 0
            modules = (block, updates[2 * index], updates[2 * index + 1], updates[2 * follows])
            of_block = kind._replace(d_ff=block.mlp.out_proj.in_features)
            # A branch of a graph cannot read what the graph has written: keys and values come from the graph before.
            if skips:
                self._blocks.append(Call(_run_and_remember, of_block, *modules, blocks[follows].attention))
            else:
                self._blocks.append(Call(_run_block, of_block, *modules))

    def _now(self) -> _InForce:
        skipping = self._skipping
        replaced = skipping is not None and skipping.replaced is not None
        return _InForce(product_dtype(self._weight), ops.get_backend(), skipping is not None, replaced)

    def serves(self, model: Decoder) -> bool:
        """Whether it is a step of this model as it is now."""
        return self._model is model and self._skipping is model.skipping and self._in_force == self._now()

    def __call__(self, cache: KeyValueCache, tokens: Tensor, counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        self._model.check_tokens(tokens)
        past = cache.past(counts, tokens.shape[1])
        if not self._is_prepared:
            self._prepare(tokens, past)
        n_tensors = 4 if past.layers[0].allowed is None else 5  # as `tensors_in`, without asking each
        layers: list[Any] = [layer[:n_tensors] for layer in past.layers]
        *carried, cos, sin = self._enter.run([tokens, past.positions, *layers[0]])
        for run, further in zip(self._blocks, self._further(past.positions.shape, layers), strict=True):
            carried = run.run([*carried, cos, sin, *further])
        counted = () if self._skipping is None else (self._skipping.counts, self._ran, past.is_token)
        logits, log_norm = self._read_out.run([*carried[: self._n_state], *counted])
        cache.advance(counts)
        return logits, log_norm

    def _prepare(self, tokens: Tensor, past: Past) -> None:
        """Compiles the graphs that are not there yet, for inputs like these."""
        skipping = self._skipping
        entered, cos, sin = self._enter(tokens, past.positions, past.layers[0])
        for index, run in enumerate(self._blocks):
            further: tuple[Any, ...] = (past.layers[index],)
            if skipping is not None:
                in_force = skipping.in_force(index, past.positions.shape)._replace(execution="branched")
                written = past.layers[index]._replace(written=True)
                further = written, in_force, self._ran_of_blocks[index], past.layers[0]
            run.prepare(*entered, cos, sin, *further)
        counted = () if skipping is None else (skipping.counts, self._ran, past.is_token)
        self._read_out.prepare(entered[0], *counted)
        self._n_state = len(tensors_in(entered[0]))
        self._is_prepared = True

    def _further(self, shape: torch.Size, layers: list[Any]) -> Iterator[Sequence[Tensor]]:
        """The tensors of what each block takes beside the stream and its position, in the order of `_prepare`."""
        skipping = self._skipping
        if skipping is None:
            yield from layers
            return
        # Nobody asks for what follows the last block: keys and values of the first, in the slot that nobody reads.
        keys, values, _, *seen = layers[0]
        following = [*layers[1:], (keys, values, self._unread, *seen)]
        threshold, replaced = skipping.threshold, skipping.replaced
        for index, layer in enumerate(layers):
            scores = () if replaced is None else (replaced(index, shape),)
            yield [*layer, threshold, *scores, self._ran_of_blocks[index], *following[index]]


def _enter(model: Any, tokens: Tensor, positions: Tensor, past: LayerPast) -> Any:
    """What the first block takes."""
    return model.stream.enter(model.embed(tokens)), *model.rotary.at(positions)


def _enter_and_remember(model: Any, tokens: Tensor, positions: Tensor, past: LayerPast) -> Any:
    entered, cos, sin = _enter(model, tokens, positions, past)
    model.blocks[0].attention.remember(entered[1], cos, sin, past)
    return entered, cos, sin


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
    ran: Tensor,
    next_past: LayerPast,
) -> Any:
    *carried, decisions = block.forward(state, reading, gain, first, second, following, cos, sin, None, past, skips)
    next_attention.remember(carried[1], cos, sin, next_past)
    for sublayer, decision in enumerate(decisions):
        ran[sublayer].copy_(decision.run)
    return carried


def read_out(readout: Any, state: Any) -> tuple[Tensor, Tensor]:
    """Logits [B, V] and log norm [B], as `decode` returns them, of the state of one token a sequence."""
    direction, log_norm = state.split()
    direction, log_norm = direction[:, 0], log_norm[:, 0]
    return readout(direction, log_norm), log_norm


def _read_out_and_count(readout: Any, state: Any, counts: Tensor, ran: Tensor, is_token: Tensor) -> Any:
    count_(counts, ran.flatten(0, 1), is_token)
    return read_out(readout, state)
