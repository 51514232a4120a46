"""Causal self-attention: rotary positions, normalised queries and keys, grouped KV heads, sliding windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nagnet.nn.projection import Projection
from nagnet.nn.rotary import apply_rotary
from nagnet.nn.scale import LearnedScale
from nagnet.nn.skip import Decision, between_graphs, drop_skipped, nobody_needs, run_if_any, running_rows, spread, take
from nagnet.ops import reference
from nagnet.ops.matvec import computed_once
from nagnet.typing import Bool, Float

QUERY_CHUNK = 128  # queries whose scores are formed at a time: the keys after the last of them cost nothing


class LayerPast(NamedTuple):
    """What one layer keeps of earlier tokens, and where the tokens of this pass belong in it.

    Attributes:
        keys, values: [B, G, C + 1, k], written in place. Slots 0..C-1 hold positions in their order; slot C takes what
            is written for padding and is never read.
        slots: int64 [B, T], the slot of each token of this pass, C for padding.
        ruler: [f + 1, S + 1, 0]. It has no elements, its sizes say what this pass may see: S slots from slot f on. So
            a compiled graph is given the same keys and values at every step, and neither number as a constant.
        allowed: bool [B, 1, T, S], which of these each token sees; None where every token sees all.
        written: whether keys and values hold the tokens of this pass already.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    ruler: Tensor
    allowed: Tensor | None
    written: bool = False

    def write(self, k: Float[Tensor, "b g t k"], v: Float[Tensor, "b g t k"]) -> None:
        """Keeps keys and values of this pass's tokens; all that a token costs which nobody asks anything else of."""
        # All indices at once and no view: of these a compiler writes in place, of others it copies the whole.
        sequences = torch.arange(k.shape[0], device=k.device).view(-1, 1, 1)
        heads = torch.arange(k.shape[1], device=k.device).view(-1, 1)
        slots = self.slots.unsqueeze(1)
        self.keys[sequences, heads, slots] = k
        self.values[sequences, heads, slots] = v

    def seen(self) -> tuple[Float[Tensor, "b g s k"], Float[Tensor, "b g s k"]]:
        """Keys and values [B, G, S, k] of all tokens that those of this pass may see, themselves included."""
        first, n_slots = (size - 1 for size in self.ruler.shape[:2])
        return self.keys.narrow(2, first, n_slots), self.values.narrow(2, first, n_slots)


class Past(NamedTuple):
    """Where the tokens of one pass stand, and what each layer keeps of earlier ones.

    Attributes:
        positions: int64 [B, T]. end: above all of them.
        layers: one a block.
        is_token: bool [B, T], False for padding.
    """

    positions: Tensor
    end: int
    layers: Sequence[LayerPast]
    is_token: Tensor


def grouped_attention(
    q: Float[Tensor, "b h t k"],
    k: Float[Tensor, "b g s k"],
    v: Float[Tensor, "b g s k"],
    allowed: Tensor | None = None,
) -> Float[Tensor, "b h t k"]:
    """Softmax attention where the query heads of a group are further queries to the keys of one head.

    Args:
        q: [B, H, T, k]. k, v: [B, G, S, k], G dividing H; never copied for the heads of a group.
        allowed: bool [B, 1, T, S], at least one key a query; None: every query sees all.
    """
    if q.shape[2] == 1 and q.device.type == "cpu" and torch.compiler.is_compiling():
        return one_query_attention(q, k, v, allowed)
    heads = q.shape[1] // k.shape[1]
    if allowed is not None and q.shape[2] > 1:
        allowed = allowed.repeat(1, 1, heads, 1)
    queries = q.reshape(q.shape[0], k.shape[1], heads * q.shape[2], q.shape[3])
    return nn.functional.scaled_dot_product_attention(queries, k, v, attn_mask=allowed).reshape(q.shape)


