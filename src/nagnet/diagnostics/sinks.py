"""Attention sinks: how much of the attention falls on the first keys, by layer.

The probabilities are formed again from what each attention read, outside the model's forward code. Needs torch alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from nagnet.diagnostics.geometry import by_quarter, check_tokens
from nagnet.diagnostics.probe import UpdateStep, observe_updates, tokens_that_ran
from nagnet.nn.attention import Attention, causal_mask
from nagnet.ops import reference

FIRST_KEYS = 4
SINK_SHARE = 0.5  # of a layer's attention on key 0, above which it is counted


@dataclass(frozen=True)
class AttentionSinks:
    """Where attention goes, averaged over sequences and heads; queries from position 1 on.

    A token that skips an attention asks nothing there and is left out of that layer's mean.

    Attributes:
        first_key: mass on key 0, mean over queries, float64 [layers]; NaN for sequences of one token.
        first_four: mass on keys 0 to 3. diagonal: mass of each query on its own position.
        maps: probabilities [layers, T, T], queries by keys, float32; rows of position 0 included.
    """

    first_key: Tensor
    first_four: Tensor
    diagonal: Tensor
    maps: Tensor

    @property
    def layers_above_half(self) -> int:
        """Layers with more than half of their attention on key 0."""
        return int((self.first_key > SINK_SHARE).sum())

    @property
    def quartiles(self) -> dict[str, list[float]]:
        """Means over each quarter of the depth, first to last; NaN for a quarter without layers."""
        columns = {"first_key": self.first_key, "first_four": self.first_four, "diagonal": self.diagonal}
        return {name: by_quarter(values.tolist()) for name, values in columns.items()}


def attention_sinks(model: Any, tokens: Tensor) -> AttentionSinks:
    """Measures the attention mass on the first keys, for any residual rule.

    Args:
        model: a `nagnet.Decoder`. tokens: [B, T] integers.

    Raises:
        UserError: if ``tokens`` is not a non-empty [B, T].
    """
    check_tokens(tokens)
    maps: list[Tensor] = []

    def observer(step: UpdateStep) -> None:
        if step.index % 2:
            attention = model.blocks[step.index // 2].attention
            ran = tokens_that_ran(model, step)
            cos, sin = model.rotary(tokens.shape[1])
            maps.append(_mean_probabilities(attention, step.reading, cos, sin, ran))

    with observe_updates(model, observer):
        model.trunk(tokens)
    by_layer = torch.stack(maps).cpu()
    asked = by_layer[:, 1:].double()
    rows = asked.shape[1]
    return AttentionSinks(
        first_key=_mean(asked[..., :1].sum(dim=-1)),
        first_four=_mean(asked[..., :FIRST_KEYS].sum(dim=-1)),
        diagonal=_mean(asked.diagonal(offset=1, dim1=-2, dim2=-1)) if rows else _mean(asked[..., 0]),
        maps=by_layer,
    )


def _mean(rows: Tensor) -> Tensor:
    """Over queries [layers, T - 1]; a position that no token asked from is left out."""
    return rows.nanmean(dim=1)


def _mean_probabilities(attention: Attention, reading: Tensor, cos: Tensor, sin: Tensor, ran: Tensor) -> Tensor:
    """Attention probabilities [T, T], mean over sequences and heads; NaN where no token of a position ran."""
    q = attention.queries(reading, cos, sin)
    k, _ = attention.keys_and_values(reading, cos, sin)
    dtype = reference.compute_dtype(q)
    q, k = q.to(dtype), k.to(dtype).repeat_interleave(q.shape[1] // k.shape[1], dim=1)
    total = cast(Tensor, 0.0)
    for queries, keys, run in zip(q, k, ran, strict=True):  # one sequence at a time: [H, T, T] is small
        scores = queries @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])
        allowed = causal_mask(q.shape[2], q.device, attention.window)[0, 0]
        mean = scores.masked_fill(~allowed, -math.inf).softmax(dim=-1).mean(dim=0)
        total = total + mean * run.unsqueeze(-1)
    return total / ran.sum(dim=0).unsqueeze(-1)
