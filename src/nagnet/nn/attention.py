"""Causal self-attention: rotary positions, normalised queries and keys, grouped KV heads, sliding windows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from nagnet.nn.projection import Projection
from nagnet.nn.rotary import apply_rotary
from nagnet.nn.scale import LearnedScale
from nagnet.ops import reference
from nagnet.typing import Float


class LayerPast(NamedTuple):
    """What one layer keeps of earlier tokens, and where the tokens of this pass belong in it.

    Attributes:
        keys, values: [B, G, S + 1, k], written in place. Slots 0..S-1 hold positions in their order; slot S takes what
            is written for padding and is never read.
        slots: int64 [B, T], the slot of each token of this pass, S for padding.
        allowed: bool [B, 1, T, S], the slots that each token sees; None where every token sees all.
    """

    keys: Tensor
    values: Tensor
    slots: Tensor
    allowed: Tensor | None

    def write(self, k: Float[Tensor, "b g t k"], v: Float[Tensor, "b g t k"]) -> None:
        """Keeps keys and values of this pass's tokens; all that a token costs which nobody asks anything else of."""
        # All indices at once and no view: of these a compiler writes in place, of others it copies the whole.
        sequences = torch.arange(k.shape[0], device=k.device).view(-1, 1, 1)
        heads = torch.arange(k.shape[1], device=k.device).view(-1, 1)
        slots = self.slots.unsqueeze(1)
        self.keys[sequences, heads, slots] = k
        self.values[sequences, heads, slots] = v

    def attend(self, q: Float[Tensor, "b h t k"]) -> Float[Tensor, "b h t k"]:
        """Softmax attention of queries [B, H, T, k] to the slots that they see."""
        return grouped_attention(q, self.keys[:, :, :-1], self.values[:, :, :-1], self.allowed)


class Past(NamedTuple):
    """Where the tokens of one pass stand, and what each layer keeps of earlier ones.

    Attributes:
        positions: int64 [B, T]. end: above all of them.
        layers: one a block.
    """

    positions: Tensor
    end: int
    layers: Sequence[LayerPast]


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
    heads = q.shape[1] // k.shape[1]
    if allowed is not None and q.shape[2] > 1:
        allowed = allowed.repeat(1, 1, heads, 1)
    queries = q.reshape(q.shape[0], k.shape[1], heads * q.shape[2], q.shape[3])
    return nn.functional.scaled_dot_product_attention(queries, k, v, attn_mask=allowed).reshape(q.shape)


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
    position = torch.arange(q.shape[2], device=q.device)
    distance = position.unsqueeze(1) - position
    allowed = distance >= 0
    if window is not None:
        allowed = allowed & ((distance < window) | (window <= 0))
    allowed = allowed[None, None]
    if key_mask is None:
        return attention(q, k, v, attn_mask=allowed, enable_gqa=grouped)
    hidden = ~key_mask[:, None, :, None]
    k, v = k.masked_fill(hidden, 0.0), v.masked_fill(hidden, 0.0)
    allowed = allowed & key_mask[:, None, None, :]
    alive = allowed.any(dim=-1, keepdim=True)  # a row without keys would be 0/0: let it see all, then drop it
    mixed = attention(q, k, v, attn_mask=allowed | ~alive, enable_gqa=grouped)
    return mixed.masked_fill(~alive, 0.0)


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

    def keys_and_values(self, x: Float[Tensor, "b t d"], cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, [B, G, T, k] each, of readings [B, T, d]."""
        k = self._normalise(self.k_proj(x), cos, sin)
        return k.transpose(1, 2), self._heads(self.v_proj(x)).transpose(1, 2).to(k.dtype)

    def forward(
        self,
        x: Float[Tensor, "b t d"],
        cos: Tensor,
        sin: Tensor,
        key_mask: Tensor | None = None,
        past: LayerPast | None = None,
    ) -> Float[Tensor, "b t d"]:
        """Returns the branch [B, T, d].

        Args:
            x: readings [B, T, d]. cos, sin: rotary tables [T, k/2] or [B, T, k/2].
            key_mask: bool [B, T], False hides a position; for a pass without a past.
            past: earlier tokens, to which those of this pass are added. It knows the window.
        """
        q = self.queries(x, cos, sin)
        k, v = self.keys_and_values(x, cos, sin)
        if past is None:
            mixed = causal_attention(q, k, v, self.window, key_mask)
        else:
            past.write(k, v)
            mixed = past.attend(q)
        return self.out_proj(mixed.transpose(1, 2).flatten(-2))