def one_query_attention(
    q: Float[Tensor, "b h one k"],
    k: Float[Tensor, "b g s k"],
    v: Float[Tensor, "b g s k"],
    allowed: Tensor | None = None,
) -> Float[Tensor, "b h one k"]:
    """`grouped_attention` of one query a sequence, formed in float32 or wider; to be traced by a compiler.

    For one query the library's kernel takes two to three times as long as reading the keys and values, in bfloat16
    more; the loops that a compiler makes of this stay near it (records/0013-decoding).

    Args:
        q: [B, H, 1, k]. k, v: [B, G, S, k], G dividing H. allowed: bool [B, 1, 1, S], at least one key a query.

    Returns:
        [B, H, 1, k] in the type of ``q``.
    """
    dtype = reference.compute_dtype(q, k, v)
    queries = q.to(dtype).unflatten(1, (k.shape[1], -1)) * q.shape[-1] ** -0.5  # [B, G, H/G, 1, k]
    scores = (computed_once(queries) * k.to(dtype).unsqueeze(2)).sum(dim=-1)
    if allowed is not None:
        scores = scores.masked_fill(~allowed, -torch.inf)  # [B, 1, 1, S] against [B, G, H/G, S]
    weights = torch.exp(scores - scores.amax(dim=-1, keepdim=True))  # of a softmax, but for their sum
    mixed = (weights.unsqueeze(-1) * v.to(dtype).unsqueeze(2)).sum(dim=-2)
    return (mixed / weights.sum(dim=-1, keepdim=True)).to(q.dtype).view(q.shape)


def causal_mask(
    length: int, device: torch.device, window: Tensor | None = None, key_mask: Tensor | None = None
) -> Bool[Tensor, "b 1 t t"]:
    """Which keys each query may see, bool [B or 1, 1, T, T]; arguments as `causal_attention`."""
    position = torch.arange(length, device=device)
    distance = position.unsqueeze(1) - position
    allowed = distance >= 0
    if window is not None:
        allowed = allowed & ((distance < window) | (window <= 0))
    allowed = allowed[None, None]
    return allowed if key_mask is None else allowed & key_mask[:, None, None, :]


def hide(x: Float[Tensor, "b g t k"], key_mask: Tensor | None) -> Float[Tensor, "b g t k"]:
    """Keys or values without what hidden positions hold, which may be 1e30 or NaN."""
    return x if key_mask is None else x.masked_fill(~key_mask[:, None, :, None], 0.0)


def causal_attention(
    q: Float[Tensor, "b h t k"],
    k: Float[Tensor, "b g t k"],
    v: Float[Tensor, "b g t k"],
    window: Tensor | None = None,
    key_mask: Tensor | None = None,
) -> Float[Tensor, "b h t k"]:
    """Softmax attention of each position to itself and the past.

    Args:
        q: queries [B, H, T, k]; ``k``, ``v`` [B, G, T, k], G dividing H.
        window: int scalar tensor; a query sees this many latest positions, itself included. None or <= 0: all.
        key_mask: bool [B, T]; False hides a position from every query, whatever its K and V hold (1e30, NaN).

    Returns:
        [B, H, T, k]; zero for a query that sees no key.
    """
    grouped = q.shape[1] != k.shape[1]
    attention = nn.functional.scaled_dot_product_attention
    if window is None and key_mask is None:
        return attention(q, k, v, is_causal=True, enable_gqa=grouped)
    allowed = causal_mask(q.shape[2], q.device, window, key_mask)
    if key_mask is None:
        return attention(q, k, v, attn_mask=allowed, enable_gqa=grouped)
    alive = allowed.any(dim=-1, keepdim=True)  # a row without keys would be 0/0: let it see all, then drop it
    k, v = hide(k, key_mask), hide(v, key_mask)
    mixed = attention(q, k, v, attn_mask=allowed | ~alive, enable_gqa=grouped)
    return mixed.masked_fill(~alive, 0.0)


