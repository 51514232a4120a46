"""One token a sequence: the step that generation repeats, as it is and compiled."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from nagnet.generation.cache import KeyValueCache, extend
from nagnet.models.decoder import GRAPHS_PER_WIDTH, Decoder
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


def decode_compiled(
    model: Decoder, cache: KeyValueCache, tokens: Int[Tensor, "b one"], counts: Sequence[int]
) -> tuple[Float[Tensor, "b v"], Float[Tensor, " b"]]:
    """`decode` compiled: two graphs serve all blocks and lengths of a batch size, one more the readout.

    The first call takes half a minute or so, later calls in other processes less: torch caches what it compiled.
    """
    limit = max(torch._dynamo.config.recompile_limit, GRAPHS_PER_WIDTH * len(set(model.config.mlp_widths)))
    with torch._dynamo.config.patch(recompile_limit=limit):
        direction, log_norm = extend(model, cache, tokens, counts, _run_compiled).split()
        direction, log_norm = direction[:, 0], log_norm[:, 0]
        return _compiled(_read_out)(model.readout, direction, log_norm), log_norm


@functools.cache
def _compiled(function: Callable) -> Callable:
    return torch.compile(function, fullgraph=True)


def _run_compiled(block: Any, *arguments: Any) -> Any:
    past = arguments[-1]
    for tensor in (past.keys, past.values, past.allowed):
        if tensor is not None:
            torch._dynamo.mark_dynamic(tensor, 2 if tensor is not past.allowed else 3)
    return _compiled(_run_block)(block, *arguments)


def _run_block(block: Any, *arguments: Any) -> Any:
    return block.forward(*arguments)


def _read_out(readout: Any, direction: Tensor, log_norm: Tensor) -> Tensor:
    return readout(direction, log_norm)