def packed_attention(
    q: Float[Tensor, "n h k"],
    k: Float[Tensor, "b g s k"],
    v: Float[Tensor, "b g s k"],
    run: Bool[Tensor, "b t"],
    allowed: Bool[Tensor, "c 1 t s"],
) -> Float[Tensor, "n h k"]:
    """Softmax attention of the queries of some tokens alone.

    Args:
        q: [n, H, k], of the tokens that run, sequence after sequence. k, v: [B, G, S, k], of all tokens.
        run: bool [B, T], n of them true. allowed: bool [B or 1, 1, T, S], the keys that each token may see.

    Returns:
        [n, H, k]; zero for a query that sees no key.
    """
    counts = run.sum(dim=1)
    width = max(1, int(counts.max()))
    # Of each sequence the running tokens first, in order. Shorter sequences are filled up with queries of zero.
    order = (~run).to(torch.uint8).argsort(dim=1, stable=True)[:, :width]
    filled = torch.arange(width, device=q.device) < counts.unsqueeze(1)
    places_of_q = running_rows(filled)
    queries = q.new_zeros(order.numel(), *q.shape[1:]).index_copy(0, places_of_q, q).unflatten(0, order.shape)
    queries = queries.transpose(1, 2)
    places = order[:, None, :, None].expand(-1, 1, -1, allowed.shape[-1])
    seen = allowed.expand(len(run), -1, -1, -1).gather(2, places) & filled[:, None, :, None]
    alive = seen.any(dim=-1, keepdim=True)
    key_numbers = torch.arange(1, seen.shape[-1] + 1, device=q.device)
    ends = (seen.any(dim=0) * key_numbers).amax(dim=-1).flatten().tolist()  # of the keys seen by a column of queries
    parts = []
    for start in range(0, width, QUERY_CHUNK):
        part = slice(start, start + QUERY_CHUNK)
        n_keys = max(1, *ends[part])
        mask = (seen | ~alive)[:, :, part, :n_keys]
        parts.append(grouped_attention(queries[:, :, part], k[:, :, :n_keys], v[:, :, :n_keys], mask))
    mixed = torch.cat(parts, dim=2).masked_fill(~alive, 0.0).transpose(1, 2)
    return mixed.flatten(0, 1).index_select(0, places_of_q)


class Attention(nn.Module):
    """Causal multi-head attention without biases; queries and keys have RMS ``qk_gain`` per head.

    Args:
        d_model: width d. n_heads: H. n_kv_heads: G, dividing H. head_dim: k.
        qk_gain: RMS of queries and keys after their norm.
        window: latest positions a query sees, 0 for all; None when no layer of the model has a window.
        channel_scales: whether ``qk_gain`` is only where a learned scale per channel starts, one [k] for each key
            head and the queries of its group (s_qk of arXiv 2410.01131).
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        n_kv_heads: int,
        head_dim: int,
        qk_gain: float,
        window: int | None = None,
        channel_scales: bool = False,
    ):
        super().__init__()
        self.head_dim = head_dim
        self.qk_gain = qk_gain
        self.q_proj = Projection(d_model, n_heads * head_dim)
        self.k_proj = Projection(d_model, n_kv_heads * head_dim)
        self.v_proj = Projection(d_model, n_kv_heads * head_dim)
        self.out_proj = Projection(n_heads * head_dim, d_model)
        self.qk_scale = LearnedScale(n_kv_heads * head_dim, qk_gain, d_model**-0.5) if channel_scales else None
        self.window: Tensor | None
        # A tensor and not a number, so that layers with different windows share one compiled block.
        self.register_buffer("window", None if window is None else torch.tensor(window), persistent=False)
        self._window_length = window

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Writes the window anew, where it was left empty."""
        if self.window is not None and self._window_length is not None:
            self.window.fill_(self._window_length)

    def _heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, self.head_dim))

    def _normalise(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        heads = reference.rms_norm(apply_rotary(self._heads(x), cos, sin))
        if self.qk_scale is None:
            return heads * self.qk_gain
        gain = self._heads(self.qk_scale().to(heads.dtype))
        return heads * gain.repeat_interleave(heads.shape[-2] // gain.shape[0], dim=0)

    def queries(self, x: Float[Tensor, "b t d"], cos: Tensor, sin: Tensor) -> Float[Tensor, "b h t k"]:
        """Queries [B, H, T, k] of readings [B, T, d]."""
        return self._normalise(self.q_proj(x), cos, sin).transpose(1, 2)

    def queries_of_rows(
        self, x: Float[Tensor, "n d"], cos: Float[Tensor, "n p"], sin: Float[Tensor, "n p"]
    ) -> Float[Tensor, "n h k"]:
        """Queries [n, H, k] of single tokens, each with its own row of the rotary tables."""
        return self._normalise(self.q_proj(x), cos, sin)

    def keys_and_values(self, x: Float[Tensor, "b t d"], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, [B, G, T, k] each, of readings [B, T, d]."""
        k = self._normalise(self.k_proj(x), cos, sin)
        return k.transpose(1, 2), self._heads(self.v_proj(x)).transpose(1, 2).to(k.dtype)

    def remember(
        self, x: Float[Tensor, "b t d"], cos: Tensor, sin: Tensor, past: LayerPast | None
    ) -> tuple[Tensor, Tensor]:
        """Keys and values that the queries of this pass see, those of ``past`` included, to which they are added."""
        if past is None:
            return self.keys_and_values(x, cos, sin)
        if not past.written:
            past.write(*self.keys_and_values(x, cos, sin))
        return past.seen()

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        cos: Tensor,
        sin: Tensor,
        key_mask: Tensor | None = None,
        past: LayerPast | None = None,
        decision: Decision | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Returns the branch [B, T, d].

        Args:
            x: readings [B, T, d]. cos, sin: rotary tables [T, k/2] or [B, T, k/2].
            key_mask: bool [B, T], False hides a position; for a pass without a past.
            past: earlier tokens, to which those of this pass are added. It knows the window.
            decision: which tokens run; the others have a branch of zero, and keys and values all the same.
        """
        k, v = self.remember(x, cos, sin, past)
        if decision is not None and decision.execution == "packed":
            return self._packed(x, cos, sin, k, v, key_mask, past, decision.run)

        def whole(x: Tensor) -> Tensor:
            return self._branch(x, cos, sin, k, v, key_mask, past)

        if decision is None or decision.execution == "whole":
            return whole(x)
        if decision.execution == "branched":
            return run_if_any(whole, x, decision.run)
        return drop_skipped(whole(x), decision.run)

    def _branch(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        past: LayerPast | None,
    ) -> Tensor:
        q = self.queries(x, cos, sin)
        if past is None:
            mixed = causal_attention(q, k, v, self.window, key_mask)
        else:
            # Not k and v: a branch of a graph (run_if_any) is given no tensor that is one slot shorter than another.
            mixed = grouped_attention(q, *past.seen(), past.allowed)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2))

    @between_graphs
    def _packed(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        k: Tensor,
        v: Tensor,
        key_mask: Tensor | None,
        past: LayerPast | None,
        run: Tensor,
    ) -> Tensor:
        """The branch where queries, scores and the output projection are formed for the tokens that run alone."""
        n_running = int(run.sum())
        if n_running == run.numel():
            return self._branch(x, cos, sin, k, v, key_mask, past)
        if nobody_needs(n_running) or (n_running == 0 and past is not None):
            return torch.zeros_like(x)
        rows = running_rows(run)
        q = self.queries_of_rows(take(x, rows), *(take(table.expand(*run.shape, -1), rows) for table in (cos, sin)))
        if past is None:
            k, v = hide(k, key_mask), hide(v, key_mask)
            mixed = packed_attention(q, k, v, run, causal_mask(run.shape[1], x.device, self.window, key_mask))
        else:
            assert past.allowed is not None  # but for one token alone, and that runs or not
            mixed = packed_attention(q, k, v, run, past.allowed)
        return spread(self.out_proj(mixed.flatten(-2)), rows, x)
